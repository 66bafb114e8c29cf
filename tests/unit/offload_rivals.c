/*
 * Offload on paper (hapt/offload_rivals.h): equations and streams by hand, the optimum against another enumeration, the
 * streams against the longest path of an explicit graph, properties of the order by priority, and AutoHete's claims.
 */
#include "hapt/offload_rivals.h"

#include "test.h"

enum { MOST_BLOCKS = 12, STEPS = 3 };

/* Integers as times and bytes: sums are exact, so results are compared for equality. */
static int draw(uint64_t *seed, int end)
{
    return (int)(hapt_random_next(seed) % (uint64_t)end);
}

static struct hapt_offload_case random_case(uint64_t *seed, int most_blocks)
{
    struct hapt_offload_case given = {.block_count = 1 + draw(seed, most_blocks),
                                      .forward_s = draw(seed, 8),
                                      .backward_s = draw(seed, 12),
                                      .fetch_s = draw(seed, 12),
                                      .offload_s = draw(seed, 12),
                                      .device_update_s = draw(seed, 4),
                                      .host_update_s = draw(seed, 30),
                                      .weight_bytes = draw(seed, 10),
                                      .checkpoint_bytes = draw(seed, 5),
                                      .device_constant_bytes = draw(seed, 10),
                                      .host_constant_bytes = draw(seed, 10)};
    const int L = given.block_count;
    given.state_bytes = 6 * given.weight_bytes;
    given.activation_bytes = given.checkpoint_bytes + draw(seed, 40);
    const double most = (L + 1) * (given.weight_bytes + given.activation_bytes) + L * given.state_bytes + 10;
    given.device_memory_bytes = draw(seed, (int)most + 1);
    given.host_memory_bytes = draw(seed, 4) ? 1000 : draw(seed, (int)(7 * given.weight_bytes) * L + 10);
    return given;
}

static struct hapt_offload_choice random_choice(uint64_t *seed, int L)
{
    const int o = draw(seed, L + 1);
    return (struct hapt_offload_choice){draw(seed, L + 1), draw(seed, o + 1), o};
}

static double period_of(const struct hapt_offload_case *given, struct hapt_offload_choice choice,
                        struct hapt_offload_execution execution)
{
    double period_s = NAN;
    CHECK_OK(hapt_offload_period(given, choice, execution, &period_s));
    return period_s;
}

/* ---- By hand ---- */

static void equations_by_hand(void)
{
    struct hapt_offload_case given = {.block_count = 4,
                                      .forward_s = 2,
                                      .backward_s = 4,
                                      .fetch_s = 7,
                                      .offload_s = 5,
                                      .device_update_s = 1,
                                      .host_update_s = 3,
                                      .weight_bytes = 10,
                                      .state_bytes = 60,
                                      .activation_bytes = 100,
                                      .checkpoint_bytes = 20,
                                      .device_constant_bytes = 5,
                                      .host_constant_bytes = 7,
                                      .device_memory_bytes = 435,
                                      .host_memory_bytes = 217};
    const struct hapt_offload_choice choice = {2, 2, 3}; /* blocks 0 and 1; 1 and 2; 1 to 3: block 1 is in all sets */
    CHECK(hapt_offload_device_bytes(&given, choice) == 20 * 2 + 100 * 3 + 10 * 3 + 60 * 1 + 5);
    CHECK(hapt_offload_host_bytes(&given, choice) == 70 * 3 + 7);
    CHECK(hapt_offload_fits(&given, choice));
    CHECK(hapt_offload_forward_s(&given, choice) == 7 * 3 + 2);
    /* t_sync: 7 - 2 - 4 behind block 1, 7 - 4 behind block 2 */
    CHECK(hapt_offload_backward_s(&given, choice) == 4 * 4 + 2 * 2 + 1 + 1 + 3);
    given.host_update_s = 9;
    CHECK(hapt_offload_backward_s(&given, choice) == 4 + 5 + 9 * 3);
    given.fetch_s = 1; /* computing is the longer part of (3), and nothing waits in (4) */
    given.host_update_s = 0;
    CHECK(hapt_offload_forward_s(&given, choice) == 2 * 4);
    CHECK(hapt_offload_backward_s(&given, choice) == 4 * 4 + 2 * 2 + 1);
    given.device_memory_bytes = 434;
    CHECK(!hapt_offload_fits(&given, choice));
    given.device_memory_bytes = 435, given.host_memory_bytes = 216;
    CHECK(!hapt_offload_fits(&given, choice));
}

