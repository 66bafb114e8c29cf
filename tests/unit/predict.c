/* Predicted profiles: an absent cluster, times from the description of its devices, memory from the planner. */
#include <unistd.h>

#include "fixture.h"
#include "programs.h"

#include "hapt/predict.h"
#include "hapt/memory.h"
#include "hapt/profile.h"
#include "hapt/unit_choice.h"

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

static void predict_up_to(struct run *run, const char *cluster, struct fixture_gpt shape, const char *imbalance,
                          const char *tensor_parallel)
{
    char factor[16], most[16];
    snprintf(factor, sizeof factor, "%s", imbalance);
    snprintf(most, sizeof most, "%s", tensor_parallel);
    char *words[] = {"hapt", "profile", "--imbalance", factor, "--tensor-parallel", most};
    struct hapt_config *config = NULL;
    hapt_arena_init(&run->arena);
    run->model = fixture_gpt(&run->arena, shape);
    run->profile = NULL;
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    CHECK_OK(hapt_config_parse(6, words, &run->arena, &config));
    CHECK_OK(hapt_layers_build(run->model->graph, &options, &run->arena, &run->layers));
    CHECK_OK(hapt_profile_predict(cluster_of(&run->arena, cluster), run->model, run->layers, config, NULL,
                                  &(struct hapt_predict_options){0}, &run->arena, &run->profile));
    if (!run->profile) exit(1);
    CHECK_OK(hapt_profile_check(run->profile));
}

static void predict(struct run *run, const char *cluster, struct fixture_gpt shape, const char *imbalance)
{
    predict_up_to(run, cluster, shape, imbalance, "0");
}

/* Row of a variant, or -1. */
static int row_of(const struct run *run, int cluster, int n, int m, int tp)
{
    const struct hapt_profile_cluster *table = &run->profile->cluster[cluster];
    for (int s = 0; s < table->submesh_count; s++)
        if (table->submesh[s].n == n && table->submesh[s].m == m && table->submesh[s].tp == tp) return s;
    return -1;
}

static double time_at(const struct run *run, int cluster, int submesh, int first, int last)
{
    return run->profile->cluster[cluster].stage_time[hapt_profile_index(run->profile, submesh, first, last)];
}

static void times_are_plausible(void)
{
    struct run run;
    predict_up_to(&run, gpus, (struct fixture_gpt){4, 1024, 16, 512, 4096, 16, true, true}, "1000000", "1");
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
            /* 16 rows cannot be shared by 24 or 32 devices. */
            CHECK(isnan(time_at(&run, 0, 5, i, j)) && isnan(time_at(&run, 0, 6, i, j)));
        }
    }
    /* Not faster than the data sheet, and not slower than a tenth of it. */
    const double ideal = hapt_model_flops(run.model) / 312e12, whole = time_at(&run, 0, 0, 0, L - 1);
    CHECK_MESSAGE(whole > ideal && whole < 10 * ideal, "%g s against %g s at the peak", whole, ideal);
    /* Gradients are summed over several devices, but not over one. */
    const size_t alone = hapt_profile_index(profile, 0, 1, L - 2), many = hapt_profile_index(profile, 4, 1, L - 2);
    CHECK(a100->step_time[many] > a100->step_time[alone] && a100->step_time[alone] > 0);
    /* The exchange of the tied embedding: 4096 x 1024 fp32 over 5 Gbit/s. */
    const double exchange = 4096.0 * 1024 * 4 / (5e9 / 8) + 50e-6;
    const size_t tail = hapt_profile_index(profile, 0, L - 1, L - 1);
    CHECK(a100->step_time[tail] >= exchange && a100->step_time[tail] < 1.5 * exchange);
    hapt_arena_release(&run.arena);
}

