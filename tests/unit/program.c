/* SPMD programs and memory plans of GPT ranges and of random graphs. */
#include "fixture.h"
#include "memory_check.h"
#include "programs.h"

#include "hapt/memory.h"

static size_t fake_scratch(void *context, const struct hapt_program *program, int op)
{
    (void)context, (void)program;
    return op < 0 ? 100 : (size_t)(op % 7) * 40;
}

static void check_memory(const struct hapt_program *program, int slots, int states)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_memory_options options = {.slots = slots, .state_count = states, .scratch = fake_scratch};
    struct hapt_memory_options one = options;
    struct hapt_memory_plan *plan = NULL, *single = NULL;
    one.slots = 1;
    CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
    CHECK_OK(hapt_memory_plan(program, &one, &arena, &single));
    if (plan && single) {
        CHECK_OK(memory_check(plan, program));
        CHECK(plan->total_bytes == plan->parameter_bytes + (size_t)slots * plan->activation_bytes);
        CHECK(plan->parameter_bytes == single->parameter_bytes && plan->activation_bytes == single->activation_bytes);
        CHECK(plan->total_bytes % 64 == 0);
    }
    hapt_arena_release(&arena);
}

/* A plan with wrong offsets must be refused. */
static void broken_plans_are_found(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 8, 2, 4, 11, 2, true, false});
    struct hapt_program *program = NULL;
    struct hapt_memory_plan *plan = NULL;
    const struct hapt_memory_options options = {.slots = 2, .state_count = 2};
    CHECK_OK(program_data_parallel(model->graph, 3, 14, 1, 1, &arena, &program));
    CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
    CHECK_OK(memory_check(plan, program));
    int found = 0, tried = 0;
    for (int t = 0; t < program->tensor_count; t++) {
        /* At the offset of the tensor before it in the same region, while both are alive. */
        if (plan->location[t].region != HAPT_REGION_SLOT || plan->location[t].offset == 0) continue;
        const size_t kept = plan->location[t].offset;
        plan->location[t].offset -= 64;
        tried++;
        found += memory_check(plan, program) != HAPT_OK;
        hapt_fail_reset();
        plan->location[t].offset = kept;
    }
    CHECK(tried > 3 && found == tried);
    enum hapt_memory_space *space[] = {&plan->location[program->tensor_count / 2].space, &plan->state_space};
    for (int k = 0; k < 2; k++) {
        CHECK(*space[k] == HAPT_SPACE_DEVICE);
        *space[k] = HAPT_SPACE_HOST; /* the plan has no host memory */
        CHECK_FAILS(memory_check(plan, program), HAPT_ERR_INTERNAL);
        *space[k] = HAPT_SPACE_DEVICE;
    }
    plan->total_bytes += 64;
    CHECK_FAILS(memory_check(plan, program), HAPT_ERR_INTERNAL);
    hapt_arena_release(&arena);
}

static bool contains(const struct hapt_boundary *boundary, int tensor)
{
    for (int b = 0; b < boundary->count; b++)
        if (boundary->tensor[b] == tensor) return true;
    return false;
}

/* Each tensor that enters a stage leaves another: activations an earlier one, gradients a later one. */
static void check_cuts(const struct hapt_graph *graph, const int *cut, int stages, struct hapt_arena *arena)
{
    struct hapt_program *program[16];
    for (int s = 0; s < stages; s++)
        CHECK_OK(program_data_parallel(graph, cut[s], cut[s + 1], 1, 1, arena, &program[s]));
    for (int s = 0; s < stages; s++) {
        CHECK_OK(program_check(program[s]));
        for (int b = 0; b < program[s]->forward_in.count; b++) {
            int makers = 0;
            for (int p = 0; p < s; p++) makers += contains(&program[p]->forward_out, program[s]->forward_in.tensor[b]);
            CHECK_MESSAGE(makers == 1, "%s has %d makers", graph->tensor[program[s]->forward_in.tensor[b]].name,
                          makers);
        }
        for (int b = 0; b < program[s]->backward_in.count; b++) {
            int makers = 0;
            for (int p = s + 1; p < stages; p++)
                makers += contains(&program[p]->backward_out, program[s]->backward_in.tensor[b]);
            CHECK_MESSAGE(makers >= 1, "%s has no source", graph->tensor[program[s]->backward_in.tensor[b]].name);
        }
        for (int b = 0; b < program[s]->forward_out.count; b++) {
            int readers = 0;
            for (int p = s + 1; p < stages; p++)
                readers += contains(&program[p]->forward_in, program[s]->forward_out.tensor[b]);
            CHECK(readers >= 1);
        }
        for (int b = 0; b < program[s]->backward_out.count; b++) {
            int readers = 0;
            for (int p = 0; p < s; p++)
                readers += contains(&program[p]->backward_in, program[s]->backward_out.tensor[b]);
            CHECK(readers >= 1);
        }
    }
    CHECK(program[0]->forward_in.count == 0 && program[0]->backward_out.count == 0);
    CHECK(program[stages - 1]->forward_out.count == 0 && program[stages - 1]->backward_in.count == 0);
}

static void gpt_ranges(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 16, 2, 8, 32, 4, tied, tied});
        const struct hapt_graph *graph = model->graph;
        for (int first = 0; first < graph->forward_count; first++) {
            for (int end = first + 1; end <= graph->forward_count; end++) {
                const int nodes = 1 + (first + end) % 2, devices = 1 + first % 2;
                struct hapt_program *program = NULL;
                CHECK_OK(program_data_parallel(graph, first, end, nodes, devices, &arena, &program));
                if (!program) continue;
                CHECK_OK(program_check(program));
                check_memory(program, 1 + end % 5, end % 3);
            }
        }
        for (int k = 1; k < graph->forward_count; k++)
            check_cuts(graph, (int[]){0, k, graph->forward_count}, 2, &arena);
        hapt_arena_release(&arena);
    }
}

