"""Collectives between devices (NCCL) compared with collectives through the host: the same training has the same losses. Sums of two ranks
are equal bit by bit, because a + b = b + a. With more ranks they are equal if NCCL adds in order of rank, as the host CUDA does.
HAPT_TEST_DEVICES: number of GPUs; the host CUDA has as many as needed. HAPT_LONG=1: all cases."""
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py
import numpy as np

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "system"))
import processes  # noqa: E402
import checking  # noqa: E402
from checking import HAPT, LONG, MPIRUN, check  # noqa: E402

if "HAPT_HOST_GPUS" in os.environ:
    os.environ["HAPT_HOST_GPUS"] = os.environ["HAPT_TEST_DEVICES"] = "4"
    os.environ["HAPT_HOST_LAZY"] = "1"
DEVICES = int(os.environ.get("HAPT_TEST_DEVICES", "1"))
ORDER = 1e-5  # fp32 has 24 bits. Another order of sums changes 1e-7, and a few steps of Adam enlarge that
TRAINING = "--optimizer adamw --learning-rate 1e-3 --lr-schedule constant --profile-seconds 1 --microbatches 2 --predict".split()
MODELS = {"gpt": "gpt --layers 2 --hidden 40 --heads 5 --sequence 16 --vocab 256 --microbatch 4 --tied-embeddings yes",
          "bf16": "gpt --layers 2 --hidden 40 --heads 5 --sequence 16 --vocab 256 --microbatch 4 --dtype bf16",
          "wide": "gpt --layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --microbatch 2",
          "fp16": "gpt --layers 2 --hidden 40 --heads 5 --sequence 16 --vocab 256 --microbatch 4 --dtype fp16",
          "moe": "bert-moe --layers 2 --hidden 32 --heads 4 --experts 5 --sequence 16 --vocab 256 --microbatch 4 --capacity-factor 0"}
HALF = ("/bf16.h5", "/fp16.h5")
# name, model, devices of the subclusters, stages (L: the number of layers), options
CASES = [("rows", "gpt", [2], "0-L@g0:1x2", ""),
         ("rows, bf16", "bf16", [2], "0-L@g0:1x2", ""),
         ("rows, sharded optimizer", "gpt", [2], "0-L@g0:1x2", "--sharded-optimizer yes"),
         ("rows, sharded weights", "fp16", [3], "0-L@g0:1x3", "--sharded-weights yes"),
         ("rows and operators, sharded weights", "gpt", [4], "0-L@g0:1x4t2", "--sharded-weights yes"),
         ("operators", "gpt", [2], "0-L@g0:1x2t2", ""),
         ("rows, fp16", "fp16", [2], "0-L@g0:1x2", "--sharded-optimizer yes"),
         ("operators, bf16", "bf16", [2], "0-L@g0:1x2t2", ""),
         ("experts", "moe", [2], "0-L@g0:1x2", ""),
         ("uneven rows", "gpt", [3], "0-L@g0:1x3", "--sharded-optimizer yes"),
         ("rows and operators", "gpt", [4], "0-L@g0:1x4t2", "--sharded-optimizer yes"),
         ("uneven devices", "gpt", [1, 1], "0-L@g0:1+g1:1", "--mixed yes"),
         ("uneven operators", "wide", [1, 1], "0-L@g0:1+g1:1p1", "--mixed yes --program all"),
         ("uneven experts", "moe", [1, 1], "0-L@g0:1+g1:1p1", "--mixed yes --program all"),
         ("two stages", "gpt", [2, 2], "0-4@g0:1x2,4-L@g1:1x2t2", ""),
         ("pipeline", "gpt", [2], "0-4@g0:1x1,4-L@g0:1x1", ""),
         ("pipeline, bf16", "bf16", [3], "0-2@g0:1x1,2-4@g0:1x1,4-L@g0:1x1", ""),
         ("pipeline of rows and operators", "gpt", [4], "0-4@g0:1x2,4-L@g0:1x2t2", ""),
         ("pipeline of operators and rows", "bf16", [4], "0-4@g0:1x2t2,4-L@g0:1x2", "")]
SHORT = ["rows, sharded optimizer", "operators, bf16", "uneven operators", "uneven experts", "two stages", "pipeline", "pipeline of rows and operators"]


