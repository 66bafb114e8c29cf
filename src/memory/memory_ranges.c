/*
 * Memory of many ranges of one sharding: the figures of memory_plan.c from sums over prefixes, from lists of what crosses a cut,
 * and from a walk over the range's own steps with the same allocator. Forward operators of the source number the model's places;
 * every operator of the expanded graph stands at one, and backward operators run from the last place to the first. Tensors here
 * are places in memory: those that share one (hapt_sharding.storage) go by the lowest index.
 */
#include <limits.h>
#include <stdlib.h>

#include "gaps.h"
#include "lifetime.h"

/* Where a tensor is touched, by operators of either section. */
struct touch {
    int place;
    bool writes;
    int last_forward; /* the last forward operator there that touches it, or -1 */
};

/* What a tensor adds to a range that touches it anywhere: parameters, inputs, sums of gradients, gradients of frozen weights. */
struct amounts {
    size_t elements, trained, copies, slot, resident;
};

/* A tensor that is touched again: ranges with both places count it once. */
struct repeat {
    int before, place;
    struct amounts amounts;
};

/* A workspace tensor of a backward operator. */
struct operand {
    int tensor;
    int next; /* the next operator that touches it, or INT_MAX */
    bool born; /* nobody touched it before */
};

/* A place at which something is written into a parameter's gradient. */
struct written {
    int place, next;
};

struct hapt_memory_ranges {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph; /* expanded */
    struct hapt_memory_options options;
    int places;             /* forward operators of the source */
    int *forward_start;     /* [places + 1] the first forward operator at a place or behind */
    size_t *bytes;          /* [tensor] local, aligned */
    int *kept_from;         /* [tensor] the first place whose backward operators, or the trainer, read an activation, or INT_MAX */
    int *touch_start;       /* [tensor + 1] */
    struct touch *touch;    /* by place, each place once */
    int *cut_start;         /* [places + 1] cut c lies before place c */
    int *cut;               /* activations and their gradients that are touched on both sides, ascending */
    int *leaving_start;     /* [places + 2] */
    int *leaving;           /* by cut: tensors of the source that are made before and read, in whatever version, behind */
    int *version_start;     /* [source tensor + 1] */
    int *version;           /* of an activation: versions that may leave a range that makes them, by storage */
    struct amounts *prefix; /* [places + 1] of the places before, repeats included */
    int repeat_count;
    struct repeat *repeat;
    size_t *kept_before;    /* [places + 1] bytes of activations whose kept_from lies before */
    int *last_forward;      /* [tensor] the last forward operator that touches an activation */
    int *death_start, *death; /* [forward operators + 1] activations by last_forward */
    int *backward_start;    /* [places + 1] first backward operator whose place is below; [0]: their end */
    int *operand_start;     /* [op_count + 1] */
    struct operand *operand; /* of an operator, by tensor */
    struct written *written;
    int written_count, written_room, *first_written; /* [tensor] of its versions, or -1 */
    size_t *op_scratch;     /* [op_count], or NULL */
};

struct hapt_memory_work {
    struct hapt_gap *gap;
    size_t *offset; /* [tensor] */
    int *dead;      /* tensors that the operator at hand touches last */
    /* Of the range at hand (stamp): what leaves it, by tensor, and origins that are settled. */
    int stamp, *leaves, *settled;
    int late_count, *late, *late_op; /* activations of the workspace that are touched behind: their last operator here */
};

static bool is_forward_activation(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= 0 && of->producer < made->graph->forward_count;
}

/* Lives in the backward section alone. */
static bool is_backward_tensor(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *of = &made->graph->tensor[tensor];
    if (of->kind == HAPT_TENSOR_GRADIENT) return !hapt_lifetime_parameter_gradient(made->graph, tensor);
    return of->kind == HAPT_TENSOR_ACTIVATION && of->producer >= made->graph->forward_count;
}

static int place_of(const struct hapt_memory_ranges *made, int op)
{
    return made->graph->op[op].forward_op;
}

