/* Efficiency files: one group per device, flat tables. Format: `hapt help profile`. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/calibration.h"
#include "hapt/h5.h"

#define FORMAT "hapt-efficiency"
#define VERSION 1
enum { MAX_DEVICES = 256, MAX_SAMPLES = 1 << 20, MAX_KNOTS = HAPT_EFFICIENCY_CLASS_COUNT * HAPT_EFFICIENCY_KNOTS };

static const char *in_folder(char path[128], int device, const char *name)
{
    snprintf(path, 128, "/device_%d%s%s", device, name ? "/" : "", name ? name : "");
    return path;
}

static enum hapt_status write_attributes(struct hapt_h5 *file, const char *folder,
                                         const struct hapt_calibration_device *device)
{
    HAPT_TRY(hapt_h5_write_attribute_text(file, folder, "name", device->name));
    HAPT_TRY(hapt_h5_write_attribute_text(file, folder, "backend", device->backend));
    HAPT_TRY(hapt_h5_write_attribute_text(file, folder, "dtype", hapt_dtype_name(device->dtype)));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "peak_flops", device->peak_flops, "FLOP/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "vector_flops", device->vector_flops, "FLOP/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "memory_bandwidth", device->bandwidth, "byte/s"));
    HAPT_TRY(hapt_h5_write_attribute_real(file, folder, "launch", device->table.launch_s, "s"));
    return hapt_h5_write_attribute_real(file, folder, "median_residual", device->median_residual, "");
}

/* The curves, one row per knot. */
static enum hapt_status write_curves(struct hapt_h5 *file, int index, const struct hapt_calibration_device *device)
{
    const char *class_name[MAX_KNOTS];
    double size[MAX_KNOTS], share[MAX_KNOTS], residual[MAX_KNOTS];
    int32_t samples[MAX_KNOTS];
    int64_t rows = 0;
    char path[128];
    for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++) {
        const struct hapt_efficiency_curve *curve = &device->table.curve[class];
        for (int k = 0; k < curve->count; k++, rows++) {
            class_name[rows] = hapt_efficiency_class_name(class);
            size[rows] = exp2(curve->size[k]);
            share[rows] = curve->share[k];
            samples[rows] = device->curve[class].samples[k];
            residual[rows] = device->curve[class].residual[k];
        }
    }
    HAPT_TRY(hapt_h5_write_strings(file, in_folder(path, index, "class"), rows, class_name));
    HAPT_TRY(hapt_h5_write(file, in_folder(path, index, "size"), HAPT_H5_F64, 1, &rows, size, "FLOP; memory: byte"));
    HAPT_TRY(hapt_h5_write(file, in_folder(path, index, "efficiency"), HAPT_H5_F64, 1, &rows, share, ""));
    HAPT_TRY(hapt_h5_write(file, in_folder(path, index, "samples"), HAPT_H5_I32, 1, &rows, samples, ""));
    return hapt_h5_write(file, in_folder(path, index, "worst_residual"), HAPT_H5_F64, 1, &rows, residual, "");
}

static enum hapt_status write_samples(struct hapt_h5 *file, int index, const struct hapt_calibration_device *device)
{
    const int64_t count = device->sample_count;
    char path[128];
    enum hapt_status status = HAPT_ERR_MEMORY;
    const char **name = calloc((size_t)count + 1, sizeof *name);
    double *column = calloc(4 * (size_t)count + 1, sizeof *column);
    if (!name || !column) {
        hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to write %lld samples", (long long)count);
    } else {
        const struct {
            const char *name, *units;
        } table[] = {{"operator_flops", "FLOP"},
                     {"operator_bytes", "byte"},
                     {"operator_time", "s"},
                     {"operator_predicted", "s"}};
        for (int64_t s = 0; s < count; s++) {
            const struct hapt_calibration_sample *sample = &device->sample[s];
            name[s] = sample->op;
            column[s] = sample->flops, column[count + s] = sample->bytes, column[2 * count + s] = sample->time_s;
            column[3 * count + s] = hapt_calibration_predicted_s(device, sample);
        }
        status = hapt_h5_write_strings(file, in_folder(path, index, "operator"), count, name);
        for (int k = 0; k < 4 && status == HAPT_OK; k++)
            status = hapt_h5_write(file, in_folder(path, index, table[k].name), HAPT_H5_F64, 1, &count,
                                   column + k * count, table[k].units);
    }
    free(name);
    free(column);
    return status;
}

static enum hapt_status write_sums(struct hapt_h5 *file, int index, const struct hapt_calibration_device *device)
{
    const int64_t shape[2] = {device->sum_count, 4};
    char path[128];
    double *row = calloc((size_t)shape[0], 4 * sizeof *row);
    if (!row) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to write %d sums", device->sum_count);
    for (int s = 0; s < device->sum_count; s++) {
        const struct hapt_calibration_sum *sum = &device->sum[s];
        row[4 * s] = sum->ranks, row[4 * s + 1] = sum->bytes, row[4 * s + 2] = sum->time_s,
                row[4 * s + 3] = sum->predicted_s;
    }
    const enum hapt_status status = hapt_h5_write(file, in_folder(path, index, "all_reduce"), HAPT_H5_F64, 2, shape,
                                                  row, "columns: devices, byte, s measured, s predicted");
    free(row);
    return status;
}

