/*
 * Measured profiles (HAPT 5.1, the zero-redundant profiler).
 *
 * Subclusters of one back end on one host form a class and share measurements (classes.h).
 * A class measures every item once per round; rounds are interleaved over all items and rotate over the ranks, so that
 * neither a slow moment nor a slow core meets one item alone; the median of the rounds counts.
 *
 * Every number comes from engine runs. Single layers are timed first; they tell how many rounds the budget allows. Then
 * those items are timed of which all others can be composed (select.h); where the witnesses among them do not bear out what
 * smooth.h composes, the others are timed too. When the budget allows fewer than MIN_ROUNDS of the items, a sample of them
 * is timed. What noise the rounds show is taken out by smooth.h.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"
#include "classes.h"
#include "reduce.h"
#include "select.h"
#include "smooth.h"
#include "window.h"

enum { MIN_ROUNDS = 3, MAX_ROUNDS = 7, LAYER_ROUNDS = 3 };
#define WARM_SECONDS 0.005 /* shorter items run once untimed before: in a stage they find their weights in the cache   \
                            */
#define COMPOSED_TOLERANCE 0.01 /* witnesses apart from what is composed by this, or by twice their noise, prove it wrong */
#define BUDGET_SHARE 0.7   /* of --profile-seconds, for the rounds: reserving, layers and links take the rest */

struct measure {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct candidates *candidates;
    const struct hapt_config *config;
    struct hapt_arena *scratch;
    double start_s;
    int threads;
    struct classes classes;
    struct item_memory *memory; /* [class][item] */
    struct item_time *time;     /* [class][item] CPU time without slowdown */
    bool *needed;               /* [item] in my class */
    double *layer_s;            /* [degree][L] seconds of a single layer, in my class */
    struct windows windows;
    unsigned char *role; /* [item] select_role in my class */
    bool *timed;         /* [item] */
    int *order, count;   /* items of the pass to time, dearest first */
    int rounds;          /* of the pass */
    double noise[2];     /* relative standard error of a median: forward, backward */
    double *sample;      /* [item][MAX_ROUNDS][2] */
    struct hapt_profile_effort effort; /* of this rank; in the end of the whole */
    struct reduce_table reduce;
};

static struct item_memory *memory_of(const struct measure *measure, int class, int item)
{
    return &measure->memory[(size_t) class * (size_t)measure->candidates->item_count + (size_t)item];
}

static struct item_time *time_of(const struct measure *measure, int class, int item)
{
    return &measure->time[(size_t) class * (size_t)measure->candidates->item_count + (size_t)item];
}

static enum hapt_status sum_over_ranks(const struct measure *measure, double *data, size_t count)
{
    /* Rarely more than a few megabytes; each element comes from one rank, all others give 0. */
    for (size_t done = 0; done < count;) {
        const size_t part = count - done > ((size_t)1 << 24) ? (size_t)1 << 24 : count - done;
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, data + done, (int)part, MPI_DOUBLE, MPI_SUM, measure->env->world));
        done += part;
    }
    return HAPT_OK;
}

/* ---- memory and the items of interest ---- */

static enum hapt_status plan_items(struct measure *measure, const struct hapt_engine_options *options)
{
    if (!measure->classes.leads) return HAPT_OK;
    for (int item = 0; item < measure->candidates->item_count; item++)
        HAPT_TRY(
            candidates_plan_memory(measure->candidates, item, options, memory_of(measure, measure->classes.mine, item)));
    return HAPT_OK;
}

/* Marks what some subcluster of my class can use, and every single layer: sums are made of them. */
static void mark_needed(struct measure *measure, struct hapt_submesh *submesh)
{
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int c = 0; c < measure->cluster->count; c++) {
        if (measure->classes.of_subcluster[c] != measure->classes.mine) continue;
        const struct hapt_subcluster *subcluster = &measure->cluster->subcluster[c];
        const int count = candidates_submeshes(subcluster, submesh);
        for (int s = 0; s < count; s++) {
            const int degree = candidates_degree_of(candidates, submesh[s]);
            for (int i = 0; degree >= 0 && i < L; i++) {
                for (int j = i; j < L; j++) {
                    const int item = candidates_item(candidates, degree, i, j);
                    if (i == j ||
                        candidates_wanted(candidates, c, submesh[s], i, j, memory_of(measure, measure->classes.mine, item)))
                        measure->needed[item] = true;
                }
            }
        }
    }
}

