#!/usr/bin/env bash
# Split backward passes (--split-backward) on paper: plans, what they say, refusals.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

rehearsed_gpus 2 "10 Gbit/s" "50 us"
model=$scratch/m.h5 c=$scratch/c.json
number() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))[sys.argv[2]])' "$1" "$2"; }
less() { python3 -c 'import sys; sys.exit(not float(sys.argv[1]) < float(sys.argv[2]))' "$1" "$2"; }

# ---- plans on paper ----
passes 1 model gpt --layers 6 --hidden 1024 --heads 16 --sequence 1024 --vocab 8000 --microbatch 4 --dtype bf16 --output "$model" || finish
passes 1 profile --input "$model" --cluster "$c" --output "$scratch/p.h5" || finish

for choice in no yes auto; do
    passes 1 plan --profile "$scratch/p.h5" --input "$model" --microbatches 8 --loops 1 --split-backward $choice --json --output "$scratch/$choice.h5" &&
        cp "$scratch/out" "$scratch/$choice"
done
check "a split shortens the simulated step" less "$(number "$scratch/yes" simulated_s)" "$(number "$scratch/no" simulated_s)"
check "auto takes the shorter one" [ "$(number "$scratch/auto" simulated_s)" = "$(python3 -c 'print(min(map(float, __import__("sys").argv[1:])))' \
    "$(number "$scratch/yes" simulated_s)" "$(number "$scratch/no" simulated_s)")" ]
check "the split plan says so" [ "$(number "$scratch/yes" split_backward)" = True ]
grep -q split_backward "$scratch/no" && fail "a plan that is not split says so"
passes 1 simulate --plan "$scratch/yes.h5" --json
path_adds_up "$scratch/out"
check "the file simulates as planned" [ "$(number "$scratch/out" simulated_s)" = "$(number "$scratch/yes" simulated_s)" ]
passes 1 simulate --plan "$scratch/yes.h5" --profile "$scratch/p.h5" --split-backward no --json
check "and as before without the split" less "$(number "$scratch/yes" simulated_s)" "$(number "$scratch/out" simulated_s)"
passes 1 plan --profile "$scratch/p.h5" --microbatches 8 --split-backward yes
grep -q 'split backward' "$scratch/out" && grep -q 'microbatches that may wait' "$scratch/out" || fail "text: $(cat "$scratch/out")"

# ---- refusals ----
refuses 2 'split-backward' 1 plan --profile "$scratch/p.h5" --strategy megatron --split-backward yes
passes 1 plan --profile "$scratch/p.h5" --microbatches 8 --explain --split-backward yes
grep -q 'split backward' "$scratch/out" && grep -q '^rivals' "$scratch/out" || fail "explained: $(head -n 20 "$scratch/out")"
refuses 2 'split-backward' 1 plan --profile "$scratch/p.h5" --compare --split-backward auto
refuses 2 'split-backward' 1 simulate --plan "$scratch/no.h5" --split-backward yes
refuses 2 'split-backward' 1 plan --profile "$scratch/p.h5" --split-backward maybe
cp "$scratch/p.h5" "$scratch/old.h5"
/usr/bin/python3 - "$scratch/old.h5" <<'P' || { echo "needs python3-h5py"; exit 77; }
import sys, h5py
with h5py.File(sys.argv[1], "r+") as f:
    for c in ("cluster_0", "cluster_1"):
        for table in ("weight_time", "split_parameter_bytes", "weight_slot_bytes"):
            del f[c][table]
P
refuses 3 'no weight_time' 1 plan --profile "$scratch/old.h5" --microbatches 8 --split-backward yes
refuses 3 'no weight_time' 1 plan --profile "$scratch/old.h5" --microbatches 8 --split-backward yes --stages "$(python3 - "$scratch/no" <<'P'
import json, sys
print(",".join("%d-%d@%s:%dx%d" % (*s["layers"], s["subcluster"], s["nodes"], s["devices_per_node"]) for s in json.load(open(sys.argv[1]))["stages"]))
P
)"
passes 1 plan --profile "$scratch/old.h5" --microbatches 8 --loops 1 --split-backward auto --json
check "an earlier profile gives the plan without a split" [ "$(number "$scratch/out" simulated_s)" = "$(number "$scratch/no" simulated_s)" ]
# Memory for the launches of the plan, but not for what split programs keep for them.
cp "$scratch/p.h5" "$scratch/tight.h5"
/usr/bin/python3 - "$scratch/tight.h5" <<'P'
import sys, h5py
with h5py.File(sys.argv[1], "r+") as f:
    for c in ("cluster_0", "cluster_1"):
        f[c]["weight_slot_bytes"][...] = 41e9
P
refuses 4 '' 1 plan --profile "$scratch/tight.h5" --microbatches 8 --split-backward yes
passes 1 plan --profile "$scratch/tight.h5" --microbatches 8 --loops 1 --split-backward auto --json
check "what does not fit is not split" [ "$(number "$scratch/out" simulated_s)" = "$(number "$scratch/no" simulated_s)" ]
finish
