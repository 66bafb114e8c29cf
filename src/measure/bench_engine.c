/* Benchmark engines: reservation, data, timing. */
#include "bench_engine.h"

#include "samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"

#define WARM_S 0.3

static hapt_engine_clock *clock_of(const struct bench_engines *bench_engines)
{
    return strcmp(bench_engines->options.backend->name, "cpu") == 0 ? hapt_time_thread_cpu_s : hapt_time_s;
}

static double clock_s(const struct bench_engines *bench_engines)
{
    return clock_of(bench_engines)();
}

static enum hapt_status keep_crossing(const struct hapt_boundary *boundary, struct hapt_arena *arena,
                                      struct crossing *crossing)
{
    crossing->count = boundary->count;
    HAPT_NEW(crossing->tensor, arena, boundary->count);
    memcpy(crossing->tensor, boundary->tensor, (size_t)boundary->count * sizeof *boundary->tensor);
    return HAPT_OK;
}

static enum hapt_status keep_crossings(struct bench_engines *bench_engines, int item, struct hapt_arena *arena,
                                       struct hapt_arena *scratch)
{
    const struct hapt_candidates *candidates = bench_engines->candidates;
    const int structure = item / candidates->mesh_count;
    struct hapt_program *program;
    struct crossings *crossings = &bench_engines->crossings[item];
    HAPT_TRY(hapt_candidates_program(candidates, candidates->first[structure], candidates->last[structure],
                                     item % candidates->mesh_count, scratch, &program));
    HAPT_TRY(keep_crossing(&program->forward_in, arena, &crossings->list[0]));
    HAPT_TRY(keep_crossing(&program->backward_in, arena, &crossings->list[1]));
    return keep_crossing(&program->backward_out, arena, &crossings->list[2]);
}

/* Adds the benchmark engine of a range: from its first layer on, as many layers as fit. */
static void add_bench_engine(struct bench_engines *bench_engines, int first, int last, int mesh_index,
                             const struct hapt_item_memory *memory)
{
    const struct hapt_candidates *candidates = bench_engines->candidates;
    struct bench_engine *bench_engine = &bench_engines->bench_engine[bench_engines->count++];
    *bench_engine = (struct bench_engine){.first = first, .last = last, .mesh_index = mesh_index};
    for (int j = last; j < candidates->layer_count; j++) {
        const struct hapt_item_memory *mine = &memory[hapt_candidates_item(candidates, mesh_index, first, j)];
        const double bytes = mine->parameter_bytes + mine->activation_bytes + mine->host_bytes;
        if (j > last && bytes > bench_engines->limit_bytes) break;
        bench_engine->last = j;
        bench_engine->bytes = bytes;
    }
}

struct wanted {
    int first, last, item;
};

static int compare_wanted(const void *a, const void *b)
{
    const struct wanted *x = a, *y = b;
    return x->first != y->first ? x->first - y->first : y->last - x->last;
}

static enum hapt_status choose(struct bench_engines *bench_engines, const struct hapt_item_memory *memory,
                               const bool *needed, struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct hapt_candidates *candidates = bench_engines->candidates;
    struct wanted *wanted;
    int count = 0;
    HAPT_NEW(wanted, scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++) {
        const int structure = item / candidates->mesh_count;
        bench_engines->bench_engine_of[item] = -1;
        if (needed[item])
            wanted[count++] = (struct wanted){candidates->first[structure], candidates->last[structure], item};
    }
    HAPT_NEW(bench_engines->bench_engine, arena, count);
    qsort(wanted, (size_t)count, sizeof *wanted, compare_wanted);
    for (int w = 0; w < count; w++) {
        const int mesh_index = wanted[w].item % candidates->mesh_count;
        int found = -1;
        for (int k = 0; k < bench_engines->count && found < 0; k++) {
            const struct bench_engine *bench_engine = &bench_engines->bench_engine[k];
            if (bench_engine->mesh_index == mesh_index && bench_engine->first <= wanted[w].first &&
                bench_engine->last >= wanted[w].last)
                found = k;
        }
        if (found < 0) {
            found = bench_engines->count;
            add_bench_engine(bench_engines, wanted[w].first, wanted[w].last, mesh_index, memory);
        }
        bench_engines->bench_engine_of[wanted[w].item] = found;
    }
    return HAPT_OK;
}

