/*
 * Stage boundaries of plans with split backward passes, near those of a plan without.
 *
 * Unsplit, the first stages may take more work than the last ones, because the work hides the fill and the drain. Split
 * passes fill these times anyway, so the best boundaries are those of more equal stages. Two seeds are moved, boundary
 * by boundary, while the simulated step gets shorter: the boundaries of the given plan, and the best ones of the
 * formula for more microbatches, where fill and drain count less.
 */
#include <math.h>
#include <string.h>

#include "hapt/recut.h"

enum { FARTHEST = 4, MORE_MICROBATCHES = 8 };

/* Trials end after this much work, in simulated microbatches times stages: about a second on a core. A search with a
 * limit of its own leaves them a tenth of it. */
#define MOST_WORK 1e6
#define WORK_SHARE 0.1
/* A trial simulates about so many steps, to choose slots. */
enum { SIMULATIONS = 16 };

struct split_cuts {
    const struct hapt_profile *profile, *view; /* view: with the memory of split programs */
    const struct hapt_search_options *options;
    const struct hapt_plan *base; /* its submeshes and programs */
    MPI_Comm comm;                /* ranks that share the trials */
    int rank, size;
    int *end, *best_end; /* [stages] */
    int *even_end;       /* [stages] the seed of the formula; -1: there is none */
    int *number;         /* [size] moves that are tried together */
    double *step_s;      /* [size] their steps */
    double best_s, work, most_work, trial_work;
};

static bool is_suitable(const struct hapt_profile *profile, const struct hapt_plan *plan)
{
    if (hapt_schedule_loops(plan->schedule) || plan->stage_count < 2) return false;
    for (int i = 0; i < plan->stage_count; i++) {
        if (hapt_plan_is_mixed(&plan->stage[i])) return false;
        if (!profile->cluster[plan->stage[i].submesh->subcluster[0]].weight_time) return false;
        for (int other = 0; other < i; other++)
            if (plan->stage[other].submesh == plan->stage[i].submesh) return false;
    }
    return true;
}

/* The base's stages with other boundaries, without prices. */
static enum hapt_status allot(const struct split_cuts *cuts, const int *end, struct hapt_arena *arena,
                              struct hapt_plan **plan)
{
    struct hapt_plan *made;
    HAPT_NEW(made, arena, 1);
    *made = hapt_search_plan(cuts->profile, cuts->options);
    HAPT_TRY(hapt_plan_allot(made, cuts->base->stage_count, arena));
    for (int i = 0; i < made->stage_count; i++) {
        struct hapt_plan_stage *stage = &made->stage[i];
        const struct hapt_plan_stage *like = &cuts->base->stage[i];
        stage->first_layer = i > 0 ? end[i - 1] : 0;
        stage->end_layer = end[i];
        stage->layout = like->layout;
        stage->submesh->subcluster[0] = like->submesh->subcluster[0];
        stage->submesh->nodes = like->submesh->nodes;
        stage->submesh->devices_per_node = like->submesh->devices_per_node;
    }
    *plan = made;
    return HAPT_OK;
}

/* The same, priced and split. */
static enum hapt_status make(const struct split_cuts *cuts, const int *end, struct hapt_arena *arena,
                             struct hapt_plan **plan)
{
    HAPT_TRY(allot(cuts, end, arena, plan));
    HAPT_TRY(hapt_plan_price(cuts->view, *plan));
    HAPT_TRY(hapt_plan_split_backward(cuts->profile, *plan));
    (*plan)->search = cuts->base->search;
    return HAPT_OK;
}

/* A lower bound of the step: each stage computes all passes once the first microbatch has arrived, and updates. With
 * state on the hosts, updates may end in the next step. */
static double bound_s(const struct hapt_plan *plan)
{
    const int B = plan->microbatches;
    double arrival_s = 0, least_s = 0;
    for (int i = 0; i < plan->stage_count && !plan->host_state; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const double passes_s = stage->forward_only ? stage->forward_s : stage->compute_s - stage->step_s / B;
        const double exchange_s = i == 0 || i + 1 == plan->stage_count ? plan->exchange_s : 0;
        least_s = fmax(least_s, arrival_s + B * passes_s + exchange_s + stage->step_s - stage->tied_s);
        arrival_s += stage->forward_s + (plan->edge_count > 0 ? 0 : stage->comm_s);
    }
    return least_s * (1 - 1e-9); /* rounding */
}

