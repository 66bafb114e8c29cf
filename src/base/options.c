/* The option table and the command table: lookups, spelling and values. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "config_private.h"
#include "hapt/text.h"

static const struct option table[] = {
#define OPTION(name, type, ...) {name, HAPT_OPTION_##type, __VA_ARGS__},
#define SECTION(title) {"", HAPT_OPTION_TEXT, NULL, 0, 0, NULL, "", "", false, title, NULL},
#include "options.def"
#undef SECTION
#undef OPTION
};
enum { OPTION_COUNT = sizeof table / sizeof *table };

/* Other names of options: the first is printed, files keep the second. */
static const struct {
    const char *printed, *name;
} aliases[] = {{"microbatch-rows", "microbatch"}};
enum { ALIAS_COUNT = sizeof aliases / sizeof *aliases };

/* clang-format off: a row per command */
static const struct command command_table[HAPT_COMMAND_COUNT] = {
    [HAPT_COMMAND_JOB] = {'j', "", "--input model.h5", "plan and train: the whole job", false},
    [HAPT_COMMAND_TOPOLOGY] = {'t', "topology", "", "print the discovered or described cluster", false},
    [HAPT_COMMAND_PROFILE] = {'f', "profile", "--input model.h5 --output P.h5", "measure a model on the cluster",
                              false},
    [HAPT_COMMAND_PLAN] = {'p', "plan", "(--input model.h5 | --profile P.h5) --microbatches B",
                           "search for the best plan", true},
    [HAPT_COMMAND_SPMD] = {'h', "spmd", "--input model.h5 --cluster C.json",
                           "synthesise one SPMD program for all devices (HAP)", false},
    [HAPT_COMMAND_SIMULATE] = {'s', "simulate", "--plan plan.h5", "cost a plan by simulating its schedule", false},
    [HAPT_COMMAND_TRAIN] = {'r', "train", "--input model.h5 --plan plan.h5", "train with a given plan", false},
    [HAPT_COMMAND_EVALUATE] = {'v', "evaluate", "--input model.h5 --checkpoint DIR --data held-out.h5",
                               "compute the loss on held-out data", false},
    [HAPT_COMMAND_GENERATE] = {'g', "generate", "--input model.h5 --checkpoint DIR --prompt-tokens 5,17,3",
                               "continue a text", false},
    [HAPT_COMMAND_MODEL] = {'m', "model", "(FAMILY | NAMED) --output model.h5", "write a model file", true},
    [HAPT_COMMAND_IMPORT] = {'i', "import", "DIR --sequence T --output model.h5",
                             "make a model file of a published model (Hugging Face)", true},
    [HAPT_COMMAND_DATA] = {'d', "data", "FILE --output tokens.h5", "convert text or token files to a data file", true},
    [HAPT_COMMAND_EXPORT] = {'e', "export", "--checkpoint DIR --output w.h5",
                             "write a checkpoint's weights, also for transformers", false},
    [HAPT_COMMAND_REPORT] = {'o', "report", "--input outputs/NAME/run.h5", "summarise a run", false},
    [HAPT_COMMAND_CHECK] = {'c', "check", "FILE...", "verify all content of files of any kind, and checkpoints", true},
    [HAPT_COMMAND_CLUSTER] = {'C', "cluster", "init --output C.json",
                              "write a cluster file, from this machine, sinfo or nvidia-smi", true},
    [HAPT_COMMAND_OPS] = {'O', "ops", "[OPERATOR...]", "list the operators of models' graphs", true},
    [HAPT_COMMAND_DOCTOR] = {'D', "doctor", "", "check the installation and the machine", false},
    [HAPT_COMMAND_HELP] = {'H', "help", "[COMMAND | OPTION]", "explain a command, its files, or an option", true},
};
/* clang-format on */

int options_count(void)
{
    return OPTION_COUNT;
}

const struct option *options_at(int index)
{
    HAPT_ASSERT(index >= 0 && index < OPTION_COUNT);
    return &table[index];
}

const struct command *options_command(enum hapt_command command)
{
    return &command_table[command];
}

bool options_accepted(const struct option *option, enum hapt_command command)
{
    return strchr(option->commands, command_table[command].letter) != NULL;
}

