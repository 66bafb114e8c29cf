"""The smallest forms of models that tests/coverage exports: NAME: a function that returns (model, inputs, targets). The names are those of
Pfeife's table 3 (TorchBench). bilinear, diffusion, gpt_neox, opt, unet_named and unet_transposed stand there in addition. Residual networks have one or two
blocks in each stage. timm adds three models."""
import torch
import torchvision.models as vision
import transformers as hf

try:
    import timm
    from timm.models import nfnet, resnest, vovnet
except ImportError:  # its models are left out
    timm = None

from networks import (BertPytorch, Diffusion, Generator, GroupNorms, Painter, PhlippeResnet, Recommender, Resized, UNet, lennard_jones, phlippe_densenet)
from steps import CLASSES, FIRST_TOKEN, TOKENS, VOCABULARY

ROWS = 2
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
         "tie_word_embeddings": False}  # a tied table adds its gradients in another order in each plan
QUIET = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0, "max_position_embeddings": 20}


def images(size, rows):
    return torch.randn(rows, 3, size, size), torch.randint(0, CLASSES, (rows,))


def tokens():
    return torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, TOKENS)), torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, TOKENS))


def without_dropout(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def of_images(make, size=32, rows=ROWS):
    """Batch norms over few values magnify rounding errors: such models need more rows."""
    return lambda: (without_dropout(make().train()),) + images(size, rows)


def of_tokens(make):
    return lambda: (without_dropout(make().train()),) + tokens()


def small_classifier(make, inside):
    """With a small classifier: its first matrix has most of the weights."""
    def made():
        model = make()
        model.classifier = torch.nn.Sequential(torch.nn.Linear(inside, 32), torch.nn.ReLU(inplace=True), torch.nn.Linear(32, CLASSES))
        return model
    return made


def gpt2():
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=32, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0,
                                            attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))


def distilbert():
    return hf.DistilBertForMaskedLM(hf.DistilBertConfig(vocab_size=VOCABULARY, max_position_embeddings=TOKENS, n_layers=2, n_heads=2, dim=32,
                                                        hidden_dim=64, dropout=0, attention_dropout=0, tie_word_embeddings=False))


def opt():
    return hf.OPTForCausalLM(hf.OPTConfig(**SMALL, ffn_dim=64, dropout=0, word_embed_proj_dim=32, max_position_embeddings=TOKENS, use_cache=False))


def efficientnet():
    block = vision.efficientnet.MBConvConfig
    return vision.EfficientNet([block(1, 3, 1, 16, 8, 1), block(6, 3, 2, 8, 16, 1), block(6, 5, 2, 16, 24, 1)], 0.0, 0.0, num_classes=CLASSES)


class Roberta(torch.nn.Module):
    """With positions given: RoBERTa counts the tokens that are no padding, of which there is none here."""

    def __init__(self):
        super().__init__()
        self.model = hf.RobertaForMaskedLM(hf.RobertaConfig(**SMALL, **QUIET, pad_token_id=1))

    def forward(self, tokens):
        return self.model(tokens, position_ids=torch.arange(2, TOKENS + 2)[None])


def gpt2_large():
    return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=48, n_layer=3, n_head=3, resid_pdrop=0, embd_pdrop=0,
                                            attn_pdrop=0, use_cache=False, bos_token_id=0, eos_token_id=0, tie_word_embeddings=False))


def opacus_cifar10():
    return vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES, norm_layer=lambda width: torch.nn.GroupNorm(16, width))


def timm_nfnet():
    """Its residual branches begin at zero; here they begin at one half, so that all weights have gradients."""
    model = nfnet.NormFreeNet(nfnet.NfCfg(depths=(1, 1, 1, 1), channels=(16, 32, 32, 32), stem_type="3x3", stem_chs=8, group_size=8, bottle_ratio=0.25,
                                          extra_conv=True, num_features=64, act_layer="gelu", attn_layer="se", attn_kwargs={"rd_ratio": 0.5}),
                              num_classes=CLASSES, drop_rate=0.0)
    for name, weight in model.named_parameters():
        if name.endswith("skipinit_gain"):
            torch.nn.init.constant_(weight, 0.5)
    return model


def timm_resnest():
    return resnest.ResNet(resnest.ResNestBottleneck, [1, 1, 1, 1], num_classes=CLASSES, base_width=16, stem_type="deep", stem_width=8, avg_down=True,
                          block_args={"radix": 2, "avd": True, "avd_first": False})


