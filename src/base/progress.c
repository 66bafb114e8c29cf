/* Progress of long work: a stack of phases, and the thread that prints them. */
#include "hapt/progress.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MAX_PHASES = 8, BAR_CHARS = 24 };
#define QUIET_S 2.0     /* shorter work prints nothing */
#define EVERY_S 5.0     /* between lines */
#define REDRAW_S 0.2    /* between redraws of the bar on a terminal */
#define UNCHANGED_S 5.0 /* between lines without progress, at first; doubles with each line */
#define MAX_UNCHANGED_S 60.0
#define KEPT_UNCHANGED_S 30.0 /* the same between lines that are kept: one long step is no news */
#define WAKE_S 0.25           /* polling interval of the thread */

struct phase {
    char what[64], detail[128];
    long first, done, total;
    long parts, parts_done; /* of the current unit, saved while an inner phase runs; else see below */
    double start_s, every_s;
    bool keeps;    /* its caller gives lines (hapt_progress_keep) */
    double kept_s; /* time of the last of them; 0: none yet */
};

/* The lock guards everything except the parts of the innermost phase. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed;
static struct phase phase[MAX_PHASES];
static int depth;
static atomic_int active; /* copy of depth, readable without the lock */
static atomic_long parts, parts_done;
static pthread_t printer;
static bool printing, drawn, terminal;
static long printed_done, printed_parts; /* at the last line */
static double printed_s, unchanged_s;

/* ---- printing; call with the lock held ---- */

static void parts_of(int level, long *done, long *total)
{
    const bool innermost = level == depth - 1;
    *total = innermost ? atomic_load(&parts) : phase[level].parts;
    *done = innermost ? atomic_load(&parts_done) : phase[level].parts_done;
    if (*done > *total) *done = *total;
}

/* Completed fraction of a phase. */
static double fraction(int level)
{
    const struct phase *at = &phase[level];
    long done, total;
    parts_of(level, &done, &total);
    double part = total > 0 ? (double)done / (double)total : 0;
    if (level + 1 < depth) part = fmax(part, fraction(level + 1));
    if (at->total <= 0) return part;
    if (at->total <= at->first) return 1;
    return fmin(1,
                ((double)(at->done - at->first) + (at->done < at->total ? part : 0)) / (double)(at->total - at->first));
}

static void count_text(int level, char text[64])
{
    long done = phase[level].done, total = phase[level].total;
    if (total <= 0) parts_of(level, &done, &total);
    if (total > 0)
        snprintf(text, 64, " %ld/%ld", done, total);
    else
        text[0] = '\0';
}

static void left_text(double now_s, char text[64])
{
    const double elapsed_s = now_s - phase[0].start_s, share = fraction(0);
    if (share > 0)
        snprintf(text, 64, "%.0f s left", elapsed_s * (1 - share) / share);
    else
        snprintf(text, 64, "%.0f s so far", elapsed_s);
}

static void print_line(double now_s)
{
    char count[64], left[64], inner[240] = "";
    const struct phase *outer = &phase[0];
    size_t length = 0;
    count_text(0, count);
    left_text(now_s, left);
    if (outer->detail[0]) length = (size_t)snprintf(inner, sizeof inner, ", %s", outer->detail);
    for (int level = 1; level < depth && length < sizeof inner; level++) {
        char its[64];
        count_text(level, its);
        length += (size_t)snprintf(inner + length, sizeof inner - length, ", %s%s", phase[level].what, its);
    }
    if (!terminal) {
        fprintf(stderr, "hapt: %s%s%s, %s\n", outer->what, count, inner, left);
        return;
    }
    char bar[BAR_CHARS + 1];
    const double filled = BAR_CHARS * fraction(0);
    for (int i = 0; i < BAR_CHARS; i++) bar[i] = i < filled ? '#' : '.';
    bar[BAR_CHARS] = '\0';
    fprintf(stderr, "\r%s [%s]%s%s, %s \033[K", outer->what, bar, count, inner, left);
    fflush(stderr);
    drawn = true;
}

/* Prints a line that stays; on a terminal above the bar. */
static void print_kept(int level, const char *line, double now_s)
{
    char count[64];
    count_text(level, count);
    if (drawn) fputs("\r\033[K", stderr);
    drawn = false;
    fprintf(stderr, "hapt: %s%s %s\n", phase[level].what, count, line);
    phase[level].kept_s = printed_s = now_s;
    if (terminal) print_line(now_s);
}

static bool is_kept_due(const struct phase *at, double now_s)
{
    if (now_s - at->start_s < fmin(QUIET_S, at->every_s)) return false;
    return at->kept_s == 0 || now_s - at->kept_s >= at->every_s || at->done == at->total;
}

/* Between lines that are kept, others show only a step that takes long. */
static bool is_due_between(const struct phase *outer, double now_s)
{
    return now_s - (printed_s < 0 ? outer->start_s : printed_s) >= fmax(KEPT_UNCHANGED_S, 2 * outer->every_s);
}

