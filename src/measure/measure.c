/*
 * Measured profiles (HAPT 5.1, the zero-redundant profiler).
 *
 * Subclusters of one kind of device on one host form a class and share measurements (classes.h). A class measures every
 * item once per round. Rounds are interleaved over all items and rotate over the ranks, so no item alone suffers from a
 * slow moment or a slow core. The median of the rounds counts; their spread is the reported noise (steadiness.h).
 *
 * Every number comes from engine runs. Times of single devices are thread CPU time, on a GPU device time, multiplied by
 * the device's slowdown (measure_rounds.c). Times of tensor-parallel, synthesised and mixed stages, and of steps with
 * sharded optimizer state, are wall time of the ranks that would train them (measure_stages.c, measure_mixed.c).
 */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "hapt/measure.h"
#include "hapt/progress.h"
#include "afford.h"
#include "measure_programs.h"

/* Shares of --profile-seconds with mixed stages: for timing single devices, and the minimum for mixed stages. */
#define ALONE_SHARE 0.5
#define SLOWED_SHARE 0.5 /* for running stages of slowed devices */
#define MIXED_SHARE 0.3
#define STAGES_SHARE 0.4 /* for running tensor-parallel, synthesised and sharded stages */
#define NOISY 0.1        /* warn if the uncertainty is larger: plans differ by less */

/* ---- needed items ---- */

/* Marks the items that some subcluster of my class can use, and every single layer, from which sums are made. */
static void mark_needed(struct measure *measure, struct hapt_submesh *submesh)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int c = 0; c < measure->cluster->count; c++) {
        if (measure->classes.of_subcluster[c] != measure->classes.own_class) continue;
        const struct hapt_subcluster *subcluster = &measure->cluster->subcluster[c];
        const int count = hapt_candidates_submeshes(subcluster, submesh);
        for (int s = 0; s < count; s++) {
            const int mesh_index = hapt_candidates_mesh_index_of(candidates, submesh[s]);
            for (int i = 0; mesh_index >= 0 && i < L; i++) {
                for (int j = i; j < L; j++) {
                    const int item = hapt_candidates_item(candidates, mesh_index, i, j);
                    const struct hapt_item_memory *memory = measure_memory(measure, measure->classes.own_class, item);
                    if (i == j || hapt_candidates_wanted(candidates, c, submesh[s], i, j, memory))
                        measure->needed[item] = measure->fits[item] = true;
                    else if (measure_wants_again(measure, c, submesh[s], i, j))
                        measure->needed[item] = true;
                }
            }
        }
    }
}

/* ---- the complete measurement ---- */

/* Figures that all stages on equal devices share. Unpaced copies of CPUs are work of the computing thread. */
static void set_class_figures(const struct measure *measure, struct hapt_profile *profile)
{
    for (int c = 0; c < measure->cluster->count; c++) {
        const int class = measure->classes.of_subcluster[c];
        const struct hapt_subcluster *own = &measure->cluster->subcluster[c];
        const bool beside = strcmp(own->device.backend, "cpu") != 0 || own->host_paced;
        if (measure->split_overhead) profile->cluster[c].split_overhead = measure->split_overhead[class];
        if (measure->copied_share && beside && hapt_candidates_defers(measure->config))
            profile->cluster[c].deferrable = measure->copied_share[class];
    }
}

/* *kept: without stages that recompute or whose weights move (unless those of all do); *profile if there are none;
 * NULL: then some layer fits nowhere. */
