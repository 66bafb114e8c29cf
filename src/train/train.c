/* The run: setup, the loop over steps, checkpoints. Called on every rank; idle ranks only agree. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "checkpoint.h"
#include "hapt/heartbeat.h"
#include "hapt/progress.h"
#include "hapt/run_folder.h"
#include "hapt/stop.h"
#include "initial.h"
#include "loss_scale.h"
#include "replicas.h"
#include "run_data.h"
#include "runtime.h"
#include "save.h"
#include "step_line.h"
#include "trace.h"
#include "validation.h"
#include "watch.h"
#include "watch_origin.h"
#include "watch_slow.h"

/* Data that every rank sends to all others once per step. */
struct vote {
    int64_t stop; /* enum watch_stop */
    int64_t save; /* 1: a checkpoint is due by time */
    struct saving_vote saving;
    struct stage_vote {
        double square_sum, loss;
        double busy_s, reduce_s, comm_s, late_s;
        struct watch_sample sample;
    } stage[]; /* [worker.most] */
};

struct run {
    const struct hapt_env *env;
    const struct hapt_plan *plan;
    const struct hapt_config *config;
    const struct hapt_train_observer *observer;
    struct hapt_arena *arena;
    struct worker worker;
    struct hapt_data *data;
    struct hapt_optimizer_options optimizer;
    struct loss_scale scale;
    struct saver saver;
    struct replicas replicas;
    struct validation validation;
    struct watch watch;
    bool exits_together;         /* all ranks agreed that startup failed: hosts cannot connect */
    bool weights_not_finite;     /* so they must not be saved */
    struct watch_slow *slow;     /* on rank 0, as are the samples */
    struct watch_sample *sample; /* worker_record */
    struct hapt_train_result *result;
    size_t vote_bytes;
    char *mine, *votes; /* struct vote of this rank, and of all */
    int64_t first, end; /* range of steps */
    int64_t stage_capacity;
    double mark_s;
    double *comm_s; /* [stages of this rank] stage_comm_s at the previous step */
    double saved_s; /* start of the last checkpoint, or of the run */
};

/* Reports the time of a checkpoint; in the background: twice, because one may be in progress when the last is due. */
static void report_checkpoint_time(struct run *run)
{
    const struct saver *saver = &run->saver;
    if (saver->count > run->result->checkpoints)
        watch_saved(&run->watch, (saver->background && !saver->waits ? 2 : 1) * saver->taken_s);
    run->result->checkpoints = saver->count;
}

/* Its duration does not count for any step. */
static enum hapt_status compare_replicas(struct run *run, bool now)
{
    bool compared;
    HAPT_TRY(replicas_check(&run->replicas, run->result->history.count, now, &compared));
    if (compared) run->mark_s = hapt_time_s();
    return HAPT_OK;
}

/* Its duration does not count for any step. The replicas are compared after the wait for the checkpoint in progress, so
 * that nothing changes between the comparison and the copy. */
static enum hapt_status save(struct run *run, bool last)
{
    struct hapt_train_result *result = run->result;
    const double start_s = hapt_time_s();
    run->saved_s = start_s;
    HAPT_TRY(saver_finish(&run->saver, last));
    result->checkpoint_s += hapt_time_s() - start_s;
    HAPT_TRY(compare_replicas(run, true));
    hapt_heartbeat_note((struct hapt_activity){"checkpoint at the end",
                                               worker_first_chunk(&run->worker, run->env->world_rank), -1,
                                               result->history.count - 1, -1});
    const double compared_s = hapt_time_s();
    HAPT_TRY(saver_save(&run->saver, &result->history, last));
    run->mark_s = hapt_time_s();
    result->checkpoint_s += run->mark_s - compared_s;
    report_checkpoint_time(run);
    for (int s = 0; s < run->worker.stage_count; s++)
        run->worker.stage[s].team.busy_s = run->worker.stage[s].team.reduce_s = 0;
    return HAPT_OK;
}

/* ---- History ---- */