enum hapt_status bench_engines_choose(const struct hapt_candidates *candidates,
                                      const struct hapt_engine_options *options, double limit_bytes,
                                      const struct hapt_item_memory *memory, const bool *needed,
                                      struct hapt_arena *arena, struct bench_engines *bench_engines)
{
    struct hapt_arena scratch;
    *bench_engines = (struct bench_engines){.candidates = candidates, .options = *options, .limit_bytes = limit_bytes};
    HAPT_NEW(bench_engines->bench_engine_of, arena, candidates->item_count);
    HAPT_NEW(bench_engines->crossings, arena, candidates->item_count);
    hapt_arena_init(&scratch);
    enum hapt_status status = choose(bench_engines, memory, needed, arena, &scratch);
    for (int item = 0; status == HAPT_OK && item < candidates->item_count; item++) {
        if (bench_engines->bench_engine_of[item] < 0) continue;
        hapt_arena_reset(&scratch);
        status = keep_crossings(bench_engines, item, arena, &scratch);
    }
    hapt_arena_release(&scratch);
    return status;
}

static void close_bench_engine(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    if (!bench_engine->engine && !bench_engine->boundary_buffer) return;
    const struct hapt_backend *backend = bench_engines->options.backend;
    if (bench_engine->boundary_buffer) backend->free(bench_engines->options.device, bench_engine->boundary_buffer);
    hapt_engine_destroy(bench_engine->engine);
    hapt_arena_release(&bench_engine->arena);
    bench_engine->boundary_buffer = NULL;
    bench_engine->engine = NULL;
}

void bench_engines_close(struct bench_engines *bench_engines)
{
    for (int w = 0; w < bench_engines->count; w++) close_bench_engine(bench_engines, &bench_engines->bench_engine[w]);
}

/* Random values of the model's type, enough for the largest boundary of any of its ranges. */
static enum hapt_status fill_boundary_buffer(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    const struct hapt_backend *backend = bench_engines->options.backend;
    const enum hapt_dtype dtype = bench_engines->candidates->model->dtype;
    const size_t count = bench_engine->boundary_buffer_bytes / sizeof(float);
    float *value = malloc(bench_engine->boundary_buffer_bytes);
    if (!value)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %zu bytes of samples",
                         bench_engine->boundary_buffer_bytes);
    uint64_t random = 2;
    for (size_t i = 0; i < count; i++) {
        value[i] = (float)(hapt_random_unit(&random) - 0.5);
        if (dtype != HAPT_F32) ((uint16_t *)value)[2 * i] = ((uint16_t *)value)[2 * i + 1];
    }
    struct hapt_queue *queue = backend->queue(bench_engines->options.device, 0);
    const enum hapt_status status = backend->copy(queue, bench_engine->boundary_buffer, value,
                                                  bench_engine->boundary_buffer_bytes),
                           done = backend->wait(backend->record(queue));
    free(value);
    return status != HAPT_OK ? status : done;
}

static size_t crossing_bytes(const struct bench_engine *bench_engine, const struct crossing *crossing)
{
    size_t bytes = 0;
    for (int k = 0; k < crossing->count; k++)
        bytes += hapt_align(hapt_engine_tensor_bytes(bench_engine->engine, crossing->tensor[k]));
    return bytes;
}

