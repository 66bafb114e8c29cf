"""The campaign of interrupts.sh: interrupts.py HAPT FOLDER SIGNALS. In FOLDER: m.h5, t.h5, and cN.json, pN.h5, planN.h5, stagesN for N ranks."""
import collections
import contextlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import h5py

import processes
import runs

hapt, folder, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
print("seed", seed, flush=True)
STEPS, EARLIER, TIMEOUT_S = 60, 20, 6
# More than --timeout: ranks print one after the other, the job is torn down, and there may be fewer cores than ranks.
MARGIN_S = 25
SIGNALS = ("KILL", "STOP", "PAUSE", "TERM", "INT", "HUP", "USR1", "SEGV")  # PAUSE: STOP, and CONT after a random time
COMMANDS = ("job", "profile", "plan", "train")


def command(name, ranks, output):
    stages = open("%s/stages%d" % (folder, ranks)).read().strip()
    common = ["--input", folder + "/m.h5", "--cluster", "%s/c%d.json" % (folder, ranks), "--threads", "1", "--layers-per-model", "6", "--timeout",
              "%d s" % TIMEOUT_S, "--output", output]
    training = ["--data", folder + "/t.h5", "--steps", str(STEPS), "--checkpoint-every", "5", "--resume", "auto", "--progress-every", "0"]
    return runs.on(ranks, [hapt] + {
        "job": common + training + ["--profile-seconds", "0.4", "--stages", stages, "--microbatches", "2"],
        "train": ["train"] + common + training + ["--plan", "%s/plan%d.h5" % (folder, ranks)],
        "profile": ["profile"] + common + ["--profile-seconds", "1"],
        "plan": ["plan"] + common + ["--profile-seconds", "0.6", "--stages", stages, "--microbatches", "2"]}[name])


def trains(name):
    return name in ("job", "train")


def complain(what, start):
    said = [line for line in start.text().splitlines() if not line.startswith("hapt: train ")]
    sys.exit("%s\n%s; seed %d" % ("\n".join(said[-30:]), what, seed))


class Reference:
    """Undisturbed runs: their duration, their results, and the checkpoints that exist before a disturbed run begins."""

    def __init__(self):
        self.lasted, self.weights, self.earlier = {}, {}, {}

    def of(self, name, ranks):
        key = name, ranks
        if key in self.lasted:
            return
        output = "%s/good-%s%d" % (folder, name, ranks)
        start = runs.Start(command(name, ranks, output))
        if start.wait(240) != 0:
            complain("%s on %d ranks without signals" % key, start)
        self.lasted[key] = time.time() - start.began
        if not trains(name):
            self.earlier[key] = output
            return
        self.weights[key] = runs.weights(hapt, output)[1]
        earlier = "%s/earlier-%s%d" % (folder, name, ranks)
        start = runs.Start(command(name, ranks, earlier) + ["--stop-after", str(EARLIER)])
        if start.wait(240) != 0:
            complain("%s on %d ranks, its first steps" % key, start)
        self.earlier[key] = earlier


def targets(start, ranks):
    """The processes by kind. Ranks are the launcher's children; sandboxes are their children."""
    top = start.process.pid
    found = {"launcher": [top] if ranks > 1 else [], "rank": [], "guard": []}
    # exclude the launcher's own child before it becomes the program
    found["rank"] = [top] if ranks == 1 else [pid for pid in processes.children(top) if processes.title(pid) not in ("", "mpirun")]
    for pid in found["rank"]:
        found["guard"] += processes.children(pid)
    return found


