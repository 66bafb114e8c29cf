/*
 * The squared error, and softmax cross-entropy with its logsumexp, forward and backward. Rows with target -100, and
 * targets that are NaN, are ignored. Label smoothing changes the gradient alone: the loss is the plain one.
 *
 * If the classes are sharded, the shards exchange the largest logit of each row. Then they exchange its sum of
 * exponentials and its target's logit, which only one shard has. So all shards get the same loss and logsumexp.
 */
#include <math.h>
#include <stdlib.h>

#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256, TOTAL_THREADS = 1024, IGNORED = -100 };

struct logits {
    const int32_t *target; /* [rows] */
    int64_t rows, columns;
    int64_t first, classes; /* the first column's class; classes on all shards */
    bool packed;
    struct cuda_fault *fault;
};

static struct logits logits_of(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct logits logits;
    logits.target = (const int32_t *)call->input[1].data;
    logits.rows = view_rows(&call->input[0]);
    logits.columns = view_columns(&call->input[0]);
    logits.first = call->first_value;
    logits.classes = call->value_count > 0 ? call->value_count : logits.columns;
    logits.packed = aligned_16(call->input[0].data);
    logits.fault = queue->fault;
    return logits;
}

/* The column of a row's target in this shard, or -1. */
static __device__ __forceinline__ int64_t target_column(const struct logits &logits, int64_t row)
{
    const int32_t target = logits.target[row];
    const int64_t column = target - logits.first;
    if (target != IGNORED && (target < 0 || target >= logits.classes) && threadIdx.x == 0)
        fault_set(logits.fault, CUDA_FAULT_TARGET, target, logits.classes, 0);
    return target == IGNORED || column < 0 || column >= logits.columns ? -1 : column;
}

static __device__ __forceinline__ double block_total(double value, double *shared)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, warps = blockDim.x >> 5;
    for (int apart = 16; apart > 0; apart >>= 1) value += __shfl_xor_sync(0xffffffffu, value, apart);
    if (lane == 0) shared[warp] = value;
    __syncthreads();
    double total = 0;
    for (int w = 0; w < warps; w++) total += shared[w];
    __syncthreads();
    return total;
}

/* exp(x - top); 0 if x is -inf, for any top. NaN is kept. */
static __device__ __forceinline__ float above(float x, float top)
{
    return expf(x - (top == -INFINITY ? 0.0f : top));
}

/*
 * One row, read once: the largest logit and the sum of exp(logit - largest), in every thread of the block. A thread's
 * sum is relative to its own largest logit so far.
 */
template <class Element>
static __device__ void row_sums(const Element *x, const struct logits &logits, int64_t row, float *largest, double *sum)
{
    __shared__ float floats[32];
    __shared__ double doubles[32];
    float top = -INFINITY, total = 0;
    over<Element>(row * logits.columns, (row + 1) * logits.columns, threadIdx.x, blockDim.x, logits.packed,
                  [&](auto wide, int64_t i) {
                      constexpr int N = decltype(wide)::COUNT;
                      float value[N], most = top;
                      load<N>(x + i, value);
                      for (int e = 0; e < N; e++) most = fmaxf(most, value[e]);
                      if (most > top) {
                          total *= above(top, most);
                          top = most;
                      }
                      for (int e = 0; e < N; e++) total += above(value[e], top);
                  });
    *largest = block_largest(top, floats);
    *sum = block_total((double)total * (double)above(top, *largest), doubles);
}

/* The results of a row: its logsumexp and its loss or, on a shard, their parts. */
template <class Element>
static __global__ void loss_kernel(const Element *x, struct logits logits, float *lse, double *row_loss)
{
    for (int64_t r = blockIdx.x; r < logits.rows; r += gridDim.x) {
        float top;
        double sum;
        row_sums(x, logits, r, &top, &sum);
        const int64_t column = target_column(logits, r);
        if (threadIdx.x != 0) continue;
        const double whole = top + log(sum);
        lse[r] = (float)whole;
        row_loss[r] = column < 0 ? 0.0 : whole - to_float(x[r * logits.columns + column]);
    }
}

template <class Element>
static __global__ void shard_kernel(const Element *x, struct logits logits, float *top, float *sum, float *chosen)
{
    for (int64_t r = blockIdx.x; r < logits.rows; r += gridDim.x) {
        float most;
        double total;
        row_sums(x, logits, r, &most, &total);
        const int64_t column = target_column(logits, r);
        if (threadIdx.x != 0) continue;
        top[r] = most;
        sum[r] = (float)total;
        chosen[r] = column < 0 ? 0.0f : to_float(x[r * logits.columns + column]);
    }
}

static __global__ void total_kernel(const double *row_loss, const int32_t *target, int64_t rows, float *loss,
                                    bool accumulate)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) sum += target[r] == IGNORED ? 0.0 : row_loss[r];
    sum = block_total(sum, shared);
    if (threadIdx.x == 0) *loss = (float)(accumulate ? sum + *loss : sum);
}

