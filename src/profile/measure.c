/*
 * Measured profiles (HAPT 5.1, the zero-redundant profiler).
 *
 * Subclusters of one kind of device on one host form a class and share measurements (classes.h).
 * A class measures every item once per round; rounds are interleaved over all items and rotate over the ranks, so that
 * neither a slow moment nor a slow core meets one item alone; the median of the rounds counts. The spread of the rounds
 * is the noise that is reported (steadiness.h).
 *
 * Every number comes from engine runs: those of a device by itself are thread CPU time, on a GPU the device's, times
 * its slowdown (measure_rounds.c), those of mixed stages wall time of the ranks that would train them
 * (mixed_measure.c).
 */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "afford.h"
#include "hapt/progress.h"

/* Of --profile-seconds: with mixed stages for what is timed of devices by themselves, and at least for mixed stages. */
#define ALONE_SHARE 0.5
#define SLOWED_SHARE 0.5 /* for running stages of slowed devices */
#define MIXED_SHARE 0.3
#define NOISY 0.1 /* times that may be off by more are worth a warning: plans differ by less */

enum hapt_status measure_sum_over_ranks(const struct measure *measure, double *data, size_t count)
{
    /* Rarely more than a few megabytes; each element comes from one rank, all others give 0. */
    for (size_t done = 0; done < count;) {
        const size_t part = count - done > ((size_t)1 << 24) ? (size_t)1 << 24 : count - done;
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, data + done, (int)part, MPI_DOUBLE, MPI_SUM, measure->env->world));
        done += part;
    }
    return HAPT_OK;
}

/* What is left of --profile-seconds, the same on all ranks. */
enum hapt_status measure_budget_left(const struct measure *measure, double *budget_s)
{
    *budget_s = hapt_config_real(measure->config, "profile-seconds") - (hapt_time_s() - measure->start_s);
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, budget_s, 1, MPI_DOUBLE, MPI_MIN, measure->env->world));
    return HAPT_OK;
}

/* ---- memory and the items of interest ---- */

static enum hapt_status plan_items(struct measure *measure, const struct hapt_engine_options *options)
{
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    if (!measure->classes.leads) return HAPT_OK;
    hapt_progress_init(&progress, measure->env, "planning memory", measure->candidates->item_count);
    for (int item = 0; item < measure->candidates->item_count && status == HAPT_OK; item++) {
        status = candidates_plan_memory(measure->candidates, item, options,
                                        measure_memory(measure, measure->classes.mine, item));
        hapt_progress_update(&progress, item + 1, NULL);
    }
    hapt_progress_release(&progress);
    return status;
}

/* Marks what some subcluster of my class can use, and every single layer: sums are made of them. */
static void mark_needed(struct measure *measure, struct hapt_submesh *submesh)
{
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int c = 0; c < measure->cluster->count; c++) {
        if (measure->classes.of_subcluster[c] != measure->classes.mine) continue;
        const struct hapt_subcluster *subcluster = &measure->cluster->subcluster[c];
        const int count = candidates_submeshes(subcluster, submesh);
        for (int s = 0; s < count; s++) {
            const int degree = candidates_degree_of(candidates, submesh[s]);
            for (int i = 0; degree >= 0 && i < L; i++) {
                for (int j = i; j < L; j++) {
                    const int item = candidates_item(candidates, degree, i, j);
                    if (i == j || candidates_wanted(candidates, c, submesh[s], i, j,
                                                    measure_memory(measure, measure->classes.mine, item)))
                        measure->needed[item] = true;
                }
            }
        }
    }
}

double measure_class_memory(const struct measure *measure)
{
    double most = 0;
    for (int c = 0; c < measure->cluster->count; c++)
        if (measure->classes.of_subcluster[c] == measure->classes.mine)
            most = fmax(most, measure->cluster->subcluster[c].device.memory_bytes);
    return most;
}

double measure_room(const struct measure *measure, const struct hapt_engine_options *options)
{
    return fmin(measure_class_memory(measure), afford_room(options, &measure->classes));
}

enum hapt_status measure_check_cost(const struct measure *measure)
{
    const struct afford_question question = {
        .env = measure->env,
        .config = measure->config,
        .candidates = measure->candidates,
        .classes = &measure->classes,
        .windows = &measure->windows,
        .needed = measure->needed,
        .memory = measure->classes.mine < 0 ? NULL : measure_memory(measure, measure->classes.mine, 0),
        .teams = measure_any_slowed(measure->cluster) || measure->candidates->mixed_count > 0};
    return afford_check(&question, measure->scratch);
}

