"""What hold.py compares: files made once (FILES), then plans, synthesised programs, simulations and runs (INSTANCES)."""
import collections
import json
import os

import h5py

# `plans`: the command that writes @PLAN first, each side its own. None: both sides read files of FILES.
Instance = collections.namedtuple("Instance", "name words ranks trains codes plans")
INSTANCES, FILES, TEXTS = [], [], {}


def cluster(name, subclusters, links):
    TEXTS[name] = json.dumps({"format": "hapt-cluster", "version": 1, "subclusters": subclusters, "links": links})


def subcluster(name, device, nodes, devices, intra="300 GB/s", inter="200 Gbit/s", **more):
    return dict(name=name, device=device, nodes=nodes, devices_per_node=devices, intra_node_bandwidth=intra, inter_node_bandwidth=inter, **more)


def link(a, b, bandwidth, latency="50 us", **more):
    return dict(between=[a, b], bandwidth=bandwidth, latency=latency, **more)


def cpu(name, devices, slowdown=1, memory="300 MB"):
    return dict(name=name, device="cpu", nodes=1, devices_per_node=devices, slowdown=slowdown, memory=memory)


# Clusters on paper, and clusters of CPU ranks.
A100, V100 = "A100-40GB", "V100-32GB"
for a, v in ((4, 4), (2, 2), (1, 2), (3, 3)):
    cluster("a%dv%d.json" % (a, v), [subcluster("a100", A100, a, 8), subcluster("v100", V100, v, 8, "150 GB/s")], [link("a100", "v100", "5 Gbit/s")])
cluster("small.json", [subcluster("a100", A100, 2, 2), subcluster("v100", V100, 1, 2, "150 GB/s")], [link("a100", "v100", "5 Gbit/s")])
cluster("three.json", [subcluster("h100", "H100", 1, 4, "450 GB/s", "400 Gbit/s"), subcluster("a100", A100, 1, 8),
                       subcluster("p100", "P100", 2, 2, "12 GB/s", "10 Gbit/s")],
        [link("h100", "a100", "25 Gbit/s"), link("h100", "p100", "1 Gbit/s"), link("a100", "p100", "10 Gbit/s")])
cluster("one.json", [subcluster("a100", A100, 2, 4)], [])
cluster("fast-link.json", [subcluster("a100", A100, 1, 2), subcluster("v100", V100, 1, 2, "150 GB/s")], [link("a100", "v100", "100 GB/s", "2 us")])
cluster("cpu1.json", [cpu("a", 1)], [])
cluster("cpu2.json", [cpu("a", 1), cpu("b", 1, 1.5)], [link("a", "b", "1 GB/s", "10 us")])
cluster("cpu3.json", [cpu("a", 1), cpu("b", 2, 2)], [link("a", "b", "1 GB/s", "10 us")])
cluster("cpu3far.json", [cpu("a", 1), cpu("b", 2, 2)], [link("a", "b", "20 MB/s", "10 us")])
cluster("cpu4.json", [cpu("a", 2), cpu("b", 2, 1.5)], [link("a", "b", "200 MB/s", "50 us", paced=True)])
cluster("cpu2one.json", [cpu("a", 2)], [])
cluster("cpu4one.json", [cpu("a", 4)], [])

# Models: small ones that train, large ones on paper.
TEXTS["text"] = "".join("%d times %d is %d.\n" % (a, b, a * b) for a in range(60) for b in range(60))
FILES.append(("t.h5", ["data", "@text", "--type", "bytes"], 1))
SIZES = "--layers 3 --hidden 32 --heads 4 --sequence 24".split()
SMALL = {
    "gpt": ["gpt"] + SIZES + ["--vocab", "256", "--data", "@t.h5"],
    "gpt-untied": ["gpt"] + SIZES + ["--vocab", "256", "--tied-embeddings", "no", "--data", "@t.h5"],
    "llama": ["llama"] + SIZES + ["--vocab", "256", "--kv-heads", "2", "--data", "@t.h5"],
}
for name, words in SMALL.items():
    FILES.append((name + ".h5", ["model"] + words + ["--microbatch", "4", "--dtype", "fp32"], 1))
PAPER = ["gpt-39b", "gpt-15b", "gpt2-124m", "bert-base", "bert-moe-base", "llama-2-7b", "vit-base", "vgg19", "resnet50"]
for name in PAPER:
    FILES.append((name + ".h5", ["model", name], 1))
for rows in (1, 2):
    FILES.append(("gpt-39b-%d.h5" % rows, ["model", "gpt-39b", "--microbatch", str(rows)], 1))

# Families whose data the tests have: models of the same sizes.
FAMILIES = {"bert": "8", "bert-moe": "5", "vit": "8", "vgg": "6", "resnet": "6"}  # layers


def reference(name):
    return os.path.join(os.path.dirname(__file__), "../data/%s-small.h5" % name)


