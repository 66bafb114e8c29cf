/* `hapt import DIR`: a published model becomes a model file. */
#include "hapt/import.h"

#include "hapt/command.h"
#include "hapt/progress.h"
#include "model_print.h"
#include "outputs.h"

const char hapt_command_import_help[] =
    "DIR is a folder as Hugging Face's transformers writes it: config.json, and model.safetensors or shards with\n"
    "model.safetensors.index.json, of type fp32, bf16 or fp16. hapt reads no other file of weights.\n"
    "\n"
    "Known values of model_type: gemma2, gemma3_text, gpt2, llama, mistral, mixtral, qwen2, qwen3, qwen3_moe\n"
    "(causal language models), bert (BertForMaskedLM), vit (ViTForImageClassification) and dinov2\n"
    "(Dinov2ForImageClassification, without SwiGLU). For bert, the data give /targets, and all tokens have the\n"
    "first token type. vit and dinov2 have no --sequence.\n"
    "Each option of config.json and each tensor is used, or known to change nothing; any other is an error that\n"
    "names it. The loss of a mixture's router is not computed. --dropout trains gpt2, bert, vit and dinov2 (its\n"
    "embeddings alone) with dropout, --lora dropout=P the adapters. Attention has no dropout.\n"
    "\n"
    "The model file has the weights in fp32, under their published names. It also carries config.json, the\n"
    "tokenizer's files and generation_config.json, which hapt export --format safetensors writes again.\n"
    "Training options given here become the file's defaults for every run; --data D.h5 copies its data.\n"
    "\n"
    "  hapt import qwen3/ --sequence 1024 --microbatch-rows 2 --dtype bf16 --output m.h5\n"
    "  mpirun -np 4 hapt --input m.h5 --data tokens.h5 --steps 1000\n"
    "  hapt export --checkpoint outputs/m --format safetensors --output qwen3-tuned/\n";

static enum hapt_status run(const struct hapt_env *env, const struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "output");
    struct hapt_import *import;
    if (hapt_config_word_count(config) != 1)
        return hapt_fail(HAPT_ERR_USAGE, "hapt import qwen3/ --sequence 1024 --output model.h5",
                         "hapt import needs one folder");
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "add --output model.h5", "hapt import has no file to write");
    HAPT_TRY(hapt_import_open(env, hapt_config_word(config, 0), config, arena, &import));
    const struct hapt_model *model = import->model;
    HAPT_TRY(hapt_model_save_with(model, &import->weights, &import->files, hapt_config_text(config, "data"), path));
    return hapt_model_print(env, model, path);
}

enum hapt_status hapt_command_import(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-model"}));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "importing", 0);
    if (env->world_rank == 0) status = run(env, config, arena); /* one rank writes the file */
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}
