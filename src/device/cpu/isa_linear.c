/* Linear layers: y = x w + b and its gradients, with w as [in][out] ("linear") or [out][in] ("linear_t"). Products of
 * activations, matrix by matrix ("matmul"). */
#include "gemm.h"
#include "isa.h"
#include "products.h"
#include "tiles.h"

static size_t widened_bytes(int64_t elements)
{
    return hapt_align((size_t)elements * sizeof(float));
}

/* bf16 products: AMX tiles if they fit, else oneDNN or widened operands. */
size_t ISA_NAME(hapt_cpu_product_workspace)(const struct gemm *gemm)
{
    if (gemm->in != HAPT_BF16) return 0;
    if (NATIVE_HALF) return ISA_NAME(hapt_tiles_workspace)(gemm);
    return widened_bytes(gemm->m * gemm->k) + widened_bytes(gemm->k * gemm->n) + widened_bytes(gemm->m * gemm->n);
}

INLINE void add_bias(const struct hapt_call *call, float *y, const void *bias, int64_t rows, int64_t columns, bool half)
{
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *columns))
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            store(y, r * columns + c, left, false, load(y, r * columns + c, left, false) + load(bias, c, left, half));
        }
}

/* bf16 through fp32 copies of the operands. */
static enum hapt_status gemm_widened(const struct hapt_call *call, struct gemm gemm, void *workspace)
{
    char *at = workspace;
    float *a = (float *)at, *b = (float *)(at += widened_bytes(gemm.m * gemm.k));
    float *c = (float *)(at + widened_bytes(gemm.k * gemm.n));
    const int threads = threads_for(call, gemm.m * gemm.k);
    convert(a, false, gemm.a, true, gemm.m * gemm.k, threads);
    convert(b, false, gemm.b, true, gemm.k * gemm.n, threads);
    void *out = gemm.c;
    const bool half_out = gemm.out == HAPT_BF16;
    if (half_out) {
        if (gemm.accumulate) convert(c, false, out, true, gemm.m * gemm.n, threads);
        gemm.c = c;
    }
    gemm.a = a;
    gemm.b = b;
    gemm.in = gemm.out = HAPT_F32;
    const void *bias = gemm.bias;
    gemm.bias = NULL;
    HAPT_TRY(hapt_gemm_run(&gemm));
    if (bias) add_bias(call, gemm.c, bias, gemm.m, gemm.n, true);
    if (half_out) convert(out, true, c, false, gemm.m * gemm.n, threads);
    return HAPT_OK;
}

enum hapt_status ISA_NAME(hapt_product_run)(const struct hapt_call *call, const struct gemm *gemm, void *workspace)
{
    if (gemm->in == HAPT_BF16 && !NATIVE_HALF) return gemm_widened(call, *gemm, workspace);
    if (!ISA_NAME(hapt_tiles_workspace)(gemm)) return hapt_gemm_run(gemm);
    ISA_NAME(hapt_tiles_run)(gemm, workspace);
    return HAPT_OK;
}

/* input: x, w, bias; output: y */
static struct gemm forward_gemm(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    return (struct gemm){.m = view_rows(&call->input[0]),
                         .n = view_columns(&call->output[0]),
                         .k = view_columns(&call->input[0]),
                         .transpose_b = transposed,
                         .a = call->input[0].data,
                         .b = call->input[1].data,
                         .c = call->output[0].data,
                         .bias = call->input_count > 2 ? call->input[2].data : NULL,
                         .in = dtype,
                         .out = dtype,
                         .threads = call->threads};
}

static enum hapt_status linear_forward(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    struct gemm gemm = forward_gemm(call, dtype, transposed);
    if (dtype == HAPT_BF16) return ISA_NAME(hapt_product_run)(call, &gemm, call->workspace);
    const void *bias = gemm.bias; /* sgemm and a pass over y beat oneDNN's fp32 primitive with a bias */
    gemm.bias = NULL;
    HAPT_TRY(hapt_gemm_run(&gemm));
    if (bias) add_bias(call, gemm.c, bias, gemm.m, gemm.n, false);
    return HAPT_OK;
}

