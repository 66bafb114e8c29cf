/*
 * Properties of schedules over random pipelines: every kind, 1 to 12 stages, up to 64 microbatches, transfers from free
 * to far longer than t_max, several numbers of transfer slots.
 *
 * Why communication is hidden (the test below checks the simulator against this proof). Let T satisfy t_i <= T and c_i
 * <= T for all stages and boundaries, and
 *     t_i + 2 c_i <= (N_i - N_(i+1)) T                                                              (*)
 * Let backward m of stage i begin at m T + beta_i, and forward m + N_i after it, with beta_i = beta_(i+1) + b_(i+1) +
 * c_i. Gradients arrive in time by the choice of beta, activations by (*). A transfer has a free slot in time if slots
 * are unlimited or at least two (f + c <= 2 T, b + c <= 2 T). The simulator starts everything as early as possible, so
 * it is never later:
 *     a step takes at most (B - 1 + N_0) T                                                          (**)
 * This needs no balanced stages. H-1F1B satisfies (*) with T = t_max (1 + 2 epsilon) whenever c <= t_max (HAPT (2),
 * Lemma 1 for equal stages), eager 1F1B with T = t_max whenever c <= t_max / 2, 1F1B with T = max t + 2 c. With one
 * slot it does not hold.
 */
#include "hapt/simulate.h"
#include "test.h"

enum { MOST_STAGES = 12, MOST_MICROBATCHES = 64 };
static const double EPSILON = 0.02;

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

struct pipeline {
    enum hapt_schedule_kind kind;
    int stages, microbatches;
    bool tied;
    double forward_s[MOST_STAGES], backward_s[MOST_STAGES], comm_s[MOST_STAGES], step_s[MOST_STAGES];
    double t_max_s, exchange_s;
    int warmup[MOST_STAGES]; /* N_i, at most B */
    struct hapt_costs costs;
    struct hapt_schedule *schedule;
};

static double compute_s(const struct pipeline *p, int stage)
{
    return p->forward_s[stage] + p->backward_s[stage];
}

/* Balanced stages, nearly balanced ones, or neither. Forward shares are equal or random. */
static void random_stages(struct pipeline *p, uint64_t *seed)
{
    const int shape = below(seed, 4);
    const double share = 0.02 + 0.96 * hapt_random_unit(seed);
    p->t_max_s = 0;
    for (int i = 0; i < p->stages; i++) {
        const double time_s = shape == 0 ? 1 : shape == 1 ? 0.9 + 0.1 * hapt_random_unit(seed) : hapt_random_unit(seed);
        const double part = shape == 3 ? hapt_random_unit(seed) : share;
        p->forward_s[i] = part * time_s;
        p->backward_s[i] = time_s - p->forward_s[i];
        p->t_max_s = fmax(p->t_max_s, compute_s(p, i));
    }
}

/* Transfers of up to `most` times t_max: often none, often exactly at the thresholds of the launch counts. */
static void random_links(struct pipeline *p, uint64_t *seed, double most)
{
    const double corner[] = {0, EPSILON, 0.5, 1};
    for (int i = 0; i < p->stages; i++) {
        const int choice = below(seed, 8);
        const double part = choice < 4    ? corner[choice]
                            : choice == 4 ? EPSILON * hapt_random_unit(seed)
                                          : most * hapt_random_unit(seed);
        p->comm_s[i] = i == p->stages - 1 ? 0 : p->t_max_s * fmin(part, most);
    }
}

static void build(struct pipeline *p, int transfer_slots, struct hapt_arena *arena)
{
    p->costs = (struct hapt_costs){.forward_s = p->forward_s,
                                   .backward_s = p->backward_s,
                                   .comm_s = p->comm_s,
                                   .step_s = p->step_s,
                                   .exchange_s = p->exchange_s,
                                   .transfer_slots = transfer_slots};
    hapt_schedule_warmup(p->kind, p->stages, p->microbatches, p->comm_s, p->t_max_s, EPSILON, p->warmup);
    const struct hapt_schedule_options options = {.tied = p->tied};
    CHECK_OK(hapt_schedule_build(p->kind, p->stages, p->microbatches, p->warmup, &options, arena, &p->schedule));
}

