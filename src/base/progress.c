#include "hapt/progress.h"

#include <stdio.h>
#include <unistd.h>

void hapt_progress_init(struct hapt_progress *progress, const struct hapt_env *env, const char *what, long total)
{
    const double now = hapt_time_s();
    *progress = (struct hapt_progress){
        .env = env, .what = what, .total = total, .start_s = now, .printed_s = now, .every_s = 5, .terminal = isatty(STDERR_FILENO)};
}

static void print_line(struct hapt_progress *progress, long done, const char *detail)
{
    const double elapsed = hapt_time_s() - progress->start_s;
    const double left = done > progress->first ? elapsed / (double)(done - progress->first) * (double)(progress->total - done) : 0;
    if (!progress->terminal) {
        fprintf(stderr, "hapt: %s %ld/%ld%s%s, %.0f s left\n", progress->what, done, progress->total,
                detail && detail[0] ? ", " : "", detail ? detail : "", left);
        return;
    }
    enum { WIDTH = 24 };
    char bar[WIDTH + 1];
    for (int i = 0; i < WIDTH; i++) bar[i] = progress->total > 0 && i < WIDTH * done / progress->total ? '#' : '.';
    bar[WIDTH] = '\0';
    fprintf(stderr, "\r%s [%s] %ld/%ld %s %.0f s left \033[K", progress->what, bar, done, progress->total,
            detail ? detail : "", left);
    fflush(stderr);
}

void hapt_progress_update(struct hapt_progress *progress, long done, const char *detail)
{
    if (progress->env->world_rank != 0) return;
    const double now = hapt_time_s();
    if (now - progress->printed_s < (progress->terminal ? 0.1 : progress->every_s)) return;
    progress->printed_s = now;
    print_line(progress, done, detail);
}

void hapt_progress_release(struct hapt_progress *progress)
{
    if (progress->env->world_rank == 0 && progress->terminal) fputs("\r\033[K", stderr);
}
