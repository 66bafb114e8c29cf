#!/usr/bin/env bash
# Traces of a plan for other simulators (--emit of hapt simulate and hapt plan): files, bytes, folders, refusals. --blocking of hapt simulate.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
small_plan
P=$scratch/p.h5 plan=$scratch/plan.h5

# The same bytes on any number of ranks. The exchange of tied gradients is there.
for ranks in 1 2; do
    passes $ranks simulate --plan "$plan" --emit simgrid --output "$scratch/sim$ranks" || finish
    checks=$((checks + 1))
    [ "$(ls "$scratch/sim$ranks" | tr '\n' ' ')" = "hosts.txt platform.xml rank.0.txt rank.1.txt replay.sh traces.txt " ] ||
        fail "files: $(ls "$scratch/sim$ranks")"
    check "another trace on $ranks ranks" diff -r "$scratch/sim1" "$scratch/sim$ranks"
done
grep -q '1 GB/s' "$scratch/err" || fail "no word about assumed bytes: $(cat "$scratch/err")"
cat >"$scratch/lines.py" <<'P'
"""The lines of each rank: 4 microbatches, and one message each way for tied gradients; each receive and send is waited for."""
import collections, sys
ranks = [[line.split()[1:] for line in open("%s/rank.%d.txt" % (sys.argv[1], r))] for r in (0, 1)]
for rank, lines in enumerate(ranks):
    kinds = collections.Counter(line[0] for line in lines)
    assert kinds == {"init": 1, "compute": 9, "irecv": 5, "isend": 5, "wait": 10, "finalize": 1}, kinds
    sends = collections.Counter((line[1], line[2], line[3]) for line in lines if line[0] == "isend")
    assert all(to == str(1 - rank) for to, tag, size in sends), sends
    receives = collections.Counter((tag, size) for kind, source, tag, size in (l for l in ranks[1 - rank] if l[0] == "irecv"))
    assert receives == collections.Counter({(tag, size): n for (to, tag, size), n in sends.items()}), (receives, sends)
P
checks=$((checks + 1))
/usr/bin/python3 "$scratch/lines.py" "$scratch/sim1" 2>"$scratch/said" || fail "lines: $(cat "$scratch/said")"

# A profile gives the bytes; hapt plan and hapt simulate write the same. Chakra: their exact number, in whole bytes.
stages="0-2@a:1x2,2-$layers@b:1x1"
for format in simgrid chakra; do
    passes 1 plan --objective formula --profile "$P" --microbatches 4 --stages "$stages" --emit $format --output "$scratch/plan-$format"
    passes 1 simulate --plan "$plan" --profile "$P" --emit $format --output "$scratch/simulate-$format"
    check "hapt plan and hapt simulate: $format" diff -r "$scratch/plan-$format" "$scratch/simulate-$format"
done
grep -q 'GB/s' "$scratch/err" && fail "bytes are assumed beside a profile: $(cat "$scratch/err")"
if /usr/bin/python3 -c 'import h5py' 2>/dev/null; then
    checks=$((checks + 1))
    /usr/bin/python3 - "$P" "$scratch/plan-chakra" 2>"$scratch/said" <<'P' || fail "bytes: $(cat "$scratch/said")"
import h5py, json, sys
with h5py.File(sys.argv[1]) as profile:
    boundary, tied = profile["boundary_bytes"][1], profile["tied_bytes"][2]
for rank in 0, 1:
    graph = json.load(open("%s/rank.%d.json" % (sys.argv[2], rank)))["workload_graph"]
    sizes = sorted(node["comm_size"] for node in graph if node["NodeType"] == 5)
    assert sizes == sorted([round(boundary)] * 4 + [round(tied)]), (sizes, boundary, tied)
    assert len([node for node in graph if node["NodeType"] == 4]) == 9 and len([node for node in graph if node["NodeType"] == 6]) == 5
P
fi

checks=$((checks + 1))
/usr/bin/python3 tests/system/chakra.py "$scratch/plan-chakra" >"$scratch/said" 2>&1 && grep -q '^38 nodes' "$scratch/said" ||
    fail "binary and JSON differ: $(cat "$scratch/said")"

