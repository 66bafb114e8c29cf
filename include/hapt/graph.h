/*
 * The computation graph: tensors and operators in topological order.
 *
 * Forward operators stand first, [0, forward_count); hapt_graph_differentiate appends the backward operators, each
 * tagged with the forward operator it belongs to. A stage's forward is the forward operators of a range [first, end);
 * its backward is the backward operators tagged with that range, in graph order. Cuts are operator indices.
 *
 * A gradient tensor may have several writers: the first overwrites, later ones carry the accumulate bit and add, in
 * graph order. So a gradient that crosses stages is sent from writer to next writer, and the sums are those of one
 * device. Gradients of parameters always accumulate: over microbatches and over several uses (tied weights).
 *
 * One gradient tensor may serve several activations: both inputs of an `add` share the gradient of its output
 * (src/model/autodiff.c says when that is safe). Absent optional inputs are -1, so input_count is always that of the
 * signature; absent outputs only shorten output_count.
 */
#ifndef HAPT_GRAPH_H
#define HAPT_GRAPH_H

#include "hapt/arena.h"
#include "hapt/device.h"

enum hapt_tensor_kind {
    HAPT_TENSOR_INPUT,      /* filled from data by every stage that reads it: tokens, targets, loss scale */
    HAPT_TENSOR_PARAMETER,  /* resident */
    HAPT_TENSOR_ACTIVATION, /* produced by a forward operator, once per microbatch */
    HAPT_TENSOR_GRADIENT    /* of an activation (per microbatch) or of a parameter (resident, summed over microbatches,
                               fp32) */
};

enum hapt_tensor_role { /* what an INPUT is */
                        HAPT_ROLE_NONE,
                        HAPT_ROLE_TOKENS,     /* [rows][T] int32 */
                        HAPT_ROLE_TARGETS,    /* [rows][T] int32, -100: no loss taken */
                        HAPT_ROLE_LOSS_SCALE, /* [1] fp32: 1 / number of targets in the step; the seed of the backward
                                                 pass */
                        HAPT_ROLE_IMAGES,     /* [rows][C][H][W] fp32 */
                        HAPT_ROLE_LABELS      /* [rows] int32, the class of each image */
};

enum hapt_init { HAPT_INIT_ZERO, HAPT_INIT_ONE, HAPT_INIT_NORMAL };

struct hapt_tensor {
    const char *name; /* unique; a parameter's is its published name */
    enum hapt_tensor_kind kind;
    enum hapt_tensor_role role;
    enum hapt_dtype dtype; /* of compute; master weights, gradients of parameters and optimizer state are fp32 */
    int dims;
    int64_t shape[HAPT_MAX_DIMS]; /* of one whole microbatch; no dimension is 0. A scalar has dims 1, shape {1} */
    int producer;   /* operator that writes it (of a gradient: the first writer); -1 for inputs and parameters */
    int gradient;   /* gradient tensor of a parameter or activation, or -1 */
    int primal;     /* of a gradient: what it is the gradient of (the first such), else -1 */
    bool trainable; /* parameters */
    enum hapt_init init;
    double init_std;
};

struct hapt_op {
    int type; /* row of the operator table (ops.h) */
    const char *name;
    int input_count, output_count;
    int input[HAPT_MAX_INPUTS]; /* tensor indices; -1: absent optional input */
    int output[HAPT_MAX_OUTPUTS];
    unsigned accumulate; /* bit o: output o is added to (by another writer or an earlier microbatch) */
    int64_t integer[HAPT_MAX_ATTRIBUTES];
    double real[HAPT_MAX_ATTRIBUTES];
    int forward_op; /* of a backward operator: its forward operator; of a forward one: itself */
};

struct hapt_graph {
    struct hapt_arena *arena;
    int tensor_count, tensor_capacity;
    struct hapt_tensor *tensor;
    int op_count, op_capacity, forward_count;
    struct hapt_op *op;
    int loss; /* tensor [1] fp32: the SUM of the loss over this microbatch's targets; -1 while building */
};

enum hapt_status hapt_graph_create(struct hapt_arena *arena, struct hapt_graph **graph);
/* Appends; the new index comes back in *index. Shapes of an operator's outputs are inferred by its table row; output
 * tensors are created under `name` ("name", "name.1", ...). */
enum hapt_status hapt_graph_add_tensor(struct hapt_graph *graph, const struct hapt_tensor *tensor, int *index);
enum hapt_status hapt_graph_add_op(struct hapt_graph *graph, const char *type, const char *name, const int *input,
                                   int input_count, const int64_t *integer, const double *real, int *output);
/* Index of the tensor of that name, or -1. */
int hapt_graph_find_tensor(const struct hapt_graph *graph, const char *name);
/* Every invariant: indices in range, topological order, one producer per activation, shapes as the table infers them,
 * no dangling tensors, a loss. HAPT_ERR_INPUT names operator or tensor. */
enum hapt_status hapt_graph_check(const struct hapt_graph *graph);
/* Appends the backward operators of every trainable parameter (reverse mode). Idempotent. */
enum hapt_status hapt_graph_differentiate(struct hapt_graph *graph);

/* A parameter of two or more dimensions whose name has one part "*" ("moe.experts.*.weight") is a stack: element k of
 * dimension 0 is published as a parameter of its own, named with k there. Files hold the elements; decay goes by the
 * published dimensions. */
bool hapt_tensor_is_stack(const char *name, int dims);
int hapt_tensor_published_dims(const struct hapt_tensor *parameter);

int64_t hapt_tensor_elements(const struct hapt_tensor *tensor);
size_t hapt_tensor_bytes(const struct hapt_tensor *tensor);

#endif
