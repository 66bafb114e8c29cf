"""usage: import.py HAPT FOLDER. Each folder of tests/data/hf is imported and trained for ten steps; the losses are those of transformers in
fp64. The exported folder has the imported names, shapes and files; without a change of the weights it has the same bits. What hapt cannot
import is one error that names it."""
import json
import os
import shutil
import struct

import h5py
import numpy as np

from checking import FOLDER, LONG, check, end, passes, path, run

DATA = "tests/data/hf"
FAMILIES = ["gemma3", "gpt2", "llama3", "mistral", "mixtral", "qwen2", "qwen3", "qwen3-moe", "bert", "vit", "dinov2"]
IMAGES = ("vit", "dinov2")
TRAINING = ["--microbatches", "4", "--optimizer", "adamw", "--lr-schedule", "constant", "--beta1", "0.9", "--beta2", "0.95", "--epsilon",
            "1e-8", "--weight-decay", "0.1", "--clip-norm", "0", "--profile-seconds", "1"]
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
    sequence = [] if family.startswith(IMAGES) else ["--sequence", "32"]
    done = run("import", source or os.path.join(DATA, family), *sequence, "--microbatch", "2", "--overwrite", "--output", model, *options)
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
    for name, options in [("one", []), ("shards", ["--shard-size", "50 kB"]), ("bf16", ["--dtype", "bf16"])]:
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
            check(os.path.exists(os.path.join(folder, file)) == os.path.exists(os.path.join(source, file)), file)
            if os.path.exists(os.path.join(source, file)):
                check(open(os.path.join(folder, file), "rb").read() == open(os.path.join(source, file), "rb").read(), file)
        check(not [x for x in os.listdir(FOLDER) if x.endswith(".partial")], "a partial folder is left")
    done = run("export", "--checkpoint", out, "--format", "safetensors", "--output", folder)
    check(done.returncode == 2 and "no empty folder" in done.stderr, "%s: export onto a folder: %s" % (family, done.stderr))
    for words in (["--overwrite"], ["--merge"]):
        done = run("export", "--checkpoint", out, "--format", "safetensors", "--output", path("never"), *words)
        check(done.returncode == 2 and not os.path.exists(path("never")), "%s: export %s: %s" % (family, words, done.stderr))
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


