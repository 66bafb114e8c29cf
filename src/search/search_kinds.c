/* Finds interchangeable subclusters, and the suffix states that remain when their order does not matter. */
#include "search.h"

#include <string.h>

static bool same_table(const double *a, const double *b, size_t cells)
{
    if (cells == 0) return true;
    if (!a || !b) return a == b;
    return a == b || memcmp(a, b, cells * sizeof *a) == 0;
}

/* Ends have to be compared, because the times of other ends are undefined. */
static bool same_ends(const struct hapt_profile_cluster *x, const struct hapt_profile_cluster *y, size_t rows)
{
    if (rows == 0) return true;
    if (!x->ends || !y->ends) return x->ends == y->ends;
    return memcmp(x->ends, y->ends, rows * sizeof *x->ends) == 0;
}

static bool same_links(const struct hapt_profile *profile, int a, int b)
{
    const int C = profile->cluster_count;
    const double *const table[] = {profile->link_bandwidth, profile->link_latency};
    for (int k = 0; k < 2; k++) {
        if (table[k][a * C + a] != table[k][b * C + b] || table[k][a * C + b] != table[k][b * C + a]) return false;
        for (int c = 0; c < C; c++) {
            if (c == a || c == b) continue;
            if (table[k][a * C + c] != table[k][b * C + c] || table[k][c * C + a] != table[k][c * C + b]) return false;
        }
    }
    return true;
}

/* True if mixed stages use the subcluster; it is then not interchangeable. */
static bool is_mixed(const struct search_problem *problem, int c)
{
    for (int p = problem->C; p < problem->device_set_count; p++)
        if (problem->device_set[p].clusters >> c & 1u) return true;
    return false;
}

static bool interchangeable(const struct search_problem *problem, int a, int b)
{
    const struct hapt_profile *profile = problem->profile;
    if (is_mixed(problem, a) || is_mixed(problem, b)) return false;
    const struct hapt_profile_cluster *x = &profile->cluster[a], *y = &profile->cluster[b];
    const size_t S = (size_t)x->submesh_count, cells = hapt_profile_index(profile, x->submesh_count, 0, 0);
    if (x->nodes != y->nodes || x->devices_per_node != y->devices_per_node || x->submesh_count != y->submesh_count ||
        x->device_memory_bytes != y->device_memory_bytes || x->deferrable != y->deferrable ||
        memcmp(x->submesh, y->submesh, S * sizeof *x->submesh) != 0)
        return false;
    return same_links(profile, a, b) && same_ends(x, y, S * (size_t)profile->layer_count) &&
           same_table(x->stage_time, y->stage_time, cells) && same_table(x->step_time, y->step_time, cells) &&
           same_table(x->parameter_bytes, y->parameter_bytes, cells) &&
           same_table(x->activation_bytes, y->activation_bytes, cells);
}

/* True for valid suffix states: of each kind the highest indices are used, and the front of `current` has the lowest of
 * its kind. */
static bool is_valid(const struct search_problem *problem, unsigned mask, int current)
{
    const int front = problem->device_set[current].front;
    if (problem->device_set[current].clusters & ~mask) return false;
    for (int c = 0; c < problem->C; c++) {
        const unsigned above = problem->kind[c] & ~((2u << c) - 1);
        if ((mask >> c & 1u) && (mask & above) != above) return false;
    }
    return (mask & problem->kind[front] & ((1u << front) - 1)) == 0;
}

enum hapt_status search_problem_suffix_states(struct search_problem *problem, struct hapt_arena *arena)
{
    const int C = problem->C;
    for (int c = 0; c < C; c++) {
        problem->kind[c] = 1u << c;
        for (int other = 0; other < c; other++) {
            if (!interchangeable(problem, other, c)) continue;
            problem->kind[other] |= 1u << c;
            problem->kind[c] = problem->kind[other];
        }
    }
    problem->suffix_state_count = problem->device_set_count << C;
    HAPT_NEW(problem->valid, arena, problem->suffix_state_count);
    HAPT_NEW(problem->suffix_state, arena, problem->suffix_state_count);
    for (unsigned mask = 1; mask < 1u << C; mask++) {
        for (int i = 0; i < problem->device_set_count; i++) {
            const int current = (i + C) % problem->device_set_count; /* mixed device sets first */
            const bool valid = is_valid(problem, mask, current);
            problem->valid[search_suffix_state(problem, mask, current)] = valid;
            if (valid) problem->suffix_state[problem->valid_count++] = (struct search_suffix_state){mask, current};
        }
    }
    return HAPT_OK;
}

int search_name(const struct search_problem *problem, unsigned used, int current)
{
    int earlier = -1; /* used subclusters of its kind, minus 1 */
    if (problem->device_set[current].mixed_group >= 0) return problem->C + problem->device_set[current].mixed_group;
    for (int c = 0; c < problem->C; c++) earlier += (used & problem->kind[current]) >> c & 1u;
    for (int c = 0; c < problem->C; c++)
        if ((problem->kind[current] >> c & 1u) && earlier-- == 0) return c;
    return current;
}
