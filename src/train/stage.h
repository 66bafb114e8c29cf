/* A stage: one chunk of the plan on one rank. stage_flows.c connects it with others, stage_exchange.c sums the
 * gradients of tied parameters, stage_moves.c moves tensors among the ranks of the chunk. */
#ifndef HAPT_TRAIN_STAGE_H
#define HAPT_TRAIN_STAGE_H

#include "hapt/team.h"
#include "worker.h"

#define MAX_STAGE_FLOWS 64

struct emulated_sample; /* emulate.c */

/* The flows of one direction between the stage and its neighbours on one side. */
struct stage_flows {
    int count;
    int flow[MAX_STAGE_FLOWS], peer[MAX_STAGE_FLOWS]; /* the peer's chunk */
    int edge[MAX_STAGE_FLOWS];                        /* of worker->edges; not of tied parameters */
};

/* A tensor replicated over ranks of the stage: each receives its part, then all gather the parts. */
struct stage_replicas {
    unsigned axes; /* mesh axes (bits) over which it is replicated; 0: only this rank holds it */
    int count, index;
    struct hapt_reshard_part mine;
    struct hapt_strided *part; /* [count] of the dense local copy */
};

/* One tied parameter that this stage shares with others; its gradient is exchanged part by part. */
struct stage_tie {
    const struct hapt_tie *tie;
    struct stage_replicas replicas;
    struct hapt_strided mine; /* this rank's part of the gradient, as bytes */
    float *gradient;          /* the engine's buffer, or a host copy if the host cannot read that */
    float *on_device;         /* then the device buffer; else NULL */
    float **received;         /* [tie->chunk_count] dense parts, one per chunk; NULL: own */
    uint16_t *narrow;         /* 16-bit exchange: the gradient as it is sent, of this rank's shape; else NULL */
    uint16_t **arrived;       /* [tie->chunk_count] 16-bit exchange: the messages from other workers; else NULL */
    int sent_count;           /* 16-bit exchange: what this rank sends of it, in elements of 2 bytes */
    struct hapt_strided_list *sent;
    int *receive_flow; /* [tie->chunk_count], -1: none */
    struct stage_flows send;
};

/* An input of the model, as this rank reads it. */
struct stage_input {
    int tensor;
    enum hapt_tensor_role role;
    int field;                     /* the model's field (hapt_model_field), or -1 */
    int first_row, rows;           /* rows to fetch of a microbatch */
    struct hapt_strided_list runs; /* of these rows; count 0: all of them */
    size_t bytes;
};

struct stage {
    struct worker *worker;
    int chunk;
    int rank, size; /* among the ranks of the chunk */
    char name[32];  /* "stage 1" */
    const struct hapt_plan_stage *plan;
    const struct hapt_sharding *sharding; /* this rank's view */
    const struct hapt_program *program;
    struct hapt_engine *engine;
    struct hapt_device_comm *group; /* of its ranks' devices, until the team owns it; NULL: none */
    struct hapt_team team;          /* its ranks, mesh coordinates and collectives; the step's busy and waiting time */
    char carrier[HAPT_TEAM_TRANSPORT_CHARS]; /* carrier of the team's collectives: hapt_team_use_devices */
    /* how boundary tensors leave a device whose memory the host cannot read; "": it can, or none leave */
    char boundary_route[HAPT_TEAM_TRANSPORT_CHARS];
    struct stage_replicas *forward_replicas, *backward_replicas; /* of incoming boundary tensors */
    struct stage_flows forward_in, forward_out, backward_in, backward_out;
    struct stage_flows passed_on; /* activations of forward_in that other stages read as well */
    char *bounce; /* page-locked buffer to assemble incoming tensors if the host cannot read device memory; else NULL */
    int tie_count;
    struct stage_tie *tie;
    int *slot;      /* [microbatch] activation slot of its newest forward pass */
    double *counts; /* [program tensors] 1: this stage counts the parameter in the global norm */
    int input_count;
    struct stage_input *input;
    struct emulated_sample *sample; /* of the parameters, on a modelled device; else NULL */
    double update_due_s;            /* modelled: end of a deferred update, if nothing delays it; 0: none is left */
    /* of the current step */
    double loss;       /* sum over the microbatches, as counted by this rank */
    double square_sum; /* of the gradients that this rank counts */
};

