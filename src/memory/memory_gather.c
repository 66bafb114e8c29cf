/* Gathers, once per sharding, what the memory of ranges needs: touches, boundaries, prefix sums. */
#include "memory_ranges.h"

#include <stdlib.h>

static int compare_touches(const void *a, const void *b)
{
    const struct touch *x = a, *y = b;
    return x->position - y->position;
}

static enum hapt_status note_written(struct hapt_memory_ranges *made, int tensor, int position,
                                     struct hapt_arena *arena)
{
    if (made->written_count == made->written_room) {
        struct written *wider;
        made->written_room = made->written_room == 0 ? 256 : 2 * made->written_room;
        HAPT_NEW(wider, arena, made->written_room);
        for (int w = 0; w < made->written_count; w++) wider[w] = made->written[w];
        made->written = wider;
    }
    made->written[made->written_count] = (struct written){position, made->first_written[tensor]};
    made->first_written[tensor] = made->written_count++;
    return HAPT_OK;
}

/* A gradient sum belongs to every range that writes into it: a tied parameter has several. */
static enum hapt_status gather_written(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    HAPT_NEW(made->first_written, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) made->first_written[t] = -1;
    for (int o = graph->forward_count; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int k = 0; k < op->output_count; k++) {
            if (op->output[k] < 0 || !hapt_graph_is_parameter_gradient(graph, op->output[k])) continue;
            if (o < made->sharding->reduce_first) {
                HAPT_TRY(note_written(made, op->output[k], op->forward_op, arena));
                continue;
            }
            for (int w = made->first_written[op->input[0]]; w >= 0; w = made->written[w].next)
                HAPT_TRY(note_written(made, op->output[k], made->written[w].position, arena));
        }
    }
    return HAPT_OK;
}

struct touching {
    struct hapt_memory_ranges *made;
    int *fill; /* [tensor] */
    bool store;
};

static void note_touch(struct touching *touching, int tensor, struct touch touch)
{
    struct hapt_memory_ranges *made = touching->made;
    const int root = made->sharding->storage[tensor];
    if (touching->store) made->touch[made->touch_start[root] + touching->fill[root]] = touch;
    touching->fill[root]++;
}

static void note_touches(struct touching *touching, int o)
{
    const struct hapt_memory_ranges *made = touching->made;
    const struct hapt_op *op = &made->graph->op[o];
    for (int k = 0; k < op->input_count + op->output_count; k++) {
        const bool writes = k >= op->input_count;
        const int tensor = writes ? op->output[k - op->input_count] : op->input[k];
        const int forward = tensor < 0 ? -1 : ranges_again(made, tensor);
        if (tensor < 0) continue;
        if (ranges_repeats(made, o) >= 0 && forward < 0) continue; /* the forward operator of the unit touches it */
        if (ranges_repeats(made, o) < 0 && forward >= 0)           /* its unit may be kept */
            note_touch(touching, forward, (struct touch){op->forward_op, writes, -1});
        if (o < made->sharding->reduce_first) {
            note_touch(touching, tensor,
                       (struct touch){op->forward_op, writes, o < made->graph->forward_count ? o : -1});
            continue;
        }
        for (int w = made->first_written[op->input[0]]; w >= 0; w = made->written[w].next)
            note_touch(touching, tensor, (struct touch){made->written[w].position, true, -1});
    }
}

/* Merges touches at the same position and closes the gaps between the lists. */
static void close_touches(struct hapt_memory_ranges *made)
{
    const struct hapt_graph *graph = made->graph;
    int kept = 0;
    for (int t = 0, begin = 0; t < graph->tensor_count; t++) {
        const int end = made->touch_start[t + 1];
        qsort(&made->touch[begin], (size_t)(end - begin), sizeof *made->touch, compare_touches);
        made->touch_start[t] = kept;
        for (int k = begin; k < end; k++) {
            struct touch *last = kept > made->touch_start[t] ? &made->touch[kept - 1] : NULL;
            if (last && last->position == made->touch[k].position) {
                last->writes = last->writes || made->touch[k].writes;
                if (made->touch[k].last_forward > last->last_forward) last->last_forward = made->touch[k].last_forward;
            } else {
                made->touch[kept++] = made->touch[k];
            }
        }
        begin = end;
    }
    made->touch_start[graph->tensor_count] = kept;
}

