/*
 * ranks: 4; HAPT_LONG: 2 3
 * Runs beside others: it measures no time.
 * Random programs of every family are trained and compared with one rank.
 *
 * Synthesised programs have random costs, ratios, forced cuts and memory, on one or two axes, so that any collective
 * and replicated gradients can be optimal. Completed programs have random cuts. They run in one stage and in two; on 4
 * ranks also on 2 x 2 with both axes synthesised together. The losses of two steps, the gradients of the first step and
 * the weights after the second must be those of one rank.
 *
 * The long campaign trains 50 synthesised programs per model on each number of ranks. It requires that programs of
 * every kind occur for each model.
 */
#include "cuts.h"

#include "train_plans.h"

#include "random_programs.h"

#define ROUND_STEPS 2
/* fp32 sums in another order. A gradient may be a small remainder of large terms, so its error is relative to the
 * largest gradient of the model. Adam's epsilon is large, so that updates are proportional to gradients. */
#define LOSS_TOLERANCE 1e-5
#define GRADIENT_TOLERANCE 2e-4
#define WEIGHT_TOLERANCE 1e-3
#define NOISE 2e-6 /* relative to the largest gradient; relative to a weight of 1 */

static const char *const family_options[][16] = {
    {"gpt", "--layers", "2", "--hidden", "64", "--heads", "4", "--sequence", "64", "--vocab", "256"},
    {"bert", "--layers", "2", "--hidden", "48", "--heads", "4", "--sequence", "32", "--vocab", "120"},
    {"bert-moe", "--layers", "2", "--hidden", "32", "--heads", "4", "--sequence", "24", "--vocab", "96", "--experts",
     "5", "--top-k", "2"},
    {"llama", "--layers", "2", "--hidden", "64", "--heads", "4", "--kv-heads", "2", "--ffn", "160", "--sequence", "32",
     "--vocab", "128"},
    {"vit", "--layers", "2", "--hidden", "48", "--heads", "4", "--image", "16", "--patch", "4", "--classes", "7"},
    {"vgg", "--hidden", "64", "--image", "16", "--width", "8", "--classes", "7"},
    {"resnet", "--image", "32", "--width", "8", "--stages", "2", "--classes", "7"},
};
enum { FAMILIES = sizeof family_options / sizeof *family_options };

static const char *data_file;

static struct hapt_model *build_family(int family)
{
    const char *name = family_options[family][0],
               *words[32] = {"hapt", "model", name, "--microbatch", "4", "--dtype", "fp32"};
    const char *path = hapt_arena_printf(&arena, "%s/%s.h5", folder, name);
    struct hapt_config *config = NULL;
    struct hapt_model *made = NULL;
    int count = 7;
    for (int w = 1; family_options[family][w]; w++) words[count++] = family_options[family][w];
    data_file = hapt_arena_printf(&arena, "tests/data/%s-small.h5", name);
    if (test_env.world_rank == 0) {
        CHECK_OK(hapt_config_parse(count, (char **)words, &arena, &config));
        CHECK_OK(hapt_model_build(name, config, &arena, &made));
        CHECK_OK(hapt_model_save(made, data_file, NULL, path));
    }
    MPI_Barrier(test_env.world);
    made = NULL;
    CHECK_OK(hapt_model_load(path, &arena, &made));
    return made;
}

/* ---- programs at random ---- */

/* Counts of the random draws, for the statistics. */
struct drawn {
    struct shape shape;
    const struct hapt_sharding *sharding[2]; /* by stage */
    bool synthesise;
    int forced, uneven,
        axes; /* operators with a forced cut; axes with ratios; the largest number of sharded axes of a stage */
};

