"""Disks that fail during a checkpoint. usage: faults.py HAPT FOLDER LIBRARY calls|kill|crash|disk|resume. In FOLDER: m.h5, c1.json, c2.json,
plan1.h5, plan2.h5."""
import contextlib
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys

import h5py
import numpy

import crash_states
import processes
import runs

hapt, folder, library, part = sys.argv[1:5]
long_round = bool(os.environ.get("HAPT_LONG"))
rank_counts = [int(count) for count in os.environ.get("HAPT_RANKS", "1 2").split()]
# A failing call is never blamed on the newest checkpoint, so the checkpoint is not skipped.
STRICT = True
STEPS, EVERY = 4 if part in ("calls", "kill") else 6, 2
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)


def command(ranks, output, *more):
    launcher = [] if ranks == 1 else ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    every = [] if "--checkpoint-every" in more else ["--checkpoint-every", str(EVERY)]
    resume = [] if "--resume" in more else ["--resume", "auto"]
    return launcher + [hapt, "train", "--input", folder + "/m.h5", "--plan", "%s/plan%d.h5" % (folder, ranks),
                       "--cluster", "%s/c%d.json" % (folder, ranks), "--threads", "1", "--layers-per-model", "4",
                       "--steps", str(STEPS), "--output", output] + every + resume + list(more)


# The long round draws this many failing calls of each rank and way of saving, deaths, and failing calls of a resume of each kind on one rank and
# on two. HAPT_EVERY=1 tries all of them (of memory one of each call stack), which takes half a day.
every_call = bool(os.environ.get("HAPT_EVERY"))
MOST_CALLS, MOST_DEATHS, MOST_OF_A_KIND = 100, 20, (1500, 120)
MOST_S = 240 if part != "resume" else 100  # seconds of a run
hung = 0      # launchers without ranks


def start(ranks, output, *more, wrap=(), prepare=None, **environment):
    """mpirun 4.1 can wait for ever after all ranks have ended. That is not hapt's fault, and the run is repeated."""
    global hung
    while True:
        if prepare:
            prepare()
        run = subprocess.Popen(list(wrap) + command(ranks, output, *more), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               universal_newlines=True, env=dict(os.environ, **environment), start_new_session=True)
        try:
            out, err = run.communicate(timeout=MOST_S)
            return subprocess.CompletedProcess(run.args, run.returncode, out, err)
        except subprocess.TimeoutExpired:
            left = [pid for pid in processes.children(run.pid) if processes.alive(pid)] if ranks > 1 else [run.pid]
            stuck = [run.pid] + left if ranks > 1 else left  # the end of the report is shown
            places = "".join("process %d\n%s\n" % (pid, processes.where(pid)) for pid in stuck)
            for pid in stuck:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            _, err = run.communicate()
            hung += 1
            if left or hung > 2:
                sys.exit("it hangs: %s %s\n%s%s" % (more, environment, err, places))
            print("mpirun hangs without ranks: %s\n%s%s" % (environment, err, places), file=sys.stderr)


def hung_text():
    return "; mpirun hung %d times" % hung if hung else ""


def weights(output):
    """(step, weights) of the newest good checkpoint, or (None, None)."""
    exported = folder + "/w.h5"
    done = subprocess.run([hapt, "export", "--checkpoint", output, "--output", exported], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          universal_newlines=True, timeout=60)
    if done.returncode == 3:
        return None, None
    if done.returncode:
        sys.exit("export ended with code %d: %s" % (done.returncode, done.stderr))
    with h5py.File(exported, "r") as file:
        return int(file.attrs["step"]), {name: file["parameters"][name][()].tobytes() for name in file["parameters"]}


def reference(ranks):
    """Weights after each step of a run on a good disk. Also makes `base`, a checkpoint from which to resume."""
    output, base = "%s/good%d" % (folder, ranks), folder + "/base"
    for where in (output, base):
        shutil.rmtree(where, ignore_errors=True)
    for where, more in ((output, ("--keep", "10", "--checkpoint-every", "1")), (base, ("--stop-after", str(EVERY)))):
        done = start(ranks, where, *more)
        if done.returncode:
            sys.exit(done.stderr)
    return {step: weights("%s/checkpoints/step-%08d" % (output, step))[1] for step in range(1, STEPS + 1)}


