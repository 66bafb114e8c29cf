"""Attention, linear layers and loss at real sizes: hapt's kernels, run one at a time (operator.c), are compared with PyTorch in fp64, or
with NumPy if PyTorch is missing. On a GPU also their times, beside PyTorch's. Tolerances are those of the kernels' own tests. They are
relative to 0.5 x the largest expected value + the expected value: one rounding of the type forward, a few backward.
Arguments: attention, linear, loss; none: all. HAPT_TEST_QUICK: small sizes."""
import math
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np

from figures import figure

try:
    if os.environ.get("HAPT_TEST_QUICK"):
        raise ImportError("it takes longer than the small sizes")
    import torch
except ImportError:
    torch = None

BUILD = os.environ.get("HAPT_BUILD", "build/release")
BACKEND = os.environ.get("HAPT_TEST_BACKEND", "cuda")
QUICK = bool(os.environ.get("HAPT_TEST_QUICK"))
HOST = os.environ.get("HAPT_CUDA_PLUGIN", "").endswith("-host.so") or BACKEND == "cpu"  # its speed does not matter
PEER = torch is not None and not HOST and torch.cuda.is_available() and hasattr(torch.nn.functional, "scaled_dot_product_attention")
PLACE = "cuda" if PEER else "cpu"
UNIT = {"fp32": 0, "bf16": 2.0 ** -8, "fp16": 2.0 ** -11}
# sequence, head size, heads; cuDNN's backward pass of 20 long heads runs in two shares
ATTENTION = [(130, 64, 1)] if QUICK else [(1024, 64, 2), (1024, 128, 1)] if HOST else [(1024, 64, 12), (1024, 128, 6), (4096, 64, 20), (4096, 128, 6)]
# rows, inputs, outputs
LINEAR = [(70, 64, 96)] if QUICK else [(256, 768, 768)] if HOST else [(4096, 768, 3072), (4096, 3072, 768), (4096, 768, 2304)]
# rows, vocabulary
LOSS = [(16, 1003)] if QUICK else [(32, 50257)] if HOST else [(1024, 50257)]
TYPES = ["fp32", "bf16"] if QUICK or HOST else ["fp32", "bf16", "fp16"]
checks, failures = 0, 0
random = np.random.default_rng(1)


def rounded(values, dtype):
    """Rounded to the type, as fp64."""
    return decode(encode(values, dtype), dtype).astype(np.float64)


def encode(values, dtype):
    values = np.asarray(values)
    if dtype == "fp32":
        return values.astype(np.float32)
    if dtype == "fp16":
        return values.astype(np.float16)
    if dtype == "int32":
        return values.astype(np.int32)
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(raw, dtype):
    return (raw.astype(np.uint32) << 16).view(np.float32) if dtype == "bf16" else raw


def raw_type(dtype):
    return {"fp32": np.float32, "fp16": np.float16, "bf16": np.uint16, "int32": np.int32}[dtype]


class Calls:
    """Runs calls of operators in a separate process."""

    def __init__(self, folder):
        self.folder, self.lines, self.shapes = folder, [], {}

    def path(self, name):
        return os.path.join(self.folder, name)

    def give(self, name, values, dtype):
        self.shapes[name] = (dtype, values.shape)
        encode(values, dtype).tofile(self.path(name))

    def operand(self, name):
        dtype, shape = self.shapes[name]
        return " ".join([self.path(name), dtype, *map(str, shape)])

    def call(self, op, dtype, inputs, outputs, integers=()):
        """outputs: (name, type, shape)"""
        self.shapes.update({name: (kind, shape) for name, kind, shape in outputs})
        words = [op, dtype] + (["integer", *map(str, integers)] if integers else [])
        words += [f"input {self.operand(name)}" for name in inputs] + [f"output {self.operand(name)}" for name, _, _ in outputs]
        self.lines.append(" ".join(words))

    def run(self):
        """Seconds of each call, in order."""
        command = [os.path.join(BUILD, "tests/gpu/operator"), "0" if HOST else "5"]
        done = subprocess.run(command, input="\n".join(self.lines) + "\n", stdout=subprocess.PIPE, text=True, check=True)
        return [float(line.split()[1]) for line in done.stdout.splitlines()]

    def get(self, name):
        dtype, shape = self.shapes[name]
        return decode(np.fromfile(self.path(name), raw_type(dtype)), dtype).reshape(shape).astype(np.float64)


