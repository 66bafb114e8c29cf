/* Optimizer state and master weights on the host: the update streams them through two halves of a window. */
#include "fixture.h"
#include "programs.h"

#include <pthread.h>

#include "hapt/engine.h"
#include "../../src/engine/engine_private.h"

/*
 * A back end whose queues for the state are as late as they may be: a copy takes place when an event behind it is
 * waited for. So a missing wait leaves old data, on the device or on the host.
 */
enum { LATE_QUEUES = 2, MOST_COPIES = 256, MOST_EVENTS = 4096 };

static struct {
    struct late_queue {
        int asked, done;
        struct {
            void *to;
            const void *from;
            size_t bytes;
        } copy[MOST_COPIES]; /* in turn */
    } queue[LATE_QUEUES];
    struct late_event {
        int queue, copies; /* complete when its queue has made so many copies */
    } event[MOST_EVENTS];
    int events;
} late;

/* The thread of updates on the host uses its queues, too. */
static pthread_mutex_t late_lock = PTHREAD_MUTEX_INITIALIZER;
static bool host_updates;   /* of all engines with state on the host */
static bool host_gradients; /* of all engines with weights there */
static bool splits;         /* backward passes are split */

static const struct hapt_backend *cpu(void)
{
    return hapt_backend_find("cpu");
}

/* 0 or 1; -1: another queue. */
static int late_index(const void *queue)
{
    for (int q = 0; q < LATE_QUEUES; q++)
        if (queue == &late.queue[q]) return q;
    return -1;
}

static struct hapt_queue *late_queue_of(struct hapt_device *device, int index)
{
    if (index == HAPT_QUEUE_STATE_OUT) return (struct hapt_queue *)&late.queue[0];
    return index == HAPT_QUEUE_STATE_IN ? (struct hapt_queue *)&late.queue[1] : cpu()->queue(device, index);
}

static enum hapt_status late_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    const int q = late_index(queue);
    if (q < 0) return cpu()->copy(queue, to, from, bytes);
    struct late_queue *its = &late.queue[q];
    pthread_mutex_lock(&late_lock);
    HAPT_ASSERT(its->asked - its->done < MOST_COPIES);
    its->copy[its->asked % MOST_COPIES].to = to;
    its->copy[its->asked % MOST_COPIES].from = from;
    its->copy[its->asked++ % MOST_COPIES].bytes = bytes;
    pthread_mutex_unlock(&late_lock);
    return HAPT_OK;
}

static struct hapt_event *late_record(struct hapt_queue *queue)
{
    const int q = late_index(queue);
    if (q < 0) return cpu()->record(queue);
    pthread_mutex_lock(&late_lock);
    struct late_event *event = &late.event[late.events++ % MOST_EVENTS];
    *event = (struct late_event){q, late.queue[q].asked};
    pthread_mutex_unlock(&late_lock);
    return (struct hapt_event *)event;
}

static enum hapt_status late_wait(struct hapt_event *event)
{
    const struct late_event *its = (const struct late_event *)event;
    if (its < late.event || its >= late.event + MOST_EVENTS) return cpu()->wait(event);
    struct late_queue *queue = &late.queue[its->queue];
    pthread_mutex_lock(&late_lock);
    for (; queue->done < its->copies; queue->done++)
        memcpy(queue->copy[queue->done % MOST_COPIES].to, queue->copy[queue->done % MOST_COPIES].from,
               queue->copy[queue->done % MOST_COPIES].bytes);
    pthread_mutex_unlock(&late_lock);
    return HAPT_OK;
}

static struct hapt_backend late_backend(void)
{
    struct hapt_backend backend = *cpu();
    backend.queue = late_queue_of;
    backend.copy = late_copy;
    backend.record = late_record;
    backend.wait = late_wait;
    return backend;
}

struct rig {
    struct hapt_program *program;
    struct hapt_engine *engine;
    struct hapt_device *device;
};

/* pace: byte/s of copies; 0: they are not slowed down. links: NULL: none. units: of weights on the host; 0: they are
 * on the device. */