# Folders: a new one, or an empty one. --overwrite replaces traces, also those of more ranks, and keeps other files.
mkdir "$scratch/empty"
passes 1 simulate --plan "$plan" --emit chakra --output "$scratch/empty"
refuses 2 'folder with files' 1 simulate --plan "$plan" --emit simgrid --output "$scratch/empty"
touch "$scratch/empty/rank.7.json" "$scratch/empty/rank.8.et" "$scratch/empty/notes.txt"
passes 1 simulate --plan "$plan" --emit simgrid --output "$scratch/empty" --overwrite yes
checks=$((checks + 1))
[ "$(ls "$scratch/empty" | tr '\n' ' ')" = "hosts.txt notes.txt platform.xml rank.0.txt rank.1.txt replay.sh traces.txt " ] ||
    fail "an earlier trace is left: $(ls "$scratch/empty")"
ln -s empty "$scratch/link"
refuses 2 'symbolic link' 2 simulate --plan "$plan" --emit simgrid --output "$scratch/link" --overwrite yes
refuses 2 'is a file' 1 plan --profile "$P" --emit simgrid --output "$plan" --overwrite yes
refuses 6 'cannot read folder .* not a folder' 1 simulate --plan "$plan" --emit simgrid --output "$plan/traces"
refuses 2 'no --output' 2 simulate --plan "$plan" --emit simgrid
refuses 2 'output has no effect' 1 simulate --plan "$plan" --output "$scratch/nothing"
refuses 2 'emit has no effect' 1 plan --profile "$P" --compare --emit simgrid --output "$scratch/nothing"
refuses 2 'emit has no effect' 1 plan --diff "$plan" "$plan" --emit simgrid
refuses 2 'use one of' 1 simulate --plan "$plan" --emit dot --output "$scratch/nothing"
refuses 2 'without overlap' 1 simulate --plan "$plan" --blocking yes --emit simgrid --output "$scratch/nothing"
refuses 3 'cannot open' 1 simulate --plan "$scratch/absent.h5" --emit simgrid --output "$scratch/nothing"
refuses 6 'cannot be written' 1 simulate --plan "$plan" --emit simgrid --output /proc/traces
check "refusals make no folder" test ! -e "$scratch/nothing"

# A disk that fails: one error, and nothing unfinished is left.
for call in fsync rename; do
    mkdir "$scratch/$call"
    FAULTS_UNDER=$scratch/$call FAULTS_CALL=$call FAULTS_AT=2 FAULTS_ERROR=ENOSPC LD_PRELOAD=$HAPT_BUILD/tests/faults/faults.so \
        refuses 6 'cannot be written: No space left' 1 simulate --plan "$plan" --emit simgrid --output "$scratch/$call"
    check "left by a failing $call: $(ls "$scratch/$call")" test -z "$(ls "$scratch/$call" | grep -v '^rank.0.txt$')"
done

# --blocking: a transfer takes the time of both ends. auto is how the plan was priced.
step() { # OPTIONS...
    passes 1 simulate --json "$@" && /usr/bin/python3 -c '
import json, sys
d = json.load(open(sys.argv[1]))
print(d["simulated_s"], d.get("blocking", False))' "$scratch/out"
}
own=$(step --plan "$plan") overlapped=$(step --plan "$plan" --blocking no) blocked=$(step --plan "$plan" --blocking yes)
check "a plan is priced with overlap" test "$own" = "$overlapped"
check "transfers that block take longer" /usr/bin/python3 -c "import sys; sys.exit(not ${blocked% *} > 1.0001 * ${own% *})"
check "blocking: $blocked, $own" test "${blocked#* } ${own#* }" = "True False"
passes 1 plan --profile "$P" --microbatches 4 --strategy hexiscale --output "$scratch/hexiscale.h5"
own=$(step --plan "$scratch/hexiscale.h5") blocked=$(step --plan "$scratch/hexiscale.h5" --blocking yes)
check "a plan that was priced without overlap: $own, $blocked" test "$own" = "$blocked"
passes 1 simulate --plan "$plan" --blocking && grep -q 'without overlap' "$scratch/out" || fail "no word: $(head -n 1 "$scratch/out")"
# Other trainers: the modules of each stage, each in one; a schedule of all passes in order; sentences on what is lost.
cat >"$scratch/four.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "300 MB"},
    {"name": "b", "nodes": 1, "devices_per_node": 2, "device": "cpu", "memory": "300 MB", "slowdown": 2} ],
  "links": [ {"between": ["a", "b"], "bandwidth": "100 MB/s", "latency": "10 us"} ] }
