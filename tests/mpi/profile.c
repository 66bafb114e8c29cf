/* ranks: 1 4; HAPT_LONG: 2 3
 * Measured profiles: equal on all ranks, equal for equal structures, empty for ranges that cannot run. */
#include "measured.h"
#include "programs.h"

#include "hapt/calibration.h"
#include "hapt/measure.h"
#include "hapt/predict.h"
#include "hapt/engine.h"

/* profile_programs.c tests programs that are not data-parallel. */
static struct hapt_config *config_of(struct hapt_arena *arena, const char *seconds, const char *program)
{
    char *budget = hapt_arena_strdup(arena, seconds); /* the configuration borrows it */
    char *words[] = {"hapt", "profile", "--profile-seconds", budget, "--threads", "1", "--program", (char *)program};
    struct hapt_config *config = NULL;
    CHECK_OK(hapt_config_parse(sizeof words / sizeof *words, words, arena, &config));
    return config;
}

/* The first two ranks are fast. The others are slow and have little memory. */
static struct hapt_cluster *cluster_of(struct hapt_arena *arena, const char *slow_memory)
{
    const int fast = test_env.world_size > 2 ? 2 : test_env.world_size, slow = test_env.world_size - fast;
    char text[1024];
    const int length = snprintf(text, sizeof text,
                                "{\"name\": \"fast\", \"nodes\": 1, \"devices_per_node\": %d, \"device\": \"cpu\", "
                                "\"slowdown\": 2, \"memory\": \"400 MB\"}",
                                fast);
    if (slow > 0)
        snprintf(text + length, sizeof text - (size_t)length,
                 ", {\"name\": \"slow\", \"nodes\": 1, \"devices_per_node\": %d, \"device\": \"cpu\", \"slowdown\": 5, "
                 "\"memory\": \"%s\"}",
                 slow, slow_memory);
    return measured_cluster(arena, text);
}

static void profile_of(struct run *run, int hidden, int microbatch, const char *seconds, const char *slow_memory,
                       const char *program)
{
    hapt_arena_init(&run->arena);
    run->model = fixture_gpt(&run->arena, (struct fixture_gpt){3, hidden, 2, 16, 64, microbatch, true, false});
    run->cluster = cluster_of(&run->arena, slow_memory);
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    CHECK_OK(hapt_layers_build(run->model->graph, &options, &run->arena, &run->layers));
    run->profile = NULL;
    CHECK_OK(hapt_profile_measure(&test_env, run->cluster, run->model, run->layers,
                                  config_of(&run->arena, seconds, program), false, (struct hapt_offloading){0},
                                  &run->arena, &run->profile, NULL));
}

static size_t cells_of(const struct hapt_profile *profile, const struct hapt_profile_cluster *cluster)
{
    return hapt_profile_index(profile, cluster->submesh_count, 0, 0);
}

static void check_equal_on_ranks(const struct hapt_profile *profile)
{
    uint64_t hash = 1, low, high;
    for (int c = 0; c < profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &profile->cluster[c];
        const size_t bytes = cells_of(profile, cluster) * sizeof(double);
        hash = hapt_hash(hash, cluster->stage_time, bytes);
        hash = hapt_hash(hash, cluster->stage_forward_time, bytes);
        hash = hapt_hash(hash, cluster->parameter_bytes, bytes);
        hash = hapt_hash(hash, cluster->activation_bytes, bytes);
        hash = hapt_hash(hash, cluster->step_time, bytes);
    }
    MPI_Allreduce(&hash, &low, 1, MPI_UINT64_T, MPI_MIN, test_env.world);
    MPI_Allreduce(&hash, &high, 1, MPI_UINT64_T, MPI_MAX, test_env.world);
    CHECK(low == high);
}

