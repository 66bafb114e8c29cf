"""`hapt plan` and `hapt simulate` as users run them, on profiles that h5py wrote."""
import json
import math

import h5py
import numpy as np

from checking import check
from profiles import campaign, mixed, profile, put, refuses, run

def plan(path, *arguments, ranks=0):
    if not {"--stages", "--strategy", "--explain"} & set(arguments):
        arguments += ("--loops", "1")
    result = run("plan", "--profile", path, "--json", "--microbatches", "16", *arguments, ranks=ranks)
    if not check(result.returncode == 0, f"plan of {path}: {result.stderr}"):
        return {}
    document = json.loads(result.stdout)
    document["search"].pop("seconds")
    return document


def the_plan():
    profile("plain.h5")
    document = plan("plain.h5", "--output", "plan.h5")
    keys = ["format", "version", "microbatches", "schedule", "latency_s", "simulated_s", "t_max_s", "balance_eta", "search", "stages",
            "limit", "mfu", "blocking", "bound_s", "bound_gap"]
    check(sorted(document) == sorted(keys), f"the keys of the plan: {sorted(document)}")
    stages = document["stages"]
    check(all(sorted(stage) == sorted(["layers", "subcluster", "nodes", "devices_per_node", "tensor_parallel", "program", "compute_s", "comm_s",
                                       "warmup", "memory_bytes"]) for stage in stages), "the keys of a stage")
    check([stage["layers"][0] for stage in stages] == [0] + [stage["layers"][1] for stage in stages][:-1], "half-open layers")
    check(stages[-1]["layers"][1] == 9 and stages[-1]["comm_s"] == 0 and stages[-1]["warmup"] == 1, "the last stage")
    latency = sum(s["compute_s"] + 2 * s["comm_s"] for s in stages) + 15 * document["t_max_s"]
    check(math.isclose(latency, document["latency_s"], rel_tol=1e-12), "latency by its definition")
    check(0 < document["balance_eta"] <= 1, "balance")
    # 9 layers on devices of speeds 4, 4, 2, 2: six and three layers balance
    check(math.isclose(document["t_max_s"], 0.75), f"pace {document['t_max_s']}")
    table = run("plan", "--profile", "plain.h5", "--microbatches", "16")
    check(table.returncode == 0 and "fast" in table.stdout and "slow" in table.stdout, "the plan as a table")
    for ranks in (2, 3):
        check(plan("plain.h5", ranks=ranks) == document, f"the same plan on {ranks} ranks")
    return document


def schedules(document):
    simulated = {}
    for schedule in ("h1f1b", "1f1b", "eager1f1b", "gpipe"):
        result = run("simulate", "--plan", "plan.h5", "--schedule", schedule, "--json")
        if check(result.returncode == 0, f"simulate {schedule}: {result.stderr}"):
            simulated[schedule] = json.loads(result.stdout)
    own = json.loads(run("simulate", "--plan", "plan.h5", "--json").stdout)
    check(own["simulated_s"] == document["simulated_s"], "simulate agrees with the plan")
    check(own["schedule"] == "h1f1b" and own["hidden"], "H-1F1B hides the link")
    check(simulated["1f1b"]["simulated_s"] > own["simulated_s"], "1F1B does not")
    check([s["warmup"] for s in simulated["gpipe"]["stages"]] == [16] * len(document["stages"]), "GPipe launches all")
    forced = ",".join("{}-{}@{}:{}x{}".format(*s["layers"], s["subcluster"], s["nodes"], s["devices_per_node"])
                      for s in document["stages"])
    check(plan("plain.h5", "--stages", forced)["latency_s"] == document["latency_s"], "forced, the plan costs the same")
    even = plan("plain.h5", "--strategy", "even", "--schedule", "1f1b")
    check(even["latency_s"] > document["latency_s"] and even["schedule"] == "1f1b", "the even split costs more")
    check([s["subcluster"] for s in even["stages"]] == [s["subcluster"] for s in document["stages"]], "on the same submeshes")
    refuses(3, "plan", "--profile", "plain.h5", "--stages", "0-9@quick:1x1", says="quick")
    refuses(3, "plan", "--profile", "plain.h5", "--stages", "0-8@fast:1x1")
    refuses(3, "simulate", "--plan", "plain.h5")
    refuses(3, "simulate", "--plan", "absent.h5", ranks=2)
    run("plan", "--profile", "plain.h5", "--output", "sawtooth.h5", "--overwrite", "yes")
    with h5py.File("sawtooth.h5", "r+") as file:
        file.attrs["schedule"] = "sawtooth"
    refuses(3, "simulate", "--plan", "sawtooth.h5", says="unknown schedule")
    refuses(2, "simulate")
    refuses(2, "plan")
    refuses(2, "plan", "--profile", "plain.h5", "--cluster", "c.json")
    refuses(2, "plan", "--profile", "plain.h5", "--stages", forced, "--strategy", "even")
    refuses(2, "plan", "--profile", "plain.h5", "--schedule", "1f1b", "--hide-threshold", "0.1", says="no effect")
    refuses(2, "plan", "--profile", "plain.h5", "--microbatches", "0")


