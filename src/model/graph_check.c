/* Checks every invariant of a graph. Graphs come from files, so only the name pointers are assumed to be valid. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "graph_parts.h"
#include "hapt/graph.h"
#include "hapt/ops.h"

/* True for the name of a field, which is also that of its dataset. */
static bool is_plain_name(const char *name)
{
    size_t length = 0;
    while ((name[length] >= 'a' && name[length] <= 'z') || (name[length] >= 'A' && name[length] <= 'Z') ||
           (name[length] >= '0' && name[length] <= '9') || name[length] == '_')
        length++;
    return name[length] == '\0' && length > 0 && length < HAPT_FIELD_CHARS;
}

static enum hapt_status check_role(const struct hapt_tensor *tensor)
{
    const char *hint =
        "inputs are tokens, targets and positions ([rows][T] int32), images ([rows][C][H][W] fp32), "
        "labels ([rows] or [rows][n] int32), fields ([rows][...] int32 or fp32, with a name of letters, digits and _), "
        "loss_scale and training ([1] fp32) and row_keys ([rows][2] int32)";
    bool fits = false;
    switch (tensor->role) {
    case HAPT_ROLE_NONE: fits = tensor->kind != HAPT_TENSOR_INPUT; break;
    case HAPT_ROLE_TOKENS:
    case HAPT_ROLE_POSITIONS:
    case HAPT_ROLE_TARGETS:
        fits = tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_I32 && tensor->dims == 2;
        break;
    case HAPT_ROLE_IMAGES:
        fits = tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_F32 && tensor->dims == 4;
        break;
    case HAPT_ROLE_LABELS:
        fits =
            tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_I32 && (tensor->dims == 1 || tensor->dims == 2);
        break;
    case HAPT_ROLE_ROW_KEYS:
        fits = tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_I32 && tensor->dims == 2 &&
               tensor->shape[1] == 2;
        break;
    case HAPT_ROLE_FIELD:
        fits = tensor->kind == HAPT_TENSOR_INPUT && (tensor->dtype == HAPT_I32 || tensor->dtype == HAPT_F32) &&
               is_plain_name(tensor->name);
        break;
    case HAPT_ROLE_TRAINING:
    case HAPT_ROLE_LOSS_SCALE:
        fits = tensor->kind == HAPT_TENSOR_INPUT && tensor->dtype == HAPT_F32 && hapt_tensor_elements(tensor) == 1;
        break;
    }
    if (fits) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, hint, "tensor %s: its role does not fit its kind, type or shape", tensor->name);
}

static enum hapt_status check_tensor(const struct hapt_tensor *tensor)
{
    if (tensor->name[0] == '\0') return hapt_fail(HAPT_ERR_INPUT, NULL, "a tensor has no name");
    if ((int)tensor->kind < 0 || tensor->kind > HAPT_TENSOR_GRADIENT || (int)tensor->dtype < 0 ||
        tensor->dtype >= HAPT_DTYPE_COUNT)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "tensor %s: unknown kind or element type", tensor->name);
    if (tensor->dims < 1 || tensor->dims > HAPT_MAX_DIMS)
        return hapt_fail(HAPT_ERR_INPUT, "a tensor has 1 to 5 dimensions", "tensor %s has %d dimensions", tensor->name,
                         tensor->dims);
    int64_t elements = 1;
    for (int d = 0; d < tensor->dims; d++) {
        if (tensor->shape[d] < 1 || tensor->shape[d] > HAPT_MAX_ELEMENTS / elements)
            return hapt_fail(HAPT_ERR_INPUT, "sizes are at least 1 and a tensor has at most 2^46 elements",
                             "tensor %s: impossible size %lld of dimension %d", tensor->name,
                             (long long)tensor->shape[d], d);
        elements *= tensor->shape[d];
    }
    if (tensor->kind == HAPT_TENSOR_PARAMETER) {
        const bool real = tensor->dtype == HAPT_F32 || tensor->dtype == HAPT_BF16 || tensor->dtype == HAPT_F16;
        if (!real || !isfinite(tensor->init_std) || tensor->init_std < 0 || (int)tensor->init < 0 ||
            tensor->init > HAPT_INIT_NORMAL)
            return hapt_fail(HAPT_ERR_INPUT, "parameters are fp32, bf16 or fp16, initialised by zero, one or normal",
                             "parameter %s: bad element type or initial values", tensor->name);
    }
    return check_role(tensor);
}

