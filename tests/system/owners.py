"""The campaign of owners.sh: owners.py HAPT FOLDER ROUNDS. In FOLDER: m.h5, t.h5, and c1.json, c2.json, plan1.h5, plan2.h5 for 1 and 2 ranks."""
import os
import random
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time

import processes
import runs

hapt, folder, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
long_round = bool(os.environ.get("HAPT_LONG"))
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
print("seed", seed, flush=True)
STEPS, ENDLESS, MOST_S = 2500, 100000000, 120
STALE_S, BEAT_S = 30, 5
ELSEWHERE = ("hapt-lock 1\nhost elsewhere\nprocess 4711\nstarted 12345\nboot 11111111-2222-3333-4444-555555555555\nspace pid:[1]\njob 77\n"
             "since 2026-01-01T00:00:00\ntoken 0123456789012345678901234567890123456789\n")


def train(ranks, steps, *more):
    return runs.on(ranks, [hapt, "train", "--input", folder + "/m.h5", "--plan", "%s/plan%d.h5" % (folder, ranks), "--cluster",
                           "%s/c%d.json" % (folder, ranks), "--data", folder + "/t.h5", "--threads", "1", "--steps", str(steps),
                           "--checkpoint-every", "300"] + list(more))


def complain(what, *starts):
    sys.exit("%s (seed %d)\n%s" % (what, seed, "\n---\n".join(start.text()[-1500:] for start in starts)))


def finished(start):
    code = start.wait(MOST_S)
    if code is None:
        start.end()
        complain("it hangs", start)
    return code


def refused(start, code, pattern):
    """One error that matches, a hint, that exit code."""
    got = finished(start)
    if got != code or len(start.errors()) != 1 or not re.search(pattern, start.text()) or "hint: " not in start.text():
        complain("code %s, not %d, or no /%s/" % (got, code, pattern), start)


def same(run, ranks, good):
    step, found = runs.weights(hapt, run)
    if step != STEPS or found != good[ranks]:
        sys.exit("%s has other weights than a run that was alone (step %s, seed %d)" % (run, step, seed))


def contest(good, number, defaults):
    """Two starts, at an offset. Each that succeeds has the weights of a single run."""
    ranks = random.choice((1, 1, 2))
    place = tempfile.mkdtemp(prefix="round", dir=folder)
    output = [] if defaults else ["--output", place + "/run"]
    insists = random.choice([[], ["--resume", "auto"], ["--overwrite", "yes"]]) if not defaults else []
    first = runs.Start(train(ranks, STEPS, *output), place)
    offset = random.choice((random.random() * 0.05, random.random() * (0.8 if ranks == 1 else 1.6)))
    time.sleep(offset)
    second = runs.Start(train(ranks, STEPS, *output, *insists), place)
    families = [{first.process.pid}, {second.process.pid}]  # the loop may not see a start that ends at once
    while first.process.poll() is None and second.process.poll() is None:
        for start, family in ((first, families[0]), (second, families[1])):
            family.update(pid for pid, _ in start.family())
        time.sleep(0.02)
    codes = [finished(first), finished(second)]
    why = "round %d: %d ranks, offset %.3f s, default folders %s, %s: codes %s" % (number, ranks, offset, defaults, insists, codes)
    if defaults:
        if codes != [0, 0]:
            complain(why, first, second)
        for name in ("outputs/m", "outputs/m-2"):
            same("%s/%s" % (place, name), ranks, good)
        if sorted(os.listdir(place + "/outputs")) != ["m", "m-2"]:
            complain(why + ": %s" % os.listdir(place + "/outputs"), first, second)
    else:
        one_by_one = codes == [0, 0] and insists  # the first had ended, and the second was told to resume or to replace it
        if not one_by_one and sorted(codes) != [0, 2]:
            complain(why, first, second)
        if not one_by_one:
            loser, winner = (first, 1) if codes[0] == 2 else (second, 0)
            named = re.search(r"is in use by process (\d+) on host (\S+)", loser.text())
            over = "already holds a run" in loser.text()
            if len(loser.errors()) != 1 or "hint: " not in loser.text() or not (named or over):
                complain(why, loser)
            if named and (int(named.group(1)) not in families[winner] or named.group(2) != socket.gethostname()):
                complain(why + ": the wrong owner is named; the family is %s" % sorted(families[winner]), loser)
        same(place + "/run", ranks, good)
        if os.path.exists(place + "/run/.hapt-lock"):
            complain(why + ": a lock is left", first, second)
    shutil.rmtree(place)
    return "" if defaults else "in use" if "is in use by" in first.text() + second.text() else "over"


def newest(run):
    names = sorted(runs.checkpoints(run))
    return names[-1] if names else None


def await_checkpoint(start, run):
    until = time.time() + MOST_S
    while not newest(run):
        if time.time() > until or start.process.poll() is not None:
            complain("no checkpoint comes", start)
        time.sleep(0.01)


def killed():
    """The lock of a killed process is taken over at once."""
    run = folder + "/killed"
    start = runs.Start(train(1, ENDLESS, "--output", run))
    await_checkpoint(start, run)
    os.kill(start.process.pid, signal.SIGKILL)
    start.wait(MOST_S)
    if not os.path.exists(run + "/.hapt-lock"):
        complain("a killed job left no lock: nothing is tested", start)
    for more, code in (([], 2), (["--resume", "auto"], 0)):
        again = runs.Start(train(1, 1, "--output", run, *more))
        got = finished(again)
        if got != code or time.time() - again.began > 15 or (code == 0 and "the last owner of" not in again.text()):
            complain("a lock of a killed process, %s: code %s after %.1f s" % (more, got, time.time() - again.began), again)
    if os.path.exists(run + "/.hapt-lock"):
        sys.exit("a lock is left")


