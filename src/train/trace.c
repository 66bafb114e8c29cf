/* The newest steps are kept in a ring buffer, allocated before the first step. Times are converted to the time of day.
 * So they are exact within a host; between hosts they are as exact as the clock synchronisation. */
#include "trace.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum hapt_status trace_create(struct stage *stage, int64_t steps)
{
    stage->trace = (struct stage_trace){0};
    if (stage->chunk < 0 || steps == 0) return HAPT_OK;
    HAPT_NEW(stage->trace.time_s, stage->arena, 2 * steps * stage->list->count);
    HAPT_NEW(stage->trace.flow, stage->arena, stage->edges->count);
    stage->trace.steps = steps;
    return HAPT_OK;
}

enum hapt_status trace_add_flow(struct stage *stage, int peer_stage, bool backward, bool sends, int *count,
                                double **time_s)
{
    struct stage_trace *trace = &stage->trace;
    *count = 0;
    *time_s = NULL;
    if (trace->steps == 0) return HAPT_OK;
    struct stage_trace_flow *flow = &trace->flow[trace->flow_count++];
    *count = (int)trace->steps * stage->plan->microbatches;
    HAPT_NEW(*time_s, stage->arena, *count);
    *flow = (struct stage_trace_flow){peer_stage, backward, sends, *time_s};
    return HAPT_OK;
}

/* Offset from this host's clock to the time of day. */
static double offset_s(void)
{
    struct timespec day;
    clock_gettime(CLOCK_REALTIME, &day);
    return (double)day.tv_sec + 1e-9 * (double)day.tv_nsec - hapt_time_s();
}

static int64_t fill(const struct stage *stage, int64_t run_first, int64_t from, int64_t end,
                    struct hapt_train_event *event)
{
    const struct stage_trace *trace = &stage->trace;
    const int rank = stage->env->world_rank, B = stage->plan->microbatches;
    const double shift_s = offset_s();
    int64_t count = 0;
    for (int64_t step = from; step < end; step++) {
        const int64_t place = (step - run_first) % trace->steps;
        for (int i = 0; i < stage->list->count; i++) {
            const double *time_s = trace->time_s + 2 * (place * stage->list->count + i);
            event[count++] = (struct hapt_train_event){rank,
                                                       stage->chunk,
                                                       -1,
                                                       (int)stage->list->instruction[i].kind,
                                                       stage->list->instruction[i].microbatch,
                                                       (int)step,
                                                       time_s[0] + shift_s,
                                                       time_s[1] + shift_s};
        }
        for (int f = 0; f < trace->flow_count; f++)
            for (int m = 0; m < B; m++) {
                const struct stage_trace_flow *flow = &trace->flow[f];
                const double time_s = flow->time_s[place * B + m] + shift_s;
                const int kind = flow->sends ? flow->backward ? HAPT_EVENT_GRADIENTS_SENT : HAPT_EVENT_ACTIVATIONS_SENT
                                 : flow->backward ? HAPT_EVENT_GRADIENTS_ARRIVED
                                                  : HAPT_EVENT_ACTIVATIONS_ARRIVED;
                event[count++] =
                    (struct hapt_train_event){rank, stage->chunk, flow->peer_stage, kind, m, (int)step, time_s, time_s};
            }
    }
    return count;
}

enum hapt_status trace_gather(struct stage *stage, int64_t run_first, int64_t end, struct hapt_train_result *result)
{
    const struct hapt_env *env = stage->env;
    const double patience_s = stage_agreement_timeout_s(stage);
    const int64_t kept = stage->trace.steps, from = end - kept > run_first ? end - kept : run_first;
    const int64_t of_step = kept ? stage->list->count + stage->trace.flow_count * stage->plan->microbatches : 0;
    int64_t mine = of_step * (end - from), most = 0, *counts;
    struct hapt_train_event *event, *all;
    HAPT_NEW(counts, stage->arena, env->world_size);
    HAPT_TRY(hapt_link_all_gather(env->world, "sizes of the timeline", patience_s, &mine, sizeof mine, counts));
    for (int r = 0; r < env->world_size; r++)
        if (counts[r] > most) most = counts[r];
    if (most == 0) return HAPT_OK;
    HAPT_NEW(event, stage->arena, most);
    HAPT_NEW(all, stage->arena, most * env->world_size);
    if (mine > 0) HAPT_ASSERT(fill(stage, run_first, from, end, event) == mine);
    HAPT_TRY(hapt_link_all_gather(env->world, "the timeline", patience_s, event, (size_t)most * sizeof *event, all));
    double first_s = INFINITY;
    for (int r = 0; r < env->world_size; r++)
        for (int64_t i = 0; i < counts[r]; i++) {
            all[result->event_count] = all[r * most + i];
            first_s = fmin(first_s, all[result->event_count++].begin_s);
        }
    for (int64_t i = 0; i < result->event_count; i++) {
        all[i].begin_s = (all[i].begin_s - first_s) / stage->time_scale;
        all[i].end_s = (all[i].end_s - first_s) / stage->time_scale;
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
                                                        [HAPT_INSTRUCTION_REDUCE] = "reduce",
                                                        [HAPT_INSTRUCTION_EXCHANGE] = "exchange",
                                                        [HAPT_INSTRUCTION_NORM] = "norm",
                                                        [HAPT_INSTRUCTION_UPDATE] = "update",
                                                        [HAPT_EVENT_ACTIVATIONS_SENT] = "activations left",
                                                        [HAPT_EVENT_ACTIVATIONS_ARRIVED] = "activations there",
                                                        [HAPT_EVENT_GRADIENTS_SENT] = "gradients left",
                                                        [HAPT_EVENT_GRADIENTS_ARRIVED] = "gradients there"};

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
