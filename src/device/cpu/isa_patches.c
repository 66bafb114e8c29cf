/*
 * Images as sequences of tokens: patch embedding (a convolution whose stride is its kernel), the class token with
 * learned positions, scales of columns, and what the classifier takes: one token, or one and a mean. Patches are packed
 * as rows and use the kernels of linear layers.
 */
#include "isa.h"

struct patches {
    int64_t channels, height, width, patch_height, patch_width;
    int64_t down, across, rows,
        columns; /* patches per column and row of an image; patch rows in total; elements of a patch */
};

/* images [batch][c][height][width], weight [out][c][patch height][patch width] */
static struct patches patches_of(const struct hapt_view *images, const struct hapt_view *weight)
{
    struct patches of = {.channels = images->shape[1],
                         .height = images->shape[2],
                         .width = images->shape[3],
                         .patch_height = weight->shape[2],
                         .patch_width = weight->shape[3]};
    of.down = of.height / of.patch_height;
    of.across = of.width / of.patch_width;
    of.rows = images->shape[0] * of.down * of.across;
    of.columns = of.channels * of.patch_height * of.patch_width;
    return of;
}

static size_t packed_bytes(const struct patches *of, enum hapt_dtype dtype)
{
    return hapt_align((size_t)(of->rows * of->columns) * hapt_dtype_bytes(dtype));
}

/* Row r of packed patches: [c][patch height][patch width]. */
INLINE void pack_row(const struct patches *of, const float *images, int64_t r, bool half, void *packed)
{
    const int64_t of_image = of->down * of->across, image = r / of_image;
    const int64_t y = r % of_image / of->across * of->patch_height, x = r % of->across * of->patch_width;
    int64_t to = r * of->columns;
    for (int64_t c = 0; c < of->channels; c++)
        for (int64_t line = 0; line < of->patch_height; line++, to += of->patch_width) {
            const int64_t from = ((image * of->channels + c) * of->height + y + line) * of->width + x;
            for (int64_t k = 0; k < of->patch_width; k += LANES)
                store(packed, to + k, of->patch_width - k, half, load(images, from + k, of->patch_width - k, false));
        }
}

INLINE void pack(const struct hapt_call *call, const struct patches *of, bool half)
{
    const float *images = call->input[0].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, of->rows * of->columns))
    for (int64_t r = 0; r < of->rows; r++) pack_row(of, images, r, half, call->workspace);
}

/* The same tensor as a matrix. */
static struct hapt_view matrix(void *data, enum hapt_dtype dtype, int64_t rows, int64_t columns)
{
    return (struct hapt_view){.data = data, .dtype = dtype, .dims = 2, .shape = {rows, columns}};
}

/* The call of the linear layer on packed patches: y = patches weight' + bias, or its dw and db. */
static struct hapt_call linear_call(const struct hapt_call *call, const struct patches *of, enum hapt_dtype dtype,
                                    bool backward)
{
    struct hapt_call linear = {.threads = call->threads, .accumulate = call->accumulate};
    const struct hapt_view *weight = backward ? &call->output[0] : &call->input[1];
    const struct hapt_view *y = backward ? &call->input[1] : &call->output[0];
    const int64_t out = weight->shape[0];
    linear.input_count = backward ? 2 : call->input_count;
    linear.output_count = call->output_count;
    linear.input[0] = matrix(call->workspace, dtype, of->rows, of->columns);
    linear.input[1] = backward ? matrix(y->data, dtype, of->rows, out) : matrix(weight->data, dtype, out, of->columns);
    linear.output[0] =
        backward ? matrix(weight->data, HAPT_F32, out, of->columns) : matrix(y->data, dtype, of->rows, out);
    if (!backward) linear.input[2] = call->input[2];
    if (backward) linear.output[1] = call->output[1];
    return linear;
}

static size_t embedding_workspace(const struct hapt_call *call, enum hapt_dtype dtype, bool backward)
{
    const struct patches of = patches_of(&call->input[0], backward ? &call->output[0] : &call->input[1]);
    const struct hapt_kernel *kernel = hapt_cpu_kernel_find(backward ? "linear_t_dw" : "linear_t", dtype);
    const struct hapt_call linear = linear_call(call, &of, dtype, backward);
    return packed_bytes(&of, dtype) + (kernel->workspace_bytes ? kernel->workspace_bytes(&linear) : 0);
}

