"""usage: generate.py HAPT FOLDER. A small GPT learns a few sentences. NumPy computes the logits of its exported weights in fp64: each token
that hapt generate takes is the most likely one, and drawn tokens have the probabilities of a softmax. Plans of one and two ranks choose the
same tokens. Bad prompts and models that look ahead are refused."""
import json

import h5py
import numpy as np

from checking import LONG, check, end, passes, path, refuses
from numpy_gpt import gpt, weights_of

T, V, LAYERS, HEADS = 16, 64, 2, 2
def clusters():
    for count in (1, 2):
        with open(path(f"c{count}.json"), "w") as file:
            json.dump({"format": "hapt-cluster", "version": 1,
                       "subclusters": [{"name": "a", "nodes": 1, "devices_per_node": count, "device": "cpu", "memory": "300 MB"}]}, file)


clusters()
random = np.random.default_rng(3)
sentences = [random.integers(0, V, 12) for _ in range(6)]
stream = np.concatenate([sentences[k] for k in random.integers(0, 6, 400)])
with h5py.File(path("data.h5"), "w") as file:
    file["tokens"] = stream.astype(np.int32)
passes("model", "gpt", "--layers", LAYERS, "--hidden", 32, "--heads", HEADS, "--sequence", T, "--vocab", V, "--microbatch", 2, "--data", path("data.h5"),
       "--output", path("m.h5"))
layers = ["--layers-per-model", "ops"]
passes("--input", path("m.h5"), "--microbatches", 4, "--steps", 200, "--learning-rate", "1e-2", "--predict", "--threads", 1, "--cluster", path("c1.json"),
       "--output", path("run"))
passes("export", "--checkpoint", path("run"), "--output", path("w.h5"))
weight = weights_of(path("w.h5"))
common = ["generate", "--input", path("m.h5"), "--checkpoint", path("run"), "--threads", 1]
one = [*common, "--cluster", path("c1.json")]
plans = [("one", 1, [])]
for name, stages in (("rows", "0-LAST@a:1x2"), ("stages", "0-4@a:1x1,4-LAST@a:1x1"), ("vocabulary", "0-LAST@a:1x2t2")):
    passes("profile", "--input", path("m.h5"), "--cluster", path("c2.json"), "--predict", *layers, "--overwrite", "--output", path("p.h5"))
    with h5py.File(path("p.h5")) as file:
        last = file["boundary_bytes"].shape[0]
    passes("plan", "--profile", path("p.h5"), "--microbatches", 64, "--stages", stages.replace("LAST", str(last)), "--output", path(name + ".h5"))
    plans.append((name, 2, ["--plan", path(name + ".h5")]))


def logits_behind(tokens):
    """Logits of the token that follows the last T ones."""
    kept = np.array(tokens[-T:])
    return gpt(weight, kept[None], LAYERS, HEADS)[0, -1]


def text_of(prompts):
    return ";".join(",".join(str(token) for token in prompt) for prompt in prompts)


# The most likely tokens, for prompts shorter and longer than a row, on every plan.
prompts = [sentences[0][:5].tolist(), sentences[1][:1].tolist(), stream[40:40 + T].tolist(), stream[90:120].tolist(), random.integers(0, V, 7).tolist()]
greedy = None
for name, ranks, options in plans:
    done = passes(*common, "--cluster", path(f"c{ranks}.json"), *options, "--prompt-tokens", text_of(prompts), "--max-tokens", 24, "--json", ranks=ranks)
    found = json.loads(done.stdout)
    check(found["format"] == "hapt-generation" and found["version"] == 1 and found["step"] == 200, f"{name}: {found}")
    check([it["prompt"] for it in found["sequences"]] == prompts and not any(it["ended"] for it in found["sequences"]), f"{name}: prompts")
    tokens = [it["tokens"] for it in found["sequences"]]
    check([len(its) for its in tokens] == [24] * 5, f"{name}: 24 tokens each")
    greedy = greedy or tokens
    check(tokens == greedy, f"{name}: {tokens}, one rank: {greedy}")
    with h5py.File(options[1] if options else path("rows.h5")) as file:
        check(name != "vocabulary" or file["stage_tensor_parallel"][0] == 2, "the vocabulary is split")
for prompt, its in zip(prompts, greedy):
    for k, token in enumerate(its):
        logits = logits_behind(prompt + its[:k])
        check(logits[token] > logits.max() - 1e-4, f"token {k} behind {prompt}: {token} has {logits[token]}, NumPy's best {logits.max()}")
learned = sentences[0][5:].tolist()
check(greedy[0][:7] == learned, f"the model learned the sentence: {greedy[0]}, not {learned}")

# Lines of text; a text ends with the end token.
done = passes(*one, "--prompt-tokens", text_of(prompts[:2]), "--max-tokens", 24, "--end-token", greedy[0][3])
lines = [[int(token) for token in line.split(",")] for line in done.stdout.splitlines()]
for k in range(2):
    stop = greedy[k].index(greedy[0][3]) + 1 if greedy[0][3] in greedy[k] else 24
    check(lines[k] == greedy[k][:stop], f"until the end token: {lines[k]}, {greedy[k]}")

