/* --fix: key=value pairs, separated by commas. */
#include "fix.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_KEY = 24, MOST_VALUE = 1024 };

static const struct {
    const char *name, *option; /* the option that the key sets; NULL: none */
} keys[] = {{"rows", NULL},
            {"launches", NULL},
            {"tensor-parallel", NULL},
            {"schedule", "schedule"},
            {"loops", "loops"},
            {"program", "program"},
            {"epsilon", "hide-threshold"},
            {"zero1", "sharded-optimizer"},
            {"split", "split-backward"},
            {"exchange", "tied-exchange"}};
enum { KEYS = sizeof keys / sizeof keys[0] };

struct pair {
    char key[MOST_KEY], value[MOST_VALUE];
};

/* Reads a pair and moves *text behind it; false at the end. */
static bool next_pair(const char **text, struct pair *pair)
{
    const char *at = *text;
    if (!at || !*at) return false;
    const size_t length = strcspn(at, ","), key = strcspn(at, "=,");
    const size_t value = key < length ? length - key - 1 : 0;
    snprintf(pair->key, sizeof pair->key, "%.*s", (int)key, at);
    snprintf(pair->value, sizeof pair->value, "%.*s", (int)value, at + key + (key < length));
    *text = at + length + (at[length] == ',');
    return true;
}

/* The value of a key; false: not fixed. */
static bool find(const struct hapt_config *config, const char *key, struct pair *pair)
{
    const char *text = hapt_config_text(config, "fix");
    while (next_pair(&text, pair))
        if (strcmp(pair->key, key) == 0) return true;
    return false;
}

/* A number of 1 to 1,000,000; 0: none. */
static int number_of(const char *text)
{
    char *end;
    const long value = strtol(text, &end, 10);
    return end != text && !*end && value >= 1 && value <= 1000000 ? (int)value : 0;
}

static enum hapt_status unknown_key(const char *key)
{
    char hint[200] = "keys are";
    for (int k = 0; k < KEYS; k++) {
        const size_t used = strlen(hint);
        snprintf(hint + used, sizeof hint - used, "%s %s", k > 0 ? "," : "", keys[k].name);
    }
    return hapt_fail(HAPT_ERR_USAGE, hint, "--fix: unknown key \"%s\"", key);
}

static enum hapt_status check_own(const struct hapt_config *config, const struct pair *pair)
{
    if (strcmp(pair->key, "launches") == 0) {
        if (hapt_config_text(config, "stages")) return HAPT_OK; /* the counts are checked against the stages */
        return hapt_fail(HAPT_ERR_USAGE, "add --stages, or restrict the counts by schedule and epsilon",
                         "--fix launches=%s needs --stages: there is one count for each stage", pair->value);
    }
    if (number_of(pair->value) == 0)
        return hapt_fail(HAPT_ERR_USAGE, "use a whole number from 1 on", "bad value \"%s\" in --fix %s=%s", pair->value,
                         pair->key, pair->value);
    if (strcmp(pair->key, "rows") == 0 && hapt_config_int(config, "global-batch") == 0)
        return hapt_fail(HAPT_ERR_USAGE, "add --global-batch N, the rows of a step",
                         "--fix rows=%s needs --global-batch: otherwise the model determines the rows", pair->value);
    return HAPT_OK;
}

static enum hapt_status take(struct hapt_config *config, const struct pair *pair, const char *behind,
                             struct hapt_arena *arena)
{
    struct pair other;
    int k = 0;
    while (k < KEYS && strcmp(keys[k].name, pair->key) != 0) k++;
    if (k == KEYS) return unknown_key(pair->key);
    while (next_pair(&behind, &other))
        if (strcmp(other.key, pair->key) == 0)
            return hapt_fail(HAPT_ERR_USAGE, "give it once", "--fix: %s is fixed twice", pair->key);
    if (!keys[k].option) return check_own(config, pair);
    const char *source = hapt_arena_printf(arena, "--fix %s=%s", pair->key, pair->value);
    return source ? hapt_config_give(config, keys[k].option, pair->value, source) : HAPT_ERR_MEMORY;
}

enum hapt_status hapt_fix_options(struct hapt_config *config, struct hapt_arena *arena)
{
    const char *text = hapt_config_text(config, "fix");
    struct pair pair;
    while (next_pair(&text, &pair)) HAPT_TRY(take(config, &pair, text, arena));
    return HAPT_OK;
}

int hapt_fix_number(const struct hapt_config *config, const char *key)
{
    struct pair pair;
    return find(config, key, &pair) ? number_of(pair.value) : 0;
}

enum hapt_status hapt_fix_launches(const struct hapt_config *config, const struct hapt_profile *profile,
                                   struct hapt_plan *plan)
{
    struct pair pair;
    if (!find(config, "launches", &pair)) return HAPT_OK;
    if (hapt_schedule_loops(plan->schedule))
        return hapt_fail(HAPT_ERR_USAGE, "leave it out, or choose a schedule that is not looped",
                         "--fix launches=%s: the launches of schedule %s follow from its lists", pair.value,
                         hapt_schedule_kind_name(plan->schedule));
    const char *at = pair.value;
    for (int i = 0; i < plan->stage_count; i++) {
        char *end;
        const long launches = strtol(at, &end, 10);
        const bool last = i + 1 == plan->stage_count;
        if (end == at || *end != (last ? '\0' : ':'))
            return hapt_fail(HAPT_ERR_USAGE, "separate one count for each stage by ':'",
                             "--fix launches=%s: there are %d stages", pair.value, plan->stage_count);
        if (launches < 1 || launches > plan->microbatches || (i > 0 && launches > plan->stage[i - 1].warmup))
            return hapt_fail(HAPT_ERR_USAGE, "counts are at most the number of microbatches, and never rise",
                             "--fix launches=%s: stage %d cannot launch %ld microbatches", pair.value, i, launches);
        plan->stage[i].warmup = (int)launches;
        at = end + 1;
    }
    plan->schedule = HAPT_SCHEDULE_H1F1B; /* the schedule that allows any counts */
    return hapt_plan_price_launches(profile, plan);
}

enum hapt_status hapt_fix_profile(const struct hapt_config *config, struct hapt_arena *arena,
                                  struct hapt_profile **profile)
{
    const int degree = hapt_fix_number(config, "tensor-parallel");
    struct hapt_profile *copy;
    if (degree == 0) return HAPT_OK;
    HAPT_TRY(hapt_profile_copy(*profile, arena, &copy));
    if (!hapt_profile_keep_degree(copy, degree))
        return hapt_fail(HAPT_ERR_INFEASIBLE, "leave it out, or choose a degree that divides the devices of a node",
                         "--fix tensor-parallel=%d: the profile has no candidate of this degree", degree);
    *profile = copy;
    return HAPT_OK;
}
