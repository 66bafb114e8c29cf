/*
 * Calibration on the ranks of a cluster: the engine times every operator of the model, forward and backward, step by
 * step in complete benchmark engines (bench_engine.h). Operators of equal type and local shapes are one; the median
 * over positions, rounds and ranks counts. Gradient sums come from measure_sums.h.
 */
#include "calibrate.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "hapt/calibration.h"
#include "hapt/collective_cost.h"
#include "hapt/measure.h"
#include "hapt/env.h"
#include "hapt/progress.h"
#include "afford.h"
#include "bench_engine.h"
#include "classes.h"
#include "measure_sums.h"

enum { MIN_ROUNDS = 3, MAX_ROUNDS = 15, MAX_SHARES = 8, TICKS = 64 };

/* An operator with local shapes. */
struct unique {
    uint64_t key;
    int op, share; /* the first equal one of the graph; index of the device count */
    int count, capacity;
    double *time_s;  /* [count] on this rank */
    double median_s; /* on this rank; 0: not run here */
};

struct calibration {
    const struct hapt_env *env;
    const struct hapt_cluster *cluster;
    const struct hapt_model *model;
    const struct hapt_config *config;
    double budget_s;
    struct hapt_candidates candidates;
    struct hapt_arena *scratch;
    struct classes classes;
    struct hapt_engine_options options;
    struct bench_engines bench_engines;
    struct hapt_item_memory *memory; /* [item] for ranks that measure */
    bool *needed;                    /* [item] */
    int *unique_of;                  /* [share][op] */
    int unique_count;
    struct unique *unique;
    double tick_s;                 /* time that reading the clock adds to a step */
    double update_s, update_bytes; /* of all parameters in the longest benchmark engine */
    double *all;                   /* [rank][unique_count + 2] medians, then the update's time and bytes */
    struct sums_table sums;
};

/* ---- what to time ---- */

/* Not only this cluster's device counts: every power of two that divides the rows gives other shapes. */
static enum hapt_status share_rows(struct calibration *calibration)
{
    struct hapt_candidates *candidates = &calibration->candidates;
    HAPT_NEW(candidates->mesh, calibration->scratch, MAX_SHARES);
    HAPT_NEW(candidates->sharding, calibration->scratch, MAX_SHARES);
    candidates->mesh_count = 0;
    for (int devices = 1; devices <= calibration->model->microbatch && candidates->mesh_count < MAX_SHARES;
         devices *= 2) {
        if (calibration->model->microbatch % devices != 0) continue;
        const int d = candidates->mesh_count++;
        candidates->mesh[d] = (struct hapt_candidate_mesh){.dp = devices, .tp = 1};
        HAPT_TRY(hapt_sharding_tensor_parallel(calibration->model->graph, devices, 1, calibration->scratch,
                                               &candidates->sharding[d]));
    }
    candidates->item_count = candidates->structure_count * candidates->mesh_count;
    return HAPT_OK;
}

static uint64_t key_of(const struct hapt_program *program, int op)
{
    const struct hapt_op *what = &program->graph->op[op];
    const int64_t facts[] = {what->type, what->input_count, what->output_count, what->accumulate};
    uint64_t key = hapt_hash(5, facts, sizeof facts);
    key = hapt_op_hash_integers(key, what);
    for (int k = 0; k < what->input_count + what->output_count; k++) {
        const int tensor = k < what->input_count ? what->input[k] : what->output[k - what->input_count];
        const int64_t there = tensor >= 0;
        key = hapt_hash(key, &there, sizeof there);
        if (!there) continue;
        const struct hapt_tensor *whole = &program->graph->tensor[tensor];
        const int64_t type[] = {whole->dtype, whole->dims};
        key = hapt_hash(key, type, sizeof type);
        key = hapt_hash(key, program->tensor[program->local[tensor]].shape, (size_t)whole->dims * sizeof(int64_t));
    }
    return key;
}

static enum hapt_status list_share(struct calibration *calibration, int share, struct hapt_arena *scratch)
{
    const struct hapt_graph *graph = calibration->model->graph;
    struct hapt_program *program;
    HAPT_TRY(hapt_program_build(calibration->candidates.sharding[share], 0, graph->forward_count, scratch, &program));
    const struct hapt_sharding *sharding = program->sharding;
    for (int o = 0; o < sharding->reduce_first; o++) {
        const int op = sharding->source_op[o];
        if (hapt_op_type_at(program->graph->op[o].type)->collective) continue;
        const uint64_t key = key_of(program, o);
        int u = 0;
        while (u < calibration->unique_count && calibration->unique[u].key != key) u++;
        if (u == calibration->unique_count)
            calibration->unique[calibration->unique_count++] = (struct unique){.key = key, .op = op, .share = share};
        calibration->unique_of[share * graph->op_count + op] = u;
    }
    return HAPT_OK;
}

