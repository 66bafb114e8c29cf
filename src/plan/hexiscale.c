/*
 * HexiScale: 48 coarse layers, uneven stages by the devices' true speeds, 1F1B without overlap: sender and receiver
 * stand still while a tensor crosses. (Its shards over mixed devices are not modelled: stages stay inside subclusters,
 * as ours.)
 *
 * It plans by its own cost. Every stage pays for its transfers in and out, each twice a microbatch, so they are added
 * to stage times; what crosses between subclusters is known once the order of subclusters and the layers where they
 * meet are given. For given ones the exact search then minimises HexiScale's own cost; the meeting points are moved one
 * at a time, over all of the grid, as long as that helps. With two subclusters that is every order and every meeting
 * point.
 */
#include "baselines.h"
#include "search.h"

#include <math.h>
#include <string.h>

enum { COARSE = 48, MOST_ORDERED = 3, MOST_ROUNDS = 8 };

/* Subclusters in the order of the pipeline, each up to its meeting point; the last ends at L. */
struct tour {
    int count;
    int subcluster[HAPT_MAX_SUBCLUSTERS];
    int end[HAPT_MAX_SUBCLUSTERS];
};

struct hexi {
    MPI_Comm comm;
    struct contest contest;
    struct hapt_search_options options;
    struct coarse truth;         /* true links; layers are its own from here on */
    struct hapt_profile *folded; /* transfers inside a subcluster in the stage times, those links free */
    struct hapt_profile *work;   /* the same for one tour */
};

/* A microbatch's activations and gradients behind layer `last`. */
static double both_ways_s(const struct hapt_profile *profile, int last, int from, int to)
{
    return last < 0 ? 0 : 2 * hapt_profile_comm_s(profile, last, from, to);
}

static enum hapt_status make_coarse(struct hexi *hexi, const struct hapt_strategy_options *options,
                                    struct hapt_arena *scratch)
{
    bool *cut;
    HAPT_TRY(hapt_plan_grid(hexi->contest.profile, COARSE, options->block_end, scratch, &cut));
    HAPT_TRY(coarse_make(hexi->contest.profile, cut, scratch, &hexi->truth));
    hexi->truth.profile->mixed_count = 0;
    const struct hapt_profile *truth = hexi->truth.profile;
    HAPT_TRY(hapt_profile_copy(truth, scratch, &hexi->folded));
    for (int c = 0; c < truth->cluster_count; c++) {
        struct hapt_profile_cluster *cluster = &hexi->folded->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int i = 0; i < truth->layer_count; i++)
                for (int j = i; j < truth->layer_count; j++)
                    cluster->stage_time[hapt_profile_index(truth, s, i, j)] +=
                        both_ways_s(truth, i - 1, c, c) + both_ways_s(truth, j, c, c);
        hexi->folded->link_bandwidth[c * truth->cluster_count + c] = INFINITY;
        hexi->folded->link_latency[c * truth->cluster_count + c] = 0;
    }
    return hapt_profile_copy(hexi->folded, scratch, &hexi->work);
}

/* The stages of subcluster c lie in [first, end) and pay for the links at its ends. */
static void fence(struct hexi *hexi, const struct tour *tour, int at)
{
    const struct hapt_profile *profile = hexi->truth.profile;
    const int c = tour->subcluster[at], first = at > 0 ? tour->end[at - 1] : 0, end = tour->end[at];
    const double in_s =
        at > 0 ? both_ways_s(profile, first - 1, tour->subcluster[at - 1], c) - both_ways_s(profile, first - 1, c, c)
               : 0;
    const double out_s = at < tour->count - 1 ? both_ways_s(profile, end - 1, c, tour->subcluster[at + 1]) -
                                                    both_ways_s(profile, end - 1, c, c)
                                              : 0;
    const struct hapt_profile_cluster *from = &hexi->folded->cluster[c];
    struct hapt_profile_cluster *to = &hexi->work->cluster[c];
    for (int s = 0; s < from->submesh_count; s++) {
        for (int i = first; i < end; i++) {
            for (int j = i; j < end; j++) {
                const size_t cell = hapt_profile_index(profile, s, i, j);
                to->stage_time[cell] = from->stage_time[cell] + (i == first ? in_s : 0) + (j == end - 1 ? out_s : 0);
            }
        }
    }
}

/* The best plan of a tour by HexiScale's cost, and its simulated step; infinite when there is none. */
static enum hapt_status try_tour(struct hexi *hexi, const struct tour *tour, double *step_s)
{
    struct hapt_plan *plan;
    bool fits;
    *step_s = INFINITY;
    hapt_profile_keep_subclusters(hexi->work, 0);
    free_links(hexi->work);
    for (int k = 0; k < tour->count; k++) fence(hexi, tour, k);
    const enum hapt_status status =
        hapt_plan_search(hexi->comm, hexi->work, &hexi->options, hexi->contest.result, &plan);
    if (status != HAPT_OK) return contest_miss(&hexi->contest, status);
    plan->blocking = true;
    coarse_restore(&hexi->truth, hexi->contest.profile, plan);
    HAPT_TRY(hapt_env_agree(hexi->comm, contest_enter(&hexi->contest, plan, &fits)));
    if (fits) *step_s = plan->simulated_s;
    return HAPT_OK;
}

