/*
 * Chooses the items to time so that the times of all others follow (HAPT 5.1: no redundant measurements).
 *
 * The number of unique ranges grows with the model's depth although they contain nothing new: a range of seven blocks
 * is one of four and one of three. So the base is every range of up to two repeated modules, plus longer ones at every
 * offset, whose lengths double from one to the next. smooth.h composes the others. A few of those are timed as
 * witnesses. If they disagree with the composed times beyond noise, the caller times the rest too.
 */
#ifndef HAPT_MEASURE_SELECT_H
#define HAPT_MEASURE_SELECT_H

#include "hapt/candidates.h"

enum select_role {
    SELECT_NONE,    /* not needed */
    SELECT_BASE,    /* always timed */
    SELECT_WITNESS, /* timed, to check the composed times */
    SELECT_REST     /* composed */
};

/* Fills role [item_count] for the items marked in `needed`. Deterministic. */
enum hapt_status select_items(const struct hapt_candidates *candidates, const bool *needed, struct hapt_arena *scratch,
                              unsigned char *role);

#endif
