/* hapt spmd: HAP alone; finds one SPMD program for all devices of a cluster, its ratios and cost. */
#include "spmd.h"

#include "hapt/calibration.h"
#include "hapt/progress.h"

#include <math.h>
#include <string.h>

#include "outputs.h"

const char hapt_command_spmd_help[] =
    "Treats all devices of the cluster as one mesh axis and alternates two searches (HAP, EuroSys 2024, sections 3\n"
    "to 5): the best program for given sharding ratios (how every operator is sharded, and the collectives between\n"
    "operators), and the best ratios for that program. It starts with ratios in proportion to device speed, then\n"
    "even ones, then separate ratios for up to --segments segments of layers. The best pair is kept. A step is\n"
    "--microbatches times the model's microbatch (default 1: the microbatch is the global batch).\n"
    "Costs are predicted: operators by the roofline of their share on each device (--efficiency: measured tables);\n"
    "collectives as measured over as many ranks, if the cluster file has that (hapt topology --collectives), else\n"
    "by rings over the slowest link. Gradients are exchanged after the backward pass, without overlap (HAP 3.2);\n"
    "all their sums are one call with one latency.\n"
    "--mesh machines treats every machine as one virtual device that splits its rows evenly over its devices. A\n"
    "collective then has three steps: inside the machines, between them, inside (HAP 6).\n"
    "\n"
    "--output P.h5 writes a plan of one stage on all these devices, for `hapt train --plan P.h5`. On several\n"
    "subclusters it is a mixed stage with uneven shards. A single subcluster must be one node, or nodes of one\n"
    "device.\n"
    "\n"
    "Prints the cost of a step and its parts, every iteration, the ratios of each segment, and the memory per\n"
    "device; then, by the same costs, data parallelism with even (DP-EV) and proportional ratios (DP-CP); then the\n"
    "program. It names what ranks hold of a tensor: `replicated`, `sharded(d)` on dimension d, or `partial` sums.\n"
    "Equal layers are printed once; --full prints all.\n";

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (!hapt_config_text(config, "input"))
        return hapt_fail(HAPT_ERR_USAGE, "make one with `hapt model bert-base --output m.h5`, then give --input m.h5",
                         "no model file given");
    return hapt_config_bool(config, "json") ? hapt_phase_refuse_unused(config, "--json prints no program", "full")
                                            : HAPT_OK;
}

/* Optimizer states per parameter. */
static int state_count(const struct hapt_config *config)
{
    if (strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0) return 2;
    return hapt_config_real(config, "momentum") > 0 ? 1 : 0;
}

static double state_bytes(const struct hapt_config *config)
{
    const int states = state_count(config);
    return states > 0 ? 4.0 * states : -1; /* -1: no states */
}

/* Memory per device, its maximum, and whether every device fits, from the tensor shards that it holds. */
static enum hapt_status check_memory(const struct hapt_alternation *alternation, const struct spmd_outcome *outcome,
                                     const struct hapt_axis *axis, const int *ratio_of,
                                     const struct hapt_axis_program *program, struct hapt_arena *arena,
                                     double **memory_bytes, double *largest_bytes, bool *fits)
{
    const struct hapt_synthesis_options options = {.microbatches = alternation->microbatches,
                                                   .optimizer_bytes_per_element =
                                                       alternation->optimizer_bytes_per_element,
                                                   .ratio_of = ratio_of};
    struct hapt_program_price price;
    HAPT_TRY(hapt_axis_program_price(alternation->sharding, 0, axis, &outcome->mesh->memory_costs, &options, program,
                                     arena, &price));
    *largest_bytes = 0;
    *fits = true;
    for (int j = 0; j < axis->size; j++) {
        *largest_bytes = fmax(*largest_bytes, price.memory_bytes[j]);
        *fits = *fits && hapt_at_most(price.memory_bytes[j], outcome->mesh->memory_bytes[j]);
    }
    if (memory_bytes) *memory_bytes = price.memory_bytes;
    return HAPT_OK;
}

static enum hapt_status find_baselines(const struct hapt_alternation *alternation, struct hapt_arena *arena,
                                       struct spmd_outcome *outcome)
{
    static const char *const name[SPMD_BASELINES] = {"DP-EV", "DP-CP"};
    for (int b = 0; b < SPMD_BASELINES; b++) {
        struct spmd_baseline *baseline = &outcome->baseline[b];
        struct hapt_axis axis;
        struct hapt_axis_program program;
        struct hapt_program_price price;
        baseline->name = name[b];
        const enum hapt_status status = hapt_alternation_data_parallel(
            alternation, b == SPMD_EVEN ? NULL : outcome->mesh->power, arena, &axis, &program, &price);
        if (status == HAPT_ERR_INFEASIBLE) {
            hapt_fail_reset();
            continue;
        }
        HAPT_TRY(status);
        baseline->exists = true;
        baseline->cost_s = price.cost_s * outcome->microbatches;
        baseline->compute_s = price.compute_s * outcome->microbatches;
        baseline->end_s = price.end_s * outcome->microbatches;
        HAPT_TRY(check_memory(alternation, outcome, &axis, NULL, &program, arena, NULL, &baseline->memory_bytes,
                              &baseline->fits));
    }
    return HAPT_OK;
}

