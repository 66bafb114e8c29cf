#!/usr/bin/env bash
# --offload weights: the weights are on the hosts, and passes fetch them block by block; --offload gradients: their gradients as well. Losses,
# weights and state are the bits of a run that keeps them on the devices, for every layout and schedule; the memory is what was planned; models
# of three and sixteen times the device's memory train; what cannot work is refused. HAPT_LONG=1: more layouts.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
gpt() { # NAME OPTIONS...
    "$HAPT" model gpt --layers 6 --hidden 32 --heads 4 --sequence 64 --vocab 256 --data "$scratch/t.h5" --output "$scratch/$1.h5" "${@:2}" >/dev/null || exit 1
}
gpt m --microbatch 1
gpt rows --microbatch 2
two_devices wide "300 MB"
three_devices "300 MB" && mv "$scratch/c.json" "$scratch/three.json"

# job NAME MODEL CLUSTER RANKS OPTIONS...: predicts, plans and trains 6 steps
job() {
    passes "$4" --input "$scratch/$2.h5" --cluster "$scratch/$3.json" --predict --microbatches 4 --threads 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:5}"
}
# both NAME MODEL CLUSTER RANKS OPTIONS...: with all on the devices, and with weights on the hosts. Devices and hosts update in turn.
update_on=host
both() {
    [ $update_on = host ] && update_on=device || update_on=host
    job "$1-here" "$2" "$3" "$4" --offload no "${@:5}"
    job "$1-away" "$2" "$3" "$4" --offload weights --update-on $update_on "${@:5}"
    check "$1: the weights are on the hosts" grep -q 'weights on the hosts' "$scratch/out"
    same_runs "$scratch/run-$1-here" "$scratch/run-$1-away"
}
two="0-13@a:1x1,13-26@b:1x1"
both tied m wide 2 --stages $two
both half m wide 2 --stages $two --precision bf16
[ -z "${HAPT_LONG:-}" ] || # the gradients of such stages are below
    both rows rows three 3 --stages "0-13@a:1x2,13-26@b:1x1" --replica-check 1
[ -z "${HAPT_LONG:-}" ] ||
    both loops m wide 2 --schedule interleaved --stages 0-6@a:1x1,6-12@b:1x1,12-19@a:1x1,19-26@b:1x1
# gradients WHERE STAGES NAME MODEL CLUSTER RANKS OPTIONS...: the same with gradients on the hosts, of the stages "STAGES" alone, against the
# run WHERE
gradients() {
    job "$3-gradients" "${@:4:3}" --offload gradients "${@:7}"
    check "$3: gradients are on the hosts" grep -q "gradients on the hosts.* of stages: $2\$" "$scratch/out"
    same_runs "$scratch/run-$1" "$scratch/run-$3-gradients"
}
gpt untied --microbatch 1 --tied-embeddings no
job untied untied wide 2 --offload no --stages $two
gradients untied "0 1" untied untied wide 2 --stages $two
for precision in ${HAPT_LONG:+fp32} bf16; do
    job one-$precision m wide 2 --offload no --stages 0-26@a:1x1 --precision $precision
    gradients one-$precision 0 one-$precision m wide 2 --stages 0-26@a:1x1 --precision $precision
done
gpt untied-rows --microbatch 2 --tied-embeddings no
job untied-rows untied-rows three 3 --offload no --stages "0-13@a:1x2,13-26@b:1x1"
gradients untied-rows 1 untied-rows untied-rows three 3 --stages "0-13@a:1x2,13-26@b:1x1" # two devices sum theirs
job tied-gradients m wide 2 --offload gradients --stages $two
check "tied: both stages keep their gradients" test "$(grep -c 'gradients on the hosts' "$scratch/out")" -eq 0
same_runs "$scratch/run-tied-here" "$scratch/run-tied-gradients"
if [ -n "${HAPT_LONG:-}" ]; then
    gradients untied "0 1" untied-split untied wide 2 --stages $two --split-backward yes
    gradients untied "0 1 2 3" loops untied wide 2 --schedule interleaved --stages 0-6@a:1x1,6-12@b:1x1,12-19@a:1x1,19-26@b:1x1
    gradients untied "0 1" recompute untied wide 2 --stages $two --recompute all --schedule gpipe
    "$HAPT" model bert-moe --layers 4 --hidden 32 --heads 4 --sequence 32 --vocab 256 --experts 2 --microbatch 1 --data "$scratch/t.h5" \
        --output "$scratch/moe.h5" >/dev/null || exit 1
    both moe moe wide 2
    both split m wide 2 --stages $two --split-backward yes
    both tensor rows three 3 --stages "0-13@a:1x2t2,13-26@b:1x1"
    both recompute m wide 2 --stages $two --recompute all --schedule gpipe
    both momentum m wide 2 --stages $two --optimizer sgd --momentum 0.9
    both half-rows rows three 3 --stages "0-13@a:1x2,13-26@b:1x1" --precision bf16 --replica-check 1
fi

