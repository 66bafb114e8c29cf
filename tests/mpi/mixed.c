/*
 * ranks: 3 4; HAPT_LONG: 2
 * Runs beside others: it measures no time.
 * Stages on devices of two subclusters that differ in speed, memory and links: rows by ratio, or a synthesised program
 * with uneven shards, alone and between stages of one subcluster. Losses and weights must be those of PyTorch
 * (tests/data/gpt-small.h5). The same plan again, in one piece or resumed, must give the same bits.
 */
#include "spmd_rates.h"
#include "train_plans.h"

#include "hapt/synthesis.h"

/* Stage i uses the next devices[i][c] devices of subcluster c. */
struct mixture {
    int stages, devices[MAX_STAGES][2];
    double ratio[4];
    int microbatch;
    bool synthesised; /* mixed stages run this program */
};
/* Mixed stages take the devices behind those of a subcluster's other stages, as in hapt_plan_ranks. */
static const struct mixture mixtures[] = {
    {1, {{1, 1}}, {0.75, 0.25}, 4, false},
    {1, {{1, 1}}, {0.4, 0.6}, 8, false},
    {2, {{1, 1}, {0, 1}}, {0.75, 0.25}, 4, false},
    {2, {{1, 0}, {1, 1}}, {0.5, 0.5}, 4, false},
    {1, {{2, 1}}, {0.5, 0.375, 0.125}, 8, false},
    {3, {{1, 0}, {1, 1}, {0, 1}}, {0.25, 0.75}, 4, false},
    {2, {{2, 1}, {0, 1}}, {0.5, 0.25, 0.25}, 4, false},
    {1, {{2, 2}}, {0.3, 0.3, 0.2, 0.2}, 8, false},
    {1, {{1, 1}}, {0.7, 0.3}, 2, true},
    {2, {{1, 1}, {0, 1}}, {0.75, 0.25}, 4, true},
    {1, {{2, 1}}, {0.5, 0.3, 0.2}, 2, true}, /* fewer rows than devices: other indices must be sharded */
    {1, {{2, 2}}, {0.3, 0.3, 0.25, 0.15}, 8, true},
    {2, {{2, 1}, {0, 1}}, {0.45, 0.3, 0.25}, 4, true},
};
enum { MIXTURES = sizeof mixtures / sizeof *mixtures };

static int ranks_of(const struct mixture *mixture)
{
    int ranks = 0;
    for (int s = 0; s < mixture->stages; s++) ranks += mixture->devices[s][0] + mixture->devices[s][1];
    return ranks;
}

static struct hapt_cluster *mixed_cluster(const struct mixture *mixture, bool paced)
{
    const double slowdown[2] = {1, 1.5};
    struct hapt_cluster *cluster = hapt_arena_alloc(&arena, 1, sizeof *cluster);
    int *of_rank = hapt_arena_alloc(&arena, (size_t)test_env.world_size, sizeof *of_rank), rank = 0;
    *cluster = (struct hapt_cluster){.count = 2,
                                     .subcluster = hapt_arena_alloc(&arena, 2, sizeof *cluster->subcluster),
                                     .link = hapt_arena_alloc(&arena, 4, sizeof *cluster->link),
                                     .subcluster_of_rank = of_rank,
                                     .rank_count = test_env.world_size};
    for (int c = 0; c < 2; c++) {
        struct hapt_subcluster *subcluster = &cluster->subcluster[c];
        int count = 0, *ranks;
        for (int s = 0; s < mixture->stages; s++) count += mixture->devices[s][c];
        ranks = hapt_arena_alloc(&arena, (size_t)count, sizeof *ranks);
        *subcluster = (struct hapt_subcluster){.nodes = 1, .devices_per_node = count, .ranks = ranks};
        snprintf(subcluster->name, sizeof subcluster->name, "%s", c ? "slow" : "fast");
        subcluster->device = (struct hapt_device_spec){.name = "cpu",
                                                       .backend = "cpu",
                                                       .memory_bytes = c ? 5e8 : 1e9,
                                                       .memory_capped = true,
                                                       .slowdown = slowdown[c]};
        for (int r = 0; r < count; r++) {
            of_rank[rank] = c;
            ranks[r] = rank++;
        }
    }
    for (int l = 0; l < 4; l++)
        cluster->link[l] =
            (struct hapt_link){.bandwidth = l == 0 || l == 3 ? 1e9 : 1e8, .latency = 1e-4, .paced = paced};
    return cluster;
}

