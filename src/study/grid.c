/* Coarse layers over those of a profile, for systems that plan on fewer layers. */
#include "baselines.h"

#include <math.h>
#include <string.h>

enum { FINEST_LAYERS = 48 }; /* a boundary moves by at most half a layer of this many */

/* Time that a layer adds to a stage: mean over pairs of stages in one table that differ by it alone. NaN: no such pair
 * and no time of the layer alone. */
static double added_s(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int submesh,
                      int layer)
{
    double sum_s = 0;
    int count = 0;
    for (int i = 0; i < layer; i++) {
        const double more_s = cluster->stage_time[hapt_profile_index(profile, submesh, i, layer)] -
                              cluster->stage_time[hapt_profile_index(profile, submesh, i, layer - 1)];
        if (!isfinite(more_s)) continue;
        sum_s += more_s;
        count++;
    }
    for (int j = layer + 1; j < profile->layer_count; j++) {
        const double more_s = cluster->stage_time[hapt_profile_index(profile, submesh, layer, j)] -
                              cluster->stage_time[hapt_profile_index(profile, submesh, layer + 1, j)];
        if (!isfinite(more_s)) continue;
        sum_s += more_s;
        count++;
    }
    if (count > 0) return fmax(0, sum_s / count);
    const double alone_s = cluster->stage_time[hapt_profile_index(profile, submesh, layer, layer)];
    return isfinite(alone_s) ? alone_s : NAN;
}

/* Finds the table with the most candidates, because it tells the most about single layers. */
static void fullest_table(const struct hapt_profile *profile, int *cluster, int *submesh)
{
    size_t most = 0;
    *cluster = *submesh = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            size_t count = 0;
            for (int i = 0; i < profile->layer_count; i++)
                for (int j = i; j < profile->layer_count; j++)
                    count += isfinite(profile->cluster[c].stage_time[hapt_profile_index(profile, s, i, j)]) != 0;
            if (count <= most) continue;
            most = count;
            *cluster = c;
            *submesh = s;
        }
    }
}

/* work[l]: work of layers [0, l + 1). Layers without any time count as the mean of the others. */
static void sum_work(const struct hapt_profile *profile, double *work)
{
    int c, s, known = 0;
    double known_s = 0;
    fullest_table(profile, &c, &s);
    for (int l = 0; l < profile->layer_count; l++) {
        work[l] = added_s(profile, &profile->cluster[c], s, l);
        if (isnan(work[l])) continue;
        known_s += work[l];
        known++;
    }
    for (int l = 0; l < profile->layer_count; l++) {
        if (isnan(work[l])) work[l] = known > 0 ? known_s / known : 1;
        if (l > 0) work[l] += work[l - 1];
    }
}

