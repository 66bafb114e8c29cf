/* `hapt model FAMILY`: writes a model file. */
#include "hapt/command.h"
#include "hapt/model.h"
#include "hapt/progress.h"
#include "model_print.h"
#include "outputs.h"

const char hapt_command_model_help[] =
    "Families:\n"
    "  gpt         GPT-2: learned positions, pre-LN blocks, causal attention, tanh GELU, tied or untied output\n"
    "              layer; GPT-2's parameter names, linear layers are [in][out]\n"
    "  bert        post-LN encoder, erf GELU, a masked-language-model head tied to the word embeddings\n"
    "  bert-moe    bert with --experts experts in every second feed-forward layer\n"
    "  llama       RMS norm, rotary positions, --kv-heads shared by groups of heads, SwiGLU, no biases, an output\n"
    "              layer of its own unless --tied-embeddings yes\n"
    "  vit         images in patches, a class token, pre-LN encoder, erf GELU\n"
    "  vgg         3x3 convolutions, stages that end with a 2x2 max pool, three dense layers. --image, --channels,\n"
    "              --classes; --width of the first stage; --hidden of the dense layers; --stages: convolutions per\n"
    "              stage; --pool 7: averages over 7 x 7 regions before the dense layers\n"
    "  resnet      bottleneck blocks; --stages: blocks per stage; training normalises by the statistics\n"
    "              of a whole microbatch, evaluation by running ones (--running-statistics)\n"
    "bert and bert-moe are tied unless --tied-embeddings no is given. bert, bert-moe, llama and vit have Hugging\n"
    "Face's parameter names and its [out][in]; vgg and resnet have torchvision's names.\n"
    "\n"
    "Named models set the options of their family; an option that is given takes precedence:\n"
    "  bert-base       109512762 parameters   12 layers, hidden  768, 12 heads, sequence 512\n"
    "  bert-moe-base   307891770 parameters   the same with 8 experts in every second layer, 2 per token\n"
    "  gpt2-124m       124439808 parameters   12 layers, hidden  768, 12 heads\n"
    "  gpt-15b       15365258240 parameters   48 layers, hidden 5120, 40 heads\n"
    "  gpt-30b       29967078400 parameters   48 layers, hidden 7168, 56 heads\n"
    "  gpt-39b       39079927808 parameters   48 layers, hidden 8192, 64 heads\n"
    "  llama-2-7b     6738415616 parameters   32 layers, hidden 4096, 32 heads, sequence 4096, bf16\n"
    "  llama-3-8b     8030261248 parameters   32 layers, hidden 4096, 32 heads, 8 kv-heads, sequence 8192, bf16\n"
    "  vit-base         86567656 parameters   12 layers, hidden  768, 12 heads, 224 pixels, patch 16, 1000 classes\n"
    "  vgg19           143667240 parameters   stages of 2, 2, 4, 4, 4, images of 224 pixels, 1000 classes\n"
    "  vgg19-cifar10   139611210 parameters   images of 32 pixels, pooled to 7 x 7, 10 classes: HAP's (table 1)\n"
    "  resnet50         25557032 parameters   stages of 3, 4, 6, 3, images of 224 pixels, 1000 classes\n"
    "gpt-15b, -30b and -39b are HAPT's models (section 6), in bf16; a step has 128 microbatches of 8 rows.\n"
    "\n"
    "Training options given here become the file's defaults for every run. --weights W.h5 copies its\n"
    "/parameters/NAME as initial values (otherwise seed and name determine them); --data D.h5 copies its data (hapt "
    "help\n"
    "data).\n"
    "\n"
    "The model file (HDF5, format \"hapt-model\", version 1) holds the forward graph as flat tables. Readers check\n"
    "it and derive the backward graph. Other programs (tools/hapt.py) write version 2. It may leave out shapes (all\n"
    "0) with dtypes (\"\") of activations, and outputs of an operator after its first (-1).\n"
    "  /                           attributes family, loss (name of the loss tensor), microbatch, dtype, seed;\n"
    "                              sequence and vocab, or classes (models of images)\n"
    "  /settings/name, value       [n] text: hyper-parameters\n"
    "  /training/option, value     [n] text: defaults of training options\n"
    "  /tensors/name, kind, role, dtype, init\n"
    "                              [t] text; kinds: input, parameter, activation; roles of inputs: tokens, targets,\n"
    "                              images, labels, row_keys, training, positions, field, loss_scale; dtypes: fp32,\n"
    "                              bf16, fp16, int32; inits: zero, one, normal\n"
    "  /tensors/shape [t][5]       sizes, 0 after the last dimension; for a whole microbatch\n"
    "  /tensors/init_std [t]       standard deviation of normal initial values\n"
    "  /tensors/trainable [t]      1: the optimizer updates this parameter\n"
    "  /operators/name, type [n]   text; an operator comes after the operators that produce its inputs\n"
    "  /operators/input [n][10]    rows of /tensors, -1: none\n"
    "  /operators/output [n][4]    rows of /tensors, -1 after the last\n"
    "  /operators/integer, real [n][6]\n"
    "                              attributes, e.g. heads and causal of attention, epsilon of layer_norm\n"
    "  /parameters/NAME            optional: initial values, fp32\n"
    "  /files/NAME                 optional: bytes of files that hapt export copies (hapt import)\n"
    "  /tokens, /batches, /batches/NAME, /targets, /images, /labels, /mean, /std\n"
    "                              optional: data (hapt help data)\n";

/* Passes over held-out rows normalise by running statistics, so a user should know if those are not the data's. */
static enum hapt_status warn_of_statistics(const struct hapt_env *env, const struct hapt_model *model,
                                           const char *weights)
{
    int missing, still = 0;
    HAPT_TRY(hapt_model_missing_statistics(model, weights, &missing));
    if (missing > 0)
        hapt_warn(env, "%s lacks %d running statistics, which begin at 0 and 1: train before you evaluate\n", weights,
                  missing);
    for (int t = 0; t < model->graph->tensor_count; t++)
        still += model->graph->tensor[t].statistic && !model->graph->tensor[t].trainable;
    if (still > 0)
        hapt_warn(env,
                  "%d running statistics of batch norms keep their initial values (--trainable or --freeze leaves them "
                  "out, or nothing below them trains), and evaluation normalises by them; --running-statistics no "
                  "evaluates by the statistics of microbatches\n",
                  still);
    return HAPT_OK;
}

static enum hapt_status write_model(const struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model;
    const char *path = hapt_config_text(config, "output");
    if (hapt_config_word_count(config) != 1) {
        return hapt_fail(HAPT_ERR_USAGE, "hapt model gpt --output model.h5",
                         "hapt model needs one family or named model");
    }
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "add --output model.h5", "hapt model has no file to write");
    const char *family;
    HAPT_TRY(hapt_model_preset(hapt_config_word(config, 0), config, &family));
    HAPT_TRY(hapt_model_build(family, config, arena, &model));
    HAPT_TRY(hapt_model_save(model, hapt_config_text(config, "weights"), hapt_config_text(config, "data"), path));
    HAPT_TRY(warn_of_statistics(env, model, hapt_config_text(config, "weights")));
    return hapt_model_print(env, model, path);
}

enum hapt_status hapt_command_model(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-model"}));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "writing the model", 0);
    if (env->world_rank == 0) status = write_model(env, config, arena); /* one rank writes the file */
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}
