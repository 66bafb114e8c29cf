/*
 * Host CUDA: cuDNN's descriptors. They check what the documentation requires: known attributes with the right type and
 * count, no use before finalization, no change after it, no missing attribute. Use of a destroyed descriptor ends the
 * process.
 *
 * HAPT_HOST_CUDNN names a fault: "missing" (no handle can be created), "nothing" (no engine is proposed), "refuses" and
 * "breaks" (plans fail to run: unsupported, failed).
 */
#include <set>
#include <stdlib.h>
#include <string.h>

#include "cudnn_descriptor.h"
#include "host_cuda.h"

enum { ANY = 8, MOST_DESCRIPTORS = 50000 };

/* The attributes that may be set. Counts: `least` to `most`. */
static const struct rule {
    int descriptor, name, type, least, most;
} rules[] = {
#define RULE(descriptor, name, type, least, most)                                                                      \
    {                                                                                                                  \
        CUDNN_BACKEND_##descriptor##_DESCRIPTOR, CUDNN_ATTR_##name, CUDNN_TYPE_##type, least, most                     \
    }
    RULE(TENSOR, TENSOR_UNIQUE_ID, INT64, 1, 1),
    RULE(TENSOR, TENSOR_DATA_TYPE, DATA_TYPE, 1, 1),
    RULE(TENSOR, TENSOR_DIMENSIONS, INT64, 3, ANY),
    RULE(TENSOR, TENSOR_STRIDES, INT64, 3, ANY),
    RULE(TENSOR, TENSOR_BYTE_ALIGNMENT, INT64, 1, 1),
    RULE(CONVOLUTION, CONVOLUTION_COMP_TYPE, DATA_TYPE, 1, 1),
    RULE(CONVOLUTION, CONVOLUTION_CONV_MODE, CONVOLUTION_MODE, 1, 1),
    RULE(CONVOLUTION, CONVOLUTION_SPATIAL_DIMS, INT64, 1, 1),
    RULE(CONVOLUTION, CONVOLUTION_DILATIONS, INT64, 1, 3),
    RULE(CONVOLUTION, CONVOLUTION_FILTER_STRIDES, INT64, 1, 3),
    RULE(CONVOLUTION, CONVOLUTION_PRE_PADDINGS, INT64, 1, 3),
    RULE(CONVOLUTION, CONVOLUTION_POST_PADDINGS, INT64, 1, 3),
#define OPERATION(descriptor, name, x, w, y)                                                                           \
    RULE(descriptor, OPERATION_CONVOLUTION_##name##_CONV_DESC, BACKEND_DESCRIPTOR, 1, 1),                              \
        RULE(descriptor, OPERATION_CONVOLUTION_##name##_##x, BACKEND_DESCRIPTOR, 1, 1),                                \
        RULE(descriptor, OPERATION_CONVOLUTION_##name##_##w, BACKEND_DESCRIPTOR, 1, 1),                                \
        RULE(descriptor, OPERATION_CONVOLUTION_##name##_##y, BACKEND_DESCRIPTOR, 1, 1),                                \
        RULE(descriptor, OPERATION_CONVOLUTION_##name##_ALPHA, FLOAT, 1, 1),                                           \
        RULE(descriptor, OPERATION_CONVOLUTION_##name##_BETA, FLOAT, 1, 1)
    OPERATION(OPERATION_CONVOLUTION_FORWARD, FORWARD, X, W, Y),
    OPERATION(OPERATION_CONVOLUTION_BACKWARD_DATA, BWD_DATA, DX, W, DY),
    OPERATION(OPERATION_CONVOLUTION_BACKWARD_FILTER, BWD_FILTER, X, DW, DY),
    RULE(OPERATIONGRAPH, OPERATIONGRAPH_HANDLE, HANDLE, 1, 1),
    RULE(OPERATIONGRAPH, OPERATIONGRAPH_OPS, BACKEND_DESCRIPTOR, 1, 1),
    RULE(ENGINEHEUR, ENGINEHEUR_OPERATION_GRAPH, BACKEND_DESCRIPTOR, 1, 1),
    RULE(ENGINEHEUR, ENGINEHEUR_MODE, HEUR_MODE, 1, 1),
    RULE(EXECUTION_PLAN, EXECUTION_PLAN_HANDLE, HANDLE, 1, 1),
    RULE(EXECUTION_PLAN, EXECUTION_PLAN_ENGINE_CONFIG, BACKEND_DESCRIPTOR, 1, 1),
    RULE(VARIANT_PACK, VARIANT_PACK_UNIQUE_IDS, INT64, 1, ANY),
    RULE(VARIANT_PACK, VARIANT_PACK_DATA_POINTERS, VOID_PTR, 1, ANY),
    RULE(VARIANT_PACK, VARIANT_PACK_WORKSPACE, VOID_PTR, 1, 1),
};

/* The descriptor types that an attribute accepts. */
static const struct {
    int name, type;
} parts[] = {
#define OPERANDS(name, x, w, y)                                                                                        \
    {CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_CONV_DESC, CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR},                       \
        {CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##x, CUDNN_BACKEND_TENSOR_DESCRIPTOR},                              \
        {CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##w, CUDNN_BACKEND_TENSOR_DESCRIPTOR},                              \
    {                                                                                                                  \
        CUDNN_ATTR_OPERATION_CONVOLUTION_##name##_##y, CUDNN_BACKEND_TENSOR_DESCRIPTOR                                 \
    }
    OPERANDS(FORWARD, X, W, Y),
    OPERANDS(BWD_DATA, DX, W, DY),
    OPERANDS(BWD_FILTER, X, DW, DY),
    {CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR},
    {CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR},
    {CUDNN_ATTR_OPERATIONGRAPH_OPS, CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR},
    {CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH, CUDNN_BACKEND_OPERATIONGRAPH_DESCRIPTOR},
    {CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG, CUDNN_BACKEND_ENGINECFG_DESCRIPTOR},
};

static std::set<struct host_cudnn_descriptor *> living;

bool host_cudnn_fault(const char *fault)
{
    const char *wanted = getenv("HAPT_HOST_CUDNN");
    return wanted && !strcmp(wanted, fault);
}

size_t cudnnGetVersion(void)
{
    return CUDNN_VERSION;
}

const char *cudnnGetErrorString(cudnnStatus_t status)
{
    switch (CUDNN_STATUS_CATEGORY(status)) {
    case CUDNN_STATUS_SUCCESS:
        return "CUDNN_STATUS_SUCCESS";
    case CUDNN_STATUS_BAD_PARAM:
        return "CUDNN_STATUS_BAD_PARAM";
    case CUDNN_STATUS_NOT_SUPPORTED:
        return "CUDNN_STATUS_NOT_SUPPORTED";
    case CUDNN_STATUS_INTERNAL_ERROR:
        return "CUDNN_STATUS_INTERNAL_ERROR";
    case CUDNN_STATUS_EXECUTION_FAILED:
        return "CUDNN_STATUS_EXECUTION_FAILED";
    }
    return "CUDNN_STATUS_NOT_INITIALIZED";
}

void cudnnGetLastErrorString(char *message, size_t bytes)
{
    if (bytes) *message = '\0';
}

cudnnStatus_t cudnnCreate(cudnnHandle_t *handle)
{
    int device;
    if (!handle) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (host_cudnn_fault("missing") || cudaGetDevice(&device) || host_cuda_not_captured())
        return CUDNN_STATUS_NOT_INITIALIZED;
    *handle = new cudnnContext{device, NULL};
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnDestroy(cudnnHandle_t handle)
{
    delete handle;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnSetStream(cudnnHandle_t handle, cudaStream_t stream)
{
    if (!handle) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (!host_cuda_stream_takes(stream)) return CUDNN_STATUS_BAD_PARAM;
    handle->stream = stream;
    return CUDNN_STATUS_SUCCESS;
}

/* ---- descriptors ---- */

static struct host_cudnn_descriptor *alive(cudnnBackendDescriptor_t descriptor)
{
    struct host_cudnn_descriptor *own = (struct host_cudnn_descriptor *)descriptor;
    if (own && !living.count(own)) host_cuda_die("cuDNN: a descriptor that is none, or none any more");
    return own;
}

static void hold(struct host_cudnn_descriptor *descriptor)
{
    if (descriptor) descriptor->holders++;
}

static void let_go(struct host_cudnn_descriptor *descriptor)
{
    if (!descriptor || --descriptor->holders > 0) return;
    for (const struct rule &rule : rules)
        if (rule.descriptor == descriptor->type && rule.type == CUDNN_TYPE_BACKEND_DESCRIPTOR)
            let_go((struct host_cudnn_descriptor *)host_cudnn_part(descriptor, rule.name));
    let_go(descriptor->graph);
    living.erase(descriptor);
    delete descriptor;
}

static const struct rule *find_rule(int descriptor, int name)
{
    for (const struct rule &rule : rules)
        if (rule.descriptor == descriptor && rule.name == name) return &rule;
    return NULL;
}

static size_t element_bytes(int type)
{
    switch (type) {
    case CUDNN_TYPE_BOOLEAN:
        return 1;
    case CUDNN_TYPE_HANDLE:
    case CUDNN_TYPE_INT64:
    case CUDNN_TYPE_DOUBLE:
    case CUDNN_TYPE_VOID_PTR:
    case CUDNN_TYPE_BACKEND_DESCRIPTOR:
        return 8;
    }
    return 4;
}

cudnnStatus_t cudnnBackendCreateDescriptor(cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *descriptor)
{
    bool known = type == CUDNN_BACKEND_ENGINE_DESCRIPTOR || type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR;
    for (const struct rule &rule : rules) known = known || rule.descriptor == type;
    if (!descriptor) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (!known) return CUDNN_STATUS_NOT_SUPPORTED;
    host_cuda_scope scope;
    if (living.size() > MOST_DESCRIPTORS)
        host_cuda_die("cuDNN: %zu descriptors: some are not destroyed", living.size());
    struct host_cudnn_descriptor *made = new host_cudnn_descriptor{type, 1, false, {}, NULL, -1};
    living.insert(made);
    *descriptor = made;
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor)
{
    host_cuda_scope scope;
    let_go(alive(descriptor));
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_part(int name, const struct host_cudnn_descriptor *part)
{
    if (!part) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    for (const auto &row : parts)
        if (row.name == name && row.type == part->type)
            return part->finalized ? CUDNN_STATUS_SUCCESS : CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
    return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
}

cudnnStatus_t cudnnBackendSetAttribute(cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t count, const void *elements)
{
    host_cuda_scope scope;
    struct host_cudnn_descriptor *own = alive(descriptor), *part = NULL;
    if (!own || !elements) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    const struct rule *rule = find_rule(own->type, name);
    if (own->finalized || !rule) return CUDNN_STATUS_BAD_PARAM;
    if (rule->type != type) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
    if (count < rule->least || count > rule->most) return CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND;
    if (type == CUDNN_TYPE_BACKEND_DESCRIPTOR) {
        part = alive(*(const cudnnBackendDescriptor_t *)elements);
        const cudnnStatus_t status = check_part(name, part);
        if (status != CUDNN_STATUS_SUCCESS) return status;
        hold(part);
        let_go((struct host_cudnn_descriptor *)host_cudnn_part(own, name));
    }
    const char *bytes = (const char *)elements;
    own->attribute[name] = {count, {bytes, bytes + (size_t)count * element_bytes(type)}};
    return CUDNN_STATUS_SUCCESS;
}

/* All tables of a descriptor have the same length, and valid numbers. */
static cudnnStatus_t check_tables(const struct host_cudnn_descriptor *own, int counter, const int *names, int tables)
{
    const auto count = [own](int name) { return own->attribute.at(name).count; };
    const int64_t expected =
        counter == CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS ? *host_cudnn_values<int64_t>(own, counter) : count(counter);
    for (int t = 0; t < tables; t++) {
        if (count(names[t]) != expected) return CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT;
        const bool padding =
            names[t] == CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS || names[t] == CUDNN_ATTR_CONVOLUTION_POST_PADDINGS;
        const bool pointers = names[t] == CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS;
        for (int64_t i = 0; i < expected; i++)
            if (!pointers && host_cudnn_values<int64_t>(own, names[t])[i] < (padding ? 0 : 1))
                return CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND;
    }
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t check_whole(const struct host_cudnn_descriptor *own)
{
    static const int of_tensor[] = {CUDNN_ATTR_TENSOR_DIMENSIONS, CUDNN_ATTR_TENSOR_STRIDES};
    static const int of_convolution[] = {CUDNN_ATTR_CONVOLUTION_DILATIONS, CUDNN_ATTR_CONVOLUTION_FILTER_STRIDES,
                                         CUDNN_ATTR_CONVOLUTION_PRE_PADDINGS, CUDNN_ATTR_CONVOLUTION_POST_PADDINGS};
    static const int of_pack[] = {CUDNN_ATTR_VARIANT_PACK_DATA_POINTERS};
    const struct host_cudnn_descriptor *config;
    switch (own->type) {
    case CUDNN_BACKEND_TENSOR_DESCRIPTOR:
        return check_tables(own, CUDNN_ATTR_TENSOR_DIMENSIONS, of_tensor, 2);
    case CUDNN_BACKEND_CONVOLUTION_DESCRIPTOR:
        return check_tables(own, CUDNN_ATTR_CONVOLUTION_SPATIAL_DIMS, of_convolution, 4);
    case CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR:
        return check_tables(own, CUDNN_ATTR_VARIANT_PACK_UNIQUE_IDS, of_pack, 1);
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_FORWARD_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_DATA_DESCRIPTOR:
    case CUDNN_BACKEND_OPERATION_CONVOLUTION_BACKWARD_FILTER_DESCRIPTOR:
        return host_cudnn_check_operation(own);
    case CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR:
        return host_cudnn_fault("nothing") ||
                       *host_cudnn_values<int>(own, CUDNN_ATTR_ENGINEHEUR_MODE) == CUDNN_HEUR_MODE_B
                   ? CUDNN_STATUS_NOT_SUPPORTED
                   : CUDNN_STATUS_SUCCESS;
    case CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR:
        config = host_cudnn_part(own, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
        if (host_cuda_not_captured()) return CUDNN_STATUS_INTERNAL_ERROR; /* loads kernels */
        return host_cudnn_engine_supports(config->graph, config->engine);
    default:
        return CUDNN_STATUS_SUCCESS;
    }
}

cudnnStatus_t cudnnBackendFinalize(cudnnBackendDescriptor_t descriptor)
{
    host_cuda_scope scope;
    struct host_cudnn_descriptor *own = alive(descriptor);
    if (!own) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    bool settable = false; /* engines and configurations come from rankings */
    for (const struct rule &rule : rules) {
        if (rule.descriptor != own->type) continue;
        if (!own->attribute.count(rule.name)) return CUDNN_STATUS_BAD_PARAM;
        settable = true;
    }
    if (own->finalized || !settable) return CUDNN_STATUS_BAD_PARAM;
    const cudnnStatus_t status = check_whole(own);
    own->finalized = status == CUDNN_STATUS_SUCCESS;
    return status;
}

/* ---- values that the library returns ---- */

/* Fills an empty descriptor as an engine or a configuration. */
static cudnnStatus_t fill(struct host_cudnn_descriptor *own, int type, struct host_cudnn_descriptor *graph, int engine)
{
    if (!own) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (own->type != type) return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
    hold(graph);
    let_go(own->graph);
    own->graph = graph;
    own->engine = engine;
    own->finalized = true;
    return CUDNN_STATUS_SUCCESS;
}

static cudnnStatus_t give_configs(const struct host_cudnn_descriptor *ranking, int64_t asked, int64_t *count,
                                  void *elements)
{
    int engine[8];
    struct host_cudnn_descriptor *graph =
        (struct host_cudnn_descriptor *)host_cudnn_part(ranking, CUDNN_ATTR_ENGINEHEUR_OPERATION_GRAPH);
    *count = host_cudnn_propose(graph, *host_cudnn_values<int>(ranking, CUDNN_ATTR_ENGINEHEUR_MODE), engine);
    for (int64_t c = 0; c < *count && c < asked; c++) {
        const cudnnStatus_t status = fill(alive(((cudnnBackendDescriptor_t *)elements)[c]),
                                          CUDNN_BACKEND_ENGINECFG_DESCRIPTOR, graph, engine[c]);
        if (status != CUDNN_STATUS_SUCCESS) return status;
    }
    return CUDNN_STATUS_SUCCESS;
}

template <typename T>
static cudnnStatus_t give(const std::vector<T> &values, int64_t asked, int64_t *count, void *elements)
{
    *count = (int64_t)values.size();
    for (int64_t i = 0; i < *count && i < asked; i++) ((T *)elements)[i] = values[(size_t)i];
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendGetAttribute(cudnnBackendDescriptor_t const descriptor, cudnnBackendAttributeName_t name,
                                       cudnnBackendAttributeType_t type, int64_t asked, int64_t *count, void *elements)
{
    host_cuda_scope scope;
    struct host_cudnn_descriptor *own = alive(descriptor);
    if (!own || !count || (asked > 0 && !elements)) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (!own->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
    if (asked < 0) return CUDNN_STATUS_BAD_PARAM_OUT_OF_BOUND;
    const struct host_cudnn_descriptor *config;
    if (own->type == CUDNN_BACKEND_ENGINEHEUR_DESCRIPTOR && name == CUDNN_ATTR_ENGINEHEUR_RESULTS)
        return type == CUDNN_TYPE_BACKEND_DESCRIPTOR ? give_configs(own, asked, count, elements)
                                                     : CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
    if (own->type == CUDNN_BACKEND_ENGINECFG_DESCRIPTOR && name == CUDNN_ATTR_ENGINECFG_ENGINE) {
        if (type != CUDNN_TYPE_BACKEND_DESCRIPTOR) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
        if (asked < 1) return CUDNN_STATUS_BAD_PARAM_SIZE_INSUFFICIENT;
        *count = 1;
        return fill(alive(*(cudnnBackendDescriptor_t *)elements), CUDNN_BACKEND_ENGINE_DESCRIPTOR, own->graph,
                    own->engine);
    }
    if (own->type == CUDNN_BACKEND_ENGINE_DESCRIPTOR && name == CUDNN_ATTR_ENGINE_NUMERICAL_NOTE)
        return type == CUDNN_TYPE_NUMERICAL_NOTE ? give(host_cudnn_notes(own->engine), asked, count, elements)
                                                 : CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
    if (own->type == CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR && name == CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE) {
        if (type != CUDNN_TYPE_INT64) return CUDNN_STATUS_BAD_PARAM_ATTRIBUTE_TYPE;
        config = host_cudnn_part(own, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
        return give<int64_t>({host_cudnn_workspace(config->graph, config->engine)}, asked, count, elements);
    }
    return CUDNN_STATUS_BAD_PARAM;
}

cudnnStatus_t cudnnBackendExecute(cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t pack)
{
    host_cuda_scope scope;
    const struct host_cudnn_descriptor *own = alive(plan), *operands = alive(pack);
    if (!handle || !own || !operands) return CUDNN_STATUS_BAD_PARAM_NULL_POINTER;
    if (own->type != CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR || operands->type != CUDNN_BACKEND_VARIANT_PACK_DESCRIPTOR)
        return CUDNN_STATUS_BAD_PARAM_DESCRIPTOR_TYPE;
    if (!own->finalized || !operands->finalized) return CUDNN_STATUS_BAD_PARAM_NOT_FINALIZED;
    if (host_cudnn_fault("refuses")) return CUDNN_STATUS_NOT_SUPPORTED;
    if (host_cudnn_fault("breaks") || !host_cuda_stream_takes(handle->stream)) return CUDNN_STATUS_EXECUTION_FAILED;
    const struct host_cudnn_descriptor *config = host_cudnn_part(own, CUDNN_ATTR_EXECUTION_PLAN_ENGINE_CONFIG);
    return host_cudnn_execute(config->graph, config->engine, operands, handle->stream);
}
