#!/usr/bin/env bash
# Printed tables and listings are at most 100 columns wide.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

narrow() { # OPTIONS...: prints, at most 100 columns wide
    passes 1 "$@"
    check "hapt $*: $(awk 'length > 100' "$scratch/out" | head -2)" [ -z "$(awk 'length > 100' "$scratch/out")" ]
    check "hapt $* prints" [ -s "$scratch/out" ]
}
passes 1 model gpt --layers 12 --hidden 768 --heads 12 --sequence 1024 --vocab 50257 --output "$scratch/g.h5"
cluster=inputs/clusters/a100x1-v100x1.json
paper=(plan --input "$scratch/g.h5" --cluster $cluster --layers-per-model 6)
narrow "${paper[@]}" --output "$scratch/a.h5"
narrow "${paper[@]}" --microbatches 16 --recompute all --offload optimizer --output "$scratch/b.h5"
narrow "${paper[@]}" --compare
narrow "${paper[@]}" --explain
check "--explain fits two screens: $(wc -l <"$scratch/out") lines" [ "$(wc -l <"$scratch/out")" -le 80 ]
narrow "${paper[@]}" --explain all
narrow "${paper[@]}" --what-if link=1..25Gbit/s:2,memory.v100=16..80GB:2,microbatches=8..32:2
narrow plan --diff "$scratch/a.h5" "$scratch/b.h5"
narrow simulate --plan "$scratch/b.h5"
narrow spmd --input "$scratch/g.h5" --cluster $cluster --full
narrow profile --input "$scratch/g.h5" --cluster $cluster --output "$scratch/p.h5"
narrow topology
for file in inputs/clusters/*.json; do narrow topology --cluster "$file"; done
finish
