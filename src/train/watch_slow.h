/*
 * Detects ranks and links that are slower than planned and slower than the others. Each is named once.
 *
 * A rank's sample of a step is compared with the plan's prediction and with the other ranks in the same step. If all
 * are equally slow, another plan would not help. A rank is slow by the CPU time of its device; or by wall-clock time
 * far above the others, which means that other processes take its cores. A link is judged by the network's own counts
 * per step if available, else by its fastest message. A condition must hold for the medians of eight steps, nine times
 * in a row, so short disturbances name nobody. A rank slow from the start is named after 18 steps, one that becomes
 * slow after 13. The threshold is higher under noise: on shared cores, for a rank that idles more than planned, and
 * while all these steps took less than a few seconds.
 *
 * The whole step is compared with the prediction in the same way. A step above 1.5 times or below half of it causes one
 * warning. If this job's ranks outnumber the cores, the threshold rises with their wait for cores. A plan without times
 * has no prediction.
 */
#ifndef HAPT_TRAIN_WATCH_SLOW_H
#define HAPT_TRAIN_WATCH_SLOW_H

#include "stage.h"

/* Data of one step of a stage on one rank. */
struct watch_sample {
    struct hapt_team_times effort;
    struct stage_link_time link[STAGE_LINKS];
};

struct watch_slow;

/* `threshold`: --slow-threshold. On the rank that judges. */
enum hapt_status watch_slow_create(const struct worker *worker, double threshold, struct hapt_arena *arena,
                                   struct watch_slow **slow);
/* Judges one more step, which took `step_s`, by sample[worker_record]. Warns and adds to result->warning. */
enum hapt_status watch_slow_step(struct watch_slow *slow, int64_t step, double step_s,
                                 const struct watch_sample *sample, struct hapt_train_result *result);

#endif
