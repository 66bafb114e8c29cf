/* Replays (engine_replay.c) give the bits of the steps, for all changes between steps. A failed capture changes
 * nothing. Times of a section. */
#include "kernels.h"
#include "programs.h"

#include "fixture.h"
#include "hapt/engine.h"
#include "hapt/env.h"
#include "hapt/team.h"

enum { SLOTS = 2, MICROBATCHES = 5, STEPS = 4, VALUES = 4096 };

static const struct hapt_model *model;
/* Units of weights on the host; none: all are on the device. */
static struct hapt_unit unit[64];
static int unit_count;
static bool host_updates, host_gradients; /* of weights on the host */

struct rig {
    struct hapt_arena arena;
    struct hapt_program *program;
    struct hapt_engine *engine;
};

/* A trial run must leave no results: the loss of logits that are 0 would not be 0. */
static void warm_up(struct rig *rig)
{
    float loss = NAN;
    CHECK_OK(hapt_engine_warm_up(rig->engine));
    mirror_copy(test_backend->queue(test_device, 0), &loss, hapt_engine_tensor(rig->engine, model->graph->loss, 0),
                sizeof loss);
    CHECK(loss == 0);
}

/* `graphs`: value of the environment variable, NULL: unset; `warm`: its kernels have run before. */
static void rig_init(struct rig *rig, const char *graphs, bool warm)
{
    if (graphs)
        setenv("HAPT_CUDA_GRAPHS", graphs, 1);
    else
        unsetenv("HAPT_CUDA_GRAPHS");
    const struct hapt_engine_options options = {.backend = test_backend,
                                                .device = test_device,
                                                .threads = 1,
                                                .state_count = 2,
                                                .slots = SLOTS,
                                                .host_state = unit_count > 0,
                                                .host_update = host_updates,
                                                .gradient_unit_count = host_gradients ? unit_count : 0,
                                                .gradient_unit = unit,
                                                .weight_unit_count = unit_count,
                                                .weight_unit = unit};
    hapt_arena_init(&rig->arena);
    CHECK_OK(program_data_parallel(model->graph, 0, model->graph->forward_count, 1, 1, &rig->arena, &rig->program));
    CHECK_OK(hapt_engine_create(rig->program, &options, &rig->engine));
    if (warm) warm_up(rig);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        float *value = malloc((size_t)count * sizeof *value);
        uint64_t random = hapt_hash(7, tensor->name, strlen(tensor->name));
        for (int64_t i = 0; i < count; i++)
            value[i] = (float)((tensor->init == HAPT_INIT_ONE ? 1.0 : 0.0) + 0.3 * (hapt_random_unit(&random) - 0.5));
        CHECK_OK(hapt_engine_set(rig->engine, t, -1, value));
        free(value);
    }
}

static void rig_release(struct rig *rig)
{
    hapt_engine_destroy(rig->engine);
    hapt_arena_release(&rig->arena);
}

static void feed(struct rig *rig, int batch, int slot)
{
    struct hapt_queue *queue = test_backend->queue(test_device, 0);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        int32_t value[VALUES];
        const float scale = 1.0f / 64;
        if (tensor->kind != HAPT_TENSOR_INPUT) continue;
        uint64_t random = (uint64_t)(100 * batch + (int)tensor->role);
        const size_t bytes = hapt_engine_tensor_bytes(rig->engine, t);
        CHECK(bytes <= sizeof value);
        for (size_t i = 0; i < bytes / sizeof *value; i++)
            value[i] = (int32_t)(hapt_random_next(&random) % (uint64_t)model->vocab);
        const bool scales = tensor->role == HAPT_ROLE_LOSS_SCALE;
        mirror_copy(queue, hapt_engine_tensor(rig->engine, t, slot), scales ? (const void *)&scale : value, bytes);
    }
}

