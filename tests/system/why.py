"""`hapt plan --explain`, `--what-if` and `--diff` as users run them."""
import json
import math
import re

import h5py
import numpy as np

from checking import check
from profiles import campaign, refuses, run


def pair(path, seconds=(1.0, 1.0), size=1e6, bandwidth=4e6, latency=0.0, memory=(1e9, 1e9), nodes=(1, 1)):
    """Subclusters a and b of `nodes` x 1 devices and two layers, one per device. `seconds` are the times of a layer on a device of a and of
    b; more nodes share it. The boundary carries `size` bytes. A microbatch in flight keeps 1 byte per device."""
    L, C = 2, 2
    with h5py.File(path, "w") as file:
        file["boundary_bytes"] = np.array([size, 0.0])
        file["link_bandwidth"] = np.array([[1e12, bandwidth], [bandwidth, 1e12]])
        file["link_latency"] = np.array([[0.0, latency], [latency, 0.0]])
        for c, name in enumerate("ab"):
            group = file.create_group(f"cluster_{c}")
            group.attrs.update(name=np.bytes_(name), nodes=nodes[c], devices_per_node=1, device_memory_bytes=memory[c],
                               peak_flops=1.0)
            group["submesh"] = np.array([[n + 1, 1] for n in range(nodes[c])])
            time = np.full((nodes[c], L, L), np.nan)
            for n in range(nodes[c]):
                time[n, 0, 0] = time[n, 1, 1] = seconds[c] / (n + 1)
            group["stage_time"] = time
            group["stage_forward_time"] = time / 4
            group["parameter_bytes"] = np.full(time.shape, 100.0)
            group["activation_bytes"] = np.full(time.shape, 1.0)


def plan(path, *arguments, ranks=0):
    result = run("plan", "--profile", path, "--json", *arguments, ranks=ranks)
    if not check(result.returncode == 0, f"plan of {path} {arguments}: {result.stderr}"):
        return {}
    document = json.loads(result.stdout)
    strip(document)
    return document


def strip(value):
    """Removes wall-clock times."""
    if isinstance(value, dict):
        value.pop("seconds", None)
        for entry in value.values():
            strip(entry)
    elif isinstance(value, list):
        for entry in value:
            strip(entry)


def the_link_is_the_limit():
    """1 s and 0.5 s of computation, 2 s of transfer: the link limits the steady state, and every command says so."""
    pair("slow.h5", seconds=(1.0, 0.5), size=2e6, bandwidth=1e6)
    document = plan("slow.h5", "--microbatches", "64", "--explain", "--output", "slow-plan.h5")
    check(document["limit"] == "link" and document["t_max_s"] == 2.0, f"paced by the link: {document['limit']}")
    check(math.isclose(document["latency_s"], 1.5 + 2 * 2.0 + 63 * 2.0), "max(t, c) sets the pace")
    limit = document["explain"]["limit"]
    check(limit["kind"] == "link" and limit["link_s"] == 2.0 and limit["compute_s"] == 1.0, f"limit: {limit}")
    check(math.isclose(limit["knee_bandwidth_bytes_per_s"], 2e6), f"1 s for 2 MB ends it: {limit}")
    simulation = json.loads(run("simulate", "--plan", "slow-plan.h5", "--json").stdout)
    check(math.isclose(simulation["period_s"], 2.0, rel_tol=1e-9), f"the simulator's period is c: {simulation['period_s']}")
    check(simulation["limit"] == "link", "simulate knows the limit")
    for words in (("plan", "--profile", "slow.h5", "--microbatches", "64"),
                  ("plan", "--profile", "slow.h5", "--microbatches", "64", "--explain"), ("simulate", "--plan", "slow-plan.h5")):
        text = run(*words).stdout
        check("the link is the limit" in text and " 2 times" in text, f"{words} names the link: {text}")
    check("16.0 Mbit/s instead of 8.00 Mbit/s" in run("plan", "--profile", "slow.h5", "--microbatches", "64").stdout,
          "the bandwidth that ends it")
    pair("quick.h5", seconds=(1.0, 0.5), size=2e6, bandwidth=8e6)
    check("the link is the limit" not in run("plan", "--profile", "quick.h5").stdout, "no word of it where compute is the limit")


