/*
 * Convolutions with groups and dilation, and their gradients, by direct kernels. Input channels of one group reach only
 * the output channels of the same group; in a depthwise convolution a group has one input channel.
 */
#include "channels.cuh"
#include "kernels.h"

/* x [rows][in][height][width], w [out][group_in][kernel_height][kernel_width], y [rows][out][down][across] */
struct grouped {
    int64_t rows, in, out, group_in, group_out; /* channels of all groups; of one */
    int height, width, down, across, kernel_height, kernel_width, stride, padding, dilation;
    int64_t kernel, pixels; /* kernel_height kernel_width; down across */
};

static struct grouped grouped_of(const struct hapt_call *call, const struct hapt_view *x, const struct hapt_view *w,
                                 const struct hapt_view *y)
{
    struct grouped of = {};
    of.rows = x->shape[0];
    of.in = x->shape[1];
    of.out = y->shape[1];
    of.group_in = w->shape[1];
    of.group_out = of.out / call->integer[0];
    of.height = (int)x->shape[2];
    of.width = (int)x->shape[3];
    of.down = (int)y->shape[2];
    of.across = (int)y->shape[3];
    of.kernel_height = (int)w->shape[2];
    of.kernel_width = (int)w->shape[3];
    of.stride = (int)call->integer[1];
    of.padding = (int)call->integer[2];
    of.dilation = call->integer[3] > 0 ? (int)call->integer[3] : 1;
    of.kernel = w->shape[2] * w->shape[3];
    of.pixels = y->shape[2] * y->shape[3];
    return of;
}

/* A thread per result. */
template <class Element>
__global__ void forward_kernel(struct grouped of, const Element *x, const Element *w, const Element *bias, Element *y)
{
    const int64_t plane = (int64_t)of.height * of.width;
    for (int64_t row = blockIdx.z; row < of.rows; row += gridDim.z)
        for (int64_t o = blockIdx.y; o < of.out; o += gridDim.y) {
            const Element *image = x + (row * of.in + o / of.group_out * of.group_in) * plane;
            const Element *weight = w + o * of.group_in * of.kernel;
            Element *to = y + (row * of.out + o) * of.pixels;
            for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < of.pixels; i += gridDim.x * blockDim.x) {
                const int top = (int)(i / (unsigned)of.across) * of.stride - of.padding,
                          left = (int)(i % (unsigned)of.across) * of.stride - of.padding;
                float sum = bias ? to_float(bias[o]) : 0;
                for (int64_t j = 0; j < of.group_in; j++)
                    for (int k = 0; k < of.kernel_height; k++) {
                        const int r = top + k * of.dilation;
                        if (r < 0 || r >= of.height) continue;
                        const Element *line = image + j * plane + (int64_t)r * of.width,
                                      *taps = weight + j * of.kernel + k * of.kernel_width;
                        for (int l = 0; l < of.kernel_width; l++) {
                            const int c = left + l * of.dilation;
                            if (c >= 0 && c < of.width) sum += to_float(taps[l]) * to_float(line[c]);
                        }
                    }
                to[i] = from_float<Element>(sum);
            }
        }
}

/* input: x, w, bias */
template <class Element> static enum hapt_status forward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *w = &call->input[1], *y = &call->output[0];
    const struct grouped of = grouped_of(call, x, w, y);
    const void *bias = call->input_count > 2 ? call->input[2].data : NULL;
    int threads;
    const dim3 grid = grid_of(of.rows, of.out, of.pixels, &threads);
    return launch(forward_kernel<Element>, grid, threads, 0, queue, of, (const Element *)x->data,
                  (const Element *)w->data, (const Element *)bias, (Element *)y->data);
}

