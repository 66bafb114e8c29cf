/*
 * Convolutions by cuDNN, where it is: cudnn.cu is left out where the toolkit has no header of it (Makefile), its
 * library is looked for when the first convolution runs, and HAPT_CUDNN=0 in the environment keeps it from being used.
 * For given shapes, types and device the same bits in every run; fp32 is full fp32 unless product_tf32.
 */
#ifndef HAPT_CUDA_CUDNN_CONVOLUTION_H
#define HAPT_CUDA_CUDNN_CONVOLUTION_H

#include "kernel.cuh"

enum convolution_result { RESULT_Y, RESULT_DX, RESULT_DW };

/* x [rows][in][height][width], w [out][in][kernel_height][kernel_width], y [rows][out][down][across]; gradients stand
 * in their places. */
struct cudnn_convolution {
    enum convolution_result result;
    const struct hapt_view *x, *w, *y;
    int64_t stride, padding;
    bool accumulate;        /* adds to the result */
    size_t workspace_bytes; /* at most so much of the workspace: what the shapes alone decide */
};

/* Starts it on `queue`. *done false: cuDNN is not here or has no way for these shapes, nothing was started, and never
 * will be for them. */
enum hapt_status cudnn_convolution_run(const struct cudnn_convolution *convolution, void *workspace,
                                       struct hapt_queue *queue, bool *done) __attribute__((weak));

/* "cuDNN 9.19.0"; NULL: it is not here. */
const char *cudnn_library(void) __attribute__((weak));

#endif
