/* Explains why no plan exists: repeats the search with relaxed constraints and reports the nearest obstacle. Runs on
 * failure only. */
#include "search.h"

#include <math.h>
#include <stdio.h>

#define HINT "add devices or memory, or use fewer microbatches, a smaller model or a smaller microbatch"

/* The plan at the largest t_max, which admits every feasible plan. stage_count 0: no plan. */
static enum hapt_status relaxed_plan(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                     double memory_factor, struct hapt_arena *arena, struct hapt_plan *plan)
{
    struct hapt_arena scratch; /* freed after each of dozens of searches; only the plans stay */
    struct search_problem *problem;
    *plan = hapt_search_plan(profile, options);
    hapt_arena_init(&scratch);
    enum hapt_status status = search_problem_create(profile, options, memory_factor, INFINITY, -1, &scratch, &problem);
    if (status == HAPT_OK && problem->all_candidates > 0) {
        plan->t_max_s = problem->longest_s;
        status = search_trace(problem, plan->t_max_s, INFINITY, arena, plan);
    }
    hapt_arena_release(&scratch);
    return status;
}

/* factor: the multiple of every device's memory with which the plan fits. */
static enum hapt_status explain_memory(const struct hapt_profile *profile, struct hapt_plan *plan, double factor)
{
    double worst = 0, worst_bytes = 0;
    const struct hapt_plan_stage *at = NULL;
    int part = 0, misfit;
    HAPT_TRY(hapt_plan_launch(profile, plan->t_max_s, plan, &misfit));
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        for (int k = 0; k < stage->submesh->part_count; k++) {
            const double bytes = hapt_plan_stage_bytes(stage, k);
            const double room = stage->submesh->device_memory_bytes[k];
            if (at && (isinf(worst) || bytes <= worst * room)) continue;
            worst = room > 0 ? bytes / room : INFINITY;
            worst_bytes = bytes;
            at = stage;
            part = k;
        }
    }
    char need[32], have[32], lack[32], submesh[64], hint[200];
    const double room = at->submesh->device_memory_bytes[part];
    snprintf(hint, sizeof hint, "a plan fits into %.4g times the memory of every device. Else " HINT,
             ceil(1e3 * factor) / 1e3);
    return hapt_fail(HAPT_ERR_INFEASIBLE, hint,
                     "no plan fits into memory: the nearest one lacks %s on a device of %s: it needs %s of %s for "
                     "layers %d-%d on %s with %d microbatches in flight",
                     hapt_units_bytes(fmax(worst_bytes - room, 0), lack), at->submesh->part_name[part],
                     hapt_units_bytes(worst_bytes, need), hapt_units_bytes(room, have), at->first_layer, at->end_layer,
                     hapt_plan_stage_short(at, "x", submesh), at->warmup);
}

/* Finds the least factor on every device's memory that admits a plan, and that plan. */
static enum hapt_status nearest_memory(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                       struct hapt_arena *arena)
{
    struct hapt_plan plan, found = {0};
    double low = 1, high = 2;
    for (int i = 0; i < 64 && found.stage_count == 0; i++, high *= 2) {
        HAPT_TRY(relaxed_plan(profile, options, high, arena, &plan));
        if (plan.stage_count > 0)
            found = plan;
        else
            low = high;
    }
    if (found.stage_count == 0)
        return hapt_fail(HAPT_ERR_INFEASIBLE, HINT,
                         "no plan fits into memory: some stage needs far more memory than its devices have");
    high /= 2;
    for (int i = 0; i < 12; i++) {
        const double middle = 0.5 * (low + high);
        HAPT_TRY(relaxed_plan(profile, options, middle, arena, &plan));
        if (plan.stage_count > 0) {
            found = plan;
            high = middle;
        } else {
            low = middle;
        }
    }
    return explain_memory(profile, &found, high);
}

/* The layer up to which stages can reach from the first one, ignoring memory and device counts. */
static int covered_layers(const struct hapt_profile *profile, bool *reached)
{
    const int L = profile->layer_count;
    int furthest = 0;
    reached[0] = true;
    for (int first = 0; first < L; first++) {
        if (!reached[first]) continue;
        furthest = first;
        for (int c = 0; c < profile->cluster_count; c++) {
            const struct hapt_profile_cluster *cluster = &profile->cluster[c];
            for (int s = 0; s < cluster->submesh_count; s++)
                for (int last = first; last < L; last++)
                    if (isfinite(cluster->stage_time[hapt_profile_index(profile, s, first, last)]))
                        reached[last + 1] = true;
        }
        for (int k = 0; k < profile->mixed_count; k++)
            for (int last = first; last < L; last++)
                if (isfinite(profile->mixed[k].stage_time[hapt_profile_index(profile, 0, first, last)]))
                    reached[last + 1] = true;
    }
    return reached[L] ? L : furthest;
}

