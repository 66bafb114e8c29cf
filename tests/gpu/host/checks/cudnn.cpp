/* Self-test: cuDNN's descriptors and the calls that they refuse. Convolutions are compared with their definition,
 * gradients by <dy, x * w> = <dx, x> = <dw, w>. */
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <vector>

#include "cudnn.h"
#include "selftest.h"

typedef cudnnBackendDescriptor_t Descriptor;
#define PART CUDNN_TYPE_BACKEND_DESCRIPTOR

static Descriptor make(cudnnBackendDescriptorType_t type)
{
    Descriptor made = NULL;
    FINE(cudnnBackendCreateDescriptor(type, &made));
    return made;
}

static Descriptor make_tensor(int64_t uid, const std::vector<int64_t> &shape, const std::vector<int64_t> &step)
{
    const int64_t alignment = 4, dims = (int64_t)shape.size();
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const Descriptor tensor = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    FINE(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid));
    FINE(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type));
    FINE(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, dims, shape.data()));
    FINE(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, dims, step.data()));
    FINE(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment));
    FINE(cudnnBackendFinalize(tensor));
    return tensor;
}

struct geometry {
    int64_t rows, in, height, width, out, kernel[2], stride[2], dilation[2], before[2], after[2], groups;
};

static int64_t places(const struct geometry &of, int d)
{
    const int64_t extent = d ? of.width : of.height;
    return (extent + of.before[d] + of.after[d] - (of.kernel[d] - 1) * of.dilation[d] - 1) / of.stride[d] + 1;
}

static Descriptor make_convolution(const struct geometry &of)
{
    const int64_t dims = 2;
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    const Descriptor how = make(CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, of.dilation));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, of.stride));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, of.before));
    FINE(cudnnBackendSetAttribute(how, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, of.after));
    FINE(cudnnBackendFinalize(how));
    return how;
}

struct operation {
    cudnnBackendDescriptorType_t type;
    cudnnBackendAttributeName_t how, x, w, y, alpha, beta;
};
static const struct operation operations[] = {
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_Y, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_CONV_DESC,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DX, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_W,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_DY, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_ALPHA,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_DATA_BETA},
    {CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_CONV_DESC, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_X,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DW, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_DY,
     CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_ALPHA, CUDNN_ATTR_OPERATION_CONVOLUTION_BWD_FILTER_BETA}};

static Descriptor make_graph(cudnnHandle_t handle, int result, Descriptor how, const Descriptor operand[3], float beta)
{
    const struct operation &names = operations[result];
    const Descriptor operation = make(names.type), graph = make(CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    const float alpha = 1;
    FINE(cudnnBackendSetAttribute(operation, names.how, PART, 1, &how));
    FINE(cudnnBackendSetAttribute(operation, names.x, PART, 1, &operand[0]));
    FINE(cudnnBackendSetAttribute(operation, names.w, PART, 1, &operand[1]));
    FINE(cudnnBackendSetAttribute(operation, names.y, PART, 1, &operand[2]));
    FINE(cudnnBackendSetAttribute(operation, names.alpha, CUDNN_TYPE_FLOAT, 1, &alpha));
    CHECK(cudnnBackendFinalize(operation) == CUDNN_STATUS_BAD_PARAM); /* no beta yet */
    FINE(cudnnBackendSetAttribute(operation, names.beta, CUDNN_TYPE_FLOAT, 1, &beta));
    FINE(cudnnBackendFinalize(operation));
    FINE(cudnnBackendSetAttribute(graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, PART, 1, &operation));
    FINE(cudnnBackendSetAttribute(graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle));
    FINE(cudnnBackendFinalize(graph));
    FINE(cudnnBackendDestroyDescriptor(operation)); /* the graph keeps it alive */
    return graph;
}

/* The plan of the last engine of the fallback ranking: the PLAIN engine. */
static Descriptor make_plan(cudnnHandle_t handle, Descriptor graph, int64_t *bytes)
{
    const Descriptor ranking = make(CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR),
                     plan = make(CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR);
    const cudnnBackendHeurMode_t mode = CUDNN_HEUR_MODE_FALLBACK;
    std::vector<Descriptor> config;
    int64_t count = 0;
    FINE(cudnnBackendSetAttribute(ranking, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, PART, 1, &graph));
    FINE(cudnnBackendSetAttribute(ranking, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode));
    CHECK(cudnnBackendGetAttribute(ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, PART, 0, &count, NULL) ==
          CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
    FINE(cudnnBackendFinalize(ranking));
    FINE(cudnnBackendGetAttribute(ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, PART, 0, &count, NULL));
    CHECK(count > 1);
    for (int64_t c = 0; c < count; c++) config.push_back(make(CUDNN_BACKEND_ENGINECFG_DESCRIPTOR));
    FINE(cudnnBackendGetAttribute(ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, PART, count, &count, config.data()));
    FINE(cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &handle));
    FINE(cudnnBackendSetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, PART, 1, &config.back()));
    FINE(cudnnBackendFinalize(plan));
    FINE(cudnnBackendGetAttribute(plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &count, bytes));
    for (const Descriptor made : config) FINE(cudnnBackendDestroyDescriptor(made));
    FINE(cudnnBackendDestroyDescriptor(ranking));
    return plan;
}