static enum hapt_status list_operators(struct calibration *calibration)
{
    const size_t places = (size_t)calibration->model->graph->op_count * (size_t)calibration->candidates.mesh_count;
    HAPT_NEW(calibration->unique_of, calibration->scratch, places);
    HAPT_NEW(calibration->unique, calibration->scratch, places);
    enum hapt_status status = HAPT_OK;
    for (int share = 0; share < calibration->candidates.mesh_count && status == HAPT_OK; share++) {
        struct hapt_arena scratch;
        hapt_arena_init(&scratch);
        status = list_share(calibration, share, &scratch);
        hapt_arena_release(&scratch);
    }
    return status;
}

/* ---- timing on this rank ---- */

/* Marks every layer within the limit; true if there is one. */
static bool mark_layers(const struct calibration *calibration, double limit)
{
    const struct hapt_candidates *candidates = &calibration->candidates;
    bool some = false;
    for (int item = 0; item < candidates->item_count; item++) {
        const int structure = item / candidates->mesh_count;
        const struct hapt_item_memory *memory = &calibration->memory[item];
        calibration->needed[item] = candidates->first[structure] == candidates->last[structure] &&
                                    memory->parameter_bytes + memory->activation_bytes <= limit;
        some = some || calibration->needed[item];
    }
    return some;
}

/* Benchmark engines with every layer that fits the device, at every share of the rows. If none fits and the device's
 * limit is rehearsed in host memory, with every layer that fits the host. */
static enum hapt_status choose_windows(struct calibration *calibration)
{
    const struct hapt_candidates *candidates = &calibration->candidates;
    const double room = afford_room(&calibration->options, &calibration->classes);
    double limit = fmin(classes_memory(calibration->cluster, &calibration->classes), room);
    struct hapt_item_memory *memory;
    HAPT_NEW(memory, calibration->scratch, candidates->item_count);
    HAPT_NEW(calibration->needed, calibration->scratch, candidates->item_count);
    calibration->memory = memory;
    for (int item = 0; item < candidates->item_count; item++)
        HAPT_TRY(hapt_candidates_plan_memory(candidates, item, &calibration->options, &memory[item]));
    bool some = mark_layers(calibration, limit);
    if (!some && isfinite(room)) some = mark_layers(calibration, limit = room);
    if (!some) return hapt_fail(HAPT_ERR_MEMORY, "use a smaller model", "no layer of the model fits the device");
    return bench_engines_choose(candidates, &calibration->options, limit, memory, calibration->needed,
                                calibration->scratch, &calibration->bench_engines);
}

/* Time that reading the clock adds to a step. */
static double tick(const struct hapt_engine_options *options)
{
    const struct hapt_backend *backend = options->backend;
    hapt_engine_clock *clock = strcmp(backend->name, "cpu") == 0 ? hapt_time_thread_cpu_s : hapt_time_s;
    struct hapt_event *mark[TICKS + 1];
    double between[TICKS];
    for (int k = 0; backend->timestamp && k <= TICKS; k++)
        mark[k] = backend->timestamp(backend->queue(options->device, 0));
    for (int k = 0; k < TICKS; k++) {
        const double start = clock();
        between[k] = backend->timestamp ? fmax(backend->elapsed_s(mark[k], mark[k + 1]), 0) : clock() - start;
    }
    return hapt_median(between, TICKS);
}

static enum hapt_status keep_time(struct unique *unique, double time_s)
{
    if (unique->count == unique->capacity) {
        const int capacity = 2 * unique->capacity + 16;
        double *more = realloc(unique->time_s, (size_t)capacity * sizeof *more);
        if (!more) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the times of an operator");
        unique->time_s = more;
        unique->capacity = capacity;
    }
    unique->time_s[unique->count++] = time_s;
    return HAPT_OK;
}

