"""Tokens per second and model FLOPs utilisation of GPT-2 124M (T 1024, bf16) on one GPU, and where the time goes. An argument each:
  hapt, again   hapt, before and after its peers, so that drift of the machine shows; `again` compares it with what ran before
  eager         PyTorch 2, with the attention that is the fastest here (flash, cuDNN, memory-efficient)
  compiled      the same, compiled
  operators     hapt's milliseconds of a step by class of operator (times.c)
  peer          PyTorch's, eager, by its own profiler
All without an argument. HAPT_PEAK_TFLOPS: the GPU's dense bf16 peak (default 989.5: H100 and H200 SXM). On the toolkit without a GPU the
model is tiny. Exit code 77: PyTorch sees no GPU."""
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from figures import figure

HOST = os.environ.get("HAPT_CUDA_PLUGIN", "").endswith("-host.so")
LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = (2, 64, 2, 64, 256) if HOST else (12, 768, 12, 1024, 50304)
ROWS, MICROBATCHES, STEPS, SKIPPED = (2, 2, 6, 2) if HOST else (16, 4, 30, 10)
PEAK = 1e12 * float(os.environ.get("HAPT_PEAK_TFLOPS", "989.5"))
HAPT = os.environ.get("HAPT", "build/hapt")
SHAPE = ["--layers", LAYERS, "--hidden", HIDDEN, "--heads", HEADS, "--sequence", SEQUENCE, "--vocab", VOCABULARY, "--microbatch", ROWS,
         "--dtype", "bf16"]
CLASSES = [("attention", ("attention", "fmha", "flash")), ("norm", ("layer_norm",)), ("gelu", ("gelu",)), ("loss", ("cross_entropy", "softmax", "nll")),
           ("embedding", ("embedding",)), ("product", ("linear", "addmm", "aten::mm", "bmm", "matmul")), ("update", ("update", "adam"))]


def flops_per_token():
    """6 FLOPs per token and weight of the products, plus the products of attention, of which causal ones count half."""
    weights = LAYERS * 12 * HIDDEN * HIDDEN + VOCABULARY * HIDDEN
    return 6 * weights + 6 * LAYERS * SEQUENCE * HIDDEN


def tell(name, tokens_per_s, folder):
    peak = 100 * tokens_per_s * flops_per_token() / PEAK
    figure("tokens_per_second", tokens_per_s)
    figure("percent_of_peak", peak)
    print(f"{name:24} {tokens_per_s:12.0f} tokens/s  {peak:5.1f} % of the peak", flush=True)
    with open(os.path.join(folder, "speeds"), "a") as file:
        file.write(json.dumps([name, tokens_per_s]) + "\n")


def compare(folder):
    with open(os.path.join(folder, "speeds")) as file:
        speeds = [json.loads(line) for line in file]
    mine = [speed for name, speed in speeds if name.startswith("hapt")]
    figure("drift", mine[-1] / mine[0])
    for name, speed in speeds:
        if not name.startswith("hapt"):
            figure("hapt_over_" + name.split(", ")[1], statistics.mean(mine) / speed)
            print(f"hapt / {name}: {statistics.mean(mine) / speed:.2f}")
    print(f"hapt at the end / at the beginning: {mine[-1] / mine[0]:.2f}")


