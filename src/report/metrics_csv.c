#include "metrics_csv.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "hapt/folder.h"

#define NAME "metrics.csv"
enum { MOST_LINE = 512, MOST_PATH = 4096 };

static void write_header(const struct hapt_train_result *result, char line[MOST_LINE])
{
    snprintf(line, MOST_LINE,
             "step,time,loss,gradient_norm,learning_rate,step_time_s,%ss_per_second,mfu,memory_bytes\n", result->item);
}

/* 17 digits: reading gives the same bits. */
static const char *number(double value, char text[32])
{
    if (isnan(value))
        text[0] = '\0';
    else
        snprintf(text, 32, "%.17g", value);
    return text;
}

static void write_line(const struct hapt_train_result *result, int64_t index, double epoch_s, char line[MOST_LINE])
{
    const struct hapt_history *history = &result->history;
    const double time_s = history->time_s[index];
    char time[HAPT_TIME_ISO_CHARS] = "", text[7][32];
    if (epoch_s > 0) hapt_time_iso(epoch_s, time);
    snprintf(line, MOST_LINE, "%lld,%s,%s,%s,%s,%s,%s,%s,%s\n", (long long)index + 1, time,
             number(history->loss[index], text[0]), number(history->gradient_norm[index], text[1]),
             number(history->learning_rate[index], text[2]), number(time_s, text[3]),
             number((double)result->items_per_step / time_s, text[4]), number(hapt_train_mfu(result, time_s), text[5]),
             number(epoch_s > 0 ? hapt_train_memory(result) : NAN, text[6]));
}

/* *kept: bytes of the header and of the lines of steps 1, 2, ... up to `last`; 0: the header is not whole. *lines: how
 * many. False: the file cannot be read, or has another header. */
static bool find_end(int descriptor, const char *header, int64_t last, off_t *kept, int64_t *lines)
{
    char *line = NULL;
    size_t size = 0;
    ssize_t length = -1;
    const int copy = dup(descriptor);
    FILE *file = copy < 0 ? NULL : fdopen(copy, "r");
    if (!file && copy >= 0) close(copy);
    if (file) length = getline(&line, &size, file);
    const bool ours = length > 0 && strncmp(line, header, (size_t)length) == 0, whole = ours && !header[length];
    *kept = whole ? length : 0;
    *lines = 0;
    while (whole && *lines < last && (length = getline(&line, &size, file)) > 0) {
        char *end;
        if (line[length - 1] != '\n' || strtoll(line, &end, 10) != *lines + 1 || *end != ',') break;
        *kept += length;
        ++*lines;
    }
    free(line);
    if (file) fclose(file);
    return ours;
}

static bool open_ours(struct metrics_csv *csv, const char *folder, const char *header, int64_t last)
{
    char path[MOST_PATH], now[256];
    off_t kept = 0;
    if (snprintf(path, sizeof path, "%s/" NAME, folder) >= MOST_PATH) {
        errno = ENAMETOOLONG;
        return false;
    }
    if (!append_open(&csv->file, path)) return false;
    if (csv->file.end > 0 && !find_end(csv->file.descriptor, header, last, &kept, &csv->written)) {
        append_close(&csv->file);
        if (!hapt_folder_rename_with_suffix(folder, NAME, "other", now, sizeof now) || !append_open(&csv->file, path))
            return false;
    }
    return append_cut(&csv->file, kept) && (kept > 0 || append_write(&csv->file, header, strlen(header)));
}

bool metrics_csv_open(struct metrics_csv *csv, const char *folder, const struct hapt_train_result *result)
{
    char header[MOST_LINE];
    *csv = (struct metrics_csv){.file.descriptor = -1};
    write_header(result, header);
    if (open_ours(csv, folder, header, result->first_step) && metrics_csv_append(csv, result, 0)) return true;
    const int error = errno;
    append_close(&csv->file);
    errno = error;
    return false;
}

bool metrics_csv_append(struct metrics_csv *csv, const struct hapt_train_result *result, double epoch_s)
{
    char line[MOST_LINE];
    for (const int64_t count = result->history.count; csv->written < count; csv->written++) {
        write_line(result, csv->written, csv->written + 1 == count ? epoch_s : 0, line);
        if (!append_write(&csv->file, line, strlen(line))) return false;
    }
    return true;
}
