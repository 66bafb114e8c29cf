#include "modules.h"

#include <stdlib.h>
#include <string.h>

struct subsequence {
    int name, next, position;
};

struct finder {
    const int *key;
    int count, heavy_minimum;
    int *heavy;    /* [count + 1] prefix sums */
    int *kind;     /* [count] -1: not in a repeated module yet */
    int *run_left; /* [count] elements from here to the end of the run outside repeated modules; 0 inside them */
    int *name; /* [count] name of the subsequence of the current length that starts here, equal for equal subsequences;
                  -1: none fits */
    bool *opens;                     /* [count] a module starts here */
    struct subsequence *subsequence; /* [count] */
};

struct choice {
    int occurrences, length, position;
};

static int compare_subsequences(const void *left, const void *right)
{
    const struct subsequence *a = left, *b = right;
    if (a->name != b->name) return a->name < b->name ? -1 : 1;
    if (a->next != b->next) return a->next < b->next ? -1 : 1;
    return (a->position > b->position) - (a->position < b->position);
}

/* Sorts the subsequences of `length`; equal ones are adjacent, in order of position. A subsequence is identified by its
 * prefix without the last element (named before) and that element. Returns the number of subsequences. */
static int sort_subsequences(struct finder *finder, int length)
{
    int subsequences = 0;
    for (int i = 0; i < finder->count; i++) {
        if (finder->run_left[i] < length) continue;
        finder->subsequence[subsequences++] = (struct subsequence){finder->name[i], finder->key[i + length - 1], i};
    }
    qsort(finder->subsequence, (size_t)subsequences, sizeof *finder->subsequence, compare_subsequences);
    return subsequences;
}

static bool same_subsequence(const struct subsequence *a, const struct subsequence *b)
{
    return a->name == b->name && a->next == b->next;
}

/* Names the sorted subsequences and keeps the best choice. False: none of this length (nor longer) occurs twice. */
static bool rate_subsequences(struct finder *finder, int length, int subsequences, struct choice *best)
{
    bool repeats = false;
    for (int i = 0; i < finder->count; i++) finder->name[i] = -1;
    for (int first = 0, end; first < subsequences; first = end) {
        int occurrences = 0, free_from = 0;
        for (end = first;
             end < subsequences && same_subsequence(&finder->subsequence[first], &finder->subsequence[end]); end++) {
            const int position = finder->subsequence[end].position;
            finder->name[position] = first;
            if (position < free_from) continue;
            occurrences++;
            free_from = position + length;
        }
        if (occurrences < 2) continue;
        repeats = true;
        const int position = finder->subsequence[first].position;
        const struct choice found = {occurrences, length, position};
        if (finder->heavy[position + length] - finder->heavy[position] < finder->heavy_minimum) continue;
        if (found.occurrences > best->occurrences ||
            (found.occurrences == best->occurrences &&
             (found.length > best->length || (found.length == best->length && found.position < best->position))))
            *best = found;
    }
    return repeats;
}

static struct choice find_choice(struct finder *finder)
{
    struct choice best = {0, 0, 0};
    int total = 0;
    for (int i = finder->count - 1; i >= 0; i--) {
        const bool joined = i + 1 < finder->count && !finder->opens[i + 1] && finder->kind[i + 1] < 0;
        finder->run_left[i] = finder->kind[i] >= 0 ? 0 : joined ? finder->run_left[i + 1] + 1 : 1;
        finder->name[i] = 0;
        total += finder->kind[i] < 0;
    }
    /* A longer subsequence must still fit at least as often as the best choice occurs. */
    for (int length = 1; length <= total / 2 && total / length >= best.occurrences; length++)
        if (!rate_subsequences(finder, length, sort_subsequences(finder, length), &best)) break;
    return best;
}

static bool equal_subsequence(const struct finder *finder, int a, int b, int length)
{
    return finder->run_left[a] >= length && memcmp(&finder->key[a], &finder->key[b], (size_t)length * sizeof(int)) == 0;
}

static void mark(struct finder *finder, const struct choice *choice, int kind)
{
    for (int i = choice->position; i < finder->count;) {
        if (!equal_subsequence(finder, i, choice->position, choice->length)) {
            i++;
            continue;
        }
        finder->opens[i] = true;
        if (i + choice->length < finder->count) finder->opens[i + choice->length] = true;
        /* The keys stay unchanged: setting `kind` removes the elements from the next rounds. */
        for (int end = i + choice->length; i < end; i++) finder->kind[i] = kind;
    }
}

enum hapt_status hapt_modules_find(const int *key, const bool *heavy, int count, int heavy_minimum,
                                   struct hapt_arena *arena, struct hapt_module **module, int *module_count)
{
    struct finder finder = {.key = key, .count = count, .heavy_minimum = heavy_minimum};
    HAPT_NEW(finder.heavy, arena, count + 1);
    HAPT_NEW(finder.kind, arena, count);
    HAPT_NEW(finder.run_left, arena, count);
    HAPT_NEW(finder.name, arena, count);
    HAPT_NEW(finder.opens, arena, count);
    HAPT_NEW(finder.subsequence, arena, count);
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
