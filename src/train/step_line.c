#include "step_line.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include "hapt/config.h"

enum { RECENT = 20 }; /* steps whose mean time gives the rate and the expected end: few, so that changes show */

struct line {
    char text[320];
    size_t length;
};

static void add(struct line *line, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(struct line *line, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    const int more = vsnprintf(line->text + line->length, sizeof line->text - line->length, format, arguments);
    va_end(arguments);
    line->length += more > 0 ? (size_t)more : 0;
    if (line->length >= sizeof line->text) line->length = sizeof line->text - 1;
}

static void add_time(struct line *line, double epoch_s, const char *format)
{
    const time_t whole_s = (time_t)epoch_s;
    struct tm local = {0};
    char text[32] = "";
    localtime_r(&whole_s, &local);
    strftime(text, sizeof text, format, &local);
    add(line, "%s", text);
}

static double recent_step_s(const struct hapt_train_result *result)
{
    const int64_t end = result->history.count;
    const int64_t from = end - result->first_step > RECENT ? end - RECENT : result->first_step;
    double time_s = 0;
    for (int64_t s = from; s < end; s++) time_s += result->history.time_s[s];
    return time_s / (double)(end - from);
}

void step_line_show(const struct hapt_train_result *result, struct hapt_progress *progress)
{
    const struct hapt_history *history = &result->history;
    const int64_t step = history->count - 1;
    const bool computes = result->time_scale == 0;
    const double step_s = recent_step_s(result), mfu = hapt_train_mfu(result, step_s), now_s = hapt_time_epoch_s();
    const double left_s = (double)(result->end_step - history->count) * step_s * (computes ? 1 : result->time_scale);
    struct line line = {.text = ""};
    char detail[96], memory[32], loss[32];
    snprintf(loss, sizeof loss, computes ? "loss %.4f" : "no loss (modelled)", history->loss[step]);
    snprintf(detail, sizeof detail, "%s, %.0f %ss/s", loss, (double)result->items_per_step / step_s, result->item);
    add(&line, "at ");
    add_time(&line, now_s, "%H:%M:%S");
    add(&line, ", %s", loss);
    if (computes) add(&line, ", gradient norm %.4g", history->gradient_norm[step]);
    add(&line, ", learning rate %.3g, %.0f %ss/s", history->learning_rate[step],
        (double)result->items_per_step / step_s, result->item);
    if (isfinite(mfu)) add(&line, ", MFU %.1f %%", 100 * mfu);
    add(&line, ", memory %s, ends ", hapt_units_bytes(hapt_train_memory(result), memory));
    add_time(&line, now_s + left_s, "%Y-%m-%d %H:%M");
    hapt_progress_keep(progress, (long)history->count, detail, line.text);
}
