/* Schedules as lists, and the simulator against the paper's DAG and claims (HAPT 2.3, 4). */
#include "hapt/simulate.h"
#include "test.h"

enum { MOST_STAGES = 8, MOST_MICROBATCHES = 40 };

static const enum hapt_schedule_kind kinds[] = {HAPT_SCHEDULE_GPIPE, HAPT_SCHEDULE_1F1B, HAPT_SCHEDULE_EAGER,
                                                HAPT_SCHEDULE_H1F1B};

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

static void kind_names(void)
{
    for (int k = 0; k < 4; k++) {
        enum hapt_schedule_kind kind = HAPT_SCHEDULE_GPIPE;
        CHECK(hapt_schedule_kind_parse(hapt_schedule_kind_name(kinds[k]), &kind) && kind == kinds[k]);
    }
    enum hapt_schedule_kind kind;
    CHECK(!hapt_schedule_kind_parse("2f2b", &kind));
}

/* HAPT 2.3.2: a slow link between stages 1 and 2, a fast one between 2 and 3. */
static void launch_counts_of_the_paper(void)
{
    static const int expected[4][3] = {{16, 16, 16}, {3, 2, 1}, {5, 3, 1}, {5, 2, 1}};
    const double comm_s[3] = {0.7, 0.01, 0};
    for (int k = 0; k < 4; k++) {
        int warmup[3];
        hapt_schedule_warmup(kinds[k], 3, 16, comm_s, 1, 0.02, warmup);
        for (int i = 0; i < 3; i++)
            CHECK_MESSAGE(warmup[i] == expected[k][i], "%s launches %d at stage %d, not %d",
                          hapt_schedule_kind_name(kinds[k]), warmup[i], i, expected[k][i]);
        hapt_schedule_warmup(kinds[k], 3, 2, comm_s, 1, 0.02, warmup);
        CHECK(warmup[0] == 2 && warmup[1] == 2);
    }
    /* the bounds themselves belong to the smaller count, rounding aside */
    const double bounds[4][2] = {{0.02, 2}, {0.5, 3}, {1, 4}, {0.1 + 0.2, 3}};
    for (int k = 0; k < 4; k++) {
        int warmup[2];
        hapt_schedule_warmup(HAPT_SCHEDULE_H1F1B, 2, 16, (const double[]){bounds[k][0], 0}, k == 3 ? 0.6 : 1, 0.02,
                             warmup);
        CHECK(warmup[0] == (int)bounds[k][1]);
    }
}

struct pipeline {
    int stages, microbatches;
    double forward_s[MOST_STAGES], backward_s[MOST_STAGES], comm_s[MOST_STAGES], step_s[MOST_STAGES], t_max_s;
    int warmup[MOST_STAGES];
    struct hapt_costs costs;
    struct hapt_schedule *schedule;
};

static void build(struct pipeline *p, enum hapt_schedule_kind kind, int transfer_slots, bool tied,
                  struct hapt_arena *arena)
{
    p->costs = (struct hapt_costs){.forward_s = p->forward_s,
                                   .backward_s = p->backward_s,
                                   .comm_s = p->comm_s,
                                   .step_s = p->step_s,
                                   .exchange_s = tied ? 0.1 : 0,
                                   .transfer_slots = transfer_slots};
    hapt_schedule_warmup(kind, p->stages, p->microbatches, p->comm_s, p->t_max_s, 0.02, p->warmup);
    CHECK_OK(hapt_schedule_build(kind, p->stages, p->microbatches, p->warmup, tied, arena, &p->schedule));
}

