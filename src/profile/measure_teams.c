/*
 * Submeshes of slowed devices as they train. Thread CPU time back to back says too little of a device that is slowed down: it sleeps between
 * computations, other ranks run meanwhile and its caches grow cold. So the stages of such devices are run by all ranks of their subcluster
 * at once, as many teams as it has room for, and the times of items follow what they took.
 */
#include "measure.h"

#include <math.h>
#include <string.h>

#include "team_ranges.h"

struct submesh_runs {
    struct measure *measure;
    struct hapt_arena *scratch;
    int subcluster; /* mine */
    struct hapt_submesh submesh;
    int degree;
};

static bool is_slowed(const struct measure *measure, int subcluster)
{
    return measure->cluster->subcluster[subcluster].device.slowdown > 1;
}

static bool is_wanted(const void *context, int first, int last)
{
    const struct submesh_runs *runs = context;
    const struct candidates *candidates = runs->measure->candidates;
    const struct item_memory *memory = measure_memory(runs->measure, runs->measure->classes.of_subcluster[runs->subcluster],
                                                      candidates_item(candidates, runs->degree, first, last));
    return candidates_wanted(candidates, runs->subcluster, runs->submesh, first, last, memory);
}

/* What the items say: stage, forward, end of the step. */
static enum hapt_status list_base(const struct submesh_runs *runs, double *base[3])
{
    const struct measure *measure = runs->measure;
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, class = measure->classes.of_subcluster[runs->subcluster];
    const double slowdown = measure->cluster->subcluster[runs->subcluster].device.slowdown;
    for (int t = 0; t < 3; t++) HAPT_NEW(base[t], runs->scratch, L * L);
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) {
            const int item = candidates_item(candidates, runs->degree, i, j);
            const struct item_time *time = measure_time(measure, class, item);
            base[0][i * L + j] = slowdown * (time->forward_s + time->backward_s);
            base[1][i * L + j] = slowdown * time->forward_s;
            base[2][i * L + j] = slowdown * time->update_s + time->end_s +
                                 measure_sum_s(measure, runs->subcluster, runs->submesh,
                                               4 * measure_memory(measure, class, item)->trained_elements);
        }
    return HAPT_OK;
}

static enum hapt_status run_team(const struct submesh_runs *runs, const struct hapt_engine_options *options, MPI_Comm comm, int rank,
                                 double budget_s, struct range_times *times, int64_t *count)
{
    const struct measure *measure = runs->measure;
    const struct candidates *candidates = measure->candidates;
    const int place[HAPT_MESH_AXES] = {rank, 0};
    struct team_ranges ranges;
    struct hapt_sharding *sharding;
    double *base[3];
    enum hapt_status status = team_ranges_list(candidates, is_wanted, runs, times, runs->scratch, &ranges);
    if (status == HAPT_OK) status = list_base(runs, base);
    if (status == HAPT_OK) status = hapt_sharding_at(candidates->sharding[runs->degree], place, runs->scratch, &sharding);
    HAPT_TRY(hapt_link_all_or_none(comm, "a submesh's stages", status));
    if (ranges.count == 0) return HAPT_OK;
    struct team_stage stage = {.candidates = candidates,
                               .sharding = sharding,
                               .options = *options,
                               .comm = comm,
                               .rank = rank,
                               .slowdown = measure->cluster->subcluster[runs->subcluster].device.slowdown,
                               .timeout_s = hapt_config_real(measure->config, "timeout")};
    status = team_stage_open(&stage);
    if (status == HAPT_OK) status = team_ranges_run(&ranges, &stage, budget_s);
    team_stage_close(&stage);
    HAPT_TRY(status);
    *count += ranges.runs;
    team_ranges_compose(&ranges, is_wanted, runs, (const double *const *)base);
    return HAPT_OK;
}

/* The mean of a subcluster's teams, to all ranks; `mine`: of a team that this rank leads, NULL elsewhere. */
static enum hapt_status publish(const struct measure *measure, const struct range_times *mine, double *sums, struct hapt_arena *arena,
                                struct range_times **times)
{
    const int L = measure->candidates->layer_count;
    const size_t cells = (size_t)L * (size_t)L;
    memset(sums, 0, 4 * cells * sizeof *sums);
    for (size_t cell = 0; mine && cell < cells; cell++) {
        if (!isfinite(mine->stage_s[cell])) continue;
        sums[cell] = mine->stage_s[cell];
        sums[cells + cell] = mine->forward_s[cell];
        sums[2 * cells + cell] = mine->step_s[cell];
        sums[3 * cells + cell] = 1;
    }
    HAPT_TRY(measure_sum_over_ranks(measure, sums, 4 * cells));
    HAPT_TRY(hapt_env_agree(measure->env->world, range_times_create(L, arena, times)));
    for (size_t cell = 0; cell < cells; cell++) {
        const double teams = sums[3 * cells + cell];
        if (teams == 0) continue;
        (*times)->stage_s[cell] = sums[cell] / teams;
        (*times)->forward_s[cell] = sums[cells + cell] / teams;
        (*times)->step_s[cell] = sums[2 * cells + cell] / teams;
    }
    return HAPT_OK;
}

