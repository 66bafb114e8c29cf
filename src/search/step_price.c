/*
 * The simulated step of given stages.
 *
 * Launch counts. Under H-1F1B a boundary adds 1, 2 or 3 launches, by two thresholds on c_i: epsilon t_max and t_max / 2
 * (HAPT (2)). Between two distinct c_i a threshold changes nothing. So a few values of epsilon and t_max give all
 * launch counts of this family; they include those of 1F1B and eager 1F1B. Behind a slow link, fewer launches give an
 * earlier first backward pass: a stage computes its N_i forward passes first, and waits for their messages. So counts
 * by need are tried as well: the time until a microbatch's gradient can be back, in units of the longest w_i or c_i.
 */
#include "step.h"

#include <math.h>
#include <string.h>

/* Launch rules tried for one row of stages. */
enum { MOST_RULES = 64 };

enum hapt_status step_candidate_create(struct step_search *search, struct step_candidate *candidate)
{
    *candidate = (struct step_candidate){.step_s = INFINITY};
    HAPT_NEW(candidate->stage, &search->arena, search->most_stages);
    HAPT_NEW(candidate->launches, &search->arena, search->most_stages);
    return HAPT_OK;
}

void step_candidate_copy(struct step_candidate *to, const struct step_candidate *from)
{
    struct step_stage *stage = to->stage;
    int *launches = to->launches;
    memcpy(stage, from->stage, (size_t)from->count * sizeof *stage);
    memcpy(launches, from->launches, (size_t)from->count * sizeof *launches);
    *to = *from;
    to->stage = stage;
    to->launches = launches;
}

bool step_same_stages(const struct step_candidate *a, const struct step_candidate *b)
{
    return a->count == b->count && memcmp(a->stage, b->stage, (size_t)a->count * sizeof *a->stage) == 0;
}

/* Kinds of schedules differ in their launch counts alone. GPipe is an exception in estimates of long steps. */
static struct beam_key begin_key(const struct step_candidate *candidate, enum hapt_schedule_kind schedule)
{
    struct beam_key key = {0};
    beam_key_add(&key, schedule == HAPT_SCHEDULE_GPIPE);
    for (int i = 0; i < candidate->count; i++) {
        const struct step_stage *stage = &candidate->stage[i];
        beam_key_add(&key, (uint64_t)stage->device_set << 32 | (uint64_t)stage->submesh);
        beam_key_add(&key, (uint64_t)stage->end);
    }
    return key;
}

struct beam_key step_key(const struct step_candidate *candidate)
{
    struct beam_key key = begin_key(candidate, candidate->schedule);
    for (int i = 0; i < candidate->count; i++) beam_key_add(&key, (uint64_t)candidate->launches[i]);
    return key;
}

/* The same with the launch counts of a plan of these stages. */
static struct beam_key key_of(const struct step_candidate *candidate, const struct hapt_plan *plan,
                              enum hapt_schedule_kind schedule)
{
    struct beam_key key = begin_key(candidate, schedule);
    for (int i = 0; i < candidate->count; i++) beam_key_add(&key, (uint64_t)plan->stage[i].warmup);
    return key;
}

/* beam_memo_find; a step counts as simulated, so that limits of simulations do not depend on what is known. */
static bool find_price(struct step_search *search, struct beam_key key, double limit_s, double most_s, double *step_s)
{
    if (!beam_memo_find(&search->memo, key, limit_s, most_s, step_s)) return false;
    search->simulated += isfinite(*step_s);
    return true;
}

/* The profile's submesh of a stage of one subcluster; -1: none. */
static int find_submesh(const struct hapt_profile *profile, const struct hapt_plan_stage *stage)
{
    const struct hapt_profile_cluster *cluster = &profile->cluster[stage->submesh->subcluster[0]];
    for (int s = 0; s < cluster->submesh_count; s++) {
        if (hapt_plan_stage_runs(stage, &cluster->submesh[s])) return s;
    }
    return -1;
}

enum hapt_status step_candidate_from(const struct step_search *search, const struct hapt_plan *plan,
                                     struct step_candidate *candidate)
{
    HAPT_ASSERT(plan->stage_count <= search->most_stages);
    candidate->count = plan->stage_count;
    candidate->schedule = plan->schedule;
    candidate->hide_threshold = plan->hide_threshold;
    candidate->step_s = plan->simulated_s;
    for (int i = 0; i < plan->stage_count; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        struct step_stage *made = &candidate->stage[i];
        *made = (struct step_stage){.end = stage->end_layer};
        candidate->launches[i] = stage->warmup;
        if (hapt_plan_is_mixed(stage)) {
            made->device_set = search->C + hapt_plan_stage_mixed_group(search->profile, stage);
        } else {
            made->device_set = stage->submesh->subcluster[0];
            made->submesh = find_submesh(search->profile, stage);
            HAPT_ASSERT(made->submesh >= 0);
        }
    }
    return HAPT_OK;
}

