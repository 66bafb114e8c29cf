"""usage: validation.py HAPT FOLDER. A small GPT is trained with held-out data under plans of one to four ranks. NumPy computes the loss and the
top-1 of the exported weights in fp64 on all windows of the held-out tokens. Validation changes no bit of training. A resumed run has the same
history. hapt evaluate gives the same numbers, also for images, exact batches and other plans. HAPT_LONG=1: more plans."""
import json
import glob
import os
import signal
import subprocess
import time

import h5py
import numpy as np

from checking import HAPT, LONG, check, cpu_cluster, end, passes, path, refuses, run
from numpy_gpt import gpt, weights_of

T, V, D, HEADS, LAYERS = 16, 256, 32, 2, 4
MODEL = ["gpt", "--layers", str(LAYERS), "--hidden", str(D), "--heads", str(HEADS), "--sequence", str(T), "--vocab", str(V), "--microbatch", "2"]
def score(weights, rows, targets):
    """Mean loss and top-1 of the targets that count."""
    logits = gpt(weights_of(weights), rows, LAYERS, HEADS)
    most = logits.max(-1, keepdims=True)
    total = np.log(np.exp(logits - most).sum(-1)) + most[..., 0]
    counts = targets != -100
    chosen = np.take_along_axis(logits, np.where(counts, targets, 0)[..., None], -1)[..., 0]
    return (total - chosen)[counts].mean(), (logits.argmax(-1) == targets)[counts].mean()


def evaluate(*words, ranks=1):
    done = passes("evaluate", *words, "--json", ranks=ranks)
    return json.loads(done.stdout) if done.returncode == 0 else {"loss": np.nan, "top1": np.nan, "rows": 0, "targets": 0}


def history(folder):
    with h5py.File(os.path.join(folder, "run.h5")) as file:
        train = file["train"]
        return train["loss"][()], train["validation_step"][()].tolist(), train["validation_loss"][()]


random = np.random.default_rng(7)
words = ["the quick brown fox", "jumps over", "the lazy dog", "and runs away", "while it rains"]
text = " ".join(random.choice(words, 2000)).encode()
open(path("train.txt"), "wb").write(text[:12000])
open(path("held.txt"), "wb").write(text[12000:13003])
for name in ("train", "held"):
    passes("data", path(name + ".txt"), "--type", "bytes", "--output", path(name + ".h5"))
passes("model", *MODEL, "--data", path("train.h5"), "--output", path("m.h5"))
held = np.frombuffer(open(path("held.txt"), "rb").read(), np.uint8).astype(np.int64)
windows = (len(held) - 1) // T
rows = np.stack([held[r * T:r * T + T + 1] for r in range(windows)])
check(windows == 62, "62 windows: 7 steps of 8 rows and one of 6")

# Plans of one to four ranks, other schedules, deferred updates: training keeps its bits, and validation is NumPy's.
common = ["--input", path("m.h5"), "--microbatches", "4", "--steps", "12", "--learning-rate", "1e-2", "--predict", "--threads", "1"]
held_out = ["--validation-data", path("held.h5"), "--validate-every", "5", "--checkpoint-every", "5"]
clusters = {count: cpu_cluster(count) for count in (1, 2, 4)}
layers = ["--layers-per-model", "6"]
data_parallel = ["--program", "data"]  # the measured bandwidth of memory decides otherwise, and may differ between two runs
plans = [("one", 1, []), ("even", 2, [*layers, *data_parallel, "--stages", "0-6@a:1x2"]), ("two", 2, [*layers, "--stages", "0-3@a:1x1,3-6@a:1x1"]),
         ("tensor", 2, [*layers, "--stages", "0-6@a:1x2t2"]),
         ("loops", 2, [*layers, "--schedule", "interleaved", "--stages", "0-1@a:1x1,1-3@a:1x1,3-4@a:1x1,4-6@a:1x1"]),
         ("split", 4, [*layers, *data_parallel, "--stages", "0-3@a:1x2,3-6@a:1x2", "--split-backward", "yes", "--trace", "3"]),
         ("offload", 2, [*layers, "--stages", "0-3@a:1x1,3-6@a:1x1", "--offload", "optimizer"])]
if not LONG:  # the others take as long again
    plans = [plan for plan in plans if plan[0] not in ("even", "loops")]