/* With three subclusters a sum over both ends costs at most their link, and more than zero. */
static void exchanges_are_bounded(void)
{
    static const char three[] =
        "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": ["
        "{\"name\": \"a\", \"nodes\": 1, \"devices_per_node\": 1, \"device\": \"A100-40GB\"},"
        "{\"name\": \"b\", \"nodes\": 1, \"devices_per_node\": 1, \"device\": \"A100-40GB\"},"
        "{\"name\": \"c\", \"nodes\": 1, \"devices_per_node\": 1, \"device\": \"A100-40GB\"}], \"links\": ["
        "{\"between\": [\"a\", \"b\"], \"bandwidth\": \"10 Gbit/s\", \"latency\": \"50 us\"},"
        "{\"between\": [\"a\", \"c\"], \"bandwidth\": \"1 Gbit/s\", \"latency\": \"50 us\"},"
        "{\"between\": [\"b\", \"c\"], \"bandwidth\": \"2 Gbit/s\", \"latency\": \"50 us\"}]}\n";
    struct run tied, untied;
    struct fixture_gpt shape = {2, 64, 4, 32, 4096, 4, true, true};
    predict(&tied, three, shape, "1000000");
    shape.tied = false;
    predict(&untied, three, shape, "1000000");
    const int L = tied.profile->layer_count;
    const double bytes = 4096.0 * 64 * 4;
    double first[3], last[3];
    CHECK(untied.profile->layer_count == L);
    for (int c = 0; c < 3; c++) {
        const size_t head = hapt_profile_index(tied.profile, 0, 0, 1),
                     tail = hapt_profile_index(tied.profile, 0, L - 1, L - 1);
        first[c] = tied.profile->cluster[c].step_time[head] - untied.profile->cluster[c].step_time[head];
        last[c] = tied.profile->cluster[c].step_time[tail] - untied.profile->cluster[c].step_time[tail];
    }
    for (int a = 0; a < 3; a++) {
        CHECK(last[a] > 0.99 * bytes / (10e9 / 8));
        for (int b = 0; b < 3; b++) {
            const struct hapt_profile *profile = tied.profile;
            const double price = profile->link_latency[a * 3 + b] + bytes / profile->link_bandwidth[a * 3 + b];
            if (a != b)
                CHECK_MESSAGE(first[a] + last[b] <= price * (1 + 1e-9), "%d to %d costs more than its link", a, b);
        }
    }
    CHECK_NEAR(first[0] + last[1], 50e-6 + bytes / (10e9 / 8), 1e-12);
    CHECK_NEAR(first[1] + last[2], 50e-6 + bytes / (2e9 / 8), 1e-12);
    hapt_arena_release(&tied.arena);
    hapt_arena_release(&untied.arena);
}

/* GPUs that are absent. A matrix product uses a workspace of 1 MiB and 32 fp32 results per result, at most 32 MiB. */
static size_t product_scratch(void *context, const struct hapt_program *program, int op)
{
    (void)context;
    const char *name = op < 0 ? "" : hapt_op_type_at(program->graph->op[op].type)->name;
    if (strncmp(name, "linear", 6) != 0 && strncmp(name, "expert_linear", 13) != 0) return 0;
    const double wanted =
        0x1p20 + 128.0 * (double)hapt_tensor_elements(&program->shard->tensor[program->shard->op[op].output[0]]);
    return (size_t)fmin(wanted, 0x1p25);
}

static void memory_is_the_planners(void)
{
    struct run run;
    predict(&run, gpus, (struct fixture_gpt){2, 64, 4, 32, 131, 4, true, true}, "1000000");
    const struct hapt_memory_options options = {.slots = 5, .state_count = 2, .scratch = product_scratch};
    int tensor_parallel = 0;
    for (int c = 0; c < 2; c++) {
        const struct hapt_profile_cluster *cluster = &run.profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh submesh = cluster->submesh[s];
            tensor_parallel += submesh.tp > 1;
            for (int i = 0; i < run.profile->layer_count; i++) {
                for (int j = i; j < run.profile->layer_count; j++) {
                    struct hapt_arena arena;
                    struct hapt_program *program = NULL;
                    struct hapt_memory_plan *plan = NULL;
                    const size_t cell = hapt_profile_index(run.profile, s, i, j);
                    hapt_arena_init(&arena);
                    CHECK_OK(program_tensor_parallel(run.model->graph, hapt_layers_first_op(run.layers, i),
                                                     run.layers->end_op[j], submesh.n * submesh.m / submesh.tp,
                                                     submesh.tp, &arena, &program));
                    CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
                    CHECK_NEAR((double)plan->total_bytes,
                               cluster->parameter_bytes[cell] + 5 * cluster->activation_bytes[cell], 0);
                    hapt_arena_release(&arena);
                }
            }
        }
    }
    CHECK(tensor_parallel > 4);
    hapt_arena_release(&run.arena);
}

