/*
 * Batch norm with the statistics of the whole batch. x is [rows][channels][pixels]. Sums go over rows and pixels and
 * are divided by the count of the whole batch; this call may hold a shard of it.
 */
#include "channels.cuh"
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256 };

__device__ __forceinline__ float channel_rstd(const float *variance, int64_t channel, double epsilon)
{
    return (float)(1 / sqrt((double)variance[channel] + epsilon));
}

template <class Element>
__global__ void sums_kernel(int64_t channels, int64_t pieces, const float *part, const float *variance, double epsilon,
                            const Element *gammas, float *dmean, float *dvariance, float *dgamma, float *dbeta,
                            unsigned accumulate)
{
    for (GRID_STRIDE(c, channels)) {
        const double plain = pieces_sum(part, c, pieces), weighted = pieces_sum(part + channels * pieces, c, pieces);
        const double gamma = to_float(gammas[c]), rstd = channel_rstd(variance, c, epsilon);
        put_sum(dmean, c, -gamma * rstd * plain, accumulate & 1u);
        put_sum(dvariance, c, -0.5 * gamma * rstd * rstd * rstd * weighted, accumulate & 2u);
        put_sum(dgamma, c, rstd * weighted, accumulate & 4u);
        put_sum(dbeta, c, plain, accumulate & 8u);
    }
}

/* y = a factor + (x - mean) slope + shift, with coefficients per channel. Forward: no a. */
struct coefficients {
    float factor, slope, shift, mean;
};

template <class Element> struct normalise {
    const float *mean, *variance;
    const Element *gamma, *beta;
    double epsilon;
    __device__ struct coefficients operator()(int64_t c) const
    {
        return {0, to_float(gamma[c]) * channel_rstd(variance, c, epsilon), to_float(beta[c]), mean[c]};
    }
};

/* By the statistics of the batch in training, else by the running ones. */
template <class Element> struct normalise_running {
    struct normalise<Element> batch;
    const Element *mean, *variance;
    const float *training;
    __device__ struct coefficients operator()(int64_t c) const
    {
        if (*training != 0) return batch(c);
        const float wide = to_float(variance[c]);
        return {0, to_float(batch.gamma[c]) * channel_rstd(&wide, 0, batch.epsilon), to_float(batch.beta[c]),
                to_float(mean[c])};
    }
};

template <class Element> struct normalise_dx {
    const float *mean, *variance;
    const Element *gamma;
    const float *dmean, *dvariance;
    double epsilon, count;
    __device__ struct coefficients operator()(int64_t c) const
    {
        return {to_float(gamma[c]) * channel_rstd(variance, c, epsilon), (float)(2 * dvariance[c] / count),
                (float)(dmean[c] / count), mean[c]};
    }
};

/* A block takes some elements of one image and channel (grid.x: images, grid.y: their parts). */
template <class Element, class Of>
__global__ void normalise_kernel(struct images n, const Element *a, const Element *x, Of of, Element *y,
                                 bool accumulate)
{
    const int64_t images = n.rows * n.channels;
    for (int64_t image = blockIdx.x; image < images; image += gridDim.x) {
        const struct coefficients by = of(image % n.channels);
        const int64_t first = image * n.pixels;
        for (int64_t i = first + (int64_t)blockIdx.y * blockDim.x + threadIdx.x; i < first + n.pixels;
             i += (int64_t)gridDim.y * blockDim.x) {
            const float value = (a ? to_float(a[i]) * by.factor : 0) + (to_float(x[i]) - by.mean) * by.slope + by.shift;
            store<1>(y + i, &value, accumulate);
        }
    }
}

template <class Element, class Of>
static enum hapt_status normalise_all(const struct hapt_call *call, const void *a, Of of, struct hapt_queue *queue)
{
    const struct images n = images_of(&call->input[0]);
    const int threads = n.pixels > 128 ? THREADS : n.pixels > 32 ? 128 : 32;
    const int64_t parts = (n.pixels + 4 * threads - 1) / (4 * threads);
    dim3 grid = blocks_for(n.rows * n.channels, 1);
    grid.y = (unsigned)(parts < 64 ? parts : 64);
    return launch(normalise_kernel<Element, Of>, grid, threads, 0, queue, n, (const Element *)a,
                  (const Element *)call->input[0].data, of, (Element *)call->output[0].data,
                  (bool)(call->accumulate & 1u));
}

