/* Structure, cost and traffic of operators. Private to the layers room. */
#ifndef HAPT_LAYERS_STRUCTURE_H
#define HAPT_LAYERS_STRUCTURE_H

#include "hapt/graph.h"

/* Equal for forward operators of equal type, attributes, shapes, and relative positions of their inputs' producers. */
uint64_t hapt_structure_of_op(const struct hapt_graph *graph, int op);

/* cut_bytes[e], e in 0..forward_count: bytes of the activations made before forward operator e and read by a forward or
 * backward operator of e or behind. */
enum hapt_status hapt_structure_cut_bytes(const struct hapt_graph *graph, struct hapt_arena *arena, double *cut_bytes);

/* whole[e]: an integer activation (the experts of the tokens) crosses that cut. What it names stands around it: data in
 * another order, whose amount depends on it. No layer ends there. */
enum hapt_status hapt_structure_whole(const struct hapt_graph *graph, struct hapt_arena *arena, bool *whole);

/* flops[op] of each forward operator and its backward operators, one microbatch. */
void hapt_structure_flops(const struct hapt_graph *graph, double *flops);

#endif
