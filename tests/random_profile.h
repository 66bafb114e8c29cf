/* Random small profiles for tests of the planner: ties, holes, tight memory. */
#ifndef HAPT_RANDOM_PROFILE_H
#define HAPT_RANDOM_PROFILE_H

#include <math.h>

#include "hapt/layers.h"
#include "hapt/plan.h"
#include "hapt/search.h"
#include "test.h"

static inline int random_below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

static inline bool random_chance(uint64_t *seed, double probability)
{
    return hapt_random_unit(seed) < probability;
}

/* Times are multiples of a step, which gives ties (0.1 also rounds), or arbitrary. */
static inline double random_time(uint64_t *seed, double grain, double high)
{
    if (grain == 0) return 0.01 + high * hapt_random_unit(seed);
    return grain * (1 + random_below(seed, high > grain ? (int)(high / grain) : 1));
}

/* The rows of a submesh: data-parallel alone, every tensor-parallel degree, or choices of what is kept on the device.
 */
enum random_rows { RANDOM_PLAIN, RANDOM_DEGREES, RANDOM_KEEPS };
static bool random_keeps __attribute__((unused)); /* some subclusters have RANDOM_KEEPS */

/* Submeshes: powers of two within a node, and whole nodes. With RANDOM_KEEPS those that recompute the light operators,
 * half of the bytes or all, and with the state on the host weights there. */
static inline int random_submeshes(int nodes, int per_node, enum random_rows rows, bool host_state,
                                   struct hapt_submesh *submesh)
{
    static const struct hapt_submesh keeps[] = {{0, 0, 1, 0, 0, 0}, {0, 0, 1, 0, 38, 0}, {0, 0, 1, 0, 12, 1}};
    int count = 0;
    for (int n = 1; n <= nodes; n++)
        for (int m = n == 1 ? 1 : per_node; m <= per_node;
             m = m < per_node && (2 * m > per_node || per_node % (2 * m)) ? per_node : 2 * m)
            for (int k = 0, tp = 1; tp <= m; k++, tp *= rows == RANDOM_KEEPS ? 1 : 2) {
                if (k == (rows == RANDOM_PLAIN ? 1 : rows == RANDOM_KEEPS ? 2 + host_state : m)) break;
                submesh[count] = rows == RANDOM_KEEPS ? keeps[k] : (struct hapt_submesh){n, m, tp, 0, 0, 0};
                submesh[count].n = n;
                submesh[count].m = m;
                count += m % tp == 0;
            }
    return count;
}

/* A subcluster with the data-parallel submeshes alone; times are NaN. */
static inline enum hapt_status random_profile_cluster(struct hapt_profile *profile, int index, const char *name,
                                                      int nodes, int devices_per_node, double memory_bytes,
                                                      double peak_flops, struct hapt_arena *arena)
{
    struct hapt_submesh submesh[256];
    const int count = hapt_profile_submeshes(nodes, devices_per_node, NULL);
    HAPT_ASSERT(count <= 256);
    hapt_profile_submeshes(nodes, devices_per_node, submesh);
    return hapt_profile_add_cluster(profile, index, name, nodes, devices_per_node, memory_bytes, peak_flops, submesh,
                                    count, arena);
}

/* A row that keeps less is mostly the one of its submesh that keeps all, slower and smaller. */
static inline void random_keep(uint64_t *seed, const struct hapt_profile *profile,
                               const struct hapt_profile_cluster *cluster, int s, size_t cell)
{
    const struct hapt_submesh *submesh = &cluster->submesh[s];
    const size_t row = hapt_profile_index(profile, 1, 0, 0);
    size_t all = cell;
    if ((submesh->recompute == 0 && !submesh->weights_at) || random_chance(seed, 0.2)) return;
    for (int k = s; cluster->submesh[k].recompute > 0 || cluster->submesh[k].weights_at; k--) all -= row;
    if (!isfinite(cluster->stage_time[all])) return;
    const double share = submesh->recompute == HAPT_RECOMPUTE_PARTS ? 1 : 0.5;
    cluster->stage_time[cell] = cluster->stage_time[all] * (1 + share / 3 + submesh->weights_at);
    cluster->activation_bytes[cell] = cluster->activation_bytes[all] * (1 - share);
    cluster->parameter_bytes[cell] = cluster->parameter_bytes[all] * (submesh->weights_at ? 0.25 : 1);
}

