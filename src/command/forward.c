#include "forward.h"

#include <stdio.h>
#include <string.h>

enum hapt_status forward_check_options(const struct hapt_config *config, const char *result)
{
    if (strcmp(hapt_config_text(config, "device"), "emulated") == 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --device emulated", "modelled devices compute no %s", result);
    if (!hapt_config_text(config, "plan") && !hapt_config_text(config, "checkpoint"))
        return hapt_fail(HAPT_ERR_USAGE,
                         "make a plan with `hapt plan --input m.h5 --output plan.h5`, then give --plan plan.h5, or "
                         "give a --checkpoint",
                         "no plan given");
    return HAPT_OK;
}

static enum hapt_status find_checkpoint(struct hapt_env *env, struct hapt_config *config, struct hapt_model *model,
                                        struct hapt_arena *arena, struct hapt_checkpoint **checkpoint)
{
    const char *path = hapt_config_text(config, "checkpoint");
    if (!path) return HAPT_OK;
    HAPT_TRY(hapt_checkpoint_find(env, path, arena, checkpoint));
    HAPT_TRY(hapt_env_agree(env->world, env->world_rank == 0 ? hapt_checkpoint_fits(*checkpoint, model) : HAPT_OK));
    if ((*checkpoint)->sampled)
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_INPUT, "give a checkpoint of real training",
                                                    "%s was written with --device emulated: it holds no weights",
                                                    (*checkpoint)->path));
    return hapt_env_agree(env->world, hapt_checkpoint_defaults(*checkpoint, config));
}

/* The ranks that trained the checkpoint. */
static enum hapt_status check_ranks(const struct hapt_env *env, const struct hapt_config *config,
                                    const struct hapt_checkpoint *checkpoint)
{
    int ranks = 0;
    if (!checkpoint || hapt_config_text(config, "plan")) return HAPT_OK;
    for (int s = 0; s < checkpoint->plan->submesh_count; s++)
        ranks += hapt_plan_submesh_size(&checkpoint->plan->submesh[s]);
    if (ranks <= env->world_size) return HAPT_OK;
    char hint[120];
    snprintf(hint, sizeof hint, "start %d ranks (mpirun -np %d hapt ...), or give a --plan for fewer", ranks, ranks);
    return hapt_fail(HAPT_ERR_USAGE, hint, "the plan of %s runs on %d ranks, and there %s %d", checkpoint->path, ranks,
                     env->world_size > 1 ? "are" : "is", env->world_size);
}

enum hapt_status forward_prepare(struct hapt_env *env, struct hapt_config *config,
                                 enum hapt_status (*check)(const struct hapt_model *model), struct hapt_arena *arena,
                                 struct forward *forward)
{
    *forward = (struct forward){0};
    HAPT_TRY(hapt_phase_model(env, config, arena, &forward->model));
    if (check) HAPT_TRY(hapt_env_agree(env->world, check(forward->model)));
    HAPT_TRY(find_checkpoint(env, config, forward->model, arena, &forward->checkpoint));
    HAPT_TRY(hapt_env_agree(env->world, check_ranks(env, config, forward->checkpoint)));
    HAPT_TRY(hapt_phase_cluster(env, config, true, arena, &forward->cluster));
    struct hapt_checkpoint *planned = hapt_config_text(config, "plan") ? NULL : forward->checkpoint;
    HAPT_TRY(hapt_phase_precision(env, config, forward->cluster, planned, forward->model));
    HAPT_TRY(hapt_phase_plan_given(env, config, forward->model, planned, arena, &forward->plan));
    HAPT_TRY(hapt_phase_rebatch(env, forward->plan, arena, &forward->model));
    forward->plan->precision = forward->model->precision;
    return HAPT_OK;
}
