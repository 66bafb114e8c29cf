/* ranks: 3; HAPT_LONG: 2
 * Runs beside others: it measures no time.
 * One rank has no memory, at each reservation in turn. All ranks must fail, none may hang, and the next call must
 * work. */
#include <errno.h>
#include <stdint.h>
#include <unistd.h>

#include "fixture.h"
#include "random_profile.h"

#include "hapt/measure.h"
#include "hapt/search.h"
#include "hapt/baselines.h"
#include "hapt/link.h"
#include "hapt/profile.h"
#include "hapt/rivals.h"
#include "hapt/sweep.h"

/* Wraps the C library's allocator. It fails the `left`-th reservation made by this program itself; those of libraries
 * succeed. */
extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_memalign(size_t alignment, size_t bytes);
extern char __executable_start[], etext[];

static volatile long left; /* 0: not armed */
static volatile bool hit;

static bool fails(const void *caller)
{
    if (left == 0 || (uintptr_t)caller < (uintptr_t)__executable_start || (uintptr_t)caller >= (uintptr_t)etext)
        return false;
    if (--left > 0) return false;
    hit = true;
    errno = ENOMEM;
    return true;
}

void *malloc(size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_memalign(alignment, bytes);
}

/* How fast the victims grow. HAPT_LONG=1: by 2 %, which is one by one up to the 50th; HAPT_EVERY=1: one by one. */
static double growth_of(double quick)
{
    const char *every = getenv("HAPT_EVERY");
    return every && strcmp(every, "0") != 0 ? 1 : test_long() ? 1.02 : quick;
}

/* Runs `job` repeatedly. The first reservation fails on one rank, then the next one, and so on (in growing steps when
 * stride > 1) until none is left. Each time all ranks must have the same result; the last time they must succeed. */
typedef enum hapt_status job(void *context);

static void exhaust(const char *what, job *run, void *context, double stride)
{
    for (int victim = 0; victim < test_env.world_size; victim += test_env.world_size - 1) {
        int failures = 0;
        for (int k = 1;; k = (int)(k * stride) + 1) {
            hit = false;
            left = test_env.world_rank == victim ? k : 0;
            const enum hapt_status status = run(context);
            left = 0;
            int failed = status != HAPT_OK,
                seen[3] = {hit, failed, -failed}; /* hit or not; any failure; fewer than all */
            hapt_fail_reset();
            MPI_Allreduce(MPI_IN_PLACE, seen, 3, MPI_INT, MPI_MAX, test_env.world);
            if (seen[0]) {
                /* Some reservations are optional. Then all ranks go on. */
                CHECK_MESSAGE(seen[1] == -seen[2],
                              "%s: reservation %d of rank %d fails, and a rank knows nothing of it", what, k, victim);
                failures += failed;
                continue;
            }
            CHECK_MESSAGE(!failed, "%s: fails with memory enough", what);
            CHECK_MESSAGE(failures > 0, "%s: no reservation mattered, this test would not notice", what);
            break;
        }
    }
}

static enum hapt_status make_collective(void *context)
{
    struct hapt_collective *collective = NULL;
    const enum hapt_status status =
        hapt_collective_create(test_env.world, "test", 10, *(const bool *)context, &collective);
    if (status != HAPT_OK) return status;
    float one = 1;
    left = 0;
    CHECK_OK(hapt_collective_all_reduce(collective, "test", &one, 1));
    CHECK_NEAR(one, test_env.world_size, 0);
    hapt_collective_destroy(collective);
    return status;
}

static void collectives(void)
{
    bool shared = true;
    exhaust("a collective in shared memory", make_collective, &shared, 1);
    shared = false;
    exhaust("a collective by messages", make_collective, &shared, 1);
}

static enum hapt_status make_comm_thread(void *context)
{
    (void)context;
    struct hapt_comm_thread *comm_thread = NULL;
    const enum hapt_status status = hapt_comm_thread_create(&hapt_transfer_mpi, test_env.world, NULL, 10, &comm_thread);
    if (status == HAPT_OK) hapt_comm_thread_destroy(comm_thread);
    return status;
}

static void comm_threads(void)
{
    exhaust("a communication thread", make_comm_thread, NULL, 1);
}

struct profiling {
    struct hapt_arena arena;
    struct hapt_model *model;
    struct hapt_cluster *cluster;
    struct hapt_layers *layers;
    struct hapt_config *config;
};

