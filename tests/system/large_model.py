"""usage: large_model.py HAPT FOLDER. A folder of Qwen2.5's shape is imported with LoRA, trained on unlike devices, resumed and exported. The peak memory
of a rank exceeds that of a rank with a tiny model by what the plan gives it, and at most a tenth. Losses do not depend on the plan, and exported weights
are the imported ones. HAPT_LONG=1: 3.1 billion parameters, as Qwen2.5-3B, in sparse files of zeros; else a model of which the embedding is the most."""
import json
import os
import resource
import shutil
import subprocess
import sys

if sys.argv[1] == "--child":  # --child FILE COMMAND...: runs it, and writes its peak memory, bytes
    code = subprocess.call(sys.argv[3:])
    with open(f"{sys.argv[2]}.{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}", "w") as file:
        file.write(str(1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))
    sys.exit(code)

import h5py
import numpy as np

from checking import HAPT, LONG, MPIRUN, check, end, passes, path
from published import tensors_of, write_folder

VOCAB, SEQUENCE = 151936, 16
LARGE = dict(layers=36, hidden=2048, heads=16, kv=2, ffn=11008) if LONG else dict(layers=4, hidden=128, heads=4, kv=2, ffn=2560)
RANDOM = np.random.default_rng(5)
BLOCKS = 0 if LONG else 12e6  # three blocks of rows, which are little beside a large model
TINY = dict(layers=4, hidden=64, heads=4, kv=2, ffn=64)


def cluster(ranks):
    """Two subclusters, of one device and of the others."""
    with open(path(f"cluster{ranks}.json"), "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1,
                   "subclusters": [{"name": name, "nodes": 1, "devices_per_node": devices, "device": "cpu", "memory": "16 GB", "slowdown": slowdown}
                                   for name, devices, slowdown in (("a", 1, 1), ("b", ranks - 1, 2))],
                   "links": [{"between": ["a", "b"], "bandwidth": "1 GB/s", "latency": "50 us"}]}, file)
    return path(f"cluster{ranks}.json")


def peaks(ranks, *words):
    """The peak memory of each rank, bytes."""
    child = [sys.executable, os.path.abspath(__file__), "--child", path("peak"), HAPT, *map(str, words)]
    done = subprocess.run((MPIRUN + [str(ranks)] if ranks > 1 else []) + child, capture_output=True, text=True, timeout=3600)
    check(done.returncode == 0, f"{words} on {ranks} ranks: code {done.returncode}: {done.stderr[-800:]}")
    return [int(open(f"{path('peak')}.{rank}").read()) for rank in range(ranks)]


def run(name, ranks, stages, output, *words):
    """Trains the model NAME.h5. Returns the peak memory of each rank and that of its plan, bytes, and the losses. Rank 0 runs stage 0, all others 1."""
    found = peaks(ranks, "--input", path(name + ".h5"), "--data", path(name + "-data.h5"), "--cluster", cluster(ranks), "--predict", "--layers-per-model", 4, "--stages", stages,
                  "--microbatches", 2, "--schedule", "1f1b", "--recompute", "no", "--threads", 1, "--output", path(output), *words)
    with h5py.File(path(output, "run.h5")) as file:
        plan = file["train/memory_planned"][()]
        check(np.array_equal(plan, file["train/memory_measured"][()]), f"{output}: planned {plan}, measured {file['train/memory_measured'][()]}")
        return found, [float(plan[min(rank, 1)]) for rank in range(ranks)], file["train/loss"][()]


def make(name, shape, vocab, shards):
    """NAME.h5 and NAME-data.h5. Returns the peak memory of the import, and the shapes."""
    shapes = write_folder(path(name), vocab=vocab, shards=shards, random=None if LONG else RANDOM, **shape)
    RANDOM.integers(0, vocab, 4000).astype(np.uint32).tofile(path(name + ".bin"))
    passes("data", path(name + ".bin"), "--type", "uint32", "--output", path(name + "-data.h5"))
    return peaks(1, "import", path(name), "--sequence", SEQUENCE, "--microbatch", 1, "--lora", "rank=16,alpha=32,target=q_proj,v_proj", "--frozen-weights",
                 "int8", "--output", path(name + ".h5"))[0], shapes


def mb(bytes_):
    return f"{bytes_ / 1e6:.0f} MB"


make("tiny", TINY, 512, 1)
importing, shapes = make("large", LARGE, VOCAB, 2)
largest = 4 * max(int(np.prod(shape)) for shape in shapes.values())
print(f"{sum(int(np.prod(shape)) for shape in shapes.values()) / 1e9:.3f} billion parameters; import: peak {mb(importing)}, the largest tensor {mb(largest)}")
check(importing < 1.1 * largest + 100e6, "import holds one tensor at a time")


def both(what, plan, ranks, stages, *words):
    empty, _, _ = run("tiny", ranks, stages, "tiny-" + plan, *words)
    found, planned, losses = run("large", ranks, stages, "large-" + plan, *words)
    for rank in range(ranks):
        print(f"{plan}, {what}: rank {rank}: peak {mb(found[rank])}, of a tiny model {mb(empty[rank])}, planned {mb(planned[rank])}")
        check(found[rank] - empty[rank] <= 1.1 * planned[rank] + BLOCKS, f"{plan}, {what}: rank {rank} has {(found[rank] - empty[rank]) / planned[rank]:.3f} of its plan")
    return losses