/* A model with unlike units: attention, dense layers and experts. */
static void make_experts(struct run *run)
{
    char *words[] = {"hapt", "model",      "bert-moe", "--layers", "3",   "--hidden",     "64", "--heads",
                     "4",    "--sequence", "32",       "--vocab",  "131", "--microbatch", "4"};
    struct hapt_config *config = NULL;
    const struct hapt_layers_options options = {.granularity = 0, .heavy_minimum = 2};
    hapt_arena_init(&run->arena);
    CHECK_OK(hapt_config_parse(15, words, &run->arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, &run->arena, &run->model));
    CHECK_OK(hapt_layers_build(run->model->graph, &options, &run->arena, &run->layers));
}

/* Stages that do not keep all on their devices: each cell against the program of its own range, with the units that a
 * plan of it gets. */
static void check_memory_of_choices(bool unlike, enum hapt_offload offload, bool host_update,
                                    enum hapt_weight_sharding weight_sharding)
{
    struct run run;
    struct hapt_config *config = NULL;
    struct hapt_unit *unit, *weight_unit, own[32];
    struct hapt_unit_choices *choices;
    char *words[] = {"hapt", "profile", "--imbalance", "1000000", "--recompute", "auto"};
    int units, weight_units, compared = 0, saved = 0, away = 0, gradients = 0, out_of_order = 0, sharded = 0;
    if (unlike)
        make_experts(&run);
    else
        predict(&run, gpus, (struct fixture_gpt){5, 64, 4, 32, 131, 4, true, true}, "1000000");
    CHECK_OK(hapt_config_parse(6, words, &run.arena, &config));
    CHECK_OK(hapt_profile_predict(
        cluster_of(&run.arena, gpus), run.model, run.layers, config, NULL,
        &(struct hapt_predict_options){.recompute = true, .offload = {offload, host_update, weight_sharding}},
        &run.arena, &run.profile));
    CHECK_OK(hapt_layers_units(run.layers, &run.arena, &unit, &units));
    CHECK(units >= 4 && units <= 32);
    CHECK_OK(hapt_unit_choices_create(run.model->graph, unit, units, &run.arena, &choices));
    CHECK(hapt_unit_choices_differ(choices) == unlike);
    CHECK_OK(hapt_layers_weight_units(run.layers, &run.arena, &weight_unit, &weight_units));
    for (int c = 0; c < 2; c++) {
        const struct hapt_profile_cluster *cluster = &run.profile->cluster[c];
        for (int s = 0; s < cluster->submesh_count; s++) {
            const struct hapt_submesh submesh = cluster->submesh[s];
            const bool here = !submesh.weights_at, some = submesh.recompute > 0 || !here,
                       leave = submesh.weights_at == HAPT_GRADIENTS_ON_HOST,
                       shared = submesh.weights_at == HAPT_WEIGHTS_SHARDED;
            CHECK(!shared || submesh.n * submesh.m > submesh.tp);
            CHECK(shared || submesh.n * submesh.m == submesh.tp || weight_sharding != HAPT_WEIGHT_SHARDING_ALL);
            const struct hapt_memory_options options = {.slots = 5,
                                                        .state_count = 2,
                                                        .host_state = offload != HAPT_OFFLOAD_NO,
                                                        .host_update = host_update,
                                                        .sharded_state = shared || (offload != HAPT_OFFLOAD_NO && here),
                                                        .weight_unit_count = here ? 0 : weight_units,
                                                        .weight_unit = weight_unit,
                                                        .gradient_unit_count = leave ? weight_units : 0,
                                                        .gradient_unit = weight_unit,
                                                        .scratch = product_scratch};
            for (int i = 0; i < run.profile->layer_count && some; i++)
                for (int j = i; j < run.profile->layer_count; j++) {
                    struct hapt_arena arena;
                    struct hapt_sharding *sharding = NULL;
                    struct hapt_program *program = NULL;
                    struct hapt_memory_plan *plan = NULL, *kept = NULL;
                    const size_t cell = hapt_profile_index(run.profile, s, i, j);
                    const int first_op = hapt_layers_first_op(run.layers, i), end_op = run.layers->end_op[j];
                    int first, end, count = 0;
                    unsigned char choice[32];
                    if (!isfinite(cluster->stage_time[cell])) continue;
                    hapt_arena_init(&arena);
                    CHECK_OK(hapt_unit_choose(choices, first_op, end_op, submesh.recompute, choice, &first, &end));
                    for (int u = first; u < end; u++) {
                        if (u > first) out_of_order += choice[u] > choice[u - 1];
                        if (choice[u] == HAPT_UNIT_KEPT) continue;
                        own[count] = unit[u];
                        own[count++].selective = choice[u] == HAPT_UNIT_SELECTIVE;
                    }
                    CHECK_OK(hapt_sharding_tensor_parallel(run.model->graph, submesh.n * submesh.m / submesh.tp,
                                                           submesh.tp, &arena, &sharding));
                    CHECK_OK(hapt_program_build(sharding, first_op, end_op, &arena, &program));
                    CHECK_OK(hapt_memory_plan(program, &options, &arena, &kept));
                    CHECK_OK(hapt_sharding_recompute(sharding, own, count, &arena, &sharding));
                    CHECK_OK(hapt_program_build(sharding, first_op, end_op, &arena, &program));
                    CHECK_OK(hapt_memory_plan(program, &options, &arena, &plan));
                    CHECK_NEAR((double)plan->total_bytes,
                               cluster->parameter_bytes[cell] + 5 * cluster->activation_bytes[cell], 0);
                    /* gradients leave with one choice alone, also where it makes nothing again */
                    saved += plan->activation_bytes < kept->activation_bytes || submesh.recompute == 0 || leave;
                    CHECK(plan->host_weights == (!here && !shared) && plan->host_gradients == leave);
                    CHECK(plan->sharded_weights == shared);
                    sharded += shared;
                    gradients += leave;
                    away += plan->host_weights;
                    compared++;
                    hapt_arena_release(&arena);
                }
        }
    }
    CHECK_MESSAGE(compared > (unlike ? 100 : 500) && saved == compared, "%d of %d stages hold less", saved, compared);
    CHECK_MESSAGE(unlike == (out_of_order > 0), "%d times a later unit recomputes more than the one before",
                  out_of_order);
    CHECK_MESSAGE((away > (unlike ? 100 : 500)) == (offload >= HAPT_OFFLOAD_STAGES),
                  "%d stages have weights on the host", away);
    CHECK_MESSAGE((sharded > 200) == (weight_sharding != HAPT_WEIGHT_SHARDING_NO), "%d stages have sharded weights",
                  sharded);
    CHECK_MESSAGE((gradients > 20) == (offload == HAPT_OFFLOAD_STAGES_GRADIENTS || offload == HAPT_OFFLOAD_GRADIENTS),
                  "%d stages have gradients on the host", gradients);
    hapt_arena_release(&run.arena);
}