/* A layout of a stage of `ranks`, or NULL. */
static struct hapt_stage_layout *draw_layout(int ranks, uint64_t *random, struct drawn *drawn,
                                             struct hapt_sharding **sharding)
{
    struct hapt_stage_layout *layout = hapt_arena_alloc(&arena, 1, sizeof *layout);
    const int shape = (int)(hapt_random_next(random) % 3);
    int axes = 0;
    const int size[] = {ranks == 4 && shape == 0 ? 2
                        : shape == 1             ? 1
                                                 : ranks,
                        ranks == 4 && shape == 0 ? 2
                        : shape == 1             ? ranks
                                                 : 1};
    CHECK_OK(hapt_sharding_trivial(model->graph, &arena, sharding));
    for (int a = 0; a < HAPT_MESH_AXES; a++) {
        struct cuts_axis *axis = hapt_arena_alloc(&arena, 1, sizeof *axis);
        struct hapt_axis_program *program = NULL;
        struct hapt_sharding *made = NULL;
        cuts_random_axis(axis, size[a], random);
        if (size[a] > 1) {
            int forced = 0;
            program = drawn->synthesise ? synthesised(*sharding, a, &axis->axis, random, &forced)
                                        : random_cuts(*sharding, a, &axis->axis, random);
            if (!program) return NULL;
            drawn->forced += forced;
            drawn->uneven += axis->axis.ratio != NULL;
            axes++;
        } else {
            axis->axis = (struct hapt_axis){.size = 1};
        }
        CHECK_OK(hapt_sharding_apply(*sharding, a, &axis->axis, program, &arena, &made));
        if (!made) return NULL;
        layout->axis[a] = axis->axis;
        layout->program[a] = program;
        *sharding = made;
    }
    if (axes > drawn->axes) drawn->axes = axes;
    return layout;
}

/* Both axes of 2 x 2 ranks by hapt_synthesise_mesh. */

static double mesh_compute_s(const void *context, const struct hapt_spmd_work *work, double beside)
{
    return random_compute_s(context, work, 0) * beside;
}

static double mesh_collective_s(const void *context, int axis, enum hapt_collective_kind kind, double bytes,
                                double largest_share)
{
    return (axis == 0 ? 2 : 1) * random_collective_s(context, kind, bytes, largest_share);
}

static bool draw_mesh(uint64_t *random, struct drawn *drawn)
{
    const unsigned methods[] = {HAPT_MESH_METHOD_OUTER_FIRST, HAPT_MESH_METHOD_INNER_FIRST};
    struct hapt_stage_layout *layout = hapt_arena_alloc(&arena, 1, sizeof *layout);
    struct hapt_sharding *made = NULL;
    struct hapt_mesh_report report;
    struct random_costs draw;
    draw_costs(random, &draw);
    const struct hapt_mesh_costs costs = {
        .context = &draw, .compute_s = mesh_compute_s, .collective_s = mesh_collective_s};
    const struct hapt_mesh_options options = {.microbatches = 1 + (int)(hapt_random_next(random) % 8),
                                              .most_states = 500,
                                              .methods = methods[hapt_random_next(random) % 2]};
    for (int a = 0; a < HAPT_MESH_AXES; a++) layout->axis[a] = (struct hapt_axis){.size = 2};
    CHECK_OK(
        hapt_synthesise_mesh(model->graph, layout->axis, &costs, &options, &arena, layout->program, &made, &report));
    if (!made) return false;
    struct shape *shape = &drawn->shape;
    *drawn = (struct drawn){.synthesise = true, .sharding = {made}, .axes = HAPT_MESH_AXES};
    *shape = one_rank();
    shape->microbatches = 2;
    shape->size[0] = test_env.world_size;
    shape->end[0] = model->graph->forward_count;
    shape->layout[0] = layout;
    return strncmp(report.outer_by, "synthesised", 11) == 0 && strncmp(report.inner_by, "synthesised", 11) == 0;
}

