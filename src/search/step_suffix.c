/*
 * Bounds of partial plans. From the last layer on, because memory decides most: behind a stage, the way of a microbatch
 * there and back is then known, and so how long the stage holds it.
 */
#include "step_suffix.h"

#include <math.h>

enum hapt_status step_suffixes_create(struct step_search *search, bool split, struct step_suffixes *suffixes)
{
    *suffixes = (struct step_suffixes){.search = search, .split = split};
    return step_front_create(search, &suffixes->front);
}

struct step_suffix step_suffix_nothing(const struct step_suffixes *suffixes)
{
    return (struct step_suffix){.first = suffixes->search->L};
}

bool step_suffix_uses_all(const struct step_suffixes *suffixes, const struct step_suffix *suffix)
{
    const struct hapt_profile *profile = suffixes->search->profile;
    for (int c = 0; c < profile->cluster_count; c++)
        if (suffix->used[c] < profile->cluster[c].nodes * profile->cluster[c].devices_per_node) return false;
    return true;
}

bool step_suffix_allows(const struct step_suffixes *suffixes, const struct step_suffix *suffix, int device_set,
                        int submesh)
{
    const struct step_search *search = suffixes->search;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const int more = step_devices_of(search, device_set, submesh, c);
        if (more == 0) continue;
        if (suffix->used[c] + more > cluster->nodes * cluster->devices_per_node) return false;
        if ((suffix->visited >> c & 1u) &&
            step_devices_of(search, suffix->stage.device_set, suffix->stage.submesh, c) == 0)
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

/* The least time of a microbatch on the slowest stage in front, if all devices work that may still come. */
static double slowest_s(const struct step_suffixes *suffixes, const struct step_suffix *suffix)
{
    const struct step_search *search = suffixes->search;
    const double work_s = suffixes->front.work_s[suffix->first];
    double rate = 0;
    if (work_s == 0) return 0;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const bool now = step_devices_of(search, suffix->stage.device_set, suffix->stage.submesh, c) > 0;
        if ((suffix->visited >> c & 1u) && !now) continue;
        rate += (cluster->nodes * cluster->devices_per_node - suffix->used[c]) / suffixes->front.ratio[c];
    }
    return work_s / rate;
}

static void add_transfer(const struct step_search *search, const struct step_suffix *behind, struct step_suffix *next)
{
    const double comm_s =
        hapt_profile_boundary_s(search->lowest, behind->first - 1, step_subclusters_of(search, &next->stage.device_set),
                                step_subclusters_of(search, &behind->stage.device_set), NULL);
    next->sum_s += 2 * comm_s;
    next->comm_s = fmax(next->comm_s, comm_s);
}

/* Split passes, as in step_bound.c: what waits delays nothing in front. */
static double extend_split(const struct step_search *search, double time_s, double front_s, struct step_suffix *next)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[next->stage.device_set];
    const size_t cell = hapt_profile_index(search->profile, next->stage.submesh, next->first, next->stage.end - 1);
    next->stage_s = fmax(next->stage_s, search->B * time_s);
    next->sum_s += fmax(0, time_s - hapt_profile_split_weight_s(cluster, cell));
    return fmax(fmax(next->stage_s, next->sum_s + (search->B - 1) * next->comm_s), search->B * front_s);
}

double step_suffix_extend(const struct step_suffixes *suffixes, const struct step_suffix *suffix, int device_set,
                          int submesh, int first, struct step_suffix *next)
{
    const struct step_search *search = suffixes->search;
    const struct step_stage stage = {device_set, submesh, suffix->first};
    const double time_s = step_work_s(search, device_set, submesh, first, stage.end), B = search->B;
    const double fits = isfinite(time_s) ? in_flight(search, &stage, first) : 0;
    if (fits == 0) return INFINITY;
    *next = *suffix;
    next->count++;
    next->first = first;
    next->stage = stage;
    next->fits = fits;
    for (int c = 0; c < search->C; c++) {
        const int more = step_devices_of(search, device_set, submesh, c);
        next->used[c] += more;
        next->visited |= more > 0 ? 1u << c : 0;
    }
    if (suffix->count > 0) add_transfer(search, suffix, next);
    const double front_s = slowest_s(suffixes, next);
    next->pace_s = fmax(fmax(next->pace_s, next->comm_s), fmax(time_s, (time_s + next->sum_s) / fits));
    if (suffixes->split) return extend_split(search, time_s, front_s, next);
    const double head_s = fmax(suffixes->front.pass_s[first], front_s);
    next->sum_s += time_s;
    next->stage_s = fmax(next->stage_s, head_s + B * fmax(time_s, next->sum_s / fits));
    return fmax(fmax(next->stage_s, head_s + next->sum_s + (B - 1) * next->comm_s), B * front_s);
}

double step_suffix_estimate(const struct step_suffixes *suffixes, const struct step_suffix *suffix)
{
    const double front_s = slowest_s(suffixes, suffix);
    return suffix->sum_s + fmax(suffixes->front.pass_s[suffix->first], front_s) +
           (suffixes->search->B - 1) * fmax(suffix->pace_s, front_s);
}