static enum hapt_status measure(void *context)
{
    const struct profiling *with = context;
    struct hapt_arena arena;
    struct hapt_profile *profile = NULL;
    hapt_arena_init(&arena);
    const enum hapt_status status =
        hapt_profile_measure(&test_env, with->cluster, with->model, with->layers, with->config, false,
                             (struct hapt_offloading){0}, &arena, &profile, NULL);
    hapt_arena_release(&arena);
    return status;
}

static enum hapt_status calibrate(void *context)
{
    const struct profiling *with = context;
    struct hapt_arena arena;
    struct hapt_efficiency *efficiency = NULL;
    hapt_arena_init(&arena);
    const enum hapt_status status =
        hapt_profile_calibrate(&test_env, with->cluster, with->model, with->layers, with->config, &arena, &efficiency);
    hapt_arena_release(&arena);
    return status;
}

static void profiles(void)
{
    struct profiling with = {0};
    char *words[] = {"hapt", "profile", "--profile-seconds", "0.1", "--threads", "1"};
    const struct hapt_layers_options options = {.granularity = 4, .heavy_minimum = 2};
    hapt_arena_init(&with.arena);
    with.model = fixture_gpt(&with.arena, (struct fixture_gpt){2, 16, 2, 8, 32, 6, true, false});
    CHECK_OK(hapt_config_parse(6, words, &with.arena, &with.config));
    CHECK_OK(hapt_layers_build(with.model->graph, &options, &with.arena, &with.layers));
    CHECK_OK(hapt_cluster_discover(&test_env, &with.arena, &with.cluster));
    CHECK_OK(hapt_cluster_probe(&test_env, with.cluster));
    exhaust("a profile", measure, &with, growth_of(1.3));
    exhaust("a calibration", calibrate, &with, growth_of(1.3));
    hapt_arena_release(&with.arena);
}

static enum hapt_status compare(void *context)
{
    const struct hapt_strategy_options options = {
        .search = {.microbatches = 8, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02}};
    struct hapt_arena arena;
    struct hapt_compare_row *rows;
    int count;
    hapt_arena_init(&arena);
    const enum hapt_status status = hapt_plan_compare(test_env.world, context, &options, &arena, &rows, &count);
    hapt_arena_release(&arena);
    return status;
}

/* A plan, its rivals and a sweep. */
static enum hapt_status question(const struct hapt_profile *profile, struct hapt_arena *arena)
{
    const struct hapt_search_options options = {
        .microbatches = 8, .schedule = HAPT_SCHEDULE_H1F1B, .hide_threshold = 0.02, .may_fail = true};
    const struct hapt_sweep_question asked = {.profile = profile, .options = &options};
    const struct hapt_sweep_range range = {.kind = HAPT_SWEEP_MICROBATCHES,
                                           .text = "microbatches=2..16:3",
                                           .subject = "",
                                           .low = 2,
                                           .high = 16,
                                           .points = 3};
    struct hapt_plan *plan;
    struct hapt_join_benefit *worth;
    struct hapt_rivals *rivals;
    struct hapt_sweep *sweep;
    HAPT_TRY(hapt_sweep_run(&test_env, &asked, &range, arena, &sweep));
    const enum hapt_status status = hapt_plan_search(test_env.world, profile, &options, arena, &plan);
    if (status == HAPT_ERR_INFEASIBLE) return HAPT_OK;
    HAPT_TRY(status);
    HAPT_TRY(hapt_plan_join_benefit(&test_env, profile, &options, plan, arena, &worth));
    return hapt_plan_rivals(&test_env, profile, &options, plan, worth, true, arena, &rivals);
}

static enum hapt_status explain(void *context)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = question(context, &arena);
    hapt_arena_release(&arena);
    return status;
}

static void comparisons(void)
{
    for (uint64_t start = 1; start <= 3; start++) {
        struct hapt_arena arena;
        uint64_t seed = start;
        hapt_arena_init(&arena);
        struct hapt_profile *made = random_profile(&seed, &arena);
        exhaust("a comparison", compare, made, growth_of(1.15));
        exhaust("an explanation", explain, made, growth_of(1.15));
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(collectives);
    RUN(comm_threads);
    RUN(profiles);
    RUN(comparisons);
    return test_finish();
}
