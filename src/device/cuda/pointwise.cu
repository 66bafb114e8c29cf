/* Element-wise kernels: add, scale, copy, gelu, GeGLU, relu, soft caps, dropout, convert, zero. */
#include "kernels.h"
#include "maps.cuh"
#include "rows.cuh"

#define HAPT_PHILOX_FUNCTION static __host__ __device__ __forceinline__
#include "hapt/philox.h"

enum { THREADS = 256 };

/* gelu(x) = x P(x). The tanh form's P is sigmoid(2u), u = sqrt(2/pi) (x + 0.044715 x^3); the other form's is the normal
 * distribution. */
struct gelu {
    float value, slope;
};

/* FAST errs by some 1e-6 in the tanh form, far below the rounding of 16-bit elements. */
template <bool FAST> __device__ __forceinline__ struct gelu gelu_at(float x, bool erf)
{
    struct gelu gelu;
    if (erf) {
        const float p = 0.5f * erfcf(-0.70710678118654752f * x);
        gelu.value = x * p;
        gelu.slope = p + x * 0.3989422804014327f * expf(-0.5f * x * x);
        return gelu;
    }
    const float square = x * x, twice = x * (square * 0.0713548162726f + 1.59576912161f);
    const float falling = FAST ? __expf(-twice) : expf(-twice),
                p = FAST ? __fdividef(1.0f, 1.0f + falling) : 1.0f / (1.0f + falling);
    const float q = FAST || isinf(falling) ? 1.0f - p : falling * p; /* 1 - P */
    gelu.value = x * p;
    gelu.slope = p + x * p * (q * (square * 0.2140644488178f + 1.59576912161f));
    return gelu;
}

template <bool FAST> struct gelu_forward {
    bool erf;
    __device__ float operator()(float x, float) const
    {
        return gelu_at<FAST>(x, erf).value;
    }
};

template <bool FAST> struct gelu_backward {
    bool erf;
    __device__ float operator()(float x, float dy) const
    {
        return gelu_at<FAST>(x, erf).slope * dy;
    }
};

template <bool FAST> struct geglu_forward {
    bool erf;
    __device__ float operator()(float gate, float up) const
    {
        return gelu_at<FAST>(gate, erf).value * up;
    }
};

struct scaling {
    float factor;
    __device__ float operator()(float x, float) const
    {
        return x * factor;
    }
};

/* y = cap tanh(x share), with share = 1 / cap. */
struct softcap_forward {
    float cap, share;
    __device__ float operator()(float x, float) const
    {
        return cap * tanhf(x * share);
    }
};

struct softcap_backward {
    float share;
    __device__ float operator()(float y, float dy) const
    {
        const float part = y * share;
        return dy * (1.0f - part * part);
    }
};

struct relu_forward {
    __device__ float operator()(float x, float) const
    {
        return x <= 0.0f ? 0.0f : x; /* NaN is kept */
    }
};

struct relu_backward {
    __device__ float operator()(float y, float dy) const
    {
        return y <= 0.0f ? 0.0f : dy;
    }
};

template <class Element> static enum hapt_status gelu_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map_plain<Element>(call, queue, call->input[0].data, NULL,
                              gelu_forward<sizeof(Element) == 2>{call->integer[0] != 0});
}

template <class Element> static enum hapt_status gelu_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, call->input[1].data,
                                 gelu_backward<sizeof(Element) == 2>{call->integer[0] != 0});
}

template <class Element> static enum hapt_status geglu_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map_plain<Element>(call, queue, call->input[0].data, call->input[1].data,
                              geglu_forward<sizeof(Element) == 2>{call->integer[0] != 0});
}

template <class Element> struct geglu_backward {
    const Element *gate, *up, *dy;
    Element *dgate, *dup;
    int64_t count;
    bool packed, erf, add_gate, add_up;
};