static void random_pipeline(struct pipeline *p, uint64_t *seed, bool balanced)
{
    *p = (struct pipeline){.stages = 1 + below(seed, MOST_STAGES), .microbatches = 1 + below(seed, MOST_MICROBATCHES)};
    const double forward_s = 0.2 + 0.6 * hapt_random_unit(seed);
    for (int i = 0; i < p->stages; i++) {
        p->forward_s[i] = balanced ? forward_s : hapt_random_unit(seed);
        p->backward_s[i] = balanced ? 1 - forward_s : 2 * hapt_random_unit(seed);
        p->t_max_s = fmax(p->t_max_s, p->forward_s[i] + p->backward_s[i]);
    }
    for (int i = 0; i < p->stages - 1; i++)
        p->comm_s[i] =
            below(seed, 4) == 0 ? 0.01 * p->t_max_s * hapt_random_unit(seed) : p->t_max_s * hapt_random_unit(seed);
}

/* The DAG of HAPT 4.2.1 by plain relaxation: ends of F, B and of the transfers, until nothing moves. */
struct dag {
    double end[4][MOST_STAGES][MOST_MICROBATCHES];
};
enum { NODE_F, NODE_B, NODE_CF, NODE_CB };

static double start_of_forward(const struct pipeline *p, const struct dag *dag, int s, int m)
{
    double start = s > 0 ? dag->end[NODE_CF][s - 1][m] : 0;
    if (m > 0) start = fmax(start, dag->end[NODE_F][s][m - 1]);
    if (m >= p->warmup[s]) start = fmax(start, dag->end[NODE_B][s][m - p->warmup[s]]);
    return start;
}

static double start_of_backward(const struct pipeline *p, const struct dag *dag, int s, int m)
{
    const int ahead = m + p->warmup[s] - 1 < p->microbatches ? m + p->warmup[s] - 1 : p->microbatches - 1;
    const int slots = p->costs.transfer_slots;
    double start = dag->end[NODE_F][s][ahead];
    if (s < p->stages - 1) start = fmax(start, dag->end[NODE_CB][s][m]);
    if (s > 0 && slots > 0 && m >= slots) start = fmax(start, dag->end[NODE_CB][s - 1][m - slots]);
    return m > 0 ? fmax(start, dag->end[NODE_B][s][m - 1]) : start;
}

static bool raise(double *end, double value)
{
    const bool moved = value > *end + 1e-13;
    if (moved) *end = value;
    return moved;
}

static double longest_path(const struct pipeline *p)
{
    static struct dag dag;
    const int slots = p->costs.transfer_slots;
    double total = 0;
    memset(&dag, 0, sizeof dag);
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < p->stages; s++) {
            for (int m = 0; m < p->microbatches; m++) {
                moved |= raise(&dag.end[NODE_F][s][m], start_of_forward(p, &dag, s, m) + p->forward_s[s]);
                moved |= raise(&dag.end[NODE_B][s][m], start_of_backward(p, &dag, s, m) + p->backward_s[s]);
                if (s == p->stages - 1) continue;
                double forward = dag.end[NODE_F][s][m], backward = dag.end[NODE_B][s + 1][m];
                if (m > 0) forward = fmax(forward, dag.end[NODE_CF][s][m - 1]);
                if (m > 0) backward = fmax(backward, dag.end[NODE_CB][s][m - 1]);
                if (slots > 0 && m >= slots) {
                    forward = fmax(forward, dag.end[NODE_F][s + 1][m - slots]);
                    backward = fmax(backward, dag.end[NODE_B][s][m - slots]);
                }
                moved |= raise(&dag.end[NODE_CF][s][m], forward + p->comm_s[s]);
                moved |= raise(&dag.end[NODE_CB][s][m], backward + p->comm_s[s]);
            }
        }
    }
    for (int s = 0; s < p->stages; s++) total = fmax(total, dag.end[NODE_B][s][p->microbatches - 1] + p->step_s[s]);
    return total;
}

