/* Programs: the part of a sharded graph that belongs to one range. */
#include <string.h>

#include "expansion.h"

#include "hapt/program.h"

static bool in_range(const struct hapt_op *op, int first_op, int end_op)
{
    return op->forward_op >= first_op && op->forward_op < end_op;
}

/* Uses of a tensor, relative to the range. */
enum { READ_HERE = 1, WRITTEN_HERE = 2, READ_BEHIND = 4, WRITTEN_BEHIND = 8, TOUCHED_BEFORE = 16, FIRST_BEHIND = 32 };

struct uses {
    unsigned *of;     /* [graph->tensor_count] versions */
    unsigned *origin; /* [graph->tensor_count] by source tensor: all versions together */
    bool *here;       /* [graph->op_count] operators of the range */
};

static void mark_op(const struct hapt_op *op, const struct hapt_program *program, unsigned *use)
{
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

/* Sums of parameter gradients belong to every range that writes into them: each range has its copy of a tied
 * parameter. */
static void mark_uses(const struct hapt_program *program, const struct hapt_sharding *sharding, struct uses *uses)
{
    const struct hapt_graph *graph = program->graph;
    for (int o = 0; o < sharding->reduce_first; o++) {
        mark_op(&graph->op[o], program, uses->of);
        uses->here[o] = in_range(&graph->op[o], program->first_op, program->end_op);
    }
    for (int o = sharding->reduce_first; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        if (!(uses->of[op->input[0]] & WRITTEN_HERE)) continue;
        uses->here[o] = true;
        uses->of[op->input[0]] |= READ_HERE;
        uses->of[op->output[0]] |= WRITTEN_HERE;
    }
    for (int t = 0; t < graph->tensor_count; t++) uses->origin[program->origin[t]] |= uses->of[t];
}

static bool is_partial(const struct hapt_sharding *sharding, int tensor)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        if (sharding->property[tensor][axis].kind == HAPT_PROPERTY_PARTIAL) return true;
    return false;
}

/* True if the tensor may represent its origin at that end of the range. */
static bool belongs(const struct hapt_program *program, int tensor, const struct uses *uses,
                    const struct hapt_boundary *boundary)
{
    const struct hapt_graph *graph = program->graph;
    const unsigned use = uses->of[tensor], all = uses->origin[program->origin[tensor]];
    const struct hapt_tensor *origin = &program->sharding->source->tensor[program->origin[tensor]];
    const bool activation = origin->kind == HAPT_TENSOR_ACTIVATION;
    const bool gradient =
        graph->tensor[tensor].kind == HAPT_TENSOR_GRADIENT && !hapt_graph_is_parameter_gradient(graph, tensor);
    if (boundary == &program->forward_in) return activation && (use & READ_HERE) && !(use & WRITTEN_HERE);
    if (boundary == &program->forward_out)
        return activation && (use & WRITTEN_HERE) && (all & READ_BEHIND) && origin->producer >= program->first_op &&
               graph->tensor[tensor].producer < graph->forward_count && !is_partial(program->sharding, tensor);
    if (boundary == &program->backward_in)
        return gradient && (use & (READ_HERE | WRITTEN_HERE)) && (use & FIRST_BEHIND);
    return gradient && (use & WRITTEN_HERE) && (use & TOUCHED_BEFORE);
}

/* One version of each origin leaves a range: the one with the lowest storage, if possible the one that its operator
 * makes. */
static enum hapt_status fill_boundary(struct hapt_program *program, const struct uses *uses, bool leaves,
                                      struct hapt_boundary *boundary, struct hapt_arena *arena,
                                      struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = program->graph;
    const int *storage = program->sharding->storage;
    int *chosen; /* [tensor] by origin: the version that leaves, + 1 */
    HAPT_NEW(chosen, scratch, graph->tensor_count);
    HAPT_NEW(boundary->tensor, arena, program->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        int *its = &chosen[program->origin[t]];
        if (!belongs(program, t, uses, boundary)) continue;
        if (!leaves)
            boundary->tensor[boundary->count++] = t;
        else if (*its == 0 || storage[t] < storage[*its - 1])
            *its = t + 1;
    }
    for (int t = 0; t < graph->tensor_count && leaves; t++)
        if (chosen[program->origin[t]] == t + 1) boundary->tensor[boundary->count++] = t;
    return HAPT_OK;
}

