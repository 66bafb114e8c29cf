/* The search for the least simulated step: seeds by the formula, enumeration or rows and refinement, and the bound. */
#include "search.h"
#include "step.h"

#include <math.h>

/* The profile without what stages do once a step: the simulator counts that outside the pipeline, the formula in every
 * microbatch. */
static enum hapt_status leave_out_step(const struct step_search *search, struct hapt_arena *arena,
                                       struct hapt_profile *view)
{
    const int C = search->C, mixed = search->profile->mixed_count;
    *view = *search->profile;
    HAPT_NEW(view->cluster, arena, C);
    HAPT_NEW(view->mixed, arena, mixed);
    for (int c = 0; c < C; c++) {
        view->cluster[c] = search->profile->cluster[c];
        view->cluster[c].step_time = NULL;
    }
    for (int k = 0; k < mixed; k++) {
        view->mixed[k] = search->profile->mixed[k];
        view->mixed[k].step_time = NULL;
    }
    return HAPT_OK;
}

/* The optimum of the formula in a profile becomes a candidate. */
static enum hapt_status add_seed(struct step_search *search, const struct hapt_profile *profile,
                                 const struct hapt_search_options *rule, struct step_candidate *trial,
                                 struct hapt_plan_search_figures *figures)
{
    struct hapt_plan *plan;
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    enum hapt_status status = hapt_plan_search_formula(search->comm, profile, rule, &scratch, &plan);
    if (status == HAPT_OK) {
        status = step_candidate_from(search, plan, trial);
        figures->candidates += plan->search.candidates;
        figures->evaluated += plan->search.evaluated;
        if (status == HAPT_OK) status = step_price_launches(search, INFINITY, trial);
        if (status == HAPT_OK && trial->step_s < search->best.step_s) step_candidate_copy(&search->best, trial);
        status = hapt_env_agree(search->comm, status);
    }
    hapt_arena_release(&scratch);
    return status;
}

enum { MOST_RULES = 4 };
/* Microbatches of the shorter of two steps from which a long one is extrapolated. */
enum { ESTIMATE = 512 };
/* Work of all beams together: about three seconds on one core. */
#define MOST_WORK 6e7
/* Seeds that are slower than the best by more than this factor are not refined. */
#define SEED_WORTH 1.02

/* The launch rules under which the formula gives seeds; returns their number. */
static int list_rules(const struct hapt_search_options *options, struct hapt_search_options rule[MOST_RULES])
{
    static const double threshold[] = {0.1, 0.5};
    int count = 0;
    rule[count] = *options;
    if (options->any_schedule) rule[count].schedule = HAPT_SCHEDULE_H1F1B;
    count++;
    for (int k = 0; k < 2 && rule[0].schedule == HAPT_SCHEDULE_H1F1B && options->any_threshold; k++) {
        rule[count] = rule[0];
        rule[count++].hide_threshold = threshold[k];
    }
    if (options->any_schedule) {
        rule[count] = *options;
        rule[count++].schedule = HAPT_SCHEDULE_GPIPE;
    }
    return count;
}

static enum hapt_status improve(struct step_search *search, struct step_candidate *seed)
{
    HAPT_TRY(step_refine(search, seed));
    if (seed->step_s < search->best.step_s) step_candidate_copy(&search->best, seed);
    return HAPT_OK;
}