/* Three blocks; times count from the last forward pass. */
static void streams_by_hand(void)
{
    const struct hapt_offload_execution in_order = {.overlap = HAPT_OFFLOAD_ACROSS_STEPS},
                                        priority = {.overlap = HAPT_OFFLOAD_ACROSS_STEPS, .priority = true},
                                        clipped = {.overlap = HAPT_OFFLOAD_ACROSS_STEPS, .clipping = true},
                                        both = {HAPT_OFFLOAD_ACROSS_STEPS, true, true};
    struct hapt_offload_case given = {.block_count = 3,
                                      .forward_s = 1,
                                      .backward_s = 2,
                                      .fetch_s = 1,
                                      .offload_s = 1,
                                      .device_update_s = 5,
                                      .host_update_s = 4};
    const struct hapt_offload_choice state = {.state_away = 3};
    /* Gradients are on the host at 3, 5 and 7. In order, block 0 is updated from 11 to 15, fetched to 16, 17, 18. */
    CHECK(period_of(&given, state, in_order) == 19);
    CHECK(hapt_offload_forward_s(&given, state) + hapt_offload_backward_s(&given, state) == 19);
    /* Block 2 from 3 to 7, block 0 to 11, block 1 to 15; fetched to 8, 12, 16; forward passes to 13, 17, 18. */
    CHECK(period_of(&given, state, priority) == 18);
    /* The norm is known at 6: updates to 10, 14, 18, fetches to 19, 20, 21. */
    CHECK(period_of(&given, state, clipped) == 22);
    /* Block 1 to 10, block 0 to 14, block 2 to 18, which is fetched to 19. */
    CHECK(period_of(&given, state, both) == 20);
    CHECK(period_of(&given, state, (struct hapt_offload_execution){.overlap = HAPT_OFFLOAD_WITHIN_STEP}) == 19);
    /* As with clipping, but the first forward pass waits for the last fetch at 21. */
    CHECK(period_of(&given, state, (struct hapt_offload_execution){.overlap = HAPT_OFFLOAD_PHASES}) == 24);
    CHECK(period_of(&given, state, (struct hapt_offload_execution){.overlap = HAPT_OFFLOAD_SYNCHRONOUS}) ==
          3 * (1 + 1 + 2 + 1 + 4));
    CHECK(period_of(&given, (struct hapt_offload_choice){.recomputed = 2}, in_order) == 3 * (1 + 2 + 5) + 2);

    given.fetch_s = 6, given.host_update_s = 1;
    const struct hapt_offload_choice away = {1, 1, 3};
    /* Block 0 comes back from 2, when block 2 has ended, to 8; it ends at 11, is updated to 13, and three fetches
     * follow. */
    CHECK(period_of(&given, away, in_order) == 13 + 3 * 6 + 1);
    /* From 8 on: block 1 to 14, block 0 to 20, block 2 to 26. */
    CHECK(period_of(&given, away, priority) == 27);
    /* A fourth block is ready for its fetch at 3, but block 0 comes back first, from 4 to 10. Then block 1 comes to 16,
     * block 0 to 22, block 2 to 28, block 3 to 34. */
    given.block_count = 4, given.forward_s = 3, given.host_update_s = 0;
    CHECK(period_of(&given, (struct hapt_offload_choice){0, 1, 4}, priority) == 37);
}

