/* Parses the text of --what-if. */
#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/sweep.h"

#define EXAMPLES                                                                                                      \
    "write link=1..25Gbit/s, link=a100-v100:1..25Gbit/s:9 (points), nodes.v100=1..8, memory=16..80GB (all devices), " \
    "memory.v100=16..80GB or microbatches=32..512"

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
    if ((kind == HAPT_SWEEP_LINK || kind == HAPT_SWEEP_MEMORY) && !has_unit(text)) return false;
    const bool read = kind == HAPT_SWEEP_LINK     ? hapt_units_parse_bandwidth(text, value)
                      : kind == HAPT_SWEEP_MEMORY ? hapt_units_parse_bytes(text, value)
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
    if (strcmp(text, "memory") == 0) {
        range->kind = HAPT_SWEEP_MEMORY;
        return parse_range(value, arena, range);
    }
    const bool nodes = strncmp(text, "nodes.", 6) == 0, memory = strncmp(text, "memory.", 7) == 0;
    if (!nodes && !memory) return false;
    range->kind = nodes ? HAPT_SWEEP_NODES : HAPT_SWEEP_MEMORY;
    range->subject = text + (nodes ? 6 : 7);
    return *range->subject && parse_range(value, arena, range);
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
