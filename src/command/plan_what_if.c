/* hapt plan --what-if: runs sweeps and prints them as tables. */
#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "fix.h"
#include "hapt/calibration.h"
#include "hapt/predict.h"
#include "hapt/sweep.h"
#include "plan_explain.h"

/* Inputs of the prediction at a sweep point. */
struct prediction {
    const struct hapt_env *env;
    const struct hapt_config *config;
    const struct hapt_prediction_inputs *inputs;
    struct hapt_efficiency *efficiency; /* NULL: built-in tables */
    struct hapt_shared *newest_shared;  /* before the sweeps; later blocks belong to a point */
};

/* Gives a subcluster's network, or the links in its nodes, this bandwidth. Stages of the subcluster follow, unless the
 * cluster file gives their link. */
static void change_inside(struct hapt_cluster *cluster, int subcluster, enum hapt_sweep_kind kind, double value)
{
    struct hapt_subcluster *its = &cluster->subcluster[subcluster];
    struct hapt_link *own = &cluster->link[subcluster * cluster->count + subcluster];
    const bool wide = kind == HAPT_SWEEP_INTER_NODE;
    double *bandwidth = wide ? &its->inter_node_bandwidth : &its->intra_node_bandwidth;
    if (wide == (its->nodes > 1) && own->bandwidth == *bandwidth) own->bandwidth = value;
    *bandwidth = value;
}

static enum hapt_status change_networks(struct hapt_cluster *cluster, enum hapt_sweep_kind kind, int subcluster,
                                        double value, struct hapt_arena *arena)
{
    const struct hapt_link *link = cluster->link;
    const size_t links = (size_t)cluster->count * (size_t)cluster->count;
    HAPT_NEW(cluster->link, arena, links);
    memcpy(cluster->link, link, links * sizeof *link);
    const struct hapt_collective_model *measured = cluster->collective;
    int untouched = INT_MAX; /* so many ranks may all be beside the swept networks */
    for (int c = 0; c < cluster->count; c++) {
        if (subcluster >= 0 && c != subcluster) continue;
        const int beside = kind == HAPT_SWEEP_INTER_NODE ? cluster->subcluster[c].devices_per_node : 1;
        untouched = beside < untouched ? beside : untouched;
        change_inside(cluster, c, kind, value);
    }
    /* Collectives of more ranks were measured with the networks as they are. */
    const int tables = cluster->collective_count;
    cluster->collective_count = 0;
    HAPT_NEW(cluster->collective, arena, tables + 1);
    for (int i = 0; i < tables; i++)
        if (measured[i].ranks <= untouched) cluster->collective[cluster->collective_count++] = measured[i];
    return HAPT_OK;
}

static enum hapt_status change_cluster(const struct hapt_cluster *cluster, enum hapt_sweep_kind kind, int subcluster,
                                       double value, struct hapt_arena *arena, struct hapt_cluster **changed)
{
    HAPT_NEW(*changed, arena, 1);
    **changed = *cluster;
    HAPT_NEW((*changed)->subcluster, arena, cluster->count);
    memcpy((*changed)->subcluster, cluster->subcluster, (size_t)cluster->count * sizeof *cluster->subcluster);
    if (hapt_sweep_is_inside(kind)) return change_networks(*changed, kind, subcluster, value, arena);
    for (int c = 0; c < cluster->count && kind != HAPT_SWEEP_NODES; c++) {
        struct hapt_subcluster *its = &(*changed)->subcluster[c];
        if (subcluster >= 0 && c != subcluster) continue;
        *(kind == HAPT_SWEEP_MEMORY        ? &its->device.memory_bytes
          : kind == HAPT_SWEEP_HOST_MEMORY ? &its->host_memory_bytes
                                           : &its->host_bandwidth) = value;
    }
    if (kind != HAPT_SWEEP_NODES) return HAPT_OK;
    struct hapt_subcluster *at = &(*changed)->subcluster[subcluster];
    (*changed)->rank_count += ((int)value - at->nodes) * at->devices_per_node;
    at->nodes = (int)value;
    at->host_count = 0;
    return HAPT_OK;
}

