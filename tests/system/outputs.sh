#!/usr/bin/env bash
# Outputs of single files. No command destroys its input, a file of another kind or the target of a link. An output that cannot be written
# is reported before the long work. Unknown kinds of input are not guessed, files cannot make hapt read other files, and later versions are
# refused.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
dir=$scratch/w
mkdir "$dir"

gpt="--layers 2 --hidden 16 --heads 2 --sequence 8 --vocab 256 --microbatch 2"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[{"name":"a","nodes":1,"devices_per_node":2,"device":"T4"}]}' >"$dir/c.json"
printf 'In the beginning God created the heaven and the earth. And the earth was without form.\n' >"$dir/a.txt"
# shellcheck disable=SC2086
passes 1 model gpt $gpt --output "$dir/m.h5"
passes 1 data "$dir/a.txt" --output "$dir/t.h5"
passes 1 profile --input "$dir/m.h5" --cluster "$dir/c.json" --predict yes --output "$dir/p.h5"
passes 1 plan --profile "$dir/p.h5" --microbatches 2 --output "$dir/plan.h5"
passes 1 --input "$dir/m.h5" --data "$dir/t.h5" --steps 2 --trace 1 --profile-seconds 0.1 --output "$dir/run"
checkpoint=$(echo "$dir"/run/checkpoints/step-*)
[ -f "$checkpoint/manifest.h5" ] || fail "no checkpoint in $dir/run"

same_tokens() { # FILE: the same tokens as those of a.txt
    /usr/bin/python3 -c 'import sys, h5py; sys.exit(bytes(h5py.File(sys.argv[1])["tokens"][...]) != open(sys.argv[2], "rb").read())' "$1" "$scratch/a.txt"
}
cp "$dir/a.txt" "$scratch/a.txt"

# Only commands that end with 0 may change the files here.
sums() { find "$dir" "$scratch/outside" -type f -exec md5sum {} + | sort; }
mkdir "$scratch/outside"
echo precious >"$scratch/outside/file"
ln "$dir/m.h5" "$dir/hard.h5"
ln -s "$dir/m.h5" "$dir/soft.h5"
ln -s "$scratch/outside/file" "$dir/planted.h5"
ln -s "$dir" "$scratch/other-name"
echo '{"a":1}' >"$dir/foreign.json"
echo text >"$dir/text"
mkdir "$dir/folder"
before=$(sums)
untouched() {
    checks=$((checks + 1))
    [ "$(sums)" = "$before" ] || { fail "$*: files changed: $(diff <(echo "$before") <(sums))"; before=$(sums); }
}

# The output is an input, under any of its names.
for name in m.h5 ./m.h5 hard.h5 ../w/m.h5; do
    refuses 2 'is the input' 1 profile --input "$dir/m.h5" --cluster "$dir/c.json" --predict yes --output "$dir/$name"
done
refuses 2 'is the input' 1 profile --input "$dir/soft.h5" --cluster "$dir/c.json" --predict yes --output "$scratch/other-name/m.h5"
refuses 2 'symbolic link' 1 profile --input "$dir/m.h5" --cluster "$dir/c.json" --predict yes --output "$dir/soft.h5"
refuses 2 'is the input' 2 profile --input "$dir/m.h5" --calibrate "$dir/m.h5"
refuses 2 'is the input' 1 topology --cluster "$dir/c.json" --output "$dir/c.json"
refuses 2 'is the input' 1 data "$dir/a.txt" --output "$dir/a.txt"
refuses 2 'is the input' 1 plan --profile "$dir/p.h5" --microbatches 2 --output "$dir/p.h5"
refuses 2 'is the input' 1 plan --input "$dir/m.h5" --cluster "$dir/c.json" --microbatches 2 --output "$dir/c.json"
refuses 2 'is the input' 1 spmd --input "$dir/m.h5" --cluster "$dir/c.json" --output "$dir/m.h5"
# shellcheck disable=SC2086
refuses 2 'is the input' 1 model gpt $gpt --data "$dir/t.h5" --output "$dir/t.h5"
refuses 2 'is the input' 1 report --input "$dir/run/run.h5" --timeline "$dir/run/run.h5"
untouched 'outputs that are inputs'

