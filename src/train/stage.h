/* One rank's part of a plan. train.c drives it, stage.c builds it, stage_step.c executes it, stage_flows.c connects
 * stages, stage_moves.c moves tensors inside one. */
#ifndef HAPT_TRAIN_STAGE_H
#define HAPT_TRAIN_STAGE_H

#include "hapt/device_groups.h"
#include "hapt/link.h"
#include "hapt/reshard.h"
#include "hapt/team.h"
#include "hapt/train.h"

#define MAX_STAGE_FLOWS 64

struct stage_runtime; /* runtime.h */
struct emulation;     /* emulate.c */

/* The flows of one direction between the stage and its neighbours on one side. */
struct stage_flows {
    int count;
    int flow[MAX_STAGE_FLOWS], peer[MAX_STAGE_FLOWS]; /* the peer's chunk */
};

/* A tensor replicated over ranks of the stage: each receives its part, then all gather the parts. */
struct stage_replicas {
    unsigned axes; /* mesh axes (bits) over which it is replicated; 0: only this rank holds it */
    int count, index;
    struct hapt_reshard_part mine;
    struct hapt_strided *part; /* [count] of the dense local copy */
};

/* Two ranks that exchange an edge's messages by their devices: world ranks. */
struct stage_pair {
    int edge, from, to;
    int round;            /* round in which its device group was made; a rank has at most one per round */
    size_t dense_bytes;   /* bytes of a message that are not one contiguous run */
    struct hapt_pair own; /* NULLs: this rank is neither */
};

/* One tied parameter that this stage shares with others; its gradient is exchanged part by part. */
struct stage_tie {
    const struct hapt_tie *tie;
    struct stage_replicas replicas;
    struct hapt_strided mine; /* this rank's part of the gradient, as bytes */
    float *gradient;          /* the engine's buffer, or a host copy if the host cannot read that */
    float *on_device;         /* then the device buffer; else NULL */
    float **received;         /* [tie->chunk_count] dense parts, one per chunk; NULL: own */
    int *receive_flow;        /* [tie->chunk_count], -1: none */
    struct stage_flows send;
};

/* An input of the model, as this rank reads it. */
struct stage_input {
    int tensor;
    enum hapt_tensor_role role;
    int first_row, rows;           /* rows to fetch of a microbatch */
    struct hapt_strided_list runs; /* of these rows; count 0: all of them */
    size_t bytes;
};

/* The agreement of all ranks on the gradients of a step, which NORM asks the owner of the stage for. */
struct stage_agreement {
    void *context;
    /* Shares this rank's sum of squares with all ranks. *update: settings of the update; *updates false: no rank
     * executes an UPDATE. Collective over env->world. */
    enum hapt_status (*agree)(void *context, double square_sum, struct hapt_update *update, bool *updates);
};

/* The timeline of the newest steps (trace.h). */
struct stage_trace {
    int64_t steps;  /* number of steps kept; 0: none */
    double *time_s; /* [steps][instruction][2] begin, end */
    int flow_count;
    struct stage_trace_flow {
        int peer_stage;
        bool backward, sends;
        double *time_s; /* [steps][microbatch] */
    } * flow;
};

struct stage {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_plan *plan;
    const struct hapt_graph *graph;
    struct hapt_arena *arena;
    const struct stage_runtime *runtime; /* set before stage_build */
    double time_scale;                   /* real seconds per modelled second; 1: devices compute */
    double loss_scale;                   /* factor on the loss at the start of the backward pass (loss_scale.h) */
    struct emulation *emulation;         /* of a modelled device; else NULL */
    double timeout_s;
    int **ranks;                     /* [stage_count][stage_size] world ranks */
    struct hapt_sharding **sharding; /* [stage_count] as seen by its first rank; own chunk: by this rank */
    struct hapt_program **program;   /* [stage_count] */
    struct hapt_edges *edges;
    struct hapt_ties *ties;
    int chunk;      /* -1: this rank idles */
    int rank, size; /* among the ranks of the stage */
    char name[32];  /* "stage 1" */
    int threads;    /* of this rank's device */
    const struct hapt_backend *backend;
    struct hapt_device *device;
    struct hapt_engine *engine;
    struct hapt_schedule *schedule;
    const struct hapt_instruction_list *list;
    MPI_Comm comm;                           /* ranks of the stage */
    char carrier[HAPT_TEAM_TRANSPORT_CHARS]; /* carrier of the team's collectives: hapt_team_use_devices */
    struct hapt_team team; /* its ranks, mesh coordinates and collectives; the step's busy and waiting time */
    int pair_count;
    struct stage_pair *pair; /* stage_devices.c */
    /* why this stage's devices do not exchange directly; "": they do, or there is nothing to exchange */
    char no_direct_reason[HAPT_GROUPS_TEXT_CHARS];
    /* how boundary tensors leave a device whose memory the host cannot read; "": it can, or none leave */
    char boundary_route[HAPT_TEAM_TRANSPORT_CHARS];
    struct stage_replicas *forward_replicas, *backward_replicas; /* of incoming boundary tensors */
    struct hapt_comm_thread *comm_thread;
    struct stage_flows forward_in, forward_out, backward_in, backward_out;
    char *bounce; /* page-locked buffer to assemble incoming tensors if the host cannot read device memory; else NULL */
    struct stage_trace trace;
    int tie_count;
    struct stage_tie *tie;
    double *counts; /* [program tensors] 1: this stage counts the parameter in the global norm */
    int input_count;
    struct stage_input *input;
    char *row_buffer, *shard_buffer; /* buffers for the rows of an input on their way to the device */
    /* of the current step */
    const struct hapt_data *data;
    int64_t first_step;     /* of the run; set before stage_connect */
    int64_t step, sequence; /* sequence: number of messages in earlier steps of this run */
    double begun_s;         /* start of the current instruction, without the wait for send slots */
    double loss;            /* sum over the microbatches, as counted by this rank */
    const struct stage_agreement *agreement;
    struct hapt_update update; /* agreed by NORM */
    bool updates;              /* UPDATE does something: the step was neither refused nor skipped */
};

