#include "hapt/run_folder.h"
#include "phases.h"

static enum hapt_status save(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena)
{
    const char *folder = NULL;
    struct hapt_report *report = NULL;
    HAPT_TRY(hapt_run_folder_name(run->config, arena, &folder));
    if (env->world_rank != 0) return HAPT_OK;
    const char *path = hapt_arena_printf(arena, "%s/run.h5", folder);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_run_save(run, path));
    HAPT_TRY(hapt_report_build(run, arena, &report));
    hapt_report_print(env, report);
    hapt_print(env, "run file     %s\n", path);
    if (run->result->stopped_by)
        hapt_note(env, "stopped by %s after step %lld; start again with --resume\n", run->result->stopped_by,
                  (long long)report->steps);
    return env->quiet ? hapt_report_print_json(report) : HAPT_OK;
}

enum hapt_status hapt_phase_report(struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena)
{
    HAPT_TRY(hapt_env_agree(env->world, save(env, run, arena)));
    return run->result->stopped_by ? HAPT_STOPPED : HAPT_OK;
}