# A file of another kind.
refuses 2 'is not hapt-weights' 1 export --checkpoint "$checkpoint" --output "$checkpoint/manifest.h5"
refuses 2 'is not hapt-weights' 1 export --checkpoint "$dir/run" --output "$(echo "$checkpoint"/shard-*0.h5 "$checkpoint"/*shard* | cut -d' ' -f1)"
# shellcheck disable=SC2086
{
    refuses 2 'is not hapt-model' 1 model gpt $gpt --output "$dir/plan.h5"
    refuses 2 'is not hapt-model' 1 model gpt $gpt --output "$dir/text"
    refuses 2 'symbolic link' 1 model gpt $gpt --output "$dir/planted.h5"
    refuses 2 'is a folder' 1 model gpt $gpt --output "$dir/folder"
    refuses 2 'is a folder' 1 model gpt $gpt --output "$dir/folder" --overwrite yes
    refuses 2 'not a regular file' 1 model gpt $gpt --output /dev/null --overwrite yes
}
refuses 2 'is not hapt-data' 1 data "$dir/a.txt" --output "$dir/m.h5"
refuses 2 'is not hapt-topology' 1 topology --cluster "$dir/c.json" --output "$dir/foreign.json"
refuses 2 'is not hapt-profile' 1 profile --input "$dir/m.h5" --cluster "$dir/c.json" --predict yes --output "$dir/plan.h5"
refuses 2 'is not hapt-efficiency' 1 profile --input "$dir/m.h5" --calibrate "$dir/p.h5"
refuses 2 'is not hapt-plan' 2 plan --profile "$dir/p.h5" --microbatches 2 --output "$dir/run/run.h5"
refuses 2 'is not hapt-plan' 1 spmd --input "$dir/m.h5" --cluster "$dir/c.json" --output "$dir/t.h5"
refuses 2 'is not a timeline' 1 report --input "$dir/run/run.h5" --timeline "$dir/foreign.json"
refuses 2 'same file' 1 profile --input "$dir/m.h5" --output "$dir/new.h5" --calibrate "$dir/new.h5"
untouched 'files of another kind'

# The output cannot be written: reported before any long work. (Root may write anywhere except where the kernel forbids it.)
for place in /proc/none/x.h5 "$dir/text/x.h5"; do
    refuses 6 'cannot be written' 2 profile --input "$dir/m.h5" --output "$place"
    check 'nothing was measured' [ ! -s "$scratch/out" ]
done
refuses 6 'cannot be written' 1 report --input "$dir/run/run.h5" --timeline /proc/none/t.json
untouched 'places that cannot be written'
check 'no probe is left' [ -z "$(find "$scratch" -name '.hapt-probe*' -o -name '*.tmp')" ]

# A file of the same kind and an empty file are replaced; any file is with --overwrite. A link itself is replaced, not its target.
passes 1 plan --profile "$dir/p.h5" --microbatches 4 --output "$dir/plan.h5"
: >"$dir/empty"
passes 1 plan --profile "$dir/p.h5" --microbatches 4 --output "$dir/empty"
passes 1 report --input "$dir/run/run.h5" --timeline "$dir/timeline.json"
passes 1 report --input "$dir/run/run.h5" --timeline "$dir/timeline.json"
cp "$dir/a.txt" "$dir/b.txt"
passes 1 data "$dir/b.txt" --output "$dir/b.txt" --overwrite yes
check 'the input became data' same_tokens "$dir/b.txt"
# shellcheck disable=SC2086
passes 1 model gpt $gpt --output "$dir/planted.h5" --overwrite yes
check 'the link was replaced' [ -f "$dir/planted.h5" ] && [ ! -L "$dir/planted.h5" ]
check 'and not what it led to' [ "$(cat "$scratch/outside/file")" = precious ]

# Temporary names can be guessed. A file that exists under one is neither followed nor replaced.
"$HAPT" topology --cluster "$dir/c.json" --output "$dir/top.h5" >/dev/null 2>&1 &
pid=$!
wait $pid
(
    sleep 0.2 # the shell's process becomes hapt
    exec "$HAPT" data "$dir/a.txt" --output "$dir/tmp.h5"
) >"$scratch/out" 2>"$scratch/err" &
pid=$!
ln -s "$scratch/outside/file" "$dir/tmp.h5.$pid.tmp"
wait $pid || fail "a planted temporary name ended data: $(cat "$scratch/err")"
check 'data were written beside it' same_tokens "$dir/tmp.h5"
check 'the planted link is still there' [ -L "$dir/tmp.h5.$pid.tmp" ]
check 'its target is untouched' [ "$(cat "$scratch/outside/file")" = precious ]

