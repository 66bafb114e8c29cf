"""usage: documents.py HAPT FOLDER. Rows hold documents that token 0 ends. The losses of a GPT are those of NumPy for each document alone. A llama
loses the same with its documents in rows of their own. Plans, validation, evaluation and generation agree. HAPT_LONG=1: more plans."""
import json

import h5py
import numpy as np

from checking import LONG, check, cpu_cluster, end, passes, path, refuses
from numpy_gpt import gpt, weights_of

ROWS, T, V, LAYERS, HEADS, STEPS = 8, 24, 48, 3, 2, 4
random = np.random.default_rng(11)


def documents(count):
    """Random texts of 1 to 20 tokens, each with token 0 behind it."""
    return [np.append(random.integers(1, V, random.integers(0, 20)), 0) for _ in range(count)]


stream = np.concatenate(documents(900))
held = np.concatenate(documents(60))[:9 * T + 1 + 5]
batches = stream[:STEPS * ROWS * (T + 1)].reshape(STEPS, ROWS, T + 1)
for name, values in (("batches", batches), ("tokens", stream), ("held", held)):
    with h5py.File(path(name + ".h5"), "w") as file:
        file["batches" if name == "batches" else "tokens"] = values.astype(np.int32)


def pieces(row):
    """Documents of a row of T + 1 tokens: inputs and their targets. The token that ends a document has none."""
    start = 0
    for i in range(T):
        if row[i] == 0 or i == T - 1:
            yield row[start:i + 1], row[start + 1:i + 1 + (row[i] != 0)]
            start = i + 1


def losses_of(weights, rows):
    """Of all targets, each document alone."""
    found = []
    for row in rows:
        for inputs, targets in pieces(row):
            logits = gpt(weights, inputs[None], LAYERS, HEADS)[0][:len(targets)]
            most = logits.max(-1, keepdims=True)
            log_p = logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))
            found.extend(-log_p[np.arange(len(targets)), targets])
    return np.array(found)


def model(name, family, *words):
    passes("model", family, "--layers", LAYERS, "--hidden", 32, "--heads", HEADS, "--sequence", T, "--vocab", V, "--microbatch", 2, *words, "--output",
           path(name))
    return path(name)


