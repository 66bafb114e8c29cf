/*
 * Rounds over the items of a class. Single layers are timed first; they give the number of rounds that the budget
 * allows. Then the items are timed from which all others are composed (select.h). If the witnesses among them disagree
 * with what smooth.h composes, the others are timed too. If the budget allows fewer than MIN_ROUNDS of the items, only
 * a sample is timed. smooth.h removes the noise that the rounds show.
 *
 * Rounds are spread over time, since other work on a machine comes and goes within seconds. The first FIRST_ROUNDS take
 * a part of the budget even if they need less. Unless they agree, the others are spread over all of it.
 */
#include "measure.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "hapt/progress.h"
#include "select.h"
#include "smooth.h"

enum { MIN_ROUNDS = 3, LAYER_ROUNDS = 3, FIRST_ROUNDS = 7 };
#define WARM_SECONDS \
    0.005 /* shorter items run once untimed before they are timed: in a stage, too, their weights are in the cache */
/* Witnesses that differ from the composed time by more than this, and than 2 x their noise, disprove it. On an idle
 * machine they differ by 1.5 to 2.7 % in the median. */
#define COMPOSED_TOLERANCE 0.03
#define BUDGET_SHARE 0.7  /* of --profile-seconds, for the rounds: reserving, layers and links take the rest */
#define FIRST_SHARE 0.25  /* of that, the minimum for the first rounds */
#define STEADY 0.05       /* rounds that differ by less need no further ones */
#define WAKE_SECONDS 0.01 /* work before a round after a pause: an idle core lowers its clock */

static double *sample_of(const struct measure *measure, int item, int round)
{
    return &measure->sample[((size_t)item * MEASURE_MOST_ROUNDS + (size_t)round) * 2];
}

static double sum_of_layers(const struct measure *measure, int item)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int structure = item / candidates->mesh_count, mesh_index = item % candidates->mesh_count;
    double sum = 0;
    for (int l = candidates->first[structure]; l <= candidates->last[structure]; l++)
        sum += measure->layer_s[mesh_index * candidates->layer_count + l];
    return sum;
}

/* My part of one round over a list of items. */
static enum hapt_status run_round(struct measure *measure, const int *order, int count, int round,
                                  struct hapt_progress *progress)
{
    enum hapt_status status = HAPT_OK;
    for (int k = 0; k < count && status == HAPT_OK && measure->classes.active >= 0; k++) {
        hapt_progress_update(progress, (long)round * count + k, NULL);
        if ((k + round) % measure->classes.actives != measure->classes.active) continue;
        double *sample = sample_of(measure, order[k], round), unused[2];
        if (sum_of_layers(measure, order[k]) < WARM_SECONDS)
            status = bench_engines_time(&measure->bench_engines, order[k], &unused[0], &unused[1]);
        if (status == HAPT_OK) status = bench_engines_time(&measure->bench_engines, order[k], &sample[0], &sample[1]);
        measure->effort.runs++;
    }
    return status;
}

/* This rank's time of a round, relative to the prediction from the items' layers; 0: it timed nothing. */
static double own_factor(const struct measure *measure, const int *order, int count, int round)
{
    double taken_s = 0, expected_s = 0;
    for (int k = 0; k < count; k++) {
        const double *sample = sample_of(measure, order[k], round);
        if (sample[0] + sample[1] <= 0) continue;
        taken_s += sample[0] + sample[1];
        expected_s += sum_of_layers(measure, order[k]);
    }
    return expected_s > 0 ? taken_s / expected_s : 0;
}

/* Spread of the rounds so far, on the rank where it is largest. Collective over env->world. */
static enum hapt_status look_at_rounds(const struct measure *measure, const int *order, int count, int rounds,
                                       double *figure)
{
    double factor[MEASURE_MOST_ROUNDS];
    int found = 0;
    for (int r = 0; r < rounds; r++) {
        const double own = own_factor(measure, order, count, r);
        if (own > 0) factor[found++] = own;
    }
    *figure = steadiness_figure(steadiness_of(factor, found));
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, figure, 1, MPI_DOUBLE, MPI_MAX, measure->env->world));
    return HAPT_OK;
}