static void open_any_rig(const struct hapt_graph *graph, const struct hapt_backend *backend, bool host_state,
                         double pace, const struct hapt_engine_links *links, int units, const struct hapt_unit *unit,
                         struct hapt_arena *arena, struct rig *rig)
{
    struct hapt_sharding *sharding;
    CHECK_OK(hapt_sharding_data_parallel(graph, 1, 1, arena, &sharding));
    if (splits) CHECK_OK(hapt_sharding_split(sharding, arena, &sharding));
    CHECK_OK(hapt_program_build(sharding, 0, graph->forward_count, arena, &rig->program));
    CHECK_OK(cpu()->open(0, 1, 0, &rig->device));
    const struct hapt_engine_options options = {.backend = backend,
                                                .device = rig->device,
                                                .threads = 1,
                                                .state_count = 2,
                                                .slots = 1,
                                                .host_state = host_state,
                                                .host_update = host_state && host_updates,
                                                .weight_unit_count = units,
                                                .weight_unit = unit,
                                                .gradient_unit_count = host_gradients ? units : 0,
                                                .gradient_unit = unit,
                                                .host_pace = pace,
                                                .host_timeout_s = 60,
                                                .links = links ? *links : (struct hapt_engine_links){0}};
    CHECK_OK(hapt_engine_create(rig->program, &options, &rig->engine));
}

static void open_linked_rig(const struct hapt_graph *graph, const struct hapt_backend *backend, bool host_state,
                            double pace, const struct hapt_engine_links *links, struct hapt_arena *arena,
                            struct rig *rig)
{
    open_any_rig(graph, backend, host_state, pace, links, 0, NULL, arena, rig);
}

static void open_rig(const struct hapt_graph *graph, const struct hapt_backend *backend, bool host_state, double pace,
                     struct hapt_arena *arena, struct rig *rig)
{
    open_linked_rig(graph, backend, host_state, pace, NULL, arena, rig);
}

static struct hapt_update update_of(int step)
{
    return (struct hapt_update){.optimizer = HAPT_OPTIMIZER_ADAMW,
                                .learning_rate = 0.01,
                                .beta1 = 0.9,
                                .beta2 = 0.95,
                                .epsilon = 1e-8,
                                .weight_decay = 0.1,
                                .gradient_scale = 0.5,
                                .step = step};
}

/* Weights, then updates with made-up gradients. */
static void train(const struct hapt_graph *graph, struct rig *rig)
{
    for (int t = 0; t < graph->tensor_count; t++) {
        const int64_t count = hapt_tensor_elements(&graph->tensor[t]);
        float *value = malloc((size_t)count * sizeof *value);
        uint64_t random = (uint64_t)t + 1;
        for (int64_t i = 0; i < count; i++) value[i] = (float)hapt_random_unit(&random);
        if (graph->tensor[t].kind == HAPT_TENSOR_PARAMETER) CHECK_OK(hapt_engine_set(rig->engine, t, -1, value));
        free(value);
    }
    for (int step = 1; step <= 3; step++) {
        const struct hapt_update update = update_of(step);
        CHECK_OK(hapt_engine_begin_step(rig->engine));
        for (int t = 0; t < graph->tensor_count; t++) {
            const int gradient = graph->tensor[t].gradient;
            if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || gradient < 0) continue;
            float *value = hapt_engine_tensor(rig->engine, gradient, 0);
            uint64_t random = (uint64_t)(100 * t + step);
            for (int64_t i = 0; i < hapt_tensor_elements(&graph->tensor[t]); i++)
                value[i] = (float)(hapt_random_unit(&random) - 0.5);
        }
        CHECK_OK(hapt_engine_update(rig->engine, 0, 1, &update));
    }
}

/* Masters, states and the weights of the kernels. */
static void compare(const struct hapt_graph *graph, struct rig *a, struct rig *b)
{
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        const size_t bytes = (size_t)hapt_tensor_elements(tensor) * sizeof(float);
        float *x = calloc(1, bytes), *y = calloc(1, bytes);
        size_t weight[2];
        for (int state = -1; state < 2 && tensor->kind == HAPT_TENSOR_PARAMETER; state++) {
            CHECK_OK(hapt_engine_get(a->engine, t, state, x));
            CHECK_OK(hapt_engine_get(b->engine, t, state, y));
            CHECK_MESSAGE(!memcmp(x, y, bytes), "%s (state %d) differs", tensor->name, state);
            CHECK(!tensor->trainable || x[0] != 0);
        }
        if (tensor->kind == HAPT_TENSOR_PARAMETER) {
            CHECK_OK(hapt_engine_get_weight(a->engine, t, x, &weight[0]));
            CHECK_OK(hapt_engine_get_weight(b->engine, t, y, &weight[1]));
            CHECK_MESSAGE(weight[0] == weight[1] && !memcmp(x, y, weight[0]), "%s as kernels read it", tensor->name);
        }
        free(x);
        free(y);
    }
}

