/*
 * Stages that recompute. They take the time of the same layers that keep all activations, and in addition that of the
 * forward operators that run again. The latter are a part of the layers' measured forward times: the predicted part,
 * from rooflines. Ranges that fit only if they recompute are not run; their times are composed (smooth.h,
 * team_ranges.h).
 */
#include <string.h>

#include "hapt/calibration.h"
#include "measure.h"

bool measure_wants_again(const struct measure *measure, int subcluster, struct hapt_submesh submesh, int first,
                         int last)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int mesh_index = hapt_candidates_mesh_index_of(candidates, submesh);
    if (!measure->again || mesh_index < 0) return false;
    const struct hapt_item_again *again = measure_again(measure, measure->classes.of_subcluster[subcluster],
                                                        hapt_candidates_item(candidates, mesh_index, first, last));
    for (int share = 0; share < candidates->keep_count; share++)
        if (hapt_candidates_wanted(candidates, subcluster, submesh, first, last, &again[share].memory)) return true;
    return false;
}

/* The repeated operators of one mesh on one subcluster. */
struct repeating {
    const struct hapt_candidates *candidates;
    int mesh_index;
    const struct hapt_sharding *sharding; /* in which the units recompute */
    struct hapt_roofline roofline;
    const int *layer_of;        /* [forward operator] */
    double *layer_s, *repeat_s; /* [L] forward times; [reduce_first] */
};

static double predicted_s(const struct repeating *repeating, int o)
{
    const struct hapt_sharding *sharding = repeating->sharding;
    return hapt_op_type_at(sharding->shard->op[o].type)->collective
               ? 0
               : hapt_roofline_graph_s(&repeating->roofline, sharding->shard, o);
}

/* Sets repeat_s: the predicted part of the layers' forward times, or the predicted times themselves if the single
 * layers have none; then layer_s becomes predicted times as well. */
static enum hapt_status share_forward(struct repeating *repeating, const struct hapt_item_time *time,
                                      struct hapt_arena *scratch)
{
    const struct hapt_candidates *candidates = repeating->candidates;
    const struct hapt_sharding *sharding = repeating->sharding;
    const int L = candidates->layer_count;
    double *expected_s; /* [L] */
    bool known = true;
    HAPT_NEW(expected_s, scratch, L);
    for (int o = 0; o < sharding->graph->forward_count; o++)
        expected_s[repeating->layer_of[sharding->graph->op[o].forward_op]] += predicted_s(repeating, o);
    for (int l = 0; l < L; l++) {
        const struct hapt_item_time *own = &time[hapt_candidates_item(candidates, repeating->mesh_index, l, l)];
        repeating->layer_s[l] = own->forward_s;
        known = known && own->forward_s > 0;
    }
    if (!known) memcpy(repeating->layer_s, expected_s, (size_t)L * sizeof *expected_s);
    for (int o = sharding->graph->forward_count; o < sharding->reduce_first; o++) {
        if (sharding->repeats[o] < 0) continue;
        const int l = repeating->layer_of[sharding->source_op[o]];
        repeating->repeat_s[o] =
            expected_s[l] > 0 ? predicted_s(repeating, o) * repeating->layer_s[l] / expected_s[l] : 0;
    }
    return HAPT_OK;
}

/* An item without a time cannot be a candidate. */
static void drop_untimed(const struct repeating *repeating, const struct hapt_item_time *time,
                         struct hapt_item_again *again)
{
    const struct hapt_candidates *candidates = repeating->candidates;
    for (int k = 0; k < candidates->structure_count; k++) {
        const int item = k * candidates->mesh_count + repeating->mesh_index;
        for (int choice = 0; choice < candidates->keep_stride && time[item].forward_s + time[item].backward_s <= 0;
             choice++)
            again[(size_t)item * (size_t)candidates->keep_stride + (size_t)choice].memory = FITS_NOWHERE;
    }
}

/* Brings the seconds of every item's shares into proportion to its own forward time. */
static void fit_to_ranges(const struct repeating *repeating, const struct hapt_item_time *time,
                          struct hapt_item_again *again)
{
    const struct hapt_candidates *candidates = repeating->candidates;
    for (int k = 0; k < candidates->structure_count; k++) {
        const int item = k * candidates->mesh_count + repeating->mesh_index;
        double sum_s = 0;
        for (int l = candidates->first[k]; l <= candidates->last[k]; l++) sum_s += repeating->layer_s[l];
        for (int share = 0; share < candidates->keep_stride; share++) {
            struct hapt_item_again *its = &again[(size_t)item * (size_t)candidates->keep_stride + (size_t)share];
            its->again_s = sum_s > 0 ? its->again_s * time[item].forward_s / sum_s : 0;
        }
    }
}

static enum hapt_status time_mesh(struct repeating *repeating, const struct hapt_item_time *time,
                                  struct hapt_arena *scratch, struct hapt_item_again *again)
{
    const struct hapt_candidates *candidates = repeating->candidates;
    struct hapt_candidate_shardings shardings;
    drop_untimed(repeating, time, again);
    HAPT_TRY(hapt_candidates_shardings(candidates, repeating->mesh_index, scratch, &shardings));
    if (!shardings.recomputes) return HAPT_OK;
    repeating->sharding = shardings.again;
    HAPT_NEW(repeating->layer_s, scratch, candidates->layer_count);
    HAPT_NEW(repeating->repeat_s, scratch, shardings.again->reduce_first);
    HAPT_TRY(share_forward(repeating, time, scratch));
    HAPT_TRY(
        hapt_candidates_again(candidates, repeating->mesh_index, shardings.again, repeating->repeat_s, scratch, again));
    fit_to_ranges(repeating, time, again);
    return HAPT_OK;
}

enum hapt_status measure_time_again(const struct measure *measure, int subcluster, const struct hapt_item_time *time,
                                    struct hapt_item_again **again)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const size_t cells = (size_t)candidates->item_count * (size_t)candidates->keep_stride;
    struct repeating repeating = {.candidates = candidates};
    int *layer_of;
    HAPT_NEW(*again, measure->scratch, cells);
    memcpy(*again, measure_again(measure, measure->classes.of_subcluster[subcluster], 0), cells * sizeof **again);
    HAPT_TRY(hapt_layers_of_operators(candidates->layers, measure->scratch, &layer_of));
    repeating.layer_of = layer_of;
    repeating.roofline = hapt_calibration_roofline(
        measure->efficiency, &measure->cluster->subcluster[subcluster].device, candidates->model->dtype);
    for (int d = 0; d < candidates->mesh_count; d++) {
        struct hapt_arena scratch;
        hapt_arena_init(&scratch);
        repeating.mesh_index = d;
        const enum hapt_status status = time_mesh(&repeating, time, &scratch, *again);
        hapt_arena_release(&scratch);
        HAPT_TRY(status);
    }
    return HAPT_OK;
}
