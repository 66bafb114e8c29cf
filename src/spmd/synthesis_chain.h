/* The cheapest way through a chain of segments within memory. Private to synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_CHAIN_H
#define HAPT_SPMD_SYNTHESIS_CHAIN_H

#include "synthesis_private.h"

struct chain_arc {       /* a way through one segment */
    int from, to;        /* nodes of the borders in front of it and behind */
    double cost_s;       /* memory not counted */
    const double *bytes; /* [classes] */
    const void *outcome; /* the caller's */
};
struct chain_layer {
    int node_count, arc_count, arc_capacity;
    struct chain_arc *arc;
};
struct chain {
    struct hapt_arena *arena;
    int classes, segment_count;
    struct chain_layer
        *layer; /* [segment_count + 1] a border with the segment behind it; the last one has one node and no arcs */
    int price_count, price_capacity;
    double (*price)[MOST_CLASSES]; /* prices of memory that make good bounds; 0 is always among them */
};

enum hapt_status hapt_chain_init(struct chain *chain, int classes, int segment_count, struct hapt_arena *arena);
enum hapt_status hapt_chain_add_price(struct chain *chain, const double *price);
enum hapt_status hapt_chain_add_arc(struct chain *chain, int segment, struct chain_arc arc);
/*
 * The least cost from the first node of the first border to the last border within limit [classes]: arcs
 * [segment_count] of it. Labels (cost, bytes) fall behind others of their node, and when what they need at least, by
 * the bound of some price (Lagrange), is more than a way that is known; one that costs more by a part of `tolerance` at
 * most may be taken for the best. *exact: no label was left out for their number. INFINITY: there is none.
 */
enum hapt_status hapt_chain_search(const struct chain *chain, const double *limit, double tolerance,
                                   const struct chain_arc **way, double *cost_s, bool *exact);

#endif
