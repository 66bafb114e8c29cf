/*
 * Batch-sharded programs: properties flow from the inputs through the whole graph by the operators' rules; a program is
 * the part of one range.
 */
#include <string.h>

#include "rules.h"

struct flow {
    const struct hapt_graph *graph;
    int size[HAPT_MESH_AXES];
    struct hapt_property (*property)[HAPT_MESH_AXES]; /* [graph->tensor_count] */
    bool *written;                                    /* [graph->tensor_count] */
};

static bool same_property(struct hapt_property a, struct hapt_property b)
{
    return a.kind == b.kind && (a.kind != HAPT_PROPERTY_ALL_GATHER || a.dim == b.dim);
}

/* The loss scale is one number for all; every other input has a row per sample. */
static struct hapt_property input_property(const struct hapt_tensor *tensor, int size)
{
    if (tensor->kind != HAPT_TENSOR_INPUT || tensor->role == HAPT_ROLE_LOSS_SCALE || size == 1)
        return (struct hapt_property){.kind = HAPT_PROPERTY_IDENTITY};
    return (struct hapt_property){HAPT_PROPERTY_ALL_GATHER, 0};
}

static enum hapt_status flow_through(struct flow *flow, const struct hapt_op *op, int axis)
{
    struct hapt_property input[HAPT_MAX_INPUTS] = {{0}}, output[HAPT_MAX_OUTPUTS] = {{0}};
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0) input[i] = flow->property[op->input[i]][axis];
    HAPT_TRY(hapt_rule_derive(op, input, output));
    for (int o = 0; o < op->output_count; o++) {
        const int tensor = op->output[o];
        if (tensor < 0) continue;
        struct hapt_property *known = &flow->property[tensor][axis];
        if (flow->written[tensor] && !same_property(*known, output[o]))
            return hapt_fail(HAPT_ERR_INFEASIBLE, "use a submesh of one device for this stage",
                             "operator %s adds to %s, which is laid out otherwise", op->name,
                             flow->graph->tensor[tensor].name);
        *known = output[o];
    }
    return HAPT_OK;
}

/* Properties of every tensor of the graph. */
static enum hapt_status flow_properties(struct flow *flow)
{
    const struct hapt_graph *graph = flow->graph;
    for (int t = 0; t < graph->tensor_count; t++)
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            flow->property[t][axis] = input_property(&graph->tensor[t], flow->size[axis]);
    if (flow->size[0] * flow->size[1] == 1) return HAPT_OK;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (flow->size[axis] > 1) HAPT_TRY(flow_through(flow, op, axis));
        for (int k = 0; k < op->output_count; k++)
            if (op->output[k] >= 0) flow->written[op->output[k]] = true;
    }
    return HAPT_OK;
}

static bool in_range(const struct hapt_op *op, int first_op, int end_op)
{
    return op->forward_op >= first_op && op->forward_op < end_op;
}

static bool is_parameter_gradient(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *gradient = &graph->tensor[tensor];
    return gradient->kind == HAPT_TENSOR_GRADIENT && gradient->primal >= 0 &&
           graph->tensor[gradient->primal].kind == HAPT_TENSOR_PARAMETER;
}

/* Where a tensor is touched, seen from the range. */
enum { READ_HERE = 1, WRITTEN_HERE = 2, READ_BEHIND = 4, WRITTEN_BEHIND = 8, TOUCHED_BEFORE = 16, FIRST_BEHIND = 32 };

static void mark_uses(const struct hapt_program *program, unsigned *use)
{
    const struct hapt_graph *graph = program->graph;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        const bool before = op->forward_op < program->first_op, behind = op->forward_op >= program->end_op;
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0) use[op->input[i]] |= before ? TOUCHED_BEFORE : behind ? READ_BEHIND : READ_HERE;
        for (int k = 0; k < op->output_count; k++) {
            if (op->output[k] < 0) continue;
            unsigned *mine = &use[op->output[k]];
            const bool first = !(*mine & (TOUCHED_BEFORE | WRITTEN_BEHIND | WRITTEN_HERE));
            *mine |= before ? TOUCHED_BEFORE : behind ? WRITTEN_BEHIND : WRITTEN_HERE;
            if (first && behind) *mine |= FIRST_BEHIND;
        }
    }
}

