/* Split programs: which steps wait, and that waiting changes no bit. */
#include "fixture.h"
#include "random_program.h"
#include "world.h"

#include "hapt/engine.h"

static bool has_type(const struct hapt_program *program, enum hapt_section section, const char *type)
{
    for (int s = 0; s < program->step_count[section]; s++)
        if (!strcmp(hapt_op_type_at(program->graph->op[program->step[section][s].op].type)->name, type)) return true;
    return false;
}

/* The same range of the split sharding. */
static struct hapt_program *split_of(const struct hapt_program *whole, struct hapt_arena *arena)
{
    struct hapt_sharding *sharding = NULL;
    struct hapt_program *split = NULL;
    CHECK_OK(hapt_sharding_split(whole->sharding, arena, &sharding));
    if (sharding) CHECK_OK(hapt_program_build(sharding, whole->first_op, whole->end_op, arena, &split));
    if (!split) exit(1);
    return split;
}

static int count_copies(const struct hapt_program *split, const struct hapt_program *whole)
{
    int copies = 0;
    for (int s = 0; s < split->step_count[HAPT_SECTION_BACKWARD]; s++)
        copies += split->graph->op[split->step[HAPT_SECTION_BACKWARD][s].op].output[0] >= whole->graph->tensor_count;
    return copies;
}

/* Checks the definition step by step: the contents of each section, and the writers and readers of its tensors. */
static void check_sections(const struct hapt_program *split, const struct hapt_program *whole)
{
    const struct hapt_graph *graph = split->graph;
    CHECK(split->step_count[HAPT_SECTION_BACKWARD] + split->step_count[HAPT_SECTION_WEIGHT] ==
          whole->step_count[HAPT_SECTION_BACKWARD] + count_copies(split, whole));
    for (int s = 0, waits = 0; s < whole->step_count[HAPT_SECTION_BACKWARD]; s++) {
        waits += whole->step[HAPT_SECTION_BACKWARD][s].weight;
        if (s == whole->step_count[HAPT_SECTION_BACKWARD] - 1) CHECK(waits == split->step_count[HAPT_SECTION_WEIGHT]);
    }
    CHECK(whole->step_count[HAPT_SECTION_WEIGHT] == 0);
    CHECK_OK(program_check(split));
    for (int w = 0; w < split->step_count[HAPT_SECTION_WEIGHT]; w++) {
        const struct hapt_program_step *step = &split->step[HAPT_SECTION_WEIGHT][w];
        const struct hapt_op *op = &graph->op[step->op];
        bool serves = step->kind == HAPT_COLLECTIVE_NONE;
        for (int o = 0; o < op->output_count; o++) {
            if (op->output[o] < 0) continue;
            CHECK(step->kind != HAPT_COLLECTIVE_NONE || hapt_graph_is_parameter_gradient(graph, op->output[o]));
            const int root = split->tensor[split->local[op->output[o]]].root;
            for (int s = 0; s < split->step_count[HAPT_SECTION_BACKWARD]; s++) {
                const struct hapt_op *other = &graph->op[split->step[HAPT_SECTION_BACKWARD][s].op];
                for (int k = 0; k < other->output_count; k++) /* one section writes a gradient */
                    CHECK(step->kind != HAPT_COLLECTIVE_NONE || other->output[k] < 0 ||
                          split->tensor[split->local[other->output[k]]].root != root);
                for (int i = 0; i < other->input_count; i++) /* nothing that is read before is made behind */
                    CHECK(other->input[i] < 0 || other->input[i] != op->output[o]);
            }
            for (int s = w + 1; s < split->step_count[HAPT_SECTION_WEIGHT]; s++) {
                const struct hapt_op *reader = &graph->op[split->step[HAPT_SECTION_WEIGHT][s].op];
                for (int i = 0; i < reader->input_count; i++) serves = serves || reader->input[i] == op->output[o];
            }
        }
        CHECK_MESSAGE(serves, "%s waits and serves nothing", op->name);
    }
}

/* In a GPT model every linear_dw waits, and so does embedding_dw; nothing else does on one device. Gradients of the
 * residual stream are summed in place, so what reads them reads a copy: both projections of a block. */
static void gpt_steps(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_graph *graph =
            fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 32, 4, tied, false})->graph;
        struct hapt_program *whole = NULL;
        int products = 0;
        CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &whole));
        const struct hapt_program *split = split_of(whole, &arena);
        check_sections(split, whole);
        for (int s = 0; s < whole->step_count[HAPT_SECTION_BACKWARD]; s++) {
            const char *type = hapt_op_type_at(graph->op[whole->step[HAPT_SECTION_BACKWARD][s].op].type)->name;
            products += strstr(type, "_dw") != NULL;
        }
        CHECK(products == 2 * 4 + 2 && split->step_count[HAPT_SECTION_WEIGHT] == products);
        CHECK(count_copies(split, whole) == 2 * 2);
        CHECK(has_type(split, HAPT_SECTION_WEIGHT, "embedding_dw") &&
              has_type(split, HAPT_SECTION_WEIGHT, "linear_dw"));
        CHECK(!has_type(split, HAPT_SECTION_BACKWARD, "linear_dw"));
        hapt_arena_release(&arena);
    }
}

static long compared, waiting, collectives, copies;

