"""usage: data.py HAPT FOLDER. Token files of several programs and shards become the tokens that NumPy wrote. Files that are compressed, chunked or
contiguous train to the same bits. Targets beside a stream give NumPy's loss. Epochs: their length, resuming, errors. Damaged indexes of Megatron
are refused. Memory does not grow with the text."""
import json
import math
import os
import struct
import subprocess

import h5py
import numpy as np

from checking import HAPT, LONG, check, end, passes, path, refuses, run
from numpy_gpt import gpt, weights_of

T, V, D, HEADS, LAYERS = 16, 300, 32, 2, 2
random = np.random.default_rng(3)
TYPES = {np.uint8: 1, np.int8: 2, np.int16: 3, np.int32: 4, np.int64: 5, np.float64: 6, np.float32: 7, np.uint16: 8}


def tokens_of(name):
    with h5py.File(path(name)) as file:
        return file["tokens"][()], int(file.attrs["vocab"])


# Megatron: the index chooses sequences, also out of order, with gaps, and of any type.
def megatron(name, type, lengths, order=None, modes=False, gap=0, code=None):
    sequences = [random.integers(0, 100 if type in (np.uint8, np.int8) else 3000, length).astype(type) for length in lengths]
    order = list(range(len(lengths))) if order is None else order
    offsets, blob = {}, b""
    for s in order:
        blob += b"\xee" * (gap * np.dtype(type).itemsize)
        offsets[s] = len(blob)
        blob += sequences[s].tobytes()
    documents = [0] + sorted(set(random.integers(0, len(lengths) + 1, 2).tolist())) + [len(lengths)]
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code or TYPES[type], len(lengths), len(documents))
    index += np.array(lengths, "<i4").tobytes() + np.array([offsets[s] for s in range(len(lengths))], "<i8").tobytes()
    index += np.array(documents, "<i8").tobytes() + (bytes(len(lengths)) if modes else b"")
    open(path(name + ".bin"), "wb").write(blob)
    open(path(name + ".idx"), "wb").write(index)
    return np.concatenate(sequences).astype(np.int64)


for number, (type, options) in enumerate([(np.uint16, {}), (np.int32, {"order": [2, 0, 3, 1]}), (np.int64, {"gap": 3}), (np.uint8, {"modes": True}),
                                          (np.int16, {"order": [3, 2, 1, 0], "gap": 1})]):
    expected = megatron("meg%d" % number, type, [50, 7, 0, 90], **options)
    for given, words in ((".bin", []), (".idx", []), ("", ["--type", "megatron"])):
        passes("data", path("meg%d" % number) + given, *words, "--output", path("meg.h5"), "--overwrite")
        found, vocab = tokens_of("meg.h5")
        check(np.array_equal(found, expected) and vocab == expected.max() + 1, "Megatron's %s, given as \"%s\"" % (np.dtype(type), given))
both = np.concatenate([megatron("part%d" % i, np.uint16, [40, 30]) for i in range(3)])
passes("data", path("part*.bin"), "--output", path("parts.h5"))
check(np.array_equal(tokens_of("parts.h5")[0], both), "three of Megatron's files, by a pattern")
passes("data", path("part[0-9].*"), "--output", path("twins.h5"))
check(np.array_equal(tokens_of("twins.h5")[0], both), "a pattern that names indexes, too")
negative = np.array([3, -2, 5], np.int16)
open(path("below.bin"), "wb").write(negative.tobytes())
open(path("below.idx"), "wb").write(b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 3, 1, 2, 3, 0, 0, 1))
refuses(3, "below.bin: token 1 is negative", "data", path("below"), "--type", "megatron", "--output", path("no.h5"))
good = open(path("part0.idx"), "rb").read()
megatron("real", np.float32, [10])
refuses(3, "type 7", "data", path("real.idx"), "--output", path("no.h5"))
for what, damage in {"truncated": good[:-3], "magic": good[:3], "version": good[:9] + b"\2" + good[10:], "extra": good + b"\0\0\0",
                     "count": good[:18] + struct.pack("<Q", 1 << 62) + good[26:], "negative": good[:34] + struct.pack("<i", -5) + good[38:],
                     "beyond": good[:42] + struct.pack("<q", 1 << 40) + good[50:], "documents": good[:-8] + struct.pack("<q", 99)}.items():
    open(path("part0.idx"), "wb").write(damage)
    refuses(3, "part0", "data", path("part0"), "--type", "megatron", "--output", path("no.h5"))
