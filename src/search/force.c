/* Plans without a search: given stages (--stages), and the even split. */
#include "search.h"

#include <ctype.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Reads a number in [0, 1e6] at *text and advances *text. */
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

static enum hapt_status cannot_read(const char *text)
{
    return hapt_fail(
        HAPT_ERR_INPUT,
        "write stages as \"0-6@fast:1x2,6-9@slow:1x2\" (half-open layers), mixed ones as \"0-9@fast:2+slow:1\"",
        "--stages: cannot read '%.*s'", (int)strcspn(text, ","), text);
}

/* NxM, NxMtT or NxMpK */
static bool read_submesh(const char **text, struct hapt_plan_stage *stage)
{
    struct hapt_layout *layout = &stage->layout;
    if (!read_number(text, &stage->submesh->nodes) || !read_char(text, 'x') ||
        !read_number(text, &stage->submesh->devices_per_node))
        return false;
    layout->recompute = layout->weights_at = -1; /* any */
    if (**text == 'p') {
        layout->tensor_parallel = 1;
        return read_char(text, 'p') && read_number(text, &layout->number) && layout->number > 0;
    }
    return **text != 't' ||
           (read_char(text, 't') && read_number(text, &layout->tensor_parallel) && layout->tensor_parallel > 0);
}

/* True at the end of a part of a mixed stage: the next part, the stage's end, or its program. */
static bool ends_part(const char *behind, const char *end)
{
    int program;
    if (behind == end || *behind == '+') return true;
    return read_char(&behind, 'p') && read_number(&behind, &program) && behind == end;
}

/* Reads the next part NAME:COUNT of a mixed stage. Names may contain '+' and ':'. So a part ends at the first count
 * that follows a subcluster's name. False: unreadable; *c -1: no known name. */
static bool read_part(const struct hapt_profile *profile, const char **text, const char *end, int *c, int *count)
{
    bool readable = false;
    *c = -1;
    for (const char *colon = memchr(*text, ':', (size_t)(end - *text)); colon;
         colon = memchr(colon + 1, ':', (size_t)(end - colon - 1))) {
        const char *behind = colon + 1;
        if (!read_number(&behind, count) || !ends_part(behind, end)) continue;
        readable = true;
        *c = find_subcluster(profile, *text, (size_t)(colon - *text));
        if (*c < 0) continue;
        *text = behind;
        return true;
    }
    return readable;
}

static bool takes(const struct hapt_profile *profile, const struct hapt_profile_mixed *mixed, const int *taken,
                  int program)
{
    int same = 0, wanted = 0;
    for (int c = 0; c < profile->cluster_count; c++) wanted += taken[c] > 0;
    for (int i = 0; i < mixed->count; i++) same += taken[mixed->cluster[i]] == mixed->devices[i];
    return same == wanted && same == mixed->count && (program < 0 || mixed->program == program);
}

/* Seconds per microbatch of the stage's layers, including step_time / B. INFINITY: no candidate, or a device has too
 * little memory. */
static double mixed_s(const struct hapt_profile *profile, const struct hapt_profile_mixed *mixed, int microbatches,
                      const struct hapt_plan_stage *stage)
{
    if (stage->first_layer >= stage->end_layer || stage->end_layer > profile->layer_count) return INFINITY;
    const size_t cell = hapt_profile_index(profile, 0, stage->first_layer, stage->end_layer - 1);
    if (!isfinite(mixed->stage_time[cell])) return INFINITY;
    for (int i = 0; i < mixed->count; i++) {
        const size_t row =
            hapt_profile_index(profile, mixed->memory_rows > 1 ? i : 0, stage->first_layer, stage->end_layer - 1);
        if (!hapt_at_most(mixed->parameter_bytes[row] + mixed->activation_bytes[row],
                          profile->cluster[mixed->cluster[i]].device_memory_bytes))
            return INFINITY;
    }
    return mixed->stage_time[cell] + (mixed->step_time ? mixed->step_time[cell] / microbatches : 0);
}

/* Reads NAME:COUNT+NAME:COUNT..., with pK for program K of the profile (p0: data-parallel rows), else the fastest that
 * fits. Finds the profile's group with these devices. */