static bool belongs(const struct hapt_graph *graph, int tensor, unsigned use, struct hapt_program *program,
                    const struct hapt_boundary *boundary)
{
    const bool activation = graph->tensor[tensor].kind == HAPT_TENSOR_ACTIVATION;
    const bool gradient = graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT && !is_parameter_gradient(graph, tensor);
    if (boundary == &program->forward_in) return activation && (use & READ_HERE) && !(use & WRITTEN_HERE);
    if (boundary == &program->forward_out) return activation && (use & WRITTEN_HERE) && (use & READ_BEHIND);
    if (boundary == &program->backward_in)
        return gradient && (use & (READ_HERE | WRITTEN_HERE)) && (use & FIRST_BEHIND);
    return gradient && (use & WRITTEN_HERE) && (use & TOUCHED_BEFORE);
}

static enum hapt_status fill_boundary(struct hapt_program *program, const unsigned *use, struct hapt_boundary *boundary,
                                      struct hapt_arena *arena)
{
    const struct hapt_graph *graph = program->graph;
    for (int t = 0; t < graph->tensor_count; t++)
        if (belongs(graph, t, use[t], program, boundary)) boundary->count++;
    HAPT_NEW(boundary->tensor, arena, boundary->count);
    for (int t = 0, k = 0; t < graph->tensor_count; t++)
        if (belongs(graph, t, use[t], program, boundary)) boundary->tensor[k++] = t;
    return HAPT_OK;
}

/* The program's own tensors: whatever its operators touch, ascending, with local shapes. */
static enum hapt_status fill_tensors(struct hapt_program *program, const struct flow *flow, const unsigned *use,
                                     struct hapt_arena *arena)
{
    const struct hapt_graph *graph = program->graph;
    HAPT_NEW(program->local, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        program->local[t] = use[t] & (READ_HERE | WRITTEN_HERE) ? program->tensor_count++ : -1;
    HAPT_NEW(program->tensor, arena, program->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (program->local[t] < 0) continue;
        struct hapt_program_tensor *mine = &program->tensor[program->local[t]];
        const struct hapt_tensor *tensor = &graph->tensor[t];
        mine->tensor = t;
        memcpy(mine->shape, tensor->shape, sizeof mine->shape);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            mine->property[axis] = flow->property[t][axis];
            if (mine->property[axis].kind != HAPT_PROPERTY_ALL_GATHER) continue;
            int64_t *extent = &mine->shape[mine->property[axis].dim];
            if (*extent % flow->size[axis] != 0)
                return hapt_fail(HAPT_ERR_INFEASIBLE, "choose a microbatch that the number of devices divides",
                                 "%d x %d devices cannot share the %lld rows of %s evenly", program->nodes,
                                 program->devices, (long long)tensor->shape[mine->property[axis].dim], tensor->name);
            *extent /= flow->size[axis];
        }
        if (tensor->kind == HAPT_TENSOR_INPUT) program->inputs |= 1 << tensor->role;
    }
    return HAPT_OK;
}

/* -2: nothing to reduce; else the axis of the collective (-1: both). */
static int reduce_axis(const struct hapt_program *program, const struct hapt_program_tensor *tensor)
{
    const struct hapt_graph *graph = program->graph;
    if (!is_parameter_gradient(graph, tensor->tensor)) return -2;
    if (!graph->tensor[graph->tensor[tensor->tensor].primal].trainable) return -2;
    const bool nodes = tensor->property[0].kind == HAPT_PROPERTY_ALL_REDUCE;
    const bool devices = tensor->property[1].kind == HAPT_PROPERTY_ALL_REDUCE;
    if (nodes && devices) return -1;
    return nodes ? 0 : devices ? 1 : -2;
}