def hiding():
    """Two equal stages whose boundary takes as long as a microbatch: HAPT 4.2.2."""
    def slow(file):
        file["boundary_bytes"][5] = 8192 * 0.75

    profile("slow.h5", change=slow)
    forced = plan("slow.h5", "--stages", "0-6@fast:1x2,6-9@slow:1x2", "--output", "slow-plan.h5")
    check(forced["t_max_s"] == 0.75 and forced["stages"][0]["comm_s"] == 0.75, "c = t_max")
    for schedule, low, high in (("h1f1b", 0.98, 1.001), ("eager1f1b", 0.65, 0.68), ("1f1b", -0.02, 0.02)):
        result = json.loads(run("simulate", "--plan", "slow-plan.h5", "--schedule", schedule, "--json").stdout)
        overlap = result["stages"][0]["overlap"]
        check(low <= overlap <= high, f"{schedule} hides {overlap} of the communication")
    long = json.loads(run("simulate", "--plan", "slow-plan.h5", "--microbatches", "256", "--json").stdout)
    check(long["hidden"] and long["simulated_s"] < 256 * 0.75 * 1.05, "a long step runs at the pace")
    # the link sets t_max if it is slower than the stages, and the output says so
    profile("link.h5", change=lambda file: put("boundary_bytes", 8192 * 0.9)(file) or tight(file))
    ruled = run("plan", "--profile", "link.h5", "--microbatches", "16")
    document = plan("link.h5", "--output", "link-plan.h5")
    for microbatches in ("4", "16", "64"):  # for any length of a step the steady state is limited by the link
        result = json.loads(run("simulate", "--plan", "link-plan.h5", "--microbatches", microbatches, "--json").stdout)
        check(math.isclose(result["period_s"], 0.9) and result["t_max_s"] == document["t_max_s"] == 0.9 and result["hidden"],
              f"{microbatches} microbatches over the slow link: {result}")
    check(ruled.returncode == 0 and "set by link" in ruled.stdout, f"a plan paced by the link: {ruled.stdout}{ruled.stderr}")


def tight(file):
    """Neither subcluster can hold the model alone."""
    for c in range(2):
        group = file[f"cluster_{c}"]
        group["stage_time"][:, 0, 8] = np.nan
        group["stage_time"][0] = np.nan


def foreign(document):
    """The same numbers in all types and layouts."""
    def narrow(kind, values):
        return values.astype(np.int16 if kind == "int" else np.float32)

    def swapped(kind, values):
        return values.astype(">i8" if kind == "int" else ">f8")

    def attributes(file):
        file.attrs["format"] = "hapt-profile"
        file.attrs["version"] = np.uint8(1)
        file.create_group("mine")["notes"] = np.arange(5)

    def fixed_format(file):
        file.attrs["format"] = np.bytes_("hapt-profile")

    def zero_steps(file):
        for c in range(2):
            file[f"cluster_{c}"]["step_time"] = np.zeros((2, 9, 9), dtype=np.int32)

    dresses = {
        "narrow": dict(cast=narrow),
        "swapped": dict(cast=swapped, strings="variable"),
        "chunked": dict(chunks=(1, 3, 3), strings="variable", change=attributes),
        "deflated": dict(chunks=(2, 9, 9), compression="gzip", shuffle=True, fletcher32=True, change=fixed_format),
        "steps": dict(change=zero_steps),
    }
    for name, dress in dresses.items():
        profile(f"{name}.h5", **dress)
        check(plan(f"{name}.h5") == document, f"{name}: the same plan")


