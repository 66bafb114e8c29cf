"""Exported models of PyTorch (tests/data/exported) train as there: whole, in two stages, and on two devices that share the rows.
usage: exported.py HAPT FOLDER"""
import ast
import glob
import json
import os
import subprocess
import sys

import h5py
import numpy as np

from checking import FOLDER, LONG, check, cpu_cluster, end, passes, path

sys.path.insert(0, "tests/coverage")
import steps  # noqa: E402

KEPT = "tests/data/exported"
PYTHON = os.environ.get("HAPT_TRANSFORMERS", "false")
TORCH = subprocess.run([PYTHON, "-c", "import torch, torchvision, transformers"], capture_output=True).returncode == 0


def changes(weights, before, reference):
    """How far the changes of all weights are from the reference: their 2-norms, and along a direction each."""
    off, size = np.zeros(2), 0.0
    for key, value in before.items():
        if key not in reference:
            continue
        change = (weights[key].astype(np.float64) - value).reshape(-1)
        found = np.array([np.linalg.norm(change), change @ np.cos(np.arange(len(change)))])
        off += (found - reference[key][()]) ** 2
        size += reference[key][0] ** 2
    return np.sqrt(off / size)


def follows(name, model, data, group, options):
    losses, weights = ours = steps.train(model, data, path(name), *options)
    expected = group["loss_fp64"][()]
    worst = np.max(np.abs(losses - expected) / expected)
    check(worst < 1e-5, f"{name}: losses differ by {worst:.2g}")
    off = changes(weights, steps.read_parameters(model), group["change"])
    # Rounding a weight near 1 to fp32 is up to 1e-3 of its change in a step of RATE.
    check(np.all(off < 3e-3), f"{name}: changes of weights differ by {off}")
    return ours


def trains(name, group):
    model, data = os.path.join(KEPT, name + ".h5"), path(name + "-data.h5")
    os.makedirs(path(name), exist_ok=True)
    named = ast.literal_eval(group.attrs["named"]) if "named" in group.attrs else None
    of_images = not named and bool(group.attrs["images"])
    steps.write_data(data, *(steps.named_batches(named) if named else steps.batches(group.attrs["microbatch"], of_images, group.attrs.get("pixels", ()))))
    rate = ["--learning-rate", steps.RATE[of_images]]
    check("good" in passes("check", model).stdout, name + ": the file is checked")
    ours = follows(name, model, data, group, rate)
    check(steps.same(ours, steps.train(model, data, path(name), *rate, *steps.stages(model, path(name), 2), ranks=2)), name + ": in two stages the same bits")
    whole = steps.stages(model, path(name), 2)  # the same layers as one stage on both devices
    whole[-1] = "0-%s@a:1x2" % whole[-1].split("-")[-1].split("@")[0]
    losses, _ = steps.train(model, data, path(name), *rate, *whole, ranks=2)
    apart = np.max(np.abs(losses - ours[0]) / ours[0])
    check(apart < 1e-5, f"{name}: shared rows differ by {apart:.2g}")
    rows = named["targets"][0][0] if named else int(group.attrs["microbatch"][0])
    made = json.loads(passes("plan", "--input", model, "--cluster", cpu_cluster(2, "2 GB"), "--predict", "--global-batch", 4 * rows, "--fix",
                             "rows=%d" % (2 * rows), "--output", path("plan.h5"), "--json", "--overwrite").stdout or "{}")
    check(made.get("microbatches") == 2, name + ": other rows of a microbatch fit")


def sends_skips_directly():
    """Four stages of a U-Net: long skips go from the way down to the way up, past the stages between."""
    model = os.path.join(KEPT, "pytorch_unet.h5")
    options = steps.stages(model, FOLDER, 4)
    made = json.loads(passes("plan", "--input", model, "--predict", "--microbatches", 4, *options, "--output", path("skips.h5"), "--json").stdout or "{}")
    far = {(it["from"], it["to"]) for it in made.get("messages", []) if it["to"] - it["from"] > 1}
    back = {(it["to"], it["from"]) for it in made.get("messages", []) if it["from"] - it["to"] > 1}
    check(far and far == back, f"long skips are messages of their own, there and back: {made.get('messages')}")


with h5py.File(os.path.join(KEPT, "reference.h5")) as reference:
    names = sorted(reference)
    check(names == sorted(os.path.basename(one)[:-3] for one in glob.glob(KEPT + "/*.h5") if "reference" not in one), "each model has a reference")
    for name in names if LONG else names[::2]:
        trains(name, reference[name])

sends_skips_directly()

