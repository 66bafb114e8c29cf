/* Random programs: graphs, shardings by random cuts, and ranges. */
#ifndef HAPT_TEST_RANDOM_PROGRAM_H
#define HAPT_TEST_RANDOM_PROGRAM_H

#include "cuts.h"
#include "fixture.h"

#include "hapt/program.h"

/* Program number k, of all operators if k is odd; NULL: its sharding or its range is impossible. *vocab: of its
 * inputs. */
static struct hapt_program *random_program(int k, uint64_t *random, struct hapt_arena *arena, int *vocab)
{
    struct hapt_sharding *trivial = NULL, *made;
    struct hapt_axis_program *list;
    struct hapt_program *program = NULL;
    const bool gpt = k % 3 == 0;
    const struct hapt_graph *graph =
        gpt ? fixture_gpt(arena, (struct fixture_gpt){1, 12, 3, 4, 13, 4, k % 2 == 0, false})->graph
            : fixture_random(arena, random, 3 + k % 20);
    *vocab = gpt ? 13 : 11;
    CHECK_OK(hapt_sharding_trivial(graph, arena, &trivial));
    made = k % 4 ? cuts_add_axis(trivial, 0, 2 + k % 2, random, arena, &list) : trivial;
    if (made && k % 8 > 5) made = cuts_add_axis(made, 1, 2, random, arena, &list);
    int first = (int)(hapt_random_next(random) % (uint64_t)graph->forward_count);
    int end = first + 1 + (int)(hapt_random_next(random) % (uint64_t)(graph->forward_count - first));
    if (k % 2) first = 0, end = graph->forward_count;
    if (made && hapt_program_build(made, first, end, arena, &program) != HAPT_OK) program = NULL;
    hapt_fail_reset();
    return program;
}

#endif
