/*
 * Rewriting of an expanded graph: operators are copied in order, with further operators and further versions of tensors
 * between them. Tensors keep their indices. Private to the room.
 */
#ifndef HAPT_SPMD_REWRITE_H
#define HAPT_SPMD_REWRITE_H

#include "hapt/sharding.h"

struct rewrite {
    const struct hapt_sharding *from;
    struct hapt_sharding *made;
    struct hapt_graph *graph; /* made->graph */
    struct hapt_arena *arena;
};

/* Room for so many further tensors and operators. */
enum hapt_status rewrite_begin(struct rewrite *rewrite, const struct hapt_sharding *from, int tensors, int ops,
                               struct hapt_arena *arena);
/* Appends a version of `tensor` in a storage of its own; NULL name: no memory. Its producer is the next operator. */
enum hapt_status rewrite_add_tensor(struct rewrite *rewrite, int tensor, const char *name, int *index);
/* Appends operator `o`, as `op` says, with its cuts. Call in the order of operators, reduce operators included. */
void rewrite_copy(struct rewrite *rewrite, int o, const struct hapt_op *op);
/* Appends an operator that is like `o` (its cuts, its place). */
int rewrite_add(struct rewrite *rewrite, int o, const struct hapt_op *op);
/* Call after the last operator. */
enum hapt_status rewrite_end(struct rewrite *rewrite);

#endif
