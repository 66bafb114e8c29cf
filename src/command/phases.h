/*
 * Phases that several commands share: model, cluster, layers, profile, plan. Each ends with an agreement of all ranks.
 * Collective over env->world unless marked rank-local. The caller's arena owns the results.
 */
#ifndef HAPT_COMMAND_PHASES_H
#define HAPT_COMMAND_PHASES_H

#include "hapt/baselines.h"
#include "hapt/command.h"
#include "hapt/calibration.h"
#include "hapt/plan.h"
#include "hapt/progress.h"
#include "hapt/report.h"
#include "hapt/train.h"

/* HAPT_ERR_USAGE if one of the options `names` (separated by spaces) was given; `why` names the cause. Rank-local. */
enum hapt_status hapt_phase_refuse_unused(const struct hapt_config *config, const char *why, const char *names);
/* Options of measuring and predicting; a profile file replaces both. */
#define HAPT_PHASE_MEASURING                                                                                    \
    "imbalance profile-seconds predict efficiency tensor-parallel mixed mixed-rows segments recompute offload " \
    "sharded-weights update-order update-on"
/* Loads --input; its training options become defaults of `config`. */
enum hapt_status hapt_phase_model(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_model **model);
/* Loads --cluster or discovers the cluster. `bind`: requires a rank for each device and probes the links. Otherwise, a
 * cluster file is used on paper, with assumed link values, if ranks are fewer than devices, this build has no back end
 * for them, or --predict is given. */
enum hapt_status hapt_phase_cluster(struct hapt_env *env, struct hapt_config *config, bool bind,
                                    struct hapt_arena *arena, struct hapt_cluster **cluster);
enum hapt_status hapt_phase_layers(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                   struct hapt_arena *arena, struct hapt_layers **layers);
/* Chooses the precision from --precision, the checkpoint (may be NULL), --plan, --profile and the cluster's devices
 * (NULL: unknown). Rebuilds the graph if its precision changes: call before anything refers to its operators. */
enum hapt_status hapt_phase_precision(struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_cluster *cluster, const struct hapt_checkpoint *checkpoint,
                                      struct hapt_model *model);
/* Recomputation and offloading are considered if more memory would shorten the step by more than this factor. */
#define HAPT_PHASE_MEMORY_WORTH 1.02
/* True if plans that keep all activations are slower because devices lack memory, or if there are none. Rank-local. */
enum hapt_status hapt_phase_lacks_memory(const struct hapt_config *config, const struct hapt_profile *profile,
                                         bool *lacks);
/* The step of the formula's optimum; INFINITY: there is no plan. Rank-local. */
enum hapt_status hapt_phase_formula_s(const struct hapt_config *config, const struct hapt_profile *profile,
                                      double *latency_s);
/* --offload; auto: nothing. */
enum hapt_offload hapt_phase_offload(const struct hapt_config *config);
/* --update-on, for state on the hosts with or without the weights. auto: true if updates on the hosts take less time
 * than copies of the state both ways, on every device of the cluster, and the rates of the GPUs' hosts are given. */
bool hapt_phase_updates_on_host(const struct hapt_config *config, const struct hapt_cluster *cluster,
                                const struct hapt_model *model, enum hapt_offload offload);
/* True if the program chooses what `option` ("recompute", "offload") says: it is auto, and the simulated step is
 * searched, or another system than hapt recomputes. */
bool hapt_phase_chooses_memory(const struct hapt_config *config, const char *option);
/* Inputs of a prediction. `kept`: the profile with what --recompute auto and --offload auto may add left out, if it is
 * known; else NULL. */
struct hapt_prediction {
    const struct hapt_config *config;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    const struct hapt_efficiency *efficiency; /* or NULL */
    struct hapt_profile *kept;
    int node_rank; /* of the rank that predicts */
    bool roomy;    /* as if no device lacked memory */
    bool quietly;  /* a missing plan is not explained, which takes less time */
};
/* A predicted profile, with stages that recompute as --recompute says, and the optimizer state where --offload says.
 * auto: only for the search of the simulated step, and if a plan that keeps everything on the devices is slower, by the
 * formula, because they lack memory, or if there is none. *other: NULL, or if --offload auto decides and both profiles
 * have plans, the one with the longer optimum of the formula. Either may have the state on the hosts. Rank-local. */
