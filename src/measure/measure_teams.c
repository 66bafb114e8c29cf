/*
 * Runs stages of slowed devices as in training. Their thread CPU time in consecutive runs is not enough: such a device
 * sleeps between computations, other ranks run meanwhile, and its caches grow cold. So the subclusters of a class with
 * such devices run stages as training does, all at once, with as many teams as each has room for. The measured time
 * over the items' time gives factors on the class's CPU time: forward, backward and end of a step.
 */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "hapt/progress.h"
#include "submesh_team.h"

static bool is_slowed(const struct measure *measure, int subcluster)
{
    for (int c = 0; c < measure->cluster->count; c++)
        if (measure->classes.of_subcluster[c] == measure->classes.of_subcluster[subcluster] &&
            measure->cluster->subcluster[c].device.slowdown > 1)
            return true;
    return false;
}

/* Seconds of an item on a subcluster's devices from CPU time: stage, forward, end of the step without the sum of
 * gradients. */
static void list_item(const struct measure *measure, int subcluster, int item, double seconds[3])
{
    const double slowdown = fmax(measure->cluster->subcluster[subcluster].device.slowdown, 1);
    const struct hapt_item_time *time = measure_time(measure, measure->classes.of_subcluster[subcluster], item);
    seconds[0] = slowdown * (time->forward_s + time->backward_s);
    seconds[1] = slowdown * time->forward_s;
    seconds[2] = slowdown * time->update_s + time->end_s;
}

static enum hapt_status list_base(const struct submesh_team *team, double *base[3])
{
    const struct measure *measure = team->measure;
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int t = 0; t < 3; t++) HAPT_NEW(base[t], team->scratch, L * L);
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) {
            double seconds[3];
            list_item(measure, team->subcluster, hapt_candidates_item(candidates, team->mesh_index, i, j), seconds);
            for (int t = 0; t < 3; t++) base[t][i * L + j] = seconds[t];
        }
    return HAPT_OK;
}

/* [FACTORS][L * L]: run or composed time over the items' time; FACTOR_THERE is 1 if there is one. */
enum { FACTOR_FORWARD, FACTOR_BACKWARD, FACTOR_END, FACTOR_THERE, FACTORS };

static double over(double seconds, double base_s)
{
    return base_s > 0 && seconds > 0 ? seconds / base_s : 1;
}

static void list_factors(const struct submesh_team *team, const struct hapt_range_times *times,
                         const double *const base[3], double *factor)
{
    const struct measure *measure = team->measure;
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, cells = L * L, class = measure->classes.of_subcluster[team->subcluster];
    for (int cell = 0; cell < cells; cell++) {
        if (!isfinite(times->stage_s[cell])) continue;
        const int item = hapt_candidates_item(candidates, team->mesh_index, cell / L, cell % L);
        const double sum_s = measure_sum_s(
            measure, team->subcluster, team->submesh,
            hapt_candidates_summed_bytes(candidates, team->subcluster, measure_memory(measure, class, item)));
        factor[FACTOR_FORWARD * cells + cell] = over(times->forward_s[cell], base[1][cell]);
        factor[FACTOR_BACKWARD * cells + cell] =
            over(times->stage_s[cell] - times->forward_s[cell], base[0][cell] - base[1][cell]);
        factor[FACTOR_END * cells + cell] =
            base[2][cell] > 0 ? fmax(times->step_s[cell] - sum_s, 0) / base[2][cell] : 1;
        factor[FACTOR_THERE * cells + cell] = 1;
    }
}

static enum hapt_status run_team(const struct submesh_team *team, const struct hapt_engine_options *options,
                                 MPI_Comm comm, double budget_s, int64_t *count, double *factor)
{
    struct team_ranges ranges;
    double *base[3];
    enum hapt_status status = submesh_team_list(team, submesh_team_wants, &ranges);
    if (status == HAPT_OK) status = list_base(team, base);
    HAPT_TRY(hapt_link_all_or_none(comm, "a submesh's stages", status));
    if (ranges.count == 0) return HAPT_OK;
    HAPT_TRY(submesh_team_run(team, options, comm, budget_s, &ranges));
    *count += ranges.runs;
    HAPT_TRY(team_ranges_compose(&ranges, submesh_team_wants_time, team, (const double *const *)base, team->scratch));
    if (team->rank == 0) list_factors(team, ranges.times, (const double *const *)base, factor);
    return HAPT_OK;
}

/* Applies the mean over the teams of a class to its times, on all ranks. `mine`: of a team led by this rank, else
 * NULL. */
static enum hapt_status take_factors(struct measure *measure, int class, int mesh_index, const double *mine,
                                     double *factor)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, D = candidates->mesh_count;
    const size_t cells = (size_t)L * (size_t)L;
    memset(factor, 0, FACTORS * cells * sizeof *factor);
    if (mine) memcpy(factor, mine, FACTORS * cells * sizeof *factor);
    HAPT_TRY(measure_sum_over_ranks(measure, factor, FACTORS * cells));
    for (int structure = 0; structure < candidates->structure_count; structure++) {
        const size_t cell = (size_t)candidates->first[structure] * (size_t)L + (size_t)candidates->last[structure];
        const double teams = factor[FACTOR_THERE * cells + cell];
        struct hapt_item_time *time = measure_time(measure, class, structure * D + mesh_index);
        if (teams == 0) continue;
        time->forward_s *= factor[FACTOR_FORWARD * cells + cell] / teams;
        time->backward_s *= factor[FACTOR_BACKWARD * cells + cell] / teams;
        time->update_s *= factor[FACTOR_END * cells + cell] / teams;
        time->end_s *= factor[FACTOR_END * cells + cell] / teams;
    }
    return HAPT_OK;
}