/* ---- what is gathered once ---- */

static int compare_touches(const void *a, const void *b)
{
    const struct touch *x = a, *y = b;
    return x->place - y->place;
}

static enum hapt_status note_written(struct hapt_memory_ranges *made, int tensor, int place, struct hapt_arena *arena)
{
    if (made->written_count == made->written_room) {
        struct written *wider;
        made->written_room = made->written_room == 0 ? 256 : 2 * made->written_room;
        HAPT_NEW(wider, arena, made->written_room);
        for (int w = 0; w < made->written_count; w++) wider[w] = made->written[w];
        made->written = wider;
    }
    made->written[made->written_count] = (struct written){place, made->first_written[tensor]};
    made->first_written[tensor] = made->written_count++;
    return HAPT_OK;
}

/* Sums of gradients belong to every range that writes into them: a tied parameter has several. */
static enum hapt_status gather_written(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    HAPT_NEW(made->first_written, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) made->first_written[t] = -1;
    for (int o = graph->forward_count; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int k = 0; k < op->output_count; k++) {
            if (op->output[k] < 0 || !hapt_lifetime_parameter_gradient(graph, op->output[k])) continue;
            if (o < made->sharding->reduce_first) {
                HAPT_TRY(note_written(made, op->output[k], op->forward_op, arena));
                continue;
            }
            for (int w = made->first_written[op->input[0]]; w >= 0; w = made->written[w].next)
                HAPT_TRY(note_written(made, op->output[k], made->written[w].place, arena));
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
        if (tensor < 0) continue;
        if (o < made->sharding->reduce_first) {
            note_touch(touching, tensor, (struct touch){op->forward_op, writes, o < made->graph->forward_count ? o : -1});
            continue;
        }
        for (int w = made->first_written[op->input[0]]; w >= 0; w = made->written[w].next)
            note_touch(touching, tensor, (struct touch){made->written[w].place, true, -1});
    }
}

/* Each place once; the lists close up. */
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
            if (last && last->place == made->touch[k].place) {
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

static enum hapt_status gather_cuts(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    int *fill;
    HAPT_NEW(made->cut_start, arena, made->places + 2);
    HAPT_NEW(fill, arena, made->places + 1);
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            const int begin = made->touch_start[t], end = made->touch_start[t + 1];
            if (begin == end || !(is_forward_activation(made, t) || is_backward_tensor(made, t))) continue;
            for (int c = made->touch[begin].place + 1; c <= made->touch[end - 1].place; c++) {
                if (pass == 1) made->cut[made->cut_start[c] + fill[c]] = t;
                fill[c]++;
            }
        }
        if (pass == 1) break;
        for (int c = 0; c <= made->places; c++) {
            made->cut_start[c + 1] = made->cut_start[c] + fill[c];
            fill[c] = 0;
        }
        HAPT_NEW(made->cut, arena, made->cut_start[made->places + 1]);
    }
    return HAPT_OK;
}

/* Activations of the source by the cuts between their maker and their last reader. */
static enum hapt_status gather_leaving(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph, *source = made->sharding->source;
    int *fill, *last;
    HAPT_NEW(made->leaving_start, arena, made->places + 2);
    HAPT_NEW(fill, arena, made->places + 1);
    HAPT_NEW(last, arena, source->tensor_count);
    for (int o = 0; o < made->sharding->reduce_first; o++)
        for (int i = 0; i < graph->op[o].input_count; i++) {
            if (graph->op[o].input[i] < 0) continue;
            int *its = &last[made->sharding->origin[graph->op[o].input[i]]];
            if (place_of(made, o) > *its) *its = place_of(made, o);
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
        for (int c = 0; c <= made->places; c++) {
            made->leaving_start[c + 1] = made->leaving_start[c] + fill[c];
            fill[c] = 0;
        }
        HAPT_NEW(made->leaving, arena, made->leaving_start[made->places + 1]);
    }
    return HAPT_OK;
}

