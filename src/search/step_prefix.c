#include "step_prefix.h"

#include <math.h>

enum hapt_status step_prefixes_create(struct step_search *search, bool split, struct step_prefixes *prefixes)
{
    *prefixes = (struct step_prefixes){.search = search, .split = split};
    return step_rest_create(search, &prefixes->rest);
}

struct step_prefix step_prefix_nothing(void)
{
    return (struct step_prefix){.in_flight = INFINITY};
}

bool step_prefix_uses_all(const struct step_prefixes *prefixes, const struct step_prefix *prefix)
{
    const struct hapt_profile *profile = prefixes->search->profile;
    for (int c = 0; c < profile->cluster_count; c++)
        if (prefix->used[c] < profile->cluster[c].nodes * profile->cluster[c].devices_per_node) return false;
    return true;
}

bool step_prefix_allows(const struct step_prefixes *prefixes, const struct step_prefix *prefix, int device_set,
                        int submesh)
{
    const struct step_search *search = prefixes->search;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const int more = step_devices_of(search, device_set, submesh, c);
        if (more == 0) continue;
        if (prefix->used[c] + more > cluster->nodes * cluster->devices_per_node) return false;
        if ((prefix->visited >> c & 1u) &&
            step_devices_of(search, prefix->last.device_set, prefix->last.submesh, c) == 0)
            return false;
    }
    return true;
}

static double most_in_flight(double parameter_bytes, double activation_bytes, double memory_bytes, int B)
{
    if (!hapt_at_most(parameter_bytes + activation_bytes, memory_bytes)) return 0;
    return step_in_flight(parameter_bytes, activation_bytes, memory_bytes, B);
}

/* Microbatches in flight that fit on a stage. */
static double in_flight(const struct step_search *search, const struct step_stage *stage, int first)
{
    const struct hapt_profile *profile = search->profile;
    double most = search->B;
    if (stage->device_set < search->C) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->device_set];
        const size_t cell = hapt_profile_index(profile, stage->submesh, first, stage->end - 1);
        return most_in_flight(cluster->parameter_bytes[cell], cluster->activation_bytes[cell],
                              cluster->device_memory_bytes, search->B);
    }
    const struct hapt_profile_mixed *mixed = &profile->mixed[stage->device_set - search->C];
    for (int k = 0; k < mixed->count; k++) {
        const size_t cell = hapt_profile_index(profile, mixed->memory_rows > 1 ? k : 0, first, stage->end - 1);
        most = fmin(most, most_in_flight(mixed->parameter_bytes[cell], mixed->activation_bytes[cell],
                                         profile->cluster[mixed->cluster[k]].device_memory_bytes, search->B));
    }
    return most;
}

/* The least time of a microbatch on the slowest stage behind, if all devices work that may still come. */
static double slowest_behind_s(const struct step_prefixes *prefixes, const struct step_prefix *prefix)
{
    const struct step_search *search = prefixes->search;
    const double work_s = prefixes->rest.work_s[prefix->last.end];
    double rate = 0;
    if (work_s == 0) return 0;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const bool now = step_devices_of(search, prefix->last.device_set, prefix->last.submesh, c) > 0;
        if ((prefix->visited >> c & 1u) && !now) continue;
        rate += (cluster->nodes * cluster->devices_per_node - prefix->used[c]) / prefixes->rest.ratio[c];
    }
    return work_s / rate;
}

/* The bounds of a split stage, as in step_bound.c. */
static double extend_split(const struct step_search *search, int first, double time_s, double behind_s,
                           struct step_prefix *next)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[next->last.device_set];
    const size_t cell = hapt_profile_index(search->profile, next->last.submesh, first, next->last.end - 1);
    const double least_s = fmax(0, time_s - hapt_profile_split_weight_s(cluster, cell)), B = search->B;
    next->stage_s = fmax(next->stage_s, next->sum_s + B * least_s);
    next->stage_s = fmax(next->stage_s, next->head_s + B * time_s);
    next->sum_s += least_s;
    next->head_s += cluster->stage_forward_time[cell];
    return fmax(fmax(next->stage_s, next->sum_s + (B - 1) * next->comm_s), next->head_s + B * behind_s);
}

static void add_transfer(const struct step_search *search, const struct step_stage *last, struct step_prefix *next)
{
    const double comm_s =
        hapt_profile_boundary_s(search->lowest, last->end - 1, step_subclusters_of(search, &last->device_set),
                                step_subclusters_of(search, &next->last.device_set), NULL);
    next->sum_s += 2 * comm_s;
    next->head_s += comm_s;
    next->comm_s = fmax(next->comm_s, comm_s);
}

double step_prefix_extend(const struct step_prefixes *prefixes, const struct step_prefix *prefix,
                          const struct step_stage *stage, struct step_prefix *next)
{
    const struct step_search *search = prefixes->search;
    const int first = prefix->count > 0 ? prefix->last.end : 0;
    const double time_s = step_work_s(search, stage->device_set, stage->submesh, first, stage->end), B = search->B;
    const double fits = isfinite(time_s) ? in_flight(search, stage, first) : 0;
    if (fits == 0) return INFINITY;
    *next = *prefix;
    next->count++;
    next->last = *stage;
    for (int c = 0; c < search->C; c++) {
        const int more = step_devices_of(search, stage->device_set, stage->submesh, c);
        next->used[c] += more;
        next->visited |= more > 0 ? 1u << c : 0;
    }
    next->in_flight = fmin(next->in_flight, fits);
    if (prefix->count > 0) add_transfer(search, &prefix->last, next);
    const double slowest_s = slowest_behind_s(prefixes, next);
    const double rest_s = fmax(prefixes->rest.pass_s[stage->end], slowest_s);
    next->pace_s = fmax(fmax(next->pace_s, next->comm_s), fmax(time_s, (time_s + rest_s) / next->in_flight));
    if (prefixes->split) return extend_split(search, first, time_s, slowest_s, next);
    next->stage_s = fmax(next->stage_s, next->sum_s + B * time_s);
    next->stage_s = fmax(next->stage_s, next->sum_s + B * (time_s + rest_s) / next->in_flight);
    next->sum_s += time_s;
    return fmax(fmax(next->stage_s, next->sum_s + rest_s + (B - 1) * next->comm_s), next->sum_s + B * slowest_s);
}

double step_prefix_estimate(const struct step_prefixes *prefixes, const struct step_prefix *prefix)
{
    const double slowest_s = slowest_behind_s(prefixes, prefix);
    const double rest_s = fmax(prefixes->rest.pass_s[prefix->last.end], slowest_s);
    return prefix->sum_s + rest_s + (prefixes->search->B - 1) * fmax(prefix->pace_s, slowest_s);
}