static enum hapt_status gather_touches(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    struct touching touching = {.made = made};
    HAPT_NEW(made->touch_start, arena, graph->tensor_count + 1);
    HAPT_NEW(touching.fill, arena, graph->tensor_count + 1);
    for (int pass = 0; pass < 2; pass++) {
        touching.store = pass == 1;
        for (int o = 0; o < graph->op_count; o++) note_touches(&touching, o);
        if (pass == 1) break;
        for (int t = 0; t < graph->tensor_count; t++) {
            made->touch_start[t + 1] = made->touch_start[t] + touching.fill[t];
            touching.fill[t] = 0;
        }
        HAPT_NEW(made->touch, arena, made->touch_start[graph->tensor_count]);
    }
    close_touches(made);
    return HAPT_OK;
}

static enum hapt_status gather_boundaries(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    int *fill;
    HAPT_NEW(made->boundary_start, arena, made->positions + 2);
    HAPT_NEW(fill, arena, made->positions + 1);
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            const int begin = made->touch_start[t], end = made->touch_start[t + 1];
            if (begin == end || !(ranges_is_forward_activation(made, t) || ranges_is_backward_tensor(made, t)))
                continue;
            for (int c = made->touch[begin].position + 1; c <= made->touch[end - 1].position; c++) {
                if (pass == 1) made->boundary_tensor[made->boundary_start[c] + fill[c]] = t;
                fill[c]++;
            }
        }
        if (pass == 1) break;
        for (int c = 0; c <= made->positions; c++) {
            made->boundary_start[c + 1] = made->boundary_start[c] + fill[c];
            fill[c] = 0;
        }
        HAPT_NEW(made->boundary_tensor, arena, made->boundary_start[made->positions + 1]);
    }
    return HAPT_OK;
}

/* Lists activations of the source by the boundaries between their producer and their last reader. */
static enum hapt_status gather_leaving(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph, *source = made->sharding->source;
    int *fill, *last;
    HAPT_NEW(made->leaving_start, arena, made->positions + 2);
    HAPT_NEW(fill, arena, made->positions + 1);
    HAPT_NEW(last, arena, source->tensor_count);
    for (int o = 0; o < made->sharding->reduce_first; o++)
        for (int i = 0; i < graph->op[o].input_count && ranges_repeats(made, o) < 0; i++) {
            if (graph->op[o].input[i] < 0) continue;
            int *its = &last[made->sharding->origin[graph->op[o].input[i]]];
            if (ranges_position_of(made, o) > *its) *its = ranges_position_of(made, o);
        }
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < source->tensor_count; t++) {
            if (source->tensor[t].kind != HAPT_TENSOR_ACTIVATION) continue;
            for (int c = source->tensor[t].producer + 1; c <= last[t]; c++) {
                if (pass == 1) made->leaving[made->leaving_start[c] + fill[c]] = t;
                fill[c]++;
            }
        }
        if (pass == 1) break;
        for (int c = 0; c <= made->positions; c++) {
            made->leaving_start[c + 1] = made->leaving_start[c] + fill[c];
            fill[c] = 0;
        }
        HAPT_NEW(made->leaving, arena, made->leaving_start[made->positions + 1]);
    }
    return HAPT_OK;
}

static bool is_partial(const struct hapt_sharding *sharding, int tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (sharding->property[tensor][axis].kind == HAPT_PROPERTY_PARTIAL) return true;
    return false;
}

static enum hapt_status gather_versions(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph, *source = made->sharding->source;
    const int *storage = made->sharding->storage, *origin = made->sharding->origin;
    int *fill;
    HAPT_NEW(made->version_start, arena, source->tensor_count + 1);
    HAPT_NEW(made->version, arena, graph->tensor_count);
    HAPT_NEW(fill, arena, source->tensor_count + 1);
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            if (!ranges_is_forward_activation(made, t) || is_partial(made->sharding, t)) continue;
            if (source->tensor[origin[t]].kind != HAPT_TENSOR_ACTIVATION) continue;
            int *list = &made->version[made->version_start[origin[t]]], at = fill[origin[t]]++;
            if (pass == 0) continue;
            for (; at > 0 && storage[list[at - 1]] > storage[t]; at--) list[at] = list[at - 1];
            list[at] = t;
        }
        for (int t = 0; t < source->tensor_count && pass == 0; t++) {
            made->version_start[t + 1] = made->version_start[t] + fill[t];
            fill[t] = 0;
        }
    }
    return HAPT_OK;
}

