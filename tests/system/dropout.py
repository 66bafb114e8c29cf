"""usage: dropout.py HAPT FOLDER. The masks of dropout depend on row and step alone. The first losses are those of NumPy with the same masks. All plans and a resumed run
have the same losses. Validation, evaluation and generation drop nothing. The inputs of adapters are dropped as well."""
import json
import os
import h5py
import numpy as np

from checking import LONG, check, cpu_cluster, end, passes, path, refuses
from numpy_gpt import gpt, weights_of
from philox import kept, philox

ROWS, LENGTH, VOCABULARY, LAYERS, HEADS, SEED = 8, 16, 64, 4, 2, 5
random = np.random.default_rng(4)
tokens = random.integers(0, VOCABULARY, (6, ROWS, LENGTH + 1))
with h5py.File(path("batches.h5"), "w") as file:
    file["batches"] = tokens
with h5py.File(path("text.h5"), "w") as file:
    file["tokens"] = random.integers(0, VOCABULARY, 2000).astype(np.uint16)


def model(name, *words):
    passes("model", "gpt", "--layers", LAYERS, "--hidden", 32, "--heads", HEADS, "--sequence", LENGTH, "--vocab", VOCABULARY, "--microbatch", 2,
           "--output", path(name), *words)
    return path(name)


def losses(name, file, *words, ranks=1, steps=4, data="batches.h5", rate="1e-2"):
    passes("--input", file, "--data", path(data), "--microbatches", ROWS // 2, "--steps", steps, "--learning-rate", rate, "--data-seed", SEED,
           "--lr-schedule", "constant", "--predict", "--threads", 1, "--output", path(name), *words, ranks=ranks)
    with h5py.File(path(name, "run.h5")) as run:
        return run["train/loss"][()]


def dropping(step, share):
    return lambda number, x: x * kept(x.shape, number, SEED, step, share) / (1 - share)


def loss_of(weight, batch, drop):
    logits = gpt(weight, batch[:, :-1], LAYERS, HEADS, drop)
    most = logits.max(-1, keepdims=True)
    log_p = logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))
    return -np.take_along_axis(log_p, batch[:, 1:, None], -1).mean()


check([int(word) for word in philox((0, 0, 0, 0), (0, 0))] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], "Random123's first known answer")
dropped, plain = model("dropped.h5", "--dropout", 0.25), model("plain.h5")
with h5py.File(dropped) as file:
    operators = [kind.decode() if isinstance(kind, bytes) else kind for kind in file["operators/type"][()]]
