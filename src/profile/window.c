/* Windows: reservation, data, timing. */
#include "window.h"

#include "samples.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define WARM_S 0.3

static hapt_engine_clock *clock_of(const struct windows *windows)
{
    return strcmp(windows->options.backend->name, "cpu") == 0 ? hapt_time_thread_cpu_s : hapt_time_s;
}

static double clock_s(const struct windows *windows)
{
    return clock_of(windows)();
}

static enum hapt_status keep_crossing(const struct hapt_boundary *boundary, struct hapt_arena *arena,
                                      struct crossing *crossing)
{
    crossing->count = boundary->count;
    HAPT_NEW(crossing->tensor, arena, boundary->count);
    memcpy(crossing->tensor, boundary->tensor, (size_t)boundary->count * sizeof *boundary->tensor);
    return HAPT_OK;
}

static enum hapt_status keep_crossings(struct windows *windows, int item, struct hapt_arena *arena,
                                       struct hapt_arena *scratch)
{
    const struct candidates *candidates = windows->candidates;
    const int structure = item / candidates->degree_count;
    struct hapt_program *program;
    struct crossings *crossings = &windows->crossings[item];
    HAPT_TRY(candidates_program(candidates, candidates->first[structure], candidates->last[structure],
                                item % candidates->degree_count, scratch, &program));
    HAPT_TRY(keep_crossing(&program->forward_in, arena, &crossings->list[0]));
    HAPT_TRY(keep_crossing(&program->backward_in, arena, &crossings->list[1]));
    return keep_crossing(&program->backward_out, arena, &crossings->list[2]);
}

