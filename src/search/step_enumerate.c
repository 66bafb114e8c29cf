/*
 * Enumerates the plans of a small instance from the first layer on, depth first. A partial plan is dropped if a lower
 * bound of its simulated step is not below the best step so far.
 *
 * Every rank does the same work. It is limited in partial plans and simulations, so that a larger instance ends early.
 * Plans with split backward passes are enumerated by themselves: other bounds hold for them (step_bound.c).
 */
#include "step.h"

#include <math.h>

enum { MOST_LAYERS = 32, MOST_NODES = 300000, MOST_SIMULATIONS = 4000 };
/* Limits of step_enumerate_short, for each number of stages. */
enum { SHORT_LAYERS = 64, SHORT_NODES = 100000, SHORT_SIMULATIONS = 500 };
/* Limits of step_enumerate_late, by the work of the refinement: about half a second each. */
enum { LATE_LAYERS = 24 };
#define LATE_NODES 0.5
#define LATE_SIMULATIONS 2e-3
/* A plan is simulated about so often to split it. Limit of these simulations, in microbatches. */
enum { SPLIT_SIMULATIONS = 16, MOST_SPLIT_MICROBATCHES = 100000 };

struct enumeration {
    struct step_search *search;
    struct step_candidate trial;
    struct step_rest rest;
    int used[HAPT_MAX_SUBCLUSTERS];
    unsigned visited; /* subclusters of the stages so far, as bits */
    double least_s;   /* least lower_s of the plans that were priced */
    /* Plans with split backward passes; NULL: without. search->profile is the split view of this profile. */
    const struct hapt_profile *split;
    struct step_candidate *kept; /* the best split one */
    double best_s;               /* its step; prefixes that cannot be shorter are dropped */
    int most_stages;
    int64_t nodes, most_nodes, first_simulation, most_simulations;
};

/* The bounds of a partial plan. */
struct prefix {
    double sum_s;     /* of work and 2 c_i; split: of work that does not wait */
    double head_s;    /* of forward passes and c_i; split only */
    double stage_s;   /* the largest bound by a stage */
    double comm_s;    /* the largest c_i */
    double in_flight; /* microbatches that fit on each of its stages */
};

static bool within_limits(const struct enumeration *enumeration)
{
    return enumeration->nodes <= enumeration->most_nodes &&
           enumeration->search->simulated - enumeration->first_simulation <= enumeration->most_simulations;
}

static bool uses_all(const struct enumeration *enumeration)
{
    const struct hapt_profile *profile = enumeration->search->profile;
    for (int c = 0; c < profile->cluster_count; c++)
        if (enumeration->used[c] < profile->cluster[c].nodes * profile->cluster[c].devices_per_node) return false;
    return true;
}

static enum hapt_status take_plan(struct enumeration *enumeration)
{
    struct step_search *search = enumeration->search;
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

static enum hapt_status take(struct enumeration *enumeration)
{
    if (enumeration->search->options.use_all_devices && !uses_all(enumeration)) return HAPT_OK;
    return enumeration->split ? take_split_plan(enumeration) : take_plan(enumeration);
}

/* True if a stage on the device set may come next: its devices are free, and a subcluster that was left is not used
 * again. */
static bool may_follow(const struct enumeration *enumeration, int device_set, int submesh)
{
    const struct step_search *search = enumeration->search;
    const int count = enumeration->trial.count;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const int more = step_devices_of(search, device_set, submesh, c);
        if (more == 0) continue;
        if (enumeration->used[c] + more > cluster->nodes * cluster->devices_per_node) return false;
        const struct step_stage *last = count > 0 ? &enumeration->trial.stage[count - 1] : NULL;
        if ((enumeration->visited >> c & 1u) && last &&
            step_devices_of(search, last->device_set, last->submesh, c) == 0)
            return false;
    }
    return true;
}

static double most_in_flight(double parameter_bytes, double activation_bytes, double memory_bytes, int B)
{
    if (!hapt_at_most(parameter_bytes + activation_bytes, memory_bytes)) return 0;
    return step_in_flight(parameter_bytes, activation_bytes, memory_bytes, B);
}

