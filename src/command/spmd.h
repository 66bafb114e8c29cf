/* What hapt spmd finds, for its two printers. */
#ifndef HAPT_COMMAND_SPMD_H
#define HAPT_COMMAND_SPMD_H

#include "hapt/alternate.h"
#include "hapt/spmd_mesh.h"
#include "phases.h"

struct spmd_baseline { /* data parallelism (HAP 7.1) */
    const char *name;
    bool exists;             /* the rows can be shared out so */
    double cost_s;           /* a step */
    double compute_s, end_s; /* of it: computation; sums of gradients */
    double memory_bytes;
    bool fits;
};
enum { SPMD_EVEN, SPMD_PROPORTIONAL, SPMD_BASELINES };

struct spmd_outcome {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_spmd_mesh *mesh;
    int microbatches;
    struct hapt_alternation_result result;
    double *memory_bytes; /* [mesh->size] of one real device */
    struct spmd_baseline baseline[SPMD_BASELINES];
    const struct hapt_sharding *sharding; /* the program applied */
};

void spmd_print(const struct hapt_env *env, const struct spmd_outcome *outcome);
/* Programs of layers, unlike ones once or all. */
enum hapt_status spmd_print_program(const struct spmd_outcome *outcome, bool full, struct hapt_arena *arena);
/* A plan of one stage on all devices of the cluster, and its program. HAPT_ERR_USAGE where it is no stage of a plan,
 * HAPT_ERR_INFEASIBLE where it does not fit. */
enum hapt_status spmd_save_plan(const struct spmd_outcome *outcome, int optimizer_states, const char *path,
                                struct hapt_arena *arena);
enum hapt_status spmd_print_json(const struct spmd_outcome *outcome);

#endif