for name, count, options in plans:
    place = ["--cluster", clusters[count]] + options
    passes(*common, *place, "--output", path("plain-" + name), ranks=count)
    done = passes(*common, *place, *held_out, "--output", path(name), ranks=count)
    if done.returncode != 0:
        continue
    with h5py.File(path("plain-" + name, "run.h5")) as file:
        plain = file["train/loss"][()]
    losses, steps, validation = history(path(name))
    check(np.array_equal(plain, losses), f"{name}: validation changed the losses of training: {plain - losses}")
    check(steps == [0, 5, 10, 12], f"{name}: validation after {steps}")
    check(validation[-1] < validation[0] - 0.5, f"{name}: validation loss falls: {validation}")
    passes("export", "--checkpoint", path(name), "--output", path(name + ".weights.h5"))
    wanted, share = score(path(name + ".weights.h5"), rows[:, :-1], rows[:, 1:])
    check(abs(validation[-1] / wanted - 1) < 2e-6, f"{name}: validation loss {validation[-1]}, NumPy {wanted}")
    found = evaluate("--input", path("m.h5"), "--checkpoint", path(name), "--cluster", clusters[count], "--data", path("held.h5"), "--threads", "1",
                     ranks=count)
    check(found["loss"] == validation[-1], f"{name}: hapt evaluate gives {found['loss']}, validation gave {validation[-1]}")
    check(found["rows"] == windows and found["targets"] == windows * T and found["step"] == 12, f"{name}: {found}")
    check(abs(found["perplexity"] / np.exp(wanted) - 1) < 1e-5, f"{name}: {found}")
    if name == "tensor":
        check("top1" not in found or abs(found["top1"] - share) < 1e-3, f"{name}: top-1 {found}, NumPy {share}")
    else:
        check(abs(found["top1"] - share) < 1.5 / (windows * T), f"{name}: top-1 {found.get('top1')}, NumPy {share}")

# The timeline has no message of validation: each event lies within its step.
with h5py.File(path("split", "run.h5")) as file:
    trace = file["trace"]
    begin, step, kind = trace["begin"][()], trace["step"][()], trace["kind"][()]
    ends = {s: begin[(step == s) & (kind == b"norm")].max() for s in sorted(set(step))}
    messages = np.isin(kind, [b"activations left", b"activations there"])
    check(messages.any() and all(begin[i] < ends[step[i]] and (step[i] - 1 not in ends or begin[i] > ends[step[i] - 1] - 1e-3)
                                 for i in np.flatnonzero(messages)), "a message lies outside of its step")

# A run that is interrupted and resumed has the same history. The best checkpoint stays.
place = ["--cluster", clusters[2], *layers, "--stages", "0-3@a:1x1,3-6@a:1x1"]
passes(*common, *place, *held_out, "--stop-after", "7", "--output", path("resumed"), ranks=2)
passes("train", "--input", path("m.h5"), "--cluster", clusters[2], "--threads", "1", *held_out, "--resume", "--output", path("resumed"), ranks=2)
for a, b in zip(history(path("two")), history(path("resumed"))):
    check(np.array_equal(a, b), f"resumed: {a} is not {b}")
passes("--input", path("m.h5"), "--microbatches", "4", "--steps", "25", "--learning-rate", "0.1", "--lr-schedule", "constant", "--predict", "--threads",
       "1", *place, *held_out, "--checkpoint-async", "no", "--keep", "1", "--output", path("diverges"), ranks=2)
_, steps, validation = history(path("diverges"))
kept = sorted(int(name[5:]) for name in os.listdir(path("diverges", "checkpoints")) if name.startswith("step-"))
best = min((loss, step) for step, loss in zip(steps, validation) if step > 0)[1]
check(kept == sorted({best, 25}), f"kept {kept}, the best of {dict(zip(steps, validation))} is {best}")
said = passes("report", "--input", path("two", "run.h5")).stdout
check("validation" in said and "lowest" in said, said)
said = json.loads(passes("report", "--input", path("two", "run.h5"), "--json").stdout)["train"]["validation"]
check([entry["step"] for entry in said] == [0, 5, 10, 12], str(said))

