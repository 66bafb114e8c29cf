/* Programs check and print themselves. */
#include "rules.h"

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
            int64_t whole = mine->shape[d];
            for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
                if (mine->property[axis].kind == HAPT_PROPERTY_ALL_GATHER && mine->property[axis].dim == d)
                    whole *= size[axis];
            if (whole != tensor->shape[d]) return broken(program, "shards do not make the tensor", tensor->name);
        }
    }
    return HAPT_OK;
}

/* Every step's outputs have the properties that the rules give for its inputs. */
static enum hapt_status check_rules(const struct hapt_program *program, enum hapt_section section)
{
    const struct hapt_graph *graph = program->graph;
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind != HAPT_STEP_COMPUTE) continue;
        if (s > 0 && program->step[section][s - 1].op >= step->op) return broken(program, "steps out of order", "");
        const struct hapt_op *op = &graph->op[step->op];
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            struct hapt_property input[HAPT_MAX_INPUTS] = {{0}}, output[HAPT_MAX_OUTPUTS] = {{0}};
            for (int i = 0; i < op->input_count; i++) {
                if (op->input[i] < 0) continue;
                if (program->local[op->input[i]] < 0)
                    return broken(program, "operator reads a tensor that is not here", op->name);
                input[i] = program->tensor[program->local[op->input[i]]].property[axis];
            }
            HAPT_TRY(hapt_rule_derive(op, input, output));
            for (int o = 0; o < op->output_count; o++) {
                if (op->output[o] < 0) continue;
                if (program->local[op->output[o]] < 0)
                    return broken(program, "operator writes a tensor that is not here", op->name);
                const struct hapt_property have = program->tensor[program->local[op->output[o]]].property[axis];
                if (have.kind != output[o].kind || (have.kind == HAPT_PROPERTY_ALL_GATHER && have.dim != output[o].dim))
                    return broken(program, "property contradicts the rules", op->name);
            }
        }
    }
    return HAPT_OK;
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
    HAPT_TRY(check_rules(program, HAPT_SECTION_FORWARD));
    HAPT_TRY(check_rules(program, HAPT_SECTION_BACKWARD));
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
    char nodes[24], devices[24];
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
            for (int i = 0; i < op->input_count; i++)
                if (op->input[i] >= 0) print_tensor(program, op->input[i], stream);
            fprintf(stream, " ->");
            for (int o = 0; o < op->output_count; o++)
                if (op->output[o] >= 0) print_tensor(program, op->output[o], stream);
            fputc('\n', stream);
        }
    }
}