static void mix_stage(struct hapt_plan_stage *stage, const int *devices, const double *ratio)
{
    double *share = hapt_arena_alloc(&arena, (size_t)(devices[0] + devices[1]), sizeof *share);
    CHECK_OK(hapt_plan_stage_parts(stage, 2, &arena));
    for (int c = 0; c < 2; c++) {
        stage->submesh->subcluster[c] = c;
        stage->submesh->devices[c] = devices[c];
        stage->submesh->part_name[c] = c ? "slow" : "fast";
        stage->part_parameter_bytes[c] = stage->part_activation_bytes[c] = 1;
        stage->submesh->device_memory_bytes[c] = c ? 5e8 : 1e9;
    }
    for (int d = 0; d < devices[0] + devices[1]; d++) share[d] = ratio[d];
    stage->layout = (struct hapt_layout){.kind = HAPT_LAYOUT_ROWS, .tensor_parallel = 1, .ratio = share};
    stage->submesh->devices_per_node = devices[0] + devices[1];
    snprintf(stage->submesh->name, sizeof stage->submesh->name, "fast+slow");
}

/* Shards the dense layers: the first of each pair by columns, the second by rows. Synthesis chooses the rest. */
static const struct hapt_stage_layout *synthesise(int devices, const double *ratio)
{
    static const double flops_per_s[4] = {2e9, 2e9, 1e9, 1e9}, bytes_per_s[4] = {2e8, 2e8, 1e8, 1e8};
    const struct spmd_rates rates = {.size = devices,
                                     .flops_per_s = flops_per_s,
                                     .bytes_per_s = bytes_per_s,
                                     .latency_s = 1e-6,
                                     .bandwidth_bytes_per_s = 1e10};
    static const struct hapt_cut columns = {.letter = 'o'}, rows = {.letter = 'i'};
    const struct hapt_cut **forced = hapt_arena_alloc(&arena, (size_t)model->graph->op_count, sizeof *forced);
    const struct hapt_synthesis_options options = {.microbatches = 1, .forced = forced};
    struct hapt_stage_layout *layout = hapt_arena_alloc(&arena, 1, sizeof *layout);
    struct hapt_axis_program *program = hapt_arena_alloc(&arena, 1, sizeof *program);
    struct hapt_spmd_costs costs;
    struct hapt_sharding *sharding;
    int kind[4];
    for (int o = 0; o < model->graph->forward_count; o++) {
        if (strstr(model->graph->op[o].name, "mlp.c_fc")) forced[o] = &columns;
        if (strstr(model->graph->op[o].name, "mlp.c_proj")) forced[o] = &rows;
    }
    *layout = (struct hapt_stage_layout){.axis = {{.size = devices, .ratio_count = 1, .ratio = ratio}, {.size = 1}},
                                         .name = "synthesised"};
    layout->program[0] = program;
    spmd_rates_costs(&rates, kind, &costs);
    CHECK_OK(hapt_sharding_trivial(model->graph, &arena, &sharding));
    CHECK_OK(hapt_synthesise(sharding, 0, &layout->axis[0], &costs, &options, &arena, program, NULL));
    return layout;
}

/* Many weights are sharded, and the shards are uneven. */
static void check_model_parallel(const struct hapt_stage_layout *layout)
{
    struct hapt_sharding *sharding, *last;
    const int place[HAPT_MESH_AXES] = {layout->axis[0].size - 1, 0};
    double whole = 0, first = 0, least = 0;
    CHECK_OK(hapt_stage_layout_apply(layout, model->graph, &arena, &sharding));
    CHECK_OK(hapt_sharding_at(sharding, place, &arena, &last));
    for (int t = 0; t < model->graph->tensor_count; t++) {
        if (model->graph->tensor[t].kind != HAPT_TENSOR_PARAMETER) continue;
        whole += (double)hapt_tensor_elements(&model->graph->tensor[t]);
        first += (double)hapt_tensor_elements(&sharding->shard->tensor[t]);
        least += (double)hapt_tensor_elements(&last->shard->tensor[t]);
    }
    CHECK_MESSAGE(first < 0.9 * whole && least < first, "devices hold %g and %g of %g weights", first, least, whole);
}

