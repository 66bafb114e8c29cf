#!/usr/bin/env bash
# --recompute: a model that fits no devices otherwise is planned and trained; losses and weights are the bits of a run that keeps all
# activations; the memory is what was planned; checkpoints of either resume the other; bad choices and damaged plans are refused.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

two_devices wide "300 MB"
two_devices tight "3.5 MB"
two_devices middling "3.6 MB" # still too little without recomputation, whatever the times are
"$HAPT" data LICENSE --output "$scratch/t.h5" >/dev/null || exit 1
model() { "$HAPT" model "$1" --sequence 64 --vocab 256 --microbatch 4 --data "$scratch/t.h5" --output "$scratch/$1.h5" "${@:2}" >/dev/null || exit 1; }
model gpt --layers 6 --hidden 32 --heads 4

# plan NAME CLUSTER OPTIONS...
plan() { passes 1 plan --input "$scratch/$model.h5" --cluster "$scratch/$2.json" --predict --microbatches 4 --offload no --json --output "$scratch/$1.h5" "${@:3}"; }
# train NAME CLUSTER OPTIONS...: 6 steps with the plan
train() {
    passes 2 train --input "$scratch/$model.h5" --cluster "$scratch/$2.json" --plan "$scratch/$1.h5" --threads 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:3}"
}
recomputes() { grep -q '"recomputed_units": [1-9]' "$scratch/out"; }
same() { same_runs "$scratch/run-$1" "$scratch/run-$2"; }

model=gpt
plan keep wide --recompute no
check "with enough memory nothing recomputes" bash -c "! grep -q recomputed_units '$scratch/out'"
train keep wide
for little in tight middling; do
    refuses 4 'no plan fits into memory' 1 plan --input "$scratch/gpt.h5" --cluster "$scratch/$little.json" --predict --microbatches 4 --recompute no --offload no
done
plan auto tight
check "auto recomputes what memory asks for" recomputes
train auto tight
same keep auto

# --explain: the figures beside the profile's own rows.
passes 1 profile --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --predict --microbatches 4 --offload no --output "$scratch/predicted.h5"
plan why tight --explain
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/out" "$scratch/predicted.h5" <<'PY' || fail "--explain of stages that recompute"
import json, math, sys
import h5py
plan = json.load(open(sys.argv[1]))
told = {entry["stage"]: entry for entry in plan["explain"]["recomputing"]}
assert told.keys() == {s for s, stage in enumerate(plan["stages"]) if stage.get("recomputed_units")} and told
with h5py.File(sys.argv[2]) as file:
    for s, entry in told.items():
        stage = plan["stages"][s]
        table = file["cluster_%d" % (stage["subcluster"] == "b")]
        cell, row = (stage["layers"][0], stage["layers"][1] - 1), list(table["recompute"]).index(0)
        kept = {name: table[name][(row, *cell)] for name in ("stage_time", "step_time", "parameter_bytes", "activation_bytes")}
        needed = kept["parameter_bytes"] + stage["warmup"] * kept["activation_bytes"]
        if not math.isfinite(kept["stage_time"]):
            assert entry["more_s"] is None and entry["kept_memory_bytes"] is None
            continue
        now_s = stage["compute_s"] - kept["step_time"] / 4
        assert math.isclose(entry["more_s"], now_s - kept["stage_time"], rel_tol=1e-6), (entry, now_s, kept)
        assert math.isclose(entry["kept_memory_bytes"], needed, rel_tol=1e-9) and needed > 3.5e6, (entry, needed)
