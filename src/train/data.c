/*
 * Rows of every step. A stream is sampled by hashing (seed, step, row). So any rank can compute any row, and a resumed
 * run needs only the step number. Held-out data come in order instead.
 */
#include "data.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "data_order.h"
#include "hapt/progress.h"

enum { MOST_SEARCHED = 1 << 24 /* tokens that are searched for the one that ends documents: tenths of a second */ };

struct hapt_data {
    struct data_layout layout;
    struct data_memory memory;
    struct data_column inputs, targets, field[HAPT_MOST_FIELDS];
    struct hapt_data_order order;
    bool drops;           /* the model has dropout, and the rows are not held out */
    int64_t document_end; /* token; -1: none */
    struct {
        int64_t all, used; /* rows of the file, and those that are read; 0: the data are not held out */
    } held_out;
    struct hapt_shared *shared; /* NULL: not reserved */
    const char *mapped;         /* the file; NULL: not mapped */
    void *own;                  /* data_of_rows: this rank's memory */
    struct {
        int64_t steps;
        uint64_t hash;
    } known; /* exact batches: identified so far */
};

/* A part of a block of memory of which *used bytes are taken; NULL if it is empty, or if there is no block yet. */
static void *take(char *block, size_t *used, int64_t elements, size_t size)
{
    char *const start = block && elements > 0 ? block + *used : NULL;
    *used += hapt_align((size_t)elements * size);
    return start;
}

/* Divides a block of memory into the parts of `memory`. Returns the size of the block, which may be NULL. */
static size_t divide(const struct data_layout *layout, char *block, struct data_memory *memory)
{
    const bool fields = layout->fields > 0;
    const int64_t inputs = fields || layout->inputs.blocks > 0 ? 0 : layout->units * layout->unit_inputs,
                  targets = fields || layout->targets.blocks > 0 ? 0 : layout->units * layout->unit_targets;
    size_t used = 0;
    memory->inputs = take(block, &used, inputs, hapt_h5_type_bytes(layout->type));
    memory->targets = take(block, &used, targets, sizeof(int32_t));
    memory->input_offset = take(block, &used, layout->inputs.blocks, sizeof(int64_t));
    memory->target_offset = take(block, &used, layout->targets.blocks, sizeof(int64_t));
    memory->target_count = take(block, &used, data_target_counts(layout), sizeof(int64_t));
    memory->mean = take(block, &used, layout->channels, sizeof(float));
    memory->std = take(block, &used, layout->channels, sizeof(float));
    for (int f = 0; f < layout->fields; f++) {
        const struct data_field *field = &layout->field[f];
        const int64_t elements = layout->units * layout->unit_inputs * field->width;
        memory->field[f].value = take(block, &used, field->store.blocks > 0 ? 0 : elements, sizeof(float));
        memory->field[f].offset = take(block, &used, field->store.blocks, sizeof(int64_t));
    }
    return used;
}

/* True if rows are whole units: images, or rows of fields. Else they start anywhere in a stream of tokens. */
static bool has_whole_rows(const struct data_layout *layout)
{
    return layout->images || layout->fields > 0;
}

static struct data_column column(const struct data_store *store, const void *copy, const char *mapped,
                                 const int64_t *offset)
{
    const bool in_file = store->blocks > 0;
    return (struct data_column){store->type, store->block, in_file ? mapped : copy, in_file ? offset : NULL};
}

/* Reserves one block per node, and maps the file if it stays there. */
static enum hapt_status reserve(const struct hapt_env *env, const char *path, struct hapt_data *data)
{
    const struct data_layout *layout = &data->layout;
    struct data_memory *memory = &data->memory;
    HAPT_TRY(hapt_shared_create(env, divide(layout, NULL, memory), &data->shared));
    divide(layout, hapt_shared_memory(data->shared), memory);
    int64_t blocks = layout->inputs.blocks + layout->targets.blocks;
    for (int f = 0; f < layout->fields; f++) blocks += layout->field[f].store.blocks;
    if (blocks > 0 && !data_map(path, layout, &data->mapped))
        return hapt_fail(HAPT_ERR_IO,
                         "do not change the file while it is read, and look for limits of memory (ulimit -v)",
                         "cannot map %s", path);
    data->inputs = column(&layout->inputs, memory->inputs, data->mapped, memory->input_offset);
    data->targets = column(&layout->targets, memory->targets, data->mapped, memory->target_offset);
    for (int f = 0; f < layout->fields; f++)
        data->field[f] = column(&layout->field[f].store, memory->field[f].value, data->mapped, memory->field[f].offset);
    return HAPT_OK;
}

