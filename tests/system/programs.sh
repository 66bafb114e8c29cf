#!/usr/bin/env bash
# Programs of stages: the GPT of the PyTorch reference on 4 ranks, as two stages of two ranks each, data-parallel, tensor-parallel and
# synthesised. All losses are within 2e-6 of the fp64 run (so within 4e-6 of each other). --program selects the rows of a profile.
# Runs beside others: it measures no time.
set -u
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
reference=tests/data/gpt-small.h5
failed=0

fail() { echo "$*"; failed=$((failed + 1)); }

numbers() { # FILE DATASET: one number per line
    h5dump -y -m "%.17g" -d "$2" "$1" | sed -n '/DATA {/,/}/p' | grep -o '[0-9.eE+-]*[0-9]' | sed 's/,//'
}

"$HAPT" model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --dtype fp32 \
    --tied-embeddings yes --weights $reference --output "$dir/m.h5" >/dev/null || exit 1
cat >"$dir/cluster.json" <<END
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [ { "name": "cpu", "nodes": 1, "devices_per_node": 4, "device": "cpu" } ] }
END
numbers $reference /loss_fp64 >"$dir/expected"
options=(--input "$dir/m.h5" --cluster "$dir/cluster.json" --microbatches 4)

train() { # NAME OPTIONS...: by the whole job, predicted
    local name=$1
    shift
    mpirun --oversubscribe --bind-to none -np 4 "$HAPT" "${options[@]}" --data $reference --predict yes \
        --steps 20 --optimizer adamw --learning-rate 1e-3 --lr-schedule constant --beta1 0.9 --beta2 0.95 \
        --epsilon 1e-8 --weight-decay 0.1 --clip-norm 0 --output "$dir/$name" "$@" >"$dir/log" 2>&1 ||
        { fail "$name: exit code $?"; tail -5 "$dir/log"; return; }
    numbers "$dir/$name/run.h5" /train/loss >"$dir/losses"
    worst=$(paste "$dir/losses" "$dir/expected" |
        awk 'NF != 2 { bad = 1 } { d = ($1 - $2) / $2; if (d < 0) d = -d; if (d > worst) worst = d } END { print bad ? 1 : worst + 0 }')
    awk -v worst="$worst" 'BEGIN { exit !(worst < 2e-6) }' || fail "$name: losses differ by $worst"
    echo "$name: losses within $worst"
}

program_of() { # NAME: the programs of the stages of a run's plan
    h5dump -y -d /plan/stage_tensor_parallel "$dir/$1/run.h5" | sed -n '/DATA {/,/}/p' | grep -o '[0-9]' | tr '\n' ' '
    h5dump -y -d /plan/stage_program "$dir/$1/run.h5" 2>/dev/null | sed -n '/DATA {/,/}/p' | grep -o '[0-9]' | tr '\n' ' '
}

for program in data tensor synthesised all; do
    train $program --program $program --stages "0-4@cpu:1x2,4-8@cpu:1x2"
done
[ "$(program_of data)" = "1 1 " ] || fail "data: stages run $(program_of data)"
[ "$(program_of tensor)" = "2 2 " ] || fail "tensor: stages run $(program_of tensor)"
case $(program_of synthesised) in "1 1 "[1-9]" "[1-9]" ") ;; *) fail "synthesised: stages run $(program_of synthesised)" ;; esac
train "searched" --program synthesised

# a profile's file keeps its programs, and --program removes rows from it
"$HAPT" profile "${options[@]:0:4}" --predict yes --program all --output "$dir/p.h5" >/dev/null 2>"$dir/log" || fail "profile: $(cat "$dir/log")"
for program in data tensor synthesised; do
    "$HAPT" plan --profile "$dir/p.h5" --program $program --stages "0-8@cpu:1x2" --output "$dir/plan.h5" >/dev/null 2>"$dir/log" ||
        fail "plan --program $program: $(cat "$dir/log")"
done
"$HAPT" plan --profile "$dir/p.h5" --program data --stages "0-8@cpu:1x2t2" >/dev/null 2>&1 && fail "a removed row is used in a plan"
exit $((failed > 0))
