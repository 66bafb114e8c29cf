/* The cheapest path through a chain of segments within memory. Private to synthesis*.c. */
#ifndef HAPT_SYNTHESIS_SYNTHESIS_CHAIN_H
#define HAPT_SYNTHESIS_SYNTHESIS_CHAIN_H

#include "synthesis_private.h"

struct chain_arc {       /* a path through one segment */
    int from, to;        /* nodes of the borders before and after it */
    double cost_s;       /* without the price of memory */
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
        *layer; /* [segment_count + 1] a border and the segment after it; the last one has one node and no arcs */
    int price_count, price_capacity;
    double (*price)[MOST_CLASSES]; /* prices of memory that give good bounds; always includes 0 */
};

enum hapt_status hapt_chain_init(struct chain *chain, int classes, int segment_count, struct hapt_arena *arena);
enum hapt_status hapt_chain_add_price(struct chain *chain, const double *price);
enum hapt_status hapt_chain_add_arc(struct chain *chain, int segment, struct chain_arc arc);
/*
 * The cheapest path from the first border's first node to the last border, within limit [classes]: its arcs
 * [segment_count]. A label (cost, bytes) is dropped if another of its node dominates it, or if its bound by some price
 * (Lagrange) exceeds a known path. A path may cost more than the best by a fraction of up to `tolerance`. *exact: no
 * label was dropped because there were too many. INFINITY: there is no path.
 */
enum hapt_status hapt_chain_search(const struct chain *chain, const double *limit, double tolerance,
                                   const struct chain_arc **path, double *cost_s, bool *exact);

#endif
