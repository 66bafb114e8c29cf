/* Writes a plan for others, traces for a simulator or settings of a trainer: options, folder, files. */
#include "emit.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "hapt/emit.h"
#include "hapt/folder.h"
#include "outputs.h"

bool hapt_emit_asked(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "emit"), "no") != 0;
}

static bool note_entry(void *context, const char *name)
{
    (void)name;
    *(bool *)context = true;
    return false;
}

static enum hapt_status check_folder(const struct hapt_config *config)
{
    const char *folder = hapt_config_text(config, "output");
    struct stat about;
    bool has_entries = false;
    if (!folder)
        return hapt_fail(HAPT_ERR_USAGE, "give a folder for the files: --output FOLDER", "--emit has no --output");
    const bool exists = lstat(folder, &about) == 0;
    if (exists && !S_ISDIR(about.st_mode))
        return hapt_fail(HAPT_ERR_USAGE, "with --emit, --output is a folder; give another name", "--output %s is %s",
                         folder, S_ISLNK(about.st_mode) ? "a symbolic link" : "a file");
    HAPT_TRY(hapt_folder_list(folder, note_entry, &has_entries));
    if (has_entries && !hapt_config_bool(config, "overwrite"))
        return hapt_fail(HAPT_ERR_USAGE, "give another folder, or --overwrite yes to replace such files in it",
                         "--output %s is a folder with files", folder);
    return exists ? hapt_folder_try(folder) : hapt_outputs_try_parent("output", folder);
}

enum hapt_status hapt_emit_check(const struct hapt_env *env, const struct hapt_config *config)
{
    return hapt_env_agree(env->world, env->world_rank == 0 ? check_folder(config) : HAPT_OK);
}

/* A rank of an earlier, longer plan would be taken for one of this plan. */
static bool remove_own(void *context, const char *name)
{
    char path[4096];
    if ((hapt_emit_is_own(name) || hapt_trainer_is_own(name)) &&
        snprintf(path, sizeof path, "%s/%s", (const char *)context, name) < (int)sizeof path)
        unlink(path);
    return true;
}

static bool names_trainer(const struct hapt_config *config)
{
    enum hapt_trainer trainer;
    return hapt_trainer_parse(hapt_config_text(config, "emit"), &trainer);
}

enum hapt_status hapt_emit_refuse_trainers(const struct hapt_config *config)
{
    if (!names_trainer(config)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "use hapt plan --input m.h5: it knows the model's modules",
                     "--emit %s needs a model", hapt_config_text(config, "emit"));
}

/* *sentences: limits of another trainer, and a NULL; NULL: traces are written. */
static enum hapt_status write_own(const struct hapt_config *config, const struct hapt_plan *plan,
                                  const struct hapt_profile *profile, const struct hapt_model *model,
                                  struct hapt_arena *arena, const char ***sentences)
{
    enum hapt_emit_format format;
    enum hapt_trainer trainer;
    char folder[4096];
    const char *name = hapt_config_text(config, "emit");
    const bool trains = hapt_trainer_parse(name, &trainer), known = trains || hapt_emit_format_parse(name, &format);
    HAPT_ASSERT(known && (model || !trains));
    if (snprintf(folder, sizeof folder, "%s", hapt_config_text(config, "output")) >= (int)sizeof folder)
        return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", folder);
    if (trains) HAPT_TRY(hapt_trainer_check(plan, model, trainer, arena)); /* before earlier files are removed */
    HAPT_TRY(hapt_folder_list(folder, remove_own, folder));
    if (trains) return hapt_emit_trainer(plan, model, trainer, folder, arena, sentences);
    return hapt_emit_write(plan, profile, format, folder);
}

enum hapt_status hapt_emit_plan(const struct hapt_env *env, const struct hapt_config *config,
                                const struct hapt_plan *plan, const struct hapt_profile *profile,
                                const struct hapt_model *model)
{
    const char *folder = hapt_config_text(config, "output"), *name = hapt_config_text(config, "emit");
    const char **sentences = NULL;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    enum hapt_status status =
        env->world_rank == 0 ? write_own(config, plan, profile, model, &arena, &sentences) : HAPT_OK;
    if (status == HAPT_OK && sentences) {
        hapt_print(env, "plan for %s: %d stages, %d microbatches, in %s\n", name, plan->stage_count, plan->microbatches,
                   folder);
        for (const char **sentence = sentences; *sentence; sentence++) hapt_print(env, "  %s\n", *sentence);
    }
    hapt_arena_release(&arena);
    HAPT_TRY(hapt_env_agree(env->world, status));
    if (names_trainer(config)) return HAPT_OK;
    hapt_print(env, "traces for %s: %d ranks, %d microbatches, in %s%s\n", name, plan->submesh_count,
               plan->microbatches, folder, strcmp(name, "simgrid") == 0 ? " (replay.sh replays them)" : "");
    if (!profile)
        hapt_note(env, "without --profile, the bytes of a message are those that %g GB/s moves in its time\n",
                  HAPT_EMIT_BANDWIDTH_BYTES_PER_S / 1e9);
    return HAPT_OK;
}
