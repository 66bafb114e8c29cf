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
/* A plan is simulated about so often to split it. Limit of these simulations, in microbatches. */
enum { SPLIT_SIMULATIONS = 16, MOST_SPLIT_MICROBATCHES = 100000 };

struct enumeration {
    struct step_search *search;
    struct step_candidate trial;
    double *rest_s; /* [L + 1], step_least_rest */
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

static int device_sets(const struct step_search *search)
{
    return search->C + search->profile->mixed_count;
}

static struct hapt_subclusters subclusters_of(const struct step_search *search, const int *device_set)
{
    if (*device_set < search->C) return (struct hapt_subclusters){1, device_set};
    const struct hapt_profile_mixed *mixed = &search->profile->mixed[*device_set - search->C];
    return (struct hapt_subclusters){mixed->count, mixed->cluster};
}

static int submeshes_of(const struct step_search *search, int device_set)
{
    return device_set < search->C ? search->profile->cluster[device_set].submesh_count : 1;
}

/* Work per microbatch of layers [first, end); NaN or infinite: no candidate. */
static double work_s(const struct step_search *search, int device_set, int submesh, int first, int end)
{
    const struct hapt_profile *profile = search->profile;
    const size_t cell = hapt_profile_index(profile, submesh, first, end - 1);
    return device_set < search->C ? profile->cluster[device_set].stage_time[cell]
                                  : profile->mixed[device_set - search->C].stage_time[cell];
}

/* Devices of subcluster c that a stage takes. */
static int devices_of(const struct step_search *search, int device_set, int submesh, int c)
{
    if (device_set < search->C) {
        const struct hapt_submesh *at = &search->profile->cluster[device_set].submesh[submesh];
        return device_set == c ? at->n * at->m : 0;
    }
    const struct hapt_profile_mixed *mixed = &search->profile->mixed[device_set - search->C];
    for (int k = 0; k < mixed->count; k++)
        if (mixed->cluster[k] == c) return mixed->devices[k];
    return 0;
}

static double least_comm_s(const struct step_search *search, int layer)
{
    double least_s = INFINITY;
    for (int from = 0; from < device_sets(search); from++)
        for (int to = 0; to < device_sets(search); to++)
            least_s = fmin(least_s, hapt_profile_boundary_s(search->lowest, layer, subclusters_of(search, &from),
                                                            subclusters_of(search, &to), NULL));
    return least_s;
}

enum hapt_status step_least_rest(struct step_search *search, double **made)
{
    double *all_s;
    HAPT_NEW(all_s, &search->arena, search->L + 1);
    *made = all_s;
    for (int first = search->L - 1; first >= 0; first--) {
        double best_s = INFINITY;
        for (int end = first + 1; end <= search->L; end++) {
            for (int p = 0; p < device_sets(search); p++)
                for (int s = 0; s < submeshes_of(search, p); s++) {
                    const double time_s = work_s(search, p, s, first, end);
                    if (isfinite(time_s)) best_s = fmin(best_s, time_s + all_s[end]);
                }
        }
        all_s[first] = best_s + (first > 0 ? 2 * least_comm_s(search, first - 1) : 0);
    }
    return HAPT_OK;
}

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
        const int more = devices_of(search, device_set, submesh, c);
        if (more == 0) continue;
        if (enumeration->used[c] + more > cluster->nodes * cluster->devices_per_node) return false;
        const struct step_stage *last = count > 0 ? &enumeration->trial.stage[count - 1] : NULL;
        if ((enumeration->visited >> c & 1u) && last && devices_of(search, last->device_set, last->submesh, c) == 0)
            return false;
    }
    return true;
}

/* Microbatches in flight that fit on a stage. */
static double in_flight(const struct step_search *search, const struct step_stage *stage, int first)
{
    const struct hapt_profile *profile = search->profile;
    double most = search->B;
    if (stage->device_set < search->C) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[stage->device_set];
        const size_t cell = hapt_profile_index(profile, stage->submesh, first, stage->end - 1);
        return step_in_flight(cluster->parameter_bytes[cell], cluster->activation_bytes[cell],
                              cluster->device_memory_bytes, search->B);
    }
    const struct hapt_profile_mixed *mixed = &profile->mixed[stage->device_set - search->C];
    for (int k = 0; k < mixed->count; k++) {
        const size_t cell = hapt_profile_index(profile, mixed->memory_rows > 1 ? k : 0, first, stage->end - 1);
        most = fmin(most, step_in_flight(mixed->parameter_bytes[cell], mixed->activation_bytes[cell],
                                         profile->cluster[mixed->cluster[k]].device_memory_bytes, search->B));
    }
    return most;
}

static enum hapt_status descend(struct enumeration *enumeration, int first, const struct prefix *prefix);

