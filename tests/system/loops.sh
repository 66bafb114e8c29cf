#!/usr/bin/env bash
# Looped schedules for users: hapt plan, train, simulate and the whole job; losses, resuming, files, refusals. mpi/loops.c and bit_matrix.sh
# compare the bits of more models, skips, frozen prefixes and split backward passes; rehearsals.sh has modelled devices.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

losses() { grep -o '"loss": \[[^]]*\]' "$scratch/out"; }
same() { # WHAT WANT GOT
    checks=$((checks + 1))
    [ -n "$2" ] && [ "$2" = "$3" ] || fail "$1: losses $3 instead of $2"
}
python() { # WHAT ARGUMENTS... <SCRIPT
    local what=$1
    shift
    checks=$((checks + 1))
    /usr/bin/python3 - "$@" >"$scratch/said" 2>&1 || fail "$what: $(tail -n 5 "$scratch/said")"
}
head -c 60000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings no --data "$scratch/tokens.h5" \
    --output "$scratch/m.h5" || finish
plan() { # OUTPUT OPTIONS...
    passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --json \
        --output "$scratch/$1.h5" "${@:2}"
}
run() { # PLAN OUTPUT OPTIONS...
    passes 4 train --input "$scratch/m.h5" --cluster inputs/two-hosts.json --plan "$scratch/$1.h5" --layers-per-model 16 --threads 1 --json \
        --output "$scratch/$2" "${@:3}"
}

