/*
 * Alpa: the exact search on 8 or 16 coarse layers, in a world where all devices are alike and links cost nothing (its
 * cost model has no transfers between stages), under eager 1F1B. What it then pays is the true profile's.
 *
 * Settings that its user would try are tried: both granularities and every order of the subclusters, the fastest
 * simulated one taken. Where the true devices cannot hold what it chooses for a granularity in any order, it takes the
 * best by its belief that they can.
 */
#include "baselines.h"
#include "search.h"

#include <math.h>

enum { MOST_ORDERED = 4 };

struct belief {
    MPI_Comm comm;
    struct contest contest;
    struct hapt_search_options options;
    struct coarse ideal;        /* the world as it believes it to be */
    struct coarse possible;     /* the same times where true devices have the candidate, under their true memory */
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
            if (at->n == shape.n && at->m == shape.m && at->tp == shape.tp && at->program == shape.program)
                equal[c] = s;
        }
    }
}

/* Believed values of one stage: means over the subclusters that know it. */
struct mean {
    double stage_s, forward_s, step_s, parameter_bytes, activation_bytes;
    int count;
};

static struct mean mean_stage(const struct hapt_profile *profile, const int *equal, int first, int last)
{
    struct mean mean = {0};
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (equal[c] < 0) continue;
        const size_t cell = hapt_profile_index(profile, equal[c], first, last);
        if (!isfinite(cluster->stage_time[cell])) continue;
        const double share = 1.0 / ++mean.count; /* running means */
        mean.stage_s += share * (cluster->stage_time[cell] - mean.stage_s);
        mean.forward_s += share * (cluster->stage_forward_time[cell] - mean.forward_s);
        mean.step_s += share * ((cluster->step_time ? cluster->step_time[cell] : 0) - mean.step_s);
        mean.parameter_bytes += share * (cluster->parameter_bytes[cell] - mean.parameter_bytes);
        mean.activation_bytes += share * (cluster->activation_bytes[cell] - mean.activation_bytes);
    }
    return mean;
}

static void believe_stage(struct belief *belief, const struct mean *mean, int c, size_t cell)
{
    struct hapt_profile_cluster *ideal = &belief->ideal.profile->cluster[c];
    struct hapt_profile_cluster *possible = &belief->possible.profile->cluster[c];
    ideal->stage_time[cell] = mean->stage_s;
    ideal->stage_forward_time[cell] = mean->forward_s;
    ideal->step_time[cell] = mean->step_s;
    ideal->parameter_bytes[cell] = mean->parameter_bytes;
    ideal->activation_bytes[cell] = mean->activation_bytes;
    if (!isfinite(possible->stage_time[cell])) return;
    possible->stage_time[cell] = mean->stage_s;
    possible->step_time[cell] = mean->step_s;
}

static void believe_device(struct belief *belief)
{
    const struct hapt_profile *profile = belief->contest.profile;
    double sum = 0, devices = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const double count = profile->cluster[c].nodes * (double)profile->cluster[c].devices_per_node;
        sum += count * profile->cluster[c].device_memory_bytes;
        devices += count;
    }
    for (int c = 0; c < profile->cluster_count; c++)
        belief->ideal.profile->cluster[c].device_memory_bytes = sum / devices;
}

static enum hapt_status believe(struct belief *belief, const bool *cut, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = belief->contest.profile;
    struct coarse truth;
    int equal[HAPT_MAX_SUBCLUSTERS];
    HAPT_TRY(coarse_make(profile, cut, arena, &truth));
    HAPT_TRY(coarse_make(profile, cut, arena, &belief->ideal));
    HAPT_TRY(coarse_make(profile, cut, arena, &belief->possible));
    belief->ideal.profile->mixed_count = belief->possible.profile->mixed_count = 0; /* it knows no mixed stages */
    for (int c = 0; c < profile->cluster_count; c++) {
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            find_equals(profile, profile->cluster[c].submesh[s], equal);
            for (int i = 0; i < truth.profile->layer_count; i++) {
                for (int j = i; j < truth.profile->layer_count; j++) {
                    const struct mean mean = mean_stage(truth.profile, equal, i, j);
                    if (mean.count > 0) believe_stage(belief, &mean, c, hapt_profile_index(truth.profile, s, i, j));
                }
            }
        }
    }
    believe_device(belief);
    return HAPT_OK;
}

/* Its choice in a world and order, paid for in the true one. */
static enum hapt_status enter_choice(struct belief *belief, const struct coarse *world, bool *fits)
{
    struct hapt_plan *plan;
    const enum hapt_status status =
        hapt_plan_search(belief->comm, world->profile, &belief->options, belief->contest.result, &plan);
    *fits = false;
    if (status != HAPT_OK) return contest_miss(&belief->contest, status);
    coarse_restore(world, belief->contest.profile, plan);
    if (world == &belief->possible) belief->second_choices[belief->second_count++] = belief->contest.entered;
    return hapt_env_agree(belief->comm, contest_enter(&belief->contest, plan, fits));
}

/* Any order of the subclusters is as good as another to it. */
static enum hapt_status enter_orders(struct belief *belief, const struct coarse *world, bool *fits)
{
    const int C = belief->contest.profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    bool now;
    *fits = false;
    order_first(order, C);
    do {
        free_links(world->profile);
        order_links(world->profile, order);
        HAPT_TRY(enter_choice(belief, world, &now));
        *fits = *fits || now;
    } while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

static enum hapt_status enter_all(struct belief *belief, const struct hapt_strategy_options *options,
                                  struct hapt_arena *scratch)
{
    static const int granularity[] = {8, 16};
    const struct hapt_profile *profile = belief->contest.profile;
    for (int k = 0; k < 2; k++) {
        bool *cut = NULL, fits;
        enum hapt_status status = hapt_plan_grid(profile, granularity[k], options->block_end, scratch, &cut);
        if (status == HAPT_OK) status = believe(belief, cut, scratch);
        HAPT_TRY(hapt_env_agree(belief->comm, status));
        HAPT_TRY(enter_orders(belief, &belief->ideal, &fits));
        if (!fits) HAPT_TRY(enter_orders(belief, &belief->possible, &fits));
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
