/* The family of schedules by golden numbers: Pfeife's Fig. 2, bubbles of the presets, frozen chunks, split backward
 * passes, several steps, and the critical path. Random lists: schedule_chunks.c. */
#include "hapt/simulate.h"
#include "test.h"

enum { MOST_CHUNKS = 16 };

/* Equal devices: a microbatch takes 1 forward and 2 backward on each, whatever the loops. */
struct even {
    int chunks, submesh_of[MOST_CHUNKS];
    double forward_s[MOST_CHUNKS], backward_s[MOST_CHUNKS], weight_s[MOST_CHUNKS], comm_s[MOST_CHUNKS];
    struct hapt_costs costs;
    struct hapt_schedule_options options;
};

static void make(struct even *even, int devices, int loops)
{
    *even = (struct even){.chunks = devices * loops};
    for (int c = 0; c < even->chunks; c++) {
        even->submesh_of[c] = c % devices;
        even->forward_s[c] = 1.0 / loops;
        even->backward_s[c] = 2.0 / loops;
    }
    even->costs = (struct hapt_costs){.forward_s = even->forward_s,
                                      .backward_s = even->backward_s,
                                      .weight_s = even->weight_s,
                                      .comm_s = even->comm_s,
                                      .transfer_slots = HAPT_TRANSFER_SLOTS};
    even->options = (struct hapt_schedule_options){.submesh_of = even->submesh_of, .costs = &even->costs};
}

static double total_s(const struct even *even, enum hapt_schedule_kind kind, int B, int *slots)
{
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    struct hapt_simulation *simulation;
    int warmup[MOST_CHUNKS];
    hapt_arena_init(&arena);
    const double t_max_s = even->forward_s[0] + even->backward_s[0] + even->weight_s[0];
    hapt_schedule_warmup(kind, even->chunks, B, even->comm_s, t_max_s, 0.02, warmup);
    CHECK_OK(hapt_schedule_build(kind, even->chunks, B, warmup, &even->options, &arena, &schedule));
    CHECK_OK(hapt_schedule_check(schedule));
    CHECK_OK(hapt_simulate(schedule, &even->costs, &arena, &simulation));
    const double time_s = simulation->total_s;
    for (int s = 0; slots && s < schedule->submesh_count; s++) slots[s] = schedule->list[s].slots;
    hapt_arena_release(&arena);
    return time_s;
}

/* Pfeife Fig. 2 and 3.3: v1 and v2 take 15 and 10, backward twice that, a transfer 1. v2 of microbatch 2 starts at 31.
 */
static void figure_2_of_pfeife(void)
{
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    struct hapt_simulation *simulation;
    const double forward_s[] = {15, 10}, backward_s[] = {30, 20}, comm_s[] = {1, 0};
    const struct hapt_costs costs = {.forward_s = forward_s, .backward_s = backward_s, .comm_s = comm_s};
    hapt_arena_init(&arena);
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_GPIPE, 2, 2, (const int[]){2, 2}, NULL, &arena, &schedule));
    CHECK_OK(hapt_simulate(schedule, &costs, &arena, &simulation));
    int seen = 0;
    for (int i = 0; i < schedule->list[1].count; i++) {
        const struct hapt_instruction *at = &schedule->list[1].instruction[i];
        if (at->kind != HAPT_INSTRUCTION_FORWARD || at->microbatch != 1) continue;
        CHECK_NEAR(simulation->time[1][i].start_s, 31, 0);
        seen++;
    }
    CHECK(seen == 1);
    hapt_arena_release(&arena);
}