def check_intact(good, output, least, why):
    step, found = weights(output)
    if step is None or step < least:
        sys.exit("%s: the checkpoint of step %s is gone (%s is left)" % (why, least, step))
    if found != good[step]:
        sys.exit("%s: the checkpoint of step %d has other weights" % (why, step))


# The run goes on without metrics of which a call fails, and says so.
def lacks_metrics(done):
    return "hapt: warning: metrics: " in done.stderr


# A failing call does no harm in three cases: there is another way (rename), only an old file was at stake (unlink, names of checkpoints to
# remove; list, their folders), or the data are already on the disk (close after fsync).
MAY_PASS = {"rename", "unlink", "close", "list"}


def count_calls(path):
    """Number of calls of each kind. If several processes make some, the largest number."""
    found = {}
    for line in open(path):
        kind, number = line.split()
        found[kind] = max(found.get(kind, 0), int(number))
    os.remove(path)
    return found


def attempt(ranks, asynchronous, rank, *more, **fault):
    """Resumes from the checkpoint of `base`, with a fault in one rank."""
    base, work = folder + "/base", folder + "/work"

    def prepare():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)

    return start(ranks, work, "--checkpoint-async", asynchronous, *more, prepare=prepare, LD_PRELOAD=library, FAULTS_UNDER=work,
                 FAULTS_RANK=str(rank), **fault)


def go_on(good, ranks, why):
    """On a good disk again the run completes, and no incomplete file is left."""
    work = folder + "/work"
    again = start(ranks, work)
    if again.returncode:
        sys.exit("%s: then code %d\n%s" % (why, again.returncode, again.stderr))
    check_intact(good, work, STEPS, why + ", resumed")
    left = [name for name in os.listdir(work + "/checkpoints") if not name.startswith("step-")]
    if left:
        sys.exit("%s: the run that went on left %s" % (why, left))


def judge(done, good, ranks, call, why):
    """Did the failing call end the run, as it should (true), or do no harm (false)?"""
    work = folder + "/work"
    if done.returncode == 0 and (call in MAY_PASS or lacks_metrics(done)):
        check_intact(good, work, STEPS, why)
        return False
    errors = [line for line in done.stderr.splitlines() if line.startswith("hapt: error:")]
    if done.returncode != 6 or len(errors) != 1 or "hint:" not in done.stderr:
        sys.exit("%s: code %d\n%s" % (why, done.returncode, done.stderr))
    check_intact(good, work, EVERY, why)
    if random.random() < 0.1:
        go_on(good, ranks, why)
    return True


def ways():
    """Number of ranks, the rank with the fault, and whether checkpoints are asynchronous."""
    return [(ranks, rank, asynchronous) for ranks in rank_counts for rank in range(ranks) for asynchronous in ("yes", "no")]


def all_calls(ranks, rank, asynchronous, *more):
    """Every call of a rank: (kind, index, number of calls)."""
    counts = folder + "/counts"
    if attempt(ranks, asynchronous, rank, *more, FAULTS_COUNTS=counts).returncode:
        sys.exit("the library alone disturbs it")
    return [(call, at, total) for call, total in count_calls(counts).items() for at in range(1, total + 1)]


