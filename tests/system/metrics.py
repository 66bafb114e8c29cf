"""The campaign of metrics.sh: metrics.py HAPT FOLDER LIBRARY reads|files|faults|kills KILLS. In FOLDER: m.h5, t.h5, and c1.json, c2.json, plan1.h5,
plan2.h5 for 1 and 2 ranks."""
import csv
import datetime
import json
import math
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time

import h5py
import numpy

import processes
import runs

hapt, folder, library, part, wanted = sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], int(sys.argv[5])
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
print("seed", seed, flush=True)
STEPS, SHORT, ENDLESS, MOST_S = 150, 40, 100000000, 120
HEADER = ["step", "time", "loss", "gradient_norm", "learning_rate", "step_time_s", "tokens_per_second", "mfu", "memory_bytes"]
SAME = {"loss": "loss", "gradient_norm": "gradient_norm", "learning_rate": "learning_rate", "step_time_s": "step_time",
        "tokens_per_second": "tokens_per_second", "mfu": "mfu"}


def train(ranks, steps, output, *more):
    return runs.on(ranks, [hapt, "train", "--input", folder + "/m.h5", "--plan", "%s/plan%d.h5" % (folder, ranks), "--cluster",
                           "%s/c%d.json" % (folder, ranks), "--data", folder + "/t.h5", "--threads", "1", "--steps", str(steps), "--output", output]
                   + list(more))


def complain(what, start=None):
    sys.exit("%s (seed %d)\n%s" % (what, seed, start.text()[-3000:] if start else ""))


def ends(start, code=0):
    got = start.wait(MOST_S)
    if got is None:
        start.end()
    if got != code:
        complain("code %s, not %s" % (got, code), start)
    return start


def text(value):
    return value.decode() if isinstance(value, bytes) else str(value)


def read_csv(output, torn=False):
    """The rows as numbers, without `time`; empty fields are None. torn: a last line that is not whole is dropped."""
    data = open(output + "/metrics.csv").read()
    whole = data[:data.rfind("\n") + 1]
    if not torn and whole != data:
        complain("metrics.csv ends in %r" % data[len(whole):])
    rows = list(csv.reader(whole.splitlines()))
    if rows[0] != HEADER or any(len(row) != len(HEADER) for row in rows):
        complain("header %s, widths %s" % (rows[0], {len(row) for row in rows}))
    rows = [dict(zip(HEADER, row)) for row in rows[1:]]
    if [row["step"] for row in rows] != [str(step) for step in range(1, len(rows) + 1)]:
        complain("gaps or doubles: %s" % [row["step"] for row in rows])
    for row in rows:
        if row["time"] and datetime.datetime.fromisoformat(row["time"]).tzinfo is None:
            complain("a time without zone: %s" % row["time"])
    return [{name: float(value) if value else None for name, value in row.items() if name != "time"} for row in rows]


# Of one token in training (Chowdhery et al. 2022, PaLM, appendix B): 6 for each weight of a product, 12 s h for attention.
# metrics.sh: one layer, hidden size 32, 16 tokens of 256 kinds
FLOPS = 6 * (12 * 32 * 32 + 32 * 256) + 12 * 16 * 32


def read_run(output):
    """The state and the curves of run.h5, which is read completely."""
    with h5py.File(output + "/run.h5", "r") as file:
        file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)
        state, train_group = text(file.attrs["state"]), file["train"]
        if train_group.attrs["peak_flops"] != file["plan"].attrs["peak_flops"]:
            complain("the MFU of the run is not that of the plan")
        # products alone; the other operators of so small a model add 4 %
        tokens, rate = 2 * 16 * file["plan"].attrs["microbatches"], train_group["step_time"][()] * train_group.attrs["peak_flops"]
        ratio = train_group["mfu"][()] * rate / (tokens * FLOPS)
        if not numpy.all((ratio > 1) & (ratio < 1.06)):
            complain("MFU: %s times that of %g FLOPs a token" % (ratio, FLOPS))
        datetime.datetime.fromisoformat(text(file.attrs["written"]))
        curves = {name: item[()] for name, item in train_group.items() if isinstance(item, h5py.Dataset) and item.ndim == 1}
        curves = {name: curves[name] for name in list(SAME.values()) + ["step", "time"]}
        # NeXus: from the root by `default` to the curve that viewers show
        entry = file[text(file.attrs["default"])]
        data = entry[text(entry.attrs["default"])]
        classes = [text(group.attrs["NX_class"]) for group in (file, entry, data)]
        if classes != ["NXroot", "NXentry", "NXdata"] or text(data.attrs["signal"]) != "loss" or text(data.attrs["axes"]) != "step":
            complain("NeXus: %s, %s" % (classes, dict(data.attrs)))
        if not numpy.array_equal(data["loss"][()], curves["loss"]) or not numpy.array_equal(data["step"][()], curves["step"]):
            complain("NeXus: other curves")
    count = len(curves["step"])
    if list(curves["step"]) != list(range(1, count + 1)) or any(len(curve) != count for curve in curves.values()):
        complain("lengths of the curves: %s" % {name: len(curve) for name, curve in curves.items()})
    return state, curves


