/*
 * ranks: 1 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * Stages in all layouts: tensor-parallel, tensor- and data-parallel, forced cuts and uneven ratios. Losses and weights
 * must be those of PyTorch (tests/data/gpt-small.h5). A second run of the same plan must give the same bits. Any plan
 * must resume the checkpoint of any other plan.
 */
#include "train_plans.h"

#include "hapt/rules.h"

/* Stages of `size` ranks and tensor-parallel degree `degree`, with even boundaries between blocks. */
struct arrangement {
    int ranks, stages, size[MAX_STAGES], degree[MAX_STAGES];
};
static const struct arrangement arrangements[] = {
    {2, 1, {2}, {2}},       {3, 2, {2, 1}, {2, 0}}, {3, 2, {1, 2}, {0, 2}},
    {4, 1, {4}, {4}},       {4, 1, {4}, {2}},       {4, 2, {2, 2}, {0, 2}},
    {4, 2, {2, 2}, {2, 0}}, {4, 2, {2, 2}, {2, 2}}, {4, 3, {1, 2, 1}, {0, 2, 0}},
};
enum { ARRANGEMENTS = sizeof arrangements / sizeof *arrangements };

/* The k-th arrangement for the present ranks, with boundaries at which programs can begin. false: there are no more. */
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

/* Moves boundaries to the next operators at which each stage's program can begin and end. */
static bool settle(struct shape *shape)
{
    for (int s = 0; s < shape->stages - 1; s++) {
        bool good = false;
        for (; !good && shape->end[s] < model->graph->forward_count - 1; shape->end[s] += !good) {
            good = true;
            for (int side = s; side <= s + 1; side++) {
                const int degree = shape->tensor_parallel[side] > 1 ? shape->tensor_parallel[side] : 1;
                struct hapt_sharding *sharding = NULL;
                CHECK_OK(
                    hapt_sharding_tensor_parallel(model->graph, shape->size[side] / degree, degree, &arena, &sharding));
                if (!sharding) return false;
                good = good && !sharding->not_a_boundary[shape->end[s]];
            }
        }
        if (!good || (s > 0 && shape->end[s] <= shape->end[s - 1])) return false;
    }
    return true;
}

static void check_losses(const struct shape *shape, const struct hapt_train_result *result, const char *what)
{
    const double difference = worst(result->history.loss, fp64, STEPS);
    if (!CHECK_MESSAGE(difference < 1e-5, "%s: losses differ by %g", what, difference))
        for (int s = 0; s < shape->stages; s++)
            fprintf(stderr, "  stage %d: up to operator %d on %d\n", s, shape->end[s], shape->size[s]);
    if (test_env.world_rank != 0) return;
    for (int s = 0; s < shape->stages; s++) CHECK(result->planned_bytes[s] == result->measured_bytes[s]);
}

