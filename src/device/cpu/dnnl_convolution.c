/*
 * Convolutions by oneDNN 2.x, which chooses its own blocked layouts. Operands are reordered into the workspace and the
 * result back out of it, unless oneDNN chooses the plain layout.
 */
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "convolution.h"
#include "hapt/arena.h"

enum { X, W, Y, OPERANDS };

/* One operand, in the caller's layout and in the convolution's. */
struct operand {
    dnnl_memory_desc_t plain, wanted;
    dnnl_memory_t caller, own; /* `own` is unused if the layouts are equal */
    dnnl_primitive_t reorder, reorder_add;
    bool equal;
    size_t offset; /* of `own` in the workspace */
};

/* One prepared convolution; memory objects are re-pointed at every call. */
struct plan {
    struct convolution key;
    dnnl_primitive_desc_t description;
    dnnl_primitive_t primitive; /* created at the first run */
    struct operand operand[OPERANDS];
    dnnl_memory_t bias, scratch;
    size_t bias_offset, scratch_offset, bytes;
};

static struct {
    pthread_mutex_t lock;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    struct plan **plan; /* [count] */
    int count, capacity;
} cache = {.lock = PTHREAD_MUTEX_INITIALIZER};

static enum hapt_status check(dnnl_status_t status, const char *what)
{
    if (status == dnnl_success) return HAPT_OK;
    if (status == dnnl_out_of_memory) return hapt_fail(HAPT_ERR_MEMORY, NULL, "oneDNN: no memory for %s", what);
    return hapt_fail(HAPT_ERR_INTERNAL, "bf16 convolutions need AVX-512; try --dtype fp32",
                     "oneDNN: %s failed (status %d)", what, (int)status);
}

static int result_of(enum convolution_kind kind)
{
    static const int result[CONVOLUTION_KINDS] = {
        [CONVOLUTION_FORWARD] = Y, [CONVOLUTION_DX] = X, [CONVOLUTION_DW] = W};
    return result[kind];
}

/* Plain layouts of the operands, and layouts left to oneDNN. Weight gradients are fp32. */
static enum hapt_status describe_operands(struct plan *plan, dnnl_memory_desc_t *any)
{
    const struct convolution *c = &plan->key;
    const bool grouped = c->groups > 1;
    const dnnl_dims_t whole = {c->out, c->in, c->kernel_height, c->kernel_width},
                      parts = {c->groups, c->out / c->groups, c->in / c->groups, c->kernel_height, c->kernel_width},
                      x = {c->rows, c->in, c->height, c->width}, y = {c->rows, c->out, c->out_height, c->out_width};
    const int64_t *const dims[OPERANDS] = {x, grouped ? parts : whole, y};
    for (int o = 0; o < OPERANDS; o++) {
        const bool half = c->dtype == HAPT_BF16 && !(o == W && c->kind == CONVOLUTION_DW);
        const dnnl_data_type_t type = half ? dnnl_bf16 : dnnl_f32;
        const bool five = o == W && grouped;
        HAPT_TRY(check(dnnl_memory_desc_init_by_tag(&plan->operand[o].plain, five ? 5 : 4, dims[o], type,
                                                    five ? dnnl_abcde : dnnl_abcd),
                       "a layout"));
        HAPT_TRY(
            check(dnnl_memory_desc_init_by_tag(&any[o], five ? 5 : 4, dims[o], type, dnnl_format_tag_any), "a layout"));
    }
    return HAPT_OK;
}

