/* Times of sections and of their steps, in seconds. */
#include "engine_private.h"

enum { STEPS_PER_WAIT = HAPT_TIMESTAMPS / 2 }; /* steps queued before the host waits */
#define QUEUEING_LIMIT_S 20e-6                 /* a host queues a step in less time */

static enum hapt_status check_clock(const struct hapt_engine *engine, double time_s)
{
    if (time_s >= 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INTERNAL, "see hapt doctor", "the clock of the %s device does not answer",
                     engine->options.backend->name);
}

/* Records a timestamp behind every step. Host time does not count while the host is ahead of the device; so the device
 * is delayed first. */
static enum hapt_status time_by_device(struct hapt_engine *engine, const struct bound_step *step, int count,
                                       double *step_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct hapt_event *timestamp[STEPS_PER_WAIT + 1];
    int n = 0;
    if (backend->delay) backend->delay(engine->queue, count * QUEUEING_LIMIT_S);
    timestamp[0] = backend->timestamp(engine->queue);
    while (n < count) {
        HAPT_TRY(hapt_engine_run(engine, &step[n]));
        timestamp[++n] = backend->timestamp(engine->queue);
    }
    HAPT_TRY(hapt_engine_finish(engine));
    for (int s = 0; s < count; s++) {
        step_s[s] = backend->elapsed_s(timestamp[s], timestamp[s + 1]);
        HAPT_TRY(check_clock(engine, step_s[s]));
    }
    return HAPT_OK;
}

static enum hapt_status time_by_host(struct hapt_engine *engine, const struct bound_step *step, int count,
                                     hapt_engine_clock *clock, double *step_s)
{
    for (int s = 0; s < count; s++) {
        const double start = clock();
        HAPT_TRY(hapt_engine_run(engine, &step[s]));
        HAPT_TRY(hapt_engine_finish(engine));
        step_s[s] = clock() - start;
    }
    return HAPT_OK;
}

enum hapt_status hapt_engine_time_section(struct hapt_engine *engine, enum hapt_section section, int slot,
                                          hapt_engine_clock *clock, double *step_s)
{
    const int count = engine->section[section].step_count;
    HAPT_ASSERT(slot >= 0 && slot < engine->options.slots);
    const struct bound_step *step =
        &engine->section[section].step[slot * engine->section[section].weight_slots * count];
    if (!engine->options.backend->timestamp) return time_by_host(engine, step, count, clock, step_s);
    for (int s = 0; s < count; s += STEPS_PER_WAIT)
        HAPT_TRY(time_by_device(engine, &step[s], count - s < STEPS_PER_WAIT ? count - s : STEPS_PER_WAIT, &step_s[s]));
    return HAPT_OK;
}

enum hapt_status hapt_engine_time_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                       int end_op, hapt_engine_clock *clock, double *time_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct hapt_event *from = backend->timestamp(engine->queue);
    const double start_s = clock();
    HAPT_TRY(hapt_engine_start_part(engine, section, slot, first_op, end_op));
    const double queued_s = clock() - start_s;
    struct hapt_event *to = backend->timestamp(engine->queue);
    HAPT_TRY(hapt_engine_finish(engine));
    *time_s = backend->elapsed_s(from, to);
    HAPT_TRY(check_clock(engine, *time_s));
    hapt_engine_time_replay(engine, section, slot, first_op, end_op, queued_s, time_s);
    return HAPT_OK;
}
