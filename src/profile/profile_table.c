#include "hapt/profile.h"

#include <math.h>
#include <string.h>

#include "profile_private.h"

enum hapt_status hapt_profile_create(int layer_count, int cluster_count, struct hapt_arena *arena,
                                     struct hapt_profile **profile)
{
    HAPT_ASSERT(layer_count > 0 && cluster_count > 0);
    struct hapt_profile *made;
    HAPT_NEW(made, arena, 1);
    made->layer_count = layer_count;
    made->cluster_count = cluster_count;
    HAPT_NEW(made->cluster, arena, cluster_count);
    HAPT_NEW(made->boundary_bytes, arena, layer_count);
    HAPT_NEW(made->link_bandwidth, arena, (size_t)cluster_count * (size_t)cluster_count);
    HAPT_NEW(made->link_latency, arena, (size_t)cluster_count * (size_t)cluster_count);
    *profile = made;
    return HAPT_OK;
}

int hapt_profile_submeshes(int nodes, int devices_per_node, struct hapt_submesh *submesh)
{
    int count = 0;
    for (int m = 1; m < devices_per_node; m *= 2) {
        if (devices_per_node % m != 0) break;
        if (submesh) submesh[count] = (struct hapt_submesh){1, m, 1, 0, 0, 0};
        count++;
    }
    for (int n = 1; n <= nodes; n++) {
        if (submesh) submesh[count] = (struct hapt_submesh){n, devices_per_node, 1, 0, 0, 0};
        count++;
    }
    return count;
}

/* A table without candidates. */
static enum hapt_status create_times(size_t cells, struct hapt_arena *arena, double **time_s)
{
    double *made = hapt_arena_alloc_unset(arena, cells, sizeof *made);
    if (!made) return HAPT_ERR_MEMORY;
    for (size_t cell = 0; cell < cells; cell++) made[cell] = NAN;
    *time_s = made;
    return HAPT_OK;
}

enum hapt_status hapt_profile_add_cluster(struct hapt_profile *profile, int index, const char *name, int nodes,
                                          int devices_per_node, double memory_bytes, double peak_flops,
                                          const struct hapt_submesh *submesh, int count, struct hapt_arena *arena)
{
    HAPT_ASSERT(index >= 0 && index < profile->cluster_count && nodes > 0 && devices_per_node > 0 && count > 0);
    struct hapt_profile_cluster *cluster = &profile->cluster[index];
    snprintf(cluster->name, sizeof cluster->name, "%s", name);
    cluster->nodes = nodes;
    cluster->devices_per_node = devices_per_node;
    cluster->device_memory_bytes = memory_bytes;
    cluster->peak_flops = peak_flops;
    cluster->submesh_count = count;
    HAPT_NEW(cluster->submesh, arena, count);
    memcpy(cluster->submesh, submesh, (size_t)count * sizeof *submesh);
    const size_t cells = hapt_profile_index(profile, count, 0, 0);
    HAPT_TRY(create_times(cells, arena, &cluster->stage_time));
    HAPT_TRY(create_times(cells, arena, &cluster->stage_forward_time));
    HAPT_NEW(cluster->parameter_bytes, arena, cells);
    HAPT_NEW(cluster->activation_bytes, arena, cells);
    HAPT_NEW(cluster->step_time, arena, cells);
    return HAPT_OK;
}

enum hapt_status hapt_profile_add_split(struct hapt_profile *profile, int index, struct hapt_arena *arena)
{
    struct hapt_profile_cluster *cluster = &profile->cluster[index];
    const size_t cells = hapt_profile_index(profile, cluster->submesh_count, 0, 0);
    HAPT_TRY(create_times(cells, arena, &cluster->weight_time));
    HAPT_NEW(cluster->split_parameter_bytes, arena, cells);
    HAPT_NEW(cluster->weight_slot_bytes, arena, cells);
    return HAPT_OK;
}

enum hapt_status hapt_profile_find_ends(int layer_count, int submeshes, const double *stage_time,
                                        struct hapt_arena *arena, const struct hapt_profile_ends **ends)
{
    struct hapt_profile_ends *made;
    const size_t L = (size_t)layer_count;
    HAPT_NEW(made, arena, (size_t)submeshes * L);
    for (size_t row = 0; row < (size_t)submeshes * L; row++) {
        const double *time_s = &stage_time[row * L];
        struct hapt_profile_ends own = {(int)(row % L) + 1, layer_count};
        while (own.least <= layer_count && isnan(time_s[own.least - 1])) own.least++;
        while (own.most >= own.least && isnan(time_s[own.most - 1])) own.most--;
        made[row] = own;
    }
    *ends = made;
    return HAPT_OK;
}

