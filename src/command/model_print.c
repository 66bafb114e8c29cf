#include "model_print.h"

#include <inttypes.h>

#include "json_print.h"

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
    return hapt_json_print(root, "the model's", 0);
}

enum hapt_status hapt_model_print(const struct hapt_env *env, const struct hapt_model *model, const char *path)
{
    if (env->quiet) return print_json(model, path);
    hapt_print(env, "%s: %s, %" PRId64 " parameters, %d operators forward and %d backward, %.3g GFLOP a microbatch\n",
               path, model->family, hapt_model_parameter_count(model), model->graph->forward_count,
               model->graph->op_count - model->graph->forward_count, hapt_model_flops(model) * 1e-9);
    return HAPT_OK;
}