static void refusals(void)
{
    uint64_t seed = 1;
    struct hapt_offload_case given = random_case(&seed, 4);
    struct hapt_offload_plan plan = {.period_s = 7};
    struct hapt_offload_choice choice = {.recomputed = -7};
    double period_s = 7;
    given.device_memory_bytes = 0, given.device_constant_bytes = 1;
    for (int r = 0; r < HAPT_RIVAL_COUNT; r++)
        CHECK_FAILS(hapt_offload_rival_plan(&given, (enum hapt_offload_rival)r, false, &plan), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(hapt_offload_optimum(&given, &choice), HAPT_ERR_INFEASIBLE);
    CHECK_FAILS(hapt_offload_jointly(&given, (struct hapt_offload_execution){0}, &choice, &period_s),
                HAPT_ERR_INFEASIBLE);
    given.checkpoint_bytes = given.activation_bytes + 1;
    CHECK_FAILS(hapt_offload_rival_plan(&given, HAPT_RIVAL_AUTOHETE, false, &plan), HAPT_ERR_INPUT);
    given.checkpoint_bytes = 0, given.host_update_s = -1;
    CHECK_FAILS(hapt_offload_case_check(&given), HAPT_ERR_INPUT);
    given.host_update_s = NAN;
    CHECK_FAILS(hapt_offload_case_check(&given), HAPT_ERR_INPUT);
    given.host_update_s = 1, given.block_count = 0;
    CHECK_FAILS(hapt_offload_case_check(&given), HAPT_ERR_INPUT);
    CHECK(plan.period_s == 7 && choice.recomputed == -7 && period_s == 7); /* written on success only */
}

/* ---- The optimum of one step, block by block ---- */

static bool is_in(int block, int first, int count)
{
    return block >= first && block < first + count;
}

/* The sum of the passes; INFINITY: does not fit. Sums over blocks instead of products. */
static double sum_by_blocks(const struct hapt_offload_case *given, int c, int p, int o)
{
    const int L = given->block_count;
    /* (1): one more block of activations and of weights is at work */
    double device = given->device_constant_bytes + given->activation_bytes + given->weight_bytes;
    double host = given->host_constant_bytes, fetch_s = given->forward_s, forward_s = 0, compute_s = 0;
    double host_s = given->backward_s + given->offload_s;
    for (int i = 0; i < L; i++) {
        const bool again = is_in(i, 0, c), weights = is_in(i, L - o, p), state = is_in(i, L - o, o);
        device += again ? given->checkpoint_bytes : given->activation_bytes;
        device += weights ? 0 : given->weight_bytes;
        device += state ? 0 : given->state_bytes;
        host += state ? given->weight_bytes + given->state_bytes : 0;
        forward_s += given->forward_s;
        fetch_s += state ? given->fetch_s : 0;
        const double passes_s = given->backward_s + (again ? given->forward_s : 0);
        compute_s += weights ? fmax(passes_s, given->fetch_s) : passes_s;
        compute_s += state ? 0 : given->device_update_s;
        host_s += state ? given->host_update_s : 0;
    }
    if (device > given->device_memory_bytes || host > given->host_memory_bytes) return INFINITY;
    return fmax(forward_s, fetch_s) + fmax(compute_s, host_s);
}

static void optimum_against_enumeration(void)
{
    const int cases = test_long() ? 100000 : 4000;
    int feasible = 0;
    for (int k = 1; k <= cases; k++) {
        uint64_t seed = (uint64_t)k;
        const struct hapt_offload_case given = random_case(&seed, 7);
        const int L = given.block_count;
        struct hapt_offload_choice found, best = {0};
        double least_s = INFINITY;
        for (int o = 0; o <= L; o++)
            for (int c = 0; c <= L; c++)
                for (int p = 0; p <= o; p++) {
                    const double sum_s = sum_by_blocks(&given, c, p, o);
                    if (sum_s < least_s) best = (struct hapt_offload_choice){c, p, o};
                    least_s = fmin(least_s, sum_s);
                }
        if (isinf(least_s)) {
            CHECK_FAILS(hapt_offload_optimum(&given, &found), HAPT_ERR_INFEASIBLE);
            continue;
        }
        feasible++;
        CHECK_OK(hapt_offload_optimum(&given, &found));
        CHECK_MESSAGE(memcmp(&found, &best, sizeof found) == 0, "seed %d: %d/%d/%d, not %d/%d/%d", k, found.recomputed,
                      found.weights_away, found.state_away, best.recomputed, best.weights_away, best.state_away);
        const double sum_s = hapt_offload_forward_s(&given, found) + hapt_offload_backward_s(&given, found);
        CHECK_MESSAGE(sum_s == least_s, "seed %d: %g, not %g", k, sum_s, least_s);
    }
    CHECK_MESSAGE(feasible > cases / 4 && feasible < cases, "%d of %d cases are feasible", feasible, cases);
}

/* ---- The streams as an explicit graph ---- */

enum kind { LOAD, RUN, RELOAD, REDO, BACK, SPILL, UPDATE, KINDS }; /* LOAD, RELOAD: fetches; SPILL: gradients */

struct node {
    int step, kind, block;
    bool host; /* UPDATE: on the host */
    double seconds, end_s;
    bool known;
};

struct explicit_graph {
    int L, count;
    struct hapt_offload_execution execution;
    bool free_copies; /* copies and host updates have no order of their own: a relaxation of every order */
    struct node node[STEPS * KINDS * MOST_BLOCKS];
};

static void add_nodes(struct explicit_graph *graph, const struct hapt_offload_case *given,
                      struct hapt_offload_choice choice)
{
    const int L = given->block_count, first = L - choice.state_away;
    for (int step = 0; step < STEPS; step++)
        for (int i = 0; i < L; i++) {
            const bool host = i >= first;
            const bool exists[KINDS] = {host, true, is_in(i, first, choice.weights_away), i < choice.recomputed, true,
                                        host, true};
            const double seconds[KINDS] = {given->fetch_s,
                                           given->forward_s,
                                           given->fetch_s,
                                           given->forward_s,
                                           given->backward_s,
                                           given->offload_s,
                                           host ? given->host_update_s : given->device_update_s};
            for (int kind = 0; kind < KINDS; kind++)
                if (exists[kind])
                    graph->node[graph->count++] =
                        (struct node){.step = step, .kind = kind, .block = i, .host = host, .seconds = seconds[kind]};
        }
}

static int stream_of(const struct explicit_graph *graph, const struct node *node)
{
    if (graph->execution.overlap == HAPT_OFFLOAD_SYNCHRONOUS) return 0;
    if (node->kind == LOAD || node->kind == RELOAD) return 1;
    if (node->kind == SPILL) return 2;
    return node->kind == UPDATE && node->host ? 3 : 0;
}

static bool updates_late(const struct explicit_graph *graph)
{
    return graph->execution.clipping || graph->execution.overlap == HAPT_OFFLOAD_SYNCHRONOUS ||
           graph->execution.overlap == HAPT_OFFLOAD_PHASES;
}

/* Where a node stands among those of its step, on whichever stream. */
static int position_of(const struct explicit_graph *graph, const struct node *node)
{
    const int i = node->block, back = 2 * graph->L + 8 * (graph->L - i);
    switch (node->kind) {
    case LOAD: return 2 * i;
    case RUN: return 2 * i + 1;
    case UPDATE: return updates_late(graph) ? 100 * graph->L - i : back + UPDATE;
    default: return back + node->kind;
    }
}

/* a ends before b starts. */
static bool precedes(const struct explicit_graph *graph, const struct node *a, const struct node *b)
{
    const bool same_block = a->block == b->block, same_step = a->step == b->step, next = a->step + 1 == b->step;
    const enum hapt_offload_overlap overlap = graph->execution.overlap;
    const int stream = stream_of(graph, a);
    if (stream == stream_of(graph, b) && (stream == 0 || !graph->free_copies))
        return a->step != b->step ? a->step < b->step : position_of(graph, a) < position_of(graph, b);
    if (same_step && same_block) {
        if (a->kind == LOAD) return b->kind == RUN;
        if (a->kind == RELOAD) return b->kind == REDO || b->kind == BACK;
        if (a->kind == BACK && b->kind == SPILL) return true;
        if (a->kind == SPILL) return b->kind == UPDATE;
    }
    if (same_step && a->kind == RUN && b->kind == RELOAD) return true;
    if (same_step && a->kind == BACK && b->kind == RELOAD) return a->block >= b->block + 2;
    if (same_step && a->kind == BACK && b->kind == UPDATE && updates_late(graph)) return true;
    if (same_step && a->kind == LOAD && b->kind == RUN && overlap == HAPT_OFFLOAD_PHASES) return true;
    if (next && a->kind == RELOAD && b->kind == LOAD) return true;
    if (next && a->kind == UPDATE && b->kind == LOAD && (same_block || overlap == HAPT_OFFLOAD_WITHIN_STEP))
        return true;
    return next && a->kind == UPDATE && b->kind == RUN && overlap != HAPT_OFFLOAD_ACROSS_STEPS;
}

static double end_of(struct explicit_graph *graph, struct node *node)
{
    double start_s = 0;
    if (node->known) return node->end_s;
    for (int k = 0; k < graph->count; k++)
        if (precedes(graph, &graph->node[k], node)) start_s = fmax(start_s, end_of(graph, &graph->node[k]));
    node->end_s = start_s + node->seconds;
    node->known = true;
    return node->end_s;
}

/* turn_s[step]: when its last forward pass ends. */
static void longest_paths(const struct hapt_offload_case *given, struct hapt_offload_choice choice,
                          struct hapt_offload_execution execution, bool free_copies, double *turn_s)
{
    static struct explicit_graph graph;
    graph = (struct explicit_graph){.L = given->block_count, .execution = execution, .free_copies = free_copies};
    add_nodes(&graph, given, choice);
    for (int k = 0; k < graph.count; k++) {
        struct node *node = &graph.node[k];
        if (node->kind == RUN && node->block == graph.L - 1) turn_s[node->step] = end_of(&graph, node);
    }
}

static void streams_against_longest_paths(void)
{
    const int cases = test_long() ? 50000 : 4000;
    int waiting = 0;
    for (int k = 1; k <= cases; k++) {
        uint64_t seed = (uint64_t)k;
        const struct hapt_offload_case given = random_case(&seed, 6);
        const struct hapt_offload_choice choice = random_choice(&seed, given.block_count);
        const struct hapt_offload_execution execution = {.overlap = (enum hapt_offload_overlap)draw(&seed, 4),
                                                         .clipping = draw(&seed, 2)};
        double turn_s[STEPS];
        longest_paths(&given, choice, execution, false, turn_s);
        const double period_s = period_of(&given, choice, execution);
        CHECK_MESSAGE(period_s == turn_s[2] - turn_s[1], "seed %d: %g, longest path %g", k, period_s,
                      turn_s[2] - turn_s[1]);
        CHECK_MESSAGE(turn_s[1] - turn_s[0] == turn_s[2] - turn_s[1], "seed %d: periods differ", k);
        waiting += period_s > given.block_count * (given.forward_s + given.backward_s) +
                                  choice.recomputed * given.forward_s +
                                  (given.block_count - choice.state_away) * given.device_update_s;
    }
    CHECK_MESSAGE(waiting > cases / 3, "only %d of %d cases wait for anything", waiting, cases);
}

/* ---- Properties ---- */

static double busiest_s(const struct hapt_offload_case *given, struct hapt_offload_choice choice)
{
    const int L = given->block_count, c = choice.recomputed, p = choice.weights_away, o = choice.state_away;
    const double compute_s =
        L * (given->forward_s + given->backward_s) + c * given->forward_s + (L - o) * given->device_update_s;
    return fmax(fmax(compute_s, (o + p) * given->fetch_s), o * fmax(given->offload_s, given->host_update_s));
}

/* Priority starts whatever is ready, without waiting for an earlier block. An operation that it starts too early may
 * delay an earlier block by its own length, on each stream. */
static void priority_properties(void)
{
    const int cases = test_long() ? 100000 : 5000;
    int faster = 0, slower = 0;
    double worst = 0;
    for (int k = 1; k <= cases; k++) {
        uint64_t seed = (uint64_t)k;
        const struct hapt_offload_case given = random_case(&seed, MOST_BLOCKS);
        const struct hapt_offload_choice choice = random_choice(&seed, given.block_count);
        struct hapt_offload_execution execution = {.overlap = HAPT_OFFLOAD_ACROSS_STEPS, .clipping = draw(&seed, 2)};
        double turn_s[STEPS];
        const double in_order_s = period_of(&given, choice, execution);
        longest_paths(&given, choice, execution, true, turn_s);
        execution.priority = true;
        const double priority_s = period_of(&given, choice, execution);
        CHECK_MESSAGE(priority_s >= busiest_s(&given, choice), "seed %d: shorter than a stream's work", k);
        CHECK_MESSAGE(priority_s >= turn_s[2] - turn_s[1], "seed %d: a dependence is broken", k);
        CHECK_MESSAGE(in_order_s >= busiest_s(&given, choice), "seed %d: shorter than a stream's work in order", k);
        const double late_s = given.fetch_s + given.offload_s + given.host_update_s;
        if (late_s > 0) worst = fmax(worst, (priority_s - in_order_s) / late_s);
        faster += priority_s < in_order_s;
        slower += priority_s > in_order_s;
        execution.priority = false;
        for (int overlap = 0; overlap < HAPT_OFFLOAD_ACROSS_STEPS; overlap++) {
            execution.overlap = (enum hapt_offload_overlap)overlap;
            CHECK_MESSAGE(period_of(&given, choice, execution) >= in_order_s,
                          "seed %d: overlap %d is faster than steps that overlap", k, overlap);
        }
    }
    printf("  priority: %d of %d cases faster, %d slower, by at most %.2f of fetch + offload + update\n", faster, cases,
           slower, worst);
    CHECK_MESSAGE(worst <= 1, "priority is slower than in order by %.2f of fetch + offload + update", worst);
    CHECK(faster > 2 * slower);
}

/* ---- Choices by the period ---- */

static bool rival_may(enum hapt_offload_rival rival, int L, struct hapt_offload_choice choice)
{
    const bool recomputes_alike = choice.recomputed == 0 || choice.recomputed == L;
    switch (rival) {
    case HAPT_RIVAL_RECOMPUTE_ALL: return choice.recomputed == L && choice.state_away == 0;
    case HAPT_RIVAL_ZERO_OFFLOAD: return recomputes_alike && choice.weights_away == 0 && choice.state_away == L;
    case HAPT_RIVAL_PATRICKSTAR: return recomputes_alike;
    case HAPT_RIVAL_STRONGHOLD: return recomputes_alike && choice.weights_away == choice.state_away;
    default: return true;
    }
}

/* The least period of all choices that fit and that a rival may take. */
static double least_period(const struct hapt_offload_case *given, enum hapt_offload_rival rival,
                           struct hapt_offload_execution execution)
{
    const int L = given->block_count;
    double least_s = INFINITY;
    for (int o = 0; o <= L; o++)
        for (int p = 0; p <= o; p++)
            for (int c = 0; c <= L; c++) {
                const struct hapt_offload_choice choice = {c, p, o};
                if (!rival_may(rival, L, choice) || isinf(sum_by_blocks(given, c, p, o))) continue;
                least_s = fmin(least_s, period_of(given, choice, execution));
            }
    return least_s;
}

static void choices_against_enumeration(void)
{
    static const enum hapt_offload_overlap overlap[] = {HAPT_OFFLOAD_ACROSS_STEPS, HAPT_OFFLOAD_PHASES,
                                                        HAPT_OFFLOAD_SYNCHRONOUS, HAPT_OFFLOAD_WITHIN_STEP};
    const int cases = test_long() ? 5000 : 300;
    int planned = 0;
    double worst = 1;
    for (int k = 1; k <= cases; k++) {
        uint64_t seed = (uint64_t)k;
        const struct hapt_offload_case given = random_case(&seed, 5);
        struct hapt_offload_execution execution = {.clipping = draw(&seed, 2)};
        struct hapt_offload_choice choice;
        struct hapt_offload_plan plan;
        for (int r = 0; r < HAPT_RIVAL_AUTOHETE; r++) {
            execution.overlap = overlap[r];
            const double least_s = least_period(&given, (enum hapt_offload_rival)r, execution);
            if (isinf(least_s)) {
                CHECK_FAILS(hapt_offload_rival_plan(&given, (enum hapt_offload_rival)r, execution.clipping, &plan),
                            HAPT_ERR_INFEASIBLE);
                continue;
            }
            planned++;
            CHECK_OK(hapt_offload_rival_plan(&given, (enum hapt_offload_rival)r, execution.clipping, &plan));
            CHECK_MESSAGE(plan.period_s == least_s &&
                              rival_may((enum hapt_offload_rival)r, given.block_count, plan.choice),
                          "seed %d, %s: %g, not %g", k, hapt_offload_rival_name((enum hapt_offload_rival)r),
                          plan.period_s, least_s);
        }
        execution.overlap = HAPT_OFFLOAD_ACROSS_STEPS;
        const double in_order_s = least_period(&given, HAPT_RIVAL_AUTOHETE, execution);
        double joint_s;
        if (isinf(in_order_s)) continue;
        CHECK_OK(hapt_offload_jointly(&given, execution, &choice, &joint_s));
        CHECK_MESSAGE(joint_s == in_order_s, "seed %d: jointly %g, not %g", k, joint_s, in_order_s);
        CHECK(hapt_offload_fits(&given, choice) && period_of(&given, choice, execution) == joint_s);
        execution.priority = true;
        CHECK_OK(hapt_offload_jointly(&given, execution, &choice, &joint_s));
        const double least_s = least_period(&given, HAPT_RIVAL_AUTOHETE, execution);
        CHECK(joint_s >= least_s);
        if (least_s > 0) worst = fmax(worst, joint_s / least_s);
    }
    printf("  jointly with priority: at most %.3f times the least period of all choices\n", worst);
    CHECK(worst <= 1.1); /* not exact with priority: a longer pass may happen to let a better order through */
    CHECK(planned > cases);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(equations_by_hand);
    RUN(streams_by_hand);
    RUN(refusals);
    RUN(optimum_against_enumeration);
    RUN(streams_against_longest_paths);
    RUN(priority_properties);
    RUN(choices_against_enumeration);
    return test_finish();
}