/* A thread per pixel of dx, which sums over the results that read the pixel. */
template <class Element>
__global__ void dx_kernel(struct grouped of, const Element *dy, const Element *w, Element *dx, bool accumulate)
{
    const int64_t plane = (int64_t)of.height * of.width;
    for (int64_t row = blockIdx.z; row < of.rows; row += gridDim.z)
        for (int64_t channel = blockIdx.y; channel < of.in; channel += gridDim.y) {
            const int64_t o = channel / of.group_in * of.group_out; /* first output channel of the group */
            const Element *image = dy + (row * of.out + o) * of.pixels;
            const Element *weight = w + (o * of.group_in + channel % of.group_in) * of.kernel;
            Element *to = dx + (row * of.in + channel) * plane;
            for (unsigned i = blockIdx.x * blockDim.x + threadIdx.x; i < plane; i += gridDim.x * blockDim.x) {
                const int bottom = (int)(i / (unsigned)of.width) + of.padding,
                          right = (int)(i % (unsigned)of.width) + of.padding;
                float sum = 0;
                for (int k = 0; k < of.kernel_height; k++) {
                    const int r = bottom - k * of.dilation; /* = p stride, if result row p reads the pixel by k */
                    if (r < 0 || r % of.stride != 0 || r / of.stride >= of.down) continue;
                    for (int l = 0; l < of.kernel_width; l++) {
                        const int c = right - l * of.dilation;
                        if (c < 0 || c % of.stride != 0 || c / of.stride >= of.across) continue;
                        const Element *from = image + (int64_t)(r / of.stride) * of.across + c / of.stride,
                                      *tap = weight + k * of.kernel_width + l;
                        for (int64_t n = 0; n < of.group_out; n++)
                            sum += to_float(tap[n * of.group_in * of.kernel]) * to_float(from[n * of.pixels]);
                    }
                }
                to[i] = from_float<Element>(accumulate ? to_float(to[i]) + sum : sum);
            }
        }
}

/* input: dy, w; output: dx */
template <class Element> static enum hapt_status dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *dy = &call->input[0], *w = &call->input[1], *dx = &call->output[0];
    const struct grouped of = grouped_of(call, dx, w, dy);
    int threads;
    const dim3 grid = grid_of(of.rows, of.in, (int64_t)of.height * of.width, &threads);
    return launch(dx_kernel<Element>, grid, threads, 0, queue, of, (const Element *)dy->data, (const Element *)w->data,
                  (Element *)dx->data, (bool)(call->accumulate & 1u));
}

/* ---- The gradient of w: each weight is a sum of terms, one for each row and pixel of dy ---- */

/* TAPS: neighbouring weights of a kernel row that a block sums at once, as they share dy and the row of x. */
enum { TAPS = 4, PIECE_TERMS = 4096, MOST_PIECES = 64, MOST_BLOCKS = 1 << 14, FEW_TERMS = 1024 };

/* Blocks [out][group_in][kernel_height][tiles][pieces]; the shape alone decides their number and threads. */
struct dw_split {
    int64_t terms, tiles, pieces; /* tiles of TAPS in a kernel row; pieces of the terms, a block each */
    int64_t blocks;
    int threads;
};

static struct dw_split dw_split_of(const struct grouped &of)
{
    struct dw_split split = {};
    split.terms = of.rows * of.pixels;
    split.tiles = (of.kernel_width + TAPS - 1) / TAPS;
    const int64_t sums = of.out * of.group_in * of.kernel_height * split.tiles;
    int64_t pieces = split.terms / PIECE_TERMS;
    if (pieces > MOST_PIECES) pieces = MOST_PIECES;
    if (pieces > 1 && sums * pieces > MOST_BLOCKS) pieces = MOST_BLOCKS / sums; /* enough blocks for any device */
    split.pieces = pieces > 1 ? pieces : 1;
    split.blocks = sums * split.pieces;
    split.threads = split.terms > FEW_TERMS ? CHANNEL_THREADS : 64;
    return split;
}

/* The place of a term: its row, and its pixel of dy. */
struct place {
    int64_t row;
    int p, q;
};

static __device__ __forceinline__ struct place place_of(const struct grouped &of, int64_t term)
{
    return {term / of.pixels, (int)(term % of.pixels / of.across), (int)(term % of.across)};
}

/* The place `step` terms further on, without a division. */
static __device__ __forceinline__ struct place place_after(const struct grouped &of, struct place at, struct place step)
{
    struct place to = {at.row + step.row, at.p + step.p, at.q + step.q};
    if (to.q >= of.across) {
        to.q -= of.across;
        to.p++;
    }
    if (to.p >= of.down) {
        to.p -= of.down;
        to.row++;
    }
    return to;
}

