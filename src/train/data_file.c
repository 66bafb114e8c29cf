/* Reads data files and checks that they fit the model: tokens or images, exact batches or a stream. Fields are in
 * data_fields.c. */
#include "data.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Checks that `second` has the first `dims` extents of `first`. */
static enum hapt_status check_alike(struct hapt_h5 *file, const char *first, const int64_t *extent, const char *second,
                                    int dims)
{
    int found_dims = 0;
    int64_t found[HAPT_H5_MAX_DIMS] = {0};
    HAPT_TRY(hapt_h5_shape(file, second, &found_dims, found));
    bool alike = found_dims == dims;
    for (int d = 0; d < dims; d++) alike = alike && found[d] == extent[d];
    if (alike) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "see `hapt help data`", "%s: the shape of %s does not match %s",
                     hapt_h5_path(file), second, first);
}

static enum hapt_status find_batches(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                     struct data_layout *layout)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const char *path = hapt_h5_path(file);
    const bool shifted = !hapt_h5_exists(file, "/targets");
    HAPT_TRY(hapt_h5_shape(file, "/batches", &dims, shape));
    if (dims != 3)
        return hapt_fail(HAPT_ERR_INPUT, "store it as [step][row][T + 1], or as [step][row][T] beside /targets",
                         "%s: /batches has %d dimensions", path, dims);
    if (!shifted) HAPT_TRY(check_alike(file, "/batches", shape, "/targets", 3));
    const int64_t tokens = model->sequence + shifted;
    if (shape[2] != tokens)
        return hapt_fail(HAPT_ERR_INPUT, "make the model with the sequence length of the data",
                         "%s: a row has %lld tokens, the model's sequence of %d needs %lld%s", path,
                         (long long)shape[2], model->sequence, (long long)tokens, shifted ? "" : " beside /targets");
    HAPT_TRY(data_check_steps(path, "/batches", shape, model, rows, steps));
    HAPT_TRY(data_check_product(path, shape[1], shape[2]));
    *layout = (struct data_layout){.exact = true,
                                   .shifted = shifted,
                                   .units = rows > 0 ? steps : shape[0],
                                   .unit_inputs = shape[1] * shape[2],
                                   .unit_targets = shifted ? 0 : shape[1] * shape[2],
                                   .stride = shape[2],
                                   .target_stride = model->sequence};
    return HAPT_OK;
}

static enum hapt_status find_tokens(struct hapt_h5 *file, const struct hapt_model *model, struct data_layout *layout)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const char *path = hapt_h5_path(file);
    if (!hapt_h5_exists(file, "/tokens"))
        return hapt_fail(HAPT_ERR_INPUT, "make one with `hapt data text.txt --output tokens.h5`",
                         "%s holds neither /tokens nor /batches", path);
    HAPT_TRY(hapt_h5_shape(file, "/tokens", &dims, shape));
    if (dims != 1) return hapt_fail(HAPT_ERR_INPUT, "store it as [n]", "%s: /tokens has %d dimensions", path, dims);
    const bool shifted = !hapt_h5_exists(file, "/targets");
    if (!shifted) HAPT_TRY(check_alike(file, "/tokens", shape, "/targets", 1));
    if (shape[0] < model->sequence + shifted)
        return hapt_fail(HAPT_ERR_INPUT, "give more text or a shorter --sequence",
                         "%s holds %lld tokens, a row needs %d", path, (long long)shape[0], model->sequence + shifted);
    *layout = (struct data_layout){.shifted = shifted,
                                   .units = shape[0],
                                   .unit_inputs = 1,
                                   .unit_targets = !shifted,
                                   .stride = 1,
                                   .target_stride = 1};
    return HAPT_OK;
}

