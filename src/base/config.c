/* Parses the command line by the option table. */
#include "hapt/config.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

struct option {
    const char *name;
    enum hapt_option_type type;
    const char *value;
    double low, high;
    const char *choices;
    const char *commands; /* command letters */
    bool training;
    const char *help;
};

static const struct option table[] = {
#define OPTION(name, type, ...) {name, HAPT_OPTION_##type, __VA_ARGS__},
#include "options.def"
#undef OPTION
};
enum { OPTION_COUNT = sizeof table / sizeof *table, MAX_WORDS = 1024 };

static const struct {
    char letter;
    const char *name, *usage, *what;
} command_table[HAPT_COMMAND_COUNT] = {
    [HAPT_COMMAND_JOB] = {'j', "", "--input model.h5", "plan and train: the whole job"},
    [HAPT_COMMAND_TOPOLOGY] = {'t', "topology", "", "print the discovered or described cluster"},
    [HAPT_COMMAND_PROFILE] = {'f', "profile", "--input model.h5 --output P.h5", "measure a model on the cluster"},
    [HAPT_COMMAND_PLAN] = {'p', "plan", "(--input model.h5 | --profile P.h5) --microbatches B",
                           "search for the best plan"},
    [HAPT_COMMAND_SPMD] = {'h', "spmd", "--input model.h5 --cluster C.json",
                           "synthesise one SPMD program for all devices (HAP)"},
    [HAPT_COMMAND_SIMULATE] = {'s', "simulate", "--plan plan.h5", "cost a plan by simulating its schedule"},
    [HAPT_COMMAND_TRAIN] = {'r', "train", "--input model.h5 --plan plan.h5", "train with a given plan"},
    [HAPT_COMMAND_EVALUATE] = {'v', "evaluate", "--input model.h5 --checkpoint DIR --data held-out.h5",
                               "compute the loss on held-out data"},
    [HAPT_COMMAND_GENERATE] = {'g', "generate", "--input model.h5 --checkpoint DIR --prompt-tokens 5,17,3",
                               "continue a text"},
    [HAPT_COMMAND_MODEL] = {'m', "model", "(FAMILY | NAMED) --output model.h5", "write a model file"},
    [HAPT_COMMAND_IMPORT] = {'i', "import", "DIR --sequence T --output model.h5",
                             "make a model file of a published model (Hugging Face)"},
    [HAPT_COMMAND_DATA] = {'d', "data", "FILE --output tokens.h5", "convert text or token files to a data file"},
    [HAPT_COMMAND_EXPORT] = {'e', "export", "--checkpoint DIR --output w.h5",
                             "write a checkpoint's weights, also for transformers"},
    [HAPT_COMMAND_REPORT] = {'o', "report", "--input outputs/NAME/run.h5", "summarise a run"},
    [HAPT_COMMAND_CHECK] = {'c', "check", "FILE...", "verify all content of files of any kind, and checkpoints"},
    [HAPT_COMMAND_CLUSTER] = {'C', "cluster", "init --output C.json",
                              "write a cluster file, from this machine, sinfo or nvidia-smi"},
    [HAPT_COMMAND_DOCTOR] = {'D', "doctor", "", "check the installation and the machine"},
};

struct hapt_config {
    struct hapt_arena *arena;
    enum hapt_command command;
    const char *value[OPTION_COUNT];
    bool given[OPTION_COUNT], preset[OPTION_COUNT];
    int word_count;
    const char *word[MAX_WORDS];
};

static bool accepts_command(const struct option *option, enum hapt_command command)
{
    return strchr(option->commands, command_table[command].letter) != NULL;
}

static int find(const char *name, size_t length)
{
    for (int i = 0; i < OPTION_COUNT; i++)
        if (strlen(table[i].name) == length && !strncmp(table[i].name, name, length)) return i;
    return -1;
}

