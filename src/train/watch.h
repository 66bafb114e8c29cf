/* What a run keeps an eye on while it trains: the time that is left, ranks and links that are slower than planned. */
#ifndef HAPT_TRAIN_WATCH_H
#define HAPT_TRAIN_WATCH_H

#include "hapt/config.h"
#include "hapt/plan.h"

#define WATCH_RECENT 8 /* steps */

/* Why a run ends before its last step: bits that every rank tells the others. */
enum watch_stop { WATCH_GOES_ON = 0, WATCH_SIGNAL = 1, WATCH_TIME = 2 };

struct watch {
    double end_s;                /* by hapt_time_s: the process must have left; INFINITY: no limit */
    const char *limit;           /* what sets it, for messages */
    double step_s[WATCH_RECENT]; /* of the newest steps, a ring */
    int64_t steps;
    double save_s; /* the longest save so far; before the first one what is expected */
};

/* `shard_bytes`: the largest shard of a checkpoint. Rank-local. */
void watch_init(struct watch *watch, const struct hapt_env *env, const struct hapt_config *config, double shard_bytes);
/* A step ended now, a save took so long. */
void watch_step(struct watch *watch, double time_s);
void watch_saved(struct watch *watch, double time_s);
/* Bits of enum watch_stop as this rank sees it, between two steps: is there time for another one and to save it? */
int watch_look(const struct watch *watch);
/* What the bits of all ranks together mean, for messages: "a signal", "--max-hours". */
const char *watch_reason(const struct watch *watch, int stop);

/* Longest wait for a peer inside a step: --timeout, where steps are long more. */
double watch_timeout_s(const struct hapt_config *config, const struct hapt_plan *plan);

#endif
