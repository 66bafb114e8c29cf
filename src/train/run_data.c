/* The data that a run reads, their order, and the number of steps. */
#include "run_data.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "runtime.h"

static enum hapt_status find_data(const struct hapt_env *env, const struct hapt_config *config,
                                  const struct hapt_model *model, const char **path)
{
    const char *given = hapt_config_text(config, "data");
    *path = given ? given : model->has_data ? model->path : NULL;
    if (*path) return HAPT_OK;
    return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_INPUT, "give --data D.h5 (see hapt help data)",
                                                "the model file contains no data and no data file is given"));
}

/* Modelled devices need no data. If there is some, it is read as in a real run. */
static bool needs_no_data(const struct hapt_config *config, const struct hapt_model *model)
{
    return runtime_is_modelled(config) && !hapt_config_text(config, "data") && !model->has_data;
}

/* True if --epochs gives the number of steps: --steps on the command line is stronger than --epochs of a checkpoint. */
static bool counts_epochs(const struct hapt_config *config)
{
    return hapt_config_real(config, "epochs") > 0 &&
           (hapt_config_given(config, "epochs") || !hapt_config_given(config, "steps"));
}

static struct hapt_data_order order_of(const struct hapt_config *config, int rows, int64_t end)
{
    const bool epochs = !strcmp(hapt_config_text(config, "data-order"), "epochs");
    return (struct hapt_data_order){.rows = rows,
                                    .steps = end,
                                    .seed = (uint64_t)hapt_config_int(config, "data-seed"),
                                    .epochs = epochs || counts_epochs(config)};
}

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (!hapt_config_given(config, "epochs") || hapt_config_real(config, "epochs") == 0) return HAPT_OK;
    if (hapt_config_given(config, "steps"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--epochs and --steps both give the length of the run");
    if (hapt_config_given(config, "data-order") && strcmp(hapt_config_text(config, "data-order"), "epochs") != 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--epochs reads each row once per epoch, --data-order %s does not",
                         hapt_config_text(config, "data-order"));
    return HAPT_OK;
}

int64_t run_data_end(const struct hapt_config *config, int64_t steps)
{
    const int64_t stop_after = hapt_config_int(config, "stop-after");
    return stop_after > 0 && stop_after < steps ? stop_after : steps;
}

enum hapt_status hapt_train_check_data(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_model *model)
{
    const char *path = NULL;
    const int64_t given = hapt_config_int(config, "global-batch");
    const int rows = given > 0 ? (int)given : (int)hapt_config_int(config, "microbatches") * model->microbatch;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    if (needs_no_data(config, model)) return HAPT_OK;
    HAPT_TRY(find_data(env, config, model, &path));
    const struct hapt_data_order order = order_of(config, rows, run_data_end(config, hapt_config_int(config, "steps")));
    HAPT_TRY(hapt_data_check(env, path, model, &order));
    const char *held_out = hapt_config_text(config, "validation-data");
    return held_out ? hapt_data_check(env, held_out, model, NULL) : HAPT_OK;
}

enum hapt_status hapt_train_settle_steps(const struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_model *model, const struct hapt_plan *plan)
{
    const char *path = NULL;
    char text[32];
    int64_t rows = 0;
    const int64_t each = (int64_t)plan->microbatches * model->microbatch;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    if (!counts_epochs(config)) return HAPT_OK;
    if (needs_no_data(config, model))
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "give --steps, or --data D.h5",
                                                    "--epochs needs data, which --device emulated can do without"));
    HAPT_TRY(find_data(env, config, model, &path));
    const struct hapt_data_order order = order_of(config, (int)each, 0);
    HAPT_TRY(hapt_data_rows(env, path, model, &order, &rows));
    const double epochs = hapt_config_real(config, "epochs"), steps = ceil(epochs * (double)rows / (double)each);
    if (!(steps >= 1 && steps <= 1e12))
        return hapt_env_agree(
            env->world, hapt_fail(HAPT_ERR_USAGE, "give fewer --epochs", "--epochs %g are %.3g steps", epochs, steps));
    snprintf(text, sizeof text, "%.0f", steps);
    hapt_note(env, "%g epochs of %lld rows: %s steps of %lld rows\n", epochs, (long long)rows, text, (long long)each);
    enum hapt_status status = hapt_config_decide(config, "steps", text);
    if (status == HAPT_OK) status = hapt_config_decide(config, "data-order", "epochs"); /* what --resume goes on with */
    return hapt_env_agree(env->world, status);
}

enum hapt_status run_data_open(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_model *model, const struct hapt_plan *plan, int64_t end,
                               struct hapt_data **data)
{
    const char *path = NULL;
    *data = NULL;
    if (needs_no_data(config, model)) return HAPT_OK;
    HAPT_TRY(find_data(env, config, model, &path));
    const struct hapt_data_order order = order_of(config, plan->microbatches * model->microbatch, end);
    return hapt_data_open(env, path, model, &order, data);
}
