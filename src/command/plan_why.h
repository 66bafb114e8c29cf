/* Inside src/command: the questions that hapt plan answers besides the plan. Under --json (env->quiet) rank 0 puts the answers
 * into the object `extra`. */
#ifndef HAPT_COMMAND_PLAN_WHY_H
#define HAPT_COMMAND_PLAN_WHY_H

#include <jansson.h>

#include "phases.h"

/* HAPT_ERR_USAGE where a strategy is asked for that --explain cannot question. Rank-local. */
enum hapt_status hapt_plan_why_options(const struct hapt_config *config);

/* Prints what limits the plan, its rivals and whether it is worth it; "explain" in `extra`. Collective over env->world. */
enum hapt_status hapt_plan_why(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_arena *arena,
                               json_t *extra);
/* One line where the link sets the pace: by how much, and what would end it. */
void hapt_plan_print_link(const struct hapt_env *env, const struct hapt_profile *profile, const struct hapt_plan *plan);

#endif
