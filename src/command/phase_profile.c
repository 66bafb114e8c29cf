#include "fix.h"
#include "phases.h"

#include <string.h>
#include <strings.h>

#include "hapt/calibration.h"
#include "hapt/measure.h"
#include "hapt/predict.h"
#include "hapt/progress.h"

/* Loads --efficiency (else NULL) and notes devices that it does not cover. */
static enum hapt_status load_efficiency(struct hapt_env *env, struct hapt_config *config,
                                        const struct hapt_cluster *cluster, const struct hapt_model *model,
                                        struct hapt_arena *arena, struct hapt_efficiency **efficiency)
{
    const char *path = hapt_config_text(config, "efficiency");
    *efficiency = NULL;
    if (!path) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_efficiency_load(path, arena, efficiency)));
    for (int c = 0; c < cluster->count; c++) {
        const char *name = cluster->subcluster[c].device.name;
        bool said = false;
        for (int before = 0; before < c; before++)
            said = said || strcasecmp(cluster->subcluster[before].device.name, name) == 0;
        if (!said && !hapt_efficiency_covers(*efficiency, name, model->dtype))
            hapt_note(env, "%s holds no table of %s in %s: predicted with the built-in one\n", path, name,
                      hapt_dtype_name(model->dtype));
    }
    return HAPT_OK;
}

/* Restricts a loaded profile to the programs of --program, and gives it the --tied-exchange, in a copy. */
static enum hapt_status adapt(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_profile **profile)
{
    const char *program = hapt_config_text(config, "program");
    const bool all = strcmp(program, "auto") == 0 || strcmp(program, "all") == 0;
    struct hapt_profile *copy;
    enum hapt_tied_exchange exchange;
    HAPT_ASSERT(hapt_tied_exchange_find(hapt_config_text(config, "tied-exchange"), &exchange));
    if (all && exchange == (*profile)->exchange) return HAPT_OK;
    HAPT_TRY(hapt_profile_copy(*profile, arena, &copy));
    if (!all) hapt_profile_keep_programs(copy, program);
    hapt_profile_exchange_in(copy, exchange);
    *profile = copy;
    return HAPT_OK;
}

/* The first rank of every node predicts and shares the profile with its node. */
static enum hapt_status predict_shared(struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_cluster *cluster, const struct hapt_model *model,
                                       const struct hapt_layers *layers, const struct hapt_efficiency *efficiency,
                                       bool quietly, struct hapt_arena *arena, struct hapt_profile **profile)
{
    struct hapt_arena own; /* the first rank's own copy, if it shares the profile */
    struct hapt_profile *made = NULL;
    enum hapt_status status = HAPT_OK;
    hapt_arena_init(&own);
    if (env->node_rank == 0)
        status =
            hapt_profile_predict(cluster, model, layers, config, efficiency, env->node_size > 1 ? &own : arena, &made);
    const enum hapt_status agreed = quietly ? hapt_env_agree_quietly(env->world, status) : HAPT_OK;
    status = agreed == HAPT_ERR_INFEASIBLE ? agreed : hapt_profile_share(env, status, made, arena, profile);
    hapt_arena_release(&own);
    return status;
}

bool hapt_phase_is_measured(const struct hapt_config *config, const struct hapt_cluster *cluster)
{
    return cluster->subcluster_of_rank && !cluster->subcluster[0].device.emulated &&
           !hapt_config_bool(config, "predict");
}

enum hapt_status hapt_phase_profile_options(const struct hapt_config *config, const struct hapt_cluster *cluster)
{
    const bool measured = hapt_phase_is_measured(config, cluster);
    if (!measured) return HAPT_OK;
    return hapt_phase_refuse_unused(
        config, "the profile is measured here; only --predict yes and clusters on paper are predicted", "efficiency");
}

static enum hapt_status get_profile(struct hapt_env *env, struct hapt_config *config,
                                    const struct hapt_cluster *cluster, const struct hapt_model *model,
                                    const struct hapt_layers *layers, bool quietly, struct hapt_arena *arena,
                                    struct hapt_profile **profile)
{
    const char *path = hapt_config_command(config) == HAPT_COMMAND_PROFILE ? NULL : hapt_config_text(config, "profile");
    struct hapt_efficiency *efficiency;
    if (path) {
        struct hapt_progress progress;
        hapt_progress_init(&progress, env, "loading the profile", 0);
        const enum hapt_status status = hapt_profile_load_shared(env, path, arena, profile);
        hapt_progress_release(&progress);
        HAPT_TRY(status);
        return hapt_env_agree(env->world, adapt(config, arena, profile));
    }
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_profile_options(config, cluster)));
    if (hapt_phase_is_measured(config, cluster)) {
        HAPT_TRY(hapt_profile_measure(env, cluster, model, layers, config, arena, profile));
        (*profile)->origin = HAPT_PROFILE_MEASURED;
    } else {
        struct hapt_progress progress;
        HAPT_TRY(load_efficiency(env, config, cluster, model, arena, &efficiency));
        hapt_progress_init(&progress, env, "predicting", 0);
        const enum hapt_status status =
            predict_shared(env, config, cluster, model, layers, efficiency, quietly, arena, profile);
        hapt_progress_release(&progress);
        HAPT_TRY(status);
        (*profile)->origin = HAPT_PROFILE_PREDICTED;
    }
    (*profile)->precision = model->precision;
    return HAPT_OK;
}

/* Keeps the candidates that --fix allows. */
static enum hapt_status restrict_candidates(const struct hapt_env *env, const struct hapt_config *config, bool quietly,
                                            struct hapt_arena *arena, struct hapt_profile **profile)
{
    const enum hapt_status status = hapt_fix_profile(config, arena, profile);
    if (quietly && hapt_env_agree_quietly(env->world, status) == HAPT_ERR_INFEASIBLE) return HAPT_ERR_INFEASIBLE;
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config,
                                    const struct hapt_cluster *cluster, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena,
                                    struct hapt_profile **profile)
{
    HAPT_TRY(get_profile(env, config, cluster, model, layers, false, arena, profile));
    return restrict_candidates(env, config, false, arena, profile);
}

enum hapt_status hapt_phase_profile_quietly(struct hapt_env *env, struct hapt_config *config,
                                            const struct hapt_cluster *cluster, const struct hapt_model *model,
                                            const struct hapt_layers *layers, struct hapt_arena *arena,
                                            struct hapt_profile **profile)
{
    HAPT_TRY(get_profile(env, config, cluster, model, layers, true, arena, profile));
    return restrict_candidates(env, config, true, arena, profile);
}