static int compare_names(const void *left, const void *right)
{
    return strcmp(*(const char *const *)left, *(const char *const *)right);
}

static enum hapt_status check_names(const struct hapt_graph *graph)
{
    const char **name = malloc((size_t)graph->tensor_count * sizeof *name);
    if (!name) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to check %d tensors", graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) name[t] = graph->tensor[t].name;
    qsort(name, (size_t)graph->tensor_count, sizeof *name, compare_names);
    enum hapt_status status = HAPT_OK;
    for (int t = 1; t < graph->tensor_count && status == HAPT_OK; t++) {
        if (strcmp(name[t - 1], name[t]) != 0) continue;
        status = hapt_fail(HAPT_ERR_INPUT, "names of tensors are unique", "tensor %s is defined twice", name[t]);
    }
    free(name);
    return status;
}

static enum hapt_status check_indices(const struct hapt_graph *graph, const struct hapt_op *op, bool forward)
{
    if (op->type < 0 || op->type >= hapt_op_type_count())
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: unknown type %d", op->name, op->type);
    const struct hapt_signature *signature = hapt_op_signature(op->type);
    if (forward && !hapt_op_type_at(op->type)->backward && !hapt_op_type_at(op->type)->gradient &&
        !hapt_op_type_at(op->type)->collective)
        return hapt_fail(HAPT_ERR_INPUT, "write only the forward part: hapt derives the backward part",
                         "operator %s: %s has no gradient", op->name, hapt_op_type_at(op->type)->name);
    if (op->input_count != signature->input_count || op->output_count < 1 ||
        op->output_count > signature->output_count || (forward && op->output_count != signature->output_count))
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: wrong number of inputs or outputs for %s", op->name,
                         hapt_op_type_at(op->type)->name);
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] >= (signature->input[i].optional ? -1 : 0) && op->input[i] < graph->tensor_count) continue;
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: input %d is not a tensor (index %d)", op->name, i,
                         op->input[i]);
    }
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] >= 0 && op->output[o] < graph->tensor_count) continue;
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: output %d is not a tensor (index %d)", op->name, o,
                         op->output[o]);
    }
    for (int a = 0; a < HAPT_MAX_ATTRIBUTES; a++) {
        if (!isfinite(op->real[a]))
            return hapt_fail(HAPT_ERR_INPUT, "attributes are finite numbers", "operator %s: bad attribute %d", op->name,
                             a);
    }
    return HAPT_OK;
}

/* Do the forward operators contain a cycle? Repeatedly removes operators whose inputs are all produced. */
static bool has_cycle(const struct hapt_graph *graph)
{
    bool *made = calloc((size_t)graph->tensor_count, 1);
    bool *done = calloc((size_t)graph->forward_count, 1);
    int left = graph->forward_count;
    for (bool progress = made && done; progress && left > 0;) {
        progress = false;
        for (int op = 0; op < graph->forward_count; op++) {
            bool ready = !done[op];
            for (int i = 0; ready && i < graph->op[op].input_count; i++) {
                const int t = graph->op[op].input[i];
                ready = t < 0 || graph->tensor[t].kind != HAPT_TENSOR_ACTIVATION || made[t];
            }
            if (!ready) continue;
            for (int o = 0; o < graph->op[op].output_count; o++) made[graph->op[op].output[o]] = true;
            done[op] = progress = true;
            left--;
        }
    }
    free(made);
    free(done);
    return left > 0;
}

/* Checks that each activation has one producer, and that `producer` names it. */
static enum hapt_status check_producers(const struct hapt_graph *graph)
{
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        for (int o = 0; o < op->output_count; o++) {
            const struct hapt_tensor *tensor = &graph->tensor[op->output[o]];
            bool twice = false;
            for (int p = 0; p < o; p++) twice = twice || op->output[p] == op->output[o];
            if (tensor->kind == HAPT_TENSOR_ACTIVATION && tensor->producer == index && !twice) continue;
            return hapt_fail(HAPT_ERR_INPUT, "an activation has one producer, inputs and parameters have none",
                             "operator %s writes tensor %s, which %s", op->name, tensor->name,
                             tensor->kind == HAPT_TENSOR_ACTIVATION ? "has another producer" : "is not an activation");
        }
    }
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        const bool made = tensor->kind == HAPT_TENSOR_ACTIVATION || tensor->kind == HAPT_TENSOR_GRADIENT;
        const int count = tensor->kind == HAPT_TENSOR_GRADIENT ? graph->op_count : graph->forward_count;
        bool found = !made && tensor->producer == -1;
        if (made && tensor->producer >= 0 && tensor->producer < count) {
            const struct hapt_op *op = &graph->op[tensor->producer];
            for (int o = 0; o < op->output_count; o++) found = found || op->output[o] == t;
        }
        if (!found)
            return hapt_fail(HAPT_ERR_INPUT, "each activation and gradient is the output of one operator",
                             "tensor %s has no producer", tensor->name);
    }
    return HAPT_OK;
}