static enum hapt_status make_tables(struct measure *measure, struct hapt_arena *result, struct hapt_profile **profile,
                                    struct hapt_profile **kept)
{
    const struct hapt_candidates *candidates = measure->candidates;
    struct hapt_item_memory **memory;
    struct hapt_item_time **time;
    struct hapt_item_again **again = NULL;
    double **weight_share = NULL;
    if (measure->again) HAPT_NEW(again, measure->scratch, measure->cluster->count);
    HAPT_NEW(memory, measure->scratch, measure->cluster->count);
    HAPT_NEW(time, measure->scratch, measure->cluster->count);
    if (measure->weight_share) HAPT_NEW(weight_share, measure->scratch, measure->cluster->count);
    for (int c = 0; c < measure->cluster->count; c++) {
        const double slowdown = fmax(measure->cluster->subcluster[c].device.slowdown, 1);
        memory[c] = measure_memory(measure, measure->classes.of_subcluster[c], 0);
        if (weight_share)
            weight_share[c] =
                &measure->weight_share[(size_t)measure->classes.of_subcluster[c] * (size_t)candidates->item_count];
        HAPT_NEW(time[c], measure->scratch, candidates->item_count);
        for (int item = 0; item < candidates->item_count; item++) {
            const struct hapt_item_time *cpu = measure_time(measure, measure->classes.of_subcluster[c], item);
            const struct hapt_item_time alone = {.forward_s = slowdown * cpu->forward_s,
                                                 .backward_s = slowdown * cpu->backward_s,
                                                 .update_s = slowdown * cpu->update_s + cpu->end_s};
            time[c][item] = measure_stage_time(measure, c, item, alone);
        }
        if (again) HAPT_TRY(measure_time_again(measure, c, time[c], &again[c]));
    }
    HAPT_TRY(
        hapt_candidates_fill(candidates, memory, time, weight_share, again, measure_sum_s, measure, result, profile));
    set_class_figures(measure, *profile);
    *kept = *profile;
    if (!again) return HAPT_OK;
    struct hapt_candidates keeping = *candidates;
    /* those of the first choice of recomputation */
    keeping.keep_count = 1 + (keeping.keep[0].weights_at == HAPT_GRADIENTS_ON_HOST ||
                              keeping.weight_sharding == HAPT_WEIGHT_SHARDING_ALL);
    for (int k = 0; k < keeping.keep_count; k++) keeping.keep[k].recompute = 0;
    const enum hapt_status status =
        hapt_candidates_fill(&keeping, memory, time, weight_share, again, measure_sum_s, measure, result, kept);
    if (status == HAPT_OK) set_class_figures(measure, *kept);
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    *kept = NULL;
    return HAPT_OK;
}

static enum hapt_status choose_windows(struct measure *measure, const struct hapt_engine_options *options)
{
    if (measure->classes.own_class < 0) return HAPT_OK;
    struct hapt_submesh *submesh;
    int most = 0;
    for (int c = 0; c < measure->cluster->count; c++) {
        const int count = hapt_candidates_submeshes(&measure->cluster->subcluster[c], NULL);
        if (count > most) most = count;
    }
    HAPT_NEW(submesh, measure->scratch, most);
    mark_needed(measure, submesh);
    return bench_engines_choose(measure->candidates, options, measure_room(measure, options),
                                measure_memory(measure, measure->classes.own_class, 0), measure->fits, measure->scratch,
                                &measure->bench_engines);
}

/* Sums over ranks; one rank per class counts its items. Collective. */
static enum hapt_status gather_effort(struct measure *measure, struct hapt_profile_effort *effort)
{
    int64_t sum[] = {measure->effort.unique, measure->effort.timed,
                     measure->bench_engines.opened + measure->effort.programs, measure->effort.runs};
    for (int item = 0; item < measure->candidates->item_count && measure->classes.is_lead; item++) {
        sum[0] += measure->needed[item];
        sum[1] += measure->timed[item];
    }
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, sum, 4, MPI_INT64_T, MPI_SUM, measure->env->world));
    *effort = (struct hapt_profile_effort){.unique = sum[0],
                                           .timed = sum[1],
                                           .programs = sum[2],
                                           .runs = sum[3],
                                           .seconds = hapt_time_s() - measure->start_s};
    return HAPT_OK;
}

