/*
 * Private to the cpu back end: the kernel tables, one per operator family and instruction-set level.
 *
 * Files named isa_*.c are compiled once per level (x86-64-v2, v3, v4; `base` elsewhere) and export their table under a
 * name with the level. kernels.c picks the level of the running CPU.
 *
 * Determinism: for the same inputs, thread count and level, every kernel gives the same bits. Reductions over rows use
 * chunks whose bounds depend on the shape alone. So only oneDNN's matrix products may change bits with the thread
 * count.
 */
#ifndef HAPT_CPU_KERNELS_H
#define HAPT_CPU_KERNELS_H

#include "hapt/device.h"

struct cpu_kernel {
    enum hapt_dtype dtype;
    struct hapt_kernel kernel; /* op NULL: end of the table */
};

/* Defined by isa_FAMILY.c at each level. */
#define CPU_KERNEL_DECLARE(family)                                                                               \
    extern const struct cpu_kernel hapt_cpu_##family##_v2[], hapt_cpu_##family##_v3[], hapt_cpu_##family##_v4[], \
        hapt_cpu_##family##_base[]
CPU_KERNEL_DECLARE(attention);
CPU_KERNEL_DECLARE(batch_norm);
CPU_KERNEL_DECLARE(convolution);
CPU_KERNEL_DECLARE(embedding);
CPU_KERNEL_DECLARE(expert);
CPU_KERNEL_DECLARE(linear);
CPU_KERNEL_DECLARE(llama);
CPU_KERNEL_DECLARE(loss);
CPU_KERNEL_DECLARE(moe);
CPU_KERNEL_DECLARE(norm);
CPU_KERNEL_DECLARE(optimizer);
CPU_KERNEL_DECLARE(patches);
CPU_KERNEL_DECLARE(pointwise);
CPU_KERNEL_DECLARE(pool);

/* NULL: there is none. The level is chosen at the first call. */
const struct hapt_kernel *hapt_cpu_kernel_find(const char *op, enum hapt_dtype dtype);
/* "v2", "v3", "v4" or "base". HAPT_ISA in the environment lowers it. */
const char *hapt_cpu_isa(void);

#endif
