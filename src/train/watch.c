/* Time: how long a run may go on, how long a rank waits. */
#include "watch.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "hapt/stop.h"

/* The next step and save may take longer than those before; leaving takes a moment, too. */
#define STEP_MARGIN 1.2
#define SAVE_MARGIN 1.5
#define LEAVE_S 2.0
#define LIKELY_DISK 50e6 /* byte/s, until a save was timed */

#define PATIENCE_STEPS 10 /* --timeout or as many predicted steps */

/* Seconds until the batch system ends the job; INFINITY: it does not say. */
static double slurm_left_s(void)
{
    const char *text = getenv("SLURM_JOB_END_TIME");
    char *end;
    if (!text || !*text) return INFINITY;
    const double epoch_s = strtod(text, &end);
    return *end || !(epoch_s > 0) ? (double)INFINITY : epoch_s - (double)time(NULL);
}

void watch_init(struct watch *watch, const struct hapt_env *env, const struct hapt_config *config, double shard_bytes)
{
    *watch = (struct watch){.end_s = INFINITY, .save_s = 1 + shard_bytes / LIKELY_DISK};
    const double hours = hapt_config_real(config, "max-hours");
    if (hours > 0) {
        watch->end_s = env->start_s + 3600 * hours;
        watch->limit = "--max-hours";
    } else if (!hapt_config_given(config, "max-hours")) {
        watch->end_s = hapt_time_s() + slurm_left_s();
        watch->limit = "the end of the Slurm job";
    }
    if (isfinite(watch->end_s))
        hapt_note(env, "%s leaves %.2f hours for training\n", watch->limit, (watch->end_s - hapt_time_s()) / 3600);
}

void watch_step(struct watch *watch, double time_s)
{
    watch->step_s[watch->steps++ % WATCH_RECENT] = time_s;
}

void watch_saved(struct watch *watch, double time_s)
{
    /* The guess is forgotten at the first measurement that is not far below it: small files come from the cache. */
    watch->save_s = fmax(time_s, 0.5 * watch->save_s);
}

int watch_look(const struct watch *watch)
{
    double longest_s = 0;
    for (int i = 0; i < WATCH_RECENT && i < watch->steps; i++) longest_s = fmax(longest_s, watch->step_s[i]);
    const double needed_s = STEP_MARGIN * longest_s + SAVE_MARGIN * watch->save_s + LEAVE_S;
    return (hapt_stop_asked() ? WATCH_SIGNAL : 0) | (hapt_time_s() + needed_s > watch->end_s ? WATCH_TIME : 0);
}

const char *watch_reason(const struct watch *watch, int stop)
{
    return stop & WATCH_SIGNAL ? "a signal" : stop & WATCH_TIME ? watch->limit : NULL;
}

double watch_timeout_s(const struct hapt_config *config, const struct hapt_plan *plan)
{
    const double asked_s = hapt_config_real(config, "timeout");
    return isfinite(plan->simulated_s) ? fmax(asked_s, PATIENCE_STEPS * plan->simulated_s) : asked_s;
}
