/* Memory of ranges without their programs: to the byte what the planner says of each program. */
#include "fixture.h"

#include "hapt/memory.h"

static size_t fake_scratch(void *context, const struct hapt_program *program, int op)
{
    (void)context;
    if (op < 0) return (size_t)program->tensor_count * 24 + 100;
    return (size_t)(op * 7919 % 13) * 400;
}

static long compared;

static void compare(const struct hapt_graph *graph, int dp, int tp, int states, bool scratch, const char *what)
{
    struct hapt_arena arena;
    struct hapt_sharding *sharding = NULL;
    struct hapt_memory_ranges *ranges = NULL;
    struct hapt_memory_work *work = NULL;
    const struct hapt_memory_options options = {
        .slots = 3, .state_count = states, .scratch = scratch ? fake_scratch : NULL};
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_tensor_parallel(graph, dp, tp, &arena, &sharding));
    if (sharding) CHECK_OK(hapt_memory_ranges_create(sharding, &options, &arena, &ranges));
    if (ranges) CHECK_OK(hapt_memory_work_create(ranges, &arena, &work));
    for (int first = 0; work && first < graph->forward_count; first++) {
        for (int end = first + 1; end <= graph->forward_count; end++) {
            struct hapt_arena scratch_arena;
            struct hapt_program *program = NULL;
            struct hapt_memory_plan *plan = NULL;
            struct hapt_memory_figures figures;
            hapt_arena_init(&scratch_arena);
            if (hapt_program_build(sharding, first, end, &scratch_arena, &program) == HAPT_OK) {
                CHECK_OK(hapt_memory_plan(program, &options, &scratch_arena, &plan));
                CHECK_OK(hapt_memory_ranges_of(ranges, first, end, work, &figures));
                CHECK_MESSAGE(figures.parameter_bytes == plan->parameter_bytes &&
                                  figures.activation_bytes == plan->activation_bytes &&
                                  figures.trained_elements == plan->trained_elements &&
                                  figures.copies == (plan->copy_offset != (size_t)-1),
                              "%s, dp %d, tp %d, operators [%d, %d): %zu and %zu, planned %zu and %zu", what, dp, tp, first,
                              end, figures.parameter_bytes, figures.activation_bytes, plan->parameter_bytes,
                              plan->activation_bytes);
                compared++;
            }
            hapt_fail_reset();
            hapt_arena_release(&scratch_arena);
        }
    }
    hapt_arena_release(&arena);
}

static void gpt(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){3, 16, 4, 8, 37, 4, tied, tied});
        compare(model->graph, 1, 1, 2, true, "GPT");
        compare(model->graph, 2, 2, 2, false, "GPT");
        compare(model->graph, 1, 4, 0, true, "GPT");
        hapt_arena_release(&arena);
    }
}

static void frozen_weights(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 24, 4, true, true});
    struct hapt_graph *graph = model->graph;
    static const char *const frozen[] = {"wte.weight", "h.0.attn.c_attn.weight", "h.0.mlp.c_fc.weight", "ln_f.weight",
                                         "h.0.ln_2.bias"};
    graph->op_count = graph->forward_count; /* the backward part again, with frozen weights */
    graph->tensor_count = hapt_graph_find_tensor(graph, "loss_scale");
    for (int k = 0; k < 5; k++) graph->tensor[hapt_graph_find_tensor(graph, frozen[k])].trainable = false;
    CHECK_OK(hapt_graph_differentiate(graph));
    compare(graph, 1, 1, 2, true, "frozen");
    compare(graph, 2, 2, 1, false, "frozen");
    hapt_arena_release(&arena);
}

static void random_graphs(void)
{
    const int cases = test_long() ? 2000 : 80;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 4242;
        char name[32];
        hapt_arena_init(&arena);
        const struct hapt_graph *graph = fixture_random(&arena, &random, 3 + k % 28);
        snprintf(name, sizeof name, "random graph %d", k);
        compare(graph, 1 + k % 2, 1 << k % 3, k % 3, k % 2, name);
        hapt_arena_release(&arena);
    }
    CHECK_MESSAGE(compared > 20000, "only %ld ranges compared", compared);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt);
    RUN(frozen_weights);
    RUN(random_graphs);
    return test_finish();
}
