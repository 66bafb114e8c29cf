/* Optimizer updates and sums of squares, on flat fp32 arrays, in place. */
#include <math.h>

#include "kernels.h"

enum { THREADS = 256, PARTS = 512 };

struct adamw {
    float rate, decay, root, epsilon, rest1, rest2, scale;
};

/* Factors near 1 are applied as p - p * small: rounding (1 - small) to fp32 would bias every step the same way. */
template <class Copy>
__global__ void adamw_kernel(const float *grad, float *master, float *m, float *v, Copy *copy, int64_t count,
                             struct adamw how)
{
    for (GRID_STRIDE(i, count)) {
        const float g = grad[i] * how.scale;
        const float first = m[i] + (g - m[i]) * how.rest1, second = v[i] + (g * g - v[i]) * how.rest2;
        float p = master[i];
        p -= p * how.decay;
        p -= first * how.rate / (sqrtf(second) * how.root + how.epsilon);
        m[i] = first;
        v[i] = second;
        master[i] = p;
        if (copy) copy[i] = from_float<Copy>(p);
    }
}

template <class Copy>
__global__ void sgd_kernel(const float *grad, float *master, float *buffer, Copy *copy, int64_t count, float rate,
                           float momentum, float decay, float scale)
{
    for (GRID_STRIDE(i, count)) {
        float g = grad[i] * scale, p = master[i];
        if (buffer) {
            g += buffer[i] * momentum;
            buffer[i] = g;
        }
        p -= p * decay;
        p -= g * rate;
        master[i] = p;
        if (copy) copy[i] = from_float<Copy>(p);
    }
}

/* The compute copy of the weights, or NULL. */
static const struct hapt_view *copy_of(const struct hapt_call *call, int index)
{
    return call->output_count > index && call->output[index].data ? &call->output[index] : NULL;
}

template <class Copy>
static enum hapt_status adamw_typed(const struct hapt_call *call, struct hapt_queue *queue,
                                    const struct hapt_view *copy)
{
    const int64_t count = hapt_view_elements(&call->input[0]);
    const double rate = call->real[0], beta1 = call->real[1], beta2 = call->real[2], step = (double)call->integer[0];
    const struct adamw how = {(float)(rate / (1.0 - pow(beta1, step))),
                              (float)(rate * call->real[4]),
                              (float)(1.0 / sqrt(1.0 - pow(beta2, step))),
                              (float)call->real[3],
                              (float)(1.0 - beta1),
                              (float)(1.0 - beta2),
                              (float)call->real[5]};
    return launch(adamw_kernel<Copy>, blocks_for(count, THREADS), THREADS, 0, queue, (const float *)call->input[0].data,
                  (float *)call->output[0].data, (float *)call->output[1].data, (float *)call->output[2].data,
                  (Copy *)(copy ? copy->data : NULL), count, how);
}

static enum hapt_status adamw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *copy = copy_of(call, 3);
    return copy && copy->dtype == HAPT_F16 ? adamw_typed<__half>(call, queue, copy)
                                           : adamw_typed<__nv_bfloat16>(call, queue, copy);
}

template <class Copy>
static enum hapt_status sgd_typed(const struct hapt_call *call, struct hapt_queue *queue, const struct hapt_view *copy)
{
    const int64_t count = hapt_view_elements(&call->input[0]);
    return launch(sgd_kernel<Copy>, blocks_for(count, THREADS), THREADS, 0, queue, (const float *)call->input[0].data,
                  (float *)call->output[0].data, (float *)(call->output_count > 1 ? call->output[1].data : NULL),
                  (Copy *)(copy ? copy->data : NULL), count, (float)call->real[0], (float)call->real[1],
                  (float)(call->real[0] * call->real[4]), (float)call->real[5]);
}

static enum hapt_status sgd_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *copy = copy_of(call, 2);
    return copy && copy->dtype == HAPT_F16 ? sgd_typed<__half>(call, queue, copy)
                                           : sgd_typed<__nv_bfloat16>(call, queue, copy);
}

/* ---- Sum of squares, in double: PARTS partial sums, then their sum, in one order for each length ---- */

__device__ double block_total(double value, double *shared)
{
    shared[threadIdx.x] = value;
    for (int half = THREADS / 2; half > 0; half >>= 1) {
        __syncthreads();
        if ((int)threadIdx.x < half) shared[threadIdx.x] += shared[threadIdx.x + half];
    }
    __syncthreads();
    return shared[0];
}

__global__ void square_parts(const float *x, int64_t count, double *part)
{
    __shared__ double shared[THREADS];
    double sum = 0;
    for (GRID_STRIDE(i, count)) sum += (double)x[i] * (double)x[i];
    sum = block_total(sum, shared);
    if (threadIdx.x == 0) part[blockIdx.x] = sum;
}

__global__ void square_total(const double *part, int parts, double *out, bool accumulate)
{
    __shared__ double shared[THREADS];
    double sum = 0;
    for (int i = threadIdx.x; i < parts; i += THREADS) sum += part[i];
    sum = block_total(sum, shared);
    if (threadIdx.x == 0) *out = accumulate ? *out + sum : sum;
}

static size_t square_workspace(const struct hapt_call *call)
{
    (void)call;
    return PARTS * sizeof(double);
}

static enum hapt_status square_sum_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t count = hapt_view_elements(&call->input[0]), blocks = (count + THREADS - 1) / THREADS;
    const int parts = blocks < PARTS ? (int)blocks : (int)PARTS;
    double *part = (double *)call->workspace;
    HAPT_TRY(launch(square_parts, dim3((unsigned)parts), THREADS, 0, queue, (const float *)call->input[0].data, count,
                    part));
    return launch(square_total, dim3(1), THREADS, 0, queue, (const double *)part, parts, (double *)call->output[0].data,
                  (call->accumulate & 1u) != 0);
}

extern const struct cuda_kernel hapt_cuda_optimizer[] = {
    {HAPT_F32, {"adamw", NULL, adamw_run}},
    {HAPT_F32, {"sgd", NULL, sgd_run}},
    {HAPT_F32, {"square_sum", square_workspace, square_sum_run}},
    CUDA_KERNELS_END,
};
