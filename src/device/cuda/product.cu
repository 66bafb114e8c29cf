/* Matrix products by cuBLASLt, which is column-major: its first operand is our B, and its result is our C, read as its
 * transpose. */
#include <cublasLt.h>
#include <pthread.h>
#include <string.h>

#include "product.h"

enum { SHAPES = 1024, PROBES = 16, ALIGNMENT = 64, THREADS = 256 };

/* Everything that cuBLASLt's choice depends on; compared as bytes. */
struct shape {
    int64_t m, n, k, row_a, row_b, row_c, batches, stride_a, stride_b, stride_c, stride_bias;
    size_t workspace_bytes;
    int in, out;
    int transpose_a, transpose_b, bias, accumulate, tf32;
    uint32_t align_a, align_b, align_c, align_bias;
};

struct choice {
    bool known, has_algorithm; /* of cuBLASLt */
    struct shape shape;
    cublasLtMatmulDesc_t descriptor;
    cublasLtMatrixLayout_t a, b, c;
    cublasLtMatmulAlgo_t algorithm;
};

/* The lock is held while a product is started, since the address of its bias is set in the choice. */
static struct {
    pthread_mutex_t lock;
    cublasLtHandle_t handle;
    struct choice choice[SHAPES];
} products = {PTHREAD_MUTEX_INITIALIZER, NULL, {}};

static bool use_tf32; /* set before any product starts */

void product_use_tf32(bool use)
{
    use_tf32 = use;
}

bool product_tf32(void)
{
    return use_tf32;
}

static enum hapt_status product_check(cublasStatus_t status, const char *what)
{
    if (status == CUBLAS_STATUS_SUCCESS) return HAPT_OK;
    return cuda_host->fail(status == CUBLAS_STATUS_ALLOC_FAILED ? HAPT_ERR_MEMORY : HAPT_ERR_INTERNAL, NULL,
                           "cuBLASLt: %s: %s", what, cublasLtGetStatusString(status));
}

size_t product_workspace(int64_t results)
{
    static size_t most; /* every thread computes the same value */
    if (!most) {
        int device = 0, major = 0;
        cudaGetDevice(&device);
        cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
        cudaGetLastError();
        most = major >= 9 ? HAPT_PRODUCT_WORKSPACE_BYTES : HAPT_PRODUCT_WORKSPACE_BYTES / 4;
    }
    return hapt_product_workspace(results, most);
}

/* ---- Products without a cuBLASLt algorithm: one thread per element ---- */

template <class In, class Out> static __global__ void product_kernel(struct product p)
{
    const In *a = (const In *)p.a, *b = (const In *)p.b;
    const Out *bias = (const Out *)p.bias;
    for (GRID_STRIDE(i, p.batches * p.m * p.n)) {
        const int64_t batch = i / (p.m * p.n), row = i / p.n % p.m, column = i % p.n;
        const In *from_a = a + batch * p.stride_a + row * (p.transpose_a ? 1 : p.row_a);
        const In *from_b = b + batch * p.stride_b + column * (p.transpose_b ? p.row_b : 1);
        const int64_t step_a = p.transpose_a ? p.row_a : 1, step_b = p.transpose_b ? 1 : p.row_b;
        Out *to = (Out *)p.c + batch * p.stride_c + row * p.row_c + column;
        float sum = 0;
        for (int64_t l = 0; l < p.k; l++) sum += to_float(from_a[l * step_a]) * to_float(from_b[l * step_b]);
        sum *= p.scale;
        if (bias) sum += to_float(bias[batch * p.stride_bias + column]);
        *to = from_float<Out>(p.accumulate ? to_float(*to) + sum : sum);
    }
}

static enum hapt_status product_plain(const struct product *product, struct hapt_queue *queue)
{
    void (*kernel)(struct product) = product_kernel<float, float>;
    if (product->in == HAPT_BF16)
        kernel = product->out == HAPT_F32 ? product_kernel<__nv_bfloat16, float>
                                          : product_kernel<__nv_bfloat16, __nv_bfloat16>;
    if (product->in == HAPT_F16)
        kernel = product->out == HAPT_F32 ? product_kernel<__half, float> : product_kernel<__half, __half>;
    return launch(kernel, blocks_for(product->batches * product->m * product->n, THREADS), THREADS, 0, queue, *product);
}

