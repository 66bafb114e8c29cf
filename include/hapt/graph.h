/*
 * The computation graph: tensors and operators in topological order.
 *
 * Forward operators come first, [0, forward_count). hapt_graph_differentiate appends the backward operators, each
 * tagged with its forward operator. A stage covers a range [first, end) of forward operators: its forward pass runs
 * them, its backward pass runs the backward operators tagged with them, in graph order. A split point is an operator
 * index.
 *
 * A gradient tensor may have several writers. In graph order, the first overwrites; later ones carry the accumulate bit
 * and add. So a gradient that crosses stages is sent from writer to next writer, and the sums equal those of one
 * device. Gradients of parameters always accumulate: over microbatches and over several uses (tied weights).
 *
 * One gradient tensor may serve several activations: both inputs of an `add` share the gradient of its output
 * (src/model/autodiff.c says when that is safe). Absent optional inputs are -1, so input_count always matches the
 * signature. Absent outputs only shorten output_count.
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

enum hapt_tensor_role { /* meaning of an INPUT */
                        HAPT_ROLE_NONE,
                        HAPT_ROLE_TOKENS,     /* [rows][T] int32 */
                        HAPT_ROLE_TARGETS,    /* [rows][T] int32; -100: ignored by the loss */
                        HAPT_ROLE_LOSS_SCALE, /* [1] fp32: 1 / number of targets in the step; the backward seed */
                        HAPT_ROLE_IMAGES,     /* [rows][C][H][W] fp32 */
                        HAPT_ROLE_LABELS,   /* [rows] int32, class of each image; [rows][n] of its pixels, -100: none */
                        HAPT_ROLE_ROW_KEYS, /* [rows][2] int32: a random key per row and step; 0 0: no dropout */
                        HAPT_ROLE_TRAINING, /* [1] fp32: 1 in steps of training, 0 in passes over held-out rows */
                        HAPT_ROLE_POSITIONS, /* [rows][T] int32: position of each token in its document */
                        HAPT_ROLE_FIELD /* [rows][...] int32 or fp32: /batches/NAME of the data, NAME: the tensor's */
};

enum { HAPT_FIELD_CHARS = 64, HAPT_MOST_FIELDS = 64 }; /* a field's name with its final zero; fields of a model */

enum hapt_init { HAPT_INIT_ZERO, HAPT_INIT_ONE, HAPT_INIT_NORMAL };

struct hapt_tensor {
    const char *name; /* unique; for a parameter, its published name */
    enum hapt_tensor_kind kind;
    enum hapt_tensor_role role;
    enum hapt_dtype dtype; /* compute type; master weights, parameter gradients and optimizer state are fp32 */
    int dims;
    int64_t shape[HAPT_MAX_DIMS]; /* of a full microbatch; no dimension is 0. A scalar has dims 1, shape {1} */
    int producer;   /* operator that writes it (for a gradient, the first writer); -1 for inputs and parameters */
    int gradient;   /* gradient tensor of a parameter or activation, or -1 */
    int primal;     /* of a gradient: the tensor it is the gradient of (the first, if several), else -1 */
    bool trainable; /* parameters only */
    bool undecayed; /* a parameter without weight decay, whatever its dimensions (--no-decay) */
    bool statistic; /* a parameter that follows a statistic of the batch: its "gradient" is the sum of that statistic
                       over the microbatches of a step (set by hapt_graph_differentiate, from the operator table) */
    bool packed;    /* a frozen matrix in fewer bits (packing.h), which its operators unpack */
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
    int forward_op; /* the forward operator of a backward operator; a forward operator's own index */
};

struct hapt_graph {
    struct hapt_arena *arena;
    int tensor_count, tensor_capacity;
    struct hapt_tensor *tensor;
    int op_count, op_capacity, forward_count;
    struct hapt_op *op;
    int loss; /* tensor [1] fp32: the SUM of the loss over this microbatch's targets; -1 while building */
};

