/* Synthesis against exhaustive search, HAP's own example, and itself in other ways. */
#include "fixture.h"
#include "synthesis_random.h"

/* ---- HAP Fig. 11 ---- */

/* e1 = placeholder, e2 = parameter, e3 = matmul(e1, e2), loss = sum(e3): the product costs 15 on shards, the sum 1, an all-gather 10;
 * whole ones cost twice that. The table's operator that sums to a loss is the cross-entropy. */
static double figure_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    (void)context, (void)device;
    return (work->op == 0 ? 15 : 1) * (work->cut.letter ? 1 : 2);
}

static double figure_collective_s(const void *context, enum hapt_collective_kind kind, double bytes, double largest_share)
{
    (void)context, (void)kind, (void)bytes, (void)largest_share;
    return 10;
}

static struct hapt_graph *figure_graph(struct hapt_arena *arena)
{
    struct hapt_graph *graph = NULL;
    int product[3] = {0, 0, -1}, loss[2], output[HAPT_MAX_OUTPUTS];
    struct hapt_tensor e1 = {.name = "e1", .kind = HAPT_TENSOR_INPUT, .dtype = HAPT_F32, .dims = 3, .shape = {4, 1, 4}};
    struct hapt_tensor e2 = {.name = "e2", .kind = HAPT_TENSOR_PARAMETER, .dtype = HAPT_F32, .dims = 2, .shape = {4, 4}};
    struct hapt_tensor y = {.name = "y", .kind = HAPT_TENSOR_INPUT, .role = HAPT_ROLE_TARGETS, .dtype = HAPT_I32, .dims = 2, .shape = {4, 1}};
    e1.producer = e2.producer = y.producer = e1.gradient = e2.gradient = y.gradient = e1.primal = e2.primal = y.primal = -1;
    CHECK_OK(hapt_graph_create(arena, &graph));
    CHECK_OK(hapt_graph_add_tensor(graph, &e1, &product[0]));
    CHECK_OK(hapt_graph_add_tensor(graph, &e2, &product[1]));
    CHECK_OK(hapt_graph_add_tensor(graph, &y, &loss[1]));
    CHECK_OK(hapt_graph_add_op(graph, "linear", "matmul", product, 3, NULL, NULL, &loss[0]));
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "sum", loss, 2, NULL, NULL, output));
    graph->loss = output[0];
    return graph;
}

static void figure_11(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    struct hapt_graph *graph = figure_graph(&arena);
    struct hapt_sharding *sharding;
    CHECK_OK(hapt_sharding_trivial(graph, &arena, &sharding));
    const struct hapt_axis axis = {.size = 4};
    const struct hapt_spmd_costs costs = {.compute_s = figure_compute_s, .collective_s = figure_collective_s};
    const struct hapt_synthesis_options options = {.exact = true};
    const int e3 = graph->op[0].output[0];
    struct hapt_axis_program program;
    struct hapt_synthesis_report report;
    struct hapt_program_price price;
    CHECK_OK(hapt_synthesise(sharding, 0, &axis, &costs, &options, &arena, &program, &report));
    CHECK_NEAR(report.cost_s, 16, 1e-12); /* program 7: placeholder-shard(0), parameter, matmul, sum */
    CHECK(report.optimal && report.stages == 1 && program.count == 2);
    CHECK(program.count == 2 && program.instruction[0].cut.letter == 'b' && program.instruction[1].cut.letter == 'b');

    const struct hapt_cut rows = {.letter = 'b'}, columns = {.letter = 'o'}, contracted = {.letter = 'i'}, whole = {0};
    const struct hapt_property split = {.kind = HAPT_PROPERTY_ALL_GATHER, .dim = 2}, partial = {.kind = HAPT_PROPERTY_ALL_REDUCE};
    struct hapt_axis_instruction by_columns[] = { /* e2 sharded, e3 gathered: sound, with the whole sum */
        {.op = 0, .cut = columns},
        {.op = -1, .tensor = e3, .kind = HAPT_COLLECTIVE_ALL_GATHER, .from = split},
        {.op = 1, .cut = whole}};
    CHECK_OK(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, by_columns}, &arena, &price));
    CHECK_NEAR(price.cost_s, 15 + 10 + 2, 1e-12);
    /* Programs 6 and 9: e1 sharded by rows and e2 by columns are no partial sums of e3. */
    struct hapt_axis_instruction six[] = {
        {.op = 0, .cut = rows}, {.op = -1, .tensor = e3, .kind = HAPT_COLLECTIVE_ALL_REDUCE, .from = partial}, {.op = 1, .cut = whole}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, six}, &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction nine[] = {{.op = 0, .cut = columns}, {.op = 1, .cut = rows}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){2, nine}, &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction unsummed[] = {{.op = 0, .cut = contracted}, {.op = 1, .cut = whole}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){2, unsummed}, &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction gathered[] = {/* program 5: parameters are not communicated (HAP 4.5) */
        {.op = -1, .tensor = graph->op[0].input[1], .kind = HAPT_COLLECTIVE_ALL_GATHER, .from = {.kind = HAPT_PROPERTY_ALL_GATHER, .dim = 1}},
        {.op = 0, .cut = rows}, {.op = 1, .cut = rows}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, gathered}, &arena, &price),
                HAPT_ERR_INFEASIBLE);
    hapt_arena_release(&arena);
}

