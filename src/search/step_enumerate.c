/*
 * Enumerates the plans of a small instance from the last layer on, depth first. A partial plan is dropped if a lower
 * bound of its simulated step is not below the best step so far.
 *
 * Every rank does the same work. It is limited in partial plans and simulations, so that a larger instance ends early.
 * Plans with split backward passes are enumerated by themselves: other bounds hold for them (step_bound.c).
 */
#include "step_suffix.h"

#include <math.h>

enum { MOST_LAYERS = 32, MOST_NODES = 300000, MOST_SIMULATIONS = 4000 };
/* Limits of step_enumerate_short, for each number of stages. */
enum { SHORT_LAYERS = 64, SHORT_NODES = 100000, SHORT_SIMULATIONS = 500 };
/* Limits of step_enumerate_late, by the work of the refinement: about half a second each. */
enum { LATE_LAYERS = 24 };
#define LATE_NODES 0.5
#define LATE_SIMULATIONS 1e-2
/* A complete plan counts as so many partial ones, because its tables are filled to bound it. */
enum { COMPLETE = 20, COMPLETE_LATE = 200 };
/* A plan is simulated about so often to split it. Limit of these simulations, in microbatches. */
enum { SPLIT_SIMULATIONS = 16, MOST_SPLIT_MICROBATCHES = 100000 };

struct enumeration {
    struct step_search *search;
    struct step_candidate trial;
    struct step_suffixes suffixes;
    struct step_stage *stage; /* [most stages] the last one first */
    int count;
    double least_s; /* least lower_s of the plans that were priced */
    /* Plans with split backward passes; NULL: without. search->profile is the split view of this profile. */
    const struct hapt_profile *split;
    struct step_candidate *kept; /* the best split one */
    double best_s;               /* its step; suffixes that cannot be shorter are dropped */
    int most_stages, complete;   /* COMPLETE or COMPLETE_LATE */
    int64_t nodes, most_nodes, first_simulation, most_simulations;
};

static bool within_limits(const struct enumeration *enumeration)
{
    return enumeration->nodes <= enumeration->most_nodes &&
           enumeration->search->simulated - enumeration->first_simulation <= enumeration->most_simulations;
}

static enum hapt_status take_plan(struct enumeration *enumeration)
{
    struct step_search *search = enumeration->search;
    enumeration->nodes += enumeration->complete;
    HAPT_TRY(step_price_launches(search, search->best.step_s, &enumeration->trial));
    enumeration->least_s = fmin(enumeration->least_s, enumeration->trial.lower_s);
    if (enumeration->trial.step_s <= STEP_NEARBY_WORTH * search->best.step_s)
        HAPT_TRY(step_price_nearby(search, &enumeration->trial));
    if (enumeration->trial.step_s < search->best.step_s) step_candidate_copy(&search->best, &enumeration->trial);
    enumeration->best_s = search->best.step_s;
    return HAPT_OK;
}

static enum hapt_status make_split(const struct enumeration *enumeration, const struct step_candidate *candidate,
                                   struct hapt_arena *arena, struct hapt_plan **plan)
{
    const struct step_search *search = enumeration->search;
    struct hapt_plan *made;
    HAPT_NEW(made, arena, 1);
    HAPT_TRY(step_candidate_plan(search, candidate, arena, made));
    HAPT_TRY(hapt_plan_price_launches(search->profile, made));
    HAPT_TRY(hapt_plan_split_backward(enumeration->split, made));
    *plan = made;
    return HAPT_OK;
}