def with_gap():
    """A search that may stop early prints its proven gap, and the gap is true."""
    profile("p.h5")
    formula = ["plan", "--profile", "p.h5", "--microbatches", "16", "--json", "--objective", "formula"]
    plan_p = formula[:-2] + ["--loops", "1"]
    best = json.loads(run(*formula).stdout)
    least = json.loads(run(*plan_p).stdout)
    check(best["search"]["gap"] == 0, "the optimum has no gap")
    check(least["simulated_s"] <= best["simulated_s"] * (1 + 1e-12), "the formula's plan is a candidate of the simulated step")
    for gap in (1e-6, 0.05, 0.5):
        near = json.loads(run(*plan_p, "--gap", str(gap), ranks=2).stdout)
        check(near["bound_s"] <= least["simulated_s"] * (1 + 1e-12), "the bound of the simulated step is one")
        check(near["bound_gap"] <= gap or near["simulated_s"] <= least["simulated_s"] * (1 + 1e-12), "--gap ends the search too early")
        near = json.loads(run(*formula, "--gap", str(gap), ranks=2).stdout)
        proven = near["search"]["gap"]
        check(0 <= proven <= gap * (1 + 1e-9), f"proven gap {proven} of {gap}")
        check(near["latency_s"] >= best["latency_s"] * (1 - 1e-12), "no better than the optimum")
        check(near["latency_s"] / (1 + proven) <= best["latency_s"] * (1 + 1e-12), "the lower bound is one")
    refuses(2, "plan", "--profile", "p.h5", "--gap", "-1", says="gap")
    refuses(2, "plan", "--profile", "p.h5", "--gap", "0.1", "--strategy", "megatron", says="gap")
    refuses(2, "plan", "--profile", "p.h5", "--objective", "formula", "--strategy", "megatron", says="objective")
    refuses(2, "plan", "--profile", "p.h5", "--gap", "0.1", "--stages", "0-5@fast:1x2,5-9@slow:1x2", says="gap")


def pooled():
    """Both subclusters as one stage: as fast as the split, without the link between them."""
    dress = dict(counts=(2, 2), ratios=[2 / 3, 1 / 3])
    profile("apart.h5")
    profile("pooled.h5", change=lambda file: mixed(file, **dress))
    document = plan("pooled.h5", "--output", "pooled-plan.h5")
    stage = document["stages"][0]
    check(len(document["stages"]) == 1 and math.isclose(document["t_max_s"], 0.75), f"one stage: {document}")
    check(sorted(stage) == sorted(["layers", "devices", "ratios", "program", "compute_s", "comm_s", "warmup", "memory_bytes"]), f"its keys: {stage}")
    check(stage["devices"] == [{"subcluster": "fast", "count": 2}, {"subcluster": "slow", "count": 2}], "its devices")
    check(all(math.isclose(a, b) for a, b in zip(stage["ratios"], [1 / 3, 1 / 3, 1 / 6, 1 / 6])) and len(stage["ratios"]) == 4,
          f"ratios of subclusters are spread over their devices: {stage['ratios']}")
    check(document["latency_s"] < plan("apart.h5")["latency_s"], "it saves the filling of a stage")
    check(document["balance_eta"] == 1, "every device is busy")
    profile("cubes.h5", change=lambda file: mixed(file, flat=False, **dress))
    profile("each.h5", change=lambda file: mixed(file, counts=(2, 2), ratios=[1 / 3, 1 / 3, 1 / 6, 1 / 6]))
    profile("untold.h5", change=lambda file: mixed(file, counts=(2, 2)))
    for path in ("cubes.h5", "each.h5"):
        check(plan(path) == document, f"{path}: the same plan")
    untold = plan("untold.h5")
    check(untold["stages"][0]["ratios"] is None and untold["latency_s"] == document["latency_s"], "ratios need not be told")
    for ranks in (2, 3):
        check(plan("pooled.h5", ranks=ranks) == document, f"the same mixed plan on {ranks} ranks")
    table = run("plan", "--profile", "pooled.h5", "--microbatches", "16")
    check(table.returncode == 0 and "fast+slow" in table.stdout and "2+2" in table.stdout, f"as a table: {table.stdout}")
    simulated = json.loads(run("simulate", "--plan", "pooled-plan.h5", "--json").stdout)
    check(simulated["simulated_s"] == document["simulated_s"], "simulate agrees")
    forced = plan("pooled.h5", "--stages", "0-9@fast:2+slow:2")
    check(forced["stages"] == document["stages"] and forced["latency_s"] == document["latency_s"], "forced, it costs the same")
    refuses(3, "plan", "--profile", "pooled.h5", "--stages", "0-9@fast:1+slow:2", says="no mixed stages on the devices")
    refuses(3, "plan", "--profile", "pooled.h5", "--stages", "0-9@fast:2+quick:2", says="quick")
    refuses(3, "plan", "--profile", "pooled.h5", "--stages", "0-9@fast:2+slow", hint="write stages as")
    refuses(3, "plan", "--profile", "apart.h5", "--stages", "0-9@fast:2+slow:2", says="no mixed stages")


