/* ranks: 4
 * Measured profiles with every program: tensor-parallel and synthesised stages, sharded optimizer state. Memory is that
 * of the programs, planned here without the profiler. */
#include "measured.h"

#include "hapt/engine.h"
#include "hapt/measure.h"

/* Two ranks of a subcluster, and with four ranks two of a slower one. */
static struct hapt_cluster *cluster_of(struct hapt_arena *arena, double memory_bytes)
{
    char text[1024];
    int length = 0;
    for (int c = 0; c < test_env.world_size / 2; c++)
        length += snprintf(text + length, sizeof text - (size_t)length,
                           "%s{\"name\": \"s%d\", \"nodes\": 1, \"devices_per_node\": 2, \"device\": \"cpu\", "
                           "\"slowdown\": %d, \"memory\": %.0f}",
                           c ? ", " : "", c, 2 + 3 * c, memory_bytes);
    return measured_cluster(arena, text);
}

static void load(struct run *run, double memory_bytes)
{
    hapt_arena_init(&run->arena);
    run->model = fixture_gpt(&run->arena, (struct fixture_gpt){2, 64, 2, 16, 64, 4, true, false});
    run->cluster = cluster_of(&run->arena, memory_bytes);
    const struct hapt_layers_options options = {.granularity = 4, .heavy_minimum = 2};
    CHECK_OK(hapt_layers_build(run->model->graph, &options, &run->arena, &run->layers));
    run->profile = NULL;
}

static void measure(struct run *run, const char *program, const char *sharded)
{
    char *words[] = {"hapt",      "profile",       "--profile-seconds",   "0.3",          "--threads", "1",
                     "--program", (char *)program, "--sharded-optimizer", (char *)sharded};
    struct hapt_config *config = NULL;
    CHECK_OK(hapt_config_parse(sizeof words / sizeof *words, words, &run->arena, &config));
    CHECK_OK(hapt_profile_measure(&test_env, run->cluster, run->model, run->layers, config, false,
                                  (struct hapt_offloading){0}, &run->arena, &run->profile, NULL));
    if (!run->profile) exit(1); /* on all ranks */
    CHECK_OK(hapt_profile_check(run->profile));
}

/* Memory of layers [first, last] on a device of a row, by an engine's plan. */
static struct hapt_memory_plan plan_of(struct run *run, struct hapt_submesh row, const struct hapt_stage_layout *layout,
                                       int first, int last, bool sharded_state)
{
    struct hapt_engine_options options = {.backend = hapt_backend_find("cpu"),
                                          .threads = 1,
                                          .slots = 1,
                                          .state_count = 2,
                                          .sharded_state = sharded_state};
    struct hapt_sharding *sharding = NULL;
    struct hapt_program *program = NULL;
    struct hapt_memory_plan *plan = NULL;
    CHECK_OK(options.backend->open(0, 1, 0, &options.device));
    if (layout)
        CHECK_OK(hapt_stage_layout_apply(layout, run->model->graph, &run->arena, &sharding));
    else
        CHECK_OK(
            hapt_sharding_tensor_parallel(run->model->graph, row.n * row.m / row.tp, row.tp, &run->arena, &sharding));
    CHECK_OK(hapt_program_build(sharding, hapt_layers_first_op(run->layers, first), run->layers->end_op[last],
                                &run->arena, &program));
    CHECK_OK(hapt_engine_plan_memory(program, &options, &run->arena, &plan));
    options.backend->close(options.device);
    return *plan;
}

static const struct hapt_stage_layout *layout_of(const struct hapt_profile *profile, struct hapt_submesh row)
{
    return row.program > 0 ? profile->layout[row.program - 1] : NULL;
}

static int rows_of(const struct hapt_profile *profile, int tensor_parallel, bool synthesised)
{
    int rows = 0;
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            const struct hapt_submesh row = profile->cluster[c].submesh[s];
            rows += row.n * row.m > 1 && row.tp == tensor_parallel && (row.program > 0) == synthesised;
        }
    return rows;
}

static void check_equal_on_ranks(struct run *run)
{
    const struct hapt_profile *profile = run->profile;
    uint64_t hash = 1, low, high;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const size_t bytes = hapt_profile_index(profile, cluster->submesh_count, 0, 0) * sizeof(double);
        hash = hapt_hash(hash, cluster->stage_time, bytes);
        hash = hapt_hash(hash, cluster->stage_forward_time, bytes);
        hash = hapt_hash(hash, cluster->parameter_bytes, bytes);
        hash = hapt_hash(hash, cluster->activation_bytes, bytes);
        hash = hapt_hash(hash, cluster->step_time, bytes);
    }
    MPI_Allreduce(&hash, &low, 1, MPI_UINT64_T, MPI_MIN, test_env.world);
    MPI_Allreduce(&hash, &high, 1, MPI_UINT64_T, MPI_MAX, test_env.world);
    CHECK(low == high);
    for (int k = 0; k < profile->layout_count; k++) { /* rank 0's against mine */
        static char block[1 << 18];
        const struct hapt_stage_layout *other = NULL;
        const size_t bytes = hapt_stage_layout_pack(profile->layout[k], NULL);
        CHECK(bytes <= sizeof block);
        if (bytes > sizeof block) exit(1);
        if (test_env.world_rank == 0) hapt_stage_layout_pack(profile->layout[k], block);
        MPI_Bcast(block, sizeof block, MPI_BYTE, 0, test_env.world);
        CHECK_OK(hapt_stage_layout_unpack(block, &run->arena, &other));
        CHECK(hapt_stage_layout_same(profile->layout[k], other));
    }
}

