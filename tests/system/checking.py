"""What tests in Python share. Their arguments are HAPT and a folder for files; they end with `end()`."""
import os
import subprocess
import sys

HAPT, FOLDER = sys.argv[1:3]
LONG = os.environ.get("HAPT_LONG", "0") != "0"
checks = failures = 0


def check(good, what):
    global checks, failures
    checks += 1
    if not good:
        failures += 1
        print("FAILED:", what)


def end():
    print("%d checks, %d failed" % (checks, failures))
    sys.exit(failures > 0)


def path(*parts):
    return os.path.join(FOLDER, *parts)


def run(*words, ranks=1):
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
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
