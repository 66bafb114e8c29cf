/*
 * Help made from the option table: short and long texts, manual pages, completion for bash. All text is at most
 * HAPT_HELP_WIDTH columns wide. The functions need no MPI and cannot fail; the caller checks the stream.
 */
#ifndef HAPT_HELP_H
#define HAPT_HELP_H

#include <stdio.h>

#include "hapt/config.h"

enum { HAPT_HELP_WIDTH = 90 };

/* The command's usage and its most used options, in sections; at most 60 lines. HAPT_COMMAND_JOB: also the list of
 * commands and the exit codes. */
void hapt_help_print_short(enum hapt_command command, FILE *stream);
/* Every option with its whole explanation, then `explain` (hapt_command_explanation; NULL: nothing). */
void hapt_help_print_all(enum hapt_command command, const char *explain, FILE *stream);
/* One option: its explanation, and the commands that take it. `name` without dashes. */
bool hapt_help_print_option(const char *name, FILE *stream);

/* The manual page of the command in roff (man 7): hapt.1 for HAPT_COMMAND_JOB, else hapt-NAME.1. */
void hapt_help_print_man(enum hapt_command command, const char *explain, FILE *stream);
/* A completion script for bash: commands, options, choices, files. `models`: the words that `hapt model` takes, with
 * spaces between. */
void hapt_help_print_bash(const char *models, FILE *stream);

/* The command of that name ("job": the whole job). Fails with HAPT_ERR_USAGE; the hint names the nearest command or
 * option. */
enum hapt_status hapt_help_find(const char *word, enum hapt_command *command);

#endif
