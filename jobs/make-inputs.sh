#!/usr/bin/env bash
# Makes inputs/gpt.h5: a byte-level GPT of 12 layers, with the King James text (Debian's bible-kjv) as data and its training options.
set -eu
cd "$(dirname "$0")/.."
hapt=build/hapt
output=inputs/gpt.h5

if [ "$output" -nt "$0" ] && [ "$output" -nt "$hapt" ]; then
    echo "$output is up to date"
    exit 0
fi
command -v bible >/dev/null || {
    echo "make-inputs: error: the program bible is missing" >&2
    echo "hint: apt-get install bible-kjv, or run jobs/setup-debian.sh" >&2
    exit 3
}
text=$(mktemp)
trap 'rm -f "$text"' EXIT
# Remove labels such as "Ge1:1"; one verse per line.
bible -f gen1:1-rev22:21 | sed 's/^[^ ]* //' >"$text"

$hapt data "$text" --type bytes --output inputs/tokens.h5
# 2.4 million parameters; 320 steps of 8 microbatches, each of 2 rows of 128 bytes.
$hapt model gpt --layers 12 --hidden 128 --heads 4 --sequence 128 --vocab 256 --tied-embeddings yes --microbatch 2 \
    --dtype fp32 --seed 1 --data inputs/tokens.h5 \
    --microbatches 8 --steps 320 --optimizer adamw --learning-rate 3e-3 --lr-schedule cosine --warmup-steps 20 \
    --min-lr-ratio 0.1 --beta1 0.9 --beta2 0.95 --weight-decay 0.1 --clip-norm 1 --output "$output"
