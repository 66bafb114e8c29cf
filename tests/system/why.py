"""`hapt plan --explain`, `--what-if` and `--diff` as a user meets them."""
import json
import math
import os
import subprocess
import tempfile

import h5py
import numpy as np

HAPT = os.path.realpath(os.environ.get("HAPT", "build/hapt"))
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]
checks, failures = 0, 0


def check(passed, what):
    global checks, failures
    checks += 1
    if not passed:
        failures += 1
        print("failed:", what)
    return passed


def run(*arguments, ranks=0):
    command = (MPIRUN + [str(ranks)] if ranks else []) + [HAPT, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


def refuses(code, *arguments, ranks=0, says="", hint=""):
    """One error line, a hint, the exit code, nothing on standard output."""
    result = run(*arguments, ranks=ranks)
    name = "hapt " + " ".join(arguments) + (f" on {ranks} ranks" if ranks else "")
    check(result.returncode == code, f"{name}: exit code {result.returncode}, not {code}: {result.stderr.strip()}")
    check(result.stderr.count("error:") == 1, f"{name}: one error line: {result.stderr}")
    check("hint: " + hint in result.stderr, f"{name}: a hint '{hint}': {result.stderr}")
    check(says in result.stderr, f"{name}: says '{says}': {result.stderr}")
    check(result.stdout == "", f"{name}: silent on standard output: {result.stdout}")


def pair(path, seconds=(1.0, 1.0), size=1e6, bandwidth=4e6, latency=0.0, memory=(1e9, 1e9), nodes=(1, 1)):
    """Subclusters a and b of `nodes` x 1 devices; two layers, of which each device holds one: `seconds` are its time on a device of
    a and of b, more nodes share it. `size` bytes cross, 1 byte a device and microbatch in flight stays."""
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
    """Takes wall-clock figures out."""
    if isinstance(value, dict):
        value.pop("seconds", None)
        for entry in value.values():
            strip(entry)
    elif isinstance(value, list):
        for entry in value:
            strip(entry)


def the_link_is_the_limit():
    """1 s and 0.5 s of compute, 2 s of transfer: the steady state is paced by the link, and every command says so."""
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
    for word in ("why: the pace", "rivals:", "is it worth it", "separate jobs side by side"):
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


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    for test in (the_link_is_the_limit, the_explanation):
        test()
    os.chdir("/")
print(f"{checks} checks, {failures} failed")
raise SystemExit(failures > 0)
