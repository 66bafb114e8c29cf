/*
 * Shardings that recompute activations. Input: a sharding, and units of its operators. Output: the same with further
 * operators in the backward part. Before a unit's backward operators they make again, as further versions, the
 * activations of the unit that these read. So those live in the workspace instead of a slot, and all else follows:
 * lifetimes, memory, costs, kernels.
 *
 *   forward   a -> b -> c -> d        unit {b, c}: slots keep a, and c if the backward operators of d read it
 *   backward  dd b' c' dc db da       b' and c' run the operators of b and c; dc and db read what they make
 *
 * The repeated operators of a unit do not depend on other units. A full unit repeats all that it would repeat if it
 * were selective.
 */
#include "rewrite.h"

/* A light operator makes at least 1/4 of the bytes that it reads: its time should be in proportion to what it saves. */
enum { MOST_READ = 4 };

struct remaking {
    struct rewrite rewrite;
    const struct hapt_sharding *from;
    const struct hapt_unit *unit;
    int count;
    int *unit_of;  /* [source->forward_count] -1: none */
    bool *kept;    /* [from->graph->tensor_count] activations that operators outside of their unit read */
    bool *needed;  /* [from->graph->tensor_count] those that a full unit makes again */
    bool *read;    /* [from->graph->tensor_count] those that backward operators read */
    bool *wanted;  /* [from->graph->tensor_count] those that a selective unit should make again */
    bool *shared;  /* [from->graph->tensor_count] several tensors use its storage */
    bool *light;   /* [from->graph->op_count] forward operators that run again in a selective unit */
    bool *repeats; /* [from->graph->op_count] those that run again */
    bool *emitted; /* [count] */
    int *again;    /* [from->graph->tensor_count] the further version, or -1 */
    int *storage;  /* [from->graph->tensor_count] by storage: the first further version of its tensors, or -1 */
};

static int unit_at(const struct remaking *remaking, int o)
{
    return remaking->unit_of[remaking->from->graph->op[o].forward_op];
}

/* The unit that makes a tensor; -1: none. */
static int maker_of(const struct remaking *remaking, int tensor)
{
    const struct hapt_tensor *of = &remaking->from->graph->tensor[tensor];
    if (of->kind != HAPT_TENSOR_ACTIVATION || of->producer < 0) return -1;
    return of->producer < remaking->from->graph->forward_count ? unit_at(remaking, of->producer) : -1;
}

static void number_units(const struct remaking *remaking)
{
    const int positions = remaking->from->source->forward_count;
    for (int p = 0; p < positions; p++) remaking->unit_of[p] = -1;
    for (int u = 0; u < remaking->count; u++) {
        HAPT_ASSERT(remaking->unit[u].first_op < remaking->unit[u].end_op && remaking->unit[u].end_op <= positions);
        HAPT_ASSERT(u == 0 || remaking->unit[u - 1].end_op <= remaking->unit[u].first_op);
        for (int p = remaking->unit[u].first_op; p < remaking->unit[u].end_op; p++) remaking->unit_of[p] = u;
    }
}

/* Notes who reads the activations of a unit: operators outside of it, or its own backward operators. */
static void note_readers(const struct remaking *remaking)
{
    const struct hapt_graph *graph = remaking->from->graph;
    for (int o = 0; o < remaking->from->reduce_first; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int i = 0; i < op->input_count; i++) {
            const int tensor = op->input[i], maker = tensor < 0 ? -1 : maker_of(remaking, tensor);
            if (tensor >= 0 && o >= graph->forward_count) remaking->read[tensor] = true;
            if (maker < 0) continue;
            if (unit_at(remaking, o) != maker)
                remaking->kept[tensor] = true;
            else if (o >= graph->forward_count)
                remaking->needed[tensor] = true;
        }
    }
}

static bool makes_needed(const struct remaking *remaking, const struct hapt_op *op)
{
    for (int k = 0; k < op->output_count; k++)
        if (op->output[k] >= 0 && remaking->needed[op->output[k]] && !remaking->kept[op->output[k]]) return true;
    return false;
}

/* True if the tensor is at hand before the backward operators of a selective unit at no cost. */
static bool is_at_hand(const struct remaking *remaking, int tensor)
{
    const struct hapt_tensor *of = &remaking->from->graph->tensor[tensor];
    if (of->kind != HAPT_TENSOR_ACTIVATION || of->producer < 0 || remaking->read[tensor]) return true;
    return !remaking->kept[tensor] && remaking->light[of->producer];
}