/* Finite, not negative, and small enough that sums and quotients stay finite. */
static bool is_amount(double value)
{
    return value >= 0 && value <= 1e30;
}

#define BAD(...) hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables", "profile: " __VA_ARGS__)

static enum hapt_status check_links(const struct hapt_profile *profile)
{
    const int C = profile->cluster_count;
    if (!is_amount(profile->flops))
        return BAD("flops_per_microbatch is %g; it must be between 0 and 1e30", profile->flops);
    for (int layer = 0; layer < profile->layer_count; layer++)
        if (!is_amount(profile->boundary_bytes[layer]))
            return BAD("boundary_bytes[%d] is %g; it must be between 0 and 1e30", layer,
                       profile->boundary_bytes[layer]);
    for (int layer = 0; profile->tied_bytes && layer < profile->layer_count; layer++)
        if (!is_amount(profile->tied_bytes[layer]))
            return BAD("tied_bytes[%d] is %g; it must be between 0 and 1e30", layer, profile->tied_bytes[layer]);
    for (int a = 0; a < C; a++) {
        for (int b = 0; b < C; b++) {
            const double bandwidth = profile->link_bandwidth[a * C + b], back = profile->link_bandwidth[b * C + a];
            const double latency = profile->link_latency[a * C + b], latency_back = profile->link_latency[b * C + a];
            if (!(bandwidth >= 1e-9))
                return BAD("link_bandwidth[%d][%d] is %g byte/s; it must be positive", a, b, bandwidth);
            if (!is_amount(latency))
                return BAD("link_latency[%d][%d] is %g s; it must be between 0 and 1e30", a, b, latency);
            if (bandwidth != back && !(fabs(bandwidth - back) <= 1e-6 * bandwidth))
                return BAD("link_bandwidth is not symmetric: [%d][%d] is %g byte/s, [%d][%d] is %g byte/s", a, b,
                           bandwidth, b, a, back);
            if (!(fabs(latency - latency_back) <= 1e-6 * latency))
                return BAD("link_latency is not symmetric: [%d][%d] is %g s, [%d][%d] is %g s", a, b, latency, b, a,
                           latency_back);
        }
    }
    return HAPT_OK;
}

/* True if stages on a submesh can have their weights there. */
static bool may_have_weights(const struct hapt_profile *profile, const struct hapt_submesh *submesh)
{
    const int devices = submesh->n * submesh->m;
    switch (submesh->weights_at) {
    case HAPT_WEIGHTS_RESIDENT: return true;
    case HAPT_WEIGHTS_ON_HOST: return profile->host_state && submesh->program == 0;
    case HAPT_GRADIENTS_ON_HOST:
        return profile->host_state && profile->host_update && submesh->program == 0 && devices == 1;
    case HAPT_WEIGHTS_SHARDED: return submesh->program == 0 && devices > submesh->tp;
    default: return false;
    }
}

