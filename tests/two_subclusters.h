/* Two small unlike subclusters, and plans of them as --stages text: for tests that compare strategies. */
#ifndef HAPT_TWO_SUBCLUSTERS_H
#define HAPT_TWO_SUBCLUSTERS_H

#include "hapt/search.h"
#include "hapt/baselines.h"
#include "random_profile.h"

enum { MOST_STAGES = 8, TEXT = 512 };

/* Two subclusters of 2 x 2 devices, with times that have no ties. `speed` of each; `memory_bytes` of a device. */
static inline struct hapt_profile *two_subclusters(uint64_t *seed, int L, const double speed[2], double memory_bytes,
                                                   struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    double base[3][16][16];
    CHECK_OK(hapt_profile_create(L, 2, arena, &profile));
    for (int s = 0; s < 3; s++)
        for (int i = 0; i < L; i++)
            for (int j = i; j < L; j++) base[s][i][j] = (j - i + 1 + 0.5 * hapt_random_unit(seed)) / (1 << s);
    for (int c = 0; c < 2; c++) {
        CHECK_OK(random_profile_cluster(profile, c, c ? "slow" : "fast", 2, 2, memory_bytes, 1 / speed[c], arena));
        struct hapt_profile_cluster *cluster = &profile->cluster[c];
        cluster->step_time = NULL;
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int i = 0; i < L; i++) {
                for (int j = i; j < L; j++) {
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    cluster->stage_time[cell] = base[s][i][j] * speed[c];
                    cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                    cluster->parameter_bytes[cell] = (j - i + 1.0) / (1 << s);
                    cluster->activation_bytes[cell] = 0.25 * (j - i + 1) / (1 << s);
                }
            }
        }
    }
    for (int l = 0; l < L - 1; l++) profile->boundary_bytes[l] = 0.1 + hapt_random_unit(seed);
    for (int link = 0; link < 4; link++) {
        profile->link_bandwidth[link] = link == 0 || link == 3 ? 100 : 2;
        profile->link_latency[link] = 0.001;
    }
    return profile;
}

/* The price of stages written as text, for a system with or without overlap. Infinite if they cannot run. */
static inline double priced_s(const struct hapt_profile *profile, const struct hapt_search_options *options,
                              const char *stages, bool blocking, struct hapt_arena *arena)
{
    struct hapt_plan *plan;
    if (hapt_plan_force(profile, options, stages, arena, &plan) != HAPT_OK) {
        hapt_fail_reset();
        return INFINITY;
    }
    if (!blocking) return plan->simulated_s;
    struct hapt_simulation *simulation;
    plan->blocking = true;
    CHECK_OK(hapt_plan_simulate(plan, arena, &simulation));
    return simulation->total_s;
}

static inline void describe(const struct hapt_plan *plan, char text[TEXT])
{
    int at = 0;
    for (int i = 0; i < plan->stage_count && at < TEXT; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        at += snprintf(text + at, (size_t)(TEXT - at), "%s%d-%d@%s:%dx%dt%d", i ? "," : "", stage->first_layer,
                       stage->end_layer, stage->submesh->name, stage->submesh->nodes, stage->submesh->devices_per_node,
                       stage->layout.tensor_parallel);
    }
}

#endif