static inline void random_cluster(uint64_t *seed, struct hapt_profile *profile, int c, double grain,
                                  struct hapt_arena *arena)
{
    static const int shapes[][2] = {{1, 1}, {1, 2}, {2, 1}, {1, 3}, {1, 4}, {2, 2}, {3, 1}};
    char name[16];
    const int most = profile->cluster_count >= 3 ? 4 : 7, L = profile->layer_count;
    const int *shape = shapes[random_below(seed, most)];
    const bool tight = random_chance(seed, 0.6), steps = random_chance(seed, 0.3), additive = random_chance(seed, 0.5);
    enum random_rows rows = random_chance(seed, 0.3) ? RANDOM_DEGREES : RANDOM_PLAIN;
    if (random_keeps && random_chance(seed, 0.12)) rows = RANDOM_KEEPS;
    const double holes = random_chance(seed, 0.5) ? 0.3 * hapt_random_unit(seed) : 0;
    snprintf(name, sizeof name, "sub%d", c);
    struct hapt_submesh submesh[16];
    const int submeshes = random_submeshes(shape[0], shape[1], rows, profile->host_state, submesh);
    CHECK_OK(hapt_profile_add_cluster(profile, c, name, shape[0], shape[1], tight ? 8 : 1000, 1 + c, submesh, submeshes,
                                      arena));
    struct hapt_profile_cluster *cluster = &profile->cluster[c];
    const double layer_s = random_time(seed, grain, 2);
    for (int s = 0; s < cluster->submesh_count; s++) {
        const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
        for (int i = 0; i < L; i++) {
            for (int j = i; j < L; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const int layers = j - i + 1;
                if (random_chance(seed, holes)) continue;
                cluster->stage_time[cell] =
                    additive ? layers * layer_s / devices : random_time(seed, grain, 2.0 * layers / devices);
                cluster->stage_forward_time[cell] = cluster->stage_time[cell] / 3;
                cluster->parameter_bytes[cell] = random_below(seed, 5);
                cluster->activation_bytes[cell] = random_below(seed, 4) + (grain == 0 ? hapt_random_unit(seed) : 0);
                if (steps) cluster->step_time[cell] = random_time(seed, grain, 2);
                if (rows == RANDOM_KEEPS) random_keep(seed, profile, cluster, s, cell);
            }
        }
    }
    if (!steps) cluster->step_time = NULL;
}

/* Makes subcluster b interchangeable with a: equal tables, equal links. */
static inline void make_twin(struct hapt_profile *profile, int a, int b, struct hapt_arena *arena)
{
    const struct hapt_profile_cluster *from = &profile->cluster[a];
    struct hapt_profile_cluster *to = &profile->cluster[b];
    const int C = profile->cluster_count;
    char name[16];
    snprintf(name, sizeof name, "sub%d", b);
    CHECK_OK(hapt_profile_add_cluster(profile, b, name, from->nodes, from->devices_per_node, from->device_memory_bytes,
                                      from->peak_flops, from->submesh, from->submesh_count, arena));
    const size_t bytes = hapt_profile_index(profile, from->submesh_count, 0, 0) * sizeof(double);
    memcpy(to->stage_time, from->stage_time, bytes);
    memcpy(to->stage_forward_time, from->stage_forward_time, bytes);
    memcpy(to->parameter_bytes, from->parameter_bytes, bytes);
    memcpy(to->activation_bytes, from->activation_bytes, bytes);
    if (from->step_time) memcpy(to->step_time, from->step_time, bytes);
    if (!from->step_time) to->step_time = NULL;
    double *const table[] = {profile->link_bandwidth, profile->link_latency};
    for (int k = 0; k < 2; k++) {
        table[k][b * C + b] = table[k][a * C + a];
        for (int c = 0; c < C; c++)
            if (c != a && c != b) table[k][b * C + c] = table[k][c * C + b] = table[k][a * C + c];
    }
}