# Fewer rows are evenly spaced. Exact batches of any size, with targets that do not count.
place = ["--input", path("m.h5"), "--checkpoint", path("two"), "--cluster", clusters[2], "--threads", "1"]
weights = path("two.weights.h5")
some = (np.arange(10) * (windows / 10)).astype(int)
found = evaluate(*place, "--data", path("held.h5"), "--validate-rows", "10", ranks=2)
check(found["rows"] == 10 and abs(found["loss"] / score(weights, rows[some, :-1], rows[some, 1:])[0] - 1) < 2e-6, f"ten rows: {found}")
inputs, targets = random.integers(0, V, (5, 3, T)), random.integers(0, V, (5, 3, T))
targets[random.random(targets.shape) < 0.4] = -100
with h5py.File(path("batches.h5"), "w") as file:
    file["batches"], file["targets"] = inputs.astype(np.int32), targets.astype(np.int32)
found = evaluate(*place, "--data", path("batches.h5"), ranks=2)
wanted, share = score(weights, inputs.reshape(15, T), targets.reshape(15, T))
check(found["rows"] == 15 and found["targets"] == (targets != -100).sum() and abs(found["loss"] / wanted - 1) < 2e-6 and
      abs(found["top1"] - share) < 1e-9, f"exact batches: {found}, NumPy {wanted}, {share}")
# The weights of the model itself, on another plan.
passes("plan", "--input", path("m.h5"), "--cluster", clusters[4], "--predict", "--threads", "1", "--microbatches", "2", "--use-all-devices", "yes", "--output",
       path("p4.h5"))
a = evaluate("--input", path("m.h5"), "--plan", path("p4.h5"), "--cluster", clusters[4], "--data", path("held.h5"), "--threads", "1", ranks=4)
check(abs(a["loss"] / history(path("two"))[2][0] - 1) < 1e-6, f"the model's weights: {a}")

# Images: rows of a stream, in order.
labels = random.integers(0, 4, 21).astype(np.int32)
images = (random.integers(0, 40, (21, 3, 8, 8)) + 60 * labels[:, None, None, None]).astype(np.uint8)
with h5py.File(path("images.h5"), "w") as file:
    file["images"], file["labels"] = images, labels
passes("model", "vit", "--layers", "2", "--hidden", "32", "--heads", "2", "--image", "8", "--patch", "4", "--classes", "4", "--microbatch", "2", "--data",
       path("images.h5"), "--output", path("vit.h5"))
passes("--input", path("vit.h5"), "--microbatches", "4", "--steps", "100", "--learning-rate", "1e-2", "--cluster", clusters[2], "--predict", "--threads", "1",
       "--validation-data", path("images.h5"), "--validate-every", "50", "--output", path("vit"), ranks=2)
with h5py.File(path("vit", "run.h5")) as file:
    shares, validation = file["train/validation_top1"][()], file["train/validation_loss"][()]
check(shares[-1] > 0.9 and validation[-1] < 0.5 * validation[0] and round(shares[-1] * 21) == shares[-1] * 21, f"images: {shares}, {validation}")
found = evaluate("--input", path("vit.h5"), "--checkpoint", path("vit"), "--cluster", clusters[2], "--data", path("images.h5"), "--threads", "1", ranks=2)
check(found["loss"] == validation[-1] and found["top1"] == shares[-1] and "perplexity" not in found, f"images: {found}")

