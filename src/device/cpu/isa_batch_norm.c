/*
 * Batch norm with the statistics of the whole batch. x is [rows][channels][pixels]. One thread sums a channel over rows
 * and pixels. Sums are divided by the count of the whole batch; this call may hold a shard of it.
 */
#include <math.h>

#include "isa.h"

struct images {
    int64_t rows, channels, pixels;
};

INLINE struct images images_of(const struct hapt_view *x)
{
    return (struct images){x->shape[0], x->shape[1], x->shape[2] * x->shape[3]};
}

INLINE void put_sum(const struct hapt_call *call, int output, int64_t channel, double sum)
{
    float *to = (float *)call->output[output].data + channel;
    *to = (float)(sum + (call->accumulate >> output & 1u ? *to : 0));
}

/* Sum of x or, if `mean` is given, of the squares of x - mean. */
INLINE void statistic(const struct hapt_call *call, bool half, const float *mean)
{
    const struct images n = images_of(&call->input[0]);
    const void *x = call->input[0].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.rows *n.channels *n.pixels))
    for (int64_t c = 0; c < n.channels; c++) {
        struct sum sum = {0};
        for (int64_t r = 0; r < n.rows; r++)
            for (int64_t i = 0; i < n.pixels; i += LANES) {
                const int64_t left = n.pixels - i;
                vector value = load(x, (r * n.channels + c) * n.pixels + i, left, half);
                if (mean) {
                    value -= mean[c];
                    value *= value;
                    if (left < LANES) value = vector_select(lanes_below(left), value, (vector){0});
                }
                sum_add(&sum, value);
            }
        put_sum(call, 0, c, sum_total(&sum) / (double)call->integer[0]);
    }
}

INLINE void batch_mean(const struct hapt_call *call, bool half)
{
    statistic(call, half, NULL);
}

INLINE void batch_variance(const struct hapt_call *call, bool half)
{
    statistic(call, half, call->input[1].data);
}

INLINE float rstd_of(const struct hapt_call *call, float variance)
{
    return (float)(1 / sqrt((double)variance + call->real[0]));
}

INLINE float channel_rstd(const struct hapt_call *call, int64_t channel)
{
    return rstd_of(call, ((const float *)call->input[2].data)[channel]);
}

INLINE float channel_gamma(const struct hapt_call *call, int64_t channel, bool half)
{
    return load(call->input[3].data, channel, 1, half)[0];
}

/* Normalises by means and variances [channels], which are half or fp32. */
INLINE void normalise(const struct hapt_call *call, bool half, const void *means, const void *variances,
                      bool half_statistics)
{
    const struct images n = images_of(&call->input[0]);
    const void *x = call->input[0].data, *beta = call->input[4].data;
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.rows *n.channels *n.pixels))
    for (int64_t image = 0; image < n.rows * n.channels; image++) {
        const int64_t c = image % n.channels;
        const float mean = load(means, c, 1, half_statistics)[0], variance = load(variances, c, 1, half_statistics)[0];
        const float factor = channel_gamma(call, c, half) * rstd_of(call, variance), shift = load(beta, c, 1, half)[0];
        for (int64_t i = 0; i < n.pixels; i += LANES) {
            const int64_t at = image * n.pixels + i, left = n.pixels - i;
            vector value = (load(x, at, left, half) - mean) * factor + shift;
            if (accumulate) value += load(y, at, left, half);
            store(y, at, left, half, value);
        }
    }
}

/* input: x, mean, variance, gamma, beta */
INLINE void batch_norm(const struct hapt_call *call, bool half)
{
    normalise(call, half, call->input[1].data, call->input[2].data, false);
}

/* input: x, mean, variance, gamma, beta, running mean, running variance, training */
INLINE void batch_norm_running(const struct hapt_call *call, bool half)
{
    if (*(const float *)call->input[7].data != 0)
        batch_norm(call, half);
    else
        normalise(call, half, call->input[5].data, call->input[6].data, half);
}