int options_find(const char *name, size_t length)
{
    for (int a = 0; a < ALIAS_COUNT; a++)
        if (strlen(aliases[a].printed) == length && !strncmp(aliases[a].printed, name, length))
            return options_find(aliases[a].name, strlen(aliases[a].name));
    for (int i = 0; i < OPTION_COUNT; i++)
        if (length > 0 && strlen(table[i].name) == length && !strncmp(table[i].name, name, length)) return i;
    return -1;
}

const char *options_name(const struct option *option)
{
    for (int a = 0; a < ALIAS_COUNT; a++)
        if (!strcmp(aliases[a].name, option->name)) return aliases[a].printed;
    return option->name;
}

const char *options_placeholder(const struct option *option)
{
    static const char *const placeholder[] = {"TEXT", "PATH", "N", "X", "yes|no", "", "TIME", "KEY=VALUE,..."};
    return placeholder[option->type];
}

const char *options_nearest(const char *name, enum hapt_command command)
{
    struct hapt_nearest nearest = {0};
    for (int i = 0; i < OPTION_COUNT; i++) {
        if (!*table[i].name || (command != HAPT_COMMAND_COUNT && !options_accepted(&table[i], command))) continue;
        hapt_text_consider(&nearest, name, options_name(&table[i]));
        hapt_text_consider(&nearest, name, table[i].name);
    }
    return nearest.name;
}

bool options_find_command(const char *word, enum hapt_command *command)
{
    for (int i = 1; i < HAPT_COMMAND_COUNT; i++)
        if (!strcmp(word, command_table[i].name)) {
            *command = (enum hapt_command)i;
            return true;
        }
    return false;
}

const char *options_nearest_command(const char *word)
{
    struct hapt_nearest nearest = {0};
    for (int i = 1; i < HAPT_COMMAND_COUNT; i++) hapt_text_consider(&nearest, word, command_table[i].name);
    return nearest.name;
}

bool options_parse_bool(const char *text, bool *value)
{
    *value = !strcmp(text, "yes") || !strcmp(text, "true") || !strcmp(text, "1") || !strcmp(text, "on");
    return *value || !strcmp(text, "no") || !strcmp(text, "false") || !strcmp(text, "0") || !strcmp(text, "off");
}

bool options_is_choice(const char *choices, const char *text)
{
    const size_t length = strlen(text);
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (length && !strncmp(at, text, length) && (at[length] == '|' || !at[length])) return true;
    return false;
}

bool options_parse_number(const struct option *option, const char *text, double *value)
{
    char *end;
    switch (option->type) {
    case HAPT_OPTION_INT:
        if (options_is_choice(option->choices, text)) {
            *value = -1;
            return true;
        }
        /* fall through */
    case HAPT_OPTION_REAL:
        *value = strtod(text, &end);
        return end != text && !*end && isfinite(*value) &&
               (option->type == HAPT_OPTION_REAL || *value == floor(*value));
    case HAPT_OPTION_TIME: return hapt_units_parse_time(text, value);
    default: return false;
    }
}

const char *options_value_error(const struct option *option, const char *text, char buffer[OPTIONS_MAX_CHOICE])
{
    double value;
    bool truth;
    switch (option->type) {
    case HAPT_OPTION_TEXT:
    case HAPT_OPTION_LIST:
    case HAPT_OPTION_PATH: return *text ? NULL : "it must not be empty";
    case HAPT_OPTION_BOOL: return options_parse_bool(text, &truth) ? NULL : "use yes or no";
    case HAPT_OPTION_CHOICE:
        if (options_is_choice(option->choices, text)) return NULL;
        snprintf(buffer, OPTIONS_MAX_CHOICE, "use one of %s", option->choices);
        return buffer;
    case HAPT_OPTION_TIME:
    case HAPT_OPTION_INT:
    case HAPT_OPTION_REAL: break;
    }
    if (!options_parse_number(option, text, &value)) {
        snprintf(buffer, OPTIONS_MAX_CHOICE, "use %s%s%s",
                 option->type == HAPT_OPTION_INT    ? "a whole number"
                 : option->type == HAPT_OPTION_TIME ? "a time such as 60 s"
                                                    : "a number",
                 option->choices ? " or " : "", option->choices ? option->choices : "");
        return buffer;
    }
    if (option->choices && value == -1)
        return options_is_choice(option->choices, text) ? NULL : "use a positive number";
    if (value >= option->low && value <= option->high) return NULL;
    snprintf(buffer, OPTIONS_MAX_CHOICE, "use a value between %g and %g", option->low, option->high);
    return buffer;
}
