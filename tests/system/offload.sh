#!/usr/bin/env bash
# --offload: a model whose optimizer state fits no device is planned and trained with the state on the hosts; losses, weights and state are the
# bits of a run that keeps it on the devices; the memory is what was planned; checkpoints of either resume the other; too small hosts, bad
# choices and damaged files are refused.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

two_devices wide "300 MB"
two_devices tight "1.05 MB"
two_devices poor "1.05 MB" '{"memory": "200 kB"}'
two_devices fast "300 MB" '{"bandwidth": "8 GB/s"}'
two_devices slow "300 MB" '{"bandwidth": "8 MB/s"}'
"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
"$HAPT" model gpt --layers 6 --hidden 32 --heads 4 --sequence 64 --vocab 256 --microbatch 1 --data "$scratch/t.h5" --output "$scratch/m.h5" >/dev/null || exit 1

# plan NAME CLUSTER OPTIONS...
plan() { passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/$2.json" --predict --microbatches 4 --json --output "$scratch/$1.h5" "${@:3}"; }
# train NAME CLUSTER OPTIONS...: 6 steps with the plan
train() {
    passes 2 train --input "$scratch/m.h5" --cluster "$scratch/$2.json" --plan "$scratch/$1.h5" --threads 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:3}"
}
offloads() { grep -q "\"offload\": \"${1:-optimizer}\"" "$scratch/out"; }
same() { same_runs "$scratch/run-$1" "$scratch/run-$2"; }

two="0-13@a:1x1,13-26@b:1x1" four="0-6@a:1x1,6-12@b:1x1,12-19@a:1x1,19-26@b:1x1"
plan keep wide
check "with enough memory nothing leaves the devices" bash -c "! grep -q offload '$scratch/out'"
train keep wide
refuses 4 'no plan fits into memory|need more devices' 1 plan --input "$scratch/m.h5" --cluster "$scratch/tight.json" --predict --microbatches 4 --offload no
plan auto tight
check "auto keeps the state on the hosts where memory asks for it" offloads
train auto tight
same keep auto
choices=("--schedule interleaved --stages $four")
[ -z "${HAPT_LONG:-}" ] || # bit_matrix.sh has such bits, too
    choices+=("--stages $two" "--split-backward yes --stages $two" "--schedule gpipe --stages $two" "--recompute all")
for choice in "${choices[@]}"; do
    name=${choice//[^a-z0-9]/-}
    plan "$name" wide --offload optimizer --update-on device $choice
    check "$choice: on the hosts" offloads
    train "$name" wide
    same keep "$name"
done

plan update wide --offload optimizer --update-on host --stages $two
check "updates on the hosts" offloads update
train update wide --trace 6
same keep update
# kept WHERE: the options that keep the optimizer state there
kept() {
    case $1 in
        no) echo "--offload no" ;;
        optimizer) echo "--offload optimizer --update-on device" ;;
        update) echo "--offload optimizer --update-on host" ;;
    esac
}
for extra in "--precision bf16" ${HAPT_LONG:+"--optimizer sgd --momentum 0.9"}; do
    for offload in no optimizer update; do
        plan "$offload${extra//[^a-z0-9]/-}" wide $(kept $offload) --stages $two $extra
        train "$offload${extra//[^a-z0-9]/-}" wide $extra
    done
    same "no${extra//[^a-z0-9]/-}" "optimizer${extra//[^a-z0-9]/-}"
    same "no${extra//[^a-z0-9]/-}" "update${extra//[^a-z0-9]/-}"
done

# In bf16 master weights are on the hosts, too: loops, and checkpoints of either resume the other.
half="--precision bf16"
plan loops16 wide --offload optimizer --schedule interleaved --stages $four $half
train loops16 wide $half
same no--precision-bf16 loops16
for change in ${HAPT_LONG:+"no optimizer" "optimizer update"} "update no"; do
    read -r first then <<<"$change"
    train_in() { passes 2 train --input "$scratch/m.h5" --cluster "$scratch/wide.json" --plan "$scratch/$1--precision-bf16.h5" --threads 1 --steps 6 \
        --checkpoint-every 3 --output "$scratch/run-from-$first" $half "${@:2}"; }
    train_in $first --stop-after 3
    train_in $then --resume
    same no--precision-bf16 from-$first
done