static enum hapt_status grow(struct hapt_arena *arena, double **array, int64_t from, int64_t to)
{
    double *larger;
    HAPT_NEW(larger, arena, to);
    if (from > 0) memcpy(larger, *array, (size_t)from * sizeof **array);
    *array = larger;
    return HAPT_OK;
}

/* Reserves room for `count` steps, before the first step unless the run is very long. */
static enum hapt_status reserve_history(struct run *run, int64_t count)
{
    struct hapt_history *history = &run->result->history;
    history->loss_units = hapt_model_loss_units(run->worker.model);
    if (count > history->capacity) {
        double **array[] = {&history->loss, &history->gradient_norm, &history->learning_rate, &history->time_s};
        for (int i = 0; i < 4; i++) HAPT_TRY(grow(run->arena, array[i], history->count, count));
        history->capacity = count;
    }
    const int64_t steps = count - run->first, stages = run->plan->stage_count;
    if (run->env->world_rank == 0 && steps > run->stage_capacity) {
        double **array[] = {&run->result->busy_s, &run->result->reduce_s, &run->result->idle_s, &run->result->comm_s,
                            &run->result->microbatch_s};
        for (int i = 0; i < 5; i++)
            HAPT_TRY(grow(run->arena, array[i], (history->count - run->first) * stages, steps * stages));
        run->stage_capacity = steps;
    }
    return HAPT_OK;
}

static enum hapt_status append_validation(struct run *run, const struct hapt_evaluation *result)
{
    struct hapt_history *history = &run->result->history;
    const int64_t count = history->validation_count;
    if (count == history->validation_capacity) {
        struct hapt_validation *larger;
        history->validation_capacity = 2 * count + 16;
        HAPT_NEW(larger, run->arena, history->validation_capacity);
        if (count > 0) memcpy(larger, history->validation, (size_t)count * sizeof *larger);
        history->validation = larger;
    }
    history->validation[count] = (struct hapt_validation){history->count, result->loss, result->top1};
    history->validation_count = count + 1;
    return HAPT_OK;
}

static const struct vote *vote_of(const struct run *run, int rank)
{
    return (const struct vote *)(run->votes + (size_t)rank * run->vote_bytes);
}

static const struct stage_vote *stage_vote_of(const struct run *run, int chunk, int index)
{
    return &vote_of(run, stage_world_rank(&run->worker, chunk, index))->stage[run->worker.index[chunk]];
}

static void record_stage(struct run *run, int chunk, int64_t at)
{
    const int size = stage_size(&run->worker, chunk);
    struct hapt_train_result *result = run->result;
    double busy_s = 0, reduce_s = 0, comm_s = 0, microbatches_s = 0;
    for (int r = 0; r < size; r++) {
        const struct stage_vote *vote = stage_vote_of(run, chunk, r);
        busy_s += vote->busy_s / size;
        reduce_s += vote->reduce_s / size;
        microbatches_s += (vote->sample.effort.busy_s + vote->sample.effort.wait_s) / size;
        comm_s = fmax(comm_s, vote->comm_s); /* a few ranks may send for all */
        result->late_s = fmax(result->late_s, vote->late_s);
    }
    result->busy_s[at] = busy_s;
    result->reduce_s[at] = reduce_s;
    result->comm_s[at] = comm_s;
    result->microbatch_s[at] = microbatches_s / run->plan->microbatches;
}

/* The stages of a submesh idle together. */
static void record_stages(struct run *run, double time_s)
{
    if (run->env->world_rank != 0) return;
    struct hapt_train_result *result = run->result;
    const int64_t row = (result->history.count - run->first) * run->plan->stage_count;
    for (int c = 0; c < run->plan->stage_count; c++) record_stage(run, c, row + c);
    for (int c = 0; c < run->plan->stage_count; c++) {
        double busy_s = 0, reduce_s = 0;
        for (int other = 0; other < run->plan->stage_count; other++) {
            if (!worker_shares(&run->worker, c, other)) continue;
            busy_s += result->busy_s[row + other];
            reduce_s += result->reduce_s[row + other];
        }
        result->idle_s[row + c] = fmax(0, time_s - busy_s - reduce_s);
    }
}

