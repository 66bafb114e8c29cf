"""usage: import.py HAPT FOLDER. Each folder of tests/data/hf is imported and trained for ten steps; the losses are those of transformers in
fp64. The exported folder has the imported names, shapes and files; without a change of the weights it has the same bits. What hapt cannot
import is one error that names it."""
import json
import os
import shutil
import struct
import subprocess
import sys

import h5py
import numpy as np

HAPT, FOLDER = sys.argv[1:3]
LONG = os.environ.get("HAPT_LONG", "0") != "0"
DATA = "tests/data/hf"
FAMILIES = ["gemma3", "gpt2", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe"]
TRAINING = ["--microbatches", "4", "--optimizer", "adamw", "--lr-schedule", "constant", "--beta1", "0.9", "--beta2", "0.95", "--epsilon",
            "1e-8", "--weight-decay", "0.1", "--clip-norm", "0", "--profile-seconds", "1"]
checks = failures = 0


def check(good, what):
    global checks, failures
    checks += 1
    if not good:
        failures += 1
        print("FAILED:", what)


def run(*words, ranks=1):
    command = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)] if ranks > 1 else []
    return subprocess.run(command + [HAPT, *words], capture_output=True, text=True)


def path(*parts):
    return os.path.join(FOLDER, *parts)


def weights_of(folder):
    """name: (type, shape, bytes) of all safetensors of a folder, whose index must agree with them."""
    found, files = {}, {}
    for name in sorted(os.listdir(folder)):
        if not name.endswith(".safetensors"):
            continue
        raw = open(os.path.join(folder, name), "rb").read()
        length = struct.unpack("<Q", raw[:8])[0]
        for key, entry in json.loads(raw[8:8 + length]).items():
            if key != "__metadata__":
                first, end = entry["data_offsets"]
                found[key] = entry["dtype"], entry["shape"], raw[8 + length + first:8 + length + end]
                files[key] = name
    index = os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index):
        index = json.load(open(index))
        check(index["weight_map"] == files, folder + ": the index names other files")
        check(index["metadata"]["total_size"] == sum(len(bits) for _, _, bits in found.values()), folder + ": total_size")
    return found


def imported(family, source=None, *options):
    model = path(family + ".h5")
    done = run("import", source or os.path.join(DATA, family), "--sequence", "32", "--microbatch", "2", "--overwrite", "--output", model,
               *options)
    check(done.returncode == 0, "%s: import: %s" % (family, done.stderr))
    return model


def trained(family, model, name, ranks, *options):
    out = path(name)
    shutil.rmtree(out, ignore_errors=True)
    done = run("--input", model, "--data", os.path.join(DATA, family, "reference.h5"), *TRAINING, "--output", out, *options, ranks=ranks)
    check(done.returncode == 0, "%s: %s" % (name, done.stderr[-500:]))
    return out


def losses_agree(family, ranks):
    out = trained(family, imported(family), family + "-run", ranks, "--steps", "10", "--learning-rate", "1e-3")
    expected = h5py.File(os.path.join(DATA, family, "reference.h5"))["loss_fp64"][:]
    losses = h5py.File(os.path.join(out, "run.h5"))["train/loss"][:]
    worst = np.abs(losses - expected).max()
    print("%-10s %d ranks: losses within %.1e of transformers in fp64" % (family, ranks, worst))
    check(worst < 2e-6, "%s on %d ranks: losses differ by %g" % (family, ranks, worst))


def comes_back(family, ranks):
    """After a step of rate 0 the exported weights are the imported ones, in the same type or rounded to bf16."""
    source, before = os.path.join(DATA, family), weights_of(os.path.join(DATA, family))
    out = trained(family, path(family + ".h5"), family + "-still", ranks, "--steps", "1", "--checkpoint-every", "1", "--learning-rate", "0")
    for name, options in [("one", []), ("shards", ["--shard-size", "100 kB"]), ("bf16", ["--dtype", "bf16"])]:
        folder = path(family + "-" + name)
        shutil.rmtree(folder, ignore_errors=True)
        done = run("export", "--checkpoint", out, "--format", "safetensors", "--output", folder, *options)
        check(done.returncode == 0, "%s: export: %s" % (family, done.stderr))
        after = weights_of(folder)
        check(after.keys() == before.keys(), "%s: names of %s" % (family, name))
        check(all(after[key][1] == before[key][1] for key in before), "%s: shapes of %s" % (family, name))
        if name == "bf16":
            check(all(rounded(before[key][2]) == after[key][2] for key in before), family + ": rounding to bf16")
        else:
            check(all(after[key] == before[key] for key in before), "%s: bits of %s" % (family, name))
        check((name == "shards") == os.path.exists(os.path.join(folder, "model.safetensors.index.json")), name + ": index")
        for file in ["config.json", "generation_config.json"]:
            check(open(os.path.join(folder, file), "rb").read() == open(os.path.join(source, file), "rb").read(), file)
        check(not [x for x in os.listdir(FOLDER) if x.endswith(".partial")], "a partial folder is left")
    done = run("export", "--checkpoint", out, "--format", "safetensors", "--output", folder)
    check(done.returncode == 2 and "no empty folder" in done.stderr, "%s: export onto a folder: %s" % (family, done.stderr))
    # What was exported can be imported: bf16 weights, and shards.
    for name in ["shards", "bf16"]:
        again = imported(family + "-again", path(family + "-" + name))
        with h5py.File(again) as one, h5py.File(path(family + ".h5")) as other:
            names = []
            other["parameters"].visititems(lambda key, item: names.append(key) if isinstance(item, h5py.Dataset) else None)
            same = all(np.array_equal(one["parameters"][key][:], to_bf16(other["parameters"][key][:]) if name == "bf16" else
                                      other["parameters"][key][:]) for key in names)
        check(same, "%s: imported again from %s" % (family, name))


