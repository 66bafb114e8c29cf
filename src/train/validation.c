/* Forward passes of all held-out rows, step by step. All ranks add the losses in the same order. */
#include "validation.h"

#include <math.h>
#include <stdio.h>

#include "hapt/progress.h"
#include "runtime.h"

/* A rank's message to all others after each step of validation. */
struct validation_vote {
    double loss;  /* of its last chunk, as far as it counts it */
    int64_t hits; /* in all steps so far */
    int64_t stop; /* bits of enum watch_stop */
};

enum hapt_status hapt_train_check_validation(const struct hapt_config *config)
{
    static const char *const needing[] = {"validate-every", "validate-rows"};
    const bool validates = hapt_config_text(config, "validation-data");
    if (validates && runtime_is_modelled(config))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --validation-data",
                         "--validation-data has no effect on modelled devices: they compute no loss");
    if (validates) return HAPT_OK;
    for (int i = 0; i < 2; i++)
        if (hapt_config_given(config, needing[i]))
            return hapt_fail(HAPT_ERR_USAGE, "add --validation-data D.h5, or leave out the option",
                             "--%s has no effect without --validation-data", needing[i]);
    return HAPT_OK;
}

static enum hapt_status reserve(struct validation *validation)
{
    HAPT_NEW(validation->vote, validation->worker->arena, validation->worker->env->world_size);
    return HAPT_OK;
}

enum hapt_status validation_open(struct validation *validation, struct worker *worker, const char *path, int64_t most,
                                 bool top1)
{
    const struct hapt_env *env = worker->env;
    const int rows = worker->plan->microbatches * worker->model->microbatch;
    *validation = (struct validation){.worker = worker};
    HAPT_TRY(hapt_env_agree(env->world, reserve(validation)));
    HAPT_TRY(hapt_data_open_held_out(env, path, worker->model, rows, most, &validation->data));
    validation->rows = hapt_data_held_out_rows(validation->data);
    validation->steps = (validation->rows + rows - 1) / rows;
    for (int64_t step = 0; step < validation->steps; step++)
        validation->targets += hapt_data_targets(validation->data, step);
    if (validation->targets > 0)
        return hapt_env_agree(env->world, top1 ? top1_create(worker, &validation->top1) : HAPT_OK);
    return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_INPUT, "give data with targets other than -100",
                                                "%s: no row that is read has a target", path));
}

bool validation_is_due(const struct validation *validation, int64_t done, int64_t steps)
{
    return validation->data && (done == steps || done % validation->every == 0);
}

/* Runs one step of validation, and adds the losses of all ranks to *sum. *hits: of all steps so far. */
static enum hapt_status run_step(struct validation *validation, const struct watch *watch, int64_t step, int64_t rows,
                                 double *sum, int64_t *hits, int *stop)
{
    struct worker *worker = validation->worker;
    const int last = worker->plan->stage_count - 1, each = worker->model->microbatch;
    const struct stage *stage = worker_stage(worker, last);
    HAPT_TRY(worker_run_forward(worker, validation->data, step, (int)((rows + each - 1) / each)));
    const int64_t own = validation->top1 ? validation->top1->hits : 0;
    const struct validation_vote mine = {stage ? stage->loss : 0, own, watch ? watch_stop_bits(watch) : 0};
    HAPT_TRY(hapt_link_all_gather(worker->env->world, "a step of validation", worker_agreement_timeout_s(worker), &mine,
                                  sizeof mine, validation->vote));
    *hits = 0;
    for (int r = 0; r < worker->env->world_size; r++) {
        *hits += validation->vote[r].hits;
        *sum += validation->vote[r].loss;
        *stop |= (int)validation->vote[r].stop;
    }
    return HAPT_OK;
}

enum hapt_status validation_run(struct validation *validation, const struct watch *watch, int *stop,
                                struct hapt_evaluation *result)
{
    struct worker *worker = validation->worker;
    const int64_t each = (int64_t)worker->plan->microbatches * worker->model->microbatch;
    const double start_s = hapt_time_s();
    struct hapt_progress progress;
    int64_t hits = 0;
    double sum = 0;
    *stop = 0;
    hapt_progress_init(&progress, worker->env, "validation", (long)validation->steps);
    if (validation->top1) validation->top1->hits = 0;
    if (validation->top1) worker->observer = (struct worker_observer){top1_add, validation->top1};
    int64_t step = 0;
    for (; step < validation->steps && !*stop; step++) {
        const int64_t left = validation->rows - step * each;
        const enum hapt_status status = run_step(validation, watch, step, left < each ? left : each, &sum, &hits, stop);
        if (status != HAPT_OK) hapt_die(status);
        hapt_progress_update(&progress, (long)(step + 1), NULL);
    }
    worker->observer = (struct worker_observer){0};
    hapt_progress_release(&progress);
    validation->longest_s = fmax(validation->longest_s, hapt_time_s() - start_s);
    if (step < validation->steps) return HAPT_OK;
    *stop = 0; /* all is done; the next vote asks again */
    *result = (struct hapt_evaluation){.loss = sum / (double)validation->targets,
                                       .top1 = validation->top1 ? (double)hits / (double)validation->targets : NAN,
                                       .rows = validation->rows,
                                       .targets = validation->targets};
    return HAPT_OK;
}

void validation_release(struct validation *validation)
{
    hapt_data_close(validation->data);
    validation->data = NULL;
}
