"""usage: tutorial.py make|check|text, in a folder with texts/. make: a small Qwen3 with a tokenizer trained on the texts, in model/. check: the
run's validation loss fell, and the exported folder gives it in transformers, too. text: the text on standard input is the one that
transformers generates, as long as it is sure."""
import glob
import sys

import h5py
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

T = 256


def make():
    words = Tokenizer(models.BPE())
    words.pre_tokenizer, words.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    words.train(sorted(glob.glob("texts/*"))[:40], trainers.BpeTrainer(vocab_size=800, special_tokens=["<end>"], show_progress=False))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>").save_pretrained("model")
    torch.manual_seed(3)
    config = transformers.Qwen3Config(vocab_size=800, hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4,
                                      num_key_value_heads=2, head_dim=16, max_position_embeddings=T, tie_word_embeddings=True, eos_token_id=0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained("model")


def check():
    with h5py.File("outputs/model/run.h5") as run:
        steps, losses = run["train/validation_step"][()].tolist(), run["train/validation_loss"][()]
    assert steps == [0, 25, 50, 75, 100], steps
    assert all(after < before for before, after in zip(losses, losses[1:])) and losses[-1] < losses[0] - 1, losses
    held_out = torch.tensor(h5py.File("held-out.h5")["tokens"][()].astype("int64"))
    rows = (len(held_out) - 1) // T
    used = min(rows, 1024)
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned").double().eval()
    total = 0
    with torch.no_grad():
        for k in range(used):
            start = int(k * (rows / used)) * T
            row = held_out[start:start + T + 1]
            total += torch.nn.functional.cross_entropy(model(row[None, :-1]).logits[0], row[1:]).item()
    theirs = total / used
    assert abs(theirs / losses[-1] - 1) < 1e-5, (theirs, losses[-1])
    transformers.AutoTokenizer.from_pretrained("tuned")
    print("validation loss %.3f to %.3f; transformers with the exported weights: %.6f, hapt %.6f" % (losses[0], losses[-1], theirs, losses[-1]))


def text():
    words, found = transformers.AutoTokenizer.from_pretrained("tuned"), sys.stdin.read().rstrip("\n")
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned").double().eval()
    prompt = words.encode("static int ", add_special_tokens=False)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(20):
            best = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            if best.values[0] - best.values[1] < 1e-4:
                break
            tokens.append(best.indices[0].item())
    wanted = words.decode(tokens[len(prompt):])
    assert len(tokens) > len(prompt) + 3 and found.startswith(wanted), (found, wanted)


{"make": make, "check": check, "text": text}[sys.argv[1]]()
