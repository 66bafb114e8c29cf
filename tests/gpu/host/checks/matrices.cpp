/* Self-test: warp matrix operations and cuBLASLt, compared with plain loops in double. */
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "cublasLt.h"
#include "mma.h"
#include "selftest.h"

using namespace nvcuda;

/* Tiles along k, as in an attention kernel: each warp computes one 16x16 tile of D = (A B + C) * 2. */
template <typename T, typename LayoutA, typename LayoutB>
static __global__ void wmma_kernel(const T *a, const T *b, const float *c, float *d, int m, int n, int k)
{
    const int warp = (int)threadIdx.x / 32, i = (int)blockIdx.x * 16, j = warp * 16;
    const bool a_rows = std::is_same<LayoutA, wmma::row_major>::value,
               b_rows = std::is_same<LayoutB, wmma::row_major>::value;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::load_matrix_sync(sum, c + i * n + j, (unsigned int)n, wmma::mem_row_major);
    for (int depth = 0; depth < k; depth += 16) {
        wmma::fragment<wmma::matrix_a, 16, 16, 16, T, LayoutA> left;
        wmma::fragment<wmma::matrix_b, 16, 16, 16, T, LayoutB> right;
        wmma::load_matrix_sync(left, a_rows ? a + i * k + depth : a + depth * m + i, (unsigned int)(a_rows ? k : m));
        wmma::load_matrix_sync(right, b_rows ? b + depth * n + j : b + j * k + depth, (unsigned int)(b_rows ? n : k));
        wmma::mma_sync(sum, left, right, sum);
    }
    for (int x = 0; x < sum.num_elements; x++) sum.x[x] *= 2;
    /* Through shared memory, by columns. Other lanes read than wrote. */
    float *tile = (float *)host_cuda_shared() + warp * 256;
    wmma::store_matrix_sync(tile, sum, 16, wmma::mem_col_major);
    __syncwarp();
    for (int element = (int)threadIdx.x % 32; element < 256; element += 32)
        d[(i + element / 16) * n + j + element % 16] = tile[element % 16 * 16 + element / 16];
}

template <typename T, typename LayoutA, typename LayoutB> static void test_wmma(void)
{
    enum { M = 48, N = 64, K = 32 };
    static T a[M * K], b[K * N];
    static float c[M * N], d[M * N];
    for (T &x : a) x = T(random_unit() - 0.5f);
    for (T &x : b) x = T(random_unit() - 0.5f);
    for (float &x : c) x = random_unit();
    T *device_a = to_device(a, M * K), *device_b = to_device(b, K * N);
    float *device_c = to_device(c, M * N), *device_d = to_device(c, M * N);
    FINE(run_kernel(wmma_kernel<T, LayoutA, LayoutB>, M / 16, N / 16 * 32, N / 16 * 1024, device_a, device_b, device_c,
                    device_d, (int)M, (int)N, (int)K));
    to_host(d, device_d, M * N);
    int wrong = 0;
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) {
            double sum = c[i * N + j];
            for (int k = 0; k < K; k++)
                sum += (double)(float)a[std::is_same<LayoutA, wmma::row_major>::value ? i * K + k : k * M + i] *
                       (float)b[std::is_same<LayoutB, wmma::row_major>::value ? k * N + j : j * K + k];
            wrong += !(fabs(2 * sum - d[i * N + j]) < 1e-5); /* 33 fp32 additions of numbers below 9 */
        }
    CHECK(wrong == 0);
    FINE(cudaFree(device_a));
    FINE(cudaFree(device_b));
    FINE(cudaFree(device_c));
    FINE(cudaFree(device_d));
}

static __global__ void unaligned_tile(const float *from, int leading)
{
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum;
    wmma::load_matrix_sync(sum, from, (unsigned int)leading, wmma::mem_row_major);
}
struct tile_call {
    const float *from;
    int leading;
};
static void load_tile(void *data)
{
    const struct tile_call *call = (const struct tile_call *)data;
    run_kernel(unaligned_tile, 1, 32, 0, call->from, call->leading);
}