static bool is_partial(const struct hapt_sharding *sharding, int tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (sharding->property[tensor][axis].kind == HAPT_PROPERTY_ALL_REDUCE) return true;
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
            if (!is_forward_activation(made, t) || is_partial(made->sharding, t)) continue;
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

static struct amounts amounts_of(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *local = &made->sharding->shard->tensor[tensor];
    struct amounts amounts = {0};
    if (made->sharding->storage[tensor] != tensor) return amounts;
    if (local->kind == HAPT_TENSOR_PARAMETER) {
        amounts.elements = hapt_lifetime_pad((size_t)hapt_tensor_elements(local));
        amounts.trained = hapt_lifetime_parameter_class(local) < 2 ? amounts.elements : 0;
        amounts.copies = local->dtype != HAPT_F32;
    } else if (local->kind == HAPT_TENSOR_INPUT) {
        *(local->role == HAPT_ROLE_LOSS_SCALE ? &amounts.resident : &amounts.slot) = made->bytes[tensor];
    } else if (hapt_lifetime_parameter_gradient(made->graph, tensor) && !hapt_lifetime_updates(made->graph, tensor)) {
        amounts.resident = made->bytes[tensor];
    }
    return amounts;
}

static void add(struct amounts *sum, const struct amounts *more)
{
    sum->elements += more->elements;
    sum->trained += more->trained;
    sum->copies += more->copies;
    sum->slot += more->slot;
    sum->resident += more->resident;
}

static void subtract(struct amounts *sum, const struct amounts *less)
{
    sum->elements -= less->elements;
    sum->trained -= less->trained;
    sum->copies -= less->copies;
    sum->slot -= less->slot;
    sum->resident -= less->resident;
}

static enum hapt_status gather_sums(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    HAPT_NEW(made->prefix, arena, made->places + 1);
    HAPT_NEW(made->kept_before, arena, made->places + 1);
    HAPT_NEW(made->repeat, arena, made->touch_start[graph->tensor_count]);
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct amounts amounts = amounts_of(made, t);
        const bool counts = amounts.elements + amounts.slot + amounts.resident > 0;
        if (is_forward_activation(made, t) && made->kept_from[t] < made->places)
            made->kept_before[made->kept_from[t] + 1] += made->bytes[t];
        for (int k = made->touch_start[t]; counts && k < made->touch_start[t + 1]; k++) {
            add(&made->prefix[made->touch[k].place + 1], &amounts);
            if (k > made->touch_start[t])
                made->repeat[made->repeat_count++] =
                    (struct repeat){made->touch[k - 1].place, made->touch[k].place, amounts};
        }
    }
    for (int p = 0; p < made->places; p++) {
        add(&made->prefix[p + 1], &made->prefix[p]);
        made->kept_before[p + 1] += made->kept_before[p];
    }
    return HAPT_OK;
}

/* The first place behind whose end an activation must be kept: backward operators read it, or the trainer. */
static enum hapt_status gather_kept(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    const int *storage = made->sharding->storage, loss = storage[graph->loss];
    HAPT_NEW(made->kept_from, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) made->kept_from[t] = INT_MAX;
    for (int o = graph->forward_count; o < made->sharding->reduce_first; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0 && op->forward_op < made->kept_from[storage[op->input[i]]])
                made->kept_from[storage[op->input[i]]] = op->forward_op;
    }
    const int made_at = place_of(made, graph->tensor[loss].producer);
    if (made_at < made->kept_from[loss]) made->kept_from[loss] = made_at;
    return HAPT_OK;
}

