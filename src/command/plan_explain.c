/* hapt plan --explain: prints the plan's limit, its rivals, and its gain over separate subclusters. */
#include "plan_explain.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/rivals.h"
#include "hapt/sweep.h"

enum hapt_status hapt_plan_explain_options(const struct hapt_config *config, struct hapt_arena *arena)
{
    const char *sweeps = hapt_config_text(config, "what-if"), *strategy = hapt_config_text(config, "strategy");
    struct hapt_sweep_range *range;
    int count;
    if (strcmp(hapt_config_text(config, "explain"), "all") != 0 &&
        !(hapt_phase_explains(config) && hapt_config_bool(config, "json")))
        HAPT_TRY(hapt_phase_refuse_unused(config, "only the programs of --explain all use it", "full"));
    if (!sweeps && !hapt_phase_explains(config)) return HAPT_OK;
    const char *name = sweeps ? "what-if" : "explain";
    if (strcmp(strategy, "hapt") != 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--%s uses the search of --strategy hapt, not of %s",
                         name, strategy);
    HAPT_TRY(hapt_phase_refuse_unused(config, "--explain and --what-if search on the unchanged profile",
                                      "granularity ignore-communication"));
    return sweeps ? hapt_sweep_parse(sweeps, arena, &range, &count) : HAPT_OK;
}

double hapt_plan_ratio(double x, double y)
{
    if (x == y) return 1; /* both 0 or both infinite */
    return x / y;
}

json_t *hapt_plan_number(double value)
{
    return isfinite(value) ? json_real(value) : json_null();
}

static bool is_limited_by(const struct hapt_plan *plan, const char *what)
{
    return strcmp(plan->limit, what) == 0;
}

/* Subcluster that receives the boundary after a stage. */
static const char *receiver(const struct hapt_plan *plan, int stage)
{
    return plan->stage[stage + 1].submesh->name;
}

void hapt_plan_print_link_limit(const struct hapt_env *env, const struct hapt_profile *profile,
                                const struct hapt_plan *plan)
{
    struct hapt_limit limit;
    char time[2][32], rate[2][32], size[32], cure[96] = "more bandwidth does not help, the latency alone is longer";
    if (!is_limited_by(plan, "link")) return;
    hapt_plan_limit(profile, plan, &limit);
    if (isfinite(limit.knee_bandwidth))
        snprintf(cure, sizeof cure, "%s instead of %s would suffice", hapt_units_bits(limit.knee_bandwidth, rate[0]),
                 hapt_units_bits(limit.link_bandwidth, rate[1]));
    hapt_print_wrapped(
        env, 6,
        "  the link is the limit: %s to %s takes %s for %s per microbatch, %.4g times the slowest stage's %s; %s\n",
        plan->stage[limit.link_stage].submesh->name, receiver(plan, limit.link_stage),
        hapt_units_time(limit.link_s, time[0]), hapt_units_bytes(limit.link_bytes, size),
        limit.compute_s > 0 ? limit.link_s / limit.compute_s : INFINITY, hapt_units_time(limit.compute_s, time[1]),
        cure);
}

static void print_limit(const struct hapt_env *env, const struct hapt_plan *plan, const struct hapt_limit *limit)
{
    char time[3][32], size[2][32], rate[2][32], slow[HAPT_PLAN_STAGE_TITLE];
    const struct hapt_plan_stage *tight = &plan->stage[limit->memory_stage];
    hapt_print(env, "why: t_max, %s per microbatch, is set by %s\n", hapt_units_time(plan->t_max_s, time[0]),
               plan->limit);
    hapt_print_wrapped(env, 11, "  compute  %s takes longest: %s, %.1f %% of t_max\n",
                       hapt_plan_stage_title(plan, limit->compute_stage, slow),
                       hapt_units_time(limit->compute_s, time[1]),
                       100 * hapt_plan_ratio(limit->compute_s, plan->t_max_s));
    if (limit->link_stage >= 0)
        hapt_print_wrapped(
            env, 11,
            "  link     %s to %s after stage %d takes longest: %s for %s at %s, %.1f %% of t_max; as long as "
            "the slowest stage at %s\n",
            plan->stage[limit->link_stage].submesh->name, receiver(plan, limit->link_stage), limit->link_stage,
            hapt_units_time(limit->link_s, time[2]), hapt_units_bytes(limit->link_bytes, size[0]),
            hapt_units_bits(limit->link_bandwidth, rate[0]), 100 * hapt_plan_ratio(limit->link_s, plan->t_max_s),
            isfinite(limit->knee_bandwidth) ? hapt_units_bits(limit->knee_bandwidth, rate[1]) : "no bandwidth");
    hapt_print_wrapped(env, 11, "  memory   stage %d has the least left: %s of %s with %d microbatches in flight\n",
                       limit->memory_stage, hapt_units_bytes(limit->memory_left_bytes, size[0]),
                       hapt_units_bytes(tight->device_memory_bytes, size[1]), tight->warmup);
    if (limit->memory_limiting_stage >= 0)
        hapt_print_wrapped(env, 11, "           a smaller t_max needs one more launch, for which stage %d lacks %s\n",
                           limit->memory_limiting_stage, hapt_units_bytes(limit->missing_bytes, size[0]));
    if (limit->idle_devices > 0)
        hapt_print(env, "  devices  %d of %d idle\n", limit->idle_devices, limit->devices);
    else
        hapt_print(env, "  devices  all %d busy\n", limit->devices);
}

