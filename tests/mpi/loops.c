/* ranks: 1 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * Looped schedules, also with split backward passes, and frozen prefixes, trained: for each model one set of losses and
 * weights, whatever the schedule, the placement, the cuts and the number of ranks. Checkpoints of looped plans are
 * resumed without loops, and the reverse. */
#include "fixture.h"

#include "train_plans.h"

enum { RUN_STEPS = 4, MICROBATCHES = 12 };

static struct hapt_model *saved(struct hapt_model *built, const char *name)
{
    const char *path = hapt_arena_printf(&arena, "%s/%s.h5", folder, name);
    struct hapt_model *loaded = NULL;
    if (test_env.world_rank == 0) CHECK_OK(hapt_model_save(built, NULL, NULL, path));
    MPI_Barrier(test_env.world);
    CHECK_OK(hapt_model_load(path, &arena, &loaded));
    return loaded;
}

static struct hapt_model *gpt(void)
{
    return fixture_gpt(&arena, (struct fixture_gpt){3, 32, 2, 16, 64, 2, false, false});
}

/* The embeddings and the first block are frozen. */
static struct hapt_model *frozen_gpt(void)
{
    struct hapt_model *built = gpt();
    for (int t = 0; t < built->graph->tensor_count; t++) {
        struct hapt_tensor *tensor = &built->graph->tensor[t];
        if (tensor->kind == HAPT_TENSOR_PARAMETER &&
            (!strncmp(tensor->name, "w", 1) || !strncmp(tensor->name, "h.0", 3)))
            tensor->trainable = false;
    }
    return saved(built, "frozen");
}

static struct hapt_model *bert_moe(void)
{
    char *words[] = {"hapt", "model",        "bert-moe", "--layers", "2",    "--hidden",          "32", "--heads",
                     "4",    "--sequence",   "24",       "--vocab",  "64",   "--experts",         "5",  "--top-k",
                     "2",    "--microbatch", "2",        "--dtype",  "fp32", "--tied-embeddings", "no"};
    struct hapt_config *config = NULL;
    struct hapt_model *built = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof *words), words, &arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, &arena, &built));
    return built;
}

/* A generated network. Operators far behind read many of its tensors. Its last operator shares the embedding. */
static struct hapt_model *skips(void)
{
    uint64_t random = 5;
    struct hapt_model *built = hapt_arena_alloc(&arena, 1, sizeof *built);
    *built = (struct hapt_model){.family = "gpt",
                                 .graph = fixture_random(&arena, &random, 44),
                                 .microbatch = 4,
                                 .sequence = 5,
                                 .vocab = 11,
                                 .dtype = HAPT_F32,
                                 .precision = HAPT_PRECISION_FP32,
                                 .seed = 3};
    return built;
}

/* A stream of random tokens below 11, which every model knows. */
static const char *make_tokens(void)
{
    enum { TOKENS = 4000 };
    static int32_t token[TOKENS];
    const char *path = hapt_arena_printf(&arena, "%s/tokens.h5", folder);
    const int64_t count = TOKENS;
    struct hapt_h5 *file = NULL;
    uint64_t random = 9;
    if (test_env.world_rank == 0) {
        for (int i = 0; i < TOKENS; i++) token[i] = (int32_t)(hapt_random_next(&random) % 11);
        CHECK_OK(hapt_h5_create(path, "hapt-data", 1, &file));
        CHECK_OK(hapt_h5_write(file, "/tokens", HAPT_H5_I32, 1, &count, token, ""));
        CHECK_OK(hapt_h5_finish(file, HAPT_OK));
    }
    MPI_Barrier(test_env.world);
    return path;
}

static const char *tokens;

static struct hapt_config *config_of(const char *name, const char *const *extra)
{
    const char *option[64] = {"--data",          tokens, "--steps",       "4",       "--optimizer", "adamw",
                              "--learning-rate", "1e-2", "--lr-schedule", "constant"};
    int count = 10;
    while (*extra) option[count++] = *extra++;
    return make_config(name, option);
}

