#!/usr/bin/env bash
# The whole job on four ranks in two unequal subclusters: tables, files, prediction, report, resume.
# Runs beside others
unset GOMP_SPINCOUNT
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

head -c 40000 README.md >"$scratch/text.txt"
passes 1 data "$scratch/text.txt" --output "$scratch/tokens.h5"
passes 1 model gpt --layers 4 --hidden 64 --heads 2 --sequence 32 --vocab 256 --microbatch 2 --data "$scratch/tokens.h5" \
    --microbatches 4 --learning-rate 3e-3 --output "$scratch/m.h5"
job="--input $scratch/m.h5 --cluster inputs/two-subclusters.json --profile-seconds 3"
passes 4 $job --steps 30 --output "$scratch/run" && {
    for word in subcluster layers stage memory 'step time' 'predicted' 'loss'; do
        grep -qi "$word" "$scratch/out" || fail "no $word in the job's output"
    done
    for name in /topology /layers /profile /plan /train/loss /train/step_time /train/tokens_per_second; do
        h5dump -n "$scratch/run/run.h5" | grep -q "$name" || fail "no $name in run.h5"
    done
    /usr/bin/python3 - "$scratch/run/run.h5" <<'P' || fail "the content of run.h5"
import sys, h5py
f = h5py.File(sys.argv[1], "r")
loss = f["/train/loss"][...]
assert f.attrs["format"] in ("hapt-run", b"hapt-run")
assert len(loss) == 30 and loss[0] > 4.5 and loss[-5:].mean() < loss[:5].mean() - 0.5, loss
assert (f["/train/step_time"][...] > 0).all()
def units(name, item):
    if isinstance(item, h5py.Dataset) and item.dtype.kind in "fiu" and name.startswith(("train", "plan", "profile")):
        assert "units" in item.attrs, name
f.visititems(units)
P
}
passes 1 report --input "$scratch/run/run.h5" && grep -q 'predicted' "$scratch/out" || fail "report"
passes 1 report --input "$scratch/run/run.h5" --json && /usr/bin/python3 -c '
import json, sys
report = json.load(open(sys.argv[1]))
assert report["train"]["steps"] == 30 and report["plan"]["format"] == "hapt-plan"
for stage in report["train"]["stages"]:
    assert stage["planned_bytes"] == stage["measured_bytes"], stage' "$scratch/out" || fail "the report's JSON"
passes 4 $job --steps 34 --output "$scratch/run" --resume && grep -q '34' "$scratch/out" || fail "resume"
passes 4 $job --steps 3 --output "$scratch/run2" --json && /usr/bin/python3 -c '
import json, sys
assert json.load(open(sys.argv[1]))["train"]["steps"] == 3' "$scratch/out" || fail "the job's JSON"
finish
