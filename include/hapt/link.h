/*
 * Links: moving stage boundaries while the stage computes, and the collectives of a submesh.
 *
 * A courier is a communication thread. It never blocks in its message library: it tests, then sleeps 50 to 400 us. The
 * compute thread hands it messages and waits on a condition variable. Messages go in chunks of at most
 * HAPT_LINK_CHUNK_BYTES; a receiver has a few transfer slots and tells the sender when one is free again, so nothing
 * piles up in the library.
 *
 * Every wait has a deadline. When it passes, the call fails with HAPT_ERR_COMM and a message that names stage,
 * microbatch, peer and operation; peers may then wait for ever, so the caller ends the job by hapt_die.
 */
#ifndef HAPT_LINK_H
#define HAPT_LINK_H

#include "hapt/arena.h"
#include "hapt/env.h"

#define HAPT_LINK_CHUNK_BYTES 65536

/* A message in flight, owned by the transfer that filled it. */
struct hapt_transfer_request {
    _Alignas(16) unsigned char opaque[64];
};

/*
 * A message library as one table. Calls come from the courier's thread alone and never block. Messages of equal peer
 * and tag arrive in order. Buffers are borrowed until the request tests as done. To add one (nccl): one table, handed
 * to hapt_courier_create.
 */
struct hapt_transfer {
    const char *name;
    const char *description;
    /* A private space of messages between the ranks of `world`; collective. */
    enum hapt_status (*open)(MPI_Comm world, void **context);
    void (*close)(void *context);
    /* Start one message; bytes <= HAPT_LINK_CHUNK_BYTES, 0 allowed. */
    enum hapt_status (*send)(void *context, const void *data, size_t bytes, int peer, int tag,
                             struct hapt_transfer_request *request);
    enum hapt_status (*receive)(void *context, void *data, size_t bytes, int peer, int tag,
                                struct hapt_transfer_request *request);
    enum hapt_status (*test)(void *context, struct hapt_transfer_request *request, bool *done);
};

extern const struct hapt_transfer hapt_transfer_mpi;

/* A part of a message that one peer gets or gives: `bytes` at base[slot][buffer] + offset. */
struct hapt_piece {
    int peer; /* world rank */
    int buffer;
    size_t offset, bytes;
};

/*
 * One direction of one boundary, seen from this rank: a sequence of like messages, one a microbatch, each made of
 * pieces. Sender and receiver list the pieces they share in the same order. Messages are numbered from 0 over the whole
 * run.
 */
struct hapt_flow_options {
    const char *what;      /* "activations", "gradients": for messages; borrowed */
    int stage, peer_stage; /* for messages */
    bool sends;
    int tag;        /* unique to the flow among all flows of all ranks; the two ends agree */
    int per_step;   /* messages in a step, for messages */
    int peer_slots; /* transfer slots of the receivers: message k waits until k - peer_slots was released */
    int slot_count; /* rows of base: sending, where messages may stand; receiving, peer_slots (message k: k %
                       peer_slots) */
    int buffer_count;
    void *const *base; /* [slot_count][buffer_count]; copied */
    int piece_count;
    const struct hapt_piece *piece; /* copied */
    double bandwidth;               /* byte/s this rank may send with; 0: not paced */
    double latency_s;               /* added when paced */
};

struct hapt_courier;

/* Opens a courier without flows. Collective over `world`. */
enum hapt_status hapt_courier_create(const struct hapt_transfer *transfer, MPI_Comm world, double timeout_s,
                                     struct hapt_courier **courier);
/* Adds a flow; *flow is its number. Before hapt_courier_start. */
enum hapt_status hapt_courier_add(struct hapt_courier *courier, const struct hapt_flow_options *options, int *flow);
/* Starts the thread (none where there are no flows). */
enum hapt_status hapt_courier_start(struct hapt_courier *courier);
/* Waits until every message handed over has been taken by its receivers, then ends the thread. */
enum hapt_status hapt_courier_drain(struct hapt_courier *courier);
/* Collective over `world`. NULL is allowed. */
void hapt_courier_destroy(struct hapt_courier *courier);

/* Allows `count` more messages of every receiving flow to come: at the start of a step. */
void hapt_courier_expect(struct hapt_courier *courier, int flow, int64_t count);
/* Hands over the next message, standing in `slot`; its data must not change before hapt_courier_wait_sent. Never waits.
 */
void hapt_courier_send(struct hapt_courier *courier, int flow, int slot);
/* Waits until nothing that was handed over from `slot` is still on its way out. */
enum hapt_status hapt_courier_wait_sent(struct hapt_courier *courier, int flow, int slot);
/* Waits until message `sequence` stands in its transfer slot. */
enum hapt_status hapt_courier_wait_received(struct hapt_courier *courier, int flow, int64_t sequence);
/* The oldest message received is consumed: its transfer slot is free. */
void hapt_courier_free(struct hapt_courier *courier, int flow);
/* Seconds during which a message of the flow was being sent, so far (latency included). */
double hapt_courier_active_s(struct hapt_courier *courier, int flow);

/* ---- Collectives of the compute thread: deterministic, polled with a deadline, yielding ---- */

struct hapt_collective;

/* Over all ranks of `comm` (duplicated). Ranks of one node use a shared memory window where `shared_memory` allows,
 * others messages; either way each element is summed in order of rank, by one rank, so all get equal bits. `who`:
 * "stage 1", for messages; borrowed. Collective. */
enum hapt_status hapt_collective_create(MPI_Comm comm, const char *who, double timeout_s, bool shared_memory,
                                        struct hapt_collective **collective);
void hapt_collective_destroy(struct hapt_collective *collective);
/* data[i] = sum over ranks of data[i]. `what` names the operation in a time-out. Collective. */
enum hapt_status hapt_collective_all_reduce(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements);
/* Rank r gives elements [first(r), first(r + 1)) of `data`, first(r) = hapt_collective_slice; all get all. Collective.
 */
enum hapt_status hapt_collective_all_gather(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements);
/* First element of the slice of rank `rank` of `ranks`. */
size_t hapt_collective_slice(size_t elements, int ranks, int rank);

/* Every rank of `comm` gets `bytes` of every rank, in order of rank. Polled, yielding; collective. */
enum hapt_status hapt_link_all_gather(MPI_Comm comm, const char *what, double timeout_s, const void *mine, size_t bytes,
                                      void *all);
/* hapt_env_agree with a deadline: for agreements amid training, where a peer may have died. On time-out the job ends
 * (hapt_die). Collective. */
enum hapt_status hapt_link_agree(MPI_Comm comm, const char *what, double timeout_s, enum hapt_status status);
/* Before a collective that a rank would not reach: every rank fails when one does. Nothing is printed, that is for the agreement
 * behind. `what` names the operation. Collective. */
enum hapt_status hapt_link_all_or_none(MPI_Comm comm, const char *what, enum hapt_status status);
/* Sleeps a little while polling: yields first, then short sleeps. `spins` counts from 0 and belongs to the wait. */
void hapt_link_pause(unsigned *spins);
/* Wakes the calling thread's timers at once instead of 50 us late. */
void hapt_link_sharpen_timers(void);

#endif