/* input: x (, mean) */
template <class Element> static enum hapt_status statistic_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const float *mean = call->input_count > 1 ? (const float *)call->input[1].data : NULL;
    return channel_statistic<Element>(&call->input[0], mean, (double)call->integer[0], (float *)call->output[0].data,
                                      call->accumulate & 1u, (float *)call->workspace, queue);
}

template <class Element> static struct normalise<Element> by_batch(const struct hapt_call *call) {
    const struct hapt_view *in = call->input;
    return {(const float *)in[1].data, (const float *)in[2].data, (const Element *)in[3].data,
            (const Element *)in[4].data, call->real[0]};
}

/* input: x, mean, variance, gamma, beta */
template <class Element>
static enum hapt_status batch_norm_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return normalise_all<Element>(call, NULL, by_batch<Element>(call), queue);
}

/* input: x, mean, variance, gamma, beta, running mean, running variance, training */
template <class Element> static enum hapt_status running_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *in = call->input;
    const struct normalise_running<Element> of = {
        by_batch<Element>(call), (const Element *)in[5].data, (const Element *)in[6].data, (const float *)in[7].data
    };
    return normalise_all<Element>(call, NULL, of, queue);
}

__global__ void statistics_kernel(int64_t channels, const float *mean, const float *variance, double factor,
                                  float *mean_sum, float *variance_sum, unsigned accumulate)
{
    for (GRID_STRIDE(c, channels)) {
        put_sum(mean_sum, c, mean[c], accumulate & 1u);
        put_sum(variance_sum, c, factor * variance[c], accumulate & 2u);
    }
}

/* input: mean, variance; output: mean, variance of a sample */
static enum hapt_status statistics_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const double count = (double)call->integer[0];
    const int64_t channels = call->input[0].shape[0];
    return launch(statistics_kernel, blocks_for(channels, 64), 64, 0, queue, channels,
                  (const float *)call->input[0].data, (const float *)call->input[1].data,
                  count > 1 ? count / (count - 1) : 1.0, (float *)call->output[0].data, (float *)call->output[1].data,
                  call->accumulate);
}

/* input: x, mean, variance, gamma, dy; output: dmean, dvariance, dgamma, dbeta */
template <class Element> static enum hapt_status sums_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *in = call->input, *out = call->output;
    const struct images n = images_of(&in[0]);
    HAPT_TRY(channel_parts<Element>(&in[0], (const float *)in[1].data, (const Element *)in[4].data,
                                    (float *)call->workspace, queue));
    return launch(sums_kernel<Element>, blocks_for(n.channels, 64), 64, 0, queue, n.channels, pieces_of(n),
                  (const float *)call->workspace, (const float *)in[2].data, call->real[0], (const Element *)in[3].data,
                  (float *)out[0].data, (float *)out[1].data, (float *)out[2].data, (float *)out[3].data,
                  call->accumulate);
}

/* input: x, mean, variance, gamma, dmean, dvariance, dy; output: dx */
template <class Element> static enum hapt_status dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *in = call->input;
    const struct normalise_dx<Element> of = {
        (const float *)in[1].data, (const float *)in[2].data, (const Element *)in[3].data, (const float *)in[4].data,
            (const float *)in[5].data, call->real[0], (double)call->integer[0]
    };
    return normalise_all<Element>(call, in[6].data, of, queue);
}

static size_t part_workspace(const struct hapt_call *call)
{
    return channel_workspace(&call->input[0]);
}

extern const struct cuda_kernel hapt_cuda_batch_norm[] = {
    CUDA_KERNELS("batch_mean", part_workspace, statistic_run),
    CUDA_KERNELS("batch_variance", part_workspace, statistic_run),
    CUDA_KERNELS("batch_norm", NULL, batch_norm_run),
    CUDA_KERNELS("batch_norm_sums", part_workspace, sums_run),
    CUDA_KERNELS("batch_norm_dx", NULL, dx_run),
    CUDA_KERNELS("batch_norm_running", NULL, running_run),
    {HAPT_F32, {"batch_norm_statistics", NULL, statistics_run}},
    CUDA_KERNELS_END,
};