static enum hapt_status gather_forward(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    const int *storage = made->sharding->storage;
    int *fill;
    HAPT_NEW(made->forward_start, arena, made->places + 1);
    HAPT_NEW(made->last_forward, arena, graph->tensor_count);
    HAPT_NEW(made->death_start, arena, graph->forward_count + 1);
    HAPT_NEW(made->death, arena, graph->tensor_count);
    HAPT_NEW(fill, arena, graph->forward_count + 1);
    for (int o = graph->forward_count - 1, place = made->places; o >= -1; o--) {
        const int its = o >= 0 ? place_of(made, o) : -1;
        HAPT_ASSERT(o < 0 || o == graph->forward_count - 1 || its <= place_of(made, o + 1));
        for (; place > its; place--) made->forward_start[place] = o + 1;
    }
    for (int o = 0; o < graph->forward_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) made->last_forward[storage[graph->op[o].input[i]]] = o;
        for (int k = 0; k < graph->op[o].output_count; k++)
            if (graph->op[o].output[k] >= 0) made->last_forward[storage[graph->op[o].output[k]]] = o;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            if (storage[t] != t || !is_forward_activation(made, t)) continue;
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
    int *previous, count = 0; /* [tensor] its operand at the operator that touched it last, + 1 */
    HAPT_NEW(previous, arena, graph->tensor_count);
    HAPT_NEW(made->backward_start, arena, made->places + 1);
    HAPT_NEW(made->operand_start, arena, graph->op_count + 1);
    HAPT_NEW(made->operand, arena, (end - graph->forward_count) * (HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS));
    for (int o = graph->forward_count, place = made->places; o <= end; o++) {
        const int its = o < end ? place_of(made, o) : -1;
        HAPT_ASSERT(o == graph->forward_count || its <= place_of(made, o - 1));
        for (; place > its; place--) made->backward_start[place] = o;
    }
    for (int o = graph->forward_count; o < end; o++) {
        const struct hapt_op *op = &graph->op[o];
        made->operand_start[o] = count;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int version = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            const int tensor = version < 0 ? -1 : made->sharding->storage[version];
            if (tensor < 0 || !is_backward_tensor(made, tensor)) continue;
            if (previous[tensor] > made->operand_start[o]) continue; /* read and written by one operator */
            if (previous[tensor] > 0) made->operand[previous[tensor] - 1].next = o;
            made->operand[count] = (struct operand){tensor, INT_MAX, previous[tensor] == 0};
            previous[tensor] = ++count;
        }
        made->operand_start[o + 1] = count;
    }
    return HAPT_OK;
}

/* By tensor, as the planner orders births; the links to next operators are those of the operands and move with them. */
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
    HAPT_TRY(hapt_program_build(made->sharding, 0, made->places, arena, &program));
    HAPT_NEW(made->op_scratch, arena, made->graph->op_count);
    for (int o = 0; o < made->graph->op_count; o++)
        if (!hapt_op_type_at(made->graph->op[o].type)->collective)
            made->op_scratch[o] = made->options.scratch(made->options.scratch_context, program, o);
    return HAPT_OK;
}

enum hapt_status hapt_memory_ranges_create(const struct hapt_sharding *sharding, const struct hapt_memory_options *options,
                                           struct hapt_arena *arena, struct hapt_memory_ranges **ranges)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_memory_ranges *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_memory_ranges){
        .sharding = sharding, .graph = graph, .options = *options, .places = sharding->source->forward_count};
    HAPT_NEW(made->bytes, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        made->bytes[t] = hapt_lifetime_align(hapt_tensor_bytes(&sharding->shard->tensor[t]));
    HAPT_TRY(gather_kept(made, arena));
    HAPT_TRY(gather_written(made, arena));
    HAPT_TRY(gather_touches(made, arena));
    HAPT_TRY(gather_cuts(made, arena));
    HAPT_TRY(gather_leaving(made, arena));
    HAPT_TRY(gather_versions(made, arena));
    HAPT_TRY(gather_sums(made, arena));
    HAPT_TRY(gather_forward(made, arena));
    HAPT_TRY(gather_backward(made, arena));
    sort_operands(made);
    HAPT_TRY(gather_scratch(made, arena));
    *ranges = made;
    return HAPT_OK;
}