/* Whether a selective unit could repeat an operator, if those before it are known. */
static bool may_be_light(const struct remaking *remaking, int o)
{
    const struct hapt_graph *graph = remaking->from->graph;
    const struct hapt_op *op = &graph->op[o];
    const struct hapt_op_type *type = hapt_op_type_at(op->type);
    const int unit = unit_at(remaking, o);
    size_t read_bytes = 0, made_bytes = 0;
    if (unit < 0 || type->heavy || type->collective || op->accumulate || remaking->from->exchange[o] >= 0) return false;
    for (int i = 0; i < op->input_count; i++) {
        const int tensor = op->input[i];
        if (tensor < 0) continue;
        /* Other units may make theirs again or not. */
        if (!is_at_hand(remaking, tensor)) return false;
        read_bytes += hapt_tensor_bytes(&graph->tensor[tensor]);
    }
    for (int k = 0; k < op->output_count; k++) {
        if (op->output[k] < 0) continue;
        if (remaking->shared[op->output[k]]) return false;
        made_bytes += hapt_tensor_bytes(&graph->tensor[op->output[k]]);
    }
    return read_bytes <= MOST_READ * made_bytes;
}

/* Chooses what selective units repeat. First all operators that could, then of those the ones that serve a backward
 * operator, directly or through others. */
static void choose_light(struct remaking *remaking)
{
    const struct hapt_graph *graph = remaking->from->graph;
    const int *storage = remaking->from->storage;
    for (int t = 0; t < graph->tensor_count; t++)
        if (storage[t] != t) remaking->shared[t] = remaking->shared[storage[t]] = true;
    for (int o = 0; o < graph->forward_count; o++) remaking->light[o] = may_be_light(remaking, o);
    for (int o = graph->forward_count - 1; o >= 0; o--) {
        const struct hapt_op *op = &graph->op[o];
        bool serves = false;
        for (int k = 0; k < op->output_count; k++)
            serves = serves || (op->output[k] >= 0 && !remaking->kept[op->output[k]] &&
                                (remaking->needed[op->output[k]] || remaking->wanted[op->output[k]]));
        remaking->light[o] = remaking->light[o] && serves;
        for (int i = 0; i < op->input_count && remaking->light[o]; i++)
            if (op->input[i] >= 0 && !remaking->read[op->input[i]]) remaking->wanted[op->input[i]] = true;
    }
}

/* Chooses the operators to repeat, the last first: what they read of their own unit is needed as well. */
static void choose(struct remaking *remaking, int *tensors, int *ops)
{
    const struct hapt_graph *graph = remaking->from->graph;
    for (int o = graph->forward_count - 1; o >= 0; o--) {
        const struct hapt_op *op = &graph->op[o];
        const int unit = unit_at(remaking, o);
        const bool selective = unit >= 0 && remaking->unit[unit].selective;
        if (unit < 0 || (selective ? !remaking->light[o] : !makes_needed(remaking, op))) continue;
        HAPT_ASSERT(op->accumulate == 0);
        HAPT_ASSERT(!remaking->light[o] || makes_needed(remaking, op));
        remaking->repeats[o] = true;
        ++*ops;
        *tensors += op->output_count;
        for (int i = 0; i < op->input_count; i++) {
            const int tensor = op->input[i];
            if (tensor >= 0 && maker_of(remaking, tensor) == unit) remaking->needed[tensor] = true;
        }
    }
}

/* The version that an operator of the unit reads in the backward part. */
static int version_for(const struct remaking *remaking, int tensor, int unit)
{
    const bool other =
        tensor >= 0 && remaking->again[tensor] >= 0 && !remaking->kept[tensor] && maker_of(remaking, tensor) == unit;
    return other ? remaking->again[tensor] : tensor;
}

static enum hapt_status repeat(struct remaking *remaking, int o, int before)
{
    const struct hapt_graph *graph = remaking->from->graph;
    struct rewrite *rewrite = &remaking->rewrite;
    const int *storage = remaking->from->storage, unit = unit_at(remaking, o);
    struct hapt_op op = graph->op[o];
    for (int i = 0; i < op.input_count; i++) op.input[i] = version_for(remaking, op.input[i], unit);
    for (int k = 0; k < op.output_count; k++) {
        const int tensor = op.output[k];
        if (tensor < 0) continue;
        HAPT_TRY(rewrite_add_tensor(
            rewrite, tensor, hapt_arena_printf(rewrite->arena, "%s.again", graph->tensor[tensor].name), &op.output[k]));
        for (int i = 0; i < op.input_count; i++) /* a sum in place changes nothing that is kept */
            HAPT_ASSERT(op.input[i] < 0 || storage[graph->op[o].input[i]] != storage[tensor] ||
                        op.input[i] != graph->op[o].input[i]);
        int *shared = &remaking->storage[storage[tensor]];
        if (*shared < 0) *shared = op.output[k];
        rewrite->made->storage[op.output[k]] = *shared;
        remaking->again[tensor] = op.output[k];
        rewrite->made->again[op.output[k]] = tensor;
    }
    op.forward_op = graph->op[before].forward_op;
    const int at = rewrite_add(rewrite, o, &op);
    rewrite->made->repeats[at] = unit;
    rewrite->made->light[at] = remaking->light[o];
    return HAPT_OK;
}

