/*
 * The alternation of programs and ratios (HAP 3.1) on small random instances. It is compared with every program at
 * every ratio and with its own rounds. Parts of the model may have their own ratios (HAP 5.2).
 */
#include "synthesis_random.h"

#include "hapt/alternate.h"

static struct hapt_alternation ask(const struct random_instance *instance, const double *power)
{
    return (struct hapt_alternation){.sharding = instance->whole,
                                     .devices = instance->axis.size,
                                     .costs = &instance->costs,
                                     .power = power,
                                     .microbatches = instance->options.microbatches,
                                     .in_flight = instance->options.in_flight};
}

static double priced(const struct hapt_alternation *asked, const int *ratio_of, const struct hapt_axis *axis,
                     const struct hapt_axis_program *program, struct hapt_arena *arena)
{
    struct hapt_program_price price;
    const struct hapt_synthesis_options options = {
        .microbatches = asked->microbatches, .in_flight = asked->in_flight, .ratio_of = ratio_of};
    const enum hapt_status status =
        hapt_axis_program_price(asked->sharding, 0, axis, asked->costs, &options, program, arena, &price);
    hapt_fail_reset();
    return status == HAPT_OK ? price.cost_s : (double)INFINITY; /* some layouts exist only at other ratios */
}

/* Properties of every result: its cost is that of its program and ratios, and no result seen on the way is better. */
static void check_result(uint64_t seed, const struct hapt_alternation *asked,
                         const struct hapt_alternation_result *result, struct hapt_arena *arena)
{
    const double cost_s = result->price.cost_s, limit = cost_s * (1 - 1e-9);
    const int n = asked->devices;
    struct hapt_sharding *applied;
    struct hapt_axis axis;
    struct hapt_axis_program program;
    struct hapt_program_price price;
    double even[RANDOM_DEVICES], proportional[RANDOM_DEVICES], sum = 0;
    CHECK_MESSAGE(hapt_sharding_apply(asked->sharding, 0, &result->axis, &result->program, arena, &applied) == HAPT_OK,
                  "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
    CHECK_NEAR(priced(asked, result->ratio_of, &result->axis, &result->program, arena), cost_s, 1e-9 * cost_s);
    CHECK(result->turn_count >= 1 && result->turn_count <= HAPT_ALTERNATION_TURNS * HAPT_ALTERNATION_STARTS);
    for (int t = 0; t < result->turn_count; t++)
        CHECK_MESSAGE(result->turn[t].program_s >= limit && !(result->turn[t].ratios_s < limit),
                      "seed %llu: turn %d had %.9g s and %.9g s, kept %.9g s", (unsigned long long)seed, t,
                      result->turn[t].program_s, result->turn[t].ratios_s, cost_s);
    for (int k = 0; k < result->segment_count; k++) {
        double whole = 0;
        for (int j = 0; j < n; j++) whole += result->axis.ratio[k * n + j];
        CHECK_NEAR(whole, 1, 1e-9);
    }
    for (int b = 0; b < 2; b++) {
        if (hapt_alternation_data_parallel(asked, b ? asked->power : NULL, arena, &axis, &program, &price) == HAPT_OK)
            CHECK_MESSAGE(price.cost_s >= limit, "seed %llu: data parallelism takes %.9g s", (unsigned long long)seed,
                          price.cost_s);
        hapt_fail_reset();
    }
    if (result->segment_count > 1) return;
    for (int j = 0; j < n; j++) sum += asked->power[j];
    for (int j = 0; j < n; j++) even[j] = 1.0 / n, proportional[j] = asked->power[j] / sum;
    for (int b = 0; b < 2; b++) { /* the same program at the two simple ratios of HAP Fig. 2 */
        axis = (struct hapt_axis){.size = n, .ratio_count = 1, .ratio = b ? proportional : even};
        CHECK_MESSAGE(priced(asked, NULL, &axis, &result->program, arena) >= limit,
                      "seed %llu: its program at %s ratios is cheaper", (unsigned long long)seed,
                      b ? "proportional" : "even");
    }
}

/* Ratios of two devices that give different shares of some extent up to `most`: one ratio from each interval between
 * two roundings. */
static int list_ratios(int most, double *first)
{
    double edge[256];
    int edges = 0, count = 0;
    for (int d = 2; d <= most; d++)
        for (int k = 1; k < 2 * d; k += 2) edge[edges++] = (double)k / (2 * d);
    for (int a = 0; a < edges; a++)
        for (int b = a + 1; b < edges; b++)
            if (edge[b] < edge[a]) {
                const double kept = edge[a];
                edge[a] = edge[b];
                edge[b] = kept;
            }
    first[count++] = edge[0] / 2;
    for (int a = 0; a < edges; a++) {
        const double next = a + 1 < edges ? edge[a + 1] : 1;
        if (next - edge[a] > 1e-9) first[count++] = (edge[a] + next) / 2;
    }
    return count;
}

enum { MOST_NODES = 200000, LARGEST_EXTENT = 8 };

/* The least cost over two devices of every program at every ratio. */
static void against_everything(void)
{
    const int wanted = test_long() ? 2000 : 60;
    double first[256];
    const int ratios = list_ratios(LARGEST_EXTENT, first);
    int compared = 0, equal = 0, near = 0, ended[3] = {0};
    for (uint64_t seed = 1; compared < wanted && seed < 40 * (uint64_t)wanted; seed++) {
        struct hapt_arena arena;
        struct random_instance instance;
        struct hapt_alternation_result result;
        hapt_arena_init(&arena);
        random_instance(&instance, &arena, seed, 2, 3);
        if (instance.axis.size == 2) {
            const double power[2] = {1 / instance.slowness[0], 1 / instance.slowness[1]};
            const struct hapt_alternation asked = ask(&instance, power);
            const enum hapt_status status = hapt_alternate(&asked, &arena, &result);
            CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
            if (status == HAPT_OK) check_result(seed, &asked, &result, &arena);
            double least = status == HAPT_OK ? result.price.cost_s * (1 + 1e-9) : 0;
            bool whole = status == HAPT_OK;
            for (int r = 0; whole && r < ratios; r++) {
                long nodes;
                instance.ratio[0] = first[r], instance.ratio[1] = 1 - first[r];
                instance.axis.ratio = instance.ratio;
                least = fmin(least, brute_force(&instance, least, MOST_NODES, &nodes));
                whole = nodes > 0;
            }
            if (whole) {
                compared++;
                equal += result.price.cost_s <= least * (1 + 1e-6);
                near += result.price.cost_s <= least * 1.05;
                ended[result.ended[0] == 'c' ? 0 : result.ended[0] == 'o' ? 1 : 2]++;
            }
        }
        hapt_arena_release(&arena);
    }
    fprintf(stderr,
            "  %d instances: %d found the least of every program at every ratio, %d within 5 %%; %d converged, %d "
            "oscillated\n",
            compared, equal, near, ended[0], ended[1]);
    CHECK_MESSAGE(compared >= wanted, "only %d instances were small enough", compared);
    /* The alternation ends in a local optimum, and programs of the loop keep one layout between its segments. So most
     * results are optimal and few are far from it. */
    CHECK(10 * equal >= 8 * compared && 10 * near >= 9 * compared);
}

/*
 * A model with two halves. The first half is nearly all computation. The second half has wide layers whose weight
 * gradients cost much to sum. Its weights are sharded by columns, and all-gather and reduce-scatter of rows take as
 * long as the largest shard. One device is four times as fast.
 */
enum { ROWS = 48, WIDTH = 48, WIDE = 480, NARROW_LAYERS = 2, WIDE_LAYERS = 4 };

static struct hapt_graph *halves(struct hapt_arena *arena)
{
    struct hapt_graph *graph = NULL;
    int x, loss[2], output[HAPT_MAX_OUTPUTS];
    struct hapt_tensor rows = {.name = "x",
                               .kind = HAPT_TENSOR_INPUT,
                               .dtype = HAPT_F32,
                               .dims = 3,
                               .shape = {ROWS, 1, WIDTH},
                               .producer = -1,
                               .gradient = -1,
                               .primal = -1};
    struct hapt_tensor targets = {.name = "y",
                                  .kind = HAPT_TENSOR_INPUT,
                                  .role = HAPT_ROLE_TARGETS,
                                  .dtype = HAPT_I32,
                                  .dims = 2,
                                  .shape = {ROWS, 1},
                                  .producer = -1,
                                  .gradient = -1,
                                  .primal = -1};
    CHECK_OK(hapt_graph_create(arena, &graph));
    CHECK_OK(hapt_graph_add_tensor(graph, &rows, &x));
    CHECK_OK(hapt_graph_add_tensor(graph, &targets, &loss[1]));
    for (int l = 0; l < NARROW_LAYERS + 2 * WIDE_LAYERS; l++) {
        const bool wide = l >= NARROW_LAYERS, up = wide && (l - NARROW_LAYERS) % 2 == 0;
        char name[16];
        int input[3] = {x, 0, -1};
        snprintf(name, sizeof name, "w%d", l);
        struct hapt_tensor weight = {.name = name,
                                     .kind = HAPT_TENSOR_PARAMETER,
                                     .dtype = HAPT_F32,
                                     .dims = 2,
                                     .trainable = true,
                                     .shape = {wide && !up ? WIDE : WIDTH, up ? WIDE : WIDTH},
                                     .producer = -1,
                                     .gradient = -1,
                                     .primal = -1};
        CHECK_OK(hapt_graph_add_tensor(graph, &weight, &input[1]));
        snprintf(name, sizeof name, "linear%d", l);
        CHECK_OK(hapt_graph_add_op(graph, "linear", name, input, 3, NULL, NULL, &x));
    }
    loss[0] = x;
    CHECK_OK(hapt_graph_add_op(graph, "cross_entropy", "loss", loss, 2, NULL, NULL, output));
    graph->loss = output[0];
    CHECK_OK(hapt_graph_differentiate(graph));
    return graph;
}

static double halves_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    (void)context;
    return (work->graph->op[work->op].forward_op < NARROW_LAYERS ? 10 : 0.2) * work->share * (device == 0 ? 1 : 4);
}

