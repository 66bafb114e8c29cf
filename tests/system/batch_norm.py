"""usage: batch_norm.py HAPT FOLDER. A small ResNet trains on exact batches under several plans. After each step NumPy computes in fp64, from the
weights before it, what the running statistics of all batch norms become; and the loss of held-out images by the trained ones. HAPT_LONG=1: more
plans."""
import json
import struct

import h5py
import numpy as np

from checking import LONG, check, cpu_cluster, end, passes, path, refuses
from numpy_resnet import Resnet

STEPS, ROWS, MICROBATCHES, HELD, DEPTHS, CLASSES = 5, 12, 2, 19, (2, 2), 5
RATE = ["--learning-rate", "2e-3"]
IMAGES = ["--image", "16", "--channels", "3", "--classes", str(CLASSES), "--width", "4", "--stages", "2,2", "--microbatch", str(ROWS // MICROBATCHES)]
random = np.random.default_rng(5)


def write(name, units, rows):
    """Images whose brightness depends on their class, away from 0."""
    labels = random.integers(0, CLASSES, (units, rows))
    images = (random.standard_normal((units, rows, 3, 16, 16)) + 0.7 * labels[..., None, None, None] - 1).astype(np.float32)
    with h5py.File(path(name), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        file["images"], file["labels"] = images, labels
    return images, labels


def weights_of(name):
    weights = {}
    with h5py.File(path(name)) as file:
        file["parameters"].visititems(lambda key, item: weights.update({key: item[()].astype(np.float64)}) if hasattr(item, "dtype") else None)
    return weights


def is_statistic(name):
    return "running_" in name


def exported(folder, step):
    name = f"{folder}-{step}.h5"
    passes("export", "--checkpoint", path(folder, "checkpoints", f"step-{step:08d}"), "--output", path(name))
    return weights_of(name)


def apart(left, right):
    """The largest difference of statistics, relative to the largest of each tensor."""
    return max(np.abs(left[name] - right[name]).max() / np.abs(right[name]).max() for name in right if is_statistic(name))


def followed(before, step, momentum):
    """The running statistics after a step: they move to the mean over its microbatches."""
    expected = {name: value for name, value in before.items() if is_statistic(name)}
    for part in np.split(np.arange(ROWS), MICROBATCHES):
        net = Resnet(before, DEPTHS, running=False)
        net.losses(images[step][part], labels[step][part])
        for name, value in net.statistics.items():
            expected[name] = expected[name] + momentum / MICROBATCHES * (value - before[name])
    return expected


images, labels = write("train.h5", STEPS, ROWS)
held_images, held_labels = write("held.h5", 1, HELD)
passes("model", "resnet", *IMAGES, "--output", path("m.h5"))
passes("model", "resnet", *IMAGES, "--running-statistics", "no", "--output", path("none.h5"))
common = ["--data", path("train.h5"), "--microbatches", MICROBATCHES, "--steps", STEPS, "--predict", "--threads", "1", "--imbalance", "1000",
          "--checkpoint-every", "1", "--keep", STEPS + 1, "--layers-per-model", "6", "--validation-data", path("held.h5"), "--validate-every", STEPS]


def evaluate(folder, *words, ranks=1):
    done = passes("evaluate", "--input", path("m.h5"), "--checkpoint", path(folder), "--data", path("held.h5"), "--threads", "1", "--json", *words,
                  ranks=ranks)
    return json.loads(done.stdout) if done.returncode == 0 else {"loss": np.nan}


def train(name, ranks, *words, rate=RATE, momentum=0.1, tolerance=2e-5):
    """Trains, and compares every step. Returns the losses, and the weights at the end."""
    cluster = ["--cluster", cpu_cluster(ranks)]
    done = passes("--input", path("m.h5"), *common, *rate, *cluster, *words, "--output", path(name), ranks=ranks)
    if done.returncode != 0:
        return None, None
    weights = [exported(name, step) for step in range(1, STEPS + 1)]
    initial = {key: np.ones_like(value) if "running_var" in key else 0 * value for key, value in weights[0].items() if is_statistic(key)}
    check(len(initial) == 2 * 15, f"{name}: {len(initial)} statistics")
    first = {key: value for key, value in start.items() if not is_statistic(key)}
    for step, (before, after) in enumerate(zip([{**first, **initial}] + weights, weights)):
        worst = apart(after, followed(before, step, momentum))
        check(worst < tolerance, f"{name}, step {step}: statistics are {worst:.1e} away")
    net = Resnet(weights[-1], DEPTHS, running=True)
    losses, right = net.losses(held_images[0], held_labels[0])
    with h5py.File(path(name, "run.h5")) as file:
        planned, measured = file["train/memory_planned"][()], file["train/memory_measured"][()]
        check(np.array_equal(planned, measured), f"{name}: planned memory {planned}, measured {measured}")
        loss, validation = file["train/loss"][()], file["train/validation_loss"][()]
    check(abs(validation[-1] / losses.mean() - 1) < tolerance, f"{name}: validation {validation[-1]}, NumPy {losses.mean()}")
    found = evaluate(name, *cluster, ranks=ranks)
    check(found["loss"] == validation[-1] and found["rows"] == HELD, f"{name}: {found}, validation {validation[-1]}")
    if tolerance < 1e-3:
        check(abs(found["top1"] - right.mean()) < 1e-6, f"{name}: top-1 {found['top1']}, NumPy {right.mean()}")
    return loss, weights[-1]


# The initial weights: those that a run of no learning keeps.
passes("--input", path("m.h5"), "--data", path("train.h5"), "--microbatches", MICROBATCHES, "--steps", "1", "--learning-rate", "0", "--predict",
       "--threads", "1", "--output", path("start"))
start = exported("start", 1)
check(all(name in start for name in ("bn1.running_mean", "layer2.0.downsample.1.running_var", "fc.bias")), f"names: {sorted(start)[:6]}")

one, trained = train("one", 1)
plans = [("pipeline", 2, ["--stages", "0-3@a:1x1,3-6@a:1x1", "--recompute", "all"]), ("data", 2, ["--program", "data", "--stages", "0-6@a:1x2"]),
         ("host", 2, ["--stages", "0-2@a:1x1,2-6@a:1x1", "--offload", "optimizer", "--update-on", "host"])]
if LONG:
    plans += [("split", 4, ["--program", "data", "--stages", "0-3@a:1x2,3-6@a:1x2", "--split-backward", "yes"]),
              ("gpipe", 3, ["--schedule", "gpipe", "--stages", "0-2@a:1x1,2-4@a:1x1,4-6@a:1x1"]),
              ("loops", 2, ["--schedule", "interleaved", "--stages", "0-1@a:1x1,1-3@a:1x1,3-4@a:1x1,4-6@a:1x1"]),
              ("tensor", 2, ["--stages", "0-6@a:1x2t2"]),
              ("zero", 3, ["--program", "data", "--stages", "0-6@a:1x3", "--sharded-optimizer", "yes"]),
              ("sharded", 2, ["--program", "data", "--stages", "0-6@a:1x2", "--sharded-weights", "yes"]),
              ("device", 2, ["--stages", "0-2@a:1x1,2-6@a:1x1", "--offload", "optimizer", "--update-on", "device", "--update-order", "in-order"]),
              ("weights", 2, ["--stages", "0-2@a:1x1,2-6@a:1x1", "--offload", "weights"])]
for name, ranks, words in plans:
    losses, _ = train(name, ranks, *words)
    if losses is not None and one is not None:
        check(np.abs(losses / one - 1).max() < 1e-5, f"{name}: losses {losses}, on one rank {one}")
train("sgd", 1, "--optimizer", "sgd", "--momentum", "0.9", rate=["--learning-rate", "1e-2"])
train("faster", 1, "--batch-norm-momentum", "0.6", momentum=0.6)
# NumPy's forward pass rounds nothing.
train("bf16", 2, "--precision", "bf16", "--stages", "0-3@a:1x1,3-6@a:1x1", tolerance=5e-2)

# Statistics change no bit of training: gradients, their norm, the clipping.
passes("--input", path("none.h5"), *common, *RATE, "--cluster", cpu_cluster(1), "--output", path("none"))
with h5py.File(path("none", "run.h5")) as none, h5py.File(path("one", "run.h5")) as file:
    for what in ("train/loss", "train/gradient_norm"):
        check(np.array_equal(none[what][()], file[what][()]), f"{what} without running statistics: {none[what][()]}, with {file[what][()]}")
check(not any(map(is_statistic, exported("none", STEPS))), "a model without running statistics has some")

# A resumed run has the same bits; also under another plan it goes on from the same statistics.
passes("--input", path("m.h5"), *common, *RATE, "--cluster", cpu_cluster(1), "--stop-after", "2", "--output", path("resumed"))
passes("train", "--input", path("m.h5"), "--data", path("train.h5"), "--cluster", cpu_cluster(1), "--threads", "1", "--resume", "--output", path("resumed"))
again = exported("resumed", STEPS)
check(trained is not None and all(np.array_equal(again[name], trained[name]) for name in trained), "a resumed run has other bits")

# Evaluation depends on no microbatch: other rows and other plans give the same loss.
wanted = evaluate("one", "--cluster", cpu_cluster(1))["loss"]
for rows, ranks, stages in ((1, 1, None), (5, 2, "0-3@a:1x1,3-6@a:1x1")):
    passes("model", "resnet", *IMAGES[:-1], rows, "--output", path("rows.h5"))
    place = ["--cluster", cpu_cluster(ranks), *(["--layers-per-model", "6", "--stages", stages] if stages else [])]
    passes("plan", "--input", path("rows.h5"), "--predict", "--threads", "1", *place, "--output", path("rows-plan.h5"))
    done = passes("evaluate", "--input", path("rows.h5"), "--checkpoint", path("one"), "--plan", path("rows-plan.h5"), "--data", path("held.h5"),
                  "--threads", "1", *place[:2], "--json", ranks=ranks)
    loss = json.loads(done.stdout)["loss"] if done.returncode == 0 else np.nan
    check(abs(loss / wanted - 1) < 1e-6, f"{rows} rows: {loss}, not {wanted}")

# Export writes them; weights with them come in, and weights without them, too.
passes("export", "--checkpoint", path("one"), "--format", "safetensors", "--output", path("folder"))
with open(path("folder", "model.safetensors"), "rb") as file:
    header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
check("layer1.0.bn3.running_var" in header and len(header) == 1 + len(start), f"safetensors: {sorted(header)[:5]}")
for source, statistics in ((f"one-{STEPS}.h5", trained), (f"none-{STEPS}.h5", {"bn1.running_mean": np.zeros(4), "bn1.running_var": np.ones(4)})):
    passes("model", "resnet", *IMAGES, "--weights", path(source), "--output", path("again.h5"), "--overwrite", "yes")
    found = weights_of("again.h5")
    check(all(np.array_equal(found[name], value.astype(np.float32)) for name, value in statistics.items() if is_statistic(name)), f"{source}: statistics")
for words, text in ((["--weights", path(f"none-{STEPS}.h5")], "lacks 30 running statistics"), (["--trainable", "fc.*"], "30 running statistics"),
                    (["--weights", path(f"one-{STEPS}.h5")], None)):
    told = passes("model", "resnet", *IMAGES, *words, "--output", path("warned.h5"), "--overwrite", "yes").stderr
    check(text in told if text else "warning" not in told, f"{words}: {told}")
refuses(2, "has no effect", "model", "gpt", "--batch-norm-momentum", "0.5", "--output", path("x.h5"))
refuses(2, "has no effect", "--input", path("none.h5"), "--data", path("train.h5"), "--batch-norm-momentum", "0.5", "--steps", "1", "--microbatches", MICROBATCHES,
        "--predict", "--output", path("refused"))
refuses(2, "batch-norm-momentum", "--input", path("m.h5"), "--batch-norm-momentum", "1.5")
end()
