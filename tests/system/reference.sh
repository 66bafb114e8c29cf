#!/usr/bin/env bash
# The whole job on a GPT that PyTorch trained (tests/data/gpt-small.h5): the same losses within 2e-6 of its fp64 run, on any
# number of ranks, whatever plan is found.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
reference=tests/data/gpt-small.h5
failed=0

numbers() { # FILE DATASET: one number a line
    h5dump -y -m "%.17g" -d "$2" "$1" | sed -n '/DATA {/,/}/p' | grep -o '[0-9.eE+-]*[0-9]' | sed 's/,//'
}

$HAPT model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --dtype fp32 \
    --tied-embeddings yes --weights $reference --output "$dir/m.h5" >/dev/null || exit 1
numbers $reference /loss_fp64 >"$dir/expected"
[ "$(wc -l <"$dir/expected")" -eq 20 ] || { echo "h5dump printed $(wc -l <"$dir/expected") losses"; exit 1; }
for ranks in 1 2 3 4; do
    mpirun --oversubscribe --bind-to none -np $ranks "$HAPT" --input "$dir/m.h5" --data $reference --microbatches 4 \
        --steps 20 --optimizer adamw --learning-rate 1e-3 --lr-schedule constant --beta1 0.9 --beta2 0.95 \
        --epsilon 1e-8 --weight-decay 0.1 --clip-norm 0 --profile-seconds 1 --output "$dir/$ranks" >"$dir/log" 2>&1 ||
        { echo "$ranks ranks: exit code $?"; tail -5 "$dir/log"; failed=$((failed + 1)); continue; }
    numbers "$dir/$ranks/run.h5" /train/loss >"$dir/losses"
    worst=$(paste "$dir/losses" "$dir/expected" |
        awk 'NF != 2 { bad = 1 } { d = ($1 - $2) / $2; if (d < 0) d = -d; if (d > worst) worst = d } END { print bad ? 1 : worst + 0 }')
    awk -v worst="$worst" 'BEGIN { exit !(worst < 2e-6) }' ||
        { echo "$ranks ranks: losses are $worst away"; failed=$((failed + 1)); }
    echo "$ranks ranks: losses within $worst"
done
exit $((failed > 0))