static double halves_collective_s(const void *context, enum hapt_collective_kind kind, double bytes,
                                  double largest_share)
{
    const double whole_s = 5e-5 * bytes;
    (void)context;
    if (kind == HAPT_COLLECTIVE_SLICE) return 0;
    if (kind == HAPT_COLLECTIVE_ALL_TO_ALL) return whole_s * largest_share;
    return whole_s *
           (kind == HAPT_COLLECTIVE_ALL_REDUCE || kind == HAPT_COLLECTIVE_GROUPED_BROADCAST ? 6 : 4 * largest_share);
}

/* The best program at given ratios for each half. The fast device gets `first` and `second`. */
static double halves_at(const struct hapt_alternation *asked, double first, double second)
{
    const double ratio[8] = {first,  (1 - first) / 3,  (1 - first) / 3,  (1 - first) / 3,
                             second, (1 - second) / 3, (1 - second) / 3, (1 - second) / 3};
    const struct hapt_axis axis = {.size = 4, .ratio_count = 2, .ratio = ratio};
    int ratio_of[32];
    const struct hapt_synthesis_options options = {.ratio_of = ratio_of};
    struct hapt_arena scratch;
    struct hapt_axis_program program;
    struct hapt_synthesis_report report = {.cost_s = INFINITY};
    for (int o = 0; o < asked->sharding->graph->forward_count; o++) ratio_of[o] = o >= NARROW_LAYERS;
    hapt_arena_init(&scratch);
    if (hapt_synthesise(asked->sharding, 0, &axis, asked->costs, &options, &scratch, &program, &report) != HAPT_OK)
        report.cost_s = INFINITY;
    hapt_fail_reset();
    hapt_arena_release(&scratch);
    return report.cost_s;
}

