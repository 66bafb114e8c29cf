/*
 * Images as sequences of tokens: patch embedding (a convolution whose stride is its kernel), the class token with
 * learned positions, scales of columns, and what the classifier takes: one token, or one and a mean. Patches are packed
 * as rows and use the kernels of linear layers.
 */
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256 };

struct patches {
    int64_t channels, height, width, patch_height, patch_width;
    int64_t down, across, rows,
        columns; /* patches per column and row of an image; patch rows in total; elements of a patch */
};

/* images [batch][c][height][width], weight [out][c][patch height][patch width] */
static struct patches patches_of(const struct hapt_view *images, const struct hapt_view *weight)
{
    struct patches of = {};
    of.channels = images->shape[1];
    of.height = images->shape[2];
    of.width = images->shape[3];
    of.patch_height = weight->shape[2];
    of.patch_width = weight->shape[3];
    of.down = of.height / of.patch_height;
    of.across = of.width / of.patch_width;
    of.rows = images->shape[0] * of.down * of.across;
    of.columns = of.channels * of.patch_height * of.patch_width;
    return of;
}

/* Rows of packed patches: [c][patch height][patch width]. */
template <class Element> __global__ void pack_kernel(struct patches of, const float *images, Element *packed)
{
    for (GRID_STRIDE(i, of.rows * of.columns)) {
        const int64_t r = i / of.columns, column = i % of.columns, image = r / (of.down * of.across);
        const int64_t c = column / (of.patch_height * of.patch_width);
        const int64_t y = r / of.across % of.down * of.patch_height + column / of.patch_width % of.patch_height;
        const int64_t x = r % of.across * of.patch_width + column % of.patch_width;
        packed[i] = from_float<Element>(images[((image * of.channels + c) * of.height + y) * of.width + x]);
    }
}

/* The same tensor as a matrix. */
static struct hapt_view matrix(const struct hapt_view *view, int64_t rows, int64_t columns)
{
    struct hapt_view matrix = *view;
    matrix.dims = 2;
    matrix.shape[0] = rows;
    matrix.shape[1] = columns;
    return matrix;
}

/* The call of the linear layer on packed patches: y = patches weight' + bias, or its dw and db. Packed patches come
 * first in the workspace. */
static struct hapt_call linear_call(const struct hapt_call *call, const struct patches &of, enum hapt_dtype dtype,
                                    bool backward, size_t *packed_bytes)
{
    struct hapt_call linear = *call;
    const struct hapt_view packed = {call->workspace, dtype, 2, {of.rows, of.columns}};
    const struct hapt_view *weight = backward ? &call->output[0] : &call->input[1],
                           *y = backward ? &call->input[1] : &call->output[0];
    const int64_t out = weight->shape[0];
    *packed_bytes = ((size_t)(of.rows * of.columns) * (dtype == HAPT_F32 ? 4 : 2) + 255) / 256 * 256;
    linear.input[0] = packed;
    linear.input[1] = backward ? matrix(y, of.rows, out) : matrix(weight, out, of.columns);
    linear.output[0] = backward ? matrix(weight, out, of.columns) : matrix(y, of.rows, out);
    linear.workspace = (char *)call->workspace + *packed_bytes;
    linear.workspace_bytes = call->workspace_bytes - *packed_bytes;
    return linear;
}

template <enum hapt_dtype DTYPE, bool BACKWARD> static size_t embedding_workspace(const struct hapt_call *call)
{
    const struct patches of = patches_of(&call->input[0], BACKWARD ? &call->output[0] : &call->input[1]);
    const struct hapt_kernel *kernel = cuda_kernel_find(BACKWARD ? "linear_t_dw" : "linear_t", DTYPE);
    size_t packed;
    const struct hapt_call linear = linear_call(call, of, DTYPE, BACKWARD, &packed);
    return packed + (kernel->workspace_bytes ? kernel->workspace_bytes(&linear) : 0);
}

template <class Element, enum hapt_dtype DTYPE, bool BACKWARD>
static enum hapt_status embedding_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct patches of = patches_of(&call->input[0], BACKWARD ? &call->output[0] : &call->input[1]);
    size_t packed;
    const struct hapt_call linear = linear_call(call, of, DTYPE, BACKWARD, &packed);
    HAPT_TRY(launch(pack_kernel<Element>, blocks_for(of.rows * of.columns, THREADS), THREADS, 0, queue, of,
                    (const float *)call->input[0].data, (Element *)call->workspace));
    return cuda_kernel_find(BACKWARD ? "linear_t_dw" : "linear_t", DTYPE)->run(&linear, queue);
}

