/*
 * Times of stages that only a team can have: tensor-parallel and synthesised ones, and the end of a step with sharded
 * optimizer state. A tensor-parallel device waits for its peers inside every layer, so the time of a single device says
 * little. Teams run a few ranges of each submesh as training does (team_ranges.h), all subclusters at once. The times
 * of the other ranges are composed of them.
 */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "hapt/progress.h"
#include "submesh_team.h"

/* True for stages whose forward and backward passes exchange data inside a team. */
static bool communicates(struct hapt_submesh submesh)
{
    return submesh.tp > 1 || submesh.program > 0;
}

/* ---- which submeshes and ranges ---- */

/* Data-parallel ranges run only for the end of a step with sharded state. */
static bool is_run(const void *context, int first, int last)
{
    const struct submesh_team *team = context;
    return submesh_team_wants(team, first, last) &&
           (communicates(team->submesh) || submesh_team_shards(team, first, last));
}

/* Ranges of the same kind that need times. */
static bool has_time(const void *context, int first, int last)
{
    const struct submesh_team *team = context;
    return is_run(team, first, last) || (communicates(team->submesh) && submesh_team_wants_time(team, first, last));
}

/* True if some range of the submesh is to be run. *longest: a range of most layers. */
static bool has_runs(const struct submesh_team *team, int *longest)
{
    const struct hapt_candidates *candidates = team->measure->candidates;
    int most = 0;
    for (int k = 0; team->mesh_index >= 0 && k < candidates->structure_count; k++) {
        const int length = candidates->last[k] - candidates->first[k] + 1;
        if (length <= most || !is_run(team, candidates->first[k], candidates->last[k])) continue;
        most = length;
        *longest = k;
    }
    return most > 0;
}

enum hapt_status measure_list_stages(struct measure *measure)
{
    const struct hapt_candidates *candidates = measure->candidates;
    struct measure_stages *stages = &measure->stages;
    HAPT_NEW(stages->longest, measure->scratch, candidates->item_count);
    for (int c = 0; c < measure->cluster->count; c++) {
        struct hapt_submesh *variant;
        int count;
        HAPT_TRY(hapt_candidates_variants(candidates, c, measure->scratch, &variant, &count));
        stages->submesh[c] = variant;
        for (int v = 0; v < count; v++) {
            const struct submesh_team any = {.measure = measure,
                                             .subcluster = c,
                                             .submesh = variant[v],
                                             .mesh_index = hapt_candidates_mesh_index_of(candidates, variant[v])};
            int longest;
            if (variant[v].n * variant[v].m == 1 || !has_runs(&any, &longest)) continue;
            stages->submesh[c][stages->count[c]++] = variant[v];
            if (c == measure->cluster->subcluster_of_rank[measure->env->world_rank])
                stages->longest[longest * candidates->mesh_count + any.mesh_index] = true;
        }
        if (stages->count[c] > stages->rounds) stages->rounds = stages->count[c];
    }
    return HAPT_OK;
}

/* ---- running them ---- */

/* Adds the team's times to those of the subcluster; end_s counts the teams. */
static void take_times(const struct submesh_team *team, const struct team_ranges *ranges, struct hapt_item_time *time)
{
    const struct measure *measure = team->measure;
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, class = measure->classes.of_subcluster[team->subcluster];
    for (int k = 0; k < candidates->structure_count; k++) {
        const int cell = candidates->first[k] * L + candidates->last[k],
                  item = k * candidates->mesh_count + team->mesh_index;
        const double stage_s = ranges->times->stage_s[cell], forward_s = fmin(ranges->times->forward_s[cell], stage_s),
                     sum_s = measure_sum_s(measure, team->subcluster, team->submesh,
                                           hapt_candidates_summed_bytes(candidates, team->subcluster,
                                                                        measure_memory(measure, class, item)));
        if (!isfinite(stage_s)) continue;
        if (communicates(team->submesh)) {
            time[item].forward_s += forward_s;
            time[item].backward_s += stage_s - forward_s;
        }
        time[item].update_s += fmax(ranges->times->step_s[cell] - sum_s, 0);
        time[item].end_s += 1;
    }
}

/* Base times for ranges that are not run: the sums of their layers' times or, if unknown, of a single device's. */
static enum hapt_status sum_layers(const struct submesh_team *team, const struct team_ranges *ranges, double *base[3])
{
    const struct measure *measure = team->measure;
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, class = measure->classes.of_subcluster[team->subcluster],
              single = hapt_candidates_mesh_index(candidates, 1, 1);
    double *layer[3];
    for (int t = 0; t < 3; t++) HAPT_NEW(layer[t], team->scratch, L);
    for (int l = 0; l < L; l++) {
        const struct hapt_item_time *time =
            measure_time(measure, class, hapt_candidates_item(candidates, single, l, l));
        layer[0][l] = time->forward_s + time->backward_s;
        layer[1][l] = time->forward_s;
        layer[2][l] = time->update_s + time->end_s;
    }
    return team_ranges_sums(ranges, (const double *const *)layer, team->scratch, base);
}

