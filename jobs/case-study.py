#!/usr/bin/env python3
"""The case study of the HAPT paper (section 2.2.2, Table 1): the gain of fine layers on A100(2,2) + V100(1,2).

usage: jobs/case-study.py [FOLDER]      prints the table; FOLDER keeps the profiles and plans
It also shows how to write a profile by hand, for any cluster file: equal layers, each costing its share of the model's FLOPs over a
submesh's peak. The unit of time t is the paper's: a microbatch on one of the two A100 stages of its plan for 8 layers, which is 3/8
of the model on A100(1,2). Needs python3-h5py.
"""
import json
import os
import subprocess
import sys
import tempfile

try:
    import h5py
    import numpy as np
except ImportError as missing:
    sys.exit("case-study: %s; install python3-h5py and run it with the system's python3" % missing)

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
HAPT = os.path.realpath(os.environ.get("HAPT", os.path.join(ROOT, "build", "hapt")))
CLUSTER = os.path.join(ROOT, "inputs", "clusters", "case-study.json")
MICROBATCHES = 128
# (layers, name of the plan, its stages; None: the planner's optimum)
PLANS = [(8, "paper", "0-2@v100:1x2,2-5@a100:1x2,5-8@a100:1x2"), (8, "hapt", None),
         (128, "paper", "0-22@v100:1x2,22-75@a100:1x2,75-128@a100:1x2"), (128, "hapt", None)]


def hapt(*arguments):
    done = subprocess.run([HAPT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)
    if done.returncode:
        sys.exit(f"hapt {' '.join(arguments)}\nended with code {done.returncode}\n{done.stderr}")
    return json.loads(done.stdout)


def subclusters(path):
    """(name, nodes, devices per node, fp16 FLOP/s per device) of each subcluster, from `hapt topology`."""
    return [(s["name"], s["nodes"], s["devices_per_node"], s["device"]["peak_flops"]["fp16"])
            for s in hapt("topology", "--cluster", path, "--json")["subclusters"]]


def submeshes(nodes, devices):
    """(1, m) for the powers of two m that divide a node's devices, then whole nodes."""
    parts = [(1, 2 ** k) for k in range(devices.bit_length()) if 2 ** k < devices and devices % 2 ** k == 0]
    return parts + [(n, devices) for n in range(1, nodes + 1)]


def write_profile(path, clusters, layers, model_flops, crossing_s=0.0):
    """Equal layers at peak speed. A boundary takes crossing_s between subclusters and 0 s inside one. Memory is unlimited."""
    count = len(clusters)
    with h5py.File(path, "w") as file:
        file["boundary_bytes"] = np.append(np.ones(layers - 1), 0.0)
        slow = 1 / crossing_s if crossing_s else 1e12
        file["link_bandwidth"] = np.where(np.eye(count, dtype=bool), 1e12, slow)
        file["link_latency"] = np.zeros((count, count))
        for c, (name, nodes, devices, peak) in enumerate(clusters):
            group = file.create_group(f"cluster_{c}")
            group.attrs.update(name=name, nodes=nodes, devices_per_node=devices, device_memory_bytes=1e12, peak_flops=peak)
            group["submesh"] = np.array(submeshes(nodes, devices))
            first, last = np.indices((layers, layers))
            share = np.where(last >= first, (last - first + 1) / layers, np.nan)
            time = np.stack([share * model_flops / (n * m * peak) for n, m in submeshes(nodes, devices)])
            group["stage_time"] = time
            group["stage_forward_time"] = time / 3
            group["parameter_bytes"] = np.zeros(time.shape)
            group["activation_bytes"] = np.zeros(time.shape)


def model_flops(clusters):
    """The model for which t is one second."""
    name, nodes, devices, peak = next(c for c in clusters if c[0] == "a100")
    return devices * peak * 8 / 3


def study(folder, crossing_s=0.0):
    """One row per plan, times in units of t."""
    clusters = subclusters(CLUSTER)
    rows = []
    for layers, name, stages in PLANS:
        profile, plan = (os.path.join(folder, f"case-{layers}{end}.h5") for end in ("", f"-{name}"))
        write_profile(profile, clusters, layers, model_flops(clusters), crossing_s)
        forced = ["--stages", stages] if stages else []
        planned = hapt("plan", "--profile", profile, "--microbatches", str(MICROBATCHES), *forced, "--output", plan, "--json")
        simulated = hapt("simulate", "--plan", plan, "--json")
        rows.append({"layers": layers, "plan": name, "stages": planned["stages"], "t_max": planned["t_max_s"],
                     "latency": planned["latency_s"], "simulated": simulated["simulated_s"], "hidden": simulated["hidden"],
                     "eta": planned["balance_eta"]})
    return clusters, rows


def show(clusters, rows):
    total = sum(n * m * peak for _, n, m, peak in clusters)
    print("share of the peak: " + ", ".join(f"{name}(1,{m}) {100 * m * peak / total:.1f} %" for name, _, m, peak in clusters))
    print(f"{'layers':>6}  {'plan':5}  {'stages (layers on submesh: cost)':72}  {'t_max':>7}  {'step':>8}  {'simulated':>9}  "
          f"{'gain':>7}  balance")
    for row in rows:
        stages = ", ".join(f"{s['layers'][1] - s['layers'][0]} on {s['subcluster']}({s['nodes']},{s['devices_per_node']}): "
                           f"{s['compute_s']:.3f} t" for s in row["stages"])
        gain = 100 * (rows[0]["simulated"] / row["simulated"] - 1)
        print(f"{row['layers']:6}  {row['plan']:5}  {stages:72}  {row['t_max']:5.3f} t  {row['latency']:6.1f} t  "
              f"{row['simulated']:7.1f} t  {gain:5.1f} %  {100 * row['eta']:.1f} %")


def main():
    folder = sys.argv[1] if len(sys.argv) > 1 else None
    with tempfile.TemporaryDirectory() as scratch:
        if folder:
            os.makedirs(folder, exist_ok=True)
        print(f"B = {MICROBATCHES}, communication fully overlapped; gain: throughput over the paper's plan of 8 layers, simulated")
        show(*study(folder or scratch))
        print("\nthe same with a link between the subclusters on which a boundary takes t/2")
        show(*study(scratch, crossing_s=0.5))


if __name__ == "__main__":
    main()