static void late_copies_change_no_bit(void)
{
    const struct hapt_backend backend = late_backend();
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct hapt_arena arena;
        struct rig here, away;
        hapt_arena_init(&arena);
        const struct hapt_graph *graph =
            fixture_gpt(&arena, (struct fixture_gpt){3, 32, 2, 8, 64, 2, false, bf16})->graph;
        open_rig(graph, cpu(), false, 0, &arena, &here);
        open_rig(graph, &backend, true, 0, &arena, &away);
        const struct hapt_memory_plan *plan = hapt_engine_memory(away.engine);
        CHECK(plan->state_space == HAPT_SPACE_HOST && (plan->master_space == HAPT_SPACE_HOST) == bf16);
        CHECK(plan->window_elements * 4 < plan->state_elements);
        const int before = late.queue[1].asked, out = late.queue[0].asked;
        train(graph, &here);
        train(graph, &away);
        /* Three steps; each copies at least four halves of windows in, of two or three blocks. If the host updates:
         * gradients to it, weights back, and in fp32 weights both ways. */
        CHECK(plan->host_update == host_updates);
        CHECK(late.queue[1].asked - before >= 3 * 4 * (host_updates ? 1 : 2));
        CHECK(late.queue[0].asked - out == (host_updates && !bf16 ? 2 : 1) * (late.queue[1].asked - before));
        for (int q = 0; q < LATE_QUEUES; q++) CHECK(late.queue[q].done == late.queue[q].asked);
        compare(graph, &here, &away);
        hapt_engine_destroy(here.engine);
        hapt_engine_destroy(away.engine);
        cpu()->close(here.device);
        cpu()->close(away.device);
        hapt_arena_release(&arena);
    }
}

static double norms[4]; /* of the last steps */
static int norm_count;

static void feed(const struct hapt_graph *graph, struct rig *rig, int step)
{
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        void *value = hapt_engine_tensor(rig->engine, t, 0);
        uint64_t random = (uint64_t)(100 * t + step);
        if (tensor->kind != HAPT_TENSOR_INPUT) continue;
        for (int64_t i = 0; i < hapt_tensor_elements(tensor); i++) {
            if (tensor->role == HAPT_ROLE_LOSS_SCALE)
                ((float *)value)[i] = 0.1f;
            else
                ((int32_t *)value)[i] = (int32_t)(hapt_random_next(&random) % 64);
        }
    }
}

/* The sum of squares against one over the gradients themselves, on the device or on the host. */
static void check_norm(const struct hapt_graph *graph, struct rig *rig)
{
    double sum, wanted = 0;
    CHECK_OK(hapt_engine_square_sum(rig->engine, NULL, &sum));
    CHECK_OK(hapt_engine_gradients_arrive(rig->engine));
    for (int t = 0; t < graph->tensor_count; t++) {
        const int gradient = graph->tensor[t].gradient;
        if (graph->tensor[t].kind != HAPT_TENSOR_PARAMETER || gradient < 0) continue;
        const float *value = hapt_engine_tensor(rig->engine, gradient, 0);
        for (int64_t i = 0; i < hapt_tensor_elements(&graph->tensor[t]); i++) wanted += (double)value[i] * value[i];
    }
    CHECK_MESSAGE(wanted > 0 && fabs(sum / wanted - 1) < 1e-6, "sum of squares %g, not %g", sum, wanted);
    norms[norm_count++ % 4] = sum;
}

/* Steps of real passes. Every part of an update that is deferred may run in its UPDATE, while the stage waits, or in
 * the next forward pass: `eager` says how many parts run at once; -1: the update is not deferred. Returns the losses.
 */