template <class Element> static __global__ void geglu_backward_kernel(struct geglu_backward<Element> job)
{
    const int64_t thread = (int64_t)blockIdx.x * blockDim.x + threadIdx.x, threads = (int64_t)gridDim.x * blockDim.x;
    over<Element>(0, job.count, thread, threads, job.packed, [&](auto wide, int64_t i) {
        constexpr int N = decltype(wide)::COUNT;
        float gate[N], up[N], dy[N];
        load<N>(job.gate + i, gate);
        load<N>(job.up + i, up);
        load<N>(job.dy + i, dy);
        for (int e = 0; e < N; e++) {
            const struct gelu gelu = gelu_at<sizeof(Element) == 2>(gate[e], job.erf);
            gate[e] = dy[e] * up[e] * gelu.slope;
            up[e] = dy[e] * gelu.value;
        }
        store<N>(job.dgate + i, gate, job.add_gate);
        store<N>(job.dup + i, up, job.add_up);
    });
}

/* input: gate, up, dy; output: dgate, dup */
template <class Element>
static enum hapt_status geglu_backward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct geglu_backward<Element> job;
    job.gate = (const Element *)call->input[0].data;
    job.up = (const Element *)call->input[1].data;
    job.dy = (const Element *)call->input[2].data;
    job.dgate = (Element *)call->output[0].data;
    job.dup = (Element *)call->output[1].data;
    job.count = hapt_view_elements(&call->input[0]);
    job.packed = packs_fit<Element>(0, job.gate, job.up, job.dy, job.dgate, job.dup);
    job.erf = call->integer[0] != 0;
    job.add_gate = call->accumulate & 1u;
    job.add_up = call->accumulate >> 1 & 1u;
    return launch(geglu_backward_kernel<Element>, blocks_for(job.count, THREADS * pack<Element>::COUNT), THREADS, 0,
                  queue, job);
}

template <class Element> static enum hapt_status scale_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, NULL, scaling{(float)call->real[0]});
}

template <class Element> static enum hapt_status softcap_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map_plain<Element>(call, queue, call->input[0].data, NULL,
                              softcap_forward{(float)call->real[0], (float)(1 / call->real[0])});
}

/* input: y, dy */
template <class Element> static enum hapt_status softcap_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, call->input[1].data,
                                 softcap_backward{(float)(1 / call->real[0])});
}

template <class Element> static enum hapt_status relu_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, NULL, relu_forward{});
}

template <class Element> static enum hapt_status relu_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, call->input[1].data, relu_backward{});
}

template <class Element> static enum hapt_status add_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return map<Element, Element>(call, queue, call->input[0].data, call->input[1].data, sum_of{});
}

/* A thread takes one block of random words, so four elements. */
template <class Element>
__global__ void dropout_kernel(const Element *x, const uint32_t *key, Element *y, int64_t rows, int64_t width,
                               uint32_t number, uint32_t dropped, float scale, bool accumulate)
{
    const int64_t group = 4 * HAPT_DROPOUT_LANES, blocks = (width + group - 1) / group * HAPT_DROPOUT_LANES;
    for (GRID_STRIDE(i, rows * blocks)) {
        const int64_t row = i / blocks, block = i % blocks;
        const uint32_t *own = key + 2 * row;
        const bool drops = own[0] || own[1];
        const uint32_t limit = drops ? dropped : 0;
        const float factor = drops ? scale : 1.0f;
        const struct hapt_philox counter = {{(uint32_t)block, (uint32_t)((uint64_t)block >> 32), number, 0}};
        const struct hapt_philox random = hapt_philox_words(counter, own[0], own[1]);
        for (int w = 0; w < 4; w++) {
            const int64_t e = block / HAPT_DROPOUT_LANES * group + w * HAPT_DROPOUT_LANES + block % HAPT_DROPOUT_LANES;
            if (e >= width) break;
            const int64_t at = row * width + e;
            const float value = to_float(x[at]) * (random.word[w] >= limit ? factor : 0.0f);
            y[at] = from_float<Element>(accumulate ? to_float(y[at]) + value : value);
        }
    }
}