/* Microbatches in flight that fit on a stage. */
static double in_flight(const struct step_search *search, const struct step_stage *stage, int first)
{
    const struct hapt_profile *profile = search->profile;
    double most = search->B;
    if (stage->device_set < search->C) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->device_set];
        const size_t cell = hapt_profile_index(profile, stage->submesh, first, stage->end - 1);
        return most_in_flight(cluster->parameter_bytes[cell], cluster->activation_bytes[cell],
                              cluster->device_memory_bytes, search->B);
    }
    const struct hapt_profile_mixed *mixed = &profile->mixed[stage->device_set - search->C];
    for (int k = 0; k < mixed->count; k++) {
        const size_t cell = hapt_profile_index(profile, mixed->memory_rows > 1 ? k : 0, first, stage->end - 1);
        most = fmin(most, most_in_flight(mixed->parameter_bytes[cell], mixed->activation_bytes[cell],
                                         profile->cluster[mixed->cluster[k]].device_memory_bytes, search->B));
    }
    return most;
}

static enum hapt_status descend(struct enumeration *enumeration, int first, const struct prefix *prefix);

/* The least time of a microbatch on the slowest stage behind, if all devices work that may still come. */
static double behind_s(const struct enumeration *enumeration, const struct step_stage *stage)
{
    const struct step_search *search = enumeration->search;
    const double work_s = enumeration->rest.work_s[stage->end];
    double rate = 0;
    if (work_s == 0) return 0;
    for (int c = 0; c < search->C; c++) {
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[c];
        const int more = step_devices_of(search, stage->device_set, stage->submesh, c);
        if ((enumeration->visited >> c & 1u) && more == 0) continue;
        const int left = cluster->nodes * cluster->devices_per_node - enumeration->used[c] - more;
        rate += left / enumeration->rest.ratio[c];
    }
    return work_s / rate;
}

/* The bounds of the prefix with one more stage; as in step_bound.c. */
static double extend_split(const struct step_search *search, const struct step_stage *stage, int first, double time_s,
                           double behind_s, struct prefix *prefix)
{
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[stage->device_set];
    const size_t cell = hapt_profile_index(search->profile, stage->submesh, first, stage->end - 1);
    const double least_s = fmax(0, time_s - hapt_profile_split_weight_s(cluster, cell)), B = search->B;
    prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + B * least_s);
    prefix->stage_s = fmax(prefix->stage_s, prefix->head_s + B * time_s);
    prefix->sum_s += least_s;
    prefix->head_s += cluster->stage_forward_time[cell];
    return fmax(fmax(prefix->stage_s, prefix->sum_s + (B - 1) * prefix->comm_s), prefix->head_s + B * behind_s);
}

/* The prefix with one more stage, which takes this long. Returns the least step of a plan that begins so. */
static double extend(const struct enumeration *enumeration, const struct step_stage *stage, int first, double time_s,
                     struct prefix *prefix)
{
    const struct step_search *search = enumeration->search;
    const struct step_candidate *trial = &enumeration->trial;
    const double slowest_s = behind_s(enumeration, stage), B = search->B;
    const double rest_s = fmax(enumeration->rest.pass_s[stage->end], slowest_s);
    if (trial->count > 0) {
        const double comm_s = hapt_profile_boundary_s(
            search->lowest, first - 1, step_subclusters_of(search, &trial->stage[trial->count - 1].device_set),
            step_subclusters_of(search, &stage->device_set), NULL);
        prefix->sum_s += 2 * comm_s;
        prefix->head_s += comm_s;
        prefix->comm_s = fmax(prefix->comm_s, comm_s);
    }
    prefix->in_flight = fmin(prefix->in_flight, in_flight(search, stage, first));
    if (prefix->in_flight == 0) return INFINITY;
    if (enumeration->split) return extend_split(search, stage, first, time_s, slowest_s, prefix);
    prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + B * time_s);
    prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + B * (time_s + rest_s) / prefix->in_flight);
    prefix->sum_s += time_s;
    return fmax(fmax(prefix->stage_s, prefix->sum_s + rest_s + (B - 1) * prefix->comm_s),
                prefix->sum_s + B * slowest_s);
}