def the_explanation():
    pair("even.h5", seconds=(1.0, 1.5), bandwidth=4e6, nodes=(2, 2))
    document = plan("even.h5", "--microbatches", "32", "--explain")
    why = document["explain"]
    rivals = {rival["what"]: rival for rival in why["rivals"]}
    check(all(rival["loss"] >= 0 for rival in why["rivals"] if rival.get("fits")), f"no rival beats the plan: {why['rivals']}")
    check(any("b before a" in what for what in rivals) or any("a before b" in what for what in rivals), f"orders: {list(rivals)}")
    check(why["worth"]["copies"] == 2, "each subcluster holds the model on two devices")
    apart = sum(entry["microbatches_per_s"] for entry in why["worth"]["alone"])
    check(math.isclose(apart, why["worth"]["apart_microbatches_per_s"]), "separate jobs add up")
    check(math.isclose(why["worth"]["gain_over_apart"], 32 / document["simulated_s"] / apart), "gain over separate jobs")
    for ranks in (2, 3):
        check(plan("even.h5", "--microbatches", "32", "--explain", ranks=ranks) == document, f"the same words on {ranks} ranks")
    text = run("plan", "--profile", "even.h5", "--microbatches", "32", "--explain").stdout
    for word in ("why: t_max", "rivals:", "is it worth it", "separate jobs side by side"):
        check(word in text, f"--explain prints '{word}': {text}")
    pair("one.h5", nodes=(1, 1))
    alone = plan("one.h5", "--explain")["explain"]
    check(alone["worth"]["copies"] == 0 and all("reason" in entry for entry in alone["worth"]["alone"]), "neither holds two layers")
    given = plan("even.h5", "--microbatches", "32", "--explain", "--stages", "0-1@b:2x1,1-2@a:1x1")["explain"]
    best = [rival for rival in given["rivals"] if "the best plan" in rival["what"]]
    check(len(best) == 1 and math.isclose(best[0]["latency_s"], document["latency_s"]), "given stages have the best plan as rival")
    refuses(2, "plan", "--profile", "even.h5", "--explain", "--strategy", "even", says="--explain")
    refuses(2, "plan", "--profile", "even.h5", "--explain", "--granularity", "1", says="--granularity")
    refuses(2, "plan", "--profile", "even.h5", "--explain", "--compare", says="--explain")


def the_sweeps():
    """Each point equals a single run on changed files. The knee of two stages of one second each has a closed form."""
    pair("knee.h5", size=1e6, bandwidth=5e6, latency=0.125)
    sweep = plan("knee.h5", "--microbatches", "64", "--what-if", "link=4..200Mbit/s:5")["what_if"][0]
    check(math.isclose(sweep["link_sets_pace_below"], 1e6 / 0.875, rel_tol=1e-9), f"c = t_max: {sweep['link_sets_pace_below']}")
    transfer = (1.01 * (65 + 2 * (0.125 + 1e6 / 25e6)) - 65) / 2
    check(math.isclose(sweep["knee"], 1e6 / (transfer - 0.125), rel_tol=1.001e-3), f"the knee: {sweep['knee']}")
    for point in sweep["points"]:
        pair("point.h5", size=1e6, bandwidth=point["value"], latency=0.125)
        alone = plan("point.h5", "--microbatches", "64")
        check(point["latency_s"] == alone["latency_s"] and point["simulated_s"] == alone["simulated_s"], f"alone: {point}")
        given = plan("point.h5", "--microbatches", "64", "--stages", ",".join(point["stages"]))
        check(given["latency_s"] == point["latency_s"], "the stages as --stages takes them")
    words = ("--microbatches", "16", "--what-if", "link=a-b:1..5MB/s:3,microbatches=4..64,memory.b=50..150B,nodes.a=1..2")
    pair("many.h5", nodes=(2, 2))
    many = plan("many.h5", *words)
    check([entry["what"] for entry in many["what_if"]] == ["link", "microbatches", "memory", "nodes"], "several sweeps")
    check(many["what_if"][2]["points"][0]["latency_s"] is not None, "50 bytes: a alone holds both layers")
    for ranks in (2, 3):
        check(plan("many.h5", *words, ranks=ranks) == many, f"the same sweeps on {ranks} ranks")
    text = run("plan", "--profile", "knee.h5", "--microbatches", "64", "--what-if", "link=4..200Mbit/s").stdout
    check("what if link=4..200Mbit/s" in text and "knee: from " in text and "at 9.14 Mbit/s the transfer" in text, text)
    refuses(2, "plan", "--profile", "knee.h5", "--stages", "0-1@a:1x1,1-2@b:1x1", "--use-all-devices", says="--use-all-devices has no effect")
    given = plan("knee.h5", "--stages", "0-1@a:1x1,1-2@b:1x1", "--what-if", "link=1..9MB/s:2")["what_if"][0]["points"]
    check(all(point["stages"] == ["0-1@a:1x1t1", "1-2@b:1x1t1"] for point in given), "given stages stay")
    for bad in ("link", "link=1..25", "link=25..1Gbit/s", "nodes=1..8", "nodes.a=1..8Gbit/s", "speed.a=1..2", "link=1..2Gbit/s,"):
        refuses(2, "plan", "--profile", "knee.h5", "--what-if", bad, says="--what-if", hint="write link=1..25Gbit/s")
    refuses(2, "plan", "--profile", "knee.h5", "--what-if", "link=a-c:1..2Gbit/s", says='"a-c"', hint="the subclusters are a, b")
    refuses(2, "plan", "--profile", "knee.h5", "--what-if", "nodes.b=1..8", ranks=2, says="holds only 1 node of b", hint="use fewer nodes")
    refuses(2, "plan", "--profile", "knee.h5", "--what-if", "link=1..2Gbit/s", "--strategy", "even", says="--what-if")
    refuses(2, "plan", "--profile", "knee.h5", "--what-if", "link=1..2Gbit/s", "--ignore-communication", says="--ignore-comm")
    refuses(2, "plan", "--profile", "knee.h5", "--what-if", "link=1..2Gbit/s", "--compare", says="--what-if")