/* One stage on all ranks, or two stages, cut where both have a program. */
static bool draw_shape(bool synthesise, uint64_t *random, struct drawn *drawn)
{
    const int ranks = test_env.world_size, ops = model->graph->forward_count;
    struct hapt_sharding *sharding[2] = {NULL, NULL};
    struct shape *shape = &drawn->shape;
    *drawn = (struct drawn){.synthesise = synthesise};
    *shape = one_rank();
    shape->microbatches = 2;
    if (ranks > 2 && hapt_random_next(random) % 4 == 0) shape->stages = 2;
    shape->size[0] = shape->stages == 1 ? ranks : 1 + (int)(hapt_random_next(random) % (uint64_t)(ranks - 1));
    shape->size[1] = ranks - shape->size[0];
    for (int s = 0; s < shape->stages; s++) {
        shape->end[s] = ops;
        if (shape->size[s] == 1)
            CHECK_OK(hapt_sharding_trivial(model->graph, &arena, &sharding[s]));
        else
            shape->layout[s] = draw_layout(shape->size[s], random, drawn, &sharding[s]);
        if (shape->size[s] > 1 && !shape->layout[s]) return false;
    }
    for (int s = 0; s < shape->stages; s++) drawn->sharding[s] = sharding[s];
    if (shape->stages == 1) return hapt_sharding_allows(sharding[0], 0, ops);
    const int from = (int)(hapt_random_next(random) % (uint64_t)ops);
    for (int k = 0; k < ops; k++) {
        const int cut = (from + k) % ops;
        if (cut == 0 || !hapt_sharding_allows(sharding[0], 0, cut) || !hapt_sharding_allows(sharding[1], cut, ops))
            continue;
        shape->end[0] = cut;
        return true;
    }
    return false;
}

/* ---- the result of one rank, compared with others ---- */

static const char *const round_options[] = {"--steps",
                                            "3",
                                            "--optimizer",
                                            "adamw",
                                            "--learning-rate",
                                            "1e-2",
                                            "--lr-schedule",
                                            "constant",
                                            "--epsilon",
                                            "1e-3",
                                            "--weight-decay",
                                            "0.1",
                                            "--clip-norm",
                                            "0",
                                            "--checkpoint-every",
                                            "2",
                                            "--keep",
                                            "3",
                                            "--data",
                                            NULL,
                                            "--sharded-optimizer",
                                            NULL,
                                            NULL};

struct outcome {
    double loss[ROUND_STEPS], norm[ROUND_STEPS];
    float **gradient, **weight; /* [tensor_count]; rank 0: Adam's first moment after a step, a tenth of the gradient */
};

static bool run_shape(const struct shape *shape, const char *name, bool sharded_state, struct outcome *outcome)
{
    const char *options[sizeof round_options / sizeof *round_options];
    struct hapt_checkpoint *first = NULL, *last = NULL;
    memcpy(options, round_options, sizeof options);
    options[sizeof options / sizeof *options - 4] = data_file;
    options[sizeof options / sizeof *options - 2] = sharded_state ? "yes" : "no";
    struct hapt_train_result *result = train(shape, make_config(name, options), NULL);
    if (!result) return false;
    for (int s = 0; s < ROUND_STEPS; s++) {
        outcome->loss[s] = result->history.loss[s];
        outcome->norm[s] = result->history.gradient_norm[s];
    }
    for (int s = 0; test_env.world_rank == 0 && s < shape->stages; s++)
        CHECK_MESSAGE(result->planned_bytes[s] == result->measured_bytes[s], "%s: stage %d takes %g bytes, planned %g",
                      name, s, result->measured_bytes[s], result->planned_bytes[s]);
    CHECK_OK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/%s/checkpoints/step-00000001", folder, name),
                                  &arena, &first));
    CHECK_OK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/%s/checkpoints/step-00000002", folder, name),
                                  &arena, &last));
    if (!first || !last) return false;
    if (test_env.world_rank != 0) return true;
    outcome->gradient = hapt_arena_alloc(&arena, (size_t)model->graph->tensor_count, sizeof *outcome->gradient);
    outcome->weight = hapt_arena_alloc(&arena, (size_t)model->graph->tensor_count, sizeof *outcome->weight);
    for (int t = 0; t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        outcome->gradient[t] = hapt_arena_alloc(&arena, (size_t)count, sizeof(float));
        outcome->weight[t] = hapt_arena_alloc(&arena, (size_t)count, sizeof(float));
        CHECK_OK(hapt_checkpoint_read(first, tensor->name, 0, count, outcome->gradient[t]));
        CHECK_OK(hapt_checkpoint_read(last, tensor->name, -1, count, outcome->weight[t]));
    }
    return true;
}

