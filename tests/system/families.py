"""tests/data/FAMILY-small.h5: weights, exact batches, and what PyTorch makes of them in fp64 with AdamW. hapt must lose the same
within 1e-5 at every step, and its trained weights must be away from PyTorch's by at most 1e-3 of the way that training went: on
one rank, with the rows shared by two, in a pipeline; the long campaign goes up to four ranks, three of which share rows unevenly,
and to other shapes, whose references PyTorch makes on the spot (references.py). A new family is a new file; its root attributes are
the model's options."""
import glob
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

from checking import HAPT, LONG, MPIRUN, check, end

OPTIONS = ["layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "vocab", "tied_embeddings", "experts", "top_k", "image", "channels",
           "patch", "classes", "width", "stages", "pool"]
SHAPES = [  # sizes with few divisors; rows that four ranks share unevenly
    ("gpt", dict(layers=3, hidden=40, heads=5, sequence=20, vocab=77, tied_embeddings="yes", rows=12)),
    ("gpt", dict(layers=1, hidden=32, heads=2, sequence=33, vocab=50, tied_embeddings="no", rows=8)),
    ("llama", dict(layers=3, hidden=48, heads=6, kv_heads=1, ffn=72, sequence=17, vocab=61, tied_embeddings="no", rows=12)),
    ("llama", dict(layers=2, hidden=32, heads=4, kv_heads=4, ffn=88, sequence=24, vocab=53, tied_embeddings="yes", rows=8)),
    ("bert", dict(layers=3, hidden=36, heads=3, sequence=15, vocab=64, tied_embeddings="yes", rows=12)),
    ("bert", dict(layers=1, hidden=40, heads=5, sequence=19, vocab=43, tied_embeddings="no", rows=8)),
    ("bert-moe", dict(layers=4, hidden=24, heads=2, sequence=12, vocab=40, experts=7, top_k=3, tied_embeddings="yes", rows=12)),
    ("bert-moe", dict(layers=2, hidden=32, heads=4, sequence=10, vocab=48, experts=4, top_k=1, tied_embeddings="no", rows=8)),
    ("vit", dict(layers=3, hidden=36, heads=3, ffn=100, image=24, patch=6, channels=1, classes=5, rows=12)),
    ("vgg", dict(stages="1,2,3", image=24, width=6, hidden=50, channels=1, classes=9, pool=2, rows=12)),
    ("vgg", dict(stages="3", image=20, width=5, hidden=30, channels=3, classes=6, rows=8)),
    ("resnet", dict(stages="2,1,2", image=48, width=6, channels=3, classes=4, rows=12)),
]
HALF = 2e-2  # a bf16 number has 8 bits: 0.4 %, and small models average out little of that
TRAINING = ("--optimizer adamw --learning-rate 1e-3 --lr-schedule constant --beta1 0.9 --beta2 0.95 --epsilon 1e-8 "
            "--weight-decay 0.1 --clip-norm 0 --profile-seconds 1").split()


def hapt(ranks, *arguments):
    launcher = MPIRUN + [str(ranks)] if ranks > 1 else []
    done = subprocess.run(launcher + [HAPT, *map(str, arguments)], capture_output=True, text=True, timeout=280)
    check(done.returncode == 0, f"{ranks} ranks, {arguments}: code {done.returncode}\n{done.stderr[-600:]}")
    return done.returncode == 0


