/* Checks and prints programs. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "expansion.h"
#include "hapt/rules.h"

#include "hapt/config.h"
#include "hapt/program.h"

static enum hapt_status broken(const struct hapt_program *program, const char *what, const char *name)
{
    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "program of operators [%d, %d) on %d x %d: %s (%s)", program->first_op,
                     program->end_op, program->nodes, program->devices, what, name);
}

static const char *name_of(const struct hapt_program *program, int tensor)
{
    return program->graph->tensor[tensor].name;
}

/* Checks that the shards of all ranks of an axis make up the tensor, and that the local shapes are this rank's. */
static enum hapt_status check_tensors(const struct hapt_program *program)
{
    const struct hapt_graph *graph = program->graph;
    const struct hapt_sharding *sharding = program->sharding;
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_program_tensor *mine = &program->tensor[t];
        const struct hapt_tensor *tensor = &graph->tensor[mine->tensor];
        if (program->local[mine->tensor] != t) return broken(program, "a tensor's local index is wrong", tensor->name);
        if (t > 0 && program->tensor[t - 1].tensor >= mine->tensor)
            return broken(program, "tensors out of order", tensor->name);
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
                    return broken(program, "shards do not make up the tensor", tensor->name);
                sum += count;
                if (rank == sharding->mesh_coordinate[axis]) expected[property.dim] = blocks * count;
            }
            if (blocks * sum != extent) return broken(program, "shards do not make up the tensor", tensor->name);
        }
        for (int d = 0; d < tensor->dims; d++)
            if (mine->shape[d] != expected[d] || program->shard->tensor[mine->tensor].shape[d] != expected[d])
                return broken(program, "shards do not make up the tensor", tensor->name);
        if (mine->root > t || program->tensor[mine->root].root != mine->root)
            return broken(program, "the tensor whose storage it shares is invalid", tensor->name);
    }
    return HAPT_OK;
}

static struct hapt_property property_of(const struct hapt_program *program, int tensor, int axis)
{
    return program->tensor[program->local[tensor]].property[axis];
}

/* Checks one computation on one axis: its inputs and outputs have the properties that the rule of its cut requires. */
static enum hapt_status check_compute(const struct hapt_program *program, const struct hapt_program_step *step,
                                      int axis)
{
    const struct hapt_sharding *sharding = program->sharding;
    const struct hapt_op *op = &program->graph->op[step->op];
    struct hapt_rule rule;
    if (sharding->axis[axis].size == 1) return HAPT_OK;
    HAPT_TRY(hapt_rule_of_cut(sharding, axis, &sharding->axis[axis], step->op, sharding->cut[step->op][axis], &rule));
    for (int i = 0; i < op->input_count; i++)
        if (op->input[i] >= 0 && !hapt_property_same(property_of(program, op->input[i], axis), rule.input[i]))
            return broken(program, "an input's layout contradicts the cut", op->name);
    for (int o = 0; o < op->output_count; o++)
        if (op->output[o] >= 0 && !hapt_property_same(property_of(program, op->output[o], axis), rule.output[o]))
            return broken(program, "an output's layout contradicts the cut", op->name);
    const bool computes = step->kind == HAPT_COLLECTIVE_NONE;
    if (rule.first_rank_inputs != step->first_rank_inputs[axis] || (computes && rule.exchange != (step->axis == axis)))
        return broken(program, "terms added once, or the axis of an exchange, contradict the rules", op->name);
    return HAPT_OK;
}

static enum hapt_status check_collective(const struct hapt_program *program, const struct hapt_program_step *step)
{
    const struct hapt_op *op = &program->graph->op[step->op];
    const enum hapt_collective_kind kind = hapt_op_type_at(op->type)->collective;
    if (step->kind != kind || step->axis != op->integer[0])
        return broken(program, "a step differs from its operator's collective", op->name);
    const struct hapt_property from = property_of(program, op->input[0], step->axis),
                               to = property_of(program, op->output[0], step->axis);
    if (!hapt_rule_moves(kind, from, to))
        return broken(program, "a collective does not convert between these layouts", op->name);
    if (program->origin[op->input[0]] != program->origin[op->output[0]])
        return broken(program, "a collective turns one tensor into another", op->name);
    return check_compute(program, step, 1 - step->axis);
}

