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
 *
 * A stage also does u_i once a step, apart from its passes. With the optimizer state on hosts that takes seconds, so a
 * stage is left out if B w_i + u_i is longer than the best step.
 *
 * Split backward passes: the gradients of parameters wait, so they delay no other stage. Then two bounds hold, for
 * plans without a split, too. TRANSFERS: the same as above, where w_j lacks the part that waits. WORK: a stage gets its
 * first microbatch through the forward passes in front, and then it has all of its work. The share p of the forward
 * pass in w_j is at least that of some stage, and at most a half for this purpose. So p h_i + B w_i <= T, which is the
 * first condition above for B / p microbatches and a step of T / p; e and the second condition's transfers are left
 * out.
 */
#include "search.h"
#include "step.h"

#include <math.h>
#include <string.h>

/* Relative width at which the bisection stops. */
#define PRECISION 3e-4
/* Limit of scaled microbatches. */
#define MOST_SCALED 1e8
/* The share of the best step that is tried first: bounds are rarely further away. */
#define NEAR 0.9

/* Which work counts: all that stages do in unsplit passes; all but what waits; all, behind forward passes. */
enum kind { UNSPLIT, TRANSFERS, WORK, KINDS };

/* The useful stages of a subcluster: times, and their ends. Times of other ends are 0, not NaN. */
struct useful {
    double *stage_time; /* NULL: not found yet */
    struct hapt_profile_ends *ends;
};

struct bounding {
    struct step_search *search;
    bool split;           /* bounds plans that are split, too */
    double forward_share; /* p */
    enum kind kind;
    double scale;                 /* of the step: 1, or WORK: 1 / p */
    int B;                        /* microbatches, times the scale */
    struct hapt_profile profile;  /* step times left out; no stage that holds too few microbatches */
    double *rest_s;               /* [L + 1], step_least_rest */
    struct useful *useful[KINDS]; /* [C] */
    struct hapt_arena kept;       /* of `useful` */
    struct hapt_search_options options;
    struct search_table table;
    struct hapt_arena scratch;
};

static bool is_known(const struct hapt_profile_cluster *cluster, size_t cell)
{
    return cluster->weight_time && isfinite(cluster->weight_time[cell]);
}

/* u_i with the optimizer state on hosts, less its part of the exchange of tied parameters, and less the copies that may
 * hide behind a forward pass; else 0. */
static double once_s(const struct bounding *bounding, int c, size_t cell)
{
    const struct hapt_profile *profile = bounding->search->profile;
    const struct hapt_profile_cluster *cluster = &profile->cluster[c];
    const size_t L = (size_t)profile->layer_count;
    if (!profile->host_state || !cluster->step_time) return 0;
    const double share_s = hapt_profile_tied_share_s(profile, c, (int)(cell / L % L), (int)(cell % L));
    return fmax(0, cluster->step_time[cell] - share_s) * (1 - cluster->deferrable);
}

/* The time of a stage that a plan with a shorter step than the best one may have; NaN: no such plan has it. A split
 * program's microbatch is in flight at least until its backward, and behind the stage it may take less time than
 * unsplit ones. */
static double useful_s(const struct bounding *bounding, int c, size_t cell)
{
    const struct hapt_profile_cluster *cluster = &bounding->search->lowest->cluster[c];
    const struct step_search *search = bounding->search;
    const int B = search->B;
    const double time_s = cluster->stage_time[cell];
    if (isnan(time_s)) return NAN;
    const bool split = bounding->kind != UNSPLIT, waits = split && is_known(cluster, cell);
    const double rest_s = split ? 0 : bounding->rest_s[cell % (size_t)search->L + 1];
    const double bytes = waits ? fmin(cluster->parameter_bytes[cell], cluster->split_parameter_bytes[cell])
                               : cluster->parameter_bytes[cell];
    const double most = step_in_flight(bytes, cluster->activation_bytes[cell], cluster->device_memory_bytes, B);
    const double least_s = waits ? fmax(0, time_s - hapt_profile_split_weight_s(cluster, cell)) : time_s;
    const bool fits = hapt_at_most(bytes + cluster->activation_bytes[cell], cluster->device_memory_bytes) &&
                      hapt_at_most(B * (least_s + rest_s) / most, search->best.step_s) &&
                      hapt_at_most(B * time_s + once_s(bounding, c, cell), search->best.step_s);
    return !fits ? NAN : bounding->kind == TRANSFERS ? least_s : time_s;
}