/* The program's tensors: all that its operators touch, ascending, with local shapes. */
static enum hapt_status fill_tensors(struct hapt_program *program, const struct uses *uses, struct hapt_arena *arena,
                                     struct hapt_arena *scratch)
{
    const struct hapt_sharding *sharding = program->sharding;
    const struct hapt_graph *graph = program->graph;
    int *root; /* [tensor] first program tensor of a storage, + 1 */
    HAPT_NEW(root, scratch, graph->tensor_count);
    HAPT_NEW(program->local, arena, graph->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++)
        program->local[t] = uses->of[t] & (READ_HERE | WRITTEN_HERE) ? program->tensor_count++ : -1;
    HAPT_NEW(program->tensor, arena, program->tensor_count);
    for (int t = 0; t < graph->tensor_count; t++) {
        if (program->local[t] < 0) continue;
        struct hapt_program_tensor *mine = &program->tensor[program->local[t]];
        mine->tensor = t;
        memcpy(mine->shape, sharding->shard->tensor[t].shape, sizeof mine->shape);
        memcpy(mine->property, sharding->property[t], sizeof mine->property);
        if (root[sharding->storage[t]] == 0) root[sharding->storage[t]] = program->local[t] + 1;
        mine->root = root[sharding->storage[t]] - 1;
        if (graph->tensor[t].kind == HAPT_TENSOR_INPUT) program->inputs |= 1 << graph->tensor[t].role;
    }
    return HAPT_OK;
}

static struct hapt_program_step step_of(const struct hapt_sharding *sharding, int o)
{
    const struct hapt_op *op = &sharding->graph->op[o];
    struct hapt_program_step step = {.op = o,
                                     .kind = hapt_op_type_at(op->type)->collective,
                                     .axis = sharding->exchange[o],
                                     .weight = sharding->weight[o]};
    if (step.kind != HAPT_COLLECTIVE_NONE) step.axis = (int)op->integer[0];
    memcpy(step.first_rank_inputs, sharding->first_rank_inputs[o], sizeof step.first_rank_inputs);
    return step;
}

static enum hapt_section section_of(const struct hapt_sharding *sharding, int o)
{
    if (o >= sharding->reduce_first) return HAPT_SECTION_REDUCE;
    if (sharding->split && sharding->weight[o]) return HAPT_SECTION_WEIGHT;
    return o < sharding->graph->forward_count ? HAPT_SECTION_FORWARD : HAPT_SECTION_BACKWARD;
}

static enum hapt_status fill_steps(struct hapt_program *program, const struct uses *uses, struct hapt_arena *arena)
{
    const struct hapt_sharding *sharding = program->sharding;
    int count[HAPT_SECTION_COUNT] = {0};
    for (int o = 0; o < sharding->graph->op_count; o++) count[section_of(sharding, o)] += uses->here[o];
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        HAPT_NEW(program->step[section], arena, count[section]);
    for (int o = 0; o < sharding->graph->op_count; o++) {
        if (!uses->here[o]) continue;
        const enum hapt_section section = section_of(sharding, o);
        program->step[section][program->step_count[section]++] = step_of(sharding, o);
    }
    return HAPT_OK;
}

static enum hapt_status fill(struct hapt_program *program, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_sharding *sharding = program->sharding;
    struct uses uses;
    if (!hapt_sharding_allows(sharding, program->first_op, program->end_op))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "move the stage boundary, or choose data parallelism for this stage",
                         "partial sums would cross a boundary of operators [%d, %d)", program->first_op,
                         program->end_op);
    HAPT_NEW(uses.of, scratch, program->graph->tensor_count);
    HAPT_NEW(uses.origin, scratch, program->graph->tensor_count);
    HAPT_NEW(uses.here, scratch, program->graph->op_count);
    mark_uses(program, sharding, &uses);
    HAPT_TRY(fill_tensors(program, &uses, arena, scratch));
    HAPT_TRY(fill_boundary(program, &uses, false, &program->forward_in, arena, scratch));
    HAPT_TRY(fill_boundary(program, &uses, true, &program->forward_out, arena, scratch));
    HAPT_TRY(fill_boundary(program, &uses, false, &program->backward_in, arena, scratch));
    HAPT_TRY(fill_boundary(program, &uses, true, &program->backward_out, arena, scratch));
    return fill_steps(program, &uses, arena);
}

enum hapt_status hapt_program_build(const struct hapt_sharding *sharding, int first_op, int end_op,
                                    struct hapt_arena *arena, struct hapt_program **program)
{
    HAPT_ASSERT(first_op >= 0 && first_op < end_op && end_op <= sharding->source->forward_count);
    struct hapt_program *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_program){.sharding = sharding,
                                  .graph = sharding->graph,
                                  .shard = sharding->shard,
                                  .origin = sharding->origin,
                                  .first_op = first_op,
                                  .end_op = end_op,
                                  .nodes = sharding->axis[0].size,
                                  .devices = sharding->axis[1].size};
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = fill(made, arena, &scratch);
    hapt_arena_release(&scratch);
    if (status == HAPT_OK) *program = made;
    return status;
}
