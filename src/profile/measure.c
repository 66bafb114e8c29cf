/*
 * Measured profiles (HAPT 5.1, the zero-redundant profiler).
 *
 * Subclusters of one back end on one host form a class and share measurements (CPU time; their slowdowns are factors).
 * A class measures every item once per round; rounds are interleaved over all items and rotate over the ranks, so that
 * neither a slow moment nor a slow core meets one item alone; the median of the rounds counts.
 *
 * Every number comes from engine runs. Single layers are timed first; they tell how many rounds the budget allows. When
 * it allows fewer than MIN_ROUNDS of all items, a sample of them is timed. What noise the rounds show is taken out by
 * smooth.h, which also gives the items that were not timed the sum of their layers.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"
#include "reduce.h"
#include "smooth.h"
#include "window.h"

enum { MIN_ROUNDS = 3, MAX_ROUNDS = 7, LAYER_ROUNDS = 3 };
#define WARM_SECONDS 0.005 /* shorter items run once untimed before: in a stage they find their weights in the cache   \
                            */
#define BUDGET_SHARE 0.7   /* of --profile-seconds, for the rounds: reserving, layers and links take the rest */

struct measure {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct candidates *candidates;
    const struct hapt_config *config;
    struct hapt_arena *scratch;
    double start_s;
    int threads;
    int class_count;
    int class_of[HAPT_MAX_SUBCLUSTERS];
    int my_class;               /* -1: idle rank */
    int active, actives;        /* my place among the ranks of my class that measure (-1: none), and their number */
    bool leads;                 /* lowest rank of its class */
    struct item_memory *memory; /* [class][item] */
    struct item_time *time;     /* [class][item] CPU time without slowdown */
    bool *needed;               /* [item] in my class */
    double *layer_s;            /* [degree][L] seconds of a single layer, in my class */
    struct windows windows;
    int *order, count; /* items to time, dearest first */
    int rounds;
    double sampled_share; /* of my class's items that are timed directly */
    double noise;         /* relative standard error of their medians */
    double *sample;       /* [item][MAX_ROUNDS][2] */
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

/* ---- classes: who shares measurements, who measures ---- */

struct seat {
    int node_index, node_rank, threads, cores;
};

static enum hapt_status find_classes(struct measure *measure)
{
    const struct hapt_env *env = measure->env;
    const struct hapt_cluster *cluster = measure->cluster;
    const struct seat mine = {env->node_index, env->node_rank, measure->threads, env->cores};
    struct seat *seat;
    HAPT_NEW(seat, measure->scratch, env->world_size);
    HAPT_MPI(MPI_Allgather(&mine, sizeof mine, MPI_BYTE, seat, sizeof mine, MPI_BYTE, env->world));
    for (int c = 0; c < cluster->count; c++) {
        measure->class_of[c] = -1;
        for (int other = 0; other < c && measure->class_of[c] < 0; other++) {
            const struct hapt_subcluster *a = &cluster->subcluster[c], *b = &cluster->subcluster[other];
            if (strcmp(a->device.backend, b->device.backend) == 0 &&
                seat[a->ranks[0]].node_index == seat[b->ranks[0]].node_index)
                measure->class_of[c] = measure->class_of[other];
        }
        if (measure->class_of[c] < 0) measure->class_of[c] = measure->class_count++;
    }
    const int subcluster = cluster->subcluster_of_rank[env->world_rank];
    measure->my_class = subcluster < 0 ? -1 : measure->class_of[subcluster];
    measure->active = -1;
    int members = 0, active = 0;
    bool fits_core = false, found_lead = false;
    for (int pass = 0; pass < 2 && measure->my_class >= 0 && active == 0; pass++) {
        for (int r = 0; r < env->world_size; r++) {
            const int its = cluster->subcluster_of_rank[r];
            if (its < 0 || measure->class_of[its] != measure->my_class) continue;
            if (!found_lead) measure->leads = r == env->world_rank;
            found_lead = true;
            members++;
            /* No more ranks of a host measure at once than its cores carry: others would only disturb their caches. */
            fits_core = pass == 1 || (seat[r].node_rank + 1) * seat[r].threads <= seat[r].cores;
            if (!fits_core) continue;
            if (r == env->world_rank) measure->active = active;
            active++;
        }
    }
    measure->actives = active;
    HAPT_ASSERT(measure->my_class < 0 || (members > 0 && active > 0));
    return HAPT_OK;
}

/* ---- memory and the items of interest ---- */

static enum hapt_status plan_items(struct measure *measure, const struct hapt_engine_options *options)
{
    if (!measure->leads) return HAPT_OK;
    for (int item = 0; item < measure->candidates->item_count; item++)
        HAPT_TRY(
            candidates_plan_memory(measure->candidates, item, options, memory_of(measure, measure->my_class, item)));
    return HAPT_OK;
}

/* Marks what some subcluster of my class can use, and every single layer: sums are made of them. */
static void mark_needed(struct measure *measure, struct hapt_submesh *submesh)
{
    const struct candidates *candidates = measure->candidates;
    const int L = candidates->layer_count;
    for (int c = 0; c < measure->cluster->count; c++) {
        if (measure->class_of[c] != measure->my_class) continue;
        const struct hapt_subcluster *subcluster = &measure->cluster->subcluster[c];
        const int count = candidates_submeshes(subcluster, submesh);
        for (int s = 0; s < count; s++) {
            const int degree = candidates_degree(candidates, submesh[s].n * submesh[s].m);
            for (int i = 0; degree >= 0 && i < L; i++) {
                for (int j = i; j < L; j++) {
                    const int item = candidates_item(candidates, degree, i, j);
                    if (i == j ||
                        candidates_wanted(candidates, c, submesh[s], i, j, memory_of(measure, measure->my_class, item)))
                        measure->needed[item] = true;
                }
            }
        }
    }
}

static double class_memory(const struct measure *measure)
{
    double most = 0;
    for (int c = 0; c < measure->cluster->count; c++)
        if (measure->class_of[c] == measure->my_class)
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
    for (int k = 0; k < count && status == HAPT_OK && measure->active >= 0; k++) {
        hapt_progress_update(progress, (long)round * count + k, "");
        if ((k + round) % measure->actives != measure->active) continue;
        double *sample = sample_of(measure, order[k], round), unused[2];
        if (sum_of_layers(measure, order[k]) < WARM_SECONDS)
            status = windows_time(&measure->windows, order[k], &unused[0], &unused[1]);
        if (status == HAPT_OK) status = windows_time(&measure->windows, order[k], &sample[0], &sample[1]);
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
    if (measure->my_class < 0) return HAPT_OK;
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
    HAPT_NEW(order, measure->scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++)
        if (measure->needed[item] && candidates->first[item / D] == candidates->last[item / D]) order[count++] = item;
    HAPT_TRY(run_rounds(measure, class_comm, order, count, HUGE_VAL, "timing layers", &rounds));
    for (int d = 0; d < D && measure->my_class >= 0; d++)
        for (int l = 0; l < L; l++) {
            const int item = candidates_item(candidates, d, l, l);
            if (!measure->needed[item]) continue;
            const struct item_time time = median_of_rounds(measure, item, LAYER_ROUNDS);
            measure->layer_s[d * L + l] = time.forward_s + time.backward_s;
            *time_of(measure, measure->my_class, item) = time;
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

/* Which items to time, and how many rounds: all of them when MIN_ROUNDS of all fit the budget, else a drawn sample. */
static enum hapt_status choose_sample(struct measure *measure)
{
    const struct candidates *candidates = measure->candidates;
    struct priced *priced;
    double total = 0, kept = 0;
    int all = 0;
    HAPT_NEW(measure->order, measure->scratch, candidates->item_count);
    HAPT_NEW(priced, measure->scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++) {
        if (!measure->needed[item]) continue;
        const double once = sum_of_layers(measure, item);
        priced[all++] = (struct priced){once < WARM_SECONDS ? 2 * once : once, hapt_hash(3, &item, sizeof item), item};
        total += priced[all - 1].cost;
    }
    /* In each round every active rank does its part at the same time; thread CPU time is wall time when cores suffice.
     */
    const double budget = BUDGET_SHARE * hapt_config_real(measure->config, "profile-seconds") * measure->actives;
    qsort(priced, (size_t)all, sizeof *priced, by_lot);
    while (measure->count < all && (measure->count < 8 || (kept + priced[measure->count].cost) * MIN_ROUNDS <= budget))
        kept += priced[measure->count++].cost;
    qsort(priced, (size_t)measure->count, sizeof *priced, by_cost);
    for (int k = 0; k < measure->count; k++) measure->order[k] = priced[k].item;
    const double rounds = kept > 0 ? floor(budget / kept) : MAX_ROUNDS;
    measure->rounds = (int)fmin(fmax(rounds, MIN_ROUNDS), MAX_ROUNDS);
    measure->sampled_share = all > 0 ? (double)measure->count / all : 1;
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

/* Times of all items of one device count; part 0 is forward, 1 backward. */
static enum hapt_status estimate(struct measure *measure, const bool *timed, int degree, int part, double noise,
                                 const int *variable, int variable_count, struct smooth_point *point, int *item_of)
{
    const struct candidates *candidates = measure->candidates;
    const int D = candidates->degree_count;
    int count = 0;
    for (int item = degree; item < candidates->item_count; item += D) {
        if (!measure->needed[item]) continue;
        const bool layer = candidates->first[item / D] == candidates->last[item / D];
        const struct item_time *time = time_of(measure, measure->my_class, item);
        item_of[count] = item;
        point[count++] =
            (struct smooth_point){candidates->first[item / D], candidates->last[item / D],
                                  timed[item] || layer ? (part ? time->backward_s : time->forward_s) : -1, 0};
    }
    HAPT_TRY(smooth_times(variable, variable_count, noise, count, point, measure->scratch));
    for (int p = 0; p < count; p++) {
        struct item_time *time = time_of(measure, measure->my_class, item_of[p]);
        *(part ? &time->backward_s : &time->forward_s) = point[p].estimate_s;
    }
    return HAPT_OK;
}

static enum hapt_status settle_times(struct measure *measure)
{
    const struct candidates *candidates = measure->candidates;
    bool *timed;
    double *buffer;
    int *variable, *item_of, variable_count;
    struct smooth_point *point;
    HAPT_NEW(timed, measure->scratch, candidates->item_count);
    HAPT_NEW(buffer, measure->scratch, (size_t)candidates->item_count * MAX_ROUNDS);
    HAPT_NEW(variable, measure->scratch, candidates->layer_count);
    HAPT_NEW(item_of, measure->scratch, candidates->item_count);
    HAPT_NEW(point, measure->scratch, candidates->item_count);
    for (int k = 0; k < measure->count; k++) {
        timed[measure->order[k]] = true;
        *time_of(measure, measure->my_class, measure->order[k]) =
            median_of_rounds(measure, measure->order[k], measure->rounds);
    }
    HAPT_TRY(number_layers(measure, variable, &variable_count));
    for (int part = 0; part < 2; part++) {
        const double noise = noise_of(measure, part, buffer);
        measure->noise = fmax(measure->noise, noise);
        for (int degree = 0; degree < candidates->degree_count; degree++) {
            /* A device count that only other classes have was not timed here. */
            if (measure->layer_s[degree * candidates->layer_count] <= 0) continue;
            HAPT_TRY(estimate(measure, timed, degree, part, noise, variable, variable_count, point, item_of));
        }
    }
    return HAPT_OK;
}

static enum hapt_status time_updates(struct measure *measure, double *s_per_element)
{
    *s_per_element = 0;
    if (measure->active != 0) return HAPT_OK;
    return windows_time_update(&measure->windows, measure->order[0], s_per_element);
}

/* What the ranks of a class know, to everybody. */
static enum hapt_status publish(struct measure *measure, double s_per_element)
{
    const struct candidates *candidates = measure->candidates;
    for (int item = 0; item < candidates->item_count && measure->my_class >= 0; item++) {
        struct item_time *time = time_of(measure, measure->my_class, item);
        time->update_s = s_per_element * memory_of(measure, measure->my_class, item)->trained_elements;
        if (!measure->leads) *time = (struct item_time){0};
    }
    return sum_over_ranks(measure, (double *)measure->time,
                          (size_t)measure->class_count * (size_t)candidates->item_count * sizeof *measure->time /
                              sizeof(double));
}

static enum hapt_status run_class(struct measure *measure, MPI_Comm class_comm)
{
    double s_per_element = 0;
    HAPT_TRY(time_layers(measure, class_comm));
    enum hapt_status status = measure->my_class >= 0 ? choose_sample(measure) : HAPT_OK;
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    const double budget_s = hapt_config_real(measure->config, "profile-seconds") - (hapt_time_s() - measure->start_s);
    HAPT_TRY(run_rounds(measure, class_comm, measure->order, measure->count, budget_s, "timing candidates",
                        &measure->rounds));
    if (measure->my_class >= 0) status = settle_times(measure);
    if (status == HAPT_OK) status = time_updates(measure, &s_per_element);
    HAPT_TRY(hapt_env_agree(measure->env->world, status));
    if (measure->my_class >= 0)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &s_per_element, 1, MPI_DOUBLE, MPI_MAX, class_comm));
    return publish(measure, s_per_element);
}

/* ---- the whole ---- */

static double all_reduce(const void *context, int subcluster, int index, struct hapt_submesh submesh, double bytes)
{
    const struct measure *measure = context;
    (void)submesh;
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
        memory[c] = memory_of(measure, measure->class_of[c], 0);
        HAPT_NEW(time[c], measure->scratch, candidates->item_count);
        for (int item = 0; item < candidates->item_count; item++) {
            const struct item_time *cpu = time_of(measure, measure->class_of[c], item);
            time[c][item] =
                (struct item_time){slowdown * cpu->forward_s, slowdown * cpu->backward_s, slowdown * cpu->update_s};
        }
    }
    return candidates_fill(candidates, memory, time, all_reduce, measure, result, profile);
}

static enum hapt_status set_up(struct measure *measure, struct hapt_engine_options *options)
{
    const struct candidates *candidates = measure->candidates;
    const size_t cells = (size_t)measure->class_count * (size_t)candidates->item_count;
    HAPT_NEW(measure->memory, measure->scratch, cells);
    HAPT_NEW(measure->time, measure->scratch, cells);
    HAPT_NEW(measure->needed, measure->scratch, candidates->item_count);
    HAPT_NEW(measure->layer_s, measure->scratch, (size_t)candidates->degree_count * (size_t)candidates->layer_count);
    HAPT_NEW(measure->sample, measure->scratch, (size_t)candidates->item_count * MAX_ROUNDS * 2);
    *options =
        (struct hapt_engine_options){.threads = measure->threads, .state_count = candidates->state_count, .slots = 1};
    if (measure->my_class < 0) return HAPT_OK;
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
    if (measure->my_class < 0) return HAPT_OK;
    struct hapt_submesh *submesh;
    int most = 0;
    for (int c = 0; c < measure->cluster->count; c++) {
        const int count = candidates_submeshes(&measure->cluster->subcluster[c], NULL);
        if (count > most) most = count;
    }
    HAPT_NEW(submesh, measure->scratch, most);
    mark_needed(measure, submesh);
    return windows_choose(measure->candidates, options, class_memory(measure), memory_of(measure, measure->my_class, 0),
                          measure->needed, measure->scratch, &measure->windows);
}

static enum hapt_status measure_all(struct measure *measure, struct hapt_engine_options *options,
                                    struct hapt_arena *result, struct hapt_profile **profile)
{
    const struct hapt_env *env = measure->env;
    HAPT_TRY(find_classes(measure));
    HAPT_TRY(hapt_env_agree(env->world, set_up(measure, options)));
    HAPT_TRY(sum_over_ranks(measure, (double *)measure->memory,
                            (size_t)measure->class_count * (size_t)measure->candidates->item_count *
                                sizeof *measure->memory / sizeof(double)));
    HAPT_TRY(hapt_env_agree(env->world, choose_windows(measure, options)));
    HAPT_TRY(reduce_measure(env, measure->cluster, hapt_config_real(measure->config, "timeout"), measure->scratch,
                            &measure->reduce));
    MPI_Comm class_comm;
    HAPT_MPI(MPI_Comm_split(env->world, measure->my_class < 0 ? MPI_UNDEFINED : measure->my_class, env->world_rank,
                            &class_comm));
    const enum hapt_status status = run_class(measure, class_comm);
    if (class_comm != MPI_COMM_NULL) MPI_Comm_free(&class_comm);
    HAPT_TRY(status);
    return hapt_env_agree(env->world, make_tables(measure, result, profile));
}

enum hapt_status hapt_profile_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                      const struct hapt_model *model, const struct hapt_layers *layers,
                                      const struct hapt_config *config, struct hapt_arena *result,
                                      struct hapt_profile **profile)
{
    struct candidates candidates;
    struct hapt_arena scratch;
    struct hapt_engine_options options = {0};
    hapt_arena_init(&scratch);
    struct measure measure = {.env = env,
                              .cluster = cluster,
                              .candidates = &candidates,
                              .config = config,
                              .scratch = &scratch,
                              .threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads")),
                              .start_s = hapt_time_s()};
    enum hapt_status status =
        hapt_env_agree(env->world, candidates_build(cluster, model, layers, config, &scratch, &candidates));
    if (status == HAPT_OK) status = measure_all(&measure, &options, result, profile);
    windows_close(&measure.windows);
    if (options.device) options.backend->close(options.device);
    if (status == HAPT_OK)
        hapt_note(
            env, "profiled %d structures of %d layer ranges, %.0f %% of them timed, %d rounds, noise %.1f %%, %.1f s\n",
            candidates.structure_count, layers->count * (layers->count + 1) / 2, 100 * measure.sampled_share,
            measure.rounds, 100 * measure.noise, hapt_time_s() - measure.start_s);
    hapt_arena_release(&scratch);
    return status;
}
