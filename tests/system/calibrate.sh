#!/usr/bin/env bash
# Calibrated prediction. Tables measured on one model predict it and another model better than the built-in ones. The time of measuring
# grows with the number of unique ranges. Files that are no tables are refused.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

model() { # NAME LAYERS HIDDEN HEADS
    passes 1 model gpt --layers "$2" --hidden "$3" --heads "$4" --sequence 64 --vocab 256 --microbatch 2 --output "$scratch/$1.h5"
}
model a 4 128 4
model b 3 192 3
model deep 8 128 4
export OMP_NUM_THREADS=1
quick="--threads 1 --profile-seconds 6"

# Twice the blocks: twice the unique ranges, and about as many timed ones. If the witnesses disagree with the composed times, all are timed.
# A noisy machine may cause that; then it is tried again.
shape() { # NAME: unique and timed of a measured profile
    passes 1 profile --input "$scratch/$1.h5" --output "$scratch/$1-measured.h5" --json $quick &&
        /usr/bin/python3 -c 'import json, sys
d = json.load(open(sys.argv[1]))
assert d["candidates"] >= d["unique"] >= d["timed"] > 0 and d["runs"] >= d["timed"] and d["seconds"] > 0, d
print(d["unique"], d["timed"])' "$scratch/out"
}
for try in 1 2 3 4; do
    read -r few few_timed < <(shape a)
    read -r many many_timed < <(shape deep)
    [ "$many_timed" -le $((few_timed + 8)) ] && break
done
checks=$((checks + 1))
[ "$many" -gt $((few * 17 / 10)) ] || fail "unique ranges: $few of 4 blocks, $many of 8"
[ "$many_timed" -le $((few_timed + 8)) ] || fail "timed ranges: $few_timed of 4 blocks, $many_timed of 8"

# Calibrate on one model; predict it and another. The machine may be shared: calibration must only not be worse than none, or be good by itself,
# in one of four tries in which everything is measured again.
compares() { # compares MODEL...: the profiles of each
    /usr/bin/python3 - "$scratch" "$@" <<'P'
import sys
import h5py
import numpy
bad = 0
for model in sys.argv[2:]:
    time = {k: h5py.File("%s/%s-%s.h5" % (sys.argv[1], model, k), "r")["/cluster_0/stage_time"][0] for k in ("measured", "default", "calibrated")}
    there = numpy.isfinite(time["measured"])
    error = {k: numpy.median(abs(time[k][there] / time["measured"][there] - 1)) for k in ("default", "calibrated")}
    print("model %s: median error %.1f %% built in, %.1f %% calibrated" % (model, 100 * error["default"], 100 * error["calibrated"]))
    bad += not (error["calibrated"] < error["default"] or error["calibrated"] < 0.25)
sys.exit(bad > 0)
P
}
calibrated=no
for try in 1 2 3 4; do
    [ $try -eq 1 ] || passes 1 profile --input "$scratch/a.h5" --output "$scratch/a-measured.h5" $quick
    passes 1 profile --input "$scratch/b.h5" --output "$scratch/b-measured.h5" $quick
    passes 1 profile --input "$scratch/a.h5" --calibrate "$scratch/e.h5" $quick
    grep -qE '^ +cpu +fp32 +product .* FLOP +[0-9]+ +[0-9.]+ % +[0-9]+ %' "$scratch/out" || fail "no table is printed"
    for m in a b; do
        passes 1 profile --input "$scratch/$m.h5" --predict yes --output "$scratch/$m-default.h5" --threads 1
        passes 1 profile --input "$scratch/$m.h5" --predict yes --efficiency "$scratch/e.h5" --output "$scratch/$m-calibrated.h5" --threads 1
        grep -q 'built-in' "$scratch/err" && fail "the table of this device is not found"
    done
    compares a b && calibrated=yes && break
done
check "calibrated predictions are not worse" [ $calibrated = yes ]
h5dump "$scratch/e.h5" >"$scratch/dump" && grep -q '"product"' "$scratch/dump" && grep -q 'operator_time' "$scratch/dump" ||
    fail "h5dump does not show the tables"
# On several ranks sums over devices are measured as well. One JSON object holds both results.
printf '{"format":"hapt-cluster","version":1,"subclusters":[{"name":"f","nodes":1,"devices_per_node":2,"device":"cpu","slowdown":2}]}' \
    >"$scratch/two.json"
passes 2 profile --input "$scratch/a.h5" --cluster "$scratch/two.json" --calibrate "$scratch/e2.h5" --output "$scratch/p2.h5" --json $quick &&
    /usr/bin/python3 - "$scratch" <<'P' || fail "the JSON of both results, or the sums"
