#!/usr/bin/env bash
# hapt check on files of every format as they were written once (tests/data/formats). Unchanged files are valid. Damaged, later, truncated,
# foreign and missing files are reported as such, and the commands that read them refuse them.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
formats=tests/data/formats/1

passes 1 check $formats/*.h5 $formats/*.json $formats/checkpoint
check 'each file is good' [ "$(grep -c ': good: ' "$scratch/out")" -eq "$(($(find $formats -maxdepth 1 -name '*.h5' -o -maxdepth 1 -name '*.json' | wc -l) + 1))" ]
passes 2 check $formats/model.h5 --json
check 'JSON tells what the file holds' /usr/bin/python3 -c 'import json, sys
r = json.load(open(sys.argv[1]))
f = r["files"][0]
sys.exit(not (r["good"] and f["state"] == "good" and f["kind"] == "hapt-model" and f["version"] == 1 and "2336 parameters" in f["holds"]))' "$scratch/out"
mkdir -p "$scratch/run/checkpoints"
cp $formats/run.h5 "$scratch/run"
cp -r $formats/checkpoint "$scratch/run/checkpoints/step-00000004"
passes 1 check "$scratch/run"
check 'a run is its file and its checkpoints' [ "$(grep -c good "$scratch/out")" -eq 2 ]

# One changed bit of a value, of a name or of the structure; a truncated file; a later version; no format; links to other files.
/usr/bin/python3 - $formats "$scratch" <<'P' || fail 'python'
import glob, os, shutil, sys
import h5py, numpy as np
formats, scratch = sys.argv[1:]
names = [os.path.basename(p) for p in glob.glob(formats + "/*.h5")] + ["checkpoint/manifest.h5", "checkpoint/shard-0000.h5"]
for kind in ("bit", "head", "cut", "later"):
    os.mkdir(scratch + "/" + kind)
    for name in names:
        path = scratch + "/" + kind + "/" + name.replace("checkpoint/", "")
        shutil.copy(formats + "/" + name, path)
        data = bytearray(open(path, "rb").read())
        if kind == "bit":
            with h5py.File(path) as f:
                places = []
                def look(_, item):
                    if isinstance(item, h5py.Dataset) and item.chunks and item.size:
                        places.append(item.id.get_chunk_info(0).byte_offset)
                f.visititems(look)
            data[places[len(places) // 2]] ^= 1
        if kind == "head":
            data[data.index(b"OHDR") + 30] ^= 16
        if kind == "cut":
            del data[len(data) * 2 // 3:]
        open(path, "wb").write(data)
        if kind == "later":
            with h5py.File(path, "r+") as f:
                f.attrs["version"] = np.int64(99)
with h5py.File(scratch + "/other.h5", "w") as f:
    f["x"] = [1, 2, 3]
with h5py.File(scratch + "/profile-of-others.h5", "w") as f, h5py.File(formats + "/profile.h5") as g:
    for name in g:
        g.copy(name, f)
shutil.copy(formats + "/data.h5", scratch + "/linked.h5")
with h5py.File(scratch + "/linked.h5", "r+") as f:
    f["aside"] = h5py.ExternalLink(formats + "/plan.h5", "/stage_comm")
P
count=$(find "$scratch/bit" -name '*.h5' | wc -l)
for kind in bit head cut; do
    refuses 3 "$count of $count files are not good" 1 check "$scratch/$kind"/*.h5
    check "$kind: all are damaged" [ "$(grep -c ': damaged: ' "$scratch/out")" -eq "$count" ]
done
refuses 3 'not good' 1 check "$scratch/later"/*.h5
check 'later versions are told' [ "$(grep -c ': newer: .*version 99' "$scratch/out")" -eq "$count" ]
sed 's/"version": 1/"version": 99/' $formats/cluster.json >"$scratch/later.json"
refuses 3 '5 of 6' 1 check "$scratch/later.json" "$scratch/other.h5" tests/system/formats.sh "$scratch/none.h5" "$scratch/linked.h5" "$scratch/profile-of-others.h5"
for line in 'later.json: newer' 'other.h5: foreign' 'formats.sh: foreign' 'none.h5: missing' 'linked.h5: damaged: .*another file' 'profile-of-others.h5: good: hapt-profile (of another maker)'; do
    check "check says $line" grep -q "$line" "$scratch/out"
done

# A checkpoint: a shard is damaged, replaced or missing.
for how in bit other gone later; do
    rm -rf "$scratch/c"
    cp -r $formats/checkpoint "$scratch/c"
    case $how in
    bit) cp "$scratch/bit/shard-0000.h5" "$scratch/c/" ;;
    other) cp "$scratch/c/shard-0001.h5" "$scratch/c/shard-0000.h5" ;;
    gone) rm "$scratch/c/shard-0001.h5" ;;
    later) cp "$scratch/later/manifest.h5" "$scratch/c/" ;;
    esac
    refuses 3 'not good' 1 check "$scratch/c"
    case $how in
    bit | other) check "$how" grep -qE 'damaged.*(checksum|bytes instead of)' "$scratch/out" ;;
    gone) check "$how" grep -q 'missing.*shard-0001' "$scratch/out" ;;
    later) check "$how" grep -q 'newer' "$scratch/out" ;;
    esac
done

# The readers refuse later versions of every kind.
newer() {
    refuses 3 'version' 1 "$@" && check "the hint of hapt $*" grep -q '^hint: use a newer hapt' "$scratch/err"
}
later=$scratch/later
small="gpt --layers 2 --hidden 8 --heads 2 --sequence 8 --vocab 64 --microbatch 2 --output $scratch/x.h5"
newer --input "$later/model.h5" --steps 1 --output "$scratch/x"
newer --input $formats/plain.h5 --data "$later/data.h5" --steps 1 --microbatches 2 --profile-seconds 0.1 --output "$scratch/x"
# shellcheck disable=SC2086
newer model $small --data "$later/data.h5"
# shellcheck disable=SC2086
newer model $small --weights "$later/weights.h5"
newer plan --profile "$later/profile.h5" --microbatches 2
newer profile --input $formats/plain.h5 --cluster $formats/paper.json --predict yes --efficiency "$later/efficiency.h5" --output "$scratch/x.h5"
newer simulate --plan "$later/plan.h5"
newer report --input "$later/run.h5"
newer topology --cluster "$scratch/later.json"
rm -rf "$scratch/c"
cp -r $formats/checkpoint "$scratch/c"
cp "$later/shard-0000.h5" "$scratch/c/"
refuses 3 'not good' 1 check "$scratch/c"
check 'a later shard' grep -q ': newer: ' "$scratch/out"
check 'nothing was written' [ ! -e "$scratch/x.h5" ]

# No free descriptors: a failure of the system, not of the file.
checks=$((checks + 1))
(ulimit -n 12 && exec "$HAPT" check $formats/model.h5) >"$scratch/out" 2>"$scratch/err"
code=$?
grep -q damaged "$scratch/out" "$scratch/err" && fail "too few open files are called damage: $(cat "$scratch/out")"
[ $code -ne 3 ] || fail 'too few open files are called bad input'

# The n-th allocation, open or read fails while a checkpoint is read, also in the sandbox: never "damaged". Some n; HAPT_LONG=1: of
# memory, the first 1,000 and then every 100th, of the others every n; HAPT_EVERY=1: every n.
library=$HAPT_BUILD/tests/faults/faults.so
rm -rf "$scratch/c"
cp -r $formats/checkpoint "$scratch/c"
faulty() { # CALL N: hapt check while it fails; CALL -: counts the calls
    env LD_PRELOAD="$library" FAULTS_UNDER="$scratch/c" FAULTS_CALL="$1" FAULTS_AT="$2" FAULTS_ERROR="${3:-EIO}" ${counts:+FAULTS_READS=1 FAULTS_COUNTS="$counts"} \
        timeout 60 "$HAPT" check "$scratch/c" >"$scratch/out" 2>"$scratch/err"
} 2>/dev/null # of the shell: a library that does not check its memory crashes
counts=$scratch/counts faulty malloc 0 || fail "hapt check under the faults' library: $(cat "$scratch/err")"
counts=
failed=0
for call in look read malloc; do
    total=$(sed -n "s/^$call //p" "$scratch/counts" | sort -n | tail -n 1)
    check "$call is counted" [ "${total:-0}" -gt 2 ]
    stride=$((total / 8 + 1))
    first=0
    if [ "${HAPT_EVERY:-0}" != 0 ]; then stride=1; elif [ "${HAPT_LONG:-0}" != 0 ]; then first=1000 stride=$((total > first ? 100 : 1)); fi
    for ((n = first > 0 ? 1 : 1 + RANDOM % stride; n <= total; n += n < first ? 1 : stride)); do
        checks=$((checks + 1))
        faulty $call $n "$([ $call = look ] && echo EMFILE || echo EIO)"
        code=$?
        [ $code -eq 0 ] || failed=$((failed + 1))
        grep -q damaged "$scratch/out" "$scratch/err" && fail "$call $n of $total: $(cat "$scratch/out")"
        [ $code -ne 3 ] || fail "$call $n of $total: code 3: $(cat "$scratch/out" "$scratch/err")"
    done
done
check 'calls failed' [ $failed -gt 3 ]

refuses 2 'needs files' 1 check
passes 1 help check
finish