# ---- the exporter itself ----
PROGRAM = """
import contextlib
import sys
import torch
sys.path.insert(0, "tests/coverage")
import models

sys.path.insert(0, "tools")
import hapt_export


def sort(x, head):
    x = torch.sort(x).values + torch.cumsum(x, 1)
    return head(torch.sort(x).values)


def changes_view(x, head):
    y = x * 2
    y[:, 0] = 0
    return head(y)


def draws(x, head):
    return head(x * torch.empty(1, 1).bernoulli_(0.5))


def switches_off(x, head):
    with torch.no_grad():
        x = head(x)
    return x + head.bias


def divides_by_rows(x, head):
    return head(x / x.shape[0])


def rounds(x, head):
    return head(x.to(torch.bfloat16).float())


class Wrong(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.head, self.function = torch.nn.Linear(3 * 8 * 8, models.CLASSES), function

    def forward(self, x):
        return self.function(x.flatten(1), self.head)


class Frozen(torch.nn.Module):
    # Only layer a can be packed: the weight of b is read by another product, too.

    def __init__(self):
        super().__init__()
        self.table, self.a, self.b, self.head = torch.nn.Embedding(64, 64), *(torch.nn.Linear(64, 64) for _ in range(3))
        for frozen in (self.a.weight, self.b.weight, self.b.bias):
            frozen.requires_grad_(False)

    def forward(self, tokens):
        x = torch.relu(self.a(self.table(tokens)))  # the bias trains: another operator adds it
        return self.head(torch.tanh(self.b(x) @ self.b.weight))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm, self.head = torch.nn.Embedding(64, 32), torch.nn.LayerNorm(32), torch.nn.Linear(32, 64, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.full((1,), 1.5))

    def forward(self, tokens):
        return self.head(self.norm(self.table(tokens)) * self.scale)


class Drops(torch.nn.Module):
    # Causal attention that drops weights.
    def __init__(self):
        super().__init__()
        self.table, self.qkv, self.head = torch.nn.Embedding(64, 32), torch.nn.Linear(32, 96), torch.nn.Linear(32, 64)

    def forward(self, tokens):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in self.qkv(self.table(tokens)).chunk(3, -1))
        return self.head(torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.share, is_causal=True).transpose(1, 2).flatten(2))


def model():
    torch.manual_seed(1)
    name = "%s"
    if name in ("tied", "tied_without", "on_meta"):
        with hapt_export.without_values() if name == "tied_without" else torch.device("meta") if name == "on_meta" else contextlib.nullcontext():
            made = Tied()
        return made, torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))
    if name == "several":  # labels of which several hold, with a loss of its own
        x, labels = torch.arange(12.0).reshape(2, 6) / 7, torch.tensor([[0, 1, 1, 0], [1, 0, 0.25, 0]])
        return torch.nn.Linear(6, 4), {"input": x}, labels, torch.nn.functional.binary_cross_entropy_with_logits
    if name in ("frozen", "drops", "drops_little"):
        made = Frozen() if name == "frozen" else Drops()
        made.share = 0.25 if name == "drops" else 1e-9
        return made, torch.randint(0, 64, (2, 16)), torch.randint(0, 64, (2, 16))
    return models.MODELS[name]() if name in models.MODELS else (Wrong(globals()[name]),) + models.images(8, 2)
"""


def exported(name, *words):
    with open(path(name + ".py"), "w") as file:
        file.write(PROGRAM % name)
    return subprocess.run([PYTHON, "tools/hapt_export.py", path(name + ".py"), "--output", path("made.h5"), *words], capture_output=True, text=True)


def same_graph(one, other):
    with h5py.File(one) as left, h5py.File(other) as right:
        return all(np.array_equal(left[key][()], right[key][()]) for key in ("operators/type", "operators/input", "operators/output", "operators/integer",
                                                                            "operators/real", "tensors/name", "tensors/kind"))


