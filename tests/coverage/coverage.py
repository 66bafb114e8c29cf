"""Coverage of PyTorch's models: coverage.py HAPT FOLDER [NAME...]. Each model of models.py gets four marks: it is exported; hapt has its
operators; five steps equal PyTorch's (losses 1e-5, the change of all weights 1e-3); two and four stages give the bits of one. The
reference is PyTorch in double precision, with the gradients of two microbatches. Needs PyTorch 2, torchvision, transformers."""
import copy
import os
import sys
import warnings

import h5py
import numpy
import torch

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "system"))
sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import checking  # noqa: E402
import hapt_export  # noqa: E402
import models  # noqa: E402

warnings.filterwarnings("ignore")
os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1")
STEPS, MICROBATCHES = 5, 2
# Batch norms magnify differences of rounding from step to step, so networks of images learn slowly here.
RATE = {True: 1e-5, False: 1e-4}
# A large epsilon: gradients that are rounding errors alone, such as those of biases before a norm, then move no weight.
OPTIMIZER = ["--optimizer", "adamw", "--lr-schedule", "constant", "--beta1", "0.9", "--beta2", "0.95", "--epsilon", "1e-4",
             "--weight-decay", "0", "--clip-norm", "0", "--predict", "--microbatches", MICROBATCHES, "--steps", STEPS, "--threads", 1, "--overwrite"]


def batches_of(inputs, targets):
    """[step][row] of the whole step, beginning with the example."""
    rows = MICROBATCHES * len(inputs)
    if inputs.is_floating_point():
        return torch.randn(STEPS, rows, *inputs.shape[1:]), torch.randint(0, models.CLASSES, (STEPS, rows))
    text = torch.randint(models.FIRST_TOKEN, models.VOCABULARY, (STEPS, rows, inputs.shape[1] + 1))
    return text[..., :-1], text[..., 1:]


def write_data(name, inputs, targets):
    with h5py.File(name, "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        if inputs.is_floating_point():
            file["images"], file["labels"] = inputs.numpy(), targets.numpy().astype(numpy.int32)
        else:
            file["batches"] = torch.cat([inputs, targets[..., -1:]], -1).numpy().astype(numpy.int32)


def train_torch(model, rate, inputs, targets):
    model = hapt_export.Loss(model)
    kind = next(model.parameters()).dtype
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), eps=1e-4, weight_decay=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        parts = zip(inputs[step].chunk(MICROBATCHES), targets[step].chunk(MICROBATCHES))
        loss = 0.0
        for x, y in parts:
            part = model(x.to(kind) if x.is_floating_point() else x, y) / MICROBATCHES
            part.backward()
            loss += part.item()
        optimizer.step()
        losses.append(loss)
    return numpy.array(losses), {name.removeprefix("model."): weight.detach().numpy() for name, weight in model.named_parameters()}


def train_hapt(folder, *options, ranks=1):
    def path(*parts):
        return os.path.join(folder, *parts)
    done = checking.run("--input", path("m.h5"), "--data", path("data.h5"), *OPTIMIZER, *options, "--output", path("run"), ranks=ranks)
    if done.returncode != 0:
        raise RuntimeError(" ".join(line for line in done.stderr.splitlines() if line.startswith(("hapt: error", "hint"))) or done.stderr[-300:])
    checking.run("export", "--checkpoint", path("run"), "--output", path("w.h5"), "--overwrite")
    weights = {}
    with h5py.File(path("w.h5")) as file:
        file["parameters"].visititems(lambda key, item: weights.__setitem__(key, item[()]) if isinstance(item, h5py.Dataset) else None)
    with h5py.File(path("run", "run.h5")) as file:
        return file["train/loss"][()], weights


