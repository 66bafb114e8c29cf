/* Layout changes: a box is a product of runs, so two boxes share a set of small blocks, each a product of runs. */
#include "hapt/reshard.h"

/* Common elements in one dimension, as offsets in either's local copy. */
struct overlap {
    int64_t in_a, in_b, count;
};

enum { MOST_OVERLAPS = 2 * HAPT_MAX_RUNS };

struct overlaps {
    int dims;
    int count[HAPT_MAX_DIMS];
    struct overlap at[HAPT_MAX_DIMS][MOST_OVERLAPS];
};

/* Runs ascend in both. */
static int overlap_runs(const struct hapt_box *a, const struct hapt_box *b, int d, int64_t low, int64_t high,
                        struct overlap *made)
{
    int count = 0, i = 0, j = 0;
    int64_t at_a = 0, at_b = 0;
    while (i < a->runs[d] && j < b->runs[d]) {
        const struct hapt_box_run x = a->run[d][i], y = b->run[d][j];
        int64_t from = x.start > y.start ? x.start : y.start;
        int64_t end = x.start + x.count < y.start + y.count ? x.start + x.count : y.start + y.count;
        /* Only local offsets [low, high) of b. */
        if (from < y.start + low - at_b) from = y.start + low - at_b;
        if (end > y.start + high - at_b) end = y.start + high - at_b;
        if (from < end) {
            HAPT_ASSERT(count < MOST_OVERLAPS);
            made[count++] = (struct overlap){at_a + from - x.start, at_b + from - y.start, end - from};
        }
        if (x.start + x.count < y.start + y.count)
            at_a += a->run[d][i++].count;
        else
            at_b += b->run[d][j++].count;
    }
    return count;
}

/* A block inside a dense array of `extent`. */
struct block {
    int dims;
    int64_t extent[HAPT_MAX_DIMS], start[HAPT_MAX_DIMS], count[HAPT_MAX_DIMS];
};

/* Its runs, in row-major order; made NULL: only counts them. */
static int list_block(const struct block *block, size_t element_bytes, struct hapt_strided *made)
{
    struct hapt_strided runs = {.count = 1, .run = element_bytes};
    size_t pitch = element_bytes; /* bytes between neighbours in dimension d */
    int d = block->dims - 1;
    for (; d >= 0 && block->count[d] == block->extent[d]; d--) pitch *= (size_t)block->extent[d];
    runs.run = pitch;
    if (d >= 0) {
        runs.run = pitch * (size_t)block->count[d];
        runs.offset = pitch * (size_t)block->start[d];
        pitch *= (size_t)block->extent[d--];
    }
    runs.stride = pitch;
    for (; d >= 0 && block->count[d] == block->extent[d]; d--) {
        runs.count *= (size_t)block->extent[d];
        pitch *= (size_t)block->extent[d];
    }
    if (d >= 0) {
        runs.count *= (size_t)block->count[d];
        runs.offset += pitch * (size_t)block->start[d];
        pitch *= (size_t)block->extent[d--];
    }
    int total = 1;
    for (int e = d; e >= 0; e--) total *= (int)block->count[e];
    for (int k = 0; k < total && made; k++) {
        size_t step = pitch;
        made[k] = runs;
        for (int e = d, rest = k; e >= 0; e--) {
            made[k].offset += step * (size_t)(block->start[e] + rest % block->count[e]);
            rest /= (int)block->count[e];
            step *= (size_t)block->extent[e];
        }
    }
    return total;
}

/* Block number k of the product of overlaps, at its offset in a or in b. */
static struct block block_at(const struct overlaps *overlaps, int k, const int64_t *extent, const int64_t *shift,
                             bool in_a)
{
    struct block block = {.dims = overlaps->dims};
    for (int d = overlaps->dims - 1; d >= 0; d--) {
        const struct overlap *at = &overlaps->at[d][k % overlaps->count[d]];
        k /= overlaps->count[d];
        block.extent[d] = extent[d];
        block.start[d] = (in_a ? at->in_a : at->in_b) - shift[d];
        block.count[d] = at->count;
    }
    return block;
}

