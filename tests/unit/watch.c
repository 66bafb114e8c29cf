/* Ranks and links that are slower than planned: which are reported and which are not, for invented samples of steps. */
#include "test.h"

#include "../../src/train/watch_slow.h"

enum { STAGES = 2, SIZE = 2, RANKS = STAGES * SIZE, MICROBATCHES = 4 };
#define COMPUTE_S 0.05
#define COMM_S 0.04

/* Two stages of two ranks each. */
struct run {
    struct hapt_env env;
    struct hapt_plan_stage part[STAGES];
    struct hapt_plan plan;
    struct hapt_plan_submesh submesh[STAGES];
    int rank[STAGES][SIZE], *ranks[STAGES];
    struct worker worker;
    int index[STAGES];
    struct hapt_arena arena;
    struct watch_slow *slow;
    struct hapt_train_result result;
    struct watch_sample sample[RANKS];
    int64_t step;
};

static void begin(struct run *run)
{
    *run = (struct run){.env = {.world_size = RANKS, .world_rank = 1}}; /* warnings are printed by rank 0 */
    for (int c = 0; c < STAGES; c++) {
        run->submesh[c] = (struct hapt_plan_submesh){.nodes = 1, .devices_per_node = SIZE, .part_count = 1};
        run->part[c] = (struct hapt_plan_stage){.submesh = &run->submesh[c], .compute_s = COMPUTE_S};
        snprintf(run->part[c].submesh->name, sizeof run->part[c].submesh->name, c == 0 ? "fast" : "slow");
        for (int r = 0; r < SIZE; r++) run->rank[c][r] = c * SIZE + r;
        run->ranks[c] = run->rank[c];
    }
    run->part[0].comm_s = COMM_S;
    run->plan = (struct hapt_plan){.microbatches = MICROBATCHES,
                                   .stage_count = STAGES,
                                   .t_max_s = COMPUTE_S,
                                   .latency_s = (MICROBATCHES + STAGES - 1) * COMPUTE_S,
                                   .simulated_s = NAN,
                                   .hide_threshold = 0.02,
                                   .stage = run->part};
    run->worker =
        (struct worker){.env = &run->env, .plan = &run->plan, .ranks = run->ranks, .index = run->index, .most = 1};
    hapt_arena_init(&run->arena);
    CHECK_OK(watch_slow_create(&run->worker, 0.2, &run->arena, &run->slow));
}

static void end(struct run *run)
{
    hapt_arena_release(&run->arena);
}

/* One step of `step_s`. Parameters: the time of a message forward and backward at every sender, how many times its CPU
 * time a rank takes while it waits for cores, and how many times the planned time the last rank computes. */
static void step_of(struct run *run, double step_s, double forward_s, double backward_s, double crowd, double last)
{
    for (int r = 0; r < RANKS; r++) {
        const double cpu_s = MICROBATCHES * COMPUTE_S * (r == RANKS - 1 ? last : 1);
        const bool first = r < SIZE;
        run->sample[r] =
            (struct watch_sample){.effort = {.busy_s = cpu_s * crowd, .device_s = cpu_s, .wall_s = cpu_s * crowd}};
        run->sample[r].link[STAGE_LINK_FORWARD_OUT] = (struct stage_link_time){first ? forward_s : 0, first};
        run->sample[r].link[STAGE_LINK_FORWARD_IN] = (struct stage_link_time){0, !first};
        run->sample[r].link[STAGE_LINK_BACKWARD_OUT] = (struct stage_link_time){first ? 0 : backward_s, !first};
        run->sample[r].link[STAGE_LINK_BACKWARD_IN] = (struct stage_link_time){0, first};
    }
    CHECK_OK(watch_slow_step(run->slow, run->step++, step_s, run->sample, &run->result));
}

static void step(struct run *run, double forward_s, double backward_s, double crowd)
{
    step_of(run, crowd * run->plan.latency_s, forward_s, backward_s, crowd, 1);
}

/* Measured counts over a link of constant speed: single steps differ by more than half, the median by little. */
static double noisy(uint64_t *random)
{
    const double u = hapt_random_unit(random);
    return COMM_S * (u < 0.1 ? 1.6 : u < 0.3 ? 1.25 : 0.7 + 0.4 * hapt_random_unit(random));
}

static void constant(void)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t random = seed;
        struct run run;
        begin(&run);
        const double crowd = 1 + 6 * hapt_random_unit(&random);
        for (int s = 0; s < 300; s++) step(&run, noisy(&random), noisy(&random), crowd);
        CHECK_MESSAGE(run.result.warning_count == 0, "seed %ld: %s", (long)seed, run.result.warning[0].text);
        end(&run);
    }
}

/* From some step on the rate is a tenth, in one direction or both. It is reported once within 20 steps, on quiet and on
 * crowded machines. */
static void dropped(void)
{
    for (uint64_t seed = 1; seed <= 200; seed++) {
        uint64_t random = seed;
        struct run run;
        begin(&run);
        const double crowd = 1 + 6 * hapt_random_unit(&random);
        const int from = (int)(hapt_random_next(&random) % 40), both = (int)(seed % 2);
        for (int s = 0; s < from + 60; s++) {
            const double factor = s < from ? 1 : 10;
            step(&run, factor * noisy(&random), both ? factor * noisy(&random) : noisy(&random), crowd);
        }
        CHECK_MESSAGE(run.result.warning_count == 1 + both, "seed %ld: %d warnings", (long)seed,
                      run.result.warning_count);
        for (int w = 0; w < run.result.warning_count; w++) {
            const struct hapt_train_warning *warning = &run.result.warning[w];
            CHECK_MESSAGE(warning->step >= from && warning->step < from + 20, "from step %d, named in step %d", from,
                          (int)warning->step);
            CHECK(warning->stage + warning->peer_stage == 1 && warning->planned_s == COMM_S && warning->ratio > 3 &&
                  warning->ratio < 16);
            CHECK_MESSAGE(strstr(warning->text, warning->stage == 0 ? "from stage 0 (subcluster fast"
                                                                    : "from stage 1 (subcluster slow") &&
                              strstr(warning->text, "plan again"),
                          "%s", warning->text);
        }
        end(&run);
    }
}

