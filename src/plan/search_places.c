/* The kinds of stages, by the subclusters they use, and which may follow which. */
#include "search.h"

#include <string.h>

/* A view or a sweep may leave fewer devices than a group takes. */
static bool fits(const struct hapt_profile *profile, const struct hapt_profile_mixed *mixed)
{
    for (int i = 0; i < mixed->count; i++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[mixed->cluster[i]];
        if (mixed->devices[i] > cluster->nodes * cluster->devices_per_node) return false;
    }
    return true;
}

static enum hapt_status list_places(struct search_problem *problem, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = problem->profile;
    int room = problem->C;
    for (int k = 0; k < profile->mixed_count; k++) room += profile->mixed[k].count;
    HAPT_NEW(problem->place, arena, room);
    HAPT_NEW(problem->taken, arena, (size_t)room * (size_t)problem->C);
    for (int c = 0; c < problem->C; c++)
        problem->place[problem->P++] = (struct search_place){.front = c, .clusters = 1u << c, .group = -1};
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        unsigned clusters = 0;
        if (!fits(profile, mixed)) continue;
        for (int i = 0; i < mixed->count; i++) clusters |= 1u << mixed->cluster[i];
        for (int i = 0; i < mixed->count; i++) {
            int *taken = &problem->taken[problem->P * problem->C];
            for (int n = 0; n < mixed->count; n++) taken[mixed->cluster[n]] = mixed->devices[n];
            problem->place[problem->P++] =
                (struct search_place){.front = mixed->cluster[i], .clusters = clusters, .group = k};
        }
    }
    return HAPT_OK;
}

/* All devices of the subclusters of place p but those in `open` are taken by it. */
static bool takes_all(const struct search_problem *problem, int p, unsigned open)
{
    for (int c = 0; c < problem->C; c++)
        if ((problem->place[p].clusters & ~open) >> c & 1u && problem->taken[p * problem->C + c] != problem->devices[c])
            return false;
    return true;
}

static int joint_of(const struct search_problem *problem, int p, int q)
{
    const struct search_place *before = &problem->place[p], *behind = &problem->place[q];
    const unsigned both = before->clusters & behind->clusters;
    const bool mixed = before->group >= 0, exact = problem->options->use_all_devices;
    int joint = SEARCH_APART;
    if (both) {
        if (both != 1u << behind->front || (mixed && before->front == behind->front)) return SEARCH_NEVER;
        joint = behind->front;
    }
    /* nothing else can use what a mixed stage leaves of a subcluster that no neighbour shares */
    const unsigned open = 1u << before->front | both;
    return mixed && exact && !takes_all(problem, p, open) ? SEARCH_NEVER : joint;
}

enum hapt_status search_problem_places(struct search_problem *problem, struct hapt_arena *arena)
{
    HAPT_TRY(list_places(problem, arena));
    const int P = problem->P;
    HAPT_NEW(problem->joint, arena, (size_t)P * (size_t)P);
    for (int p = 0; p < P; p++)
        for (int q = 0; q < P; q++) problem->joint[p * P + q] = joint_of(problem, p, q);
    for (int p = 0; p < P; p++)
        problem->place[p].ends = problem->place[p].group < 0 || !problem->options->use_all_devices ||
                                 takes_all(problem, p, 1u << problem->place[p].front);
    return HAPT_OK;
}

struct hapt_subclusters search_place_subclusters(const struct search_problem *problem, int p)
{
    const struct search_place *place = &problem->place[p];
    if (place->group < 0) return (struct hapt_subclusters){1, &place->front};
    const struct hapt_profile_mixed *mixed = &problem->profile->mixed[place->group];
    return (struct hapt_subclusters){mixed->count, mixed->cluster};
}