/* The same of mixed stages. */
static void mark_mixed(struct measure *measure, const struct mixed_group *group, int k)
{
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    if (measure->classes.of_subcluster[group->cluster[k]] != measure->classes.mine) return;
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) {
            const struct item_memory *memory[2];
            for (int side = 0; side < 2; side++)
                memory[side] = memory_of(measure, measure->classes.of_subcluster[group->cluster[side]],
                                         candidates_item(candidates, group->degree[side], i, j));
            if (i == j || candidates_wanted_mixed(candidates, group, i, j, memory))
                measure->needed[candidates_item(candidates, group->degree[k], i, j)] = true;
        }
}

static double class_memory(const struct measure *measure)
{
    double most = 0;
    for (int c = 0; c < measure->cluster->count; c++)
        if (measure->classes.of_subcluster[c] == measure->classes.mine)
            most = fmax(most, measure->cluster->subcluster[c].device.memory_bytes);
    return most;
}

/* ---- timing ---- */

static int compare_doubles(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

static double median(double *value, int count)
{
    qsort(value, (size_t)count, sizeof *value, compare_doubles);
    return count % 2 ? value[count / 2] : 0.5 * (value[count / 2 - 1] + value[count / 2]);
}

static double *sample_of(const struct measure *measure, int item, int round)
{
    return &measure->sample[((size_t)item * MAX_ROUNDS + (size_t)round) * 2];
}

static double sum_of_layers(const struct measure *measure, int item)
{
    const struct candidates *candidates = measure->candidates;
    const int structure = item / candidates->degree_count, degree = item % candidates->degree_count;
    double sum = 0;
    for (int l = candidates->first[structure]; l <= candidates->last[structure]; l++)
        sum += measure->layer_s[degree * candidates->layer_count + l];
    return sum;
}

/* My part of one round over a list of items. */
static enum hapt_status run_round(struct measure *measure, const int *order, int count, int round,
                                  struct hapt_progress *progress)
{
    enum hapt_status status = HAPT_OK;
    for (int k = 0; k < count && status == HAPT_OK && measure->classes.active >= 0; k++) {
        hapt_progress_update(progress, (long)round * count + k, "");
        if ((k + round) % measure->classes.actives != measure->classes.active) continue;
        double *sample = sample_of(measure, order[k], round), unused[2];
        if (sum_of_layers(measure, order[k]) < WARM_SECONDS)
            status = windows_time(&measure->windows, order[k], &unused[0], &unused[1]);
        if (status == HAPT_OK) status = windows_time(&measure->windows, order[k], &sample[0], &sample[1]);
        measure->effort.runs++;
    }
    return status;
}

/* Rounds until they are done or, from the second on, the budget would be exceeded; then every rank of a class has all
 * its samples. Collective; *rounds in and out. */
static enum hapt_status run_rounds(struct measure *measure, MPI_Comm class_comm, const int *order, int count,
                                   double budget_s, const char *what, int *rounds)
{
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    const double start = hapt_time_s();
    int most = *rounds, done = 0;
    bool more = true;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &most, 1, MPI_INT, MPI_MAX, measure->env->world));
    memset(measure->sample, 0, (size_t)measure->candidates->item_count * MAX_ROUNDS * 2 * sizeof *measure->sample);
    hapt_progress_init(&progress, measure->env, what, (long)most * count);
    while (more && status == HAPT_OK) {
        if (done < *rounds) status = run_round(measure, order, count, done, &progress);
        HAPT_TRY(reduce_meet(measure->env->world));
        status = hapt_env_agree(measure->env->world, status);
        /* Other work on the machine stretches the rounds; the estimate knew nothing of it. */
        double elapsed = hapt_time_s() - start;
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &elapsed, 1, MPI_DOUBLE, MPI_MAX, measure->env->world));
        done++;
        more = done < most && (done < 2 || elapsed * (done + 1) / done <= budget_s);
    }
    hapt_progress_update(&progress, (long)most * count, "");
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    if (*rounds > done) *rounds = done;
    if (measure->classes.mine < 0) return HAPT_OK;
    const int samples = measure->candidates->item_count * MAX_ROUNDS * 2;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, measure->sample, samples, MPI_DOUBLE, MPI_SUM, class_comm));
    return HAPT_OK;
}