static enum hapt_status check_section(const struct hapt_program *program, enum hapt_section section)
{
    for (int s = 0, last = -1; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->op <= last) return broken(program, "steps out of order", "");
        last = step->op;
        const struct hapt_op *op = &program->graph->op[step->op];
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            if (tensor >= 0 && program->local[tensor] < 0)
                return broken(program, "an operator uses a tensor outside the program", op->name);
        }
        if (step->kind != HAPT_COLLECTIVE_NONE) {
            HAPT_TRY(check_collective(program, step));
            continue;
        }
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) HAPT_TRY(check_compute(program, step, axis));
    }
    return HAPT_OK;
}

/* Checks that every version is written before it is read, here or by another range. */
static enum hapt_status check_written(const struct hapt_program *program, bool *written)
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
                    return broken(program, "an operator reads a tensor that is not written before", op->name);
            for (int o = 0; o < op->output_count; o++)
                if (op->output[o] >= 0) written[program->local[op->output[o]]] = true;
        }
    }
    return HAPT_OK;
}

static enum hapt_status check_boundary(const struct hapt_program *program, const struct hapt_boundary *boundary,
                                       enum hapt_tensor_kind kind)
{
    for (int b = 0; b < boundary->count; b++) {
        const int tensor = boundary->tensor[b];
        const char *name = name_of(program, tensor);
        if (program->local[tensor] < 0) return broken(program, "a boundary tensor is outside the program", name);
        if (program->graph->tensor[tensor].kind != kind)
            return broken(program, "a boundary tensor has the wrong kind", name);
        if (b > 0 && boundary->tensor[b - 1] >= tensor) return broken(program, "boundary tensors out of order", name);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (property_of(program, tensor, axis).kind == HAPT_PROPERTY_PARTIAL)
                return broken(program, "partial sums cross a boundary", name);
    }
    return HAPT_OK;
}

