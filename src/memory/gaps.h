/* Free gaps of a workspace, by offset; everything behind `end` is free. */
#ifndef HAPT_MEMORY_GAPS_H
#define HAPT_MEMORY_GAPS_H

#include <stddef.h>

struct hapt_gap {
    size_t offset, bytes;
};
struct hapt_gaps {
    int count;
    struct hapt_gap *gap; /* room for one more than there are pieces */
    size_t end;           /* the peak so far */
};

/* Best fit: the smallest gap that holds the piece, else the end (extending a gap that touches it). */
size_t hapt_gaps_take(struct hapt_gaps *gaps, size_t bytes);
void hapt_gaps_give(struct hapt_gaps *gaps, size_t offset, size_t bytes);

#endif
