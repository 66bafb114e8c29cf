/* Help from the option table and the commands' explanations, wrapped to the width of the help. */
#include "hapt/help.h"

#include <string.h>

#include "config_private.h"

enum {
    LEFT_WIDTH = 28,   /* "  --name KIND" of the short help */
    LONGEST_HANG = 58, /* entries with a longer left column continue at a small indent */
    MORE_INDENT = 6,   /* of an option's further explanation */
};

static const char exit_codes[] = "exit codes: " OPTIONS_EXIT_CODES;

/* Words that are wrapped at HAPT_HELP_WIDTH and continue at `hang`. */
struct flow {
    FILE *stream;
    int column, hang;
};

static void end_line(struct flow *flow)
{
    if (flow->column > 0) fputc('\n', flow->stream);
    flow->column = 0;
}

static void put_word(struct flow *flow, int gap, const char *word, int length)
{
    if (flow->column > flow->hang && flow->column + gap + length > HAPT_HELP_WIDTH) {
        end_line(flow);
        gap = 0;
    }
    if (flow->column < flow->hang) gap = flow->hang - flow->column;
    fprintf(flow->stream, "%*s%.*s", gap, "", length, word);
    flow->column += gap + length;
}

/* The words of text[0, length) after what the line has; the spaces between them are kept within a line. */
static void put_words(struct flow *flow, const char *text, size_t length)
{
    size_t at = 0;
    while (at < length) {
        int gap = 0, word = 0;
        while (at < length && text[at] == ' ') {
            gap++;
            at++;
        }
        while (at + (size_t)word < length && text[at + (size_t)word] != ' ') word++;
        if (word > 0) put_word(flow, gap > 0 ? gap : flow->column > flow->hang, text + at, word);
        at += (size_t)word;
    }
}

static void put_text(struct flow *flow, const char *text)
{
    put_words(flow, text, strlen(text));
}

static void put_line(FILE *stream, int indent, const char *text)
{
    struct flow flow = {.stream = stream, .hang = indent};
    put_text(&flow, text);
    end_line(&flow);
}

/* Column of the text after an entry's name: the first run of two spaces; 0: there is none. */
static int text_column(const char *line, int indent, int length)
{
    for (int i = indent; i + 2 < length; i++) {
        if (line[i] != ' ' || line[i + 1] != ' ') continue;
        while (i < length && line[i] == ' ') i++;
        return i < length ? i : 0;
    }
    return 0;
}

/*
 * Explanations are paragraphs and tables. A paragraph's lines begin at column 0; one that ends with a period or a colon
 * ends the paragraph. A table's entry is indented: its name, two spaces or more, its text; lines that begin at the
 * text's column continue it.
 */
static void put_explanation(FILE *stream, const char *text)
{
    struct flow flow = {.stream = stream};
    int entry_indent = -1, entry_column = 0; /* of the open entry; entry_indent 0: a paragraph, -1: nothing is open */
    while (*text) {
        const int length = (int)strcspn(text, "\n"), indent = (int)strspn(text, " ");
        const char last = length > 0 ? text[length - 1] : 0;
        if (length == 0 || indent == length) {
            end_line(&flow);
            fputc('\n', stream);
            entry_indent = -1;
        } else if ((indent == 0 && entry_indent == 0) || (entry_indent > 0 && indent == entry_column)) {
            put_words(&flow, text + indent, (size_t)(length - indent));
        } else if (entry_indent > 0 && entry_column == 0 && indent > entry_indent) { /* the name fills its line */
            end_line(&flow);
            entry_column = flow.hang = indent;
            put_words(&flow, text + indent, (size_t)(length - indent));
        } else {
            end_line(&flow);
            const int column = indent > 0 ? text_column(text, indent, length) : 0;
            entry_indent = indent;
            entry_column = column;
            if (column > 0) {
                int name = column;
                while (text[name - 1] == ' ') name--;
                flow.column = fprintf(stream, "%.*s", name, text);
                flow.hang = column > LONGEST_HANG ? indent + MORE_INDENT : column;
                if (column > LONGEST_HANG && length > HAPT_HELP_WIDTH) end_line(&flow);
                put_words(&flow, text + name, (size_t)(length - name));
            } else {
                flow.hang = indent;
                put_words(&flow, text + indent, (size_t)(length - indent));
            }
        }
        if (entry_indent == 0 && (last == '.' || last == ':')) entry_indent = -1;
        text += length;
        if (*text == '\n') text++;
    }
    end_line(&flow);
}

