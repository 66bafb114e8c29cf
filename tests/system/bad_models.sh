#!/usr/bin/env bash
# Model files with impossible attributes of operators (strides of 0, paddings that overflow, more chosen experts than exist, operators of
# the backward pass): one clear error, a hint, exit code 3, never a crash. Also outputs that are not regular files.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
/usr/bin/python3 -c 'import h5py' 2>/dev/null || { echo "needs python3-h5py"; exit 77; }

tokens="--layers 2 --hidden 32 --heads 4 --sequence 16 --vocab 64 --microbatch 2"
images="--image 16 --classes 10 --microbatch 2"
# shellcheck disable=SC2086
{
    passes 1 model llama $tokens --output "$scratch/llama.h5"
    passes 1 model bert-moe $tokens --experts 4 --output "$scratch/bert-moe.h5"
    passes 1 model vit $images --patch 4 --layers 2 --hidden 32 --heads 4 --output "$scratch/vit.h5"
    passes 1 model vgg $images --width 4 --hidden 16 --output "$scratch/vgg.h5"
    passes 1 model resnet $images --width 4 --output "$scratch/resnet.h5"
}
/usr/bin/python3 tests/system/bad_models.py "$scratch" >"$scratch/cases" || fail "cannot edit the models"
[ "$(wc -l <"$scratch/cases")" -ge 35 ] || fail "cases are missing"
while IFS=$'\t' read -r name pattern; do
    refuses 3 "$pattern" 1 --input "$scratch/bad-$name.h5" --steps 1 --output "$scratch/run" </dev/null
done <"$scratch/cases"
refuses 3 'stride' 2 --input "$scratch/bad-vgg-stride0.h5" --steps 1 --output "$scratch/run"
refuses 3 'experts' 2 --input "$scratch/bad-bert-moe-chosen-more.h5" --steps 1 --output "$scratch/run"

# Data of another kind than the model's. A graph beyond all limits fails at once. Devices and folders are not replaced.
echo "In the beginning" >"$scratch/text"
passes 1 data "$scratch/text" --output "$scratch/tokens.h5"
# shellcheck disable=SC2086
{
    refuses 3 'no /images' 1 model vgg $images --data "$scratch/tokens.h5" --output "$scratch/x.h5"
    refuses 3 'more than 16384 operators' 1 model resnet $images --width 1 --stages 1000,1000,1000,1000 --output "$scratch/x.h5"
    refuses 3 'impossible size' 1 model vit --image 65536 --patch 1 --microbatch 1000000 --output "$scratch/x.h5"
    mkdir "$scratch/folder"
    refuses 2 'folder' 1 model vgg $images --output "$scratch/folder"
    mkfifo "$scratch/pipe"
    refuses 2 'not a regular file' 1 model vgg $images --output "$scratch/pipe"
    [ -p "$scratch/pipe" ] || fail "a pipe was replaced by a file"
}
[ ! -e "$scratch/x.h5" ] || fail "a refused model left a file"
[ ! -e "$scratch/run/run.h5" ] || fail "a refused job left a run file"
finish
