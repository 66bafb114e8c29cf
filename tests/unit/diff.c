/* Differences of random plans, compared with a loop over all layers. */
#include "hapt/diff.h"
#include "random_profile.h"

static struct hapt_plan *plan_of(uint64_t *seed, int layers, struct hapt_arena *arena)
{
    struct hapt_plan *plan = hapt_arena_alloc(arena, 1, sizeof *plan);
    *plan = (struct hapt_plan){.microbatches = 8,
                               .schedule = HAPT_SCHEDULE_H1F1B,
                               .layer_count = layers,
                               .replicas = 1,
                               .latency_s = 1,
                               .simulated_s = 1,
                               .t_max_s = 1,
                               .limit = "compute"};
    CHECK_OK(hapt_plan_allot(plan, layers, arena));
    plan->stage_count = 0;
    for (int layer = 0; layer < layers;) {
        struct hapt_plan_stage *stage = &plan->stage[plan->stage_count++];
        stage->first_layer = layer;
        stage->end_layer = layer += 1 + random_below(seed, layers - layer);
        stage->submesh->nodes = 1 + random_below(seed, 2);
        stage->submesh->devices_per_node = 2;
        stage->layout.tensor_parallel = 1 + random_below(seed, 2);
        stage->warmup = 1 + random_below(seed, 2);
        stage->layout.recompute = random_below(seed, 2);
        stage->layout.weights_at = random_below(seed, 2);
        stage->compute_s = random_below(seed, 2);
        stage->memory_bytes = random_below(seed, 2);
        snprintf(stage->submesh->name, sizeof stage->submesh->name, "%c", 'a' + random_below(seed, 3));
    }
    return plan;
}

static int stage_at(const struct hapt_plan *plan, int layer)
{
    int i = 0;
    while (plan->stage[i].end_layer <= layer) i++;
    return i;
}

static int shared(const struct hapt_plan *a, int i, const struct hapt_plan *b, int j)
{
    int count = 0;
    for (int layer = 0; layer < a->layer_count; layer++) count += stage_at(a, layer) == i && stage_at(b, layer) == j;
    return count;
}

/* No other stage shares more layers with either. */
static void check_pair(const struct hapt_plan *a, int i, const struct hapt_plan *b, int j, unsigned long long seed)
{
    const int here = shared(a, i, b, j);
    CHECK_MESSAGE(here > 0, "seed %llu: stages %d and %d share nothing", seed, i, j);
    for (int k = 0; k < b->stage_count; k++)
        CHECK_MESSAGE(shared(a, i, b, k) <= here, "seed %llu: %d shares more", seed, i);
    for (int k = 0; k < a->stage_count; k++)
        CHECK_MESSAGE(shared(a, k, b, j) <= here, "seed %llu: %d shares more", seed, j);
}