/* A rule or a restriction may leave no plan. */
static enum hapt_status may_lack(enum hapt_status status)
{
    if (status != HAPT_ERR_INFEASIBLE) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

/* The optimum if the boundary from subcluster `from` to `to` is forbidden: another order, or fewer subclusters. */
static enum hapt_status try_without(struct step_search *search, int from, int to, struct step_candidate *trial,
                                    struct hapt_plan_search_figures *figures)
{
    const size_t links = (size_t)search->C * (size_t)search->C;
    struct hapt_profile other = search->passes;
    struct hapt_search_options rule = *search->options;
    rule.may_fail = true;
    if (rule.any_schedule) rule.schedule = search->best.schedule;
    if (rule.any_threshold) rule.hide_threshold = search->best.hide_threshold;
    trial->step_s = INFINITY;
    other.link_latency = hapt_arena_alloc(&search->arena, links, sizeof(double));
    HAPT_TRY(hapt_env_agree(search->comm, other.link_latency ? HAPT_OK : HAPT_ERR_MEMORY));
    for (size_t k = 0; k < links; k++) other.link_latency[k] = search->profile->link_latency[k];
    other.link_latency[from * search->C + to] = INFINITY;
    HAPT_TRY(may_lack(add_seed(search, &other, &rule, trial, figures)));
    return trial->step_s <= SEED_WORTH * search->best.step_s ? improve(search, trial) : HAPT_OK;
}

/* Other orders of the subclusters: without one of the boundaries between subclusters of the best candidate. */
static enum hapt_status try_orders(struct step_search *search, struct hapt_plan_search_figures *figures)
{
    struct step_candidate base, trial;
    enum hapt_status status = step_candidate_create(search, &base);
    if (status == HAPT_OK) status = step_candidate_create(search, &trial);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    step_candidate_copy(&base, &search->best);
    for (int i = 0; i + 1 < base.count; i++) {
        const int from = base.stage[i].device_set, to = base.stage[i + 1].device_set;
        if (from < search->C && to < search->C && from != to) HAPT_TRY(try_without(search, from, to, &trial, figures));
    }
    return HAPT_OK;
}

/* The optima of the formula under several launch rules, each row of stages once. */
static enum hapt_status find_seeds(struct step_search *search, struct step_candidate seed[MOST_RULES], int *count,
                                   struct hapt_plan_search_figures *figures)
{
    struct hapt_search_options rule[MOST_RULES];
    const int rules = list_rules(search->options, rule);
    *count = 0;
    for (int k = 0; k < rules; k++) {
        bool known = false;
        rule[k].may_fail = rule[k].may_fail || k > 0;
        seed[*count].step_s = INFINITY;
        const enum hapt_status status = add_seed(search, &search->passes, &rule[k], &seed[*count], figures);
        HAPT_TRY(k > 0 ? may_lack(status) : status);
        for (int other = 0; other < *count; other++) known |= step_same_stages(&seed[other], &seed[*count]);
        *count += !known && isfinite(seed[*count].step_s);
    }
    return HAPT_OK;
}

/* --gap: is the best candidate proven to be close enough? */
static bool is_enough(const struct step_search *search, double bound_s)
{
    return hapt_at_most(search->best.step_s, (1 + search->options->gap) * bound_s);
}

static enum hapt_status refine_seeds(struct step_search *search, struct step_candidate *seed, int count, double bound_s,
                                     struct hapt_plan_search_figures *figures)
{
    const double worth_s = SEED_WORTH * search->best.step_s;
    for (int k = 0; k < count && !is_enough(search, bound_s); k++)
        if (seed[k].step_s <= worth_s) HAPT_TRY(improve(search, &seed[k]));
    if (!is_enough(search, bound_s)) HAPT_TRY(try_orders(search, figures));
    return is_enough(search, bound_s) ? HAPT_OK : step_rows(search);
}

static enum hapt_status run(struct step_search *search, struct hapt_plan_search_figures *figures, double *bound_s)
{
    struct step_candidate seed[MOST_RULES];
    int seeds;
    enum hapt_status status = step_candidate_create(search, &search->best);
    for (int k = 0; k < MOST_RULES && status == HAPT_OK; k++) status = step_candidate_create(search, &seed[k]);
    if (status == HAPT_OK) status = leave_out_step(search, &search->arena, &search->passes);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    HAPT_TRY(find_seeds(search, seed, &seeds, figures));
    HAPT_TRY(hapt_env_agree(search->comm, step_enumerate(search, bound_s)));
    if (*bound_s > 0) {
        step_candidate_copy(&seed[0], &search->best);
        return improve(search, &seed[0]); /* launch counts beside those of the rules */
    }
    HAPT_TRY(hapt_env_agree(search->comm, step_bound(search, bound_s)));
    return refine_seeds(search, seed, seeds, *bound_s, figures);
}

/* The plan of the best candidate, with the exact simulated step. */
static enum hapt_status make_plan(struct step_search *search, double bound_s, struct hapt_arena *result,
                                  struct hapt_plan *plan)
{
    const struct step_candidate *best = &search->best;
    HAPT_TRY(step_candidate_plan(search, best, result, plan));
    HAPT_TRY(hapt_plan_price_launches(search->profile, plan));
    plan->bound_s = fmin(bound_s, plan->simulated_s);
    plan->search.gap = 0;
    return HAPT_OK;
}

static enum hapt_status run_all(struct step_search *search, struct hapt_arena *result, struct hapt_plan *plan)
{
    struct hapt_plan_search_figures figures = {0};
    double bound_s = 0;
    const double start_s = hapt_time_s();
    HAPT_TRY(run(search, &figures, &bound_s));
    if (!isfinite(search->best.step_s))
        return hapt_search_agree(search->comm, search->options,
                                 hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer microbatches, or devices with more memory",
                                           "no launch counts of the planned stages fit the devices' memory"));
    HAPT_TRY(hapt_env_agree(search->comm, make_plan(search, bound_s, result, plan)));
    plan->search.candidates = figures.candidates;
    plan->search.evaluated = figures.evaluated;
    plan->search.seconds = hapt_time_s() - start_s;
    return hapt_env_mpi(MPI_Bcast(&plan->search.seconds, 1, MPI_DOUBLE, 0, search->comm), "MPI_Bcast");
}

