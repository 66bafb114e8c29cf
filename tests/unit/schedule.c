/* Schedules as lists, and the simulator on cases solved by hand (HAPT 2.3, 4). Random cases: schedule_random.c. */
#include "hapt/simulate.h"
#include "test.h"

enum { MOST_STAGES = 8 };

static const enum hapt_schedule_kind kinds[] = {HAPT_SCHEDULE_GPIPE, HAPT_SCHEDULE_1F1B, HAPT_SCHEDULE_EAGER,
                                                HAPT_SCHEDULE_H1F1B};

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
    /* the bounds themselves give the smaller count, apart from rounding */
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
    const struct hapt_schedule_options options = {.tied = tied};
    CHECK_OK(hapt_schedule_build(kind, p->stages, p->microbatches, p->warmup, &options, arena, &p->schedule));
}

/* The period of a long run, and the hidden share of boundary 0. */
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

/* Two equal stages: H-1F1B hides every c <= t_max, eager 1F1B what fits into two extra launches, 1F1B nothing. */
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
        /* exchanging a transfer with its neighbour may be valid; another order of computation never is */
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

/* Every rank agrees once, behind its last gradient; then each parameter group is updated once. More groups change no
 * time but the share of each. */
static void every_list_ends_alike(void)
{
    const double step_s[3] = {0.5, 1, 2};
    for (int groups = 0; groups <= 3; groups++) {
        struct hapt_arena arena;
        struct hapt_simulation *simulation;
        struct pipeline p = {.stages = 3, .microbatches = 4, .forward_s = {1, 1, 1}, .backward_s = {2, 2, 2}};
        const int warmup[3] = {3, 2, 1}, all = groups ? groups : 1;
        const struct hapt_schedule_options options = {.tied = true, .update_groups = groups};
        hapt_arena_init(&arena);
        CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 3, 4, warmup, &options, &arena, &p.schedule));
        CHECK_OK(hapt_schedule_check(p.schedule));
        const struct hapt_instruction_list *idle = &p.schedule->idle;
        CHECK(idle->count == 1 && idle->instruction[0].kind == HAPT_INSTRUCTION_NORM);
        CHECK(idle->instruction[0].chunk == -1 && idle->instruction[0].microbatch == -1);
        for (int s = 0; s < 3; s++) {
            struct hapt_instruction_list *list = &p.schedule->list[s];
            struct hapt_instruction *norm = &list->instruction[list->count - all - 1];
            CHECK(norm->kind == HAPT_INSTRUCTION_NORM && norm->chunk == -1);
            for (int g = 0; g < all; g++) {
                CHECK(norm[1 + g].kind == HAPT_INSTRUCTION_UPDATE && norm[1 + g].group == g && norm[1 + g].chunk == s);
                norm[1 + g].group++;
                CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
                norm[1 + g].group--;
            }
            list->count--; /* one group is left out */
            CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
            list->count++;
            norm->kind = HAPT_INSTRUCTION_UPDATE; /* nobody agrees */
            CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
            norm->kind = HAPT_INSTRUCTION_NORM;
        }
        p.schedule->idle.count = 0;
        CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
        p.schedule->idle.count = 1;
        p.costs = (struct hapt_costs){
            .forward_s = p.forward_s, .backward_s = p.backward_s, .comm_s = p.comm_s, .step_s = step_s};
        CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
        for (int s = 0; s < 3; s++) CHECK_NEAR(simulation->busy_s[s], 12 + step_s[s], 1e-12);
        hapt_arena_release(&arena);
    }
}

/* Stage 0 waits for gradients before it has launched what stage 1 waits for. */
static void deadlocks_are_found(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {.stages = 2, .microbatches = 4, .forward_s = {1, 1}, .backward_s = {1, 1}, .t_max_s = 2};
    const int rising[2] = {1, 2};
    hapt_arena_init(&arena);
    CHECK_FAILS(hapt_schedule_build(HAPT_SCHEDULE_H1F1B, 2, 4, rising, NULL, &arena, &p.schedule), HAPT_ERR_INPUT);
    build(&p, HAPT_SCHEDULE_1F1B, 0, false, &arena);
    struct hapt_schedule *other;
    const int one[2] = {2, 2};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 2, 4, one, NULL, &arena, &other));
    struct hapt_schedule *early;
    const int least[2] = {1, 1};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 2, 4, least, NULL, &arena, &early));
    /* stage 0 launches one at a time; stage 1 wants two before the first backward */
    p.schedule->list[0] = early->list[0];
    p.schedule->list[1] = other->list[1];
    CHECK_FAILS(hapt_schedule_check(p.schedule), HAPT_ERR_INTERNAL);
    CHECK_FAILS(hapt_simulate(p.schedule, &p.costs, &arena, &simulation), HAPT_ERR_INTERNAL);
    hapt_arena_release(&arena);
}

