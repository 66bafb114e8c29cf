#!/usr/bin/env bash
# The whole job on measured profiles with every program: four ranks whose memory is too small for data parallelism. It plans and trains
# tensor-parallel and synthesised stages, and data-parallel ones with sharded optimizer state. Losses are those of one rank, and steps last
# as long as predicted. HAPT_LONG=1: less memory, with tensor-parallel and synthesised stages.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
export OMP_NUM_THREADS=1

head -c 40000 README.md >"$scratch/text"
passes 1 data "$scratch/text" --type bytes --output "$scratch/t.h5"
# Nearly all memory is weights: per layer of the plan and rank of two 46 MB data-parallel with sharded state, 35 MB tensor-parallel
passes 1 model gpt --layers 2 --hidden 512 --heads 8 --sequence 32 --vocab 256 --microbatch 4 --data "$scratch/t.h5" \
    --microbatches 4 --learning-rate 1e-3 --lr-schedule constant --output "$scratch/m.h5"
cluster() { # MEMORY: c.json. The four ranks need 3/4 of a core, so two cores are idle enough to keep time
    cat >"$scratch/c.json" <<JSON
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "fast", "nodes": 1, "devices_per_node": 2, "device": "cpu", "slowdown": 4, "memory": "$1" },
    { "name": "slow", "nodes": 1, "devices_per_node": 2, "device": "cpu", "slowdown": 8, "memory": "$1" } ],
  "links": [ { "between": ["fast", "slow"], "bandwidth": "1 GB/s", "latency": "10 us" } ] }
JSON
}
job=(--input "$scratch/m.h5" --data "$scratch/t.h5" --layers-per-model 2 --microbatches 4 --steps 8 --threads 1)
four=("${job[@]}" --cluster "$scratch/c.json" --recompute no --offload no)
passes 1 "${job[@]}" --profile-seconds 0.2 --output "$scratch/one"

# The layout of each stage: tN of N tensor-parallel devices, p of a program, d of whole operators
cat >"$scratch/look.py" <<'P'
import sys, h5py, numpy
run, one = (h5py.File(f"{path}/run.h5", "r") for path in sys.argv[1:3])
plan = run["/plan"]
degree = plan["stage_tensor_parallel"][...]
program = plan["stage_program"][...] if "stage_program" in plan else 0 * degree
print("".join("p" if k else f"t{d}" if d > 1 else "d" for d, k in zip(degree, program)))
print("%.3g" % max(abs(run["/train/loss"][...] / one["/train/loss"][...] - 1)))
step, noise = run["/train/step_time"][2:], run["/profile"].attrs["noise"]
low, middle, high = numpy.percentile(step, (25, 50, 75))
# Other work on the machine: the profile's uncertainty and the spread of the steps
print("%.4f %.4f" % (middle / plan.attrs["simulated"] - 1, noise + (high - low) / middle))
P
apart() { # A B: |A| <= 0.1 + B
    awk -v a="$1" -v b="$2" 'BEGIN { exit !(a != "" && b != "" && (a < 0 ? -a : a) <= 0.1 + b) }'
}
trains() { # NAME LAYOUTS OPTIONS...: the layouts of the plan's stages match. A machine that is disturbed for a while gets a second chance
    local name=$1 layouts=$2 off noise its losses
    shift 2
    for _ in 1 2 3; do
        passes 4 "${four[@]}" "$@" --profile-seconds 2 --overwrite --output "$scratch/$name" || return
        { read -r its && read -r losses && read -r off noise; } < <(/usr/bin/python3 "$scratch/look.py" "$scratch/$name" "$scratch/one")
        check "$name: stages $its" grep -Eqx "$layouts" <<<"$its"
        check "$name: losses apart by $losses" awk -v d="$losses" 'BEGIN { exit !(d != "" && d < 1e-5) }'
        note "$name: stages $its, losses within $losses, a step lasts $off more than predicted, noise $noise"
        apart "$off" "$noise" && break
    done
    check "$name: a step lasts $off more than predicted, noise $noise" apart "$off" "$noise"
}

if [ -n "${HAPT_LONG:-}" ]; then
    cluster "39 MB"
    refuses 4 'needs .* of device memory|no plan fits into memory' 4 "${four[@]}" --program data --profile-seconds 0.2 --output "$scratch/no"
    trains tensor '(t2)+'
    trains synthesised 'p+' --program synthesised
fi
cluster "48 MB"
trains sharded 'd+' --program data
refuses 4 'needs .* of device memory|no plan fits into memory' 4 "${four[@]}" --program data --sharded-optimizer no --profile-seconds 0.2 \
    --output "$scratch/no"
finish
