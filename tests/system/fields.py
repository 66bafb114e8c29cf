"""usage: fields.py HAPT FOLDER. A model with two inputs, integers that index a table and real numbers, and two losses: the squared error
with real targets, and cross-entropy with integers. NumPy computes losses and steps of gradient descent in fp64. Some targets are missing
(NaN, -100): another number of them in each row."""
import json
import os
import shutil
import sys

import h5py
import numpy as np

from checking import check, cpu_cluster, end, passes, path, refuses, run

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tools"))
import hapt  # noqa: E402

ROWS, B, WORDS, VOCAB, NUMBERS, WIDTH, OUT, STEPS, RATE = 2, 3, 4, 11, 3, 8, 5, 4, 0.3
random = np.random.default_rng(5)


def model(name, loss_kind):
    """Per word: relu([table[word] | numbers W + b]) V + c, compared with OUT numbers, or with one of OUT classes."""
    real = loss_kind != "cross_entropy"
    graph = hapt.Graph("fields", rows=ROWS, vocab=VOCAB, fields={
        "words": ([WORDS], "int32"), "numbers": ([WORDS, NUMBERS], "fp32"),
        "answer": ([WORDS, OUT], "fp32") if real else ([WORDS], "int32")}, target="answer")
    table = graph.parameter("table", [VOCAB, WIDTH])
    x = graph.op("embedding", graph.fields["words"], table, None)
    y = graph.linear(graph.op("cast", graph.fields["numbers"]), "numbers_in", NUMBERS, WIDTH)
    z = graph.linear(graph.op("relu", x + y), "out", WIDTH, OUT)
    loss = getattr(graph, loss_kind)(z)
    graph.values.update({key: random.standard_normal([size for size in shape if size]).astype(np.float32) / 2
                         for key, kind, _, _, _, shape, *_ in graph.tensors if kind == "parameter"})
    graph.save(path(name), loss=loss)
    return dict(graph.values)


