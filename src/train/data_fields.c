/*
 * Data of a model whose inputs are fields: a dataset /batches/NAME for each of them, of rows [n]..., or of exact
 * batches [step][row]... The rest of the shape is that of the input.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data.h"

static enum hapt_status wrong_shape(const char *path, const struct data_field *field, const struct hapt_tensor *input)
{
    char wanted[96] = "";
    for (int d = 1; d < input->dims; d++)
        snprintf(wanted + strlen(wanted), sizeof wanted - strlen(wanted), "[%lld]", (long long)input->shape[d]);
    return hapt_fail(HAPT_ERR_INPUT, "see `hapt help data`",
                     "%s: %s does not have the shape [n]%s or [step][row]%s of the model's input", path, field->name,
                     wanted, wanted);
}

/* Checks the shape of a field's dataset; all have the same steps and rows, which the first one sets. */
static enum hapt_status find_field(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                   int number, struct data_layout *layout)
{
    struct data_field *field = &layout->field[number];
    const struct hapt_tensor *input = &model->graph->tensor[hapt_model_field(model, number)];
    const char *path = hapt_h5_path(file);
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    *field = (struct data_field){.type = input->dtype == HAPT_I32 ? HAPT_H5_I32 : HAPT_H5_F32,
                                 .width = hapt_tensor_elements(input) / input->shape[0],
                                 .limit = hapt_model_field_limit(model, number),
                                 .target = hapt_model_target_field(model) == number};
    snprintf(field->name, sizeof field->name, "/batches/%s", input->name);
    if (!hapt_h5_is_group(file, "/batches") || !hapt_h5_exists(file, field->name))
        return hapt_fail(HAPT_ERR_INPUT, "store the rows of each input of the model: see `hapt help data`",
                         "%s holds no %s, which this model needs", path, field->name);
    HAPT_TRY(hapt_h5_shape(file, field->name, &dims, shape));
    const int before = dims - (input->dims - 1);
    if (before != 1 && before != 2) return wrong_shape(path, field, input);
    for (int d = 1; d < input->dims; d++)
        if (shape[before + d - 1] != input->shape[d]) return wrong_shape(path, field, input);
    const bool exact = before == 2;
    if (exact) HAPT_TRY(data_check_steps(path, field->name, shape, model, rows, steps));
    const int64_t units = exact && rows > 0 ? steps : shape[0], each = exact ? shape[1] : 1;
    HAPT_TRY(data_check_product(path, each, field->width));
    if (shape[0] < 1) return hapt_fail(HAPT_ERR_INPUT, "give more data", "%s: %s holds no row", path, field->name);
    if (number == 0) {
        layout->exact = exact;
        layout->units = units;
        layout->unit_inputs = each;
    }
    if (exact == layout->exact && units == layout->units && each == layout->unit_inputs) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "store each row in all fields", "%s: %s and %s do not have the same rows", path,
                     layout->field[0].name, field->name);
}

enum hapt_status data_fields_find(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                  struct data_layout *layout)
{
    *layout = (struct data_layout){.stride = 1, .target_stride = 1, .width = 1, .target_width = 1};
    for (int number = 0; hapt_model_field(model, number) >= 0; number++) {
        HAPT_TRY(find_field(file, model, rows, steps, number, layout));
        layout->fields = number + 1;
        if (layout->field[number].width > layout->unit_targets) layout->unit_targets = layout->field[number].width;
    }
    layout->unit_targets *= layout->unit_inputs; /* the largest field's elements, for the limit of them */
    return HAPT_OK;
}

static void count_target(const struct data_reading *reading, int64_t element)
{
    const struct data_layout *layout = reading->layout;
    const struct data_field *field = &layout->field[reading->field];
    if (field->target) reading->memory->target_count[element / (field->width * layout->unit_inputs)]++;
}

static enum hapt_status take_integers(const struct data_reading *reading, const void *read, int64_t first,
                                      int64_t count, const char *path)
{
    const struct data_field *field = &reading->layout->field[reading->field];
    const int32_t *value = read;
    for (int64_t i = 0; i < count; i++) {
        if (field->target && value[i] == DATA_IGNORED) continue;
        count_target(reading, first + i);
        if (value[i] >= 0 && value[i] < field->limit) continue;
        return hapt_fail(HAPT_ERR_INPUT, "use data of the model's vocabulary and classes; targets may be -100",
                         "%s: %d at %lld of %s is outside the model's range of %lld", path, value[i],
                         (long long)(first + i), field->name, (long long)field->limit);
    }
    return HAPT_OK;
}

static enum hapt_status take_reals(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                   const char *path)
{
    const struct data_field *field = &reading->layout->field[reading->field];
    const float *value = read;
    for (int64_t i = 0; i < count; i++) {
        if (field->target && isnan(value[i])) continue;
        count_target(reading, first + i);
        if (isfinite(value[i])) continue;
        return hapt_fail(HAPT_ERR_INPUT, "numbers must be finite; targets may be NaN",
                         "%s: %g at %lld of %s is not a finite number", path, (double)value[i], (long long)(first + i),
                         field->name);
    }
    return HAPT_OK;
}

static enum hapt_status take_field(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                   const char *path)
{
    const bool whole = reading->layout->field[reading->field].type == HAPT_H5_I32;
    char *to = reading->memory->field[reading->field].value;
    HAPT_TRY((whole ? take_integers : take_reals)(reading, read, first, count, path));
    if (to) memcpy(to + (size_t)first * sizeof(float), read, (size_t)count * sizeof(float)); /* both have 4 bytes */
    return HAPT_OK;
}

/* Every batch has a target; of rows that are drawn, some row has one. */
static enum hapt_status check_targets(struct hapt_h5 *file, const struct data_layout *layout, const int64_t *count)
{
    int64_t all = 0;
    for (int64_t unit = 0; unit < layout->units; unit++) all += count[unit];
    if (all == 0)
        return hapt_fail(HAPT_ERR_INPUT, "give targets that are not -100 or NaN", "%s has no target",
                         hapt_h5_path(file));
    return layout->exact ? data_check_counts(file, layout, count) : HAPT_OK;
}

enum hapt_status data_fields_fill(struct hapt_h5 *file, const struct data_layout *layout,
                                  const struct data_memory *memory)
{
    for (int64_t unit = 0; unit < layout->units; unit++) memory->target_count[unit] = 0;
    for (int f = 0; f < layout->fields; f++) {
        const struct data_field *field = &layout->field[f];
        const struct data_reading reading = {layout, memory, f};
        HAPT_TRY(
            data_read_blocks(file, field->name, field->type, &reading, field->width * layout->unit_inputs, take_field));
    }
    return check_targets(file, layout, memory->target_count);
}