enum hapt_status hapt_memory_work_create(const struct hapt_memory_ranges *ranges, struct hapt_arena *arena,
                                         struct hapt_memory_work **work)
{
    struct hapt_memory_work *made;
    HAPT_NEW(made, arena, 1);
    HAPT_NEW(made->gap, arena, ranges->graph->tensor_count + 1);
    HAPT_NEW(made->offset, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->dead, arena, HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS);
    HAPT_NEW(made->leaves, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->settled, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->late, arena, ranges->graph->tensor_count);
    HAPT_NEW(made->late_op, arena, ranges->graph->tensor_count);
    *work = made;
    return HAPT_OK;
}

/* ---- one range ---- */

/* Is the tensor touched at a place of [first, end), or `written` there? */
static bool touched(const struct hapt_memory_ranges *ranges, int tensor, int first, int end, bool written)
{
    int low = ranges->touch_start[tensor], high = ranges->touch_start[tensor + 1];
    while (low < high) { /* the first touch at or behind `first` */
        const int middle = low + (high - low) / 2;
        if (ranges->touch[middle].place < first)
            low = middle + 1;
        else
            high = middle;
    }
    for (; low < ranges->touch_start[tensor + 1] && ranges->touch[low].place < end; low++)
        if (!written || ranges->touch[low].writes) return true;
    return false;
}

/* The place whose backward operators write a gradient first. */
static int first_writer(const struct hapt_memory_ranges *ranges, int tensor)
{
    int k = ranges->touch_start[tensor + 1] - 1;
    while (k > ranges->touch_start[tensor] && !ranges->touch[k].writes) k--;
    return ranges->touch[k].place;
}

static bool comes_in(const struct hapt_memory_ranges *ranges, int tensor, int first, int end)
{
    return is_backward_tensor(ranges, tensor) && first_writer(ranges, tensor) >= end &&
           touched(ranges, tensor, first, end, false);
}

static int made_at(const struct hapt_memory_ranges *ranges, int tensor)
{
    return place_of(ranges, ranges->graph->tensor[tensor].producer);
}

/* The version of an activation that leaves a range that ends before `end`. */
static int leaving_version(const struct hapt_memory_ranges *ranges, int origin, int end)
{
    for (int v = ranges->version_start[origin]; v < ranges->version_start[origin + 1]; v++)
        if (made_at(ranges, ranges->version[v]) < end) return ranges->sharding->storage[ranges->version[v]];
    return -1;
}

/* What leaves the range: one version of each origin. */
static void mark_leaving(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    work->stamp++;
    for (int k = ranges->leaving_start[end]; end < ranges->places && k < ranges->leaving_start[end + 1]; k++) {
        const int origin = ranges->leaving[k];
        if (ranges->sharding->source->tensor[origin].producer < first) continue;
        const int tensor = leaving_version(ranges, origin, end);
        if (tensor >= 0) work->leaves[tensor] = work->stamp;
    }
    for (int c = ranges->cut_start[first]; c < ranges->cut_start[first + 1]; c++) {
        const int tensor = ranges->cut[c], origin = ranges->sharding->origin[tensor];
        if (!is_backward_tensor(ranges, tensor) || work->settled[origin] == work->stamp) continue;
        if (!touched(ranges, tensor, first, end, true)) continue;
        work->leaves[tensor] = work->settled[origin] = work->stamp;
    }
    /* Versions in the workspace that are touched behind, too, die by their last operator here. */
    work->late_count = 0;
    for (int c = ranges->cut_start[end]; end < ranges->places && c < ranges->cut_start[end + 1]; c++) {
        const int tensor = ranges->cut[c];
        if (!is_forward_activation(ranges, tensor) || ranges->last_forward[tensor] < ranges->forward_start[end]) continue;
        if (made_at(ranges, tensor) < first || ranges->kept_from[tensor] < end || work->leaves[tensor] == work->stamp) continue;
        int last = -1;
        for (int k = ranges->touch_start[tensor]; k < ranges->touch_start[tensor + 1] && ranges->touch[k].place < end; k++)
            if (ranges->touch[k].last_forward > last) last = ranges->touch[k].last_forward;
        work->late[work->late_count] = tensor;
        work->late_op[work->late_count++] = last;
    }
}