/* Sleeps until shortly before `until_s`, then runs an untimed item to wake up. Devices with a clock of their own
 * run it during the entire pause. */
static enum hapt_status pause_until(struct measure *measure, double until_s, const int *order, int count)
{
    const bool own_clock = measure->bench_engines.options.backend && measure->bench_engines.options.backend->timestamp;
    const double end_s = fmax(until_s, hapt_time_s()), wake_s = own_clock ? INFINITY : WAKE_SECONDS;
    double unused[2];
    if (until_s <= hapt_time_s()) return HAPT_OK;
    if (isfinite(wake_s)) hapt_time_sleep_until(end_s - wake_s);
    while (measure->classes.active >= 0 && count > 0 && hapt_time_s() < end_s)
        HAPT_TRY(bench_engines_time(&measure->bench_engines, order[count - 1], &unused[0], &unused[1]));
    hapt_time_sleep_until(end_s);
    return HAPT_OK;
}

/* Start times of rounds: seconds from the start of the pass. */
struct schedule {
    double start_s, budget_s; /* INFINITY: rounds follow each other without pauses */
    double from_s, every_s;
    int from;
};

/* Spreads `rounds` rounds, from round `from` on, over the time until `end_s`. */
static void spread_rounds(struct schedule *schedule, int from, int rounds, double end_s)
{
    const double now_s = hapt_time_s() - schedule->start_s;
    schedule->from = from;
    schedule->from_s = now_s;
    schedule->every_s = isfinite(end_s) && rounds > 0 ? fmax(end_s - now_s, 0) / rounds : 0;
}

static double round_begins_s(const struct schedule *schedule, int round)
{
    return schedule->start_s + schedule->from_s + (round - schedule->from) * schedule->every_s;
}

/* After a round: *more is true if another one follows. Collective over env->world. */
static enum hapt_status schedule_next_round(const struct measure *measure, struct schedule *schedule, const int *order,
                                            int count, int done, int most, struct hapt_progress *progress, bool *more)
{
    /* Use measured time, since other work on the machine stretches the rounds beyond the estimate. */
    double elapsed_s = hapt_time_s() - schedule->start_s;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &elapsed_s, 1, MPI_DOUBLE, MPI_MAX, measure->env->world));
    *more = done < most && (done < 2 || elapsed_s * (done + 1) / done <= schedule->budget_s);
    progress->total = count * (long)fmax(done + 1, fmin(most, floor(schedule->budget_s * done / elapsed_s)));
    if (!*more || done != FIRST_ROUNDS || !isfinite(schedule->budget_s)) return HAPT_OK;
    double figure;
    HAPT_TRY(look_at_rounds(measure, order, count, done, &figure));
    *more = figure > STEADY;
    spread_rounds(schedule, done, most - done, BUDGET_SHARE * schedule->budget_s);
    return HAPT_OK;
}

/* Runs rounds until all are done or, after two, the next would exceed the budget. Then every rank of a class has
 * all its samples. Collective; *rounds is input and output. */
static enum hapt_status run_rounds(struct measure *measure, MPI_Comm class_comm, const int *order, int count,
                                   double budget_s, const char *what, int *rounds)
{
    struct hapt_progress progress;
    struct schedule schedule = {.start_s = hapt_time_s(), .budget_s = budget_s};
    enum hapt_status status = HAPT_OK;
    int most = *rounds, done = 0;
    bool more = true;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, measure->env->world));
    memset(measure->sample, 0,
           (size_t)measure->candidates->item_count * MEASURE_MOST_ROUNDS * 2 * sizeof *measure->sample);
    hapt_progress_init(&progress, measure->env, what, (long)most * count);
    spread_rounds(&schedule, 0, most < FIRST_ROUNDS ? most : FIRST_ROUNDS, FIRST_SHARE * BUDGET_SHARE * budget_s);
    while (more && status == HAPT_OK) {
        status = pause_until(measure, round_begins_s(&schedule, done), order, count);
        if (status == HAPT_OK && done < *rounds) status = run_round(measure, order, count, done, &progress);
        const enum hapt_status waited = sums_barrier(measure->env->world);
        status = hapt_env_agree(measure->env->world, status == HAPT_OK ? waited : status);
        done++;
        if (status == HAPT_OK)
            status = schedule_next_round(measure, &schedule, order, count, done, most, &progress, &more);
    }
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    if (*rounds > done) *rounds = done;
    if (measure->classes.own_class < 0) return HAPT_OK;
    const int samples = measure->candidates->item_count * MEASURE_MOST_ROUNDS * 2;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, measure->sample, samples, MPI_DOUBLE, MPI_SUM, class_comm));
    return HAPT_OK;
}

