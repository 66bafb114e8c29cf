/* One rank's part of a plan: what train.c drives, stage.c executes and stage_flows.c connects. */
#ifndef HAPT_TRAIN_STAGE_H
#define HAPT_TRAIN_STAGE_H

#include "hapt/link.h"
#include "hapt/train.h"

#define MAX_STAGE_FLOWS 64

/* The flows of one direction at one side of the stage. */
struct stage_flows {
    int count;
    int flow[MAX_STAGE_FLOWS];
};

/* One tied parameter that this stage holds with others: gradients meet slice by slice. */
struct stage_tie {
    const struct hapt_tie *tie;
    size_t elements, first, end; /* of the whole; of this rank's slice */
    float *gradient;             /* [elements], the engine's */
    float **received;            /* [tie->chunk_count] [end - first], one a chunk; NULL: own */
    int *receive_flow;           /* [tie->chunk_count], -1: none */
    struct stage_flows send;
};

struct stage {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_plan *plan;
    const struct hapt_graph *graph;
    struct hapt_arena *arena;
    double timeout_s;
    int *first_device;             /* [stage_count] */
    struct hapt_program **program; /* [stage_count] */
    struct hapt_routes *routes;
    struct hapt_ties *ties;
    int chunk;           /* -1: this rank idles */
    int rank, size;      /* among the ranks of the stage */
    int rows, first_row; /* of a microbatch: how many here, and which is the first */
    char name[32];       /* "stage 1" */
    double slowdown;
    const struct hapt_backend *backend;
    struct hapt_device *device;
    struct hapt_engine *engine;
    struct hapt_schedule *schedule;
    const struct hapt_instruction_list *list;
    MPI_Comm comm; /* ranks of the stage */
    struct hapt_collective *collective;
    struct hapt_courier *courier;
    struct stage_flows forward_in, forward_out, backward_in, backward_out;
    int tie_count;
    struct stage_tie *tie;
    double *counts; /* [program tensors] 1: this stage counts the parameter in the global norm */
    int input_count;
    int *input;          /* graph tensors of the inputs read here */
    void *row_buffer;    /* the rows of one of them */
    /* of the step under way */
    const struct hapt_data *data;
    int64_t step, sequence;  /* sequence: messages of earlier steps of this run */
    double loss;             /* sum over the microbatches, this rank's rows */
    double busy_s, reduce_s; /* since train.c last took them */
};

/* World rank of rank `index` of chunk `chunk`. */
int stage_world_rank(const struct stage *stage, int chunk, int index);
int stage_size(const struct stage *stage, int chunk);

/* Places the plan and builds this rank's engine (all but the communication). Rank-local. */
enum hapt_status stage_build(struct stage *stage, const struct hapt_config *config, int state_count);
/* Communicators, courier and flows. Collective over env->world. */
enum hapt_status stage_connect(struct stage *stage);
/* The flows alone; rank-local. */
enum hapt_status stage_add_flows(struct stage *stage);
/* Waits until all messages are gone. */
enum hapt_status stage_drain(struct stage *stage);
void stage_release(struct stage *stage);

/* Everything of a step before the update. */
enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence);
/* Sums the gradients of tied parameters over the chunks that hold them. */
enum hapt_status stage_exchange(struct stage *stage);
enum hapt_status stage_square_sum(struct stage *stage, double *sum);
enum hapt_status stage_update(struct stage *stage, const struct hapt_update *update);
/* Seconds so far during which the boundary behind carried activations. */
double stage_comm_s(const struct stage *stage);

/* The lowest chunk that holds a parameter: it counts and saves it. -1: no chunk does. */
int stage_owner(const struct stage *stage, int tensor);

#endif