/* HAP 5.2: the ratios of the halves differ, and the gain exceeds the cost. No pair of ratios of a grid is better. */
static void parts_win(void)
{
    static const int kind[4] = {0, 1, 1, 1};
    static const double power[4] = {4, 1, 1, 1};
    struct hapt_arena arena;
    struct hapt_sharding *whole;
    struct hapt_alternation_result one, parts;
    const struct hapt_spmd_costs costs = {
        .kind = kind, .compute_s = halves_compute_s, .collective_s = halves_collective_s};
    double least = INFINITY;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_sharding_trivial(halves(&arena), &arena, &whole));
    const int end_op[] = {NARROW_LAYERS, whole->graph->forward_count};
    struct hapt_alternation asked = {.sharding = whole,
                                     .devices = 4,
                                     .costs = &costs,
                                     .power = power,
                                     .layer_count = 2,
                                     .end_op = end_op,
                                     .segments = 1};
    CHECK_OK(hapt_alternate(&asked, &arena, &one));
    asked.segments = 2;
    CHECK_OK(hapt_alternate(&asked, &arena, &parts));
    check_result(0, &asked, &parts, &arena);
    for (int a = 0; a < 49; a++) least = fmin(least, halves_at(&asked, 0.25 + 0.05 * (a / 7), 0.25 + 0.05 * (a % 7)));
    if (CHECK(parts.segment_count == 2)) {
        const double *fast = parts.axis.ratio;
        fprintf(stderr,
                "  %.2f s with one vector, %.2f s with one for each half (%.2f and %.2f of the fast device), %.2f s by "
                "a grid of both\n",
                one.price.cost_s, parts.price.cost_s, fast[0], fast[4], least);
        CHECK(fast[0] > fast[4] + 0.1);
    }
    CHECK(parts.price.cost_s < 0.95 * one.price.cost_s && parts.price.cost_s <= least * (1 + 1e-9));
    hapt_arena_release(&arena);
}

