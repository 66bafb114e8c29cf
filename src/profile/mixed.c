/* Groups of mixed stages: creating, checking, copying. */
#include <math.h>
#include <string.h>

#include "profile_private.h"

#define BAD(...) hapt_fail(HAPT_ERR_INPUT, "`hapt help profile` describes the tables", "profile: " __VA_ARGS__)
#define RATIO_SUM 1e-5 /* tolerance for the sum of ratios: files may hold them in single precision */

static int device_count(const struct hapt_profile_mixed *mixed)
{
    int devices = 0;
    for (int i = 0; i < mixed->count; i++) devices += mixed->devices[i];
    return devices;
}

/* The caller sets the optional members. */
static enum hapt_status make(const struct hapt_profile *profile, int count, const int *cluster, const int *devices,
                             int memory_rows, struct hapt_arena *arena, struct hapt_profile_mixed *made)
{
    const size_t cells = hapt_profile_index(profile, 1, 0, 0), rows = (size_t)memory_rows;
    *made = (struct hapt_profile_mixed){.count = count, .memory_rows = memory_rows};
    HAPT_NEW(made->cluster, arena, count);
    HAPT_NEW(made->devices, arena, count);
    memcpy(made->cluster, cluster, (size_t)count * sizeof *cluster);
    memcpy(made->devices, devices, (size_t)count * sizeof *devices);
    HAPT_NEW(made->stage_time, arena, cells);
    HAPT_NEW(made->stage_forward_time, arena, cells);
    HAPT_NEW(made->parameter_bytes, arena, rows * cells);
    HAPT_NEW(made->activation_bytes, arena, rows * cells);
    for (size_t cell = 0; cell < cells; cell++) made->stage_time[cell] = made->stage_forward_time[cell] = NAN;
    return HAPT_OK;
}

enum hapt_status hapt_profile_add_mixed(struct hapt_profile *profile, int count, const int *cluster, const int *devices,
                                        struct hapt_arena *arena, struct hapt_profile_mixed **mixed)
{
    HAPT_ASSERT(count >= 2);
    struct hapt_profile_mixed *more;
    const size_t before = (size_t)profile->mixed_count;
    HAPT_NEW(more, arena, before + 1);
    if (before > 0) memcpy(more, profile->mixed, before * sizeof *more);
    HAPT_TRY(make(profile, count, cluster, devices, count, arena, &more[before]));
    profile->mixed = more;
    profile->mixed_count++;
    *mixed = &more[before];
    return HAPT_OK;
}

static enum hapt_status copy_one(const struct hapt_profile *profile, const struct hapt_profile_mixed *from,
                                 struct hapt_arena *arena, struct hapt_profile_mixed *to)
{
    const size_t cells = hapt_profile_index(profile, 1, 0, 0), bytes = cells * sizeof(double);
    HAPT_TRY(make(profile, from->count, from->cluster, from->devices, from->memory_rows, arena, to));
    to->program = from->program;
    memcpy(to->stage_time, from->stage_time, bytes);
    memcpy(to->stage_forward_time, from->stage_forward_time, bytes);
    memcpy(to->parameter_bytes, from->parameter_bytes, (size_t)from->memory_rows * bytes);
    memcpy(to->activation_bytes, from->activation_bytes, (size_t)from->memory_rows * bytes);
    if (from->step_time) {
        HAPT_NEW(to->step_time, arena, cells);
        memcpy(to->step_time, from->step_time, bytes);
    }
    if (from->ratio) {
        const size_t devices = (size_t)device_count(from);
        HAPT_NEW(to->ratio, arena, devices);
        memcpy(to->ratio, from->ratio, devices * sizeof *to->ratio);
    }
    return HAPT_OK;
}

enum hapt_status hapt_profile_copy_mixed(const struct hapt_profile *profile, struct hapt_arena *arena,
                                         struct hapt_profile *copy)
{
    HAPT_NEW(copy->mixed, arena, profile->mixed_count);
    for (int k = 0; k < profile->mixed_count; k++)
        HAPT_TRY(copy_one(profile, &profile->mixed[k], arena, &copy->mixed[k]));
    copy->mixed_count = profile->mixed_count;
    return HAPT_OK;
}

/* Finite, not negative, and small enough that sums and quotients stay finite. */
static bool is_amount(double value)
{
    return value >= 0 && value <= 1e30;
}

static enum hapt_status check_devices(const struct hapt_profile *profile, int k)
{
    const struct hapt_profile_mixed *mixed = &profile->mixed[k];
    if (mixed->count < 2) return BAD("mixed_%d names %d subcluster; a mixed stage needs two or more", k, mixed->count);
    for (int i = 0; i < mixed->count; i++) {
        const int c = mixed->cluster[i];
        if (c < 0 || c >= profile->cluster_count)
            return BAD("mixed_%d: clusters[%d] is %d, but there are %d subclusters", k, i, c, profile->cluster_count);
        if (i > 0 && c <= mixed->cluster[i - 1]) return BAD("mixed_%d: clusters do not ascend", k);
        const int all = profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
        if (mixed->devices[i] < 1 || mixed->devices[i] > all)
            return BAD("mixed_%d takes %d of the %d devices of subcluster %s", k, mixed->devices[i], all,
                       profile->cluster[c].name);
    }
    for (int other = 0; other < k; other++) {
        const struct hapt_profile_mixed *twin = &profile->mixed[other];
        if (twin->count == mixed->count && twin->program == mixed->program &&
            memcmp(twin->cluster, mixed->cluster, (size_t)twin->count * sizeof *twin->cluster) == 0 &&
            memcmp(twin->devices, mixed->devices, (size_t)twin->count * sizeof *twin->devices) == 0)
            return BAD("mixed_%d and mixed_%d have the same devices and the same program", other, k);
    }
    return HAPT_OK;
}

