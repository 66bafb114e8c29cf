/* One rank's part of a plan: what train.c drives, stage.c executes; stage_flows.c connects stages, stage_moves.c the
 * ranks of one. */
#ifndef HAPT_TRAIN_STAGE_H
#define HAPT_TRAIN_STAGE_H

#include "hapt/device_groups.h"
#include "hapt/link.h"
#include "hapt/reshard.h"
#include "hapt/team.h"
#include "hapt/train.h"

#define MAX_STAGE_FLOWS 64

struct emulation; /* emulate.h */

/* The flows of one direction at one side of the stage. */
struct stage_flows {
    int count;
    int flow[MAX_STAGE_FLOWS], peer[MAX_STAGE_FLOWS]; /* the peer's chunk */
};

/* A tensor that ranks of the stage hold alike: each fetches its part, then all gather the parts. */
struct stage_replicas {
    unsigned axes; /* of the mesh, whose ranks they are (bits); 0: this rank alone holds it */
    int count, index;
    struct hapt_reshard_part mine;
    struct hapt_strided *part; /* [count] of the dense local copy */
};

/* Two ranks that trade a route's messages by their devices: world ranks. */
struct stage_pair {
    int route, from, to;
    int round;            /* in which the groups of pairs were made: a rank is in one of each round */
    size_t dense_bytes;   /* of a message's runs */
    struct hapt_pair own; /* NULLs: this rank is neither of the two */
};

/* One tied parameter that this stage holds with others: gradients meet part by part. */
struct stage_tie {
    const struct hapt_tie *tie;
    struct stage_replicas replicas;
    struct hapt_strided mine; /* this rank's part of the gradient, as bytes */
    float *gradient;          /* the engine's, or a copy on the host of what the host cannot read there */
    float *on_device;         /* then where it is; else NULL */
    float **received;         /* [tie->chunk_count] dense parts, one a chunk; NULL: own */
    int *receive_flow;        /* [tie->chunk_count], -1: none */
    struct stage_flows send;
};

/* An input of the model, as this rank reads it. */
struct stage_input {
    int tensor;
    enum hapt_tensor_role role;
    int first_row, rows;           /* of a microbatch: fetched */
    struct hapt_strided_list runs; /* of those rows; count 0: all of them */
    size_t bytes;
};

/* The timeline of the newest steps (trace.h). */
struct stage_trace {
    int64_t steps;  /* kept; 0: none */
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
    bool emulated;               /* devices are modelled: nothing is computed (emulate.h) */
    double time_scale;           /* seconds that a modelled second lasts; 1 unless emulated */
    double loss_scale;           /* the backward pass starts from so many times the loss (loss_scale.h) */
    struct emulation *emulation; /* NULL: the device of this rank computes, or the rank idles */
    double timeout_s;
    int **ranks;                     /* [stage_count][stage_size] world ranks */
    struct hapt_sharding **sharding; /* [stage_count] as its first rank sees it; of the own chunk: as this rank does */
    struct hapt_program **program;   /* [stage_count] */
    struct hapt_routes *routes;
    struct hapt_ties *ties;
    int chunk;      /* -1: this rank idles */
    int rank, size; /* among the ranks of the stage */
    char name[32];  /* "stage 1" */
    int threads;    /* of its device */
    const struct hapt_backend *backend;
    struct hapt_device *device;
    struct hapt_engine *engine;
    struct hapt_schedule *schedule;
    const struct hapt_instruction_list *list;
    MPI_Comm comm;                         /* ranks of the stage */
    char carrier[HAPT_TEAM_CARRIER_CHARS]; /* of the team's collectives: hapt_team_use_devices */
    struct hapt_team team; /* they, their places and collectives; what of the step's time is busy and what waiting */
    int pair_count;
    struct stage_pair *pair;            /* stage_devices.c */
    char apart[HAPT_GROUPS_TEXT_CHARS]; /* why the devices of this stage's subcluster do not trade; "": they do, or
                                           there is nothing to trade */
    char way[HAPT_TEAM_CARRIER_CHARS];  /* how boundaries leave a device whose memory the host cannot read; "": there is
                                           none, or none leaves */
    struct stage_replicas *forward_replicas, *backward_replicas; /* of incoming boundary tensors */
    struct hapt_courier *courier;
    struct stage_flows forward_in, forward_out, backward_in, backward_out;
    char *bounce; /* page-locked, for incoming tensors that the host puts together where it cannot read the device's
                     memory; else NULL */
    struct stage_trace trace;
    int tie_count;
    struct stage_tie *tie;
    double *counts; /* [program tensors] 1: this stage counts the parameter in the global norm */
    int input_count;
    struct stage_input *input;
    char *row_buffer, *shard_buffer; /* values of an input's rows here, on their way to the device */
    /* of the step under way */
    const struct hapt_data *data;
    int64_t first_step;     /* of the run; set before stage_connect */
    int64_t step, sequence; /* sequence: messages of earlier steps of this run */
    double begun_s;         /* when the instruction under way began, waiting for slots to be sent left out */
    double loss;            /* sum over the microbatches, what this rank counts; none where emulated */
};

