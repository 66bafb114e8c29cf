/*
 * A lower bound of the simulated step of every plan.
 *
 * Let h_i be the sum of w_j + 2 c_j in front of stage i (w_j: without the end of the step). Stage i gets its first
 * microbatch, and gives back its last gradient, through all stages in front. So a step takes at least h_i + B w_i + e,
 * where e is what stage 0 still does behind its last backward: the exchange of tied parameters. It also takes at least
 * F + (B - 1) max c_i + e, where F is the sum over all stages. A step of T is possible only if some plan keeps both
 * within T. For a given T, the least F of the plans with h_i + B w_i + e <= T comes from the prefixes of the exact
 * search: the least sum in front of a stage is also the best for every stage behind. So the bound is found by
 * bisection. A microbatch is in flight on a stage from its forward to its backward, at least for the time that it
 * spends on that stage and behind. So a stage that holds N takes B / N times as long: it is left out if that is longer
 * than the best step. Plans on several subclusters cross at least the fastest link
 * between two of them; plans inside one subcluster are bounded apart.
 */
#include "search.h"
#include "step.h"

#include <math.h>
#include <string.h>

/* Relative width at which the bisection stops. */
#define PRECISION 3e-4
/* The share of the best step that is tried first: bounds are rarely further away. */
#define NEAR 0.9

struct bounding {
    struct step_search *search;
    struct hapt_profile profile; /* step times left out; no stage that holds too few microbatches */
    double *rest_s;              /* [L + 1], step_least_rest */
    struct hapt_search_options options;
    struct search_table table;
    struct hapt_arena scratch;
};

/* Keeps the stages that a plan with a shorter step than the best one may have. */
static enum hapt_status copy_times(struct bounding *bounding, struct hapt_profile_cluster *cluster)
{
    const struct step_search *search = bounding->search;
    const int L = search->L, B = search->B;
    const double *time_s = cluster->stage_time;
    const size_t cells = hapt_profile_index(search->profile, cluster->submesh_count, 0, 0);
    HAPT_NEW(cluster->stage_time, &bounding->scratch, cells);
    for (size_t k = 0; k < cells; k++) {
        const double rest_s = bounding->rest_s[k % (size_t)L + 1], bytes = cluster->parameter_bytes[k];
        const double most = step_in_flight(bytes, cluster->activation_bytes[k], cluster->device_memory_bytes, B);
        const bool fits = hapt_at_most(bytes + cluster->activation_bytes[k], cluster->device_memory_bytes) &&
                          hapt_at_most(B * (time_s[k] + rest_s) / most, search->best.step_s);
        cluster->stage_time[k] = fits ? time_s[k] : NAN;
    }
    cluster->step_time = NULL;
    cluster->device_memory_bytes = INFINITY;
    return HAPT_OK;
}

/* The profile of the subclusters in `subclusters`: a view with times of its own. */
static enum hapt_status restrict_profile(struct bounding *bounding, unsigned subclusters)
{
    const struct hapt_profile *from = bounding->search->lowest;
    struct hapt_profile *to = &bounding->profile;
    *to = *from;
    HAPT_NEW(to->cluster, &bounding->scratch, from->cluster_count);
    memcpy(to->cluster, from->cluster, (size_t)from->cluster_count * sizeof *to->cluster);
    HAPT_NEW(to->mixed, &bounding->scratch, from->mixed_count);
    to->mixed_count = 0;
    for (int k = 0; k < from->mixed_count; k++) {
        unsigned uses = 0;
        for (int i = 0; i < from->mixed[k].count; i++) uses |= 1u << from->mixed[k].cluster[i];
        if ((uses & subclusters) != uses) continue;
        to->mixed[to->mixed_count] = from->mixed[k];
        to->mixed[to->mixed_count++].step_time = NULL;
    }
    for (int c = 0; c < from->cluster_count; c++) {
        HAPT_TRY(copy_times(bounding, &to->cluster[c]));
        if (subclusters >> c & 1u) continue;
        const size_t cells =
            (size_t)to->cluster[c].submesh_count * (size_t)from->layer_count * (size_t)from->layer_count;
        for (size_t k = 0; k < cells; k++) to->cluster[c].stage_time[k] = NAN;
    }
    return HAPT_OK;
}

/* Terms that every plan adds: e, and e + (B - 1) times a transfer. */
struct more {
    double end_s, sum_s;
};