/* The prefix with one more stage, which takes this long. Returns the least step of a plan that begins so. */
static double extend(const struct enumeration *enumeration, const struct step_stage *stage, int first, double time_s,
                     struct prefix *prefix)
{
    const struct step_search *search = enumeration->search;
    const struct step_candidate *trial = &enumeration->trial;
    const double rest_s = enumeration->rest_s[stage->end];
    if (trial->count > 0) {
        const double comm_s = hapt_profile_boundary_s(
            search->lowest, first - 1, subclusters_of(search, &trial->stage[trial->count - 1].device_set),
            subclusters_of(search, &stage->device_set), NULL);
        prefix->sum_s += 2 * comm_s;
        prefix->head_s += comm_s;
        prefix->comm_s = fmax(prefix->comm_s, comm_s);
    }
    if (enumeration->split) { /* as in step_bound.c */
        const struct hapt_profile_cluster *cluster = &search->profile->cluster[stage->device_set];
        const size_t cell = hapt_profile_index(search->profile, stage->submesh, first, stage->end - 1);
        const double least_s = fmax(0, time_s - cluster->weight_time[cell]);
        prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + search->B * least_s);
        prefix->stage_s = fmax(prefix->stage_s, prefix->head_s + search->B * time_s);
        prefix->sum_s += least_s;
        prefix->head_s += cluster->stage_forward_time[cell];
        return fmax(prefix->stage_s, prefix->sum_s + (search->B - 1) * prefix->comm_s);
    }
    prefix->in_flight = fmin(prefix->in_flight, in_flight(search, stage, first));
    prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + search->B * time_s);
    prefix->stage_s = fmax(prefix->stage_s, prefix->sum_s + search->B * (time_s + rest_s) / prefix->in_flight);
    prefix->sum_s += time_s;
    return fmax(prefix->stage_s, prefix->sum_s + rest_s + (search->B - 1) * prefix->comm_s);
}

static enum hapt_status add_stage(struct enumeration *enumeration, const struct step_stage *stage, int first,
                                  const struct prefix *prefix)
{
    struct step_search *search = enumeration->search;
    struct step_candidate *trial = &enumeration->trial;
    const double time_s = work_s(search, stage->device_set, stage->submesh, first, stage->end);
    struct prefix next = *prefix;
    if (!isfinite(time_s)) return HAPT_OK;
    enumeration->nodes++;
    if (extend(enumeration, stage, first, time_s, &next) * (1 - 1e-12) >= enumeration->best_s) return HAPT_OK;
    const unsigned visited = enumeration->visited;
    for (int c = 0; c < search->C; c++) {
        const int more = devices_of(search, stage->device_set, stage->submesh, c);
        enumeration->used[c] += more;
        enumeration->visited |= more > 0 ? 1u << c : 0;
    }
    trial->stage[trial->count++] = *stage;
    const enum hapt_status status =
        stage->end == search->L ? take(enumeration) : descend(enumeration, stage->end, &next);
    trial->count--;
    enumeration->visited = visited;
    for (int c = 0; c < search->C; c++)
        enumeration->used[c] -= devices_of(search, stage->device_set, stage->submesh, c);
    return status;
}

static enum hapt_status descend(struct enumeration *enumeration, int first, const struct prefix *prefix)
{
    const struct step_search *search = enumeration->search;
    if (enumeration->trial.count == enumeration->most_stages) return HAPT_OK;
    for (int p = 0; p < device_sets(search); p++)
        for (int s = 0; s < submeshes_of(search, p); s++) {
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
    return step_least_rest(enumeration->search, &enumeration->rest_s);
}

enum hapt_status step_enumerate(struct step_search *search, double *bound_s)
{
    struct enumeration enumeration = {.search = search,
                                      .least_s = INFINITY,
                                      .most_stages = search->most_stages,
                                      .most_nodes = MOST_NODES,
                                      .first_simulation = search->simulated,
                                      .most_simulations = MOST_SIMULATIONS};
    const struct prefix nothing = {.in_flight = INFINITY};
    *bound_s = 0;
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend(&enumeration, 0, &nothing));
    /* A plan that was dropped has a step of at least that of the best. */
    if (within_limits(&enumeration)) *bound_s = fmin(enumeration.least_s, search->best.step_s);
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
    const struct prefix nothing = {0};
    if (search->L > MOST_LAYERS || search->options.no_enumeration) return HAPT_OK;
    if (!(*plan)->split) enumeration.best_s *= hapt_plan_split_worth(profile);
    HAPT_TRY(step_candidate_create(search, &kept));
    HAPT_TRY(begin(&enumeration));
    HAPT_TRY(descend(&enumeration, 0, &nothing));
    return kept.count > 0 ? make_split(&enumeration, &kept, result, plan) : HAPT_OK;
}
