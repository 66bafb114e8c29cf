"""1797 digits of 8 x 8 pixels, enlarged to CIFAR-10's 32 x 32 in three colours, in two files of its binary format. A vgg of 8 channels
starts at the loss of random guesses, ln 10. In 150 steps it must fall below a quarter of that, on one rank and on two."""
import glob
import gzip
import os
import subprocess
import sys
import tempfile

import h5py
import numpy as np

HAPT = os.environ["HAPT"]
FOLDER = os.environ.get("HAPT_DIGITS", "/usr/lib/python3/dist-packages/sklearn/datasets")
STEPS = 150


def hapt(ranks, *arguments):
    launcher = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
    done = subprocess.run(launcher + [HAPT, *map(str, arguments)], capture_output=True, text=True, timeout=250)
    if done.returncode != 0:
        sys.exit(f"{ranks} ranks, {arguments}: code {done.returncode}\n{done.stderr[-600:]}")


with gzip.open(glob.glob(FOLDER + "/**/digits.csv.gz", recursive=True)[0], "rt") as table:
    rows = np.loadtxt(table, delimiter=",")
pixels = np.kron(rows[:, :64].reshape(-1, 8, 8), np.ones((4, 4))) * 15  # 0 to 16 becomes 0 to 240
records = np.concatenate([rows[:, 64:], np.repeat(pixels[:, None], 3, axis=1).reshape(len(rows), -1)], axis=1).astype(np.uint8)
with tempfile.TemporaryDirectory() as folder:
    files = [os.path.join(folder, f"data_batch_{k}.bin") for k in (1, 2)]
    records[:1000].tofile(files[0])
    records[1000:].tofile(files[1])
    data, model = os.path.join(folder, "digits.h5"), os.path.join(folder, "model.h5")
    hapt(1, "data", *files, "--type", "cifar10", "--output", data)
    with h5py.File(data) as file:
        assert np.array_equal(file["images"][()].reshape(len(rows), -1), records[:, 1:])
        assert np.array_equal(file["labels"][()], records[:, 0])
        flat = pixels.astype(np.uint8).astype(float)
        assert np.allclose(file["mean"][()], flat.mean()) and np.allclose(file["std"][()], flat.std())
    hapt(1, "model", "vgg", "--image", 32, "--classes", 10, "--width", 8, "--hidden", 32, "--stages", "1,1,1", "--microbatch", 8,
         "--data", data, "--output", model)
    losses = []
    for ranks in (1, 2):
        output = os.path.join(folder, str(ranks))
        hapt(ranks, "--input", model, "--microbatches", 4, "--steps", STEPS, "--learning-rate", 5e-3, "--profile-seconds", 1,
             "--output", output)
        with h5py.File(os.path.join(output, "run.h5")) as run:
            losses.append(run["train/loss"][()])
            assert run["train"].attrs["items_per_step"] == 32 and "images_per_second" in run["train"]
    first, last = losses[0][0], losses[0][-10:].mean()
    print(f"loss {first:.3f} to {last:.3f}; ranks differ by {np.max(np.abs(losses[0] - losses[1])):.1e}")
    assert abs(first - np.log(10)) < 0.3 and last < np.log(10) / 4
    # The same rows in another order of sums: rounding differences grow during training.
    assert np.max(np.abs(losses[0][:10] - losses[1][:10])) < 1e-3