import json, sys
import h5py
d = json.load(open(sys.argv[1] + "/out"))
rows = d["calibration"]["tables"]
assert d["format"] == "hapt-profile-summary" and {r["class"] for r in rows} == {"product", "attention", "vector", "memory"}, d
assert all(r["efficiency"] > 0 and r["samples"] > 0 for r in rows), rows
sums = h5py.File(sys.argv[1] + "/e2.h5", "r")["/device_0/all_reduce"][...]
assert sums.shape == (4, 4) and (sums > 0).all() and (sums[:, 0] == 2).all(), sums
P

# A cluster on paper uses the table of its devices' names. Missing ones are reported.
printf '{"format":"hapt-cluster","version":1,"subclusters":[{"name":"p","nodes":1,"devices_per_node":4,"device":"cpu"},
{"name":"v","nodes":1,"devices_per_node":1,"device":"V100-32GB"}]}' >"$scratch/paper.json"
passes 1 plan --input "$scratch/a.h5" --cluster "$scratch/paper.json" --efficiency "$scratch/e.h5" --json
grep -q 'no table of V100-32GB in fp32: predicted with the built-in' "$scratch/err" || fail "no message about the V100: $(cat "$scratch/err")"
grep -q 'no table of cpu' "$scratch/err" && fail "the table of cpu is not found"

# No effect, or nothing to measure: refused with the reason.
refuses 2 'efficiency has no effect: the profile is measured' 2 profile --input "$scratch/a.h5" --efficiency "$scratch/e.h5" --output "$scratch/x.h5"
refuses 2 'efficiency has no effect' 1 plan --input "$scratch/a.h5" --efficiency "$scratch/e.h5"
refuses 2 'efficiency has no effect' 1 plan --profile "$scratch/a-measured.h5" --efficiency "$scratch/e.h5"
refuses 2 'efficiency has no effect' 1 --input "$scratch/a.h5" --steps 1 --efficiency "$scratch/e.h5" --output "$scratch/run"
refuses 2 'calibrate measures the devices' 1 profile --input "$scratch/a.h5" --calibrate "$scratch/x.h5" --predict yes
refuses 2 'imbalance has no effect' 1 profile --input "$scratch/a.h5" --calibrate "$scratch/x.h5" --imbalance 3
refuses 3 'no devices to measure' 1 profile --input "$scratch/a.h5" --calibrate "$scratch/x.h5" --cluster "$scratch/paper.json"
refuses 2 'needs a file to write' 1 profile --input "$scratch/a.h5"
[ ! -e "$scratch/x.h5" ] || fail "a refused calibration left a file"
refuses 6 'proc' 1 profile --input "$scratch/a.h5" --calibrate /proc/nowhere/e.h5 --profile-seconds 1 --threads 1

# Damaged, foreign and hostile files.
/usr/bin/python3 - "$scratch" <<'P' || exit 1
import shutil, sys
import h5py
import numpy
folder = sys.argv[1]
def edit(name, change):
    path = "%s/bad-%s.h5" % (folder, name)
    shutil.copy(folder + "/e2.h5", path)
    with h5py.File(path, "r+") as f:
        change(f)
def column(name, row, value):
    def change(f):
        data = f["/device_0/" + name][...]
        del f["/device_0/" + name]
        data[row] = value
        f["/device_0/" + name] = data
    return change
def attribute(name, value):
    return lambda f: f["/device_0"].attrs.__setitem__(name, value)
def short(f):
    data = f["/device_0/size"][1:]
    del f["/device_0/size"]
    f["/device_0/size"] = data
def remove(name):
    return lambda f: f.__delitem__(name)
for name, change in {
    "negative": column("efficiency", 0, -0.5), "nan": column("efficiency", 1, numpy.nan), "zero": column("size", 0, 0),
    "order": column("size", 0, 1e30), "class": column("class", 0, b"magic"), "short": short, "missing": remove("/device_0/efficiency"),
    "group": remove("/device_0"), "rate": attribute("peak_flops", -1.0), "inf": attribute("launch", numpy.inf),
    "dtype": attribute("dtype", "fp7"), "name": attribute("name", "n" * 500), "sum": column("all_reduce", (0, 2), -1.0),
    "count": lambda f: f.attrs.__setitem__("devices", 10**12), "version": lambda f: f.attrs.__setitem__("version", 99),
    "format": lambda f: f.attrs.__setitem__("format", "hapt-profile")}.items():
    edit(name, change)
data = open(folder + "/e2.h5", "rb").read()
open(folder + "/bad-cut.h5", "wb").write(data[:len(data) // 2])
open(folder + "/bad-text.h5", "w").write("no table\n")
P
for file in "$scratch"/bad-*.h5; do
    refuses 3 "$(basename "$file")" 1 profile --input "$scratch/a.h5" --predict yes --efficiency "$file" --output "$scratch/x.h5"
done
refuses 3 'bad-nan' 3 profile --input "$scratch/a.h5" --predict yes --efficiency "$scratch/bad-nan.h5" --output "$scratch/x.h5"
refuses 3 'cannot open .*nowhere' 2 profile --input "$scratch/a.h5" --predict yes --efficiency "$scratch/nowhere.h5" --output "$scratch/x.h5"
finish
