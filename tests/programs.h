/* Programs of tests: of a range in one call, what they compute and send, and a check against the rules of HAP. */
#ifndef HAPT_TEST_PROGRAMS_H
#define HAPT_TEST_PROGRAMS_H

#include "hapt/program.h"
#include "hapt/rules.h"
#include "test.h"

/* Sharding (in `arena`) and program of a range: rows over n x m ranks. */
__attribute__((unused)) static enum hapt_status program_data_parallel(const struct hapt_graph *graph, int first_op,
                                                                      int end_op, int nodes, int devices,
                                                                      struct hapt_arena *arena,
                                                                      struct hapt_program **program)
{
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_sharding_data_parallel(graph, nodes, devices, arena, &sharding));
    return hapt_program_build(sharding, first_op, end_op, arena, program);
}

/* Rows over dp and operators over tp ranks. */
__attribute__((unused)) static enum hapt_status program_tensor_parallel(const struct hapt_graph *graph, int first_op,
                                                                        int end_op, int dp, int tp,
                                                                        struct hapt_arena *arena,
                                                                        struct hapt_program **program)
{
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_sharding_tensor_parallel(graph, dp, tp, arena, &sharding));
    return hapt_program_build(sharding, first_op, end_op, arena, program);
}

/* FLOPs of one rank in a section, from its local shapes. */
__attribute__((unused)) static double program_flops(const struct hapt_program *program, enum hapt_section section)
{
    double flops = 0;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind == HAPT_COLLECTIVE_NONE)
            flops += hapt_op_flops(program->shard, &program->shard->op[step->op], 1);
    }
    return flops;
}

/* Bytes of the shards that one rank gives to the collectives of a section, including those inside operators. Slices
 * move nothing. */
__attribute__((unused)) static double program_collective_bytes(const struct hapt_program *program,
                                                               enum hapt_section section)
{
    const struct hapt_graph *shard = program->shard;
    double bytes = 0;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind != HAPT_COLLECTIVE_NONE && step->kind != HAPT_COLLECTIVE_SLICE)
            bytes += (double)hapt_tensor_bytes(&shard->tensor[shard->op[step->op].input[0]]);
        else if (step->axis >= 0)
            bytes += hapt_sharding_exchange_bytes(shard, step->op);
    }
    return bytes;
}

/* ---- check ---- */

static enum hapt_status program_broken(const struct hapt_program *program, const char *what, const char *name)
{
    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "program of operators [%d, %d) on %d x %d: %s (%s)", program->first_op,
                     program->end_op, program->nodes, program->devices, what, name);
}

static const char *program_tensor_name(const struct hapt_program *program, int tensor)
{
    return program->graph->tensor[tensor].name;
}

/* Checks that the shards of all ranks of an axis make up the tensor, and that the local shapes are this rank's. */
static enum hapt_status program_check_tensors(const struct hapt_program *program)
{
    const struct hapt_graph *graph = program->graph;
    const struct hapt_sharding *sharding = program->sharding;
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_program_tensor *mine = &program->tensor[t];
        const struct hapt_tensor *tensor = &graph->tensor[mine->tensor];
        if (program->local[mine->tensor] != t)
            return program_broken(program, "a tensor's local index is wrong", tensor->name);
        if (t > 0 && program->tensor[t - 1].tensor >= mine->tensor)
            return program_broken(program, "tensors out of order", tensor->name);
        int64_t expected[HAPT_MAX_DIMS];
        memcpy(expected, tensor->shape, sizeof expected);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            const struct hapt_property property = mine->property[axis];
            if (property.kind != HAPT_PROPERTY_SHARDED) continue;
            const int64_t extent = expected[property.dim], blocks = property.blocks > 1 ? property.blocks : 1;
            int64_t first = 0, count = 0, sum = 0;
            for (int rank = 0; rank < sharding->axis[axis].size; rank++) {
                if (!hapt_property_share(property, &sharding->axis[axis], extent, rank, &first, &count) || count < 1 ||
                    first != sum)
                    return program_broken(program, "shards do not make up the tensor", tensor->name);
                sum += count;
                if (rank == sharding->mesh_coordinate[axis]) expected[property.dim] = blocks * count;
            }
            if (blocks * sum != extent)
                return program_broken(program, "shards do not make up the tensor", tensor->name);
        }
        for (int d = 0; d < tensor->dims; d++)
            if (mine->shape[d] != expected[d] || program->shard->tensor[mine->tensor].shape[d] != expected[d])
                return program_broken(program, "shards do not make up the tensor", tensor->name);
        if (mine->root > t || program->tensor[mine->root].root != mine->root)
            return program_broken(program, "the tensor whose storage it shares is invalid", tensor->name);
    }
    return HAPT_OK;
}

static struct hapt_property program_property(const struct hapt_program *program, int tensor, int axis)
{
    return program->tensor[program->local[tensor]].property[axis];
}

