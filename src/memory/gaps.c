#include "gaps.h"

#include <stdbool.h>

size_t hapt_gaps_take(struct hapt_gaps *gaps, size_t bytes)
{
    int best = -1;
    for (int g = 0; g < gaps->count; g++)
        if (gaps->gap[g].bytes >= bytes && (best < 0 || gaps->gap[g].bytes < gaps->gap[best].bytes)) best = g;
    if (best < 0) {
        struct hapt_gap *last = gaps->count > 0 ? &gaps->gap[gaps->count - 1] : NULL;
        const bool touches = last && last->offset + last->bytes == gaps->end;
        const size_t offset = touches ? last->offset : gaps->end;
        if (touches) gaps->count--;
        gaps->end = offset + bytes;
        return offset;
    }
    const size_t offset = gaps->gap[best].offset;
    gaps->gap[best].offset += bytes;
    gaps->gap[best].bytes -= bytes;
    if (gaps->gap[best].bytes == 0) {
        for (int g = best; g + 1 < gaps->count; g++) gaps->gap[g] = gaps->gap[g + 1];
        gaps->count--;
    }
    return offset;
}

void hapt_gaps_give(struct hapt_gaps *gaps, size_t offset, size_t bytes)
{
    int at = 0;
    while (at < gaps->count && gaps->gap[at].offset < offset) at++;
    const bool joins_left = at > 0 && gaps->gap[at - 1].offset + gaps->gap[at - 1].bytes == offset;
    const bool joins_right = at < gaps->count && offset + bytes == gaps->gap[at].offset;
    if (joins_left && joins_right) {
        gaps->gap[at - 1].bytes += bytes + gaps->gap[at].bytes;
        for (int g = at; g + 1 < gaps->count; g++) gaps->gap[g] = gaps->gap[g + 1];
        gaps->count--;
    } else if (joins_left) {
        gaps->gap[at - 1].bytes += bytes;
    } else if (joins_right) {
        gaps->gap[at].offset = offset;
        gaps->gap[at].bytes += bytes;
    } else {
        for (int g = gaps->count; g > at; g--) gaps->gap[g] = gaps->gap[g - 1];
        gaps->gap[at] = (struct hapt_gap){offset, bytes};
        gaps->count++;
    }
}
