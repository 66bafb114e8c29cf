/* hapt train: a given plan on a given model. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "hapt/train.h"
#include "phases.h"

const char hapt_command_train_help[] =
    "Trains --input by --plan (or, with --resume, by the checkpoint's plan). One rank drives one device of the cluster;\n"
    "ranks the plan leaves idle only agree. A plan made from a profile alone gets its operators from --input, clustered into\n"
    "as many layers as the plan has. --schedule and --microbatches, when given, replace the plan's.\n"
    "\n"
    "Data: --data, else what the model file carries: /tokens [n], a stream sampled by --data-seed and step, or\n"
    "/batches [step][row][T + 1], exact batches. A step takes microbatches x the model's microbatch rows.\n"
    "\n"
    "The output folder holds run.h5 (/topology, /plan, and under /train: loss, gradient_norm, learning_rate, step_time,\n"
    "tokens_per_second [step]; stage_busy, stage_reduce, stage_idle, stage_communication [step][stage]; memory_planned,\n"
    "memory_measured [stage]) and checkpoints/step-N: shard-K.h5 per stage (/parameters, /state0, /state1: whole tensors by\n"
    "published name) and manifest.h5 (step, plan, options, history, sizes and checksums). --resume continues from the newest\n"
    "whole one, bit by bit. SIGTERM and SIGUSR1 end the step under way, write a checkpoint and leave with exit code 9.\n";

/* The plan of the file, its stages bound to operators of the model. */
static enum hapt_status load_plan(const struct hapt_model *model, const struct hapt_config *config,
                                  const struct hapt_checkpoint *checkpoint, struct hapt_arena *arena,
                                  struct hapt_plan **plan)
{
    const char *path = hapt_config_text(config, "plan");
    if (!path && !checkpoint)
        return hapt_fail(HAPT_ERR_USAGE, "make one with `hapt plan --input m.h5 --output plan.h5`, then give --plan plan.h5",
                         "no plan given");
    if (checkpoint)
        *plan = checkpoint->plan;
    else
        HAPT_TRY(hapt_plan_load(path, arena, plan));
    if ((*plan)->stage[0].first_op >= 0) return HAPT_OK;
    struct hapt_layers *layers = NULL;
    const struct hapt_layers_options options = {.granularity = (*plan)->layer_count,
                                                .heavy_minimum = (int)hapt_config_int(config, "heavy-minimum")};
    HAPT_TRY(hapt_layers_build(model->graph, &options, arena, &layers));
    return hapt_phase_plan_bind(*plan, layers);
}

/* Another schedule or number of microbatches for the same stages: launch counts and memory follow. */
static enum hapt_status override_plan(const struct hapt_config *config, struct hapt_arena *arena, struct hapt_plan *plan)
{
    enum hapt_schedule_kind kind = plan->schedule;
    int microbatches = plan->microbatches;
    if (hapt_config_given(config, "schedule")) {
        const bool known = hapt_schedule_kind_parse(hapt_config_text(config, "schedule"), &kind);
        HAPT_ASSERT(known);
    }
    if (hapt_config_given(config, "microbatches")) microbatches = (int)hapt_config_int(config, "microbatches");
    if (kind == plan->schedule && microbatches == plan->microbatches) return HAPT_OK;
    double *comm_s;
    int *warmup;
    HAPT_NEW(comm_s, arena, plan->stage_count);
    HAPT_NEW(warmup, arena, plan->stage_count);
    for (int i = 0; i < plan->stage_count; i++) comm_s[i] = plan->stage[i].comm_s;
    hapt_schedule_warmup(kind, plan->stage_count, microbatches, comm_s, plan->t_max_s, plan->hide_threshold, warmup);
    plan->schedule = kind;
    plan->microbatches = microbatches;
    for (int i = 0; i < plan->stage_count; i++) {
        struct hapt_plan_stage *stage = &plan->stage[i];
        stage->warmup = warmup[i];
        stage->memory_bytes = stage->parameter_bytes + warmup[i] * stage->activation_bytes;
    }
    return HAPT_OK;
}

