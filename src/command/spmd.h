/* Results of hapt spmd, for its printers and its plan. Private to src/command. */
#ifndef HAPT_COMMAND_SPMD_H
#define HAPT_COMMAND_SPMD_H

#include "hapt/alternate.h"
#include "hapt/spmd_mesh.h"
#include "phases.h"

struct spmd_baseline { /* data parallelism (HAP 7.1) */
    const char *name;
    bool exists;             /* the rows can be split this way */
    double cost_s;           /* per step */
    double compute_s, end_s; /* parts of cost_s: computation; gradient sums */
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
    double *memory_bytes; /* [mesh->size] per real device */
    struct spmd_baseline baseline[SPMD_BASELINES];
    const struct hapt_sharding *sharding; /* the graph with the program applied */
};

void spmd_print(const struct hapt_env *env, const struct spmd_outcome *outcome);
/* Prints the programs of the layers: one of each kind, or with `full` all. */
enum hapt_status spmd_print_program(const struct hapt_env *env, const struct spmd_outcome *outcome, bool full,
                                    struct hapt_arena *arena);
/* Saves a plan of one stage on all devices of the cluster, with its program. HAPT_ERR_USAGE if a plan cannot hold such
 * a stage, HAPT_ERR_INFEASIBLE if it does not fit the devices' memory. */
enum hapt_status spmd_save_plan(const struct spmd_outcome *outcome, int optimizer_states, const char *path,
                                struct hapt_arena *arena);
enum hapt_status spmd_print_json(const struct spmd_outcome *outcome);

#endif