/* Axes over which gradients are all-reduced in place, once a step. */
static enum hapt_status gather_axes(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_sharding *sharding = made->sharding;
    HAPT_NEW(made->summed_over, arena, made->graph->tensor_count);
    for (int o = sharding->reduce_first; o < made->graph->op_count; o++) {
        const struct hapt_op *op = &made->graph->op[o];
        const int to = sharding->storage[op->output[0]];
        if (hapt_op_type_at(op->type)->collective == HAPT_COLLECTIVE_ALL_REDUCE &&
            sharding->storage[op->input[0]] == to)
            made->summed_over[to] |= 1u << op->integer[0];
    }
    return HAPT_OK;
}

static struct amounts amounts_of(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *local = &made->sharding->shard->tensor[tensor];
    struct amounts amounts = {0};
    if (made->sharding->storage[tensor] != tensor) return amounts;
    if (local->kind == HAPT_TENSOR_PARAMETER) {
        amounts.elements = tensor_pad((size_t)hapt_tensor_elements(local));
        amounts.trained = local->trainable ? amounts.elements : 0;
        const int gradient = made->graph->tensor[tensor].gradient;
        const unsigned axes = gradient >= 0 ? made->summed_over[made->sharding->storage[gradient]] : 0;
        amounts.summed[axes] = amounts.trained;
        amounts.copies = local->dtype != HAPT_F32;
        amounts.trained_fp32 = local->dtype == HAPT_F32 ? amounts.trained : 0;
    } else if (local->kind == HAPT_TENSOR_INPUT) {
        *(hapt_role_is_scalar(local->role) ? &amounts.resident : &amounts.slot) = made->bytes[tensor];
    } else if (hapt_graph_is_parameter_gradient(made->graph, tensor) && !tensor_is_updating(made->graph, tensor)) {
        amounts.resident = made->bytes[tensor];
    }
    return amounts;
}

static enum hapt_status gather_sums(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    HAPT_TRY(gather_axes(made, arena));
    HAPT_NEW(made->prefix, arena, made->positions + 1);
    HAPT_NEW(made->repeat, arena, made->touch_start[graph->tensor_count]);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct amounts amounts = amounts_of(made, t);
        const bool counts = amounts.elements + amounts.slot + amounts.resident > 0;
        for (int k = made->touch_start[t]; counts && k < made->touch_start[t + 1]; k++) {
            amounts_add(&made->prefix[made->touch[k].position + 1], &amounts);
            if (k > made->touch_start[t])
                made->repeat[made->repeat_count++] =
                    (struct repeat){made->touch[k - 1].position, made->touch[k].position, amounts};
        }
    }
    for (int p = 0; p < made->positions; p++) amounts_add(&made->prefix[p + 1], &made->prefix[p]);
    return HAPT_OK;
}

static void lower(int *position, int other)
{
    if (other < *position) *position = other;
}

/* Lists what a backward operator reads of the forward part. */
static void note_reads(struct hapt_memory_ranges *made, int o, bool store, int *fill)
{
    const struct hapt_op *op = &made->graph->op[o];
    const int *storage = made->sharding->storage, unit = ranges_repeats(made, o);
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i], forward = tensor < 0 ? -1 : ranges_again(made, tensor);
        if (tensor < 0 || (unit >= 0 && forward >= 0)) continue;
        if (unit < 0 && forward < 0) lower(&made->kept_from[storage[tensor]], op->forward_op);
        if (unit < 0 && forward >= 0) lower(&made->own_from[storage[forward]], op->forward_op);
        if (unit < 0) continue;
        if (store)
            made->again_reader[made->again_start[storage[tensor]] + fill[storage[tensor]]] =
                (struct again_reader){unit, op->forward_op, made->sharding->light[o]};
        fill[storage[tensor]]++;
    }
}

/* Finds the first position whose backward operators, or the trainer, read an activation: ranges that end behind it must
 * keep the activation. */
