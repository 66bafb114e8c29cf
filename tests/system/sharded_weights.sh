#!/usr/bin/env bash
# --sharded-weights: ranks of a data-parallel stage have a slice of the weights each, and passes gather them block by block (ZeRO-3). Losses,
# weights and state are the bits of a run that keeps all weights on each device; the memory is what was planned; checkpoints resume across both;
# memory that is short makes the planner choose it; what cannot work is refused. HAPT_LONG=1: more layouts.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
gpt() { # NAME OPTIONS...
    "$HAPT" model gpt --layers 6 --hidden 32 --heads 4 --sequence 64 --vocab 256 --data "$scratch/t.h5" --output "$scratch/$1.h5" "${@:2}" >/dev/null || exit 1
}
gpt m --microbatch 4
gpt untied --microbatch 4 --tied-embeddings no
three_devices "300 MB" && mv "$scratch/c.json" "$scratch/three.json"
sed 's/"devices_per_node": 2/"devices_per_node": 4/; /"b"/d; s/"300 MB" },$/"300 MB" } ] }/' "$scratch/three.json" >"$scratch/four.json"

# job NAME MODEL CLUSTER RANKS OPTIONS...: predicts, plans and trains 6 steps
job() {
    passes "$4" --input "$scratch/$2.h5" --cluster "$scratch/$3.json" --predict --microbatches 4 --threads 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:5}"
}
# both NAME MODEL CLUSTER RANKS OPTIONS...: with all weights on each device, and with sharded ones
both() {
    job "$1-whole" "$2" "$3" "$4" --sharded-weights no "${@:5}"
    job "$1-sharded" "$2" "$3" "$4" --sharded-weights yes "${@:5}"
    check "$1: the weights are sharded" grep -q 'sharded weights, which passes gather' "$scratch/out"
    same_runs "$scratch/run-$1-whole" "$scratch/run-$1-sharded"
    /usr/bin/python3 - "$scratch/run-$1-sharded/run.h5" <<'PY' || fail "$1: device memory is not what was planned"
import sys
import h5py
with h5py.File(sys.argv[1]) as run:
    planned, measured = (list(run["train"][name][()]) for name in ("memory_planned", "memory_measured"))
print(planned, measured)
sys.exit(planned != measured)
PY
}
stages="0-13@a:1x2,13-26@b:1x1"
both tied m three 3 --stages $stages
both half m three 3 --stages $stages --precision bf16
both split untied three 3 --stages $stages --split-backward yes --precision bf16
both loops untied three 3 --schedule interleaved --stages 0-6@a:1x2,6-12@b:1x1,12-19@a:1x2,19-26@b:1x1
both groups untied four 4 --stages 0-26@a:1x4t2 --precision bf16
if [ -n "${HAPT_LONG:-}" ]; then
    both one untied four 4 --stages 0-26@a:1x4
    both host untied three 3 --stages $stages --offload optimizer --precision bf16
    both recompute untied three 3 --stages $stages --recompute all --schedule gpipe
    both host-update untied three 3 --stages $stages --offload optimizer --update-on host --precision bf16
    both host-device untied three 3 --stages $stages --offload optimizer --update-on device --precision bf16
    both momentum untied three 3 --stages $stages --optimizer sgd --momentum 0.9
    both half-groups m four 4 --stages 0-26@a:1x4t2 --precision bf16 --split-backward yes
    "$HAPT" model bert-moe --layers 4 --hidden 32 --heads 4 --sequence 32 --vocab 256 --experts 2 --microbatch 4 --data "$scratch/t.h5" \
        --output "$scratch/moe.h5" >/dev/null || exit 1
    both moe moe four 4 --stages 0-16@a:1x4
fi

# Checkpoints of each resume the other.
for first in yes ${HAPT_LONG:+no}; do
    then=no && [ $first = no ] && then=yes
    job from-$first untied three 3 --stages $stages --precision bf16 --split-backward yes --sharded-weights $first --stop-after 3
    job from-$first untied three 3 --stages $stages --precision bf16 --split-backward yes --sharded-weights $then --resume --replan
    same_runs "$scratch/run-split-whole" "$scratch/run-from-$first"
done

# Measured times, and the time of the gathers
passes 3 --input "$scratch/untied.h5" --cluster "$scratch/three.json" --microbatches 4 --threads 1 --profile-seconds 1 --steps 3 \
    --output "$scratch/run-measured" --sharded-weights yes --stages $stages
