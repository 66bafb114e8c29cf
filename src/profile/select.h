/*
 * Which items to time so that the times of all others follow (HAPT 5.1: no measurement says what another has said).
 *
 * Unique ranges grow with the depth of the model although nothing new stands in them: a range of seven blocks is one of
 * four and one of three. So the base is every range of up to two repeated modules, and of longer ones a ladder of
 * lengths, each twice the one before, at every offset; smooth.h composes the others. A few of those are timed all the
 * same, as witnesses: where they do not bear out what was composed, within noise, the caller times the rest too.
 */
#ifndef HAPT_PROFILE_SELECT_H
#define HAPT_PROFILE_SELECT_H

#include "candidates.h"

enum select_role {
    SELECT_NONE,    /* not needed */
    SELECT_BASE,    /* timed always */
    SELECT_WITNESS, /* timed, to check what is composed */
    SELECT_REST     /* composed */
};

/* role [item_count] for the items marked in `needed`. Deterministic. */
enum hapt_status select_items(const struct candidates *candidates, const bool *needed, struct hapt_arena *scratch,
                              unsigned char *role);

#endif
