/* Inside the collectives: the two ways to meet (collective.c), what sums (collective_sum.c), what moves
 * (collective_move.c); and what they share with the agreements (agree.c): waiting, and telling who was waited for. */
#ifndef HAPT_LINK_COLLECTIVE_H
#define HAPT_LINK_COLLECTIVE_H

#include "hapt/collective_kind.h"
#include "hapt/link.h"

#define SLAB_BYTES ((size_t)1 << 20)    /* shared memory: a rank's part of one block, so that it stays in the cache */
#define SEGMENT_BYTES ((size_t)1 << 18) /* messages: what one rank sends another in one block */

struct shared_head;

struct hapt_collective {
    MPI_Comm comm;
    int rank, size;
    const char *who;
    double timeout_s;
    /* one node */
    struct hapt_shared *shared;
    struct shared_head *head; /* on rank 0; NULL: messages */
    char **slab;              /* [2 * size]: slab[b * size + r] */
    unsigned long long barriers;
    int turn; /* which of the two slabs is next */
    /* several nodes */
    char *received, *sent;        /* [size][SEGMENT_BYTES] */
    MPI_Request *request;         /* [2 * size] */
    int *peer;                    /* [2 * size] with whom they are */
    size_t *out_bytes, *in_bytes; /* [size] of the block under way */
    const char **term;            /* [size] what is added up */
    bool *absent;                 /* [size] for messages */
    double pace, pace_latency_s;  /* byte/s; 0: not paced */
};

/* Of a collective that moved its data: waits for the rest of the time that a ring takes on a tensor of `bytes` (whole).
 */
void collective_pace(const struct hapt_collective *collective, enum hapt_collective_kind kind, double bytes,
                     double largest_share);

/* The slabs of the next block, [size]. A rank may fill its own at once: everybody has left the block before the last.
 */
char *const *collective_next_slabs(struct hapt_collective *collective);
enum hapt_status collective_barrier(struct hapt_collective *collective, const char *what);
/* Posts request number (*count)++. */
enum hapt_status collective_send(struct hapt_collective *collective, const void *data, int length, MPI_Datatype type,
                                 int peer, int tag, int *count);
enum hapt_status collective_receive(struct hapt_collective *collective, void *data, int length, MPI_Datatype type,
                                    int peer, int tag, int *count);
/* Waits for the first `count` requests. */
enum hapt_status collective_wait(struct hapt_collective *collective, int count, const char *what);

/*
 * One block of a trade in which each rank has something else for each other one (and itself): begin, fill out(r) and
 * out_bytes[r], set in_bytes[r], trade, read in(r). At most collective_trade_bytes each.
 */
size_t collective_trade_bytes(const struct hapt_collective *collective);
void collective_trade_begin(struct hapt_collective *collective);
char *collective_trade_out(const struct hapt_collective *collective, int rank);
const char *collective_trade_in(const struct hapt_collective *collective, int rank);
enum hapt_status collective_trade(struct hapt_collective *collective, const char *what);

/* Polls requests until all are done, or it is `late`. */
enum hapt_status link_wait(int count, MPI_Request *request, double deadline_s, bool *late);
/* The failure of `who` to meet, within `timeout_s`, those ranks of `comm` that are absent, [its size]; in the operation
 * `what`. */
enum hapt_status link_late(MPI_Comm comm, const bool *absent, const char *who, double timeout_s, const char *what);

/* Bytes [first, first + most) of `total` as far as there are any. */
static inline size_t collective_part(size_t total, size_t first, size_t most)
{
    return first >= total ? 0 : total - first < most ? total - first : most;
}

#endif
