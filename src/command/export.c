/* hapt export: writes a checkpoint's weights to a weights file. */
#include "hapt/command.h"
#include "hapt/progress.h"
#include "hapt/train.h"
#include "outputs.h"

enum hapt_status hapt_command_export(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    const char *path = hapt_config_text(config, "checkpoint"), *output = hapt_config_text(config, "output");
    struct hapt_checkpoint *checkpoint = NULL;
    if (!path || !output)
        return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_USAGE, "give --checkpoint DIR --output w.h5",
                                                    "hapt export needs --%s", path ? "output" : "checkpoint"));
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-weights"}));
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "exporting", 0);
    enum hapt_status status = hapt_checkpoint_find(env, path, arena, &checkpoint);
    if (status != HAPT_OK) {
        hapt_progress_release(&progress);
        return status;
    }
    if (env->world_rank == 0) status = hapt_checkpoint_export(checkpoint, output);
    hapt_progress_release(&progress);
    HAPT_TRY(hapt_env_agree(env->world, status));
    hapt_print(env, "%s: %lld parameters of step %lld from %s\n", output, (long long)checkpoint->parameter_count,
               (long long)checkpoint->step, checkpoint->path);
    return HAPT_OK;
}