enum hapt_status step_candidate_plan(const struct step_search *search, const struct step_candidate *candidate,
                                     struct hapt_arena *arena, struct hapt_plan *plan)
{
    const struct hapt_profile *profile = search->profile;
    *plan = hapt_search_plan(profile, &search->options);
    plan->schedule = candidate->schedule;
    plan->hide_threshold = candidate->hide_threshold;
    HAPT_TRY(hapt_plan_allot(plan, candidate->count, arena));
    for (int i = 0; i < candidate->count; i++) {
        const struct step_stage *from = &candidate->stage[i];
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->first_layer = i > 0 ? from[-1].end : 0;
        stage->end_layer = from->end;
        stage->warmup = candidate->launches[i];
        if (from->device_set >= search->C)
            HAPT_TRY(hapt_plan_stage_mix(profile, from->device_set - search->C, arena, stage));
        else
            hapt_plan_stage_run(profile, from->device_set, &profile->cluster[from->device_set].submesh[from->submesh],
                                stage);
    }
    return HAPT_OK;
}

/* ---- Bounds ---- */

/* One transfer between neighbouring stages of a plan with edges of its own; 0: the pipeline has ended. */
static double transfer_s(const struct hapt_plan *plan, int from, int to)
{
    for (int e = 0; e < plan->edge_count; e++)
        if (plan->edge[e].edge.from == from && plan->edge[e].edge.to == to) return plan->edge[e].time_s;
    return 0;
}

static double work_s(const struct hapt_plan *plan, int i)
{
    return plan->stage[i].compute_s - plan->stage[i].step_s / plan->microbatches;
}

/* Activations and gradients over the boundary behind a stage. */
static double there_and_back_s(const struct hapt_plan *plan, int i)
{
    return plan->edge_count > 0 ? transfer_s(plan, i, i + 1) + transfer_s(plan, i + 1, i) : 2 * plan->stage[i].comm_s;
}

/* Seconds per microbatch during which the channel from stage i to the next one, or back, is busy: the longer. */
static double channel_s(const struct hapt_plan *plan, int i)
{
    double longest_s = plan->edge_count > 0 ? 0 : plan->stage[i].comm_s;
    for (int first = 0; first < plan->edge_count; first++) {
        const struct hapt_schedule_edge *edge = &plan->edge[first].edge;
        double sum_s = 0;
        if (!(edge->from == i && edge->to == i + 1) && !(edge->from == i + 1 && edge->to == i)) continue;
        for (int e = 0; e < plan->edge_count; e++) {
            const struct hapt_schedule_edge *other = &plan->edge[e].edge;
            const bool same = other->from == edge->from && other->backward == edge->backward;
            if (e == first || (same && edge->link > 0 && other->link == edge->link)) sum_s += plan->edge[e].time_s;
        }
        longest_s = fmax(longest_s, sum_s);
    }
    return longest_s;
}

/* The most microbatches in flight that fit on the stage. */
static double most_in_flight(const struct hapt_plan *plan, const struct hapt_plan_stage *stage)
{
    double most = plan->microbatches;
    for (int k = 0; k < stage->submesh->part_count; k++)
        most = fmin(most, step_in_flight(stage->part_parameter_bytes[k], stage->part_activation_bytes[k],
                                         stage->submesh->device_memory_bytes[k], plan->microbatches));
    return most;
}

/* How much later the first forward pass of stage 0 ends for its update: play_first_forward_end from time 0. */
static double least_update_s(const struct hapt_plan *plan)
{
    const struct hapt_plan_stage *first = &plan->stage[0];
    const double all_s = first->step_s - first->tied_s;
    if (!hapt_plan_defers(plan)) return all_s;
    const double deferred_s = fmin(first->deferred_s, all_s), work_s = fmin(first->deferred_work_s, deferred_s);
    return all_s - deferred_s + fmax(work_s, deferred_s - (1 - HAPT_DEFERRED_TAIL) * first->forward_s);
}

