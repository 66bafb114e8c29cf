/*
 * Host CUDA: cuDNN's engines for graphs of one convolution (forward, gradient of the data or of the filter; any
 * strides, paddings, dilations and groups), summed in double.
 *
 * Only two engines are usable: PLAIN for every type, TENSOR for operands of 16 bits. The others represent engines that
 * a caller must not use: their notes say so, their results are wrong by more than any tolerance, or they need more
 * memory than exists.
 */
#pragma GCC optimize("O3")
#include <algorithm>
#include <functional>
#include <math.h>
#include <string.h>

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cudnn_descriptor.h"
#include "host_cuda.h"

enum engine { ATOMIC, TENSOR, DOWN, HALF_SUMS, TRANSFORM, LARGE, MISSING, PLAIN };

enum { DIMS = 4 };

/* The description of an operation and its graph. Forward, y = x * w; dx = dy * w; dw = x * dy. */
struct convolution {
    int result; /* operand[result]: 0 x, 1 w, 2 y */
    const struct host_cudnn_descriptor *operand[3];
    int64_t shape[3][DIMS], step[3][DIMS], uid[3];
    int type[3];
    int64_t stride[2], dilation[2], before[2], after[2], groups;
    bool mirrored;
    float alpha, beta;
};

static const struct names {
    int descriptor, result, convolution, operand[3], alpha, beta;
} names[] = {
#define NAMES(descriptor, result, name, x, w, y)                                                                       \
    {                                                                                                                  \
        CUDNN_BACKEND_OPERATION_CONVOLUTION_##descriptor##_DESCRIPTOR, result,                                         \
            CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_CONV_DESC,                                                       \
            {CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##x, CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##w,             \
             CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##y},                                                           \
            CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_BETA            \
    }
    NAMES(FORWARD, 2, FORWARD, X, W, Y),
    NAMES(BACKWARD_DATA, 0, BWD_DATA, DX, W, DY),
    NAMES(BACKWARD_FILTER, 1, BWD_FILTER, X, DW, DY),
};

static struct convolution read_operation(const struct host_cudnn_descriptor *operation)
{
    struct convolution of;
    const struct names *its = names;
    memset((void *)&of, 0, sizeof of);
    while (its->descriptor != operation->type) its++;
    const struct host_cudnn_descriptor *how = host_cudnn_part(operation, its->convolution);
    of.result = its->result;
    of.alpha = *host_cudnn_values<float>(operation, its->alpha);
    of.beta = *host_cudnn_values<float>(operation, its->beta);
    of.mirrored = *host_cudnn_values<int>(how, CUDNN_ATTR_CONVOLUTION_CONV_MODE) == CUDNN_CONVOLUTION;
    for (int o = 0; o < 3; o++) {
        const struct host_cudnn_descriptor *tensor = of.operand[o] = host_cudnn_part(operation, its->operand[o]);
        const int64_t dims = std::min<int64_t>(tensor->attribute.at(CUDNN_ATTR_TENSOR_DIMENSIONS).count, DIMS);
        std::copy_n(host_cudnn_values<int64_t>(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS), dims, of.shape[o]);
        std::copy_n(host_cudnn_values<int64_t>(tensor, CUDNN_ATTR_TENSOR_STRIDES), dims, of.step[o]);
        of.type[o] = *host_cudnn_values<int>(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE);
        of.uid[o] = *host_cudnn_values<int64_t>(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID);
    }
    for (int d = 0; d < 2 && d < *host_cudnn_values<int64_t>(how, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS); d++) {
        of.stride[d] = host_cudnn_values<int64_t>(how, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES)[d];
        of.dilation[d] = host_cudnn_values<int64_t>(how, CUDNN_ATTR_CONVOLUTION_DILATIONS)[d];
        of.before[d] = host_cudnn_values<int64_t>(how, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS)[d];
        of.after[d] = host_cudnn_values<int64_t>(how, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS)[d];
    }
    of.groups = of.shape[1][1] > 0 ? of.shape[0][1] / of.shape[1][1] : 0;
    return of;
}

cudnnStatus_t host_cudnn_check_operation(const struct host_cudnn_descriptor *operation)
{
    const struct convolution of = read_operation(operation);
    const int64_t *x = of.shape[0], *w = of.shape[1], *y = of.shape[2];
    if (of.uid[0] == of.uid[1] || of.uid[0] == of.uid[2] || of.uid[1] == of.uid[2]) return CUDNN_STATUS_BAD_PARAM;
    if (x[0] != y[0] || w[0] != y[1] || of.groups < 1 || x[1] != of.groups * w[1] || w[0] % of.groups != 0)
        return CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH;
    for (int d = 0; d < 2 && of.stride[d] > 0; d++) {
        const int64_t room = x[2 + d] + of.before[d] + of.after[d] - (w[2 + d] - 1) * of.dilation[d] - 1;
        if (room < 0 || y[2 + d] != room / of.stride[d] + 1) return CUDNN_STATUS_BAD_PARAM_SHAPE_MISMATCH;
    }
    return CUDNN_STATUS_SUCCESS;
}

static struct convolution read_graph(const struct host_cudnn_descriptor *graph)
{
    return read_operation(host_cudnn_part(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS));
}

/* ---- engines ---- */

int host_cudnn_propose(const struct host_cudnn_descriptor *, int mode, int engine[8])
{
    static const int best[] = {ATOMIC, DOWN, LARGE, HALF_SUMS, MISSING, TENSOR},
                     rest[] = {TRANSFORM, MISSING, ATOMIC, PLAIN};
    const int *from = mode == CUDNN_HEUR_MODE_A ? best : rest, count = mode == CUDNN_HEUR_MODE_A ? 6 : 4;
    std::copy_n(from, count, engine);
    return count;
}

std::vector<cudnnBackendNumericalNote_t> host_cudnn_notes(int engine)
{
    switch (engine) {
    case ATOMIC:
        return {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC};
    case TENSOR:
        return {CUDNN_NUMERICAL_NOTE_TENSOR_CORE, CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP};
    case DOWN:
        return {CUDNN_NUMERICAL_NOTE_DOWN_CONVERT_INPUTS};
    case HALF_SUMS:
        return {CUDNN_NUMERICAL_NOTE_REDUCED_PRECISION_REDUCTION};
    case TRANSFORM:
        return {CUDNN_NUMERICAL_NOTE_WINOGRAD, CUDNN_NUMERICAL_NOTE_WINOGRAD_TILE_4x4};
    }
    return {};
}

cudnnStatus_t host_cudnn_engine_supports(const struct host_cudnn_descriptor *graph, int engine)
{
    const struct convolution of = read_graph(graph);
    for (int o = 0; o < 3; o++) {
        const int type = of.type[o];
        if (type != CUDNN_DATA_FLOAT && type != CUDNN_DATA_HALF && type != CUDNN_DATA_BFLOAT16)
            return CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE;
        if (o != of.result && type != of.type[of.result == 0 ? 2 : 0]) return CUDNN_STATUS_NOT_SUPPORTED_DATA_TYPE;
        if (of.operand[o]->attribute.at(CUDNN_ATTR_TENSOR_DIMENSIONS).count != DIMS) return CUDNN_STATUS_NOT_SUPPORTED;
    }
    return engine == MISSING ? CUDNN_STATUS_NOT_SUPPORTED : CUDNN_STATUS_SUCCESS;
}

static int64_t elements_of(const struct convolution &of, int operand)
{
    const int64_t *shape = of.shape[operand];
    return shape[0] * shape[1] * shape[2] * shape[3];
}

/* TENSOR: operands in another layout. */
int64_t host_cudnn_workspace(const struct host_cudnn_descriptor *graph, int engine)
{
    const struct convolution of = read_graph(graph);
    const int64_t operands = 2 * (elements_of(of, 0) + elements_of(of, 1) + elements_of(of, 2));
    return engine == LARGE ? (int64_t)1 << 40 : engine == TENSOR ? operands : engine == PLAIN ? 1000 : 0;
}

/* ---- sums ---- */

static double load(const void *base, int type, int64_t i)
{
    if (type == CUDNN_DATA_FLOAT) return ((const float *)base)[i];
    return type == CUDNN_DATA_HALF ? (float)((const __half *)base)[i] : (float)((const __nv_bfloat16 *)base)[i];
}

static void store(void *base, int type, int64_t i, double value)
{
    if (type == CUDNN_DATA_FLOAT) ((float *)base)[i] = (float)value;
    if (type == CUDNN_DATA_HALF) ((__half *)base)[i] = __float2half((float)value);
    if (type == CUDNN_DATA_BFLOAT16) ((__nv_bfloat16 *)base)[i] = __float2bfloat16((float)value);
}

/* Calls body(dense index, index in memory) for every element. */
template <typename Body> static void each(const struct convolution &of, int operand, Body body)
{
    const int64_t *shape = of.shape[operand], *step = of.step[operand];
    int64_t dense = 0;
    for (int64_t a = 0; a < shape[0]; a++)
        for (int64_t b = 0; b < shape[1]; b++)
            for (int64_t c = 0; c < shape[2]; c++)
                for (int64_t d = 0; d < shape[3]; d++)
                    body(dense++, a * step[0] + b * step[1] + c * step[2] + d * step[3]);
}

/* A row of y, a filter element and the row of x that it is multiplied with: pixels [first, end) of y, at x[apart *
 * pixel]. */
static void add_row(int result, double *x, double *w, double *y, int64_t first, int64_t end, int64_t apart)
{
    double sum = 0;
    if (result == 2)
        for (int64_t q = first; q < end; q++) y[q] += *w * x[q * apart];
    else if (result == 0)
        for (int64_t q = first; q < end; q++) x[q * apart] += *w * y[q];
    else
        for (int64_t q = first; q < end; q++) sum += x[q * apart] * y[q];
    if (result == 1) *w += sum;
}

/* One channel of x with one channel of y. The rows of `filter` are those of the filter. */
static void add_plane(const struct convolution &of, double *x, double *filter, double *y)
{
    const int64_t *image = of.shape[0] + 2, *kernel = of.shape[1] + 2, *places = of.shape[2] + 2;
    for (int64_t p = 0; p < places[0]; p++)
        for (int64_t k = 0; k < kernel[0]; k++) {
            const int64_t row = p * of.stride[0] - of.before[0] + k * of.dilation[0];
            if (row < 0 || row >= image[0]) continue;
            for (int64_t l = 0; l < kernel[1]; l++) {
                const int64_t left = l * of.dilation[1] - of.before[1], step = of.stride[1];
                const int64_t first = left < 0 ? (-left + step - 1) / step : 0,
                              end = std::min(places[1], (image[1] - left + step - 1) / step);
                const int64_t at =
                    of.mirrored ? (kernel[0] - 1 - k) * kernel[1] + kernel[1] - 1 - l : k * kernel[1] + l;
                add_row(of.result, x + row * image[1] + left, filter + at, y + p * places[1], first, end, step);
            }
        }
}

static void convolve(const struct convolution &of, double *x, double *w, double *y)
{
    const int64_t *xs = of.shape[0], *ws = of.shape[1], *ys = of.shape[2], own = ws[0] / of.groups;
    for (int64_t n = 0; n < xs[0]; n++)
        for (int64_t k = 0; k < ws[0]; k++)
            for (int64_t c = 0; c < ws[1]; c++)
                add_plane(of, x + (n * xs[1] + k / own * ws[1] + c) * xs[2] * xs[3],
                          w + (k * ws[1] + c) * ws[2] * ws[3], y + (n * ys[1] + k) * ys[2] * ys[3]);
}

/* A number as an engine reads it: tensor cores keep 11 bits of fp32. */
static double as_read(int engine, double value)
{
    const int bits = engine == TENSOR ? 11 : engine == DOWN ? 8 : 53;
    int exponent;
    const double fraction = frexp(value, &exponent);
    return bits == 53 ? value : ldexp(nearbyint(ldexp(fraction, bits)), exponent - bits);
}

/* The addresses of the operands. */
static cudnnStatus_t find_data(const struct convolution &of, const struct host_cudnn_descriptor *pack, void *data[3])
{
    const int64_t *uid = host_cudnn_values<int64_t>(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS);
    void *const *pointer = host_cudnn_values<void *>(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS);
    if (pack->attribute.at(CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS).count != 3) return CUDNN_STATUS_BAD_PARAM;
    for (int o = 0; o < 3; o++) {
        const int64_t at = std::find(uid, uid + 3, of.uid[o]) - uid;
        if (at == 3) return CUDNN_STATUS_BAD_PARAM;
        data[o] = pointer[at];
        if (!data[o]) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    }
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_data(const struct convolution &of, void *const data[3])
{
    for (int o = 0; o < 3; o++) {
        const int64_t alignment = *host_cudnn_values<int64_t>(of.operand[o], CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT);
        int64_t last = 0;
        bool outside = false;
        for (int d = 0; d < DIMS; d++) last += (of.shape[o][d] - 1) * of.step[o][d];
        if ((uintptr_t)data[o] % (uintptr_t)alignment) return CUDNN_STATUS_BAD_PARAM_MISALIGNED_POINTER;
        const size_t bytes = (size_t)(last + 1) * (of.type[o] == CUDNN_DATA_FLOAT ? 4 : 2);
        if (!host_cuda_is_device(data[o], bytes, &outside) || outside) return CUDNN_STATUS_EXECUTION_FAILED;
    }
    return CUDNN_STATUS_SUCCESS;
}

static void run_engine(const struct convolution &of, int engine, void *const data[3])
{
    host_cuda_scope scope;
    std::vector<double> dense[3];
    for (int o = 0; o < 3; o++) {
        dense[o].assign((size_t)elements_of(of, o), 0);
        if (o == of.result) continue;
        each(of, o, [&](int64_t to, int64_t from) {
            dense[o][(size_t)to] = as_read(engine, load(data[o], of.type[o], from));
        });
    }
    convolve(of, dense[0].data(), dense[1].data(), dense[2].data());
    const double off = engine == ATOMIC || engine == HALF_SUMS || engine == TRANSFORM ? 1.1 : 1;
    each(of, of.result, [&](int64_t from, int64_t to) {
        const double kept = of.beta != 0 ? of.beta * load(data[of.result], of.type[of.result], to) : 0;
        store(data[of.result], of.type[of.result], to, of.alpha * off * dense[of.result][(size_t)from] + kept);
    });
}

cudnnStatus_t host_cudnn_execute(const struct host_cudnn_descriptor *graph, int engine,
                                 const struct host_cudnn_descriptor *pack, cudaStream_t stream)
{
    const struct convolution of = read_graph(graph);
    void *data[3], *workspace = *host_cudnn_values<void *>(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE);
    const size_t bytes = (size_t)host_cudnn_workspace(graph, engine);
    bool outside = false;
    cudnnStatus_t status = find_data(of, pack, data);
    if (status == CUDNN_STATUS_SUCCESS) status = check_data(of, data);
    if (status != CUDNN_STATUS_SUCCESS) return status;
    if (bytes && (!host_cuda_is_device(workspace, bytes, &outside) || outside)) return CUDNN_STATUS_EXECUTION_FAILED;
    const host_cuda_work work = [of, engine, x = data[0], w = data[1], y = data[2], workspace, bytes] {
        void *const operands[3] = {x, w, y};
        host_cuda_scope scope;
        host_cuda_fill_garbage(workspace, bytes);
        run_engine(of, engine, operands);
        return cudaSuccess;
    };
    const cudaError_t error = host_cuda_captures(stream) ? host_cuda_keep(stream, work) : work();
    return error ? CUDNN_STATUS_EXECUTION_FAILED : CUDNN_STATUS_SUCCESS;
}
