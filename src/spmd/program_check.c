/* Programs check and print themselves. */
#include <stdlib.h>
#include <string.h>

#include "rules.h"

#include "hapt/program.h"

static enum hapt_status broken(const struct hapt_program *program, const char *what, const char *name)
{
    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "program of operators [%d, %d) on %d x %d: %s (%s)", program->first_op,
                     program->end_op, program->nodes, program->devices, what, name);
}

static enum hapt_status check_tensors(const struct hapt_program *program)
{
    const struct hapt_graph *graph = program->graph;
    const int size[HAPT_MESH_AXES] = {program->nodes, program->devices};
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_program_tensor *mine = &program->tensor[t];
        const struct hapt_tensor *tensor = &graph->tensor[mine->tensor];
        if (program->local[mine->tensor] != t)
            return broken(program, "index of a tensor does not lead back", tensor->name);
        if (t > 0 && program->tensor[t - 1].tensor >= mine->tensor)
            return broken(program, "tensors out of order", tensor->name);
        for (int d = 0; d < tensor->dims; d++) {
            int64_t expected = tensor->shape[d];
            for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
                if (mine->property[axis].kind == HAPT_PROPERTY_ALL_GATHER && mine->property[axis].dim == d)
                    expected = (expected + size[axis] - 1) / size[axis];
            if (mine->shape[d] != expected || program->shard->tensor[mine->tensor].shape[d] != expected)
                return broken(program, "shards do not make the tensor", tensor->name);
        }
    }
    return HAPT_OK;
}

/* One computation on one axis: its inputs are as a rule wants them, its outputs become what the rule makes. `now` is every
 * tensor's property at this step. */
static enum hapt_status check_compute(const struct hapt_program *program, const struct hapt_program_step *step, int axis,
                                      bool *written, struct hapt_property *now)
{
    const struct hapt_op *op = &program->graph->op[step->op];
    struct hapt_property input[HAPT_MAX_INPUTS] = {{0}}, wanted[HAPT_MAX_OUTPUTS] = {{0}};
    struct hapt_rule rule;
    for (int i = 0; i < op->input_count; i++) {
        if (op->input[i] < 0) continue;
        if (program->local[op->input[i]] < 0)
            return broken(program, "operator reads a tensor that is not here", op->name);
        input[i] = now[program->local[op->input[i]]];
    }
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0) continue;
        if (program->local[op->output[o]] < 0)
            return broken(program, "operator writes a tensor that is not here", op->name);
        wanted[o] = program->tensor[program->local[op->output[o]]].property[axis];
    }
    HAPT_TRY(hapt_rule_derive(program->graph, op, input, wanted, &rule));
    if (rule.once != step->once[axis] || rule.exchange != (step->axis == axis))
        return broken(program, "terms or exchanges contradict the rules", op->name);
    for (int o = 0; o < op->output_count; o++) {
        if (op->output[o] < 0) continue;
        const int tensor = program->local[op->output[o]];
        if (written[tensor] && !hapt_property_same(now[tensor], rule.output[o]))
            return broken(program, "operator adds to what is laid out otherwise", op->name);
        now[tensor] = rule.output[o];
        written[tensor] = true;
    }
    return HAPT_OK;
}

/* Every step's outputs have the properties that the rules give for its inputs, and collectives make of them what the program
 * says of its tensors. */
static enum hapt_status check_rules(const struct hapt_program *program, enum hapt_section section, int axis,
                                    bool *written, struct hapt_property *now)
{
    for (int t = 0; t < program->tensor_count; t++) {
        now[t] = program->tensor[t].property[axis];
        written[t] = false;
    }
    /* What comes in from behind is added to as it is. */
    for (int b = 0; section == HAPT_SECTION_BACKWARD && b < program->backward_in.count; b++)
        written[program->local[program->backward_in.tensor[b]]] = true;
    for (int s = 0, last = -1; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind == HAPT_STEP_COMPUTE) {
            if (step->op <= last) return broken(program, "steps out of order", "");
            last = step->op;
            HAPT_TRY(check_compute(program, step, axis, written, now));
        } else if (step->axis == axis || step->axis == -1) {
            if (step->kind != HAPT_STEP_ALL_REDUCE || now[step->tensor].kind != HAPT_PROPERTY_ALL_REDUCE)
                return broken(program, "collective on what is not partial",
                              program->graph->tensor[program->tensor[step->tensor].tensor].name);
            now[step->tensor] = (struct hapt_property){.kind = HAPT_PROPERTY_IDENTITY};
        }
    }
    for (int t = 0; t < program->tensor_count; t++)
        if (written[t] && !hapt_property_same(now[t], program->tensor[t].property[axis]))
            return broken(program, "property contradicts the rules", program->graph->tensor[program->tensor[t].tensor].name);
    return HAPT_OK;
}