/* A lower bound of the simulated step of a plan with priced stages, for all launch counts.
 *
 * On each stage, B passes follow the first arrival, and the last gradient still goes to stage 0. Between the first
 * forward and the first backward of a stage, a microbatch passes all stages behind it. The stage holds it for so long,
 * and only as many at a time as fit on it and on those in front. The same for links. */
static double lower_s(const struct hapt_plan *plan)
{
    const int S = plan->stage_count;
    const double B = plan->microbatches;
    double all_s = 0, head_s = 0, least_s = 0, in_flight = B;
    for (int i = 0; i < S; i++) all_s += work_s(plan, i) + there_and_back_s(plan, i);
    for (int i = 0; i < S; i++) {
        const struct hapt_plan_stage *stage = &plan->stage[i];
        const double w = work_s(plan, i), f = stage->forward_s, behind_s = fmax(0, all_s - head_s - w);
        least_s = fmax(least_s, head_s + B * w);
        least_s = fmax(least_s, head_s + behind_s + f + B * (w - f));
        least_s = fmax(least_s, head_s + behind_s + B * f + (w - f));
        in_flight = fmin(in_flight, most_in_flight(plan, stage));
        least_s = fmax(least_s, head_s + B * (w + behind_s) / in_flight);
        least_s = fmax(least_s, all_s + (B - 1) * channel_s(plan, i));
        head_s += w + there_and_back_s(plan, i);
    }
    least_s += plan->exchange_s + least_update_s(plan);
    return least_s * (1 - 1e-12);
}

/* ---- Launch rules ---- */

static double least_t_max_s(const struct hapt_plan *plan)
{
    double least_s = 0;
    for (int i = 0; i < plan->stage_count; i++)
        least_s = fmax(least_s, fmax(plan->stage[i].compute_s, plan->stage[i].comm_s));
    return least_s;
}

/* The longest w_i or c_i. */
static double least_pass_s(const struct hapt_plan *plan)
{
    double least_s = 0;
    for (int i = 0; i < plan->stage_count; i++) least_s = fmax(least_s, fmax(work_s(plan, i), plan->stage[i].comm_s));
    return least_s;
}

/* Prices the stages in search->trial, and sets the candidate's lower_s. *plan NULL: they are no candidates or cannot be
 * faster than `limit_s`. */
static enum hapt_status begin(struct step_search *search, double limit_s, struct step_candidate *candidate,
                              struct hapt_plan **plan)
{
    struct hapt_plan *made;
    int misfit;
    *plan = NULL;
    candidate->lower_s = INFINITY;
    hapt_arena_reset(&search->trial);
    HAPT_NEW(made, &search->trial, 1);
    HAPT_TRY(step_candidate_plan(search, candidate, &search->trial, made));
    const enum hapt_status status = hapt_plan_launch(search->profile, INFINITY, made, &misfit);
    if (status == HAPT_ERR_INPUT) {
        hapt_fail_reset();
        return HAPT_OK;
    }
    HAPT_TRY(status);
    candidate->lower_s = lower_s(made);
    if (candidate->lower_s < limit_s) *plan = made;
    return HAPT_OK;
}

/* A step above most_s may become any shorter one that is above most_s, too. */
static enum hapt_status simulate(struct step_search *search, const struct hapt_plan *plan, double most_s,
                                 double *step_s)
{
    search->simulated++;
    if (plan->microbatches > 4 * search->estimate)
        return hapt_plan_estimate(plan, search->estimate, &search->trial, step_s);
    if (plan->edge_count > 0) {
        struct hapt_schedule *schedule;
        struct hapt_costs costs;
        HAPT_TRY(hapt_plan_lay_out(plan, &search->trial, &schedule, &costs));
        return hapt_simulate_step(schedule, &costs, &search->simulation, step_s);
    }
    return hapt_plan_simulate_chain(plan, most_s, &search->trial, &search->simulation, step_s);
}

enum hapt_status step_price(struct step_search *search, double limit_s, double most_s, struct step_candidate *candidate)
{
    struct hapt_plan *plan;
    candidate->step_s = INFINITY;
    HAPT_TRY(begin(search, limit_s, candidate, &plan));
    if (!plan) return HAPT_OK;
    for (int i = 0; i < plan->stage_count; i++) plan->stage[i].warmup = candidate->launches[i];
    if (!isfinite(least_t_max_s(plan)) || hapt_plan_tighten(plan) >= 0) return HAPT_OK;
    return simulate(search, plan, most_s, &candidate->step_s);
}

