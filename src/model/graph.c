#include "hapt/graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "graph_parts.h"
#include "hapt/ops.h"

enum hapt_status hapt_graph_create(struct hapt_arena *arena, struct hapt_graph **graph)
{
    struct hapt_graph *created;
    HAPT_NEW(created, arena, 1);
    created->arena = arena;
    created->loss = -1;
    *graph = created;
    return HAPT_OK;
}

/* Doubles the capacity of an array of the graph. The old array stays in the arena. */
static enum hapt_status grow(struct hapt_arena *arena, void **array, int *capacity, size_t size)
{
    const int wider = *capacity == 0 ? 64 : 2 * *capacity;
    void *copy = hapt_arena_alloc(arena, (size_t)wider, size);
    if (!copy) return HAPT_ERR_MEMORY;
    if (*capacity > 0) memcpy(copy, *array, (size_t)*capacity * size);
    *array = copy;
    *capacity = wider;
    return HAPT_OK;
}

enum hapt_status hapt_graph_append_tensor(struct hapt_graph *graph, const struct hapt_tensor *tensor, int *index)
{
    if (graph->tensor_count == graph->tensor_capacity) {
        void *array = graph->tensor;
        HAPT_TRY(grow(graph->arena, &array, &graph->tensor_capacity, sizeof *graph->tensor));
        graph->tensor = array;
    }
    *index = graph->tensor_count++;
    graph->tensor[*index] = *tensor;
    return HAPT_OK;
}

enum hapt_status hapt_graph_append_op(struct hapt_graph *graph, const struct hapt_op *op)
{
    if (graph->op_count == graph->op_capacity) {
        void *array = graph->op;
        HAPT_TRY(grow(graph->arena, &array, &graph->op_capacity, sizeof *graph->op));
        graph->op = array;
    }
    const int packed = hapt_op_type_at(op->type)->packed;
    if (packed > 0 && op->input[packed] >= 0 && op->input[packed] < graph->tensor_count)
        graph->tensor[op->input[packed]].packed = true;
    graph->op[graph->op_count++] = *op;
    return HAPT_OK;
}

void hapt_graph_set_inputs(struct hapt_op *op, const int *input, int input_count)
{
    op->input_count = hapt_op_signature(op->type)->input_count;
    HAPT_ASSERT(input_count <= op->input_count);
    for (int i = 0; i < op->input_count; i++) op->input[i] = i < input_count ? input[i] : -1;
}

enum hapt_status hapt_graph_add_tensor(struct hapt_graph *graph, const struct hapt_tensor *tensor, int *index)
{
    if (!tensor->name || tensor->name[0] == '\0') return hapt_fail(HAPT_ERR_INPUT, NULL, "a tensor has no name");
    if (hapt_graph_find_tensor(graph, tensor->name) >= 0)
        return hapt_fail(HAPT_ERR_INPUT, "names of tensors are unique", "tensor %s is defined twice", tensor->name);
    struct hapt_tensor copy = *tensor;
    copy.name = hapt_arena_strdup(graph->arena, tensor->name);
    if (!copy.name) return HAPT_ERR_MEMORY;
    copy.producer = copy.gradient = copy.primal = -1;
    return hapt_graph_append_tensor(graph, &copy, index);
}

enum hapt_status hapt_graph_add_op(struct hapt_graph *graph, const char *type, const char *name, const int *input,
                                   int input_count, const int64_t *integer, const double *real, int *output)
{
    struct hapt_op op = {.type = hapt_op_type_find(type), .forward_op = graph->op_count};
    if (op.type < 0)
        return hapt_fail(HAPT_ERR_INPUT, "use a type of the operator table", "operator %s: unknown type %s", name,
                         type);
    if (graph->op_count == HAPT_MAX_OPS)
        return hapt_fail(HAPT_ERR_INPUT, "choose fewer layers or stages", "the graph has more than %d operators",
                         HAPT_MAX_OPS);
    const struct hapt_signature *signature = hapt_op_signature(op.type);
    if (graph->op_count > graph->forward_count || input_count > signature->input_count)
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: %s", name,
                         input_count > signature->input_count ? "too many inputs"
                                                              : "the graph is differentiated already");
    for (int i = 0; i < input_count; i++) {
        if (input[i] >= -1 && input[i] < graph->tensor_count) continue;
        return hapt_fail(HAPT_ERR_INPUT, NULL, "operator %s: input %d is not a tensor (index %d)", name, i, input[i]);
    }
    op.name = hapt_arena_strdup(graph->arena, name);
    if (!op.name) return HAPT_ERR_MEMORY;
    hapt_graph_set_inputs(&op, input, input_count);
    if (integer) memcpy(op.integer, integer, sizeof op.integer);
    if (real) memcpy(op.real, real, sizeof op.real);
    struct hapt_tensor made[HAPT_MAX_OUTPUTS] = {{0}};
    HAPT_TRY(hapt_op_infer(graph, &op, made));
    op.output_count = signature->output_count;
    for (int o = 0; o < op.output_count; o++) {
        made[o].kind = HAPT_TENSOR_ACTIVATION;
        made[o].name = o == 0 ? op.name : hapt_arena_printf(graph->arena, "%s.%d", name, o);
        if (!made[o].name) return HAPT_ERR_MEMORY;
        HAPT_TRY(hapt_graph_add_tensor(graph, &made[o], &op.output[o]));
        graph->tensor[op.output[o]].producer = graph->op_count;
        if (output) output[o] = op.output[o];
    }
    HAPT_TRY(hapt_graph_append_op(graph, &op));
    graph->forward_count = graph->op_count;
    return HAPT_OK;
}

int hapt_graph_find_tensor(const struct hapt_graph *graph, const char *name)
{
    for (int t = 0; t < graph->tensor_count; t++)
        if (strcmp(graph->tensor[t].name, name) == 0) return t;
    return -1;
}

bool hapt_tensor_is_stack(const char *name, int dims)
{
    const char *mark = strstr(name, ".*.");
    return dims >= 2 && mark && !strstr(mark + 2, ".*.");
}

void hapt_tensor_published_name(const char *name, int dims, int64_t element, char *text, size_t size)
{
    const char *mark = hapt_tensor_is_stack(name, dims) ? strstr(name, ".*.") : NULL;
    if (mark)
        snprintf(text, size, "%.*s.%lld.%s", (int)(mark - name), name, (long long)element, mark + 3);
    else
        snprintf(text, size, "%s", name);
}

int hapt_tensor_published_dims(const struct hapt_tensor *parameter)
{
    return parameter->dims - hapt_tensor_is_stack(parameter->name, parameter->dims);
}

int64_t hapt_tensor_elements(const struct hapt_tensor *tensor)
{
    int64_t count = 1;
    for (int d = 0; d < tensor->dims; d++) count *= tensor->shape[d];
    return count;
}

size_t hapt_tensor_bytes(const struct hapt_tensor *tensor)
{
    return (size_t)hapt_tensor_elements(tensor) * hapt_dtype_bytes(tensor->dtype);
}