/* More devices and operators: the same properties, with one ratio vector and with one per part of the model. */
static void keeps_the_best(void)
{
    const int instances = test_long() ? 3000 : 150;
    int parted = 0, ended[3] = {0};
    for (uint64_t seed = 1; seed <= (uint64_t)instances; seed++) {
        struct hapt_arena arena;
        struct random_instance instance;
        struct hapt_alternation_result one, parts;
        double power[RANDOM_DEVICES];
        int end_op[16];
        hapt_arena_init(&arena);
        random_instance(&instance, &arena, seed + 77777, 4, 9);
        for (int j = 0; j < instance.axis.size; j++) power[j] = 1 / instance.slowness[j];
        struct hapt_alternation asked = ask(&instance, power);
        enum hapt_status status = hapt_alternate(&asked, &arena, &one);
        CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
        if (status == HAPT_OK) {
            check_result(seed, &asked, &one, &arena);
            ended[one.ended[0] == 'c' ? 0 : one.ended[0] == 'o' ? 1 : 2]++;
            asked.layer_count = instance.graph->forward_count;
            for (int l = 0; l < asked.layer_count; l++) end_op[l] = l + 1;
            asked.end_op = end_op;
            asked.segments = 3;
            status = hapt_alternate(&asked, &arena, &parts);
            CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)seed, hapt_fail_message());
        }
        if (status == HAPT_OK) {
            check_result(seed, &asked, &parts, &arena);
            CHECK(parts.price.cost_s <= one.price.cost_s * (1 + 1e-9));
            if (parts.price.cost_s < one.price.cost_s * (1 - 1e-6)) {
                parted++;
                CHECK(parts.segment_count > 1 &&
                      parts.segment_end[parts.segment_count - 1] == instance.graph->forward_count);
            }
        }
        hapt_fail_reset();
        hapt_arena_release(&arena);
    }
    fprintf(stderr, "  %d instances: %d converged, %d oscillated; parts of their own won %d times\n", instances,
            ended[0], ended[1], parted);
    CHECK(ended[0] > 0 && ended[0] + ended[1] + ended[2] == instances);
    CHECK(parted > 0);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(against_everything);
    RUN(keeps_the_best);
    RUN(parts_win);
    return test_finish();
}
