/*
 * Reductions. One rank combines each element, in rank order. So all ranks get the same bits, and the result depends
 * neither on the transport nor on the division into blocks.
 */
#include <string.h>

#include "collective.h"

/* sum = sum o term, elementwise. */
static void combine_f32(enum hapt_combine combine, float *restrict sum, const float *restrict term, size_t count)
{
    if (combine == HAPT_COMBINE_SUM) {
#pragma omp simd
        for (size_t i = 0; i < count; i++) sum[i] += term[i];
    } else {
#pragma omp simd
        for (size_t i = 0; i < count; i++) sum[i] = term[i] > sum[i] || term[i] != term[i] ? term[i] : sum[i];
    }
}

/* Combines the terms of all ranks at once, so that 16-bit numbers are rounded only once, at the end. */
static void combine_half(enum hapt_combine combine, enum hapt_dtype dtype, uint16_t *sum, const char *const *term,
                         int ranks, size_t first, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        float value = 0;
        for (int r = 0; r < ranks; r++) {
            uint16_t bits;
            memcpy(&bits, term[r] + (first + i) * sizeof bits, sizeof bits);
            const float next = dtype == HAPT_F16 ? hapt_f16_to_f32(bits) : hapt_bf16_to_f32(bits);
            if (r == 0)
                value = next;
            else
                combine_f32(combine, &value, &next, 1);
        }
        sum[i] = dtype == HAPT_F16 ? hapt_f16_from_f32(value) : hapt_bf16_from_f32(value);
    }
}

enum { TILE = 1024 };

/* to[i] = combination over ranks of term[r][i]; `to` may be one of the terms. */
static void combine_all(enum hapt_combine combine, enum hapt_dtype dtype, void *to, const char *const *term, int ranks,
                        size_t elements)
{
    if (dtype == HAPT_BF16 || dtype == HAPT_F16) {
        combine_half(combine, dtype, to, term, ranks, 0, elements);
        return;
    }
    HAPT_ASSERT(dtype == HAPT_F32);
    float tile[TILE];
    for (size_t first = 0; first < elements; first += TILE) {
        const size_t count = elements - first < TILE ? elements - first : TILE;
        memcpy(tile, term[0] + first * sizeof *tile, count * sizeof *tile);
        for (int r = 1; r < ranks; r++) combine_f32(combine, tile, (const float *)term[r] + first, count);
        memcpy((float *)to + first, tile, count * sizeof *tile);
    }
}

/* ---- all-reduce ---- */

/* One block in the slabs: each rank combines its slice into the first slab; then all ranks copy that slab. */
static enum hapt_status reduce_shared(struct hapt_collective *collective, const char *what, enum hapt_combine combine,
                                      enum hapt_dtype dtype, char *data, size_t elements)
{
    const size_t width = hapt_dtype_bytes(dtype), block = SLAB_BYTES / width;
    const char **term = collective->term;
    for (size_t first = 0; first < elements; first += block) {
        const size_t count = elements - first < block ? elements - first : block;
        char *const *slab = collective_next_slabs(collective);
        const size_t mine = hapt_collective_slice(count, collective->size, collective->rank);
        const size_t end = hapt_collective_slice(count, collective->size, collective->rank + 1);
        memcpy(slab[collective->rank], data + first * width, count * width);
        HAPT_TRY(collective_barrier(collective, what));
        for (int r = 0; r < collective->size; r++) term[r] = slab[r] + mine * width;
        combine_all(combine, dtype, slab[0] + mine * width, term, collective->size, end - mine);
        HAPT_TRY(collective_barrier(collective, what));
        memcpy(data + first * width, slab[0], count * width);
    }
    return HAPT_OK;
}