static enum hapt_status reserve_boundary_buffer(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    for (int item = 0; item < bench_engines->candidates->item_count; item++) {
        if (bench_engines->bench_engine_of[item] != (int)(bench_engine - bench_engines->bench_engine)) continue;
        for (int k = 0; k < 3; k++) {
            const size_t bytes = crossing_bytes(bench_engine, &bench_engines->crossings[item].list[k]);
            if (bytes > bench_engine->boundary_buffer_bytes) bench_engine->boundary_buffer_bytes = bytes;
        }
    }
    if (bench_engine->boundary_buffer_bytes == 0) return HAPT_OK;
    const struct hapt_backend *backend = bench_engines->options.backend;
    HAPT_TRY(backend->allocate(bench_engines->options.device, 2 * bench_engine->boundary_buffer_bytes,
                               &bench_engine->boundary_buffer));
    return fill_boundary_buffer(bench_engines, bench_engine);
}

/* Runs once, so that every tensor of the slot holds numbers and every page is touched. On a device with a clock of
 * its own, the first call runs until the device has clocked up from its idle state. */
static enum hapt_status run_through(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    const double end = bench_engines->options.backend->timestamp && !bench_engines->warm ? hapt_time_s() + WARM_S : 0;
    do {
        HAPT_TRY(hapt_engine_forward(bench_engine->engine, 0, 0));
        HAPT_TRY(hapt_engine_backward(bench_engine->engine, 0, 0, 0));
    } while (hapt_time_s() < end);
    bench_engines->warm = true;
    return HAPT_OK;
}

static enum hapt_status set_up_bench_engine(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    HAPT_TRY(hapt_candidates_program(bench_engines->candidates, bench_engine->first, bench_engine->last,
                                     bench_engine->mesh_index, &bench_engine->arena, &bench_engine->program));
    HAPT_TRY(hapt_engine_create(bench_engine->program, &bench_engines->options, &bench_engine->engine));
    HAPT_TRY(reserve_boundary_buffer(bench_engines, bench_engine));
    HAPT_TRY(samples_fill(bench_engines->candidates->model, &bench_engines->options, bench_engine->program,
                          bench_engine->engine));
    HAPT_TRY(hapt_engine_begin_step(bench_engine->engine));
    return run_through(bench_engines, bench_engine);
}

static enum hapt_status open_bench_engine(struct bench_engines *bench_engines, struct bench_engine *bench_engine)
{
    if (bench_engine->engine) return HAPT_OK;
    double open_bytes = bench_engine->bytes;
    for (int w = 0; w < bench_engines->count; w++)
        open_bytes += bench_engines->bench_engine[w].engine ? bench_engines->bench_engine[w].bytes : 0;
    if (open_bytes > bench_engines->limit_bytes) bench_engines_close(bench_engines);
    hapt_arena_init(&bench_engine->arena);
    bench_engines->opened++;
    const enum hapt_status status = set_up_bench_engine(bench_engines, bench_engine);
    if (status == HAPT_OK) return status;
    close_bench_engine(bench_engines, bench_engine);
    hapt_arena_release(&bench_engine->arena);
    return status;
}

/* Copies between the boundary buffer and a range's boundary tensors, as the engine does with transfer slots. */
static enum hapt_status copy_boundary(struct bench_engines *bench_engines, struct bench_engine *bench_engine,
                                      const struct crossing *crossing, bool out)
{
    const struct hapt_backend *backend = bench_engines->options.backend;
    struct hapt_queue *queue = backend->queue(bench_engines->options.device, 0);
    char *buffer = (char *)bench_engine->boundary_buffer + (out ? bench_engine->boundary_buffer_bytes : 0);
    for (int k = 0; k < crossing->count; k++) {
        void *tensor = hapt_engine_tensor(bench_engine->engine, crossing->tensor[k], 0);
        const size_t bytes = hapt_engine_tensor_bytes(bench_engine->engine, crossing->tensor[k]);
        HAPT_TRY(backend->copy(queue, out ? buffer : tensor, out ? tensor : buffer, bytes));
        buffer += hapt_align(bytes);
    }
    return HAPT_OK;
}

