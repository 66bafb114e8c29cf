"""A GPT of hapt in NumPy and fp64: logits of an exported weights file. For tests that need an independent forward pass."""
import h5py
import numpy as np


def weights_of(path):
    """name: array, of a weights file (hapt export)."""
    weight = {}
    with h5py.File(path) as file:
        file["parameters"].visititems(lambda name, it: weight.update({name: it[()].astype(np.float64)}) if isinstance(it, h5py.Dataset) else None)
    return weight


def gelu(x):
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def norm(x, weight, name):
    mean, spread = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(spread + 1e-5) * weight[name + ".weight"] + weight[name + ".bias"]


def linear(x, weight, name):
    return x @ weight[name + ".weight"] + weight[name + ".bias"]


def gpt(weight, tokens, layers, heads, drop=lambda number, x: x):
    """Logits [row][token][vocabulary] of rows of tokens. drop: applies the dropout of that number."""
    length, width = tokens.shape[-1], weight["wte.weight"].shape[1]
    x = drop(0, weight["wte.weight"][tokens] + weight["wpe.weight"][:length])
    for layer in range(layers):
        block = f"h.{layer}"
        q, k, v = np.split(linear(norm(x, weight, block + ".ln_1"), weight, block + ".attn.c_attn"), 3, axis=-1)
        q, k, v = [part.reshape(*part.shape[:-1], heads, width // heads).swapaxes(-2, -3) for part in (q, k, v)]
        score = q @ k.swapaxes(-1, -2) / np.sqrt(width // heads) + np.triu(np.full((length, length), -np.inf), 1)
        score = np.exp(score - score.max(-1, keepdims=True))
        mixed = (score / score.sum(-1, keepdims=True)) @ v
        x = x + drop(2 * layer + 1, linear(mixed.swapaxes(-2, -3).reshape(x.shape), weight, block + ".attn.c_proj"))
        hidden = gelu(linear(norm(x, weight, block + ".ln_2"), weight, block + ".mlp.c_fc"))
        x = x + drop(2 * layer + 2, linear(hidden, weight, block + ".mlp.c_proj"))
    return norm(x, weight, "ln_f") @ weight["wte.weight"].T