/* The first and the last stage wait for each other and take exchange_s. Stages between them continue. */
static void tied_parameters_meet(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {.stages = 3, .microbatches = 1, .forward_s = {1, 1, 1}, .backward_s = {2, 2, 2}, .t_max_s = 3};
    hapt_arena_init(&arena);
    build(&p, HAPT_SCHEDULE_H1F1B, 0, true, &arena);
    CHECK_OK(hapt_schedule_check(p.schedule));
    CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
    /* backwards end at 5, 7, 9; both stages exchange until 9.1 */
    CHECK_NEAR(simulation->total_s, 9.1, 1e-12);
    const double step_s[3][3] = {{0, 0, 4}, {0.5, 4, 0}, {0.5, 1, 0}}, total_s[3] = {13.1, 11, 9.6};
    for (int k = 0; k < 3; k++) {
        p.costs.step_s = step_s[k];
        CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
        CHECK_NEAR(simulation->total_s, total_s[k], 1e-12);
        for (int i = 0; i < 3; i++) CHECK_NEAR(simulation->busy_s[i], 3 + step_s[k][i], 1e-12);
    }
    hapt_arena_release(&arena);
}

/* End times of the compute instructions of a stage, in the order of the list. */
static void ends_are(const struct pipeline *p, const struct hapt_simulation *simulation, int stage,
                     const double *expected, int count)
{
    const struct hapt_instruction_list *list = &p->schedule->list[stage];
    int seen = 0;
    for (int i = 0; i < list->count; i++) {
        if (list->instruction[i].kind != HAPT_INSTRUCTION_FORWARD &&
            list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD)
            continue;
        if (seen < count) CHECK_NEAR(simulation->time[stage][i].end_s, expected[seen], 1e-12);
        seen++;
    }
    CHECK(seen == count);
}

/* Two stages with f = 1, b = 2, c = 1/2 and three microbatches: all forwards, then all backwards. */
static void gpipe_by_hand(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {
        .stages = 2, .microbatches = 3, .forward_s = {1, 1}, .backward_s = {2, 2}, .comm_s = {0.5}, .t_max_s = 3};
    hapt_arena_init(&arena);
    build(&p, HAPT_SCHEDULE_GPIPE, 0, false, &arena);
    CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
    ends_are(&p, simulation, 0, (const double[]){1, 2, 3, 9, 11, 13}, 6);
    ends_are(&p, simulation, 1, (const double[]){2.5, 3.5, 4.5, 6.5, 8.5, 10.5}, 6);
    CHECK_NEAR(simulation->total_s, 13, 1e-12);
    CHECK(simulation->peak_slots[0] == 3 && simulation->peak_slots[1] == 3);
    CHECK_NEAR(simulation->comm_s[0], 1.5, 1e-12);
    CHECK_NEAR(simulation->idle_s[0], 4, 1e-12);
    /* one transfer slot: an activation is sent when the one before has been used, a gradient when the one before has
     * arrived */
    p.costs.transfer_slots = 1;
    CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
    ends_are(&p, simulation, 0, (const double[]){1, 2, 3, 10, 12.5, 15}, 6);
    ends_are(&p, simulation, 1, (const double[]){2.5, 4, 5.5, 7.5, 10, 12.5}, 6);
    hapt_arena_release(&arena);
}

/* 1F1B with c = 1: a transfer takes a second of the sender and of the receiver. Sends at 1-2 and 3-4 forward, at 5-6
 * and 10-11 backward. */
static void blocking_by_hand(void)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    struct pipeline p = {
        .stages = 2, .microbatches = 2, .forward_s = {1, 1}, .backward_s = {2, 2}, .comm_s = {1}, .t_max_s = 3};
    hapt_arena_init(&arena);
    build(&p, HAPT_SCHEDULE_1F1B, 0, false, &arena);
    CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
    ends_are(&p, simulation, 0, (const double[]){1, 2, 8, 11}, 4);
    ends_are(&p, simulation, 1, (const double[]){3, 5, 6, 8}, 4);
    for (int slots = 0; slots <= 1; slots++) { /* the receiver waits for each message, so slots do not matter */
        p.costs.blocking = true;
        p.costs.transfer_slots = slots;
        CHECK_OK(hapt_simulate(p.schedule, &p.costs, &arena, &simulation));
        ends_are(&p, simulation, 0, (const double[]){1, 3, 8, 13}, 4);
        ends_are(&p, simulation, 1, (const double[]){3, 5, 8, 10}, 4);
        CHECK_NEAR(simulation->total_s, 13, 1e-12);
        CHECK_NEAR(simulation->busy_s[0], 6, 1e-12);
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(kind_names);
    RUN(launch_counts_of_the_paper);
    RUN(two_stages_overlap);
    RUN(damaged_schedules_fail);
    RUN(every_list_ends_alike);
    RUN(deadlocks_are_found);
    RUN(tied_parameters_meet);
    RUN(gpipe_by_hand);
    RUN(blocking_by_hand);
    return test_finish();
}
