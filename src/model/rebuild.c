/*
 * Builds the graph of a model again, for another compute type or other rows of a microbatch. The operator table tells
 * for each operand whether it has the compute type ("c") or always fp32 ("f"). The forward graph is rebuilt operator by
 * operator, so shapes follow from those of the inputs, and differentiated again. Pixels are fp32 data: if an operator
 * takes them as its compute type, a cast is inserted, as in the zoo's models.
 */
#include "rebuild.h"

#include <string.h>

#include "graph_parts.h"
#include "hapt/ops.h"
#include "ops_rows.h"

struct rebuilding {
    const struct hapt_graph *from;
    struct hapt_graph *to;
    struct hapt_arena *arena; /* of `to` */
    enum hapt_dtype dtype;
    int rows_from, rows_to;
    int *index_in_to; /* [tensors of from] index in `to`; -1: not there yet */
    int *cast_of;     /* [tensors of from] index of its cast (data only); -1: none */
    bool *computes;   /* [tensors of from] an operator takes it in its compute type */
    int next;         /* operators before this one are done */
};

static char code_of(const struct hapt_op *op, int input)
{
    return hapt_op_type_at(op->type)->dtypes[input];
}

static bool is_forward(const struct hapt_tensor *tensor)
{
    return tensor->kind != HAPT_TENSOR_GRADIENT && tensor->role != HAPT_ROLE_LOSS_SCALE;
}

static enum hapt_status begin(struct rebuilding *work)
{
    const struct hapt_graph *from = work->from;
    struct hapt_arena *arena = work->arena;
    HAPT_TRY(hapt_graph_create(arena, &work->to));
    HAPT_NEW(work->index_in_to, arena, from->tensor_count);
    HAPT_NEW(work->cast_of, arena, from->tensor_count);
    HAPT_NEW(work->computes, arena, from->tensor_count);
    for (int t = 0; t < from->tensor_count; t++) work->index_in_to[t] = work->cast_of[t] = -1;
    for (int o = 0; o < from->forward_count; o++)
        for (int i = 0; i < from->op[o].input_count; i++)
            if (from->op[o].input[i] >= 0 && code_of(&from->op[o], i) == 'c')
                work->computes[from->op[o].input[i]] = true;
    return HAPT_OK;
}

/* Copies a tensor. Parameters get the type that their operators need; data keep theirs, and get the new rows. */
static enum hapt_status copy_tensor(struct rebuilding *work, int t)
{
    struct hapt_tensor tensor = work->from->tensor[t];
    if (work->index_in_to[t] >= 0) return HAPT_OK;
    if (tensor.kind == HAPT_TENSOR_INPUT && !hapt_role_is_scalar(tensor.role))
        tensor.shape[0] = tensor.shape[0] / work->rows_from * work->rows_to;
    if (tensor.kind == HAPT_TENSOR_PARAMETER && work->computes[t]) tensor.dtype = work->dtype;
    tensor.producer = tensor.gradient = tensor.primal = -1;
    return hapt_graph_append_tensor(work->to, &tensor, &work->index_in_to[t]);
}

/* Appends an operator and its outputs. The outputs keep their names; their types follow from the inputs. */
static enum hapt_status append(struct rebuilding *work, struct hapt_op *op, const char *const *name, int *output)
{
    struct hapt_graph *to = work->to;
    struct hapt_tensor made[HAPT_MAX_OUTPUTS] = {{0}};
    op->forward_op = to->op_count;
    HAPT_TRY(hapt_op_infer(to, op, made));
    for (int o = 0; o < op->output_count; o++) {
        made[o].kind = HAPT_TENSOR_ACTIVATION;
        made[o].name = name[o];
        made[o].producer = to->op_count;
        made[o].gradient = made[o].primal = -1;
        HAPT_TRY(hapt_graph_append_tensor(to, &made[o], &op->output[o]));
        output[o] = op->output[o];
    }
    HAPT_TRY(hapt_graph_append_op(to, op));
    to->forward_count = to->op_count;
    return HAPT_OK;
}

static bool is_wide_data(const struct rebuilding *work, int t)
{
    const struct hapt_tensor *tensor = &work->from->tensor[t];
    return tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_F32 && work->dtype != HAPT_F32;
}

static int cast_code(enum hapt_dtype dtype)
{
    return dtype == HAPT_F32 ? 0 : dtype == HAPT_BF16 ? 1 : 2;
}

