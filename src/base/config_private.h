/* The option and command tables, for the files that parse, check and print them. */
#ifndef HAPT_CONFIG_PRIVATE_H
#define HAPT_CONFIG_PRIVATE_H

#include "hapt/config.h"

/* A row of options.def. A row with an empty name begins a section; `brief` is its title. */
struct option {
    const char *name;
    enum hapt_option_type type;
    const char *value; /* default; NULL: none */
    double low, high;
    const char *choices;               /* separated by '|'; NULL: none */
    const char *commands, *short_help; /* command letters */
    bool training;
    const char *brief, *more; /* more: NULL if brief says it all */
};

struct command {
    char letter;
    const char *name, *usage, *what;
    bool takes_words; /* positional arguments */
};

enum { OPTIONS_MAX_CHOICE = 200 };

#define OPTIONS_EXIT_CODES                                                                          \
    "0 fine, 2 usage, 3 bad input, 4 no feasible plan, 5 memory, 6 input/output, 7 communication, " \
    "8 internal (also: --replica-check), 9 stopped early with a checkpoint"

int options_count(void);
const struct option *options_at(int index);
const struct command *options_command(enum hapt_command command);
bool options_accepted(const struct option *option, enum hapt_command command);
/* Index of an option by any of its names; -1: unknown. */
int options_find(const char *name, size_t length);
/* The name that messages and help print. */
const char *options_name(const struct option *option);
/* The word that stands for the value: "PATH", "N"; empty for a choice. */
const char *options_placeholder(const struct option *option);
/* Nearest name of an option of the command (HAPT_COMMAND_COUNT: of any); NULL: none is near. */
const char *options_nearest(const char *name, enum hapt_command command);
/* False if no command but the job, which has no word, is called so. */
bool options_find_command(const char *word, enum hapt_command *command);
/* Nearest command word; NULL: none is near. */
const char *options_nearest_command(const char *word);

bool options_is_choice(const char *choices, const char *text);
bool options_parse_bool(const char *text, bool *value);
bool options_parse_number(const struct option *option, const char *text, double *value);
/* Why the value is invalid, as a hint; NULL: it is valid. */
const char *options_value_error(const struct option *option, const char *text, char buffer[OPTIONS_MAX_CHOICE]);

#endif
