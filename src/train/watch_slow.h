/*
 * Ranks and links that are slower than the plan assumes, and slower than the others are: named once each.
 *
 * A step's sample of a rank is compared with what the plan predicts and with the other ranks in the same step: where
 * all are slower alike, another plan would not help. A rank counts as slow by the CPU time of its device; or, far more
 * slowly than the others, by the clock: its cores are taken away. A link counts by what the network itself counted in
 * each step, where it does, else by its quickest message. It must hold for the medians of eight steps, nine times in a
 * row, so that a slow moment names nobody: what is slow from the start on is named after 18 steps, what becomes slow
 * after 13. The bar is higher where there is noise: on shared cores, for a rank that idles more than planned, and while
 * all of those steps took less than some seconds.
 *
 * The whole step is compared with the prediction in the same way: one that takes more than 1.5 times or less than half
 * of it is said to, once. Where this job's own ranks outnumber the cores, the bar is as much higher as they wait for
 * cores. A plan without times has no prediction.
 */
#ifndef HAPT_TRAIN_WATCH_SLOW_H
#define HAPT_TRAIN_WATCH_SLOW_H

#include "stage.h"

/* What every rank tells of one step. */
struct watch_sample {
    struct hapt_team_effort effort;
    struct stage_link_time link[STAGE_LINKS];
};

struct watch_slow;

/* `threshold`: --slow-threshold. On the rank that judges. */
enum hapt_status watch_slow_create(const struct stage *stage, double threshold, struct hapt_arena *arena,
                                   struct watch_slow **slow);
/* One step later, which took `step_s`, with the samples of all world ranks; adds to result->warning and warns. */
enum hapt_status watch_slow_step(struct watch_slow *slow, int64_t step, double step_s,
                                 const struct watch_sample *sample, struct hapt_train_result *result);

#endif