static void check_duplicates(struct run *run)
{
    const struct hapt_profile *profile = run->profile;
    const int L = profile->layer_count;
    const uint64_t *structure = structures_of(run);
    int twins = 0;
    for (int a = 0; a < L * L; a++) {
        for (int b = 0; b < a; b++) {
            const int i = a / L, j = a % L, k = b / L, l = b % L;
            if (i > j || k > l || structure[a] != structure[b]) continue;
            twins++;
            for (int c = 0; c < profile->cluster_count; c++) {
                const struct hapt_profile_cluster *cluster = &profile->cluster[c];
                for (int s = 0; s < cluster->submesh_count; s++) {
                    const size_t x = hapt_profile_index(profile, s, i, j), y = hapt_profile_index(profile, s, k, l);
                    CHECK(isnan(cluster->stage_time[x]) == isnan(cluster->stage_time[y]));
                    if (isnan(cluster->stage_time[x])) continue;
                    CHECK_NEAR(cluster->stage_time[x], cluster->stage_time[y], 0);
                    CHECK_NEAR(cluster->activation_bytes[x], cluster->activation_bytes[y], 0);
                }
            }
        }
    }
    CHECK_MESSAGE(twins > L / 2, "only %d equal pairs of ranges", twins);
}

/* The memory in the profile equals the memory that an engine of that stage reserves. */
static void check_memory(const struct run *run)
{
    const struct hapt_profile_cluster *cluster = &run->profile->cluster[0];
    struct hapt_engine_options options = {
        .backend = hapt_backend_find("cpu"), .threads = 1, .state_count = 2, .slots = 3};
    CHECK_OK(options.backend->open(0, 1, 0, &options.device));
    for (int s = 0; s < cluster->submesh_count; s++) {
        for (int i = 0; i < run->layers->count; i += 2) {
            for (int j = i; j < run->layers->count; j++) {
                const size_t cell = hapt_profile_index(run->profile, s, i, j);
                if (isnan(cluster->stage_time[cell])) continue;
                struct hapt_program *program = NULL;
                struct hapt_engine *engine = NULL;
                struct hapt_arena arena;
                hapt_arena_init(&arena);
                CHECK_OK(program_data_parallel(run->model->graph, hapt_layers_first_op(run->layers, i),
                                               run->layers->end_op[j], cluster->submesh[s].n, cluster->submesh[s].m,
                                               &arena, &program));
                CHECK_OK(hapt_engine_create(program, &options, &engine));
                CHECK_NEAR((double)options.backend->memory_used(options.device),
                           cluster->parameter_bytes[cell] + 3 * cluster->activation_bytes[cell], 0);
                hapt_engine_destroy(engine);
                hapt_arena_release(&arena);
            }
        }
    }
    options.backend->close(options.device);
}

struct kind {
    uint64_t structure;
    int devices;
};

/* One host measures once for all. The number of measurements is the number of ranges that differ in structure or device
 * count, in any subcluster. */
static void check_effort(struct run *run)
{
    const struct hapt_profile *profile = run->profile;
    const struct hapt_profile_effort *effort = &profile->effort;
    const int L = profile->layer_count;
    const uint64_t *structure = structures_of(run);
    struct kind *kind = hapt_arena_alloc(&run->arena, (size_t)(L * L) * 32, sizeof *kind);
    int unique = 0, candidates = 0;
    for (int c = 0; c < profile->cluster_count; c++) {
        for (int s = 0; s < profile->cluster[c].submesh_count; s++) {
            for (int cell = 0; cell < L * L; cell++) {
                const int i = cell / L, j = cell % L;
                if (i > j || isnan(profile->cluster[c].stage_time[hapt_profile_index(profile, s, i, j)])) continue;
                const struct hapt_submesh *submesh = &profile->cluster[c].submesh[s];
                const struct kind mine = {structure[cell], submesh->n * submesh->m};
                int k = 0;
                while (k < unique && (kind[k].structure != mine.structure || kind[k].devices != mine.devices)) k++;
                if (k == unique) kind[unique++] = mine;
                candidates++;
            }
        }
    }
    CHECK_MESSAGE(effort->unique == unique, "%lld unique ranges, brute force finds %d", (long long)effort->unique,
                  unique);
    CHECK(unique < candidates && effort->timed > 0 && effort->timed <= unique);
    CHECK(effort->runs >= effort->timed && effort->programs >= 1 && effort->programs <= effort->timed);
    CHECK(effort->seconds > 0);
}

