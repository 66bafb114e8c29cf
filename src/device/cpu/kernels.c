/* Chooses the instruction-set level of the running CPU and finds kernels by name. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

struct level {
    const char *name;
    const struct cpu_kernel *family[16]; /* NULL at the end */
};

/* Every operator family: isa_FAMILY.c. */
#define LEVEL(isa)                      \
    {                                   \
        .name = #isa, .family = {       \
            hapt_cpu_attention_##isa,   \
            hapt_cpu_batch_norm_##isa,  \
            hapt_cpu_convolution_##isa, \
            hapt_cpu_embedding_##isa,   \
            hapt_cpu_expert_##isa,      \
            hapt_cpu_linear_##isa,      \
            hapt_cpu_llama_##isa,       \
            hapt_cpu_loss_##isa,        \
            hapt_cpu_moe_##isa,         \
            hapt_cpu_norm_##isa,        \
            hapt_cpu_optimizer_##isa,   \
            hapt_cpu_patches_##isa,     \
            hapt_cpu_pointwise_##isa,   \
            hapt_cpu_pool_##isa,        \
        }                               \
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

static const struct level *level_get(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, choose_level);
    return chosen;
}

const struct hapt_kernel *hapt_cpu_kernel_find(const char *op, enum hapt_dtype dtype)
{
    const struct level *level = level_get();
    for (int f = 0; level->family[f]; f++)
        for (const struct cpu_kernel *k = level->family[f]; k->kernel.op; k++)
            if (k->dtype == dtype && !strcmp(k->kernel.op, op)) return &k->kernel;
    return NULL;
}

const char *hapt_cpu_isa(void)
{
    return level_get()->name;
}
