#include "fix.h"
#include "phases.h"

#include <math.h>
#include <string.h>
#include <strings.h>

#include "hapt/calibration.h"
#include "hapt/candidates.h"
#include "hapt/measure.h"
#include "hapt/predict.h"
#include "hapt/progress.h"
#include "hapt/search.h"

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

/* The step of the formula's optimum; INFINITY: there is no plan. Rank-local. */
static enum hapt_status formula_s(const struct hapt_config *config, const struct hapt_profile *profile,
                                  double *latency_s)
{
    const struct hapt_search_options options = {.objective = HAPT_OBJECTIVE_FORMULA,
                                                .microbatches = (int)hapt_config_int(config, "microbatches"),
                                                .schedule = HAPT_SCHEDULE_H1F1B,
                                                .hide_threshold = hapt_config_real(config, "hide-threshold"),
                                                .gap = HAPT_PHASE_MEMORY_WORTH - 1,
                                                .may_fail = true};
    struct hapt_arena scratch;
    struct hapt_plan *plan;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_plan_search_formula(MPI_COMM_SELF, profile, &options, &scratch, &plan);
    *latency_s = status == HAPT_OK ? plan->latency_s : INFINITY;
    hapt_arena_release(&scratch);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* True if plans that keep all activations are slower because devices lack memory, or if there are none. */
static enum hapt_status lacks_memory(const struct hapt_config *config, const struct hapt_profile *profile, bool *lacks)
{
    struct hapt_profile *roomy;
    struct hapt_arena scratch;
    double now_s, best_s = 0;
    hapt_arena_init(&scratch);
    enum hapt_status status = formula_s(config, profile, &now_s);
    if (status == HAPT_OK && isfinite(now_s)) {
        status = hapt_profile_roomy_view(profile, &scratch, &roomy);
        if (status == HAPT_OK) status = formula_s(config, roomy, &best_s);
    }
    *lacks = status == HAPT_OK && now_s > HAPT_PHASE_MEMORY_WORTH * best_s;
    hapt_arena_release(&scratch);
    return status;
}

/* True if --recompute auto and --offload auto decide: by the hapt strategy, with searched stages and simulated steps.
 */
static bool may_choose_memory(const struct hapt_config *config)
{
    return !strcmp(hapt_config_text(config, "strategy"), "hapt") && !hapt_config_text(config, "stages") &&
           strcmp(hapt_config_text(config, "objective"), "formula") != 0;
}

static bool is_auto(const struct hapt_config *config, const char *option)
{
    return !strcmp(hapt_config_text(config, option), "auto");
}

/* Inputs of a prediction. */
struct prediction {
    const struct hapt_config *config;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_efficiency *efficiency;
};

static enum hapt_status predict(const struct prediction *of, bool recompute, bool host_state, struct hapt_arena *arena,
                                struct hapt_profile **profile)
{
    return hapt_profile_predict(of->cluster, of->model, of->layers, of->config, of->efficiency, recompute, host_state,
                                arena, profile);
}

/* With stages that recompute as --recompute says; auto: if devices lack memory otherwise. *lacks: they do, or would if
 * all activations were kept; false if nothing is chosen. */
static enum hapt_status predict_recomputing(const struct prediction *of, bool host_state, struct hapt_arena *arena,
                                            struct hapt_profile **profile, bool *lacks)
{
    const bool given = !is_auto(of->config, "recompute");
    *lacks = false;
    const enum hapt_status status = predict(of, given, host_state, arena, profile);
    if (!may_choose_memory(of->config) || (given && !is_auto(of->config, "offload"))) return status;
    *lacks = status == HAPT_ERR_INFEASIBLE;
    if (status == HAPT_OK) HAPT_TRY(lacks_memory(of->config, *profile, lacks));
    if (given || !*lacks) return status;
    hapt_fail_reset();
    return predict(of, true, host_state, arena, profile);
}

/* True if the formula's optimum is shorter with the optimizer on the host. */
static enum hapt_status is_shorter(const struct hapt_config *config, const struct hapt_profile *with,
                                   const struct hapt_profile *without, bool *shorter)
{
    double step_s[2];
    HAPT_TRY(formula_s(config, without, &step_s[0]));
    HAPT_TRY(formula_s(config, with, &step_s[1]));
    *shorter = step_s[1] < step_s[0];
    return HAPT_OK;
}

enum hapt_status hapt_phase_predict(const struct hapt_config *config, const struct hapt_cluster *cluster,
                                    const struct hapt_model *model, const struct hapt_layers *layers,
                                    const struct hapt_efficiency *efficiency, struct hapt_arena *arena,
                                    struct hapt_profile **profile)
{
    const struct prediction of = {config, cluster, model, layers, efficiency};
    const bool given = !strcmp(hapt_config_text(config, "offload"), "optimizer");
    struct hapt_profile *away;
    bool lacks, shorter = true, ignored;
    const enum hapt_status status = predict_recomputing(&of, given, arena, profile, &lacks);
    if (!is_auto(config, "offload") || !lacks || (status != HAPT_OK && status != HAPT_ERR_INFEASIBLE)) return status;
    hapt_fail_reset();
    const enum hapt_status offloaded = predict_recomputing(&of, true, arena, &away, &ignored);
    if (offloaded == HAPT_ERR_INFEASIBLE && status == HAPT_OK) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(offloaded);
    if (status == HAPT_OK) HAPT_TRY(is_shorter(config, away, *profile, &shorter));
    if (shorter) *profile = away;
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
            hapt_phase_predict(config, cluster, model, layers, efficiency, env->node_size > 1 ? &own : arena, &made);
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
    const char *recompute = hapt_config_text(config, "recompute");
    const bool chosen = !strcmp(recompute, "auto");
    if (!chosen && hapt_layers_recompute(recompute) < 0)
        return hapt_fail(HAPT_ERR_USAGE, "give auto, no, selective, all or every=K", "--recompute %s cannot be read",
                         recompute);
    if (!chosen && strcmp(recompute, "no") != 0 && !strcmp(hapt_config_text(config, "program"), "synthesised"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--recompute %s has no effect on --program synthesised: such stages keep their activations",
                         recompute);
    if (!strcmp(hapt_config_text(config, "offload"), "optimizer") && !hapt_candidates_states(config))
        return hapt_fail(HAPT_ERR_USAGE, "leave it out, or give --optimizer adamw or a --momentum",
                         "--offload optimizer has no effect: this optimizer keeps no state");
    if (!measured) return HAPT_OK;
    return hapt_phase_refuse_unused(
        config, "the profile is measured here; only --predict yes and clusters on paper are predicted", "efficiency");
}

/* --offload auto for a measurement: as for a prediction, by rank 0. Collective over env->world. */
static enum hapt_status choose_offload(const struct hapt_env *env, const struct prediction *of, bool *host_state)
{
    struct hapt_progress progress;
    struct hapt_profile *profile;
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    int chosen = !strcmp(hapt_config_text(of->config, "offload"), "optimizer");
    if (is_auto(of->config, "offload") && may_choose_memory(of->config)) {
        hapt_arena_init(&scratch);
        hapt_progress_init(&progress, env, "predicting", 0);
        if (env->world_rank == 0)
            status = hapt_phase_predict(of->config, of->cluster, of->model, of->layers, NULL, &scratch, &profile);
        if (status == HAPT_OK && env->world_rank == 0) chosen = profile->host_state;
        if (status == HAPT_ERR_INFEASIBLE) {
            hapt_fail_reset();
            status = HAPT_OK;
        }
        hapt_progress_release(&progress);
        hapt_arena_release(&scratch);
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(&chosen, 1, MPI_INT, 0, env->world));
    *host_state = chosen;
    return HAPT_OK;
}

static enum hapt_status measure(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_cluster *cluster, const struct hapt_model *model,
                                const struct hapt_layers *layers, struct hapt_arena *arena,
                                struct hapt_profile **profile)
{
    const struct prediction of = {config, cluster, model, layers, NULL};
    const bool given = !is_auto(config, "recompute");
    const bool recompute = given ? strcmp(hapt_config_text(config, "recompute"), "no") != 0 : may_choose_memory(config);
    struct hapt_profile *kept;
    bool lacks = true, host_state;
    HAPT_TRY(choose_offload(env, &of, &host_state));
    HAPT_TRY(hapt_profile_measure(env, cluster, model, layers, config, recompute, host_state, arena, profile, &kept));
    if (given || !kept || kept == *profile) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, lacks_memory(config, kept, &lacks)));
    if (!lacks) *profile = kept;
    return HAPT_OK;
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
        HAPT_TRY(measure(env, config, cluster, model, layers, arena, profile));
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