class Disturbance:
    """One signal of one start."""

    def __init__(self, name, ranks, what, kind, moment, start):
        self.what, self.kind, self.start, self.ranks = what, kind, start, ranks
        self.family, self.pid, self.sent = {}, None, False
        self.why = "%s on %d ranks, %s of a %s" % (name, ranks, what, kind)
        until = start.began + moment
        while start.process.poll() is None and (time.time() < until or not self.choose()):
            self.note()
            time.sleep(0.003)
        self.note()
        if start.process.poll() is None and self.pid:
            self.send("STOP" if what == "PAUSE" else what)
            self.sent_s = time.time() - start.began
            self.why += " (process %d) after %.2f s" % (self.pid, self.sent_s)
            self.sent = True

    def choose(self):
        """Does a process of that kind exist yet?"""
        found = targets(self.start, self.ranks)[self.kind]
        self.pid = random.choice(found) if found else None
        return bool(found)

    def note(self):
        for pid, started in self.start.family():
            if started:
                self.family.setdefault(pid, started)

    def send(self, what):
        if not self.pid:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, getattr(signal, "SIG" + what))

    def left(self):
        return [pid for pid, started in self.family.items() if processes.started(pid) == started]


hung = collections.Counter()


def hangs(disturbance, seconds):
    left = disturbance.left()
    places = "".join("process %d (%s)\n%s\n" % (pid, processes.title(pid), processes.where(pid)[-2500:]) for pid in left[:4])
    disturbance.start.end()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    complain("%s: it still runs %d s later\n%s" % (disturbance.why, seconds, places), disturbance.start)


def last_rank(disturbance):
    """Is the disturbed rank the only one that still runs? If it stops inside MPI_Finalize, the others end, and mpirun waits for it."""
    ranks = [pid for pid in disturbance.left() if processes.title(pid) == "hapt"]
    return disturbance.kind == "rank" and ranks == [disturbance.pid]


def await_end(disturbance, lasts):
    """The exit code. A stopped process that no other can continue (a launcher, the only rank, the last rank) is continued here."""
    start, most = disturbance.start, lasts + TIMEOUT_S + MARGIN_S
    if disturbance.what == "PAUSE":
        time.sleep(random.choice((random.random(), random.random() * 2 * TIMEOUT_S)))
        disturbance.send("CONT")
    until, code = time.time() + most, None
    while code is None and time.time() < until:
        code = start.wait(2)
        if code is None and disturbance.what == "STOP" and last_rank(disturbance):
            disturbance.send("CONT")
    if code is None and disturbance.what == "STOP" and disturbance.kind == "launcher":
        disturbance.send("CONT")
        code = start.wait(most)
    if code is None:
        ranks = [pid for pid in disturbance.left() if pid != start.process.pid]
        if disturbance.ranks > 1 and not ranks:  # mpirun 4.1 waits for ever if ranks die while they register
            hung["launcher alone"] += 1
            start.end()
            return start.process.returncode
        hangs(disturbance, most)
    return code


def check_nobody_left(disturbance):
    """Ranks of a killed launcher may run until their waits time out."""
    until = time.time() + TIMEOUT_S + MARGIN_S
    while disturbance.left() and time.time() < until:
        time.sleep(0.02)
    if disturbance.left():
        hangs(disturbance, TIMEOUT_S + MARGIN_S)


def check_file(name, path, before, disturbance, code):
    """The earlier file, intact, or a new one."""
    with open(path, "rb") as file:
        now = file.read()
    if now == before:
        if code == 0:
            complain("%s: code 0 without a new file" % disturbance.why, disturbance.start)
        return
    with h5py.File(path, "r") as file:
        file.visititems(lambda _, item: item[()] if isinstance(item, h5py.Dataset) else None)
    reads = [hapt, "plan", "--profile", path, "--microbatches", "2"] if name == "profile" else [hapt, "simulate", "--plan", path]
    done = subprocess.run(reads, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True, timeout=120)
    if done.returncode:
        complain("%s: the new file is not whole: %s" % (disturbance.why, done.stderr), disturbance.start)


