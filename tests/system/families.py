"""tests/data/FAMILY-small.h5: weights, exact batches, and what PyTorch makes of them in fp64 with AdamW. hapt must lose the same
within 1e-5 at every step, and its trained weights must be away from PyTorch's by at most 1e-3 of the way that training went: on
one rank, with the rows shared by two, in a pipeline; the long campaign goes up to four ranks, three of which share rows unevenly.
A new family is a new file; its root attributes are the model's options."""
import glob
import os
import shutil
import subprocess
import sys
import tempfile

import h5py
import numpy as np

import profiles
from profiles import HAPT, LONG, MPIRUN, check

OPTIONS = ["layers", "hidden", "heads", "kv_heads", "ffn", "sequence", "vocab", "experts", "top_k", "image", "patch", "classes",
           "width", "stages"]
HALF = 2e-2  # a bf16 number has 8 bits: 0.4 %, and small models average little of it away
TRAINING = ("--optimizer adamw --learning-rate 1e-3 --lr-schedule constant --beta1 0.9 --beta2 0.95 --epsilon 1e-8 "
            "--weight-decay 0.1 --clip-norm 0 --profile-seconds 1").split()


def hapt(ranks, *arguments):
    launcher = MPIRUN + [str(ranks)] if ranks > 1 else []
    done = subprocess.run(launcher + [HAPT, *map(str, arguments)], capture_output=True, text=True, timeout=280)
    check(done.returncode == 0, f"{ranks} ranks, {arguments}: code {done.returncode}\n{done.stderr[-600:]}")
    return done.returncode == 0


def away(weights, reference):
    """The largest distance of a trained parameter from the reference's, as a share of how far training moved it."""
    worst = ("", 0.0)
    check(set(weights) == set(reference["trained"]), f"names {sorted(set(weights) ^ set(reference['trained']))[:4]} differ")
    for name in set(weights) & set(reference["trained"]):
        if name.endswith("key.bias"):  # its gradient is 0 but for rounding, which Adam takes for one
            continue
        if "bn1.weight" in weights and name == "bn1.bias":  # so are some of its elements (PyTorch in fp32: 0.1 away)
            continue
        trained, initial = reference["trained"][name][()], reference["parameters"][name][()]
        apart = np.linalg.norm(weights[name][()] - trained) / max(np.linalg.norm(trained - initial), 1e-30)
        worst = max(worst, (name, apart), key=lambda pair: pair[1])
    return worst


def train(reference, path, model, folder, ranks, microbatches, stages=None, tolerance=1e-5):
    """One run; returns the number of layers it was planned on. In bf16 (a looser tolerance) weights are not compared."""
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
        name, apart = away(file["parameters"], reference)
    check(apart <= 1e-3, f"{where}: {name} is {apart:.1e} away")
    print(f"{where}: losses within {worst:.1e}, weights {apart:.1e}")
    return layers


def family(path, folder):
    with h5py.File(path) as reference:
        attributes = reference.attrs
        name = attributes["family"]
        name = name.decode() if isinstance(name, bytes) else name
        rows = int(attributes["rows"])
        microbatches = 1 if name == "resnet" else 4  # its batch norm takes the statistics of a step's rows
        wide_microbatches = min(microbatches, 2)  # a row for each of four ranks
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


paths = [path for path in sorted(glob.glob("tests/data/*-small.h5")) if not path.endswith("gpt-small.h5")]
check(len(paths) >= 4, "references are missing")
for path in paths:
    scratch = tempfile.mkdtemp()
    family(path, scratch)
    shutil.rmtree(scratch)
print(f"{profiles.checks} checks, {profiles.failures} failed")
sys.exit(profiles.failures > 0)
