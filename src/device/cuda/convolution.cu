/*
 * Convolutions and their gradients, by cuDNN (cudnn.cu) or as matrix products. For products, images are unfolded into
 * columns [channel, kernel row, kernel column][pixel of the result]. A bounded share is unfolded at a time: several
 * images, or a part of one.
 */
#include "channels.cuh"
#include "cudnn_convolution.h"
#include "kernels.h"
#include "product.h"

#ifndef UNFOLDED_BYTES
#define UNFOLDED_BYTES (32 << 20) /* fits the L2 cache of a large device */
#endif
#ifndef CUDNN_BYTES
#define CUDNN_BYTES (64 << 20) /* limit of cuDNN's workspace */
#endif

enum { CUDNN_LEAST_BYTES = 1 << 20 };

/* x [rows][in][height][width], w [out][in][kernel_height][kernel_width], y [rows][out][down][across] */
struct convolution {
    int64_t rows, in, height, width, out, down, across, kernel_height, kernel_width, stride, padding;
    int64_t kernel, pixels, depth; /* kernel_height kernel_width; down across; in kernel */
};

static struct convolution convolution_of(const struct hapt_call *call, const struct hapt_view *x,
                                         const struct hapt_view *w, const struct hapt_view *y)
{
    struct convolution of = {
        x->shape[0], x->shape[1], x->shape[2],      x->shape[3],      y->shape[1], y->shape[2], y->shape[3],
        w->shape[2], w->shape[3], call->integer[0], call->integer[1], 0,           0,           0};
    of.kernel = of.kernel_height * of.kernel_width;
    of.pixels = of.down * of.across;
    of.depth = of.in * of.kernel;
    return of;
}

/* True if its columns are the image itself. */
static bool is_plain(const struct convolution &of)
{
    return of.kernel == 1 && of.stride == 1 && of.padding == 0;
}

/* A share of the unfolded images and its layout: element (image, depth, pixel) is at image * apart + depth * ld +
 * pixel. */
struct share {
    int64_t images, first_channel, channels, first_row, down; /* rows of the result */
    int64_t apart, ld;
};

/* The number of items, each of `bytes`, that fit: at least 1, at most `count`. */
static int64_t fitting(int64_t count, int64_t bytes)
{
    const int64_t fit = UNFOLDED_BYTES / (bytes > 0 ? bytes : 1);
    return fit < 1 ? 1 : fit < count ? fit : count;
}

/* x: first image of the share. */
template <class Element>
__global__ void unfold_kernel(struct convolution of, struct share share, const Element *x, Element *columns)
{
    const int64_t pixels = share.down * of.across;
    for (int64_t image = blockIdx.z; image < share.images; image += gridDim.z)
        for (int64_t depth = blockIdx.y; depth < share.channels * of.kernel; depth += gridDim.y) {
            const int64_t channel = share.first_channel + depth / of.kernel, k = depth % of.kernel;
            const int top = (int)(k / of.kernel_width - of.padding), left = (int)(k % of.kernel_width - of.padding);
            const Element *from = x + (image * of.in + channel) * of.height * of.width;
            Element *to = columns + image * share.apart + depth * share.ld;
            for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
                const unsigned p = i / (unsigned)of.across, q = i % (unsigned)of.across;
                const int64_t r = (share.first_row + p) * of.stride + top, c = q * of.stride + left;
                const bool inside = r >= 0 && r < of.height && c >= 0 && c < of.width;
                to[i] = inside ? from[r * of.width + c] : from_float<Element>(0);
            }
        }
}

/* The transpose of unfold_kernel: every pixel is the sum of the elements that it was unfolded into. dx: first image of
 * the share. */