enum hapt_status hapt_program_check(const struct hapt_program *program)
{
    HAPT_TRY(check_tensors(program));
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) HAPT_TRY(check_section(program, section));
    bool *written = calloc((size_t)program->tensor_count + 1, sizeof *written);
    if (!written) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to check a program");
    const enum hapt_status status = check_written(program, written);
    free(written);
    HAPT_TRY(status);
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_op *op = &program->graph->op[program->step[HAPT_SECTION_REDUCE][s].op];
        if (!hapt_graph_is_parameter_gradient(program->graph, op->output[0]))
            return broken(program, "reduces a tensor that is not a parameter's gradient", op->name);
    }
    HAPT_TRY(check_boundary(program, &program->forward_in, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(check_boundary(program, &program->forward_out, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(check_boundary(program, &program->backward_in, HAPT_TENSOR_GRADIENT));
    return check_boundary(program, &program->backward_out, HAPT_TENSOR_GRADIENT);
}

/* Prints NAME[local shape] and, for every axis of several ranks, its property: {replicated, partial}. */
static void print_tensor(const struct hapt_program *program, int tensor, FILE *stream)
{
    const struct hapt_tensor *whole = &program->graph->tensor[tensor];
    const struct hapt_program_tensor *mine = &program->tensor[program->local[tensor]];
    char text[HAPT_PROPERTY_TEXT];
    const char *before = " {";
    fprintf(stream, " %s[", program->graph->tensor[program->origin[tensor]].name);
    for (int d = 0; d < whole->dims; d++) fprintf(stream, d ? " %lld" : "%lld", (long long)mine->shape[d]);
    fputc(']', stream);
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        if (program->sharding->axis[axis].size == 1) continue;
        fprintf(stream, "%s%s", before, hapt_property_text(mine->property[axis], text));
        before = ", ";
    }
    if (*before == ',') fputc('}', stream);
}

static void print_boundary(const struct hapt_program *program, const char *title, const struct hapt_boundary *boundary,
                           FILE *stream)
{
    if (boundary->count == 0) return;
    fprintf(stream, "%s:", title);
    for (int b = 0; b < boundary->count; b++) print_tensor(program, boundary->tensor[b], stream);
    fputc('\n', stream);
}

/* Prints "by b, -": the index of each axis of several ranks. */
static void print_cuts(const struct hapt_program *program, const struct hapt_program_step *step, FILE *stream)
{
    const char *before = " by ";
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const char letter = program->sharding->cut[step->op][axis].letter;
        if (program->sharding->axis[axis].size == 1) continue;
        fprintf(stream, "%s%c", before, letter == HAPT_CUT_REPLICATED ? '-' : letter);
        before = ", ";
    }
}

static void print_cost(const struct hapt_program *program, const struct hapt_program_step *step,
                       const struct hapt_program_costs *costs, FILE *stream)
{
    const bool moves = (step->kind != HAPT_COLLECTIVE_NONE && step->kind != HAPT_COLLECTIVE_SLICE) ||
                       (step->kind == HAPT_COLLECTIVE_NONE && step->axis >= 0);
    const double seconds = costs && moves ? costs->step_s(costs->context, program, step) : NAN;
    char text[32];
    if (isfinite(seconds)) fprintf(stream, "  %s", hapt_units_time(seconds, text));
}

static void print_step(const struct hapt_program *program, const struct hapt_program_step *step,
                       const struct hapt_program_costs *costs, FILE *stream)
{
    const struct hapt_op *op = &program->graph->op[step->op];
    const char *type = hapt_op_type_at(op->type)->name;
    const bool both = program->nodes > 1 && program->devices > 1;
    fprintf(stream, "  %s", type);
    if (step->kind == HAPT_COLLECTIVE_NONE && strcmp(type, op->name) != 0) fprintf(stream, " (%s)", op->name);
    if (step->kind != HAPT_COLLECTIVE_NONE && both) fprintf(stream, " over axis %d", step->axis);
    if (step->kind == HAPT_COLLECTIVE_NONE) print_cuts(program, step, stream);
    fputc(':', stream);
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0) continue;
        print_tensor(program, op->input[i], stream);
        if ((step->first_rank_inputs[0] | step->first_rank_inputs[1]) >> i & 1u) fputs(" once", stream);
    }
    fputs(" ->", stream);
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0) continue;
        if (op->accumulate >> o & 1u) fputs(" +=", stream);
        print_tensor(program, op->output[o], stream);
    }
    if (step->kind == HAPT_COLLECTIVE_NONE && step->axis >= 0) fprintf(stream, ", exchanging over axis %d", step->axis);
    print_cost(program, step, costs, stream);
    fputc('\n', stream);
}

void hapt_program_print(const struct hapt_program *program, const struct hapt_program_costs *costs, FILE *stream)
{
    static const char *const title[HAPT_SECTION_COUNT] = {"forward", "backward", "reduce, once a step"};
    const struct hapt_sharding *sharding = program->sharding;
    fprintf(stream, "operators [%d, %d) on %d x %d devices, as device (%d, %d) runs them\n", program->first_op,
            program->end_op, program->nodes, program->devices, sharding->mesh_coordinate[0],
            sharding->mesh_coordinate[1]);
    print_boundary(program, "forward in", &program->forward_in, stream);
    print_boundary(program, "forward out", &program->forward_out, stream);
    print_boundary(program, "backward in", &program->backward_in, stream);
    print_boundary(program, "backward out", &program->backward_out, stream);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
        if (program->step_count[section] == 0) continue;
        fprintf(stream, "%s\n", title[section]);
        for (int s = 0; s < program->step_count[section]; s++)
            print_step(program, &program->step[section][s], costs, stream);
    }
}
