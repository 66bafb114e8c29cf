"""The campaign of links.sh: links.py HAPT FOLDER run|files. In FOLDER: m.h5, t.h5, and c1.json, c2.json, plan1.h5, plan2.h5 for 1 and 2 ranks."""
import os
import random
import shutil
import sys
import threading

import runs

hapt, folder, part = sys.argv[1:4]
long_round = bool(os.environ.get("HAPT_LONG"))
seed = int(os.environ.get("HAPT_SEED", random.randrange(1 << 30)))
random.seed(seed)
print("seed", seed, flush=True)
OUTSIDE, BASE, WORK = folder + "/outside", folder + "/base", folder + "/work"
FINE = (0, 2, 3, 6)


def train(ranks, steps, *more):
    return runs.on(ranks, [hapt, "train", "--input", folder + "/m.h5", "--plan", "%s/plan%d.h5" % (folder, ranks), "--cluster",
                           "%s/c%d.json" % (folder, ranks), "--data", folder + "/t.h5", "--threads", "1", "--steps", str(steps)] + list(more))


def start(command, where=None, plant=None):
    """Runs to its end. `plant` runs in the process itself, for names that contain its number."""
    run = PlantingStart(command, where, plant) if plant else runs.Start(command, where)
    code = run.wait(120)
    if code is None:
        run.end()
        sys.exit("it hangs: %s\n%s" % (command, run.text()))
    return run, code


class PlantingStart(runs.Start):
    def __init__(self, command, where, plant):
        script = 'umask 022; while [ "$1" != -- ]; do ln -s "$2" "$(echo "$1" | sed "s/PID/$$/")" || exit 99; shift 2; done; shift; exec "$@"'
        super().__init__(["sh", "-c", script, "sh"] + [word for pair in plant for word in pair] + ["--"] + command, where)


def make_outside():
    """The targets of links: a run of another job with checkpoints, and files of other kinds."""
    done, code = start(train(1, 6, "--checkpoint-every", "2", "--keep", "10", "--output", OUTSIDE))
    if code:
        sys.exit(done.text())
    for name in ("thesis.txt", ".hapt-lock-of-mine"):
        with open("%s/%s" % (OUTSIDE, name), "w") as file:
            file.write("precious\n")
    os.mkdir(OUTSIDE + "/empty")
    done, code = start(train(1, 6, "--checkpoint-every", "2", "--keep", "10", "--output", BASE))
    if code:
        sys.exit(done.text())


# Names that a run writes, renames or removes when it resumes from step 6 to 8 or begins anew. PID: the number of the process.
NAMES = [".hapt-lock", "run.h5", "run.h5.overwritten", ".hapt-time-PID", "checkpoints.overwritten", "checkpoints.overwritten/step-00000002",
         "checkpoints.overwritten/step-00000002/shard-0000.h5", "checkpoints", "checkpoints/.try-PID-0", "checkpoints/step-00000002", "checkpoints/step-00000004",
         "checkpoints/step-00000006", "checkpoints/step-00000007", "checkpoints/step-00000008", "checkpoints/step-00000099",
         "checkpoints/step-00000002/shard-0000.h5", "checkpoints/step-00000002/manifest.h5", "checkpoints/step-00000002/shard-0001.h5",
         "checkpoints/.partial-00000002", "checkpoints/.partial-00000008", "checkpoints/.partial-00000008/shard-0000.h5",
         "checkpoints/.partial-00000003/manifest.h5.1.tmp", "checkpoints/.removed-00000002", "checkpoints/.removed-00000002/shard-0000.h5",
         "checkpoints/.replaced-00000002", "checkpoints/.replaced-00000006", "checkpoints/.replaced-00000009", "checkpoints/.replaced-00000002/shard-0000.h5",
         "checkpoints/step-00000006.damaged", "checkpoints/step-00000008.foreign", "checkpoints/step-00000002/thesis.txt"]
AIMS = ["checkpoints/step-00000004", "checkpoints", "thesis.txt", "checkpoints/step-00000004/shard-0000.h5", "empty", "new", "new/in-new", "."]
STARTS = [(["--resume", "auto"], 8), (["--overwrite", "yes"], 8), ([], 8), (["--resume", "yes", "--keep", "1"], 8), (["--resume", "auto"], 6)]


