"""Processes that a launcher started."""
import glob
import shutil
import subprocess


def children(pid):
    found = []
    for path in glob.glob("/proc/%d/task/*/children" % pid):
        try:
            with open(path) as file:
                found += [int(word) for word in file.read().split()]
        except OSError:
            pass
    return sorted(found)


def alive(pid):
    """Neither gone nor a zombie."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def where(pid):
    """What each thread of a process is doing, as the debugger tells or else the kernel."""
    if shutil.which("gdb"):
        done = subprocess.run(["gdb", "-p", str(pid), "-batch", "-ex", "thread apply all bt 12"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              universal_newlines=True)
        return done.stdout
    lines = []
    for path in glob.glob("/proc/%d/task/*" % pid):
        try:
            lines.append("%s waits in %s" % (open(path + "/comm").read().strip(), open(path + "/wchan").read()))
        except OSError:
            pass
    return "\n".join(lines)
