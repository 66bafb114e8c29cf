#!/usr/bin/env bash
# Stages that begin between any two heavy operators (--layers-per-model ops): the optimum of all such plans, never slower than plans over
# the automatic layers, and training. HAPT_LONG=1: of a larger network.
# Runs beside others
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

cat >"$scratch/c.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu" },
    { "name": "b", "nodes": 1, "devices_per_node": 1, "device": "cpu", "slowdown": 1.7 } ],
  "links": [ { "between": ["a", "b"], "bandwidth": "200 Mbit/s", "latency": "50 us" } ] }
JSON
value() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$scratch/out" "$1"; }
less() { python3 -c 'import sys; sys.exit(not float(sys.argv[1]) <= float(sys.argv[2]) * (1 + 1e-9))' "$@"; }

# Every plan of at most two stages.
passes 1 model gpt --layers 1 --hidden 64 --heads 2 --sequence 64 --vocab 64 --microbatch 2 --output "$scratch/m.h5" || finish
common=(--input "$scratch/m.h5" --cluster "$scratch/c.json" --predict yes --threads 1 --microbatches 4 --layers-per-model ops --objective formula)
passes 1 profile "${common[@]:0:6}" --layers-per-model ops --output "$scratch/p.h5" && count_layers
check "layers of a block and the ends" test "$layers" -ge 6
passes 1 plan "${common[@]}" --output "$scratch/plan.h5" --json && found=$(value latency_s)
best=inf
for stages in "0-$layers@a:1x1" "0-$layers@b:1x1" $(for ((cut = 1; cut < layers; cut++)); do
    echo "0-$cut@a:1x1,$cut-$layers@b:1x1 0-$cut@b:1x1,$cut-$layers@a:1x1"
done); do
    passes 1 plan --profile "$scratch/p.h5" --microbatches 4 --objective formula --stages "$stages" --json && now=$(value latency_s) &&
        less "$now" "$best" && best=$now
done
check "the optimum of all plans" less "$found" "$best"
check "no plan is better than the optimum" less "$best" "$found"

# A network with skips: from the model, from a profile file on two ranks, and from a plan file the same messages and steps.
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 64 --vocab 64 --microbatch 2 --tied-embeddings no --output "$scratch/n.h5" || finish
/usr/bin/python3 tests/system/skips.py "$scratch/n.h5" 0:2 -1:3
stages="0-6@a:1x1,6-11@b:1x1,11-17@b:1x1,17-23@b:1x1"
sed 's/"name": "b", "nodes": 1, "devices_per_node": 1/"name": "b", "nodes": 3, "devices_per_node": 1/' "$scratch/c.json" >"$scratch/c3.json"
messages() { python3 -c 'import json, sys; found = json.load(open(sys.argv[1])); print(found.get("messages"), found["simulated_s"])' "$scratch/out"; }
passes 1 plan --input "$scratch/n.h5" --cluster "$scratch/c3.json" --predict --threads 1 --microbatches 4 --layers-per-model ops --stages "$stages" \
    --output "$scratch/n-plan.h5" --json && want=$(messages)
check "a message past the next stage" grep -q "'from': 0, 'to': 3" <<<"$want"
passes 1 profile --input "$scratch/n.h5" --cluster "$scratch/c3.json" --predict --threads 1 --layers-per-model ops --output "$scratch/n-p.h5"
passes 2 plan --profile "$scratch/n-p.h5" --microbatches 4 --stages "$stages" --json && check "messages of a profile file" [ "$(messages)" = "$want" ]
passes 1 simulate --plan "$scratch/n-plan.h5" --json && check "the step of a plan file" [ "$(value simulated_s)" = "${want##* }" ]
damage() { # FILE TABLE ROW VALUE
    cp "$scratch/$1.h5" "$scratch/bad.h5"
    /usr/bin/python3 -c 'import sys, h5py
with h5py.File(sys.argv[1], "r+") as file: file[sys.argv[2]][int(sys.argv[3])] = float(sys.argv[4])' "$scratch/bad.h5" "${@:2}"
}
damage n-p crossing_layer 1 99 && refuses 3 'crossing_layer' 1 plan --profile "$scratch/bad.h5" --microbatches 4
damage n-p crossing_start 1 9999 && refuses 3 'crossing_start' 1 plan --profile "$scratch/bad.h5" --microbatches 4
damage n-p crossing_bytes 0 -1 && refuses 3 'crossing_bytes' 1 plan --profile "$scratch/bad.h5" --microbatches 4
damage n-plan edge_time 0 -1 && refuses 3 'message from stage' 1 simulate --plan "$scratch/bad.h5"
damage n-plan edge_share 1 2 && refuses 3 'share' 1 simulate --plan "$scratch/bad.h5"
damage n-plan edge_stages 0 3 && refuses 3 'stage 3' 1 simulate --plan "$scratch/bad.h5"

# On equal terms, more boundaries are never slower.
[ "${HAPT_LONG:-0}" != 0 ] && blocks=2,2,2,2 || blocks=1,1,1,1 # half a minute, and 4 s
for model in "gpt --layers 4 --hidden 256 --heads 4 --sequence 128 --vocab 512" "resnet --stages $blocks --width 16 --image 64 --classes 10"; do
    passes 1 model $model --microbatch 4 --overwrite --output "$scratch/n.h5" || continue
    for objective in formula simulated; do
        step=latency_s && [ $objective = formula ] || step=simulated_s
        for layers in 0 ops; do
            passes 1 plan --input "$scratch/n.h5" --cluster inputs/clusters/a100x1-v100x1.json --microbatches 16 --objective $objective \
                --layers-per-model $layers --json && taken[${#layers}]=$(value $step)
        done
        check "${model%% *}, $objective: ops" less "${taken[3]}" "${taken[1]}"
    done
done

# Training over such boundaries: the same losses as on one device.
losses() { grep -o '"loss": \[[^]]*\]' "$scratch/out"; }
passes 1 model gpt --layers 2 --hidden 64 --heads 2 --sequence 64 --vocab 256 --microbatch 2 --tied-embeddings no --overwrite --output "$scratch/m.h5"
head -c 40000 src/model/*.c | tr -d -c 'a-z \n' >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
run() { # STAGES NAME
    passes 1 plan "${common[@]}" --stages "$1" --output "$scratch/$2.h5" &&
        passes 2 train --input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/$2.h5" --layers-per-model ops --threads 1 --steps 3 \
            --data "$scratch/tokens.h5" --json --output "$scratch/$2"
}
passes 1 profile "${common[@]:0:6}" --layers-per-model ops --overwrite --output "$scratch/p.h5" && count_layers
run "0-$layers@a:1x1" one && want=$(losses)
for cut in 4 7; do
    run "0-$cut@a:1x1,$cut-$layers@b:1x1" two$cut && check "losses of a cut behind layer $cut" [ "$(losses)" = "$want" ]
done
finish