static enum hapt_status time_window(struct calibration *calibration, int w)
{
    HAPT_TRY(bench_engines_open(&calibration->bench_engines, w));
    const struct bench_engine *bench_engine = &calibration->bench_engines.bench_engine[w];
    const struct hapt_program *program = bench_engine->program;
    double *step_s[2] = {calloc((size_t)program->step_count[0] + 1, sizeof(double)),
                         calloc((size_t)program->step_count[1] + 1, sizeof(double))};
    enum hapt_status status = step_s[0] && step_s[1] ? HAPT_OK : HAPT_ERR_MEMORY;
    if (status != HAPT_OK)
        hapt_fail(status, NULL, "no memory for the times of a benchmark engine");
    else
        status = bench_engines_time_steps(&calibration->bench_engines, w, step_s[0], step_s[1]);
    for (int section = 0; section < 2 && status == HAPT_OK; section++) {
        for (int s = 0; s < program->step_count[section] && status == HAPT_OK; s++) {
            const struct hapt_program_step *step = &program->step[section][s];
            if (step->kind != HAPT_COLLECTIVE_NONE) continue;
            const int place =
                bench_engine->mesh_index * calibration->model->graph->op_count + program->sharding->source_op[step->op];
            status = keep_time(&calibration->unique[calibration->unique_of[place]],
                               fmax(step_s[section][s] - calibration->tick_s, 1e-9));
        }
    }
    free(step_s[0]);
    free(step_s[1]);
    return status;
}

static enum hapt_status time_update(struct calibration *calibration)
{
    const struct hapt_candidates *candidates = &calibration->candidates;
    const struct bench_engine *longest = NULL;
    int item = 0;
    double s_per_element[2];
    for (int w = 0; w < calibration->bench_engines.count; w++)
        if (!longest || calibration->bench_engines.bench_engine[w].bytes > longest->bytes)
            longest = &calibration->bench_engines.bench_engine[w];
    while (calibration->bench_engines.bench_engine_of[item] != (int)(longest - calibration->bench_engines.bench_engine))
        item++;
    HAPT_TRY(bench_engines_time_update(&calibration->bench_engines, item, s_per_element));
    struct hapt_item_memory memory;
    HAPT_TRY(hapt_candidates_plan_memory(
        candidates, hapt_candidates_item(candidates, longest->mesh_index, longest->first, longest->last),
        &calibration->options, &memory));
    calibration->update_s = (s_per_element[0] + s_per_element[1]) * memory.trained_elements;
    calibration->update_bytes = memory.update_bytes;
    return HAPT_OK;
}

static enum hapt_status time_operators(struct calibration *calibration)
{
    const double budget_s = calibration->budget_s, start = hapt_time_s();
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    double elapsed = 0;
    calibration->tick_s = tick(&calibration->options);
    hapt_progress_init(&progress, calibration->env, "timing operators",
                       (long)MAX_ROUNDS * calibration->bench_engines.count);
    for (int round = 0; round < MAX_ROUNDS && status == HAPT_OK; round++) {
        for (int w = 0; w < calibration->bench_engines.count && status == HAPT_OK; w++) {
            hapt_progress_update(&progress, (long)round * calibration->bench_engines.count + w, NULL);
            status = time_window(calibration, w);
        }
        elapsed = hapt_time_s() - start;
        if (round + 1 >= MIN_ROUNDS && elapsed * (round + 2) / (round + 1) > budget_s) break;
    }
    if (status == HAPT_OK) status = time_update(calibration);
    hapt_progress_release(&progress);
    for (int u = 0; u < calibration->unique_count; u++)
        calibration->unique[u].median_s = hapt_median(calibration->unique[u].time_s, calibration->unique[u].count);
    return status;
}

static enum hapt_status prepare_here(struct calibration *calibration, int threads)
{
    if (calibration->classes.own_class < 0) return HAPT_OK;
    calibration->options =
        (struct hapt_engine_options){.threads = threads, .state_count = calibration->candidates.state_count};
    HAPT_TRY(classes_open_device(calibration->env, calibration->cluster, "calibrate",
                                 "calibrate on hosts that have the devices; see hapt doctor", &calibration->options));
    return calibration->classes.active < 0 ? HAPT_OK : choose_windows(calibration);
}

/* Collective over env->world. */
static enum hapt_status check_cost(const struct calibration *calibration)
{
    const struct afford_question question = {.env = calibration->env,
                                             .config = calibration->config,
                                             .candidates = &calibration->candidates,
                                             .classes = &calibration->classes,
                                             .bench_engines = &calibration->bench_engines,
                                             .needed = calibration->needed,
                                             .memory = calibration->memory,
                                             .whole_rounds = MIN_ROUNDS};
    return afford_check(&question, calibration->scratch);
}

/* ---- tables from the measurements of all ranks ---- */