static enum hapt_status find(const struct hapt_config *config, const struct hapt_efficiency *efficiency,
                             struct hapt_arena *arena, struct spmd_outcome *outcome)
{
    const bool machines = strcmp(hapt_config_text(config, "mesh"), "machines") == 0,
               limited = hapt_config_bool(config, "memory-limit");
    const struct hapt_graph *graph = outcome->model->graph;
    struct hapt_sharding *trivial, *applied;
    struct hapt_spmd_mesh *mesh;
    double largest_bytes;
    bool fits;
    HAPT_TRY(hapt_spmd_mesh_build(outcome->cluster, graph, outcome->model->dtype,
                                  machines ? HAPT_SPMD_MACHINES : HAPT_SPMD_DEVICES, efficiency, outcome->microbatches,
                                  arena, &mesh));
    outcome->mesh = mesh;
    HAPT_TRY(hapt_sharding_trivial(graph, arena, &trivial));
    const struct hapt_alternation alternation = {
        .sharding = trivial,
        .devices = mesh->size,
        .costs = &mesh->costs,
        .power = mesh->power,
        /* With --mesh machines the limit is per device, not per machine: see check_memory below. */
        .memory_bytes = limited && !machines ? mesh->memory_bytes : NULL,
        .microbatches = outcome->microbatches,
        .optimizer_bytes_per_element = state_bytes(config),
        .layer_count = outcome->layers->count,
        .end_op = outcome->layers->end_op,
        .segments = (int)hapt_config_int(config, "segments")};
    HAPT_TRY(hapt_alternate(&alternation, arena, &outcome->result));
    HAPT_TRY(check_memory(&alternation, outcome, &outcome->result.axis, outcome->result.ratio_of,
                          &outcome->result.program, arena, &outcome->memory_bytes, &largest_bytes, &fits));
    if (limited && !fits)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "try --mesh devices, a smaller microbatch or more machines",
                         "the best program needs %.1f GB on a device, more than the device has", largest_bytes / 1e9);
    HAPT_TRY(hapt_sharding_apply(trivial, 0, &outcome->result.axis, &outcome->result.program, arena, &applied));
    outcome->sharding = applied;
    return find_baselines(&alternation, arena, outcome);
}

enum hapt_status hapt_command_spmd(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct spmd_outcome outcome = {
        .microbatches = hapt_config_given(config, "microbatches") ? (int)hapt_config_int(config, "microbatches") : 1};
    struct hapt_cluster *cluster;
    struct hapt_model *model;
    struct hapt_layers *layers;
    struct hapt_efficiency *efficiency = NULL;
    HAPT_TRY(hapt_env_agree(env->world, check_options(config)));
    HAPT_TRY(hapt_outputs_check(env, config, 1, &(struct hapt_output){.option = "output", .format = "hapt-plan"}));
    HAPT_TRY(hapt_phase_model(env, config, arena, &model));
    HAPT_TRY(hapt_phase_cluster(env, config, false, arena, &cluster));
    HAPT_TRY(hapt_phase_precision(env, config, cluster, NULL, model));
    HAPT_TRY(hapt_phase_layers(env, config, model, arena, &layers));
    outcome.model = model;
    outcome.layers = layers;
    outcome.cluster = cluster;
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0) { /* the synthesis is not parallel */
        const char *path = hapt_config_text(config, "efficiency");
        if (path) status = hapt_efficiency_load(path, arena, &efficiency);
        struct hapt_progress progress;
        hapt_progress_init(&progress, env, "synthesising", 0);
        if (status == HAPT_OK) status = find(config, efficiency, arena, &outcome);
        hapt_progress_release(&progress);
        if (status == HAPT_OK && hapt_config_text(config, "output"))
            status = spmd_save_plan(&outcome, state_count(config), hapt_config_text(config, "output"), arena);
        if (status == HAPT_OK && !env->quiet) {
            spmd_print(env, &outcome);
            status = spmd_print_program(env, &outcome, hapt_config_bool(config, "full"), arena);
        }
        if (status == HAPT_OK && env->quiet) status = spmd_print_json(&outcome);
    }
    return hapt_env_agree(env->world, status);
}
