/*
 * Named models: a family, and defaults of its options. `hapt help model` lists them.
 *
 * HAP table 1: BERT-Base, and BERT-MoE, where experts replace every second feed-forward (one expert per device in the
 * paper: --experts). HAPT section 6, "Models": GPT with 48 layers at three widths, sequence 1024, global batch of 1024
 * rows; heads of 128 columns and GPT-2's vocabulary. bf16 and 128 microbatches of 8 rows are this project's choice:
 * they fit 32 + 32 GPUs with 40 and 32 GB.
 *
 * HAP table 1 gives VGG19 133 million parameters. This number is reached with 2^20 per million and CIFAR-10's 10
 * classes. CIFAR-10 images have 32 x 32 pixels; five pools leave one, which the pool to 7x7 repeats.
 */
#include <string.h>

#include "hapt/model.h"

struct preset {
    const char *name, *family;
    struct hapt_model_setting option[10]; /* other options keep the option table's defaults */
};

/* clang-format off: tables */
#define GPT_OF_THE_PAPER(hidden, heads)                                                                   \
    {                                                                                                     \
        {"layers", "48"}, {"hidden", hidden}, {"heads", heads}, {"sequence", "1024"}, {"vocab", "50257"}, \
            {"dtype", "bf16"}, {"microbatch", "8"},                                                       \
        {                                                                                                 \
            "microbatches", "128"                                                                         \
        }                                                                                                 \
    }

#define BERT_BASE                                                              \
    {"layers", "12"}, {"hidden", "768"}, {"heads", "12"}, {"sequence", "512"}, \
    {                                                                          \
        "vocab", "30522"                                                       \
    }
/* clang-format on */

static const struct preset presets[] = {
    {"bert-base", "bert", {BERT_BASE}},
    {"bert-moe-base", "bert-moe", {BERT_BASE, {"experts", "8"}, {"top-k", "2"}}},
    {"gpt2-124m",
     "gpt",
     {{"layers", "12"}, {"hidden", "768"}, {"heads", "12"}, {"sequence", "1024"}, {"vocab", "50257"}}},
    {"gpt-15b", "gpt", GPT_OF_THE_PAPER("5120", "40")},
    {"gpt-30b", "gpt", GPT_OF_THE_PAPER("7168", "56")},
    {"gpt-39b", "gpt", GPT_OF_THE_PAPER("8192", "64")},
    {"vgg19",
     "vgg",
     {{"stages", "2,2,4,4,4"}, {"width", "64"}, {"hidden", "4096"}, {"image", "224"}, {"classes", "1000"}}},
    {"vgg19-cifar10",
     "vgg",
     {{"stages", "2,2,4,4,4"}, {"width", "64"}, {"hidden", "4096"}, {"image", "32"}, {"pool", "7"}, {"classes", "10"}}},
    {"resnet50", "resnet", {{"stages", "3,4,6,3"}, {"width", "64"}, {"image", "224"}, {"classes", "1000"}}},
    {"llama-2-7b",
     "llama",
     {{"layers", "32"},
      {"hidden", "4096"},
      {"heads", "32"},
      {"ffn", "11008"},
      {"sequence", "4096"},
      {"vocab", "32000"},
      {"dtype", "bf16"},
      {"microbatch", "1"}}},
    {"llama-3-8b",
     "llama",
     {{"layers", "32"},
      {"hidden", "4096"},
      {"heads", "32"},
      {"kv-heads", "8"},
      {"ffn", "14336"},
      {"sequence", "8192"},
      {"vocab", "128256"},
      {"rope-base", "500000"},
      {"dtype", "bf16"},
      {"microbatch", "1"}}},
    {"vit-base",
     "vit",
     {{"layers", "12"},
      {"hidden", "768"},
      {"heads", "12"},
      {"image", "224"},
      {"patch", "16"},
      {"classes", "1000"},
      {"microbatch", "32"}}},
};

enum { PRESETS = sizeof presets / sizeof presets[0] };

const char *hapt_model_preset_name(int index)
{
    return index < PRESETS ? presets[index].name : NULL;
}

enum hapt_status hapt_model_preset(const char *name, struct hapt_config *config, const char **family)
{
    *family = name;
    for (int i = 0; i < PRESETS; i++) {
        if (strcmp(name, presets[i].name) != 0) continue;
        *family = presets[i].family;
        for (size_t k = 0; k < sizeof presets[i].option / sizeof presets[i].option[0]; k++) {
            const struct hapt_model_setting *option = &presets[i].option[k];
            if (option->name) HAPT_TRY(hapt_config_preset(config, option->name, option->value));
        }
    }
    return HAPT_OK;
}
