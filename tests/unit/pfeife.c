/*
 * Golden numbers of Pfeife (Jhoo et al. 2025): Fig. 4, Table 5, Table 1, and the size of its search. Fig. 2 and 3 are in
 * schedule_family.c.
 *
 * ViT-g/14 is written as the paper's 407 operators: ten in each of 40 blocks, and seven beside them.
 */
#include "hapt/chunk_cuts.h"

#include "hapt/schedule.h"
#include "test.h"

enum { MOST_OPERATORS = 512, MOST_CHUNKS = 24 };

/* Sums over operators [0, k). */
struct operators {
    int count;
    double forward_s[MOST_OPERATORS + 1], parameters[MOST_OPERATORS + 1];
    double boundary_s[MOST_OPERATORS + 1]; /* one transfer of what is live behind operator k - 1 */
};

static void add_operator(struct operators *operators, double forward_s, double parameters, double boundary_s)
{
    const int k = ++operators->count;
    HAPT_ASSERT(k <= MOST_OPERATORS);
    operators->forward_s[k] = operators->forward_s[k - 1] + forward_s;
    operators->parameters[k] = operators->parameters[k - 1] + parameters;
    operators->boundary_s[k] = boundary_s;
}

/* Backward passes take twice as long as forward ones (Pfeife Fig. 2). */
static void chunk_of(const void *context, int chunk, int first, int end, struct hapt_chunk_costs *costs)
{
    const struct operators *operators = context;
    (void)chunk;
    costs->forward_s = operators->forward_s[end] - operators->forward_s[first];
    costs->backward_s = 2 * costs->forward_s;
    costs->comm_s = operators->boundary_s[end];
}

/* Pfeife's parameters. One loop: B_l is not read. */
struct setting {
    int devices, microbatches, loops, loop_batch, prefetch;
};

static struct hapt_schedule *schedule_of(const struct setting *setting, struct hapt_arena *arena)
{
    struct hapt_schedule *schedule = NULL;
    int submesh_of[MOST_CHUNKS];
    const int chunks = setting->devices * setting->loops;
    for (int c = 0; c < chunks; c++) submesh_of[c] = c % setting->devices;
    const struct hapt_schedule_options options = {
        .submesh_of = submesh_of, .loop_batch = setting->loop_batch, .prefetch = setting->prefetch};
    CHECK_OK(
        hapt_schedule_build(HAPT_SCHEDULE_LOOPED, chunks, setting->microbatches, NULL, &options, arena, &schedule));
    return schedule;
}

static struct hapt_chunk_cuts_found beam_of(const struct operators *operators, const struct setting *setting,
                                            struct hapt_arena *arena)
{
    const struct hapt_chunk_cuts problem = {.layer_count = operators->count,
                                            .schedule = schedule_of(setting, arena),
                                            .chunk = chunk_of,
                                            .context = operators,
                                            .transfer_slots = 0}; /* the paper's graph knows none */
    struct hapt_chunk_cuts_found found = {0};
    CHECK_OK(hapt_chunk_cuts_beam(&problem, NULL, arena, &found));
    return found;
}

static double priced_s(const struct operators *operators, const struct setting *setting, const int *end,
                       struct hapt_arena *arena)
{
    const struct hapt_chunk_cuts problem = {
        .layer_count = operators->count, .schedule = schedule_of(setting, arena), .chunk = chunk_of, .context = operators};
    struct hapt_simulate_work work = {0};
    double step_s = INFINITY;
    CHECK_OK(hapt_chunk_cuts_price(&problem, end, &work, &step_s));
    hapt_simulate_work_release(&work);
    return step_s;
}

/* ---- Fig. 4: 15 operators on 3 devices ---- */

/* Four microbatches of 15 equal operators, no transfers. Without prefetch equal chunks are optimal, as is the belief that
 * the paper contradicts; with it (6, 11) is the only optimum, and the beam finds it. */
static void figure_4(void)
{
    struct hapt_arena arena;
    struct operators operators = {0};
    hapt_arena_init(&arena);
    for (int k = 0; k < 15; k++) add_operator(&operators, 1, 0, 0);
    double least_s[2] = {INFINITY, INFINITY}, even_s[2], golden_s[2];
    int optima = 0;
    for (int prefetch = 0; prefetch < 2; prefetch++) {
        const struct setting setting = {.devices = 3, .microbatches = 4, .loops = 1, .prefetch = prefetch};
        even_s[prefetch] = priced_s(&operators, &setting, (const int[]){5, 10, 15}, &arena);
        golden_s[prefetch] = priced_s(&operators, &setting, (const int[]){6, 11, 15}, &arena);
        for (int first = 1; first < 14; first++)
            for (int second = first + 1; second < 15; second++) {
                const double step_s = priced_s(&operators, &setting, (const int[]){first, second, 15}, &arena);
                if (step_s < least_s[prefetch]) optima = 0;
                least_s[prefetch] = fmin(least_s[prefetch], step_s);
                optima += step_s == least_s[prefetch];
            }
    }
    printf("  Fig. 4: without prefetch even %g, (6, 11) %g, least %g; with prefetch %g, %g, %g\n", even_s[0], golden_s[0],
           least_s[0], even_s[1], golden_s[1], least_s[1]);
    CHECK(optima == 1 && golden_s[1] == least_s[1] && golden_s[1] < even_s[1]);
    const struct setting setting = {.devices = 3, .microbatches = 4, .loops = 1, .prefetch = 1};
    const struct hapt_chunk_cuts_found found = beam_of(&operators, &setting, &arena);
    CHECK_MESSAGE(found.end[0] == 6 && found.end[1] == 11, "the beam cuts at (%d, %d)", found.end[0], found.end[1]);
    CHECK(found.step_s == golden_s[1]);
    hapt_arena_release(&arena);
}

