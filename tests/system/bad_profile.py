"""Profiles without a plan: damaged, absurd, hostile, infeasible. Each gives one clear error and the right exit code, in little memory."""
import concurrent.futures
import os
import random
import resource
import shutil
import subprocess

import numpy as np

from checking import HAPT, LONG, MPIRUN, check
from profiles import attribute, campaign, mixed, profile, put, refuses, replace, run


def table(name, **storage):
    """Replaces a dataset by one without written data."""
    def change(file):
        del file[name]
        file.create_dataset(name, dtype="f8", **storage)
    return change


def unwritten(layers, clusters, **storage):
    """A profile within all limits, whose big tables exist in the file's header only."""
    def change(file):
        for name in list(file):
            del file[name]
        file["boundary_bytes"] = np.zeros(layers)
        file["link_bandwidth"], file["link_latency"] = np.ones((clusters, clusters)), np.zeros((clusters, clusters))
        for c in range(clusters):
            group = file.create_group(f"cluster_{c}")
            group.attrs.update(name=f"c{c}", nodes=1, devices_per_node=2, device_memory_bytes=1e9, peak_flops=1.0)
            group["submesh"] = np.array([[1, 1], [1, 2]])
            for name in ("stage_time", "stage_forward_time", "parameter_bytes", "activation_bytes"):
                group.create_dataset(name, shape=(2, layers, layers), chunks=(1, 64, layers), dtype="f8", **storage)
    return change


def wide_chunks(file):
    """A small table in one chunk of 134 MB of zeros, which compresses well."""
    values = file["cluster_0/stage_time"][...]
    del file["cluster_0/stage_time"]
    new = file["cluster_0"].create_dataset("stage_time", shape=values.shape, maxshape=(None, None, None),
                                           chunks=(1, 4096, 4096), compression="gzip", compression_opts=1, dtype="f8")
    new[...] = values


def all_nan(file):
    for c in range(2):
        file[f"cluster_{c}/stage_time"][...] = np.nan


def degrees(*values):
    def change(file):
        file["cluster_0/tensor_parallel"] = np.array(values) if values else "two"
    return change


def group(change=None, **arguments):
    """With mixed stages that are changed."""
    def both(file):
        mixed(file, **arguments)
        if change:
            change(file)
    return both


def two_groups(file):
    mixed(file, 0)
    mixed(file, 1)