# A stop at a step that is due: the resumed run makes up for it. So does one whose step 0 is refused. A signal during validation ends it.
def send(folder, *words, ranks=2):
    """SIGTERM to a rank when the folder has a checkpoint; returns the exit code."""
    with subprocess.Popen(["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), HAPT, *map(str, words)], stderr=subprocess.DEVNULL,
                          stdout=subprocess.DEVNULL) as job:
        end = time.time() + 60
        while time.time() < end and not glob.glob(path(folder, "checkpoints", "step-*")):
            time.sleep(0.02)
        os.kill(int(subprocess.run(["pgrep", "-P", str(job.pid)], capture_output=True, text=True).stdout.split()[-1]), signal.SIGTERM)
        return job.wait(timeout=120)


two_stages = ["--cluster", clusters[2], *layers, "--stages", "0-3@a:1x1,3-6@a:1x1"]
long_run = [*common[:4], "--steps", "4000", *common[6:], *two_stages, "--validation-data", path("held.h5"), "--validate-every", "1", "--checkpoint-every", "3",
            "--output", path("stopped")]
check(send("stopped", *long_run) == 9, "a signal: code 9")
_, steps, _ = history(path("stopped"))
check(steps[0] == 0 and steps[-1] in (len(history(path("stopped"))[0]), len(history(path("stopped"))[0]) - 1), f"validated after {steps[-3:]}")
passes("train", "--input", path("m.h5"), "--cluster", clusters[2], "--threads", "1", "--validation-data", path("held.h5"), "--validate-every", "1",
       "--resume", "--stop-after", len(history(path("stopped"))[0]) + 3, "--output", path("stopped"), ranks=2)
losses, steps, _ = history(path("stopped"))
check(steps == list(range(len(losses) + 1)), f"after a stop: {len(losses)} steps, validated after {len(steps)}: {steps[-6:]}")
with h5py.File(path("bad.h5"), "w") as file:
    file["batches"] = np.full((1, 8, T + 1), 7, np.int32)
passes("export", "--checkpoint", path("one"), "--output", path("huge.h5"))
with h5py.File(path("huge.h5"), "r+") as file:
    file["parameters/lm_head.weight"] = file["parameters/wte.weight"][...]
    file["parameters/wte.weight"][7] = 3e38
# untied: the huge row would also make a logit of every token, which overflows by rounding
passes("model", *MODEL, "--tied-embeddings", "no", "--data", path("bad.h5"), "--weights", path("huge.h5"), "--output", path("huge-model.h5"))
with h5py.File(path("calm.h5"), "w") as file:
    file["batches"] = np.full((6, 8, T + 1), 9, np.int32)
refused = ["--input", path("huge-model.h5"), "--microbatches", "4", "--predict", "--threads", "1", "--cluster", clusters[1], "--clip-norm", "0",
           "--validation-data", path("calm.h5"), "--validate-every", "2", "--output", path("zero")]
done = run(*refused, "--steps", "1")
check(done.returncode == 3 and "nothing was updated" in done.stderr, f"step 0 is refused: {done.returncode} {done.stderr[-300:]}")
with h5py.File(path("fine.h5"), "w") as file:
    file["batches"] = np.full((4, 8, T + 1), 9, np.int32)
passes(*refused, "--data", path("fine.h5"), "--steps", "4", "--resume", "yes")
_, steps, _ = history(path("zero"))
check(steps == [0, 2, 4], f"resumed from step 0: validated after {steps}")
passes("check", path("zero"))

# What has no effect, and what does not fit.
one = [*common, "--cluster", clusters[1], "--output", path("never")]
refuses(2, "--validate-every has no effect", *one, "--validate-every", "5")
refuses(2, "--validation-data has no effect on modelled devices", *one, *held_out, "--device", "emulated")
refuses(3, "never.h5", *one, "--validation-data", path("never.h5"))
refuses(3, "images.h5", *one, "--validation-data", path("images.h5"))
with h5py.File(path("wide.h5"), "w") as file:
    file["tokens"] = np.full(100, V, np.int32)
refuses(3, "outside the model's vocabulary", *one, "--validation-data", path("wide.h5"))
with h5py.File(path("nothing.h5"), "w") as file:
    file["batches"], file["targets"] = inputs.astype(np.int32), np.full(inputs.shape, -100, np.int32)
refuses(3, "has a target", "evaluate", *place[:2], "--checkpoint", path("one"), "--cluster", clusters[1], "--data", path("nothing.h5"))
refuses(2, "runs on 2 ranks, and there is 1", "evaluate", *place[:2], "--checkpoint", path("tensor"), "--cluster", clusters[1], "--data", path("held.h5"))
for name, shape in (("none", (0, 2, T + 1)), ("empty", (5, 0, T + 1))):
    with h5py.File(path(name + ".h5"), "w") as file:
        file["batches"] = np.zeros(shape, np.int32)
    for words in (["evaluate", *place[:2], "--checkpoint", path("one"), "--cluster", clusters[1], "--data"], [*one, "--validation-data"]):
        refuses(3, "", *words, path(name + ".h5"))
refuses(2, "modelled devices compute no loss", "evaluate", *place[:4], "--data", path("held.h5"), "--device", "emulated")
refuses(2, "no held-out data", "evaluate", *place[:4])
refuses(2, "no plan", "evaluate", *place[:2], "--data", path("held.h5"))
refuses(3, "checkpoint", "evaluate", "--input", path("vit.h5"), "--checkpoint", path("one"), "--data", path("images.h5"))
check(not os.path.exists(path("never")) or not os.path.exists(path("never", "run.h5")), "a refused run left a result")
end()
