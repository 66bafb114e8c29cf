/* cuDNN: the library, descriptors, and plans by shape (cudnn_plans.h). */
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_convolution.h"
#include "cudnn_plans.h"

enum { PLANS = 4096, PROBES = 16, CONFIGS = 64, NOTES = 32, ROUNDED = 256, OPERANDS = 16 };

#define CUDNN_CALLS(call)                                                                       \
    call(GetVersion) call(Create) call(SetStream) call(GetErrorString) call(GetLastErrorString) \
        call(BackendCreateDescriptor) call(BackendDestroyDescriptor) call(BackendSetAttribute)  \
            call(BackendGetAttribute) call(BackendFinalize) call(BackendExecute)

struct choice {
    bool known, ran;
    unsigned char key[CUDNN_KEY_BYTES];
    cudnnBackendDescriptor_t plan; /* NULL: none */
};

static struct {
#define CUDNN_MEMBER(name) decltype(&cudnn##name) name;
    CUDNN_CALLS(CUDNN_MEMBER)
} cudnn;

/* The lock is held while a plan is started, since the handle has one stream at a time. */
static struct {
    pthread_mutex_t lock;
    bool looked, here;
    cudnnHandle_t handle;
    cudaStream_t stream;
    struct choice choice[PLANS];
} plans = {PTHREAD_MUTEX_INITIALIZER, false, false, NULL, NULL, {}};

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
    if (plans.looked) return plans.here;
    const char *wanted = getenv("HAPT_CUDNN");
    plans.looked = true;
    return plans.here = !(wanted && strcmp(wanted, "0") == 0) && load();
}

size_t cudnn_version(void)
{
    pthread_mutex_lock(&plans.lock);
    const size_t version = is_available() ? cudnn.GetVersion() : 0;
    pthread_mutex_unlock(&plans.lock);
    return version;
}

const char *cudnn_library(void)
{
    static char text[32];
    const size_t version = cudnn_version();
    snprintf(text, sizeof text, "cuDNN %zu.%zu.%zu", version / 10000, version / 100 % 100, version % 100);
    return version ? text : NULL;
}

/* ---- Descriptors ---- */

cudnnBackendDescriptor_t cudnn_make(struct descriptor_list *list, cudnnBackendDescriptorType_t type)
{
    cudnnBackendDescriptor_t made = NULL;
    if (list->status != CUDNN_STATUS_SUCCESS) return NULL;
    if (list->count == CUDNN_DESCRIPTORS) list->status = CUDNN_STATUS_INTERNAL_ERROR;
    if (list->status == CUDNN_STATUS_SUCCESS) list->status = cudnn.BackendCreateDescriptor(type, &made);
    if (list->status == CUDNN_STATUS_SUCCESS) list->made[list->count++] = made;
    return made;
}

void cudnn_set(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t count, const void *value)
{
    if (list->status == CUDNN_STATUS_SUCCESS)
        list->status = cudnn.BackendSetAttribute(descriptor, name, type, count, value);
}

void cudnn_finalize(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor)
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

/* An unfinished tensor. */
static cudnnBackendDescriptor_t tensor_begin(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                             const int64_t stride[4], cudnnDataType_t type, int64_t alignment)
{
    const int64_t dense[4] = {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
    cudnnBackendDescriptor_t tensor = cudnn_make(list, CUDNN_BACKEND_TENSOR_DESCRIPTOR);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_UNIQUE_ID, CUDNN_TYPE_INT64, 1, &uid);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_DATA_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_TYPE_INT64, 4, shape);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_STRIDES, CUDNN_TYPE_INT64, 4, stride ? stride : dense);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_BYTE_ALIGNMENT, CUDNN_TYPE_INT64, 1, &alignment);
    return tensor;
}

cudnnBackendDescriptor_t cudnn_tensor(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                      const int64_t stride[4], cudnnDataType_t type, int64_t alignment)
{
    cudnnBackendDescriptor_t tensor = tensor_begin(list, uid, shape, stride, type, alignment);
    cudnn_finalize(list, tensor);
    return tensor;
}

cudnnBackendDescriptor_t cudnn_virtual(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                       const int64_t stride[4], cudnnDataType_t type)
{
    const bool yes = true;
    cudnnBackendDescriptor_t tensor = tensor_begin(list, uid, shape, stride, type, CUDNN_ALIGNMENT);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_IS_VIRTUAL, CUDNN_TYPE_BOOLEAN, 1, &yes);
    cudnn_finalize(list, tensor);
    return tensor;
}

cudnnBackendDescriptor_t cudnn_number(struct descriptor_list *list, int64_t uid)
{
    static const int64_t one[4] = {1, 1, 1, 1};
    const bool yes = true;
    cudnnBackendDescriptor_t tensor = tensor_begin(list, uid, one, one, CUDNN_DATA_FLOAT, CUDNN_ALIGNMENT);
    cudnn_set(list, tensor, CUDNN_ATTR_TENSOR_IS_BY_VALUE, CUDNN_TYPE_BOOLEAN, 1, &yes);
    cudnn_finalize(list, tensor);
    return tensor;
}

