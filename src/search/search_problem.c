/* The sparse index of feasible stages, and the candidates for t_max (HAPT 5.2.2). */
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
    if (guess > 1 && guess < B - 2) { /* rounding is off by at most one */
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

/* t_i of a stage; NaN or infinite: no candidate. */
static inline double stage_time(const double *stage_time, const double *step_time, size_t cell, int B)
{
    return stage_time[cell] + (step_time ? step_time[cell] : 0) / B;
}

struct thinning {
    const struct hapt_profile_cluster *cluster;
    bool exact; /* every device must be used: only equal device counts compare */
    double tie_s;
};

static bool beats(const struct thinning *thinning, const struct search_candidate *a, const struct search_candidate *b)
{
    if (a->launches < b->launches || a->time_s > b->time_s) return false;
    if (thinning->exact ? a->devices != b->devices : a->devices > b->devices) return false;
    const struct hapt_submesh *submesh = thinning->cluster->submesh;
    if (search_compare_submeshes(&submesh[a->submesh], &submesh[b->submesh]) < 0) return true;
    if (thinning->tie_s >= 0) return b->time_s - a->time_s > thinning->tie_s;
    /* equal in all that a pass uses: keep one of them */
    return a->time_s < b->time_s || a->launches > b->launches || a->devices < b->devices;
}

/* Adds `one` to the candidates for the same layers, unless one of them beats it. Drops those that it beats. */
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

/* Adds submesh s to the candidates for layers [first, end), for each end: room[end - first - 1], with `stride` elements
 * each. The tables are read in the order of memory, which is most of the work. */
static void index_submesh(struct search_problem *problem, const struct thinning *thinning, int first, int s,
                          double memory_bytes, struct search_candidate *room, int stride, int *count)
{
    const struct hapt_profile_cluster *cluster = thinning->cluster;
    const bool gpipe = problem->options->schedule == HAPT_SCHEDULE_GPIPE;
    const struct hapt_profile_ends ends = hapt_profile_ends_of(problem->profile, cluster, s, first);
    for (int end = ends.least; end <= ends.most; end++) {
        const int at = end - first - 1;
        const size_t cell = hapt_profile_index(problem->profile, s, first, end - 1);
        if (!isfinite(cluster->stage_time[cell]) || cluster->stage_time[cell] > problem->longest_stage_s) continue;
        const int launches =
            fitting_launches(cluster->parameter_bytes[cell], cluster->activation_bytes[cell], memory_bytes, problem->B);
        if (launches < (gpipe ? problem->B : 1)) continue;
        const struct search_candidate one = {.time_s =
                                                 stage_time(cluster->stage_time, cluster->step_time, cell, problem->B),
                                             .end = end,
                                             .submesh = s,
                                             .devices = cluster->submesh[s].n * cluster->submesh[s].m,
                                             .launches = gpipe ? 1 : launches};
        count[at] = add(thinning, room + at * stride, count[at], &one, &problem->thinned);
    }
}

/* The most microbatches in flight that every device of a mixed stage holds. */
static int mixed_launches(const struct search_problem *problem, const struct hapt_profile_mixed *mixed, int first,
                          int end, double memory_factor)
{
    int least = problem->B;
    for (int i = 0; i < mixed->count; i++) {
        const size_t cell = hapt_profile_index(problem->profile, mixed->memory_rows > 1 ? i : 0, first, end - 1);
        const double device_bytes = problem->profile->cluster[mixed->cluster[i]].device_memory_bytes;
        const int launches =
            fitting_launches(mixed->parameter_bytes[cell], mixed->activation_bytes[cell],
                             isinf(memory_factor) ? INFINITY : device_bytes * memory_factor, problem->B);
        if (launches < least) least = launches;
    }
    return least;
}

/* Writes the candidates of mixed device set p that start at layer `first` to `list`; returns their number. */
static int index_mixed(const struct search_problem *problem, int p, int first, double memory_factor,
                       struct search_candidate *list)
{
    const struct hapt_profile_mixed *mixed = &problem->profile->mixed[problem->device_set[p].mixed_group];
    const bool gpipe = problem->options->schedule == HAPT_SCHEDULE_GPIPE;
    int count = 0;
    for (int end = first + 1; end <= problem->L; end++) {
        const size_t cell = hapt_profile_index(problem->profile, 0, first, end - 1);
        if (!isfinite(mixed->stage_time[cell]) || mixed->stage_time[cell] > problem->longest_stage_s) continue;
        const int launches = mixed_launches(problem, mixed, first, end, memory_factor);
        if (launches < (gpipe ? problem->B : 1)) continue;
        list[count++] =
            (struct search_candidate){.time_s = stage_time(mixed->stage_time, mixed->step_time, cell, problem->B),
                                      .end = end,
                                      .devices = problem->taken[p * problem->C + problem->device_set[p].front],
                                      .launches = gpipe ? 1 : launches};
    }
    return count;
}

/* The same for subcluster c. count: [L], for its use. */
static int index_cluster(struct search_problem *problem, int c, int first, double memory_factor, double tie_s,
                         struct search_candidate *list, int *count)
{
    const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
    const double memory_bytes = isinf(memory_factor) ? INFINITY : cluster->device_memory_bytes * memory_factor;
    const struct thinning thinning = {cluster, problem->options->use_all_devices, tie_s};
    const int stride = cluster->submesh_count;
    int all = 0;
    for (int at = 0; at < problem->L - first; at++) count[at] = 0;
    for (int s = 0; s < cluster->submesh_count; s++)
        index_submesh(problem, &thinning, first, s, memory_bytes, list, stride, count);
    for (int at = 0; at < problem->L - first; at++)
        for (int k = 0; k < count[at]; k++) list[all++] = list[at * stride + k];
    return all;
}

static enum hapt_status index_stages(struct search_problem *problem, int p, int first, double memory_factor,
                                     double tie_s, struct search_candidate *buffer, int *counts,
                                     struct hapt_arena *arena)
{
    const int count = p < problem->C ? index_cluster(problem, p, first, memory_factor, tie_s, buffer, counts)
                                     : index_mixed(problem, p, first, memory_factor, buffer);
    struct search_candidate **list = &problem->candidate[p * problem->L + first];
    HAPT_NEW(*list, arena, count);
    memcpy(*list, buffer, (size_t)count * sizeof *buffer);
    problem->candidate_count[p * problem->L + first] = count;
    problem->all_candidates += count;
    for (int i = 0; i < count; i++) {
        if (buffer[i].time_s > problem->longest_s) problem->longest_s = buffer[i].time_s;
        if (buffer[i].launches > problem->most_launches) problem->most_launches = buffer[i].launches;
    }
    return HAPT_OK;
}

static enum hapt_status build_index(struct search_problem *problem, double memory_factor, double tie_s,
                                    struct hapt_arena *arena)
{
    int submeshes = 1;
    for (int c = 0; c < problem->C; c++)
        if (problem->profile->cluster[c].submesh_count > submeshes)
            submeshes = problem->profile->cluster[c].submesh_count;
    const size_t lists = (size_t)problem->device_set_count * (size_t)problem->L;
    struct search_candidate *buffer = malloc((size_t)submeshes * (size_t)problem->L * sizeof *buffer);
    int *counts = malloc((size_t)problem->L * sizeof *counts);
    if (!buffer || !counts) {
        free(buffer);
        free(counts);
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
    }
    enum hapt_status status = HAPT_OK;
    problem->candidate = hapt_arena_alloc(arena, lists, sizeof *problem->candidate);
    problem->candidate_count = hapt_arena_alloc(arena, lists, sizeof *problem->candidate_count);
    if (!problem->candidate || !problem->candidate_count) status = HAPT_ERR_MEMORY;
    for (int p = 0; p < problem->device_set_count; p++)
        for (int first = 0; first < problem->L && status == HAPT_OK; first++)
            status = index_stages(problem, p, first, memory_factor, tie_s, buffer, counts, arena);
    free(buffer);
    free(counts);
    return status;
}

static enum hapt_status find_classes(struct search_problem *problem, struct hapt_arena *arena)
{
    int classes = problem->device_set_count - problem->C;
    for (int c = 0; c < problem->C; c++) classes += problem->profile->cluster[c].submesh_count;
    HAPT_NEW(problem->class_devices, arena, classes);
    HAPT_NEW(problem->class_of, arena, problem->device_set_count);
    HAPT_NEW(problem->first_class, arena, problem->device_set_count + 1);
    for (int c = 0; c < problem->C; c++) {
        const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
        HAPT_NEW(problem->class_of[c], arena, cluster->submesh_count);
        problem->first_class[c] = problem->class_count;
        for (int devices = 0;;) { /* next larger number of devices */
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
    for (int p = problem->C; p < problem->device_set_count; p++) {
        HAPT_NEW(problem->class_of[p], arena, 1);
        problem->first_class[p] = problem->class_of[p][0] = problem->class_count;
        problem->class_devices[problem->class_count++] = problem->taken[p * problem->C + problem->device_set[p].front];
    }
    problem->first_class[problem->device_set_count] = problem->class_count;
    return HAPT_OK;
}

static enum hapt_status price_links(struct search_problem *problem, struct hapt_arena *arena)
{
    const int sets = problem->device_set_count, L = problem->L;
    HAPT_NEW(problem->comm_s, arena, (size_t)sets * (size_t)sets * (size_t)L);
    for (int from = 0; from < sets; from++) {
        for (int to = 0; to < sets; to++) {
            const struct hapt_subclusters before = search_device_set_subclusters(problem, from),
                                          behind = search_device_set_subclusters(problem, to);
            const bool never = search_shared_subcluster(problem, from, to) == SEARCH_NOT_ALLOWED;
            for (int layer = 0; layer < L; layer++) {
                const double comm_s =
                    never ? INFINITY : hapt_profile_boundary_s(problem->profile, layer, before, behind, NULL);
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
                                       double memory_factor, double longest_stage_s, double tie_s,
                                       struct hapt_arena *arena, struct search_problem **problem)
{
    struct search_problem *made;
    HAPT_NEW(made, arena, 1);
    const int C = profile->cluster_count, L = profile->layer_count;
    if (C > HAPT_SEARCH_MAX_SUBCLUSTERS)
        return hapt_fail(HAPT_ERR_INPUT, "merge subclusters with equal devices",
                         "the search takes at most %d subclusters, not %d", HAPT_SEARCH_MAX_SUBCLUSTERS, C);
    *made = (struct search_problem){.profile = profile,
                                    .options = options,
                                    .L = L,
                                    .C = C,
                                    .B = options->microbatches,
                                    .longest_stage_s = longest_stage_s};
    made->cap = options->schedule == HAPT_SCHEDULE_GPIPE ? 1 : made->B;
    int64_t stages = 0;
    for (int c = 0; c < C; c++) {
        made->devices[c] = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
        stages += made->devices[c];
        if (made->devices[c] > made->most_devices) made->most_devices = made->devices[c];
    }
    HAPT_TRY(search_problem_device_sets(made, arena));
    HAPT_TRY(search_problem_suffix_states(made, arena));
    HAPT_TRY(find_classes(made, arena));
    HAPT_TRY(price_links(made, arena));
    HAPT_TRY(build_index(made, memory_factor, tie_s, arena));
    /* bounded by the sum over the longest pipeline, and by what any stage holds */
    if (stages > L) stages = L;
    if (made->most_launches > 1 + 3 * (stages - 1)) made->most_launches = (int)(1 + 3 * (stages - 1));
    *problem = made;
    return HAPT_OK;
}

struct t_max_list {
    double least_s, most_s, *t_max;
    size_t count, room;
    bool full; /* out of memory */
};

static inline void add_t_max(struct t_max_list *list, double t_max_s)
{
    if (!(t_max_s >= list->least_s && t_max_s <= list->most_s) || !isfinite(t_max_s)) return;
    if (list->count == list->room) {
        const size_t room = 2 * list->room + 1024;
        double *wider = realloc(list->t_max, room * sizeof *wider);
        if (!wider) {
            list->full = true;
            return;
        }
        list->t_max = wider;
        list->room = room;
    }
    list->t_max[list->count++] = t_max_s;
}

static void add_stage_t_max(const struct search_problem *problem, struct t_max_list *list)
{
    const int L = problem->L;
    for (int c = 0; c < problem->C; c++) {
        const struct hapt_profile_cluster *cluster = &problem->profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int first = 0; first < L; first++) {
                const struct hapt_profile_ends ends = hapt_profile_ends_of(problem->profile, cluster, s, first);
                for (int end = ends.least; end <= ends.most; end++)
                    add_t_max(list, stage_time(cluster->stage_time, cluster->step_time,
                                               hapt_profile_index(problem->profile, s, first, end - 1), problem->B));
            }
    }
    for (int p = problem->C; p < problem->device_set_count; p++) {
        const struct hapt_profile_mixed *mixed = &problem->profile->mixed[problem->device_set[p].mixed_group];
        if (problem->device_set[p].front != mixed->cluster[0]) continue; /* once per group */
        for (int first = 0; first < L; first++)
            for (int last = first; last < L; last++)
                add_t_max(list, stage_time(mixed->stage_time, mixed->step_time,
                                           hapt_profile_index(problem->profile, 0, first, last), problem->B));
    }
}

/* The optimal t_max is some t, c, 2c or c / epsilon: between two of these nothing else changes. */
enum hapt_status search_t_max_candidates(const struct search_problem *problem, double least_s, double most_s,
                                         struct hapt_arena *arena, double **t_max, int64_t *count)
{
    struct t_max_list list = {.least_s = least_s, .most_s = most_s};
    size_t distinct = 0;
    add_stage_t_max(problem, &list);
    for (int from = 0; from < problem->device_set_count; from++) {
        for (int to = 0; to < problem->device_set_count; to++) {
            for (int layer = 0; layer < problem->L - 1; layer++) {
                const double comm_s = problem->comm_s[search_link(problem, from, to, layer)];
                add_t_max(&list, comm_s);
                add_t_max(&list, 2 * comm_s);
                add_t_max(&list, comm_s / problem->options->hide_threshold);
            }
        }
    }
    if (list.count > 0) qsort(list.t_max, list.count, sizeof *list.t_max, hapt_compare_doubles);
    for (size_t i = 0; i < list.count; i++)
        if (i == 0 || list.t_max[i] != list.t_max[distinct - 1]) list.t_max[distinct++] = list.t_max[i];
    *t_max = list.full ? NULL : hapt_arena_alloc(arena, distinct, sizeof **t_max);
    if (*t_max && distinct > 0) memcpy(*t_max, list.t_max, distinct * sizeof **t_max);
    free(list.t_max);
    *count = (int64_t)distinct;
    return *t_max ? HAPT_OK
                  : hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
}

enum hapt_status search_least_sum(const struct search_problem *problem, struct hapt_arena *scratch, double *least_s)
{
    const int sets = problem->device_set_count, L = problem->L;
    double *least; /* [L + 1][sets] of a suffix that starts there; 0 behind the last layer */
    HAPT_NEW(least, scratch, (size_t)(L + 1) * (size_t)sets);
    for (int first = L - 1; first >= 0; first--) {
        for (int p = 0; p < sets; p++) {
            const int list = p * L + first;
            double best_s = INFINITY;
            for (int i = 0; i < problem->candidate_count[list]; i++) {
                const struct search_candidate *at = &problem->candidate[list][i];
                double after_s = at->end == L ? 0 : INFINITY;
                for (int next = 0; at->end < L && next < sets; next++)
                    after_s = fmin(after_s, least[at->end * sets + next] +
                                                2 * problem->comm_s[search_link(problem, p, next, at->end - 1)]);
                best_s = fmin(best_s, at->time_s + after_s);
            }
            least[first * sets + p] = best_s;
        }
    }
    *least_s = INFINITY;
    for (int p = 0; p < sets; p++) *least_s = fmin(*least_s, least[p]);
    *least_s *= 1 - 1e-12; /* the passes round in another order */
    return HAPT_OK;
}
