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

/* The operator families. isa_FAMILY.c defines a table at each level. */
#define CPU_FAMILIES(of, isa)                                                                                       \
    of(isa, attention) of(isa, batch_norm) of(isa, convolution) of(isa, dropout) of(isa, embedding) of(isa, expert) \
        of(isa, group_norm) of(isa, linear) of(isa, llama) of(isa, loss) of(isa, maps) of(isa, moe) of(isa, norm)   \
            of(isa, optimizer) of(isa, packed) of(isa, patches) of(isa, pointwise) of(isa, pool) of(isa, shape)
#define CPU_DECLARE(isa, family) extern const struct cpu_kernel hapt_cpu_##family##_##isa[];
CPU_FAMILIES(CPU_DECLARE, v2)
CPU_FAMILIES(CPU_DECLARE, v3)
CPU_FAMILIES(CPU_DECLARE, v4)
CPU_FAMILIES(CPU_DECLARE, base)

/* NULL: there is none. The level is chosen at the first call; HAPT_ISA=v2, v3 or v4 in the environment lowers it. */
const struct hapt_kernel *hapt_cpu_kernel_find(const char *op, enum hapt_dtype dtype);

#endif