cudnnBackendDescriptor_t cudnn_graph(struct descriptor_list *list, const cudnnBackendDescriptor_t *operation, int count)
{
    cudnnBackendDescriptor_t graph = cudnn_make(list, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR);
    cudnn_set(list, graph, CUDNN_ATTR_OPERATIONGRAPH_HANDLE, CUDNN_TYPE_HANDLE, 1, &plans.handle);
    cudnn_set(list, graph, CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, operation);
    cudnn_finalize(list, graph);
    return graph;
}

/* ---- The plan of a problem ---- */

/* NULL: the problem does not accept it. */
static cudnnBackendDescriptor_t plan_make(cudnnBackendDescriptor_t config, const struct cudnn_problem *problem)
{
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendNumericalNote_t note[NOTES];
    int64_t bytes = INT64_MAX;
    const size_t limit = problem->workspace_bytes > ROUNDED ? problem->workspace_bytes - ROUNDED : 0;
    cudnnBackendDescriptor_t plan = cudnn_make(&list, CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR),
                             engine = cudnn_make(&list, CUDNN_BACKEND_ENGINE_DESCRIPTOR);
    get(&list, config, CUDNN_ATTR_ENGINECFG_ENGINE, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &engine);
    const int64_t notes = get(&list, engine, CUDNN_ATTR_ENGINE_NUMERICAL_NOTE, CUDNN_TYPE_NUMERICAL_NOTE, NOTES, note);
    if (list.status == CUDNN_STATUS_SUCCESS &&
        !problem->accepts(note, notes < NOTES ? notes : (int64_t)NOTES, problem->key))
        list.status = CUDNN_STATUS_NOT_SUPPORTED;
    cudnn_set(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_HANDLE, CUDNN_TYPE_HANDLE, 1, &plans.handle);
    cudnn_set(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &config);
    cudnn_finalize(&list, plan);
    get(&list, plan, CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE, CUDNN_TYPE_INT64, 1, &bytes);
    const bool fits = list.status == CUDNN_STATUS_SUCCESS && bytes >= 0 && (size_t)bytes <= limit;
    release(&list, fits ? 1 : 0);
    return fits ? plan : NULL;
}

/* The first acceptable plan of a ranking. */
static cudnnBackendDescriptor_t plan_find(struct descriptor_list *list, cudnnBackendDescriptor_t graph,
                                          cudnnBackendHeurMode_t mode, const struct cudnn_problem *problem)
{
    cudnnBackendDescriptor_t config[CONFIGS], plan = NULL;
    const int kept = list->count;
    cudnnBackendDescriptor_t ranking = cudnn_make(list, CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR);
    cudnn_set(list, ranking, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &graph);
    cudnn_set(list, ranking, CUDNN_ATTR_ENGINEHEUR_MODE, CUDNN_TYPE_HEUR_MODE, 1, &mode);
    cudnn_finalize(list, ranking);
    int64_t count = get(list, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, 0, NULL);
    if (count > CONFIGS) count = CONFIGS;
    for (int64_t c = 0; c < count; c++) config[c] = cudnn_make(list, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR);
    const int64_t given =
        get(list, ranking, CUDNN_ATTR_ENGINEHEUR_RESULTS, CUDNN_TYPE_BACKEND_DESCRIPTOR, count, config);
    for (int64_t c = 0; c < given && c < count && !plan; c++) plan = plan_make(config[c], problem);
    release(list, kept);
    return plan;
}

/* NULL: none. */
static cudnnBackendDescriptor_t plan_of(const struct cudnn_problem *problem)
{
    static const cudnnBackendHeurMode_t modes[] = {CUDNN_HEUR_MODE_A, CUDNN_HEUR_MODE_B, CUDNN_HEUR_MODE_FALLBACK};
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    cudnnBackendDescriptor_t plan = NULL;
    const cudnnBackendDescriptor_t graph = problem->graph(&list, problem->key);
    const bool sound = list.status == CUDNN_STATUS_SUCCESS;
    for (int m = 0; sound && m < 3 && !plan; m++) {
        list.status = CUDNN_STATUS_SUCCESS; /* one ranking may be unsupported and the next supported */
        plan = plan_find(&list, graph, modes[m], problem);
    }
    release(&list, 0);
    return plan;
}

/* ---- The table of plans ---- */

static bool is_known(const struct choice *choice, const unsigned char *key)
{
    return choice->known && !memcmp(choice->key, key, CUDNN_KEY_BYTES);
}

/* The entry of the key in the table, or one to store it in; NULL: the table is full. No entry is ever replaced, because
 * a captured graph may hold kernels of its plan. */
