/* Random programs of one axis: synthesised with random costs and forced cuts, or completed from random cuts. They live
 * in `arena`, which the including file defines. */
#ifndef HAPT_TEST_RANDOM_PROGRAMS_H
#define HAPT_TEST_RANDOM_PROGRAMS_H

#include "cuts.h"

#include "hapt/synthesis.h"

enum { MOST_DRAWN_DEVICES = 4 };

struct random_costs {
    uint64_t seed;
    double slowness[MOST_DRAWN_DEVICES], alpha[HAPT_COLLECTIVE_COUNT], beta[HAPT_COLLECTIVE_COUNT], scale;
};

static double random_compute_s(const void *context, const struct hapt_spmd_work *work, int device)
{
    const struct random_costs *costs = context;
    const int64_t key[] = {(int64_t)costs->seed, work->op, work->cut.letter};
    uint64_t random = hapt_hash(1, key, sizeof key);
    return (0.02 + (0.2 + hapt_random_unit(&random)) * work->share) * costs->slowness[device];
}

static double random_collective_s(const void *context, enum hapt_collective_kind kind, double bytes,
                                  double largest_share)
{
    const struct random_costs *costs = context;
    if (kind == HAPT_COLLECTIVE_SLICE || kind == HAPT_COLLECTIVE_NONE) return 0;
    return costs->scale * (costs->alpha[kind] + costs->beta[kind] * bytes / 20000 * largest_share);
}

static void draw_costs(uint64_t *random, struct random_costs *costs)
{
    *costs =
        (struct random_costs){.seed = hapt_random_next(random), .scale = pow(10, -3 + 3 * hapt_random_unit(random))};
    for (int d = 0; d < MOST_DRAWN_DEVICES; d++) costs->slowness[d] = 1 + (double)(hapt_random_next(random) % 4);
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) {
        costs->alpha[k] = hapt_random_unit(random);
        costs->beta[k] = pow(10, -1 + 2 * hapt_random_unit(random));
    }
}

/* For one operator in eight, a cut that it allows. Every second time all matrix products of experts are sharded by
 * expert. */
static const struct hapt_cut **draw_forced(const struct hapt_sharding *sharding, int axis_index,
                                           const struct hapt_axis *axis, uint64_t *random, int *count)
{
    const struct hapt_graph *graph = sharding->graph;
    const struct hapt_cut **forced = hapt_arena_alloc(&arena, (size_t)graph->op_count, sizeof *forced);
    const bool experts = hapt_random_next(random) % 2;
    for (int o = 0; o < graph->forward_count; o++) {
        struct hapt_cut list[64], *one;
        struct hapt_rule rule;
        const bool expert = experts && graph->op[o].type == hapt_op_type_find("expert_linear");
        if (hapt_random_next(random) % 8 && !expert) continue;
        const int cuts = hapt_rule_cuts(graph, o, axis_index, axis, NULL, list, 64);
        struct hapt_cut cut = list[hapt_random_next(random) % (uint64_t)cuts];
        for (int c = 0; expert && c < cuts; c++)
            if (list[c].letter == 'e') cut = list[c];
        if (cut.letter == HAPT_CUT_PARTIAL || hapt_rule_of_cut(sharding, axis_index, axis, o, cut, &rule) != HAPT_OK)
            continue;
        one = hapt_arena_alloc(&arena, 1, sizeof *one);
        *one = (struct hapt_cut){.letter = cut.letter};
        forced[o] = one;
        *count += cut.letter != HAPT_CUT_REPLICATED;
    }
    hapt_fail_reset();
    return forced;
}

static struct hapt_axis_program *synthesised(const struct hapt_sharding *sharding, int axis_index,
                                             const struct hapt_axis *axis, uint64_t *random, int *forced)
{
    struct random_costs draw;
    struct hapt_synthesis_options options = {.microbatches = 1 + (int)(hapt_random_next(random) % 8),
                                             .most_states = 5000};
    int kind[MOST_DRAWN_DEVICES];
    draw_costs(random, &draw);
    for (int d = 0; d < axis->size; d++) kind[d] = d;
    const struct hapt_spmd_costs costs = {
        .context = &draw, .kind = kind, .compute_s = random_compute_s, .collective_s = random_collective_s};
    options.no_replicated_gradients = hapt_random_next(random) % 4 == 0;
    for (int attempt = 0; attempt < 3; attempt++) {
        struct hapt_axis_program *program = hapt_arena_alloc(&arena, 1, sizeof *program);
        /* Forced cuts of two neighbours may contradict each other. */
        *forced = 0;
        options.forced = attempt < 2 ? draw_forced(sharding, axis_index, axis, random, forced) : NULL;
        const enum hapt_status status =
            hapt_synthesise(sharding, axis_index, axis, &costs, &options, &arena, program, NULL);
        CHECK_MESSAGE(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE, "synthesis: %s", hapt_fail_message());
        hapt_fail_reset();
        if (status == HAPT_OK) return program;
    }
    return NULL;
}

__attribute__((unused)) static struct hapt_axis_program *
random_cuts(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis, uint64_t *random)
{
    struct hapt_cut *cut = hapt_arena_alloc(&arena, (size_t)sharding->graph->op_count, sizeof *cut);
    struct hapt_grains *grains = NULL;
    struct hapt_axis_program *program = NULL;
    CHECK_OK(hapt_grains_find(sharding->graph, &arena, &grains));
    for (int attempt = 0; attempt < 2 && !program; attempt++) {
        cuts_choose(sharding, axis_index, axis, grains, (int)(hapt_random_next(random) % 11), attempt == 0, random,
                    cut);
        if (hapt_axis_program_complete(sharding, axis_index, axis, cut, &arena, &program) != HAPT_OK) program = NULL;
    }
    hapt_fail_reset();
    for (int i = 0; program && i < program->count; i++)
        if (program->instruction[i].kind == HAPT_COLLECTIVE_ALL_GATHER && hapt_random_next(random) % 2)
            program->instruction[i].kind = HAPT_COLLECTIVE_GROUPED_BROADCAST;
    return program;
}

#endif
