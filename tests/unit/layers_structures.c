/* Structures of all ranges at once, compared with those of single ranges. */
#include "fixture.h"

#include "hapt/layers.h"

/* Both find the same ranges equal and the same ranges different. */
static void check_all_structures(const struct hapt_graph *graph, int granularity, struct hapt_arena *arena,
                                 const char *what)
{
    const struct hapt_layers_options options = {.granularity = granularity, .heavy_minimum = 1};
    struct hapt_layers *layers = NULL;
    CHECK_OK(hapt_layers_build(graph, &options, arena, &layers));
    if (!layers) return;
    const int L = layers->count;
    uint64_t *all = calloc((size_t)L * (size_t)L, sizeof *all), *one = calloc((size_t)L * (size_t)L, sizeof *one);
    CHECK_OK(hapt_layers_structures(layers, graph, NULL, all));
    for (int i = 0; i < L; i++)
        for (int j = i; j < L; j++) one[i * L + j] = hapt_layers_structure(layers, graph, i, j + 1);
    for (int a = 0; a < L * L; a++)
        for (int b = 0; b < a; b++)
            if (one[a] && one[b] && (one[a] == one[b]) != (all[a] == all[b])) {
                CHECK_MESSAGE(false, "%s: layers %d to %d and %d to %d", what, a / L, a % L, b / L, b % L);
                a = b = L * L;
            }
    free(all);
    free(one);
}

static void all_structures(void)
{
    for (int tied = 0; tied < 2; tied++) {
        struct hapt_arena arena;
        hapt_arena_init(&arena);
        const struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){8, 16, 2, 8, 24, 2, tied, false});
        check_all_structures(model->graph, 0, &arena, "GPT");
        check_all_structures(model->graph, 200, &arena, "fine GPT");
        hapt_arena_release(&arena);
    }
    const int cases = test_long() ? 3000 : 300;
    for (int k = 0; k < cases; k++) {
        struct hapt_arena arena;
        uint64_t random = (uint64_t)k + 31;
        char name[32];
        hapt_arena_init(&arena);
        snprintf(name, sizeof name, "random graph %d", k);
        check_all_structures(fixture_random(&arena, &random, 3 + k % 40), 1000, &arena, name);
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(all_structures);
    return test_finish();
}
