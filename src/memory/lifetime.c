/* Regions and lifetimes of a program's tensors. */
#include "lifetime.h"

size_t hapt_lifetime_bytes(const struct hapt_program *program, int tensor)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    size_t bytes = hapt_dtype_bytes(whole->dtype);
    for (int d = 0; d < whole->dims; d++) bytes *= (size_t)program->tensor[tensor].shape[d];
    return bytes;
}

bool hapt_lifetime_parameter_gradient(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *gradient = &graph->tensor[tensor];
    return gradient->kind == HAPT_TENSOR_GRADIENT && gradient->primal >= 0 &&
           graph->tensor[gradient->primal].kind == HAPT_TENSOR_PARAMETER;
}

bool hapt_lifetime_updates(const struct hapt_graph *graph, int tensor)
{
    if (!hapt_lifetime_parameter_gradient(graph, tensor)) return false;
    const struct hapt_tensor *parameter = &graph->tensor[graph->tensor[tensor].primal];
    return parameter->trainable && parameter->gradient == tensor;
}

static void touch(struct hapt_lifetime *lifetime, int step)
{
    if (lifetime->last < lifetime->first) lifetime->first = step;
    lifetime->last = step;
}

static bool alive(struct hapt_lifetime lifetime)
{
    return lifetime.first <= lifetime.last;
}

static void walk(const struct hapt_program *program, enum hapt_section section, struct hapt_lifetime *lifetime)
{
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_op *op = &program->graph->op[program->step[section][s].op];
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0) touch(&lifetime[program->tensor[program->local[op->input[i]]].root], s);
        for (int o = 0; o < op->output_count; o++)
            if (op->output[o] >= 0) touch(&lifetime[program->tensor[program->local[op->output[o]]].root], s);
    }
}

/* `read_later`: backward operators of either section touch the tensor. */
static enum hapt_region region_of(const struct hapt_program *program, int tensor, bool read_later)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    switch (whole->kind) {
    case HAPT_TENSOR_PARAMETER: return HAPT_REGION_RESIDENT;
    /* One loss scale serves the whole step; tokens and targets differ by microbatch. */
    case HAPT_TENSOR_INPUT: return whole->role == HAPT_ROLE_LOSS_SCALE ? HAPT_REGION_RESIDENT : HAPT_REGION_SLOT;
    case HAPT_TENSOR_GRADIENT:
        return hapt_lifetime_parameter_gradient(program->graph, program->tensor[tensor].tensor) ? HAPT_REGION_RESIDENT
                                                                                                : HAPT_REGION_WORKSPACE;
    case HAPT_TENSOR_ACTIVATION: break;
    }
    /* The trainer reads the loss after the forward. Tensors that the backward creates for itself live only there. */
    const int loss = program->local[program->graph->loss];
    const bool kept = read_later || (loss >= 0 && program->tensor[loss].root == tensor);
    return kept && whole->producer < program->graph->forward_count ? HAPT_REGION_SLOT : HAPT_REGION_WORKSPACE;
}

static int root_of(const struct hapt_program *program, int tensor)
{
    return program->tensor[program->local[tensor]].root;
}

static void keep_boundary(const struct hapt_program *program, const struct hapt_boundary *boundary,
                          enum hapt_region *region)
{
    for (int b = 0; b < boundary->count; b++) region[root_of(program, boundary->tensor[b])] = HAPT_REGION_SLOT;
}

enum hapt_status hapt_lifetime_derive(const struct hapt_program *program, struct hapt_arena *arena,
                                      enum hapt_region *region, struct hapt_lifetime **lifetime)
{
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        HAPT_NEW(lifetime[section], arena, program->tensor_count);
        for (int t = 0; t < program->tensor_count; t++) lifetime[section][t] = (struct hapt_lifetime){0, -1};
        walk(program, section, lifetime[section]);
    }
    struct hapt_lifetime *backward = lifetime[HAPT_SECTION_BACKWARD], *weight = lifetime[HAPT_SECTION_WEIGHT];
    for (int t = 0; t < program->tensor_count; t++)
        if (program->tensor[t].root == t) region[t] = region_of(program, t, alive(backward[t]) || alive(weight[t]));
    keep_boundary(program, &program->forward_in, region);
    keep_boundary(program, &program->forward_out, region);
    for (int b = 0; b < program->backward_in.count; b++)
        backward[root_of(program, program->backward_in.tensor[b])].first = -1;
    for (int b = 0; b < program->backward_out.count; b++)
        backward[root_of(program, program->backward_out.tensor[b])].last = program->step_count[HAPT_SECTION_BACKWARD];
    for (int t = 0; t < program->tensor_count; t++) /* tensors that BACKWARD keeps for WEIGHT, which runs later */
        if (region[t] == HAPT_REGION_WORKSPACE && alive(backward[t]) && alive(weight[t]))
            region[t] = HAPT_REGION_WEIGHT_SLOT;
    for (int t = 0; t < program->tensor_count; t++) region[t] = region[program->tensor[t].root];
    return HAPT_OK;
}
