/* The step of a chain, compared bit for bit with the simulation of its instruction lists. HAPT_LONG=1: more cases. */
#include "test.h"

#include "hapt/simulate.h"

enum { MOST_CHUNKS = 12 };

static int early; /* steps that ended early */

/* Zero, short or long, so that computing, transfers and slots all decide. */
static double random_s(uint64_t *random)
{
    const double scale[] = {0, 1, 1, 3, 10};
    return scale[hapt_random_next(random) % 5] * (double)(1 + hapt_random_next(random) % 1000) / 999.0;
}

/* A step that is longer than `most_s` may end early, others keep their bits. */
static void check_early_end(const struct hapt_chain *chain, const struct hapt_costs *costs, double step_s,
                            double most_s)
{
    struct hapt_simulate_work work = {0};
    double early_s = -1;
    CHECK_OK(hapt_simulate_chain(chain, costs, most_s, &work, &early_s));
    if (step_s <= most_s || costs->steps > 1)
        CHECK(early_s == step_s);
    else
        CHECK_MESSAGE(early_s > most_s && early_s <= step_s, "%.17g, not in (%.17g, %.17g]", early_s, most_s, step_s);
    early += early_s < step_s;
    hapt_simulate_work_release(&work);
}

static void chains_have_the_bits_of_lists(void)
{
    const int cases = test_long() ? 200000 : 10000;
    struct hapt_simulate_work chain_work = {0}, list_work = {0};
    struct hapt_arena arena;
    uint64_t random = 3;
    hapt_arena_init(&arena);
    for (int c = 0; c < cases; c++) {
        const int S = 1 + (int)(hapt_random_next(&random) % MOST_CHUNKS), B = 1 + (int)(hapt_random_next(&random) % 40);
        const enum hapt_schedule_kind kind = (enum hapt_schedule_kind)(hapt_random_next(&random) % 4);
        double forward_s[MOST_CHUNKS], backward_s[MOST_CHUNKS], comm_s[MOST_CHUNKS], step_s[MOST_CHUNKS];
        int launches[MOST_CHUNKS];
        for (int i = S - 1; i >= 0; i--) {
            const int more = 1 + (int)(hapt_random_next(&random) % 4),
                      rise = i == S - 1 ? 1 : launches[i + 1] + more - 1;
            forward_s[i] = random_s(&random);
            backward_s[i] = random_s(&random);
            comm_s[i] = i == S - 1 ? 0 : random_s(&random);
            step_s[i] = random_s(&random);
            launches[i] = kind == HAPT_SCHEDULE_GPIPE || rise > B ? B : rise;
        }
        double deferred_s[MOST_CHUNKS], work_s[MOST_CHUNKS];
        for (int i = 0; i < S; i++) {
            deferred_s[i] = hapt_random_next(&random) % 3 ? step_s[i] * hapt_random_unit(&random) : 0;
            work_s[i] = deferred_s[i] * hapt_random_unit(&random);
        }
        const bool tied = hapt_random_next(&random) % 2;
        const bool agrees = hapt_random_next(&random) % 3 == 0, steady = agrees && hapt_random_next(&random) % 2;
        struct hapt_costs costs = {.forward_s = forward_s,
                                   .backward_s = backward_s,
                                   .comm_s = comm_s,
                                   .step_s = hapt_random_next(&random) % 4 ? step_s : NULL,
                                   .exchange_s = random_s(&random),
                                   .transfer_slots = (int)(hapt_random_next(&random) % 4),
                                   .agrees = agrees,
                                   .steady = steady,
                                   .steps = agrees && !steady ? 1 + (int)(hapt_random_next(&random) % 3) : 1};
        if (agrees && costs.step_s && hapt_random_next(&random) % 2) {
            costs.deferred_s = deferred_s;
            costs.deferred_work_s = work_s;
        }
        const struct hapt_chain chain = {S, B, launches, tied};
        const struct hapt_schedule_options options = {.tied = tied};
        struct hapt_schedule *schedule = NULL;
        double by_chain_s = -1, by_lists_s = -2;
        hapt_arena_reset(&arena);
        CHECK_OK(hapt_schedule_build(kind, S, B, launches, &options, &arena, &schedule));
        if (!schedule) break;
        CHECK_OK(hapt_simulate_step(schedule, &costs, &list_work, &by_lists_s));
        CHECK_OK(hapt_simulate_chain(&chain, &costs, INFINITY, &chain_work, &by_chain_s));
        CHECK_MESSAGE(memcmp(&by_chain_s, &by_lists_s, sizeof by_chain_s) == 0,
                      "case %d: %s, %d chunks, %d microbatches: %.17g by the chain, %.17g by the lists", c,
                      hapt_schedule_kind_name(kind), S, B, by_chain_s, by_lists_s);
        check_early_end(&chain, &costs, by_chain_s, 1.2 * by_chain_s * hapt_random_unit(&random));
        if (!steady) continue;
        costs.steady = false;
        costs.steps = HAPT_SIMULATE_STEPS;
        CHECK_OK(hapt_simulate_step(schedule, &costs, &list_work, &by_lists_s));
        CHECK_NEAR(by_chain_s, by_lists_s, 1e-9 * (1 + by_lists_s)); /* the last of three steps */
    }
    CHECK(early > cases / 10);
    hapt_simulate_work_release(&chain_work);
    hapt_simulate_work_release(&list_work);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(chains_have_the_bits_of_lists);
    return test_finish();
}
