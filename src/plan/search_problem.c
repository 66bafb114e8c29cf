/* The sparse index of feasible stages and the candidates for t_max (HAPT 5.2.2, DESIGN "Objective"). */
#include "search.h"

#include <math.h>
#include <stdlib.h>

static int compare_candidates(const void *left, const void *right)
{
    const struct search_candidate *a = left, *b = right;
    if (a->time_s != b->time_s) return a->time_s < b->time_s ? -1 : 1;
    if (a->end != b->end) return a->end - b->end;
    return a->submesh - b->submesh;
}

static int compare_times(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

/* The most microbatches in flight that fit; HAPT (24). */
static int fitting_launches(double parameter_bytes, double activation_bytes, double memory_bytes, int B)
{
    if (!hapt_at_most(parameter_bytes, memory_bytes)) return 0;
    if (hapt_at_most(parameter_bytes + B * activation_bytes, memory_bytes)) return B;
    int low = 0, high = B; /* low fits, high does not */
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (hapt_at_most(parameter_bytes + middle * activation_bytes, memory_bytes))
            low = middle;
        else
            high = middle;
    }
    return low;
}

/* t_i of a stage; NaN or infinite where there is no candidate. */
static double stage_time(const struct search_problem *problem, int c, int submesh, int first, int last)
{
    const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
    const size_t cell = hapt_profile_index(problem->profile, submesh, first, last);
    return cluster->stage_time[cell] + (cluster->step_time ? cluster->step_time[cell] : 0) / problem->B;
}

static enum hapt_status index_stages(struct search_problem *problem, int c, int first, double memory_factor,
                                     struct search_candidate *buffer, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = problem->profile;
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    const double memory_bytes = isinf(memory_factor) ? INFINITY : cluster->device_memory_bytes * memory_factor;
    const int least = problem->options->schedule == HAPT_SCHEDULE_GPIPE ? problem->B : 1;
    int count = 0;
    for (int s = 0; s < cluster->submesh_count; s++) {
        for (int last = first; last < problem->L; last++) {
            const size_t cell = hapt_profile_index(profile, s, first, last);
            if (!isfinite(cluster->stage_time[cell])) continue;
            const int launches = fitting_launches(cluster->parameter_bytes[cell], cluster->activation_bytes[cell],
                                                  memory_bytes, problem->B);
            if (launches < least) continue;
            buffer[count++] = (struct search_candidate){.time_s = stage_time(problem, c, s, first, last),
                                                        .end = last + 1,
                                                        .submesh = s,
                                                        .devices = cluster->submesh[s].n * cluster->submesh[s].m,
                                                        .launches = launches};
        }
    }
    struct search_candidate **list = &problem->candidate[c * problem->L + first];
    qsort(buffer, (size_t)count, sizeof *buffer, compare_candidates);
    HAPT_NEW(*list, arena, count);
    for (int i = 0; i < count; i++) (*list)[i] = buffer[i];
    problem->candidate_count[c * problem->L + first] = count;
    return HAPT_OK;
}

static enum hapt_status build_index(struct search_problem *problem, double memory_factor, struct hapt_arena *arena)
{
    int submeshes = 0;
    for (int c = 0; c < problem->C; c++)
        if (problem->profile->cluster[c].submesh_count > submeshes)
            submeshes = problem->profile->cluster[c].submesh_count;
    struct search_candidate *buffer;
    const size_t lists = (size_t)problem->C * (size_t)problem->L;
    HAPT_NEW(buffer, arena, (size_t)submeshes * (size_t)problem->L);
    HAPT_NEW(problem->candidate, arena, lists);
    HAPT_NEW(problem->candidate_count, arena, lists);
    for (int c = 0; c < problem->C; c++)
        for (int first = 0; first < problem->L; first++)
            HAPT_TRY(index_stages(problem, c, first, memory_factor, buffer, arena));
    return HAPT_OK;
}

/* The optimum's t_max is some t, c, 2c or c / epsilon: between two of them nothing changes but the pace. */
static enum hapt_status collect_t_max(struct search_problem *problem, struct hapt_arena *arena)
{
    const int C = problem->C, L = problem->L;
    size_t room = 3 * (size_t)C * (size_t)C * (size_t)L, count = 0;
    for (int c = 0; c < C; c++)
        room += (size_t)problem->profile->cluster[c].submesh_count * (size_t)L * ((size_t)L + 1) / 2;
    HAPT_NEW(problem->t_max, arena, room);
    for (int c = 0; c < C; c++) {
        for (int s = 0; s < problem->profile->cluster[c].submesh_count; s++) {
            for (int first = 0; first < L; first++) {
                for (int last = first; last < L; last++) {
                    const double time_s = stage_time(problem, c, s, first, last);
                    if (isfinite(time_s)) problem->t_max[count++] = time_s;
                }
            }
        }
    }
    for (int from = 0; from < C; from++) {
        for (int to = 0; to < C; to++) {
            for (int layer = 0; layer < L - 1; layer++) {
                const double comm_s = problem->comm_s[search_link(problem, from, to, layer)];
                const double lone_s = comm_s / problem->options->hide_threshold;
                if (!isfinite(comm_s)) continue;
                problem->t_max[count++] = comm_s;
                problem->t_max[count++] = 2 * comm_s;
                if (isfinite(lone_s)) problem->t_max[count++] = lone_s;
            }
        }
    }
    qsort(problem->t_max, count, sizeof *problem->t_max, compare_times);
    size_t distinct = 0;
    for (size_t i = 0; i < count; i++)
        if (i == 0 || problem->t_max[i] != problem->t_max[distinct - 1]) problem->t_max[distinct++] = problem->t_max[i];
    problem->t_max_count = (int64_t)distinct;
    return HAPT_OK;
}

enum hapt_status search_problem_create(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       double memory_factor, struct hapt_arena *arena, struct search_problem **problem)
{
    struct search_problem *made;
    HAPT_NEW(made, arena, 1);
    const int C = profile->cluster_count, L = profile->layer_count;
    if (C > HAPT_SEARCH_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "merge subclusters with equal devices",
                         "the search takes %d subclusters, not %d", HAPT_SEARCH_MAX_SUBCLUSTERS, C);
    *made = (struct search_problem){.profile = profile, .options = options, .L = L, .C = C, .B = options->microbatches};
    made->group_count = C << C;
    int64_t stages = 0;
    for (int c = 0; c < C; c++) {
        made->devices[c] = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
        stages += made->devices[c];
    }
    if (stages > L) stages = L;
    const int64_t launches = options->schedule == HAPT_SCHEDULE_GPIPE ? made->B : 1 + 3 * (stages - 1);
    made->most_launches = launches < made->B ? (int)launches : made->B;
    HAPT_NEW(made->comm_s, arena, (size_t)C * (size_t)C * (size_t)L);
    for (int from = 0; from < C; from++)
        for (int to = 0; to < C; to++)
            for (int layer = 0; layer < L; layer++)
                made->comm_s[search_link(made, from, to, layer)] = hapt_profile_comm_s(profile, layer, from, to);
    HAPT_TRY(build_index(made, memory_factor, arena));
    HAPT_TRY(collect_t_max(made, arena));
    *problem = made;
    return HAPT_OK;
}