/* ---- The loop ---- */

/* Uses rank 0's clock, so that all agree. Asynchronous checkpoints start twice per interval, as with
 * --checkpoint-every. */
static bool is_due_by_time(const struct run *run)
{
    const double every_s = 60 * hapt_config_real(run->config, "checkpoint-minutes");
    return run->env->world_rank == 0 && every_s > 0 &&
           hapt_time_s() - run->saved_s >= (run->saver.background ? every_s / 2 : every_s);
}

/* One step as all ranks agree on it. */
struct step {
    struct run *run;
    int64_t number;
    double loss, norm, time_s;
    int stop;            /* bits of enum watch_stop */
    bool skips, refuses; /* an overflow in fp16; a value that is not finite: nothing is updated */
    struct hapt_update update;
};

/* Takes the times of a stage since the last vote. */
static void take_stage_vote(struct run *run, int index, struct stage_vote *mine)
{
    struct stage *stage = &run->worker.stage[index];
    struct hapt_team *team = &stage->team;
    const double comm_s = stage_comm_s(stage), scale = run->worker.time_scale;
    *mine = (struct stage_vote){.square_sum = stage->square_sum,
                                .loss = stage->loss,
                                .busy_s = team->busy_s / scale,
                                .reduce_s = team->reduce_s / scale,
                                .comm_s = (comm_s - run->comm_s[index]) / scale,
                                .late_s = team->late_s / scale,
                                .sample.effort = team->times};
    run->comm_s[index] = comm_s;
    team->busy_s = team->reduce_s = team->late_s = 0;
    team->times = (struct hapt_team_times){0};
    stage_take_link_times(stage, mine->sample.link);
}

static bool validates_after(const struct run *run, int64_t done)
{
    return validation_is_due(&run->validation, done, run->optimizer.steps);
}

/* True if the current weights have not been validated, but should have been. A run that was stopped before does so when
 * it is resumed. */
static bool misses_validation(const struct run *run)
{
    const struct hapt_history *history = &run->result->history;
    const int64_t done = history->count, last = history->validation_count - 1;
    return run->end > 0 && validates_after(run, done) && (last < 0 || history->validation[last].step < done);
}

static enum hapt_status note_validation(struct run *run, const struct hapt_evaluation *result)
{
    char share[32] = "";
    HAPT_TRY(append_validation(run, result));
    if (isfinite(result->top1)) snprintf(share, sizeof share, ", top-1 %.2f %%", 100 * result->top1);
    hapt_note(run->env, "validation loss %.4f%s after %lld steps\n", result->loss, share,
              (long long)run->result->history.count);
    return HAPT_OK;
}

static void tell_observer(const struct run *run)
{
    if (run->observer && run->observer->step) run->observer->step(run->observer->context, run->result);
}

/* Its duration does not count for any step. *stop: also bits that ended it; it is then made up for by a resumed run. A
 * request that is known already does not end it. */
static enum hapt_status validate(struct run *run, int *stop)
{
    int ended;
    struct hapt_evaluation result;
    const double start_s = hapt_time_s();
    run->watch.validation_s = 0;
    HAPT_TRY(validation_run(&run->validation, *stop ? NULL : &run->watch, &ended, &result));
    const enum hapt_status status = ended ? HAPT_OK : note_validation(run, &result);
    if (status != HAPT_OK) hapt_die(status);
    *stop |= ended;
    for (int s = 0; s < run->worker.stage_count; s++) {
        struct stage_vote unused;
        take_stage_vote(run, s, &unused);
    }
    tell_observer(run);
    run->mark_s = hapt_time_s();
    run->result->validation_s += run->mark_s - start_s;
    return HAPT_OK;
}

