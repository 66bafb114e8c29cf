#!/usr/bin/env bash
# Devices of less and less memory, on paper: what --recompute and --offload auto plan is nowhere longer than a single choice for all stages by
# more than 2 % (the worth of memory below which they do not look further), and there is a plan wherever a single choice has one.
# HAPT_LONG=1: more sizes. `bench/memory` does the same for published models.
# Runs beside others: it measures no time.
. "$(dirname "$0")/lib.sh.inc"
cd "$(dirname "$0")/../.." || exit 1

passes 1 model gpt --layers 4 --hidden 1024 --heads 16 --sequence 512 --vocab 8192 --microbatch 4 --dtype bf16 --output "$scratch/m.h5"
cat >"$scratch/sweep.py" <<'P'
import json, os, subprocess, sys
hapt, folder = sys.argv[1:]
choices = {"auto": [], "keep": ["--recompute", "no", "--offload", "no"], "recompute": ["--recompute", "all", "--offload", "no"],
           "offload": ["--recompute", "no", "--offload", "optimizer"], "both": ["--recompute", "all", "--offload", "optimizer"]}
with open("inputs/clusters/a100x1-v100x1of4.json") as file:
    cluster = json.load(file)


def plan(gigabytes, options):
    for subcluster in cluster["subclusters"]:
        subcluster["memory"] = "%.4f GB" % gigabytes
    with open(folder + "/c.json", "w") as file:
        json.dump(cluster, file)
    done = subprocess.run([hapt, "plan", "--input", folder + "/m.h5", "--cluster", folder + "/c.json", "--global-batch", "8", "--json", *options],
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert done.returncode in (0, 4), done.stderr[-600:]
    return json.loads(done.stdout)["simulated_s"] if done.returncode == 0 else float("inf")


count = 12 if os.environ.get("HAPT_LONG") else 2
worst, before = 0, None
for k in range(count):
    gigabytes = 0.4 * 0.4 ** (k / (count - 1))
    steps = {name: plan(gigabytes, options) for name, options in choices.items()}
    best = min(steps[name] for name in choices if name != "auto")
    print("%.3f GB: %s" % (gigabytes, steps), flush=True)
    assert steps["auto"] <= 1.02 * best, "a single choice is better"
    assert before is None or steps["auto"] >= 0.98 * before, "more memory made it longer"
    worst, before = max(worst, steps["auto"] / best if best < float("inf") else 0), steps["auto"]
print("%d sizes, at most %.4f times the best single choice" % (count, worst))
P
checks=$((checks + 1))
/usr/bin/python3 "$scratch/sweep.py" "$HAPT" "$scratch" >"$scratch/said" 2>&1 || fail "$(cat "$scratch/said")"
figures=$(tail -n 1 "$scratch/said")
finish
