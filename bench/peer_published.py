#!/usr/bin/env python3
"""The peer of bench/published: training steps of a Qwen3-shaped model in transformers under torch.compile.

AdamW (the fused one) as hapt's, with clipping; the loss is fp32 cross entropy. bf16: autocast with fp32 weights, or everything in bf16 (--whole).
--make writes the random model to the folder, in bf16, and ends. Else it compiles, prints one JSON line when it is warm, and runs --steps steps
for each line on standard input: one JSON line with their times and losses.
"""
import argparse
import json
import sys
import time

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("folder")
parser.add_argument("--make", help="layers,hidden,heads,key/value heads,ffn,vocabulary")
parser.add_argument("--batches", help="file of NumPy: tokens of each step, [steps][rows][sequence + 1]")
parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
parser.add_argument("--whole", action="store_true")
parser.add_argument("--sequence", type=int, default=256)
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--steps", type=int, default=3)
parser.add_argument("--warmup", type=int, default=2)
args = parser.parse_args()

import numpy as np  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

torch.set_num_threads(args.threads)
torch.manual_seed(1)
if args.make:
    layers, hidden, heads, narrow, ffn, vocab = map(int, args.make.split(","))
    config = transformers.Qwen3Config(num_hidden_layers=layers, hidden_size=hidden, num_attention_heads=heads, num_key_value_heads=narrow, head_dim=hidden // heads,
                                      intermediate_size=ffn, vocab_size=vocab, tie_word_embeddings=True, max_position_embeddings=args.sequence)
    model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(args.folder)
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters())}))
    sys.exit()

model = transformers.AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16 if args.whole else torch.float32)
model.config.use_cache = False
model.train()
decayed = [p for p in model.parameters() if p.dim() >= 2]
other = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decayed, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=1e-4, betas=(0.9, 0.95), eps=1e-8, fused=True)
stream = torch.from_numpy(np.load(args.batches).astype(np.int64))
run = torch.compile(lambda tokens: model(input_ids=tokens).logits)


def step(index):
    rows = stream[index % len(stream)]
    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=args.dtype == "bf16" and not args.whole):
        logits = run(rows[:, :-1])
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def block(first, count):
    times, losses = [], []
    for index in range(first, first + count):
        start = time.perf_counter()
        losses.append(step(index))
        times.append(time.perf_counter() - start)
    print(json.dumps({"torch": torch.__version__, "step_s": times, "loss": losses}), flush=True)


block(0, args.warmup)
for number, _ in enumerate(sys.stdin):
    block(args.warmup + number * args.steps, args.steps)