/* input: mean, variance; output: mean, variance of a sample */
static enum hapt_status batch_norm_statistics_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const float *mean = call->input[0].data, *variance = call->input[1].data;
    const double count = (double)call->integer[0], factor = count > 1 ? count / (count - 1) : 1;
    (void)queue;
    for (int64_t c = 0; c < call->input[0].shape[0]; c++) {
        put_sum(call, 0, c, mean[c]);
        put_sum(call, 1, c, factor * variance[c]);
    }
    return HAPT_OK;
}

/* input: x, mean, variance, gamma, dy; output: dmean, dvariance, dgamma, dbeta */
INLINE void batch_norm_sums(const struct hapt_call *call, bool half)
{
    const struct images n = images_of(&call->input[0]);
    const void *x = call->input[0].data, *dy = call->input[4].data;
    const float *mean = call->input[1].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.rows *n.channels *n.pixels * 2))
    for (int64_t c = 0; c < n.channels; c++) {
        struct sum plain = {0}, weighted = {0};
        for (int64_t r = 0; r < n.rows; r++)
            for (int64_t i = 0; i < n.pixels; i += LANES) {
                const int64_t at = (r * n.channels + c) * n.pixels + i, left = n.pixels - i;
                const vector d = load(dy, at, left, half); /* 0 past the end */
                sum_add(&plain, d);
                sum_add(&weighted, d * (load(x, at, left, half) - mean[c]));
            }
        const double gamma = channel_gamma(call, c, half), rstd = channel_rstd(call, c);
        put_sum(call, 0, c, -gamma * rstd * sum_total(&plain));
        put_sum(call, 1, c, -0.5 * gamma * rstd * rstd * rstd * sum_total(&weighted));
        put_sum(call, 2, c, rstd * sum_total(&weighted));
        put_sum(call, 3, c, sum_total(&plain));
    }
}

/* input: x, mean, variance, gamma, dmean, dvariance, dy; output: dx */
INLINE void batch_norm_dx(const struct hapt_call *call, bool half)
{
    const struct images n = images_of(&call->input[0]);
    const void *x = call->input[0].data, *dy = call->input[6].data;
    const float *mean = call->input[1].data, *dmean = call->input[4].data, *dvariance = call->input[5].data;
    void *dx = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
    const double count = (double)call->integer[0];
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.rows *n.channels *n.pixels * 2))
    for (int64_t image = 0; image < n.rows * n.channels; image++) {
        const int64_t c = image % n.channels;
        const float factor = channel_gamma(call, c, half) * channel_rstd(call, c);
        const float slope = (float)(2 * dvariance[c] / count), shift = (float)(dmean[c] / count);
        for (int64_t i = 0; i < n.pixels; i += LANES) {
            const int64_t at = image * n.pixels + i, left = n.pixels - i;
            vector value = load(dy, at, left, half) * factor + (load(x, at, left, half) - mean[c]) * slope + shift;
            if (accumulate) value += load(dx, at, left, half);
            store(dx, at, left, half, value);
        }
    }
}

KERNELS(batch_mean, batch_mean(call, half))
KERNELS(batch_variance, batch_variance(call, half))
KERNELS(batch_norm, batch_norm(call, half))
KERNELS(batch_norm_running, batch_norm_running(call, half))
KERNELS(batch_norm_sums, batch_norm_sums(call, half))
KERNELS(batch_norm_dx, batch_norm_dx(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_batch_norm)[] = {
    KERNEL_ROWS("batch_mean", NULL, batch_mean),
    KERNEL_ROWS("batch_variance", NULL, batch_variance),
    KERNEL_ROWS("batch_norm", NULL, batch_norm),
    KERNEL_ROWS("batch_norm_sums", NULL, batch_norm_sums),
    KERNEL_ROWS("batch_norm_dx", NULL, batch_norm_dx),
    KERNEL_ROWS("batch_norm_running", NULL, batch_norm_running),
    {HAPT_F32, {"batch_norm_statistics", NULL, batch_norm_statistics_run}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
