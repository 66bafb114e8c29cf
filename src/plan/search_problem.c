/* The sparse index of feasible stages and the candidates for t_max (HAPT 5.2.2, DESIGN "Objective"). */
#include "search.h"

#include <limits.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* The most microbatches in flight that fit; HAPT (24). */
static int fitting_launches(double parameter_bytes, double activation_bytes, double memory_bytes, int B)
{
    if (!hapt_at_most(parameter_bytes, memory_bytes)) return 0;
    if (hapt_at_most(parameter_bytes + B * activation_bytes, memory_bytes)) return B;
    int low = 0, high = B; /* low fits, high does not */
    const double guess = (memory_bytes - parameter_bytes) / activation_bytes;
    if (guess > 1 && guess < B - 2) { /* rounding is off by one at most */
        const int near = (int)guess;
        if (hapt_at_most(parameter_bytes + (near - 1) * activation_bytes, memory_bytes)) low = near - 1;
        if (!hapt_at_most(parameter_bytes + (near + 2) * activation_bytes, memory_bytes)) high = near + 2;
    }
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
static inline double stage_time(const struct hapt_profile_cluster *cluster, size_t cell, int B)
{
    return cluster->stage_time[cell] + (cluster->step_time ? cluster->step_time[cell] : 0) / B;
}

/* Whether `a` stands before `b` in the order of ties, both for the same layers of one subcluster. */
static bool precedes(const struct hapt_profile_cluster *cluster, const struct search_candidate *a,
                     const struct search_candidate *b)
{
    const struct hapt_submesh *x = &cluster->submesh[a->submesh], *y = &cluster->submesh[b->submesh];
    if (x->n != y->n) return x->n < y->n;
    return x->m != y->m ? x->m < y->m : x->tp < y->tp;
}

struct thinning {
    const struct hapt_profile_cluster *cluster;
    bool exact; /* every device must be used: only as many devices compare */
    double tie_s;
};

static bool beats(const struct thinning *thinning, const struct search_candidate *a, const struct search_candidate *b)
{
    if (a->launches < b->launches || a->time_s > b->time_s) return false;
    if (thinning->exact ? a->devices != b->devices : a->devices > b->devices) return false;
    if (precedes(thinning->cluster, a, b)) return true;
    if (thinning->tie_s >= 0) return b->time_s - a->time_s > thinning->tie_s;
    /* equals in all that a pass sees: one of them stays */
    return a->time_s < b->time_s || a->launches > b->launches || a->devices < b->devices;
}

/* Adds `one` to the candidates for the same layers, unless one of them beats it; drops those that it beats. */
static int add(const struct thinning *thinning, struct search_candidate *list, int count,
               const struct search_candidate *one, bool *thinned)
{
    int kept = 0;
    for (int i = 0; i < count; i++) {
        if (!beats(thinning, &list[i], one)) continue;
        *thinned = true;
        return count;
    }
    for (int i = 0; i < count; i++)
        if (!beats(thinning, one, &list[i])) list[kept++] = list[i];
    *thinned |= kept < count;
    list[kept] = *one;
    return kept + 1;
}

/* The candidates for layers [first, end) in subcluster c, into `list`; how many. */
static int index_range(struct search_problem *problem, const struct thinning *thinning, int first, int end,
                       double memory_bytes, struct search_candidate *list)
{
    const struct hapt_profile_cluster *cluster = thinning->cluster;
    const bool gpipe = problem->options->schedule == HAPT_SCHEDULE_GPIPE;
    int count = 0;
    for (int s = 0; s < cluster->submesh_count; s++) {
        const size_t cell = hapt_profile_index(problem->profile, s, first, end - 1);
        if (!isfinite(cluster->stage_time[cell])) continue;
        const int launches =
            fitting_launches(cluster->parameter_bytes[cell], cluster->activation_bytes[cell], memory_bytes, problem->B);
        if (launches < (gpipe ? problem->B : 1)) continue;
        const struct search_candidate one = {.time_s = stage_time(cluster, cell, problem->B),
                                             .end = end,
                                             .submesh = s,
                                             .devices = cluster->submesh[s].n * cluster->submesh[s].m,
                                             .launches = gpipe ? 1 : launches};
        count = add(thinning, list, count, &one, &problem->thinned);
    }
    return count;
}

static enum hapt_status index_stages(struct search_problem *problem, int c, int first, double memory_factor,
                                     double tie_s, struct search_candidate *buffer, struct hapt_arena *arena)
{
    const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
    const double memory_bytes = isinf(memory_factor) ? INFINITY : cluster->device_memory_bytes * memory_factor;
    const struct thinning thinning = {cluster, problem->options->use_all_devices, tie_s};
    int count = 0;
    for (int end = first + 1; end <= problem->L; end++)
        count += index_range(problem, &thinning, first, end, memory_bytes, buffer + count);
    struct search_candidate **list = &problem->candidate[c * problem->L + first];
    HAPT_NEW(*list, arena, count);
    memcpy(*list, buffer, (size_t)count * sizeof *buffer);
    problem->candidate_count[c * problem->L + first] = count;
    problem->all_candidates += count;
    for (int i = 0; i < count; i++) {
        problem->longest_s = fmax(problem->longest_s, buffer[i].time_s);
        if (buffer[i].launches > problem->most_launches) problem->most_launches = buffer[i].launches;
    }
    return HAPT_OK;
}

static enum hapt_status build_index(struct search_problem *problem, double memory_factor, double tie_s,
                                    struct hapt_arena *arena)
{
    int submeshes = 0;
    for (int c = 0; c < problem->C; c++)
        if (problem->profile->cluster[c].submesh_count > submeshes)
            submeshes = problem->profile->cluster[c].submesh_count;
    const size_t lists = (size_t)problem->C * (size_t)problem->L;
    struct search_candidate *buffer = malloc((size_t)submeshes * (size_t)problem->L * sizeof *buffer);
    if (!buffer)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
    enum hapt_status status = HAPT_OK;
    problem->candidate = hapt_arena_alloc(arena, lists, sizeof *problem->candidate);
    problem->candidate_count = hapt_arena_alloc(arena, lists, sizeof *problem->candidate_count);
    if (!problem->candidate || !problem->candidate_count) status = HAPT_ERR_MEMORY;
    for (int c = 0; c < problem->C; c++)
        for (int first = 0; first < problem->L && status == HAPT_OK; first++)
            status = index_stages(problem, c, first, memory_factor, tie_s, buffer, arena);
    free(buffer);
    return status;
}

static enum hapt_status find_classes(struct search_problem *problem, struct hapt_arena *arena)
{
    int submeshes = 0;
    for (int c = 0; c < problem->C; c++) submeshes += problem->profile->cluster[c].submesh_count;
    HAPT_NEW(problem->class_devices, arena, submeshes);
    for (int c = 0; c < problem->C; c++) {
        const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
        HAPT_NEW(problem->class_of[c], arena, cluster->submesh_count);
        problem->first_class[c] = problem->class_count;
        for (int devices = 0;;) { /* the next larger number of devices */
            int next = INT_MAX;
            for (int s = 0; s < cluster->submesh_count; s++) {
                const int here = cluster->submesh[s].n * cluster->submesh[s].m;
                if (here > devices && here < next) next = here;
            }
            if (next == INT_MAX) break;
            devices = next;
            for (int s = 0; s < cluster->submesh_count; s++)
                if (cluster->submesh[s].n * cluster->submesh[s].m == devices)
                    problem->class_of[c][s] = problem->class_count;
            problem->class_devices[problem->class_count++] = devices;
        }
    }
    problem->first_class[problem->C] = problem->class_count;
    return HAPT_OK;
}

static enum hapt_status price_links(struct search_problem *problem, struct hapt_arena *arena)
{
    const int C = problem->C, L = problem->L;
    HAPT_NEW(problem->comm_s, arena, (size_t)C * (size_t)C * (size_t)L);
    for (int from = 0; from < C; from++) {
        for (int to = 0; to < C; to++) {
            for (int layer = 0; layer < L; layer++) {
                const double comm_s = hapt_profile_comm_s(problem->profile, layer, from, to);
                const double lone_s = comm_s / problem->options->hide_threshold;
                problem->comm_s[search_link(problem, from, to, layer)] = comm_s;
                if (layer == L - 1 || !isfinite(comm_s)) continue;
                problem->longest_s = fmax(problem->longest_s, isfinite(lone_s) ? fmax(2 * comm_s, lone_s) : 2 * comm_s);
            }
        }
    }
    return HAPT_OK;
}

enum hapt_status search_problem_create(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       double memory_factor, double tie_s, struct hapt_arena *arena,
                                       struct search_problem **problem)
{
    struct search_problem *made;
    HAPT_NEW(made, arena, 1);
    const int C = profile->cluster_count, L = profile->layer_count;
    if (C > HAPT_SEARCH_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "merge subclusters with equal devices",
                         "the search takes %d subclusters, not %d", HAPT_SEARCH_MAX_SUBCLUSTERS, C);
    *made = (struct search_problem){.profile = profile, .options = options, .L = L, .C = C, .B = options->microbatches};
    HAPT_TRY(search_problem_group(made, arena));
    made->cap = options->schedule == HAPT_SCHEDULE_GPIPE ? 1 : made->B;
    int64_t stages = 0;
    for (int c = 0; c < C; c++) {
        made->devices[c] = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
        stages += made->devices[c];
        if (made->devices[c] > made->most_devices) made->most_devices = made->devices[c];
    }
    HAPT_TRY(find_classes(made, arena));
    HAPT_TRY(price_links(made, arena));
    HAPT_TRY(build_index(made, memory_factor, tie_s, arena));
    /* no more than what the longest pipeline adds up to, nor than what any stage holds */
    if (stages > L) stages = L;
    if (made->most_launches > 1 + 3 * (stages - 1)) made->most_launches = (int)(1 + 3 * (stages - 1));
    *problem = made;
    return HAPT_OK;
}

static int compare_times(const void *left, const void *right)
{
    const double a = *(const double *)left, b = *(const double *)right;
    return (a > b) - (a < b);
}

struct paces {
    double least_s, most_s, *pace;
    size_t count, room;
    bool full; /* no memory for more */
};

static inline void add_pace(struct paces *paces, double pace_s)
{
    if (!(pace_s >= paces->least_s && pace_s <= paces->most_s) || !isfinite(pace_s)) return;
    if (paces->count == paces->room) {
        const size_t room = 2 * paces->room + 1024;
        double *wider = realloc(paces->pace, room * sizeof *wider);
        if (!wider) {
            paces->full = true;
            return;
        }
        paces->pace = wider;
        paces->room = room;
    }
    paces->pace[paces->count++] = pace_s;
}

static void add_stage_paces(const struct search_problem *problem, struct paces *paces)
{
    const int L = problem->L;
    for (int c = 0; c < problem->C; c++) {
        const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int first = 0; first < L; first++)
                for (int last = first; last < L; last++)
                    add_pace(paces,
                             stage_time(cluster, hapt_profile_index(problem->profile, s, first, last), problem->B));
    }
}