/* True if the next step's first forward pass updates the stage. */
static inline bool stage_defers(const struct stage *stage)
{
    return stage->plan->deferred_s > 0 && hapt_plan_defers(stage->worker->plan);
}

/* ---- Tensors on the ranks of any chunk: stage_moves.c ---- */

/* Mesh coordinates of rank `index` of a chunk. */
void stage_mesh_coordinate(const struct worker *worker, int chunk, int index, int mesh_coordinate[HAPT_MESH_AXES]);
/* The part that this rank of a chunk holds of a tensor of the chunk's expanded graph. */
void stage_box(const struct worker *worker, int chunk, int index, int tensor, struct hapt_box *box);
/* Number of ranks of its chunk that hold the same part of a tensor (`count`), and the index of this one among them
 * (`replica`). */
void stage_replica(const struct worker *worker, int chunk, int index, int tensor, int *count, int *replica);

/* ---- Tensors of this stage ---- */

/* True if this rank counts the tensor: it is the first holder, or the tensor is a partial sum. `sliced`: mesh axes
 * (bits) over which it is sliced. */
bool stage_counts(const struct stage *stage, int tensor, unsigned sliced);
/* Mesh axes (bits) over which the update of a parameter (program tensor) is sliced: sharded optimizer state. */
unsigned stage_sliced_axes(const struct stage *stage, int parameter);
enum hapt_status stage_prepare_replicas(struct stage *stage, int tensor, struct stage_replicas *replicas);
/* All-gathers the parts in place: before, every replica has its part at `data`; afterwards all have the full tensor.
 * stage_rebuild: host tensor; stage_rebuild_received: tensor in a transfer slot. */
enum hapt_status stage_rebuild(struct stage *stage, const struct stage_replicas *replicas, int tensor, void *data);
enum hapt_status stage_rebuild_received(struct stage *stage, const struct stage_replicas *replicas, int tensor,
                                        void *data);

/* ---- Messages: stage_flows.c ---- */

/* One transfer of a tensor between two chunks with different layouts. */
struct stage_crossing {
    int from, to;       /* chunks */
    int source, tensor; /* the sender's and the receiver's version of it */
    bool compact;       /* the receiver has a dense copy of its part */
};

/* *bytes: what rank `from` of an edge's first chunk sends to rank `to` of the other. *in_runs: the bytes of these that
 * are not one contiguous run here. */
enum hapt_status stage_edge_bytes(const struct worker *worker, const struct hapt_edge *edge, int from, int to,
                                  struct hapt_arena *scratch, size_t *bytes, size_t *in_runs);
/* Address of tensor `index` of an edge: in a transfer slot or, for activations to send, in the slot where they were
 * computed. */
void *stage_edge_address(struct stage *stage, const struct hapt_edge *edge, bool sends, int index, int slot);
/* Adds the flows of boundary tensors; rank-local. */
enum hapt_status stage_add_flows(struct stage *stage);
void stage_release_flows(struct stage *stage);
/* Adds the pieces that this rank sends or receives, in the order of the peers. */
enum hapt_status stage_add_pieces(const struct stage *stage, const struct stage_crossing *crossing, bool sends,
                                  int buffer, struct hapt_piece *piece, int *count);
/* Sets the bandwidth of a throttled link, shared by the ranks that send over it at the same time, and its port. */
enum hapt_status stage_set_throttle(const struct stage *stage, const struct stage_crossing *crossing, int tensors,
                                    struct hapt_flow_options *options);

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

/* ---- Tied parameters: stage_exchange.c ---- */

enum hapt_status stage_add_ties(struct stage *stage);
void stage_release_ties(struct stage *stage);

#endif
