#!/usr/bin/env bash
# Predicted profiles with tensor-parallel variants: GPT-39B on 32 A100 and 32 V100, refusals.
# Runs beside others: it measures no time.
source "$(dirname "$0")/lib.sh.inc"
clusters=$(dirname "$0")/../../inputs/clusters
model=$scratch/m.h5 P=$scratch/P.h5
# holds EXPRESSION: of the JSON object d that the last command printed
holds() {
    checks=$((checks + 1))
    [ "$(/usr/bin/python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(bool(eval(sys.argv[2])))' "$scratch/out" "$1")" = True ] ||
        fail "$1 does not hold in $(head -c 1500 "$scratch/out")"
}

# By hand: 39e9 parameters of 18 bytes over 64 devices leave memory for activations. The plan must have tensor parallelism over 8 neighbours
# where it matters, the devices with more memory in front, where most microbatches are in flight, and a nearly balanced pipeline.
passes 1 model gpt-39b --microbatch 8 --tied-embeddings no --output "$model"
for ranks in 1 2 3; do
    passes $ranks plan --objective formula --input "$model" --cluster "$clusters/a100x4-v100x4.json" --microbatches 128 --sharded-optimizer no --json
    sed '/"seconds"/d' "$scratch/out" >"$scratch/plan$ranks.json"
done
checks=$((checks + 2))
cmp -s "$scratch/plan1.json" "$scratch/plan2.json" || fail "2 ranks find another plan than 1"
cmp -s "$scratch/plan1.json" "$scratch/plan3.json" || fail "3 ranks find another plan than 1"
holds '0.35 < d["mfu"] < 0.6'
holds 'd["balance_eta"] > 0.85'
holds '[s["subcluster"] for s in d["stages"]] == sorted((s["subcluster"] for s in d["stages"]), reverse=True)'
holds '{s["subcluster"] for s in d["stages"]} == {"a100", "v100"}'
holds 'sum(s["tensor_parallel"] == 8 for s in d["stages"]) > len(d["stages"]) / 2'
holds 'all(s["memory_bytes"] <= {"a100": 40e9, "v100": 32e9}[s["subcluster"]] for s in d["stages"])'
# Sharding the optimizer state never makes a plan worse.
latency=$(/usr/bin/python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["latency_s"])' "$scratch/out")
passes 1 plan --objective formula --input "$model" --cluster "$clusters/a100x4-v100x4.json" --microbatches 128 --json
holds "d['latency_s'] < $latency"
# Without tensor parallelism no plan fits, unless state and masters leave the devices.
refuses 4 'memory' 1 plan --input "$model" --cluster "$clusters/a100x4-v100x4.json" --microbatches 128 --tensor-parallel 1 --recompute no --offload no

# every variant is named, in order, and the option limits them
passes 1 profile --input "$model" --cluster "$clusters/a100x4-v100x4.json" --predict --recompute no --output "$P" --json
holds 'all([(s["nodes"], s["devices_per_node"], s["tensor_parallel"]) for s in c["submeshes"]] == sorted((s["nodes"], s["devices_per_node"], s["tensor_parallel"]) for s in c["submeshes"]) for c in d["subclusters"])'
holds 'all(max(s["tensor_parallel"] for s in c["submeshes"]) == 8 for c in d["subclusters"])'
holds 'all(8 >= s["nodes"] * s["devices_per_node"] // s["tensor_parallel"] and s["candidates"] > 0 for c in d["subclusters"] for s in c["submeshes"])'
passes 1 profile --input "$model" --cluster "$clusters/a100x4-v100x4.json" --predict --recompute no --output "$P" --tensor-parallel 4
checks=$((checks + 1))
grep -q '1x8 tp 4' "$scratch/out" && ! grep -q 'tp 8' "$scratch/out" || fail "--tensor-parallel 4: $(cat "$scratch/out")"
passes 1 plan --profile "$P" --microbatches 128

# a measured profile has tensor-parallel rows and sharded optimizer state, too
passes 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --microbatch 2 --output "$scratch/tiny.h5"
measured=(2 profile --input "$scratch/tiny.h5" --threads 1 --profile-seconds 0.5 --output "$scratch/measured.h5")
passes "${measured[@]}" && ! grep -q ' tp ' "$scratch/out" || fail "tensor-parallel stages without need: $(cat "$scratch/out")"
passes "${measured[@]}" --tensor-parallel 2 && grep -q '1x2 tp 2' "$scratch/out" || fail "--tensor-parallel 2: $(cat "$scratch/out")"
passes "${measured[@]}" --sharded-optimizer yes
refuses 2 'not measured again' 1 plan --profile "$P" --tensor-parallel 2
for option in "--mixed yes" "--mixed-rows even" "--segments 2" "--sharded-optimizer yes"; do
    refuses 2 'has no effect: --profile is not measured again' 1 plan --profile "$P" $option
done
finish
