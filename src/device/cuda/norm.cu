/*
 * Layer norm and RMS norm over the last dimension, forward and backward. RMS norm is layer norm without mean and beta:
 * CENTRED false, mean and beta NULL. Rows are as long as gamma, so that the same kernels normalise each head of a row.
 */
#include "kernels.h"
#include "rows.cuh"

/*
 * A thread keeps up to SLOTS packs of its row in registers; rows of more packs are read again, which comes from the
 * cache. For rows of at most SLOTS packs, the backward pass also sums dgamma and dbeta on the way: a block has a part
 * of the rows, whose sums are added up afterwards.
 */
enum { THREADS = ROW_THREADS, WARPS = ROW_WARPS, SLOTS = 4, PARTS = 256, PART_ROWS = 16 };

/* Packs of N elements that each thread has of a row. */
static int64_t slots_of(int64_t columns, int n)
{
    const int64_t wide = (columns <= NARROW_ROW ? 32 : THREADS) * (int64_t)n;
    return (columns + wide - 1) / wide;
}

template <class Element> struct norm_forward {
    const Element *x, *gamma, *beta;
    Element *y;
    float *mean, *rstd; /* [rows] */
    int64_t rows, columns;
    float epsilon, offset; /* offset: added to gamma in RMS norm */
};

/* Gamma, plus a constant in RMS norm. */
template <int N, bool CENTRED, class Element>
static __device__ __forceinline__ void gamma_load(const Element *gamma, float offset, float *to)
{
    load<N>(gamma, to);
    if constexpr (!CENTRED)
        for (int e = 0; e < N; e++) to[e] += offset;
}

/* Calls body(slot, column) for the packs of this thread. */
#define FOR_SLOTS(s, c, columns) \
    UNROLL for (int s = 0; s < COUNT; s++) if (const int64_t c = ((int64_t)s * team + member) * N; c < (columns))

template <class Element, int N, bool CENTRED, bool WARP, int COUNT>
static __global__ __launch_bounds__(THREADS) void norm_slots_kernel(struct norm_forward<Element> norm)
{
    __shared__ float shared[32];
    const float columns = (float)norm.columns;
    FOR_ROWS(row, norm.rows)
    {
        float value[COUNT][N] = {}, scale[N], shift[N], sum = 0, centre = 0;
        FOR_SLOTS(s, c, norm.columns) load<N>(norm.x + row * norm.columns + c, value[s]);
        if (CENTRED) {
            FOR_SLOTS(s, c, norm.columns)
            for (int e = 0; e < N; e++) sum += value[s][e];
            centre = row_total<WARP>(sum, shared) / columns;
        }
        sum = 0;
        FOR_SLOTS(s, c, norm.columns)
        for (int e = 0; e < N; e++) sum += (value[s][e] - centre) * (value[s][e] - centre);
        const float rstd = 1.0f / sqrtf(row_total<WARP>(sum, shared) / columns + norm.epsilon);
        FOR_SLOTS(s, c, norm.columns)
        {
            gamma_load<N, CENTRED>(norm.gamma + c, norm.offset, scale);
            if (CENTRED) load<N>(norm.beta + c, shift);
            for (int e = 0; e < N; e++) {
                value[s][e] = (value[s][e] - centre) * rstd * scale[e];
                if (CENTRED) value[s][e] += shift[e];
            }
            store<N>(norm.y + row * norm.columns + c, value[s], false);
        }
        if (member == 0) {
            if (CENTRED) norm.mean[row] = centre;
            norm.rstd[row] = rstd;
        }
    }
}

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
            gamma_load<N, CENTRED>(norm.gamma + c, norm.offset, scale);
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
    float offset;
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
            gamma_load<N, CENTRED>(job.gamma + c, job.offset, gamma);
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
            gamma_load<N, CENTRED>(job.gamma + c, job.offset, gamma);
            for (int e = 0; e < N; e++)
                value[e] = (g[e] * gamma[e] - mean_g - (value[e] - mean) * rstd * mean_gn) * rstd;
            store<N>(job.dx + row * job.columns + c, value, job.accumulate);
        }
    }
}

/* Rows of a block of norm_backward_kernel. The shape alone decides. */
static int64_t part_rows(int64_t rows)
{
    const int64_t even = (rows + PARTS - 1) / PARTS;
    return even > PART_ROWS ? even : (int64_t)PART_ROWS;
}

static int64_t part_count(int64_t rows)
{
    return (rows + part_rows(rows) - 1) / part_rows(rows);
}

/* The sums of all warps of the block, in their order, of columns that each warp has in `sum`. `to`: this block's sums
 * of all columns. */