def agree(rows, curves):
    """Both have the same numbers for the steps that both have."""
    for row, at in zip(rows, range(len(curves["step"]))):
        for name, curve in SAME.items():
            if row[name] != curves[curve][at]:
                complain("step %d, %s: %r in metrics.csv, %r in run.h5" % (at + 1, name, row[name], curves[curve][at]))


TABLE = []
for entry in range(256):
    for _ in range(8):
        entry = entry >> 1 ^ (0x82F63B78 if entry & 1 else 0)
    TABLE.append(entry)


def masked_crc(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = TABLE[(crc ^ byte) & 255] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def fields(data):
    """The fields of a message of protocol buffers: (number, value)."""
    at, found = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            value |= (data[at] & 127) << shift
            at, shift = at + 1, shift + 7
            if data[at - 1] < 128:
                return value

    while at < len(data):
        key = varint()
        if key & 7 == 0:
            found.append((key >> 3, varint()))
            continue
        size = {1: 8, 5: 4}.get(key & 7) or varint()
        found.append((key >> 3, data[at:at + size]))
        at += size
    return found


def read_events(path, torn=False):
    """[(step, {tag: value} or "start")] of an event file, whose checksums are verified."""
    data, at, found = open(path, "rb").read(), 0, []
    while at < len(data):
        length, = struct.unpack_from("<Q", data, at) if at + 8 <= len(data) else (0,)
        if at + 16 + length > len(data) and torn:
            break
        record = data[at + 12:at + 12 + length]
        if struct.unpack_from("<I", data, at + 8)[0] != masked_crc(data[at:at + 8]) or \
                struct.unpack_from("<I", data, at + 12 + length)[0] != masked_crc(record):
            complain("%s: a wrong checksum at %d" % (path, at))
        event = dict(fields(record))
        at += 16 + length
        if abs(struct.unpack("<d", event[1])[0] - time.time()) > 3600:
            complain("%s: wall time %r" % (path, event[1]))
        if 3 in event:
            if found or event[3] != b"brain.Event:2":
                complain("%s: file version %r" % (path, event[3]))
        elif 7 in event:
            found.append((event[2], "start"))
        else:
            values = [dict(fields(value)) for _, value in fields(event[5])]
            found.append((event[2], {value[1].decode(): struct.unpack("<f", value[2])[0] for value in values}))
    return found


def all_events(output):
    """{step: {tag: value}} as TensorBoard has it after all starts of a run."""
    found, held_out = {}, {}
    for name in sorted(os.listdir(output + "/tensorboard")):
        for step, value in read_events("%s/tensorboard/%s" % (output, name), torn=True):
            if value == "start":
                found = {earlier: entry for earlier, entry in found.items() if earlier < step}
                held_out = {earlier: loss for earlier, loss in held_out.items() if earlier < step}
            elif step in (held_out if "validation/loss" in value else found):
                complain("events of step %d twice" % step)
            elif "validation/loss" in value:
                held_out[step] = value["validation/loss"]
            else:
                found[step] = value
    with h5py.File(output + "/run.h5", "r") as file:
        wanted_steps, losses = (file["train/validation_" + name][()] if "train/validation_" + name in file else [] for name in ("step", "loss"))
    if held_out != {step: numpy.float32(loss) for step, loss in zip(wanted_steps, losses)}:
        complain("validations %s, in run.h5 %s" % (sorted(held_out), list(wanted_steps)))
    return found


def check_events(output, curves):
    events = all_events(output)
    if sorted(events) != list(curves["step"]):
        complain("events of steps %s" % sorted(events))
    for step, event in events.items():
        for name, curve in SAME.items():
            if event["train/" + name] != numpy.float32(curves[curve][step - 1]):
                complain("step %d, %s: %r in the event file, %r in run.h5" % (step, name, event["train/" + name], curves[curve][step - 1]))


def check_report(output, state, curves):
    done = subprocess.run([hapt, "report", "--input", output + "/run.h5", "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=MOST_S)
    if done.returncode:
        complain("report ends with code %d: %s" % (done.returncode, done.stderr))
    found = json.loads(done.stdout)["train"]
    if found["state"] != state or found["loss"] != list(curves["loss"]) or found["per_step"]["step"] != list(curves["step"]):
        complain("the report says %s" % {name: found[name] for name in ("state", "steps")})
    for name, curve in SAME.items():
        if name != "loss" and not numpy.allclose(found["per_step"][name], curves[curve], rtol=1e-14, atol=0):  # some are computed again
            complain("the report has other values of %s" % name)


def await_rows(start, output, count):
    until = time.time() + MOST_S
    while not os.path.exists(output + "/metrics.csv") or open(output + "/metrics.csv").read().count("\n") <= count:
        if time.time() > until or start.process.poll() is not None:
            complain("no %d lines come" % count, start)
        time.sleep(0.01)


def reads():
    """run.h5 is opened 100 times while the run writes it; then the run is told to stop."""
    output, versions, opened, before = folder + "/endless", set(), 0, 0
    start = runs.Start(train(1, ENDLESS, output, "--metrics-every", "0.01", "--tensorboard", "yes"))
    until = time.time() + 2 * MOST_S
    while opened < 100 or len(versions) < 5:
        if time.time() > until or start.process.poll() is not None:
            complain("%d reads, %d versions" % (opened, len(versions)), start)
        time.sleep(0.01)
        if not os.path.exists(output + "/run.h5"):
            continue
        state, curves = read_run(output)
        if state != "running" or len(curves["step"]) < max(1, before):
            complain("%s after %d steps, before %d" % (state, len(curves["step"]), before), start)
        before = len(curves["step"])
        versions.add(before)
        opened += 1
    os.kill(start.process.pid, signal.SIGTERM)
    ends(start, 9)
    state, curves = read_run(output)
    rows = read_csv(output)
    if state != "stopped" or len(rows) != len(curves["step"]):
        complain("%s, %d lines, %d steps" % (state, len(rows), len(curves["step"])), start)
    agree(rows, curves)
    check_events(output, curves)
    check_report(output, state, curves)
    if rows[-1]["memory_bytes"] < 1000 or not 0 < rows[-1]["mfu"] < 1:
        complain("the last line: %s" % rows[-1])
    return "%d reads of %d versions" % (opened, len(versions))


LINE = (r"hapt: train (\d+)/12 at \d\d:\d\d:\d\d, loss (\d\.\d{4}), gradient norm ([\d.e+-]+), learning rate ([\d.e+-]+), \d+ tokens/s, "
        r"MFU [\d.]+ %, memory [\d.]+ \w+, ends (\d{4}-\d\d-\d\d \d\d:\d\d)\n")


def files():
    """Lines of steps; files of an earlier run, of others, and without metrics."""
    output = folder + "/lines"
    start = ends(runs.Start(train(2, 12, output, "--progress-every", "0", "--tensorboard", "yes")))
    said = [re.fullmatch(LINE, line) for line in start.lines if line.startswith("hapt: train ")]
    rows = read_csv(output)
    if len(said) != 12 or not all(said):
        complain("lines of steps", start)
    for line, row in zip(said, rows):
        then = datetime.datetime.strptime(line.group(5), "%Y-%m-%d %H:%M")
        if abs((then - datetime.datetime.now()).total_seconds()) > 600 or int(line.group(1)) != row["step"] or \
                "%.4f" % row["loss"] != line.group(2) or not math.isclose(float(line.group(3)), row["gradient_norm"], rel_tol=1e-3):
            complain("%r, %s" % (line.group(0), row))
    if read_run(output)[0] != "finished":
        complain("the state of a run that is over: %s" % read_run(output)[0])
    # Another run replaces them, with nothing left of the first.
    ends(runs.Start(train(1, 8, output, "--overwrite", "yes", "--tensorboard", "yes")))
    check_events(output, read_run(output)[1])
    if len(read_csv(output)) != 8 or len(os.listdir(output + "/tensorboard")) != 1 or \
            sorted(os.listdir(output)) != ["checkpoints", "metrics.csv", "run.h5", "tensorboard"]:
        complain("an earlier run: %s" % runs.tree(output).keys())
    # A table of another program keeps its lines.
    output = folder + "/others"
    os.mkdir(output)
    with open(output + "/metrics.csv", "w") as file:
        file.write("a,b\n1,2\n")
    ends(runs.Start(train(1, 8, output, "--stop-after", "6", "--checkpoint-every", "3")))
    if open(output + "/metrics.csv.other").read() != "a,b\n1,2\n" or len(read_csv(output)) != 6:
        complain("a table of another program: %s" % os.listdir(output))
    # Lines that a crash of the machine lost come from the checkpoint.
    whole = read_csv(output)
    for data in (None, "", "step,ti", ",".join(HEADER) + "\n1,,"):
        again = folder + "/again"
        shutil.rmtree(again, ignore_errors=True)
        shutil.copytree(output, again)
        os.unlink(again + "/metrics.csv")
        if data is not None:
            with open(again + "/metrics.csv", "w") as file:
                file.write(data)
        ends(runs.Start(train(1, 8, again, "--resume", "yes")))
        rows = read_csv(again)
        agree(rows, read_run(again)[1])
        if len(rows) != 8 or any(row[name] != old[name] for row, old in zip(rows, whole) for name in SAME):
            complain("after %r: %s" % (data, rows))
    # A run that fails leaves the lines of its steps, and a run file that says so.
    output = folder + "/diverges"
    start = ends(runs.Start(train(1, ENDLESS, output, "--metrics-every", "0.001", "--optimizer", "sgd", "--learning-rate", "1e3", "--warmup-steps",
                                  "100000", "--lr-schedule", "linear", "--clip-norm", "0", "--weight-decay", "0")), 3)
    state, curves = read_run(output)
    rows = read_csv(output)
    agree(rows, curves)
    if state != "stopped" or not 1 < len(curves["step"]) == len(rows) or not re.search("step %d: the loss is" % len(rows), start.text()):
        complain("a run that fails: %s, %d steps, %d lines" % (state, len(curves["step"]), len(rows)), start)
    # Nothing is written before the end.
    output = folder + "/seldom"
    start = runs.Start(train(1, ENDLESS, output, "--metrics-every", "0"))
    await_rows(start, output, 50)
    time.sleep(0.5)
    if os.path.exists(output + "/run.h5") or os.path.exists(output + "/tensorboard"):
        complain("run.h5 comes before the end", start)
    os.kill(start.process.pid, signal.SIGKILL)
    start.wait(MOST_S)
    return "lines of %d steps, %d steps to a loss that is not finite" % (len(said), len(rows))


def faults():
    """A write that fails, a link or a folder in the place of a file: one warning, and the run goes on."""
    cases = [("metrics.csv", {"FAULTS_CALL": "write", "FAULTS_PATH": "*/metrics.csv", "FAULTS_AT": "5"}, True),
             ("metrics.csv", {"FAULTS_CALL": "open", "FAULTS_PATH": "*/metrics.csv", "FAULTS_AT": "1"}, False),
             ("metrics.csv", {"FAULTS_CALL": "write", "FAULTS_PATH": "*/metrics.csv", "FAULTS_AT": "9", "FAULTS_STICKY": "1"}, False),
             ("event file", {"FAULTS_CALL": "write", "FAULTS_PATH": "*/events*", "FAULTS_AT": "4"}, True),
             ("event file", {"FAULTS_CALL": "mkdir", "FAULTS_PATH": "*/tensorboard", "FAULTS_AT": "1"}, True),
             ("run.h5", {"FAULTS_CALL": "fsync", "FAULTS_PATH": "*/run.h5*", "FAULTS_AT": "1"}, True),
             ("run.h5", {"FAULTS_CALL": "write", "FAULTS_PATH": "*/run.h5*", "FAULTS_AT": "3"}, True)]
    for name, fault, whole in cases:
        output = folder + "/faulty"
        shutil.rmtree(output, ignore_errors=True)
        start = ends(runs.Start(train(1, SHORT, output, "--metrics-every", "0.001", "--tensorboard", "yes"), LD_PRELOAD=library, FAULTS_UNDER=output,
                                FAULTS_ERROR="ENOSPC", **fault))
        warnings = [line for line in start.lines if line.startswith("hapt: warning: metrics: ")]
        if len(warnings) != 1 or name not in warnings[0] or start.errors() or "No space left" not in warnings[0]:
            complain("%s: %s" % (fault, warnings), start)
        state, curves = read_run(output)
        if state != "finished" or len(curves["step"]) != SHORT:
            complain("%s: %s, %d steps" % (fault, state, len(curves["step"])), start)
        if whole:
            agree(read_csv(output), curves)
            if len(read_csv(output)) != SHORT or (os.path.exists(output + "/tensorboard") and sorted(all_events(output)) != list(curves["step"])):
                complain("%s: lines or events are missing" % fault, start)
        if runs.weights(hapt, output)[0] != SHORT or [entry for entry in os.listdir(output) if entry.endswith(".tmp")]:
            complain("%s: %s" % (fault, os.listdir(output)), start)
    for make, place in ((os.mkdir, "metrics.csv"), (lambda path: os.symlink(folder + "/aim", path), "metrics.csv"),
                        (lambda path: os.symlink(folder, path), "tensorboard")):
        output = folder + "/odd"
        shutil.rmtree(output, ignore_errors=True)
        os.mkdir(output)
        make("%s/%s" % (output, place))
        before = set(os.listdir(folder))
        start = ends(runs.Start(train(1, 8, output, "--tensorboard", "yes")))
        if start.text().count("hapt: warning: metrics: ") != 1 or set(os.listdir(folder)) != before or start.errors():
            complain("%s is odd: %s" % (place, set(os.listdir(folder)) - before), start)
    return "%d failing calls" % len(cases)


def check_killed(output, start):
    """After a kill: whole lines of all steps that were taken, a whole run.h5 and a whole checkpoint, which agree."""
    rows = read_csv(output, torn=True) if os.path.exists(output + "/metrics.csv") and os.path.getsize(output + "/metrics.csv") > 200 else []
    steps = sorted(runs.checkpoints(output))
    saved = int(steps[-1][5:]) if steps else 0
    if saved > len(rows):
        complain("a checkpoint of step %d, %d lines" % (saved, len(rows)), start)
    if steps and runs.weights(hapt, output)[0] != saved:
        complain("the newest checkpoint is not whole", start)
    live = 0
    if os.path.exists(output + "/run.h5"):
        state, curves = read_run(output)
        live = len(curves["step"])
        if state != "running" or live > len(rows):
            complain("%s, %d steps in run.h5, %d lines" % (state, live, len(rows)), start)
        agree(rows, curves)
        check_report(output, state, curves)
    done = subprocess.run([hapt, "check", output], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True, timeout=MOST_S)
    if saved and done.returncode:
        complain("hapt check: %s" % done.stdout, start)
    return saved, live, len(rows)


def kills():
    """kill -9 at random moments. The resumed run has the losses and weights of an uninterrupted one, and metrics without gaps or doubles."""
    good = {}
    for ranks in (1, 2):
        ends(runs.Start(train(ranks, STEPS, "%s/good%d" % (folder, ranks))))
        good[ranks] = read_run("%s/good%d" % (folder, ranks))[1]["loss"], runs.weights(hapt, "%s/good%d" % (folder, ranks))
    killed = lives = 0
    while killed < wanted:
        ranks, output = random.choice((1, 1, 2)), folder + "/killed"
        shutil.rmtree(output, ignore_errors=True)
        options = ["--checkpoint-every", str(random.choice((20, 60))), "--metrics-every", "0.001", "--resume", "auto", "--tensorboard", "yes",
                   "--validation-data", folder + "/t.h5", "--validate-every", "10", "--validate-rows", "4"]
        start = runs.Start(train(ranks, STEPS, output, *options))
        await_rows(start, output, random.randrange(STEPS - 30))
        time.sleep(random.random() * 0.05)
        if start.process.poll() is not None:
            continue
        top = start.process.pid
        for pid in processes.children(top) if ranks > 1 else [top]:
            os.kill(pid, signal.SIGKILL)
        if start.wait(MOST_S) is None:
            start.end()
        if os.path.exists(output + "/checkpoints/step-%08d" % STEPS):
            continue
        saved, live, lines = check_killed(output, start)
        killed += 1
        lives += live > 0
        print("%d: %d ranks, checkpoint %d, run.h5 %d, lines %d" % (killed, ranks, saved, live, lines), flush=True)
        again = ends(runs.Start(train(ranks, STEPS, output, *options)))
        if (re.search(r"resuming after step (\d+)", again.text()) or [0, "0"])[1] != str(saved):
            complain("it was to be resumed after %d" % saved, again)
        state, curves = read_run(output)
        rows = read_csv(output)
        agree(rows, curves)
        check_events(output, curves)
        if state != "finished" or len(rows) != STEPS or list(curves["loss"]) != list(good[ranks][0]) or runs.weights(hapt, output) != good[ranks][1]:
            complain("%s, %d lines; other losses or weights" % (state, len(rows)), again)
        if [entry for entry in os.listdir(output) if entry.endswith(".tmp")]:
            complain("temporary files are left: %s" % os.listdir(output), again)
    if 2 * lives < killed:
        complain("only %d of %d kills had a run.h5" % (lives, killed))
    return "%d kills, %d with run.h5" % (killed, lives)


print("%s, seed %d" % ({"reads": reads, "files": files, "faults": faults, "kills": kills}[part](), seed))
