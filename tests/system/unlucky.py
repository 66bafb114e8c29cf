"""The table of unlucky.sh: unlucky.py HAPT FOLDER. Rows of unlucky.txt run in copies of one folder (`make_fixture`), some at a time."""
import concurrent.futures
import fnmatch
import os
import re
import shutil
import subprocess
import sys
import time

import h5py
import numpy

import runs

hapt, folder = sys.argv[1:3]
rounds = 3 if os.environ.get("HAPT_LONG") else 1
TABLE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "unlucky.txt")
LIMIT_S = 100
FIXTURE = folder + "/fixture"
CLUSTER = """{ "format": "hapt-cluster", "version": 1, "subclusters": [
    {"name": "a", "nodes": 1, "devices_per_node": %d, "device": "cpu", "memory": "%s"} ] }\n"""
GPT = ["model", "gpt", "--layers", "1", "--heads", "2", "--sequence", "8", "--vocab", "256", "--microbatch", "2"]
TRAIN = "train --input m.h5 --plan plan.h5 --cluster c.json --data t.h5 --threads 1"
# Variables for rows. $T: training, $J: the job, $M: a model, $ALONE: not as root
PRELUDE = """
hapt() { command "$HAPT" "$@"; }
T="%s"; J="--input m.h5 --cluster c.json --data t.h5 --threads 1 --predict --microbatches 2"
M="%s"; N=checkpoints/step-00000004
as_nobody() { chmod -R a+rwX . && cp "$HAPT" ./the-program && setpriv --reuid 65534 --clear-groups "$@"; }
mounts() { [ "$(id -u)" -eq 0 ] && unshare -m true 2>/dev/null || exit 77; }
""" % (TRAIN, " ".join(GPT))


def do(*words):
    done = subprocess.run([hapt] + list(words), cwd=FIXTURE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, universal_newlines=True)
    if done.returncode:
        sys.exit("the fixture: hapt %s: %s" % (" ".join(words), done.stdout))


def write(name, data):
    with open("%s/%s" % (FIXTURE, name), "wb") as file:
        file.write(data)


