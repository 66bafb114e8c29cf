/*
 * Host CUDA: matrix products D = epilogue(alpha * op(A) * op(B) + beta * C). Operands are fp32, or bf16 or fp16 with a
 * result in the same type or in fp32. Sums are in fp32, in the order of k. Epilogues: none, bias, and the two gradients
 * of a bias. Other requests get CUBLAS_STATUS_NOT_SUPPORTED, as from the library. Operands that are too short or not in
 * device memory get CUBLAS_STATUS_EXECUTION_FAILED, where a device would fault.
 */
#pragma GCC optimize("O3")
#include <stdlib.h>

#include "cublasLt.h"
#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "host_cuda.h"
#include "mma.h"

struct cublasLtContext {
    int device;
};

struct host_cuda_matmul {
    int compute, scale, pointer_mode;
    int op_a, op_b, op_c;
    uint32_t epilogue;
    void *bias;
    int64_t bias_stride;
    int bias_type; /* -1: D's */
};

struct host_cuda_matrix {
    uint32_t type;
    int32_t order;
    uint64_t rows, cols;
    int64_t ld;
    int32_t batches;
    int64_t batch_stride; /* elements */
};

struct host_cuda_preference {
    uint64_t value[16];
};

cublasStatus_t cublasLtCreate(cublasLtHandle_t *handle)
{
    int device;
    if (cudaGetDevice(&device)) return CUBLAS_STATUS_NOT_INITIALIZED;
    *handle = (cublasLtHandle_t)calloc(1, sizeof **handle);
    if (*handle) (*handle)->device = device;
    return *handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle)
{
    free(handle);
    return handle ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_INITIALIZED;
}

size_t cublasLtGetVersion(void)
{
    return CUBLAS_VERSION;
}

size_t cublasLtGetCudartVersion(void)
{
    return CUDART_VERSION;
}

const char *cublasLtGetStatusName(cublasStatus_t status)
{
    switch (status) {
    case CUBLAS_STATUS_SUCCESS:
        return "CUBLAS_STATUS_SUCCESS";
    case CUBLAS_STATUS_NOT_INITIALIZED:
        return "CUBLAS_STATUS_NOT_INITIALIZED";
    case CUBLAS_STATUS_ALLOC_FAILED:
        return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
        return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_ARCH_MISMATCH:
        return "CUBLAS_STATUS_ARCH_MISMATCH";
    case CUBLAS_STATUS_MAPPING_ERROR:
        return "CUBLAS_STATUS_MAPPING_ERROR";
    case CUBLAS_STATUS_EXECUTION_FAILED:
        return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INTERNAL_ERROR:
        return "CUBLAS_STATUS_INTERNAL_ERROR";
    case CUBLAS_STATUS_NOT_SUPPORTED:
        return "CUBLAS_STATUS_NOT_SUPPORTED";
    case CUBLAS_STATUS_LICENSE_ERROR:
        return "CUBLAS_STATUS_LICENSE_ERROR";
    }
    return "unknown status";
}

const char *cublasLtGetStatusString(cublasStatus_t status)
{
    return cublasLtGetStatusName(status);
}

/* ---- descriptors ---- */

template <typename T> static cublasStatus_t create(T **object, const T &value)
{
    *object = (T *)malloc(sizeof value);
    if (!*object) return CUBLAS_STATUS_ALLOC_FAILED;
    **object = value;
    return CUBLAS_STATUS_SUCCESS;
}