template <class Element>
__global__ void fold_kernel(struct convolution of, struct share share, const float *columns, Element *dx,
                            bool accumulate)
{
    const int64_t pixels = of.height * of.width;
    for (int64_t image = blockIdx.z; image < share.images; image += gridDim.z)
        for (int64_t channel = blockIdx.y; channel < share.channels; channel += gridDim.y) {
            const float *from = columns + image * share.apart + channel * of.kernel * share.ld;
            Element *to = dx + (image * of.in + share.first_channel + channel) * pixels;
            for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x) {
                const int y = (int)(i / (unsigned)of.width + of.padding),
                          x = (int)(i % (unsigned)of.width + of.padding), stride = (int)of.stride;
                float sum = 0;
                for (int k = 0; k < of.kernel_height && k <= y; k++) {
                    if ((y - k) % stride != 0 || (y - k) / stride >= of.down) continue;
                    const float *line = from + k * of.kernel_width * share.ld + (y - k) / stride * of.across;
                    for (int l = 0; l < of.kernel_width && l <= x; l++)
                        if ((x - l) % stride == 0 && (x - l) / stride < of.across)
                            sum += line[l * share.ld + (x - l) / stride];
                }
                to[i] = from_float<Element>(accumulate ? to_float(to[i]) + sum : sum);
            }
        }
}

/* y [rows][out][pixels] = bias [out]; and dy [images][out][pixels] to [out][images][pixels] with row stride `ld`. */
template <class Element>
__global__ void bias_kernel(int64_t rows, int64_t out, int64_t pixels, const Element *bias, Element *y)
{
    for (int64_t row = blockIdx.z; row < rows; row += gridDim.z)
        for (int64_t o = blockIdx.y; o < out; o += gridDim.y)
            for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x)
                y[(row * out + o) * pixels + i] = bias[o];
}

template <class Element>
__global__ void turn_kernel(int64_t images, int64_t out, int64_t pixels, int64_t ld, const Element *dy, Element *to)
{
    for (int64_t image = blockIdx.z; image < images; image += gridDim.z)
        for (int64_t o = blockIdx.y; o < out; o += gridDim.y)
            for (int64_t i = blockIdx.x * blockDim.x + threadIdx.x; i < pixels; i += gridDim.x * blockDim.x)
                to[o * ld + image * pixels + i] = dy[(image * out + o) * pixels + i];
}

template <class Element>
static enum hapt_status unfold(const struct convolution &of, const struct share &share, const Element *x,
                               Element *columns, struct hapt_queue *queue)
{
    int threads;
    const dim3 grid = grid_of(share.images, share.channels * of.kernel, share.down * of.across, &threads);
    return launch(unfold_kernel<Element>, grid, threads, 0, queue, of, share, x, columns);
}

static size_t aligned(int64_t bytes)
{
    return (size_t)round_up(bytes, 256);
}

/* ---- cuDNN ---- */

static int64_t image_bytes(const struct hapt_view *view)
{
    return view->shape[1] * view->shape[2] * view->shape[3] * (view->dtype == HAPT_F32 ? 4 : 2);
}

/* Tensor cores need channels last, eight at a time. */
static int64_t channels_last_bytes(const struct hapt_view *view, int64_t rows)
{
    const int64_t *shape = view->shape;
    return rows * round_up(shape[1], 8) * shape[2] * shape[3] * (view->dtype == HAPT_F32 ? 4 : 2);
}

/* Workspace of cuDNN for `rows` images, whether or not it is installed: room for all operands in the layout of tensor
 * cores. */
static size_t cudnn_workspace(const struct hapt_view *x, const struct hapt_view *w, const struct hapt_view *y,
                              int64_t rows)
{
    const int64_t most = CUDNN_BYTES, bytes = channels_last_bytes(x, rows) + channels_last_bytes(w, w->shape[0]) +
                                              channels_last_bytes(y, rows) + CUDNN_LEAST_BYTES;
    return aligned(bytes < most ? bytes : most);
}

/* Images at a time that keep within that limit; the last share may be smaller. */
static int64_t rows_at_once(const struct hapt_view *x, const struct hapt_view *w, const struct hapt_view *y)
{
    const int64_t rows = x->shape[0], room = CUDNN_BYTES - CUDNN_LEAST_BYTES - channels_last_bytes(w, w->shape[0]),
                  image = channels_last_bytes(x, 1) + channels_last_bytes(y, 1);
    const int64_t fit = image > 0 && room > image ? room / image : 1, shares = (rows + fit - 1) / fit;
    return shares > 1 ? (rows + shares - 1) / shares : rows;
}

/* Calls run(part, queue) for shares of the images of input 0 and output 0, which are x and y in either order. Images do
 * not depend on each other. */
