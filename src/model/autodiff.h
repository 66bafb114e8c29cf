/* What a gradient rule of the operator table may use. Private to the model room. */
#ifndef HAPT_MODEL_AUTODIFF_H
#define HAPT_MODEL_AUTODIFF_H

#include "hapt/ops.h"

/* Stands in hapt_tensor.gradient while the graph is being differentiated: a gradient is needed and not there yet. */
#define HAPT_GRADIENT_WANTED (-2)

/* True when the gradient with respect to `tensor` is needed; -1 (an absent input) is not. */
bool hapt_gradient_wanted(const struct hapt_graph *graph, int tensor);
/* The gradient tensor of the operator's first output. */
int hapt_gradient_incoming(const struct hapt_graph *graph, int op);

/* Appends backward operator `type` of forward operator `op`, with its attributes. Its outputs are the gradients of
 * `primal[0..primal_count)`, made where missing, added to where they have a writer already. */
enum hapt_status hapt_gradient_append(struct hapt_graph *graph, int op, const char *type, const int *input,
                                      int input_count, const int *primal, int primal_count);
/* Lets the gradient with respect to `tensor`, an input of `op` (an addition), be the incoming gradient itself; copies
 * or adds it where sharing would be unsafe. */
enum hapt_status hapt_gradient_share(struct hapt_graph *graph, int op, int tensor);

#endif
