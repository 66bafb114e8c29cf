#!/usr/bin/env bash
# Options without an effect are refused. A cluster whose devices are absent is planned on paper. Output that cannot be written is a failure.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

m=$scratch/m.h5
passes 1 model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --microbatch 2 --output "$m"
cat >"$scratch/gpus.json" <<'J'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [ { "name": "a", "nodes": 1, "devices_per_node": 1, "device": "A100-40GB" },
                   { "name": "v", "nodes": 1, "devices_per_node": 1, "device": "V100-16GB" } ] }
J
# Equal numbers of ranks and devices do not turn CPUs into GPUs.
for ranks in 1 2 3; do
    passes $ranks plan --input "$m" --cluster "$scratch/gpus.json" --json && /usr/bin/python3 -c '
import json, sys
assert json.load(open(sys.argv[1]))["format"] == "hapt-plan"' "$scratch/out" || fail "a plan on $ranks ranks"
done
passes 2 profile --input "$m" --cluster "$scratch/gpus.json" --output "$scratch/p.h5"
passes 2 topology --cluster "$scratch/gpus.json" && grep -q 'on paper' "$scratch/err" || fail "not on paper"
sed 's/"device": "A100-40GB"/"device": "cpu", "hosts": ["elsewhere"]/; s/"device": "V100-16GB"/"device": "cpu"/' "$scratch/gpus.json" \
    >"$scratch/elsewhere.json"
refuses 3 'elsewhere' 2 plan --input "$m" --cluster "$scratch/elsewhere.json"
for ranks in 1 2; do passes $ranks plan --input "$m" --cluster "$scratch/elsewhere.json" --predict; done
refuses 3 'cuda' 2 --input "$m" --cluster "$scratch/gpus.json" --steps 1 --output "$scratch/run"

# Optimizer state is part of the memory: SGD plans need less than AdamW's.
memory() {
    passes 1 plan --objective formula --input "$m" --cluster "$scratch/gpus.json" --json "$@" && /usr/bin/python3 -c '
import json, sys
print(int(json.load(open(sys.argv[1]))["stages"][0]["memory_bytes"]))' "$scratch/out"
}
adamw=$(memory) plain=$(memory --optimizer sgd) momentum=$(memory --optimizer sgd --momentum 0.9)
[ "$plain" -lt "$momentum" ] && [ "$momentum" -lt "$adamw" ] || fail "memory: $plain, $momentum, $adamw bytes"

for option in "--imbalance 2" "--profile-seconds 3" "--predict" "--optimizer sgd" "--momentum 0.5" "--threads 2" \
    "--layers-per-model 3" "--heavy-minimum 3"; do
    refuses 2 "error: ${option%% *} has no effect" 1 plan --profile "$scratch/p.h5" $option
done
passes 1 plan --profile "$scratch/p.h5" --input "$m" --threads 2 --output "$scratch/plan.h5"
for option in "--imbalance 2" "--profile-seconds 3" "--predict"; do
    refuses 2 "error: ${option%% *} has no effect" 1 --input "$m" --profile "$scratch/p.h5" $option
done
for option in "--strategy even" "--stages 0-1@a:1x1" "--hide-threshold 0.1" "--use-all-devices" "--predict"; do
    refuses 2 "error: ${option%% *} has no effect" 1 --input "$m" --plan "$scratch/plan.h5" $option
done
refuses 2 'replan has no effect' 2 --input "$m" --replan
refuses 2 'strategy' 1 --input "$m" --strategy even --stages 0-1@a:1x1
refuses 2 'unknown option --strategy of hapt profile' 1 profile --input "$m" --output "$scratch/q.h5" --strategy even

# If the output cannot be printed, the command fails.
for command in --help --version doctor topology "plan --profile $scratch/p.h5" "plan --profile $scratch/p.h5 --json"; do
    checks=$((checks + 1))
    "$HAPT" $command >/dev/full 2>"$scratch/err"
    code=$?
    [ $code -eq 6 ] && grep -q '^hapt: error: standard output' "$scratch/err" || fail "hapt $command on a full disk: code $code"
done

# JSON stays valid for any names.
sed 's/"name": "v"/"name": "a\\"v\\""/' "$scratch/gpus.json" >"$scratch/quotes.json"
passes 1 profile --input "$m" --cluster "$scratch/quotes.json" --output "$scratch/\"p\".h5" --json && /usr/bin/python3 -c '
import json, sys
summary = json.load(open(sys.argv[1]))
assert [s["name"] for s in summary["subclusters"]] == ["a", chr(97) + "\"v\""], summary
assert summary["output"].endswith("\"p\".h5")
assert summary["subclusters"][0]["submeshes"][0]["candidates"] > 0' "$scratch/out" || fail "the profile's JSON"
"$HAPT" model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --schedule 1f1b --output "$scratch/plain.h5" >/dev/null 2>&1
refuses 2 'hide-threshold has no effect' 1 plan --input "$scratch/plain.h5" --cluster inputs/clusters/a100x1-v100x1.json --hide-threshold 0.1
finish