def refused(family, change, message, code=3):
    sequence = [] if family in IMAGES else ["--sequence", "32"]
    done = run("import", changed(family, change), *sequence, "--output", path("refused.h5"))
    good = done.returncode == code and message in done.stderr and done.stderr.count("error:") == 1 and not os.path.exists(path("refused.h5"))
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
    refused("gpt2", put(n_positions=16), "a sequence of 32 is too long", 2)
    refused("gemma3", put(rope_parameters={"rope_type": "linear", "factor": 8, "rope_theta": 5}), "rope_parameters has no full_attention")
    refused("gemma3", lambda config: config["rope_parameters"].update(other={}), "unknown option rope_parameters.other")
    refused("gemma3", put(rope_scaling={"rope_type": "linear", "factor": 8}), "unknown option rope_scaling")
    refused("gemma3", put(attn_logit_softcapping=5.0), "attn_logit_softcapping is 5")
    refused("mistral", put(use_sliding_window=False), "unknown option use_sliding_window")
    refused("mistral", lambda config: config.pop("num_key_value_heads"), "num_key_value_heads is missing")
    refused("qwen2", put(use_mrope=True), "use_mrope is true")
    refused("mixtral", put(output_router_logits=True), "output_router_logits")
    refused("mixtral", put(num_experts_per_tok=9), "9 of 4 experts")
    refused("bert", put(architectures=["BertForPreTraining"]), "BertForPreTraining")
    refused("bert", put(position_embedding_type="relative_key"), "position_embedding_type")
    refused("bert", put(tie_word_embeddings=False), "tie_word_embeddings is false")
    refused("bert", put(type_vocab_size=3), "has the shape")
    refused("bert", put(max_position_embeddings=31), "a sequence of 32 is too long", 2)
    refused("bert", put(num_attention_heads=5), "cannot be divided into 5 heads")
    refused("vit", put(hidden_act="quick_gelu"), "hidden_act \"quick_gelu\" is unknown")
    refused("vit", put(patch_size=5), "do not divide into patches of 5")
    refused("vit", put(qkv_bias=True), "query.bias")
    refused("vit", put(id2label={"0": "cat"}), "with 1 labels")
    refused("vit", put(problem_type="multi_label_classification"), "multi_label_classification")
    refused("vit", put(id2label=None), "has the shape")
    refused("dinov2", put(use_swiglu_ffn=True), "use_swiglu_ffn")
    refused("dinov2", put(use_mask_token=False), "mask_token")
    refused("dinov2", put(mlp_ratio=1), "has the shape")
    refused("dinov2", put(mlp_ratio=0), "mlp_ratio")
    done = run("import", os.path.join(DATA, "vit"), "--sequence", "32", "--output", path("refused.h5"))
    check(done.returncode == 2 and "no --sequence" in done.stderr, "vit with a sequence: " + done.stderr)
    done = run("import", path("nowhere"), "--output", path("refused.h5"))
    check(done.returncode == 3 and "neither model.safetensors" in done.stderr, "a missing folder: " + done.stderr)
    done = run("import", changed("gpt2", put(resid_pdrop=0.1)), "--sequence", "16", "--output", path("short.h5"))
    check(done.returncode == 0 and "resid_pdrop is 0.1" in done.stderr, "dropout: " + done.stderr)


def defaults_are_the_classes():
    """Mistral's window is 4096 if the option is absent, and none if it is null; Mixtral's base is 1e6."""
    for change, window in [(lambda config: config.pop("sliding_window"), 4096), (put(sliding_window=None), 0)]:
        with h5py.File(imported("default", changed("mistral", change))) as model:
            attention = [kind == b"grouped_attention" or kind == "grouped_attention" for kind in model["operators/type"][:]]
            check(set(model["operators/integer"][:][attention][:, 2]) == {window}, "mistral's window is not %d" % window)
    with h5py.File(imported("default", changed("mixtral", lambda config: config.pop("rope_parameters")))) as model:
        ropes = [kind in (b"rope", "rope") for kind in model["operators/type"][:]]
        check(set(model["operators/real"][:][ropes][:, 0]) == {1e6}, "mixtral's base")


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

    # Keys of files on the hub that change nothing.
    published = [("gemma3", put(cache_implementation="hybrid")), ("qwen2", put(use_mrope=False)), ("llama3", put(unsloth_fixed=True)),
                 ("gpt2", put(n_special=0, predict_special_tokens=True, _num_labels=1, output_past=True))]
    for family, change in [("llama3", older), ("gemma3", oldest)] + published:
        new = imported(family)
        with h5py.File(new) as one, h5py.File(imported("older", changed(family, change))) as other:
            for table in ["name", "type", "input", "integer", "real"]:
                check(np.array_equal(one["operators"][table][:], other["operators"][table][:]), "%s: operators' %s" % (family, table))