static struct item_time median_of_rounds(const struct measure *measure, int item, int rounds)
{
    double forward[MAX_ROUNDS], backward[MAX_ROUNDS];
    for (int r = 0; r < rounds; r++) {
        forward[r] = sample_of(measure, item, r)[0];
        backward[r] = sample_of(measure, item, r)[1];
    }
    return (struct item_time){.forward_s = median(forward, rounds), .backward_s = median(backward, rounds)};
}

static enum hapt_status time_layers(struct measure *measure, MPI_Comm class_comm)
{
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count, D = candidates->degree_count;
    int *order, count = 0, rounds = LAYER_ROUNDS;
    order = hapt_arena_alloc(measure->scratch, (size_t)candidates->item_count, sizeof *order);
    HAPT_TRY(hapt_env_agree(measure->env->world, order ? HAPT_OK : HAPT_ERR_MEMORY));
    for (int item = 0; item < candidates->item_count; item++)
        if (measure->needed[item] && candidates->first[item / D] == candidates->last[item / D]) order[count++] = item;
    HAPT_TRY(run_rounds(measure, class_comm, order, count, HUGE_VAL, "timing layers", &rounds));
    for (int d = 0; d < D && measure->classes.mine >= 0; d++)
        for (int l = 0; l < L; l++) {
            const int item = candidates_item(candidates, d, l, l);
            if (!measure->needed[item]) continue;
            const struct item_time time = median_of_rounds(measure, item, LAYER_ROUNDS);
            measure->layer_s[d * L + l] = time.forward_s + time.backward_s;
            *time_of(measure, measure->classes.mine, item) = time;
            measure->timed[item] = true;
        }
    return HAPT_OK;
}

struct priced {
    double cost;
    uint64_t lot;
    int item;
};

static int by_lot(const void *a, const void *b)
{
    const struct priced *x = a, *y = b;
    return (x->lot > y->lot) - (x->lot < y->lot);
}

static int by_cost(const void *a, const void *b)
{
    const struct priced *x = a, *y = b;
    if (x->cost != y->cost) return x->cost > y->cost ? -1 : 1;
    return x->item - y->item;
}

/* A pass over the items of the roles [low, high]: all of them when MIN_ROUNDS of all fit the budget, else a drawn sample. */
static enum hapt_status choose_pass(struct measure *measure, enum select_role low, enum select_role high, double budget_s)
{
    const struct candidates *candidates = measure->candidates;
    struct priced *priced;
    double kept = 0;
    int all = 0;
    HAPT_NEW(priced, measure->scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++) {
        if (measure->role[item] < low || measure->role[item] > high) continue;
        const double once = sum_of_layers(measure, item);
        priced[all++] = (struct priced){once < WARM_SECONDS ? 2 * once : once, hapt_hash(3, &item, sizeof item), item};
    }
    /* In each round every active rank does its part at the same time; thread CPU time is wall time when cores suffice.
     */
    const double budget = BUDGET_SHARE * budget_s * measure->classes.actives;
    qsort(priced, (size_t)all, sizeof *priced, by_lot);
    measure->count = 0;
    while (measure->count < all && (measure->count < 8 || (kept + priced[measure->count].cost) * MIN_ROUNDS <= budget))
        kept += priced[measure->count++].cost;
    qsort(priced, (size_t)measure->count, sizeof *priced, by_cost);
    for (int k = 0; k < measure->count; k++) measure->order[k] = priced[k].item;
    const double rounds = kept > 0 ? floor(budget / kept) : MAX_ROUNDS;
    measure->rounds = measure->count > 0 ? (int)fmin(fmax(rounds, MIN_ROUNDS), MAX_ROUNDS) : 0;
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
    /* Median difference to standard deviation of one run, to that of a median. */
    return 1.4826 * median(buffer, count) / sqrt(2.0) * sqrt(1.4 / measure->rounds);
}

