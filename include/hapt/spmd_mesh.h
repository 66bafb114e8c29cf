/*
 * A cluster as one mesh axis of HAP, and the costs of a model on it. The axis consists of its devices, or of its
 * machines as virtual devices (HAP 3, 6).
 *
 * An operator costs the roofline of its share on one device (the efficiency tables of prediction). Collectives between
 * devices use the cluster file's figures for that many ranks; without them, they are rings over the slowest link on the
 * ring. A machine shares its rows among its devices once more: all devices hold its tensors in full, except for their
 * rows. Collectives gather or sum inside a machine, run between machines, then scatter or broadcast inside. A gradient
 * that needs nothing from other machines is still summed inside.
 */
#ifndef HAPT_SPMD_MESH_H
#define HAPT_SPMD_MESH_H

#include "hapt/cluster.h"
#include "hapt/calibration.h"
#include "hapt/collective_cost.h"
#include "hapt/profile.h"
#include "hapt/synthesis.h"

enum hapt_spmd_mesh_kind { HAPT_SPMD_DEVICES, HAPT_SPMD_MACHINES };

struct hapt_spmd_mesh {
    enum hapt_spmd_mesh_kind kind;
    int size;
    int *subcluster;        /* [size] index in the cluster */
    int *devices;           /* [size] real devices in each; 1 unless kind is machines */
    double *power;          /* [size] speed: 1 / seconds of the full graph */
    double *memory_bytes;   /* [size] per real device */
    const double *update_s; /* [size] seconds per step to update one element of a parameter; NULL: updates are free */
    struct hapt_collective_model collectives; /* between the devices of the axis */
    struct hapt_spmd_costs costs;
    struct hapt_spmd_costs memory_costs; /* the same, with tensors as held by one real device of the smallest machine */
};

/* All devices of the cluster, in its order. `efficiency` NULL: the built-in tables. HAPT_ERR_INPUT if a link is
 * unknown or there is only one device. Refers to graph, cluster and efficiency; lives in `arena`. Rank-local. */
enum hapt_status hapt_spmd_mesh_build(const struct hapt_cluster *cluster, const struct hapt_graph *graph,
                                      enum hapt_dtype dtype, enum hapt_spmd_mesh_kind kind,
                                      const struct hapt_efficiency *efficiency, int microbatches,
                                      struct hapt_arena *arena, struct hapt_spmd_mesh **mesh);

#endif
