/* Plans that are not searched: forced stages, and the even split. */
#include "search.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

/* Reads a number in [0, 1e6] at *text and moves on. */
static bool read_number(const char **text, int *number)
{
    if (!isdigit((unsigned char)**text)) return false;
    char *end;
    const long value = strtol(*text, &end, 10);
    if (value > 1000000) return false;
    *number = (int)value;
    *text = end;
    return true;
}

static bool read_char(const char **text, char expected)
{
    if (**text != expected) return false;
    ++*text;
    return true;
}

static int find_subcluster(const struct hapt_profile *profile, const char *name, size_t length)
{
    for (int c = 0; c < profile->cluster_count; c++)
        if (strlen(profile->cluster[c].name) == length && strncmp(profile->cluster[c].name, name, length) == 0)
            return c;
    return -1;
}

/* FIRST-END@NAME:NxM or FIRST-END@NAME:NxMtT */
static bool read_stage(const struct hapt_profile *profile, const char **text, struct hapt_plan_stage *stage)
{
    if (!read_number(text, &stage->first_layer) || !read_char(text, '-') || !read_number(text, &stage->end_layer) ||
        !read_char(text, '@'))
        return false;
    const size_t piece = strcspn(*text, ",");
    const char *colon = memrchr(*text, ':', piece);
    if (!colon) return false;
    stage->subcluster = find_subcluster(profile, *text, (size_t)(colon - *text));
    *text = colon + 1;
    if (!read_number(text, &stage->nodes) || !read_char(text, 'x') || !read_number(text, &stage->devices_per_node))
        return false;
    return **text != 't' || (read_char(text, 't') && read_number(text, &stage->tensor_parallel) && stage->tensor_parallel > 0);
}

static enum hapt_status parse_stages(const struct hapt_profile *profile, const char *text, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    int pieces = 1;
    for (const char *at = text; *at; at++) pieces += *at == ',';
    HAPT_NEW(plan->stage, arena, pieces);
    for (const char *at = text; plan->stage_count < pieces;) {
        struct hapt_plan_stage *stage = &plan->stage[plan->stage_count];
        const char *start = at;
        *stage = (struct hapt_plan_stage){.first_op = -1, .end_op = -1};
        const bool fine = read_stage(profile, &at, stage) && (*at == '\0' || *at == ',');
        if (!fine)
            return hapt_fail(HAPT_ERR_INPUT, "write stages as \"0-6@fast:1x2,6-9@slow:1x2\" (half-open layers)",
                             "--stages: cannot read '%.*s'", (int)strcspn(start, ","), start);
        if (stage->subcluster < 0)
            return hapt_fail(HAPT_ERR_INPUT, "name a subcluster of the profile",
                             "--stages: no subcluster is called as in '%.*s'", (int)strcspn(start, ","), start);
        plan->stage_count++;
        if (*at == ',') at++;
    }
    return HAPT_OK;
}

static enum hapt_status start_plan(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                   struct hapt_arena *arena, struct hapt_plan **plan)
{
    HAPT_NEW(*plan, arena, 1);
    if (options->microbatches < 1)
        return hapt_fail(HAPT_ERR_USAGE, "give --microbatches 1 or more", "%d microbatches a step",
                         options->microbatches);
    **plan = (struct hapt_plan){.microbatches = options->microbatches,
                                .schedule = options->schedule,
                                .hide_threshold = options->hide_threshold,
                                .replicas = 1,
                                .layer_count = profile->layer_count};
    return HAPT_OK;
}

static enum hapt_status price_plan(const struct hapt_profile *profile, struct hapt_plan *plan)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = hapt_plan_price(profile, plan, &scratch);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_plan_force(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const char *stages, struct hapt_arena *result, struct hapt_plan **plan)
{
    struct hapt_plan *made;
    HAPT_TRY(start_plan(profile, options, result, &made));
    HAPT_TRY(parse_stages(profile, stages, result, made));
    HAPT_TRY(price_plan(profile, made));
    *plan = made;
    return HAPT_OK;
}

/* Stage i of S takes layers [i L / S, (i + 1) L / S) on the optimum's submesh i. */
static enum hapt_status split_evenly(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                     const struct hapt_plan *optimum, struct hapt_arena *result,
                                     struct hapt_plan **plan)
{
    struct hapt_plan *made;
    HAPT_TRY(start_plan(profile, options, result, &made));
    const int S = optimum->stage_count;
    made->stage_count = S;
    HAPT_NEW(made->stage, result, S);
    for (int i = 0; i < S; i++) {
        const int64_t L = profile->layer_count;
        made->stage[i] = (struct hapt_plan_stage){.first_layer = (int)(i * L / S),
                                                  .end_layer = (int)((i + 1) * L / S),
                                                  .first_op = -1,
                                                  .end_op = -1,
                                                  .subcluster = optimum->stage[i].subcluster,
                                                  .nodes = optimum->stage[i].nodes,
                                                  .devices_per_node = optimum->stage[i].devices_per_node,
                                                  .tensor_parallel = optimum->stage[i].tensor_parallel};
    }
    HAPT_TRY(price_plan(profile, made));
    made->search = optimum->search;
    made->search.gap = 0; /* of the optimum, not of this plan */
    *plan = made;
    return HAPT_OK;
}

enum hapt_status hapt_plan_even(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_search_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan)
{
    struct hapt_search_options best = *options;
    struct hapt_plan *optimum;
    best.schedule = HAPT_SCHEDULE_H1F1B;
    HAPT_TRY(hapt_plan_search(comm, profile, &best, result, &optimum));
    return search_agree(comm, options, split_evenly(profile, options, optimum, result, plan));
}
