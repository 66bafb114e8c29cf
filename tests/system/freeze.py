"""usage: freeze.py MODEL OUTPUT PREFIX...: a copy of the model file in which parameters with these prefixes are not trained."""
import shutil
import sys

import h5py

shutil.copy(sys.argv[1], sys.argv[2])
with h5py.File(sys.argv[2], "r+") as model:
    names = [name.decode() if isinstance(name, bytes) else name for name in model["tensors/name"][...]]
    trainable = model["tensors/trainable"][...]
    for t, name in enumerate(names):
        if name.startswith(tuple(sys.argv[3:])):
            trainable[t] = 0
    model["tensors/trainable"][...] = trainable