/* ---- ViT-g/14 ---- */

/* Rates of the devices: FLOP/s of the products is the constant that is fitted; bandwidths are of data sheets. */
struct rates {
    double flops, memory_bytes_per_s, link_bytes_per_s;
};

/* ViT-g/14 (Zhai et al. 2022): 40 blocks, width 1408, feed-forward 6144, 16 heads, 257 tokens, fp32. */
static void make_vit(struct operators *operators, int rows, const struct rates *rates)
{
    const double d = 1408, ffn = 6144, tokens = 257, n = rows * tokens, patch = 3 * 14 * 14, x = 4 * n * d;
    /* forward FLOPs, bytes read and written, parameters, bytes live behind the operator */
    const double block[][4] = {
        {0, 2 * x, 2 * d, 2 * x},                                         /* norm */
        {2 * n * d * 3 * d, 0, 3 * d * d + 3 * d, 4 * x},                 /* query, key, value */
        {4 * n * tokens * d, 0, 0, 2 * x},                                /* attention */
        {2 * n * d * d, 0, d * d + d, 2 * x},                             /* projection */
        {0, 3 * x, 0, x},                                                 /* add */
        {0, 2 * x, 2 * d, 2 * x},                                         /* norm */
        {2 * n * d * ffn, 0, d * ffn + ffn, x + x * ffn / d},             /* up */
        {0, 2 * x * ffn / d, 0, x + x * ffn / d},                         /* gelu */
        {2 * n * d * ffn, 0, d * ffn + d, 2 * x},                         /* down */
        {0, 3 * x, 0, x}};                                                /* add */
    const double front[][4] = {{2 * n * patch * d, 0, patch * d + d, x}, {0, 2 * x, 0, x}, {0, 2 * x, d, x}, {0, 3 * x, tokens * d, x}};
    const double back[][4] = {{0, 2 * x, 2 * d, x}, {0, 4.0 * rows * d, 0, 4.0 * rows * d}, {2 * rows * d * 1000, 0, 1000 * d + 1000, 4000.0 * rows}};
    *operators = (struct operators){0};
    for (int k = 0; k < 4 + 400 + 3; k++) {
        const double *is = k < 4 ? front[k] : k < 404 ? block[(k - 4) % 10] : back[k - 404];
        add_operator(operators, is[0] / rates->flops + is[1] / rates->memory_bytes_per_s, is[2],
                     is[3] / rates->link_bytes_per_s);
    }
}

/* Table 5: estimated milliseconds of 8 microbatches of 6 rows. */
static const struct {
    struct setting setting;
    double estimate_s;
} table_5[] = {{{2, 8, 1, 8, 1}, 1.899}, {{2, 8, 2, 4, 1}, 1.808}, {{2, 8, 3, 4, 1}, 1.776},
               {{4, 8, 1, 8, 2}, 1.121}, {{4, 8, 2, 8, 3}, 0.966}, {{4, 8, 3, 8, 3}, 0.936},
               {{8, 8, 1, 8, 3}, 0.760}, {{8, 8, 2, 8, 3}, 0.621}, {{8, 8, 3, 8, 3}, 0.591}};
enum { TABLE_5 = sizeof table_5 / sizeof table_5[0] };

static void table_5_of_pfeife(void)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    struct rates rates = {2.2e13, 1.555e12, 3e11};
    struct operators vit;
    make_vit(&vit, 6, &rates);
    printf("  %d operators, %.3g parameters, %.4g s\n", vit.count, vit.parameters[vit.count], vit.forward_s[vit.count]);
    for (int k = 0; k < TABLE_5; k++) {
        const double start_s = hapt_time_s();
        const struct hapt_chunk_cuts_found found = beam_of(&vit, &table_5[k].setting, &arena);
        printf("  D %d, N_l %d: %.0f ms, paper %.0f ms (%.1f %%), %lld simulated, %lld looked, %.3f s\n", table_5[k].setting.devices,
               table_5[k].setting.loops, 1e3 * found.step_s, 1e3 * table_5[k].estimate_s,
               100 * (found.step_s / table_5[k].estimate_s - 1), (long long)found.simulated, (long long)found.looked, hapt_time_s() - start_s);
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(figure_4);
    RUN(table_5_of_pfeife);
    return test_finish();
}