static const char *const plain[] = {"--clip-norm", "0", NULL};
static const char *const clipped[] = {"--clip-norm", "0.05", NULL};

/* ---- Comparison ---- */

static bool same_weights(const struct hapt_train_result *a, const struct hapt_train_result *b)
{
    struct hapt_checkpoint *x = NULL, *y = NULL;
    bool same = true;
    CHECK_OK(hapt_checkpoint_find(&test_env, a->checkpoint, &arena, &x));
    CHECK_OK(hapt_checkpoint_find(&test_env, b->checkpoint, &arena, &y));
    for (int t = 0; x && y && t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        float *v = hapt_arena_alloc(&arena, (size_t)count, 4), *w = hapt_arena_alloc(&arena, (size_t)count, 4);
        CHECK_OK(hapt_checkpoint_read(x, tensor->name, -1, count, v));
        CHECK_OK(hapt_checkpoint_read(y, tensor->name, -1, count, w));
        same = same && !memcmp(v, w, (size_t)count * 4);
    }
    return x && y && same;
}

static void compare(const char *what, const struct shape *shape, const struct hapt_train_result *a,
                    const struct hapt_train_result *b)
{
    CHECK(a->history.count == RUN_STEPS && b->history.count == RUN_STEPS);
    const bool losses = !memcmp(a->history.loss, b->history.loss, RUN_STEPS * sizeof(double));
    bool good =
        CHECK_MESSAGE(losses, "%s: losses differ by %g", what, worst(b->history.loss, a->history.loss, RUN_STEPS));
    good &= CHECK_MESSAGE(same_weights(a, b), "%s: weights differ", what);
    for (int s = 0; test_env.world_rank == 0 && s < shape->stages; s++)
        good &= CHECK(b->planned_bytes[s] > 0 && b->planned_bytes[s] == b->measured_bytes[s]);
    for (int s = 0; !good && s < shape->stages; s++)
        fprintf(stderr, "  stage %d: up to operator %d on %d, shares %d\n", s, shape->end[s], shape->size[s],
                shape->shares[s] - 1);
}

/* ---- Shapes ---- */

/* `stages` chunks of about equally many operators on submeshes of `size` ranks each, in loops or as a V. */
static struct shape shape_of(enum hapt_schedule_kind kind, int stages, int submeshes, int size, bool v)
{
    struct shape shape = {.stages = stages, .schedule = kind, .microbatches = MICROBATCHES, .frozen = true};
    for (int s = 0; s < stages; s++) {
        const int place = hapt_plan_place(s, submeshes, v);
        shape.end[s] = (s + 1) * model->graph->forward_count / stages;
        shape.shares[s] = place < s ? place + 1 : 0;
        shape.size[s] = size;
    }
    if (kind == HAPT_SCHEDULE_LOOPED) {
        shape.loop_batch = v ? 2 : submeshes;
        shape.prefetch = 1;
    }
    return shape;
}

/* `tied`: a tied parameter. Its gradients add up chunk by chunk, so such a model is compared with two chunks on one
 * rank. */
