#!/usr/bin/env bash
# Metrics in the readers of others (metrics_peers.py): TensorBoard's EventAccumulator, and the NXdata reader of silx. Needs a Python with
# tensorboard, silx and h5py in HAPT_TRANSFORMERS; else it is skipped.
# Runs beside others: it measures no time.
python=${HAPT_TRANSFORMERS:-}
[ -n "$python" ] || { echo "skipped: HAPT_TRANSFORMERS names no Python"; exit 77; }
"$python" -c 'import h5py, silx, tensorboard' 2>/dev/null || { echo "skipped: no tensorboard, silx and h5py in $python"; exit 77; }
. tests/system/lib.sh.inc
passes 1 data README.md --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 1 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --data "$scratch/t.h5" --output "$scratch/m.h5" || finish
plans_of_one_and_two
train() {
    passes 1 train --input "$scratch/m.h5" --cluster "$scratch/c1.json" --plan "$scratch/plan1.h5" --threads 1 --steps 40 --tensorboard yes \
        --validation-data "$scratch/t.h5" --validate-every 15 --validate-rows 4 --output "$scratch/run" "$@"
}
train --stop-after 20 --checkpoint-every 10 --checkpoint-async no
rm -r "$scratch/run/checkpoints/step-00000020" # as if the run had been killed after step 20, before that checkpoint
rm "$scratch/run/run.h5"
train --resume yes
check "the last checkpoint was of step 10" grep -q 'resuming after step 10 ' "$scratch/err"
checks=$((checks + 1))
"$python" tests/system/metrics_peers.py "$scratch/run" >"$scratch/said" 2>&1 || fail "$(tail -n 30 "$scratch/said")"
finish