/* Without transfers the bubble of D devices with L loops is (D - 1)(forward + backward) / L. */
static void bubbles(void)
{
    struct even even;
    for (int devices = 2; devices <= 4; devices++)
        for (int loops = 1; loops <= 4; loops++)
            for (int groups = 1; groups <= 3; groups++) {
                make(&even, devices, loops);
                even.costs.transfer_slots = 0; /* few slots add to the bubble of breadth-first loops */
                const int B = groups * devices;
                const double bubble_s = (devices - 1) * 3.0 / loops;
                CHECK_NEAR(total_s(&even, HAPT_SCHEDULE_INTERLEAVED, B, NULL) - 3 * B, bubble_s, 1e-9);
                CHECK_NEAR(total_s(&even, HAPT_SCHEDULE_BREADTH_FIRST, B, NULL) - 3 * B, bubble_s, 1e-9);
                for (int kind = 0; loops == 1 && kind <= HAPT_SCHEDULE_H1F1B; kind++)
                    CHECK_NEAR(total_s(&even, (enum hapt_schedule_kind)kind, B, NULL) - 3 * B, bubble_s, 1e-9);
            }
    make(&even, 4, 4); /* breadth-first, B_l = 8 */
    CHECK_NEAR(total_s(&even, HAPT_SCHEDULE_BREADTH_FIRST, 8, NULL) - 24, 2.25, 1e-9);
}

/* Pfeife Fig. 3: D = 4, B = 8, B_l = 4, N_l = 2, B_f = (2, 2, 1, 0). The slots are one pool: the first device needs 10,
 * where two rings of its chunks need 12. */
static void figure_3_of_pfeife(void)
{
    static const int ahead[] = {10, 9, 7, 5};
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    struct even even;
    make(&even, 4, 2);
    even.options.loop_batch = 4;
    even.options.prefetch = 2;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_LOOPED, 8, 8, NULL, &even.options, &arena, &schedule));
    CHECK_OK(hapt_schedule_check(schedule));
    for (int s = 0; s < 4; s++) {
        const struct hapt_instruction_list *list = &schedule->list[s];
        int forwards = 0;
        for (int i = 0; list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD; i++)
            forwards += list->instruction[i].kind == HAPT_INSTRUCTION_FORWARD;
        CHECK_MESSAGE(forwards == ahead[s], "device %d starts with %d forwards", s, forwards);
    }
    CHECK(schedule->list[0].slots == 10 && schedule->launches[0] + schedule->launches[4] == 12);
    hapt_arena_release(&arena);
}

/* A V: device d has chunks d and 2 D - 1 - d, and the last device computes both halves of its visit at once. Its lists
 * end for each B_l. Larger groups are faster; 1F1B with two chunks a device is faster still (merge.c). */
static void v_placement(void)
{
    struct even even;
    for (int devices = 2; devices <= 4; devices++) {
        double before_s = INFINITY;
        for (int loop_batch = 1; loop_batch <= 4; loop_batch++) {
            const int B = 12;
            make(&even, devices, 2);
            for (int d = 0; d < devices; d++) even.submesh_of[2 * devices - 1 - d] = d;
            even.options.loop_batch = loop_batch;
            const double time_s = total_s(&even, HAPT_SCHEDULE_LOOPED, B, NULL);
            CHECK_MESSAGE(time_s >= 3 * B && time_s <= before_s + 1e-9, "V of %d devices, B_l = %d: %g s", devices,
                          loop_batch, time_s);
            before_s = time_s;
            if (loop_batch < 4) continue;
            const double played_s = total_s(&even, HAPT_SCHEDULE_1F1B, B, NULL);
            CHECK_MESSAGE(played_s >= 3 * B && played_s <= before_s, "V of %d devices, 1F1B: %g s", devices, played_s);
        }
    }
}

