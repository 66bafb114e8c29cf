/* Lists the device sets of stages by the subclusters that they use, and which may follow each other. */
#include "search.h"

#include <string.h>

/* False if a view or a sweep leaves fewer devices than the group takes. */
static bool fits(const struct hapt_profile *profile, const struct hapt_profile_mixed *mixed)
{
    for (int i = 0; i < mixed->count; i++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[mixed->cluster[i]];
        if (mixed->devices[i] > cluster->nodes * cluster->devices_per_node) return false;
    }
    return true;
}

static enum hapt_status list_device_sets(struct search_problem *problem, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = problem->profile;
    int room = problem->C;
    for (int k = 0; k < profile->mixed_count; k++) room += profile->mixed[k].count;
    HAPT_NEW(problem->device_set, arena, room);
    HAPT_NEW(problem->taken, arena, (size_t)room * (size_t)problem->C);
    for (int c = 0; c < problem->C; c++)
        problem->device_set[problem->device_set_count++] =
            (struct search_device_set){.front = c, .clusters = 1u << c, .mixed_group = -1};
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        unsigned clusters = 0;
        if (!fits(profile, mixed)) continue;
        for (int i = 0; i < mixed->count; i++) clusters |= 1u << mixed->cluster[i];
        for (int i = 0; i < mixed->count; i++) {
            int *taken = &problem->taken[problem->device_set_count * problem->C];
            for (int n = 0; n < mixed->count; n++) taken[mixed->cluster[n]] = mixed->devices[n];
            problem->device_set[problem->device_set_count++] =
                (struct search_device_set){.front = mixed->cluster[i], .clusters = clusters, .mixed_group = k};
        }
    }
    return HAPT_OK;
}

/* True if device set p takes all devices of its subclusters, except those in `open`. */
static bool takes_all(const struct search_problem *problem, int p, unsigned open)
{
    for (int c = 0; c < problem->C; c++)
        if ((problem->device_set[p].clusters & ~open) >> c & 1u &&
            problem->taken[p * problem->C + c] != problem->devices[c])
            return false;
    return true;
}

static int find_shared_subcluster(const struct search_problem *problem, int p, int q)
{
    const struct search_device_set *before = &problem->device_set[p], *behind = &problem->device_set[q];
    const unsigned both = before->clusters & behind->clusters;
    const bool mixed = before->mixed_group >= 0, exact = problem->options->use_all_devices;
    int shared_subcluster = SEARCH_NOTHING_SHARED;
    if (both) {
        if (both != 1u << behind->front || (mixed && before->front == behind->front)) return SEARCH_NOT_ALLOWED;
        shared_subcluster = behind->front;
    }
    /* no other stage can use the devices that a mixed stage leaves in a subcluster that no neighbour shares */
    const unsigned open = 1u << before->front | both;
    return mixed && exact && !takes_all(problem, p, open) ? SEARCH_NOT_ALLOWED : shared_subcluster;
}

enum hapt_status search_problem_device_sets(struct search_problem *problem, struct hapt_arena *arena)
{
    HAPT_TRY(list_device_sets(problem, arena));
    const int sets = problem->device_set_count;
    HAPT_NEW(problem->shared_subcluster, arena, (size_t)sets * (size_t)sets);
    for (int p = 0; p < sets; p++)
        for (int q = 0; q < sets; q++) problem->shared_subcluster[p * sets + q] = find_shared_subcluster(problem, p, q);
    for (int p = 0; p < sets; p++)
        problem->device_set[p].ends = problem->device_set[p].mixed_group < 0 || !problem->options->use_all_devices ||
                                      takes_all(problem, p, 1u << problem->device_set[p].front);
    return HAPT_OK;
}

struct hapt_subclusters search_device_set_subclusters(const struct search_problem *problem, int p)
{
    const struct search_device_set *device_set = &problem->device_set[p];
    if (device_set->mixed_group < 0) return (struct hapt_subclusters){1, &device_set->front};
    const struct hapt_profile_mixed *mixed = &problem->profile->mixed[device_set->mixed_group];
    return (struct hapt_subclusters){mixed->count, mixed->cluster};
}
