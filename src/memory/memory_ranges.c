/*
 * Memory of many ranges of one sharding: the figures of memory_plan.c from sums over prefixes, from lists of what crosses a cut,
 * and from a walk over the range's own steps with the same allocator. Forward operators number the model's places; a
 * backward operator stands at its forward operator's place, and backward operators run from the last place to the first.
 */
#include <limits.h>
#include <stdlib.h>

#include "gaps.h"
#include "lifetime.h"

/* Where a tensor is touched, by operators of either section. */
struct touch {
    int place;
    bool writes;
};

/* What a tensor adds to a range that touches it anywhere: parameters, inputs, gradients of frozen weights. */
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

struct hapt_memory_ranges {
    const struct hapt_sharding *sharding;
    const struct hapt_graph *graph;
    struct hapt_memory_options options;
    int places;             /* forward operators */
    size_t *bytes;          /* [tensor] local, aligned */
    bool *kept;             /* [tensor] activations that the backward section or the trainer reads */
    int *touch_start;       /* [tensor + 1] */
    struct touch *touch;    /* by place, each place once */
    int *cut_start;         /* [places + 1] cut c lies before place c */
    int *cut;               /* activations and their gradients that are touched on both sides, ascending */
    struct amounts *prefix; /* [places + 1] of the places before, repeats included */
    int repeat_count;
    struct repeat *repeat;
    size_t *kept_before;    /* [places + 1] bytes of kept activations made before */
    int *last_forward;      /* [tensor] the last forward operator that touches an activation */
    int *death_start, *death; /* [places + 1] activations by last_forward, those that are not kept */
    int *backward_start;    /* [places + 1] first backward operator whose place is below; [0]: op_count */
    int *operand_start;     /* [op_count + 1] */
    struct operand *operand; /* of an operator, by tensor */
    size_t *op_scratch;     /* [op_count], or NULL */
};

struct hapt_memory_work {
    struct hapt_gap *gap;
    size_t *offset; /* [tensor] */
    int *dead;      /* tensors that the operator at hand touches last */
};

static bool is_activation(const struct hapt_graph *graph, int tensor)
{
    return graph->tensor[tensor].kind == HAPT_TENSOR_ACTIVATION;
}

static bool is_workspace_gradient(const struct hapt_graph *graph, int tensor)
{
    return graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT && !hapt_lifetime_parameter_gradient(graph, tensor);
}

/* ---- what is gathered once ---- */

static int compare_touches(const void *a, const void *b)
{
    const struct touch *x = a, *y = b;
    return x->place - y->place;
}

