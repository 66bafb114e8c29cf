/*
 * A worker: one rank's part of a plan. It has a device, an instruction list and a communication thread, and executes
 * the chunks of one submesh (struct stage), or none. train.c drives it, worker.c builds it, worker_step.c executes it.
 */
#ifndef HAPT_TRAIN_WORKER_H
#define HAPT_TRAIN_WORKER_H

#include "hapt/device_groups.h"
#include "hapt/link.h"
#include "hapt/reshard.h"
#include "hapt/train.h"

struct stage;         /* stage.h */
struct stage_runtime; /* runtime.h */
struct emulation;     /* emulate.c */

/* Two ranks that exchange an edge's messages by their devices: world ranks. */
struct worker_pair {
    int edge, from, to;
    int round;            /* round in which its device group was made; a rank has at most one per round */
    size_t dense_bytes;   /* bytes of a message that are not one contiguous run */
    struct hapt_pair own; /* NULLs: this rank is neither */
};

/* The agreement of all ranks on the gradients of a step, which NORM asks the owner of the worker for. */
struct worker_agreement {
    void *context;
    /* Shares the squares of the stages' gradients with all ranks. *update: settings of the update; *updates false: no
     * rank executes an UPDATE. Collective over env->world. */
    enum hapt_status (*agree)(void *context, struct hapt_update *update, bool *updates);
};

/* The timeline of the newest steps (trace.h). */
struct worker_trace {
    int64_t steps;  /* number of steps kept; 0: none */
    double *time_s; /* [steps][instruction][2] begin, end */
    int flow_count;
    struct worker_trace_flow {
        int chunk, peer;
        bool backward, sends;
        double *time_s; /* [steps][microbatch] */
    } * flow;
    struct hapt_span_log spans; /* capacity 0: nothing is offloaded */
    int64_t span_count;         /* in the steps kept; set at the end */
    struct hapt_span *span;
};

/* Sees the last chunk's tensors right after each of its forward passes. run NULL: nobody does. */
struct worker_observer {
    enum hapt_status (*run)(void *context, struct stage *stage, int microbatch, int slot);
    void *context;
};

struct worker {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_plan *plan;
    const struct hapt_graph *graph;
    struct hapt_arena *arena;
    const struct stage_runtime *runtime; /* set before worker_build */
    bool steady;                         /* hapt_device_spec */
    double time_scale;                   /* real seconds per modelled second; 1: devices compute */
    double timeout_s;
    /* of all chunks */
    int **ranks;                     /* [chunk][stage_size] world ranks */
    struct hapt_sharding **sharding; /* [chunk] as seen by its first rank; own chunks: by this rank */
    struct hapt_program **program;   /* [chunk] */
    int *index;                      /* [chunk] among the chunks of its submesh */
    int most;                        /* chunks of a submesh */
    struct hapt_edges *edges;
    struct hapt_ties *ties;
    struct hapt_schedule *schedule;
    /* of this rank */
    int stage_count;     /* 0: it idles */
    struct stage *stage; /* [stage_count] by chunk */
    const struct hapt_instruction_list *list;
    struct stage **slot_owner; /* [list->slots] the stage of its newest microbatch; NULL: none yet */
    int threads;               /* of its device */
    const struct hapt_backend *backend;
    struct hapt_device *device;
    struct emulation *emulation; /* of a modelled device; else NULL */
    MPI_Comm comm;               /* ranks of the submesh */
    struct hapt_comm_thread *comm_thread;
    int pair_count;
    struct worker_pair *pair; /* worker_devices.c */
    /* why this submesh's devices do not exchange directly with others; "": they do, or there is nothing to exchange */
    char no_direct_reason[HAPT_GROUPS_TEXT_CHARS];
    struct worker_trace trace;
    char *row_buffer, *shard_buffer; /* buffers for the rows of an input on their way to the device */
    int64_t first_step;              /* of the run; set before worker_join */
    /* of the current step */
    double loss_scale; /* factor on the loss at the start of the backward pass (loss_scale.h) */
    const struct hapt_data *data;
    int64_t step, data_step;                     /* data_step: whose rows are read */
    int64_t forward_sequence, backward_sequence; /* number of messages of a flow before, in this run */
    double begun_s;                              /* start of the current instruction, without the wait for send slots */
    struct stage *active;                        /* of the newest instruction */
    const struct worker_agreement *agreement;
    struct worker_observer observer;
    struct hapt_update update; /* agreed by NORM */
    bool updates;              /* UPDATE does something: the step was neither refused nor skipped */
};

/* ---- Placement: worker_ranks.c ---- */

