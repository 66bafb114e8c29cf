/*
 * Replays. Between two host waits a section always queues the same kernels with the same arguments: a replay range.
 * It is captured once per slot, and replayed if that is faster by the device's clock than queueing its steps (shortest
 * of some runs each). The first run of a slot is never captured: then libraries choose their algorithms and kernels are
 * loaded. A range that cannot be captured continues step by step.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine_private.h"
#include "hapt/config.h"

enum { TRIALS = 3, LEAST_STEPS = 2 };
#define MOST_TIME_SHARE 0.995 /* a replay must take at most this share of the steps' time */
#define QUEUEING_SHARE 0.5    /* with this share of a part's time spent queueing, the device may have idled */

enum replay_mode { REPLAY_MEASURED, REPLAY_NEVER, REPLAY_ALWAYS };

static enum replay_mode replay_mode(void)
{
    const char *choice = getenv("HAPT_CUDA_GRAPHS");
    if (!choice || (strcmp(choice, "0") != 0 && strcmp(choice, "1") != 0)) return REPLAY_MEASURED;
    return choice[0] == '0' ? REPLAY_NEVER : REPLAY_ALWAYS;
}

/* ---- ranges of steps ---- */

/* True: the host has no work before or after this step. Must agree with hapt_engine_run. */
static bool needs_no_host(const struct hapt_engine *engine, const struct bound_step *step)
{
    return step->kernel ? !step->call.shard_reduce : !engine->options.links.collective;
}

static enum hapt_status range_init(struct hapt_engine *engine, struct replay_range *range, int first, int end,
                                   int slots)
{
    *range = (struct replay_range){.first = first,
                                   .end = end,
                                   .variants = slots,
                                   .choice = replay_mode() == REPLAY_ALWAYS ? RANGE_REPLAYS : RANGE_TRIES_STEPS};
    HAPT_NEW(range->slot, &engine->arena, slots);
    return HAPT_OK;
}

static enum hapt_status find_in_section(struct hapt_engine *engine, enum hapt_section section)
{
    struct section_binding *binding = &engine->section[section];
    HAPT_NEW(binding->range, &engine->arena, binding->step_count);
    for (int first = 0, end; first < binding->step_count; first = end) {
        for (end = first; end < binding->step_count && needs_no_host(engine, &binding->step[end]); end++)
            if (end > first && hapt_engine_begins_unit(engine, section, end)) break;
        if (end - first >= LEAST_STEPS)
            HAPT_TRY(range_init(engine, &binding->range[binding->range_count++], first, end,
                                engine->options.slots * binding->weight_slots));
        if (end == first) end++;
    }
    return HAPT_OK;
}

static bool can_replay(const struct hapt_engine *engine)
{
    return engine->options.backend->capture && engine->options.backend->timestamp && replay_mode() != REPLAY_NEVER;
}

enum hapt_status hapt_engine_find_replay_ranges(struct hapt_engine *engine)
{
    if (!can_replay(engine)) return HAPT_OK;
    HAPT_TRY(find_in_section(engine, HAPT_SECTION_FORWARD));
    HAPT_TRY(find_in_section(engine, HAPT_SECTION_BACKWARD));
    HAPT_TRY(find_in_section(engine, HAPT_SECTION_WEIGHT));
    return engine->parameter_count >= LEAST_STEPS && !engine->plan->host_gradients
               ? range_init(engine, &engine->norm, 0, engine->parameter_count, 1)
               : HAPT_OK;
}

/* From now on, the range runs step by step. */
static void disable_replay(struct hapt_engine *engine, struct replay_range *range)
{
    for (int slot = 0; slot < range->variants && range->slot; slot++) {
        if (range->slot[slot].replay) engine->options.backend->replay_destroy(range->slot[slot].replay);
        range->slot[slot].replay = NULL;
    }
    range->choice = RANGE_STEPS;
}

void hapt_engine_disable_replays(struct hapt_engine *engine)
{
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int c = 0; c < engine->section[section].range_count; c++)
            disable_replay(engine, &engine->section[section].range[c]);
    disable_replay(engine, &engine->norm);
}

/* ---- captures ---- */

/* `clean`: no failure was recorded before the capture. */
static struct hapt_replay *end_capture(struct hapt_engine *engine, enum hapt_status status, bool clean)
{
    struct hapt_replay *replay = engine->options.backend->capture_end(engine->queue);
    if (status == HAPT_OK) return replay;
    if (replay) engine->options.backend->replay_destroy(replay);
    if (clean) hapt_fail_reset(); /* a step that cannot be captured may still run */
    return NULL;
}

static struct hapt_replay *capture(struct hapt_engine *engine, const struct replay_range *range,
                                   const struct bound_step *step)
{
    const bool clean = hapt_fail_message()[0] == '\0';
    enum hapt_status status = HAPT_OK;
    if (!engine->options.backend->capture(engine->queue)) return NULL;
    for (int s = range->first; s < range->end && status == HAPT_OK; s++) status = hapt_engine_run(engine, &step[s]);
    return end_capture(engine, status, clean);
}

