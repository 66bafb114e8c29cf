/* Private parts of the collectives: data exchange (collective.c), reductions (collective_sum.c), data movement
 * (collective_move.c); and what they share with the agreements (agree.c): waiting, and naming late ranks. */
#ifndef HAPT_LINK_COLLECTIVE_H
#define HAPT_LINK_COLLECTIVE_H

#include "hapt/collective_kind.h"
#include "hapt/link.h"

#define SLAB_BYTES ((size_t)1 << 20)    /* a rank's part of a block in shared memory: it fits in the cache */
#define SEGMENT_BYTES ((size_t)1 << 18) /* what one rank sends another in one block of messages */

struct shared_head;

struct hapt_collective {
    MPI_Comm comm;
    int rank, size;
    const char *who;
    double timeout_s;
    /* one node */
    struct hapt_shared *shared;
    struct shared_head *head; /* on rank 0; NULL: messages are used */
    char **slab;              /* [2 * size]: slab[b * size + r] */
    unsigned long long barriers;
    int slab_set; /* which of the two sets of slabs is in use */
    /* several nodes */
    char *received, *sent;                         /* [size][SEGMENT_BYTES] */
    MPI_Request *request;                          /* [2 * size] */
    int *peer;                                     /* [2 * size] peer of each request */
    size_t *out_bytes, *in_bytes;                  /* [size] sizes for the current block */
    const char **term;                             /* [size] terms of a sum */
    bool *absent;                                  /* [size] for error messages */
    double emulated_bandwidth, emulated_latency_s; /* byte/s, s; bandwidth 0: no link is emulated */
};

/* Call after a collective has moved its data: waits as long as a ring takes on a tensor of `bytes` in total. */
void collective_wait_ring(const struct hapt_collective *collective, enum hapt_collective_kind kind, double bytes,
                          double largest_share);

/* The slabs of the next block, [size]. A rank may fill its own slab at once: all ranks have left the block before the
 * previous one. */
char *const *collective_next_slabs(struct hapt_collective *collective);
enum hapt_status collective_barrier(struct hapt_collective *collective, const char *what);
/* Posts request number (*count)++. */
enum hapt_status collective_send(struct hapt_collective *collective, const void *data, int length, int peer, int tag,
                                 int *count);
enum hapt_status collective_receive(struct hapt_collective *collective, void *data, int length, int peer, int tag,
                                    int *count);
/* Waits for the first `count` requests. */
enum hapt_status collective_wait(struct hapt_collective *collective, int count, const char *what);

/*
 * One block of an all-to-all (with different data for each rank, including itself). Call begin, fill out(r) and
 * out_bytes[r], set in_bytes[r], call collective_all_to_all, read in(r). At most collective_all_to_all_bytes each.
 */
size_t collective_all_to_all_bytes(const struct hapt_collective *collective);
void collective_all_to_all_begin(struct hapt_collective *collective);
char *collective_all_to_all_out(const struct hapt_collective *collective, int rank);
const char *collective_all_to_all_in(const struct hapt_collective *collective, int rank);
enum hapt_status collective_all_to_all(struct hapt_collective *collective, const char *what);

/* Polls requests until all are complete, or sets `late` after the deadline. */
enum hapt_status link_wait(int count, MPI_Request *request, double deadline_s, bool *late);
/* Reports that `who` waited `timeout_s` for the ranks of `comm` that are absent [size of comm], in the operation
 * `what`. */
enum hapt_status link_late(MPI_Comm comm, const bool *absent, const char *who, double timeout_s, const char *what);

/* Size of the part [first, first + most) of `total` bytes. */
static inline size_t collective_part(size_t total, size_t first, size_t most)
{
    return first >= total ? 0 : total - first < most ? total - first : most;
}

#endif