static struct hapt_plan *mixed_plan(const struct mixture *mixture, const double *ratio)
{
    struct shape shape = {
        .stages = mixture->stages, .schedule = HAPT_SCHEDULE_H1F1B, .microbatches = 8 / mixture->microbatch};
    const int ops = model->graph->forward_count;
    for (int s = 0; s < mixture->stages; s++) {
        shape.end[s] = ops * (s + 1) / mixture->stages;
        shape.size[s] = mixture->devices[s][0] + mixture->devices[s][1];
    }
    struct hapt_plan *plan = make_plan(&shape);
    for (int s = 0; s < mixture->stages; s++) {
        struct hapt_plan_stage *stage = &plan->stage[s];
        stage->submesh->subcluster[0] = mixture->devices[s][0] ? 0 : 1;
        snprintf(stage->submesh->name, sizeof stage->submesh->name, "%s", mixture->devices[s][0] ? "fast" : "slow");
        stage->device_memory_bytes = mixture->devices[s][0] ? 1e9 : 5e8;
        if (!mixture->devices[s][0] || !mixture->devices[s][1]) continue;
        mix_stage(stage, mixture->devices[s], ratio);
        if (!mixture->synthesised) continue;
        stage->layout.kind = HAPT_LAYOUT_PROGRAM;
        stage->layout.number = 1;
        stage->layout.program = synthesise(stage->submesh->devices_per_node, ratio);
        check_model_parallel(stage->layout.program);
    }
    CHECK_OK(hapt_plan_check(plan));
    return plan;
}

/* A step of the reference has 8 rows. */
static void load_model(int microbatch)
{
    struct hapt_config *config = NULL;
    struct hapt_model *made = NULL;
    char rows[16];
    snprintf(rows, sizeof rows, "%d", microbatch);
    const char *argv[] = {
        "hapt", "model",   "gpt", "--layers",     "2",  "--hidden", "64",   "--heads",           "4",  "--sequence",
        "64",   "--vocab", "256", "--microbatch", rows, "--dtype",  "fp32", "--tied-embeddings", "yes"};
    const char *path = hapt_arena_printf(&arena, "%s/rows-%d.h5", folder, microbatch);
    if (test_env.world_rank == 0) {
        CHECK_OK(hapt_config_parse((int)(sizeof argv / sizeof *argv), (char **)argv, &arena, &config));
        CHECK_OK(hapt_model_build("gpt", config, &arena, &made));
        CHECK_OK(hapt_model_save(made, REFERENCE, NULL, path));
    }
    MPI_Barrier(test_env.world);
    CHECK_OK(hapt_model_load(path, &arena, &model));
}

static struct hapt_train_result *run(const struct mixture *mixture, bool paced, const char *name,
                                     const char *stop_after, const struct hapt_checkpoint *checkpoint)
{
    const char *options[40] = {NULL};
    struct hapt_train_result *result = NULL;
    int count = 0;
    while (reference_options[count]) {
        options[count] = reference_options[count];
        count++;
    }
    if (stop_after) {
        options[count++] = "--stop-after";
        options[count++] = stop_after;
    }
    CHECK_OK(hapt_train_run(&test_env, mixed_cluster(mixture, paced), model, mixed_plan(mixture, mixture->ratio),
                            checkpoint, make_config(name, options), NULL, &arena, &result));
    return result;
}

static void check_resumed(const struct mixture *mixture, const char *name, const struct hapt_train_result *whole)
{
    struct hapt_checkpoint *checkpoint = NULL;
    const char *path = hapt_arena_printf(&arena, "%s/half-%s", folder, name),
               *half = hapt_arena_printf(&arena, "half-%s", name);
    if (!run(mixture, false, half, "7", NULL)) return;
    CHECK_OK(hapt_checkpoint_find(&test_env, path, &arena, &checkpoint));
    if (!checkpoint) return;
    CHECK(checkpoint->step == 7);
    for (int s = 0; s < mixture->stages; s++) {
        const struct hapt_plan_stage *stage = &checkpoint->plan->stage[s];
        const bool mixed = hapt_plan_is_mixed(stage);
        if (!CHECK(mixed == (mixture->devices[s][0] && mixture->devices[s][1])) || !mixed) continue;
        for (int d = 0; d < stage->submesh->devices_per_node; d++) CHECK(stage->layout.ratio[d] == mixture->ratio[d]);
    }
    const struct hapt_train_result *rest = run(mixture, false, half, NULL, checkpoint);
    if (!rest) return;
    CHECK(rest->first_step == 7 && rest->history.count == STEPS);
    CHECK(!memcmp(rest->history.loss, whole->history.loss, sizeof fp64));
}

