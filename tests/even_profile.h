/* Profiles of equal layers on equal devices. */
#ifndef HAPT_EVEN_PROFILE_H
#define HAPT_EVEN_PROFILE_H

#include "random_profile.h"

/* `devices` submeshes of one device each, equal layers of 1 s forward and 2 s backward, `bytes` per slot. */
static inline struct hapt_profile *even_profile(int devices, int layers, double memory_bytes, struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(layers, 1, arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "even", devices, 1, memory_bytes, 1, arena));
    struct hapt_profile_cluster *cluster = &profile->cluster[0];
    for (int s = 0; s < cluster->submesh_count; s++)
        for (int i = 0; i < layers; i++)
            for (int j = i; j < layers; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const int count = j - i + 1;
                cluster->stage_time[cell] = 3.0 * count;
                cluster->stage_forward_time[cell] = count;
                cluster->parameter_bytes[cell] = 100 * count;
                cluster->activation_bytes[cell] = 10 * count;
            }
    cluster->step_time = NULL;
    for (int l = 0; l < layers - 1; l++) profile->boundary_bytes[l] = 1;
    profile->link_bandwidth[0] = 1e3;
    profile->link_latency[0] = 0;
    return profile;
}

#endif
