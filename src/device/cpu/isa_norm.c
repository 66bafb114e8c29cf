/* Layer norm and RMS norm over the last dimension, forward and backward. Statistics are double, from two-level fp32
 * sums in two passes. RMS norm is layer norm without mean and beta: `centred` false, mean and beta NULL. Rows are as
 * long as gamma, so that the same kernels normalise each head of a row. real[1] is added to gamma: 0, or 1 in some RMS
 * norms. */
#include "isa.h"

INLINE void norm_row(const void *x, int64_t at, int64_t columns, bool half, bool centred, const void *gamma,
                     const void *beta, double epsilon, float offset, void *y, float *mean, float *rstd)
{
    struct sum sum = {0};
    for (int64_t c = 0; centred && c < columns; c += LANES) sum_add(&sum, load(x, at + c, columns - c, half));
    const float centre = centred ? (float)(sum_total(&sum) / (double)columns) : 0;
    struct sum squares = {0};
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector off = load(x, at + c, left, half) - centre;
        if (left < LANES) off = vector_select(lanes_below(left), off, (vector){0});
        sum_add(&squares, off * off);
    }
    const float scale = (float)(1.0 / __builtin_sqrt(sum_total(&squares) / (double)columns + epsilon));
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        vector value = (load(x, at + c, left, half) - centre) * scale * (load(gamma, c, left, half) + offset);
        if (centred) value += load(beta, c, left, half);
        store(y, at + c, left, half, value);
    }
    if (centred) *mean = centre;
    *rstd = scale;
}

INLINE void norm_run(const struct hapt_call *call, bool centred, bool half)
{
    const int64_t columns = view_columns(&call->input[1]), rows = hapt_view_elements(&call->input[0]) / columns;
    const void *x = call->input[0].data, *gamma = call->input[1].data, *beta = centred ? call->input[2].data : NULL;
    void *y = call->output[0].data;
    float *mean = centred ? call->output[1].data : NULL, *rstd = call->output[centred ? 2 : 1].data; /* [rows] */
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++)
        norm_row(x, r * columns, columns, half, centred, gamma, beta, call->real[0], (float)call->real[1], y,
                 centred ? &mean[r] : NULL, &rstd[r]);
}

struct norm_backward {
    const void *x, *gamma, *dy;
    void *dx;
    int64_t columns;
    float offset;
    bool half, centred, accumulate;
};

/*
 * One row: with n = (x - mean) rstd and g = dy gamma, dx = rstd (g - mean(g) - n mean(g n)); no mean(g) in RMS norm.
 * The row's share of dgamma (and dbeta) goes to `partial` [1 or 2][columns].
 */
INLINE void norm_backward_row(const struct norm_backward *job, int64_t row, float mean, float rstd, float *partial)
{
    const int64_t columns = job->columns, at = row * columns;
    const bool half = job->half;
    float *dgamma = partial, *dbeta = partial + columns;
    struct sum sum_g = {0}, sum_gn = {0}, sum_offset = {0};
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        const vector n = (load(job->x, at + c, left, half) - mean) * rstd;
        const vector dy = load(job->dy, at + c, left, half);
        const vector g = dy * load(job->gamma, c, left, half);
        sum_add(&sum_gn, g * n);
        store(dgamma, c, left, false, load(dgamma, c, left, false) + dy * n);
        if (!job->centred) {
            if (job->offset > 0) sum_add(&sum_offset, dy * (n * job->offset)); /* the offset's part of g n */
            continue;
        }
        sum_add(&sum_g, g);
        store(dbeta, c, left, false, load(dbeta, c, left, false) + dy);
    }
    const float mean_g = job->centred ? (float)(sum_total(&sum_g) / (double)columns) : 0;
    const float mean_gn = (float)((sum_total(&sum_gn) + sum_total(&sum_offset)) / (double)columns);
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        const vector n = (load(job->x, at + c, left, half) - mean) * rstd;
        const vector g = load(job->dy, at + c, left, half) * (load(job->gamma, c, left, half) + job->offset);
        vector dx = (g - mean_g - n * mean_gn) * rstd;
        if (job->accumulate) dx += load(job->dx, at + c, left, half);
        store(job->dx, at + c, left, half, dx);
    }
}