static void run_steps(const struct hapt_graph *graph, struct rig *rig, int eager, float loss[4])
{
    for (int step = 1; step <= 4; step++) {
        const struct hapt_update update = update_of(step);
        CHECK_OK(hapt_engine_begin_step(rig->engine));
        for (int microbatch = 0; microbatch < 2; microbatch++) {
            feed(graph, rig, 10 * step + microbatch);
            CHECK_OK(hapt_engine_forward(rig->engine, 0, -1));
            CHECK(!hapt_engine_is_updating(rig->engine));
            CHECK_OK(hapt_engine_backward(rig->engine, 0, -1, -1));
            if (splits) CHECK_OK(hapt_engine_weight(rig->engine, 0, 0));
        }
        check_norm(graph, rig);
        memcpy(&loss[step - 1], hapt_engine_tensor(rig->engine, graph->loss, 0), sizeof(float));
        if (eager < 0) {
            CHECK_OK(hapt_engine_update(rig->engine, 0, 1, &update));
            continue;
        }
        CHECK_OK(hapt_engine_defer_update(rig->engine, &update));
        CHECK(hapt_engine_is_updating(rig->engine));
        for (int part = 0; part < eager; part++) CHECK_OK(hapt_engine_continue_update(rig->engine));
    }
}

/* AutoHete's priority: updates in the order in which the next forward pass needs them, and in that pass. */
static void deferred_updates_change_no_bit(void)
{
    const struct hapt_backend backend = late_backend();
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int tied = 0; tied < 2; tied++) {
            struct hapt_arena arena;
            struct rig here, away;
            float loss[2][4];
            hapt_arena_init(&arena);
            const struct hapt_graph *graph =
                fixture_gpt(&arena, (struct fixture_gpt){3, 32, 2, 8, 64, 2, tied, bf16})->graph;
            open_rig(graph, cpu(), false, 0, &arena, &here);
            CHECK(!hapt_engine_defers(here.engine));
            train(graph, &here); /* weights, and states that are not 0 */
            run_steps(graph, &here, -1, loss[0]);
            CHECK(loss[0][0] > 0 && loss[0][0] != loss[0][3]);
            for (int eager = -1; eager < 1000; eager += eager < 4 ? 1 : 400) {
                open_rig(graph, &backend, true, 0, &arena, &away);
                CHECK(hapt_engine_defers(away.engine));
                train(graph, &away);
                run_steps(graph, &away, eager, loss[1]);
                CHECK_MESSAGE(!memcmp(loss[0], loss[1], sizeof loss[0]), "%d parts at once: other losses", eager);
                compare(graph, &here, &away);
                CHECK(!hapt_engine_is_updating(away.engine)); /* reading has settled it */
                hapt_engine_destroy(away.engine);
                cpu()->close(away.device);
            }
            hapt_engine_destroy(here.engine);
            cpu()->close(here.device);
            hapt_arena_release(&arena);
        }
}

/* Units of `size` operators, the last one smaller. */
static int units_of(const struct hapt_graph *graph, int size, struct hapt_unit unit[])
{
    int count = 0;
    for (int first = 0; first < graph->forward_count; first += size)
        unit[count++] = (struct hapt_unit){
            first, first + size < graph->forward_count ? first + size : graph->forward_count, false, 0};
    return count;
}

/* Weights on the host pass through two places, unit by unit, and gradients through three: the same losses, norms,
 * weights and states, with copies as late as events allow, and with paced ones. Tied weights are in two units. */