void test_matrices(void)
{
    test_wmma<__half, wmma::row_major, wmma::row_major>();
    test_wmma<__half, wmma::row_major, wmma::col_major>();
    test_wmma<__nv_bfloat16, wmma::col_major, wmma::row_major>();
    test_wmma<__nv_bfloat16, wmma::col_major, wmma::col_major>();
    static float zeros[16 * 40];
    float *device = to_device(zeros, 16 * 40);
    struct tile_call calls[] = {{device, 32}, {device + 8, 36}, {device + 4, 32}, {device, 33}};
    for (int i = 0; i < 4; i++) CHECK(child_end(load_tile, &calls[i]) == (i < 2 ? 0 : SIGABRT));
    FINE(cudaFree(device));
}

/* ---- cuBLASLt ---- */

struct matrix {
    cudaDataType type;
    int rows, cols, ld, batches, row_order, stride, count; /* stride and count in elements */
    cublasLtMatrixLayout_t layout;
    unsigned char *bytes; /* host copy */
    void *device;
};

static int size_of(cudaDataType type)
{
    return type == CUDA_R_32F ? 4 : 2;
}
static double get(const struct matrix *x, int i)
{
    if (x->type == CUDA_R_32F) return ((const float *)x->bytes)[i];
    return x->type == CUDA_R_16BF ? (float)((const __nv_bfloat16 *)x->bytes)[i] : (float)((const __half *)x->bytes)[i];
}
static void put(struct matrix *x, int i, float value)
{
    if (x->type == CUDA_R_32F) ((float *)x->bytes)[i] = value;
    if (x->type == CUDA_R_16BF) ((__nv_bfloat16 *)x->bytes)[i] = value;
    if (x->type == CUDA_R_16F) ((__half *)x->bytes)[i] = value;
}
static int place(const struct matrix *x, int batch, int row, int col)
{
    return batch * x->stride + (x->row_order ? row * x->ld + col : col * x->ld + row);
}

static struct matrix make_matrix(cudaDataType type, int rows, int cols, int batches, int row_order)
{
    struct matrix x = {type, rows, cols, 0, batches, row_order, 0, 0, NULL, NULL, NULL};
    const int lines = row_order ? rows : cols;
    x.ld = (row_order ? cols : rows) + (int)(random_bits() % 5);
    x.stride = lines * x.ld + (int)(random_bits() % 7);
    x.count = (batches - 1) * x.stride + (lines - 1) * x.ld + (row_order ? cols : rows);
    x.bytes = (unsigned char *)calloc((size_t)x.count, (size_t)size_of(type));
    for (int i = 0; i < x.count; i++) put(&x, i, random_unit() - 0.5f);
    x.device = to_device(x.bytes, (size_t)(x.count * size_of(type)));
    FINE(cublasLtMatrixLayoutCreate(&x.layout, type, (uint64_t)rows, (uint64_t)cols, x.ld));
    const int order = row_order ? CUBLASLT_ORDER_ROW : CUBLASLT_ORDER_COL;
    const int64_t stride = x.stride;
    FINE(cublasLtMatrixLayoutSetAttribute(x.layout, CUBLASLT_MATRIX_LAYOUT_ORDER, &order, sizeof order));
    FINE(cublasLtMatrixLayoutSetAttribute(x.layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches));
    FINE(cublasLtMatrixLayoutSetAttribute(x.layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride,
                                          sizeof stride));
    return x;
}

static void free_matrix(struct matrix *x)
{
    FINE(cublasLtMatrixLayoutDestroy(x->layout));
    FINE(cudaFree(x->device));
    free(x->bytes);
}

static cublasLtMatmulDesc_t make_matmul(int op_a, int op_b, uint32_t epilogue, void *bias)
{
    cublasLtMatmulDesc_t matmul;
    FINE(cublasLtMatmulDescCreate(&matmul, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSA, &op_a, sizeof op_a));
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_TRANSB, &op_b, sizeof op_b));
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue));
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias, sizeof bias));
    return matmul;
}

static cublasLtHandle_t handle;
static cublasLtMatmulPreference_t preference;