static void matrix_of(const char *name, struct hapt_model *of, bool tied)
{
    struct hapt_model *const usual = model;
    const int D = test_env.world_size, loops = D < 3 ? 4 : 2;
    model = of;
    const struct shape alone = shape_of(HAPT_SCHEDULE_1F1B, tied ? 2 : 1, 1, 1, false);
    struct {
        const char *name;
        struct shape shape;
    } run[] = {{"1f1b", shape_of(HAPT_SCHEDULE_1F1B, D, D, 1, false)},
               {"h1f1b", shape_of(HAPT_SCHEDULE_H1F1B, D, D, 1, false)},
               {"interleaved", shape_of(HAPT_SCHEDULE_INTERLEAVED, D * loops, D, 1, false)},
               {"breadth-first", shape_of(HAPT_SCHEDULE_BREADTH_FIRST, D * 2, D, 1, false)},
               {"looped", shape_of(HAPT_SCHEDULE_LOOPED, D * loops, D, 1, false)},
               {"v", shape_of(HAPT_SCHEDULE_LOOPED, D * 2, D, 1, true)},
               {"split interleaved", shape_of(HAPT_SCHEDULE_INTERLEAVED, D * loops, D, 1, false)},
               {"split v", shape_of(HAPT_SCHEDULE_LOOPED, D * 2, D, 1, true)}};
    const int runs = (int)(sizeof run / sizeof *run);
    run[runs - 2].shape.split = run[runs - 1].shape.split = true;
    run[runs - 1].shape.slots[0] = 3; /* of weight slots: several may wait */
    struct hapt_train_result *a = train(&alone, config_of(hapt_arena_printf(&arena, "%s/alone", name), plain), NULL);
    for (int k = 0; a && k < runs; k++) {
        if (tied && run[k].shape.stages == 1) continue;
        struct hapt_train_result *b =
            train(&run[k].shape, config_of(hapt_arena_printf(&arena, "%s/%s", name, run[k].name), plain), NULL);
        const char *what = hapt_arena_printf(&arena, "%s under %s", name, run[k].name);
        if (!b) fprintf(stderr, "  %s does not run\n", what);
        if (b) compare(what, &run[k].shape, a, b);
    }
    model = usual;
}

static void bits_of_gpt(void)
{
    matrix_of("gpt", gpt(), false);
}

static void bits_of_skips(void)
{
    matrix_of("skips", skips(), true);
}

static void bits_of_bert_moe(void)
{
    matrix_of("bert-moe", bert_moe(), false);
}

static void bits_of_a_frozen_prefix(void)
{
    struct hapt_model *frozen = frozen_gpt();
    CHECK(hapt_graph_first_trained(frozen->graph) > frozen->graph->forward_count / 4);
    matrix_of("frozen", frozen, false);
}

/* ---- Other cases ---- */

/* With clipping and sharded gradients, schedules on the same cuts and submeshes agree. */
static void data_parallel_loops(void)
{
    struct hapt_model *const usual = model;
    if (test_env.world_size != 4) return;
    model = gpt();
    const struct shape own = shape_of(HAPT_SCHEDULE_H1F1B, 4, 4, 1, false),
                       two = shape_of(HAPT_SCHEDULE_INTERLEAVED, 4, 2, 1, false);
    const struct shape pairs = shape_of(HAPT_SCHEDULE_1F1B, 4, 2, 2, false),
                       loops = shape_of(HAPT_SCHEDULE_LOOPED, 4, 2, 2, false);
    struct hapt_train_result *a = train(&own, config_of("own", clipped), NULL),
                             *b = train(&two, config_of("two", clipped), NULL);
    struct hapt_train_result *c = train(&pairs, config_of("pairs", clipped), NULL),
                             *d = train(&loops, config_of("loops", clipped), NULL);
    if (a && b) compare("interleaved with clipping", &two, a, b);
    if (c && d) compare("loops over pairs of ranks", &loops, c, d);
    model = usual;
}

/* Tied embeddings are summed across loops, and inside a submesh where a V ends on the first one. */
static void tied_loops(void)
{
    const int D = test_env.world_size;
    struct hapt_model *const usual = model;
    model = fixture_gpt(&arena, (struct fixture_gpt){3, 32, 2, 16, 64, 2, true, false});
    const struct shape unlooped = shape_of(HAPT_SCHEDULE_1F1B, 2 * D, D, 1, false),
                       loops = shape_of(HAPT_SCHEDULE_INTERLEAVED, 2 * D, D, 1, false);
    const struct shape v = shape_of(HAPT_SCHEDULE_LOOPED, 2 * D, D, 1, true);
    struct hapt_train_result *a = train(&unlooped, config_of("unlooped", plain), NULL),
                             *b = train(&loops, config_of("tied", plain), NULL),
                             *c = train(&v, config_of("tied-v", plain), NULL);
    if (a && b) compare("tied embeddings in loops", &loops, a, b);
    if (a && c) compare("tied embeddings in a V", &v, a, c);
    model = usual;
}

