#include "init.h"

#include <math.h>
#include <string.h>

#include "hapt/env.h"

/* Golden-ratio increment of splitmix64: state key + k * STRIDE is the generator after k draws, so any draw can be
 * computed directly. */
#define STRIDE UINT64_C(0x9e3779b97f4a7c15)

/* Computes the two normal numbers of pair `pair` (Box-Muller). */
static void normal_pair(uint64_t key, uint64_t pair, double normal[2])
{
    uint64_t state = key + 2 * pair * STRIDE;
    const double radius = sqrt(-2.0 * log(1.0 - hapt_random_unit(&state))); /* 1 - u is in (0, 1] */
    const double angle = 2.0 * 3.14159265358979323846 * hapt_random_unit(&state);
    normal[0] = radius * cos(angle);
    normal[1] = radius * sin(angle);
}

void hapt_init_values(uint64_t seed, const struct hapt_tensor *parameter, int64_t first, int64_t count, float *value)
{
    if (parameter->init != HAPT_INIT_NORMAL) {
        const float constant = parameter->init == HAPT_INIT_ONE ? 1.0f : 0.0f;
        for (int64_t i = 0; i < count; i++) value[i] = constant;
        return;
    }
    const uint64_t key = hapt_hash(seed, parameter->name, strlen(parameter->name));
    double normal[2] = {0, 0};
    for (int64_t i = 0; i < count; i++) {
        const uint64_t element = (uint64_t)(first + i);
        if (i == 0 || element % 2 == 0) normal_pair(key, element / 2, normal);
        value[i] = (float)(parameter->init_std * normal[element % 2]);
    }
}
