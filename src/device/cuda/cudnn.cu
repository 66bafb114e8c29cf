/*
 * Convolutions by cuDNN 9's graph API: a graph of one operation for every shape, and the first plan of the library's
 * own ranking that always sums in the same order, in fp32 of the operands as they stand, and fits into the workspace.
 * It is made when a shape comes for the first time and kept; from then on a convolution neither allocates device memory
 * nor waits. What cuDNN has no such plan for is left to convolution.cu.
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

/* All that the choice depends on; compared as bytes. */
struct shape {
    int64_t x[4], w[4], y[4], stride, padding;
    size_t workspace_bytes;
    int result, in, out, accumulate, tf32, unused;
};

struct choice {
    bool known, ran;
    struct shape shape;
    cudnnBackendDescriptor_t plan; /* NULL: there is none */
};

static struct {
#define CUDNN_MEMBER(name) decltype(&cudnn##name) name;
    CUDNN_CALLS(CUDNN_MEMBER)
} cudnn;

/* The lock is held while a convolution is started: the handle has one stream at a time. */
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

/* The lock is held. */
static bool is_here(void)
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
    const size_t version = is_here() ? cudnn.GetVersion() : 0;
    pthread_mutex_unlock(&convolutions.lock);
    snprintf(text, sizeof text, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return version ? text : NULL;
}

/* ---- Descriptors: the first failure is kept and nothing is done behind it, so recipes are plain lists ---- */

struct recipe {
    cudnnStatus_t status;
    int count;
    cudnnBackendDescriptor_t made[CONFIGS + 8]; /* released together */
};

static cudnnBackendDescriptor_t make(struct recipe *recipe, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t made = NULL;
    if (recipe->status != CUDNN_STATUS_SUCCESS) return NULL;
    recipe->status = cudnn.BackendCreateDescriptor(type, &made);
    if (recipe->status == CUDNN_STATUS_SUCCESS) recipe->made[recipe->count++] = made;
    return made;
}

static void set(struct recipe *recipe, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (recipe->status == CUDNN_STATUS_SUCCESS)
        recipe->status = cudnn.BackendSetAttribute(descriptor, name, type, count, value);
}

static void finalize(struct recipe *recipe, cudnnBackendDescriptor_t descriptor)
{
    if (recipe->status == CUDNN_STATUS_SUCCESS) recipe->status = cudnn.BackendFinalize(descriptor);
}

/* How many there are, at most `most` of which were written. */
static int64_t get(struct recipe *recipe, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                   cudnnBackendAttributeType_t type, int64_t most, void *value)
{
    int64_t count = 0;
    if (recipe->status == CUDNN_STATUS_SUCCESS)
        recipe->status = cudnn.BackendGetAttribute(descriptor, name, type, most, &count, value);
    return recipe->status == CUDNN_STATUS_SUCCESS ? count : 0;
}

/* Those made behind the first `kept`. */
static void release(struct recipe *recipe, int kept)
{
    while (recipe->count > kept) cudnn.BackendDestroyDescriptor(recipe->made[--recipe->count]);
}

/* ---- The graph of a shape ---- */

