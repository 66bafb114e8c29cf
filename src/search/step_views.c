/*
 * Seeds from views of the cluster: restricted or altered profiles whose exact optimum by the formula becomes a
 * candidate.
 *
 * The seeds of one profile change abruptly when the cluster grows past a threshold, and the beam does not cross the
 * gap: the answer became slower with more memory, faster links, more devices or more options. Views take the side of
 * the smaller cluster. Their plans are priced on the true one.
 *   - First stages with less work once a step. The formula does not see this work, of which the first stage's part
 * stands behind the last gradient. It favours first stages over several nodes as soon as memory allows them.
 *   - All devices in use; one subcluster left out.
 *   - Devices with less memory, from a fixed grid.
 *   - Slower and faster links between subclusters.
 *
 * Each view is searched by one rank alone. A few of them make a round, in which all compare with the best candidate at
 * its start, so that the result does not depend on the number of ranks.
 */
#include "step.h"

#include <math.h>
#include <string.h>

enum {
    MOST_FIRST = 6,
    MOST_MEMORY = 3,
    LEVELS = 4 /* of memory in a factor of two */,
    KEPT = 6,
    MOST_ORDERED = 4,
    ROUND = 8,         /* views, or chains of them, between two exchanges */
    MOST_CHAINED = 16, /* views of a chain */
    MOST_MICROBATCHES = 1 << 20
};
/* Cells of all tables of stages; larger profiles have no views. */
#define MOST_CELLS 1e7
/* Views of smaller profiles are not shared by the ranks. */
#define FEW_CELLS 1e5
/* Epsilon of their rule, where the search chooses it: few launches where transfers are short. */
#define VIEW_THRESHOLD 0.1
/* Seeds of views that are slower than the best by more than this factor are not refined. */
#define VIEW_WORTH 1.05

struct views {
    struct step_search *search;
    struct hapt_search_options rule;
    struct hapt_profile view; /* `useful`, with subclusters of its own */
    struct step_candidate seed;
    struct step_kept kept;                   /* by all ranks, until the last exchange */
    struct step_kept round;                  /* by this rank since then */
    struct step_candidate base;              /* the best candidate at the start of the round */
    struct hapt_plan_search_figures figures; /* of all ranks at the start of the round */
    struct step_ranks ranks;
    int number, chained;     /* of the view or chain, and of the view in its chain */
    bool mine;               /* this rank searches it */
    enum hapt_status status; /* of this rank since the last exchange */
};

static double count_cells(const struct hapt_profile *profile)
{
    double cells = 0;
    for (int c = 0; c < profile->cluster_count; c++)
        cells += (double)hapt_profile_index(profile, profile->cluster[c].submesh_count, 0, 0);
    return cells;
}

static enum hapt_status create(struct views *views)
{
    struct step_search *search = views->search;
    const size_t links = (size_t)search->C * (size_t)search->C;
    HAPT_TRY(step_candidate_create(search, &views->seed));
    HAPT_TRY(step_candidate_create(search, &views->base));
    HAPT_TRY(step_kept_create(search, KEPT, &views->kept));
    HAPT_TRY(step_kept_create(search, KEPT, &views->round));
    views->view = search->useful;
    HAPT_NEW(views->view.cluster, &search->arena, search->C);
    HAPT_NEW(views->view.link_bandwidth, &search->arena, links);
    HAPT_NEW(views->view.link_latency, &search->arena, links);
    return HAPT_OK;
}

/* Makes the view equal to the cluster again. */
static void reset(struct views *views)
{
    const struct step_search *search = views->search;
    const size_t links = (size_t)search->C * (size_t)search->C;
    memcpy(views->view.cluster, search->useful.cluster, (size_t)search->C * sizeof *views->view.cluster);
    memcpy(views->view.link_bandwidth, search->useful.link_bandwidth, links * sizeof(double));
    memcpy(views->view.link_latency, search->useful.link_latency, links * sizeof(double));
    views->view.mixed_count = search->useful.mixed_count;
}

/* ---- Rounds ---- */

static void begin_round(struct views *views)
{
    struct step_search *search = views->search;
    step_kept_clear(&views->round);
    for (int k = 0; k < KEPT; k++) step_keep(&views->round, &views->kept.candidate[k], 0);
    step_candidate_copy(&views->base, &search->best);
    views->figures = search->figures;
    views->ranks = step_leave(search);
    step_begin_numbers(search, views->ranks.size);
}