/* The DAG of HAPT 4.2.1 by recursion, without lists and clocks. End times of forwards, backwards and transfers; -1
 * until known. */
struct dag {
    const struct pipeline *p;
    double end[4][MOST_STAGES][MOST_MICROBATCHES];
};
enum node { NODE_F, NODE_B, NODE_CF, NODE_CB };

static double end_of(struct dag *dag, enum node kind, int s, int m);

static double start_of_forward(struct dag *dag, int s, int m)
{
    const struct pipeline *p = dag->p;
    double start = s > 0 ? end_of(dag, NODE_CF, s - 1, m) : 0;
    if (m > 0) start = fmax(start, end_of(dag, NODE_F, s, m - 1));
    return m >= p->warmup[s] ? fmax(start, end_of(dag, NODE_B, s, m - p->warmup[s])) : start;
}

static double start_of_backward(struct dag *dag, int s, int m)
{
    const struct pipeline *p = dag->p;
    const int ahead = m + p->warmup[s] - 1 < p->microbatches ? m + p->warmup[s] - 1 : p->microbatches - 1;
    const int slots = p->costs.transfer_slots;
    double start = end_of(dag, NODE_F, s, ahead);
    if (s < p->stages - 1) start = fmax(start, end_of(dag, NODE_CB, s, m));
    if (s > 0 && slots > 0 && m >= slots) start = fmax(start, end_of(dag, NODE_CB, s - 1, m - slots));
    return m > 0 ? fmax(start, end_of(dag, NODE_B, s, m - 1)) : start;
}

/* The transfer over the boundary behind stage s: its tensor is made, the transfer before is over, and the receiver has
 * a free slot. */
static double start_of_transfer(struct dag *dag, enum node kind, int s, int m)
{
    const int slots = dag->p->costs.transfer_slots;
    double start = kind == NODE_CF ? end_of(dag, NODE_F, s, m) : end_of(dag, NODE_B, s + 1, m);
    if (m > 0) start = fmax(start, end_of(dag, kind, s, m - 1));
    if (slots == 0 || m < slots) return start;
    return fmax(start, kind == NODE_CF ? end_of(dag, NODE_F, s + 1, m - slots) : end_of(dag, NODE_B, s, m - slots));
}

static double end_of(struct dag *dag, enum node kind, int s, int m)
{
    const struct pipeline *p = dag->p;
    double *end = &dag->end[kind][s][m];
    if (*end >= 0) return *end;
    if (kind == NODE_F) return *end = start_of_forward(dag, s, m) + p->forward_s[s];
    if (kind == NODE_B) return *end = start_of_backward(dag, s, m) + p->backward_s[s];
    return *end = start_of_transfer(dag, kind, s, m) + p->comm_s[s];
}

static double longest_path(struct dag *dag)
{
    const struct pipeline *p = dag->p;
    double done[MOST_STAGES], total = 0;
    for (int kind = 0; kind < 4; kind++)
        for (int s = 0; s < p->stages; s++)
            for (int m = 0; m < p->microbatches; m++) dag->end[kind][s][m] = -1;
    for (int s = 0; s < p->stages; s++) done[s] = end_of(dag, NODE_B, s, p->microbatches - 1);
    const int last = p->stages - 1;
    if (p->tied && last > 0) done[0] = done[last] = fmax(done[0], done[last]) + p->exchange_s;
    for (int s = 0; s < p->stages; s++) total = fmax(total, done[s] + p->step_s[s]);
    return total;
}

