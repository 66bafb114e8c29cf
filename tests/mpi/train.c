/* ranks: 1 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * Training by hand-made plans, compared with a run of PyTorch (tests/data/gpt-small.h5), with one rank, and with
 * itself. */
#include "train_plans.h"

static void one_rank_against_pytorch(void)
{
    const struct shape shape = one_rank();
    struct hapt_train_result *result = train(&shape, make_config("one", reference_options), NULL);
    if (!result) return;
    CHECK(result->history.count == STEPS);
    CHECK_MESSAGE(worst(result->history.loss, fp64, STEPS) < 2e-6, "losses differ by %g",
                  worst(result->history.loss, fp64, STEPS));
    if (test_env.world_rank == 0)
        CHECK(result->planned_bytes[0] > 0 && result->planned_bytes[0] == result->measured_bytes[0]);
    check_weights(hapt_arena_printf(&arena, "%s/one", folder));
}

/* Random boundaries between operators, 1 or 2 ranks per stage, on all ranks. */
static struct shape random_shape(uint64_t *random)
{
    struct shape shape = {.microbatches = 4, .schedule = (enum hapt_schedule_kind)(hapt_random_next(random) % 4)};
    int left = test_env.world_size;
    const int stages = 1 + (int)(hapt_random_next(random) % (uint64_t)left);
    for (int s = 0; s < stages; s++) {
        const bool two = left - 2 >= stages - s - 1 && hapt_random_next(random) % 2;
        shape.size[s] = two ? 2 : 1;
        left -= shape.size[s];
    }
    shape.stages = stages;
    int end = 0;
    for (int s = 0; s < stages; s++) {
        const int after = stages - s - 1, most = model->graph->forward_count - after;
        end = after == 0 ? most
                         : end + 1 + (int)(hapt_random_next(random) % (uint64_t)((most - end) < 12 ? most - end : 12));
        shape.end[s] = end;
    }
    return shape;
}

static void random_plans(void)
{
    uint64_t random = 17;
    const int rounds = test_long() ? 200 : test_env.world_size == 1 ? 1 : 5;
    for (int round = 0; round < rounds; round++) {
        const struct shape shape = random_shape(&random);
        struct hapt_train_result *result = train(&shape, make_config("random", reference_options), NULL);
        if (!result) return;
        const double difference = worst(result->history.loss, fp64, STEPS);
        if (!CHECK_MESSAGE(difference < 1e-5, "round %d: losses differ by %g", round, difference))
            for (int s = 0; s < shape.stages; s++)
                fprintf(stderr, "  stage %d: up to operator %d on %d\n", s, shape.end[s], shape.size[s]);
    }
}

/* Two stages if there are enough ranks. The boundary is inside a block, so activations and gradients of the residual
 * stream cross it. */
static struct shape pipeline(enum hapt_schedule_kind kind)
{
    struct shape shape = one_rank();
    const int stages = test_env.world_size < 3 ? test_env.world_size : 3;
    shape.schedule = kind;
    shape.stages = stages;
    for (int s = 0; s < stages; s++) {
        shape.size[s] = s == stages - 1 && test_env.world_size == 4 ? 2 : 1;
        shape.end[s] = s == stages - 1 ? model->graph->forward_count : 4 + 9 * s;
    }
    return shape;
}

/* Stages between operators at random on fewer submeshes, each of which may run several. `two`: submeshes of two ranks
 * are allowed. */
static struct shape folded_shape(uint64_t *random, bool two)
{
    struct shape shape = {.microbatches = 4, .schedule = (enum hapt_schedule_kind)(hapt_random_next(random) % 4)};
    int first[MAX_STAGES], submeshes = 0, left = test_env.world_size, end = 0;
    shape.stages = 2 + (int)(hapt_random_next(random) % (MAX_STAGES - 1));
    for (int s = 0; s < shape.stages; s++) {
        const int after = shape.stages - s - 1, most = model->graph->forward_count - after;
        const int step = 1 + (int)(hapt_random_next(random) % (uint64_t)(most - end < 8 ? most - end : 8));
        shape.end[s] = end = after == 0 ? most : end + step;
        if (left > 0 && (s == 0 || hapt_random_next(random) % 2)) {
            shape.size[s] = two && left > 1 && hapt_random_next(random) % 2 ? 2 : 1;
            shape.tensor_parallel[s] = shape.size[s] == 2 && hapt_random_next(random) % 2 ? 2 : 1;
            left -= shape.size[s];
            first[submeshes++] = s;
        } else {
            const int of = first[hapt_random_next(random) % (uint64_t)submeshes];
            shape.shares[s] = of + 1;
            shape.size[s] = shape.size[of];
            shape.tensor_parallel[s] = shape.tensor_parallel[of];
        }
    }
    return shape;
}

