/*
 * Shared by all parts of measuring: the tables of a class's items, the memory that each needs, the expected duration of
 * the measurement, and sums over ranks.
 */
#include <math.h>
#include <string.h>

#include "hapt/progress.h"
#include "afford.h"
#include "measure.h"

enum hapt_status measure_sum_over_ranks(const struct measure *measure, double *data, size_t count)
{
    /* Each element comes from one rank; the others give 0. In pieces, since MPI counts are ints. */
    for (size_t done = 0; done < count;) {
        const size_t part = count - done > ((size_t)1 << 24) ? (size_t)1 << 24 : count - done;
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, data + done, (int)part, MPI_DOUBLE, MPI_SUM, measure->env->world));
        done += part;
    }
    return HAPT_OK;
}

/* Remaining part of --profile-seconds, the same on all ranks. */
enum hapt_status measure_budget_left(const struct measure *measure, double *budget_s)
{
    *budget_s = hapt_config_real(measure->config, "profile-seconds") - (hapt_time_s() - measure->start_s);
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, budget_s, 1, MPI_DOUBLE, MPI_MIN, measure->env->world));
    return HAPT_OK;
}

static enum hapt_status plan_mesh(struct measure *measure, struct hapt_engine_options *options, int mesh_index)
{
    struct hapt_candidate_shardings shardings;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_candidates_shardings(measure->candidates, mesh_index, &scratch, &shardings);
    if (status == HAPT_OK)
        status = hapt_candidates_sizes(measure->candidates, mesh_index, &shardings, hapt_engine_scratch, options,
                                       &scratch, measure_memory(measure, measure->classes.own_class, 0),
                                       measure->again ? measure_again(measure, measure->classes.own_class, 0) : NULL);
    hapt_arena_release(&scratch);
    return status;
}

static enum hapt_status plan_items(struct measure *measure, struct hapt_engine_options *options)
{
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    if (!measure->classes.is_lead) return HAPT_OK;
    hapt_progress_init(&progress, measure->env, "planning memory", 0);
    hapt_progress_expect(measure->candidates->item_count);
    for (int d = 0; d < measure->candidates->mesh_count && status == HAPT_OK; d++)
        status = plan_mesh(measure, options, d);
    hapt_progress_release(&progress);
    return status;
}

double measure_room(const struct measure *measure, const struct hapt_engine_options *options)
{
    return fmin(classes_memory(measure->cluster, &measure->classes), afford_room(options, &measure->classes));
}

bool measure_any_slowed(const struct hapt_cluster *cluster)
{
    for (int c = 0; c < cluster->count; c++)
        if (cluster->subcluster[c].device.slowdown > 1) return true;
    return false;
}

enum hapt_status measure_check_cost(const struct measure *measure)
{
    const struct afford_question question = {
        .env = measure->env,
        .config = measure->config,
        .candidates = measure->candidates,
        .classes = &measure->classes,
        .bench_engines = &measure->bench_engines,
        .needed = measure->fits,
        .memory = measure->classes.own_class < 0 ? NULL : measure_memory(measure, measure->classes.own_class, 0),
        .run_by_teams = measure->stages.rounds > 0 ? measure->stages.longest : NULL,
        .teams = measure_any_slowed(measure->cluster) || measure->candidates->mixed_count > 0};
    return afford_check(&question, measure->scratch);
}

double measure_sum_s(const void *context, int subcluster, struct hapt_submesh submesh, double bytes)
{
    const struct measure *measure = context;
    if (submesh.n * submesh.m == 1 || submesh.tp > 1 || submesh.program > 0) return 0;
    const int index = hapt_candidates_submesh_index(&measure->cluster->subcluster[subcluster], submesh);
    return sums_measured_s(&measure->sums, subcluster, index, bytes);
}

enum hapt_status measure_set_up(struct measure *measure, struct hapt_engine_options *options)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const size_t cells = (size_t)measure->classes.count * (size_t)candidates->item_count;
    HAPT_NEW(measure->memory, measure->scratch, cells);
    HAPT_NEW(measure->time, measure->scratch, cells);
    HAPT_NEW(measure->needed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->fits, measure->scratch, candidates->item_count);
    if (candidates->host_state) HAPT_NEW(measure->copied_share, measure->scratch, measure->classes.count);
    if (hapt_candidates_chooses(candidates))
        HAPT_NEW(measure->again, measure->scratch, cells * (size_t)candidates->keep_stride);
    HAPT_NEW(measure->layer_s, measure->scratch, (size_t)candidates->mesh_count * (size_t)candidates->layer_count);
    HAPT_NEW(measure->sample, measure->scratch, (size_t)candidates->item_count * MEASURE_MOST_ROUNDS * 2);
    HAPT_NEW(measure->role, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->timed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->order, measure->scratch, candidates->item_count);
    const struct hapt_cluster *cluster = measure->cluster;
    const struct hapt_subcluster *own = &cluster->subcluster[cluster->subcluster_of_rank[measure->env->world_rank]];
    *options = (struct hapt_engine_options){.threads = measure->threads,
                                            .state_count = candidates->state_count,
                                            .host_state = candidates->host_state,
                                            .host_update = candidates->host_update,
                                            .host_pace = own->host_paced ? own->host_bandwidth : 0,
                                            .slots = 1};
    if (measure->classes.own_class < 0) return HAPT_OK;
    HAPT_TRY(classes_open_device(measure->env, measure->cluster, "measure on",
                                 "plan for such devices with `hapt plan --input M --cluster C`, or use --predict yes",
                                 options));
    return plan_items(measure, options);
}