def train(name, file, *words, ranks=1, data="batches.h5", microbatches=ROWS // 2):
    done = passes("--input", file, "--data", path(data), "--microbatches", microbatches, "--steps", STEPS, "--learning-rate", "1e-2", "--lr-schedule",
                  "constant", "--predict", "--threads", 1, "--imbalance", 1000, "--cluster", cpu_cluster(ranks), *words, "--output", path(name),
                  ranks=ranks)
    if done.returncode != 0:
        return np.full(STEPS, np.nan), np.full(STEPS, np.nan)
    with h5py.File(path(name, "run.h5")) as run:
        return run["train/loss"][()], run["train/gradient_norm"][()]


def exported(name):
    passes("export", "--checkpoint", path(name), "--output", path(name + ".weights.h5"))
    return weights_of(path(name + ".weights.h5"))


file = model("gpt.h5", "gpt", "--document-end", 0)
passes("--input", file, "--data", path("batches.h5"), "--steps", 0, "--microbatches", ROWS // 2, "--predict", "--output", path("start"))
expected = losses_of(exported("start"), batches[0]).mean()
held_out = ["--validation-data", path("held.h5"), "--validate-every", STEPS]
one, norm = train("one", file, *held_out)
check(abs(one[0] / expected - 1) < 2e-6, f"the first loss is {one[0]}, in NumPy {expected}")
blind, _ = train("blind", model("blind.h5", "gpt"))
check(abs(blind[0] / expected - 1) > 1e-4, f"documents change the loss {blind[0]}")

# Held-out rows: windows of T tokens.
rows = np.stack([held[r * T:r * T + T + 1] for r in range((len(held) - 1) // T)])
trained = exported("one")
wanted = losses_of(trained, rows)
with h5py.File(path("one", "run.h5")) as run:
    validation = run["train/validation_loss"][-1]
check(abs(validation / wanted.mean() - 1) < 2e-6, f"validation {validation}, NumPy {wanted.mean()}")
found = json.loads(passes("evaluate", "--input", file, "--checkpoint", path("one"), "--data", path("held.h5"), "--cluster", cpu_cluster(1), "--threads",
                          1, "--json").stdout or "{}")
check(found.get("loss") == validation and found["targets"] == len(wanted), f"evaluation: {found}, {len(wanted)} targets, {validation}")

# A stream: the rows that the seed chooses, and their targets, are the same for all plans. Its first loss counts the targets of its rows.
def plans_of(last):
    """Of a model of so many layers."""
    middle = last // 2
    stages = ["--stages", f"0-{middle}@a:1x1,{middle}-{last}@a:1x1"]
    plans = [("recompute", 2, [*stages, "--recompute", "every=2"]), ("rows", 2, ["--program", "data", "--stages", f"0-{last}@a:1x2"]),
             ("tensor", 2, ["--stages", f"0-{last}@a:1x2t2"])]
    loops = ",".join(f"{last * k // 4}-{last * (k + 1) // 4}@a:1x1" for k in range(4))
    return plans + [("split", 4, ["--program", "data", "--stages", f"0-{middle}@a:1x2,{middle}-{last}@a:1x2", "--split-backward", "yes"]),
                    ("loops", 2, ["--schedule", "interleaved", "--stages", loops]),
                    ("offload", 2, [*stages, "--offload", "optimizer"])] * LONG


llama = model("llama.h5", "llama", "--kv-heads", 1, "--document-end", 0)
for family, own in (("gpt", file), ("llama", llama)):
    alone = {data: train(f"{family}-{data}", own, data=data + ".h5") for data in ("batches", "tokens")}
    with h5py.File(path(family + "-batches", "run.h5")) as run:
        last = len(run["layers/end_op"])
    for name, ranks, words in plans_of(last):
        for data in ("batches", "tokens") if name == "rows" else ("batches",):
            losses, norms = train(f"{family}-{name}-{data}", own, *words, ranks=ranks, data=data + ".h5")
            worst = max(np.abs(losses / alone[data][0] - 1).max(), np.abs(norms / alone[data][1] - 1).max() / 10)
            check(worst < 1e-5, f"{family}, {name}, {data}: losses {losses}, on one rank {alone[data][0]}: {worst:.1e}")

# A llama with each document in a row of its own, which has no targets behind it.
most = max(sum(len(list(pieces(row))) for row in batch) for batch in batches)
most += most % 2
apart, targets = np.zeros((STEPS, most, T), np.int32), np.full((STEPS, most, T), -100, np.int32)
for step, batch in enumerate(batches):
    for r, (inputs, aims) in enumerate(piece for row in batch for piece in pieces(row)):
        apart[step, r, :len(inputs)], targets[step, r, :len(aims)] = inputs, aims
with h5py.File(path("apart.h5"), "w") as file_:
    file_["batches"], file_["targets"] = apart, targets
for family, own, words in (("gpt", "blind.h5", []), ("llama", "whole.h5", ["--kv-heads", 1])):
    losses, norms = train(family + "-apart", model(own, family, *words, "--overwrite", "yes"), data="apart.h5", microbatches=most // 2)
    with h5py.File(path(family + "-batches", "run.h5")) as run:
        worst = max(np.abs(losses / run["train/loss"][()] - 1).max(), np.abs(norms / run["train/gradient_norm"][()] - 1).max() / 10)
    check(worst < 2e-5, f"{family}: documents in rows of their own lose {losses}: {worst:.1e}")

# A prompt with two documents goes on like its second one.
for family, own in (("gpt", "gpt.h5"), ("llama", "llama.h5")):
    done = passes("generate", "--input", path(own), "--checkpoint", path(family + "-batches"), "--cluster", cpu_cluster(1), "--threads", 1,
                  "--prompt-tokens", "7,9,4,0,5,6;5,6;3,0,5,6", "--max-tokens", 5, "--json")
    texts = [text["tokens"][-5:] for text in json.loads(done.stdout)["sequences"]] if done.returncode == 0 else [0]
    check(len(texts) == 3 and texts[0] == texts[1] == texts[2], f"{family}: {texts}")

# A wrong token is noticed; another one in a resumed run, too. The default may be given.
with h5py.File(path("ends.h5"), "w") as file_:
    file_["batches"] = np.zeros((1, ROWS, T + 1), np.int32)
with h5py.File(path("endless.h5"), "w") as file_:
    file_["batches"] = random.integers(1, V, (1, ROWS, T + 1)).astype(np.int32)
short = ["--microbatches", ROWS // 2, "--steps", 1, "--predict", "--threads", 1]
refuses(3, "tokens are all 0, which ends documents", "--input", path("gpt.h5"), "--data", path("ends.h5"), *short, "--output", path("ends"))
done = passes("--input", path("gpt.h5"), "--data", path("endless.h5"), *short, "--output", path("endless"))
check("token 0, which ends documents (--document-end), is not among the first" in done.stderr, f"no warning: {done.stderr[-500:]}")
passes("--input", path("gpt.h5"), "--data", path("batches.h5"), *short[:2], "--steps", 2, *short[4:], "--stop-after", 1, "--output", path("other"))
other = model("other-end.h5", "gpt", "--document-end", 3)
done = passes("train", "--input", other, "--data", path("batches.h5"), "--threads", 1, "--resume", "--output", path("other"))
check("hapt: warning:" in done.stderr and "data" in done.stderr, f"no warning of other data: {done.stderr[-500:]}")
with h5py.File(model("default.h5", "gpt", "--document-end", -1)) as file_:
    check(b"positions" not in file_["tensors/role"][()] and "positions" not in file_["tensors/role"][()], "--document-end -1 has positions")

def damaged(change):
    """The GPT's model file, changed."""
    with open(path("gpt.h5"), "rb") as source, open(path("damaged.h5"), "wb") as copy:
        copy.write(source.read())
    with h5py.File(path("damaged.h5"), "r+") as file_:
        change(file_)
    return path("damaged.h5")


def setting(value):
    """document-end becomes `value`."""
    def change(file_):
        names = [name.decode() if isinstance(name, bytes) else name for name in file_["settings/name"][()]]
        values = [value_.decode() if isinstance(value_, bytes) else value_ for value_ in file_["settings/value"][()]]
        values[names.index("document-end")] = value
        del file_["settings/value"]
        file_.create_dataset("settings/value", data=np.array([value_.encode() for value_ in values], dtype="S40"))
    return change


def targets_as_positions(file_):
    """The table of positions is read at the targets."""
    types = [kind.decode() if isinstance(kind, bytes) else kind for kind in file_["operators/type"][()]]
    inputs = file_["operators/input"][()]
    loss = types.index("cross_entropy")
    inputs[[row for row, kind in enumerate(types) if kind == "embedding"][1], 0] = inputs[loss, 1]
    file_["operators/input"][...] = inputs


for change, text in ((setting("x"), "no token that ends documents"), (setting(str(V)), "is outside the vocabulary"),
                     (targets_as_positions, "cannot read the input targets")):
    refuses(3, text, "--input", damaged(change), "--data", path("batches.h5"), *short, "--output", path("x"))
refuses(2, "is no token", "model", "gpt", "--vocab", V, "--document-end", V, "--output", path("x.h5"))
refuses(2, "have no --document-end", "model", "bert", "--vocab", V, "--document-end", 1, "--output", path("x.h5"))
end()
