"""usage: pixels.py HAPT FOLDER. A linear classifier of pixels: NumPy computes losses, top-1 and one step of gradient descent in fp64. Pixels
without a label (-100) count nowhere; each row and step has another number of them."""
import json
import os
import sys

import h5py
import numpy as np

from checking import check, cpu_cluster, end, passes, path, refuses

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import hapt  # noqa: E402

ROWS, B, CHANNELS, SIZE, CLASSES, STEPS, RATE = 2, 3, 3, 4, 5, 4, 0.5
random = np.random.default_rng(11)

graph = hapt.Graph("pixels", rows=ROWS, channels=CHANNELS, image=SIZE, classes=CLASSES, labels=SIZE * SIZE)
x = graph.op("permute", graph.op("cast", graph.images), integers=[0, 2, 3, 1])
x = graph.op("relu", graph.linear(graph.op("reshape", x, integers=[-1, SIZE * SIZE, CHANNELS]), "hidden", CHANNELS, 8, std=0.5))
loss = graph.cross_entropy(graph.linear(x, "classifier", 8, CLASSES, std=0.5))
begin = {name: random.standard_normal([size for size in shape if size]).astype(np.float32) / 2
         for name, kind, _, _, _, shape, *_ in graph.tensors if kind == "parameter"}
graph.values.update(begin)
graph.save(path("m.h5"), loss=loss)
whole = hapt.Graph("whole", rows=ROWS, channels=CHANNELS, image=SIZE, classes=CLASSES)
whole.save(path("whole.h5"), loss=whole.cross_entropy(whole.linear(whole.op("flatten", whole.op("cast", whole.images)), "all", CHANNELS * SIZE * SIZE, CLASSES)))


