/* Measures mixed stages on the ranks that would train them. */
#include "measure_mixed.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"
#include "measure_programs.h"
#include "measure_sums.h"
#include "team_ranges.h"

#define COLLECTIVE_SECONDS 0.5 /* for the collectives of a mixed group */

/* ---- the ranks of a mixed group ---- */

static int device_count(const struct hapt_mixed_group *group)
{
    return group->devices[0] + group->devices[1];
}

/* Devices are numbered subcluster by subcluster, as in a plan. */
static int rank_of(const struct hapt_candidates *candidates, const struct hapt_mixed_group *group, int device)
{
    const int side = device >= group->devices[0];
    return candidates->cluster->subcluster[group->cluster[side]].ranks[device - (side ? group->devices[0] : 0)];
}

/* My device in the mixed group; -1: none. */
static int my_device(const struct mixed_measuring *measuring, const struct hapt_mixed_group *group)
{
    for (int d = 0; d < device_count(group); d++)
        if (rank_of(measuring->candidates, group, d) == measuring->env->world_rank) return d;
    return -1;
}

/* Communicator of the mixed group's ranks, in the order of its devices; MPI_COMM_NULL elsewhere. Collective over
 * env->world. */
static enum hapt_status split(const struct mixed_measuring *measuring, const struct hapt_mixed_group *group,
                              MPI_Comm *comm)
{
    const int device = my_device(measuring, group);
    HAPT_MPI(MPI_Comm_split(measuring->env->world, device < 0 ? MPI_UNDEFINED : 0, device, comm));
    return HAPT_OK;
}

/* Throttles links as in training: to the slowest emulated link between any of them. */
static enum hapt_status throttle_links(const struct mixed_measuring *measuring, const struct hapt_mixed_group *group,
                                       struct hapt_collective *collective)
{
    const struct hapt_candidates *candidates = measuring->candidates;
    int *ranks = malloc((size_t)device_count(group) * sizeof *ranks);
    if (!ranks) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the ranks of a mixed stage");
    for (int d = 0; d < device_count(group); d++) ranks[d] = rank_of(candidates, group, d);
    hapt_cluster_pace(candidates->cluster, device_count(group), ranks, collective);
    free(ranks);
    return HAPT_OK;
}

/* Broadcasts from the group's first rank to all. */
static enum hapt_status publish(const struct mixed_measuring *measuring, const struct hapt_mixed_group *group,
                                void *data, size_t bytes)
{
    HAPT_MPI(MPI_Bcast(data, (int)bytes, MPI_BYTE, rank_of(measuring->candidates, group, 0), measuring->env->world));
    return HAPT_OK;
}

/* ---- programs ---- */

/* As the programs of the mixed group will run them. */
static enum hapt_status time_collectives(const struct mixed_measuring *measuring, const struct hapt_mixed_group *group,
                                         const struct hapt_engine_options *options, MPI_Comm comm,
                                         struct hapt_collective_model *model)
{
    const struct hapt_sharding sharding = {.axis = {{.size = device_count(group)}, {.size = 1}}}; /* only its axes */
    struct hapt_team team = {
        .sharding = &sharding, .rank = my_device(measuring, group), .size = device_count(group), .microbatch = -1};
    char carrier[HAPT_TEAM_TRANSPORT_CHARS];
    hapt_team_mesh_coordinate(&sharding, team.rank, team.mesh_coordinate);
    enum hapt_status status = hapt_team_connect(&team, comm, "profile", hapt_config_real(measuring->config, "timeout"));
    if (status == HAPT_OK)
        status =
            hapt_link_all_or_none(comm, "the collectives' measuring", throttle_links(measuring, group, team.all_ranks));
    if (status == HAPT_OK) status = hapt_team_use_devices(&team, options->backend, options->device, NULL, carrier);
    if (status == HAPT_OK)
        status = hapt_collective_measure_team(&team, options->backend, options->device, COLLECTIVE_SECONDS, model);
    hapt_team_release(&team);
    return status;
}

static enum hapt_status measure_collectives(const struct mixed_measuring *measuring,
                                            const struct hapt_mixed_group *group,
                                            const struct hapt_engine_options *options,
                                            struct hapt_collective_model *model)
{
    MPI_Comm comm;
    enum hapt_status status = HAPT_OK;
    HAPT_TRY(split(measuring, group, &comm));
    if (comm != MPI_COMM_NULL) {
        status = time_collectives(measuring, group, options, comm, model);
        MPI_Comm_free(&comm);
    }
    HAPT_TRY(sums_barrier(measuring->env->world));
    HAPT_TRY(hapt_env_agree(measuring->env->world, status));
    return publish(measuring, group, model, sizeof *model);
}

