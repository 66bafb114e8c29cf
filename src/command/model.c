/* `hapt model FAMILY`: writes a model file. */
#include <inttypes.h>
#include <jansson.h>
#include <stdio.h>

#include "hapt/command.h"
#include "hapt/model.h"
#include "hapt/progress.h"
#include "outputs.h"

const char hapt_command_model_help[] =
    "Families: gpt (GPT-2: learned positions, pre-LN blocks, causal attention, tanh GELU, tied or untied output "
    "layer;\n"
    "parameters carry GPT-2's names, linear layers are [in][out]).\n"
    "bert (post-LN encoder, erf GELU, a masked-language-model head tied to the word embeddings) and bert-moe (every "
    "second\n"
    "feed-forward a mixture of --experts), tied unless --tied-embeddings no, carry Hugging Face's names and its "
    "[out][in].\n"
    "llama (RMS norm, rotary positions, --kv-heads shared by groups of heads, SwiGLU, no biases, an output layer of "
    "its own\n"
    "unless --tied-embeddings yes) and vit (images in patches, a class token, pre-LN encoder, erf GELU) do so, too.\n"
    "vgg (3x3 convolutions, stages ended by 2x2 max pools, three dense layers; --image, --channels, --classes, --width "
    "of\n"
    "the first stage, --hidden of the dense layers, --stages: convolutions of each, --pool: means of 7 x 7 windows in "
    "front of\n"
    "the dense layers, say) and resnet (bottleneck blocks, --stages:\n"
    "blocks of each; batch norm by the statistics of a whole microbatch, no running averages): torchvision's names.\n"
    "\n"
    "Named models set the options of their family that are not given (one that is given rules):\n"
    "  bert-base       109512762 parameters   12 layers, hidden  768, 12 heads, sequence 512\n"
    "  bert-moe-base   307891770 parameters   the same with 8 experts in every second layer, 2 for a token\n"
    "  gpt2-124m       124439808 parameters   12 layers, hidden  768, 12 heads\n"
    "  gpt-15b       15365258240 parameters   48 layers, hidden 5120, 40 heads\n"
    "  gpt-30b       29967078400 parameters   48 layers, hidden 7168, 56 heads\n"
    "  gpt-39b       39079927808 parameters   48 layers, hidden 8192, 64 heads\n"
    "  llama-2-7b     6738415616 parameters   32 layers, hidden 4096, 32 heads, sequence 4096, bf16\n"
    "  llama-3-8b     8030261248 parameters   32 layers, hidden 4096, 32 heads in 8 groups, sequence 8192, bf16\n"
    "  vit-base         86567656 parameters   12 layers, hidden  768, 12 heads, images of 224 in patches of 16, 1000 "
    "classes\n"
    "  vgg19           143667240 parameters   stages of 2, 2, 4, 4, 4, images of 224 pixels, 1000 classes\n"
    "  vgg19-cifar10   139611210 parameters   images of 32 pixels, pooled to 7 x 7, 10 classes: HAP's (table 1)\n"
    "  resnet50         25557032 parameters   stages of 3, 4, 6, 3, images of 224 pixels, 1000 classes\n"
    "gpt-15b, -30b and -39b are HAPT's (section 6) in bf16, a step of 128 microbatches of 8 rows.\n"
    "\n"
    "Training options given here become the file's defaults for every run of it. --weights W.h5 copies its\n"
    "/parameters/NAME as initial values (else seed and name decide), --data D.h5 its data (hapt data --help).\n"
    "\n"
    "The model file (HDF5, format \"hapt-model\", version 1) holds the forward graph as flat tables; readers check it "
    "and\n"
    "derive the backward part.\n"
    "  /                           attributes family, loss (name of the loss tensor), microbatch, dtype, seed; "
    "sequence and\n"
    "                              vocab, or classes (models of images)\n"
    "  /settings/name, value       [n] text: hyper-parameters\n"
    "  /training/option, value     [n] text: defaults of training options\n"
    "  /tensors/name, kind, role, dtype, init\n"
    "                              [t] text; kinds: input, parameter, activation; roles of inputs: tokens, targets,\n"
    "                              images, labels, loss_scale; dtypes: fp32, bf16, fp16, int32; inits: zero, one, "
    "normal\n"
    "  /tensors/shape [t][5]       sizes, 0 behind the last dimension; a microbatch is whole\n"
    "  /tensors/init_std [t]       standard deviation of normal initial values\n"
    "  /tensors/trainable [t]      1: the optimizer updates this parameter\n"
    "  /operators/name, type [n]   text; operators stand in an order in which inputs come first\n"
    "  /operators/input [n][10]    rows of /tensors, -1 where absent\n"
    "  /operators/output [n][4]    rows of /tensors, -1 behind the last\n"
    "  /operators/integer, real [n][6]\n"
    "                              attributes, e.g. heads and causal of attention, epsilon of layer_norm\n"
    "  /parameters/NAME            optional: initial values, fp32\n"
    "  /tokens, /batches, /targets, /images, /labels, /mean, /std\n"
    "                              optional: data (hapt data --help)\n";

static enum hapt_status print_json(const struct hapt_model *model, const char *path)
{
    json_t *settings = json_object();
    for (int i = 0; i < model->setting_count; i++) {
        json_object_set_new(settings, model->setting[i].name, json_string(model->setting[i].value));
    }
    json_t *root = json_pack("{s:s, s:i, s:s, s:s, s:o, s:I, s:i, s:f}", "format", "hapt-model", "version", 1, "output",
                             path, "family", model->family, "settings", settings, "parameters",
                             (json_int_t)hapt_model_parameter_count(model), "operators", model->graph->op_count,
                             "flops_per_microbatch", hapt_model_flops(model));
    const int failed = !root || json_dumpf(root, stdout, 0) || printf("\n") < 0;
    json_decref(root);
    return failed ? hapt_fail(HAPT_ERR_IO, NULL, "cannot write to standard output") : HAPT_OK;
}

static enum hapt_status write_model(const struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model;
    const char *path = hapt_config_text(config, "output");
    if (hapt_config_word_count(config) != 1) {
        return hapt_fail(HAPT_ERR_USAGE, "hapt model gpt --output model.h5",
                         "hapt model wants one family or named model");
    }
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "add --output model.h5", "hapt model has no file to write");
    const char *family;
    HAPT_TRY(hapt_model_preset(hapt_config_word(config, 0), config, &family));
    HAPT_TRY(hapt_model_build(family, config, arena, &model));
    HAPT_TRY(hapt_model_save(model, hapt_config_text(config, "weights"), hapt_config_text(config, "data"), path));
    if (env->quiet) return print_json(model, path);
    hapt_print(env, "%s: %s, %" PRId64 " parameters, %d operators forward and %d backward, %.3g GFLOP a microbatch\n",
               path, model->family, hapt_model_parameter_count(model), model->graph->forward_count,
               model->graph->op_count - model->graph->forward_count, hapt_model_flops(model) * 1e-9);
    return HAPT_OK;
}

enum hapt_status hapt_command_model(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    enum hapt_status status =
        hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-model"});
    if (status != HAPT_OK) {
        hapt_arena_release(&arena);
        return status;
    }
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "writing the model", 0);
    if (env->world_rank == 0) status = write_model(env, config, &arena); /* a file has one writer */
    hapt_progress_release(&progress);
    status = hapt_env_agree(env->world, status);
    hapt_arena_release(&arena);
    return status;
}