static void test_product(void)
{
    static const cudaDataType types[][2] = {{CUDA_R_32F, CUDA_R_32F},
                                            {CUDA_R_16BF, CUDA_R_16BF},
                                            {CUDA_R_16BF, CUDA_R_32F},
                                            {CUDA_R_16F, CUDA_R_16F},
                                            {CUDA_R_16F, CUDA_R_32F}};
    static const uint32_t epilogues[] = {CUBLASLT_EPILOGUE_DEFAULT, CUBLASLT_EPILOGUE_BIAS, CUBLASLT_EPILOGUE_BGRADA,
                                         CUBLASLT_EPILOGUE_BGRADB};
    const cudaDataType *type = types[random_bits() % 5];
    const int m = 1 + (int)(random_bits() % 40), n = 1 + (int)(random_bits() % 40), k = 1 + (int)(random_bits() % 50);
    const int batches = 1 + (int)(random_bits() % 3), op_a = (int)(random_bits() % 2), op_b = (int)(random_bits() % 2);
    const uint32_t epilogue = epilogues[random_bits() % 4], orders = random_bits();
    const bool in_place = random_bits() % 2;
    const float alpha = random_bits() % 2 ? 1.0f : 0.7f, betas[] = {0, 1, -0.3f}, beta = betas[random_bits() % 3];
    struct matrix a = make_matrix(type[0], op_a ? k : m, op_a ? m : k, batches, orders & 1);
    struct matrix b = make_matrix(type[0], op_b ? n : k, op_b ? k : n, batches, orders >> 1 & 1);
    struct matrix c = make_matrix(type[1], m, n, batches, orders >> 2 & 1),
                  d = make_matrix(type[1], m, n, batches, orders >> 2 & 1);
    const int lines = epilogue == CUBLASLT_EPILOGUE_BGRADB ? n : m;
    struct matrix bias = make_matrix(type[1], lines, batches, 1, 0);
    const int64_t bias_stride = bias.ld;
    cublasLtMatmulDesc_t matmul = make_matmul(op_a, op_b, epilogue, bias.device);
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias_stride,
                                        sizeof bias_stride));

    struct matrix *source = in_place ? &d : &c, before = d;
    before.bytes = (unsigned char *)malloc((size_t)(d.count * size_of(d.type)));
    memcpy(before.bytes, d.bytes, (size_t)(d.count * size_of(d.type)));
    cublasLtMatmulHeuristicResult_t result;
    int given = 0;
    FINE(cublasLtMatmulAlgoGetHeuristic(handle, matmul, a.layout, b.layout, source->layout, d.layout, preference, 1,
                                        &result, &given));
    CHECK(given == 1 && result.workspaceSize == 0 && result.state == CUBLAS_STATUS_SUCCESS);
    FINE(cublasLtMatmul(handle, matmul, &alpha, a.device, a.layout, b.device, b.layout, &beta,
                        beta == 0 && !in_place ? NULL : source->device, source->layout, d.device, d.layout,
                        given ? &result.algo : NULL, NULL, 0, 0));
    to_host(d.bytes, (unsigned char *)d.device, (size_t)(d.count * size_of(d.type)));

    /* Half a unit in the last place of the result's type, plus the error of the fp32 sums. */
    const double unit = d.type == CUDA_R_32F ? 0x1p-23 : d.type == CUDA_R_16F ? 0x1p-11 : 0x1p-8;
    int wrong = 0;
    static unsigned char written[100000];
    memset(written, 0, sizeof written);
    for (int batch = 0; batch < batches; batch++)
        for (int i = 0; i < m; i++)
            for (int j = 0; j < n; j++) {
                double sum = 0;
                for (int x = 0; x < k; x++)
                    sum += get(&a, op_a ? place(&a, batch, x, i) : place(&a, batch, i, x)) *
                           get(&b, op_b ? place(&b, batch, j, x) : place(&b, batch, x, j));
                sum *= alpha;
                if (beta != 0) sum += beta * get(in_place ? &before : &c, place(source, batch, i, j));
                if (epilogue == CUBLASLT_EPILOGUE_BIAS) sum += get(&bias, batch * bias.ld + i);
                wrong += !(fabs(get(&d, place(&d, batch, i, j)) - sum) <= 1e-5 + unit * fabs(sum));
                written[place(&d, batch, i, j)] = 1;
            }
    for (int i = 0; i < d.count; i++)
        wrong += !written[i] && get(&d, i) != get(&before, i); /* bytes between rows stay */
    CHECK(wrong == 0);

    wrong = 0;
    to_host(bias.bytes, (unsigned char *)bias.device, (size_t)(bias.count * size_of(bias.type)));
    for (int batch = 0; batch < batches; batch++)
        for (int line = 0; line < lines; line++) {
            double sum = 0;
            for (int x = 0; x < k && epilogue == CUBLASLT_EPILOGUE_BGRADA; x++)
                sum += get(&a, op_a ? place(&a, batch, x, line) : place(&a, batch, line, x));
            for (int x = 0; x < k && epilogue == CUBLASLT_EPILOGUE_BGRADB; x++)
                sum += get(&b, op_b ? place(&b, batch, line, x) : place(&b, batch, x, line));
            if (epilogue == CUBLASLT_EPILOGUE_BGRADA || epilogue == CUBLASLT_EPILOGUE_BGRADB)
                wrong += !(fabs(get(&bias, batch * bias.ld + line) - sum) <= 1e-5 + unit * fabs(sum));
        }
    CHECK(wrong == 0);
    FINE(cublasLtMatmulDescDestroy(matmul));
    free(before.bytes);
    for (struct matrix *x : {&a, &b, &c, &d, &bias}) free_matrix(x);
}