def to_bf16(values):
    """Rounded to nearest even, as fp32."""
    bits = values.astype(np.float32).view(np.uint32)
    bits = (bits + 0x7fff + ((bits >> 16) & 1)) & np.uint32(0xffff0000)
    return bits.view(np.float32)


def rounded(raw):
    values = np.frombuffer(raw, np.float32)
    return (to_bf16(values).view(np.uint32) >> 16).astype(np.uint16).tobytes()


def changed(family, change):
    """A copy of a folder with another config.json."""
    folder = path("changed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(os.path.join(DATA, family), folder)
    config = json.load(open(os.path.join(folder, "config.json")))
    change(config)
    json.dump(config, open(os.path.join(folder, "config.json"), "w"))
    return folder


def refused(family, change, message):
    done = run("import", changed(family, change), "--sequence", "32", "--output", path("refused.h5"))
    good = done.returncode == 3 and message in done.stderr and done.stderr.count("error:") == 1 and not os.path.exists(path("refused.h5"))
    check(good, "%s: not refused with \"%s\": %d %s" % (family, message, done.returncode, done.stderr))


def put(**values):
    return lambda config: config.update(values)


def nothing_is_guessed():
    refused("qwen3", put(use_magic=True), "unknown option use_magic = true")
    refused("qwen3", put(model_type="qwen9"), "unknown model_type \"qwen9\"")
    refused("qwen3", put(architectures=["Qwen3ForSequenceClassification"]), "Qwen3ForSequenceClassification")
    refused("qwen3", put(hidden_act="relu"), "hidden_act \"relu\" is unknown")
    refused("qwen3", put(num_hidden_layers=3, layer_types=["full_attention"] * 3), "has no tensor model.layers.2.")
    refused("qwen3", put(num_hidden_layers=1, layer_types=["full_attention"]), "unknown tensor model.layers.1.")
    refused("qwen3", put(num_hidden_layers=3), "layer_types")
    refused("qwen3", put(num_hidden_layers=1000), "has only 24 tensors")
    refused("qwen3", put(intermediate_size=95), "has the shape")
    refused("qwen3", put(hidden_size="64"), "hidden_size is \"64\", not an integer")
    refused("qwen3", lambda config: config.pop("vocab_size"), "vocab_size is missing")
    refused("qwen3", put(tie_word_embeddings=False), "has no tensor lm_head.weight")
    refused("llama3", put(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), "longrope")
    refused("llama3", put(rope_parameters={"rope_type": "linear", "factor": 2, "rope_theta": 1e4, "slope": 1}), "slope")
    refused("llama3", put(attention_bias=True), "has no tensor model.layers.0.self_attn.q_proj.bias")
    refused("gpt2", put(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx")
    refused("gpt2", put(n_positions=16), "shorter than the sequence")
    refused("mixtral", put(output_router_logits=True), "output_router_logits")
    refused("mixtral", put(num_experts_per_tok=9), "9 of 4 experts")
    done = run("import", path("nowhere"), "--output", path("refused.h5"))
    check(done.returncode == 3 and "neither model.safetensors" in done.stderr, "a missing folder: " + done.stderr)
    done = run("import", changed("gpt2", put(resid_pdrop=0.1)), "--sequence", "16", "--output", path("short.h5"))
    check(done.returncode == 0 and "resid_pdrop is 0.1" in done.stderr, "dropout: " + done.stderr)


def older_files_are_read():
    """rope_theta and rope_scaling beside each other, and a second copy of tied embeddings, as older files have them: the same graph."""
    def older(config):
        parameters = config.pop("rope_parameters")
        config["rope_theta"] = parameters.pop("rope_theta")
        config["rope_scaling"] = dict(parameters, type=parameters.pop("rope_type"))

    def oldest(config):
        both = config.pop("rope_parameters")
        config.update(rope_theta=both["full_attention"]["rope_theta"], rope_local_base_freq=both["sliding_attention"]["rope_theta"],
                      sliding_window_pattern=2)
        config.pop("layer_types")
        config.pop("_sliding_window_pattern")

    for family, change in [("llama3", older), ("gemma3", oldest)]:
        new = imported(family)
        with h5py.File(new) as one, h5py.File(imported("older", changed(family, change))) as other:
            for table in ["name", "type", "input", "integer", "real"]:
                check(np.array_equal(one["operators"][table][:], other["operators"][table][:]), "%s: operators' %s" % (family, table))


for i, family in enumerate(FAMILIES):
    for ranks in [1, 2, 3, 4] if LONG else [i % 4 + 1]:
        losses_agree(family, ranks)
    if LONG or family in ("gpt2", "llama3", "qwen3-moe"):
        comes_back(family, 2)
nothing_is_guessed()
older_files_are_read()
print("%d checks, %d failed" % (checks, failures))
sys.exit(failures > 0)
