/* Finds kernels by name. */
#include <string.h>

#include "kernels.h"

const struct hapt_kernel *cuda_kernel_find(const char *op, enum hapt_dtype dtype)
{
#define FAMILY(name) hapt_cuda_##name,
    static const struct cuda_kernel *const family[] = {CUDA_FAMILIES(FAMILY)};
    for (size_t f = 0; f < sizeof family / sizeof *family; f++)
        for (const struct cuda_kernel *k = family[f]; k->kernel.op; k++)
            if (k->dtype == dtype && !strcmp(k->kernel.op, op)) return &k->kernel;
    return NULL;
}
