/* Layouts: applying, comparing, packing and copying. */
#include "hapt/layout.h"

#include <string.h>

enum hapt_status hapt_stage_layout_apply(const struct hapt_stage_layout *layout, const struct hapt_graph *graph,
                                         struct hapt_arena *arena, struct hapt_sharding **sharding)
{
    struct hapt_sharding *made;
    HAPT_TRY(hapt_sharding_trivial(graph, arena, &made));
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
        HAPT_TRY(hapt_sharding_apply(made, axis, &layout->axis[axis], layout->program[axis], arena, &made));
    *sharding = made;
    return HAPT_OK;
}

static enum hapt_status shard_rows(const struct hapt_layout *layout, const struct hapt_graph *graph, int ranks,
                                   int rows, const char *name, struct hapt_arena *arena,
                                   struct hapt_sharding **sharding)
{
    const struct hapt_axis axis = {.size = ranks, .ratio_count = layout->ratio ? 1 : 0, .ratio = layout->ratio};
    for (int r = 0; layout->ratio && r < ranks; r++)
        if (layout->ratio[r] * rows < 0.5)
            return hapt_fail(HAPT_ERR_INPUT, "plan with more --microbatch-rows, or other ratios",
                             "%s gives device %d of %d a share of %g, less than half of one of %d rows", name, r, ranks,
                             layout->ratio[r], rows);
    return hapt_sharding_rows(graph, &axis, arena, sharding);
}

static enum hapt_status shard(const struct hapt_layout *layout, const struct hapt_graph *graph, int nodes,
                              int devices_per_node, int rows, const char *name, struct hapt_arena *arena,
                              struct hapt_sharding **sharding)
{
    const int ranks = nodes * devices_per_node, degree = layout->tensor_parallel;
    switch (layout->kind) {
    case HAPT_LAYOUT_DATA: return hapt_sharding_data_parallel(graph, nodes, devices_per_node, arena, sharding);
    case HAPT_LAYOUT_TENSOR: return hapt_sharding_tensor_parallel(graph, ranks / degree, degree, arena, sharding);
    case HAPT_LAYOUT_ROWS: return shard_rows(layout, graph, ranks, rows, name, arena, sharding);
    case HAPT_LAYOUT_PROGRAM: return hapt_stage_layout_apply(layout->program, graph, arena, sharding);
    }
    return HAPT_ERR_INTERNAL;
}

enum hapt_status hapt_layout_shard(const struct hapt_layout *layout, const struct hapt_graph *graph, int nodes,
                                   int devices_per_node, int rows, const char *name, struct hapt_arena *arena,
                                   struct hapt_sharding **sharding)
{
    HAPT_TRY(shard(layout, graph, nodes, devices_per_node, rows, name, arena, sharding));
    if (layout->unit_count == 0) return HAPT_OK;
    for (int u = 0; u < layout->unit_count; u++)
        if (!hapt_sharding_allows(*sharding, layout->unit[u].first_op, layout->unit[u].end_op))
            return hapt_fail(HAPT_ERR_INPUT, "plan again",
                             "%s cannot recompute operators [%d, %d): partial sums would cross their ends", name,
                             layout->unit[u].first_op, layout->unit[u].end_op);
    return hapt_sharding_recompute(*sharding, layout->unit, layout->unit_count, arena, sharding);
}

static bool same_cut(struct hapt_cut a, struct hapt_cut b)
{
    return a.letter == b.letter && a.blocks == b.blocks && a.unit == b.unit && a.ratio == b.ratio;
}

static bool same_instruction(const struct hapt_axis_instruction *a, const struct hapt_axis_instruction *b)
{
    if (a->op != b->op) return false;
    if (a->op >= 0) return same_cut(a->cut, b->cut);
    return a->tensor == b->tensor && a->kind == b->kind && hapt_property_same(a->from, b->from) &&
           hapt_property_same(a->to, b->to);
}

static bool same_axis(const struct hapt_axis *a, const struct hapt_axis *b)
{
    if (a->size != b->size || !a->ratio != !b->ratio) return false;
    if (!a->ratio) return true;
    return a->ratio_count == b->ratio_count &&
           memcmp(a->ratio, b->ratio, (size_t)a->ratio_count * (size_t)a->size * sizeof *a->ratio) == 0;
}

bool hapt_stage_layout_same(const struct hapt_stage_layout *a, const struct hapt_stage_layout *b)
{
    for (int axis = 0; axis < HAPT_MESH_AXES; axis++) {
        const struct hapt_axis_program *x = a->program[axis], *y = b->program[axis];
        if (!same_axis(&a->axis[axis], &b->axis[axis]) || !x != !y || (x && x->count != y->count)) return false;
        for (int i = 0; x && i < x->count; i++)
            if (!same_instruction(&x->instruction[i], &y->instruction[i])) return false;
    }
    return true;
}

static size_t rounded(size_t bytes)
{
    return (bytes + 7) / 8 * 8;
}

static size_t ratio_bytes(const struct hapt_axis *axis)
{
    return (size_t)axis->ratio_count * (size_t)axis->size * sizeof *axis->ratio;
}

static void put(char *block, size_t *used, const void *from, size_t bytes)
{
    if (block && bytes > 0) memcpy(block + *used, from, bytes);
    *used += rounded(bytes);
}

size_t hapt_stage_layout_pack(const struct hapt_stage_layout *layout, void *block)
{
    size_t used = 0;
    put(block, &used, layout, sizeof *layout);
    for (int a = 0; a < HAPT_MESH_AXES; a++) {
        const struct hapt_axis_program *program = layout->program[a];
        if (layout->axis[a].ratio) put(block, &used, layout->axis[a].ratio, ratio_bytes(&layout->axis[a]));
        if (!program) continue;
        put(block, &used, program, sizeof *program);
        put(block, &used, program->instruction, (size_t)program->count * sizeof *program->instruction);
    }
    return used;
}

static void *take(char **block, size_t bytes)
{
    void *piece = *block;
    *block += rounded(bytes);
    return piece;
}

enum hapt_status hapt_stage_layout_unpack(void *block, struct hapt_arena *arena,
                                          const struct hapt_stage_layout **layout)
{
    char *at = block;
    struct hapt_stage_layout *made;
    HAPT_NEW(made, arena, 1);
    *made = *(const struct hapt_stage_layout *)take(&at, sizeof *made);
    for (int a = 0; a < HAPT_MESH_AXES; a++) { /* the packer's pointers: compare with NULL only */
        struct hapt_axis_program *program;
        if (made->axis[a].ratio) made->axis[a].ratio = take(&at, ratio_bytes(&made->axis[a]));
        if (!made->program[a]) continue;
        HAPT_NEW(program, arena, 1);
        *program = *(const struct hapt_axis_program *)take(&at, sizeof *program);
        program->instruction = take(&at, (size_t)program->count * sizeof *program->instruction);
        made->program[a] = program;
    }
    *layout = made;
    return HAPT_OK;
}

enum hapt_status hapt_stage_layout_copy(const struct hapt_stage_layout *layout, struct hapt_arena *arena,
                                        const struct hapt_stage_layout **copy)
{
    char *block;
    HAPT_NEW(block, arena, hapt_stage_layout_pack(layout, NULL));
    hapt_stage_layout_pack(layout, block);
    return hapt_stage_layout_unpack(block, arena, copy);
}