static void random_pipelines(void)
{
    const int count = test_long() ? 5000 : 400;
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct pipeline p;
        struct hapt_simulation *free_running, *blocking;
        hapt_arena_init(&arena);
        random_pipeline(&p, &seed, false);
        for (int i = 0; i < p.stages; i++) p.step_s[i] = below(&seed, 2) ? hapt_random_unit(&seed) : 0;
        build(&p, kinds[below(&seed, 4)], below(&seed, 2) ? 3 : 0, false, &arena);
        CHECK_OK(hapt_schedule_check(p.schedule));
        CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &free_running));
        const double expected = longest_path(&p);
        CHECK_MESSAGE(fabs(free_running->total_s - expected) <= 1e-9 * expected,
                      "seed %llu: simulated %.12g, DAG %.12g", (unsigned long long)start, free_running->total_s,
                      expected);
        for (int i = 0; i < p.stages; i++) {
            CHECK_MESSAGE(free_running->peak_slots[i] == p.warmup[i], "seed %llu: stage %d holds %d, launches %d",
                          (unsigned long long)start, i, free_running->peak_slots[i], p.warmup[i]);
            CHECK_NEAR(free_running->busy_s[i], p.microbatches * (p.forward_s[i] + p.backward_s[i]) + p.step_s[i],
                       1e-9);
            CHECK_NEAR(free_running->idle_s[i] + free_running->busy_s[i], free_running->total_s, 1e-9);
        }
        p.costs.blocking = true;
        CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &blocking));
        CHECK_MESSAGE(blocking->total_s >= free_running->total_s * (1 - 1e-12) || p.costs.transfer_slots > 0,
                      "seed %llu: blocking is faster", (unsigned long long)start);
        hapt_arena_release(&arena);
    }
}

/* The period over a long run, and how much of boundary 0 is hidden. */
static double steady_period(struct pipeline *p, enum hapt_schedule_kind kind, int slots, double *overlap)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    hapt_arena_init(&arena);
    build(p, kind, slots, false, &arena);
    CHECK_OK(hapt_simulate(p->schedule, &p->costs, &arena, &simulation));
    if (p->stages > 1) CHECK_OK(hapt_simulate_overlap(p->schedule, &p->costs, 0, &arena, overlap));
    const double period_s = simulation->period_s;
    hapt_arena_release(&arena);
    return period_s;
}

/* Two equal stages: H-1F1B hides every c <= t_max, eager what fits two extra launches, 1F1B nothing. */
static void two_stages_overlap(void)
{
    for (int slots = 0; slots <= 3; slots += 3) {
        for (double c = 0.05; c < 1.001; c += 0.05) {
            double hidden = -1, eager = -1, plain = -1;
            struct pipeline p = {.stages = 2,
                                 .microbatches = 256,
                                 .forward_s = {0.35, 0.35},
                                 .backward_s = {0.65, 0.65},
                                 .comm_s = {c},
                                 .t_max_s = 1};
            const double period_s = steady_period(&p, HAPT_SCHEDULE_H1F1B, slots, &hidden);
            CHECK_MESSAGE(period_s <= 1.04, "H-1F1B: c = %g: period %g", c, period_s);
            CHECK_MESSAGE(hidden > 0.98, "H-1F1B hides %g of c = %g", hidden, c);
            /* HAPT (8): the period is max(t, 2 (t + c) / K) */
            steady_period(&p, HAPT_SCHEDULE_EAGER, slots, &eager);
            CHECK_NEAR(eager, 1 - (fmax(1, 2 * (1 + c) / 3) - 1) / c, 0.01);
            steady_period(&p, HAPT_SCHEDULE_1F1B, slots, &plain);
            CHECK_NEAR(plain, 0, 0.01);
        }
    }
}

static void balanced_pipelines_hide(void)
{
    const int count = test_long() ? 500 : 60;
    for (uint64_t start = 1; start <= (uint64_t)count; start++) {
        uint64_t seed = start;
        struct pipeline p;
        double overlap = 1;
        random_pipeline(&p, &seed, true);
        p.microbatches = 400;
        for (int slots = 0; slots <= 3; slots += 3) {
            const double period_s = steady_period(&p, HAPT_SCHEDULE_H1F1B, slots, &overlap);
            CHECK_MESSAGE(period_s <= p.t_max_s * 1.04, "seed %llu, %d stages, %d slots: period %g of t_max %g",
                          (unsigned long long)start, p.stages, slots, period_s, p.t_max_s);
        }
    }
}

