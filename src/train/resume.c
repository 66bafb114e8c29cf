/* --resume: the checkpoint that a run continues from. */
#include <string.h>

#include "checkpoint.h"
#include "hapt/run_folder.h"
#include "runtime.h"

static enum hapt_status check_kind(const struct hapt_config *config, const struct hapt_checkpoint *checkpoint)
{
    const bool modelled = runtime_is_modelled(config);
    if (checkpoint->sampled == modelled) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT,
                     modelled ? "use another --output for --device emulated"
                              : "add --device emulated to continue this run",
                     modelled ? "checkpoint %s was written by real training, not with --device emulated"
                              : "checkpoint %s was written with --device emulated: it holds samples, not weights",
                     checkpoint->path);
}

enum hapt_status hapt_train_resume(const struct hapt_env *env, struct hapt_config *config,
                                   const struct hapt_model *model, struct hapt_arena *arena,
                                   struct hapt_checkpoint **checkpoint)
{
    const char *resume = hapt_config_text(config, "resume"), *folder = NULL;
    *checkpoint = NULL;
    if (!strcmp(resume, "no")) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(env->world, hapt_run_folder_name(config, arena, &folder)));
    if (!strcmp(resume, "auto")) {
        bool any = false;
        HAPT_TRY(checkpoint_any(env, folder, arena, &any));
        if (!any) {
            hapt_note(env, "no checkpoint in %s yet: training starts anew\n", folder);
            return HAPT_OK;
        }
    }
    HAPT_TRY(hapt_checkpoint_find(env, folder, arena, checkpoint));
    HAPT_TRY(hapt_env_agree(env->world, check_kind(config, *checkpoint)));
    HAPT_TRY(hapt_env_agree(env->world, env->world_rank == 0 ? hapt_checkpoint_fits(*checkpoint, model) : HAPT_OK));
    hapt_note(env, "resuming after step %lld from %s\n", (long long)(*checkpoint)->step, (*checkpoint)->path);
    return hapt_env_agree(env->world, hapt_checkpoint_defaults(*checkpoint, config));
}
