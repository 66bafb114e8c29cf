/* Prints programs. */
#include <math.h>

#include "hapt/config.h"
#include "hapt/program.h"

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
    static const char *const title[HAPT_SECTION_COUNT] = {"forward", "backward", "gradients of parameters",
                                                          "reduce, once a step"};
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
