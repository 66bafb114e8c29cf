/*
 * Programs of mixed stages (HAP): for devices of two subclusters the program that synthesis and ratios find by turns
 * (alternate.h), one mesh axis over all of them, with ratios for the whole model and for segments of it.
 */
#ifndef HAPT_PROFILE_MIXED_PROGRAMS_H
#define HAPT_PROFILE_MIXED_PROGRAMS_H

#include "candidates.h"

enum { MIXED_PROGRAMS = 2 }; /* of a group at most */

struct mixed_question {
    const struct candidates *candidates;
    const struct mixed_group *group;
    const struct hapt_efficiency *efficiency;        /* NULL: the built-in tables */
    const struct hapt_collective_model *collectives; /* measured over the group; NULL: rings over its slowest link */
    int segments;                                    /* most runs of layers with ratios of their own */
};
/* The programs that cost least, unlike each other and cheaper than data parallelism by the same figures; none where
 * there is none or none fits. Rank-local. */
enum hapt_status mixed_programs_find(const struct mixed_question *question, struct hapt_arena *arena,
                                     struct hapt_stage_layout *layout[MIXED_PROGRAMS], int *count);

/* Seconds of a group's program by its operators' local shapes, the rooflines of both kinds of device and group->sums;
 * fills group->times. Rank-local. */
enum hapt_status mixed_programs_predict(const struct candidates *candidates, struct mixed_group *group,
                                        struct hapt_arena *arena, struct hapt_arena *scratch);

#endif