static void memory_of_choices(void)
{
    for (enum hapt_offload offload = HAPT_OFFLOAD_NO; offload <= HAPT_OFFLOAD_GRADIENTS; offload++) {
        const bool gradients = offload == HAPT_OFFLOAD_STAGES_GRADIENTS || offload == HAPT_OFFLOAD_GRADIENTS;
        for (int on_host = gradients; on_host <= (offload != HAPT_OFFLOAD_NO); on_host++)
            if (test_long() || offload == HAPT_OFFLOAD_STAGES_GRADIENTS)
                check_memory_of_choices(false, offload, on_host, HAPT_WEIGHT_SHARDING_NO);
    }
    check_memory_of_choices(true, HAPT_OFFLOAD_NO, false, HAPT_WEIGHT_SHARDING_NO);
    check_memory_of_choices(false, HAPT_OFFLOAD_NO, false, HAPT_WEIGHT_SHARDING_ALL);
    if (!test_long()) return;
    check_memory_of_choices(false, HAPT_OFFLOAD_STAGES, false, HAPT_WEIGHT_SHARDING_MAY);
    check_memory_of_choices(false, HAPT_OFFLOAD_OPTIMIZER, true, HAPT_WEIGHT_SHARDING_MAY);
}

/* Tensor-parallel degrees are powers of two that divide the devices of a node. The remaining devices share the rows.
 * Rows are ordered by n, m, tp. Every row has a candidate, and none is worse on every range than another row of its
 * submesh. */