def adapters_train_alone():
    """LoRA on 1 and 3 ranks: the same losses, no weight of the base changes, adapters and merged weights come out."""
    before = weights_of(os.path.join(DATA, "qwen3"))
    losses = []
    for ranks in (1, 3):
        model = imported("lora", os.path.join(DATA, "qwen3"), "--lora", "rank=4,alpha=8,target=q_proj,v_proj")
        out = path("lora-run")
        shutil.rmtree(out, ignore_errors=True)
        done = run("--input", model, "--data", os.path.join(DATA, "qwen3", "reference.h5"), *TRAINING, "--steps", "5", "--checkpoint-every",
                   "5", "--learning-rate", "1e-2", "--output", out, ranks=ranks)
        check(done.returncode == 0, "LoRA: " + done.stderr[-500:])
        losses.append(h5py.File(os.path.join(out, "run.h5"))["train/loss"][:])
    check(np.abs(losses[0] - losses[1]).max() < 1e-5, "LoRA: losses differ by rank count")
    for name, words in (("adapters", []), ("merged", ["--merge"])):
        shutil.rmtree(path(name), ignore_errors=True)
        done = run("export", "--checkpoint", out, "--format", "safetensors", "--output", path(name), *words)
        check(done.returncode == 0, "LoRA: export: " + done.stderr)
    adapters, merged = weights_of(path("adapters")), weights_of(path("merged"))
    check(sorted(os.listdir(path("adapters"))) == ["adapter_config.json", "adapter_model.safetensors"], "files of adapters")
    check(merged.keys() == before.keys() and len(adapters) == 8, "names of adapters and merged weights")
    values = lambda entry: np.frombuffer(entry[2], np.float32).reshape(entry[1]).astype(np.float64)
    for name in before:
        a, b = ("base_model.model.%s.lora_%s.weight" % (name[:-len(".weight")], which) for which in "AB")
        expected = values(before[name]) + (2 * values(adapters[b]) @ values(adapters[a]) if a in adapters else 0)
        check(np.array_equal(values(merged[name]), expected.astype(np.float32).astype(np.float64)) or
              a in adapters and np.abs(values(merged[name]) - expected).max() < 1e-7, "LoRA: merged " + name)
    for words, message in ((["--lora", "rank=0,target=q_proj"], "the rank is"), (["--lora", "rank=4,target=qq"], "no layer of the model"),
                           (["--lora", "rank=4,target=q_proj", "--freeze", "*"], "trains its adapters alone"),
                           (["--freeze", "no.such.*"], "no parameter has a name like"), (["--trainable", "lm_head.*x"], "no parameter")):
        done = run("import", os.path.join(DATA, "qwen3"), "--sequence", "32", "--output", path("never.h5"), *words)
        check(done.returncode == 2 and message in done.stderr, "%s: %s" % (words, done.stderr))


def frozen_weights_stay():
    """Of a model whose upper block trains alone, all other weights keep their bits on 1 and 2 ranks, with equal losses."""
    losses, before = [], weights_of(os.path.join(DATA, "mistral"))
    for ranks in (1, 2):
        model = imported("frozen", os.path.join(DATA, "mistral"), "--trainable", "model.layers.1.*", "--freeze", "*norm*")
        out = path("frozen-run")
        shutil.rmtree(out, ignore_errors=True)
        passes("--input", model, "--data", os.path.join(DATA, "mistral", "reference.h5"), *TRAINING, "--steps", "3", "--checkpoint-every", "3",
            "--learning-rate", "1e-2", "--output", out, ranks=ranks)
        shutil.rmtree(path("frozen-out"), ignore_errors=True)
        passes("export", "--checkpoint", out, "--format", "safetensors", "--output", path("frozen-out"))
        after = weights_of(path("frozen-out"))
        for name in before:
            trains = name.startswith("model.layers.1.") and "norm" not in name
            check((after[name] == before[name]) != trains, "frozen: %s on %d ranks" % (name, ranks))
        losses.append(h5py.File(os.path.join(out, "run.h5"))["train/loss"][:])
    check(np.abs(losses[0] - losses[1]).max() < 1e-5, "frozen: losses differ by rank count")


for i, family in enumerate(FAMILIES):
    for ranks in [1, 2, 3, 4] if LONG else [i % 4 + 1]:
        losses_agree(family, ranks)
    if LONG or family in ("llama3", "qwen3-moe", "dinov2"):
        comes_back(family, 2)
adapters_train_alone()
frozen_weights_stay()
nothing_is_guessed()
older_files_are_read()
defaults_are_the_classes()
end()