def predicted_sweeps():
    """With a model and a cluster on paper, each point predicts nodes and memory again, also beyond the file's values."""
    model = run("model", "gpt", "--layers", "4", "--hidden", "256", "--heads", "4", "--sequence", "256", "--vocab", "1024",
                "--microbatch", "8", "--output", "m.h5")
    check(model.returncode == 0, model.stderr)

    def cluster(path, nodes, memory, others="40 GB", **rates):
        with open(path, "w") as file:
            json.dump({"format": "hapt-cluster", "version": 1, "subclusters": [
                {"name": "a", "nodes": 1, "devices_per_node": 2, "device": "A100-40GB", "memory": others},
                {"name": "v", "nodes": nodes, "devices_per_node": 2,
                 "device": {"name": "v", "backend": "cuda", "peak_flops": {"fp32": "15.7 TFLOP/s"}, "memory": memory, "memory_bandwidth": "900 GB/s"}, **rates}],
                "links": [{"between": ["a", "v"], "bandwidth": "5 Gbit/s", "latency": "50 us"}]}, file)

    cluster("c.json", 2, "40 MB")
    words = ("plan", "--input", "m.h5", "--json", "--microbatches", "16", "--loops", "1", "--cluster")
    result = run(*words, "c.json", "--what-if", "nodes.v=1..3,memory.v=20..60MB:2,memory=80..90MB:2")
    if not check(result.returncode == 0, f"predicted sweeps: {result.stderr}"):
        return
    nodes, memory, all_memory = json.loads(result.stdout)["what_if"]
    for point in nodes["points"]:
        cluster("point.json", int(point["value"]), "40 MB")
        alone = json.loads(run(*words, "point.json").stdout)
        check(alone["latency_s"] == point["latency_s"], f"{point['value']} nodes: {alone['latency_s']}, {point['latency_s']}")
    for point in memory["points"]:
        cluster("point.json", 2, point["value"])
        alone = json.loads(run(*words, "point.json").stdout)
        check(alone["latency_s"] == point["latency_s"], f"{point['value']} bytes: {alone['latency_s']}, {point['latency_s']}")
    for point in all_memory["points"]:
        cluster("point.json", 2, point["value"], point["value"])
        alone = json.loads(run(*words, "point.json").stdout)
        check(alone["latency_s"] == point["latency_s"], f"{point['value']} bytes everywhere: {alone['latency_s']}, {point['latency_s']}")
    # Networks inside a subcluster, by the exact optimum of the formula.
    exact = (*[word for word in words if word not in ("--loops", "1")][:-1], "--use-all-devices", "--objective", "formula", "--cluster")
    for key in ("inter_node_bandwidth", "intra_node_bandwidth"):
        what = key[:10].replace("_", "-")
        cluster("c.json", 2, "40 GB", **{key: "10 GB/s"})
        result = run(*exact, "c.json", "--what-if", f"{what}.v=20..2000MB/s:2")
        if not check(result.returncode == 0, f"{what}: {result.stderr}"):
            continue
        points = json.loads(result.stdout)["what_if"][0]["points"]
        check(points[0]["latency_s"] > points[1]["latency_s"], f"{what}: a slow network costs time: {points}")
        for point in points:
            cluster("point.json", 2, "40 GB", **{key: point["value"]})
            alone = json.loads(run(*exact, "point.json").stdout)
            check(alone["latency_s"] == point["latency_s"], f"{what} {point['value']}: {alone['latency_s']}, {point['latency_s']}")
    cluster("c.json", 1, "40 MB")
    refuses(2, *words, "c.json", "--what-if", "inter-node.v=1..2GB/s", says="no two nodes of one subcluster")
    for ranks in (0, 2):
        refuses(3, *words, "c.json", "--what-if", "nodes.v=1..100000:2", ranks=ranks, says="100000")