def plants():
    cases = [(name, aim, how, ranks) for name in NAMES for aim in AIMS for how in STARTS for ranks in (1, 2)]
    if long_round:
        return [case for case in cases if case[3] == 1] + random.sample([case for case in cases if case[3] == 2], 40)
    cases = [case for case in cases if case[3] == 1]
    return [random.choice([case for case in cases if case[0] == name and (case[2][0] or "overwritten" not in name)]) for name in NAMES]


def complain(why, done, before, after):
    changed = sorted(set(before.items()) ^ set(after.items()))[:8]
    sys.exit("%s, seed %d: outside changed: %s\n%s" % (why, seed, changed, done.text()[-1500:]))


def in_runs():
    make_outside()
    before, codes = runs.tree(OUTSIDE), {}
    for name, aim, (more, steps), ranks in plants():
        shutil.rmtree(WORK, ignore_errors=True)
        shutil.copytree(BASE, WORK)
        place, plant = "%s/%s" % (WORK, name), None
        os.makedirs(os.path.dirname(place), exist_ok=True)
        if os.path.isdir(place):
            shutil.rmtree(place)
        elif os.path.exists(place):
            os.unlink(place)
        if "PID" in name and ranks == 1:
            plant = [(place, OUTSIDE + "/" + aim)]
        elif "PID" not in name:
            os.symlink(OUTSIDE + "/" + aim, place)
        done, code = start(train(ranks, steps, "--checkpoint-every", "1", "--checkpoint-async", random.choice(("yes", "no")), "--output", WORK, *more),
                           plant=plant)
        why = "%s is a link to %s, %s, %d ranks: code %d" % (name, aim, more, ranks, code)
        after = runs.tree(OUTSIDE)
        if after != before:
            complain(why, done, before, after)
        if code not in FINE or len(done.errors()) != (code != 0):
            sys.exit("%s, seed %d\n%s" % (why, seed, done.text()))
        codes[code] = codes.get(code, 0) + 1
        if code == 0 and (steps == 8 or aim != "new") and runs.weights(hapt, WORK)[0] != 8 and not os.path.islink(place) and steps == 8:
            sys.exit("%s: step 8 is not there, seed %d\n%s" % (why, seed, done.text()))
    default_folder(before)
    print("%d links planted, exit codes %s, seed %d" % (sum(codes.values()), codes, seed))


def default_folder(before):
    """The note of the input in a default folder, and the numbered folder itself."""
    for name, aim in ((".hapt-input", "thesis.txt"), (".hapt-input", "new"), ("../m-2", "checkpoints"), ("../m-2", "new"), (".hapt-lock", "thesis.txt")):
        where = folder + "/defaults"
        shutil.rmtree(where, ignore_errors=True)
        os.makedirs(where + "/outputs/m")
        if name == "../m-2":
            shutil.copytree(BASE, where + "/outputs/m", dirs_exist_ok=True)
        os.symlink("%s/%s" % (OUTSIDE, aim), "%s/outputs/m/%s" % (where, name))
        done, code = start(train(1, 2), where)
        after = runs.tree(OUTSIDE)
        # a folder that the user links is used as any other, but its earlier content must stay
        lost = {path: kind for path, kind in before.items() if after.get(path) != kind}
        if lost or (name != "../m-2" and after != before):
            complain("default folder, %s to %s: code %d" % (name, aim, code), done, before, after)
        if code not in FINE or len(done.errors()) != (code != 0):
            sys.exit("default folder, %s to %s: code %d\n%s" % (name, aim, code, done.text()))
        for path in set(after) - set(before):
            full = "%s/%s" % (OUTSIDE, path)
            if os.path.isdir(full):
                shutil.rmtree(full, ignore_errors=True)
            elif os.path.lexists(full):
                os.unlink(full)