static bool defaults_to_no(const struct option *option)
{
    return option->type == HAPT_OPTION_BOOL && !strcmp(option->value, "no");
}

/* "--name KIND"; long lists of choices are replaced by KIND if `brief`. */
static void left_part(const struct option *option, bool brief, char left[OPTIONS_MAX_CHOICE])
{
    const char *name = options_name(option), *word = options_placeholder(option), *choices = option->choices;
    if (defaults_to_no(option) && brief)
        snprintf(left, OPTIONS_MAX_CHOICE, "--%s", name);
    else
        snprintf(left, OPTIONS_MAX_CHOICE, "--%s %s%s%s", name, word, *word && choices ? "|" : "",
                 choices ? choices : "");
    if (brief && option->type == HAPT_OPTION_CHOICE && strlen(left) > LEFT_WIDTH - 3)
        snprintf(left, OPTIONS_MAX_CHOICE, "--%s KIND", name);
}

/* The short help leaves out zeros: the brief text says what they mean. */
static void put_default(struct flow *flow, const struct option *option, bool brief)
{
    char text[64];
    if (!option->value || defaults_to_no(option) || (brief && !strcmp(option->value, "0"))) return;
    snprintf(text, sizeof text, "[%s]", option->value);
    put_text(flow, text);
}

static void print_brief(const struct option *option, FILE *stream)
{
    char left[OPTIONS_MAX_CHOICE];
    left_part(option, true, left);
    struct flow flow = {.stream = stream};
    flow.column = fprintf(stream, "  %-*s ", LEFT_WIDTH, left);
    flow.hang = LEFT_WIDTH + 3;
    put_text(&flow, option->brief);
    put_default(&flow, option, true);
    end_line(&flow);
}

static void print_whole(const struct option *option, FILE *stream)
{
    char left[OPTIONS_MAX_CHOICE];
    left_part(option, false, left);
    struct flow flow = {.stream = stream, .hang = 4};
    flow.column = fprintf(stream, "  ");
    for (char *part = left; *part;) { /* a long list of choices is broken after a '|' */
        size_t length = strlen(part);
        if (flow.column + (int)length > HAPT_HELP_WIDTH) {
            size_t room = (size_t)(HAPT_HELP_WIDTH - flow.column);
            while (room > 1 && part[room - 1] != '|') room--;
            if (room > 1) length = room;
        }
        fprintf(stream, "%.*s", (int)length, part);
        flow.column += (int)length;
        part += length;
        if (*part) {
            end_line(&flow);
            flow.column = fprintf(stream, "    ");
        }
    }
    if (flow.column > LEFT_WIDTH + 2)
        end_line(&flow);
    else
        flow.column += fprintf(stream, "%*s", LEFT_WIDTH + 2 - flow.column, "");
    flow.hang = LEFT_WIDTH + 3;
    put_text(&flow, option->brief);
    put_default(&flow, option, false);
    end_line(&flow);
    if (option->more) put_line(stream, MORE_INDENT, option->more);
}

/* The options of a command in their sections; sections without options are left out. */
static void print_options(enum hapt_command command, bool all, FILE *stream)
{
    const char *section = NULL;
    for (int i = 0; i < options_count(); i++) {
        const struct option *option = options_at(i);
        if (!*option->name) section = option->brief;
        if (!strchr(all ? option->commands : option->short_help, options_command(command)->letter)) continue;
        if (section) fprintf(stream, "\n%s:\n", section);
        section = NULL;
        all ? print_whole(option, stream) : print_brief(option, stream);
    }
}

