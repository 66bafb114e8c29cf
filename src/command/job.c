/* The whole job: discovers the cluster, clusters layers, profiles, plans, trains, reports. */
#include <string.h>

#include "hapt/heartbeat.h"
#include "hapt/run_folder.h"
#include "phases.h"

struct job {
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct hapt_profile *profile;
    struct hapt_plan *plan;
    struct hapt_checkpoint *checkpoint;
    struct hapt_train_result *result;
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
    if (keep) hapt_note(env, "keeping the checkpoint's plan (--replan searches a new one)\n");
    if (keep || hapt_config_text(config, "plan"))
        return hapt_phase_plan_given(env, config, job->model, keep ? job->checkpoint : NULL, arena, &job->plan);
    hapt_heartbeat_note((struct hapt_activity){"profiling", -1, -1, -1, -1});
    HAPT_TRY(hapt_phase_profile(env, config, job->cluster, job->model, job->layers, arena, &job->profile));
    hapt_heartbeat_note((struct hapt_activity){"planning", -1, -1, -1, -1});
    HAPT_TRY(hapt_phase_plan(env, config, job->profile, job->layers, arena, &job->plan));
    return hapt_phase_plan_adapt(env, job->model, job->profile, job->plan);
}

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (hapt_config_text(config, "plan"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "with --plan there is no search",
                                          "profile objective strategy stages hide-threshold use-all-devices gap "
                                          "loops placement "
                                          "program " HAPT_PHASE_MEASURING));
    if (hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_phase_refuse_unused(config, "--profile is not measured again", HAPT_PHASE_MEASURING));
    HAPT_TRY(hapt_phase_plan_options(config));
    if (!strcmp(hapt_config_text(config, "resume"), "no"))
        return hapt_phase_refuse_unused(config, "it needs --resume", "replan");
    return HAPT_OK;
}

/* Checks before profiling, which takes long. */
static enum hapt_status check_before_profile(struct hapt_env *env, const struct hapt_config *config,
                                             const struct job *job)
{
    if (!hapt_config_text(config, "profile"))
        HAPT_TRY(hapt_env_agree(env->world, hapt_phase_profile_options(config, job->cluster)));
    return hapt_train_check_data(env, config, job->model);
}

static enum hapt_status run_job(struct hapt_env *env, struct hapt_config *config, struct job *job,
                                struct hapt_arena *arena)
{
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    HAPT_TRY(hapt_phase_model(env, config, arena, &job->model));
    HAPT_TRY(hapt_run_folder_claim(env, config, arena));
    HAPT_TRY(hapt_train_check_disk(env, config, job->model));
    HAPT_TRY(hapt_train_resume(env, config, job->model, arena, &job->checkpoint));
    HAPT_TRY(hapt_phase_cluster(env, config, true, arena, &job->cluster));
    hapt_cluster_print(env, job->cluster);
    HAPT_TRY(hapt_phase_precision(env, config, job->cluster, job->checkpoint, job->model));
    if (!keeps_plan(config, job) && !hapt_config_text(config, "plan")) HAPT_TRY(check_before_profile(env, config, job));
    HAPT_TRY(hapt_phase_layers(env, config, job->model, arena, &job->layers));
    hapt_layers_print(env, job->layers, job->model->graph);
    HAPT_TRY(make_plan(env, config, job, arena));
    job->plan->precision = job->model->precision;
    hapt_plan_print(env, job->plan);
    HAPT_TRY(hapt_train_run(env, job->cluster, job->model, job->plan, job->checkpoint, config, arena, &job->result));
    const struct hapt_run run = {config, job->cluster, job->model, job->layers, job->profile, job->plan, job->result};
    return hapt_phase_report(env, &run, arena);
}

enum hapt_status hapt_command_job(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct job job = {0};
    const enum hapt_status status = run_job(env, config, &job, arena);
    hapt_run_folder_leave(env);
    return status;
}