static void tables(void)
{
    struct run run;
    profile_of(&run, 32, 4, "2", "400 MB", "auto");
    if (!run.profile) return;
    CHECK_OK(hapt_profile_check(run.profile));
    check_equal_on_ranks(run.profile);
    check_duplicates(&run);
    check_effort(&run);
    check_memory(&run);
    const int L = run.profile->layer_count;
    for (int c = 0; c < run.profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &run.profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            for (int i = 0; i < L; i++) {
                const size_t cell = hapt_profile_index(run.profile, s, i, i);
                CHECK(cluster->stage_time[cell] > 0 && cluster->stage_forward_time[cell] > 0);
                CHECK(cluster->stage_forward_time[cell] < cluster->stage_time[cell]);
                CHECK(cluster->step_time[cell] >= 0);
            }
        }
        CHECK(cluster->step_time[hapt_profile_index(run.profile, 0, 0, 0)] > 0);
    }
    if (run.profile->cluster_count == 2) {
        /* One host: one measurement, scaled by the slowdowns 2 and 5. */
        const struct hapt_profile_cluster *fast = &run.profile->cluster[0], *slow = &run.profile->cluster[1];
        const size_t cell = hapt_profile_index(run.profile, 0, 1, 2);
        CHECK_NEAR(slow->stage_time[cell] / fast->stage_time[cell], 2.5, 1e-12);
    }
    hapt_arena_release(&run.arena);
}

/* One row cannot be shared by two devices, so there is no candidate. With little memory long ranges have none. */
static void holes(void)
{
    struct run run;
    profile_of(&run, 32, 1, "2", "500 kB", "data");
    if (!run.profile) return;
    check_equal_on_ranks(run.profile);
    const int L = run.profile->layer_count;
    for (int c = 0; c < run.profile->cluster_count; c++) {
        const struct hapt_profile_cluster *cluster = &run.profile->cluster[c];
        int alone = 0;
        for (int i = 0; i < L; i++) {
            for (int j = i; j < L; j++) {
                const size_t cell = hapt_profile_index(run.profile, 0, i, j);
                const bool there = isfinite(cluster->stage_time[cell]);
                alone += there;
                if (there)
                    CHECK(cluster->parameter_bytes[cell] + cluster->activation_bytes[cell] <=
                          cluster->device_memory_bytes);
                for (int s = 1; s < cluster->submesh_count; s++)
                    CHECK(isnan(cluster->stage_time[hapt_profile_index(run.profile, s, i, j)]));
            }
        }
        CHECK(alone > 0);
        if (c == 1)
            CHECK(alone < L * (L + 1) / 2 && isnan(cluster->stage_time[hapt_profile_index(run.profile, 0, 0, L - 1)]));
    }
    hapt_arena_release(&run.arena);
}

/* The budget suffices for a few measurements. The others are sums, and each candidate still has a time. */
static void small_budget(void)
{
    struct run run, full;
    profile_of(&run, 128, 8, "0.1", "400 MB", "auto");
    profile_of(&full, 128, 8, "1", "400 MB", "auto");
    if (run.profile && full.profile) {
        check_equal_on_ranks(run.profile);
        for (int c = 0; c < run.profile->cluster_count; c++) {
            const struct hapt_profile_cluster *few = &run.profile->cluster[c], *all = &full.profile->cluster[c];
            /* A slowed device sleeps, and a busy machine may wake it a time slice late: longer than a short layer. */
            double slack_s = 0.004;
            for (size_t cell = 0; cell < cells_of(run.profile, few); cell++)
                slack_s = fmax(slack_s, 0.05 * all->stage_time[cell]); /* NaN: no candidate */
            for (size_t cell = 0; cell < cells_of(run.profile, few); cell++) {
                CHECK(isnan(few->stage_time[cell]) == isnan(all->stage_time[cell]));
                if (isnan(few->stage_time[cell])) continue;
                /* A disturbed machine may double a time. A factor of ten is an error, apart from the slack. */
                CHECK_MESSAGE(few->stage_time[cell] < 10 * all->stage_time[cell] + slack_s &&
                                  all->stage_time[cell] < 10 * few->stage_time[cell] + slack_s,
                              "cell %zu of subcluster %d: %.3g ms with few rounds, %.3g ms with many", cell, c,
                              1e3 * few->stage_time[cell], 1e3 * all->stage_time[cell]);
            }
        }
    }
    hapt_arena_release(&run.arena);
    hapt_arena_release(&full.arena);
}