/* ---- against every program ---- */

enum { MOST_NODES = 300000 }; /* of one instance; larger ones are not counted */

/* Counts instances that were looked at to the end. */
static void compare(uint64_t seed, int least_ops, int most_ops, bool memory, int *compared)
{
    struct hapt_arena arena;
    struct random_instance instance;
    struct hapt_axis_program program;
    struct hapt_synthesis_report report;
    double limit[RANDOM_DEVICES];
    long nodes;
    hapt_arena_init(&arena);
    random_instance(&instance, &arena, seed, least_ops, most_ops);
    enum hapt_status status = hapt_synthesise(instance.whole, 0, &instance.axis, &instance.costs, &instance.options, &arena, &program, &report);
    CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
    if (status == HAPT_OK) { /* the rules that make the graph that runs are the proof */
        struct hapt_sharding *sharding;
        status = hapt_sharding_apply(instance.whole, 0, &instance.axis, &program, &arena, &sharding);
        CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
    }
    hapt_fail_reset();
    if (status == HAPT_OK && memory) { /* now with less memory than that program takes, perhaps too little for any */
        struct hapt_program_price price;
        CHECK_OK(hapt_axis_program_price(instance.whole, 0, &instance.axis, &instance.costs, &instance.options, &program, &arena, &price));
        for (int j = 0; j < instance.axis.size; j++)
            limit[j] = price.memory_bytes[j] * (0.6 + 0.05 * (double)(hapt_hash(seed, &j, sizeof j) % 9));
        instance.options.memory_bytes = limit;
        status = hapt_synthesise(instance.whole, 0, &instance.axis, &instance.costs, &instance.options, &arena, &program, &report);
        CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
        hapt_fail_reset();
        if (status == HAPT_ERR_INFEASIBLE) report.cost_s = 1e9;
    }
    CHECK_MESSAGE(status == HAPT_ERR_INFEASIBLE || report.optimal, "seed %llu: not optimal: %s", (unsigned long long)seed, report.because);
    const double least = brute_force(&instance, report.cost_s * (1 - 1e-9), MOST_NODES, &nodes);
    CHECK_MESSAGE(least >= report.cost_s * (1 - 1e-9), "seed %llu: a program of %.9g s where synthesis found %.9g s", (unsigned long long)seed,
                  least, report.cost_s);
    /* The search is proven by the price of its program alone; now and then it is found again from nothing. */
    if (nodes > 0 && nodes < 20000 && seed % 4 == 0) {
        const double again = brute_force(&instance, status == HAPT_OK ? report.cost_s * 1.05 : 1e9, MOST_NODES, &nodes);
        if (nodes > 0 && status == HAPT_OK)
            CHECK_MESSAGE(fabs(again - report.cost_s) <= 1e-9 * report.cost_s, "seed %llu: every program costs %.9g s at least, synthesis says %.9g s",
                          (unsigned long long)seed, again, report.cost_s);
        if (nodes > 0 && status != HAPT_OK) CHECK(again == 1e9);
    }
    *compared += nodes > 0;
    hapt_arena_release(&arena);
}

static void agrees_with_every_program(void)
{
    const int wanted = test_long() ? 10000 : 1000;
    int compared = 0, tried = 0;
    for (; compared < wanted && tried < 2 * wanted; tried++) compare((uint64_t)tried + 1, 2, tried % 8 ? 4 : 6, false, &compared);
    CHECK_MESSAGE(compared >= wanted, "only %d of %d instances were small enough", compared, tried);
}

static void agrees_with_every_program_within_memory(void)
{
    const int wanted = test_long() ? 2000 : 200;
    int compared = 0, tried = 0;
    for (; compared < wanted && tried < 2 * wanted; tried++) compare((uint64_t)tried + 700001, 2, 4, true, &compared);
    CHECK_MESSAGE(compared >= wanted, "only %d of %d instances were small enough", compared, tried);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(figure_11);
    RUN(agrees_with_every_program);
    RUN(agrees_with_every_program_within_memory);
    return test_finish();
}