def commands():
    """Commands that write one file: (name, command up to the output's option and name)."""
    small = ["--input", folder + "/m.h5", "--cluster", folder + "/c1.json"]
    return [("model", ["model", "gpt", "--layers", "1", "--hidden", "16", "--heads", "2", "--sequence", "8", "--vocab", "256", "--output"]),
            ("data", ["data", folder + "/words.txt", "--output"]),
            ("plan", ["plan"] + small + ["--predict", "--threads", "1", "--output"]),
            ("profile", ["profile"] + small + ["--predict", "--output"]),
            ("calibrate", ["profile"] + small + ["--profile-seconds", "0.1", "--threads", "1", "--calibrate"]),
            ("topology", ["topology", "--cluster", folder + "/c1.json", "--output"]),
            ("spmd", ["spmd", "--input", folder + "/m.h5", "--cluster", folder + "/c2.json", "--output"]),
            ("run file", train(1, 8, "--resume", "auto", "--output")[1:]),
            ("export", ["export", "--checkpoint", BASE, "--output"]),
            ("timeline", ["report", "--input", folder + "/traced/run.h5", "--timeline"])]


FILE_AIMS = ("thesis.txt", "new", "empty", "run.h5")


def files():
    make_outside()
    with open(folder + "/words.txt", "w") as file:
        file.write("some words " * 200)
    done, code = start(train(1, 2, "--trace", "2", "--output", folder + "/traced"))
    if code:
        sys.exit(done.text())
    before, tried, refused = runs.tree(OUTSIDE), 0, 0
    for name, command in commands():
        for link in ("out", "out.PID.tmp", ".hapt-probe.PID.tmp"):
            for aim in FILE_AIMS if long_round else random.sample(FILE_AIMS, 1):
                for more in ([], ["--overwrite", "yes"]) if long_round else ([],):
                    if name == "run file" and (link == ".hapt-probe.PID.tmp" or more):
                        continue
                    shutil.rmtree(WORK, ignore_errors=True)
                    output = WORK + "/out"
                    if name == "run file":
                        shutil.copytree(BASE, WORK)
                        os.unlink(WORK + "/run.h5")
                        output = WORK
                    else:
                        os.mkdir(WORK)
                    place = "%s/%s" % (WORK, link.replace("out", "run.h5") if name == "run file" else link)
                    done, code = start([hapt] + command + [output] + more, plant=[(place, "%s/%s" % (OUTSIDE, aim))])
                    why = "%s: %s is a link to %s, %s: code %d" % (name, link, aim, more, code)
                    after = runs.tree(OUTSIDE)
                    if after != before:
                        complain(why, done, before, after)
                    if code not in FINE or len(done.errors()) != (code != 0):
                        sys.exit("%s\n%s" % (why, done.text()))
                    # a link under a temporary name is passed over; a link under the name itself is refused
                    if name != "run file" and (code == 0) != (bool(more) or link != "out") and (code == 0 or aim != "empty"):
                        sys.exit("%s\n%s" % (why, done.text()))
                    tried += 1
                    refused += code != 0
    raced = race(before)
    print("%d links under the names of outputs, %d refused; %d under temporary names of checkpoints" % (tried, refused, raced))


def race(before):
    """Plants links under the temporary names of shards and manifests as soon as their folder exists."""
    shutil.rmtree(WORK, ignore_errors=True)
    run = runs.Start(train(1, 60 if long_round else 15, "--checkpoint-every", "1", "--checkpoint-async", "no", "--output", WORK))
    planted, top, over = 0, WORK + "/checkpoints", threading.Event()
    while run.process.poll() is None and not over.is_set():
        for name in os.listdir(top) if os.path.isdir(top) else []:
            if not name.startswith(".partial-"):
                continue
            for file in ("shard-0000.h5", "manifest.h5"):
                try:
                    os.symlink(OUTSIDE + "/thesis.txt", "%s/%s/%s.%d.tmp" % (top, name, file, run.process.pid))
                    planted += 1
                except OSError:
                    pass
    code, after = run.wait(60), runs.tree(OUTSIDE)
    if after != before:
        complain("links under temporary names while a job writes: code %s" % code, run, before, after)
    if code not in FINE or len(run.errors()) != (code != 0) or planted == 0:
        sys.exit("links under temporary names while a job writes: code %s, %d planted\n%s" % (code, planted, run.text()))
    return planted


{"run": in_runs, "files": files}[part]()
