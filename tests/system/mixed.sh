#!/usr/bin/env bash
# Mixed stages from profile to training: --mixed measured and predicted, forced and searched plans, resuming, refusals.
# Runs beside others
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
reference=tests/data/gpt-small.h5

cat >"$scratch/c.json" <<'JSON'
{ "format": "hapt-cluster", "version": 1,
  "subclusters": [
    { "name": "fast", "nodes": 1, "devices_per_node": 1, "device": "cpu", "slowdown": 1.5, "memory": "300 MB" },
    { "name": "slow", "nodes": 1, "devices_per_node": 2, "device": "cpu", "slowdown": 3, "memory": "200 MB" } ],
  "links": [ { "between": ["fast", "slow"], "bandwidth": "1 GB/s", "latency": "10 us" } ] }
JSON
sed 's/1 GB/1 kB/' "$scratch/c.json" >"$scratch/far.json"
model() { # ROWS
    "$HAPT" model gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch "$1" --dtype fp32 \
        --tied-embeddings yes --weights $reference --output "$scratch/m$1.h5" >/dev/null || exit 1
}
profile() { # RANKS OUTPUT OPTIONS...
    passes "$1" profile --input "$scratch/m8.h5" --layers-per-model 4 --output "$scratch/$2" --threads 1 --profile-seconds 4 \
        --microbatches 1 "${@:3}"
}
groups() { h5dump -n "$scratch/$1" | grep -c ' */mixed_[0-9]*$'; }
ratios() { h5dump -a "/mixed_$2/ratios" "$scratch/$1" | sed -n 's/.*(0): //p'; }
check() { # WHAT CONDITION...
    checks=$((checks + 1))
    "${@:2}" || fail "$1: ${*:2}"
}

model 8
model 2
profile 1 no.h5 --cluster "$scratch/c.json" --predict
check "no mixed stages unless asked for" [ "$(groups no.h5)" -eq 0 ]
profile 1 even.h5 --cluster "$scratch/c.json" --predict --mixed yes --mixed-rows even
check "1+2 devices cannot share 8 rows evenly, but 1+1 can" grep -q '^0.5, 0.5$' <(ratios even.h5 0; ratios even.h5 1)
profile 1 proportional.h5 --cluster "$scratch/c.json" --predict --mixed yes --mixed-rows proportional
check "half the rows to the device of twice the speed" [ "$(ratios proportional.h5 0)" = "0.5, 0.25, 0.25" ]
profile 1 auto.h5 --cluster "$scratch/c.json" --predict --mixed auto
check "a fast link pays" [ "$(groups auto.h5)" -ge 1 ]
profile 1 far.h5 --cluster "$scratch/far.json" --predict --mixed auto
check "a slow link does not" [ "$(groups far.h5)" -eq 0 ]
profile 3 measured.h5 --cluster "$scratch/c.json" --mixed yes
check "measured: 1+2 and 1+1 devices" [ "$(groups measured.h5)" -eq 2 ]
check "the summary lists both" [ "$(grep -c '^ *fast:1+slow:[12] *mixed  *[1-9]' "$scratch/out")" -eq 2 ]
refuses 2 "mixed" 1 profile --input "$scratch/m8.h5" --output "$scratch/x.h5" --mixed perhaps

