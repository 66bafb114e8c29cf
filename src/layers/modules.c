#include "modules.h"

#include <stdlib.h>
#include <string.h>

struct window {
    int name, next, position;
};

struct finder {
    const int *key;
    int count, heavy_minimum;
    int *heavy;  /* [count + 1] prefix sums */
    int *kind;   /* [count] -1: not in a repeated module yet */
    int *room;   /* [count] elements from here to the end of the non-repeated stretch, 0 inside repeated modules */
    int *name;   /* [count] equal exactly for equal windows of the present length; -1 where none fits */
    bool *opens; /* [count] a module starts here */
    struct window *window; /* [count] */
};

struct choice {
    int occurrences, length, position;
};

static int compare_windows(const void *left, const void *right)
{
    const struct window *a = left, *b = right;
    if (a->name != b->name) return a->name < b->name ? -1 : 1;
    if (a->next != b->next) return a->next < b->next ? -1 : 1;
    return (a->position > b->position) - (a->position < b->position);
}

/* Sorts the windows of `length`, equal ones next to each other in order of position: a window is named by its part
 * without the last element and by that element. Returns their number. */
static int sort_windows(struct finder *finder, int length)
{
    int windows = 0;
    for (int i = 0; i < finder->count; i++) {
        if (finder->room[i] < length) continue;
        finder->window[windows++] = (struct window){finder->name[i], finder->key[i + length - 1], i};
    }
    qsort(finder->window, (size_t)windows, sizeof *finder->window, compare_windows);
    return windows;
}

static bool same_window(const struct window *a, const struct window *b)
{
    return a->name == b->name && a->next == b->next;
}

/* Names the sorted windows and keeps the best; false when none of this length occurs twice (then no longer one does).
 */
static bool weigh_windows(struct finder *finder, int length, int windows, struct choice *best)
{
    bool repeats = false;
    for (int i = 0; i < finder->count; i++) finder->name[i] = -1;
    for (int first = 0, end; first < windows; first = end) {
        int occurrences = 0, free_from = 0;
        for (end = first; end < windows && same_window(&finder->window[first], &finder->window[end]); end++) {
            const int position = finder->window[end].position;
            finder->name[position] = first;
            if (position < free_from) continue;
            occurrences++;
            free_from = position + length;
        }
        if (occurrences < 2) continue;
        repeats = true;
        const int position = finder->window[first].position;
        const struct choice found = {occurrences, length, position};
        if (finder->heavy[position + length] - finder->heavy[position] < finder->heavy_minimum) continue;
        if (found.occurrences > best->occurrences ||
            (found.occurrences == best->occurrences &&
             (found.length > best->length || (found.length == best->length && found.position < best->position)))) {
            *best = found;
        }
    }
    return repeats;
}

static struct choice find_choice(struct finder *finder)
{
    struct choice best = {0, 0, 0};
    int total = 0;
    for (int i = finder->count - 1; i >= 0; i--) {
        const bool joined = i + 1 < finder->count && !finder->opens[i + 1] && finder->kind[i + 1] < 0;
        finder->room[i] = finder->kind[i] >= 0 ? 0 : joined ? finder->room[i + 1] + 1 : 1;
        finder->name[i] = 0;
        total += finder->kind[i] < 0;
    }
    /* Windows of a length cannot occur more often than they fit. */
    for (int length = 1; length <= total / 2 && total / length >= best.occurrences; length++) {
        if (!weigh_windows(finder, length, sort_windows(finder, length), &best)) break;
    }
    return best;
}

static bool equal_window(const struct finder *finder, int a, int b, int length)
{
    return finder->room[a] >= length && memcmp(&finder->key[a], &finder->key[b], (size_t)length * sizeof(int)) == 0;
}

static void mark(struct finder *finder, const struct choice *choice, int kind)
{
    for (int i = choice->position; i < finder->count;) {
        if (!equal_window(finder, i, choice->position, choice->length)) {
            i++;
            continue;
        }
        finder->opens[i] = true;
        if (i + choice->length < finder->count) finder->opens[i + choice->length] = true;
        /* The key stays; kind alone takes the stretch out of the next rounds. room is kept up for this loop only. */
        for (int end = i + choice->length; i < end; i++) finder->kind[i] = kind;
    }
}

enum hapt_status hapt_modules_find(const int *key, const bool *heavy, int count, int heavy_minimum,
                                   struct hapt_arena *arena, struct hapt_module **module, int *module_count)
{
    struct finder finder = {.key = key, .count = count, .heavy_minimum = heavy_minimum};
    HAPT_NEW(finder.heavy, arena, count + 1);
    HAPT_NEW(finder.kind, arena, count);
    HAPT_NEW(finder.room, arena, count);
    HAPT_NEW(finder.name, arena, count);
    HAPT_NEW(finder.opens, arena, count);
    HAPT_NEW(finder.window, arena, count);
    for (int i = 0; i < count; i++) {
        finder.heavy[i + 1] = finder.heavy[i] + heavy[i];
        finder.kind[i] = -1;
        finder.opens[i] = i == 0;
    }
    for (int kind = 0;; kind++) {
        const struct choice choice = find_choice(&finder);
        if (choice.occurrences < 2) break;
        mark(&finder, &choice, kind);
    }
    int modules = 0;
    for (int i = 0; i < count; i++) modules += finder.opens[i];
    HAPT_NEW(*module, arena, modules);
    *module_count = modules;
    for (int i = 0, next = 0; i < count; i++) {
        if (!finder.opens[i]) continue;
        if (next > 0) (*module)[next - 1].end_op = i;
        (*module)[next++] = (struct hapt_module){i, count, finder.kind[i]};
    }
    return HAPT_OK;
}
