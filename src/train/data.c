/*
 * Rows of every step. A stream is sampled by hashing (seed, step, row), so any rank can give any row of any step and a
 * continued run needs no position but the step.
 */
#include <stdlib.h>
#include <string.h>

#include "hapt/train.h"

#define MAX_ELEMENTS ((int64_t)1 << 36)
#define READ_ELEMENTS ((int64_t)1 << 20) /* of one read */

struct hapt_data {
    bool exact; /* batches; else a stream */
    int rows, sequence;
    uint64_t seed;
    int64_t rows_read;    /* stream: tokens; batches: steps */
    int64_t row_elements; /* stream: 1; batches: rows * (T + 1) */
    bool wide;            /* int32, else uint16 */
    const uint16_t *narrow_token;
    const int32_t *wide_token;
    MPI_Win window;
};

/* What node rank 0 finds before memory is reserved. */
struct finding {
    int64_t rows_read, row_elements, exact;
};

static enum hapt_status look_at_batches(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                                        struct finding *finding)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const char *path = hapt_h5_path(file);
    HAPT_TRY(hapt_h5_shape(file, "/batches", &dims, shape));
    if (dims != 3)
        return hapt_fail(HAPT_ERR_INPUT, "store it as [step][row][T + 1]", "%s: /batches has %d dimensions", path,
                         dims);
    if (shape[1] != rows)
        return hapt_fail(HAPT_ERR_INPUT, "rows of a step are --microbatches times the model's --microbatch",
                         "%s: a batch has %lld rows, a step takes %d (%d microbatches of %d)", path,
                         (long long)shape[1], rows, rows / model->microbatch, model->microbatch);
    if (shape[2] != model->sequence + 1)
        return hapt_fail(HAPT_ERR_INPUT, "make the model with the sequence length of the data",
                         "%s: a row has %lld tokens, the model's sequence of %d needs %d", path, (long long)shape[2],
                         model->sequence, model->sequence + 1);
    if (shape[0] < steps)
        return hapt_fail(HAPT_ERR_INPUT, "give fewer --steps or more data", "%s holds %lld batches for %lld steps",
                         path, (long long)shape[0], (long long)steps);
    *finding = (struct finding){.rows_read = steps, .row_elements = shape[1] * shape[2], .exact = 1};
    return HAPT_OK;
}

static enum hapt_status look_at_tokens(struct hapt_h5 *file, const struct hapt_model *model, struct finding *finding)
{
    int dims = 0;
    int64_t shape[HAPT_H5_MAX_DIMS];
    const char *path = hapt_h5_path(file);
    if (!hapt_h5_exists(file, "/tokens"))
        return hapt_fail(HAPT_ERR_INPUT, "make one with `hapt data text.txt --output tokens.h5`",
                         "%s holds neither /tokens nor /batches", path);
    HAPT_TRY(hapt_h5_shape(file, "/tokens", &dims, shape));
    if (dims != 1) return hapt_fail(HAPT_ERR_INPUT, "store it as [n]", "%s: /tokens has %d dimensions", path, dims);
    if (shape[0] <= model->sequence)
        return hapt_fail(HAPT_ERR_INPUT, "give more text or a shorter --sequence",
                         "%s holds %lld tokens, a row takes %d", path, (long long)shape[0], model->sequence + 1);
    *finding = (struct finding){.rows_read = shape[0], .row_elements = 1};
    return HAPT_OK;
}

static enum hapt_status look(struct hapt_h5 *file, const struct hapt_model *model, int rows, int64_t steps,
                             struct finding *finding)
{
    HAPT_TRY(hapt_h5_exists(file, "/batches") ? look_at_batches(file, model, rows, steps, finding)
                                              : look_at_tokens(file, model, finding));
    if (finding->rows_read > MAX_ELEMENTS / finding->row_elements)
        return hapt_fail(HAPT_ERR_INPUT, "split it", "%s holds more than %lld tokens", hapt_h5_path(file),
                         (long long)MAX_ELEMENTS);
    return HAPT_OK;
}

static enum hapt_status store(struct hapt_data *data, const int32_t *token, int64_t first, int64_t count, int vocab,
                              const char *path)
{
    for (int64_t i = 0; i < count; i++) {
        if (token[i] < 0 || token[i] >= vocab)
            return hapt_fail(HAPT_ERR_INPUT, "train a model with the vocabulary of the data",
                             "%s: token %d at %lld is outside the model's vocabulary of %d", path, token[i],
                             (long long)(first + i), vocab);
    }
    if (data->wide)
        memcpy((int32_t *)data->wide_token + first, token, (size_t)count * sizeof *token);
    else
        for (int64_t i = 0; i < count; i++) ((uint16_t *)data->narrow_token)[first + i] = (uint16_t)token[i];
    return HAPT_OK;
}

