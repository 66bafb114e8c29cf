/* Synthesis compared with exhaustive search, with HAP's own example, and with itself under other settings. */
#include "fixture.h"
#include "spmd_rates.h"
#include "synthesis_random.h"

/* ---- HAP Fig. 11 ---- */

/* e1 = placeholder, e2 = parameter, e3 = matmul(e1, e2), loss = sum(e3). On shards the product costs 15 and the sum 1;
 * whole ones cost twice that. An all-gather costs 10. In the operator table the sum to a loss is the cross-entropy. */
static double figure_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    (void)context, (void)device;
    return (work->op == 0 ? 15 : 1) * (work->cut.letter ? 1 : 2);
}

static double figure_collective_s(const void *context, enum hapt_collective_kind kind, double bytes,
                                  double largest_share)
{
    (void)context, (void)kind, (void)bytes, (void)largest_share;
    return 10;
}

static struct hapt_graph *figure_graph(struct hapt_arena *arena)
{
    struct hapt_graph *graph = NULL;
    int product[3] = {0, 0, -1}, loss[2], output[HAPT_MAX_OUTPUTS];
    struct hapt_tensor e1 = {.name = "e1", .kind = HAPT_TENSOR_INPUT, .dtype = HAPT_F32, .dims = 3, .shape = {4, 1, 4}};
    struct hapt_tensor e2 = {
        .name = "e2", .kind = HAPT_TENSOR_PARAMETER, .dtype = HAPT_F32, .dims = 2, .shape = {4, 4}};
    struct hapt_tensor y = {.name = "y",
                            .kind = HAPT_TENSOR_INPUT,
                            .role = HAPT_ROLE_TARGETS,
                            .dtype = HAPT_I32,
                            .dims = 2,
                            .shape = {4, 1}};
    e1.producer = e2.producer = y.producer = e1.gradient = e2.gradient = y.gradient = e1.primal = e2.primal = y.primal =
        -1;
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
    const struct hapt_property split = {.kind = HAPT_PROPERTY_SHARDED, .dim = 2},
                               partial = {.kind = HAPT_PROPERTY_PARTIAL};
    struct hapt_axis_instruction by_columns[] = {
        /* e2 sharded, e3 gathered: valid, with the whole sum */
        {.op = 0, .cut = columns},
        {.op = -1, .tensor = e3, .kind = HAPT_COLLECTIVE_ALL_GATHER, .from = split},
        {.op = 1, .cut = whole}};
    CHECK_OK(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, by_columns},
                                     &arena, &price));
    CHECK_NEAR(price.cost_s, 15 + 10 + 2, 1e-12);
    /* Programs 6 and 9: e1 sharded by rows and e2 by columns give no partial sums of e3. */
    struct hapt_axis_instruction six[] = {{.op = 0, .cut = rows},
                                          {.op = -1, .tensor = e3, .kind = HAPT_COLLECTIVE_ALL_REDUCE, .from = partial},
                                          {.op = 1, .cut = whole}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, six},
                                        &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction nine[] = {{.op = 0, .cut = columns}, {.op = 1, .cut = rows}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){2, nine},
                                        &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction unsummed[] = {{.op = 0, .cut = contracted}, {.op = 1, .cut = whole}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){2, unsummed},
                                        &arena, &price),
                HAPT_ERR_INFEASIBLE);
    struct hapt_axis_instruction gathered[] = {/* program 5: parameters are not communicated (HAP 4.5) */
                                               {.op = -1,
                                                .tensor = graph->op[0].input[1],
                                                .kind = HAPT_COLLECTIVE_ALL_GATHER,
                                                .from = {.kind = HAPT_PROPERTY_SHARDED, .dim = 1}},
                                               {.op = 0, .cut = rows},
                                               {.op = 1, .cut = rows}};
    CHECK_FAILS(hapt_axis_program_price(sharding, 0, &axis, &costs, &options, &(struct hapt_axis_program){3, gathered},
                                        &arena, &price),
                HAPT_ERR_INFEASIBLE);
    hapt_arena_release(&arena);
}

/* ---- against every program ---- */

enum { MOST_NODES = 300000 }; /* of one instance; larger instances are not counted */