/* Stages that recompute: what it costs, and what keeping all activations would need. */
static void print_recomputing(const struct hapt_env *env, const struct hapt_profile *profile,
                              const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        struct hapt_kept kept;
        char time[32], need[32], have[32], units[64];
        if (!hapt_plan_kept(profile, plan, i, HAPT_KEPT_ACTIVATIONS, &kept)) continue;
        const int selective = hapt_layout_selective_units(&stage->layout);
        snprintf(units, sizeof units, selective > 0 ? "%d recompute, %d of them light operators only" : "%d recompute",
                 stage->layout.unit_count, selective);
        if (isfinite(kept.more_s))
            hapt_print_wrapped(env, 11,
                               "  blocks   stage %d: %s, %s more per microbatch; keeping all activations "
                               "would need %s of %s per device\n",
                               i, units, hapt_units_time(kept.more_s, time), hapt_units_bytes(kept.memory_bytes, need),
                               hapt_units_bytes(stage->device_memory_bytes, have));
        else
            hapt_print_wrapped(env, 11,
                               "  blocks   stage %d: %s; keeping all activations would not fit with one "
                               "microbatch in flight\n",
                               i, units);
    }
}

static const char *name_weights_at(const struct hapt_plan_stage *stage)
{
    return stage->layout.weights_at == HAPT_WEIGHTS_SHARDED     ? "sharded"
           : stage->layout.weights_at == HAPT_GRADIENTS_ON_HOST ? "on the host, with their gradients"
                                                                : "on the host";
}

/* Stages whose weights move: what it costs, and what keeping them on each device would need. */
static void print_moving(const struct hapt_env *env, const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        struct hapt_kept kept;
        char time[32], need[32], have[32];
        if (!hapt_plan_kept(profile, plan, i, HAPT_KEPT_WEIGHTS, &kept)) continue;
        if (isfinite(kept.more_s))
            hapt_print_wrapped(env, 11,
                               "  weights  stage %d: %s, %s more per microbatch; keeping them would need %s of %s per "
                               "device\n",
                               i, name_weights_at(stage), hapt_units_time(kept.more_s, time),
                               hapt_units_bytes(kept.memory_bytes, need),
                               hapt_units_bytes(stage->device_memory_bytes, have));
        else
            hapt_print_wrapped(env, 11,
                               "  weights  stage %d: %s; keeping them would not fit with one microbatch in flight\n", i,
                               name_weights_at(stage));
    }
}

/* The stage with the most work once a step. */
static int busiest_once(const struct hapt_plan *plan)
{
    int most = 0;
    for (int i = 1; i < plan->stage_count; i++)
        if (plan->stage[i].step_s - plan->stage[i].tied_s > plan->stage[most].step_s - plan->stage[most].tied_s)
            most = i;
    return most;
}

static void print_once(const struct hapt_env *env, const struct hapt_plan *plan, double exposed_s)
{
    const int i = busiest_once(plan);
    char longest[32], exposed[32];
    if (plan->stage[i].step_s <= plan->stage[i].tied_s) return;
    hapt_print_wrapped(env, 11,
                       "  updates  sums of gradients, updates%s: at most %s a step, of stage %d; the step is %s "
                       "(%.1f %%) longer for them\n",
                       plan->host_update  ? " on the hosts"
                       : plan->host_state ? " and copies of the optimizer state"
                                          : "",
                       hapt_units_time(plan->stage[i].step_s - plan->stage[i].tied_s, longest), i,
                       hapt_units_time(exposed_s, exposed), 100 * exposed_s / plan->simulated_s);
}

