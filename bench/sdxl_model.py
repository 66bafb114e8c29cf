"""Stable Diffusion XL (arXiv 2307.01952) in training, for hapt_export.py: its U-Net behind a frozen encoder of images and two frozen encoders
of texts. Shapes alone, no weights: to plan with. Needs diffusers and transformers, with the shapes of stabilityai/stable-diffusion-xl-base-1.0.

Named inputs: pixels [3][1024][1024]; noise [4][128][128], the targets as well; keep, blur [1]: the shares of image and noise at `time` [1];
first, second [77]: the tokens of each encoder; last [77]: 1 at a text's last token, else 0; sizes [6]: of the image and its part."""
import os

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import hapt_export

SMALL = bool(os.environ.get("HAPT_BENCH_SMOKE"))  # the same graph in its smallest form
PIXELS, WORDS, VOCABULARY = (64, 8, 64) if SMALL else (1024, 77, 49408)
WIDTHS, HEAD = ((32, 64, 64), 32) if SMALL else ((320, 640, 1280), 64)
BLOCKS = (1, 1, 2) if SMALL else (1, 2, 10)  # transformer blocks of each resolution
FIRST, SECOND = ((32, 2, 2), (64, 2, 2)) if SMALL else ((768, 12, 12), (1280, 32, 20))  # width, layers, heads
TIME, LATENT = (32, 4) if SMALL else (256, 4)


def text_encoder(make, shape, activation):
    width, layers, heads = shape
    return make(CLIPTextConfig(vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
                               num_attention_heads=heads, max_position_embeddings=WORDS, hidden_act=activation, projection_dim=width,
                               attn_implementation="sdpa"))


class StableDiffusionXL(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.unet = UNet2DConditionModel(
            sample_size=PIXELS // 8, in_channels=LATENT, out_channels=LATENT, block_out_channels=WIDTHS, layers_per_block=2,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), transformer_layers_per_block=BLOCKS,
            cross_attention_dim=FIRST[0] + SECOND[0], attention_head_dim=tuple(width // HEAD for width in WIDTHS), use_linear_projection=True,
            addition_embed_type="text_time", addition_time_embed_dim=TIME, projection_class_embeddings_input_dim=6 * TIME + SECOND[0])
        levels = (32, 32, 64, 64) if SMALL else (128, 256, 512, 512)
        self.images = AutoencoderKL(in_channels=3, out_channels=3, latent_channels=LATENT, block_out_channels=levels, layers_per_block=2,
                                    down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
                                    scaling_factor=0.13025, sample_size=PIXELS)
        self.first = text_encoder(CLIPTextModel, FIRST, "quick_gelu")
        self.second = text_encoder(CLIPTextModelWithProjection, SECOND, "gelu")
        for frozen in (self.images, self.first, self.second):
            frozen.requires_grad_(False)

    def forward(self, pixels, noise, keep, blur, time, first, second, last, sizes):
        latent = self.images.encode(pixels).latent_dist.mode() * self.images.config.scaling_factor
        noisy = latent * keep[:, :, None, None] + noise * blur[:, :, None, None]
        one = self.first(first, output_hidden_states=True).hidden_states[-2]
        other = self.second(second, output_hidden_states=True)
        whole = self.second.text_model.final_layer_norm(other.hidden_states[-1]) if hasattr(self.second, "text_model") else other.last_hidden_state
        pooled = self.second.text_projection((whole * last[:, :, None]).sum(1))
        return self.unet(noisy, time[:, 0], torch.cat([one, other.hidden_states[-2]], -1),
                         added_cond_kwargs={"text_embeds": pooled, "time_ids": sizes}).sample


def model():
    with hapt_export.without_values():
        made = StableDiffusionXL()
    rows, latent = 1, PIXELS // 8
    noise = torch.randn(rows, LATENT, latent, latent)
    text = torch.randint(2, VOCABULARY, (2, rows, WORDS))
    inputs = {"pixels": torch.randn(rows, 3, PIXELS, PIXELS), "noise": noise, "keep": torch.full((rows, 1), 0.8), "blur": torch.full((rows, 1), 0.6),
              "time": torch.full((rows, 1), 400.0), "first": text[0], "second": text[1], "last": torch.eye(WORDS)[-rows:],
              "sizes": torch.full((rows, 6), float(PIXELS))}
    return made.train(), inputs, noise