/* Checks that /labels has the first `dims` extents of /images, and then `places` labels in any shape. */
static enum hapt_status check_labels(struct hapt_h5 *file, const int64_t *extent, int dims, int64_t places)
{
    int found_dims = 0;
    int64_t found[HAPT_H5_MAX_DIMS] = {0}, each = 1;
    HAPT_TRY(hapt_h5_shape(file, "/labels", &found_dims, found));
    bool alike = found_dims >= dims;
    for (int d = 0; alike && d < dims; d++) alike = found[d] == extent[d];
    for (int d = dims; alike && d < found_dims; d++) {
        alike = found[d] >= 1 && found[d] <= places / each;
        if (alike) each *= found[d];
    }
    if (alike && each == places) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT,
                     places > 1 ? "a model of pixels needs a label for each of them: see `hapt help data`"
                                : "see `hapt help data`",
                     "%s: the shape of /labels does not match /images and the model's %lld label%s of an image",
                     hapt_h5_path(file), (long long)places, places > 1 ? "s" : "");
}

static enum hapt_status find_images(struct hapt_h5 *file, const struct hapt_model *model,
                                    const struct hapt_tensor *input, int rows, int64_t steps,
                                    struct data_layout *layout)
{
    const int labels = hapt_model_input(model, HAPT_ROLE_LABELS);
    const struct hapt_tensor *label = labels >= 0 ? &model->graph->tensor[labels] : NULL;
    const int64_t places = label && label->dims == 2 ? label->shape[1] : 1;
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const char *path = hapt_h5_path(file);
    if (!hapt_h5_exists(file, "/images"))
        return hapt_fail(HAPT_ERR_INPUT, "make one with `hapt data data_batch_1.bin --type cifar10 --output images.h5`",
                         "%s holds no /images, but this model needs images", path);
    HAPT_TRY(hapt_h5_shape(file, "/images", &dims, shape));
    if (dims != 4 && dims != 5)
        return hapt_fail(HAPT_ERR_INPUT, "store it as [n][C][H][W], or as [step][row][C][H][W]",
                         "%s: /images has %d dimensions", path, dims);
    const int64_t *image = shape + dims - 3, *wanted = input->shape + 1;
    if (image[0] != wanted[0] || image[1] != wanted[1] || image[2] != wanted[2])
        return hapt_fail(HAPT_ERR_INPUT, "make the model with the --image size and --channels of the data",
                         "%s: images are [%lld][%lld][%lld], the model needs [%lld][%lld][%lld]", path,
                         (long long)image[0], (long long)image[1], (long long)image[2], (long long)wanted[0],
                         (long long)wanted[1], (long long)wanted[2]);
    HAPT_TRY(check_labels(file, shape, dims - 3, places));
    if (dims == 5) HAPT_TRY(data_check_steps(path, "/images", shape, model, rows, steps));
    if (dims == 5) HAPT_TRY(data_check_product(path, shape[1], image[0] * image[1] * image[2]));
    if (dims == 5) HAPT_TRY(data_check_product(path, shape[1], places));
    if (shape[0] < 1) return hapt_fail(HAPT_ERR_INPUT, "give more images", "%s holds no image", path);
    const int64_t each = dims == 5 ? shape[1] : 1, pixels = image[0] * image[1] * image[2];
    *layout = (struct data_layout){.exact = dims == 5,
                                   .images = true,
                                   .pixels = label && label->dims == 2,
                                   .type = hapt_h5_is_byte(file, "/images") ? HAPT_H5_U8 : HAPT_H5_F32,
                                   .units = dims == 5 && rows > 0 ? steps : shape[0],
                                   .unit_inputs = each * pixels,
                                   .unit_targets = each * places,
                                   .width = pixels,
                                   .target_width = places,
                                   .stride = pixels,
                                   .target_stride = places,
                                   .channels = image[0],
                                   .limit = model->classes};
    return HAPT_OK;
}

int64_t data_layout_rows(const struct data_layout *layout)
{
    if (layout->exact) return layout->units * (layout->unit_inputs / layout->stride);
    return layout->images || layout->fields > 0 ? layout->units : (layout->units - layout->shifted) / layout->width;
}

