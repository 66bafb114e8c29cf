/*
 * ranks: 1 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * Split backward passes in training. Losses, gradient norms and weights must have the bits of the unsplit run of the
 * same stages, and memory must be as planned. Models: GPT (tied, bf16), a GPT with two long skips, BERT with experts,
 * and a GPT whose first stages are frozen.
 */
#include "train_plans.h"

enum { SPLIT_STEPS = 4 };

static const char *const options[] = {
    "--data",          NULL,   "--steps",       "4",        "--optimizer",         "adamw", "--clip-norm", "1",
    "--learning-rate", "1e-2", "--lr-schedule", "constant", "--sharded-optimizer", NULL,    NULL};

static const char *data_file;

static const char *const *options_with(const char *sharded)
{
    static const char *made[32];
    int count = 0;
    for (; count < (int)(sizeof options / sizeof *options); count++) made[count] = options[count];
    made[1] = data_file;
    made[13] = sharded;
    return made;
}

/* ---- models ---- */

static int tensor_of(const struct hapt_graph *graph, const char *op, int output)
{
    for (int o = 0; o < graph->forward_count; o++)
        if (!strcmp(graph->op[o].name, op)) return graph->op[o].output[output];
    CHECK_MESSAGE(false, "no operator %s", op);
    return 0;
}

static void read_instead(struct hapt_graph *graph, const char *op, int tensor)
{
    for (int o = 0; o < graph->forward_count; o++)
        if (!strcmp(graph->op[o].name, op)) graph->op[o].input[0] = tensor;
}

/* The residual of block 1 adds the embedding, that of block 3 adds the output of block 0. */
static void add_skips(struct hapt_graph *graph)
{
    read_instead(graph, "h.1.residual_2", tensor_of(graph, "embedding", 0));
    read_instead(graph, "h.3.residual_1", tensor_of(graph, "h.0.residual_2", 0));
}

static void freeze_front(struct hapt_graph *graph)
{
    for (int t = 0; t < graph->tensor_count; t++) {
        const char *name = graph->tensor[t].name;
        if (graph->tensor[t].kind == HAPT_TENSOR_PARAMETER &&
            (!strncmp(name, "wte", 3) || !strncmp(name, "wpe", 3) || !strncmp(name, "h.0.", 4) ||
             !strncmp(name, "h.1.attn", 8)))
            graph->tensor[t].trainable = false;
    }
}

static struct hapt_model *make(const char *name, const char *const *words, void (*change)(struct hapt_graph *graph))
{
    const char *argv[40] = {"hapt", "model", words[0], "--microbatch", "2"};
    const char *path = hapt_arena_printf(&arena, "%s/%s.h5", folder, name);
    int argc = 5;
    for (int w = 1; words[w]; w++) argv[argc++] = words[w];
    data_file = hapt_arena_printf(&arena, "tests/data/%s-small.h5", words[0]);
    if (test_env.world_rank == 0) {
        struct hapt_config *config = NULL;
        struct hapt_model *made = NULL;
        CHECK_OK(hapt_config_parse(argc, (char **)argv, &arena, &config));
        CHECK_OK(hapt_model_build(words[0], config, &arena, &made));
        if (change) {
            made->graph->op_count = made->graph->forward_count; /* builds the backward part again */
            made->graph->tensor_count = hapt_graph_find_tensor(made->graph, "loss_scale");
            change(made->graph);
            CHECK_OK(hapt_graph_differentiate(made->graph));
            CHECK_OK(hapt_graph_check(made->graph));
        }
        CHECK_OK(hapt_model_save(made, NULL, NULL, path));
    }
    MPI_Barrier(test_env.world);
    struct hapt_model *loaded = NULL;
    CHECK_OK(hapt_model_load(path, &arena, &loaded));
    return loaded;
}

/* ---- plans ---- */

/* `stages` stages of one rank each, at evenly spaced operators; the last may have `last` ranks. */
static struct shape cut(int stages, int last, int degree)
{
    struct shape shape = {.stages = stages, .schedule = HAPT_SCHEDULE_H1F1B, .microbatches = 4};
    const int ops = model->graph->forward_count;
    for (int s = 0; s < stages; s++) {
        shape.size[s] = s == stages - 1 ? last : 1;
        shape.tensor_parallel[s] = s == stages - 1 ? degree : 0;
        shape.end[s] = s == stages - 1 ? ops : ops * (s + 1) / stages;
    }
    return shape;
}

static bool is_possible(const struct shape *shape)
{
    const int s = shape->stages - 1, degree = shape->tensor_parallel[s] > 1 ? shape->tensor_parallel[s] : 1;
    struct hapt_sharding *sharding = NULL;
    CHECK_OK(hapt_sharding_tensor_parallel(model->graph, shape->size[s] / degree, degree, &arena, &sharding));
    return sharding && !sharding->not_a_boundary[s > 0 ? shape->end[s - 1] : 0];
}

static void compare_weights(const struct hapt_train_result *x, const struct hapt_train_result *y, const char *what)
{
    struct hapt_checkpoint *a = NULL, *b = NULL;
    CHECK_OK(hapt_checkpoint_find(&test_env, x->checkpoint, &arena, &a));
    CHECK_OK(hapt_checkpoint_find(&test_env, y->checkpoint, &arena, &b));
    for (int t = 0; a && b && t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t elements = hapt_tensor_elements(tensor);
        float *u = hapt_arena_alloc(&arena, (size_t)elements, 4), *v = hapt_arena_alloc(&arena, (size_t)elements, 4);
        for (int state = -1; state < (tensor->trainable ? 2 : 0); state++) {
            CHECK_OK(hapt_checkpoint_read(a, tensor->name, state, elements, u));
            CHECK_OK(hapt_checkpoint_read(b, tensor->name, state, elements, v));
            CHECK_MESSAGE(!memcmp(u, v, (size_t)elements * 4), "%s: %s (state %d) differs", what, tensor->name, state);
        }
    }
}

