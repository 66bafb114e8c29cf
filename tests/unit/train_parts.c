/* Parts of training without ranks: transfers between the stages of random graphs by brute force, the learning rate,
 * clipping, the median. */
#include "fixture.h"
#include "programs.h"

#include "hapt/train.h"

#include "../../src/train/loss_scale.h"

enum { MAX_CHUNKS = 6 };

static bool routed(const struct hapt_edges *edges, bool backward, int from, int to, int tensor)
{
    int found = 0;
    for (int r = 0; r < edges->count; r++) {
        const struct hapt_edge *edge = &edges->edge[r];
        if (edge->backward != backward || edge->from != from || edge->to != to) continue;
        for (int i = 0; i < edge->count; i++) found += edge->tensor[i] == tensor;
    }
    return found == 1;
}

static int entries(const struct hapt_edges *edges)
{
    int count = 0;
    for (int r = 0; r < edges->count; r++) count += edges->edge[r].count;
    return count;
}

/* Runs through the operators in the order of one device, and records which chunk needs which tensor from which
 * chunk. */
static int check_edges(const struct hapt_graph *graph, const int *end, int chunks, const struct hapt_edges *edges)
{
    int *newest = malloc((size_t)graph->tensor_count * sizeof *newest); /* chunk that has the current value */
    bool(*has)[MAX_CHUNKS] = calloc((size_t)graph->tensor_count, sizeof *has);
    int needed = 0;
    for (int t = 0; t < graph->tensor_count; t++) newest[t] = -1;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        int chunk = 0;
        while (op->forward_op >= end[chunk]) chunk++;
        HAPT_ASSERT(chunk < chunks);
        for (int k = 0; k < op->input_count + op->output_count; k++) {
            const int t = k < op->input_count ? op->input[k] : op->output[k - op->input_count];
            const bool reads = k < op->input_count || (op->accumulate >> (k - op->input_count) & 1);
            if (t < 0 || !reads || newest[t] < 0 || has[t][chunk]) continue;
            const struct hapt_tensor *tensor = &graph->tensor[t];
            const bool summed_here =
                tensor->kind == HAPT_TENSOR_GRADIENT && graph->tensor[tensor->primal].kind == HAPT_TENSOR_PARAMETER;
            if (summed_here) continue; /* gradients of parameters are not sent */
            const bool backward = tensor->kind == HAPT_TENSOR_GRADIENT;
            CHECK_MESSAGE(routed(edges, backward, newest[t], chunk, t), "%s from chunk %d to %d", tensor->name,
                          newest[t], chunk);
            has[t][chunk] = true;
            needed++;
        }
        for (int k = 0; k < op->output_count; k++) {
            const int t = op->output[k];
            if (t < 0) continue;
            newest[t] = chunk;
            for (int c = 0; c < chunks; c++) has[t][c] = c == chunk;
        }
    }
    free(newest);
    free(has);
    return needed;
}

static void edges_by_brute_force(void)
{
    const int rounds = test_long() ? 5000 : 300;
    for (int round = 0; round < rounds; round++) {
        const long before = test_failures;
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        uint64_t random = (uint64_t)round + 1;
        struct hapt_graph *graph = fixture_random(&arena, &random, 4 + (int)(hapt_random_next(&random) % 20));
        CHECK_OK(hapt_graph_differentiate(graph));
        struct hapt_program *program[MAX_CHUNKS];
        int end[MAX_CHUNKS], chunks = 0;
        for (int at = 0; at < graph->forward_count; chunks++) {
            int next = at + 1 + (int)(hapt_random_next(&random) % 6);
            if (next > graph->forward_count || chunks == MAX_CHUNKS - 1) next = graph->forward_count;
            CHECK_OK(program_data_parallel(graph, at, next, 1, 1, &arena, &program[chunks]));
            end[chunks] = at = next;
        }
        struct hapt_edges *edges = NULL;
        CHECK_OK(hapt_edges_build(program, chunks, NULL, &arena, &edges));
        if (edges) CHECK(check_edges(graph, end, chunks, edges) == entries(edges));
        if (test_failures > before) fprintf(stderr, "round %d, %d chunks\n", round, chunks);
        hapt_arena_release(&arena);
    }
}

static void ties_of_gpt(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(
            &arena,
            (struct fixture_gpt){
                .layers = 2, .hidden = 16, .heads = 2, .sequence = 8, .vocab = 11, .microbatch = 2, .tied = tied});
        const int ops = model->graph->forward_count, cut[4] = {0, 3, ops - 4, ops};
        struct hapt_program *program[3];
        struct hapt_ties *ties = NULL;
        for (int c = 0; c < 3; c++)
            CHECK_OK(program_data_parallel(model->graph, cut[c], cut[c + 1], 1, 1, &arena, &program[c]));
        CHECK_OK(hapt_ties_find(program, 3, &arena, &ties));
        CHECK(ties && ties->count == tied);
        if (ties && ties->count == 1) {
            CHECK(ties->tie[0].chunk_count == 2 && ties->tie[0].chunk[0] == 0 && ties->tie[0].chunk[1] == 2);
            CHECK(!strcmp(model->graph->tensor[ties->tie[0].tensor].name, "wte.weight"));
        }
        hapt_arena_release(&arena);
    }
}

