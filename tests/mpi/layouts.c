/* ranks: 1 2 3 4
 * Stages laid out in any way: tensor-parallel, mixed with data-parallel ones, by forced cuts and uneven ratios. Losses and weights are
 * those of PyTorch (tests/data/gpt-small.h5), bits those of the same plan run again, and any plan resumes any other's checkpoint.
 */
#include "train_plans.h"

/* Stages of `size` ranks and tensor-parallel degree `degree`, cut evenly between blocks. */
struct arrangement {
    int ranks, stages, size[MAX_STAGES], degree[MAX_STAGES];
};
static const struct arrangement arrangements[] = {
    {2, 1, {2}, {2}},
    {3, 2, {2, 1}, {2, 0}},
    {3, 2, {1, 2}, {0, 2}},
    {4, 1, {4}, {4}},
    {4, 1, {4}, {2}},
    {4, 2, {2, 2}, {0, 2}},
    {4, 2, {2, 2}, {2, 0}},
    {4, 2, {2, 2}, {2, 2}},
    {4, 3, {1, 2, 1}, {0, 2, 0}},
};
enum { ARRANGEMENTS = sizeof arrangements / sizeof *arrangements };

/* The k-th arrangement for as many ranks as there are, cut at operators that a program can begin at; false: there are no more. */
static bool arrange(int k, int shift, struct shape *shape)
{
    const int ops = model->graph->forward_count;
    *shape = one_rank();
    for (int a = 0; a < ARRANGEMENTS; a++) {
        const struct arrangement *its = &arrangements[a];
        if (its->ranks != test_env.world_size || k-- > 0) continue;
        shape->stages = its->stages;
        for (int s = 0; s < its->stages; s++) {
            shape->size[s] = its->size[s];
            shape->tensor_parallel[s] = its->degree[s];
            shape->end[s] = s == its->stages - 1 ? ops : ops * (s + 1) / its->stages + shift;
        }
        return true;
    }
    return false;
}

/* Moves cuts to the next places where every stage's program can begin and end. */
static bool settle(struct shape *shape)
{
    for (int s = 0; s < shape->stages - 1; s++) {
        bool good = false;
        for (; !good && shape->end[s] < model->graph->forward_count - 1; shape->end[s] += !good) {
            good = true;
            for (int side = s; side <= s + 1; side++) {
                const int degree = shape->tensor_parallel[side] > 1 ? shape->tensor_parallel[side] : 1;
                struct hapt_sharding *sharding = NULL;
                CHECK_OK(hapt_sharding_tensor_parallel(model->graph, shape->size[side] / degree, degree, &arena, &sharding));
                if (!sharding) return false;
                good = good && !sharding->parted[shape->end[s]];
            }
        }
        if (!good || (s > 0 && shape->end[s] <= shape->end[s - 1])) return false;
    }
    return true;
}

static void check_losses(const struct shape *shape, const struct hapt_train_result *result, const char *what)
{
    const double difference = worst(result->history.loss, fp64, STEPS);
    if (!CHECK_MESSAGE(difference < 1e-5, "%s: losses are %g away", what, difference))
        for (int s = 0; s < shape->stages; s++)
            fprintf(stderr, "  stage %d: up to operator %d on %d\n", s, shape->end[s], shape->size[s]);
    if (test_env.world_rank != 0) return;
    for (int s = 0; s < shape->stages; s++) CHECK(result->planned_bytes[s] == result->measured_bytes[s]);
}

static void tensor_parallel_trains(void)
{
    struct shape shape;
    for (int shift = 0; shift < (test_long() ? 12 : 3); shift++)
        for (int k = 0; arrange(k, 2 * shift - 3, &shape); k++) {
            char name[32];
            if (!settle(&shape)) continue;
            snprintf(name, sizeof name, "tp%d.%d", k, shift);
            struct hapt_train_result *result = train(&shape, make_config(name, reference_options), NULL);
            if (!result) continue;
            check_losses(&shape, result, name);
            check_weights(hapt_arena_printf(&arena, "%s/%s", folder, name));
            if (shift > 0) continue;
            struct hapt_train_result *again = train(&shape, make_config("again", reference_options), NULL);
            if (again) CHECK(!memcmp(result->history.loss, again->history.loss, sizeof fp64));
            if (again) CHECK(!memcmp(result->history.gradient_norm, again->history.gradient_norm, sizeof fp64));
        }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    if (model) {
        RUN(tensor_parallel_trains);
    }
    clean_up();
    return test_finish();
}