/* Forward operators [first_op, end_op) that recompute their activations together: a block, or a part of one. */
struct hapt_unit {
    int first_op, end_op;
    bool selective; /* it repeats light operators alone (hapt_sharding_recompute) */
    int kind;       /* units of one kind have the same structure */
};

enum hapt_status hapt_graph_create(struct hapt_arena *arena, struct hapt_graph **graph);
/* Append a tensor or an operator; *index is its index. An operator's output shapes are inferred by its table row, and
 * its output tensors are named "name", "name.1", ... */
enum hapt_status hapt_graph_add_tensor(struct hapt_graph *graph, const struct hapt_tensor *tensor, int *index);
enum hapt_status hapt_graph_add_op(struct hapt_graph *graph, const char *type, const char *name, const int *input,
                                   int input_count, const int64_t *integer, const double *real, int *output);
/* Index of the tensor with that name, or -1. */
int hapt_graph_find_tensor(const struct hapt_graph *graph, const char *name);
/* Checks every invariant: indices in range, topological order, one producer per activation, shapes as the table infers
 * them, no dangling tensors, a loss. HAPT_ERR_INPUT names the operator or tensor. */
enum hapt_status hapt_graph_check(const struct hapt_graph *graph);
/* Appends the backward operators of every trainable parameter (reverse mode). Idempotent. */
enum hapt_status hapt_graph_differentiate(struct hapt_graph *graph);

/* The first forward operator that has a backward one: those before it are a frozen prefix. forward_count: none has. */
static inline int hapt_graph_first_trained(const struct hapt_graph *graph)
{
    return graph->op_count > graph->forward_count ? graph->op[graph->op_count - 1].forward_op : graph->forward_count;
}

/* True for a gradient of a parameter. */
static inline bool hapt_graph_is_parameter_gradient(const struct hapt_graph *graph, int tensor)
{
    const struct hapt_tensor *gradient = &graph->tensor[tensor];
    return gradient->kind == HAPT_TENSOR_GRADIENT && gradient->primal >= 0 &&
           graph->tensor[gradient->primal].kind == HAPT_TENSOR_PARAMETER;
}

/* A stack is a parameter of two or more dimensions with one name part "*" ("moe.experts.*.weight"). Element k of
 * dimension 0 is published as a parameter of its own, with k in place of "*". Files hold the elements. Weight decay
 * depends on the published dimensions. */
bool hapt_tensor_is_stack(const char *name, int dims);
int hapt_tensor_published_dims(const struct hapt_tensor *parameter);
/* The published name of element `element` of a parameter of that name and those dimensions: its own, if it is no stack.
 * `text` [size]. */
void hapt_tensor_published_name(const char *name, int dims, int64_t element, char *text, size_t size);

/* Parameters are published as matrices of fp32 in model files and checkpoints, also those that are packed on devices.
 * `published` has the shape in files; it equals any other parameter. */
struct hapt_tensor hapt_tensor_published(const struct hapt_tensor *parameter);
/* Rows [first, first + count) of the leading dimension of a tensor, which has `total` of them. */
struct hapt_rows {
    int64_t total, first, count;
};
/* Converts `rows` rows of a parameter in place, to and from its packed form; others are left alone. `value` has the
 * elements of these rows of the published tensor. Packing what was unpacked gives the same bits. */
void hapt_parameter_pack(const struct hapt_tensor *parameter, int64_t rows, float *value);
void hapt_parameter_unpack(const struct hapt_tensor *parameter, int64_t rows, float *value);

/* True for inputs that are one number for all rows, and stay the same during a step. */
static inline bool hapt_role_is_scalar(enum hapt_tensor_role role)
{
    return role == HAPT_ROLE_LOSS_SCALE || role == HAPT_ROLE_TRAINING;
}

int64_t hapt_tensor_elements(const struct hapt_tensor *tensor);
size_t hapt_tensor_bytes(const struct hapt_tensor *tensor);

#endif
