"""Graphs of Python (tools/hapt.py) and hapt ops. A GPT trains as the family's, bit for bit. Parallel blocks and a network of images
are compared with PyTorch, whole and in stages. Each mistake in a graph has its one error. usage: graph.py HAPT FOLDER"""
import importlib.util
import json
import sys

import h5py
import numpy as np

from rounding import to_bf16, to_int8, to_nf4
from checking import check, cpu_cluster, end, passes, path, refuses

spec = importlib.util.spec_from_file_location("hapt", "tools/hapt.py")
hapt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hapt)
random = np.random.default_rng(2026)
STEPS, ROWS, MICROBATCHES = 5, 2, 2
OPTIMIZER = ["--optimizer", "adamw", "--learning-rate", "1e-3", "--lr-schedule", "constant", "--beta1", "0.9", "--beta2", "0.95", "--epsilon", "1e-8",
             "--weight-decay", "0", "--clip-norm", "0", "--predict", "--microbatches", MICROBATCHES, "--steps", STEPS, "--threads", 1, "--overwrite"]


def train(model, name, *options, ranks=1):
    """Losses, and the trained weights. name: of the data; None: those in the model file."""
    data = ["--data", path(name + "-data.h5")] if name else []
    passes("--input", model, *data, *OPTIMIZER, *options, "--output", path("run"), ranks=ranks)
    passes("export", "--checkpoint", path("run", "checkpoints", "step-%08d" % STEPS), "--output", path("w.h5"), "--overwrite")
    with h5py.File(path("run", "run.h5")) as file:
        losses = file["train/loss"][()]
    weights = {}
    with h5py.File(path("w.h5")) as file:
        file["parameters"].visititems(lambda key, item: weights.__setitem__(key, item[()]) if isinstance(item, h5py.Dataset) else None)
    return losses, weights


def same(left, right):
    return np.array_equal(left[0], right[0]) and left[1].keys() == right[1].keys() and all(np.array_equal(left[1][k], right[1][k]) for k in left[1])