static struct choice *choice_slot(const unsigned char *key)
{
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < CUDNN_KEY_BYTES; i++) hash = (hash ^ key[i]) * 0x100000001b3u;
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct choice *choice = &plans.choice[(hash + probe) % PLANS];
        if (!choice->known || is_known(choice, key)) return choice;
    }
    return NULL;
}

static struct choice *choice_find(const unsigned char *key, const struct cudnn_problem *problem)
{
    struct choice *choice = choice_slot(key);
    if (!choice || is_known(choice, key)) return choice;
    memcpy(choice->key, key, CUDNN_KEY_BYTES);
    choice->plan = plan_of(problem);
    choice->known = true;
    return choice;
}

/* Makes the handle, for the queue. Without a handle, cuDNN counts as missing. */
static bool take_handle(struct hapt_queue *queue)
{
    if (!is_available()) return false;
    if (!plans.handle && cudnn.Create(&plans.handle) != CUDNN_STATUS_SUCCESS) return plans.here = false;
    if (plans.stream == queue->stream) return true;
    if (cudnn.SetStream(plans.handle, queue->stream) != CUDNN_STATUS_SUCCESS) return plans.here = false;
    plans.stream = queue->stream;
    return true;
}

static cudnnStatus_t execute(cudnnBackendDescriptor_t plan, const struct cudnn_operand *operand, int operands,
                             void *workspace)
{
    int64_t uid[OPERANDS];
    void *data[OPERANDS];
    struct descriptor_list list = {CUDNN_STATUS_SUCCESS, 0, {}};
    for (int o = 0; o < operands; o++) {
        uid[o] = operand[o].uid;
        data[o] = operand[o].data;
    }
    cudnnBackendDescriptor_t pack = cudnn_make(&list, CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR);
    cudnn_set(&list, pack, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, CUDNN_TYPE_INT64, operands, uid);
    cudnn_set(&list, pack, CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS, CUDNN_TYPE_VOID_PTR, operands, data);
    cudnn_set(&list, pack, CUDNN_ATTR_VARIANT_PACK_WORKSPACE, CUDNN_TYPE_VOID_PTR, 1, &workspace);
    cudnn_finalize(&list, pack);
    if (list.status == CUDNN_STATUS_SUCCESS) list.status = cudnn.BackendExecute(plans.handle, plan, pack);
    release(&list, 0);
    return list.status;
}

static void key_of(const struct cudnn_problem *problem, unsigned char key[CUDNN_KEY_BYTES])
{
    memset(key, 0, CUDNN_KEY_BYTES);
    memcpy(key, problem->key, problem->key_bytes);
}

/* Starts the problem if it has a plan. Call with the lock held. */
static cudnnStatus_t start(const struct cudnn_problem *problem, const struct cudnn_operand *operand, int operands,
                           void *workspace, struct hapt_queue *queue, bool *done)
{
    unsigned char key[CUDNN_KEY_BYTES];
    key_of(problem, key);
    const struct choice *slot = choice_slot(key);
    if (queue->capturing && plans.here && slot && !is_known(slot, key))
        return CUDNN_STATUS_NOT_INITIALIZED; /* no plans are made during a capture */
    struct choice *choice = take_handle(queue) ? choice_find(key, problem) : NULL;
    *done = choice && choice->plan;
    if (!*done) return CUDNN_STATUS_SUCCESS;
    const cudnnStatus_t status = execute(choice->plan, operand, operands, workspace);
    if (choice->ran || CUDNN_STATUS_CATEGORY(status) != CUDNN_STATUS_NOT_SUPPORTED) {
        choice->ran = true;
        return status;
    }
    cudnn.BackendDestroyDescriptor(choice->plan); /* cuDNN refuses its own plan */
    choice->plan = NULL;
    *done = false;
    return CUDNN_STATUS_SUCCESS;
}

enum hapt_status cudnn_run(const struct cudnn_problem *problem, const struct cudnn_operand *operand, int operands,
                           void *workspace, struct hapt_queue *queue, bool *done)
{
    void *const rounded = (void *)(((uintptr_t)workspace + ROUNDED - 1) & ~(uintptr_t)(ROUNDED - 1));
    char detail[160] = "";
    *done = false;
    pthread_mutex_lock(&plans.lock);
    const cudnnStatus_t status = start(problem, operand, operands, rounded, queue, done);
    if (status != CUDNN_STATUS_SUCCESS) cudnn.GetLastErrorString(detail, sizeof detail);
    pthread_mutex_unlock(&plans.lock);
    if (status == CUDNN_STATUS_SUCCESS) return HAPT_OK;
    return cuda_host->fail(HAPT_ERR_INTERNAL, "set HAPT_CUDNN=0 in the environment to do without cuDNN",
                           "cuDNN: %s: %s%s%s", problem->what, cudnn.GetErrorString(status), *detail ? ": " : "",
                           detail);
}