static void print_rivals(const struct hapt_env *env, enum hapt_objective objective, const struct hapt_rivals *rivals)
{
    char time[2][32];
    hapt_print(env, "rivals: the best plans of other kinds, by %s\n",
               objective == HAPT_OBJECTIVE_STEP ? "simulated step" : "HAPT (13)");
    if (rivals->count == 0) hapt_print(env, "  none: there is only one plan\n");
    for (int i = 0; i < rivals->count; i++) {
        const struct hapt_rival *rival = &rivals->rival[i];
        if (!rival->plan) {
            hapt_print_wrapped(env, 13, "  %9s  %s\n             %s\n", "none", rival->what, rival->reason);
            continue;
        }
        char step[64] = "not simulated"; /* the search did not need its step */
        if (isfinite(rival->plan->simulated_s))
            snprintf(step, sizeof step, "simulated step %s", hapt_units_time(rival->plan->simulated_s, time[0]));
        hapt_print_wrapped(env, 13, "  %+7.2f %%  %s: %s (HAPT (13): %s), %d stages%s\n             %s\n",
                           100 * rival->loss, rival->what, step, hapt_units_time(rival->plan->latency_s, time[1]),
                           rival->plan->stage_count, rival->fits ? "" : ", does not fit", rival->reason);
    }
}

static void print_worth(const struct hapt_env *env, const struct hapt_profile *profile,
                        const struct hapt_join_benefit *worth)
{
    hapt_print(env, "is it worth it: microbatches per second, simulated\n");
    hapt_print(env, "  %12.4g  this plan\n", worth->together_per_s);
    for (int c = 0; c < worth->subclusters; c++) {
        const struct hapt_plan *alone = worth->alone[c];
        if (alone)
            hapt_print_wrapped(env, 16, "  %12.4g  %s alone: this plan is %.3g times as fast\n", hapt_plan_rate(alone),
                               profile->cluster[c].name, hapt_plan_ratio(worth->together_per_s, hapt_plan_rate(alone)));
        else
            hapt_print_wrapped(env, 16, "  %12s  %s alone: %s\n", "-", profile->cluster[c].name, worth->obstacle[c]);
    }
    if (worth->copies > 1)
        hapt_print_wrapped(
            env, 16,
            "  %12.4g  %d separate jobs side by side, each with its own model: this plan is %.3g times as fast\n",
            worth->apart_per_s, worth->copies, hapt_plan_ratio(worth->together_per_s, worth->apart_per_s));
    else if (worth->subclusters > 1)
        hapt_print(env, "  %12s  separate jobs: %s subcluster can hold the model alone\n", "-",
                   worth->copies == 1 ? "only one" : "no");
}

static json_t *limit_object(const struct hapt_plan *plan, const struct hapt_limit *limit)
{
    json_t *object =
        json_pack("{s:s, s:i, s:f, s:i, s:f, s:i, s:i}", "kind", plan->limit, "compute_stage", limit->compute_stage,
                  "compute_s", limit->compute_s, "memory_stage", limit->memory_stage, "memory_left_bytes",
                  limit->memory_left_bytes, "devices", limit->devices, "idle_devices", limit->idle_devices);
    if (object && limit->link_stage >= 0) {
        json_object_update_new(object, json_pack("{s:i, s:f, s:f, s:f, s:o}", "link_stage", limit->link_stage, "link_s",
                                                 limit->link_s, "link_bytes", limit->link_bytes,
                                                 "link_bandwidth_bytes_per_s", limit->link_bandwidth, "link_share",
                                                 hapt_plan_number(hapt_plan_ratio(limit->link_s, plan->t_max_s))));
        if (isfinite(limit->knee_bandwidth))
            json_object_set_new(object, "knee_bandwidth_bytes_per_s", json_real(limit->knee_bandwidth));
    }
    if (object && limit->memory_limiting_stage >= 0)
        json_object_update_new(object, json_pack("{s:i, s:f}", "waiting_stage", limit->memory_limiting_stage,
                                                 "missing_bytes", limit->missing_bytes));
    return object;
}

static json_t *recomputing_list(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    json_t *list = json_array();
    struct hapt_kept kept;
    for (int i = 0; list && i < plan->stage_count; i++)
        if (hapt_plan_kept(profile, plan, i, HAPT_KEPT_ACTIVATIONS, &kept))
            json_array_append_new(list,
                                  json_pack("{s:i, s:i, s:o, s:o}", "stage", i, "units",
                                            plan->stage[i].layout.unit_count, "more_s", hapt_plan_number(kept.more_s),
                                            "kept_memory_bytes", hapt_plan_number(kept.memory_bytes)));
    return list;
}

static json_t *moving_list(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    json_t *list = json_array();
    struct hapt_kept kept;
    for (int i = 0; list && i < plan->stage_count; i++)
        if (hapt_plan_kept(profile, plan, i, HAPT_KEPT_WEIGHTS, &kept))
            json_array_append_new(list,
                                  json_pack("{s:i, s:s, s:o, s:o}", "stage", i, "weights",
                                            name_weights_at(&plan->stage[i]), "more_s", hapt_plan_number(kept.more_s),
                                            "kept_memory_bytes", hapt_plan_number(kept.memory_bytes)));
    return list;
}