/* One submesh of every slowed subcluster, submesh[c] of c (n 0: none). */
static enum hapt_status run_round(struct measure *measure, const struct hapt_engine_options *options, const struct hapt_submesh *submesh,
                                  double budget_s, double *sums, struct hapt_arena *scratch)
{
    const struct hapt_env *env = measure->env;
    const struct candidates *candidates = measure->candidates;
    const int c = measure->cluster->subcluster_of_rank[env->world_rank];
    struct submesh_runs runs = {.measure = measure, .scratch = scratch, .subcluster = c};
    int team = MPI_UNDEFINED, rank = 0;
    if (c >= 0 && submesh[c].n > 0) {
        const struct hapt_subcluster *own = &measure->cluster->subcluster[c];
        const int all = own->nodes * own->devices_per_node, size = submesh[c].n * submesh[c].m;
        int index = 0;
        while (own->ranks[index] != env->world_rank) index++;
        runs.submesh = submesh[c];
        runs.degree = candidates_degree_of(candidates, submesh[c]);
        if ((index / size + 1) * size <= all) team = own->ranks[index / size * size];
        rank = index % size;
    }
    MPI_Comm comm;
    struct range_times *mine = NULL;
    enum hapt_status status = range_times_create(candidates->layer_count, scratch, &mine);
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_MPI(MPI_Comm_split(env->world, team, rank, &comm));
    if (comm != MPI_COMM_NULL) {
        status = run_team(&runs, options, comm, rank, budget_s, mine, &measure->effort.runs);
        MPI_Comm_free(&comm);
    }
    HAPT_TRY(reduce_meet(env->world));
    HAPT_TRY(hapt_env_agree(env->world, status));
    for (int other = 0; other < measure->cluster->count; other++) {
        if (submesh[other].n == 0) continue;
        const int degree = candidates_degree_of(candidates, submesh[other]);
        HAPT_TRY(publish(measure, other == c && team != MPI_UNDEFINED && rank == 0 ? mine : NULL, sums, measure->scratch,
                         &measure->real[other * candidates->degree_count + degree]));
        measure->real_submesh[other * candidates->degree_count + degree] = submesh[other];
    }
    return HAPT_OK;
}

static enum hapt_status reserve(struct measure *measure, struct hapt_arena *scratch, double **sums)
{
    const size_t cells = (size_t)measure->cluster->count * (size_t)measure->candidates->degree_count;
    HAPT_NEW(measure->real, measure->scratch, cells);
    HAPT_NEW(measure->real_submesh, measure->scratch, cells);
    HAPT_NEW(*sums, scratch, 4 * measure->candidates->layer_count * measure->candidates->layer_count);
    return HAPT_OK;
}

static enum hapt_status run_rounds(struct measure *measure, const struct hapt_engine_options *options, double budget_s,
                                   struct hapt_arena *scratch)
{
    const struct hapt_cluster *cluster = measure->cluster;
    const struct candidates *candidates = measure->candidates;
    struct hapt_submesh *submesh[HAPT_MAX_SUBCLUSTERS];
    int count[HAPT_MAX_SUBCLUSTERS], most = 0;
    double *sums;
    enum hapt_status status = reserve(measure, scratch, &sums);
    for (int c = 0; c < cluster->count && status == HAPT_OK; c++) {
        count[c] = is_slowed(measure, c) ? candidates_submeshes(&cluster->subcluster[c], NULL) : 0;
        submesh[c] = hapt_arena_alloc(scratch, (size_t)count[c] + 1, sizeof **submesh);
        if (!submesh[c]) status = HAPT_ERR_MEMORY;
        if (submesh[c] && count[c] > 0) candidates_submeshes(&cluster->subcluster[c], submesh[c]);
        most = count[c] > most ? count[c] : most;
    }
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    for (int s = 0; s < most; s++) {
        struct hapt_submesh now[HAPT_MAX_SUBCLUSTERS] = {{0}};
        struct hapt_arena round;
        bool any = false;
        for (int c = 0; c < cluster->count; c++) {
            if (s >= count[c]) continue;
            const int degree = candidates_degree_of(candidates, submesh[c][s]);
            if (degree < 0 || measure->real[c * candidates->degree_count + degree]) continue; /* as many devices are the same item */
            now[c] = submesh[c][s];
            any = true;
        }
        if (!any) continue;
        hapt_arena_init(&round);
        status = run_round(measure, options, now, budget_s / most, sums, &round);
        hapt_arena_release(&round);
        HAPT_TRY(status);
    }
    return HAPT_OK;
}

enum hapt_status measure_run_submeshes(struct measure *measure, const struct hapt_engine_options *options, double budget_s)
{
    struct hapt_arena scratch;
    bool any = false;
    for (int c = 0; c < measure->cluster->count; c++) any = any || is_slowed(measure, c);
    if (!any) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = run_rounds(measure, options, budget_s, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

void measure_take_real(const struct measure *measure, int subcluster, int item, struct item_time *time)
{
    const struct candidates *candidates = measure->candidates;
    const int D = candidates->degree_count, structure = item / D, at = subcluster * D + item % D;
    const struct range_times *real = measure->real ? measure->real[at] : NULL;
    const size_t cell = (size_t)candidates->first[structure] * (size_t)candidates->layer_count + (size_t)candidates->last[structure];
    if (!real || !isfinite(real->stage_s[cell])) return;
    const double bytes = 4 * measure_memory(measure, measure->classes.of_subcluster[subcluster], item)->trained_elements;
    time->forward_s = fmin(real->forward_s[cell], real->stage_s[cell]);
    time->backward_s = real->stage_s[cell] - time->forward_s;
    /* The sum of gradients is added for each submesh. */
    time->update_s = fmax(real->step_s[cell] - measure_sum_s(measure, subcluster, measure->real_submesh[at], bytes), 0);
}
