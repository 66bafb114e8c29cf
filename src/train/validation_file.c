/* The history of validation in checkpoints and run files: one column per field, a row per validation. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "hapt/train.h"

#define MOST_ROWS ((int64_t)1 << 28)

static enum hapt_status write_column(struct hapt_h5 *file, const char *folder, const char *column,
                                     enum hapt_h5_type type, int64_t count, const void *value, const char *units)
{
    char name[96];
    snprintf(name, sizeof name, "%s/%s", folder, column);
    return hapt_h5_write(file, name, type, 1, &count, value, units);
}

enum hapt_status hapt_validation_write(struct hapt_h5 *file, const char *folder, const struct hapt_history *history)
{
    const int64_t count = history->validation_count;
    if (count == 0) return HAPT_OK;
    int64_t *step = malloc((size_t)count * sizeof *step);
    double *loss = malloc(2 * (size_t)count * sizeof *loss);
    enum hapt_status status =
        step && loss ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the history of validation");
    bool counted = false;
    for (int64_t i = 0; i < count && status == HAPT_OK; i++) {
        step[i] = history->validation[i].step;
        loss[i] = history->validation[i].loss;
        loss[count + i] = history->validation[i].top1;
        counted = counted || isfinite(loss[count + i]);
    }
    if (status == HAPT_OK) status = write_column(file, folder, "validation_step", HAPT_H5_I64, count, step, "");
    if (status == HAPT_OK)
        status = write_column(file, folder, "validation_loss", HAPT_H5_F64, count, loss,
                              history->loss_units ? history->loss_units : "nat");
    if (status == HAPT_OK && counted)
        status = write_column(file, folder, "validation_top1", HAPT_H5_F64, count, loss + count, "");
    free(step);
    free(loss);
    return status;
}

static enum hapt_status read_column(struct hapt_h5 *file, const char *folder, const char *column,
                                    enum hapt_h5_type type, int64_t *count, struct hapt_arena *arena, void **value)
{
    char name[96];
    snprintf(name, sizeof name, "%s/%s", folder, column);
    return hapt_h5_read(file, name, type, 1, count, MOST_ROWS, arena, value);
}

enum hapt_status hapt_validation_read(struct hapt_h5 *file, const char *folder, int64_t last, struct hapt_arena *arena,
                                      struct hapt_history *history)
{
    char name[96];
    int64_t count[1] = {-1};
    void *steps, *losses, *shares = NULL;
    snprintf(name, sizeof name, "%s/validation_step", folder);
    if (!hapt_h5_exists(file, name)) return HAPT_OK;
    HAPT_TRY(read_column(file, folder, "validation_step", HAPT_H5_I64, count, arena, &steps));
    HAPT_TRY(read_column(file, folder, "validation_loss", HAPT_H5_F64, count, arena, &losses));
    snprintf(name, sizeof name, "%s/validation_top1", folder);
    if (hapt_h5_exists(file, name))
        HAPT_TRY(read_column(file, folder, "validation_top1", HAPT_H5_F64, count, arena, &shares));
    HAPT_NEW(history->validation, arena, count[0] > 0 ? count[0] : 1);
    for (int64_t i = 0; i < count[0]; i++) {
        const int64_t step = ((const int64_t *)steps)[i], before = i > 0 ? ((const int64_t *)steps)[i - 1] : -1;
        if (step <= before || step > last)
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: step %lld of a validation is out of range",
                             hapt_h5_path(file), (long long)step);
        history->validation[i] = (struct hapt_validation){step, ((const double *)losses)[i],
                                                          shares ? ((const double *)shares)[i] : (double)NAN};
    }
    history->validation_count = history->validation_capacity = count[0];
    return HAPT_OK;
}