static enum hapt_status by_shares(const struct hapt_call *call, int64_t rows_once, struct hapt_queue *queue,
                                  enum hapt_status (*run)(const struct hapt_call *call, struct hapt_queue *queue))
{
    const int64_t rows = call->input[0].shape[0];
    if (rows <= rows_once) return run(call, queue);
    struct hapt_call part = *call;
    struct hapt_view *const view[] = {&part.input[0], &part.output[0]};
    for (int64_t row = 0; row < rows; row += rows_once) {
        for (int v = 0; v < 2; v++) {
            view[v]->shape[0] = row + rows_once < rows ? rows_once : rows - row;
            if (row > 0) view[v]->data = (char *)view[v]->data + rows_once * image_bytes(view[v]);
        }
        HAPT_TRY(run(&part, queue));
    }
    return HAPT_OK;
}

static enum hapt_status by_cudnn(const struct hapt_call *call, enum convolution_result result,
                                 const struct hapt_view *x, const struct hapt_view *w, const struct hapt_view *y,
                                 bool accumulate, struct hapt_queue *queue, bool *done)
{
    const struct cudnn_convolution convolution = {
        result, x, w, y, call->integer[0], call->integer[1], accumulate, cudnn_workspace(x, w, y, x->shape[0])};
    *done = false;
    return cudnn_convolution_run ? cudnn_convolution_run(&convolution, call->workspace, queue, done) : HAPT_OK;
}

/* ---- Forward: y [out][pixels] = w [out][depth] columns, one image after the other ---- */

/* The largest share: some whole images, or rows of the result of one. */
static struct share forward_share(const struct convolution &of, int64_t element)
{
    struct share share = {1, 0, of.in, 0, of.down, 0, 0};
    share.images = fitting(of.rows, of.depth * round_up(of.pixels, 8) * element);
    if (share.images == 1) share.down = fitting(of.down, of.depth * of.across * element);
    share.ld = round_up(share.down * of.across, 8);
    share.apart = of.depth * share.ld;
    return share;
}

/* input: x, w, bias */
template <class Element> static enum hapt_status forward_part(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *w = &call->input[1], *y = &call->output[0];
    const struct convolution of = convolution_of(call, x, w, y);
    const struct share most = forward_share(of, sizeof(Element));
    const void *bias = call->input_count > 2 ? call->input[2].data : NULL;
    const size_t kept =
        is_plain(of)
            ? 0
            : aligned(most.images * most.apart * sizeof(Element)); /* the columns, then the product's workspace */
    Element *columns = (Element *)call->workspace;
    struct product p = {};
    bool done;
    if (bias) { /* written first, then added to: a product rounds once, cuDNN twice */
        int threads;
        const dim3 grid = grid_of(of.rows, of.out, of.pixels, &threads);
        HAPT_TRY(launch(bias_kernel<Element>, grid, threads, 0, queue, of.rows, of.out, of.pixels,
                        (const Element *)bias, (Element *)y->data));
    }
    HAPT_TRY(by_cudnn(call, RESULT_Y, x, w, y, bias != NULL, queue, &done));
    if (done) return HAPT_OK;
    p.m = of.out;
    p.k = of.depth;
    p.in = p.out = x->dtype;
    p.a = w->data;
    p.row_c = of.pixels;
    p.stride_c = of.out * of.pixels;
    p.accumulate = bias != NULL;
    if (is_plain(of)) {
        p.n = of.pixels;
        p.b = x->data;
        p.c = y->data;
        p.batches = of.rows;
        p.stride_b = of.in * of.pixels;
        return product_run(&p, call->workspace, call->workspace_bytes, queue);
    }
    for (int64_t row = 0; row < of.rows; row += most.images)
        for (int64_t first = 0; first < of.down; first += most.down) {
            struct share share = most;
            share.first_row = first;
            if (share.images > of.rows - row) share.images = of.rows - row;
            if (share.down > of.down - first) share.down = of.down - first;
            HAPT_TRY(unfold(of, share, (const Element *)x->data + row * of.in * of.height * of.width, columns, queue));
            p.n = share.down * of.across;
            p.b = columns;
            p.row_b = share.ld;
            p.c = (Element *)y->data + row * of.out * of.pixels + first * of.across;
            p.batches = share.images;
            p.stride_b = share.apart;
            HAPT_TRY(product_run(&p, (char *)call->workspace + kept, call->workspace_bytes - kept, queue));
        }
    return HAPT_OK;
}

