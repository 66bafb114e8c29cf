/* Parses the command line by the option table. */
#include <stdlib.h>
#include <string.h>

#include "config_private.h"

enum { MAX_WORDS = 1024 };

struct hapt_config {
    struct hapt_arena *arena;
    enum hapt_command command;
    const char **value; /* [options_count()], as are the others */
    bool *given, *preset;
    int word_count;
    const char *word[MAX_WORDS];
};

static int index_of(const char *name)
{
    const int index = options_find(name, strlen(name));
    HAPT_ASSERT(index >= 0);
    return index;
}

static enum hapt_status unknown_option(const char *name, enum hapt_command command)
{
    const char *nearest = options_nearest(name, command), *word = options_command(command)->name;
    const char *gap = command == HAPT_COMMAND_JOB ? "" : " ";
    char hint[160];
    if (options_find(name, strlen(name)) >= 0)
        snprintf(hint, sizeof hint, "hapt help %s lists the commands that take it", name);
    else if (nearest)
        snprintf(hint, sizeof hint, "did you mean --%s?", nearest);
    else
        snprintf(hint, sizeof hint, "hapt help%s%s lists the options", gap, word);
    return hapt_fail(HAPT_ERR_USAGE, hint, "unknown option --%s of hapt%s%s", name, gap, word);
}

static enum hapt_status set_value(struct hapt_config *config, int index, const char *text)
{
    char buffer[OPTIONS_MAX_CHOICE];
    const char *wrong = options_value_error(options_at(index), text, buffer);
    if (wrong)
        return hapt_fail(HAPT_ERR_USAGE, wrong, "bad value \"%s\" of --%s", text, options_name(options_at(index)));
    if (config->given[index] && options_at(index)->type == HAPT_OPTION_LIST) {
        config->value[index] = hapt_arena_printf(config->arena, "%s,%s", config->value[index], text);
        return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
    }
    if (config->given[index])
        return hapt_fail(HAPT_ERR_USAGE, "give it once", "option --%s is given twice", options_name(options_at(index)));
    config->value[index] = text;
    config->given[index] = true;
    return HAPT_OK;
}

/* Parses the option at argv[*at]; advances *at past its value. */
static enum hapt_status parse_option(struct hapt_config *config, int argc, char **argv, int *at)
{
    const char *name = argv[*at] + 2;
    const char *equals = strchr(name, '=');
    const size_t length = equals ? (size_t)(equals - name) : strlen(name);
    const int index = options_find(name, length);
    if (index < 0 || !options_accepted(options_at(index), config->command)) {
        const char *plain = hapt_arena_printf(config->arena, "%.*s", (int)length, name);
        return plain ? unknown_option(plain, config->command) : HAPT_ERR_MEMORY;
    }
    if (equals) return set_value(config, index, equals + 1);
    bool truth;
    const bool has_next = *at + 1 < argc && strncmp(argv[*at + 1], "--", 2) != 0;
    if (options_at(index)->type == HAPT_OPTION_BOOL && !(has_next && options_parse_bool(argv[*at + 1], &truth)))
        return set_value(config, index, "yes");
    /* A choice with a "yes" can be used without a value. */
    if (options_at(index)->type == HAPT_OPTION_CHOICE && !has_next &&
        options_is_choice(options_at(index)->choices, "yes"))
        return set_value(config, index, "yes");
    if (!has_next)
        return hapt_fail(HAPT_ERR_USAGE, options_at(index)->brief, "option --%s needs a value",
                         options_name(options_at(index)));
    return set_value(config, index, argv[++*at]);
}

static enum hapt_status find_command(const char *word, enum hapt_command *command)
{
    if (options_find_command(word, command)) return HAPT_OK;
    char hint[80];
    const char *nearest = options_nearest_command(word);
    if (nearest) snprintf(hint, sizeof hint, "did you mean hapt %s?", nearest);
    return hapt_fail(HAPT_ERR_USAGE, nearest ? hint : "hapt --help lists the commands", "unknown command \"%s\"", word);
}

/* hapt help --steps: the option that it explains. */
static bool asks_for_option(const struct hapt_config *config, const char *word)
{
    if (config->command != HAPT_COMMAND_HELP || strncmp(word, "--", 2) != 0) return false;
    const int index = options_find(word + 2, strlen(word + 2));
    return index >= 0 && !options_accepted(options_at(index), HAPT_COMMAND_HELP);
}

enum hapt_status hapt_config_parse(int argc, char **argv, struct hapt_arena *arena, struct hapt_config **result)
{
    struct hapt_config *config;
    HAPT_NEW(config, arena, 1);
    config->arena = arena;
    HAPT_NEW(config->value, arena, options_count());
    HAPT_NEW(config->given, arena, options_count());
    HAPT_NEW(config->preset, arena, options_count());
    for (int i = 0; i < options_count(); i++) config->value[i] = options_at(i)->value;
    int at = 1;
    if (argc > 1 && argv[1][0] != '-') HAPT_TRY(find_command(argv[at++], &config->command));
    for (; at < argc; at++) {
        if (!strcmp(argv[at], "-h")) {
            HAPT_TRY(set_value(config, index_of("help"), "yes"));
        } else if (!strcmp(argv[at], "-v") && config->command == HAPT_COMMAND_JOB) {
            HAPT_TRY(set_value(config, index_of("version"), "yes"));
        } else if (!strncmp(argv[at], "--", 2) && !asks_for_option(config, argv[at])) {
            HAPT_TRY(parse_option(config, argc, argv, &at));
        } else {
            if (!options_command(config->command)->takes_words)
                return hapt_fail(HAPT_ERR_USAGE, "options are --key value", "unexpected word \"%s\"", argv[at]);
            if (config->word_count == MAX_WORDS) return hapt_fail(HAPT_ERR_USAGE, NULL, "too many arguments");
            config->word[config->word_count++] = argv[at] + (asks_for_option(config, argv[at]) ? 2 : 0);
        }
    }
    *result = config;
    return HAPT_OK;
}

