/* Inputs of hapt evaluate and hapt generate: a model with weights, and a plan to run it. */
#ifndef HAPT_COMMAND_FORWARD_H
#define HAPT_COMMAND_FORWARD_H

#include "phases.h"

struct forward {
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_checkpoint *checkpoint; /* NULL: the weights of the model file */
    struct hapt_plan *plan;
};

/* HAPT_ERR_USAGE: modelled devices, which compute no `result`; no plan. Rank-local. */
enum hapt_status forward_check_options(const struct hapt_config *config, const char *result);
/* --input, --checkpoint, --cluster, and --plan or the checkpoint's plan. `check` (may be NULL) looks at the model
 * first. Collective over env->world; ends in agreement. */
enum hapt_status forward_prepare(struct hapt_env *env, struct hapt_config *config,
                                 enum hapt_status (*check)(const struct hapt_model *model), struct hapt_arena *arena,
                                 struct forward *forward);

#endif
