/* The kinds of collectives, what each costs, and what they take as rings over one link. */
#ifndef HAPT_COLLECTIVE_KIND_H
#define HAPT_COLLECTIVE_KIND_H

#include <stdbool.h>

/* In sharded graphs each is an operator (ops.h), which on one device is the identity. */
enum hapt_collective_kind {
    HAPT_COLLECTIVE_NONE,
    HAPT_COLLECTIVE_ALL_REDUCE,        /* partial sums -> whole */
    HAPT_COLLECTIVE_REDUCE_SCATTER,    /* partial sums -> sharded */
    HAPT_COLLECTIVE_ALL_GATHER,        /* sharded -> whole; uneven shards are padded to the largest (HAP 2.5.1) */
    HAPT_COLLECTIVE_GROUPED_BROADCAST, /* sharded -> whole, one broadcast a shard (HAP 4.4) */
    HAPT_COLLECTIVE_ALL_TO_ALL,        /* sharded on one dimension (or ratio) -> on another */
    HAPT_COLLECTIVE_SLICE,             /* whole -> sharded: each rank keeps its own, nothing moves */
    HAPT_COLLECTIVE_COUNT
};
/* "all_reduce", ...: of files. */
const char *hapt_collective_key(enum hapt_collective_kind kind);
/* Whether it moves anything: neither NONE nor SLICE. */
bool hapt_collective_moves(enum hapt_collective_kind kind);
/* Whether shards are sent as if all were as large as the largest. */
bool hapt_collective_pads(enum hapt_collective_kind kind);

/* A collective on a tensor of `bytes` (whole), largest shard `largest` of it, over n ranks takes
 * latency_s + bytes * (byte_s + skew_s * (n * largest - 1)); the bracket is 0 for even shards. */
struct hapt_collective_term {
    double latency_s, byte_s, skew_s;
};
struct hapt_collective_model {
    int ranks; /* one rank: everything is free */
    bool measured;
    struct hapt_collective_term term[HAPT_COLLECTIVE_COUNT];
};

/*
 * Seconds of a collective on a tensor of `bytes` (whole), the largest shard that part of it, over `ranks` in a ring
 * whose slowest link has that bandwidth (byte/s per direction and rank) and latency (s). An all-reduce moves 2 (n-1)/n
 * of the tensor over every link in 2 (n-1) rounds, reduce-scatter and all-gather half of it with shards padded to the
 * largest, an all-to-all (n-1)/n of the largest shard; a grouped broadcast passes every byte along the ring, pipelined,
 * and starts n times.
 */
double hapt_ring_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share, double bandwidth,
                   double latency_s);

#endif
