"""usage: import_peers.py HAPT FOLDER. Models of random shapes are made by transformers, stored in one of its ways (shards, bf16), imported,
trained for ten steps on 1 to 4 ranks and exported. Their losses are those of transformers in fp64, and transformers computes the same
logits from the exported folder as from its own trained weights. LoRA: PEFT loads the adapters, and trains to the same losses. Dropout:
the same with hapt's masks in torch's modules. Rows of several documents: the same with transformers' positions.
ResNets: torchvision evaluates what is exported."""
import os
import random
import shutil
import warnings

import h5py
import numpy as np
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoModelForMaskedLM

from checking import LONG, check, end, passes, path
from philox import kept

SEED = int(os.environ.get("HAPT_SEED", "1"))
STEPS, ROWS, T, RATE = 10, 4, 24, 1e-3
TRAINING = ["--microbatches", "2", "--optimizer", "adamw", "--lr-schedule", "constant", "--learning-rate", str(RATE), "--beta1", "0.9",
            "--beta2", "0.95", "--epsilon", "1e-8", "--weight-decay", "0.1", "--clip-norm", "0", "--profile-seconds", "1", "--steps",
            str(STEPS), "--checkpoint-every", str(STEPS)]
IMAGES = ("dinov2", "vit")
DROPPED, DATA_SEED = 0.2, 7
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
warnings.filterwarnings("ignore")
torch.set_num_threads(1)