static cublasStatus_t set(void *place, size_t place_bytes, const void *value, size_t bytes)
{
    if (!value || bytes != place_bytes) return CUBLAS_STATUS_INVALID_VALUE;
    memcpy(place, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
}
#define SET(place) set(&(place), sizeof(place), value, bytes)

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t *matmul, cublasComputeType_t compute, cudaDataType_t scale)
{
    return create(matmul, {compute, scale, CUBLASLT_POINTER_MODE_HOST, CUBLAS_OP_N, CUBLAS_OP_N, CUBLAS_OP_N,
                           CUBLASLT_EPILOGUE_DEFAULT, NULL, 0, -1});
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t matmul)
{
    free(matmul);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t matmul, cublasLtMatmulDescAttributes_t attribute,
                                              const void *value, size_t bytes)
{
    switch (attribute) {
    case CUBLASLT_MATMUL_DESC_COMPUTE_TYPE:
        return SET(matmul->compute);
    case CUBLASLT_MATMUL_DESC_SCALE_TYPE:
        return SET(matmul->scale);
    case CUBLASLT_MATMUL_DESC_POINTER_MODE:
        return SET(matmul->pointer_mode);
    case CUBLASLT_MATMUL_DESC_TRANSA:
        return SET(matmul->op_a);
    case CUBLASLT_MATMUL_DESC_TRANSB:
        return SET(matmul->op_b);
    case CUBLASLT_MATMUL_DESC_TRANSC:
        return SET(matmul->op_c);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
        return SET(matmul->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
        return SET(matmul->bias);
    case CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE:
        return SET(matmul->bias_stride);
    case CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE:
        return SET(matmul->bias_type);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t *matrix, cudaDataType type, uint64_t rows,
                                          uint64_t cols, int64_t ld)
{
    return create(matrix, {(uint32_t)type, CUBLASLT_ORDER_COL, rows, cols, ld, 1, 0});
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t matrix)
{
    free(matrix);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t matrix,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void *value,
                                                size_t bytes)
{
    switch (attribute) {
    case CUBLASLT_MATRIX_LAYOUT_TYPE:
        return SET(matrix->type);
    case CUBLASLT_MATRIX_LAYOUT_ORDER:
        return SET(matrix->order);
    case CUBLASLT_MATRIX_LAYOUT_ROWS:
        return SET(matrix->rows);
    case CUBLASLT_MATRIX_LAYOUT_COLS:
        return SET(matrix->cols);
    case CUBLASLT_MATRIX_LAYOUT_LD:
        return SET(matrix->ld);
    case CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT:
        return SET(matrix->batches);
    case CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET:
        return SET(matrix->batch_stride);
    }
    return CUBLAS_STATUS_INVALID_VALUE;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t *preference)
{
    return create(preference, {});
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference)
{
    free(preference);
    return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void *value,
                                                    size_t bytes)
{
    const bool wide =
        attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES || attribute == CUBLASLT_MATMUL_PREF_IMPL_MASK;
    if ((unsigned int)attribute >= 16) return CUBLAS_STATUS_INVALID_VALUE;
    return set(&preference->value[attribute], wide ? 8 : 4, value, bytes);
}

/* ---- products ---- */

static size_t type_bytes(uint32_t type)
{
    return type == CUDA_R_32F ? 4 : 2;
}

static bool layout_sound(const struct host_cuda_matrix *matrix)
{
    const uint64_t least = matrix->order == CUBLASLT_ORDER_COL ? matrix->rows : matrix->cols;
    return matrix->rows && matrix->cols && matrix->ld >= (int64_t)least && matrix->batches >= 1;
}

static cublasStatus_t check(cublasLtHandle_t handle, const struct host_cuda_matmul *matmul,
                            const struct host_cuda_matrix *a, const struct host_cuda_matrix *b,
                            const struct host_cuda_matrix *c, const struct host_cuda_matrix *d)
{
    if (!handle) return CUBLAS_STATUS_NOT_INITIALIZED;
    if (!matmul || !a || !b || !c || !d) return CUBLAS_STATUS_INVALID_VALUE;
    const bool turn_a = matmul->op_a != CUBLAS_OP_N, turn_b = matmul->op_b != CUBLAS_OP_N;
    const uint64_t m = turn_a ? a->cols : a->rows, k = turn_a ? a->rows : a->cols, n = turn_b ? b->rows : b->cols;
    if (!layout_sound(a) || !layout_sound(b) || !layout_sound(c) || !layout_sound(d))
        return CUBLAS_STATUS_INVALID_VALUE;
    if ((turn_b ? b->cols : b->rows) != k || d->rows != m || d->cols != n || c->rows != m || c->cols != n)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a->batches != d->batches || b->batches != d->batches || c->batches != d->batches)
        return CUBLAS_STATUS_INVALID_VALUE;
    if (a->order > CUBLASLT_ORDER_ROW || b->order > CUBLASLT_ORDER_ROW || d->order > CUBLASLT_ORDER_ROW ||
        c->order != d->order)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool typed = a->type == b->type && c->type == d->type && (d->type == a->type || d->type == CUDA_R_32F) &&
                       (a->type == CUDA_R_32F || a->type == CUDA_R_16BF || a->type == CUDA_R_16F);
    const bool computed = matmul->compute == CUBLAS_COMPUTE_32F || matmul->compute == CUBLAS_COMPUTE_32F_PEDANTIC ||
                          (matmul->compute == CUBLAS_COMPUTE_32F_FAST_TF32 && a->type == CUDA_R_32F);
    if (!typed || !computed || matmul->scale != CUDA_R_32F || matmul->pointer_mode != CUBLASLT_POINTER_MODE_HOST ||
        matmul->op_c)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const uint32_t epilogue = matmul->epilogue;
    if (epilogue != CUBLASLT_EPILOGUE_DEFAULT && epilogue != CUBLASLT_EPILOGUE_BIAS &&
        epilogue != CUBLASLT_EPILOGUE_BGRADA && epilogue != CUBLASLT_EPILOGUE_BGRADB)
        return CUBLAS_STATUS_NOT_SUPPORTED;
    const bool bias_typed = matmul->bias_type == -1 || (uint32_t)matmul->bias_type == d->type;
    return epilogue == CUBLASLT_EPILOGUE_DEFAULT || bias_typed ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t handle, cublasLtMatmulDesc_t matmul,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int asked,
                                              cublasLtMatmulHeuristicResult_t results[], int *given)
{
    if (!preference || asked <= 0 || !results || !given) return CUBLAS_STATUS_INVALID_VALUE;
    *given = 0;
    const cublasStatus_t status = check(handle, matmul, a, b, c, d);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    memset(&results[0], 0, sizeof results[0]);
    results[0].wavesCount = 1;
    *given = 1;
    return status;
}

static float load(const void *base, uint32_t type, int64_t i)
{
    if (type == CUDA_R_32F) return ((const float *)base)[i];
    return type == CUDA_R_16BF ? (float)((const __nv_bfloat16 *)base)[i] : (float)((const __half *)base)[i];
}

static void store(void *base, uint32_t type, int64_t i, float value)
{
    if (type == CUDA_R_32F) ((float *)base)[i] = value;
    if (type == CUDA_R_16BF) ((__nv_bfloat16 *)base)[i] = value;
    if (type == CUDA_R_16F) ((__half *)base)[i] = value;
}

#define TILE_M 16
#define TILE_N 4

/* Copies `lines` x `depth` numbers into panels of `width` lines, [panel][depth][width]. Zeros fill the last panel. */
template <typename T>
static void pack_as(float *to, const T *from, int64_t lines, int64_t depth, int64_t line_stride, int64_t depth_stride,
                    int width)
{
    for (int64_t panel = 0; panel < lines; panel += width)
        for (int64_t k = 0; k < depth; k++)
            for (int64_t line = panel; line < panel + width; line++)
                *to++ = line < lines ? (float)from[line * line_stride + k * depth_stride] : 0.0f;
}

static void pack(float *to, const void *from, uint32_t type, int64_t first, int64_t lines, int64_t depth,
                 int64_t line_stride, int64_t depth_stride, int width)
{
    if (type == CUDA_R_32F) pack_as(to, (const float *)from + first, lines, depth, line_stride, depth_stride, width);
    if (type == CUDA_R_16BF)
        pack_as(to, (const __nv_bfloat16 *)from + first, lines, depth, line_stride, depth_stride, width);
    if (type == CUDA_R_16F) pack_as(to, (const __half *)from + first, lines, depth, line_stride, depth_stride, width);
}

/* Operands of fp32 as tensor cores read them: rounded to ten bits of mantissa. */
static void round_to_tf32(float *value, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, value + i, sizeof bits);
        if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0xfffu + (bits >> 13 & 1u)) & ~0x1fffu;
        memcpy(value + i, &bits, sizeof bits);
    }
}

