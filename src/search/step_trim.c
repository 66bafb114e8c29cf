/*
 * Leaves out stages that no plan has which is about as short as a known one. The search of the formula then reads fewer
 * candidates; it is run for many views of the profile.
 *
 * Let T be the step of the known plan times a margin. A stage of time t is left out if B t > T, or if all other devices
 * need longer than T for all other layers (step_rest.c). A stage is also left out if another program of the same
 * devices and layers takes no more time, device memory and work once a step.
 */
#include "search.h"
#include "step.h"

#include <math.h>
#include <string.h>

/* Candidates that are slower than the best one by more than this factor are not refined. */
#define WORTH 1.06
/* The stages are chosen again if the known step is shorter by this factor. */
#define AGAIN 0.99

/* What all devices do per second (step_rest.c); 0: unknown. */
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
    for (int first = 0; first < search->L; first++)
        for (int end = first + 1; end <= search->L; end++) {
            const size_t cell = hapt_profile_index(search->profile, s, first, end - 1);
            if (!isfinite(time_s[cell])) continue;
            if (time_s[cell] > trimming->most_s || rest_s(trimming, c, devices, first, end) > trimming->most_s)
                time_s[cell] = NAN;
        }
}

static bool at_most(const double *table, size_t a, size_t b)
{
    return !table || table[a] <= table[b];
}

/* Drops the cells of program b whose time, memory and work once a step are no less than those of program a. */
static void drop_dominated(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster, int a, int b,
                           double *time_s)
{
    const size_t cells = hapt_profile_index(profile, 1, 0, 0), from = (size_t)a * cells, to = (size_t)b * cells;
    const bool first = search_compare_submeshes(&cluster->submesh[a], &cluster->submesh[b]) < 0;
    for (size_t k = 0; k < cells; k++) {
        const size_t one = from + k, other = to + k;
        if (!(time_s[one] <= time_s[other] * (first ? 1 : 1 - 1e-9))) continue; /* also if one of them is NaN */
        if (cluster->parameter_bytes[one] <= cluster->parameter_bytes[other] &&
            cluster->activation_bytes[one] <= cluster->activation_bytes[other] &&
            at_most(cluster->step_time, one, other))
            time_s[other] = NAN;
    }
}

/* Programs that can be split are no worse than others only if as much of them waits, so all stay. */
static void drop_programs(const struct step_search *search, int c, double *time_s)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
    if (cluster->weight_time && search->options.split != HAPT_SPLIT_NO) return;
    for (int a = 0; a < cluster->submesh_count; a++)
        for (int b = 0; b < cluster->submesh_count; b++)
            if (a != b && cluster->submesh[a].n == cluster->submesh[b].n &&
                cluster->submesh[a].m == cluster->submesh[b].m)
                drop_dominated(search->profile, cluster, a, b, time_s);
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
        drop_programs(search, c, time_s);
        search->useful.cluster[c].stage_time = time_s;
    }
    for (int k = 0; k < STEP_RELAXATIONS; k++) search->is_relaxed[k] = false;
    return HAPT_OK;
}
