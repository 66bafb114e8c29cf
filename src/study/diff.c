/* Matches the stages of two plans and finds the layers that changed their subcluster. */
#include "hapt/diff.h"

#include <math.h>
#include <string.h>

static bool same(double x, double y)
{
    return hapt_at_most(x, y) && hapt_at_most(y, x);
}

/* Layers that two stages share, in units of 1 / (layers of a * layers of b). These units stay exact if the counts
 * differ. */
static int64_t overlap(const struct hapt_plan *a, int i, const struct hapt_plan *b, int j)
{
    const int64_t La = a->layer_count, Lb = b->layer_count;
    const int64_t low_a = a->stage[i].first_layer * Lb, high_a = a->stage[i].end_layer * Lb;
    const int64_t low_b = b->stage[j].first_layer * La, high_b = b->stage[j].end_layer * La;
    const int64_t low = low_a > low_b ? low_a : low_b, high = high_a < high_b ? high_a : high_b;
    return high > low ? high - low : 0;
}

/* best[i]: the stage of b with the largest overlap with stage i of a. Both pipelines cover the layers in order. */
static enum hapt_status find_best(const struct hapt_plan *a, const struct hapt_plan *b, struct hapt_arena *arena,
                                  int **best)
{
    HAPT_NEW(*best, arena, a->stage_count);
    for (int i = 0, from = 0; i < a->stage_count; i++) {
        while (overlap(a, i, b, from) == 0) from++;
        (*best)[i] = from;
        for (int j = from + 1; j < b->stage_count && overlap(a, i, b, j) > 0; j++)
            if (overlap(a, i, b, j) > overlap(a, i, b, (*best)[i])) (*best)[i] = j;
    }
    return HAPT_OK;
}

/* True if two mixed submeshes differ in device counts. The caller compares the subcluster names. */
static bool other_mix(const struct hapt_plan_submesh *x, const struct hapt_plan_submesh *y)
{
    return x->part_count > 1 && x->part_count == y->part_count &&
           memcmp(x->devices, y->devices, (size_t)x->part_count * sizeof *x->devices) != 0;
}

static unsigned compare_stages(const struct hapt_plan_stage *x, const struct hapt_plan_stage *y)
{
    unsigned changed = 0;
    if (x->first_layer != y->first_layer || x->end_layer != y->end_layer) changed |= HAPT_DIFF_LAYERS;
    if (strcmp(x->submesh->name, y->submesh->name) != 0) changed |= HAPT_DIFF_SUBCLUSTER;
    if (x->submesh->nodes != y->submesh->nodes || x->submesh->devices_per_node != y->submesh->devices_per_node ||
        other_mix(x->submesh, y->submesh))
        changed |= HAPT_DIFF_SUBMESH;
    if (x->layout.tensor_parallel != y->layout.tensor_parallel || !x->layout.program != !y->layout.program ||
        (x->layout.program && !hapt_stage_layout_same(x->layout.program, y->layout.program)))
        changed |= HAPT_DIFF_TENSOR_PARALLEL;
    if (!same(x->compute_s, y->compute_s) || !same(x->forward_s, y->forward_s) || !same(x->step_s, y->step_s))
        changed |= HAPT_DIFF_COMPUTE;
    if (!same(x->comm_s, y->comm_s)) changed |= HAPT_DIFF_TRANSFER;
    if (x->warmup != y->warmup) changed |= HAPT_DIFF_LAUNCHES;
    if (!same(x->memory_bytes, y->memory_bytes) || !same(x->device_memory_bytes, y->device_memory_bytes))
        changed |= HAPT_DIFF_MEMORY;
    if (x->layout.recompute != y->layout.recompute || x->layout.unit_count != y->layout.unit_count ||
        x->layout.weights_at != y->layout.weights_at)
        changed |= HAPT_DIFF_KEPT;
    return changed;
}

static enum hapt_status match_rows(const struct hapt_plan *a, const struct hapt_plan *b, struct hapt_arena *arena,
                                   struct hapt_diff *diff)
{
    int *to_b, *to_a;
    HAPT_TRY(find_best(a, b, arena, &to_b));
    HAPT_TRY(find_best(b, a, arena, &to_a));
    HAPT_NEW(diff->row, arena, (size_t)a->stage_count + (size_t)b->stage_count);
    for (int i = 0, j = 0; i < a->stage_count || j < b->stage_count;) {
        struct hapt_diff_row *row = &diff->row[diff->row_count++];
        const bool lone_a = i < a->stage_count && to_a[to_b[i]] != i, lone_b = j < b->stage_count && to_b[to_a[j]] != j;
        if (lone_a) {
            *row = (struct hapt_diff_row){i++, -1, 0};
        } else if (lone_b) {
            *row = (struct hapt_diff_row){-1, j++, 0};
        } else {
            HAPT_ASSERT(i < a->stage_count && j < b->stage_count && to_b[i] == j);
            *row = (struct hapt_diff_row){i, j, compare_stages(&a->stage[i], &b->stage[j])};
            i++, j++;
        }
    }
    return HAPT_OK;
}

static enum hapt_status find_moves(const struct hapt_plan *a, const struct hapt_plan *b, struct hapt_arena *arena,
                                   struct hapt_diff *diff)
{
    HAPT_NEW(diff->relocation, arena, (size_t)a->stage_count + (size_t)b->stage_count);
    for (int i = 0, j = 0, layer = 0; layer < a->layer_count;) {
        const struct hapt_plan_stage *x = &a->stage[i], *y = &b->stage[j];
        const int end = x->end_layer < y->end_layer ? x->end_layer : y->end_layer;
        struct hapt_diff_relocation *last =
            diff->relocation_count ? &diff->relocation[diff->relocation_count - 1] : NULL;
        if (strcmp(x->submesh->name, y->submesh->name) != 0) {
            if (last && last->end_layer == layer && strcmp(last->from, x->submesh->name) == 0 &&
                strcmp(last->to, y->submesh->name) == 0)
                last->end_layer = end;
            else
                diff->relocation[diff->relocation_count++] =
                    (struct hapt_diff_relocation){layer, end, x->submesh->name, y->submesh->name};
        }
        i += x->end_layer == end;
        j += y->end_layer == end;
        layer = end;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_diff(const struct hapt_plan *a, const struct hapt_plan *b, struct hapt_arena *arena,
                                struct hapt_diff **diff)
{
    struct hapt_diff *made;
    HAPT_NEW(made, arena, 1);
    made->same_layers = a->layer_count == b->layer_count;
    HAPT_TRY(match_rows(a, b, arena, made));
    if (made->same_layers) HAPT_TRY(find_moves(a, b, arena, made));
    made->equal = made->same_layers && a->microbatches == b->microbatches && a->schedule == b->schedule &&
                  a->blocking == b->blocking && a->host_state == b->host_state && a->host_update == b->host_update &&
                  hapt_plan_defers(a) == hapt_plan_defers(b) && a->replicas == b->replicas &&
                  same(a->hide_threshold, b->hide_threshold) && same(a->latency_s, b->latency_s) &&
                  same(a->simulated_s, b->simulated_s) && same(a->t_max_s, b->t_max_s) &&
                  strcmp(a->limit, b->limit) == 0;
    for (int r = 0; r < made->row_count; r++)
        made->equal &= made->row[r].a >= 0 && made->row[r].b >= 0 && made->row[r].changed == 0;
    *diff = made;
    return HAPT_OK;
}