enum hapt_status hapt_phase_predict(const struct hapt_prediction *of, struct hapt_arena *arena,
                                    struct hapt_profile **profile, struct hapt_profile **other);
/* --sharded-weights. auto: of the stages that are planned so if `may`, else of none. */
enum hapt_weight_sharding hapt_phase_weight_sharding(const struct hapt_config *config, bool may);
/* Notes that --sharded-weights yes had no effect. */
void hapt_phase_note_sharding(const struct hapt_env *env, const struct hapt_config *config,
                              const struct hapt_plan *plan);
/* HAPT_ERR_USAGE if the options for measuring and predicting do not fit the cluster. Rank-local. */
enum hapt_status hapt_phase_profile_options(const struct hapt_config *config, const struct hapt_cluster *cluster);
/* Loads --profile; else measures on a bound cluster; else predicts. *other (may be NULL): as of hapt_phase_predict. */
enum hapt_status hapt_phase_profile(struct hapt_env *env, struct hapt_config *config,
                                    const struct hapt_cluster *cluster, const struct hapt_model *model,
                                    const struct hapt_layers *layers, struct hapt_arena *arena,
                                    struct hapt_profile **profile, struct hapt_profile **other);
/* A number of microbatches, and the profile for it. */
struct hapt_profile_case {
    int microbatches;
    const struct hapt_model *model;
    const struct hapt_layers *layers;
    struct hapt_profile *kept;    /* as hapt_prediction */
    struct hapt_profile *profile; /* NULL: nothing fits */
    struct hapt_profile *other;   /* as of hapt_phase_predict */
};
/* Measures or predicts them. Quietly, the options are not checked again, HAPT_ERR_INFEASIBLE leaves the profile NULL,
 * and that of a prediction is not printed. --microbatches is undefined afterwards. Collective over env->world. */
enum hapt_status hapt_phase_profiles(struct hapt_env *env, struct hapt_config *config,
                                     const struct hapt_cluster *cluster, struct hapt_profile_case *its, int count,
                                     bool quietly, struct hapt_arena *arena);
/* Predicts them. The ranks of a node predict different ones at the same time, and share them with their node. */
enum hapt_status hapt_phase_predict_cases(struct hapt_env *env, struct hapt_config *config,
                                          const struct hapt_cluster *cluster, const struct hapt_efficiency *efficiency,
                                          struct hapt_profile_case *its, int count, bool quietly,
                                          struct hapt_arena *arena);
/* Sets --microbatches, not as given by the user. Rank-local. */
enum hapt_status hapt_phase_decide_microbatches(struct hapt_config *config, int microbatches);
/* True if profiles of this cluster are measured, not predicted. */
bool hapt_phase_is_measured(const struct hapt_config *config, const struct hapt_cluster *cluster);
/* HAPT_ERR_USAGE if --strategy, --stages, --schedule and the ablations contradict each other or do not fit this
 * command. Rank-local. */
enum hapt_status hapt_phase_plan_options(const struct hapt_config *config);
bool hapt_phase_explains(const struct hapt_config *config); /* --explain yes or all */
/* Fills the planning options; `layers` (may be NULL) gives the model's blocks. Rank-local. */
enum hapt_status hapt_phase_strategy(const struct hapt_config *config, const struct hapt_profile *profile,
                                     const struct hapt_layers *layers, struct hapt_arena *arena,
                                     struct hapt_strategy_options *options);
/* Plans by --stages, --strategy or the search; `layers` (may be NULL) gives the stages their operators. */
enum hapt_status hapt_phase_plan(struct hapt_env *env, struct hapt_config *config, const struct hapt_profile *profile,
                                 const struct hapt_layers *layers, struct hapt_arena *arena, struct hapt_plan **plan);
/* The same; HAPT_ERR_INFEASIBLE is not printed. */
enum hapt_status hapt_phase_plan_quietly(struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_layers *layers,
                                         struct hapt_arena *arena, struct hapt_plan **plan);