/* Calls that the library refuses. */
static void test_refusals(void)
{
    struct matrix a = make_matrix(CUDA_R_32F, 8, 6, 1, 0), b = make_matrix(CUDA_R_32F, 6, 4, 1, 0),
                  d = make_matrix(CUDA_R_32F, 8, 4, 1, 0);
    struct matrix other = make_matrix(CUDA_R_16F, 6, 4, 1, 0), turned = make_matrix(CUDA_R_32F, 4, 6, 1, 0);
    const float one = 1, zero = 0;
    float host[64] = {};
    int given = 7;
    cublasLtMatmulHeuristicResult_t result;
    cublasLtMatmulDesc_t matmul = make_matmul(CUBLAS_OP_N, CUBLAS_OP_N, CUBLASLT_EPILOGUE_GELU_BIAS, d.device);
    CHECK(cublasLtMatmulAlgoGetHeuristic(handle, matmul, a.layout, b.layout, d.layout, d.layout, preference, 1, &result,
                                         &given) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(given == 0);
    const uint32_t plain = CUBLASLT_EPILOGUE_DEFAULT, bias = CUBLASLT_EPILOGUE_BIAS;
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, &plain, sizeof plain));
    CHECK(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, &plain, 8) ==
          CUBLAS_STATUS_INVALID_VALUE);
#define PRODUCT(x, y, pointer)                                                                                         \
    cublasLtMatmul(handle, matmul, &one, (x).device, (x).layout, pointer, (y).layout, &zero, d.device, d.layout,       \
                   d.device, d.layout, NULL, NULL, 0, 0)
    FINE(PRODUCT(a, b, b.device));
    CHECK(PRODUCT(a, other, other.device) == CUBLAS_STATUS_NOT_SUPPORTED);
    CHECK(PRODUCT(a, turned, turned.device) == CUBLAS_STATUS_INVALID_VALUE);
    CHECK(PRODUCT(a, b, host) == CUBLAS_STATUS_EXECUTION_FAILED);
    CHECK(PRODUCT(a, b, (float *)b.device + b.count) == CUBLAS_STATUS_EXECUTION_FAILED);
    void *nowhere = NULL;
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_EPILOGUE, &bias, sizeof bias));
    FINE(cublasLtMatmulDescSetAttribute(matmul, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &nowhere, sizeof nowhere));
    CHECK(PRODUCT(a, b, b.device) == CUBLAS_STATUS_INVALID_VALUE);
    FINE(cublasLtMatmulDescDestroy(matmul));
    for (struct matrix *x : {&a, &b, &d, &other, &turned}) free_matrix(x);
}

void test_cublaslt(void)
{
    const uint64_t workspace = 1 << 20;
    FINE(cublasLtCreate(&handle));
    FINE(cublasLtMatmulPreferenceCreate(&preference));
    FINE(cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace,
                                              sizeof workspace));
    for (int round = 0; round < 600; round++) test_product();
    test_refusals();
    FINE(cublasLtMatmulPreferenceDestroy(preference));
    FINE(cublasLtDestroy(handle));
}
