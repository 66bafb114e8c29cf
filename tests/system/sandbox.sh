#!/usr/bin/env bash
# Files over which the HDF5 library itself crashes (1.10.8; newer ones may only refuse them): the sandbox makes it one error line, a hint
# and exit code 3, alone and on several ranks, and leaves no process behind.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
corpus=tests/fuzz/corpus
gpt="gpt --layers 1 --hidden 8 --heads 2 --sequence 8 --vocab 256 --microbatch 2"

for ranks in 1 2; do
    refuses 3 . $ranks profile --input $corpus/regression-model-crash.h5 --cluster $corpus/cluster-two.json --predict --output "$scratch/p.h5"
    refuses 3 . $ranks --input $corpus/regression-model-crash.h5 --steps 1 --output "$scratch/run"
    for model in uninitialised heap reserves; do
        refuses 3 . $ranks profile --input $corpus/regression-model-$model.h5 --cluster $corpus/cluster-two.json --predict --output "$scratch/p.h5"
    done
    # shellcheck disable=SC2086
    refuses 3 . $ranks model $gpt --data $corpus/regression-tokens-heap.h5 --output "$scratch/m.h5"
    refuses 3 . $ranks profile --input $corpus/model-gpt.h5 --cluster $corpus/cluster-two.json --predict \
        --efficiency $corpus/regression-efficiency-crash.h5 --output "$scratch/p.h5"
    passes $ranks plan --profile $corpus/profile-plain.h5 --microbatches 4
done

# A killed rank takes its sandbox process with it.
# shellcheck disable=SC2086
passes 1 model $gpt --output "$scratch/m.h5" && passes 1 data LICENSE --output "$scratch/t.h5"
"$HAPT" --input "$scratch/m.h5" --data "$scratch/t.h5" --steps 100000000 --output "$scratch/long" >"$scratch/long.out" 2>&1 &
rank=$!
helper=
for _ in $(seq 200); do
    helper=$(pgrep -P $rank -x hapt-sandbox) && break
    sleep 0.05
done
checks=$((checks + 1))
[ -n "$helper" ] || fail "no sandbox process beside a running hapt: $(tail -n 3 "$scratch/long.out")"
kill -KILL $rank
wait $rank 2>/dev/null
for _ in $(seq 100); do
    [ -n "$helper" ] && [ -e "/proc/$helper" ] && ! grep -q '^State:.Z' "/proc/$helper/status" 2>/dev/null || break
    sleep 0.05
done
checks=$((checks + 1))
[ -z "$helper" ] || [ ! -e "/proc/$helper" ] || grep -q '^State:.Z' "/proc/$helper/status" 2>/dev/null || fail "the sandbox process outlives its rank"
finish
