/* Steps and objects of the problem, and the bounds of what is left. Private to synthesis*.c. */
#ifndef HAPT_SPMD_SYNTHESIS_FOLD_H
#define HAPT_SPMD_SYNTHESIS_FOLD_H

#include "synthesis_private.h"

bool hapt_is_parameter_gradient(const struct hapt_graph *graph, int tensor);
/* Operators in folded order, objects with their lives. */
enum hapt_status hapt_fold(struct problem *problem);

#endif
