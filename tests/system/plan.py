"""`hapt plan` and `hapt simulate` as a user meets them, on profiles that h5py wrote."""
import json
import math
import os
import random
import shutil
import subprocess
import tempfile

import h5py
import numpy as np

HAPT = os.path.realpath(os.environ.get("HAPT", "build/hapt"))
LONG = os.environ.get("HAPT_LONG", "0") not in ("", "0")
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]
checks, failures = 0, 0


def check(passed, what):
    global checks, failures
    checks += 1
    if not passed:
        failures += 1
        print("failed:", what)
    return passed


def run(*arguments, ranks=0):
    command = (MPIRUN + [str(ranks)] if ranks else []) + [HAPT, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, timeout=120)


def refuses(code, *arguments, ranks=0, says=""):
    """One error line, a hint, the exit code, nothing on standard output."""
    result = run(*arguments, ranks=ranks)
    name = "hapt " + " ".join(arguments) + (f" on {ranks} ranks" if ranks else "")
    check(result.returncode == code, f"{name}: exit code {result.returncode}, not {code}: {result.stderr.strip()}")
    check(result.stderr.count("error:") == 1, f"{name}: one error line: {result.stderr}")
    check("hint: " in result.stderr, f"{name}: a hint: {result.stderr}")
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


def plan(path, *arguments, ranks=0):
    result = run("plan", "--profile", path, "--json", "--microbatches", "16", *arguments, ranks=ranks)
    if not check(result.returncode == 0, f"plan of {path}: {result.stderr}"):
        return {}
    document = json.loads(result.stdout)
    document["search"].pop("seconds")
    return document


def the_plan():
    profile("plain.h5")
    document = plan("plain.h5", "--output", "plan.h5")
    keys = ["format", "version", "microbatches", "schedule", "latency_s", "simulated_s", "t_max_s", "balance_eta", "search", "stages",
            "limit", "mfu", "blocking"]
    check(sorted(document) == sorted(keys), f"the keys of the plan: {sorted(document)}")
    stages = document["stages"]
    check(all(sorted(stage) == sorted(["layers", "subcluster", "nodes", "devices_per_node", "tensor_parallel", "compute_s", "comm_s",
                                       "warmup", "memory_bytes"]) for stage in stages), "the keys of a stage")
    check([stage["layers"][0] for stage in stages] == [0] + [stage["layers"][1] for stage in stages][:-1], "half-open layers")
    check(stages[-1]["layers"][1] == 9 and stages[-1]["comm_s"] == 0 and stages[-1]["warmup"] == 1, "the last stage")
    latency = sum(s["compute_s"] + 2 * s["comm_s"] for s in stages) + 15 * document["t_max_s"]
    check(math.isclose(latency, document["latency_s"], rel_tol=1e-12), "latency by its definition")
    check(0 < document["balance_eta"] <= 1, "balance")
    # 9 layers on devices of speeds 4, 4, 2, 2: six and three layers balance
    check(math.isclose(document["t_max_s"], 0.75), f"pace {document['t_max_s']}")
    table = run("plan", "--profile", "plain.h5", "--microbatches", "16")
    check(table.returncode == 0 and "fast" in table.stdout and "slow" in table.stdout, "the plan as a table")
    for ranks in (2, 3):
        check(plan("plain.h5", ranks=ranks) == document, f"the same plan on {ranks} ranks")
    return document