/* Half of the run under one plan, the rest under another. */
static struct hapt_train_result *train_halves(const char *name, const struct shape *first, const struct shape *second)
{
    static const char *const stops[] = {"--clip-norm", "0", "--stop-after", "2", NULL};
    static const char *const resumes[] = {"--clip-norm", "0", "--resume", NULL};
    struct hapt_checkpoint *checkpoint = NULL;
    if (!train(first, config_of(name, stops), NULL)) return NULL;
    struct hapt_config *config = config_of(name, resumes);
    CHECK_OK(hapt_train_resume(&test_env, config, model, &arena, &checkpoint));
    if (!checkpoint) return NULL;
    CHECK(checkpoint->step == 2 && checkpoint->plan->stage_count == first->stages);
    CHECK(checkpoint->plan->schedule == first->schedule && checkpoint->plan->loop_batch == first->loop_batch);
    return train(second, config, checkpoint);
}

static void plans_with_and_without_loops_resume_each_other(void)
{
    struct hapt_model *const usual = model;
    const int D = test_env.world_size;
    model = gpt();
    const struct shape straight = shape_of(HAPT_SCHEDULE_H1F1B, D, D, 1, false),
                       loops = shape_of(HAPT_SCHEDULE_LOOPED, 2 * D, D, 1, false);
    struct hapt_train_result *whole = train(&straight, config_of("whole", plain), NULL);
    struct hapt_train_result *out = train_halves("out", &loops, &straight), *in = train_halves("in", &straight, &loops);
    if (whole && out) compare("a looped checkpoint, resumed without loops", &straight, whole, out);
    if (whole && in) compare("a checkpoint without loops, resumed in loops", &loops, whole, in);
    model = usual;
}

/* Gradients of skips wait for their readers in transfer slots: large groups need more than there are. The planner,
 * which knows the graph alone, chooses enough of them for the trainer, which knows the programs; fewer are refused. */
static void transfer_slots_for_skips(void)
{
    struct hapt_model *const usual = model;
    const int D = test_env.world_size;
    int more = 0;
    model = skips();
    for (int k = 0; k < 6 && D > 1; k++) {
        struct hapt_train_result *result = NULL;
        struct shape shape = shape_of(HAPT_SCHEDULE_LOOPED, 2 * D, D, 1, k % 2);
        shape.loop_batch = k < 2 ? 1 : k < 4 ? 4 : MICROBATCHES;
        struct hapt_plan *plan = make_plan(&shape);
        if (plan->transfer_slots == 0) continue; /* chosen by make_plan */
        more++;
        plan->transfer_slots--;
        CHECK_MESSAGE(hapt_train_run(&test_env, make_cluster(&shape), model, plan, NULL, config_of("fewer", plain),
                                     NULL, &arena, &result) == HAPT_ERR_USAGE,
                      "groups of %d on %d submeshes run with %d transfer slots", shape.loop_batch, D,
                      plan->transfer_slots);
        hapt_fail_reset();
    }
    CHECK(D == 1 || more > 0);
    model = usual;
}

/* A plan whose forward-only stage would train is of another model. */
static void plans_of_other_models_are_refused(void)
{
    struct hapt_model *const usual = model;
    struct hapt_train_result *result = NULL;
    model = gpt();
    const struct shape shape = shape_of(HAPT_SCHEDULE_1F1B, 2 * test_env.world_size, test_env.world_size, 1, false);
    struct hapt_plan *plan = make_plan(&shape);
    plan->stage[0].forward_only = 1;
    CHECK(hapt_train_run(&test_env, make_cluster(&shape), model, plan, NULL, config_of("other", plain), NULL, &arena,
                         &result) == HAPT_ERR_INPUT);
    hapt_fail_reset();
    model = usual;
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    tokens = make_tokens();
    RUN(bits_of_gpt);
    RUN(bits_of_skips);
    RUN(bits_of_bert_moe);
    RUN(bits_of_a_frozen_prefix);
    RUN(data_parallel_loops);
    RUN(tied_loops);
    RUN(plans_with_and_without_loops_resume_each_other);
    RUN(transfer_slots_for_skips);
    RUN(plans_of_other_models_are_refused);
    clean_up();
    return test_finish();
}
