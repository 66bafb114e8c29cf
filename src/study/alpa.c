/*
 * Alpa: the exact search on 8 or 16 coarse layers. It assumes identical devices and free links, because its cost model
 * has no transfers between stages. Schedule: eager 1F1B. Its plans are then priced with the true profile.
 *
 * All settings that its user would try are tried: both granularities, every order of the subclusters. The fastest
 * simulated plan wins. If the true devices hold its choice for a granularity in no order, it takes the best plan by its
 * own model that they do hold.
 *
 * Not modelled: its intra-operator integer program; programs are those of the profile. Its own layer clustering.
 *
 * Reproduces the coarse plan of HAPT Table 1: layers 1-2 on the V100s, 3-5 and 6-8 on the A100s; the V100s take 1.66
 * times as long, published 1.65 (tests/unit/baselines_published.c).
 */
#include "baselines.h"

#include <math.h>

enum { MOST_ORDERED = 4 };

struct assumption {
    MPI_Comm comm;
    struct selection selection;
    struct hapt_search_options options;
    struct coarse ideal;    /* the cluster as it assumes it */
    struct coarse possible; /* the same times, but only candidates that the true devices have, with their true memory */
    int64_t second_choices[64]; /* candidates chosen under the true memory */
    int second_count;
};

/* Assumed values of one stage: means over the subclusters that have it. */
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
        const double share = 1.0 / ++mean.count; /* running mean */
        mean.stage_s += share * (cluster->stage_time[cell] - mean.stage_s);
        mean.forward_s += share * (cluster->stage_forward_time[cell] - mean.forward_s);
        mean.step_s += share * ((cluster->step_time ? cluster->step_time[cell] : 0) - mean.step_s);
        mean.parameter_bytes += share * (cluster->parameter_bytes[cell] - mean.parameter_bytes);
        mean.activation_bytes += share * (cluster->activation_bytes[cell] - mean.activation_bytes);
    }
    return mean;
}

static void assume_stage(struct assumption *assumption, const struct mean *mean, int c, size_t cell)
{
    struct hapt_profile_cluster *ideal = &assumption->ideal.profile->cluster[c];
    struct hapt_profile_cluster *possible = &assumption->possible.profile->cluster[c];
    ideal->stage_time[cell] = mean->stage_s;
    ideal->stage_forward_time[cell] = mean->forward_s;
    ideal->step_time[cell] = mean->step_s;
    ideal->parameter_bytes[cell] = mean->parameter_bytes;
    ideal->activation_bytes[cell] = mean->activation_bytes;
    if (!isfinite(possible->stage_time[cell])) return;
    possible->stage_time[cell] = mean->stage_s;
    possible->step_time[cell] = mean->step_s;
}

static void assume_device(struct assumption *assumption)
{
    const struct hapt_profile *profile = assumption->selection.profile;
    double sum = 0, devices = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const double count = profile->cluster[c].nodes * (double)profile->cluster[c].devices_per_node;
        sum += count * profile->cluster[c].device_memory_bytes;
        devices += count;
    }
    for (int c = 0; c < profile->cluster_count; c++)
        assumption->ideal.profile->cluster[c].device_memory_bytes = sum / devices;
}

static enum hapt_status assume(struct assumption *assumption, const bool *boundary, struct hapt_arena *arena)
{
    const struct hapt_profile *profile = assumption->selection.profile;
    struct coarse truth;
    int equal[HAPT_MAX_SUBCLUSTERS]; /* index of the same submesh in each subcluster; -1: none */
    HAPT_TRY(coarse_make(profile, boundary, arena, &truth));
    HAPT_TRY(coarse_make(profile, boundary, arena, &assumption->ideal));
    HAPT_TRY(coarse_make(profile, boundary, arena, &assumption->possible));
    assumption->ideal.profile->mixed_count = assumption->possible.profile->mixed_count =
        0; /* Alpa has no mixed stages */
    for (int c = 0; c < profile->cluster_count; c++) {
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            for (int other = 0; other < profile->cluster_count; other++)
                equal[other] = find_submesh(&profile->cluster[other], &profile->cluster[c].submesh[s]);
            for (int i = 0; i < truth.profile->layer_count; i++) {
                for (int j = i; j < truth.profile->layer_count; j++) {
                    const struct mean mean = mean_stage(truth.profile, equal, i, j);
                    if (mean.count > 0) assume_stage(assumption, &mean, c, hapt_profile_index(truth.profile, s, i, j));
                }
            }
        }
    }
    assume_device(assumption);
    return HAPT_OK;
}

/* Searches with the assumed profile, prices the plan with the true one. */
static enum hapt_status enter_choice(struct assumption *assumption, const struct coarse *world, bool *fits)
{
    struct hapt_plan *plan;
    const enum hapt_status status = hapt_plan_search_formula(assumption->comm, world->profile, &assumption->options,
                                                             assumption->selection.result, &plan);
    *fits = false;
    if (status != HAPT_OK) return selection_miss(&assumption->selection, status);
    coarse_restore(world, assumption->selection.profile, plan);
    if (world == &assumption->possible)
        assumption->second_choices[assumption->second_count++] = assumption->selection.entered;
    return hapt_env_agree(assumption->comm, selection_enter(&assumption->selection, plan, fits));
}

/* Tries all orders, because it cannot tell them apart: its links are free. */
static enum hapt_status enter_orders(struct assumption *assumption, const struct coarse *world, bool *fits)
{
    const int C = assumption->selection.profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    bool now;
    *fits = false;
    order_first(order, C);
    do {
        free_links(world->profile);
        order_links(world->profile, order);
        HAPT_TRY(enter_choice(assumption, world, &now));
        *fits = *fits || now;
    } while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

static enum hapt_status enter_all(struct assumption *assumption, const struct hapt_strategy_options *options,
                                  struct hapt_arena *scratch)
{
    static const int granularity[] = {8, 16};
    const struct hapt_profile *profile = assumption->selection.profile;
    for (int k = 0; k < 2; k++) {
        bool *boundary = NULL, fits;
        enum hapt_status status = hapt_plan_grid(profile, granularity[k], options->block_end, scratch, &boundary);
        if (status == HAPT_OK) status = assume(assumption, boundary, scratch);
        HAPT_TRY(hapt_env_agree(assumption->comm, status));
        HAPT_TRY(enter_orders(assumption, &assumption->ideal, &fits));
        if (!fits) HAPT_TRY(enter_orders(assumption, &assumption->possible, &fits));
    }
    return HAPT_OK;
}

enum hapt_status plan_alpa(MPI_Comm comm, const struct hapt_profile *profile,
                           const struct hapt_strategy_options *options, struct hapt_arena *result,
                           struct hapt_plan **plan, const char **note)
{
    struct assumption assumption = {
        .comm = comm, .selection = selection_open(profile, result), .options = options->search};
    struct hapt_arena scratch;
    HAPT_TRY(hapt_search_agree(comm, &options->search, need_equal_nodes(profile, HAPT_STRATEGY_ALPA)));
    assumption.options.may_fail = true;
    hapt_arena_init(&scratch);
    const enum hapt_status status = enter_all(&assumption, options, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    HAPT_TRY(
        hapt_search_agree(comm, &options->search, selection_close(&assumption.selection, HAPT_STRATEGY_ALPA, plan)));
    for (int k = 0; k < assumption.second_count; k++)
        if (assumption.second_choices[k] == assumption.selection.winner)
            *note = "its own choice exceeds the memory of some devices: this is the best plan that they hold";
    return HAPT_OK;
}