static enum hapt_status exchange_votes(struct run *run, int64_t step)
{
    char what[64];
    struct vote *mine = (struct vote *)run->mine;
    run->watch.validation_s = validates_after(run, step + 1) ? run->validation.longest_s : 0;
    *mine = (struct vote){.stop = watch_stop_bits(&run->watch), .save = is_due_by_time(run)};
    saving_vote(&run->saver.saving, &mine->saving);
    for (int s = 0; s < run->worker.stage_count; s++) take_stage_vote(run, s, &mine->stage[s]);
    snprintf(what, sizeof what, "end of step %lld", (long long)step);
    return hapt_link_all_gather(run->env->world, what, worker_agreement_timeout_s(&run->worker), mine, run->vote_bytes,
                                run->votes);
}

/* Sums the votes in the same order on every rank. Devices that do not compute have no loss and no norm. */
static void sum_votes(struct step *step)
{
    const struct run *run = step->run;
    const struct worker *worker = &run->worker;
    const int last = run->plan->stage_count - 1;
    double total = 0, squares = 0;
    for (int r = 0; r < stage_size(worker, last); r++) total += stage_vote_of(run, last, r)->loss;
    for (int c = 0; c <= last; c++)
        for (int r = 0; r < stage_size(worker, c); r++) squares += stage_vote_of(run, c, r)->square_sum;
    step->loss = worker->runtime->computes ? total / (double)hapt_data_targets(run->data, step->number) : NAN;
    step->norm = worker->runtime->computes ? sqrt(squares) / run->scale.value : NAN;
    step->stop = 0;
    for (int r = 0; r < run->env->world_size; r++) step->stop |= (int)vote_of(run, r)->stop;
}

/* The agreement that NORM asks for (struct worker_agreement). The time of a step is that between two of them. */
static enum hapt_status agree_on_step(void *context, struct hapt_update *update, bool *updates)
{
    struct step *step = context;
    struct run *run = step->run;
    HAPT_TRY(exchange_votes(run, step->number));
    sum_votes(step);
    const double now_s = hapt_time_s();
    step->time_s = (now_s - run->mark_s) / run->worker.time_scale;
    run->mark_s = now_s;
    watch_step(&run->watch, step->time_s * run->worker.time_scale);
    const bool computes = run->worker.runtime->computes;
    step->skips = computes && loss_scale_overflows(&run->scale, step->loss, step->norm);
    step->refuses = computes && !step->skips && (!isfinite(step->loss) || !isfinite(step->norm));
    if (step->skips) step->norm = INFINITY;
    hapt_optimizer_update(&run->optimizer, step->number, computes ? step->norm : 0, run->plan->microbatches,
                          &step->update);
    step->update.gradient_scale /= run->scale.value;
    step->update.step -= run->scale.skipped;
    *update = step->update;
    *updates = !step->skips && !step->refuses;
    return HAPT_OK;
}

/* Reports the first signal. */
static void report_stop(struct run *run, int stop, int64_t step)
{
    if (stop & WATCH_SIGNAL && step + 1 < run->end)
        hapt_note(run->env,
                  "asked to stop (%s): a checkpoint after step %lld follows; repeat the signal to exit without it\n",
                  hapt_stop_name(), (long long)step + 1);
}

static enum hapt_status watch_ranks(struct run *run, int64_t step, double time_s)
{
    if (!run->slow) return HAPT_OK;
    for (int c = 0; c < run->plan->stage_count; c++)
        for (int r = 0; r < stage_size(&run->worker, c); r++)
            run->sample[worker_record(&run->worker, c, r)] = stage_vote_of(run, c, r)->sample;
    return watch_slow_step(run->slow, step, time_s, run->sample, run->result);
}

/* Nothing was updated, so the weights are those of the previous step. */
static enum hapt_status refuse_step(const struct step *step)
{
    struct run *run = step->run;
    char origin[320];
    const enum hapt_status found = watch_origin_find(&run->worker, origin, sizeof origin, &run->weights_not_finite);
    if (found != HAPT_OK) hapt_die(found);
    return hapt_env_agree(run->env->world,
                          hapt_fail(HAPT_ERR_INPUT, "lower --learning-rate or set --clip-norm, then --resume",
                                    "step %lld: the loss is %g and the gradient's norm %g; nothing was updated%s",
                                    (long long)step->number, step->loss, step->norm, origin));
}