CELL = (0, 2, 4)
MIXED = {
    "one-cluster": group(clusters=(0,), counts=(1,)), "same-clusters": group(clusters=(1, 1)),
    "falling-clusters": group(clusters=(1, 0)), "unknown-cluster": group(clusters=(0, 2)),
    "negative-cluster": group(clusters=(-1, 0)), "three-clusters": group(clusters=(0, 1, 2), counts=(1, 1, 1)),
    "many-clusters": group(clusters=range(40), counts=[1] * 40), "few-counts": group(clusters=(0, 1), counts=(1,)),
    "no-count": group(counts=(0, 1)), "many-counts": group(counts=(1, 3)),
    "wide-count": group(attribute("mixed_0", "counts", np.array([1, 2 ** 40]))),
    "text-counts": group(attribute("mixed_0", "counts", "two")), "lost-counts": group(attribute("mixed_0", "counts", None)),
    "lost-clusters": group(attribute("mixed_0", "clusters", None)),
    "empty-clusters": group(attribute("mixed_0", "clusters", np.ones(0, dtype=int))),
    "group-twice": two_groups, "gap-in-groups": group(k=1), "far-group": group(k=256),
    "odd-ratios": group(ratios=[0.5, 0.25]), "no-ratio": group(ratios=[1.0, 0.0]), "nan-ratio": group(ratios=[np.nan, 0.5]),
    "negative-ratio": group(ratios=[1.5, -0.5]), "few-ratios": group(counts=(2, 2), ratios=[0.5, 0.25, 0.25]),
    "many-ratios": group(ratios=[0.25] * 4), "text-ratios": group(ratios="even"),
    "mixed-lost-program": group(program=1), "mixed-negative-program": group(program=-1), "mixed-far-program": group(program=1 << 20),
    "mixed-wide-program": group(program=2 ** 40), "mixed-text-program": group(program="synthesised"),
    "mixed-many-programs": group(program=[1, 2]), "mixed-negative-time": group(put("mixed_0/stage_time", -1.0, (2, 4))),
    "mixed-absurd-time": group(put("mixed_0/stage_time", 1e300, (2, 4))),
    "mixed-long-forward": group(put("mixed_0/stage_forward_time", 99.0, (2, 4))),
    "mixed-nan-memory": group(put("mixed_0/parameter_bytes", np.nan, (2, 4))),
    "mixed-infinite-memory": group(put("mixed_0/activation_bytes", np.inf, (2, 4))),
    "mixed-nan-step": group(lambda file: file.__setitem__("mixed_0/step_time", np.full((9, 9), np.nan))),
    "mixed-no-table": group(replace("mixed_0/stage_time", None)), "mixed-no-memory": group(replace("mixed_0/parameter_bytes", None)),
    "mixed-short-table": group(replace("mixed_0/stage_time", np.ones((9, 8)))),
    "mixed-flat-table": group(replace("mixed_0/stage_time", np.ones(9))),
    "mixed-deep-table": group(replace("mixed_0/stage_time", np.ones((2, 9, 9)))),
    "mixed-text-table": group(replace("mixed_0/stage_time", "soon")),
    "mixed-three-rows": group(replace("mixed_0/parameter_bytes", np.ones((3, 9, 9)))),
    "mixed-other-rows": group(replace("mixed_0/activation_bytes", np.ones((2, 9, 9)))),
    "mixed-huge": group(table("mixed_0/stage_time", shape=(1, 1 << 20, 1 << 20), chunks=(1, 64, 64))),
    "mixed-huge-rows": group(table("mixed_0/parameter_bytes", shape=(1 << 30, 9, 9), chunks=(1, 9, 9))),
    "mixed-never-written": group(table("mixed_0/stage_time", shape=(9, 9))),
    "table-for-mixed": lambda file: file.__setitem__("mixed_0", np.ones(9)),
}
BAD = {
    "nan-only": all_nan, "hollow": unwritten(1500, 1),
    "huge": table("cluster_0/stage_time", shape=(2, 1 << 20, 1 << 20), chunks=(1, 64, 64)),
    "many-layers": table("boundary_bytes", shape=(1 << 40,), chunks=(1024,)),
    "too-many-layers": replace("boundary_bytes", np.zeros(9000)),
    "many-submeshes": replace("cluster_0/submesh", np.ones((100000, 2), dtype=int)),
    "some-submeshes": replace("cluster_0/submesh", np.ones((60000, 2), dtype=int)),
    "overflowing": table("cluster_0/stage_time", shape=(1 << 62, 1 << 62, 1 << 62), chunks=(1, 1, 1)),
    "never-written": table("cluster_0/stage_time", shape=(2, 9, 9)),
    "wide-chunks": wide_chunks,
    "absurd-time": put("cluster_0/stage_time", 1e300, CELL),
    "negative-time": put("cluster_0/stage_time", -1.0, CELL),
    "nan-memory": put("cluster_1/parameter_bytes", np.nan, CELL),
    "infinite-memory": put("cluster_1/activation_bytes", np.inf, CELL),
    "negative-memory": put("cluster_1/activation_bytes", -5.0, CELL),
    "long-forward": put("cluster_0/stage_forward_time", 99.0, CELL),
    "nan-step": lambda file: file.__setitem__("cluster_0/step_time", np.full((2, 9, 9), np.nan)),
    "nan-boundary": put("boundary_bytes", np.nan, 3),
    "no-bandwidth": put("link_bandwidth", 0.0, (0, 0)),
    "crooked-link": put("link_bandwidth", 1.0, (0, 1)),
    "negative-latency": put("link_latency", -1.0),
    "strange-submesh": put("cluster_0/submesh", 3, (0, 1)),
    "submesh-twice": put("cluster_0/submesh", 2, (0, 1)),
    "one-degree": degrees(1), "many-degrees": degrees(1, 1, 1), "no-degree": degrees(0, 1), "odd-degree": degrees(1, 3),
    "negative-degree": degrees(1, -2), "large-degree": degrees(1, 2 ** 31 - 1), "wider-than-an-int": degrees(1, 2 ** 40),
    "text-degrees": degrees(),
    "no-table": replace("cluster_0/stage_time", None),
    "no-memory": replace("cluster_1/activation_bytes", None),
    "no-links": replace("link_bandwidth", None),
    "text-table": replace("cluster_0/stage_time", "soon"),
    "flat-table": replace("cluster_0/stage_time", np.ones(9)),
    "short-table": replace("cluster_0/stage_time", np.ones((2, 9, 8))),
    "no-layers": replace("boundary_bytes", np.ones(0)),
    "many-links": replace("link_bandwidth", np.ones((40, 40))),
    "no-submesh": replace("cluster_0/submesh", np.ones((0, 2), dtype=int)),
    "no-cluster": lambda file: file.__delitem__("cluster_1"),
    "group-for-table": lambda file: (file.__delitem__("boundary_bytes"), file.create_group("boundary_bytes")),
    "no-nodes": attribute("cluster_0", "nodes", 0), "lost-nodes": attribute("cluster_0", "nodes", None),
    "many-nodes": attribute("cluster_0", "nodes", 2 ** 40), "text-nodes": attribute("cluster_0", "nodes", "two"),
    "nan-device": attribute("cluster_0", "device_memory_bytes", np.nan),
    "long-name": attribute("cluster_0", "name", "x" * 1000), "same-name": attribute("cluster_0", "name", "slow"),
    "array-name": attribute("cluster_0", "name", np.ones(5)),
    "nan-flops": attribute("/", "flops_per_microbatch", np.nan), "negative-flops": attribute("/", "flops_per_microbatch", -1.0),
    "infinite-flops": attribute("/", "flops_per_microbatch", np.inf), "text-flops": attribute("/", "flops_per_microbatch", "many"),
    "other-format": attribute("/", "format", "hapt-plan"),
    "future": lambda file: file.attrs.update(format="hapt-profile", version=99),
}
# all numbers of ranks must refuse it alike; launchers take seconds to end a failing job, so these runs overlap
ON_RANKS = ["nan-only", "hollow", "huge", "wide-chunks", "nan-memory", "odd-degree", "no-table", "nan-flops", "cut", "text", "absent"]


