#!/usr/bin/env bash
# kill -9 of a random rank at a random moment, again and again: every start finds a whole checkpoint, no more than an interval is lost,
# the last weights are those of a run that nobody disturbed. Then with the optimizer state on the hosts, and copies so slow that most kills meet
# an update. HAPT_LONG=1: 100 and 40 kills, and 40 each with weights, with updates, and with gradients on the hosts, and with sharded weights.
# HAPT_SEED repeats one.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
kills=3 away=1
[ -z "${HAPT_LONG:-}" ] || { kills=100 away=40; }
three_devices "900 MB"
# large checkpoints and short steps: 1.7 million parameters, 20 MB per checkpoint, a few milliseconds per step
passes 1 data tests/system/train.sh --output "$scratch/t.h5" || finish
passes 1 model gpt --layers 2 --hidden 256 --heads 4 --sequence 16 --vocab 256 --microbatch 1 --output "$scratch/m.h5" || finish
passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c.json" --predict --layers-per-model 6 --output "$scratch/p.h5" || finish
count_layers
passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "0-3@a:1x2,3-$layers@b:1x1" --output "$scratch/plan.h5" || finish
campaign() { # FOLDER KILLS
    checks=$((checks + 1))
    /usr/bin/python3 tests/system/kills.py "$HAPT" "$1" "$2" >"$scratch/said" || fail "the campaign of kills: $(cat "$scratch/said")"
    figures="${figures:+$figures; }$(tail -n 1 "$scratch/said")"
}
campaign "$scratch" "$kills"

away() { # FOLDER KILLS OPTIONS...
    mkdir "$scratch/$1" && ln -s "$scratch"/t.h5 "$scratch/$1" && ln -s "$scratch/${model:-m}.h5" "$scratch/$1/m.h5"
    sed 's/"device": "cpu"/"device": "cpu", "host": {"bandwidth": "40 MB\/s", "paced": true}/' "$scratch/c.json" >"$scratch/$1/c.json"
    passes 1 plan --input "$scratch/$1/m.h5" --cluster "$scratch/$1/c.json" --predict "${@:3}" --microbatches 2 --layers-per-model 6 \
        --stages "0-3@a:1x2,3-$layers@b:1x1" --output "$scratch/$1/plan.h5" || finish
    campaign "$scratch/$1" "$2"
}
away optimizer "$away" --offload optimizer --update-on device
if [ -n "${HAPT_LONG:-}" ]; then
    away weights "$away" --offload weights
    away update "$away" --offload optimizer --update-on host
    passes 1 model gpt --layers 2 --hidden 256 --heads 4 --sequence 16 --vocab 256 --microbatch 1 --tied-embeddings no \
        --output "$scratch/untied.h5" || finish
    model=untied away gradients "$away" --offload gradients
    check "gradients are on the hosts" grep -q 'gradients on the hosts' "$scratch/out"
    passes 1 model gpt --layers 2 --hidden 256 --heads 4 --sequence 16 --vocab 256 --microbatch 2 --output "$scratch/rows.h5" || finish
    model=rows away sharded "$away" --sharded-weights yes --program data
    check "weights are sharded" grep -q 'sharded weights, which' "$scratch/out"
fi
finish