/* Uncertainty and drift of the times, for the least certain kind of device. Collective over env->world. */
static enum hapt_status gather_noise(const struct measure *measure, struct hapt_profile *profile)
{
    const double own = fmax(fmax(measure->noise[0], measure->noise[1]), steadiness_figure(measure->steadiness));
    struct {
        double noise;
        int rank;
    } worst = {own, measure->env->world_rank};
    double drift = measure->steadiness.drift;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_DOUBLE_INT, MPI_MAXLOC, measure->env->world));
    HAPT_MPI(MPI_Bcast(&drift, 1, MPI_DOUBLE, worst.rank, measure->env->world));
    profile->noise = worst.noise;
    profile->drift = drift;
    return HAPT_OK;
}

static void warn_of_noise(const struct measure *measure, const struct hapt_profile *profile)
{
    const char *hint = "measure again when nothing else runs here, or for longer (--profile-seconds)";
    if (fabs(profile->drift) > NOISY)
        hapt_warn(measure->env,
                  "the devices became %.0f %% %s while they were measured, so times may be off by %.0f %%: %s\n",
                  100 * fabs(profile->drift), profile->drift > 0 ? "slower" : "faster", 100 * profile->noise, hint);
    else if (profile->noise > NOISY)
        hapt_warn(measure->env,
                  "the devices' speed varied while they were measured, so times may be off by %.0f %%: %s\n",
                  100 * profile->noise, hint);
}

/* Memory of a mixed stage on one of its two kinds of devices. */
static const struct hapt_item_memory *
memory_of_side(const struct measure *measure, const struct hapt_mixed_group *group, int side, int first, int last)
{
    return measure_memory(measure, measure->classes.of_subcluster[group->cluster[side]],
                          hapt_candidates_item(measure->candidates, group->mesh_index[side], first, last));
}

static bool wanted(const void *context, const struct hapt_mixed_group *group, int first, int last)
{
    const struct measure *measure = context;
    const struct hapt_item_memory *memory[2];
    for (int side = 0; side < 2; side++) memory[side] = memory_of_side(measure, group, side, first, last);
    return hapt_candidates_wanted_mixed(measure->candidates, group, first, last, memory);
}

/* Training shards the state of a stage if one of its devices requires it. */
static bool sharded(const void *context, const struct hapt_mixed_group *group, int first, int last)
{
    const struct measure *measure = context;
    bool any = false;
    for (int side = 0; side < 2; side++)
        any =
            any || hapt_candidates_shards_state(measure->candidates, memory_of_side(measure, group, side, first, last),
                                                measure->cluster->subcluster[group->cluster[side]].device.memory_bytes);
    return any;
}

/* Runs mixed stages as in training, in what is left of --profile-seconds. */
static enum hapt_status run_mixed(struct measure *measure, struct hapt_candidates *candidates,
                                  const struct hapt_engine_options *options)
{
    const struct mixed_measuring measuring = {.env = measure->env, .config = measure->config, .candidates = candidates};
    double budget_s;
    int64_t runs;
    HAPT_TRY(measure_budget_left(measure, &budget_s));
    budget_s = fmax(budget_s, MIXED_SHARE * hapt_config_real(measure->config, "profile-seconds"));
    return measure_mixed_times(&measuring, options, wanted, sharded, measure, budget_s, measure->scratch, &runs);
}

/* Runs the stages of slowed devices, then those that only teams can time. */
static enum hapt_status run_teams(struct measure *measure, const struct hapt_engine_options *options)
{
    const double whole_s = hapt_config_real(measure->config, "profile-seconds");
    const bool more = measure->stages.rounds > 0;
    double left_s;
    HAPT_TRY(measure_run_submeshes(measure, options, SLOWED_SHARE * (more ? 1 - STAGES_SHARE : 1) * whole_s));
    if (!more) return HAPT_OK;
    HAPT_TRY(measure_budget_left(measure, &left_s));
    if (measure->candidates->mixed_count > 0) left_s -= MIXED_SHARE * whole_s;
    return measure_run_stages(measure, options, fmax(left_s, STAGES_SHARE * whole_s));
}