def write_data(name, **datasets):
    with h5py.File(path(name + "-data.h5"), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        for key, value in datasets.items():
            file[key] = value


# ---- the family's GPT ----
LAYERS, D, HEADS, T, V = 2, 32, 4, 16, 64


def gpt():
    graph = hapt.Graph("mine", ROWS, sequence=T, vocab=V, seed=7)
    wte, wpe = graph.parameter("wte.weight", [V, D]), graph.parameter("wpe.weight", [T, D])
    x = graph.op("embedding", graph.tokens, wte, wpe, name="embedding")

    def linear(x, name, width, out, std=0.02):
        return graph.op("linear", x, graph.parameter(name + ".weight", [width, out], std), graph.parameter(name + ".bias", [out], init="zero"), name=name)

    residual = 0.02 / np.sqrt(2.0 * LAYERS)
    for k in range(LAYERS):
        h = "h.%d." % k
        y = linear(graph.layer_norm(x, h + "ln_1", D), h + "attn.c_attn", D, 3 * D)
        x = x + linear(graph.op("attention", y, name=h + "attn", integers=[HEADS, 1]), h + "attn.c_proj", D, D, residual)
        y = graph.op("gelu", linear(graph.layer_norm(x, h + "ln_2", D), h + "mlp.c_fc", D, 4 * D))
        x = x + linear(y, h + "mlp.c_proj", 4 * D, D, residual)
    logits = graph.linear(graph.layer_norm(x, "ln_f", D), "lm_head", D, V, bias=False)
    graph.save(path("mine.h5"), graph.cross_entropy(logits))


gpt()
batches = random.integers(0, V, (STEPS, ROWS * MICROBATCHES, T + 1)).astype(np.int32)
write_data("tokens", batches=batches)
passes("model", "gpt", "--layers", LAYERS, "--hidden", D, "--heads", HEADS, "--sequence", T, "--vocab", V, "--microbatch", ROWS, "--seed", 7,
       "--tied-embeddings", "no", "--output", path("family.h5"))
check("good" in passes("check", path("mine.h5")).stdout, "a file of Python is checked")
family = train(path("family.h5"), "tokens")
check(same(train(path("mine.h5"), "tokens"), family), "a GPT of Python trains as the family's, bit for bit")
with h5py.File(path("mine.h5"), "r+") as file:  # data and weights in the file itself
    file["batches"] = batches
check(same(train(path("mine.h5"), None), family), "the same with data in the model file")
valued = hapt.Graph("valued", 1, sequence=4, vocab=4)
stack = np.arange(2 * 3 * 4, dtype=np.float32).reshape(2, 3, 4)
valued.parameter("a.*.b", [2, 3, 4], value=stack)
valued.save(path("valued.h5"), valued.op("cross_entropy", valued.op("copy", valued.tokens), valued.targets))
with h5py.File(path("valued.h5")) as file:
    check(np.array_equal(file["parameters/a.1.b"][()], stack[1]) and "a.*.b" not in file["parameters"], "a stack is written element by element")
with h5py.File(path("w.h5")) as exported, h5py.File(path("mine.h5"), "r+") as file:
    exported.copy("parameters", file)
passes("model", "gpt", "--layers", LAYERS, "--hidden", D, "--heads", HEADS, "--sequence", T, "--vocab", V, "--microbatch", ROWS, "--tied-embeddings", "no",
       "--weights", path("mine.h5"), "--data", path("mine.h5"), "--output", path("copied.h5"))
check(same(train(path("mine.h5"), None), train(path("copied.h5"), None)), "weights and data of a file of Python begin another model")

# ---- a model without values is to plan with ----
unknown = hapt.Graph("unknown", ROWS, sequence=T, vocab=V)
table = unknown.parameter("table", [V, D], value=hapt.NoValue((V, D)))
out = unknown.parameter("out", [V, D], value=hapt.NoValue((V, D)))
logits = unknown.op("linear_t", unknown.op("embedding", unknown.tokens, table, None), out, None)
unknown.save(path("unknown.h5"), unknown.cross_entropy(logits))
planned = json.loads(passes("plan", "--input", path("unknown.h5"), "--cluster", cpu_cluster(1), "--predict", "--microbatches", 2, "--json",
                            "--output", path("unknown-plan.h5")).stdout)
check(planned["simulated_s"] > 0, "it is planned")
refuses(3, "was never written", "--input", path("unknown.h5"), "--data", path("tokens-data.h5"), "--cluster", cpu_cluster(1), "--predict", "--steps", 1,
        "--microbatches", MICROBATCHES, "--output", path("unknown"))
write_data("later", batches=batches)
with h5py.File(path("later-data.h5"), "r+") as file:
    file.attrs["version"] = 2
refuses(3, "has version 2", "--input", path("mine.h5"), "--data", path("later-data.h5"), "--predict", "--steps", 1, "--output", path("later"))
gpt()
two = cpu_cluster(2)


def halves(model):
    """Options for two stages."""
    passes("profile", "--input", model, "--cluster", two, "--predict", "--output", path("profile.h5"), "--overwrite")
    with h5py.File(path("profile.h5")) as file:
        layers = len(file["boundary_bytes"])
    return ["--cluster", two, "--stages", f"0-{layers // 2}@a:1x1,{layers // 2}-{layers}@a:1x1"]


check(same(train(path("mine.h5"), "tokens", *halves(path("mine.h5")), ranks=2), family), "the same in two stages")


# ---- packed weights train as those that NumPy rounds ----

def adapted(values, packed):
    """Token embeddings and a frozen layer, packed or not, beside one that trains."""
    graph = hapt.Graph("adapted", ROWS, sequence=T, vocab=V)
    x = graph.op("embedding", graph.tokens, graph.parameter("table", [V, D], value=values["table"]), None)
    frozen = graph.parameter("frozen", [V, D], value=values["frozen"], trainable=False, packed=packed)
    shift = graph.parameter("shift", [V], value=values["shift"], trainable=False)
    logits = graph.op("linear_packed" if packed else "linear_t", x, frozen, shift) + graph.op("linear_t", x, graph.parameter("own", [V, D], value=values["own"]), None)
    graph.save(path("adapted.h5"), graph.cross_entropy(logits))
    return path("adapted.h5")


starts = {name: random.normal(0, 0.3, (V, D)).astype(np.float32) for name in ("table", "frozen", "own")}
starts["shift"] = random.normal(0, 0.3, V).astype(np.float32)
for packed, rounding in (("nf4", to_nf4), ("int8", to_int8), ("bf16", to_bf16)):
    ours = train(adapted(starts, packed), "tokens")
    theirs = train(adapted({**starts, "frozen": rounding(starts["frozen"])}, None), "tokens")
    check(same(ours, theirs) and not np.array_equal(ours[1]["own"], starts["own"]), f"{packed} trains as what NumPy rounds, bit for bit: {ours[0]}, {theirs[0]}")
    two_stages = train(adapted(starts, packed), "tokens", *halves(adapted(starts, packed)), ranks=2)
    check(same(two_stages, ours), f"{packed} in two stages")

other = json.loads(passes("plan", "--input", path("mine.h5"), "--cluster", two, "--predict", "--global-batch", 8, "--fix", "rows=4", "--output", path("p.h5"),
                          "--json").stdout)
check(other["microbatches"] == 2, "other rows of a microbatch fit")

# ---- PyTorch: parallel blocks, and a network of images with a branch ----
try:
    import torch
    import torch.nn.functional as F
except ImportError:
    torch = None
    print("no PyTorch: losses are not compared with it")


def values_of(graph_of):
    """A graph whose parameters all have values: those, and the file."""
    values = {}

    def value(name, shape, around=0.0, spread=0.1):
        values[name] = (around + spread * random.standard_normal(shape)).astype(np.float32)
        return values[name]
    graph_of(value)
    return values


def torch_train(values, loss_of, inputs, targets):
    weights = {name: torch.tensor(value.astype(np.float64), requires_grad=True) for name, value in values.items()}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=1e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(weights, inputs[step], targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), {name: weight.detach().numpy() for name, weight in weights.items()}


def compare(name, ours, theirs, values):
    """Losses within 1e-5; the difference of all weights within 1e-3 of their change (2-norms). Biases of keys have no gradient but rounding,
    and AdamW makes whole steps of that."""
    worst = np.max(np.abs(ours[0] - theirs[0]) / theirs[0])
    check(worst < 1e-5, f"{name}: losses differ by {worst:.2g}")
    norm = [np.sqrt(sum(np.sum((pair[0][key] - pair[1][key].astype(np.float64)) ** 2) for key in values)) for pair in ((theirs[1], ours[1]), (theirs[1], values))]
    off = norm[0] / norm[1]
    check(ours[1].keys() == values.keys() and off < 1e-3, f"{name}: changes of weights differ by {off:.2g}")


def parallel(value):
    graph = hapt.Graph("parallel", ROWS, sequence=T, vocab=V)

    def parameter(name, shape, **how):
        return graph.parameter(name, shape, value=value(name, shape, **how))

    def linear(x, name, width, out):
        return graph.op("linear_t", x, parameter(name + ".weight", [out, width]), parameter(name + ".bias", [out]), name=name)
    x = graph.op("embedding", graph.tokens, parameter("table", [V, D], spread=1.0), None)
    for k in range(LAYERS):
        y = graph.op("layer_norm", x, parameter("%d.norm.weight" % k, [D], around=1), parameter("%d.norm.bias" % k, [D]), reals=[1e-5])
        a = linear(graph.op("attention", linear(y, "%d.qkv" % k, D, 3 * D), integers=[HEADS, 1]), "%d.out" % k, D, D)
        x = x + a + linear(graph.op("gelu", linear(y, "%d.up" % k, D, 2 * D), integers=[1]), "%d.down" % k, 2 * D, D)
    graph.save(path("parallel.h5"), graph.cross_entropy(linear(x, "head", D, V)))


def parallel_loss(w, tokens, targets):
    x = w["table"][tokens]
    for k in range(LAYERS):
        def linear(name, x):
            return F.linear(x, w["%d.%s.weight" % (k, name)], w["%d.%s.bias" % (k, name)])
        y = F.layer_norm(x, [D], w["%d.norm.weight" % k], w["%d.norm.bias" % k], 1e-5)
        q, key, v = (part.reshape(len(tokens), T, HEADS, D // HEADS).transpose(1, 2) for part in linear("qkv", y).chunk(3, -1))
        scores = (q @ key.transpose(-1, -2) / np.sqrt(D // HEADS)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        a = (scores.softmax(-1) @ v).transpose(1, 2).reshape(len(tokens), T, D)
        x = x + linear("out", a) + linear("down", F.gelu(linear("up", y)))
    return F.cross_entropy(F.linear(x, w["head.weight"], w["head.bias"]).reshape(-1, V), targets.reshape(-1))


SIZE, CLASSES = 8, 5


def branch(value):
    """Convolutions whose input skips two of them."""
    graph = hapt.Graph("branch", ROWS, channels=3, image=SIZE, classes=CLASSES)

    def convolution(x, name, inside, out, kernel):
        weight = graph.parameter(name + ".weight", [out, inside, kernel, kernel], value=value(name + ".weight", [out, inside, kernel, kernel], spread=0.3))
        return graph.op("conv2d", x, weight, graph.parameter(name + ".bias", [out], value=value(name + ".bias", [out])), name=name,
                        integers=[1, kernel // 2])
    x = graph.op("relu", convolution(graph.op("cast", graph.images), "first", 3, 8, 3))
    y = convolution(graph.op("relu", convolution(x, "down", 8, 4, 3)), "up", 4, 8, 3)
    x = graph.op("mean_pool", graph.op("relu", y + convolution(x, "side", 8, 8, 1)))
    weight = graph.parameter("head.weight", [CLASSES, 8], value=value("head.weight", [CLASSES, 8]))
    x = graph.op("linear_t", x, weight, graph.parameter("head.bias", [CLASSES], value=value("head.bias", [CLASSES])))
    graph.save(path("branch.h5"), graph.cross_entropy(x))


def branch_loss(w, images, labels):
    def convolution(name, x):
        return F.conv2d(x, w[name + ".weight"], w[name + ".bias"], 1, w[name + ".weight"].shape[-1] // 2)
    x = F.relu(convolution("first", images))
    x = F.relu(convolution("up", F.relu(convolution("down", x))) + convolution("side", x)).mean((2, 3))
    return F.cross_entropy(F.linear(x, w["head.weight"], w["head.bias"]), labels)


images = random.standard_normal((STEPS, ROWS * MICROBATCHES, 3, SIZE, SIZE)).astype(np.float32)
labels = random.integers(0, CLASSES, (STEPS, ROWS * MICROBATCHES)).astype(np.int32)
write_data("images", images=images, labels=labels)
for name, graph_of, data in (("parallel", parallel, "tokens"), ("branch", branch, "images")):
    values = values_of(graph_of)
    ours = train(path(name + ".h5"), data)
    staged = train(path(name + ".h5"), data, *halves(path(name + ".h5")), ranks=2)
    check(same(staged, ours), name + ": in two stages the same bits")
    if torch:
        if name == "parallel":
            theirs = torch_train(values, parallel_loss, torch.tensor(batches[..., :-1]).long(), torch.tensor(batches[..., 1:]).long())
        else:
            theirs = torch_train(values, branch_loss, torch.tensor(images.astype(np.float64)), torch.tensor(labels).long())
        compare(name, ours, theirs, values)


# ---- mistakes ----
def mistake(text, make):
    graph = hapt.Graph("bad", ROWS, sequence=T, vocab=V)
    x = graph.op("embedding", graph.tokens, graph.parameter("table", [V, D]), None)
    x = make(graph, x)
    graph.save(path("bad.h5"), graph.cross_entropy(graph.linear(x, "head", D, V)))
    refuses(3, text, "plan", "--input", path("bad.h5"), "--cluster", two, "--predict", "--microbatches", 2, "--output", path("p.h5"), "--overwrite")


mistake("unknown type", lambda graph, x: graph.op("transmogrify", x))
mistake("dimension i of tensor mix.weight is 33, elsewhere 32", lambda graph, x: graph.linear(x, "mix", D + 1, D))
mistake("operator add: input 1 is not a tensor", lambda graph, x: graph.op("add", x))
mistake("operator add: add has 2 inputs and 1 outputs, and the file has more", lambda graph, x: graph.op("add", x, x, x))
mistake("heads", lambda graph, x: graph.op("attention", graph.linear(x, "qkv", D, 3 * D), integers=[5, 1]))
mistake("q and k have different lengths", lambda graph, x: graph.op(
    "grouped_attention", x, graph.op("strided_slice", x, integers=[1, 0, T - 1, 1]), graph.op("strided_slice", x, integers=[1, 1, T, 1]), integers=[2, 1]))
for text, groups, epsilon in (("not a multiple of the groups", 5, 1e-5), ("not a multiple of the groups", 0, 1e-5), ("epsilon is not in", 4, -1.0),
                              ("epsilon is not in", 4, 1.0)):
    mistake(text, lambda graph, x: graph.op("reshape", graph.op(
        "group_norm", graph.op("reshape", x, integers=[-1, T, D, 1]), graph.parameter("gamma", [T], init="one"), graph.parameter("beta", [T], init="zero"),
        integers=[groups], reals=[epsilon]), integers=[-1, T, D]))
mistake("do not have 5, 9 or 16 words", lambda graph, x: graph.op("linear_packed", x, graph.parameter("w", [D, 1, 7], trainable=False), None))
mistake("its bias trains", lambda graph, x: graph.op("linear_packed", x, graph.parameter("w", [D, D], trainable=False, packed="nf4"), graph.parameter("b", [D])))
mistake("relu_dx has no gradient", lambda graph, x: graph.op("relu_dx", x, x))


def edited(name, change, text):
    gpt()
    with h5py.File(path("mine.h5"), "r+") as file:
        change(file)
    refuses(3, text, "plan", "--input", path("mine.h5"), "--cluster", two, "--predict", "--microbatches", 2, "--output", path("p.h5"), "--overwrite")


def order(file):  # the first operator reads what the second makes
    row = file["operators/input"][0]
    row[0] = file["operators/output"][1, 0]
    file["operators/input"][0] = row


def halved(file):  # a shape without its dtype
    row = file["operators/output"][0, 0]
    file["tensors/shape"][row] = [ROWS, T, D, 0, 0]


edited("order", order, "before it is made")
edited("a shape alone", halved, "unknown kind, role, type")
edited("a dtype alone", lambda file: file["tensors/dtype"].__setitem__(file["operators/output"][0, 0], "fp32"), "only one of shape and dtype")
edited("version 1", lambda file: file.attrs.modify("version", 1), "unknown kind, role, type")
edited("version 3", lambda file: file.attrs.modify("version", 3), "version 3")
graph = hapt.Graph("names", 2, sequence=4, vocab=4)
graph.layer_norm(graph.op("embedding", graph.tokens, graph.parameter("table", [4, 8]), None), "norm", 8)
for wrong in (lambda: graph.parameter("table", [4]), lambda: graph.parameter("packed", [4, 32], packed="nf4"),
              lambda: graph.parameter("packed", [4, 16], trainable=False, packed="nf4"), lambda: graph.parameter("norm.1", [4]), lambda: graph.op("relu", graph.tokens, name="norm"),
              lambda: graph.input("positions"), lambda: graph.parameter("x", [2], value=np.zeros(3)), lambda: graph.op("add", valued.tokens),
              lambda: graph.save(path("none.h5"), valued.tokens)):
    try:
        wrong()
        check(False, "a mistake is refused")
    except ValueError:
        check(True, "a mistake is refused")
keys = graph.input("row_keys")
for _ in range(2):
    graph.op("dropout", graph.tokens, keys, reals=[0.5])
check([one[4] for one in graph.operators if one[1] == "dropout"] == [[0], [1]], "each dropout has its own number")
for wrong in (dict(sequence=4), dict(sequence=4, vocab=4, classes=2), dict(channels=3, image=8)):
    try:
        hapt.Graph("wrong", 2, **wrong)
        check(False, f"{wrong} is refused")
    except ValueError as error:
        check("give sequence and vocab" in str(error), f"{wrong}: {error}")

# ---- hapt ops ----
listed = json.loads(passes("ops", "--json").stdout)["operators"]
text = passes("ops").stdout
check(len(listed) >= 35 and len(text.splitlines()) == len(listed), f"hapt ops lists {len(listed)} operators")
check(all(len(line) <= 100 for line in text.splitlines()), "hapt ops fits 100 columns")
check(all(one["kernels"]["cpu"][0] == "fp32" and one["signature"] and one["types"] for one in listed), "each has a kernel on CPUs")
check(not any(one["name"].endswith(("_dx", "_dw", "_backward")) for one in listed), "no operators of backward passes")
check("integer[0] heads" in passes("ops", "attention").stdout, "hapt ops attention explains it")
refuses(2, 'no operator "attentoin"', "ops", "attentoin")
refuses(2, "do not contain", "ops", "relu_dx")
end()