def spoil():
    """Truncated files of each kind, and files of a later version."""
    kinds = {"m": "m.h5", "t": "t.h5", "p": "p.h5", "plan": "plan.h5", "w": "w.h5", "run": "run/run.h5", "e": "e.h5"}
    os.mkdir(FIXTURE + "/bad")
    for name, path in kinds.items():
        with open("%s/%s" % (FIXTURE, path), "rb") as file:
            data = file.read()
        write("bad/%s-cut.h5" % name, data[:len(data) * 2 // 3])
        write("bad/%s-99.h5" % name, data)
        with h5py.File("%s/bad/%s-99.h5" % (FIXTURE, name), "r+") as file:
            file.attrs["version"] = numpy.int64(99)
    write("bad/c-cut.json", (CLUSTER % (1, "300 MB"))[:60].encode())
    write("bad/c-99.json", (CLUSTER % (1, "300 MB")).replace('"version": 1', '"version": 99').encode())
    write("bad/empty", b"")
    write("bad/noise.bin", numpy.random.default_rng(1).integers(0, 256, 4001, "uint8").tobytes())
    write("bad/noise2.bin", numpy.random.default_rng(1).integers(0, 50000, 4000, "uint16").tobytes())
    header = numpy.zeros(256, "int32")
    header[:3] = 20240520, 7, 1000
    write("bad/llmc7.bin", header.tobytes() + numpy.zeros(1000, "uint32").tobytes())
    rows = numpy.random.default_rng(2).integers(0, 256, (6, 4, 9))
    at = numpy.zeros(rows.shape, bool)
    at[1, 2, 3] = True
    for name, values in (("outside", numpy.where(at, 256, rows)), ("negative", numpy.where(at, -1, rows)), ("fraction", rows + 0.5),
                         ("nan", numpy.where(at, numpy.nan, rows)), ("short", rows[:, :, :6]), ("few", rows[:2]), ("narrow", rows[:, :3]), ("good", rows)):
        with h5py.File("%s/bad/%s.h5" % (FIXTURE, name), "w") as file:
            file["batches"] = values
    with h5py.File(FIXTURE + "/bad/stream.h5", "w") as file:
        file["tokens"] = numpy.arange(5000) % 300
    with h5py.File(FIXTURE + "/bad/halves.h5", "w") as file:
        file["tokens"] = numpy.arange(5000) % 200 + 0.5
    numpy.arange(5000, dtype="int32").tofile(FIXTURE + "/bad/raw")
    with h5py.File(FIXTURE + "/bad/external.h5", "w") as file:
        file.create_dataset("tokens", (5000,), "int32", external=[(FIXTURE + "/bad/raw", 0, 20000)])
    with h5py.File(FIXTURE + "/bad/link.h5", "w") as file:
        file["tokens"] = h5py.ExternalLink(FIXTURE + "/t.h5", "/tokens")
    with h5py.File(FIXTURE + "/bad/virtual.h5", "w") as file:
        layout = h5py.VirtualLayout((1000,), "int32")
        layout[:] = h5py.VirtualSource(FIXTURE + "/t.h5", "tokens", (1000,))
        file.create_virtual_dataset("tokens", layout)


def make_fixture():
    os.mkdir(FIXTURE)
    write("words.txt", b"the quick brown fox jumps over the lazy dog\n" * 60)
    write("c.json", (CLUSTER % (1, "300 MB")).encode())
    write("c2.json", (CLUSTER % (2, "300 MB")).encode())
    write("tiny.json", (CLUSTER % (1, "100 kB")).encode())
    do("data", "words.txt", "--output", "t.h5")
    for name, hidden in (("m", "16"), ("other", "32")):
        do(*GPT, "--hidden", hidden, "--output", name + ".h5")
    do("profile", "--input", "m.h5", "--cluster", "c.json", "--predict", "--output", "p.h5")
    do("profile", "--input", "m.h5", "--cluster", "c.json", "--threads", "1", "--profile-seconds", "0.1", "--calibrate", "e.h5")
    do("plan", "--profile", "p.h5", "--microbatches", "2", "--output", "plan.h5")
    do("plan", "--input", "other.h5", "--cluster", "c.json", "--predict", "--threads", "1", "--microbatches", "2", "--output", "other-plan.h5")
    do(*TRAIN.split(), "--steps", "4", "--checkpoint-every", "2", "--keep", "10", "--trace", "1", "--output", "run")
    do(*TRAIN.split(), "--steps", "4", "--checkpoint-every", "2", "--keep", "10", "--data-seed", "7", "--output", "run2")
    do("export", "--checkpoint", "run", "--output", "w.h5")
    spoil()


def read_table():
    rows = []
    with open(TABLE) as file:
        for number, line in enumerate(file, 1):
            if line.startswith("#") or not line.strip():
                continue
            cells = [cell.strip() for cell in line.rstrip("\n").split(" :: ")]
            if len(cells) not in (5, 6):
                sys.exit("unlucky.txt:%d: %d columns" % (number, len(cells)))
            rows.append(dict(zip(("name", "command", "code", "pattern", "keeps", "mark"), cells + [""] * (6 - len(cells)))))
    return rows


def lost(before, after, keeps):
    """Reports changes. keeps: all (in place), moved (anywhere in the folder), else patterns of paths that may change."""
    if keeps == "moved":
        left = set(after.values())
        return [path for path, kind in before.items() if kind not in left]
    may_change = [] if keeps == "all" else keeps.split()

    def may(path):  # a run that may write its run file may write its metrics
        return any(fnmatch.fnmatch(path.replace("/metrics.csv", "/run.h5"), pattern) for pattern in may_change)

    return [path for path, kind in before.items() if after.get(path) != kind and not may(path)]


def judge(row, code, err, out, gone):
    wanted = [int(word) for word in row["code"].split("/")]
    errors = runs.errors(err)
    if code == 77 and 77 not in wanted:
        return "skipped"
    if code not in wanted:
        return "code %s, not %s" % (code, row["code"])
    if 2 <= code <= 8 and "2>&-" not in row["command"]:
        if len(errors) != 1:
            return "%d error lines" % len(errors)
        if "\nhint: " not in "\n" + err:
            return "no hint"
    if code in (0, 9) and errors:
        return "code %d with an error line" % code
    if not re.search(row["pattern"], err + out):
        return "no /%s/" % row["pattern"]
    return "lost: %s" % gone[:4] if gone else ""


def attempt(number, row):
    place = "%s/row%d" % (folder, number)
    shutil.copytree(FIXTURE, place, symlinks=True)
    before, began = runs.tree(place), time.time()
    run = runs.Start(["bash", "-c", PRELUDE + row["command"]], place, HAPT=hapt)
    code = run.wait(LIMIT_S)
    if code is None:
        run.end()
        problem = "it hangs"
    else:
        problem = judge(row, code, run.text(), "".join(run.out), lost(before, runs.tree(place), row["keeps"]))
    shutil.rmtree(place, ignore_errors=True)
    return problem, time.time() - began, run.text()[-700:]


def main():
    make_fixture()
    only, marks = os.environ.get("HAPT_ROWS", ""), os.environ.get("HAPT_MARKS") != "no"
    rows = [row for row in read_table() if re.search(only, row["name"]) and (marks or not row["mark"])]
    failed = skipped = 0
    for turn in range(rounds):
        with concurrent.futures.ThreadPoolExecutor(4 * (turn + 1)) as pool:
            for row, (problem, seconds, text) in zip(rows, pool.map(attempt, range(len(rows)), rows)):
                skipped += problem == "skipped"
                if seconds > 20:
                    print("%s: %.0f s" % (row["name"], seconds))
                if problem and problem != "skipped":
                    failed += 1
                    print("%s%s: %s\n    %s\n    %s" % (row["name"], " [%s]" % row["mark"] if row["mark"] else "", problem, row["command"],
                                                      text.replace("\n", "\n    ")))
    print("%d rows, %d skipped, %d failed" % (rounds * len(rows), skipped, failed))
    sys.exit(failed > 0 or len(rows) == 0)


main()