static enum hapt_status measure_all(struct measure *measure, struct hapt_candidates *candidates,
                                    struct hapt_engine_options *options, struct hapt_arena *result,
                                    struct hapt_profile **profile, struct hapt_profile **kept)
{
    const struct hapt_env *env = measure->env;
    HAPT_TRY(classes_find(env, measure->cluster, measure->threads, &measure->classes));
    HAPT_TRY(hapt_env_agree(env->world, measure_set_up(measure, options)));
    HAPT_TRY(measure_sum_over_ranks(measure, (double *)measure->memory,
                                    (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                        sizeof *measure->memory / sizeof(double)));
    if (measure->again)
        HAPT_TRY(measure_sum_over_ranks(measure, (double *)measure->again,
                                        (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                            (size_t)measure->candidates->keep_stride * sizeof *measure->again /
                                            sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, programs_choose(measure, candidates)));
    HAPT_TRY(hapt_env_agree(env->world, measure_list_stages(measure)));
    HAPT_TRY(hapt_env_agree(env->world, choose_windows(measure, options)));
    HAPT_TRY(measure_check_cost(measure));
    if (measure->stages.rounds > 0) measure->budget_s *= 1 - STAGES_SHARE;
    HAPT_TRY(sums_measure(env, measure->cluster, options, hapt_config_real(measure->config, "timeout"),
                          measure->scratch, &measure->sums));
    MPI_Comm class_comm;
    HAPT_MPI(MPI_Comm_split(env->world, measure->classes.own_class < 0 ? MPI_UNDEFINED : measure->classes.own_class,
                            env->world_rank, &class_comm));
    const enum hapt_status status = measure_run_class(measure, class_comm);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    if (candidates->split) HAPT_TRY(measure_weights(measure, options));
    bench_engines_close(&measure->bench_engines); /* the stages need their memory */
    HAPT_TRY(run_teams(measure, options));
    if (candidates->mixed_count > 0) HAPT_TRY(run_mixed(measure, candidates, options));
    HAPT_TRY(hapt_env_agree(env->world, make_tables(measure, result, profile, kept)));
    HAPT_TRY(gather_noise(measure, *profile));
    HAPT_TRY(gather_effort(measure, &(*profile)->effort));
    if (!*kept) return HAPT_OK;
    (*kept)->noise = (*profile)->noise;
    (*kept)->drift = (*profile)->drift;
    (*kept)->effort = (*profile)->effort;
    return HAPT_OK;
}

enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, bool recompute, struct hapt_offloading offload,
                                      struct hapt_arena *result, struct hapt_profile **profile,
                                      struct hapt_profile **kept)
{
    struct hapt_profile *without;
    struct hapt_candidates candidates;
    struct hapt_arena scratch;
    struct hapt_engine_options options = {0};
    hapt_arena_init(&scratch);
    struct measure measure = {.env = env,
                              .cluster = cluster,
                              .candidates = &candidates,
                              .config = config,
                              .scratch = &scratch,
                              .threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads")),
                              .start_s = hapt_time_s(),
                              .recompute = recompute,
                              .offload = offload,
                              .budget_s = hapt_config_real(config, "profile-seconds")};
    enum hapt_status status = programs_build(&measure, model, layers, &candidates, &scratch);
    if (status == HAPT_OK) status = measure_mix(&measure, layers, &candidates, &scratch);
    if (candidates.mixed_count > 0) measure.budget_s *= ALONE_SHARE;
    if (measure_any_slowed(cluster)) measure.budget_s *= 1 - SLOWED_SHARE;
    if (status == HAPT_OK)
        status = measure_all(&measure, &candidates, &options, result, profile, kept ? kept : &without);
    bench_engines_close(&measure.bench_engines);
    if (options.device) options.backend->close(options.device);
    if (status == HAPT_OK) {
        hapt_note(env, "profiled: %lld of %lld unique ranges timed%s; %d rounds, noise %.1f %%, %.1f s\n",
                  (long long)(*profile)->effort.timed, (long long)(*profile)->effort.unique,
                  (*profile)->effort.timed < (*profile)->effort.unique ? ", the others composed" : "", measure.rounds,
                  100 * (*profile)->noise, (*profile)->effort.seconds);
        warn_of_noise(&measure, *profile);
    }
    hapt_arena_release(&scratch);
    return status;
}