/* Names the subclusters on whose hosts the plan keeps data without a limit: the cluster file does not state their
 * memory. */
void hapt_phase_note_hosts(const struct hapt_env *env, const struct hapt_cluster *cluster,
                           const struct hapt_plan *plan);
/* Gives a plan of this profile its precision, origin, threads and operators. */
enum hapt_status hapt_phase_plan_complete(struct hapt_env *env, const struct hapt_config *config,
                                          const struct hapt_profile *profile, const struct hapt_layers *layers,
                                          struct hapt_plan *plan);
/* True if the plan is found by the search of the least simulated step alone. */
bool hapt_phase_searches_steps(const struct hapt_config *config);

/* The inputs of a plan, and the plan. */
struct hapt_planning {
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct hapt_profile *profile;
    struct hapt_profile *other; /* as of hapt_phase_predict; NULL also if rows are chosen */
    struct hapt_plan *plan;
};
/* Plans from planning->profile, or from the other one if its plan is shorter. Then planning->profile is that one. */
enum hapt_status hapt_phase_plan_either(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                        struct hapt_planning *planning);
/* True if hapt_phase_plan_rows plans: with --global-batch, and if predicted profiles are searched for the least
 * simulated step. */
bool hapt_phase_plans_rows(const struct hapt_config *config, const struct hapt_cluster *cluster);
/* Profiles and plans. --global-batch: also chooses the rows of a microbatch, and sets --microbatches. In: model,
 * cluster and layers. Out: those of the best plan, with its profile. */
enum hapt_status hapt_phase_plan_rows(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena,
                                      struct hapt_planning *planning);
/* HAPT_ERR_USAGE if other options do not fit --global-batch. Rank-local. */
enum hapt_status hapt_phase_rows_options(const struct hapt_config *config);
/* Gives the model the rows of a microbatch that the plan was made for. */
enum hapt_status hapt_phase_rebatch(const struct hapt_env *env, const struct hapt_plan *plan, struct hapt_arena *arena,
                                    struct hapt_model **model);
/* Finds the plan's stages without backward passes, the frozen prefix of the model, and the transfer slots that its
 * skips need in loops. `profile` (may be NULL) prices these. After hapt_phase_plan. */
enum hapt_status hapt_phase_plan_adapt(struct hapt_env *env, const struct hapt_model *model,
                                       const struct hapt_profile *profile, struct hapt_plan *plan);
/* Applies --schedule, --microbatches, --hide-threshold, --loop-batch and --prefetch, if given, to the same stages;
 * launch counts, memory and predictions follow. Rank-local. */
enum hapt_status hapt_phase_plan_override(const struct hapt_config *config, struct hapt_plan *plan);
/* Loads --plan, with --schedule and --microbatches applied if given; or takes the checkpoint's plan (may be NULL)
 * unchanged. Stages without operator ranges get them from the model. */
enum hapt_status hapt_phase_plan_given(struct hapt_env *env, struct hapt_config *config, const struct hapt_model *model,
                                       const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                       struct hapt_plan **plan);
/* The rows of hapt plan --compare, in `arena`, and the microbatches of their steps. */
enum hapt_status hapt_plan_compare_rows(struct hapt_env *env, struct hapt_config *config,
                                        const struct hapt_profile *profile, const struct hapt_layers *layers,
                                        struct hapt_arena *arena, struct hapt_compare_row **rows, int *count,
                                        int *microbatches);
/* hapt plan --compare: prints the table of strategies and ablations. */
enum hapt_status hapt_plan_compare_print(struct hapt_env *env, struct hapt_config *config,
                                         const struct hapt_profile *profile, const struct hapt_layers *layers,
                                         struct hapt_arena *arena);
/* Trains, with metrics in the output folder meanwhile, and sets run->result. As hapt_train_run. */
enum hapt_status hapt_phase_train(struct hapt_env *env, struct hapt_run *run, const struct hapt_checkpoint *checkpoint,
                                  struct hapt_arena *arena);
/* Writes the run file and prints the summary. HAPT_STOPPED after a signal or the time limit. */
enum hapt_status hapt_phase_report(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena);

#endif