def check_run(name, ranks, output, before, disturbance, reference):
    """Intact checkpoints stay intact. The next start resumes and has the result of an undisturbed run."""
    now = runs.checkpoints(output)
    for step in now:
        if runs.weights(hapt, "%s/checkpoints/%s" % (output, step))[0] is None:
            complain("%s: %s is not whole" % (disturbance.why, step), disturbance.start)
    if before and (not now or max(now) < max(before)):
        complain("%s: there was %s, now there are %s" % (disturbance.why, sorted(before), sorted(now)), disturbance.start)
    if any(now[step] != before[step] for step in set(now) & set(before)):
        complain("%s: an earlier checkpoint changed" % disturbance.why, disturbance.start)
    again = runs.Start(command(name, ranks, output))
    code = again.wait(240)
    if code is None:
        again.end()
    if code != 0 or "damaged" in again.text():
        complain("%s: then the next start ends with code %s:\n%s" % (disturbance.why, code, disturbance.start.text()), again)
    if runs.weights(hapt, output) != (STEPS, reference.weights[name, ranks]):
        complain("%s: then other weights than those of an undisturbed run" % disturbance.why, again)
    left = [entry for entry in os.listdir(output) + os.listdir(output + "/checkpoints")
            if not (entry in ("checkpoints", "run.h5", "metrics.csv", ".hapt-input") or entry.startswith("step-"))]
    left = [entry for entry in left if not entry.endswith(".tmp")]  # of a killed process: its number may belong to another process now
    if left:
        complain("%s: the run that went on left %s" % (disturbance.why, left), again)


def one(reference, name, ranks, what, kind, early):
    reference.of(name, ranks)
    lasts = reference.lasted[name, ranks]
    output, before = tempfile.mkdtemp(prefix="run", dir=folder) + "/out", {}
    if not trains(name) or random.random() < 0.5:
        (shutil.copytree if trains(name) else shutil.copy)(reference.earlier[name, ranks], output)
        before = runs.checkpoints(output) if trains(name) else open(output, "rb").read()
    moment = random.random() * (0.4 if early else 1.05) * lasts
    start = runs.Start(command(name, ranks, output))
    disturbance = Disturbance(name, ranks, what, kind, moment, start)
    code = await_end(disturbance, lasts)
    check_nobody_left(disturbance)
    if processes.naming(output):
        complain("%s: processes are left: %s" % (disturbance.why, processes.naming(output)), start)
    if disturbance.sent and code == 0 and what in ("KILL", "SEGV") and kind != "guard" and disturbance.sent_s < 0.5 * lasts:
        complain("%s: code 0" % disturbance.why, start)
    if trains(name):
        check_run(name, ranks, output, before, disturbance, reference)
    else:
        check_file(name, output, before, disturbance, code)
    shutil.rmtree(os.path.dirname(output))
    return disturbance, code


def main():
    reference, tally, codes, slowest = Reference(), collections.Counter(), collections.Counter(), 0
    sent = 0
    while sent < wanted:
        name, ranks, what = random.choice(COMMANDS), random.choice((1, 2, 3)), random.choice(SIGNALS)
        kind = random.choice(("rank", "rank", "guard", "launcher") if ranks > 1 else ("rank", "rank", "guard"))
        began = time.time()
        disturbance, code = one(reference, name, ranks, what, kind, random.random() < 0.3)
        if disturbance.sent:
            sent += 1
            tally[what, kind, name] += 1
            codes[what, kind, code] += 1
            slowest = max(slowest, time.time() - began)
            print("%d: %s: code %s, %.1f s, %d errors" % (sent, disturbance.why, code, time.time() - began, len(disturbance.start.errors())), flush=True)
    print("signal, target, command: how many")
    for key, count in sorted(tally.items()):
        print("  %-6s %-9s %-8s %d" % (key + (count,)))
    print("signal, target, exit code: how many")
    for key, count in sorted(codes.items(), key=str):
        print("  %-6s %-9s %-5s %d" % (key + (count,)))
    print("%d signals of %d kinds, mpirun hung alone %d times, seed %d" % (sent, len(tally), hung["launcher alone"], seed))
    if hung["launcher alone"] > 1 + wanted // 50:
        sys.exit("mpirun hung too often for a fault of its own")


main()