/* Temporary slowness: seven steps, then normal; and again. */
static void passing(void)
{
    struct run run;
    begin(&run);
    for (int s = 0; s < 400; s++) step(&run, s % 30 < 7 ? 20 * COMM_S : COMM_S, COMM_S, 1);
    CHECK_MESSAGE(run.result.warning_count == 0, "%s", run.result.warning[0].text);
    end(&run);
}

/* A step without counts from the network gives no sample. */
static void silent(void)
{
    struct run run;
    begin(&run);
    for (int s = 0; s < 100; s++) step(&run, 0, 0, 1);
    CHECK(run.result.warning_count == 0);
    end(&run);
}

/* The last rank becomes slower: it is reported once, within 20 steps. If the whole step is waiting for a link, it is
 * reported only if far slower. */
static void slower_rank(void)
{
    enum { FROM = 30 };
    const struct {
        double waiting, times;
        int named;
    } one[] = {{1, 1.1, 0}, {1, 3, 1}, {8, 2.4, 0}, {8, 4, 1}};
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        struct run run;
        begin(&run);
        for (int s = 0; s < FROM + 60; s++) {
            const double last = s < FROM ? 1 : one[i].times;
            step_of(&run, one[i].waiting * (run.plan.latency_s + MICROBATCHES * COMPUTE_S * (last - 1)), COMM_S, COMM_S,
                    1, last);
        }
        CHECK_MESSAGE(run.result.warning_count == one[i].named, "%g times as slow, steps of %g times as long: %d named",
                      one[i].times, one[i].waiting, run.result.warning_count);
        for (int w = 0; w < run.result.warning_count; w++) {
            const struct hapt_train_warning *warning = &run.result.warning[w];
            CHECK(warning->rank == RANKS - 1 && warning->stage == STAGES - 1 && warning->peer_stage == -1);
            CHECK(warning->step >= FROM && warning->step < FROM + 20);
            CHECK_NEAR(warning->ratio, one[i].times, 1e-9);
        }
        end(&run);
    }
}

/* A run that differs from its prediction is reported once, with both numbers. There is no report if the difference is
 * temporary or small, if the plan has no times, or if the job's own ranks share the cores. */
static void off_prediction(void)
{
    const struct {
        double times, predicted;
        int cores;
        double crowd;
        int steps, said;
    } one[] = {
        {1, 0.3, 0, 1, 60, 0},    {1.4, 0.3, 0, 1, 60, 0}, {3.2, 0.3, 0, 1, 60, 1}, {0.6, 0.3, 0, 1, 60, 0},
        {0.2, 0.3, 0, 1, 60, 1},  {3.2, NAN, 0, 1, 60, 0}, {3.2, 0, 0, 1, 60, 0},   {3.2, 0.3, 0, 1, 17, 0},
        {3.2, 3e-4, 0, 1, 60, 0}, {4.5, 0.3, 8, 5, 60, 1}, {4.5, 0.3, 2, 5, 60, 0}, {20, 0.3, 2, 5, 60, 1},
    };
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        struct run run;
        begin(&run);
        run.env.cores = one[i].cores;
        run.plan.simulated_s = one[i].predicted;
        watch_slow_create(&run.worker, 0.2, &run.arena, &run.slow);
        const double step_s = one[i].times * (isfinite(one[i].predicted) ? one[i].predicted : 0.3);
        for (int s = 0; s < one[i].steps; s++) step_of(&run, step_s, COMM_S, COMM_S, one[i].crowd, 1);
        CHECK_MESSAGE(run.result.warning_count == one[i].said, "%g times %g s, case %zu: %d warnings", one[i].times,
                      one[i].predicted, i, run.result.warning_count);
        for (int w = 0; w < run.result.warning_count; w++) {
            const struct hapt_train_warning *warning = &run.result.warning[w];
            CHECK(warning->rank == -1 && warning->stage == -1 && warning->peer_stage == -1);
            CHECK_NEAR(warning->ratio, one[i].times, 1e-9);
            CHECK_MESSAGE(strstr(warning->text, "predicted 300.00 ms") && strstr(warning->text, "--run outputs/"), "%s",
                          warning->text);
            CHECK((strstr(warning->text, "what else runs") != NULL) == (one[i].times > 1));
        }
        end(&run);
    }
}

/* Slow for a while: no report. */
static void off_for_a_while(void)
{
    struct run run;
    begin(&run);
    run.plan.simulated_s = run.plan.latency_s;
    for (int s = 0; s < 400; s++) step_of(&run, (s % 30 < 7 ? 20 : 1) * run.plan.latency_s, COMM_S, COMM_S, 1, 1);
    CHECK_MESSAGE(run.result.warning_count == 0, "%s", run.result.warning[0].text);
    end(&run);
}

int main(void)
{
    RUN(constant);
    RUN(dropped);
    RUN(passing);
    RUN(silent);
    RUN(slower_rank);
    RUN(off_prediction);
    RUN(off_for_a_while);
    return test_finish();
}