static void variants(void)
{
    struct run run, two;
    const struct fixture_gpt shape = {3, 1024, 16, 512, 4096, 8, true, true};
    predict(&run, gpus, shape, "1000000");
    predict_up_to(&two, gpus, shape, "1000000", "2");
    const int L = run.profile->layer_count;
    for (int c = 0; c < 2; c++) {
        const struct hapt_profile_cluster *table = &run.profile->cluster[c];
        for (int s = 0; s < table->submesh_count; s++) {
            const struct hapt_submesh its = table->submesh[s];
            const int dp = its.n * its.m / its.tp;
            CHECK((its.tp & (its.tp - 1)) == 0 && its.m % its.tp == 0 && dp <= 8);
            if (s > 0) {
                const struct hapt_submesh before = table->submesh[s - 1];
                CHECK(its.n > before.n ||
                      (its.n == before.n && (its.m > before.m || (its.m == before.m && its.tp > before.tp))));
            }
            int candidates = 0;
            for (int i = 0; i < L; i++)
                for (int j = i; j < L; j++) candidates += isfinite(time_at(&run, c, s, i, j));
            CHECK(candidates > 0);
            for (int o = 0; o < table->submesh_count; o++) {
                bool better = false;
                if (o == s || table->submesh[o].n != its.n || table->submesh[o].m != its.m) continue;
                for (int i = 0; i < L; i++) {
                    for (int j = i; j < L; j++) {
                        const size_t mine = hapt_profile_index(run.profile, s, i, j),
                                     other = hapt_profile_index(run.profile, o, i, j);
                        better = better || isnan(table->stage_time[other]) ||
                                 table->stage_time[mine] < table->stage_time[other] ||
                                 table->parameter_bytes[mine] < table->parameter_bytes[other] ||
                                 table->activation_bytes[mine] < table->activation_bytes[other] ||
                                 table->step_time[mine] < table->step_time[other];
                    }
                }
                CHECK_MESSAGE(better, "%dx%d tp %d is dominated by tp %d", its.n, its.m, its.tp, table->submesh[o].tp);
            }
        }
        for (int s = 0; s < two.profile->cluster[c].submesh_count; s++) {
            const struct hapt_submesh its = two.profile->cluster[c].submesh[s];
            const int same = row_of(&run, c, its.n, its.m, its.tp);
            CHECK(its.tp <= 2);
            if (same >= 0) CHECK_NEAR(time_at(&two, c, s, 0, L - 1), time_at(&run, c, same, 0, L - 1), 0);
        }
    }
    CHECK(row_of(&run, 0, 4, 8, 4) >= 0 &&
          row_of(&run, 0, 4, 8, 1) < 0); /* 32 devices can share 8 rows only as 4 x 8 */
    CHECK(row_of(&two, 0, 1, 2, 2) >= 0);
    hapt_arena_release(&run.arena);
    hapt_arena_release(&two.arena);
}

/* With a link of half the speed the extra time is that of Megatron's collectives: four all-reduces of b s h elements
 * per block. */
static void collectives_are_priced(void)
{
    static const char node[] = "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": ["
                               "{\"name\": \"a100\", \"nodes\": 1, \"devices_per_node\": 4, \"device\": \"A100-40GB\", "
                               "\"intra_node_bandwidth\": \"%d GB/s\", \"intra_node_latency\": \"2 us\"}]}\n";
    char text[2][512];
    struct run run[2];
    for (int k = 0; k < 2; k++) {
        snprintf(text[k], sizeof text[k], node, 300 >> k);
        predict(&run[k], text[k], (struct fixture_gpt){3, 1024, 16, 512, 4096, 8, false, true}, "1000000");
    }
    for (int tp = 2; tp <= 4; tp *= 2) {
        const int dp = 4 / tp, fast = row_of(&run[0], 0, 1, 4, tp), slow = row_of(&run[1], 0, 1, 4, tp);
        CHECK(fast >= 0 && slow >= 0);
        if (fast < 0 || slow < 0) continue;
        const int L = run[0].profile->layer_count;
        const double apart = time_at(&run[1], 0, slow, 0, L - 1) - time_at(&run[0], 0, fast, 0, L - 1);
        const double bsh = 2.0 * 8 / dp * 512 * 1024, bs = 4.0 * 8 / dp * 512; /* all long enough for rings */
        const double bytes = (4 * 3 + 2) * bsh + 3 * bs;
        const double expected = 2.0 * (tp - 1) / tp * bytes / (0.8 * 300e9);
        CHECK_MESSAGE(fabs(apart - expected) < 0.02 * expected, "tp %d: %g s, expected %g s", tp, apart, expected);
    }
    hapt_arena_release(&run[0].arena);
    hapt_arena_release(&run[1].arena);
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
        CHECK(isfinite(time_at(&some, 0, 0, i, i))); /* one layer cannot be divided */
    }
    CHECK(pruned > 0 && isnan(time_at(&some, 0, 0, 0, L - 1)) && isfinite(time_at(&all, 0, 0, 0, L - 1)));
    hapt_arena_release(&all.arena);
    hapt_arena_release(&some.arena);
}