template <class Element> static enum hapt_status forward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return by_shares(call, rows_at_once(&call->input[0], &call->input[1], &call->output[0]), queue,
                     forward_part<Element>);
}

/* ---- The gradient of x: columns [depth][pixels] = w' dy [out][pixels], folded ---- */

/* The largest share: some whole images, or channels of one. */
static struct share dx_share(const struct convolution &of)
{
    struct share share = {1, 0, of.in, 0, of.down, 0, round_up(of.pixels, 8)};
    share.images = fitting(of.rows, of.depth * share.ld * (int64_t)sizeof(float));
    if (share.images == 1) share.channels = fitting(of.in, of.kernel * share.ld * (int64_t)sizeof(float));
    share.apart = share.channels * of.kernel * share.ld;
    return share;
}

/* input: dy, w; output: dx */
template <class Element> static enum hapt_status dx_part(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dy = &call->input[0], *w = &call->input[1], *dx = &call->output[0];
    const struct convolution of = convolution_of(call, dx, w, dy);
    const struct share most = dx_share(of);
    const bool accumulate = call->accumulate & 1u;
    const size_t kept = is_plain(of) ? 0 : aligned(most.images * most.apart * sizeof(float));
    float *columns = (float *)call->workspace;
    struct product p = {};
    bool done;
    HAPT_TRY(by_cudnn(call, RESULT_DX, dx, w, dy, accumulate, queue, &done));
    if (done) return HAPT_OK;
    p.n = of.pixels;
    p.k = of.out;
    p.transpose_a = true;
    p.in = dy->dtype;
    p.row_a = of.depth;
    p.stride_b = of.out * of.pixels;
    if (is_plain(of)) {
        p.m = of.depth;
        p.out = dx->dtype;
        p.a = w->data;
        p.b = dy->data;
        p.c = dx->data;
        p.batches = of.rows;
        p.stride_c = of.in * of.pixels;
        p.accumulate = accumulate;
        return product_run(&p, call->workspace, call->workspace_bytes, queue);
    }
    for (int64_t row = 0; row < of.rows; row += most.images)
        for (int64_t first = 0; first < of.in; first += most.channels) {
            struct share share = most;
            int threads;
            share.first_channel = first;
            if (share.images > of.rows - row) share.images = of.rows - row;
            if (share.channels > of.in - first) share.channels = of.in - first;
            p.m = share.channels * of.kernel;
            p.out = HAPT_F32;
            p.a = (const Element *)w->data + first * of.kernel;
            p.b = (const Element *)dy->data + row * of.out * of.pixels;
            p.c = columns;
            p.row_c = share.ld;
            p.batches = share.images;
            p.stride_c = share.apart;
            HAPT_TRY(product_run(&p, (char *)call->workspace + kept, call->workspace_bytes - kept, queue));
            const dim3 grid = grid_of(share.images, share.channels, of.height * of.width, &threads);
            HAPT_TRY(launch(fold_kernel<Element>, grid, threads, 0, queue, of, share, (const float *)columns,
                            (Element *)dx->data + row * of.in * of.height * of.width, accumulate));
        }
    return HAPT_OK;
}

template <class Element> static enum hapt_status dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return by_shares(call, rows_at_once(&call->output[0], &call->input[1], &call->input[0]), queue, dx_part<Element>);
}

/* ---- The gradient of w: dy [out][images, pixels] columns' [depth][images, pixels]: one product also sums over images
 * ---- */

/* The largest share: some images with all of their channels, or with some. */
static struct share dw_share(const struct convolution &of, int64_t element)
{
    struct share share = {1, 0, of.in, 0, of.down, of.pixels, 0};
    share.images = fitting(of.rows, (of.depth + of.out) * of.pixels * element);
    if (share.images == 1) share.channels = fitting(of.in, of.kernel * of.pixels * element);
    share.ld = round_up(share.images * of.pixels, 8);
    return share;
}

