/*
 * Layouts: named programs of both axes of a mesh. Profiles and plans hold the layouts that are not plain data- or
 * tensor-parallel. A stage is a range of a graph with such a layout.
 *
 * In a file, layout k (from 1) is a group program_k with attributes name and axes (sizes of both). Every axis a with a
 * program has the tables axis_a_ratio [R][size] (absent: even) and axis_a_instructions [I][17]. Their columns are: op;
 * letter, blocks, unit and ratio of its cut; tensor; kind of collective; then kind, dim, blocks, unit and ratio of the
 * property before and of the one after. A computation has op >= 0, a communication -1.
 */
#ifndef HAPT_LAYOUT_H
#define HAPT_LAYOUT_H

#include "hapt/h5.h"
#include "hapt/sharding.h"

#define HAPT_LAYOUT_NAME 64
#define HAPT_MAX_LAYOUTS 4096 /* in one profile or plan */

/* The layout of a graph's operators over a mesh. */
struct hapt_stage_layout {
    struct hapt_axis axis[HAPT_MESH_AXES];
    const struct hapt_axis_program *program[HAPT_MESH_AXES]; /* NULL on an axis of one rank */
    char name[HAPT_LAYOUT_NAME];                             /* for printing */
};

/* How the operators of a chunk are shared out over nodes x devices_per_node devices. */
enum hapt_layout_kind {
    HAPT_LAYOUT_DATA,   /* even rows on both axes */
    HAPT_LAYOUT_TENSOR, /* groups of `tensor_parallel` neighbouring devices; the groups are data-parallel */
    HAPT_LAYOUT_ROWS,   /* one axis of all devices, each with its `ratio` of the rows of a microbatch */
    HAPT_LAYOUT_PROGRAM /* a program of both axes (HAP) */
};
struct hapt_layout {
    enum hapt_layout_kind kind;
    int tensor_parallel; /* 1 unless the kind is TENSOR; 0 in a question: any layout */
    int number;          /* PROGRAM: k >= 1, layout k of the profile; else 0 */
    const struct hapt_stage_layout *program;
    const double *ratio;          /* [devices] share of the work of each; NULL: even or unknown */
    int recompute;                /* hapt_submesh.recompute; -1 in a question: any */
    int unit_count;               /* units that recompute; 0: none, or the operators are unknown */
    const struct hapt_unit *unit; /* in order */
    int weights_at;               /* hapt_submesh.weights_at; -1 in a question: any */
    int weight_unit_count;        /* with it: the units whose weights are fetched; 0: the operators are unknown */
    const struct hapt_unit *weight_unit;
};
/* The number of units that recompute selectively. */
static inline int hapt_layout_selective_units(const struct hapt_layout *layout)
{
    int count = 0;
    for (int u = 0; u < layout->unit_count; u++) count += layout->unit[u].selective;
    return count;
}
/* DATA or TENSOR, by the degree. */
static inline struct hapt_layout hapt_layout_plain(int tensor_parallel)
{
    return (struct hapt_layout){.kind = tensor_parallel > 1 ? HAPT_LAYOUT_TENSOR : HAPT_LAYOUT_DATA,
                                .tensor_parallel = tensor_parallel};
}
/* The graph sharded by a layout, as the first device sees it. `rows` of a microbatch; `name` of the chunk, for errors.
 * HAPT_ERR_INPUT: a device would get less than half of a row; HAPT_ERR_INFEASIBLE: the program is of another graph. */
enum hapt_status hapt_layout_shard(const struct hapt_layout *layout, const struct hapt_graph *graph, int nodes,
                                   int devices_per_node, int rows, const char *name, struct hapt_arena *arena,
                                   struct hapt_sharding **sharding);

/* The graph sharded by this layout, as mesh coordinates (0, 0) see it. HAPT_ERR_INFEASIBLE if a program does not
 * belong to this graph. */
enum hapt_status hapt_stage_layout_apply(const struct hapt_stage_layout *layout, const struct hapt_graph *graph,
                                         struct hapt_arena *arena, struct hapt_sharding **sharding);
/* True for the same instructions over the same axes; names are ignored. */
bool hapt_stage_layout_same(const struct hapt_stage_layout *a, const struct hapt_stage_layout *b);

/* Writes a layout into one block, which other ranks can read, and returns its bytes. `block` NULL: only counts. */
size_t hapt_stage_layout_pack(const struct hapt_stage_layout *layout, void *block);
/* The layout of a block, which must outlive it. A block starts at a multiple of 8 bytes. */
enum hapt_status hapt_stage_layout_unpack(void *block, struct hapt_arena *arena,
                                          const struct hapt_stage_layout **layout);
/* Everything lives in `arena`. */
enum hapt_status hapt_stage_layout_copy(const struct hapt_stage_layout *layout, struct hapt_arena *arena,
                                        const struct hapt_stage_layout **copy);

/* Layout k under `group` ("" for the root of a file). */
enum hapt_status hapt_stage_layout_write(struct hapt_h5 *file, const char *group, int k,
                                         const struct hapt_stage_layout *layout);
bool hapt_stage_layout_exists(struct hapt_h5 *file, const char *group, int k);
/* Invalid content fails with HAPT_ERR_INPUT, as far as a table alone can show it. hapt_stage_layout_apply checks
 * that it is a program of a graph. */
enum hapt_status hapt_stage_layout_read(struct hapt_h5 *file, const char *group, int k, struct hapt_arena *arena,
                                        struct hapt_stage_layout **layout);

#endif
