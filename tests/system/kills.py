"""The campaign of kills.sh: kills.py HAPT FOLDER KILLS. In FOLDER: m.h5, plan.h5, c.json, t.h5."""
import glob
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import processes

RANKS, STEPS, EVERY = 3, 24, 3
hapt, folder, wanted = sys.argv[1], sys.argv[2], int(sys.argv[3])
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
print("seed", seed)


class Run:
    """One start of the job, in a process group of its own."""

    def __init__(self, output, asynchronous):
        self.output, self.done, self.first, self.lines = output, 0, 0, []
        self.asynchronous, self.launcher_hung = asynchronous, False
        self.process = subprocess.Popen(
            ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(RANKS), hapt, "train", "--input", folder + "/m.h5",
             "--plan", folder + "/plan.h5", "--cluster", folder + "/c.json", "--data", folder + "/t.h5", "--threads", "1",
             "--layers-per-model", "6", "--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--resume", "auto",
             "--progress-every", "0", "--checkpoint-async", "yes" if asynchronous else "no", "--output", output],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, universal_newlines=True, start_new_session=True)
        self.reader = threading.Thread(target=self.read)
        self.reader.start()

    def read(self):
        for line in self.process.stderr:
            self.lines.append(line)
            resumed = re.search(r"resuming after step (\d+)", line)
            if resumed:
                self.first = self.done = int(resumed.group(1))
            step = re.search(r"hapt: train (\d+)/", line)
            if step:
                self.done = int(step.group(1))

    def ranks(self):
        """Process ids of the ranks: the children of mpirun (each has its own sandbox process)."""
        return processes.children(self.process.pid)

    def wait(self, seconds):
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.give_up(seconds)
        self.reader.join()
        return self.process.returncode

    def give_up(self, seconds):
        """mpirun 4.1 can wait for ever if a rank dies while it registers, before the first message of hapt."""
        ranks = self.ranks()
        for pid in ranks + [self.process.pid]:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait()
        if any("hapt" in line for line in self.lines):
            sys.exit("the job still ran %d s after a kill, ranks %s:\n%s" % (seconds, ranks, "".join(self.lines[-12:])))
        self.launcher_hung = True


def under_way(output):
    """A checkpoint is being written."""
    return any(os.listdir(path) for path in glob.glob(output + "/checkpoints/.partial-*") if os.path.isdir(path))


def visible(output):
    return sorted(int(name[5:]) for name in os.listdir(output + "/checkpoints") if re.fullmatch(r"step-\d+", name)) \
        if os.path.isdir(output + "/checkpoints") else []


def weights(output):
    exported = output + "/w.h5"
    subprocess.run([hapt, "export", "--checkpoint", output, "--output", exported], check=True, stdout=subprocess.DEVNULL)
    import h5py
    with h5py.File(exported, "r") as file:
        return {name: file["parameters"][name][()].tobytes() for name in file["parameters"]}


def leftovers(output):
    """Processes of the run that are still alive."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            if output in open(path).read():
                found.append(path.split("/")[2])
        except OSError:
            pass
    return found


def main():
    whole = Run(folder + "/whole", True)
    if whole.wait(600) != 0:
        sys.exit("the run without kills failed:\n" + "".join(whole.lines))
    expected = weights(folder + "/whole")
    kills = in_checkpoint = runs = hung = 0
    most_lost = {True: 0, False: 0}
    pace = 0.05  # approximate seconds of a checkpoint, for the choice of a moment within it
    while kills < wanted:
        output = tempfile.mkdtemp(prefix="run", dir=folder)
        runs += 1
        lost_to = None  # of the last killed run: its steps, its newest checkpoint, whether it trained during a write
        while True:
            run, killed = Run(output, random.random() < 0.6), False
            if kills < wanted:
                aim = random.random()
                if aim < 0.55:  # during a checkpoint
                    while not under_way(output) and run.process.poll() is None:
                        time.sleep(0.001)
                    time.sleep(random.random() * pace)
                elif aim < 0.9:  # during a step
                    until = run.first + random.randrange(1, 2 * EVERY)
                    while run.done < until and run.process.poll() is None:
                        time.sleep(0.001)
                    time.sleep(random.random() * 0.02)
                else:  # at any time, also while starting
                    time.sleep(random.random() * 1.5)
                ranks = run.ranks()
                if run.process.poll() is None and ranks:
                    try:
                        os.kill(random.choice(ranks), signal.SIGKILL)
                        killed = True
                    except ProcessLookupError:
                        pass
            code = run.wait(120)
            hung += run.launcher_hung
            # the start before: did this start find an intact checkpoint, and how many steps were lost?
            text = "".join(run.lines)
            if "damaged" in text or "no checkpoint in %s is whole" % output in text:
                sys.exit("a checkpoint that is not whole:\n" + text)
            if lost_to and run.done:
                done, newest, asynchronous = lost_to
                if run.first != newest:
                    sys.exit("resumed after %d, the newest checkpoint was %d:\n%s" % (run.first, newest, text))
                lost = done - run.first
                most_lost[asynchronous] = max(most_lost[asynchronous], lost)
                if lost > EVERY:
                    sys.exit("%d steps lost, a checkpoint every %d:\n%s" % (lost, EVERY, text))
            if leftovers(output):
                time.sleep(2)
                if leftovers(output):
                    sys.exit("processes left behind: %s" % leftovers(output))
            if code == 0:
                break
            if not killed:
                sys.exit("the job ended by itself with code %d:\n%s" % (code, text))
            kills += 1
            in_checkpoint += under_way(output)
            steps = visible(output)
            lost_to = (max(run.done, run.first), steps[-1] if steps else 0, run.asynchronous)
        got = weights(output)
        if got.keys() != expected.keys() or any(got[name] != expected[name] for name in expected):
            sys.exit("other weights than those of the run without kills")
        if under_way(output):
            sys.exit("half a checkpoint is left after the end")
        shutil.rmtree(output)
    print("%d kills in %d runs, %d of them in a checkpoint; most steps lost: %d in the background, %d waiting, of intervals of %d; seed %d%s"
          % (kills, runs, in_checkpoint, most_lost[True], most_lost[False], EVERY, seed, "; mpirun hung %d times" % hung if hung else ""))
    if hung > 1 + kills // 50:
        sys.exit("mpirun hung too often for a fault of its own")
    if 3 * in_checkpoint < kills and kills >= 30:
        sys.exit("too few kills hit a checkpoint")


main()