static int edit_distance(const char *a, const char *b)
{
    enum { MAX_LENGTH = 40 };
    int row[MAX_LENGTH + 1];
    const int width = (int)strlen(b);
    if (width > MAX_LENGTH) return MAX_LENGTH;
    for (int j = 0; j <= width; j++) row[j] = j;
    for (int i = 1; a[i - 1]; i++) {
        int corner = row[0];
        row[0] = i;
        for (int j = 1; j <= width; j++) {
            const int change = corner + (a[i - 1] != b[j - 1]);
            corner = row[j];
            const int insert = row[j - 1] + 1, erase = row[j] + 1;
            row[j] = change < insert ? (change < erase ? change : erase) : (insert < erase ? insert : erase);
        }
    }
    return row[width];
}

static enum hapt_status unknown_option(const char *name, enum hapt_command command)
{
    const char *nearest = NULL;
    int best = 4;
    for (int i = 0; i < OPTION_COUNT; i++) {
        const int distance = edit_distance(name, table[i].name);
        if (accepts_command(&table[i], command) && distance < best) {
            best = distance;
            nearest = table[i].name;
        }
    }
    char hint[160];
    const char *gap = command == HAPT_COMMAND_JOB ? "" : " ";
    if (nearest)
        snprintf(hint, sizeof hint, "did you mean --%s?", nearest);
    else
        snprintf(hint, sizeof hint, "see hapt%s%s --help", gap, command_table[command].name);
    return hapt_fail(HAPT_ERR_USAGE, hint, "unknown option --%s of hapt%s%s", name, gap, command_table[command].name);
}

static bool parse_bool(const char *text, bool *value)
{
    *value = !strcmp(text, "yes") || !strcmp(text, "true") || !strcmp(text, "1") || !strcmp(text, "on");
    return *value || !strcmp(text, "no") || !strcmp(text, "false") || !strcmp(text, "0") || !strcmp(text, "off");
}

static bool is_choice(const char *choices, const char *text)
{
    const size_t length = strlen(text);
    for (const char *at = choices; at; at = strchr(at, '|') ? strchr(at, '|') + 1 : NULL)
        if (length && !strncmp(at, text, length) && (at[length] == '|' || !at[length])) return true;
    return false;
}

