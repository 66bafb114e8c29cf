/* Chooses the instruction-set level of the running CPU and finds kernels by name. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define PLUS_ONE(isa, family) +1
enum { FAMILIES = 0 CPU_FAMILIES(PLUS_ONE, any) };

struct level {
    const char *name;
    const struct cpu_kernel *family[FAMILIES];
};

#define ENTRY(isa, family) hapt_cpu_##family##_##isa,
#define LEVEL(isa)                                           \
    {                                                        \
        .name = #isa, .family = { CPU_FAMILIES(ENTRY, isa) } \
    }

#if defined __x86_64__
static const struct level levels[] = {LEVEL(v2), LEVEL(v3), LEVEL(v4)};

static int best_level(void)
{
    const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
                    __builtin_cpu_supports("bmi2");
    const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                    __builtin_cpu_supports("avx512vl");
    return v4 ? 2 : v3 ? 1 : 0;
}
#else
static const struct level levels[] = {LEVEL(base)};

static int best_level(void)
{
    return 0;
}
#endif

static const struct level *chosen;

static void choose_level(void)
{
    int level = best_level();
    const char *asked = getenv("HAPT_ISA");
    for (int i = 0; asked && i < level; i++)
        if (!strcmp(asked, levels[i].name)) level = i;
    chosen = &levels[level];
}

const struct hapt_kernel *hapt_cpu_kernel_find(const char *op, enum hapt_dtype dtype)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose_level);
    for (int f = 0; f < FAMILIES; f++)
        for (const struct cpu_kernel *k = chosen->family[f]; k->kernel.op; k++)
            if (k->dtype == dtype && !strcmp(k->kernel.op, op)) return &k->kernel;
    return NULL;
}
