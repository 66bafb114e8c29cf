/*
 * Reads what `sinfo` prints about nodes. The first line names the columns, and their order is free:
 *
 *   HOSTNAMES STATE CPUS MEMORY GRES AVAIL_FEATURES
 *   gpu01 idle 64 515000 gpu:a100:4(S:0-1) ib,a100_80gb
 */
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "database.h"
#include "inventory_private.h"

static const char command[] = "print the file with: sinfo --Node --format=\"%n %T %c %m %G %f\"";

enum column { HOST, STATE, CPUS, MEMORY, GRES, FEATURES, COLUMNS };

enum { MAX_WORDS = 32, MAX_COUNT = 1024 };

struct table {
    const char *path;
    int line;        /* number of the current line */
    int at[COLUMNS]; /* position of each column; -1: there is none */
    int words;       /* words of the header */
    json_t *seen;    /* names of nodes: a node is in several partitions */
    struct hapt_inventory *inventory;
    int away;            /* nodes that are down or drained */
    char away_names[96]; /* as many as have room */
    int away_more;       /* the others */
    int without, slices; /* nodes without a GPU, nodes with MIG slices */
    int cpus;            /* of nodes without GPUs, the least */
    double cpu_memory;
};

/* Splits at blanks and '|'; returns the number of words. */
static int split(char *line, char *word[MAX_WORDS])
{
    int count = 0;
    char *state, *at;
    for (at = strtok_r(line, " \t|", &state); at && count < MAX_WORDS; at = strtok_r(NULL, " \t|", &state))
        word[count++] = at;
    return count;
}

static enum hapt_status read_header(struct table *table, char *line)
{
    static const char *const title[COLUMNS][2] = {{"HOSTNAMES", "NODELIST"}, {"STATE", "STATE"},
                                                  {"CPUS", "CPUS"},          {"MEMORY", "MEMORY"},
                                                  {"GRES", "GRES"},          {"AVAIL_FEATURES", "FEATURES"}};
    char *word[MAX_WORDS];
    table->words = split(line, word);
    for (int c = 0; c < COLUMNS; c++) {
        table->at[c] = -1;
        for (int w = 0; w < table->words; w++)
            if (strcasecmp(word[w], title[c][0]) == 0 || strcasecmp(word[w], title[c][1]) == 0) table->at[c] = w;
    }
    if (table->at[HOST] >= 0 && table->at[GRES] >= 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, command, "%s: line %d: the header has no column %s", table->path, table->line,
                     table->at[HOST] < 0 ? "HOSTNAMES" : "GRES");
}

/* Can no job run on such a node? Suffixes such as '~' (powered down until it is needed) are no reason; '*': it does not
 * respond. */
