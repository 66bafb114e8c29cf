/* hapt: the phases are the commands' (src/command/); this file starts, dispatches and leaves. */
#include <stdio.h>

#include "hapt/command.h"
#include "hapt/guard.h"
#include "hapt/h5.h"
#include "hapt/version.h"

static const struct hapt_command_entry entry[HAPT_COMMAND_COUNT] = {
    [HAPT_COMMAND_JOB] = {hapt_command_job, NULL},
    [HAPT_COMMAND_TOPOLOGY] = {hapt_command_topology, hapt_command_topology_help},
    [HAPT_COMMAND_PROFILE] = {hapt_command_profile, hapt_command_profile_help},
    [HAPT_COMMAND_PLAN] = {hapt_command_plan, hapt_command_plan_help},
    [HAPT_COMMAND_SPMD] = {hapt_command_spmd, hapt_command_spmd_help},
    [HAPT_COMMAND_TRAIN] = {hapt_command_train, hapt_command_train_help},
    [HAPT_COMMAND_EXPORT] = {hapt_command_export, NULL},
    [HAPT_COMMAND_SIMULATE] = {hapt_command_simulate, hapt_command_simulate_help},
    [HAPT_COMMAND_MODEL] = {hapt_command_model, hapt_command_model_help},
    [HAPT_COMMAND_REPORT] = {hapt_command_report, hapt_command_report_help},
    [HAPT_COMMAND_CHECK] = {hapt_command_check, hapt_command_check_help},
    [HAPT_COMMAND_DOCTOR] = {hapt_command_doctor, NULL},
    [HAPT_COMMAND_DATA] = {hapt_command_data, hapt_command_data_help},
};

static enum hapt_status run(struct hapt_env *env, int argc, char **argv, struct hapt_arena *arena)
{
    struct hapt_config *config = NULL;
    HAPT_TRY(hapt_env_agree(env->world, hapt_config_parse(argc, argv, arena, &config)));
    const enum hapt_command command = hapt_config_command(config);
    if (hapt_config_wants_help(config) || argc == 1) {
        if (env->world_rank != 0) return HAPT_OK;
        hapt_config_print_help(config, stdout);
        if (entry[command].explain) printf("\n%s", entry[command].explain);
        return HAPT_OK;
    }
    if (hapt_config_wants_version(config)) {
        if (env->world_rank == 0) printf("hapt %s\n", HAPT_VERSION);
        return HAPT_OK;
    }
    env->quiet = command != HAPT_COMMAND_EXPORT && hapt_config_bool(config, "json");
    return entry[command].run(env, config);
}

int main(int argc, char **argv)
{
    struct hapt_env env;
    struct hapt_arena arena;
    hapt_env_prepare(argv);
    hapt_guard_start(argv, hapt_h5_rehearse);
    hapt_arena_init(&arena);
    enum hapt_status status = hapt_env_init(&env, &argc, &argv);
    if (status == HAPT_OK) {
        hapt_guard_share(&env);
        status = run(&env, argc, argv, &arena);
    } else {
        fprintf(stderr, "hapt: error: %s\nhint: %s\n", hapt_fail_message(), hapt_fail_hint());
    }
    if (status == HAPT_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        fprintf(stderr, "hapt: error: standard output cannot be written\nhint: check free space and the pipe's end\n");
        status = HAPT_ERR_IO;
    }
    hapt_env_release(&env);
    hapt_arena_release(&arena);
    hapt_guard_stop();
    return (int)status;
}