def stays():
    with open("kept.h5", "rb") as file, open("good-plan.h5", "rb") as plan:
        check(file.read() == plan.read(), "a refused profile overwrites no plan")
    check(not [name for name in os.listdir() if name.endswith(".tmp")], "and leaves nothing beside it")


def bad_profiles():
    profile("good.h5")
    done = run("plan", "--profile", "good.h5", "--output", "good-plan.h5")
    check(done.returncode == 0, f"the good profile: {done.stderr}")
    shutil.copy("good-plan.h5", "kept.h5") # a plan may replace an older plan
    for name, change in {**BAD, **MIXED}.items():
        profile(f"{name}.h5", change=change)
        refuses(3, "plan", "--profile", f"{name}.h5", "--output", "kept.h5")
    with open("good.h5", "rb") as file:
        whole = file.read()
    for size in (0, 1, 7, 96, 500, 2000, len(whole) // 2, len(whole) - 600):
        with open("cut.h5", "wb") as file:
            file.write(whole[:size])
        refuses(3, "plan", "--profile", "cut.h5", "--output", "kept.h5")
    def hostile(file):
        file["cluster_0"].attrs["name"] = np.bytes_(b"fast\xda\x1b[31m")
    profile("hostile.h5", change=hostile)
    done = subprocess.run([HAPT, "plan", "--profile", "hostile.h5"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=120)
    said = done.stdout + done.stderr
    check(b"fast??[31m" in said and b"\x1b" not in said and b"\xda" not in said, f"a name for the terminal: {said}")
    os.mkdir("folder.h5")
    refuses(3, "plan", "--profile", "folder.h5")
    with open("text.h5", "w") as file:
        file.write("no table at all\n" * 100)
    for name in ("text", "nan-only", "hollow", "cut", "absent"):
        refuses(3, "simulate", "--plan", "good-plan.h5", "--profile", f"{name}.h5")
    refuses(3, "simulate", "--plan", "nan-only.h5")
    stays()


def on_ranks():
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        jobs = [pool.submit(refuses, 3, "plan", "--profile", f"{name}.h5", "--json", "--output", "kept.h5", ranks=ranks)
                for name in ON_RANKS for ranks in (2, 4)]
        jobs += [pool.submit(refuses, 3, "simulate", "--plan", "good-plan.h5", "--profile", f"{name}.h5", ranks=2)
                 for name in ("nan-only", "hollow", "text")]
        jobs += [pool.submit(refuses, 4, "plan", "--profile", "tiny.h5", "--output", "kept.h5", ranks=ranks, says="memory")
                 for ranks in (2, 4)]
        for job in jobs:
            job.result()
    stays()
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    check(most < 300, f"refusing took {most:.0f} MB")


def little_memory():
    """Well-formed tables of 41 GB in a few kB, larger than the memory: exit code 5, not a kill."""
    profile("filled.h5", change=unwritten(8000, 8, fillvalue=np.nan))
    for ranks in (0, 2):
        command = (MPIRUN + [str(ranks)] if ranks else []) + [HAPT, "plan", "--profile", "filled.h5", "--output", "kept.h5"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120,
                              preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30)))
        check(done.returncode == 5, f"too large for {ranks or 1} ranks: exit code {done.returncode}: {done.stderr}")
        check(done.stderr.count("error:") == 1 and "hint: " in done.stderr, f"one error and a hint: {done.stderr}")
    stays()