/* The width of AVX2 registers. Without wider registers the compiler handles wider vectors badly. */
typedef float half_line __attribute__((vector_size(32)));

static inline __attribute__((always_inline)) void tile(const float *a, const float *b, int64_t depth, float *sum)
{
    half_line s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {}, low, high;
    for (int64_t k = 0; k < depth; k++, a += TILE_M, b += TILE_N) {
        memcpy(&low, a, sizeof low);
        memcpy(&high, a + 8, sizeof high);
        s0 += low * b[0], s1 += high * b[0];
        s2 += low * b[1], s3 += high * b[1];
        s4 += low * b[2], s5 += high * b[2];
        s6 += low * b[3], s7 += high * b[3];
    }
    const half_line sums[] = {s0, s1, s2, s3, s4, s5, s6, s7};
    memcpy(sum, sums, sizeof sums);
}

typedef void (*tile_function)(const float *a, const float *b, int64_t depth, float *sum);
static void tile_plain(const float *a, const float *b, int64_t depth, float *sum)
{
    tile(a, b, depth, sum);
}
#ifdef __x86_64__
__attribute__((target("avx2,fma"))) static void tile_avx2(const float *a, const float *b, int64_t depth, float *sum)
{
    tile(a, b, depth, sum);
}
#endif

static tile_function pick_tile(void)
{
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return tile_avx2;
#endif
    return tile_plain;
}