static void tensor_parallel_trains(void)
{
    struct shape shape;
    for (int shift = 0; shift < (test_long() ? 12 : 1); shift++)
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

/* ---- programs by random cuts: each operator has any cut that it allows, and shares have random ratios ---- */

static enum hapt_status random_axis(const struct hapt_sharding *sharding, int axis_index, const struct hapt_axis *axis,
                                    double share, uint64_t *random, struct hapt_axis_program **program)
{
    const struct hapt_graph *graph = sharding->graph;
    struct hapt_cut *chosen = hapt_arena_alloc(&arena, (size_t)graph->op_count, sizeof *chosen), cut[64];
    struct hapt_grains *grains = NULL;
    HAPT_TRY(hapt_grains_find(graph, &arena, &grains));
    for (int o = 0; o < graph->op_count; o++) {
        struct hapt_rule rule;
        int count = hapt_rule_cuts(graph, o, axis_index, axis, grains, cut, 64);
        if (count > 64) count = 64;
        const int pick = (int)(hapt_random_next(random) % (uint64_t)count);
        const bool cuts = hapt_random_unit(random) < share && cut[pick].letter != HAPT_CUT_PARTIAL;
        if (!cuts || hapt_rule_of_cut(sharding, axis_index, axis, o, cut[pick], &rule) != HAPT_OK) continue;
        chosen[o] = cut[pick];
    }
    hapt_fail_reset();
    HAPT_TRY(hapt_axis_program_complete(sharding, axis_index, axis, chosen, &arena, program));
    for (int i = 0; i < (*program)->count; i++) {
        struct hapt_axis_instruction *instruction = &(*program)->instruction[i];
        if (instruction->op < 0 && instruction->kind == HAPT_COLLECTIVE_ALL_GATHER && hapt_random_next(random) % 2)
            instruction->kind = HAPT_COLLECTIVE_GROUPED_BROADCAST;
    }
    return HAPT_OK;
}

/* A layout over n x m ranks. The number of forced cuts is reduced until a program exists. */
static struct hapt_stage_layout *random_layout(const int *size, uint64_t *random)
{
    for (double share = 1; share > 0.01; share *= 0.9) {
        struct hapt_stage_layout *layout = hapt_arena_alloc(&arena, 1, sizeof *layout);
        struct hapt_sharding *sharding = NULL;
        enum hapt_status status = hapt_sharding_trivial(model->graph, &arena, &sharding);
        for (int a = 0; a < HAPT_MESH_AXES && status == HAPT_OK; a++) {
            struct hapt_axis_program *program = NULL;
            double *ratio = hapt_arena_alloc(&arena, (size_t)size[a], sizeof *ratio), sum = 0;
            for (int r = 0; r < size[a]; r++) sum += ratio[r] = 0.2 + hapt_random_unit(random);
            for (int r = 0; r < size[a]; r++) ratio[r] /= sum;
            layout->axis[a] = (struct hapt_axis){.size = size[a]};
            if (hapt_random_next(random) % 4) layout->axis[a].ratio_count = 1, layout->axis[a].ratio = ratio;
            if (size[a] > 1) status = random_axis(sharding, a, &layout->axis[a], share, random, &program);
            layout->program[a] = program;
            if (status == HAPT_OK)
                status = hapt_sharding_apply(sharding, a, &layout->axis[a], program, &arena, &sharding);
        }
        if (status == HAPT_OK) return layout;
        hapt_fail_reset();
    }
    return NULL;
}

static int count_moves(const struct shape *shape, enum hapt_collective_kind kind)
{
    struct hapt_sharding *sharding = NULL;
    int count = 0;
    CHECK_OK(hapt_stage_layout_apply(shape->layout[0], model->graph, &arena, &sharding));
    for (int o = 0; sharding && o < sharding->graph->op_count; o++)
        count += hapt_op_type_at(sharding->graph->op[o].type)->collective == kind;
    return count;
}

static void random_layouts_train(void)
{
    struct hapt_model *const usual = model;
    const int ranks = test_env.world_size, rounds = test_long() ? 100 : ranks == 1 ? 0 : 3;
    int moves[HAPT_COLLECTIVE_COUNT] = {0}, trained = 0;
    uint64_t random = 12345;
    model = make_model_of_rows("fp32", "yes", REFERENCE, "8"); /* enough rows for uneven shares */
    for (int round = 0; round < rounds; round++) {
        const int sizes[3][2] = {{ranks, 1}, {1, ranks}, {2, 2}}, *size = sizes[round % (ranks == 4 ? 3 : 2)];
        struct shape shape = one_rank();
        char name[32];
        shape.size[0] = ranks;
        shape.microbatches = 1;
        shape.layout[0] = random_layout(size, &random);
        if (!CHECK_MESSAGE(shape.layout[0] != NULL, "round %d: no layout", round)) continue;
        for (int k = 1; k < HAPT_COLLECTIVE_COUNT; k++) moves[k] += count_moves(&shape, (enum hapt_collective_kind)k);
        snprintf(name, sizeof name, "random%d", round);
        struct hapt_train_result *result = train(&shape, make_config(name, reference_options), NULL);
        if (!result) continue;
        check_losses(&shape, result, name);
        check_weights(hapt_arena_printf(&arena, "%s/%s", folder, name));
        trained++;
    }
    CHECK(trained == rounds);
    if (ranks > 1)
        for (int k = 1; k < HAPT_COLLECTIVE_COUNT; k++) CHECK_MESSAGE(moves[k] > 0, "no collective of kind %d ran", k);
    model = usual;
}

/* ---- any plan resumes the checkpoint of any other plan ---- */

static void plans_resume_each_other(void)
{
    const char *part[64];
    int count = 0;
    struct shape shape;
    for (; reference_options[count]; count++) part[count] = reference_options[count];
    part[count] = "--stop-after";
    part[count + 3] = NULL;
    for (int k = 0, other = 1; arrange(k, 0, &shape); k++, other = 1) {
        struct shape next;
        struct hapt_checkpoint *checkpoint = NULL;
        if (!arrange(k + other, 0, &next)) next = one_rank();
        if (!settle(&shape) || !settle(&next)) continue;
        part[count + 1] = "7";
        part[count + 2] = NULL;
        if (!train(&shape, make_config("first", part), NULL)) return;
        part[count + 2] = "--resume";
        part[count + 1] = "20";
        struct hapt_config *config = make_config("first", part);
        CHECK_OK(hapt_train_resume(&test_env, config, model, &arena, &checkpoint));
        if (!CHECK(checkpoint && checkpoint->step == 7)) return;
        struct hapt_train_result *rest = train(&next, config, checkpoint);
        if (!rest) return;
        CHECK(rest->first_step == 7 && rest->history.count == STEPS);
        check_losses(&next, rest, "resumed");
        check_weights(hapt_arena_printf(&arena, "%s/first", folder));
    }
}

static long host_saves;

/* ---- sharded optimizer state: the same sums and updates, each on one rank ---- */

static const char *const *with(const char *const *options, const char *name, const char *value)
{
    static const char *extended[64];
    int count = 0;
    for (; options[count]; count++) extended[count] = options[count];
    extended[count] = name;
    extended[count + 1] = value;
    extended[count + 2] = NULL;
    return extended;
}

/* Weights and optimizer state of two runs, bit for bit. */
static void check_same_state(const struct hapt_train_result *one, const struct hapt_train_result *other)
{
    struct hapt_checkpoint *a = NULL, *b = NULL;
    CHECK_OK(hapt_checkpoint_find(&test_env, one->checkpoint, &arena, &a));
    CHECK_OK(hapt_checkpoint_find(&test_env, other->checkpoint, &arena, &b));
    for (int t = 0; a && b && t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t elements = hapt_tensor_elements(tensor);
        float *x = hapt_arena_alloc(&arena, (size_t)elements, 4), *y = hapt_arena_alloc(&arena, (size_t)elements, 4);
        for (int state = -1; state < 2; state++) {
            long wrong = 0;
            CHECK_OK(hapt_checkpoint_read(a, tensor->name, state, elements, x));
            CHECK_OK(hapt_checkpoint_read(b, tensor->name, state, elements, y));
            for (int64_t i = 0; i < elements; i++) wrong += x[i] != y[i];
            CHECK_MESSAGE(wrong == 0, "%s (state %d) differs", tensor->name, state);
        }
    }
}

static void check_sharded_state(const struct shape *shape)
{
    struct hapt_train_result *whole =
        train(shape, make_config("state", with(reference_options, "--sharded-optimizer", "no")), NULL);
    struct hapt_train_result *sliced =
        train(shape, make_config("slices", with(reference_options, "--sharded-optimizer", "yes")), NULL);
    if (!whole || !sliced) return;
    CHECK(!memcmp(whole->history.loss, sliced->history.loss, sizeof fp64));
    /* The squares of the norm are added in another order. */
    CHECK(worst(sliced->history.gradient_norm, whole->history.gradient_norm, STEPS) < 1e-12);
    for (int s = 0; s < shape->stages && test_env.world_rank == 0; s++) {
        CHECK(sliced->planned_bytes[s] == sliced->measured_bytes[s]);
        if (shape->size[s] > 1 && shape->tensor_parallel[s] < shape->size[s])
            CHECK(sliced->planned_bytes[s] < whole->planned_bytes[s]);
    }
    check_same_state(whole, sliced);
}

/* Optimizer state on the host, whole and sharded, with updates on the device and on the host: the same bits in less
 * device memory. */
static void check_host_state(const struct shape *shape)
{
    for (int sharded = 0; sharded < 2; sharded++) {
        const char *const *options = with(reference_options, "--sharded-optimizer", sharded ? "yes" : "no");
        struct hapt_train_result *here = train(shape, make_config("device", options), NULL);
        for (int update = 0; here && update < 2; update++) {
            struct shape away = *shape;
            away.host_state = true;
            away.host_update = update;
            struct hapt_train_result *there = train(&away, make_config("host", options), NULL);
            if (!there) return;
            CHECK(!memcmp(here->history.loss, there->history.loss, sizeof fp64));
            CHECK(!memcmp(here->history.gradient_norm, there->history.gradient_norm, sizeof fp64));
            for (int s = 0; s < shape->stages && test_env.world_rank == 0; s++) {
                CHECK(there->planned_bytes[s] == there->measured_bytes[s]);
                CHECK(there->planned_bytes[s] <= here->planned_bytes[s]);
                host_saves += there->planned_bytes[s] < here->planned_bytes[s];
            }
            check_same_state(here, there);
        }
    }
}

/* In bf16 the master weights are on the host, too. */
static void host_state_changes_no_bit(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct shape shape;
        const long before = host_saves;
        CHECK_OK(hapt_model_compute_in(model, bf16 ? HAPT_PRECISION_BF16 : HAPT_PRECISION_FP32));
        for (int k = 0; arrange(k, 0, &shape); k++)
            if ((test_long() || k % 6 == 3 * bf16) && settle(&shape)) check_host_state(&shape);
        shape = one_rank();
        check_host_state(&shape);
        if (test_env.world_rank == 0) CHECK(host_saves > before);
    }
    CHECK_OK(hapt_model_compute_in(model, HAPT_PRECISION_FP32));
}