static uint64_t mix_rows(const struct hapt_efficiency *efficiency)
{
    uint64_t hash = 1;
    for (int r = 0; r < hapt_efficiency_row_count(efficiency); r++) {
        const struct hapt_efficiency_row row = hapt_efficiency_row_at(efficiency, r);
        const double facts[] = {row.size, row.samples, row.efficiency, row.worst_residual};
        hash = hapt_hash(hash, facts, sizeof facts);
    }
    return hash;
}

/* All ranks have equal tables, one for the single kind of device. Every class of operators has measurements. */
static void calibration(void)
{
    for (int bf16 = 0; bf16 < 2; bf16++) {
        struct hapt_arena arena;
        struct hapt_layers *layers = NULL;
        struct hapt_efficiency *efficiency = NULL;
        struct hapt_profile *plain = NULL, *calibrated = NULL;
        hapt_arena_init(&arena);
        struct hapt_model *model = fixture_gpt(&arena, (struct fixture_gpt){2, 32, 2, 16, 64, 4, true, bf16});
        const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
        struct hapt_cluster *cluster = cluster_of(&arena, "400 MB");
        struct hapt_config *config = config_of(&arena, "1", "auto");
        CHECK_OK(hapt_layers_build(model->graph, &options, &arena, &layers));
        CHECK_OK(hapt_profile_calibrate(&test_env, cluster, model, layers, config, &arena, &efficiency));
        if (!efficiency) exit(1);
        uint64_t hash = mix_rows(efficiency), low, high;
        MPI_Allreduce(&hash, &low, 1, MPI_UINT64_T, MPI_MIN, test_env.world);
        MPI_Allreduce(&hash, &high, 1, MPI_UINT64_T, MPI_MAX, test_env.world);
        CHECK(low == high);
        int samples = 0, classes = 0;
        for (int r = 0; r < hapt_efficiency_row_count(efficiency); r++) {
            const struct hapt_efficiency_row row = hapt_efficiency_row_at(efficiency, r);
            CHECK(strcmp(row.device, "cpu") == 0 && row.dtype == (bf16 ? HAPT_BF16 : HAPT_F32));
            CHECK(row.efficiency > 0 && row.size > 1 && row.worst_residual >= 0);
            classes += r == 0 || strcmp(row.class, hapt_efficiency_row_at(efficiency, r - 1).class) != 0;
            samples += row.samples;
        }
        /* A GPT has operators of 15 types. Sharing by 1, 2 and 4 devices gives three shapes of each. */
        CHECK_MESSAGE(classes == 4 && samples >= 3 * 15, "%d classes, %d samples", classes, samples);
        CHECK(hapt_efficiency_covers(efficiency, "cpu", bf16 ? HAPT_BF16 : HAPT_F32));
        CHECK(!hapt_efficiency_covers(efficiency, "cpu", bf16 ? HAPT_F32 : HAPT_BF16));
        CHECK_OK(hapt_profile_predict(cluster, model, layers, config, NULL, &(struct hapt_predict_options){0}, &arena,
                                      &plain));
        CHECK_OK(hapt_profile_predict(cluster, model, layers, config, efficiency, &(struct hapt_predict_options){0},
                                      &arena, &calibrated));
        if (plain && calibrated) {
            CHECK_OK(hapt_profile_check(calibrated));
            CHECK(plain->cluster[0].stage_time[0] != calibrated->cluster[0].stage_time[0]);
            check_equal_on_ranks(calibrated);
        }
        hapt_arena_release(&arena);
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(tables);
    RUN(holes);
    RUN(small_budget);
    RUN(calibration);
    return test_finish();
}