void host_cuda_multiply_tile(const float *a, const float *b, float *c)
{
    for (int i = 0; i < 16; i++) {
        float sums[16];
        memcpy(sums, c + 16 * i, sizeof sums);
        for (int k = 0; k < 16; k++)
            for (int j = 0; j < 16; j++) sums[j] += a[16 * i + k] * b[16 * k + j];
        memcpy(c + 16 * i, sums, sizeof sums);
    }
}

/* Distance between rows and between columns of op(matrix). */
struct strides {
    int64_t row, col;
};
static struct strides strides_of(const struct host_cuda_matrix *matrix, int op)
{
    const bool by_columns = (matrix->order == CUBLASLT_ORDER_COL) == (op == CUBLAS_OP_N);
    return by_columns ? strides{1, matrix->ld} : strides{matrix->ld, 1};
}

/* All by value, so that a captured product outlives its descriptors. */
struct product {
    struct host_cuda_matmul matmul;
    struct host_cuda_matrix a_layout, b_layout, c_layout, d_layout;
    int64_t m, n, k;
    float alpha, beta;
    const void *a, *b, *c;
    void *d;
    float *a_panels, *b_panels; /* [m / TILE_M][k][TILE_M], [n / TILE_N][k][TILE_N] */
};

static void multiply(const struct product *p, int64_t batch)
{
    const tile_function run = pick_tile();
    const struct strides c = strides_of(&p->c_layout, CUBLAS_OP_N), d = strides_of(&p->d_layout, CUBLAS_OP_N);
    const int64_t c_first = batch * p->c_layout.batch_stride, d_first = batch * p->d_layout.batch_stride;
    const int64_t bias_first = batch * p->matmul.bias_stride;
    const bool bias = p->matmul.epilogue == CUBLASLT_EPILOGUE_BIAS;
    for (int64_t i = 0; i < p->m; i += TILE_M)
        for (int64_t j = 0; j < p->n; j += TILE_N) {
            float sums[TILE_N][TILE_M];
            run(p->a_panels + i * p->k, p->b_panels + j * p->k, p->k, sums[0]);
            for (int64_t col = j; col < j + TILE_N && col < p->n; col++)
                for (int64_t row = i; row < i + TILE_M && row < p->m; row++) {
                    float value = p->alpha * sums[col - j][row - i];
                    if (p->beta != 0)
                        value += p->beta * load(p->c, p->c_layout.type, c_first + row * c.row + col * c.col);
                    if (bias) value += load(p->matmul.bias, p->d_layout.type, bias_first + row);
                    store(p->d, p->d_layout.type, d_first + row * d.row + col * d.col, value);
                }
        }
}

/* The gradient of a bias: sums over k of the rows of op(A) or the columns of op(B). */
static void sum_bias(const struct product *p, int64_t batch)
{
    const bool of_a = p->matmul.epilogue == CUBLASLT_EPILOGUE_BGRADA;
    const int64_t lines = of_a ? p->m : p->n, width = of_a ? TILE_M : TILE_N;
    const float *panels = of_a ? p->a_panels : p->b_panels;
    for (int64_t line = 0; line < lines; line++) {
        const float *first = panels + line / width * width * p->k + line % width;
        float sum = 0;
        for (int64_t k = 0; k < p->k; k++) sum += first[k * width];
        store(p->matmul.bias, p->d_layout.type, batch * p->matmul.bias_stride + line, sum);
    }
}

static bool on_device(const void *base, const struct host_cuda_matrix *matrix)
{
    const int64_t far = matrix->order == CUBLASLT_ORDER_COL ? (int64_t)matrix->cols - 1 : (int64_t)matrix->rows - 1;
    const int64_t near = matrix->order == CUBLASLT_ORDER_COL ? (int64_t)matrix->rows : (int64_t)matrix->cols;
    const int64_t count = (matrix->batches - 1) * matrix->batch_stride + far * matrix->ld + near;
    bool outside = false;
    return host_cuda_is_device(base, (size_t)count * type_bytes(matrix->type), &outside) && !outside;
}