def pooled_questions():
    """--explain, --what-if and --diff work on plans with mixed stages."""
    profile("some.h5", change=lambda file: mixed(file, counts=(1, 1), scale=0.5) or mixed(file, k=1, counts=(1, 2)))
    document = plan("some.h5", "--explain", "--what-if", "link=1..64kB/s:3,memory.slow=512..4096B:3,nodes.fast=1..1,microbatches=4..32:3",
                    "--output", "some-plan.h5")
    check(any("devices" in stage for stage in document["stages"]), f"a mixed plan: {document['stages']}")
    rivals = document["explain"]["rivals"]
    check(any("without mixed stages" in rival["what"] and rival["latency_s"] >= document["latency_s"] for rival in rivals),
          f"what they gain: {[rival['what'] for rival in rivals]}")
    points = [point for sweep in document["what_if"] for point in sweep["points"] if point["latency_s"]]
    for point in points[:4]:
        for stages in [",".join(point["stages"])]:
            check(run("plan", "--profile", "some.h5", "--stages", stages).returncode in (0, 4), f"--stages takes {stages}")
    check(any("+" in stage for point in points for stage in point["stages"]), "points have mixed stages")
    text = run("plan", "--profile", "some.h5", "--microbatches", "16", "--explain", "--what-if", "microbatches=4..32:3")
    check(text.returncode == 0 and "fast+slow" in text.stdout, f"in words: {text.stderr}")
    check(run("plan", "--profile", "some.h5", "--compare").returncode == 0, "--compare")
    compared = json.loads(run("plan", "--profile", "some.h5", "--microbatches", "16", "--compare", "--json").stdout)
    for row in compared["rows"] if "rows" in compared else compared["strategies"]:
        if row.get("strategy") in ("megatron", "alpa", "hexiscale") and row.get("stages"):
            check(all("devices" not in stage for stage in row["stages"]), f"{row['strategy']} knows no mixed stages")
    profile("none.h5")
    plan("none.h5", "--output", "none-plan.h5")
    diff = run("plan", "--diff", "some-plan.h5", "none-plan.h5")
    check(diff.returncode == 0 and "fast+slow" in diff.stdout, f"--diff: {diff.stdout}{diff.stderr}")
    same = json.loads(run("plan", "--diff", "some-plan.h5", "some-plan.h5", "--json").stdout)
    check(same["equal"] if "equal" in same else not same["moved"], "a plan is itself")
    even = run("plan", "--profile", "some.h5", "--strategy", "even", "--json")
    check(even.returncode in (0, 3, 4), f"an even split: {even.stderr}")


def planning():
    optimum = the_plan()
    schedules(optimum)
    hiding()
    foreign(optimum)
    with_gap()
    pooled()
    pooled_questions()


campaign(planning)
