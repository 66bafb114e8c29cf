/* Convolutions of the cpu back end, by oneDNN. */
#ifndef HAPT_CPU_CONVOLUTION_H
#define HAPT_CPU_CONVOLUTION_H

#include "hapt/device.h"

enum convolution_kind {
    CONVOLUTION_FORWARD, /* y = x * w + bias */
    CONVOLUTION_DX,      /* dx = dy * w */
    CONVOLUTION_DW,      /* dw = x * dy, fp32 */
    CONVOLUTION_KINDS
};

/* All dense, row-major: x [rows][in][height][width], w [out][in][kernel_height][kernel_width], y
 * [rows][out][out_height][out_width]. */
struct convolution {
    enum convolution_kind kind;
    enum hapt_dtype dtype; /* fp32 or bf16 (needs AVX-512) */
    int64_t rows, in, height, width, out, out_height, out_width, kernel_height, kernel_width, stride, padding;
    int64_t groups, dilation; /* w [out][in / groups][kernel_height][kernel_width]; a group of channels makes a group */
    int threads;
};

/* Scratch bytes for oneDNN's own layouts; 0: oneDNN lacks this convolution (running it gives the error). */
size_t hapt_convolution_workspace(const struct convolution *convolution);
/* `bias` may be NULL; `accumulate` adds to the result (not forward). Plans are cached per shape for the life of the
 * process. Thread safe, but convolutions of one process run one at a time. Deterministic for a given number of threads.
 */
enum hapt_status hapt_convolution_run(const struct convolution *convolution, const void *x, const void *w,
                                      const void *y, const void *bias, bool accumulate, void *workspace);

#endif