check "measured: the weights are sharded" grep -q 'sharded weights, which passes gather' "$scratch/out"

# Short memory and few microbatches: the planner shards, and the step is shorter.
"$HAPT" model gpt --layers 12 --hidden 256 --heads 4 --sequence 64 --vocab 256 --microbatch 4 --output "$scratch/short.h5" >/dev/null || exit 1
sed 's/300 MB/80 MB/' "$scratch/four.json" >"$scratch/short.json"
plan_short() { # NAME OPTIONS...
    passes 1 plan --input "$scratch/short.h5" --cluster "$scratch/short.json" --predict --microbatches 2 --program data --offload no --json \
        --output "$scratch/$1.h5" "${@:2}" && cp "$scratch/out" "$scratch/$1.json"
}
plan_short never --sharded-weights no
plan_short auto
check "auto: a shorter step by sharded weights" /usr/bin/python3 -c '
import json, sys
never, auto = (json.load(open(name)) for name in sys.argv[1:])
assert any(stage.get("sharded_weights") for stage in auto["stages"])
assert auto["simulated_s"] < 0.99 * never["simulated_s"], (auto["simulated_s"], never["simulated_s"])' "$scratch/never.json" "$scratch/auto.json"

# Without anything to shard the plan is the one without, also if most has to recompute.
"$HAPT" model gpt --layers 12 --hidden 64 --heads 4 --sequence 128 --vocab 256 --microbatch 16 --output "$scratch/alone.h5" >/dev/null || exit 1
printf '{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "24 MB"} ] }' >"$scratch/alone.json"
for choice in no yes; do
    passes 1 plan --input "$scratch/alone.h5" --cluster "$scratch/alone.json" --predict --microbatches 4 --update-on device --sharded-weights $choice
    grep -v '^  searched' "$scratch/out" >"$scratch/alone-$choice"
done
check "one device: the same plan" cmp "$scratch/alone-no" "$scratch/alone-yes"
check "and a note" grep -q 'sharded-weights yes: no stage of the plan has weights to shard' "$scratch/err"
passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --stages 0-26@a:1x4 --sharded-weights yes \
    --offload optimizer --output "$scratch/masters.h5"
check "fp32 masters on the hosts: no weights to shard" grep -q 'no stage of the plan has weights to shard' "$scratch/err"
check "and none are said to be" test "$(grep -c 'sharded weights, which' "$scratch/out")" -eq 0

# Other schedules need the memory of more microbatches: what leaves the devices is decided for the schedule that is asked for.
sed 's/300 MB/60 MB/' "$scratch/four.json" >"$scratch/scarce.json"
for schedule in gpipe interleaved; do
    refuses 4 'no plan' 1 plan --input "$scratch/short.h5" --cluster "$scratch/scarce.json" --predict --microbatches 8 --schedule $schedule \
        --offload no --recompute no
    passes 1 plan --input "$scratch/short.h5" --cluster "$scratch/scarce.json" --predict --microbatches 8 --schedule $schedule
    check "$schedule: a plan with what leaves the devices" grep -q 'on the hosts' "$scratch/out"
done

passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/three.json" --predict --output "$scratch/p.h5"
refuses 2 'sharded-weights has no effect: --profile' 1 plan --profile "$scratch/p.h5" --sharded-weights yes
refuses 2 'sharded-weights yes contradicts --offload weights' 1 plan --input "$scratch/m.h5" --cluster "$scratch/three.json" --predict \
    --sharded-weights yes --offload weights
refuses 2 'sharded-weights yes contradicts --sharded-optimizer no' 1 plan --input "$scratch/m.h5" --cluster "$scratch/three.json" --predict \
    --sharded-weights yes --sharded-optimizer no
passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/three.json" --predict --microbatches 4 --stages $stages --sharded-weights yes \
    --output "$scratch/plan.h5"
refuses 3 'sharded-optimizer no: the plan has the weights of stage 0 sharded' 3 train --input "$scratch/m.h5" --cluster "$scratch/three.json" \
    --plan "$scratch/plan.h5" --sharded-optimizer no --steps 1 --output "$scratch/run-refused"
/usr/bin/python3 -c 'import h5py, sys
with h5py.File(sys.argv[1], "r+") as plan:
    plan["stage_host_weights"][...] = [3, 3]' "$scratch/plan.h5"
refuses 3 'stage 1 cannot have its weights sharded' 1 simulate --plan "$scratch/plan.h5"
finish