def differences():
    pair("d.h5", nodes=(2, 2))
    one, two = plan("d.h5", "--output", "first.h5"), plan("d.h5", "--stages", "0-1@b:1x1,1-2@b:1x1", "--output", "two.h5")
    equal = run("plan", "--diff", "first.h5", "first.h5")
    check(equal.returncode == 0 and "the plans are equal" in equal.stdout, equal.stdout + equal.stderr)
    for ranks in (0, 2):
        result = run("plan", "--diff", "first.h5", "two.h5", "--json", ranks=ranks)
        if not check(result.returncode == 0, result.stderr):
            continue
        diff = json.loads(result.stdout)
        check(diff["format"] == "hapt-plan-diff" and not diff["equal"], "another plan")
        check(math.isclose(diff["latency_ratio"], two["latency_s"] / one["latency_s"]), "the ratio of the steps")
        moved = sum(entry["layers"][1] - entry["layers"][0] for entry in diff["moved"])
        there = [stage["subcluster"] for stage in one["stages"] for _ in range(*stage["layers"])]
        check(moved == sum(name != "b" for name in there), f"{moved} layers move to b")
        check([row["a"] for row in diff["stages"] if row["a"] is not None] == list(range(len(one["stages"]))), "all stages of one")
    check(json.loads(run("plan", "--diff", "two.h5", "two.h5", "--json").stdout)["equal"], "equal to itself")
    with open("noise.h5", "wb") as file:
        file.write(b"noise" * 100)
    for ranks in (0, 2):
        refuses(3, "plan", "--diff", "first.h5", "none.h5", ranks=ranks, says="none.h5")
        refuses(3, "plan", "--diff", "noise.h5", "first.h5", ranks=ranks, says="noise.h5")
        refuses(3, "plan", "--diff", "first.h5", "d.h5", ranks=ranks, says="d.h5")
        refuses(2, "plan", "--diff", "first.h5", ranks=ranks, hint="write hapt plan --diff a.h5 b.h5")
    refuses(2, "plan", "--diff", hint="write hapt plan --diff a.h5 b.h5")
    refuses(2, "plan", "--diff", "first.h5", "two.h5", "first.h5", says="not 3")
    refuses(2, "plan", "--diff", "first.h5", "two.h5", "--profile", "d.h5", says="--profile has no effect")
    refuses(2, "plan", "--diff", "first.h5", "two.h5", "--explain", says="--explain has no effect")
    refuses(2, "plan", "--profile", "d.h5", "first.h5", says='unexpected word "first.h5"')


def nothing_takes_time():
    """Ratios with zeros: every answer stays readable, and its JSON valid."""
    pair("zero.h5", seconds=(0.0, 0.0), size=0.0)
    words = ("plan", "--profile", "zero.h5", "--microbatches", "4", "--explain", "--what-if", "microbatches=1..4:2,link=1..2Gbit/s:2")
    result = run(*words, "--output", "zero-plan.h5")
    check(result.returncode == 0 and "nan" not in result.stdout, result.stdout + result.stderr)
    whole = json.loads(run(*words, "--json").stdout)
    check(len(whole["explain"]["worth"]["alone"]) == 2, "every subcluster alone has its entry")
    check(all(len(sweep["points"]) == 2 for sweep in whole["what_if"]), "every point has its entry")
    check(whole["explain"]["worth"]["together_microbatches_per_s"] is None, "a rate without bound is null")
    text = run("plan", "--diff", "zero-plan.h5", "zero-plan.h5").stdout
    check("x 1.0000" in text and "nan" not in text, text)
    result = run("plan", "--diff", "zero-plan.h5", "first.h5", "--json")
    check(result.returncode == 0 and json.loads(result.stdout)["latency_ratio"] is None, "no ratio to a step of 0 s: " + result.stderr)


