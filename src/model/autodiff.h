/* Functions for the gradient rules of the operator table. Private to the model room. */
#ifndef HAPT_MODEL_AUTODIFF_H
#define HAPT_MODEL_AUTODIFF_H

#include "hapt/ops.h"

/* Value of hapt_tensor.gradient during differentiation: a gradient is needed but not created yet. */
#define HAPT_GRADIENT_NEEDED (-2)

/* Is the gradient of `tensor` needed? -1 (an absent input): no. */
bool hapt_gradient_needed(const struct hapt_graph *graph, int tensor);
/* The gradient tensor of the operator's first output. */
int hapt_gradient_incoming(const struct hapt_graph *graph, int op);

/* Appends backward operator `type` of forward operator `op`, with its attributes. Its outputs are the gradients of
 * `primal[0..primal_count)`: created if missing, added to if they already have a writer. */
enum hapt_status hapt_gradient_append(struct hapt_graph *graph, int op, const char *type, const int *input,
                                      int input_count, const int *primal, int primal_count);
/* Makes the incoming gradient of `op` (an addition) the gradient of its input `tensor`, without a copy. If sharing is
 * unsafe, it is copied or added instead. */
enum hapt_status hapt_gradient_share(struct hapt_graph *graph, int op, int tensor);

#endif
