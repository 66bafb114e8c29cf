/* hapt: starts MPI and the services of all commands, calls one command (src/command/) and exits with its status. */
#include <math.h>
#include <stdio.h>

#include "hapt/command.h"
#include "hapt/crash.h"
#include "hapt/deadline.h"
#include "hapt/sandbox.h"
#include "hapt/h5.h"
#include "hapt/heartbeat.h"
#include "hapt/help.h"
#include "hapt/stop.h"
#include "hapt/version.h"

typedef enum hapt_status command_function(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena);

static command_function *const function[HAPT_COMMAND_COUNT] = {
    [HAPT_COMMAND_JOB] = hapt_command_job,           [HAPT_COMMAND_TOPOLOGY] = hapt_command_topology,
    [HAPT_COMMAND_PROFILE] = hapt_command_profile,   [HAPT_COMMAND_PLAN] = hapt_command_plan,
    [HAPT_COMMAND_SPMD] = hapt_command_spmd,         [HAPT_COMMAND_TRAIN] = hapt_command_train,
    [HAPT_COMMAND_EVALUATE] = hapt_command_evaluate, [HAPT_COMMAND_GENERATE] = hapt_command_generate,
    [HAPT_COMMAND_EXPORT] = hapt_command_export,     [HAPT_COMMAND_SIMULATE] = hapt_command_simulate,
    [HAPT_COMMAND_MODEL] = hapt_command_model,       [HAPT_COMMAND_IMPORT] = hapt_command_import,
    [HAPT_COMMAND_REPORT] = hapt_command_report,     [HAPT_COMMAND_CHECK] = hapt_command_check,
    [HAPT_COMMAND_DOCTOR] = hapt_command_doctor,     [HAPT_COMMAND_CLUSTER] = hapt_command_cluster,
    [HAPT_COMMAND_DATA] = hapt_command_data,         [HAPT_COMMAND_HELP] = hapt_command_help,
    [HAPT_COMMAND_OPS] = hapt_command_ops,
};

/* A silent rank must be reported before its peers' waits time out: a share of --timeout. An overloaded machine delays
 * heartbeats: at least some seconds. */
#define HEARTBEAT_TIMEOUT_SHARE 0.8
#define HEARTBEAT_TIMEOUT_MIN_S 4.0

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, enum hapt_status parsed, bool bare,
                            struct hapt_arena *arena)
{
    if (env->world_size > 1) hapt_deadline_set("the start of all ranks", env->timeout_s); /* until heartbeats start */
    hapt_sandbox_share(env);
    HAPT_TRY(hapt_env_agree(env->world, parsed));
    HAPT_TRY(hapt_heartbeat_start(
        env, fmax(HEARTBEAT_TIMEOUT_MIN_S, HEARTBEAT_TIMEOUT_SHARE * hapt_config_real(config, "timeout"))));
    hapt_deadline_clear();
    const enum hapt_command command = hapt_config_command(config);
    if (hapt_config_wants_help(config) || bare) {
        if (env->world_rank != 0) return HAPT_OK;
        if (hapt_config_wants_all_help(config))
            hapt_help_print_all(command, hapt_command_explanation(command), stdout);
        else
            hapt_help_print_short(command, stdout);
        return HAPT_OK;
    }
    if (hapt_config_wants_version(config)) {
        if (env->world_rank == 0)
            printf("hapt %s (%s%s)\n", HAPT_VERSION, hapt_commit[0] ? "commit " : "built outside git, no commit known",
                   hapt_commit);
        return HAPT_OK;
    }
    env->quiet = command != HAPT_COMMAND_EXPORT && hapt_config_bool(config, "json");
    return function[command](env, config, arena);
}

/* On a signal these commands save a checkpoint; other commands end at once. */
static bool saves(enum hapt_command command)
{
    return command == HAPT_COMMAND_JOB || command == HAPT_COMMAND_TRAIN;
}

int main(int argc, char **argv)
{
    struct hapt_env env;
    struct hapt_arena arena;
    struct hapt_config *config = NULL;
    hapt_crash_catch();
    hapt_env_prepare(argv);
    hapt_sandbox_start(argv, hapt_h5_trial_read);
    hapt_arena_init(&arena);
    const enum hapt_status parsed = hapt_config_parse(argc, argv, &arena, &config);
    const bool listens = parsed == HAPT_OK && saves(hapt_config_command(config));
    if (listens) hapt_stop_listen();
    enum hapt_status status =
        hapt_env_init(&env, &argc, &argv, parsed == HAPT_OK ? hapt_config_real(config, "timeout") : HAPT_ENV_TIMEOUT_S);
    if (listens) hapt_stop_listen();
    if (status == HAPT_OK)
        status = run(&env, config, parsed, argc == 1, &arena);
    else
        fprintf(stderr, "hapt: error: %s\nhint: %s\n", hapt_fail_message(), hapt_fail_hint());
    if (status == HAPT_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        fprintf(stderr,
                "hapt: error: standard output cannot be written\nhint: check free space and the pipe's reader\n");
        status = HAPT_ERR_IO;
    }
    hapt_env_end_alone(&env, status);
    hapt_env_release(&env);
    hapt_arena_release(&arena);
    hapt_sandbox_stop();
    return (int)status;
}