/* Elements [first, first + count) of a column that are not `value`. */
static int64_t count_others(const struct data_column *column, int64_t first, int64_t count, int64_t value)
{
    int32_t element[DATA_COUNT_UNITS];
    int64_t counted = 0;
    for (int64_t done = 0, part; done < count; done += part) {
        part = count - done < DATA_COUNT_UNITS ? count - done : DATA_COUNT_UNITS;
        data_column_read(column, HAPT_H5_I32, first + done, part, element);
        for (int64_t i = 0; i < part; i++) counted += element[i] != value;
    }
    return counted;
}

/* A wrong token would silently keep no document apart, or leave no target. */
static enum hapt_status check_document_end(const struct hapt_env *env, const char *path, const struct hapt_data *data)
{
    const int64_t all = data->layout.units * data->layout.unit_inputs,
                  count = all < MOST_SEARCHED ? all : MOST_SEARCHED;
    if (env->world_rank != 0 || data->document_end < 0 || count == 0) return HAPT_OK;
    const int64_t others = count_others(&data->inputs, 0, count, data->document_end);
    if (others == 0)
        return hapt_fail(HAPT_ERR_INPUT, "give --document-end of hapt model or import the token that ends documents",
                         "%s: the first %lld tokens are all %lld, which ends documents", path, (long long)count,
                         (long long)data->document_end);
    if (others == count)
        hapt_warn(env, "%s: token %lld, which ends documents (--document-end), is not among the first %lld tokens\n",
                  path, (long long)data->document_end, (long long)count);
    return HAPT_OK;
}

/* order NULL: all rows, in any number per batch. */
enum hapt_status hapt_data_open(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                const struct hapt_data_order *order, struct hapt_data **data)
{
    struct hapt_h5 *file = NULL;
    struct data_layout layout = {0};
    struct hapt_data *made = calloc(1, sizeof *made);
    struct hapt_progress progress;
    hapt_progress_init(&progress, env, "loading data", 0);
    enum hapt_status status = made ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for data");
    if (status == HAPT_OK && env->node_rank == 0) {
        status = hapt_model_open_content(path, &file);
        if (status == HAPT_OK) status = data_layout_find(file, model, order, &layout);
        if (status == HAPT_OK) data_choose_stores(file, &layout);
    }
    status = hapt_env_agree(env->world, status);
    if (status == HAPT_OK) {
        MPI_Bcast(&layout, (int)sizeof layout, MPI_BYTE, 0, env->node);
        *made = (struct hapt_data){.layout = layout};
        if (order) made->order = *order;
        made->document_end = hapt_model_document_end(model);
        made->drops = order && hapt_model_input(model, HAPT_ROLE_ROW_KEYS) >= 0;
        status = hapt_env_agree(env->world, reserve(env, path, made));
    }
    if (status == HAPT_OK)
        status = hapt_env_agree(env->world, env->node_rank == 0 ? data_fill(file, &layout, &made->memory) : HAPT_OK);
    if (status == HAPT_OK) status = hapt_env_agree(env->world, hapt_shared_publish(made->shared));
    if (status == HAPT_OK) status = hapt_env_agree(env->world, check_document_end(env, path, made));
    hapt_h5_close(file);
    hapt_progress_release(&progress);
    if (status != HAPT_OK) {
        hapt_data_close(made);
        return status;
    }
    *data = made;
    return HAPT_OK;
}

enum hapt_status hapt_data_open_held_out(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                         int rows, int64_t most, struct hapt_data **data)
{
    struct hapt_data *made;
    HAPT_TRY(hapt_data_open(env, path, model, NULL, &made));
    const int64_t all = data_layout_rows(&made->layout);
    made->order.rows = rows;
    made->held_out.all = all;
    made->held_out.used = most > 0 && most < all ? most : all;
    if (all > 0) {
        *data = made;
        return HAPT_OK;
    }
    hapt_data_close(made);
    return hapt_env_agree(env->world, hapt_fail(HAPT_ERR_INPUT, "give more data", "%s holds no row", path));
}

