"""Tokens per second and model FLOPs utilisation of GPT-2 124M (T 1024, bf16) on one GPU: hapt, PyTorch 2 (eager and compiled, flash
attention) and hapt again, so that drift of the machine shows. PyTorch is left out where it is missing. HAPT_PEAK_TFLOPS: the
GPU's dense bf16 peak (default 989.5: H100 and H200 SXM)."""
import json
import os
import statistics
import subprocess
import tempfile
import time

LAYERS, HIDDEN, HEADS, SEQUENCE, VOCABULARY = 12, 768, 12, 1024, 50304
ROWS, MICROBATCHES, STEPS, SKIPPED = 16, 4, 30, 10
PEAK = 1e12 * float(os.environ.get("HAPT_PEAK_TFLOPS", "989.5"))
HAPT = os.environ.get("HAPT", "build/hapt")


def flops_per_token():
    """6 FLOPs a token and weight of the products, and the products of attention, causal ones counted half."""
    weights = LAYERS * 12 * HIDDEN * HIDDEN + VOCABULARY * HIDDEN
    return 6 * weights + 6 * LAYERS * SEQUENCE * HIDDEN


def tell(name, tokens_per_s):
    print(f"{name:24} {tokens_per_s:12.0f} tokens/s  {100 * tokens_per_s * flops_per_token() / PEAK:5.1f} % of the peak", flush=True)
    return tokens_per_s


def hapt(folder):
    model, text, data = (os.path.join(folder, name) for name in ("m.h5", "text", "t.h5"))
    if not os.path.exists(model):
        with open(text, "wb") as file:
            file.write(os.urandom(4 << 20))
        subprocess.run([HAPT, "data", text, "--output", data], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([HAPT, "model", "gpt", "--layers", str(LAYERS), "--hidden", str(HIDDEN), "--heads", str(HEADS), "--sequence", str(SEQUENCE),
                        "--vocab", str(VOCABULARY), "--microbatch", str(ROWS), "--dtype", "bf16", "--output", model], check=True,
                       stdout=subprocess.DEVNULL)
    output = os.path.join(folder, f"run-{len(os.listdir(folder))}")
    done = subprocess.run([HAPT, "--input", model, "--data", data, "--microbatches", str(MICROBATCHES), "--steps", str(STEPS), "--output", output,
                           "--json"], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["train"]["tokens_per_second"]


def pytorch(compiled):
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
            self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
            self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

        def forward(self, x):
            rows = x.shape[0]
            qkv = self.qkv(self.norm1(x)).view(rows, SEQUENCE, 3, HEADS, HIDDEN // HEADS).permute(2, 0, 3, 1, 4)
            y = functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
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
    model = Gpt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    run = torch.compile(model) if compiled else model
    tokens = torch.randint(VOCABULARY, (MICROBATCHES, ROWS, SEQUENCE + 1), device="cuda")
    times = []
    for _ in range(STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for microbatch in tokens:
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = run(microbatch[:, :-1], microbatch[:, 1:]) / MICROBATCHES
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return MICROBATCHES * ROWS * SEQUENCE / statistics.median(times[SKIPPED:])


with tempfile.TemporaryDirectory() as scratch:
    first = tell("hapt", hapt(scratch))
    peers = []
    try:
        peers = [tell("PyTorch, eager", pytorch(False)), tell("PyTorch, compiled", pytorch(True))]
    except ImportError:
        print("PyTorch is missing: no peer")
    again = tell("hapt again", hapt(scratch))
    if peers:
        print(f"hapt / compiled PyTorch {statistics.mean([first, again]) / peers[-1]:.2f}, / eager {statistics.mean([first, again]) / peers[0]:.2f}")