static struct hapt_item_time median_of_rounds(const struct measure *measure, int item, int rounds)
{
    double forward[MEASURE_MOST_ROUNDS], backward[MEASURE_MOST_ROUNDS];
    for (int r = 0; r < rounds; r++) {
        forward[r] = sample_of(measure, item, r)[0];
        backward[r] = sample_of(measure, item, r)[1];
    }
    return (struct hapt_item_time){.forward_s = hapt_median(forward, rounds),
                                   .backward_s = hapt_median(backward, rounds)};
}

enum hapt_status measure_time_layers(struct measure *measure, MPI_Comm class_comm)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, D = candidates->mesh_count;
    int *order, count = 0, rounds = LAYER_ROUNDS;
    order = hapt_arena_alloc(measure->scratch, (size_t)candidates->item_count, sizeof *order);
    HAPT_TRY(hapt_env_agree(measure->env->world, order ? HAPT_OK : HAPT_ERR_MEMORY));
    for (int item = 0; item < candidates->item_count; item++)
        if (measure->needed[item] && candidates->first[item / D] == candidates->last[item / D]) order[count++] = item;
    HAPT_TRY(run_rounds(measure, class_comm, order, count, HUGE_VAL, "timing layers", &rounds));
    for (int d = 0; d < D && measure->classes.own_class >= 0; d++)
        for (int l = 0; l < L; l++) {
            const int item = hapt_candidates_item(candidates, d, l, l);
            if (!measure->needed[item]) continue;
            const struct hapt_item_time time = median_of_rounds(measure, item, LAYER_ROUNDS);
            measure->layer_s[d * L + l] = time.forward_s + time.backward_s;
            *measure_time(measure, measure->classes.own_class, item) = time;
            measure->timed[item] = true;
        }
    return HAPT_OK;
}

struct priced {
    double cost;
    uint64_t key;
    int item;
};

static int by_random_key(const void *a, const void *b)
{
    const struct priced *x = a, *y = b;
    return (x->key > y->key) - (x->key < y->key);
}

static int by_cost(const void *a, const void *b)
{
    const struct priced *x = a, *y = b;
    if (x->cost != y->cost) return x->cost > y->cost ? -1 : 1;
    return x->item - y->item;
}

/* Chooses a pass over the items of the roles [low, high]: all of them if MIN_ROUNDS of all fit the budget, else a
 * random sample. */
static enum hapt_status choose_pass(struct measure *measure, enum select_role low, enum select_role high,
                                    double budget_s)
{
    const struct hapt_candidates *candidates = measure->candidates;
    struct priced *priced;
    double kept = 0;
    int all = 0;
    HAPT_NEW(priced, measure->scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++) {
        if (measure->role[item] < low || measure->role[item] > high) continue;
        const double once = sum_of_layers(measure, item);
        priced[all++] = (struct priced){once < WARM_SECONDS ? 2 * once : once, hapt_hash(3, &item, sizeof item), item};
    }
    /* In each round all active ranks work at the same time. Thread CPU time equals wall time if there are enough
     * cores. */
    const double budget = BUDGET_SHARE * budget_s * measure->classes.actives;
    qsort(priced, (size_t)all, sizeof *priced, by_random_key);
    measure->count = 0;
    while (measure->count < all && (measure->count < 8 || (kept + priced[measure->count].cost) * MIN_ROUNDS <= budget))
        kept += priced[measure->count++].cost;
    qsort(priced, (size_t)measure->count, sizeof *priced, by_cost);
    for (int k = 0; k < measure->count; k++) measure->order[k] = priced[k].item;
    const double rounds = kept > 0 ? floor(budget / kept) : MEASURE_MOST_ROUNDS;
    measure->rounds = measure->count > 0 ? (int)fmin(fmax(rounds, MIN_ROUNDS), MEASURE_MOST_ROUNDS) : 0;
    return HAPT_OK;
}