static double norm_of(const float *a, const float *b, int64_t count)
{
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += pow((double)a[i] - (b ? (double)b[i] : 0), 2);
    return sqrt(sum);
}

struct worst {
    double loss, gradient, weight;
};

static void compare(const struct outcome *one, const struct outcome *its, const char *what, struct worst *worst_of)
{
    const double loss = worst(its->loss, one->loss, ROUND_STEPS);
    CHECK_MESSAGE(loss <= LOSS_TOLERANCE, "%s: losses differ by %g", what, loss);
    CHECK_MESSAGE(worst(its->norm, one->norm, ROUND_STEPS) <= GRADIENT_TOLERANCE, "%s: norms differ by %g", what,
                  worst(its->norm, one->norm, ROUND_STEPS));
    worst_of->loss = fmax(worst_of->loss, loss);
    for (int t = 0; test_env.world_rank == 0 && t < model->graph->tensor_count; t++) {
        const struct hapt_tensor *tensor = &model->graph->tensor[t];
        if (tensor->kind != HAPT_TENSOR_PARAMETER) continue;
        const int64_t count = hapt_tensor_elements(tensor);
        float *initial = hapt_arena_alloc(&arena, (size_t)count, sizeof *initial);
        CHECK_OK(hapt_model_initial(model, t, initial));
        const double gradient =
            norm_of(its->gradient[t], one->gradient[t], count) /
            (norm_of(one->gradient[t], NULL, count) + 0.1 * NOISE / GRADIENT_TOLERANCE * one->norm[0]);
        const double weight = norm_of(its->weight[t], one->weight[t], count) /
                              (norm_of(one->weight[t], initial, count) +
                               NOISE / WEIGHT_TOLERANCE * (norm_of(initial, NULL, count) + sqrt((double)count)));
        CHECK_MESSAGE(gradient <= GRADIENT_TOLERANCE, "%s: the gradient of %s differs by %g", what, tensor->name,
                      gradient);
        CHECK_MESSAGE(weight <= WEIGHT_TOLERANCE, "%s: %s differs by %g", what, tensor->name, weight);
        worst_of->gradient = fmax(worst_of->gradient, gradient);
        worst_of->weight = fmax(worst_of->weight, weight);
    }
}

/* ---- what the programs hold ---- */

/* Counts of programs of a model, in total, by kind, and by the collectives that they contain. */
struct tally {
    int synthesised, cuts, stages, axes, uneven, forced, replicated, experts, meshes;
    int with[HAPT_COLLECTIVE_COUNT];
};