/* The checkpoint of a synthesised program is resumed by rows, and the other way round. */
static void check_crossed(const struct mixture *mixture, const char *name)
{
    for (int side = 0; side < 2; side++) {
        struct mixture half = *mixture, rest = *mixture;
        struct hapt_checkpoint *checkpoint = NULL;
        const char *folder_name = hapt_arena_printf(&arena, "crossed-%d-%s", side, name);
        half.synthesised = side == 0;
        rest.synthesised = side == 1;
        if (mixture->microbatch < half.devices[0][0] + half.devices[0][1] || !run(&half, false, folder_name, "9", NULL))
            continue;
        CHECK_OK(hapt_checkpoint_find(&test_env, hapt_arena_printf(&arena, "%s/%s", folder, folder_name), &arena,
                                      &checkpoint));
        if (!checkpoint) continue;
        const struct hapt_train_result *result = run(&rest, false, folder_name, NULL, checkpoint);
        if (!result || !CHECK(result->first_step == 9 && result->history.count == STEPS)) continue;
        const double difference = worst(result->history.loss, fp64, STEPS);
        CHECK_MESSAGE(difference < 1e-5, "%s: losses differ by %g", folder_name, difference);
    }
}

static void mixed_stages_train(void)
{
    for (int m = 0; m < MIXTURES; m++) {
        const struct mixture *mixture = &mixtures[m];
        char name[32];
        if (ranks_of(mixture) != test_env.world_size) continue;
        load_model(mixture->microbatch);
        snprintf(name, sizeof name, "m%d", m);
        const struct hapt_train_result *result = run(mixture, false, name, NULL, NULL);
        if (!result) continue;
        const double difference = worst(result->history.loss, fp64, STEPS);
        CHECK_MESSAGE(difference < 1e-5, "mixture %d: losses differ by %g", m, difference);
        check_weights(hapt_arena_printf(&arena, "%s/%s", folder, name));
        if (test_env.world_rank == 0)
            for (int s = 0; s < mixture->stages; s++)
                CHECK(result->planned_bytes[s] == result->measured_bytes[s] && result->busy_s[s] > 0);
        const struct hapt_train_result *again = run(mixture, true, "again", NULL, NULL);
        if (again) CHECK(!memcmp(result->history.loss, again->history.loss, sizeof fp64));
        if (again) CHECK(!memcmp(result->history.gradient_norm, again->history.gradient_norm, sizeof fp64));
        check_resumed(mixture, name, result);
        if (mixture->synthesised) check_crossed(mixture, name);
    }
}

/* Each device runs the same program on its own rows. A device without rows is refused before the run, on all ranks. */
static void too_small_shares(void)
{
    const struct mixture alone = {1, {{1, 1}}, {0.95, 0.05}, 4, false};
    struct hapt_train_result *result = NULL;
    if (test_env.world_size != 2) return;
    load_model(4);
    CHECK_FAILS(hapt_train_run(&test_env, mixed_cluster(&alone, false), model, mixed_plan(&alone, alone.ratio), NULL,
                               make_config("none", reference_options), NULL, &arena, &result),
                HAPT_ERR_INPUT);
    const double half[2] = {0.5, 0.5};
    load_model(1);
    CHECK_FAILS(hapt_train_run(&test_env, mixed_cluster(&alone, false), model, mixed_plan(&alone, half), NULL,
                               make_config("none", reference_options), NULL, &arena, &result),
                HAPT_ERR_INFEASIBLE);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    hapt_arena_init(&arena);
    set_up();
    if (model) {
        RUN(mixed_stages_train);
        RUN(too_small_shares);
    }
    clean_up();
    return test_finish();
}