/* Predicts a point's profile, once per node; valid until the next point. */
static enum hapt_status predict(void *context, enum hapt_sweep_kind kind, int subcluster, double value,
                                struct hapt_arena *arena, struct hapt_profile **profile)
{
    const struct prediction *prediction = context;
    const struct hapt_env *env = prediction->env;
    const struct hapt_prediction_inputs *inputs = prediction->inputs;
    struct hapt_cluster *cluster;
    struct hapt_profile *made = NULL, *other; /* other: sweeps search once at each point */
    struct hapt_arena own;                    /* the first rank's own copy, if it shares the profile */
    hapt_shared_release_newer(prediction->newest_shared);
    hapt_arena_init(&own);
    enum hapt_status status = change_cluster(inputs->cluster, kind, subcluster, value, arena, &cluster);
    const struct hapt_prediction of = {.config = prediction->config,
                                       .cluster = cluster,
                                       .model = inputs->model,
                                       .layers = inputs->layers,
                                       .efficiency = prediction->efficiency,
                                       .node_rank = env->node_rank};
    if (status == HAPT_OK && env->node_rank == 0)
        status = hapt_phase_predict(&of, env->node_size > 1 ? &own : arena, &made, &other);
    /* If nothing fits at a point, the sweep goes on; any other failure ends it, with its message. */
    const enum hapt_status agreed = hapt_env_agree_quietly(env->world, status);
    status = agreed == HAPT_OK || agreed == HAPT_ERR_INFEASIBLE ? agreed : hapt_env_agree(env->world, status);
    if (status == HAPT_OK) status = hapt_profile_share(env, HAPT_OK, made, arena, profile);
    if (status == HAPT_OK) status = hapt_fix_profile(prediction->config, arena, profile);
    hapt_arena_release(&own);
    return status;
}

/* Subclusters in pipeline order. */
static const char *print_order(const struct hapt_plan *plan, char text[200])
{
    size_t length = 0;
    text[0] = '\0';
    for (int i = 0; i < plan->stage_count && length < 199; i++)
        if (i == 0 || strcmp(plan->stage[i].submesh->name, plan->stage[i - 1].submesh->name) != 0)
            length +=
                (size_t)snprintf(text + length, 200 - length, "%s%s", i ? " > " : "", plan->stage[i].submesh->name);
    return text;
}

static void print_points(const struct hapt_env *env, const struct hapt_sweep *sweep)
{
    const enum hapt_sweep_kind kind = sweep->range->kind;
    static const char *const heads[HAPT_SWEEP_KINDS] = {"bandwidth",   "nodes",     "memory",    "microbatches",
                                                        "host memory", "bandwidth", "bandwidth", "bandwidth"};
    hapt_print(env, "what if %s%s\n", sweep->range->text,
               kind == HAPT_SWEEP_LINK ? " (networks inside subclusters keep their bandwidth)" : "");
    hapt_print(env, "  %12s %10s %10s %12s %10s  %-7s %7s %6s  %s\n", heads[kind], "simulated", "HAPT (13)",
               "microbatch/s", "t_max", "set by", "link", "stages", "order");
    for (int i = 0; i < sweep->count; i++) {
        const struct hapt_sweep_point *point = &sweep->point[i];
        const struct hapt_plan *plan = point->plan;
        char value[32], time[3][32], share[32] = "-", order[200];
        hapt_sweep_value_text(kind, point->value, value);
        if (!plan) {
            hapt_print_wrapped(env, 15, "  %12s  none: %s\n", value, point->obstacle);
            continue;
        }
        if (point->link_s > 0) snprintf(share, sizeof share, "%.1f %%", 100 * point->link_s / plan->t_max_s);
        hapt_print_wrapped(env, 84, "  %12s %10s %10s %12.4g %10s  %-7s %7s %6d  %s\n", value,
                           hapt_units_time(plan->simulated_s, time[0]), hapt_units_time(plan->latency_s, time[1]),
                           hapt_plan_rate(plan), hapt_units_time(plan->t_max_s, time[2]), plan->limit, share,
                           plan->stage_count, print_order(plan, order));
    }
}