static enum hapt_status price_above(struct split_cuts *cuts, const int *end, struct hapt_arena *scratch, double *step_s)
{
    struct hapt_plan *plan;
    *step_s = INFINITY;
    HAPT_TRY(allot(cuts, end, scratch, &plan));
    plan->split = true;
    HAPT_TRY(hapt_plan_price_tables(cuts->profile, plan));
    if (bound_s(plan) >= cuts->best_s) return HAPT_OK;
    HAPT_TRY(make(cuts, end, scratch, &plan));
    *step_s = plan->simulated_s;
    return HAPT_OK;
}

/* *step_s: INFINITY, if a stage is no candidate or does not fit, or if the step cannot be shorter than the best. */
static enum hapt_status price(struct split_cuts *cuts, const int *end, double *step_s)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = price_above(cuts, end, &scratch, step_s);
    hapt_arena_release(&scratch);
    if (status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_INPUT) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* Takes the boundaries `end` if they are better. */
static bool take(struct split_cuts *cuts, const int *end, double step_s)
{
    if (!(step_s < cuts->best_s) || hapt_at_most(cuts->best_s, step_s)) return false;
    cuts->best_s = step_s;
    memcpy(cuts->best_end, end, (size_t)cuts->base->stage_count * sizeof *end);
    return true;
}

/* Moves one boundary of the best ones by some layers: cuts->end. False: a stage would be empty. */
static bool move(struct split_cuts *cuts, int number, int by)
{
    const int boundary = number / 2;
    memcpy(cuts->end, cuts->best_end, (size_t)cuts->base->stage_count * sizeof *cuts->end);
    cuts->end[boundary] += number % 2 ? -by : by;
    return cuts->end[boundary] > (boundary > 0 ? cuts->end[boundary - 1] : 0) &&
           cuts->end[boundary] < cuts->end[boundary + 1];
}

/* Prices the next possible moves from `*next` on, one a rank, and takes the first that is better. The moves behind it
 * are tried again from there, so the result does not depend on the number of ranks. Collective. */
static enum hapt_status try_moves(struct split_cuts *cuts, int moves, int by, int *next, bool *better)
{
    int count = 0, at = *next, own = -1;
    enum hapt_status status = HAPT_OK;
    for (; at < moves && count < cuts->size; at++) {
        if (!move(cuts, at, by)) continue;
        if (count == cuts->rank) own = at;
        cuts->number[count++] = at;
    }
    *next = at;
    for (int k = 0; k < count; k++) cuts->step_s[k] = INFINITY;
    if (own >= 0 && move(cuts, own, by)) status = price(cuts, cuts->end, &cuts->step_s[cuts->rank]);
    HAPT_TRY(hapt_env_agree(cuts->comm, status));
    if (cuts->size > 1) HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, cuts->step_s, count, MPI_DOUBLE, MPI_MIN, cuts->comm));
    for (int k = 0; k < count && !*better && cuts->work < cuts->most_work; k++) {
        cuts->work += cuts->trial_work;
        move(cuts, cuts->number[k], by);
        *better = take(cuts, cuts->end, cuts->step_s[k]);
        if (*better) *next = cuts->number[k] + 1;
    }
    return HAPT_OK;
}

static enum hapt_status descend(struct split_cuts *cuts)
{
    const int moves = 2 * (cuts->base->stage_count - 1);
    for (int by = FARTHEST; by > 0; by /= 2)
        for (bool some = true; some;) {
            some = false;
            for (int next = 0; next < moves && cuts->work < cuts->most_work;) {
                bool better = false;
                HAPT_TRY(try_moves(cuts, moves, by, &next, &better));
                some = some || better;
            }
        }
    return HAPT_OK;
}

/* The best boundaries of the formula on the base's submeshes, for more microbatches: cuts->even_end. */
static enum hapt_status find_even(struct split_cuts *cuts, struct hapt_arena *scratch)
{
    const int S = cuts->base->stage_count;
    struct hapt_search_options options = *cuts->options;
    struct hapt_recut_slot *slot;
    struct hapt_plan *plan;
    HAPT_NEW(slot, scratch, S);
    options.microbatches *= MORE_MICROBATCHES;
    options.schedule = HAPT_SCHEDULE_H1F1B;
    for (int i = 0; i < S; i++) {
        const struct hapt_plan_submesh *submesh = cuts->base->stage[i].submesh;
        slot[i] = (struct hapt_recut_slot){submesh->subcluster[0], submesh->nodes, submesh->devices_per_node};
    }
    HAPT_TRY(hapt_plan_recut(cuts->view, &options, slot, S, INFINITY, scratch, &plan));
    for (int i = 0; i < S; i++) cuts->even_end[i] = plan ? plan->stage[i].end_layer : -1;
    return HAPT_OK;
}

