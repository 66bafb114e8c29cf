/*
 * cuDNN 9's graph API, for cudnn_convolution.cu and cudnn_attention.cu: descriptors, and a table of plans. A plan is
 * made at the first use of a shape. After that a run neither allocates device memory nor waits. The Makefile leaves all
 * cudnn*.cu out if the toolkit has no cuDNN header. The library is looked for when its version or a plan is first
 * wanted; HAPT_CUDNN=0 in the environment disables it.
 */
#ifndef HAPT_CUDA_CUDNN_PLANS_H
#define HAPT_CUDA_CUDNN_PLANS_H

#include <cudnn.h>

#include "kernel.cuh"

enum { CUDNN_KEY_BYTES = 192, CUDNN_DESCRIPTORS = 192, CUDNN_ALIGNMENT = 16 };

/* Descriptors that are released together. Only the first failure is kept and later calls do nothing, so callers check
 * the status once. */
struct descriptor_list {
    cudnnStatus_t status;
    int count;
    cudnnBackendDescriptor_t made[CUDNN_DESCRIPTORS];
};

cudnnBackendDescriptor_t cudnn_make(struct descriptor_list *list, cudnnBackendDescriptorType_t type);
void cudnn_set(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
               cudnnBackendAttributeType_t type, int64_t count, const void *value);
void cudnn_finalize(struct descriptor_list *list, cudnnBackendDescriptor_t descriptor);

static inline cudnnDataType_t cudnn_type(int dtype)
{
    return dtype == HAPT_BF16 ? CUDNN_DATA_BFLOAT16 : dtype == HAPT_F16 ? CUDNN_DATA_HALF : CUDNN_DATA_FLOAT;
}

/* `stride` in elements, dense and row-major if NULL; `alignment` of its address in bytes. */
cudnnBackendDescriptor_t cudnn_tensor(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                      const int64_t stride[4], cudnnDataType_t type, int64_t alignment);
/* A tensor that exists only within the graph. */
cudnnBackendDescriptor_t cudnn_virtual(struct descriptor_list *list, int64_t uid, const int64_t shape[4],
                                       const int64_t stride[4], cudnnDataType_t type);
/* A number that is given in host memory. */
cudnnBackendDescriptor_t cudnn_number(struct descriptor_list *list, int64_t uid);
cudnnBackendDescriptor_t cudnn_graph(struct descriptor_list *list, const cudnnBackendDescriptor_t *operation,
                                     int count);

/* A problem that needs a plan. */
struct cudnn_problem {
    const char *what; /* for errors: "a convolution" */
    const void *key;  /* everything that the choice depends on; compared as bytes, so without undefined padding */
    size_t key_bytes; /* at most CUDNN_KEY_BYTES; problems of different kinds have different keys */
    cudnnBackendDescriptor_t (*graph)(struct descriptor_list *list, const void *key);
    bool (*accepts)(const cudnnBackendNumericalNote_t *note, int64_t notes, const void *key);
    size_t workspace_bytes; /* upper limit */
};

struct cudnn_operand {
    int64_t uid;
    void *data;
};

/* Starts the problem on `queue`, by the first plan of cuDNN's ranking that fits the workspace and that the problem
 * accepts. *done false: cuDNN is missing or has no such plan; nothing was started, and
 * never will be for this key. */
enum hapt_status cudnn_run(const struct cudnn_problem *problem, const struct cudnn_operand *operand, int operands,
                           void *workspace, struct hapt_queue *queue, bool *done);
/* 91400: cuDNN 9.14.0. 0: missing. Not while the caller makes a graph. */
size_t cudnn_version(void);

#endif