static void print_knee(const struct hapt_env *env, const struct hapt_sweep *sweep)
{
    const enum hapt_sweep_kind kind = sweep->range->kind;
    const struct hapt_sweep_point *last = &sweep->point[sweep->count - 1];
    static const char *const flat[HAPT_SWEEP_KINDS] = {
        "the step stays within 1 % of that at the largest bandwidth",
        "no further node gains 2 %",
        "the step stays within 1 % of that with the most memory",
        "a microbatch costs at most 2 % more than with the most",
        "the step stays within 1 % of that with the most memory of a host",
        "the step stays within 1 % of that at the largest bandwidth",
        "the step stays within 1 % of that at the largest bandwidth",
        "the step stays within 1 % of that at the largest bandwidth"};
    static const char *const none[HAPT_SWEEP_KINDS] = {"the link still sets t_max at the largest bandwidth",
                                                       "nodes still gain more than 2 % each at the largest number",
                                                       "",
                                                       "",
                                                       "",
                                                       "",
                                                       "",
                                                       ""};
    char value[32];
    if (sweep->count > 1 && !last->plan)
        hapt_print(env, "  knee: none, there is no plan at the largest value\n");
    else if (sweep->count > 1 && isnan(sweep->knee))
        hapt_print_wrapped(env, 8, "  knee: none, %s\n", none[kind]);
    else if (sweep->count > 1)
        hapt_print_wrapped(env, 8, "  knee: from %s on %s%s\n", hapt_sweep_value_text(kind, sweep->knee, value),
                           flat[kind], sweep->knee > sweep->range->low ? "" : " (the whole range)");
    if (!isnan(sweep->balance_bandwidth))
        hapt_print_wrapped(env, 8,
                           "  at %s the transfer takes as long as the slowest stage; below it the link sets t_max\n",
                           hapt_sweep_value_text(kind, sweep->balance_bandwidth, value));
}

/* In the syntax of --stages. */
static json_t *stages_text(const struct hapt_plan *plan)
{
    json_t *pieces = json_array();
    for (int i = 0; pieces && i < plan->stage_count; i++) {
        char text[HAPT_PLAN_STAGE_CHARS];
        json_array_append_new(pieces, json_string(hapt_plan_stage_text(&plan->stage[i], text)));
    }
    return pieces;
}

static json_t *point_object(const struct hapt_sweep_point *point)
{
    const struct hapt_plan *plan = point->plan;
    if (!plan) return json_pack("{s:f, s:n, s:s}", "value", point->value, "latency_s", "reason", point->obstacle);
    return json_pack("{s:f, s:f, s:f, s:f, s:s, s:f, s:o, s:o}", "value", point->value, "latency_s", plan->latency_s,
                     "simulated_s", plan->simulated_s, "t_max_s", plan->t_max_s, "limit", plan->limit, "link_share",
                     plan->t_max_s > 0 ? point->link_s / plan->t_max_s : 0, "microbatches_per_s",
                     hapt_plan_number(hapt_plan_rate(plan)), "stages", stages_text(plan));
}

static json_t *sweep_object(const struct hapt_sweep *sweep)
{
    static const char *const kinds[HAPT_SWEEP_KINDS] = {"link",        "nodes",          "memory",     "microbatches",
                                                        "host-memory", "host-bandwidth", "inter-node", "intra-node"};
    static const char *const units[HAPT_SWEEP_KINDS] = {"byte/s", "", "byte", "", "byte", "byte/s", "byte/s", "byte/s"};
    const enum hapt_sweep_kind kind = sweep->range->kind;
    json_t *points = json_array();
    for (int i = 0; points && i < sweep->count; i++) json_array_append_new(points, point_object(&sweep->point[i]));
    json_t *object =
        json_pack("{s:s, s:s, s:s, s:s, s:o, s:o}", "what", kinds[kind], "subject", sweep->range->subject, "text",
                  sweep->range->text, "units", units[kind], "points", points, "knee", hapt_plan_number(sweep->knee));
    if (object && kind == HAPT_SWEEP_LINK)
        json_object_set_new(object, "link_sets_pace_below", hapt_plan_number(sweep->balance_bandwidth));
    return object;
}