/* Where rank `index` of a chunk stands on the axes of its mesh. */
void stage_place(const struct stage *stage, int chunk, int index, int place[HAPT_MESH_AXES]);
/* What that rank holds of a tensor of the chunk's expanded graph. */
void stage_box(const struct stage *stage, int chunk, int index, int tensor, struct hapt_box *box);
/* Of how many ranks of its chunk that hold a tensor alike a rank is which. */
void stage_replica(const struct stage *stage, int chunk, int index, int tensor, int *count, int *replica);
/* Is this rank the first that holds the tensor, or is the tensor a sum to which it adds? `sliced`: mesh axes (bits)
 * whose ranks hold slices of it. */
bool stage_counts(const struct stage *stage, int tensor, unsigned sliced);
/* Mesh axes (bits) whose ranks update a slice each of a parameter (program tensor): sharded optimizer state. */
unsigned stage_sliced_axes(const struct stage *stage, int parameter);
/* World rank of rank `index` of chunk `chunk`. */
int stage_world_rank(const struct stage *stage, int chunk, int index);
int stage_size(const struct stage *stage, int chunk);

/* Places the plan and builds this rank's engine (all but the communication). Rank-local. */
enum hapt_status stage_build(struct stage *stage, const struct hapt_config *config, int state_count);
/* Communicators, courier and flows. Collective over env->world. */
enum hapt_status stage_connect(struct stage *stage);
/* Connects the hosts of neighbouring stages and starts the communication thread. All ranks fail when one does.
 * Collective over env->world. */
enum hapt_status stage_start(struct stage *stage);
enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas);
/* Every replica has its part at `data`, in place; all get the whole. Of a tensor on the host; of one in a transfer
 * slot. */
enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data);
enum hapt_status stage_rebuild_received(struct stage *stage, const struct stage_replicas *replicas, int tensor,
                                        void *data);
/* Between host and device; done when it returns. */
enum hapt_status stage_copy(struct stage *stage, void *to, const void *from, size_t bytes);
/* stage_devices.c: groups of the devices of a subcluster's stages, where they can and several stages are there. *whole:
 * of this stage, or NULL. Collective over env->world. */
enum hapt_status stage_meet(struct stage *stage, struct hapt_group **whole);
void stage_part(struct stage *stage);
/* How the two world ranks trade the route's messages; NULL: through the host. */
const struct hapt_pair *stage_find_pair(const struct stage *stage, int route, int from, int to);
/* What rank `from` of a route's first chunk sends to rank `to` of the other; of it bytes that are no single run here.
 */
enum hapt_status stage_route_bytes(const struct stage *stage, const struct hapt_route *route, int from, int to,
                                   struct hapt_arena *scratch, size_t *bytes, size_t *in_runs);
/* The flows alone; rank-local. */
enum hapt_status stage_add_flows(struct stage *stage);
void stage_release_flows(struct stage *stage);

/* A parameter's weight (state -1) or optimizer state: whole, to the rank 0 of the stage that holds it (else NULL); from
 * whole, each rank its own part. Both collective over the stage; `local` has room for its elements here. */
/* What is kept of a parameter: all of it, or its sample; so many elements, and where `dims` is not NULL their
 * dimensions. */
int64_t stage_kept(const struct stage *stage, const struct hapt_tensor *parameter, int *dims,
                   int64_t shape[HAPT_MAX_DIMS]);
/* Its values before the first step. */
enum hapt_status stage_initial(const struct stage *stage, int parameter, float *value);
enum hapt_status stage_gather_parameter(struct stage *stage, int parameter, int state, float *local, float *whole);
enum hapt_status stage_set_parameter(struct stage *stage, int parameter, int state, const float *whole, float *local);
/* How long an agreement between steps waits for the last rank: each wait inside a step has its own deadline, and a few
 * may follow each other. */
double stage_agreement_timeout_s(const struct stage *stage);
/* Waits until all messages are gone. */
enum hapt_status stage_drain(struct stage *stage);
void stage_release(struct stage *stage);

/* Everything of a step before the update. */
enum hapt_status stage_run_step(struct stage *stage, const struct hapt_data *data, int64_t step, int64_t sequence);
/* Sums the gradients of tied parameters over the chunks that hold them. */
enum hapt_status stage_exchange(struct stage *stage);
enum hapt_status stage_square_sum(struct stage *stage, double *sum);
enum hapt_status stage_update(struct stage *stage, const struct hapt_update *update);
/* What a message to or from a neighbouring chunk took since this was asked last; 0: unknown. Counted: by the network
 * (hapt_courier_message_s). */
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
/* Seconds so far during which the boundary behind carried activations. */
double stage_comm_s(const struct stage *stage);

/* The lowest chunk that holds a parameter: it counts and saves it. -1: no chunk does. */
int stage_owner(const struct stage *stage, int tensor);

#endif