static cudnnBackendDescriptor_t tensor_make(struct recipe *recipe, int64_t uid, const int64_t shape[4], int dtype)
{
    const int64_t stride[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1}, alignment = ALIGNMENT;
    const cudnnDataType_t type = dtype == HAPT_BF16  ? CUDNN_DATA_BFLOAT16
                                 : dtype == HAPT_F16 ? CUDNN_DATA_HALF
                                                     : CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t tensor = make(recipe, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    set(recipe, tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    set(recipe, tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(recipe, tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, shape);
    set(recipe, tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride);
    set(recipe, tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    finalize(recipe, tensor);
    return tensor;
}

static cudnnBackendDescriptor_t convolution_make(struct recipe *recipe, const struct shape *shape)
{
    const int64_t dims = 2, dilation[2] = {1, 1}, stride[2] = {shape->stride, shape->stride},
                  padding[2] = {shape->padding, shape->padding};
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    const cudnnConvolutionMode_t mode = CUDNN_CROSS_CORRELATION;
    cudnnBackendDescriptor_t convolution = make(recipe, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_CONV_MODE, CUDNN_TYPE_CONVOLUTION_MODE, 1, &mode);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, CUDNN_TYPE_INT64, 1, &dims);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_TYPE_INT64, 2, dilation);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES, CUDNN_TYPE_INT64, 2, stride);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    set(recipe, convolution, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS, CUDNN_TYPE_INT64, 2, padding);
    finalize(recipe, convolution);
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

static cudnnBackendDescriptor_t graph_make(struct recipe *recipe, const struct shape *shape)
{
    const struct operation *how = &operations[shape->result];
    const float alpha = 1, beta = shape->accumulate ? 1.0f : 0.0f;
    const cudnnBackendDescriptor_t convolution = convolution_make(recipe, shape);
    const cudnnBackendDescriptor_t x =
        tensor_make(recipe, UID_X, shape->x, shape->result == RESULT_DX ? shape->out : shape->in);
    const cudnnBackendDescriptor_t w =
        tensor_make(recipe, UID_W, shape->w, shape->result == RESULT_DW ? shape->out : shape->in);
    const cudnnBackendDescriptor_t y =
        tensor_make(recipe, UID_Y, shape->y, shape->result == RESULT_Y ? shape->out : shape->in);
    const cudnnBackendDescriptor_t operation = make(recipe, how->type);
    set(recipe, operation, how->convolution, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &convolution);
    set(recipe, operation, how->x, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &x);
    set(recipe, operation, how->w, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &w);
    set(recipe, operation, how->y, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &y);
    set(recipe, operation, how->alpha, CUDNN_TYPE_FLOAT, 1, &alpha);
    set(recipe, operation, how->beta, CUDNN_TYPE_FLOAT, 1, &beta);
    finalize(recipe, operation);
    cudnnBackendDescriptor_t graph = make(recipe, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    set(recipe, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &convolutions.handle);
    set(recipe, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &operation);
    finalize(recipe, graph);
    return graph;
}

/* ---- The plan of a graph ---- */

/*
 * Refused are sums in an order of their own, and what loses digits: operands or sums in fewer bits, transforms. Tensor
 * cores read fp32 as TF32; without them numbers of 16 bits are slower than as the products of convolution.cu, which has
 * them.
 */
static bool is_welcome(const cudnnBackendNumericalNote_t *note, int64_t notes, const struct shape *shape)
{
    bool tensor_cores = false;
    for (int64_t n = 0; n < notes && n < NOTES; n++) {
        tensor_cores = tensor_cores || note[n] == CUDNN_NUMERICAL_NOTE_TENSOR_CORE;
        if (note[n] != CUDNN_NUMERICAL_NOTE_TENSOR_CORE && note[n] != CUDNN_NUMERICAL_NOTE_STRICT_NAN_PROP)
            return false;
    }
    return shape->in == HAPT_F32 ? !tensor_cores || shape->tf32 : tensor_cores;
}

/* NULL: not as it should be. */
static cudnnBackendDescriptor_t plan_make(cudnnBackendDescriptor_t config, const struct shape *shape)
{
    struct recipe recipe = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendNumericalNote_t note[NOTES];
    int64_t bytes = INT64_MAX;
    cudnnBackendDescriptor_t plan = make(&recipe, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR),
                             engine = make(&recipe, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    get(&recipe, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    const int64_t notes =
        get(&recipe, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, NOTES, note);
    if (recipe.status == CUDNN_STATUS_SUCCESS && !is_welcome(note, notes, shape))
        recipe.status = CUDNN_STATUS_NOT_SUPPORTED;
    set(&recipe, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &convolutions.handle);
    set(&recipe, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
    finalize(&recipe, plan);
    get(&recipe, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &bytes);
    const bool fits = recipe.status == CUDNN_STATUS_SUCCESS && bytes >= 0 && (size_t)bytes <= shape->workspace_bytes;
    release(&recipe, fits ? 1 : 0);
    return fits ? plan : NULL;
}

/* The first of a ranking. */
static cudnnBackendDescriptor_t plan_find(struct recipe *recipe, cudnnBackendDescriptor_t graph,
                                          cudnnBackendHeurMode_t mode, const struct shape *shape)
{
    cudnnBackendDescriptor_t config[CONFIGS], plan = NULL;
    const int kept = recipe->count;
    cudnnBackendDescriptor_t ranking = make(recipe, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    set(recipe, ranking, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
    set(recipe, ranking, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    finalize(recipe, ranking);
    int64_t count = get(recipe, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, NULL);
    if (count > CONFIGS) count = CONFIGS;
    for (int64_t c = 0; c < count; c++) config[c] = make(recipe, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    const int64_t given =
        get(recipe, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, config);
    for (int64_t c = 0; c < given && c < count && !plan; c++) plan = plan_make(config[c], shape);
    release(recipe, kept);
    return plan;
}

/* NULL: there is none. */
static cudnnBackendDescriptor_t plan_of(const struct shape *shape)
{
    static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK};
    struct recipe recipe = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendDescriptor_t plan = NULL;
    const cudnnBackendDescriptor_t graph = graph_make(&recipe, shape);
    const bool sound = recipe.status == CUDNN_STATUS_SUCCESS;
    for (int m = 0; sound && m < 3 && !plan; m++) {
        recipe.status = CUDNN_STATUS_SUCCESS; /* a ranking may be unsupported, the next one be there */
        plan = plan_find(&recipe, graph, modes[m], shape);
    }
    release(&recipe, 0);
    return plan;
}

/* The place of the shape in the table, or one to put it. */
static struct choice *choice_place(const struct shape *shape)
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
    struct choice *choice = choice_place(shape);
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

/* Makes the handle, for the queue: cuDNN without a handle is not here. */
static bool take_handle(struct hapt_queue *queue)
{
    if (!is_here()) return false;
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
    struct recipe recipe = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendDescriptor_t pack = make(&recipe, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    set(&recipe, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, 3, uid);
    set(&recipe, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, 3, data);
    set(&recipe, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    finalize(&recipe, pack);
    if (recipe.status == CUDNN_STATUS_SUCCESS) recipe.status = cudnn.BackendExecute(convolutions.handle, plan, pack);
    release(&recipe, 0);
    return recipe.status;
}

/* Starts it, if there is a plan for it. */
static cudnnStatus_t start(const struct cudnn_convolution *of, const struct shape *shape, void *workspace,
                           struct hapt_queue *queue, bool *done)
{
    if (queue->capturing && convolutions.here && !is_known(choice_place(shape), shape))
        return CUDNN_STATUS_NOT_INITIALIZED; /* not the time to make plans */
    struct choice *choice = take_handle(queue) ? choice_find(shape) : NULL;
    *done = choice && choice->plan;
    if (!*done) return CUDNN_STATUS_SUCCESS;
    const cudnnStatus_t status = execute(choice->plan, of, workspace);
    if (choice->ran || CUDNN_STATUS_CATEGORY(status) != CUDNN_STATUS_NOT_SUPPORTED) {
        choice->ran = true;
        return status;
    }
    cudnn.BackendDestroyDescriptor(choice->plan); /* it refuses what it proposed */
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
    return cuda_host->fail(HAPT_ERR_INTERNAL, "HAPT_CUDNN=0 in the environment does without cuDNN",
                           "cuDNN: a convolution: %s%s%s", cudnn.GetErrorString(status), *detail ? ": " : "", detail);
}
