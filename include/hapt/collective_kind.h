/* The kinds of collectives, their cost models, and ring costs over one link. */
#ifndef HAPT_COLLECTIVE_KIND_H
#define HAPT_COLLECTIVE_KIND_H

#include <stdbool.h>

/* In sharded graphs each kind is an operator (ops.h), which is the identity on one device. */
enum hapt_collective_kind {
    HAPT_COLLECTIVE_NONE,
    HAPT_COLLECTIVE_ALL_REDUCE,        /* partial sum -> replicated */
    HAPT_COLLECTIVE_REDUCE_SCATTER,    /* partial sum -> sharded */
    HAPT_COLLECTIVE_ALL_GATHER,        /* sharded -> replicated; uneven shards are padded to the largest (HAP 2.5.1) */
    HAPT_COLLECTIVE_GROUPED_BROADCAST, /* sharded -> replicated, one broadcast per shard (HAP 4.4) */
    HAPT_COLLECTIVE_ALL_TO_ALL,        /* sharded on one dimension (or by one ratio) -> on another */
    HAPT_COLLECTIVE_SLICE,             /* replicated -> sharded: each rank keeps its own part, no communication */
    HAPT_COLLECTIVE_COUNT
};
/* Key in files: "all_reduce", ... */
const char *hapt_collective_key(enum hapt_collective_kind kind);
/* True if it communicates: all but NONE and SLICE. */
bool hapt_collective_communicates(enum hapt_collective_kind kind);
/* True if all shards are sent as large as the largest. */
bool hapt_collective_pads(enum hapt_collective_kind kind);

/* Time of a collective over n ranks on a tensor of `bytes` in total, whose largest shard has the share `largest`:
 * latency_s + bytes * (byte_s + skew_s * (n * largest - 1)). The bracket is 0 for even shards. */
struct hapt_collective_term {
    double latency_s, byte_s, skew_s;
};
struct hapt_collective_model {
    int ranks; /* 1 rank: all kinds cost nothing */
    bool measured;
    struct hapt_collective_term term[HAPT_COLLECTIVE_COUNT];
};

/*
 * Seconds of a ring collective over `ranks` on a tensor of `bytes` in total, whose largest shard has the share
 * `largest_share`. The slowest link has `bandwidth` (byte/s per direction and rank) and `latency_s`.
 *
 * An all-reduce sends 2 (n-1)/n of the tensor over every link in 2 (n-1) rounds. Reduce-scatter and all-gather send
 * half of that, with shards padded to the largest. An all-to-all sends (n-1)/n of the largest shard. A grouped
 * broadcast pipelines every byte along the ring and starts n times.
 */
double hapt_ring_s(enum hapt_collective_kind kind, int ranks, double bytes, double largest_share, double bandwidth,
                   double latency_s);

#endif