/* Launch counts that were tried. */
struct tried {
    int count;
    int *launches[MOST_RULES]; /* [stage] */
};

/* Adds the plan's launch counts; *is_new: they were not tried before. */
static enum hapt_status note_launches(struct step_search *search, const struct hapt_plan *plan, struct tried *tried,
                                      bool *is_new)
{
    const int S = plan->stage_count;
    *is_new = false;
    for (int k = 0; k < tried->count; k++) {
        int same = 0;
        while (same < S && tried->launches[k][same] == plan->stage[same].warmup) same++;
        if (same == S) return HAPT_OK;
    }
    if (tried->count == MOST_RULES) return HAPT_OK;
    int *launches;
    HAPT_NEW(launches, &search->trial, S);
    for (int i = 0; i < S; i++) launches[i] = plan->stage[i].warmup;
    tried->launches[tried->count++] = launches;
    *is_new = true;
    return HAPT_OK;
}

/* Simulates the launch counts of the plan, unless they were tried. */
static enum hapt_status try_counts(struct step_search *search, struct hapt_plan *plan, enum hapt_schedule_kind schedule,
                                   double hide_threshold, struct tried *tried, struct step_candidate *candidate)
{
    double step_s;
    bool is_new;
    HAPT_TRY(note_launches(search, plan, tried, &is_new));
    if (!is_new) return HAPT_OK;
    const struct beam_key key = key_of(candidate, plan, schedule);
    if (!find_price(search, key, INFINITY, candidate->step_s, &step_s)) {
        HAPT_TRY(simulate(search, plan, candidate->step_s, &step_s));
        HAPT_TRY(beam_memo_add(&search->memo, key, INFINITY, candidate->step_s, candidate->lower_s, step_s));
    }
    if (!(step_s < candidate->step_s)) return HAPT_OK;
    candidate->step_s = step_s;
    candidate->schedule = schedule;
    candidate->hide_threshold = hide_threshold;
    for (int i = 0; i < plan->stage_count; i++) candidate->launches[i] = plan->stage[i].warmup;
    return HAPT_OK;
}

static enum hapt_status try_rule(struct step_search *search, struct hapt_plan *plan, enum hapt_schedule_kind schedule,
                                 double hide_threshold, double t_max_s, struct tried *tried,
                                 struct step_candidate *candidate)
{
    if (hapt_plan_relaunch(plan, schedule, hide_threshold, t_max_s) >= 0) return HAPT_OK;
    return try_counts(search, plan, schedule, hide_threshold, tried, candidate);
}

/* The most launches of a stage that fit, at most `launches`; 0: none. */
static int fitting(struct hapt_plan_stage *stage, int launches)
{
    for (stage->warmup = launches; stage->warmup > 0; stage->warmup--) {
        hapt_plan_stage_tighten(stage);
        if (hapt_at_most(stage->memory_bytes, stage->device_memory_bytes)) break;
    }
    return stage->warmup;
}

/* Launch counts by need: `factor` times the time until the gradient is back, and `more`; as far as memory allows. */
static enum hapt_status try_needs(struct step_search *search, struct hapt_plan *plan, double pace_s, double factor,
                                  int more, struct tried *tried, struct step_candidate *candidate)
{
    double back_s = 0;
    int most = plan->microbatches;
    for (int i = plan->stage_count - 1; i >= 0; i--) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        back_s += work_s(plan, i) + 2 * stage->comm_s;
        const double needed = i + 1 == plan->stage_count ? 1 : ceil(factor * back_s / pace_s) + more;
        stage->warmup = needed < most ? (int)needed : most;
    }
    for (int i = 0; i < plan->stage_count; i++) { /* counts never rise */
        struct hapt_plan_stage *stage = &plan->stage[i];
        most = fitting(stage, stage->warmup < most ? stage->warmup : most);
        if (most == 0) return HAPT_OK;
    }
    return try_counts(search, plan, HAPT_SCHEDULE_H1F1B, search->options.hide_threshold, tried, candidate);
}

/* The rules at one t_max: every epsilon up to 1/2 at which a launch count changes. */
static enum hapt_status try_thresholds(struct step_search *search, struct hapt_plan *plan, double t_max_s,
                                       struct tried *tried, struct step_candidate *candidate)
{
    const struct hapt_search_options *options = &search->options;
    HAPT_TRY(try_rule(search, plan, HAPT_SCHEDULE_H1F1B, options->hide_threshold, t_max_s, tried, candidate));
    if (!options->any_threshold) return HAPT_OK;
    HAPT_TRY(try_rule(search, plan, HAPT_SCHEDULE_H1F1B, 0, t_max_s, tried, candidate));
    for (int i = 0; i + 1 < plan->stage_count; i++) {
        const double share = plan->stage[i].comm_s / t_max_s;
        if (share <= 0.5) HAPT_TRY(try_rule(search, plan, HAPT_SCHEDULE_H1F1B, share, t_max_s, tried, candidate));
    }
    return HAPT_OK;
}

