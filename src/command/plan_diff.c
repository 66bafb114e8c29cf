/* hapt plan --diff a.h5 b.h5: compares two plan files. */
#include <stdio.h>

#include "hapt/diff.h"
#include "json_print.h"
#include "plan_explain.h"

enum { FIELD_CHARS = 64 /* limit of subcluster names */, CHANGE_CHARS = 2 * FIELD_CHARS + 8 };

struct pair {
    const char *path[2];
    struct hapt_plan *plan[2];
    struct hapt_diff *diff;
};

enum hapt_status hapt_plan_diff_options(const struct hapt_config *config)
{
    static const char *const allowed[] = {"diff", "json", NULL};
    const bool asked = hapt_config_bool(config, "diff");
    if (!asked && hapt_config_word_count(config) > 0)
        return hapt_fail(HAPT_ERR_USAGE, "options are --key value; two plans are compared by --diff a.h5 b.h5",
                         "unexpected word \"%s\"", hapt_config_word(config, 0));
    if (!asked) return HAPT_OK;
    const char *other = hapt_config_given_beside(config, allowed);
    if (other)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--%s has no effect: --diff compares two plan files",
                         other);
    if (hapt_config_word_count(config) != 2)
        return hapt_fail(HAPT_ERR_USAGE, "write hapt plan --diff a.h5 b.h5", "--diff needs two plan files, not %d",
                         hapt_config_word_count(config));
    return HAPT_OK;
}

/* "x" if unchanged, else "x -> y". */
static const char *change(bool changed, const char *x, const char *y, char text[CHANGE_CHARS])
{
    snprintf(text, CHANGE_CHARS, changed ? "%s -> %s" : "%s", x, y);
    return text;
}

enum { FIELDS = 9 };

static void describe(const struct hapt_plan_stage *stage, char text[FIELDS][FIELD_CHARS])
{
    const struct hapt_layout *layout = &stage->layout;
    char again[FIELD_CHARS / 2] = "";
    snprintf(text[0], FIELD_CHARS, "%d-%d", stage->first_layer, stage->end_layer);
    snprintf(text[1], FIELD_CHARS, "%s", stage->submesh->name);
    hapt_plan_stage_short(stage, " x ", text[2]);
    snprintf(text[3], FIELD_CHARS, "%d", stage->layout.tensor_parallel);
    hapt_units_time(stage->compute_s, text[4]);
    hapt_units_time(stage->comm_s, text[5]);
    snprintf(text[6], FIELD_CHARS, "%d", stage->warmup);
    hapt_units_bytes(stage->memory_bytes, text[7]);
    if (layout->unit_count > 0)
        snprintf(again, sizeof again, "%d recompute", layout->unit_count);
    else if (layout->recompute > 0) /* planned from a profile alone */
        snprintf(again, sizeof again, "some recompute");
    snprintf(text[8], FIELD_CHARS, "%s%s%s", again, *again && hapt_weights_move(layout->weights_at) ? ", " : "",
             layout->weights_at == HAPT_GRADIENTS_ON_HOST ? "weights and gradients on the host"
             : layout->weights_at == HAPT_WEIGHTS_SHARDED ? "weights sharded"
             : hapt_weights_on_host(layout->weights_at)   ? "weights on the host"
             : *again                                     ? ""
                                                          : "all kept");
}

static void print_row(const struct hapt_env *env, const struct pair *pair, const struct hapt_diff_row *row)
{
    static const char *const head[] = {"layers",   "on",       "submesh", "tp",    "compute",
                                       "transfer", "launches", "memory",  "blocks"};
    const struct hapt_plan_stage *x = row->a < 0 ? NULL : &pair->plan[0]->stage[row->a];
    const struct hapt_plan_stage *y = row->b < 0 ? NULL : &pair->plan[1]->stage[row->b];
    char one[FIELDS][FIELD_CHARS], two[FIELDS][FIELD_CHARS], text[CHANGE_CHARS], line[1024] = "";
    size_t length = 0;
    describe(x ? x : y, one);
    describe(y ? y : x, two);
    const int fields = row->changed & HAPT_DIFF_KEPT ? FIELDS : FIELDS - 1; /* what is kept: if it differs */
    for (int k = 0; k < fields && length < sizeof line; k++)
        length += (size_t)snprintf(line + length, sizeof line - length, "%s%s %s", k ? ", " : "", head[k],
                                   change(row->changed >> k & 1u, one[k], two[k], text));
    if (x && y)
        hapt_print_wrapped(env, 6, "  %c stage %d -> %d: %s\n", row->changed ? '~' : '=', row->a, row->b, line);
    else
        hapt_print_wrapped(env, 6, "  %c stage %d: %s\n", x ? '-' : '+', x ? row->a : row->b, line);
}

static const char *rows_text(const struct hapt_plan *plan, char text[16])
{
    snprintf(text, 16, "%d", plan->rows);
    return plan->rows > 0 ? text : "the model's";
}