static bool bias_on_device(const struct product *p)
{
    const int64_t lines = p->matmul.epilogue == CUBLASLT_EPILOGUE_BGRADB ? p->n : p->m;
    const int64_t count = (p->d_layout.batches - 1) * p->matmul.bias_stride + lines;
    bool outside = false;
    if (p->matmul.epilogue == CUBLASLT_EPILOGUE_DEFAULT) return true;
    return host_cuda_is_device(p->matmul.bias, (size_t)count * type_bytes(p->d_layout.type), &outside) && !outside;
}

static cublasStatus_t run_product(struct product p)
{
    host_cuda_scope scope;
    p.a_panels = (float *)malloc(sizeof(float) * (size_t)((p.m + TILE_M - 1) / TILE_M * TILE_M * p.k));
    p.b_panels = (float *)malloc(sizeof(float) * (size_t)((p.n + TILE_N - 1) / TILE_N * TILE_N * p.k));
    const struct strides a_strides = strides_of(&p.a_layout, p.matmul.op_a), b_strides = strides_of(&p.b_layout, p.matmul.op_b);
    for (int64_t batch = 0; p.a_panels && p.b_panels && batch < p.d_layout.batches; batch++) {
        pack(p.a_panels, p.a, p.a_layout.type, batch * p.a_layout.batch_stride, p.m, p.k, a_strides.row, a_strides.col,
             TILE_M);
        pack(p.b_panels, p.b, p.b_layout.type, batch * p.b_layout.batch_stride, p.n, p.k, b_strides.col, b_strides.row,
             TILE_N);
        if (p.matmul.compute == CUBLAS_COMPUTE_32F_FAST_TF32) {
            round_to_tf32(p.a_panels, (p.m + TILE_M - 1) / TILE_M * TILE_M * p.k);
            round_to_tf32(p.b_panels, (p.n + TILE_N - 1) / TILE_N * TILE_N * p.k);
        }
        multiply(&p, batch);
        if (p.matmul.epilogue >= CUBLASLT_EPILOGUE_BGRADA) sum_bias(&p, batch);
    }
    const bool room = p.a_panels && p.b_panels;
    free(p.a_panels);
    free(p.b_panels);
    return room ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_ALLOC_FAILED;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t handle, cublasLtMatmulDesc_t matmul, const void *alpha, const void *a,
                              cublasLtMatrixLayout_t a_layout, const void *b, cublasLtMatrixLayout_t b_layout,
                              const void *beta, const void *c, cublasLtMatrixLayout_t c_layout, void *d,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t *, void *workspace,
                              size_t workspace_bytes, cudaStream_t stream)
{
    const cublasStatus_t status = check(handle, matmul, a_layout, b_layout, c_layout, d_layout);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    if (!alpha || !beta || !a || !b || !d || (matmul->epilogue != CUBLASLT_EPILOGUE_DEFAULT && !matmul->bias))
        return CUBLAS_STATUS_INVALID_VALUE;
    host_cuda_scope scope;
    const bool turn_a = matmul->op_a != CUBLAS_OP_N;
    const size_t sizes[] = {(size_t)d_layout->rows, (size_t)d_layout->cols, (size_t)(turn_a ? a_layout->rows : a_layout->cols)};
    host_cuda_first_use((const void *)cublasLtMatmul, sizes);
    const struct product p = {*matmul,
                              *a_layout,
                              *b_layout,
                              *c_layout,
                              *d_layout,
                              (int64_t)d_layout->rows,
                              (int64_t)d_layout->cols,
                              (int64_t)(turn_a ? a_layout->rows : a_layout->cols),
                              *(const float *)alpha,
                              *(const float *)beta,
                              a,
                              b,
                              c,
                              d,
                              NULL,
                              NULL};
    bool outside = false;
    if (!on_device(a, a_layout) || !on_device(b, b_layout) || !on_device(d, d_layout) || !bias_on_device(&p) ||
        (p.beta != 0 && !on_device(c, c_layout)) || !host_cuda_stream_takes(stream) ||
        (workspace_bytes && workspace && (!host_cuda_is_device(workspace, workspace_bytes, &outside) || outside)))
        return CUBLAS_STATUS_EXECUTION_FAILED;
    if (!host_cuda_captures(stream)) return run_product(p);
    const cudaError_t error =
        host_cuda_keep(stream, [p] { return run_product(p) == CUBLAS_STATUS_SUCCESS ? cudaSuccess : cudaErrorLaunchFailure; });
    return error ? CUBLAS_STATUS_EXECUTION_FAILED : CUBLAS_STATUS_SUCCESS;
}
