/* Forward passes alone: hapt evaluate, the loss of a model or a checkpoint on held-out data. */
#include "evaluate.h"

#include "initial.h"
#include "validation.h"

static enum hapt_status set_weights(struct worker *worker, const struct hapt_checkpoint *checkpoint)
{
    const int64_t most = worker_block_elements(worker);
    float *full, *local;
    HAPT_NEW(full, worker->arena, most);
    HAPT_NEW(local, worker->arena, most);
    return initial_set(worker, checkpoint, 0, full, local);
}

enum hapt_status evaluate_build(struct worker *worker, const struct hapt_config *config)
{
    struct hapt_optimizer_options optimizer;
    hapt_optimizer_options(config, &optimizer);
    return hapt_env_agree(worker->env->world, worker_build(worker, config, optimizer.state_count));
}

enum hapt_status evaluate_join(struct worker *worker, const struct hapt_config *config,
                               const struct hapt_checkpoint *checkpoint, bool *together)
{
    HAPT_TRY(worker_join(worker, hapt_config_real(config, "timeout"), together));
    return hapt_env_agree(worker->env->world, set_weights(worker, checkpoint));
}

static enum hapt_status evaluate(struct worker *worker, struct validation *validation,
                                 const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                 bool *together, struct hapt_evaluation *result)
{
    int stop;
    HAPT_TRY(evaluate_build(worker, config));
    const int64_t most = hapt_config_given(config, "validate-rows") ? hapt_config_int(config, "validate-rows") : 0;
    HAPT_TRY(validation_open(validation, worker, hapt_config_text(config, "data"), most, true));
    HAPT_TRY(evaluate_join(worker, config, checkpoint, together));
    HAPT_TRY(validation_run(validation, NULL, &stop, result));
    const enum hapt_status drained = worker_drain(worker);
    if (drained != HAPT_OK) hapt_die(drained);
    return HAPT_OK;
}

enum hapt_status hapt_train_evaluate(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                     const struct hapt_model *model, const struct hapt_plan *plan,
                                     const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                     struct hapt_arena *arena, struct hapt_evaluation *result)
{
    struct validation validation = {0};
    bool together = false;
    struct worker worker = worker_of(env, cluster, model, plan, arena);
    const enum hapt_status status = evaluate(&worker, &validation, checkpoint, config, &together, result);
    if (status == HAPT_ERR_COMM && !together) hapt_die(status); /* as in hapt_train_run */
    worker_release(&worker);
    validation_release(&validation);
    return status;
}