static int compared;

/* The stages without a split, and with it: with the slots of the launches, and with one for each microbatch. */
static void compare(const struct shape *shape, const char *sharded, const char *what)
{
    static int runs;
    struct hapt_train_result *whole =
        train(shape, make_config(hapt_arena_printf(&arena, "run%d", runs++), options_with(sharded)), NULL);
    for (int slots = 0; whole && slots <= shape->microbatches; slots += shape->microbatches) {
        struct shape split = *shape;
        split.split = true;
        for (int s = 0; s < shape->stages; s++) split.slots[s] = slots;
        struct hapt_train_result *result =
            train(&split, make_config(hapt_arena_printf(&arena, "run%d", runs++), options_with(sharded)), NULL);
        if (!result) return;
        CHECK_MESSAGE(!memcmp(result->history.loss, whole->history.loss, SPLIT_STEPS * sizeof(double)),
                      "%s, %d slots: losses differ by %g", what, slots,
                      worst(result->history.loss, whole->history.loss, SPLIT_STEPS));
        CHECK_MESSAGE(
            !memcmp(result->history.gradient_norm, whole->history.gradient_norm, SPLIT_STEPS * sizeof(double)),
            "%s, %d slots: gradient norms differ", what, slots);
        compare_weights(result, whole, what);
        for (int s = 0; test_env.world_rank == 0 && s < shape->stages; s++)
            CHECK_MESSAGE(result->planned_bytes[s] > 0 && result->planned_bytes[s] == result->measured_bytes[s],
                          "%s: stage %d takes %g bytes, planned %g", what, s, (double)result->measured_bytes[s],
                          (double)result->planned_bytes[s]);
        compared++;
    }
}

static void compare_model(const char *name)
{
    const int ranks = test_env.world_size;
    const struct shape pipeline = cut(ranks, 1, 0);
    compare(&pipeline, "no", name);
    if (ranks < 2) return;
    const struct shape data = cut(ranks - 1, 2, 0), tensor = cut(ranks - 1, 2, 2);
    compare(&data, "no", name);
    if (ranks > 2 || test_long()) compare(&data, "yes", name);
    if (is_possible(&tensor)) compare(&tensor, "no", name);
    struct shape folded = cut(2 * ranks, 1, 0); /* two stages on each rank */
    for (int s = ranks; s < 2 * ranks; s++) folded.shares[s] = 1 + s - ranks;
    if (ranks <= 2 || test_long()) compare(&folded, "no", name);
}

static void split_changes_no_bit(void)
{
    struct hapt_model *const usual = model;
    static const char *const gpt[] = {"gpt", "--layers",   "2",  "--hidden", "64",  "--heads",
                                      "4",   "--sequence", "64", "--vocab",  "256", NULL};
    static const char *const deep[] = {"gpt",  "--layers",          "4",  "--hidden", "32",  "--heads",
                                       "4",    "--sequence",        "64", "--vocab",  "256", "--dtype",
                                       "bf16", "--tied-embeddings", "no", NULL};
    static const char *const experts[] = {"bert-moe", "--layers",   "2",  "--hidden", "32",   "--heads",
                                          "4",        "--sequence", "24", "--vocab",  "96",   "--experts",
                                          "5",        "--top-k",    "2",  "--dtype",  "fp32", NULL};
    model = make("gpt", gpt, NULL);
    compare_model("gpt");
    model = make("skips", deep, add_skips);
    compare_model("skips");
    model = make("bert-moe", experts, NULL);
    compare_model("bert-moe");
    model = make("frozen", deep, freeze_front);
    compare_model("frozen");
    CHECK(compared >= 8);
    model = usual;
}

/* A checkpoint of a split run resumes without a split, with the bits of a run that never stopped. */
static void resumes_unsplit(void)
{
    struct shape split = cut(test_env.world_size, 1, 0), plain = split;
    const char *part[64];
    struct hapt_checkpoint *checkpoint = NULL;
    int count = 0;
    data_file = REFERENCE;
    for (const char *const *all = options_with("no"); all[count]; count++) part[count] = all[count];
    split.split = true;
    struct hapt_train_result *whole = train(&plain, make_config("unbroken", options_with("no")), NULL);
    part[count] = "--stop-after";
    part[count + 1] = "2";
    part[count + 2] = NULL;
    if (!whole || !train(&split, make_config("half", part), NULL)) return;
    part[count] = "--resume";
    part[count + 1] = NULL;
    struct hapt_config *config = make_config("half", part);
    CHECK_OK(hapt_train_resume(&test_env, config, model, &arena, &checkpoint));
    if (!CHECK(checkpoint && checkpoint->step == 2 && checkpoint->plan->split)) return;
    struct hapt_train_result *rest = train(&plain, config, checkpoint);
    if (!rest) return;
    CHECK(rest->first_step == 2 && !memcmp(rest->history.loss, whole->history.loss, SPLIT_STEPS * sizeof(double)));
    compare_weights(rest, whole, "resumed");
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    if (model) {
        RUN(split_changes_no_bit);
        RUN(resumes_unsplit);
    }
    clean_up();
    return test_finish();
}