static enum hapt_status gather(struct calibration *calibration)
{
    const int columns = calibration->unique_count + 2;
    const size_t cells = (size_t)columns * (size_t)calibration->env->world_size;
    double *mine = NULL;
    calibration->all = hapt_arena_alloc(calibration->scratch, cells, sizeof *calibration->all);
    if (calibration->all) mine = hapt_arena_alloc(calibration->scratch, (size_t)columns, sizeof *mine);
    HAPT_TRY(hapt_env_agree(calibration->env->world, mine ? HAPT_OK : HAPT_ERR_MEMORY));
    for (int u = 0; u < calibration->unique_count; u++) mine[u] = calibration->unique[u].median_s;
    mine[columns - 2] = calibration->update_s;
    mine[columns - 1] = calibration->update_bytes;
    HAPT_MPI(MPI_Allgather(mine, columns, MPI_DOUBLE, calibration->all, columns, MPI_DOUBLE, calibration->env->world));
    return HAPT_OK;
}

/* Median over the ranks with devices of that name. */
static double over_ranks(const struct calibration *calibration, const char *name, int column, double *buffer)
{
    int count = 0;
    for (int r = 0; r < calibration->env->world_size; r++) {
        const int c = calibration->cluster->subcluster_of_rank[r];
        const double value = calibration->all[(size_t)r * (size_t)(calibration->unique_count + 2) + (size_t)column];
        if (c < 0 || value <= 0 || strcasecmp(calibration->cluster->subcluster[c].device.name, name) != 0) continue;
        buffer[count++] = value;
    }
    return hapt_median(buffer, count);
}

static enum hapt_status list_samples(const struct calibration *calibration, struct hapt_arena *result,
                                     struct hapt_calibration_device *device)
{
    const struct hapt_graph *graph = calibration->model->graph;
    double *buffer;
    HAPT_NEW(buffer, calibration->scratch, calibration->env->world_size);
    HAPT_NEW(device->sample, result, calibration->unique_count + 1);
    for (int u = 0; u < calibration->unique_count; u++) {
        const struct unique *unique = &calibration->unique[u];
        const double time_s = over_ranks(calibration, device->name, u, buffer);
        const double share = 1.0 / calibration->candidates.mesh[unique->share].dp;
        const struct hapt_op_type *type = hapt_op_type_at(graph->op[unique->op].type);
        if (time_s <= 0) continue;
        struct hapt_calibration_sample *sample = &device->sample[device->sample_count++];
        *sample = (struct hapt_calibration_sample){.flops = hapt_op_flops(graph, &graph->op[unique->op], share),
                                                   .bytes = hapt_op_bytes(graph, &graph->op[unique->op], share),
                                                   .time_s = time_s};
        snprintf(sample->op, sizeof sample->op, "%s", type->name);
        sample->class = hapt_calibration_class(type, sample->flops, sample->bytes);
    }
    const double update_s = over_ranks(calibration, device->name, calibration->unique_count, buffer);
    if (update_s > 0)
        device->sample[device->sample_count++] = (struct hapt_calibration_sample){
            .op = "update",
            .class = HAPT_EFFICIENCY_MEMORY,
            .bytes = over_ranks(calibration, device->name, calibration->unique_count + 1, buffer),
            .time_s = update_s};
    return HAPT_OK;
}

static enum hapt_status list_sums(const struct calibration *calibration, struct hapt_arena *result,
                                  struct hapt_calibration_device *device)
{
    const struct hapt_cluster *cluster = calibration->cluster;
    struct hapt_submesh *submesh;
    HAPT_NEW(submesh, calibration->scratch, calibration->sums.submesh_count + 1);
    HAPT_NEW(device->sum, result, cluster->count * calibration->sums.submesh_count * SUMS_SIZES + 1);
    for (int c = 0; c < cluster->count; c++) {
        if (strcasecmp(cluster->subcluster[c].device.name, device->name) != 0) continue;
        const int count = hapt_candidates_submeshes(&cluster->subcluster[c], submesh);
        for (int s = 0; s < count; s++) {
            const struct hapt_collective_span span = hapt_collective_span_of(&cluster->subcluster[c], submesh[s], 0);
            for (int k = 0; k < SUMS_SIZES && submesh[s].n * submesh[s].m > 1; k++) {
                const double bytes = calibration->sums.bytes[k];
                const struct hapt_calibration_sum sum = {
                    submesh[s].n * submesh[s].m, bytes, sums_measured_s(&calibration->sums, c, s, bytes),
                    hapt_collective_span_s(&span, HAPT_COLLECTIVE_ALL_REDUCE, bytes, 0)};
                if (sum.time_s > 0 && sum.predicted_s > 0) device->sum[device->sum_count++] = sum;
            }
        }
    }
    return HAPT_OK;
}