/* Moves meeting point k over all the places that its neighbours leave. */
static enum hapt_status move_end(struct hexi *hexi, struct tour *tour, int k, double *best_s, bool *moved)
{
    struct tour next = *tour;
    const int before = tour->end[k], low = k > 0 ? tour->end[k - 1] : 0;
    for (int end = low + 1; end < tour->end[k + 1]; end++) {
        double step_s;
        if (end == before) continue;
        next.end[k] = end;
        HAPT_TRY(try_tour(hexi, &next, &step_s));
        if (step_s >= *best_s) continue;
        *best_s = step_s;
        tour->end[k] = end;
        *moved = true;
    }
    return HAPT_OK;
}

static struct tour tour_of(const struct hapt_plan *plan)
{
    struct tour tour = {0};
    for (int i = 0; i < plan->stage_count; i++) {
        if (i == 0 || plan->stage[i].subcluster != plan->stage[i - 1].subcluster)
            tour.subcluster[tour.count++] = plan->stage[i].subcluster;
        tour.end[tour.count - 1] = plan->stage[i].end_layer;
    }
    return tour;
}

/* From the plan that overlap would suggest for this order of subclusters (NULL: any). */
static enum hapt_status descend(struct hexi *hexi, const int *order)
{
    const struct hapt_profile *profile = hexi->truth.profile;
    const size_t links = (size_t)profile->cluster_count * (size_t)profile->cluster_count;
    struct hapt_plan *start;
    double best_s;
    bool moved = true;
    for (int c = 0; c < profile->cluster_count; c++)
        memcpy(hexi->work->cluster[c].stage_time, hexi->folded->cluster[c].stage_time,
               hapt_profile_index(profile, profile->cluster[c].submesh_count, 0, 0) * sizeof(double));
    memcpy(hexi->work->link_bandwidth, hexi->folded->link_bandwidth, links * sizeof(double));
    memcpy(hexi->work->link_latency, hexi->folded->link_latency, links * sizeof(double));
    if (order) order_links(hexi->work, order);
    const enum hapt_status status =
        hapt_plan_search(hexi->comm, hexi->work, &hexi->options, hexi->contest.result, &start);
    if (status != HAPT_OK) return contest_miss(&hexi->contest, status);
    struct tour tour = tour_of(start);
    HAPT_TRY(try_tour(hexi, &tour, &best_s));
    for (int round = 0; moved && round < MOST_ROUNDS; round++) {
        moved = false;
        for (int k = 0; k < tour.count - 1; k++) HAPT_TRY(move_end(hexi, &tour, k, &best_s, &moved));
        if (tour.count == 2) break;
    }
    return HAPT_OK;
}

static enum hapt_status enter_all(struct hexi *hexi, const struct hapt_strategy_options *options,
                                  struct hapt_arena *scratch)
{
    const int C = hexi->contest.profile->cluster_count;
    int order[HAPT_MAX_SUBCLUSTERS];
    double step_s;
    HAPT_TRY(hapt_env_agree(hexi->comm, make_coarse(hexi, options, scratch)));
    for (int c = 0; c < C && !options->search.use_all_devices; c++) {
        const struct tour alone = {.count = 1, .subcluster = {c}, .end = {hexi->truth.profile->layer_count}};
        HAPT_TRY(try_tour(hexi, &alone, &step_s));
    }
    if (C == 1 && !options->search.use_all_devices) return HAPT_OK;
    if (C > MOST_ORDERED) return descend(hexi, NULL);
    order_first(order, C);
    do HAPT_TRY(descend(hexi, order));
    while (order_next(order, C, MOST_ORDERED));
    return HAPT_OK;
}

enum hapt_status plan_hexiscale(MPI_Comm comm, const struct hapt_profile *profile,
                                const struct hapt_strategy_options *options, struct hapt_arena *result,
                                struct hapt_plan **plan)
{
    struct hexi hexi = {.comm = comm, .contest = contest_open(profile, result), .options = options->search};
    struct hapt_arena scratch;
    hexi.options.may_fail = true;
    hapt_arena_init(&scratch);
    const enum hapt_status status = enter_all(&hexi, options, &scratch);
    hapt_arena_release(&scratch);
    HAPT_TRY(status);
    return search_agree(comm, &options->search, contest_close(&hexi.contest, HAPT_STRATEGY_HEXISCALE, plan));
}