static enum hapt_status gather_touches(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    int total = 0, *fill;
    for (int o = 0; o < graph->op_count; o++) total += graph->op[o].input_count + graph->op[o].output_count;
    HAPT_NEW(made->touch_start, arena, graph->tensor_count + 1);
    HAPT_NEW(made->touch, arena, total);
    HAPT_NEW(fill, arena, graph->tensor_count + 1);
    for (int pass = 0; pass < 2; pass++) {
        for (int o = 0; o < graph->op_count; o++) {
            const struct hapt_op *op = &graph->op[o];
            for (int k = 0; k < op->input_count + op->output_count; k++) {
                const bool writes = k >= op->input_count;
                const int tensor = writes ? op->output[k - op->input_count] : op->input[k];
                if (tensor < 0) continue;
                if (pass == 1) made->touch[made->touch_start[tensor] + fill[tensor]] = (struct touch){op->forward_op, writes};
                fill[tensor]++;
            }
        }
        for (int t = 0; t < graph->tensor_count && pass == 0; t++) {
            made->touch_start[t + 1] = made->touch_start[t] + fill[t];
            fill[t] = 0;
        }
    }
    /* Each place once; the lists close up. */
    int kept = 0;
    for (int t = 0, begin = 0; t < graph->tensor_count; t++) {
        const int end = made->touch_start[t + 1];
        qsort(&made->touch[begin], (size_t)(end - begin), sizeof *made->touch, compare_touches);
        made->touch_start[t] = kept;
        for (int k = begin; k < end; k++) {
            if (kept > made->touch_start[t] && made->touch[kept - 1].place == made->touch[k].place)
                made->touch[kept - 1].writes = made->touch[kept - 1].writes || made->touch[k].writes;
            else
                made->touch[kept++] = made->touch[k];
        }
        begin = end;
    }
    made->touch_start[graph->tensor_count] = kept;
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
            if (begin == end || !(is_activation(graph, t) || is_workspace_gradient(graph, t))) continue;
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

static struct amounts amounts_of(const struct hapt_memory_ranges *made, int tensor)
{
    const struct hapt_tensor *local = &made->sharding->shard->tensor[tensor];
    struct amounts amounts = {0};
    if (local->kind == HAPT_TENSOR_PARAMETER) {
        amounts.elements = hapt_lifetime_pad((size_t)hapt_tensor_elements(local));
        amounts.trained = hapt_lifetime_parameter_class(local) < 2 ? amounts.elements : 0;
        amounts.copies = local->dtype != HAPT_F32;
    } else if (local->kind == HAPT_TENSOR_INPUT) {
        *(local->role == HAPT_ROLE_LOSS_SCALE ? &amounts.resident : &amounts.slot) = made->bytes[tensor];
    } else if (hapt_lifetime_parameter_gradient(made->graph, tensor) && !made->graph->tensor[local->primal].trainable) {
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
        if (is_activation(graph, t) && made->kept[t]) made->kept_before[graph->tensor[t].producer + 1] += made->bytes[t];
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

static enum hapt_status gather_forward(struct hapt_memory_ranges *made, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = made->graph;
    int *fill;
    HAPT_NEW(made->last_forward, arena, graph->tensor_count);
    HAPT_NEW(made->death_start, arena, made->places + 1);
    HAPT_NEW(made->death, arena, graph->tensor_count);
    HAPT_NEW(fill, arena, made->places + 1);
    for (int o = 0; o < graph->forward_count; o++) {
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) made->last_forward[graph->op[o].input[i]] = o;
        for (int k = 0; k < graph->op[o].output_count; k++) made->last_forward[graph->op[o].output[k]] = o;
    }
    for (int pass = 0; pass < 2; pass++) {
        for (int t = 0; t < graph->tensor_count; t++) {
            if (!is_activation(graph, t) || made->kept[t]) continue;
            const int place = made->last_forward[t];
            if (pass == 1) made->death[made->death_start[place] + fill[place]] = t;
            fill[place]++;
        }
        for (int p = 0; p < made->places && pass == 0; p++) {
            made->death_start[p + 1] = made->death_start[p] + fill[p];
            fill[p] = 0;
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
    int *previous, count = 0; /* [tensor] its operand at the operator that touched it last, + 1 */
    HAPT_NEW(previous, arena, graph->tensor_count);
    HAPT_NEW(made->backward_start, arena, made->places + 1);
    HAPT_NEW(made->operand_start, arena, graph->op_count + 1);
    HAPT_NEW(made->operand, arena, (graph->op_count - graph->forward_count) * (HAPT_MAX_INPUTS + HAPT_MAX_OUTPUTS));
    for (int o = graph->forward_count, place = made->places; o <= graph->op_count; o++) {
        const int its = o < graph->op_count ? graph->op[o].forward_op : -1;
        HAPT_ASSERT(o == graph->forward_count || its <= graph->op[o - 1].forward_op);
        for (; place > its; place--) made->backward_start[place] = o;
    }
    for (int o = graph->forward_count; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        made->operand_start[o] = count;
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            if (tensor < 0 || !is_workspace_gradient(graph, tensor)) continue;
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
    for (int o = made->graph->forward_count; o < made->graph->op_count; o++)
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
        .sharding = sharding, .graph = graph, .options = *options, .places = graph->forward_count};
    HAPT_NEW(made->bytes, arena, graph->tensor_count);
    HAPT_NEW(made->kept, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        made->bytes[t] = hapt_lifetime_align(hapt_tensor_bytes(&sharding->shard->tensor[t]));
    for (int o = graph->forward_count; o < graph->op_count; o++)
        for (int i = 0; i < graph->op[o].input_count; i++)
            if (graph->op[o].input[i] >= 0) made->kept[graph->op[o].input[i]] = true;
    made->kept[graph->loss] = true;
    HAPT_TRY(gather_touches(made, arena));
    HAPT_TRY(gather_cuts(made, arena));
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
    return is_workspace_gradient(ranges->graph, tensor) && first_writer(ranges, tensor) >= end &&
           touched(ranges, tensor, first, end, false);
}

static size_t forward_peak(const struct hapt_memory_ranges *ranges, int first, int end, struct hapt_memory_work *work)
{
    const struct hapt_graph *graph = ranges->graph;
    struct hapt_gaps gaps = {.gap = work->gap};
    for (int o = first; o < end; o++) {
        for (int k = 0; k < graph->op[o].output_count; k++) {
            const int tensor = graph->op[o].output[k];
            if (ranges->kept[tensor] || ranges->last_forward[tensor] >= end) continue;
            work->offset[tensor] = hapt_gaps_take(&gaps, ranges->bytes[tensor]);
        }
        for (int d = ranges->death_start[o]; d < ranges->death_start[o + 1]; d++) {
            const int tensor = ranges->death[d];
            if (graph->tensor[tensor].producer >= first)
                hapt_gaps_give(&gaps, work->offset[tensor], ranges->bytes[tensor]);
        }
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
            /* Sent on to the stages before when it is written here and touched there. */
            if (operand->next == INT_MAX || (operand->next >= behind && !touched(ranges, operand->tensor, first, end, true)))
                work->dead[dead++] = operand->tensor;
        }
        for (int d = 0; d < dead; d++) hapt_gaps_give(&gaps, work->offset[work->dead[d]], ranges->bytes[work->dead[d]]);
    }
    return gaps.end;
}

/* What crosses the range's ends: bytes of slots beyond the kept activations, and of one set of transfer slots. */
static void add_crossings(const struct hapt_memory_ranges *ranges, int first, int end, size_t *slot, size_t *transfer)
{
    const struct hapt_graph *graph = ranges->graph;
    for (int c = ranges->cut_start[first]; c < ranges->cut_start[first + 1]; c++) {
        const int tensor = ranges->cut[c];
        const bool activation = is_activation(graph, tensor);
        if (!touched(ranges, tensor, first, end, !activation)) continue;
        *transfer += ranges->bytes[tensor];
        if (activation) *slot += ranges->bytes[tensor];
    }
    for (int c = ranges->cut_start[end]; end < ranges->places && c < ranges->cut_start[end + 1]; c++) {
        const int tensor = ranges->cut[c];
        if (!is_activation(graph, tensor)) {
            if (comes_in(ranges, tensor, first, end)) *transfer += ranges->bytes[tensor];
        } else if (graph->tensor[tensor].producer >= first && !ranges->kept[tensor]) {
            *slot += ranges->bytes[tensor];
        }
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
    for (int o = first; o < end; o++)
        if (ranges->op_scratch[o] > *bytes) *bytes = ranges->op_scratch[o];
    for (int o = ranges->backward_start[end]; o < ranges->backward_start[first]; o++)
        if (ranges->op_scratch[o] > *bytes) *bytes = ranges->op_scratch[o];
    *bytes = hapt_lifetime_align(*bytes);
    return status;
}

enum hapt_status hapt_memory_ranges_of(const struct hapt_memory_ranges *ranges, int first_op, int end_op,
                                       struct hapt_memory_work *work, struct hapt_memory_figures *figures)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= ranges->places);
    struct amounts sum = ranges->prefix[end_op];
    size_t slot = ranges->kept_before[end_op] - ranges->kept_before[first_op], transfer = 0, scratch;
    subtract(&sum, &ranges->prefix[first_op]);
    for (int r = 0; r < ranges->repeat_count; r++)
        if (ranges->repeat[r].before >= first_op && ranges->repeat[r].place < end_op)
            subtract(&sum, &ranges->repeat[r].amounts);
    add_crossings(ranges, first_op, end_op, &slot, &transfer);
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
