/* hapt spmd: HAP alone, one SPMD program over all devices of a cluster. */
#include "spmd.h"

#include "hapt/progress.h"

#include <math.h>
#include <string.h>

#include "outputs.h"

const char hapt_command_spmd_help[] =
    "Takes all devices of the cluster for one mesh axis and finds by turns the program (how every operator is sharded "
    "and\n"
    "which collectives stand between them) that is best for the sharding ratios, and the ratios that are best for the\n"
    "program, first in proportion to the devices' speed, then evenly, then with ratios of their own for up to "
    "--segments\n"
    "runs of layers; the best pair is kept (HAP, EuroSys 2024, sections 3 to 5). A step is --microbatches times the "
    "model's\n"
    "microbatch (1 unless given: the microbatch is the global batch). Costs are predicted: operators by the roofline "
    "of\n"
    "their share on each device (--efficiency for measured tables), collectives as measured over as many ranks where "
    "the\n"
    "cluster file tells (hapt topology --collectives), else by rings over the slowest link. Gradients are exchanged "
    "behind\n"
    "the backward pass, overlapped with nothing (HAP 3.2); sums of all of them are one call and share its latency.\n"
    "--mesh machines takes every machine for one virtual device that shares its rows evenly among its own; "
    "collectives\n"
    "then have three steps, inside, between the machines, inside (HAP 6).\n"
    "\n"
    "--output P.h5 writes a plan of one stage on all these devices, which `hapt train --plan P.h5` runs: on devices of "
    "several\n"
    "subclusters a mixed stage with uneven shards; one subcluster must be one node or nodes of one device.\n"
    "\n"
    "Prints the cost of a step and its parts, every turn, the ratios of each segment, memory of a device, data "
    "parallelism\n"
    "at even (DP-EV) and proportional ratios (DP-CP) by the same costs, and the program: `whole`, `sharded(d)` on "
    "dimension\n"
    "d and `partial` sums are what ranks hold of a tensor. Equal layers are printed once; --full prints all.\n";

static enum hapt_status check_options(const struct hapt_config *config)
{
    if (!hapt_config_text(config, "input"))
        return hapt_fail(HAPT_ERR_USAGE, "make one with `hapt model bert-base --output m.h5`, then give --input m.h5",
                         "no model file given");
    if (hapt_config_bool(config, "json") && hapt_config_given(config, "full"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out one of them", "--full has no effect: --json prints no program");
    return HAPT_OK;
}

/* What the optimizer remembers of a parameter. */
static int state_count(const struct hapt_config *config)
{
    if (strcmp(hapt_config_text(config, "optimizer"), "adamw") == 0) return 2;
    return hapt_config_real(config, "momentum") > 0 ? 1 : 0;
}

static double state_bytes(const struct hapt_config *config)
{
    const int states = state_count(config);
    return states > 0 ? 4.0 * states : -1; /* none */
}

/* The most that one device needs, by tensors as it holds them. */
static enum hapt_status weigh_memory(const struct hapt_alternation *alternation, const struct spmd_outcome *outcome,
                                     const struct hapt_axis *axis, const int *ratio_of,
                                     const struct hapt_axis_program *program, struct hapt_arena *arena,
                                     double **memory_bytes, double *most, bool *fits)
{
    const struct hapt_synthesis_options options = {.microbatches = alternation->microbatches,
                                                   .optimizer_bytes_per_element =
                                                       alternation->optimizer_bytes_per_element,
                                                   .ratio_of = ratio_of};
    struct hapt_program_price price;
    HAPT_TRY(hapt_axis_program_price(alternation->sharding, 0, axis, &outcome->mesh->memory_costs, &options, program,
                                     arena, &price));
    *most = 0;
    *fits = true;
    for (int j = 0; j < axis->size; j++) {
        *most = fmax(*most, price.memory_bytes[j]);
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
        HAPT_TRY(weigh_memory(alternation, outcome, &axis, NULL, &program, arena, NULL, &baseline->memory_bytes,
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
    double most;
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
        /* A machine's devices hold less than the machine: its limit is checked below. */
        .memory_bytes = limited && !machines ? mesh->memory_bytes : NULL,
        .microbatches = outcome->microbatches,
        .optimizer_bytes_per_element = state_bytes(config),
        .layer_count = outcome->layers->count,
        .end_op = outcome->layers->end_op,
        .segments = (int)hapt_config_int(config, "segments")};
    HAPT_TRY(hapt_alternate(&alternation, arena, &outcome->result));
    HAPT_TRY(weigh_memory(&alternation, outcome, &outcome->result.axis, outcome->result.ratio_of,
                          &outcome->result.program, arena, &outcome->memory_bytes, &most, &fits));
    if (limited && !fits)
        return hapt_fail(HAPT_ERR_INFEASIBLE, "try --mesh devices, a smaller microbatch or more machines",
                         "the best program needs %.1f GB on a device, more than there are", most / 1e9);
    HAPT_TRY(hapt_sharding_apply(trivial, 0, &outcome->result.axis, &outcome->result.program, arena, &applied));
    outcome->sharding = applied;
    return find_baselines(&alternation, arena, outcome);
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
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
    if (env->world_rank == 0) { /* one rank's work */
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
            status = spmd_print_program(&outcome, hapt_config_bool(config, "full"), arena);
        }
        if (status == HAPT_OK && env->quiet) status = spmd_print_json(&outcome);
    }
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_command_spmd(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = run(env, config, &arena);
    hapt_arena_release(&arena);
    return status;
}
