#include "fix.h"
#include "phases.h"

#include <math.h>
#include <string.h>
#include <strings.h>

#include "hapt/calibration.h"
#include "hapt/candidates.h"
#include "hapt/measure.h"
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

bool hapt_phase_is_measured(const struct hapt_config *config, const struct hapt_cluster *cluster)
{
    return cluster->subcluster_of_rank && !cluster->subcluster[0].device.emulated &&
           !hapt_config_bool(config, "predict");
}

/* --sharded-weights yes */
static enum hapt_status check_sharding(const struct hapt_config *config, enum hapt_offload offload)
{
    if (offload >= HAPT_OFFLOAD_WEIGHTS)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--sharded-weights yes contradicts --offload %s: the weights are in one of both places",
                         hapt_config_text(config, "offload"));
    if (!strcmp(hapt_config_text(config, "sharded-optimizer"), "no"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--sharded-weights yes contradicts --sharded-optimizer no: a rank updates its slice of them");
    if (!strcmp(hapt_config_text(config, "program"), "synthesised"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--sharded-weights yes has no effect on --program synthesised: such stages have all weights");
    return HAPT_OK;
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
    const enum hapt_offload offload = hapt_phase_offload(config);
    if (offload != HAPT_OFFLOAD_NO && !hapt_candidates_states(config))
        return hapt_fail(HAPT_ERR_USAGE, "leave it out, or give --optimizer adamw or a --momentum",
                         "--offload %s has no effect: this optimizer keeps no state",
                         hapt_config_text(config, "offload"));
    if (offload == HAPT_OFFLOAD_NO && hapt_config_given(config, "update-on") &&
        !(hapt_phase_chooses_memory(config, "offload") && hapt_candidates_states(config)))
        return hapt_fail(HAPT_ERR_USAGE,
                         "give --offload optimizer, weights or gradients, and an optimizer with a state",
                         "--update-on has no effect: the optimizer state is not on the hosts");
    if (!strcmp(hapt_config_text(config, "sharded-weights"), "yes")) HAPT_TRY(check_sharding(config, offload));
    if (offload >= HAPT_OFFLOAD_WEIGHTS && !strcmp(hapt_config_text(config, "sharded-optimizer"), "yes"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them",
                         "--offload %s contradicts --sharded-optimizer yes: such weights are not sharded",
                         hapt_config_text(config, "offload"));
    if (offload == HAPT_OFFLOAD_GRADIENTS && !strcmp(hapt_config_text(config, "update-on"), "device"))
        return hapt_fail(
            HAPT_ERR_USAGE, "leave out one of them",
            "--offload gradients contradicts --update-on device: the host updates where the gradients are");
    if (!measured) return HAPT_OK;
    return hapt_phase_refuse_unused(
        config, "the profile is measured here; only --predict yes and clusters on paper are predicted", "efficiency");
}

/* True if stages of the profile may have their weights there. */
static bool has_weights_at(const struct hapt_profile *profile, enum hapt_weights_at weights_at)
{
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++)
            if (profile->cluster[c].submesh[s].weights_at == (int)weights_at) return true;
    return false;
}

static enum hapt_offload offload_of(const struct hapt_profile *profile)
{
    if (has_weights_at(profile, HAPT_GRADIENTS_ON_HOST)) return HAPT_OFFLOAD_STAGES_GRADIENTS;
    if (has_weights_at(profile, HAPT_WEIGHTS_ON_HOST)) return HAPT_OFFLOAD_STAGES;
    return profile->host_state ? HAPT_OFFLOAD_OPTIMIZER : HAPT_OFFLOAD_NO;
}

/* The predicted profile with the shorter simulated step. Rank-local. */
static enum hapt_status choose_shorter(const struct hapt_prediction *of, struct hapt_profile *other,
                                       struct hapt_arena *arena, struct hapt_profile **profile)
{
    const int microbatches = (int)hapt_config_int(of->config, "microbatches");
    const struct hapt_search_batching both[] = {{microbatches, *profile, false}, {microbatches, other, false}};
    struct hapt_strategy_options options;
    struct hapt_plan *plan;
    int chosen = 0;
    if (!other || !hapt_phase_searches_steps(of->config)) return HAPT_OK;
    HAPT_TRY(hapt_phase_strategy(of->config, *profile, of->layers, arena, &options));
    options.search.may_fail = true;
    const enum hapt_status status =
        hapt_plan_search_batchings(MPI_COMM_SELF, both, 2, &options.search, arena, &plan, &chosen);
    if (status == HAPT_OK && chosen == 1) *profile = other;
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* HAPT_ERR_INFEASIBLE says why the predicted profile has no plan, so that nothing is measured in vain. Rank-local. */
static enum hapt_status check_any_plan(const struct hapt_prediction *of, const struct hapt_profile *profile,
                                       struct hapt_arena *arena)
{
    struct hapt_strategy_options options;
    struct hapt_plan *plan;
    double step_s;
    HAPT_TRY(hapt_phase_formula_s(of->config, profile, &step_s));
    if (isfinite(step_s)) return HAPT_OK;
    HAPT_TRY(hapt_phase_strategy(of->config, profile, of->layers, arena, &options));
    options.search.may_fail = true;
    return hapt_plan_search(MPI_COMM_SELF, profile, &options.search, arena, &plan);
}

/* --offload and --sharded-weights auto for a measurement: as for a prediction, by rank 0. HAPT_ERR_INFEASIBLE: no plan
 * fits the memory, whatever these choose; hapt profile measures nevertheless. Choices that are given are checked after
 * the measurement. Collective over env->world. */
static enum hapt_status choose_offload(const struct hapt_env *env, const struct hapt_prediction *of, bool quietly,
                                       struct hapt_offloading *offload)
{
    const bool plans = hapt_config_command(of->config) != HAPT_COMMAND_PROFILE;
    struct hapt_progress progress;
    struct hapt_profile *profile, *other;
    struct hapt_arena scratch;
    enum hapt_status status = HAPT_OK;
    int chosen[] = {(int)hapt_phase_offload(of->config), hapt_phase_weight_sharding(of->config, false)};
    const bool away = hapt_phase_chooses_memory(of->config, "offload"),
               shards = hapt_phase_chooses_memory(of->config, "recompute") &&
                        hapt_phase_weight_sharding(of->config, true) == HAPT_WEIGHT_SHARDING_MAY;
    if (away || shards) {
        hapt_arena_init(&scratch);
        hapt_progress_init(&progress, env, "predicting", 0);
        if (env->world_rank == 0) status = hapt_phase_predict(of, &scratch, &profile, &other);
        if (status == HAPT_OK && env->world_rank == 0) status = choose_shorter(of, other, &scratch, &profile);
        if (status == HAPT_OK && env->world_rank == 0) {
            if (away) chosen[0] = (int)offload_of(profile);
            chosen[1] = hapt_phase_weight_sharding(of->config, has_weights_at(profile, HAPT_WEIGHTS_SHARDED));
        }
        if (status == HAPT_OK && env->world_rank == 0 && plans) status = check_any_plan(of, profile, &scratch);
        if (status == HAPT_ERR_INFEASIBLE && !plans) {
            hapt_fail_reset();
            status = HAPT_OK;
        }
        hapt_progress_release(&progress);
        hapt_arena_release(&scratch);
    }
    if (quietly && hapt_env_agree_quietly(env->world, status) == HAPT_ERR_INFEASIBLE) return HAPT_ERR_INFEASIBLE;
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Bcast(chosen, 2, MPI_INT, 0, env->world));
    offload->what = (enum hapt_offload)chosen[0];
    offload->host_update = hapt_phase_updates_on_host(of->config, of->cluster, of->model, offload->what);
    offload->weight_sharding = (enum hapt_weight_sharding)chosen[1];
    return HAPT_OK;
}

static enum hapt_status measure(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_cluster *cluster, const struct hapt_model *model,
                                const struct hapt_layers *layers, bool quietly, struct hapt_arena *arena,
                                struct hapt_profile **profile)
{
    const struct hapt_prediction of = {
        .config = config, .cluster = cluster, .model = model, .layers = layers, .node_rank = env->node_rank};
    const bool given = strcmp(hapt_config_text(config, "recompute"), "auto") != 0;
    const bool recompute = given ? strcmp(hapt_config_text(config, "recompute"), "no") != 0
                                 : hapt_phase_chooses_memory(config, "recompute");
    struct hapt_profile *kept;
    struct hapt_offloading away;
    bool lacks = true;
    HAPT_TRY(choose_offload(env, &of, quietly, &away));
    HAPT_TRY(hapt_profile_measure(env, cluster, model, layers, config, recompute, away, arena, profile, &kept));
    if (given || !kept || kept == *profile) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_lacks_memory(config, kept, &lacks)));
    if (!lacks) *profile = kept;
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

static enum hapt_status load(struct hapt_env *env, const struct hapt_config *config, const char *path,
                             struct hapt_arena *arena, struct hapt_profile **profile)
{
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "loading the profile", 0);
    const enum hapt_status status = hapt_profile_load_shared(env, path, arena, profile);
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    return hapt_env_agree(env->world, adapt(config, arena, profile));
}

enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config,
                                    const struct hapt_cluster *cluster, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena,
                                    struct hapt_profile **profile, struct hapt_profile **other)
{
    const char *path = hapt_config_command(config) == HAPT_COMMAND_PROFILE ? NULL : hapt_config_text(config, "profile");
    struct hapt_profile_case one = {
        .microbatches = (int)hapt_config_int(config, "microbatches"), .model = model, .layers = layers};
    if (other) *other = NULL;
    if (path) {
        HAPT_TRY(load(env, config, path, arena, profile));
        return restrict_candidates(env, config, false, arena, profile);
    }
    HAPT_TRY(hapt_phase_profiles(env, config, cluster, &one, 1, false, arena));
    *profile = one.profile;
    if (other) *other = one.other;
    return HAPT_OK;
}

