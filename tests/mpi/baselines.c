/* The comparison is the same for every number of ranks, including the rows that fail.
 * ranks: 1 2 3 4
 * Runs beside others: it measures no time. */
#include "hapt/baselines.h"
#include "random_profile.h"

static bool same_pipelines(const struct hapt_pipelines *a, const struct hapt_pipelines *b)
{
    if (!a != !b) return false;
    bool same = !a || (a->count == b->count && a->simulated_s == b->simulated_s && a->reduce_s == b->reduce_s);
    for (int p = 0; same && a && p < a->count; p++)
        same = a->plan[p]->microbatches == b->plan[p]->microbatches &&
               a->plan[p]->simulated_s == b->plan[p]->simulated_s && a->plan[p]->stage_count == b->plan[p]->stage_count;
    return same;
}

static bool same_row(const struct hapt_compare_row *a, const struct hapt_compare_row *b)
{
    if (!same_pipelines(a->pipelines, b->pipelines)) return false;
    if (!a->plan != !b->plan) return false;
    if (!a->plan) return strcmp(a->reason, b->reason) == 0;
    bool same = a->plan->simulated_s == b->plan->simulated_s && a->plan->stage_count == b->plan->stage_count &&
                a->plan->t_max_s == b->plan->t_max_s && a->boundary == b->boundary;
    for (int i = 0; same && i < a->plan->stage_count; i++)
        same = a->plan->stage[i].end_layer == b->plan->stage[i].end_layer &&
               a->plan->stage[i].submesh->subcluster[0] == b->plan->stage[i].submesh->subcluster[0] &&
               a->plan->stage[i].submesh->nodes == b->plan->stage[i].submesh->nodes &&
               a->plan->stage[i].submesh->devices_per_node == b->plan->stage[i].submesh->devices_per_node;
    return same;
}

static void any_number_of_ranks(void)
{
    long reasons = 0, pipelines = 0;
    for (uint64_t start = 1; start <= 8; start++) {
        uint64_t seed = start;
        struct hapt_arena arena;
        struct hapt_compare_row *alone, *together;
        int count[2];
        hapt_arena_init(&arena);
        struct hapt_profile *profile = random_profile_of(&seed, 1 + random_below(&seed, 3), 6, &arena);
        struct hapt_strategy_options options = {.search = random_options(&seed)};
        CHECK_OK(hapt_plan_compare(MPI_COMM_SELF, profile, &options, &arena, &alone, &count[0]));
        CHECK_OK(hapt_plan_compare(test_env.world, profile, &options, &arena, &together, &count[1]));
        CHECK(count[0] == count[1]);
        for (int r = 0; r < count[0]; r++) {
            reasons += !alone[r].plan;
            pipelines += alone[r].pipelines != NULL;
            CHECK_MESSAGE(same_row(&alone[r], &together[r]), "seed %llu: row %s depends on the ranks",
                          (unsigned long long)start, alone[r].name);
        }
        hapt_arena_release(&arena);
    }
    CHECK(reasons > 0 && pipelines > 0);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(any_number_of_ranks);
    return test_finish();
}
