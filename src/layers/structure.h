/* Structure, FLOPs and boundary bytes of operators. Private to the layers room. */
#ifndef HAPT_LAYERS_STRUCTURE_H
#define HAPT_LAYERS_STRUCTURE_H

#include "hapt/graph.h"

/* Hash of a forward operator: equal for equal type, attributes, shapes, and relative positions of the inputs'
 * producers. */
uint64_t hapt_structure_of_op(const struct hapt_graph *graph, int op);

/* boundary_bytes[e], e in 0..forward_count: bytes of the activations that are written before forward operator e, and
 * read by operator e, a later forward operator, or a backward operator of these. */
enum hapt_status hapt_structure_boundary_bytes(const struct hapt_graph *graph, struct hapt_arena *arena,
                                               double *boundary_bytes);

/* unsplittable[e]: an integer activation (the tokens' expert numbers) crosses the boundary before operator e, so no
 * layer may end there. Tensors near it are laid out by its values, and their amount of data depends on them. */
enum hapt_status hapt_structure_unsplittable(const struct hapt_graph *graph, struct hapt_arena *arena,
                                             bool *unsplittable);

/* flops[op] of each forward operator and its backward operators, one microbatch. */
void hapt_structure_flops(const struct hapt_graph *graph, double *flops);

#endif