/* ---- the whole ---- */

double measure_sum_s(const struct measure *measure, int subcluster, struct hapt_submesh submesh, double bytes)
{
    if (submesh.n * submesh.m == 1) return 0;
    const int index = candidates_submesh_index(&measure->cluster->subcluster[subcluster], submesh);
    return reduce_measured_s(&measure->reduce, subcluster, index, bytes);
}

static double all_reduce(const void *context, int subcluster, struct hapt_submesh submesh, double bytes)
{
    return measure_sum_s(context, subcluster, submesh, bytes);
}

static enum hapt_status make_tables(struct measure *measure, struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct candidates *candidates = measure->candidates;
    struct item_memory **memory;
    struct item_time **time;
    HAPT_NEW(memory, measure->scratch, measure->cluster->count);
    HAPT_NEW(time, measure->scratch, measure->cluster->count);
    for (int c = 0; c < measure->cluster->count; c++) {
        const double slowdown = fmax(measure->cluster->subcluster[c].device.slowdown, 1);
        memory[c] = measure_memory(measure, measure->classes.of_subcluster[c], 0);
        HAPT_NEW(time[c], measure->scratch, candidates->item_count);
        for (int item = 0; item < candidates->item_count; item++) {
            const struct item_time *cpu = measure_time(measure, measure->classes.of_subcluster[c], item);
            time[c][item] = (struct item_time){.forward_s = slowdown * cpu->forward_s,
                                               .backward_s = slowdown * cpu->backward_s,
                                               .update_s = slowdown * cpu->update_s + cpu->end_s};
        }
    }
    return candidates_fill(candidates, memory, time, all_reduce, measure, result, profile);
}

enum hapt_status measure_set_up(struct measure *measure, struct hapt_engine_options *options)
{
    const struct candidates *candidates = measure->candidates;
    const size_t cells = (size_t)measure->classes.count * (size_t)candidates->item_count;
    HAPT_NEW(measure->memory, measure->scratch, cells);
    HAPT_NEW(measure->time, measure->scratch, cells);
    HAPT_NEW(measure->needed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->layer_s, measure->scratch, (size_t)candidates->degree_count * (size_t)candidates->layer_count);
    HAPT_NEW(measure->sample, measure->scratch, (size_t)candidates->item_count * MEASURE_MOST_ROUNDS * 2);
    HAPT_NEW(measure->role, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->timed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->order, measure->scratch, candidates->item_count);
    *options =
        (struct hapt_engine_options){.threads = measure->threads, .state_count = candidates->state_count, .slots = 1};
    if (measure->classes.mine < 0) return HAPT_OK;
    const int mine = measure->cluster->subcluster_of_rank[measure->env->world_rank];
    const char *name = measure->cluster->subcluster[mine].device.backend;
    const char *reason = "";
    options->backend = hapt_backend_find(name);
    const int devices = options->backend ? options->backend->device_count(&reason) : 0;
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT,
                         "plan for such devices with `hapt plan --input M --cluster C`, or --predict yes",
                         "rank %d has no %s device to measure on (%s)", measure->env->world_rank, name, reason);
    HAPT_TRY(options->backend->open(hapt_env_device(measure->env, devices), measure->threads, 0, &options->device));
    return plan_items(measure, options);
}

static enum hapt_status choose_windows(struct measure *measure, const struct hapt_engine_options *options)
{
    if (measure->classes.mine < 0) return HAPT_OK;
    struct hapt_submesh *submesh;
    int most = 0;
    for (int c = 0; c < measure->cluster->count; c++) {
        const int count = candidates_submeshes(&measure->cluster->subcluster[c], NULL);
        if (count > most) most = count;
    }
    HAPT_NEW(submesh, measure->scratch, most);
    mark_needed(measure, submesh);
    return windows_choose(measure->candidates, options, measure_room(measure, options),
                          measure_memory(measure, measure->classes.mine, 0), measure->needed, measure->scratch,
                          &measure->windows);
}

