/* hapt help: explains a command, its files, or an option; also as manual pages and completion for bash. */
#include "hapt/help.h"

#include <string.h>

#include "hapt/command.h"
#include "hapt/model.h"

static enum hapt_status print_bash(struct hapt_arena *arena)
{
    const char *models = "";
    for (int i = 0; models && hapt_model_family_name(i); i++)
        models = hapt_arena_printf(arena, "%s%s ", models, hapt_model_family_name(i));
    for (int i = 0; models && hapt_model_preset_name(i); i++)
        models = hapt_arena_printf(arena, "%s%s ", models, hapt_model_preset_name(i));
    if (!models) return HAPT_ERR_MEMORY;
    hapt_help_print_bash(models, stdout);
    return HAPT_OK;
}

static enum hapt_status print(const struct hapt_config *config, struct hapt_arena *arena)
{
    const int words = hapt_config_word_count(config);
    const char *word = words > 0 ? hapt_config_word(config, 0) : NULL, *form = hapt_config_text(config, "as");
    enum hapt_command command = HAPT_COMMAND_JOB;
    if (words > 1) return hapt_fail(HAPT_ERR_USAGE, "give one command or option", "too many words");
    if (!strcmp(form, "bash")) {
        if (word) return hapt_fail(HAPT_ERR_USAGE, "leave it out", "\"%s\" has no effect with --as bash", word);
        return print_bash(arena);
    }
    const enum hapt_status status = word ? hapt_help_find(word, &command) : HAPT_OK;
    if (!strcmp(form, "man") && !word) {
        for (int c = 0; c < HAPT_COMMAND_COUNT; c++)
            hapt_help_print_man((enum hapt_command)c, hapt_command_explanation((enum hapt_command)c), stdout);
    } else if (!strcmp(form, "man")) {
        HAPT_TRY(status);
        hapt_help_print_man(command, hapt_command_explanation(command), stdout);
    } else if (!word) {
        hapt_help_print_short(HAPT_COMMAND_JOB, stdout);
    } else if (status == HAPT_OK) {
        hapt_help_print_all(command, hapt_command_explanation(command), stdout);
    } else if (!hapt_help_print_option(word, stdout)) {
        return status;
    } else {
        hapt_fail_reset();
    }
    return HAPT_OK;
}

enum hapt_status hapt_command_help(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    return hapt_env_agree(env->world, env->world_rank == 0 ? print(config, arena) : HAPT_OK);
}