static enum hapt_status describe_convolution(struct plan *plan, const dnnl_memory_desc_t *any,
                                             const dnnl_memory_desc_t *bias)
{
    const struct convolution *c = &plan->key;
    const dnnl_dims_t strides = {c->stride, c->stride}, padding = {c->padding, c->padding},
                      holes = {c->dilation - 1, c->dilation - 1};
    dnnl_convolution_desc_t made;
    dnnl_primitive_attr_t attributes;
    dnnl_status_t status = dnnl_success;
    if (c->kind == CONVOLUTION_FORWARD)
        status =
            dnnl_dilated_convolution_forward_desc_init(&made, dnnl_forward_training, dnnl_convolution_direct, &any[X],
                                                       &any[W], bias, &any[Y], strides, holes, padding, padding);
    else if (c->kind == CONVOLUTION_DX)
        status = dnnl_dilated_convolution_backward_data_desc_init(&made, dnnl_convolution_direct, &any[X], &any[W],
                                                                  &any[Y], strides, holes, padding, padding);
    else
        status = dnnl_dilated_convolution_backward_weights_desc_init(&made, dnnl_convolution_direct, &any[X], &any[W],
                                                                     NULL, &any[Y], strides, holes, padding, padding);
    HAPT_TRY(check(status, "the description of a convolution"));
    dnnl_primitive_desc_t hint = NULL; /* backward passes need the description of their forward pass */
    if (c->kind != CONVOLUTION_FORWARD) {
        dnnl_convolution_desc_t forward;
        dnnl_memory_desc_t weights = any[W];
        if (c->dtype == HAPT_BF16) weights.data_type = dnnl_bf16;
        HAPT_TRY(check(dnnl_dilated_convolution_forward_desc_init(&forward, dnnl_forward_training,
                                                                  dnnl_convolution_direct, &any[X], &weights, NULL,
                                                                  &any[Y], strides, holes, padding, padding),
                       "the description of a convolution"));
        HAPT_TRY(check(dnnl_primitive_desc_create(&hint, &forward, NULL, cache.engine, NULL), "a convolution"));
    }
    status = dnnl_primitive_attr_create(&attributes);
    if (status == dnnl_success) {
        dnnl_primitive_attr_set_scratchpad_mode(attributes, dnnl_scratchpad_mode_user);
        status = dnnl_primitive_desc_create(&plan->description, &made, attributes, cache.engine, hint);
        dnnl_primitive_attr_destroy(attributes);
    }
    if (hint) dnnl_primitive_desc_destroy(hint);
    return check(status, "a convolution");
}

/* Reserves `bytes` of the workspace. */
static size_t reserve(struct plan *plan, size_t bytes)
{
    const size_t offset = plan->bytes;
    plan->bytes += hapt_align(bytes);
    return offset;
}

static void lay_out(struct plan *plan)
{
    static const dnnl_query_t forward[OPERANDS] = {dnnl_query_src_md, dnnl_query_weights_md, dnnl_query_dst_md};
    static const dnnl_query_t gradient[OPERANDS] = {dnnl_query_diff_src_md, dnnl_query_diff_weights_md,
                                                    dnnl_query_diff_dst_md};
    const enum convolution_kind kind = plan->key.kind;
    for (int o = 0; o < OPERANDS; o++) {
        struct operand *operand = &plan->operand[o];
        const bool is_gradient = kind != CONVOLUTION_FORWARD && (o == Y || o == result_of(kind));
        operand->wanted = *dnnl_primitive_desc_query_md(plan->description, is_gradient ? gradient[o] : forward[o], 0);
        operand->equal = dnnl_memory_desc_equal(&operand->plain, &operand->wanted);
        /* A result that may be added to always needs its own buffer. */
        if (!operand->equal || (o == result_of(kind) && kind != CONVOLUTION_FORWARD))
            operand->offset = reserve(plan, dnnl_memory_desc_get_size(&operand->wanted));
    }
    plan->bias_offset = reserve(plan, kind == CONVOLUTION_FORWARD ? (size_t)plan->key.out * sizeof(float) : 0);
    plan->scratch_offset = reserve(
        plan, dnnl_memory_desc_get_size(dnnl_primitive_desc_query_md(plan->description, dnnl_query_scratchpad_md, 0)));
}

static enum hapt_status make_reorder(const dnnl_memory_desc_t *from, const dnnl_memory_desc_t *to, bool add,
                                     dnnl_primitive_t *reorder)
{
    dnnl_primitive_desc_t description = NULL;
    dnnl_primitive_attr_t attributes;
    dnnl_post_ops_t post;
    HAPT_TRY(check(dnnl_primitive_attr_create(&attributes), "attributes"));
    dnnl_status_t status = dnnl_post_ops_create(&post);
    if (status == dnnl_success) {
        if (add) status = dnnl_post_ops_append_sum(post, 1.0f);
        if (status == dnnl_success) status = dnnl_primitive_attr_set_post_ops(attributes, post);
        dnnl_post_ops_destroy(post);
    }
    if (status == dnnl_success)
        status = dnnl_reorder_primitive_desc_create(&description, from, cache.engine, to, cache.engine, attributes);
    dnnl_primitive_attr_destroy(attributes);
    HAPT_TRY(check(status, "a change of layout"));
    status = dnnl_primitive_create(reorder, description);
    dnnl_primitive_desc_destroy(description);
    return check(status, "a change of layout");
}

