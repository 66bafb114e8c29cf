/* Private to src/command: --fix, which restricts what the planner decides. */
#ifndef HAPT_COMMAND_FIX_H
#define HAPT_COMMAND_FIX_H

#include "phases.h"

/* Parses --fix. Keys that are options set these options as if they were given. HAPT_ERR_USAGE: an unknown key, a bad
 * value, or a contradiction. Rank-local; call first. */
enum hapt_status hapt_fix_options(struct hapt_config *config, struct hapt_arena *arena);
/* The value of a key that is no option; 0: not fixed. "rows", "tensor-parallel". Call after hapt_fix_options. */
int hapt_fix_number(const struct hapt_config *config, const char *key);
/* Sets given launch counts ("launches"), one for each stage of the plan, and prices it again. HAPT_ERR_USAGE: another
 * number of stages, or counts that no schedule has; HAPT_ERR_INFEASIBLE: they exceed memory. Rank-local. */
enum hapt_status hapt_fix_launches(const struct hapt_config *config, const struct hapt_profile *profile,
                                   struct hapt_plan *plan);
/* Keeps only the candidates that --fix allows: a copy of the profile if some are removed. Rank-local. */
enum hapt_status hapt_fix_profile(const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_profile **profile);

#endif
