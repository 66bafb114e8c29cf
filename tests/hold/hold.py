#!/usr/bin/python3
"""Are the plans, programs and losses of two executables equal, bit for bit? hold.py OLD NEW FOLDER

A change of structure must change no result. Models, clusters, data and profiles are made once, by OLD, and kept in FOLDER
(made anew where it is missing). Then both executables plan, simulate, synthesise and train from these files. Plans are
compared as JSON, without what OLD does not write, the seconds of the search, the creator and the format version; training
by its losses, gradient norms and final weights. Both sides train by plans that OLD wrote, so NEW must also read OLD's plan
files.
HAPT_HOLD=PATTERN: only the instances whose name matches. Exit code 1: at least one differs.
"""
import concurrent.futures
import hashlib
import json
import os
import re
import subprocess
import sys

import h5py

import instances

old, new, folder = sys.argv[1:4]
chosen = re.compile(os.environ.get("HAPT_HOLD", ""))
for name, value in (("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1"), ("OMPI_MCA_pml", "ob1"),
                    ("OMPI_MCA_btl", "self,vader"), ("OMPI_MCA_mpi_yield_when_idle", "1")):
    os.environ.setdefault(name, value)
LAUNCHER = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np"]
VOLATILE = {"creator", "version", "reason", "note", "because", "what"}
LIMIT_S = 600  # of one command
objectives = {}  # of an executable: the options that select the formula


def formula(hapt):
    """The objective that every commit knows, where there is a choice of objectives."""
    if hapt not in objectives:
        help_text = "".join(subprocess.run([hapt] + words, stdout=subprocess.PIPE, universal_newlines=True).stdout
                            for words in (["plan", "--help"], ["help", "plan"]))  # older versions know the first alone
        objectives[hapt] = ["--objective", "formula"] if "--objective" in help_text else []
    return objectives[hapt]


def run(hapt, words, ranks=1):
    """Code and output of a command; a word @NAME is the file NAME of FOLDER."""
    if words[0] == "plan" and "--diff" not in words and "--strategy" not in words:
        words = words + formula(hapt)
    command = [os.path.join(folder, word[1:]) if word.startswith("@") else word for word in words]
    launcher = [] if ranks == 1 else LAUNCHER + [str(ranks)]
    done = subprocess.run(launcher + [hapt] + command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, universal_newlines=True, timeout=LIMIT_S)
    return done.returncode, done.stdout, done.stderr


def stable(value):
    """A JSON value without what may differ: seconds, versions, sentences."""
    if isinstance(value, dict):
        return {key: stable(item) for key, item in value.items() if not key.endswith("seconds") and key not in VOLATILE}
    return [stable(item) for item in value] if isinstance(value, list) else value


def answer(hapt, instance):
    """What a command that prints JSON answers: its exit code and the JSON, or the error."""
    code, out, err = run(hapt, instance.words + ["--json"], instance.ranks)
    if code:
        error = "".join(line for line in err.splitlines() if line.startswith("hapt: error:"))
        return [code, re.findall(r"[\d.]+", error)]
    return [0, stable(json.loads(out))]


def trained(hapt, instance, output):
    """Losses, gradient norms and final weights of a run."""
    words = ["%s.plan.h5" % output if word == "@PLAN" else word for word in instance.words]
    if instance.plans:
        code, _, err = run(hapt, instance.plans + ["--output", "%s.plan.h5" % output, "--overwrite", "yes"])
        if code:
            return [code, err[-800:]]
    code, _, err = run(hapt, words + ["--output", output, "--overwrite", "yes", "--threads", "1"], instance.ranks)
    if code:
        return [code, err[-800:]]
    with h5py.File(os.path.join(output, "run.h5"), "r") as file:
        history = [[float(x).hex() for x in file["train"][name][()]] for name in ("loss", "gradient_norm")]
    exported = output + ".weights.h5"
    code, _, err = run(hapt, ["export", "--checkpoint", output, "--output", exported, "--overwrite", "yes"])
    if code:
        return [code, err[-800:]]
    digest = hashlib.sha256()
    with h5py.File(exported, "r") as file:
        for name in sorted(file["parameters"]):
            digest.update(name.encode() + file["parameters"][name][()].tobytes())
    return [0, history, digest.hexdigest()]


def prepare():
    """The files that both executables start from."""
    os.makedirs(folder, exist_ok=True)
    for name, text in instances.TEXTS.items():
        with open(os.path.join(folder, name), "w") as file:
            file.write(text)
    for name, words, ranks in instances.FILES:
        if os.path.exists(os.path.join(folder, name)):
            continue
        code, _, err = run(old, words + ["--output", "@" + name], ranks)
        if code:
            sys.exit("hold: %s cannot be made: %s" % (name, err[-800:]))
        print("hold: made %s" % name, file=sys.stderr, flush=True)


def known(value, old):
    """A value without the keys that the old commit does not write."""
    if type(value) is type(old) is dict:
        return {key: known(value[key], old[key]) for key in value if key in old}
    if type(value) is type(old) is list and len(value) == len(old):
        return [known(one, other) for one, other in zip(value, old)]
    return value


def first_difference(a, b, where=""):
    if type(a) is type(b) is dict:
        for key in sorted(set(a) | set(b)):
            if a.get(key) != b.get(key):
                return first_difference(a.get(key), b.get(key), where + "." + key)
    if type(a) is type(b) is list and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b)):
            if one != other:
                return first_difference(one, other, "%s[%d]" % (where, index))
    return "%s: %s, now %s" % (where, str(a)[:200], str(b)[:200])


def compare(instance):
    if instance.trains:
        found = [trained(hapt, instance, os.path.join(folder, side, instance.name)) for hapt, side in ((old, "old"), (new, "new"))]
    else:
        found = [answer(hapt, instance) for hapt in (old, new)]
    found[1] = known(found[1], found[0])
    if found[0] != found[1]:
        return first_difference(*found)
    return None if found[0][0] in instance.codes else "exit code %s: %s" % (found[0][0], found[0][1])


prepare()
for side in ("old", "new"):
    os.makedirs(os.path.join(folder, side), exist_ok=True)
failed, counts = 0, {"plans": 0, "runs": 0}
todo = [instance for instance in instances.INSTANCES if chosen.search(instance.name)]
with concurrent.futures.ThreadPoolExecutor(max_workers=2) as pool:
    for instance, difference in zip(todo, pool.map(compare, todo)):
        counts["runs" if instance.trains else "plans"] += 1
        failed += difference is not None
        if difference:
            print("hold: %s differs: %s" % (instance.name, difference), flush=True)
print("hold: %d plans and %d runs compared, %d differ" % (counts["plans"], counts["runs"], failed))
sys.exit(1 if failed else 0)
