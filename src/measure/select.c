/* Chooses base and witness items. */
#include "select.h"

#include <stdlib.h>

enum { LONGEST_PERIOD = 8, WITNESSES = 6 };

/* Number of layers in the longest repeated module: interactions of neighbours repeat with it. */
static int period_of(const struct hapt_layers *layers)
{
    int period = 1;
    for (int l = 0, run = 0; l < layers->count; l++) {
        run = l > 0 && layers->module_of[l] == layers->module_of[l - 1] ? run + 1 : 1;
        if (layers->module[layers->module_of[l]].kind >= 0 && run > period) period = run;
    }
    return period < LONGEST_PERIOD ? period : LONGEST_PERIOD;
}

static int length_of(const struct hapt_candidates *candidates, int item)
{
    const int structure = item / candidates->mesh_count;
    return candidates->last[structure] - candidates->first[structure] + 1;
}

static bool on_ladder(int length, int shortest)
{
    int rung = shortest;
    while (rung < length) rung *= 2;
    return rung == length;
}

struct drawn {
    uint64_t key;
    int item;
};

static int by_random_key(const void *a, const void *b)
{
    const struct drawn *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return x->item - y->item;
}

enum hapt_status select_items(const struct hapt_candidates *candidates, const bool *needed, struct hapt_arena *scratch,
                              unsigned char *role)
{
    const int D = candidates->mesh_count, shortest = 2 * period_of(candidates->layers);
    struct drawn *rest;
    int *longest;
    HAPT_NEW(rest, scratch, candidates->item_count);
    HAPT_NEW(longest, scratch, D);
    for (int item = 0; item < candidates->item_count; item++)
        if (needed[item] && length_of(candidates, item) > longest[item % D])
            longest[item % D] = length_of(candidates, item);
    for (int mesh_index = 0; mesh_index < D; mesh_index++) {
        int count = 0;
        for (int item = mesh_index; item < candidates->item_count; item += D) {
            const int length = length_of(candidates, item);
            role[item] = SELECT_NONE;
            if (!needed[item]) continue;
            role[item] = SELECT_BASE;
            if (length <= shortest || length == longest[mesh_index] || on_ladder(length, shortest)) continue;
            role[item] = SELECT_REST;
            rest[count++] = (struct drawn){hapt_hash(3, &item, sizeof item), item};
        }
        /* For a handful of items, checking costs more than composing saves. */
        const bool few = count <= 2 * WITNESSES;
        qsort(rest, (size_t)count, sizeof *rest, by_random_key);
        for (int k = 0; k < count && (few || k < WITNESSES); k++)
            role[rest[k].item] = few ? SELECT_BASE : SELECT_WITNESS;
    }
    return HAPT_OK;
}