struct rounds {
    struct hapt_submesh *submesh[HAPT_MAX_SUBCLUSTERS]; /* submeshes to run */
    int count[HAPT_MAX_SUBCLUSTERS], most;
    bool *done;            /* [class][mesh] */
    double *factor, *mean; /* [FACTORS][L * L] */
};

/* Runs one submesh of every subcluster: now[c] of subcluster c (n 0: none). */
static enum hapt_status run_round(struct measure *measure, const struct hapt_engine_options *options,
                                  const struct hapt_submesh *now, double budget_s, const struct rounds *rounds,
                                  struct hapt_arena *scratch)
{
    const struct hapt_env *env = measure->env;
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, D = candidates->mesh_count;
    struct submesh_team own = {.measure = measure, .scratch = scratch};
    enum hapt_status status = HAPT_OK;
    MPI_Comm comm;
    submesh_team_find(now, &own);
    memset(rounds->factor, 0, FACTORS * (size_t)L * (size_t)L * sizeof *rounds->factor);
    HAPT_MPI(MPI_Comm_split(env->world, own.color, own.rank, &comm));
    if (comm != MPI_COMM_NULL) {
        status = run_team(&own, options, comm, budget_s, &measure->effort.runs, rounds->factor);
        MPI_Comm_free(&comm);
    }
    HAPT_TRY(sums_barrier(env->world));
    HAPT_TRY(hapt_env_agree(env->world, status));
    for (int other = 0; other < measure->cluster->count; other++) {
        if (now[other].n == 0) continue;
        const int mesh_index = hapt_candidates_mesh_index_of(candidates, now[other]),
                  class = measure->classes.of_subcluster[other];
        if (rounds->done[class * D + mesh_index]) continue;
        rounds->done[class * D + mesh_index] = true;
        const bool mine = own.mesh_index == mesh_index && measure->classes.of_subcluster[own.subcluster] == class;
        HAPT_TRY(take_factors(measure, class, mesh_index, mine ? rounds->factor : NULL, rounds->mean));
    }
    return HAPT_OK;
}

static enum hapt_status plan_rounds(const struct measure *measure, struct hapt_arena *scratch, struct rounds *rounds)
{
    const struct hapt_cluster *cluster = measure->cluster;
    const int L = measure->candidates->layer_count;
    HAPT_NEW(rounds->done, scratch, measure->classes.count * measure->candidates->mesh_count);
    HAPT_NEW(rounds->factor, scratch, FACTORS * L * L);
    HAPT_NEW(rounds->mean, scratch, FACTORS * L * L);
    for (int c = 0; c < cluster->count; c++) {
        if (!is_slowed(measure, c)) continue;
        rounds->count[c] = hapt_candidates_submeshes(&cluster->subcluster[c], NULL);
        HAPT_NEW(rounds->submesh[c], scratch, rounds->count[c]);
        hapt_candidates_submeshes(&cluster->subcluster[c], rounds->submesh[c]);
        if (rounds->count[c] > rounds->most) rounds->most = rounds->count[c];
    }
    return HAPT_OK;
}

static enum hapt_status run_rounds(struct measure *measure, const struct hapt_engine_options *options, double budget_s,
                                   struct hapt_arena *scratch)
{
    struct rounds rounds = {.most = 0};
    HAPT_TRY(hapt_env_agree(measure->env->world, plan_rounds(measure, scratch, &rounds)));
    enum hapt_status status = HAPT_OK;
    struct hapt_progress progress;
    hapt_progress_init(&progress, measure->env, "running stages of slowed devices", rounds.most);
    for (int s = 0; s < rounds.most && status == HAPT_OK; s++) {
        struct hapt_submesh now[HAPT_MAX_SUBCLUSTERS] = {{0}};
        struct hapt_arena round;
        bool any = false;
        for (int c = 0; c < measure->cluster->count; c++) {
            if (s >= rounds.count[c]) continue;
            const int mesh_index = hapt_candidates_mesh_index_of(measure->candidates, rounds.submesh[c][s]);
            if (mesh_index < 0 ||
                rounds.done[measure->classes.of_subcluster[c] * measure->candidates->mesh_count + mesh_index])
                continue;
            now[c] = rounds.submesh[c][s];
            any = true;
        }
        if (!any) continue;
        hapt_arena_init(&round);
        hapt_progress_update(&progress, s, NULL);
        status = run_round(measure, options, now, budget_s / rounds.most, &rounds, &round);
        hapt_arena_release(&round);
    }
    hapt_progress_release(&progress);
    return status;
}

enum hapt_status measure_run_submeshes(struct measure *measure, const struct hapt_engine_options *options,
                                       double budget_s)
{
    struct hapt_arena scratch;
    if (!measure_any_slowed(measure->cluster)) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = run_rounds(measure, options, budget_s, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