/* Each cell has the memory of its program, and times that belong together. */
static void check_cells(struct run *run, bool sharded_state)
{
    const struct hapt_profile *profile = run->profile;
    const int L = profile->layer_count;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            for (int i = 0; i < L; i++)
                for (int j = i; j < L; j++) {
                    const struct hapt_submesh row = cluster->submesh[s];
                    const size_t cell = hapt_profile_index(profile, s, i, j);
                    if (isnan(cluster->stage_time[cell])) continue;
                    const struct hapt_memory_plan plan =
                        plan_of(run, row, layout_of(profile, row), i, j, sharded_state);
                    CHECK_NEAR(cluster->parameter_bytes[cell], (double)plan.parameter_bytes, 0);
                    CHECK_NEAR(cluster->activation_bytes[cell], (double)plan.activation_bytes, 0);
                    CHECK(cluster->stage_forward_time[cell] > 0 &&
                          cluster->stage_forward_time[cell] <= cluster->stage_time[cell]);
                    CHECK(cluster->step_time[cell] > 0);
                }
    }
}

/* A range that was run serves its equals; so do composed ones. A longer range takes no less time. */
static void check_structures(struct run *run)
{
    const struct hapt_profile *profile = run->profile;
    const int L = profile->layer_count;
    const uint64_t *structure = structures_of(run);
    int twins = 0;
    for (int c = 0; c < profile->cluster_count; c++)
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            const double *time = profile->cluster[c].stage_time + hapt_profile_index(profile, s, 0, 0);
            if (profile->cluster[c].submesh[s].tp == 1) continue;
            for (int a = 0; a < L * L; a++)
                for (int b = 0; b < a; b++)
                    if (a / L <= a % L && b / L <= b % L && structure[a] == structure[b] && isfinite(time[a])) {
                        CHECK_NEAR(time[a], time[b], 0);
                        twins++;
                    }
        }
    CHECK(twins > 0);
}

static void every_program(void)
{
    struct run run;
    load(&run, 4e8);
    measure(&run, "all", "no");
    CHECK(rows_of(run.profile, 1, false) == run.profile->cluster_count);
    CHECK(rows_of(run.profile, 2, false) == run.profile->cluster_count);
    check_equal_on_ranks(&run);
    check_cells(&run, false);
    check_structures(&run);
    measure(&run, "synthesised", "no");
    CHECK(rows_of(run.profile, 1, false) == 0 && rows_of(run.profile, 2, false) == 0);
    CHECK(rows_of(run.profile, 1, true) >= run.profile->cluster_count);
    check_equal_on_ranks(&run);
    check_cells(&run, false);
    hapt_arena_release(&run.arena);
}

static void sharded_state(void)
{
    struct run run;
    load(&run, 4e8);
    measure(&run, "data", "yes");
    check_equal_on_ranks(&run);
    check_cells(&run, true);
    measure(&run, "data", "auto"); /* it all fits */
    check_cells(&run, false);
    hapt_arena_release(&run.arena);
}

/* --program auto measures tensor-parallel stages where data-parallel ones lack memory. */
static void memory_decides(void)
{
    struct run run;
    load(&run, 4e8);
    const int L = run.layers->count;
    const struct hapt_memory_plan data = plan_of(&run, (struct hapt_submesh){1, 2, 1, 0, 0, 0}, NULL, 0, L - 1, true);
    const struct hapt_memory_plan tensor =
        plan_of(&run, (struct hapt_submesh){1, 2, 2, 0, 0, 0}, NULL, 0, L - 1, false);
    const double least = (double)(data.parameter_bytes + data.activation_bytes),
                 needed = (double)(tensor.parameter_bytes + tensor.activation_bytes);
    CHECK_MESSAGE(needed < least, "tensor-parallel stages need %.0f bytes, data-parallel ones %.0f", needed, least);
    measure(&run, "auto", "auto");
    CHECK(rows_of(run.profile, 1, false) == run.profile->cluster_count && rows_of(run.profile, 2, false) == 0);
    for (int c = 0; c < run.cluster->count; c++)
        run.cluster->subcluster[c].device.memory_bytes = floor((least + needed) / 2);
    measure(&run, "auto", "auto");
    check_equal_on_ranks(&run);
    CHECK(rows_of(run.profile, 2, false) == run.profile->cluster_count);
    for (int c = 0; c < run.profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &run.profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++)
            CHECK(isfinite(cluster->stage_time[hapt_profile_index(run.profile, s, 0, L - 1)]) ==
                  (cluster->submesh[s].tp == 2));
    }
    hapt_arena_release(&run.arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(every_program);
    RUN(sharded_state);
    RUN(memory_decides);
    return test_finish();
}
