#!/usr/bin/env bash
# `hapt doctor` and `hapt spmd` name the solver of linear programs, in this build, and in one without PETSc/TAO (HAPT_LONG=1). Both builds
# find ratios of the same cost.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
cat >"$scratch/c.json" <<'JSON'
{"format": "hapt-cluster", "version": 1, "subclusters": [
 {"name": "fast", "nodes": 1, "devices_per_node": 2, "intra_node_bandwidth": "1 GB/s",
  "device": {"name": "fast", "peak_flops": "9 TFLOP/s", "memory": "16 GB", "memory_bandwidth": "1 TB/s"}},
 {"name": "slow", "nodes": 1, "devices_per_node": 2, "intra_node_bandwidth": "1 GB/s",
  "device": {"name": "slow", "peak_flops": "3 TFLOP/s", "memory": "16 GB", "memory_bandwidth": "1 TB/s"}}],
 "links": [{"between": ["fast", "slow"], "bandwidth": "1 GB/s", "latency": "1 us"}]}
JSON
passes 1 model gpt --layers 2 --hidden 128 --heads 4 --sequence 64 --vocab 256 --microbatch 64 --output "$scratch/m.h5"

# answers EXECUTABLE SOLVER OTHERS: SOLVER answers the large program of doctor; SOLVER or one of OTHERS those of spmd, which are small. Sets
# $cost to the step that spmd finds.
answers() {
    "$1" doctor >"$scratch/doctor" 2>/dev/null
    check "doctor names $2: $(grep -A 2 ^solvers "$scratch/doctor")" grep -qE "^  used +$2 solved an assignment" "$scratch/doctor"
    "$1" spmd --input "$scratch/m.h5" --cluster "$scratch/c.json" --json >"$scratch/out" 2>"$scratch/err" || fail "spmd: $(cat "$scratch/err")"
    cost=$(/usr/bin/python3 - "$scratch/out" "$2" $3 <<'P'
import json, sys
found = json.load(open(sys.argv[1]))
solvers = {turn["solver"] for turn in found["turns"]}
sys.exit("spmd names %s" % solvers) if not solvers or solvers - set(sys.argv[2:]) else print(found["step_s"])
P
    )
    check "spmd names its solvers" [ -n "$cost" ]
}
if "$HAPT" doctor 2>/dev/null | grep -qE '^  tao +PETSc'; then
    answers "$HAPT" tao pivot
else
    answers "$HAPT" pivot ""
fi
with=$cost
if [ -n "${HAPT_LONG:-}" ]; then
    mkdir "$scratch/tree" && cp -r Makefile src include "$scratch/tree"
    make -C "$scratch/tree" PETSC=0 CUDA=0 WERROR=1 build/hapt >"$scratch/made" 2>&1 || fail "PETSC=0: $(tail -n 20 "$scratch/made")"
    answers "$scratch/tree/build/hapt" pivot ""
    check "the same cost: $with and $cost" /usr/bin/python3 -c "assert abs($with / $cost - 1) < 1e-6"
fi
finish