/* Runs one step on every rank; the returned status is agreed. A failure of one rank ends the job, because its peers
 * wait. */
static enum hapt_status take_step(struct run *run, int64_t number, int *stop)
{
    struct hapt_history *history = &run->result->history;
    struct step step = {.run = run, .number = number};
    const struct worker_agreement agreement = {&step, agree_on_step};
    enum hapt_status status = reserve_history(run, number < history->capacity ? history->capacity : 2 * number + 1);
    run->worker.loss_scale = run->scale.value;
    if (status == HAPT_OK) status = worker_run_step(&run->worker, run->data, number, &agreement);
    if (status != HAPT_OK) hapt_die(status);
    *stop = step.stop;
    if (step.refuses) return refuse_step(&step);
    loss_scale_note(&run->scale, step.norm);
    if (step.skips)
        hapt_note(run->env, "step %lld: gradients overflow in fp16; nothing was updated, the loss scale is now %g\n",
                  (long long)number, run->scale.value);
    record_stages(run, step.time_s);
    status = watch_ranks(run, number, step.time_s);
    if (status != HAPT_OK) hapt_die(status);
    history->loss[number] = step.loss;
    history->gradient_norm[number] = step.norm;
    history->learning_rate[number] = step.update.learning_rate;
    history->time_s[number] = step.time_s;
    history->count = number + 1;
    return HAPT_OK;
}

/* Shows the step and tells the observer. After the first step the ranks tell each other how much memory they take; its
 * duration does not count for any step. */
static void note_step(struct run *run, struct hapt_progress *progress, int64_t step)
{
    run->result->checkpoint = run->saver.path;
    if (step == run->first) {
        const double start_s = hapt_time_s();
        const enum hapt_status status = worker_gather_memory(&run->worker, run->result);
        if (status != HAPT_OK) hapt_die(status);
        run->mark_s += hapt_time_s() - start_s; /* the update since the mark counts for the next step */
    }
    step_line_show(run->result, progress);
    tell_observer(run);
}

/* Advances an asynchronous checkpoint with the votes of this step. */
static enum hapt_status advance_checkpoint(struct run *run)
{
    if (!run->saver.background) return HAPT_OK;
    for (int r = 0; r < run->env->world_size; r++) run->saver.saving.all[r] = vote_of(run, r)->saving;
    HAPT_TRY(saver_advance(&run->saver));
    report_checkpoint_time(run);
    return HAPT_OK;
}

/*
 * True if a checkpoint starts after `done` steps, or by time. An asynchronous checkpoint is complete at the latest when
 * the next one starts; until then a crash returns to the previous one. So two start per interval, and a crash loses at
 * most one interval.
 */
static bool is_due(const struct run *run, int64_t done)
{
    const int64_t every = hapt_config_int(run->config, "checkpoint-every");
    if (done == run->end) return false; /* the last one is saved separately */
    if (vote_of(run, 0)->save) return true;
    return every > 0 && (done % every == 0 || (run->saver.background && done % every == (every + 1) / 2));
}