static size_t norm_backward_workspace(const struct hapt_call *call)
{
    const int64_t columns = view_columns(&call->input[1]), rows = hapt_view_elements(&call->input[0]) / columns;
    const int sums = call->input_count - 3; /* dgamma (, dbeta), also if they are not asked for */
    return (size_t)(chunk_count(rows) * sums * columns) * sizeof(float);
}

/* input: x, gamma, (mean,) rstd, dy; output: dx, and dgamma (, dbeta) unless the parameters are frozen */
INLINE void norm_backward_run(const struct hapt_call *call, bool centred, bool half)
{
    const int64_t columns = view_columns(&call->input[1]), rows = hapt_view_elements(&call->input[0]) / columns;
    const int64_t chunk = chunk_rows(rows), chunks = chunk_count(rows), width = (centred ? 2 : 1) * columns;
    const struct norm_backward job = {.x = call->input[0].data,
                                      .gamma = call->input[1].data,
                                      .dy = call->input[centred ? 4 : 3].data,
                                      .dx = call->output[0].data,
                                      .columns = columns,
                                      .offset = (float)call->real[1],
                                      .half = half,
                                      .centred = centred,
                                      .accumulate = call->accumulate & 1u};
    const float *mean = centred ? call->input[2].data : NULL, *rstd = call->input[centred ? 3 : 2].data;
    float *partial = call->workspace; /* [chunks][width] */
#pragma omp parallel num_threads(threads_for(call, rows *columns))
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < chunks; k++) {
            float *mine = partial + k * width;
            memset(mine, 0, (size_t)width * sizeof *mine);
            for (int64_t r = k * chunk; r < smaller(rows, (k + 1) * chunk); r++)
                norm_backward_row(&job, r, centred ? mean[r] : 0, rstd[r], mine);
        }
#pragma omp for schedule(static)
        for (int64_t c = 0; c < width; c += LANES) {
            const int64_t left = width - c;
            vector total = {0};
            for (int64_t k = 0; k < chunks; k++) total += load(partial + k * width, c, left, false);
            store(partial, c, left, false, total); /* in chunk 0's memory: no other thread reads these columns */
        }
    }
    for (int o = 1; o < call->output_count; o++) {
        float *out = call->output[o].data;
        const float *total = partial + (o - 1) * columns;
        if (!out) continue;
        if (call->accumulate >> o & 1u)
            for (int64_t c = 0; c < columns; c++) out[c] += total[c];
        else
            memcpy(out, total, (size_t)columns * sizeof *out);
    }
}

KERNELS(layer, norm_run(call, true, half))
KERNELS(layer_backward, norm_backward_run(call, true, half))
KERNELS(rms, norm_run(call, false, half))
KERNELS(rms_backward, norm_backward_run(call, false, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_norm)[] = {
    KERNEL_ROWS("layer_norm", NULL, layer),
    KERNEL_ROWS("layer_norm_backward", norm_backward_workspace, layer_backward),
    KERNEL_ROWS("layer_norm_dx", norm_backward_workspace, layer_backward),
    KERNEL_ROWS("rms_norm", NULL, rms),
    KERNEL_ROWS("rms_norm_backward", norm_backward_workspace, rms_backward),
    KERNEL_ROWS("rms_norm_dx", norm_backward_workspace, rms_backward),
    KERNEL_ROWS("head_rms_norm", NULL, rms),
    KERNEL_ROWS("head_rms_norm_backward", norm_backward_workspace, rms_backward),
    KERNEL_ROWS("head_rms_norm_dx", norm_backward_workspace, rms_backward),
    {HAPT_F32, {NULL, NULL, NULL}},
};
