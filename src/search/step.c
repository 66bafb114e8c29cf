/* The search for the least simulated step: seeds by the formula, enumeration or rows and refinement, and the bound. */
#include "search.h"
#include "step.h"

#include <math.h>
#include <string.h>

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

/* Launch rules under which the formula gives seeds. */
enum { MOST_RULES = 4 };
/* Microbatches of the shorter of two steps from which a long one is extrapolated. */
enum { ESTIMATE = 512 };
/* Work of all beams together: about a second on one core. */
#define MOST_WORK 1.2e8

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

/* The optimum if the boundary from subcluster `from` to `to` is forbidden: another order, or fewer subclusters. */
static enum hapt_status try_without(struct step_search *search, int from, int to, struct step_candidate *trial)
{
    const size_t links = (size_t)search->C * (size_t)search->C;
    struct hapt_profile other = search->useful;
    struct hapt_search_options rule = search->options;
    rule.may_fail = rule.unexplained = true;
    if (rule.any_schedule) rule.schedule = search->best.schedule;
    if (rule.any_threshold) rule.hide_threshold = search->best.hide_threshold;
    trial->step_s = INFINITY;
    other.link_latency = hapt_arena_alloc(&search->arena, links, sizeof(double));
    HAPT_TRY(hapt_env_agree(search->comm, other.link_latency ? HAPT_OK : HAPT_ERR_MEMORY));
    for (size_t k = 0; k < links; k++) other.link_latency[k] = search->profile->link_latency[k];
    other.link_latency[from * search->C + to] = INFINITY;
    if (!other.tied_latency) other.tied_latency = search->profile->link_latency;
    HAPT_TRY(step_may_lack(step_add_seed(search, &other, &rule, trial)));
    return trial->step_s <= STEP_SEED_WORTH * search->best.step_s ? step_improve_seed(search, trial) : HAPT_OK;
}

/* Other orders of the subclusters: without one of the boundaries between subclusters of the best candidate. */
static enum hapt_status try_orders(struct step_search *search)
{
    struct step_candidate base, trial;
    enum hapt_status status = step_candidate_create(search, &base);
    if (status == HAPT_OK) status = step_candidate_create(search, &trial);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    step_candidate_copy(&base, &search->best);
    for (int i = 0; i + 1 < base.count; i++) {
        const int from = base.stage[i].device_set, to = base.stage[i + 1].device_set;
        if (from < search->C && to < search->C && from != to) HAPT_TRY(try_without(search, from, to, &trial));
    }
    return HAPT_OK;
}

/* The optima of the formula under several launch rules, each row of stages once. */
static enum hapt_status find_seeds(struct step_search *search)
{
    struct hapt_search_options rule[MOST_RULES];
    const int rules = list_rules(&search->options, rule);
    search->seed_count = 0;
    for (int k = 0; k < rules; k++) {
        struct step_candidate *seed = &search->seed[search->seed_count];
        bool known = false;
        if (k > 0) rule[k].may_fail = rule[k].unexplained = true;
        seed->step_s = INFINITY;
        if (isfinite(search->best.step_s)) HAPT_TRY(hapt_env_agree(search->comm, step_trim(search)));
        const enum hapt_status status = step_add_seed(search, &search->useful, &rule[k], seed);
        HAPT_TRY(k > 0 ? step_may_lack(status) : status);
        for (int other = 0; other < search->seed_count; other++) known |= step_same_stages(&search->seed[other], seed);
        search->seed_count += !known && isfinite(seed->step_s);
    }
    return HAPT_OK;
}

/* --gap: is the best candidate proven to be close enough? */
static bool is_enough(const struct step_search *search)
{
    return hapt_at_most(search->best.step_s, (1 + search->options.gap) * search->bound_s);
}

enum hapt_status step_improve(struct step_search *search)
{
    const double worth_s = STEP_SEED_WORTH * search->best.step_s;
    search->trimmed_s = INFINITY; /* ranks may have started searches alone, with other stages left out */
    HAPT_TRY(hapt_env_agree(search->comm, step_trim(search)));
    if (search->enumerated) {
        step_candidate_copy(&search->seed[0], &search->best);
        HAPT_TRY(step_improve_seed(search, &search->seed[0])); /* launch counts beside those of the rules */
        return is_enough(search) ? HAPT_OK : step_views(search);
    }
    for (int k = 0; k < search->seed_count && !is_enough(search); k++)
        if (search->seed[k].step_s <= worth_s) HAPT_TRY(step_improve_seed(search, &search->seed[k]));
    if (!is_enough(search)) HAPT_TRY(try_orders(search));
    if (!is_enough(search)) HAPT_TRY(step_rows(search, false));
    const double before_s = search->best.step_s;
    if (!is_enough(search)) HAPT_TRY(step_views(search));
    if (search->best.step_s < before_s && !is_enough(search)) HAPT_TRY(step_rows(search, false));
    if (is_enough(search) || search->best.step_s <= STEP_CLOSE_FOR_ROWS * search->bound_s) return HAPT_OK;
    HAPT_TRY(step_rows(search, true));
    HAPT_TRY(step_grow(search));
    if (search->best.step_s > STEP_CLOSE_FOR_WINDOWS * search->bound_s) HAPT_TRY(step_windows(search));
    return hapt_env_agree(search->comm, step_enumerate_late(search));
}

