/* Finds what limits a plan, and explains why a rival is worse. */
#include "rivals.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* Memory sets t_max: at the next smaller value some transfer needs one more launch. Finds the stage that cannot hold
 * it. */
static void find_memory_limit(const struct hapt_plan *plan, struct hapt_limit *limit)
{
    double next_s = 0; /* the largest threshold (2 c, c / epsilon) up to this t_max; launch counts differ below it */
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const double comm_s = plan->stage[i].comm_s;
        const double threshold[2] = {2 * comm_s, comm_s / plan->hide_threshold};
        for (int k = 0; k < 2; k++)
            if (isfinite(threshold[k]) && hapt_at_most(threshold[k], plan->t_max_s))
                next_s = fmax(next_s, threshold[k]);
    }
    const double faster_s = next_s * (1 - 1e-9);
    int warmup = plan->stage[plan->stage_count - 1].warmup;
    for (int i = plan->stage_count - 2; i >= 0; i--) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        warmup += hapt_schedule_delta(plan->schedule, stage->comm_s, faster_s, plan->hide_threshold);
        if (warmup > plan->microbatches) warmup = plan->microbatches;
        const double missing = stage->parameter_bytes + warmup * stage->activation_bytes - stage->device_memory_bytes;
        if (missing <= limit->missing_bytes) continue;
        limit->memory_limiting_stage = i;
        limit->missing_bytes = missing;
    }
}

static void find_link(const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_limit *limit)
{
    const struct hapt_plan_stage *stage = &plan->stage[limit->link_stage];
    int deciding[2];
    hapt_profile_boundary_s(profile, stage->end_layer - 1, hapt_plan_stage_subclusters(stage),
                            hapt_plan_stage_subclusters(&stage[1]), deciding);
    const int link = deciding[0] * profile->cluster_count + deciding[1];
    const double spare_s = limit->compute_s - profile->link_latency[link];
    limit->link_bytes = profile->boundary_bytes[stage->end_layer - 1];
    limit->link_bandwidth = profile->link_bandwidth[link];
    limit->knee_bandwidth = spare_s > 0 ? limit->link_bytes / spare_s : INFINITY;
}

void hapt_plan_limit(const struct hapt_profile *profile, const struct hapt_plan *plan, struct hapt_limit *limit)
{
    double least_left = INFINITY;
    *limit = (struct hapt_limit){.link_stage = -1, .memory_limiting_stage = -1};
    for (int c = 0; c < profile->cluster_count; c++)
        limit->devices += profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
    limit->idle_devices = limit->devices;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const double room = stage->device_memory_bytes;
        const double left = room > 0 ? (room - stage->memory_bytes) / room : 0;
        limit->idle_devices -= hapt_plan_submesh_size(stage->submesh);
        if (stage->compute_s > limit->compute_s) {
            limit->compute_stage = i;
            limit->compute_s = stage->compute_s;
        }
        if (i + 1 < plan->stage_count && (limit->link_stage < 0 || stage->comm_s > limit->link_s)) {
            limit->link_stage = i;
            limit->link_s = stage->comm_s;
        }
        if (left >= least_left) continue;
        least_left = left;
        limit->memory_stage = i;
        limit->memory_left_bytes = room - stage->memory_bytes;
    }
    if (limit->link_stage >= 0) find_link(profile, plan, limit);
    if (strcmp(plan->limit, "memory") == 0) find_memory_limit(plan, limit);
}

/* The cell of a stage in the row of its submesh and layout; false: there is no such row. */
static bool find_cell(const struct hapt_profile_cluster *table, const struct hapt_profile *profile,
                      const struct hapt_plan_stage *stage, size_t *cell)
{
    for (int s = 0; s < table->submesh_count; s++) {
        if (!hapt_plan_stage_runs(stage, &table->submesh[s])) continue;
        *cell = hapt_profile_index(profile, s, stage->first_layer, stage->end_layer - 1);
        return true;
    }
    return false;
}

static double cell_s(const struct hapt_plan *plan, const struct hapt_profile_cluster *table, size_t cell)
{
    return plan->split ? hapt_profile_split_time_s(table, cell) : table->stage_time[cell];
}