# The kind of hapt data's input is never guessed.
/usr/bin/python3 - "$dir" <<'P' || fail 'python'
import gzip, struct, sys
import numpy as np
d = sys.argv[1] + "/"
tokens = [(i * 7919) % 50257 for i in range(4000)]
open(d + "nano.bin", "wb").write(struct.pack("<4000H", *tokens))
header = lambda magic, version, n: struct.pack("<256i", magic, version, n, *[0] * 253)
wide = [(i * 7919 * 31) % 128256 for i in range(1000)]
open(d + "v1.bin", "wb").write(header(20240520, 1, 4000) + struct.pack("<4000H", *tokens))
open(d + "v7.bin", "wb").write(header(20240801, 7, 1000) + struct.pack("<1000I", *wide))
open(d + "v7b.bin", "wb").write(header(20240520, 7, 1000) + struct.pack("<1000I", *wide))
open(d + "v9.bin", "wb").write(header(20240520, 9, 1000) + struct.pack("<1000I", *wide))
open(d + "more.bin", "wb").write(header(20240520, 1, 3999) + struct.pack("<4000H", *tokens))
open(d + "utf8.txt", "wb").write("Größe, 数, 🙂\n".encode() * 9000)
open(d + "latin1.txt", "wb").write("Größe\n".encode("latin1") * 50)
open(d + "utf16.txt", "wb").write("text\n".encode("utf-16") * 50)
open(d + "cut.txt", "wb").write("Größe".encode()[:3])
open(d + "text.gz", "wb").write(gzip.compress(b"text" * 100))
open(d + "high.bin", "wb").write(struct.pack("<2I", 5, 4000000000))
open(d + "nothing", "wb")
np.array(tokens).tofile(d + "narrow.int64")
np.array(wide).tofile(d + "wide.int64")
for name in ("utf8.txt", "latin1.txt"):
    np.fromfile(d + name, "u1").astype("i8").tofile(d + name + ".int64")
P
takes() { # FILE EXPECTED OPTIONS...
    passes 1 data "$dir/$1" "${@:3}" --output "$scratch/d.h5"
    check "tokens of $1" /usr/bin/python3 -c 'import sys, h5py, numpy
found = h5py.File(sys.argv[1])["tokens"]
sys.exit(not (found.dtype.kind in "iu" and numpy.array_equal(found[...], numpy.fromfile(sys.argv[2], "i8"))))' "$scratch/d.h5" "$dir/$2.int64"
}
takes nano.bin narrow --type uint16
takes v1.bin narrow
takes v7.bin wide
takes v7b.bin wide
takes utf8.txt utf8.txt
takes latin1.txt latin1.txt --type bytes
refuses 2 'not recognised' 1 data "$dir/nano.bin" --output "$scratch/x.h5"
check 'the hint names --type' grep -q '^hint: .*--type uint16' "$scratch/err"
refuses 2 'not recognised' 1 data "$dir/latin1.txt" --output "$scratch/x.h5"
refuses 2 'not recognised' 1 data "$dir/cut.txt" --output "$scratch/x.h5"
refuses 3 'version 9' 1 data "$dir/v9.bin" --output "$scratch/x.h5"
refuses 3 'says 3999' 1 data "$dir/more.bin" --output "$scratch/x.h5"
refuses 3 'UTF-16' 1 data "$dir/utf16.txt" --output "$scratch/x.h5"
refuses 3 'gzip' 1 data "$dir/text.gz" --output "$scratch/x.h5"
refuses 3 'HDF5' 1 data "$dir/t.h5" --output "$scratch/x.h5"
refuses 3 'empty' 1 data "$dir/nothing" --output "$scratch/x.h5"
refuses 3 'exceeds the largest vocabulary' 1 data "$dir/high.bin" --type uint32 --output "$scratch/x.h5"
check 'no refused data left a file' [ ! -e "$scratch/x.h5" ]

# Before step 0: tokens outside the vocabulary, fractions, short rows; files that refer to other files; later versions.
/usr/bin/python3 - "$dir" "$scratch" <<'P' || fail 'python'
import shutil, sys
import h5py, numpy as np
d, s = sys.argv[1] + "/", sys.argv[2] + "/"
with h5py.File(d + "t.h5") as f:
    tokens = f["/tokens"][...]
def data(name, **what):
    with h5py.File(d + name, "w") as f:
        for key, value in what.items():
            f[key] = value