enum hapt_status step_price_launches(struct step_search *search, double limit_s, struct step_candidate *candidate)
{
    const struct hapt_search_options *options = &search->options;
    struct hapt_plan *plan;
    struct tried tried = {0};
    candidate->step_s = INFINITY;
    HAPT_TRY(begin(search, limit_s, candidate, &plan));
    const double least_s = plan ? least_t_max_s(plan) : INFINITY;
    if (!isfinite(least_s)) return HAPT_OK;
    if (options->any_schedule || options->schedule == HAPT_SCHEDULE_H1F1B) {
        HAPT_TRY(try_thresholds(search, plan, least_s, &tried, candidate));
        for (int i = 0; i + 1 < plan->stage_count; i++) {
            const double c = plan->stage[i].comm_s, each[2] = {2 * c, c / options->hide_threshold};
            for (int k = 0; k < 2; k++)
                if (each[k] > least_s && isfinite(each[k]))
                    HAPT_TRY(try_thresholds(search, plan, each[k], &tried, candidate));
        }
    }
    static const double factors[] = {0.95, 1, 1.1, 1.25, 1.5};
    for (int k = 0;
         k < 10 && options->any_threshold && (options->any_schedule || options->schedule == HAPT_SCHEDULE_H1F1B); k++)
        HAPT_TRY(try_needs(search, plan, least_pass_s(plan), factors[k / 2], k % 2, &tried, candidate));
    for (int kind = 0; kind <= HAPT_SCHEDULE_H1F1B; kind++)
        if (kind != HAPT_SCHEDULE_H1F1B &&
            (options->any_schedule || options->schedule == (enum hapt_schedule_kind)kind))
            HAPT_TRY(try_rule(search, plan, (enum hapt_schedule_kind)kind, options->hide_threshold, least_s, &tried,
                              candidate));
    return HAPT_OK;
}

/* Adds `by` to the launches of stages [first, last]; false: a count would leave [1, B], or rise along the pipeline. */
static bool shift_launches(struct step_candidate *candidate, int first, int last, int by, int B)
{
    int *launches = candidate->launches;
    for (int i = first; i <= last; i++)
        if (launches[i] + by < 1 || launches[i] + by > B) return false;
    if (first > 0 && launches[first - 1] < launches[first] + by) return false;
    if (last + 1 < candidate->count && launches[last] + by < launches[last + 1]) return false;
    for (int i = first; i <= last; i++) launches[i] += by;
    return true;
}

/* step_price, if the step is not known; sets step_s alone. */
static enum hapt_status price_once(struct step_search *search, double limit_s, struct step_candidate *candidate)
{
    const struct beam_key key = step_key(candidate);
    if (find_price(search, key, limit_s, limit_s, &candidate->step_s)) return HAPT_OK;
    HAPT_TRY(step_price(search, limit_s, limit_s, candidate));
    return beam_memo_add(&search->memo, key, limit_s, limit_s, candidate->lower_s, candidate->step_s);
}

enum hapt_status step_price_nearby(struct step_search *search, struct step_candidate *candidate)
{
    const int S = candidate->count;
    if (!isfinite(candidate->step_s) || !step_launches_are_free(search, candidate)) return HAPT_OK;
    for (int fails = 0, move = 0; fails < 4 * S && candidate->lower_s < candidate->step_s;
         move = (move + 1) % (4 * S)) {
        const int last = move / 4, first = move & 1 ? 0 : last, by = move & 2 ? 1 : -1;
        const struct step_candidate before = *candidate;
        fails++;
        if ((first == last && move & 1) || !shift_launches(candidate, first, last, by, search->B)) continue;
        candidate->schedule = HAPT_SCHEDULE_H1F1B;
        HAPT_TRY(price_once(search, before.step_s, candidate));
        if (candidate->step_s < before.step_s) {
            fails = 0;
            continue;
        }
        for (int i = first; i <= last; i++) candidate->launches[i] -= by;
        *candidate = before;
    }
    return HAPT_OK;
}