/* Seconds per step of the whole model on one A100 whose host has such a bandwidth and rate. */
static double step_s(double bandwidth, double update_rate, bool host_update, int *parameters)
{
    struct run run;
    char cluster[512];
    struct hapt_config *config = NULL;
    char *words[] = {"hapt", "profile", "--imbalance", "1000000"};
    snprintf(cluster, sizeof cluster,
             "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [{\"name\": \"a\", \"nodes\": 1, "
             "\"devices_per_node\": 2, \"device\": \"A100-40GB\", \"intra_node_bandwidth\": \"300 GB/s\", "
             "\"host\": {\"bandwidth\": %.17g, \"update_rate\": %.17g}}]}\n",
             bandwidth, update_rate);
    hapt_arena_init(&run.arena);
    run.model = fixture_gpt(&run.arena, (struct fixture_gpt){5, 256, 4, 32, 1024, 4, false, true});
    CHECK_OK(hapt_config_parse(4, words, &run.arena, &config));
    CHECK_OK(hapt_layers_build(run.model->graph, &(struct hapt_layers_options){.heavy_minimum = 2}, &run.arena,
                               &run.layers));
    CHECK_OK(hapt_profile_predict(cluster_of(&run.arena, cluster), run.model, run.layers, config, NULL,
                                  &(struct hapt_predict_options){.offload = {HAPT_OFFLOAD_OPTIMIZER, host_update}},
                                  &run.arena, &run.profile));
    CHECK(run.profile->host_state && run.profile->host_update == host_update);
    *parameters = (int)hapt_model_parameter_count(run.model);
    const double seconds =
        run.profile->cluster[0]
            .step_time[hapt_profile_index(run.profile, row_of(&run, 0, 1, 1, 1), 0, run.profile->layer_count - 1)];
    hapt_arena_release(&run.arena);
    return seconds;
}

/* A step with updates on the host takes as long as the slowest of gradients out, updates and weights back, and a part
 * of a window longer; with updates on the device as long as the state and the masters in one direction. */
static void updates_on_hosts(void)
{
    const double never = 1e15;
    int parameters;
    const double base_s = step_s(never, never, true, &parameters), n = parameters;
    const struct {
        double bandwidth, rate, least_s;
    } cases[] = /* two devices of a node share its rate */ {
        {1e6, never, 4 * n / 1e6}, {never, 1e6, 2 * n / 1e6}, {4e6, 1e6, 2 * n / 1e6}, {1e6, 1e6, 4 * n / 1e6}};
    for (int k = 0; k < 4; k++) {
        const double more_s = step_s(cases[k].bandwidth, cases[k].rate, true, &parameters) - base_s;
        CHECK_MESSAGE(more_s > 0.99 * cases[k].least_s && more_s < 1.35 * cases[k].least_s, "case %d: %g s, not %g s",
                      k, more_s, cases[k].least_s);
    }
    const double device_s = step_s(1e6, never, false, &parameters) - step_s(never, never, false, &parameters);
    CHECK_MESSAGE(device_s > 0.99 * 12 * n / 1e6 && device_s < 1.2 * 12 * n / 1e6, "%g s", device_s);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(times_are_plausible);
    RUN(exchanges_are_bounded);
    RUN(memory_is_the_planners);
    RUN(memory_of_choices);
    RUN(updates_on_hosts);
    RUN(variants);
    RUN(collectives_are_priced);
    RUN(unbalanced_candidates_are_pruned);
    return test_finish();
}