def stages(folder, ranks):
    """Options for so many stages on a device each."""
    cluster = checking.cpu_cluster(ranks, "2 GB")
    profile = os.path.join(folder, "p%d.h5" % ranks)
    checking.run("profile", "--input", os.path.join(folder, "m.h5"), "--cluster", cluster, "--predict", "--imbalance", 100, "--output", profile, "--overwrite")
    with h5py.File(profile) as file:
        layers = len(file["boundary_bytes"])
    bounds = [layers * k // ranks for k in range(ranks + 1)]
    return ["--cluster", cluster, "--imbalance", 100, "--stages", ",".join("%d-%d@a:1x1" % pair for pair in zip(bounds, bounds[1:]))]


def difference(weights, before, after, shared):
    """How far all weights are from PyTorch's, over the change (2-norms). Each step may round a weight to fp32."""
    off = change = 0.0
    for key in shared:
        rounding = STEPS * 2.0**-24 * numpy.abs(after[key])
        off += numpy.sum(numpy.maximum(numpy.abs(weights[key].astype(numpy.float64) - after[key]) - rounding, 0) ** 2)
        change += numpy.sum((before[key].astype(numpy.float64) - after[key]) ** 2)
    return numpy.sqrt(off / change)


def shares_weights(folder):
    """Do several operators read one parameter? Its gradients are added in another order then when stages share it."""
    with h5py.File(os.path.join(folder, "m.h5")) as file:
        reads = file["operators/input"][()]
        kind = file["tensors/kind"].asstr()[()]
        trains = file["tensors/trainable"][()]
    return any((reads == row).sum() > 1 for row in range(len(kind)) if kind[row] == "parameter" and trains[row])


def cover(name, folder):
    """(marks, what failed)"""
    os.makedirs(folder, exist_ok=True)
    torch.manual_seed(1)
    model, inputs, targets = models.MODELS[name]()
    before = {key: weight.detach().clone().numpy() for key, weight in model.named_parameters()}
    try:
        hapt_export.export(model, inputs, targets, os.path.join(folder, "m.h5"))
    except hapt_export.Unsupported as error:
        return 1, str(error)
    except Exception as error:  # torch.export has many kinds of them
        return 0, "%s: %s" % (type(error).__name__, str(error).split("\n")[0])
    shares = shares_weights(folder)
    data = batches_of(inputs, targets)
    write_data(os.path.join(folder, "data.h5"), *data)
    try:
        rate = RATE[inputs.is_floating_point()]
        losses, weights = train_hapt(folder, "--learning-rate", rate)
    except RuntimeError as error:
        return 2, str(error)
    rounded = copy.deepcopy(model)
    expected, after = train_torch(model.double(), rate, *data)
    off = numpy.max(numpy.abs(losses - expected) / expected)
    shared = [key for key in before if key in weights]
    moved = difference(weights, before, after, shared)
    noise = ""
    if not (off < 1e-5 and moved < 1e-3):  # PyTorch in fp32 may be as far from its own reference
        theirs = train_torch(rounded, rate, *data)
        apart = numpy.max(numpy.abs(theirs[0] - expected) / expected), difference(theirs[1], before, after, shared)
        noise = "; PyTorch in fp32: %.1g and %.1g" % apart
    if not off < max(1e-5, 2 * apart[0] if noise else 0) or not moved < max(1e-3, 2 * apart[1] if noise else 0) or not shared:
        return 2, "losses differ by %.2g, changes of weights by %.2g%s: %s, not %s" % (off, moved, noise, losses, expected)
    try:
        for ranks in (2, 4):
            again = train_hapt(folder, "--learning-rate", rate, *stages(folder, ranks), ranks=ranks)
            same = numpy.array_equal(again[0], losses) and all(numpy.array_equal(again[1][key], weights[key]) for key in weights)
            if not same and (not shares or numpy.max(numpy.abs(again[0] - losses) / losses) > 1e-6):
                return 3, "other bits in %d stages" % ranks
    except RuntimeError as error:
        return 3, str(error)
    return 4, "losses within %.1g, changes within %.1g%s%s" % (off, moved, noise, "; shared weights: stages within 1e-6" if shares else "")


names = sys.argv[3:] or list(models.MODELS)
whole = 0
for name in names:
    marks, said = cover(name, os.path.join(sys.argv[2], name))
    whole += marks == 4
    print("%-26s %s  %s" % (name, "".join("x" if k < marks else "-" for k in range(4)), said), flush=True)
print("%d of %d models have all four marks" % (whole, len(names)))
