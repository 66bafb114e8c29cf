/* Times of sections and of their steps. */
#include "engine_private.h"

enum { PIECE = HAPT_MARKS / 2 }; /* steps that are queued before anybody waits */
#define HEAD_START_S 20e-6       /* a host takes less to queue a step */

static enum hapt_status check_clock(const struct hapt_engine *engine, double time_s)
{
    if (time_s >= 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INTERNAL, "see hapt doctor", "the clock of the %s device does not answer",
                     engine->options.backend->name);
}

/* A mark behind every step: what the host does is none of their time as long as it is ahead of the device, which is
 * held up for that. */
static enum hapt_status time_by_device(struct hapt_engine *engine, const struct bound_step *step, int count,
                                       double *step_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct hapt_event *mark[PIECE + 1];
    int n = 0;
    if (backend->hold) backend->hold(engine->queue, count * HEAD_START_S);
    mark[0] = backend->mark(engine->queue);
    while (n < count) {
        HAPT_TRY(hapt_engine_run(engine, &step[n]));
        mark[++n] = backend->mark(engine->queue);
    }
    HAPT_TRY(hapt_engine_finish(engine));
    for (int s = 0; s < count; s++) {
        step_s[s] = backend->seconds(mark[s], mark[s + 1]);
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
    const struct bound_step *step = &engine->section[section].step[slot * count];
    if (!engine->options.backend->mark) return time_by_host(engine, step, count, clock, step_s);
    for (int s = 0; s < count; s += PIECE)
        HAPT_TRY(time_by_device(engine, &step[s], count - s < PIECE ? count - s : PIECE, &step_s[s]));
    return HAPT_OK;
}

enum hapt_status hapt_engine_time_part(struct hapt_engine *engine, enum hapt_section section, int slot, int first_op,
                                       int end_op, hapt_engine_clock *clock, double *time_s)
{
    const struct hapt_backend *backend = engine->options.backend;
    struct hapt_event *from = backend->mark(engine->queue);
    const double start_s = clock();
    HAPT_TRY(hapt_engine_start_part(engine, section, slot, first_op, end_op));
    const double queued_s = clock() - start_s;
    struct hapt_event *to = backend->mark(engine->queue);
    HAPT_TRY(hapt_engine_finish(engine));
    *time_s = backend->seconds(from, to);
    HAPT_TRY(check_clock(engine, *time_s));
    hapt_engine_time_replay(engine, section, slot, first_op, end_op, queued_s, time_s);
    return HAPT_OK;
}
