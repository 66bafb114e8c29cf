"""Checks that tests in Python share. The program is in the environment, HAPT. The arguments of a test that uses `path` are the program and a
folder for files. A test ends with `end()`."""
import json
import os
import subprocess
import sys

HAPT = os.path.realpath(os.environ.get("HAPT", "build/hapt"))
FOLDER = sys.argv[2] if len(sys.argv) > 2 else None
LONG = os.environ.get("HAPT_LONG", "0") not in ("", "0")
MPIRUN = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]
checks = failures = 0


def check(good, what):
    global checks, failures
    checks += 1
    if not good:
        failures += 1
        print("FAILED:", what)
    return good


def end():
    print("%d checks, %d failed" % (checks, failures))
    sys.exit(failures > 0)


def path(*parts):
    return os.path.join(FOLDER, *parts)


def cpu_cluster(devices, memory="300 MB"):
    """A cluster file with one subcluster, a, of so many CPU devices."""
    name = path(f"c{devices}.json")
    with open(name, "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1,
                   "subclusters": [{"name": "a", "nodes": 1, "devices_per_node": devices, "device": "cpu", "memory": memory}]}, file)
    return name


def run(*words, ranks=1):
    command = MPIRUN + [str(ranks)] if ranks > 1 else []
    return subprocess.run(command + [HAPT, *map(str, words)], capture_output=True, text=True, timeout=240)


def passes(*words, ranks=1):
    done = run(*words, ranks=ranks)
    check(done.returncode == 0, f"{words} on {ranks} ranks: code {done.returncode}: {done.stderr[-800:]}")
    return done


def refuses(code, text, *words):
    """One error that holds the text, with a hint."""
    done = run(*words)
    errors = done.stderr.count("hapt: error:")
    check(done.returncode == code and errors == 1 and text in done.stderr and "hint:" in done.stderr,
          f"{words}: code {done.returncode}, {errors} errors: {done.stderr[-400:]}")
    return done
