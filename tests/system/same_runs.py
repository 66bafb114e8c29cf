"""usage: same_runs.py RUN RUN: two runs of 6 steps, one of them perhaps resumed: losses, final weights and optimizer state are equal, bit for
bit, and the measured memory is the planned one."""
import glob
import sys

import h5py
import numpy


def state(run):
    found = {}

    def keep(name, item):
        if isinstance(item, h5py.Dataset) and name.startswith(("parameters/", "state")):
            found[name] = item[()].tobytes()

    for shard in sorted(glob.glob(run + "/checkpoints/step-00000006/shard-*.h5")):
        with h5py.File(shard) as file:
            file.visititems(keep)
    return found


runs = [h5py.File(run + "/run.h5") for run in sys.argv[1:]]
losses = [run["/train/loss"][()] for run in runs]
assert len(losses[0]) == 6 and numpy.isfinite(losses[0]).all(), losses
shared = min(map(len, losses))  # a resumed run has its own steps alone
assert losses[0][-shared:].tobytes() == losses[1][-shared:].tobytes(), losses
a, b = map(state, sys.argv[1:])
assert any(name.startswith("state") for name in a) and any(name.startswith("parameters/") for name in a), list(a)[:5]
assert a == b
for run in runs:
    assert (run["/train/memory_measured"][()] == run["/train/memory_planned"][()]).all()
