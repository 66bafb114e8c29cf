#include "hapt/live.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "hapt/atomic_file.h"
#include "hapt/lock.h"
#include "hapt/run_folder.h"
#include "metrics_csv.h"
#include "tensorboard.h"

#define MOST_SHARE 0.02    /* of the time for writing run.h5: a long run has a large one */
#define LEAST_EVERY_S 0.01 /* between two versions of run.h5 */

struct live {
    const struct hapt_env *env;
    struct hapt_run run; /* its result is `copy` */
    const char *folder, *path;
    double every_s;   /* 0: run.h5 is written at the end only */
    bool with_events; /* --tensorboard */
    bool told[3];     /* a warning of run.h5, metrics.csv, tensorboard/ */
    struct metrics_csv csv;
    struct tensorboard events;
    /* The lock guards what follows, but for `copy`, which the thread alone uses while it runs. */
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool running, leaving;
    struct hapt_train_result seen, copy; /* as of the newest step, and as it is written */
    int64_t saved;                       /* steps in run.h5; -1: not written yet */
};

enum file { RUN_FILE, CSV_FILE, EVENT_FILE };

static void warn_once(struct live *live, enum file file, const char *why)
{
    static const char *const name[] = {"run.h5", "metrics.csv", "the event file of TensorBoard"};
    if (live->told[file]) return;
    live->told[file] = true;
    hapt_warn(live->env, "metrics: %s in %s cannot be written: %s; training goes on\n", name[file], live->folder, why);
}

/* False: another job owns the folder. This process then ends by itself (hapt/lock.h), and nothing is said here. */
static bool owns_folder(void)
{
    struct hapt_failure failure = {0};
    struct hapt_failure *before = hapt_fail_divert(&failure);
    const bool owns = hapt_lock_check() == HAPT_OK;
    hapt_fail_divert(before);
    return owns;
}

/* ---- run.h5 ---- */

/* Writes what `copy` holds. */
static bool save(struct live *live, const char *state)
{
    struct hapt_failure failure = {0};
    struct hapt_failure *before = hapt_fail_divert(&failure);
    hapt_train_summarise(&live->copy);
    const bool saved = hapt_run_save(&live->run, state, live->path) == HAPT_OK;
    hapt_fail_divert(before);
    if (!saved && owns_folder()) warn_once(live, RUN_FILE, failure.message);
    return saved;
}

static void *keep_saving(void *context)
{
    struct live *live = context;
    double due_s = hapt_time_s() + live->every_s;
    pthread_setname_np(pthread_self(), "hapt-metrics");
    pthread_mutex_lock(&live->lock);
    while (!live->leaving) {
        const struct timespec until = hapt_time_spec(due_s);
        const double now_s = hapt_time_s();
        if (now_s < due_s) {
            pthread_cond_timedwait(&live->changed, &live->lock, &until);
            continue;
        }
        if (live->seen.history.count > live->saved && live->seen.history.count > live->seen.first_step) {
            live->copy = live->seen;
            pthread_mutex_unlock(&live->lock);
            const bool saved = save(live, HAPT_RUN_RUNNING);
            pthread_mutex_lock(&live->lock);
            if (saved) live->saved = live->copy.history.count;
        }
        due_s = hapt_time_s() + fmax(fmax(live->every_s, LEAST_EVERY_S), (hapt_time_s() - now_s) / MOST_SHARE);
    }
    pthread_mutex_unlock(&live->lock);
    return NULL;
}

static void start(struct live *live)
{
    pthread_mutex_init(&live->lock, NULL);
    hapt_time_condition_init(&live->changed);
    const int error = hapt_thread_start(&live->thread, keep_saving, live);
    live->running = error == 0;
    if (live->running) return;
    warn_once(live, RUN_FILE, strerror(error));
    pthread_cond_destroy(&live->changed);
    pthread_mutex_destroy(&live->lock);
}

static void stop(struct live *live)
{
    if (!live->running) return;
    pthread_mutex_lock(&live->lock);
    live->leaving = true;
    pthread_cond_broadcast(&live->changed);
    pthread_mutex_unlock(&live->lock);
    pthread_join(live->thread, NULL);
    pthread_cond_destroy(&live->changed);
    pthread_mutex_destroy(&live->lock);
    live->running = false;
}

/* ---- Files that grow ---- */

static void append(struct live *live, const struct hapt_train_result *result)
{
    const double epoch_s = hapt_time_epoch_s();
    if (!owns_folder()) return;
    if (live->csv.file.descriptor >= 0 && !metrics_csv_append(&live->csv, result, epoch_s))
        warn_once(live, CSV_FILE, strerror(errno));
    if (live->events.file.descriptor >= 0 && !tensorboard_append(&live->events, result, epoch_s))
        warn_once(live, EVENT_FILE, strerror(errno));
}

/* ---- The observer ---- */

static void begin(void *context, const struct hapt_train_result *result)
{
    struct live *live = context;
    live->events.file.descriptor = live->csv.file.descriptor = -1;
    live->saved = -1;
    live->seen = *result;
    if (!owns_folder()) return;
    hapt_atomic_file_drop_leftovers(live->path);
    if (!metrics_csv_open(&live->csv, live->folder, result)) warn_once(live, CSV_FILE, strerror(errno));
    if (live->with_events && !tensorboard_open(&live->events, live->folder, result, hapt_time_epoch_s()))
        warn_once(live, EVENT_FILE, strerror(errno));
    if (live->every_s > 0) start(live);
}

static void note(struct live *live, const struct hapt_train_result *result)
{
    if (live->running) pthread_mutex_lock(&live->lock);
    live->seen = *result;
    if (live->running) pthread_mutex_unlock(&live->lock);
}

static void see_step(void *context, const struct hapt_train_result *result)
{
    struct live *live = context;
    note(live, result);
    append(live, result);
}

/* A run that fails has no other run file than the one that was written while it trained. */
static void end(void *context, const struct hapt_train_result *result, bool failed)
{
    struct live *live = context;
    append(live, result); /* the last validation */
    stop(live);
    append_close(&live->csv.file);
    append_close(&live->events.file);
    live->copy = *result;
    if (failed && live->saved >= 0) save(live, HAPT_RUN_STOPPED);
}

enum hapt_status hapt_live_prepare(const struct hapt_env *env, const struct hapt_run *run, struct hapt_arena *arena,
                                   struct hapt_train_observer *observer)
{
    struct live *live;
    *observer = (struct hapt_train_observer){0};
    if (env->world_rank != 0) return HAPT_OK;
    HAPT_NEW(live, arena, 1);
    *live = (struct live){.env = env,
                          .run = *run,
                          .every_s = hapt_config_real(run->config, "metrics-every"),
                          .with_events = hapt_config_bool(run->config, "tensorboard")};
    live->run.profile = NULL; /* it is large, and the plan holds what was decided from it */
    live->run.result = &live->copy;
    HAPT_TRY(hapt_run_folder_name(run->config, arena, &live->folder));
    live->path = hapt_arena_printf(arena, "%s/run.h5", live->folder);
    if (!live->path) return HAPT_ERR_MEMORY;
    *observer = (struct hapt_train_observer){live, begin, see_step, end};
    return HAPT_OK;
}