static enum hapt_status make_memory(dnnl_memory_t *memory, const dnnl_memory_desc_t *description)
{
    return check(dnnl_memory_create(memory, description, cache.engine, DNNL_MEMORY_NONE), "an image");
}

/* Creates what a run needs; oneDNN generates its code here. */
static enum hapt_status complete(struct plan *plan)
{
    const enum convolution_kind kind = plan->key.kind;
    for (int o = 0; o < OPERANDS; o++) {
        struct operand *operand = &plan->operand[o];
        const bool result = o == result_of(kind);
        HAPT_TRY(make_memory(&operand->caller, &operand->plain));
        HAPT_TRY(make_memory(&operand->own, &operand->wanted));
        if (!operand->equal)
            HAPT_TRY(make_reorder(result ? &operand->wanted : &operand->plain,
                                  result ? &operand->plain : &operand->wanted, false, &operand->reorder));
        if (result && kind != CONVOLUTION_FORWARD)
            HAPT_TRY(make_reorder(&operand->wanted, &operand->plain, true, &operand->reorder_add));
    }
    if (kind == CONVOLUTION_FORWARD)
        HAPT_TRY(make_memory(&plan->bias, dnnl_primitive_desc_query_md(plan->description, dnnl_query_weights_md, 1)));
    HAPT_TRY(make_memory(&plan->scratch, dnnl_primitive_desc_query_md(plan->description, dnnl_query_scratchpad_md, 0)));
    return check(dnnl_primitive_create(&plan->primitive, plan->description), "a convolution");
}

/* The forward always has a bias: without one it reads zeros, so that one plan serves both cases. */
static enum hapt_status prepare(struct plan *plan)
{
    dnnl_memory_desc_t any[OPERANDS], bias;
    const dnnl_dims_t channels = {plan->key.out};
    if (!cache.engine) HAPT_TRY(check(dnnl_engine_create(&cache.engine, dnnl_cpu, 0), "the engine"));
    if (!cache.stream)
        HAPT_TRY(check(dnnl_stream_create(&cache.stream, cache.engine, dnnl_stream_default_flags), "the stream"));
    HAPT_TRY(describe_operands(plan, any));
    HAPT_TRY(check(
        dnnl_memory_desc_init_by_tag(&bias, 1, channels, plan->key.dtype == HAPT_BF16 ? dnnl_bf16 : dnnl_f32, dnnl_a),
        "a layout"));
    HAPT_TRY(describe_convolution(plan, any, &bias));
    lay_out(plan);
    return HAPT_OK;
}

static bool same(const struct convolution *a, const struct convolution *b)
{
    return a->kind == b->kind && a->dtype == b->dtype && a->rows == b->rows && a->in == b->in &&
           a->height == b->height && a->width == b->width && a->out == b->out && a->out_height == b->out_height &&
           a->out_width == b->out_width && a->kernel_height == b->kernel_height && a->kernel_width == b->kernel_width &&
           a->stride == b->stride && a->padding == b->padding && a->groups == b->groups && a->dilation == b->dilation &&
           a->threads == b->threads;
}

static void plan_release(struct plan *plan)
{
    for (int o = 0; o < OPERANDS; o++) {
        if (plan->operand[o].caller) dnnl_memory_destroy(plan->operand[o].caller);
        if (plan->operand[o].own) dnnl_memory_destroy(plan->operand[o].own);
        if (plan->operand[o].reorder) dnnl_primitive_destroy(plan->operand[o].reorder);
        if (plan->operand[o].reorder_add) dnnl_primitive_destroy(plan->operand[o].reorder_add);
    }
    if (plan->bias) dnnl_memory_destroy(plan->bias);
    if (plan->scratch) dnnl_memory_destroy(plan->scratch);
    if (plan->primitive) dnnl_primitive_destroy(plan->primitive);
    if (plan->description) dnnl_primitive_desc_destroy(plan->description);
    free(plan);
}

