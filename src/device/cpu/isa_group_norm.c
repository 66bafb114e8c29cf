/* Group norm of images [rows][channels][height][width]: statistics of each row's groups of channels, as in isa_norm.c.
 */
#include "isa.h"

struct groups {
    int64_t count, channels, pixels; /* of all rows; channels of one; pixels of a channel */
    int64_t all;                     /* channels of a row */
    bool half;
};

INLINE struct groups groups_of(const struct hapt_call *call, bool half)
{
    const int64_t *shape = call->input[0].shape, groups = call->integer[0];
    return (struct groups){.count = shape[0] * groups,
                           .channels = shape[1] / groups,
                           .pixels = shape[2] * shape[3],
                           .all = shape[1],
                           .half = half};
}

INLINE float value_of(const void *base, int64_t i, bool half)
{
    return load(base, i, 1, half)[0];
}

INLINE void forward_group(const struct hapt_call *call, const struct groups *n, int64_t group)
{
    const void *x = call->input[0].data;
    const int64_t size = n->channels * n->pixels, at = group * size;
    struct sum sum = {0}, squares = {0};
    for (int64_t i = 0; i < size; i += LANES) sum_add(&sum, load(x, at + i, size - i, n->half));
    const float centre = (float)(sum_total(&sum) / (double)size);
    for (int64_t i = 0; i < size; i += LANES) {
        vector off = load(x, at + i, size - i, n->half) - centre;
        if (size - i < LANES) off = vector_select(lanes_below(size - i), off, (vector){0});
        sum_add(&squares, off * off);
    }
    const float rstd = (float)(1.0 / __builtin_sqrt(sum_total(&squares) / (double)size + call->real[0]));
    for (int64_t k = 0; k < n->channels; k++) {
        const int64_t plane = group * n->channels + k, channel = plane % n->all;
        const float scale = value_of(call->input[1].data, channel, n->half),
                    shift = value_of(call->input[2].data, channel, n->half);
        for (int64_t i = 0; i < n->pixels; i += LANES) {
            const int64_t left = n->pixels - i, place = plane * n->pixels + i;
            store(call->output[0].data, place, left, n->half,
                  (load(x, place, left, n->half) - centre) * rstd * scale + shift);
        }
    }
    ((float *)call->output[1].data)[group] = centre;
    ((float *)call->output[2].data)[group] = rstd;
}

INLINE void forward(const struct hapt_call *call, bool half)
{
    const struct groups n = groups_of(call, half);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.count *n.channels *n.pixels))
    for (int64_t group = 0; group < n.count; group++) forward_group(call, &n, group);
}

static size_t backward_workspace(const struct hapt_call *call)
{
    return (size_t)(call->input[0].shape[0] * call->input[0].shape[1]) * 2 * sizeof(float);
}

/*
 * With n = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - n mean(g n)) with means over the group. `sums`
 * [rows][channels][2] gets the sums of dy n and of dy over each channel of a row.
 */
INLINE void backward_group(const struct hapt_call *call, const struct groups *n, int64_t group, float *sums)
{
    const void *x = call->input[0].data, *gamma = call->input[1].data, *dy = call->input[4].data;
    const float mean = ((const float *)call->input[2].data)[group], rstd = ((const float *)call->input[3].data)[group];
    double sum_g = 0, sum_gn = 0;
    for (int64_t k = 0; k < n->channels; k++) {
        const int64_t plane = group * n->channels + k;
        struct sum product = {0}, plain = {0};
        for (int64_t i = 0; i < n->pixels; i += LANES) {
            const int64_t left = n->pixels - i, place = plane * n->pixels + i;
            const vector slope = load(dy, place, left, n->half); /* 0 in the lanes after the last pixel */
            sum_add(&product, slope * ((load(x, place, left, n->half) - mean) * rstd));
            sum_add(&plain, slope);
        }
        sums[2 * plane] = (float)sum_total(&product);
        sums[2 * plane + 1] = (float)sum_total(&plain);
        const double scale = value_of(gamma, plane % n->all, n->half);
        sum_gn += scale * sum_total(&product);
        sum_g += scale * sum_total(&plain);
    }
    const double size = (double)(n->channels * n->pixels);
    const float mean_g = (float)(sum_g / size), mean_gn = (float)(sum_gn / size);
    for (int64_t k = 0; k < n->channels; k++) {
        const int64_t plane = group * n->channels + k;
        const float scale = value_of(gamma, plane % n->all, n->half);
        for (int64_t i = 0; i < n->pixels; i += LANES) {
            const int64_t left = n->pixels - i, place = plane * n->pixels + i;
            const vector normal = (load(x, place, left, n->half) - mean) * rstd;
            vector dx = (load(dy, place, left, n->half) * scale - mean_g - normal * mean_gn) * rstd;
            if (call->accumulate & 1u) dx += load(call->output[0].data, place, left, n->half);
            store(call->output[0].data, place, left, n->half, dx);
        }
    }
}

/* input: x, gamma, mean, rstd, dy; output: dx, and dgamma, dbeta unless the parameters are frozen */
INLINE void backward(const struct hapt_call *call, bool half)
{
    const struct groups n = groups_of(call, half);
    float *sums = call->workspace;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, n.count *n.channels *n.pixels))
    for (int64_t group = 0; group < n.count; group++) backward_group(call, &n, group, sums);
    for (int o = 1; o < call->output_count; o++) {
        float *out = call->output[o].data;
        if (!out) continue;
        for (int64_t c = 0; c < n.all; c++) {
            double total = call->accumulate >> o & 1u ? out[c] : 0;
            for (int64_t plane = c; plane < n.count * n.channels; plane += n.all) total += sums[2 * plane + o - 1];
            out[c] = (float)total;
        }
    }
}

KERNELS(group_norm, forward(call, half))
KERNELS(group_norm_backward, backward(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_group_norm)[] = {
    KERNEL_ROWS("group_norm", NULL, group_norm),
    KERNEL_ROWS("group_norm_backward", backward_workspace, group_norm_backward),
    KERNEL_ROWS("group_norm_dx", backward_workspace, group_norm_backward),
    {HAPT_F32, {NULL, NULL, NULL}},
};
