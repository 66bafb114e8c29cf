"""Rehearsals beside the simulator. usage: emulated.py NAME... | shared NAME... | trace TRACE.json STAGES MICROBATCHES NAME.simulated
NAME.simulated is `hapt simulate --json`, NAME.1, NAME.2, ... are rehearsals of the same plan (`hapt train --json`). shared: stages share
submeshes, so bytes, transfers and idle times, which belong to a submesh, are not compared."""
import glob
import json
import sys

STEP = 0.05  # share of a step: late wakeups and agreements may add this on a quiet machine
EXACT = 0.001
LATE = 0.02   # a rank that is woken late starts its step late, and measures it as shorter


def measured(path):
    with open(path) as file:
        return json.load(file)["train"]


def check(name, shared=False):
    """Checks the properties that hold in every run. Time is compared for the best run."""
    with open(name + ".simulated") as file:
        simulated = json.load(file)
    step, problems, best = simulated["simulated_s"], [], None
    for path in sorted(glob.glob(name + ".[0-9]*")):
        run = measured(path)
        if run["step_time_s"] < step * (1 - LATE):
            problems.append("%s: a step took %.4f s, faster than simulated, %.4f s" % (path, run["step_time_s"], step))
        for i, (ours, theirs) in enumerate(zip(run["stages"], simulated["stages"])):
            if abs(ours["busy_s"] - theirs["busy_s"]) > EXACT * step:
                problems.append("%s: stage %d computed for %.4f s, simulated %.4f s" % (path, i, ours["busy_s"], theirs["busy_s"]))
            if shared:
                continue
            if abs(ours["comm_s"] - theirs["comm_s"]) > 0.01 * step:
                problems.append("%s: stage %d sent for %.4f s, simulated %.4f s" % (path, i, ours["comm_s"], theirs["comm_s"]))
            if abs(ours["planned_bytes"] - ours["measured_bytes"]) > 0 or ours["measured_bytes"] > theirs["memory_bytes"] * 1.3:
                problems.append("%s: stage %d took %.3g bytes, planned %.3g" % (path, i, ours["measured_bytes"], theirs["memory_bytes"]))
        if best is None or run["step_time_s"] < best["step_time_s"]:
            best = run
    if best is None:
        return ["%s: no run" % name]
    if best["step_time_s"] > step * (1 + STEP):
        problems.append("%s: a step took %.4f s at best, simulated %.4f s" % (name, best["step_time_s"], step))
    for i, (ours, theirs) in enumerate(zip(best["stages"], [] if shared else simulated["stages"])):
        if abs(ours["idle_s"] - theirs["idle_s"]) > STEP * step:
            problems.append("%s: stage %d idled for %.4f s, simulated %.4f s" % (name, i, ours["idle_s"], theirs["idle_s"]))
    return problems


def trace(path, stages, microbatches, simulated):
    """All passes of every rank of every stage must be present. None may overlap another. The work of a stage must take the simulated
    time."""
    with open(path) as file:
        events = [e for e in json.load(file)["traceEvents"] if e["ph"] == "X"]
    with open(simulated) as file:
        busy = [s["busy_s"] for s in json.load(file)["stages"]]
    problems = []
    for stage in range(stages):
        ranks = {e["tid"] for e in events if e["pid"] == stage}
        if not ranks:
            problems.append("stage %d has no events" % stage)
        for rank in ranks:
            own = sorted((e for e in events if (e["pid"], e["tid"]) == (stage, rank)), key=lambda e: (e["ts"], e["ts"] + e["dur"]))
            for kind in ("forward", "backward"):
                names = sorted(e["name"] for e in own if e["cat"] == kind)
                if names != sorted("%s %d" % (kind, m) for m in range(microbatches)):
                    problems.append("stage %d, rank %d: %s passes are %s" % (stage, rank, kind, names))
            for a, b in zip(own, own[1:]):
                if a["ts"] + a["dur"] > b["ts"] + 1:
                    problems.append("stage %d, rank %d: %s overlaps %s" % (stage, rank, a["name"], b["name"]))
            # The time from the first pass to the agreement, which begins with the modelled update, suffices for all work, in modelled seconds.
            # Late wakeups hide some of it.
            whole = [e for e in own if e["cat"] in ("forward", "backward", "norm")]
            if 1e-6 * (max(e["ts"] + e["dur"] for e in whole) - min(e["ts"] for e in whole)) < busy[stage] * (1 - STEP):
                problems.append("stage %d, rank %d: its events last less than the %.4f s of its work" % (stage, rank, busy[stage]))
    return problems


def main():
    if sys.argv[1] == "trace":
        problems = trace(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        shared = sys.argv[1] == "shared"
        problems = [problem for name in sys.argv[1 + shared :] for problem in check(name, shared)]
    print("\n".join(problems))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