/* Checks one computation on one axis: its inputs and outputs have the properties that the rule of its cut requires. */
static enum hapt_status program_check_compute(const struct hapt_program *program, const struct hapt_program_step *step,
                                              int axis)
{
    const struct hapt_sharding *sharding = program->sharding;
    const struct hapt_op *op = &program->graph->op[step->op];
    struct hapt_rule rule;
    if (sharding->axis[axis].size == 1) return HAPT_OK;
    HAPT_TRY(hapt_rule_of_cut(sharding, axis, &sharding->axis[axis], step->op, sharding->cut[step->op][axis], &rule));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && !hapt_property_same(program_property(program, op->input[i], axis), rule.input[i]))
            return program_broken(program, "an input's layout contradicts the cut", op->name);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0 && !hapt_property_same(program_property(program, op->output[o], axis), rule.output[o]))
            return program_broken(program, "an output's layout contradicts the cut", op->name);
    const bool computes = step->kind == HAPT_COLLECTIVE_NONE;
    if (rule.first_rank_inputs != step->first_rank_inputs[axis] || (computes && rule.exchange != (step->axis == axis)))
        return program_broken(program, "terms added once, or the axis of an exchange, contradict the rules", op->name);
    return HAPT_OK;
}

static enum hapt_status program_check_collective(const struct hapt_program *program,
                                                 const struct hapt_program_step *step)
{
    const struct hapt_op *op = &program->graph->op[step->op];
    const enum hapt_collective_kind kind = hapt_op_type_at(op->type)->collective;
    if (step->kind != kind || step->axis != op->integer[0])
        return program_broken(program, "a step differs from its operator's collective", op->name);
    const struct hapt_property from = program_property(program, op->input[0], step->axis),
                               to = program_property(program, op->output[0], step->axis);
    if (!hapt_rule_moves(kind, from, to))
        return program_broken(program, "a collective does not convert between these layouts", op->name);
    if (program->origin[op->input[0]] != program->origin[op->output[0]])
        return program_broken(program, "a collective turns one tensor into another", op->name);
    return program_check_compute(program, step, 1 - step->axis);
}

static enum hapt_status program_check_section(const struct hapt_program *program, enum hapt_section section)
{
    for (int s = 0, last = -1; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->op <= last) return program_broken(program, "steps out of order", "");
        last = step->op;
        const struct hapt_op *op = &program->graph->op[step->op];
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            if (tensor >= 0 && program->local[tensor] < 0)
                return program_broken(program, "an operator uses a tensor outside the program", op->name);
        }
        if (step->kind != HAPT_COLLECTIVE_NONE) {
            HAPT_TRY(program_check_collective(program, step));
            continue;
        }
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) HAPT_TRY(program_check_compute(program, step, axis));
    }
    return HAPT_OK;
}

/* Checks that every version is written before it is read, here or by another range. */
static enum hapt_status program_check_written(const struct hapt_program *program, bool *written)
{
    const struct hapt_graph *graph = program->graph;
    for (int t = 0; t < program->tensor_count; t++) {
        const enum hapt_tensor_kind kind = graph->tensor[program->tensor[t].tensor].kind;
        written[t] = kind == HAPT_TENSOR_INPUT || kind == HAPT_TENSOR_PARAMETER;
    }
    for (int b = 0; b < program->forward_in.count; b++) written[program->local[program->forward_in.tensor[b]]] = true;
    for (int b = 0; b < program->backward_in.count; b++) written[program->local[program->backward_in.tensor[b]]] = true;
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
        for (int s = 0; s < program->step_count[section]; s++) {
            const struct hapt_op *op = &graph->op[program->step[section][s].op];
            for (int i = 0; i < op->input_count; i++)
                if (op->input[i] >= 0 && !written[program->local[op->input[i]]])
                    return program_broken(program, "an operator reads a tensor that is not written before", op->name);
            for (int o = 0; o < op->output_count; o++)
                if (op->output[o] >= 0) written[program->local[op->output[o]]] = true;
        }
    }
    return HAPT_OK;
}

static enum hapt_status program_check_boundary(const struct hapt_program *program, const struct hapt_boundary *boundary,
                                               enum hapt_tensor_kind kind)
{
    for (int b = 0; b < boundary->count; b++) {
        const int tensor = boundary->tensor[b];
        const char *name = program_tensor_name(program, tensor);
        if (program->local[tensor] < 0)
            return program_broken(program, "a boundary tensor is outside the program", name);
        if (program->graph->tensor[tensor].kind != kind)
            return program_broken(program, "a boundary tensor has the wrong kind", name);
        if (b > 0 && boundary->tensor[b - 1] >= tensor)
            return program_broken(program, "boundary tensors out of order", name);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (program_property(program, tensor, axis).kind == HAPT_PROPERTY_PARTIAL)
                return program_broken(program, "partial sums cross a boundary", name);
    }
    return HAPT_OK;
}

__attribute__((unused)) static enum hapt_status program_check(const struct hapt_program *program)
{
    HAPT_TRY(program_check_tensors(program));
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) HAPT_TRY(program_check_section(program, section));
    bool *written = calloc((size_t)program->tensor_count + 1, sizeof *written);
    if (!written) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to check a program");
    const enum hapt_status status = program_check_written(program, written);
    free(written);
    HAPT_TRY(status);
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_op *op = &program->graph->op[program->step[HAPT_SECTION_REDUCE][s].op];
        if (!hapt_graph_is_parameter_gradient(program->graph, op->output[0]))
            return program_broken(program, "reduces a tensor that is not a parameter's gradient", op->name);
    }
    HAPT_TRY(program_check_boundary(program, &program->forward_in, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(program_check_boundary(program, &program->forward_out, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(program_check_boundary(program, &program->backward_in, HAPT_TENSOR_GRADIENT));
    return program_check_boundary(program, &program->backward_out, HAPT_TENSOR_GRADIENT);
}

#endif
