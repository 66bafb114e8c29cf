/*
 * Programs of mixed stages (HAP): for devices of two subclusters, the programs that synthesis and ratios find in turn
 * (alternate.h). One mesh axis covers all devices; ratios are for the full model or for segments of it.
 */
#ifndef HAPT_MIXED_PROGRAMS_H
#define HAPT_MIXED_PROGRAMS_H

#include "hapt/candidates.h"

enum { MIXED_PROGRAMS = 2 }; /* per group at most */

struct hapt_mixed_question {
    const struct hapt_candidates *candidates;
    const struct hapt_mixed_group *group;
    const struct hapt_efficiency *efficiency;        /* NULL: the built-in tables */
    const struct hapt_collective_model *collectives; /* measured over the group; NULL: rings over its slowest link */
    int segments;                                    /* maximum number of layer runs with their own ratios */
};
/* The cheapest programs that differ from each other and beat data parallelism by the same figures; none if none
 * exists or fits. Rank-local. */
enum hapt_status hapt_mixed_programs_find(const struct hapt_mixed_question *question, struct hapt_arena *arena,
                                          struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count);

#endif