static enum hapt_status take_split_plan(struct enumeration *enumeration)
{
    struct step_search *search = enumeration->search;
    struct hapt_arena scratch;
    struct hapt_plan *plan;
    HAPT_TRY(step_price_launches(search, INFINITY, &enumeration->trial));
    if (!isfinite(enumeration->trial.step_s)) return HAPT_OK;
    hapt_arena_init(&scratch);
    const enum hapt_status status = make_split(enumeration, &enumeration->trial, &scratch, &plan);
    if (status == HAPT_OK && plan->simulated_s < enumeration->best_s &&
        !hapt_at_most(enumeration->best_s, plan->simulated_s)) {
        enumeration->best_s = plan->simulated_s;
        step_candidate_copy(enumeration->kept, &enumeration->trial);
    }
    hapt_arena_release(&scratch);
    search->simulated += SPLIT_SIMULATIONS;
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

static enum hapt_status take(struct enumeration *enumeration, const struct step_suffix *suffix)
{
    if (enumeration->search->options.use_all_devices && !step_suffix_uses_all(&enumeration->suffixes, suffix))
        return HAPT_OK;
    enumeration->trial.count = enumeration->count;
    for (int i = 0; i < enumeration->count; i++)
        enumeration->trial.stage[i] = enumeration->stage[enumeration->count - 1 - i];
    return enumeration->split ? take_split_plan(enumeration) : take_plan(enumeration);
}

static enum hapt_status descend(struct enumeration *enumeration, const struct step_suffix *suffix);

static enum hapt_status add_stage(struct enumeration *enumeration, const struct step_suffix *suffix, int device_set,
                                  int submesh, int first)
{
    struct step_suffix next;
    enumeration->nodes++;
    const double least_s =
        step_suffix_extend(&enumeration->suffixes, suffix, device_set, submesh, first, &next) * (1 - 1e-12);
    if (least_s >= enumeration->best_s) return HAPT_OK;
    enumeration->stage[enumeration->count++] = next.stage;
    const enum hapt_status status = first == 0 ? take(enumeration, &next) : descend(enumeration, &next);
    enumeration->count--;
    return status;
}

static enum hapt_status descend(struct enumeration *enumeration, const struct step_suffix *suffix)
{
    const struct step_search *search = enumeration->search;
    if (enumeration->count == enumeration->most_stages) return HAPT_OK;
    for (int p = 0; p < step_device_sets(search); p++)
        for (int s = 0; s < step_submeshes_of(search, p); s++) {
            if (!step_suffix_allows(&enumeration->suffixes, suffix, p, s)) continue;
            for (int first = suffix->first - 1; first >= 0; first--) {
                if (!within_limits(enumeration)) return HAPT_OK;
                HAPT_TRY(add_stage(enumeration, suffix, p, s, first));
            }
        }
    return HAPT_OK;
}

/* Enumerates what the limits allow. */
static enum hapt_status descend_from_end(struct enumeration *enumeration)
{
    const struct step_suffix nothing = step_suffix_nothing(&enumeration->suffixes);
    return descend(enumeration, &nothing);
}

static enum hapt_status begin(struct enumeration *enumeration)
{
    if (!enumeration->split) enumeration->best_s = enumeration->search->best.step_s;
    HAPT_TRY(step_candidate_create(enumeration->search, &enumeration->trial));
    HAPT_NEW(enumeration->stage, &enumeration->search->arena, enumeration->search->most_stages);
    return step_suffixes_create(enumeration->search, enumeration->split != NULL, &enumeration->suffixes);
}

/* *bound_s: 0, if there are more plans than the limits allow. */
static enum hapt_status enumerate(struct step_search *search, double nodes, double simulations, int complete,
                                  double *bound_s)
{
    struct enumeration enumeration = {.search = search,
                                      .least_s = INFINITY,
                                      .most_stages = search->most_stages,
                                      .complete = complete,
                                      .most_nodes = (int64_t)nodes,
                                      .first_simulation = search->simulated,
                                      .most_simulations = (int64_t)simulations};
    *bound_s = 0;
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend_from_end(&enumeration));
    /* A plan that was dropped has a step of at least that of the best. */
    if (within_limits(&enumeration)) *bound_s = fmin(enumeration.least_s, search->best.step_s);
    return HAPT_OK;
}

enum hapt_status step_enumerate(struct step_search *search, double *bound_s)
{
    *bound_s = 0;
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    return enumerate(search, MOST_NODES, MOST_SIMULATIONS, COMPLETE, bound_s);
}

enum hapt_status step_enumerate_late(struct step_search *search)
{
    double bound_s;
    if (search->L > LATE_LAYERS || search->options.no_enumeration) return HAPT_OK;
    const double simulations =
        LATE_SIMULATIONS * search->most_work / (search->profile->crossings ? STEP_LISTS_TIME : 1);
    HAPT_TRY(enumerate(search, LATE_NODES * search->most_work, simulations, COMPLETE_LATE, &bound_s));
    if (bound_s > search->bound_s) search->bound_s = bound_s;
    return HAPT_OK;
}

enum hapt_status step_enumerate_short(struct step_search *search)
{
    struct enumeration enumeration = {
        .search = search, .least_s = INFINITY, .complete = COMPLETE, .most_simulations = SHORT_SIMULATIONS};
    if (search->L > SHORT_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(begin(&enumeration));
    for (int stages = 1; stages <= search->most_stages; stages++) {
        enumeration.most_stages = stages;
        enumeration.nodes = 0;
        enumeration.most_nodes = SHORT_NODES;
        enumeration.first_simulation = search->simulated;
        HAPT_TRY(descend_from_end(&enumeration));
        if (!within_limits(&enumeration)) break;
    }
    return HAPT_OK;
}

enum hapt_status step_enumerate_split(struct step_search *search, const struct hapt_profile *profile,
                                      struct hapt_arena *result, struct hapt_plan **plan)
{
    struct step_candidate kept = {0};
    struct enumeration enumeration = {.search = search,
                                      .most_stages = search->most_stages,
                                      .most_nodes = SHORT_NODES,
                                      .first_simulation = search->simulated,
                                      .most_simulations = MOST_SPLIT_MICROBATCHES / search->B,
                                      .split = profile,
                                      .kept = &kept,
                                      .best_s = (*plan)->simulated_s};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    if (!(*plan)->split) enumeration.best_s *= hapt_plan_split_worth(profile);
    HAPT_TRY(step_candidate_create(search, &kept));
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend_from_end(&enumeration));
    return kept.count > 0 ? make_split(&enumeration, &kept, result, plan) : HAPT_OK;
}