static void damaged_schedules_fail(void)
{
    struct hapt_arena arena;
    struct pipeline p = {.stages = 3, .microbatches = 6, .forward_s = {1, 1, 1}, .backward_s = {2, 2, 2}, .t_max_s = 3};
    hapt_arena_init(&arena);
    build(&p, HAPT_SCHEDULE_1F1B, 0, true, &arena);
    CHECK_OK(hapt_schedule_check(p.schedule));
    struct hapt_instruction_list *list = &p.schedule->list[1];
    for (int i = 0; i + 1 < list->count; i++) {
        const struct hapt_instruction one = list->instruction[i], two = list->instruction[i + 1];
        list->instruction[i] = two;
        list->instruction[i + 1] = one;
        const bool sends = one.kind == HAPT_INSTRUCTION_SEND_FORWARD || one.kind == HAPT_INSTRUCTION_SEND_BACKWARD ||
                           one.kind == HAPT_INSTRUCTION_RECEIVE_FORWARD ||
                           one.kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD ||
                           two.kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD;
        const enum hapt_status status = hapt_schedule_check(p.schedule);
        /* exchanging a transfer with its neighbour may be harmless; computing in another order never is */
        CHECK_MESSAGE(sends || status == HAPT_ERR_INTERNAL, "instructions %d and %d may be exchanged", i, i + 1);
        hapt_fail_reset();
        list->instruction[i] = one;
        list->instruction[i + 1] = two;
    }
    list->instruction[0].microbatch = 6;
    CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
    list->instruction[0].microbatch = 0;
    list->count--;
    CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
    list->count++;
    list->slots--;
    CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
    list->slots++;
    CHECK_OK(hapt_schedule_check(p.schedule));
    hapt_arena_release(&arena);
}

/* Stage 0 asks for gradients before it has launched what stage 1 waits for. */
static void deadlocks_are_found(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {.stages = 2, .microbatches = 4, .forward_s = {1, 1}, .backward_s = {1, 1}, .t_max_s = 2};
    const int rising[2] = {1, 2};
    hapt_arena_init(&arena);
    CHECK_FAILS(hapt_schedule_build(HAPT_SCHEDULE_H1F1B, 2, 4, rising, false, &arena, &p.schedule), HAPT_ERR_INPUT);
    build(&p, HAPT_SCHEDULE_1F1B, 0, false, &arena);
    struct hapt_schedule *other;
    const int one[2] = {2, 2};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 2, 4, one, false, &arena, &other));
    struct hapt_schedule *early;
    const int least[2] = {1, 1};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 2, 4, least, false, &arena, &early));
    /* stage 0 launches one at a time, stage 1 wants two before the first backward */
    p.schedule->list[0] = early->list[0];
    p.schedule->list[1] = other->list[1];
    CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
    CHECK_FAILS(hapt_simulate(p.schedule, &p.costs, &arena, &simulation), HAPT_ERR_INTERNAL);
    hapt_arena_release(&arena);
}

static void tied_parameters_meet(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {.stages = 3, .microbatches = 1, .forward_s = {1, 1, 1}, .backward_s = {2, 2, 2}, .t_max_s = 3};
    hapt_arena_init(&arena);
    build(&p, HAPT_SCHEDULE_H1F1B, 0, true, &arena);
    CHECK_OK(hapt_schedule_check(p.schedule));
    CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
    CHECK_NEAR(simulation->total_s, 9.1, 1e-12);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(kind_names);
    RUN(launch_counts_of_the_paper);
    RUN(random_pipelines);
    RUN(two_stages_overlap);
    RUN(balanced_pipelines_hide);
    RUN(damaged_schedules_fail);
    RUN(deadlocks_are_found);
    RUN(tied_parameters_meet);
    return test_finish();
}
