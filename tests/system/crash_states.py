"""The states of a disk after a crash, computed from the calls that tests/faults recorded. Written data are safe when their file has been
synced, and names when their folder has."""
import glob
import os
import re
import shutil
import sys


def read(log, under):
    """The calls on files under a folder in order: (time, call, path, ...)."""
    calls = []
    for name in glob.glob(log + "/*.calls"):
        data = open(name[:-6] + ".data", "rb").read()
        for line in open(name):
            time, call, *words = line.rstrip("\n").split("\t")
            if not (words[0] + "/").startswith(under + "/"):
                continue
            if call == "write":
                offset, count, place = map(int, words[1:])
                words = [words[0], offset, data[place:place + count]]
            elif call == "ftruncate":
                words = [words[0], int(words[1])]
            calls.append((float(time), call, *words))
    calls.sort(key=lambda entry: entry[0])
    if not calls:
        sys.exit("nothing was recorded")
    return calls


class File:
    def __init__(self):
        self.synced, self.pending = b"", []  # content; calls since

    def content(self, pending):
        data = bytearray(self.synced)
        for call in pending:
            if call[0] == "write":
                _, offset, block = call
                if len(data) < offset:
                    data.extend(bytes(offset - len(data)))
                data[offset:offset + len(block)] = block
            else:
                length = call[1]
                data = data[:length] + bytes(max(0, length - len(data)))
        return bytes(data)


class Folder:
    def __init__(self):
        self.synced, self.pending = {}, []  # names; calls since

    def names(self, pending):
        names = dict(self.synced)
        for call in pending:
            if call[0] == "add":
                names[call[1]] = call[2]
            elif call[0] == "remove":
                names.pop(call[1], None)
            elif call[0] == "rename" and call[1] in names:
                names[call[2]] = names.pop(call[1])
            elif call[0] == "exchange" and call[1] in names and call[2] in names:
                names[call[1]], names[call[2]] = names[call[2]], names[call[1]]
        return names


class Disk:
    """The part of the tree under a folder that is safe."""

    def __init__(self, top):
        self.top, self.root = top, Folder()

    def at(self, path):
        node = self.root
        for name in [part for part in path[len(self.top):].split("/") if part]:
            node = node.names(node.pending).get(name) if isinstance(node, Folder) else None
        return node

    def parent(self, path):
        return self.at(os.path.dirname(path)), os.path.basename(path)

    def apply(self, call, path, *rest):
        if call in ("create", "open", "mkdir"):
            folder, name = self.parent(path)
            if name not in folder.names(folder.pending):
                folder.pending.append(("add", name, Folder() if call == "mkdir" else File()))
            elif call == "create":
                self.at(path).pending.append(("truncate", 0))
        elif call in ("write", "ftruncate"):
            self.at(path).pending.append((call,) + rest)
        elif call == "fsync":
            node = self.at(path)
            node.synced = node.content(node.pending) if isinstance(node, File) else node.names(node.pending)
            node.pending = []
        elif call in ("rename", "exchange"):
            assert os.path.dirname(path) == os.path.dirname(rest[0])
            folder, name = self.parent(path)
            folder.pending.append((call, name, os.path.basename(rest[0])))
        elif call in ("unlink", "rmdir"):
            folder, name = self.parent(path)
            folder.pending.append(("remove", name))


def unsynced(node, place):
    """The part of a tree that is not safe."""
    found = ["%s: %d calls" % (place, len(node.pending))] if node.pending else []
    if isinstance(node, Folder):
        for name, child in node.names(node.pending).items():
            found += unsynced(child, place + "/" + name)
    return found


def published(call, path, *rest):
    """The step of the checkpoint that a call publishes, or None."""
    name = re.search(r"/step-(\d+)$", rest[0]) if call in ("rename", "exchange") and rest else None
    return int(name.group(1)) if name else None


def replay(calls, work):
    """A disk after the calls, and the newest step whose checkpoint is safe (None: none yet)."""
    disk = Disk(os.path.dirname(work))
    disk.root.synced = {}
    safe = step = None
    for call in calls:
        disk.apply(*call[1:])
        step = published(*call[1:]) or step
        if call[1] == "fsync" and call[2] == work + "/checkpoints" and step:
            safe = step
    return disk, safe


def check_order(calls, work):
    """The order of calls must be: write, sync, rename, sync the folder, and only then remove older checkpoints."""
    disk = Disk(os.path.dirname(work))
    steps, newest = 0, None
    for number, call in enumerate(calls):
        where = "call %d, %s" % (number, call[1:3])
        step = published(*call[1:])
        if step:
            steps, newest = steps + 1, os.path.basename(call[3])
            node = disk.at(call[2])
            names = set(node.names(node.pending))
            left = unsynced(node, call[2])
            if left or "manifest.h5" not in names or not any(name.startswith("shard-") for name in names):
                sys.exit("%s: a checkpoint takes its name with %s" % (where, left or sorted(names)))
        gone = re.search(r"/(?:step-|\.removed-)\d+(/|$)", call[2]) if call[1] in ("unlink", "rmdir", "rename", "exchange") else None
        if gone:
            folder = disk.at(work + "/checkpoints")
            if newest not in folder.synced:
                sys.exit("%s: an old checkpoint goes before the name of a new one is safe" % where)
        disk.apply(*call[1:])
    # the folders above are safe as well
    for path in (work, work + "/checkpoints"):
        folder, name = disk.parent(path)
        if name not in folder.synced:
            sys.exit("the name of %s was never synced" % path)
    if steps < 3:
        sys.exit("only %d checkpoints were recorded" % steps)


def rebuild(calls, work, target, how, random):
    """Makes `target` a state that a crash after the calls may leave of `work`: `all` calls, only `synced` ones, or `some` of the rest.
    Returns the newest step whose checkpoint must exist, or None."""
    disk, safe = replay(calls, work)
    shutil.rmtree(target, ignore_errors=True)

    def kept(pending):
        return pending if how == "all" else [] if how == "synced" else [call for call in pending if random.random() < 0.5]

    def write(node, path):
        if isinstance(node, File):
            with open(path, "wb") as out:
                out.write(node.content(kept(node.pending)))
            return
        os.makedirs(path, exist_ok=True)
        for name, child in node.names(kept(node.pending)).items():
            write(child, path + "/" + name)

    top = disk.root.names(kept(disk.root.pending)).get(os.path.basename(work))
    if top:
        write(top, target)
    return safe