/* A frozen prefix runs ahead with the slots of its launches, and takes no gradients. */
static void frozen_prefix(void)
{
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    struct hapt_simulation *simulation;
    struct even even;
    const bool forward_only[] = {true, false, false};
    make(&even, 3, 1);
    for (int c = 0; c < 2; c++) even.comm_s[c] = 0.5;
    even.options.forward_only = forward_only;
    hapt_arena_init(&arena);
    const int warmup[] = {2, 2, 1}, B = 8;
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 3, B, warmup, &even.options, &arena, &schedule));
    CHECK_OK(hapt_schedule_check(schedule));
    CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
    CHECK(schedule->list[0].slots == 2 && schedule->list[0].count == 2 * B + 1); /* forward, send; NORM */
    CHECK(simulation->peak_slots[0] == 2);
    CHECK(schedule->list[1].instruction[schedule->list[1].count - 1].kind == HAPT_INSTRUCTION_UPDATE);
    /* The first four are paced by the chunk itself: then the transfer slots of the slower receiver. */
    int seen = 0;
    for (int i = 0; i < schedule->list[0].count; i++)
        if (schedule->list[0].instruction[i].kind == HAPT_INSTRUCTION_FORWARD && seen++ < 4)
            CHECK_NEAR(simulation->time[0][i].end_s, seen, 1e-12);
    /* Two trained chunks after it: the bubble has one forward and transfer of the prefix more. */
    CHECK(simulation->total_s < 1.5 + 3 * B + 3 + 1 + B * 1.0);
    /* In rings of one, each pass waits for the send before it. */
    const int ring[] = {1, 2, 1};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 3, B, ring, &even.options, &arena, &schedule));
    CHECK_OK(hapt_schedule_check(schedule));
    CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
    CHECK(schedule->list[0].slots == 1);
    for (int i = 0, m = 0; i < schedule->list[0].count; i++)
        if (schedule->list[0].instruction[i].kind == HAPT_INSTRUCTION_FORWARD && m < 3) {
            CHECK_NEAR(simulation->time[0][i].start_s, 1.5 * m, 1e-12);
            m++;
        }
    hapt_arena_release(&arena);
}

/* Eight equal stages, forward : input : weight = 1 : 1 : 1, a slow link in the middle (DESIGN of split backward). Never
 * slower than the schedule that is not split, and more slots never hurt by more than the heuristic's half pass. */
static void split_backward(void)
{
    struct even even;
    static const double link[] = {0.1, 0.55, 1};
    static const int batch[] = {16, 64};
    for (int b = 0; b < 2; b++)
        for (int l = 0; l < 3; l++) {
            int pool[8], slots[8];
            make(&even, 8, 1);
            for (int c = 0; c < 8; c++) even.forward_s[c] = 1.0 / 3, even.backward_s[c] = 2.0 / 3;
            even.comm_s[3] = link[l];
            const double whole_s = total_s(&even, HAPT_SCHEDULE_H1F1B, batch[b], slots);
            for (int c = 0; c < 8; c++) even.backward_s[c] = even.weight_s[c] = 1.0 / 3;
            even.options.split = true;
            const double split_s = total_s(&even, HAPT_SCHEDULE_H1F1B, batch[b], pool);
            for (int s = 0; s < 8; s++) CHECK(pool[s] <= slots[s]);
            for (int s = 0; s < 8; s++) pool[s] = slots[0];
            even.options.pool = pool;
            const double roomy_s = total_s(&even, HAPT_SCHEDULE_H1F1B, batch[b], NULL);
            CHECK_MESSAGE(split_s < 0.99 * whole_s && roomy_s <= split_s + 1e-9,
                          "B = %d, c = %g: whole %g s, split %g s, with more slots %g s", batch[b], link[l], whole_s,
                          split_s, roomy_s);
        }
}

/* Three steps of 1F1B: with an agreement, the long update of the last device overlaps with the fill of the next step.
 * Stage 0 waits for the agreement at 33, the last one is busy from then to 38. Its forward could begin at 33.5 + 3. */
static void several_steps(void)
{
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    struct hapt_simulation *simulation;
    struct even even;
    double step_s[] = {0.5, 0.5, 0.5, 0.5};
    make(&even, 4, 1);
    even.costs.step_s = step_s;
    hapt_arena_init(&arena);
    const int warmup[] = {4, 3, 2, 1}, B = 8;
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 4, B, warmup, NULL, &arena, &schedule));
    CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
    CHECK_NEAR(simulation->total_s, 33.5, 1e-12);
    CHECK_NEAR(simulation->step_s, simulation->total_s, 0);
    for (int agrees = 0; agrees < 2; agrees++)
        for (int steps = 1; steps <= HAPT_SIMULATE_STEPS; steps++) {
            step_s[3] = 5;
            even.costs.steps = steps;
            even.costs.agrees = agrees;
            CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
            CHECK_NEAR(simulation->total_s, agrees ? 38 : 33.5, 1e-9);
            CHECK_NEAR(simulation->step_s, agrees && steps == 1 ? 38 : agrees ? 35 : 33.5, 1e-9);
            CHECK_NEAR(simulation->busy_s[0], 3 * B + 0.5, 1e-9);
        }
    even.costs.steps = 1;
    even.costs.steady = true;
    CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
    CHECK_NEAR(simulation->step_s, 35, 1e-9);
    CHECK_NEAR(simulation->total_s, 40, 1e-9);
    hapt_arena_release(&arena);
}

