#!/usr/bin/env bash
# --replica-check: a rank whose weights are overwritten in its memory is named, and no checkpoint is made of them. Clean runs in every kind
# of layout give no alarm.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
small_plan --data "$scratch/t.h5"
cp "$scratch/plan.h5" "$scratch/two-stages.h5"
cat >"$scratch/c3.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [ { "name": "a", "nodes": 1, "devices_per_node": 3, "device": "cpu" } ] }
JSON
"$HAPT" model gpt --layers 1 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 4 --data "$scratch/t.h5" --output "$scratch/m3.h5" >/dev/null || exit 1
plan() { # NAME CLUSTER STAGES: L is the last layer
    "$HAPT" profile --input "$scratch/m3.h5" --cluster "$2" --predict --layers-per-model 3 --output "$scratch/p.h5" >/dev/null || exit 1
    count_layers
    "$HAPT" plan --profile "$scratch/p.h5" --microbatches 2 --stages "${3//L/$layers}" --output "$scratch/$1.h5" >/dev/null || exit 1
}
plan three "$scratch/c3.json" "0-L@a:1x3"
plan tensor "$scratch/c.json" "0-1@a:1x2t2,1-L@b:1x1"

# Clean runs: rows 2, 1 and 1 of 4, tied embeddings over two stages, sharded optimizer state, operators over two ranks.
clean() { # PATTERN OPTIONS...
    local pattern=$1
    shift
    passes 3 train --threads 1 --steps 12 --checkpoint-every 4 --replica-check 1 --output "$scratch/clean" "$@" || return
    check "the compared copies are reported once" [ "$(grep -cE "replica check: $pattern; compared every 1 step and" "$scratch/err")" -eq 1 ]
    rm -rf "$scratch/clean"
}
three=(--input "$scratch/m3.h5" --cluster "$scratch/c3.json")
two=(--input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/two-stages.h5")
clean '([0-9]+) of \1 parameters have copies, on up to 3 ranks' "${three[@]}" --plan "$scratch/three.h5"
clean '([0-9]+) of \1 parameters have copies, on up to 3 ranks' "${three[@]}" --plan "$scratch/three.h5" --sharded-optimizer yes
clean '([0-9]+) of \1 parameters have copies, on up to 3 ranks' "${three[@]}" --plan "$scratch/three.h5" --sharded-optimizer yes --precision bf16
clean '[0-9]+ of [0-9]+ parameters have copies, on up to 3 ranks' "${two[@]}"
clean '[0-9]+ of [0-9]+ parameters have copies, on up to 2 ranks' --input "$scratch/m3.h5" --cluster "$scratch/c.json" --plan "$scratch/tensor.h5"
passes 1 --input "$scratch/m3.h5" --steps 2 --profile-seconds 0.2 --replica-check 1 --output "$scratch/alone"
check "one rank has nothing to compare" grep -q 'replica check: no two ranks hold copies' "$scratch/err"
passes 3 train --threads 1 --steps 4 "${two[@]}" --output "$scratch/off"
check "nothing is compared by default" [ "$(grep -c 'replica check' "$scratch/err")" -eq 0 ]

# strike NAME VICTIM PARAMETER EVERY OPTIONS...: overwrites 64 floats of a weight in the memory of one rank. The learning rate is 0, so the
# bytes are found by those of the first checkpoint. Sets $code; messages in $scratch/err
strike() {
    local name=$1 victim=$2 parameter=$3 every=$4
    shift 4
    mpirun --oversubscribe --bind-to none -np 3 "$HAPT" train --threads 1 --steps 100000000 --learning-rate 0 --checkpoint-every 8 --replica-check "$every" \
        --output "$scratch/$name" "$@" >"$scratch/out" 2>"$scratch/err" &
    local launcher=$! rank
    for _ in $(seq 300); do
        compgen -G "$scratch/$name/checkpoints/step-*/manifest.h5" >/dev/null && break
        sleep 0.1
    done
    for rank in $(pgrep -P $launcher -x hapt); do
        tr '\0' '\n' <"/proc/$rank/environ" | grep -qx "OMPI_COMM_WORLD_RANK=$victim" && break
    done
    /usr/bin/python3 - "$rank" "$scratch/$name/checkpoints" "$parameter" "$scratch/$name.newest" <<'PY' || fail "$name: the weight was not found in the memory of rank $victim"
import glob, os, signal, sys
import h5py, numpy
rank, folder, parameter = int(sys.argv[1]), sys.argv[2], sys.argv[3]
os.kill(rank, signal.SIGSTOP)
try:
    # The newest checkpoint may be replaced while it is read. Any readable one has the same weights.
    for shard in sorted(glob.glob(folder + "/step-*/shard-*.h5"), reverse=True):
        try:
            with h5py.File(shard) as file:
                weights = file["/parameters/" + parameter][()].astype("<f4").ravel()
            break
        except (OSError, KeyError):
            pass
    # The copy from which a checkpoint is being written has the same bytes and is overwritten as well.
    newest = max(int(path.split("/step-")[1].split("/")[0]) for path in glob.glob(folder + "/step-*/manifest.h5"))
    open(sys.argv[4], "w").write(str(newest))
    wanted, found = weights[:64].tobytes(), 0
    with open(f"/proc/{rank}/maps") as maps, open(f"/proc/{rank}/mem", "r+b", buffering=0) as memory:
        for line in maps:
            span, mode = line.split()[:2]
            if not mode.startswith("rw") or "/" in line:
                continue
            first, end = (int(x, 16) for x in span.split("-"))
            try:
                memory.seek(first)
                data = memory.read(end - first)
            except OSError:
                continue
            at = data.find(wanted)
            while at >= 0:
                memory.seek(first + at)
                memory.write(numpy.full(64, 0.25, "<f4").tobytes())
                found += 1
                at = data.find(wanted, at + 1)
finally:
    os.kill(rank, signal.SIGCONT)
sys.exit(found == 0)
PY
    for _ in $(seq 600); do
        kill -0 $launcher 2>/dev/null || break
        sleep 0.1
    done
    kill -TERM $launcher 2>/dev/null
    wait $launcher
    code=$?
    checks=$((checks + 1))
    [ $code -eq 8 ] || fail "$name: code $code, not 8: $(tail -n 3 "$scratch/err")"
    [ "$(grep -c '^hapt: error:' "$scratch/err")" -eq 1 ] && [ "$(grep -c '^hint: .*--resume' "$scratch/err")" -eq 1 ] || fail "$name: $(cat "$scratch/err")"
}
# No checkpoint has the overwritten weights. The first one published afterwards may have been copied before, into memory that was
# overwritten as well. Only one is written at a time.
sound() { # NAME
    /usr/bin/python3 - "$scratch/$1/checkpoints" "$scratch/$1.newest" <<'PY'
import glob, sys
import h5py
shards = glob.glob(sys.argv[1] + "/step-*/shard-*.h5")
step_of = lambda shard: int(shard.split("/step-")[1].split("/")[0])
in_flight = min((step_of(shard) for shard in shards if step_of(shard) > int(open(sys.argv[2]).read())), default=-1)
for shard in shards:
    if step_of(shard) == in_flight:
        continue
    with h5py.File(shard) as file:
        for name in file["/parameters"]:
            values = file["/parameters/" + name][()].ravel()
            assert not (values.size >= 64 and (values[:64] == 0.25).all()), (shard, name)
assert shards
PY
}
weight=wte.weight
named() { check "$1: the rank is named: $(grep error "$scratch/err")" grep -qE "error: after step [0-9]+ $2 .*parameter $weight\$" "$scratch/err"; }
strike odd 1 "$weight" 3 "${three[@]}" --plan "$scratch/three.h5"
named odd 'rank 1 of stage 0 on host .* differs from most of the 3 ranks'
check "no checkpoint is made of it" sound odd
# The rank that writes: without a check before the checkpoint it would write wrong weights.
strike first 0 "$weight" 1000000 "${three[@]}" --plan "$scratch/three.h5"
named first 'rank 0 of stage 0 on host .* differs from most of the 3 ranks'
check "nor of the first rank's" sound first
# Tied over two stages: the majority of copies is on stage 0, so the copy of stage 1 is reported.
strike tied 2 "$weight" 2 "${two[@]}"
named tied 'rank 2 of stage 1 on host .* differs from most of the 3 ranks'
# Two copies differ: both are named.
weight=h.0.attn.c_attn.weight
strike pair 1 $weight 2 "${two[@]}"
named pair 'rank 0 of stage 0 on host .* and rank 1 of stage 0 on host .* differ in their copies'
# A run resumes from the newest checkpoint.
newest=$(ls "$scratch/first/checkpoints" | sed -n 's/^step-0*//p' | sort -n | tail -n 1)
passes 3 train --threads 1 --steps 100000000 --learning-rate 0 "${three[@]}" --output "$scratch/first" --resume yes --stop-after $((newest + 5)) --replica-check 1
finish