/* Relative standard error of a median of rounds, from the scatter of the rounds of all items. */
static double noise_of(const struct measure *measure, int part, double *buffer)
{
    int count = 0;
    for (int k = 0; k < measure->count; k++) {
        for (int r = 0; r + 1 < measure->rounds; r++) {
            const double a = sample_of(measure, measure->order[k], r)[part];
            const double b = sample_of(measure, measure->order[k], r + 1)[part];
            if (a + b > 0) buffer[count++] = fabs(a - b) / (0.5 * (a + b));
        }
    }
    if (count == 0) return 0;
    /* Converts the median difference to the standard deviation of one run, then to that of a median. */
    return 1.4826 * hapt_median(buffer, count) / sqrt(2.0) * sqrt(1.4 / measure->rounds);
}

/* Spread of the rounds of a pass, over the items that it timed. */
static struct steadiness steadiness_of_pass(const struct measure *measure, double *buffer)
{
    double factor[MEASURE_MOST_ROUNDS];
    for (int r = 0; r < measure->rounds; r++) {
        int count = 0;
        for (int k = 0; k < measure->count; k++) {
            const double *sample = sample_of(measure, measure->order[k], r);
            const struct hapt_item_time usual = median_of_rounds(measure, measure->order[k], measure->rounds);
            if (usual.forward_s + usual.backward_s > 0)
                buffer[count++] = (sample[0] + sample[1]) / (usual.forward_s + usual.backward_s);
        }
        if (count == 0) return (struct steadiness){0, 0};
        factor[r] = hapt_median(buffer, count);
    }
    return steadiness_of(factor, measure->rounds);
}

static void note_steadiness(struct measure *measure, double *buffer)
{
    const struct steadiness pass = steadiness_of_pass(measure, buffer);
    if (steadiness_figure(pass) > steadiness_figure(measure->steadiness)) measure->steadiness = pass;
}

/* Layers of equal structure share a number, since they take equal time. */
static enum hapt_status number_layers(const struct measure *measure, int *variable, int *variable_count)
{
    const int L = measure->candidates->layer_count;
    *variable_count = 0;
    for (int l = 0; l < L; l++) {
        variable[l] = -1;
        for (int other = 0; other < l && variable[l] < 0; other++)
            if (measure->candidates->structure[l * L + l] == measure->candidates->structure[other * L + other])
                variable[l] = variable[other];
        if (variable[l] < 0) variable[l] = (*variable_count)++;
    }
    return HAPT_OK;
}

struct estimate {
    int *variable, variable_count;
    struct smooth_point *point; /* [item] of one device count */
    int *item_of;               /* [item] */
    double *buffer;             /* [item][MEASURE_MOST_ROUNDS] */
};

/* Estimates the times of all items of one device count from the timed ones, on request without the witnesses. part
 * 0 is forward, 1 backward. Returns the number of points. */
static enum hapt_status estimate(struct measure *measure, struct estimate *with, int mesh_index, int part,
                                 bool witnesses, int *count)
{
    const struct hapt_candidates *candidates = measure->candidates;
    const int D = candidates->mesh_count;
    *count = 0;
    for (int item = mesh_index; item < candidates->item_count; item += D) {
        if (!measure->needed[item]) continue;
        const bool known = measure->timed[item] && (witnesses || measure->role[item] != SELECT_WITNESS);
        const struct hapt_item_time *time = measure_time(measure, measure->classes.own_class, item);
        with->item_of[*count] = item;
        with->point[(*count)++] = (struct smooth_point){candidates->first[item / D], candidates->last[item / D],
                                                        known ? (part ? time->backward_s : time->forward_s) : -1, 0};
    }
    return smooth_times(with->variable, with->variable_count, measure->noise[part], *count, with->point,
                        measure->scratch);
}