/* One stage, two microbatches of 1 + 2 s, an update of 4 s, all deferred, a quarter of it computation. The first
 * forward pass computes from 0 and ends a sixteenth of a pass behind the update, since 4 > 1 + 1. In front of a stage
 * with such an update another computes for 10 s, so that its update ends before its first pass begins. */
static void deferred_updates(void)
{
    struct hapt_arena arena;
    struct hapt_schedule *schedule;
    double step_s, step[] = {4, 4}, deferred[] = {4, 4}, work[] = {1, 1}, forward[] = {1, 1}, backward[] = {2, 2},
                   comm[] = {0, 0};
    struct hapt_costs costs = {.forward_s = forward,
                               .backward_s = backward,
                               .comm_s = comm,
                               .step_s = step,
                               .deferred_s = deferred,
                               .deferred_work_s = work,
                               .agrees = true,
                               .steady = true};
    struct hapt_simulate_work room = {0};
    const int launches[] = {1, 1}, two[] = {2, 1};
    hapt_arena_init(&arena);
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 1, 2, launches, NULL, &arena, &schedule));
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    CHECK_NEAR(step_s, 4 + 1.0 / 16 + 2 + 1 + 2, 1e-12);
    work[0] = 3.5; /* now computing decides: 1 + 3.5 > 4 + 1 / 16 */
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    CHECK_NEAR(step_s, 1 + 3.5 + 2 + 1 + 2, 1e-12);
    deferred[0] = 1; /* 3 s at once, then 1 s, of which 0.5 s compute */
    work[0] = 0.5;
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    CHECK_NEAR(step_s, 3 + 1.5 + 2 + 1 + 2, 1e-12);
    costs.steady = false;
    costs.steps = 3;
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    CHECK_NEAR(step_s, 3 + 1.5 + 2 + 1 + 2, 1e-12);
    costs.steps = 1;
    costs.steady = true;
    forward[0] = 10;
    deferred[0] = step[0] = 0;
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 2, 2, two, NULL, &arena, &schedule));
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    const double hidden_s = step_s;
    costs.step_s = costs.deferred_s = costs.deferred_work_s = NULL;
    CHECK_OK(hapt_simulate_step(schedule, &costs, &room, &step_s));
    CHECK_NEAR(step_s, hidden_s, 1e-12);
    hapt_simulate_work_release(&room);
    hapt_arena_release(&arena);
}

/* The parts of the critical path follow each other without gaps from 0 to the end, and shortening one of its
 * computations shortens the step, if no other path is as long. */
