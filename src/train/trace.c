/* The newest steps are kept in a ring buffer, allocated before the first step. Times are converted to the time of day.
 * So they are exact within a host; between hosts they are as exact as the clock synchronisation. */
#include "runtime.h"
#include "trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_SPANS = 1 << 13 }; /* copies and updates of offloaded data that are kept */

enum hapt_status trace_create(struct worker *worker, int64_t steps)
{
    worker->trace = (struct worker_trace){0};
    if (worker->stage_count == 0 || steps == 0) return HAPT_OK;
    HAPT_NEW(worker->trace.time_s, worker->arena, 2 * steps * worker->list->count);
    HAPT_NEW(worker->trace.flow, worker->arena, worker->edges->count);
    worker->trace.steps = steps;
    if (!worker->plan->host_state || !worker->runtime->computes) return HAPT_OK;
    HAPT_TRY(hapt_span_log_init(&worker->trace.spans, MOST_SPANS, worker->arena));
    HAPT_NEW(worker->trace.span, worker->arena, MOST_SPANS);
    hapt_engine_log_spans(worker->stage[0].engine, &worker->trace.spans);
    return HAPT_OK;
}

enum hapt_status trace_add_flow(struct worker *worker, int chunk, int peer, bool backward, bool sends, int *count,
                                double **time_s)
{
    struct worker_trace *trace = &worker->trace;
    *count = 0;
    *time_s = NULL;
    if (trace->steps == 0) return HAPT_OK;
    struct worker_trace_flow *flow = &trace->flow[trace->flow_count++];
    *count = (int)trace->steps * worker->plan->microbatches;
    HAPT_NEW(*time_s, worker->arena, *count);
    *flow = (struct worker_trace_flow){chunk, peer, backward, sends, *time_s};
    return HAPT_OK;
}

/* Offset from this host's clock to the time of day. */
static double offset_s(void)
{
    struct timespec day;
    clock_gettime(CLOCK_REALTIME, &day);
    return (double)day.tv_sec + 1e-9 * (double)day.tv_nsec - hapt_time_s();
}

/* Start of a step that is kept. */
static double step_begin_s(const struct worker *worker, int64_t run_first, int64_t step)
{
    return worker->trace.time_s[2 * ((step - run_first) % worker->trace.steps * worker->list->count)];
}

/* Copies and updates on the host belong to the step in which they begin. */
static int64_t fill_spans(const struct worker *worker, int64_t run_first, int64_t from, int64_t end, double shift_s,
                          struct hapt_train_event *event)
{
    const struct worker_trace *trace = &worker->trace;
    static const int kind[] = {[HAPT_SPAN_TO_DEVICE] = HAPT_EVENT_COPY_TO_DEVICE,
                               [HAPT_SPAN_TO_HOST] = HAPT_EVENT_COPY_TO_HOST,
                               [HAPT_SPAN_HOST_UPDATE] = HAPT_EVENT_HOST_UPDATE};
    const int rank = worker->env->world_rank;
    for (int64_t k = 0; k < trace->span_count; k++) {
        const struct hapt_span *span = &trace->span[k];
        int64_t step = from;
        while (step + 1 < end && step_begin_s(worker, run_first, step + 1) <= span->begin_s) step++;
        event[k] = (struct hapt_train_event){rank,
                                             worker_first_chunk(worker, rank),
                                             -1,
                                             kind[span->kind],
                                             -1,
                                             (int)step,
                                             span->begin_s + shift_s,
                                             span->end_s + shift_s};
    }
    return trace->span_count;
}

static int64_t fill(const struct worker *worker, int64_t run_first, int64_t from, int64_t end,
                    struct hapt_train_event *event)
{
    const struct worker_trace *trace = &worker->trace;
    const int rank = worker->env->world_rank, B = worker->plan->microbatches;
    const int first = worker_first_chunk(worker, rank); /* stands for all its stages */
    const double shift_s = offset_s();
    int64_t count = 0;
    for (int64_t step = from; step < end; step++) {
        const int64_t place = (step - run_first) % trace->steps;
        for (int i = 0; i < worker->list->count; i++) {
            const double *time_s = trace->time_s + 2 * (place * worker->list->count + i);
            const struct hapt_instruction *instruction = &worker->list->instruction[i];
            event[count++] = (struct hapt_train_event){rank,
                                                       instruction->chunk >= 0 ? instruction->chunk : first,
                                                       -1,
                                                       (int)instruction->kind,
                                                       instruction->microbatch,
                                                       (int)step,
                                                       time_s[0] + shift_s,
                                                       time_s[1] + shift_s};
        }
        for (int f = 0; f < trace->flow_count; f++)
            for (int m = 0; m < B; m++) {
                const struct worker_trace_flow *flow = &trace->flow[f];
                const double time_s = flow->time_s[place * B + m] + shift_s;
                const int kind = flow->sends ? flow->backward ? HAPT_EVENT_GRADIENTS_SENT : HAPT_EVENT_ACTIVATIONS_SENT
                                 : flow->backward ? HAPT_EVENT_GRADIENTS_ARRIVED
                                                  : HAPT_EVENT_ACTIVATIONS_ARRIVED;
                event[count++] =
                    (struct hapt_train_event){rank, flow->chunk, flow->peer, kind, m, (int)step, time_s, time_s};
            }
    }
    return count + fill_spans(worker, run_first, from, end, shift_s, event + count);
}