static void release(struct step_search *search)
{
    hapt_simulate_work_release(&search->simulation);
    hapt_arena_release(&search->lists);
    hapt_arena_release(&search->trial);
    hapt_arena_release(&search->arena);
}

static void initialise(struct step_search *search, MPI_Comm comm, const struct hapt_profile *profile,
                       const struct hapt_search_options *options)
{
    *search = (struct step_search){.comm = comm,
                                   .size = 1,
                                   .profile = profile,
                                   .options = options,
                                   .L = profile->layer_count,
                                   .C = profile->cluster_count,
                                   .B = options->microbatches,
                                   .estimate = ESTIMATE,
                                   .most_work = options->work > 0 ? options->work : MOST_WORK};
    for (int c = 0; c < search->C; c++)
        search->most_stages += profile->cluster[c].nodes * profile->cluster[c].devices_per_node;
    if (search->most_stages > search->L) search->most_stages = search->L;
    hapt_arena_init(&search->arena);
    hapt_arena_init(&search->trial);
    hapt_arena_init(&search->lists);
}

static enum hapt_status price_stages(struct step_search *search, struct hapt_plan *plan)
{
    struct step_candidate own;
    HAPT_TRY(step_candidate_create(search, &own));
    HAPT_TRY(step_candidate_from(search, plan, &own));
    HAPT_TRY(step_price_launches(search, INFINITY, &own));
    if (!isfinite(own.step_s)) return HAPT_OK; /* the formula's launch counts stay */
    for (int i = 0; i < plan->stage_count; i++) plan->stage[i].warmup = own.launches[i];
    plan->schedule = own.schedule;
    plan->hide_threshold = own.hide_threshold;
    return hapt_plan_price_launches(search->profile, plan);
}

enum hapt_status hapt_plan_price_stages(const struct hapt_profile *profile, const struct hapt_search_options *options,
                                        struct hapt_plan *plan)
{
    struct step_search search;
    HAPT_TRY(hapt_plan_price(profile, plan));
    if (options->objective == HAPT_OBJECTIVE_FORMULA) return HAPT_OK;
    initialise(&search, MPI_COMM_SELF, profile, options);
    if (plan->stage_count > search.most_stages) search.most_stages = plan->stage_count;
    const enum hapt_status status = price_stages(&search, plan);
    release(&search);
    return status;
}

enum hapt_status hapt_plan_search_step(MPI_Comm comm, const struct hapt_profile *profile,
                                       const struct hapt_search_options *options, struct hapt_arena *result,
                                       struct hapt_plan **plan)
{
    struct step_search search;
    HAPT_TRY(hapt_env_agree(comm, search_check_options(options)));
    initialise(&search, comm, profile, options);
    HAPT_MPI(MPI_Comm_rank(comm, &search.rank));
    HAPT_MPI(MPI_Comm_size(comm, &search.size));
    struct hapt_plan *made = hapt_arena_alloc(result, 1, sizeof *made);
    enum hapt_status status = hapt_env_agree(comm, made ? HAPT_OK : HAPT_ERR_MEMORY);
    if (status == HAPT_OK) status = run_all(&search, result, made);
    release(&search);
    if (status == HAPT_OK) *plan = made;
    return status;
}