static void print_shape(const struct shape *shape)
{
    for (int s = 0; s < shape->stages; s++)
        fprintf(stderr, "  stage %d: up to operator %d on %d, tp %d, shares %d\n", s, shape->end[s], shape->size[s],
                shape->tensor_parallel[s], shape->shares[s] - 1);
}

/* Several stages on a submesh: the losses of PyTorch, the planned memory, and the same bits twice. */
static void stages_share_submeshes(void)
{
    uint64_t random = 23;
    const int rounds = test_long() ? 200 : 4;
    for (int round = 0; round < rounds; round++) {
        const struct shape shape = folded_shape(&random, true);
        struct hapt_train_result *result = train(&shape, make_config("folded", reference_options), NULL);
        struct hapt_train_result *again =
            round % 3 == 0 ? train(&shape, make_config("folded", reference_options), NULL) : result;
        if (!result || !again) {
            print_shape(&shape);
            return;
        }
        const double difference = worst(result->history.loss, fp64, STEPS);
        bool good = CHECK_MESSAGE(difference < 1e-5, "round %d: losses differ by %g", round, difference);
        good &= CHECK(!memcmp(result->history.loss, again->history.loss, sizeof fp64));
        for (int s = 0; test_env.world_rank == 0 && s < shape.stages; s++)
            good &= CHECK(result->planned_bytes[s] > 0 && result->planned_bytes[s] == result->measured_bytes[s]);
        if (!good) print_shape(&shape);
    }
}

/* Without tied parameters and sharding the bits are those of one rank, wherever the stages are. */
static void folded_pipelines_are_bitwise_one_rank(void)
{
    struct hapt_model *const usual = model;
    uint64_t random = 29;
    model = make_model("fp32", "no", NULL);
    const struct shape alone = one_rank();
    struct hapt_train_result *a = train(&alone, make_config("alone", reference_options), NULL);
    for (int round = 0; a && round < (test_long() ? 50 : 4); round++) {
        const struct shape shape = folded_shape(&random, false);
        struct hapt_train_result *b = train(&shape, make_config("folded", reference_options), NULL);
        if (!b) break;
        if (!CHECK_MESSAGE(!memcmp(a->history.loss, b->history.loss, sizeof fp64), "round %d: losses differ by %g",
                           round, worst(b->history.loss, a->history.loss, STEPS)))
            print_shape(&shape);
    }
    model = usual;
}

static void schedules_agree_bitwise(void)
{
    double first[STEPS];
    for (int kind = HAPT_SCHEDULE_GPIPE; kind <= HAPT_SCHEDULE_H1F1B; kind++) {
        const struct shape shape = pipeline((enum hapt_schedule_kind)kind);
        struct hapt_train_result *result = train(&shape, make_config("schedule", reference_options), NULL);
        if (!result) return;
        if (kind == HAPT_SCHEDULE_GPIPE) memcpy(first, result->history.loss, sizeof first);
        CHECK_MESSAGE(!memcmp(first, result->history.loss, sizeof first), "%s gives other bits than gpipe",
                      hapt_schedule_kind_name((enum hapt_schedule_kind)kind));
    }
}