/* y [batch][patches + 1][d]: the class token, then the patches; positions added to all. N elements per thread. */
template <class Element, int N>
__global__ void class_kernel(int64_t batch, int64_t length, int64_t d, const Element *x, const Element *token,
                             const Element *position, Element *y)
{
    const int64_t parts = d / N;
    for (GRID_STRIDE(i, batch * length * parts)) {
        const int64_t r = i / parts, c = i % parts * N, b = r / length, t = r % length;
        float value[N], added[N];
        load<N>(t == 0 ? token + c : x + (b * (length - 1) + t - 1) * d + c, value);
        load<N>(position + t * d + c, added);
        for (int e = 0; e < N; e++) value[e] += added[e];
        store<N>(y + r * d + c, value, false);
    }
}

/* A thread owns positions and sums over the batch. */
template <class Element>
__global__ void class_backward_kernel(int64_t batch, int64_t length, int64_t d, const Element *dy, Element *dx,
                                      float *dclass, float *dposition, unsigned add)
{
    for (GRID_STRIDE(i, length * d)) {
        float sum = 0;
        for (int64_t b = 0; b < batch; b++) {
            const float value = to_float(dy[b * length * d + i]);
            sum += value;
            if (i >= d && dx) store<1>(dx + b * (length - 1) * d + i - d, &value, add & 1u);
        }
        if (i < d && dclass) store<1>(dclass + i, &sum, add & 2u);
        if (dposition) store<1>(dposition + i, &sum, add & 4u);
    }
}

template <class Element> static enum hapt_status class_token_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *y = &call->output[0];
    const Element *x = (const Element *)call->input[0].data, *token = (const Element *)call->input[1].data,
                  *position = (const Element *)call->input[2].data;
    const bool packed = packs_fit<Element>(y->shape[2], x, token, position, y->data);
    return launch(packed ? class_kernel<Element, pack<Element>::COUNT> : class_kernel<Element, 1>,
                  blocks_for(hapt_view_elements(y) / (packed ? pack<Element>::COUNT : 1), THREADS), THREADS, 0, queue,
                  y->shape[0], y->shape[1], y->shape[2], x, token, position, (Element *)y->data);
}

template <class Element>
static enum hapt_status class_token_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dy = &call->input[0];
    return launch(class_backward_kernel<Element>, blocks_for(dy->shape[1] * dy->shape[2], 64), 64, 0, queue,
                  dy->shape[0], dy->shape[1], dy->shape[2], (const Element *)dy->data, (Element *)call->output[0].data,
                  (float *)call->output[1].data, (float *)call->output[2].data, call->accumulate);
}

/* y [batch][d] = x [batch][length][d] at token `taken`. */
template <class Element>
__global__ void take_kernel(int64_t batch, int64_t length, int64_t d, int64_t taken, const Element *x, Element *y)
{
    for (GRID_STRIDE(i, batch * d)) y[i] = x[(i / d * length + taken) * d + i % d];
}

/* dx: dy at the token, zero elsewhere. */
template <class Element>
__global__ void take_dx_kernel(int64_t batch, int64_t length, int64_t d, int64_t taken, const Element *dy, Element *dx,
                               bool accumulate)
{
    for (GRID_STRIDE(i, batch * length * d)) {
        const bool here = i / d % length == taken;
        const float value = here ? to_float(dy[i / d / length * d + i % d]) : 0;
        if (here || !accumulate) store<1>(dx + i, &value, accumulate);
    }
}

template <class Element> static enum hapt_status take_token_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    return launch(take_kernel<Element>, blocks_for(hapt_view_elements(y), THREADS), THREADS, 0, queue, x->shape[0],
                  x->shape[1], x->shape[2], call->integer[0], (const Element *)x->data, (Element *)y->data);
}

template <class Element>
static enum hapt_status take_token_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dx = &call->output[0];
    return launch(take_dx_kernel<Element>, blocks_for(hapt_view_elements(dx), THREADS), THREADS, 0, queue, dx->shape[0],
                  dx->shape[1], dx->shape[2], call->integer[0], (const Element *)call->input[0].data,
                  (Element *)dx->data, (bool)(call->accumulate & 1u));
}

/* y = gamma x, column by column. */
template <class Element>
__global__ void scale_kernel(int64_t rows, int64_t d, const Element *x, const Element *gamma, Element *y)
{
    for (GRID_STRIDE(i, rows * d)) {
        const float value = to_float(gamma[i % d]) * to_float(x[i]);
        store<1>(y + i, &value, false);
    }
}

template <class Element> static enum hapt_status layer_scale_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t elements = hapt_view_elements(y), d = view_columns(y);
    if (elements == 0) return HAPT_OK;
    return launch(scale_kernel<Element>, blocks_for(elements, THREADS), THREADS, 0, queue, elements / d, d,
                  (const Element *)call->input[0].data, (const Element *)call->input[1].data, (Element *)y->data);
}

