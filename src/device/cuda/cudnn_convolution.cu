/*
 * Convolutions by cuDNN: a graph of one operation per shape. Shapes without an acceptable plan are left to
 * convolution.cu.
 */
#include <string.h>

#include "cudnn_convolution.h"
#include "cudnn_plans.h"
#include "product.h"

enum { UID_X = 'x', UID_W = 'w', UID_Y = 'y' };

/* The key of a convolution's plan. */
struct convolution_key {
    int64_t x[4], w[4], y[4], stride, padding;
    size_t workspace_bytes;
    int result, in, out, accumulate, tf32, unused;
};

static cudnnBackendDescriptor_t convolution_make(struct descriptor_list *list, const struct convolution_key *key)
{
    const int64_t dims = 2, dilation[2] = {1, 1}, stride[2] = {key->stride, key->stride},
                  padding[2] = {key->padding, key->padding};
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    cudnnBackendDescriptor_t convolution = cudnn_make(list, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, dilation);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, stride);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    cudnn_set(list, convolution, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    cudnn_finalize(list, convolution);
    return convolution;
}

#define OPERATION(kind, name, x, w, y)                                                                                \
    {                                                                                                                 \
        CUDNN_BACKEND_OPERATION_CONVOLUTION_##kind##_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_CONV_DESC, \
            CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##x, CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##w,             \
            CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##y, CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_ALPHA,           \
            CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_BETA                                                            \
    }

static const struct operation {
    cudnnBackendDescriptorType_t type;
    cudnnBackendAttributeName_t convolution, x, w, y, alpha, beta;
} operations[] = {OPERATION(FORWARD, FORWARD, X, W, Y), OPERATION(BACKWARD_DATA, BWD_DATA, DX, W, DY),
                  OPERATION(BACKWARD_FILTER, BWD_FILTER, X, DW, DY)};

static cudnnBackendDescriptor_t convolution_graph(struct descriptor_list *list, const void *of)
{
    const struct convolution_key *key = (const struct convolution_key *)of;
    const struct operation *how = &operations[key->result];
    const float alpha = 1, beta = key->accumulate ? 1.0f : 0.0f;
    const cudnnBackendDescriptor_t convolution = convolution_make(list, key);
    const cudnnBackendDescriptor_t x = cudnn_tensor(
        list, UID_X, key->x, NULL, cudnn_type(key->result == RESULT_DX ? key->out : key->in), CUDNN_ALIGNMENT);
    const cudnnBackendDescriptor_t w = cudnn_tensor(
        list, UID_W, key->w, NULL, cudnn_type(key->result == RESULT_DW ? key->out : key->in), CUDNN_ALIGNMENT);
    const cudnnBackendDescriptor_t y = cudnn_tensor(
        list, UID_Y, key->y, NULL, cudnn_type(key->result == RESULT_Y ? key->out : key->in), CUDNN_ALIGNMENT);
    const cudnnBackendDescriptor_t operation = cudnn_make(list, how->type);
    cudnn_set(list, operation, how->convolution, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &convolution);
    cudnn_set(list, operation, how->x, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &x);
    cudnn_set(list, operation, how->w, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &w);
    cudnn_set(list, operation, how->y, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &y);
    cudnn_set(list, operation, how->alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
    cudnn_set(list, operation, how->beta, CUDNN_TYPE_FLOAT, 1, &beta);
    cudnn_finalize(list, operation);
    return cudnn_graph(list, &operation, 1);
}

/*
 * Only deterministic, full-precision plans are used: no sums in varying order, no operands or sums with fewer bits, no
 * transforms. Tensor cores read fp32 as TF32, so fp32 needs permission for them. 16-bit plans must use them: otherwise
 * the products of convolution.cu, which do, are faster.
 */
static bool convolution_accepts(const cudnnBackendNumericalNote_t *note, int64_t notes, const void *of)
{
    const struct convolution_key *key = (const struct convolution_key *)of;
    bool tensor_cores = false;
    for (int64_t n = 0; n < notes; n++) {
        tensor_cores = tensor_cores || note[n] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
        if (note[n] != CUDNN_NUMERICAL_NOTE_TENSOR_CORE && note[n] != CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP)
            return false;
    }
    return key->in == HAPT_F32 ? !tensor_cores || key->tf32 : tensor_cores;
}

static struct convolution_key convolution_key_of(const struct cudnn_convolution *of)
{
    const struct hapt_view *const in = of->result == RESULT_DX ? of->y : of->x;
    const struct hapt_view *const out = of->result == RESULT_Y ? of->y : of->result == RESULT_DX ? of->x : of->w;
    struct convolution_key key;
    memset(&key, 0, sizeof key);
    memcpy(key.x, of->x->shape, sizeof key.x);
    memcpy(key.w, of->w->shape, sizeof key.w);
    memcpy(key.y, of->y->shape, sizeof key.y);
    key.stride = of->stride;
    key.padding = of->padding;
    key.result = of->result;
    key.in = in->dtype;
    key.out = out->dtype;
    key.accumulate = of->accumulate;
    key.tf32 = product_tf32();
    key.workspace_bytes = of->workspace_bytes;
    return key;
}

static struct cudnn_problem convolution_problem(const struct convolution_key *key)
{
    return {"a convolution", key, sizeof *key, convolution_graph, convolution_accepts, key->workspace_bytes};
}

enum hapt_status cudnn_convolution_run(const struct cudnn_convolution *of, void *workspace, struct hapt_queue *queue,
                                       bool *done)
{
    const struct convolution_key key = convolution_key_of(of);
    const struct cudnn_problem problem = convolution_problem(&key);
    const struct cudnn_operand operand[] = {{UID_X, of->x->data}, {UID_W, of->w->data}, {UID_Y, of->y->data}};
    *done = false;
    if (!aligned_16(of->x->data) || !aligned_16(of->w->data) || !aligned_16(of->y->data)) return HAPT_OK;
    if (!hapt_view_elements(of->x) || !hapt_view_elements(of->w) || !hapt_view_elements(of->y)) return HAPT_OK;
    return cudnn_run(&problem, operand, 3, workspace, queue, done);
}