static void weights_on_the_host_change_no_bit(void)
{
    const struct hapt_backend backend = late_backend();
    for (int bf16 = 0; bf16 < 2; bf16++)
        for (int tied = 0; tied < 2; tied++) {
            struct hapt_arena arena;
            struct rig here, away;
            float loss[2][4];
            hapt_arena_init(&arena);
            const struct hapt_graph *graph =
                fixture_gpt(&arena, (struct fixture_gpt){4, 32, 2, 8, 64, 2, tied, bf16})->graph;
            struct hapt_unit *unit = hapt_arena_alloc(&arena, (size_t)graph->forward_count, sizeof *unit);
            open_rig(graph, cpu(), false, 0, &arena, &here);
            train(graph, &here);
            run_steps(graph, &here, -1, loss[0]);
            double norm[4];
            memcpy(norm, norms, sizeof norm);
            const int all = graph->forward_count, sizes[] = {1, 3, 5, 7, 9, (all + 2) / 3, (all + 1) / 2, all};
            for (int k = 0; k < 8; k++) { /* down to one unit */
                const int size = sizes[k];
                const bool paced = size == 7;
                open_any_rig(graph, paced ? cpu() : &backend, true, paced ? 5e8 : 0, NULL, units_of(graph, size, unit),
                             unit, &arena, &away);
                const struct hapt_memory_plan *plan = hapt_engine_memory(away.engine);
                CHECK(plan->host_weights && plan->host_gradients == host_gradients);
                CHECK(!hapt_engine_defers(away.engine));
                if (size == 9) CHECK(plan->parameter_bytes < hapt_engine_memory(here.engine)->parameter_bytes * 2 / 3);
                train(graph, &away);
                run_steps(graph, &away, -1, loss[1]);
                CHECK_MESSAGE(!memcmp(loss[0], loss[1], sizeof loss[0]), "units of %d operators: other losses", size);
                CHECK_MESSAGE(!memcmp(norm, norms, sizeof norm), "units of %d operators: other norms", size);
                compare(graph, &here, &away);
                hapt_engine_destroy(away.engine);
                cpu()->close(away.device);
            }
            hapt_engine_destroy(here.engine);
            cpu()->close(here.device);
            hapt_arena_release(&arena);
        }
}

/* The places of a forward pass where it updates. */
struct pauses {
    int count, copies[100]; /* copies to the device that were begun before */
    double share[100];
    int updates; /* on the device */
};

static void pause(void *context, double share)
{
    struct pauses *pauses = context;
    pthread_mutex_lock(&late_lock);
    if (pauses->count < 100) pauses->copies[pauses->count] = late.queue[1].asked;
    if (pauses->count < 100) pauses->share[pauses->count] = share;
    pthread_mutex_unlock(&late_lock);
    pauses->count++;
}

static void go_on(void *context)
{
    (void)context;
}

static void count_update(void *context, double cpu_s)
{
    struct pauses *pauses = context;
    CHECK(cpu_s >= 0);
    pauses->updates++;
}

/* A forward pass updates a part of the weights right before the first operator that reads one of them, so it does so at
 * several places, with few copies between them. */
static void passes_update_what_they_need(void)
{
    struct hapt_arena arena;
    struct rig away;
    struct pauses pauses = {0};
    const struct hapt_backend backend = late_backend();
    hapt_arena_init(&arena);
    const struct hapt_graph *graph = fixture_gpt(&arena, (struct fixture_gpt){6, 32, 2, 8, 64, 2, false, false})->graph;
    const struct hapt_engine_links links = {
        .context = &pauses, .leave = pause, .resume = go_on, .updated = count_update};
    open_linked_rig(graph, &backend, true, 0, &links, &arena, &away);
    train(graph, &away);
    const struct hapt_update update = {.optimizer = HAPT_OPTIMIZER_ADAMW, .epsilon = 1, .gradient_scale = 1, .step = 9};
    feed(graph, &away, 1);
    CHECK_OK(hapt_engine_defer_update(away.engine, &update));
    pthread_mutex_lock(&late_lock);
    const int begun = late.queue[1].asked, before = pauses.updates;
    pthread_mutex_unlock(&late_lock);
    CHECK_OK(hapt_engine_forward(away.engine, 0, -1));
    CHECK(!hapt_engine_is_updating(away.engine));
    const int copies = late.queue[1].asked - begun;
    CHECK_MESSAGE(pauses.count >= 6 && pauses.count <= 100, "%d places", pauses.count);
    CHECK((pauses.updates > before) == !host_updates);
    /* The first weights are those of the embedding. The head is a small part of six blocks. */
    CHECK(pauses.share[0] == 0 && pauses.share[pauses.count - 1] > 0.75 && pauses.share[pauses.count - 1] <= 1);
    for (int k = 1; k < pauses.count; k++) CHECK(pauses.share[k] >= pauses.share[k - 1]);
    for (int k = 1; k < pauses.count && !host_updates; k++) /* the host's thread goes on by itself */
        CHECK_MESSAGE(pauses.copies[k] - pauses.copies[k - 1] <= copies / 2, "place %d: %d of %d copies at once", k,
                      pauses.copies[k] - pauses.copies[k - 1], copies);
    CHECK_OK(hapt_engine_continue_update(away.engine)); /* does nothing */
    CHECK_OK(hapt_engine_defer_update(away.engine, &update));
    CHECK_OK(hapt_engine_settle(away.engine));
    CHECK(!hapt_engine_is_updating(away.engine));
    CHECK((hapt_engine_update_kernels_s(away.engine) > 0) == !host_updates); /* of the device */
    hapt_engine_destroy(away.engine);
    cpu()->close(away.device);
    hapt_arena_release(&arena);
}

