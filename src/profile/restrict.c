/* Copies of profiles, and removing candidates from them. */
#include <math.h>
#include <string.h>

#include "profile_private.h"

static enum hapt_status copy_cluster(const struct hapt_profile *profile, int c, struct hapt_arena *arena,
                                     struct hapt_profile *copy)
{
    const struct hapt_profile_cluster *from = &profile->cluster[c];
    struct hapt_profile_cluster *to = &copy->cluster[c];
    HAPT_TRY(hapt_profile_add_cluster(copy, c, from->name, from->nodes, from->devices_per_node,
                                      from->device_memory_bytes, from->peak_flops, from->submesh, from->submesh_count,
                                      arena));
    const size_t bytes = hapt_profile_index(profile, from->submesh_count, 0, 0) * sizeof(double);
    memcpy(to->stage_time, from->stage_time, bytes);
    memcpy(to->stage_forward_time, from->stage_forward_time, bytes);
    memcpy(to->parameter_bytes, from->parameter_bytes, bytes);
    memcpy(to->activation_bytes, from->activation_bytes, bytes);
    if (from->step_time)
        memcpy(to->step_time, from->step_time, bytes);
    else
        to->step_time = NULL;
    to->deferrable = from->deferrable;
    if (!from->weight_time) return HAPT_OK;
    to->split_overhead = from->split_overhead;
    HAPT_TRY(hapt_profile_add_split(copy, c, arena));
    memcpy(to->weight_time, from->weight_time, bytes);
    memcpy(to->split_parameter_bytes, from->split_parameter_bytes, bytes);
    memcpy(to->weight_slot_bytes, from->weight_slot_bytes, bytes);
    return HAPT_OK;
}

enum hapt_status hapt_profile_copy(const struct hapt_profile *profile, struct hapt_arena *arena,
                                   struct hapt_profile **copy)
{
    struct hapt_profile *made;
    const size_t C = (size_t)profile->cluster_count;
    HAPT_TRY(hapt_profile_create(profile->layer_count, profile->cluster_count, arena, &made));
    memcpy(made->boundary_bytes, profile->boundary_bytes, (size_t)profile->layer_count * sizeof(double));
    if (profile->tied_bytes) {
        HAPT_NEW(made->tied_bytes, arena, profile->layer_count);
        memcpy(made->tied_bytes, profile->tied_bytes, (size_t)profile->layer_count * sizeof(double));
    }
    memcpy(made->link_bandwidth, profile->link_bandwidth, C * C * sizeof(double));
    memcpy(made->link_latency, profile->link_latency, C * C * sizeof(double));
    made->crossings = profile->crossings; /* they never change, so they are shared */
    made->flops = profile->flops;
    made->precision = profile->precision;
    made->origin = profile->origin;
    made->noise = profile->noise;
    made->drift = profile->drift;
    made->exchange = profile->exchange;
    made->host_state = profile->host_state;
    made->host_update = profile->host_update;
    made->layout_count = profile->layout_count; /* layouts never change, so they are shared */
    made->layout = profile->layout;
    for (int c = 0; c < profile->cluster_count; c++) HAPT_TRY(copy_cluster(profile, c, arena, made));
    HAPT_TRY(hapt_profile_copy_mixed(profile, arena, made));
    *copy = made;
    return HAPT_OK;
}

void hapt_profile_keep_subclusters(struct hapt_profile *profile, unsigned subclusters)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        if (subclusters >> c & 1u) continue;
        const size_t cells = hapt_profile_index(profile, profile->cluster[c].submesh_count, 0, 0);
        for (size_t cell = 0; cell < cells; cell++) profile->cluster[c].stage_time[cell] = NAN;
    }
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        bool kept = true;
        for (int i = 0; i < mixed->count; i++) kept &= subclusters >> mixed->cluster[i] & 1u;
        const size_t cells = hapt_profile_index(profile, 1, 0, 0);
        for (size_t cell = 0; !kept && cell < cells; cell++) mixed->stage_time[cell] = NAN;
    }
}

