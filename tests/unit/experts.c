/*
 * HAP Fig. 17: experts are sharded unevenly over two fast and two slow devices, compared with padding to a multiple of
 * the devices and even shards. The number of tokens grows with the experts.
 */
#include "test.h"

#include <unistd.h>

#include "hapt/alternate.h"
#include "hapt/model.h"
#include "hapt/spmd_mesh.h"

enum { LEAST = 4, MOST = 12, DEVICES = 4, ROWS_AN_EXPERT = 16 };

static const char cluster_text[] =
    "{\"format\": \"hapt-cluster\", \"version\": 1, \"subclusters\": [\n"
    "{\"name\": \"a100\", \"nodes\": 1, \"devices_per_node\": 2, \"device\": \"A100-40GB\", \"intra_node_latency\": "
    "\"5 us\"},\n"
    "{\"name\": \"p100\", \"nodes\": 1, \"devices_per_node\": 2, \"device\": \"P100\", \"intra_node_latency\": \"5 "
    "us\"}],\n"
    "\"links\": [{\"between\": [\"a100\", \"p100\"], \"bandwidth\": \"200 Gbit/s\", \"latency\": \"5 us\"}]}\n";

static struct hapt_cluster *load_cluster(struct hapt_arena *arena)
{
    char path[64];
    struct hapt_cluster *cluster = NULL;
    snprintf(path, sizeof path, "/tmp/hapt-experts-%ld.json", (long)getpid());
    FILE *file = fopen(path, "wb");
    if (CHECK(file != NULL)) {
        fputs(cluster_text, file);
        fclose(file);
    }
    CHECK_OK(hapt_cluster_load(path, arena, &cluster));
    unlink(path);
    hapt_cluster_assume(cluster);
    return cluster;
}

/* A model with `experts`, of which the first `named` get the tokens. All experts have the slots of those, and compute
 * as much. */
static struct hapt_graph *build(int experts, int named, struct hapt_arena *arena)
{
    char number[2][16], factor[32];
    char *words[] = {"hapt",    "model",        "bert-moe", "--layers",          "2",    "--hidden", "512", "--heads",
                     "8",       "--sequence",   "128",      "--vocab",           "512",  "--top-k",  "2",   "--experts",
                     number[0], "--microbatch", number[1],  "--capacity-factor", factor, "--dtype",  "fp32"};
    struct hapt_config *config = NULL;
    struct hapt_model *model = NULL;
    snprintf(number[0], sizeof number[0], "%d", experts);
    snprintf(number[1], sizeof number[1], "%d", ROWS_AN_EXPERT * named);
    snprintf(factor, sizeof factor, "%.9g", 1.25 * experts / named);
    CHECK_OK(hapt_config_parse((int)(sizeof words / sizeof words[0]), words, arena, &config));
    CHECK_OK(hapt_model_build("bert-moe", config, arena, &model));
    for (int o = 0; o < model->graph->op_count; o++)
        if (strcmp(hapt_op_type_at(model->graph->op[o].type)->name, "expert_linear") == 0)
            model->graph->op[o].real[0] = fmin(1, model->graph->op[o].real[0] * experts / named);
    CHECK_OK(hapt_graph_differentiate(model->graph));
    return model->graph;
}

/* The step time of HAP's program and ratios. *even_s: the step time of the best program at even ratios. */
static double step_s(int experts, int named, double *even_s)
{
    struct hapt_arena arena;
    struct hapt_sharding *whole;
    struct hapt_spmd_mesh *mesh;
    struct hapt_alternation_result result;
    hapt_arena_init(&arena);
    const struct hapt_graph *graph = build(experts, named, &arena);
    CHECK_OK(hapt_sharding_trivial(graph, &arena, &whole));
    CHECK_OK(hapt_spmd_mesh_build(load_cluster(&arena), graph, HAPT_F32, HAPT_SPMD_DEVICES, NULL, 1, &arena, &mesh));
    const struct hapt_alternation asked = {
        .sharding = whole, .devices = DEVICES, .costs = &mesh->costs, .power = mesh->power, .most_states = 200};
    CHECK_OK(hapt_alternate(&asked, &arena, &result));
    *even_s = 0;
    for (int t = result.turn_count - 1; t >= 0; t--)
        if (strcmp(result.turn[t].start, "even") == 0) *even_s = result.turn[t].program_s;
    const double cost_s = result.price.cost_s;
    hapt_arena_release(&arena);
    return cost_s;
}

/* The largest rise from one number of experts to the next, divided by the mean rise. */
static double largest_rise(const double *curve)
{
    double most = 0;
    for (int e = LEAST; e < MOST; e++) most = fmax(most, curve[e + 1] - curve[e]);
    return most * (MOST - LEAST) / (curve[MOST] - curve[LEAST]);
}

static void uneven_experts(void)
{
    double own[MOST + 1], padded[MOST + 1], ignored, gain = 1;
    for (int e = LEAST; e <= MOST; e++) {
        own[e] = step_s(e, e, &ignored);
        step_s((e + DEVICES - 1) / DEVICES * DEVICES, e, &padded[e]);
        CHECK_MESSAGE(own[e] <= padded[e] * (1 + 1e-9), "%d experts take %.6g s, padded %.6g s", e, own[e], padded[e]);
        if (e > LEAST)
            CHECK_MESSAGE(own[e] >= own[e - 1], "%d experts take %.6g s, one less %.6g s", e, own[e], own[e - 1]);
        gain = fmax(gain, padded[e] / own[e]);
    }
    fprintf(stderr, "  uneven experts are up to %.0f %% faster; largest rise %.2f times the mean, padded %.2f\n",
            100 * (gain - 1), largest_rise(own), largest_rise(padded));
    CHECK(gain > 1.2 && largest_rise(own) < largest_rise(padded) && largest_rise(own) < 2);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(uneven_experts);
    return test_finish();
}