/* Sums over ranks, and over classes by their leads. Collective. */
static enum hapt_status gather_effort(struct measure *measure, struct hapt_profile_effort *effort)
{
    int64_t sum[] = {0, 0, measure->windows.opened, measure->effort.runs};
    for (int item = 0; item < measure->candidates->item_count && measure->classes.leads; item++) {
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

/* Uncertainty of a time, and its drift, for the least certain kind of device. Collective over env->world. */
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

static bool wanted(const void *context, const struct mixed_group *group, int first, int last)
{
    const struct measure *measure = context;
    const struct item_memory *memory[2];
    for (int side = 0; side < 2; side++)
        memory[side] = measure_memory(measure, measure->classes.of_subcluster[group->cluster[side]],
                                      candidates_item(measure->candidates, group->degree[side], first, last));
    return candidates_wanted_mixed(measure->candidates, group, first, last, memory);
}

/* Mixed stages as they train, in what is left of --profile-seconds. */
static enum hapt_status run_mixed(struct measure *measure, struct candidates *candidates,
                                  const struct hapt_engine_options *options)
{
    const struct mixed_measuring measuring = {.env = measure->env, .config = measure->config, .candidates = candidates};
    double budget_s;
    int64_t runs;
    HAPT_TRY(measure_budget_left(measure, &budget_s));
    budget_s = fmax(budget_s, MIXED_SHARE * hapt_config_real(measure->config, "profile-seconds"));
    return mixed_measure_times(&measuring, options, wanted, measure, budget_s, measure->scratch, &runs);
}

static enum hapt_status measure_all(struct measure *measure, struct candidates *candidates,
                                    struct hapt_engine_options *options, struct hapt_arena *result,
                                    struct hapt_profile **profile)
{
    const struct hapt_env *env = measure->env;
    HAPT_TRY(classes_find(env, measure->cluster, measure->threads, &measure->classes));
    HAPT_TRY(hapt_env_agree(env->world, measure_set_up(measure, options)));
    HAPT_TRY(measure_sum_over_ranks(measure, (double *)measure->memory,
                                    (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                        sizeof *measure->memory / sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, choose_windows(measure, options)));
    HAPT_TRY(measure_check_cost(measure));
    HAPT_TRY(reduce_measure(env, measure->cluster, options, hapt_config_real(measure->config, "timeout"),
                            measure->scratch, &measure->reduce));
    MPI_Comm class_comm;
    HAPT_MPI(MPI_Comm_split(env->world, measure->classes.mine < 0 ? MPI_UNDEFINED : measure->classes.mine,
                            env->world_rank, &class_comm));
    const enum hapt_status status = measure_run_class(measure, class_comm);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    windows_close(&measure->windows); /* their memory is the stages' */
    HAPT_TRY(
        measure_run_submeshes(measure, options, SLOWED_SHARE * hapt_config_real(measure->config, "profile-seconds")));
    if (candidates->mixed_count > 0) HAPT_TRY(run_mixed(measure, candidates, options));
    HAPT_TRY(hapt_env_agree(env->world, make_tables(measure, result, profile)));
    HAPT_TRY(gather_noise(measure, *profile));
    return gather_effort(measure, &(*profile)->effort);
}

enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, struct hapt_arena *result,
                                      struct hapt_profile **profile)
{
    struct candidates candidates;
    struct hapt_arena scratch;
    struct hapt_engine_options options = {0};
    const struct candidates_options data = {.programs = PROGRAM_DATA, .tensor_parallel = 1};
    hapt_arena_init(&scratch);
    struct measure measure = {.env = env,
                              .cluster = cluster,
                              .candidates = &candidates,
                              .config = config,
                              .scratch = &scratch,
                              .threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads")),
                              .start_s = hapt_time_s(),
                              .budget_s = hapt_config_real(config, "profile-seconds")};
    enum hapt_status status =
        hapt_env_agree(env->world, candidates_build(cluster, model, layers, config, &data, &scratch, &candidates));
    if (status == HAPT_OK) status = classes_same_structures(env, &candidates);
    if (status == HAPT_OK) status = measure_mix(&measure, layers, &candidates, &scratch);
    if (candidates.mixed_count > 0) measure.budget_s *= ALONE_SHARE;
    if (measure_any_slowed(cluster)) measure.budget_s *= 1 - SLOWED_SHARE;
    if (status == HAPT_OK) status = measure_all(&measure, &candidates, &options, result, profile);
    windows_close(&measure.windows);
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
