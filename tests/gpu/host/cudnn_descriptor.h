/* Host CUDA: cuDNN's descriptors, shared by its two files. */
#ifndef HOST_CUDA_CUDNN_DESCRIPTOR_H
#define HOST_CUDA_CUDNN_DESCRIPTOR_H

#include <map>
#include <vector>

#include "cudnn.h"

struct host_cudnn_attribute {
    int64_t count;
    std::vector<char> bytes;
};

/* Reference-counted: its creator and the descriptors that contain it keep it alive. */
struct host_cudnn_descriptor {
    cudnnBackendDescriptorType_t type;
    int holders;
    bool finalized;
    std::map<int, host_cudnn_attribute> attribute;
    struct host_cudnn_descriptor *graph; /* of an engine and its configuration; kept alive */
    int engine;
};

struct cudnnContext {
    int device;
    cudaStream_t stream;
};

/* NULL: not set. */
template <typename T> static const T *host_cudnn_values(const struct host_cudnn_descriptor *descriptor, int name)
{
    const auto found = descriptor->attribute.find(name);
    return found == descriptor->attribute.end() ? NULL : (const T *)found->second.bytes.data();
}

/* The descriptor that is the value of attribute `name`. */
static inline const struct host_cudnn_descriptor *host_cudnn_part(const struct host_cudnn_descriptor *descriptor,
                                                                  int name)
{
    struct host_cudnn_descriptor *const *part = host_cudnn_values<struct host_cudnn_descriptor *>(descriptor, name);
    return part ? *part : NULL;
}

/* Is HAPT_HOST_CUDNN `fault`? */
bool host_cudnn_fault(const char *fault);

/* ---- cudnn_convolution.cpp ---- */

/* Why a tensor, convolution or operation cannot be finalized. */
cudnnStatus_t host_cudnn_check_operation(const struct host_cudnn_descriptor *operation);

/* The engines that `mode` proposes for the graph, best first. At most 8. */
int host_cudnn_propose(const struct host_cudnn_descriptor *graph, int mode, int engine[8]);
std::vector<cudnnBackendNumericalNote_t> host_cudnn_notes(int engine);
cudnnStatus_t host_cudnn_engine_supports(const struct host_cudnn_descriptor *graph, int engine);
int64_t host_cudnn_workspace(const struct host_cudnn_descriptor *graph, int engine);
cudnnStatus_t host_cudnn_execute(const struct host_cudnn_descriptor *graph, int engine,
                                 const struct host_cudnn_descriptor *pack, cudaStream_t stream);

#endif
