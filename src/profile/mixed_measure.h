/*
 * Mixed stages measured: programs are found by operators calibrated here and by collectives measured over the group's
 * ranks; then the stages of every group, by rows and with programs, are run by those ranks as they would train
 * (team_time.h).
 */
#ifndef HAPT_PROFILE_MIXED_MEASURE_H
#define HAPT_PROFILE_MIXED_MEASURE_H

#include "mixed_programs.h"

struct mixed_measuring {
    const struct hapt_env *env;
    const struct hapt_config *config;
    struct candidates *candidates;
    const struct hapt_efficiency *efficiency;
};
/* Adds groups with programs for candidates->mixable, the same on all ranks. Collective over env->world; agrees on
 * failures. */
enum hapt_status mixed_measure_programs(const struct mixed_measuring *measuring, struct hapt_arena *arena);
/* Fills ->times of every group in about `budget_s`: the longest range that fits is always run, then single layers, then
 * the others by falling length; what there was no time for is composed. `wanted` says which ranges of a group are
 * candidates, alike on all ranks; `options` are those of this rank's device. *runs counts. Collective over env->world;
 * agrees on failures. */
typedef bool mixed_wanted(const void *context, const struct mixed_group *group, int first, int last);
enum hapt_status mixed_measure_times(const struct mixed_measuring *measuring, const struct hapt_engine_options *options,
                                     mixed_wanted *wanted, const void *context, double budget_s,
                                     struct hapt_arena *arena, int64_t *runs);

#endif