INLINE enum hapt_status embedding_run(const struct hapt_call *call, struct hapt_queue *queue, enum hapt_dtype dtype,
                                      bool backward)
{
    const struct patches of = patches_of(&call->input[0], backward ? &call->output[0] : &call->input[1]);
    const struct hapt_kernel *kernel = hapt_cpu_kernel_find(backward ? "linear_t_dw" : "linear_t", dtype);
    struct hapt_call linear = linear_call(call, &of, dtype, backward);
    const size_t packed = packed_bytes(&of, dtype); /* first in the workspace */
    linear.workspace = (char *)call->workspace + packed;
    linear.workspace_bytes = call->workspace_bytes - packed;
    if (dtype == HAPT_BF16)
        pack(call, &of, true);
    else
        pack(call, &of, false);
    return kernel->run(&linear, queue);
}

#define EMBEDDING(name, dtype, backward)                                                 \
    static size_t name##_workspace(const struct hapt_call *call)                         \
    {                                                                                    \
        return embedding_workspace(call, dtype, backward);                               \
    }                                                                                    \
    static enum hapt_status name(const struct hapt_call *call, struct hapt_queue *queue) \
    {                                                                                    \
        return embedding_run(call, queue, dtype, backward);                              \
    }

EMBEDDING(embedding_f32, HAPT_F32, false)
EMBEDDING(embedding_bf16, HAPT_BF16, false)
EMBEDDING(embedding_dw_f32, HAPT_F32, true)
EMBEDDING(embedding_dw_bf16, HAPT_BF16, true)

/* y [batch][patches + 1][d]: the class token, then the patches; positions added to all. input: x, class, positions */
INLINE void class_token_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t rows = view_rows(y), length = y->shape[1], d = y->shape[2];
    const void *x = call->input[0].data, *class = call->input[1].data, *position = call->input[2].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *d))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t b = r / length, t = r % length;
        for (int64_t c = 0; c < d; c += LANES) {
            const vector token =
                t == 0 ? load(class, c, d - c, half) : load(x, (b * (length - 1) + t - 1) * d + c, d - c, half);
            store(y->data, r * d + c, d - c, half, token + load(position, t * d + c, d - c, half));
        }
    }
}

/* Input: dy [batch][length][d]; output: dx, dclass, dposition. A thread owns positions and sums over the batch. */
INLINE void class_token_backward_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *view = &call->input[0];
    const int64_t batch = view->shape[0], length = view->shape[1], d = view->shape[2];
    const void *dy = view->data;
    void *dx = call->output[0].data;
    float *dclass = call->output[1].data, *dposition = call->output[2].data;
    const unsigned add = call->accumulate;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, batch *length *d))
    for (int64_t t = 0; t < length; t++)
        for (int64_t c = 0; c < d; c += LANES) {
            const int64_t left = d - c;
            vector sum = {0};
            for (int64_t b = 0; b < batch; b++) {
                const vector value = load(dy, (b * length + t) * d + c, left, half);
                const int64_t to = (b * (length - 1) + t - 1) * d + c;
                sum += value;
                if (t > 0) store(dx, to, left, half, add & 1u ? value + load(dx, to, left, half) : value);
            }
            const int64_t at = t * d + c;
            if (t == 0) store(dclass, c, left, false, add & 2u ? sum + load(dclass, c, left, false) : sum);
            store(dposition, at, left, false, add & 4u ? sum + load(dposition, at, left, false) : sum);
        }
}

/* y [batch][d] = x [batch][length][d] at token integer[0]. */
INLINE void take_token_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    const int64_t length = x->shape[1], d = x->shape[2];
    for (int64_t b = 0; b < x->shape[0]; b++)
        for (int64_t c = 0; c < d; c += LANES)
            store(y->data, b * d + c, d - c, half, load(x->data, (b * length + call->integer[0]) * d + c, d - c, half));
}

/* dx: dy at the token, zero elsewhere. */
INLINE void take_token_dx_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dy = &call->input[0], *dx = &call->output[0];
    const int64_t length = dx->shape[1], d = dx->shape[2], element = half ? 2 : 4;
    const bool add = call->accumulate & 1u;
    for (int64_t b = 0; b < dx->shape[0]; b++) {
        const int64_t to = (b * length + call->integer[0]) * d;
        if (!add) memset((char *)dx->data + b * length * d * element, 0, (size_t)(length * d * element));
        for (int64_t c = 0; c < d; c += LANES) {
            vector value = load(dy->data, b * d + c, d - c, half);
            if (add) value += load(dx->data, to + c, d - c, half);
            store(dx->data, to + c, d - c, half, value);
        }
    }
}