for name in FAMILIES:
    with h5py.File(reference(name), "r") as file:
        sizes = [word for key in ("layers", "hidden", "heads", "sequence", "vocab", "experts", "top_k", "image", "patch", "classes", "width", "stages")
                 if key in file.attrs for word in ("--" + key.replace("_", "-"), str(file.attrs[key]))]
    FILES.append((name + ".h5", ["model", name] + sizes + ["--microbatch", "8", "--dtype", "fp32", "--weights", reference(name)], 1))
    for shape, where, stages in (("", "cpu2", "0-2@a:1x1,2-END@b:1x1"), ("-wide", "cpu2one", "0-END@a:1x2")):
        FILES.append(("plan-%s%s.h5" % (name, shape), ["plan", "--input", "@%s.h5" % name, "--cluster", "@%s.json" % where, "--predict", "--microbatches",
                                                        "1", "--layers-per-model", "6", "--stages", stages.replace("END", FAMILIES[name])], 1))

# Profiles: predicted on paper, and measured ones, which a second run would not repeat.
PREDICTED = [  # name, model, cluster, options
    ("39b-a4v4", "gpt-39b", "a4v4", []), ("39b2-a4v4", "gpt-39b-2", "a4v4", []), ("39b-a3v3", "gpt-39b", "a3v3", []), ("15b-a2v2", "gpt-15b", "a2v2", []),
    ("15b-a1v2", "gpt-15b", "a1v2", ["--program", "tensor"]), ("gpt2-small", "gpt2-124m", "small", []),
    ("gpt2-all", "gpt2-124m", "small", ["--program", "all", "--layers-per-model", "12"]), ("gpt2-three", "gpt2-124m", "three", []),
    ("bert-small", "bert-base", "small", ["--microbatches", "16"]), ("moe-small", "bert-moe-base", "small", []),
    ("moe-one", "bert-moe-base", "one", ["--program", "synthesised", "--layers-per-model", "6"]), ("llama-a1v2", "llama-2-7b", "a1v2", []),
    ("vit-three", "vit-base", "three", []), ("vgg-small", "vgg19", "small", []), ("resnet-three", "resnet50", "three", []),
    ("gpt2-mixed", "gpt2-124m", "fast-link", ["--mixed", "yes"]), ("gpt2-mixed-even", "gpt2-124m", "fast-link", ["--mixed", "yes", "--mixed-rows", "even"]),
    ("vgg-mixed", "vgg19", "fast-link", ["--mixed", "auto", "--program", "all", "--layers-per-model", "8"]),
    ("gpt2-zero1", "gpt2-124m", "small", ["--sharded-optimizer", "yes"]), ("resnet-fp16", "resnet50", "small", ["--precision", "fp16"]),
]
for name, model, where, options in PREDICTED:
    FILES.append(("p-%s.h5" % name, ["profile", "--input", "@%s.h5" % model, "--cluster", "@%s.json" % where, "--predict"] + options, 1))
MEASURED = [("gpt", 2, "cpu2", []), ("gpt", 3, "cpu3", ["--mixed", "yes"]), ("llama", 4, "cpu4", []), ("gpt-untied", 4, "cpu4one", [])]
for model, ranks, where, options in MEASURED:
    FILES.append(("p-%s-%d.h5" % (model, ranks), ["profile", "--input", "@%s.h5" % model, "--cluster", "@%s.json" % where, "--threads", "1",
                                                   "--layers-per-model", "6", "--profile-seconds", "2"] + options, ranks))


def plan(name, words, ranks=1, codes=(0,)):
    INSTANCES.append(Instance(name, words, ranks, False, codes, None))


for name, model, where, options in PREDICTED:
    # prediction is compared as well: a loaded profile and a profile made on the way must give the same plan
    plan("plan-" + name, ["plan", "--profile", "@p-%s.h5" % name, "--microbatches", "32"])
    plan("predict-" + name, ["plan", "--input", "@%s.h5" % model, "--cluster", "@%s.json" % where, "--predict"] + options +
         ([] if "--microbatches" in options else ["--microbatches", "16"]))
for model, ranks, _, _ in MEASURED:
    for B in (1, 8):
        plan("measured-%s-%d-%d" % (model, ranks, B), ["plan", "--profile", "@p-%s-%d.h5" % (model, ranks), "--microbatches", str(B)])
for schedule in ("gpipe", "1f1b", "eager1f1b"):
    plan("schedule-" + schedule, ["plan", "--profile", "@p-39b-a4v4.h5", "--microbatches", "64", "--schedule", schedule], codes=(0, 4))
for strategy in ("even", "megatron", "alpa", "hexiscale"):
    for name in ("39b-a4v4", "gpt2-three"):
        plan("%s-%s" % (strategy, name), ["plan", "--profile", "@p-%s.h5" % name, "--microbatches", "64", "--strategy", strategy],
             codes=(0, 4))
for words in ("--hide-threshold 0.1", "--use-all-devices yes", "--granularity 12", "--ignore-communication yes", "--gap 0.05", "--compare yes",
              "--program data", "--explain yes"):
    plan("39b" + words.replace(" ", "-"), ["plan", "--profile", "@p-39b-a4v4.h5", "--microbatches", "128"] + words.split(), codes=(0, 4))