static inline struct hapt_profile *random_profile_of(uint64_t *seed, int C, int L, struct hapt_arena *arena)
{
    static const double grains[] = {0, 0, 0.1, 0.25, 0.5};
    const double grain = grains[random_below(seed, 5)];
    struct hapt_profile *profile;
    CHECK_OK(hapt_profile_create(L, C, arena, &profile));
    profile->host_state = random_keeps && random_chance(seed, 0.3);
    for (int c = 0; c < C; c++) random_cluster(seed, profile, c, grain, arena);
    for (int layer = 0; layer < L - 1; layer++)
        profile->boundary_bytes[layer] = random_chance(seed, 0.2) ? 0 : random_time(seed, grain, 2);
    for (int a = 0; a < C; a++) {
        for (int b = 0; b <= a; b++) {
            static const double speeds[] = {1, 2, 4, 10, 100};
            const double bandwidth = speeds[random_below(seed, 5)], latency = random_chance(seed, 0.7) ? 0 : 0.05;
            profile->link_bandwidth[a * C + b] = profile->link_bandwidth[b * C + a] = bandwidth;
            profile->link_latency[a * C + b] = profile->link_latency[b * C + a] = latency;
        }
    }
    if (C > 1 && random_chance(seed, 0.25)) {
        const int first = random_below(seed, C), second = (first + 1 + random_below(seed, C - 1)) % C;
        make_twin(profile, first, second, arena);
        /* a third subcluster must have the same links to both */
        if (C > 2 && random_chance(seed, 0.5)) {
            const int third = 3 - first - second;
            if (third >= 0 && third < C && third != first && third != second) {
                profile->link_bandwidth[first * C + second] = profile->link_bandwidth[second * C + first] =
                    profile->link_bandwidth[first * C + third];
                profile->link_latency[first * C + second] = profile->link_latency[second * C + first] =
                    profile->link_latency[first * C + third];
                make_twin(profile, first, third, arena);
            }
        }
    }
    return profile;
}

static inline struct hapt_profile *random_profile(uint64_t *seed, struct hapt_arena *arena)
{
    const int C = random_chance(seed, 0.03) ? 4 : 1 + random_below(seed, 3), L = 1 + random_below(seed, C >= 3 ? 4 : 5);
    return random_profile_of(seed, C, L, arena);
}

/* Does the profile have mixed stages on these devices already? */
static inline bool has_mixed(const struct hapt_profile *profile, int count, const int *cluster, const int *devices)
{
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        bool same = mixed->count == count;
        for (int i = 0; same && i < count; i++)
            same = mixed->cluster[i] == cluster[i] && mixed->devices[i] == devices[i];
        if (same) return true;
    }
    return false;
}

/* Adds mixed stages on devices of two subclusters, sometimes of three. Some hold neither the first nor the last layer
 * and are fast there, so that plans put them between other stages. */