static bool in_workspace(const struct hapt_memory_ranges *ranges, int tensor, int end, const struct hapt_memory_work *work)
{
    return is_forward_activation(ranges, tensor) && ranges->kept_from[tensor] >= end && work->leaves[tensor] != work->stamp;
}

static size_t forward_peak(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    const struct hapt_graph *graph = ranges->graph;
    const int *storage = ranges->sharding->storage;
    struct hapt_gaps gaps = {.gap = work->gap};
    for (int o = ranges->forward_start[first]; o < ranges->forward_start[end]; o++) {
        const struct hapt_op *op = &graph->op[o];
        int born[HAPT_MAX_OUTPUTS], count = 0;
        for (int k = 0; k < op->output_count; k++) {
            const int tensor = op->output[k] < 0 ? -1 : storage[op->output[k]];
            if (tensor < 0 || graph->tensor[tensor].producer != o || !in_workspace(ranges, tensor, end, work)) continue;
            int at = count++;
            for (; at > 0 && born[at - 1] > tensor; at--) born[at] = born[at - 1];
            born[at] = tensor;
        }
        for (int b = 0; b < count; b++) work->offset[born[b]] = hapt_gaps_take(&gaps, ranges->bytes[born[b]]);
        for (int d = ranges->death_start[o]; d < ranges->death_start[o + 1]; d++) {
            const int tensor = ranges->death[d];
            if (made_at(ranges, tensor) >= first && in_workspace(ranges, tensor, end, work))
                hapt_gaps_give(&gaps, work->offset[tensor], ranges->bytes[tensor]);
        }
        for (int l = 0; l < work->late_count; l++)
            if (work->late_op[l] == o) hapt_gaps_give(&gaps, work->offset[work->late[l]], ranges->bytes[work->late[l]]);
    }
    return gaps.end;
}

static size_t backward_peak(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    struct hapt_gaps gaps = {.gap = work->gap};
    const int behind = ranges->backward_start[first];
    for (int c = ranges->cut_start[end]; end < ranges->places && c < ranges->cut_start[end + 1]; c++) {
        const int tensor = ranges->cut[c];
        if (comes_in(ranges, tensor, first, end)) work->offset[tensor] = hapt_gaps_take(&gaps, ranges->bytes[tensor]);
    }
    for (int o = ranges->backward_start[end]; o < behind; o++) {
        int dead = 0;
        for (int k = ranges->operand_start[o]; k < ranges->operand_start[o + 1]; k++) {
            const struct operand *operand = &ranges->operand[k];
            if (operand->born) work->offset[operand->tensor] = hapt_gaps_take(&gaps, ranges->bytes[operand->tensor]);
            /* What is sent on to the stages before stays. */
            if (operand->next == INT_MAX || (operand->next >= behind && work->leaves[operand->tensor] != work->stamp))
                work->dead[dead++] = operand->tensor;
        }
        for (int d = 0; d < dead; d++) hapt_gaps_give(&gaps, work->offset[work->dead[d]], ranges->bytes[work->dead[d]]);
    }
    return gaps.end;
}

