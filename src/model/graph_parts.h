/* Builds graphs without the checks of the public functions. Private to the model room. */
#ifndef HAPT_MODEL_GRAPH_PARTS_H
#define HAPT_MODEL_GRAPH_PARTS_H

#include "hapt/graph.h"

/* Upper limits of a graph, so that an untrusted file cannot ask for unbounded memory. */
#define HAPT_MAX_TENSORS 65536
#define HAPT_MAX_OPS 16384
#define HAPT_MAX_ELEMENTS ((int64_t)1 << 46)

/* Appends without checks; the name is borrowed. */
enum hapt_status hapt_graph_append_tensor(struct hapt_graph *graph, const struct hapt_tensor *tensor, int *index);
enum hapt_status hapt_graph_append_op(struct hapt_graph *graph, const struct hapt_op *op);
/* Fills input[] up to the signature's count, with -1 for absent inputs. */
void hapt_graph_set_inputs(struct hapt_op *op, const int *input, int input_count);

/* Fills in shape and type of activations that have none (dims 0), in the order of the operators. The graph is
 * untrusted: HAPT_ERR_INPUT names the operator that does not fit. */
enum hapt_status hapt_graph_infer(struct hapt_graph *graph);

#endif