enum hapt_status measure_mixed_programs(const struct mixed_measuring *measuring,
                                        const struct hapt_engine_options *options, struct hapt_arena *arena)
{
    const struct hapt_env *env = measuring->env;
    struct hapt_candidates *candidates = measuring->candidates;
    for (int g = 0; g < candidates->mixable_count; g++) {
        struct hapt_mixed_group *group = &candidates->mixable[g];
        struct hapt_stage_layout *found[MIXED_PROGRAMS] = {NULL};
        int count = 0;
        enum hapt_status status = HAPT_OK;
        HAPT_TRY(measure_collectives(measuring, group, options, &group->sums));
        const struct hapt_mixed_question question = {.candidates = candidates,
                                                     .group = group,
                                                     .efficiency = measuring->efficiency,
                                                     .collectives = &group->sums,
                                                     .segments = (int)hapt_config_int(measuring->config, "segments")};
        /* Only rank 0 searches: elsewhere, rounding might give different programs from equal figures. */
        if (env->world_rank == 0) status = hapt_mixed_programs_find(&question, arena, found, &count);
        HAPT_TRY(sums_barrier(env->world));
        HAPT_TRY(hapt_env_agree(env->world, status));
        HAPT_MPI(MPI_Bcast(&count, 1, MPI_INT, 0, env->world));
        for (int p = 0; p < count; p++) {
            const struct hapt_stage_layout *layout;
            HAPT_TRY(programs_share_layout(env, found[p], arena, &layout));
            HAPT_TRY(hapt_env_agree(env->world, hapt_candidates_mix_program(candidates, group, layout, arena)));
        }
    }
    return HAPT_OK;
}

/* ---- times ---- */

struct timing {
    const struct mixed_measuring *measuring;
    struct hapt_mixed_group *group;
    mixed_wanted *wanted, *sharded;
    const void *context;
    struct team_ranges ranges;
};

static enum hapt_status shard(const struct hapt_candidates *candidates, const struct hapt_mixed_group *group,
                              int device, struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    const int place[HAPT_MESH_AXES] = {device, 0}, devices = device_count(group);
    struct hapt_sharding *made;
    if (group->program > 0) {
        HAPT_TRY(
            hapt_stage_layout_apply(candidates->layout[group->program - 1], candidates->model->graph, arena, &made));
    } else {
        double *ratio;
        HAPT_NEW(ratio, arena, devices);
        for (int d = 0; d < devices; d++)
            ratio[d] = (double)group->rows[d >= group->devices[0]] / candidates->model->microbatch;
        const struct hapt_axis axis = {.size = devices, .ratio_count = 1, .ratio = ratio};
        HAPT_TRY(hapt_sharding_rows(candidates->model->graph, &axis, arena, &made));
    }
    return hapt_sharding_at(made, place, arena, sharding);
}

static bool is_wanted(const void *context, int first, int last)
{
    const struct timing *timing = context;
    return timing->wanted(timing->context, timing->group, first, last);
}

static bool is_sharded(const void *context, int first, int last)
{
    const struct timing *timing = context;
    return timing->sharded(timing->context, timing->group, first, last);
}

static enum hapt_status list_ranges(struct timing *timing, struct hapt_arena *scratch)
{
    HAPT_TRY(team_ranges_list(timing->measuring->candidates, is_wanted, timing, timing->group->times, scratch,
                              &timing->ranges));
    return team_ranges_mark_sharded(&timing->ranges, is_sharded, timing, scratch);
}

/* Base times for ranges that are not run: the sums of their layers' times or, if unknown, of their work. */
static enum hapt_status sum_layers(const struct timing *timing, struct hapt_arena *scratch, double *base[3])
{
    const struct hapt_candidates *candidates = timing->measuring->candidates;
    double *work;
    HAPT_NEW(work, scratch, candidates->layer_count);
    for (int l = 0; l < candidates->layer_count; l++) work[l] = candidates->work[l + 1] - candidates->work[l] + 1;
    const double *const layer[3] = {work, work, work};
    return team_ranges_sums(&timing->ranges, layer, scratch, base);
}