def cluster(path, counts):
    """Subclusters with these numbers of devices, each at less than half the speed of the one before. Links are given, so that each time the
    plan is the same."""
    described = [{"name": f"g{i}", "nodes": 1, "devices_per_node": count,
                  "device": {"name": f"kind{i}", "backend": "cuda", "memory": "2 GB", "memory_bandwidth": "1 TB/s",
                             "peak_flops": {"fp32": f"{10 / 2.5 ** i} TFLOP/s", "bf16": "100 TFLOP/s"}}} for i, count in enumerate(counts)]
    names = [x["name"] for x in described]
    links = [{"between": [a, b], "bandwidth": "10 Gbit/s", "latency": "1 us"} for a in names for b in names if a <= b]
    with open(path, "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1, "subclusters": described, "links": links}, file)
    return path


def command(model, data, described, ranks, stages, options, output, steps=4):
    launcher = MPIRUN + [str(ranks)] if ranks > 1 else []
    return [*launcher, HAPT, "--input", model, "--data", data, "--cluster", described, "--stages", stages, "--output", output, "--steps", str(steps),
            "--precision", "auto" if model.endswith(HALF) else "fp32", *TRAINING, *options.split()]


def train(*what, **environment):
    """Losses, the libraries of rank 0, and the messages."""
    done = subprocess.run(command(*what), capture_output=True, text=True, timeout=280, env={**os.environ, **environment})
    if not check(done.returncode == 0, f"{what}: code {done.returncode}\n{done.stderr[-600:]}"):
        return np.array([]), "", done.stderr
    with h5py.File(os.path.join(what[-1], "run.h5")) as run:
        return run["train/loss"][()], run["environment/libraries"][0].decode(), done.stderr


def both_ways(name, folder, model, data, described, ranks, stages, options):
    where = os.path.join(folder, name.replace(" ", "-").replace(",", ""))
    loss, libraries, said = train(model, data, described, ranks, stages, options, where)
    expected, plain, instead = train(model, data, described, ranks, stages, options, where + "-host", HAPT_COLLECTIVES="host")
    check("NCCL" in libraries and "by NCCL" in said, f"{name}: {libraries}: {said[-300:]}")
    check("NCCL" not in plain and "HAPT_COLLECTIVES=host" in instead, f"{name}: {plain}: {instead[-300:]}")
    check(bool(re.search(r"boundaries of \w+ devices by NCCL", said)) == name.startswith("pipeline"), f"{name}: {said[-300:]}")
    check(("by page-locked host memory" in said) == (name == "two stages"), f"{name}: {said[-300:]}")
    check(("by page-locked host memory" in instead) == (name == "two stages" or name.startswith("pipeline")), f"{name}: {instead[-300:]}")
    if not check(loss.shape == expected.shape and len(loss) > 0, f"{name}: no losses"):
        return
    worst = np.max(np.abs(loss / expected - 1))
    check(worst == 0 if ranks == 2 else worst <= ORDER, f"{name}: losses are {worst:.1e} away")
    check(expected[-1] < expected[0], f"{name}: nothing was learned: {expected}")
    if LONG or name == SHORT[0]:
        again, _, _ = train(model, data, described, ranks, stages, options, where + "-again")
        check(np.array_equal(loss, again), f"{name}: the same run twice differs")
    print(f"{name}: {ranks} ranks, losses within {worst:.1e}", flush=True)


def direct(folder, model, data, layers):
    """GPU-aware MPI: boundary tensors without gaps are not copied, and training is the same."""
    if "HAPT_HOST_GPUS" not in os.environ:
        return
    what = (model, data, cluster(os.path.join(folder, "direct.json"), [1, 1]), 2, f"0-4@g0:1x1,4-{layers}@g1:1x1", "")
    loss, _, said = train(*what, os.path.join(folder, "direct"), HAPT_HOST_READABLE="1", HAPT_CUDA_MPI="yes")
    expected, _, instead = train(*what, os.path.join(folder, "copied"))
    check("by GPU-aware MPI" in said, f"no MPI that takes it: {said[-300:]}")
    check("by page-locked host memory" in instead, f"no copies: {instead[-300:]}")
    check(len(loss) > 0 and np.array_equal(loss, expected), f"losses by MPI from device memory: {loss} and {expected}")


def shared_device(folder, model, data, layers):
    described = cluster(os.path.join(folder, "shared.json"), [1, 1])
    _, _, said = train(model, data, described, 2, f"0-{layers}@g0:1+g1:1", "--mixed yes", os.path.join(folder, "shared"), HAPT_HOST_GPUS="1", CUDA_VISIBLE_DEVICES="0")
    check("by the host: ranks share the device" in said, f"two ranks on one device: {said[-300:]}")


def unconnected(folder, model, data, layers, stages):
    """Communicators are made, but a rank cannot connect. Before the first step all ranks change to the host."""
    if "HAPT_HOST_GPUS" not in os.environ:
        return
    what = (model, data, cluster(os.path.join(folder, "apart.json"), [2]), 2, stages.replace("L", str(layers)), "")
    where = os.path.join(folder, f"apart-{stages.count('@')}")
    loss, _, said = train(*what, where, HAPT_HOST_NCCL_UNCONNECTED="1", HAPT_HOST_NCCL_TIMEOUT_S="1")
    expected, _, _ = train(*what, where + "-host", HAPT_COLLECTIVES="host")
    check("NCCL: unhandled system error: no " in said, f"{stages}, no connection: {said[-300:]}")
    check(len(loss) > 0 and np.array_equal(loss, expected), f"{stages}, no connection: losses {loss} and {expected}")


def rank_of(process):
    try:
        with open(f"/proc/{process}/environ", "rb") as file:
            found = [x for x in file.read().split(b"\0") if x.startswith((b"OMPI_COMM_WORLD_RANK=", b"PMI_RANK="))]
        return int(found[0].split(b"=")[1]) if found else -1
    except OSError:
        return -1


def stopped_rank(folder, model, data, described, stages):
    """A rank that hangs is named by the rank that waits for it."""
    output = os.path.join(folder, "stopped")
    process = subprocess.Popen(command(model, data, described, 2, stages, "--timeout 3s", output, 100000), stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, env={**os.environ, "HAPT_HOST_NCCL_TIMEOUT_S": "3"})
    stopped = None
    for line in process.stderr:  # until the stages are connected
        if "collectives of its devices" in line:
            time.sleep(3)
            stopped = next((x for x in processes.children(process.pid) if rank_of(x) == 1), None)
            if stopped:
                os.kill(stopped, signal.SIGSTOP)
            break
    if not check(stopped is not None, "no rank to stop"):
        process.kill()
        return
    try:
        said = process.communicate(timeout=60)[1]
    except subprocess.TimeoutExpired:
        os.kill(stopped, signal.SIGKILL)
        said = process.communicate(timeout=60)[1]
    check(process.returncode == 7, f"a rank stands still: code {process.returncode}")
    check("rank 1" in said or "NCCL" in said, f"a rank stands still: {said[-600:]}")
    print("a rank that stands still:", next((line for line in said.splitlines() if "error:" in line), "nothing said"))


def campaign():
    folder = tempfile.mkdtemp()
    data, text = os.path.join(folder, "data.h5"), os.path.join(folder, "text")
    with open(text, "w") as file:
        file.write("".join(f"{i} plus {i} makes {2 * i}. " for i in range(3000)))
    subprocess.run([HAPT, "data", text, "--type", "bytes", "--output", data], check=True, capture_output=True)
    layers, models = {}, {}
    for name, options in MODELS.items():
        models[name] = os.path.join(folder, name + ".h5")
        subprocess.run([HAPT, "model", *options.split(), "--output", models[name]], check=True, capture_output=True)
        described = cluster(os.path.join(folder, "one.json"), [1])
        profile = os.path.join(folder, "profile.h5")
        subprocess.run([HAPT, "profile", "--input", models[name], "--cluster", described, "--predict", "--output", profile], check=True,
                       capture_output=True)
        with h5py.File(profile) as file:
            layers[name] = len(file["boundary_bytes"])
    for name, model, counts, stages, options in CASES:
        ranks = sum(counts)
        if name not in (sys.argv[1:] or (SHORT if not LONG else [name])):
            continue
        if ranks > DEVICES:
            print(f"{name}: {ranks} devices are not here")
            continue
        described = cluster(os.path.join(folder, "cluster.json"), counts)
        both_ways(name, folder, models[model], data, described, ranks, stages.replace("L", str(layers[model])), options)
    if not sys.argv[1:] or "direct" in sys.argv:
        direct(folder, models["gpt"], data, layers["gpt"])
    if not sys.argv[1:] or "unconnected" in sys.argv:
        for stages in ("0-L@g0:1x2", "0-4@g0:1x1,4-L@g0:1x1") if LONG else ("0-4@g0:1x1,4-L@g0:1x1",):
            unconnected(folder, models["gpt"], data, layers["gpt"], stages)
    if not sys.argv[1:]:
        shared_device(folder, models["gpt"], data, layers["gpt"])
        if DEVICES > 1:
            stopped_rank(folder, models["gpt"], data, cluster(os.path.join(folder, "two.json"), [2]), f"0-{layers['gpt']}@g0:1x2")
    shutil.rmtree(folder)
    checking.end()


if __name__ == "__main__":
    campaign()