/* The least bytes that stay resident over all devices, activations aside, if the candidates cover the layers with any
 * number of devices: a shortest path over boundaries. */
static enum hapt_status resident_bytes(const struct hapt_profile *profile, struct hapt_arena *arena, double *bytes)
{
    const int L = profile->layer_count;
    double *least;
    HAPT_NEW(least, arena, L + 1);
    for (int end = 1; end <= L; end++) {
        least[end] = INFINITY;
        for (int c = 0; c < profile->cluster_count; c++) {
            const struct hapt_profile_cluster *cluster = &profile->cluster[c];
            for (int s = 0; s < cluster->submesh_count; s++) {
                for (int first = 0; first < end; first++) {
                    const size_t at = hapt_profile_index(profile, s, first, end - 1);
                    const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
                    if (isfinite(cluster->stage_time[at]))
                        least[end] = fmin(least[end], least[first] + devices * cluster->parameter_bytes[at]);
                }
            }
        }
    }
    *bytes = least[L];
    return HAPT_OK;
}

/* Candidates that exceed their devices are not in the profile. */
static enum hapt_status explain_coverage(const struct hapt_profile *profile, struct hapt_arena *arena)
{
    double need_bytes, have_bytes = 0;
    char need[32], have[32], lack[32], hint[160];
    HAPT_TRY(resident_bytes(profile, arena, &need_bytes));
    for (int c = 0; c < profile->cluster_count; c++)
        have_bytes +=
            profile->cluster[c].nodes * profile->cluster[c].devices_per_node * profile->cluster[c].device_memory_bytes;
    if (need_bytes <= have_bytes || profile->mixed_count > 0 || isinf(need_bytes))
        return hapt_fail(HAPT_ERR_INFEASIBLE,
                         "add devices or larger ones (profiles omit stages that exceed device memory), or profile "
                         "longer layer ranges",
                         "%sthe candidates that cover the layers need more devices than the cluster has",
                         profile->host_state ? "no plan fits into the memory of devices and hosts: " : "");
    snprintf(hint, sizeof hint,
             "%s lack, and activations take more: add devices or larger ones, or use a smaller model",
             hapt_units_bytes(need_bytes - have_bytes, lack));
    return hapt_fail(HAPT_ERR_INFEASIBLE, hint,
                     "no plan fits into memory: weights, gradients%s workspace take at least %s, all devices together "
                     "have %s",
                     profile->host_state ? " and" : ", optimizer state and", hapt_units_bytes(need_bytes, need),
                     hapt_units_bytes(have_bytes, have));
}

static enum hapt_status explain(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                struct hapt_arena *arena)
{
    struct hapt_plan plan;
    bool *reached;
    struct hapt_search_options idle = *options;
    idle.use_all_devices = false;
    HAPT_NEW(reached, arena, profile->layer_count + 1);
    const int covered = covered_layers(profile, reached);
    if (covered < profile->layer_count)
        return hapt_fail(
            HAPT_ERR_INFEASIBLE, "profile more candidates (--imbalance, --layers-per-model)",
            "the profile's candidates do not cover the layers: none starts at layer %d and reaches the end", covered);
    if (options->use_all_devices) {
        HAPT_TRY(relaxed_plan(profile, &idle, 1, arena, &plan));
        if (plan.stage_count > 0)
            return hapt_fail(HAPT_ERR_INFEASIBLE, "leave out --use-all-devices", "no plan uses every device");
    }
    HAPT_TRY(relaxed_plan(profile, options, INFINITY, arena, &plan));
    if (plan.stage_count > 0) return nearest_memory(profile, options, arena);
    return explain_coverage(profile, arena);
}

enum hapt_status search_explain(const struct hapt_profile *profile, const struct hapt_search_options *options)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = explain(profile, options, &scratch);
    hapt_arena_release(&scratch);
    return status;
}