def write(name, images, labels):
    with h5py.File(path(name), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        file["images"], file["labels"] = images, labels


def draw(*lead):
    """Images and labels of so many rows; more pixels lack a label from row to row."""
    images = random.standard_normal(lead + (CHANNELS, SIZE, SIZE)).astype(np.float32)
    labels = random.integers(0, CLASSES, lead + (SIZE, SIZE)).astype(np.int32)
    lacks = random.random(labels.shape) < np.linspace(0.1, 0.8, int(np.prod(lead))).reshape(lead + (1, 1))
    return images, np.where(lacks, -100, labels)


def forward(weight, images):
    pixels = images.reshape(-1, CHANNELS, SIZE * SIZE).transpose(0, 2, 1).astype(np.float64)
    hidden = np.maximum(pixels @ weight["hidden.weight"].T + weight["hidden.bias"], 0)
    logits = hidden @ weight["classifier.weight"].T + weight["classifier.bias"]
    share = np.exp(logits - logits.max(-1, keepdims=True))
    return pixels, hidden, logits, share / share.sum(-1, keepdims=True)


def score(weight, images, labels):
    """Loss and top-1 of all pixels that have a label."""
    _, _, logits, share = forward(weight, images)
    labels = labels.reshape(len(share), -1)
    has = labels != -100
    chosen = np.take_along_axis(share, np.where(has, labels, 0)[..., None], -1)[..., 0]
    return -np.log(chosen[has]).mean(), (logits.argmax(-1) == labels)[has].mean(), int(has.sum())


def descend(weight, images, labels):
    pixels, hidden, _, share = forward(weight, images)
    labels = labels.reshape(len(share), -1)
    has = labels != -100
    gradient = (share - np.eye(CLASSES)[np.where(has, labels, 0)]) * has[..., None] / has.sum()
    inner = gradient @ weight["classifier.weight"] * (hidden > 0)
    slopes = {"classifier.weight": np.einsum("bpc,bph->ch", gradient, hidden), "classifier.bias": gradient.sum((0, 1)),
              "hidden.weight": np.einsum("bph,bpc->hc", inner, pixels), "hidden.bias": inner.sum((0, 1))}
    return {name: weight[name] - RATE * slopes[name] for name in weight}


def weights(name):
    with h5py.File(path(name)) as file:
        return {key: file["parameters"][key][()].astype(np.float64) for key in file["parameters"]}


# Steps of exact batches, on one device, in two stages, and with rows shared by two devices.
images, labels = draw(STEPS, ROWS * B)
write("exact.h5", images, labels)
train = ["--input", path("m.h5"), "--microbatches", B, "--optimizer", "sgd", "--momentum", 0, "--learning-rate", RATE,
         "--lr-schedule", "constant", "--clip-norm", 0, "--weight-decay", 0, "--predict", "--threads", 1, "--imbalance", 100]
passes("profile", "--input", path("m.h5"), "--cluster", cpu_cluster(2), "--predict", "--layers-per-model", "ops", "--output", path("p.h5"))
with h5py.File(path("p.h5")) as file:
    last = file["boundary_bytes"].shape[0]
found = {}
for name, ranks, options in (("one", 1, []), ("stages", 2, ["--stages", f"0-1@a:1x1,1-{last}@a:1x1"]), ("rows", 2, ["--stages", f"0-{last}@a:1x2"])):
    passes(*train, "--data", path("exact.h5"), "--steps", STEPS, "--cluster", cpu_cluster(ranks), "--layers-per-model", "ops", *options, "--output", path(name), ranks=ranks)
    passes("export", "--checkpoint", path(name), "--output", path(name + "-w.h5"))
    with h5py.File(path(name + "/run.h5")) as file:
        found[name] = file["train/loss"][()], weights(name + "-w.h5")
weight = begin = {name: value.astype(np.float64) for name, value in begin.items()}
for step in range(STEPS):
    loss = score(weight, images[step], labels[step])[0]
    for name, (losses, _) in found.items():
        check(abs(losses[step] - loss) < 1e-5 * loss, f"{name}, step {step}: loss {losses[step]}, NumPy's {loss}")
    weight = descend(weight, images[step], labels[step])
for name, (_, its) in found.items():
    off = max(np.abs(its[key] - weight[key]).max() for key in weight)
    check(off < 1e-5, f"{name}: weights are {off:.2g} from NumPy's")
check(np.array_equal(found["one"][0], found["stages"][0]) and all(np.array_equal(found["one"][1][key], found["stages"][1][key]) for key in weight),
      "two stages have the bits of one device")

# Held-out images, in any shape of labels; an epoch of drawn rows reads each image once.
images, labels = draw(7)
for shape in ((7, SIZE, SIZE), (7, SIZE * SIZE)):
    write("held.h5", images, labels.reshape(shape))
    told = json.loads(passes("evaluate", "--input", path("m.h5"), "--checkpoint", path("one"), "--cluster", cpu_cluster(1), "--data", path("held.h5"), "--threads", 1,
                             "--json").stdout or "{}")
    loss, top1, count = score(found["one"][1], images, labels)
    check(abs(told.get("loss", 9) - loss) < 1e-5 * loss and abs(told.get("top1", 9) - top1) < 1e-9 and told.get("targets") == count,
          f"{told}: NumPy {loss} {top1} {count}")
every = np.where(labels == -100, 0, labels)
for name, pair in (("exact batches", (images[:6].reshape(2, 3, *images.shape[1:]), every[:6].reshape(2, 3, SIZE, SIZE))), ("bytes", (images[:6], every[:6].astype(np.uint8)))):
    write("held.h5", *pair)
    told = json.loads(passes("evaluate", "--input", path("m.h5"), "--checkpoint", path("one"), "--cluster", cpu_cluster(1), "--data", path("held.h5"), "--threads", 1,
                             "--json").stdout or "{}")
    loss, top1, count = score(found["one"][1], images[:6], every[:6])
    check(abs(told.get("loss", 9) - loss) < 1e-5 * loss and told.get("targets") == count == 6 * SIZE * SIZE, f"{name}: {told}: NumPy {loss} {count}")
same = np.repeat(images[:1], 6, 0), np.repeat(labels[:1], 6, 0)
write("same.h5", *same)
passes(*train, "--data", path("same.h5"), "--steps", 1, "--cluster", cpu_cluster(1), "--output", path("drawn"))
with h5py.File(path("drawn/run.h5")) as file:
    drawn = file["train/loss"][0]
check(abs(drawn - score(begin, *same)[0]) < 1e-5, f"drawn rows: {drawn}")

# Data that do not fit.
bad = ["--input", path("m.h5"), "--data", path("bad.h5"), "--microbatches", B, "--predict", "--threads", 1, "--cluster", cpu_cluster(1), "--output", path("no")]
for wrong, words in ((labels[:, 0], "shape of /labels"), (labels[:, :, 1:], "shape of /labels"), (labels[:5], "shape of /labels"), (labels[:, 0, 0], "shape of /labels"),
                     (np.where(labels == 1, CLASSES, labels), "label 5"), (np.where(labels == 1, -1, labels), "label -1")):
    write("bad.h5", images, wrong)
    refuses(3, words, *bad, "--steps", 1)
write("bad.h5", images, np.full_like(labels, -100))
refuses(3, "has no label", *bad, "--steps", 1)
write("bad.h5", images[:6][None].repeat(2, 0), np.stack([labels[:6], np.full_like(labels[:6], -100)]))
refuses(3, "batch 1 has no target", *bad, "--steps", 2)
write("bad.h5", images, np.full(7, -100, np.int32))
refuses(3, "label -100", *bad[:1], path("whole.h5"), *bad[2:], "--steps", 1)
write("bad.h5", images, labels)
refuses(3, "shape of /labels", *bad[:1], path("whole.h5"), *bad[2:], "--steps", 1)
passes("check", path("m.h5"))
end()
