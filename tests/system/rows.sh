#!/usr/bin/env bash
# --global-batch: the rows of a microbatch are chosen, in the plan, in training and in the one-command job. --tied-exchange and --fix.
# Runs beside others
. "$(dirname "$0")/lib.sh.inc"
value() { python3 -c 'import json, sys; o = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$scratch/out" "$1"; }
holds() { # WHAT PYTHON-CONDITION on the JSON `o` of the last command
    checks=$((checks + 1))
    [ "$(value "$2")" = True ] || fail "$1: $2: $(head -c 600 "$scratch/out")"
}

three_devices "300 MB"
model=$scratch/m.h5 c=$scratch/c.json
small="--layers 4 --hidden 64 --heads 4 --sequence 64 --vocab 256"
passes 1 model gpt $small --microbatch 4 --output "$model" || finish

# The answer is the best of the plans for each number of rows, made by hand.
best=1e30
for rows in 1 2 4 8 16 32; do
    passes 1 model gpt $small --microbatch $rows --output "$scratch/m$rows.h5" &&
        passes 1 plan --input "$scratch/m$rows.h5" --cluster "$c" --predict --threads 1 --microbatches $((32 / rows)) --json &&
        best=$(value "min($best, o['simulated_s'])")
done
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --loops 1 --json &&
    holds "the bound" "0 < o['bound_s'] <= o['simulated_s'] and o['simulated_s'] >= $best"
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --json --output "$scratch/plan.h5" || finish
holds "the best rows" "abs(o['simulated_s'] / $best - 1) < 1e-9 and o['rows'] * o['microbatches'] == o['global_batch'] == 32"
rows=$(value "o['rows']")
grep -q "rows of a microbatch: $rows, the best of 4, 1, 2, 8, 16, 32" "$scratch/err" || fail "the rows that were tried: $(cat "$scratch/err")"
passes 1 check "$scratch/plan.h5"
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --microbatches 8 --output "$scratch/plan4.h5"
passes 1 plan --diff "$scratch/plan4.h5" "$scratch/plan.h5"
grep -q "rows of a microbatch: the model's -> $rows" "$scratch/out" || fail "no rows in the difference: $(head -n 4 "$scratch/out")"
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --objective formula --json
holds "the rows of the formula's plans" "o['rows'] * o['microbatches'] == 32"
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --fix rows=2 --json
holds "fixed rows" "o['rows'] == 2 and o['microbatches'] == 16"
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --microbatches 4 --json
holds "rows by the number of microbatches" "o['rows'] == 8 and o['microbatches'] == 4"

# Training takes the rows from the plan; losses of a step do not depend on them.
printf 'The quick brown fox jumps over the lazy dog. %.0s' {1..200} >"$scratch/text"
passes 1 data "$scratch/text" --type bytes --output "$scratch/d.h5" || finish
losses() { h5dump -d /train/loss -y -w 0 "$scratch/$1/run.h5" | tr -d ' ' | tr ',' '\n' | grep -E '^[0-9.]+$'; }
for rows in 1 8; do
    passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --global-batch 32 --fix rows=$rows --stages "0-4@a:1x1,4-10@b:1x1" --layers-per-model 10 \
        --output "$scratch/plan$rows.h5"
    passes 3 train --input "$model" --cluster "$c" --plan "$scratch/plan$rows.h5" --data "$scratch/d.h5" --steps 3 --threads 1 --output "$scratch/r$rows" --overwrite
    losses r$rows >"$scratch/losses$rows"
    grep -q 'another model' "$scratch/err" && fail "its own model with $rows rows is another one: $(cat "$scratch/err")"
done
passes 1 model gpt ${small/hidden 64/hidden 128} --microbatch 4 --output "$scratch/wide.h5"
passes 3 train --input "$scratch/wide.h5" --cluster "$c" --plan "$scratch/plan8.h5" --data "$scratch/d.h5" --steps 0 --threads 1 --output "$scratch/wide"
grep -q 'no step was trained' "$scratch/out" || fail "--steps 0: $(cat "$scratch/out")"
grep -q 'plan8.h5 was made for another model, of .* GFLOP' "$scratch/err" || fail "no word of the other model: $(cat "$scratch/err")"
checks=$((checks + 1))
python3 -c '
import sys
a, b = ([float(x) for x in open(p).read().split()] for p in sys.argv[1:])
assert len(a) == len(b) == 3 and max(abs(x / y - 1) for x, y in zip(a, b)) < 1e-5, (a, b)' "$scratch/losses1" "$scratch/losses8" >"$scratch/said" 2>&1 ||
    fail "losses of 1 and 8 rows: $(tail -n 1 "$scratch/said")"
passes 3 --input "$model" --cluster "$c" --data "$scratch/d.h5" --global-batch 32 --predict --steps 2 --threads 1 --output "$scratch/job" --overwrite
h5dump -a /plan/rows "$scratch/job/run.h5" >/dev/null || fail "the job's plan has no rows"
passes 3 --input "$model" --cluster "$c" --data "$scratch/d.h5" --steps 3 --threads 1 --output "$scratch/job" --resume
passes 3 --input "$model" --cluster "$c" --data "$scratch/d.h5" --steps 3 --threads 1 --output "$scratch/job" --resume
grep -q 'nothing was left to train: the checkpoint is after step 3' "$scratch/err" || fail "no word of a finished run: $(cat "$scratch/err")"
refuses 2 'global-batch 64: the plan has' 3 --input "$model" --cluster "$c" --data "$scratch/d.h5" --global-batch 64 --steps 4 --threads 1 --output "$scratch/job" --resume

# 16-bit messages: each term is rounded, on both sides alike.
sgd="--optimizer sgd --learning-rate 1000 --lr-schedule constant --clip-norm 0 --weight-decay 0 --steps 1 --threads 1 --overwrite"
/usr/bin/python3 tests/system/exchange.py make "$model" "$scratch/tied.h5" "$scratch/untied.h5" || fail "weights for the exchange"
passes 1 model gpt $small --microbatch 4 --weights "$scratch/tied.h5" --output "$scratch/t.h5"
passes 1 model gpt $small --microbatch 4 --tied-embeddings no --weights "$scratch/untied.h5" --output "$scratch/u.h5"
for run in u:fp32 t:fp32 t:16bit; do
    one=${run%:*} type=${run#*:}
    passes 1 plan --input "$scratch/$one.h5" --cluster "$c" --predict --threads 1 --microbatches 4 --stages "0-4@a:1x2,4-10@b:1x1" --layers-per-model 10 \
        --tied-exchange $type --output "$scratch/$one.$type.plan.h5" --json && cp "$scratch/out" "$scratch/$one.$type.json"
    passes 3 train --input "$scratch/$one.h5" --cluster "$c" --plan "$scratch/$one.$type.plan.h5" --data "$scratch/d.h5" $sgd --replica-check 1 --output "$scratch/$run"
    passes 1 export --checkpoint "$scratch/$run" --output "$scratch/w.$one.$type.h5"
done
checks=$((checks + 2))
/usr/bin/python3 tests/system/exchange.py compare "$scratch/tied.h5" "$scratch"/w.u.fp32.h5 "$scratch"/w.t.{fp32,16bit}.h5 >"$scratch/said" 2>&1 ||
    fail "16-bit exchange: $(tail -n 1 "$scratch/said")"
python3 -c '
import json, sys
a, b = (json.load(open(p)) for p in sys.argv[1:])
x, y = a["tied_exchange"], b["tied_exchange"]
assert x["bytes"] == 2 * y["bytes"] == 256 * 64 * 4 and y["type"] == "16bit", (x, y)
assert abs((a["simulated_s"] - b["simulated_s"]) - (x["seconds"] - y["seconds"])) < 1e-9 * a["simulated_s"], (a, b)' "$scratch"/t.{fp32,16bit}.json >"$scratch/said" 2>&1 ||
    fail "the exchange in the plan: $(tail -n 1 "$scratch/said")"

# The exchange in the timeline has its bytes. A loaded profile is converted.
for type in fp32 16bit; do
    passes 3 train --input "$scratch/t.h5" --cluster "$c" --plan "$scratch/t.$type.plan.h5" --data "$scratch/d.h5" --steps 1 --threads 1 --trace 1 --overwrite --output "$scratch/trace"
    passes 1 report --input "$scratch/trace/run.h5" --timeline "$scratch/t.json" --overwrite
    checks=$((checks + 1))
    python3 -c '
import json, sys
bytes = {e["args"].get("bytes") for e in json.load(open(sys.argv[1]))["traceEvents"] if e["name"] == "exchange"}
assert bytes == {256 * 64 * (4 if sys.argv[2] == "fp32" else 2)}, bytes' "$scratch/t.json" $type >"$scratch/said" 2>&1 || fail "timeline: $(tail -n 1 "$scratch/said")"
done
passes 1 profile --input "$model" --cluster "$c" --predict --threads 1 --microbatches 8 --output "$scratch/p.h5"
passes 1 plan --profile "$scratch/p.h5" --microbatches 8 --tied-exchange 16bit --stages "0-4@a:1x2,4-14@b:1x1" --json
converted=$(value "o['simulated_s']")
passes 1 plan --input "$model" --cluster "$c" --predict --threads 1 --microbatches 8 --tied-exchange 16bit --stages "0-4@a:1x2,4-14@b:1x1" --json
holds "a converted profile" "abs(o['simulated_s'] / $converted - 1) < 1e-12 and o['tied_exchange']['type'] == '16bit'"

# --fix restricts as its options do.
on_c="--input $model --cluster $c --predict --threads 1"
passes 1 plan $on_c --microbatches 8 --fix schedule=eager1f1b,exchange=16bit --fix program=data --json
holds "fixed schedule" "o['schedule'] == 'eager1f1b' and all(s['tensor_parallel'] == 1 for s in o['stages'])"
passes 1 plan $on_c --microbatches 8 --fix split=yes --json
grep -q '"split_backward": true' "$scratch/out" || fail "--fix split=yes: $(cat "$scratch/out")"
passes 1 plan $on_c --microbatches 8 --fix tensor-parallel=2 --json
holds "fixed degree" "all(s['tensor_parallel'] == 2 for s in o['stages'])"
passes 1 plan $on_c --microbatches 8 --stages "0-4@a:1x2,4-10@b:1x1" --layers-per-model 10 --fix launches=3:1 --json
holds "fixed launches" "[s['warmup'] for s in o['stages']] == [3, 1]"

refuses 2 'unknown key "cuts"' 1 plan $on_c --fix cuts=3
refuses 2 'rows=3 does not divide' 1 plan $on_c --global-batch 32 --fix rows=3
refuses 2 'give more than 1000000 microbatches' 1 plan $on_c --global-batch 1000000000
refuses 2 'needs --global-batch' 1 plan $on_c --fix rows=2
refuses 2 'cannot be divided' 1 plan $on_c --global-batch 32 --microbatches 5
refuses 2 'contradicts --global-batch' 1 plan $on_c --global-batch 32 --microbatches 4 --fix rows=4
refuses 2 'contradicts --schedule' 1 plan $on_c --schedule 1f1b --fix schedule=gpipe
refuses 2 'schedule is fixed twice' 1 plan $on_c --fix schedule=gpipe --fix schedule=1f1b
refuses 2 'needs --stages' 1 plan $on_c --fix launches=3:1
refuses 2 'there are 2 stages' 1 plan $on_c --microbatches 8 --stages "0-4@a:1x2,4-10@b:1x1" --layers-per-model 10 --fix launches=3
refuses 2 'bad value "maybe"' 1 plan $on_c --fix exchange=maybe
refuses 4 'no candidate of this degree' 1 plan $on_c --fix tensor-parallel=8
refuses 2 'holds one number of rows' 1 plan --profile "$scratch/p.h5" --global-batch 32
passes 1 model resnet --image 32 --width 8 --stages 2 --classes 7 --microbatch 4 --output "$scratch/resnet.h5"
passes 1 plan --input "$scratch/resnet.h5" --cluster "$c" --predict --threads 1 --global-batch 32 --json
holds "rows under batch norm" "o['rows'] == 4"
grep -q 'batch norm uses the statistics' "$scratch/err" || fail "no note about batch norm: $(cat "$scratch/err")"
finish
