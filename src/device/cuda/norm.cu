/*
 * Layer norm and RMS norm over the last dimension, forward and backward. RMS norm is layer norm without mean and beta:
 * CENTRED false, mean and beta NULL.
 */
#include "kernels.h"
#include "rows.cuh"

/* Rows of at most NARROW elements take a warp each, others a block. The second read of a row comes from the cache. */
enum { THREADS = 256, NARROW = 1024 };

template <bool WARP> static __device__ __forceinline__ float row_total(float value, float *shared)
{
    return WARP ? warp_sum(value) : block_sum(value, shared);
}

/* The rows of this warp or block, and its elements in each. */
#define FOR_ROWS(row, rows)                                                                       \
    const int team = WARP ? 32 : THREADS, member = WARP ? threadIdx.x & 31 : threadIdx.x,         \
              teams = WARP ? THREADS / 32 : 1;                                                    \
    for (int64_t row = (int64_t)blockIdx.x * teams + (WARP ? threadIdx.x >> 5 : 0); row < (rows); \
         row += (int64_t)gridDim.x * teams)
#define FOR_COLUMNS(c, columns) for (int64_t c = (int64_t)member * N; c < (columns); c += (int64_t)team * N)

template <class Element> struct norm_forward {
    const Element *x, *gamma, *beta;
    Element *y;
    float *mean, *rstd; /* [rows] */
    int64_t rows, columns;
    float epsilon;
};

template <class Element, int N, bool CENTRED, bool WARP>
static __global__ void norm_kernel(struct norm_forward<Element> norm)
{
    __shared__ float shared[32];
    const float columns = (float)norm.columns;
    FOR_ROWS(row, norm.rows)
    {
        const Element *x = norm.x + row * norm.columns;
        float value[N], scale[N], shift[N], sum = 0, centre = 0;
        if (CENTRED) {
            FOR_COLUMNS(c, norm.columns)
            {
                load<N>(x + c, value);
                for (int e = 0; e < N; e++) sum += value[e];
            }
            centre = row_total<WARP>(sum, shared) / columns;
        }
        sum = 0;
        FOR_COLUMNS(c, norm.columns)
        {
            load<N>(x + c, value);
            for (int e = 0; e < N; e++) sum += (value[e] - centre) * (value[e] - centre);
        }
        const float rstd = 1.0f / sqrtf(row_total<WARP>(sum, shared) / columns + norm.epsilon);
        FOR_COLUMNS(c, norm.columns)
        {
            load<N>(x + c, value);
            load<N>(norm.gamma + c, scale);
            if (CENTRED) load<N>(norm.beta + c, shift);
            for (int e = 0; e < N; e++) {
                value[e] = (value[e] - centre) * rstd * scale[e];
                if (CENTRED) value[e] += shift[e];
            }
            store<N>(norm.y + row * norm.columns + c, value, false);
        }
        if (member == 0) {
            if (CENTRED) norm.mean[row] = centre;
            norm.rstd[row] = rstd;
        }
    }
}

/* With n = (x - mean) rstd and g = dy gamma: dx = rstd (g - mean(g) - n mean(g n)); RMS norm has no mean(g). */
template <class Element> struct norm_backward {
    const Element *x, *gamma, *dy;
    const float *mean, *rstd;
    Element *dx;
    int64_t rows, columns;
    bool accumulate;
};

template <class Element, int N, bool CENTRED, bool WARP>
static __global__ void norm_dx_kernel(struct norm_backward<Element> job)
{
    __shared__ float shared[32];
    const float columns = (float)job.columns;
    FOR_ROWS(row, job.rows)
    {
        const Element *x = job.x + row * job.columns, *dy = job.dy + row * job.columns;
        const float mean = CENTRED ? job.mean[row] : 0.0f, rstd = job.rstd[row];
        float value[N], g[N], gamma[N], sum_g = 0, sum_gn = 0;
        FOR_COLUMNS(c, job.columns)
        {
            load<N>(x + c, value);
            load<N>(dy + c, g);
            load<N>(job.gamma + c, gamma);
            for (int e = 0; e < N; e++) {
                if (CENTRED) sum_g += g[e] * gamma[e];
                sum_gn += g[e] * gamma[e] * ((value[e] - mean) * rstd);
            }
        }
        const float mean_g = CENTRED ? row_total<WARP>(sum_g, shared) / columns : 0.0f,
                    mean_gn = row_total<WARP>(sum_gn, shared) / columns;
        FOR_COLUMNS(c, job.columns)
        {
            load<N>(x + c, value);
            load<N>(dy + c, g);
            load<N>(job.gamma + c, gamma);
            for (int e = 0; e < N; e++)
                value[e] = (g[e] * gamma[e] - mean_g - (value[e] - mean) * rstd * mean_gn) * rstd;
            store<N>(job.dx + row * job.columns + c, value, job.accumulate);
        }
    }
}