plan("what-if-link", ["plan", "--profile", "@p-39b-a4v4.h5", "--microbatches", "64", "--what-if", "link=1..25Gbit/s:4"])
plan("what-if-nodes", ["plan", "--input", "@gpt-15b.h5", "--cluster", "@a2v2.json", "--predict", "--microbatches", "32", "--what-if", "nodes.v100=1..3"])
plan("forced", ["plan", "--profile", "@p-gpt2-small.h5", "--microbatches", "16", "--stages", "0-20@v100:1x2,20-50@a100:2x2"])
plan("forced-tensor", ["plan", "--input", "@gpt2-124m.h5", "--cluster", "@small.json", "--predict", "--microbatches", "8", "--layers-per-model", "6",
                       "--stages", "0-3@a100:2x2t2,3-6@v100:1x2t2"])
plan("impossible", ["plan", "--profile", "@p-39b-a4v4.h5", "--microbatches", "1", "--stages", "0-1@v100:1x1"], codes=(2, 3, 4))
for name, model, where, options in (
        ("gpt2", "gpt2-124m", "fast-link", []), ("moe", "bert-moe-base", "one", ["--segments", "2"]), ("vgg", "vgg19", "small", ["--mesh", "machines"]),
        ("bert", "bert-base", "fast-link", ["--microbatches", "4"]), ("resnet", "resnet50", "fast-link", ["--memory-limit", "no"])):
    plan("spmd-" + name, ["spmd", "--input", "@%s.h5" % model, "--cluster", "@%s.json" % where] + options)

# Plan files from which both sides train and simulate.
FORCED = [  # name, model, ranks, cluster, stages, options of planning
    ("one", "gpt", 1, "cpu1", "0-END@a:1x1", []), ("two", "gpt", 2, "cpu2", "0-3@a:1x1,3-END@b:1x1", []),
    ("rows", "gpt", 2, "cpu2one", "0-END@a:1x2", []), ("tensor", "gpt", 2, "cpu2one", "0-END@a:1x2t2", []),
    ("three", "llama", 3, "cpu3", "0-2@a:1x1,2-END@b:1x2", []), ("four", "llama", 4, "cpu4", "0-2@a:1x1,2-3@a:1x1,3-4@b:1x1,4-END@b:1x1", []),
    ("grid", "gpt-untied", 4, "cpu4", "0-3@a:1x2,3-END@b:1x2t2", []), ("mixed", "gpt", 3, "cpu3", "0-END@a:1+b:2", ["--mixed", "yes"]),
    ("synthesised", "gpt", 4, "cpu4", "0-4@a:1x2,4-END@b:1x2", ["--program", "synthesised"]),
    ("zero1", "gpt", 2, "cpu2one", "0-END@a:1x2", ["--sharded-optimizer", "yes"]),
]
LAYERS = 8  # of the small models, planned with --layers-per-model 6
for name, model, ranks, where, stages, options in FORCED:
    words = ["plan", "--input", "@%s.h5" % model, "--cluster", "@%s.json" % where, "--predict", "--microbatches", "4", "--layers-per-model", "6",
             "--stages", stages.replace("END", str(LAYERS))] + options
    plan("forced-" + name, words)
    FILES.append(("plan-%s.h5" % name, words, 1))
    for schedule in ("gpipe", "1f1b", "h1f1b"):
        plan("simulate-%s-%s" % (name, schedule), ["simulate", "--plan", "@plan-%s.h5" % name, "--schedule", schedule])
# One synthesised program for unequal devices.
FORCED.append(("spmd", "gpt-untied", 3, "cpu3far", None, None))
FILES.append(("plan-spmd.h5", ["spmd", "--input", "@gpt-untied.h5", "--cluster", "@cpu3far.json", "--microbatches", "4", "--layers-per-model", "6"], 1))


def train(name, model, plan, ranks, where, more, plans=None):
    words = ["train", "--input", "@%s.h5" % model, "--plan", plan, "--cluster", "@%s.json" % where, "--layers-per-model", "6", "--steps", "4"]
    INSTANCES.append(Instance("train-" + name, words + more, ranks, True, (0,), plans))


for name, model, ranks, where, _, _ in FORCED:
    for schedule in ("h1f1b", "gpipe") if ranks > 1 else ("h1f1b",):
        train("%s-%s" % (name, schedule), model, "@plan-%s.h5" % name, ranks, where, ["--schedule", schedule])
    if name in ("mixed", "synthesised", "spmd", "grid"):  # each side makes its own programs and ratios
        train("own-" + name, model, "@PLAN", ranks, where, [], next(words for file, words, _ in FILES if file == "plan-%s.h5" % name))
train("sgd", "gpt", "@plan-two.h5", 2, "cpu2", ["--optimizer", "sgd", "--momentum", "0.9", "--clip-norm", "0"])
train("odd-microbatches", "llama", "@plan-four.h5", 4, "cpu4", ["--microbatches", "7", "--schedule", "eager1f1b"])
for name in FAMILIES:
    train(name, name, "@plan-%s.h5" % name, 2, "cpu2", ["--data", reference(name)])
    train(name + "-wide", name, "@plan-%s-wide.h5" % name, 2, "cpu2one", ["--data", reference(name)])