static enum hapt_status create(struct split_cuts *cuts, struct hapt_arena *scratch)
{
    const int S = cuts->base->stage_count;
    struct hapt_profile *view;
    HAPT_TRY(hapt_profile_split_view(cuts->profile, scratch, &view));
    cuts->view = view;
    HAPT_NEW(cuts->end, scratch, S);
    HAPT_NEW(cuts->best_end, scratch, S);
    HAPT_NEW(cuts->even_end, scratch, S);
    HAPT_NEW(cuts->number, scratch, cuts->size);
    HAPT_NEW(cuts->step_s, scratch, cuts->size);
    for (int i = 0; i < S; i++) cuts->end[i] = cuts->best_end[i] = cuts->base->stage[i].end_layer;
    return HAPT_OK;
}

static void try_seed(struct split_cuts *cuts, const int *end, double step_s)
{
    cuts->work += cuts->trial_work;
    take(cuts, end, step_s);
}

/* Tries both seeds; two ranks share them. Collective. */
static enum hapt_status try_seeds(struct split_cuts *cuts, struct hapt_arena *scratch)
{
    const int S = cuts->base->stage_count, other = 1 % cuts->size;
    double step_s[2] = {INFINITY, INFINITY};
    enum hapt_status status = create(cuts, scratch);
    if (status == HAPT_OK && cuts->rank == 0 && !cuts->base->split) status = price(cuts, cuts->end, &step_s[0]);
    if (status == HAPT_OK && cuts->rank == other) status = find_even(cuts, scratch);
    if (status == HAPT_OK && cuts->rank == other && cuts->even_end[0] >= 0)
        status = price(cuts, cuts->even_end, &step_s[1]);
    HAPT_TRY(hapt_env_agree(cuts->comm, status));
    HAPT_MPI(MPI_Bcast(cuts->even_end, S, MPI_INT, other, cuts->comm));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, step_s, 2, MPI_DOUBLE, MPI_MIN, cuts->comm));
    if (!cuts->base->split) try_seed(cuts, cuts->end, step_s[0]);
    if (cuts->even_end[0] >= 0) try_seed(cuts, cuts->even_end, step_s[1]);
    return HAPT_OK;
}

static enum hapt_status search(struct split_cuts *cuts, struct hapt_arena *scratch, struct hapt_arena *arena,
                               struct hapt_plan **plan)
{
    const double given_s = cuts->best_s;
    HAPT_TRY(try_seeds(cuts, scratch));
    HAPT_TRY(descend(cuts));
    return hapt_env_agree(cuts->comm, cuts->best_s < given_s ? make(cuts, cuts->best_end, arena, plan) : HAPT_OK);
}

enum hapt_status hapt_plan_search_split(MPI_Comm comm, const struct hapt_profile *profile,
                                        const struct hapt_search_options *options, struct hapt_arena *arena,
                                        struct hapt_plan **plan)
{
    struct split_cuts cuts = {.profile = profile,
                              .options = options,
                              .base = *plan,
                              .comm = comm,
                              .best_s = (*plan)->simulated_s,
                              .most_work = MOST_WORK};
    struct hapt_arena scratch;
    HAPT_MPI(MPI_Comm_rank(comm, &cuts.rank));
    HAPT_MPI(MPI_Comm_size(comm, &cuts.size));
    cuts.trial_work = (double)SIMULATIONS * options->microbatches * cuts.base->stage_count;
    if (options->work > 0) cuts.most_work = fmin(MOST_WORK, WORK_SHARE * options->work);
    if (!(*plan)->split && options->split != HAPT_SPLIT_YES) cuts.best_s *= hapt_plan_split_worth(profile);
    if (!is_suitable(profile, *plan)) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = search(&cuts, &scratch, arena, plan);
    hapt_arena_release(&scratch);
    return status;
}