static enum hapt_status find_useful(struct bounding *bounding, int c, struct useful *useful)
{
    const struct hapt_profile_cluster *from = &bounding->search->lowest->cluster[c];
    const int L = bounding->search->L, rows = from->submesh_count * L;
    HAPT_NEW(useful->ends, &bounding->kept, rows);
    HAPT_NEW(useful->stage_time, &bounding->kept, (size_t)rows * (size_t)L);
    for (int row = 0; row < rows; row++) {
        const struct hapt_profile_ends all = hapt_profile_ends_of(bounding->search->profile, from, row / L, row % L);
        struct hapt_profile_ends own = {L + 1, 0};
        for (int end = all.least; end <= all.most; end++) {
            const size_t cell = (size_t)row * (size_t)L + (size_t)end - 1;
            useful->stage_time[cell] = useful_s(bounding, c, cell);
            if (isnan(useful->stage_time[cell])) continue;
            if (own.least > end) own.least = end;
            own.most = end;
        }
        useful->ends[row] = own;
    }
    return HAPT_OK;
}

/* Restricts a subcluster of the view to its useful stages. used false: it has none. */
static enum hapt_status restrict_cluster(struct bounding *bounding, int c, bool used)
{
    struct hapt_profile_cluster *cluster = &bounding->profile.cluster[c];
    struct useful *useful = &bounding->useful[bounding->kind][c];
    if (used && !useful->stage_time) HAPT_TRY(find_useful(bounding, c, useful));
    if (!used) cluster->submesh_count = 0;
    cluster->stage_time = useful->stage_time;
    cluster->ends = useful->ends;
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
    for (int c = 0; c < from->cluster_count; c++) HAPT_TRY(restrict_cluster(bounding, c, subclusters >> c & 1u));
    return HAPT_OK;
}

/* Terms that every plan adds: e, and e + (B - 1) times a transfer. */
struct more {
    double end_s, sum_s;
};

/* *possible: the bounds allow a step of T. */
static enum hapt_status try_step(struct bounding *bounding, const struct more *more, double step_s, bool *possible)
{
    const double scaled_s = bounding->scale * step_s;
    double sum_s;
    bounding->table.limit_s = (scaled_s - more->end_s) * (1 + 1e-12);
    *possible = false;
    if (!(bounding->table.limit_s > 0)) return HAPT_OK;
    HAPT_TRY(search_bound_reach(&bounding->table, bounding->table.limit_s / bounding->B, possible));
    if (!*possible) return HAPT_OK;
    HAPT_TRY(search_bound_prefixes(&bounding->table, &sum_s));
    *possible = sum_s + more->sum_s <= scaled_s * (1 + 1e-12);
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
    if (!several || bounding->kind == WORK) return (struct more){0};
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
    HAPT_TRY(search_problem_create(&bounding->profile, &bounding->options, INFINITY, INFINITY, -1, &bounding->scratch,
                                   &problem));
    *bound_s = most_s;
    if (problem->all_candidates == 0) return HAPT_OK;
    enum hapt_status status = search_table_init(problem, &bounding->scratch, &bounding->table);
    more = least_more(bounding, several);
    if (status == HAPT_OK) status = bisect(bounding, &more, most_s, bound_s);
    search_table_release(&bounding->table);
    return status;
}

static void choose_kind(struct bounding *bounding, enum kind kind)
{
    const double share = bounding->forward_share;
    bounding->kind = kind;
    bounding->scale = kind == WORK ? 1 / share : 1;
    bounding->B = kind == WORK ? (int)(bounding->search->B / share) : bounding->search->B;
    bounding->options.microbatches = bounding->B;
}