static enum hapt_status add_stage(struct enumeration *enumeration, const struct step_stage *stage, int first,
                                  const struct prefix *prefix)
{
    struct step_search *search = enumeration->search;
    struct step_candidate *trial = &enumeration->trial;
    const double time_s = step_work_s(search, stage->device_set, stage->submesh, first, stage->end);
    struct prefix next = *prefix;
    if (!isfinite(time_s)) return HAPT_OK;
    enumeration->nodes++;
    if (extend(enumeration, stage, first, time_s, &next) * (1 - 1e-12) >= enumeration->best_s) return HAPT_OK;
    const unsigned visited = enumeration->visited;
    for (int c = 0; c < search->C; c++) {
        const int more = step_devices_of(search, stage->device_set, stage->submesh, c);
        enumeration->used[c] += more;
        enumeration->visited |= more > 0 ? 1u << c : 0;
    }
    trial->stage[trial->count++] = *stage;
    const enum hapt_status status =
        stage->end == search->L ? take(enumeration) : descend(enumeration, stage->end, &next);
    trial->count--;
    enumeration->visited = visited;
    for (int c = 0; c < search->C; c++)
        enumeration->used[c] -= step_devices_of(search, stage->device_set, stage->submesh, c);
    return status;
}

static enum hapt_status descend(struct enumeration *enumeration, int first, const struct prefix *prefix)
{
    const struct step_search *search = enumeration->search;
    if (enumeration->trial.count == enumeration->most_stages) return HAPT_OK;
    for (int p = 0; p < step_device_sets(search); p++)
        for (int s = 0; s < step_submeshes_of(search, p); s++) {
            if (!may_follow(enumeration, p, s)) continue;
            for (int end = first + 1; end <= search->L; end++) {
                const struct step_stage stage = {p, s, end};
                if (!within_limits(enumeration)) return HAPT_OK;
                HAPT_TRY(add_stage(enumeration, &stage, first, prefix));
            }
        }
    return HAPT_OK;
}

static enum hapt_status begin(struct enumeration *enumeration)
{
    if (!enumeration->split) enumeration->best_s = enumeration->search->best.step_s;
    HAPT_TRY(step_candidate_create(enumeration->search, &enumeration->trial));
    return step_rest_create(enumeration->search, &enumeration->rest);
}

/* *bound_s: 0, if there are more plans than the limits allow. */
static enum hapt_status enumerate(struct step_search *search, double nodes, double simulations, double *bound_s)
{
    struct enumeration enumeration = {.search = search,
                                      .least_s = INFINITY,
                                      .most_stages = search->most_stages,
                                      .most_nodes = (int64_t)nodes,
                                      .first_simulation = search->simulated,
                                      .most_simulations = (int64_t)simulations};
    const struct prefix nothing = {.in_flight = INFINITY};
    *bound_s = 0;
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend(&enumeration, 0, &nothing));
    /* A plan that was dropped has a step of at least that of the best. */
    if (within_limits(&enumeration)) *bound_s = fmin(enumeration.least_s, search->best.step_s);
    return HAPT_OK;
}

enum hapt_status step_enumerate(struct step_search *search, double *bound_s)
{
    *bound_s = 0;
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    return enumerate(search, MOST_NODES, MOST_SIMULATIONS, bound_s);
}

enum hapt_status step_enumerate_late(struct step_search *search)
{
    double bound_s;
    if (search->L > LATE_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(enumerate(search, LATE_NODES * search->most_work, LATE_SIMULATIONS * search->most_work, &bound_s));
    if (bound_s > search->bound_s) search->bound_s = bound_s;
    return HAPT_OK;
}

enum hapt_status step_enumerate_short(struct step_search *search)
{
    struct enumeration enumeration = {.search = search, .least_s = INFINITY, .most_simulations = SHORT_SIMULATIONS};
    const struct prefix nothing = {.in_flight = INFINITY};
    if (search->L > SHORT_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(begin(&enumeration));
    for (int stages = 1; stages <= search->most_stages; stages++) {
        enumeration.most_stages = stages;
        enumeration.nodes = 0;
        enumeration.most_nodes = SHORT_NODES;
        enumeration.first_simulation = search->simulated;
        HAPT_TRY(descend(&enumeration, 0, &nothing));
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
    const struct prefix nothing = {.in_flight = INFINITY};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    if (!(*plan)->split) enumeration.best_s *= hapt_plan_split_worth(profile);
    HAPT_TRY(step_candidate_create(search, &kept));
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend(&enumeration, 0, &nothing));
    return kept.count > 0 ? make_split(&enumeration, &kept, result, plan) : HAPT_OK;
}