static bool is_away(const char *state)
{
    static const char *const bad[] = {"down", "drain", "drng", "fail", "error", "maint", "unk", "inval", "future"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        if (strncasecmp(state, bad[i], strlen(bad[i])) == 0) return true;
    return strchr(state, '*') != NULL;
}

/* A MIG slice: "1g.5gb", "a100_1g.5gb". */
static bool is_slice(const char *type)
{
    for (const char *g = strstr(type, "g."); g; g = strstr(g + 1, "g.")) {
        if (g > type && strspn(g - 1, "0123456789") >= 1 && strspn(g + 2, "0123456789") >= 1) return true;
    }
    return false;
}

/* Both name one model, perhaps with different memory: A100-40GB and A100-80GB. */
static bool same_model(const struct hapt_device_spec *a, const struct hapt_device_spec *b)
{
    const size_t length = strcspn(a->name, "-");
    return length == strcspn(b->name, "-") && strncmp(a->name, b->name, length) == 0;
}

/* The device of a type. A feature of the node may name it instead, or tell its memory. */
static enum hapt_status find_device(struct table *table, const char *type, const char *features,
                                    const struct hapt_device_spec **spec)
{
    char hint[200], list[512], both[128], *state;
    const char *model = type;
    bool several = false;
    *spec = *type ? hapt_device_spec_of_word(type, &several) : NULL;
    snprintf(list, sizeof list, "%s", features);
    for (char *word = strtok_r(list, ",&", &state); word && (!*spec || several); word = strtok_r(NULL, ",&", &state)) {
        if (!*spec) {
            *spec = hapt_device_spec_of_word(word, &several);
            model = word;
            continue;
        }
        bool vague;
        snprintf(both, sizeof both, "%.60s_%.60s", model, word);
        const struct hapt_device_spec *other = hapt_device_spec_of_word(both, &vague);
        if (!other || vague || !same_model(*spec, other)) continue;
        *spec = other;
        several = false;
    }
    if (*spec && several)
        hapt_inventory_note(table->inventory, "\"%s\" may have more memory than %s: correct \"device\" if so", model,
                            (*spec)->name);
    if (*spec) return HAPT_OK;
    if (!*type)
        return hapt_fail(HAPT_ERR_INPUT,
                         "write the type into the file, gpu:a100:4, or use --nvidia-smi; hapt help topology lists "
                         "the devices",
                         "%s: line %d: the GPUs have no type, and no feature \"%.60s\" names one", table->path,
                         table->line, features);
    snprintf(hint, sizeof hint,
             "did you mean %s? Correct the type in the file, or delete the line and describe the device later",
             hapt_device_nearest(type));
    return hapt_fail(HAPT_ERR_INPUT, hint, "%s: line %d: the device database has no GPU \"%.60s\"", table->path,
                     table->line, type);
}

/* One resource, "gpu:a100:4(S:0-1)" or "gpu:4": *found becomes true if GPUs of it were added. */
static enum hapt_status read_resource(struct table *table, char *resource, const char *features, double memory,
                                      bool *found)
{
    const struct hapt_device_spec *spec;
    char *end;
    if (strncasecmp(resource, "gpu", 3) != 0 || (resource[3] && resource[3] != ':')) return HAPT_OK;
    resource[strcspn(resource, "(")] = '\0';
    char *type = strchr(resource, ':');
    char *number = strrchr(resource, ':');
    const long count = number ? strtol(number + 1, &end, 10) : 0;
    if (!number || end == number + 1 || *end || count < 0 || count > MAX_COUNT)
        return hapt_fail(HAPT_ERR_INPUT, command, "%s: line %d: \"%.60s\" is not gpu:TYPE:COUNT with at most %d GPUs",
                         table->path, table->line, resource, MAX_COUNT);
    *number = '\0';
    type = type < number ? type + 1 : "";
    char *flag = strchr(type, ':'); /* gpu:TYPE:no_consume:COUNT */
    if (flag) *flag = '\0';
    if (count == 0) return HAPT_OK;
    if (is_slice(type)) {
        table->slices++;
        return HAPT_OK;
    }
    HAPT_TRY(find_device(table, type, features, &spec));
    *found = true;
    return hapt_inventory_add(table->inventory, spec, (int)count, 1, memory);
}

/* Resources are separated by commas outside of parentheses. */
static enum hapt_status read_resources(struct table *table, char *list, const char *features, double memory,
                                       bool *found)
{
    int depth = 0;
    char *start = list;
    for (char *c = list;; c++) {
        depth += (*c == '(') - (*c == ')');
        const bool last = !*c;
        if (!last && (*c != ',' || depth > 0)) continue;
        *c = '\0';
        HAPT_TRY(read_resource(table, start, features, memory, found));
        if (last) return HAPT_OK;
        start = c + 1;
    }
}

static const char *column(const struct table *table, char *const *word, enum column column)
{
    return table->at[column] < 0 ? "" : word[table->at[column]];
}

static void note_away(struct table *table, const char *name)
{
    const size_t used = strlen(table->away_names);
    table->away++;
    if (used + strlen(name) + 8 < sizeof table->away_names)
        snprintf(table->away_names + used, sizeof table->away_names - used, "%s%s", used ? ", " : "", name);
    else
        table->away_more++;
}

static enum hapt_status read_node(struct table *table, char *line)
{
    char *word[MAX_WORDS];
    const int words = split(line, word);
    bool found = false;
    if (words < table->words)
        return hapt_fail(HAPT_ERR_INPUT, command, "%s: line %d: %d columns, the header has %d", table->path,
                         table->line, words, table->words);
    const char *name = column(table, word, HOST);
    if (strchr(name, '['))
        return hapt_fail(HAPT_ERR_INPUT, command, "%s: line %d: \"%.60s\" stands for several nodes", table->path,
                         table->line, name);
    if (json_object_get(table->seen, name)) return HAPT_OK;
    if (json_object_set_new(table->seen, name, json_true()) != 0)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the names of nodes");
    if (is_away(column(table, word, STATE))) {
        note_away(table, name);
        return HAPT_OK;
    }
    const double memory = strtod(column(table, word, MEMORY), NULL) * 0x1p20; /* MiB; "515000+": of several nodes */
    const double host_memory = memory >= 0x1p20 && memory < 1e15 ? memory : 0;
    const int slices = table->slices;
    HAPT_TRY(read_resources(table, word[table->at[GRES]], column(table, word, FEATURES), host_memory, &found));
    if (found || table->slices > slices) return HAPT_OK;
    const int cpus = atoi(column(table, word, CPUS));
    if (table->without++ == 0 || cpus < table->cpus) table->cpus = cpus;
    if (table->without == 1 || host_memory < table->cpu_memory) table->cpu_memory = host_memory;
    return HAPT_OK;
}

/* A cluster without GPUs: each node is one device, with the cores and the memory of the smallest one. */
static enum hapt_status add_cpus(struct table *table)
{
    struct hapt_device_spec device = *hapt_device_spec_find("cpu");
    const double one_core = device.memory_bandwidth, least_cores = 10; /* that saturate the memory of a socket */
    if (table->cpus < 1 || table->cpus > 65536 || table->cpu_memory == 0)
        return hapt_fail(HAPT_ERR_INPUT, command,
                         "%s: no node has a GPU, and without the columns CPUS and MEMORY nothing else is known",
                         table->path);
    for (int type = 0; type < HAPT_DTYPE_COUNT; type++) device.peak_flops[type] *= table->cpus;
    device.memory_bandwidth = one_core * (table->cpus < least_cores ? table->cpus : least_cores);
    device.memory_bytes = table->cpu_memory;
    hapt_inventory_note(table->inventory,
                        "no node has a GPU: its CPUs are one device each. Correct peak_flops if CPUS are hardware "
                        "threads");
    return hapt_inventory_add(table->inventory, &device, 1, table->without, table->cpu_memory);
}

static enum hapt_status read_table(struct table *table, char *text)
{
    char *line;
    while ((line = hapt_inventory_next_line(&text))) {
        table->line++;
        if (!*line) continue;
        HAPT_TRY(table->words == 0 ? read_header(table, line) : read_node(table, line));
    }
    if (table->words == 0) return hapt_fail(HAPT_ERR_INPUT, command, "%s is empty", table->path);
    if (table->away > 0)
        hapt_inventory_note(table->inventory, "left out: %d node%s down or drained%s%s%s", table->away,
                            table->away > 1 ? "s that are" : " that is", table->away_names[0] ? ": " : "",
                            table->away_names, table->away_more > 0 ? ", ..." : "");
    if (table->slices > 0)
        hapt_inventory_note(table->inventory,
                            "left out: MIG slices of %d resource%s; describe a slice as a device object if ranks "
                            "shall use it",
                            table->slices, table->slices > 1 ? "s" : "");
    if (table->inventory->count == 0 && table->without > 0) return add_cpus(table);
    if (table->without > 0)
        hapt_inventory_note(table->inventory, "left out: %d node%s without a GPU", table->without,
                            table->without > 1 ? "s" : "");
    if (table->inventory->count > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, command, "%s lists no node that a job can use", table->path);
}

enum hapt_status hapt_inventory_read_sinfo(const char *path, struct hapt_arena *arena, struct hapt_inventory *inventory)
{
    char *text;
    struct table table = {.path = strcmp(path, "-") == 0 ? "standard input" : path, .inventory = inventory};
    HAPT_TRY(hapt_inventory_read_text(path, arena, &text));
    table.seen = json_object();
    if (!table.seen) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the names of nodes");
    const enum hapt_status status = read_table(&table, text);
    json_decref(table.seen);
    return status;
}