/* A program must be over all devices of the mixed group, along one axis. */
static enum hapt_status check_program(const struct hapt_profile *profile, int k)
{
    const struct hapt_profile_mixed *mixed = &profile->mixed[k];
    const int devices = device_count(mixed);
    if (mixed->program < 0 || mixed->program > profile->layout_count)
        return BAD("mixed_%d runs program %d, but there are %d programs", k, mixed->program, profile->layout_count);
    if (mixed->program == 0) return HAPT_OK;
    const struct hapt_axis *axis = profile->layout[mixed->program - 1]->axis;
    if (axis[0].size != devices || axis[1].size != 1)
        return BAD("mixed_%d has %d devices but runs program %d, which is for %d x %d devices", k, devices,
                   mixed->program, axis[0].size, axis[1].size);
    return HAPT_OK;
}

static enum hapt_status check_ratios(const struct hapt_profile_mixed *mixed, int k)
{
    const int devices = device_count(mixed);
    double sum = 0;
    if (!mixed->ratio) return HAPT_OK;
    for (int i = 0; i < devices; i++) {
        const bool none = mixed->ratio[i] == 0 && mixed->program > 0; /* some of a program's work is replicated */
        if (!none && !(mixed->ratio[i] > 0 && mixed->ratio[i] <= 1))
            return BAD("mixed_%d: ratios[%d] is %g; it must be above 0 and at most 1", k, i, mixed->ratio[i]);
        sum += mixed->ratio[i];
    }
    return fabs(sum - 1) <= RATIO_SUM ? HAPT_OK : BAD("mixed_%d: ratios add up to %g, not to 1", k, sum);
}

static enum hapt_status check_memory(const struct hapt_profile *profile, int k, int i, int j)
{
    const struct hapt_profile_mixed *mixed = &profile->mixed[k];
    for (int row = 0; row < mixed->memory_rows; row++) {
        const size_t cell = hapt_profile_index(profile, row, i, j);
        if (!is_amount(mixed->parameter_bytes[cell]))
            return BAD("mixed_%d: parameter_bytes[%d][%d][%d] is %g; it must be between 0 and 1e30", k, row, i, j,
                       mixed->parameter_bytes[cell]);
        if (!is_amount(mixed->activation_bytes[cell]))
            return BAD("mixed_%d: activation_bytes[%d][%d][%d] is %g; it must be between 0 and 1e30", k, row, i, j,
                       mixed->activation_bytes[cell]);
    }
    return HAPT_OK;
}

static enum hapt_status check_candidates(const struct hapt_profile *profile, int k, int64_t *candidates)
{
    const struct hapt_profile_mixed *mixed = &profile->mixed[k];
    for (int i = 0; i < profile->layer_count; i++) {
        for (int j = i; j < profile->layer_count; j++) {
            const size_t cell = hapt_profile_index(profile, 0, i, j);
            const double time = mixed->stage_time[cell], forward = mixed->stage_forward_time[cell];
            if (!isfinite(time)) continue;
            ++*candidates;
            if (!is_amount(time))
                return BAD("mixed_%d: stage_time[%d][%d] is %g s; it must be between 0 and 1e30 s", k, i, j, time);
            /* single-precision tables may round the forward part up */
            if (!is_amount(forward) || forward > time * (1 + 1e-6))
                return BAD("mixed_%d: stage_forward_time[%d][%d] is %g s, but stage_time is %g s", k, i, j, forward,
                           time);
            if (mixed->step_time && !is_amount(mixed->step_time[cell]))
                return BAD("mixed_%d: step_time[%d][%d] is %g s; it must be between 0 and 1e30 s", k, i, j,
                           mixed->step_time[cell]);
            HAPT_TRY(check_memory(profile, k, i, j));
        }
    }
    return HAPT_OK;
}

enum hapt_status hapt_profile_check_mixed(const struct hapt_profile *profile, int64_t *candidates)
{
    if (profile->mixed_count > HAPT_PROFILE_MAX_MIXED)
        return BAD("there are %d groups of mixed stages; at most %d are possible", profile->mixed_count,
                   HAPT_PROFILE_MAX_MIXED);
    for (int k = 0; k < profile->mixed_count; k++) {
        const struct hapt_profile_mixed *mixed = &profile->mixed[k];
        HAPT_TRY(check_devices(profile, k));
        HAPT_TRY(check_program(profile, k));
        if (mixed->memory_rows != 1 && mixed->memory_rows != mixed->count)
            return BAD("mixed_%d: memory for %d subclusters, but it has %d", k, mixed->memory_rows, mixed->count);
        HAPT_TRY(check_ratios(mixed, k));
        HAPT_TRY(check_candidates(profile, k, candidates));
    }
    return HAPT_OK;
}