static enum hapt_status run_team(const struct submesh_team *team, const struct hapt_engine_options *options,
                                 MPI_Comm comm, double budget_s, struct measure *measure)
{
    struct team_ranges ranges;
    double *base[3];
    const int c = team->subcluster;
    HAPT_TRY(hapt_link_all_or_none(comm, "a submesh's stages", submesh_team_list(team, is_run, &ranges)));
    HAPT_TRY(submesh_team_run(team, options, comm, budget_s, &ranges));
    HAPT_TRY(sum_layers(team, &ranges, base));
    HAPT_TRY(team_ranges_compose(&ranges, has_time, team, (const double *const *)base, team->scratch));
    if (team->rank != 0) return HAPT_OK;
    take_times(team, &ranges, measure->stages.time + (size_t)c * (size_t)measure->candidates->item_count);
    measure->effort.runs += ranges.runs;
    measure->effort.programs += ranges.runs;
    if (!communicates(team->submesh) || team->color != measure->cluster->subcluster[c].ranks[0]) return HAPT_OK;
    measure->effort.unique += ranges.count;
    measure->effort.timed += ranges.runs;
    return HAPT_OK;
}

/* One submesh of every subcluster. */
static enum hapt_status run_round(struct measure *measure, const struct hapt_engine_options *options, int round,
                                  double budget_s, struct hapt_arena *scratch)
{
    const struct measure_stages *stages = &measure->stages;
    struct hapt_submesh now[HAPT_MAX_SUBCLUSTERS] = {{0}};
    struct submesh_team own = {.measure = measure, .scratch = scratch};
    enum hapt_status status = HAPT_OK;
    MPI_Comm comm;
    for (int c = 0; c < measure->cluster->count; c++)
        if (round < stages->count[c]) now[c] = stages->submesh[c][round];
    submesh_team_find(now, &own);
    HAPT_MPI(MPI_Comm_split(measure->env->world, own.color, own.rank, &comm));
    if (comm != MPI_COMM_NULL) {
        status = run_team(&own, options, comm, budget_s, measure);
        MPI_Comm_free(&comm);
    }
    HAPT_TRY(sums_barrier(measure->env->world));
    return hapt_env_agree(measure->env->world, status);
}

/* Means over the teams, on all ranks. */
static enum hapt_status publish_times(struct measure *measure)
{
    const size_t items = (size_t)measure->cluster->count * (size_t)measure->candidates->item_count;
    struct hapt_item_time *time = measure->stages.time;
    HAPT_TRY(measure_sum_over_ranks(measure, (double *)time, items * sizeof *time / sizeof(double)));
    for (size_t item = 0; item < items; item++) {
        const double teams = time[item].end_s;
        if (teams == 0) continue;
        time[item] = (struct hapt_item_time){time[item].forward_s / teams, time[item].backward_s / teams,
                                             time[item].update_s / teams, teams};
    }
    return HAPT_OK;
}

enum hapt_status measure_run_stages(struct measure *measure, const struct hapt_engine_options *options, double budget_s)
{
    struct measure_stages *stages = &measure->stages;
    const size_t items = (size_t)measure->cluster->count * (size_t)measure->candidates->item_count;
    if (stages->rounds == 0) return HAPT_OK;
    stages->time = hapt_arena_alloc(measure->scratch, items, sizeof *stages->time);
    HAPT_TRY(hapt_env_agree(measure->env->world, stages->time ? HAPT_OK : HAPT_ERR_MEMORY));
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, measure->env, "running stages of teams", stages->rounds);
    for (int round = 0; round < stages->rounds && status == HAPT_OK; round++) {
        struct hapt_arena scratch;
        hapt_arena_init(&scratch);
        hapt_progress_update(&progress, round, NULL);
        status = run_round(measure, options, round, budget_s / stages->rounds, &scratch);
        hapt_arena_release(&scratch);
    }
    hapt_progress_release(&progress);
    return status == HAPT_OK ? publish_times(measure) : status;
}

struct hapt_item_time measure_stage_time(const struct measure *measure, int subcluster, int item,
                                         struct hapt_item_time alone)
{
    if (!measure->stages.time) return alone;
    const struct hapt_item_time *team =
        &measure->stages.time[(size_t)subcluster * (size_t)measure->candidates->item_count + (size_t)item];
    if (team->end_s == 0) return alone;
    if (team->forward_s + team->backward_s > 0) {
        alone.forward_s = team->forward_s;
        alone.backward_s = team->backward_s;
    }
    alone.update_s = team->update_s;
    return alone;
}
