/*
 * Commands: `hapt NAME ...` calls one of these functions on every rank. All ranks agree on the status before a command
 * returns (hapt_env_agree), so main exits with it. `arena` is released afterwards.
 */
#ifndef HAPT_COMMAND_H
#define HAPT_COMMAND_H

#include "hapt/config.h"
#include "hapt/env.h"

/* The long help of a command; NULL: none. */
const char *hapt_command_explanation(enum hapt_command command);

enum hapt_status hapt_command_job(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_topology(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_profile(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_plan(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_spmd(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_simulate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_train(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_evaluate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_generate(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_model(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_import(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_data(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_export(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_report(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_check(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_doctor(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_help(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_ops(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);
enum hapt_status hapt_command_cluster(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);

/* The long help texts, defined in the file of their command. */
extern const char hapt_command_topology_help[], hapt_command_profile_help[], hapt_command_plan_help[],
    hapt_command_simulate_help[], hapt_command_model_help[], hapt_command_data_help[], hapt_command_train_help[],
    hapt_command_report_help[], hapt_command_import_help[], hapt_command_export_help[], hapt_command_spmd_help[],
    hapt_command_check_help[], hapt_command_evaluate_help[], hapt_command_generate_help[], hapt_command_cluster_help[],
    hapt_command_ops_help[];

#endif