static enum hapt_status gather_kept(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    const int loss = made->sharding->storage[graph->loss];
    int *fill;
    HAPT_NEW(fill, arena, graph->tensor_count);
    HAPT_NEW(made->kept_from, arena, graph->tensor_count);
    HAPT_NEW(made->own_from, arena, graph->tensor_count);
    HAPT_NEW(made->again_start, arena, graph->tensor_count + 1);
    for (int t = 0; t < graph->tensor_count; t++) made->kept_from[t] = made->own_from[t] = INT_MAX;
    for (int pass = 0; pass < 2; pass++) {
        for (int o = made->sharding->reduce_first - 1; o >= graph->forward_count; o--) /* units ascend */
            note_reads(made, o, pass == 1, fill);
        for (int t = 0; t < graph->tensor_count && pass == 0; t++) {
            made->again_start[t + 1] = made->again_start[t] + fill[t];
            fill[t] = 0;
        }
        if (pass == 0) HAPT_NEW(made->again_reader, arena, made->again_start[graph->tensor_count]);
    }
    lower(&made->kept_from[loss], ranges_position_of(made, graph->tensor[loss].producer));
    return HAPT_OK;
}

/* Lists the activations of the forward part by the position that makes them. */
static enum hapt_status gather_made(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    int *fill;
    HAPT_NEW(made->made_start, arena, made->positions + 1);
    HAPT_NEW(made->made, arena, graph->tensor_count);
    HAPT_NEW(fill, arena, made->positions);
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            if (made->sharding->storage[t] != t || !ranges_is_forward_activation(made, t)) continue;
            const int at = ranges_position_of(made, graph->tensor[t].producer);
            if (pass == 1) made->made[made->made_start[at] + fill[at]] = t;
            fill[at]++;
        }
        for (int p = 0; p < made->positions && pass == 0; p++) {
            made->made_start[p + 1] = made->made_start[p] + fill[p];
            fill[p] = 0;
        }
    }
    return HAPT_OK;
}

/* Finds the unit that contains each position, and that of each version that is made again. */
static enum hapt_status gather_units(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    HAPT_NEW(made->unit_of, arena, made->positions);
    for (int p = 0; p < made->positions; p++) made->unit_of[p] = -1;
    for (int u = 0; u < made->sharding->unit_count; u++)
        for (int p = made->sharding->unit[u].first_op; p < made->sharding->unit[u].end_op; p++) made->unit_of[p] = u;
    HAPT_NEW(made->again_unit, arena, made->graph->tensor_count);
    HAPT_NEW(made->again_light, arena, made->graph->tensor_count);
    for (int t = 0; t < made->graph->tensor_count; t++) {
        const int forward = ranges_again(made, t), producer = made->graph->tensor[t].producer;
        made->again_unit[t] = forward < 0 ? -1 : ranges_repeats(made, producer);
        if (forward >= 0 && made->sharding->light[producer])
            made->again_light[t] = made->again_light[made->sharding->storage[forward]] = true;
    }
    return HAPT_OK;
}

static enum hapt_status gather_forward(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    const int *storage = made->sharding->storage;
    int *fill;
    HAPT_NEW(made->forward_start, arena, made->positions + 1);
    HAPT_NEW(made->first_forward, arena, graph->tensor_count);
    HAPT_NEW(made->last_forward, arena, graph->tensor_count);
    HAPT_NEW(made->death_start, arena, graph->forward_count + 1);
    HAPT_NEW(made->death, arena, graph->tensor_count);
    HAPT_NEW(fill, arena, graph->forward_count + 1);
    for (int o = graph->forward_count - 1, position = made->positions; o >= -1; o--) {
        const int its = o >= 0 ? ranges_position_of(made, o) : -1;
        HAPT_ASSERT(o < 0 || o == graph->forward_count - 1 || its <= ranges_position_of(made, o + 1));
        for (; position > its; position--) made->forward_start[position] = o + 1;
    }
    for (int o = 0; o < graph->forward_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) made->last_forward[storage[graph->op[o].input[i]]] = o;
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) made->last_forward[storage[graph->op[o].output[k]]] = o;
    }
    for (int o = graph->forward_count - 1; o >= 0; o--)
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) made->first_forward[storage[graph->op[o].output[k]]] = o;
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            if (storage[t] != t || !ranges_is_forward_activation(made, t)) continue;
            const int op = made->last_forward[t];
            if (pass == 1) made->death[made->death_start[op] + fill[op]] = t;
            fill[op]++;
        }
        for (int o = 0; o < graph->forward_count && pass == 0; o++) {
            made->death_start[o + 1] = made->death_start[o] + fill[o];
            fill[o] = 0;
        }
    }
    return HAPT_OK;
}

