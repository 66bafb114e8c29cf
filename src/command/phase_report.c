#include "hapt/live.h"
#include "hapt/run_folder.h"
#include "phases.h"

enum hapt_status hapt_phase_train(struct hapt_env *env, struct hapt_run *run, const struct hapt_checkpoint *checkpoint,
                                  struct hapt_arena *arena)
{
    struct hapt_train_observer observer;
    struct hapt_train_result *result = NULL;
    HAPT_TRY(hapt_env_agree(env->world, hapt_live_prepare(env, run, arena, &observer)));
    HAPT_TRY(
        hapt_train_run(env, run->cluster, run->model, run->plan, checkpoint, run->config, &observer, arena, &result));
    run->result = result;
    return HAPT_OK;
}

static enum hapt_status save(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena)
{
    const char *folder = NULL;
    struct hapt_report *report = NULL;
    HAPT_TRY(hapt_run_folder_name(run->config, arena, &folder));
    if (env->world_rank != 0) return HAPT_OK;
    const char *path = hapt_arena_printf(arena, "%s/run.h5", folder);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_run_save(run, run->result->stopped_by ? HAPT_RUN_STOPPED : HAPT_RUN_FINISHED, path));
    HAPT_TRY(hapt_report_build(run, arena, &report));
    hapt_report_print(env, report);
    hapt_print(env, "run file     %s\n", path);
    if (run->result->stopped_by)
        hapt_note(env, "stopped by %s after step %lld; start again with --resume\n", run->result->stopped_by,
                  (long long)report->steps);
    else if (report->steps > 0 && report->first_step >= report->steps)
        hapt_note(env,
                  "nothing was left to train: the checkpoint is after step %lld; give a larger --steps to train on\n",
                  (long long)report->first_step);
    return env->quiet ? hapt_report_print_json(report) : HAPT_OK;
}

enum hapt_status hapt_phase_report(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena)
{
    HAPT_TRY(hapt_env_agree(env->world, save(env, run, arena)));
    return run->result->stopped_by ? HAPT_STOPPED : HAPT_OK;
}