/* One after the other, by all ranks. */
static enum hapt_status measure_cases(struct hapt_env *env, struct hapt_config *config,
                                      const struct hapt_cluster *cluster, struct hapt_profile_case *its, int count,
                                      bool quietly, struct hapt_arena *arena)
{
    for (int k = 0; k < count; k++) {
        its[k].profile = NULL;
        HAPT_TRY(hapt_env_agree(env->world, hapt_phase_decide_microbatches(config, its[k].microbatches)));
        const enum hapt_status status =
            measure(env, config, cluster, its[k].model, its[k].layers, quietly, arena, &its[k].profile);
        if (status == HAPT_ERR_INFEASIBLE && quietly) { /* others may fit */
            its[k].profile = NULL;
            hapt_fail_reset();
            continue;
        }
        HAPT_TRY(status);
        its[k].profile->origin = HAPT_PROFILE_MEASURED;
    }
    return HAPT_OK;
}

enum hapt_status hapt_phase_profiles(struct hapt_env *env, struct hapt_config *config,
                                     const struct hapt_cluster *cluster, struct hapt_profile_case *its, int count,
                                     bool quietly, struct hapt_arena *arena)
{
    struct hapt_efficiency *efficiency;
    if (!quietly) HAPT_TRY(hapt_env_agree(env->world, hapt_phase_profile_options(config, cluster)));
    if (hapt_phase_is_measured(config, cluster)) {
        HAPT_TRY(measure_cases(env, config, cluster, its, count, quietly, arena));
    } else {
        HAPT_TRY(load_efficiency(env, config, cluster, its[0].model, arena, &efficiency));
        HAPT_TRY(hapt_phase_predict_cases(env, config, cluster, efficiency, its, count, quietly, arena));
    }
    for (int k = 0; k < count; k++) {
        if (!its[k].profile) continue;
        its[k].profile->precision = its[k].model->precision;
        const enum hapt_status status = restrict_candidates(env, config, quietly, arena, &its[k].profile);
        if (status == HAPT_ERR_INFEASIBLE && quietly) its[k].profile = NULL;
        if (status != HAPT_OK && its[k].profile) return status;
        hapt_fail_reset();
        if (!its[k].other) continue;
        its[k].other->precision = its[k].model->precision;
        if (restrict_candidates(env, config, true, arena, &its[k].other) != HAPT_OK) its[k].other = NULL;
        hapt_fail_reset();
    }
    return HAPT_OK;
}
