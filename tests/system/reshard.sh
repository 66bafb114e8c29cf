#!/usr/bin/env bash
# One run on 4, 3, 1 and 2 ranks in turn, with a new plan each time. Weights and optimizer state are moved bit by bit, and losses are those
# of one rank that trained all the time.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
common="--microbatches 4 --threads 1 --layers-per-model 6 --predict --learning-rate 1e-3 --lr-schedule constant --data $scratch/t.h5"
passes 1 data tests/system/train.sh --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 4 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 2 --output "$scratch/m.h5" || finish
cluster() { # NAME FIRST SECOND: ranks of two unequal subclusters (0: absent)
    local second=""
    [ "$3" -eq 0 ] || second=", {\"name\": \"b\", \"nodes\": 1, \"devices_per_node\": $3, \"device\": \"cpu\", \"memory\": \"900 MB\"}"
    cat >"$scratch/$1.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": $2, "device": "cpu", "memory": "900 MB"}$second ],
  "links": [ $([ "$3" -eq 0 ] || echo '{"between": ["a", "b"], "bandwidth": "1 GB/s", "latency": "10 us"}') ] }
JSON
}
cluster c4 2 2
cluster c3 2 1
cluster c2 1 1
cluster c1 1 0
job() { # RANKS STEPS OUTPUT OPTIONS...
    local ranks=$1 steps=$2 output=$3
    shift 3
    passes "$ranks" --input "$scratch/m.h5" --cluster "$scratch/c$ranks.json" $common --steps 12 --stop-after "$steps" \
        --output "$output" --use-all-devices --json "$@" && cp "$scratch/out" "$output.$ranks.json"
}

job 1 12 "$scratch/whole" || finish
job 4 3 "$scratch/run" --resume auto || finish
step=3
for ranks in 3 1 2; do
    rm -rf "$scratch/before"
    cp -r "$scratch/run" "$scratch/before"
    # no steps: the checkpoint is only loaded under another plan and written again
    job $ranks $step "$scratch/run" --resume --replan || finish
    checks=$((checks + 1))
    /usr/bin/python3 tests/system/same_checkpoint.py "$scratch/before" "$scratch/run" $step >"$scratch/why" ||
        fail "a checkpoint on other ranks ($ranks): $(cat "$scratch/why")"
    step=$((step + 3))
    job $ranks $step "$scratch/run" --resume || finish
done
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/whole.1.json" "$scratch/run.2.json" <<'PY' || fail "losses on changing ranks"
import json, sys
whole, run = [json.load(open(path))["train"]["loss"] for path in sys.argv[1:]]
# sums over ranks have another order: the tolerance is that of fp32 runs of one plan on different ranks
worst = max(abs(a - b) for a, b in zip(whole, run))
print("losses differ by", worst)
sys.exit(not (len(whole) == len(run) == 12 and worst < 2e-5))
PY
finish
