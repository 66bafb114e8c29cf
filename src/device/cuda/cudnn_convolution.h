/*
 * Convolutions by cuDNN, if it is installed. (cudnn_plans.h). Results are bitwise equal in every run for given shapes,
 * types and device. fp32 is full fp32 unless product_tf32.
 */
#ifndef HAPT_CUDA_CUDNN_CONVOLUTION_H
#define HAPT_CUDA_CUDNN_CONVOLUTION_H

#include "kernel.cuh"

enum convolution_result { RESULT_Y, RESULT_DX, RESULT_DW };

/* x [rows][in][height][width], w [out][in][kernel_height][kernel_width], y [rows][out][down][across]; a gradient
 * replaces its tensor. */
struct cudnn_convolution {
    enum convolution_result result;
    const struct hapt_view *x, *w, *y;
    int64_t stride, padding;
    bool accumulate;        /* adds to the result */
    size_t workspace_bytes; /* upper limit of the workspace; depends on the shapes alone */
};

/* Starts it on `queue`. *done false: cuDNN is missing or has no plan for these shapes; nothing was started, and never
 * will be for them. */
enum hapt_status cudnn_convolution_run(const struct cudnn_convolution *convolution, void *workspace,
                                       struct hapt_queue *queue, bool *done) __attribute__((weak));

/* "cuDNN 9.19.0"; NULL: missing. */
const char *cudnn_library(void) __attribute__((weak));

#endif
