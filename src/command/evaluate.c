/* hapt evaluate: the loss of a model or a checkpoint on held-out data. */
#include <jansson.h>
#include <math.h>
#include <string.h>

#include "forward.h"
#include "json_print.h"

const char hapt_command_evaluate_help[] =
    "Computes the mean loss per target of all rows of --data, with the weights of --checkpoint, or else of the model\n"
    "file. Nothing is trained or written. The plan is --plan, or that of the checkpoint; it runs as in training, but\n"
    "forward passes only.\n"
    "\n"
    "Rows come in order, each once: windows of T tokens that follow each other, images, or the rows of exact batches\n"
    "(see hapt help data). The end of a stream that fills no row is left out. --validate-rows N takes N rows,\n"
    "evenly spaced. The loss depends on the plan by rounding alone. Batch norms use their running statistics.\n"
    "Models without them (hapt model --running-statistics no) are an exception: they use those of each microbatch,\n"
    "as in training, and copies of the first row fill the last one.\n"
    "\n"
    "Prints the loss per target, in nats unless it is a squared error; the perplexity, if targets are classes but not\n"
    "of images; and top-1, the share of targets that are the largest logit (not if the plan splits the vocabulary\n"
    "over devices, or if targets are real numbers). --json prints one object: format\n"
    "\"hapt-evaluation\", version, loss, perplexity, top1, rows, targets, step (of the checkpoint).\n";

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (!hapt_config_text(config, "data"))
        return hapt_fail(HAPT_ERR_USAGE, "give --data D.h5 (see hapt help data)", "no held-out data given");
    return forward_check_options(config, "loss");
}

/* True if the loss compares with classes, but not with those of images: exp(loss) is the perplexity. */
static bool has_perplexity(const struct hapt_model *model)
{
    const int field = hapt_model_field(model, hapt_model_target_field(model));
    return hapt_model_input(model, HAPT_ROLE_IMAGES) < 0 &&
           (field < 0 || model->graph->tensor[field].dtype == HAPT_I32);
}

static enum hapt_status print(struct hapt_env *env, const struct hapt_model *model,
                              const struct hapt_checkpoint *checkpoint, const struct hapt_evaluation *result)
{
    const bool squares = *hapt_model_loss_units(model) == '\0', perplexity_holds = has_perplexity(model);
    if (env->world_rank != 0) return HAPT_OK;
    if (!isfinite(result->loss))
        return hapt_fail(HAPT_ERR_INPUT, "look for weights or data that are too large; --precision fp32 has more range",
                         "the loss is %g", result->loss);
    hapt_print(env, "rows         %lld, %lld targets\n", (long long)result->rows, (long long)result->targets);
    if (checkpoint) hapt_print(env, "checkpoint   %s\n", checkpoint->path);
    hapt_print(env, "loss         %.6f%s per target\n", result->loss, squares ? "" : " nat");
    if (perplexity_holds) hapt_print(env, "perplexity   %.4f\n", exp(result->loss));
    if (isfinite(result->top1)) hapt_print(env, "top-1        %.4f %%\n", 100 * result->top1);
    if (!env->quiet) return HAPT_OK;
    json_t *json = json_pack("{s:s, s:i, s:f, s:I, s:I}", "format", "hapt-evaluation", "version", 1, "loss",
                             result->loss, "rows", (json_int_t)result->rows, "targets", (json_int_t)result->targets);
    if (json && isfinite(result->top1)) json_object_set_new(json, "top1", json_real(result->top1));
    const double perplexity = exp(result->loss); /* may be too large for a number */
    if (json && perplexity_holds)
        json_object_set_new(json, "perplexity", isfinite(perplexity) ? json_real(perplexity) : json_null());
    if (json && checkpoint) json_object_set_new(json, "step", json_integer(checkpoint->step));
    return hapt_json_print(json, "evaluation", 1);
}

enum hapt_status hapt_command_evaluate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_evaluation result = {0};
    struct forward forward;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    HAPT_TRY(forward_prepare(env, config, NULL, arena, &forward));
    HAPT_TRY(hapt_train_evaluate(env, forward.cluster, forward.model, forward.plan, forward.checkpoint, config, arena,
                                 &result));
    return hapt_env_agree(env->world, print(env, forward.model, forward.checkpoint, &result));
}
