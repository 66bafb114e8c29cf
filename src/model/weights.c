/* Reads and writes /parameters of weights and model files, under the names that a family publishes. */
#include "weights.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

enum { MAX_NAME = 200, MAX_PATH = MAX_NAME + 40 };

/* "/parameters/NAME"; for a stack, with the number of the element. */
static void element_path(const char *name, int dims, int64_t element, char path[MAX_PATH])
{
    const int prefix = snprintf(path, MAX_PATH, "/parameters/");
    hapt_tensor_published_name(name, dims, element, path + prefix, (size_t)(MAX_PATH - prefix));
}

static enum hapt_status check_name(const char *name)
{
    if (strlen(name) <= MAX_NAME) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "a name has at most 200 characters", "the name of parameter %.40s... is too long",
                     name);
}

/* Reads rows [first, first + count) of a dataset of that shape. */
static enum hapt_status read_element(struct hapt_h5 *file, const char *path, int dims, const int64_t *shape,
                                     int64_t first, int64_t count, float *value)
{
    int found_dims;
    int64_t found[HAPT_H5_MAX_DIMS], row = 1;
    HAPT_TRY(hapt_h5_shape(file, path, &found_dims, found));
    bool equal = found_dims == dims;
    for (int d = 0; equal && d < dims; d++) equal = found[d] == shape[d];
    if (!equal)
        return hapt_fail(HAPT_ERR_INPUT, "the weights belong to a model of another shape",
                         "%s of %s has another shape than %s", path, hapt_h5_path(file), "the model");
    for (int d = 1; d < dims; d++) row *= shape[d];
    HAPT_TRY(hapt_h5_check_written(file, path));
    HAPT_TRY(hapt_h5_read_rows(file, path, HAPT_H5_F32, first, count, value));
    for (int64_t i = 0; i < count * row; i++) {
        if (isfinite(value[i])) continue;
        return hapt_fail(HAPT_ERR_INPUT, "weights must be finite", "element %lld of %s in %s is not a number",
                         (long long)(first * row + i), path, hapt_h5_path(file));
    }
    return HAPT_OK;
}

static enum hapt_status read_stack(struct hapt_h5 *file, const struct hapt_tensor *parameter, int64_t first,
                                   int64_t count, float *value)
{
    const int64_t total = parameter->shape[0], each = hapt_tensor_elements(parameter) / total;
    char path[MAX_PATH];
    for (int64_t k = first; k < first + count; k++, value += each) {
        element_path(parameter->name, parameter->dims, k, path);
        HAPT_TRY(read_element(file, path, parameter->dims - 1, parameter->shape + 1, 0, parameter->shape[1], value));
    }
    element_path(parameter->name, parameter->dims, total, path);
    if (first + count < total || !hapt_h5_exists(file, path)) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "the weights belong to a model of another shape",
                     "%s contains %s, the model has only %lld of these", hapt_h5_path(file), path, (long long)total);
}

bool hapt_weights_exist(struct hapt_h5 *file, const struct hapt_tensor *parameter)
{
    char path[MAX_PATH];
    element_path(parameter->name, parameter->dims, 0, path);
    return hapt_h5_exists(file, path);
}

enum hapt_status hapt_weights_read(struct hapt_h5 *file, const struct hapt_tensor *parameter, int64_t first,
                                   int64_t count, float *value)
{
    char path[MAX_PATH];
    HAPT_TRY(check_name(parameter->name));
    if (hapt_tensor_is_stack(parameter->name, parameter->dims)) return read_stack(file, parameter, first, count, value);
    element_path(parameter->name, parameter->dims, 0, path);
    return read_element(file, path, parameter->dims, parameter->shape, first, count, value);
}

enum hapt_status hapt_weights_write(struct hapt_h5 *file, const char *name, int dims, const int64_t *shape,
                                    const float *value)
{
    const bool stack = hapt_tensor_is_stack(name, dims);
    char path[MAX_PATH];
    int64_t each = 1;
    HAPT_TRY(check_name(name));
    for (int d = stack; d < dims; d++) each *= shape[d];
    for (int64_t k = 0; k < (stack ? shape[0] : 1); k++) {
        element_path(name, dims, k, path);
        HAPT_TRY(hapt_h5_write(file, path, HAPT_H5_F32, dims - stack, shape + stack, value + k * each, ""));
    }
    return HAPT_OK;
}