void hapt_profile_keep_programs(struct hapt_profile *profile, const char *program)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh row = cluster->submesh[s];
            const char *its = row.program > 0 ? "synthesised" : row.tp > 1 ? "tensor" : "data";
            if (row.n * row.m == 1 || strcmp(its, program) == 0) continue;
            const size_t end = hapt_profile_index(profile, s + 1, 0, 0);
            for (size_t cell = hapt_profile_index(profile, s, 0, 0); cell < end; cell++)
                cluster->stage_time[cell] = NAN;
        }
    }
    int kept = 0;
    for (int k = 0; k < profile->mixed_count; k++)
        if (strcmp(program, profile->mixed[k].program > 0 ? "synthesised" : "data") == 0)
            profile->mixed[kept++] = profile->mixed[k];
    profile->mixed_count = kept;
}

/* A copy whose subclusters can be changed. */
static enum hapt_status begin_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                   struct hapt_profile **view)
{
    HAPT_NEW(*view, arena, 1);
    **view = *profile;
    HAPT_NEW((*view)->cluster, arena, profile->cluster_count);
    for (int c = 0; c < profile->cluster_count; c++) {
        (*view)->cluster[c] = profile->cluster[c];
        (*view)->cluster[c].ends = NULL;
    }
    return HAPT_OK;
}

enum hapt_status hapt_profile_roomy_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile **view)
{
    HAPT_TRY(begin_view(profile, arena, view));
    for (int c = 0; c < profile->cluster_count; c++) (*view)->cluster[c].device_memory_bytes = HAPT_UNLIMITED_BYTES;
    return HAPT_OK;
}

bool hapt_profile_holds_all(const struct hapt_profile *profile)
{
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        bool holds = false;
        for (int s = 0; s < cluster->submesh_count && !holds; s++) {
            const struct hapt_submesh *submesh = &cluster->submesh[s];
            holds = submesh->n * submesh->m == 1 && submesh->recompute == 0 &&
                    !hapt_weights_move(submesh->weights_at) &&
                    isfinite(cluster->stage_time[hapt_profile_index(profile, s, 0, profile->layer_count - 1)]);
        }
        if (!holds) return false;
    }
    return true;
}

enum hapt_status hapt_profile_kept_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                        struct hapt_profile **view)
{
    HAPT_TRY(begin_view(profile, arena, view));
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *from = &profile->cluster[c];
        double **time = &(*view)->cluster[c].stage_time;
        HAPT_NEW(*time, arena, hapt_profile_index(profile, from->submesh_count, 0, 0));
        for (int s = 0; s < from->submesh_count; s++)
            for (size_t k = hapt_profile_index(profile, s, 0, 0); k < hapt_profile_index(profile, s + 1, 0, 0); k++)
                (*time)[k] = from->submesh[s].recompute > 0 || hapt_weights_move(from->submesh[s].weights_at)
                                 ? NAN
                                 : from->stage_time[k];
    }
    return HAPT_OK;
}

enum hapt_status hapt_profile_split_view(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile **view)
{
    struct hapt_profile *made;
    HAPT_TRY(begin_view(profile, arena, &made));
    made->mixed_count = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &made->cluster[c];
        const size_t cells = hapt_profile_index(profile, cluster->submesh_count, 0, 0);
        HAPT_NEW(cluster->stage_time, arena, cells);
        for (size_t cell = 0; cell < cells; cell++)
            cluster->stage_time[cell] = cluster->weight_time && isfinite(cluster->weight_time[cell])
                                            ? hapt_profile_split_time_s(&profile->cluster[c], cell)
                                            : NAN;
        if (!cluster->weight_time) continue;
        HAPT_NEW(cluster->parameter_bytes, arena, cells);
        for (size_t cell = 0; cell < cells; cell++) /* with one weight slot */
            cluster->parameter_bytes[cell] = cluster->split_parameter_bytes[cell] + cluster->weight_slot_bytes[cell];
    }
    *view = made;
    return HAPT_OK;
}

bool hapt_profile_keep_degree(struct hapt_profile *profile, int degree)
{
    bool some = false;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const bool kept = cluster->submesh[s].tp == degree && cluster->submesh[s].program == 0;
            const size_t end = hapt_profile_index(profile, s + 1, 0, 0);
            for (size_t cell = hapt_profile_index(profile, s, 0, 0); cell < end; cell++) {
                if (!kept) cluster->stage_time[cell] = NAN;
                some |= isfinite(cluster->stage_time[cell]);
            }
        }
    }
    profile->mixed_count = 0;
    return some;
}
