/* Strided runs of bytes in dense arrays: one rank's part of another rank's tensor. */
#ifndef HAPT_STRIDED_H
#define HAPT_STRIDED_H

#include <stddef.h>

/* Evenly spaced runs in a dense array: `count` runs of `run` bytes, the first at `offset`, each next one `stride` bytes
 * further. A rank's shard of one dimension is one of these in the full tensor; concatenated, the runs are its dense
 * local copy. */
struct hapt_strided {
    size_t offset, count, run, stride;
};
/* A sequence of them: what one rank sends another when a tensor changes its layout. */
struct hapt_strided_list {
    int count;
    const struct hapt_strided *part;
};

#endif
