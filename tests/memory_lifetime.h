/* Regions and lifetimes of a program's tensors, and the workspace of its sections, derived from its steps alone. */
#ifndef HAPT_TEST_MEMORY_LIFETIME_H
#define HAPT_TEST_MEMORY_LIFETIME_H

#include <stdlib.h>

#include "../src/memory/gaps.h"
#include "../src/memory/tensor_bytes.h"

/* Steps of one section during which a workspace tensor keeps its memory, both ends included. Incoming gradients live
 * from -1 (copied in before the first step), outgoing ones to step_count (copied out after the last). */
struct lifetime {
    int first, last;
};

static void lifetime_touch(struct lifetime *lifetime, int step)
{
    if (lifetime->last < lifetime->first) lifetime->first = step;
    lifetime->last = step;
}

static bool lifetime_alive(struct lifetime lifetime)
{
    return lifetime.first <= lifetime.last;
}

static void lifetime_walk(const struct hapt_program *program, enum hapt_section section, struct lifetime *lifetime)
{
    for (int s = 0; s < program->step_count[section]; s++) {
        const struct hapt_op *op = &program->graph->op[program->step[section][s].op];
        for (int i = 0; i < op->input_count; i++)
            if (op->input[i] >= 0) lifetime_touch(&lifetime[program->tensor[program->local[op->input[i]]].root], s);
        for (int o = 0; o < op->output_count; o++)
            if (op->output[o] >= 0) lifetime_touch(&lifetime[program->tensor[program->local[op->output[o]]].root], s);
    }
}

/* `read_later`: backward operators of either section touch the tensor. */
static enum hapt_region lifetime_region_of(const struct hapt_program *program, int tensor, bool read_later)
{
    const struct hapt_tensor *whole = &program->graph->tensor[program->tensor[tensor].tensor];
    switch (whole->kind) {
    case HAPT_TENSOR_PARAMETER: return HAPT_REGION_RESIDENT;
    /* A scalar serves the whole step; tokens and targets differ by microbatch. */
    case HAPT_TENSOR_INPUT: return hapt_role_is_scalar(whole->role) ? HAPT_REGION_RESIDENT : HAPT_REGION_SLOT;
    case HAPT_TENSOR_GRADIENT:
        return hapt_graph_is_parameter_gradient(program->graph, program->tensor[tensor].tensor) ? HAPT_REGION_RESIDENT
                                                                                                : HAPT_REGION_WORKSPACE;
    case HAPT_TENSOR_ACTIVATION: break;
    }
    /* The trainer reads the loss after the forward. Tensors that the backward creates for itself live only there. */
    const int loss = program->local[program->graph->loss];
    const bool kept = read_later || (loss >= 0 && program->tensor[loss].root == tensor);
    return kept && whole->producer < program->graph->forward_count ? HAPT_REGION_SLOT : HAPT_REGION_WORKSPACE;
}

static int lifetime_root_of(const struct hapt_program *program, int tensor)
{
    return program->tensor[program->local[tensor]].root;
}

static void lifetime_keep_boundary(const struct hapt_program *program, const struct hapt_boundary *boundary,
                                   enum hapt_region *region)
{
    for (int b = 0; b < boundary->count; b++) region[lifetime_root_of(program, boundary->tensor[b])] = HAPT_REGION_SLOT;
}

/* Region of every program tensor. lifetime[section][tensor], for tensors with memory of their own
 * (hapt_program_tensor.root), covers all tensors that share it; {0, -1}: the section does not touch it. */
static enum hapt_status lifetime_derive(const struct hapt_program *program, struct hapt_arena *arena,
                                        enum hapt_region *region, struct lifetime **lifetime)
{
    for (int section = 0; section < HAPT_SECTION_REDUCE; section++) {
        HAPT_NEW(lifetime[section], arena, program->tensor_count);
        for (int t = 0; t < program->tensor_count; t++) lifetime[section][t] = (struct lifetime){0, -1};
        lifetime_walk(program, section, lifetime[section]);
    }
    struct lifetime *backward = lifetime[HAPT_SECTION_BACKWARD], *weight = lifetime[HAPT_SECTION_WEIGHT];
    for (int t = 0; t < program->tensor_count; t++)
        if (program->tensor[t].root == t)
            region[t] = lifetime_region_of(program, t, lifetime_alive(backward[t]) || lifetime_alive(weight[t]));
    lifetime_keep_boundary(program, &program->forward_in, region);
    lifetime_keep_boundary(program, &program->forward_out, region);
    for (int b = 0; b < program->backward_in.count; b++)
        backward[lifetime_root_of(program, program->backward_in.tensor[b])].first = -1;
    for (int b = 0; b < program->backward_out.count; b++)
        backward[lifetime_root_of(program, program->backward_out.tensor[b])].last =
            program->step_count[HAPT_SECTION_BACKWARD];
    for (int t = 0; t < program->tensor_count; t++) /* tensors that BACKWARD keeps for WEIGHT, which runs later */
        if (region[t] == HAPT_REGION_WORKSPACE && lifetime_alive(backward[t]) && lifetime_alive(weight[t]))
            region[t] = HAPT_REGION_WEIGHT_SLOT;
    for (int t = 0; t < program->tensor_count; t++) region[t] = region[program->tensor[t].root];
    return HAPT_OK;
}

struct lifetime_event {
    int step;
    int key; /* hapt_sharding.storage: gives tensors the same order in every range */
    int tensor;
};

static int lifetime_compare(const void *a, const void *b)
{
    const struct lifetime_event *x = a, *y = b;
    if (x->step != y->step) return x->step < y->step ? -1 : 1;
    return x->key < y->key ? -1 : x->key > y->key;
}

/* Offsets [tensor] of a section's workspace tensors, in order of birth; *bytes: the peak. */
static enum hapt_status lifetime_lay_out(const struct hapt_program *program, const enum hapt_region *region,
                                         const struct lifetime *lifetime, struct hapt_arena *arena, size_t *offset,
                                         size_t *bytes)
{
    struct lifetime_event *birth, *death;
    struct hapt_gaps gaps = {0};
    int count = 0, dead = 0;
    HAPT_NEW(birth, arena, program->tensor_count);
    HAPT_NEW(death, arena, program->tensor_count);
    HAPT_NEW(gaps.gap, arena, program->tensor_count + 1);
    for (int t = 0; t < program->tensor_count; t++) {
        if (region[t] != HAPT_REGION_WORKSPACE || program->tensor[t].root != t) continue;
        if (!lifetime_alive(lifetime[t])) continue;
        const int key = program->sharding->storage[program->tensor[t].tensor];
        birth[count] = (struct lifetime_event){lifetime[t].first, key, t};
        death[count++] = (struct lifetime_event){lifetime[t].last, key, t};
    }
    qsort(birth, (size_t)count, sizeof *birth, lifetime_compare);
    qsort(death, (size_t)count, sizeof *death, lifetime_compare);
    for (int b = 0; b < count; b++) {
        for (; dead < count && death[dead].step < birth[b].step; dead++)
            hapt_gaps_give(&gaps, offset[death[dead].tensor], hapt_align(tensor_bytes(program, death[dead].tensor)));
        offset[birth[b].tensor] = hapt_gaps_take(&gaps, hapt_align(tensor_bytes(program, birth[b].tensor)));
    }
    *bytes = gaps.end;
    return HAPT_OK;
}

#endif