static Descriptor make_pack(const int64_t uid[3], void *const data[3], void *workspace)
{
    const Descriptor pack = make(CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    FINE(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 3, uid));
    FINE(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 3, data));
    FINE(cudnnBackendSetAttribute(pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace));
    FINE(cudnnBackendFinalize(pack));
    return pack;
}

/* operand[2] of `result` 0, [0] of 1, [1] of 2 (+)= the others' convolution. */
static void run(cudnnHandle_t handle, int result, Descriptor how, const Descriptor operand[3],
                std::vector<float> *data[3], float beta)
{
    const int64_t uid[3] = {1, 2, 3}, turned[3] = {3, 1, 1};
    int64_t bytes = -1;
    const Descriptor graph = make_graph(handle, result, how, operand, beta), plan = make_plan(handle, graph, &bytes);
    void *device[3], *workspace = NULL;
    CHECK(bytes > 0);
    FINE(cudaMalloc(&workspace, (size_t)bytes));
    for (int o = 0; o < 3; o++) device[o] = to_device(data[o]->data(), data[o]->size());
    const Descriptor pack = make_pack(uid, device, workspace), strange = make_pack(turned, device, workspace),
                     small = make_pack(uid, device, NULL);
    CHECK(cudnnBackendExecute(handle, plan, strange) == CUDNN_STATUS_BAD_PARAM);
    CHECK(cudnnBackendExecute(handle, plan, small) == CUDNN_STATUS_EXECUTION_FAILED);
    CHECK(cudnnBackendExecute(handle, graph, pack) == CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE);
    FINE(cudnnBackendDestroyDescriptor(graph)); /* the plan keeps it alive */
    FINE(cudnnBackendExecute(handle, plan, pack));
    for (int o = 0; o < 3; o++) {
        to_host(data[o]->data(), (float *)device[o], data[o]->size());
        FINE(cudaFree(device[o]));
    }
    FINE(cudaFree(workspace));
    for (const Descriptor made : {pack, strange, small, plan}) FINE(cudnnBackendDestroyDescriptor(made));
}

static double dot(const std::vector<float> &a, const std::vector<float> &b)
{
    double sum = 0;
    for (size_t i = 0; i < a.size(); i++) sum += (double)a[i] * b[i];
    return sum;
}

static std::vector<float> random_numbers(int64_t count)
{
    std::vector<float> numbers((size_t)count);
    for (float &number : numbers) number = random_unit() - 0.5f;
    return numbers;
}

/* One element of y by its definition. x is [rows][height][width][in]. */
static double expected(const struct geometry &of, const std::vector<float> &x, const std::vector<float> &w, int64_t n,
                       int64_t k, int64_t p, int64_t q)
{
    const int64_t depth = of.in / of.groups, group = k / (of.out / of.groups);
    double sum = 0;
    for (int64_t i = 0; i < of.height; i++)
        for (int64_t j = 0; j < of.width; j++) {
            const int64_t r = i + of.before[0] - p * of.stride[0], s = j + of.before[1] - q * of.stride[1];
            if (r < 0 || s < 0 || r % of.dilation[0] || s % of.dilation[1] || r / of.dilation[0] >= of.kernel[0] ||
                s / of.dilation[1] >= of.kernel[1])
                continue;
            for (int64_t c = 0; c < depth; c++)
                sum += (double)x[(size_t)(((n * of.height + i) * of.width + j) * of.in + group * depth + c)] *
                       w[(size_t)(((k * depth + c) * of.kernel[0] + r / of.dilation[0]) * of.kernel[1] +
                                  s / of.dilation[1])];
        }
    return sum;
}

