/*
 * Group norm of images [rows][channels][height][width]. A row has few groups but many planes, its channels, so planes
 * fill all multiprocessors: they are the rows of rows.cuh. A warp then adds up the planes of a group.
 */
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = ROW_THREADS };

struct planes {
    int64_t count, channels, pixels; /* of all rows; channels of a group; pixels of a plane */
    int64_t all;                     /* channels of a row */
};

static struct planes planes_of(const struct hapt_call *call)
{
    const int64_t *shape = call->input[0].shape;
    return {shape[0] * shape[1], shape[1] / call->integer[0], shape[2] * shape[3], shape[1]};
}

/* part [planes][2]: the mean of a plane, and the sum of squares around it. */
template <class Element, int N, bool WARP>
static __global__ void moments_kernel(struct planes n, const Element *x, float *part)
{
    __shared__ float shared[32];
    FOR_ROWS(plane, n.count)
    {
        float value[N], sum = 0, squares = 0;
        FOR_COLUMNS(c, n.pixels)
        {
            load<N>(x + plane * n.pixels + c, value);
            for (int e = 0; e < N; e++) sum += value[e];
        }
        const float middle = row_total<WARP>(sum, shared) / (float)n.pixels;
        FOR_COLUMNS(c, n.pixels)
        {
            load<N>(x + plane * n.pixels + c, value);
            for (int e = 0; e < N; e++) squares += (value[e] - middle) * (value[e] - middle);
        }
        squares = row_total<WARP>(squares, shared);
        if (member != 0) continue;
        part[2 * plane] = middle;
        part[2 * plane + 1] = squares;
    }
}

/* The statistics of groups, from those of their planes. */
static __global__ void statistics_kernel(struct planes n, const float *part, float epsilon, float *mean, float *rstd)
{
    enum { WARP = true };
    FOR_ROWS(group, n.count / n.channels)
    {
        const float *own = part + 2 * group * n.channels;
        float sum = 0, squares = 0;
        for (int64_t k = member; k < n.channels; k += team) sum += own[2 * k];
        const float centre = warp_sum(sum) / (float)n.channels;
        for (int64_t k = member; k < n.channels; k += team) {
            const float off = own[2 * k] - centre;
            squares += own[2 * k + 1] + (float)n.pixels * off * off;
        }
        squares = warp_sum(squares);
        if (member != 0) continue;
        mean[group] = centre;
        rstd[group] = 1.0f / sqrtf(squares / (float)(n.channels * n.pixels) + epsilon);
    }
}

template <class Element> struct group_forward {
    struct planes n;
    const Element *x, *gamma, *beta;
    Element *y;
    float *mean, *rstd; /* [rows][groups] */
    float epsilon;
};

template <class Element, int N, bool WARP> static __global__ void apply_kernel(struct group_forward<Element> job)
{
    const struct planes n = job.n;
    FOR_ROWS(plane, n.count)
    {
        const float centre = job.mean[plane / n.channels], rstd = job.rstd[plane / n.channels],
                    scale = to_float(job.gamma[plane % n.all]), shift = to_float(job.beta[plane % n.all]);
        float value[N];
        FOR_COLUMNS(c, n.pixels)
        {
            load<N>(job.x + plane * n.pixels + c, value);
            for (int e = 0; e < N; e++) value[e] = (value[e] - centre) * rstd * scale + shift;
            store<N>(job.y + plane * n.pixels + c, value, false);
        }
    }
}

/* With n = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - n mean(g n)), with means over the group. */
template <class Element> struct group_backward {
    struct planes n;
    const Element *x, *gamma, *dy;
    const float *mean, *rstd;
    float *sums;  /* [planes][2]: of dy n, and of dy */
    float *means; /* [rows][groups][2]: of g n, and of g */
    Element *dx;
    bool accumulate;
};

template <class Element, int N, bool WARP> static __global__ void sums_kernel(struct group_backward<Element> job)
{
    __shared__ float shared[32];
    const struct planes n = job.n;
    FOR_ROWS(plane, n.count)
    {
        const float mean = job.mean[plane / n.channels], rstd = job.rstd[plane / n.channels];
        float value[N], slope[N], product = 0, plain = 0;
        FOR_COLUMNS(c, n.pixels)
        {
            load<N>(job.x + plane * n.pixels + c, value);
            load<N>(job.dy + plane * n.pixels + c, slope);
            for (int e = 0; e < N; e++) {
                product += slope[e] * ((value[e] - mean) * rstd);
                plain += slope[e];
            }
        }
        product = row_total<WARP>(product, shared);
        plain = row_total<WARP>(plain, shared);
        if (member != 0) continue;
        job.sums[2 * plane] = product;
        job.sums[2 * plane + 1] = plain;
    }
}

template <class Element> static __global__ void means_kernel(struct group_backward<Element> job)
{
    enum { WARP = true };
    const struct planes n = job.n;
    const float size = (float)(n.channels * n.pixels);
    FOR_ROWS(group, n.count / n.channels)
    {
        float sum_g = 0, sum_gn = 0;
        for (int64_t k = group * n.channels + member; k < (group + 1) * n.channels; k += team) {
            const float gamma = to_float(job.gamma[k % n.all]);
            sum_gn += gamma * job.sums[2 * k];
            sum_g += gamma * job.sums[2 * k + 1];
        }
        sum_gn = warp_sum(sum_gn);
        sum_g = warp_sum(sum_g);
        if (member != 0) continue;
        job.means[2 * group] = sum_gn / size;
        job.means[2 * group + 1] = sum_g / size;
    }
}