static void print_usage(enum hapt_command command, FILE *stream)
{
    const struct command *own = options_command(command);
    struct flow flow = {.stream = stream, .hang = 12};
    flow.column = fprintf(stream, "usage: hapt");
    if (*own->name) put_text(&flow, own->name);
    put_text(&flow, own->usage);
    put_text(&flow, "[options]");
    if (command == HAPT_COMMAND_JOB) put_text(&flow, "(under mpirun, srun or alone)");
    end_line(&flow);
    fprintf(stream, "%s\n", own->what);
}

static void print_commands(FILE *stream)
{
    fprintf(stream, "\ncommands:\n");
    for (int c = 1; c < HAPT_COMMAND_COUNT; c++) {
        const struct command *command = options_command((enum hapt_command)c);
        fprintf(stream, "  hapt %-10s %s\n", command->name, command->what);
    }
}

static int count_options(enum hapt_command command, bool all)
{
    int count = 0;
    for (int i = 0; i < options_count(); i++) {
        const struct option *option = options_at(i);
        count += *option->name && strchr(all ? option->commands : option->short_help, options_command(command)->letter);
    }
    return count;
}

void hapt_help_print_short(enum hapt_command command, FILE *stream)
{
    const char *name = command == HAPT_COMMAND_JOB ? "job" : options_command(command)->name;
    if (command == HAPT_COMMAND_JOB)
        fprintf(stream, "hapt plans and trains a neural network on every accelerator of a heterogeneous cluster.\n\n");
    print_usage(command, stream);
    if (command == HAPT_COMMAND_JOB) print_commands(stream);
    print_options(command, false, stream);
    fputc('\n', stream);
    const int hidden = count_options(command, true) - count_options(command, false);
    struct flow flow = {.stream = stream};
    char text[160];
    if (command == HAPT_COMMAND_JOB) put_line(stream, 0, exit_codes);
    if (hidden > 0)
        snprintf(text, sizeof text, "[default]. hapt help %s: %d more options, and all of it in detail.", name, hidden);
    else
        snprintf(text, sizeof text, "[default]. hapt help %s explains all of it in detail.", name);
    put_text(&flow, text);
    if (command == HAPT_COMMAND_JOB)
        put_text(&flow, "hapt help COMMAND or OPTION explains one. hapt --version prints the version.");
    end_line(&flow);
}

void hapt_help_print_all(enum hapt_command command, const char *explain, FILE *stream)
{
    print_usage(command, stream);
    if (command == HAPT_COMMAND_JOB) print_commands(stream);
    print_options(command, true, stream);
    if (command == HAPT_COMMAND_JOB) {
        fputc('\n', stream);
        put_line(stream, 0, exit_codes);
    }
    if (!explain) return;
    fputc('\n', stream);
    put_explanation(stream, explain);
}

bool hapt_help_print_option(const char *name, FILE *stream)
{
    const int index = options_find(name, strlen(name));
    if (index < 0) return false;
    print_whole(options_at(index), stream);
    struct flow flow = {.stream = stream, .hang = MORE_INDENT};
    put_text(&flow, "commands:");
    bool first = true;
    for (int c = 0; c < HAPT_COMMAND_COUNT; c++) {
        if (!options_accepted(options_at(index), (enum hapt_command)c)) continue;
        char text[32];
        const char *word = options_command((enum hapt_command)c)->name;
        snprintf(text, sizeof text, "%shapt%s%s", first ? "" : ", ", *word ? " " : "", word);
        put_word(&flow, first, text, (int)strlen(text));
        first = false;
    }
    end_line(&flow);
    return true;
}

enum hapt_status hapt_help_find(const char *word, enum hapt_command *command)
{
    if (!strcmp(word, "job")) {
        *command = HAPT_COMMAND_JOB;
        return HAPT_OK;
    }
    if (options_find_command(word, command)) return HAPT_OK;
    char hint[120];
    const char *near_command = options_nearest_command(word), *near_option = options_nearest(word, HAPT_COMMAND_COUNT);
    if (near_command || near_option)
        snprintf(hint, sizeof hint, "did you mean hapt help %s?", near_command ? near_command : near_option);
    return hapt_fail(HAPT_ERR_USAGE, near_command || near_option ? hint : "hapt --help lists the commands",
                     "hapt has no command or option \"%s\"", word);
}