# Draws: frequencies of the first token against the softmax; the same on every plan.
prompt, temperature, draws, seeds = [1, 2, 3], 1.5, 128, 8 if LONG else 4
logits = logits_behind(prompt) / temperature
share = np.exp(logits - logits.max())
share /= share.sum()
counts, drawn = np.zeros(V), {}
for seed in range(1, seeds + 1):
    for name, ranks, options in plans[1:] if seed == 1 else plans[2:3]:
        done = passes(*common, "--cluster", path(f"c{ranks}.json"), *options, "--prompt-tokens", text_of([prompt] * draws), "--max-tokens", 1, "--temperature",
                      temperature, "--seed", seed, ranks=ranks)
        found = [int(line) for line in done.stdout.split()]
        check(drawn.setdefault(seed, found) == found, f"{name}: other draws than under the first plan")
    counts += np.bincount(drawn[seed], minlength=V)
check(drawn[1] != drawn[2], "the seed has an effect")
n = draws * seeds
large = share * n >= 5
observed = np.append(counts[large], counts[~large].sum())
expected = np.append(share[large], share[~large].sum()) * n
chi = ((observed - expected)**2 / np.maximum(expected, 1e-9))[expected > 0].sum()
freedom = (expected > 0).sum() - 1
check(chi < freedom + 6 * np.sqrt(2 * freedom), f"draws: chi squared {chi:.1f} of {freedom} degrees of freedom")
best = set(np.argsort(-logits)[:3].tolist())
for name, ranks, options in plans[2:]:
    done = passes(*common, "--cluster", path("c2.json"), *options, "--prompt-tokens", text_of([prompt] * draws), "--max-tokens", 1, "--temperature", 50,
                  "--draw-from", 3, ranks=2)
    check({int(line) for line in done.stdout.split()} == best, f"{name}: --draw-from 3: {set(done.stdout.split())}, not {best}")

# Refusals.
for text, words in (("5,x", "no token at"), ("", "must not be empty"), ("5,,6", "no token at"), ("5;", "no token at"), ("5 6", "no token at"),
                    ("64", "outside the model's vocabulary"), ("-1", "outside the model's vocabulary"), ("99999999999999999999", "no token at"),
                    (text_of([[1]] * 9), "more than the 8 rows")):
    refuses(2, words, *one, "--prompt-tokens=" + text)
refuses(2, "--end-token 64 is outside", *one, "--prompt-tokens", "5", "--end-token", "64")
refuses(2, "no prompt given", *one)
refuses(2, "takes the most likely token", *one, "--prompt-tokens", "5", "--seed", "3")
# Text: the tokens of a model of bytes.
passes("model", "gpt", "--layers", 1, "--hidden", 16, "--heads", 2, "--sequence", 8, "--vocab", 256, "--output", path("bytes.h5"))
passes("plan", "--input", path("bytes.h5"), "--cluster", path("c1.json"), "--predict", "--output", path("bytes-plan.h5"))
said, words = " Ab\u00e9,;\n", ["generate", "--input", path("bytes.h5"), "--plan", path("bytes-plan.h5"), "--cluster", path("c1.json"), "--max-tokens", 12]
told = json.loads(passes(*words, "--prompt", said, "--json").stdout)["sequences"]
given = json.loads(passes(*words, "--prompt-tokens", text_of([list(said.encode())]), "--json").stdout)["sequences"]
text = told[0].pop("text")
check(told == given, f"the bytes of a text: {told}, {given}")
check(len(told) == 1 and len(told[0]["tokens"]) == 12, f"one text, 12 bytes: {told}")
printed = passes(*words, "--prompt", said).stdout
check(printed == text + "\n", f"the new text is printed: {printed!r}, {text!r}")
new, expected = bytes(told[0]["tokens"]), ""
while new:  # characters of UTF-8 stay; any other byte, and control characters but tabs and newlines, are '?'
    size = next((n for n in (1, 2, 3, 4) if len(new[:n].decode(errors="ignore")) == 1), 0)
    letter = new[:size].decode() if size else "?"
    expected, new = expected + ("?" if ord(letter) < 32 and letter not in "\t\n" or ord(letter) == 127 else letter), new[max(size, 1):]
check(text == expected, f"{text!r}, not {expected!r}")
refuses(2, "vocabulary of 64 is not that of bytes", *one, "--prompt", "abc")
refuses(2, "exclude each other", *one, "--prompt", "abc", "--prompt-tokens", "5")
refuses(2, "must not be empty", *one, "--prompt", "")
refuses(2, "no plan given", "generate", "--input", path("m.h5"), "--prompt-tokens", "5")
refuses(2, "modelled devices compute no tokens", *one, "--prompt-tokens", "5", "--device", "emulated")
passes("model", "bert", "--layers", "1", "--hidden", "16", "--heads", "2", "--sequence", "8", "--vocab", "64", "--output", path("bert.h5"))
passes("plan", "--input", path("bert.h5"), "--cluster", path("c1.json"), "--predict", "--output", path("bert-plan.h5"))
refuses(3, "cannot continue a text", "generate", "--input", path("bert.h5"), "--plan", path("bert-plan.h5"), "--prompt-tokens", "5")
for factor in (0, 1):  # experts with room for every token, and for an even share
    passes("import", "tests/data/hf/mixtral", "--sequence", 16, "--microbatch", 2, "--capacity-factor", factor, "--output", path(f"moe{factor}.h5"))
    passes("plan", "--input", path(f"moe{factor}.h5"), "--cluster", path("c1.json"), "--predict", "--output", path(f"moe{factor}-plan.h5"))
    words = ["generate", "--input", path(f"moe{factor}.h5"), "--cluster", path("c1.json"), "--plan", path(f"moe{factor}-plan.h5"), "--prompt-tokens", "5,6,7", "--max-tokens", 2]
    if factor == 0:
        check(len(passes(*words).stdout.split(",")) == 2, "a mixture of experts")
    else:
        refuses(3, "--capacity-factor 0", *words)
end()