static void resume_shape(const struct shape *shape)
{
    const char *stopped[64], *resumed[64];
    int count = 0;
    for (; reference_options[count]; count++) stopped[count] = resumed[count] = reference_options[count];
    stopped[count] = "--stop-after";
    stopped[count + 1] = "10";
    resumed[count] = "--resume";
    stopped[count + 2] = resumed[count + 1] = NULL;
    struct hapt_train_result *whole = train(shape, make_config("whole", reference_options), NULL);
    struct hapt_train_result *half = train(shape, make_config("halves", stopped), NULL);
    if (!whole || !half) return;
    CHECK(half->history.count == 10);
    struct hapt_checkpoint *checkpoint = NULL;
    struct hapt_config *config = make_config("halves", resumed);
    CHECK_OK(hapt_train_resume(&test_env, config, model, &arena, &checkpoint));
    CHECK(checkpoint && checkpoint->step == 10);
    if (!checkpoint) return;
    struct hapt_train_result *rest = train(shape, config, checkpoint);
    if (!rest) return;
    CHECK(rest->first_step == 10 && rest->history.count == STEPS);
    CHECK(!memcmp(rest->history.loss, whole->history.loss, sizeof fp64));
    CHECK(!memcmp(rest->history.gradient_norm, whole->history.gradient_norm, sizeof fp64));
    struct hapt_checkpoint *a = NULL, *b = NULL;
    CHECK_OK(hapt_checkpoint_find(&test_env, whole->checkpoint, &arena, &a));
    CHECK_OK(hapt_checkpoint_find(&test_env, rest->checkpoint, &arena, &b));
    for (int s = 0; a && b && s < a->shard_count; s++) CHECK(a->size[s] == b->size[s]);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t elements = hapt_tensor_elements(tensor);
        float *x = hapt_arena_alloc(&arena, (size_t)elements, 4), *y = hapt_arena_alloc(&arena, (size_t)elements, 4);
        for (int state = -1; state < 2; state++) {
            CHECK_OK(hapt_checkpoint_read(a, tensor->name, state, elements, x));
            CHECK_OK(hapt_checkpoint_read(b, tensor->name, state, elements, y));
            CHECK_MESSAGE(!memcmp(x, y, (size_t)elements * 4), "%s (state %d) differs", tensor->name, state);
        }
    }
}

static void resume_is_bitwise(void)
{
    uint64_t random = 31;
    const struct shape plain = pipeline(HAPT_SCHEDULE_H1F1B), folded = folded_shape(&random, true);
    resume_shape(&plain);
    resume_shape(&folded);
}

/* Clipping, momentum and the learning-rate schedule apply to the whole model, for any boundaries. */
static void optimizers_agree(void)
{
    static const char *const option[][24] = {
        {"--data", REFERENCE, "--steps", "12", "--optimizer", "sgd", "--learning-rate", "0.5", "--momentum", "0.9",
         "--clip-norm", "0.5", "--warmup-steps", "4", NULL},
        {"--data", REFERENCE, "--steps", "12", "--optimizer", "adamw", "--learning-rate", "3e-3", "--clip-norm", "0.1",
         "--warmup-steps", "4", "--min-lr-ratio", "0.2", NULL}};
    for (int o = 0; o < 2; o++) {
        const struct shape alone = one_rank(), piped = pipeline(HAPT_SCHEDULE_H1F1B);
        struct hapt_train_result *a = train(&alone, make_config("a", option[o]), NULL);
        struct hapt_train_result *b = train(&piped, make_config("b", option[o]), NULL);
        if (!a || !b) return;
        CHECK_MESSAGE(worst(b->history.loss, a->history.loss, 12) < 1e-5, "losses differ by %g",
                      worst(b->history.loss, a->history.loss, 12));
        CHECK_MESSAGE(worst(b->history.gradient_norm, a->history.gradient_norm, 12) < 1e-4, "norms differ by %g",
                      worst(b->history.gradient_norm, a->history.gradient_norm, 12));
        CHECK(a->history.learning_rate[0] < a->history.learning_rate[3]);
        CHECK(a->history.learning_rate[11] < a->history.learning_rate[4]);
        CHECK(a->history.loss[11] < a->history.loss[0]);
    }
}

/* Slowed devices and paced links change times, not bits. */
static void rehearsal_changes_no_bit(void)
{
    struct shape shape = pipeline(HAPT_SCHEDULE_H1F1B);
    struct hapt_train_result *plain = train(&shape, make_config("plain", reference_options), NULL);
    shape.bandwidth = 20e6;
    shape.slowdown = 1.5;
    struct hapt_train_result *slow = train(&shape, make_config("slow", reference_options), NULL);
    if (!plain || !slow) return;
    CHECK(!memcmp(plain->history.loss, slow->history.loss, sizeof fp64));
    if (test_env.world_rank != 0) return;
    for (int64_t i = 0; i < STEPS * shape.stages; i++) CHECK(slow->busy_s[i] >= 0 && slow->idle_s[i] >= 0);
    if (shape.stages > 1) CHECK(slow->comm_s[shape.stages] > 4 * 2 * 64 * 64 * 4 / 20e6);
}

