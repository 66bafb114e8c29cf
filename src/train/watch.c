/* Time limits: the deadline of a run, and the waits of a rank. */
#include "watch.h"

#include <math.h>
#include <stdlib.h>
#include <time.h>

#include "hapt/stop.h"

/* Margins for the next step and save, which may take longer than earlier ones, and for the exit. */
#define STEP_MARGIN 1.2
#define SAVE_MARGIN 1.5
#define LEAVE_S 2.0
#define ASSUMED_DISK_BYTES_PER_S 50e6 /* assumed until a save was timed */

#define PATIENCE_STEPS 10 /* --timeout, or this many predicted steps if longer */

/* Seconds until the batch system ends the job; INFINITY: unknown. */
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
    *watch = (struct watch){.end_s = INFINITY, .save_s = 1 + shard_bytes / ASSUMED_DISK_BYTES_PER_S};
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
    /* The estimate decays by at most half per save, because small files only reach the page cache. */
    watch->save_s = fmax(time_s, 0.5 * watch->save_s);
}

int watch_stop_bits(const struct watch *watch)
{
    double longest_s = 0;
    for (int i = 0; i < WATCH_RECENT && i < watch->steps; i++) longest_s = fmax(longest_s, watch->step_s[i]);
    const double needed_s = STEP_MARGIN * longest_s + watch->validation_s + SAVE_MARGIN * watch->save_s + LEAVE_S;
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