static int greatest_divisor(int a, int b)
{
    while (b) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

/* The narrowest boundary within `max_shift` of the target; the nearest one on a tie. If there is none, the nearest
 * boundary of all. */
static int nearest_boundary(const struct hapt_profile *profile, const double *work, double target, double max_shift)
{
    int best = -1, nearest = 0;
    for (int l = 0; l < profile->layer_count - 1; l++) {
        const double distance = fabs(work[l] - target);
        if (distance < fabs(work[nearest] - target)) nearest = l;
        if (distance > max_shift) continue;
        if (best >= 0 && profile->boundary_bytes[l] > profile->boundary_bytes[best]) continue;
        if (best >= 0 && profile->boundary_bytes[l] == profile->boundary_bytes[best] &&
            distance >= fabs(work[best] - target))
            continue;
        best = l;
    }
    return best >= 0 ? best : nearest;
}

enum hapt_status hapt_plan_grid(const struct hapt_profile *profile, int coarse, const bool *block_end,
                                struct hapt_arena *arena, bool **boundary)
{
    const int L = profile->layer_count;
    bool *made;
    double *work;
    int blocks = 1;
    HAPT_NEW(made, arena, L);
    HAPT_NEW(work, arena, L);
    for (int l = 0; block_end && l < L - 1; l++) blocks += block_end[l];
    if (block_end && blocks == coarse) {
        for (int l = 0; l < L - 1; l++) made[l] = block_end[l];
    } else if (coarse >= L) {
        for (int l = 0; l < L - 1; l++) made[l] = true;
    } else {
        sum_work(profile, work);
        const double max_shift = 0.5 * work[L - 1] / (coarse > FINEST_LAYERS ? coarse : FINEST_LAYERS);
        for (int k = 1; k < coarse; k++) {
            /* lowest terms: every grid with this fraction gets the same target, to the last bit */
            const int divisor = greatest_divisor(k, coarse);
            const double target = work[L - 1] * (k / divisor) / (coarse / divisor);
            made[nearest_boundary(profile, work, target, max_shift)] = true;
        }
    }
    *boundary = made;
    return HAPT_OK;
}

enum hapt_status hapt_plan_blocks(const struct hapt_layers *layers, struct hapt_arena *arena, const bool **block_end)
{
    bool *made;
    int boundaries = 0;
    HAPT_NEW(made, arena, layers->count);
    for (int l = 0; l < layers->count - 1; l++) {
        const int before = layers->module_of[l], behind = layers->module_of[l + 1];
        made[l] = before != behind && layers->module[before].kind >= 0 && layers->module[behind].kind >= 0;
        boundaries += made[l];
    }
    *block_end = boundaries > 0 ? made : NULL;
    return HAPT_OK;
}

/* to [rows][coarse][coarse] takes the cells of from [rows][fine][fine] whose layers end where coarse ones do. */
static void coarsen_table(const struct hapt_profile *fine, const struct coarse *coarse, int rows, const double *from,
                          double *to)
{
    for (int row = 0; from && row < rows; row++) {
        for (int i = 0; i < coarse->profile->layer_count; i++) {
            const int first = i > 0 ? coarse->end_layer[i - 1] : 0;
            for (int j = i; j < coarse->profile->layer_count; j++)
                to[hapt_profile_index(coarse->profile, row, i, j)] =
                    from[hapt_profile_index(fine, row, first, coarse->end_layer[j] - 1)];
        }
    }
}

static enum hapt_status coarsen_cluster(const struct hapt_profile *fine, int c, const struct coarse *coarse,
                                        struct hapt_arena *arena)
{
    const struct hapt_profile_cluster *from = &fine->cluster[c];
    struct hapt_profile_cluster *to = &coarse->profile->cluster[c];
    const int rows = from->submesh_count;
    HAPT_TRY(hapt_profile_add_cluster(coarse->profile, c, from->name, from->nodes, from->devices_per_node,
                                      from->device_memory_bytes, from->peak_flops, from->submesh, rows, arena));
    coarsen_table(fine, coarse, rows, from->stage_time, to->stage_time);
    coarsen_table(fine, coarse, rows, from->stage_forward_time, to->stage_forward_time);
    coarsen_table(fine, coarse, rows, from->parameter_bytes, to->parameter_bytes);
    coarsen_table(fine, coarse, rows, from->activation_bytes, to->activation_bytes);
    coarsen_table(fine, coarse, rows, from->step_time, to->step_time);
    return HAPT_OK;
}

static enum hapt_status coarsen_mixed(const struct hapt_profile *fine, int k, const struct coarse *coarse,
                                      struct hapt_arena *arena)
{
    const struct hapt_profile_mixed *from = &fine->mixed[k];
    struct hapt_profile_mixed *to = &coarse->profile->mixed[k];
    const size_t cells = hapt_profile_index(coarse->profile, 1, 0, 0);
    *to = *from; /* shares the device tables */
    HAPT_NEW(to->stage_time, arena, cells);
    HAPT_NEW(to->stage_forward_time, arena, cells);
    if (from->step_time) HAPT_NEW(to->step_time, arena, cells);
    HAPT_NEW(to->parameter_bytes, arena, (size_t)from->memory_rows * cells);
    HAPT_NEW(to->activation_bytes, arena, (size_t)from->memory_rows * cells);
    for (size_t cell = 0; cell < cells; cell++) to->stage_time[cell] = to->stage_forward_time[cell] = NAN;
    coarsen_table(fine, coarse, 1, from->stage_time, to->stage_time);
    coarsen_table(fine, coarse, 1, from->stage_forward_time, to->stage_forward_time);
    coarsen_table(fine, coarse, 1, from->step_time, to->step_time);
    coarsen_table(fine, coarse, from->memory_rows, from->parameter_bytes, to->parameter_bytes);
    coarsen_table(fine, coarse, from->memory_rows, from->activation_bytes, to->activation_bytes);
    return HAPT_OK;
}

enum hapt_status coarse_make(const struct hapt_profile *fine, const bool *boundary, struct hapt_arena *arena,
                             struct coarse *coarse)
{
    const size_t links = (size_t)fine->cluster_count * (size_t)fine->cluster_count;
    int count = 0;
    HAPT_NEW(coarse->end_layer, arena, fine->layer_count);
    for (int l = 0; l < fine->layer_count; l++)
        if (boundary[l] || l == fine->layer_count - 1) coarse->end_layer[count++] = l + 1;
    HAPT_TRY(hapt_profile_create(count, fine->cluster_count, arena, &coarse->profile));
    for (int k = 0; k < count; k++) coarse->profile->boundary_bytes[k] = fine->boundary_bytes[coarse->end_layer[k] - 1];
    if (fine->tied_bytes) {
        HAPT_NEW(coarse->profile->tied_bytes, arena, count);
        for (int k = 1; k < count; k++) coarse->profile->tied_bytes[k] = fine->tied_bytes[coarse->end_layer[k - 1]];
    }
    int *coarse_layer;
    HAPT_NEW(coarse_layer, arena, fine->layer_count);
    for (int l = 0, k = 0; l < fine->layer_count; l++) {
        coarse_layer[l] = k;
        k += l + 1 == coarse->end_layer[k];
    }
    HAPT_TRY(hapt_crossings_coarsen(fine->crossings, coarse_layer, arena, &coarse->profile->crossings));
    memcpy(coarse->profile->link_bandwidth, fine->link_bandwidth, links * sizeof(double));
    memcpy(coarse->profile->link_latency, fine->link_latency, links * sizeof(double));
    coarse->profile->exchange = fine->exchange;
    coarse->profile->host_state = fine->host_state;
    coarse->profile->host_update = fine->host_update;
    coarse->profile->flops = fine->flops;
    coarse->profile->layout_count = fine->layout_count; /* shared */
    coarse->profile->layout = fine->layout;
    for (int c = 0; c < fine->cluster_count; c++) {
        HAPT_TRY(coarsen_cluster(fine, c, coarse, arena));
        coarse->profile->cluster[c].deferrable = fine->cluster[c].deferrable;
    }
    HAPT_NEW(coarse->profile->mixed, arena, fine->mixed_count);
    coarse->profile->mixed_count = fine->mixed_count;
    for (int k = 0; k < fine->mixed_count; k++) HAPT_TRY(coarsen_mixed(fine, k, coarse, arena));
    return HAPT_OK;
}

void coarse_restore(const struct coarse *coarse, const struct hapt_profile *fine, struct hapt_plan *plan)
{
    plan->layer_count = fine->layer_count;
    for (int i = 0; i < plan->stage_count; i++) {
        plan->stage[i].first_layer = i > 0 ? plan->stage[i - 1].end_layer : 0;
        plan->stage[i].end_layer = coarse->end_layer[plan->stage[i].end_layer - 1];
    }
}