static void random_pairs(void)
{
    for (uint64_t start = 1; start <= 3000; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_diff *diff;
        hapt_arena_init(&arena);
        const int layers = 1 + random_below(&seed, 12);
        const struct hapt_plan *a = plan_of(&seed, layers, &arena), *b = plan_of(&seed, layers, &arena);
        CHECK_OK(hapt_plan_diff(a, b, &arena, &diff));
        int next_a = 0, next_b = 0;
        for (int r = 0; r < diff->row_count; r++) {
            const struct hapt_diff_row *row = &diff->row[r];
            CHECK_MESSAGE((row->a < 0 || row->a == next_a) && (row->b < 0 || row->b == next_b), "seed %llu: order",
                          (unsigned long long)start);
            next_a += row->a >= 0;
            next_b += row->b >= 0;
            if (row->a < 0 || row->b < 0) continue;
            const struct hapt_plan_stage *x = &a->stage[row->a], *y = &b->stage[row->b];
            check_pair(a, row->a, b, row->b, start);
            CHECK(!(row->changed & HAPT_DIFF_LAYERS) ==
                  (x->first_layer == y->first_layer && x->end_layer == y->end_layer));
            CHECK(!(row->changed & HAPT_DIFF_SUBCLUSTER) == (x->submesh->name[0] == y->submesh->name[0]));
            CHECK(!(row->changed & HAPT_DIFF_SUBMESH) == (x->submesh->nodes == y->submesh->nodes));
            CHECK(!(row->changed & HAPT_DIFF_TENSOR_PARALLEL) ==
                  (x->layout.tensor_parallel == y->layout.tensor_parallel));
            CHECK(!(row->changed & HAPT_DIFF_LAUNCHES) == (x->warmup == y->warmup));
            CHECK(!(row->changed & HAPT_DIFF_COMPUTE) == (x->compute_s == y->compute_s));
            CHECK(!(row->changed & HAPT_DIFF_MEMORY) == (x->memory_bytes == y->memory_bytes));
            CHECK(!(row->changed & HAPT_DIFF_KEPT) ==
                  (x->layout.recompute == y->layout.recompute && x->layout.weights_at == y->layout.weights_at));
        }
        CHECK_MESSAGE(next_a == a->stage_count && next_b == b->stage_count, "seed %llu: stages are left out",
                      (unsigned long long)start);
        for (int layer = 0; layer < layers; layer++) {
            const char *from = a->stage[stage_at(a, layer)].submesh->name,
                       *to = b->stage[stage_at(b, layer)].submesh->name;
            int moves = 0;
            for (int m = 0; m < diff->relocation_count; m++)
                moves += diff->relocation[m].first_layer <= layer && layer < diff->relocation[m].end_layer &&
                         strcmp(diff->relocation[m].from, from) == 0 && strcmp(diff->relocation[m].to, to) == 0;
            CHECK_MESSAGE(moves == (strcmp(from, to) != 0), "seed %llu: layer %d moves %d times",
                          (unsigned long long)start, layer, moves);
        }
        CHECK_OK(hapt_plan_diff(a, a, &arena, &diff));
        CHECK(diff->equal && diff->row_count == a->stage_count && diff->relocation_count == 0);
        hapt_arena_release(&arena);
    }
}

/* A stage is cut into two halves: the first is its counterpart. With twice as many layers the shares are the same. */
static void by_hand(void)
{
    struct hapt_plan_submesh first = {.name = "a", .part_count = 1}, second = {.name = "b", .part_count = 1};
    struct hapt_plan_stage one[1] = {{.end_layer = 4, .submesh = &first}};
    struct hapt_plan_stage two[2] = {{.end_layer = 2, .submesh = &first},
                                     {.first_layer = 2, .end_layer = 4, .submesh = &second}};
    struct hapt_plan_stage fine[2] = {{.end_layer = 4, .submesh = &first},
                                      {.first_layer = 4, .end_layer = 8, .submesh = &second}};
    const struct hapt_plan a = {.layer_count = 4, .stage_count = 1, .stage = one, .limit = "link"};
    const struct hapt_plan b = {.layer_count = 4, .stage_count = 2, .stage = two, .limit = "link"};
    const struct hapt_plan c = {.layer_count = 8, .stage_count = 2, .stage = fine, .limit = "link"};
    struct hapt_arena arena;
    struct hapt_diff *diff;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_plan_diff(&a, &b, &arena, &diff));
    CHECK(!diff->equal && diff->row_count == 2 && diff->row[0].a == 0 && diff->row[0].b == 0 && diff->row[1].a == -1);
    CHECK(diff->relocation_count == 1 && diff->relocation[0].first_layer == 2 && diff->relocation[0].end_layer == 4);
    CHECK_OK(hapt_plan_diff(&b, &c, &arena, &diff));
    CHECK(!diff->same_layers && !diff->equal && diff->row_count == 2 && diff->row[1].a == 1 && diff->row[1].b == 1);
    struct hapt_plan other = b;
    other.microbatches = 2;
    CHECK_OK(hapt_plan_diff(&b, &other, &arena, &diff));
    CHECK(!diff->equal && diff->row[0].changed == 0);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(random_pairs);
    RUN(by_hand);
    return test_finish();
}