/* input: dy, w; output: dx */
static struct gemm input_gradient_gemm(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    struct gemm gemm = forward_gemm(call, dtype, !transposed);
    gemm.bias = NULL;
    gemm.accumulate = call->accumulate & 1u;
    return gemm;
}

static enum hapt_status linear_input_gradient(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    const struct gemm gemm = input_gradient_gemm(call, dtype, transposed);
    return ISA_NAME(hapt_product_run)(call, &gemm, call->workspace);
}

/* Column sums of dy [rows][columns] into db, in chunks of rows that depend on the shape alone. */
INLINE void bias_gradient(const struct hapt_call *call, const void *dy, int64_t rows, int64_t columns, bool half,
                          float *partial, float *db, bool accumulate)
{
    const int64_t chunk = chunk_rows(rows), chunks = chunk_count(rows);
#pragma omp parallel num_threads(threads_for(call, rows *columns))
    {
#pragma omp for schedule(static)
        for (int64_t k = 0; k < chunks; k++)
            for (int64_t c = 0; c < columns; c += LANES) {
                const int64_t left = columns - c;
                vector total = {0};
                for (int64_t r = k * chunk; r < smaller(rows, (k + 1) * chunk); r++)
                    total += load(dy, r * columns + c, left, half);
                store(partial, k * columns + c, left, false, total);
            }
#pragma omp for schedule(static)
        for (int64_t c = 0; c < columns; c += LANES) {
            const int64_t left = columns - c;
            vector total = {0};
            for (int64_t k = 0; k < chunks; k++) total += load(partial, k * columns + c, left, false);
            if (accumulate) total += load(db, c, left, false);
            store(db, c, left, false, total);
        }
    }
}

/* input: x, dy; output: dw, db */
static struct gemm weight_gradient_gemm(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    const int64_t in = view_columns(&call->input[0]), out = view_columns(&call->input[1]);
    const void *x = call->input[0].data, *dy = call->input[1].data;
    return (struct gemm){.m = transposed ? out : in,
                         .n = transposed ? in : out,
                         .k = view_rows(&call->input[0]),
                         .transpose_a = true,
                         .a = transposed ? dy : x,
                         .b = transposed ? x : dy,
                         .c = call->output[0].data,
                         .in = dtype,
                         .out = HAPT_F32,
                         .accumulate = call->accumulate & 1u,
                         .threads = call->threads};
}

static enum hapt_status linear_weight_gradient(const struct hapt_call *call, enum hapt_dtype dtype, bool transposed)
{
    const struct gemm gemm = weight_gradient_gemm(call, dtype, transposed);
    const int64_t out = view_columns(&call->input[1]);
    const void *dy = call->input[1].data;
    float *db = call->output_count > 1 ? call->output[1].data : NULL;
    if (db) {
        const bool accumulate = call->accumulate >> 1 & 1u;
        if (dtype == HAPT_BF16)
            bias_gradient(call, dy, gemm.k, out, true, call->workspace, db, accumulate);
        else
            bias_gradient(call, dy, gemm.k, out, false, call->workspace, db, accumulate);
    }
    return ISA_NAME(hapt_product_run)(call, &gemm, call->workspace); /* last: it may reuse the workspace */
}

static size_t forward_workspace(const struct hapt_call *call)
{
    const struct gemm gemm = forward_gemm(call, HAPT_BF16, false);
    return ISA_NAME(hapt_cpu_product_workspace)(&gemm);
}

static size_t input_gradient_workspace(const struct hapt_call *call)
{
    const struct gemm gemm = input_gradient_gemm(call, HAPT_BF16, false);
    return ISA_NAME(hapt_cpu_product_workspace)(&gemm);
}

static size_t bias_workspace(const struct hapt_call *call)
{
    return (size_t)(chunk_count(view_rows(&call->input[0])) * view_columns(&call->input[1])) * sizeof(float);
}

static size_t weight_gradient_workspace(const struct hapt_call *call, bool transposed)
{
    const struct gemm gemm = weight_gradient_gemm(call, HAPT_BF16, transposed);
    const size_t product = ISA_NAME(hapt_cpu_product_workspace)(&gemm), sums = bias_workspace(call);
    return product > sums ? product : sums;
}