static enum hapt_status fill_steps(struct hapt_program *program, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = program->graph;
    int backward = 0, reduce = 0;
    for (int o = graph->forward_count; o < graph->op_count; o++)
        backward += in_range(&graph->op[o], program->first_op, program->end_op);
    for (int t = 0; t < program->tensor_count; t++) reduce += reduce_axis(program, &program->tensor[t]) != -2;
    HAPT_NEW(program->step[HAPT_SECTION_FORWARD], arena, program->end_op - program->first_op);
    HAPT_NEW(program->step[HAPT_SECTION_BACKWARD], arena, backward);
    HAPT_NEW(program->step[HAPT_SECTION_REDUCE], arena, reduce);
    for (int o = 0; o < graph->op_count; o++) {
        if (!in_range(&graph->op[o], program->first_op, program->end_op)) continue;
        const enum hapt_section section = o < graph->forward_count ? HAPT_SECTION_FORWARD : HAPT_SECTION_BACKWARD;
        program->step[section][program->step_count[section]++] =
            (struct hapt_program_step){.kind = HAPT_STEP_COMPUTE, .op = o, .tensor = -1, .axis = -1};
    }
    for (int t = 0; t < program->tensor_count; t++) {
        const int axis = reduce_axis(program, &program->tensor[t]);
        if (axis == -2) continue;
        program->step[HAPT_SECTION_REDUCE][program->step_count[HAPT_SECTION_REDUCE]++] =
            (struct hapt_program_step){.kind = HAPT_STEP_ALL_REDUCE, .op = -1, .tensor = t, .axis = axis};
    }
    return HAPT_OK;
}

static enum hapt_status build(struct hapt_program *program, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = program->graph;
    struct flow flow = {.graph = graph, .size = {program->nodes, program->devices}};
    unsigned *use;
    HAPT_NEW(flow.property, scratch, graph->tensor_count);
    HAPT_NEW(flow.written, scratch, graph->tensor_count);
    HAPT_NEW(use, scratch, graph->tensor_count);
    HAPT_TRY(flow_properties(&flow));
    mark_uses(program, use);
    HAPT_TRY(fill_tensors(program, &flow, use, arena));
    HAPT_TRY(fill_boundary(program, use, &program->forward_in, arena));
    HAPT_TRY(fill_boundary(program, use, &program->forward_out, arena));
    HAPT_TRY(fill_boundary(program, use, &program->backward_in, arena));
    HAPT_TRY(fill_boundary(program, use, &program->backward_out, arena));
    return fill_steps(program, arena);
}

enum hapt_status hapt_program_data_parallel(const struct hapt_graph *graph, int first_op, int end_op, int nodes,
                                            int devices, struct hapt_arena *arena, struct hapt_program **program)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= graph->forward_count);
    HAPT_ASSERT(nodes >= 1 && devices >= 1);
    struct hapt_program *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_program){
        .graph = graph, .first_op = first_op, .end_op = end_op, .nodes = nodes, .devices = devices};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = build(made, arena, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *program = made;
    return status;
}

double hapt_program_flops(const struct hapt_program *program, enum hapt_section section)
{
    double flops = 0;
    const double fraction = 1.0 / (program->nodes * program->devices);
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind == HAPT_STEP_COMPUTE)
            flops += hapt_op_flops(program->graph, &program->graph->op[step->op], fraction);
    }
    return flops;
}

double hapt_program_reduce_bytes(const struct hapt_program *program)
{
    double bytes = 0;
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_program_tensor *tensor = &program->tensor[program->step[HAPT_SECTION_REDUCE][s].tensor];
        double elements = 1;
        for (int d = 0; d < program->graph->tensor[tensor->tensor].dims; d++) elements *= (double)tensor->shape[d];
        bytes += elements * sizeof(float);
    }
    return bytes;
}