os.remove(path("part0.idx"))
refuses(3, "part0.idx", "data", path("part0.bin"), "--type", "megatron", "--output", path("no.h5"))
codes = set()
for i in range(400 if LONG else 40):  # never a crash; what is accepted has the tokens that the index names
    mutated = bytearray(good)
    for place in random.integers(0, len(good), random.integers(1, 4)):
        mutated[place] = random.integers(0, 256)
    open(path("part0.idx"), "wb").write(mutated[:random.integers(len(good) // 2, len(good) + 1)] if i % 4 == 0 else mutated)
    done = run("data", path("part0"), "--type", "megatron", "--output", path("no.h5"), "--overwrite")
    codes.add(done.returncode)
    check(done.returncode in (0, 3) and done.stderr.count("hapt: error:") == (done.returncode != 0), "mutated index: %d %s" % (done.returncode, done.stderr[-300:]))
check(3 in codes, "no mutated index was refused")

# Shards.
shards = [random.integers(0, 40000, 500 + i).astype("<u2") for i in range(4)]
for i, shard in enumerate(shards):
    shard.tofile(path("shard_%d.bin" % i))
passes("data", path("shard_[0-9].bin"), "--type", "uint16", "--output", path("shards.h5"))
check(np.array_equal(tokens_of("shards.h5")[0], np.concatenate(shards)), "shards by a pattern")
passes("data", path("shard_3.bin"), path("shard_1.bin"), "--type", "uint16", "--output", path("two.h5"))
check(np.array_equal(tokens_of("two.h5")[0], np.concatenate([shards[3], shards[1]])), "shards in the order given")
open(path("a[1].txt"), "w").write("a name may look like a pattern")
passes("data", path("a[1].txt"), "--output", path("literal.h5"))
refuses(3, "no file matches", "data", path("none*.bin"), "--type", "uint16", "--output", path("no.h5"))
open(path("odd_1.bin"), "wb").write(b"abc")
refuses(3, "odd_1.bin", "data", path("odd_1.bin"), path("shard_1.bin"), "--type", "uint16", "--output", path("no.h5"))
refuses(3, "of type", "data", path("a[1].txt"), path("part1.bin"), "--output", path("no.h5"))
check(not os.path.exists(path("no.h5")) or 0 in codes, "a refused input left a file")

# Memory: the peak stays far below the size of the text.
tokens = 1 << (28 if LONG else 24)
with open(path("large.bin"), "wb") as file:
    file.truncate(2 * tokens)
probe = "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True); print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
done = subprocess.run(["/usr/bin/python3", "-c", probe, HAPT, "data", path("large.bin"), "--type", "uint16", "--output", path("large.h5")], capture_output=True, text=True)
peak = int(done.stdout.split()[-1]) * 1024 if done.returncode == 0 else math.inf
check(peak < 120e6 + 4 * min(tokens, 1 << 27), "%d tokens took %.0f MB" % (tokens, peak / 1e6))
os.remove(path("large.bin"))
os.remove(path("large.h5"))

# Storage of data files: the same bits of training and evaluation from each.
stream = random.integers(0, V, 5000)
passes("model", "gpt", "--layers", LAYERS, "--hidden", D, "--heads", HEADS, "--sequence", T, "--vocab", V, "--microbatch", "2", "--output", path("m.h5"))


def write(name, tokens, targets=None, **options):
    with h5py.File(path(name), "w") as file:
        file.create_dataset("tokens", data=tokens, **options)
        if targets is not None:
            file.create_dataset("targets", data=targets, **options)


common = ["--input", path("m.h5"), "--microbatches", "3", "--learning-rate", "1e-2", "--predict", "--threads", "1", "--overwrite"]


def losses(output, *words, ranks=1):
    passes(*common, *words, "--output", path(output), ranks=ranks)
    try:
        with h5py.File(path(output, "run.h5")) as file:
            return file["train/loss"][()]
    except OSError:
        return np.array([np.nan])


stores = {"contiguous": (np.uint16, {}), "chunked": (np.int32, {"chunks": (64,)}), "checksums": (np.uint16, {"chunks": (333,), "fletcher32": True}),
          "compressed": (np.uint16, {"chunks": (100,), "compression": "gzip"}), "wide": (np.int64, {}), "big": (">u4", {}), "real": (np.float64, {})}
first = None
for name, (type, options) in stores.items() if LONG else [(name, stores[name]) for name in ("contiguous", "chunked", "checksums", "compressed", "big")]:
    write(name + ".h5", stream.astype(type), **options)
    found = losses("store", "--data", path(name + ".h5"), "--steps", "4")
    first = found if first is None else first
    check(np.array_equal(found, first) and np.isfinite(found).all() and len(found) == 4, "%s: %s" % (name, found))

# A file that loses its end while it is read is the user's fault; one that is truncated before is refused.
size = os.path.getsize(path("contiguous.h5"))
open(path("short.h5"), "wb").write(open(path("contiguous.h5"), "rb").read()[:size - 500])
done = run(*common, "--data", path("short.h5"), "--steps", "1", "--output", path("none"))
check(done.returncode == 3 and done.stderr.count("hapt: error:") == 1, "a truncated data file: %d %s" % (done.returncode, done.stderr[-300:]))

# Targets beside the stream: the loss of all windows is NumPy's, with the weights of the model.
targets = np.append(stream[1:], 0).astype(np.int32)
targets[random.random(len(targets)) < 0.6] = -100
targets[2000:3000] = -100
write("masked.h5", stream.astype(np.uint16), targets)
passes("export", "--checkpoint", path("store"), "--output", path("w.h5"))
done = passes("evaluate", "--input", path("m.h5"), "--checkpoint", path("store"), "--data", path("masked.h5"), "--json")
result = json.loads(done.stdout) if done.returncode == 0 else {"loss": 0, "rows": 0, "targets": 0}
rows = len(stream) // T
inputs, wanted = stream[:rows * T].reshape(rows, T), targets[:rows * T].reshape(rows, T)
logits = gpt(weights_of(path("w.h5")), inputs, LAYERS, HEADS)
most = logits.max(-1, keepdims=True)
total = np.log(np.exp(logits - most).sum(-1)) + most[..., 0]
counts = wanted != -100
chosen = np.take_along_axis(logits, np.where(counts, wanted, 0)[..., None], -1)[..., 0]
expected = (total - chosen)[counts].mean()
check(result["rows"] == rows and result["targets"] == counts.sum() and abs(result["loss"] - expected) < 3e-6, "masked: %s, NumPy %.7f of %d" % (result, expected, counts.sum()))
one, two = (losses("masked%d" % ranks, "--data", path("masked.h5"), "--steps", "5", "--program", "data", ranks=ranks) for ranks in (1, 2))
check(np.abs(one - two).max() < 1e-5, "masked on 1 and 2 ranks: %s %s" % (one, two))
refuses(3, "/targets", *common, "--data", write("uneven.h5", stream, targets[:-1]) or path("uneven.h5"), "--output", path("none"))
refuses(3, "no target", *common, "--data", write("no-targets.h5", stream, np.full(len(stream), -100)) or path("no-targets.h5"), "--output", path("none"))

# Epochs.
data = ["--data", path("contiguous.h5")]
per_epoch = (len(stream) - 1) // T
steps = math.ceil(1.5 * per_epoch / 6)
whole = losses("epochs", *data, "--epochs", "1.5", "--checkpoint-every", "1000")
check(len(whole) == steps, "1.5 epochs of %d rows in steps of 6: %d steps, not %d" % (per_epoch, len(whole), steps))
check(np.array_equal(losses("same", *data, "--steps", steps, "--data-order", "epochs"), whole), "--data-order epochs with as many --steps")
check(not np.array_equal(losses("random", *data, "--steps", steps), whole), "another order")
losses("parts", *data, "--epochs", "1.5", "--stop-after", "30")
resumed = passes("--input", path("m.h5"), *data, "--resume", "--output", path("parts"), "--predict", "--threads", "1")
with h5py.File(path("parts", "run.h5")) as file:
    check(np.array_equal(file["train/loss"][()], whole), "a resumed run in epochs")
check("differ" not in resumed.stderr, "a resumed run warns: " + resumed.stderr[-300:])
longer = passes("--input", path("m.h5"), *data, "--resume", "--output", path("parts"), "--predict", "--threads", "1", "--steps", steps + 2)
check("differ" not in longer.stderr, "--steps after --epochs changes the order: " + longer.stderr[-300:])
warned = passes("--input", path("m.h5"), *data, "--resume", "--output", path("parts"), "--predict", "--threads", "1", "--steps", steps + 3, "--data-order", "random",
                "--epochs", "0")
check("--data-order is random" in warned.stderr, "another order is not noticed: " + warned.stderr[-300:])
refuses(2, "--steps", *common, *data, "--epochs", "2", "--steps", "5", "--output", path("none"))
refuses(2, "--data-order", *common, *data, "--epochs", "2", "--data-order", "random", "--output", path("none"))
with h5py.File(path("batches.h5"), "w") as file:
    file["batches"] = random.integers(0, V, (8, 6, T + 1))
refuses(3, "exact batches", *common, "--data", path("batches.h5"), "--epochs", "2", "--output", path("none"))

# Held-out data that change between runs are noticed.
held = ["--validation-data", path("chunked.h5"), "--validate-rows", "20", "--validate-every", "2"]
losses("held", *data, *held, "--steps", "2")
again = ["--input", path("m.h5"), *data, "--resume", "--output", path("held"), "--predict", "--threads", "1"]
done = passes(*again, *held, "--steps", "4")
check("held-out" not in done.stderr, "equal held-out data: " + done.stderr[-300:])
done = passes(*again, *held[:2], "--validate-rows", "21", "--steps", "6")
check("held-out rows differ" in done.stderr, "other held-out rows: " + done.stderr[-300:])
end()
