/* hapt plan --explain: prints the program of every stage, each kind of layer once. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/collective_cost.h"
#include "plan_explain.h"
#include "program_print.h"

/* Inputs of the cost of a stage's program steps. */
struct stage_costs {
    const struct hapt_prediction_inputs *inputs;
    const struct hapt_efficiency *efficiency;
    const struct hapt_plan_stage *stage;
};

static double step_s(const void *context, const struct hapt_program *program, const struct hapt_program_step *step)
{
    const struct stage_costs *costs = context;
    const struct hapt_plan_stage *stage = costs->stage;
    const struct hapt_op *op = &program->shard->op[step->op];
    const struct hapt_submesh submesh = {stage->submesh->nodes,
                                         stage->submesh->devices_per_node,
                                         stage->layout.tensor_parallel,
                                         stage->layout.number,
                                         0,
                                         0};
    const double in = (double)hapt_tensor_bytes(&program->shard->tensor[op->input[0]]);
    const double out = (double)hapt_tensor_bytes(&program->shard->tensor[op->output[0]]);
    double bytes =
        step->kind == HAPT_COLLECTIVE_ALL_TO_ALL ? program->sharding->axis[step->axis].size * in : fmax(in, out);
    int times = 1;
    if (step->kind == HAPT_COLLECTIVE_SLICE) return 0;
    if (step->kind == HAPT_COLLECTIVE_NONE) { /* the operator communicates while it runs */
        times = hapt_op_type_at(op->type)->inner_all_reduces;
        bytes = hapt_sharding_exchange_bytes(program->shard, step->op) / times;
    }
    const struct hapt_collective_span span = hapt_collective_span_of(
        &costs->inputs->cluster->subcluster[stage->submesh->subcluster[0]], submesh, step->axis);
    return times * hapt_collective_corrected_s(&span, costs->efficiency, costs->inputs->model->dtype,
                                               step->kind ? step->kind : HAPT_COLLECTIVE_ALL_REDUCE, bytes, 0);
}

/* Stages with the same program on equal submeshes of one subcluster share one listing. */
struct shared_listing {
    const struct hapt_plan_stage *stage;
    struct hapt_sharding *sharding;
    struct program_printed printed;
};

static enum hapt_status print_stage(const struct hapt_prediction_inputs *inputs, const struct hapt_plan *plan,
                                    int index, const struct hapt_efficiency *efficiency, bool full,
                                    struct shared_listing *all, struct hapt_arena *arena, FILE *stream)
{
    const struct hapt_plan_stage *stage = &plan->stage[index];
    const struct hapt_graph *graph = inputs->model->graph;
    const int dp = hapt_plan_submesh_size(stage->submesh) / stage->layout.tensor_parallel;
    struct shared_listing *shared = &all[index];
    fprintf(stream, "\nStage %d: layers [%d, %d) on %s, %d x %d devices, ", index, stage->first_layer, stage->end_layer,
            stage->submesh->name, stage->submesh->nodes, stage->submesh->devices_per_node);
    if (stage->layout.program)
        fprintf(stream, "program %d (%s)\n", stage->layout.number, stage->layout.program->name);
    else if (hapt_plan_is_mixed(stage))
        fputs("rows by ratio on every operator\n", stream);
    else
        fprintf(stream, "%d data-parallel group%s of %d\n", dp, dp > 1 ? "s" : "", stage->layout.tensor_parallel);
    if (!stage->layout.program && (hapt_plan_is_mixed(stage) || hapt_plan_submesh_size(stage->submesh) == 1))
        return HAPT_OK; /* no program to print */
    for (int s = 0; s < index && !shared->stage; s++)
        if (all[s].stage == &plan->stage[s] && !hapt_plan_is_mixed(stage) &&
            hapt_plan_same_devices(stage, all[s].stage))
            shared = &all[s];
    if (!shared->stage) {
        shared->stage = stage;
        if (stage->layout.program)
            HAPT_TRY(hapt_stage_layout_apply(stage->layout.program, graph, arena, &shared->sharding));
        else
            HAPT_TRY(hapt_sharding_tensor_parallel(graph, dp, stage->layout.tensor_parallel, arena, &shared->sharding));
    }
    const struct stage_costs asked = {inputs, efficiency, stage};
    const struct hapt_program_costs costs = {.context = &asked, .step_s = step_s};
    const struct program_listing listing = {.graph = graph,
                                            .layers = inputs->layers,
                                            .sharding = shared->sharding,
                                            .first = stage->first_layer,
                                            .end = stage->end_layer,
                                            .full = full,
                                            .stage = index,
                                            .costs = inputs->cluster && !hapt_plan_is_mixed(stage) ? &costs : NULL};
    return program_print_layers(&listing, &shared->printed, arena, stream);
}

static enum hapt_status add_object(const struct hapt_plan *plan, int index, const char *text, json_t *extra)
{
    json_t *explain = json_object_get(extra, "explain"), *list = explain ? json_object_get(explain, "programs") : NULL;
    if (explain && !list) {
        list = json_array();
        json_object_set_new(explain, "programs", list);
    }
    const struct hapt_plan_stage *stage = &plan->stage[index];
    json_t *object = json_pack("{s:i, s:s, s:s}", "stage", index, "program",
                               stage->layout.program ? stage->layout.program->name : "plain", "text", text);
    return list && json_array_append_new(list, object) == 0
               ? HAPT_OK
               : hapt_fail(HAPT_ERR_MEMORY, NULL, "the programs' JSON could not be built");
}

static enum hapt_status print_programs(const struct hapt_env *env, const struct hapt_config *config,
                                       const struct hapt_prediction_inputs *inputs, const struct hapt_plan *plan,
                                       struct hapt_arena *arena, json_t *extra)
{
    const char *path = hapt_config_text(config, "efficiency");
    struct hapt_efficiency *efficiency = NULL;
    struct shared_listing *all;
    HAPT_NEW(all, arena, plan->stage_count);
    if (path && inputs->cluster) HAPT_TRY(hapt_efficiency_load(path, arena, &efficiency));
    for (int s = 0; s < plan->stage_count; s++) {
        char *text = NULL;
        size_t length;
        FILE *stream = open_memstream(&text, &length);
        if (!stream) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the text of a stage's program");
        enum hapt_status status =
            print_stage(inputs, plan, s, efficiency, hapt_config_bool(config, "full"), all, arena, stream);
        fclose(stream);
        if (status == HAPT_OK && env->quiet) status = add_object(plan, s, text, extra);
        if (status == HAPT_OK) hapt_print_wrapped(env, 6, "%s", text);
        free(text);
        HAPT_TRY(status);
    }
    return HAPT_OK;
}

enum hapt_status hapt_plan_programs(const struct hapt_env *env, const struct hapt_config *config,
                                    const struct hapt_prediction_inputs *inputs, const struct hapt_plan *plan,
                                    struct hapt_arena *arena, json_t *extra)
{
    enum hapt_status status = HAPT_OK;
    if (!inputs->model || !inputs->layers || plan->stage_count == 0) {
        hapt_print(env, "\nThe programs of the stages are not shown: they need the model (--input)\n");
        return HAPT_OK;
    }
    if (!env->quiet && strcmp(hapt_config_text(config, "explain"), "all") != 0) {
        hapt_print(env, "--explain all prints the program of every stage\n");
        return HAPT_OK;
    }
    if (env->world_rank == 0) status = print_programs(env, config, inputs, plan, arena, extra);
    return hapt_env_agree(env->world, status);
}