/* ---- A bias that is not aligned to 16 bytes: kernels with a fused bias may assume it (undocumented). So it is written
 * to the result first. ---- */

template <class Out> __global__ void bias_kernel(struct product p)
{
    const Out *bias = (const Out *)p.bias;
    for (GRID_STRIDE(i, p.batches * p.m * p.n)) {
        const int64_t batch = i / (p.m * p.n), row = i / p.n % p.m, column = i % p.n;
        ((Out *)p.c)[batch * p.stride_c + row * p.row_c + column] = bias[batch * p.stride_bias + column];
    }
}

static bool bias_aligned(const struct product *p)
{
    const int64_t apart = p->batches > 1 ? p->stride_bias * (p->out == HAPT_F32 ? 4 : 2) : 0;
    return ((uintptr_t)p->bias & 15) == 0 && (apart & 15) == 0;
}

static enum hapt_status bias_first(struct product *p, struct hapt_queue *queue)
{
    void (*kernel)(struct product) = p->out == HAPT_F32    ? bias_kernel<float>
                                     : p->out == HAPT_BF16 ? bias_kernel<__nv_bfloat16>
                                                           : bias_kernel<__half>;
    HAPT_TRY(launch(kernel, blocks_for(p->batches * p->m * p->n, THREADS), THREADS, 0, queue, *p));
    p->bias = NULL;
    p->accumulate = true;
    return HAPT_OK;
}

/* ---- The choice for a shape, made once ---- */

static cudaDataType_t data_type(int dtype)
{
    return dtype == HAPT_BF16 ? CUDA_R_16BF : dtype == HAPT_F16 ? CUDA_R_16F : CUDA_R_32F;
}

#define SET(function, object, attribute, value) \
    (status = status != CUBLAS_STATUS_SUCCESS ? status : function(object, attribute, &(value), sizeof(value)))

/* A matrix [rows][columns] as stored. */
static cublasStatus_t layout_create(cublasLtMatrixLayout_t *layout, int dtype, int64_t rows, int64_t columns,
                                    int64_t row, const struct shape *shape, int64_t stride)
{
    const int32_t batches = (int32_t)shape->batches;
    cublasStatus_t status =
        cublasLtMatrixLayoutCreate(layout, data_type(dtype), (uint64_t)columns, (uint64_t)rows, row);
    if (batches <= 1) return status;
    SET(cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, batches);
    return SET(cublasLtMatrixLayoutSetAttribute, *layout, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, stride);
}

/* `bias`: algorithms are searched for with a bias set. */
static cublasStatus_t descriptor_create(cublasLtMatmulDesc_t *descriptor, const struct shape *shape, const void *bias)
{
    const cublasOperation_t first = shape->transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N,
                            second = shape->transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    const cudaDataType_t type = data_type(shape->out);
    cublasStatus_t status = cublasLtMatmulDescCreate(
        descriptor, shape->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_TRANSA, first);
    SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_TRANSB, second);
    if (!shape->bias) return status;
    SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue);
    SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, type);
    SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, bias);
    if (shape->stride_bias)
        SET(cublasLtMatmulDescSetAttribute, *descriptor, CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, shape->stride_bias);
    return status;
}

/* Sums of a split k must go through the workspace: in-place sums are atomic, in random order. */
static cublasStatus_t preference_create(cublasLtMatmulPreference_t *preference, const struct shape *shape)
{
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
    cublasStatus_t status = cublasLtMatmulPreferenceCreate(preference);
    SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
        shape->workspace_bytes);
    SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, reduction);
    SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, shape->align_b);
    SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, shape->align_a);
    SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, shape->align_c);
    return SET(cublasLtMatmulPreferenceSetAttribute, *preference, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES,
               shape->align_c);
}

