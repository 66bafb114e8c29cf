/* Initial values of parameters, by their rules. Private to the model room. */
#ifndef HAPT_MODEL_INIT_H
#define HAPT_MODEL_INIT_H

#include "hapt/graph.h"

/* Elements [first, first + count) of a parameter's initial value. They depend only on the seed, the parameter's name,
 * its rule and the element's index. So any split of a tensor over ranks gives the same numbers. */
void hapt_init_values(uint64_t seed, const struct hapt_tensor *parameter, int64_t first, int64_t count, float *value);

#endif
