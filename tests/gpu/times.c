/*
 * Times each kind of operator in a training step of a model, by the device's clock: `times gpt --layers 12 ...`
 * (options of hapt model). Prints one line per operator: its name, its calls per microbatch, and milliseconds per
 * microbatch. The last line is the update of a step. Each time is the least of some rounds.
 */
#include "hapt/device.h"
#include "hapt/engine.h"
#include "hapt/model.h"
#include "programs.h"
#include "test.h"

enum { ROUNDS = 5, KINDS = 128, WORDS = 64 };

static struct kind {
    const char *name;
    int calls;
    double time_s;
} kinds[KINDS];
static int kind_count;

static void must(enum hapt_status status, const char *what)
{
    if (status == HAPT_OK) return;
    fprintf(stderr, "times: error: %s: %s\n", what, hapt_fail_message());
    exit(1);
}

static struct kind *kind_of(const char *name)
{
    int k = 0;
    while (k < kind_count && strcmp(kinds[k].name, name) != 0) k++;
    HAPT_ASSERT(k < KINDS);
    if (k == kind_count) kinds[kind_count++].name = name;
    return &kinds[k];
}

static void time_section(struct hapt_engine *engine, const struct hapt_program *program, enum hapt_section section)
{
    const int count = program->step_count[section];
    double *step_s = calloc((size_t)count + 1, sizeof *step_s), *least_s = calloc((size_t)count + 1, sizeof *least_s);
    HAPT_ASSERT(step_s && least_s);
    for (int round = 0; round < ROUNDS; round++) {
        must(hapt_engine_time_section(engine, section, 0, hapt_time_s, step_s), "timing");
        for (int s = 0; s < count; s++) least_s[s] = round ? fmin(least_s[s], step_s[s]) : step_s[s];
    }
    for (int s = 0; s < count; s++) {
        const struct hapt_program_step *step = &program->step[section][s];
        if (step->kind != HAPT_COLLECTIVE_NONE) continue;
        struct kind *kind = kind_of(hapt_op_type_at(program->graph->op[step->op].type)->name);
        kind->calls++;
        kind->time_s += least_s[s];
    }
    free(step_s);
    free(least_s);
}

static double time_update(struct hapt_engine *engine, const struct hapt_engine_options *options)
{
    double least_s = INFINITY;
    for (int round = 0; round < ROUNDS; round++) {
        const struct hapt_update update = {.optimizer = HAPT_OPTIMIZER_ADAMW,
                                           .learning_rate = 1e-4,
                                           .beta1 = 0.9,
                                           .beta2 = 0.95,
                                           .epsilon = 1e-8,
                                           .weight_decay = 0.1,
                                           .gradient_scale = 1,
                                           .step = round + 1};
        struct hapt_queue *queue = options->backend->queue(options->device, HAPT_QUEUE_COMPUTE);
        const double start_s = hapt_time_s();
        must(hapt_engine_update(engine, 0, 1, &update), "the update");
        must(options->backend->wait(options->backend->record(queue)), "the update");
        least_s = fmin(least_s, hapt_time_s() - start_s);
    }
    return least_s;
}

/* Weights and tokens are random: products of zeros take less power, and the rows of equal tokens have one sum. */
static void fill(struct hapt_engine *engine, const struct hapt_engine_options *options, const struct hapt_model *model)
{
    const struct hapt_graph *graph = model->graph;
    uint64_t random = 1;
    for (int t = 0; t < graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &graph->tensor[t];
        const bool parameter = tensor->kind == HAPT_TENSOR_PARAMETER;
        if (!parameter && (tensor->kind != HAPT_TENSOR_INPUT || tensor->dtype != HAPT_I32)) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        float *value = malloc((size_t)count * sizeof *value);
        int32_t *token = (int32_t *)value;
        HAPT_ASSERT(value);
        for (int64_t i = 0; i < count; i++)
            if (parameter)
                value[i] = (float)(0.04 * (hapt_random_unit(&random) - 0.5));
            else
                token[i] = (int32_t)(hapt_random_next(&random) % (uint64_t)(model->vocab > 0 ? model->vocab : 2));
        struct hapt_queue *queue = options->backend->queue(options->device, HAPT_QUEUE_COMPUTE);
        must(parameter ? hapt_engine_set(engine, t, -1, value)
                       : options->backend->copy(queue, hapt_engine_tensor(engine, t, 0), token,
                                                (size_t)count * sizeof *token),
             tensor->name);
        must(options->backend->wait(options->backend->record(queue)), tensor->name);
        free(value);
    }
}

static void time_model(const struct hapt_model *model, struct hapt_arena *arena)
{
    const char *name = getenv("HAPT_TEST_BACKEND"), *reason = "";
    struct hapt_engine_options options = {
        .backend = hapt_backend_find(name ? name : "cuda"), .threads = 1, .state_count = 2, .slots = 1};
    struct hapt_program *program;
    struct hapt_engine *engine;
    if (!options.backend || options.backend->device_count(&reason) == 0) exit((printf("no device: %s\n", reason), 77));
    must(options.backend->open(0, 1, 0, &options.device), "the device");
    must(program_data_parallel(model->graph, 0, model->graph->forward_count, 1, 1, arena, &program), "the program");
    must(hapt_engine_create(program, &options, &engine), "the engine");
    must(hapt_engine_warm_up(engine), "the first run of every kernel");
    fill(engine, &options, model);
    must(hapt_engine_begin_step(engine), "a step");
    time_section(engine, program, HAPT_SECTION_FORWARD);
    time_section(engine, program, HAPT_SECTION_BACKWARD);
    for (int k = 0; k < kind_count; k++) printf("%s %d %.6f\n", kinds[k].name, kinds[k].calls, 1e3 * kinds[k].time_s);
    printf("update 1 %.6f\n", 1e3 * time_update(engine, &options));
    hapt_engine_destroy(engine);
    options.backend->close(options.device);
}

int main(int argc, char **argv)
{
    struct hapt_arena arena;
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    char *words[WORDS] = {"hapt", "model"};
    if (argc < 2 || argc > WORDS - 2) return fprintf(stderr, "usage: times FAMILY OPTIONS...\n"), 2;
    memcpy(words + 2, argv + 1, (size_t)(argc - 1) * sizeof *words);
    hapt_arena_init(&arena);
    must(hapt_config_parse(argc + 1, words, &arena, &config), "the options");
    must(hapt_model_build(argv[1], config, &arena, &model), "the model");
    time_model(model, &arena);
    hapt_arena_release(&arena);
    return 0;
}