/* Gradients of parameters from gathered operands: sufficient factors. */
static bool replicates(const struct hapt_sharding *sharding, int axis)
{
    const struct hapt_graph *graph = sharding->graph;
    for (int o = 0; o < graph->op_count; o++) {
        const struct hapt_op *op = &graph->op[o];
        const enum hapt_collective_kind kind = hapt_op_type_at(op->type)->collective;
        if ((kind == HAPT_COLLECTIVE_ALL_GATHER || kind == HAPT_COLLECTIVE_GROUPED_BROADCAST) &&
            op->integer[0] == axis) {
            for (int r = o + 1; r < graph->op_count; r++) {
                const struct hapt_op *reader = &graph->op[r];
                if (reader->output_count == 0 || reader->output[0] < 0 ||
                    sharding->cut[r][axis].letter != HAPT_CUT_REPLICATED || hapt_op_type_at(reader->type)->collective)
                    continue;
                bool reads = false, writes = false;
                for (int i = 0; i < reader->input_count; i++) reads = reads || reader->input[i] == op->output[0];
                for (int k = 0; k < reader->output_count; k++) {
                    const struct hapt_tensor *made = reader->output[k] >= 0 ? &graph->tensor[reader->output[k]] : NULL;
                    writes = writes || (made && made->kind == HAPT_TENSOR_GRADIENT && made->primal >= 0 &&
                                        graph->tensor[made->primal].kind == HAPT_TENSOR_PARAMETER);
                }
                if (reads && writes) return true;
            }
        }
    }
    return false;
}

/* Matrix products of experts that are sharded by expert. */
static bool places_experts(const struct hapt_sharding *sharding)
{
    for (int o = 0; o < sharding->graph->op_count; o++)
        for (int axis = 0; axis < HAPT_MESH_AXES; axis++)
            if (sharding->graph->op[o].type == hapt_op_type_find("expert_linear") &&
                sharding->cut[o][axis].letter == 'e')
                return true;
    return false;
}

static void note(const struct drawn *drawn, struct tally *tally)
{
    bool has[HAPT_COLLECTIVE_COUNT] = {false}, replicated = false, experts = false;
    for (int s = 0; s < drawn->shape.stages; s++) {
        const struct hapt_sharding *sharding = drawn->sharding[s];
        for (int o = 0; o < sharding->graph->op_count; o++)
            has[hapt_op_type_at(sharding->graph->op[o].type)->collective] = true;
        replicated = replicated || replicates(sharding, 0) || replicates(sharding, 1);
        experts = experts || places_experts(sharding);
    }
    for (int k = 0; k < HAPT_COLLECTIVE_COUNT; k++) tally->with[k] += has[k];
    tally->replicated += replicated;
    tally->experts += experts;
    tally->forced += drawn->forced > 0;
    tally->uneven += drawn->uneven > 0;
    tally->axes += drawn->axes > 1;
    tally->stages += drawn->shape.stages > 1;
    drawn->synthesise ? tally->synthesised++ : tally->cuts++;
}

static void print_tally(const char *name, const struct tally *tally)
{
    if (test_env.world_rank != 0) return;
    printf("%s on %d ranks, programs: %d synthesised (%d with forced cuts), %d of random cuts; %d in two stages, %d of "
           "two axes, %d by ratios, %d beside them of both axes together; "
           "with all-reduces %d, reduce-scatters %d, all-gathers %d, grouped broadcasts %d, all-to-alls %d, replicated "
           "gradients %d, "
           "placed experts %d\n",
           name, test_env.world_size, tally->synthesised, tally->forced, tally->cuts, tally->stages, tally->axes,
           tally->uneven, tally->meshes, tally->with[HAPT_COLLECTIVE_ALL_REDUCE],
           tally->with[HAPT_COLLECTIVE_REDUCE_SCATTER], tally->with[HAPT_COLLECTIVE_ALL_GATHER],
           tally->with[HAPT_COLLECTIVE_GROUPED_BROADCAST], tally->with[HAPT_COLLECTIVE_ALL_TO_ALL], tally->replicated,
           tally->experts);
}

/* Programs of every kind were trained. */
static void check_tally(const char *name, bool experts, const struct tally *tally)
{
    for (int k = HAPT_COLLECTIVE_ALL_REDUCE; k < HAPT_COLLECTIVE_COUNT; k++)
        CHECK_MESSAGE(tally->with[k] > 0, "%s: no program has collective %d", name, k);
    CHECK_MESSAGE(tally->replicated > 0, "%s: no program replicates the gradient of a parameter", name);
    CHECK_MESSAGE(tally->forced > 0, "%s: no synthesised program has a forced cut", name);
    CHECK_MESSAGE(tally->uneven > 0, "%s: no program shares by ratios", name);
    CHECK_MESSAGE(!experts || tally->experts > 0, "%s: no program places experts", name);
}