/* Collects what the ranks have found. */
static enum hapt_status end_round(struct views *views)
{
    struct step_search *search = views->search;
    struct hapt_plan_search_figures *figures = &search->figures;
    int64_t more[2] = {figures->candidates - views->figures.candidates, figures->evaluated - views->figures.evaluated};
    step_rejoin(search, views->ranks);
    HAPT_TRY(hapt_env_agree(search->comm, views->status));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, more, 2, MPI_INT64_T, MPI_SUM, search->comm));
    figures->candidates = views->figures.candidates + more[0];
    figures->evaluated = views->figures.evaluated + more[1];
    HAPT_TRY(step_gather(search, &views->round, &views->kept));
    if (views->kept.candidate[0].step_s < search->best.step_s)
        step_candidate_copy(&search->best, &views->kept.candidate[0]);
    return HAPT_OK;
}

/* The next view or chain of views; *mine: this rank searches it. */
static enum hapt_status next_view(struct views *views)
{
    if (views->number > 0 && views->number % ROUND == 0) {
        HAPT_TRY(end_round(views));
        begin_round(views);
    }
    const bool mine = step_is_mine(views->search, views->ranks.size, views->number % ROUND);
    views->mine = mine && views->status == HAPT_OK && views->base.step_s > STEP_CLOSE * views->search->bound_s;
    views->number++;
    views->chained = 0;
    return HAPT_OK;
}

/* The optimum of the view becomes views->seed. Rank-local. */
static enum hapt_status search_view(struct views *views)
{
    struct step_search *search = views->search;
    HAPT_ASSERT(views->chained < MOST_CHAINED);
    views->seed.step_s = INFINITY;
    const enum hapt_status status = step_may_lack(step_add_seed(search, &views->view, &views->rule, &views->seed));
    step_candidate_copy(&search->best, &views->base);
    if (status == HAPT_OK)
        step_keep(&views->round, &views->seed, (int64_t)views->number * MOST_CHAINED + views->chained++);
    return status;
}

/* A view that is no part of a chain. */
static enum hapt_status try_view(struct views *views)
{
    HAPT_TRY(next_view(views));
    if (views->mine) views->status = search_view(views);
    return HAPT_OK;
}

/* Figures of the seed: its first stage's work once a step, without the exchange of tied parameters, and its fullest
 * device. */
static enum hapt_status look_at_seed(struct views *views, double *first_s, double *fullness)
{
    const struct step_search *search = views->search;
    struct hapt_plan plan;
    struct hapt_arena scratch;
    int misfit;
    hapt_arena_init(&scratch);
    enum hapt_status status = step_candidate_plan(search, &views->seed, &scratch, &plan);
    if (status == HAPT_OK) status = hapt_plan_launch(search->profile, INFINITY, &plan, &misfit);
    if (status == HAPT_OK) {
        *first_s = plan.stage[0].step_s - plan.stage[0].tied_s;
        *fullness = 0;
        for (int i = 0; i < plan.stage_count; i++) plan.stage[i].warmup = views->seed.launches[i];
        hapt_plan_tighten(&plan);
        for (int i = 0; i < plan.stage_count; i++)
            *fullness = fmax(*fullness, plan.stage[i].memory_bytes / plan.stage[i].device_memory_bytes);
    }
    hapt_arena_release(&scratch);
    return status;
}

/* ---- First stages ---- */

/* A copy of the tables of stage times, which these views restrict. */
static enum hapt_status copy_times(struct views *views)
{
    struct step_search *search = views->search;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *from = &search->useful.cluster[c];
        const size_t cells = hapt_profile_index(search->profile, from->submesh_count, 0, 0);
        HAPT_NEW(views->view.cluster[c].stage_time, &search->arena, cells);
        memcpy(views->view.cluster[c].stage_time, from->stage_time, cells * sizeof *from->stage_time);
    }
    return HAPT_OK;
}

/* Removes first stages whose work once a step takes `limit_s` or more. */
static void limit_first(struct views *views, double limit_s)
{
    const struct step_search *search = views->search;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        for (int s = 0; cluster->step_time && s < cluster->submesh_count; s++)
            for (int last = 0; last < search->L; last++) {
                const size_t cell = hapt_profile_index(search->profile, s, 0, last);
                const double share_s = hapt_profile_tied_share_s(search->profile, c, 0, last);
                if (cluster->step_time[cell] - share_s >= limit_s) views->view.cluster[c].stage_time[cell] = NAN;
            }
    }
}

/* Falling limits, from the best candidate on. A view whose optimum is too slow even without the work of its first stage
 * ends them: further views are slower still. */