static void print_pair(const struct hapt_env *env, const struct pair *pair)
{
    const struct hapt_plan *a = pair->plan[0], *b = pair->plan[1];
    const struct hapt_diff *diff = pair->diff;
    const struct {
        const char *name;
        double x, y;
    } times[] = {{"simulated step", a->simulated_s, b->simulated_s},
                 {"HAPT (13)", a->latency_s, b->latency_s},
                 {"t_max", a->t_max_s, b->t_max_s}};
    char time[2][32], rows[2][16];
    hapt_print(env, "%s -> %s\n", pair->path[0], pair->path[1]);
    hapt_print_wrapped(
        env, 6, "  %d stages, %d microbatches, %s%s%s, set by %s -> %d stages, %d microbatches, %s%s%s, set by %s\n",
        a->stage_count, a->microbatches, hapt_schedule_kind_name(a->schedule), a->blocking ? " without overlap" : "",
        a->split ? ", split backward" : "", a->limit, b->stage_count, b->microbatches,
        hapt_schedule_kind_name(b->schedule), b->blocking ? " without overlap" : "", b->split ? ", split backward" : "",
        b->limit);
    if (a->host_state != b->host_state)
        hapt_print(env, "  optimizer state: on the %s -> on the %s\n", a->host_state ? "hosts" : "devices",
                   b->host_state ? "hosts" : "devices");
    if (a->host_update != b->host_update)
        hapt_print(env, "  updates: on the %s -> on the %s\n", a->host_update ? "hosts" : "devices",
                   b->host_update ? "hosts" : "devices");
    if (a->host_state && b->host_state && hapt_plan_defers(a) != hapt_plan_defers(b))
        hapt_print(env, "  updates: %s -> %s\n", hapt_plan_defers(a) ? "by priority" : "in order",
                   hapt_plan_defers(b) ? "by priority" : "in order");
    if (a->rows > 0 || b->rows > 0)
        hapt_print(env, "  rows of a microbatch: %s -> %s\n", rows_text(a, rows[0]), rows_text(b, rows[1]));
    for (int k = 0; k < 3; k++)
        hapt_print(env, "  %-14s  %10s -> %10s  x %.4f\n", times[k].name, hapt_units_time(times[k].x, time[0]),
                   hapt_units_time(times[k].y, time[1]), hapt_plan_ratio(times[k].y, times[k].x));
    if (!diff->same_layers)
        hapt_print(env, "  %d and %d layers: stages are matched by their share of the layers\n", a->layer_count,
                   b->layer_count);
    for (int r = 0; r < diff->row_count; r++) print_row(env, pair, &diff->row[r]);
    for (int m = 0; m < diff->relocation_count; m++)
        hapt_print_wrapped(env, 6, "  layers %d-%d move from %s to %s\n", diff->relocation[m].first_layer,
                           diff->relocation[m].end_layer, diff->relocation[m].from, diff->relocation[m].to);
    if (diff->equal) hapt_print(env, "  the plans are equal\n");
}

static json_t *row_object(const struct hapt_diff_row *row)
{
    static const char *const name[] = {"layers",   "subcluster", "submesh", "tensor_parallel", "compute",
                                       "transfer", "launches",   "memory",  "blocks"};
    json_t *changed = json_array();
    for (int k = 0; changed && k < FIELDS; k++)
        if (row->changed >> k & 1u) json_array_append_new(changed, json_string(name[k]));
    return json_pack("{s:o, s:o, s:o}", "a", row->a < 0 ? json_null() : json_integer(row->a), "b",
                     row->b < 0 ? json_null() : json_integer(row->b), "changed", changed);
}

/* b / a */
static json_t *ratio_of(double a, double b)
{
    return hapt_plan_number(hapt_plan_ratio(b, a));
}

static enum hapt_status print_json(const struct pair *pair)
{
    const struct hapt_plan *a = pair->plan[0], *b = pair->plan[1];
    const struct hapt_diff *diff = pair->diff;
    json_t *rows = json_array(), *relocations = json_array();
    for (int r = 0; rows && r < diff->row_count; r++) json_array_append_new(rows, row_object(&diff->row[r]));
    for (int m = 0; relocations && m < diff->relocation_count; m++)
        json_array_append_new(relocations, json_pack("{s:[ii], s:s, s:s}", "layers", diff->relocation[m].first_layer,
                                                     diff->relocation[m].end_layer, "from", diff->relocation[m].from,
                                                     "to", diff->relocation[m].to));
    json_t *object =
        json_pack("{s:s, s:i, s:b, s:o, s:o, s:o, s:o, s:o, s:o, s:o}", "format", "hapt-plan-diff", "version", 1,
                  "equal", diff->equal, "latency_ratio", ratio_of(a->latency_s, b->latency_s), "simulated_ratio",
                  ratio_of(a->simulated_s, b->simulated_s), "t_max_ratio", ratio_of(a->t_max_s, b->t_max_s), "stages",
                  rows, "moved", relocations, "a", hapt_plan_json(a), "b", hapt_plan_json(b));
    return hapt_json_print(object, "the difference's", 2);
}

enum hapt_status hapt_plan_diff_print(const struct hapt_env *env, const struct hapt_config *config,
                                      struct hapt_arena *arena)
{
    struct pair pair = {.diff = NULL};
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0) { /* small files: one rank reads both */
        for (int k = 0; k < 2 && status == HAPT_OK; k++) {
            pair.path[k] = hapt_config_word(config, k);
            status = hapt_plan_load(pair.path[k], arena, &pair.plan[k]);
        }
        if (status == HAPT_OK) status = hapt_plan_diff(pair.plan[0], pair.plan[1], arena, &pair.diff);
        if (status == HAPT_OK) print_pair(env, &pair);
        if (status == HAPT_OK && env->quiet) status = print_json(&pair);
    }
    return hapt_env_agree(env->world, status);
}
