/*
 * The differences between a stage whose device computes and one whose device is modelled (--device emulated): one table
 * of functions for each. Everything else of a run is the same code for both.
 *
 * On a modelled device computation lasts as long as the plan says. Messages are a header and a few bytes, throttled to
 * their modelled size. The weights are replaced by a sample, which the optimizer updates with gradients from a rule. So
 * a resumed run can be compared with an uninterrupted one. Communication inside the stage is part of its planned
 * computation time and sends nothing.
 */
#ifndef HAPT_TRAIN_RUNTIME_H
#define HAPT_TRAIN_RUNTIME_H

#include "stage.h"

struct stage_runtime {
    /* false: nothing is computed. There are no losses, norms or collectives inside a stage, and weights are samples. */
    bool computes;

    /* ---- Before the first step ---- */
    /* Gives the engine the collectives of the team. */
    void (*links)(struct hapt_team *team, struct hapt_engine_links *links);
    /* After the engines exist, on ranks with stages. Rank-local. */
    enum hapt_status (*prepare)(struct worker *worker, int state_count);
    /* The collectives of the stage: first over hosts, then over devices, with stage->group if it is not NULL. Ranks of
     * a stage; the caller agrees. */
    enum hapt_status (*connect_team)(struct stage *stage);
    enum hapt_status (*connect_devices)(struct stage *stage);
    /* Creates the communication thread. Collective over env->world. */
    enum hapt_status (*create_comm_thread)(struct worker *worker);
    /* Adds a flow to it. `paced` false: its time counts elsewhere if it is modelled. */
    enum hapt_status (*add_flow)(struct stage *stage, const struct hapt_flow_options *options, bool paced, int *flow);

    /* ---- Messages: as hapt_comm_thread_... (link.h) ---- */
    enum hapt_status (*wait_received)(struct stage *stage, int flow, int64_t sequence);
    enum hapt_status (*wait_sent)(struct stage *stage, int flow, int slot);
    void (*send)(struct stage *stage, int flow, int slot);
    void (*free)(struct stage *stage, int flow);

    /* ---- Instructions ---- */
    /* Before a forward or backward pass that takes `planned_s` in the plan. */
    void (*begin_pass)(struct stage *stage, double planned_s);
    /* Adds the loss of the microbatch in `slot` to stage->loss. Last stage, on the ranks that count it. */
    enum hapt_status (*add_loss)(struct stage *stage, int slot);
    /* REDUCE of a stage of several ranks. Collective over the stage. */
    enum hapt_status (*reduce)(struct stage *stage);
    /* End of EXCHANGE, which began at `start_s`. */
    void (*end_exchange)(struct worker *worker, double start_s);
    /* Start of NORM, for each stage. */
    void (*end_step)(struct stage *stage);
    enum hapt_status (*update)(struct stage *stage, int group, const struct hapt_update *update);

    /* ---- Rows of parameters (worker_next_block); state -1: weight ---- */
    /* The values before the first step. */
    enum hapt_status (*initial)(const struct worker *worker, int parameter, const struct hapt_rows *rows, float *value);
    /* gather: gathers rows of a weight or optimizer state to rank 0 of the stage; `full` has room for them on every
     * rank. set: each rank takes its part from `full`. Both collective over the stage; `local` has room for this rank's
     * part. */
    enum hapt_status (*gather)(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                               float *local, float *full);
    enum hapt_status (*set)(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                            const float *full, float *local);
};

extern const struct stage_runtime runtime_computing, runtime_modelled; /* runtime_computing.c, emulate.c */

/* The table for the devices of the cluster. The same on all ranks. */
const struct stage_runtime *runtime_of(const struct hapt_cluster *cluster);
/* True for --device emulated. */
bool runtime_is_modelled(const struct hapt_config *config);

/* stage_parameters.c: of the table for devices that compute. */
enum hapt_status runtime_gather_parameter(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                          float *local, float *full);
enum hapt_status runtime_set_parameter(struct stage *stage, int parameter, int state, const struct hapt_rows *rows,
                                       const float *full, float *local);

#endif
