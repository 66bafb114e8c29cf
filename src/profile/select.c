/* The base, the ladder and the witnesses. */
#include "select.h"

#include <stdlib.h>

enum { LONGEST_PERIOD = 8, WITNESSES = 6 };

/* Layers of the longest repeated module: interactions of neighbours repeat with it. */
static int period_of(const struct hapt_layers *layers)
{
    int period = 1;
    for (int l = 0, run = 0; l < layers->count; l++) {
        run = l > 0 && layers->module_of[l] == layers->module_of[l - 1] ? run + 1 : 1;
        if (layers->module[layers->module_of[l]].kind >= 0 && run > period) period = run;
    }
    return period < LONGEST_PERIOD ? period : LONGEST_PERIOD;
}

static int length_of(const struct candidates *candidates, int item)
{
    const int structure = item / candidates->degree_count;
    return candidates->last[structure] - candidates->first[structure] + 1;
}

static bool on_ladder(int length, int shortest)
{
    int rung = shortest;
    while (rung < length) rung *= 2;
    return rung == length;
}

struct drawn {
    uint64_t lot;
    int item;
};

static int by_lot(const void *a, const void *b)
{
    const struct drawn *x = a, *y = b;
    if (x->lot != y->lot) return x->lot < y->lot ? -1 : 1;
    return x->item - y->item;
}

enum hapt_status select_items(const struct candidates *candidates, const bool *needed, struct hapt_arena *scratch,
                              unsigned char *role)
{
    const int D = candidates->degree_count, shortest = 2 * period_of(candidates->layers);
    struct drawn *rest;
    int *longest;
    HAPT_NEW(rest, scratch, candidates->item_count);
    HAPT_NEW(longest, scratch, D);
    for (int item = 0; item < candidates->item_count; item++)
        if (needed[item] && length_of(candidates, item) > longest[item % D])
            longest[item % D] = length_of(candidates, item);
    for (int degree = 0; degree < D; degree++) {
        int count = 0;
        for (int item = degree; item < candidates->item_count; item += D) {
            const int length = length_of(candidates, item);
            role[item] = SELECT_NONE;
            if (!needed[item]) continue;
            role[item] = SELECT_BASE;
            if (length <= shortest || length == longest[degree] || on_ladder(length, shortest)) continue;
            role[item] = SELECT_REST;
            rest[count++] = (struct drawn){hapt_hash(3, &item, sizeof item), item};
        }
        /* Composing a handful is not worth its check. */
        const bool few = count <= 2 * WITNESSES;
        qsort(rest, (size_t)count, sizeof *rest, by_lot);
        for (int k = 0; k < count && (few || k < WITNESSES); k++)
            role[rest[k].item] = few ? SELECT_BASE : SELECT_WITNESS;
    }
    return HAPT_OK;
}
