/* The timeline of the last steps: when each instruction began and ended, when each message left and was there. */
#ifndef HAPT_TRAIN_TRACE_H
#define HAPT_TRAIN_TRACE_H

#include "stage.h"

/* Keeps the newest `steps` steps from here on; 0: nothing. After stage_build, before stage_connect. */
enum hapt_status trace_create(struct stage *stage, int64_t steps);
/* Where the courier keeps the times of a flow's messages; NULL: nowhere. *count: of them. */
enum hapt_status trace_add_flow(struct stage *stage, int peer_stage, bool backward, bool sends, int *count,
                                double **time_s);
/* Instruction `index` of the list ran in the step of the run that is `step` behind its first. */
static inline void trace_note(const struct stage *stage, int64_t step, int index, double begin_s, double end_s)
{
    const struct stage_trace *trace = &stage->trace;
    if (trace->steps == 0) return;
    double *time_s = trace->time_s + 2 * ((step % trace->steps) * stage->list->count + index);
    time_s[0] = begin_s;
    time_s[1] = end_s;
}
/* All ranks' events of the steps [first, end), as far as they were kept, on rank 0; `run_first`: the run's first step.
 * After stage_drain. Collective over env->world. */
enum hapt_status trace_gather(struct stage *stage, int64_t run_first, int64_t end, struct hapt_train_result *result);

#endif
