/* Predicted profiles: whether stages recompute and where the optimizer state is, and several profiles at a time. */
#include "phases.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/candidates.h"
#include "hapt/predict.h"
#include "hapt/progress.h"
#include "hapt/search.h"

/* A schedule with the launches of the asked one, or with more: looped ones hold at most all microbatches. */
static enum hapt_schedule_kind schedule_of(const struct hapt_config *config)
{
    enum hapt_schedule_kind kind;
    HAPT_ASSERT(hapt_schedule_kind_parse(hapt_config_text(config, "schedule"), &kind));
    return hapt_schedule_loops(kind) ? HAPT_SCHEDULE_GPIPE : kind;
}

static enum hapt_status formula_s(const struct hapt_config *config, const struct hapt_profile *profile,
                                  int microbatches, double *latency_s)
{
    const struct hapt_search_options options = {.objective = HAPT_OBJECTIVE_FORMULA,
                                                .microbatches = microbatches,
                                                .schedule = schedule_of(config),
                                                .hide_threshold = hapt_config_real(config, "hide-threshold"),
                                                .gap = HAPT_PHASE_MEMORY_WORTH - 1,
                                                .may_fail = true,
                                                .unexplained = true};
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

enum hapt_status hapt_phase_formula_s(const struct hapt_config *config, const struct hapt_profile *profile,
                                      double *latency_s)
{
    return formula_s(config, profile, (int)hapt_config_int(config, "microbatches"), latency_s);
}

enum hapt_status hapt_phase_lacks_memory(const struct hapt_config *config, const struct hapt_profile *profile,
                                         bool *lacks)
{
    struct hapt_profile *roomy;
    struct hapt_arena scratch;
    double now_s, best_s = 0;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_phase_formula_s(config, profile, &now_s);
    if (status == HAPT_OK && isfinite(now_s)) {
        status = hapt_profile_roomy_view(profile, &scratch, &roomy);
        if (status == HAPT_OK) status = hapt_phase_formula_s(config, roomy, &best_s);
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

/* True if another system plans. It recomputes, too, if that helps; even has the submeshes of a plan that keeps all. */
static bool is_other_system(const struct hapt_config *config)
{
    const char *strategy = hapt_config_text(config, "strategy");
    return strcmp(strategy, "hapt") != 0 && strcmp(strategy, "even") != 0 && !hapt_config_text(config, "stages");
}

static bool is_auto(const struct hapt_config *config, const char *option)
{
    return !strcmp(hapt_config_text(config, option), "auto");
}

bool hapt_phase_chooses_memory(const struct hapt_config *config, const char *option)
{
    return is_auto(config, option) &&
           (may_choose_memory(config) || (strcmp(option, "recompute") == 0 && is_other_system(config)));
}

/* True if updates on the host are an automatic choice: those of CPUs have the same bits, and the rate of a GPU's host
 * is known if the cluster file gives it. */
static bool may_update(const struct hapt_subcluster *subcluster)
{
    return strcmp(subcluster->device.backend, "cpu") == 0 || subcluster->host_update_rate > 0;
}

bool hapt_phase_updates_on_host(const struct hapt_config *config, const struct hapt_cluster *cluster,
                                const struct hapt_model *model, enum hapt_offload offload)
{
    const char *choice = hapt_config_text(config, "update-on");
    const int states = hapt_candidates_states(config);
    if (offload == HAPT_OFFLOAD_NO || states == 0) return false;
    if (strcmp(choice, "auto") != 0) return !strcmp(choice, "host");
    if (offload == HAPT_OFFLOAD_STAGES_GRADIENTS || offload == HAPT_OFFLOAD_GRADIENTS) return true;
    enum { MANY = 100000000 }; /* parameters of which a window is a small part */
    const bool weights = offload >= HAPT_OFFLOAD_WEIGHTS, half = model->dtype != HAPT_F32;
    const struct hapt_item_memory memory = {.masters_unread = half, .copies = half};
    const double state_bytes = 4.0 * (states + (weights || half)) * MANY; /* in each direction */
    const enum hapt_weights_at held = weights ? HAPT_WEIGHTS_ON_HOST : HAPT_WEIGHTS_RESIDENT;
    bool faster = true;
    for (int c = 0; c < cluster->count && faster; c++) {
        const struct hapt_subcluster *own = &cluster->subcluster[c];
        const double copies_s =
            (hapt_candidates_copies_itself(own) ? 2 : 1) * state_bytes / hapt_cluster_host_bandwidth(own);
        faster = may_update(own) && hapt_candidates_host_update_s(own, &memory, MANY, held) < copies_s;
    }
    return faster;
}

enum hapt_weight_sharding hapt_phase_weight_sharding(const struct hapt_config *config, bool may)
{
    const char *choice = hapt_config_text(config, "sharded-weights");
    if (!strcmp(choice, "yes")) return HAPT_WEIGHT_SHARDING_ALL;
    may = may && !strcmp(choice, "auto") && strcmp(hapt_config_text(config, "sharded-optimizer"), "no") != 0 &&
          hapt_phase_offload(config) < HAPT_OFFLOAD_WEIGHTS;
    return may ? HAPT_WEIGHT_SHARDING_MAY : HAPT_WEIGHT_SHARDING_NO;
}

static enum hapt_status predict(const struct hapt_prediction *of, bool recompute, enum hapt_offload offload,
                                bool may_shard, struct hapt_arena *arena, struct hapt_profile **profile)
{
    const struct hapt_offloading away = {offload,
                                         hapt_phase_updates_on_host(of->config, of->cluster, of->model, offload),
                                         hapt_phase_weight_sharding(of->config, may_shard)};
    const struct hapt_predict_options options = {recompute, away, of->roomy, of->node_rank};
    return hapt_profile_predict(of->cluster, of->model, of->layers, of->config, of->efficiency, &options, arena,
                                profile);
}

/* Ranges that fit no device are no candidates, so that a profile's view without limits of memory lacks them, too. Here
 * they are candidates. */
static enum hapt_status lacks_ranges(const struct hapt_prediction *of, enum hapt_offload offload,
                                     const struct hapt_profile *profile, bool *lacks)
{
    struct hapt_prediction without = *of;
    struct hapt_profile *roomy;
    struct hapt_arena scratch;
    double now_s, best_s = INFINITY;
    if (hapt_profile_holds_all(profile)) return HAPT_OK;
    hapt_arena_init(&scratch);
    without.roomy = true;
    enum hapt_status status = hapt_phase_formula_s(of->config, profile, &now_s);
    if (status == HAPT_OK) status = predict(&without, false, offload, false, &scratch, &roomy);
    if (status == HAPT_OK) status = hapt_phase_formula_s(of->config, roomy, &best_s);
    *lacks = status == HAPT_OK && now_s > HAPT_PHASE_MEMORY_WORTH * best_s;
    hapt_arena_release(&scratch);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* *better: `away`, with the optimizer on the host, if the formula's optimum is shorter with it, or no plan exists in
 * either way: then the one that lacks less explains why. *other: the other one if it has a plan, whose simulated step
 * may be shorter all the same. */
static enum hapt_status choose_better(const struct hapt_config *config, struct hapt_profile *away,
                                      struct hapt_profile *without, struct hapt_profile **better,
                                      struct hapt_profile **other)
{
    double step_s[2];
    HAPT_TRY(hapt_phase_formula_s(config, without, &step_s[0]));
    HAPT_TRY(hapt_phase_formula_s(config, away, &step_s[1]));
    const bool shorter = step_s[1] < step_s[0] || isinf(step_s[0]);
    *better = shorter ? away : without;
    if (isfinite(step_s[shorter ? 0 : 1])) *other = shorter ? without : away;
    return HAPT_OK;
}

/* With stages that recompute as --recompute says, and with sharded weights as --sharded-weights says. auto: if devices
 * lack memory otherwise, since each choice makes the search longer. Other systems have the choice where hapt has it, so
 * that --compare shows the same plans. *profile: the one that keeps all activations, if it is known; else NULL. *lacks:
 * devices lack memory, or would if all activations were kept; false if nothing is chosen. */
static enum hapt_status predict_recomputing(const struct hapt_prediction *of, enum hapt_offload offload,
                                            struct hapt_arena *arena, struct hapt_profile **profile, bool *lacks)
{
    const bool given = !is_auto(of->config, "recompute");
    const bool chooses = hapt_phase_chooses_memory(of->config, "offload") ||
                         (!given && hapt_phase_chooses_memory(of->config, "recompute"));
    enum hapt_status status = HAPT_OK;
    *lacks = false;
    if (!*profile) status = predict(of, given, offload, false, arena, profile);
    if (!chooses) return status;
    *lacks = status == HAPT_ERR_INFEASIBLE;
    if (status == HAPT_OK) HAPT_TRY(hapt_phase_lacks_memory(of->config, *profile, lacks));
    const bool as_planned = !given && offload != HAPT_OFFLOAD_WEIGHTS && offload != HAPT_OFFLOAD_GRADIENTS;
    if (status == HAPT_OK && !*lacks && as_planned) HAPT_TRY(lacks_ranges(of, offload, *profile, lacks));
    const bool shards = hapt_phase_weight_sharding(of->config, true) == HAPT_WEIGHT_SHARDING_MAY;
    if (!*lacks || (given && !shards)) return status;
    hapt_fail_reset();
    return predict(of, true, offload, true, arena, profile);
}

/* With the optimizer state on the hosts; if there is no plan, with the weights of the stages that need it as well, and
 * then with their gradients. */
static enum hapt_status predict_away(const struct hapt_prediction *of, struct hapt_arena *arena,
                                     struct hapt_profile **profile)
{
    const enum hapt_offload level[] = {HAPT_OFFLOAD_OPTIMIZER, HAPT_OFFLOAD_STAGES, HAPT_OFFLOAD_STAGES_GRADIENTS};
    enum hapt_status status = HAPT_OK;
    bool ignored;
    for (int k = 0; k < 3; k++) {
        double step_s = INFINITY;
        if (level[k] == HAPT_OFFLOAD_STAGES_GRADIENTS && !strcmp(hapt_config_text(of->config, "update-on"), "device"))
            break; /* the hosts would have to update */
        if (k > 0) hapt_fail_reset();
        *profile = NULL;
        status = predict_recomputing(of, level[k], arena, profile, &ignored);
        if (status == HAPT_OK) HAPT_TRY(hapt_phase_formula_s(of->config, *profile, &step_s));
        if ((status != HAPT_OK && status != HAPT_ERR_INFEASIBLE) || isfinite(step_s)) break;
    }
    return status;
}

/* *any: there is a plan with one microbatch in flight if stages may leave all on the hosts and recompute. Otherwise
 * there is none with lesser choices either. */
static enum hapt_status find_any(const struct hapt_prediction *of, bool *any)
{
    const bool updates = strcmp(hapt_config_text(of->config, "update-on"), "device") != 0,
               recompute = is_auto(of->config, "recompute") || strcmp(hapt_config_text(of->config, "recompute"), "no");
    struct hapt_arena scratch;
    struct hapt_profile *profile;
    double step_s = INFINITY;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        predict(of, recompute, updates ? HAPT_OFFLOAD_STAGES_GRADIENTS : HAPT_OFFLOAD_STAGES, true, &scratch, &profile);
    if (status == HAPT_OK) status = formula_s(of->config, profile, 1, &step_s);
    *any = isfinite(step_s);
    hapt_arena_release(&scratch);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* find_any, if there is no plan with all state on the devices; else *any is true. */
static enum hapt_status check_any(const struct hapt_prediction *of, enum hapt_status status,
                                  const struct hapt_profile *profile, bool *any)
{
    double step_s = INFINITY;
    if (status == HAPT_OK) HAPT_TRY(hapt_phase_formula_s(of->config, profile, &step_s));
    if (isfinite(step_s)) return HAPT_OK;
    return find_any(of, any);
}

enum hapt_offload hapt_phase_offload(const struct hapt_config *config)
{
    const char *choice = hapt_config_text(config, "offload");
    return !strcmp(choice, "gradients")   ? HAPT_OFFLOAD_GRADIENTS
           : !strcmp(choice, "weights")   ? HAPT_OFFLOAD_WEIGHTS
           : !strcmp(choice, "optimizer") ? HAPT_OFFLOAD_OPTIMIZER
                                          : HAPT_OFFLOAD_NO;
}

enum hapt_status hapt_phase_predict(const struct hapt_prediction *of, struct hapt_arena *arena,
                                    struct hapt_profile **profile, struct hapt_profile **other)
{
    const enum hapt_offload given = hapt_phase_offload(of->config);
    struct hapt_profile *away = NULL;
    bool lacks, any = true;
    *profile = of->kept;
    *other = NULL;
    if (of->roomy) return predict(of, false, HAPT_OFFLOAD_NO, false, arena, profile);
    const enum hapt_status status = predict_recomputing(of, given, arena, profile, &lacks);
    if (!hapt_phase_chooses_memory(of->config, "offload") || !lacks ||
        (status != HAPT_OK && status != HAPT_ERR_INFEASIBLE))
        return status;
    hapt_fail_reset();
    if (of->quietly) HAPT_TRY(check_any(of, status, *profile, &any));
    if (!any) return hapt_fail(HAPT_ERR_INFEASIBLE, NULL, "no plan, whatever stages keep");
    const enum hapt_status offloaded = predict_away(of, arena, &away);
    if (offloaded == HAPT_ERR_INFEASIBLE && status == HAPT_OK) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(offloaded);
    if (status == HAPT_OK) return choose_better(of->config, away, *profile, profile, other);
    *profile = away;
    return HAPT_OK;
}

enum hapt_status hapt_phase_decide_microbatches(struct hapt_config *config, int microbatches)
{
    char text[32];
    if (hapt_config_int(config, "microbatches") == microbatches) return HAPT_OK;
    snprintf(text, sizeof text, "%d", microbatches);
    return hapt_config_decide(config, "microbatches", text);
}

/* An environment in which rank `first` of each node is its first rank. Release env->node. */
static enum hapt_status begin_node_with(const struct hapt_env *env, int first, struct hapt_env *made)
{
    *made = *env;
    made->node_rank = (env->node_rank + env->node_size - first) % env->node_size;
    HAPT_MPI(MPI_Comm_split(env->node, 0, made->node_rank, &made->node));
    return hapt_env_mpi(MPI_Comm_set_errhandler(made->node, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
}

/* *everywhere: holds on the makers of all nodes. */
static enum hapt_status all_makers(const struct hapt_env *env, bool makes, bool holds, int *everywhere)
{
    *everywhere = !makes || holds;
    return hapt_env_mpi(MPI_Allreduce(MPI_IN_PLACE, everywhere, 1, MPI_INT, MPI_MIN, env->world), "MPI_Allreduce");
}

/* Shares a profile that rank `maker` of each node made, with its node. */
static enum hapt_status share(const struct hapt_env *env, int maker, const struct hapt_profile *kept,
                              struct hapt_profile *made, struct hapt_arena *arena, struct hapt_profile **profile)
{
    const bool makes = env->node_rank == maker;
    struct hapt_env node;
    enum hapt_status status = HAPT_OK;
    if (makes && made == kept) status = hapt_profile_copy(made, arena, &made); /* sharing moves its tables */
    if (status == HAPT_OK) status = begin_node_with(env, maker, &node);
    HAPT_TRY(hapt_env_agree(env->world, status));
    status = hapt_profile_share(&node, HAPT_OK, made, arena, profile);
    MPI_Comm_free(&node.node);
    if (status == HAPT_OK) (*profile)->origin = HAPT_PROFILE_PREDICTED;
    return status;
}

/* Shares what rank `maker` of each node made, with its node. Quietly, HAPT_ERR_INFEASIBLE leaves its->profile NULL. */
static enum hapt_status share_from(const struct hapt_env *env, int maker, enum hapt_status status, bool quietly,
                                   struct hapt_profile *made, struct hapt_profile *other, struct hapt_arena *arena,
                                   struct hapt_profile_case *its)
{
    const bool makes = env->node_rank == maker;
    int kept, others;
    its->profile = its->other = NULL;
    if (!makes) status = HAPT_OK;
    const enum hapt_status agreed =
        quietly ? hapt_env_agree_quietly(env->world, status) : hapt_env_agree(env->world, status);
    if (quietly && agreed == HAPT_ERR_INFEASIBLE) return HAPT_OK;
    if (quietly && agreed == HAPT_ERR_INPUT) return hapt_env_agree(env->world, status); /* it was not printed */
    HAPT_TRY(agreed);
    HAPT_TRY(all_makers(env, makes, made == its->kept, &kept));
    if (kept && its->kept)
        its->profile = its->kept;
    else
        HAPT_TRY(share(env, maker, its->kept, made, arena, &its->profile));
    HAPT_TRY(all_makers(env, makes, other != NULL, &others));
    return others ? share(env, maker, its->kept, other, arena, &its->other) : HAPT_OK;
}

/* MOST_AT_A_TIME: host memory, since a case has a profile of its own on its maker until it is shared. MOST_OF_A_MAKER:
 * a case with many rows and one with few take about as long as two between. */
enum { MOST_AT_A_TIME = 8, MOST_OF_A_MAKER = 2 };

/* Ranks of the smallest node, but few. */
static enum hapt_status count_makers(const struct hapt_env *env, int *makers)
{
    const enum hapt_status status =
        hapt_env_mpi(MPI_Allreduce(&env->node_size, makers, 1, MPI_INT, MPI_MIN, env->world), "MPI_Allreduce");
    if (*makers > MOST_AT_A_TIME) *makers = MOST_AT_A_TIME;
    return status;
}

struct predicting {
    struct hapt_env *env;
    struct hapt_config *config;
    const struct hapt_cluster *cluster;
    const struct hapt_efficiency *efficiency;
    bool quietly;
    int makers, each;      /* ranks of a node that predict, and cases that each predicts before they are shared */
    struct hapt_arena own; /* this rank's own copies, if it shares the profiles */
    struct hapt_arena *arena;
    enum hapt_status status[MOST_OF_A_MAKER];
    struct hapt_profile *made[MOST_OF_A_MAKER], *other[MOST_OF_A_MAKER];
};

/* The case with the index-th most rows, which take longest; -1: none. */
static int case_at(const struct hapt_profile_case *its, int count, int index)
{
    for (int k = 0; k < count; k++) {
        int before = 0;
        for (int other = 0; other < count; other++) {
            const int more = its[other].model->microbatch - its[k].model->microbatch;
            before += more > 0 || (more == 0 && other < k);
        }
        if (before == index) return k;
    }
    return -1;
}

/* The n-th case of a maker in the round that begins with case_at(first). The direction alternates, so that makers need
 * about as long. */
static int case_of(const struct predicting *predicting, const struct hapt_profile_case *its, int count, int first,
                   int n, int rank)
{
    if (rank >= predicting->makers) return -1;
    return case_at(its, count, first + n * predicting->makers + (n % 2 ? predicting->makers - 1 - rank : rank));
}

static enum hapt_status predict_case(struct predicting *predicting, const struct hapt_profile_case *its, int n)
{
    const struct hapt_prediction of = {.config = predicting->config,
                                       .cluster = predicting->cluster,
                                       .model = its->model,
                                       .layers = its->layers,
                                       .efficiency = predicting->efficiency,
                                       .kept = its->kept,
                                       .node_rank = predicting->env->node_rank,
                                       .quietly = predicting->quietly};
    struct hapt_arena *arena = predicting->env->node_size > 1 ? &predicting->own : predicting->arena;
    HAPT_TRY(hapt_phase_decide_microbatches(predicting->config, its->microbatches));
    return hapt_phase_predict(&of, arena, &predicting->made[n], &predicting->other[n]);
}

/* Predicts this rank's cases of a round. Behind a failure none is predicted, unless they are asked quietly. */
static void predict_round(struct predicting *predicting, const struct hapt_profile_case *its, int count, int first)
{
    enum hapt_status before = HAPT_OK;
    for (int n = 0; n < predicting->each; n++) {
        const int mine = case_of(predicting, its, count, first, n, predicting->env->node_rank);
        predicting->made[n] = predicting->other[n] = NULL;
        predicting->status[n] = before;
        if (before == HAPT_ERR_INFEASIBLE && predicting->quietly) {
            hapt_fail_reset();
            predicting->status[n] = HAPT_OK;
        }
        if (mine >= 0 && predicting->status[n] == HAPT_OK)
            predicting->status[n] = predict_case(predicting, &its[mine], n);
        before = predicting->status[n];
    }
}

static enum hapt_status share_round(struct predicting *predicting, struct hapt_profile_case *its, int count, int first)
{
    for (int n = 0; n < predicting->each; n++)
        for (int rank = 0; rank < predicting->makers; rank++) {
            const int shared = case_of(predicting, its, count, first, n, rank);
            if (shared < 0) continue;
            HAPT_TRY(share_from(predicting->env, rank, predicting->status[n], predicting->quietly, predicting->made[n],
                                predicting->other[n], predicting->arena, &its[shared]));
        }
    return HAPT_OK;
}

enum hapt_status hapt_phase_predict_cases(struct hapt_env *env, struct hapt_config *config,
                                          const struct hapt_cluster *cluster, const struct hapt_efficiency *efficiency,
                                          struct hapt_profile_case *its, int count, bool quietly,
                                          struct hapt_arena *arena)
{
    struct hapt_progress progress;
    struct predicting predicting = {
        .env = env, .config = config, .cluster = cluster, .efficiency = efficiency, .quietly = quietly, .arena = arena};
    HAPT_TRY(hapt_env_agree(env->world, count_makers(env, &predicting.makers)));
    predicting.each = predicting.makers * MOST_OF_A_MAKER <= MOST_AT_A_TIME ? MOST_OF_A_MAKER : 1;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, env, "predicting", 0);
    hapt_arena_init(&predicting.own);
    for (int first = 0; first < count && status == HAPT_OK; first += predicting.each * predicting.makers) {
        predict_round(&predicting, its, count, first);
        status = share_round(&predicting, its, count, first);
        hapt_arena_release(&predicting.own);
        if (quietly && status == HAPT_OK) hapt_fail_reset();
    }
    hapt_progress_release(&progress);
    return status;
}
