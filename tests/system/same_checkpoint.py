"""Do two checkpoints of one step hold the same tensors, bit by bit, for any plans? usage: RUN RUN STEP [another plan is not asked for]"""
import glob
import os
import sys

import h5py
import numpy


def tensors(run, step):
    found = {}
    folder = os.path.join(run, "checkpoints", "step-%08d" % step)
    for path in sorted(glob.glob(folder + "/shard-*.h5")):
        with h5py.File(path, "r") as file:
            def take(name, item):
                if isinstance(item, h5py.Dataset):
                    assert name not in found, name + " stands in two shards"
                    found[name] = numpy.array(item)
            file.visititems(take)
    with h5py.File(folder + "/manifest.h5", "r") as file:
        return found, len(file["shard_size"])


def main():
    (before, shards), (after, other_shards) = (tensors(run, int(sys.argv[3])) for run in sys.argv[1:3])
    print("%d tensors in %d and in %d shards" % (len(before), shards, other_shards))
    if not before or before.keys() != after.keys():
        sys.exit("other tensors: %s" % sorted(before.keys() ^ after.keys())[:5])
    for name in before:
        if before[name].tobytes() != after[name].tobytes():
            sys.exit("%s differs" % name)
    if not any(name.startswith("state1/") and numpy.any(before[name]) for name in before):
        sys.exit("no optimizer state")


main()
