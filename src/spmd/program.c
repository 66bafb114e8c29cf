/* Programs: the part of a sharded graph that belongs to one range. */
#include <string.h>

#include "rules.h"

#include "hapt/program.h"

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
static enum hapt_status fill_tensors(struct hapt_program *program, const struct hapt_sharding *sharding,
                                     const unsigned *use, struct hapt_arena *arena)
{
    const struct hapt_graph *graph = program->graph;
    HAPT_NEW(program->local, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        program->local[t] = use[t] & (READ_HERE | WRITTEN_HERE) ? program->tensor_count++ : -1;
    HAPT_NEW(program->tensor, arena, program->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (program->local[t] < 0) continue;
        struct hapt_program_tensor *mine = &program->tensor[program->local[t]];
        mine->tensor = t;
        memcpy(mine->shape, sharding->shard->tensor[t].shape, sizeof mine->shape);
        memcpy(mine->property, sharding->property[t], sizeof mine->property);
        if (graph->tensor[t].kind == HAPT_TENSOR_INPUT) program->inputs |= 1 << graph->tensor[t].role;
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

/* The reductions behind the range's operators, by operator. */
struct reductions {
    int count;
    const struct hapt_sharding_reduction **reduction;
};

static enum hapt_status find_reductions(const struct hapt_program *program, const struct hapt_sharding *sharding,
                                        struct hapt_arena *scratch, struct reductions *found)
{
    const struct hapt_graph *graph = program->graph;
    HAPT_NEW(found->reduction, scratch, sharding->reduction_count);
    for (int r = 0; r < sharding->reduction_count; r++) {
        const struct hapt_sharding_reduction *reduction = &sharding->reduction[r];
        const bool first = in_range(&graph->op[reduction->first], program->first_op, program->end_op);
        const bool last = in_range(&graph->op[reduction->op], program->first_op, program->end_op);
        if (first != last)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "cut the model elsewhere, or choose data parallelism for this stage",
                             "a cut of operators [%d, %d) parts the sum that makes %s", program->first_op,
                             program->end_op, graph->tensor[reduction->tensor].name);
        if (last) found->reduction[found->count++] = reduction;
    }
    return HAPT_OK;
}

static void add_step(struct hapt_program *program, enum hapt_section section, struct hapt_program_step step)
{
    program->step[section][program->step_count[section]++] = step;
}

static enum hapt_status fill_steps(struct hapt_program *program, const struct hapt_sharding *sharding,
                                   struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = program->graph;
    struct reductions found = {0};
    int backward = 0, reduce = 0, next = 0;
    HAPT_TRY(find_reductions(program, sharding, scratch, &found));
    for (int o = graph->forward_count; o < graph->op_count; o++)
        backward += in_range(&graph->op[o], program->first_op, program->end_op);
    for (int t = 0; t < program->tensor_count; t++) reduce += reduce_axis(program, &program->tensor[t]) != -2;
    HAPT_NEW(program->step[HAPT_SECTION_FORWARD], arena, program->end_op - program->first_op + found.count);
    HAPT_NEW(program->step[HAPT_SECTION_BACKWARD], arena, backward + found.count);
    HAPT_NEW(program->step[HAPT_SECTION_REDUCE], arena, reduce);
    for (int o = 0; o < graph->op_count; o++) {
        if (!in_range(&graph->op[o], program->first_op, program->end_op)) continue;
        const enum hapt_section section = o < graph->forward_count ? HAPT_SECTION_FORWARD : HAPT_SECTION_BACKWARD;
        struct hapt_program_step step = {
            .kind = HAPT_STEP_COMPUTE, .op = o, .tensor = -1, .axis = sharding->exchange[o]};
        memcpy(step.once, sharding->once[o], sizeof step.once);
        add_step(program, section, step);
        for (; next < found.count && found.reduction[next]->op == o; next++)
            add_step(program, section,
                     (struct hapt_program_step){.kind = HAPT_STEP_ALL_REDUCE,
                                                .op = -1,
                                                .tensor = program->local[found.reduction[next]->tensor],
                                                .axis = found.reduction[next]->axis});
    }
    for (int t = 0; t < program->tensor_count; t++) {
        const int axis = reduce_axis(program, &program->tensor[t]);
        if (axis == -2) continue;
        add_step(program, HAPT_SECTION_REDUCE,
                 (struct hapt_program_step){.kind = HAPT_STEP_ALL_REDUCE, .op = -1, .tensor = t, .axis = axis});
    }
    return HAPT_OK;
}

static enum hapt_status fill(struct hapt_program *program, const struct hapt_sharding *sharding, struct hapt_arena *arena,
                             struct hapt_arena *scratch)
{
    unsigned *use;
    HAPT_NEW(use, scratch, program->graph->tensor_count);
    mark_uses(program, use);
    HAPT_TRY(fill_tensors(program, sharding, use, arena));
    HAPT_TRY(fill_boundary(program, use, &program->forward_in, arena));
    HAPT_TRY(fill_boundary(program, use, &program->forward_out, arena));
    HAPT_TRY(fill_boundary(program, use, &program->backward_in, arena));
    HAPT_TRY(fill_boundary(program, use, &program->backward_out, arena));
    return fill_steps(program, sharding, arena, scratch);
}

enum hapt_status hapt_program_build(const struct hapt_sharding *sharding, int first_op, int end_op, struct hapt_arena *arena,
                                    struct hapt_program **program)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= sharding->graph->forward_count);
    struct hapt_program *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_program){.graph = sharding->graph,
                                  .shard = sharding->shard,
                                  .first_op = first_op,
                                  .end_op = end_op,
                                  .nodes = sharding->size[0],
                                  .devices = sharding->size[1]};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = fill(made, sharding, arena, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *program = made;
    return status;
}

enum hapt_status hapt_program_data_parallel(const struct hapt_graph *graph, int first_op, int end_op, int nodes,
                                            int devices, struct hapt_arena *arena, struct hapt_program **program)
{
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_sharding_data_parallel(graph, nodes, devices, arena, &sharding));
    return hapt_program_build(sharding, first_op, end_op, arena, program);
}

enum hapt_status hapt_program_tensor_parallel(const struct hapt_graph *graph, int first_op, int end_op, int dp, int tp,
                                              struct hapt_arena *arena, struct hapt_program **program)
{
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_sharding_tensor_parallel(graph, dp, tp, arena, &sharding));
    return hapt_program_build(sharding, first_op, end_op, arena, program);
}

double hapt_program_flops(const struct hapt_program *program, enum hapt_section section)
{
    double flops = 0;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind == HAPT_STEP_COMPUTE)
            flops += hapt_op_flops(program->shard, &program->shard->op[step->op], 1);
    }
    return flops;
}

double hapt_program_collective_bytes(const struct hapt_program *program, enum hapt_section section)
{
    const struct hapt_graph *shard = program->shard;
    double bytes = 0;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind != HAPT_STEP_COMPUTE)
            bytes += (double)hapt_tensor_bytes(&shard->tensor[program->tensor[step->tensor].tensor]);
        else if (step->axis >= 0)
            bytes += hapt_sharding_exchange_bytes(shard, step->op);
    }
    return bytes;
}
