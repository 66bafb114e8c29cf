"""Profiles that h5py writes, and runs of hapt on them. Shared by the tests in Python."""
import os
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

from checking import HAPT, MPIRUN, check, end

def run(*arguments, ranks=0):
    command = (MPIRUN + [str(ranks)] if ranks else []) + [HAPT, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


def refuses(code, *arguments, ranks=0, says="", hint=""):
    """One error line, a hint, the exit code, nothing on standard output."""
    result = run(*arguments, ranks=ranks)
    name = "hapt " + " ".join(arguments) + (f" on {ranks} ranks" if ranks else "")
    check(result.returncode == code, f"{name}: exit code {result.returncode}, not {code}: {result.stderr.strip()}")
    check(result.stderr.count("error:") == 1, f"{name}: one error line: {result.stderr}")
    check("hint: " + hint in result.stderr, f"{name}: a hint '{hint}': {result.stderr}")
    check(says in result.stderr, f"{name}: says '{says}': {result.stderr}")
    check(result.stdout == "", f"{name}: silent on standard output: {result.stdout}")


def profile(path, change=None, cast=None, strings="fixed", **storage):
    """fast 1 x 2 and slow 1 x 2, nine layers of 1/4 s on one fast device; all values are exact in single precision."""
    L, C = 9, 2
    cast = cast or (lambda kind, values: values)
    with h5py.File(path, "w") as file:
        file["boundary_bytes"] = cast("int", np.array([1024.0] * (L - 1) + [0.0]))
        file["link_bandwidth"] = cast("float", np.array([[65536.0, 8192.0], [8192.0, 65536.0]]))
        file["link_latency"] = cast("float", np.zeros((C, C)))
        for c, (name, speed, memory) in enumerate((("fast", 4.0, 4096.0), ("slow", 2.0, 2048.0))):
            group = file.create_group(f"cluster_{c}")
            group.attrs["name"] = np.bytes_(name) if strings == "fixed" else name
            group.attrs["nodes"] = np.int8(1)
            group.attrs["devices_per_node"] = np.uint64(2)
            group.attrs["device_memory_bytes"] = np.float32(memory)
            group.attrs["peak_flops"] = np.int64(speed)
            group["submesh"] = cast("int", np.array([[1, 1], [1, 2]]))
            time = np.full((2, L, L), np.nan)
            bytes_ = np.zeros((2, L, L))
            for s in range(2):
                for i in range(L):
                    for j in range(i, L):
                        time[s, i, j] = (j - i + 1) / speed / (s + 1)
                        bytes_[s, i, j] = 64 * (j - i + 1)
            tables = {"stage_time": time, "stage_forward_time": time / 4, "parameter_bytes": 2 * bytes_, "activation_bytes": bytes_}
            for name, values in tables.items():
                group.create_dataset(name, data=cast("float", values), **storage)
        if change:
            change(file)


def mixed(file, k=0, clusters=(0, 1), counts=(1, 1), scale=1.0, flat=True, **attributes):
    """A mixed stage on the devices of fast and slow: as fast as both together, multiplied by `scale`."""
    L = 9
    group = file.create_group(f"mixed_{k}")
    group.attrs["clusters"], group.attrs["counts"] = np.array(clusters, dtype="i2"), np.array(counts, dtype="u4")
    for name, values in attributes.items():
        group.attrs[name] = values
    time, bytes_ = np.full((L, L), np.nan), np.zeros((L, L))
    for i in range(L):
        for j in range(i, L):
            time[i, j] = scale * (j - i + 1) / sum(count * (4.0, 2.0)[c] for c, count in zip(clusters, counts) if 0 <= c < 2)
            bytes_[i, j] = 64 * (j - i + 1)
    for name, values in (("stage_time", time), ("stage_forward_time", time / 4)):
        group[name] = values if flat else values[None]
    for name, values in (("parameter_bytes", 2 * bytes_), ("activation_bytes", bytes_)):
        group[name] = values if flat else np.stack([values] * len(clusters))


def put(path, value, where=Ellipsis):
    def change(file):
        file[path][where] = value
    return change


def replace(path, values):
    def change(file):
        del file[path]
        if values is not None:
            file[path] = values
    return change


def attribute(path, name, value):
    def change(file):
        if value is None:
            del file[path].attrs[name]
        else:
            file[path].attrs[name] = value
    return change


def campaign(*parts):
    """Runs the parts in a new folder and exits with the result."""
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
    os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    try:
        for part in parts:
            part()
    finally:
        os.chdir("/")
        shutil.rmtree(folder)
    end()