check(operators.count("dropout") == 2 * LAYERS + 1, f"{operators.count('dropout')} dropouts")
one = losses("one", dropped)
passes("--input", plain, "--data", path("batches.h5"), "--steps", 0, "--microbatches", ROWS // 2, "--predict", "--output", path("start"))
passes("export", "--checkpoint", path("start"), "--output", path("start.h5"))
start = weights_of(path("start.h5"))
expected = loss_of(start, tokens[0], dropping(0, 0.25))
check(abs(one[0] - expected) < 2e-6, f"the first loss is {one[0]}, in NumPy {expected}")
without = loss_of(start, tokens[0], lambda number, x: x)
check(abs(expected - without) > 1e-4 and abs(losses("plain", plain, steps=1)[0] - without) < 2e-6, f"without dropout: {without}")

# A step whose rate is 0 changes nothing but the masks.
still = losses("still", dropped, steps=2, rate=0)
check(abs(still[1] - loss_of(start, tokens[1], dropping(1, 0.25))) < 2e-6, "the second step's masks")

# Every plan.
two, four = cpu_cluster(2), cpu_cluster(4)
plans = {"rows": (2, ["--cluster", two, "--layers-per-model", 4, "--stages", "0-4@a:1x2"]),
         "stages": (2, ["--cluster", two, "--layers-per-model", 4, "--stages", "0-2@a:1x1,2-4@a:1x1", "--schedule", "1f1b"]),
         "tensor": (2, ["--cluster", two, "--layers-per-model", 4, "--stages", "0-4@a:1x2t2"]),
         "both": (4, ["--cluster", four, "--layers-per-model", 4, "--stages", "0-2@a:1x2,2-4@a:1x2t2", "--schedule", "1f1b"]),
         "recompute": (1, ["--recompute", "all"]),
         "searched": (3, ["--cluster", cpu_cluster(3)])}
for name, (ranks, words) in plans.items():
    found = losses(name, dropped, *words, ranks=ranks)
    check(np.abs(found - one).max() < 2e-5, f"{name}: {found}, not {one}")
check(np.array_equal(losses("again", dropped, *plans["both"][1], ranks=4), losses("both", dropped, *plans["both"][1], "--overwrite", ranks=4)),
      "two runs of a plan")
check(np.array_equal(losses("recompute2", dropped, "--recompute", "all"), losses("keep", dropped, "--recompute", "no")), "recomputed masks")

# A run that goes on has the masks of one that did not stop; another --data-seed changes them.
for name, words in (("parts", []), ("other", ["--data-seed", SEED + 1])):
    losses(name, dropped, "--stop-after", 2)
    said = passes("--input", dropped, "--data", path("batches.h5"), "--resume", "--output", path(name), "--predict", "--threads", 1, *words).stderr
    with h5py.File(path(name, "run.h5")) as file:
        check(np.array_equal(file["train/loss"][()], one) == (not words), f"resumed: {words}")
    check(said.count("the masks of dropout differ") == bool(words), f"{words}: {said}")

# Held-out data are read without dropout, in training, evaluation and generation.
held = ["--validation-data", path("text.h5"), "--validate-every", 1]
losses("held", dropped, *held, steps=2, rate=0)
losses("held-plain", plain, *held, steps=2, rate=0)
values = []
for name in ("held", "held-plain"):
    with h5py.File(path(name, "run.h5")) as file:
        values.append(file["train/validation_loss"][()])
check(np.array_equal(*values), f"validation: {values}")
said = [passes("evaluate", "--input", file, "--checkpoint", path(name), "--data", path("text.h5"), "--json").stdout for file, name in ((dropped, "held"), (plain, "held-plain"))]
check(json.loads(said[0])["loss"] == json.loads(said[1])["loss"], f"evaluation: {said}")
said = [passes("generate", "--input", file, "--checkpoint", path(name), "--prompt-tokens", "1,2,3", "--max-tokens", 5).stdout for file, name in ((dropped, "held"), (plain, "held-plain"))]
check(said[0] == said[1] and said[0].strip(), f"generation: {said}")

# Adapters: only their inputs are dropped.
ADAPTED = ["import", os.path.join("tests", "data", "hf", "qwen3"), "--sequence", 16, "--microbatch", 2, "--output"]
passes(*ADAPTED, path("adapted.h5"), "--lora", "rank=2,dropout=0.5,target=q_proj,down_proj")
with h5py.File(path("adapted.h5")) as file:
    names = [name.decode() if isinstance(name, bytes) else name for name in file["operators/name"][()]]
    check(sum(name.endswith(".lora_dropout") for name in names) == sum(name.endswith(".lora_A") for name in names) > 0, "an adapter without dropout")
    vocabulary = int(file["parameters/model.embed_tokens.weight"].shape[0])
with h5py.File(path("few.h5"), "w") as file:
    file["batches"] = random.integers(0, vocabulary, (3, ROWS, LENGTH + 1))
found = [losses(f"adapted{ranks}", path("adapted.h5"), *words, ranks=ranks, steps=3, data="few.h5")
         for ranks, words in ((1, []), (2, ["--cluster", two]))]
check(np.abs(found[0] - found[1]).max() < 2e-5, f"adapters: {found}")
passes(*ADAPTED, path("bare.h5"), "--lora", "rank=2,target=q_proj,down_proj")
bare = losses("bare", path("bare.h5"), steps=3, data="few.h5")
check(bare[0] == found[0][0] and bare[2] != found[0][2], f"B begins with zeros, so that dropout shows in later losses: {bare}, {found[0]}")
passes("export", "--checkpoint", path("adapted1"), "--format", "safetensors", "--output", path("adapter"))
with open(path("adapter", "adapter_config.json")) as file:
    check(json.load(file)["lora_dropout"] == 0.5, "adapter_config.json")

if LONG:
    half = model("half.h5", "--dropout", 0.25, "--dtype", "bf16")
    check(np.abs(losses("half-both", half, *plans["both"][1], ranks=4) - losses("half-one", half)).max() < 2e-2, "bf16")
    for family, words in (("bert", []), ("bert-moe", ["--experts", 4]), ("vit", ["--image", 16, "--patch", 4, "--classes", 10])):
        text = ["--sequence", LENGTH, "--vocab", VOCABULARY] if family != "vit" else []
        passes("model", family, "--layers", 2, "--hidden", 32, "--heads", HEADS, *text, "--microbatch", 2, "--dropout", 0.1, "--output", path(family + ".h5"), *words)
        with h5py.File(path(family + "-data.h5"), "w") as file:
            if text:
                file["batches"] = tokens
            else:
                file["images"] = random.integers(0, 255, (4, ROWS, 3, 16, 16)).astype(np.uint8)
                file["labels"] = random.integers(0, 10, (4, ROWS)).astype(np.int32)
        first = losses(family, path(family + ".h5"), data=family + "-data.h5")
        spread = losses(family + "4", path(family + ".h5"), "--cluster", four, ranks=4, data=family + "-data.h5")
        check(np.abs(first - spread).max() < 5e-5, f"{family}: {first}, {spread}")
passes("model", "gpt", "--layers", 1, "--hidden", 32, "--heads", HEADS, "--sequence", 2, "--vocab", VOCABULARY, "--microbatch", 2, "--dropout", 0.5,
       "--output", path("foreign.h5"))
with h5py.File(path("foreign.h5"), "r+") as file:  # keys that are no row keys
    kinds = [kind.decode() if isinstance(kind, bytes) else kind for kind in file["operators/type"][()]]
    names = [name.decode() if isinstance(name, bytes) else name for name in file["tensors/name"][()]]
    file["operators/input"][kinds.index("dropout"), 1] = names.index("tokens")
refuses(3, "row_keys", "--input", path("foreign.h5"), "--output", path("none"))
refuses(2, "no --dropout", "model", "llama", "--dropout", "0.1", "--output", path("none.h5"))
refuses(2, "dropout", "model", "gpt", "--dropout", "1", "--output", path("none.h5"))
refuses(2, "from 0 to below 1", "model", "llama", "--lora", "rank=2,dropout=1,target=q_proj", "--output", path("none.h5"))
end()
