/* Inside src/command: the questions that hapt plan answers besides the plan. Under --json (env->quiet) rank 0 puts the
 * answers into the object `extra`. */
#ifndef HAPT_COMMAND_PLAN_WHY_H
#define HAPT_COMMAND_PLAN_WHY_H

#include <jansson.h>

#include "phases.h"

/* HAPT_ERR_USAGE where a strategy is asked for that --explain and --what-if cannot question, or where a sweep cannot be
 * read. Rank-local. */
enum hapt_status hapt_plan_why_options(const struct hapt_config *config, struct hapt_arena *arena);

/* Prints what limits the plan, its rivals and whether it is worth it; "explain" in `extra`. Collective over env->world.
 */
enum hapt_status hapt_plan_why(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_profile *profile, const struct hapt_plan *plan,
                               struct hapt_arena *arena, json_t *extra);
/* What a prediction can be made anew from; all NULL where the profile is measured or read. */
struct hapt_plan_paper {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
};

/* The programs of a plan's stages, each kind of layer once (--full: all of them): which index each axis cuts an
 * operator by, which collectives stand between them, and what those take where the cluster is known; explain.programs
 * in `extra`. `from`: what there is; without a model only says so. After hapt_plan_why. Collective over env->world. */
enum hapt_status hapt_plan_programs(const struct hapt_env *env, const struct hapt_config *config,
                                    const struct hapt_plan_paper *from, const struct hapt_plan *plan,
                                    struct hapt_arena *arena, json_t *extra);

/* HAPT_ERR_USAGE where --what-if names what the profile does not hold. Collective over env->world. */
enum hapt_status hapt_plan_what_if_check(const struct hapt_env *env, const struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_plan_paper *paper,
                                         struct hapt_arena *arena);
/* The sweeps of --what-if as tables; "what_if" in `extra`. Collective over env->world. */
enum hapt_status hapt_plan_what_if(const struct hapt_env *env, const struct hapt_config *config,
                                   const struct hapt_profile *profile, const struct hapt_plan_paper *paper,
                                   struct hapt_arena *arena, json_t *extra);
/* x / y of figures that may both be 0 (a profile may say that nothing takes time) or infinite: then 1. */
double hapt_plan_ratio(double x, double y);
/* As JSON, which knows no infinity and no NaN: null. */
json_t *hapt_plan_number(double value);

/* One line where the link sets the pace: by how much, and what would end it. */
void hapt_plan_print_link(const struct hapt_env *env, const struct hapt_profile *profile, const struct hapt_plan *plan);

/* HAPT_ERR_USAGE for words and options that do not fit --diff. Rank-local. */
enum hapt_status hapt_plan_diff_options(const struct hapt_config *config);
/* hapt plan --diff a.h5 b.h5. Collective over env->world. */
enum hapt_status hapt_plan_diff_print(const struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_arena *arena);

#endif