static enum hapt_status write_device(struct hapt_h5 *file, int index, const struct hapt_calibration_device *device)
{
    char path[128];
    HAPT_TRY(write_curves(file, index, device));
    if (device->sample_count > 0) HAPT_TRY(write_samples(file, index, device));
    if (device->sum_count > 0) HAPT_TRY(write_sums(file, index, device));
    return write_attributes(file, in_folder(path, index, NULL), device);
}

enum hapt_status hapt_efficiency_save(const char *path, const struct hapt_efficiency *efficiency)
{
    struct hapt_h5 *file;
    HAPT_TRY(hapt_h5_create(path, FORMAT, VERSION, &file));
    enum hapt_status status = HAPT_OK;
    for (int d = 0; d < efficiency->count && status == HAPT_OK; d++)
        status = write_device(file, d, &efficiency->device[d]);
    if (status == HAPT_OK) status = hapt_h5_write_attribute_int(file, "/", "devices", efficiency->count);
    return hapt_h5_finish(file, status);
}

static enum hapt_status bad(struct hapt_h5 *file, const char *folder, const char *what)
{
    return hapt_fail(HAPT_ERR_INPUT, "write a new one with `hapt profile --calibrate FILE`", "%s: %s: %s",
                     hapt_h5_path(file), folder, what);
}

static enum hapt_status read_name(struct hapt_h5 *file, const char *folder, const char *attribute, size_t size,
                                  struct hapt_arena *arena, char *name)
{
    const char *text;
    HAPT_TRY(hapt_h5_read_attribute_text(file, folder, attribute, arena, &text));
    if (strlen(text) == 0 || strlen(text) >= size) return bad(file, folder, "a name is empty or too long");
    strcpy(name, text);
    return HAPT_OK;
}

static enum hapt_status read_rate(struct hapt_h5 *file, const char *folder, const char *attribute, double *rate)
{
    HAPT_TRY(hapt_h5_read_attribute_real(file, folder, attribute, rate));
    return *rate >= 0 && isfinite(*rate) ? HAPT_OK : bad(file, folder, "a rate is negative or not finite");
}

static enum hapt_status read_attributes(struct hapt_h5 *file, const char *folder, struct hapt_arena *arena,
                                        struct hapt_calibration_device *device)
{
    char dtype[16];
    HAPT_TRY(read_name(file, folder, "name", sizeof device->name, arena, device->name));
    HAPT_TRY(read_name(file, folder, "backend", sizeof device->backend, arena, device->backend));
    HAPT_TRY(read_name(file, folder, "dtype", sizeof dtype, arena, dtype));
    if (!hapt_dtype_parse(dtype, &device->dtype)) return bad(file, folder, "its dtype is unknown");
    HAPT_TRY(read_rate(file, folder, "peak_flops", &device->peak_flops));
    HAPT_TRY(read_rate(file, folder, "vector_flops", &device->vector_flops));
    HAPT_TRY(read_rate(file, folder, "memory_bandwidth", &device->bandwidth));
    return read_rate(file, folder, "launch", &device->table.launch_s);
}

static int class_named(const char *name)
{
    for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++)
        if (strcmp(name, hapt_efficiency_class_name(class)) == 0) return class;
    return -1;
}

static enum hapt_status read_curves(struct hapt_h5 *file, int index, struct hapt_arena *arena,
                                    struct hapt_calibration_device *device)
{
    char path[128], folder[128];
    const char **name;
    int64_t rows;
    void *size, *share, *samples, *residual;
    in_folder(folder, index, NULL);
    HAPT_TRY(hapt_h5_read_strings(file, in_folder(path, index, "class"), MAX_KNOTS, arena, &rows, &name));
    HAPT_TRY(hapt_h5_read(file, in_folder(path, index, "size"), HAPT_H5_F64, 1, &rows, MAX_KNOTS, arena, &size));
    HAPT_TRY(hapt_h5_read(file, in_folder(path, index, "efficiency"), HAPT_H5_F64, 1, &rows, MAX_KNOTS, arena, &share));
    HAPT_TRY(hapt_h5_read(file, in_folder(path, index, "samples"), HAPT_H5_I32, 1, &rows, MAX_KNOTS, arena, &samples));
    HAPT_TRY(hapt_h5_read(file, in_folder(path, index, "worst_residual"), HAPT_H5_F64, 1, &rows, MAX_KNOTS, arena,
                          &residual));
    for (int64_t r = 0; r < rows; r++) {
        const int class = class_named(name[r]);
        if (class < 0) return bad(file, folder, "a class is unknown");
        struct hapt_efficiency_curve *curve = &device->table.curve[class];
        if (curve->count == HAPT_EFFICIENCY_KNOTS) return bad(file, folder, "a class has too many knots");
        const int k = curve->count++;
        curve->size[k] = log2(((double *)size)[r]);
        curve->share[k] = ((double *)share)[r];
        device->curve[class].samples[k] = ((int32_t *)samples)[r];
        device->curve[class].residual[k] = ((double *)residual)[r];
    }
    const enum hapt_status status = hapt_efficiency_check(&device->table);
    if (status != HAPT_ERR_INPUT) return status;
    char what[256];
    snprintf(what, sizeof what, "%s", hapt_fail_message());
    hapt_fail_reset();
    return bad(file, folder, what);
}