# Measured times of stages with their weights on the devices, and the time of the copies
passes 2 --input "$scratch/m.h5" --cluster "$scratch/wide.json" --microbatches 4 --threads 1 --profile-seconds 1 --steps 6 --checkpoint-every 3 \
    --output "$scratch/run-measured" --offload weights
check "measured: the weights are on the hosts" grep -q 'weights on the hosts' "$scratch/out"
same_runs "$scratch/run-tied-here" "$scratch/run-measured"

# Checkpoints of each resume another.
then=no
for first in weights ${HAPT_LONG:+gradients no}; do
    job from-$first untied wide 2 --stages $two --offload $first --stop-after 3
    job from-$first untied wide 2 --stages $two --offload $then --resume --replan
    same_runs "$scratch/run-untied" "$scratch/run-from-$first"
    then=$first
done

# A model of three times the device's memory: auto has its weights on the host, in the memory that was planned.
"$HAPT" model gpt --layers 40 --hidden 64 --heads 4 --sequence 16 --vocab 256 --microbatch 1 --tied-embeddings no --data "$scratch/t.h5" \
    --output "$scratch/deep.h5" >/dev/null || exit 1
one_device() { # NAME MEMORY
    cat >"$scratch/$1.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "$2"} ], "links": [] }
JSON
}
one_device large "300 MB"
job deep-here deep large 1 --offload no
passes 1 export --checkpoint "$scratch/run-deep-here" --output "$scratch/w.h5"
state=$(/usr/bin/python3 -c 'import h5py, sys
print(16 * sum(item.size for item in h5py.File(sys.argv[1])["parameters"].values()))' "$scratch/w.h5")
one_device small "$((state / 3)) B"
refuses 4 'no plan fits' 1 plan --input "$scratch/deep.h5" --cluster "$scratch/small.json" --predict --microbatches 4 --offload no
refuses 4 'no plan fits' 1 plan --input "$scratch/deep.h5" --cluster "$scratch/small.json" --predict --microbatches 4 --offload optimizer
job deep-away deep small 1
check "a third of the memory: the weights are on the host" grep -q 'weights on the hosts' "$scratch/out"
same_runs "$scratch/run-deep-here" "$scratch/run-deep-away"
passes 1 plan --input "$scratch/deep.h5" --cluster "$scratch/small.json" --predict --microbatches 4 --explain --json
check "--explain gives the price of it" /usr/bin/python3 -c '
import json, sys
plan = json.load(open(sys.argv[1]))
moved = [stage for stage, its in enumerate(plan["stages"]) if its.get("host_weights")]
told = plan["explain"]["weights"]
assert moved and [entry["stage"] for entry in told] == moved, (moved, told)
for entry in told: # more than the device has, or not even with one microbatch
    assert entry["weights"] == "on the host" and (entry["kept_memory_bytes"] or 1e99) > float(sys.argv[2]), entry
' "$scratch/out" $((state / 3))
# A sixteenth: the gradients have to leave, too.
one_device tiny "$((state / 16)) B"
refuses 4 'no plan fits' 1 plan --input "$scratch/deep.h5" --cluster "$scratch/tiny.json" --predict --microbatches 4 --offload weights
job deep-gradients deep tiny 1
check "a sixteenth of the memory: the gradients are on the host" grep -q 'gradients on the hosts' "$scratch/out"
same_runs "$scratch/run-deep-here" "$scratch/run-deep-gradients"
for run in {tied,half,deep}-away ${HAPT_LONG:+rows-away loops-away} {untied,one-bf16,untied-rows,deep}-gradients; do
    check "$run: the planned memory is used, no more" /usr/bin/python3 -c 'import h5py, sys
run = h5py.File(sys.argv[1])["train"]
sys.exit(list(run["memory_planned"][()]) != list(run["memory_measured"][()]))' "$scratch/run-$run/run.h5"
done

# Passes copy all weights but those of the two units with which the pass before ended; unpaced copies of CPUs hide behind nothing. The host has
# masters and two states.
host() { # NAME HOST
    one_device "$1" "300 MB" && sed -i "s|\"memory\": \"300 MB\"|&, \"host\": $2|" "$scratch/$1.json"
}
host fast '{"bandwidth": "8 GB/s"}'
host slow '{"bandwidth": "80 MB/s"}'
host paced '{"bandwidth": "80 MB/s", "paced": true}'
for name in fast slow; do
    passes 1 profile --input "$scratch/deep.h5" --cluster "$scratch/$name.json" --predict --microbatches 4 --offload weights --update-on device \
        --recompute no --output "$scratch/$name.h5"
done
plan_paced() { # NAME OPTIONS...
    passes 1 plan --input "$scratch/deep.h5" --cluster "$scratch/paced.json" --predict --microbatches 4 "${@:2}" \
        --recompute no --threads 1 --json --output "$scratch/$1.h5"
}
plan_paced host --offload weights --update-on host
plan_paced device --offload weights --update-on device
plan_paced gradients --offload gradients
for where in host device gradients; do
    passes 1 train --input "$scratch/deep.h5" --cluster "$scratch/paced.json" --plan "$scratch/$where.h5" --threads 1 --steps 6 \
        --output "$scratch/run-$where"
done
same_runs "$scratch/run-host" "$scratch/run-device"
same_runs "$scratch/run-host" "$scratch/run-gradients"
checks=$((checks + 1))
/usr/bin/python3 - "$scratch" <<'PY' || fail "bytes and times of fetched weights"
import json, sys
import h5py
folder = sys.argv[1] + "/"
weights = 4 * sum(item.size for item in h5py.File(folder + "w.h5")["parameters"].values())
units = h5py.File(folder + "device.h5")["weight_unit"].shape[0]
assert units == 42, units  # the embedding, 40 blocks, the head
fetched = weights * (units - 2) / units
fast, slow = (h5py.File(folder + name + ".h5")["cluster_0"] for name in ("fast", "slow"))
whole = (0, 0, fast["stage_time"].shape[2] - 1)
for name, passes in (("stage_time", 2), ("stage_forward_time", 1)):
    more = slow[name][whole] - fast[name][whole]
    assert abs(more / (passes * fetched * (1 / 80e6 - 1 / 8e9)) - 1) < 0.02, (name, more)
shortest_s = {}
# The update copies the masters and two states both ways at the same time, or the gradients to the host; or these come to the
# backward passes of three of the four microbatches, and the host has them, too.
for where, copied in ("device", 3), ("host", 1), ("gradients", 3):
    run, plan = (h5py.File(folder + name) for name in ("run-%s/run.h5" % where, where + ".h5"))
    held = run["train/host_memory"][0] / weights
    assert 4 <= held < 4.01 if where == "gradients" else 3 <= held < (3.03 if where == "device" else 3.6), held
    copies_s = (8 * fetched + copied * weights) / 80e6
    predicted_s = plan["/"].attrs["simulated"]
    steps_s = run["train/step_time"][1:-1]  # the last one waits for a checkpoint
    shortest_s[where] = min(steps_s)
    print("%s: copies %.3f s, predicted %.3f s, steps %s" % (where, copies_s, predicted_s, steps_s))
    assert min(steps_s) > 0.99 * copies_s and copies_s < predicted_s < 1.3 * copies_s and min(steps_s) < 1.5 * predicted_s
assert shortest_s["host"] < shortest_s["device"] and shortest_s["host"] < shortest_s["gradients"], shortest_s
PY

refuses 2 'contradicts --sharded-optimizer' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --offload weights --sharded-optimizer yes
refuses 2 'keeps no state' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --offload weights --optimizer sgd
refuses 3 'are not sharded' 1 train --input "$scratch/deep.h5" --cluster "$scratch/paced.json" --plan "$scratch/device.h5" --threads 1 --steps 1 \
    --sharded-optimizer yes --output "$scratch/none"
refuses 3 'this optimizer does not have' 1 train --input "$scratch/deep.h5" --cluster "$scratch/paced.json" --plan "$scratch/device.h5" --threads 1 \
    --steps 1 --optimizer sgd --output "$scratch/none"
damage() { # FILE CODE
    cp "$scratch/$1.h5" "$scratch/bad.h5"
    /usr/bin/python3 -c "import h5py, sys; file = h5py.File(sys.argv[1], 'r+'); $2" "$scratch/bad.h5"
}
for code in "file['stage_host_weights'][0] = 2" "file['weight_unit'][3, 2] -= 1" "file['weight_unit'][41, 0] = 1" "file['weight_unit'][1, 1] -= 1" "del file['weight_unit']" "del file.attrs['offload']"; do
    damage device "$code"
    refuses 3 'weights|weight_unit|offload' 1 simulate --plan "$scratch/bad.h5"
done
for code in "file['cluster_0/host_weights'][0] = 2" "del file.attrs['offload']"; do
    damage fast "$code"
    refuses 3 'host_weights' 1 plan --profile "$scratch/bad.h5"
done
# Gradients in files where they cannot leave: of two devices, and of weights that both stages have
passes 1 plan --input "$scratch/rows.h5" --cluster "$scratch/three.json" --predict --microbatches 4 --offload weights --update-on host \
    --stages "0-13@a:1x2,13-26@b:1x1" --output "$scratch/away.h5"
damage away "file['stage_host_weights'][0] = 2"
refuses 3 'stage 0 cannot have its weights on the host' 1 simulate --plan "$scratch/bad.h5"
damage away "file['stage_host_weights'][1] = 2"
refuses 3 'gradients of stage 1 on the hosts, which cannot leave' 3 train --input "$scratch/rows.h5" --cluster "$scratch/three.json" \
    --plan "$scratch/bad.h5" --threads 1 --steps 1 --output "$scratch/none"
host stalled '{"bandwidth": "100 B/s", "paced": true}'
refuses 7 'copy of offloaded memory from the host to the device has made no progress for 4 s.* which begins with [a-z0-9_]+\.' 1 train --input "$scratch/deep.h5" \
    --cluster "$scratch/stalled.json" --plan "$scratch/device.h5" --threads 1 --steps 1 --timeout 4 --output "$scratch/stalled"
finish