/* input: x [rows][t][d], keys [rows][2] */
template <class Element> static enum hapt_status dropout_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t rows = call->input[0].shape[0], width = call->input[0].shape[1] * call->input[0].shape[2];
    return launch(dropout_kernel<Element>, blocks_for(rows * ((width + 3) / 4), THREADS), THREADS, 0, queue,
                  (const Element *)call->input[0].data, (const uint32_t *)call->input[1].data,
                  (Element *)call->output[0].data, rows, width, (uint32_t)call->integer[0],
                  hapt_dropout_limit(call->real[0]), (float)(1 / (1 - call->real[0])), (bool)(call->accumulate & 1u));
}

template <class From> static enum hapt_status copy_from(const struct hapt_call *call, struct hapt_queue *queue)
{
    const void *x = call->input[0].data;
    switch (call->output[0].dtype) {
    case HAPT_F32: return map<From, float>(call, queue, x, NULL, sum_of{});
    case HAPT_BF16: return map<From, __nv_bfloat16>(call, queue, x, NULL, sum_of{});
    case HAPT_F16: return map<From, __half>(call, queue, x, NULL, sum_of{});
    default: break;
    }
    return cuda_host->fail(HAPT_ERR_INTERNAL, NULL, "the cuda back end cannot copy reals to integers");
}

/* Copy and convert alike: the types of the views decide. */
static enum hapt_status copy_any(const struct hapt_call *call, struct hapt_queue *queue)
{
    const enum hapt_dtype from = call->input[0].dtype, to = call->output[0].dtype;
    if (from == to && !call->accumulate) {
        const int64_t bytes = hapt_view_elements(&call->output[0]) * (to == HAPT_F32 || to == HAPT_I32 ? 4 : 2);
        return cuda_check(cudaMemcpyAsync(call->output[0].data, call->input[0].data, (size_t)bytes,
                                          cudaMemcpyDeviceToDevice, queue->stream),
                          "a copy");
    }
    if (from == HAPT_F32) return copy_from<float>(call, queue);
    if (from == HAPT_BF16) return copy_from<__nv_bfloat16>(call, queue);
    if (from == HAPT_F16) return copy_from<__half>(call, queue);
    return cuda_host->fail(HAPT_ERR_INTERNAL, NULL, "the cuda back end cannot add integers");
}

static enum hapt_status zero_any(const struct hapt_call *call, struct hapt_queue *queue)
{
    for (int o = 0; o < call->output_count; o++) {
        const struct hapt_view *view = &call->output[o];
        const int64_t bytes = hapt_view_elements(view) * (view->dtype == HAPT_F32 || view->dtype == HAPT_I32 ? 4 : 2);
        if (bytes > 0) HAPT_TRY(cuda_check(cudaMemsetAsync(view->data, 0, (size_t)bytes, queue->stream), "zeroing"));
    }
    return HAPT_OK;
}

#define ANY_TYPE(op, run) CUDA_ROWS(op, NULL, run, run, run)

extern const struct cuda_kernel hapt_cuda_pointwise[] = {
    CUDA_KERNELS("gelu", NULL, gelu_run),
    CUDA_KERNELS("gelu_dx", NULL, gelu_dx_run),
    CUDA_KERNELS("geglu", NULL, geglu_run),
    CUDA_KERNELS("geglu_backward", NULL, geglu_backward_run),
    CUDA_KERNELS("scale", NULL, scale_run),
    CUDA_KERNELS("softcap", NULL, softcap_run),
    CUDA_KERNELS("softcap_dx", NULL, softcap_dx_run),
    CUDA_KERNELS("dropout", NULL, dropout_run),
    CUDA_KERNELS("relu", NULL, relu_run),
    CUDA_KERNELS("relu_dx", NULL, relu_dx_run),
    CUDA_KERNELS("add", NULL, add_run),
    ANY_TYPE("cast", copy_any),
    ANY_TYPE("copy", copy_any),
    ANY_TYPE("convert", copy_any),
    ANY_TYPE("zero", zero_any),
    {HAPT_I32, {"copy", NULL, copy_any}},
    {HAPT_I32, {"zero", NULL, zero_any}},
    CUDA_KERNELS_END,
};
