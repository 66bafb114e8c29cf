/*
 * Published figures of other systems, computed by the baselines: Megatron's bubble, Alpa's plan in HAPT Table 1, and
 * HexiScale's cost model. Those of Pfeife, DeepSpeed and Colossal-AI are in pfeife.c.
 */
#include "hapt/baselines.h"
#include "random_profile.h"

/* A subcluster whose stages take `layer_s` per layer, divided by the devices; two thirds of it backward. Submeshes that
 * `keep` refuses have no candidates. */
static void fill(struct hapt_profile *profile, int c, double layer_s, bool (*keep)(const struct hapt_submesh *submesh))
{
    struct hapt_profile_cluster *cluster = &profile->cluster[c];
    cluster->step_time = NULL;
    for (int s = 0; s < cluster->submesh_count; s++)
        for (int i = 0; i < profile->layer_count; i++)
            for (int j = i; j < profile->layer_count; j++) {
                const struct hapt_submesh *submesh = &cluster->submesh[s];
                const size_t cell = hapt_profile_index(profile, s, i, j);
                const double time_s = (j - i + 1) * layer_s / (submesh->n * submesh->m);
                cluster->stage_time[cell] = keep(submesh) ? time_s : NAN;
                cluster->stage_forward_time[cell] = time_s / 3;
                cluster->parameter_bytes[cell] = j - i + 1;
                cluster->activation_bytes[cell] = 0.01 * (j - i + 1);
            }
}

static void free_links(struct hapt_profile *profile)
{
    const int C = profile->cluster_count;
    for (int l = 0; l < profile->layer_count; l++) profile->boundary_bytes[l] = 0;
    for (int link = 0; link < C * C; link++) {
        profile->link_bandwidth[link] = 1;
        profile->link_latency[link] = 0;
    }
}

/* ---- Megatron ---- */

static bool is_single(const struct hapt_submesh *submesh)
{
    return submesh->n * submesh->m == 1;
}

/* Equal stages on p devices with v chunks each, m microbatches: a step takes 1 + (p - 1) / (v m) times the ideal
 * (arXiv 2104.04473, 2.2.1 and 2.2.2). */
static void megatron_bubble(void)
{
    for (int p = 2; p <= 8; p *= 2)
        for (int v = 1; v <= 8; v *= 2)
            for (int m = p; m <= 4 * p; m += p) {
                struct hapt_arena arena;
                struct hapt_profile *profile;
                struct hapt_plan *plan;
                hapt_arena_init(&arena);
                CHECK_OK(hapt_profile_create(p * v, 1, &arena, &profile));
                CHECK_OK(random_profile_cluster(profile, 0, "gpu", p, 1, 1e6, 1, &arena));
                fill(profile, 0, 3, is_single);
                free_links(profile);
                const struct hapt_strategy_options options = {.search = {.microbatches = m, .hide_threshold = 0.02}};
                CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_MEGATRON, &options, &arena, &plan,
                                               NULL));
                const double ideal_s = 3.0 * m * v, bubble = plan->simulated_s / ideal_s - 1;
                CHECK_MESSAGE(fabs(bubble - (p - 1.0) / (v * m)) < 1e-12, "p %d, m %d, v %d: bubble %g, not %g", p, m,
                              v, bubble, (p - 1.0) / (v * m));
                CHECK(plan->submesh_count == p && plan->stage_count == p * v);
                CHECK(plan->schedule == (v > 1 ? HAPT_SCHEDULE_INTERLEAVED : HAPT_SCHEDULE_1F1B));
                hapt_arena_release(&arena);
            }
}

/* ---- Alpa ---- */

/* A stage on one node: the case study has no other. (By peak FLOP/s alone, one on two nodes would be as good.) */
static bool is_on_one_node(const struct hapt_submesh *submesh)
{
    return submesh->n == 1;
}

/* HAPT Table 1, 8 layers on 2 x 2 A100 and 1 x 2 V100, priced by peak FLOP/s: layers 1-2 on the V100s, which take 1.65
 * times as long for them as two A100s for layers 3-5 or 6-8. */
static void alpa_in_table_1_of_hapt(void)
{
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_plan *plan;
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(8, 2, &arena, &profile));
    CHECK_OK(random_profile_cluster(profile, 0, "a100", 2, 2, 1e6, 1, &arena));
    CHECK_OK(random_profile_cluster(profile, 1, "v100", 1, 2, 1e6, 1, &arena));
    fill(profile, 0, 1 / 312.0, is_on_one_node);
    fill(profile, 1, 1 / 125.0, is_on_one_node);
    free_links(profile);
    const struct hapt_strategy_options options = {.search = {.microbatches = 128, .hide_threshold = 0.02}};
    CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_ALPA, &options, &arena, &plan, NULL));
    CHECK(plan->stage_count == 3);
    CHECK(plan->stage[0].end_layer == 2 && plan->stage[1].end_layer == 5);
    CHECK(plan->stage[0].submesh->subcluster[0] == 1);
    for (int i = 1; i < 3; i++) {
        const double cost = plan->stage[0].compute_s / plan->stage[i].compute_s;
        CHECK(plan->stage[i].submesh->subcluster[0] == 0);
        CHECK_MESSAGE(fabs(cost / 1.65 - 1) < 0.01, "the V100s take %.3f times as long, not 1.65", cost);
    }
    hapt_arena_release(&arena);
}

/* ---- HexiScale ---- */

/* The authors' cost of a pipeline (github.com/Relaxed-System-Lab/FlashFlex, experimental/cost_modeling.py,
 * pipeline_cost): microbatches advance in step, and each position of the pipeline takes as long as its slowest stage,
 * computation and the transfers to the next stage. */
