#!/usr/bin/env bash
# docs/files.md lists every object of files that were just written.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1
head -c 20000 docs/training.md >"$scratch/text"
passes 1 data "$scratch/text" --type bytes --output "$scratch/data.h5"
small_plan --data "$scratch/data.h5"
passes 3 train --input "$scratch/m.h5" --cluster "$scratch/c.json" --plan "$scratch/plan.h5" --threads 1 --steps 4 --trace 1 --validation-data "$scratch/data.h5" \
    --validate-every 2 --validate-rows 4 --output "$scratch/run"
passes 1 export --checkpoint "$scratch/run" --output "$scratch/w.h5"
passes 1 profile --input "$scratch/m.h5" --threads 1 --calibrate "$scratch/e.h5"
passes 1 plan --input "$scratch/m.h5" --cluster inputs/clusters/a100x1-v100x1.json --microbatches 4 --recompute all --offload weights --output "$scratch/away.h5"
checks=$((checks + 1))
/usr/bin/python3 - docs/files.md "$scratch" <<'PYTHON' || fail "objects that docs/files.md does not list: see above"
import fnmatch, glob, re, sys
import h5py
sections, text, folder = {}, open(sys.argv[1]).read(), sys.argv[2]
for part in text.split("\n## ")[1:]:
    sections[part.split("\n")[0]] = re.findall(r"`([^`]+)`", part)
step = sorted(glob.glob(folder + "/run/checkpoints/step-*"))[-1]
files = [("hapt-model", "m"), ("hapt-data", "data"), ("hapt-profile", "p"), ("hapt-plan", "plan"), ("hapt-plan", "away"), ("hapt-run", "run/run"),
         ("hapt-weights", "w"), ("hapt-efficiency", "e")]
files = [(kind, folder + "/" + name + ".h5") for kind, name in files] + [("hapt-checkpoint", path) for path in glob.glob(step + "/*.h5")]
missing, seen = set(), 0
for kind, path in files:
    known = [name.replace("...", "*").replace("NAME", "*").replace("_k", "_[0-9]*") for name in sections[kind]]
    def look(name, item):
        global seen
        if isinstance(item, h5py.Dataset):
            seen += 1
            if not any(fnmatch.fnmatch(name, pattern) for pattern in known):
                missing.add((kind, name))
    with h5py.File(path) as file:
        assert file.attrs["format"].decode() == kind or kind == "hapt-checkpoint", (path, file.attrs["format"])
        file.visititems(look)
print(*sorted(missing), sep="\n", file=sys.stderr)
sys.exit(seen < 100 or bool(missing))
PYTHON
finish