# Data parallelism: ranks have slices of the masters. Tied weights are compared between ranks with slices and one without. If a single
# norm's bias is trained, the second rank has an empty slice.
cat >"$scratch/three.json" <<JSON
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "300 MB"},
    {"name": "b", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "300 MB"} ],
  "links": [ { "between": ["a", "b"], "bandwidth": "1 GB/s", "latency": "10 us" } ] }
JSON
"$HAPT" model gpt --layers 6 --hidden 32 --heads 4 --sequence 64 --vocab 256 --microbatch 2 --data "$scratch/t.h5" --output "$scratch/two.h5" >/dev/null || exit 1
/usr/bin/python3 tests/system/freeze.py "$scratch/two.h5" "$scratch/one.h5" wte. wpe. h. ln_f.weight
for model in ${HAPT_LONG:+two} one; do
    [ $model = two ] && stages="0-13@a:1x2,13-26@b:1x1" || stages="0-1@b:1x1,1-20@a:1x2"
    for offload in no optimizer update; do
        passes 3 --input "$scratch/$model.h5" --cluster "$scratch/three.json" --predict --microbatches 4 --threads 1 --steps 6 --checkpoint-every 3 \
            --stages $stages $(kept $offload) --replica-check 1 $half --output "$scratch/run-$model-$offload"
    done
    same $model-no $model-optimizer
    same $model-no $model-update
done
saved=("$scratch"/run-one-optimizer/checkpoints/step-*)
h5diff -q "${saved[0]}/shard-0001.h5" "${saved[-1]}/shard-0001.h5" /parameters/ln_f.bias
check "the one trained parameter moves: code $?" [ $? -eq 1 ]

# A stage without trained parameters has no state.
/usr/bin/python3 tests/system/freeze.py "$scratch/m.h5" "$scratch/fixed.h5" wte. wpe. h.0. h.1. h.2.
for offload in no optimizer; do
    passes 2 --input "$scratch/fixed.h5" --cluster "$scratch/wide.json" --microbatches 4 --threads 1 --profile-seconds 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-frozen-$offload" --offload $offload --stages "0-7@a:1x1,7-23@b:1x1"
done
same frozen-no frozen-optimizer
refuses 2 'keeps no state' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --offload optimizer --optimizer sgd
refuses 2 'keeps no state' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --update-on host --offload optimizer --optimizer sgd
refuses 2 'no effect' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --offload no --update-on host

# The one command, which measures.
job() { # NAME CLUSTER OPTIONS...
    passes 2 --input "$scratch/m.h5" --cluster "$scratch/$2.json" --microbatches 4 --threads 1 --profile-seconds 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:3}"
}
job one tight
check "the job says so" grep -q 'the optimizer state is on the hosts' "$scratch/out"
same keep one
if [ -n "${HAPT_LONG:-}" ]; then
    job there tight --stop-after 3
    job there wide --resume --replan --offload no
    check "the resumed job has the state on its devices" bash -c "! grep -q 'on the hosts' '$scratch/out'"
    same keep there
fi
job back wide --offload no --stop-after 3
job back tight --resume --replan
check "the resumed job has it on the hosts" grep -q 'on the hosts' "$scratch/out"
same keep back