/* The sharding's own record of what runs again. */
static enum hapt_status note_units(struct remaking *remaking)
{
    struct hapt_sharding *made = remaking->rewrite.made;
    const struct hapt_graph *graph = remaking->rewrite.graph;
    struct hapt_unit *unit;
    HAPT_NEW(unit, remaking->rewrite.arena, remaking->count);
    HAPT_NEW(made->again, remaking->rewrite.arena, graph->tensor_capacity);
    HAPT_NEW(made->repeats, remaking->rewrite.arena, graph->op_capacity);
    HAPT_NEW(made->light, remaking->rewrite.arena, graph->op_capacity);
    for (int u = 0; u < remaking->count; u++) unit[u] = remaking->unit[u];
    for (int t = 0; t < graph->tensor_capacity; t++) made->again[t] = -1;
    for (int o = 0; o < graph->op_capacity; o++) made->repeats[o] = -1;
    made->unit_count = remaking->count;
    made->unit = unit;
    return HAPT_OK;
}

static enum hapt_status append(struct remaking *remaking, int o)
{
    const struct hapt_graph *graph = remaking->from->graph;
    struct hapt_op op = graph->op[o];
    const int unit = o >= graph->forward_count && o < remaking->from->reduce_first ? unit_at(remaking, o) : -1;
    if (unit >= 0 && !remaking->emitted[unit]) {
        remaking->emitted[unit] = true;
        for (int f = 0; f < graph->forward_count; f++)
            if (remaking->repeats[f] && unit_at(remaking, f) == unit) HAPT_TRY(repeat(remaking, f, o));
    }
    for (int i = 0; i < op.input_count && unit >= 0; i++) op.input[i] = version_for(remaking, op.input[i], unit);
    rewrite_copy(&remaking->rewrite, o, &op);
    return HAPT_OK;
}

static enum hapt_status remake(struct remaking *remaking, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_sharding *from = remaking->from;
    const int tensors = from->graph->tensor_count;
    int more_tensors = 0, more_ops = 0;
    HAPT_NEW(remaking->unit_of, scratch, from->source->forward_count);
    HAPT_NEW(remaking->kept, scratch, tensors);
    HAPT_NEW(remaking->needed, scratch, tensors);
    HAPT_NEW(remaking->read, scratch, tensors);
    HAPT_NEW(remaking->wanted, scratch, tensors);
    HAPT_NEW(remaking->shared, scratch, tensors);
    HAPT_NEW(remaking->light, scratch, from->graph->op_count);
    HAPT_NEW(remaking->repeats, scratch, from->graph->op_count);
    HAPT_NEW(remaking->emitted, scratch, remaking->count);
    HAPT_NEW(remaking->again, scratch, tensors);
    HAPT_NEW(remaking->storage, scratch, tensors);
    for (int t = 0; t < tensors; t++) remaking->again[t] = remaking->storage[t] = -1;
    number_units(remaking);
    note_readers(remaking);
    choose_light(remaking);
    choose(remaking, &more_tensors, &more_ops);
    HAPT_TRY(rewrite_begin(&remaking->rewrite, from, more_tensors, more_ops, arena));
    HAPT_TRY(note_units(remaking));
    for (int o = 0; o < from->graph->op_count; o++) HAPT_TRY(append(remaking, o));
    return rewrite_end(&remaking->rewrite);
}

enum hapt_status hapt_sharding_recompute(const struct hapt_sharding *sharding, const struct hapt_unit *unit, int count,
                                         struct hapt_arena *arena, struct hapt_sharding **result)
{
    struct remaking remaking = {.from = sharding, .unit = unit, .count = count};
    struct hapt_arena scratch;
    HAPT_ASSERT(!sharding->split && !sharding->again);
    hapt_arena_init(&scratch);
    const enum hapt_status status = remake(&remaking, arena, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *result = remaking.rewrite.made;
    return status;
}