template <class Element, int N, bool WARP> static __global__ void group_dx_kernel(struct group_backward<Element> job)
{
    const struct planes n = job.n;
    FOR_ROWS(plane, n.count)
    {
        const int64_t group = plane / n.channels;
        const float mean = job.mean[group], rstd = job.rstd[group], scale = to_float(job.gamma[plane % n.all]),
                    mean_gn = job.means[2 * group], mean_g = job.means[2 * group + 1];
        float value[N], slope[N];
        FOR_COLUMNS(c, n.pixels)
        {
            load<N>(job.x + plane * n.pixels + c, value);
            load<N>(job.dy + plane * n.pixels + c, slope);
            for (int e = 0; e < N; e++)
                value[e] = (slope[e] * scale - mean_g - (value[e] - mean) * rstd * mean_gn) * rstd;
            store<N>(job.dx + plane * n.pixels + c, value, job.accumulate);
        }
    }
}

/* Adds the sums of a channel over all rows; `which`: 0 of dy n, 1 of dy. */
static __global__ void parameter_kernel(struct planes n, const float *sums, int which, float *out, bool accumulate)
{
    for (GRID_STRIDE(c, n.all)) {
        float total = accumulate ? out[c] : 0;
        for (int64_t plane = c; plane < n.count; plane += n.all) total += sums[2 * plane + which];
        out[c] = total;
    }
}

static size_t workspace(const struct hapt_call *call)
{
    const struct planes n = planes_of(call);
    return (size_t)(n.count + n.count / n.channels) * 2 * sizeof(float);
}

template <class Element, int N, bool WARP>
static enum hapt_status forward_launch(const struct group_forward<Element> &job, float *part, struct hapt_queue *queue)
{
    const dim3 blocks = row_blocks(job.n.count, WARP);
    HAPT_TRY(launch(moments_kernel<Element, N, WARP>, blocks, THREADS, 0, queue, job.n, job.x, part));
    HAPT_TRY(launch(statistics_kernel, row_blocks(job.n.count / job.n.channels, true), THREADS, 0, queue, job.n,
                    (const float *)part, job.epsilon, job.mean, job.rstd));
    return launch(apply_kernel<Element, N, WARP>, blocks, THREADS, 0, queue, job);
}

template <class Element, int N, bool WARP>
static enum hapt_status backward_launch(const struct group_backward<Element> &job, struct hapt_queue *queue)
{
    const dim3 blocks = row_blocks(job.n.count, WARP);
    HAPT_TRY(launch(sums_kernel<Element, N, WARP>, blocks, THREADS, 0, queue, job));
    HAPT_TRY(launch(means_kernel<Element>, row_blocks(job.n.count / job.n.channels, true), THREADS, 0, queue, job));
    return launch(group_dx_kernel<Element, N, WARP>, blocks, THREADS, 0, queue, job);
}

/* Calls LAUNCH for packs of elements where they fit, and with a warp for each small plane. */
#define PLANES_LAUNCH(LAUNCH, packed, pixels, ...)                                                  \
    ((pixels) <= NARROW_ROW ? ((packed) ? LAUNCH<Element, pack<Element>::COUNT, true>(__VA_ARGS__)  \
                                        : LAUNCH<Element, 1, true>(__VA_ARGS__))                    \
                            : ((packed) ? LAUNCH<Element, pack<Element>::COUNT, false>(__VA_ARGS__) \
                                        : LAUNCH<Element, 1, false>(__VA_ARGS__)))

template <class Element> static enum hapt_status group_norm_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct group_forward<Element> job;
    job.n = planes_of(call);
    job.x = (const Element *)call->input[0].data;
    job.gamma = (const Element *)call->input[1].data;
    job.beta = (const Element *)call->input[2].data;
    job.y = (Element *)call->output[0].data;
    job.mean = (float *)call->output[1].data;
    job.rstd = (float *)call->output[2].data;
    job.epsilon = (float)call->real[0];
    const bool packed = packs_fit<Element>(job.n.pixels, job.x, job.y);
    return PLANES_LAUNCH(forward_launch, packed, job.n.pixels, job, (float *)call->workspace, queue);
}

/* input: x, gamma, mean, rstd, dy; output: dx, and dgamma, dbeta unless the parameters are frozen */
template <class Element>
static enum hapt_status group_norm_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct group_backward<Element> job;
    job.n = planes_of(call);
    job.x = (const Element *)call->input[0].data;
    job.gamma = (const Element *)call->input[1].data;
    job.mean = (const float *)call->input[2].data;
    job.rstd = (const float *)call->input[3].data;
    job.dy = (const Element *)call->input[4].data;
    job.sums = (float *)call->workspace;
    job.means = job.sums + 2 * job.n.count;
    job.dx = (Element *)call->output[0].data;
    job.accumulate = call->accumulate & 1u;
    const bool packed = packs_fit<Element>(job.n.pixels, job.x, job.dy, job.dx);
    HAPT_TRY(PLANES_LAUNCH(backward_launch, packed, job.n.pixels, job, queue));
    for (int o = 1; o < call->output_count; o++) {
        float *out = (float *)call->output[o].data;
        if (!out) continue;
        HAPT_TRY(launch(parameter_kernel, blocks_for(job.n.all, 64), 64, 0, queue, job.n, (const float *)job.sums,
                        o - 1, out, (call->accumulate >> o & 1u) != 0));
    }
    return HAPT_OK;
}

extern const struct cuda_kernel hapt_cuda_group_norm[] = {
    CUDA_KERNELS("group_norm", workspace, group_norm_run),
    CUDA_KERNELS("group_norm_backward", workspace, group_norm_backward_run),
    CUDA_KERNELS("group_norm_dx", workspace, group_norm_backward_run),
    CUDA_KERNELS_END,
};