static enum hapt_status prepare_estimate(const struct measure *measure, struct estimate *with)
{
    const struct hapt_candidates *candidates = measure->candidates;
    HAPT_NEW(with->buffer, measure->scratch, (size_t)candidates->item_count * MEASURE_MOST_ROUNDS);
    HAPT_NEW(with->variable, measure->scratch, candidates->layer_count);
    HAPT_NEW(with->item_of, measure->scratch, candidates->item_count);
    HAPT_NEW(with->point, measure->scratch, candidates->item_count);
    return number_layers(measure, with->variable, &with->variable_count);
}

/* False for a device count that only other classes have. */
static bool mesh_is_timed(const struct measure *measure, int mesh_index)
{
    return measure->layer_s[mesh_index * measure->candidates->layer_count] > 0;
}

static void keep_medians(struct measure *measure)
{
    for (int k = 0; k < measure->count; k++) {
        const int item = measure->order[k];
        measure->timed[item] = true;
        *measure_time(measure, measure->classes.own_class, item) = median_of_rounds(measure, item, measure->rounds);
    }
}

/* After the first pass: *holds is true if the witnesses' measured times match the composed ones. */
static enum hapt_status judge_composition(struct measure *measure, struct estimate *with, bool *holds)
{
    double *apart;
    int count, judged = 0;
    HAPT_NEW(apart, measure->scratch, 2 * (size_t)measure->candidates->item_count);
    keep_medians(measure);
    note_steadiness(measure, with->buffer);
    for (int part = 0; part < 2; part++) {
        measure->noise[part] = noise_of(measure, part, with->buffer);
        for (int mesh_index = 0; mesh_index < measure->candidates->mesh_count; mesh_index++) {
            if (!mesh_is_timed(measure, mesh_index)) continue;
            HAPT_TRY(estimate(measure, with, mesh_index, part, false, &count));
            for (int p = 0; p < count; p++) {
                const int item = with->item_of[p];
                const struct hapt_item_time *time = measure_time(measure, measure->classes.own_class, item);
                const double taken = part ? time->backward_s : time->forward_s;
                if (measure->role[item] == SELECT_WITNESS && measure->timed[item])
                    apart[judged++] = fabs(with->point[p].estimate_s / taken - 1);
            }
        }
    }
    const double noise = fmax(measure->noise[0], measure->noise[1]);
    *holds = judged == 0 || hapt_median(apart, judged) <= fmax(COMPOSED_TOLERANCE, 2 * noise);
    return HAPT_OK;
}

static enum hapt_status set_times(struct measure *measure, struct estimate *with)
{
    int count;
    for (int part = 0; part < 2; part++) {
        for (int mesh_index = 0; mesh_index < measure->candidates->mesh_count; mesh_index++) {
            if (!mesh_is_timed(measure, mesh_index)) continue;
            HAPT_TRY(estimate(measure, with, mesh_index, part, true, &count));
            for (int p = 0; p < count; p++) {
                struct hapt_item_time *time = measure_time(measure, measure->classes.own_class, with->item_of[p]);
                *(part ? &time->backward_s : &time->forward_s) = with->point[p].estimate_s;
            }
        }
    }
    return HAPT_OK;
}

enum hapt_status measure_time_updates(struct measure *measure, MPI_Comm class_comm, int item, double s_per_element[2])
{
    enum hapt_status status = HAPT_OK;
    s_per_element[0] = s_per_element[1] = 0;
    for (int other = 0; item < 0 && measure->classes.own_class >= 0 && other < measure->candidates->item_count; other++)
        if (measure->bench_engines.bench_engine_of[other] >= 0) item = other;
    if (measure->classes.active >= 0 && item >= 0)
        status = bench_engines_time_update(&measure->bench_engines, item, s_per_element);
    double figure[3] = {s_per_element[0], s_per_element[1], measure->bench_engines.copied_share};
    HAPT_TRY(sums_barrier(measure->env->world));
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    if (measure->classes.own_class < 0) return HAPT_OK;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, figure, 3, MPI_DOUBLE, MPI_SUM, class_comm));
    for (int part = 0; part < 2; part++) s_per_element[part] = figure[part] / measure->classes.actives;
    measure->bench_engines.copied_share = figure[2] / measure->classes.actives;
    return HAPT_OK;
}