/* Copies, and adds the seconds by the device's clock to *time_s. */
static enum hapt_status time_copy(struct bench_engines *bench_engines, struct bench_engine *bench_engine,
                                  const struct crossing *crossing, bool out, double *time_s)
{
    const struct hapt_backend *backend = bench_engines->options.backend;
    struct hapt_queue *queue = backend->queue(bench_engines->options.device, 0);
    struct hapt_event *from = backend->timestamp(queue);
    HAPT_TRY(copy_boundary(bench_engines, bench_engine, crossing, out));
    const double copy_s = backend->elapsed_s(from, backend->timestamp(queue));
    if (copy_s > 0) *time_s += copy_s;
    return backend->wait(backend->record(queue));
}

static enum hapt_status time_by_device(struct bench_engines *bench_engines, struct bench_engine *bench_engine,
                                       const struct crossings *crossings, const int op[2], double *forward_s,
                                       double *backward_s)
{
    double part_s;
    *forward_s = *backward_s = 0;
    HAPT_TRY(time_copy(bench_engines, bench_engine, &crossings->list[0], false, forward_s));
    HAPT_TRY(hapt_engine_time_part(bench_engine->engine, HAPT_SECTION_FORWARD, 0, op[0], op[1], hapt_time_s, &part_s));
    *forward_s += part_s;
    HAPT_TRY(time_copy(bench_engines, bench_engine, &crossings->list[1], false, backward_s));
    HAPT_TRY(hapt_engine_time_part(bench_engine->engine, HAPT_SECTION_BACKWARD, 0, op[0], op[1], hapt_time_s, &part_s));
    *backward_s += part_s;
    return time_copy(bench_engines, bench_engine, &crossings->list[2], true, backward_s);
}

enum hapt_status bench_engines_time(struct bench_engines *bench_engines, int item, double *forward_s,
                                    double *backward_s)
{
    const struct hapt_candidates *candidates = bench_engines->candidates;
    const int structure = item / candidates->mesh_count;
    const int first_op = hapt_layers_first_op(candidates->layers, candidates->first[structure]);
    const int end_op = candidates->layers->end_op[candidates->last[structure]];
    struct bench_engine *bench_engine = &bench_engines->bench_engine[bench_engines->bench_engine_of[item]];
    const struct crossings *crossings = &bench_engines->crossings[item];
    HAPT_TRY(open_bench_engine(bench_engines, bench_engine));
    if (bench_engines->options.backend->timestamp)
        return time_by_device(bench_engines, bench_engine, crossings, (int[]){first_op, end_op}, forward_s, backward_s);
    const double start = clock_s(bench_engines);
    HAPT_TRY(copy_boundary(bench_engines, bench_engine, &crossings->list[0], false));
    HAPT_TRY(hapt_engine_run_part(bench_engine->engine, HAPT_SECTION_FORWARD, 0, first_op, end_op));
    const double middle = clock_s(bench_engines);
    HAPT_TRY(copy_boundary(bench_engines, bench_engine, &crossings->list[1], false));
    HAPT_TRY(hapt_engine_run_part(bench_engine->engine, HAPT_SECTION_BACKWARD, 0, first_op, end_op));
    HAPT_TRY(copy_boundary(bench_engines, bench_engine, &crossings->list[2], true));
    HAPT_TRY(bench_engines->options.backend->wait(bench_engines->options.backend->record(
        bench_engines->options.backend->queue(bench_engines->options.device, 0))));
    const double end = clock_s(bench_engines);
    *forward_s = middle - start;
    *backward_s = end - middle;
    return HAPT_OK;
}