static enum hapt_status loop(struct run *run)
{
    enum hapt_status status = HAPT_OK;
    struct hapt_progress progress;
    int stop = 0; /* bits of enum watch_stop */
    hapt_progress_init(&progress, run->env, "train", (long)run->end);
    progress.first = (long)run->first;
    progress.every_s = hapt_config_real(run->config, "progress-every");
    run->mark_s = run->saved_s = hapt_time_s();
    if (misses_validation(run)) status = validate(run, &stop);
    for (int64_t step = run->first; step < run->end && status == HAPT_OK && !stop; step++) {
        status = take_step(run, step, &stop);
        if (status != HAPT_OK) break;
        note_step(run, &progress, step);
        report_stop(run, stop, step);
        status = advance_checkpoint(run);
        if (status == HAPT_OK) status = compare_replicas(run, false);
        /* a signal in the last step has no effect; at the end of the time there is none for this */
        if (status == HAPT_OK && (!stop || (stop == WATCH_SIGNAL && step + 1 == run->end)) &&
            validates_after(run, step + 1))
            status = validate(run, &stop);
        if (status == HAPT_OK && !stop && is_due(run, step + 1)) status = save(run, false);
    }
    hapt_progress_release(&progress);
    /* a stop in the last step has no effect */
    if (run->result->history.count < run->end) run->result->stopped_by = watch_reason(&run->watch, stop);
    if (status == HAPT_OK || (status == HAPT_ERR_INPUT && !run->weights_not_finite)) {
        /* Also saves after a non-finite loss, because the weights are those before it. A failed save prints its own
         * message. */
        if (status != HAPT_OK) hapt_fail_reset();
        const enum hapt_status saved = save(run, true);
        if (status == HAPT_OK) status = saved;
    }
    return status;
}

static enum hapt_status loop_and_gather(struct run *run)
{
    const MPI_Comm world = run->env->world;
    const enum hapt_status status = loop(run);
    const enum hapt_status drained = worker_drain(&run->worker);
    if (drained != HAPT_OK) hapt_die(drained);
    HAPT_TRY(status);
    HAPT_TRY(hapt_env_agree(world, trace_gather(&run->worker, run->first, run->result->history.count, run->result)));
    HAPT_TRY(hapt_env_agree(world, worker_report_replays(&run->worker)));
    return hapt_env_agree(world, worker_gather_memory(&run->worker, run->result));
}

/* The observer's end may wait for a slow disk: no rank waits for it under a deadline. */
static enum hapt_status observed_loop(struct run *run)
{
    const struct hapt_train_observer *observer = run->observer;
    if (observer && observer->begin) observer->begin(observer->context, run->result);
    const enum hapt_status status = loop_and_gather(run);
    if (observer && observer->end) observer->end(observer->context, run->result, status != HAPT_OK);
    return status;
}

/* ---- Before and after ---- */

static enum hapt_status check_options(const struct run *run)
{
    const struct hapt_config *config = run->config;
    if (hapt_config_given(config, "microbatches") && hapt_config_int(config, "microbatches") != run->plan->microbatches)
        return hapt_fail(HAPT_ERR_USAGE, "with --resume, hapt --replan plans again for that number",
                         "the plan is for %d microbatches per step, not %lld", run->plan->microbatches,
                         (long long)hapt_config_int(config, "microbatches"));
    if (!runtime_is_modelled(config) && hapt_config_given(config, "time-scale"))
        return hapt_fail(HAPT_ERR_USAGE, "add --device emulated, or leave out --time-scale",
                         "--time-scale needs modelled devices");
    const enum hapt_rate_schedule schedule = run->optimizer.schedule;
    if (schedule == HAPT_RATE_CONSTANT && hapt_config_given(config, "warmup-steps") && run->optimizer.warmup_steps > 0)
        return hapt_fail(HAPT_ERR_USAGE, "leave out --warmup-steps, or give another --lr-schedule",
                         "a constant learning rate has no warm-up");
    if (schedule != HAPT_RATE_WSD && hapt_config_given(config, "decay-steps"))
        return hapt_fail(HAPT_ERR_USAGE, "leave out --decay-steps, or give --lr-schedule wsd",
                         "--decay-steps has no effect on this learning-rate schedule");
    return hapt_train_check_validation(config);
}

static enum hapt_status open_validation(struct run *run)
{
    const char *path = hapt_config_text(run->config, "validation-data");
    if (!path) return HAPT_OK;
    const bool images = hapt_model_input(run->worker.model, HAPT_ROLE_IMAGES) >= 0; /* they have few logits */
    HAPT_TRY(
        validation_open(&run->validation, &run->worker, path, hapt_config_int(run->config, "validate-rows"), images));
    run->validation.every = hapt_config_int(run->config, "validate-every");
    return HAPT_OK;
}

