/*
 * Alpa: the exact search on 8 or 16 coarse layers, in a world where all devices are alike and links cost nothing (its
 * cost model has no transfers between stages), under eager 1F1B. What it then pays is the true profile's.
 *
 * Settings that its user would try are tried: both granularities and every order of the subclusters, the fastest
 * simulated one taken. A plan made for the mean device's memory that the true devices cannot hold gives way to the best
 * one that they can.
 */
#include "baselines.h"
#include "search.h"

#include <math.h>

enum { MOST_ORDERED = 4 };

struct belief {
    MPI_Comm comm;
    struct contest contest;
    struct hapt_search_options options;
    struct coarse world;        /* as it believes it to be */
    int64_t second_choices[64]; /* candidates that true memory forced */
    int second_count;
};

/* Submeshes of all subclusters that equal one: index in its list, or -1. */
static void find_equals(const struct hapt_profile *profile, struct hapt_submesh shape, int *equal)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        equal[c] = -1;
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            const struct hapt_submesh *at = &profile->cluster[c].submesh[s];
            if (at->n == shape.n && at->m == shape.m && at->tp == shape.tp) equal[c] = s;
        }
    }
}

/* The mean times of a stage over the subclusters that know it. */
static void mean_times(const struct hapt_profile *profile, const int *equal, int first, int last, double *stage_s,
                       double *step_s)
{
    int count = 0;
    *stage_s = *step_s = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (equal[c] < 0) continue;
        const size_t cell = hapt_profile_index(profile, equal[c], first, last);
        if (!isfinite(cluster->stage_time[cell])) continue;
        *stage_s += cluster->stage_time[cell];
        *step_s += cluster->step_time ? cluster->step_time[cell] : 0;
        count++;
    }
    *stage_s /= count;
    *step_s /= count;
}

/* Which stages are candidates stays as it is: what the profile does not know cannot be priced. */
static enum hapt_status believe(const struct hapt_profile *profile, const bool *cut, struct hapt_arena *arena,
                                struct coarse *world)
{
    struct coarse truth;
    int equal[HAPT_MAX_SUBCLUSTERS];
    HAPT_TRY(coarse_make(profile, cut, arena, &truth));
    HAPT_TRY(coarse_make(profile, cut, arena, world));
    const int layers = truth.profile->layer_count;
    for (int c = 0; c < profile->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &world->profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            find_equals(profile, cluster->submesh[s], equal);
            for (int i = 0; i < layers; i++) {
                for (int j = i; j < layers; j++) {
                    const size_t cell = hapt_profile_index(truth.profile, s, i, j);
                    if (isfinite(cluster->stage_time[cell]))
                        mean_times(truth.profile, equal, i, j, &cluster->stage_time[cell], &cluster->step_time[cell]);
                }
            }
        }
    }
    return HAPT_OK;
}

/* Every device has the mean memory, or its own. */
static void believe_memory(struct hapt_profile *world, const struct hapt_profile *profile, bool own)
{
    double sum = 0, devices = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const double count = profile->cluster[c].nodes * (double)profile->cluster[c].devices_per_node;
        sum += count * profile->cluster[c].device_memory_bytes;
        devices += count;
    }
    for (int c = 0; c < profile->cluster_count; c++)
        world->cluster[c].device_memory_bytes = own ? profile->cluster[c].device_memory_bytes : sum / devices;
}

/* Its choice for one granularity and order, paid for in the true world. */
static enum hapt_status enter_choice(struct belief *belief)
{
    bool fits = false;
    for (int own = 0; own < 2 && !fits; own++) {
        struct hapt_plan *plan;
        believe_memory(belief->world.profile, belief->contest.profile, own);
        const enum hapt_status status =
            hapt_plan_search(belief->comm, belief->world.profile, &belief->options, belief->contest.result, &plan);
        if (status != HAPT_OK) {
            HAPT_TRY(contest_miss(&belief->contest, status));
            continue;
        }
        coarse_restore(&belief->world, belief->contest.profile, plan);
        if (own) belief->second_choices[belief->second_count++] = belief->contest.entered;
        HAPT_TRY(hapt_env_agree(belief->comm, contest_enter(&belief->contest, plan, &fits)));
    }
    return HAPT_OK;
}

static enum hapt_status enter_orders(struct belief *belief)
{
    const int C = belief->contest.profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    order_first(order, C);
    do {
        free_links(belief->world.profile);
        order_links(belief->world.profile, order);
        HAPT_TRY(enter_choice(belief));
    } while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

static enum hapt_status enter_all(struct belief *belief, const struct hapt_strategy_options *options,
                                  struct hapt_arena *scratch)
{
    static const int granularity[] = {8, 16};
    const struct hapt_profile *profile = belief->contest.profile;
    for (int k = 0; k < 2; k++) {
        bool *cut = NULL;
        enum hapt_status status = hapt_plan_grid(profile, granularity[k], options->block_end, scratch, &cut);
        if (status == HAPT_OK) status = believe(profile, cut, scratch, &belief->world);
        HAPT_TRY(hapt_env_agree(belief->comm, status));
        HAPT_TRY(enter_orders(belief));
    }
    return HAPT_OK;
}

enum hapt_status plan_alpa(MPI_Comm comm, const struct hapt_profile *profile,
                           const struct hapt_strategy_options *options, struct hapt_arena *result,
                           struct hapt_plan **plan, const char **note)
{
    struct belief belief = {.comm = comm, .contest = contest_open(profile, result), .options = options->search};
    struct hapt_arena scratch;
    HAPT_TRY(search_agree(comm, &options->search, need_equal_nodes(profile, HAPT_STRATEGY_ALPA)));
    belief.options.may_fail = true;
    hapt_arena_init(&scratch);
    const enum hapt_status status = enter_all(&belief, options, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    HAPT_TRY(search_agree(comm, &options->search, contest_close(&belief.contest, HAPT_STRATEGY_ALPA, plan)));
    for (int k = 0; k < belief.second_count; k++)
        if (belief.second_choices[k] == belief.contest.winner)
            *note = "its own choice exceeds the memory of some devices: the best that they hold";
    return HAPT_OK;
}