/* Seconds of a range's operators in a section, without copies. */
static enum hapt_status time_part(struct bench_engines *bench_engines, struct bench_engine *bench_engine,
                                  enum hapt_section section, const int op[2], double *time_s)
{
    if (bench_engines->options.backend->timestamp)
        return hapt_engine_time_part(bench_engine->engine, section, 0, op[0], op[1], hapt_time_s, time_s);
    const double start_s = clock_s(bench_engines);
    HAPT_TRY(hapt_engine_run_part(bench_engine->engine, section, 0, op[0], op[1]));
    *time_s = clock_s(bench_engines) - start_s;
    return HAPT_OK;
}

enum hapt_status bench_engines_time_weight(struct bench_engines *bench_engines, int item, double *weight_s,
                                           double *backward_s)
{
    enum { ROUNDS = 5 };
    const struct hapt_candidates *candidates = bench_engines->candidates;
    const int structure = item / candidates->mesh_count;
    const int op[2] = {hapt_layers_first_op(candidates->layers, candidates->first[structure]),
                       candidates->layers->end_op[candidates->last[structure]]};
    struct bench_engine *bench_engine = &bench_engines->bench_engine[bench_engines->bench_engine_of[item]];
    double sample[2][ROUNDS], unused[2];
    HAPT_TRY(bench_engines_time(bench_engines, item, &unused[0], &unused[1])); /* opens it and warms it up */
    for (int round = 0; round < ROUNDS; round++) {
        HAPT_TRY(time_part(bench_engines, bench_engine, HAPT_SECTION_BACKWARD, op, &sample[0][round]));
        HAPT_TRY(time_part(bench_engines, bench_engine, HAPT_SECTION_WEIGHT, op, &sample[1][round]));
    }
    *backward_s = hapt_median(sample[0], ROUNDS);
    *weight_s = fmin(hapt_median(sample[1], ROUNDS), *backward_s);
    return HAPT_OK;
}

/* An engine of the split program of the same range. */
static enum hapt_status open_split(struct bench_engines *bench_engines, const struct bench_engine *whole,
                                   struct bench_engine *split)
{
    const struct hapt_candidates *candidates = bench_engines->candidates;
    struct hapt_sharding *sharding;
    HAPT_TRY(hapt_sharding_split(whole->program->sharding, &split->arena, &sharding));
    HAPT_TRY(
        hapt_program_build(sharding, whole->program->first_op, whole->program->end_op, &split->arena, &split->program));
    HAPT_TRY(hapt_engine_create(split->program, &bench_engines->options, &split->engine));
    HAPT_TRY(samples_fill(candidates->model, &bench_engines->options, split->program, split->engine));
    HAPT_TRY(hapt_engine_begin_step(split->engine));
    HAPT_TRY(run_through(bench_engines, split));
    return hapt_engine_weight(split->engine, 0, 0);
}

static enum hapt_status time_split(struct bench_engines *bench_engines, struct bench_engine *whole,
                                   struct bench_engine *split, double *split_s, double *backward_s)
{
    enum { ROUNDS = 7 };
    const int op[2] = {split->program->first_op, split->program->end_op};
    double sample[2][ROUNDS], weight_s;
    for (int round = 0; round < ROUNDS; round++) {
        HAPT_TRY(time_part(bench_engines, whole, HAPT_SECTION_BACKWARD, op, &sample[0][round]));
        HAPT_TRY(time_part(bench_engines, split, HAPT_SECTION_BACKWARD, op, &sample[1][round]));
        HAPT_TRY(time_part(bench_engines, split, HAPT_SECTION_WEIGHT, op, &weight_s));
        sample[1][round] += weight_s;
    }
    *backward_s = hapt_median(sample[0], ROUNDS);
    *split_s = hapt_median(sample[1], ROUNDS);
    return HAPT_OK;
}

