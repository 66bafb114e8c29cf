/* Sweeps: one search per point, then the knee by bisection between points. */
#include "hapt/search.h"
#include "hapt/sweep.h"

#include "hapt/progress.h"
#include "view.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#define FLAT 0.01        /* a step within this share of that at the largest value counts as flat */
#define NODE_GAIN 0.02   /* least gain of one more node */
#define WORK_EXCESS 0.02 /* allowed cost of a microbatch above that at the most microbatches */
#define PRECISION 1e-3   /* relative precision of a bisected knee */
#define QUICK 3e6        /* work of the refinement at one point: about 0.3 s */
enum { CHOSEN_POINTS = 9, MOST_NODE_POINTS = 16 };

struct sweeper {
    const struct hapt_env *env;
    const struct hapt_sweep_question *question;
    const struct hapt_sweep_range *range;
    int from, to; /* ends of the link (from: also the subcluster); -1: all */
    struct hapt_arena *arena;
    struct hapt_progress progress;
    long searches;
};

static enum hapt_status list_names(const struct sweeper *sweeper, const char *what)
{
    const struct hapt_profile *profile = sweeper->question->profile;
    char names[400] = "";
    for (int c = 0; c < profile->cluster_count; c++)
        snprintf(names + strlen(names), sizeof names - strlen(names), "%s%s", c ? ", " : "", profile->cluster[c].name);
    char hint[480];
    snprintf(hint, sizeof hint, "the subclusters are %s", names);
    return hapt_fail(HAPT_ERR_USAGE, hint, "--what-if %s: there is no %s \"%s\"", sweeper->range->text, what,
                     sweeper->range->subject);
}

/* True if one of the sweep's subclusters has the network, or the links in nodes, that it sweeps. */
static bool has_inside(const struct sweeper *sweeper)
{
    const struct hapt_profile *profile = sweeper->question->profile;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *its = &profile->cluster[c];
        const int ends = sweeper->range->kind == HAPT_SWEEP_INTER_NODE ? its->nodes : its->devices_per_node;
        if ((sweeper->from < 0 || c == sweeper->from) && ends > 1) return true;
    }
    return false;
}

static enum hapt_status resolve_inside(const struct sweeper *sweeper)
{
    const bool nodes = sweeper->range->kind == HAPT_SWEEP_INTER_NODE;
    if (has_inside(sweeper)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_USAGE, "sweep memory or microbatches, or a network that exists",
                     "--what-if %s: there are no two %s of one %s", sweeper->range->text, nodes ? "nodes" : "devices",
                     nodes ? "subcluster" : "node");
}

/* Finds the subcluster or link of the sweep, and checks that the profile covers it. */
static enum hapt_status resolve(struct sweeper *sweeper)
{
    const struct hapt_profile *profile = sweeper->question->profile;
    const struct hapt_sweep_range *range = sweeper->range;
    const int C = profile->cluster_count;
    sweeper->from = sweeper->to = -1;
    if (hapt_sweep_is_predicted(range->kind) && !sweeper->question->source)
        return hapt_fail(HAPT_ERR_USAGE, "predict: --input m.h5 --cluster C.json --predict",
                         "--what-if %s: the profile does not hold %s", range->text,
                         hapt_sweep_is_inside(range->kind) ? "the networks inside subclusters" : "what hosts cost");
    if (range->kind == HAPT_SWEEP_MICROBATCHES) return HAPT_OK;
    if (range->kind == HAPT_SWEEP_LINK) {
        if (C < 2)
            return hapt_fail(HAPT_ERR_USAGE, "sweep nodes, memory or microbatches",
                             "--what-if %s: one subcluster has no link to another", range->text);
        if (!*range->subject) return HAPT_OK;
        for (int a = 0; a < C; a++) {
            for (int b = 0; b < C; b++) {
                char pair[160];
                snprintf(pair, sizeof pair, "%s-%s", profile->cluster[a].name, profile->cluster[b].name);
                if (a == b || strcmp(pair, range->subject) != 0) continue;
                sweeper->from = a;
                sweeper->to = b;
                return HAPT_OK;
            }
        }
        return list_names(sweeper, "link");
    }
    for (int c = 0; c < C; c++)
        if (strcmp(profile->cluster[c].name, range->subject) == 0) sweeper->from = c;
    if (sweeper->from < 0 && *range->subject) return list_names(sweeper, "subcluster");
    if (hapt_sweep_is_inside(range->kind)) return resolve_inside(sweeper);
    if (sweeper->from < 0) return HAPT_OK; /* all subclusters */
    const int nodes = profile->cluster[sweeper->from].nodes;
    if (range->kind == HAPT_SWEEP_NODES && !sweeper->question->source && range->high > nodes)
        return hapt_fail(HAPT_ERR_USAGE, "use fewer nodes, or predict: --input m.h5 --cluster C.json --predict",
                         "--what-if %s: the profile holds only %d node%s of %s", range->text, nodes,
                         nodes > 1 ? "s" : "", range->subject);
    return HAPT_OK;
}