/* A thread copies both directions side by side, and is never faster than the cluster file says. */
/* Many small copies that were submitted together take as long as one of all their bytes: the thread is late for each of
 * them, but these delays do not add up. Never less. */
static void late_wakeups_do_not_add_up(void)
{
    enum { COPIES = 4000, BYTES = 1000, TRIES = 8, AT_ONCE = 50 };
    const double bandwidth = 2e7, one_s = (double)COPIES * BYTES / bandwidth;
    double least = INFINITY;
    char from[BYTES], to[BYTES];
    memset(from, 7, sizeof from);
    for (int k = 0; k < TRIES && least > 1.3; k++) {
        struct state_copies *copies;
        CHECK_OK(state_copies_create(bandwidth, 60, &copies));
        const double start_s = hapt_time_s();
        for (int copy = 0; copy < COPIES; copy++) {
            state_copies_submit(copies, STATE_IN, "wte.weight", to, from, BYTES);
            if (copy >= AT_ONCE) state_copies_wait(copies, STATE_IN, copy + 1 - AT_ONCE);
        }
        state_copies_wait(copies, STATE_IN, state_copies_mark(copies, STATE_IN));
        const double time_s = hapt_time_s() - start_s;
        CHECK_MESSAGE(time_s >= 0.99 * one_s, "%g s for copies of %g s", time_s, one_s);
        least = fmin(least, time_s / one_s);
        state_copies_destroy(copies);
    }
    CHECK(!memcmp(from, to, sizeof from));
    CHECK_MESSAGE(least < 1.3, "at best %g times as long as the bytes take", least);
}

static void paced_copies_change_no_bit(void)
{
    enum { STEPS = 3, TRIES = 5 };
    double least = INFINITY; /* of the time that one direction takes */
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_graph *graph = fixture_gpt(&arena, (struct fixture_gpt){3, 32, 2, 8, 64, 2, false, true})->graph;
    for (int k = 0; k < TRIES && least > 1.5; k++) {
        struct rig here, away;
        struct hapt_memory_plan *plan;
        open_rig(graph, cpu(), false, 0, &arena, &here);
        const struct hapt_memory_options options = {.slots = 1, .state_count = 2, .host_state = true};
        CHECK_OK(hapt_memory_plan(here.program, &options, &arena, &plan));
        /* states and masters, or gradients */
        const size_t bytes = host_updates ? plan->trained_elements * sizeof(float) : plan->host_bytes;
        const double one_s = 0.1, pace = (double)bytes / one_s;
        open_rig(graph, cpu(), true, pace, &arena, &away);
        train(graph, &here);
        const double start_s = hapt_time_s();
        train(graph, &away);
        const double time_s = hapt_time_s() - start_s;
        CHECK_MESSAGE(time_s >= 0.99 * STEPS * one_s, "%g s for copies of %g s", time_s, STEPS * one_s);
        least = fmin(least, time_s / (STEPS * one_s));
        compare(graph, &here, &away);
        hapt_engine_destroy(here.engine);
        hapt_engine_destroy(away.engine);
        cpu()->close(here.device);
        cpu()->close(away.device);
    }
    CHECK_MESSAGE(least < 1.5, "at best %g times as long as one direction", least);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(late_wakeups_do_not_add_up);
    for (int on_host = 0; on_host < 2; on_host++) {
        host_updates = on_host;
        RUN(late_copies_change_no_bit);
        RUN(paced_copies_change_no_bit);
        RUN(deferred_updates_change_no_bit);
        RUN(passes_update_what_they_need);
        RUN(weights_on_the_host_change_no_bit);
    }
    host_gradients = true;
    RUN(weights_on_the_host_change_no_bit);
    splits = true;
    RUN(weights_on_the_host_change_no_bit);
    return test_finish();
}
