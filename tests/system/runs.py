"""Starts of hapt in tests: command lines, waits with a limit, leftover files and processes, results."""
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import tempfile
import threading
import time

import processes

LAUNCHER = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]


def on(ranks, command):
    """The command on this number of ranks; 1: without a launcher."""
    return list(command) if ranks == 1 else LAUNCHER + [str(ranks)] + list(command)


class Start:
    """One start, in its own session. Its output is read while it runs."""

    def __init__(self, command, folder=None, **environment):
        self.began, self.lines, self.out = time.time(), [], []
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=folder,
                                        universal_newlines=True, errors="replace", start_new_session=True, env=dict(os.environ, **environment))
        self.readers = [threading.Thread(target=self.read, args=pair) for pair in ((self.process.stderr, self.lines), (self.process.stdout, self.out))]
        for reader in self.readers:
            reader.daemon = True
            reader.start()

    @staticmethod
    def read(stream, lines):
        for line in stream:
            lines.append(line)

    def text(self):
        return "".join(self.lines)

    def errors(self):
        return errors(self.text())

    def family(self):
        """The processes that descend from this start, itself first: (number, start time) of each."""
        return [(pid, processes.started(pid)) for pid in [self.process.pid] + processes.descendants(self.process.pid)]

    def await_line(self, pattern, seconds):
        """Does a line of standard error match within that time?"""
        until = time.time() + seconds
        while time.time() < until:
            running = self.process.poll() is None
            if re.search(pattern, self.text()):
                return True
            if not running and not any(reader.is_alive() for reader in self.readers):
                return False
            time.sleep(0.005)
        return False

    def wait(self, seconds):
        """The exit code, or None: it still runs."""
        try:
            self.process.wait(max(0, seconds))
        except subprocess.TimeoutExpired:
            return None
        for reader in self.readers:
            reader.join(2)
        return self.process.returncode

    def end(self):
        """Kills all processes that still run."""
        for pid, started in self.family():
            if started and processes.started(pid) == started:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()


def errors(text):
    return [line for line in text.splitlines() if line.startswith("hapt: error:")]


def tree(top):
    """The content of a folder, without following links: {path: digest, "link to ..." or "folder"}."""
    found = {}
    for path, folders, names in os.walk(top):
        for name in folders + names:
            full = os.path.join(path, name)
            if os.path.islink(full):
                found[os.path.relpath(full, top)] = "link to " + os.readlink(full)
            elif os.path.isdir(full):
                found[os.path.relpath(full, top)] = "folder"
            elif os.path.isfile(full):
                with open(full, "rb") as file:
                    found[os.path.relpath(full, top)] = hashlib.sha256(file.read()).hexdigest()
            else:
                found[os.path.relpath(full, top)] = "special"
    return found


def checkpoints(run):
    """{name: digest of its files} of the folders step-N of a run."""
    top = os.path.join(run, "checkpoints")
    names = [name for name in os.listdir(top) if re.fullmatch(r"step-\d+", name)] if os.path.isdir(top) else []
    return {name: str(sorted(tree(os.path.join(top, name)).items())) for name in sorted(names)}


def weights(hapt, checkpoint):
    """(step, {name: bytes}) of a checkpoint, or of a run's newest one; (None, None) if none is valid."""
    import h5py
    with tempfile.TemporaryDirectory() as folder:
        exported = folder + "/w.h5"
        done = subprocess.run([hapt, "export", "--checkpoint", checkpoint, "--output", exported], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                              universal_newlines=True, timeout=120)
        if done.returncode == 3:
            return None, None
        if done.returncode:
            raise SystemExit("export ended with code %d: %s" % (done.returncode, done.stderr))
        with h5py.File(exported, "r") as file:
            return int(file.attrs["step"]), {name: file["parameters"][name][()].tobytes() for name in file["parameters"]}
