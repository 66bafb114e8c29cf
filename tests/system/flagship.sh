#!/usr/bin/env bash
# The flagship of HAPT 6: GPT-39B, 1,024 rows a step, on 32 A100 and 32 V100 over 5 Gbit/s. Upper limits of the simulated step with the rows
# of a microbatch chosen by the planner, with tied embeddings exchanged in fp32. The device tables are built in.
# HAPT_LONG=1: untied and 16-bit ones, and the limits without split backward passes.
# Runs beside others
. "$(dirname "$0")/lib.sh.inc"
cluster=inputs/clusters/a100x4-v100x4.json
"$HAPT" model gpt-39b --output "$scratch/tied.h5" >/dev/null && "$HAPT" model gpt-39b --tied-embeddings no --output "$scratch/untied.h5" >/dev/null || exit 1

# plans MODEL OPTIONS LIMIT_S GAP
plans() {
    passes 2 plan --input "$scratch/$1.h5" --cluster $cluster --global-batch 1024 $2 --json || return
    checks=$((checks + 1))
    python3 - "$scratch/out" "$3" "$4" >"$scratch/said" 2>&1 <<'PY' || fail "$1 $2: $(tail -n 1 "$scratch/said")"
import json, sys
plan, limit_s = json.load(open(sys.argv[1])), float(sys.argv[2])
assert plan["rows"] * plan["microbatches"] == 1024, plan["rows"]
assert plan["simulated_s"] <= limit_s, plan["simulated_s"]
assert sys.argv[3] == "-" or 0 <= plan["bound_gap"] <= float(sys.argv[3]), plan["bound_gap"]
PY
}
# never_slower MODEL GB: on devices of so much memory, the plan with all choices is no slower than all optimizer state on the hosts.
never_slower() {
    local choice steps=()
    "$HAPT" model "$1" --output "$scratch/model.h5" >/dev/null || { fail "no $1"; return; }
    python3 - $cluster "$2 GB" >"$scratch/cluster.json" <<'PY'
import json, sys
cluster = json.load(open(sys.argv[1]))
for subcluster in cluster["subclusters"]:
    subcluster["memory"] = sys.argv[2]
print(json.dumps(cluster))
PY
    for choice in "" "--recompute no --offload optimizer"; do
        passes 2 plan --input "$scratch/model.h5" --cluster "$scratch/cluster.json" --global-batch 1024 $choice --json || return
        steps+=("$(python3 -c 'import json, sys; print(json.load(sys.stdin)["simulated_s"])' <"$scratch/out")")
    done
    check "$1, $2 GB: ${steps[*]}" awk "BEGIN { exit !(${steps[0]} <= ${steps[1]}) }"
}

begun=$SECONDS
plans tied "" 31.0 0.05
[ $((SECONDS - begun)) -lt 6 ] || # some phases do not know their end
    check "a long plan shows how far it is: $(cat "$scratch/err")" grep -Eq '^hapt: (predicting|planning).*, [0-9]+ s (left|so far)$' "$scratch/err"
# Many microbatches: windows of the search hold fewer stages. The plan is close to its bound, and the same on one and two ranks.
"$HAPT" model gpt2-124m --output "$scratch/small.h5" >/dev/null || exit 1
for ranks in 1 2; do
    passes $ranks plan --input "$scratch/small.h5" --cluster inputs/clusters/a100x2-v100x2.json --microbatches 256 --json
    python3 -c 'import json, sys
plan = json.load(sys.stdin)
print(plan["bound_gap"] < 0.05, plan["simulated_s"], plan["stages"])' <"$scratch/out" >"$scratch/plan-$ranks"
done
check "within 5 % of the bound: $(cat "$scratch/plan-1")" grep -q '^True' "$scratch/plan-1"
check "the same on two ranks" cmp -s "$scratch/plan-1" "$scratch/plan-2"
if [ "${HAPT_LONG:-0}" != 0 ]; then
    plans tied "--tied-exchange 16bit" 29.9 0.05
    plans untied "" 28.4 0.05
    plans tied "--split-backward no" 31.1 0.05
    plans tied "--tied-exchange 16bit --split-backward no" 29.75 0.05
    plans untied "--split-backward no" 28.46 0.05
    never_slower llama-3-8b 80
    never_slower gpt-30b 10.7374
fi
finish
