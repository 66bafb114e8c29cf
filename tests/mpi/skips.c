/* ranks: 4 5
 * A network with two long skips over four stages. The first stage is alone behind a slow link, the others are together.
 * Over the link go the output of its block, which two stages read, and that of the embedding, which the last one reads.
 * Predicted and measured steps, and losses, against one rank and with messages that are modelled.
 */
#include "train_plans.h"

#include "../../src/layers/structure.h"
#include "hapt/simulate.h"

enum { STAGES = 4, BLOCKS = 4, WIDE = 1024, NARROW = 64, ROWS = 2, TOKENS = 64, VOCAB = 256, RUN_STEPS = 5 };

static const double RATE = 50e6 / 8; /* byte/s */
static const double MESSAGE_BYTES = (double)ROWS * TOKENS * WIDE * sizeof(float);

static int op_ends[STAGES];

static int parameter(struct hapt_graph *graph, const char *name, int block, int dims, int64_t rows, int64_t columns)
{
    int tensor;
    const struct hapt_tensor made = {.name = hapt_arena_printf(&arena, "%s%d", name, block),
                                     .kind = HAPT_TENSOR_PARAMETER,
                                     .dtype = HAPT_F32,
                                     .dims = dims,
                                     .shape = {rows, columns},
                                     .trainable = true,
                                     .init = HAPT_INIT_NORMAL,
                                     .init_std = 0.02};
    CHECK_OK(hapt_graph_add_tensor(graph, &made, &tensor));
    return tensor;
}

static int operator(struct hapt_graph *graph, const char *type, int block, int a, int b, int c)
{
    const int input[] = {a, b, c}, count = c > -2 ? 3 : b > -2 ? 2 : 1;
    int output[HAPT_MAX_OUTPUTS];
    CHECK_OK(hapt_graph_add_op(graph, type, hapt_arena_printf(&arena, "%s-%d-%d", type, block, graph->op_count), input,
                               count, NULL, NULL, output));
    return output[0];
}

static int input(struct hapt_graph *graph, const char *name, enum hapt_tensor_role role)
{
    int tensor;
    const struct hapt_tensor made = {
        .name = name, .kind = HAPT_TENSOR_INPUT, .role = role, .dtype = HAPT_I32, .dims = 2, .shape = {ROWS, TOKENS}};
    CHECK_OK(hapt_graph_add_tensor(graph, &made, &tensor));
    return tensor;
}

/* Narrow blocks, so that messages take longer than computing. */
static struct hapt_graph *make_graph(void)
{
    struct hapt_graph *graph = NULL;
    CHECK_OK(hapt_graph_create(&arena, &graph));
    const int tokens = input(graph, "tokens", HAPT_ROLE_TOKENS), targets = input(graph, "targets", HAPT_ROLE_TARGETS);
    const int table = parameter(graph, "table", 0, 2, VOCAB, WIDE);
    int x[BLOCKS + 1];
    x[0] = operator(graph, "embedding", 0, tokens, table, -1);
    for (int b = 0; b < BLOCKS; b++) {
        const int down = parameter(graph, "down", b, 2, WIDE, NARROW), up = parameter(graph, "up", b, 2, NARROW, WIDE);
        int y = operator(graph, "linear", b, x[b], down, -1);
        y = operator(graph, "gelu", b, y, -2, -2);
        y = operator(graph, "linear", b, y, up, -1);
        x[b + 1] = operator(graph, "add", b, x[b], y, -2);
        if (b == 2) x[b + 1] = operator(graph, "add", b, x[b + 1], x[1], -2);
        if (b == 3) x[b + 1] = operator(graph, "add", b, x[b + 1], x[0], -2);
        op_ends[b] = graph->op_count;
    }
    const int head = parameter(graph, "head", 0, 2, VOCAB, WIDE);
    const int scores = operator(graph, "linear_t", BLOCKS, x[BLOCKS], head, -1);
    graph->loss = operator(graph, "cross_entropy", BLOCKS, scores, targets, -2);
    op_ends[STAGES - 1] = graph->op_count;
    CHECK_OK(hapt_graph_check(graph));
    CHECK_OK(hapt_graph_differentiate(graph));
    return graph;
}

