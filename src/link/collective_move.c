/* Collectives that move data without arithmetic, in blocks: all-gather, grouped broadcast, all-to-all. */
#include <string.h>

#include "collective.h"

/* ---- strided runs ---- */

size_t hapt_strided_bytes(const struct hapt_strided_list *list)
{
    size_t bytes = 0;
    for (int p = 0; p < list->count; p++) bytes += list->part[p].count * list->part[p].run;
    return bytes;
}

/* Copies bytes [first, first + bytes) of one strided part. */
static void copy_part(const struct hapt_strided *part, char *base, size_t first, size_t bytes, char *dense, bool packs)
{
    if (bytes == 0) return;
    size_t run = first / part->run, at = first % part->run;
    for (; bytes > 0; run++, at = 0) {
        const size_t count = part->run - at < bytes ? part->run - at : bytes;
        char *address = base + part->offset + run * part->stride + at;
        memcpy(packs ? dense : address, packs ? address : dense, count);
        dense += count;
        bytes -= count;
    }
}

static void copy_list(const struct hapt_strided_list *list, char *base, size_t first, size_t bytes, char *dense,
                      bool packs)
{
    for (int p = 0; p < list->count && bytes > 0; p++) {
        const size_t length = list->part[p].count * list->part[p].run;
        if (first >= length) {
            first -= length;
            continue;
        }
        const size_t count = length - first < bytes ? length - first : bytes;
        copy_part(&list->part[p], base, first, count, dense, packs);
        dense += count;
        bytes -= count;
        first = 0;
    }
    HAPT_ASSERT(bytes == 0);
}

void hapt_strided_pack(const struct hapt_strided_list *list, const void *base, size_t first, size_t bytes, void *dense)
{
    copy_list(list, (char *)base, first, bytes, dense, true);
}

void hapt_strided_unpack(const struct hapt_strided_list *list, void *base, size_t first, size_t bytes,
                         const void *dense)
{
    copy_list(list, base, first, bytes, (char *)dense, false);
}

/* ---- all-gather, grouped broadcast ---- */

struct gather {
    const struct hapt_strided *part; /* [size] */
    size_t longest;
    struct hapt_strided own_part;
    struct hapt_strided_list own; /* this rank's shard in `mine` */
    const char *mine;
    char *replicated;
};

static size_t part_bytes(const struct gather *gather, int rank)
{
    return gather->part[rank].count * gather->part[rank].run;
}

static void take(const struct gather *gather, int rank, size_t first, size_t most, const char *block)
{
    const struct hapt_strided_list list = {1, &gather->part[rank]};
    hapt_strided_unpack(&list, gather->replicated, first, collective_part(part_bytes(gather, rank), first, most),
                        block);
}

/* Each rank writes a block of its shard to its slab; the others read it there. */
static enum hapt_status gather_shared(struct hapt_collective *collective, const char *what, const struct gather *gather)
{
    const int me = collective->rank;
    for (size_t first = 0; first < gather->longest; first += SLAB_BYTES) {
        char *const *slab = collective_next_slabs(collective);
        hapt_strided_pack(&gather->own, gather->mine, first, collective_part(part_bytes(gather, me), first, SLAB_BYTES),
                          slab[me]);
        HAPT_TRY(collective_barrier(collective, what));
        for (int r = 0; r < collective->size; r++)
            if (r != me) take(gather, r, first, SLAB_BYTES, slab[r]);
    }
    return HAPT_OK;
}

static enum hapt_status gather_messages(struct hapt_collective *collective, const char *what, bool padded,
                                        const struct gather *gather)
{
    const int me = collective->rank;
    for (size_t first = 0; first < gather->longest; first += SEGMENT_BYTES) {
        const size_t most = collective_part(gather->longest, first, SEGMENT_BYTES);
        const size_t own = collective_part(part_bytes(gather, me), first, SEGMENT_BYTES);
        for (int r = 0; r < collective->size; r++) {
            collective->in_bytes[r] = padded ? most : collective_part(part_bytes(gather, r), first, SEGMENT_BYTES);
            collective->out_bytes[r] = padded ? most : own;
            if (r != me)
                hapt_strided_pack(&gather->own, gather->mine, first, own, collective_all_to_all_out(collective, r));
        }
        HAPT_TRY(collective_all_to_all(collective, what));
        for (int r = 0; r < collective->size; r++)
            if (r != me) take(gather, r, first, SEGMENT_BYTES, collective_all_to_all_in(collective, r));
    }
    return HAPT_OK;
}

enum hapt_status hapt_collective_gather_shards(struct hapt_collective *collective, const char *what, bool padded,
                                               const struct hapt_strided *part, const void *mine, void *replicated)
{
    const int me = collective->rank;
    struct gather gather = {
        .part = part, .own_part = part[me], .mine = mine ? mine : replicated, .replicated = replicated};
    if (mine) {
        gather.own_part = (struct hapt_strided){0, 1, part_bytes(&gather, me), 0};
        take(&gather, me, 0, SIZE_MAX, mine);
    }
    gather.own = (struct hapt_strided_list){1, &gather.own_part};
    size_t bytes = 0;
    for (int r = 0; r < collective->size; r++) {
        bytes += part_bytes(&gather, r);
        if (part_bytes(&gather, r) > gather.longest) gather.longest = part_bytes(&gather, r);
    }
    if (collective->size == 1 || bytes == 0) return HAPT_OK;
    HAPT_TRY(collective->head ? gather_shared(collective, what, &gather)
                              : gather_messages(collective, what, padded, &gather));
    collective_wait_ring(collective, padded ? HAPT_COLLECTIVE_ALL_GATHER : HAPT_COLLECTIVE_GROUPED_BROADCAST,
                         (double)bytes, (double)gather.longest / (double)bytes);
    return HAPT_OK;
}

/* ---- all-to-all ---- */

enum hapt_status hapt_collective_all_to_all(struct hapt_collective *collective, const char *what, size_t longest,
                                            const struct hapt_strided_list *send, const void *from,
                                            const struct hapt_strided_list *receive, void *to)
{
    const size_t block = collective_all_to_all_bytes(collective), size = (size_t)collective->size;
    for (size_t first = 0; first < longest; first += block) {
        collective_all_to_all_begin(collective);
        for (int r = 0; r < collective->size; r++) {
            collective->out_bytes[r] = collective_part(hapt_strided_bytes(&send[r]), first, block);
            collective->in_bytes[r] = collective_part(hapt_strided_bytes(&receive[r]), first, block);
            hapt_strided_pack(&send[r], from, first, collective->out_bytes[r],
                              collective_all_to_all_out(collective, r));
        }
        if (collective->size > 1) HAPT_TRY(collective_all_to_all(collective, what));
        for (int r = 0; r < collective->size; r++)
            hapt_strided_unpack(&receive[r], to, first, collective->in_bytes[r],
                                collective_all_to_all_in(collective, r));
    }
    collective_wait_ring(collective, HAPT_COLLECTIVE_ALL_TO_ALL, (double)(longest * size * size),
                         0); /* priced as if all messages were as long */
    return HAPT_OK;
}
