/* `hapt data` for images: converts files of CIFAR-10's binary format to a data file. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "data_files.h"
#include "json_print.h"
#include "hapt/h5.h"

enum {
    CHANNELS = 3,
    SIDE = 32,
    PIXELS = SIDE * SIDE,
    IMAGE = CHANNELS * PIXELS,
    RECORD = CIFAR_RECORD_BYTES,
    CLASSES = CIFAR_CLASSES
};

struct images {
    int64_t count;
    uint8_t *pixel; /* [count][3][32][32] */
    uint8_t *label; /* [count] */
    double mean[CHANNELS], std[CHANNELS];
};

/* Appends the records of one file: a label, then the red, green and blue values row by row. */
static enum hapt_status append_records(const char *path, const unsigned char *bytes, size_t size, struct images *images)
{
    for (size_t at = 0; at < size; at += RECORD, images->count++) {
        if (bytes[at] >= CLASSES) {
            return hapt_fail(HAPT_ERR_INPUT, "give CIFAR-10's binary version (data_batch_1.bin and so on)",
                             "%s: label %d of image %zu is not one of %d classes", path, bytes[at], at / RECORD,
                             CLASSES);
        }
        images->label[images->count] = bytes[at];
        memcpy(images->pixel + images->count * IMAGE, bytes + at + 1, IMAGE);
    }
    return HAPT_OK;
}

static void compute_channel_statistics(struct images *images)
{
    for (int c = 0; c < CHANNELS; c++) {
        double sum = 0, squares = 0;
        const double total = (double)images->count * PIXELS;
        for (int64_t i = 0; i < images->count; i++) {
            const uint8_t *pixel = images->pixel + i * IMAGE + c * PIXELS;
            for (int p = 0; p < PIXELS; p++) {
                sum += pixel[p];
                squares += (double)pixel[p] * pixel[p];
            }
        }
        images->mean[c] = sum / total;
        const double variance = squares / total - images->mean[c] * images->mean[c];
        images->std[c] = variance > 1e-6 ? sqrt(variance) : 1; /* a constant channel: (x - mean) / 1 = 0 */
    }
}

static enum hapt_status read_images(const struct hapt_data_inputs *inputs, struct hapt_arena *arena,
                                    struct images *images)
{
    const int files = inputs->count;
    unsigned char **bytes;
    size_t *size, total = 0;
    HAPT_NEW(bytes, arena, files);
    HAPT_NEW(size, arena, files);
    for (int f = 0; f < files; f++) {
        const char *path = inputs->path[f];
        HAPT_TRY(hapt_data_read_file(path, arena, &bytes[f], &size[f]));
        if (size[f] == 0 || size[f] % RECORD != 0) {
            return hapt_fail(HAPT_ERR_INPUT, "give CIFAR-10's binary version (data_batch_1.bin and so on)",
                             "the size of %s is not a multiple of %d bytes, the size of an image", path, RECORD);
        }
        total += size[f] / RECORD;
    }
    HAPT_NEW(images->pixel, arena, total * IMAGE);
    HAPT_NEW(images->label, arena, total);
    for (int f = 0; f < files; f++) HAPT_TRY(append_records(inputs->path[f], bytes[f], size[f], images));
    compute_channel_statistics(images);
    return HAPT_OK;
}

static enum hapt_status write_datasets(struct hapt_h5 *file, const struct images *images)
{
    const int64_t shape[] = {images->count, CHANNELS, SIDE, SIDE}, channels = CHANNELS;
    HAPT_TRY(hapt_h5_write_attribute_int(file, "/", "classes", CLASSES));
    HAPT_TRY(hapt_h5_write(file, "/images", HAPT_H5_U8, 4, shape, images->pixel, ""));
    HAPT_TRY(hapt_h5_write(file, "/labels", HAPT_H5_U8, 1, shape, images->label, "class"));
    HAPT_TRY(hapt_h5_write(file, "/mean", HAPT_H5_F64, 1, &channels, images->mean, ""));
    return hapt_h5_write(file, "/std", HAPT_H5_F64, 1, &channels, images->std, "");
}

static enum hapt_status print_json(const char *path, const struct images *images)
{
    json_t *root =
        json_pack("{s:s, s:i, s:s, s:I, s:i, s:[f,f,f], s:[f,f,f]}", "format", "hapt-data", "version", 1, "output",
                  path, "images", (json_int_t)images->count, "classes", CLASSES, "mean", images->mean[0],
                  images->mean[1], images->mean[2], "std", images->std[0], images->std[1], images->std[2]);
    return hapt_json_print(root, "the data's", 0);
}

enum hapt_status hapt_data_make_images(const struct hapt_env *env, const struct hapt_data_inputs *inputs,
                                       const char *path, struct hapt_arena *arena)
{
    struct images images = {0};
    struct hapt_h5 *file;
    HAPT_TRY(read_images(inputs, arena, &images));
    HAPT_TRY(hapt_h5_create(path, "hapt-data", 1, &file));
    HAPT_TRY(hapt_h5_finish(file, write_datasets(file, &images)));
    if (env->quiet) return print_json(path, &images);
    hapt_print(env, "%s: %" PRId64 " images of %d x %d, %d classes\n", path, images.count, SIDE, SIDE, CLASSES);
    hapt_print(env, "mean %.2f %.2f %.2f, deviation %.2f %.2f %.2f of 255\n", images.mean[0], images.mean[1],
               images.mean[2], images.std[0], images.std[1], images.std[2]);
    return HAPT_OK;
}
