/* Tensors [rows][channels][pixels]: grids over them, and sums over rows and pixels for each channel. */
#ifndef HAPT_CUDA_CHANNELS_CUH
#define HAPT_CUDA_CHANNELS_CUH

#include "kernel.cuh"

enum { CHANNEL_THREADS = 256, PIECES = 64, PIECE_LEAST = 4096 };

/* Blocks for [images][depths][pixels]; threads stride over all three. */
static inline dim3 grid_of(int64_t images, int64_t depths, int64_t pixels, int *threads)
{
    *threads = pixels > 128 ? CHANNEL_THREADS : pixels > 32 ? 64 : 32;
    const int64_t parts = (pixels + *threads - 1) / *threads;
    return dim3((unsigned)(parts < 4096 ? parts : 4096), (unsigned)(depths < 65535 ? depths : 65535),
                (unsigned)(images < 65535 ? images : 65535));
}

struct images {
    int64_t rows, channels, pixels;
};

static struct images images_of(const struct hapt_view *x)
{
    return {x->shape[0], x->shape[1], x->shape[2] * x->shape[3]};
}

/* A channel is summed in this many pieces of rows, one block each. The number depends on the shape alone. */
static int64_t pieces_of(const struct images &n)
{
    const int64_t full = n.rows * n.pixels / PIECE_LEAST, most = n.rows < PIECES ? n.rows : (int64_t)PIECES;
    return full < 1 ? 1 : full < most ? full : most;
}

/* Sums of x, of the squares of x - mean, or of dy and dy (x - mean): part [sums][channels][pieces]. */
template <class Element>
__global__ void part_kernel(struct images n, int64_t pieces, const Element *x, const float *mean, const Element *dy,
                            float *part)
{
    __shared__ float shared[32];
    const int64_t c = blockIdx.x / pieces, piece = blockIdx.x % pieces, first = piece * n.rows / pieces,
                  rows = (piece + 1) * n.rows / pieces - first;
    const float middle = mean ? mean[c] : 0;
    float plain = 0, weighted = 0;
    for (int64_t i = threadIdx.x; i < rows * n.pixels; i += CHANNEL_THREADS) {
        const int64_t at = ((first + i / n.pixels) * n.channels + c) * n.pixels + i % n.pixels;
        const float value = to_float(x[at]) - middle;
        if (dy) {
            plain += to_float(dy[at]);
            weighted += to_float(dy[at]) * value;
        } else {
            plain += mean ? value * value : value;
        }
    }
    plain = block_sum(plain, shared);
    if (dy) weighted = block_sum(weighted, shared);
    if (threadIdx.x > 0) return;
    part[blockIdx.x] = plain;
    if (dy) part[n.channels * pieces + blockIdx.x] = weighted;
}

__device__ __forceinline__ double pieces_sum(const float *part, int64_t channel, int64_t pieces)
{
    double sum = 0;
    for (int64_t p = 0; p < pieces; p++) sum += part[channel * pieces + p];
    return sum;
}

__device__ __forceinline__ void put_sum(float *to, int64_t channel, double sum, bool accumulate)
{
    if (to) to[channel] = (float)(sum + (accumulate ? to[channel] : 0));
}

static __global__ void statistic_kernel(int64_t channels, int64_t pieces, const float *part, double count, float *to,
                                        bool accumulate)
{
    for (GRID_STRIDE(c, channels)) put_sum(to, c, pieces_sum(part, c, pieces) / count, accumulate);
}

static size_t channel_workspace(const struct hapt_view *x)
{
    const struct images n = images_of(x);
    return (size_t)(2 * n.channels * pieces_of(n)) * sizeof(float);
}

/* Adds up the sums of part_kernel; `part`: the workspace. */
template <class Element>
static enum hapt_status channel_parts(const struct hapt_view *x, const float *mean, const Element *dy, float *part,
                                      struct hapt_queue *queue)
{
    const struct images n = images_of(x);
    const int64_t pieces = pieces_of(n);
    return launch(part_kernel<Element>, dim3((unsigned)(n.channels * pieces)), CHANNEL_THREADS, 0, queue, n, pieces,
                  (const Element *)x->data, mean, dy, part);
}

/* to (+)= the sum of x, or of the squares of x - mean, divided by `count`. */
template <class Element>
static enum hapt_status channel_statistic(const struct hapt_view *x, const float *mean, double count, float *to,
                                          bool accumulate, float *part, struct hapt_queue *queue)
{
    const struct images n = images_of(x);
    HAPT_TRY((channel_parts<Element>(x, mean, NULL, part, queue)));
    return launch(statistic_kernel, blocks_for(n.channels, 64), 64, 0, queue, n.channels, pieces_of(n),
                  (const float *)part, count, to, accumulate);
}

#endif