def damaged():
    """Bits and bytes changed anywhere. The profile is refused, infeasible or planned, but nothing crashes or hangs."""
    with open("good.h5", "rb") as file:
        whole = file.read()
    seed = random.randrange(1 << 30) if LONG else 5
    generator = random.Random(seed)

    def one(flip):
        at, name = places[flip], f"flipped-{flip}.h5"
        with open(name, "wb") as file:
            file.write(whole[:at[0]] + bytes([at[1]]) + whole[at[0] + 1:])
        result = run("plan", "--profile", name)
        os.remove(name)
        check(result.returncode in (0, 3, 4, 5),
              f"seed {seed}: byte {at[0]} set to {at[1]}: exit code {result.returncode}: {result.stderr}")
        check(result.returncode == 0 or result.stderr.count("error:") == 1, f"seed {seed}, byte {at[0]}: {result.stderr}")

    places = []
    for flip in range(800 if LONG else 16):
        at = generator.randrange(2048 if flip % 2 else len(whole))  # every second one in the headers
        places.append((at, whole[at] ^ 1 << generator.randrange(8) if flip % 4 < 2 else generator.randrange(256)))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        for job in [pool.submit(one, flip) for flip in range(len(places))]:
            job.result()


def infeasible():
    def tiny(file):
        for c in range(2):
            file[f"cluster_{c}"].attrs["device_memory_bytes"] = 400.0

    def gap(file):
        for c in range(2):
            file[f"cluster_{c}/stage_time"][:, 0:5, 4:] = np.nan

    profile("tiny.h5", change=tiny)
    profile("gap.h5", change=gap)
    refuses(4, "plan", "--profile", "tiny.h5", "--json", says="memory")
    refuses(4, "plan", "--profile", "tiny.h5", "--stages", "0-5@fast:1x2,5-9@slow:1x2", says="in flight")
    refuses(4, "plan", "--profile", "gap.h5", says="layer 4")


campaign(bad_profiles, infeasible, on_ranks, little_memory, damaged)
