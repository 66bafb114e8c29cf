/* Reading datasets block by block, and checks that all kinds of data share. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "data.h"
#include "hapt/progress.h"

#define MAX_ELEMENTS ((int64_t)1 << 36)
#define READ_ELEMENTS ((int64_t)1 << 20) /* per read */

enum hapt_status data_check_steps(const char *path, const char *dataset, const int64_t *shape,
                                  const struct hapt_model *model, int rows, int64_t steps)
{
    if (rows == 0 && shape[1] >= 1) return HAPT_OK;
    if (rows == 0) return hapt_fail(HAPT_ERR_INPUT, "give more data", "%s: batches of %s have no row", path, dataset);
    if (shape[1] != rows)
        return hapt_fail(HAPT_ERR_INPUT, "a step has --microbatches times the model's --microbatch rows",
                         "%s: a batch of %s has %lld rows, a step needs %d (%d microbatches of %d)", path, dataset,
                         (long long)shape[1], rows, rows / model->microbatch, model->microbatch);
    if (shape[0] < steps)
        return hapt_fail(HAPT_ERR_INPUT, "give fewer --steps or more data", "%s holds %lld batches for %lld steps",
                         path, (long long)shape[0], (long long)steps);
    return HAPT_OK;
}

enum hapt_status data_check_product(const char *path, int64_t rows, int64_t elements)
{
    return elements > 0 && rows > MAX_ELEMENTS / elements
               ? hapt_fail(HAPT_ERR_INPUT, "split the data file", "%s holds more than %lld elements", path,
                           (long long)MAX_ELEMENTS)
               : HAPT_OK;
}

enum hapt_status data_check_counts(struct hapt_h5 *file, const struct data_layout *layout, const int64_t *count)
{
    for (int64_t step = 0; step < layout->units && !layout->held_out; step++)
        if (count[step] == 0)
            return hapt_fail(HAPT_ERR_INPUT, "give each step at least one target that is not -100 (real numbers: NaN)",
                             "%s: batch %lld has no target", hapt_h5_path(file), (long long)step);
    return HAPT_OK;
}

/* Converts integers that were stored as reals, in place. */
static enum hapt_status take_whole(void *buffer, int64_t count, int64_t first, const char *dataset, const char *path)
{
    const double *real = buffer;
    for (int64_t i = 0; i < count; i++) {
        const double value = real[i];
        if (!(value >= INT32_MIN && value <= INT32_MAX) || value != floor(value))
            return hapt_fail(HAPT_ERR_INPUT, "tokens, targets and labels are integers: store them as such",
                             "%s: %g at %lld of %s is not a 32-bit integer", path, value, (long long)(first + i),
                             dataset);
        const int32_t whole = (int32_t)value;
        memcpy((char *)buffer + (size_t)i * sizeof whole, &whole, sizeof whole); /* only over bytes already read */
    }
    return HAPT_OK;
}

enum hapt_status data_read_blocks(struct hapt_h5 *file, const char *dataset, enum hapt_h5_type type,
                                  const struct data_reading *reading, int64_t width, data_take *take)
{
    const struct data_layout *layout = reading->layout;
    int64_t block = READ_ELEMENTS / width;
    if (block < 1) block = 1;
    const bool fractions = type == HAPT_H5_I32 && !hapt_h5_is_integer(file, dataset);
    void *buffer = malloc((size_t)(block * width) * (fractions ? sizeof(double) : sizeof(float)));
    if (!buffer) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read data");
    enum hapt_status status = HAPT_OK;
    hapt_progress_expect((long)((layout->units + block - 1) / block));
    for (int64_t first = 0; first < layout->units && status == HAPT_OK; first += block) {
        const int64_t count = layout->units - first < block ? layout->units - first : block;
        status = hapt_h5_read_rows(file, dataset, fractions ? HAPT_H5_F64 : type, first, count, buffer);
        if (status == HAPT_OK && fractions)
            status = take_whole(buffer, count * width, first * width, dataset, hapt_h5_path(file));
        if (status == HAPT_OK) status = take(reading, buffer, first * width, count * width, hapt_h5_path(file));
        hapt_progress_advance(1);
    }
    free(buffer);
    return status;
}