static enum hapt_status read_sums(struct hapt_h5 *file, int index, struct hapt_arena *arena,
                                  struct hapt_calibration_device *device)
{
    char path[128], folder[128];
    int64_t shape[2] = {-1, 4};
    void *data;
    in_folder(folder, index, NULL);
    if (!hapt_h5_exists(file, in_folder(path, index, "all_reduce"))) return HAPT_OK;
    HAPT_TRY(hapt_h5_read(file, path, HAPT_H5_F64, 2, shape, 4 * MAX_SAMPLES, arena, &data));
    HAPT_NEW(device->sum, arena, shape[0]);
    device->sum_count = (int)shape[0];
    for (int s = 0; s < device->sum_count; s++) {
        const double *row = (double *)data + 4 * s;
        for (int k = 0; k < 4; k++)
            if (!(row[k] > 0 && row[k] < 1e30)) return bad(file, folder, "a figure of an all-reduce is not positive");
        device->sum[s] = (struct hapt_calibration_sum){row[0] < 1e6 ? (int)row[0] : 0, row[1], row[2], row[3]};
    }
    return HAPT_OK;
}

static enum hapt_status read_all(struct hapt_h5 *file, struct hapt_arena *arena, struct hapt_efficiency *read)
{
    int64_t count;
    char folder[128];
    HAPT_TRY(hapt_h5_read_attribute_int(file, "/", "devices", &count));
    if (count < 1 || count > MAX_DEVICES) return bad(file, "/", "the number of devices is out of range");
    read->count = (int)count;
    HAPT_NEW(read->device, arena, count);
    for (int d = 0; d < read->count; d++) {
        HAPT_TRY(read_attributes(file, in_folder(folder, d, NULL), arena, &read->device[d]));
        HAPT_TRY(read_curves(file, d, arena, &read->device[d]));
        HAPT_TRY(read_sums(file, d, arena, &read->device[d]));
    }
    return HAPT_OK;
}

enum hapt_status hapt_efficiency_load(const char *path, struct hapt_arena *arena, struct hapt_efficiency **efficiency)
{
    struct hapt_h5 *file;
    struct hapt_efficiency *read;
    HAPT_NEW(read, arena, 1);
    read->path = hapt_arena_strdup(arena, path);
    if (!read->path) return HAPT_ERR_MEMORY;
    HAPT_TRY(hapt_h5_open(path, FORMAT, VERSION, false, &file));
    const enum hapt_status status = read_all(file, arena, read);
    hapt_h5_close(file);
    HAPT_TRY(status);
    *efficiency = read;
    return HAPT_OK;
}

/* ---- rows for printing ---- */

int hapt_efficiency_row_count(const struct hapt_efficiency *efficiency)
{
    int rows = 0;
    for (int d = 0; d < efficiency->count; d++)
        for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++)
            for (int k = 0; k < efficiency->device[d].table.curve[class].count; k++)
                rows += efficiency->device[d].curve[class].samples[k] > 0;
    return rows;
}

struct hapt_efficiency_row hapt_efficiency_row_at(const struct hapt_efficiency *efficiency, int index)
{
    for (int d = 0, row = 0; d < efficiency->count; d++) {
        const struct hapt_calibration_device *device = &efficiency->device[d];
        for (int class = 0; class < HAPT_EFFICIENCY_CLASS_COUNT; class ++) {
            const struct hapt_efficiency_curve *curve = &device->table.curve[class];
            for (int k = 0; k < curve->count; k++) {
                if (device->curve[class].samples[k] == 0 || row++ != index) continue;
                return (struct hapt_efficiency_row){device->name,
                                                    device->dtype,
                                                    hapt_efficiency_class_name(class),
                                                    class == HAPT_EFFICIENCY_MEMORY ? "byte" : "FLOP",
                                                    exp2(curve->size[k]),
                                                    device->curve[class].samples[k],
                                                    curve->share[k],
                                                    device->curve[class].residual[k]};
            }
        }
    }
    HAPT_ASSERT(!"a row of the table");
    return (struct hapt_efficiency_row){0};
}