def schedules(document):
    simulated = {}
    for schedule in ("h1f1b", "1f1b", "eager1f1b", "gpipe"):
        result = run("simulate", "--plan", "plan.h5", "--schedule", schedule, "--json")
        if check(result.returncode == 0, f"simulate {schedule}: {result.stderr}"):
            simulated[schedule] = json.loads(result.stdout)
    own = json.loads(run("simulate", "--plan", "plan.h5", "--json").stdout)
    check(own["simulated_s"] == document["simulated_s"], "simulate agrees with the plan")
    check(own["schedule"] == "h1f1b" and own["hidden"], "H-1F1B hides the link")
    check(simulated["1f1b"]["simulated_s"] > own["simulated_s"], "1F1B does not")
    check([s["warmup"] for s in simulated["gpipe"]["stages"]] == [16] * len(document["stages"]), "GPipe launches all")
    forced = ",".join("{}-{}@{}:{}x{}".format(*s["layers"], s["subcluster"], s["nodes"], s["devices_per_node"])
                      for s in document["stages"])
    check(plan("plain.h5", "--stages", forced)["latency_s"] == document["latency_s"], "forced, the plan costs the same")
    even = plan("plain.h5", "--strategy", "even", "--schedule", "1f1b")
    check(even["latency_s"] > document["latency_s"] and even["schedule"] == "1f1b", "the even split costs more")
    check([s["subcluster"] for s in even["stages"]] == [s["subcluster"] for s in document["stages"]], "on the same submeshes")
    refuses(3, "plan", "--profile", "plain.h5", "--stages", "0-9@quick:1x1", says="quick")
    refuses(3, "plan", "--profile", "plain.h5", "--stages", "0-8@fast:1x1")
    refuses(3, "simulate", "--plan", "plain.h5")
    refuses(3, "simulate", "--plan", "absent.h5", ranks=2)
    refuses(2, "simulate")
    refuses(2, "plan")
    refuses(2, "plan", "--profile", "plain.h5", "--cluster", "c.json")
    refuses(2, "plan", "--profile", "plain.h5", "--stages", forced, "--strategy", "even")
    refuses(2, "plan", "--profile", "plain.h5", "--microbatches", "0")


def hiding():
    """Two equal stages whose boundary takes as long as a microbatch: HAPT 4.2.2."""
    def slow(file):
        file["boundary_bytes"][5] = 8192 * 0.75

    profile("slow.h5", change=slow)
    forced = plan("slow.h5", "--stages", "0-6@fast:1x2,6-9@slow:1x2", "--output", "slow-plan.h5")
    check(forced["t_max_s"] == 0.75 and forced["stages"][0]["comm_s"] == 0.75, "c = t_max")
    for schedule, low, high in (("h1f1b", 0.98, 1.001), ("eager1f1b", 0.65, 0.68), ("1f1b", -0.02, 0.02)):
        result = json.loads(run("simulate", "--plan", "slow-plan.h5", "--schedule", schedule, "--json").stdout)
        overlap = result["stages"][0]["overlap"]
        check(low <= overlap <= high, f"{schedule} hides {overlap} of the communication")
    long = json.loads(run("simulate", "--plan", "slow-plan.h5", "--microbatches", "256", "--json").stdout)
    check(long["hidden"] and long["simulated_s"] < 256 * 0.75 * 1.05, "a long step runs at the pace")
    # the link rules when it is slower than any stage needs to be, and is said to
    profile("link.h5", change=lambda file: put("boundary_bytes", 8192 * 0.9)(file) or tight(file))
    ruled = run("plan", "--profile", "link.h5", "--microbatches", "16")
    check(ruled.returncode == 0 and "set by link" in ruled.stdout, f"a plan paced by the link: {ruled.stdout}{ruled.stderr}")


def tight(file):
    """Neither subcluster holds the model alone."""
    for c in range(2):
        group = file[f"cluster_{c}"]
        group["stage_time"][:, 0, 8] = np.nan
        group["stage_time"][0] = np.nan


def foreign(document):
    """The same numbers in every dress."""
    def narrow(kind, values):
        return values.astype(np.int16 if kind == "int" else np.float32)

    def swapped(kind, values):
        return values.astype(">i8" if kind == "int" else ">f8")

    def attributes(file):
        file.attrs["format"] = "hapt-profile"
        file.attrs["version"] = np.uint8(1)
        file.create_group("mine")["notes"] = np.arange(5)

    def fixed_format(file):
        file.attrs["format"] = np.bytes_("hapt-profile")

    def zero_steps(file):
        for c in range(2):
            file[f"cluster_{c}"]["step_time"] = np.zeros((2, 9, 9), dtype=np.int32)

    dresses = {
        "narrow": dict(cast=narrow),
        "swapped": dict(cast=swapped, strings="variable"),
        "chunked": dict(chunks=(1, 3, 3), strings="variable", change=attributes),
        "deflated": dict(chunks=(2, 9, 9), compression="gzip", shuffle=True, fletcher32=True, change=fixed_format),
        "steps": dict(change=zero_steps),
    }
    for name, dress in dresses.items():
        profile(f"{name}.h5", **dress)
        check(plan(f"{name}.h5") == document, f"{name}: the same plan")


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


