/*
 * Attention by cuDNN, if it is installed and has kernels for the device and the shape: 16-bit elements, heads of a
 * multiple of 8 columns. Results are bitwise equal in every run for given shapes, types and device.
 */
#ifndef HAPT_CUDA_CUDNN_ATTENTION_H
#define HAPT_CUDA_CUDNN_ATTENTION_H

#include "attention.h"

/* Bytes of workspace; depends on the shapes, the device and the library alone. 0: never by cuDNN. */
size_t cudnn_attention_workspace(const struct attention *at, enum hapt_dtype dtype, bool backward)
    __attribute__((weak));

/* Starts it on `queue`. *done false: the caller computes all of it, because results may be partly written. It needs a
 * workspace as above. */
enum hapt_status cudnn_attention_run(const struct attention *at, enum hapt_dtype dtype, bool backward, void *workspace,
                                     size_t workspace_bytes, struct hapt_queue *queue, bool *done)
    __attribute__((weak));

#endif