def compare(what, got, expected, tolerance, peer=None):
    """peer: PyTorch's result in the same type."""
    global checks, failures
    away = lambda values: np.max(np.abs(values - expected) / (0.5 * np.max(np.abs(expected)) + np.abs(expected)))  # noqa: E731
    worst = away(got) if np.all(np.isfinite(got)) else math.inf
    beside = f", PyTorch {away(peer):.1e}" if peer is not None else ""
    checks += 1
    failures += not worst <= tolerance
    print(f"{'' if worst <= tolerance else 'failed: '}{what}: {worst:.1e} away, {tolerance:.1e} allowed{beside}", flush=True)


def tell_time(what, seconds, peer_s):
    figure(what.replace(" ", "_").replace(",", "") + "_us", 1e6 * seconds)
    if peer_s:
        figure(what.replace(" ", "_").replace(",", "") + "_pytorch_us", 1e6 * peer_s)
        print(f"{what}: {1e6 * seconds:.1f} us, PyTorch {1e6 * peer_s:.1f} us", flush=True)


def tensor(values, dtype=None):
    made = torch.tensor(values, device=PLACE, dtype=torch.float64)
    return made if dtype is None else made.to({"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[dtype])


def array(of):
    return of.detach().to(torch.float64).cpu().numpy()


def peer_time(run):
    """Least seconds of a call by CUDA's clock."""
    least = math.inf
    for _ in range(3):
        run()
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(5):
            run()
        end.record()
        torch.cuda.synchronize()
        least = min(least, 1e-3 * start.elapsed_time(end) / 5)
    return least


# ---- attention ----

def attention_numpy(q, k, v, dout):
    """[heads][T][d] each, causal: out, logsumexp, dq, dk, dv."""
    out, lse, grads = np.empty_like(q), np.empty(q.shape[:2]), [np.empty_like(q) for _ in range(3)]
    length, size = q.shape[1:]
    later = np.triu(np.ones((length, length), dtype=bool), 1)
    for h in range(len(q)):
        scores = q[h] @ k[h].T / math.sqrt(size)
        scores[later] = -np.inf
        top = scores.max(axis=1, keepdims=True)
        weight = np.exp(scores - top)
        total = weight.sum(axis=1, keepdims=True)
        weight /= total
        lse[h] = (top + np.log(total))[:, 0]
        out[h] = weight @ v[h]
        dweight = dout[h] @ v[h].T
        dscores = weight * (dweight - (dout[h] * out[h]).sum(axis=1, keepdims=True)) / math.sqrt(size)
        for grad, value in zip(grads, (dscores @ k[h], dscores.T @ q[h], weight.T @ dout[h])):
            grad[h] = value
    return out, lse, grads


def attention_torch(q, k, v, dout):
    out, lse, grads = [], [], []
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=PLACE).triu(1)
    for head in zip(q, k, v, dout):  # one head at a time, because scores in fp64 are large
        inputs = [tensor(x).requires_grad_() for x in head[:3]]
        scores = (inputs[0] @ inputs[1].T / math.sqrt(q.shape[2])).masked_fill(later, -math.inf)
        result = torch.softmax(scores, 1) @ inputs[2]
        result.backward(tensor(head[3]))
        out.append(array(result))
        lse.append(array(torch.logsumexp(scores, 1)))
        grads.append([array(x.grad) for x in inputs])
    return np.stack(out), np.stack(lse), [np.stack(x) for x in zip(*grads)]


def attention(folder):
    for dtype in TYPES:
        for length, size, heads in ATTENTION:
            if dtype == "fp32" and length > 1024:
                continue
            width = heads * size
            apart = lambda values, parts: values.reshape(length, parts * heads, size).transpose(1, 0, 2)  # noqa: E731
            qkv = rounded(random.standard_normal((length, 3 * width)), dtype)
            dout = rounded(random.standard_normal((length, width)), dtype)
            calls = Calls(folder)
            calls.give("qkv", qkv[None], dtype)
            calls.give("dout", dout[None], dtype)
            calls.call("attention", dtype, ["qkv"], [("out", dtype, (1, length, width)), ("lse", "fp32", (1, heads, length))], (heads, 1))
            calls.call("attention_backward", dtype, ["qkv", "out", "lse", "dout"], [("dqkv", dtype, (1, length, 3 * width))], (heads, 1))
            took = calls.run()
            q, k, v = np.split(apart(qkv, 3), 3)
            out, lse, grads = (attention_torch if torch else attention_numpy)(q, k, v, apart(dout, 1))
            peer, peer_s = [None] * 4, [None] * 2
            if PEER:
                half = [tensor(x, dtype)[None].requires_grad_() for x in (q, k, v)]
                weight = tensor(apart(dout, 1), dtype)[None]
                run = lambda: torch.nn.functional.scaled_dot_product_attention(*half, is_causal=True)  # noqa: E731
                its = run()
                peer = [array(its[0])] + [array(x[0]) for x in torch.autograd.grad(its, half, weight, retain_graph=True)]
                peer_s = peer_time(run), peer_time(lambda: torch.autograd.grad(its, half, weight, retain_graph=True))
            what = f"attention {dtype} T {length} d {size}"
            # fp32 adds `length` weights in blocks.
            forward = 2e-6 * math.sqrt(max(length / 256, 1)) if dtype == "fp32" else UNIT[dtype]
            compare(what, apart(calls.get("out")[0], 1), out, forward, peer[0])
            compare(what + " logsumexp", calls.get("lse")[0], lse, 2e-6)
            for name, got, expected, its in zip("qkv", np.split(apart(calls.get("dqkv")[0], 3), 3), grads, peer[1:]):
                compare(f"{what} d{name}", got, expected, 4 * forward, its)
            tell_time(what, took[0], peer_s[0])
            tell_time(what + " backward", took[1], peer_s[1])


# ---- linear layers ----

def linear(folder):
    for dtype in TYPES:
        for rows, inputs, outputs in LINEAR:
            x = rounded(random.standard_normal((rows, inputs)), dtype)
            w = rounded(random.standard_normal((inputs, outputs)) / math.sqrt(inputs), dtype)
            b, dy = rounded(random.standard_normal(outputs), dtype), rounded(random.standard_normal((rows, outputs)), dtype)
            calls = Calls(folder)
            for name, values in ("x", x[None]), ("w", w), ("b", b), ("dy", dy[None]):
                calls.give(name, values, dtype)
            calls.call("linear", dtype, ["x", "w", "b"], [("y", dtype, (1, rows, outputs))])
            calls.call("linear_dx", dtype, ["dy", "w"], [("dx", dtype, (1, rows, inputs))])
            calls.call("linear_dw", dtype, ["x", "dy"], [("dw", "fp32", (inputs, outputs)), ("db", "fp32", (outputs,))])
            took = calls.run()
            if torch:
                given = [tensor(values).requires_grad_() for values in (x, w, b)]
                y = given[0] @ given[1] + given[2]
                y.backward(tensor(dy))
                expected = [array(y)] + [array(values.grad) for values in given]
            else:
                expected = [x @ w + b, dy @ w.T, x.T @ dy, dy.sum(axis=0)]
            peer, peer_s = [None] * 4, [None] * 3
            if PEER:
                px, pw, pb, pdy = (tensor(values, dtype) for values in (x, w, b, dy))
                runs = [lambda: torch.addmm(pb, px, pw), lambda: pdy @ pw.T, lambda: px.T @ pdy]
                peer, peer_s = [array(run()) for run in runs] + [None], [peer_time(run) for run in runs]
            what = f"linear {dtype} {rows} x {inputs} x {outputs}"
            root = lambda terms: 1e-6 * math.sqrt(terms)  # noqa: E731  fp32: rounding grows with the root of the number of terms
            allowed = [root(inputs), root(outputs), root(rows), root(rows)]
            for i, (name, unit) in enumerate((("y", UNIT[dtype]), ("dx", UNIT[dtype]), ("dw", 0), ("db", 0))):
                got = calls.get(name)
                compare(f"{what} {name}", got[0] if i < 2 else got, expected[i], max(allowed[i], unit), peer[i])
            for name, seconds, its in zip(("", " dx", " dw"), took, peer_s):
                tell_time(what + name, seconds, its)


# ---- loss ----

def loss(folder):
    for dtype in TYPES:
        for rows, vocabulary in LOSS:
            logits = rounded(3 * random.standard_normal((rows, vocabulary)), dtype)
            target = random.integers(0, vocabulary, rows)
            target[1] = -100  # ignored
            counts, scale = target >= 0, 0.37
            calls = Calls(folder)
            calls.give("logits", logits[None], dtype)
            calls.give("target", target[None], "int32")
            calls.give("scale", np.array([scale]), "fp32")
            calls.call("cross_entropy", dtype, ["logits", "target"], [("loss", "fp32", (1,)), ("lse", "fp32", (1, rows))])
            calls.call("cross_entropy_dx", dtype, ["logits", "target", "lse", "scale"], [("dlogits", dtype, (1, rows, vocabulary))])
            took = calls.run()
            if torch:
                given = tensor(logits).requires_grad_()
                total = torch.nn.functional.cross_entropy(given, torch.tensor(target, device=PLACE), reduction="sum", ignore_index=-100)
                (scale * total).backward()
                expected, gradient = array(total), array(given.grad)
            else:
                top = logits.max(axis=1, keepdims=True)
                weight = np.exp(logits - top)
                lse = top[:, 0] + np.log(weight.sum(axis=1))
                expected = np.sum((lse - logits[np.arange(rows), np.maximum(target, 0)])[counts])
                gradient = scale * weight / weight.sum(axis=1, keepdims=True)
                gradient[np.arange(rows), np.maximum(target, 0)] -= scale
                gradient[~counts] = 0
            peer, peer_s = None, [None] * 2
            if PEER:
                given, wanted = tensor(logits, dtype).requires_grad_(), torch.tensor(target, device=PLACE)
                run = lambda: torch.nn.functional.cross_entropy(given, wanted, reduction="sum", ignore_index=-100)  # noqa: E731
                its = run()
                weight = torch.tensor(scale, device=PLACE, dtype=its.dtype)
                backward = lambda: torch.autograd.grad(its, given, weight, retain_graph=True)  # noqa: E731
                peer, peer_s = array(backward()[0]), [peer_time(run), peer_time(backward)]
            what = f"loss {dtype} {rows} x {vocabulary}"
            compare(what, calls.get("loss"), np.array([expected]), 3e-7)
            compare(what + " gradient", calls.get("dlogits")[0], gradient, 2e-6 if dtype == "fp32" else UNIT[dtype], peer)
            tell_time(what, took[0], peer_s[0])
            tell_time(what + " backward", took[1], peer_s[1])


for part in (attention, linear, loss):
    if len(sys.argv) > 1 and part.__name__ not in sys.argv[1:]:
        continue
    scratch = tempfile.mkdtemp()
    part(scratch)
    shutil.rmtree(scratch)
print(f"{checks} checks, {failures} failed, against {'PyTorch ' + torch.__version__ if torch else 'NumPy'} in fp64, {'beside' if PEER else 'without'} "
      "PyTorch on a GPU")
sys.exit(failures > 0)
