/*
 * Lower bounds of the layers behind a boundary, and of those in front, for plans whose other stages are known.
 *
 * Device time: a stage of n devices that takes t has n t of it. A layer has the least device time of the stages of that
 * layer alone. A stage on subcluster c has at least ratio[c] times the device time of its layers; the least ratio over
 * its stages. So if devices of c do 1 / ratio[c] of it per second, some stage of the layers in front takes at least
 * their device time over what all free devices do per second.
 */
#include "step.h"

#include <math.h>

double step_least_comm_s(const struct step_search *search, int layer)
{
    double least_s = INFINITY;
    for (int from = 0; from < step_device_sets(search); from++)
        for (int to = 0; to < step_device_sets(search); to++)
            least_s = fmin(least_s, hapt_profile_boundary_s(search->lowest, layer, step_subclusters_of(search, &from),
                                                            step_subclusters_of(search, &to), NULL));
    return least_s;
}

double step_least_time_s(const struct step_search *search, int first, int end)
{
    double least_s = INFINITY;
    for (int p = 0; p < step_device_sets(search); p++)
        for (int s = 0; s < step_submeshes_of(search, p); s++) {
            const double time_s = step_work_s(search, p, s, first, end);
            if (isfinite(time_s)) least_s = fmin(least_s, time_s);
        }
    return least_s;
}

enum hapt_status step_least_rest(struct step_search *search, double **made)
{
    double *all_s;
    HAPT_NEW(all_s, &search->arena, search->L + 1);
    *made = all_s;
    for (int first = search->L - 1; first >= 0; first--) {
        double best_s = INFINITY;
        for (int end = first + 1; end <= search->L; end++)
            best_s = fmin(best_s, step_least_time_s(search, first, end) + all_s[end]);
        all_s[first] = best_s + (first > 0 ? 2 * step_least_comm_s(search, first - 1) : 0);
    }
    return HAPT_OK;
}

/* Device time of a stage that fits; INFINITY: it does not, or is no candidate. */
static double device_time_s(const struct step_search *search, int c, int submesh, int first, int end)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    const size_t cell = hapt_profile_index(search->profile, submesh, first, end - 1);
    const double time_s = cluster->stage_time[cell];
    const double bytes = cluster->parameter_bytes[cell] + cluster->activation_bytes[cell];
    if (!isfinite(time_s) || !hapt_at_most(bytes, cluster->device_memory_bytes)) return INFINITY;
    return time_s * cluster->submesh[submesh].n * cluster->submesh[submesh].m;
}

/* The device time of all layers in front of each. A layer that is no stage alone has none of its own. */
static void sum_work(const struct step_search *search, double *work_s)
{
    for (int l = 0; l < search->L; l++) {
        double least_s = INFINITY;
        for (int c = 0; c < search->C; c++)
            for (int s = 0; s < search->profile->cluster[c].submesh_count; s++)
                least_s = fmin(least_s, device_time_s(search, c, s, l, l + 1));
        work_s[l + 1] = work_s[l] + (isfinite(least_s) ? least_s : 0);
    }
}

static double least_ratio(const struct step_search *search, const double *work_s, int c)
{
    double least = INFINITY;
    for (int s = 0; s < search->profile->cluster[c].submesh_count; s++)
        for (int first = 0; first < search->L; first++)
            for (int end = first + 1; end <= search->L; end++) {
                const double part_s = work_s[end] - work_s[first];
                if (part_s > 0) least = fmin(least, device_time_s(search, c, s, first, end) / part_s);
            }
    return least;
}

/* As step_least_rest, for the layers in front. */
static void find_least_front(const struct step_search *search, double *pass_s)
{
    for (int end = 1; end <= search->L; end++) {
        double best_s = INFINITY;
        for (int first = 0; first < end; first++)
            best_s = fmin(best_s, step_least_time_s(search, first, end) + pass_s[first]);
        pass_s[end] = best_s + (end < search->L ? 2 * step_least_comm_s(search, end - 1) : 0);
    }
}

enum hapt_status step_front_create(struct step_search *search, struct step_front *front)
{
    HAPT_NEW(front->pass_s, &search->arena, search->L + 1);
    HAPT_NEW(front->work_s, &search->arena, search->L + 1);
    HAPT_NEW(front->ratio, &search->arena, search->C);
    find_least_front(search, front->pass_s);
    if (search->profile->mixed_count > 0) return HAPT_OK; /* no bound */
    sum_work(search, front->work_s);
    for (int c = 0; c < search->C; c++) front->ratio[c] = least_ratio(search, front->work_s, c);
    return HAPT_OK;
}