/* Every forward and backward ends at the DAG's time. Never are more microbatches in flight than launched. */
static bool times_agree(const struct pipeline *p, const struct dag *dag, const struct hapt_simulation *simulation)
{
    bool good = true;
    for (int s = 0; s < p->stages; s++) {
        const struct hapt_instruction_list *list = &p->schedule->list[s];
        int forwards = 0, backwards = 0;
        double before_s = 0;
        for (int i = 0; i < list->count; i++) {
            const struct hapt_instruction *at = &list->instruction[i];
            const struct hapt_simulated_instruction time = simulation->time[s][i];
            good &= time.start_s >= before_s && time.end_s >= time.start_s;
            before_s = time.end_s;
            if (at->kind != HAPT_INSTRUCTION_FORWARD && at->kind != HAPT_INSTRUCTION_BACKWARD) continue;
            const bool ahead = at->kind == HAPT_INSTRUCTION_FORWARD;
            const double expected = dag->end[ahead ? NODE_F : NODE_B][s][at->microbatch];
            good &= fabs(time.end_s - expected) <= 1e-9 * (1 + expected);
            if (ahead)
                good &= at->microbatch == forwards++ && forwards - backwards <= p->warmup[s];
            else
                good &= at->microbatch == backwards++ && at->microbatch < forwards;
        }
        good &= forwards == p->microbatches && backwards == p->microbatches;
        good &= simulation->peak_slots[s] <= p->warmup[s] && list->slots <= p->warmup[s];
    }
    return good;
}

/* The least T of (*) with unlimited launch counts, and N_0 of those. A limit at B only removes waits. 0 for GPipe. */
static double proven_pace(const struct pipeline *p, int *launches)
{
    double pace_s = p->t_max_s;
    *launches = 1;
    for (int i = p->stages - 2; i >= 0; i--) {
        const int more = hapt_schedule_delta(p->kind, p->comm_s[i], p->t_max_s, EPSILON);
        if (more == 0) return 0;
        pace_s = fmax(pace_s, fmax(p->comm_s[i], (compute_s(p, i) + 2 * p->comm_s[i]) / more));
        *launches += more;
    }
    return pace_s;
}

static void bounds_hold(const struct pipeline *p, double total_s, uint64_t name)
{
    const int B = p->microbatches;
    const double rounding = 1 + 1e-9;
    double step_s = 0, through_s = 0, busiest_s = 0;
    int launches;
    for (int i = 0; i < p->stages; i++) {
        step_s = fmax(step_s, p->step_s[i]);
        through_s += compute_s(p, i) + 2 * p->comm_s[i];
        busiest_s = fmax(busiest_s, fmax(compute_s(p, i), p->comm_s[i]) * B);
    }
    CHECK_MESSAGE(total_s * rounding >= through_s && total_s * rounding >= busiest_s,
                  "seed %llu: %g is less than any schedule needs", (unsigned long long)name, total_s);
    const double pace_s = proven_pace(p, &launches);
    if (pace_s == 0 || p->costs.transfer_slots == 1) return;
    const double most_s = (B - 1 + launches) * pace_s + step_s + (p->tied ? p->exchange_s : 0);
    CHECK_MESSAGE(total_s <= most_s * rounding, "seed %llu: %s, %d slots takes %.12g, more than %.12g",
                  (unsigned long long)name, hapt_schedule_kind_name(p->kind), p->costs.transfer_slots, total_s, most_s);
}

/* The consequence of (*) for the planner: with c <= t_max, H-1F1B's T is within epsilon of t_max. Eager 1F1B's T is
 * t_max for c up to half of that. */
static void pace_is_hidden(const struct pipeline *p, uint64_t name)
{
    int launches;
    double most_c = 0;
    for (int i = 0; i < p->stages; i++) most_c = fmax(most_c, p->comm_s[i] / p->t_max_s);
    const double pace = proven_pace(p, &launches) / p->t_max_s;
    if (p->kind == HAPT_SCHEDULE_H1F1B && most_c <= 1)
        CHECK_MESSAGE(pace <= (1 + 2 * EPSILON) * (1 + 1e-12), "seed %llu: H-1F1B's T %.12g", (unsigned long long)name,
                      pace);
    if (p->kind == HAPT_SCHEDULE_EAGER && most_c <= 0.5)
        CHECK_MESSAGE(pace <= 1 + 1e-12, "seed %llu: eager 1F1B's T %.12g", (unsigned long long)name, pace);
}