/* to [weights][pieces] (+)= the sums over the pieces of the terms. */
template <class Element>
__global__ void dw_kernel(struct grouped of, struct dw_split split, const Element *x, const Element *dy, float *to,
                          bool accumulate)
{
    __shared__ float shared[32];
    const int64_t piece = blockIdx.x % split.pieces, tile = blockIdx.x / split.pieces % split.tiles,
                  line = blockIdx.x / split.pieces / split.tiles; /* of [out][group_in][kernel_height] */
    const int64_t o = line / of.kernel_height / of.group_in,
                  channel = o / of.group_out * of.group_in + line / of.kernel_height % of.group_in;
    const int l = (int)tile * TAPS, taps = of.kernel_width - l; /* at least 1 */
    const int top = (int)(line % of.kernel_height) * of.dilation - of.padding, left = l * of.dilation - of.padding;
    const int64_t first = piece * split.terms / split.pieces, end = (piece + 1) * split.terms / split.pieces;
    const struct place step = place_of(of, blockDim.x);
    struct place at = place_of(of, first + threadIdx.x);
    float sum[TAPS] = {};
    for (int64_t term = first + threadIdx.x; term < end; term += blockDim.x, at = place_after(of, at, step)) {
        const int r = at.p * of.stride + top, c = at.q * of.stride + left;
        if (r < 0 || r >= of.height) continue;
        const float factor = to_float(dy[(at.row * of.out + o) * of.pixels + (int64_t)at.p * of.across + at.q]);
        const Element *from = x + ((at.row * of.in + channel) * of.height + r) * of.width;
        UNROLL for (int t = 0; t < TAPS; t++)
        {
            const int column = c + t * of.dilation;
            if (t < taps && column >= 0 && column < of.width) sum[t] += factor * to_float(from[column]);
        }
    }
    UNROLL for (int t = 0; t < TAPS; t++)
    {
        const float total = block_sum(sum[t], shared);
        if (threadIdx.x > 0 || t >= taps) continue;
        float *out = to + (line * of.kernel_width + l + t) * split.pieces + piece;
        *out = accumulate ? *out + total : total;
    }
}

/* input: x, dy; output: dw, db */
template <class Element> static enum hapt_status dw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[1], *dw = &call->output[0];
    const struct grouped of = grouped_of(call, x, dw, dy);
    const struct dw_split split = dw_split_of(of);
    const int64_t weights = hapt_view_elements(dw);
    const bool accumulate = call->accumulate & 1u;
    float *db = call->output_count > 1 ? (float *)call->output[1].data : NULL, *part = (float *)call->workspace;
    if (db) HAPT_TRY(channel_statistic<Element>(dy, NULL, 1, db, call->accumulate >> 1 & 1u, part, queue));
    HAPT_TRY(launch(dw_kernel<Element>, dim3((unsigned)split.blocks), split.threads, 0, queue, of, split,
                    (const Element *)x->data, (const Element *)dy->data, split.pieces > 1 ? part : (float *)dw->data,
                    split.pieces <= 1 && accumulate));
    if (split.pieces <= 1) return HAPT_OK;
    return launch(statistic_kernel, blocks_for(weights, 64), 64, 0, queue, weights, split.pieces, (const float *)part,
                  1.0, (float *)dw->data, accumulate);
}

/* The sums of pieces of db, then those of dw. */
static size_t dw_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[1], *dw = &call->output[0];
    const int64_t pieces = dw_split_of(grouped_of(call, x, dw, dy)).pieces;
    const size_t parts = pieces > 1 ? (size_t)(hapt_view_elements(dw) * pieces) * sizeof(float) : 0,
                 channels = call->output_count > 1 ? channel_workspace(dy) : 0;
    return parts > channels ? parts : channels;
}

extern const struct cuda_kernel hapt_cuda_grouped_convolution[] = {
    CUDA_KERNELS("grouped_conv2d", NULL, forward_run),
    CUDA_KERNELS("grouped_conv2d_dx", NULL, dx_run),
    CUDA_KERNELS("grouped_conv2d_dw", dw_workspace, dw_run),
    CUDA_KERNELS_END,
};