/* Checks that submeshes obey the packing rule: a power of two that divides a node, or entire nodes. */
static enum hapt_status check_submeshes(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster)
{
    const int N = cluster->nodes, M = cluster->devices_per_node;
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct hapt_submesh submesh = cluster->submesh[s];
        const int n = submesh.n, m = submesh.m;
        const bool part = n == 1 && m >= 1 && m < M && M % m == 0 && (m & (m - 1)) == 0;
        const bool whole = m == M && n >= 1 && n <= N;
        if (!part && !whole)
            return BAD("subcluster %s (%d x %d devices) cannot be divided into submeshes of %d x %d", cluster->name, N,
                       M, n, m);
        if (submesh.tp < 1 || m % submesh.tp != 0)
            return BAD("subcluster %s: %d x %d devices cannot form tensor-parallel groups of %d", cluster->name, n, m,
                       submesh.tp);
        if (submesh.program < 0 || submesh.program > profile->layout_count || (submesh.program > 0 && submesh.tp != 1))
            return BAD("subcluster %s: %d x %d devices run program %d of %d, which does not exist or is not for "
                       "tensor-parallel degree 1",
                       cluster->name, n, m, submesh.program, profile->layout_count);
        if (!hapt_recompute_is_valid(submesh.recompute))
            return BAD("subcluster %s: %d x %d devices recompute %d, which is not 0 to %d parts, plus a multiple of %d "
                       "below %d",
                       cluster->name, n, m, submesh.recompute, HAPT_RECOMPUTE_PARTS, HAPT_RECOMPUTE_SELECTIVE,
                       2 * HAPT_RECOMPUTE_BY_BYTES);
        if (!may_have_weights(profile, &submesh))
            return BAD("subcluster %s: %d x %d devices have host_weights %d, not 0, 1 for plain programs whose "
                       "optimizer state is on the hosts, 2 for those of one device that the hosts update, or 3 for "
                       "plain data-parallel programs",
                       cluster->name, n, m, submesh.weights_at);
        if (submesh.program > 0) {
            const struct hapt_axis *axis = profile->layout[submesh.program - 1]->axis;
            if (axis[0].size != n || axis[1].size != m)
                return BAD("subcluster %s: %d x %d devices run program %d, which is for %d x %d devices", cluster->name,
                           n, m, submesh.program, axis[0].size, axis[1].size);
        }
        for (int other = 0; other < s; other++)
            if (hapt_submesh_same(&cluster->submesh[other], &submesh))
                return BAD("subcluster %s lists submesh %d x %d twice", cluster->name, n, m);
    }
    return HAPT_OK;
}

static enum hapt_status check_overhead(const struct hapt_profile_cluster *cluster)
{
    if (!(cluster->deferrable >= 0 && cluster->deferrable <= 1))
        return BAD("%s: deferrable is %g; it must be between 0 and 1", cluster->name, cluster->deferrable);
    if (cluster->split_overhead >= 0 && cluster->split_overhead <= 10) return HAPT_OK;
    return BAD("%s: split_overhead is %g; it must be between 0 and 10", cluster->name, cluster->split_overhead);
}

/* weight_time NaN: unknown for this candidate. */
static enum hapt_status check_split(const struct hapt_profile_cluster *cluster, size_t cell, int s, int i, int j)
{
    const double backward_s = cluster->stage_time[cell] - cluster->stage_forward_time[cell];
    if (!cluster->weight_time || isnan(cluster->weight_time[cell])) return HAPT_OK;
    if (!is_amount(cluster->weight_time[cell]) ||
        cluster->weight_time[cell] > backward_s + 1e-6 * cluster->stage_time[cell])
        return BAD("%s: weight_time[%d][%d][%d] is %g s, but the backward pass takes %g s", cluster->name, s, i, j,
                   cluster->weight_time[cell], backward_s);
    if (!is_amount(cluster->split_parameter_bytes[cell]) || !is_amount(cluster->weight_slot_bytes[cell]))
        return BAD("%s: split_parameter_bytes or weight_slot_bytes[%d][%d][%d] is not between 0 and 1e30",
                   cluster->name, s, i, j);
    return HAPT_OK;
}

