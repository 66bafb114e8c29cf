/* Monitoring of a run: the remaining time, and ranks and links slower than planned. */
#ifndef HAPT_TRAIN_WATCH_H
#define HAPT_TRAIN_WATCH_H

#include "hapt/config.h"
#include "hapt/plan.h"

#define WATCH_RECENT 8 /* steps */

/* Reasons to end before the last step, as bits that ranks exchange. */
enum watch_stop { WATCH_GOES_ON = 0, WATCH_SIGNAL = 1, WATCH_TIME = 2 };

struct watch {
    double end_s;                /* deadline of the process in hapt_time_s; INFINITY: none */
    const char *limit;           /* source of the deadline, for messages */
    double step_s[WATCH_RECENT]; /* ring buffer of the newest steps */
    int64_t steps;
    double save_s;       /* longest save so far; before the first one an estimate */
    double validation_s; /* time of a validation that follows the next vote */
};

/* `shard_bytes`: the largest shard of a checkpoint. Rank-local. */
void watch_init(struct watch *watch, const struct hapt_env *env, const struct hapt_config *config, double shard_bytes);
/* Reports the duration of a step, or of a save. */
void watch_step(struct watch *watch, double time_s);
void watch_saved(struct watch *watch, double time_s);
/* Bits of enum watch_stop as this rank sees them between two steps: is there time for another step and to save it? */
int watch_stop_bits(const struct watch *watch);
/* The reason for the combined bits of all ranks, for messages: "a signal", "--max-hours". */
const char *watch_reason(const struct watch *watch, int stop);

/* Longest wait for a peer inside a step: --timeout, or longer if steps are long. */
double watch_timeout_s(const struct hapt_config *config, const struct hapt_plan *plan);

#endif
