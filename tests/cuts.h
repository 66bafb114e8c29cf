/* Random cuts of every operator of a graph, to test shardings that no planner would choose. */
#ifndef HAPT_TEST_CUTS_H
#define HAPT_TEST_CUTS_H

#include "hapt/sharding.h"
#include "test.h"

#include "hapt/rules.h"

struct cuts_axis {
    struct hapt_axis axis;
    double ratio[2 * 16];
};

/* An axis with even shares, or with one or two random ratio vectors. */
__attribute__((unused)) static void cuts_random_axis(struct cuts_axis *made, int size, uint64_t *random)
{
    *made = (struct cuts_axis){.axis = {.size = size}};
    const int vectors = (int)(hapt_random_next(random) % 3);
    for (int k = 0; k < vectors; k++) {
        double sum = 0, *ratio = &made->ratio[k * size];
        for (int r = 0; r < size; r++) sum += ratio[r] = 0.1 + hapt_random_unit(random);
        for (int r = 0; r < size; r++) ratio[r] /= sum;
    }
    if (vectors > 0) made->axis.ratio = made->ratio, made->axis.ratio_count = vectors;
}

/* Chooses one cut per operator. With `rows` = 10 the operators keep to the first index of their first operand, as data
 * parallelism does. Smaller values give programs that communicate more. *partial: how many cuts pass partial sums
 * on. */
static void cuts_choose(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                        const struct hapt_grains *grains, int rows, bool allow_partial, uint64_t *random,
                        struct hapt_cut *cut)
{
    const struct hapt_graph *graph = sharding->graph;
    for (int o = 0; o < graph->op_count; o++) {
        struct hapt_cut list[256], fitting[256] = {{0}};
        int count = hapt_rule_cuts(graph, o, axis_index, axis, grains, list, 256), fit = 0;
        CHECK(count <= 256);
        for (int c = 0; c < count; c++) {
            struct hapt_rule rule;
            if (list[c].letter == HAPT_CUT_PARTIAL && !allow_partial) continue;
            if (hapt_rule_of_cut(sharding, axis_index, axis, o, list[c], &rule) != HAPT_OK) continue;
            if (rule.exchange && sharding->exchange[o] >= 0) continue;
            fitting[fit++] = list[c];
        }
        hapt_fail_reset();
        CHECK(fit > 0);
        cut[o] = fitting[hapt_random_next(random) % (uint64_t)fit];
        const bool keeps = (int)(hapt_random_next(random) % 10) < rows;
        for (int c = 0; keeps && c < fit; c++)
            if (fitting[c].letter == 'b' && fitting[c].ratio == 0) cut[o] = fitting[c];
    }
}

/* The sharding with one more axis by random cuts. NULL: these cuts give no program. */
__attribute__((unused)) static struct hapt_sharding *cuts_add_axis(const struct hapt_sharding *sharding, int axis_index,
                                                                   int size, uint64_t *random, struct hapt_arena *arena,
                                                                   struct hapt_axis_program **program)
{
    struct cuts_axis axis;
    struct hapt_grains *grains = NULL;
    struct hapt_cut *cut = calloc((size_t)sharding->graph->op_count, sizeof *cut);
    struct hapt_sharding *made = NULL;
    const int rows = (int)(hapt_random_next(random) % 11);
    *program = NULL;
    cuts_random_axis(&axis, size, random);
    CHECK_OK(hapt_grains_find(sharding->graph, arena, &grains));
    /* The first attempt allows partial sums, which fail where no operator accepts them. Such a failure is no error. */
    for (int attempt = 0; attempt < 2 && !made; attempt++) {
        cuts_choose(sharding, axis_index, &axis.axis, grains, rows, attempt == 0, random, cut);
        enum hapt_status status = hapt_axis_program_complete(sharding, axis_index, &axis.axis, cut, arena, program);
        if (status == HAPT_OK) status = hapt_sharding_apply(sharding, axis_index, &axis.axis, *program, arena, &made);
        CHECK_MESSAGE(*program == NULL || status == HAPT_OK, "a completed program is refused");
        CHECK(status == HAPT_OK || status == HAPT_ERR_INFEASIBLE);
        if (status == HAPT_OK) hapt_fail_reset();
    }
    free(cut);
    return made;
}

#endif