/* In bf16 master weights have slices, too. */
static void sharded_state_changes_no_bit(void)
{
    struct hapt_model *const usual = model;
    struct shape shape;
    for (int bf16 = 0; bf16 < 2; bf16++) {
        CHECK_OK(hapt_model_compute_in(model, bf16 ? HAPT_PRECISION_BF16 : HAPT_PRECISION_FP32));
        for (int k = 0; arrange(k, 0, &shape); k++)
            if ((test_long() || k % (bf16 ? 6 : 3) == 0) && settle(&shape)) check_sharded_state(&shape);
    }
    CHECK_OK(hapt_model_compute_in(model, HAPT_PRECISION_FP32));
    const int ranks = test_env.world_size;
    if (ranks > 1) { /* uneven slices */
        const int size[2] = {ranks, 1};
        uint64_t random = 77;
        shape = one_rank();
        shape.size[0] = ranks;
        shape.microbatches = 1;
        model = make_model_of_rows("fp32", "yes", REFERENCE, "8");
        shape.layout[0] = random_layout(size, &random);
        if (shape.layout[0]) check_sharded_state(&shape);
        model = usual;
        shape = one_rank();
        shape.size[0] = 2;
        check_sharded_state(&shape);
    }
}

/* The same plan continues bit by bit. */
static void resume_is_bitwise(void)
{
    const char *part[64];
    int count = 0;
    struct shape shape;
    for (; reference_options[count]; count++) part[count] = reference_options[count];
    part[count] = "--stop-after";
    part[count + 1] = "9";
    part[count + 2] = part[count + 3] = NULL;
    for (int k = 0; arrange(k, 0, &shape); k++) {
        struct hapt_checkpoint *checkpoint = NULL;
        if (!settle(&shape)) continue;
        struct hapt_train_result *whole = train(&shape, make_config("whole", reference_options), NULL);
        part[count + 1] = "9";
        part[count + 2] = NULL;
        if (!whole || !train(&shape, make_config("halves", part), NULL)) return;
        part[count + 1] = "20";
        part[count + 2] = "--resume";
        struct hapt_config *config = make_config("halves", part);
        CHECK_OK(hapt_train_resume(&test_env, config, model, &arena, &checkpoint));
        if (!CHECK(checkpoint && checkpoint->step == 9)) return;
        struct hapt_train_result *rest = train(&shape, config, checkpoint);
        if (!rest) return;
        CHECK(!memcmp(rest->history.loss, whole->history.loss, sizeof fp64));
        CHECK(!memcmp(rest->history.gradient_norm, whole->history.gradient_norm, sizeof fp64));
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    if (model) {
        RUN(tensor_parallel_trains);
        RUN(random_layouts_train);
        RUN(plans_resume_each_other);
        RUN(resume_is_bitwise);
        RUN(sharded_state_changes_no_bit);
        RUN(host_state_changes_no_bit);
    }
    clean_up();
    return test_finish();
}
