/*
 * Layouts: programs of both axes of a mesh, under a name. Profiles and plans hold those that are neither plain data-
 * nor tensor-parallel; a stage is a range of a graph that is laid out so.
 *
 * In a file layout k (counted from 1) is a group program_k: attributes name and axes (sizes of both); for every axis a
 * that has a program the tables axis_a_ratio [R][size] (absent: evenly) and axis_a_instructions [I][17]: op, letter,
 * blocks, unit and ratio of its cut, tensor, kind of collective, then kind, dim, blocks, unit and ratio of the property
 * it has and of the one it gets. A computation has op >= 0, a communication -1.
 */
#ifndef HAPT_LAYOUT_H
#define HAPT_LAYOUT_H

#include "hapt/h5.h"
#include "hapt/sharding.h"

#define HAPT_LAYOUT_NAME 64
#define HAPT_MAX_LAYOUTS 4096 /* of a profile or a plan */

/* How a graph's operators are laid out over a mesh. */
struct hapt_stage_layout {
    struct hapt_axis axis[HAPT_MESH_AXES];
    const struct hapt_axis_program *program[HAPT_MESH_AXES]; /* NULL on an axis of one rank */
    char name[HAPT_LAYOUT_NAME];                             /* what people read */
};

/* The graph sharded so, as place (0, 0) sees it. HAPT_ERR_INFEASIBLE where a program is not of this graph. */
enum hapt_status hapt_stage_layout_apply(const struct hapt_stage_layout *layout, const struct hapt_graph *graph,
                                         struct hapt_arena *arena, struct hapt_sharding **sharding);
/* The same instructions over the same axes, whatever they are called. */
bool hapt_stage_layout_same(const struct hapt_stage_layout *a, const struct hapt_stage_layout *b);

/* All of it in `arena`. */
enum hapt_status hapt_stage_layout_copy(const struct hapt_stage_layout *layout, struct hapt_arena *arena,
                                        const struct hapt_stage_layout **copy);

/* Layout k under `group` ("" for the root of a file). */
enum hapt_status hapt_stage_layout_write(struct hapt_h5 *file, const char *group, int k,
                                         const struct hapt_stage_layout *layout);
bool hapt_stage_layout_exists(struct hapt_h5 *file, const char *group, int k);
/* Hostile content fails with HAPT_ERR_INPUT: what a table can say wrong by itself. That it is a program of a graph is
 * proven where it is applied. */
enum hapt_status hapt_stage_layout_read(struct hapt_h5 *file, const char *group, int k, struct hapt_arena *arena,
                                        struct hapt_stage_layout **layout);

#endif