/* True for the swept links; if no link is swept, for all links between subclusters. */
static bool swept(const struct sweeper *sweeper, int a, int b)
{
    if (a == b) return false;
    return sweeper->range->kind != HAPT_SWEEP_LINK || sweeper->from < 0 || (a == sweeper->from && b == sweeper->to) ||
           (a == sweeper->to && b == sweeper->from);
}

static enum hapt_status change(const struct sweeper *sweeper, double value, struct hapt_search_options *options,
                               struct hapt_arena *scratch, struct hapt_profile **view)
{
    const int C = sweeper->question->profile->cluster_count;
    HAPT_TRY(view_create(sweeper->question->profile, scratch, view));
    switch (sweeper->range->kind) {
    case HAPT_SWEEP_LINK:
        for (int a = 0; a < C; a++)
            for (int b = 0; b < C; b++)
                if (swept(sweeper, a, b)) (*view)->link_bandwidth[a * C + b] = value;
        break;
    case HAPT_SWEEP_NODES: /* larger submeshes then find no devices */
        (*view)->cluster[sweeper->from].nodes = (int)value;
        break;
    case HAPT_SWEEP_MEMORY:
        for (int c = 0; c < C; c++)
            if (sweeper->from < 0 || c == sweeper->from) (*view)->cluster[c].device_memory_bytes = value;
        break;
    case HAPT_SWEEP_MICROBATCHES: options->microbatches = (int)value; break;
    default: HAPT_ASSERT(!"the others are swept by prediction");
    }
    return HAPT_OK;
}

static bool crosses(const struct sweeper *sweeper, const struct hapt_plan_stage *from, const struct hapt_plan_stage *to)
{
    const struct hapt_subclusters a = hapt_plan_stage_subclusters(from), b = hapt_plan_stage_subclusters(to);
    for (int i = 0; i < a.count; i++)
        for (int k = 0; k < b.count; k++)
            if (swept(sweeper, a.index[i], b.index[k])) return true;
    return false;
}

/* The longest transfer over the swept links. Between mixed stages, other links may also count. */
static void find_transfer(const struct sweeper *sweeper, struct hapt_sweep_point *point)
{
    const struct hapt_plan *plan = point->plan;
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        if (!crosses(sweeper, &plan->stage[i], &plan->stage[i + 1])) continue;
        if (plan->stage[i].comm_s <= point->link_s) continue;
        point->link_s = plan->stage[i].comm_s;
        point->link_bytes = sweeper->question->profile->boundary_bytes[plan->stage[i].end_layer - 1];
    }
}

static enum hapt_status make_profile(struct sweeper *sweeper, double value, struct hapt_search_options *options,
                                     struct hapt_arena *scratch, struct hapt_profile **profile)
{
    const struct hapt_sweep_question *question = sweeper->question;
    const enum hapt_sweep_kind kind = sweeper->range->kind;
    if (question->source && kind != HAPT_SWEEP_LINK && kind != HAPT_SWEEP_MICROBATCHES)
        return question->source(question->context, kind, sweeper->from, value, scratch, profile);
    return hapt_env_agree(sweeper->env->world, change(sweeper, value, options, scratch, profile));
}

static enum hapt_status solve(struct sweeper *sweeper, double value, struct hapt_sweep_point *point)
{
    MPI_Comm world = sweeper->env->world;
    struct hapt_search_options options = *sweeper->question->options;
    options.work = QUICK;
    struct hapt_profile *profile;
    struct hapt_arena scratch;
    *point = (struct hapt_sweep_point){.value = value};
    options.may_fail = true;
    hapt_fail_reset();
    hapt_arena_init(&scratch);
    enum hapt_status status = make_profile(sweeper, value, &options, &scratch, &profile);
    if (status == HAPT_OK && sweeper->question->stages)
        status = hapt_env_agree_quietly(
            world, hapt_plan_force(profile, &options, sweeper->question->stages, sweeper->arena, &point->plan));
    else if (status == HAPT_OK)
        status = hapt_plan_search(world, profile, &options, sweeper->arena, &point->plan);
    hapt_arena_release(&scratch);
    if (status == HAPT_ERR_INFEASIBLE || (status == HAPT_ERR_INPUT && sweeper->question->stages)) {
        point->plan = NULL;
        point->obstacle = hapt_arena_strdup(sweeper->arena, hapt_fail_message());
        hapt_fail_reset();
        status = hapt_env_agree(world, point->obstacle ? HAPT_OK : HAPT_ERR_MEMORY);
    }
    if (status == HAPT_OK && point->plan) find_transfer(sweeper, point);
    hapt_progress_update(&sweeper->progress, ++sweeper->searches, sweeper->range->text);
    return status;
}