enum hapt_command hapt_config_command(const struct hapt_config *config)
{
    return config->command;
}

bool hapt_config_wants_help(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "help"), "no") != 0;
}

bool hapt_config_wants_all_help(const struct hapt_config *config)
{
    return strcmp(hapt_config_text(config, "help"), "all") == 0;
}

bool hapt_config_wants_version(const struct hapt_config *config)
{
    return hapt_config_bool(config, "version");
}

int hapt_config_word_count(const struct hapt_config *config)
{
    return config->word_count;
}

const char *hapt_config_word(const struct hapt_config *config, int index)
{
    HAPT_ASSERT(index >= 0 && index < config->word_count);
    return config->word[index];
}

const char *hapt_config_text(const struct hapt_config *config, const char *name)
{
    return config->value[index_of(name)];
}

double hapt_config_real(const struct hapt_config *config, const char *name)
{
    const int index = index_of(name);
    double value = 0;
    HAPT_ASSERT(config->value[index] && options_parse_number(options_at(index), config->value[index], &value));
    return value;
}

int64_t hapt_config_int(const struct hapt_config *config, const char *name)
{
    return (int64_t)hapt_config_real(config, name);
}

bool hapt_config_bool(const struct hapt_config *config, const char *name)
{
    bool value = false;
    HAPT_ASSERT(options_parse_bool(config->value[index_of(name)], &value));
    return value;
}

bool hapt_config_given(const struct hapt_config *config, const char *name)
{
    return config->given[index_of(name)];
}

const char *hapt_config_given_beside(const struct hapt_config *config, const char *const *allowed)
{
    for (int i = 0; i < options_count(); i++) {
        bool listed = !config->given[i];
        for (const char *const *name = allowed; *name; name++) listed |= strcmp(options_at(i)->name, *name) == 0;
        if (!listed) return options_at(i)->name;
    }
    return NULL;
}

enum hapt_status hapt_config_default(struct hapt_config *config, const char *name, const char *value)
{
    const int index = options_find(name, strlen(name));
    char buffer[OPTIONS_MAX_CHOICE];
    if (index < 0 || !options_at(index)->training)
        return hapt_fail(HAPT_ERR_INPUT, "the file was written by another version", "unknown training option \"%s\"",
                         name);
    const char *wrong = options_value_error(options_at(index), value, buffer);
    if (wrong) return hapt_fail(HAPT_ERR_INPUT, wrong, "bad value \"%s\" of training option %s", value, name);
    if (config->given[index]) return HAPT_OK;
    config->value[index] = hapt_arena_strdup(config->arena, value);
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_preset(struct hapt_config *config, const char *name, const char *value)
{
    const int index = index_of(name);
    char buffer[OPTIONS_MAX_CHOICE];
    HAPT_ASSERT(!options_value_error(options_at(index), value, buffer));
    if (config->given[index]) return HAPT_OK;
    config->value[index] = hapt_arena_strdup(config->arena, value);
    config->preset[index] = true;
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_decide(struct hapt_config *config, const char *name, const char *value)
{
    const int index = index_of(name);
    char buffer[OPTIONS_MAX_CHOICE];
    HAPT_ASSERT(!options_value_error(options_at(index), value, buffer));
    config->value[index] = hapt_arena_strdup(config->arena, value);
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_give(struct hapt_config *config, const char *name, const char *value, const char *source)
{
    const int index = index_of(name);
    char buffer[OPTIONS_MAX_CHOICE];
    const char *wrong = options_value_error(options_at(index), value, buffer);
    if (wrong) return hapt_fail(HAPT_ERR_USAGE, wrong, "bad value \"%s\" in %s", value, source);
    if (config->given[index] && strcmp(config->value[index], value) != 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "%s contradicts --%s %s", source, name,
                         config->value[index]);
    config->value[index] = hapt_arena_strdup(config->arena, value);
    config->given[index] = true;
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

bool hapt_config_chosen(const struct hapt_config *config, const char *name)
{
    const int index = index_of(name);
    return config->given[index] || config->preset[index];
}

void hapt_config_visit_training(const struct hapt_config *config, hapt_config_visitor *visit, void *context)
{
    for (int i = 0; i < options_count(); i++)
        if (options_at(i)->training && config->value[i]) visit(context, options_at(i)->name, config->value[i]);
}

void hapt_config_visit_model(const struct hapt_config *config, hapt_config_visitor *visit, void *context)
{
    for (int i = 0; i < options_count(); i++)
        if (config->given[i] && strspn(options_at(i)->commands, "mie") == strlen(options_at(i)->commands))
            visit(context, options_at(i)->name, config->value[i]);
}
