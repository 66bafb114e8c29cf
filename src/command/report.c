/* `hapt report`: prints the summary of a run file; --timeline writes its trace. */
#include "hapt/command.h"
#include "hapt/report.h"
#include "outputs.h"

const char hapt_command_report_help[] =
    "Reads outputs/NAME/run.h5 and prints the plan with predicted and measured values. The run file holds\n"
    "/topology, /layers, /profile, /plan, /settings, /environment (of each rank: host, pid, kernel, cpus,\n"
    "interfaces, device, threads, versions) and /train (loss, gradient_norm, learning_rate, step_time per step;\n"
    "per-stage busy, idle and communication time; memory; warnings: ranks and links that were slower than planned).\n"
    "Each has its units. A run that still trains can be read, too; --json has the metrics of each step.\n"
    "--timeline t.json writes its /trace (hapt train --trace N) for Perfetto and about:tracing. For a rehearsal\n"
    "(--device emulated), all times are modelled, and there is no loss.\n";

static enum hapt_status report(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "input");
    struct hapt_report *summary = NULL;
    if (!path) return hapt_fail(HAPT_ERR_USAGE, "give --input outputs/NAME/run.h5", "no run file given");
    HAPT_TRY(hapt_report_load(path, arena, &summary));
    if (hapt_config_text(config, "timeline") && env->world_rank == 0)
        HAPT_TRY(hapt_report_trace(path, hapt_config_text(config, "timeline")));
    hapt_plan_print(env, summary->plan);
    hapt_report_print(env, summary);
    hapt_report_print_environment(env, summary);
    return env->quiet && env->world_rank == 0 ? hapt_report_print_json(summary) : HAPT_OK;
}

enum hapt_status hapt_command_report(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "timeline", .key = "traceEvents"}));
    return hapt_env_agree(env->world, report(env, config, arena));
}