static void critical_paths(void)
{
    struct hapt_arena arena;
    int shortened = 0, tried = 0;
    hapt_arena_init(&arena);
    for (uint64_t name = 1; name <= 300; name++) {
        uint64_t seed = name;
        struct even even;
        struct hapt_schedule *schedule;
        struct hapt_simulation *simulation, *other;
        struct hapt_critical_path path;
        const int devices = 1 + (int)(hapt_random_next(&seed) % 4), loops = 1 + (int)(hapt_random_next(&seed) % 3);
        const int B = devices * (1 + (int)(hapt_random_next(&seed) % 4));
        make(&even, devices, loops);
        for (int c = 0; c < even.chunks; c++) {
            even.forward_s[c] = hapt_random_unit(&seed);
            even.backward_s[c] = hapt_random_unit(&seed);
            even.weight_s[c] = hapt_random_unit(&seed);
            even.comm_s[c] = c < even.chunks - 1 ? hapt_random_unit(&seed) : 0;
        }
        even.options.split = hapt_random_next(&seed) % 2;
        even.options.tied = hapt_random_next(&seed) % 2;
        even.costs.exchange_s = hapt_random_unit(&seed);
        even.costs.blocking = hapt_random_next(&seed) % 4 == 0;
        const bool steady = hapt_random_next(&seed) % 3 == 0;
        double step_s[MOST_CHUNKS];
        for (int c = 0; c < even.chunks; c++) step_s[c] = 3 * hapt_random_unit(&seed);
        even.costs.steady = even.costs.agrees = steady;
        even.costs.step_s = steady ? step_s : NULL;
        double deferred_s[MOST_CHUNKS], work_s[MOST_CHUNKS];
        for (int c = 0; c < even.chunks; c++) {
            deferred_s[c] = 0.9 * step_s[c] * hapt_random_unit(&seed);
            work_s[c] = deferred_s[c] * hapt_random_unit(&seed);
        }
        if (steady && loops == 1 && hapt_random_next(&seed) % 2) {
            even.costs.deferred_s = deferred_s;
            even.costs.deferred_work_s = work_s;
        }
        CHECK_OK(
            hapt_schedule_build(HAPT_SCHEDULE_INTERLEAVED, even.chunks, B, NULL, &even.options, &arena, &schedule));
        CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &simulation));
        CHECK_OK(hapt_simulate_critical_path(schedule, &even.costs, simulation, &arena, &path));
        double at_s = 0;
        for (int k = 0; k < path.count; k++) {
            CHECK(path.part[k].start_s == at_s && path.part[k].end_s > at_s);
            at_s = path.part[k].end_s;
            if (path.part[k].submesh < 0) continue;
            /* without blocking, receiving and agreeing take no time; a steady step begins with an update */
            const enum hapt_instruction_kind kind =
                schedule->list[path.part[k].submesh].instruction[path.part[k].instruction].kind;
            CHECK(even.costs.blocking || kind == HAPT_INSTRUCTION_FORWARD || kind == HAPT_INSTRUCTION_BACKWARD ||
                  kind == HAPT_INSTRUCTION_WEIGHT || kind == HAPT_INSTRUCTION_EXCHANGE ||
                  kind == HAPT_INSTRUCTION_UPDATE);
            CHECK(!steady || k > 0 || kind == HAPT_INSTRUCTION_UPDATE);
        }
        const double end_s = steady ? simulation->step_s : simulation->total_s;
        CHECK_MESSAGE(path.count > 0 && fabs(at_s - end_s) <= (steady ? 1e-12 * end_s : 0),
                      "seed %llu: the path ends at %g of %g s", (unsigned long long)name, at_s, end_s);
        const struct hapt_critical_part *part = &path.part[hapt_random_next(&seed) % (uint64_t)path.count];
        if (part->submesh >= 0) {
            const struct hapt_instruction *is = &schedule->list[part->submesh].instruction[part->instruction];
            double *cost_s = is->kind == HAPT_INSTRUCTION_FORWARD    ? &even.forward_s[is->chunk]
                             : is->kind == HAPT_INSTRUCTION_BACKWARD ? &even.backward_s[is->chunk]
                             : is->kind == HAPT_INSTRUCTION_WEIGHT   ? &even.weight_s[is->chunk]
                                                                     : NULL;
            if (cost_s && *cost_s > 1e-3) {
                *cost_s -= 1e-7;
                CHECK_OK(hapt_simulate(schedule, &even.costs, &arena, &other));
                tried++;
                shortened += other->step_s < simulation->step_s - 0.5e-7;
            }
        }
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    CHECK_MESSAGE(tried > 100 && shortened == tried, "%d of %d shortened computations shorten the step", shortened,
                  tried);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(figure_2_of_pfeife);
    RUN(bubbles);
    RUN(figure_3_of_pfeife);
    RUN(v_placement);
    RUN(frozen_prefix);
    RUN(split_backward);
    RUN(several_steps);
    RUN(deferred_updates);
    RUN(critical_paths);
    return test_finish();
}
