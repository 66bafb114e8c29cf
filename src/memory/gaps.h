/* Free gaps of a workspace, ordered by offset. Everything from `end` on is free. */
#ifndef HAPT_MEMORY_GAPS_H
#define HAPT_MEMORY_GAPS_H

#include <stddef.h>

struct hapt_gap {
    size_t offset, bytes;
};
struct hapt_gaps {
    int count;
    struct hapt_gap *gap; /* capacity: number of pieces + 1 */
    size_t end;           /* the peak so far */
};

/* Best fit: the offset of the smallest gap that holds the piece; else the end, or a gap that touches it, extended. */
size_t hapt_gaps_take(struct hapt_gaps *gaps, size_t bytes);
void hapt_gaps_give(struct hapt_gaps *gaps, size_t offset, size_t bytes);

#endif