/* Layers of equal structure take equal time. */
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
    double *buffer;             /* [item][MAX_ROUNDS] */
};

/* Times of all items of one device count from those that were timed, witnesses left out on request; part 0 is forward, 1
 * backward. Returns the number of points. */
static enum hapt_status estimate(struct measure *measure, struct estimate *with, int degree, int part, bool witnesses,
                                 int *count)
{
    const struct candidates *candidates = measure->candidates;
    const int D = candidates->degree_count;
    *count = 0;
    for (int item = degree; item < candidates->item_count; item += D) {
        if (!measure->needed[item]) continue;
        const bool known = measure->timed[item] && (witnesses || measure->role[item] != SELECT_WITNESS);
        const struct item_time *time = time_of(measure, measure->classes.mine, item);
        with->item_of[*count] = item;
        with->point[(*count)++] = (struct smooth_point){candidates->first[item / D], candidates->last[item / D],
                                                        known ? (part ? time->backward_s : time->forward_s) : -1, 0};
    }
    return smooth_times(with->variable, with->variable_count, measure->noise[part], *count, with->point,
                        measure->scratch);
}

static enum hapt_status prepare_estimate(const struct measure *measure, struct estimate *with)
{
    const struct candidates *candidates = measure->candidates;
    HAPT_NEW(with->buffer, measure->scratch, (size_t)candidates->item_count * MAX_ROUNDS);
    HAPT_NEW(with->variable, measure->scratch, candidates->layer_count);
    HAPT_NEW(with->item_of, measure->scratch, candidates->item_count);
    HAPT_NEW(with->point, measure->scratch, candidates->item_count);
    return number_layers(measure, with->variable, &with->variable_count);
}

/* A device count that only other classes have was not timed here. */
static bool degree_is_timed(const struct measure *measure, int degree)
{
    return measure->layer_s[degree * measure->candidates->layer_count] > 0;
}

static void keep_medians(struct measure *measure)
{
    for (int k = 0; k < measure->count; k++) {
        const int item = measure->order[k];
        measure->timed[item] = true;
        *time_of(measure, measure->classes.mine, item) = median_of_rounds(measure, item, measure->rounds);
    }
}

/* After the first pass: do the witnesses take the times that are composed for them? */
static enum hapt_status judge_composition(struct measure *measure, struct estimate *with, bool *holds)
{
    double *apart;
    int count, judged = 0;
    HAPT_NEW(apart, measure->scratch, 2 * (size_t)measure->candidates->item_count);
    keep_medians(measure);
    for (int part = 0; part < 2; part++) {
        measure->noise[part] = noise_of(measure, part, with->buffer);
        for (int degree = 0; degree < measure->candidates->degree_count; degree++) {
            if (!degree_is_timed(measure, degree)) continue;
            HAPT_TRY(estimate(measure, with, degree, part, false, &count));
            for (int p = 0; p < count; p++) {
                const int item = with->item_of[p];
                const struct item_time *time = time_of(measure, measure->classes.mine, item);
                const double taken = part ? time->backward_s : time->forward_s;
                if (measure->role[item] == SELECT_WITNESS && measure->timed[item])
                    apart[judged++] = fabs(with->point[p].estimate_s / taken - 1);
            }
        }
    }
    const double noise = fmax(measure->noise[0], measure->noise[1]);
    *holds = judged == 0 || median(apart, judged) <= fmax(COMPOSED_TOLERANCE, 2 * noise);
    return HAPT_OK;
}

