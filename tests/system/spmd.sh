#!/usr/bin/env bash
# hapt spmd: HAP alone on paper clusters. Never worse than data parallelism, consistent sums of ratios and parts, both cases of HAP Fig. 2,
# refusals.
# Runs beside others: it measures no time.
source "$(dirname "$0")/lib.sh.inc"
model=$scratch/m.h5
# holds EXPRESSION: of the JSON object d that the last command printed
holds() {
    checks=$((checks + 1))
    [ "$(/usr/bin/python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(bool(eval(sys.argv[2])))' "$scratch/out" "$1")" = True ] ||
        fail "$1 does not hold in $(head -c 1500 "$scratch/out")"
}
# cluster FILE BANDWIDTH FAST SLOW [MEMORY]: two devices of each peak in two machines
cluster() {
    local memory=${5:-16 GB}
    cat >"$1" <<JSON
{"format": "hapt-cluster", "version": 1, "subclusters": [
 {"name": "fast", "nodes": 1, "devices_per_node": 2, "intra_node_bandwidth": "$2", "intra_node_latency": "1 us",
  "device": {"name": "fast", "peak_flops": "$3", "memory": "$memory", "memory_bandwidth": "100 TB/s"}},
 {"name": "slow", "nodes": 1, "devices_per_node": 2, "intra_node_bandwidth": "$2", "intra_node_latency": "1 us",
  "device": {"name": "slow", "peak_flops": "$4", "memory": "$memory", "memory_bandwidth": "100 TB/s"}}],
 "links": [{"between": ["fast", "slow"], "bandwidth": "$2", "latency": "1 us"}]}
JSON
}
cluster "$scratch/slow-link.json" "100 MB/s" "9 TFLOP/s" "3 TFLOP/s"
cluster "$scratch/fast-link.json" "10 TB/s" "9 TFLOP/s" "3 TFLOP/s"
cluster "$scratch/equal.json" "1 GB/s" "3 TFLOP/s" "3 TFLOP/s"
cluster "$scratch/tiny.json" "1 GB/s" "9 TFLOP/s" "3 TFLOP/s" "200 KB"

passes 1 model gpt --layers 2 --hidden 128 --heads 4 --sequence 64 --vocab 256 --microbatch 64 --tied-embeddings no --output "$model"
sane() {
    holds 'd["format"] == "hapt-spmd" and d["turns"] and len(d["memory_bytes"]) == d["devices"] == 4'
    holds 'abs(d["step_s"] - d["compute_s"] - d["communicate_s"] - d["gradients_s"]) < 1e-9 * d["step_s"]'
    holds 'all(abs(sum(s["ratios"]) - 1) < 1e-9 and min(s["ratios"]) >= 0 for s in d["segments"])'
    holds 'd["step_s"] <= min(b["step_s"] for b in d["baselines"].values() if b) * (1 + 1e-9)'
    holds 'd["step_s"] <= min(t["program_s"] for t in d["turns"]) * (1 + 1e-9)'
    holds 'all(a["ops"][1] == b["ops"][0] for a, b in zip(d["segments"], d["segments"][1:])) and d["segments"][0]["ops"][0] == 0'
}
for link in slow-link fast-link equal; do
    passes 1 spmd --input "$model" --cluster "$scratch/$link.json" --json && sane
    cp "$scratch/out" "$scratch/$link.out"
done
# Without communication costs the ratios balance computation. With high costs even shares are the best (HAP Fig. 2).
cp "$scratch/fast-link.out" "$scratch/out"
holds 'd["step_s"] < 0.8 * d["baselines"]["DP-EV"]["step_s"]'
holds 'max(s["ratios"][0] for s in d["segments"]) > 1.5 * min(s["ratios"][3] for s in d["segments"])'
cp "$scratch/equal.out" "$scratch/out"
holds 'abs(d["baselines"]["DP-EV"]["step_s"] - d["baselines"]["DP-CP"]["step_s"]) < 1e-9'
holds 'max(max(s["ratios"]) for s in d["segments"]) < 0.2501'
# B microbatches: B times the computation of one, and the gradient sums once
passes 1 spmd --input "$model" --cluster "$scratch/slow-link.json" --microbatches 8 --json && sane
holds 'd["microbatches"] == 8'
holds "d['step_s'] < 8.000001 * $(/usr/bin/python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["step_s"])' "$scratch/slow-link.out")"

passes 1 spmd --input "$model" --cluster "$scratch/fast-link.json"
for word in 'DP-EV:' 'DP-CP:' 'Segment 0:' 'linear' 'sharded('; do
    checks=$((checks + 1))
    grep -q "$word" "$scratch/out" || fail "no $word in the printed program"
