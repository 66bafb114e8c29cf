/*
 * Programs of mixed stages (HAP): for devices of two subclusters, the programs that synthesis and ratios find in turn
 * (alternate.h). One mesh axis covers all devices; ratios are for the full model or for segments of it.
 */
#ifndef HAPT_PROFILE_MIXED_PROGRAMS_H
#define HAPT_PROFILE_MIXED_PROGRAMS_H

#include "candidates.h"

enum { MIXED_PROGRAMS = 2 }; /* per group at most */

struct mixed_question {
    const struct candidates *candidates;
    const struct mixed_group *group;
    const struct hapt_efficiency *efficiency;        /* NULL: the built-in tables */
    const struct hapt_collective_model *collectives; /* measured over the group; NULL: rings over its slowest link */
    int segments;                                    /* maximum number of layer runs with their own ratios */
};
/* The cheapest programs that differ from each other and beat data parallelism by the same figures; none if none
 * exists or fits. Rank-local. */
enum hapt_status mixed_programs_find(const struct mixed_question *question, struct hapt_arena *arena,
                                     struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count);

/* Seconds of a group's program, from its operators' local shapes, the rooflines of both kinds of device and
 * group->sums; fills group->times. Rank-local. */
enum hapt_status mixed_programs_predict(const struct candidates *candidates, struct mixed_group *group,
                                        struct hapt_arena *arena, struct hapt_arena *scratch);

#endif
