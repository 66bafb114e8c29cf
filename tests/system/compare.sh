#!/usr/bin/env bash
# `hapt plan --compare` and --strategy on predicted profiles: text, JSON, one to three ranks, refusals.
# Runs beside others: it measures no time.
source "$(dirname "$0")/lib.sh.inc"
clusters=$(dirname "$0")/../../inputs/clusters
model=$scratch/m.h5 P=$scratch/P.h5
# read FILE EXPRESSION: a value of the JSON object d in the file
read_json() { /usr/bin/python3 -c 'import json, sys; d = json.load(open(sys.argv[1])); print(eval(sys.argv[2]))' "$1" "$2"; }
# holds FILE EXPRESSION
holds() {
    checks=$((checks + 1))
    [ "$(read_json "$1" "bool($2)")" = True ] || fail "$2 does not hold in $(head -c 300 "$1")"
}

passes 1 model gpt --layers 8 --hidden 1024 --heads 16 --sequence 512 --vocab 8000 --microbatch 8 --dtype bf16 --output "$model"
passes 1 profile --input "$model" --cluster "$clusters/a100x1-v100x1.json" --predict --output "$P"

# text: a line for every system and ablation, with its schedule. Loops take most of the time (HAPT_LONG), then large clusters.
if [ -n "${HAPT_LONG:-}" ]; then
    passes 1 plan --profile "$P" --microbatches 16 --compare
else
    passes 1 profile --input "$model" --cluster "$clusters/a100x1-v100x1of4.json" --predict --output "$scratch/few.h5"
    passes 1 plan --profile "$scratch/few.h5" --microbatches 16 --compare --loops 1
fi
for row in 'hapt +(h1f1b|looped)' 'hexiscale +1f1b' 'alpa +eager1f1b' 'megatron +(1f1b|interleaved)' 'even +h1f1b' 'granularity 8 +h1f1b' \
    'pfeife +h1f1b' 'deepspeed +1f1b' 'colossal +1f1b' 'granularity 48 +h1f1b' 'ignore-communication +h1f1b' 'schedule gpipe +gpipe'; do
    checks=$((checks + 1))
    grep -qE "^  $row" "$scratch/out" || fail "no line '$row' in: $(cat "$scratch/out")"
done

# JSON: the same on any number of ranks, except for the seconds of searching (HAPT_LONG; the single commands below run on one rank). Without
# loops, which take most of the time.
for ranks in ${HAPT_LONG:+1 2} 3; do
    passes $ranks plan --input "$model" --cluster "$clusters/a100x1-v100x1.json" --microbatches 16 --loops 1 --compare --json
    sed '/"search_seconds"/d' "$scratch/out" >"$scratch/table$ranks.json"
    cp "$scratch/out" "$scratch/table.json"
    checks=$((checks + 1))
    [ -z "${HAPT_LONG:-}" ] || cmp -s "$scratch/table1.json" "$scratch/table$ranks.json" || fail "another table on $ranks ranks"
done
holds "$scratch/table.json" 'd["format"] == "hapt-comparison" and d["microbatches"] == 16 and len(d["rows"]) == 15'
holds "$scratch/table.json" 'all(r["reason"] or r["simulated_s"] > 0 for r in d["rows"])'
holds "$scratch/table.json" 'd["rows"][0]["ratio"] == 1 and d["rows"][0]["mfu"] > 0'
# Megatron and HexiScale also as independent pipelines: all microbatches, the reduction inside the step
for row in 1 3; do
    holds "$scratch/table.json" "len(d['rows'][$row]['pipelines']['plans']) > 1"
    holds "$scratch/table.json" "sum(p['microbatches'] for p in d['rows'][$row]['pipelines']['plans']) == 16"
    holds "$scratch/table.json" "d['rows'][$row]['pipelines']['simulated_s'] > max(p['simulated_s'] for p in d['rows'][$row]['pipelines']['plans'])"
    holds "$scratch/table.json" "abs(d['rows'][$row]['ratio'] * d['rows'][0]['simulated_s'] - min(d['rows'][$row]['simulated_s'], d['rows'][$row]['pipelines']['simulated_s'])) < 1e-9"