/* oneDNN chooses by the current number of threads. Call with the lock held. */
static enum hapt_status find(const struct convolution *convolution, struct plan **found)
{
    if (convolution->threads > 0 && omp_get_max_threads() != convolution->threads)
        omp_set_num_threads(convolution->threads);
    for (int i = 0; i < cache.count; i++) {
        if (!same(&cache.plan[i]->key, convolution)) continue;
        *found = cache.plan[i];
        return HAPT_OK;
    }
    if (cache.count == cache.capacity) {
        const int capacity = cache.capacity ? 2 * cache.capacity : 64;
        struct plan **grown = realloc(cache.plan, (size_t)capacity * sizeof *grown);
        if (!grown) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for %d prepared convolutions", capacity);
        cache.plan = grown;
        cache.capacity = capacity;
    }
    struct plan *plan = calloc(1, sizeof *plan);
    if (!plan) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no host memory for a prepared convolution");
    plan->key = *convolution;
    const enum hapt_status status = prepare(plan);
    if (status != HAPT_OK) {
        plan_release(plan);
        return status;
    }
    *found = cache.plan[cache.count++] = plan;
    return HAPT_OK;
}

size_t hapt_convolution_workspace(const struct convolution *convolution)
{
    struct plan *plan = NULL;
    pthread_mutex_lock(&cache.lock);
    if (find(convolution, &plan) != HAPT_OK) hapt_fail_reset();
    const size_t bytes = plan ? plan->bytes : 0;
    pthread_mutex_unlock(&cache.lock);
    return bytes;
}

static enum hapt_status change_layout(dnnl_primitive_t reorder, dnnl_memory_t from, dnnl_memory_t to)
{
    const dnnl_exec_arg_t argument[2] = {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}};
    return check(dnnl_primitive_execute(reorder, cache.stream, 2, argument), "a change of layout");
}

static enum hapt_status execute(struct plan *plan, dnnl_memory_t *operand)
{
    static const int argument_of[CONVOLUTION_KINDS][OPERANDS] = {
        [CONVOLUTION_FORWARD] = {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST},
        [CONVOLUTION_DX] = {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST},
        [CONVOLUTION_DW] = {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST}};
    const int *of = argument_of[plan->key.kind];
    const dnnl_exec_arg_t argument[] = {{of[X], operand[X]},
                                        {of[W], operand[W]},
                                        {of[Y], operand[Y]},
                                        {DNNL_ARG_SCRATCHPAD, plan->scratch},
                                        {DNNL_ARG_BIAS, plan->bias}};
    const int count = plan->key.kind == CONVOLUTION_FORWARD ? 5 : 4;
    return check(dnnl_primitive_execute(plan->primitive, cache.stream, count, argument), "a convolution");
}

static enum hapt_status run(struct plan *plan, const void *const data[OPERANDS], const void *bias, bool accumulate,
                            char *workspace)
{
    const int result = result_of(plan->key.kind);
    dnnl_memory_t operand[OPERANDS];
    if (!plan->primitive) HAPT_TRY(complete(plan));
    for (int o = 0; o < OPERANDS; o++) {
        struct operand *its = &plan->operand[o];
        const bool direct = its->equal && !(o == result && accumulate);
        dnnl_memory_set_data_handle(its->caller, (void *)data[o]);
        if (!direct) dnnl_memory_set_data_handle(its->own, workspace + its->offset);
        operand[o] = direct ? its->caller : its->own;
        if (!direct && o != result) HAPT_TRY(change_layout(its->reorder, its->caller, its->own));
    }
    if (plan->bias) {
        if (!bias) bias = memset(workspace + plan->bias_offset, 0, (size_t)plan->key.out * sizeof(float));
        dnnl_memory_set_data_handle(plan->bias, (void *)bias);
    }
    dnnl_memory_set_data_handle(plan->scratch, workspace + plan->scratch_offset);
    HAPT_TRY(execute(plan, operand));
    struct operand *made = &plan->operand[result];
    if (operand[result] == made->caller) return HAPT_OK;
    return change_layout(accumulate ? made->reorder_add : made->reorder, made->own, made->caller);
}

enum hapt_status hapt_convolution_run(const struct convolution *convolution, const void *x, const void *w,
                                      const void *y, const void *bias, bool accumulate, void *workspace)
{
    struct plan *plan = NULL;
    const void *const data[OPERANDS] = {x, w, y};
    pthread_mutex_lock(&cache.lock);
    enum hapt_status status = find(convolution, &plan);
    if (status == HAPT_OK) status = run(plan, data, bias, accumulate, workspace);
    pthread_mutex_unlock(&cache.lock);
    return status;
}