static double authors_cost_s(const struct hapt_plan *plan)
{
    const int S = plan->stage_count, B = plan->microbatches;
    double sum_s = 0;
    for (int column = 0; column < B + S - 1; column++) {
        double slowest_s = 0;
        for (int i = 0; i < S; i++)
            if (column >= i && column < i + B)
                slowest_s = fmax(slowest_s, plan->stage[i].compute_s + 2 * plan->stage[i].comm_s);
        sum_s += slowest_s;
    }
    return sum_s;
}

static int compare_doubles(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The step of HexiScale's plans on two random subclusters. The authors give 2 % as the error of their cost. */
static void hexiscale_cost(void)
{
    enum { CASES = 300 };
    double error[CASES];
    int count = 0;
    for (uint64_t start = 1; count < CASES; start++) {
        struct hapt_arena arena;
        uint64_t seed = start;
        struct hapt_plan *plan;
        hapt_arena_init(&arena);
        struct hapt_profile *profile = random_profile_of(&seed, 2, 8, &arena);
        for (int c = 0; c < 2; c++) {
            profile->cluster[c].device_memory_bytes = 1e6;
            profile->cluster[c].step_time = NULL;
        }
        const struct hapt_strategy_options options = {
            .search = {.microbatches = 8 << start % 4, .hide_threshold = 0.02, .may_fail = true}};
        const enum hapt_status status =
            hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &plan, NULL);
        if (status != HAPT_OK)
            hapt_fail_reset();
        else if (plan->stage_count > 1)
            error[count++] = plan->simulated_s / authors_cost_s(plan) - 1;
        hapt_arena_release(&arena);
    }
    qsort(error, CASES, sizeof *error, compare_doubles);
    printf(
        "HexiScale: simulated step over the authors' cost: median %+.1f %%, quartiles %+.1f %% and %+.1f %%, %+.1f %% "
        "to %+.1f %%\n",
        100 * error[CASES / 2], 100 * error[CASES / 4], 100 * error[3 * CASES / 4], 100 * error[0],
        100 * error[CASES - 1]);
    CHECK(fabs(error[CASES / 2]) < 0.01);
    CHECK(error[CASES / 4] > -0.03 && error[3 * CASES / 4] < 0.03);
    /* The cost lets the sender alone wait, and all stages of a position for the slowest one. */
    CHECK(error[0] > -0.2 && error[CASES - 1] < 0.6);
}

/* The authors' script for Llama-2 7B (the same repository, scripts/generate_hetero_scripts.sh): four equal pipelines,
 * each with 4 of 32 layers on every RTX 4090, 2 on every 3090 and 3080 Ti. One of them here, priced by the FLOP/s of
 * the repository. */
static void hexiscale_plan_of_the_authors(void)
{
    static const struct {
        const char *name;
        int nodes, published;
        double tflops;
    } device[] = {{"rtx-4090", 3, 4, 165.2}, {"rtx-3090", 1, 2, 80}, {"rtx-3080ti", 1, 2, 56.9}};
    enum { KINDS = 3, LAYERS = 32 };
    struct hapt_arena arena;
    struct hapt_profile *profile;
    struct hapt_plan *plan, *published;
    int most[KINDS] = {0}, least[KINDS] = {LAYERS, LAYERS, LAYERS}, layer = 0, length = 0;
    char text[512];
    hapt_arena_init(&arena);
    CHECK_OK(hapt_profile_create(LAYERS, KINDS, &arena, &profile));
    for (int c = 0; c < KINDS; c++) {
        CHECK_OK(random_profile_cluster(profile, c, device[c].name, device[c].nodes, 2, 1e6, device[c].tflops, &arena));
        fill(profile, c, 1 / device[c].tflops, is_single);
        for (int i = 0; i < 2 * device[c].nodes; i++, layer += device[c].published)
            length += snprintf(text + length, sizeof text - (size_t)length, "%s%d-%d@%s:1x1", layer ? "," : "", layer,
                               layer + device[c].published, device[c].name);
    }
    CHECK(layer == LAYERS);
    free_links(profile);
    struct hapt_strategy_options options = {
        .search = {.microbatches = 120, .hide_threshold = 0.02, .use_all_devices = true}};
    CHECK_OK(hapt_plan_by_strategy(MPI_COMM_SELF, profile, HAPT_STRATEGY_HEXISCALE, &options, &arena, &plan, NULL));
    options.search.schedule = HAPT_SCHEDULE_1F1B;
    CHECK_OK(hapt_plan_force(profile, &options.search, text, &arena, &published));
    for (int i = 0; i < plan->stage_count; i++) {
        const int c = plan->stage[i].submesh->subcluster[0];
        const int layers = plan->stage[i].end_layer - plan->stage[i].first_layer;
        most[c] = layers > most[c] ? layers : most[c];
        least[c] = layers < least[c] ? layers : least[c];
    }
    const double slower = published->simulated_s / plan->simulated_s;
    CHECK(plan->stage_count == 10 && most[0] == 5 && least[1] >= 1 && least[2] == 1);
    CHECK_MESSAGE(slower >= 1 && slower < 1.2, "the published plan takes %.3f times as long", slower);
    printf("HexiScale: layers on a 4090 %d to %d, on a 3090 %d to %d, on a 3080 Ti %d to %d; published 4, 2, 2, which "
           "takes %.3f times as long\n",
           least[0], most[0], least[1], most[1], least[2], most[2], slower);
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(megatron_bubble);
    RUN(alpa_in_table_1_of_hapt);
    RUN(hexiscale_cost);
    RUN(hexiscale_plan_of_the_authors);
    return test_finish();
}
