"""Folders of a published model's shape, for tests and benchmarks."""
import json
import os
import struct

import numpy as np


def write_folder(folder, layers, hidden, heads, kv, ffn, vocab, shards=1, random=None):
    """A new folder of Qwen2.5's shape with a tied head: bf16 weights drawn by `random`, or (None) zeros, which take no space on the disk. Returns the
    shapes by name."""
    narrow = hidden // heads * kv
    shapes = {"model.embed_tokens.weight": [vocab, hidden], "model.norm.weight": [hidden]}
    for layer in range(layers):
        for part, shape in (("input_layernorm.weight", [hidden]), ("post_attention_layernorm.weight", [hidden]),
                            ("self_attn.q_proj.weight", [hidden, hidden]), ("self_attn.q_proj.bias", [hidden]),
                            ("self_attn.k_proj.weight", [narrow, hidden]), ("self_attn.k_proj.bias", [narrow]),
                            ("self_attn.v_proj.weight", [narrow, hidden]), ("self_attn.v_proj.bias", [narrow]),
                            ("self_attn.o_proj.weight", [hidden, hidden]), ("mlp.gate_proj.weight", [ffn, hidden]),
                            ("mlp.up_proj.weight", [ffn, hidden]), ("mlp.down_proj.weight", [hidden, ffn])):
            shapes[f"model.layers.{layer}.{part}"] = shape
    os.mkdir(folder)
    names, where = list(shapes), {}
    for shard in range(shards):
        header, at = {}, 0
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors" if shards > 1 else "model.safetensors"
        for tensor in names[shard * len(names) // shards:(shard + 1) * len(names) // shards]:
            size = 2 * int(np.prod(shapes[tensor]))
            header[tensor] = {"dtype": "BF16", "shape": shapes[tensor], "data_offsets": [at, at + size]}
            where[tensor] = file_name
            at += size
        text = json.dumps(header).encode()
        with open(os.path.join(folder, file_name), "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            if random is None:
                file.truncate(8 + len(text) + at)
            else:
                (random.normal(0, 0.05, at // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tofile(file)
    if shards > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {}, "weight_map": where}, file)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": ffn,
                   "num_attention_heads": heads, "num_key_value_heads": kv, "num_hidden_layers": layers, "vocab_size": vocab, "rope_theta": 1e6,
                   "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "use_sliding_window": False}, file)
    return shapes


def tensors_of(folder):
    """The bits of each tensor in a folder, by name, mapped."""
    found = {}
    for name in sorted(os.listdir(folder)):
        if name.endswith(".safetensors"):
            raw = np.memmap(os.path.join(folder, name), np.uint8, "r")
            length = struct.unpack("<Q", raw[:8].tobytes())[0]
            for key, entry in json.loads(raw[8:8 + length].tobytes()).items():
                if key != "__metadata__":
                    found[key] = raw[8 + length + entry["data_offsets"][0]:8 + length + entry["data_offsets"][1]]
    return found
