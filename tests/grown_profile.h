/* Random clusters and models that can grow: more memory, faster links, more nodes. Parts that stay keep their times, so
 * a plan of the smaller cluster is one of the grown cluster. */
#ifndef HAPT_GROWN_PROFILE_H
#define HAPT_GROWN_PROFILE_H

#include "random_profile.h"

enum { GROWN_LAYERS = 40, GROWN_CLUSTERS = 3 };

struct grown_cluster {
    int nodes, devices_per_node;
    double speed, memory_bytes, overhead; /* overhead: of each doubling of the devices of a submesh */
    bool tensor_parallel;
};

struct grown {
    int L, C, B;
    double work_s[GROWN_LAYERS], parameter_bytes[GROWN_LAYERS], activation_bytes[GROWN_LAYERS];
    double boundary_bytes[GROWN_LAYERS], tied_bytes, reduce_s_per_byte;
    struct grown_cluster cluster[GROWN_CLUSTERS];
    double bandwidth[GROWN_CLUSTERS][GROWN_CLUSTERS], latency[GROWN_CLUSTERS][GROWN_CLUSTERS];
};

static inline struct grown grown_random(uint64_t *seed)
{
    static const int per_node[] = {1, 2, 4, 4, 8};
    struct grown grown = {.C = 1 + random_below(seed, GROWN_CLUSTERS), .B = 1 + random_below(seed, 32)};
    const bool repeated = random_chance(seed, 0.5);
    double parameters = 0, activations = 0, speed = 0;
    grown.L = 4 + random_below(seed, GROWN_LAYERS - 3);
    for (int l = 0; l < grown.L; l++) {
        const bool same = repeated && l > 1 && l < grown.L - 1;
        grown.work_s[l] = same ? grown.work_s[l - 1] : 0.2 + hapt_random_unit(seed);
        grown.parameter_bytes[l] = same ? grown.parameter_bytes[l - 1] : 0.2 + hapt_random_unit(seed);
        grown.activation_bytes[l] = same ? grown.activation_bytes[l - 1] : 0.1 + 0.3 * hapt_random_unit(seed);
        grown.boundary_bytes[l] = 0.1 + hapt_random_unit(seed);
        parameters += grown.parameter_bytes[l];
        activations += grown.activation_bytes[l];
    }
    if (random_chance(seed, 0.3)) grown.tied_bytes = hapt_random_unit(seed);
    if (random_chance(seed, 0.5)) grown.reduce_s_per_byte = 0.2 * hapt_random_unit(seed);
    for (int c = 0; c < grown.C; c++) {
        struct grown_cluster *cluster = &grown.cluster[c];
        *cluster = (struct grown_cluster){.nodes = 1 + random_below(seed, 3),
                                          .devices_per_node = per_node[random_below(seed, 5)],
                                          .speed = 0.5 + 1.5 * hapt_random_unit(seed),
                                          .overhead = 0.3 * hapt_random_unit(seed),
                                          .tensor_parallel = random_chance(seed, 0.3)};
        speed += cluster->speed * cluster->nodes * cluster->devices_per_node;
    }
    /* From hardly enough memory for the model over all devices to plenty. */
    for (int c = 0; c < grown.C; c++) {
        const double share = grown.cluster[c].speed / speed;
        grown.cluster[c].memory_bytes = (0.8 + 3 * hapt_random_unit(seed) * hapt_random_unit(seed)) *
                                            (parameters * share + activations / grown.L * 2) +
                                        0.05 * parameters;
    }
    for (int a = 0; a < grown.C; a++)
        for (int b = 0; b <= a; b++) {
            /* a transfer of 0.01 to 3 mean stage times between subclusters, much less inside them */
            const double slow = a == b ? 0.01 : 3 * hapt_random_unit(seed) * hapt_random_unit(seed) + 0.01;
            grown.bandwidth[a][b] = grown.bandwidth[b][a] = 1 / slow;
            grown.latency[a][b] = grown.latency[b][a] = random_chance(seed, 0.5) ? 0 : 0.02 * hapt_random_unit(seed);
        }
    return grown;
}

static inline void grown_fill(const struct grown *grown, int c, struct hapt_profile *profile)
{
    struct hapt_profile_cluster *to = &profile->cluster[c];
    const struct grown_cluster *from = &grown->cluster[c];
    for (int s = 0; s < to->submesh_count; s++) {
        const int devices = to->submesh[s].n * to->submesh[s].m, tp = to->submesh[s].tp;
        const double factor = pow(1 + from->overhead, log2(devices)) * (tp > 1 ? 1.1 : 1) / (devices * from->speed);
        for (int i = 0; i < grown->L; i++) {
            double work_s = 0, parameters = 0, activations = 0;
            for (int j = i; j < grown->L; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                work_s += grown->work_s[j];
                parameters += grown->parameter_bytes[j];
                activations += grown->activation_bytes[j];
                to->stage_time[cell] = work_s * factor;
                to->stage_forward_time[cell] = work_s * factor / 3;
                to->parameter_bytes[cell] = parameters / tp;
                to->activation_bytes[cell] = activations / devices;
                to->step_time[cell] = (devices > tp ? grown->reduce_s_per_byte * parameters / tp : 0) +
                                      hapt_profile_tied_share_s(profile, c, i, j);
            }
        }
    }
}

static inline struct hapt_profile *grown_profile(const struct grown *grown, struct hapt_arena *arena)
{
    struct hapt_profile *profile;
    const int C = grown->C;
    CHECK_OK(hapt_profile_create(grown->L, C, arena, &profile));
    for (int c = 0; c < C; c++) {
        char name[16];
        struct hapt_submesh submesh[64];
        const struct grown_cluster *from = &grown->cluster[c];
        const int count = random_submeshes(from->nodes, from->devices_per_node,
                                           from->tensor_parallel ? RANDOM_DEGREES : RANDOM_PLAIN, false, submesh);
        snprintf(name, sizeof name, "sub%d", c);
        CHECK_OK(hapt_profile_add_cluster(profile, c, name, from->nodes, from->devices_per_node, from->memory_bytes,
                                          from->speed, submesh, count, arena));
        for (int other = 0; other < C; other++) {
            profile->link_bandwidth[c * C + other] = grown->bandwidth[c][other];
            profile->link_latency[c * C + other] = grown->latency[c][other];
        }
    }
    for (int l = 0; l < grown->L - 1; l++) profile->boundary_bytes[l] = grown->boundary_bytes[l];
    if (grown->tied_bytes > 0) {
        profile->tied_bytes = hapt_arena_alloc(arena, (size_t)grown->L, sizeof *profile->tied_bytes);
        for (int l = 1; l < grown->L; l++) profile->tied_bytes[l] = grown->tied_bytes;
    }
    for (int c = 0; c < C; c++) grown_fill(grown, c, profile); /* the step times depend on the links */
    return profile;
}

#endif
