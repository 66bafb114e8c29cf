/* The texts of --what-if: parses ranges, prints values. */
#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/sweep.h"

#define EXAMPLES                                                                                                      \
    "write link=1..25Gbit/s, link=a100-v100:1..25Gbit/s:9 (points), nodes.v100=1..8, memory=16..80GB (all devices), " \
    "memory.v100=16..80GB, microbatches=32..512, host-memory=64..512GB, host-bandwidth=4..50GB/s, "                   \
    "inter-node.v100=10..100Gbit/s or intra-node=16..300GB/s"

enum { MOST_POINTS = 1000 };

static bool parse_whole(const char *text, double *value)
{
    char *end;
    *value = strtod(text, &end);
    return end != text && !*end && *value == floor(*value) && *value >= 1 && *value <= 1e6;
}

/* Rates and sizes need a unit, because a bare number is ambiguous. */
static bool has_unit(const char *text)
{
    char *end;
    strtod(text, &end);
    return *end != '\0';
}

static bool parse_value(enum hapt_sweep_kind kind, const char *text, double *value)
{
    const bool bandwidth = kind == HAPT_SWEEP_LINK || kind == HAPT_SWEEP_HOST_BANDWIDTH || hapt_sweep_is_inside(kind);
    const bool bytes = kind == HAPT_SWEEP_MEMORY || kind == HAPT_SWEEP_HOST_MEMORY;
    if ((bandwidth || bytes) && !has_unit(text)) return false;
    const bool read = bandwidth ? hapt_units_parse_bandwidth(text, value)
                      : bytes   ? hapt_units_parse_bytes(text, value)
                                : parse_whole(text, value);
    return read && *value > 0;
}

/* "1" before "25Gbit/s" means 1 Gbit/s. */
static bool parse_low(enum hapt_sweep_kind kind, const char *text, const char *high, struct hapt_arena *arena,
                      double *value)
{
    char *end, *unit;
    strtod(text, &end);
    if (end == text) return false;
    if (*end) return parse_value(kind, text, value);
    strtod(high, &unit);
    const char *whole = hapt_arena_printf(arena, "%s%s", text, unit);
    return whole && parse_value(kind, whole, value);
}

/* Parses LOW..HIGH, LOW..HIGH:POINTS or one value. `text` may be changed. */
static bool parse_range(char *text, struct hapt_arena *arena, struct hapt_sweep_range *range)
{
    char *dots = strstr(text, "..");
    if (!dots) {
        range->points = 1;
        if (!parse_value(range->kind, text, &range->low)) return false;
        range->high = range->low;
        return true;
    }
    char *high = dots + 2, *colon = strrchr(high, ':');
    *dots = '\0';
    if (colon) {
        double points;
        *colon = '\0';
        if (!parse_whole(colon + 1, &points) || points < 2 || points > MOST_POINTS) return false;
        range->points = (int)points;
    }
    return parse_value(range->kind, high, &range->high) && parse_low(range->kind, text, high, arena, &range->low) &&
           range->low <= range->high;
}

/* "memory", "memory.v100", "nodes.v100" and the like: sets kind and subject. */
static bool parse_subject(const char *text, struct hapt_sweep_range *range)
{
    static const struct {
        const char *word;
        enum hapt_sweep_kind kind;
        bool all; /* without a subject: of all */
    } known[] = {{"nodes", HAPT_SWEEP_NODES, false},
                 {"memory", HAPT_SWEEP_MEMORY, true},
                 {"host-memory", HAPT_SWEEP_HOST_MEMORY, true},
                 {"host-bandwidth", HAPT_SWEEP_HOST_BANDWIDTH, true},
                 {"inter-node", HAPT_SWEEP_INTER_NODE, true},
                 {"intra-node", HAPT_SWEEP_INTRA_NODE, true}};
    const size_t length = strcspn(text, ".");
    for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
        if (strlen(known[k].word) != length || strncmp(text, known[k].word, length) != 0) continue;
        range->kind = known[k].kind;
        range->subject = text[length] ? text + length + 1 : "";
        return text[length] ? *range->subject != '\0' : known[k].all;
    }
    return false;
}

/* Parses one sweep; `text` may be changed. */
static bool parse_one(char *text, struct hapt_arena *arena, struct hapt_sweep_range *range)
{
    char *equals = strchr(text, '=');
    if (!equals) return false;
    char *value = equals + 1;
    *equals = '\0';
    range->subject = "";
    if (strcmp(text, "link") == 0) {
        range->kind = HAPT_SWEEP_LINK;
        const char *dots = strstr(value, "..");
        char *colon = dots ? memrchr(value, ':', (size_t)(dots - value)) : strrchr(value, ':');
        if (!colon) return parse_range(value, arena, range);
        *colon = '\0';
        range->subject = value;
        return *value && parse_range(colon + 1, arena, range);
    }
    if (strcmp(text, "microbatches") == 0) {
        range->kind = HAPT_SWEEP_MICROBATCHES;
        return parse_range(value, arena, range);
    }
    return parse_subject(text, range) && parse_range(value, arena, range);
}

enum hapt_status hapt_sweep_parse(const char *text, struct hapt_arena *arena, struct hapt_sweep_range **range,
                                  int *count)
{
    struct hapt_sweep_range *made;
    int pieces = 1;
    for (const char *at = text; *at; at++) pieces += *at == ',';
    HAPT_NEW(made, arena, pieces);
    for (int i = 0; i < pieces; i++, text++) {
        const int length = (int)strcspn(text, ",");
        made[i].text = hapt_arena_printf(arena, "%.*s", length, text);
        char *words = hapt_arena_printf(arena, "%.*s", length, text);
        if (!made[i].text || !words) return HAPT_ERR_MEMORY;
        if (!parse_one(words, arena, &made[i]))
            return hapt_fail(HAPT_ERR_USAGE, EXAMPLES, "--what-if cannot read \"%s\"", made[i].text);
        text += length;
    }
    *range = made;
    *count = pieces;
    return HAPT_OK;
}

const char *hapt_sweep_value_text(enum hapt_sweep_kind kind, double value, char text[32])
{
    if (kind == HAPT_SWEEP_LINK || kind == HAPT_SWEEP_INTER_NODE) return hapt_units_bits(value, text);
    if (kind == HAPT_SWEEP_HOST_BANDWIDTH || kind == HAPT_SWEEP_INTRA_NODE) return hapt_units_bandwidth(value, text);
    if (kind == HAPT_SWEEP_MEMORY || kind == HAPT_SWEEP_HOST_MEMORY) return hapt_units_bytes(value, text);
    snprintf(text, 32, "%.0f", value);
    return text;
}