/* y = gamma x. input: x, gamma */
INLINE void layer_scale_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t rows = view_rows(y), d = view_columns(y);
    const void *x = call->input[0].data, *gamma = call->input[1].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *d))
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < d; c += LANES)
            store(y->data, r * d + c, d - c, half, load(gamma, c, d - c, half) * load(x, r * d + c, d - c, half));
}

/* Input: x, gamma, dy; output: dx, dgamma. Threads own columns and sum the rows in order. */
INLINE void layer_scale_backward_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *view = &call->input[2];
    const int64_t rows = view_rows(view), d = view_columns(view);
    const void *x = call->input[0].data, *gamma = call->input[1].data;
    void *dx = call->output[0].data;
    float *dgamma = call->output[1].data;
    const unsigned add = call->accumulate;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *d))
    for (int64_t c = 0; c < d; c += LANES) {
        const int64_t left = d - c;
        const vector scale = load(gamma, c, left, half);
        vector sum = {0};
        for (int64_t r = 0; r < rows; r++) {
            const int64_t at = r * d + c;
            const vector dy = load(view->data, at, left, half), value = scale * dy;
            sum += dy * load(x, at, left, half);
            if (dx) store(dx, at, left, half, add & 1u ? value + load(dx, at, left, half) : value);
        }
        if (dgamma) store(dgamma, c, left, false, add & 2u ? sum + load(dgamma, c, left, false) : sum);
    }
}

/* y [batch][2 d]: of x [batch][length][d], the first token, then the mean of the others. */
INLINE void class_and_mean_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0];
    const int64_t batch = x->shape[0], length = x->shape[1], d = x->shape[2];
    const float share = 1.0f / (float)(length - 1);
    void *y = call->output[0].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, batch *length *d))
    for (int64_t b = 0; b < batch; b++)
        for (int64_t c = 0; c < d; c += LANES) {
            const int64_t left = d - c, from = b * length * d + c;
            vector sum = {0};
            for (int64_t t = 1; t < length; t++) sum += load(x->data, from + t * d, left, half);
            store(y, 2 * b * d + c, left, half, load(x->data, from, left, half));
            store(y, (2 * b + 1) * d + c, left, half, sum * share);
        }
}

INLINE void class_and_mean_dx_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dx = &call->output[0];
    const int64_t rows = view_rows(dx), length = dx->shape[1], d = dx->shape[2];
    const float share = 1.0f / (float)(length - 1);
    const void *dy = call->input[0].data;
    const bool add = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *d))
    for (int64_t r = 0; r < rows; r++) {
        const int64_t b = r / length, from = (2 * b + (r % length > 0)) * d;
        for (int64_t c = 0; c < d; c += LANES) {
            const int64_t left = d - c;
            vector value = load(dy, from + c, left, half);
            if (r % length > 0) value *= share;
            if (add) value += load(dx->data, r * d + c, left, half);
            store(dx->data, r * d + c, left, half, value);
        }
    }
}

KERNELS(layer_scale, layer_scale_run(call, half))
KERNELS(layer_scale_backward, layer_scale_backward_run(call, half))
KERNELS(class_and_mean, class_and_mean_run(call, half))
KERNELS(class_and_mean_dx, class_and_mean_dx_run(call, half))
KERNELS(class_token, class_token_run(call, half))
KERNELS(class_token_backward, class_token_backward_run(call, half))
KERNELS(take_token, take_token_run(call, half))
KERNELS(take_token_dx, take_token_dx_run(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_patches)[] = {
    {HAPT_F32, {"patch_embedding", embedding_f32_workspace, embedding_f32}},
    {HAPT_BF16, {"patch_embedding", embedding_bf16_workspace, embedding_bf16}},
    {HAPT_F32, {"patch_embedding_dw", embedding_dw_f32_workspace, embedding_dw_f32}},
    {HAPT_BF16, {"patch_embedding_dw", embedding_dw_bf16_workspace, embedding_dw_bf16}},
    KERNEL_ROWS("class_token", NULL, class_token),
    KERNEL_ROWS("class_token_backward", NULL, class_token_backward),
    KERNEL_ROWS("take_token", NULL, take_token),
    KERNEL_ROWS("take_token_dx", NULL, take_token_dx),
    KERNEL_ROWS("layer_scale", NULL, layer_scale),
    KERNEL_ROWS("layer_scale_backward", NULL, layer_scale_backward),
    KERNEL_ROWS("class_and_mean", NULL, class_and_mean),
    KERNEL_ROWS("class_and_mean_dx", NULL, class_and_mean_dx),
    {HAPT_F32, {NULL, NULL, NULL}},
};