/* The optimum's t_max is some t, c, 2c or c / epsilon: between two of them nothing changes but the pace. */
enum hapt_status search_paces(const struct search_problem *problem, double least_s, double most_s,
                              struct hapt_arena *arena, double **pace, int64_t *count)
{
    struct paces paces = {.least_s = least_s, .most_s = most_s};
    size_t distinct = 0;
    add_stage_paces(problem, &paces);
    for (int from = 0; from < problem->C; from++) {
        for (int to = 0; to < problem->C; to++) {
            for (int layer = 0; layer < problem->L - 1; layer++) {
                const double comm_s = problem->comm_s[search_link(problem, from, to, layer)];
                add_pace(&paces, comm_s);
                add_pace(&paces, 2 * comm_s);
                add_pace(&paces, comm_s / problem->options->hide_threshold);
            }
        }
    }
    if (paces.count > 0) qsort(paces.pace, paces.count, sizeof *paces.pace, compare_times);
    for (size_t i = 0; i < paces.count; i++)
        if (i == 0 || paces.pace[i] != paces.pace[distinct - 1]) paces.pace[distinct++] = paces.pace[i];
    *pace = paces.full ? NULL : hapt_arena_alloc(arena, distinct, sizeof **pace);
    if (*pace && distinct > 0) memcpy(*pace, paces.pace, distinct * sizeof **pace);
    free(paces.pace);
    *count = (int64_t)distinct;
    return *pace ? HAPT_OK
                 : hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
}

enum hapt_status search_least_sum(const struct search_problem *problem, struct hapt_arena *scratch, double *least_s)
{
    const int C = problem->C, L = problem->L;
    double *least; /* [L + 1][C] of a suffix that starts in c; behind the last layer 0 */
    HAPT_NEW(least, scratch, (size_t)(L + 1) * (size_t)C);
    for (int first = L - 1; first >= 0; first--) {
        for (int c = 0; c < C; c++) {
            const int list = c * L + first;
            double best_s = INFINITY;
            for (int i = 0; i < problem->candidate_count[list]; i++) {
                const struct search_candidate *at = &problem->candidate[list][i];
                double after_s = at->end == L ? 0 : INFINITY;
                for (int next = 0; at->end < L && next < C; next++)
                    after_s = fmin(after_s, least[at->end * C + next] +
                                                2 * problem->comm_s[search_link(problem, c, next, at->end - 1)]);
                best_s = fmin(best_s, at->time_s + after_s);
            }
            least[first * C + c] = best_s;
        }
    }
    *least_s = INFINITY;
    for (int c = 0; c < C; c++) *least_s = fmin(*least_s, least[c]);
    *least_s *= 1 - 1e-12; /* rounded in another order than the passes do */
    return HAPT_OK;
}