done
holds "$scratch/table.json" 'd["rows"][1]["blocking"] and not d["rows"][3]["blocking"]'

# every row equals the result of the single command
single() { # ROW OPTIONS...
    local row=$1
    shift
    passes 1 plan --input "$model" --cluster "$clusters/a100x1-v100x1.json" --microbatches 16 --json "$@" || return
    local alone
    alone=$(read_json "$scratch/out" 'd["simulated_s"]')
    checks=$((checks + 1))
    [ "$alone" = "$(read_json "$scratch/table.json" "[r['simulated_s'] for r in d['rows'] if r['name'] == '$row'][0]")" ] ||
        fail "row $row differs from the single run $alone"
}
single hapt --loops 1
if [ -n "${HAPT_LONG:-}" ]; then
    single hexiscale --strategy hexiscale
    single alpa --strategy alpa
fi
single megatron --strategy megatron
checks=$((checks + 1))
[ "$(read_json "$scratch/out" 'd["pipelines"]["simulated_s"]')" = "$(read_json "$scratch/table.json" 'd["rows"][3]["pipelines"]["simulated_s"]')" ] ||
    fail "other pipelines with --strategy than with --compare"
single even --strategy even
if [ -n "${HAPT_LONG:-}" ]; then
    single pfeife --strategy pfeife
    single deepspeed --strategy deepspeed
    single colossal --strategy colossal
    single 'granularity 8' --granularity 8
fi
single ignore-communication --ignore-communication
single 'schedule 1f1b' --schedule 1f1b

# Megatron's stages are whole blocks: equal computation inside a subcluster, apart from the ends
passes 1 plan --input "$model" --cluster "$clusters/a100x1-v100x1.json" --strategy megatron --json
holds "$scratch/out" 'len({(s["nodes"], s["devices_per_node"], s["tensor_parallel"]) for s in d["stages"]}) == 1'
holds "$scratch/out" 'sum(s["nodes"] * s["devices_per_node"] for s in d["stages"][:16 // (d["stages"][0]["nodes"] * d["stages"][0]["devices_per_node"])]) == 16 and d["schedule"] in ("1f1b", "interleaved")'

# nodes of different sizes: a reason in the table, an error in the single command
passes 1 plan --input "$model" --cluster "$clusters/a100x1-v100x1of4.json" --microbatches 16 --loops 1 --compare --json
holds "$scratch/out" '[r["name"] for r in d["rows"] if r["reason"] and "devices per node" in r["reason"]] == ["alpa", "megatron", "pfeife", "deepspeed", "colossal"]'
holds "$scratch/out" '"simulated_s" in d["rows"][0] and "simulated_s" in d["rows"][1]'
checks=$((checks + 1))
grep -q 'hapt: error' "$scratch/err" && fail "a failing row printed an error: $(cat "$scratch/err")"
for strategy in alpa megatron pfeife deepspeed colossal; do
    refuses 4 'devices per node' 2 plan --input "$model" --cluster "$clusters/a100x1-v100x1of4.json" --strategy $strategy
done

refuses 2 'runs 1f1b, not gpipe' 1 plan --profile "$P" --strategy megatron --schedule gpipe
refuses 2 'strategy hapt' 1 plan --profile "$P" --strategy alpa --granularity 8
refuses 2 'strategy hapt' 1 plan --profile "$P" --strategy even --ignore-communication
refuses 2 'nothing to choose' 1 plan --profile "$P" --stages 0-1@a100:1x1 --granularity 8
refuses 2 'compare' 1 plan --profile "$P" --compare --strategy alpa
refuses 2 'writes no plan' 1 plan --profile "$P" --compare --output "$scratch/x.h5"
refuses 2 'always overlaps' 1 --input "$model" --strategy hexiscale
refuses 2 'granularity' 1 --input "$model" --granularity 8
refuses 2 'granularity' 1 plan --profile "$P" --granularity -1
finish