/* True: a replay has been queued. */
static bool start_replay(struct hapt_engine *engine, struct replay_range *range, const struct bound_step *step,
                         struct range_slot *slot)
{
    if (slot->runs == 0 || (range->choice != RANGE_TRIES_REPLAYS && range->choice != RANGE_REPLAYS)) return false;
    if (!slot->replay) slot->replay = capture(engine, range, step);
    if (slot->replay && engine->options.backend->replay(slot->replay, engine->queue)) return true;
    disable_replay(engine, range);
    return false;
}

/* ---- runs and trials ---- */

static bool is_tried(const struct replay_range *range, bool replayed)
{
    return range->choice == (replayed ? RANGE_TRIES_REPLAYS : RANGE_TRIES_STEPS);
}

enum hapt_status hapt_engine_run_range(struct hapt_engine *engine, struct replay_range *range,
                                       const struct bound_step *step, int slot)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct range_slot *at = &range->slot[slot];
    const bool tries = is_tried(range, false) || is_tried(range, true);
    struct hapt_event *from = tries ? backend->timestamp(engine->queue) : NULL;
    const bool replayed = start_replay(engine, range, step, at);
    for (int s = range->first; s < range->end && !replayed; s++) HAPT_TRY(hapt_engine_run(engine, &step[s]));
    const bool first = (replayed ? at->replays++ : at->runs++) == 0;
    if (!from || first || !is_tried(range, replayed)) return HAPT_OK;
    engine->trial.range = range;
    engine->trial.from = from;
    engine->trial.to = backend->timestamp(engine->queue);
    engine->trial.replayed = replayed;
    return HAPT_OK;
}

void hapt_engine_judge_trial(struct hapt_engine *engine)
{
    struct replay_range *range = engine->trial.range;
    if (!range) return;
    engine->trial.range = NULL;
    const double time_s = engine->options.backend->elapsed_s(engine->trial.from, engine->trial.to);
    double *shortest_s = engine->trial.replayed ? &range->replay_s : &range->steps_s;
    if (time_s < 0) {
        disable_replay(engine, range);
        return;
    }
    if (range->trials == 0 || time_s < *shortest_s) *shortest_s = time_s;
    if (++range->trials < TRIALS) return;
    range->trials = 0;
    if (range->choice == RANGE_TRIES_STEPS)
        range->choice = RANGE_TRIES_REPLAYS;
    else if (range->replay_s < MOST_TIME_SHARE * range->steps_s)
        range->choice = RANGE_REPLAYS;
    else
        disable_replay(engine, range);
}

int hapt_engine_trial_runs(const struct hapt_engine *engine)
{
    int ranges = 0;
    for (int section = 0; section < HAPT_SECTION_COUNT; section++) ranges += engine->section[section].range_count;
    return ranges > 0 ? 2 * (1 + TRIALS) : 1;
}

void hapt_engine_describe_replays(const struct hapt_engine *engine, char text[HAPT_ENGINE_REPLAY_CHARS])
{
    int ranges = 0, replayed = 0;
    double steps_s = 0, replay_s = 0;
    char short_text[32], long_text[32];
    for (int section = 0; section < HAPT_SECTION_COUNT; section++)
        for (int c = 0; c < engine->section[section].range_count; c++) {
            const struct replay_range *range = &engine->section[section].range[c];
            ranges++;
            if (range->choice != RANGE_REPLAYS) continue;
            replayed++;
            steps_s += range->steps_s;
            replay_s += range->replay_s;
        }
    int length = 0;
    text[0] = '\0';
    if (ranges > 0)
        length =
            snprintf(text, HAPT_ENGINE_REPLAY_CHARS, "%d of %d runs of kernels replayed as graphs", replayed, ranges);
    if (replay_s > 0)
        snprintf(text + length, HAPT_ENGINE_REPLAY_CHARS - (size_t)length, ", %s instead of %s",
                 hapt_units_time(replay_s, short_text), hapt_units_time(steps_s, long_text));
}

/* ---- parts ---- */

void hapt_engine_time_replay(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op, int end_op,
                             double queued_s, double *time_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    const bool clean = hapt_fail_message()[0] == '\0';
    if (!can_replay(engine) || (replay_mode() == REPLAY_MEASURED && queued_s < QUEUEING_SHARE * *time_s) ||
        !backend->capture(engine->queue))
        return;
    struct hapt_replay *replay =
        end_capture(engine, hapt_engine_start_part(engine, section, slot, first_op, end_op), clean);
    if (!replay) return;
    double replay_s = -1;
    if (backend->replay(replay, engine->queue)) { /* the first replay uploads it to the device */
        struct hapt_event *from = backend->timestamp(engine->queue);
        if (backend->replay(replay, engine->queue))
            replay_s = backend->elapsed_s(from, backend->timestamp(engine->queue));
    }
    backend->replay_destroy(replay);
    if (replay_s > 0 && (replay_s < *time_s || replay_mode() == REPLAY_ALWAYS)) *time_s = replay_s;
}
