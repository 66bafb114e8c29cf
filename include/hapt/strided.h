/* Runs of bytes in dense arrays: what one rank has of another's tensor. */
#ifndef HAPT_STRIDED_H
#define HAPT_STRIDED_H

#include <stddef.h>

/* Runs of bytes in a dense array, evenly spaced: `count` runs of `run` bytes, the first at `offset`, the next each
 * `stride` further. What a rank holds of one dimension of a tensor is one of these in the whole tensor; in order they
 * are its dense local copy. */
struct hapt_strided {
    size_t offset, count, run, stride;
};
/* Several of them, one behind the other: what one rank sends another when a tensor changes its layout. */
struct hapt_strided_list {
    int count;
    const struct hapt_strided *part;
};

#endif