static bool parse_number(const struct option *option, const char *text, double *value)
{
    char *end;
    switch (option->type) {
    case HAPT_OPTION_INT:
        if (is_choice(option->choices, text)) {
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

/* Why the value is invalid, as a hint; NULL if it is valid. */
static const char *value_error(const struct option *option, const char *text, char buffer[200])
{
    double value;
    bool truth;
    switch (option->type) {
    case HAPT_OPTION_TEXT:
    case HAPT_OPTION_LIST:
    case HAPT_OPTION_PATH: return *text ? NULL : "it must not be empty";
    case HAPT_OPTION_BOOL: return parse_bool(text, &truth) ? NULL : "use yes or no";
    case HAPT_OPTION_CHOICE:
        if (is_choice(option->choices, text)) return NULL;
        snprintf(buffer, 200, "use one of %s", option->choices);
        return buffer;
    case HAPT_OPTION_TIME:
    case HAPT_OPTION_INT:
    case HAPT_OPTION_REAL: break;
    }
    if (!parse_number(option, text, &value)) {
        snprintf(buffer, 200, "use %s%s%s",
                 option->type == HAPT_OPTION_INT    ? "a whole number"
                 : option->type == HAPT_OPTION_TIME ? "a time such as 60 s"
                                                    : "a number",
                 option->choices ? " or " : "", option->choices ? option->choices : "");
        return buffer;
    }
    if (option->choices && value == -1) return is_choice(option->choices, text) ? NULL : "use a positive number";
    if (value >= option->low && value <= option->high) return NULL;
    snprintf(buffer, 200, "use a value between %g and %g", option->low, option->high);
    return buffer;
}

static enum hapt_status set_value(struct hapt_config *config, int index, const char *text)
{
    char buffer[200];
    const char *wrong = value_error(&table[index], text, buffer);
    if (wrong) return hapt_fail(HAPT_ERR_USAGE, wrong, "bad value \"%s\" of --%s", text, table[index].name);
    if (config->given[index] && table[index].type == HAPT_OPTION_LIST) {
        config->value[index] = hapt_arena_printf(config->arena, "%s,%s", config->value[index], text);
        return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
    }
    if (config->given[index])
        return hapt_fail(HAPT_ERR_USAGE, "give it once", "option --%s is given twice", table[index].name);
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
    const int index = find(name, length);
    if (index < 0 || !accepts_command(&table[index], config->command)) {
        const char *plain = hapt_arena_printf(config->arena, "%.*s", (int)length, name);
        return plain ? unknown_option(plain, config->command) : HAPT_ERR_MEMORY;
    }
    if (equals) return set_value(config, index, equals + 1);
    bool truth;
    const bool has_next = *at + 1 < argc && strncmp(argv[*at + 1], "--", 2) != 0;
    if (table[index].type == HAPT_OPTION_BOOL && !(has_next && parse_bool(argv[*at + 1], &truth)))
        return set_value(config, index, "yes");
    /* A choice with a "yes" can be used without a value. */
    if (table[index].type == HAPT_OPTION_CHOICE && !has_next && is_choice(table[index].choices, "yes"))
        return set_value(config, index, "yes");
    if (!has_next) return hapt_fail(HAPT_ERR_USAGE, table[index].help, "option --%s needs a value", table[index].name);
    return set_value(config, index, argv[++*at]);
}

static enum hapt_status find_command(const char *word, enum hapt_command *command)
{
    for (int i = 1; i < HAPT_COMMAND_COUNT; i++)
        if (!strcmp(word, command_table[i].name)) {
            *command = (enum hapt_command)i;
            return HAPT_OK;
        }
    return hapt_fail(HAPT_ERR_USAGE, "see hapt --help", "unknown command \"%s\"", word);
}

enum hapt_status hapt_config_parse(int argc, char **argv, struct hapt_arena *arena, struct hapt_config **result)
{
    struct hapt_config *config;
    HAPT_NEW(config, arena, 1);
    config->arena = arena;
    for (int i = 0; i < OPTION_COUNT; i++) config->value[i] = table[i].value;
    int at = 1;
    if (argc > 1 && argv[1][0] != '-') HAPT_TRY(find_command(argv[at++], &config->command));
    for (; at < argc; at++) {
        if (!strcmp(argv[at], "-h")) {
            HAPT_TRY(set_value(config, find("help", 4), "yes"));
        } else if (!strncmp(argv[at], "--", 2)) {
            HAPT_TRY(parse_option(config, argc, argv, &at));
        } else {
            const bool takes_words = config->command == HAPT_COMMAND_MODEL || config->command == HAPT_COMMAND_IMPORT ||
                                     config->command == HAPT_COMMAND_DATA || config->command == HAPT_COMMAND_PLAN ||
                                     config->command == HAPT_COMMAND_CHECK || config->command == HAPT_COMMAND_CLUSTER;
            if (!takes_words)
                return hapt_fail(HAPT_ERR_USAGE, "options are --key value", "unexpected word \"%s\"", argv[at]);
            if (config->word_count == MAX_WORDS) return hapt_fail(HAPT_ERR_USAGE, NULL, "too many arguments");
            config->word[config->word_count++] = argv[at];
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
    return hapt_config_bool(config, "help");
}

bool hapt_config_wants_version(const struct hapt_config *config)
{
    return hapt_config_bool(config, "version");
}

static void print_options(enum hapt_command command, FILE *stream)
{
    for (int i = 0; i < OPTION_COUNT; i++) {
        const struct option *option = &table[i];
        if (!accepts_command(option, command)) continue;
        static const char *const kind[] = {"TEXT", "PATH", "N", "X", "yes|no", "", "TIME", "KEY=VALUE,..."};
        char left[96];
        snprintf(left, sizeof left, "--%s %s%s%s", option->name, kind[option->type],
                 *kind[option->type] && option->choices ? "|" : "", option->choices ? option->choices : "");
        fprintf(stream, "  %-34s %s", left, option->help);
        if (option->value) fprintf(stream, " [%s]", option->value);
        fputc('\n', stream);
    }
}

void hapt_config_print_help(const struct hapt_config *config, FILE *stream)
{
    const enum hapt_command command = config->command;
    if (command != HAPT_COMMAND_JOB) {
        fprintf(stream, "usage: hapt %s %s [options]\n%s\n\noptions [default]:\n", command_table[command].name,
                command_table[command].usage, command_table[command].what);
        print_options(command, stream);
        return;
    }
    fprintf(stream,
            "hapt plans and trains a neural network on every accelerator of a heterogeneous cluster.\n\n"
            "usage: hapt %s [options]      %s (under mpirun, srun or alone)\n",
            command_table[0].usage, command_table[0].what);
    for (int i = 1; i < HAPT_COMMAND_COUNT; i++)
        fprintf(stream, "       hapt %-10s %-52s %s\n", command_table[i].name, command_table[i].usage,
                command_table[i].what);
    fprintf(stream, "\noptions of the whole job [default]:\n");
    print_options(command, stream);
    fprintf(stream,
            "\n`hapt COMMAND --help` explains a command and its files.\n"
            "exit codes: 0 fine, 2 usage, 3 bad input, 4 no feasible plan, 5 memory, 6 input/output,\n"
            "            7 communication, 8 internal (also: --replica-check), 9 stopped early with a checkpoint\n");
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

static int index_of(const char *name)
{
    const int index = find(name, strlen(name));
    HAPT_ASSERT(index >= 0);
    return index;
}

const char *hapt_config_text(const struct hapt_config *config, const char *name)
{
    return config->value[index_of(name)];
}

double hapt_config_real(const struct hapt_config *config, const char *name)
{
    const int index = index_of(name);
    double value = 0;
    HAPT_ASSERT(config->value[index] && parse_number(&table[index], config->value[index], &value));
    return value;
}

int64_t hapt_config_int(const struct hapt_config *config, const char *name)
{
    return (int64_t)hapt_config_real(config, name);
}

bool hapt_config_bool(const struct hapt_config *config, const char *name)
{
    bool value = false;
    HAPT_ASSERT(parse_bool(config->value[index_of(name)], &value));
    return value;
}

bool hapt_config_given(const struct hapt_config *config, const char *name)
{
    return config->given[index_of(name)];
}

const char *hapt_config_given_beside(const struct hapt_config *config, const char *const *allowed)
{
    for (int i = 0; i < OPTION_COUNT; i++) {
        bool listed = !config->given[i];
        for (const char *const *name = allowed; *name; name++) listed |= strcmp(table[i].name, *name) == 0;
        if (!listed) return table[i].name;
    }
    return NULL;
}

enum hapt_status hapt_config_default(struct hapt_config *config, const char *name, const char *value)
{
    const int index = find(name, strlen(name));
    char buffer[200];
    if (index < 0 || !table[index].training)
        return hapt_fail(HAPT_ERR_INPUT, "the file was written by another version", "unknown training option \"%s\"",
                         name);
    const char *wrong = value_error(&table[index], value, buffer);
    if (wrong) return hapt_fail(HAPT_ERR_INPUT, wrong, "bad value \"%s\" of training option %s", value, name);
    if (config->given[index]) return HAPT_OK;
    config->value[index] = hapt_arena_strdup(config->arena, value);
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_preset(struct hapt_config *config, const char *name, const char *value)
{
    const int index = index_of(name);
    char buffer[200];
    HAPT_ASSERT(!value_error(&table[index], value, buffer));
    if (config->given[index]) return HAPT_OK;
    config->value[index] = hapt_arena_strdup(config->arena, value);
    config->preset[index] = true;
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_decide(struct hapt_config *config, const char *name, const char *value)
{
    const int index = index_of(name);
    char buffer[200];
    HAPT_ASSERT(!value_error(&table[index], value, buffer));
    config->value[index] = hapt_arena_strdup(config->arena, value);
    return config->value[index] ? HAPT_OK : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_config_give(struct hapt_config *config, const char *name, const char *value, const char *source)
{
    const int index = index_of(name);
    char buffer[200];
    const char *wrong = value_error(&table[index], value, buffer);
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
    for (int i = 0; i < OPTION_COUNT; i++)
        if (table[i].training && config->value[i]) visit(context, table[i].name, config->value[i]);
}

void hapt_config_visit_model(const struct hapt_config *config, hapt_config_visitor *visit, void *context)
{
    for (int i = 0; i < OPTION_COUNT; i++)
        if (config->given[i] && strspn(table[i].commands, "mie") == strlen(table[i].commands))
            visit(context, table[i].name, config->value[i]);
}
