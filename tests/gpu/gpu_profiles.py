"""Calibrated tables and profiles of CUDA devices. Two ranks share one device, and one of them is slowed down: the planner gives it less
work. On a GPU its uneven split trains faster than an even one. Arguments: calibration, sums, shared; none: all."""
import json
import os
import shutil
import sys
import tempfile

import h5py
import numpy as np

from figures import figure

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "system"))
import checking  # noqa: E402
from checking import LONG, check  # noqa: E402
from profiles import run  # noqa: E402

os.environ["HAPT_HOST_GPUS"] = "1"  # for tests/gpu/host
GPU = not os.environ.get("HAPT_CUDA_PLUGIN", "").endswith("-host.so")
DEVICES = int(os.environ.get("HAPT_TEST_DEVICES", "1"))
SLOWDOWN = 4
# A GPU needs enough work, because a launch takes some microseconds.
SIZES = "--layers 8 --hidden 1024 --heads 16 --sequence 512 --vocab 8192 --microbatch 4" if GPU else \
    "--layers 4 --hidden 32 --heads 2 --sequence 16 --vocab 256 --microbatch 2"
SECONDS = "20" if GPU else "1"


def cluster(path, slowdowns):
    device = {"name": "test", "backend": "cuda", "peak_flops": {"fp32": "10 TFLOP/s", "bf16": "100 TFLOP/s"}, "memory": "2 GB",
              "memory_bandwidth": "1 TB/s"}
    described = [{"name": f"g{i}", "nodes": 1, "devices_per_node": 1, "device": device, "slowdown": slowdown}
                 for i, slowdown in enumerate(slowdowns)]
    links = [{"between": [f"g{i}", f"g{j}"], "bandwidth": "10 GB/s", "latency": "5 us"} for i in range(len(slowdowns)) for j in range(i + 1)]
    with open(path, "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1, "subclusters": described, "links": links}, file)
    return path


def hapt(ranks, *arguments):
    done = run(*map(str, arguments), ranks=ranks)
    check(done.returncode == 0, f"hapt {arguments}: code {done.returncode}: {done.stderr[-600:]}")
    return done.returncode == 0, done.stdout


def times(path, index=0):
    """[L][L] of the first submesh of a subcluster."""
    with h5py.File(path) as file:
        return file[f"cluster_{index}/stage_time"][0]


def calibration(folder, model):
    """Tables are made, saved, loaded and used. They predict measurements better than the built-in ones."""
    one = cluster(os.path.join(folder, "one.json"), [1])
    tables, measured, built_in, calibrated = (os.path.join(folder, name) for name in ("e.h5", "measured.h5", "built-in.h5", "calibrated.h5"))
    fine, said = hapt(0, "profile", "--input", model, "--cluster", one, "--calibrate", tables, "--output", measured, "--profile-seconds", SECONDS,
                      "--threads", 1, "--json")
    if not fine:
        return
    rows = json.loads(said)["calibration"]["tables"]
    check({row["class"] for row in rows} == {"product", "attention", "vector", "memory"}, f"classes: {rows}")
    check(all(row["device"] == "test" and row["samples"] > 0 and row["efficiency"] > 0 for row in rows), f"tables: {rows}")
    with h5py.File(tables) as file:
        check(file["device_0"].attrs["backend"] in (b"cuda", "cuda"), "the table is of another back end")
        took = file["device_0/operator_time"][()]
        check(np.all(np.isfinite(took)) and np.all(took > 0), "times of operators")
    hapt(0, "profile", "--input", model, "--cluster", one, "--predict", "yes", "--output", built_in)
    hapt(0, "profile", "--input", model, "--cluster", one, "--predict", "yes", "--efficiency", tables, "--output", calibrated)
    expected = times(measured)
    there = np.isfinite(expected)
    check(there.any() and np.all(expected[there] > 0), "times of stages")
    apart = {path: np.median(np.abs(np.log2(times(path)[there] / expected[there]))) for path in (built_in, calibrated)}
    check(apart[calibrated] < apart[built_in] or apart[calibrated] < 0.5,
          f"predictions are {apart[built_in]:.1f} octaves away by the built-in tables, {apart[calibrated]:.1f} by calibrated ones")
    print(f"calibrated: predictions {apart[calibrated]:.2f} octaves away, {apart[built_in]:.2f} by the built-in tables")


def sums(folder, model):
    """Sums over two devices are timed on these devices."""
    if GPU and DEVICES < 2:
        print("sums: 2 devices are not here")
        return
    described = os.path.join(folder, "pair.json")
    with open(cluster(described, [1])) as file:
        pair = json.load(file)
    pair["subclusters"][0]["devices_per_node"] = 2
    with open(described, "w") as file:
        json.dump(pair, file)
    tables = os.path.join(folder, "pair.h5")
    os.environ["HAPT_HOST_GPUS"] = "2"
    fine, _ = hapt(2, "profile", "--input", model, "--cluster", described, "--calibrate", tables, "--profile-seconds", 1, "--threads", 1)
    os.environ["HAPT_HOST_GPUS"] = "1"
    if not fine:
        return
    with h5py.File(tables) as file:
        took = file["device_0/all_reduce"][()]
    check(took.shape == (4, 4) and np.all(np.isfinite(took)) and np.all(took > 0) and np.all(took[:, 0] == 2), f"sums: {took}")


def step_s(folder, name, model, data, two, stages):
    output = os.path.join(folder, name)
    fine, _ = hapt(2, "--input", model, "--data", data, "--cluster", two, "--stages", stages, "--predict", "--microbatches", 8, "--steps", 12,
                   "--output", output)
    if not fine:
        return np.inf
    with h5py.File(os.path.join(output, "run.h5")) as file:
        return float(np.median(file["train/step_time"][4:]))


def shared(folder, model):
    two = cluster(os.path.join(folder, "two.json"), [1, SLOWDOWN])
    measured, plan = os.path.join(folder, "two.h5"), os.path.join(folder, "plan.h5")
    if not hapt(2, "profile", "--input", model, "--cluster", two, "--output", measured, "--profile-seconds", SECONDS, "--threads", 1)[0]:
        return
    ratio = times(measured, 1)[0] / times(measured, 0)[0]
    ratio = ratio[np.isfinite(ratio)]
    check(len(ratio) > 0 and np.all(np.abs(ratio / SLOWDOWN - 1) < 0.01), f"the slowed rank takes {ratio} times as long")
    fine, said = hapt(0, "plan", "--profile", measured, "--microbatches", 8, "--loops", 1, "--output", plan, "--json")
    if not fine:
        return
    stages = json.loads(said)["stages"]
    layers = [stage["layers"][1] - stage["layers"][0] for stage in stages]
    slow = [stage["subcluster"] for stage in stages].index("g1") if len(stages) == 2 else -1
    check(len(stages) == 2 and layers[slow] < layers[1 - slow], f"the slowed rank gets as much: {stages}")
    print(f"two ranks on one device, one slowed: {layers} layers")
    if not GPU and not LONG:
        return
    text, data = os.path.join(folder, "text"), os.path.join(folder, "data.h5")
    with open(text, "wb") as file:
        file.write(np.random.default_rng(1).bytes(200000))
    hapt(0, "data", text, "--type", "bytes", "--output", data)
    L = sum(layers)
    names = [stage["subcluster"] for stage in stages]
    even = step_s(folder, "even", model, data, two, f"0-{L // 2}@{names[0]}:1x1,{L // 2}-{L}@{names[1]}:1x1")
    uneven = step_s(folder, "uneven", model, data, two, f"0-{layers[0]}@{names[0]}:1x1,{layers[0]}-{L}@{names[1]}:1x1")
    figure("even_ms", 1e3 * even)
    figure("planned_ms", 1e3 * uneven)
    print(f"a step takes {1e3 * even:.1f} ms split evenly, {1e3 * uneven:.1f} ms as planned")
    check(uneven < even, f"the planned split takes {uneven:.4f} s a step, the even one {even:.4f} s")


scratch = tempfile.mkdtemp()
model_path = os.path.join(scratch, "model.h5")
if hapt(0, "model", "gpt", *SIZES.split(), "--output", model_path)[0]:
    for part in calibration, sums, shared:
        if part.__name__ in (sys.argv[1:] or [part.__name__]):
            part(scratch, model_path)
shutil.rmtree(scratch)
checking.end()
