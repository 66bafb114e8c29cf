/* A run's results: summary, and the curves and the times of the stages in the run file. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/train.h"

enum { SKIPPED_STEPS = 3 }; /* not in the steady step time: cold caches, first page faults */

double hapt_train_mfu(const struct hapt_train_result *result, double time_s)
{
    if (!(result->peak_flops > 0) || !(time_s > 0)) return NAN;
    return (double)result->items_per_step * result->flops_per_item / (time_s * result->peak_flops);
}

double hapt_train_memory(const struct hapt_train_result *result)
{
    double most = 0;
    for (int c = 0; c < result->stage_count; c++) most = fmax(most, result->measured_bytes[c]);
    return most;
}

void hapt_train_summarise(struct hapt_train_result *result)
{
    const struct hapt_history *history = &result->history;
    result->steady_step_s = hapt_train_median(history->time_s, result->first_step, history->count, SKIPPED_STEPS);
    if (result->steady_step_s > 0) result->items_per_s = (double)result->items_per_step / result->steady_step_s;
}

double hapt_train_median(const double *time_s, int64_t from, int64_t to, int64_t skip)
{
    if (to - from > 2 * skip) from += skip;
    const int64_t count = to - from;
    if (count <= 0) return 0;
    double *sorted = malloc((size_t)count * sizeof *sorted);
    if (!sorted) return 0;
    memcpy(sorted, time_s + from, (size_t)count * sizeof *sorted);
    const double median = hapt_median(sorted, count);
    free(sorted);
    return median;
}

/* Figures that follow from the step times. */
static enum hapt_status write_derived_into(struct hapt_h5 *file, const struct hapt_train_result *result, double *value,
                                           int64_t *step)
{
    const struct hapt_history *history = &result->history;
    const int64_t count = history->count;
    char name[64], units[32];
    double sum_s = 0;
    for (int64_t i = 0; i < count; i++) step[i] = i + 1;
    HAPT_TRY(hapt_h5_write(file, "/train/step", HAPT_H5_I64, 1, &count, step, ""));
    for (int64_t i = 0; i < count; i++) value[i] = sum_s += history->time_s[i];
    HAPT_TRY(hapt_h5_write(file, "/train/time", HAPT_H5_F64, 1, &count, value, "s"));
    if (result->peak_flops > 0) {
        for (int64_t i = 0; i < count; i++) value[i] = hapt_train_mfu(result, history->time_s[i]);
        HAPT_TRY(hapt_h5_write(file, "/train/mfu", HAPT_H5_F64, 1, &count, value, ""));
    }
    for (int64_t i = 0; i < count; i++) value[i] = (double)result->items_per_step / history->time_s[i];
    snprintf(name, sizeof name, "/train/%ss_per_second", result->item);
    snprintf(units, sizeof units, "%s/s", result->item);
    return hapt_h5_write(file, name, HAPT_H5_F64, 1, &count, value, units);
}

static enum hapt_status write_derived(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    const size_t count = (size_t)result->history.count;
    double *value = malloc(count * sizeof *value);
    int64_t *step = malloc(count * sizeof *step);
    const enum hapt_status status = value && step ? write_derived_into(file, result, value, step)
                                                  : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the curves");
    free(value);
    free(step);
    return status;
}

static enum hapt_status write_curves(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    const struct hapt_history *history = &result->history;
    const int64_t shape[1] = {history->count};
    if (history->count == 0) return HAPT_OK;
    const char *units = history->loss_units ? history->loss_units : "nat";
    if (result->time_scale == 0) {
        HAPT_TRY(hapt_h5_write(file, "/train/loss", HAPT_H5_F64, 1, shape, history->loss, units));
        HAPT_TRY(hapt_h5_write(file, "/train/gradient_norm", HAPT_H5_F64, 1, shape, history->gradient_norm, units));
    }
    HAPT_TRY(hapt_validation_write(file, "/train", history));
    HAPT_TRY(hapt_h5_write(file, "/train/learning_rate", HAPT_H5_F64, 1, shape, history->learning_rate, ""));
    HAPT_TRY(hapt_h5_write(file, "/train/step_time", HAPT_H5_F64, 1, shape, history->time_s, "s"));
    return write_derived(file, result);
}