/* Number of ranks of a chunk, and the world rank of one of them. */
int stage_size(const struct worker *worker, int chunk);
int stage_world_rank(const struct worker *worker, int chunk, int index);
/* True if two chunks run on one submesh, so by the same workers. */
bool worker_shares(const struct worker *worker, int chunk, int other);
/* The stage of a chunk on this rank; NULL: it runs elsewhere. */
struct stage *worker_stage(const struct worker *worker, int chunk);
/* Position of a chunk's record in an array [world_size][worker->most] with one record per stage of each rank. */
size_t worker_record(const struct worker *worker, int chunk, int index);
/* The lowest chunk of a world rank; -1: it idles. */
int worker_first_chunk(const struct worker *worker, int world_rank);
/* The lowest chunk that holds a parameter; it counts and saves it. -1: none. */
int stage_owner(const struct worker *worker, int tensor);
/* Longest wait of an agreement between steps for the last rank. Each wait inside a step has its own deadline, and
 * several may follow each other. */
double worker_agreement_timeout_s(const struct worker *worker);

/* ---- Life: worker.c ---- */

/* A worker that is not built yet. */
struct worker worker_of(const struct hapt_env *env, const struct hapt_cluster *cluster, const struct hapt_model *model,
                        const struct hapt_plan *plan, struct hapt_arena *arena);
/* Places the plan on ranks and builds this rank's engines, without communication. Rank-local. */
enum hapt_status worker_build(struct worker *worker, const struct hapt_config *config, int state_count);
/* Creates communicators, communication thread and flows; connects the hosts of neighbouring stages and starts the
 * communication thread. *together: all ranks agreed on a failure to connect hosts. Collective over env->world; ends in
 * agreement. */
enum hapt_status worker_join(struct worker *worker, double timeout_s, bool *together);
/* Runs the rank's instruction list once (worker_step.c). A rank without a chunk only agrees. */
enum hapt_status worker_run_step(struct worker *worker, const struct hapt_data *data, int64_t step,
                                 const struct worker_agreement *agreement);
/* Runs the forward passes of the list alone, for the first `microbatches` of a step of `data`. Each stage then has the
 * sum of their losses, as far as this rank counts it. The weights are those of all updates so far. Call between steps,
 * when all ranks have agreed on the step before. */
enum hapt_status worker_run_forward(struct worker *worker, const struct hapt_data *data, int64_t data_step,
                                    int microbatches);
/* Sums the gradients of tied parameters over the chunks that hold them (stage_exchange.c). */
enum hapt_status worker_exchange(struct worker *worker);
/* Waits until all messages are sent. */
enum hapt_status worker_drain(struct worker *worker);
void worker_release(struct worker *worker);

/* Copies between host and device; complete on return. */
enum hapt_status worker_copy(struct worker *worker, void *to, const void *from, size_t bytes);
/* Number of elements kept of a parameter (all, or its sample). `dims` not NULL: also their dimensions. */
int64_t worker_kept(const struct worker *worker, const struct hapt_tensor *parameter, int *dims,
                    int64_t shape[HAPT_MAX_DIMS]);
/* Parameters go to files and come from them in blocks of rows, because a rank has no room for a large one twice. Finds
 * the block after `rows`, or the first one if rows->total is 0; false: there is none. *elements: of the block, as kept.
 */
bool worker_next_block(const struct worker *worker, const struct hapt_tensor *parameter, struct hapt_rows *rows,
                       int64_t *elements);
/* Elements of the largest block of all parameters. */
int64_t worker_block_elements(const struct worker *worker);

/* ---- The description of the run: worker_report.c ---- */

/* The items of a step, their FLOPs, and those of the devices. Rank-local. */
void worker_describe(const struct worker *worker, struct hapt_train_result *result);
/* Each of these is collective over env->world. `result` has room for the plan's stages. */
enum hapt_status worker_gather_environment(const struct worker *worker, struct hapt_train_result *result);
/* Prints the carriers of collectives and boundaries, for devices that could exchange directly. */
enum hapt_status worker_report_carriers(const struct worker *worker);
/* Prints what the engines report on replays. */
enum hapt_status worker_report_replays(const struct worker *worker);
/* Gathers the planned and measured device memory of the stages: that of the whole device for each. */
enum hapt_status worker_gather_memory(const struct worker *worker, struct hapt_train_result *result);

/* ---- Direct exchange between devices: worker_devices.c ---- */

/* Creates the device groups of a subcluster's submeshes, if supported and if the subcluster has several.
 * Sets stage->group. Collective over env->world. */
enum hapt_status worker_create_device_groups(struct worker *worker);
void worker_destroy_device_groups(struct worker *worker);
/* The pair over which two world ranks exchange the edge's messages; NULL: through the host. */
const struct hapt_pair *worker_find_pair(const struct worker *worker, int edge, int from, int to);

#endif
