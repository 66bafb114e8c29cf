/* The kernel tables of the cuda back end, one per operator family. */
#ifndef HAPT_CUDA_KERNELS_H
#define HAPT_CUDA_KERNELS_H

#include "kernel.cuh"

#define CUDA_FAMILIES(family)                                                                                        \
    family(attention) family(attention_backward) family(batch_norm) family(convolution) family(embedding)            \
        family(expert) family(grouped_convolution) family(group_norm) family(linear) family(llama) family(loss)      \
            family(maps) family(moe) family(norm) family(optimizer) family(packed) family(patches) family(pointwise) \
                family(pool) family(shape)

#define CUDA_FAMILY_DECLARE(name) extern const struct cuda_kernel hapt_cuda_##name[];
CUDA_FAMILIES(CUDA_FAMILY_DECLARE)

/* NULL: there is none. */
const struct hapt_kernel *cuda_kernel_find(const char *op, enum hapt_dtype dtype);

#endif
