"""Training on CUDA devices compared with PyTorch's fp64 references (tests/data) and with the CPU: losses and weights in fp32, losses in
bf16. It runs on one rank, on several as a pipeline (each rank is a subcluster with one device, all on the first GPU), and data-parallel if
there are two GPUs. The same command twice must give the same bits, and so must recomputation, and state and weights on the host. A hundred
steps of a small GPT are compared with the CPU's. On the host CUDA, TF32 and overflows in fp16 are left to HAPT_LONG=1.
HAPT_TEST_BACKEND names the back end. Arguments: prefixes of the references' names, and `hundred`; none: all."""
import glob
import json
import os
import shutil
import sys
import tempfile

import h5py
import numpy as np

from figures import figure

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "system"))
from families import OPTIONS, TRAINING, away, hapt  # noqa: E402
import checking  # noqa: E402
from checking import LONG, check  # noqa: E402

BACKEND = os.environ.get("HAPT_TEST_BACKEND", "cuda")
HOST = os.environ.get("HAPT_CUDA_PLUGIN", "").endswith("-host.so")
DEVICES = int(os.environ.get("HAPT_TEST_DEVICES", "1"))
FP32, HALF = 1e-4, 2e-2  # a bf16 number has 8 bits, and small models average out little of its error
FP16 = 1e-2  # 11 bits
TF32 = 1e-2  # the same, for operands of products
WEIGHTS = 1e-2
UPDATED = 1e-3  # against the device's updates: the last bits of fp32 weights, some of which change a bf16 copy
# Options that keep less on the device; the bits stay the same.
KEPT = [["--offload", "optimizer", "--update-on", "device"], ["--offload", "weights", "--update-on", "device"], ["--recompute", "all"],
        ["--offload", "weights", "--update-on", "device", "--recompute", "all"]]


def cluster(path, counts, half="bf16"):
    device = {"name": "test", "backend": BACKEND, "peak_flops": {"fp32": "10 TFLOP/s", half: "100 TFLOP/s"}, "memory": "2 GB",
              "memory_bandwidth": "1 TB/s"}
    described = {"format": "hapt-cluster", "version": 1,
                 "subclusters": [{"name": f"g{i}", "nodes": 1, "devices_per_node": count, "device": device} for i, count in enumerate(counts)]}
    with open(path, "w") as file:
        json.dump(described, file)
    return path


def train(model, data, folder, counts, stages=None, steps=None, microbatches=4, options=(), output=None, half="bf16", precision="auto"):
    """Returns the run's losses and its folder. `half`: the 16-bit type of the devices."""
    output = output or os.path.join(folder, f"run-{len(os.listdir(folder))}")
    where = cluster(output + ".json", counts, half)
    forced = ["--stages", stages] if stages else []
    if not hapt(sum(counts), "--input", model, "--data", data, "--microbatches", microbatches, "--steps", steps, *TRAINING, *forced, *options,
                "--precision", precision, "--predict", "--cluster", where, "--output", output):
        return None, output
    with h5py.File(os.path.join(output, "run.h5")) as run:
        return run["train/loss"][()], output


def compare(what, loss, expected, tolerance):
    worst = np.max(np.abs(loss / expected - 1)) if loss is not None and loss.shape == expected.shape else np.inf
    check(worst <= tolerance, f"{what}: losses are {worst:.1e} away")
    figure(what.replace(",", "").replace(" ", "_"), worst)
    print(f"{what}: losses within {worst:.1e}", flush=True)


def layers_of(output):
    with h5py.File(os.path.join(output, "run.h5")) as run:
        return len(run["layers/end_op"])


def overflows(model, data, folder, steps):
    """A loss scale at which fp16 overflows. Such steps change nothing and are reported, and the scale falls until training goes on. A run
    that is stopped after them and resumed has the same final bits."""
    huge = ["--loss-scale", 16777216, "--checkpoint-every", 0]
    loss, output = train(model, data, folder, [1], None, steps, options=huge)
    if not check(loss is not None and np.all(np.isfinite(loss)), "fp16 with a huge loss scale: no losses"):
        return
    with h5py.File(os.path.join(output, "run.h5")) as run:
        skipped = np.isinf(run["train/gradient_norm"][()])
    count = int(np.sum(skipped))
    check(0 < count < steps and not skipped[-1], f"fp16 with a huge loss scale: {count} of {steps} steps left out")
    check(loss[-1] < loss[0], "fp16 with a huge loss scale: nothing is learned")
    halves = os.path.join(folder, "halves")
    train(model, data, folder, [1], None, steps, options=[*huge, "--stop-after", count + 1], output=halves)
    resumed, _ = train(model, data, folder, [1], None, steps, options=[*huge, "--resume", "yes"], output=halves)
    check(resumed is not None and np.array_equal(loss, resumed), "fp16, resumed behind steps that were left out: other losses")
    print(f"fp16 with a huge loss scale: {count} of {steps} steps left out")