/* *possible: the bounds allow a step of T. */
static enum hapt_status try_step(struct bounding *bounding, const struct more *more, double step_s, bool *possible)
{
    const int B = bounding->search->B;
    double sum_s;
    bounding->table.limit_s = (step_s - more->end_s) * (1 + 1e-12);
    *possible = false;
    if (!(bounding->table.limit_s > 0)) return HAPT_OK;
    HAPT_TRY(search_bound_reach(&bounding->table, bounding->table.limit_s / B, possible));
    if (!*possible) return HAPT_OK;
    HAPT_TRY(search_bound_prefixes(&bounding->table, &sum_s));
    *possible = sum_s + more->sum_s <= step_s * (1 + 1e-12);
    return HAPT_OK;
}

/* The largest step up to `high_s` which is found to be impossible. */
static enum hapt_status bisect(struct bounding *bounding, const struct more *more, double high_s, double *bound_s)
{
    double low_s = 0, first_s = NEAR * high_s;
    const double precision_s = PRECISION * high_s;
    bool possible;
    *bound_s = high_s;
    HAPT_TRY(try_step(bounding, more, high_s, &possible));
    if (!possible) return HAPT_OK;
    while (high_s - low_s > precision_s) {
        const double middle_s = first_s > 0 ? first_s : 0.5 * (low_s + high_s);
        first_s = 0;
        HAPT_TRY(try_step(bounding, more, middle_s, &possible));
        *(possible ? &high_s : &low_s) = middle_s;
    }
    *bound_s = low_s;
    return HAPT_OK;
}

/* The least that every plan on these subclusters adds. If there are several, it is an exchange of tied parameters, and
 * B - 1 transfers over the fastest link between two of them. A plan of one stage has neither. INFINITY: no link. */
static struct more least_more(const struct bounding *bounding, bool several)
{
    const struct hapt_profile *profile = bounding->search->link_load;
    double comm_s = INFINITY, tied_s = INFINITY;
    if (!several) return (struct more){0};
    for (int from = 0; from < profile->cluster_count; from++)
        for (int to = 0; to < profile->cluster_count; to++) {
            const struct hapt_subclusters first = {1, &from}, last = {1, &to};
            for (int layer = 0; layer + 1 < profile->layer_count; layer++) {
                if (from == to) continue; /* the stages of a subcluster are neighbours */
                comm_s = fmin(comm_s, hapt_profile_comm_s(profile, layer, from, to));
                tied_s = fmin(tied_s, hapt_profile_tied_s(profile, layer + 1, first, last));
            }
        }
    if (!isfinite(comm_s)) return (struct more){0, INFINITY};
    return (struct more){tied_s, (bounding->search->B - 1) * comm_s + tied_s};
}

/* The bound of the plans on these subclusters, at most `most_s`. */
static enum hapt_status bound_of(struct bounding *bounding, unsigned subclusters, bool several, double most_s,
                                 double *bound_s)
{
    struct search_problem *problem;
    struct more more;
    hapt_arena_reset(&bounding->scratch);
    HAPT_TRY(restrict_profile(bounding, subclusters));
    if (several) bounding->profile.mixed_count = 0; /* mixed stages: see step_bound */
    HAPT_TRY(search_problem_create(&bounding->profile, &bounding->options, INFINITY, -1, &bounding->scratch, &problem));
    *bound_s = most_s;
    if (problem->all_candidates == 0) return HAPT_OK;
    enum hapt_status status = search_table_init(problem, &bounding->scratch, &bounding->table);
    more = least_more(bounding, several);
    if (status == HAPT_OK) status = bisect(bounding, &more, most_s, bound_s);
    search_table_release(&bounding->table);
    return status;
}

enum hapt_status step_bound(struct step_search *search, double *bound_s)
{
    struct bounding bounding = {.search = search, .options = search->options};
    const unsigned every = (1u << search->C) - 1;
    double least_s = search->best.step_s;
    *bound_s = INFINITY;
    if (!isfinite(least_s)) return HAPT_OK; /* there is no plan */
    /* one launch per stage is enough for a bound; 1F1B's launch counts do not matter without a limit of memory */
    bounding.options.schedule = HAPT_SCHEDULE_1F1B;
    bounding.options.use_all_devices = false;
    HAPT_TRY(step_least_rest(search, &bounding.rest_s));
    hapt_arena_init(&bounding.scratch);
    enum hapt_status status = bound_of(&bounding, every, search->C > 1, least_s, &least_s);
    for (int c = 0; c < search->C && search->C > 1 && status == HAPT_OK; c++)
        status = bound_of(&bounding, 1u << c, false, least_s, &least_s);
    /* A plan with a mixed stage may cross no link between subclusters by a boundary. */
    if (status == HAPT_OK && search->profile->mixed_count > 0)
        status = bound_of(&bounding, every, false, least_s, &least_s);
    hapt_arena_release(&bounding.scratch);
    *bound_s = least_s * (1 - 1e-9);
    return status;
}
