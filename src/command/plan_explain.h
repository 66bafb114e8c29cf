/* Private to src/command: --explain, --what-if and --diff of hapt plan. With --json (env->quiet) rank 0 adds the
 * results to the object `extra`. */
#ifndef HAPT_COMMAND_PLAN_EXPLAIN_H
#define HAPT_COMMAND_PLAN_EXPLAIN_H

#include <jansson.h>

#include "hapt/sweep.h"
#include "phases.h"

/* HAPT_ERR_USAGE if --explain or --what-if does not fit the strategy, or a sweep cannot be parsed. Rank-local. */
enum hapt_status hapt_plan_explain_options(const struct hapt_config *config, struct hapt_arena *arena);

/* Prints what limits the plan, its rivals, and its gain over separate jobs; extra: "explain". Collective over
 * env->world. */
enum hapt_status hapt_plan_explain(const struct hapt_env *env, const struct hapt_config *config,
                                   const struct hapt_profile *profile, const struct hapt_plan *plan,
                                   struct hapt_arena *arena, json_t *extra);
/* Inputs of a prediction; NULL: unknown. For --what-if all are NULL if the profile was measured or loaded. */
struct hapt_prediction_inputs {
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
};

/* Prints the programs of a plan's stages, each kind of layer once (--full: every layer): the index by which each axis
 * shards an operator, the collectives between operators, and their cost if the cluster is known. Without a model in
 * `inputs` it prints a note only. extra: explain.programs; call after hapt_plan_explain. Collective over env->world. */
enum hapt_status hapt_plan_programs(const struct hapt_env *env, const struct hapt_config *config,
                                    const struct hapt_prediction_inputs *inputs, const struct hapt_plan *plan,
                                    struct hapt_arena *arena, json_t *extra);

/* HAPT_ERR_USAGE if --what-if refers to something that the profile does not hold. Collective over env->world. */
enum hapt_status hapt_plan_what_if_check(const struct hapt_env *env, const struct hapt_config *config,
                                         const struct hapt_profile *profile,
                                         const struct hapt_prediction_inputs *inputs, struct hapt_arena *arena);
struct hapt_plan_sweeps {
    int count;
    struct hapt_sweep **sweep; /* [count] */
};
/* Runs the sweeps of `text`, in the syntax of --what-if, and adds them to *sweeps, all zero before. `extra`: also
 * prints them as tables, and adds "what_if"; NULL: does not. Collective over env->world. */
enum hapt_status hapt_plan_sweep(const struct hapt_env *env, const struct hapt_config *config, const char *text,
                                 const struct hapt_profile *profile, const struct hapt_prediction_inputs *inputs,
                                 struct hapt_arena *arena, json_t *extra, struct hapt_plan_sweeps *sweeps);

/* Writes --html, if given: computes the plan's rivals, and the sweep of the links between subclusters unless `sweeps`
 * has some. Collective over env->world. */
enum hapt_status hapt_plan_html(struct hapt_env *env, struct hapt_config *config, const struct hapt_planning *planning,
                                const struct hapt_prediction_inputs *inputs, const struct hapt_plan_sweeps *sweeps,
                                struct hapt_arena *arena);
/* x / y; 1 if x equals y, because both may be 0 (a profile may have zero times) or infinite. */
double hapt_plan_ratio(double x, double y);
/* A JSON number; null for infinity and NaN, which JSON lacks. */
json_t *hapt_plan_number(double value);

/* Independent pipelines of another system (hapt_plan_pipelines). Prints step, microbatches and stages. */
void hapt_plan_print_pipelines(const struct hapt_env *env, const struct hapt_pipelines *pipelines);
/* An object; null without pipelines. A new reference; NULL: out of memory. */
json_t *hapt_plan_pipelines_json(const struct hapt_pipelines *pipelines);
/* Prices and prints those of --strategy, if it has any; extra: "pipelines". Collective over env->world. */
enum hapt_status hapt_plan_show_pipelines(const struct hapt_env *env, const struct hapt_config *config,
                                          const struct hapt_profile *profile, const struct hapt_layers *layers,
                                          int microbatches, struct hapt_arena *arena, json_t *extra);

/* If a link sets t_max, prints one line: by how much, and which bandwidth would change that. */
void hapt_plan_print_link_limit(const struct hapt_env *env, const struct hapt_profile *profile,
                                const struct hapt_plan *plan);

/* HAPT_ERR_USAGE if words or options do not fit --diff. Rank-local. */
enum hapt_status hapt_plan_diff_options(const struct hapt_config *config);
/* Prints hapt plan --diff a.h5 b.h5. Collective over env->world. */
enum hapt_status hapt_plan_diff_print(const struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_arena *arena);

#endif
