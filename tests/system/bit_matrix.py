"""Schedules x models x ranks x stages x what stages keep on their devices: for each model one set of losses and weights. usage: HAPT FOLDER

Every plan is made by `hapt plan` at random cuts between operators and run by `hapt train`. The reference of a model is one stage on one
rank. Weights are sharded over the two ranks of a stage, whose reference is one stage on two ranks with all weights on each: sums over ranks
have an order of their own. Stages compute microbatches in rising order under each schedule, so all others must have its bits. A norm that clips would be summed
in the order of the stages, so there is no clipping. Embeddings are not tied, because their gradients add up stage by stage.
Each run needs the device memory that was planned, to the byte. HAPT_LONG=1: all combinations that keep all, and all keeps under schedules
without loops. Otherwise some for each model, such that each schedule and each keep runs. HAPT_SEED repeats the cuts and skips."""
import json
import os
import random
import shutil
import subprocess
import sys
import time

import h5py

import runs

HAPT, FOLDER = sys.argv[1:3]
LONG = os.environ.get("HAPT_LONG", "0") not in ("", "0")
STEPS, MICROBATCHES, MOST_STAGES, BLOCKS = 3, 12, 8, 6  # 12 microbatches can be grouped by 1 to 4 submeshes
SPLIT = ["--split-backward", "yes"]
V = ["--schedule", "looped", "--placement", "v", "--loop-batch", "2"]
# name: options of hapt plan; does each rank run several stages?
SCHEDULES = {
    "1f1b": (["--schedule", "1f1b"], False),
    "h1f1b": (["--schedule", "h1f1b"], False),
    "split": (["--schedule", "h1f1b"] + SPLIT, False),
    "interleaved": (["--schedule", "interleaved"], True),
    "v": (V, True),
    "split interleaved": (["--schedule", "interleaved"] + SPLIT, True),
    "split v": (V + SPLIT, True),
}
KEEPS = {
    "all": [],
    "recompute": ["--recompute", "every=2"],
    "state": ["--offload", "optimizer", "--update-on", "device"],
    "update": ["--offload", "optimizer", "--update-on", "host"],
    "weights": ["--offload", "weights"],
    "gradients": ["--offload", "gradients"],
    "least": ["--offload", "gradients", "--recompute", "every=2"],
    "sharded": ["--sharded-weights", "yes"],
    "sharded, recompute": ["--sharded-weights", "yes", "--recompute", "every=2"],
}
REFERENCE = {1: "all", 2: "whole"}  # by the ranks of a stage
KEEPS[REFERENCE[2]] = ["--sharded-weights", "no"]
# ranks, schedule, loops, keep of the quick round
QUICK = {
    "gpt": [(3, "split", 1, "all"), (4, "v", 2, "all"), (2, "h1f1b", 1, "least"), (1, "1f1b", 1, "update"), (4, "split", 1, "sharded"),
            (4, "interleaved", 2, "sharded")],
    "skips": [(4, "h1f1b", 1, "weights"), (2, "split v", 4, "all"), (3, "interleaved", 2, "gradients"), (3, "split", 1, "recompute"),
              (4, "h1f1b", 1, "sharded, recompute")],
    "bert-moe": [(3, "split interleaved", 2, "all"), (1, "interleaved", 5, "gradients"), (2, "split", 1, "state"), (4, "1f1b", 1, "sharded")],
    "frozen": [(4, "1f1b", 1, "weights"), (2, "split v", 3, "all")],
}
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
failures, compared = [], 0


def path(name):
    return os.path.join(FOLDER, name)


def hapt(*arguments, ranks=1):
    done = subprocess.run(runs.on(ranks, [HAPT, *arguments]), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=240)
    if done.returncode:
        raise RuntimeError("hapt %s on %d ranks ended with code %d: %s" % (" ".join(arguments), ranks, done.returncode, done.stderr.strip()[-600:]))
    return done.stdout


# ---- models ----

def make_tokens():
    with open(path("text.txt"), "wb") as out:
        out.write(bytes(random.randrange(97, 123) for _ in range(6000)))
    hapt("data", path("text.txt"), "--type", "bytes", "--output", path("tokens.h5"))


def make_gpt(name):
    hapt("model", "gpt", "--layers", str(BLOCKS), "--hidden", "32", "--heads", "2", "--sequence", "16", "--vocab", "256", "--microbatch", "2",
         "--tied-embeddings", "no", "--output", path(name + ".h5"))


def make_skips(name):
    """Random skips over two blocks at least; one from the embedding to the last block. A tensor may have several readers."""
    make_gpt(name)
    pairs = [(a, b) for a in range(-1, BLOCKS) for b in range(a + 3, BLOCKS)]
    chosen = {(-1, BLOCKS - 1)} | set(random.sample(pairs, 3))
    skips = ["%d:%d" % pair for pair in sorted(chosen, key=lambda pair: pair[::-1])]
    subprocess.run(["/usr/bin/python3", os.path.join(os.path.dirname(__file__), "skips.py"), path(name + ".h5"), *skips], check=True)
    return "skips " + " ".join(skips)


def make_bert_moe(name):
    hapt("model", "bert-moe", "--layers", "4", "--hidden", "32", "--heads", "4", "--sequence", "16", "--vocab", "256", "--experts", "5", "--top-k", "2",
         "--microbatch", "2", "--tied-embeddings", "no", "--output", path(name + ".h5"))