static void learning_rate(void)
{
    struct hapt_optimizer_options options = {
        .schedule = HAPT_RATE_COSINE, .learning_rate = 2, .min_ratio = 0.1, .warmup_steps = 10, .steps = 110};
    CHECK_NEAR(hapt_optimizer_rate(&options, 0), 0.2, 1e-12);
    CHECK_NEAR(hapt_optimizer_rate(&options, 9), 2, 1e-12);
    CHECK_NEAR(hapt_optimizer_rate(&options, 10), 2, 1e-12);
    CHECK_NEAR(hapt_optimizer_rate(&options, 60), 2 * 0.55, 1e-12);
    CHECK_NEAR(hapt_optimizer_rate(&options, 110), 0.2, 1e-12);
    for (int64_t s = 10; s < 109; s++) CHECK(hapt_optimizer_rate(&options, s + 1) < hapt_optimizer_rate(&options, s));
    options.schedule = HAPT_RATE_CONSTANT;
    CHECK(hapt_optimizer_rate(&options, 0) == 2 && hapt_optimizer_rate(&options, 99) == 2);
    /* steps 10 to 110; linear, stable with a decay of the last 40, root of 10 / step */
    static const struct {
        enum hapt_rate_schedule schedule;
        int64_t step;
        double rate;
    } expected[] = {{HAPT_RATE_LINEAR, 10, 2},
                    {HAPT_RATE_LINEAR, 60, 1.1},
                    {HAPT_RATE_LINEAR, 85, 0.65},
                    {HAPT_RATE_LINEAR, 110, 0.2},
                    {HAPT_RATE_WSD, 10, 2},
                    {HAPT_RATE_WSD, 70, 2},
                    {HAPT_RATE_WSD, 71, 1.955},
                    {HAPT_RATE_WSD, 90, 1.1},
                    {HAPT_RATE_WSD, 110, 0.2},
                    {HAPT_RATE_INVERSE_SQRT, 39, 1},
                    {HAPT_RATE_INVERSE_SQRT, 89, 2.0 / 3},
                    {HAPT_RATE_INVERSE_SQRT, 99999, 0.2}};
    options.decay_steps = 40;
    for (size_t i = 0; i < sizeof expected / sizeof *expected; i++) {
        options.schedule = expected[i].schedule;
        CHECK_NEAR(hapt_optimizer_rate(&options, 9), 2, 1e-12);
        CHECK_NEAR(hapt_optimizer_rate(&options, 4), 1, 1e-12);
        CHECK_NEAR(hapt_optimizer_rate(&options, expected[i].step), expected[i].rate, 1e-12);
    }
    options.schedule = HAPT_RATE_WSD;
    options.decay_steps = 1000; /* more than there are: from the warm-up on */
    CHECK_NEAR(hapt_optimizer_rate(&options, 60), 1.1, 1e-12);
    options.schedule = HAPT_RATE_COSINE;
    options.warmup_steps = 200; /* longer than the run */
    CHECK_NEAR(hapt_optimizer_rate(&options, 100), 2 * 101 / 200.0, 1e-12);
}

static void clipping(void)
{
    const struct hapt_optimizer_options options = {.learning_rate = 1, .clip_norm = 2};
    struct hapt_update update;
    hapt_optimizer_update(&options, 4, 1.9, 8, &update);
    CHECK(update.gradient_scale == 1 && update.step == 5 && update.microbatches == 8);
    hapt_optimizer_update(&options, 4, 8, 1, &update);
    CHECK(update.gradient_scale == 0.25);
    const struct hapt_optimizer_options unlimited = {.learning_rate = 1};
    hapt_optimizer_update(&unlimited, 0, 1e9, 1, &update);
    CHECK(update.gradient_scale == 1);
}

/* The loss scale: halved by an overflow, doubled by 2000 good steps, and the same when recomputed from the norms. Only
 * fp16 has one. */
static void loss_scale(void)
{
    enum { STEPS = 9000 };
    static double norm[STEPS];
    struct loss_scale running, again;
    uint64_t random = 5;
    double expected = 65536;
    int64_t good = 0, skipped = 0;
    loss_scale_begin(&running, HAPT_F16, 65536, NULL, 0);
    for (int step = 0; step < STEPS; step++) {
        CHECK(running.value == expected && running.skipped == skipped);
        norm[step] = hapt_random_unit(&random) < 1e-3 ? INFINITY : 1;
        CHECK(loss_scale_overflows(&running, 2.5, norm[step]) == isinf(norm[step]));
        loss_scale_note(&running, norm[step]);
        if (isinf(norm[step]))
            expected /= 2, good = 0, skipped++;
        else if (++good == 2000)
            expected *= 2, good = 0;
    }
    CHECK(skipped > 2);
    loss_scale_begin(&again, HAPT_F16, 65536, norm, STEPS);
    CHECK(again.value == running.value && again.good == running.good && again.skipped == running.skipped);
    CHECK(!loss_scale_overflows(&running, NAN, INFINITY)); /* the forward pass itself overflows: no scale helps */
    for (int k = 0; k < 64; k++) loss_scale_note(&running, NAN);
    CHECK(running.value <= 1 && !loss_scale_overflows(&running, 1, INFINITY));
    loss_scale_begin(&running, HAPT_BF16, 65536, norm, STEPS);
    CHECK(running.value == 1 && !loss_scale_overflows(&running, 1, INFINITY));
}

static void median(void)
{
    const double time[] = {9, 8, 7, 1, 3, 2, 5, 4, 6};
    CHECK(hapt_train_median(time, 0, 0, 3) == 0);
    CHECK(hapt_train_median(time, 3, 8, 0) == 3);
    CHECK(hapt_train_median(time, 0, 9, 3) == 3.5);
    CHECK(hapt_train_median(time, 0, 2, 3) == 8.5);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(edges_by_brute_force);
    RUN(ties_of_gpt);
    RUN(learning_rate);
    RUN(clipping);
    RUN(loss_scale);
    RUN(median);
    return test_finish();
}