/* [rows] double: losses of rows. On shards [3][rows] float: largest logits, sums, targets' logits. */
static size_t loss_workspace(const struct hapt_call *call)
{
    return (size_t)view_rows(&call->input[0]) * (sizeof(double) + 3 * sizeof(float));
}

/* On the host: computes each row's logsumexp and loss over all shards from the three parts on this shard. */
static enum hapt_status exchange_rows(const struct hapt_call *call, int64_t rows, float *part, float *top,
                                      double *row_loss)
{
    float *sum = part + rows, *chosen = sum + rows;
    for (int64_t r = 0; r < rows; r++) top[r] = part[r];
    HAPT_TRY(call->shard_reduce(call->shard_reduce_context, top, (size_t)rows, true));
    for (int64_t r = 0; r < rows; r++) sum[r] *= expf(part[r] - top[r]);
    HAPT_TRY(call->shard_reduce(call->shard_reduce_context, sum, 2 * (size_t)rows, false));
    for (int64_t r = 0; r < rows; r++) {
        const double lse = top[r] + log((double)sum[r]);
        row_loss[r] = lse - chosen[r];
        part[r] = (float)lse;
    }
    return HAPT_OK;
}

template <class Element>
static enum hapt_status shard_run(const struct hapt_call *call, struct hapt_queue *queue, const struct logits &logits)
{
    const size_t rows = (size_t)logits.rows;
    double *row_loss = (double *)call->workspace;
    float *part = (float *)(row_loss + rows);
    HAPT_TRY(launch(shard_kernel<Element>, blocks_for(logits.rows, 1), THREADS, 0, queue,
                    (const Element *)call->input[0].data, logits, part, part + rows, part + 2 * rows));
    double *here =
        (double *)malloc(rows * (sizeof(double) + 4 * sizeof(float)) + 1); /* as in the workspace, and [rows] more */
    float *parts = (float *)(here + rows);
    if (!here) return cuda_host->fail(HAPT_ERR_MEMORY, NULL, "no host memory for the losses of %zu rows", rows);
    enum hapt_status status = cuda_download(queue, parts, part, 3 * rows * sizeof *part);
    if (status == HAPT_OK) status = exchange_rows(call, logits.rows, parts, parts + 3 * rows, here);
    if (status == HAPT_OK) status = cuda_upload(queue, row_loss, here, rows * sizeof *row_loss);
    if (status == HAPT_OK) status = cuda_upload(queue, call->output[1].data, parts, rows * sizeof *parts);
    free(here);
    return status;
}

template <class Element> static enum hapt_status loss_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct logits logits = logits_of(call, queue);
    double *row_loss = (double *)call->workspace;
    if (call->shard_reduce)
        HAPT_TRY(shard_run<Element>(call, queue, logits));
    else
        HAPT_TRY(launch(loss_kernel<Element>, blocks_for(logits.rows, 1), THREADS, 0, queue,
                        (const Element *)call->input[0].data, logits, (float *)call->output[1].data, row_loss));
    return launch(total_kernel, dim3(1), TOTAL_THREADS, 0, queue, (const double *)row_loss, logits.target, logits.rows,
                  (float *)call->output[0].data, (call->accumulate & 1u) != 0);
}

/* One block per row: (exp(logit - lse) - share) scale, minus `hot` before scaling at the target; rounded once. */
template <class Element>
static __global__ void loss_dx_kernel(const Element *x, struct logits logits, const float *lse, const float *scale,
                                      float hot, float share, Element *dx, bool accumulate)
{
    for (int64_t r = blockIdx.x; r < logits.rows; r += gridDim.x) {
        const int64_t at = r * logits.columns, column = target_column(logits, r),
                      special = column < 0 ? -1 : at + column;
        const float weight = logits.target[r] == IGNORED ? 0.0f : *scale, whole = lse[r];
        over<Element>(at, at + logits.columns, threadIdx.x, blockDim.x, logits.packed, [&](auto wide, int64_t i) {
            constexpr int N = decltype(wide)::COUNT;
            float value[N];
            load<N>(x + i, value);
            for (int e = 0; e < N; e++) {
                const float p = expf(value[e] - whole);
                value[e] = ((i + e == special ? p - hot : p) - share) * weight;
            }
            store<N>(dx + i, value, accumulate);
        });
    }
}

/* input: logits, target, lse, scale; output: dlogits */
template <class Element> static enum hapt_status loss_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct logits logits = logits_of(call, queue);
    logits.packed = logits.packed && aligned_16(call->output[0].data);
    const float hot = (float)(1 - call->real[0]),
                share = (float)(call->real[0] / (double)logits.classes); /* 1, 0: plain */
    return launch(loss_dx_kernel<Element>, blocks_for(logits.rows, 1), THREADS, 0, queue,
                  (const Element *)call->input[0].data, logits, (const float *)call->input[2].data,
                  (const float *)call->input[3].data, hot, share, (Element *)call->output[0].data,
                  (call->accumulate & 1u) != 0);
}