/* Refuses to replace real checkpoints with samples, even with --overwrite. */
static enum hapt_status refuse_to_replace_weights(const struct run *run, const struct hapt_checkpoint *checkpoint)
{
    int count;
    int64_t *step;
    if (checkpoint || run->env->world_rank != 0 || run->worker.runtime->computes) return HAPT_OK;
    HAPT_TRY(checkpoint_list(run->saver.writer.folder, run->arena, &count, &step));
    for (int i = 0; i < count; i++)
        if (!checkpoint_is_sampled(run->saver.writer.folder, step[i], run->arena))
            return hapt_fail(HAPT_ERR_USAGE, "use another --output for --device emulated",
                             "%s holds checkpoints of real training; --device emulated would replace them",
                             run->saver.writer.folder);
    return HAPT_OK;
}

static enum hapt_status prepare(struct run *run, const struct hapt_checkpoint *checkpoint)
{
    const char *folder = NULL;
    HAPT_NEW(run->result, run->arena, 1);
    struct hapt_train_result *result = run->result;
    hapt_optimizer_options(run->config, &run->optimizer);
    HAPT_TRY(check_options(run));
    /* else the first moment of one optimizer would be used as the momentum of another */
    if (checkpoint && checkpoint->state_count != run->optimizer.state_count)
        return hapt_fail(HAPT_ERR_USAGE, "resume with the optimizer the checkpoint was made with",
                         "checkpoint %s holds %d optimizer states, but this optimizer has %d", checkpoint->path,
                         checkpoint->state_count, run->optimizer.state_count);
    HAPT_TRY(hapt_optimizer_prepare(run->config, run->worker.model));
    HAPT_TRY(worker_build(&run->worker, run->config, run->optimizer.state_count));
    HAPT_TRY(replicas_prepare(&run->replicas, &run->worker, hapt_config_int(run->config, "replica-check")));
    HAPT_TRY(hapt_run_folder_name(run->config, run->arena, &folder));
    HAPT_TRY(saver_prepare(&run->saver, &run->worker, run->config, run->optimizer.state_count, folder));
    HAPT_TRY(refuse_to_replace_weights(run, checkpoint));
    if (checkpoint) run->saver.writer.resumed_step = checkpoint->step;
    run->vote_bytes = sizeof(struct vote) + (size_t)run->worker.most * sizeof(struct stage_vote);
    HAPT_NEW(run->mine, run->arena, run->vote_bytes);
    HAPT_NEW(run->votes, run->arena, (size_t)run->env->world_size * run->vote_bytes);
    HAPT_NEW(run->sample, run->arena, run->env->world_size * run->worker.most);
    HAPT_NEW(run->comm_s, run->arena, run->worker.most);
    if (run->env->world_rank == 0 && run->worker.runtime->computes) /* modelled devices follow the plan */
        HAPT_TRY(
            watch_slow_create(&run->worker, hapt_config_real(run->config, "slow-threshold"), run->arena, &run->slow));
    watch_init(&run->watch, run->env, run->config, run->saver.shard_bytes);
    run->first = run->worker.first_step = checkpoint ? checkpoint->step : 0;
    /* Another plan's checkpoint is saved again, so that the newest one is always this run's. */
    if (checkpoint && checkpoint->plan == run->plan) run->saver.saved = checkpoint->step;
    run->end = run_data_end(run->config, run->optimizer.steps);
    if (run->end < run->first) run->end = run->first;
    worker_describe(&run->worker, result);
    result->first_step = run->first;
    result->end_step = run->end;
    result->time_scale = run->worker.runtime->computes ? 0 : run->worker.time_scale;
    result->stage_count = run->plan->stage_count;
    if (checkpoint) {
        run->saver.path = checkpoint->path;
        result->history = checkpoint->history;
        result->history.capacity = result->history.validation_capacity = 0; /* its arrays belong to the checkpoint */
    }
    const enum hapt_dtype dtype =
        run->worker.runtime->computes ? run->worker.model->dtype : HAPT_F32; /* modelled devices have no gradients */
    loss_scale_begin(&run->scale, dtype, hapt_config_real(run->config, "loss-scale"), result->history.gradient_norm,
                     result->history.count);
    HAPT_NEW(result->planned_bytes, run->arena, result->stage_count);
    HAPT_NEW(result->measured_bytes, run->arena, result->stage_count);
    HAPT_NEW(result->host_bytes, run->arena, result->stage_count);
    return reserve_history(run, run->end - run->first < 1000000 ? run->end + 1 : run->first + 1000000);
}