static size_t dw_workspace(const struct hapt_call *call)
{
    return weight_gradient_workspace(call, false);
}

static size_t dw_t_workspace(const struct hapt_call *call)
{
    return weight_gradient_workspace(call, true);
}

/* One matrix of a matmul. integer[0] bit 0: a is stored transposed; bit 1: b is. */
static struct gemm matmul_gemm(const struct hapt_call *call, enum hapt_dtype dtype)
{
    const struct hapt_view *a = &call->input[0], *y = &call->output[0];
    const bool transpose_a = call->integer[0] & 1, transpose_b = call->integer[0] >> 1 & 1;
    return (struct gemm){.m = y->shape[y->dims - 2],
                         .n = y->shape[y->dims - 1],
                         .k = a->shape[a->dims - (transpose_a ? 2 : 1)],
                         .transpose_a = transpose_a,
                         .transpose_b = transpose_b,
                         .in = dtype,
                         .out = dtype,
                         .accumulate = call->accumulate & 1u,
                         .threads = call->threads};
}

static size_t matmul_workspace(const struct hapt_call *call)
{
    const struct gemm gemm = matmul_gemm(call, HAPT_BF16);
    return ISA_NAME(hapt_cpu_product_workspace)(&gemm);
}

static enum hapt_status matmul_run(const struct hapt_call *call, enum hapt_dtype dtype)
{
    struct gemm gemm = matmul_gemm(call, dtype);
    if (hapt_view_elements(&call->output[0]) == 0) return HAPT_OK;
    const int64_t bytes = (int64_t)hapt_dtype_bytes(dtype),
                  count = hapt_view_elements(&call->output[0]) / (gemm.m * gemm.n);
    for (int64_t k = 0; k < count; k++) {
        gemm.a = (const char *)call->input[0].data + k * gemm.m * gemm.k * bytes;
        gemm.b = (const char *)call->input[1].data + k * gemm.k * gemm.n * bytes;
        gemm.c = (char *)call->output[0].data + k * gemm.m * gemm.n * bytes;
        HAPT_TRY(ISA_NAME(hapt_product_run)(call, &gemm, call->workspace));
    }
    return HAPT_OK;
}

KERNELS(matmul, return matmul_run(call, dtype))
KERNELS(forward, return linear_forward(call, dtype, false))
KERNELS(forward_t, return linear_forward(call, dtype, true))
KERNELS(dx, return linear_input_gradient(call, dtype, false))
KERNELS(dx_t, return linear_input_gradient(call, dtype, true))
KERNELS(dw, return linear_weight_gradient(call, dtype, false))
KERNELS(dw_t, return linear_weight_gradient(call, dtype, true))

const struct cpu_kernel ISA_NAME(hapt_cpu_linear)[] = {
    {HAPT_F32, {"linear", NULL, forward_f32}},
    {HAPT_BF16, {"linear", forward_workspace, forward_bf16}},
    {HAPT_F32, {"linear_t", NULL, forward_t_f32}},
    {HAPT_BF16, {"linear_t", forward_workspace, forward_t_bf16}},
    {HAPT_F32, {"linear_dx", NULL, dx_f32}},
    {HAPT_BF16, {"linear_dx", input_gradient_workspace, dx_bf16}},
    {HAPT_F32, {"linear_t_dx", NULL, dx_t_f32}},
    {HAPT_BF16, {"linear_t_dx", input_gradient_workspace, dx_t_bf16}},
    {HAPT_F32, {"linear_dw", bias_workspace, dw_f32}},
    {HAPT_BF16, {"linear_dw", dw_workspace, dw_bf16}},
    {HAPT_F32, {"linear_t_dw", bias_workspace, dw_t_f32}},
    {HAPT_BF16, {"linear_t_dw", dw_t_workspace, dw_t_bf16}},
    {HAPT_F32, {"matmul", NULL, matmul_f32}},
    {HAPT_BF16, {"matmul", matmul_workspace, matmul_bf16}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