static enum hapt_status check_sections(const struct hapt_program *program)
{
    struct hapt_property *now = calloc((size_t)program->tensor_count, sizeof *now);
    bool *written = calloc((size_t)program->tensor_count, sizeof *written);
    enum hapt_status status =
        now && written ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to check a program");
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++)
        for (int axis = 0; axis < HAPT_MESH_AXES && status == HAPT_OK; axis++)
            status = check_rules(program, section, axis, written, now);
    free(now);
    free(written);
    return status;
}

static enum hapt_status check_boundary(const struct hapt_program *program, const struct hapt_boundary *boundary,
                                       enum hapt_tensor_kind kind)
{
    for (int b = 0; b < boundary->count; b++) {
        const int tensor = boundary->tensor[b];
        const char *name = program->graph->tensor[tensor].name;
        if (program->local[tensor] < 0) return broken(program, "boundary tensor is not here", name);
        if (program->graph->tensor[tensor].kind != kind)
            return broken(program, "boundary tensor of the wrong kind", name);
        if (b > 0 && boundary->tensor[b - 1] >= tensor) return broken(program, "boundary out of order", name);
    }
    return HAPT_OK;
}

enum hapt_status hapt_program_check(const struct hapt_program *program)
{
    HAPT_TRY(check_tensors(program));
    HAPT_TRY(check_sections(program));
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++) {
        const struct hapt_program_tensor *tensor = &program->tensor[program->step[HAPT_SECTION_REDUCE][s].tensor];
        if (program->graph->tensor[tensor->tensor].kind != HAPT_TENSOR_GRADIENT)
            return broken(program, "reduces what is no gradient", program->graph->tensor[tensor->tensor].name);
    }
    HAPT_TRY(check_boundary(program, &program->forward_in, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(check_boundary(program, &program->forward_out, HAPT_TENSOR_ACTIVATION));
    HAPT_TRY(check_boundary(program, &program->backward_in, HAPT_TENSOR_GRADIENT));
    return check_boundary(program, &program->backward_out, HAPT_TENSOR_GRADIENT);
}

static void print_tensor(const struct hapt_program *program, int tensor, FILE *stream)
{
    const struct hapt_tensor *whole = &program->graph->tensor[tensor];
    const struct hapt_program_tensor *mine = &program->tensor[program->local[tensor]];
    char nodes[32], devices[32];
    fprintf(stream, " %s[", whole->name);
    for (int d = 0; d < whole->dims; d++) fprintf(stream, d ? " %lld" : "%lld", (long long)mine->shape[d]);
    fprintf(stream, "] %s", hapt_property_text(mine->property[0], nodes));
    fprintf(stream, "/%s", hapt_property_text(mine->property[1], devices));
}

static void print_boundary(const struct hapt_program *program, const char *title, const struct hapt_boundary *boundary,
                           FILE *stream)
{
    if (boundary->count == 0) return;
    fprintf(stream, "%s:", title);
    for (int b = 0; b < boundary->count; b++) print_tensor(program, boundary->tensor[b], stream);
    fputc('\n', stream);
}

void hapt_program_print(const struct hapt_program *program, FILE *stream)
{
    static const char *const title[HAPT_SECTION_COUNT] = {"forward", "backward", "reduce"};
    static const char *const collective[] = {"compute", "all-reduce", "all-gather", "reduce-scatter"};
    fprintf(stream, "operators [%d, %d) on %d x %d devices\n", program->first_op, program->end_op, program->nodes,
            program->devices);
    print_boundary(program, "forward in", &program->forward_in, stream);
    print_boundary(program, "forward out", &program->forward_out, stream);
    print_boundary(program, "backward in", &program->backward_in, stream);
    print_boundary(program, "backward out", &program->backward_out, stream);
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) {
        fprintf(stream, "%s\n", title[section]);
        for (int s = 0; s < program->step_count[section]; s++) {
            const struct hapt_program_step *step = &program->step[section][s];
            if (step->kind != HAPT_STEP_COMPUTE) {
                fprintf(stream, "  %s axis %d", collective[step->kind], step->axis);
                print_tensor(program, program->tensor[step->tensor].tensor, stream);
                fputc('\n', stream);
                continue;
            }
            const struct hapt_op *op = &program->graph->op[step->op];
            fprintf(stream, "  %s (%s):", hapt_op_type_at(op->type)->name, op->name);
            for (int i = 0; i < op->input_count; i++) {
                if (op->input[i] < 0) continue;
                print_tensor(program, op->input[i], stream);
                if ((step->once[0] | step->once[1]) >> i & 1u) fputs(" once", stream);
            }
            fprintf(stream, " ->");
            for (int o = 0; o < op->output_count; o++)
                if (op->output[o] >= 0) print_tensor(program, op->output[o], stream);
            if (step->axis >= 0) fprintf(stream, " exchanging over axis %d", step->axis);
            fputc('\n', stream);
        }
    }
}
