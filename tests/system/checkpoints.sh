#!/usr/bin/env bash
# Checkpoints in unlucky runs: a rank dies before training began, all that stands is damaged, the data are others, memory lacks for a copy,
# one rank alone meets a value that is not finite.
# Runs beside others: it measures no time.
. tests/system/lib.sh.inc
check() { # WHAT CONDITION...
    local what=$1
    shift
    checks=$((checks + 1))
    "$@" || fail "$what: $*"
}
three_devices "900 MB"
head -c 30000 README.md >"$scratch/text"
head -c 30000 Makefile >"$scratch/other"
passes 1 data "$scratch/text" --output "$scratch/t.h5" || finish
passes 1 data "$scratch/other" --output "$scratch/other.h5" || finish
passes 1 model gpt --layers 2 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings no --output "$scratch/m.h5" || finish
passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/c.json" --predict --layers-per-model 6 --output "$scratch/p.h5" || finish
count_layers
passes 1 plan --profile "$scratch/p.h5" --microbatches 2 --stages "0-2@a:1x2,2-$layers@b:1x1" --output "$scratch/plan.h5" || finish
train="train --cluster $scratch/c.json --plan $scratch/plan.h5 --threads 1 --layers-per-model 6"
sum() { (cd "$1" && find . -type f | sort | xargs sha256sum); }

# 1. A rank dies while the model is profiled, and when the folder of the first checkpoint is made. The same command again completes the run.
job="--input $scratch/m.h5 --cluster $scratch/c.json --data $scratch/t.h5 --threads 1 --microbatches 2 --steps 3 --resume auto --output $scratch/job"
# shellcheck disable=SC2086
mpirun --oversubscribe --bind-to none -np 3 "$HAPT" $job --profile-seconds 60 >"$scratch/out" 2>"$scratch/err" &
launcher=$!
for _ in $(seq 1000); do
    grep -q '^Cluster' "$scratch/out" && break
    sleep 0.02