static enum hapt_status check_order(const struct hapt_graph *graph)
{
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] < 0) continue;
            const struct hapt_tensor *tensor = &graph->tensor[op->input[i]];
            if (tensor->kind == HAPT_TENSOR_GRADIENT)
                return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s reads gradient %s", op->name, tensor->name);
            if (tensor->producer < index) continue;
            return hapt_fail(HAPT_ERR_INPUT,
                             has_cycle(graph) ? "break the cycle: operators depend on each other"
                                              : "list each operator after the operators that make its inputs",
                             "operator %s reads tensor %s before it is made: the graph has %s", op->name, tensor->name,
                             has_cycle(graph) ? "a cycle" : "no topological order");
        }
    }
    return HAPT_OK;
}

static enum hapt_status check_forward_shapes(const struct hapt_graph *graph)
{
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        struct hapt_tensor expected[HAPT_MAX_OUTPUTS] = {{0}};
        HAPT_TRY(hapt_op_infer(graph, op, expected));
        for (int o = 0; o < op->output_count; o++) {
            const struct hapt_tensor *tensor = &graph->tensor[op->output[o]];
            bool equal = tensor->dims == expected[o].dims && tensor->dtype == expected[o].dtype;
            for (int d = 0; equal && d < tensor->dims; d++) equal = tensor->shape[d] == expected[o].shape[d];
            if (equal) continue;
            return hapt_fail(HAPT_ERR_INPUT, "shapes and types follow from the operator table",
                             "operator %s (%s): its output %s has an impossible shape or type", op->name,
                             hapt_op_type_at(op->type)->name, tensor->name);
        }
    }
    return HAPT_OK;
}

/* Checks that each input, each parameter, and the first output of each operator except the loss has a reader. */
static enum hapt_status check_readers(const struct hapt_graph *graph)
{
    bool *read = calloc((size_t)graph->tensor_count, 1);
    if (!read) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to check %d tensors", graph->tensor_count);
    for (int op = 0; op < graph->op_count; op++) {
        for (int i = 0; i < graph->op[op].input_count; i++)
            if (graph->op[op].input[i] >= 0) read[graph->op[op].input[i]] = true;
    }
    const bool loss_read = read[graph->loss] && graph->op_count == graph->forward_count;
    read[graph->loss] = true;
    enum hapt_status status = HAPT_OK;
    if (loss_read) status = hapt_fail(HAPT_ERR_INPUT, NULL, "an operator reads the loss");
    for (int t = 0; t < graph->tensor_count && status == HAPT_OK; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        bool needed = tensor->kind == HAPT_TENSOR_PARAMETER ||
                      (tensor->kind == HAPT_TENSOR_INPUT && tensor->role != HAPT_ROLE_LOSS_SCALE);
        if (tensor->kind == HAPT_TENSOR_ACTIVATION) needed = graph->op[tensor->producer].output[0] == t;
        if (!needed || read[t]) continue;
        status = hapt_fail(HAPT_ERR_INPUT, "remove the tensor, or let an operator read it",
                           "tensor %s is read by no operator", tensor->name);
    }
    free(read);
    return status;
}