/* input: x, dy; output: dw, db */
template <class Element> static enum hapt_status dw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[1], *dw = &call->output[0];
    const struct convolution of = convolution_of(call, x, dw, dy);
    const struct share most = dw_share(of, sizeof(Element));
    float *db = call->output_count > 1 ? (float *)call->output[1].data : NULL;
    Element *columns = (Element *)call->workspace,
            *turned = (Element *)((char *)columns + aligned(most.channels * of.kernel * most.ld * sizeof(Element)));
    char *rest = (char *)turned + aligned(of.out * most.ld * sizeof(Element));
    struct product p = {};
    bool done;
    if (db) HAPT_TRY(channel_statistic<Element>(dy, NULL, 1, db, call->accumulate >> 1 & 1u, (float *)rest, queue));
    HAPT_TRY(by_cudnn(call, RESULT_DW, x, dw, dy, call->accumulate & 1u, queue,
                      &done)); /* cuDNN has no 16-bit plan with fp32 results */
    if (done) return HAPT_OK;
    p.m = of.out;
    p.transpose_b = true;
    p.in = x->dtype;
    p.out = HAPT_F32;
    p.row_c = of.depth;
    p.row_a = p.row_b = most.ld;
    for (int64_t row = 0; row < of.rows; row += most.images) {
        struct share share = most;
        int threads;
        if (share.images > of.rows - row) share.images = of.rows - row;
        const dim3 grid = grid_of(share.images, of.out, of.pixels, &threads);
        HAPT_TRY(launch(turn_kernel<Element>, grid, threads, 0, queue, share.images, of.out, of.pixels, share.ld,
                        (const Element *)dy->data + row * of.out * of.pixels, turned));
        for (int64_t first = 0; first < of.in; first += most.channels) {
            share.first_channel = first;
            share.channels = most.channels < of.in - first ? most.channels : of.in - first;
            HAPT_TRY(unfold(of, share, (const Element *)x->data + row * of.in * of.height * of.width, columns, queue));
            p.n = share.channels * of.kernel;
            p.k = share.images * of.pixels;
            p.a = turned;
            p.b = columns;
            p.c = (float *)dw->data + first * of.kernel;
            p.accumulate = row > 0 || (call->accumulate & 1u);
            HAPT_TRY(product_run(&p, rest, call->workspace_bytes - (size_t)(rest - (char *)call->workspace), queue));
        }
    }
    return HAPT_OK;
}

/* Enough for both cuDNN and products. */
static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

template <int ELEMENT> static size_t forward_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0], *w = &call->input[1], *y = &call->output[0];
    const struct convolution of = convolution_of(call, x, w, y);
    const struct share share = forward_share(of, ELEMENT);
    const size_t unfolded = aligned(share.images * share.apart * ELEMENT) +
                            product_workspace(share.images * of.out * share.down * of.across);
    return larger(is_plain(of) ? product_workspace(of.rows * of.out * of.pixels) : unfolded,
                  cudnn_workspace(x, w, y, rows_at_once(x, w, y)));
}

static size_t dx_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->output[0], *w = &call->input[1], *y = &call->input[0];
    const struct convolution of = convolution_of(call, x, w, y);
    const struct share share = dx_share(of);
    const size_t unfolded = aligned(share.images * share.apart * 4) +
                            product_workspace(share.images * share.channels * of.kernel * of.pixels);
    return larger(is_plain(of) ? product_workspace(of.rows * of.in * of.pixels) : unfolded,
                  cudnn_workspace(x, w, y, rows_at_once(x, w, y)));
}

template <int ELEMENT> static size_t dw_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0], *w = &call->output[0], *y = &call->input[1];
    const struct convolution of = convolution_of(call, x, w, y);
    const struct share share = dw_share(of, ELEMENT);
    const size_t rest = larger(product_workspace(of.out * share.channels * of.kernel), channel_workspace(y));
    return larger(aligned(share.channels * of.kernel * share.ld * ELEMENT) + aligned(of.out * share.ld * ELEMENT) +
                      rest,
                  cudnn_workspace(x, w, y, x->shape[0]));
}

#define ROWS(op, workspace, run)                                                                 \
    CUDA_KERNEL_F32(op, workspace<4>, run), {HAPT_BF16, {op, workspace<2>, run<__nv_bfloat16>}}, \
    {                                                                                            \
        HAPT_F16,                                                                                \
        {                                                                                        \
            op, workspace<2>, run<__half>                                                        \
        }                                                                                        \
    }

extern const struct cuda_kernel hapt_cuda_convolution[] = {
    ROWS("conv2d", forward_workspace, forward_run),
    CUDA_KERNELS("conv2d_dx", dx_workspace, dx_run),
    ROWS("conv2d_dw", dw_workspace, dw_run),
    CUDA_KERNELS_END,
};