done
read -ra ranks < <(cat /proc/$launcher/task/*/children | tr '\n' ' ')
kill -KILL "${ranks[1]}"
wait $launcher
code=$?
check "a rank dies while the model is profiled: code $code" [ $code -ne 0 ]
check "no checkpoint exists yet" [ -z "$(ls "$scratch/job/checkpoints" 2>/dev/null)" ]
# the folders of the run exist: the next one is that of the first checkpoint
# shellcheck disable=SC2086
LD_PRELOAD=$HAPT_BUILD/tests/faults/faults.so FAULTS_UNDER=$scratch/job FAULTS_CALL=mkdir FAULTS_AT=1 FAULTS_ERROR=KILL \
    on 3 $job --profile-seconds 0.5 >"$scratch/out" 2>"$scratch/err"
code=$?
check "a rank dies while it saves the first checkpoint: code $code, $(tail -n 2 "$scratch/err")" [ $code -eq 137 ]
check "no checkpoint exists yet" [ -z "$(ls "$scratch/job/checkpoints" 2>/dev/null)" ]
# shellcheck disable=SC2086
passes 3 $job --profile-seconds 0.5 --json && check "the run began at step 0" grep -q '"first_step": 0,' "$scratch/out"

# 2. No checkpoint is intact: one error, and nothing is overwritten.
passes 3 $train --input "$scratch/m.h5" --data "$scratch/t.h5" --steps 4 --checkpoint-every 2 --output "$scratch/run"
cp -r "$scratch/run" "$scratch/spoilt"
for manifest in "$scratch"/spoilt/checkpoints/*/manifest.h5; do echo damage >>"${manifest%/*}/shard-0000.h5"; done
before=$(sum "$scratch/spoilt")
for how in auto yes; do
    refuses 3 'no checkpoint in .* is intact' 3 $train --input "$scratch/m.h5" --data "$scratch/t.h5" --steps 8 --resume $how --output "$scratch/spoilt"
    check "each damaged one is named" [ "$(grep -c 'is damaged and skipped' "$scratch/err")" -eq 2 ]
    check "nothing is overwritten" [ "$before" = "$(sum "$scratch/spoilt")" ]
done

# A file in place of the checkpoints' folder. It is found after the stages have connected.
mkdir "$scratch/blocked" && touch "$scratch/blocked/checkpoints"
refuses 6 'checkpoints' 3 $train --input "$scratch/m.h5" --data "$scratch/t.h5" --steps 2 --output "$scratch/blocked"

# 3. Training goes on with a warning if the data differ from the checkpoint's, or their order does. With the same data there is no warning.
resumed() { # PATTERN OPTIONS...
    local pattern=$1
    shift
    rm -rf "$scratch/again"
    cp -r "$scratch/run" "$scratch/again"
    # shellcheck disable=SC2086
    passes 3 $train --input "$scratch/m.h5" --steps 6 --resume --output "$scratch/again" "$@" || return
    check "the data's identity ($*)" [ "$(grep -c 'the data differ from those\|the order of the data differs' "$scratch/err")" -eq $((${#pattern} > 0)) ]
    grep -q "$pattern" "$scratch/err" || fail "no /$pattern/ in: $(cat "$scratch/err")"
}
resumed "" --data "$scratch/t.h5"
resumed 'the data differ from those of checkpoint .*step-00000004' --data "$scratch/other.h5"
resumed 'the order of the data differs' --data "$scratch/t.h5" --data-seed 7

# 4. No memory for a copy: a message says so, and training waits for each checkpoint. The result is the same. The address space is limited
# to that of a run without a copy plus a little (an address sanitizer exceeds any limit).
alone() { # NAME OPTIONS...
    local name=$1
    shift
    MALLOC_ARENA_MAX=1 OMP_NUM_THREADS=1 "$HAPT" train --input "$scratch/large.h5" --cluster "$scratch/c1.json" --plan "$scratch/plan1.h5" --threads 1 \
        --checkpoint-every 4 --keep 10 --output "$scratch/$name" "$@" >"$scratch/$name.out" 2>"$scratch/$name.err"
}
scarce_memory() {
    local large process peak copy
    large="gpt --layers 2 --hidden 640 --heads 4 --sequence 8 --vocab 256 --microbatch 1"
    passes 1 model $large --data "$scratch/t.h5" --output "$scratch/large.h5"
    echo '{ "format": "hapt-cluster", "version": 1, "subclusters": [ {"name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "900 MB"} ] }' >"$scratch/c1.json"
    passes 1 plan --input "$scratch/large.h5" --cluster "$scratch/c1.json" --predict --microbatches 1 --threads 1 --output "$scratch/plan1.h5"
    alone endless --checkpoint-async no --steps 1000000 &
    for _ in $(seq 400); do
        [ -e "$scratch/endless/checkpoints/step-00000004/manifest.h5" ] && break
        sleep 0.05
    done
    process=$(tr -d ' ' <"/proc/$!/task/$!/children") # the child of the shell behind "&"
    peak=$(sed -n 's/^VmPeak:[^0-9]*\([0-9]*\) kB/\1/p' "/proc/$process/status")
    kill -KILL "$process"
    wait
    copy=$(($(stat -c %s "$scratch/endless/checkpoints/step-00000004/shard-0000.h5") / 1024))
    alone room --steps 6 || fail "with memory for a copy: $(tail -n 2 "$scratch/room.err")"
    check "with memory for a copy: two checkpoints in each interval" \
        [ "$(ls "$scratch/room/checkpoints" | tr '\n' ' ')" = "step-00000002 step-00000004 step-00000006 " ]
    (
        ulimit -v $((peak + copy / 8)) # kB
        alone scarce --steps 6
    ) || fail "without memory for a copy: $(tail -n 2 "$scratch/scarce.err")"
    check "said: $(cat "$scratch/scarce.err")" grep -q 'checkpoints are synchronous: copies would need' "$scratch/scarce.err"
    check "without memory for a copy: one checkpoint in each interval" [ "$(ls "$scratch/scarce/checkpoints" | tr '\n' ' ')" = "step-00000004 step-00000006 " ]
    check "the same weights" /usr/bin/python3 tests/system/same_checkpoint.py "$scratch/room" "$scratch/scarce" 6 >"$scratch/why"
}
nm "$HAPT" 2>/dev/null | grep -q __asan_init || scarce_memory

# 5. Only one rank has a gradient that is not finite: no rank updates, and the last checkpoint stays.
passes 1 export --checkpoint "$scratch/run" --output "$scratch/old.h5"
/usr/bin/python3 - "$scratch" <<'P' || fail "making the model"
# The last layer norm's gain and bias are 0, so logits are 0 and the loss is log 256. The head's row of token 97 is 2e38, and the first
# column of the residual stream is large. If 97 is the target, the gain's gradient is about 8 times that row, beyond fp32. No other gradient
# depends on it, because the gain is 0.
import sys
import h5py, numpy
folder = sys.argv[1]
with h5py.File(folder + "/old.h5", "r") as old, h5py.File(folder + "/weights.h5", "w") as new:
    for name, value in ((name, old["parameters"][name][()]) for name in old["parameters"]):
        if name.endswith("c_proj.weight") or name.startswith("ln_f.") or name == "wpe.weight":
            value[...] = 0
        if name == "wte.weight":
            value[:, 0] = 10
        if name == "lm_head.weight":
            value[...] = 0
            value[97] = 2e38
        new["parameters/" + name] = value
tokens = numpy.random.default_rng(1).integers(0, 97, (4, 4, 33))
tokens[2:, :, 1:] = 97
with h5py.File(folder + "/spike.h5", "w") as file:
    file["batches"] = tokens
P
passes 1 model gpt --layers 2 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings no --weights "$scratch/weights.h5" --output "$scratch/spike-m.h5"
# shellcheck disable=SC2086
refuses 3 'error: step 2: the loss is 5\.5.* nothing was updated; it began at the gradient of ln_f.weight on rank 2 of stage 1' 3 \
    $train --input "$scratch/spike-m.h5" --data "$scratch/spike.h5" --optimizer sgd --learning-rate 0 --lr-schedule constant --clip-norm 0 \
    --steps 4 --checkpoint-every 1 --output "$scratch/spike"
check "the last checkpoint is of step 2" [ "$(ls "$scratch/spike/checkpoints" | tail -n 1)" = step-00000002 ]
passes 1 export --checkpoint "$scratch/spike" --output "$scratch/kept.h5"
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/weights.h5" "$scratch/kept.h5" <<'P' || fail "the last checkpoint has different weights"
import sys
import h5py
one, two = ({name: item[()].tobytes() for name, item in h5py.File(path, "r")["parameters"].items()} for path in sys.argv[1:])
sys.exit(one != two or not one)
P
finish
