/* Predicted profiles: a cluster that is not there, times from the device description, memory from the planner. */
#include <unistd.h>

#include "fixture.h"

#include "hapt/memory.h"
#include "hapt/profile.h"

static struct hapt_cluster *cluster_of(struct hapt_arena *arena, const char *text)
{
    struct hapt_cluster *cluster = NULL;
    char path[64];
    snprintf(path, sizeof path, "/tmp/hapt-predict-test-%ld.json", (long)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    if (!file) exit(1);
    fputs(text, file);
    fclose(file);
    CHECK_OK(hapt_cluster_load(path, arena, &cluster));
    unlink(path);
    if (!cluster) exit(1);
    hapt_cluster_assume(cluster);
    return cluster;
}

static const char gpus[] =
    "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": ["
    "{\"name\": \"a100\", \"nodes\": 4, \"devices_per_node\": 8, \"device\": \"A100-40GB\", "
    "\"intra_node_bandwidth\": \"300 GB/s\", \"inter_node_bandwidth\": \"200 Gbit/s\"},"
    "{\"name\": \"v100\", \"nodes\": 4, \"devices_per_node\": 8, \"device\": \"V100-32GB\", "
    "\"intra_node_bandwidth\": \"150 GB/s\", \"inter_node_bandwidth\": \"200 Gbit/s\"}],"
    "\"links\": [{\"between\": [\"a100\", \"v100\"], \"bandwidth\": \"5 Gbit/s\", \"latency\": \"50 us\"}]}\n";

struct run {
    struct hapt_arena arena;
    struct hapt_model *model;
    struct hapt_layers *layers;
    struct hapt_profile *profile;
};

static void predict(struct run *run, const char *cluster, struct fixture_gpt shape, const char *imbalance)
{
    char factor[16];
    snprintf(factor, sizeof factor, "%s", imbalance);
    char *words[] = {"hapt", "profile", "--imbalance", factor};
    struct hapt_config *config = NULL;
    hapt_arena_init(&run->arena);
    run->model = fixture_gpt(&run->arena, shape);
    run->profile = NULL;
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    CHECK_OK(hapt_config_parse(4, words, &run->arena, &config));
    CHECK_OK(hapt_layers_build(run->model->graph, &options, &run->arena, &run->layers));
    CHECK_OK(hapt_profile_predict(cluster_of(&run->arena, cluster), run->model, run->layers, config, &run->arena,
                                  &run->profile));
    if (!run->profile) exit(1);
    CHECK_OK(hapt_profile_check(run->profile));
}

static double time_at(const struct run *run, int cluster, int submesh, int first, int last)
{
    return run->profile->cluster[cluster].stage_time[hapt_profile_index(run->profile, submesh, first, last)];
}

static void times_are_plausible(void)
{
    struct run run;
    predict(&run, gpus, (struct fixture_gpt){4, 1024, 16, 512, 4096, 16, true, true}, "1000000");
    const struct hapt_profile *profile = run.profile;
    const int L = profile->layer_count;
    const struct hapt_profile_cluster *a100 = &profile->cluster[0];
    CHECK(a100->submesh_count == 7); /* 1x1 1x2 1x4 1x8 2x8 3x8 4x8 */
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            const double one = time_at(&run, 0, 0, i, j);
            CHECK(one > 0 && time_at(&run, 1, 0, i, j) > one); /* a V100 is slower */
            if (j > i) {
                CHECK(one > time_at(&run, 0, 0, i, j - 1));
                CHECK_NEAR(one, time_at(&run, 0, 0, i, j - 1) + time_at(&run, 0, 0, j, j), 1e-12);
            }
            for (int s = 1; s < 4; s++) CHECK(time_at(&run, 0, s, i, j) < time_at(&run, 0, s - 1, i, j));
            CHECK(isfinite(time_at(&run, 0, 4, i, j)));
            /* 24 devices cannot share 16 rows, 32 neither. */
            CHECK(isnan(time_at(&run, 0, 5, i, j)) && isnan(time_at(&run, 0, 6, i, j)));
        }
    }
    /* Not faster than the data sheet, not slower than a tenth of it. */
    const double ideal = hapt_model_flops(run.model) / 312e12, whole = time_at(&run, 0, 0, 0, L - 1);
    CHECK_MESSAGE(whole > ideal && whole < 10 * ideal, "%g s against %g s at the peak", whole, ideal);
    /* Gradients are summed over many devices, not over one. */
    const size_t alone = hapt_profile_index(profile, 0, 1, L - 2), many = hapt_profile_index(profile, 4, 1, L - 2);
    CHECK(a100->step_time[many] > a100->step_time[alone] && a100->step_time[alone] > 0);
    /* The exchange of the tied embedding: 4096 x 1024 fp32 over 5 Gbit/s. */
    const double exchange = 4096.0 * 1024 * 4 / (5e9 / 8) + 50e-6;
    const size_t tail = hapt_profile_index(profile, 0, L - 1, L - 1);
    CHECK(a100->step_time[tail] >= exchange && a100->step_time[tail] < 1.5 * exchange);
    hapt_arena_release(&run.arena);
}

static void memory_is_the_planners(void)
{
    struct run run;
    predict(&run, gpus, (struct fixture_gpt){2, 64, 4, 32, 128, 4, true, true}, "1000000");
    const struct hapt_profile_cluster *cluster = &run.profile->cluster[1];
    const struct hapt_memory_options options = {.slots = 5, .state_count = 2};
    for (int s = 0; s < 3; s++) {
        for (int i = 0; i < run.profile->layer_count; i++) {
            for (int j = i; j < run.profile->layer_count; j++) {
                struct hapt_program *program = NULL;
                struct hapt_memory_plan *plan = NULL;
                const size_t cell = hapt_profile_index(run.profile, s, i, j);
                CHECK_OK(hapt_program_data_parallel(run.model->graph, hapt_layers_first_op(run.layers, i),
                                                    run.layers->end_op[j], 1, 1 << s, &run.arena, &program));
                CHECK_OK(hapt_memory_plan(program, &options, &run.arena, &plan));
                CHECK_NEAR((double)plan->total_bytes,
                           cluster->parameter_bytes[cell] + 5 * cluster->activation_bytes[cell], 0);
            }
        }
    }
    hapt_arena_release(&run.arena);
}

static void unbalanced_candidates_are_pruned(void)
{
    struct run all, some;
    const struct fixture_gpt shape = {4, 256, 4, 64, 512, 16, false, true};
    predict(&all, gpus, shape, "1000000");
    predict(&some, gpus, shape, "4");
    const int L = all.profile->layer_count;
    int pruned = 0;
    for (int i = 0; i < L; i++) {
        for (int j = i; j < L; j++) {
            const double kept = time_at(&some, 0, 0, i, j);
            if (isnan(kept))
                pruned++;
            else
                CHECK_NEAR(kept, time_at(&all, 0, 0, i, j), 0);
        }
        CHECK(isfinite(time_at(&some, 0, 0, i, i))); /* one layer cannot be cut */
    }
    CHECK(pruned > 0 && isnan(time_at(&some, 0, 0, 0, L - 1)) && isfinite(time_at(&all, 0, 0, 0, L - 1)));
    hapt_arena_release(&all.arena);
    hapt_arena_release(&some.arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(times_are_plausible);
    RUN(memory_is_the_planners);
    RUN(unbalanced_candidates_are_pruned);
    return test_finish();
}