/* Rank 0 behind the link, and the others. */
static struct hapt_cluster *make_two(bool paced, bool modelled)
{
    static const int ranks[] = {0, 1, 2, 3, 4};
    static const int of_rank[] = {0, 1, 1, 1, 1};
    struct hapt_cluster *cluster = hapt_arena_alloc(&arena, 1, sizeof *cluster);
    cluster->count = 2;
    cluster->rank_count = test_env.world_size;
    cluster->subcluster_of_rank = of_rank;
    cluster->subcluster = hapt_arena_alloc(&arena, 2, sizeof *cluster->subcluster);
    cluster->link = hapt_arena_alloc(&arena, 4, sizeof *cluster->link);
    for (int c = 0; c < 2; c++) {
        struct hapt_subcluster *subcluster = &cluster->subcluster[c];
        snprintf(subcluster->name, sizeof subcluster->name, "s%d", c);
        subcluster->nodes = 1;
        subcluster->devices_per_node = c == 0 ? 1 : test_env.world_size - 1;
        subcluster->ranks = &ranks[c];
        subcluster->device =
            (struct hapt_device_spec){.name = "cpu", .backend = "cpu", .memory_bytes = 1e9, .slowdown = 1};
        for (int other = 0; other < 2; other++)
            cluster->link[2 * c + other] = (struct hapt_link){
                .bandwidth = c == other ? 10e9 : RATE, .latency = 1e-4, .paced = paced && c != other};
    }
    if (modelled) hapt_cluster_emulate(cluster);
    return cluster;
}

/* The stages of a shape, those of the first submesh in subcluster 0, with their messages. */
static struct hapt_plan *make_stages(const struct shape *shape, const double *compute_s)
{
    struct hapt_profile *profile = NULL;
    int ends[MAX_STAGES];
    struct hapt_layers layers = {.count = shape->stages, .end_op = ends};
    double *crossing;
    memcpy(ends, shape->end, sizeof ends);
    struct hapt_plan *plan = make_plan(shape);
    CHECK_OK(hapt_profile_create(shape->stages, 2, &arena, &profile));
    for (int k = 0; k < 4; k++) {
        profile->link_bandwidth[k] = k == 0 || k == 3 ? 10e9 : RATE;
        profile->link_latency[k] = 1e-4;
    }
    crossing = hapt_arena_alloc(&arena, (size_t)model->graph->forward_count + 1, sizeof *crossing);
    CHECK_OK(hapt_structure_boundary_bytes(model->graph, &arena, crossing));
    for (int l = 0; l < shape->stages; l++) profile->boundary_bytes[l] = crossing[ends[l]];
    CHECK_OK(hapt_crossings_find(model->graph, &layers, &arena, &arena, &profile->crossings));
    for (int s = 0; s < shape->stages; s++) {
        struct hapt_plan_stage *stage = &plan->stage[s];
        const int home = stage->submesh > plan->submesh,
                  next = s + 1 < shape->stages && stage[1].submesh > plan->submesh;
        stage->submesh->subcluster[0] = home;
        snprintf(stage->submesh->name, sizeof stage->submesh->name, "s%d", home);
        if (compute_s) stage->compute_s = compute_s[s], stage->forward_s = compute_s[s] / 3;
        if (s + 1 < shape->stages) stage->comm_s = hapt_profile_comm_s(profile, s, home, next);
    }
    CHECK_OK(hapt_plan_find_edges(profile, plan));
    if (!hapt_schedule_loops(shape->schedule)) return plan;
    int misfit;
    CHECK_OK(hapt_plan_choose_transfer_slots(plan));
    CHECK_OK(hapt_plan_launch_loops(plan, &misfit));
    return plan;
}

/* A stage per block. */
static struct hapt_plan *make_four(int microbatches, const double *compute_s)
{
    struct shape shape = {
        .stages = STAGES, .size = {1, 1, 1, 1}, .schedule = HAPT_SCHEDULE_H1F1B, .microbatches = microbatches};
    memcpy(shape.end, op_ends, sizeof op_ends);
    return make_stages(&shape, compute_s);
}

/* Two stages of each rank, in loops around the ranks or as a V: three blocks, then parts of the last one. */
static struct hapt_plan *make_eight(enum hapt_schedule_kind kind, bool v, bool split, const double *compute_s)
{
    const int rest = op_ends[2], end[2 * STAGES] = {op_ends[0], op_ends[1], rest,     rest + 1,
                                                    rest + 3,   rest + 5,   rest + 6, model->graph->forward_count};
    struct shape shape = {.stages = 2 * STAGES, .schedule = kind, .microbatches = 4, .split = split};
    for (int s = 0; s < 2 * STAGES; s++) {
        const int place = hapt_plan_place(s, STAGES, v);
        shape.size[s] = 1;
        shape.shares[s] = place < s ? place + 1 : 0;
        shape.end[s] = end[s];
    }
    if (kind == HAPT_SCHEDULE_LOOPED) shape.loop_batch = 2, shape.prefetch = 1;
    return make_stages(&shape, compute_s);
}

