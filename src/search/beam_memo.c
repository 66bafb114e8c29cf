/* Prices that a search knows already. Moves of several entries lead to the same candidate, and entries that stay list
 * the same moves in each round. */
#include "beam.h"

#include <math.h>
#include <stdlib.h>

#include "hapt/env.h"

/* Entries of the first table, and of the largest: 48 MiB. Prices beyond that are not kept. */
enum { FIRST = 1 << 10, MOST = 1 << 20 };

struct beam_known {
    struct beam_key key;
    double lower_s; /* no step is shorter; INFINITY: the candidate is no plan */
    double step_s;  /* above most_s: may be too short; NAN: unknown, since lower_s was not below the limit */
    double most_s;
    bool used;
};

static struct beam_known *find(const struct beam_memo *memo, struct beam_key key)
{
    size_t at = (size_t)key.low & (memo->room - 1);
    while (memo->known[at].used && (memo->known[at].key.low != key.low || memo->known[at].key.high != key.high))
        at = (at + 1) & (memo->room - 1);
    return &memo->known[at];
}

static enum hapt_status grow(struct beam_memo *memo)
{
    struct beam_memo wider = {.count = memo->count, .room = memo->room > 0 ? 2 * memo->room : FIRST};
    wider.known = calloc(wider.room, sizeof *wider.known);
    if (!wider.known)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
    for (size_t k = 0; k < memo->room; k++)
        if (memo->known[k].used) *find(&wider, memo->known[k].key) = memo->known[k];
    free(memo->known);
    *memo = wider;
    return HAPT_OK;
}

bool beam_memo_find(const struct beam_memo *memo, struct beam_key key, double limit_s, double most_s, double *step_s)
{
    const struct beam_known *known = memo->room > 0 ? find(memo, key) : NULL;
    if (!known || !known->used) return false;
    *step_s = known->lower_s >= limit_s ? INFINITY : known->step_s;
    return *step_s <= known->most_s || *step_s > most_s || isinf(*step_s);
}

enum hapt_status beam_memo_add(struct beam_memo *memo, struct beam_key key, double limit_s, double most_s,
                               double lower_s, double step_s)
{
    if (2 * memo->count >= memo->room && memo->room < MOST) HAPT_TRY(grow(memo));
    struct beam_known *known = find(memo, key);
    if (!known->used && 2 * memo->count >= memo->room) return HAPT_OK;
    memo->count += !known->used;
    *known = (struct beam_known){key, lower_s, lower_s >= limit_s ? NAN : step_s, most_s, true};
    return HAPT_OK;
}

void beam_memo_release(struct beam_memo *memo)
{
    free(memo->known);
    *memo = (struct beam_memo){0};
}
