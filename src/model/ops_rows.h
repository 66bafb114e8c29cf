/* The row groups of the operator table, and functions that they share. Private to the model room. */
#ifndef HAPT_MODEL_OPS_ROWS_H
#define HAPT_MODEL_OPS_ROWS_H

#include "hapt/ops.h"

#include <math.h>
#include <string.h>

#include "autodiff.h"
#include "signature.h"

/* Each group ends with a row without a name. */
extern const struct hapt_op_type hapt_ops_transformer[], hapt_ops_llama[], hapt_ops_patches[], hapt_ops_moe[],
    hapt_ops_image[], hapt_ops_collective[], hapt_ops_decoder[], hapt_ops_running[], hapt_ops_documents[],
    hapt_ops_shape[], hapt_ops_maps[], hapt_ops_grouped[], hapt_ops_losses[], hapt_ops_group_norm[];

/* Gradient rule of y = product of x and w, plus a bias. Operator `dx` computes x's gradient from dy and w, operator
 * `dw` those of w and the bias from x and dy. */
enum hapt_status hapt_gradient_product(struct hapt_graph *graph, int op, const char *dx, const char *dw);
/* Attribute checks that rows of several groups share. */
enum hapt_status hapt_op_infer_layer_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                          struct hapt_tensor *output);
enum hapt_status hapt_op_infer_rms_norm(const struct hapt_graph *graph, const struct hapt_op *op,
                                        struct hapt_tensor *output);
/* Shape of the places of a window over an image [..][..][y][x], with zeros around it. kernel: its height and width. */
enum hapt_status hapt_op_infer_window(const struct hapt_op *op, const int64_t *image, const int64_t *kernel,
                                      int64_t stride, int64_t padding, struct hapt_tensor *output);
enum hapt_status hapt_op_infer_gate(const struct hapt_graph *graph, const struct hapt_op *op,
                                    struct hapt_tensor *output);
enum hapt_status hapt_op_infer_attention(const struct hapt_graph *graph, const struct hapt_op *op,
                                         struct hapt_tensor *output);
enum hapt_status hapt_op_infer_grouped_attention(const struct hapt_graph *graph, const struct hapt_op *op,
                                                 struct hapt_tensor *output);
/* FLOPs of attention over whole rows. */
double hapt_op_flops_attention(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
double hapt_op_flops_attention_backward(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
double hapt_op_flops_grouped_attention(const struct hapt_graph *graph, const struct hapt_op *op, double rows_fraction);
double hapt_op_flops_grouped_attention_backward(const struct hapt_graph *graph, const struct hapt_op *op,
                                                double rows_fraction);
enum hapt_status hapt_op_infer_statistics(const struct hapt_graph *graph, const struct hapt_op *op,
                                          struct hapt_tensor *output);
/* Gradient rule of batch_norm, and of an operator with the same first five inputs. */
enum hapt_status hapt_gradient_batch_norm(struct hapt_graph *graph, int op);
/* HAPT_ERR_INPUT if both inputs are one tensor that needs a gradient: each input has a gradient of its own. */
enum hapt_status hapt_op_check_two(const struct hapt_graph *graph, int op);
/* Number of forward operators' inputs that are this tensor. */
int hapt_op_forward_readers(const struct hapt_graph *graph, int tensor);
/* HAPT_ERR_INPUT: "operator NAME (TYPE): what". */
enum hapt_status hapt_op_bad_attribute(const struct hapt_op *op, const char *what);

#endif