def calls():
    tried = failed = 0
    good = {}
    for ranks, rank, asynchronous in ways():
        if rank == 0 and asynchronous == "yes":
            good = reference(ranks)
        places = all_calls(ranks, rank, asynchronous)
        count = len(places)
        if not long_round:  # one of each kind, of half of them without a copy; on two ranks one in total
            kinds = sorted({call for call, _, _ in places})
            places = [random.choice([place for place in places if place[0] == kind]) for kind in kinds]
            places = random.sample(places, 1 if ranks > 1 else len(places) if asynchronous == "yes" else len(places) // 2)
        elif not every_call:
            places = sorted(random.sample(places, min(len(places), MOST_CALLS)))
        print("rank %d of %d, asynchronous %s: %d of %d calls" % (rank, ranks, asynchronous, len(places), count), flush=True)
        for call, at, total in places:
            error = random.choice(["ENOSPC", "EIO"])
            more = {"FAULTS_STICKY": "1"} if random.random() < 0.3 else {}
            done = attempt(ranks, asynchronous, rank, FAULTS_CALL=call, FAULTS_AT=str(at), FAULTS_ERROR=error, **more)
            tried += 1
            failed += judge(done, good, ranks, call, "rank %d of %d, asynchronous %s, %s %d of %d, %s%s, seed %d" % (
                rank, ranks, asynchronous, call, at, total, error, " from there on" if more else "", seed))
    print("%d failing calls, %d of them end the run, seed %d%s" % (tried, failed, seed, hung_text()))
    if failed < 8:
        sys.exit("hardly any call was tried")


# Moments of a checkpoint at which rank 0 may die: call, files.
MOMENTS = [("open", "*/shard-*"), ("write", "*/shard-*"), ("fsync", "*/shard-*"), ("open", "*/manifest.h5*"), ("fsync", "*/manifest.h5*"),
           ("rename", "*/.partial-????????"), ("fsync", "*/checkpoints"), ("rename", "*/step-*"), ("unlink", "*/.removed-*")]


def kill():
    """A rank dies before any call. Earlier checkpoints stay, and the next start resumes."""
    killed, good = 0, {}
    for ranks, rank, asynchronous in ways():
        if rank == 0 and asynchronous == "yes":
            good = reference(ranks)
        places = [(call, 1, pattern) for call, pattern in MOMENTS] if rank == 0 else []
        if long_round:
            every = all_calls(ranks, rank, asynchronous, "--keep", "1")
            places += [(call, at, None) for call, at, _ in random.sample(every, len(every) if every_call else min(len(every), MOST_DEATHS))]
        elif ranks > 1 or asynchronous == "no":
            places = random.sample(places, min(len(places), 1))
        for call, at, pattern in places:
            more = {"FAULTS_PATH": pattern} if pattern else {}
            why = "rank %d of %d dies before %s %d%s, asynchronous %s" % (rank, ranks, call, at, " of " + pattern if pattern else "", asynchronous)
            # the newest and the best checkpoint stay, so the third is the first that leads to a removal
            often = ("--checkpoint-every", "1") if pattern in ("*/step-*", "*/.removed-*") else ()
            done = attempt(ranks, asynchronous, rank, "--keep", "1", *often, FAULTS_CALL=call, FAULTS_AT=str(at), FAULTS_ERROR="KILL", **more)
            if done.returncode not in (-9, 137, 7):
                sys.exit("%s: code %d\n%s" % (why, done.returncode, done.stderr))
            check_intact(good, folder + "/work", EVERY, why)
            go_on(good, ranks, why)
            killed += 1
    print("%d runs killed before a call, seed %d%s" % (killed, seed, hung_text()))


def digest(top):
    """A hash of all names and bytes in a folder."""
    found = hashlib.sha256()
    for path, folders, names in os.walk(top):
        folders.sort()
        for name in sorted(names):
            with open(os.path.join(path, name), "rb") as file:
                data = file.read()
            found.update(("%s/%s %d " % (path, name, len(data))).encode() + data)
    return found.digest()


def crash():
    """The machine stops after any call. Data that were not synced may be lost."""
    states = 0
    for ranks in rank_counts:
        good, work, log = reference(ranks), "%s/crash%d/run" % (folder, ranks), "%s/log%d" % (folder, ranks)
        for asynchronous in ("yes", "no") if ranks == 1 or long_round else ("yes",):
            shutil.rmtree(log, ignore_errors=True)
            shutil.rmtree(os.path.dirname(work), ignore_errors=True)
            os.mkdir(os.path.dirname(work))
            os.mkdir(log)
            done = start(ranks, work, "--checkpoint-async", asynchronous, "--keep", "1", LD_PRELOAD=library, FAULTS_UNDER=folder, FAULTS_LOG=log)
            if done.returncode:
                sys.exit(done.stderr)
            recorded = crash_states.read(log, os.path.dirname(work))
            crash_states.check_order(recorded, work)
            # everywhere in the long round, else at a few points
            places, seen = range(1, len(recorded) + 1), set()
            if not long_round:
                places = sorted(random.sample(places, min(len(places), 5)))
            for place in places:
                for how in ("all", "synced", "some"):
                    again = folder + "/again"
                    safe = crash_states.rebuild(recorded[:place], work, again, how, random)
                    states += 1
                    state = digest(again), safe
                    if safe and state not in seen:
                        seen.add(state)
                        check_intact(good, again, safe, "a crash after call %d (%s), %s kept, asynchronous %s, seed %d" %
                                     (place, " ".join(str(word) for word in recorded[place - 1][1:3]), how, asynchronous, seed))
    print("%d states after a crash, seed %d%s" % (states, seed, hung_text()))


def disk():
    """A file system that is too small, then larger."""
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode:
        print("a full file system needs root")
        return
    good, place = reference(1), folder + "/small"
    os.mkdir(place)
    size = sum(os.path.getsize(os.path.join(path, name)) for path, _, names in os.walk(folder + "/good1/checkpoints/step-%08d" % EVERY)
               for name in names)
    # space for a checkpoint and a half: the second does not fit beside the first
    script = """
        mount -t tmpfs -o size=%d tmpfs "$0" || exit 100
        "$@"; first=$?
        cp -r "$0"/run "$0".kept
        mount -o remount,size=%d tmpfs "$0" || exit 101
        "$@" || exit 102
        cp -r "$0"/run "$0".whole
        exit $first""" % (size * 3 // 2 // 4096 * 4096, size * 20)
    for asynchronous in ("yes", "no"):
        for kept in (place + ".kept", place + ".whole"):
            shutil.rmtree(kept, ignore_errors=True)
        done = start(1, place + "/run", "--keep", "1", "--checkpoint-async", asynchronous, wrap=["unshare", "-m", "sh", "-c", script, place])
        errors = [line for line in done.stderr.splitlines() if line.startswith("hapt: error:")]
        if done.returncode != 6 or len(errors) != 1:
            sys.exit("a full disk: code %d\n%s" % (done.returncode, done.stderr))
        check_intact(good, place + ".kept", EVERY if asynchronous == "no" else (EVERY + 1) // 2, "a full disk")
        check_intact(good, place + ".whole", STEPS, "a full disk that was enlarged")
    print("a full disk: " + errors[0])


KINDS = ("malloc", "look", "open", "read", "mmap", "thread")  # of a resume


def resume_once(ranks, rank, more, **fault):
    """A resume of `base`, which has two checkpoints, with a fault in one rank."""
    base, work = folder + "/base", folder + "/work"

    def prepare():
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(base, work)

    # some failing calls leave the other rank waiting inside MPI until a deadline
    return start(ranks, work, "--timeout", "20 s", *more, prepare=prepare, LD_PRELOAD=library, FAULTS_UNDER=work, FAULTS_RANK=str(rank), **fault)


def judge_resume(done, good, before, why):
    """In every case intact checkpoints stay intact, the newest or a newer one exists, and exit code 0 means that training resumed from
    it."""
    work = folder + "/work"
    now = runs.checkpoints(work)
    text = "%s: code %d\n%s" % (why, done.returncode, done.stderr[-1500:])
    changed = [step for step in before if step in now and now[step] != before[step]]
    if changed or max(before) > max(now, default=""):
        sys.exit("%s%s changed, there are %s" % (text, changed, sorted(now)))
    if max(before) not in now and not all(weights("%s/checkpoints/%s" % (work, step))[0] for step in now):
        sys.exit(text + "the newest one is gone, and a newer one is not whole")
    passed = "and skipped" in done.stderr or any(name.startswith("step-") and "." in name for name in os.listdir(work + "/checkpoints"))
    if done.returncode == 0 and passed:
        sys.exit(text + "the newest checkpoint was passed over, and all seemed well")
    if passed and STRICT:
        sys.exit(text + "a checkpoint was passed over for a call that failed")
    errors = runs.errors(done.stderr)
    if done.returncode == 0 and "resuming after step %d" % (2 * EVERY) not in done.stderr:
        sys.exit(text + "code 0, and training did not go on from the newest checkpoint")
    if done.returncode == 0 and weights(work) != (STEPS, good[STEPS]):
        sys.exit(text + "other weights")
    if len(errors) > 1:
        sys.exit(text + "%d errors" % len(errors))


def one_of_each_stack(path, total):
    """Picks one of the mallocs with equal call stacks."""
    stacks = {}
    for at, stack in enumerate(numpy.fromfile(path, "uint64")[:total].tolist(), 1):
        stacks.setdefault(stack, []).append(at)
    os.remove(path)
    if len(stacks) < 50:
        sys.exit("only %d call stacks were recorded" % len(stacks))
    return sorted(random.choice(same) for same in stacks.values())


def resume():
    """A call fails while a run is resumed: memory, opening, reading, mapping, threads. Of memory it tries one call of a
    stack. HAPT_KINDS: only some. HAPT_FAULTS: how many of each. HAPT_SHARE=K/N: share K of N of the calls, from 0, so that N processes test all
    of them. HAPT_AT="17 23": only these calls. HAPT_FAULTY="1": only calls of these ranks."""
    tried, codes, wrong, kinds = 0, {}, 0, os.environ.get("HAPT_KINDS", " ".join(KINDS)).split()
    faulty_ranks = [int(rank) for rank in os.environ.get("HAPT_FAULTY", "").split()]
    share, shares = (int(number) for number in os.environ.get("HAPT_SHARE", "0/1").split("/"))
    for ranks in rank_counts:
        good, base = reference(ranks), folder + "/base"
        shutil.rmtree(base)
        if start(ranks, base, "--stop-after", str(2 * EVERY), "--keep", "10", "--checkpoint-async", "no").returncode:
            sys.exit("no checkpoints to begin with")
        before = runs.checkpoints(base)
        if len(before) < 2:
            sys.exit("only %s stand" % sorted(before))
        for rank in faulty_ranks or (range(ranks) if long_round else [ranks - 1]):
            counts, stacks = folder + "/counts", folder + "/stacks"
            done = resume_once(ranks, rank, (), FAULTS_COUNTS=counts, FAULTS_READS="1", FAULTS_STACKS=stacks)
            if done.returncode:
                sys.exit("the library alone disturbs it: %s" % done.stderr)
            total = count_calls(counts)
            places, of_stacks = [], one_of_each_stack(stacks, total["malloc"])
            for kind in kinds:
                drawn = total.get(kind, 0) if every_call else MOST_OF_A_KIND[ranks - 1] // shares if long_round else 1
                most = int(os.environ.get("HAPT_FAULTS", 0)) or drawn
                mine = (of_stacks if kind == "malloc" else range(1, total.get(kind, 0) + 1))[share::shares]
                if "HAPT_AT" in os.environ:
                    mine = [int(at) for at in os.environ["HAPT_AT"].split()]
                places += [(kind, at) for at in sorted(random.sample(list(mine), min(most, len(mine))))]
            print("rank %d of %d: %d of %s" % (rank, ranks, len(places), {kind: total.get(kind, 0) for kind in kinds}), flush=True)
            for kind, at in places:
                error = {"malloc": "ENOMEM", "mmap": "ENOMEM", "look": random.choice(("EMFILE", "EIO", "ENOMEM")), "read": "EIO"}.get(kind, "EMFILE")
                more = {"FAULTS_STICKY": "1"} if random.random() < 0.3 else {}
                how = random.choice(("auto", "yes"))
                why = "rank %d of %d, --resume %s, %s %d of %d, %s%s, seed %d" % (
                    rank, ranks, how, kind, at, total[kind], error, " from there on" if more else "", seed)
                try:
                    done = resume_once(ranks, rank, ("--resume", how), FAULTS_CALL=kind, FAULTS_AT=str(at), FAULTS_ERROR=error, **more)
                    judge_resume(done, good, before, why)
                    codes[kind, done.returncode] = codes.get((kind, done.returncode), 0) + 1
                except SystemExit as failure:  # the others are tested as well
                    print("%s: %s" % (why, failure), flush=True)
                    wrong += 1
                tried += 1
    print("exit codes", {"%s %d" % key: count for key, count in sorted(codes.items())})
    print("%d failing calls of a resume, no checkpoint lost, share %d of %d, seed %d%s" % (tried, share, shares, seed, hung_text()))
    if wrong or tried < 8:
        sys.exit("%d of %d failing calls lost something or hung" % (wrong, tried))


{"resume": resume, "calls": calls, "kill": kill, "crash": crash, "disk": disk}[part]()
