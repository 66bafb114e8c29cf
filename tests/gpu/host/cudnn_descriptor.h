/* Host CUDA: descriptors of cuDNN, what its two files share. */
#ifndef HOST_CUDA_CUDNN_DESCRIPTOR_H
#define HOST_CUDA_CUDNN_DESCRIPTOR_H

#include <map>
#include <vector>

#include "cudnn.h"

struct host_cudnn_attribute {
    int64_t count;
    std::vector<char> bytes;
};

/* Lives while somebody holds it: who made it, or descriptors that it was set in. */
struct host_cudnn_descriptor {
    cudnnBackendDescriptorType_t type;
    int holders;
    bool finalized;
    std::map<int, host_cudnn_attribute> attribute;
    struct host_cudnn_descriptor *graph; /* of an engine and its configuration, held */
    int engine;
};

struct cudnnContext {
    int device;
    cudaStream_t stream;
};

/* NULL where it is not set. */
template <typename T> static const T *host_cudnn_values(const struct host_cudnn_descriptor *descriptor, int name)
{
    const auto found = descriptor->attribute.find(name);
    return found == descriptor->attribute.end() ? NULL : (const T *)found->second.bytes.data();
}

/* The descriptor that attribute `name` names. */
static inline const struct host_cudnn_descriptor *host_cudnn_part(const struct host_cudnn_descriptor *descriptor,
                                                                  int name)
{
    struct host_cudnn_descriptor *const *part = host_cudnn_values<struct host_cudnn_descriptor *>(descriptor, name);
    return part ? *part : NULL;
}

/* Whether HAPT_HOST_CUDNN is `fault`. */
bool host_cudnn_fault(const char *fault);

/* ---- cudnn_convolution.cpp ---- */

/* Of a finalized tensor, convolution or operation: what is wrong with it. */
cudnnStatus_t host_cudnn_check_operation(const struct host_cudnn_descriptor *operation);

/* The engines that `mode` proposes for the graph, best first; at most 8. */
int host_cudnn_propose(const struct host_cudnn_descriptor *graph, int mode, int engine[8]);
std::vector<cudnnBackendNumericalNote_t> host_cudnn_notes(int engine);
cudnnStatus_t host_cudnn_engine_supports(const struct host_cudnn_descriptor *graph, int engine);
int64_t host_cudnn_workspace(const struct host_cudnn_descriptor *graph, int engine);
cudnnStatus_t host_cudnn_execute(const struct host_cudnn_descriptor *graph, int engine,
                                 const struct host_cudnn_descriptor *pack, cudaStream_t stream);

#endif
