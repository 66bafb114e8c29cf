/*
 * HAP Fig. 2: one program of feed-forward blocks at even ratios, at ratios in proportion to the devices' speed, and at
 * optimal ratios. Normalisations and sums are sharded by rows, products by columns and then rows, with all-gather and
 * reduce-scatter between them.
 *
 * regimes CLUSTER ROWS LENGTH HIDDEN BLOCKS
 *
 * Prints a JSON object with seconds of a step, by the costs of hapt spmd for that cluster file.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/alternate.h"
#include "hapt/spmd_mesh.h"

static void must(enum hapt_status status)
{
    if (status == HAPT_OK) return;
    fprintf(stderr, "%s\n", hapt_fail_message());
    exit(1);
}

static int parameter(struct hapt_graph *graph, const char *kind, int block, int dims, int64_t rows, int64_t columns)
{
    char name[32];
    int index = -1;
    struct hapt_tensor tensor = {.name = name,
                                 .kind = HAPT_TENSOR_PARAMETER,
                                 .dtype = HAPT_F32,
                                 .dims = dims,
                                 .shape = {rows, columns},
                                 .trainable = true,
                                 .producer = -1,
                                 .gradient = -1,
                                 .primal = -1};
    snprintf(name, sizeof name, "%s%d", kind, block);
    must(hapt_graph_add_tensor(graph, &tensor, &index));
    return index;
}

static int add(struct hapt_graph *graph, const char *type, int block, const int *input, int inputs)
{
    static const double epsilon[HAPT_MAX_ATTRIBUTES] = {1e-5};
    int output[HAPT_MAX_OUTPUTS];
    char name[32];
    snprintf(name, sizeof name, "%s_%d_%d", type, block, graph->op_count);
    must(hapt_graph_add_op(graph, type, name, input, inputs, NULL, epsilon, output));
    return output[0];
}

/* x + down(gelu(up(norm(x)))) */
static int block_of(struct hapt_graph *graph, int block, int64_t d, int x)
{
    int y = add(graph, "layer_norm", block,
                (int[]){x, parameter(graph, "gamma", block, 1, d, 0), parameter(graph, "beta", block, 1, d, 0)}, 3);
    y = add(graph, "linear", block, (int[]){y, parameter(graph, "up", block, 2, d, 4 * d), -1}, 3);
    y = add(graph, "gelu", block, &y, 1);
    y = add(graph, "linear", block, (int[]){y, parameter(graph, "down", block, 2, 4 * d, d), -1}, 3);
    return add(graph, "add", block, (int[]){x, y}, 2);
}

static struct hapt_graph *build(int64_t rows, int64_t length, int64_t d, int blocks, struct hapt_arena *arena)
{
    struct hapt_graph *graph;
    int x, targets;
    struct hapt_tensor input = {.name = "x",
                                .kind = HAPT_TENSOR_INPUT,
                                .dtype = HAPT_F32,
                                .dims = 3,
                                .shape = {rows, length, d},
                                .producer = -1,
                                .gradient = -1,
                                .primal = -1};
    struct hapt_tensor output = {.name = "y",
                                 .kind = HAPT_TENSOR_INPUT,
                                 .role = HAPT_ROLE_TARGETS,
                                 .dtype = HAPT_I32,
                                 .dims = 2,
                                 .shape = {rows, length},
                                 .producer = -1,
                                 .gradient = -1,
                                 .primal = -1};
    must(hapt_graph_create(arena, &graph));
    must(hapt_graph_add_tensor(graph, &input, &x));
    must(hapt_graph_add_tensor(graph, &output, &targets));
    for (int b = 0; b < blocks; b++) x = block_of(graph, b, d, x);
    graph->loss = add(graph, "cross_entropy", blocks, (int[]){x, targets}, 2);
    must(hapt_graph_differentiate(graph));
    return graph;
}

/* Shards products by columns, then by rows, and all else by the model's rows. Synthesis chooses the backward
 * operators. */
static const struct hapt_cut *const *force(const struct hapt_graph *graph, struct hapt_arena *arena)
{
    struct hapt_cut *cut = hapt_arena_alloc(arena, (size_t)graph->op_count * sizeof *cut, _Alignof(struct hapt_cut));
    const struct hapt_cut **forced =
        hapt_arena_alloc(arena, (size_t)graph->op_count * sizeof *forced, _Alignof(struct hapt_cut *));
    bool down = false;
    if (!cut || !forced) exit(1);
    for (int o = 0; o < graph->op_count; o++) {
        const char *type = hapt_op_type_at(graph->op[o].type)->name;
        forced[o] = NULL;
        if (o >= graph->forward_count || strcmp(type, "gelu") == 0) continue;
        const bool product = strcmp(type, "linear") == 0;
        cut[o] = (struct hapt_cut){.letter = product ? (down ? 'i' : 'o')
                                                     : hapt_op_signature_of(graph, &graph->op[o])->input[0].letter[0]};
        down = product ? !down : down;
        forced[o] = &cut[o];
    }
    return forced;
}

int main(int argc, char **argv)
{
    enum { ARGUMENTS = 6 };
    if (argc != ARGUMENTS || atoi(argv[2]) < 1 || atoi(argv[3]) < 1 || atoi(argv[4]) < 1 || atoi(argv[5]) < 1) {
        fprintf(stderr, "usage: regimes CLUSTER ROWS LENGTH HIDDEN BLOCKS\n");
        return 2;
    }
    struct hapt_arena arena;
    struct hapt_cluster *cluster;
    struct hapt_sharding *whole;
    struct hapt_spmd_mesh *mesh;
    struct hapt_axis_program program;
    struct hapt_synthesis_report report;
    struct hapt_ratio_regimes regimes;
    hapt_arena_init(&arena);
    must(hapt_cluster_load(argv[1], &arena, &cluster));
    hapt_cluster_assume(cluster);
    const struct hapt_graph *graph = build(atoi(argv[2]), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), &arena);
    must(hapt_sharding_trivial(graph, &arena, &whole));
    must(hapt_spmd_mesh_build(cluster, graph, HAPT_F32, HAPT_SPMD_DEVICES, NULL, 1, &arena, &mesh));
    const struct hapt_axis even = {.size = mesh->size};
    const struct hapt_synthesis_options options = {.forced = force(graph, &arena)};
    const struct hapt_alternation alternation = {
        .sharding = whole, .devices = mesh->size, .costs = &mesh->costs, .power = mesh->power};
    must(hapt_synthesise(whole, 0, &even, &mesh->costs, &options, &arena, &program, &report));
    must(hapt_alternation_ratios(&alternation, &program, &arena, &regimes));
    printf("{\"compute_s\": %.9g, \"communicate_s\": %.9g, \"even_s\": %.9g, \"proportional_s\": %.9g, \"best_s\": "
           "%.9g, \"first\": %.6f, \"last\": %.6f}\n",
           report.compute_s, report.communicate_s, regimes.even_s, regimes.proportional_s, regimes.best_s,
           regimes.ratio[0], regimes.ratio[mesh->size - 1]);
    hapt_arena_release(&arena);
    return 0;
}