/* The loss of an element, or 0 where the target is NaN. LOGISTIC: -target log s(x) - (1 - target) log(1 - s(x)) with
 * s(x) = 1 / (1 + e^-x); else the squared error. */
template <bool LOGISTIC> static __device__ __forceinline__ double error_of(float x, float target)
{
    if (isnan(target)) return 0;
    if (LOGISTIC) return (x <= 0.0f ? 0.0f : x) - x * target + log1pf(expf(-fabsf(x)));
    const float off = x - target;
    return (double)off * off;
}

/* Its derivative by x. */
template <bool LOGISTIC> static __device__ __forceinline__ float slope_of(float x, float target)
{
    const float small = expf(-fabsf(x));
    if (isnan(target)) return 0;
    return LOGISTIC ? (x < 0.0f ? small : 1.0f) / (1.0f + small) - target : 2 * (x - target);
}

/* [rows] double: losses of rows */
static size_t errors_workspace(const struct hapt_call *call)
{
    return (size_t)view_rows(&call->input[0]) * sizeof(double);
}

template <class Element, bool LOGISTIC>
static __global__ void errors_kernel(const Element *x, const float *target, int64_t rows, int64_t columns,
                                     double *row_loss)
{
    __shared__ double shared[32];
    for (int64_t r = blockIdx.x; r < rows; r += gridDim.x) {
        double sum = 0;
        for (int64_t c = threadIdx.x; c < columns; c += blockDim.x) {
            const int64_t i = r * columns + c;
            sum += error_of<LOGISTIC>(to_float(x[i]), target[i]);
        }
        sum = block_total(sum, shared);
        if (threadIdx.x == 0) row_loss[r] = sum;
    }
}

static __global__ void errors_total_kernel(const double *row_loss, int64_t rows, float *loss, bool accumulate)
{
    __shared__ double shared[32];
    double sum = 0;
    for (int64_t r = threadIdx.x; r < rows; r += blockDim.x) sum += row_loss[r];
    sum = block_total(sum, shared);
    if (threadIdx.x == 0) *loss = (float)(accumulate ? sum + *loss : sum);
}

template <class Element, bool LOGISTIC>
static enum hapt_status errors_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t rows = view_rows(&call->input[0]), columns = view_columns(&call->input[0]);
    double *row_loss = (double *)call->workspace;
    HAPT_TRY(launch(errors_kernel<Element, LOGISTIC>, blocks_for(rows, 1), THREADS, 0, queue,
                    (const Element *)call->input[0].data, (const float *)call->input[1].data, rows, columns, row_loss));
    return launch(errors_total_kernel, dim3(1), TOTAL_THREADS, 0, queue, (const double *)row_loss, rows,
                  (float *)call->output[0].data, (call->accumulate & 1u) != 0);
}

template <class Element, bool LOGISTIC>
static __global__ void errors_dx_kernel(const Element *x, const float *target, const float *scale, int64_t elements,
                                        Element *dx, bool accumulate)
{
    const int64_t apart = (int64_t)gridDim.x * blockDim.x;
    for (int64_t i = (int64_t)blockIdx.x * blockDim.x + threadIdx.x; i < elements; i += apart) {
        float value[1] = {*scale * slope_of<LOGISTIC>(to_float(x[i]), target[i])};
        store<1>(dx + i, value, accumulate);
    }
}

/* input: x, targets, scale; output: dx */
template <class Element, bool LOGISTIC>
static enum hapt_status errors_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t elements = hapt_view_elements(&call->input[0]);
    return launch(errors_dx_kernel<Element, LOGISTIC>, blocks_for(elements, THREADS), THREADS, 0, queue,
                  (const Element *)call->input[0].data, (const float *)call->input[1].data,
                  (const float *)call->input[2].data, elements, (Element *)call->output[0].data,
                  (call->accumulate & 1u) != 0);
}

extern const struct cuda_kernel hapt_cuda_loss[] = {
    CUDA_KERNELS("cross_entropy", loss_workspace, loss_run),
    CUDA_KERNELS("cross_entropy_dx", NULL, loss_dx_run),
    CUDA_KERNELS_WITH("mse", errors_workspace, errors_run, false),
    CUDA_KERNELS_WITH("mse_dx", NULL, errors_dx_run, false),
    CUDA_KERNELS_WITH("bce", errors_workspace, errors_run, true),
    CUDA_KERNELS_WITH("bce_dx", NULL, errors_dx_run, true),
    CUDA_KERNELS_END,
};