static enum hapt_status settle_times(struct measure *measure, struct estimate *with)
{
    int count;
    for (int part = 0; part < 2; part++) {
        for (int degree = 0; degree < measure->candidates->degree_count; degree++) {
            if (!degree_is_timed(measure, degree)) continue;
            HAPT_TRY(estimate(measure, with, degree, part, true, &count));
            for (int p = 0; p < count; p++) {
                struct item_time *time = time_of(measure, measure->classes.mine, with->item_of[p]);
                *(part ? &time->backward_s : &time->forward_s) = with->point[p].estimate_s;
            }
        }
    }
    return HAPT_OK;
}

static enum hapt_status time_updates(struct measure *measure, int item, double *s_per_element)
{
    *s_per_element = 0;
    if (measure->classes.active != 0) return HAPT_OK;
    return windows_time_update(&measure->windows, item, s_per_element);
}

/* What the ranks of a class know, to everybody. */
static enum hapt_status publish(struct measure *measure, double s_per_element)
{
    const struct candidates *candidates = measure->candidates;
    for (int item = 0; item < candidates->item_count && measure->classes.mine >= 0; item++) {
        struct item_time *time = time_of(measure, measure->classes.mine, item);
        time->update_s = s_per_element * memory_of(measure, measure->classes.mine, item)->trained_elements;
        if (!measure->classes.leads) *time = (struct item_time){0};
    }
    return sum_over_ranks(measure, (double *)measure->time,
                          (size_t)measure->classes.count * (size_t)candidates->item_count * sizeof *measure->time /
                              sizeof(double));
}

static enum hapt_status first_pass(struct measure *measure, struct estimate *with)
{
    if (measure->classes.mine < 0) return HAPT_OK;
    HAPT_TRY(prepare_estimate(measure, with));
    HAPT_TRY(select_items(measure->candidates, measure->needed, measure->scratch, measure->role));
    return choose_pass(measure, SELECT_BASE, SELECT_WITNESS, hapt_config_real(measure->config, "profile-seconds"));
}

/* What the first pass left out, where its witnesses do not hold; nothing where they do. */
static enum hapt_status second_pass(struct measure *measure, struct estimate *with, double budget_s)
{
    bool holds;
    HAPT_TRY(judge_composition(measure, with, &holds));
    measure->count = 0;
    if (holds || budget_s <= 0) return HAPT_OK;
    return choose_pass(measure, SELECT_REST, SELECT_REST, budget_s);
}

/* What is left of --profile-seconds, the same on all ranks. */
static enum hapt_status budget_left(const struct measure *measure, double *budget_s)
{
    *budget_s = hapt_config_real(measure->config, "profile-seconds") - (hapt_time_s() - measure->start_s);
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, budget_s, 1, MPI_DOUBLE, MPI_MIN, measure->env->world));
    return HAPT_OK;
}

static enum hapt_status run_class(struct measure *measure, MPI_Comm class_comm)
{
    double s_per_element = 0, budget_s;
    struct estimate with = {0};
    const bool mine = measure->classes.mine >= 0;
    const MPI_Comm world = measure->env->world;
    HAPT_TRY(time_layers(measure, class_comm));
    HAPT_TRY(hapt_env_agree(world, first_pass(measure, &with)));
    HAPT_TRY(budget_left(measure, &budget_s));
    HAPT_TRY(run_rounds(measure, class_comm, measure->order, measure->count, budget_s, "timing candidates",
                        &measure->rounds));
    const int update_item = measure->count > 0 ? measure->order[0] : -1;
    HAPT_TRY(budget_left(measure, &budget_s));
    HAPT_TRY(hapt_env_agree(world, mine ? second_pass(measure, &with, budget_s) : HAPT_OK));
    int more = measure->count;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &more, 1, MPI_INT, MPI_MAX, world));
    if (more > 0) {
        HAPT_TRY(run_rounds(measure, class_comm, measure->order, measure->count, budget_s, "timing all the rest",
                            &measure->rounds));
        if (mine) keep_medians(measure);
    }
    enum hapt_status status = mine ? settle_times(measure, &with) : HAPT_OK;
    if (status == HAPT_OK) status = time_updates(measure, update_item, &s_per_element);
    HAPT_TRY(hapt_env_agree(world, status));
    if (mine) HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &s_per_element, 1, MPI_DOUBLE, MPI_MAX, class_comm));
    return publish(measure, s_per_element);
}