/* A line is due if there was progress and the last line is old enough. Without progress the interval grows. */
static bool is_due(double now_s)
{
    const struct phase *outer = &phase[0];
    const double every_s = terminal ? REDRAW_S : outer->every_s;
    if (now_s - outer->start_s < fmin(QUIET_S, terminal ? QUIET_S : outer->every_s)) return false;
    if (outer->keeps && depth == 1 && !terminal) return is_due_between(outer, now_s);
    if (printed_s < 0) return true;
    const long seen = atomic_load(&parts_done) + phase[depth - 1].done;
    if (terminal || printed_done != outer->done || printed_parts != seen) {
        if (now_s - printed_s < every_s) return false;
        unchanged_s = fmax(UNCHANGED_S, every_s);
        return true;
    }
    if (now_s - printed_s < fmax(unchanged_s, every_s)) return false;
    unchanged_s = fmin(2 * unchanged_s, MAX_UNCHANGED_S);
    return true;
}

static void print_if_due(void)
{
    const double now_s = hapt_time_s();
    if (!is_due(now_s)) return;
    print_line(now_s);
    printed_s = now_s;
    printed_done = phase[0].done;
    printed_parts = atomic_load(&parts_done) + phase[depth - 1].done;
}

static void *print_lines(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    while (depth > 0) {
        print_if_due();
        const struct timespec until = hapt_time_spec(hapt_time_s() + (terminal ? REDRAW_S : WAKE_S));
        pthread_cond_timedwait(&changed, &lock, &until);
    }
    if (drawn) fputs("\r\033[K", stderr);
    drawn = false;
    pthread_mutex_unlock(&lock);
    return NULL;
}

/* ---- phases ---- */

/* Without a thread the work continues without progress lines. */
static void start_printer(void)
{
    hapt_time_condition_init(&changed);
    terminal = isatty(STDERR_FILENO);
    printed_s = -1;
    unchanged_s = UNCHANGED_S;
    printing = hapt_thread_start(&printer, print_lines, NULL) == 0;
    if (!printing) pthread_cond_destroy(&changed);
}

static void stop_printer(void)
{
    if (!printing) return;
    pthread_mutex_lock(&lock);
    pthread_cond_signal(&changed);
    pthread_mutex_unlock(&lock);
    pthread_join(printer, NULL);
    pthread_cond_destroy(&changed);
    printing = false;
}

void hapt_progress_init(struct hapt_progress *progress, const struct hapt_env *env, const char *what, long total)
{
    *progress = (struct hapt_progress){.env = env, .what = what, .total = total, .every_s = EVERY_S, .slot = -1};
    const bool shown = env ? env->world_rank == 0 : depth > 0;
    if (!shown || depth == MAX_PHASES) return;
    pthread_mutex_lock(&lock);
    if (depth > 0) {
        phase[depth - 1].parts = atomic_load(&parts);
        phase[depth - 1].parts_done = atomic_load(&parts_done);
    }
    struct phase *made = &phase[depth];
    *made = (struct phase){.total = total, .start_s = hapt_time_s(), .every_s = EVERY_S};
    snprintf(made->what, sizeof made->what, "%s", what);
    atomic_store(&parts, 0);
    atomic_store(&parts_done, 0);
    progress->slot = depth++;
    atomic_store(&active, depth);
    pthread_mutex_unlock(&lock);
    if (progress->slot == 0) start_printer();
}

static struct phase *set(const struct hapt_progress *progress, long done, const char *detail)
{
    struct phase *at = &phase[progress->slot];
    if (at->done != done && progress->slot == depth - 1) {
        atomic_store(&parts, 0);
        atomic_store(&parts_done, 0);
    }
    at->done = done;
    at->first = progress->first;
    at->total = progress->total;
    at->every_s = progress->every_s;
    snprintf(at->detail, sizeof at->detail, "%s", detail ? detail : "");
    return at;
}

void hapt_progress_update(struct hapt_progress *progress, long done, const char *detail)
{
    if (progress->slot < 0 || progress->slot >= depth) return;
    pthread_mutex_lock(&lock);
    set(progress, done, detail);
    print_if_due(); /* every_s 0: one line per update */
    pthread_mutex_unlock(&lock);
}

void hapt_progress_keep(struct hapt_progress *progress, long done, const char *detail, const char *line)
{
    if (progress->slot < 0 || progress->slot >= depth) return;
    pthread_mutex_lock(&lock);
    struct phase *at = set(progress, done, detail);
    const double now_s = hapt_time_s();
    at->keeps = true;
    if (is_kept_due(at, now_s))
        print_kept(progress->slot, line, now_s);
    else
        print_if_due();
    pthread_mutex_unlock(&lock);
}

void hapt_progress_release(struct hapt_progress *progress)
{
    const int slot = progress->slot;
    if (slot < 0 || slot >= depth) return;
    pthread_mutex_lock(&lock);
    depth = slot;
    atomic_store(&active, depth);
    if (depth > 0) {
        atomic_store(&parts, phase[depth - 1].parts);
        atomic_store(&parts_done, phase[depth - 1].parts_done);
    }
    pthread_mutex_unlock(&lock);
    progress->slot = -1;
    if (depth == 0) stop_printer();
}

void hapt_progress_expect(long more)
{
    if (atomic_load_explicit(&active, memory_order_relaxed) > 0)
        atomic_fetch_add_explicit(&parts, more, memory_order_relaxed);
}

void hapt_progress_advance(long more)
{
    if (atomic_load_explicit(&active, memory_order_relaxed) > 0)
        atomic_fetch_add_explicit(&parts_done, more, memory_order_relaxed);
}
