/* The layout of a stage applied to a model. */
#include "hapt/plan.h"

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