if TORCH:
    for name in names:
        done = exported(name)
        check(done.returncode == 0 and same_graph(path("made.h5"), os.path.join(KEPT, name + ".h5")), f"{name} is exported as before: {done.stderr[-300:]}")
        os.remove(path("made.h5"))
    for name, texts in (("sort", ("aten.sort.default x 2", "aten.cumsum.default")), ("changes_view", ("another view is read later",)), ("draws", ("random numbers",)),
                        ("switches_off", ("switches gradients off",)), ("divides_by_rows", ("depend on the number of rows",)),
                        ("rounds", ("a conversion to torch.bfloat16",))):
        done = exported(name)
        check(done.returncode == 3 and all(text in done.stderr for text in texts) and done.stderr.count("error:") == 1 and "hint:" in done.stderr and
              not os.path.exists(path("made.h5")), f"{name}: code {done.returncode}, {done.stderr[-300:]}")
    done = exported("frozen", "--frozen-weights", "nf4")
    with h5py.File(path("made.h5")) as file:
        types = [one.decode() for one in file["operators/type"]]
        check(types.count("linear_packed") == 1 and types.count("linear_t") == 2 and types.count("add") == 1 and file["parameters/a.weight"].shape == (64, 64), f"a frozen layer is packed: {types}")
    os.remove(path("made.h5"))
    done = exported("hf_GPT2", "--frozen-weights", "nf4")
    check(done.returncode == 3 and "no layer can be packed" in done.stderr and not os.path.exists(path("made.h5")), f"nothing is frozen: {done.stderr[-200:]}")
    # A model without values has the graph of one with values, tied weights too; hapt plans with it.
    for name in ("tied", "tied_without"):
        done = exported(name)
        check(done.returncode == 0, f"{name}: {done.stderr[-300:]}")
        os.rename(path("made.h5"), path(name + ".h5"))
    check(same_graph(path("tied.h5"), path("tied_without.h5")), "without values it is the same graph")
    with h5py.File(path("tied_without.h5")) as file:
        names = set(file["parameters"])
        check(len(names) == 4 and file["parameters/head.weight"].id.get_storage_size() == 0 and file["parameters/constant.1"][()] == 1.5,
              f"one tied matrix without values, and the buffer: {names}")
    passes("plan", "--input", path("tied_without.h5"), "--cluster", cpu_cluster(1), "--predict", "--microbatches", 2, "--output", path("tied-plan.h5"))
    done = exported("on_meta")
    check(done.returncode == 3 and "buffers without values" in done.stderr, f"buffers on a meta device: {done.stderr[-300:]}")
    check(exported("several").returncode == 0, "a loss of its own")
    with h5py.File(path("made.h5")) as model, h5py.File(path("several-data.h5"), "w") as file:
        x, labels = np.arange(12, dtype=np.float32).reshape(2, 6) / 7, np.array([[0, 1, 1, 0], [1, 0, 0.25, 0]], np.float32)
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        file["batches/input"], file["batches/targets"] = x[None], labels[None]
        share = 1 / (1 + np.exp(-(x @ model["parameters/weight"][()].T.astype(float) + model["parameters/bias"][()])))
    passes("--input", path("made.h5"), "--data", path("several-data.h5"), "--cluster", cpu_cluster(1), "--predict", "--microbatches", 1, "--steps", 1,
           "--output", path("several"), "--overwrite")
    with h5py.File(path("several", "run.h5")) as file:
        check(abs(file["train/loss"][0] + np.mean(labels * np.log(share) + (1 - labels) * np.log(1 - share))) < 1e-6, "its loss is NumPy's")
    os.remove(path("made.h5"))
    # Dropped weights of attention: losses differ from those of nearly no dropout.
    with h5py.File(path("drops-data.h5"), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        file["tokens"] = np.random.default_rng(3).integers(0, 64, 600).astype(np.uint16)
    losses = {}
    for name in ("drops", "drops_little"):
        check(exported(name).returncode == 0, f"{name} is exported")
        with h5py.File(path("made.h5")) as file:
            types = [one.decode() for one in file["operators/type"]]
        check(types.index("softmax") < types.index("dropout") < types.index("matmul", types.index("softmax")), f"weights are dropped: {types}")
        passes("--input", path("made.h5"), "--data", path("drops-data.h5"), "--cluster", cpu_cluster(1), "--predict", "--microbatches", 2, "--steps", 3,
               "--threads", 1, "--output", path("drops"), "--overwrite")
        with h5py.File(path("drops", "run.h5")) as file:
            losses[name] = file["train/loss"][()]
        os.remove(path("made.h5"))
    check(np.all(np.abs(losses["drops"] - losses["drops_little"]) > 1e-5) and np.all(np.abs(losses["drops"] - losses["drops_little"]) < 0.2), f"losses: {losses}")
    with open(path("none.py"), "w") as file:
        file.write("def other(): pass\n")
    for file, output, code, text in ((path("nowhere.py"), "x.h5", 3, "there is no Python file"), (path("none.py"), "x.h5", 3, "defines no function model()"),
                                     (path("rounds.py"), "x.h5", 3, "a conversion to"), (path("hf_GPT2.py"), path("no", "x.h5"), 6, "cannot be written")):
        done = subprocess.run([PYTHON, "tools/hapt_export.py", file, "--output", output], capture_output=True, text=True)
        check(done.returncode == code and done.stderr.count("error:") == 1 and text in done.stderr and "hint:" in done.stderr and
              "Traceback" not in done.stderr, f"{file}: code {done.returncode}: {done.stderr[-300:]}")
else:
    print("no PyTorch 2: nothing is exported")
end()