static double simulated_s(const struct hapt_plan *plan)
{
    struct hapt_simulation *simulation = NULL;
    CHECK_OK(hapt_plan_simulate(plan, &arena, &simulation));
    return simulation ? simulation->total_s : NAN;
}

static const char *const options[] = {"--data",
                                      REFERENCE,
                                      "--steps",
                                      "5",
                                      "--learning-rate",
                                      "1e-3",
                                      "--lr-schedule",
                                      "constant",
                                      "--clip-norm",
                                      "0",
                                      "--checkpoint-every",
                                      "0",
                                      NULL};

static struct hapt_train_result *run(const char *name, struct hapt_plan *plan, struct hapt_cluster *cluster,
                                     const char *const *given)
{
    struct hapt_train_result *result = NULL;
    CHECK_OK(hapt_train_run(&test_env, cluster, model, plan, NULL, make_config(name, given), NULL, &arena, &result));
    return result;
}

/* The tensor that two stages read crosses the link once, and the boundary there is charged for what crosses. */
static void link_carries_each_tensor_once(void)
{
    const struct hapt_plan *plan = make_four(4, NULL);
    double there = 0, back = 0;
    for (int e = 0; e < plan->edge_count; e++) {
        const struct hapt_plan_edge *at = &plan->edge[e];
        if (at->edge.from == 0) there += at->bytes;
        if (at->edge.to == 0) back += at->bytes;
        CHECK((at->edge.link > 0) == (at->edge.from == 0 || at->edge.to == 0));
    }
    CHECK(there == 2 * MESSAGE_BYTES && back == 2 * MESSAGE_BYTES);
    CHECK(plan->relay_count == 1 && plan->relay[0].from == 0 && plan->relay[0].via == 1 && plan->relay[0].to == 2);
    CHECK_NEAR(plan->stage[0].comm_s, 1e-4 + there / RATE, 1e-9);
}

/* Losses are those of one rank, bit by bit. Steps take the simulated time of stages as fast as measured, within 10 %,
 * in one of some pairs of runs; never less than the link needs. */
static void steps_take_the_predicted_time(void)
{
    const int B = 4;
    const struct shape alone = one_rank();
    double best = INFINITY;
    struct hapt_train_result *one = train(&alone, make_config("one", options), NULL);
    for (int pair = 0; one && pair < (test_long() ? 12 : 4) && best > 0.1; pair++) {
        struct hapt_train_result *four = run("four", make_four(B, NULL), make_two(true, false), options);
        if (!four) return;
        CHECK(!memcmp(one->history.loss, four->history.loss, RUN_STEPS * sizeof(double)));
        double compute_s[STAGES], error = 0;
        if (test_env.world_rank == 0) {
            for (int s = 0; s < STAGES; s++) compute_s[s] = four->microbatch_s[(RUN_STEPS - 1) * STAGES + s];
            const double predicted_s = simulated_s(make_four(B, compute_s)), measured_s = four->steady_step_s;
            error = fabs(measured_s / predicted_s - 1);
            CHECK_MESSAGE(measured_s > B * 2 * MESSAGE_BYTES / RATE, "a step of %.3f s", measured_s);
            printf("measured %.3f s, predicted %.3f s\n", measured_s, predicted_s);
        }
        MPI_Bcast(&error, 1, MPI_DOUBLE, 0, test_env.world);
        best = fmin(best, error);
    }
    CHECK_MESSAGE(best <= 0.1, "measured and predicted steps are %.1f %% apart", 100 * best);
}

/* More transfer slots than usual change no bit. */
static void more_transfer_slots_change_nothing(void)
{
    const struct shape alone = one_rank();
    struct hapt_plan *plan = make_four(4, NULL);
    struct hapt_train_result *one = train(&alone, make_config("one", options), NULL), *four;
    plan->transfer_slots = HAPT_TRANSFER_SLOTS + 3;
    four = run("slots", plan, make_two(false, false), options);
    CHECK(one && four && !memcmp(one->history.loss, four->history.loss, RUN_STEPS * sizeof(double)));
    for (int s = 0; four && test_env.world_rank == 0 && s < STAGES; s++)
        CHECK(four->planned_bytes[s] > 0 && four->planned_bytes[s] == four->measured_bytes[s]);
}