/* Counts the instances whose search was complete. */
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
    enum hapt_status status = hapt_synthesise(instance.whole, 0, &instance.axis, &instance.costs, &instance.options,
                                              &arena, &program, &report);
    CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
    if (status == HAPT_OK) { /* the rules that make the graph that runs are the proof */
        struct hapt_sharding *sharding;
        status = hapt_sharding_apply(instance.whole, 0, &instance.axis, &program, &arena, &sharding);
        CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
    }
    hapt_fail_reset();
    if (status == HAPT_OK &&
        memory) { /* now with less memory than that program needs, perhaps too little for any program */
        struct hapt_program_price price;
        CHECK_OK(hapt_axis_program_price(instance.whole, 0, &instance.axis, &instance.costs, &instance.options,
                                         &program, &arena, &price));
        for (int j = 0; j < instance.axis.size; j++)
            limit[j] = price.memory_bytes[j] * (0.6 + 0.05 * (double)(hapt_hash(seed, &j, sizeof j) % 9));
        instance.options.memory_bytes = limit;
        status = hapt_synthesise(instance.whole, 0, &instance.axis, &instance.costs, &instance.options, &arena,
                                 &program, &report);
        CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
        hapt_fail_reset();
        if (status == HAPT_ERR_INFEASIBLE) report.cost_s = 1e9;
    }
    CHECK_MESSAGE(status == HAPT_ERR_INFEASIBLE || report.optimal, "seed %llu: not optimal: %s",
                  (unsigned long long)seed, report.because);
    const double least = brute_force(&instance, report.cost_s * (1 - 1e-9), MOST_NODES, &nodes);
    CHECK_MESSAGE(least >= report.cost_s * (1 - 1e-9), "seed %llu: a program of %.9g s where synthesis found %.9g s",
                  (unsigned long long)seed, least, report.cost_s);
    /* The price of the known program alone suffices to prove the search. Some rounds also search again without it. */
    if (nodes > 0 && nodes < 20000 && seed % 4 == 0) {
        const double again = brute_force(&instance, status == HAPT_OK ? report.cost_s * 1.05 : 1e9, MOST_NODES, &nodes);
        if (nodes > 0 && status == HAPT_OK)
            CHECK_MESSAGE(fabs(again - report.cost_s) <= 1e-9 * report.cost_s,
                          "seed %llu: every program costs %.9g s at least, synthesis says %.9g s",
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
    for (; compared < wanted && tried < 2 * wanted; tried++)
        compare((uint64_t)tried + 1, 2, tried % 8 ? 4 : 6, false, &compared);
    CHECK_MESSAGE(compared >= wanted, "only %d of %d instances were small enough", compared, tried);
}

static void agrees_with_every_program_within_memory(void)
{
    const int wanted = test_long() ? 2000 : 200;
    int compared = 0, tried = 0;
    for (; compared < wanted && tried < 2 * wanted; tried++) compare((uint64_t)tried + 700001, 2, 4, true, &compared);
    CHECK_MESSAGE(compared >= wanted, "only %d of %d instances were small enough", compared, tried);
}

/* ---- long models ---- */

struct rated {
    struct spmd_rates rates;
    struct hapt_spmd_costs costs;
    double flops[8], bytes[8];
    int kind[8];
};

static void set_rates(struct rated *rated, int size, double bandwidth)
{
    rated->rates = (struct spmd_rates){.size = size,
                                       .flops_per_s = rated->flops,
                                       .bytes_per_s = rated->bytes,
                                       .launch_s = 1e-6,
                                       .latency_s = 2e-6,
                                       .bandwidth_bytes_per_s = bandwidth};
    for (int j = 0; j < size; j++) rated->flops[j] = 1e11, rated->bytes[j] = 1e10;
    spmd_rates_costs(&rated->rates, rated->kind, &rated->costs);
}

static struct hapt_sharding *gpt(struct hapt_arena *arena, int layers)
{
    struct hapt_model *model = fixture_gpt(arena, (struct fixture_gpt){layers, 32, 4, 8, 64, 8, false, false});
    struct hapt_sharding *whole = NULL;
    CHECK_OK(hapt_graph_differentiate(model->graph));
    CHECK_OK(hapt_sharding_trivial(model->graph, arena, &whole));
    return whole;
}

static bool same_program(const struct hapt_axis_program *a, const struct hapt_axis_program *b)
{
    bool same = a->count == b->count;
    for (int i = 0; same && i < a->count; i++) {
        const struct hapt_axis_instruction *x = &a->instruction[i], *y = &b->instruction[i];
        same = x->op == y->op && x->cut.letter == y->cut.letter && x->tensor == y->tensor && x->kind == y->kind &&
               hapt_property_same(x->to, y->to);
    }
    return same;
}

/* Segments joined by a shortest path give the result of searching the whole graph. A second run gives the same result,
 * and the rules accept it. */
static void segments_are_the_whole(void)
{
    static const double bandwidth[] = {1e8, 1e9, 1e10};
    for (int layers = 1; layers <= (test_long() ? 4 : 2); layers++) {
        for (int b = 0; b < 3; b++) {
            struct hapt_arena arena;
            struct rated rated;
            struct hapt_axis_program joined, again, at_once;
            struct hapt_synthesis_report report, exact;
            struct hapt_sharding *applied;
            const struct hapt_axis axis = {.size = 4};
            hapt_arena_init(&arena);
            set_rates(&rated, 4, bandwidth[b]);
            struct hapt_sharding *whole = gpt(&arena, layers);
            CHECK_OK(hapt_synthesise(whole, 0, &axis, &rated.costs, &(struct hapt_synthesis_options){0}, &arena,
                                     &joined, &report));
            CHECK_OK(hapt_synthesise(whole, 0, &axis, &rated.costs, &(struct hapt_synthesis_options){0}, &arena, &again,
                                     NULL));
            CHECK_OK(hapt_synthesise(whole, 0, &axis, &rated.costs, &(struct hapt_synthesis_options){.exact = true},
                                     &arena, &at_once, &exact));
            CHECK(report.segments > 1 && exact.segments == 1 && exact.optimal && !report.optimal && report.because[0]);
            CHECK_NEAR(report.cost_s, exact.cost_s, 1e-9 * exact.cost_s);
            CHECK(same_program(&joined, &again));
            CHECK_OK(hapt_sharding_apply(whole, 0, &axis, &joined, &arena, &applied));
            hapt_arena_release(&arena);
        }
    }
}

/* Less memory costs time, and the limit holds. Too little memory is refused. */
static void memory_is_respected(void)
{
    struct hapt_arena arena;
    struct rated rated;
    struct hapt_axis_program program;
    struct hapt_synthesis_report report;
    struct hapt_sharding *applied;
    const struct hapt_axis axis = {.size = 4};
    double limit[4], cost = 0;
    hapt_arena_init(&arena);
    set_rates(&rated, 4, 1e8);
    struct hapt_sharding *whole = gpt(&arena, 4);
    struct hapt_synthesis_options options = {.in_flight = 4};
    CHECK_OK(hapt_synthesise(whole, 0, &axis, &rated.costs, &options, &arena, &program, &report));
    const double free_bytes = report.memory_bytes;
    options.memory_bytes = limit;
    for (int percent = 100; percent >= 80; percent -= 10) {
        for (int j = 0; j < 4; j++) limit[j] = free_bytes * percent / 100;
        const enum hapt_status status =
            hapt_synthesise(whole, 0, &axis, &rated.costs, &options, &arena, &program, &report);
        CHECK(status == HAPT_OK || (status == HAPT_ERR_INFEASIBLE && percent < 100));
        hapt_fail_reset();
        if (status != HAPT_OK) break;
        CHECK(report.memory_bytes <= limit[0] * (1 + 1e-9) && report.cost_s >= cost * (1 - 1e-9));
        CHECK_OK(hapt_sharding_apply(whole, 0, &axis, &program, &arena, &applied));
        cost = report.cost_s;
    }
    for (int j = 0; j < 4; j++) limit[j] = 1000;
    CHECK_FAILS(hapt_synthesise(whole, 0, &axis, &rated.costs, &options, &arena, &program, &report),
                HAPT_ERR_INFEASIBLE);
    hapt_arena_release(&arena);
}

static struct hapt_sharding *zoo(struct hapt_arena *arena, const char *family, const char *layers)
{
    char *words[] = {"hapt", "model",      (char *)family, "--layers", (char *)layers, "--hidden",     "128", "--heads",
                     "8",    "--sequence", "64",           "--vocab",  "1024",         "--microbatch", "16"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    struct hapt_sharding *whole = NULL;
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, arena, &config));
    CHECK_OK(hapt_model_build(family, config, arena, &model));
    CHECK_OK(hapt_graph_differentiate(model->graph));
    CHECK_OK(hapt_sharding_trivial(model->graph, arena, &whole));
    return whole;
}