static void one_pipeline(uint64_t name, struct hapt_arena *arena)
{
    static struct dag dag;
    uint64_t seed = name;
    struct pipeline p = {.kind = (enum hapt_schedule_kind)below(&seed, 4),
                         .stages = 1 + below(&seed, MOST_STAGES),
                         .microbatches = 1 + below(&seed, MOST_MICROBATCHES),
                         .tied = below(&seed, 2)};
    random_stages(&p, &seed);
    random_links(&p, &seed, below(&seed, 3) == 0 ? 2.5 : below(&seed, 2) ? 1 : 0.5);
    p.exchange_s = hapt_random_unit(&seed);
    for (int i = 0; i < p.stages; i++) p.step_s[i] = below(&seed, 2) ? hapt_random_unit(&seed) : 0;
    build(&p, below(&seed, 5), arena);
    CHECK_OK(hapt_schedule_check(p.schedule));
    struct hapt_simulation *simulation = NULL;
    const enum hapt_status status = hapt_simulate(p.schedule, &p.costs, arena, &simulation);
    if (!CHECK_MESSAGE(status == HAPT_OK, "seed %llu: %s", (unsigned long long)name, hapt_fail_message())) {
        hapt_fail_reset();
        return;
    }
    dag.p = &p;
    const double expected = longest_path(&dag);
    CHECK_MESSAGE(fabs(simulation->total_s - expected) <= 1e-9 * expected, "seed %llu: simulated %.12g, DAG %.12g",
                  (unsigned long long)name, simulation->total_s, expected);
    CHECK_MESSAGE(times_agree(&p, &dag, simulation), "seed %llu: times, order or launch counts differ",
                  (unsigned long long)name);
    bounds_hold(&p, simulation->total_s, name);
    pace_is_hidden(&p, name);
}