bool hapt_plan_kept(const struct hapt_profile *profile, const struct hapt_plan *plan, int stage,
                    enum hapt_kept_kind kind, struct hapt_kept *kept)
{
    const struct hapt_plan_stage *its = &plan->stage[stage];
    struct hapt_plan_stage keeping = *its;
    size_t now, without;
    const bool weights = kind == HAPT_KEPT_WEIGHTS;
    if (weights)
        keeping.layout.weights_at = HAPT_WEIGHTS_RESIDENT;
    else
        keeping.layout.recompute = 0;
    if (its->submesh->part_count != 1) return false;
    if (weights ? !hapt_weights_move(its->layout.weights_at) : its->layout.unit_count == 0) return false;
    const struct hapt_profile_cluster *table = &profile->cluster[its->submesh->subcluster[0]];
    if (!find_cell(table, profile, its, &now) || !find_cell(table, profile, &keeping, &without)) return false;
    *kept = (struct hapt_kept){NAN, NAN};
    if (!isfinite(table->stage_time[without])) return true;
    const double parameter = plan->split ? table->split_parameter_bytes[without] : table->parameter_bytes[without],
                 waiting = plan->split ? its->weight_slots * table->weight_slot_bytes[without] : 0;
    kept->more_s = cell_s(plan, table, now) - cell_s(plan, table, without);
    kept->memory_bytes = parameter + waiting + hapt_plan_stage_slots(its) * table->activation_bytes[without];
    return true;
}

struct sentence {
    char text[1024];
    size_t length;
};

static void say(struct sentence *sentence, const char *format, ...) __attribute__((format(printf, 2, 3)));
static void say(struct sentence *sentence, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int more =
        vsnprintf(sentence->text + sentence->length, sizeof sentence->text - sentence->length, format, arguments);
    va_end(arguments);
    sentence->length += more > 0 ? (size_t)more : 0;
    if (sentence->length >= sizeof sentence->text) sentence->length = sizeof sentence->text - 1;
}

static void say_t_max(struct sentence *sentence, const struct hapt_profile *profile, const struct hapt_plan *plan,
                      const struct hapt_plan *rival)
{
    struct hapt_limit limit;
    char stage[HAPT_PLAN_STAGE_TITLE], size[32], time[2][32];
    hapt_plan_limit(profile, rival, &limit);
    hapt_units_time(plan->t_max_s, time[1]);
    if (strcmp(rival->limit, "compute") == 0)
        say(sentence, "%s computes %s per microbatch against a t_max of %s",
            hapt_plan_stage_title(rival, limit.compute_stage, stage), hapt_units_time(limit.compute_s, time[0]),
            time[1]);
    else if (strcmp(rival->limit, "link") == 0)
        say(sentence, "%s takes %s to send %s per microbatch against a t_max of %s",
            hapt_plan_stage_title(rival, limit.link_stage, stage), hapt_units_time(limit.link_s, time[0]),
            hapt_units_bytes(limit.link_bytes, size), time[1]);
    else if (limit.memory_limiting_stage >= 0)
        say(sentence, "limited by memory: its t_max is %s against %s; with less, %s would exceed its memory by %s",
            hapt_units_time(rival->t_max_s, time[0]), time[1],
            hapt_plan_stage_title(rival, limit.memory_limiting_stage, stage),
            hapt_units_bytes(limit.missing_bytes, size));
    else
        say(sentence, "limited by memory to a t_max of %s against %s", hapt_units_time(rival->t_max_s, time[0]),
            time[1]);
}

/* Bytes over all boundaries between different subclusters, and over all others. */
static void count_bytes(const struct hapt_profile *profile, const struct hapt_plan *plan, double bytes[2])
{
    bytes[0] = bytes[1] = 0;
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        int link[2];
        hapt_profile_boundary_s(profile, stage->end_layer - 1, hapt_plan_stage_subclusters(stage),
                                hapt_plan_stage_subclusters(&stage[1]), link);
        bytes[link[0] == link[1]] += profile->boundary_bytes[stage->end_layer - 1];
    }
}

static void say_transfer(struct sentence *sentence, const struct hapt_profile *profile, const struct hapt_plan *plan,
                         const struct hapt_plan *rival, double more_s)
{
    double here[2], there[2];
    char size[2][32], time[32];
    count_bytes(profile, plan, here);
    count_bytes(profile, rival, there);
    const int kind = there[0] > here[0] ? 0 : 1;
    say(sentence, "transfers take %s longer (", hapt_units_time(more_s, time));
    if (there[kind] > here[kind])
        say(sentence, "%s %s subclusters against %s)", hapt_units_bytes(there[kind], size[0]),
            kind == 0 ? "between" : "inside", hapt_units_bytes(here[kind], size[1]));
    else
        say(sentence, "over slower links)");
}

