/*
 * Measured mixed stages. Programs are found from operators calibrated here and collectives measured over the group's
 * ranks. Then those ranks run the stages of every group, by rows and with programs, as they would train (team_time.h).
 */
#ifndef HAPT_MEASURE_MEASURE_MIXED_H
#define HAPT_MEASURE_MEASURE_MIXED_H

#include "hapt/mixed_programs.h"

struct mixed_measuring {
    const struct hapt_env *env;
    const struct hapt_config *config;
    struct hapt_candidates *candidates;
    const struct hapt_efficiency *efficiency;
};
/* Adds groups with programs for candidates->mixable, the same on all ranks. `options`: of this rank's open device, none
 * on an idle rank. Collective over env->world; agrees on failures. */
enum hapt_status measure_mixed_programs(const struct mixed_measuring *measuring,
                                        const struct hapt_engine_options *options, struct hapt_arena *arena);
/* Fills ->times of every group in about `budget_s`. The longest range that fits is always run, then single layers,
 * then the others by descending length; the remaining ones are composed. `wanted`: true if a range of a group is a
 * candidate; `sharded`: true if it has sharded optimizer state. Both are the same on all ranks. `options`: of this
 * rank's device. *runs: number of runs. Collective over env->world; agrees on failures. */
typedef bool mixed_wanted(const void *context, const struct hapt_mixed_group *group, int first, int last);
enum hapt_status measure_mixed_times(const struct mixed_measuring *measuring, const struct hapt_engine_options *options,
                                     mixed_wanted *wanted, mixed_wanted *sharded, const void *context, double budget_s,
                                     struct hapt_arena *arena, int64_t *runs);

#endif
