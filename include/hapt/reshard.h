/*
 * Data movement when a tensor changes its layout: the elements that two ranks share, as runs of bytes in the dense
 * local copies of both. Pure functions of the ranks' boxes (hapt_box). The ranks may belong to meshes of any two
 * shapes.
 */
#ifndef HAPT_RESHARD_H
#define HAPT_RESHARD_H

#include "hapt/arena.h"
#include "hapt/link.h"
#include "hapt/sharding.h"

/* A part of a box: local offsets [first, end) of dimension `dim`; dim -1: the full box. `compact`: the part is
 * stored as a dense copy of its own. */
struct hapt_reshard_part {
    int dim;
    int64_t first, end;
    bool compact;
};

/* Runs of the elements that `a` and the part of `b` share. Entry k of in_a and of in_b list the same elements in
 * the same order. Both lists are empty if nothing is shared. Lives in `arena`. */
enum hapt_status hapt_reshard_common(const struct hapt_box *a, const struct hapt_box *b,
                                     const struct hapt_reshard_part *part, size_t element_bytes,
                                     struct hapt_arena *arena, struct hapt_strided_list *in_a,
                                     struct hapt_strided_list *in_b);
/* The box of a rank that holds the full tensor. */
void hapt_reshard_full_box(const struct hapt_tensor *tensor, struct hapt_box *box);
bool hapt_reshard_same(const struct hapt_box *a, const struct hapt_box *b);

/* Part `index` of `parts` of a box, split along its longest dimension. With `parts` replicas, each fetches one
 * part, then they exchange parts. May be empty. */
struct hapt_reshard_part hapt_reshard_slice(const struct hapt_box *box, int parts, int index);
/* The part as one strided run of the full box's dense local copy. */
struct hapt_strided hapt_reshard_part_runs(const struct hapt_box *box, const struct hapt_reshard_part *part,
                                           size_t element_bytes);

#endif