/* The window of a range: from its first layer on, as long as it fits. */
static void add_window(struct windows *windows, int first, int last, int degree, const struct item_memory *memory)
{
    const struct candidates *candidates = windows->candidates;
    struct window *window = &windows->window[windows->count++];
    *window = (struct window){.first = first, .last = last, .degree = degree};
    for (int j = last; j < candidates->layer_count; j++) {
        const struct item_memory *mine = &memory[candidates_item(candidates, degree, first, j)];
        const double bytes = mine->parameter_bytes + mine->activation_bytes;
        if (j > last && bytes > windows->limit_bytes) break;
        window->last = j;
        window->bytes = bytes;
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

static enum hapt_status choose(struct windows *windows, const struct item_memory *memory, const bool *needed,
                               struct hapt_arena *arena, struct hapt_arena *scratch)
{
    const struct candidates *candidates = windows->candidates;
    struct wanted *wanted;
    int count = 0;
    HAPT_NEW(wanted, scratch, candidates->item_count);
    for (int item = 0; item < candidates->item_count; item++) {
        const int structure = item / candidates->degree_count;
        windows->window_of[item] = -1;
        if (needed[item])
            wanted[count++] = (struct wanted){candidates->first[structure], candidates->last[structure], item};
    }
    HAPT_NEW(windows->window, arena, count);
    qsort(wanted, (size_t)count, sizeof *wanted, compare_wanted);
    for (int w = 0; w < count; w++) {
        const int degree = wanted[w].item % candidates->degree_count;
        int found = -1;
        for (int k = 0; k < windows->count && found < 0; k++) {
            const struct window *window = &windows->window[k];
            if (window->degree == degree && window->first <= wanted[w].first && window->last >= wanted[w].last)
                found = k;
        }
        if (found < 0) {
            found = windows->count;
            add_window(windows, wanted[w].first, wanted[w].last, degree, memory);
        }
        windows->window_of[wanted[w].item] = found;
    }
    return HAPT_OK;
}

enum hapt_status windows_choose(const struct candidates *candidates, const struct hapt_engine_options *options,
                                double limit_bytes, const struct item_memory *memory, const bool *needed,
                                struct hapt_arena *arena, struct windows *windows)
{
    struct hapt_arena scratch;
    *windows = (struct windows){.candidates = candidates, .options = *options, .limit_bytes = limit_bytes};
    HAPT_NEW(windows->window_of, arena, candidates->item_count);
    HAPT_NEW(windows->crossings, arena, candidates->item_count);
    hapt_arena_init(&scratch);
    enum hapt_status status = choose(windows, memory, needed, arena, &scratch);
    for (int item = 0; status == HAPT_OK && item < candidates->item_count; item++) {
        if (windows->window_of[item] < 0) continue;
        hapt_arena_reset(&scratch);
        status = keep_crossings(windows, item, arena, &scratch);
    }
    hapt_arena_release(&scratch);
    return status;
}

static void close_window(struct windows *windows, struct window *window)
{
    if (!window->engine && !window->feed) return;
    const struct hapt_backend *backend = windows->options.backend;
    if (window->feed) backend->free(windows->options.device, window->feed);
    hapt_engine_destroy(window->engine);
    hapt_arena_release(&window->arena);
    window->feed = NULL;
    window->engine = NULL;
}

void windows_close(struct windows *windows)
{
    for (int w = 0; w < windows->count; w++) close_window(windows, &windows->window[w]);
}

/* Random values of the model's type, enough for the largest boundary of any of its ranges. */
static enum hapt_status fill_feed(struct windows *windows, struct window *window)
{
    const struct hapt_backend *backend = windows->options.backend;
    const enum hapt_dtype dtype = windows->candidates->model->dtype;
    const size_t count = window->feed_bytes / sizeof(float);
    float *value = malloc(window->feed_bytes);
    if (!value) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %zu bytes of samples", window->feed_bytes);
    uint64_t random = 2;
    for (size_t i = 0; i < count; i++) {
        value[i] = (float)(hapt_random_unit(&random) - 0.5);
        if (dtype != HAPT_F32) ((uint16_t *)value)[2 * i] = ((uint16_t *)value)[2 * i + 1];
    }
    struct hapt_queue *queue = backend->queue(windows->options.device, 0);
    const enum hapt_status status = backend->copy(queue, window->feed, value, window->feed_bytes),
                           done = backend->wait(backend->record(queue));
    free(value);
    return status != HAPT_OK ? status : done;
}

static size_t crossing_bytes(const struct window *window, const struct crossing *crossing)
{
    size_t bytes = 0;
    for (int k = 0; k < crossing->count; k++)
        bytes += (hapt_engine_tensor_bytes(window->engine, crossing->tensor[k]) + 63) / 64 * 64;
    return bytes;
}

static enum hapt_status reserve_feed(struct windows *windows, struct window *window)
{
    for (int item = 0; item < windows->candidates->item_count; item++) {
        if (windows->window_of[item] != (int)(window - windows->window)) continue;
        for (int k = 0; k < 3; k++) {
            const size_t bytes = crossing_bytes(window, &windows->crossings[item].list[k]);
            if (bytes > window->feed_bytes) window->feed_bytes = bytes;
        }
    }
    if (window->feed_bytes == 0) return HAPT_OK;
    const struct hapt_backend *backend = windows->options.backend;
    HAPT_TRY(backend->allocate(windows->options.device, 2 * window->feed_bytes, &window->feed));
    return fill_feed(windows, window);
}

/* Once through, so that every tensor of the slot holds numbers and every page is there. The first time on a device with
 * a clock of its own until it has left its idle state: such devices clock up under work. */
static enum hapt_status run_through(struct windows *windows, struct window *window)
{
    const double end = windows->options.backend->mark && !windows->warm ? hapt_time_s() + WARM_S : 0;
    do {
        HAPT_TRY(hapt_engine_forward(window->engine, 0, 0));
        HAPT_TRY(hapt_engine_backward(window->engine, 0, 0, 0));
    } while (hapt_time_s() < end);
    windows->warm = true;
    return HAPT_OK;
}

static enum hapt_status set_up_window(struct windows *windows, struct window *window)
{
    HAPT_TRY(candidates_program(windows->candidates, window->first, window->last, window->degree, &window->arena,
                                &window->program));
    HAPT_TRY(hapt_engine_create(window->program, &windows->options, &window->engine));
    HAPT_TRY(reserve_feed(windows, window));
    HAPT_TRY(samples_fill(windows->candidates->model, &windows->options, window->program, window->engine));
    HAPT_TRY(hapt_engine_begin_step(window->engine));
    return run_through(windows, window);
}

static enum hapt_status open_window(struct windows *windows, struct window *window)
{
    if (window->engine) return HAPT_OK;
    double open_bytes = window->bytes;
    for (int w = 0; w < windows->count; w++) open_bytes += windows->window[w].engine ? windows->window[w].bytes : 0;
    if (open_bytes > windows->limit_bytes) windows_close(windows);
    hapt_arena_init(&window->arena);
    windows->opened++;
    const enum hapt_status status = set_up_window(windows, window);
    if (status == HAPT_OK) return status;
    close_window(windows, window);
    hapt_arena_release(&window->arena);
    return status;
}

/* Copies between the feed and the places of a range's boundary tensors, as the engine does with transfer slots. */
static enum hapt_status move(struct windows *windows, struct window *window, const struct crossing *crossing, bool out)
{
    const struct hapt_backend *backend = windows->options.backend;
    struct hapt_queue *queue = backend->queue(windows->options.device, 0);
    char *buffer = (char *)window->feed + (out ? window->feed_bytes : 0);
    for (int k = 0; k < crossing->count; k++) {
        void *place = hapt_engine_tensor(window->engine, crossing->tensor[k], 0);
        const size_t bytes = hapt_engine_tensor_bytes(window->engine, crossing->tensor[k]);
        HAPT_TRY(backend->copy(queue, out ? buffer : place, out ? place : buffer, bytes));
        buffer += (bytes + 63) / 64 * 64;
    }
    return HAPT_OK;
}

/* Copies, seconds by the device's clock. */
static enum hapt_status time_move(struct windows *windows, struct window *window, const struct crossing *crossing,
                                  bool out, double *time_s)
{
    const struct hapt_backend *backend = windows->options.backend;
    struct hapt_queue *queue = backend->queue(windows->options.device, 0);
    struct hapt_event *from = backend->mark(queue);
    HAPT_TRY(move(windows, window, crossing, out));
    const double move_s = backend->seconds(from, backend->mark(queue));
    if (move_s > 0) *time_s += move_s;
    return backend->wait(backend->record(queue));
}

static enum hapt_status time_by_device(struct windows *windows, struct window *window,
                                       const struct crossings *crossings, const int op[2], double *forward_s,
                                       double *backward_s)
{
    double part_s;
    *forward_s = *backward_s = 0;
    HAPT_TRY(time_move(windows, window, &crossings->list[0], false, forward_s));
    HAPT_TRY(hapt_engine_time_part(window->engine, HAPT_SECTION_FORWARD, 0, op[0], op[1], hapt_time_s, &part_s));
    *forward_s += part_s;
    HAPT_TRY(time_move(windows, window, &crossings->list[1], false, backward_s));
    HAPT_TRY(hapt_engine_time_part(window->engine, HAPT_SECTION_BACKWARD, 0, op[0], op[1], hapt_time_s, &part_s));
    *backward_s += part_s;
    return time_move(windows, window, &crossings->list[2], true, backward_s);
}

enum hapt_status windows_time(struct windows *windows, int item, double *forward_s, double *backward_s)
{
    const struct candidates *candidates = windows->candidates;
    const int structure = item / candidates->degree_count;
    const int first_op = hapt_layers_first_op(candidates->layers, candidates->first[structure]);
    const int end_op = candidates->layers->end_op[candidates->last[structure]];
    struct window *window = &windows->window[windows->window_of[item]];
    const struct crossings *crossings = &windows->crossings[item];
    HAPT_TRY(open_window(windows, window));
    if (windows->options.backend->mark)
        return time_by_device(windows, window, crossings, (int[]){first_op, end_op}, forward_s, backward_s);
    const double start = clock_s(windows);
    HAPT_TRY(move(windows, window, &crossings->list[0], false));
    HAPT_TRY(hapt_engine_run_part(window->engine, HAPT_SECTION_FORWARD, 0, first_op, end_op));
    const double middle = clock_s(windows);
    HAPT_TRY(move(windows, window, &crossings->list[1], false));
    HAPT_TRY(hapt_engine_run_part(window->engine, HAPT_SECTION_BACKWARD, 0, first_op, end_op));
    HAPT_TRY(move(windows, window, &crossings->list[2], true));
    HAPT_TRY(windows->options.backend->wait(
        windows->options.backend->record(windows->options.backend->queue(windows->options.device, 0))));
    const double end = clock_s(windows);
    *forward_s = middle - start;
    *backward_s = end - middle;
    return HAPT_OK;
}

enum hapt_status windows_open(struct windows *windows, int w)
{
    return open_window(windows, &windows->window[w]);
}

enum hapt_status windows_time_steps(struct windows *windows, int w, double *forward_s, double *backward_s)
{
    struct window *window = &windows->window[w];
    hapt_engine_clock *clock = clock_of(windows);
    HAPT_TRY(open_window(windows, window));
    HAPT_TRY(hapt_engine_time_section(window->engine, HAPT_SECTION_FORWARD, 0, clock, forward_s));
    return hapt_engine_time_section(window->engine, HAPT_SECTION_BACKWARD, 0, clock, backward_s);
}

static int compare_doubles(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

enum hapt_status windows_time_update(struct windows *windows, int item, double s_per_element[2])
{
    enum { ROUNDS = 5 };
    struct window *window = &windows->window[windows->window_of[item]];
    HAPT_TRY(open_window(windows, window));
    const double elements = (double)hapt_engine_memory(window->engine)->trained_elements;
    const bool adamw = windows->options.state_count == 2;
    struct hapt_update update = {.optimizer = adamw ? HAPT_OPTIMIZER_ADAMW : HAPT_OPTIMIZER_SGD,
                                 .beta1 = 0.9,
                                 .beta2 = 0.95,
                                 .epsilon = 1e-8,
                                 .gradient_scale = 1,
                                 .momentum = windows->options.state_count == 1 ? 0.9 : 0};
    double sample[2][ROUNDS], sum, unused[2];
    for (update.step = 1; update.step <= ROUNDS; update.step++) {
        HAPT_TRY(windows_time(windows, item, &unused[0], &unused[1]));
        const double start = clock_s(windows);
        HAPT_TRY(hapt_engine_square_sum(window->engine, NULL, &sum));
        const double middle = clock_s(windows);
        HAPT_TRY(hapt_engine_update(window->engine, &update));
        const double behind = clock_s(windows);
        HAPT_TRY(hapt_engine_begin_step(window->engine));
        sample[0][update.step - 1] = behind - middle;
        sample[1][update.step - 1] = middle - start + clock_s(windows) - behind;
    }
    for (int part = 0; part < 2; part++) {
        qsort(sample[part], ROUNDS, sizeof(double), compare_doubles);
        s_per_element[part] = elements > 0 ? sample[part][ROUNDS / 2] / elements : 0;
    }
    return HAPT_OK;
}