static void choice_release(struct choice *choice)
{
    if (choice->descriptor) cublasLtMatmulDescDestroy(choice->descriptor);
    if (choice->a) cublasLtMatrixLayoutDestroy(choice->a);
    if (choice->b) cublasLtMatrixLayoutDestroy(choice->b);
    if (choice->c) cublasLtMatrixLayoutDestroy(choice->c);
    memset(choice, 0, sizeof *choice);
}

static cublasStatus_t describe(struct choice *choice, const struct shape *s, const void *bias)
{
    cublasStatus_t status = descriptor_create(&choice->descriptor, s, bias);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = layout_create(&choice->a, s->in, s->transpose_a ? s->k : s->m, s->transpose_a ? s->m : s->k, s->row_a,
                               s, s->stride_a);
    if (status == CUBLAS_STATUS_SUCCESS)
        status = layout_create(&choice->b, s->in, s->transpose_b ? s->n : s->k, s->transpose_b ? s->k : s->n, s->row_b,
                               s, s->stride_b);
    return status == CUBLAS_STATUS_SUCCESS ? layout_create(&choice->c, s->out, s->m, s->n, s->row_c, s, s->stride_c)
                                           : status;
}

static cublasStatus_t choice_init(struct choice *choice, const struct shape *shape, const void *bias)
{
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t result;
    int found = 0;
    choice_release(choice);
    cublasStatus_t status = describe(choice, shape, bias);
    if (status == CUBLAS_STATUS_SUCCESS) status = preference_create(&preference, shape);
    if (status == CUBLAS_STATUS_SUCCESS) {
        status = cublasLtMatmulAlgoGetHeuristic(products.handle, choice->descriptor, choice->b, choice->a, choice->c,
                                                choice->c, preference, 1, &result, &found);
        choice->has_algorithm = status == CUBLAS_STATUS_SUCCESS && found > 0 && result.state == CUBLAS_STATUS_SUCCESS;
        const bool none = status == CUBLAS_STATUS_NOT_SUPPORTED || status == CUBLAS_STATUS_INVALID_VALUE ||
                          status == CUBLAS_STATUS_ARCH_MISMATCH;
        if (none) status = CUBLAS_STATUS_SUCCESS;
    }
    if (preference) cublasLtMatmulPreferenceDestroy(preference);
    if (choice->has_algorithm) choice->algorithm = result.algo;
    choice->shape = *shape;
    choice->known = status == CUBLAS_STATUS_SUCCESS;
    return status;
}

/* The entry of the shape in the table, or one to store it in. */
static struct choice *choice_slot(const struct shape *shape)
{
    const unsigned char *byte = (const unsigned char *)shape;
    uint64_t hash = 0xcbf29ce484222325u;
    for (size_t i = 0; i < sizeof *shape; i++) hash = (hash ^ byte[i]) * 0x100000001b3u;
    for (unsigned probe = 0; probe < PROBES; probe++) {
        struct choice *choice = &products.choice[(hash + probe) % SHAPES];
        if (!choice->known || !memcmp(&choice->shape, shape, sizeof *shape)) return choice;
    }
    return &products.choice[hash % SHAPES];
}

static cublasStatus_t choice_find(const struct shape *shape, const void *bias, struct choice **out)
{
    cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
    if (!products.handle) {
        status = cublasLtCreate(&products.handle);
        if (status != CUBLAS_STATUS_SUCCESS) return status;
    }
    *out = choice_slot(shape);
    if (!(*out)->known || memcmp(&(*out)->shape, shape, sizeof *shape)) status = choice_init(*out, shape, bias);
    return status;
}

/* ---- The product ---- */

/* Capped at ALIGNMENT, the alignment of tensors, so that a tensor's address does not change bits. */
static uint32_t alignment_of(const void *address)
{
    const uintptr_t bits = (uintptr_t)address | ALIGNMENT;
    return (uint32_t)(bits & -bits);
}

