"""Writes a profile (format hapt-profile, `hapt help profile`) of layers whose times you know, for two kinds of devices.
usage: profile.py FILE"""
import sys

import h5py
import numpy as np

LAYERS = 12
SECONDS = {"fast": np.full(LAYERS, 0.010), "slow": np.full(LAYERS, 0.025)}  # forward and backward of a microbatch, on one device
MEMORY = {"fast": 4e9, "slow": 2e9}  # of each device, byte
LINK = 25e6  # byte/s between the two
BOUNDARY = 200e3  # byte between two layers, each direction
WEIGHTS, ACTIVATIONS = 100e6, 20e6  # byte of a layer: weights with optimizer state; activations of a microbatch

with h5py.File(sys.argv[1], "w") as file:
    file.attrs["format"], file.attrs["version"] = "hapt-profile", 1
    boundary = np.full(LAYERS, BOUNDARY)
    boundary[-1] = 0
    file["boundary_bytes"] = boundary
    file["link_bandwidth"] = np.array([[1e9, LINK], [LINK, 1e9]])
    file["link_latency"] = np.array([[1e-5, 1e-4], [1e-4, 1e-5]])
    for c, name in enumerate(SECONDS):
        group = file.create_group(f"cluster_{c}")
        group.attrs.update({"name": name, "nodes": 1, "devices_per_node": 2, "device_memory_bytes": MEMORY[name], "peak_flops": 0.0})
        shapes = [(1, 1), (1, 2)]  # nodes and devices of each submesh
        group["submesh"] = np.array(shapes)
        tables = {table: np.full((len(shapes), LAYERS, LAYERS), np.nan) for table in
                  ("stage_time", "stage_forward_time", "parameter_bytes", "activation_bytes")}
        for s, (nodes, devices) in enumerate(shapes):
            for first in range(LAYERS):
                for last in range(first, LAYERS):
                    seconds = SECONDS[name][first:last + 1].sum() / (nodes * devices)
                    tables["stage_time"][s, first, last] = seconds
                    tables["stage_forward_time"][s, first, last] = seconds / 3
                    tables["parameter_bytes"][s, first, last] = WEIGHTS * (last - first + 1)
                    tables["activation_bytes"][s, first, last] = ACTIVATIONS * (last - first + 1) / (nodes * devices)
        for table, values in tables.items():
            group[table] = values
