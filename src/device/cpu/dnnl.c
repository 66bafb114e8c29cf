/* Matrix products by oneDNN 2.x: dnnl_sgemm in fp32, cached matmul primitives for everything else. */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "gemm.h"

/* One prepared product; memory objects are re-pointed at every call. */
struct plan {
    struct gemm key; /* pointers unused; bias non-NULL: has one */
    dnnl_primitive_t primitive;
    dnnl_memory_t a, b, c, bias;
};

static struct {
    pthread_mutex_t lock;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct plan *plan; /* [count] */
    int count, capacity;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

static enum hapt_status check(dnnl_status_t status, const char *what)
{
    if (status == dnnl_success) return HAPT_OK;
    if (status == dnnl_out_of_memory) return hapt_fail(HAPT_ERR_MEMORY, NULL, "oneDNN: no memory for %s", what);
    return hapt_fail(HAPT_ERR_INTERNAL, "bf16 products need AVX-512; try --dtype fp32", "oneDNN: %s failed (status %d)",
                     what, (int)status);
}

static dnnl_data_type_t dnnl_type(enum hapt_dtype dtype)
{
    return dtype == HAPT_BF16 ? dnnl_bf16 : dnnl_f32;
}

static bool same_plan(const struct gemm *a, const struct gemm *b)
{
    return a->m == b->m && a->n == b->n && a->k == b->k && a->transpose_a == b->transpose_a &&
           a->transpose_b == b->transpose_b && a->in == b->in && a->out == b->out && a->accumulate == b->accumulate &&
           a->threads == b->threads && !a->bias == !b->bias;
}

static enum hapt_status describe(dnnl_memory_desc_t *md, int64_t rows, int64_t columns, bool transposed,
                                 enum hapt_dtype dtype)
{
    const dnnl_dims_t dims = {rows, columns};
    const dnnl_dims_t strides = {transposed ? 1 : columns, transposed ? rows : 1};
    return check(dnnl_memory_desc_init_by_strides(md, 2, dims, dnnl_type(dtype), strides), "a matrix description");
}

static enum hapt_status create_primitive(struct plan *plan, const dnnl_matmul_desc_t *matmul)
{
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t post;
    HAPT_TRY(check(dnnl_primitive_attr_create(&attributes), "attributes"));
    enum hapt_status status = check(dnnl_post_ops_create(&post), "post operations");
    if (status == HAPT_OK) {
        if (plan->key.accumulate) status = check(dnnl_post_ops_append_sum(post, 1.0f), "a sum");
        if (status == HAPT_OK) status = check(dnnl_primitive_attr_set_post_ops(attributes, post), "post operations");
        dnnl_post_ops_destroy(post);
    }
    dnnl_primitive_desc_t description = NULL;
    if (status == HAPT_OK)
        status = check(dnnl_primitive_desc_create(&description, matmul, attributes, cache.engine, NULL), "a product");
    dnnl_primitive_attr_destroy(attributes);
    if (status != HAPT_OK) return status;
    status = check(dnnl_primitive_create(&plan->primitive, description), "a product");
    dnnl_primitive_desc_destroy(description);
    return status;
}

static void plan_release(struct plan *plan)
{
    if (plan->primitive) dnnl_primitive_destroy(plan->primitive);
    if (plan->a) dnnl_memory_destroy(plan->a);
    if (plan->b) dnnl_memory_destroy(plan->b);
    if (plan->c) dnnl_memory_destroy(plan->c);
    if (plan->bias) dnnl_memory_destroy(plan->bias);
}

static enum hapt_status plan_build(struct plan *plan)
{
    const struct gemm *key = &plan->key;
    dnnl_memory_desc_t a, b, c, bias;
    HAPT_TRY(describe(&a, key->m, key->k, key->transpose_a, key->in));
    HAPT_TRY(describe(&b, key->k, key->n, key->transpose_b, key->in));
    HAPT_TRY(describe(&c, key->m, key->n, false, key->out));
    HAPT_TRY(describe(&bias, 1, key->n, false, key->in));
    dnnl_matmul_desc_t matmul;
    HAPT_TRY(check(dnnl_matmul_desc_init(&matmul, &a, &b, key->bias ? &bias : NULL, &c), "a product"));
    HAPT_TRY(create_primitive(plan, &matmul));
    HAPT_TRY(check(dnnl_memory_create(&plan->a, &a, cache.engine, DNNL_MEMORY_NONE), "a matrix"));
    HAPT_TRY(check(dnnl_memory_create(&plan->b, &b, cache.engine, DNNL_MEMORY_NONE), "a matrix"));
    HAPT_TRY(check(dnnl_memory_create(&plan->c, &c, cache.engine, DNNL_MEMORY_NONE), "a matrix"));
    return check(dnnl_memory_create(&plan->bias, &bias, cache.engine, DNNL_MEMORY_NONE), "a matrix");
}

static enum hapt_status plan_find(const struct gemm *gemm, struct plan **found)
{
    for (int i = 0; i < cache.count; i++)
        if (same_plan(&cache.plan[i].key, gemm)) {
            *found = &cache.plan[i];
            return HAPT_OK;
        }
    if (!cache.engine) HAPT_TRY(check(dnnl_engine_create(&cache.engine, dnnl_cpu, 0), "the engine"));
    if (!cache.stream)
        HAPT_TRY(check(dnnl_stream_create(&cache.stream, cache.engine, dnnl_stream_default_flags), "the stream"));
    if (cache.count == cache.capacity) {
        const int capacity = cache.capacity ? 2 * cache.capacity : 64;
        struct plan *grown = realloc(cache.plan, (size_t)capacity * sizeof *grown);
        if (!grown) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for %d prepared products", capacity);
        cache.plan = grown;
        cache.capacity = capacity;
    }
    struct plan *plan = &cache.plan[cache.count];
    *plan = (struct plan){.key = *gemm};
    const enum hapt_status status = plan_build(plan);
    if (status != HAPT_OK) {
        plan_release(plan);
        return status;
    }
    cache.count++;
    *found = plan;
    return HAPT_OK;
}

static enum hapt_status run_plan(const struct gemm *gemm)
{
    struct plan *plan = NULL;
    HAPT_TRY(plan_find(gemm, &plan));
    dnnl_memory_set_data_handle(plan->a, (void *)gemm->a);
    dnnl_memory_set_data_handle(plan->b, (void *)gemm->b);
    dnnl_memory_set_data_handle(plan->c, gemm->c);
    dnnl_memory_set_data_handle(plan->bias, (void *)gemm->bias);
    const dnnl_exec_arg_t argument[4] = {
        {DNNL_ARG_SRC, plan->a}, {DNNL_ARG_WEIGHTS, plan->b}, {DNNL_ARG_DST, plan->c}, {DNNL_ARG_BIAS, plan->bias}};
    return check(dnnl_primitive_execute(plan->primitive, cache.stream, gemm->bias ? 4 : 3, argument), "a product");
}

enum hapt_status hapt_gemm_run(const struct gemm *gemm)
{
    if (gemm->threads > 0 && omp_get_max_threads() != gemm->threads) omp_set_num_threads(gemm->threads);
    if (gemm->in == HAPT_F32 && !gemm->bias) {
        const int64_t lda = gemm->transpose_a ? gemm->m : gemm->k, ldb = gemm->transpose_b ? gemm->k : gemm->n;
        return check(dnnl_sgemm(gemm->transpose_a ? 'T' : 'N', gemm->transpose_b ? 'T' : 'N', gemm->m, gemm->n, gemm->k,
                                1.0f, gemm->a, lda, gemm->b, ldb, gemm->accumulate ? 1.0f : 0.0f, gemm->c, gemm->n),
                     "a product");
    }
    pthread_mutex_lock(&cache.lock);
    const enum hapt_status status = run_plan(gemm);
    pthread_mutex_unlock(&cache.lock);
    return status;
}

const char *hapt_gemm_library(void)
{
    static char text[32];
    const dnnl_version_t *version = dnnl_version();
    snprintf(text, sizeof text, "oneDNN %d.%d.%d", version->major, version->minor, version->patch);
    return text;
}
