/*
 * Rows of every step. A stream is sampled by hashing (seed, step, row). So any rank can compute any row, and a resumed
 * run needs only the step number. Held-out data come in order instead.
 */
#include "data.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"

struct hapt_data {
    struct data_layout layout;
    struct data_memory memory;
    int rows; /* per step */
    uint64_t seed;
    struct {
        int64_t all, used; /* rows of the file, and those that are read; 0: the data are not held out */
    } held_out;
    struct hapt_shared *shared; /* NULL: not reserved */
    void *own;                  /* data_of_rows: this rank's memory */
    struct {
        int64_t steps;
        uint64_t hash;
    } known; /* exact batches: identified so far */
};

static size_t rounded(int64_t elements, size_t size)
{
    return hapt_align((size_t)elements * size);
}

static size_t input_bytes(const struct data_layout *layout)
{
    static const size_t bytes[] = {[HAPT_H5_U8] = 1, [HAPT_H5_U16] = 2, [HAPT_H5_I32] = 4, [HAPT_H5_F32] = 4};
    return bytes[layout->type];
}

/* Reserves one block per node and divides it into the parts of `memory`. */
static enum hapt_status reserve(const struct hapt_env *env, struct hapt_data *data)
{
    const struct data_layout *layout = &data->layout;
    const bool counted = !layout->shifted && !layout->images;
    const size_t inputs = rounded(layout->units * layout->unit_inputs, input_bytes(layout)),
                 targets = rounded(layout->units * layout->unit_targets, sizeof(int32_t)),
                 counts = counted ? rounded(layout->units, sizeof(int64_t)) : 0,
                 scales = rounded(layout->channels, sizeof(float));
    HAPT_TRY(hapt_shared_create(env, inputs + targets + counts + 2 * scales, &data->shared));
    char *at = hapt_shared_memory(data->shared);
    data->memory = (struct data_memory){.inputs = at,
                                        .targets = layout->shifted ? NULL : (int32_t *)(at + inputs),
                                        .target_count = counted ? (int64_t *)(at + inputs + targets) : NULL,
                                        .mean = (float *)(at + inputs + targets + counts),
                                        .std = (float *)(at + inputs + targets + counts + scales)};
    return HAPT_OK;
}

/* exact_rows: of a batch of exact data; 0: any. */
static enum hapt_status load(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                             int exact_rows, int64_t steps, struct hapt_data **data)
{
    struct hapt_h5 *file = NULL;
    struct data_layout layout = {0};
    struct hapt_data *made = calloc(1, sizeof *made);
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "loading data", 0);
    enum hapt_status status = made ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for data");
    if (status == HAPT_OK && env->node_rank == 0) {
        status = hapt_h5_open(path, NULL, 1, true, &file);
        if (status == HAPT_OK) status = data_layout_find(file, model, exact_rows, steps, &layout);
    }
    status = hapt_env_agree(env->world, status);
    if (status == HAPT_OK) {
        MPI_Bcast(&layout, (int)sizeof layout, MPI_BYTE, 0, env->node);
        *made = (struct hapt_data){.layout = layout};
        status = hapt_env_agree(env->world, reserve(env, made));
    }
    if (status == HAPT_OK)
        status = hapt_env_agree(env->world, env->node_rank == 0 ? data_fill(file, &layout, &made->memory) : HAPT_OK);
    if (status == HAPT_OK) status = hapt_env_agree(env->world, hapt_shared_publish(made->shared));
    hapt_h5_close(file);
    hapt_progress_release(&progress);
    if (status != HAPT_OK) {
        hapt_data_close(made);
        return status;
    }
    *data = made;
    return HAPT_OK;
}

enum hapt_status hapt_data_open(const struct hapt_env *env, const char *path, const struct hapt_model *model, int rows,
                                int64_t steps, uint64_t seed, struct hapt_data **data)
{
    HAPT_TRY(load(env, path, model, rows, steps, data));
    (*data)->rows = rows;
    (*data)->seed = seed;
    return HAPT_OK;
}

enum hapt_status hapt_data_open_held_out(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                         int rows, int64_t most, struct hapt_data **data)
{
    struct hapt_data *made;
    HAPT_TRY(load(env, path, model, 0, 0, &made));
    const struct data_layout *layout = &made->layout;
    const int64_t all = layout->exact    ? layout->units * (layout->unit_inputs / layout->stride)
                        : layout->images ? layout->units
                                         : (layout->units - 1) / layout->width;
    made->rows = rows;
    made->held_out.all = all;
    made->held_out.used = most > 0 && most < all ? most : all;
    if (all > 0) {
        *data = made;
        return HAPT_OK;
    }
    hapt_data_close(made);
    return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_INPUT, "give more data", "%s holds no row", path));
}