enum hapt_status bench_engines_time_split(struct bench_engines *bench_engines, int w, double *split_s,
                                          double *backward_s)
{
    struct bench_engine split = {0}, *whole = &bench_engines->bench_engine[w];
    *split_s = *backward_s = NAN;
    if (2 * whole->bytes > bench_engines->limit_bytes) return HAPT_OK;
    bench_engines_close(bench_engines);
    HAPT_TRY(open_bench_engine(bench_engines, whole));
    hapt_arena_init(&split.arena);
    enum hapt_status status = open_split(bench_engines, whole, &split);
    if (status == HAPT_OK) status = time_split(bench_engines, whole, &split, split_s, backward_s);
    if (!split.engine) hapt_arena_release(&split.arena);
    close_bench_engine(bench_engines, &split);
    if (status != HAPT_ERR_MEMORY) return status;
    hapt_fail_reset();
    return HAPT_OK;
}

enum hapt_status bench_engines_open(struct bench_engines *bench_engines, int w)
{
    return open_bench_engine(bench_engines, &bench_engines->bench_engine[w]);
}

enum hapt_status bench_engines_time_steps(struct bench_engines *bench_engines, int w, double *forward_s,
                                          double *backward_s)
{
    struct bench_engine *bench_engine = &bench_engines->bench_engine[w];
    hapt_engine_clock *clock = clock_of(bench_engines);
    HAPT_TRY(open_bench_engine(bench_engines, bench_engine));
    HAPT_TRY(hapt_engine_time_section(bench_engine->engine, HAPT_SECTION_FORWARD, 0, clock, forward_s));
    return hapt_engine_time_section(bench_engine->engine, HAPT_SECTION_BACKWARD, 0, clock, backward_s);
}

enum hapt_status bench_engines_time_update(struct bench_engines *bench_engines, int item, double s_per_element[2])
{
    enum { ROUNDS = 5 };
    struct bench_engine *bench_engine = &bench_engines->bench_engine[bench_engines->bench_engine_of[item]];
    HAPT_TRY(open_bench_engine(bench_engines, bench_engine));
    const double elements = (double)hapt_engine_memory(bench_engine->engine)->trained_elements;
    const bool adamw = bench_engines->options.state_count == 2;
    struct hapt_update update = {.optimizer = adamw ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95,
                                 .epsilon = 1e-8,
                                 .gradient_scale = 1,
                                 .microbatches = 1,
                                 .momentum = bench_engines->options.state_count == 1 ? 0.9 : 0};
    double sample[2][ROUNDS], share[ROUNDS], sum, unused[2];
    for (update.step = 1; update.step <= ROUNDS; update.step++) {
        HAPT_TRY(bench_engines_time(bench_engines, item, &unused[0], &unused[1]));
        const double start = clock_s(bench_engines);
        HAPT_TRY(hapt_engine_square_sum(bench_engine->engine, NULL, &sum));
        const double middle = clock_s(bench_engines), middle_s = hapt_time_s(),
                     kernels_s = hapt_engine_update_kernels_s(bench_engine->engine);
        HAPT_TRY(hapt_engine_update(bench_engine->engine, 0, 1, &update));
        const double wall_s = hapt_time_s() - middle_s, behind = clock_s(bench_engines);
        share[update.step - 1] = 1 - (hapt_engine_update_kernels_s(bench_engine->engine) - kernels_s) / wall_s;
        HAPT_TRY(hapt_engine_begin_step(bench_engine->engine));
        /* CPU time does not see that the computing thread waits for paced copies, or for the thread that updates */
        const bool waits =
            bench_engines->options.host_pace > 0 || hapt_engine_memory(bench_engine->engine)->host_update;
        sample[0][update.step - 1] = waits ? wall_s : behind - middle;
        sample[1][update.step - 1] = middle - start + clock_s(bench_engines) - behind;
    }
    bench_engines->copied_share = elements > 0 ? fmax(0, hapt_median(share, ROUNDS)) : 0;
    for (int part = 0; part < 2; part++)
        s_per_element[part] = elements > 0 ? hapt_median(sample[part], ROUNDS) / elements : 0;
    return HAPT_OK;
}