/* ---- the whole ---- */

static double all_reduce(const void *context, int subcluster, struct hapt_submesh submesh, double bytes)
{
    const struct measure *measure = context;
    const int index = candidates_submesh_index(&measure->cluster->subcluster[subcluster], submesh);
    return reduce_measured_s(&measure->reduce, subcluster, index, bytes);
}

static enum hapt_status make_tables(struct measure *measure, struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct candidates *candidates = measure->candidates;
    struct item_memory **memory;
    struct item_time **time;
    HAPT_NEW(memory, measure->scratch, measure->cluster->count);
    HAPT_NEW(time, measure->scratch, measure->cluster->count);
    for (int c = 0; c < measure->cluster->count; c++) {
        const double slowdown = fmax(measure->cluster->subcluster[c].device.slowdown, 1);
        memory[c] = memory_of(measure, measure->classes.of_subcluster[c], 0);
        HAPT_NEW(time[c], measure->scratch, candidates->item_count);
        for (int item = 0; item < candidates->item_count; item++) {
            const struct item_time *cpu = time_of(measure, measure->classes.of_subcluster[c], item);
            time[c][item] =
                (struct item_time){slowdown * cpu->forward_s, slowdown * cpu->backward_s, slowdown * cpu->update_s};
        }
    }
    return candidates_fill(candidates, memory, time, all_reduce, measure, result, profile);
}

static enum hapt_status set_up(struct measure *measure, struct hapt_engine_options *options)
{
    const struct candidates *candidates = measure->candidates;
    const size_t cells = (size_t)measure->classes.count * (size_t)candidates->item_count;
    HAPT_NEW(measure->memory, measure->scratch, cells);
    HAPT_NEW(measure->time, measure->scratch, cells);
    HAPT_NEW(measure->needed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->layer_s, measure->scratch, (size_t)candidates->degree_count * (size_t)candidates->layer_count);
    HAPT_NEW(measure->sample, measure->scratch, (size_t)candidates->item_count * MAX_ROUNDS * 2);
    HAPT_NEW(measure->role, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->timed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->order, measure->scratch, candidates->item_count);
    *options =
        (struct hapt_engine_options){.threads = measure->threads, .state_count = candidates->state_count, .slots = 1};
    if (measure->classes.mine < 0) return HAPT_OK;
    const int mine = measure->cluster->subcluster_of_rank[measure->env->world_rank];
    const char *name = measure->cluster->subcluster[mine].device.backend;
    const char *reason = "";
    options->backend = hapt_backend_find(name);
    const int devices = options->backend ? options->backend->device_count(&reason) : 0;
    if (devices < 1)
        return hapt_fail(HAPT_ERR_INPUT,
                         "plan for such devices with `hapt plan --input M --cluster C`, or --predict yes",
                         "rank %d has no %s device to measure on (%s)", measure->env->world_rank, name, reason);
    HAPT_TRY(options->backend->open(measure->env->node_rank % devices, measure->threads, 0, &options->device));
    return plan_items(measure, options);
}

static enum hapt_status choose_windows(struct measure *measure, const struct hapt_engine_options *options)
{
    if (measure->classes.mine < 0) return HAPT_OK;
    struct hapt_submesh *submesh;
    int most = 0;
    for (int c = 0; c < measure->cluster->count; c++) {
        const int count = candidates_submeshes(&measure->cluster->subcluster[c], NULL);
        if (count > most) most = count;
    }
    HAPT_NEW(submesh, measure->scratch, most);
    mark_needed(measure, submesh);
    for (int g = 0; g < measure->candidates->mixed_count; g++)
        for (int k = 0; k < 2; k++) mark_mixed(measure, &measure->candidates->mixed[g], k);
    return windows_choose(measure->candidates, options, class_memory(measure), memory_of(measure, measure->classes.mine, 0),
                          measure->needed, measure->scratch, &measure->windows);
}

