"""usage: tutorial.py make|check|text|chat, in a folder with texts/. make: a small Qwen3 with a tokenizer trained on the texts, in model/. check: the
run's validation loss fell, and the exported folder gives it in transformers, too. text: the text on standard input is the one that
transformers generates, as long as it is sure. chat TOOL HAPT: targets of chats and completions are those that transformers marks, and hapt's loss
on them is transformers'."""
import glob
import json
import subprocess
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
            if best.values[0] - best.values[1] < 1e-5:  # fp32 may decide otherwise
                break
            tokens.append(best.indices[0].item())
    wanted = words.decode(tokens[len(prompt):]).rstrip("\n")  # as those of the input
    assert len(tokens) > len(prompt) + 3 and wanted and found.startswith(wanted), (found, wanted)


CHAT = ("{% for m in messages %}{{ '<' + m['role'] + '>' }}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<end>' }}"
        "{% endgeneration %}{% else %}{{ m['content'] + '<end>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}")


def chat():
    tool, hapt = sys.argv[2:]
    words = transformers.AutoTokenizer.from_pretrained("tuned")
    words.chat_template = CHAT
    words.save_pretrained("chat")
    model = transformers.AutoModelForCausalLM.from_pretrained("tuned").double().eval()
    said = [[("system", "be brief"), ("user", "while (i < %d)" % i), ("assistant", "i++; return %d;" % i), ("user", "more"), ("assistant", "int x;")] for i in range(60)]
    chats = [[{"role": role, "content": content} for role, content in one] for one in said]
    pairs = [{"prompt": "static int f%d(void)" % i, "completion": "{ return %d; }" % i} for i in range(40)]
    with open("chat.jsonl", "w") as file:
        file.writelines(json.dumps(one) + "\n" for one in [{"messages": chat} for chat in chats] + pairs)
    tokens, targets = [], []
    for one in chats:
        found = words.apply_chat_template(one, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        counts = found["assistant_masks"]
        assert 0 < sum(counts) < len(counts), counts
        tokens += found["input_ids"]
        targets += [token if counted else -100 for token, counted in zip(found["input_ids"][1:], counts[1:])] + [-100]
    for one in pairs:
        prompt, completion = (words.encode(one[key], add_special_tokens=False) for key in ("prompt", "completion"))
        completion.append(words.eos_token_id)
        tokens += prompt + completion
        targets += [-100] * (len(prompt) - 1) + completion + [-100]
    told = subprocess.run([sys.executable, tool, "--tokenizer", "chat", "--output", "chat.h5", "--answers-only", "chat.jsonl"], check=True,
                          stdout=subprocess.PIPE, text=True).stdout
    inside = sum(words.eos_token_id in words.apply_chat_template(chat, tokenize=True, return_dict=False)[:-1] for chat in chats)
    assert ("stands inside %d of them" % inside if inside else "token %d ends each document" % words.eos_token_id) in told, (inside, told)
    with h5py.File("chat.h5") as file:
        assert file["tokens"][()].tolist() == tokens and file["targets"][()].tolist() == targets
    total = count = 0
    with torch.no_grad():
        for start in range(0, len(tokens) - T + 1, T):
            wanted = torch.tensor(targets[start:start + T])
            loss = torch.nn.functional.cross_entropy(model(torch.tensor([tokens[start:start + T]])).logits[0], wanted, ignore_index=-100, reduction="sum")
            total, count = total + loss.item(), count + (wanted != -100).sum().item()
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", "3", hapt, "evaluate", "--input", "model.h5", "--checkpoint", "outputs/model", "--cluster", "lab.json", "--data", "chat.h5"]
    done = subprocess.run(command + ["--threads", "1", "--json"], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["targets"] == count and abs(found["loss"] / (total / count) - 1) < 1e-5, (found, total / count, count)
    print("chat: %d of %d tokens count; loss of transformers %.6f, of hapt %.6f" % (count, len(tokens), total / count, found["loss"]))


{"make": make, "check": check, "text": text, "chat": chat}[sys.argv[1]]()