enum hapt_status step_prepare(struct step_search *search)
{
    HAPT_TRY(step_candidate_create(search, &search->best));
    for (int k = 0; k < STEP_MOST_SEEDS; k++) HAPT_TRY(step_candidate_create(search, &search->seed[k]));
    HAPT_TRY(leave_out_step(search, &search->arena, &search->passes));
    search->useful = search->passes;
    HAPT_NEW(search->useful.cluster, &search->arena, search->C);
    memcpy(search->useful.cluster, search->passes.cluster, (size_t)search->C * sizeof *search->useful.cluster);
    return HAPT_OK;
}

enum hapt_status step_start(struct step_search *search)
{
    HAPT_TRY(find_seeds(search));
    HAPT_TRY(hapt_env_agree(search->comm, step_enumerate(search, &search->bound_s)));
    search->enumerated = search->bound_s > 0;
    if (!search->enumerated) HAPT_TRY(hapt_env_agree(search->comm, step_bound(search, &search->bound_s)));
    if (!search->enumerated) HAPT_TRY(hapt_env_agree(search->comm, step_enumerate_short(search)));
    if (isfinite(search->best.step_s)) return HAPT_OK;
    return hapt_search_agree(search->comm, &search->options,
                             hapt_fail(HAPT_ERR_INFEASIBLE, "use fewer microbatches, or devices with more memory",
                                       "no launch counts of the planned stages fit the devices' memory"));
}

enum hapt_status step_finish(struct step_search *search, const struct step_candidate *candidate,
                             struct hapt_arena *result, struct hapt_plan *plan)
{
    HAPT_TRY(step_candidate_plan(search, candidate, result, plan));
    return hapt_plan_price_launches(search->profile, plan);
}

void step_release(struct step_search *search)
{
    hapt_simulate_work_release(&search->simulation);
    beam_memo_release(&search->memo);
    hapt_arena_release(&search->trial);
    hapt_arena_release(&search->arena);
}

/* Tensors that go past the next stage do not cross the boundaries between, so boundary_bytes bound nothing there. With
 * two subclusters, all of them cross the link between, which their senders share: with the last stage before it, if its
 * last layer makes any of them. */
static enum hapt_status lower_boundaries(struct step_search *search)
{
    const size_t links = (size_t)search->C * (size_t)search->C;
    struct hapt_profile *lowest;
    double *made_last;
    bool none = false, all = search->C == 2;
    if (!search->profile->crossings) return HAPT_OK;
    HAPT_NEW(lowest, &search->arena, 1);
    *lowest = *search->profile;
    HAPT_TRY(hapt_crossings_least_bytes(search->profile->crossings, search->L, &search->arena, &lowest->boundary_bytes,
                                        &made_last));
    for (int l = 0; l + 1 < search->L; l++) {
        none = none || lowest->boundary_bytes[l] == 0;
        all = all && made_last[l] > 0;
    }
    if (none) HAPT_NEW(lowest->link_latency, &search->arena, links); /* zeros: nothing may cross */
    search->lowest = lowest;
    search->link_load = all ? search->profile : lowest;
    return HAPT_OK;
}

/* The profile becomes a view that knows the ends of its candidates. */
static enum hapt_status find_ends(struct step_search *search)
{
    struct hapt_profile *view;
    HAPT_NEW(view, &search->arena, 1);
    *view = *search->profile;
    HAPT_NEW(view->cluster, &search->arena, search->C);
    for (int c = 0; c < search->C; c++) {
        struct hapt_profile_cluster *own = &view->cluster[c];
        *own = search->profile->cluster[c];
        HAPT_TRY(hapt_profile_find_ends(search->L, own->submesh_count, own->stage_time, &search->arena, &own->ends));
    }
    search->profile = search->lowest = search->link_load = view;
    return HAPT_OK;
}

enum hapt_status step_begin(struct step_search *search, MPI_Comm comm, const struct hapt_profile *profile,
                            const struct hapt_search_options *options)
{
    *search = (struct step_search){.comm = comm,
                                   .profile = profile,
                                   .options = *options,
                                   .known_s = options->known_s > 0 ? options->known_s : INFINITY,
                                   .trimmed_s = INFINITY,
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
    HAPT_MPI(MPI_Comm_rank(comm, &search->rank));
    HAPT_MPI(MPI_Comm_size(comm, &search->size));
    HAPT_TRY(find_ends(search));
    return lower_boundaries(search);
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
    enum hapt_status status = step_begin(&search, MPI_COMM_SELF, profile, options);
    if (plan->stage_count > search.most_stages) search.most_stages = plan->stage_count;
    if (status == HAPT_OK) status = price_stages(&search, plan);
    step_release(&search);
    return status;
}