done
plain=$(wc -l <"$scratch/out")
passes 1 spmd --input "$model" --cluster "$scratch/fast-link.json" --full
checks=$((checks + 1))
[ "$(wc -l <"$scratch/out")" -ge "$plain" ] || fail "--full prints less than the plain command"
passes 1 spmd --input "$model" --cluster "$scratch/fast-link.json" --mesh machines --json
holds 'd["devices"] == 2 and d["mesh"] == "machines"'
passes 1 help spmd

# From HAP to training: the plan of one stage that it writes has the losses of one rank, evenly and unevenly, on one subcluster and two.
head -c 60000 README.md >"$scratch/text"
passes 1 data "$scratch/text" --type bytes --output "$scratch/tokens.h5"
passes 1 model gpt --layers 2 --hidden 64 --heads 4 --sequence 32 --vocab 256 --microbatch 12 --tied-embeddings no --dtype fp32 \
    --data "$scratch/tokens.h5" --output "$scratch/small.h5"
real() { # FILE SUBCLUSTERS LINKS
    printf '{"format": "hapt-cluster", "version": 1, "subclusters": [%s], "links": [%s]}' "$2" "$3" >"$1"
}
real "$scratch/node.json" '{"name": "cpu", "nodes": 1, "devices_per_node": 3, "device": "cpu"}' ''
real "$scratch/mixed.json" '{"name": "fast", "nodes": 1, "devices_per_node": 2, "device": "cpu"},
 {"name": "slow", "nodes": 1, "devices_per_node": 1, "device": "cpu", "slowdown": 3}' '{"between": ["fast", "slow"], "bandwidth": "10 GB/s", "latency": "5 us"}'
passes 1 plan --input "$scratch/small.h5" --microbatches 2 --output "$scratch/alone.h5"
passes 1 train --input "$scratch/small.h5" --plan "$scratch/alone.h5" --steps 6 --threads 1 --output "$scratch/alone"
for cluster in node mixed; do
    passes 1 spmd --input "$scratch/small.h5" --cluster "$scratch/$cluster.json" --microbatches 2 --output "$scratch/$cluster.h5" --json
    [ $cluster = node ] || holds 'len(set(round(r, 3) for r in d["segments"][0]["ratios"])) == 2 and d["collectives"]["all_to_all"] > 0'
    passes 3 train --input "$scratch/small.h5" --cluster "$scratch/$cluster.json" --plan "$scratch/$cluster.h5" --steps 6 --threads 1 \
        --output "$scratch/$cluster"
    checks=$((checks + 1))
    # fp32 sums in another order: 1e-6 of the loss
    /usr/bin/python3 -c '
import h5py, sys
a, b = (h5py.File(f + "/run.h5", "r")["/train/loss"][()] for f in sys.argv[1:])
sys.exit(int(len(a) != 6 or len(b) != 6 or abs(a / b - 1).max() > 1e-6))' "$scratch/alone" "$scratch/$cluster" || fail "the plan for $cluster.json trains to other losses"
done
passes 1 simulate --plan "$scratch/mixed.h5"
refuses 2 'machines' 1 spmd --input "$scratch/small.h5" --cluster "$scratch/mixed.json" --mesh machines --output "$scratch/x.h5"
real "$scratch/square.json" '{"name": "cpu", "nodes": 2, "devices_per_node": 2, "device": "cpu"}' ''
refuses 2 'one axis over 2 nodes of 2 devices' 1 spmd --input "$scratch/small.h5" --cluster "$scratch/square.json" --output "$scratch/x.h5"

refuses 2 'no model file' 1 spmd --cluster "$scratch/equal.json"
refuses 2 'full' 1 spmd --input "$model" --cluster "$scratch/equal.json" --json --full
for words in --json "--explain" ""; do
    refuses 2 'full has no effect' 1 plan --input "$model" --cluster "$scratch/equal.json" --predict --full $words
done
refuses 4 'memory' 1 spmd --input "$model" --cluster "$scratch/tiny.json"
passes 1 spmd --input "$model" --cluster "$scratch/tiny.json" --memory-limit no --json
sed 's/"devices_per_node": 2/"devices_per_node": 1/' "$scratch/equal.json" | /usr/bin/python3 -c '
import json, sys
d = json.load(sys.stdin)
d["subclusters"].pop()
d.pop("links")
json.dump(d, sys.stdout)' >"$scratch/one.json"
refuses 3 'nothing to share out' 1 spmd --input "$model" --cluster "$scratch/one.json"
refuses 2 'choice|one of|mesh' 1 spmd --input "$model" --cluster "$scratch/equal.json" --mesh rooms
finish