def write(name, **fields):
    with h5py.File(path(name), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        for key, value in fields.items():
            file["batches/" + key] = value


def draw(kind, *lead):
    """Fields of so many rows; more targets are missing from row to row."""
    words = random.integers(0, VOCAB, lead + (WORDS,)).astype(np.int32)
    numbers = random.standard_normal(lead + (WORDS, NUMBERS)).astype(np.float32)
    real = kind != "cross_entropy"
    answer = random.integers(0, OUT, lead + (WORDS,)).astype(np.int32) if not real else (
        random.standard_normal if kind == "mse" else random.random)(lead + (WORDS, OUT)).astype(np.float32)
    lacks = random.random(answer.shape) < np.linspace(0.1, 0.6, int(np.prod(lead))).reshape(lead + (1,) * (answer.ndim - len(lead)))
    return {"words": words, "numbers": numbers, "answer": np.where(lacks, np.nan if real else -100, answer).astype(answer.dtype)}


def of_batch(weight, kind, words, numbers, answer):
    """The mean loss of a batch, the number of its targets, and the gradients."""
    words, numbers = words.reshape(-1), numbers.reshape(-1, NUMBERS).astype(np.float64)
    inner = weight["table"][words] + numbers @ weight["numbers_in.weight"].T + weight["numbers_in.bias"]
    hidden = np.maximum(inner, 0)
    out = hidden @ weight["out.weight"].T + weight["out.bias"]
    if kind != "cross_entropy":
        answer = answer.reshape(-1, OUT).astype(np.float64)
        known, wanted = ~np.isnan(answer), np.nan_to_num(answer)
        count = int(known.sum())
        if kind == "mse":
            errors, slope = (out - wanted) ** 2, 2 * (out - wanted)
        else:
            share = 1 / (1 + np.exp(-out))
            errors, slope = -wanted * np.log(share) - (1 - wanted) * np.log(1 - share), share - wanted
        loss, slope = (errors * known).sum() / count, slope * known / count
    else:
        answer = answer.reshape(-1)
        has = answer != -100
        count = int(has.sum())
        share = np.exp(out - out.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        own = np.where(has, answer, 0)
        loss = -np.log(share[np.arange(len(own)), own])[has].mean()
        slope = (share - np.eye(OUT)[own]) * has[:, None] / count
    into = slope @ weight["out.weight"] * (inner > 0)
    table = np.zeros_like(weight["table"])
    np.add.at(table, words, into)
    return loss, count, {"table": table, "numbers_in.weight": into.T @ numbers, "numbers_in.bias": into.sum(0),
                         "out.weight": slope.T @ hidden, "out.bias": slope.sum(0)}


def weights(name):
    with h5py.File(path(name)) as file:
        return {key: file["parameters"][key][()].astype(np.float64) for key in file["parameters"]}


common = ["--microbatches", B, "--predict", "--threads", 1, "--imbalance", 100]
descent = ["--optimizer", "sgd", "--momentum", 0, "--learning-rate", RATE, "--lr-schedule", "constant", "--clip-norm", 0, "--weight-decay", 0]
for kind in ("mse", "bce", "cross_entropy"):
    real = kind != "cross_entropy"
    begin = model("m.h5", kind)
    rows = draw(kind, STEPS, ROWS * B)
    write("exact.h5", **rows)
    passes("profile", "--input", path("m.h5"), "--cluster", cpu_cluster(2), "--predict", "--layers-per-model", "ops", "--output", path("p.h5"), "--overwrite")
    with h5py.File(path("p.h5")) as file:
        last = file["boundary_bytes"].shape[0]
    found = {}
    for name, ranks, options in (("one", 1, []), ("stages", 2, ["--stages", f"0-1@a:1x1,1-{last}@a:1x1"]), ("rows", 2, ["--stages", f"0-{last}@a:1x2"])):
        name = kind + "-" + name
        passes("--input", path("m.h5"), *common, *descent, "--data", path("exact.h5"), "--steps", STEPS, "--cluster", cpu_cluster(ranks), "--layers-per-model", "ops", *options,
               "--output", path(name), ranks=ranks)
        passes("export", "--checkpoint", path(name), "--output", path(name + "-w.h5"))
        with h5py.File(path(name + "/run.h5")) as file:
            found[name] = file["train/loss"][()], weights(name + "-w.h5")
    weight = {key: value.astype(np.float64) for key, value in begin.items()}
    first = dict(weight)
    for step in range(STEPS):
        loss, _, slopes = of_batch(weight, kind, *(rows[key][step] for key in ("words", "numbers", "answer")))
        for name, (losses, _) in found.items():
            check(abs(losses[step] - loss) < 1e-5 * loss, f"{name}, step {step}: loss {losses[step]}, NumPy's {loss}")
        weight = {key: weight[key] - RATE * slopes[key] for key in weight}
    for name, (_, its) in found.items():
        off = max(np.abs(its[key] - weight[key]).max() for key in weight)
        check(off < 1e-5, f"{name}: weights are {off:.2g} from NumPy's")
    one, stages = found[kind + "-one"], found[kind + "-stages"]
    check(np.array_equal(one[0], stages[0]) and all(np.array_equal(one[1][key], stages[1][key]) for key in weight), f"{kind}: two stages have the bits of one device")

    # Held-out rows: the last step has copies without targets. An epoch reads each row once.
    held = draw(kind, 7)
    write("held.h5", **held)
    told = json.loads(passes("evaluate", "--input", path("m.h5"), "--checkpoint", path(kind + "-one"), "--cluster", cpu_cluster(1), "--data", path("held.h5"), "--threads", 1,
                             "--json").stdout or "{}")
    loss, count, _ = of_batch(one[1], kind, *(held[key] for key in ("words", "numbers", "answer")))
    check(abs(told.get("loss", 9) - loss) < 1e-5 * loss and told.get("targets") == count, f"{kind}: {told}: NumPy {loss} {count}")
    check(("perplexity" in told, "top1" in told) == (not real, not real), f"{kind}: {told}")
    whole = {key: value[:6] for key, value in held.items()}
    write("whole.h5", **whole)
    passes("--input", path("m.h5"), *common, *descent, "--data", path("whole.h5"), "--epochs", 1, "--cluster", cpu_cluster(1), "--output", path(kind + "-epoch"))
    with h5py.File(path(kind + "-epoch/run.h5")) as file:
        loss = file["train/loss"][()]
    check(len(loss) == 1 and abs(loss[0] - of_batch(first, kind, *(whole[key] for key in ("words", "numbers", "answer")))[0]) < 1e-5, f"{kind}: an epoch: {loss}")

    # Rows that are drawn: the same in every form of storage, and in a run that is interrupted. Data inside the model file.
    plain = draw(kind, 9)
    with h5py.File(path("packed.h5"), "w") as file:
        file.attrs["format"], file.attrs["version"] = "hapt-data", 1
        for key, value in plain.items():
            wide = value if key == "numbers" else value.astype(np.float64)
            file.create_dataset("batches/" + key, data=wide, chunks=(2,) + value.shape[1:], compression="gzip")
    write("plain.h5", **{**plain, "words": plain["words"].astype(np.uint8)})
    shutil.copy(path("m.h5"), path("with.h5"))
    with h5py.File(path("with.h5"), "a") as file:
        for key, value in plain.items():
            file["batches/" + key] = value
    drawn = {}
    for name, source in (("plain", ["--input", path("m.h5"), "--data", path("plain.h5")]), ("packed", ["--input", path("m.h5"), "--data", path("packed.h5")]),
                         ("with", ["--input", path("with.h5")])):
        name = kind + "-" + name
        for steps in ([2, 5] if name.endswith("plain") else [5]):
            passes(*source, *common, *descent, "--steps", steps, "--cluster", cpu_cluster(1), "--output", path(name), *(["--resume", "yes"] if steps == 5 and name.endswith("plain") else []))
        with h5py.File(path(name + "/run.h5")) as file:
            drawn[name] = file["train/loss"][()]
    first_loss, *_ = drawn.values()
    check(len(first_loss) == 5 and all(np.array_equal(first_loss, one) for one in drawn.values()), f"{kind}: drawn rows: {drawn}")
    write("other.h5", **{**plain, "words": (plain["words"] + 1) % VOCAB})
    said = run("--input", path("m.h5"), "--data", path("other.h5"), *common, *descent, "--steps", 6, "--cluster", cpu_cluster(1), "--output", path(kind + "-plain"), "--resume", "yes")
    check("the data differ" in said.stderr, f"{kind}: other rows are noticed: {said.stderr[-400:]}")
    told = passes("check", path("held.h5")).stdout
    check("3 named inputs" in told, told)

    # Data that do not fit.
    bad = ["--input", path("m.h5"), "--data", path("bad.h5"), *common, "--cluster", cpu_cluster(1), "--output", path("no"), "--steps", 1]
    none = np.full_like(held["answer"], np.nan if real else -100)
    for words, changed in (("words", {"words": None}), ("shape [n][4]", {"words": held["words"][:, 1:]}), ("the same rows", {"numbers": held["numbers"][:5]}),
                           ("11 at 0 of /batches/words", {"words": held["words"] * 0 + VOCAB}), ("-100 at 0 of /batches/words", {"words": held["words"] * 0 - 100}),
                           ("nan at 0 of /batches/numbers", {"numbers": held["numbers"] * np.nan}), ("has no target", {"answer": none}),
                           ("shape [n]", {"answer": held["answer"][:, :2]}), ("inf at" if real else "5 at", {"answer": np.full_like(held["answer"], np.inf if real else OUT)})):
        changed = {**held, **changed}
        write("bad.h5", **{key: value for key, value in changed.items() if value is not None})
        refuses(3, words, *bad)
    batches = {key: value[:6][None].repeat(2, 0) for key, value in held.items()}
    batches["answer"][1] = np.nan if real else -100
    batches["answer"][0] = 1
    write("bad.h5", **batches)
    refuses(3, "batch 1 has no target", *bad[:-1], 2)
    with h5py.File(path("bad.h5"), "w") as file:
        file.attrs["format"], file.attrs["version"], file["tokens"] = "hapt-data", 1, np.arange(10)
    refuses(3, "holds no /batches/words", *bad)
    write("bad.h5", **{**held, "words": np.stack([held["words"][:6], held["words"][1:]])})
    refuses(3, "the same rows", *bad)
    write("bad.h5", **{key: value[:0] for key, value in held.items()})
    refuses(3, "holds no row", *bad)
    with h5py.File(path("bad.h5"), "a") as file:
        del file["batches/words"]
        file.create_group("batches/words")
    refuses(3, "words", *bad)
    refuses(3, "come in their own order", *bad[:2], "--data", path("exact.h5"), *bad[4:-2], "--epochs", 1)
    passes("check", path("m.h5"))

# Models of tokens do not read them.
refuses(3, "holds named inputs", "model", "gpt", "--layers", 1, "--data", path("held.h5"), "--output", path("gpt.h5"))
passes("model", "gpt", "--layers", 1, "--hidden", 8, "--heads", 1, "--sequence", 4, "--vocab", VOCAB, "--output", path("gpt.h5"))
refuses(3, "holds named inputs", "--input", path("gpt.h5"), "--data", path("held.h5"), *common, "--cluster", cpu_cluster(1), "--output", path("no"), "--steps", 1)

# Graphs that do not fit.
def wrong(words, fields, target, of):
    """The loss of of(graph, the sum of all fields as activations) is refused."""
    graph = hapt.Graph("wrong", rows=2, fields=dict.fromkeys(fields, ([3], "fp32")), target=target)
    read = [graph.op("cast", graph.fields[name]) for name in fields if words in ("the loss alone", "is no field") or name not in (target, "other")]
    total = read[0]
    for one in read[1:]:
        total = total + one
    graph.save(path("wrong.h5"), loss=of(graph, graph.linear(total, "a", 3, 3)))
    refuses(3, words, "plan", "--input", path("wrong.h5"), "--cluster", cpu_cluster(1), "--predict", "--output", path("no.h5"))


wrong("is no field", ["x", "y"], "y", lambda graph, x: graph.op("mse", x, graph.linear(x, "b", 3, 3), name="loss"))
wrong("at most 64 fields", ["f%d" % k for k in range(65)], "f0", lambda graph, x: graph.mse(x))
wrong("compares with", ["x", "y", "other"], "y", lambda graph, x: graph.mse(x) + graph.op("mse", x, graph.fields["other"], name="second"))
wrong("the loss alone", ["x", "y"], "y", lambda graph, x: graph.mse(x))
wrong("its role does not fit", ["x", "y.z"], "y.z", lambda graph, x: graph.mse(x))
end()