static enum hapt_status cast(struct rebuilding *work, int data)
{
    struct hapt_op op = {
        .type = hapt_op_type_find("cast"), .name = "pixels", .output_count = 1, .integer = {cast_code(work->dtype)}};
    if (hapt_graph_find_tensor(work->from, op.name) >= 0)
        op.name = hapt_arena_printf(work->arena, "%s.cast", work->from->tensor[data].name);
    if (!op.name) return HAPT_ERR_MEMORY;
    hapt_graph_set_inputs(&op, &work->index_in_to[data], 1);
    return append(work, &op, &op.name, &work->cast_of[data]);
}

/* Attributes that count the values of a whole microbatch: those of a statistic. */
static enum hapt_status scale_attributes(const struct rebuilding *work, struct hapt_op *op)
{
    if (!hapt_op_type_at(op->type)->counts_batch) return HAPT_OK;
    if (op->integer[0] % work->rows_from != 0)
        return hapt_op_bad_attribute(op, "it counts no whole number of values in a row");
    op->integer[0] = op->integer[0] / work->rows_from * work->rows_to;
    return HAPT_OK;
}

static enum hapt_status copy_op(struct rebuilding *work, int index)
{
    const struct hapt_op *was = &work->from->op[index];
    struct hapt_op op = *was;
    const char *name[HAPT_MAX_OUTPUTS];
    int output[HAPT_MAX_OUTPUTS];
    const bool casts = op.type == hapt_op_type_find("cast");
    for (int i = 0; i < op.input_count; i++) {
        const int t = was->input[i];
        if (t < 0) continue;
        HAPT_TRY(copy_tensor(work, t));
        const bool needs_cast = is_wide_data(work, t) && code_of(was, i) == 'c';
        if (needs_cast && work->cast_of[t] < 0) HAPT_TRY(cast(work, t));
        op.input[i] = needs_cast ? work->cast_of[t] : work->index_in_to[t];
    }
    if (casts && work->dtype == HAPT_F32) { /* fp32 needs no cast */
        work->index_in_to[was->output[0]] = op.input[0];
        return HAPT_OK;
    }
    if (casts) op.integer[0] = cast_code(work->dtype);
    HAPT_TRY(scale_attributes(work, &op));
    for (int o = 0; o < op.output_count; o++) name[o] = work->from->tensor[was->output[o]].name;
    HAPT_TRY(append(work, &op, name, output));
    for (int o = 0; o < op.output_count; o++) work->index_in_to[was->output[o]] = output[o];
    return HAPT_OK;
}

/* Adds the casts after the inputs, which come first. */
static enum hapt_status cast_data(struct rebuilding *work)
{
    for (int t = 0; t < work->from->tensor_count; t++)
        if (work->index_in_to[t] >= 0 && work->computes[t] && is_wide_data(work, t)) HAPT_TRY(cast(work, t));
    return HAPT_OK;
}

/* Keeps the tensor order, with parameters among the activations. */
static enum hapt_status rebuild(struct rebuilding *work)
{
    const struct hapt_graph *from = work->from;
    bool inputs = true;
    HAPT_TRY(begin(work));
    for (int t = 0; t < from->tensor_count; t++) {
        if (!is_forward(&from->tensor[t])) continue;
        if (inputs && from->tensor[t].kind != HAPT_TENSOR_INPUT) {
            inputs = false;
            HAPT_TRY(cast_data(work));
        }
        if (from->tensor[t].kind != HAPT_TENSOR_ACTIVATION)
            HAPT_TRY(copy_tensor(work, t));
        else
            while (work->next <= from->tensor[t].producer)
                HAPT_TRY(copy_op(work, work->next++)); /* operators are in topological order */
    }
    while (work->next < from->forward_count) HAPT_TRY(copy_op(work, work->next++));
    work->to->loss = work->index_in_to[from->loss];
    HAPT_TRY(hapt_graph_check(work->to));
    return hapt_graph_differentiate(work->to);
}

enum hapt_status hapt_graph_rebuild(const struct hapt_graph *from, const struct hapt_graph_change *change,
                                    struct hapt_arena *arena, struct hapt_graph **to)
{
    struct rebuilding work = {.from = from,
                              .arena = arena,
                              .dtype = change->dtype,
                              .rows_from = change->rows_from,
                              .rows_to = change->rows_to};
    HAPT_TRY(rebuild(&work));
    *to = work.to;
    return HAPT_OK;
}