/* Geometric steps for bandwidths and microbatches, equal steps for nodes and memory; the ends are exact. */
static double value_at(const struct hapt_sweep_range *range, int i, int count)
{
    const double share = count > 1 ? (double)i / (count - 1) : 0;
    const bool factors = range->kind == HAPT_SWEEP_LINK || range->kind == HAPT_SWEEP_MICROBATCHES ||
                         range->kind == HAPT_SWEEP_HOST_BANDWIDTH || hapt_sweep_is_inside(range->kind);
    const bool whole = range->kind == HAPT_SWEEP_NODES || range->kind == HAPT_SWEEP_MICROBATCHES;
    if (i == 0) return range->low;
    if (i == count - 1) return range->high;
    const double value =
        factors ? range->low * pow(range->high / range->low, share) : range->low + share * (range->high - range->low);
    return whole ? round(value) : value;
}

static int count_points(const struct hapt_sweep_range *range)
{
    const double wide = range->high - range->low + 1;
    if (range->low >= range->high) return 1;
    if (range->points > 0) return range->points;
    return range->kind == HAPT_SWEEP_NODES && wide <= MOST_NODE_POINTS ? (int)wide : CHOSEN_POINTS;
}

static enum hapt_status solve_points(struct sweeper *sweeper, int count, struct hapt_sweep *sweep)
{
    for (int i = 0; i < count; i++) {
        const double value = value_at(sweeper->range, i, count);
        if (sweep->count > 0 && value <= sweep->point[sweep->count - 1].value) continue; /* rounded to the same value */
        HAPT_TRY(solve(sweeper, value, &sweep->point[sweep->count]));
        sweep->count++;
    }
    return HAPT_OK;
}

static double sweep_value_s(const struct hapt_sweep *sweep, const struct hapt_plan *plan)
{
    return hapt_search_value_s(sweep->objective, plan);
}

/* The cost that the knee compares: the step; for microbatches, the step per microbatch. */
static double cost(const struct hapt_sweep *sweep, const struct hapt_sweep_point *point)
{
    if (!point->plan) return INFINITY;
    return sweep_value_s(sweep, point->plan) / (sweep->range->kind == HAPT_SWEEP_MICROBATCHES ? point->value : 1);
}

static bool is_flat(const struct hapt_sweep *sweep, const struct hapt_sweep_point *point)
{
    const double bound = sweep->range->kind == HAPT_SWEEP_MICROBATCHES ? WORK_EXCESS : FLAT;
    return hapt_at_most(cost(sweep, point), (1 + bound) * cost(sweep, &sweep->point[sweep->count - 1]));
}

/* False while the link sets t_max, true above. */
static bool is_free(const struct hapt_sweep *sweep, const struct hapt_sweep_point *point)
{
    HAPT_ASSERT(sweep->range->kind == HAPT_SWEEP_LINK);
    return point->plan &&
           !(strcmp(point->plan->limit, "link") == 0 && hapt_at_most(point->plan->t_max_s, point->link_s));
}

typedef bool holds(const struct hapt_sweep *sweep, const struct hapt_sweep_point *point);

/* Narrows the points from - 1 (condition false) and `from` (true) to PRECISION; whole numbers to neighbours. */
static enum hapt_status bisect(struct sweeper *sweeper, const struct hapt_sweep *sweep, holds *condition, int from,
                               struct hapt_sweep_point *low, struct hapt_sweep_point *high)
{
    const bool whole = sweep->range->kind == HAPT_SWEEP_MICROBATCHES;
    *low = sweep->point[from - 1];
    *high = sweep->point[from];
    while (high->value - low->value > (whole ? 1 : PRECISION * high->value)) {
        struct hapt_sweep_point middle;
        const double value = 0.5 * (low->value + high->value);
        HAPT_TRY(solve(sweeper, whole ? floor(value) : value, &middle));
        *(condition(sweep, &middle) ? high : low) = middle;
    }
    return HAPT_OK;
}