static void compare_bits(const struct hapt_program *whole, int vocab, const char *what)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_program *split = split_of(whole, &arena);
    check_sections(split, whole);
    world_compare_bits(whole, split, vocab, what);
    compared++;
    waiting += split->step_count[HAPT_SECTION_WEIGHT];
    copies += count_copies(split, whole);
    for (int s = 0; s < split->step_count[HAPT_SECTION_WEIGHT]; s++)
        collectives += split->step[HAPT_SECTION_WEIGHT][s].kind != HAPT_COLLECTIVE_NONE;
    hapt_arena_release(&arena);
}

/* Random graphs and shardings, cut at random: every tensor of every rank has the same bits. */
static void waiting_changes_no_bit(void)
{
    const int cases = test_long() ? 1500 : 120;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 555;
        char what[32];
        int vocab;
        snprintf(what, sizeof what, "case %d", k);
        hapt_arena_init(&arena);
        const struct hapt_program *program = random_program(k, &random, &arena, &vocab);
        if (program) compare_bits(program, vocab, what);
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(2 * compared > cases && waiting > 2 * compared, "%ld programs, %ld steps wait", compared, waiting);
    CHECK_MESSAGE(collectives > 0 && copies > 0, "%ld collectives wait, %ld copies", collectives, copies);
}

/* Memory, kept for the microbatches whose WEIGHT still waits: the engine gives the same gradients as without a split,
 * although every WEIGHT runs behind all backward passes, and its memory is what was planned. */
static void engine_holds_what_waits(void)
{
    enum { MICROBATCHES = 3 };
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, bf16});
        const struct hapt_graph *graph = model->graph;
        struct hapt_program *program[2] = {NULL};
        struct hapt_engine *engine[2] = {NULL};
        struct hapt_device *device[2] = {NULL};
        CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &program[0]));
        program[1] = split_of(program[0], &arena);
        for (int k = 0; k < 2; k++) {
            const struct hapt_backend *cpu = hapt_backend_find("cpu");
            CHECK_OK(cpu->open(0, 1, 0, &device[k]));
            const struct hapt_engine_options options = {.backend = cpu,
                                                        .device = device[k],
                                                        .threads = 1,
                                                        .state_count = 2,
                                                        .slots = MICROBATCHES,
                                                        .weight_slots = MICROBATCHES};
            CHECK_OK(hapt_engine_create(program[k], &options, &engine[k]));
            CHECK(cpu->memory_peak(device[k]) == hapt_engine_memory(engine[k])->total_bytes);
            CHECK_OK(hapt_engine_begin_step(engine[k]));
            for (int t = 0; t < graph->tensor_count; t++) {
                const struct hapt_tensor *tensor = &graph->tensor[t];
                uint64_t random = hapt_hash(7, tensor->name, strlen(tensor->name));
                if (tensor->kind == HAPT_TENSOR_PARAMETER) {
                    float value[4096];
                    for (int64_t i = 0; i < hapt_tensor_elements(tensor); i++)
                        value[i] =
                            (float)((tensor->init == HAPT_INIT_ONE ? 1.0 : 0.0) + hapt_random_unit(&random) - 0.5);
                    CHECK_OK(hapt_engine_set(engine[k], t, -1, value));
                }
                for (int m = 0; tensor->kind == HAPT_TENSOR_INPUT && m < MICROBATCHES; m++) {
                    int32_t *token = hapt_engine_tensor(engine[k], t, m);
                    if (tensor->role == HAPT_ROLE_LOSS_SCALE) *(float *)token = 1.0f / 64;
                    for (int64_t i = 0; tensor->dtype == HAPT_I32 && i < hapt_tensor_elements(tensor); i++)
                        token[i] = (int32_t)(hapt_random_next(&random) % (uint64_t)model->vocab);
                }
            }
            for (int m = 0; m < MICROBATCHES; m++) CHECK_OK(hapt_engine_forward(engine[k], m, -1));
            for (int m = 0; m < MICROBATCHES; m++)
                CHECK_OK(hapt_engine_backward_split(engine[k], m, k ? m : 0, -1, -1));
            for (int m = 0; m < MICROBATCHES; m++) CHECK_OK(hapt_engine_weight(engine[k], m, k ? m : 0));
        }
        int gradients = 0;
        for (int t = 0; t < graph->tensor_count; t++) {
            const int gradient = graph->tensor[t].kind == HAPT_TENSOR_PARAMETER ? graph->tensor[t].gradient : -1;
            if (gradient < 0) continue;
            const float *a = hapt_engine_tensor(engine[0], gradient, 0),
                        *b = hapt_engine_tensor(engine[1], gradient, 0);
            double most = 0;
            for (int64_t i = 0; i < hapt_tensor_elements(&graph->tensor[t]); i++) most = fmax(most, fabs((double)a[i]));
            CHECK_MESSAGE(most > 0 && !memcmp(a, b, (size_t)hapt_tensor_elements(&graph->tensor[t]) * 4), "%s differs",
                          graph->tensor[t].name);
            gradients++;
        }
        CHECK(gradients > 10);
        for (int k = 0; k < 2; k++) {
            hapt_engine_destroy(engine[k]);
            hapt_backend_find("cpu")->close(device[k]);
        }
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt_steps);
    RUN(waiting_changes_no_bit);
    RUN(engine_holds_what_waits);
    return test_finish();
}