enum hapt_status data_layout_find(struct hapt_h5 *file, const struct hapt_model *model,
                                  const struct hapt_data_order *order, struct data_layout *layout)
{
    const int images = hapt_model_input(model, HAPT_ROLE_IMAGES), rows = order ? order->rows : 0;
    const int64_t steps = order && !order->epochs ? order->steps : 0;
    if (hapt_model_field(model, 0) >= 0) {
        HAPT_TRY(data_fields_find(file, model, rows, steps, layout));
    } else if (images >= 0) {
        HAPT_TRY(find_images(file, model, &model->graph->tensor[images], rows, steps, layout));
    } else if (hapt_h5_is_group(file, "/batches")) {
        return hapt_fail(HAPT_ERR_INPUT, "use data made for this model: see `hapt help data`",
                         "%s holds named inputs, but this model reads tokens", hapt_h5_path(file));
    } else {
        HAPT_TRY(hapt_h5_exists(file, "/batches") ? find_batches(file, model, rows, steps, layout)
                                                  : find_tokens(file, model, layout));
        layout->type = model->vocab > 65536 ? HAPT_H5_I32 : HAPT_H5_U16;
        layout->width = layout->target_width = model->sequence;
        layout->limit = model->vocab;
    }
    if (layout->exact && order && order->epochs)
        return hapt_fail(HAPT_ERR_INPUT, "leave out --epochs and --data-order epochs",
                         "%s holds exact batches, which come in their own order", hapt_h5_path(file));
    for (int f = 0; f < layout->fields; f++) HAPT_TRY(hapt_h5_check_written(file, layout->field[f].name));
    if (layout->fields == 0) HAPT_TRY(hapt_h5_check_written(file, data_inputs_name(layout)));
    if (layout->fields == 0 && (layout->images || !layout->shifted))
        HAPT_TRY(hapt_h5_check_written(file, data_targets_name(layout)));
    layout->held_out = rows == 0;
    const int64_t most = layout->unit_inputs > layout->unit_targets ? layout->unit_inputs : layout->unit_targets;
    return data_check_product(hapt_h5_path(file), layout->units, most);
}

/* ---- Reading ---- */

static enum hapt_status store_tokens(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                     const char *path)
{
    const struct data_layout *layout = reading->layout;
    const struct data_memory *memory = reading->memory;
    const int32_t *token = read;
    for (int64_t i = 0; i < count; i++) {
        if (token[i] < 0 || token[i] >= layout->limit)
            return hapt_fail(HAPT_ERR_INPUT, "train a model with the vocabulary of the data",
                             "%s: token %d at %lld is outside the model's vocabulary of %lld", path, token[i],
                             (long long)(first + i), (long long)layout->limit);
    }
    if (!memory || !memory->inputs) return HAPT_OK;
    if (layout->type == HAPT_H5_I32)
        memcpy((int32_t *)memory->inputs + first, token, (size_t)count * sizeof *token);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)memory->inputs)[first + i] = (uint16_t)token[i];
    return HAPT_OK;
}

static enum hapt_status store_targets(const struct data_reading *reading, const void *read, int64_t first,
                                      int64_t count, const char *path)
{
    const struct data_layout *layout = reading->layout;
    const struct data_memory *memory = reading->memory;
    const int32_t *target = read;
    for (int64_t i = 0; i < count; i++) {
        if (target[i] == DATA_IGNORED) continue;
        if (target[i] < 0 || target[i] >= layout->limit)
            return hapt_fail(HAPT_ERR_INPUT,
                             "targets must be below the model's vocabulary, or -100 (excluded from the loss)",
                             "%s: target %d at %lld is outside the model's vocabulary of %lld", path, target[i],
                             (long long)(first + i), (long long)layout->limit);
        if (memory) memory->target_count[(first + i) / (layout->exact ? layout->unit_targets : DATA_COUNT_UNITS)]++;
    }
    if (!memory || !memory->targets) return HAPT_OK;
    memcpy(memory->targets + first, target, (size_t)count * sizeof *target);
    return HAPT_OK;
}