static enum hapt_status read_mixed(const struct hapt_profile *profile, const char **text, const char *start,
                                   int microbatches, struct hapt_arena *arena, struct hapt_plan_stage *stage)
{
    const char *end = *text + strcspn(*text, ",");
    int taken[HAPT_MAX_SUBCLUSTERS] = {0}, program = -1, found = -1;
    double least_s = INFINITY;
    while (*text != end) {
        int c, count;
        if (!read_part(profile, text, end, &c, &count) || count < 1) return cannot_read(start);
        if (c < 0)
            return hapt_fail(HAPT_ERR_INPUT, "name subclusters of the profile",
                             "--stages: unknown subcluster in '%.*s'", (int)strcspn(start, ","), start);
        if (taken[c] > 0) return cannot_read(start);
        taken[c] = count;
        if (**text == 'p') {
            ++*text;
            if (!read_number(text, &program)) return cannot_read(start);
        } else if (*text != end) {
            ++*text; /* skips '+' */
            if (*text == end) return cannot_read(start);
        }
    }
    for (int k = 0; k < profile->mixed_count; k++) {
        if (!takes(profile, &profile->mixed[k], taken, program)) continue;
        const double seconds = mixed_s(profile, &profile->mixed[k], microbatches, stage);
        if (found >= 0 && seconds >= least_s) continue;
        found = k;
        least_s = seconds;
    }
    if (found >= 0) return hapt_plan_stage_mix(profile, found, arena, stage);
    return hapt_fail(HAPT_ERR_INPUT, "`h5dump -a /mixed_0/counts P.h5` shows the devices of its first mixed group",
                     "--stages: the profile has no mixed stages on the devices of '%.*s'%s", (int)strcspn(start, ","),
                     start, program > 0 ? " with that program" : "");
}

/* Reads FIRST-END@NAME:NxM, FIRST-END@NAME:NxMtT, FIRST-END@NAME:NxMpK, FIRST-END@NAME:COUNT+NAME:COUNT, or the latter
 * with pK. */
static enum hapt_status read_stage(const struct hapt_profile *profile, const char **text, int microbatches,
                                   struct hapt_arena *arena, struct hapt_plan_stage *stage)
{
    const char *start = *text;
    if (!read_number(text, &stage->first_layer) || !read_char(text, '-') || !read_number(text, &stage->end_layer) ||
        !read_char(text, '@'))
        return cannot_read(start);
    const size_t piece = strcspn(*text, ",");
    const char *colon = memrchr(*text, ':', piece), *behind = colon ? colon + 1 : NULL;
    if (!colon) return cannot_read(start);
    if (read_submesh(&behind, stage) && behind == *text + piece) {
        stage->submesh->subcluster[0] = find_subcluster(profile, *text, (size_t)(colon - *text));
        *text = behind;
        if (stage->submesh->subcluster[0] >= 0) return HAPT_OK;
        return hapt_fail(HAPT_ERR_INPUT, "name a subcluster of the profile", "--stages: unknown subcluster in '%.*s'",
                         (int)strcspn(start, ","), start);
    }
    stage->layout = (struct hapt_layout){0};
    return read_mixed(profile, text, start, microbatches, arena, stage);
}

static enum hapt_status parse_stages(const struct hapt_profile *profile, const char *text, struct hapt_arena *arena,
                                     struct hapt_plan *plan)
{
    int pieces = 1;
    for (const char *at = text; *at; at++) pieces += *at == ',';
    HAPT_TRY(hapt_plan_allot(plan, pieces, arena));
    for (int i = 0; i < pieces; i++) {
        HAPT_TRY(read_stage(profile, &text, plan->microbatches, arena, &plan->stage[i]));
        if (*text == ',') text++;
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_force(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                 const char *stages, struct hapt_arena *result, struct hapt_plan **plan)
{
    struct hapt_plan *made;
    HAPT_NEW(made, result, 1);
    HAPT_TRY(search_check_options(options));
    *made = hapt_search_plan(profile, options);
    HAPT_TRY(parse_stages(profile, stages, result, made));
    HAPT_TRY(hapt_schedule_loops(options->schedule) ? search_price_loops(profile, options, made)
                                                    : hapt_plan_price_stages(profile, options, made));
    *plan = made;
    return HAPT_OK;
}

/* Changes the optimum: stage i of S takes layers [i L / S, (i + 1) L / S) on the same submesh. */
static enum hapt_status split_evenly(const struct hapt_profile *profile, enum hapt_schedule_kind schedule,
                                     struct hapt_plan *plan)
{
    const int64_t S = plan->stage_count, L = profile->layer_count;
    for (int i = 0; i < S; i++) {
        plan->stage[i].first_layer = (int)(i * L / S);
        plan->stage[i].end_layer = (int)((i + 1) * L / S);
    }
    plan->schedule = schedule;
    plan->search.gap = 0; /* it was the optimum's gap */
    return hapt_plan_price(profile, plan);
}

enum hapt_status hapt_plan_even(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_search_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan)
{
    struct hapt_search_options best = *options;
    struct hapt_plan *optimum;
    best.schedule = HAPT_SCHEDULE_H1F1B;
    HAPT_TRY(hapt_plan_search_formula(comm, profile, &best, result, &optimum));
    HAPT_TRY(hapt_search_agree(comm, options, split_evenly(profile, options->schedule, optimum)));
    *plan = optimum;
    return HAPT_OK;
}
