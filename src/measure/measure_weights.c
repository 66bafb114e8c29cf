/*
 * The part of backward passes that a split defers (hapt_sharding.weight), timed by the engine. Input: the benchmark
 * engines of my class and the times of its items. Output: measure->weight_share, which items compose from their layers.
 */
#include "measure.h"

#include <math.h>

/* Times the layers of one mesh. One layer stands for those of equal structure. share [L] */
static enum hapt_status time_layers(struct measure *measure, int mesh_index, double *share)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int l = 0; l < L; l++) {
        const int item = hapt_candidates_item(candidates, mesh_index, l, l);
        int same = 0;
        while (candidates->structure[same * L + same] != candidates->structure[l * L + l]) same++;
        if (same < l)
            share[l] = share[same];
        else if (measure->needed[item])
            HAPT_TRY(bench_engines_time_weight(&measure->bench_engines, item, &share[l]));
        else
            share[l] = NAN;
    }
    return HAPT_OK;
}

/* Writes 1 + the share, so that 0 stands for unknown in sums over ranks. */
static enum hapt_status time_mesh(struct measure *measure, int mesh_index, double *share)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int class = measure->classes.own_class;
    HAPT_TRY(time_layers(measure, mesh_index, share));
    for (int item = mesh_index; item < candidates->item_count; item += candidates->mesh_count) {
        const int structure = item / candidates->mesh_count;
        double backward_s = 0, weight_s = 0;
        for (int l = candidates->first[structure]; l <= candidates->last[structure]; l++) {
            const double layer_s =
                measure_time(measure, class, hapt_candidates_item(candidates, mesh_index, l, l))->backward_s;
            backward_s += layer_s;
            weight_s += share[l] * layer_s;
        }
        double *its = &measure->weight_share[(size_t) class * (size_t)candidates->item_count + (size_t)item];
        *its = backward_s > 0 && isfinite(weight_s) ? 1 + weight_s / backward_s : 0;
    }
    return HAPT_OK;
}

static enum hapt_status time_class(struct measure *measure)
{
    double *share;
    HAPT_NEW(share, measure->scratch, measure->candidates->layer_count);
    for (int d = 0; d < measure->candidates->mesh_count; d++) HAPT_TRY(time_mesh(measure, d, share));
    return HAPT_OK;
}

enum hapt_status measure_weights(struct measure *measure)
{
    const size_t cells = (size_t)measure->classes.count * (size_t)measure->candidates->item_count;
    enum hapt_status status = HAPT_OK;
    measure->weight_share = hapt_arena_alloc(measure->scratch, cells, sizeof *measure->weight_share);
    if (!measure->weight_share) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK && measure->classes.is_lead) status = time_class(measure);
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    HAPT_TRY(measure_sum_over_ranks(measure, measure->weight_share, cells));
    for (size_t cell = 0; cell < cells; cell++)
        measure->weight_share[cell] = measure->weight_share[cell] > 0 ? measure->weight_share[cell] - 1 : NAN;
    return HAPT_OK;
}
