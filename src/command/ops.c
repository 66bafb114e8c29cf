/* hapt ops: the operators that a model's graph may contain, from the operator table. */
#include "hapt/ops.h"

#include <string.h>

#include "hapt/command.h"
#include "hapt/device.h"
#include "json_print.h"

const char hapt_command_ops_help[] =
    "Lists the operators that the graph of a model file may contain: each with its signature, which has a letter per\n"
    "dimension. With names, it explains these: operands, attributes, types, and kernels of this machine's back ends.\n"
    "\n"
    "In a signature, \"...\" stands for any number of dimensions. Letters of which an operator takes sums are\n"
    "missing in its output. Behind a letter, ! marks a dimension that is never sharded, and !+ one that may also be\n"
    "longer. ~ marks one that integers index, and ? ends an optional operand. e/3h is one width of three equal\n"
    "blocks, which are sharded by heads h; d/h has one block.\n"
    "Types, one letter per operand: i int32, f fp32, c the type of the computation.\n"
    "The signature of some operators follows from attributes and shapes: then one is shown as an example.\n"
    "A program in Python writes such graphs with tools/hapt.py; tools/hapt_export.py exports models of PyTorch.\n"
    "\n"
    "--json:\n"
    "  {\"format\":\"hapt-ops\",\"version\":1,\n"
    "   \"operators\":[{\"name\",\"signature\",\"types\",\"attributes\",\"kernels\":{\"cpu\":[\"fp32\", ...], ...}}, "
    "...]}\n";

/* True for operators of a forward graph. */
static bool is_forward(const struct hapt_op_type *type)
{
    return type->backward || type->gradient;
}

/* True if the back end has a device here and a kernel. False for the emulated one, which computes nothing. */
static bool computes(const struct hapt_backend *backend, const char *op, enum hapt_dtype dtype)
{
    const char *reason;
    return strcmp(backend->name, "emulated") != 0 && backend->device_count(&reason) > 0 &&
           backend->find_kernel(NULL, op, dtype) != NULL;
}

static json_t *kernels_of(const struct hapt_op_type *type)
{
    const struct hapt_backend *backend;
    json_t *kernels = json_object();
    for (int b = 0; (backend = hapt_backend_at(b)); b++) {
        json_t *types = json_array();
        for (int d = 0; d < HAPT_DTYPE_COUNT; d++)
            if (d != HAPT_I32 && computes(backend, type->name, (enum hapt_dtype)d))
                json_array_append_new(types, json_string(hapt_dtype_name((enum hapt_dtype)d)));
        if (json_array_size(types) > 0)
            json_object_set_new(kernels, backend->name, types);
        else
            json_decref(types);
    }
    return kernels;
}

static void explain(const struct hapt_env *env, const struct hapt_op_type *type)
{
    json_t *kernels = kernels_of(type), *types, *name;
    const char *backend;
    size_t k;
    hapt_print(env, "%s\n  signature   %s%s\n  types       %s\n", type->name, type->signature,
               type->sign ? ", for example: it follows from attributes and shapes" : "", type->dtypes);
    if (type->attributes) hapt_print(env, "  attributes  %s\n", type->attributes);
    json_object_foreach(kernels, backend, types)
    {
        hapt_print(env, "  kernels     %s:", backend);
        json_array_foreach(types, k, name) hapt_print(env, " %s", json_string_value(name));
        hapt_print(env, "\n");
    }
    json_decref(kernels);
}

/* True if no names are given, or this one. */
static bool is_wanted(const struct hapt_config *config, const struct hapt_op_type *type)
{
    const int words = hapt_config_word_count(config);
    for (int w = 0; w < words; w++)
        if (!strcmp(hapt_config_word(config, w), type->name)) return true;
    return words == 0;
}

static enum hapt_status check_words(const struct hapt_config *config)
{
    for (int w = 0; w < hapt_config_word_count(config); w++) {
        const char *word = hapt_config_word(config, w);
        const int type = hapt_op_type_find(word);
        if (type < 0 || !is_forward(hapt_op_type_at(type)))
            return hapt_fail(HAPT_ERR_USAGE, "hapt ops lists all",
                             type < 0 ? "no operator \"%s\"" : "graphs of models do not contain \"%s\"", word);
    }
    return HAPT_OK;
}

static enum hapt_status print(const struct hapt_env *env, const struct hapt_config *config)
{
    HAPT_TRY(check_words(config));
    json_t *list = json_array();
    for (int t = 0; t < hapt_op_type_count(); t++) {
        const struct hapt_op_type *type = hapt_op_type_at(t);
        if (!is_forward(type) || !is_wanted(config, type)) continue;
        if (env->quiet)
            json_array_append_new(list,
                                  json_pack("{s:s, s:s, s:s, s:s, s:o}", "name", type->name, "signature",
                                            type->signature, "types", type->dtypes, "attributes",
                                            type->attributes ? type->attributes : "", "kernels", kernels_of(type)));
        else if (hapt_config_word_count(config) > 0)
            explain(env, type);
        else
            hapt_print(env, "%-27s %s\n", type->name, type->signature);
    }
    if (env->quiet)
        return hapt_json_print(json_pack("{s:s, s:i, s:o}", "format", "hapt-ops", "version", 1, "operators", list),
                               "the operators'", 0);
    json_decref(list);
    return HAPT_OK;
}

enum hapt_status hapt_command_ops(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    (void)arena;
    return hapt_env_agree(env->world, env->world_rank == 0 ? print(env, config) : HAPT_OK);
}