static enum hapt_status limit_first_stages(struct views *views)
{
    struct step_search *search = views->search;
    double first_s, fullness;
    step_candidate_copy(&views->seed, &search->best);
    HAPT_TRY(look_at_seed(views, &first_s, &fullness));
    HAPT_TRY(copy_times(views));
    for (int k = 0; k < MOST_FIRST && first_s > 0; k++) {
        limit_first(views, first_s);
        HAPT_TRY(search_view(views));
        if (!isfinite(views->seed.step_s)) return HAPT_OK;
        HAPT_TRY(look_at_seed(views, &first_s, &fullness));
        if (views->seed.step_s - first_s >= search->best.step_s) return HAPT_OK;
    }
    return HAPT_OK;
}

/* ---- Devices, memory, links ---- */

static enum hapt_status leave_out_subclusters(struct views *views)
{
    for (int c = 0; c < views->search->C && views->search->C > 1 && !views->rule.use_all_devices; c++) {
        reset(views);
        views->view.cluster[c].submesh_count = 0;
        views->view.mixed_count = 0; /* they name subclusters */
        HAPT_TRY(try_view(views));
    }
    return HAPT_OK;
}

/* Other rules: launch counts of the other schedules, with any devices and with all of them. */
static enum hapt_status change_rule(struct views *views)
{
    const struct hapt_search_options rule = views->rule;
    reset(views);
    for (int all = rule.use_all_devices; all < 2; all++)
        for (int kind = HAPT_SCHEDULE_1F1B; kind <= HAPT_SCHEDULE_H1F1B; kind++) {
            const bool same = kind == (int)rule.schedule;
            if ((!same && !views->search->options.any_schedule) || (same && all == rule.use_all_devices)) continue;
            views->rule.use_all_devices = all;
            views->rule.schedule = (enum hapt_schedule_kind)kind;
            HAPT_TRY(try_view(views));
        }
    views->rule = rule;
    return HAPT_OK;
}

/* Fewer nodes of one subcluster: one node less, and the next smaller power of two. */
static enum hapt_status leave_out_nodes(struct views *views)
{
    for (int c = 0; c < views->search->C && !views->rule.use_all_devices; c++) {
        const struct hapt_profile_cluster *full = &views->search->useful.cluster[c];
        int power = 1;
        while (2 * power < full->nodes) power *= 2;
        for (int k = 0; k < 2; k++) {
            const int nodes = k == 0 ? full->nodes - 1 : power;
            if (nodes < 1 || nodes >= full->nodes || (k == 1 && nodes == full->nodes - 1)) continue;
            reset(views);
            struct hapt_profile_cluster *cluster = &views->view.cluster[c];
            cluster->nodes = nodes;
            while (cluster->submesh_count > 0 && full->submesh[cluster->submesh_count - 1].n > nodes)
                cluster->submesh_count--; /* by ascending nodes */
            views->view.mixed_count = 0;
            HAPT_TRY(try_view(views));
        }
    }
    return HAPT_OK;
}

/* The largest value of the grid that is at most `bytes`. */
static double level_below(double bytes)
{
    return exp2(floor(LEVELS * log2(bytes)) / LEVELS);
}

/* The optimum of a view is that of every memory between its fullest device and the view. So each view has the largest
 * memory of the grid that forbids the optimum before. */
static enum hapt_status lower_memory(struct views *views)
{
    struct step_search *search = views->search;
    double share = 1, first_s, fullness;
    step_candidate_copy(&views->seed, &search->best);
    for (int k = 0; k < MOST_MEMORY && isfinite(views->seed.step_s); k++) {
        HAPT_TRY(look_at_seed(views, &first_s, &fullness));
        share = fmin(share, fullness) * (1 - 1e-9);
        if (!(share > 0)) return HAPT_OK;
        reset(views);
        for (int c = 0; c < search->C; c++)
            views->view.cluster[c].device_memory_bytes =
                level_below(search->useful.cluster[c].device_memory_bytes * share);
        HAPT_TRY(search_view(views));
    }
    return HAPT_OK;
}

/* Fewer microbatches in flight than the rules ask for. */
static enum hapt_status relax_activations(struct views *views)
{
    const struct hapt_profile *relaxed;
    for (int level = 0; level < STEP_RELAXATIONS; level++) {
        HAPT_TRY(next_view(views));
        if (!views->mine) continue;
        views->status = step_relaxed(views->search, level, &relaxed);
        if (views->status != HAPT_OK) continue;
        reset(views);
        for (int c = 0; c < views->search->C; c++)
            views->view.cluster[c].activation_bytes = relaxed->cluster[c].activation_bytes;
        views->view.mixed = relaxed->mixed;
        views->status = search_view(views);
        views->view.mixed = views->search->useful.mixed;
    }
    return HAPT_OK;
}

