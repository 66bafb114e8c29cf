/*
 * Convolutions by cuDNN 9's graph API, with a graph of one operation per shape. Its plan is the first of cuDNN's
 * ranking that is deterministic, sums in fp32 without rounding its operands, and fits the workspace. Plans are made at
 * the first use of a shape and cached. After that, a convolution neither allocates device memory nor waits. Shapes
 * without such a plan are left to convolution.cu.
 */
#include <cudnn.h>
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_convolution.h"
#include "product.h"

enum { SHAPES = 512, PROBES = 16, CONFIGS = 64, NOTES = 32, ALIGNMENT = 16, ROUNDED = 256 };
enum { UID_X = 'x', UID_W = 'w', UID_Y = 'y' };

#define CUDNN_CALLS(call)                                                                       \
    call(GetVersion) call(Create) call(SetStream) call(GetErrorString) call(GetLastErrorString) \
        call(BackendCreateDescriptor) call(BackendDestroyDescriptor) call(BackendSetAttribute)  \
            call(BackendGetAttribute) call(BackendFinalize) call(BackendExecute)

/* Everything that the choice depends on; compared as bytes. */
struct shape {
    int64_t x[4], w[4], y[4], stride, padding;
    size_t workspace_bytes;
    int result, in, out, accumulate, tf32, unused;
};

struct choice {
    bool known, ran;
    struct shape shape;
    cudnnBackendDescriptor_t plan; /* NULL: none */
};

static struct {
#define CUDNN_MEMBER(name) decltype(&cudnn##name) name;
    CUDNN_CALLS(CUDNN_MEMBER)
} cudnn;

/* The lock is held while a convolution is started, since the handle has one stream at a time. */
static struct {
    pthread_mutex_t lock;
    bool looked, here;
    cudnnHandle_t handle;
    cudaStream_t stream;
    struct choice choice[SHAPES];
} convolutions = {PTHREAD_MUTEX_INITIALIZER, false, false, NULL, NULL, {}};

/* ---- The library ---- */