enum hapt_status trace_gather(struct worker *worker, int64_t run_first, int64_t end, struct hapt_train_result *result)
{
    const struct hapt_env *env = worker->env;
    const double patience_s = worker_agreement_timeout_s(worker);
    const int64_t kept = worker->trace.steps, from = end - kept > run_first ? end - kept : run_first;
    const int64_t of_step = kept ? worker->list->count + worker->trace.flow_count * worker->plan->microbatches : 0;
    if (worker->trace.spans.capacity > 0 && end > from)
        worker->trace.span_count =
            hapt_span_log_read(&worker->trace.spans, step_begin_s(worker, run_first, from), worker->trace.span);
    if (worker->trace.span_count == MOST_SPANS && worker->trace.spans.count > MOST_SPANS)
        hapt_note(env, "the timeline has the newest %d copies and updates of offloaded data only\n", (int)MOST_SPANS);
    int64_t mine = of_step * (end - from) + worker->trace.span_count, most = 0, *counts;
    struct hapt_train_event *event, *all;
    HAPT_NEW(counts, worker->arena, env->world_size);
    HAPT_TRY(hapt_link_all_gather(env->world, "sizes of the timeline", patience_s, &mine, sizeof mine, counts));
    for (int r = 0; r < env->world_size; r++)
        if (counts[r] > most) most = counts[r];
    if (most == 0) return HAPT_OK;
    HAPT_NEW(event, worker->arena, most);
    HAPT_NEW(all, worker->arena, most * env->world_size);
    if (mine > 0) HAPT_ASSERT(fill(worker, run_first, from, end, event) == mine);
    HAPT_TRY(hapt_link_all_gather(env->world, "the timeline", patience_s, event, (size_t)most * sizeof *event, all));
    double first_s = INFINITY;
    for (int r = 0; r < env->world_size; r++)
        for (int64_t i = 0; i < counts[r]; i++) {
            all[result->event_count] = all[r * most + i];
            first_s = fmin(first_s, all[result->event_count++].begin_s);
        }
    for (int64_t i = 0; i < result->event_count; i++) {
        all[i].begin_s = (all[i].begin_s - first_s) / worker->time_scale;
        all[i].end_s = (all[i].end_s - first_s) / worker->time_scale;
    }
    result->event = all;
    return HAPT_OK;
}

static const char *const kind_name[HAPT_EVENT_COUNT] = {[HAPT_INSTRUCTION_RECEIVE_FORWARD] = "receive forward",
                                                        [HAPT_INSTRUCTION_FORWARD] = "forward",
                                                        [HAPT_INSTRUCTION_SEND_FORWARD] = "send forward",
                                                        [HAPT_INSTRUCTION_RECEIVE_BACKWARD] = "receive backward",
                                                        [HAPT_INSTRUCTION_BACKWARD] = "backward",
                                                        [HAPT_INSTRUCTION_SEND_BACKWARD] = "send backward",
                                                        [HAPT_INSTRUCTION_WEIGHT] = "weight",
                                                        [HAPT_INSTRUCTION_REDUCE] = "reduce",
                                                        [HAPT_INSTRUCTION_EXCHANGE] = "exchange",
                                                        [HAPT_INSTRUCTION_NORM] = "norm",
                                                        [HAPT_INSTRUCTION_UPDATE] = "update",
                                                        [HAPT_EVENT_ACTIVATIONS_SENT] = "activations left",
                                                        [HAPT_EVENT_ACTIVATIONS_ARRIVED] = "activations there",
                                                        [HAPT_EVENT_GRADIENTS_SENT] = "gradients left",
                                                        [HAPT_EVENT_GRADIENTS_ARRIVED] = "gradients there",
                                                        [HAPT_EVENT_COPY_TO_DEVICE] = "copy to device",
                                                        [HAPT_EVENT_COPY_TO_HOST] = "copy to host",
                                                        [HAPT_EVENT_HOST_UPDATE] = "host update"};

enum hapt_status hapt_train_write_trace(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    static const char *const name[] = {"/trace/rank", "/trace/stage", "/trace/peer_stage", "/trace/step",
                                       "/trace/microbatch"};
    const int64_t count = result->event_count;
    if (count == 0) return HAPT_OK;
    struct hapt_arena scratch;
    int64_t *number;
    double *time_s;
    const char **kind;
    hapt_arena_init(&scratch);
    number = hapt_arena_alloc(&scratch, (size_t)count * 5, sizeof *number);
    time_s = hapt_arena_alloc(&scratch, (size_t)count * 2, sizeof *time_s);
    kind = hapt_arena_alloc(&scratch, (size_t)count, sizeof *kind);
    enum hapt_status status = number && time_s && kind ? HAPT_OK : HAPT_ERR_MEMORY;
    for (int64_t i = 0; i < count && status == HAPT_OK; i++) {
        const struct hapt_train_event *event = &result->event[i];
        const int64_t row[] = {event->rank, event->stage, event->peer_stage, event->step, event->microbatch};
        for (int c = 0; c < 5; c++) number[c * count + i] = row[c];
        time_s[i] = event->begin_s;
        time_s[count + i] = event->end_s;
        kind[i] = kind_name[event->kind];
    }
    for (int c = 0; c < 5 && status == HAPT_OK; c++)
        status = hapt_h5_write(file, name[c], HAPT_H5_I64, 1, &count, number + c * count, "");
    if (status == HAPT_OK) status = hapt_h5_write_strings(file, "/trace/kind", count, kind);
    if (status == HAPT_OK) status = hapt_h5_write(file, "/trace/begin", HAPT_H5_F64, 1, &count, time_s, "s");
    if (status == HAPT_OK) status = hapt_h5_write(file, "/trace/end", HAPT_H5_F64, 1, &count, time_s + count, "s");
    hapt_arena_release(&scratch);
    return status;
}
