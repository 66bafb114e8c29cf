"""The 16-bit exchange of tied gradients. make: weights. compare: one step of SGD, tied against untied with equal tables."""
import sys

import h5py
import numpy as np

RATE = 1000.0  # so large that a weight after the step is its gradient, up to 1e-3


def bf16(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)


def make(model, tied, untied):
    random = np.random.default_rng(7)
    with h5py.File(model) as source, h5py.File(tied, "w") as one, h5py.File(untied, "w") as two:
        tensors = source["tensors"]
        for name, kind, shape in zip(tensors["name"], tensors["kind"], tensors["shape"]):
            name, kind = name.decode(), kind.decode()
            if kind != "parameter":
                continue
            value = random.normal(0, 0.1, [n for n in shape if n > 0]).astype(np.float32)
            for file in (one, two):
                file["parameters/" + name] = value
            if name == "wte.weight":
                two["parameters/lm_head.weight"] = value


def weights(path):
    with h5py.File(path) as file:
        return {name: file["parameters"][name][()].astype(np.float64) for name in file["parameters"]}


def compare(start, untied, fp32, narrow):
    begin, apart, wide, short = (weights(path) for path in (start, untied, fp32, narrow))
    table = "wte.weight"
    first = (begin[table] - apart[table]) / RATE
    last = (begin[table] - apart["lm_head.weight"]) / RATE
    scale = np.abs(first + last).max() * RATE
    exact = begin[table] - RATE * (first + last)
    rounded = begin[table] - RATE * (bf16(first).astype(np.float64) + bf16(last))
    # fp32 sums in another order; a term near the middle of two 16-bit numbers may be rounded either way
    assert np.abs(wide[table] - exact).max() < 1e-5 * scale, np.abs(wide[table] - exact).max() / scale
    off = np.abs(short[table] - rounded) > 1e-5 * scale
    assert off.mean() < 0.01, off.mean()
    changed = np.abs(short[table] - wide[table]) > 1e-5 * scale
    assert changed.mean() > 0.05, changed.mean()
    for name in begin:  # nothing else is rounded
        if name != table:
            assert np.array_equal(short[name], wide[name]), name
    print(f"{100 * changed.mean():.0f} % of the table rounded visibly, {100 * off.mean():.2f} % near a middle")


if __name__ == "__main__":
    {"make": make, "compare": compare}[sys.argv[1]](*sys.argv[2:])