/* Losses of looped lists, also with split backward passes, are those of one rank, bit by bit. */
static void loops_pass_tensors_on(void)
{
    const struct shape alone = one_rank();
    struct hapt_train_result *one = train(&alone, make_config("one", options), NULL);
    for (int k = 0; one && k < 8; k++) {
        static const enum hapt_schedule_kind kinds[] = {HAPT_SCHEDULE_INTERLEAVED, HAPT_SCHEDULE_BREADTH_FIRST,
                                                        HAPT_SCHEDULE_LOOPED, HAPT_SCHEDULE_LOOPED};
        const bool v = k % 4 == 3, split = k >= 4;
        struct hapt_plan *plan = make_eight(kinds[k % 4], v, split, NULL);
        CHECK(plan->relay_count > 0 && plan->split == split);
        struct hapt_train_result *eight = run("loops", plan, make_two(false, false), options);
        if (!eight) return;
        CHECK_MESSAGE(!memcmp(one->history.loss, eight->history.loss, RUN_STEPS * sizeof(double)),
                      "%s%s%s: losses differ", hapt_schedule_kind_name(kinds[k % 4]), v ? ", V" : "",
                      split ? ", split" : "");
    }
}

/* Modelled devices, whose messages have modelled times: the simulated step. Their clocks are real, so that a quiet
 * moment is needed. Only the later attempts are stretched: late wakeups matter less in them. */
static void check_modelled(struct hapt_plan *(*make)(const double *compute_s), const double *compute_s)
{
    const double predicted_s = simulated_s(make(compute_s));
    static const char *const scale[] = {"0.5", "1", "2", "2", "2"};
    double least = INFINITY;
    for (int attempt = 0; attempt < 5 && least > 1.02; attempt++) {
        const char *const modelled[] = {"--data",
                                        REFERENCE,
                                        "--steps",
                                        "2",
                                        "--device",
                                        "emulated",
                                        "--time-scale",
                                        scale[attempt],
                                        "--checkpoint-every",
                                        "0",
                                        NULL};
        struct hapt_train_result *result = run("modelled", make(compute_s), make_two(true, true), modelled);
        if (!result) return;
        double ratio = result->steady_step_s / predicted_s;
        MPI_Bcast(&ratio, 1, MPI_DOUBLE, 0, test_env.world);
        CHECK_MESSAGE(ratio > 0.999, "a step took %.4f of the simulated time", ratio);
        least = fmin(least, ratio);
    }
    CHECK_MESSAGE(least < 1.02, "a step took %.4f of the simulated time", least);
}

static struct hapt_plan *four(const double *compute_s)
{
    return make_four(4, compute_s);
}

static struct hapt_plan *eight(const double *compute_s)
{
    return make_eight(HAPT_SCHEDULE_INTERLEAVED, false, false, compute_s);
}

static void modelled_steps_take_the_simulated_time(void)
{
    check_modelled(four, (const double[]){0.05, 0.02, 0.03, 0.06});
    check_modelled(eight, (const double[]){0.03, 0.02, 0.03, 0.04, 0.02, 0.03, 0.02, 0.03});
}

/* Five ranks: stages of one and two ranks with other layouts, which pass tensors on that each rank holds in part or
 * whole. */
static void other_layouts_pass_tensors_on(void)
{
    uint64_t random = 5;
    int relays = 0;
    const struct shape alone = one_rank();
    struct hapt_train_result *one = train(&alone, make_config("one", options), NULL);
    for (int round = 0; one && round < (test_long() ? 60 : 8); round++) {
        struct shape shape = {.stages = 3, .schedule = (enum hapt_schedule_kind)(round % 4), .microbatches = 4};
        const int ops = model->graph->forward_count;
        for (int s = 0, end = 0; s < 3; s++) {
            const int least = end + 1, most = s == 2 ? ops : op_ends[s + (s == 1)];
            shape.size[s] = s > 0 ? 2 : 1;
            shape.tensor_parallel[s] = s > 0 && hapt_random_next(&random) % 2 ? 2 : 1;
            shape.end[s] = end = s == 2 ? ops : least + (int)(hapt_random_next(&random) % (uint64_t)(most - end));
        }
        struct hapt_plan *plan = make_stages(&shape, NULL);
        for (int k = 0; k < plan->relay_count; k++) relays += plan->relay[k].to == 2;
        struct hapt_train_result *result = run("layouts", plan, make_two(false, false), options);
        if (!result) return;
        const double difference = worst(result->history.loss, one->history.loss, RUN_STEPS);
        CHECK_MESSAGE(difference < 1e-5, "round %d: losses differ by %g", round, difference);
    }
    CHECK_MESSAGE(relays > 3, "%d relays", relays);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    model->graph = make_graph();
    model->has_parameters = false;
    if (test_env.world_size == STAGES) {
        RUN(link_carries_each_tensor_once);
        RUN(steps_take_the_predicted_time);
        RUN(modelled_steps_take_the_simulated_time);
        RUN(loops_pass_tensors_on);
        RUN(more_transfer_slots_change_nothing);
    } else {
        RUN(other_layouts_pass_tensors_on);
    }
    clean_up();
    return test_finish();
}