# Planned loops have the losses of the plan without loops, bit for bit: submeshes of one rank, no tied parameters.
# split MODEL: $stages, four of equally many layers on ranks of the two hosts in turn
split() {
    passes 1 plan --input "$scratch/$1.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --json || finish
    stages=$(python3 - "$scratch/out" <<'P'
import json, sys
layers = json.load(open(sys.argv[1]))["stages"][-1]["layers"][1]
print(",".join("%d-%d@%s:1x1" % (layers * i // 4, layers * (i + 1) // 4, ("slow", "fast")[i % 2]) for i in range(4)))
P
)
}
split m
plan straight --stages "$stages" && run straight straight --steps 4 && want=$(losses)
plan loops --schedule interleaved --stages "$stages" || finish
python "the plan's JSON" "$scratch/out" <<'P'
import json, sys
plan = json.load(open(sys.argv[1]))
assert plan["schedule"] == "interleaved" and plan["loops"] == {"loops": 2, "placement": "loop", "loop_batch": 2, "prefetch": 0, "transfer_slots": 3}, plan["loops"]
assert [stage["submesh"] for stage in plan["stages"]] == [0, 1, 0, 1], plan["stages"]
P
run loops loops --steps 4 --trace 1 && same interleaved "$want" "$(losses)"
for schedule in looped ${HAPT_LONG:+breadth-first} 1f1b; do
    run loops $schedule --steps 4 --schedule $schedule && same "the plan under $schedule" "$want" "$(losses)"
done
plan searched --schedule looped --loops 2 || finish
python "a searched plan" "$scratch/out" <<'P'
import json, sys
plan = json.load(open(sys.argv[1]))
submeshes = max(stage["submesh"] for stage in plan["stages"]) + 1
assert plan["schedule"] == "looped" and plan["loops"]["loops"] == 2 and len(plan["stages"]) == 2 * submeshes >= 4, plan
assert 8 % plan["loops"]["loop_batch"] == 0 and plan["simulated_s"] > 0, plan
P
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --schedule looped
grep -q 'loops over . submeshes' "$scratch/out" || fail "no loops in the plan's table: $(cat "$scratch/out")"
run searched searched --steps 4 && python "losses of a searched plan" "$want" "$(losses)" <<'P'
import json, sys
want, got = (json.loads("{" + text + "}")["loss"] for text in sys.argv[1:])
assert max(abs(a - b) / b for a, b in zip(got, want)) < 1e-5, (want, got)  # submeshes of two ranks add in another order
P
passes 4 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --json --schedule looped --loops 2 \
    --output "$scratch/four.h5"
checks=$((checks + 1))
h5diff "$scratch/searched.h5" "$scratch/four.h5" /stage_layers /stage_layers >"$scratch/said" || fail "four ranks plan otherwise: $(cat "$scratch/said")"

# A looped checkpoint goes on without loops, planned anew, and with the given bits.
passes 4 --input "$scratch/m.h5" --cluster inputs/two-hosts.json --plan "$scratch/loops.h5" --layers-per-model 16 --threads 1 --json \
    --output "$scratch/half" --steps 4 --stop-after 2 --checkpoint-every 1
passes 4 --input "$scratch/m.h5" --cluster inputs/two-hosts.json --plan "$scratch/straight.h5" --layers-per-model 16 --threads 1 --json \
    --output "$scratch/half" --steps 4 --resume yes --replan && same "resumed without loops" "$want" "$(losses)"
refuses 2 'has no effect: --resume keeps' 4 train --input "$scratch/m.h5" --cluster inputs/two-hosts.json --output "$scratch/half" --steps 5 --resume --loop-batch 4

# The whole job.
passes 4 --input "$scratch/m.h5" --cluster inputs/two-hosts.json --schedule interleaved --loops 2 --microbatches 8 --predict yes --layers-per-model 16 \
    --threads 1 --steps 2 --output "$scratch/job"
grep -q 'schedule interleaved' "$scratch/out" || fail "the job's plan: $(cat "$scratch/out")"

# The timeline names both stages of each rank.
python "the timeline" "$scratch/loops/run.h5" <<'P'
import sys, h5py
with h5py.File(sys.argv[1]) as run:
    passes = [(r, s, m) for r, s, m, k in zip(run["/trace/rank"][...], run["/trace/stage"][...], run["/trace/microbatch"][...], run["/trace/kind"][...])
              if k in (b"forward", "forward")]
    assert sorted((s, m) for r, s, m in passes) == [(s, m) for s in range(4) for m in range(8)], passes
    ranks = [{r for r, s, m in passes if s == stage} for stage in range(4)]
    assert ranks[0] == ranks[2] and ranks[1] == ranks[3] and ranks[0] != ranks[1], ranks
P

# Simulation: other groups on the same stages; traces for other simulators.
passes 1 simulate --plan "$scratch/loops.h5" --loop-batch 4 --schedule looped --prefetch 1 --json
passes 1 simulate --plan "$scratch/loops.h5" --microbatches 16
passes 1 simulate --plan "$scratch/loops.h5" --emit chakra --output "$scratch/traces"
check "two traces" test "$(ls "$scratch"/traces/rank.*.json | wc -l)" = 2
passes 1 check "$scratch/loops.h5" "$scratch/searched.h5"

# A frozen prefix: the stages in front of the first trained operator have no backward pass and hold few microbatches.
/usr/bin/python3 tests/system/freeze.py "$scratch/m.h5" "$scratch/fixed.h5" wte.weight wpe.weight h.0. h.1.
freeze() { # OUTPUT OPTIONS...
    passes 1 plan --input "$scratch/fixed.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --json \
        --output "$scratch/$1.h5" --stages "$stages" "${@:2}" || return
    python "$1: forward-only stages" "$scratch/out" <<'P'
import json, sys
plan = json.load(open(sys.argv[1]))
stages = plan["stages"]
frozen = [stage.get("forward_only", False) for stage in stages]
# loops whose submeshes train unequally many stages may keep empty backward passes
assert (frozen[0] or "loops" in plan) and not frozen[-1] and frozen == sorted(frozen, reverse=True), stages
assert all(stage["warmup"] <= 3 for stage, fixed in zip(stages, frozen) if fixed), stages
P
}
every=$stages
split fixed
freeze frozen
freeze frozen_loops --schedule interleaved
stages=$every

# Split backward passes, tensors that skip stages, and rows that the planner chooses.
split m
plan split_loops --schedule interleaved --stages "$stages" --split-backward yes
passes 1 simulate --plan "$scratch/split_loops.h5" --json && check "the plan is split" grep -q '"split_backward": true' "$scratch/out"
cp "$scratch/m.h5" "$scratch/skips.h5"
/usr/bin/python3 tests/system/skips.py "$scratch/skips.h5" 0:2 -1:3 || fail "skips"
skip() { # OUTPUT OPTIONS...
    passes 1 plan --input "$scratch/skips.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 8 --layers-per-model 16 --json \
        --output "$scratch/$1.h5" "${@:2}" && planned=$(grep -o '"simulated_s": [^,]*' "$scratch/out" | head -n 1)
}
split skips
skip skip_loops --schedule interleaved --stages "$stages"
passes 1 simulate --plan "$scratch/skip_loops.h5" --json
same "the file simulates as planned" "$planned" "$(grep -o '"simulated_s": [^,]*' "$scratch/out" | head -n 1)"
check "the plan has the messages of skips" h5ls "$scratch/skip_loops.h5/edge_stages"
stages=$every
skip skip_v --schedule looped --loops 2 --placement v --split-backward yes
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --global-batch 8 --layers-per-model 16 --schedule looped --loop-batch 4 --json
python "rows of looped plans" "$scratch/out" <<'P'
import json, sys
plan = json.load(open(sys.argv[1]))
assert plan["rows"] * plan["microbatches"] == 8 and plan["microbatches"] % 4 == 0 and plan["loops"]["loop_batch"] == 4, plan
P
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 1 --layers-per-model 16 --schedule looped --loops 2

# Refusals.
same_plan=(--input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --layers-per-model 16)
refuses 2 'loops has no effect' 1 plan "${same_plan[@]}" --loops 2
refuses 2 'loops has no effect' 1 plan "${same_plan[@]}" --schedule h1f1b --loops 1
refuses 2 'loop-batch has no effect' 1 plan "${same_plan[@]}" --schedule breadth-first --loop-batch 2
refuses 2 'prefetch has no effect' 1 plan "${same_plan[@]}" --schedule interleaved --prefetch 1
refuses 2 '8 microbatches cannot be divided into groups of 3' 1 plan "${same_plan[@]}" --schedule looped --loop-batch 3
grep -q 'give --loop-batch [24], or --microbatches 9' "$scratch/err" || fail "the hint: $(cat "$scratch/err")"
refuses 2 'no looped schedules' 1 plan "${same_plan[@]}" --schedule interleaved --objective formula
refuses 2 'no looped schedules' 1 plan "${same_plan[@]}" --schedule looped --strategy even
refuses 2 'explain' 1 plan "${same_plan[@]}" --schedule looped --explain
refuses 2 'what-if has no effect' 1 plan "${same_plan[@]}" --schedule looped --what-if microbatches=8..16
refuses 2 'fix launches=4:3:2:1' 1 plan "${same_plan[@]}" --schedule interleaved --stages "$stages" --fix launches=4:3:2:1
refuses 2 'cannot be divided into groups of 3' 1 plan "${same_plan[@]}" --schedule looped --global-batch 16 --loop-batch 3
refuses 4 'layers are too few' 1 plan "${same_plan[@]}" --schedule interleaved --loops 64
refuses 2 'which are no 3 loops' 1 plan "${same_plan[@]}" --schedule interleaved --loops 3 --stages "$stages"
refuses 3 'share a submesh' 1 plan "${same_plan[@]}" --schedule interleaved --placement v --stages "$stages"
refuses 2 'groups' 4 train --input "$scratch/m.h5" --cluster inputs/two-hosts.json --plan "$scratch/loops.h5" --microbatches 7 --output "$scratch/none" --steps 1
refuses 2 'loop-batch has no effect' 1 simulate --plan "$scratch/straight.h5" --loop-batch 2
# Plan files with more passes are refused, so no plan may have them.
refuses 2 '1000000 microbatches are too many for a looped schedule' 1 plan "${same_plan[@]}" --schedule looped --microbatches 1000000
refuses 2 '4 stages with 300000 microbatches are too many' 1 simulate --plan "$scratch/loops.h5" --microbatches 300000
for damage in 'loop_batch=3' 'prefetch=1' 'schedule=looping'; do
    cp "$scratch/loops.h5" "$scratch/bad.h5"
    /usr/bin/python3 - "$scratch/bad.h5" "$damage" <<'P'
import sys, h5py, numpy
with h5py.File(sys.argv[1], "r+") as plan:
    name, value = sys.argv[2].split("=")
    plan.attrs[name] = numpy.int64(value) if value.isdigit() else value
P
    refuses 3 'plan|schedule' 1 simulate --plan "$scratch/bad.h5"
done

# A free schedule of few microbatches is looped where that is shorter by 2 %: the same on any number of ranks, and in --compare. --loops 1 and
# --gap leave loops out. --use-all-devices holds for looped plans, too.
rehearsed_gpus 2 "10 Gbit/s" "50 us"
passes 1 model gpt --layers 6 --hidden 1024 --heads 16 --sequence 1024 --vocab 8000 --microbatch 4 --dtype bf16 --output "$scratch/few.h5" &&
    passes 1 profile --input "$scratch/few.h5" --cluster "$scratch/c.json" --output "$scratch/few-p.h5" || finish
free() { # NAME RANKS OPTIONS...
    passes "$2" plan --profile "$scratch/few-p.h5" --microbatches 4 --split-backward no --json "${@:3}" && cp "$scratch/out" "$scratch/$1.json"
}
free one 1 && free three 3 && free all 1 --use-all-devices yes && free unlooped 1 --loops 1 && free fixed 1 --fix loops=1 && free gap 1 --gap 0 &&
    passes 1 plan --profile "$scratch/few-p.h5" --microbatches 4 --compare --json && cp "$scratch/out" "$scratch/table.json" &&
    passes 1 plan --profile "$scratch/few-p.h5" --microbatches 4 --json && cp "$scratch/out" "$scratch/default.json" || finish
python "chosen loops" "$scratch" <<'P'
import json, sys
def read(name):
    document = json.load(open("%s/%s.json" % (sys.argv[1], name)))
    document.get("search", {}).pop("seconds", None)
    return document
one, unlooped, every = read("one"), read("unlooped"), read("all")
assert one["schedule"] == "looped" and "loops" in one and "bound_s" not in one, one["schedule"]
assert one["simulated_s"] <= 0.98 * unlooped["simulated_s"] and unlooped["bound_s"] > 0, (one["simulated_s"], unlooped["simulated_s"])
assert read("three") == one
assert read("fixed") == unlooped and read("gap")["simulated_s"] == unlooped["simulated_s"]
used = {(stage["submesh"] if "submesh" in stage else k): stage["nodes"] * stage["devices_per_node"] for k, stage in enumerate(every["stages"])}
assert sum(used.values()) == 4 and every["simulated_s"] >= one["simulated_s"], used
row = read("table")["rows"][0]
assert row["simulated_s"] == read("default")["simulated_s"] and row["schedule"] == read("default")["schedule"], row
P

# Layer 27 has no weights to shard, and data parallelism is no candidate for it: the stages of its devices get another program.
printf '{"format": "hapt-cluster", "version": 1, "subclusters": [{"name": "a", "nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "2 GB"},
    {"name": "b", "nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "2 GB"}],
    "links": [{"between": ["a", "b"], "bandwidth": "1 GB/s", "latency": "10 us"}]}' >"$scratch/pairs.json"
passes 1 model gpt --layers 6 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --tied-embeddings no --output "$scratch/small.h5" &&
    passes 1 plan --input "$scratch/small.h5" --cluster "$scratch/pairs.json" --layers-per-model ops --predict yes --microbatches 12 \
        --stages 0-9@a:1x2,9-27@b:1x2,27-28@a:1x2,28-32@b:1x2 --schedule interleaved --loops 2 --sharded-weights yes --json &&
    python "one program for the stages of a submesh" "$scratch/out" <<'P'
import json, sys
stages = json.load(open(sys.argv[1]))["stages"]
degrees = [stage.get("tensor_parallel", 1) for stage in stages]
assert len(stages) == 4 and degrees[0] == degrees[2] and degrees[1] == degrees[3], degrees
P
# A program that --stages gives is not replaced.
refuses 3 'layers 27-28 cannot be a stage on a:1x2' 1 plan --input "$scratch/small.h5" --cluster "$scratch/pairs.json" --layers-per-model ops \
    --predict yes --microbatches 12 --stages 0-9@a:1x2t1,9-27@b:1x2,27-28@a:1x2t1,28-32@b:1x2 --schedule interleaved --loops 2 --sharded-weights yes

# Adapters in the last block alone: the lists that the search found deadlock once frozen stages have no backward pass. So they keep empty ones.
printf '{"format": "hapt-cluster", "version": 1, "subclusters": [{"name": "cpu", "nodes": 1, "devices_per_node": 2, "device": "cpu",
    "memory": "12 GB", "intra_node_bandwidth": "0.5 GB/s", "intra_node_latency": "5.3 us"}]}' >"$scratch/near.json"
passes 1 import tests/data/hf/qwen3 --sequence 32 --microbatch-rows 2 --lora rank=8,alpha=16,target=q_proj,v_proj --output "$scratch/adapters.h5" &&
    passes 1 plan --input "$scratch/adapters.h5" --cluster "$scratch/near.json" --predict --threads 1 --output "$scratch/adapters-plan.h5" &&
    check "a looped plan" grep -q 'schedule looped' "$scratch/out" && passes 1 simulate --plan "$scratch/adapters-plan.h5"
finish
