/* Shardings: over one rank, for another rank, their valid ranges, hashes of equal ranges. */
#include <string.h>

#include "hapt/env.h"
#include "localise.h"
#include "weight.h"

enum hapt_status hapt_sharding_trivial(const struct hapt_graph *graph, struct hapt_arena *arena,
                                       struct hapt_sharding **sharding)
{
    struct hapt_sharding *made;
    HAPT_NEW(made, arena, 1);
    *made = (struct hapt_sharding){
        .source = graph, .graph = graph, .axis = {{.size = 1}, {.size = 1}}, .reduce_first = graph->op_count};
    HAPT_NEW(made->property, arena, graph->tensor_count);
    HAPT_NEW(made->cut, arena, graph->op_count);
    HAPT_NEW(made->first_rank_inputs, arena, graph->op_count);
    HAPT_NEW(made->exchange, arena, graph->op_count);
    HAPT_NEW(made->origin, arena, graph->tensor_count);
    HAPT_NEW(made->source_op, arena, graph->op_count);
    HAPT_NEW(made->storage, arena, graph->tensor_count);
    HAPT_NEW(made->not_a_boundary, arena, graph->forward_count + 1);
    for (int t = 0; t < graph->tensor_count; t++) made->origin[t] = made->storage[t] = t;
    for (int o = 0; o < graph->op_count; o++) {
        made->exchange[o] = -1;
        made->source_op[o] = o;
    }
    HAPT_TRY(localise(made, arena));
    HAPT_TRY(find_weight_operators(made, arena));
    *sharding = made;
    return HAPT_OK;
}

enum hapt_status hapt_sharding_at(const struct hapt_sharding *sharding, const int *mesh_coordinate,
                                  struct hapt_arena *arena, struct hapt_sharding **local)
{
    struct hapt_sharding *made;
    HAPT_NEW(made, arena, 1);
    *made = *sharding;
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        HAPT_ASSERT(mesh_coordinate[axis] >= 0 && mesh_coordinate[axis] < sharding->axis[axis].size);
        made->mesh_coordinate[axis] = mesh_coordinate[axis];
    }
    HAPT_TRY(localise(made, arena));
    *local = made;
    return HAPT_OK;
}

double hapt_sharding_exchange_bytes(const struct hapt_graph *shard, int op)
{
    const struct hapt_op *of = &shard->op[op];
    const int last = of->output[of->output_count - 1];
    return hapt_op_type_at(of->type)->inner_all_reduces * (double)sizeof(float) *
           (double)hapt_tensor_elements(&shard->tensor[last]);
}

bool hapt_sharding_allows(const struct hapt_sharding *sharding, int first_op, int end_op)
{
    return !sharding->not_a_boundary[first_op] && !sharding->not_a_boundary[end_op];
}

static void mix_into(uint64_t *hash, int64_t value)
{
    *hash = hapt_hash_word(*hash, value);
}

static void mix_property(uint64_t *hash, struct hapt_property property)
{
    mix_into(hash, property.kind);
    if (property.kind != HAPT_PROPERTY_SHARDED) return;
    mix_into(hash, property.dim);
    mix_into(hash, property.blocks);
    mix_into(hash, property.unit);
    mix_into(hash, property.ratio);
}

void hapt_sharding_hash(const struct hapt_sharding *sharding, uint64_t *hash)
{
    const struct hapt_graph *graph = sharding->graph;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        uint64_t *its = &hash[sharding->source_op[o]];
        mix_into(its, op->type);
        mix_into(its, sharding->exchange[o]);
        if (hapt_op_type_at(op->type)->collective)
            for (int k = 0; k < 3; k++) mix_into(its, op->integer[k]);
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
            mix_into(its, sharding->first_rank_inputs[o][axis]);
            mix_into(its, sharding->cut[o][axis].letter);
            for (int k = 0; k < op->input_count + op->output_count; k++) {
                const int tensor = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
                if (tensor >= 0) mix_property(its, sharding->property[tensor][axis]);
            }
        }
    }
}

enum hapt_status hapt_axis_program_copy(const struct hapt_axis_program *program, struct hapt_arena *arena,
                                        struct hapt_axis_program *copy)
{
    *copy = (struct hapt_axis_program){.count = program->count};
    if (program->count == 0) return HAPT_OK;
    HAPT_NEW(copy->instruction, arena, program->count);
    memcpy(copy->instruction, program->instruction, (size_t)program->count * sizeof *copy->instruction);
    return HAPT_OK;
}