enum hapt_status data_of_rows(int rows, int64_t width, struct hapt_data **data, int32_t **row)
{
    struct hapt_data *made = calloc(1, sizeof *made);
    int32_t *tokens = calloc((size_t)rows * ((size_t)width + 1), sizeof *tokens);
    if (!made || !tokens) {
        free(made);
        free(tokens);
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %d rows of tokens", rows);
    }
    *made = (struct hapt_data){.rows = rows,
                               .layout = {.exact = true,
                                          .shifted = true,
                                          .type = HAPT_H5_I32,
                                          .units = 1,
                                          .unit_inputs = rows * (width + 1),
                                          .width = width,
                                          .target_width = width,
                                          .stride = width + 1},
                               .memory.inputs = tokens,
                               .own = tokens};
    *data = made;
    *row = tokens;
    return HAPT_OK;
}

int64_t hapt_data_held_out_rows(const struct hapt_data *data)
{
    return data->held_out.used;
}

enum hapt_status hapt_data_check(const struct hapt_env *env, const char *path, const struct hapt_model *model, int rows,
                                 int64_t steps)
{
    struct hapt_h5 *file = NULL;
    struct data_layout layout = {0};
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, env, "checking data", 0);
    if (env->node_rank == 0) {
        status = hapt_h5_open(path, NULL, 1, true, &file);
        if (status == HAPT_OK) status = data_layout_find(file, model, rows, steps, &layout);
        if (status == HAPT_OK) status = data_check_values(file, &layout);
        hapt_h5_close(file);
    }
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}

void hapt_data_close(struct hapt_data *data)
{
    if (!data) return;
    hapt_shared_release(data->shared);
    free(data->own);
    free(data);
}

/* The number of a row among those of held-out data that are read, and whether it is one of them. */
static bool is_held_out(const struct hapt_data *data, int64_t step, int row, int64_t *number)
{
    *number = step * data->rows + row;
    return *number < data->held_out.used;
}

/* Rows that are read are evenly spaced in the file. Copies of the first one, without targets, fill the last step. */
static int64_t held_out_start(const struct hapt_data *data, int64_t step, int row)
{
    const struct data_layout *layout = &data->layout;
    const double spacing = (double)data->held_out.all / (double)data->held_out.used;
    int64_t number;
    if (!is_held_out(data, step, row, &number)) number = 0;
    if (data->held_out.used < data->held_out.all) number = (int64_t)((double)number * spacing);
    return number * (layout->exact || layout->images ? layout->stride : layout->width);
}

/* Offset of a row in the inputs. Targets that are not shifted inputs start at (offset / stride) * target_width. */
static int64_t row_start(const struct hapt_data *data, int64_t step, int row)
{
    const struct data_layout *layout = &data->layout;
    if (data->held_out.used > 0) return held_out_start(data, step, row);
    if (layout->exact) return (step * data->rows + row) * layout->stride;
    const int64_t key[2] = {step, row};
    const int64_t starts = layout->images ? layout->units : layout->units - layout->width;
    return (int64_t)(hapt_hash(data->seed, key, sizeof key) % (uint64_t)starts) * layout->stride;
}

static void copy_tokens(const struct hapt_data *data, int64_t first, int32_t *to)
{
    const int64_t width = data->layout.width;
    if (data->layout.type == HAPT_H5_I32) {
        memcpy(to, (const int32_t *)data->memory.inputs + first, (size_t)width * sizeof *to);
        return;
    }
    const uint16_t *from = (const uint16_t *)data->memory.inputs + first;
    for (int64_t i = 0; i < width; i++) to[i] = from[i];
}

static void copy_image(const struct hapt_data *data, int64_t first, float *to)
{
    const struct data_layout *layout = &data->layout;
    const int64_t pixels = layout->width / layout->channels;
    const uint8_t *narrow = (const uint8_t *)data->memory.inputs + first;
    const float *wide = (const float *)data->memory.inputs + first;
    for (int64_t c = 0; c < layout->channels; c++) {
        const float mean = data->memory.mean[c], std = data->memory.std[c];
        for (int64_t i = c * pixels; i < (c + 1) * pixels; i++)
            to[i] = ((layout->type == HAPT_H5_U8 ? (float)narrow[i] : wide[i]) - mean) / std;
    }
}

/* The targets of a row that starts at `start`, if they are not shifted inputs. */
static const int32_t *targets_of(const struct hapt_data *data, int64_t start)
{
    return data->memory.targets + start / data->layout.stride * data->layout.target_width;
}

static void copy_targets(const struct hapt_data *data, int64_t step, int row, int32_t *to)
{
    const struct data_layout *layout = &data->layout;
    const int64_t start = row_start(data, step, row), width = layout->target_width;
    int64_t number;
    if (data->held_out.used > 0 && !is_held_out(data, step, row, &number))
        for (int64_t i = 0; i < width; i++) to[i] = DATA_IGNORED;
    else if (layout->shifted)
        copy_tokens(data, start + 1, to);
    else
        memcpy(to, targets_of(data, start), (size_t)width * sizeof *to);
}