def long_names():
    """Names that differ only in their last letter are distinguished."""
    names = ["n" * 62 + letter for letter in "ab"]
    pair("long.h5", nodes=(2, 2))
    with h5py.File("long.h5", "r+") as file:
        for c, name in enumerate(names):
            file[f"cluster_{c}"].attrs["name"] = np.bytes_(name)
    for name in names:
        plan("long.h5", "--stages", f"0-1@{name}:1x1,1-2@{name}:1x1", "--output", name[-1] + ".h5")
    text = run("plan", "--diff", "a.h5", "b.h5").stdout
    check(f"on {names[0]} -> {names[1]}," in text.replace("\n      ", " "), text)


def programs_are_shown():
    """A GPT on two kinds of nodes: the sharding of every stage's operators, the communication between them and its time. Each kind of layer
    is printed once, all layers with --full; and the same in JSON."""
    model = run("model", "gpt", "--layers", "6", "--hidden", "64", "--heads", "4", "--sequence", "32", "--vocab", "96", "--microbatch", "8",
                "--output", "gpt.h5")
    check(model.returncode == 0, f"model: {model.stderr}")
    with open("two.json", "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1,
                   "subclusters": [{"name": name, "nodes": 2, "devices_per_node": 2, "device": device, "intra_node_bandwidth": "300 GB/s",
                                    "intra_node_latency": "5 us", "inter_node_bandwidth": "10 Gbit/s", "inter_node_latency": "20 us"}
                                   for name, device in (("fast", "A100-40GB"), ("slow", "V100-32GB"))],
                   "links": [{"between": ["fast", "slow"], "bandwidth": "5 Gbit/s", "latency": "50 us"}]}, file)
    words = ("plan", "--input", "gpt.h5", "--cluster", "two.json", "--microbatches", "8", "--program", "all", "--layers-per-model", "12")
    half = 6
    forced = ("--stages", f"0-{half}@fast:2x2t2,{half}-14@slow:1x2t2", "--precision", "fp32")
    shown, full = run(*words, *forced, "--explain", "all"), run(*words, *forced, "--explain", "all", "--full")
    check(shown.returncode == 0 and full.returncode == 0, f"--explain: {shown.stderr}{full.stderr}")
    brief = run(*words, *forced, "--explain").stdout
    check(brief and shown.stdout.startswith(brief[:brief.index("--explain all")]) and "\nStage " not in brief, f"--explain without programs: {brief}")
    check(len(brief.splitlines()) <= 60 < len(shown.stdout.splitlines()), "it fits a screen")
    # one stage alone: all of its work once a step is exposed; with two, what the fill of the next step does not hide
    alone = json.loads(run("plan", "--input", "gpt.h5", "--cluster", "two.json", "--microbatches", "8", "--layers-per-model", "12", "--stages", "0-14@fast:2x2",
                           "--precision", "fp32", "--explain", "--json").stdout)
    updates, step = alone["explain"]["updates"], alone["simulated_s"]
    check(0 < updates["longest_s"] < step and abs(updates["exposed_s"] / updates["longest_s"] - 1) < 1e-9, f"updates of one stage: {updates} of {step} s")
    # long steps are extrapolated, with that work and without
    long = json.loads(run("plan", "--input", "gpt.h5", "--cluster", "two.json", "--microbatches", "800000", "--layers-per-model", "12", "--stages", "0-14@fast:2x2",
                          "--precision", "fp32", "--explain", "--json").stdout)["explain"]["updates"]
    check(abs(long["longest_s"] / updates["longest_s"] - 1) < 1e-9 and abs(long["exposed_s"] / long["longest_s"] - 1) < 1e-3, f"of a long step: {long}")
    check("updates  sums of gradients, updates: at most" in shown.stdout, f"updates are told: {shown.stdout}")
    wide = [line for line in shown.stdout.splitlines() if len(line) > 100]
    check(not wide, f"at most 100 columns: {wide[:3]}")
    lines = shown.stdout.replace("\n      ", " ").splitlines()  # without the breaks
    stages = [line for line in lines if line.startswith("Stage ")]
    check(len(stages) == 2 and "2 x 2 devices, 2 data-parallel groups of 2" in stages[0] and "1 x 2 devices, 1 data-parallel group of 2" in stages[1],
          f"every stage is introduced: {stages}")
    check(any("linear" in line and " by b, o:" in line for line in lines), "rows over axis 0, columns over axis 1")
    check(any("linear" in line and " by o:" in line for line in lines), "columns over the only axis with ranks")
    moves = [line for line in lines if " over axis " in line and "slice" not in line]
    check(len(moves) > 4 and all(line.endswith((" s", " ms", " us", " ns")) for line in moves), f"every collective has its time: {moves}")
    check(sum("over axis 0" in line for line in moves) > 0 and sum("over axis 1" in line for line in moves) > 0, "both axes move")
    check(len(full.stdout.splitlines()) > len(lines) + 20, "--full tells of every layer")
    kinds = [line for line in lines if line.startswith("Layers [")]
    check(any(", and " in line for line in kinds) and all(": communication " in line or ": same as layers" in line for line in kinds), f"kinds of layers: {kinds}")
    told = sum(1 + (int(line.split(", and ")[1].split()[0]) if ", and " in line else 0) for line in kinds)
    check(told == sum(line.startswith("Layers [") for line in full.stdout.splitlines()), f"{told} layers are told of")
    searched = run(*words, "--explain", "--json")
    document = json.loads(searched.stdout) if check(searched.returncode == 0, f"--json: {searched.stderr}") else {"explain": {}}
    programs = document["explain"].get("programs", [])
    check([entry["stage"] for entry in programs] == list(range(len(document.get("stages", [])))), "one entry a stage")
    check(all(entry["text"].lstrip().startswith("Stage ") for entry in programs), "with its text")
    five = "0-4@fast:1x1,4-7@fast:1x1,7-10@fast:1x1,10-12@fast:1x1,12-14@slow:1x2p3"
    synthesised = run(*words[:-4], "--program", "synthesised", "--layers-per-model", "12", "--stages", five, "--explain", "all")
    check(synthesised.returncode == 0 and "program " in synthesised.stdout and "(synthesised" in synthesised.stdout, f"a program by its name: {synthesised.stderr}")
    refuses(2, *words, "--full", says="--full has no effect")