static enum hapt_status store_labels(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                     const char *path)
{
    const struct data_layout *layout = reading->layout;
    const struct data_memory *memory = reading->memory;
    const int32_t *label = read;
    for (int64_t i = 0; i < count; i++) {
        if (layout->pixels && label[i] == DATA_IGNORED) continue;
        if (label[i] >= 0 && label[i] < layout->limit) {
            if (layout->pixels) memory->target_count[(first + i) / layout->unit_targets]++;
            continue;
        }
        return hapt_fail(HAPT_ERR_INPUT, "train a model with the --classes of the data",
                         "%s: label %d at %lld is outside the model's %lld classes", path, label[i],
                         (long long)(first + i), (long long)layout->limit);
    }
    if (!memory || !memory->targets) return HAPT_OK;
    memcpy(memory->targets + first, label, (size_t)count * sizeof *label);
    return HAPT_OK;
}

static enum hapt_status store_pixels(const struct data_reading *reading, const void *read, int64_t first, int64_t count,
                                     const char *path)
{
    const struct data_layout *layout = reading->layout;
    const struct data_memory *memory = reading->memory;
    if (layout->type == HAPT_H5_U8) {
        if (memory->inputs) memcpy((uint8_t *)memory->inputs + first, read, (size_t)count);
        return HAPT_OK;
    }
    const float *pixel = read;
    for (int64_t i = 0; i < count; i++) {
        if (isfinite(pixel[i])) continue;
        return hapt_fail(HAPT_ERR_INPUT, "pixels must be finite", "%s: element %lld of /images is not a number", path,
                         (long long)(first + i));
    }
    if (memory->inputs) memcpy((float *)memory->inputs + first, pixel, (size_t)count * sizeof *pixel);
    return HAPT_OK;
}

/* Without a normalisation in the file, bytes are divided by 255 and floats stay unchanged. */
static enum hapt_status read_normalisation(struct hapt_h5 *file, const struct data_layout *layout,
                                           const struct data_memory *memory)
{
    for (int64_t c = 0; c < layout->channels; c++) {
        memory->mean[c] = 0;
        memory->std[c] = layout->type == HAPT_H5_U8 ? 255 : 1;
    }
    if (!hapt_h5_exists(file, "/mean") && !hapt_h5_exists(file, "/std")) return HAPT_OK;
    HAPT_TRY(check_alike(file, "/images", &layout->channels, "/mean", 1));
    HAPT_TRY(check_alike(file, "/images", &layout->channels, "/std", 1));
    HAPT_TRY(hapt_h5_check_written(file, "/mean"));
    HAPT_TRY(hapt_h5_check_written(file, "/std"));
    HAPT_TRY(hapt_h5_read_rows(file, "/mean", HAPT_H5_F32, 0, layout->channels, memory->mean));
    HAPT_TRY(hapt_h5_read_rows(file, "/std", HAPT_H5_F32, 0, layout->channels, memory->std));
    for (int64_t c = 0; c < layout->channels; c++) {
        if (isfinite(memory->mean[c]) && isfinite(memory->std[c]) && memory->std[c] > 0) continue;
        return hapt_fail(HAPT_ERR_INPUT, "a pixel's value is (stored - mean) / std, by channel",
                         "%s: invalid normalisation of channel %lld", hapt_h5_path(file), (long long)c);
    }
    return HAPT_OK;
}

/* Counts of blocks of a stream become counts of all before each block. */
static enum hapt_status sum_counts(struct hapt_h5 *file, const struct data_layout *layout, int64_t *count)
{
    int64_t before = 0;
    for (int64_t i = 0; i * DATA_COUNT_UNITS < layout->units; i++) {
        const int64_t own = count[i];
        count[i] = before;
        before += own;
    }
    if (before > 0) return HAPT_OK;
    return hapt_fail(HAPT_ERR_INPUT, "give targets that are not -100", "%s has no target", hapt_h5_path(file));
}

