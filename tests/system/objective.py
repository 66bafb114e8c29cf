"""usage: objective.py HAPT FOLDER. Settings of what is trained for. After one step, parameters that --no-decay names have the bits of a run without weight decay, the others those of a
run with it: on one rank, two ranks that share the optimizer state, and with that state on the host. A resumed run keeps the option."""
import fnmatch
import h5py
import numpy as np

from checking import check, cpu_cluster, end, passes, path, refuses
from numpy_gpt import gpt, weights_of

random = np.random.default_rng(2)
with h5py.File(path("text.h5"), "w") as file:
    file["tokens"] = random.integers(0, 64, 3000).astype(np.uint16)
passes("model", "gpt", "--layers", 2, "--hidden", 32, "--heads", 2, "--sequence", 16, "--vocab", 64, "--microbatch", 2, "--output", path("m.h5"))
two = cpu_cluster(2)
PATTERNS = "wte.weight,h.0.*,*.c_fc.weight"
common = ["--input", path("m.h5"), "--data", path("text.h5"), "--microbatches", 4, "--learning-rate", "1e-2", "--lr-schedule", "constant", "--predict", "--threads", 1]


def weights(name, *words, ranks=1, steps=1):
    passes(*common, "--steps", steps, "--output", path(name), *words, ranks=ranks)
    return exported(name)


def exported(name):
    passes("export", "--checkpoint", path(name), "--output", path(name + ".h5"))
    found = {}
    with h5py.File(path(name + ".h5")) as file:
        file["parameters"].visititems(lambda key, item: found.update({key: item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


places = {"one": (1, []), "two": (2, ["--cluster", two, "--layers-per-model", 2, "--program", "data", "--stages", "0-2@a:1x2"]),
          "host": (1, ["--offload", "optimizer"])}
for place, (ranks, words) in places.items():
    decayed, plain, mixed = (weights(place + name, *words, *options, ranks=ranks)
                             for name, options in (("with", ["--weight-decay", "0.5"]), ("without", ["--weight-decay", "0"]),
                                                   ("mixed", ["--weight-decay", "0.5", "--no-decay", PATTERNS])))
    named = [name for name in mixed if any(fnmatch.fnmatch(name, pattern) for pattern in PATTERNS.split(","))]
    differ = [name for name in mixed if not np.array_equal(decayed[name], plain[name])]
    check(len(named) > 8 and len(set(named) & set(differ)) >= 4 and len(set(differ) - set(named)) >= 3, f"{place}: {named}, {differ}")
    for name in mixed:
        check(np.array_equal(mixed[name], (plain if name in named else decayed)[name]), f"{place}: {name}")

whole = weights("whole", "--weight-decay", "0.5", "--no-decay", PATTERNS, steps=4)
weights("parts", "--weight-decay", "0.5", "--no-decay", PATTERNS, "--stop-after", 2, steps=4)
passes("--input", path("m.h5"), "--data", path("text.h5"), "--resume", "--output", path("parts"), "--predict", "--threads", 1)
resumed = exported("parts")
check(all(np.array_equal(whole[name], resumed[name]) for name in whole), "a resumed run")

# Label smoothing: the change of the weights in one step of SGD is NumPy's gradient of the smoothed loss; the printed loss is the plain one.
tokens = h5py.File(path("text.h5"))["tokens"][()].astype(int)[:2 * 17 * 4].reshape(1, 8, 17)
with h5py.File(path("batch.h5"), "w") as file:
    file["batches"] = tokens
passes("--input", path("m.h5"), "--data", path("text.h5"), "--steps", 0, "--predict", "--output", path("start"))
exported("start")
before, smoothing, rate = weights_of(path("start.h5")), 0.2, 0.5


def losses(weight, share):
    logits = gpt(weight, tokens[0, :, :-1], 2, 2)
    most = logits.max(-1, keepdims=True)
    log_p = logits - most - np.log(np.exp(logits - most).sum(-1, keepdims=True))
    return -((1 - share) * np.take_along_axis(log_p, tokens[0, :, 1:, None], -1)[..., 0] + share * log_p.mean(-1)).mean()


sgd = ["--data", path("batch.h5"), "--optimizer", "sgd", "--weight-decay", 0, "--clip-norm", 0, "--lr-schedule", "constant", "--learning-rate", rate, "--microbatches", 4,
       "--label-smoothing", smoothing, "--steps", 1, "--input", path("m.h5"), "--predict", "--threads", 1]
for name, ranks, words in (("smooth", 1, []), ("split", 2, ["--cluster", two, "--layers-per-model", 2, "--stages", "0-2@a:1x2t2"])):
    passes(*sgd, *words, "--output", path(name), ranks=ranks)
    after = weights_of(path(name + ".h5")) if exported(name) else None
    with h5py.File(path(name, "run.h5")) as file:
        check(abs(file["train/loss"][0] - losses(before, 0)) < 2e-6, f"{name}: the loss is not the plain one")
    for parameter in ("h.0.attn.c_attn.weight", "h.1.mlp.c_proj.weight", "wte.weight"):
        place = tuple(random.integers(0, size) for size in before[parameter].shape)
        sides = []
        for way in (1, -1):
            moved = {key: value.copy() for key, value in before.items()}
            moved[parameter][place] += way * 1e-5
            sides.append(losses(moved, smoothing))
        slope, found = (sides[0] - sides[1]) / 2e-5, (before[parameter][place] - after[parameter][place]) / rate
        check(abs(slope - found) < 1e-6 + 1e-3 * abs(slope), f"{name}: gradient of {parameter}{place} is {found}, not {slope}")
refuses(2, "no parameter has a name like", *common, "--no-decay", "wte.weight,nothing.*", "--steps", 1, "--output", path("none"))
end()
