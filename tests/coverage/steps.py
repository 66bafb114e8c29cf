"""Five steps of exported models: their data, hapt's runs, and the distance of weights. Needs NumPy and h5py alone."""
import os
import sys

import h5py
import numpy

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "system"))
import checking  # noqa: E402

STEPS, MICROBATCHES, CLASSES, VOCABULARY, TOKENS = 5, 2, 10, 64, 16
FIRST_TOKEN = 2  # those before it are padding in some models, whose embedding PyTorch does not train
# Batch norms magnify differences of rounding from step to step, so networks of images learn slowly here.
RATE = {True: 1e-5, False: 1e-4}
# A large epsilon: gradients that are rounding errors alone, such as those of biases before a norm, then move no weight.
OPTIMIZER = ["--optimizer", "adamw", "--lr-schedule", "constant", "--beta1", "0.9", "--beta2", "0.95", "--epsilon", "1e-4", "--weight-decay", "0",
             "--clip-norm", "0", "--predict", "--microbatches", MICROBATCHES, "--steps", STEPS, "--threads", 1, "--overwrite"]


def batches(shape, of_images, pixels=()):
    """(inputs, targets), [step][row of the whole step]...; shape: of a microbatch. The numbers are the same with every NumPy. A fifth of the
    pixels has no label (-100), in each microbatch as many, so that the mean of a step is that of its microbatches. pixels: height and width of labels, if each has one."""
    random = numpy.random.RandomState(7)
    whole = (STEPS, MICROBATCHES * shape[0]) + tuple(shape[1:])
    if of_images:
        inputs = random.randn(*whole).astype(numpy.float32)
        if len(pixels) > 0:
            labels = random.randint(0, CLASSES, whole[:2] + tuple(pixels)).astype(numpy.int32)
            labels[..., ::5, :] = -100
            return inputs, labels
        return inputs, random.randint(0, CLASSES, whole[:2]).astype(numpy.int32)
    text = random.randint(FIRST_TOKEN, VOCABULARY, whole[:2] + (shape[1] + 1,)).astype(numpy.int32)
    return text[..., :-1], text[..., 1:]


def named_batches(shapes):
    """The same for named inputs, with the targets as the last of them. shapes: {name: (shape of a microbatch, is it of real numbers)}."""
    random = numpy.random.RandomState(7)
    found = {}
    for name, (shape, real) in shapes.items():
        whole = (STEPS, MICROBATCHES * shape[0]) + tuple(shape[1:])
        found[name] = random.randn(*whole).astype(numpy.float32) if real else random.randint(FIRST_TOKEN, VOCABULARY, whole).astype(numpy.int32)
    targets = found.pop("targets")
    return found, targets


def write_data(path, inputs, targets):
    with h5py.File(path, "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        if isinstance(inputs, dict):
            for name, value in {**inputs, "targets": targets}.items():
                file["batches/" + name] = value
        elif inputs.dtype == numpy.float32:
            file["images"], file["labels"] = inputs, targets
        else:
            file["batches"] = numpy.concatenate([inputs, targets[..., -1:]], -1)


def read_parameters(path):
    weights = {}
    with h5py.File(path) as file:
        file["parameters"].visititems(lambda key, item: weights.__setitem__(key, item[()]) if isinstance(item, h5py.Dataset) else None)
    return weights


def train(model, data, folder, *options, ranks=1):
    """(losses, weights). RuntimeError: what hapt said."""
    run = os.path.join(folder, "run")
    done = checking.run("--input", model, "--data", data, *OPTIMIZER, *options, "--output", run, ranks=ranks)
    if done.returncode != 0:
        raise RuntimeError(" ".join(line for line in done.stderr.splitlines() if line.startswith(("hapt: error", "hint"))) or done.stderr[-300:])
    checking.run("export", "--checkpoint", run, "--output", os.path.join(folder, "w.h5"), "--overwrite")
    with h5py.File(os.path.join(run, "run.h5")) as file:
        return file["train/loss"][()], read_parameters(os.path.join(folder, "w.h5"))


def stages(model, folder, ranks):
    """Options for so many stages on a device each."""
    cluster = checking.cpu_cluster(ranks, "2 GB")
    profile = os.path.join(folder, "p%d.h5" % ranks)
    checking.run("profile", "--input", model, "--cluster", cluster, "--predict", "--imbalance", 100, "--output", profile, "--overwrite")
    with h5py.File(profile) as file:
        layers = len(file["boundary_bytes"])
    bounds = [layers * k // ranks for k in range(ranks + 1)]
    return ["--cluster", cluster, "--imbalance", 100, "--stages", ",".join("%d-%d@a:1x1" % pair for pair in zip(bounds, bounds[1:]))]


def same(one, other):
    return numpy.array_equal(one[0], other[0]) and all(numpy.array_equal(one[1][key], other[1][key]) for key in one[1])


def distance(weights, before, after):
    """How far all weights are from those of the reference, over their change (2-norms). Each step may round a weight to fp32."""
    off = change = 0.0
    for key in after:
        rounding = STEPS * 2.0**-24 * numpy.abs(after[key])
        off += numpy.sum(numpy.maximum(numpy.abs(weights[key].astype(numpy.float64) - after[key]) - rounding, 0) ** 2)
        change += numpy.sum((before[key].astype(numpy.float64) - after[key]) ** 2)
    return numpy.sqrt(off / change)


def shares_weights(model):
    """Do several operators read one parameter? Its gradients are added in another order then when stages share it."""
    with h5py.File(model) as file:
        reads = file["operators/input"][()]
        kind = file["tensors/kind"].asstr()[()]
        trains = file["tensors/trainable"][()]
    return any((reads == row).sum() > 1 for row in range(len(kind)) if kind[row] == "parameter" and trains[row])