def huge(file):
    """Claims a gigantic table without storing it."""
    del file["cluster_0/stage_time"]
    file["cluster_0"].create_dataset("stage_time", shape=(2, 1 << 20, 1 << 20), chunks=(1, 64, 64), dtype="f8")


def many_layers(file):
    del file["boundary_bytes"]
    file.create_dataset("boundary_bytes", shape=(1 << 40,), chunks=(1024,), dtype="f8")


def all_nan(file):
    for c in range(2):
        file[f"cluster_{c}/stage_time"][...] = np.nan


def bad_profiles():
    cell = (0, 2, 4)
    changes = {
        "nan-only": all_nan, "huge": huge, "many-layers": many_layers,
        "absurd-time": put("cluster_0/stage_time", 1e300, cell),
        "negative-time": put("cluster_0/stage_time", -1.0, cell),
        "nan-memory": put("cluster_1/parameter_bytes", np.nan, cell),
        "infinite-memory": put("cluster_1/activation_bytes", np.inf, cell),
        "negative-memory": put("cluster_1/activation_bytes", -5.0, cell),
        "long-forward": put("cluster_0/stage_forward_time", 99.0, cell),
        "nan-boundary": put("boundary_bytes", np.nan, 3),
        "no-bandwidth": put("link_bandwidth", 0.0, (0, 0)),
        "crooked-link": put("link_bandwidth", 1.0, (0, 1)),
        "negative-latency": put("link_latency", -1.0),
        "strange-submesh": put("cluster_0/submesh", 3, (0, 1)),
        "submesh-twice": put("cluster_0/submesh", 2, (0, 1)),
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
        "other-format": attribute("/", "format", "hapt-plan"),
        "future": lambda file: file.attrs.update(format="hapt-profile", version=99),
    }
    for name, change in changes.items():
        profile("bad.h5", change=change)
        os.replace("bad.h5", f"{name}.h5")
        refuses(3, "plan", "--profile", f"{name}.h5")
    refuses(3, "plan", "--profile", "nan-only.h5", "--json", ranks=3)
    refuses(3, "plan", "--profile", "absent.h5", ranks=2)
    os.mkdir("folder.h5")
    refuses(3, "plan", "--profile", "folder.h5")
    with open("text.h5", "w") as file:
        file.write("no table at all\n" * 100)
    refuses(3, "plan", "--profile", "text.h5")


def damaged():
    """Cut anywhere: refused. Bits flipped anywhere: refused, infeasible or planned, but never a crash or a hang."""
    with open("plain.h5", "rb") as file:
        whole = file.read()
    for size in (0, 1, 7, 96, 500, 2000, len(whole) // 2, len(whole) - 600):
        with open("cut.h5", "wb") as file:
            file.write(whole[:size])
        refuses(3, "plan", "--profile", "cut.h5")
    generator = random.Random(5)
    for flip in range(500 if LONG else 12):
        at, bit = generator.randrange(len(whole)), generator.randrange(8)
        with open("flipped.h5", "wb") as file:
            file.write(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1:])
        result = run("plan", "--profile", "flipped.h5")
        check(result.returncode in (0, 3, 4), f"bit {bit} of byte {at} flipped: exit code {result.returncode}: {result.stderr}")


def infeasible():
    def tiny(file):
        for c in range(2):
            file[f"cluster_{c}"].attrs["device_memory_bytes"] = 400.0

    def gap(file):
        for c in range(2):
            file[f"cluster_{c}/stage_time"][:, 0:5, 4:] = np.nan

    profile("tiny.h5", change=tiny)
    refuses(4, "plan", "--profile", "tiny.h5", says="memory")
    refuses(4, "plan", "--profile", "tiny.h5", "--json", ranks=2, says="memory")
    refuses(4, "plan", "--profile", "tiny.h5", "--stages", "0-5@fast:1x2,5-9@slow:1x2", says="in flight")
    profile("gap.h5", change=gap)
    refuses(4, "plan", "--profile", "gap.h5", says="layer 4")


os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
os.environ.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
folder = tempfile.mkdtemp()
os.chdir(folder)
try:
    optimum = the_plan()
    schedules(optimum)
    hiding()
    foreign(optimum)
    bad_profiles()
    damaged()
    infeasible()
finally:
    os.chdir("/")
    shutil.rmtree(folder)
print(f"{checks} checks, {failures} failed")
raise SystemExit(failures != 0)