static int compare_operands(const void *a, const void *b)
{
    return ((const struct operand *)a)->tensor - ((const struct operand *)b)->tensor;
}

static enum hapt_status gather_backward(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    const int end = made->sharding->reduce_first;
    /* [tensor] 1 + its operand at the last operator that touched it, and at the last that a selective unit runs */
    int *previous, *selective, count = 0;
    HAPT_NEW(previous, arena, graph->tensor_count);
    HAPT_NEW(selective, arena, graph->tensor_count);
    HAPT_NEW(made->backward_start, arena, made->positions + 1);
    HAPT_NEW(made->operand_start, arena, graph->op_count + 1);
    HAPT_NEW(made->operand, arena, (end - graph->forward_count) * (HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS));
    for (int o = graph->forward_count, position = made->positions; o <= end; o++) {
        const int its = o < end ? ranges_position_of(made, o) : -1;
        HAPT_ASSERT(o == graph->forward_count || its <= ranges_position_of(made, o - 1));
        for (; position > its; position--) made->backward_start[position] = o;
    }
    for (int o = graph->forward_count; o < end; o++) {
        const struct hapt_op *op = &graph->op[o];
        const bool light = ranges_repeats(made, o) < 0 || made->sharding->light[o];
        made->operand_start[o] = count;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int version = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            const int tensor = version < 0 ? -1 : made->sharding->storage[version];
            if (tensor < 0 || !ranges_is_backward_tensor(made, tensor)) continue;
            if (previous[tensor] > made->operand_start[o]) continue; /* read and written by one operator */
            if (previous[tensor] > 0) made->operand[previous[tensor] - 1].next = o;
            if (light && selective[tensor] > 0) made->operand[selective[tensor] - 1].next_selective = o;
            made->operand[count] = (struct operand){tensor, INT_MAX, previous[tensor] == 0, INT_MAX};
            previous[tensor] = ++count;
            if (light) selective[tensor] = count;
        }
        made->operand_start[o + 1] = count;
    }
    return HAPT_OK;
}

/* Sorts by tensor, as the planner orders births. Every operand keeps its link to the next operator. */
static void sort_operands(struct hapt_memory_ranges *made)
{
    for (int o = made->graph->forward_count; o < made->sharding->reduce_first; o++)
        qsort(&made->operand[made->operand_start[o]], (size_t)(made->operand_start[o + 1] - made->operand_start[o]),
              sizeof *made->operand, compare_operands);
}

static enum hapt_status gather_scratch(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    struct hapt_program *program;
    if (!made->options.scratch) return HAPT_OK;
    HAPT_TRY(hapt_program_build(made->sharding, 0, made->positions, arena, &program));
    HAPT_NEW(made->op_scratch, arena, made->graph->op_count);
    for (int o = 0; o < made->graph->op_count; o++)
        if (!hapt_op_type_at(made->graph->op[o].type)->collective)
            made->op_scratch[o] = made->options.scratch(made->options.scratch_context, program, o);
    return HAPT_OK;
}

/* Gathers the data of activations, workspace and kernel scratch. */
static enum hapt_status gather_activations(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    HAPT_TRY(gather_units(made, arena));
    HAPT_TRY(gather_kept(made, arena));
    HAPT_TRY(gather_made(made, arena));
    HAPT_TRY(gather_boundaries(made, arena));
    HAPT_TRY(gather_leaving(made, arena));
    HAPT_TRY(gather_versions(made, arena));
    HAPT_TRY(gather_forward(made, arena));
    HAPT_TRY(gather_backward(made, arena));
    sort_operands(made);
    return gather_scratch(made, arena);
}

enum hapt_status hapt_memory_ranges_create(const struct hapt_sharding *sharding,
                                           const struct hapt_memory_options *options, struct hapt_arena *arena,
                                           struct hapt_memory_ranges **ranges)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_memory_ranges *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_memory_ranges){
        .sharding = sharding, .graph = graph, .options = *options, .positions = sharding->source->forward_count};
    HAPT_NEW(made->bytes, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        made->bytes[t] = hapt_align(hapt_tensor_bytes(&sharding->shard->tensor[t]));
    HAPT_TRY(gather_written(made, arena));
    HAPT_TRY(gather_touches(made, arena));
    HAPT_TRY(gather_sums(made, arena));
    if (!options->residents_only) HAPT_TRY(gather_activations(made, arena));
    *ranges = made;
    return HAPT_OK;
}