template <int N, bool WARP, int COUNT>
static __device__ __forceinline__ void part_store(const float (*sum)[N], int64_t columns, float *shared, float *to)
{
    const int team = WARP ? 32 : THREADS, member = WARP ? threadIdx.x & 31 : threadIdx.x;
    if constexpr (!WARP) {
        FOR_SLOTS(s, c, columns)
        for (int e = 0; e < N; e++) to[c + e] = sum[s][e];
    } else {
        UNROLL
        for (int s = 0; s < COUNT; s++) {
            __syncthreads();
            for (int e = 0; e < N; e++) shared[(threadIdx.x >> 5) * 32 * N + member * N + e] = sum[s][e];
            __syncthreads();
            for (int i = threadIdx.x; i < 32 * N; i += THREADS) {
                const int64_t c = (int64_t)s * 32 * N + i;
                float total = 0;
                for (int w = 0; w < WARPS; w++) total += shared[w * 32 * N + i];
                if (c < columns) to[c] = total;
            }
        }
    }
}

/* N elements as they are in memory: half the registers of floats. */
template <class Element, int N> struct alignas(N * sizeof(Element)) slot {
    Element element[N];
};

/* dx, and the sums of dgamma and dbeta of a part of the rows: part [blocks][1 + CENTRED][columns]. */
template <class Element, int N, bool CENTRED, bool WARP, int COUNT>
static __global__ __launch_bounds__(THREADS) void norm_backward_kernel(struct norm_backward<Element> job, int64_t each,
                                                                       float *part)
{
    __shared__ float shared[WARP ? WARPS * 32 * N : 32];
    typedef slot<Element, N> slot_of;
    const int team = WARP ? 32 : THREADS, member = WARP ? threadIdx.x & 31 : threadIdx.x, teams = WARP ? WARPS : 1;
    const float columns = (float)job.columns;
    const int64_t first = blockIdx.x * each, end = first + each < job.rows ? first + each : job.rows;
    float dgamma[COUNT][N] = {}, dbeta[COUNT][N] = {};
    for (int64_t row = first + (WARP ? threadIdx.x >> 5 : 0); row < end; row += teams) {
        const float mean = CENTRED ? job.mean[row] : 0.0f, rstd = job.rstd[row];
        slot_of x[COUNT] = {}, dy[COUNT] = {};
        float gamma[N], sum_g = 0, sum_gn = 0;
        FOR_SLOTS(s, c, job.columns)
        {
            x[s] = *(const slot_of *)(job.x + row * job.columns + c);
            dy[s] = *(const slot_of *)(job.dy + row * job.columns + c);
        }
        FOR_SLOTS(s, c, job.columns)
        {
            gamma_load<N, CENTRED>(job.gamma + c, job.offset, gamma);
            for (int e = 0; e < N; e++) {
                const float n = (to_float(x[s].element[e]) - mean) * rstd, d = to_float(dy[s].element[e]);
                dgamma[s][e] += d * n;
                if (CENTRED) dbeta[s][e] += d;
                if (CENTRED) sum_g += d * gamma[e];
                sum_gn += d * gamma[e] * n;
            }
        }
        const float mean_g = CENTRED ? row_total<WARP>(sum_g, shared) / columns : 0.0f,
                    mean_gn = row_total<WARP>(sum_gn, shared) / columns;
        FOR_SLOTS(s, c, job.columns)
        {
            float dx[N];
            gamma_load<N, CENTRED>(job.gamma + c, job.offset, gamma);
            for (int e = 0; e < N; e++) {
                const float n = (to_float(x[s].element[e]) - mean) * rstd;
                dx[e] = (to_float(dy[s].element[e]) * gamma[e] - mean_g - n * mean_gn) * rstd;
            }
            store<N>(job.dx + row * job.columns + c, dx, job.accumulate);
        }
    }
    float *to = part + blockIdx.x * (1 + CENTRED) * job.columns;
    part_store<N, WARP, COUNT>(dgamma, job.columns, shared, to);
    if (CENTRED) part_store<N, WARP, COUNT>(dbeta, job.columns, shared, to + job.columns);
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

/* Runs KERNEL for the packs that a thread has of a row. */
#define SLOTS_LAUNCH(KERNEL, slots, ...)                                      \
    (slots == 1   ? launch(KERNEL<Element, N, CENTRED, WARP, 1>, __VA_ARGS__) \
     : slots == 2 ? launch(KERNEL<Element, N, CENTRED, WARP, 2>, __VA_ARGS__) \
     : slots == 3 ? launch(KERNEL<Element, N, CENTRED, WARP, 3>, __VA_ARGS__) \
                  : launch(KERNEL<Element, N, CENTRED, WARP, (int)SLOTS>, __VA_ARGS__))

template <class Element, int N, bool CENTRED, bool WARP>
static enum hapt_status norm_launch(const struct norm_forward<Element> &norm, struct hapt_queue *queue)
{
    const int64_t slots = slots_of(norm.columns, N);
    const dim3 blocks = row_blocks(norm.rows, WARP);
    if (slots > SLOTS) return launch(norm_kernel<Element, N, CENTRED, WARP>, blocks, THREADS, 0, queue, norm);
    return SLOTS_LAUNCH(norm_slots_kernel, slots, blocks, THREADS, 0, queue, norm);
}

/* Rows as long as gamma. */
static int64_t norm_rows(const struct hapt_call *call)
{
    return hapt_view_elements(&call->input[0]) / view_columns(&call->input[1]);
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
    norm.columns = view_columns(&call->input[1]);
    norm.rows = norm_rows(call);
    norm.epsilon = (float)call->real[0];
    norm.offset = (float)call->real[1];
    const bool packed = packs_fit<Element>(norm.columns, norm.x, norm.gamma, norm.beta, norm.y);
    constexpr int N = pack<Element>::COUNT;
    if (norm.columns <= NARROW_ROW)
        return packed ? norm_launch<Element, N, CENTRED, true>(norm, queue)
                      : norm_launch<Element, 1, CENTRED, true>(norm, queue);
    return packed ? norm_launch<Element, N, CENTRED, false>(norm, queue)
                  : norm_launch<Element, 1, CENTRED, false>(norm, queue);
}

static size_t backward_workspace(const struct hapt_call *call)
{
    const int64_t rows = norm_rows(call), columns = view_columns(&call->input[1]);
    const int sums = call->output_count - 1;
    const size_t parts = (size_t)(part_count(rows) * columns * sums) * sizeof(float),
                 apart = column_sums_workspace(rows, columns, sums);
    return parts > apart ? parts : apart;
}

template <class Element, int N, bool CENTRED, bool WARP>
static enum hapt_status backward_launch(const struct hapt_call *call, struct hapt_queue *queue,
                                        const struct norm_backward<Element> &job)
{
    if (call->output_count == 1) /* the parameters are frozen */
        return launch(norm_dx_kernel<Element, N, CENTRED, WARP>, row_blocks(job.rows, WARP), THREADS, 0, queue, job);
    const bool accumulate[2] = {(call->accumulate >> 1 & 1u) != 0, (call->accumulate >> 2 & 1u) != 0};
    const int64_t slots = slots_of(job.columns, N);
    float *const out[2] = {(float *)call->output[1].data, (float *)(CENTRED ? call->output[2].data : NULL)};
    if (slots <= SLOTS && job.rows > 0) {
        float *const part = (float *)call->workspace;
        const int64_t parts = part_count(job.rows);
        HAPT_TRY(SLOTS_LAUNCH(norm_backward_kernel, slots, dim3((unsigned)parts), THREADS, 0, queue, job,
                              part_rows(job.rows), part));
        return column_totals<1 + CENTRED>(part, parts, job.columns, out, accumulate, queue);
    }
    const struct norm_term<Element, CENTRED> term = {
        job.x, job.dy, job.mean, job.rstd, job.columns
    };
    HAPT_TRY(launch(norm_dx_kernel<Element, N, CENTRED, WARP>, row_blocks(job.rows, WARP), THREADS, 0, queue, job));
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
    job.columns = view_columns(&call->input[1]);
    job.rows = norm_rows(call);
    job.offset = (float)call->real[1];
    job.accumulate = call->accumulate & 1u;
    const bool packed = packs_fit<Element>(job.columns, job.x, job.gamma, job.dy, job.dx);
    constexpr int N = pack<Element>::COUNT;
    if (job.columns <= NARROW_ROW)
        return packed ? backward_launch<Element, N, CENTRED, true>(call, queue, job)
                      : backward_launch<Element, 1, CENTRED, true>(call, queue, job);
    return packed ? backward_launch<Element, N, CENTRED, false>(call, queue, job)
                  : backward_launch<Element, 1, CENTRED, false>(call, queue, job);
}

extern const struct cuda_kernel hapt_cuda_norm[] = {
    CUDA_KERNELS_WITH("layer_norm", NULL, norm_run, true),
    CUDA_KERNELS_WITH("layer_norm_backward", backward_workspace, backward_run, true),
    CUDA_KERNELS_WITH("layer_norm_dx", NULL, backward_run, true),
    CUDA_KERNELS_WITH("rms_norm", NULL, norm_run, false),
    CUDA_KERNELS_WITH("rms_norm_backward", backward_workspace, backward_run, false),
    CUDA_KERNELS_WITH("rms_norm_dx", NULL, backward_run, false),
    CUDA_KERNELS_WITH("head_rms_norm", NULL, norm_run, false),
    CUDA_KERNELS_WITH("head_rms_norm_backward", backward_workspace, backward_run, false),
    CUDA_KERNELS_WITH("head_rms_norm_dx", NULL, backward_run, false),
    CUDA_KERNELS_END,
};