/* Gives the results of a class to all ranks. */
static enum hapt_status publish(struct measure *measure, const double s_per_element[2])
{
    const struct hapt_candidates *candidates = measure->candidates;
    for (int item = 0; item < candidates->item_count && measure->classes.own_class >= 0; item++) {
        struct hapt_item_time *time = measure_time(measure, measure->classes.own_class, item);
        const double elements = measure_memory(measure, measure->classes.own_class, item)->trained_elements;
        time->update_s = s_per_element[0] * elements;
        time->end_s = s_per_element[1] * elements;
        if (!measure->classes.is_lead) *time = (struct hapt_item_time){0};
    }
    if (measure->copied_share) {
        if (measure->classes.own_class >= 0 && measure->classes.is_lead)
            measure->copied_share[measure->classes.own_class] =
                s_per_element[0] > 0
                    ? measure->bench_engines.copied_share * s_per_element[0] / (s_per_element[0] + s_per_element[1])
                    : 0;
        HAPT_TRY(measure_sum_over_ranks(measure, measure->copied_share, (size_t)measure->classes.count));
    }
    return measure_sum_over_ranks(measure, (double *)measure->time,
                                  (size_t)measure->classes.count * (size_t)candidates->item_count *
                                      sizeof *measure->time / sizeof(double));
}

static enum hapt_status first_pass(struct measure *measure, struct estimate *with)
{
    if (measure->classes.own_class < 0) return HAPT_OK;
    HAPT_TRY(prepare_estimate(measure, with));
    HAPT_TRY(select_items(measure->candidates, measure->fits, measure->scratch, measure->role));
    return choose_pass(measure, SELECT_BASE, SELECT_WITNESS, measure->budget_s);
}

/* Times the items that the first pass left out, if its witnesses disagree with the composed times. */
static enum hapt_status second_pass(struct measure *measure, struct estimate *with, double budget_s)
{
    bool holds;
    HAPT_TRY(judge_composition(measure, with, &holds));
    measure->count = 0;
    if (holds || budget_s <= 0) return HAPT_OK;
    return choose_pass(measure, SELECT_REST, SELECT_REST, budget_s);
}

enum hapt_status measure_run_class(struct measure *measure, MPI_Comm class_comm)
{
    double s_per_element[2], budget_s;
    struct estimate with = {0};
    const bool mine = measure->classes.own_class >= 0;
    const MPI_Comm world = measure->env->world;
    HAPT_TRY(measure_time_layers(measure, class_comm));
    HAPT_TRY(hapt_env_agree(world, first_pass(measure, &with)));
    HAPT_TRY(measure_budget_left(measure, &budget_s));
    HAPT_TRY(run_rounds(measure, class_comm, measure->order, measure->count, budget_s, "timing candidates",
                        &measure->rounds));
    const int update_item = measure->count > 0 ? measure->order[0] : -1;
    HAPT_TRY(measure_budget_left(measure, &budget_s));
    HAPT_TRY(hapt_env_agree(world, mine ? second_pass(measure, &with, budget_s) : HAPT_OK));
    int more = measure->count;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &more, 1, MPI_INT, MPI_MAX, world));
    if (more > 0) {
        HAPT_TRY(run_rounds(measure, class_comm, measure->order, measure->count, budget_s, "timing all the rest",
                            &measure->rounds));
        if (mine) keep_medians(measure);
        if (mine) note_steadiness(measure, with.buffer);
    }
    HAPT_TRY(hapt_env_agree(world, mine ? set_times(measure, &with) : HAPT_OK));
    HAPT_TRY(measure_time_updates(measure, class_comm, update_item, s_per_element));
    return publish(measure, s_per_element);
}
