/*
 * The phases that several commands share, each ending in agreement: model, cluster, layers, profile, plan.
 * Collective over env->world; results live in the caller's arena.
 */
#ifndef HAPT_COMMAND_PHASES_H
#define HAPT_COMMAND_PHASES_H

#include "hapt/baselines.h"
#include "hapt/command.h"
#include "hapt/plan.h"
#include "hapt/report.h"
#include "hapt/train.h"

/* HAPT_ERR_USAGE when one of `names` (ends with NULL) was given: `why` says what leaves it without effect. */
enum hapt_status hapt_phase_unused(const struct hapt_config *config, const char *why, const char *const *names);
/* Loads --input and takes over its training defaults. */
enum hapt_status hapt_phase_model(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model);
/* --cluster or discovery. `bind`: the ranks must be there, links are probed; else absent values are assumed when
 * ranks are fewer than devices, this build has no back end for them, or --predict asks for nothing but the file. */
enum hapt_status hapt_phase_cluster(struct hapt_env *env, struct hapt_config *config, bool bind,
                                    struct hapt_arena *arena, struct hapt_cluster **cluster);
enum hapt_status hapt_phase_layers(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                   struct hapt_arena *arena, struct hapt_layers **layers);
/* What the model computes in, by --precision, the checkpoint (may be NULL), --plan, --profile and the devices of the
 * cluster (NULL: not known); the model's graph is made anew where that is not what it was made in, so before anything
 * refers to its operators. */
enum hapt_status hapt_phase_precision(struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_cluster *cluster, const struct hapt_checkpoint *checkpoint,
                                      struct hapt_model *model);
/* Do the options about measuring and predicting fit that cluster? Rank-local. */
enum hapt_status hapt_phase_profile_options(const struct hapt_config *config, const struct hapt_cluster *cluster);
/* --profile, else measured on a bound cluster, else predicted. */
enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config,
                                    const struct hapt_cluster *cluster, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena,
                                    struct hapt_profile **profile);
/* What --strategy, --stages, --schedule and the ablations ask for fits together and can be done by this command; else
 * HAPT_ERR_USAGE. Rank-local. */
enum hapt_status hapt_phase_plan_options(const struct hapt_config *config);
/* The options of planning, with the model's blocks where `layers` (may be NULL) tell. Rank-local. */
enum hapt_status hapt_phase_strategy(const struct hapt_config *config, const struct hapt_profile *profile,
                                     const struct hapt_layers *layers, struct hapt_arena *arena,
                                     struct hapt_strategy_options *options);
/* --stages, --strategy or the search; `layers` (may be NULL) gives the stages their operators. */
enum hapt_status hapt_phase_plan(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                                 const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_plan **plan);
/* Operator ranges of a plan's stages from the layers. HAPT_ERR_INPUT when the layer counts differ. */
enum hapt_status hapt_phase_plan_bind(struct hapt_plan *plan, const struct hapt_layers *layers);
/* The plan of --plan, with --schedule and --microbatches put into it when they are given; or the checkpoint's, as it
 * is. Stages get operator ranges where they have none. */
enum hapt_status hapt_phase_plan_given(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                       const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                       struct hapt_plan **plan);
/* hapt plan --compare: the table of strategies and ablations. */
enum hapt_status hapt_plan_compare_print(struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_layers *layers,
                                         struct hapt_arena *arena);
/* Run file and summary of a training; HAPT_STOPPED after a signal. */
enum hapt_status hapt_phase_report(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena);

#endif