static enum hapt_status open_stage(const struct timing *timing, const struct hapt_engine_options *options,
                                   MPI_Comm comm, struct hapt_arena *scratch, struct team_stage *stage)
{
    const struct mixed_measuring *measuring = timing->measuring;
    const struct hapt_candidates *candidates = measuring->candidates;
    const int device = my_device(measuring, timing->group),
              mine = candidates->cluster->subcluster_of_rank[measuring->env->world_rank];
    struct hapt_sharding *sharding = NULL;
    HAPT_TRY(
        hapt_link_all_or_none(comm, "a mixed stage", shard(candidates, timing->group, device, scratch, &sharding)));
    *stage = (struct team_stage){.candidates = candidates,
                                 .sharding = sharding,
                                 .options = *options,
                                 .comm = comm,
                                 .rank = device,
                                 .slowdown = candidates->cluster->subcluster[mine].device.slowdown,
                                 .timeout_s = hapt_config_real(measuring->config, "timeout"),
                                 .memory_bytes = candidates->cluster->subcluster[mine].device.memory_bytes};
    HAPT_TRY(team_stage_open(stage));
    HAPT_TRY(
        hapt_link_all_or_none(comm, "a mixed stage", throttle_links(measuring, timing->group, stage->team.all_ranks)));
    return team_stage_use_devices(stage);
}

static enum hapt_status run_group(struct timing *timing, const struct hapt_engine_options *options, MPI_Comm comm,
                                  double budget_s, struct hapt_arena *scratch)
{
    struct team_stage stage = {0};
    double *base[3];
    enum hapt_status status = open_stage(timing, options, comm, scratch, &stage);
    if (status == HAPT_OK) status = team_ranges_run(&timing->ranges, &stage, budget_s);
    team_stage_close(&stage);
    HAPT_TRY(status);
    HAPT_TRY(sum_layers(timing, scratch, base));
    return team_ranges_compose(&timing->ranges, is_wanted, timing, (const double *const *)base, scratch);
}

static enum hapt_status time_group(struct timing *timing, const struct hapt_engine_options *options, double budget_s,
                                   struct hapt_arena *scratch)
{
    const struct mixed_measuring *measuring = timing->measuring;
    const struct hapt_env *env = measuring->env;
    const size_t L = (size_t)measuring->candidates->layer_count;
    struct hapt_range_times *times = timing->group->times;
    MPI_Comm comm;
    HAPT_TRY(hapt_env_agree(env->world, list_ranges(timing, scratch)));
    if (timing->ranges.count == 0) return HAPT_OK;
    HAPT_TRY(split(measuring, timing->group, &comm));
    enum hapt_status status = HAPT_OK;
    if (comm != MPI_COMM_NULL) {
        status = run_group(timing, options, comm, budget_s, scratch);
        MPI_Comm_free(&comm);
    }
    HAPT_TRY(sums_barrier(env->world));
    HAPT_TRY(hapt_env_agree(env->world, status));
    double *const table[3] = {times->stage_s, times->forward_s, times->step_s};
    for (int t = 0; t < 3; t++) HAPT_TRY(publish(measuring, timing->group, table[t], L * L * sizeof(double)));
    return publish(measuring, timing->group, &timing->ranges.runs, sizeof timing->ranges.runs);
}

enum hapt_status measure_mixed_times(const struct mixed_measuring *measuring, const struct hapt_engine_options *options,
                                     mixed_wanted *wanted, mixed_wanted *sharded, const void *context, double budget_s,
                                     struct hapt_arena *arena, int64_t *runs)
{
    struct hapt_candidates *candidates = measuring->candidates;
    const double start_s = hapt_time_s();
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    *runs = 0;
    hapt_progress_init(&progress, measuring->env, "running mixed stages", candidates->mixed_count);
    for (int g = 0; g < candidates->mixed_count && status == HAPT_OK; g++) {
        struct hapt_mixed_group *group = &candidates->mixed[g];
        struct hapt_arena scratch;
        double left_s = budget_s - (hapt_time_s() - start_s);
        status = hapt_env_agree(measuring->env->world,
                                hapt_range_times_create(candidates->layer_count, arena, &group->times));
        HAPT_MPI(MPI_Bcast(&left_s, 1, MPI_DOUBLE, 0, measuring->env->world));
        struct timing timing = {
            .measuring = measuring, .group = group, .wanted = wanted, .sharded = sharded, .context = context};
        hapt_arena_init(&scratch);
        if (status == HAPT_OK)
            status = time_group(&timing, options, fmax(left_s, 0) / (candidates->mixed_count - g), &scratch);
        hapt_arena_release(&scratch);
        *runs += timing.ranges.runs;
        hapt_progress_update(&progress, g + 1, NULL);
    }
    hapt_progress_release(&progress);
    return status;
}
