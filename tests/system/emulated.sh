#!/usr/bin/env bash
# --device emulated: plans for GPUs are rehearsed on modelled devices. Compares schedules with the simulator; memory, resuming, messages.
# HAPT_LONG=1: GPT-39B on 64 of them, as `bench/run emulated` does.
. "$(dirname "$0")/lib.sh.inc"

rehearsed_gpus 4 "20 Gbit/s" "50 us"
model=$scratch/m.h5 plan=$scratch/plan.h5 c=$scratch/c.json
passes 1 model gpt --layers 8 --hidden 1024 --heads 16 --sequence 1024 --vocab 8000 --microbatch 8 --dtype bf16 --tied-embeddings yes --output "$model" || finish
passes 1 plan --input "$model" --cluster "$c" --microbatches 16 --stages "0-8@v100:1x4t2,8-17@a100:1x2,17-26@a100:1x2t2" --output "$plan" || finish
passes 1 plan --input "$model" --cluster "$c" --microbatches 16 --offload optimizer --update-on host --stages "0-8@v100:1x4t2,8-17@a100:1x2,17-26@a100:1x2t2" \
    --output "$scratch/away.h5" || finish
# Gradients on the host
cat >"$scratch/one.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1, "subclusters": [
    { "name": "a100", "nodes": 1, "devices_per_node": 1, "device": "A100-40GB" } ], "links": [] }
JSON
passes 1 plan --input "$model" --cluster "$scratch/one.json" --microbatches 2 --offload gradients --output "$scratch/gradients.h5" || finish
check "gradients are on the host" grep -q 'gradients on the hosts' "$scratch/out"
passes 1 train --input "$model" --cluster "$scratch/one.json" --plan "$scratch/gradients.h5" --device emulated --steps 2 --output "$scratch/gradients"
rehearse() { # OUTPUT OPTIONS...
    [ "$1" = away ] && local plan=$scratch/away.h5
    passes 8 train --input "$model" --cluster "$c" --plan "$plan" --device emulated --overwrite --output "$scratch/$1" "${@:2}"
}

# The plan's schedule and another one, and updates on the hosts: never faster than simulated, and in a quiet moment of several
# runs as fast. Busy times are modelled, so they are always exact.
compare() { python3 tests/system/emulated.py "$@" >"$scratch/said" 2>&1; }
for schedule in h1f1b 1f1b; do
    passes 1 simulate --plan "$plan" --schedule $schedule --json && cp "$scratch/out" "$scratch/$schedule.simulated"
done
passes 1 simulate --plan "$scratch/away.h5" --json && cp "$scratch/out" "$scratch/away.simulated"
for case in h1f1b 1f1b away; do path_adds_up "$scratch/$case.simulated"; done
for attempt in 1 2 3 4 5 6; do
    for schedule in h1f1b 1f1b; do
        rehearse $schedule --schedule $schedule --steps 2 --time-scale 6 --trace 1 --json && cp "$scratch/out" "$scratch/$schedule.$attempt"
    done
    rehearse away --steps 8 --time-scale 3 --trace 1 --json && cp "$scratch/out" "$scratch/away.$attempt"
    compare "$scratch/h1f1b" "$scratch/1f1b" "$scratch/away" && break
done
checks=$((checks + 1))
compare "$scratch/h1f1b" "$scratch/1f1b" "$scratch/away" || fail "$(cat "$scratch/said")"

# Values that are not computed are not reported in any form.
checks=$((checks + 1))
grep -q '"loss": null' "$scratch/h1f1b.1" && grep -q '"rehearsal": {"time_scale": 6' "$scratch/h1f1b.1" || fail "JSON: $(head -c 400 "$scratch/h1f1b.1")"
passes 1 report --input "$scratch/h1f1b/run.h5" --timeline "$scratch/t.json"
grep -q 'there is no loss' "$scratch/out" && ! grep -qi 'nan' "$scratch/out" || fail "report: $(cat "$scratch/out")"
h5dump -n "$scratch/h1f1b/run.h5" | grep -q '/train/loss' && fail "a loss in the run file"
checks=$((checks + 1))
python3 tests/system/emulated.py trace "$scratch/t.json" 3 16 "$scratch/h1f1b.simulated" >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"

# After resuming in the middle, with the same or another schedule, the sample of the weights continues bit by bit. Only a rehearsal can be
# resumed.
quick="--time-scale 0.02"
rehearse whole --steps 5 $quick
rehearse parts --steps 5 --stop-after 2 $quick
on 8 train --input "$model" --cluster "$c" --device emulated --output "$scratch/parts" --steps 5 --resume $quick >"$scratch/out" 2>"$scratch/err" ||
    fail "resuming: $(tail -n 3 "$scratch/err")"
for shard in 0 1 2; do
    checks=$((checks + 1))
    h5diff "$scratch"/{whole,parts}/checkpoints/step-00000005/shard-000$shard.h5 >"$scratch/said" || fail "shard $shard: $(head -n 3 "$scratch/said")"
    h5diff "$scratch"/parts/checkpoints/step-0000000{2,5}/shard-000$shard.h5 /parameters /parameters >/dev/null && fail "shard $shard learned nothing in 3 steps"
done
refuses 3 'checkpoint .* was written with --device emulated' 8 train --input "$model" --cluster "$c" --output "$scratch/parts" --steps 6 --resume
sed 's/, "hosts": \["not-here"\]//' "$c" >"$scratch/here.json"
refuses 2 'time-scale needs modelled devices' 8 train --input "$model" --cluster "$scratch/here.json" --plan "$plan" --device cpu --precision fp32 --time-scale 2 --output "$scratch/none" \
    --steps 1
refuses 3 'written with --device emulated' 1 export --checkpoint "$scratch/parts" --output "$scratch/w.h5"

# Trained weights are never replaced by samples.
mkdir -p "$scratch/real/checkpoints/step-00000003"
refuses 2 'checkpoints of real training' 8 train --input "$model" --cluster "$c" --plan "$plan" --device emulated --steps 1 --overwrite --output "$scratch/real"

# A plan that needs more memory than the devices have; and devices too small for any plan.
sed 's/"A100-40GB"/"A100-40GB", "memory": "500 MB"/' "$c" >"$scratch/small.json"
refuses 5 'do not fit the emulated device' 8 train --input "$model" --cluster "$scratch/small.json" --plan "$plan" --device emulated --steps 1 \
    --output "$scratch/none"
sed 's/"device": "[^"]*"/&, "memory": "50 MB"/' "$c" >"$scratch/tiny.json"
refuses 4 '' 8 --input "$model" --cluster "$scratch/tiny.json" --device emulated --microbatches 16 --output "$scratch/none"
refuses 3 'no rank runs on host not-here' 8 train --input "$model" --cluster "$c" --plan "$plan" --steps 1 --output "$scratch/none"

# The whole job with planning; and the messages that name this back end.
passes 8 --input "$model" --cluster "$c" --device emulated --microbatches 16 --steps 2 $quick --output "$scratch/job"
grep -q '^Rehearsal' "$scratch/out" || fail "the job: $(tail -n 5 "$scratch/out")"
for command in doctor topology; do
    passes 1 $command
    grep -q 'emulated' "$scratch/out" || fail "hapt $command names no emulated back end"
done

if [ -n "${HAPT_LONG:-}" ] && [ "${HAPT_LONG}" != 0 ]; then
    checks=$((checks + 1))
    HAPT_BENCH_PAIRS=1 bench/run emulated >"$scratch/said" 2>&1 || fail "GPT-39B: $(tail -n 5 "$scratch/said")"
    cat "$scratch/said"
fi
finish