static inline void random_mixed(uint64_t *seed, struct hapt_profile *profile, struct hapt_arena *arena)
{
    const int C = profile->cluster_count, L = profile->layer_count;
    const int left_out = C == 3 && random_chance(seed, 0.85) ? random_below(seed, 3) : -1;
    const double grain = random_chance(seed, 0.5) ? 0.25 : 0, holes = random_chance(seed, 0.5) ? 0.4 : 0;
    const bool inner = L > 2 && random_chance(seed, 0.7);
    const double speed = inner ? 0.03 : random_chance(seed, 0.5) ? 1 : 0.4;
    const bool tight = random_chance(seed, 0.4), steps = random_chance(seed, 0.3), additive = random_chance(seed, 0.4);
    int cluster[4], devices[4], count = 0, all = 0;
    struct hapt_profile_mixed *mixed;
    for (int c = 0; c < C; c++) {
        const int most = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
        if (c == left_out) continue;
        cluster[count] = c;
        devices[count] = inner || random_chance(seed, 0.3) ? 1 : 1 + random_below(seed, most);
        all += devices[count++];
    }
    if (count < 2 || has_mixed(profile, count, cluster, devices)) return;
    CHECK_OK(hapt_profile_add_mixed(profile, count, cluster, devices, arena, &mixed));
    if (random_chance(seed, 0.3)) mixed->memory_rows = 1;
    if (random_chance(seed, 0.5)) {
        mixed->ratio = hapt_arena_alloc(arena, (size_t)all, sizeof *mixed->ratio);
        for (int d = 0; d < all; d++) mixed->ratio[d] = 1.0 / all;
    }
    if (steps) mixed->step_time = hapt_arena_alloc(arena, (size_t)L * (size_t)L, sizeof *mixed->step_time);
    const double layer_s = random_time(seed, grain, 2);
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            const size_t cell = hapt_profile_index(profile, 0, i, j);
            const int layers = j - i + 1;
            if (random_chance(seed, holes) || (inner && (i == 0 || j == L - 1))) continue;
            mixed->stage_time[cell] =
                speed * (additive ? layers * layer_s / all : random_time(seed, grain, 2.0 * layers / all));
            mixed->stage_forward_time[cell] = mixed->stage_time[cell] / 3;
            if (steps) mixed->step_time[cell] = random_time(seed, grain, 2);
            for (int row = 0; row < mixed->memory_rows; row++) {
                const size_t at = hapt_profile_index(profile, row, i, j);
                mixed->parameter_bytes[at] = random_below(seed, tight ? 5 : 2);
                mixed->activation_bytes[at] = random_below(seed, tight ? 4 : 2);
            }
        }
    }
}

/* Limits the layers of a stage, so that pipelines become longer. */
static inline void shorten_stages(struct hapt_profile *profile, int most)
{
    for (int i = 0; i < profile->layer_count; i++) {
        for (int j = i + most; j < profile->layer_count; j++) {
            for (int c = 0; c < profile->cluster_count; c++)
                for (int s = 0; s < profile->cluster[c].submesh_count; s++)
                    profile->cluster[c].stage_time[hapt_profile_index(profile, s, i, j)] = NAN;
            for (int k = 0; k < profile->mixed_count; k++)
                profile->mixed[k].stage_time[hapt_profile_index(profile, 0, i, j)] = NAN;
        }
    }
}

static inline bool has_lone_device(const struct hapt_profile *profile)
{
    for (int c = 0; c < profile->cluster_count; c++)
        if (profile->cluster[c].nodes * profile->cluster[c].devices_per_node == 1) return true;
    return false;
}

/* random_profile with mixed stages on one to three sets of devices, of two or three subclusters. */
static inline struct hapt_profile *random_mixed_profile(uint64_t *seed, struct hapt_arena *arena)
{
    const int C = random_chance(seed, 0.6) ? 2 : 3, L = 1 + random_below(seed, C >= 3 ? 4 : 5);
    struct hapt_profile *profile = random_profile_of(seed, C, L, arena);
    /* if a mixed stage uses the only device of a subcluster, no other stage can be beside it there */
    for (int i = 0; i < 3 && has_lone_device(profile); i++) profile = random_profile_of(seed, C, L, arena);
    const bool near = random_chance(seed, 0.5); /* fast links between all subclusters, so that mixed stages pay */
    for (int link = 0; near && link < C * C; link++) {
        profile->link_bandwidth[link] = 100;
        profile->link_latency[link] = 0;
    }
    for (int k = 1 + random_below(seed, 3); k > 0; k--) random_mixed(seed, profile, arena);
    if (L > 2 && random_chance(seed, 0.5)) shorten_stages(profile, (L + 1) / 2);
    return profile;
}

static inline struct hapt_search_options random_options(uint64_t *seed)
{
    static const int microbatches[] = {1, 2, 3, 4, 6, 8, 32, 100};
    static const double thresholds[] = {0, 0.02, 0.02, 0.1, 0.5};
    return (struct hapt_search_options){
        .microbatches = microbatches[random_below(seed, 8)],
        .schedule = random_chance(seed, 0.6) ? HAPT_SCHEDULE_H1F1B : (enum hapt_schedule_kind)random_below(seed, 4),
        .hide_threshold = thresholds[random_below(seed, 5)],
        .use_all_devices = random_chance(seed, 0.2),
    };
}

#endif