/* Less memory in one subcluster. */
static enum hapt_status lower_one_memory(struct views *views)
{
    for (int c = 0; c < views->search->C && views->search->C > 1; c++) {
        reset(views);
        views->view.cluster[c].device_memory_bytes = level_below(0.75 * views->view.cluster[c].device_memory_bytes);
        HAPT_TRY(try_view(views));
    }
    return HAPT_OK;
}

/* Other orders: the boundary from one subcluster to another is forbidden. */
static enum hapt_status change_orders(struct views *views)
{
    const int C = views->search->C;
    for (int link = 0; link < C * C && C <= MOST_ORDERED; link++) {
        if (link / C == link % C) continue;
        reset(views);
        views->view.link_latency[link] = INFINITY;
        HAPT_TRY(try_view(views));
    }
    return HAPT_OK;
}

static enum hapt_status change_links(struct views *views)
{
    static const double factor[] = {0.25, 0.5, 2, 4};
    const int C = views->search->C;
    for (int k = 0; k < 4 && C > 1; k++) {
        reset(views);
        for (int link = 0; link < C * C; link++)
            if (link / C != link % C) views->view.link_bandwidth[link] *= factor[k];
        HAPT_TRY(try_view(views));
    }
    return HAPT_OK;
}

/* More microbatches weigh the slowest stage more, fewer the sum of all. */
static enum hapt_status change_microbatches(struct views *views)
{
    const int B = views->search->B, other[] = {B / 4, B / 2, 2 * B, 4 * B};
    reset(views);
    for (int k = 0; k < 4; k++) {
        if (other[k] < 1 || other[k] > MOST_MICROBATCHES) continue;
        views->rule.microbatches = other[k];
        HAPT_TRY(try_view(views));
    }
    views->rule.microbatches = B;
    return HAPT_OK;
}

/* A chain: each view depends on the one before. */
static enum hapt_status chain(struct views *views, enum hapt_status (*search)(struct views *))
{
    HAPT_TRY(next_view(views));
    if (!views->mine) return HAPT_OK;
    reset(views);
    views->status = search(views);
    return HAPT_OK;
}

static enum hapt_status search_all(struct views *views)
{
    HAPT_TRY(chain(views, limit_first_stages));
    HAPT_TRY(chain(views, lower_memory));
    HAPT_TRY(change_rule(views));
    HAPT_TRY(relax_activations(views));
    HAPT_TRY(leave_out_subclusters(views));
    HAPT_TRY(leave_out_nodes(views));
    HAPT_TRY(lower_one_memory(views));
    HAPT_TRY(change_orders(views));
    HAPT_TRY(change_links(views));
    return change_microbatches(views);
}

static enum hapt_status run(struct views *views)
{
    struct step_search *search = views->search;
    HAPT_TRY(hapt_env_agree(search->comm, create(views)));
    begin_round(views);
    const enum hapt_status status = search_all(views);
    if (views->status == HAPT_OK) views->status = status;
    HAPT_TRY(end_round(views));
    for (int k = 0; k < KEPT; k++) {
        struct step_candidate *kept = &views->kept.candidate[k];
        if (!(kept->step_s <= VIEW_WORTH * search->best.step_s)) continue;
        HAPT_TRY(step_improve_seed(search, kept));
        if (search->seed_count < STEP_MOST_SEEDS) step_candidate_copy(&search->seed[search->seed_count++], kept);
    }
    return HAPT_OK;
}

enum hapt_status step_views(struct step_search *search)
{
    struct views views = {.search = search, .rule = search->options};
    const double cells = count_cells(search->profile);
    struct step_ranks ranks = {search->comm, search->rank, search->size};
    if (cells > MOST_CELLS) return HAPT_OK;
    views.rule.may_fail = views.rule.unexplained = true;
    if (views.rule.any_schedule) views.rule.schedule = search->best.schedule;
    if (views.rule.any_threshold) views.rule.hide_threshold = VIEW_THRESHOLD;
    if (cells <= FEW_CELLS) ranks = step_leave(search); /* the whole work takes less than the collectives */
    const enum hapt_status status = run(&views);
    step_rejoin(search, ranks);
    return hapt_env_agree(ranks.comm, status);
}