def hapt(name, folder):
    model, text, data = (os.path.join(folder, name) for name in ("m.h5", "text", "t.h5"))
    if not os.path.exists(data):
        with open(text, "wb") as file:
            file.write(os.urandom(1 << 16 if HOST else 4 << 20))
        subprocess.run([HAPT, "data", text, "--type", "bytes", "--output", data], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([HAPT, "model", "gpt", *map(str, SHAPE), "--output", model], check=True, stdout=subprocess.DEVNULL)
    output = os.path.join(folder, f"run-{len(os.listdir(folder))}")
    done = subprocess.run([HAPT, "--input", model, "--data", data, "--microbatches", str(MICROBATCHES), "--steps", str(STEPS), "--device", "cuda",
                           *(["--predict"] if HOST else ["--profile-seconds", "5"]), "--output", output, "--json"], check=True, stdout=subprocess.PIPE, text=True)
    tell(name, json.loads(done.stdout)["train"]["tokens_per_second"], folder)


def class_of(name):
    return next((kind for kind, words in CLASSES if any(word in name.lower() for word in words)), "other")


def tell_classes(times):
    """times: (operator, calls, milliseconds per step)"""
    total, by_class = sum(ms for _, _, ms in times), {}
    for name, _, ms in times:
        by_class[class_of(name)] = by_class.get(class_of(name), 0) + ms
    for kind, ms in sorted(by_class.items(), key=lambda pair: -pair[1]):
        figure(kind + "_ms", ms)
        print(f"{kind:12} {ms:9.3f} ms  {100 * ms / total:5.1f} %")
    for name, calls, ms in sorted(times, key=lambda row: -row[2])[:8]:
        print(f"  {name:40} {calls:5d} calls {ms:9.3f} ms")
    figure("step_ms", total)
    print(f"a step of {MICROBATCHES} microbatches: {total:.3f} ms")


def operators():
    program = os.path.join(os.environ.get("HAPT_BUILD", "build/release"), "tests/gpu/times")
    done = subprocess.run([program, "gpt", *map(str, SHAPE)], check=True, stdout=subprocess.PIPE, text=True)
    rows = [(name, int(calls), float(ms)) for name, calls, ms in (line.split() for line in done.stdout.splitlines())]
    tell_classes([(name, calls, ms * (1 if name == "update" else MICROBATCHES)) for name, calls, ms in rows])


class Peer:
    """GPT-2 in PyTorch."""

    def __init__(self, compiled):
        import torch
        from torch import nn
        from torch.nn import functional
        if not torch.cuda.is_available():
            print("PyTorch", torch.__version__, "sees no GPU")
            sys.exit(77)
        self.torch = torch
        attention = functional.scaled_dot_product_attention

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
                self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
                self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

            def forward(self, x):
                rows = x.shape[0]
                qkv = self.qkv(self.norm1(x)).view(rows, SEQUENCE, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
                y = attention(qkv[0], qkv[1], qkv[2], is_causal=True)
                x = x + self.out(y.transpose(1, 2).reshape(rows, SEQUENCE, HIDDEN))
                return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))

        class Gpt(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens, self.places = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(SEQUENCE, HIDDEN)
                self.blocks, self.norm = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(HIDDEN)

            def forward(self, tokens, targets):
                x = self.tokens(tokens) + self.places.weight
                for block in self.blocks:
                    x = block(x)
                return functional.cross_entropy((self.norm(x) @ self.tokens.weight.T).flatten(0, 1), targets.flatten())

        torch.manual_seed(1)
        self.model = Gpt().cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.run = torch.compile(self.model) if compiled else self.model
        self.tokens = torch.randint(VOCABULARY, (MICROBATCHES, ROWS, SEQUENCE + 1), device="cuda")

    def step(self):
        torch = self.torch
        for microbatch in self.tokens:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = self.run(microbatch[:, :-1], microbatch[:, 1:]) / MICROBATCHES
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()

    def best_attention(self):
        """A context in which the kernel with the fastest forward and backward for this shape runs. Older versions choose one themselves."""
        torch, times = self.torch, []
        try:
            from torch.nn.attention import SDPBackend, sdpa_kernel
        except ImportError:
            import contextlib
            return contextlib.nullcontext()
        q, k, v = (torch.randn(ROWS, HEADS, SEQUENCE, HIDDEN // HEADS, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"):
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    for round_ in range(12):
                        if round_ == 2:
                            torch.cuda.synchronize()
                            start = time.perf_counter()
                        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
                    torch.cuda.synchronize()
                times.append(((time.perf_counter() - start) / 10, name))
                print(f"{name}: {1e6 * times[-1][0]:.0f} us forward and backward", flush=True)
            except (AttributeError, RuntimeError) as error:
                print(f"{name}: {str(error).splitlines()[0]}")
        return sdpa_kernel(getattr(SDPBackend, min(times)[1]))

    def tokens_per_s(self):
        times = []
        with self.best_attention():
            for _ in range(STEPS):
                start = time.perf_counter()
                self.step()
                times.append(time.perf_counter() - start)
        return MICROBATCHES * ROWS * SEQUENCE / statistics.median(times[SKIPPED:])

    def classes(self):
        """The device time per step of the kernels of each operator."""
        torch = self.torch
        with self.best_attention():
            self.step()
            self.step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
                self.step()
        took = lambda row: getattr(row, "self_device_time_total", None) or getattr(row, "self_cuda_time_total", 0)  # noqa: E731
        rows = [(row.key, row.count, 1e-3 * took(row)) for row in profile.key_averages() if row.key.startswith("aten::") and took(row) > 0]
        tell_classes(rows)


def parts(wanted, folder):
    for name in wanted:
        if name in ("hapt", "again"):
            hapt(name if name == "hapt" else "hapt again", folder)
            if name == "again":
                compare(folder)
        elif name in ("eager", "compiled"):
            tell("PyTorch, " + name, Peer(name == "compiled").tokens_per_s(), folder)
        elif name == "operators":
            operators()
        elif name == "peer":
            Peer(False).classes()
        else:
            sys.exit(f"no part {name}")


with tempfile.TemporaryDirectory() as scratch:
    parts(sys.argv[1:] or ["hapt", "eager", "compiled", "again", "operators", "peer"], os.environ.get("HAPT_TEST_WORK", scratch))