def timm_vovnet():
    return vovnet.VovNet({"stem_chs": [8, 8, 8], "stage_conv_chs": [8] * 4, "stage_out_chs": [16] * 4, "layer_per_block": 2, "block_per_stage": [1] * 4,
                          "residual": True, "depthwise": False, "attn": "ese"}, num_classes=CLASSES)


def of_pixels(make, size, rows):
    return lambda: (make().train(), torch.randn(rows, 3, size, size), torch.randint(0, CLASSES, (rows, size, size)))


def noise(rows):
    return lambda: (Generator().train(), torch.randn(rows, 12, 1, 1), torch.randint(0, CLASSES, (rows, 32, 32)))


T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2, "dropout_rate": 0,
      "relative_attention_num_buckets": 8, "relative_attention_max_distance": 16, "use_cache": False, "tie_word_embeddings": False}


def of_two_texts(make):
    """An encoder and a decoder, of texts of unequal lengths."""
    def integers(length):
        return torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, length))
    return lambda: (without_dropout(make().train()), {"input_ids": integers(12), "decoder_input_ids": integers(TOKENS)}, integers(TOKENS))


def bart():
    return hf.BartForConditionalGeneration(hf.BartConfig(vocab_size=VOCABULARY, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
                                                         decoder_attention_heads=2, encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0, attention_dropout=0,
                                                         max_position_embeddings=20, use_cache=False, tie_word_embeddings=False))


def whisper():
    model = hf.WhisperForConditionalGeneration(hf.WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=8, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=64, decoder_ffn_dim=64, dropout=0, attention_dropout=0, activation_dropout=0, max_source_positions=12, max_target_positions=TOKENS,
        use_cache=False, tie_word_embeddings=False, pad_token_id=0, bos_token_id=1, eos_token_id=1, decoder_start_token_id=1))
    heard = torch.randn(ROWS, 8, 24)
    return without_dropout(model.train()), {"input_features": heard, "decoder_input_ids": torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, TOKENS))}, \
        torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, TOKENS))


def dlrm():
    categories = {"sparse_%d" % k: torch.randint(0, VOCABULARY, (8, 4)) for k in range(3)}
    return Recommender().train(), {"dense": torch.randn(8, 13), **categories}, torch.randn(8, 1)


def diffusion():
    return Diffusion().train(), {"noisy": torch.randn(ROWS, 4, 16, 16), "time": torch.randn(ROWS, 1), "text": torch.randint(FIRST_TOKEN, VOCABULARY, (ROWS, 12))}, \
        torch.randn(ROWS, 4, 16, 16)


def named_pixels():
    """As many classes as pixels in a row of the image, so that a mistaken axis of classes would fit."""
    model = UNet((8, 16), False)
    model.head = torch.nn.Conv2d(8, VOCABULARY, 1)
    return model.train(), {"x": torch.randn(4, 3, 16, VOCABULARY)}, torch.randint(FIRST_TOKEN, VOCABULARY, (4, 16, VOCABULARY))