JSON
passes 1 model gpt --layers 6 --hidden 32 --heads 4 --sequence 16 --vocab 64 --output "$scratch/g.h5"
for trainer in torchtitan megatron deepspeed; do
    passes 1 plan --input "$scratch/g.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --recompute all --loops 1 --use-all-devices \
        --split-backward no --emit $trainer --output "$scratch/of-$trainer"
    check "$trainer says what it lacks" grep -q "hapt hides transfers behind computation" "$scratch/out"
done
checks=$((checks + 1))
/usr/bin/python3 - "$scratch" 2>"$scratch/said" <<'P' || fail "other trainers: $(cat "$scratch/said")"
import csv, json, sys
plans = {name: json.load(open("%s/of-%s/%s.json" % (sys.argv[1], name, name))) for name in ("torchtitan", "megatron", "deepspeed")}
for name, plan in plans.items():
    assert (plan["format"], plan["version"], plan["trainer"], plan["microbatches"]) == ("hapt-emitted-plan", 1, name, 4), plan
    assert any("tied" in sentence for sentence in plan["cannot"]), plan
parts = plans["torchtitan"]["settings"]["module_fqns_per_model_part"]
modules = ["wte", "wpe"] + ["h.%d" % k for k in range(6)] + ["ln_f", "lm_head"]
assert [name for part in parts for name in part] == modules and all(parts) and len(parts) > 1, parts
blocks = [sum(name.startswith("h.") for name in part) for part in parts]
layout = plans["megatron"]["settings"]["pipeline_model_parallel_layout"]
assert layout == "E" + "|".join("t*%d" % count if count else "" for count in blocks) + "L", layout
deepspeed = plans["deepspeed"]["settings"]
assert deepspeed["layers"] == modules and [b - a for a, b in zip(deepspeed["parts"], deepspeed["parts"][1:])] == [len(part) for part in parts], deepspeed
rows = list(csv.reader(open(sys.argv[1] + "/of-torchtitan/schedule.csv")))
assert len(rows) == len(parts), rows
for stage, row in enumerate(rows):
    assert sorted(row) == sorted("%d%s%d" % (stage, kind, m) for kind in "FB" for m in range(4)), row
    assert all(row.index("%dF%d" % (stage, m)) < row.index("%dB%d" % (stage, m)) for m in range(4)), row
P
refuses 3 'begins inside h.' 1 plan --input "$scratch/g.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --layers-per-model ops \
    --stages "0-4@a:1x1,4-32@b:1x2" --emit torchtitan --output "$scratch/inside"
check "nothing is written" [ ! -e "$scratch/inside" ]
cp -r "$scratch/of-torchtitan" "$scratch/earlier"
refuses 3 'begins inside h.' 1 plan --input "$scratch/g.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --layers-per-model ops \
    --stages "0-4@a:1x1,4-32@b:1x2" --emit torchtitan --overwrite --output "$scratch/earlier"
check "earlier files stay" diff -r "$scratch/of-torchtitan" "$scratch/earlier"
refuses 2 'needs a model' 1 plan --profile "$P" --microbatches 4 --emit megatron --output "$scratch/none"
refuses 2 'needs a model' 1 simulate --plan "$plan" --emit deepspeed --output "$scratch/none"
passes 1 model gpt --layers 6 --hidden 32 --heads 4 --sequence 16 --vocab 64 --document-end 5 --output "$scratch/d.h5"
for trainer in torchtitan megatron; do
    passes 1 plan --input "$scratch/d.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --loops 1 --split-backward no --emit $trainer \
        --output "$scratch/documents-$trainer"
    check "$trainer: documents" grep -q "Token 5 ends documents, which do not see each other; $trainer needs" "$scratch/out"
done
passes 1 model vgg --image 16 --classes 4 --microbatch 2 --output "$scratch/v.h5"
refuses 3 'has no attention' 1 plan --input "$scratch/v.h5" --cluster "$scratch/four.json" --predict --microbatches 4 --loops 1 --emit megatron --output "$scratch/none"

finish
