#!/usr/bin/env bash
# The whole job on the GPT of the PyTorch reference (tests/data/gpt-small.h5): losses within 2e-6 of its fp64 run, on any number of ranks,
# for any plan, found or forced. Stages are data- and tensor-parallel, with whole and sharded optimizer state.
# Runs beside others: it measures no time.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
reference=tests/data/gpt-small.h5
failed=0

numbers() { # FILE DATASET: one number per line
    h5dump -y -m "%.17g" -d "$2" "$1" | sed -n '/DATA {/,/}/p' | grep -o '[0-9.eE+-]*[0-9]' | sed 's/,//'
}

$HAPT model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --dtype fp32 \
    --tied-embeddings yes --weights $reference --output "$dir/m.h5" >/dev/null || exit 1
numbers $reference /loss_fp64 >"$dir/expected"
[ "$(wc -l <"$dir/expected")" -eq 20 ] || { echo "h5dump printed $(wc -l <"$dir/expected") losses"; exit 1; }
train() { # RANKS NAME FURTHER-OPTIONS...
    local ranks=$1 name=$2
    shift 2
    mpirun --oversubscribe --bind-to none -np "$ranks" "$HAPT" --input "$dir/m.h5" --data $reference --microbatches 4 \
        --steps 20 --optimizer adamw --learning-rate 1e-3 --lr-schedule constant --beta1 0.9 --beta2 0.95 \
        --epsilon 1e-8 --weight-decay 0.1 --clip-norm 0 --output "$dir/$name" "$@" >"$dir/log" 2>&1 ||
        { echo "$name: exit code $?"; tail -5 "$dir/log"; failed=$((failed + 1)); return; }
    numbers "$dir/$name/run.h5" /train/loss >"$dir/losses"
    worst=$(paste "$dir/losses" "$dir/expected" |
        awk 'NF != 2 { bad = 1 } { d = ($1 - $2) / $2; if (d < 0) d = -d; if (d > worst) worst = d } END { print bad ? 1 : worst + 0 }')
    awk -v worst="$worst" 'BEGIN { exit !(worst < 2e-6) }' ||
        { echo "$name: losses differ by $worst"; failed=$((failed + 1)); }
    echo "$name: losses within $worst"
}

for ranks in 1 2 3 4; do train $ranks "$ranks ranks" --profile-seconds 1; done

forced() { # RANKS STAGES FURTHER-OPTIONS...
    local ranks=$1 stages=$2
    shift 2
    cat >"$dir/cluster.json" <<END
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [ { "name": "cpu", "nodes": 1, "devices_per_node": $ranks, "device": "cpu" } ] }
END
    "$HAPT" plan --input "$dir/m.h5" --cluster "$dir/cluster.json" --microbatches 4 --stages "$stages" \
        --output "$dir/plan.h5" >"$dir/log" 2>&1 ||
        { echo "$stages: exit code $?"; tail -5 "$dir/log"; failed=$((failed + 1)); return; }
    train "$ranks" "$stages $*" --plan "$dir/plan.h5" --cluster "$dir/cluster.json" --replica-check 3 "$@"
}

forced 2 "0-8@cpu:1x2t2"
forced 4 "0-8@cpu:1x4t4"
forced 4 "0-4@cpu:1x2,4-8@cpu:1x2t2"
forced 4 "0-4@cpu:1x2t2,4-8@cpu:1x2t2" --sharded-optimizer yes
forced 2 "0-8@cpu:1x2" --sharded-optimizer yes
exit $((failed > 0))