/* The larger of the bounds that hold for the plans on these subclusters; *bound_s becomes it if it is less. */
static enum hapt_status lower_to(struct bounding *bounding, unsigned subclusters, bool several, double *bound_s)
{
    double least_s, other_s;
    if (!bounding->split) {
        choose_kind(bounding, UNSPLIT);
        return bound_of(bounding, subclusters, several, *bound_s, bound_s);
    }
    choose_kind(bounding, TRANSFERS);
    HAPT_TRY(bound_of(bounding, subclusters, several, *bound_s, &least_s));
    if (least_s >= *bound_s || bounding->forward_share * MOST_SCALED < bounding->search->B) {
        *bound_s = least_s;
        return HAPT_OK;
    }
    choose_kind(bounding, WORK);
    HAPT_TRY(bound_of(bounding, subclusters, several, *bound_s, &other_s));
    *bound_s = fmax(least_s, other_s);
    return HAPT_OK;
}

/* A bound of all plans, at most *bound_s. */
static enum hapt_status bound_all(struct bounding *bounding, double *bound_s)
{
    const struct step_search *search = bounding->search;
    const unsigned every = (1u << search->C) - 1;
    /* one launch per stage is enough for a bound; 1F1B's launch counts do not matter without a limit of memory */
    bounding->options.schedule = HAPT_SCHEDULE_1F1B;
    bounding->options.use_all_devices = false;
    hapt_arena_init(&bounding->scratch);
    hapt_arena_init(&bounding->kept);
    enum hapt_status status = HAPT_OK;
    for (int kind = 0; kind < KINDS && status == HAPT_OK; kind++) {
        bounding->useful[kind] = hapt_arena_alloc(&bounding->kept, (size_t)search->C, sizeof **bounding->useful);
        if (!bounding->useful[kind]) status = HAPT_ERR_MEMORY;
    }
    if (status == HAPT_OK) status = lower_to(bounding, every, search->C > 1, bound_s);
    for (int c = 0; c < search->C && search->C > 1 && status == HAPT_OK; c++)
        status = lower_to(bounding, 1u << c, false, bound_s);
    /* A plan with a mixed stage may cross no link between subclusters by a boundary. */
    if (status == HAPT_OK && search->profile->mixed_count > 0) status = lower_to(bounding, every, false, bound_s);
    hapt_arena_release(&bounding->scratch);
    hapt_arena_release(&bounding->kept);
    *bound_s *= 1 - 1e-9;
    return status;
}

enum hapt_status step_bound(struct step_search *search, double *bound_s)
{
    struct bounding bounding = {.search = search, .options = search->options};
    *bound_s = search->best.step_s;
    if (!isfinite(*bound_s)) return HAPT_OK; /* there is no plan */
    HAPT_TRY(step_least_rest(search, &bounding.rest_s));
    return bound_all(&bounding, bound_s);
}

static double least_share(const double *forward_s, const double *time_s, size_t cells, double share)
{
    for (size_t k = 0; k < cells; k++)
        if (time_s[k] > 0 && forward_s[k] < share * time_s[k]) share = forward_s[k] / time_s[k];
    return share;
}

/* The least share of the forward pass in the time of a stage, at most a half. */
static double forward_share(const struct hapt_profile *profile)
{
    double share = 0.5;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        share = least_share(cluster->stage_forward_time, cluster->stage_time,
                            hapt_profile_index(profile, cluster->submesh_count, 0, 0), share);
    }
    for (int k = 0; k < profile->mixed_count; k++)
        share = least_share(profile->mixed[k].stage_forward_time, profile->mixed[k].stage_time,
                            hapt_profile_index(profile, 1, 0, 0), share);
    return share;
}

enum hapt_status step_bound_split(struct step_search *search, double most_s, double *bound_s)
{
    struct bounding bounding = {
        .search = search, .options = search->options, .split = true, .forward_share = forward_share(search->lowest)};
    *bound_s = most_s;
    return bound_all(&bounding, bound_s);
}