def rope(draw):
    kind = draw.choice(["default", "linear", "llama3", "yarn", "truncated"])
    base = {"rope_theta": draw.choice([1e4, 5e5]), "rope_type": kind}
    if kind == "linear":
        return dict(base, factor=4.0)
    if kind == "llama3":
        return dict(base, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
    if kind in ("yarn", "truncated"):
        return dict(base, rope_type="yarn", factor=4.0, original_max_position_embeddings=16, **({"truncate": False} if kind != "yarn" else {}))
    return base


def decoder(draw):
    heads = draw.choice([2, 4, 6])
    return dict(vocab_size=draw.choice([64, 97]), hidden_size=heads * draw.choice([8, 12]), intermediate_size=draw.choice([40, 72]),
                num_hidden_layers=draw.choice([2, 3]), num_attention_heads=heads, num_key_value_heads=draw.choice([1, 2, heads]),
                head_dim=draw.choice([8, 12, 20]), max_position_embeddings=64, tie_word_embeddings=draw.choice([True, False]),
                rms_norm_eps=draw.choice([1e-6, 1e-5]), use_cache=False,
                pad_token_id=None,  # torch gives the row of a padding token no gradient of the lookup
                initializer_range=0.1, attention_dropout=0.0)


def encoder(draw):
    heads = draw.choice([2, 4])
    return dict(hidden_size=heads * draw.choice([8, 12]), intermediate_size=draw.choice([40, 72]), num_hidden_layers=draw.choice([2, 3]),
                num_attention_heads=heads, hidden_act=draw.choice(["gelu", "gelu_new"]), layer_norm_eps=draw.choice([1e-12, 1e-6]),
                hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.1)


def configs(family, draw):
    if family == "bert":
        return transformers.BertConfig(vocab_size=draw.choice([64, 97]), max_position_embeddings=draw.choice([T, 40]), pad_token_id=None,
                                       type_vocab_size=draw.choice([1, 2]), **encoder(draw))
    if family == "dinov2":
        shape = encoder(draw)
        shape.pop("intermediate_size")
        return transformers.Dinov2Config(image_size=12, patch_size=draw.choice([3, 4]), num_channels=draw.choice([1, 3]), num_labels=draw.choice([3, 7]),
                                         mlp_ratio=draw.choice([2, 4]), qkv_bias=draw.choice([True, False]), use_mask_token=draw.choice([True, False]),
                                         layerscale_value=draw.choice([0.3, 1.0]), **shape)
    if family == "vit":
        return transformers.ViTConfig(image_size=12, patch_size=draw.choice([3, 4]), num_channels=draw.choice([1, 3]), num_labels=draw.choice([3, 7]),
                                      qkv_bias=draw.choice([True, False]), **encoder(draw))
    shape = decoder(draw)
    if family == "gpt2":
        return transformers.GPT2Config(vocab_size=shape["vocab_size"], n_positions=draw.choice([T, 40]), n_embd=48, n_layer=2, n_head=4,
                                       n_inner=draw.choice([None, 72]), activation_function=draw.choice(["gelu_new", "gelu"]),
                                       tie_word_embeddings=shape["tie_word_embeddings"], resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
                                       initializer_range=0.1, use_cache=False)
    if family != "gemma3":
        shape["rope_parameters"] = rope(draw)
    if family == "llama":
        return transformers.LlamaConfig(attention_bias=draw.choice([True, False]), mlp_bias=draw.choice([True, False]), **shape)
    if family == "mistral":
        return transformers.MistralConfig(sliding_window=draw.choice([None, 5, 40]), **shape)
    if family == "mixtral":
        return transformers.MixtralConfig(num_local_experts=draw.choice([3, 4]), num_experts_per_tok=2,
                                          sliding_window=draw.choice([None, 7]), **shape)
    if family == "qwen2":
        shape.pop("head_dim")
        return transformers.Qwen2Config(use_sliding_window=draw.choice([True, False]), sliding_window=6, max_window_layers=1, **shape)
    if family == "qwen3":
        return transformers.Qwen3Config(attention_bias=draw.choice([True, False]), **shape)
    if family == "qwen3_moe":
        chosen = draw.choice([1, 2, 3])  # a normalised weight alone is 1, and its gradient 0 but for rounding
        return transformers.Qwen3MoeConfig(num_experts=4, num_experts_per_tok=chosen, moe_intermediate_size=24,
                                           norm_topk_prob=chosen > 1 and draw.choice([True, False]), mlp_only_layers=draw.choice([[], [0]]),
                                           decoder_sparse_step=draw.choice([1, 2]), **shape)
    if family == "gemma2":
        return transformers.Gemma2Config(sliding_window=draw.choice([4, 9]), query_pre_attn_scalar=draw.choice([12, 256]),
                                         attn_logit_softcapping=draw.choice([None, 2.0]), attention_bias=draw.choice([True, False]),
                                         final_logit_softcapping=draw.choice([None, 3.0]), **shape)
    return transformers.Gemma3TextConfig(sliding_window=draw.choice([4, 9]), query_pre_attn_scalar=draw.choice([12, 256]),
                                         final_logit_softcapping=draw.choice([None, 3.0]),
                                         layer_types=["sliding_attention", "full_attention", "sliding_attention"][:shape["num_hidden_layers"]],
                                         **shape)


def randomised(model, seed):
    """Norms and biases away from 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.1 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return model


def loss_of(model, batch):
    inputs, targets, *positions = batch
    logits = model(inputs, **({"position_ids": positions[0]} if positions else {})).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, -2), targets.flatten())  # -100 does not count


def train(model, batches):
    """The losses before each update, and the norm of the first gradients, in fp64."""
    weights = [w for w in model.parameters() if w.requires_grad]
    groups = [dict(params=[w for w in weights if w.dim() >= 2], weight_decay=0.1), dict(params=[w for w in weights if w.dim() < 2], weight_decay=0)]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses, norm = [], 0
    for batch in batches:
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norm = norm or sum((w.grad**2).sum().item() for w in weights if w.grad is not None)**0.5
        optimizer.step()
        losses.append(loss.item())
    return np.array(losses), norm


def classes_of(family):
    return {"bert": AutoModelForMaskedLM, **dict.fromkeys(IMAGES, AutoModelForImageClassification)}.get(family, AutoModelForCausalLM)


class Masks(torch.nn.Module):
    """Stands for the dropouts of a model, which count in the order of their calls in a step."""
    step = calls = 0

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        mask = torch.tensor(kept(tuple(x.shape), Masks.calls, DATA_SEED, Masks.step, self.p))
        Masks.calls += 1
        return x * mask / (1 - self.p)


def begin_step(model, inputs):
    Masks.step, Masks.calls = Masks.step + 1, 0


def with_masks(model):
    """Every dropout of the model that drops something gets hapt's masks, of the steps from 0 on."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Dropout) and child.p > 0:
                setattr(parent, name, Masks(child.p))
    Masks.step = -1
    model.register_forward_pre_hook(begin_step)
    return model.train()


def loaded(folder, family="", **options):
    model = classes_of(family).from_pretrained(folder, attn_implementation="eager", dtype=torch.float64, **options).train()
    model.config._experts_implementation = "eager"  # the others compute experts in 16 or 32 bits
    return model


def logits_of(model, batch):
    with torch.no_grad():
        return model.eval()(batch[0]).logits


def make(family, seed):
    """A stored model and its data; returns folder, description, batches."""
    draw = random.Random("%s %d" % (family, seed))
    torch.manual_seed(seed)
    config = configs(family, draw)
    model = randomised(classes_of(family).from_config(config, attn_implementation="eager").double(), seed)
    folder, kind = path("%s-%d" % (family, seed)), draw.choice(["fp32", "bf16", "shards"])
    model.to(torch.bfloat16 if kind == "bf16" else torch.float32).save_pretrained(folder, max_shard_size="20KB" if kind == "shards" else "5GB")
    random_numbers = np.random.default_rng(seed)
    with h5py.File(path("data.h5"), "w") as data:
        if family in IMAGES:
            inputs = random_numbers.normal(size=(STEPS, ROWS, config.num_channels, 12, 12)).astype(np.float32)
            targets = random_numbers.integers(0, config.num_labels, (STEPS, ROWS))
            data["images"], data["labels"] = inputs, targets.astype(np.int32)
        else:
            tokens = random_numbers.integers(0, config.vocab_size, (STEPS, ROWS, T + 1))
            inputs, targets = tokens[..., :-1], tokens[..., 1:].copy()
            data["batches"] = (tokens if family != "bert" else inputs).astype(np.int32)
        if family == "bert":  # masked tokens alone count
            targets[random_numbers.random(targets.shape) < 0.7] = -100
            data["targets"] = targets.astype(np.int32)
    batches = [(torch.tensor(a).double() if a.dtype == np.float32 else torch.tensor(a), torch.tensor(b)) for a, b in zip(inputs, targets)]
    return folder, "%s %d (%s)" % (family, seed, kind), batches


def trained(folder, name, ranks, *options):
    sequence = [] if name.startswith(IMAGES) else ["--sequence", str(T)]
    passes("import", folder, *sequence, "--microbatch", "2", "--overwrite", "--output", path("m.h5"), *options)
    out = path("run")
    shutil.rmtree(out, ignore_errors=True)
    passes("--input", path("m.h5"), "--data", path("data.h5"), *TRAINING, "--data-seed", DATA_SEED, "--output", out, ranks=ranks)
    train = h5py.File(os.path.join(out, "run.h5"))["train"]
    return out, train["loss"][:], train["gradient_norm"][0]


def exported(out, *options):
    folder = path("exported")
    shutil.rmtree(folder, ignore_errors=True)
    passes("export", "--checkpoint", out, "--format", "safetensors", "--output", folder, *options)
    return folder


def continues(model, out, name, ranks):
    """hapt generate takes the tokens of the largest logits, by transformers with the exported weights, on the ranks of the run."""
    prompts = [[5, 17, 3, 40], [9], list(range(T - 4))]
    done = passes("generate", "--input", path("m.h5"), "--checkpoint", out, "--max-tokens", "4", "--prompt-tokens",
               ";".join(",".join(map(str, prompt)) for prompt in prompts), ranks=ranks)
    lines = [[int(token) for token in line.split(",")] for line in done.stdout.splitlines()]
    check([len(line) for line in lines] == [4, 4, 4], "%s: generated %s" % (name, done.stdout))
    for prompt, line in zip(prompts, lines):
        logits = logits_of(model, (torch.tensor([prompt + line[:3]]),))[0]
        for k, token in enumerate(line):
            best = logits[len(prompt) - 1 + k]
            check(best[token] > best.max() - 1e-4 * best.abs().max(), "%s: token %d behind %s is %d" % (name, k, prompt, token))


def whole_models(family, seed, ranks):
    folder, name, batches = make(family, seed)
    model = loaded(folder, family)
    first = loss_of(model, batches[0]).item()
    expected, norm = train(model, batches)
    out, losses, found = trained(folder, name, ranks)
    worst = np.abs(losses - expected).max()
    again = loaded(exported(out), family)
    ours, theirs = logits_of(again, batches[0]), logits_of(model, batches[0])
    if family != "bert" and family not in IMAGES:
        continues(again, out, name, ranks)
    apart = (ours - theirs).abs().max().item() / theirs.abs().max().item()
    print("%-22s %d ranks: losses within %.1e, norm of the gradients within %.1e, logits of the exported folder within %.1e" %
          (name, ranks, worst, abs(found / norm - 1), apart))
    # Adam makes whole steps of gradients that are nearly 0, such as those of key biases: they differ between fp32 and fp64.
    check(worst < 1e-4, "%s: losses differ by %g" % (name, worst))
    check(abs(found / norm - 1) < 1e-5, "%s: the norm of the gradients is %.8g, not %.8g" % (name, found, norm))
    check(abs(losses[0] / first - 1) < 1e-5, "%s: the first loss is %g, not %g" % (name, losses[0], first))
    check(apart < 1e-3, "%s: logits differ by %g" % (name, apart))


def dropouts(family, seed, ranks):
    """Dropout is at the places of transformers' modules."""
    folder, name, batches = make(family, seed)
    options = ["resid_pdrop", "embd_pdrop"] if family == "gpt2" else ["hidden_dropout_prob"]
    model = with_masks(loaded(folder, family, **dict.fromkeys(options, DROPPED)))
    expected, norm = train(model, batches)
    count = Masks.calls
    out, losses, found = trained(folder, name, ranks, "--dropout", str(DROPPED))
    worst = np.abs(losses - expected).max()
    print("%-22s %d ranks: %d dropouts, losses within %.1e" % (name, ranks, count, worst))
    check(count > (0 if family == "dinov2" else 4) and worst < 1e-4, "%s: %d dropouts, losses differ by %g" % (name, count, worst))
    check(abs(found / norm - 1) < 1e-5, "%s: dropout, the norm of the gradients is %.8g, not %.8g" % (name, found, norm))


def packed(family, seed, ranks):
    """Rows of several documents: transformers takes positions that begin anew as theirs, and masks the others."""
    folder, name, batches = make(family, seed)
    tokens = np.random.default_rng(seed).integers(0, 64, (STEPS, ROWS, T + 1))
    tokens[np.random.default_rng(seed + 1).random(tokens.shape) < 0.15] = 3
    with h5py.File(path("data.h5"), "w") as data:
        data["batches"] = tokens.astype(np.int32)
    ends = tokens[..., :-1] == 3
    places = np.zeros_like(tokens[..., :-1])
    for i in range(1, T):
        places[..., i] = np.where(ends[..., i - 1], 0, places[..., i - 1] + 1)
    targets = np.where(ends, -100, tokens[..., 1:])
    batches = [tuple(map(torch.tensor, batch)) for batch in zip(tokens[..., :-1], targets, places)]
    model = loaded(folder, family)
    apart = abs(loss_of(model, batches[0]).item() - loss_of(model, batches[0][:2]).item())
    expected, norm = train(model, batches)
    out, losses, found = trained(folder, name, ranks, "--document-end", "3")
    worst = np.abs(losses - expected).max()
    print("%-22s %d ranks: documents, losses within %.1e; they change the first loss by %.1e" % (name, ranks, worst, apart))
    check(worst < 1e-4 and apart > 1e-3, "%s: documents, losses differ by %g; of one document by %g" % (name, worst, apart))
    check(abs(found / norm - 1) < 1e-5, "%s: documents, the norm of the gradients is %.8g, not %.8g" % (name, found, norm))


def adapters(family, seed, ranks):
    """The adapters that hapt begins with are exported after a step of rate 0; PEFT trains these on."""
    folder, name, batches = make(family, seed)
    lora = ["--lora", "rank=4,alpha=6,dropout=0.3,target=q_proj,v_proj,down_proj"]
    passes("import", folder, "--sequence", str(T), "--microbatch", "2", "--overwrite", "--output", path("m.h5"), *lora)
    out = path("still")
    shutil.rmtree(out, ignore_errors=True)
    passes("--input", path("m.h5"), "--data", path("data.h5"), "--microbatches", "2", "--steps", "1", "--learning-rate", "0",
        "--checkpoint-every", "1", "--profile-seconds", "1", "--output", out)
    model = with_masks(PeftModel.from_pretrained(loaded(folder), exported(out), is_trainable=True).double())
    expected, norm = train(model, batches)
    check(Masks.calls > 4, "%s: PEFT has %d dropouts" % (name, Masks.calls))
    out, losses, found = trained(folder, name, ranks, *lora)
    check(abs(found / norm - 1) < 1e-5, "%s: LoRA, the norm of the gradients is %.8g, not %.8g" % (name, found, norm))
    worst = np.abs(losses - expected).max()
    theirs = logits_of(model, batches[0])
    alone = logits_of(PeftModel.from_pretrained(loaded(folder), exported(out)).double(), batches[0])
    whole = loaded(exported(out, "--merge"))
    merged = logits_of(whole, batches[0])
    continues(whole, out, name, ranks)
    apart = max((x - theirs).abs().max().item() for x in (alone, merged)) / theirs.abs().max().item()
    print("%-22s %d ranks: LoRA, losses within %.1e of PEFT, logits within %.1e" % (name, ranks, worst, apart))
    check(worst < 1e-5, "%s: LoRA, losses differ by %g" % (name, worst))
    check(apart < 1e-4, "%s: LoRA, logits differ by %g" % (name, apart))


def resnets(ranks):
    """torchvision evaluates an exported ResNet, by its running statistics, to the loss of hapt evaluate. Needs torchvision."""
    try:
        from torchvision.models.resnet import Bottleneck, ResNet
    except ImportError as missing:
        print("no ResNet of torchvision: %s" % missing)
        return
    draw = np.random.default_rng(SEED)
    for name, shape in (("data", (4, 8)), ("held", (1, 11))):
        labels = draw.integers(0, 7, shape).astype(np.int32)
        with h5py.File(path(name + ".h5"), "w") as data:
            data["images"] = (draw.normal(size=(*shape, 3, 48, 48)) + 0.3 * labels[..., None, None, None]).astype(np.float32)
            data["labels"] = labels
    with h5py.File(path("held.h5")) as data:
        images, labels = torch.tensor(data["images"][0]).double(), torch.tensor(data["labels"][0]).long()
    passes("model", "resnet", "--stages", "1,2,1,1", "--width", "64", "--image", "48", "--classes", "7", "--microbatch", "4", "--overwrite", "--output",
           path("m.h5"))
    shutil.rmtree(path("run"), ignore_errors=True)
    passes("--input", path("m.h5"), "--data", path("data.h5"), "--validation-data", path("held.h5"), "--microbatches", "2", "--steps", "4",
           "--learning-rate", "1e-4", "--batch-norm-momentum", "0.4", "--profile-seconds", "1", "--output", path("run"), ranks=ranks)
    model = ResNet(Bottleneck, [1, 2, 1, 1], num_classes=7).double().eval()
    model.load_state_dict(load_file(os.path.join(exported(path("run")), "model.safetensors")))
    with torch.no_grad():
        wanted = torch.nn.functional.cross_entropy(model(images), labels).item()
    with h5py.File(path("run", "run.h5")) as run:
        found = run["train/validation_loss"][-1]
    print("ResNet, %d ranks: validation loss %.6f, of torchvision %.6f" % (ranks, found, wanted))
    check(abs(found / wanted - 1) < 1e-5, "ResNet: validation loss %g, of torchvision %g" % (found, wanted))


FAMILIES = ["bert", *IMAGES, "gemma2", "gemma3", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]
for i, family in enumerate(FAMILIES):
    for k in range(5 if LONG else 1):
        whole_models(family, SEED + k, (i + k) % 4 + 1)
for i, family in enumerate(["bert", *IMAGES, "gpt2"]):
    for k in range(3 if LONG else 1):
        dropouts(family, SEED + k, (i + k) % 4 + 1)
for i, family in enumerate(["gemma2", "gemma3", "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"] if LONG else ["gpt2", "gemma3"]):
    packed(family, SEED + 200, i % 4 + 1)
for i, family in enumerate(["llama", "qwen3", "gemma2"] if LONG else ["qwen3"]):
    adapters(family, SEED + 100, i + 2)
resnets(2)
end()
