/* `hapt report`: prints the summary of a run file; --timeline writes its trace, --html a page. */
#include <stdio.h>
#include <sys/stat.h>
#include <time.h>

#include "hapt/command.h"
#include "hapt/picture.h"
#include "outputs.h"

const char hapt_command_report_help[] =
    "Reads outputs/NAME/run.h5 and prints the plan with predicted and measured values. The run file holds\n"
    "/topology, /layers, /profile, /plan, /settings, /environment (of each rank: host, pid, kernel, cpus,\n"
    "interfaces, device, threads, versions) and /train (loss, gradient_norm, learning_rate, step_time per step;\n"
    "per-stage busy, idle and communication time; memory; warnings: ranks and links that were slower than planned).\n"
    "Each has its units. A run that still trains can be read, too; --json has the metrics of each step.\n"
    "--html out.html writes a page without outside references: the timeline of a step, measured (hapt train --trace "
    "N)\n"
    "below predicted, losses, medians and memory of the stages, the cluster, and the plan in words. Attributes data-*\n"
    "hold its numbers.\n"
    "--timeline t.json writes its /trace (hapt train --trace N) for Perfetto and about:tracing. For a rehearsal\n"
    "(--device emulated), all times are modelled, and there is no loss.\n";

/* Writes --html. */
static enum hapt_status write_page(const struct hapt_config *config, const struct hapt_report *report,
                                   struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "input");
    struct hapt_picture_run picture = {
        .model = report->model, .name = path, .report = report, .cluster = report->cluster};
    struct hapt_report_trace *trace = NULL;
    struct stat about;
    struct tm local;
    char written[64];
    HAPT_TRY(hapt_report_trace_load(path, arena, &trace));
    picture.trace = trace;
    if (stat(path, &about) == 0 && localtime_r(&about.st_mtime, &local) &&
        strftime(written, sizeof written, "%Y-%m-%d %H:%M %z", &local) > 0)
        picture.written = written;
    return hapt_picture_save_run(&picture, hapt_config_text(config, "html"));
}

static enum hapt_status report(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "input");
    struct hapt_report *summary = NULL;
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "give --input outputs/NAME/run.h5", "no run file given");
    struct stat about;
    if (stat(path, &about) == 0 && S_ISDIR(about.st_mode)) {
        char hint[300];
        snprintf(hint, sizeof hint, "give the run file in a run's folder: --input %.200s/run.h5", path);
        return hapt_fail(HAPT_ERR_INPUT, hint, "%s is a folder", path);
    }
    HAPT_TRY(hapt_report_load(path, arena, &summary));
    if (hapt_config_text(config, "timeline") && env->world_rank == 0)
        HAPT_TRY(hapt_report_trace(path, hapt_config_text(config, "timeline")));
    if (hapt_config_text(config, "html") && env->world_rank == 0) HAPT_TRY(write_page(config, summary, arena));
    hapt_plan_print(env, summary->plan);
    hapt_report_print(env, summary);
    hapt_report_print_environment(env, summary);
    return env->quiet && env->world_rank == 0 ? hapt_report_print_json(summary) : HAPT_OK;
}

enum hapt_status hapt_command_report(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const struct hapt_output outputs[] = {{.option = "timeline", .key = "traceEvents", .kind = "a timeline"},
                                          {.option = "html", .begins = HAPT_PICTURE_PAGE_HEAD}};
    HAPT_TRY(hapt_outputs_check(env, config, 2, outputs));
    return hapt_env_agree(env->world, report(env, config, arena));
}
