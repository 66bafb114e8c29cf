/* Copies data from a data file into a model file, if they fit the model, in the smallest integer type that fits. */
#include <string.h>

#include "hapt/model.h"
#include "weights.h"

#define MAX_TOKENS ((int64_t)1 << 40)
#define MAX_CHANNELS 1024
#define IGNORED (-100) /* a target that the loss ignores */

/* Writes elements as bytes if `limit` is at most 256, as 16 bits if at most 65536, else as 32 bits. Negative elements
 * need 32 bits. */
static enum hapt_status write_narrow(struct hapt_h5 *file, const char *dataset, int dims, const int64_t *shape,
                                     int64_t count, int limit, int32_t *wide, const char *units)
{
    if (limit > 65536) return hapt_h5_write(file, dataset, HAPT_H5_I32, dims, shape, wide, units);
    void *data = wide; /* in place: element i of the narrow array ends no later than element i of the wide one */
    uint16_t *narrow = data;
    uint8_t *byte = data;
    if (limit > 256) {
        for (int64_t i = 0; i < count; i++) {
            const uint16_t token = (uint16_t)wide[i];
            memcpy(&narrow[i], &token, sizeof token);
        }
        return hapt_h5_write(file, dataset, HAPT_H5_U16, dims, shape, data, units);
    }
    for (int64_t i = 0; i < count; i++) byte[i] = (uint8_t)wide[i];
    return hapt_h5_write(file, dataset, HAPT_H5_U8, dims, shape, data, units);
}

/* Copies integers in [0, limit); with `ignored`, also -100. */
static enum hapt_status copy_integers(struct hapt_h5 *file, struct hapt_h5 *source, const char *dataset, int limit,
                                      bool ignored, struct hapt_arena *arena)
{
    int dims;
    int64_t shape[HAPT_H5_MAX_DIMS], count = 1;
    void *data;
    HAPT_TRY(hapt_h5_shape(source, dataset, &dims, shape));
    if (dims < 1)
        return hapt_fail(HAPT_ERR_INPUT, "see `hapt help data`", "%s of %s is a single number", dataset,
                         hapt_h5_path(source));
    if (!hapt_h5_is_integer(source, dataset))
        return hapt_fail(HAPT_ERR_INPUT, "store it as integers", "%s of %s does not hold integers", dataset,
                         hapt_h5_path(source));
    HAPT_TRY(hapt_h5_read(source, dataset, HAPT_H5_I32, dims, shape, MAX_TOKENS, arena, &data));
    for (int d = 0; d < dims; d++) count *= shape[d];
    const int32_t *value = data;
    for (int64_t i = 0; i < count; i++) {
        if ((value[i] >= 0 && value[i] < limit) || (ignored && value[i] == IGNORED)) continue;
        return hapt_fail(HAPT_ERR_INPUT,
                         "give --vocab the size of the data's vocabulary, or --classes its number of classes",
                         "value %d at %lld of %s of %s is outside the model's range of %d", value[i], (long long)i,
                         dataset, hapt_h5_path(source), limit);
    }
    return write_narrow(file, dataset, dims, shape, count, ignored ? INT32_MAX : limit, data, "index");
}

static enum hapt_status copy_reals(struct hapt_h5 *file, struct hapt_h5 *source, const char *dataset, int dims,
                                   int64_t *shape, int64_t limit, struct hapt_arena *arena)
{
    void *data;
    const enum hapt_h5_type type = hapt_h5_is_byte(source, dataset) ? HAPT_H5_U8 : HAPT_H5_F32;
    HAPT_TRY(hapt_h5_read(source, dataset, type, dims, shape, limit, arena, &data));
    return hapt_h5_write(file, dataset, type, dims, shape, data, "");
}

static enum hapt_status copy_images(struct hapt_h5 *file, struct hapt_h5 *source, const struct hapt_model *model,
                                    struct hapt_arena *arena)
{
    int dims;
    int64_t found[HAPT_H5_MAX_DIMS];
    const int64_t *size = model->graph->tensor[hapt_model_input(model, HAPT_ROLE_IMAGES)].shape;
    if (!hapt_h5_exists(source, "/images"))
        return hapt_fail(HAPT_ERR_INPUT, "make one with `hapt data data_batch_1.bin --type cifar10 --output images.h5`",
                         "%s has no /images, which this model needs", hapt_h5_path(source));
    HAPT_TRY(hapt_h5_shape(source, "/images", &dims, found));
    if (dims != 4 && dims != 5)
        return hapt_fail(HAPT_ERR_INPUT, "store it as [n][C][H][W], or as [step][row][C][H][W]",
                         "%s: /images has %d dimensions", hapt_h5_path(source), dims);
    int64_t shape[] = {-1, -1, size[1], size[2], size[3]}, channels = size[1];
    HAPT_TRY(copy_reals(file, source, "/images", dims, shape + 5 - dims, MAX_TOKENS, arena));
    const int labels = hapt_model_input(model, HAPT_ROLE_LABELS);
    const bool pixels = labels >= 0 && model->graph->tensor[labels].dims == 2;
    HAPT_TRY(copy_integers(file, source, "/labels", model->classes, pixels, arena));
    if (hapt_h5_exists(source, "/mean")) HAPT_TRY(copy_reals(file, source, "/mean", 1, &channels, MAX_CHANNELS, arena));
    if (!hapt_h5_exists(source, "/std")) return HAPT_OK;
    return copy_reals(file, source, "/std", 1, &channels, MAX_CHANNELS, arena);
}

enum hapt_status hapt_model_open_content(const char *path, struct hapt_h5 **file)
{
    char format[sizeof "hapt-model"] = "";
    HAPT_TRY(hapt_h5_peek_text(path, NULL, 0, true, "format", format, sizeof format));
    return hapt_h5_open(path, NULL, strcmp(format, "hapt-model") == 0 ? HAPT_MODEL_VERSION : 1, true, file);
}

enum hapt_status hapt_model_copy_data(struct hapt_h5 *file, const struct hapt_model *model, const char *path,
                                      struct hapt_arena *arena)
{
    struct hapt_h5 *source;
    HAPT_TRY(hapt_model_open_content(path, &source));
    enum hapt_status status;
    if (model->classes > 0) {
        status = copy_images(file, source, model, arena);
    } else if (hapt_h5_exists(source, "/tokens")) {
        status = copy_integers(file, source, "/tokens", model->vocab, false, arena);
        if (status == HAPT_OK && hapt_h5_exists(source, "/targets"))
            status = copy_integers(file, source, "/targets", model->vocab, true, arena);
    } else if (!hapt_h5_exists(source, "/batches")) {
        status = hapt_fail(HAPT_ERR_INPUT, "make one with `hapt data text.txt --output tokens.h5`",
                           "%s holds neither /tokens nor /batches", path);
    } else if (hapt_h5_is_group(source, "/batches")) {
        status = hapt_fail(HAPT_ERR_INPUT, "use data made for this model: see `hapt help data`",
                           "%s holds named inputs, but this model reads tokens", path);
    } else {
        status = copy_integers(file, source, "/batches", model->vocab, false, arena);
        if (status == HAPT_OK && hapt_h5_exists(source, "/targets"))
            status = copy_integers(file, source, "/targets", model->vocab, true, arena);
    }
    hapt_h5_close(source);
    return status;
}