void hapt_data_read(const struct hapt_data *data, enum hapt_tensor_role role, int64_t step, int first, int count,
                    void *values)
{
    const struct data_layout *layout = &data->layout;
    const bool exists = !layout->exact || step < layout->units || data->held_out.used > 0;
    HAPT_ASSERT(first >= 0 && first + count <= data->rows && exists);
    for (int r = 0; r < count; r++) {
        const int64_t start = row_start(data, step, first + r);
        switch (role) {
        case HAPT_ROLE_TOKENS: copy_tokens(data, start, (int32_t *)values + r * layout->width); break;
        case HAPT_ROLE_IMAGES: copy_image(data, start, (float *)values + r * layout->width); break;
        case HAPT_ROLE_TARGETS:
        case HAPT_ROLE_LABELS: copy_targets(data, step, first + r, (int32_t *)values + r * layout->target_width); break;
        case HAPT_ROLE_NONE:
        case HAPT_ROLE_LOSS_SCALE: HAPT_ASSERT(!"a role that data fill");
        }
    }
}

static int64_t held_out_targets(const struct hapt_data *data, int64_t step)
{
    const struct data_layout *layout = &data->layout;
    int64_t count = 0, number;
    for (int row = 0; row < data->rows && is_held_out(data, step, row, &number); row++) {
        const int32_t *target = layout->shifted ? NULL : targets_of(data, held_out_start(data, step, row));
        for (int64_t i = 0; i < layout->target_width; i++) count += !target || target[i] != DATA_IGNORED;
    }
    return count;
}

int64_t hapt_data_targets(const struct hapt_data *data, int64_t step)
{
    if (data->held_out.used > 0) return held_out_targets(data, step);
    if (data->memory.target_count) return data->memory.target_count[step];
    return data->rows * data->layout.target_width;
}

enum { SAMPLE_BLOCK = 1 << 16, SAMPLE_BLOCKS = 1 << 10 };

/* Hashes all bytes, or evenly spaced blocks of large data. */
static uint64_t hash_sample(uint64_t seed, const void *memory, size_t bytes)
{
    const char *at = memory;
    if (bytes <= (size_t)SAMPLE_BLOCK * SAMPLE_BLOCKS) return hapt_hash(seed, at, bytes);
    const size_t stride = (bytes - SAMPLE_BLOCK) / (SAMPLE_BLOCKS - 1);
    for (size_t i = 0; i < SAMPLE_BLOCKS; i++) seed = hapt_hash(seed, at + i * stride, SAMPLE_BLOCK);
    return seed;
}

/* Hashes step by step, so that later steps (--steps) do not change the result. */
static uint64_t hash_batches(struct hapt_data *data, int64_t steps)
{
    const struct data_layout *layout = &data->layout;
    const size_t inputs = (size_t)layout->unit_inputs * input_bytes(layout),
                 targets = (size_t)layout->unit_targets * sizeof(int32_t);
    if (steps < data->known.steps) data->known.steps = 0, data->known.hash = 0;
    for (; data->known.steps < steps && data->known.steps < layout->units; data->known.steps++) {
        const size_t step = (size_t)data->known.steps;
        data->known.hash = hapt_hash(data->known.hash, (const char *)data->memory.inputs + step * inputs, inputs);
        if (targets > 0)
            data->known.hash =
                hapt_hash(data->known.hash, (const char *)data->memory.targets + step * targets, targets);
    }
    return data->known.hash;
}

void hapt_data_identify(struct hapt_data *data, int64_t steps, struct hapt_data_identity *identity)
{
    const struct data_layout *layout = &data->layout;
    *identity = (struct hapt_data_identity){.count = layout->exact ? steps : layout->units,
                                            .seed = layout->exact ? 0 : (int64_t)data->seed};
    snprintf(identity->kind, sizeof identity->kind, "%s%s", layout->images ? (layout->exact ? "image " : "images") : "",
             layout->exact    ? "batches"
             : layout->images ? ""
                              : "tokens");
    uint64_t hash = data->known.hash;
    if (layout->exact) {
        hash = hash_batches(data, steps);
    } else if (data->known.steps == 0) { /* only once */
        hash = hash_sample(0, data->memory.inputs, (size_t)(layout->units * layout->unit_inputs) * input_bytes(layout));
        if (!layout->shifted)
            hash = hash_sample(hash, data->memory.targets,
                               (size_t)(layout->units * layout->unit_targets) * sizeof(int32_t));
        data->known.steps = 1;
        data->known.hash = hash;
    }
    for (int64_t c = 0; c < layout->channels; c++) {
        const float scale[2] = {data->memory.mean[c], data->memory.std[c]};
        hash = hapt_hash(hash, scale, sizeof scale);
    }
    identity->checksum = (int64_t)hash;
}