static void random_pipelines(void)
{
    const uint64_t count = test_long() ? 1000000 : 40000;
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    for (uint64_t name = 1; name <= count; name++) {
        one_pipeline(name, &arena);
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
}

/* The time of a step, and the steady period, which must be that of any step with these launch counts. */
static double simulated(struct pipeline *p, int slots, bool blocking, double *period_s)
{
    struct hapt_arena arena;
    struct hapt_simulation *simulation;
    double total_s = NAN;
    hapt_arena_init(&arena);
    build(p, slots, &arena);
    p->costs.blocking = blocking;
    if (hapt_simulate(p->schedule, &p->costs, &arena, &simulation) == HAPT_OK) {
        total_s = simulation->total_s;
        if (period_s) {
            double steady_s = NAN;
            struct hapt_schedule *shorter;
            *period_s = simulation->period_s;
            CHECK_OK(hapt_schedule_build(p->kind, p->stages, p->warmup[0], p->warmup, NULL, &arena, &shorter));
            CHECK_OK(hapt_simulate_period(shorter, &p->costs, &arena, &steady_s));
            CHECK_NEAR(steady_s, *period_s, 2 * EPSILON * *period_s);
        }
    }
    hapt_arena_release(&arena);
    return total_s;
}

/* More slots, faster stages and more overlap never increase the time, because edges of the DAG only become fewer or
 * shorter. */
static void more_is_never_slower(void)
{
    const uint64_t count = test_long() ? 50000 : 5000;
    for (uint64_t name = 1; name <= count; name++) {
        uint64_t seed = name;
        struct pipeline p = {.kind = (enum hapt_schedule_kind)below(&seed, 4),
                             .stages = 1 + below(&seed, MOST_STAGES),
                             .microbatches = 1 + below(&seed, MOST_MICROBATCHES)};
        random_stages(&p, &seed);
        random_links(&p, &seed, 2);
        double before_s = simulated(&p, 1, false, NULL);
        for (int slots = 2; slots <= 4; slots++) {
            const double total_s = simulated(&p, slots, false, NULL);
            CHECK_MESSAGE(total_s <= before_s * (1 + 1e-12), "seed %llu: %d slots are slower", (unsigned long long)name,
                          slots);
            before_s = total_s;
        }
        const double free_s = simulated(&p, 0, false, NULL);
        CHECK_MESSAGE(free_s <= before_s * (1 + 1e-12), "seed %llu: unlimited slots are slower",
                      (unsigned long long)name);
        CHECK_MESSAGE(simulated(&p, 0, true, NULL) >= free_s * (1 - 1e-12), "seed %llu: blocking is faster",
                      (unsigned long long)name);
        const int stage = below(&seed, p.stages);
        p.forward_s[stage] *= hapt_random_unit(&seed); /* t_max and thus the launch counts stay */
        CHECK_MESSAGE(simulated(&p, 0, false, NULL) <= free_s * (1 + 1e-12),
                      "seed %llu: a faster stage %d slows the step", (unsigned long long)name, stage);
    }
}

/* Communication counts as hidden if the steady period is t_max. On long steps, balanced or not, the period under H-1F1B
 * is at most t_max (1 + 2 epsilon) for c <= t_max. Under eager 1F1B it is t_max for c <= t_max / 2. With slower links
 * both have at best max(t_max, c). */
static void steady_periods(void)
{
    const uint64_t count = test_long() ? 20000 : 1000;
    for (uint64_t name = 1; name <= count; name++) {
        uint64_t seed = name;
        static const int slots[] = {0, 2, 3};
        struct pipeline p = {.kind = below(&seed, 2) ? HAPT_SCHEDULE_H1F1B : HAPT_SCHEDULE_EAGER,
                             .stages = 1 + below(&seed, 8)};
        const bool eager = p.kind == HAPT_SCHEDULE_EAGER, slow = below(&seed, 3) == 0;
        int launches;
        double period_s, most_c = 0;
        random_stages(&p, &seed);
        random_links(&p, &seed, slow ? 2.5 : eager ? 0.5 : 1);
        const double pace_s = proven_pace(&p, &launches);
        for (int i = 0; i < p.stages; i++) most_c = fmax(most_c, p.comm_s[i]);
        p.microbatches = 48 * launches;
        simulated(&p, slots[below(&seed, 3)], false, &period_s);
        const double most_s = slow ? pace_s : p.t_max_s * (eager ? 1 : 1 + 2 * EPSILON);
        CHECK_MESSAGE(period_s <= most_s * (1 + 1e-9), "seed %llu: %s, %d stages: period %.12g, more than %.12g",
                      (unsigned long long)name, hapt_schedule_kind_name(p.kind), p.stages, period_s, most_s);
        /* if a link is slower than the stages, H-1F1B has exactly the link's period */
        if (!eager && most_c >= p.t_max_s)
            CHECK_MESSAGE(fabs(period_s - most_c) <= 2 * EPSILON * p.t_max_s + 1e-9,
                          "seed %llu: period %.12g over a link of %.12g", (unsigned long long)name, period_s, most_c);
    }
}

/* With one slot the next transfer waits until the receiver has computed with the last one, so c and f (or b) add up.
 * Two slots are enough. */
static void one_slot_does_not_hide(void)
{
    struct pipeline p = {.kind = HAPT_SCHEDULE_H1F1B,
                         .stages = 2,
                         .microbatches = 256,
                         .forward_s = {0.3, 0.3},
                         .backward_s = {0.7, 0.7},
                         .comm_s = {0.9},
                         .t_max_s = 1};
    double one_s, two_s;
    simulated(&p, 1, false, &one_s);
    simulated(&p, 2, false, &two_s);
    CHECK_NEAR(one_s, 1.6, 1e-9);
    CHECK_NEAR(two_s, 1, 1e-9);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(random_pipelines);
    RUN(more_is_never_slower);
    RUN(steady_periods);
    RUN(one_slot_does_not_hide);
    return test_finish();
}
