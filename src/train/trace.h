/* The timeline of the last steps: begin and end of each instruction, send and arrival of each message,
 * copies and updates of offloaded data. */
#ifndef HAPT_TRAIN_TRACE_H
#define HAPT_TRAIN_TRACE_H

#include "worker.h"

/* Keeps the newest `steps` steps from now on; 0: none. Call after worker_build, before worker_join. */
enum hapt_status trace_create(struct worker *worker, int64_t steps);
/* Buffer in which the communication thread records the times of a flow's messages; NULL: none. *count: its size. */
enum hapt_status trace_add_flow(struct worker *worker, int chunk, int peer, bool backward, bool sends, int *count,
                                double **time_s);
/* Records instruction `index` of the list in step `step` of the run, counted from the run's first. */
static inline void trace_note(const struct worker *worker, int64_t step, int index, double begin_s, double end_s)
{
    const struct worker_trace *trace = &worker->trace;
    if (trace->steps == 0) return;
    double *time_s = trace->time_s + 2 * ((step % trace->steps) * worker->list->count + index);
    time_s[0] = begin_s;
    time_s[1] = end_s;
}
/* Gathers the events of the steps [first, end), as far as kept, to rank 0. `run_first`: the run's first step. Call
 * after worker_drain. Collective over env->world. */
enum hapt_status trace_gather(struct worker *worker, int64_t run_first, int64_t end, struct hapt_train_result *result);

#endif
