/*
 * What moves when a tensor changes its layout: the elements that two ranks have in common, as runs of bytes in the
 * dense local copies of both. Pure functions of what each rank holds (hapt_box); ranks may belong to meshes of any two
 * shapes.
 */
#ifndef HAPT_RESHARD_H
#define HAPT_RESHARD_H

#include "hapt/arena.h"
#include "hapt/link.h"
#include "hapt/sharding.h"

/* A part of a box: local places [first, end) of one dimension; dim -1: all of it. `compact`: the part is a dense copy
 * of its own. */
struct hapt_reshard_part {
    int dim;
    int64_t first, end;
    bool compact;
};

/* Runs of the elements that `a` and the part of `b` share: list k of in_a and in_b together list the same elements in
 * the same order. An empty list where they share none. Lives in `arena`. */
enum hapt_status hapt_reshard_common(const struct hapt_box *a, const struct hapt_box *b,
                                     const struct hapt_reshard_part *part, size_t element_bytes,
                                     struct hapt_arena *arena, struct hapt_strided_list *in_a,
                                     struct hapt_strided_list *in_b);
/* The box of a rank that holds all of a tensor. */
void hapt_reshard_whole(const struct hapt_tensor *tensor, struct hapt_box *box);
bool hapt_reshard_same(const struct hapt_box *a, const struct hapt_box *b);

/* Part `index` of `parts` of a box, cut along its longest dimension: what one of as many replicas fetches before they
 * exchange their parts. May be empty. */
struct hapt_reshard_part hapt_reshard_slice(const struct hapt_box *box, int parts, int index);
/* The part as one strided run of the dense local copy of the whole box. */
struct hapt_strided hapt_reshard_part_runs(const struct hapt_box *box, const struct hapt_reshard_part *part,
                                           size_t element_bytes);

#endif