static enum hapt_status add_object(const struct hapt_env *env, const struct hapt_sweep *sweep, json_t *extra)
{
    if (env->world_rank != 0 || !env->quiet) return HAPT_OK;
    json_t *list = json_object_get(extra, "what_if");
    if (!list && json_object_set_new(extra, "what_if", json_array()) == 0) list = json_object_get(extra, "what_if");
    return list && json_array_append_new(list, sweep_object(sweep)) == 0
               ? HAPT_OK
               : hapt_fail(HAPT_ERR_MEMORY, NULL, "the sweep's JSON could not be built");
}

static enum hapt_status check(const struct hapt_config *config, const struct hapt_profile *profile,
                              const struct hapt_prediction_inputs *inputs, struct hapt_arena *arena)
{
    const struct hapt_sweep_question question = {.profile = profile, .source = inputs->cluster ? predict : NULL};
    struct hapt_sweep_range *range;
    int count;
    if (!hapt_config_text(config, "what-if")) return HAPT_OK;
    HAPT_TRY(hapt_sweep_parse(hapt_config_text(config, "what-if"), arena, &range, &count));
    for (int i = 0; i < count; i++) HAPT_TRY(hapt_sweep_check(&question, &range[i]));
    return HAPT_OK;
}

enum hapt_status hapt_plan_what_if_check(const struct hapt_env *env, const struct hapt_config *config,
                                         const struct hapt_profile *profile,
                                         const struct hapt_prediction_inputs *inputs, struct hapt_arena *arena)
{
    return hapt_env_agree(env->world, check(config, profile, inputs, arena));
}

enum hapt_status hapt_plan_sweep(const struct hapt_env *env, const struct hapt_config *config, const char *text,
                                 const struct hapt_profile *profile, const struct hapt_prediction_inputs *inputs,
                                 struct hapt_arena *arena, json_t *extra, struct hapt_plan_sweeps *sweeps)
{
    struct hapt_strategy_options options;
    struct hapt_sweep_range *range;
    struct prediction prediction = {
        .env = env, .config = config, .inputs = inputs, .newest_shared = hapt_shared_newest()};
    int count = 0;
    const char *path = hapt_config_text(config, "efficiency");
    enum hapt_status status = hapt_sweep_parse(text, arena, &range, &count);
    if (status == HAPT_OK) status = hapt_phase_strategy(config, profile, NULL, arena, &options);
    if (status == HAPT_OK && inputs->cluster && path)
        status = hapt_efficiency_load(path, arena, &prediction.efficiency);
    if (status == HAPT_OK) {
        sweeps->sweep = hapt_arena_alloc(arena, (size_t)count, sizeof *sweeps->sweep);
        status = sweeps->sweep ? HAPT_OK : HAPT_ERR_MEMORY;
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    options.search.any_loops = false; /* a sweep searches plans without loops */
    const struct hapt_sweep_question question = {.profile = profile,
                                                 .options = &options.search,
                                                 .stages = hapt_config_text(config, "stages"),
                                                 .source = inputs->cluster ? predict : NULL,
                                                 .context = &prediction};
    for (int i = 0; i < count; i++) {
        struct hapt_sweep *sweep;
        HAPT_TRY(hapt_sweep_run(env, &question, &range[i], arena, &sweep));
        sweeps->sweep[sweeps->count++] = sweep;
        if (!extra) continue;
        print_points(env, sweep);
        print_knee(env, sweep);
        HAPT_TRY(hapt_env_agree(env->world, add_object(env, sweep, extra)));
    }
    hapt_shared_release_newer(prediction.newest_shared);
    return HAPT_OK;
}