/* A thread owns a column and sums the rows in order. */
template <class Element>
__global__ void scale_backward_kernel(int64_t rows, int64_t d, const Element *x, const Element *gamma,
                                      const Element *dy, Element *dx, float *dgamma, unsigned add)
{
    for (GRID_STRIDE(c, d)) {
        const float scale = to_float(gamma[c]);
        float sum = 0;
        for (int64_t at = c; at < rows * d; at += d) {
            const float given = to_float(dy[at]), value = scale * given;
            sum += given * to_float(x[at]);
            if (dx) store<1>(dx + at, &value, add & 1u);
        }
        if (dgamma) store<1>(dgamma + c, &sum, add & 2u);
    }
}

template <class Element>
static enum hapt_status layer_scale_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dy = &call->input[2];
    const int64_t d = view_columns(dy);
    if (d == 0) return HAPT_OK;
    return launch(scale_backward_kernel<Element>, blocks_for(d, 64), 64, 0, queue, hapt_view_elements(dy) / d, d,
                  (const Element *)call->input[0].data, (const Element *)call->input[1].data, (const Element *)dy->data,
                  (Element *)call->output[0].data, (float *)call->output[1].data, call->accumulate);
}

/* y [batch][2 d]: of x [batch][length][d], the first token, then the mean of the others. */
template <class Element>
__global__ void class_and_mean_kernel(int64_t batch, int64_t length, int64_t d, const Element *x, Element *y)
{
    const float share = 1.0f / (float)(length - 1);
    for (GRID_STRIDE(i, batch * d)) {
        const int64_t b = i / d, c = i % d;
        float sum = 0;
        for (int64_t t = 1; t < length; t++) sum += to_float(x[(b * length + t) * d + c]);
        sum *= share;
        y[2 * b * d + c] = x[b * length * d + c];
        store<1>(y + (2 * b + 1) * d + c, &sum, false);
    }
}

template <class Element>
__global__ void class_and_mean_dx_kernel(int64_t batch, int64_t length, int64_t d, const Element *dy, Element *dx,
                                         bool accumulate)
{
    const float share = 1.0f / (float)(length - 1);
    for (GRID_STRIDE(i, batch * length * d)) {
        const int64_t r = i / d, b = r / length;
        const bool mean = r % length > 0;
        const float given = to_float(dy[(2 * b + mean) * d + i % d]), value = mean ? given * share : given;
        store<1>(dx + i, &value, accumulate);
    }
}

template <class Element>
static enum hapt_status class_and_mean_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0];
    return launch(class_and_mean_kernel<Element>, blocks_for(x->shape[0] * x->shape[2], THREADS), THREADS, 0, queue,
                  x->shape[0], x->shape[1], x->shape[2], (const Element *)x->data, (Element *)call->output[0].data);
}

template <class Element>
static enum hapt_status class_and_mean_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dx = &call->output[0];
    return launch(class_and_mean_dx_kernel<Element>, blocks_for(hapt_view_elements(dx), THREADS), THREADS, 0, queue,
                  dx->shape[0], dx->shape[1], dx->shape[2], (const Element *)call->input[0].data, (Element *)dx->data,
                  (bool)(call->accumulate & 1u));
}

#define EMBEDDING_ROW(op, dtype, Element, backward)                                           \
    {                                                                                         \
        dtype,                                                                                \
        {                                                                                     \
            op, embedding_workspace<dtype, backward>, embedding_run<Element, dtype, backward> \
        }                                                                                     \
    }
#define EMBEDDING(op, backward)                                                                          \
    EMBEDDING_ROW(op, HAPT_F32, float, backward), EMBEDDING_ROW(op, HAPT_BF16, __nv_bfloat16, backward), \
        EMBEDDING_ROW(op, HAPT_F16, __half, backward)

extern const struct cuda_kernel hapt_cuda_patches[] = {
    EMBEDDING("patch_embedding", false),
    EMBEDDING("patch_embedding_dw", true),
    CUDA_KERNELS("class_token", NULL, class_token_run),
    CUDA_KERNELS("class_token_backward", NULL, class_token_backward_run),
    CUDA_KERNELS("take_token", NULL, take_token_run),
    CUDA_KERNELS("take_token_dx", NULL, take_token_dx_run),
    CUDA_KERNELS("layer_scale", NULL, layer_scale_run),
    CUDA_KERNELS("layer_scale_backward", NULL, layer_scale_backward_run),
    CUDA_KERNELS("class_and_mean", NULL, class_and_mean_run),
    CUDA_KERNELS("class_and_mean_dx", NULL, class_and_mean_dx_run),
    CUDA_KERNELS_END,
};