/* Bytes of slots, and of one set of transfer slots: what the backward part reads, and what crosses the range's ends. */
static void add_crossings(const struct hapt_memory_ranges *ranges, int first, int end, const struct hapt_memory_work *work,
                          size_t *slot, size_t *transfer)
{
    *slot = ranges->kept_before[end] - ranges->kept_before[first];
    for (int c = ranges->cut_start[first]; c < ranges->cut_start[first + 1]; c++) {
        const int tensor = ranges->cut[c];
        if (!is_forward_activation(ranges, tensor)) {
            if (work->leaves[tensor] == work->stamp) *transfer += ranges->bytes[tensor];
            continue;
        }
        /* Kept, but not made here. */
        if (ranges->kept_from[tensor] >= first && ranges->kept_from[tensor] < end) *slot -= ranges->bytes[tensor];
        if (!touched(ranges, tensor, first, end, false)) continue;
        *transfer += ranges->bytes[tensor];
        *slot += ranges->bytes[tensor];
    }
    for (int c = ranges->cut_start[end]; end < ranges->places && c < ranges->cut_start[end + 1]; c++)
        if (comes_in(ranges, ranges->cut[c], first, end)) *transfer += ranges->bytes[ranges->cut[c]];
    for (int k = ranges->leaving_start[end]; end < ranges->places && k < ranges->leaving_start[end + 1]; k++) {
        if (ranges->sharding->source->tensor[ranges->leaving[k]].producer < first) continue;
        const int tensor = leaving_version(ranges, ranges->leaving[k], end);
        if (tensor >= 0 && ranges->kept_from[tensor] >= end) *slot += ranges->bytes[tensor];
    }
}

static enum hapt_status scratch_bytes(const struct hapt_memory_ranges *ranges, int first, int end, size_t *bytes)
{
    struct hapt_arena arena;
    struct hapt_program *program;
    *bytes = 0;
    if (!ranges->op_scratch) return HAPT_OK;
    hapt_arena_init(&arena);
    const enum hapt_status status = hapt_program_build(ranges->sharding, first, end, &arena, &program);
    if (status == HAPT_OK) *bytes = ranges->options.scratch(ranges->options.scratch_context, program, -1);
    hapt_arena_release(&arena);
    for (int o = ranges->forward_start[first]; o < ranges->forward_start[end]; o++)
        if (ranges->op_scratch[o] > *bytes) *bytes = ranges->op_scratch[o];
    for (int o = ranges->backward_start[end]; o < ranges->backward_start[first]; o++)
        if (ranges->op_scratch[o] > *bytes) *bytes = ranges->op_scratch[o];
    for (int o = ranges->sharding->reduce_first; o < ranges->graph->op_count; o++)
        if (ranges->op_scratch[o] > *bytes &&
            touched(ranges, ranges->sharding->storage[ranges->graph->op[o].input[0]], first, end, true))
            *bytes = ranges->op_scratch[o];
    *bytes = hapt_lifetime_align(*bytes);
    return status;
}

enum hapt_status hapt_memory_ranges_of(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                       struct hapt_memory_work *work, struct hapt_memory_figures *figures)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= ranges->places);
    struct amounts sum = ranges->prefix[end_op];
    size_t slot, transfer = 0, scratch;
    subtract(&sum, &ranges->prefix[first_op]);
    for (int r = 0; r < ranges->repeat_count; r++)
        if (ranges->repeat[r].before >= first_op && ranges->repeat[r].place < end_op)
            subtract(&sum, &ranges->repeat[r].amounts);
    mark_leaving(ranges, first_op, end_op, work);
    add_crossings(ranges, first_op, end_op, work, &slot, &transfer);
    const size_t forward = forward_peak(ranges, first_op, end_op, work);
    const size_t backward = backward_peak(ranges, first_op, end_op, work);
    HAPT_TRY(scratch_bytes(ranges, first_op, end_op, &scratch));
    const size_t blocks = hapt_lifetime_align(sum.elements * sizeof(float)) +
                          (sum.copies ? hapt_lifetime_align(sum.elements * sizeof(uint16_t)) : 0) +
                          (1 + (size_t)ranges->options.state_count) * hapt_lifetime_align(sum.trained * sizeof(float));
    const size_t workspace = (forward > backward ? forward : backward) + scratch;
    *figures = (struct hapt_memory_figures){.parameter_bytes =
                                                blocks + sum.resident + workspace + HAPT_TRANSFER_SLOTS * transfer,
                                            .activation_bytes = slot + sum.slot,
                                            .trained_elements = sum.trained,
                                            .copies = sum.copies > 0};
    return HAPT_OK;
}
