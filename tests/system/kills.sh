#!/usr/bin/env bash
# kill -9 of a random rank at a random moment, again and again: every start finds a whole checkpoint, no more than an interval is lost,
# the last weights are those of a run that nobody disturbed. HAPT_LONG=1: 300 kills. HAPT_SEED repeats one.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
kills=6
[ -z "${HAPT_LONG:-}" ] || kills=300
three_devices "900 MB"
# large checkpoints and short steps: 1.7 million parameters, 20 MB per checkpoint, a few milliseconds per step
passes 1 data tests/system/train.sh --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 2 --hidden 256 --heads 4 --sequence 16 --vocab 256 --microbatch 1 --output "$scratch/m.h5" || finish
passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c.json" --predict --layers-per-model 6 --output "$scratch/p.h5" || finish
count_layers
passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "0-3@a:1x2,3-$layers@b:1x1" --output "$scratch/plan.h5" || finish
checks=$((checks + 1))
/usr/bin/python3 tests/system/kills.py "$HAPT" "$scratch" "$kills" >"$scratch/said" || fail "the campaign of kills: $(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
