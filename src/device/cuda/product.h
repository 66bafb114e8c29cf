/*
 * Matrix products of the cuda back end, row-major as all tensors are: C [m][n] (+)= scale op(A) op(B) (+ bias),
 * computed in fp32 (fp32 operands rounded to TF32 where product_use_tf32 says so) and always with the same bits for the
 * same shapes and alignment.
 */
#ifndef HAPT_CUDA_PRODUCT_H
#define HAPT_CUDA_PRODUCT_H

#include "kernel.cuh"

/* Zero what is not needed: struct product p = {}; */
struct product {
    int64_t m, n, k;
    bool transpose_a;    /* A stands as [k][m], else [m][k] */
    bool transpose_b;    /* B stands as [n][k], else [k][n] */
    enum hapt_dtype in;  /* of A and B: HAPT_F32, HAPT_BF16, HAPT_F16 */
    enum hapt_dtype out; /* of C and bias: as `in`, or HAPT_F32 */
    const void *a, *b;
    void *c;
    const void *bias;            /* [n], or NULL */
    int64_t row_a, row_b, row_c; /* elements from one row, as it stands, to the next; 0: rows are dense */
    int64_t batches;             /* 0: one */
    int64_t stride_a, stride_b, stride_c,
        stride_bias; /* elements from one batch to the next; 0: the same for all (c: needed) */
    bool accumulate; /* adds to C */
    float scale;     /* 0: 1 */
};

/* What a product of so many `results` (elements of C, all batches), or any, wants as workspace; it runs with less, or
 * none, slower. The same in every call of this process. */
size_t product_workspace(int64_t results = INT64_MAX);

/* Whether fp32 products are TF32's: not, until they are told so. */
bool product_tf32(void);
void product_use_tf32(bool use);

/* Starts it on `queue`. `workspace`: 64-byte aligned. */
enum hapt_status product_run(const struct product *product, void *workspace, size_t workspace_bytes,
                             struct hapt_queue *queue);

#endif