/* True if checkpoints are written before the end, so that asynchronous writing is useful. It is not if every step is
 * saved, or if no interval ends before the run does. */
static bool saves_often(const struct run *run)
{
    const int64_t every = hapt_config_int(run->config, "checkpoint-every");
    const double every_s = 60 * hapt_config_real(run->config, "checkpoint-minutes");
    const double step_s = isfinite(run->plan->simulated_s) ? run->plan->simulated_s : INFINITY;
    return (every > 1 && run->first / every < (run->end - 1) / every) ||
           (every != 1 && every_s > 0 && (double)(run->end - run->first) * step_s > every_s);
}

static enum hapt_status train(struct run *run, const struct hapt_checkpoint *checkpoint)
{
    const MPI_Comm world = run->env->world;
    HAPT_TRY(hapt_env_agree(world, prepare(run, checkpoint)));
    HAPT_TRY(run_data_open(run->env, run->config, run->worker.model, run->plan, run->end, &run->data));
    HAPT_TRY(open_validation(run));
    HAPT_TRY(hapt_env_agree(world, trace_create(&run->worker, hapt_config_int(run->config, "trace"))));
    HAPT_TRY(worker_join(&run->worker, hapt_config_real(run->config, "timeout"), &run->exits_together));
    HAPT_TRY(worker_gather_environment(&run->worker, run->result));
    HAPT_TRY(worker_report_carriers(&run->worker));
    const enum hapt_status set =
        initial_set(&run->worker, checkpoint, run->optimizer.state_count, run->saver.buffer, run->saver.local);
    HAPT_TRY(hapt_env_agree(world, set));
    HAPT_TRY(saver_open(&run->saver, run->config, run->data, run->validation.data, checkpoint, saves_often(run)));
    if (checkpoint) saver_compare_data(&run->saver, checkpoint);
    return observed_loop(run);
}

enum hapt_status hapt_train_run(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                const struct hapt_model *model, const struct hapt_plan *plan,
                                const struct hapt_checkpoint *checkpoint, const struct hapt_config *config,
                                const struct hapt_train_observer *observer, struct hapt_arena *arena,
                                struct hapt_train_result **result)
{
    struct run run = {.env = env, .plan = plan, .config = config, .observer = observer, .arena = arena};
    run.worker = worker_of(env, cluster, model, plan, arena);
    hapt_stop_defer(); /* until the end of a step */
    /* An agreement may wait for a slow disk, so it has a longer deadline than a message. */
    hapt_env_set_agree_timeout(10 * hapt_config_real(config, "timeout"));
    const enum hapt_status status = train(&run, checkpoint);
    hapt_env_set_agree_timeout(0);
    /* After a timeout this rank cannot agree on the exit, and peers cannot free shared resources. */
    if (status == HAPT_ERR_COMM && !run.exits_together) hapt_die(status);
    const enum hapt_status drained = worker_drain(&run.worker); /* a failure before the first step leaves it running */
    if (drained != HAPT_OK) hapt_die(drained);
    saver_release(&run.saver);
    worker_release(&run.worker);
    validation_release(&run.validation);
    hapt_data_close(run.data);
    if (status != HAPT_OK) return status;
    run.result->checkpoint = run.saver.path;
    hapt_train_summarise(run.result);
    *result = run.result;
    return HAPT_OK;
}