int64_t data_target_counts(const struct data_layout *layout)
{
    if (layout->pixels || layout->fields > 0) return layout->units;
    if (layout->shifted || layout->images) return 0;
    return layout->exact ? layout->units : (layout->units + DATA_COUNT_UNITS - 1) / DATA_COUNT_UNITS;
}

static enum hapt_status check_targets(struct hapt_h5 *file, const struct data_layout *layout,
                                      const struct data_memory *memory)
{
    const int64_t counts = data_target_counts(layout);
    const struct data_reading reading = {layout, memory, -1};
    for (int64_t i = 0; i < counts; i++) memory->target_count[i] = 0;
    HAPT_TRY(data_read_blocks(file, "/targets", HAPT_H5_I32, &reading, layout->unit_targets, store_targets));
    return layout->exact ? data_check_counts(file, layout, memory->target_count)
                         : sum_counts(file, layout, memory->target_count);
}

/* The labels of images. Those of pixels are counted by batch or image, and may be missing, but not all of them. */
static enum hapt_status check_labels_of(struct hapt_h5 *file, const struct data_layout *layout,
                                        const struct data_memory *memory)
{
    const int64_t counts = data_target_counts(layout);
    const struct data_reading reading = {layout, memory, -1};
    int64_t all = 0;
    for (int64_t i = 0; i < counts; i++) memory->target_count[i] = 0;
    HAPT_TRY(data_read_blocks(file, "/labels", HAPT_H5_I32, &reading, layout->unit_targets, store_labels));
    if (!layout->pixels) return HAPT_OK;
    for (int64_t i = 0; i < counts; i++) all += memory->target_count[i];
    if (all == 0)
        return hapt_fail(HAPT_ERR_INPUT, "give labels that are not -100", "%s has no label", hapt_h5_path(file));
    return layout->exact ? data_check_counts(file, layout, memory->target_count) : HAPT_OK;
}

enum hapt_status data_fill(struct hapt_h5 *file, const struct data_layout *layout, const struct data_memory *memory)
{
    const struct data_reading reading = {layout, memory, -1};
    HAPT_TRY(data_find_offsets(file, layout, memory));
    if (layout->fields > 0) return data_fields_fill(file, layout, memory);
    if (layout->images) {
        HAPT_TRY(read_normalisation(file, layout, memory));
        HAPT_TRY(data_read_blocks(file, "/images", layout->type, &reading, layout->unit_inputs, store_pixels));
        return check_labels_of(file, layout, memory);
    }
    HAPT_TRY(
        data_read_blocks(file, data_inputs_name(layout), HAPT_H5_I32, &reading, layout->unit_inputs, store_tokens));
    return layout->shifted ? HAPT_OK : check_targets(file, layout, memory);
}

enum hapt_status data_check_values(struct hapt_h5 *file, const struct data_layout *layout)
{
    const struct data_reading checking = {layout, NULL, -1};
    const struct data_memory counts = {.target_count =
                                           malloc((size_t)data_target_counts(layout) * sizeof(int64_t) + 1)};
    enum hapt_status status =
        counts.target_count ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to count targets");
    if (status == HAPT_OK && layout->fields > 0) status = data_fields_fill(file, layout, &counts);
    if (status == HAPT_OK && layout->images) status = check_labels_of(file, layout, &counts);
    const bool tokens = !layout->images && layout->fields == 0;
    if (status == HAPT_OK && tokens)
        status =
            data_read_blocks(file, data_inputs_name(layout), HAPT_H5_I32, &checking, layout->unit_inputs, store_tokens);
    if (status == HAPT_OK && tokens && !layout->shifted) status = check_targets(file, layout, &counts);
    free(counts.target_count);
    return status;
}