enum hapt_status data_of_rows(int rows, int64_t width, int64_t document_end, struct hapt_data **data, int32_t **row)
{
    struct hapt_data *made = calloc(1, sizeof *made);
    int32_t *tokens = calloc((size_t)rows * ((size_t)width + 1), sizeof *tokens);
    if (!made || !tokens) {
        free(made);
        free(tokens);
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %d rows of tokens", rows);
    }
    *made = (struct hapt_data){.order.rows = rows,
                               .document_end = document_end,
                               .layout = {.exact = true,
                                          .shifted = true,
                                          .type = HAPT_H5_I32,
                                          .units = 1,
                                          .unit_inputs = rows * (width + 1),
                                          .width = width,
                                          .target_width = width,
                                          .stride = width + 1},
                               .inputs = {.type = HAPT_H5_I32, .base = (const char *)tokens},
                               .own = tokens};
    *data = made;
    *row = tokens;
    return HAPT_OK;
}

int64_t hapt_data_held_out_rows(const struct hapt_data *data)
{
    return data->held_out.used;
}

enum hapt_status hapt_data_check(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                 const struct hapt_data_order *order)
{
    struct hapt_h5 *file = NULL;
    struct data_layout layout = {0};
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, env, "checking data", 0);
    if (env->node_rank == 0) {
        status = hapt_model_open_content(path, &file);
        if (status == HAPT_OK) status = data_layout_find(file, model, order, &layout);
        if (status == HAPT_OK) status = data_check_values(file, &layout);
        hapt_h5_close(file);
    }
    hapt_progress_release(&progress);
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_data_rows(const struct hapt_env *env, const char *path, const struct hapt_model *model,
                                const struct hapt_data_order *order, int64_t *rows)
{
    struct hapt_h5 *file = NULL;
    struct data_layout layout;
    enum hapt_status status = HAPT_OK;
    *rows = 0;
    if (env->world_rank == 0) {
        status = hapt_model_open_content(path, &file);
        if (status == HAPT_OK) status = data_layout_find(file, model, order, &layout);
        if (status == HAPT_OK) *rows = data_layout_rows(&layout);
        hapt_h5_close(file);
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    MPI_Bcast(rows, 1, MPI_INT64_T, 0, env->world);
    return HAPT_OK;
}

void hapt_data_close(struct hapt_data *data)
{
    if (!data) return;
    hapt_shared_release(data->shared);
    if (data->mapped) munmap((void *)data->mapped, (size_t)data->layout.file_bytes);
    free(data->own);
    free(data);
}

/* The number of a row among those of held-out data that are read, and whether it is one of them. */
static bool is_held_out(const struct hapt_data *data, int64_t step, int row, int64_t *number)
{
    *number = step * data->order.rows + row;
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
    return number * (layout->exact || has_whole_rows(layout) ? layout->stride : layout->width);
}

/* Each row comes once per epoch. A stream is cut into rows. The tokens that fill no row shift the cuts, differently in
 * each epoch. */
static int64_t epoch_start(const struct hapt_data *data, int64_t number)
{
    const struct data_layout *layout = &data->layout;
    const int64_t rows = data_layout_rows(layout), epoch = number / rows;
    const int64_t place = data_order_row(data->order.seed, epoch, rows, number % rows);
    if (has_whole_rows(layout)) return place * layout->stride;
    const int64_t left = layout->units - layout->shifted - rows * layout->width;
    const uint64_t shift = hapt_hash_word(~data->order.seed, epoch) % (uint64_t)(left + 1);
    return place * layout->width + (int64_t)shift;
}

/* Offset of a row in the inputs. */
static int64_t row_start(const struct hapt_data *data, int64_t step, int row)
{
    const struct data_layout *layout = &data->layout;
    if (data->held_out.used > 0) return held_out_start(data, step, row);
    if (layout->exact) return (step * data->order.rows + row) * layout->stride;
    if (data->order.epochs) return epoch_start(data, step * data->order.rows + row);
    const int64_t key[2] = {step, row};
    const int64_t starts = has_whole_rows(layout) ? layout->units : layout->units - layout->width + !layout->shifted;
    return (int64_t)(hapt_hash(data->order.seed, key, sizeof key) % (uint64_t)starts) * layout->stride;
}

static void copy_tokens(const struct hapt_data *data, int64_t first, int32_t *to)
{
    data_column_read(&data->inputs, HAPT_H5_I32, first, data->layout.width, to);
}

/* Positions in documents. The first token of a row begins one. */
static void copy_positions(const struct hapt_data *data, int64_t first, int32_t *to)
{
    int32_t position = 0;
    copy_tokens(data, first, to);
    for (int64_t i = 0; i < data->layout.width; i++) {
        const bool ends = to[i] == data->document_end;
        to[i] = position;
        position = ends ? 0 : position + 1;
    }
}

/* Excludes the targets of tokens that end a document, in a row of shifted inputs. */
static void exclude_next_documents(const struct hapt_data *data, int64_t first, int32_t *target)
{
    int32_t token;
    if (data->document_end < 0) return;
    data_column_read(&data->inputs, HAPT_H5_I32, first, 1, &token);
    for (int64_t i = 0; i < data->layout.target_width; i++) {
        const bool ends = token == data->document_end;
        token = target[i];
        if (ends) target[i] = DATA_IGNORED;
    }
}

static void copy_image(const struct hapt_data *data, int64_t first, float *to)
{
    const struct data_layout *layout = &data->layout;
    const int64_t pixels = layout->width / layout->channels;
    data_column_read(&data->inputs, HAPT_H5_F32, first, layout->width, to);
    for (int64_t c = 0; c < layout->channels; c++) {
        const float mean = data->memory.mean[c], std = data->memory.std[c];
        for (int64_t i = c * pixels; i < (c + 1) * pixels; i++) to[i] = (to[i] - mean) / std;
    }
}

/* The first target of a row that starts at `start`, if they are not shifted inputs. */
static int64_t target_start(const struct hapt_data *data, int64_t start)
{
    return start / data->layout.stride * data->layout.target_stride;
}

static void copy_targets(const struct hapt_data *data, int64_t step, int row, int32_t *to)
{
    const struct data_layout *layout = &data->layout;
    const int64_t start = row_start(data, step, row), width = layout->target_width;
    int64_t number;
    if (data->held_out.used > 0 && !is_held_out(data, step, row, &number))
        for (int64_t i = 0; i < width; i++) to[i] = DATA_IGNORED;
    else if (!layout->shifted)
        data_column_read(&data->targets, HAPT_H5_I32, target_start(data, start), width, to);
    else {
        copy_tokens(data, start + 1, to);
        exclude_next_documents(data, start, to);
    }
}

/* Random key of a row of a step. Other hashes of these numbers choose the row itself. */
static void make_key(const struct hapt_data *data, int64_t step, int row, int32_t to[2])
{
    const int64_t about[] = {step, row, HAPT_ROLE_ROW_KEYS};
    const uint64_t key = hapt_hash(data->order.seed, about, sizeof about) | 1; /* never 0 0 */
    to[0] = data->drops ? (int32_t)(uint32_t)key : 0;
    to[1] = data->drops ? (int32_t)(uint32_t)(key >> 32) : 0;
}

/* Elements of a row of a field. Held-out data end with rows whose targets the loss ignores. */
static void copy_field(const struct hapt_data *data, int number, int64_t step, int row, void *to)
{
    const struct data_field *field = &data->layout.field[number];
    const int64_t start = row_start(data, step, row) * field->width;
    int64_t order;
    if (!field->target || data->held_out.used == 0 || is_held_out(data, step, row, &order))
        data_column_read(&data->field[number], field->type, start, field->width, to);
    else if (field->type == HAPT_H5_I32)
        for (int64_t i = 0; i < field->width; i++) ((int32_t *)to)[i] = DATA_IGNORED;
    else
        for (int64_t i = 0; i < field->width; i++) ((float *)to)[i] = NAN;
}

void hapt_data_read(const struct hapt_data *data, enum hapt_tensor_role role, int field, int64_t step, int first,
                    int count, void *values)
{
    const struct data_layout *layout = &data->layout;
    const bool exists = !layout->exact || step < layout->units || data->held_out.used > 0;
    HAPT_ASSERT(first >= 0 && first + count <= data->order.rows && exists);
    for (int r = 0; r < count; r++) {
        const int64_t start = row_start(data, step, first + r);
        switch (role) {
        case HAPT_ROLE_TOKENS: copy_tokens(data, start, (int32_t *)values + r * layout->width); break;
        case HAPT_ROLE_POSITIONS: copy_positions(data, start, (int32_t *)values + r * layout->width); break;
        case HAPT_ROLE_IMAGES: copy_image(data, start, (float *)values + r * layout->width); break;
        case HAPT_ROLE_TARGETS:
        case HAPT_ROLE_LABELS: copy_targets(data, step, first + r, (int32_t *)values + r * layout->target_width); break;
        case HAPT_ROLE_ROW_KEYS: make_key(data, step, first + r, (int32_t *)values + 2 * r); break;
        case HAPT_ROLE_FIELD: {
            const int64_t width = layout->field[field].width;
            copy_field(data, field, step, first + r, (float *)values + r * width); /* int32 has as many bytes */
            break;
        }
        case HAPT_ROLE_NONE:
        case HAPT_ROLE_LOSS_SCALE:
        case HAPT_ROLE_TRAINING: HAPT_ASSERT(!"a role that data fill");
        }
    }
}

/* Targets in [first, first + count) that are not excluded. */
static int64_t count_targets(const struct hapt_data *data, int64_t first, int64_t count)
{
    return count_others(&data->targets, first, count, DATA_IGNORED);
}

/* Targets of a stream before `end`. */
static int64_t targets_before(const struct hapt_data *data, int64_t end)
{
    const int64_t block = end / DATA_COUNT_UNITS, first = block * DATA_COUNT_UNITS;
    if (first == end && end == data->layout.units) /* there is no count behind the last block */
        return data->memory.target_count[block - 1] + count_targets(data, first - DATA_COUNT_UNITS, DATA_COUNT_UNITS);
    return data->memory.target_count[block] + count_targets(data, first, end - first);
}

/* Elements of the targets of a row of fields that the loss counts. */
static int64_t field_targets(const struct hapt_data *data, int64_t row)
{
    const struct data_layout *layout = &data->layout;
    float value[DATA_COUNT_UNITS];
    int64_t count = 0;
    int f = 0;
    while (!layout->field[f].target) f++;
    const struct data_field *field = &layout->field[f];
    if (field->type == HAPT_H5_I32)
        return count_others(&data->field[f], row * field->width, field->width, DATA_IGNORED);
    for (int64_t done = 0, part; done < field->width; done += part) {
        part = field->width - done < DATA_COUNT_UNITS ? field->width - done : DATA_COUNT_UNITS;
        data_column_read(&data->field[f], HAPT_H5_F32, row * field->width + done, part, value);
        for (int64_t i = 0; i < part; i++) count += !isnan(value[i]);
    }
    return count;
}

static int64_t row_targets(const struct hapt_data *data, int64_t start)
{
    const struct data_layout *layout = &data->layout;
    if (layout->fields > 0) return layout->exact ? field_targets(data, start) : data->memory.target_count[start];
    if (layout->shifted && data->document_end >= 0)
        return count_others(&data->inputs, start, layout->target_width, data->document_end);
    if (layout->shifted || (layout->images && !layout->pixels)) return layout->target_width;
    if (layout->pixels && !layout->exact) return data->memory.target_count[start / layout->stride];
    if (layout->exact) return count_targets(data, target_start(data, start), layout->target_width);
    return targets_before(data, start + layout->width) - targets_before(data, start);
}

int64_t hapt_data_targets(const struct hapt_data *data, int64_t step)
{
    const struct data_layout *layout = &data->layout;
    const bool held_out = data->held_out.used > 0;
    int64_t count = 0, number;
    if (!held_out && layout->exact && data->memory.target_count) return data->memory.target_count[step];
    if (!held_out && data->document_end < 0 && (layout->shifted || layout->images) && !layout->pixels)
        return data->order.rows * layout->target_width;
    for (int row = 0; row < data->order.rows; row++)
        if (!held_out || is_held_out(data, step, row, &number)) count += row_targets(data, row_start(data, step, row));
    return held_out || count > 0 ? count : 1;
}

enum { SAMPLE_BLOCK = 1 << 16, SAMPLE_BLOCKS = 1 << 10 };

/* Hashes the bytes [first, first + bytes) of the column's elements as `type`. */
static uint64_t hash_part(uint64_t hash, const struct data_column *column, enum hapt_h5_type type, size_t first,
                          size_t bytes)
{
    const size_t size = hapt_h5_type_bytes(type);
    char part[4096];
    for (size_t done = 0, used; done < bytes; done += used) {
        const size_t at = first + done, cut = at % size;
        used = bytes - done < sizeof part - cut - size ? bytes - done : sizeof part - cut - size;
        data_column_read(column, type, (int64_t)(at / size), (int64_t)((cut + used + size - 1) / size), part);
        hash = hapt_hash_add(hash, part + cut, used);
    }
    return hash;
}

static uint64_t hash_column(uint64_t seed, const struct data_column *column, enum hapt_h5_type type, size_t first,
                            size_t bytes)
{
    return hapt_hash_end(hash_part(hapt_hash_begin(seed), column, type, first, bytes), bytes);
}

/* Hashes all bytes, or evenly spaced blocks of large data. */
static uint64_t hash_sample(uint64_t seed, const struct data_column *column, enum hapt_h5_type type, int64_t elements)
{
    const size_t bytes = (size_t)elements * hapt_h5_type_bytes(type);
    if (bytes <= (size_t)SAMPLE_BLOCK * SAMPLE_BLOCKS) return hash_column(seed, column, type, 0, bytes);
    const size_t stride = (bytes - SAMPLE_BLOCK) / (SAMPLE_BLOCKS - 1);
    for (size_t i = 0; i < SAMPLE_BLOCKS; i++) seed = hash_column(seed, column, type, i * stride, SAMPLE_BLOCK);
    return seed;
}

/* Hashes step by step, so that later steps (--steps) do not change the result. */
static uint64_t hash_batches(struct hapt_data *data, int64_t steps)
{
    const struct data_layout *layout = &data->layout;
    const size_t inputs = (size_t)layout->unit_inputs * hapt_h5_type_bytes(layout->type),
                 targets = (size_t)layout->unit_targets * sizeof(int32_t);
    if (steps < data->known.steps) data->known.steps = 0, data->known.hash = 0;
    const bool fields = layout->fields > 0;
    for (; data->known.steps < steps && data->known.steps < layout->units; data->known.steps++) {
        const size_t step = (size_t)data->known.steps;
        for (int f = 0; f < layout->fields; f++) {
            const size_t bytes = (size_t)(layout->unit_inputs * layout->field[f].width) * sizeof(float);
            data->known.hash =
                hash_column(data->known.hash, &data->field[f], layout->field[f].type, step * bytes, bytes);
        }
        if (!fields)
            data->known.hash = hash_column(data->known.hash, &data->inputs, layout->type, step * inputs, inputs);
        if (!fields && targets > 0)
            data->known.hash = hash_column(data->known.hash, &data->targets, HAPT_H5_I32, step * targets, targets);
    }
    return data->known.hash;
}

void hapt_data_identify(struct hapt_data *data, int64_t steps, struct hapt_data_identity *identity)
{
    const struct data_layout *layout = &data->layout;
    const bool held_out = data->held_out.used > 0;
    if (held_out) steps = layout->units;
    *identity = (struct hapt_data_identity){.count = layout->exact ? steps : layout->units,
                                            .seed = layout->exact && !data->drops ? 0 : (int64_t)data->order.seed,
                                            .epochs = data->order.epochs};
    const char *rows = layout->images ? "image" : layout->fields > 0 ? "row" : NULL;
    if (layout->exact)
        snprintf(identity->kind, sizeof identity->kind, "%s%sbatches", rows ? rows : "", rows ? " " : "");
    else
        snprintf(identity->kind, sizeof identity->kind, "%ss", rows ? rows : "token");
    uint64_t hash = data->known.hash;
    if (layout->exact) {
        hash = hash_batches(data, steps);
    } else if (data->known.steps == 0) { /* only once */
        for (int f = 0; f < layout->fields; f++)
            hash = hash_sample(hash, &data->field[f], layout->field[f].type, layout->units * layout->field[f].width);
        if (layout->fields == 0)
            hash = hash_sample(0, &data->inputs, layout->type, layout->units * layout->unit_inputs);
        if (layout->fields == 0 && !layout->shifted)
            hash = hash_sample(hash, &data->targets, HAPT_H5_I32, layout->units * layout->unit_targets);
        data->known.steps = 1;
        data->known.hash = hash;
    }
    for (int64_t c = 0; c < layout->channels; c++) {
        const float scale[2] = {data->memory.mean[c], data->memory.std[c]};
        hash = hapt_hash(hash, scale, sizeof scale);
    }
    if (held_out) hash = hapt_hash_word(hash, data->held_out.used);
    if (data->document_end >= 0) hash = hapt_hash_word(hash, data->document_end);
    identity->checksum = (int64_t)hash;
}