/* One block by messages: slices go to their owner, are combined there and sent back. */
static enum hapt_status reduce_messages(struct hapt_collective *collective, const char *what, enum hapt_combine combine,
                                        enum hapt_dtype dtype, char *data, size_t elements)
{
    const size_t width = hapt_dtype_bytes(dtype);
    const int me = collective->rank, size = collective->size;
    const size_t mine = hapt_collective_slice(elements, size, me);
    const size_t own = (hapt_collective_slice(elements, size, me + 1) - mine) * width;
    const char **term = collective->term;
    collective_all_to_all_begin(collective);
    for (int r = 0; r < size; r++) {
        const size_t first = hapt_collective_slice(elements, size, r);
        collective->in_bytes[r] = own;
        collective->out_bytes[r] = (hapt_collective_slice(elements, size, r + 1) - first) * width;
        memcpy(collective_all_to_all_out(collective, r), data + first * width, collective->out_bytes[r]);
    }
    HAPT_TRY(collective_all_to_all(collective, what));
    for (int r = 0; r < size; r++) term[r] = collective_all_to_all_in(collective, r);
    combine_all(combine, dtype, data + mine * width, term, size, own / width);
    for (int r = 0; r < size; r++) {
        const size_t first = hapt_collective_slice(elements, size, r);
        collective->out_bytes[r] = own;
        collective->in_bytes[r] = (hapt_collective_slice(elements, size, r + 1) - first) * width;
        memcpy(collective_all_to_all_out(collective, r), data + mine * width, own);
    }
    HAPT_TRY(collective_all_to_all(collective, what));
    for (int r = 0; r < size; r++)
        memcpy(data + hapt_collective_slice(elements, size, r) * width, collective_all_to_all_in(collective, r),
               collective->in_bytes[r]);
    return HAPT_OK;
}

enum hapt_status hapt_collective_combine(struct hapt_collective *collective, const char *what,
                                         enum hapt_combine combine, enum hapt_dtype dtype, void *data, size_t elements)
{
    if (collective->size == 1) return HAPT_OK;
    const size_t width = hapt_dtype_bytes(dtype), block = SEGMENT_BYTES / width * (size_t)collective->size;
    if (collective->head) HAPT_TRY(reduce_shared(collective, what, combine, dtype, data, elements));
    for (size_t first = 0; !collective->head && first < elements; first += block)
        HAPT_TRY(reduce_messages(collective, what, combine, dtype, (char *)data + first * width,
                                 elements - first < block ? elements - first : block));
    collective_wait_ring(collective, HAPT_COLLECTIVE_ALL_REDUCE, (double)(elements * width), 0);
    return HAPT_OK;
}

enum hapt_status hapt_collective_all_reduce(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements)
{
    return hapt_collective_combine(collective, what, HAPT_COMBINE_SUM, HAPT_F32, data, elements);
}

/* ---- reduce-scatter ---- */

enum hapt_status hapt_collective_reduce_scatter(struct hapt_collective *collective, const char *what,
                                                enum hapt_dtype dtype, const struct hapt_strided *part,
                                                const void *partial, void *mine)
{
    const int me = collective->rank, size = collective->size;
    const size_t own = part[me].count * part[me].run, width = hapt_dtype_bytes(dtype);
    const struct hapt_strided_list its = {1, &part[me]};
    size_t longest = own, whole = 0;
    if (size == 1) {
        hapt_strided_pack(&its, partial, 0, own, mine);
        return HAPT_OK;
    }
    for (int r = 0; r < size; r++) {
        whole += part[r].count * part[r].run;
        if (part[r].count * part[r].run > longest) longest = part[r].count * part[r].run;
    }
    const size_t block = collective_all_to_all_bytes(collective);
    const char **term = collective->term;
    for (size_t first = 0; first < longest; first += block) {
        collective_all_to_all_begin(collective);
        for (int r = 0; r < size; r++) {
            const struct hapt_strided_list list = {1, &part[r]};
            collective->in_bytes[r] = collective_part(own, first, block);
            collective->out_bytes[r] = collective_part(part[r].count * part[r].run, first, block);
            hapt_strided_pack(&list, partial, first, collective->out_bytes[r],
                              collective_all_to_all_out(collective, r));
        }
        HAPT_TRY(collective_all_to_all(collective, what));
        for (int r = 0; r < size; r++) term[r] = collective_all_to_all_in(collective, r);
        if (collective->in_bytes[me] > 0)
            combine_all(HAPT_COMBINE_SUM, dtype, (char *)mine + first, term, size, collective->in_bytes[me] / width);
    }
    collective_wait_ring(collective, HAPT_COLLECTIVE_REDUCE_SCATTER, (double)whole, (double)longest / (double)whole);
    return HAPT_OK;
}