MODELS = {
    "alexnet": of_images(small_classifier(vision.alexnet, 256 * 36), 64),
    "BERT_pytorch": of_tokens(BertPytorch),
    "dcgan": noise(4),
    "densenet121": of_images(lambda: vision.DenseNet(8, (2, 2), 16, num_classes=CLASSES), 64, 8),
    "hf_Albert": of_tokens(lambda: hf.AlbertForMaskedLM(hf.AlbertConfig(**SMALL, **QUIET, embedding_size=16))),
    "hf_Bert": of_tokens(lambda: hf.BertForMaskedLM(hf.BertConfig(**SMALL, **QUIET))),
    "hf_Bert_large": of_tokens(lambda: hf.BertForMaskedLM(hf.BertConfig(**{**SMALL, "num_hidden_layers": 3, "num_attention_heads": 4}, **QUIET))),
    "hf_BigBird": of_tokens(lambda: hf.BigBirdForMaskedLM(hf.BigBirdConfig(**SMALL, **QUIET, attention_type="original_full", use_cache=False))),
    "hf_DistilBert": of_tokens(distilbert),
    "hf_GPT2": of_tokens(gpt2),
    "hf_GPT2_large": of_tokens(gpt2_large),
    "hf_Roberta_base": of_tokens(Roberta),
    "functorch_dp_cifar10": of_images(GroupNorms, 16),
    "gpt_neox": of_tokens(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SMALL, max_position_embeddings=TOKENS, use_cache=False))),
    "llama": of_tokens(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**SMALL, use_cache=False))),
    "hf_T5": of_two_texts(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**T5))),
    "hf_T5_base": of_two_texts(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**{**T5, "num_layers": 3, "feed_forward_proj": "gated-gelu"}))),
    "hf_T5_large": of_two_texts(lambda: hf.T5ForConditionalGeneration(hf.T5Config(**{**T5, "num_heads": 4, "d_kv": 8, "num_decoder_layers": 3}))),
    "hf_Bart": of_two_texts(bart),
    "hf_Whisper": whisper,
    "dlrm": dlrm,
    "diffusion": diffusion,
    "LearningToPaint": lambda: (Painter().train(), torch.randn(8, 9, 32, 32), torch.randint(0, CLASSES, (8,))),
    "lennard_jones": lambda: (lennard_jones().train(), torch.randn(16, 1, 1, 1), torch.randint(0, CLASSES, (16,))),
    "mnasnet1_0": of_images(lambda: vision.MNASNet(0.25, num_classes=CLASSES, dropout=0.0), 96, 16),
    "mobilenet_v2": of_images(lambda: vision.MobileNetV2(CLASSES, 0.25, [[1, 16, 1, 1], [6, 24, 1, 2], [6, 32, 1, 2]], dropout=0.0), 96, 8),
    "mobilenet_v3_large": of_images(lambda: vision.mobilenet_v3_large(num_classes=CLASSES, width_mult=0.25, dropout=0.0), 64, 16),
    "opacus_cifar10": of_images(opacus_cifar10, 32, 8),
    "opt": of_tokens(opt),
    "phlippe_densenet": of_images(phlippe_densenet, 16, 8),
    "phlippe_resnet": of_images(PhlippeResnet, 16, 8),
    "bilinear": of_images(Resized, 9),
    "pytorch_unet": of_pixels(lambda: UNet((8, 16, 32), True), 16, 4),
    "unet_named": named_pixels,
    "unet_transposed": of_pixels(lambda: UNet((8, 16), False), 16, 4),
    "resnet152": of_images(lambda: vision.ResNet(vision.resnet.Bottleneck, [1, 2, 1, 1], num_classes=CLASSES), 64, 16),
    "resnet18": of_images(lambda: vision.ResNet(vision.resnet.BasicBlock, [1, 1, 1, 1], num_classes=CLASSES), 64, 16),
    "resnet50": of_images(lambda: vision.ResNet(vision.resnet.Bottleneck, [1, 1, 1, 1], num_classes=CLASSES), 64, 16),
    "resnext50_32x4d": of_images(lambda: vision.ResNet(vision.resnet.Bottleneck, [1, 1, 1, 1], CLASSES, groups=4, width_per_group=8), 96, 16),
    "shufflenet_v2_x1_0": of_images(lambda: vision.ShuffleNetV2([1, 1, 1], [8, 16, 32, 64, 64], CLASSES), 64, 16),
    "squeezenet1_1": of_images(lambda: vision.squeezenet1_1(num_classes=CLASSES), 64),
    "timm_efficientnet": of_images(efficientnet, 64, 16),
    "timm_regnet": of_images(lambda: vision.RegNet(vision.regnet.BlockParams([1, 1], [16, 32], [8, 8], [1, 1], [2, 2], 0.25), CLASSES, 8), 64, 8),
    "timm_vision_transformer": of_images(lambda: vision.VisionTransformer(32, 8, 2, 2, 32, 64, num_classes=CLASSES)),
    "timm_vision_transformer_large": of_images(lambda: vision.VisionTransformer(32, 8, 3, 4, 64, 128, num_classes=CLASSES)),
    "timm_nfnet": of_images(timm_nfnet, 64, 8),
    "timm_resnest": of_images(timm_resnest, 64, 16),
    "timm_vovnet": of_images(timm_vovnet, 124, 8),  # a size of which each pooling covers all pixels
    "vgg16": of_images(small_classifier(vision.vgg11_bn, 512 * 49), 32, 8),
}
if timm is None:
    MODELS = {name: make for name, make in MODELS.items() if name not in ("timm_nfnet", "timm_resnest", "timm_vovnet")}
