/*
 * A cluster as one mesh axis of HAP: its devices, or its machines as virtual devices (HAP 3, 6), and what a model costs
 * on them.
 *
 * An operator takes the roofline of its share on one device (the efficiency tables of prediction); collectives of
 * devices cost what the cluster tells of them over as many ranks, and are rings over the slowest link on the way round
 * where it tells nothing. A machine shares its part of the rows among its devices once more: its tensors are whole on
 * every device but for their rows; collectives are gathered or summed inside, run between the machines, and scattered
 * or broadcast inside; a gradient that needs nothing from other machines is still summed inside.
 */
#ifndef HAPT_SPMD_MESH_H
#define HAPT_SPMD_MESH_H

#include "hapt/cluster.h"
#include "hapt/collective_cost.h"
#include "hapt/profile.h"
#include "hapt/synthesis.h"

enum hapt_spmd_mesh_kind { HAPT_SPMD_DEVICES, HAPT_SPMD_MACHINES };

struct hapt_spmd_mesh {
    enum hapt_spmd_mesh_kind kind;
    int size;
    int *subcluster;        /* [size] of the cluster */
    int *devices;           /* [size] real devices in each; 1 unless machines */
    double *power;          /* [size] the whole model's operators a second */
    double *memory_bytes;   /* [size] of one real device */
    const double *update_s; /* [size] seconds a step in which an update changes one element of a parameter; NULL:
                               updates are free */
    struct hapt_collective_model collectives; /* between the devices of the axis */
    struct hapt_spmd_costs costs;
    struct hapt_spmd_costs
        memory_costs; /* the same with tensors as one real device of the smallest machine holds them */
};

/* All devices of the cluster, in its order. `efficiency` NULL: the built-in tables. HAPT_ERR_INPUT when a link is not
 * known or there is one device alone. Refers to graph, cluster and efficiency; lives in `arena`. Rank-local. */
enum hapt_status hapt_spmd_mesh_build(const struct hapt_cluster *cluster, const struct hapt_graph *graph,
                                      enum hapt_dtype dtype, enum hapt_spmd_mesh_kind kind,
                                      const struct hapt_efficiency *efficiency, int microbatches,
                                      struct hapt_arena *arena, struct hapt_spmd_mesh **mesh);

#endif