def make_frozen(name):
    """The embeddings and the first two blocks are not trained."""
    make_gpt(name)
    with h5py.File(path(name + ".h5"), "r+") as file:
        trainable = file["tensors/trainable"][...]
        for t, tensor in enumerate(file["tensors/name"][...]):
            tensor = tensor.decode() if isinstance(tensor, bytes) else tensor
            if tensor.startswith(("wte", "wpe", "h.0.", "h.1.")):
                trainable[t] = 0
        file["tensors/trainable"][...] = trainable


MODELS = {"gpt": make_gpt, "skips": make_skips, "bert-moe": make_bert_moe, "frozen": make_frozen}


# ---- plans and runs ----

def width_of(keep):
    """The ranks of a stage."""
    return 2 if keep.startswith("sharded") or keep == REFERENCE[2] else 1


def make_clusters():
    """One device for each rank, in two subclusters from two submeshes on, so that messages cross a link."""
    for submeshes, width in [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2)]:
        counts = [("a", (submeshes + 1) // 2 * width), ("b", submeshes // 2 * width)]
        with open(path("cluster-%d-%d.json" % (submeshes, width)), "w") as out:
            json.dump({"format": "hapt-cluster", "version": 1,
                       "subclusters": [{"name": name, "nodes": 1, "devices_per_node": count, "device": "cpu", "memory": "2 GB"}
                                       for name, count in counts if count],
                       "links": [{"between": ["a", "b"], "bandwidth": "1 GB/s", "latency": "10 us"}] if submeshes > 1 else []}, out)


def submesh_of(stage, submeshes, schedule):
    visit, place = divmod(stage, submeshes)
    return submeshes - 1 - place if "v" in schedule.split() and visit % 2 else place


def plan_and_train(model, layers, ranks, schedule, loops, keep):
    """(losses, weights, stages) of a run."""
    options, looped = SCHEDULES[schedule]
    width = width_of(keep)
    submeshes = ranks // width
    stages = submeshes * loops
    cuts = [0] + sorted(random.sample(range(1, layers), stages - 1)) + [layers]
    names = ["%d-%d@%s:1x%d" % (cuts[s], cuts[s + 1], "a" if submesh_of(s, submeshes, schedule) < (submeshes + 1) // 2 else "b", width)
             for s in range(stages)]
    common = ["--input", path(model + ".h5"), "--cluster", path("cluster-%d-%d.json" % (submeshes, width)), "--layers-per-model", "ops"]
    output = path("run")
    shutil.rmtree(output, ignore_errors=True)
    hapt("plan", *common, "--predict", "yes", "--tensor-parallel", "1", "--microbatches", str(MICROBATCHES), "--stages", ",".join(names),
         "--overwrite", "--output", path("plan.h5"), *options, *KEEPS[keep], *(["--loops", str(loops)] if looped else []))
    train = json.loads(hapt("train", *common, "--plan", path("plan.h5"), "--data", path("tokens.h5"), "--threads", "1", "--steps", str(STEPS), "--clip-norm", "0",
                            "--learning-rate", "1e-2", "--lr-schedule", "constant", "--output", output, "--json", ranks=ranks))["train"]
    with h5py.File(os.path.join(output, "run.h5")) as run:
        planned, measured = (list(run["train"][name][()]) for name in ("memory_planned", "memory_measured"))
    if planned != measured:
        raise RuntimeError("planned device memory %s, measured %s" % (planned, measured))
    return train["loss"], runs.weights(HAPT, output)[1], names


def combinations(model):
    if not LONG:
        return QUICK[model]
    return [(ranks, schedule, loops, keep) for ranks in range(1, 5) for schedule, (_, looped) in SCHEDULES.items()
            for loops in (range(2, MOST_STAGES // ranks + 1) if looped else [1]) for keep in (["all", "sharded"] if looped else KEEPS)
            if ranks % width_of(keep) == 0 and keep != REFERENCE[2]]


def compare(model):
    global compared
    about = MODELS[model](model)
    layers = json.loads(hapt("plan", "--input", path(model + ".h5"), "--cluster", path("cluster-1-1.json"), "--predict", "yes", "--layers-per-model", "ops",
                             "--json"))["stages"][-1]["layers"][1]
    reference = {}
    for width in sorted({width_of(keep) for _, _, _, keep in combinations(model)}):
        losses, weights, _ = reference[width] = plan_and_train(model, layers, width, "1f1b", 1, REFERENCE[width])
        if len(losses) != STEPS or len(set(losses)) != STEPS or not weights:
            raise RuntimeError("%s: the reference on %d ranks has losses %s" % (model, width, losses))
    begin, count = time.time(), 0
    for ranks, schedule, loops, keep in combinations(model):
        losses, weights, _ = reference[width_of(keep)]
        what, stages = "%s under %s, %d ranks, %d loops, keep %s" % (model, schedule, ranks, loops, keep), "?"
        try:
            other_losses, other, stages = plan_and_train(model, layers, ranks, schedule, loops, keep)
            differ = sorted(name for name in weights if weights[name] != other.get(name))
            wrong = "losses %s instead of %s" % (other_losses, losses) if other_losses != losses else "weights differ: %s" % differ[:4] if differ else None
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            wrong = str(error)
        count += 1
        if wrong:
            failures.append(what)
            print("failed: %s: %s\n  stages %s; %s" % (what, wrong, ",".join(stages), about or ""), flush=True)
    compared += count
    print("%s: %d combinations, %.0f s%s" % (model, count, time.time() - begin, "; " + about if about else ""), flush=True)


make_tokens()
make_clusters()
for model in MODELS:
    compare(model)
print("%d combinations, %d failed; seed %d" % (compared, len(failures), seed))
sys.exit(1 if failures or not compared else 0)