def family(path, folder):
    with h5py.File(path) as reference:
        attributes = reference.attrs
        name = attributes["family"] if "family" in attributes else "gpt"
        name = name.decode() if isinstance(name, bytes) else name
        microbatches = 1 if name == "resnet" else 4
        rows = int(attributes["rows"]) if "rows" in attributes else 8
        options = [x for key in OPTIONS if key in attributes for x in ("--" + key.replace("_", "-"), attributes[key])]
        if not options:
            options = "--layers 2 --hidden 64 --heads 4 --sequence 64 --vocab 256 --tied-embeddings yes".split()
        expected = reference["loss_fp64"][()]
        model, half = os.path.join(folder, "model.h5"), os.path.join(folder, "half.h5")
        for dtype, output in ("fp32", model), ("bf16", half):
            hapt(1, "model", name, *options, "--microbatch", rows // microbatches, "--dtype", dtype, "--weights", path, "--output", output)
        whole = not os.environ.get("HAPT_TEST_QUICK")
        expected = expected if whole else expected[:4]
        steps = len(expected)
        loss, output = train(model, path, folder, [1], None, steps, microbatches, precision="fp32")
        compare(f"{name}, fp32", loss, expected, FP32)
        if loss is None:
            return
        again, _ = train(model, path, folder, [1], None, steps, microbatches, precision="fp32")
        check(np.array_equal(loss, again), f"{name}: the same run twice differs")
        exported = os.path.join(output, "weights.h5")
        if whole and "trained" in reference and hapt(1, "export", "--checkpoint", output, "--output", exported):
            with h5py.File(exported) as file:
                parameter, most = away(file["parameters"], reference)
            check(most <= WEIGHTS, f"{name}: {parameter} is {most:.1e} away")
            print(f"{name}: weights within {most:.1e}")
        loss, _ = train(half, path, folder, [1], None, steps, microbatches)
        compare(f"{name}, bf16", loss, expected, HALF)
        for kept in (KEPT if whole else KEPT[1:2]) if name == "gpt" else ():
            other, _ = train(half, path, folder, [1], None, steps, microbatches, kept)
            check(np.array_equal(loss, other), f"{name}, bf16: other losses with {' '.join(kept)}")
        if name == "gpt":  # the CPU may contract products and sums differently
            other, _ = train(half, path, folder, [1], None, steps, microbatches, ["--offload", "optimizer", "--update-on", "host"])
            compare(f"{name}, bf16, updated on the host", other, loss, UPDATED)
        if LONG or not HOST:
            chosen, _ = train(model, path, folder, [1], None, steps, microbatches)
            check(np.array_equal(loss, chosen), f"{name}: a model in fp32 does not train as one in bf16 where devices have it")
            rounded, _ = train(model, path, folder, [1], None, steps, microbatches, precision="tf32")
            compare(f"{name}, TF32", rounded, expected, TF32)
        fp16 = os.path.join(folder, "fp16.h5")
        hapt(1, "model", name, *options, "--microbatch", rows // microbatches, "--dtype", "fp16", "--weights", path, "--output", fp16)
        loss, _ = train(fp16, path, folder, [1], None, steps, microbatches)
        compare(f"{name}, fp16", loss, expected, FP16)
        without, _ = train(half, path, folder, [1], None, steps, microbatches, half="fp16")
        check(np.array_equal(loss, without), f"{name}: a model in bf16 on a device without it does not train as one in fp16")
        if name == "gpt" and (LONG or not HOST):
            overflows(fp16, path, folder, max(steps, 5))
        layers = layers_of(output)
        ranks = 4 if LONG else 2
        ends = [layers * k // ranks for k in range(ranks + 1)]
        stages = ",".join(f"{a}-{b}@g{k}:1x1" for k, (a, b) in enumerate(zip(ends, ends[1:])))
        loss, _ = train(model, path, folder, [1] * ranks, stages, steps, microbatches, precision="fp32")
        compare(f"{name}, {ranks} ranks in {ranks} stages", loss, expected, FP32)
        if DEVICES > 1:
            loss, _ = train(model, path, folder, [2], f"0-{layers}@g0:1x2", steps, microbatches, precision="fp32")
            compare(f"{name}, 2 ranks share the rows", loss, expected, FP32)
            sliced, _ = train(model, path, folder, [2], f"0-{layers}@g0:1x2", steps, microbatches, ["--offload", "optimizer"], precision="fp32")
            check(np.array_equal(loss, sliced), f"{name}, 2 ranks: other losses with slices of the optimizer state on the host")


def hundred(folder):
    """A hundred steps of a small GPT compared with the CPU's in fp32. By default a GPU computes in bf16."""
    steps, data, model, cpu = 100, *(os.path.join(folder, name) for name in ("bytes.h5", "small.h5", "cpu"))
    shape = ("--layers 2 --hidden 32 --heads 2 --sequence 32" if HOST else "--layers 4 --hidden 64 --heads 4 --sequence 64").split()
    shape += "--vocab 256 --microbatch 2".split()
    if not hapt(1, "data", __file__, "--type", "bytes", "--output", data) or not hapt(1, "model", "gpt", *shape, "--output", model):
        return
    microbatches = 2 if HOST else 4
    if not hapt(1, "--input", model, "--data", data, "--microbatches", microbatches, "--steps", steps, *TRAINING, "--device", "cpu", "--predict",
                "--output", cpu):
        return
    with h5py.File(os.path.join(cpu, "run.h5")) as run:
        expected = run["train/loss"][()]
    check(expected[-1] < 0.8 * expected[0], "a hundred steps on the CPU: nothing is learned")
    for precision, tolerance in ("fp32", FP32), ("auto", HALF):
        loss, _ = train(model, data, folder, [1], None, steps, microbatches, precision=precision)
        compare(f"a hundred steps of gpt, {precision}", loss, expected, tolerance)
        check(precision == "fp32" or not np.array_equal(loss, expected), "a GPU left alone does not compute in bf16")


wanted = sys.argv[1:]
for path in sorted(glob.glob("tests/data/*-small.h5")):
    if wanted and not any(os.path.basename(path).startswith(name) for name in wanted):
        continue
    scratch = tempfile.mkdtemp()
    family(path, scratch)
    shutil.rmtree(scratch)
if not wanted or "hundred" in wanted:
    scratch = tempfile.mkdtemp()
    hundred(scratch)
    shutil.rmtree(scratch)
checking.end()
