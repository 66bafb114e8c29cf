/* metrics.csv: a header, and one line per step, from the first step on. */
#ifndef HAPT_REPORT_METRICS_CSV_H
#define HAPT_REPORT_METRICS_CSV_H

#include "append.h"
#include "hapt/train.h"

/* Columns: step (number of steps done), time (of day, ISO 8601), loss, gradient_norm, learning_rate, step_time_s,
 * tokens_per_second (or images), mfu, memory_bytes (of the rank with most, after the first step). Unknown values are
 * empty. */
struct metrics_csv {
    struct append file;
    int64_t written; /* steps */
};

/* Opens the file in `folder`. Lines of steps after result->first_step, and a last line that is not whole, are dropped;
 * a file with another header gets another name. Missing lines of steps that the history has are written without their
 * time. False: errno says why. */
bool metrics_csv_open(struct metrics_csv *csv, const char *folder, const struct hapt_train_result *result);
/* Appends the lines that are missing; the last one gets the time. False: errno says why. */
bool metrics_csv_append(struct metrics_csv *csv, const struct hapt_train_result *result, double epoch_s);

#endif