static enum hapt_status list_side(const struct overlaps *overlaps, const int64_t *extent, const int64_t *shift,
                                  bool in_a, size_t element_bytes, struct hapt_arena *arena,
                                  struct hapt_strided_list *list)
{
    struct hapt_strided *part = NULL;
    int blocks = 1, count = 0;
    for (int d = 0; d < overlaps->dims; d++) blocks *= overlaps->count[d];
    for (int pass = 0; pass < 2; pass++) {
        count = 0;
        for (int k = 0; k < blocks; k++) {
            const struct block block = block_at(overlaps, k, extent, shift, in_a);
            count += list_block(&block, element_bytes, part ? part + count : NULL);
        }
        if (pass == 0) HAPT_NEW(part, arena, count);
    }
    *list = (struct hapt_strided_list){count, part};
    return HAPT_OK;
}

enum hapt_status hapt_reshard_common(const struct hapt_box *a, const struct hapt_box *b,
                                     const struct hapt_reshard_part *part, size_t element_bytes,
                                     struct hapt_arena *arena, struct hapt_strided_list *in_a,
                                     struct hapt_strided_list *in_b)
{
    struct overlaps overlaps = {.dims = a->dims};
    int64_t extent_b[HAPT_MAX_DIMS], shift[HAPT_MAX_DIMS] = {0};
    const int64_t none[HAPT_MAX_DIMS] = {0};
    HAPT_ASSERT(a->dims == b->dims);
    for (int d = 0; d < a->dims; d++) {
        const bool cut = part && part->dim == d;
        overlaps.count[d] =
            overlap_runs(a, b, d, cut ? part->first : 0, cut ? part->end : b->extent[d], overlaps.at[d]);
        extent_b[d] = cut && part->compact ? part->end - part->first : b->extent[d];
        shift[d] = cut && part->compact ? part->first : 0;
    }
    HAPT_TRY(list_side(&overlaps, a->extent, none, true, element_bytes, arena, in_a));
    return list_side(&overlaps, extent_b, shift, false, element_bytes, arena, in_b);
}

void hapt_reshard_full_box(const struct hapt_tensor *tensor, struct hapt_box *box)
{
    box->dims = tensor->dims;
    for (int d = 0; d < tensor->dims; d++) {
        box->runs[d] = 1;
        box->extent[d] = tensor->shape[d];
        box->run[d][0] = (struct hapt_box_run){0, tensor->shape[d]};
    }
}

bool hapt_reshard_same(const struct hapt_box *a, const struct hapt_box *b)
{
    if (a->dims != b->dims) return false;
    for (int d = 0; d < a->dims; d++) {
        if (a->runs[d] != b->runs[d]) return false;
        for (int r = 0; r < a->runs[d]; r++)
            if (a->run[d][r].start != b->run[d][r].start || a->run[d][r].count != b->run[d][r].count) return false;
    }
    return true;
}

struct hapt_reshard_part hapt_reshard_slice(const struct hapt_box *box, int parts, int index)
{
    int longest = 0;
    for (int d = 1; d < box->dims; d++)
        if (box->extent[d] > box->extent[longest]) longest = d;
    const size_t extent = (size_t)box->extent[longest];
    return (struct hapt_reshard_part){.dim = longest,
                                      .first = (int64_t)hapt_collective_slice(extent, parts, index),
                                      .end = (int64_t)hapt_collective_slice(extent, parts, index + 1)};
}

struct hapt_strided hapt_reshard_part_runs(const struct hapt_box *box, const struct hapt_reshard_part *part,
                                           size_t element_bytes)
{
    size_t outer = 1, inner = element_bytes;
    for (int d = 0; d < part->dim; d++) outer *= (size_t)box->extent[d];
    for (int d = part->dim + 1; d < box->dims; d++) inner *= (size_t)box->extent[d];
    return (struct hapt_strided){.offset = (size_t)part->first * inner,
                                 .count = outer,
                                 .run = (size_t)(part->end - part->first) * inner,
                                 .stride = (size_t)box->extent[part->dim] * inner};
}