/* Checks the backward part: reverse order; first writers overwrite, later ones add; no read before the first write. */
static enum hapt_status check_backward(const struct hapt_graph *graph)
{
    int last_forward_op = graph->forward_count - 1;
    for (int index = graph->forward_count; index < graph->op_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        if (op->forward_op > last_forward_op || op->forward_op < 0)
            return hapt_fail(HAPT_ERR_INPUT, NULL, "backward operator %s is out of order", op->name);
        last_forward_op = op->forward_op;
        for (int i = 0; i < op->input_count; i++) {
            if (op->input[i] < 0 || graph->tensor[op->input[i]].producer < index) continue;
            return hapt_fail(HAPT_ERR_INPUT, NULL, "backward operator %s reads %s before it is made", op->name,
                             graph->tensor[op->input[i]].name);
        }
        for (int o = 0; o < op->output_count; o++) {
            const struct hapt_tensor *tensor = &graph->tensor[op->output[o]];
            const bool adds = op->accumulate >> o & 1u;
            bool fits = tensor->kind == HAPT_TENSOR_GRADIENT && tensor->primal >= 0 && tensor->producer <= index;
            if (fits) {
                const bool parameter = graph->tensor[tensor->primal].kind == HAPT_TENSOR_PARAMETER;
                fits = adds == (parameter || tensor->producer != index);
            }
            if (fits) continue;
            return hapt_fail(HAPT_ERR_INPUT, NULL,
                             "backward operator %s: output %s has a wrong kind, position or accumulate bit", op->name,
                             tensor->name);
        }
    }
    return HAPT_OK;
}

static enum hapt_status check_counts(const struct hapt_graph *graph)
{
    if (graph->tensor_count < 1 || graph->forward_count < 1 || graph->tensor_count > HAPT_MAX_TENSORS ||
        graph->forward_count > HAPT_MAX_OPS)
        return hapt_fail(HAPT_ERR_INPUT, "a graph has 1 to 16384 operators and up to 65536 tensors",
                         "the graph has %d operators and %d tensors", graph->forward_count, graph->tensor_count);
    return HAPT_OK;
}

enum hapt_status hapt_graph_infer(struct hapt_graph *graph)
{
    HAPT_TRY(check_counts(graph));
    for (int index = 0; index < graph->forward_count; index++) {
        const struct hapt_op *op = &graph->op[index];
        struct hapt_tensor inferred[HAPT_MAX_OUTPUTS] = {{0}};
        bool any = false;
        HAPT_TRY(check_indices(graph, op, true));
        for (int o = 0; o < op->output_count; o++) any = any || graph->tensor[op->output[o]].dims == 0;
        if (!any) continue;
        for (int i = 0; i < op->input_count; i++) {
            const struct hapt_tensor *tensor = op->input[i] < 0 ? NULL : &graph->tensor[op->input[i]];
            if (!tensor) continue;
            if (tensor->kind == HAPT_TENSOR_ACTIVATION && tensor->dims == 0)
                return hapt_fail(HAPT_ERR_INPUT, "list each operator after the operators that make its inputs",
                                 "operator %s reads tensor %s before it is made", op->name, tensor->name);
            HAPT_TRY(check_tensor(tensor));
        }
        HAPT_TRY(hapt_op_infer(graph, op, inferred));
        for (int o = 0; o < op->output_count; o++) {
            struct hapt_tensor *tensor = &graph->tensor[op->output[o]];
            if (tensor->dims > 0 || tensor->kind != HAPT_TENSOR_ACTIVATION) continue; /* hapt_graph_check reports it */
            tensor->dims = inferred[o].dims;
            tensor->dtype = inferred[o].dtype;
            memcpy(tensor->shape, inferred[o].shape, sizeof tensor->shape);
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_graph_check(const struct hapt_graph *graph)
{
    HAPT_TRY(check_counts(graph));
    for (int t = 0; t < graph->tensor_count; t++) HAPT_TRY(check_tensor(&graph->tensor[t]));
    HAPT_TRY(check_names(graph));
    for (int op = 0; op < graph->op_count; op++)
        HAPT_TRY(check_indices(graph, &graph->op[op], op < graph->forward_count));
    HAPT_TRY(check_producers(graph));
    HAPT_TRY(check_order(graph));
    HAPT_TRY(check_forward_shapes(graph));
    if (graph->loss < 0 || graph->loss >= graph->tensor_count)
        return hapt_fail(HAPT_ERR_INPUT, "name the tensor that is the loss", "the graph has no loss");
    const struct hapt_tensor *loss = &graph->tensor[graph->loss];
    if (loss->kind != HAPT_TENSOR_ACTIVATION || loss->dtype != HAPT_F32 || hapt_tensor_elements(loss) != 1 ||
        graph->op[loss->producer].output[0] != graph->loss)
        return hapt_fail(HAPT_ERR_INPUT, "the loss is one fp32 number, the first output of an operator",
                         "tensor %s cannot be the loss", loss->name);
    HAPT_TRY(check_readers(graph));
    return check_backward(graph);
}