/* Sums over ranks, and over classes by their leads. Collective. */
static enum hapt_status gather_effort(struct measure *measure, struct hapt_profile_effort *effort)
{
    int64_t sum[] = {0, 0, measure->windows.opened, measure->effort.runs};
    for (int item = 0; item < measure->candidates->item_count && measure->classes.leads; item++) {
        sum[0] += measure->needed[item];
        sum[1] += measure->timed[item];
    }
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, sum, 4, MPI_INT64_T, MPI_SUM, measure->env->world));
    *effort = (struct hapt_profile_effort){.unique = sum[0],
                                           .timed = sum[1],
                                           .programs = sum[2],
                                           .runs = sum[3],
                                           .seconds = hapt_time_s() - measure->start_s};
    return HAPT_OK;
}

static enum hapt_status measure_all(struct measure *measure, struct hapt_engine_options *options,
                                    struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct hapt_env *env = measure->env;
    HAPT_TRY(classes_find(env, measure->cluster, measure->threads, &measure->classes));
    HAPT_TRY(hapt_env_agree(env->world, set_up(measure, options)));
    HAPT_TRY(sum_over_ranks(measure, (double *)measure->memory,
                            (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                sizeof *measure->memory / sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, choose_windows(measure, options)));
    HAPT_TRY(reduce_measure(env, measure->cluster, hapt_config_real(measure->config, "timeout"), measure->scratch,
                            &measure->reduce));
    MPI_Comm class_comm;
    HAPT_MPI(MPI_Comm_split(env->world, measure->classes.mine < 0 ? MPI_UNDEFINED : measure->classes.mine, env->world_rank,
                            &class_comm));
    const enum hapt_status status = run_class(measure, class_comm);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    HAPT_TRY(hapt_env_agree(env->world, make_tables(measure, result, profile)));
    return gather_effort(measure, &(*profile)->effort);
}

/* ---- paces, for the rows of mixed stages ---- */

/* Every single layer with all rows of a microbatch and with few. */
static enum hapt_status choose_layers(struct measure *measure, const struct hapt_engine_options *options, const int degree[2])
{
    const struct candidates *candidates = measure->candidates;
    if (measure->classes.mine < 0) return HAPT_OK;
    for (int l = 0; l < candidates->layer_count; l++)
        for (int k = 0; k < 2; k++) measure->needed[candidates_item(candidates, degree[k], l, l)] = true;
    return windows_choose(candidates, options, class_memory(measure), memory_of(measure, measure->classes.mine, 0),
                          measure->needed, measure->scratch, &measure->windows);
}

/* CPU seconds of my class: all rows, few rows, update. */
static enum hapt_status sum_layers(struct measure *measure, MPI_Comm class_comm, const int degree[2], double sum[3])
{
    const struct candidates *candidates = measure->candidates;
    double trained = 0, most = -1, s_per_element = 0;
    int update_item = -1;
    HAPT_TRY(time_layers(measure, class_comm));
    for (int l = 0; l < candidates->layer_count && measure->classes.mine >= 0; l++) {
        const int item = candidates_item(candidates, degree[0], l, l);
        const double elements = memory_of(measure, measure->classes.mine, item)->trained_elements;
        for (int k = 0; k < 2; k++) sum[k] += measure->layer_s[degree[k] * candidates->layer_count + l];
        trained += elements;
        if (elements <= most) continue;
        most = elements;
        update_item = item;
    }
    HAPT_TRY(hapt_env_agree(measure->env->world, time_updates(measure, update_item, &s_per_element)));
    if (measure->classes.mine < 0) return HAPT_OK;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &s_per_element, 1, MPI_DOUBLE, MPI_MAX, class_comm));
    sum[2] = s_per_element * trained;
    return HAPT_OK;
}

