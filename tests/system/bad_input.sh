#!/usr/bin/env bash
# Bad input of every kind: one clear error from one rank, a hint, the right exit code, on any number of ranks, and no hang.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

"$HAPT" model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 64 --microbatch 2 --output "$scratch/good.h5" \
    >/dev/null 2>&1 || { echo "cannot make a model"; exit 1; }
head -c 700 "$scratch/good.h5" >"$scratch/truncated.h5"
echo "this is no model" >"$scratch/text.h5"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[{"name":"a","nodes":1,"devices_per_node":8,"device":"A100-40GB"}]}' \
    >"$scratch/eight.json"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[{"name":"a","nodes":1,\n"devices_per_node":1,"device":"cpu","colour":3}]}' \
    >"$scratch/unknown.json"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[{"name":"a","nodes":1,"devices_per_node":1,"device":"cpu",\n"memory":"4 parsecs"}]}' \
    >"$scratch/units.json"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[' >"$scratch/cut.json"
printf '{"format":"hapt-cluster","version":1,\n"subclusters":[{"name":"a","nodes":1,"devices_per_node":1,"device":"cpu","memory":"200 kB"}]}' \
    >"$scratch/tiny.json"

# invalid graphs: h5py edits a valid file
/usr/bin/python3 - "$scratch" <<'P' || exit 1
import shutil, sys
import h5py
folder = sys.argv[1]
def edit(name, change):
    path = "%s/%s.h5" % (folder, name)
    shutil.copy(folder + "/good.h5", path)
    with h5py.File(path, "r+") as f:
        change(f)
def dataset(f, name, change):
    data = f[name][...]
    attributes = dict(f[name].attrs)
    del f[name]
    change(data)
    new = f.create_dataset(name, data=data)
    for key, value in attributes.items():
        new.attrs[key] = value
def cycle(f):     # the first operator reads what the last one makes
    last = f["/operators/output"][-1][0]
    dataset(f, "/operators/input", lambda d: d.__setitem__((1, 0), last))
def dangling(f):  # an input that does not exist
    dataset(f, "/operators/input", lambda d: d.__setitem__((1, 0), 100000))
def shape(f):
    dataset(f, "/tensors/shape", lambda d: d.__setitem__((3, 0), d[3, 0] + 5))
def negative(f):
    dataset(f, "/tensors/shape", lambda d: d.__setitem__((3, 0), -4))
def missing(f):
    del f["/operators/type"]
for name, change in dict(cycle=cycle, dangling=dangling, shape=shape, negative=negative, missing=missing).items():
    edit(name, change)
P

small="--steps 1 --output $scratch/run"
for ranks in 1 2 4; do
    refuses 3 'cannot open .*nowhere' $ranks --input "$scratch/nowhere.h5" $small
    refuses 3 'truncated.h5' $ranks --input "$scratch/truncated.h5" $small
    refuses 3 'text.h5' $ranks --input "$scratch/text.h5" $small
    refuses 3 'tokens.h5 is an HDF5 file; a cluster file is JSON' $ranks --input "$scratch/good.h5" $small --cluster inputs/tokens.h5
    refuses 3 'hint: it looks like JSON: a cluster file' $ranks --input inputs/two-subclusters.json $small
    refuses 3 'hint: it looks like text' $ranks --input README.md $small
    refuses 2 'unknown option --stepps' $ranks --input "$scratch/good.h5" --stepps 3
    refuses 2 'no model' $ranks --steps 1
    refuses 3 'unknown.json.*(line|:) ?3|colour' $ranks --input "$scratch/good.h5" --cluster "$scratch/unknown.json" $small
    refuses 3 'units.json.*(line|:) ?3|parsecs' $ranks --input "$scratch/good.h5" --cluster "$scratch/units.json" $small
    refuses 3 'cut.json' $ranks --input "$scratch/good.h5" --cluster "$scratch/cut.json" $small
    refuses 3 '8' $ranks --input "$scratch/good.h5" --cluster "$scratch/eight.json" $small
done
export no_hint=1
for name in cycle dangling shape negative missing; do
    for ranks in 1 2; do refuses 3 '.' $ranks --input "$scratch/$name.h5" $small; done
done
unset no_hint
"$HAPT" data tests/system/bad_input.sh --output "$scratch/bytes.h5" >/dev/null 2>&1 &&
    "$HAPT" model gpt --layers 2 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2 --output "$scratch/bytes-model.h5" >/dev/null 2>&1 ||
    fail "cannot make a model for bytes"
refuses 4 'memory|device|plan' 1 --input "$scratch/bytes-model.h5" --data "$scratch/bytes.h5" --cluster "$scratch/tiny.json" $small
refuses 3 'contains no data' 2 --input "$scratch/good.h5" $small
refuses 2 'command' 1 fly
refuses 2 'between|lies|bad value' 1 --input "$scratch/good.h5" --microbatches 0
refuses 2 'heads' 1 model gpt --hidden 30 --heads 4 --output "$scratch/x.h5"
refuses 2 'share 3 heads' 1 model llama --hidden 32 --heads 4 --kv-heads 3 --output "$scratch/x.h5"
refuses 2 'two halves' 1 model llama --hidden 12 --heads 4 --output "$scratch/x.h5"
refuses 2 'patches of 5' 1 model vit --image 16 --patch 5 --output "$scratch/x.h5"
refuses 2 'patches of 32' 1 model vit --image 16 --patch 32 --output "$scratch/x.h5"
refuses 2 'family vit have no --sequence' 1 model vit --sequence 16 --output "$scratch/x.h5"
refuses 2 'family gpt have no --patch' 1 model gpt --patch 4 --output "$scratch/x.h5"
refuses 2 'unknown model family "lama"; known are .*llama' 1 model lama --output "$scratch/x.h5"
refuses 3 'cannot open' 1 data "$scratch/none.txt" --output "$scratch/t.h5"
refuses 3 'cannot open' 1 plan --profile "$scratch/none.h5" --microbatches 4
refuses 3 'cannot open' 2 simulate --plan "$scratch/none.h5"
refuses 3 'cannot open' 1 report --input "$scratch/none.h5"
[ ! -e "$scratch/run/run.h5" ] || fail "a refused job left a run file"
[ ! -e "$scratch/x.h5" ] || fail "a refused model left a file"
finish