static void test_geometry(cudnnHandle_t handle, const struct geometry &of)
{
    const int64_t down = places(of, 0), across = places(of, 1), depth = of.in / of.groups;
    const int64_t k0 = of.kernel[0], k1 = of.kernel[1];
    const Descriptor how = make_convolution(of);
    const Descriptor operand[3] = {
        make_tensor(1, {of.rows, of.in, of.height, of.width},
                    {of.height * of.width * of.in, 1, of.width * of.in, of.in}),
        make_tensor(2, {of.out, depth, k0, k1}, {depth * k0 * k1, k0 * k1, k1, 1}),
        make_tensor(3, {of.rows, of.out, down, across}, {of.out * down * across, down * across, across, 1})};
    std::vector<float> x = random_numbers(of.rows * of.in * of.height * of.width),
                       w = random_numbers(of.out * depth * k0 * k1);
    std::vector<float> y(static_cast<size_t>(of.rows * of.out * down * across), 7.0f),
        dy = random_numbers((int64_t)y.size()), dx = x, dw = w;
    std::vector<float> *forward[3] = {&x, &w, &y}, *to_x[3] = {&dx, &w, &dy}, *to_w[3] = {&x, &dw, &dy};
    run(handle, 0, how, operand, forward, 0);
    bool same = true;
    for (int64_t i = 0; i < (int64_t)y.size(); i++)
        same = same && fabs(y[(size_t)i] - expected(of, x, w, i / across / down / of.out, i / across / down % of.out,
                                                    i / across % down, i % across)) < 1e-5;
    CHECK(same);
    run(handle, 1, how, operand, to_x, 1); /* added to x itself */
    run(handle, 2, how, operand, to_w, 0);
    const double all = dot(dy, y);
    CHECK(fabs(dot(dx, x) - dot(x, x) - all) < 1e-4 * (1 + fabs(all)));
    CHECK(fabs(dot(dw, w) - all) < 1e-4 * (1 + fabs(all)));
    for (const Descriptor made : {how, operand[0], operand[1], operand[2]}) FINE(cudnnBackendDestroyDescriptor(made));
}

static void destroy_twice(void *descriptor)
{
    cudnnBackendDestroyDescriptor(descriptor);
    cudnnBackendDestroyDescriptor(descriptor);
}

static void test_refusals(void)
{
    const int64_t shape[4] = {2, 3, 4, 5}, none[4] = {2, 3, 0, 5};
    const float number = 1;
    Descriptor tensor = make(CUDNN_BACKEND_TENSOR_DESCRIPTOR),
               operation = make(CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR);
    CHECK(cudnnBackendCreateDescriptor(CUDNN_BACKEND_TENSOR_DESCRIPTOR, NULL) == CUDNN_STATUS_BAD_PARAM_NULL_POINTER);
    CHECK(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_FLOAT, 1, &number) ==
          CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE);
    CHECK(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 2, shape) ==
          CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND);
    CHECK(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_OPERATIONGRAPH_OPS, PART, 1, &operation) ==
          CUDNN_STATUS_BAD_PARAM);
    CHECK(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, NULL) ==
          CUDNN_STATUS_BAD_PARAM_NULL_POINTER);
    CHECK(cudnnBackendFinalize(tensor) == CUDNN_STATUS_BAD_PARAM); /* no attribute is set */
    CHECK(cudnnBackendSetAttribute(operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, PART, 1, &tensor) ==
          CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED);
    FINE(cudnnBackendDestroyDescriptor(tensor));
    tensor = make_tensor(1, {shape, shape + 4}, {60, 20, 5, 1});
    CHECK(cudnnBackendFinalize(tensor) == CUDNN_STATUS_BAD_PARAM); /* twice */
    CHECK(cudnnBackendSetAttribute(tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, none) ==
          CUDNN_STATUS_BAD_PARAM);
    FINE(cudnnBackendSetAttribute(operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_X, PART, 1, &tensor));
    CHECK(cudnnBackendSetAttribute(operation, CUDNN_ATTR_OPERATION_CONVOLUTION_FORWARD_CONV_DESC, PART, 1, &tensor) ==
          CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE);
    FINE(cudnnBackendDestroyDescriptor(operation));
    CHECK(child_end(destroy_twice, tensor) == SIGABRT);
    FINE(cudnnBackendDestroyDescriptor(tensor));
}

void test_cudnn(void)
{
    static const struct geometry cases[] = {
        {2, 3, 7, 6, 4, {3, 3}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, 1},
        {1, 4, 9, 8, 6, {3, 2}, {2, 3}, {1, 1}, {0, 1}, {2, 0}, 2},
        {2, 6, 8, 8, 6, {2, 3}, {1, 2}, {3, 2}, {2, 4}, {2, 4}, 3},
        {1, 2, 3, 3, 2, {5, 5}, {1, 1}, {1, 1}, {1, 1}, {1, 1}, 1},
        {1, 1, 2, 2, 1, {1, 1}, {1, 1}, {1, 1}, {3, 3}, {3, 3}, 1},
    };
    cudnnHandle_t handle = NULL;
    FINE(cudnnCreate(&handle));
    test_refusals();
    for (const struct geometry &of : cases) test_geometry(handle, of);
    FINE(cudnnDestroy(handle));
    setenv("HAPT_HOST_CUDNN", "missing", 1);
    CHECK(cudnnCreate(&handle) == CUDNN_STATUS_NOT_INITIALIZED);
    unsetenv("HAPT_HOST_CUDNN");
}
