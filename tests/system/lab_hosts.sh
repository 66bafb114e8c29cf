#!/usr/bin/env bash
# hapt on the hosts of the lab: subclusters are found by their names, and a run over the trunk gives the bits of the same plan on this machine
# only.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
. tests/system/lab.sh.inc

# 1. Without a file: hosts with equally many ranks are a subcluster.
over a0:2,b0:1,b1:1 4 topology --json && look "subclusters that were discovered" <<'P'
import json, sys
found = {tuple(s["hosts"]): (s["nodes"], s["devices_per_node"]) for s in json.load(open(sys.argv[1]))["subclusters"]}
assert found == {("a0",): (1, 2), ("b0", "b1"): (2, 1)}, found
P

# 2. By the names in the file, for any order of the ranks.
over a0,a1,b0,b1 4 topology --cluster "$scratch/hosts.json" && { grep -Eq '^  right .* 3,2$' "$scratch/out" || fail "ranks of the hosts: $(cat "$scratch/out")"; }
sed 's/"b1"/"b7"/' "$scratch/hosts.json" >"$scratch/absent.json"
checks=$((checks + 1))
$lab run -host a0,a1,b0,b1 -np 4 "$HAPT" topology --cluster "$scratch/absent.json" >"$scratch/out" 2>"$scratch/err" && fail "an absent host is accepted"
grep -q 'error:.*b7' "$scratch/err" || fail "the missing host is not named: $(head -n 3 "$scratch/err")"

# 3. Two stages over the trunk.
far="" four="" near=""
head -c 100000 src/model/*.c >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --tied-embeddings yes --data "$scratch/tokens.h5" \
    --output "$scratch/m.h5"
passes 1 plan --input "$scratch/m.h5" --cluster inputs/two-hosts.json --predict yes --microbatches 4 --layers-per-model 6 \
    --stages "0-2@slow:1x2,2-6@fast:1x2" --output "$scratch/plan.h5"
options="--input $scratch/m.h5 --cluster inputs/two-hosts.json --plan $scratch/plan.h5 --layers-per-model 6 --threads 1 --steps 12 --json"
losses() { grep -o '"loss": \[[^]]*\]' "$scratch/out"; }
# shellcheck disable=SC2086
{
    over a0:2,b0:2 4 train $options --output "$scratch/lab-run" && far=$(losses)
    over a0,a1,b0,b1 4 train $options --output "$scratch/lab-run4" && four=$(losses)
    passes 4 train $options --output "$scratch/here" && near=$(losses)
}
checks=$((checks + 3))
[ "$(grep -o ',' <<<"$near" | wc -l)" -eq 11 ] || fail "losses of 12 steps are expected: $near"
[ "$far" = "$near" ] || fail "over the trunk: $far; here: $near"
[ "$four" = "$near" ] || fail "with every rank on a host of its own: $four; here: $near"
for run in lab-run lab-run4 here; do passes 1 export --checkpoint "$scratch/$run/checkpoints/step-00000012" --output "$scratch/$run.h5"; done
for run in lab-run lab-run4; do
    checks=$((checks + 1))
    h5diff -q "$scratch/$run.h5" "$scratch/here.h5" || fail "the weights of $run differ"
done

finish