static void round_of_family(int family, struct tally *all)
{
    const char *name = family_options[family][0];
    const int wanted[] = {test_long() ? 8 : 1,
                          test_long() ? 20 : 1}; /* random cuts; synthesised; on each number of ranks */
    struct tally tally = {0};
    struct worst worst_of = {0};
    struct outcome one = {.weight = NULL};
    struct drawn drawn;
    model = build_family(family);
    if (!model) return;
    const struct shape alone = {.stages = 1,
                                .end = {model->graph->forward_count},
                                .size = {1},
                                .schedule = HAPT_SCHEDULE_H1F1B,
                                .microbatches = 2};
    if (!run_shape(&alone, hapt_arena_printf(&arena, "%s-one", name), false, &one)) return;
    for (int k = 0; k < 6 * wanted[1] && (tally.synthesised < wanted[1] || tally.cuts < wanted[0]); k++) {
        uint64_t random = (uint64_t)(10000 * family + 1000 * test_env.world_size + k);
        const bool synthesise = k % 2 == 0 || tally.cuts == wanted[0];
        struct outcome its = {.weight = NULL};
        char what[64];
        if (synthesise && tally.synthesised == wanted[1]) continue;
        snprintf(what, sizeof what, "%s-%d-%d", name, test_env.world_size, k);
        if (!draw_shape(synthesise, &random, &drawn)) continue;
        if (!run_shape(&drawn.shape, what, hapt_random_next(&random) % 2, &its)) continue;
        compare(&one, &its, what, &worst_of);
        note(&drawn, &tally);
    }
    const int meshes = test_env.world_size == 4 ? wanted[0] : 0;
    struct tally both = {0};
    for (int k = 0; k < 6 * meshes && both.synthesised < meshes; k++) {
        uint64_t random = (uint64_t)(500000 + 10000 * family + k);
        struct outcome its = {.weight = NULL};
        char what[64];
        snprintf(what, sizeof what, "%s-mesh-%d", name, k);
        if (!draw_mesh(&random, &drawn) || !run_shape(&drawn.shape, what, k % 2, &its)) continue;
        compare(&one, &its, what, &worst_of);
        note(&drawn, &both);
    }
    CHECK_MESSAGE(both.synthesised == meshes, "%s: only %d programs of both axes together", name, both.synthesised);
    tally.meshes = both.synthesised;
    CHECK_MESSAGE(tally.synthesised == wanted[1] && tally.cuts == wanted[0], "%s: only %d and %d programs", name,
                  tally.synthesised, tally.cuts);
    print_tally(name, &tally);
    if (test_env.world_rank == 0)
        printf("  losses within %.1e, gradients %.1e, weights %.1e\n", worst_of.loss, worst_of.gradient,
               worst_of.weight);
    if (test_long()) check_tally(name, !strcmp(name, "bert-moe"), &tally);
    for (size_t k = 0; k < sizeof tally / sizeof(int); k++) ((int *)all)[k] += ((const int *)&tally)[k];
}

static void families(void)
{
    struct tally all = {0};
    for (int family = 0; family < FAMILIES; family++) round_of_family(family, &all);
    print_tally("all", &all);
    check_tally("all", test_long(), &all);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    if (test_env.world_rank == 0) {
        snprintf(folder, sizeof folder, "/tmp/hapt-equivalence-XXXXXX");
        CHECK(mkdtemp(folder) != NULL);
    }
    MPI_Bcast(folder, (int)sizeof folder, MPI_CHAR, 0, test_env.world);
    RUN(families);
    clean_up();
    return test_finish();
}