static enum hapt_status write_run(const char *path, const struct hapt_cluster *cluster, const struct hapt_plan *plan,
                                  const struct hapt_train_result *result)
{
    struct hapt_h5 *file = NULL;
    HAPT_TRY(hapt_h5_create(path, "hapt-run", 1, &file));
    enum hapt_status status = hapt_cluster_write(file, "/topology", cluster);
    if (status == HAPT_OK) status = hapt_plan_write(file, "/plan", plan);
    if (status == HAPT_OK) status = hapt_train_write(file, result);
    if (status == HAPT_OK) return hapt_h5_commit(file);
    hapt_h5_close(file);
    return status;
}

static enum hapt_status print_json(const struct hapt_train_result *result, const char *run_file)
{
    const struct hapt_history *history = &result->history;
    json_t *loss = json_array();
    for (int64_t i = 0; i < history->count; i++) json_array_append_new(loss, json_real(history->loss[i]));
    json_t *root = json_pack("{s:s, s:i, s:I, s:I, s:f, s:f, s:s, s:s, s:b, s:o}", "format", "hapt-train", "version", 1,
                             "steps", (json_int_t)history->count, "first_step", (json_int_t)result->first_step, "step_time_s",
                             result->steady_step_s, "tokens_per_s", result->tokens_per_s, "checkpoint", result->checkpoint,
                             "run", run_file, "stopped", result->stopped, "loss", loss);
    if (!root) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the result");
    json_dumpf(root, stdout, JSON_REAL_PRECISION(17));
    printf("\n");
    json_decref(root);
    return HAPT_OK;
}

static enum hapt_status report(const struct hapt_env *env, const struct hapt_config *config,
                               const struct hapt_cluster *cluster, const struct hapt_plan *plan,
                               const struct hapt_train_result *result, struct hapt_arena *arena)
{
    const struct hapt_history *history = &result->history;
    const char *folder = NULL;
    char time[32], planned[32], measured[32];
    HAPT_TRY(hapt_train_folder(config, arena, &folder));
    if (env->world_rank != 0) return HAPT_OK;
    const char *path = hapt_arena_printf(arena, "%s/run.h5", folder);
    if (!path) return HAPT_ERR_MEMORY;
    HAPT_TRY(write_run(path, cluster, plan, result));
    if (env->quiet) HAPT_TRY(print_json(result, path));
    if (history->count > 0)
        hapt_print(env, "Trained %lld steps: loss %.6g\n", (long long)history->count, history->loss[history->count - 1]);
    if (result->steady_step_s > 0)
        hapt_print(env, "Step time %s, %.0f tokens/s\n", hapt_units_time(result->steady_step_s, time), result->tokens_per_s);
    for (int c = 0; c < plan->stage_count; c++)
        hapt_print(env, "Stage %d on %s: memory %s planned, %s measured\n", c, plan->stage[c].subcluster_name,
                   hapt_units_bytes(result->planned_bytes[c], planned), hapt_units_bytes(result->measured_bytes[c], measured));
    hapt_print(env, "Run file %s, checkpoint %s\n", path, result->checkpoint);
    if (result->stopped)
        hapt_note(env, "stopped by a signal after step %lld; start again with --resume\n", (long long)history->count);
    return HAPT_OK;
}

static enum hapt_status run(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_model *model = NULL;
    struct hapt_cluster *cluster = NULL;
    struct hapt_checkpoint *checkpoint = NULL;
    struct hapt_plan *plan = NULL;
    struct hapt_train_result *result = NULL;
    HAPT_TRY(hapt_phase_model(env, config, arena, &model));
    HAPT_TRY(hapt_train_resume(env, config, arena, &checkpoint));
    HAPT_TRY(hapt_env_agree(env->world, load_plan(model, config, checkpoint, arena, &plan)));
    if (!checkpoint) HAPT_TRY(hapt_env_agree(env->world, override_plan(config, arena, plan)));
    HAPT_TRY(hapt_phase_cluster(env, config, true, arena, &cluster));
    HAPT_TRY(hapt_train_run(env, cluster, model, plan, checkpoint, config, arena, &result));
    HAPT_TRY(hapt_env_agree(env->world, report(env, config, cluster, plan, result, arena)));
    return result->stopped ? HAPT_STOPPED : HAPT_OK;
}

enum hapt_status hapt_command_train(struct hapt_env *env, struct hapt_config *config)
{
    struct hapt_arena arena;
    hapt_arena_init(&arena);
    const enum hapt_status status = run(env, config, &arena);
    hapt_arena_release(&arena);
    return status;
}