/* Mesh coordinates of rank `index` of a chunk. */
void stage_mesh_coordinate(const struct stage *stage, int chunk, int index, int mesh_coordinate[HAPT_MESH_AXES]);
/* The part that this rank of a chunk holds of a tensor of the chunk's expanded graph. */
void stage_box(const struct stage *stage, int chunk, int index, int tensor, struct hapt_box *box);
/* Number of ranks of its chunk that hold the same part of a tensor (`count`), and the index of this one among them
 * (`replica`). */
void stage_replica(const struct stage *stage, int chunk, int index, int tensor, int *count, int *replica);
/* True if this rank counts the tensor: it is the first holder, or the tensor is a partial sum. `sliced`: mesh axes
 * (bits) over which it is sliced. */
bool stage_counts(const struct stage *stage, int tensor, unsigned sliced);
/* Mesh axes (bits) over which the update of a parameter (program tensor) is sliced: sharded optimizer state. */
unsigned stage_sliced_axes(const struct stage *stage, int parameter);
/* World rank of rank `index` of chunk `chunk`. */
int stage_world_rank(const struct stage *stage, int chunk, int index);
int stage_size(const struct stage *stage, int chunk);

/* Places the plan on ranks and builds this rank's engine, without communication. Rank-local. */
enum hapt_status stage_build(struct stage *stage, const struct hapt_config *config, int state_count);
/* Creates communicators, communication thread and flows. Collective over env->world. */
enum hapt_status stage_connect(struct stage *stage);
/* Connects the hosts of neighbouring stages and starts the communication thread. If one rank fails, all do. Collective
 * over env->world. */
enum hapt_status stage_start(struct stage *stage);
enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas);
/* All-gathers the parts in place: before, every replica has its part at `data`; afterwards all have the full tensor.
 * stage_rebuild: host tensor; stage_rebuild_received: tensor in a transfer slot. */
enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data);
enum hapt_status stage_rebuild_received(struct stage *stage, const struct stage_replicas *replicas, int tensor,
                                        void *data);
/* Copies between host and device; complete on return. */
enum hapt_status stage_copy(struct stage *stage, void *to, const void *from, size_t bytes);
/* stage_devices.c: creates the device groups of a subcluster's stages, if supported and if the subcluster has several
 * stages. *stage_group: of this stage, or NULL. Collective over env->world. */
enum hapt_status stage_create_device_groups(struct stage *stage, struct hapt_device_comm **stage_group);
void stage_destroy_device_groups(struct stage *stage);
/* The pair over which two world ranks exchange the edge's messages; NULL: through the host. */
const struct hapt_pair *stage_find_pair(const struct stage *stage, int edge, int from, int to);
/* *bytes: what rank `from` of an edge's first chunk sends to rank `to` of the other. *in_runs: the bytes of these that
 * are not one contiguous run here. */
enum hapt_status stage_edge_bytes(const struct stage *stage, const struct hapt_edge *edge, int from, int to,
                                  struct hapt_arena *scratch, size_t *bytes, size_t *in_runs);
/* Adds only the flows; rank-local. */
enum hapt_status stage_add_flows(struct stage *stage);
void stage_release_flows(struct stage *stage);

/* stage_parameters.c: number of elements kept of a parameter (all, or its sample). `dims` not NULL: also their
 * dimensions. */
int64_t stage_kept(const struct stage *stage, const struct hapt_tensor *parameter, int *dims,
                   int64_t shape[HAPT_MAX_DIMS]);
/* Longest wait of an agreement between steps for the last rank. Each wait inside a step has its own deadline, and
 * several may follow each other. */
double stage_agreement_timeout_s(const struct stage *stage);
/* Waits until all messages are sent. */
enum hapt_status stage_drain(struct stage *stage);
void stage_release(struct stage *stage);

/* Runs the rank's instruction list once (stage_step.c). A rank without a chunk only agrees. */
enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence,
                                const struct stage_agreement *agreement);
/* Sums the gradients of tied parameters over the chunks that hold them. */
enum hapt_status stage_exchange(struct stage *stage);
/* Time per message to or from a neighbouring chunk since the last call; 0: unknown. counted: measured by the network
 * (hapt_comm_thread_message_s). */
struct stage_link_time {
    double time_s;
    bool counted;
};
enum stage_link {
    STAGE_LINK_FORWARD_OUT,
    STAGE_LINK_BACKWARD_OUT,
    STAGE_LINK_FORWARD_IN,
    STAGE_LINK_BACKWARD_IN,
    STAGE_LINKS
};
void stage_take_link_times(const struct stage *stage, struct stage_link_time link[STAGE_LINKS]);
/* Seconds so far during which the boundary behind the stage carried activations. */
double stage_comm_s(const struct stage *stage);

/* The lowest chunk that holds a parameter; it counts and saves it. -1: none. */
int stage_owner(const struct stage *stage, int tensor);

#endif
