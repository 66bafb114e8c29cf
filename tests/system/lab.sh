#!/usr/bin/env bash
# Times in the lab: the trunk's bandwidth is measured, and steps over the trunk take as long as predicted. lab_hosts.sh tests the rest.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
. tests/system/lab.sh.inc

# 1. The link between the subclusters is measured at two rates. It cannot be faster than the trunk, except for the burst (0.4 ms, up to a tenth
# of the probe's messages) and the subtracted latency. Headers take 1 %. Other work on the machine slows the measuring pair, so the best of
# some attempts is compared with the lower bound. Without a limit it is ten times faster.
share() { # RATE IN MBIT/S: prints the bandwidth of the trunk divided by the rate
    over a0,a1,b0,b1 4 topology --cluster "$scratch/hosts.json" --json && /usr/bin/python3 - "$scratch/out" "$1" <<'P'
import json, sys
cluster, rate = json.load(open(sys.argv[1])), float(sys.argv[2]) * 1e6 / 8
assert [(s["name"], s["hosts"]) for s in cluster["subclusters"]] == [("right", ["b1", "b0"]), ("left", ["a0", "a1"])]
link, = (l for l in cluster["links"] if set(l["between"]) == {"left", "right"})
assert cluster["subclusters"][1]["inter_node_bandwidth"] > 0
print("%.2f" % (link["bandwidth"] / rate))
P
}
for rate in 100 400; do
    $lab trunk ${rate}mbit
    best=0
    for try in 1 2 3 4 5; do
        found=$(share $rate) || { fail "no bandwidth of the trunk"; break; }
        checks=$((checks + 1))
        awk "BEGIN { exit !($found < 1.2) }" || fail "the trunk of $rate Mbit/s carries $found of that"
        best=$(awk "BEGIN { print ($found > $best ? $found : $best) }")
        awk "BEGIN { exit !($best > 0.8) }" && break
    done
    checks=$((checks + 1))
    awk "BEGIN { exit !($best > 0.8) }" || fail "a trunk of $rate Mbit/s is measured as $best of that at best, in $try tries"
done

# 2. Long skips from both stages on one side to both on the other. All their messages share the trunk, which limits the step. Skips that took no
# turns would be predicted a third faster; the limit is a quarter in the quietest of some runs, and a step is never much faster. The shaped trunk
# carries 85 to 97 % of its rate, by the machine, so the prediction takes the measured one. Steps then still take up to a fifth longer on some
# machines, at 10, 20 and 50 Mbit/s alike; the cause is not known.
passes 1 model gpt --layers 4 --hidden 128 --heads 2 --sequence 256 --vocab 256 --microbatch 2 --tied-embeddings no --output "$scratch/n.h5"
/usr/bin/python3 tests/system/skips.py "$scratch/n.h5" 0:2 -1:3
head -c 100000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
cat >"$scratch/trunk.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "left", "nodes": 1, "devices_per_node": 2, "device": "cpu", "hosts": ["a0"] },
    { "name": "right", "nodes": 1, "devices_per_node": 2, "device": "cpu", "hosts": ["b0"] } ],
  "links": [ { "between": ["left", "right"], "bandwidth": "MEASURED bit/s", "latency": "100 us" } ] }
JSON
$lab trunk 50mbit
measured=$(for try in 1 2 3; do share 50 || break; done | sort -n | sed -n 2p)
sed -i "s/MEASURED/$(awk "BEGIN { printf \"%.0f\", ${measured:-0} * 50e6 }")/" "$scratch/trunk.json"
passes 1 plan --input "$scratch/n.h5" --cluster "$scratch/trunk.json" --predict --threads 1 --microbatches 4 --layers-per-model ops \
    --stages "0-6@left:1x1,6-11@left:1x1,11-17@right:1x1,17-23@right:1x1" --output "$scratch/skips.h5" --json &&
    look "messages of the plan" <<'P'
import json, sys
sent = json.load(open(sys.argv[1]))["messages"]
over = sum(m["bytes"] for m in sent if m["from"] < 2 <= m["to"])
assert over == 3 * 2 * 256 * 128 * 4, sent  # each of three tensors once
assert {(m["from"], m["to"]) for m in sent if m["share"] < 1} == {(0, 2), (0, 3), (1, 2), (2, 1), (3, 0), (3, 1)}, sent
P
best=9
for try in 1 2 3 4; do
    over a0:2,b0:2 4 train --input "$scratch/n.h5" --cluster "$scratch/trunk.json" --plan "$scratch/skips.h5" --layers-per-model ops --threads 1 \
        --data "$scratch/tokens.h5" --steps 6 --overwrite --json --output "$scratch/skips" || break
    ratio=$(/usr/bin/python3 -c 'import json, sys; run = json.load(open(sys.argv[1])); print(run["train"]["step_time_s"] / run["train"]["predicted_step_time_s"])' "$scratch/out")
    check "a step over the trunk took $ratio of the prediction" awk "BEGIN { exit !($ratio > 0.9) }"
    best=$(awk "BEGIN { print ($ratio < $best ? $ratio : $best) }")
    awk "BEGIN { exit !($best < 1.1) }" && break
done
check "steps over the trunk took $best of the prediction" awk "BEGIN { exit !($best < 1.25) }"
finish
