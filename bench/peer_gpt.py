#!/usr/bin/python3
"""The peer of `make bench`: one training step of the reference GPT in PyTorch, at its best settings.

Same shape, data flow and optimizer as hapt's: pre-LN GPT-2 blocks, tanh GELU, causal attention, tied embeddings, AdamW with
clipping. Prints one JSON line: seconds per step (median, wall and CPU), tokens per second, loss of the last step.
--tune first tries the settings whose order changes with the machine and its load (how waiting threads spin, OpenBLAS's core
type, multi-tensor AdamW) in short child runs and keeps the fastest.
With --serve it runs a block of --steps steps for every line on standard input, so that a caller can interleave two programs.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import time

BEST = {  # --plain omits them. Then steps take several times as long, mostly because of page faults
    "ATEN_CPU_CAPABILITY": "avx512",
    "MALLOC_MMAP_THRESHOLD_": "1073741824",
    "MALLOC_TRIM_THRESHOLD_": "4294967296",
    "MALLOC_TOP_PAD_": "268435456",
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--dtype", choices=["fp32", "bf16", "autocast"], default="fp32",
                        help="bf16: everything in bf16, optimizer too; autocast: fp32 master weights")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--clip", type=float, default=1.0, help="0: no clipping")
    parser.add_argument("--foreach", action="store_true", help="multi-tensor AdamW (slower on CPUs)")
    parser.add_argument("--jit", action="store_true", help="trace the model")
    parser.add_argument("--no-mkldnn", action="store_true")
    parser.add_argument("--attention", choices=["bmm", "matmul", "sdp"], default="bmm")
    parser.add_argument("--coretype", default="SkylakeX", help="OPENBLAS_CORETYPE; empty: OpenBLAS decides")
    parser.add_argument("--plain", action="store_true", help="leave the environment alone")
    parser.add_argument("--tune", action="store_true", help="find the fastest settings first")
    parser.add_argument("--serve", action="store_true")
    return parser.parse_args()


def with_best_environment(args):
    """Libraries read the settings when they are loaded, so the program starts itself again with them."""
    if args.plain or os.environ.get("HAPT_PEER_READY"):
        return
    wanted = dict(BEST, HAPT_PEER_READY="1", OMP_NUM_THREADS=str(args.threads), OPENBLAS_NUM_THREADS=str(args.threads))
    if "avx512f" not in open("/proc/cpuinfo").read():
        wanted.pop("ATEN_CPU_CAPABILITY")
    elif args.coretype:
        wanted["OPENBLAS_CORETYPE"] = args.coretype
    os.environ.update({key: value for key, value in wanted.items() if key not in os.environ})
    options = tune() if args.tune else []
    os.execv(sys.executable, [sys.executable] + [a for a in sys.argv if a != "--tune"] + options)


def tune():
    """Greedy: each setting is chosen by the least time per step of two short runs of every value, taken in turn."""
    chosen = []

    def seconds(variables, options):
        command = [sys.executable] + [a for a in sys.argv if a not in ("--tune", "--serve")] + options
        command += ["--steps", "4", "--warmup", "2"]
        done = subprocess.run(command, env=dict(os.environ, **variables), capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])["wall_min_s"]

    def settle(answers):
        times = [min(pair) for pair in zip(*[[seconds(v, chosen + o) for v, o in answers] for _ in range(2)])]
        variables, options = answers[times.index(min(times))]
        os.environ.update(variables)
        chosen.extend(options)
        print("tuned:", variables, options, "of", ["%.4f s" % t for t in times], file=sys.stderr)

    settle([({}, []), ({"GOMP_SPINCOUNT": "1000"}, []), ({"OMP_WAIT_POLICY": "passive"}, [])])
    if "OPENBLAS_CORETYPE" in os.environ:
        settle([({}, []), ({"OPENBLAS_CORETYPE": ""}, [])])
    settle([({}, []), ({}, ["--foreach"])])
    settle([({}, []), ({}, ["--attention", "matmul"]), ({}, ["--attention", "sdp"])])
    return chosen


def build(args, torch):
    nn, functional = torch.nn, torch.nn.functional
    hidden, heads, length, batch = args.hidden, args.heads, args.sequence, args.batch
    size = hidden // heads

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
            self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))

        def attend(self, q, k, v):
            if args.attention == "sdp":
                return functional._scaled_dot_product_attention(q, k, v, is_causal=True)[0]
            if args.attention == "matmul":
                return ((q @ k.transpose(-2, -1)) * size ** -0.5 + self.mask).softmax(-1) @ v
            flat = batch * heads
            scores = torch.baddbmm(self.mask.to(q.dtype).expand(flat, length, length), q.reshape(flat, length, size),
                                   k.reshape(flat, length, size).transpose(1, 2), alpha=size ** -0.5)
            return torch.bmm(scores.softmax(-1), v.reshape(flat, length, size)).view(batch, heads, length, size)

        def forward(self, x):
            qkv = self.qkv(self.norm1(x)).view(batch, length, 3, heads, size).permute(2, 0, 3, 1, 4)
            attended = self.attend(qkv[0], qkv[1], qkv[2]).transpose(1, 2).reshape(batch, length, hidden)
            x = x + self.out(attended)
            return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

    class Gpt(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.position = nn.Embedding(args.vocab, hidden), nn.Embedding(length, hidden)
            self.blocks, self.norm = nn.ModuleList(Block() for _ in range(args.layers)), nn.LayerNorm(hidden)
            nn.init.normal_(self.token.weight, std=0.02)

        def forward(self, tokens):
            x = self.token(tokens) + self.position.weight
            for block in self.blocks:
                x = block(x)
            return functional.linear(self.norm(x), self.token.weight)

    return Gpt()


def main():
    args = arguments()
    with_best_environment(args)
    import torch

    torch.manual_seed(1)
    torch.set_num_threads(args.threads)
    torch.backends.mkldnn.enabled = not args.no_mkldnn
    model = build(args, torch)
    if args.dtype == "bf16":
        model = model.bfloat16()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    other = [p for p in model.parameters() if p.dim() < 2]
    optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}],
                                  lr=3e-4, betas=(0.9, 0.95), foreach=args.foreach)
    stream = torch.randint(0, args.vocab, (64, args.batch, args.sequence + 1))
    run = torch.jit.trace(model, stream[0, :, :-1]) if args.jit else model

    def step(index):
        rows = stream[index % len(stream)]
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "autocast"):
            logits = run(rows[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        loss.backward()
        if args.clip > 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        return loss.item()

    def block(first, count):
        walls, cpu = [], time.process_time()
        for index in range(first, first + count):
            start = time.perf_counter()
            loss = step(index)
            walls.append(time.perf_counter() - start)
        wall, cpu = statistics.median(walls), (time.process_time() - cpu) / count
        print(json.dumps({"peer": "torch " + torch.__version__, "dtype": args.dtype, "threads": args.threads,
                          "wall_s": wall, "wall_min_s": min(walls), "cpu_s": cpu,
                          "tokens_per_s": args.batch * args.sequence / wall, "loss": loss}), flush=True)

    for index in range(args.warmup):
        step(index)
    if not args.serve:
        return block(args.warmup, args.steps)
    for number, _ in enumerate(sys.stdin):
        block(args.warmup + number * args.steps, args.steps)


if __name__ == "__main__":
    main()