# --what-if: each point is the plan of a cluster file with that host.
sweep() { # PLAN'S OPTIONS...
    passes 1 plan --input "$scratch/m.h5" --predict --microbatches 4 --loops 1 --json "$@" && cp "$scratch/out" "$scratch/sweep.json"
}
points() { /usr/bin/python3 -c 'import json, sys
for point in json.load(open(sys.argv[1]))["what_if"][0]["points"]: print(point["value"], point.get("simulated_s"))' "$scratch/sweep.json"; }
sweep --cluster "$scratch/wide.json" --offload optimizer --what-if host-bandwidth=8..80MB/s:2
while read -r value step; do
    two_devices point "300 MB" "{\"bandwidth\": $value}"
    sweep --cluster "$scratch/point.json" --offload optimizer
    check "$value byte/s: $step s" /usr/bin/python3 -c 'import json, sys
sys.exit(json.load(open(sys.argv[1]))["simulated_s"] != float(sys.argv[2]))' "$scratch/out" "$step"
done < <(points)
sweep --cluster "$scratch/tight.json" --what-if host-memory=200kB..20MB:2
check "a host that is too small, and a larger one: $(points)" bash -c '[[ "$1" == 200000.0\ None*20000000.0\ 0.* ]]' - "$(points)"

# A step takes the copies' time: 2 states of 4 bytes, both ways. Nothing else depends on the host.
passes 1 export --checkpoint "$scratch/run-keep" --output "$scratch/w.h5"
for host in fast slow; do
    passes 1 profile --input "$scratch/m.h5" --cluster "$scratch/$host.json" --predict --microbatches 4 --offload optimizer --update-on device \
        --output "$scratch/$host.h5"
done
refuses 2 'the profile does not hold what hosts cost' 1 plan --profile "$scratch/fast.h5" --what-if host-memory=1..2GB
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/fast.h5" "$scratch/slow.h5" "$scratch/w.h5" "$scratch/run-auto/run.h5" "$scratch/run-keep/run.h5" <<'PY' || fail "the time of the copies"
import sys
import h5py, numpy
fast, slow = (h5py.File(path)["cluster_0"] for path in sys.argv[1:3])
assert h5py.File(sys.argv[1]).attrs["offload"] in (b"optimizer", "optimizer")
whole = (0, 0, fast["step_time"].shape[2] - 1)
more = slow["step_time"][whole] - fast["step_time"][whole]
sizes = {name: item.size for name, item in h5py.File(sys.argv[3])["parameters"].items()}
bytes = 2 * 2 * 4 * sum(sizes.values())
expected = bytes * (1 / 8e6 - 1 / 8e9)
assert abs(more / expected - 1) < 0.02, (more, expected) # blocks are padded to 64 bytes
away, kept = (h5py.File(path)["train"] for path in sys.argv[4:])
ratio = away["host_memory"][()].sum() / (2 * 4 * (sum(sizes.values()) + sizes["wte.weight"])) # tied: on both stages
assert 1 <= ratio < 1.01 and "host_memory" not in kept, ratio
for name in ("stage_time", "parameter_bytes", "activation_bytes"):
    assert numpy.array_equal(fast[name], slow[name], equal_nan=True), name
PY

# Paced copies: the same bits, and no step is shorter than the copies of a stage at the bandwidth of the cluster file. The prediction is a little
# longer. The step is longer by the last pieces of two blocks, with and without weight decay, which are a twelfth of this small state.
two_devices paced "300 MB" '{"bandwidth": "2 MB/s", "paced": true}'
plan paced paced --offload optimizer --update-on device --stages $two
cp "$scratch/out" "$scratch/paced-plan.json"
train paced paced
same keep paced
# Priority of updates is the default: the plan is shorter than the one in order, and the bits are the same.
check "updates are deferred" grep -q '"deferred_s": 0\.[0-9]*[1-9]' "$scratch/paced-plan.json"
plan ordered paced --offload optimizer --update-on device --stages $two --update-order in-order
check "in order they are not" bash -c "! grep -q deferred_s '$scratch/out'"
check "deferring them shortens the step" /usr/bin/python3 -c 'import json, sys
step_s = [json.load(open(path))["simulated_s"] for path in sys.argv[1:]]
sys.exit(not step_s[0] < step_s[1])' "$scratch/paced-plan.json" "$scratch/out"
train ordered paced
same keep ordered
# An optimizer without state has nothing on the hosts, whatever the plan says.
for name in keep paced; do
    passes 2 train --input "$scratch/m.h5" --cluster "$scratch/$([ $name = keep ] && echo wide || echo paced).json" --plan "$scratch/$name.h5" --threads 1 \
        --steps 2 --optimizer sgd --momentum 0 --learning-rate 0.5 --output "$scratch/run-plain-$name"
    passes 1 export --checkpoint "$scratch/run-plain-$name" --output "$scratch/plain-$name.h5"
done
check "without state, too, the plans train alike" h5diff -q "$scratch/plain-keep.h5" "$scratch/plain-paced.h5" /parameters /parameters
# The time of a step that saves lacks the update, for which the checkpoint waits.
passes 2 train --input "$scratch/m.h5" --cluster "$scratch/paced.json" --plan "$scratch/paced.h5" --threads 1 --steps 6 --trace 6 \
    --output "$scratch/run-timed"
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/run-timed/run.h5" "$scratch/paced-plan.json" <<'PY' || fail "the time of paced copies"
import json, sys
import h5py
run = h5py.File(sys.argv[1])["train"]
copies_s = run["host_memory"][()].max() / 2e6
predicted_s = json.load(open(sys.argv[2]))["simulated_s"]
steps_s = run["step_time"][1:]
print("copies %.3f s, predicted %.3f s, steps %s" % (copies_s, predicted_s, steps_s))
assert copies_s > 0.1 and min(steps_s) > 0.99 * copies_s
assert copies_s < predicted_s < 1.2 * copies_s and min(steps_s) < 1.5 * predicted_s  # other tests run beside this one
PY
# copies RUN UPDATES: in its timeline, copies of a direction follow each other, and take their bytes over the bandwidth.
copies() {
    passes 1 report --input "$1/run.h5" --timeline "$scratch/timeline.json"
    check "the timeline of copies in ${1##*/}" /usr/bin/python3 - "$1/run.h5" "$scratch/timeline.json" "$2" <<'PY'
import json, sys
import h5py
run, events, updates = h5py.File(sys.argv[1]), json.load(open(sys.argv[2]))["traceEvents"], int(sys.argv[3])
tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
for rank in range(2):
    for kind in ["copy to device", "copy to host"] + ["host update"] * updates:
        own = [e for e in events if e["ph"] == "X" and tracks.get((e["pid"], e["tid"])) == "rank %d: %s" % (rank, kind)]
        assert own and {e["cat"] for e in own} == {kind}, kind
        for one, two in zip(own, own[1:]):
            assert one["ts"] + one["dur"] < two["ts"] + 1, (kind, one, two)
        took_s = 1e-6 * sum(e["dur"] for e in own)
        if not updates:  # the whole state in each of six updates
            bytes_s = 6 * run["train/host_memory"][rank] / 2e6
            assert 0.999 * bytes_s < took_s < 1.001 * bytes_s, (kind, bytes_s, took_s)
PY
}
copies "$scratch/run-timed" 0
copies "$scratch/run-update" 1
# With updates on the hosts, gradients and 16-bit weights are copied: 6 bytes of a parameter instead of 24. So the step is shorter, and auto
# chooses it. Its prediction holds, too.
two_devices updates "300 MB" '{"bandwidth": "2 MB/s", "update_rate": 1e8, "paced": true}'
for offload in optimizer update; do
    plan updates-$offload updates $(kept $offload) --stages $two $half
    passes 2 train --input "$scratch/m.h5" --cluster "$scratch/updates.json" --plan "$scratch/updates-$offload.h5" --threads 1 --steps 6 \
        --checkpoint-every 0 --trace 6 $half --output "$scratch/run-updates-$offload"
done
same updates-optimizer updates-update
copies "$scratch/run-updates-update" 1
checks=$((checks + 1))
/usr/bin/python3 - "$scratch"/run-updates-{optimizer,update}/run.h5 <<'PY' || fail "the time of updates on the hosts"
import sys
import h5py
import numpy
# the shortest step: others may be disturbed by what runs beside this test
step_s, planned_s = zip(*((numpy.min(file["train/step_time"][1:]), file["plan"].attrs["simulated"]) for file in map(h5py.File, sys.argv[1:])))
print("steps %s s, predicted %s s" % (step_s, planned_s))
assert step_s[1] < 0.6 * step_s[0] and planned_s[1] < 0.6 * planned_s[0]
assert 0.8 * planned_s[1] < step_s[1] < 1.6 * planned_s[1]
PY
sed 's/300 MB/'"$(sed -n 's/.*"memory": "\([0-9.]* MB\)".*/\1/p' "$scratch/tight.json" | head -n 1)"'/' "$scratch/updates.json" >"$scratch/little.json"
plan chosen little $half
check "auto updates on hosts that are fast" offloads update
two_devices wrong "300 MB" '{"bandwidth": "1 GB/s", "update_rate": "fast"}'
refuses 3 'update_rate' 1 topology --cluster "$scratch/wrong.json"
two_devices stalled "300 MB" '{"bandwidth": "100 B/s", "paced": true}'
sed '/"b", "nodes"/d; /"a", "nodes"/s/,$/ ],/; /"links"/s/.*/  "links": [] }/' "$scratch/stalled.json" >"$scratch/alone.json"
for on in device host; do
    plan alone alone --offload optimizer --update-on $on
    [ $on = device ] && stalls='from the host to the device .* 0 of 4 blocks' || stalls='from the device to the host .* 0 of 4 blocks'
    refuses 7 "copy of offloaded memory $stalls.*which begins with (wte|h\.0)\." 1 train --input "$scratch/m.h5" --cluster "$scratch/alone.json" \
        --plan "$scratch/alone.h5" --threads 1 --steps 1 --timeout 4 --output "$scratch/stalled"
done
# Presets: the plan of the choices that they stand for.
stands_for() {
    plan preset wide --strategy "$1"
    plan choices wide "${@:2}"
    /usr/bin/python3 -c 'import h5py, sys; [h5py.File(path, "r+").attrs.modify("search_seconds", 0.0) for path in sys.argv[1:]]' "$scratch"/{preset,choices}.h5
    check "--strategy $1 stands for ${*:2}" h5diff -q "$scratch/preset.h5" "$scratch/choices.h5"
}
stands_for recompute-all --recompute all --offload no
stands_for zero-offload --strategy deepspeed --recompute all --offload optimizer --update-on host --update-order in-order
stands_for stronghold --strategy deepspeed --recompute all --offload weights --update-on host
stands_for autohete --strategy deepspeed --offload optimizer --update-on host
train preset wide --schedule 1f1b
same keep preset
refuses 2 'strategy zero-offload contradicts --recompute no' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --strategy zero-offload --recompute no

two_devices nameless "300 MB" '{"paced": true}'
refuses 3 'needs the bandwidth' 1 topology --cluster "$scratch/nameless.json"
sed 's/"device": "cpu"/"device": "A100-40GB"/' "$scratch/paced.json" >"$scratch/gpus.json"
refuses 3 'copies of CPUs alone' 1 topology --cluster "$scratch/gpus.json"
two_devices strange "300 MB" '{"bandwidth": "1 GB/s", "paced": "yes"}'
refuses 3 'must be true or false' 1 topology --cluster "$scratch/strange.json"

refuses 4 'hosts of|no plan fits' 1 plan --input "$scratch/m.h5" --cluster "$scratch/poor.json" --predict --microbatches 4
refuses 4 'takes .* of host memory' 2 train --input "$scratch/m.h5" --cluster "$scratch/poor.json" --plan "$scratch/auto.h5" --steps 1 --output "$scratch/none"
check "nothing was written" [ ! -e "$scratch/none" ]
# A model that fits nowhere is refused before anything is measured, which would take ten minutes.
refuses 4 'hosts of|no plan fits' 2 --input "$scratch/m.h5" --cluster "$scratch/poor.json" --threads 1 --profile-seconds 600 --output "$scratch/none"
check "nothing was measured" bash -c '! grep -q "timing" "$1" && [ ! -e "$2" ]' - "$scratch/err" "$scratch/none/run.h5"
two_devices silent "300 MB" '{"bandwidth": "1 GB/s"}'
passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/silent.json" --predict --microbatches 4 --offload optimizer
check "hosts without a limit are named" grep -q 'hosts of .* have, so that nothing limits' "$scratch/err"
two_devices stated "300 MB" '{"memory": "1 GB"}'
passes 1 plan --input "$scratch/m.h5" --cluster "$scratch/stated.json" --predict --microbatches 4 --offload optimizer
check "hosts with a limit are not" bash -c '! grep -q "nothing limits" "$1"' - "$scratch/err"
refuses 2 'offload' 1 plan --input "$scratch/m.h5" --cluster "$scratch/wide.json" --predict --offload activations
refuses 2 'offload' 1 plan --profile "$scratch/fast.h5" --offload optimizer
refuses 2 'update-order' 1 plan --profile "$scratch/fast.h5" --update-order in-order
sed 's/"memory": "200 kB"/"memory": "some"/' "$scratch/poor.json" >"$scratch/bad.json"
refuses 3 'bad.json' 1 topology --cluster "$scratch/bad.json"
cp "$scratch/paced.h5" "$scratch/bad.h5"
/usr/bin/python3 -c 'import h5py, sys; h5py.File(sys.argv[1], "r+")["stage_deferred"][0, 1] = 1e9' "$scratch/bad.h5"
refuses 3 'stage 0 defers' 1 simulate --plan "$scratch/bad.h5"
for file in auto fast; do
    cp "$scratch/$file.h5" "$scratch/bad.h5"
    /usr/bin/python3 -c 'import h5py, numpy, sys; h5py.File(sys.argv[1], "r+").attrs["offload"] = numpy.bytes_("weights")' "$scratch/bad.h5"
    refuses 3 'offload' 1 $([ $file = auto ] && echo simulate --plan || echo plan --profile) "$scratch/bad.h5"
done
finish
