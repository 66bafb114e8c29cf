/* The whole job: discovers the cluster, clusters layers, profiles, plans, trains, reports. */
#include <string.h>

#include "fix.h"
#include "hapt/heartbeat.h"
#include "hapt/run_folder.h"
#include "phases.h"
#include "strategy_preset.h"

struct job {
    struct hapt_planning planning;
    struct hapt_checkpoint *checkpoint;
};

static bool keeps_plan(const struct hapt_config *config, const struct job *job)
{
    return job->checkpoint && !hapt_config_bool(config, "replan");
}

/* Takes the checkpoint's plan or --plan; else profiles and searches. */
static enum hapt_status make_plan(struct hapt_env *env, struct hapt_config *config, struct job *job,
                                  struct hapt_arena *arena)
{
    const bool keep = keeps_plan(config, job);
    struct hapt_planning *planning = &job->planning;
    if (keep) hapt_note(env, "keeping the checkpoint's plan (--replan searches a new one)\n");
    if (keep || hapt_config_text(config, "plan"))
        return hapt_phase_plan_given(env, config, planning->model, keep ? job->checkpoint : NULL, arena,
                                     &planning->plan);
    hapt_heartbeat_note((struct hapt_activity){"profiling", -1, -1, -1, -1});
    if (hapt_phase_plans_rows(config, planning->cluster)) {
        HAPT_TRY(hapt_phase_plan_rows(env, config, arena, planning));
    } else {
        HAPT_TRY(hapt_phase_profile(env, config, planning->cluster, planning->model, planning->layers, arena,
                                    &planning->profile, &planning->other));
        hapt_heartbeat_note((struct hapt_activity){"planning", -1, -1, -1, -1});
        HAPT_TRY(hapt_phase_plan_either(env, config, arena, planning));
    }
    return hapt_phase_plan_adapt(env, planning->model, planning->profile, planning->plan);
}

static enum hapt_status check_options(struct hapt_config *config, struct hapt_arena *arena)
{
    HAPT_TRY(hapt_strategy_preset(config, arena));
    HAPT_TRY(hapt_fix_options(config, arena));
    if (hapt_config_text(config, "plan"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "with --plan there is no search",
                                          "profile objective strategy stages hide-threshold use-all-devices gap "
                                          "loops placement split-backward program tied-exchange "
                                          "fix " HAPT_PHASE_MEASURING));
    if (hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "--profile is not measured again", HAPT_PHASE_MEASURING));
    HAPT_TRY(hapt_phase_plan_options(config));
    HAPT_TRY(hapt_phase_rows_options(config));
    HAPT_TRY(hapt_train_check_validation(config));
    if (!strcmp(hapt_config_text(config, "resume"), "no"))
        return hapt_phase_refuse_unused(config, "it needs --resume", "replan");
    return HAPT_OK;
}

/* Checks before profiling, which takes long. */
static enum hapt_status check_before_profile(struct hapt_env *env, const struct hapt_config *config,
                                             const struct job *job)
{
    const struct hapt_planning *planning = &job->planning;
    if (!hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_env_agree(env->world, hapt_phase_profile_options(config, planning->cluster)));
    return hapt_train_check_data(env, config, planning->model);
}

/* The plan of a file or a checkpoint has rows of its own, which --global-batch may contradict. */
static enum hapt_status check_global_batch(const struct hapt_config *config, const struct hapt_planning *planning)
{
    const long long asked = hapt_config_int(config, "global-batch");
    const long long has = (long long)planning->plan->microbatches * planning->model->microbatch;
    if (asked == 0 || asked == has) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "leave out --global-batch, or plan again (hapt --replan)",
                     "--global-batch %lld: the plan has %d microbatches of %d rows", asked,
                     planning->plan->microbatches, planning->model->microbatch);
}

static enum hapt_status run_job(struct hapt_env *env, struct hapt_config *config, struct job *job,
                                struct hapt_arena *arena)
{
    struct hapt_planning *planning = &job->planning;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config, arena)));
    HAPT_TRY(hapt_phase_model(env, config, arena, &planning->model));
    HAPT_TRY(hapt_run_folder_claim(env, config, arena));
    HAPT_TRY(hapt_train_check_disk(env, config, planning->model));
    HAPT_TRY(hapt_train_resume(env, config, planning->model, arena, &job->checkpoint));
    HAPT_TRY(hapt_phase_cluster(env, config, true, arena, &planning->cluster));
    hapt_cluster_print(env, planning->cluster);
    HAPT_TRY(hapt_phase_precision(env, config, planning->cluster, job->checkpoint, planning->model));
    if (!keeps_plan(config, job) && !hapt_config_text(config, "plan")) HAPT_TRY(check_before_profile(env, config, job));
    HAPT_TRY(hapt_phase_layers(env, config, planning->model, arena, &planning->layers));
    hapt_layers_print(env, planning->layers, planning->model->graph);
    HAPT_TRY(make_plan(env, config, job, arena));
    planning->plan->precision = planning->model->precision;
    hapt_plan_print(env, planning->plan);
    hapt_phase_note_hosts(env, planning->cluster, planning->plan);
    HAPT_TRY(hapt_phase_rebatch(env, planning->plan, arena, &planning->model));
    HAPT_TRY(hapt_env_agree(env->world, check_global_batch(config, planning)));
    HAPT_TRY(hapt_train_settle_steps(env, config, planning->model, planning->plan));
    struct hapt_run run = {
        config, planning->cluster, planning->model, planning->layers, planning->profile, planning->plan, NULL};
    HAPT_TRY(hapt_phase_train(env, &run, job->checkpoint, arena));
    return hapt_phase_report(env, &run, arena);
}

enum hapt_status hapt_command_job(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct job job = {0};
    const enum hapt_status status = run_job(env, config, &job, arena);
    hapt_env_end_alone(env, status);
    hapt_run_folder_leave(env);
    return status;
}