/* pace[subcluster]. Collective over env->world. */
static enum hapt_status measure_paces(struct measure *measure, struct hapt_engine_options *options, const int degree[2],
                                      struct device_pace *pace)
{
    const struct hapt_env *env = measure->env;
    double *sum; /* [class][3] */
    MPI_Comm class_comm;
    HAPT_TRY(classes_find(env, measure->cluster, measure->threads, &measure->classes));
    HAPT_TRY(hapt_env_agree(env->world, set_up(measure, options)));
    HAPT_TRY(sum_over_ranks(measure, (double *)measure->memory,
                            (size_t)measure->classes.count * (size_t)measure->candidates->item_count *
                                sizeof *measure->memory / sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, choose_layers(measure, options, degree)));
    sum = hapt_arena_alloc(measure->scratch, 3 * (size_t)measure->classes.count, sizeof *sum);
    HAPT_TRY(hapt_env_agree(env->world, sum ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_MPI(MPI_Comm_split(env->world, measure->classes.mine < 0 ? MPI_UNDEFINED : measure->classes.mine, env->world_rank,
                            &class_comm));
    double mine[3] = {0};
    const enum hapt_status status = sum_layers(measure, class_comm, degree, mine);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    if (measure->classes.leads) memcpy(&sum[3 * measure->classes.mine], mine, sizeof mine);
    HAPT_TRY(sum_over_ranks(measure, sum, 3 * (size_t)measure->classes.count));
    for (int c = 0; c < measure->cluster->count; c++) {
        const double slowdown = fmax(measure->cluster->subcluster[c].device.slowdown, 1);
        const double *its = &sum[3 * measure->classes.of_subcluster[c]];
        pace[c] = candidates_pace(measure->candidates, slowdown * its[0], slowdown * its[1], slowdown * its[2]);
    }
    return HAPT_OK;
}

/* The groups of mixed stages, their rows by measured paces. Collective over env->world. */
static enum hapt_status mix(const struct measure *like, struct candidates *candidates, struct hapt_arena *arena)
{
    struct measure measure = *like;
    struct hapt_engine_options options = {0};
    struct hapt_arena scratch;
    struct device_pace pace[HAPT_MAX_SUBCLUSTERS];
    int degree[2] = {candidates_degree(candidates, 1, 1), -1};
    if (!candidates_may_mix(candidates, like->config) || degree[0] < 0) return HAPT_OK;
    HAPT_TRY(hapt_env_agree(like->env->world, candidates_few_degree(candidates, arena, &degree[1])));
    hapt_arena_init(&scratch);
    measure.scratch = &scratch;
    enum hapt_status status = measure_paces(&measure, &options, degree, pace);
    windows_close(&measure.windows);
    if (options.device) options.backend->close(options.device);
    if (status == HAPT_OK)
        status = hapt_env_agree(like->env->world, candidates_mix(candidates, like->config, PROGRAM_DATA, pace, NULL, arena, &scratch));
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, struct hapt_arena *result,
                                      struct hapt_profile **profile)
{
    struct candidates candidates;
    struct hapt_arena scratch;
    struct hapt_engine_options options = {0};
    const struct candidates_options data = {.programs = PROGRAM_DATA, .tensor_parallel = 1};
    hapt_arena_init(&scratch);
    struct measure measure = {.env = env,
                              .cluster = cluster,
                              .candidates = &candidates,
                              .config = config,
                              .scratch = &scratch,
                              .threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads")),
                              .start_s = hapt_time_s()};
    enum hapt_status status =
        hapt_env_agree(env->world, candidates_build(cluster, model, layers, config, &data, &scratch, &candidates));
    if (status == HAPT_OK) status = classes_same_structures(env, &candidates);
    if (status == HAPT_OK) status = mix(&measure, &candidates, &scratch);
    if (status == HAPT_OK) status = measure_all(&measure, &options, result, profile);
    windows_close(&measure.windows);
    if (options.device) options.backend->close(options.device);
    if (status == HAPT_OK)
        hapt_note(env, "profiled: %lld of %lld unique ranges timed%s; %d rounds, noise %.1f %%, %.1f s\n",
                  (long long)(*profile)->effort.timed, (long long)(*profile)->effort.unique,
                  (*profile)->effort.timed < (*profile)->effort.unique ? ", the others composed" : "", measure.rounds,
                  100 * fmax(measure.noise[0], measure.noise[1]), (*profile)->effort.seconds);
    hapt_arena_release(&scratch);
    return status;
}