/* The properties that data parallelism must have, and the content of the REDUCE section. */
static void gpt_properties(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){1, 16, 2, 8, 32, 8, true, false});
    const struct hapt_graph *graph = model->graph;
    struct hapt_program *program = NULL, *single = NULL;
    CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 2, 2, &arena, &program));
    CHECK_OK(program_data_parallel(graph, 0, graph->forward_count, 1, 1, &arena, &single));
    double gradient_bytes = 0;
    int parameters = 0, sums = 0;
    for (int t = 0; t < program->tensor_count; t++) {
        const struct hapt_program_tensor *mine = &program->tensor[t];
        const struct hapt_tensor *tensor = &program->graph->tensor[mine->tensor];
        const bool resident = tensor->kind == HAPT_TENSOR_PARAMETER || tensor->role == HAPT_ROLE_LOSS_SCALE;
        const bool partial = mine->tensor == graph->loss ||
                             (tensor->primal >= 0 && graph->tensor[tensor->primal].kind == HAPT_TENSOR_PARAMETER);
        const enum hapt_property_kind expected = resident  ? HAPT_PROPERTY_REPLICATED
                                                 : partial ? HAPT_PROPERTY_PARTIAL
                                                           : HAPT_PROPERTY_SHARDED;
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            CHECK_MESSAGE(mine->property[axis].kind == expected ||
                              (expected == HAPT_PROPERTY_PARTIAL && mine->tensor != graph->loss),
                          "%s has property %d", tensor->name, mine->property[axis].kind);
        /* A parameter's gradient has three versions: as written, summed over axis 0, summed over both. */
        if (expected == HAPT_PROPERTY_PARTIAL && mine->tensor != graph->loss) {
            const bool last = mine->tensor == program->graph->tensor[tensor->primal].gradient;
            sums += !last;
            CHECK((mine->property[1].kind == HAPT_PROPERTY_PARTIAL) == !last);
            CHECK(!last || mine->property[0].kind == HAPT_PROPERTY_REPLICATED);
            CHECK(mine->root == program->local[program->graph->tensor[tensor->primal].gradient]);
        }
        if (expected == HAPT_PROPERTY_SHARDED) CHECK(mine->shape[0] == tensor->shape[0] / 4);
        if (tensor->kind == HAPT_TENSOR_PARAMETER) {
            parameters++;
            gradient_bytes += 4.0 * (double)hapt_tensor_elements(tensor);
        }
    }
    CHECK(sums == 2 * parameters);
    /* Over axis 0, then over axis 1, in place. */
    CHECK(program->step_count[HAPT_SECTION_REDUCE] == 2 * parameters);
    for (int s = 0; s < program->step_count[HAPT_SECTION_REDUCE]; s++)
        CHECK(program->step[HAPT_SECTION_REDUCE][s].kind == HAPT_COLLECTIVE_ALL_REDUCE &&
              program->step[HAPT_SECTION_REDUCE][s].axis == s / parameters);
    CHECK_NEAR(program_collective_bytes(program, HAPT_SECTION_REDUCE), 2 * gradient_bytes, 0);
    CHECK_NEAR(program_collective_bytes(program, HAPT_SECTION_BACKWARD), 0, 0);
    CHECK(single->step_count[HAPT_SECTION_REDUCE] == 0);
    CHECK(program->inputs == (1 << HAPT_ROLE_TOKENS | 1 << HAPT_ROLE_TARGETS | 1 << HAPT_ROLE_LOSS_SCALE));
    CHECK(program->step_count[HAPT_SECTION_WEIGHT] == 0); /* nobody asked for a split */
    for (int section = 0; section <= HAPT_SECTION_BACKWARD; section++) {
        const double whole = program_flops(single, section);
        CHECK(whole > 0);
        CHECK_NEAR(program_flops(program, section), whole / 4, 1e-9 * whole);
    }
    hapt_fail_reset();
    CHECK_FAILS(program_data_parallel(graph, 0, 3, 9, 1, &arena, &program), HAPT_ERR_INFEASIBLE); /* of 8 rows */
    CHECK_FAILS(program_data_parallel(graph, 0, 3, 4, 4, &arena, &program), HAPT_ERR_INFEASIBLE);
    hapt_arena_release(&arena);
}

static void random_graphs(void)
{
    const int cases = test_long() ? 3000 : 150;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 77;
        hapt_arena_init(&arena);
        const long before = test_failures;
        const struct hapt_graph *graph = fixture_random(&arena, &random, 3 + k % 20);
        int cut[17] = {0}, stages = 1;
        while (stages < 5 && cut[stages - 1] + 1 < graph->forward_count) {
            const int rest = graph->forward_count - cut[stages - 1];
            cut[stages] = cut[stages - 1] + 1 + (int)(hapt_random_next(&random) % (uint64_t)rest);
            if (cut[stages] >= graph->forward_count) break;
            stages++;
        }
        cut[stages] = graph->forward_count;
        check_cuts(graph, cut, stages, &arena);
        for (int s = 0; s < stages; s++) {
            struct hapt_program *program = NULL;
            CHECK_OK(program_data_parallel(graph, cut[s], cut[s + 1], 1, 1 << k % 3, &arena, &program));
            if (program) check_memory(program, 1 + k % 4, k % 3);
        }
        CHECK_MESSAGE(test_failures == before, "random graph %d", k);
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(gpt_ranges);
    RUN(gpt_properties);
    RUN(broken_plans_are_found);
    RUN(random_graphs);
    return test_finish();
}