static enum hapt_status write_stages(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    const int64_t shape[2] = {result->history.count - result->first_step, result->stage_count};
    HAPT_TRY(hapt_h5_write(file, "/train/memory_planned", HAPT_H5_F64, 1, &shape[1], result->planned_bytes, "byte"));
    HAPT_TRY(hapt_h5_write(file, "/train/memory_measured", HAPT_H5_F64, 1, &shape[1], result->measured_bytes, "byte"));
    double away = 0;
    for (int c = 0; c < result->stage_count; c++) away += result->host_bytes[c];
    if (away > 0)
        HAPT_TRY(hapt_h5_write(file, "/train/host_memory", HAPT_H5_F64, 1, &shape[1], result->host_bytes, "byte"));
    if (shape[0] == 0) return HAPT_OK;
    HAPT_TRY(hapt_h5_write(file, "/train/stage_busy", HAPT_H5_F64, 2, shape, result->busy_s, "s"));
    HAPT_TRY(hapt_h5_write(file, "/train/stage_reduce", HAPT_H5_F64, 2, shape, result->reduce_s, "s"));
    HAPT_TRY(hapt_h5_write(file, "/train/stage_idle", HAPT_H5_F64, 2, shape, result->idle_s, "s"));
    HAPT_TRY(hapt_h5_write(file, "/train/stage_microbatch", HAPT_H5_F64, 2, shape, result->microbatch_s, "s"));
    return hapt_h5_write(file, "/train/stage_communication", HAPT_H5_F64, 2, shape, result->comm_s, "s");
}

/* Each warning is one row of flat tables. */
static enum hapt_status write_warnings(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    const int64_t count = result->warning_count;
    int64_t *number = malloc((size_t)count * 4 * sizeof *number);
    double *ratio = malloc((size_t)count * sizeof *ratio);
    const char **text = malloc((size_t)count * sizeof *text);
    static const char *const column[] = {"/train/warnings/step", "/train/warnings/rank", "/train/warnings/stage",
                                         "/train/warnings/peer_stage"};
    enum hapt_status status = HAPT_OK;
    if (!number || !ratio || !text) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the warnings");
    for (int64_t w = 0; w < count && status == HAPT_OK; w++) {
        const struct hapt_train_warning *warning = &result->warning[w];
        const int64_t row[] = {warning->step, warning->rank, warning->stage, warning->peer_stage};
        for (int c = 0; c < 4; c++) number[c * count + w] = row[c];
        ratio[w] = warning->ratio;
        text[w] = warning->text;
    }
    for (int c = 0; c < 4 && status == HAPT_OK; c++)
        status = hapt_h5_write(file, column[c], HAPT_H5_I64, 1, &count, number + c * count, "");
    if (status == HAPT_OK) status = hapt_h5_write(file, "/train/warnings/ratio", HAPT_H5_F64, 1, &count, ratio, "");
    if (status == HAPT_OK) status = hapt_h5_write_strings(file, "/train/warnings/text", count, text);
    free(number);
    free(ratio);
    free(text);
    return status;
}

enum hapt_status hapt_train_write(struct hapt_h5 *file, const struct hapt_train_result *result)
{
    HAPT_TRY(write_curves(file, result));
    HAPT_TRY(write_stages(file, result));
    if (result->warning_count > 0) HAPT_TRY(write_warnings(file, result));
    if (result->time_scale > 0) {
        HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "time_scale", result->time_scale, "s/s"));
        HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "latest", result->late_s, "s"));
    }
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/train", "first_step", result->first_step));
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/train", "item", result->item));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/train", "items_per_step", result->items_per_step));
    HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "flops_per_item", result->flops_per_item, "FLOP"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "peak_flops", result->peak_flops, "FLOP/s"));
    HAPT_TRY(hapt_h5_write_attribute_text(file, "/train", "checkpoint", result->checkpoint ? result->checkpoint : ""));
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/train", "checkpoints", result->checkpoints));
    HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "checkpoint_time", result->checkpoint_s, "s"));
    if (result->history.validation_count > 0)
        HAPT_TRY(hapt_h5_write_attribute_real(file, "/train", "validation_time", result->validation_s, "s"));
    return hapt_h5_write_attribute_real(file, "/train", "steady_step_time", result->steady_step_s, "s");
}