#ifdef HAPT_HOST_CUDA /* tests/gpu/host */
static bool load(void)
{
#define CUDNN_TAKE(name) cudnn.name = cudnn##name;
    CUDNN_CALLS(CUDNN_TAKE)
    return true;
}
#else
static bool load(void)
{
    const char *reason;
    void *library = cuda_host->open_library("libcudnn.so.9", &reason);
    if (!library) return false;
#define CUDNN_TAKE(name)                                              \
    cudnn.name = (decltype(cudnn.name))dlsym(library, "cudnn" #name); \
    if (!cudnn.name) return false;
    CUDNN_CALLS(CUDNN_TAKE)
    return true;
}
#endif

/* Call with the lock held. */
static bool is_available(void)
{
    if (convolutions.looked) return convolutions.here;
    const char *wanted = getenv("HAPT_CUDNN");
    convolutions.looked = true;
    return convolutions.here = !(wanted && strcmp(wanted, "0") == 0) && load();
}

const char *cudnn_library(void)
{
    static char text[32];
    pthread_mutex_lock(&convolutions.lock);
    const size_t version = is_available() ? cudnn.GetVersion() : 0;
    pthread_mutex_unlock(&convolutions.lock);
    snprintf(text, sizeof text, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return version ? text : NULL;
}

/* ---- Descriptors: only the first failure is kept and later calls do nothing, so the code below checks nothing ---- */

struct descriptor_list {
    cudnnStatus_t status;
    int count;
    cudnnBackendDescriptor_t made[CONFIGS + 8]; /* released together */
};

static cudnnBackendDescriptor_t make(struct descriptor_list *list, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t made = NULL;
    if (list->status != CUDNN_STATUS_SUCCESS) return NULL;
    list->status = cudnn.BackendCreateDescriptor(type, &made);
    if (list->status == CUDNN_STATUS_SUCCESS) list->made[list->count++] = made;
    return made;
}

static void set(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (list->status == CUDNN_STATUS_SUCCESS)
        list->status = cudnn.BackendSetAttribute(descriptor, name, type, count, value);
}

static void finalize(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor)
{
    if (list->status == CUDNN_STATUS_SUCCESS) list->status = cudnn.BackendFinalize(descriptor);
}

/* Number of values; at most `most` of them are written. */
static int64_t get(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t type, int64_t most, void *value)
{
    int64_t count = 0;
    if (list->status == CUDNN_STATUS_SUCCESS)
        list->status = cudnn.BackendGetAttribute(descriptor, name, type, most, &count, value);
    return list->status == CUDNN_STATUS_SUCCESS ? count : 0;
}

/* Destroys the descriptors after the first `kept`. */
static void release(struct descriptor_list *list, int kept)
{
    while (list->count > kept) cudnn.BackendDestroyDescriptor(list->made[--list->count]);
}

/* ---- The graph of a shape ---- */

static cudnnBackendDescriptor_t tensor_make(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                            int dtype)
{
    const int64_t stride[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1}, alignment = ALIGNMENT;
    const cudnnDataType_t type = dtype == HAPT_BF16  ? CUDNN_DATA_BFLOAT16
                                 : dtype == HAPT_F16 ? CUDNN_DATA_HALF
                                                     : CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t tensor = make(list, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(list, tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(list, tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(list, tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, shape);
    set(list, tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    set(list, tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    finalize(list, tensor);
    return tensor;
}

static cudnnBackendDescriptor_t convolution_make(struct descriptor_list *list, const struct shape *shape)
{
    const int64_t dims = 2, dilation[2] = {1, 1}, stride[2] = {shape->stride, shape->stride},
                  padding[2] = {shape->padding, shape->padding};
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    cudnnBackendDescriptor_t convolution = make(list, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, dilation);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, stride);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    set(list, convolution, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    finalize(list, convolution);
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

static cudnnBackendDescriptor_t graph_make(struct descriptor_list *list, const struct shape *shape)
{
    const struct operation *how = &operations[shape->result];
    const float alpha = 1, beta = shape->accumulate ? 1.0f : 0.0f;
    const cudnnBackendDescriptor_t convolution = convolution_make(list, shape);
    const cudnnBackendDescriptor_t x =
        tensor_make(list, UID_X, shape->x, shape->result == RESULT_DX ? shape->out : shape->in);
    const cudnnBackendDescriptor_t w =
        tensor_make(list, UID_W, shape->w, shape->result == RESULT_DW ? shape->out : shape->in);
    const cudnnBackendDescriptor_t y =
        tensor_make(list, UID_Y, shape->y, shape->result == RESULT_Y ? shape->out : shape->in);
    const cudnnBackendDescriptor_t operation = make(list, how->type);
    set(list, operation, how->convolution, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &convolution);
    set(list, operation, how->x, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &x);
    set(list, operation, how->w, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &w);
    set(list, operation, how->y, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &y);
    set(list, operation, how->alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
    set(list, operation, how->beta, CUDNN_TYPE_FLOAT, 1, &beta);
    finalize(list, operation);
    cudnnBackendDescriptor_t graph = make(list, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(list, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &convolutions.handle);
    set(list, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &operation);
    finalize(list, graph);
    return graph;
}

/* ---- The plan of a graph ---- */

/*
 * Only deterministic, full-precision plans are used: no sums in varying order, no operands or sums with fewer bits, no
 * transforms. Tensor cores read fp32 as TF32, so fp32 needs permission for them. 16-bit plans must use them: otherwise
 * the products of convolution.cu, which do, are faster.
 */
static bool is_acceptable(const cudnnBackendNumericalNote_t *note, int64_t notes, const struct shape *shape)
{
    bool tensor_cores = false;
    for (int64_t n = 0; n < notes && n < NOTES; n++) {
        tensor_cores = tensor_cores || note[n] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
        if (note[n] != CUDNN_NUMERICAL_NOTE_TENSOR_CORE && note[n] != CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP)
            return false;
    }
    return shape->in == HAPT_F32 ? !tensor_cores || shape->tf32 : tensor_cores;
}

/* NULL: no acceptable plan. */
static cudnnBackendDescriptor_t plan_make(cudnnBackendDescriptor_t config, const struct shape *shape)
{
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendNumericalNote_t note[NOTES];
    int64_t bytes = INT64_MAX;
    cudnnBackendDescriptor_t plan = make(&list, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR),
                             engine = make(&list, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    get(&list, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    const int64_t notes = get(&list, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, NOTES, note);
    if (list.status == CUDNN_STATUS_SUCCESS && !is_acceptable(note, notes, shape))
        list.status = CUDNN_STATUS_NOT_SUPPORTED;
    set(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &convolutions.handle);
    set(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
    finalize(&list, plan);
    get(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &bytes);
    const bool fits = list.status == CUDNN_STATUS_SUCCESS && bytes >= 0 && (size_t)bytes <= shape->workspace_bytes;
    release(&list, fits ? 1 : 0);
    return fits ? plan : NULL;
}

/* The first acceptable plan of a ranking. */
static cudnnBackendDescriptor_t plan_find(struct descriptor_list *list, cudnnBackendDescriptor_t graph,
                                          cudnnBackendHeurMode_t mode, const struct shape *shape)
{
    cudnnBackendDescriptor_t config[CONFIGS], plan = NULL;
    const int kept = list->count;
    cudnnBackendDescriptor_t ranking = make(list, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(list, ranking, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
    set(list, ranking, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finalize(list, ranking);
    int64_t count = get(list, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, NULL);
    if (count > CONFIGS) count = CONFIGS;
    for (int64_t c = 0; c < count; c++) config[c] = make(list, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    const int64_t given =
        get(list, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, config);
    for (int64_t c = 0; c < given && c < count && !plan; c++) plan = plan_make(config[c], shape);
    release(list, kept);
    return plan;
}

/* NULL: none. */
static cudnnBackendDescriptor_t plan_of(const struct shape *shape)
{
    static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK};
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendDescriptor_t plan = NULL;
    const cudnnBackendDescriptor_t graph = graph_make(&list, shape);
    const bool sound = list.status == CUDNN_STATUS_SUCCESS;
    for (int m = 0; sound && m < 3 && !plan; m++) {
        list.status = CUDNN_STATUS_SUCCESS; /* one ranking may be unsupported and the next supported */
        plan = plan_find(&list, graph, modes[m], shape);
    }
    release(&list, 0);
    return plan;
}

/* The entry of the shape in the table, or one to store it in. */
static struct choice *choice_slot(const struct shape *shape)
{
    const unsigned char *byte = (const unsigned char *)shape;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *shape; i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct choice *choice = &convolutions.choice[(hash + probe) % SHAPES];
        if (!choice->known || !memcmp(&choice->shape, shape, sizeof *shape)) return choice;
    }
    return &convolutions.choice[hash % SHAPES];
}

static bool is_known(const struct choice *choice, const struct shape *shape)
{
    return choice->known && !memcmp(&choice->shape, shape, sizeof *shape);
}

static struct choice *choice_find(const struct shape *shape)
{
    struct choice *choice = choice_slot(shape);
    if (is_known(choice, shape)) return choice;
    if (choice->plan) cudnn.BackendDestroyDescriptor(choice->plan);
    memset(choice, 0, sizeof *choice);
    choice->shape = *shape;
    choice->plan = plan_of(shape);
    choice->known = true;
    return choice;
}

/* ---- The convolution ---- */

static struct shape shape_of(const struct cudnn_convolution *of)
{
    const struct hapt_view *const in = of->result == RESULT_DX ? of->y : of->x;
    const struct hapt_view *const out = of->result == RESULT_Y ? of->y : of->result == RESULT_DX ? of->x : of->w;
    struct shape shape;
    memset(&shape, 0, sizeof shape);
    memcpy(shape.x, of->x->shape, sizeof shape.x);
    memcpy(shape.w, of->w->shape, sizeof shape.w);
    memcpy(shape.y, of->y->shape, sizeof shape.y);
    shape.stride = of->stride;
    shape.padding = of->padding;
    shape.result = of->result;
    shape.in = in->dtype;
    shape.out = out->dtype;
    shape.accumulate = of->accumulate;
    shape.tf32 = product_tf32();
    shape.workspace_bytes = of->workspace_bytes > ROUNDED ? of->workspace_bytes - ROUNDED : 0;
    return shape;
}

/* Makes the handle, for the queue. Without a handle, cuDNN counts as missing. */
static bool take_handle(struct hapt_queue *queue)
{
    if (!is_available()) return false;
    if (!convolutions.handle && cudnn.Create(&convolutions.handle) != CUDNN_STATUS_SUCCESS)
        return convolutions.here = false;
    if (convolutions.stream == queue->stream) return true;
    if (cudnn.SetStream(convolutions.handle, queue->stream) != CUDNN_STATUS_SUCCESS) return convolutions.here = false;
    convolutions.stream = queue->stream;
    return true;
}

static cudnnStatus_t execute(cudnnBackendDescriptor_t plan, const struct cudnn_convolution *of, void *workspace)
{
    const int64_t uid[] = {UID_X, UID_W, UID_Y};
    void *const data[] = {of->x->data, of->w->data, of->y->data};
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendDescriptor_t pack = make(&list, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(&list, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 3, uid);
    set(&list, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 3, data);
    set(&list, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    finalize(&list, pack);
    if (list.status == CUDNN_STATUS_SUCCESS) list.status = cudnn.BackendExecute(convolutions.handle, plan, pack);
    release(&list, 0);
    return list.status;
}

/* Starts the convolution if it has a plan. */
static cudnnStatus_t start(const struct cudnn_convolution *of, const struct shape *shape, void *workspace,
                           struct hapt_queue *queue, bool *done)
{
    if (queue->capturing && convolutions.here && !is_known(choice_slot(shape), shape))
        return CUDNN_STATUS_NOT_INITIALIZED; /* no plans are made during a capture */
    struct choice *choice = take_handle(queue) ? choice_find(shape) : NULL;
    *done = choice && choice->plan;
    if (!*done) return CUDNN_STATUS_SUCCESS;
    const cudnnStatus_t status = execute(choice->plan, of, workspace);
    if (choice->ran || CUDNN_STATUS_CATEGORY(status) != CUDNN_STATUS_NOT_SUPPORTED) {
        choice->ran = true;
        return status;
    }
    cudnn.BackendDestroyDescriptor(choice->plan); /* cuDNN refuses its own plan */
    choice->plan = NULL;
    *done = false;
    return CUDNN_STATUS_SUCCESS;
}

enum hapt_status cudnn_convolution_run(const struct cudnn_convolution *of, void *workspace, struct hapt_queue *queue,
                                       bool *done)
{
    const struct shape shape = shape_of(of);
    void *const rounded = (void *)(((uintptr_t)workspace + ROUNDED - 1) & ~(uintptr_t)(ROUNDED - 1));
    char detail[160] = "";
    *done = false;
    if (!aligned_16(of->x->data) || !aligned_16(of->w->data) || !aligned_16(of->y->data)) return HAPT_OK;
    if (!hapt_view_elements(of->x) || !hapt_view_elements(of->w) || !hapt_view_elements(of->y)) return HAPT_OK;
    pthread_mutex_lock(&convolutions.lock);
    const cudnnStatus_t status = start(of, &shape, rounded, queue, done);
    if (status != CUDNN_STATUS_SUCCESS) cudnn.GetLastErrorString(detail, sizeof detail);
    pthread_mutex_unlock(&convolutions.lock);
    if (status == CUDNN_STATUS_SUCCESS) return HAPT_OK;
    return cuda_host->fail(HAPT_ERR_INTERNAL, "set HAPT_CUDNN=0 in the environment to do without cuDNN",
                           "cuDNN: a convolution: %s%s%s", cudnn.GetErrorString(status), *detail ? ": " : "", detail);
}
