/* Matrix products of the cpu back end. oneDNN's API changes between major versions, so only dnnl*.c use it. */
#ifndef HAPT_CPU_GEMM_H
#define HAPT_CPU_GEMM_H

#include "hapt/device.h"

/* c [m][n] (+)= a [m][k] b [k][n] (+ bias [n]); a transposed operand is stored as [k][m] or [n][k]. All dense,
 * row-major. */
struct gemm {
    int64_t m, n, k;
    bool transpose_a, transpose_b;
    const void *a, *b, *bias; /* type `in`; bias may be NULL */
    void *c;                  /* type `out` */
    enum hapt_dtype in, out;  /* fp32 to fp32; bf16 to bf16 or fp32 (needs AVX-512) */
    bool accumulate;          /* not together with a bias */
    int threads;
};

/* Plans are cached per shape for the life of the process: the first call of a shape is slow, later ones allocate
 * nothing here. Thread safe; cached plans of one process run one at a time. */
enum hapt_status hapt_gemm_run(const struct gemm *gemm);
/* "oneDNN 2.6.3", at run time. */
const char *hapt_gemm_library(void);

#endif