def planted(name, text, age_s=0):
    run = "%s/%s" % (folder, name)
    os.mkdir(run)
    with open(run + "/.hapt-lock", "w") as file:
        file.write(text)
    os.utime(run + "/.hapt-lock", (time.time() - age_s,) * 2)
    return run


def beating(path, stop):
    while not stop.wait(1):
        os.utime(path)


def elsewhere():
    """Locks of another host: with an old heartbeat, a live one, one that stopped a moment ago. The same with unreadable files."""
    for name, text in (("host", ELSEWHERE), ("unreadable", "no lock at all\n")):
        run = planted(name + "-old", text, 2 * STALE_S)
        start = runs.Start(train(1, 1, "--output", run))
        if finished(start) != 0 or time.time() - start.began > 15:
            complain("%s, an old heartbeat" % name, start)
        run, stop = planted(name + "-beating", text), threading.Event()
        before = runs.tree(run)
        heart = threading.Thread(target=beating, args=(run + "/.hapt-lock", stop))
        heart.start()
        ranks = 2 if name == "host" else 1
        refused(runs.Start(train(ranks, 1, "--output", run)), 2,
                "is in use by process 4711 on host elsewhere, job 77 since 2026" if name == "host" else "is in use by an unknown process")
        stop.set()
        heart.join()
        if runs.tree(run) != before:
            sys.exit("another host's folder changed: %s" % (runs.tree(run).keys() ^ before.keys()))
        if not long_round:
            continue
        run = planted(name + "-silent", text)
        start = runs.Start(train(ranks, 1, "--output", run, "--timeout", "6 s"))
        if finished(start) != 0 or not STALE_S - 2 < time.time() - start.began < STALE_S + 15 or "waiting up to" not in start.text():
            complain("%s, a heartbeat that stopped, %d ranks, %.0f s" % (name, ranks, time.time() - start.began), start)


def odd_files():
    """A lock that is a folder, or a link to a file or to nothing: one error, and nothing changes."""
    aim = folder + "/aim"
    with open(aim, "w") as file:
        file.write("precious\n")
    for name, make, pattern in (("link", lambda path: os.symlink(aim, path), "it is a symbolic link"),
                                ("nowhere", lambda path: os.symlink(folder + "/made-by-link", path), "it is a symbolic link"),
                                ("folder", os.mkdir, "the lock .* cannot be created")):
        run = "%s/odd-%s" % (folder, name)
        os.mkdir(run)
        make(run + "/.hapt-lock")
        before = runs.tree(run)
        refused(runs.Start(train(1, 1, "--output", run)), 6, pattern)
        if runs.tree(run) != before or open(aim).read() != "precious\n" or os.path.exists(folder + "/made-by-link"):
            sys.exit("a lock that is a %s: something changed" % name)


METRICS = ("run.h5", "metrics.csv", "tensorboard")


def digest(run, name):
    """The content of a file or folder of a run."""
    found = runs.tree(run)
    return [(path, found[path]) for path in sorted(found) if path.split("/")[0] == name]


def stolen():
    """The lock of a running job is taken or removed: the job ends with one error and writes nothing more."""
    cases = [(ranks, how) for ranks in (1, 2) for how in ("stolen", "removed", "link")]
    for ranks, how in cases if long_round else [(2, "stolen"), (1, "removed")]:
        run = "%s/%s%d" % (folder, how, ranks)
        start = runs.Start(train(ranks, ENDLESS, "--output", run, "--keep", "1000", "--metrics-every", "0.5", "--tensorboard", "yes"))
        await_checkpoint(start, run)
        lock = run + "/.hapt-lock"
        if how == "stolen":
            with open(lock + ".new", "w") as file:
                file.write(ELSEWHERE)
            os.rename(lock + ".new", lock)
        else:
            os.unlink(lock)
            if how == "link":
                os.symlink("/dev/null", lock)
        time.sleep(0.5)  # a write that has looked at the lock before
        then, metrics = runs.checkpoints(run), [digest(run, name) for name in METRICS]
        theirs = os.path.lexists(lock) and (os.readlink(lock) if os.path.islink(lock) else open(lock).read())
        refused(start, 6, "does not belong to this job any more" + (": now process 4711 on host elsewhere" if how == "stolen" else ""))
        if time.time() - start.began > MOST_S or len(set(runs.checkpoints(run)) - set(then)) > 1:  # one checkpoint may have been in progress
            complain("%s: checkpoints came behind it: %s" % (how, sorted(set(runs.checkpoints(run)) - set(then))), start)
        now = os.path.lexists(lock) and (os.readlink(lock) if os.path.islink(lock) else open(lock).read())
        if now != theirs or [digest(run, name) for name in METRICS] != metrics:
            complain("%s: the new owner's lock changed, or metrics were written" % how, start)
        left = [pid for pid in processes.naming(run + "/")]
        if left:
            complain("%s: processes are left: %s" % (how, left), start)


def main():
    good = {}
    for ranks in (1, 2):
        start = runs.Start(train(ranks, STEPS, "--output", "%s/alone%d" % (folder, ranks)))
        if finished(start) != 0:
            complain("a run alone", start)
        good[ranks] = runs.weights(hapt, "%s/alone%d" % (folder, ranks))[1]
    met = 0
    for number in range(rounds):
        contest(good, 2 * number, True)
        met += contest(good, 2 * number + 1, False) == "in use"
    killed()
    elsewhere()
    odd_files()
    stolen()
    print("%d rounds of two jobs with default folders, %d with one --output (%d met), seed %d" % (rounds, rounds, met, seed))


main()