static enum hapt_status fill(struct hapt_h5 *file, struct hapt_data *data, int vocab)
{
    const char *name = data->exact ? "/batches" : "/tokens";
    int64_t block = READ_ELEMENTS / data->row_elements;
    if (block < 1) block = 1;
    int32_t *buffer = malloc((size_t)(block * data->row_elements) * sizeof *buffer);
    if (!buffer) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to read tokens");
    enum hapt_status status = HAPT_OK;
    for (int64_t first = 0; first < data->rows_read && status == HAPT_OK; first += block) {
        const int64_t count = data->rows_read - first < block ? data->rows_read - first : block;
        status = hapt_h5_read_rows(file, name, HAPT_H5_I32, first, count, buffer);
        if (status == HAPT_OK)
            status =
                store(data, buffer, first * data->row_elements, count * data->row_elements, vocab, hapt_h5_path(file));
    }
    free(buffer);
    return status;
}

static enum hapt_status reserve(const struct hapt_env *env, struct hapt_data *data)
{
    const size_t bytes = (size_t)(data->rows_read * data->row_elements) * (data->wide ? 4 : 2);
    void *memory;
    MPI_Aint size;
    int unit;
    HAPT_MPI(MPI_Win_allocate_shared(env->node_rank == 0 ? (MPI_Aint)bytes : 0, 1, MPI_INFO_NULL, env->node, &memory,
                                     &data->window));
    HAPT_MPI(MPI_Win_shared_query(data->window, 0, &size, &unit, &memory));
    if (data->wide)
        data->wide_token = memory;
    else
        data->narrow_token = memory;
    return HAPT_OK;
}

enum hapt_status hapt_data_open(const struct hapt_env *env, const char *path, const struct hapt_model *model, int rows,
                                int64_t steps, uint64_t seed, struct hapt_data **data)
{
    struct hapt_h5 *file = NULL;
    struct finding finding = {0};
    struct hapt_data *made = calloc(1, sizeof *made);
    enum hapt_status status = made ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for data");
    if (status == HAPT_OK && env->node_rank == 0) {
        status = hapt_h5_open(path, NULL, 1, true, &file);
        if (status == HAPT_OK) status = look(file, model, rows, steps, &finding);
    }
    status = hapt_env_agree(env->world, status);
    if (status == HAPT_OK) {
        MPI_Bcast(&finding, (int)sizeof finding, MPI_BYTE, 0, env->node);
        *made = (struct hapt_data){.exact = finding.exact != 0,
                                   .rows = rows,
                                   .sequence = model->sequence,
                                   .seed = seed,
                                   .rows_read = finding.rows_read,
                                   .row_elements = finding.row_elements,
                                   .wide = model->vocab > 65536,
                                   .window = MPI_WIN_NULL};
        status = hapt_env_agree(env->world, reserve(env, made));
    }
    if (status == HAPT_OK)
        status = hapt_env_agree(env->world, env->node_rank == 0 ? fill(file, made, model->vocab) : HAPT_OK);
    hapt_h5_close(file);
    if (status != HAPT_OK) {
        if (made && made->window)
            hapt_data_close(made);
        else
            free(made);
        return status;
    }
    *data = made;
    return HAPT_OK;
}

void hapt_data_close(struct hapt_data *data)
{
    if (!data) return;
    if (data->window != MPI_WIN_NULL) MPI_Win_free(&data->window);
    free(data);
}

static int64_t row_start(const struct hapt_data *data, int64_t step, int row)
{
    if (data->exact) return (step * data->rows + row) * (data->sequence + 1);
    const int64_t key[2] = {step, row};
    return (int64_t)(hapt_hash(data->seed, key, sizeof key) % (uint64_t)(data->rows_read - data->sequence));
}

static void copy(const struct hapt_data *data, int64_t first, int32_t *to)
{
    if (data->wide)
        memcpy(to, data->wide_token + first, (size_t)data->sequence * sizeof *to);
    else
        for (int i = 0; i < data->sequence; i++) to[i] = data->narrow_token[first + i];
}

void hapt_data_rows(const struct hapt_data *data, int64_t step, int first, int count, int32_t *inputs, int32_t *targets)
{
    HAPT_ASSERT(first >= 0 && first + count <= data->rows && (!data->exact || step < data->rows_read));
    for (int r = 0; r < count; r++) {
        const int64_t start = row_start(data, step, first + r);
        if (inputs) copy(data, start, inputs + (size_t)r * (size_t)data->sequence);
        if (targets) copy(data, start + 1, targets + (size_t)r * (size_t)data->sequence);
    }
}

int64_t hapt_data_targets(const struct hapt_data *data, int64_t step)
{
    (void)step; /* every position of every row is a target */
    return (int64_t)data->rows * data->sequence;
}
