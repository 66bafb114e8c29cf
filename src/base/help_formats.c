/* The option table as manual pages (roff) and as a completion script for bash. */
#include <string.h>

#include "config_private.h"
#include "hapt/help.h"
#include "hapt/version.h"

/* Roff reads backslashes, and periods and quotes at the start of a line, as requests. */
static void put_roff(const char *text, size_t length, FILE *stream)
{
    if (length > 0 && (text[0] == '.' || text[0] == '\'')) fputs("\\&", stream);
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '\\')
            fputs("\\e", stream);
        else if (text[i] == '-')
            fputs("\\-", stream);
        else
            fputc(text[i], stream);
        if (text[i] == '\n' && i + 1 < length && (text[i + 1] == '.' || text[i + 1] == '\'')) fputs("\\&", stream);
    }
}

static void put_roff_text(const char *text, FILE *stream)
{
    put_roff(text, strlen(text), stream);
}

static void put_roff_option(const struct option *option, FILE *stream)
{
    const char *word = options_placeholder(option);
    fputs(".TP\n.BI \\-\\-", stream);
    put_roff_text(options_name(option), stream);
    fprintf(stream, " \" %s%s", word, *word && option->choices ? "|" : "");
    if (option->choices) put_roff_text(option->choices, stream);
    fputs("\"\n", stream);
    put_roff_text(option->brief, stream);
    if (option->value) fprintf(stream, " [%s]", option->value);
    fputc('\n', stream);
    if (!option->more) return;
    fputs(".br\n", stream);
    put_roff_text(option->more, stream);
    fputc('\n', stream);
}

void hapt_help_print_man(enum hapt_command command, const char *explain, FILE *stream)
{
    const struct command *own = options_command(command);
    const char *gap = *own->name ? "-" : "";
    fprintf(stream, ".TH HAPT%s%s 1 \"\" \"hapt %s\" \"User Commands\"\n.SH NAME\nhapt%s%s \\- ", gap, own->name,
            HAPT_VERSION, *own->name ? "\\-" : "", own->name);
    put_roff_text(own->what, stream);
    fprintf(stream, "\n.SH SYNOPSIS\n.B hapt%s%s\n", *own->name ? " " : "", own->name);
    put_roff_text(own->usage, stream);
    fputs(" [options]\n", stream);
    if (command == HAPT_COMMAND_JOB) {
        fputs(".SH COMMANDS\n", stream);
        for (int c = 1; c < HAPT_COMMAND_COUNT; c++) {
            const struct command *other = options_command((enum hapt_command)c);
            fprintf(stream, ".TP\n.BR hapt\\-%s (1)\n", other->name);
            put_roff_text(other->what, stream);
            fputc('\n', stream);
        }
    }
    fputs(".SH OPTIONS\nThe default stands in brackets.\n", stream);
    const char *section = NULL;
    for (int i = 0; i < options_count(); i++) {
        const struct option *option = options_at(i);
        if (!*option->name) section = option->brief;
        if (!options_accepted(option, command)) continue;
        if (section) fprintf(stream, ".SS %s\n", section);
        section = NULL;
        put_roff_option(option, stream);
    }
    if (explain) {
        fputs(".SH DESCRIPTION\n.nf\n", stream);
        put_roff_text(explain, stream);
        fputs("\n.fi\n", stream);
    }
    fputs(".SH EXIT STATUS\n" OPTIONS_EXIT_CODES "\n", stream);
    if (*own->name) fputs(".SH SEE ALSO\n.BR hapt (1)\n", stream);
}

static void put_bash_words(const char *choices, FILE *stream)
{
    for (; *choices; choices++) fputc(*choices == '|' ? ' ' : *choices, stream);
}

/* One `case` of values for every option that has choices; options that take files complete to files. */
static void put_bash_values(FILE *stream)
{
    for (int i = 0; i < options_count(); i++) {
        const struct option *option = options_at(i);
        if (!*option->name) continue;
        if (option->type == HAPT_OPTION_PATH) {
            fprintf(stream, "    --%s) COMPREPLY=($(compgen -f -- \"$word\")); return ;;\n", options_name(option));
        } else if (option->type == HAPT_OPTION_CHOICE && strcmp(option->name, "help") != 0) {
            fprintf(stream, "    --%s) COMPREPLY=($(compgen -W \"", options_name(option));
            put_bash_words(option->choices, stream);
            fputs("\" -- \"$word\")); return ;;\n", stream);
        } else if (option->type != HAPT_OPTION_BOOL && option->type != HAPT_OPTION_CHOICE) {
            fprintf(stream, "    --%s) return ;;\n", options_name(option));
        }
    }
}

void hapt_help_print_bash(const char *models, FILE *stream)
{
    fputs("# bash completion for hapt, made by `hapt help --as bash`\n"
          "_hapt() {\n"
          "    local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD - 1]} command=${COMP_WORDS[1]} "
          "options\n"
          "    COMPREPLY=()\n"
          "    case $before in\n",
          stream);
    put_bash_values(stream);
    fputs("    esac\n    case $command in\n", stream);
    for (int c = HAPT_COMMAND_COUNT - 1; c >= 0; c--) {
        fprintf(stream, "    %s) options=\"",
                c == HAPT_COMMAND_JOB ? "*" : options_command((enum hapt_command)c)->name);
        const char *gap = "";
        for (int i = 0; i < options_count(); i++) {
            if (!*options_at(i)->name || !options_accepted(options_at(i), (enum hapt_command)c)) continue;
            fprintf(stream, "%s--%s", gap, options_name(options_at(i)));
            gap = " ";
        }
        fputs("\" ;;\n", stream);
    }
    fputs("    esac\n    if [[ $word == -* ]]; then\n        COMPREPLY=($(compgen -W \"$options\" -- \"$word\"))\n"
          "    elif ((COMP_CWORD == 1)) || [[ $command == help ]]; then\n        COMPREPLY=($(compgen -W \"",
          stream);
    for (int c = 1; c < HAPT_COMMAND_COUNT; c++)
        fprintf(stream, "%s%s", c > 1 ? " " : "", options_command((enum hapt_command)c)->name);
    fprintf(stream,
            "\" -- \"$word\"))\n    elif [[ $command == model ]]; then\n        COMPREPLY=($(compgen -W \"%s\" -- "
            "\"$word\"))\n    elif [[ $command == cluster ]]; then\n        COMPREPLY=($(compgen -W init -- \"$word\"))"
            "\n    else\n        COMPREPLY=($(compgen -f -- \"$word\"))\n    fi\n}\n"
            "complete -o filenames -F _hapt hapt\n",
            models);
}