def apart(weights, reference, name):
    """The distance of a trained parameter from the reference's, divided by the distance that training moved it."""
    expected = reference["trained"][name][()]
    initial = reference["parameters"][name][()] if name in reference["parameters"] else 1.0 * name.endswith("running_var")
    distance = weights[name][()] - expected
    if name.endswith("c_attn.bias"):  # GPT-2 has the biases of queries, keys and values in one tensor
        distance[len(distance) // 3:2 * len(distance) // 3] = 0
    return np.linalg.norm(distance) / max(np.linalg.norm(expected - initial), 1e-30)


def away(weights, reference):
    """The largest such distance. It excludes biases of keys: their gradient is 0 apart from rounding, which Adam amplifies. It also
    excludes parameters that PyTorch itself gets wrong in fp32 for such a reason."""
    worst = ("", 0.0)
    names = set(reference["trained"])
    followed = any("running_" in name for name in names)  # resnet-small.h5 has no running statistics
    found = {name for name in weights if followed or "running_" not in name}
    check(found == names, f"names {sorted(found ^ names)[:4]} differ")
    for name in found & names:
        if name.endswith("key.bias"):
            continue
        if "trained_fp32" in reference and apart(reference["trained_fp32"], reference, name) > 3e-4:
            print(f"{name}: PyTorch in fp32 is {apart(reference['trained_fp32'], reference, name):.1e} away")
            continue
        worst = max(worst, (name, apart(weights, reference, name)), key=lambda pair: pair[1])
    return worst


def train(reference, path, model, folder, ranks, microbatches, stages=None, tolerance=1e-5):
    """One run. Returns the number of layers of its plan. In bf16 the tolerance is larger, and weights are not compared."""
    output = os.path.join(folder, f"run-{len(os.listdir(folder))}")
    forced = ["--stages", stages] if stages else []
    steps = len(reference["loss_fp64"])
    where = f"{os.path.basename(path)} on {ranks} ranks{', ' + stages if stages else ''}"
    if not hapt(ranks, "--input", model, "--data", path, "--microbatches", microbatches, "--steps", steps, *TRAINING, *forced,
                "--output", output):
        return 0
    with h5py.File(os.path.join(output, "run.h5")) as run:
        loss, expected = run["train/loss"][()], reference["loss_fp64"][()]
        layers = len(run["layers/end_op"])
    worst = np.max(np.abs(loss / expected - 1)) if loss.shape == expected.shape else np.inf
    check(worst <= tolerance, f"{where}: losses are {worst:.1e} away")
    if tolerance > 1e-5:
        print(f"{where}, bf16: losses within {worst:.1e}")
        return layers
    exported = os.path.join(output, "weights.h5")
    if not hapt(1, "export", "--checkpoint", output, "--output", exported):
        return layers
    with h5py.File(exported) as file:
        name, most = away(file["parameters"], reference)
    check(most <= 1e-3, f"{where}: {name} is {most:.1e} away")
    print(f"{where}: losses within {worst:.1e}, weights {most:.1e}")
    return layers


def family(path, folder):
    with h5py.File(path) as reference:
        attributes = reference.attrs
        name = attributes["family"]
        name = name.decode() if isinstance(name, bytes) else name
        rows = int(attributes["rows"])
        microbatches = 1 if name == "resnet" else 4  # resnet's batch norm uses the statistics of all rows of a step
        wide_microbatches = min(microbatches, 2)  # one row for each of four ranks
        options = [x for key in OPTIONS if key in attributes for x in ("--" + key.replace("_", "-"), attributes[key])]
        model, wide = os.path.join(folder, "model.h5"), os.path.join(folder, "wide.h5")
        for output, count in (model, microbatches), (wide, wide_microbatches):
            if not hapt(1, "model", name, *options, "--microbatch", rows // count, "--dtype", "fp32", "--weights", path, "--output",
                        output):
                return
        layers = train(reference, path, model, folder, 1, microbatches)
        if layers == 0:
            return
        check(layers > 3, f"{name} has {layers} layers")
        half = os.path.join(folder, "half.h5")
        if hapt(1, "model", name, *options, "--microbatch", rows // microbatches, "--dtype", "bf16", "--weights", path, "--output", half):
            train(reference, path, half, folder, 1, microbatches, tolerance=HALF)
        middle = layers // 2
        if LONG or "bert-small" in path:  # mpi/layouts.c has more of data parallelism
            train(reference, path, model, folder, 2, microbatches, f"0-{layers}@cpu:1x2")
        train(reference, path, model, folder, 2, microbatches, f"0-{middle}@cpu:1x1,{middle}-{layers}@cpu:1x1")
        if not LONG:
            return
        train(reference, path, model, folder, 3, microbatches)
        train(reference, path, wide, folder, 3, wide_microbatches, f"0-{layers}@cpu:1x3")
        train(reference, path, model, folder, 4, microbatches)
        train(reference, path, wide, folder, 4, wide_microbatches, f"0-{layers}@cpu:1x4")
        train(reference, path, model, folder, 4, microbatches, f"0-{middle}@cpu:1x2,{middle}-{layers}@cpu:1x2")
        ends = [layers * k // 4 for k in range(5)]
        train(reference, path, model, folder, 4, microbatches, ",".join(f"{a}-{b}@cpu:1x1" for a, b in zip(ends, ends[1:])))


def campaign():
    paths = [path for path in sorted(glob.glob("tests/data/*-small.h5")) if not path.endswith("gpt-small.h5")]
    check(len(paths) >= 4, "references are missing")
    made = tempfile.mkdtemp()
    if LONG:
        try:
            import references
            for seed, (name, shape) in enumerate(SHAPES):
                paths.append(os.path.join(made, f"{name}-{seed}.h5"))
                references.make(paths[-1], name, seed, **shape)
        except ImportError:
            print("other shapes need python3-torch")
    for path in paths:
        scratch = tempfile.mkdtemp()
        family(path, scratch)
        shutil.rmtree(scratch)
    shutil.rmtree(made)
    end()


if __name__ == "__main__":
    campaign()