/* dgamma sums dy n, dbeta dy. */
template <class Element, bool CENTRED> struct norm_term {
    const Element *x, *dy;
    const float *mean, *rstd;
    int64_t columns;
    template <int N> __device__ void operator()(struct width<N>, int64_t row, int64_t column, float (*value)[N]) const
    {
        const float centre = CENTRED ? mean[row] : 0.0f, scale = rstd[row];
        float n[N], d[N];
        load<N>(x + row * columns + column, n);
        load<N>(dy + row * columns + column, d);
        for (int e = 0; e < N; e++) {
            value[0][e] = d[e] * ((n[e] - centre) * scale);
            if (CENTRED) value[CENTRED][e] = d[e];
        }
    }
};

static dim3 row_blocks(int64_t rows, bool warp)
{
    return blocks_for(rows, warp ? THREADS / 32 : 1);
}

template <class Element, int N, bool CENTRED>
static enum hapt_status norm_launch(const struct norm_forward<Element> &norm, struct hapt_queue *queue)
{
    const bool warp = norm.columns <= NARROW;
    return launch(warp ? norm_kernel<Element, N, CENTRED, true> : norm_kernel<Element, N, CENTRED, false>,
                  row_blocks(norm.rows, warp), THREADS, 0, queue, norm);
}

template <class Element, bool CENTRED>
static enum hapt_status norm_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct norm_forward<Element> norm;
    norm.x = (const Element *)call->input[0].data;
    norm.gamma = (const Element *)call->input[1].data;
    norm.beta = (const Element *)(CENTRED ? call->input[2].data : NULL);
    norm.y = (Element *)call->output[0].data;
    norm.mean = (float *)(CENTRED ? call->output[1].data : NULL);
    norm.rstd = (float *)call->output[CENTRED ? 2 : 1].data;
    norm.rows = view_rows(&call->input[0]);
    norm.columns = view_columns(&call->input[0]);
    norm.epsilon = (float)call->real[0];
    if (packs_fit<Element>(norm.columns, norm.x, norm.gamma, norm.beta, norm.y))
        return norm_launch<Element, pack<Element>::COUNT, CENTRED>(norm, queue);
    return norm_launch<Element, 1, CENTRED>(norm, queue);
}

static size_t backward_workspace(const struct hapt_call *call)
{
    return column_sums_workspace(view_rows(&call->input[0]), view_columns(&call->input[0]), call->output_count - 1);
}

template <class Element, int N, bool CENTRED>
static enum hapt_status backward_launch(const struct hapt_call *call, struct hapt_queue *queue,
                                        const struct norm_backward<Element> &job)
{
    const bool warp = job.columns <= NARROW,
               accumulate[2] = {(call->accumulate >> 1 & 1u) != 0, (call->accumulate >> 2 & 1u) != 0};
    const struct norm_term<Element, CENTRED> term = {
        job.x, job.dy, job.mean, job.rstd, job.columns
    };
    float *const out[2] = {(float *)call->output[1].data, (float *)(CENTRED ? call->output[2].data : NULL)};
    HAPT_TRY(launch(warp ? norm_dx_kernel<Element, N, CENTRED, true> : norm_dx_kernel<Element, N, CENTRED, false>,
                    row_blocks(job.rows, warp), THREADS, 0, queue, job));
    return column_sums<1 + CENTRED, N>(term, job.rows, job.columns, out, accumulate, call->workspace, queue);
}

/* input: x, gamma, (mean,) rstd, dy; output: dx, dgamma (, dbeta) */
template <class Element, bool CENTRED>
static enum hapt_status backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct norm_backward<Element> job;
    job.x = (const Element *)call->input[0].data;
    job.gamma = (const Element *)call->input[1].data;
    job.mean = (const float *)(CENTRED ? call->input[2].data : NULL);
    job.rstd = (const float *)call->input[CENTRED ? 3 : 2].data;
    job.dy = (const Element *)call->input[CENTRED ? 4 : 3].data;
    job.dx = (Element *)call->output[0].data;
    job.rows = view_rows(&call->input[0]);
    job.columns = view_columns(&call->input[0]);
    job.accumulate = call->accumulate & 1u;
    if (packs_fit<Element>(job.columns, job.x, job.gamma, job.dy, job.dx))
        return backward_launch<Element, pack<Element>::COUNT, CENTRED>(call, queue, job);
    return backward_launch<Element, 1, CENTRED>(call, queue, job);
}

extern const struct cuda_kernel hapt_cuda_norm[] = {
    CUDA_KERNELS_WITH("layer_norm", NULL, norm_run, true),
    CUDA_KERNELS_WITH("layer_norm_backward", backward_workspace, backward_run, true),
    CUDA_KERNELS_WITH("rms_norm", NULL, norm_run, false),
    CUDA_KERNELS_WITH("rms_norm_backward", backward_workspace, backward_run, false),
    CUDA_KERNELS_END,
};