/* Separate q, k and v, norms behind residual sums, a table shared by the first and the last segment. The search visits
 * few states, in proportion to the model, and reports what it left out. */
static void states_are_bounded(void)
{
    static const char *const families[] = {"bert", "llama", "bert-moe"};
    for (int f = 0; f < 3; f++) {
        struct hapt_arena arena;
        struct rated rated;
        struct hapt_synthesis_report few, many, narrow;
        struct hapt_axis_program program;
        struct hapt_sharding *applied;
        const struct hapt_axis axis = {.size = 8};
        const struct hapt_synthesis_options options = {0}, least = {.most_states = 1};
        hapt_arena_init(&arena);
        set_rates(&rated, 8, 1e9);
        CHECK_OK(
            hapt_synthesise(zoo(&arena, families[f], "6"), 0, &axis, &rated.costs, &options, &arena, &program, &few));
        struct hapt_sharding *deep = zoo(&arena, families[f], "24");
        CHECK_OK(hapt_synthesise(deep, 0, &axis, &rated.costs, &options, &arena, &program, &many));
        CHECK_OK(hapt_sharding_apply(deep, 0, &axis, &program, &arena, &applied));
        CHECK_MESSAGE(few.expanded <= 60000, "%s: %ld states", families[f], few.expanded);
        CHECK_MESSAGE(many.expanded <= 4 * few.expanded, "%s: %ld states, %ld at a quarter of the layers", families[f],
                      many.expanded, few.expanded);
        CHECK(many.segments > 2 * few.segments && !many.optimal);
        CHECK_OK(hapt_synthesise(deep, 0, &axis, &rated.costs, &least, &arena, &program, &narrow));
        CHECK_OK(hapt_sharding_apply(deep, 0, &axis, &program, &arena, &applied));
        CHECK(narrow.expanded < many.expanded && strcmp(narrow.because, "a segment had more states than allowed") == 0);
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(figure_11);
    RUN(agrees_with_every_program);
    RUN(agrees_with_every_program_within_memory);
    RUN(segments_are_the_whole);
    RUN(memory_is_respected);
    RUN(states_are_bounded);
    return test_finish();
}