/* The first point from which the condition holds to the end; sweep->count: not even at the last. */
static int holds_from(const struct hapt_sweep *sweep, holds *condition)
{
    int from = sweep->count;
    while (from > 0 && condition(sweep, &sweep->point[from - 1])) from--;
    return from;
}

static enum hapt_status find_flat(struct sweeper *sweeper, struct hapt_sweep *sweep)
{
    const struct hapt_sweep_point *last = &sweep->point[sweep->count - 1];
    if (!last->plan || (sweep->range->kind == HAPT_SWEEP_LINK && !is_free(sweep, last))) return HAPT_OK;
    const int from = holds_from(sweep, is_flat);
    if (from == 0) {
        sweep->knee = sweep->point[0].value;
        return HAPT_OK;
    }
    struct hapt_sweep_point low, high;
    HAPT_TRY(bisect(sweeper, sweep, is_flat, from, &low, &high));
    sweep->knee = high.value;
    return HAPT_OK;
}

/* The bandwidth at which a transfer takes exactly t_max, in closed form from the plan just above it. */
static enum hapt_status find_meeting(struct sweeper *sweeper, struct hapt_sweep *sweep)
{
    const int from = holds_from(sweep, is_free);
    if (from == 0 || from == sweep->count) return HAPT_OK;
    struct hapt_sweep_point low, high;
    HAPT_TRY(bisect(sweeper, sweep, is_free, from, &low, &high));
    if (!low.plan) return HAPT_OK;
    const double latency_s = high.link_s - high.link_bytes / high.value;
    const double balance_bandwidth = high.link_bytes / (high.plan->t_max_s - latency_s);
    sweep->balance_bandwidth =
        balance_bandwidth >= low.value && balance_bandwidth <= high.value ? balance_bandwidth : high.value;
    return HAPT_OK;
}

/* The first point from which one more node never gains enough; the last point has no successor. */
static void find_enough_nodes(struct hapt_sweep *sweep)
{
    for (int i = sweep->count - 1; i > 0; i--) {
        const struct hapt_sweep_point *at = &sweep->point[i - 1], *next = &sweep->point[i];
        if (!at->plan || !next->plan) return;
        const double kept =
            pow(sweep_value_s(sweep, next->plan) / sweep_value_s(sweep, at->plan), 1 / (next->value - at->value));
        if (1 - kept >= NODE_GAIN) return;
        sweep->knee = at->value;
    }
}

static enum hapt_status run(struct sweeper *sweeper, struct hapt_sweep *sweep)
{
    const enum hapt_sweep_kind kind = sweeper->range->kind;
    const int count = count_points(sweeper->range);
    sweep->point = hapt_arena_alloc(sweeper->arena, (size_t)count, sizeof *sweep->point);
    HAPT_TRY(hapt_env_agree(sweeper->env->world, sweep->point ? HAPT_OK : HAPT_ERR_MEMORY));
    hapt_progress_init(&sweeper->progress, sweeper->env, "what if", count + (kind == HAPT_SWEEP_NODES ? 0 : 10));
    enum hapt_status status = solve_points(sweeper, count, sweep);
    if (status == HAPT_OK && sweep->count > 1) {
        if (kind == HAPT_SWEEP_NODES)
            find_enough_nodes(sweep);
        else
            status = find_flat(sweeper, sweep);
        if (status == HAPT_OK && kind == HAPT_SWEEP_LINK) status = find_meeting(sweeper, sweep);
    }
    hapt_progress_release(&sweeper->progress);
    return status;
}

enum hapt_status hapt_sweep_check(const struct hapt_sweep_question *question, const struct hapt_sweep_range *range)
{
    struct sweeper sweeper = {.question = question, .range = range};
    return resolve(&sweeper);
}

enum hapt_status hapt_sweep_run(const struct hapt_env *env, const struct hapt_sweep_question *question,
                                const struct hapt_sweep_range *range, struct hapt_arena *arena,
                                struct hapt_sweep **sweep)
{
    struct sweeper sweeper = {.env = env, .question = question, .range = range, .arena = arena};
    struct hapt_sweep *made = hapt_arena_alloc(arena, 1, sizeof *made);
    enum hapt_status status = made ? resolve(&sweeper) : HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_env_agree(env->world, status));
    *made = (struct hapt_sweep){
        .range = range, .objective = question->options->objective, .knee = NAN, .balance_bandwidth = NAN};
    HAPT_TRY(run(&sweeper, made));
    *sweep = made;
    return HAPT_OK;
}
