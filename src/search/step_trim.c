/*
 * Leaves out stages that occur in no plan about as short as a known one. The search of the formula then reads fewer
 * candidates. It is run for many views of the profile.
 *
 * Let T be the step of the known plan times a margin. A stage of time t is left out if B t > T, or if all other devices
 * need longer than T for all other layers (step_rest.c).
 */
#include "step.h"

#include <math.h>
#include <string.h>

/* Candidates that are slower than the best one by more than this factor are not refined. */
#define WORTH 1.06
/* The stages are chosen again if the known step is shorter by this factor. */
#define AGAIN 0.99

/* The device time that all devices together give per second (step_rest.c); 0: unknown. */
static double rate_of(const struct step_search *search, const struct step_front *front)
{
    double rate = 0;
    if (search->profile->mixed_count > 0) return 0;
    for (int c = 0; c < search->C; c++)
        rate += search->profile->cluster[c].nodes * search->profile->cluster[c].devices_per_node / front->ratio[c];
    return rate;
}

struct trimming {
    const struct step_search *search;
    struct step_front front;
    double rate, most_s; /* of a microbatch on a stage */
};

/* The least time of a microbatch if a stage of `devices` of subcluster c has layers [first, end). */
static double rest_s(const struct trimming *trimming, int c, int devices, int first, int end)
{
    const double *work_s = trimming->front.work_s;
    const double left_s = work_s[trimming->search->L] - (work_s[end] - work_s[first]);
    const double rate = trimming->rate - devices / trimming->front.ratio[c];
    if (trimming->rate == 0 || left_s <= 0) return 0;
    return rate > 0 ? left_s / rate * (1 - 1e-9) : 0; /* without devices left: rounding may hide a small rest */
}

static void drop_slow(const struct trimming *trimming, int c, int s, double *time_s)
{
    const struct step_search *search = trimming->search;
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    const int devices = cluster->submesh[s].n * cluster->submesh[s].m;
    for (int first = 0; first < search->L; first++) {
        const struct hapt_profile_ends ends = hapt_profile_ends_of(search->profile, cluster, s, first);
        for (int end = ends.least; end <= ends.most; end++) {
            const size_t cell = hapt_profile_index(search->profile, s, first, end - 1);
            if (!isfinite(time_s[cell])) continue;
            if (time_s[cell] > trimming->most_s || rest_s(trimming, c, devices, first, end) > trimming->most_s)
                time_s[cell] = NAN;
        }
    }
}

enum hapt_status step_trim(struct step_search *search)
{
    struct trimming trimming = {.search = search};
    const double step_s = fmin(search->best.step_s, search->known_s);
    if (!isfinite(step_s) || step_s > AGAIN * search->trimmed_s) return HAPT_OK;
    search->trimmed_s = step_s;
    HAPT_TRY(step_front_create(search, &trimming.front));
    trimming.rate = rate_of(search, &trimming.front);
    trimming.most_s = WORTH * step_s / search->B;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const size_t cells = hapt_profile_index(search->profile, cluster->submesh_count, 0, 0);
        double *time_s;
        HAPT_NEW(time_s, &search->arena, cells);
        memcpy(time_s, cluster->stage_time, cells * sizeof *time_s);
        for (int s = 0; s < cluster->submesh_count; s++) drop_slow(&trimming, c, s, time_s);
        search->useful.cluster[c].stage_time = time_s;
        HAPT_TRY(hapt_profile_find_ends(search->L, cluster->submesh_count, time_s, &search->arena,
                                        &search->useful.cluster[c].ends));
    }
    for (int k = 0; k < STEP_RELAXATIONS; k++) search->is_relaxed[k] = false;
    return HAPT_OK;
}