/* Losses of all microbatches, square sums of all steps, and the final weights. */
struct outcome {
    float loss[STEPS][MICROBATCHES];
    double squares[STEPS];
    float *weight;
    size_t weights;
};

static void forward(struct rig *rig, int step, int microbatch, struct outcome *outcome)
{
    const int slot = microbatch % SLOTS;
    feed(rig, step * MICROBATCHES + microbatch, slot);
    CHECK_OK(hapt_engine_forward(rig->engine, slot, -1));
    mirror_copy(test_backend->queue(test_device, 0), &outcome->loss[step][microbatch],
                hapt_engine_tensor(rig->engine, model->graph->loss, slot), sizeof(float));
}

/* Two microbatches in flight. The learning rate and its factor change at each step. */
static void train(struct rig *rig, struct outcome *outcome)
{
    memset(outcome, 0, sizeof *outcome);
    for (int step = 0; step < STEPS; step++) {
        CHECK_OK(hapt_engine_begin_step(rig->engine));
        forward(rig, step, 0, outcome);
        for (int m = 1; m <= MICROBATCHES; m++) {
            if (m < MICROBATCHES) forward(rig, step, m, outcome);
            CHECK_OK(hapt_engine_backward(rig->engine, (m - 1) % SLOTS, -1, -1));
        }
        CHECK_OK(hapt_engine_square_sum(rig->engine, NULL, &outcome->squares[step]));
        const struct hapt_update update = {.optimizer = HAPT_OPTIMIZER_ADAMW,
                                           .learning_rate = 1e-2 / (1 + step),
                                           .beta1 = 0.9,
                                           .beta2 = 0.95,
                                           .epsilon = 1e-8,
                                           .weight_decay = 0.1,
                                           .gradient_scale = step % 2 ? 0.5 : 1,
                                           .step = step + 1};
        CHECK_OK(hapt_engine_update(rig->engine, 0, 1, &update));
    }
    for (int t = 0; t < model->graph->tensor_count; t++) {
        if (model->graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        const size_t count = (size_t)hapt_tensor_elements(&model->graph->tensor[t]);
        outcome->weight = realloc(outcome->weight, (outcome->weights + count) * sizeof(float));
        CHECK_OK(hapt_engine_get(rig->engine, t, -1, outcome->weight + outcome->weights));
        outcome->weights += count;
    }
}

static void compare(const struct outcome *a, const struct outcome *b, const char *what)
{
    CHECK_MESSAGE(!memcmp(a->loss, b->loss, sizeof a->loss), "%s: other losses", what);
    CHECK_MESSAGE(!memcmp(a->squares, b->squares, sizeof a->squares), "%s: other square sums", what);
    CHECK_MESSAGE(a->weights == b->weights && !memcmp(a->weight, b->weight, a->weights * sizeof(float)),
                  "%s: other weights", what);
}

/* The message of a run about its replays. */
static void run(const char *graphs, bool warm, struct outcome *outcome, char text[HAPT_ENGINE_REPLAY_CHARS],
                int *trial_runs)
{
    struct rig rig;
    rig_init(&rig, graphs, warm);
    *trial_runs = hapt_engine_trial_runs(rig.engine);
    train(&rig, outcome);
    hapt_engine_describe_replays(rig.engine, text);
    rig_release(&rig);
}

/* With weights on the host, a replay ends where the weights of another unit are needed. */
static void compare_host_weights(const struct outcome *plain)
{
    static const char *const graphs[] = {"0", "1", NULL};
    const int operators = model->graph->forward_count, size = operators / 40 + 5;
    for (int first = 0; first < operators; first += size)
        unit[unit_count++] = (struct hapt_unit){first, first + size < operators ? first + size : operators, false, 0};
    for (int k = 0; k < 3; k++) {
        struct outcome away;
        char text[HAPT_ENGINE_REPLAY_CHARS];
        int runs;
        run(graphs[k], false, &away, text, &runs);
        compare(plain, &away, "weights on the host");
        CHECK_MESSAGE(k != 1 || !test_backend->capture || atoi(text) > 4, "it says: %s", text);
        free(away.weight);
    }
    /* the host's updates have other bits than the device's */
    struct outcome updated, away;
    char text[HAPT_ENGINE_REPLAY_CHARS];
    int runs;
    host_updates = true;
    run("0", false, &updated, text, &runs);
    host_gradients = true;
    for (int k = 0; k < 4; k++) {
        run(graphs[k % 3], k == 3, &away, text, &runs);
        compare(&updated, &away, "gradients on the host");
        CHECK_MESSAGE(k != 1 || !test_backend->capture || atoi(text) > 4, "it says: %s", text);
        free(away.weight);
    }
    free(updated.weight);
    host_updates = host_gradients = false;
    unit_count = 0;
}

/* `all`: also trials and failures. */
static void bits(bool all)
{
    struct outcome plain, replayed, warmed, tried, failing;
    char text[HAPT_ENGINE_REPLAY_CHARS], warm_text[HAPT_ENGINE_REPLAY_CHARS];
    int runs;
    run("0", false, &plain, text, &runs);
    CHECK(text[0] == '\0' && runs == 1);
    CHECK(plain.loss[0][0] > 1 && plain.loss[0][0] != plain.loss[0][1] && plain.squares[0] > 0 &&
          plain.loss[STEPS - 1][0] != plain.loss[0][0]);
    run("1", false, &replayed, text, &runs);
    compare(&plain, &replayed, "replays");
    run("1", true, &warmed, warm_text, &runs);
    compare(&plain, &warmed, "replays of kernels that ran before");
    CHECK(!strcmp(text, warm_text));
    CHECK_MESSAGE(!strcmp(text, test_backend->capture ? "2 of 2 runs of kernels replayed as graphs" : ""),
                  "it says: %s", text);
    free(replayed.weight), free(warmed.weight);
    if (!all) {
        free(plain.weight);
        return;
    }
    run(NULL, false, &tried, text, &runs);
    compare(&plain, &tried, "replays that are tried");
    CHECK(runs == (test_backend->capture ? 8 : 1) && 2 * runs <= STEPS * MICROBATCHES);
    CHECK_MESSAGE(!test_backend->capture || strstr(text, " of 2 runs of kernels"), "it says: %s", text);
    setenv("HAPT_HOST_CAPTURE", "0", 1); /* of tests/gpu/host */
    run("1", false, &failing, text, &runs);
    unsetenv("HAPT_HOST_CAPTURE");
    compare(&plain, &failing, "captures that fail");
    CHECK(hapt_fail_message()[0] == '\0');
    compare_host_weights(&plain);
    free(plain.weight), free(tried.weight), free(failing.weight);
}

/* A synchronisation during a capture invalidates the capture, and nothing else. */
static void spoiled_capture(void)
{
    struct hapt_queue *queue = test_backend->queue(test_device, 0);
    float value = 3, back = 0;
    void *place = NULL;
    if (!test_backend->capture) return;
    CHECK_OK(test_backend->allocate(test_device, sizeof value, &place));
    CHECK(test_backend->capture(queue));
    CHECK(test_backend->wait(test_backend->record(queue)) != HAPT_OK);
    CHECK(test_backend->capture_end(queue) == NULL);
    hapt_fail_reset();
    mirror_copy(queue, place, &value, sizeof value);
    mirror_copy(queue, &back, place, sizeof back);
    CHECK(back == value);
    CHECK(test_backend->capture(queue));
    struct hapt_replay *empty = test_backend->capture_end(queue);
    if (empty) {
        test_backend->replay(empty, queue);
        CHECK_OK(test_backend->wait(test_backend->record(queue)));
        test_backend->replay_destroy(empty);
    }
    test_backend->free(test_device, place);
}

static double shortest(double a, double b)
{
    return b < a ? b : a;
}

/* The sum of all steps compared with the section. They differ by the cost of time stamps between the short kernels of a
 * small model, and by the time for which the device waits for its host in the section. */
static void section_times(enum hapt_section section)
{
    enum { ROUNDS = 5, MOST = 256 };
    struct rig rig;
    rig_init(&rig, "0", false);
    feed(&rig, 0, 0);
    const int steps = rig.program->step_count[section];
    double sum_s = HUGE_VAL, part_s = HUGE_VAL, one_s, step_s[MOST];
    CHECK(steps <= MOST);
    CHECK_OK(hapt_engine_forward(rig.engine, 0, -1));
    CHECK_OK(hapt_engine_backward(rig.engine, 0, -1, -1));
    for (int round = 0; round < ROUNDS; round++) {
        double all_s = 0;
        CHECK_OK(hapt_engine_time_section(rig.engine, section, 0, hapt_time_s, step_s));
        for (int s = 0; s < steps; s++) {
            CHECK(isfinite(step_s[s]) && step_s[s] >= 0);
            all_s += step_s[s];
        }
        sum_s = shortest(sum_s, all_s);
        if (!test_backend->timestamp) continue;
        CHECK_OK(hapt_engine_time_part(rig.engine, section, 0, 0, model->graph->forward_count, hapt_time_s, &one_s));
        CHECK(isfinite(one_s) && one_s > 0);
        part_s = shortest(part_s, one_s);
    }
    CHECK(sum_s > 0);
    if (test_backend->timestamp)
        CHECK_MESSAGE(sum_s > 0.1 * part_s && sum_s < 4 * part_s, "%g s of steps in %g s", sum_s, part_s);
    setenv("HAPT_CUDA_GRAPHS", "1", 1);
    if (test_backend->timestamp) {
        CHECK_OK(hapt_engine_time_part(rig.engine, section, 0, 0, model->graph->forward_count, hapt_time_s, &one_s));
        CHECK_MESSAGE(one_s > 0.05 * part_s && one_s < 20 * part_s, "a replay takes %g s, its steps %g", one_s, part_s);
    }
    rig_release(&rig);
}

/* A slowed device ends no earlier than slowdown times its own time, by its own clock. */
static void stretches(void)
{
    enum { ROUNDS = 3 };
    struct hapt_team team = {.slowdown = 4, .microbatch = 0};
    struct rig rig;
    rig_init(&rig, NULL, false);
    feed(&rig, 0, 0);
    hapt_team_clock(&team, test_backend, test_device);
    CHECK((team.clock != NULL) == (test_backend->timestamp != NULL));
    for (int round = 0; round < ROUNDS; round++) {
        const struct hapt_team_times before = team.times;
        const double start_s = hapt_time_s();
        hapt_team_stretch_begin(&team);
        CHECK_OK(hapt_engine_forward(rig.engine, 0, -1));
        const double took_s = hapt_time_s() - start_s;
        hapt_team_stretch_end(&team);
        const double device_s = team.times.device_s - before.device_s;
        CHECK_MESSAGE(device_s > 0 && hapt_time_s() - start_s >= device_s, "4 x %g s end behind %g s", 0.25 * device_s,
                      hapt_time_s() - start_s);
        if (team.clock)
            CHECK_MESSAGE(device_s >= 4 * 0.2 * took_s, "%g s of %g s are the device's", 0.25 * device_s, took_s);
    }
    rig_release(&rig);
}

int main(int argc, char **argv)
{
    struct hapt_arena arena;
    kernels_init(&argc, &argv);
    hapt_arena_init(&arena);
    model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, false});
    bits(true);
    model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 24, 4, false, true});
    bits(false);
    spoiled_capture();
    section_times(HAPT_SECTION_FORWARD);
    section_times(HAPT_SECTION_BACKWARD);
    stretches();
    hapt_arena_release(&arena);
    return kernels_finish();
}
