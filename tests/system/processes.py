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


def descendants(pid):
    found = []
    for child in children(pid):
        found += [child] + descendants(child)
    return found


def started(pid):
    """Start time of a process, which distinguishes it from a later one with the same number. None: it does not exist, or is a zombie."""
    try:
        with open("/proc/%d/stat" % pid) as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def title(pid):
    """The name of a process's first thread."""
    try:
        with open("/proc/%d/comm" % pid) as file:
            return file.read().strip()
    except OSError:
        return ""


def naming(text):
    """Living processes whose command line holds the text."""
    found = []
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        pid = int(path.split("/")[2])
        try:
            with open(path, errors="replace") as file:
                if text in file.read() and alive(pid):
                    found.append(pid)
        except OSError:
            pass
    return found


def alive(pid):
    """Does it exist, and is it not a zombie?"""
    try:
        with open("/proc/%d/stat" % pid) as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def where(pid):
    """The stack of each thread of a process, from the debugger or else from the kernel."""
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