data("whole.h5", tokens=tokens.astype("f8"))
data("half.h5", tokens=np.where(np.arange(len(tokens)) == 40, 7.5, tokens))
data("nan.h5", tokens=np.where(np.arange(len(tokens)) == 40, np.nan, tokens))
data("big.h5", tokens=np.where(np.arange(len(tokens)) == 40, 256, tokens.astype("i8")))
data("huge.h5", tokens=np.where(np.arange(len(tokens)) == 40, 2**40 + 3, tokens.astype("i8")))
data("short.h5", tokens=tokens[:8])
data("rows.h5", batches=np.zeros((9, 16, 8), "u1"))
with h5py.File(s + "secret.h5", "w") as f:
    f["tokens"] = tokens
tokens.tofile(s + "secret.bin")
with h5py.File(d + "link.h5", "w") as f:
    f["tokens"] = h5py.ExternalLink(s + "secret.h5", "/tokens")
with h5py.File(d + "external.h5", "w") as f:
    f.create_dataset("tokens", shape=tokens.shape, dtype="u1", external=[(s + "secret.bin", 0, len(tokens))])
with h5py.File(d + "virtual.h5", "w", libver="latest") as f:
    layout = h5py.VirtualLayout(shape=tokens.shape, dtype="u1")
    layout[:] = h5py.VirtualSource(s + "secret.h5", "tokens", shape=tokens.shape)
    f.create_virtual_dataset("tokens", layout)
with h5py.File(d + "inside.h5", "w") as f:
    f["elsewhere/tokens"] = tokens
    f["tokens"] = h5py.SoftLink("/elsewhere/tokens")
shutil.copy(d + "m.h5", d + "mlink.h5")
with h5py.File(d + "mlink.h5", "r+") as f:
    del f["tensors"]
    f["tensors"] = h5py.ExternalLink(d + "m.h5", "/tensors")
for name in ("m", "t", "p", "plan", "run/run"):
    shutil.copy(d + name + ".h5", d + "later.h5")
    with h5py.File(d + "later.h5", "r+") as f:
        f.attrs["version"] = np.int64(99)
    shutil.move(d + "later.h5", s + name.split("/")[-1] + "-99.h5")
P
train=(--input "$dir/m.h5" --steps 1 --microbatches 2 --profile-seconds 0.1 --output "$scratch/run-x")
for data in half:7.5 nan:nan big:vocabulary huge:vocabulary short:holds rows:row; do
    refuses 3 "${data#*:}" 1 "${train[@]}" --data "$dir/${data%:*}.h5"
done
for data in link:'another file' external:'external or virtual' virtual:'external or virtual'; do
    refuses 3 "tokens .*${data#*:}" 2 "${train[@]}" --data "$dir/${data%%:*}.h5"
    refuses 3 "tokens .*${data#*:}" 1 model gpt --layers 1 --hidden 8 --heads 2 --sequence 4 --vocab 256 --data "$dir/${data%%:*}.h5" --output "$scratch/x.h5"
done
refuses 3 'tensors.*another file' 1 --input "$dir/mlink.h5" --steps 1 --output "$scratch/run-x"
for data in whole inside; do
    passes 1 "${train[@]}" --data "$dir/$data.h5"
    rm -rf "$scratch/run-x"
done

sed 's/"version":1/"version":99/' "$dir/c.json" >"$scratch/c-99.json"
passes 1 export --checkpoint "$dir/run" --output "$dir/w.h5"
/usr/bin/python3 - "$dir" "$scratch" "$checkpoint" <<'P' || fail 'python'
import glob, os, shutil, sys
import h5py, numpy as np
d, s, c = sys.argv[1:]
def later(path):
    with h5py.File(path, "r+") as f:
        f.attrs["version"] = np.int64(99)
shutil.copy(d + "/w.h5", s + "/w-99.h5")
later(s + "/w-99.h5")
shutil.copytree(c, s + "/manifest-99")
later(s + "/manifest-99/manifest.h5")
P
newer() { refuses 3 'version' 1 "$@" && check "the hint of hapt $*" grep -q '^hint: use a newer hapt' "$scratch/err"; }
newer --input "$scratch/m-99.h5" --steps 1 --output "$scratch/run-x"
newer "${train[@]}" --data "$scratch/t-99.h5"
newer model gpt --layers 1 --hidden 8 --heads 2 --sequence 4 --vocab 256 --data "$scratch/t-99.h5" --output "$scratch/x.h5"
# shellcheck disable=SC2086
newer model gpt $gpt --weights "$scratch/w-99.h5" --output "$scratch/x.h5"
newer plan --profile "$scratch/p-99.h5" --microbatches 2
newer simulate --plan "$scratch/plan-99.h5"
newer report --input "$scratch/run-99.h5"
newer topology --cluster "$scratch/c-99.json"
finish