PY
two="0-13@a:1x1,13-26@b:1x1" four="0-5@a:1x1,5-13@b:1x1,13-17@a:1x1,17-26@b:1x1" # at blocks
for choice in "all --stages $two" "every=2 --stages $two" "all --split-backward yes --stages $two" "all --schedule gpipe --stages $two" \
    "all --schedule interleaved --stages $four" "selective --stages $two" "selective --split-backward yes --stages $two" \
    "selective --schedule interleaved --stages $four"; do
    name=${choice//[^a-z0-9]/-}
    plan "$name" wide --recompute $choice
    check "$choice recomputes" recomputes
    train "$name" wide
    same keep "$name"
done

# The one command measures, plans and trains what fits no device otherwise. Profiles of the same measurement hold both kinds of rows.
measured() { passes 2 "$@" --microbatches 4 --offload no --threads 1 --profile-seconds 2; }
measured --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --steps 6 --checkpoint-every 3 --output "$scratch/run-one"
check "the measured job recomputes" grep -q 'blocks that recompute' "$scratch/out"
same keep one
measured profile --input "$scratch/gpt.h5" --cluster "$scratch/middling.json" --output "$scratch/measured.h5"
measured profile --input "$scratch/gpt.h5" --cluster "$scratch/wide.json" --output "$scratch/roomy.h5"
checks=$((checks + 1))
/usr/bin/python3 - "$scratch/measured.h5" "$scratch/roomy.h5" <<'PY' || fail "rows of measured profiles"
import sys
import h5py, numpy
with h5py.File(sys.argv[2]) as roomy:
    assert "recompute" not in roomy["cluster_0"] # nothing lacks memory
with h5py.File(sys.argv[1]) as file:
    table = file["cluster_0"]
    share, time, forward, memory = (table[name][()] for name in ("recompute", "stage_time", "stage_forward_time", "activation_bytes"))
kept, rows = list(share).index(0), [row for row in range(len(share)) if share[row] > 0]
assert len(rows) > 1, share
compared = 0 # the times decide which shares recompute; all ranges of one may fit no other way
for row in rows:
    both = numpy.isfinite(time[kept]) & numpy.isfinite(time[row])
    compared += both.any()
    more = (time[row] - time[kept])[both]
    # The repeated part is some of the forward pass; a share without units has no row of that range.
    assert (more > 0).all() and (more < forward[row][both]).all(), more
    assert (memory[row][both] < memory[kept][both]).all()
    assert numpy.isfinite(time[row]).sum() > both.sum() # some ranges fit only so
assert compared > 1, compared
PY

# Checkpoints of a run that recomputes resume one that does not, and the other way round, by the one command.
job() { # NAME CLUSTER OPTIONS...
    passes 2 --input "$scratch/gpt.h5" --cluster "$scratch/$2.json" --predict --microbatches 4 --offload no --threads 1 --steps 6 --checkpoint-every 3 \
        --output "$scratch/run-$1" "${@:3}"
}
job there tight --stop-after 3
check "the job recomputes" grep -q 'blocks that recompute' "$scratch/out"
job there wide --resume --replan
check "the resumed job does not" bash -c "! grep -q 'blocks that recompute' '$scratch/out'"
same keep there
job kept tight --stop-after 3
job kept tight --resume # by the checkpoint's plan
same keep kept
job back wide --recompute no --stop-after 3
job back tight --resume --replan
check "the resumed job recomputes" grep -q 'blocks that recompute' "$scratch/out"
same keep back

# Bad choices, and plans with units that are not the stage's.
refuses 2 'recompute some' 1 plan --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --predict --recompute some
refuses 2 'recompute every=0' 1 plan --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --predict --recompute every=0
refuses 2 'program synthesised' 1 plan --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --predict --recompute all --program synthesised
refuses 3 'layers 0-6 cannot be a stage' 1 plan --input "$scratch/gpt.h5" --cluster "$scratch/wide.json" --predict --recompute all --stages "0-6@a:1x1,6-26@b:1x1"
for change in "0,2,100000" "0,2,-1" "7,2,0" "0,1,-3" "0,3,2"; do
    [[ $change == *,3,* ]] && good=selective---stages-0-13-a-1x1-13-26-b-1x1 || good=auto
    cp "$scratch/$good.h5" "$scratch/bad.h5"
    /usr/bin/python3 - "$scratch/bad.h5" "$change" <<'PY'
import sys
import h5py
row, column, value = map(int, sys.argv[2].split(","))
with h5py.File(sys.argv[1], "r+") as file:
    data = file["/recomputed_unit"]
    data[0, column] = value
    if row:
        data[0, 0] = row
PY
    refuses 3 'bad.h5|recompute' 2 train --input "$scratch/gpt.h5" --cluster "$scratch/tight.json" --plan "$scratch/bad.h5" --steps 1 --output "$scratch/none"
done
finish