def what_lacks():
    """Bytes that lack, and the memory that would do: a plan exists there and not below."""
    def parts(text, pattern):
        found = re.search(pattern, text)
        check(found is not None, f"/{pattern}/: {text}")
        return [float(word) for word in found.groups()] if found else []

    for memory in ((80.0, 80.0), (150.0, 40.0)):
        pair("small.h5", memory=memory)
        refuses(4, "plan", "--profile", "small.h5", "--microbatches", "8", says="no plan fits into memory")
        text = run("plan", "--profile", "small.h5", "--microbatches", "8").stderr
        lack, need, have = parts(text, r"lacks (\d+) B on .* needs (\d+) B of (\d+) B") or (0, 0, 0)
        check(lack > 0 and lack == need - have, text)
        factor = (parts(text, r"fits into ([\d.]+) times the memory") or [1])[0]
        for scale, code in ((factor, 0), (0.98 * factor, 4)):
            pair("scaled.h5", memory=[scale * room for room in memory])
            result = run("plan", "--profile", "scaled.h5", "--microbatches", "8")
            check(result.returncode == code, f"{scale} times the memory {memory}: code {result.returncode}, {result.stderr}")
    pair("alone.h5", memory=(60.0, 60.0))  # b has no candidates: two layers of 100 B on one device
    with h5py.File("alone.h5", "r+") as file:
        file["cluster_1/stage_time"][...] = np.nan
    refuses(4, "plan", "--profile", "alone.h5", says="at least 200 B, all devices together have 120 B", hint="80 B lack")
    pair("alone.h5", memory=(200.0, 60.0))  # enough bytes, too few devices
    with h5py.File("alone.h5", "r+") as file:
        file["cluster_1/stage_time"][...] = np.nan
    refuses(4, "plan", "--profile", "alone.h5", says="need more devices")


campaign(the_link_is_the_limit, the_explanation, the_sweeps, predicted_sweeps, differences, nothing_takes_time, long_names, programs_are_shown,
         what_lacks)