static json_t *rival_object(const struct hapt_rival *rival)
{
    if (!rival->plan) return json_pack("{s:s, s:s, s:n}", "what", rival->what, "reason", rival->reason, "plan");
    json_t *object = json_pack("{s:s, s:s, s:b, s:f, s:f, s:f, s:f, s:f, s:f, s:o}", "what", rival->what, "reason",
                               rival->reason, "fits", rival->fits, "latency_s", rival->plan->latency_s, "simulated_s",
                               rival->plan->simulated_s, "loss", rival->loss, "pace_s", rival->steady_s, "fill_s",
                               rival->fill_s, "transfer_s", rival->transfer_s, "plan", hapt_plan_json(rival->plan));
    if (object && !rival->fits)
        json_object_update_new(
            object, json_pack("{s:i, s:f}", "short_stage", rival->short_stage, "short_bytes", rival->short_bytes));
    return object;
}

static json_t *worth_object(const struct hapt_profile *profile, const struct hapt_join_benefit *worth)
{
    json_t *alone = json_array();
    for (int c = 0; alone && c < worth->subclusters; c++) {
        const struct hapt_plan *plan = worth->alone[c];
        const char *name = profile->cluster[c].name;
        json_array_append_new(alone, plan ? json_pack("{s:s, s:f, s:f, s:o}", "subcluster", name, "latency_s",
                                                      plan->latency_s, "simulated_s", plan->simulated_s,
                                                      "microbatches_per_s", hapt_plan_number(hapt_plan_rate(plan)))
                                          : json_pack("{s:s, s:s}", "subcluster", name, "reason", worth->obstacle[c]));
    }
    json_t *object = json_pack("{s:o, s:o, s:o, s:i}", "together_microbatches_per_s",
                               hapt_plan_number(worth->together_per_s), "alone", alone, "apart_microbatches_per_s",
                               hapt_plan_number(worth->apart_per_s), "copies", worth->copies);
    if (object && worth->best >= 0)
        json_object_update_new(
            object,
            json_pack("{s:s, s:o, s:o}", "best_alone", profile->cluster[worth->best].name, "gain_over_best_alone",
                      hapt_plan_number(hapt_plan_ratio(worth->together_per_s, worth->alone_per_s)), "gain_over_apart",
                      hapt_plan_number(hapt_plan_ratio(worth->together_per_s, worth->apart_per_s))));
    return object;
}

static enum hapt_status make_object(const struct hapt_profile *profile, const struct hapt_plan *plan,
                                    const struct hapt_limit *limit, const struct hapt_rivals *rivals,
                                    const struct hapt_join_benefit *worth, double exposed_s, json_t *extra)
{
    const struct hapt_plan_stage *once = &plan->stage[busiest_once(plan)];
    json_t *list = json_array();
    for (int i = 0; list && i < rivals->count; i++) json_array_append_new(list, rival_object(&rivals->rival[i]));
    json_t *object = json_pack("{s:o, s:o, s:o, s:{s:f, s:f}, s:o, s:o}", "limit", limit_object(plan, limit),
                               "recomputing", recomputing_list(profile, plan), "weights", moving_list(profile, plan),
                               "updates", "longest_s", once->step_s - once->tied_s, "exposed_s", exposed_s, "worth",
                               worth_object(profile, worth), "rivals", list);
    return json_object_set_new(extra, "explain", object) == 0
               ? HAPT_OK
               : hapt_fail(HAPT_ERR_MEMORY, NULL, "the explanation's JSON could not be built");
}

enum hapt_status hapt_plan_explain(const struct hapt_env *env, const struct hapt_config *config,
                                   const struct hapt_profile *profile, const struct hapt_plan *plan,
                                   struct hapt_arena *arena, json_t *extra)
{
    struct hapt_strategy_options options;
    struct hapt_limit limit;
    struct hapt_rivals *rivals;
    struct hapt_join_benefit *worth;
    double exposed_s;
    HAPT_TRY(hapt_env_agree(env->world, hapt_phase_strategy(config, profile, NULL, arena, &options)));
    HAPT_TRY(hapt_plan_join_benefit(env, profile, &options.search, plan, arena, &worth));
    HAPT_TRY(hapt_plan_rivals(env, profile, &options.search, plan, worth, hapt_config_text(config, "stages") != NULL,
                              arena, &rivals));
    HAPT_TRY(hapt_env_agree(env->world, hapt_plan_exposed(plan, &exposed_s)));
    hapt_plan_limit(profile, plan, &limit);
    print_limit(env, plan, &limit);
    print_recomputing(env, profile, plan);
    print_moving(env, profile, plan);
    print_once(env, plan, exposed_s);
    print_rivals(env, options.search.objective, rivals);
    print_worth(env, profile, worth);
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0 && env->quiet)
        status = make_object(profile, plan, &limit, rivals, worth, exposed_s, extra);
    return hapt_env_agree(env->world, status);
}
