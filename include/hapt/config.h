/*
 * The option table: every command's options with type, default, units, limits and help text. Help, checks and defaults
 * derive from it (src/base/options.def, hapt/help.h).
 */
#ifndef HAPT_CONFIG_H
#define HAPT_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "hapt/arena.h"
#include "hapt/status.h"

enum hapt_command {
    HAPT_COMMAND_JOB, /* no command word: the whole job */
    HAPT_COMMAND_TOPOLOGY,
    HAPT_COMMAND_PROFILE,
    HAPT_COMMAND_PLAN,
    HAPT_COMMAND_SPMD,
    HAPT_COMMAND_SIMULATE,
    HAPT_COMMAND_TRAIN,
    HAPT_COMMAND_EVALUATE,
    HAPT_COMMAND_GENERATE,
    HAPT_COMMAND_MODEL,
    HAPT_COMMAND_IMPORT,
    HAPT_COMMAND_DATA,
    HAPT_COMMAND_EXPORT,
    HAPT_COMMAND_REPORT,
    HAPT_COMMAND_CHECK,
    HAPT_COMMAND_DOCTOR,
    HAPT_COMMAND_HELP,
    HAPT_COMMAND_CLUSTER,
    HAPT_COMMAND_OPS,
    HAPT_COMMAND_COUNT
};

enum hapt_option_type {
    HAPT_OPTION_TEXT,
    HAPT_OPTION_PATH,
    HAPT_OPTION_INT, /* or the word in `choices`: -1 */
    HAPT_OPTION_REAL,
    HAPT_OPTION_BOOL,   /* yes/no; the option without a value means yes */
    HAPT_OPTION_CHOICE, /* one of `choices`, separated by '|' */
    HAPT_OPTION_TIME,   /* s: "50 us", "1.5" */
    HAPT_OPTION_LIST    /* key=value, separated by commas; given again, it is continued */
};

struct hapt_config;

/* Parses the command line: a command word, then `--key value`, `--key=value` or, for yes/no options, `--key`. Words
 * without dashes are positional. Unknown options, options of other commands and bad values fail with HAPT_ERR_USAGE;
 * the hint names the nearest spelling. */
enum hapt_status hapt_config_parse(int argc, char **argv, struct hapt_arena *arena, struct hapt_config **config);

enum hapt_command hapt_config_command(const struct hapt_config *config);
bool hapt_config_wants_help(const struct hapt_config *config);
bool hapt_config_wants_all_help(const struct hapt_config *config);
bool hapt_config_wants_version(const struct hapt_config *config);

/* Positional words after the command, e.g. "gpt" in `hapt model gpt`. */
int hapt_config_word_count(const struct hapt_config *config);
const char *hapt_config_word(const struct hapt_config *config, int index);

/* Values. Asking for a name that is not in the table is a bug. TEXT, PATH and CHOICE without a default give NULL. */
const char *hapt_config_text(const struct hapt_config *config, const char *name);
int64_t hapt_config_int(const struct hapt_config *config, const char *name);
double hapt_config_real(const struct hapt_config *config, const char *name); /* also time */
bool hapt_config_bool(const struct hapt_config *config, const char *name);
/* True if the user gave the option on the command line. */
bool hapt_config_given(const struct hapt_config *config, const char *name);
/* The first option given that is not in `allowed` (NULL-terminated); NULL: none. */
const char *hapt_config_given_beside(const struct hapt_config *config, const char *const *allowed);

/* Replaces a default (from a model file's /training or a checkpoint's settings); a value from the command line stays.
 * Fails with HAPT_ERR_INPUT for unknown names and bad values. */
enum hapt_status hapt_config_default(struct hapt_config *config, const char *name, const char *value);

/* The same for any option, from a preset inside the program (a named model); the value counts as chosen. */
enum hapt_status hapt_config_preset(struct hapt_config *config, const char *name, const char *value);
/* True for a value from the command line or a preset. */
bool hapt_config_chosen(const struct hapt_config *config, const char *name);

/* Replaces the value of an option, also of a given one, by the decision of a phase. A bad value is a bug: the function
 * aborts. */
enum hapt_status hapt_config_decide(struct hapt_config *config, const char *name, const char *value);
/* Sets an option as the command line would: HAPT_ERR_USAGE for a bad value, or if it is given with another value.
 * `source` names where the value stands, for the message. */
enum hapt_status hapt_config_give(struct hapt_config *config, const char *name, const char *value, const char *source);

/* Visits every training option (these are saved in model files, run files and checkpoints). */
typedef void hapt_config_visitor(void *context, const char *name, const char *value);
void hapt_config_visit_training(const struct hapt_config *config, hapt_config_visitor *visit, void *context);
/* Visits every given option that only `hapt model`, `hapt import` and `hapt export` accept. */
void hapt_config_visit_model(const struct hapt_config *config, hapt_config_visitor *visit, void *context);

/* Numbers with units; also used by the cluster file. Return false for invalid text. */
bool hapt_units_parse_bytes(const char *text, double *bytes);
bool hapt_units_parse_bandwidth(const char *text, double *bytes_per_s);
bool hapt_units_parse_time(const char *text, double *seconds);
bool hapt_units_parse_flops(const char *text, double *flop_per_s);
/* "1.50 GB", "25.0 MB/s", "1.20 ms", "312 TFLOP/s" into `buffer`; returns it. */
const char *hapt_units_bytes(double bytes, char buffer[32]);
const char *hapt_units_bandwidth(double bytes_per_s, char buffer[32]);
const char *hapt_units_bits(double bytes_per_s, char buffer[32]); /* "5.00 Gbit/s" */
const char *hapt_units_time(double seconds, char buffer[32]);
const char *hapt_units_flops(double flop_per_s, char buffer[32]);

#endif