layers=$(h5dump -H -d /boundary_bytes "$scratch/measured.h5" | sed -n 's/.*SIMPLE *{ *( *\([0-9]*\).*/\1/p')
plan() { # PROFILE STAGES OUTPUT
    passes 1 plan --profile "$scratch/$1" --microbatches 1 --stages "$2" --output "$scratch/$3"
}
train() { # NAME PLAN OPTIONS...
    passes 3 train --input "$scratch/m8.h5" --cluster "$scratch/c.json" --data $reference --threads 1 --layers-per-model 4 \
        --learning-rate 1e-3 --lr-schedule constant --clip-norm 0 --beta2 0.95 --steps 20 --replica-check 1 --output "$scratch/$1" \
        ${2:+--plan "$scratch/$2"} --json "${@:3}"
    cp "$scratch/out" "$scratch/$1.json"
}
losses() { grep -o '"loss": \[[^]]*\]' "$scratch/$1.json"; }
# farthest LOSSES: the largest relative distance from PyTorch's fp64 losses is below 1e-5
close() {
    /usr/bin/python3 - "$scratch/$1.json" $reference <<'PY'
import h5py, json, sys
loss = json.load(open(sys.argv[1]))["train"]["loss"]
want = h5py.File(sys.argv[2])["loss_fp64"][:len(loss)]
sys.exit(not (len(loss) == 20 and max(abs(a - b) / b for a, b in zip(loss, want)) < 1e-5))
PY
}
plan measured.h5 "0-$layers@fast:1+slow:2" all.h5
plan proportional.h5 "0-$layers@fast:1+slow:1" two.h5
plan measured.h5 "0-2@fast:1+slow:1,2-$layers@slow:1x1" behind.h5
for name in all two behind; do
    train $name $name.h5
    check "$name: PyTorch's losses" close $name
done
train half all.h5 --stop-after 7
train half "" --resume
check "resuming gives the same bits" [ "$(losses half)" = "$(losses all)" ]
passes 1 plan --profile "$scratch/measured.h5" --microbatches 1 --output "$scratch/best.h5"
train best best.h5
check "the searched plan: PyTorch's losses" close best

# Two rows on three devices: no rows by ratio, but a program (predicted, so that no time matters)
passes 1 profile --input "$scratch/m2.h5" --layers-per-model 4 --cluster "$scratch/c.json" --predict --mixed yes --program synthesised \
    --microbatches 4 --output "$scratch/synthesised.h5"
passes 1 plan --profile "$scratch/synthesised.h5" --microbatches 4 --stages "0-$layers@fast:1+slow:2" --output "$scratch/program.h5" --json
check "the plan's stage runs a synthesised program" grep -q '"program": "synthesised fast:1+slow:2' "$scratch/out"
passes 3 train --input "$scratch/m2.h5" --cluster "$scratch/c.json" --data $reference --threads 1 --layers-per-model 4 --learning-rate 1e-3 \
    --lr-schedule constant --clip-norm 0 --beta2 0.95 --steps 20 --output "$scratch/program" --plan "$scratch/program.h5" --json
cp "$scratch/out" "$scratch/program.json"
check "a synthesised program: PyTorch's losses" close program
# Devices so slow that a program gives them only replicated work: a share of 0 is read back, planned and trained
sed 's/"slowdown": 3/"slowdown": 30/' "$scratch/c.json" >"$scratch/slow.json"
passes 1 profile --input "$scratch/m8.h5" --layers-per-model 4 --cluster "$scratch/slow.json" --predict --mixed yes --program synthesised \
    --microbatches 4 --output "$scratch/none.h5"
check "a device that much slower gets no share" grep -qE '\b0(,|$)' <(ratios none.h5 0)
plan none.h5 "0-$layers@fast:1+slow:2" none-plan.h5
train none none-plan.h5
check "devices without a share: PyTorch's losses" close none
# Measured with programs: whatever is found, a plan on all devices can train
profile 3 programs.h5 --cluster "$scratch/c.json" --mixed yes --program all
plan programs.h5 "0-$layers@fast:1+slow:2" found.h5
train found found.h5
check "measured with programs: PyTorch's losses" close found

# A share below half a row
/usr/bin/python3 - "$scratch/two.h5" "$scratch/small.h5" <<'PY' || exit 1
import h5py, shutil, sys
shutil.copy(sys.argv[1], sys.argv[2])
with h5py.File(sys.argv[2], "r+") as file:
    found = []
    file.visit(lambda name: found.append(name) if name.endswith("mixed_ratio") else None)
    file[found[0]][...] = [0.97, 0.03]
PY
refuses 3 "share of 0.03, less than half of one of 8 rows" 3 train --input "$scratch/m8.h5" --cluster "$scratch/c.json" \
    --data $reference --layers-per-model 4 --plan "$scratch/small.h5" --output "$scratch/small"
finish
