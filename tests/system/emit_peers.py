"""usage: emit_peers.py HAPT FOLDER. A small Qwen3 made by transformers is imported and trained by hapt for five steps. Plans of the same model are
emitted for torchtitan: PyTorch's pipelining runtime (gloo, four processes) loads each schedule, cuts the model into the modules of the stages,
and trains it to the same losses. Megatron's own parser (megatron-core, if it is installed) takes the layouts."""
import csv
import json
import os

import h5py
import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
import transformers
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

from checking import check, end, passes, path

STEPS, B, ROWS, T, V = 5, 8, 2, 16, 96
class Part(torch.nn.Module):
    """The modules of a stage, in order. Blocks share positions and a causal mask."""

    def __init__(self, model, names):
        super().__init__()
        self.names, self.rotary = names, model.model.rotary_emb
        self.parts = torch.nn.ModuleList([model.get_submodule(name) for name in names])

    def forward(self, x):
        positions = torch.arange(T)[None]
        for name, part in zip(self.names, self.parts):
            if ".layers." in name:
                mask = torch.full((T, T), -float("inf")).triu(1)[None, None]
                x = part(x, attention_mask=mask, position_ids=positions, position_embeddings=self.rotary(x, positions))
            else:
                x = part(x)
        return x


def train(rank, folder, tokens, result):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29500 + os.getppid() % 2000))
    torch.set_num_threads(1)
    settings = json.load(open(os.path.join(folder, "torchtitan.json")))["settings"]
    parts, file = settings["module_fqns_per_model_part"], os.path.join(folder, settings["pipeline_parallel_schedule_csv"])
    dist.init_process_group("gloo", rank=rank, world_size=settings["pipeline_parallel_degree"])
    transformers.logging.disable_progress_bar()
    own = sorted({int(action[:action.index("F")]) for action in list(csv.reader(open(file)))[rank] if "F" in action})
    model = transformers.AutoModelForCausalLM.from_pretrained(path("model"), attn_implementation="eager").train()
    modules = [Part(model, parts[stage]) for stage in own]
    stages = [PipelineStage(module, stage, len(parts), torch.device("cpu")) for module, stage in zip(modules, own)]
    schedule = _PipelineScheduleRuntime(stages, B, loss_fn=lambda logits, wanted: torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten()))
    schedule._load_csv(file)
    weights = [weight for module in modules for weight in module.parameters()]
    groups = [dict(params=[w for w in weights if w.dim() >= 2], weight_decay=0.1), dict(params=[w for w in weights if w.dim() < 2], weight_decay=0)]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3, betas=(0.9, 0.95), eps=1e-8)
    found = []
    for step in range(STEPS):
        rows, losses = torch.tensor(tokens[step]).long(), []
        optimizer.zero_grad()
        given = dict(target=rows[:, 1:], losses=losses) if len(parts) - 1 in own else {}
        schedule.step(*((rows[:, :-1],) if 0 in own else ()), **given)
        optimizer.step()
        if losses:
            found.append(torch.stack([loss.detach() for loss in losses]).mean().item())
    if found:
        result.put(found)
    dist.barrier()
    dist.destroy_process_group()


def megatron_takes(plan, name, options):
    """The layout by Megatron's parser has the blocks of each stage, as torchtitan's modules."""
    try:
        from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
    except ImportError:
        return "megatron-core is not installed"
    passes(*plan[:-1], "megatron", *options, "--output", path(name + "-megatron"))
    settings = json.load(open(path(name + "-megatron", "megatron.json")))["settings"]
    parts = json.load(open(path(name, "torchtitan.json")))["settings"]["module_fqns_per_model_part"]
    ranks = settings["pipeline_model_parallel_size"]
    layout = PipelineParallelLayerLayout(settings["pipeline_model_parallel_layout"], ranks)
    layout.validate_layer_layout(num_layers=8, mtp_num_layers=0)
    for stage, modules in enumerate(parts):
        kinds = [kind.name for kind in layout.layout[stage % ranks][stage // ranks]]
        check(kinds.count("decoder") == sum(".layers." in module for module in modules), "%s: stage %d: %s, %s" % (name, stage, kinds, modules))
    return "megatron-core takes " + settings["pipeline_model_parallel_layout"]


def main():
    transformers.logging.disable_progress_bar()
    torch.manual_seed(5)
    config = transformers.Qwen3Config(vocab_size=V, hidden_size=32, intermediate_size=64, num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2,
                                      head_dim=8, max_position_embeddings=T, tie_word_embeddings=False, initializer_range=0.1, pad_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path("model"))
    tokens = np.random.default_rng(2).integers(0, V, (STEPS, B * ROWS, T + 1)).astype(np.int32)
    with h5py.File(path("data.h5"), "w") as file:
        file["batches"] = tokens
    passes("import", path("model"), "--sequence", T, "--microbatch", ROWS, "--output", path("m.h5"))
    passes("--input", path("m.h5"), "--data", path("data.h5"), "--predict", "--threads", 1, "--microbatches", B, "--steps", STEPS, "--optimizer", "adamw",
        "--lr-schedule", "constant", "--learning-rate", "1e-3", "--weight-decay", "0.1", "--clip-norm", 0, "--output", path("run"))
    with h5py.File(path("run", "run.h5")) as file:
        expected = file["train/loss"][()]
    names = ["a", "b", "c", "d"]  # a device each, so that a plan has four stages, or eight of loops
    with open(path("c.json"), "w") as file:
        json.dump({"format": "hapt-cluster", "version": 1,
                   "subclusters": [{"name": name, "nodes": 1, "devices_per_node": 1, "device": "cpu", "memory": "300 MB", "slowdown": 1 + k // 2}
                                   for k, name in enumerate(names)],
                   "links": [{"between": [a, b], "bandwidth": "100 MB/s", "latency": "10 us"} for k, a in enumerate(names) for b in names[k + 1:]]}, file)
    plan = ["plan", "--input", path("m.h5"), "--cluster", path("c.json"), "--predict", "--microbatches", B, "--recompute", "all", "--program", "data",
            "--use-all-devices", "--emit", "torchtitan"]
    for name, options in (("h1f1b", ["--loops", "1", "--split-backward", "no"]), ("gpipe", ["--schedule", "gpipe", "--split-backward", "no"]),
                          ("split", ["--loops", "1", "--split-backward", "yes"]), ("loops", ["--schedule", "interleaved", "--loops", "2"])):
        out = path(name)
        said = passes(*plan, *options, "--output", out).stdout
        check("plan for torchtitan: %d stages" % (8 if name == "loops" else 4) in said, said)
        manager = processes.get_context("spawn")
        result = manager.SimpleQueue()
        processes.spawn(train, (out, tokens, result), nprocs=4)
        found = np.array(result.get())
        print("%-6s losses of PyTorch's pipeline within %.1e of hapt's; %s" %
              (name, np.abs(found - expected).max(), megatron_takes(plan, name, options)))
        check(np.abs(found - expected).max() < 1e-4, "%s: %s, hapt %s" % (name, found, expected))
    end()


if __name__ == "__main__":
    main()
