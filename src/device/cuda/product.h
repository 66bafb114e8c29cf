/*
 * Matrix products of the cuda back end, row-major like all tensors: C [m][n] (+)= scale op(A) op(B) (+ bias). Computed
 * in fp32; product_use_tf32 rounds fp32 operands to TF32. Bitwise equal results for the same shapes and alignment.
 */
#ifndef HAPT_CUDA_PRODUCT_H
#define HAPT_CUDA_PRODUCT_H

#include "kernel.cuh"

/* Zero what is not needed: struct product p = {}; */
struct product {
    int64_t m, n, k;
    bool transpose_a;    /* A is stored as [k][m], else [m][k] */
    bool transpose_b;    /* B is stored as [n][k], else [k][n] */
    enum hapt_dtype in;  /* of A and B: HAPT_F32, HAPT_BF16, HAPT_F16 */
    enum hapt_dtype out; /* of C and bias: as `in`, or HAPT_F32 */
    const void *a, *b;
    void *c;
    const void *bias;            /* [n], or NULL */
    int64_t row_a, row_b, row_c; /* elements from one stored row to the next; 0: dense */
    int64_t batches;             /* 0: one */
    int64_t stride_a, stride_b, stride_c,
        stride_bias; /* elements from one batch to the next; 0: the same for all (c: needed) */
    bool accumulate; /* adds to C */
    float scale;     /* 0: 1 */
};

/* Workspace bytes of a product with `results` elements of C (all batches), or of any product. With less, or none, it
 * runs slower. Constant within a process. */
size_t product_workspace(int64_t results = INT64_MAX);

/* True: fp32 products use TF32. Off by default. */
bool product_tf32(void);
void product_use_tf32(bool use);

/* Starts it on `queue`. `workspace`: 64-byte aligned. */
enum hapt_status product_run(const struct product *product, void *workspace, size_t workspace_bytes,
                             struct hapt_queue *queue);

#endif
