"""Adds long skips to a GPT: skips.py MODEL FROM:TO... The output of block FROM (-1: the embedding) is added to the output of block TO."""
import sys

import h5py
import numpy as np


def texts(values):
    return [value.decode() if isinstance(value, bytes) else value for value in values]


def rewrite(file, name, rows):
    attributes = dict(file[name].attrs)
    del file[name]
    if isinstance(rows[0], str):
        rows = np.array([row.encode() for row in rows], dtype="S%d" % max(1, max(len(row) for row in rows)))
    new = file.create_dataset(name, data=rows)
    for key, value in attributes.items():
        new.attrs[key] = value


with h5py.File(sys.argv[1], "r+") as file:
    table = {}
    for path in ("tensors", "operators"):
        for name, data in file[path].items():
            rows = data[...]
            table[path, name] = texts(rows) if rows.dtype.kind in "SO" else list(rows)
    names = table["operators", "name"]

    def output(operator):
        return int(table["operators", "output"][names.index(operator)][0])

    for skip in sys.argv[2:]:
        start, end = (int(part) for part in skip.split(":"))
        source = output("h.%d.residual_2" % start if start >= 0 else "embedding")
        behind = names.index("h.%d.residual_2" % end) + 1
        old, new = output(names[behind - 1]), len(table["tensors", "name"])
        for column in ("kind", "role", "dtype", "init", "shape", "init_std", "trainable"):
            table["tensors", column].append(table["tensors", column][old])
        table["tensors", "name"].append("skip%d-%d" % (start, end))
        for row in table["operators", "input"][behind:]:
            row[row == old] = new
        row = names.index("h.%d.residual_2" % end)
        for column in ("type", "integer", "real"):
            table["operators", column].insert(behind, table["operators", column][row])
        names.insert(behind, "skip%d-%d" % (start, end))
        ends = [np.full_like(table["operators", kind][row], -1) for kind in ("input", "output")]
        ends[0][:2], ends[1][0] = (old, source), new
        table["operators", "input"].insert(behind, ends[0])
        table["operators", "output"].insert(behind, ends[1])
    for (path, name), rows in table.items():
        rewrite(file, path + "/" + name, rows if isinstance(rows[0], str) else np.array(rows))