pipeline = both("training", "pipeline", 2, "0-2@a:1x1,2-4@b:1x1", "--steps", 2)
tensor = both("training", "tensor", 3, "0-2@a:1x1,2-4@b:1x2t2", "--steps", 2)
check(np.abs(pipeline - tensor).max() < 3e-6, f"losses {pipeline} and {tensor}")
resumed = both("resumed", "tensor", 3, "0-2@a:1x1,2-4@b:1x2t2", "--steps", 3, "--resume")
check(np.array_equal(resumed[:2], tensor), f"losses {resumed} after {tensor}")
if not LONG:  # other shards: the frozen weights are written again
    moved = both("resumed", "pipeline", 2, "0-1@a:1x1,1-4@b:1x1", "--steps", 3, "--resume", "--replan")
    check(np.array_equal(moved[:2], pipeline) and abs(moved[2] - resumed[2]) < 3e-6, f"losses {moved} after {pipeline}, beside {resumed}")
shutil.rmtree(path("large-pipeline"))  # disks are small
steps = sorted(os.listdir(path("large-tensor", "checkpoints")))
files = [{name: os.stat(path("large-tensor", "checkpoints", step, name)) for name in sorted(os.listdir(path("large-tensor", "checkpoints", step)))}
         for step in steps]
check(steps == ["step-00000002", "step-00000003"], f"checkpoints {steps}")
alike = [name for name in files[0] if files[0][name].st_ino == files[-1][name].st_ino]
check(alike == ["shard-0002.h5", "shard-0003.h5"], f"frozen weights are written once: {alike}")
own = sum(files[-1][name].st_size for name in files[-1] if name not in alike)
print(f"a checkpoint has {mb(sum(file.st_size for file in files[-1].values()))}, of which {mb(own)} are its own")
check(own < 0.05 * largest, "the rest is small")
names = os.listdir(path("large-tensor", "checkpoints"))
check(not any(name.startswith(".") for name in names), f"what is left in the folder of checkpoints: {names}")
for file in path("large-tensor", "checkpoints", steps[-1]), path("large-tensor", "checkpoints", steps[-1], "manifest.h5"):
    told = passes("check", file).stdout
    check("hapt-checkpoint version 2" in told, f"hapt check {file}: {told}")
exporting = peaks(1, "export", "--checkpoint", path("large-tensor"), "--format", "safetensors", "--merge", "--dtype", "bf16", "--output", path("merged"))[0]
print(f"export: peak {mb(exporting)}")
check(exporting < 1.1 * largest + 100e6, "export holds one tensor at a time")
before, after = tensors_of(path("large")), tensors_of(path("merged"))
check(before.keys() == after.keys(), "exported names")
for name in before:
    if ".mlp." not in name and "_proj.weight" not in name:  # those are rounded to 8 bits
        check(np.array_equal(before[name], after[name]), f"{name} is exported as it was imported")


def on_paper():
    """LoRA on one 4090, one 3090 and one V100 at 1 Gbit/s: all three are worth it, within their memories, near the proven bound."""
    os.remove(path("large.h5"))  # disks are small
    passes("import", path("large"), "--sequence", 1024, "--microbatch", 1, "--lora", "rank=16,alpha=32,target=q_proj,v_proj", "--dtype", "fp16",
           "--output", path("paper.h5"))
    with open("inputs/clusters/rtx4090-rtx3090-v100.json") as file:
        lab = json.load(file)
    plans = {}
    for names in (["rtx4090", "rtx3090", "v100"], ["rtx4090", "rtx3090"], ["rtx4090"]):
        some = dict(lab, subclusters=[one for one in lab["subclusters"] if one["name"] in names],
                    links=[link for link in lab["links"] if set(link["between"]) <= set(names)])
        with open(path("some.json"), "w") as file:
            json.dump(some, file)
        done = passes("plan", "--input", path("paper.h5"), "--cluster", path("some.json"), "--predict", "--global-batch", 32, "--json")
        plans[len(names)] = json.loads(done.stdout) if done.returncode == 0 else {"simulated_s": np.nan, "bound_s": np.nan, "stages": []}
    for names, plan in plans.items():
        print(f"LoRA on paper, {names} devices: a step of 32 x 1024 tokens takes {plan['simulated_s']:.2f} s, at least {plan['bound_s']:.2f} s; "
              f"layers {[stage['layers'] for stage in plan['stages']]}")
    check(plans[3]["simulated_s"] < plans[2]["simulated_s"] < plans[1]["simulated_s"], "each device shortens the step")
    check(len(plans[3]["stages"]) == 3 and plans[3]["simulated_s"] < 1.05 * plans[3]["bound_s"], f"three stages near the bound: {plans[3]}")
    memory = {"rtx4090": 24e9, "rtx3090": 24e9, "v100": 16e9}
    for stage in plans[3]["stages"]:
        check(stage["memory_bytes"] <= memory[stage["subcluster"]], f"a stage exceeds its device: {stage}")


if LONG:
    on_paper()
end()