static void say_short(struct sentence *sentence, struct hapt_rival *rival)
{
    char stage[HAPT_PLAN_STAGE_TITLE], need[32], have[32], over[32];
    for (int i = 0; i < rival->plan->stage_count; i++) {
        const struct hapt_plan_stage *at = &rival->plan->stage[i];
        const double excess = at->memory_bytes - at->device_memory_bytes;
        if (excess <= rival->short_bytes) continue;
        rival->short_stage = i;
        rival->short_bytes = excess;
    }
    const struct hapt_plan_stage *at = &rival->plan->stage[rival->short_stage];
    say(sentence, "out of memory: %s needs %s of %s per device, %s too much, with %d microbatches in flight",
        hapt_plan_stage_title(rival->plan, rival->short_stage, stage), hapt_units_bytes(at->memory_bytes, need),
        hapt_units_bytes(at->device_memory_bytes, have), hapt_units_bytes(rival->short_bytes, over), at->warmup);
}

/* Names each part that is a tenth or more of the loss, the largest first. */
static void say_parts(struct sentence *sentence, const struct hapt_profile *profile, const struct hapt_plan *plan,
                      const struct hapt_rival *rival)
{
    double part[3] = {rival->steady_s, rival->fill_s, rival->transfer_s}, left_s = part[0] + part[1] + part[2];
    char time[32];
    if (part[0] <= 0 && part[1] <= 0 && part[2] <= 0) { /* the simulated step is longer, but no part of the formula */
        say(sentence, "its stages wait longer for each other in the simulated step");
        return;
    }
    const double enough_s = 0.1 * left_s;
    for (int said = 0; said < 3; said++) {
        int k = 0;
        for (int other = 1; other < 3; other++)
            if (part[other] > part[k]) k = other;
        if (said > 0 && part[k] < enough_s) break;
        if (said > 0) say(sentence, "; ");
        if (k == 0) say_t_max(sentence, profile, plan, rival->plan);
        if (k == 1)
            say(sentence, "its %d stages take %s longer to fill and drain", rival->plan->stage_count,
                hapt_units_time(part[1], time));
        if (k == 2) say_transfer(sentence, profile, plan, rival->plan, part[2]);
        part[k] = -INFINITY;
    }
    if (rival->steady_s < 0 && !hapt_at_most(plan->t_max_s, rival->plan->t_max_s))
        say(sentence, "; its t_max is %s smaller", hapt_units_time(plan->t_max_s - rival->plan->t_max_s, time));
}

enum hapt_status rivals_judge(const struct hapt_profile *profile, enum hapt_objective objective,
                              const struct hapt_plan *plan, struct hapt_arena *arena, struct hapt_rival *rival)
{
    const double own_s = hapt_search_value_s(objective, plan), value_s = hapt_search_value_s(objective, rival->plan);
    struct sentence sentence = {.length = 0};
    const struct hapt_plan *other = rival->plan;
    rival->loss = own_s > 0 ? value_s / own_s - 1 : 0;
    rival->steady_s = (plan->microbatches - 1) * (other->t_max_s - plan->t_max_s);
    for (int i = 0; i < other->stage_count; i++) {
        rival->fill_s += other->stage[i].compute_s;
        rival->transfer_s += 2 * other->stage[i].comm_s;
    }
    for (int i = 0; i < plan->stage_count; i++) {
        rival->fill_s -= plan->stage[i].compute_s;
        rival->transfer_s -= 2 * plan->stage[i].comm_s;
    }
    if (rival->fits && hapt_at_most(value_s, own_s))
        say(&sentence, "%s", hapt_at_most(own_s, value_s) ? "as fast: the tie rules decide" : "faster");
    else if (rival->fits)
        say_parts(&sentence, profile, plan, rival);
    else
        say_short(&sentence, rival);
    rival->reason = hapt_arena_strdup(arena, sentence.text);
    return rival->reason ? HAPT_OK : HAPT_ERR_MEMORY;
}
