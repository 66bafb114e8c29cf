"""Model files with impossible attributes of operators. FOLDER holds FAMILY.h5 of each family. Writes FOLDER/bad-NAME.h5 and prints one line
per file: NAME and a pattern of the error."""
import shutil
import sys

import h5py
import numpy as np

folder = sys.argv[1]
HUGE = 2**62


def replace(file, name, change):
    data, attributes = file[name][...], dict(file[name].attrs)
    del file[name]
    made = change(data)
    new = file.create_dataset(name, data=data if made is None else made)
    for key, value in attributes.items():
        new.attrs[key] = value


def find(file, kind):
    return [text.decode() if isinstance(text, bytes) else text for text in file["/operators/type"][...]].index(kind)


def attribute(kind, index, value, table="integer"):
    def change(file):
        row = find(file, kind)
        replace(file, f"/operators/{table}", lambda data: data.__setitem__((row, index), value))
    return change


def reads(kind, to, source, other=None):
    """Input `to` becomes input `source` of the first operator, or of operator `other`."""
    def change(file):
        value = file["/operators/input"][...][find(file, other or kind), source]
        attribute(kind, to, value, "input")(file)
    return change


def real(kind, value):
    return attribute(kind, 0, value, "real")


def retype(kind, to):
    def change(file):
        row = find(file, kind)

        def put(data):
            text = [entry.decode() if isinstance(entry, bytes) else entry for entry in data]
            text[row] = to
            return np.array([entry.encode() for entry in text], dtype="S40")
        replace(file, "/operators/type", put)
    return change


def frozen(kind, to):
    """Only the parameters behind the operator are trained, so that it needs no gradient."""
    def change(file):
        retype(kind, to)(file)
        first = file["/operators/input"][...][-2][1] if len(file["/operators/input"]) > 1 else 0
        replace(file, "/tensors/trainable", lambda data: np.where(np.arange(len(data)) == first, data, 0).astype(data.dtype))
    return change


CASES = {
    "vgg": {"stride0": (attribute("conv2d", 0, 0), "stride"), "stride-negative": (attribute("conv2d", 0, -1), "stride"),
            "stride-huge": (attribute("conv2d", 0, HUGE), "stride"), "padding-negative": (attribute("conv2d", 1, -1), "padding"),
            "padding-huge": (attribute("conv2d", 1, HUGE), "padding"), "padding-other": (attribute("conv2d", 1, 0), "shape"),
            "pool0": (attribute("max_pool", 0, 0), "kernel"), "pool-negative": (attribute("max_pool", 0, -2), "padding|kernel"),
            "pool-huge": (attribute("max_pool", 0, HUGE), "kernel"), "pool-large": (attribute("max_pool", 0, 99), "larger than the image"),
            "pool-stride0": (attribute("max_pool", 1, 0), "stride"), "pool-padding": (attribute("max_pool", 2, 5), "half its kernel"),
            "pool-padding-negative": (attribute("max_pool", 2, -2**63), "padding"),
            "collective": (retype("relu", "all_reduce"), "all_reduce"),
            "backward-frozen": (frozen("relu", "slice"), "slice belongs in sharded graphs only")},
    "resnet": {"count0": (attribute("batch_mean", 0, 0), "N is less"), "count-negative": (attribute("batch_norm_running", 0, -5), "N is less"),
               "count-other": (attribute("batch_mean", 0, 10**9), "statistics of its own input"),
               "running-mean": (reads("batch_norm_running", 5, 1), "are not parameters"),
               "running-twice": (reads("batch_variance", 1, 5, "batch_norm_running"), "other readers"),
               "training": (reads("batch_norm_running", 7, 0, "conv2d"), "tensor images"),
               "epsilon": (real("batch_norm_running", -1.0), "epsilon"), "epsilon-nan": (real("batch_norm_running", np.nan), "attribute")},
    "bert-moe": {"chosen0": (attribute("moe_gate", 0, 0), "experts"), "chosen-more": (attribute("moe_gate", 0, 9), "experts"),
                 "experts0": (attribute("moe_dispatch", 0, 0), "experts"), "experts-huge": (attribute("moe_dispatch", 0, HUGE), "shape"),
                 "capacity-negative": (attribute("moe_dispatch", 1, -1), "capacity"),
                 "capacity-huge": (attribute("moe_dispatch", 1, HUGE), "shape"), "count-other": (attribute("moe_count", 0, 7), "shape"),
                 "filled": (real("expert_linear", -1.0), "filled share"), "heads0": (attribute("grouped_attention", 0, 0), "heads")},
    "llama": {"heads-negative": (attribute("grouped_attention", 0, -1), "heads"), "causal": (attribute("grouped_attention", 1, 2), "causal"),
              "turned-heads0": (attribute("rope", 0, 0), "heads"), "turned-heads": (attribute("rope", 0, 3), "heads"),
              "turned-base": (real("rope", 0.0), "base"), "backward": (retype("rope", "rope_dx"), "rope_dx"),
              "epsilon": (real("rms_norm", 2.0), "epsilon")},
    "vit": {"token": (attribute("take_token", 0, 99), "token"), "token-negative": (attribute("take_token", 0, -1), "token"),
            "collective": (retype("gelu", "reduce_scatter"), "reduce_scatter")},
}
for family, cases in CASES.items():
    for name, (change, pattern) in cases.items():
        path = f"{folder}/bad-{family}-{name}.h5"
        shutil.copy(f"{folder}/{family}.h5", path)
        with h5py.File(path, "r+") as file:
            change(file)
        print(f"{family}-{name}\t{pattern}")