static enum hapt_status make_tables(const struct calibration *calibration, struct hapt_arena *result,
                                    struct hapt_efficiency **efficiency)
{
    const struct hapt_cluster *cluster = calibration->cluster;
    struct hapt_efficiency *made;
    HAPT_NEW(made, result, 1);
    HAPT_NEW(made->device, result, cluster->count);
    for (int c = 0; c < cluster->count; c++) {
        const struct hapt_device_spec *spec = &cluster->subcluster[c].device;
        if (hapt_efficiency_covers(made, spec->name, calibration->model->dtype)) continue;
        struct hapt_calibration_device *device = &made->device[made->count++];
        const struct hapt_roofline roofline = hapt_roofline_describe(spec, calibration->model->dtype, NULL);
        *device = (struct hapt_calibration_device){.dtype = calibration->model->dtype,
                                                   .peak_flops = roofline.peak_flops,
                                                   .vector_flops = roofline.vector_flops,
                                                   .bandwidth = roofline.bandwidth};
        snprintf(device->name, sizeof device->name, "%s", spec->name);
        snprintf(device->backend, sizeof device->backend, "%s", spec->backend);
        HAPT_TRY(list_samples(calibration, result, device));
        HAPT_TRY(list_sums(calibration, result, device));
        HAPT_TRY(hapt_calibration_fit(device));
    }
    *efficiency = made;
    return HAPT_OK;
}

static enum hapt_status prepare(struct calibration *calibration, const struct hapt_layers *layers)
{
    const struct hapt_candidates_options data = {.programs = PROGRAM_DATA, .tensor_parallel = 1};
    HAPT_TRY(hapt_candidates_build(calibration->cluster, calibration->model, layers, calibration->config, &data,
                                   calibration->scratch, &calibration->candidates));
    HAPT_TRY(share_rows(calibration));
    return list_operators(calibration);
}

static enum hapt_status calibrate(struct calibration *calibration, const struct hapt_layers *layers,
                                  struct hapt_arena *result, struct hapt_efficiency **efficiency)
{
    const struct hapt_env *env = calibration->env;
    const int threads = hapt_env_threads(env, (int)hapt_config_int(calibration->config, "threads"));
    HAPT_TRY(hapt_env_agree(env->world, prepare(calibration, layers)));
    HAPT_TRY(classes_same_structures(env, &calibration->candidates));
    HAPT_TRY(classes_find(env, calibration->cluster, threads, &calibration->classes));
    HAPT_TRY(hapt_env_agree(env->world, prepare_here(calibration, threads)));
    HAPT_TRY(check_cost(calibration));
    const enum hapt_status status = calibration->classes.active < 0 ? HAPT_OK : time_operators(calibration);
    HAPT_TRY(sums_barrier(env->world));
    HAPT_TRY(hapt_env_agree(env->world, status));
    HAPT_TRY(sums_measure(env, calibration->cluster, &calibration->options,
                          hapt_config_real(calibration->config, "timeout"), calibration->scratch, &calibration->sums));
    HAPT_TRY(gather(calibration));
    return hapt_env_agree(env->world, make_tables(calibration, result, efficiency));
}

enum hapt_status calibrate_within(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                  const struct hapt_model *model, const struct hapt_layers *layers,
                                  const struct hapt_config *config, double budget_s, struct hapt_arena *result,
                                  struct hapt_efficiency **efficiency)
{
    struct hapt_arena scratch;
    struct calibration calibration = {
        .env = env, .cluster = cluster, .model = model, .config = config, .budget_s = budget_s, .scratch = &scratch};
    hapt_arena_init(&scratch);
    const enum hapt_status status = calibrate(&calibration, layers, result, efficiency);
    for (int u = 0; u < calibration.unique_count; u++) free(calibration.unique[u].time_s);
    bench_engines_close(&calibration.bench_engines);
    if (calibration.options.device) calibration.options.backend->close(calibration.options.device);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status hapt_profile_calibrate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                        const struct hapt_model *model, const struct hapt_layers *layers,
                                        const struct hapt_config *config, struct hapt_arena *result,
                                        struct hapt_efficiency **efficiency)
{
    return calibrate_within(env, cluster, model, layers, config, hapt_config_real(config, "profile-seconds"), result,
                            efficiency);
}