static struct shape shape_of(const struct product *p, size_t workspace_bytes)
{
    struct shape shape;
    memset(&shape, 0, sizeof shape);
    shape.m = p->m;
    shape.n = p->n;
    shape.k = p->k;
    shape.row_a = p->row_a;
    shape.row_b = p->row_b;
    shape.row_c = p->row_c;
    shape.batches = p->batches;
    if (p->batches > 1) {
        shape.stride_a = p->stride_a;
        shape.stride_b = p->stride_b;
        shape.stride_c = p->stride_c;
        shape.stride_bias = p->bias ? p->stride_bias : 0;
    }
    shape.workspace_bytes = workspace_bytes;
    shape.in = (int)p->in;
    shape.out = (int)p->out;
    shape.transpose_a = p->transpose_a;
    shape.transpose_b = p->transpose_b;
    shape.bias = p->bias != NULL;
    shape.accumulate = p->accumulate;
    shape.tf32 = p->in == HAPT_F32 && product_tf32();
    shape.align_a = alignment_of(p->a);
    shape.align_b = alignment_of(p->b);
    shape.align_c = alignment_of(p->c);
    shape.align_bias = alignment_of(p->bias);
    return shape;
}

/* Starts the product if it has an algorithm (`has_algorithm`). */
static cublasStatus_t start(const struct product *p, const struct shape *shape, void *workspace,
                            struct hapt_queue *queue, bool *has_algorithm)
{
    const float beta = p->accumulate ? 1.0f : 0.0f;
    struct choice *choice = NULL;
    cublasStatus_t status = choice_find(shape, p->bias, &choice);
    *has_algorithm = status == CUBLAS_STATUS_SUCCESS && choice->has_algorithm;
    if (!*has_algorithm) return status;
    if (p->bias) SET(cublasLtMatmulDescSetAttribute, choice->descriptor, CUBLASLT_MATMUL_DESC_BIAS_POINTER, p->bias);
    if (status != CUBLAS_STATUS_SUCCESS) return status;
    status = cublasLtMatmul(products.handle, choice->descriptor, &p->scale, p->b, choice->b, p->a, choice->a, &beta,
                            p->c, choice->c, p->c, choice->c, &choice->algorithm, workspace, shape->workspace_bytes,
                            queue->stream);
    if (queue->capturing) return status;
    if (status != CUBLAS_STATUS_NOT_SUPPORTED && status != CUBLAS_STATUS_INVALID_VALUE &&
        status != CUBLAS_STATUS_ARCH_MISMATCH)
        return status;
    choice->has_algorithm = *has_algorithm =
        false; /* cuBLASLt refuses its own algorithm: from here on the plain kernel */
    return CUBLAS_STATUS_SUCCESS;
}

enum hapt_status product_run(const struct product *product, void *workspace, size_t workspace_bytes,
                             struct hapt_queue *queue)
{
    struct product p = *product;
    bool has_algorithm = false;
    if (p.batches == 0) p.batches = 1;
    if (p.m <= 0 || p.n <= 0 || p.batches < 0) return HAPT_OK;
    if (!p.row_a) p.row_a = p.transpose_a ? p.m : p.k;
    if (!p.row_b) p.row_b = p.transpose_b ? p.k : p.n;
    if (!p.row_c) p.row_c = p.n;
    if (p.scale == 0.0f) p.scale = 1.0f;
    if (p.k <= 0 || p.batches > INT32_MAX) return product_plain(&p, queue);
    if (p.bias && !bias_aligned(&p)) {
        if (p.accumulate) return product_plain(&p, queue);
        HAPT_TRY(bias_first(&p, queue));
    }

    /* Aligned for cuBLASLt. The size has a limit by shape and does not depend on the start address, so the choice is
     * always the same. */
    const size_t wanted = product_workspace(p.m * p.n * p.batches),
                 given = workspace_bytes < wanted ? workspace_bytes : wanted;
    void *const aligned = (void *)(((uintptr_t)workspace + 255) & ~(uintptr_t)255);
    const size_t usable = workspace && given >= 256 ? (given - 192) & ~(size_t)255 : 0;
    const struct shape shape = shape_of(&p, usable);
    pthread_mutex_lock(&products.lock);
    const cublasStatus_t status = start(&p, &shape, usable ? aligned : NULL, queue, &has_algorithm);
    pthread_mutex_unlock(&products.lock);
    HAPT_TRY(product_check(status, "a product"));
    return has_algorithm ? HAPT_OK : product_plain(&p, queue);
}