/* Without tied parameters and sharding, a pipeline adds in the same order as one rank, so the bits are equal in both
 * types. In bf16 (8 bits of mantissa, sums in fp32) the losses stay near those of fp32. */
static void pipelines_are_bitwise_one_rank(void)
{
    struct hapt_model *const usual = model;
    const char *const dtypes[] = {"fp32", "bf16"};
    double first[STEPS];
    for (int d = 0; d < 2; d++) {
        model = make_model(dtypes[d], "no", NULL);
        struct shape alone = one_rank(), piped = pipeline(HAPT_SCHEDULE_EAGER);
        for (int s = 0; s < piped.stages; s++) piped.size[s] = 1;
        struct hapt_train_result *a = train(&alone, make_config("alone", reference_options), NULL);
        struct hapt_train_result *b = train(&piped, make_config("piped", reference_options), NULL);
        if (!a || !b) break;
        CHECK_MESSAGE(!memcmp(a->history.loss, b->history.loss, sizeof first), "%s: losses differ by %g", dtypes[d],
                      worst(b->history.loss, a->history.loss, STEPS));
        if (d == 0) memcpy(first, a->history.loss, sizeof first);
        CHECK_MESSAGE(worst(a->history.loss, first, STEPS) < 1e-2, "%s differs from fp32 by %g", dtypes[d],
                      worst(a->history.loss, first, STEPS));
    }
    model = usual;
}

static void refusals(void)
{
    struct shape shape = one_rank();
    struct hapt_train_result *result = NULL;
    const char *const options[] = {"--data", REFERENCE, "--steps", "3", NULL};
    const char *const many[] = {"--data", REFERENCE, "--steps", "21", NULL};
    const char *const none[] = {"--steps", "3", NULL};
    const char *const hot[] = {"--data",   REFERENCE,     "--steps", "20", "--learning-rate", "1e6", "--lr-schedule",
                               "constant", "--clip-norm", "0",       NULL};
    shape.microbatches = 3; /* 6 rows a step; the batches have 8 */
    CHECK(hapt_train_run(&test_env, make_cluster(&shape), model, make_plan(&shape), NULL, make_config("r", options),
                         NULL, &arena, &result) == HAPT_ERR_INPUT);
    hapt_fail_reset();
    shape.microbatches = 4;
    CHECK(hapt_train_run(&test_env, make_cluster(&shape), model, make_plan(&shape), NULL, make_config("r", many), NULL,
                         &arena, &result) == HAPT_ERR_INPUT);
    hapt_fail_reset();
    CHECK(hapt_train_run(&test_env, make_cluster(&shape), model, make_plan(&shape), NULL, make_config("r", none), NULL,
                         &arena, &result) == HAPT_ERR_INPUT);
    hapt_fail_reset();
    /* A loss that is not finite stops the run before the update, with a checkpoint. */
    CHECK(hapt_train_run(&test_env, make_cluster(&shape), model, make_plan(&shape), NULL, make_config("hot", hot), NULL,
                         &arena, &result) == HAPT_ERR_INPUT);
    hapt_fail_reset();
    struct hapt_checkpoint *checkpoint = NULL;
    CHECK_OK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/hot", folder), &arena, &checkpoint));
    CHECK(checkpoint && checkpoint->step >= 1 && checkpoint->step < 20);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    if (model) {
        RUN(one_rank_against_pytorch);
        RUN(random_plans);
        RUN(stages_share_submeshes);
        RUN(folded_pipelines_are_bitwise_one_rank);
        RUN(schedules_agree_bitwise);
        RUN(resume_is_bitwise);
        RUN(optimizers_agree);
        RUN(rehearsal_changes_no_bit);
        RUN(pipelines_are_bitwise_one_rank);
        RUN(refusals);
    }
    clean_up();
    return test_finish();
}
