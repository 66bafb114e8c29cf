#!/usr/bin/env bash
# Modelled devices beside the simulator: looped plans, and plans whose submeshes run several stages.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

passes 1 model gpt --layers 8 --hidden 1024 --heads 16 --sequence 1024 --vocab 8000 --microbatch 8 --dtype bf16 --output "$scratch/large.h5" || finish

# Loops: a V, which has one edge between two submeshes in each direction, and loops over a link whose transfers are short.
rehearsed_gpus 2 "200 Gbit/s" "20 us"
for case in v loop; do
    passes 1 plan --input "$scratch/large.h5" --cluster "$scratch/c.json" --microbatches 12 --schedule looped --loops 2 --placement $case --loop-batch 4 \
        --stages "0-5@v100:1x1,5-13@a100:1x1,$([ $case = v ] && echo 13-21@a100:1x1,21-26@v100:1x1 || echo 13-18@v100:1x1,18-26@a100:1x1)" \
        --output "$scratch/$case.h5" || finish
    passes 1 simulate --plan "$scratch/$case.h5" --json && cp "$scratch/out" "$scratch/$case.simulated"
    path_adds_up "$scratch/$case.simulated"
    shared=shared rehearses $case 1 4 --input "$scratch/large.h5" --cluster "$scratch/c.json" --plan "$scratch/$case.h5"
done

# Several stages of a submesh. In each direction, activations and gradients of three pairs of stages share the link of two submeshes, which is
# slow: they take turns as in the simulator.
rehearsed_gpus 2 "12 Gbit/s" "50 us"
passes 1 plan --input "$scratch/large.h5" --cluster "$scratch/c.json" --microbatches 12 \
    --stages "0-5@v100:1x1,5-13@a100:1x1,13-21@v100:1x1,21-26@a100:1x1" --output "$scratch/gpu.h5" || finish
fold "$scratch/gpu.h5" 0 1 0 1
passes 1 simulate --plan "$scratch/gpu.h5" --json && cp "$scratch/out" "$scratch/rehearsed.simulated"
shared=shared rehearses rehearsed 1 4 --input "$scratch/large.h5" --cluster "$scratch/c.json" --plan "$scratch/gpu.h5"
finish