static enum hapt_status check_candidates(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster,
                                         int64_t *candidates)
{
    for (int s = 0; s < cluster->submesh_count; s++) {
        for (int i = 0; i < profile->layer_count; i++) {
            for (int j = i; j < profile->layer_count; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const double time = cluster->stage_time[cell], forward = cluster->stage_forward_time[cell];
                if (!isfinite(time)) continue;
                ++*candidates;
                if (!is_amount(time))
                    return BAD("%s: stage_time[%d][%d][%d] is %g s; it must be between 0 and 1e30 s", cluster->name, s,
                               i, j, time);
                /* single-precision tables may round the forward part up */
                if (!is_amount(forward) || forward > time * (1 + 1e-6))
                    return BAD("%s: stage_forward_time[%d][%d][%d] is %g s, but stage_time is %g s", cluster->name, s,
                               i, j, forward, time);
                if (!is_amount(cluster->parameter_bytes[cell]))
                    return BAD("%s: parameter_bytes[%d][%d][%d] is %g; it must be between 0 and 1e30", cluster->name, s,
                               i, j, cluster->parameter_bytes[cell]);
                if (!is_amount(cluster->activation_bytes[cell]))
                    return BAD("%s: activation_bytes[%d][%d][%d] is %g; it must be between 0 and 1e30", cluster->name,
                               s, i, j, cluster->activation_bytes[cell]);
                if (cluster->step_time && !is_amount(cluster->step_time[cell]))
                    return BAD("%s: step_time[%d][%d][%d] is %g s; it must be between 0 and 1e30 s", cluster->name, s,
                               i, j, cluster->step_time[cell]);
                HAPT_TRY(check_split(cluster, cell, s, i, j));
            }
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_profile_check(const struct hapt_profile *profile)
{
    if (profile->layer_count < 1) return BAD("it has no layers");
    if (profile->cluster_count < 1 || profile->cluster_count > HAPT_MAX_SUBCLUSTERS)
        return BAD("it has %d subclusters; between 1 and %d are possible", profile->cluster_count,
                   HAPT_MAX_SUBCLUSTERS);
    HAPT_TRY(check_links(profile));
    int64_t candidates = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        if (cluster->nodes < 1 || cluster->devices_per_node < 1 || cluster->nodes > HAPT_PROFILE_MAX_DEVICES ||
            cluster->devices_per_node > HAPT_PROFILE_MAX_DEVICES / cluster->nodes)
            return BAD("subcluster %s has %d nodes of %d devices; at most 65536 devices are possible", cluster->name,
                       cluster->nodes, cluster->devices_per_node);
        if (!is_amount(cluster->device_memory_bytes))
            return BAD("subcluster %s: device_memory_bytes is %g; it must be between 0 and 1e30", cluster->name,
                       cluster->device_memory_bytes);
        if (!is_amount(cluster->peak_flops))
            return BAD("subcluster %s: peak_flops is %g FLOP/s; it must be between 0 and 1e30", cluster->name,
                       cluster->peak_flops);
        for (int other = 0; other < c; other++)
            if (strcmp(profile->cluster[other].name, cluster->name) == 0)
                return BAD("two subclusters have the name %s", cluster->name);
        HAPT_TRY(check_submeshes(profile, cluster));
        HAPT_TRY(check_overhead(cluster));
        HAPT_TRY(check_candidates(profile, cluster, &candidates));
    }
    HAPT_TRY(hapt_profile_check_mixed(profile, &candidates));
    if (profile->crossings) HAPT_TRY(hapt_crossings_check(profile->crossings, profile->layer_count));
    if (candidates == 0) return BAD("no stage_time is finite, so there are no candidates");
    return HAPT_OK;
}

/* Seconds from subcluster c to the nearest of `others` (`outward`: from c, else to c), if slower than `slowest_s`. */
static double keep_slower(const struct hapt_profile *profile, double bytes, int c, struct hapt_subclusters others,
                          bool outward, double slowest_s, int deciding[2])
{
    double nearest_s = INFINITY;
    int nearest = others.index[0];
    for (int k = 0; k < others.count; k++) {
        const int other = others.index[k];
        const int link = outward ? c * profile->cluster_count + other : other * profile->cluster_count + c;
        const double link_s = profile->link_latency[link] + bytes / profile->link_bandwidth[link];
        if (link_s >= nearest_s) continue;
        nearest_s = link_s;
        nearest = other;
    }
    if (nearest_s <= slowest_s) return slowest_s;
    deciding[0] = outward ? c : nearest;
    deciding[1] = outward ? nearest : c;
    return nearest_s;
}

double hapt_profile_transfer_s(const struct hapt_profile *profile, double bytes, struct hapt_subclusters from,
                               struct hapt_subclusters to, int link[2])
{
    double slowest_s = -1;
    int deciding[2] = {from.index[0], to.index[0]};
    for (int k = 0; k < from.count; k++)
        slowest_s = keep_slower(profile, bytes, from.index[k], to, true, slowest_s, deciding);
    for (int k = 0; k < to.count; k++)
        slowest_s = keep_slower(profile, bytes, to.index[k], from, false, slowest_s, deciding);
    if (link) memcpy(link, deciding, sizeof deciding);
    return fmax(0, slowest_s);
}

double hapt_profile_boundary_s(const struct hapt_profile *profile, int last, struct hapt_subclusters from,
                               struct hapt_subclusters to, int link[2])
{
    if (last < profile->layer_count - 1)
        return hapt_profile_transfer_s(profile, profile->boundary_bytes[last], from, to, link);
    if (link) link[0] = from.index[0], link[1] = to.index[0];
    return 0;
}

double hapt_profile_comm_s(const struct hapt_profile *profile, int last, int from, int to)
{
    return hapt_profile_boundary_s(profile, last, (struct hapt_subclusters){1, &from},
                                   (struct hapt_subclusters){1, &to}, NULL);
}
