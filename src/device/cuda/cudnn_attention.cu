/*
 * Attention by cuDNN. It is described as products, elementwise operations and reductions, which cuDNN recognises and
 * runs as one kernel (forward) or three (backward). To be deterministic, the backward pass stores the gradients of all
 * scores, in a workspace that grows with the square of the length. So it runs for a share of the heads at a time.
 */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "cudnn_attention.h"
#include "cudnn_plans.h"

/*
 * Workspace that the shares of a backward pass are made for (HAPT_CUDNN_ATTENTION_MIB). On an H200, 16 sequences of
 * 1024 with 12 heads of 64 columns take 324 us at once, 368 us in halves, and 448 us in quarters. One head may take
 * MOST_MIB; longer sequences are left to hapt's own kernels, which need none.
 */
enum { SHARE_MIB = 400, MOST_MIB = 1024 };

enum { OPERATIONS = 40, ATTENTION_OPERANDS = 16, FIRST_VIRTUAL = 100, KEY_TILE = 128, LEAST_BYTES = 1 << 20 };
enum { MOST_FORWARD = 256, MOST_BACKWARD = 128 }; /* columns of a head */
enum {
    UID_Q = 1,
    UID_K,
    UID_V,
    UID_OUT,
    UID_STATISTICS, /* logsumexp */
    UID_DOUT,
    UID_DQ,
    UID_DK,
    UID_DV,
    UID_DELTA,
    UID_SCALE,
    UID_HIDDEN,
    UID_ONE
};

struct attention_key {
    char kind[8];
    int64_t batch, length, keys, heads, kv_heads, head, q_width, kv_width, out_width, all_heads;
    int dtype, causal, backward;
    int row_alignment; /* bytes: of statistics and delta, where a share starts */
    size_t workspace_bytes;
};

/* ---- The graph ---- */

struct graph {
    struct descriptor_list *list;
    const struct attention_key *key;
    cudnnBackendDescriptor_t operation[OPERATIONS];
    int operations;
    int64_t next;
};

typedef cudnnBackendDescriptor_t tensor;

/* Heads of queries, of a tensor of rows `width` wide. */
static tensor queries_make(struct graph *graph, int64_t uid, int64_t width)
{
    const struct attention_key *key = graph->key;
    const int64_t shape[4] = {key->batch, key->heads, key->length, key->head},
                  stride[4] = {key->length * width, key->head, width, 1};
    return cudnn_tensor(graph->list, uid, shape, stride, cudnn_type(key->dtype), CUDNN_ALIGNMENT);
}

/* Heads of keys or values. */
static tensor keys_make(struct graph *graph, int64_t uid, bool turned)
{
    const struct attention_key *key = graph->key;
    const int64_t width = key->kv_width,
                  shape[4] = {key->batch, key->kv_heads, turned ? key->head : key->keys,
                              turned ? key->keys : key->head},
                  stride[4] = {key->keys * width, key->head, turned ? 1 : width, turned ? width : 1};
    return cudnn_tensor(graph->list, uid, shape, stride, cudnn_type(key->dtype), CUDNN_ALIGNMENT);
}

/* [batch][heads][length], of all heads of the call. */
static tensor rows_make(struct graph *graph, int64_t uid)
{
    const struct attention_key *key = graph->key;
    const int64_t shape[4] = {key->batch, key->heads, key->length, 1},
                  stride[4] = {key->all_heads * key->length, key->length, 1, 1};
    return cudnn_tensor(graph->list, uid, shape, stride, CUDNN_DATA_FLOAT, key->row_alignment);
}

/* Virtual tensors [batch][heads][length][columns]. */
static tensor between(struct graph *graph, int64_t columns, cudnnDataType_t type)
{
    const struct attention_key *key = graph->key;
    const int64_t shape[4] = {key->batch, key->heads, key->length, columns};
    return cudnn_virtual(graph->list, graph->next++, shape, NULL, type);
}

static tensor scores(struct graph *graph)
{
    return between(graph, graph->key->keys, CUDNN_DATA_FLOAT);
}

static void operation_end(struct graph *graph, cudnnBackendDescriptor_t operation)
{
    cudnn_finalize(graph->list, operation);
    graph->operation[graph->operations++] = operation;
}

static void give(struct graph *graph, cudnnBackendDescriptor_t operation, cudnnBackendAttributeName_t name,
                 cudnnBackendDescriptor_t value)
{
    cudnn_set(graph->list, operation, name, CUDNN_TYPE_BACKEND_DESCRIPTOR, 1, &value);
}

/* y = a * b, per head. */
static tensor product(struct graph *graph, tensor a, tensor b, tensor y)
{
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = cudnn_make(graph->list, CUDNN_BACKEND_MATMUL_DESCRIPTOR);
    cudnn_set(graph->list, how, CUDNN_ATTR_MATMUL_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_finalize(graph->list, how);
    cudnnBackendDescriptor_t operation = cudnn_make(graph->list, CUDNN_BACKEND_OPERATION_MATMUL_DESCRIPTOR);
    give(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_ADESC, a);
    give(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_BDESC, b);
    give(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_CDESC, y);
    give(graph, operation, CUDNN_ATTR_OPERATION_MATMUL_DESC, how);
    operation_end(graph, operation);
    return y;
}

/* y = mode(x, b, t); b and t may be NULL; `axis` is for indices. */
static tensor pointwise(struct graph *graph, cudnnPointwiseMode_t mode, tensor x, tensor b, tensor t, tensor y,
                        int64_t axis)
{
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = cudnn_make(graph->list, CUDNN_BACKEND_POINTWISE_DESCRIPTOR);
    cudnn_set(graph->list, how, CUDNN_ATTR_POINTWISE_MODE, CUDNN_TYPE_POINTWISE_MODE, 1, &mode);
    cudnn_set(graph->list, how, CUDNN_ATTR_POINTWISE_MATH_PREC, CUDNN_TYPE_DATA_TYPE, 1, &type);
    if (mode == CUDNN_POINTWISE_GEN_INDEX)
        cudnn_set(graph->list, how, CUDNN_ATTR_POINTWISE_AXIS, CUDNN_TYPE_INT64, 1, &axis);
    cudnn_finalize(graph->list, how);
    cudnnBackendDescriptor_t operation = cudnn_make(graph->list, CUDNN_BACKEND_OPERATION_POINTWISE_DESCRIPTOR);
    give(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_PW_DESCRIPTOR, how);
    give(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_XDESC, x);
    if (b) give(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_BDESC, b);
    if (t) give(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_TDESC, t);
    give(graph, operation, CUDNN_ATTR_OPERATION_POINTWISE_YDESC, y);
    operation_end(graph, operation);
    return y;
}

/* Scores, combined elementwise with another tensor. */
static tensor combine(struct graph *graph, cudnnPointwiseMode_t mode, tensor x, tensor b)
{
    return pointwise(graph, mode, x, b, NULL, scores(graph), 0);
}

static tensor reduce(struct graph *graph, cudnnReduceTensorOp_t mode, tensor x, tensor y)
{
    const cudnnDataType_t type = CUDNN_DATA_FLOAT;
    cudnnBackendDescriptor_t how = cudnn_make(graph->list, CUDNN_BACKEND_REDUCTION_DESCRIPTOR);
    cudnn_set(graph->list, how, CUDNN_ATTR_REDUCTION_OPERATOR, CUDNN_TYPE_REDUCTION_OPERATOR_TYPE, 1, &mode);
    cudnn_set(graph->list, how, CUDNN_ATTR_REDUCTION_COMP_TYPE, CUDNN_TYPE_DATA_TYPE, 1, &type);
    cudnn_finalize(graph->list, how);
    cudnnBackendDescriptor_t operation = cudnn_make(graph->list, CUDNN_BACKEND_OPERATION_REDUCTION_DESCRIPTOR);
    give(graph, operation, CUDNN_ATTR_OPERATION_REDUCTION_XDESC, x);
    give(graph, operation, CUDNN_ATTR_OPERATION_REDUCTION_YDESC, y);
    give(graph, operation, CUDNN_ATTR_OPERATION_REDUCTION_DESC, how);
    operation_end(graph, operation);
    return y;
}

/* The same elements under another shape. */
static tensor reshape(struct graph *graph, tensor x, tensor y)
{
    cudnnBackendDescriptor_t operation = cudnn_make(graph->list, CUDNN_BACKEND_OPERATION_RESHAPE_DESCRIPTOR);
    give(graph, operation, CUDNN_ATTR_OPERATION_RESHAPE_XDESC, x);
    give(graph, operation, CUDNN_ATTR_OPERATION_RESHAPE_YDESC, y);
    operation_end(graph, operation);
    return y;
}

/* Scores with those that a query may not see at UID_HIDDEN's number. */
static tensor mask(struct graph *graph, tensor score)
{
    if (!graph->key->causal) return score;
    const int64_t keys = graph->key->keys;
    tensor row =
        pointwise(graph, CUDNN_POINTWISE_GEN_INDEX, score, NULL, NULL, between(graph, keys, CUDNN_DATA_INT32), 2);
    tensor column =
        pointwise(graph, CUDNN_POINTWISE_GEN_INDEX, score, NULL, NULL, between(graph, keys, CUDNN_DATA_INT32), 3);
    tensor seen =
        pointwise(graph, CUDNN_POINTWISE_CMP_GE, row, column, NULL, between(graph, keys, CUDNN_DATA_BOOLEAN), 0);
    return pointwise(graph, CUDNN_POINTWISE_BINARY_SELECT, score, cudnn_number(graph->list, UID_HIDDEN), seen,
                     scores(graph), 0);
}

static void forward_graph(struct graph *graph)
{
    const struct attention_key *key = graph->key;
    tensor q = queries_make(graph, UID_Q, key->q_width), k = keys_make(graph, UID_K, true),
           v = keys_make(graph, UID_V, false), out = queries_make(graph, UID_OUT, key->out_width),
           statistics = rows_make(graph, UID_STATISTICS);
    tensor score = product(graph, q, k, scores(graph));
    score = combine(graph, CUDNN_POINTWISE_MUL, score, cudnn_number(graph->list, UID_SCALE));
    score = mask(graph, score);
    tensor top = reduce(graph, CUDNN_REDUCE_TENSOR_MAX, score, between(graph, 1, CUDNN_DATA_FLOAT));
    score = combine(graph, CUDNN_POINTWISE_SUB, score, top);
    score = pointwise(graph, CUDNN_POINTWISE_EXP, score, NULL, NULL, scores(graph), 0);
    tensor total = reduce(graph, CUDNN_REDUCE_TENSOR_ADD, score, between(graph, 1, CUDNN_DATA_FLOAT));
    tensor logarithm = pointwise(graph, CUDNN_POINTWISE_LOG, total, NULL, NULL, between(graph, 1, CUDNN_DATA_FLOAT), 0);
    pointwise(graph, CUDNN_POINTWISE_ADD, top, logarithm, NULL, statistics, 0);
    tensor weight =
        pointwise(graph, CUDNN_POINTWISE_DIV, score, total, NULL, between(graph, key->keys, cudnn_type(key->dtype)), 0);
    product(graph, weight, v, out);
}

/* Scores turned: [batch][heads][keys][queries], as elements. */
static tensor turn(struct graph *graph, tensor score)
{
    const struct attention_key *key = graph->key;
    const int64_t all = key->length * key->keys, shape[4] = {key->batch, key->heads, key->keys, key->length},
                  stride[4] = {key->heads * all, all, 1, key->keys};
    return reshape(graph, score, cudnn_virtual(graph->list, graph->next++, shape, stride, cudnn_type(key->dtype)));
}

/* The product with turned scores: the gradient of keys or values. Heads of queries that share a head are summed. */
static void to_keys(struct graph *graph, tensor score, tensor rows, int64_t uid)
{
    const struct attention_key *key = graph->key;
    tensor result = keys_make(graph, uid, false);
    if (key->heads == key->kv_heads) {
        product(graph, score, rows, result);
        return;
    }
    const int64_t shape[4] = {key->batch, key->heads, key->keys, key->head};
    reduce(graph, CUDNN_REDUCE_TENSOR_ADD,
           product(graph, score, rows, cudnn_virtual(graph->list, graph->next++, shape, NULL, cudnn_type(key->dtype))),
           result);
}

static void backward_graph(struct graph *graph)
{
    const struct attention_key *key = graph->key;
    tensor q = queries_make(graph, UID_Q, key->q_width), k = keys_make(graph, UID_K, true),
           v = keys_make(graph, UID_V, true), out = queries_make(graph, UID_OUT, key->out_width),
           dout = queries_make(graph, UID_DOUT, key->out_width), statistics = rows_make(graph, UID_STATISTICS),
           delta = rows_make(graph, UID_DELTA);
    tensor scale = cudnn_number(graph->list, UID_SCALE);
    tensor both =
        pointwise(graph, CUDNN_POINTWISE_MUL, dout, out, NULL, between(graph, key->head, CUDNN_DATA_FLOAT), 0);
    tensor sum = reduce(graph, CUDNN_REDUCE_TENSOR_ADD, both, between(graph, 1, CUDNN_DATA_FLOAT));
    pointwise(graph, CUDNN_POINTWISE_MUL, sum, cudnn_number(graph->list, UID_ONE), NULL, delta, 0);

    tensor weight = product(graph, q, k, scores(graph));
    weight = combine(graph, CUDNN_POINTWISE_MUL, weight, scale);
    weight = combine(graph, CUDNN_POINTWISE_SUB, weight, statistics);
    weight = mask(graph, weight);
    weight = pointwise(graph, CUDNN_POINTWISE_EXP, weight, NULL, NULL, scores(graph), 0);
    to_keys(graph, turn(graph, weight), dout, UID_DV);

    tensor dscore = product(graph, dout, v, scores(graph));
    dscore = combine(graph, CUDNN_POINTWISE_SUB, dscore, delta);
    dscore = combine(graph, CUDNN_POINTWISE_MUL, dscore, weight);
    dscore = combine(graph, CUDNN_POINTWISE_MUL, dscore, scale);
    to_keys(graph, turn(graph, dscore), q, UID_DK);

    const int64_t shape[4] = {key->batch, key->kv_heads, key->keys, key->head},
                  stride[4] = {key->keys * key->kv_width, key->head, key->kv_width, 1};
    tensor keys = reshape(graph, k, cudnn_virtual(graph->list, graph->next++, shape, stride, cudnn_type(key->dtype)));
    product(graph, dscore, keys, queries_make(graph, UID_DQ, key->q_width));
}

static cudnnBackendDescriptor_t attention_graph(struct descriptor_list *list, const void *of)
{
    struct graph graph = {list, (const struct attention_key *)of, {}, 0, FIRST_VIRTUAL};
    if (graph.key->backward)
        backward_graph(&graph);
    else
        forward_graph(&graph);
    return cudnn_graph(list, graph.operation, graph.operations);
}

/* Sums in one order. */
static bool attention_accepts(const cudnnBackendNumericalNote_t *note, int64_t notes, const void *)
{
    for (int64_t n = 0; n < notes; n++)
        if (note[n] == CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC) return false;
    return true;
}

/* ---- Shares of a call ---- */

/* cuDNN's workspace for some heads of keys of some sequences: for every head of queries a square of score gradients
 * and, where it shares keys, its own gradients of keys and values. */
static int64_t share_bytes(const struct attention *at, bool backward, int64_t batch, int64_t kv_heads)
{
    const int64_t heads = batch * kv_heads * (at->heads / at->kv_heads), side = round_up(at->length, KEY_TILE),
                  other = round_up(at->keys, KEY_TILE);
    const int64_t square = 2 * side * other, rows = at->heads > at->kv_heads ? 2 * 2 * other * at->head : 0;
    return LEAST_BYTES + (backward ? heads * (square + rows) : 0);
}

static int64_t share_limit(void)
{
    const char *given = getenv("HAPT_CUDNN_ATTENTION_MIB");
    const long mib = given ? strtol(given, NULL, 10) : 0;
    return (int64_t)(mib < 1          ? (long)SHARE_MIB
                     : mib < MOST_MIB ? mib
                                      : (long)MOST_MIB)
           << 20; /* no number: the default */
}

struct attention_share {
    int64_t batch, kv_heads; /* at a time */
};

/* Whole sequences if one fits, else some heads of one; at least one head. Shares are as equal as possible. */
static struct attention_share share_of(const struct attention *at, bool backward)
{
    struct attention_share share = {at->batch, at->kv_heads};
    const int64_t limit = share_limit() - LEAST_BYTES;
    if (!backward) return share;
    const int64_t sequence = share_bytes(at, true, 1, at->kv_heads) - LEAST_BYTES,
                  head = share_bytes(at, true, 1, 1) - LEAST_BYTES;
    const int64_t sequences = limit / sequence, heads = limit / head > 1 ? limit / head : 1;
    if (sequences >= 1) {
        const int64_t shares = (at->batch + sequences - 1) / sequences;
        share.batch = (at->batch + shares - 1) / shares;
    } else {
        const int64_t shares = (at->kv_heads + heads - 1) / heads;
        share.batch = 1;
        share.kv_heads = (at->kv_heads + shares - 1) / shares;
    }
    return share;
}

/* True if cuDNN may take the call; it can still refuse. The graph has a mask, but no window, documents or cap. */
static bool is_possible(const struct attention *at, enum hapt_dtype dtype, bool backward)
{
    return dtype != HAPT_F32 && !attention_is_limited(*at) && at->batch > 0 && at->length > 1 && at->keys > 1 &&
           at->head % 8 == 0 && at->head <= (backward ? MOST_BACKWARD : MOST_FORWARD) && at->q_width % 8 == 0 &&
           at->kv_width % 8 == 0 && at->out_width % 8 == 0 &&
           share_bytes(at, backward, 1, 1) <= (int64_t)MOST_MIB << 20;
}

static size_t delta_bytes(const struct attention *at)
{
    return (size_t)round_up(at->batch * at->heads * at->length * (int64_t)sizeof(float), 256);
}

/* cuDNN's kernels need this device's tensor cores for bf16. */
static bool is_here(void)
{
    int device = 0, major = 0;
    const bool known = cudaGetDevice(&device) == cudaSuccess &&
                       cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess;
    if (!known) cudaGetLastError();
    return known && major >= 8 && cudnn_version() > 0;
}

size_t cudnn_attention_workspace(const struct attention *at, enum hapt_dtype dtype, bool backward)
{
    if (!is_possible(at, dtype, backward) || !is_here()) return 0;
    const struct attention_share share = share_of(at, backward);
    return (size_t)share_bytes(at, backward, share.batch, share.kv_heads) + (backward ? delta_bytes(at) : 0);
}

static struct attention_key key_of_share(const struct attention *at, enum hapt_dtype dtype, bool backward,
                                         const struct attention_share &share)
{
    struct attention_key key;
    memset(&key, 0, sizeof key);
    memcpy(key.kind, "attend", sizeof "attend");
    key.batch = share.batch;
    key.length = at->length;
    key.keys = at->keys;
    key.kv_heads = share.kv_heads;
    key.heads = share.kv_heads * (at->heads / at->kv_heads);
    key.all_heads = at->heads;
    key.head = at->head;
    key.q_width = at->q_width;
    key.kv_width = at->kv_width;
    key.out_width = at->out_width;
    key.dtype = dtype;
    key.causal = at->causal;
    key.backward = backward;
    const bool whole = share.batch == at->batch && share.kv_heads == at->kv_heads;
    key.row_alignment =
        whole || at->length * (int)sizeof(float) % CUDNN_ALIGNMENT == 0 ? (int)CUDNN_ALIGNMENT : (int)sizeof(float);
    key.workspace_bytes = (size_t)share_bytes(at, backward, share.batch, share.kv_heads);
    return key;
}

static struct cudnn_problem attention_problem(const struct attention_key *key)
{
    return {"attention", key, sizeof *key, attention_graph, attention_accepts, key->workspace_bytes};
}

/* Operands of the share whose first sequence and head of keys these are. */
static enum hapt_status share_run(const struct attention *at, const struct attention_key *key, int64_t sequence,
                                  int64_t kv_head, float *delta, void *workspace, struct hapt_queue *queue, bool *done)
{
    const int64_t head = kv_head * (at->heads / at->kv_heads), row = sequence * at->length,
                  key_row = sequence * at->keys;
    const auto in = [](const void *data, int64_t element) { return (void *)((char *)data + 2 * element); };
    const int64_t q = row * at->q_width + head * at->head, kv = key_row * at->kv_width + kv_head * at->head,
                  out = row * at->out_width + head * at->head, rows = (sequence * at->heads + head) * at->length;
    /* cuDNN before 9.10 wants a finite number. */
    float scale = at->scale, hidden = cudnn_version() < 91000 ? -FLT_MAX : -INFINITY, one = 1;
    const struct cudnn_problem problem = attention_problem(key);
    struct cudnn_operand operand[ATTENTION_OPERANDS];
    int operands = 0;
    operand[operands++] = {UID_Q, in(at->q, q)};
    operand[operands++] = {UID_K, in(at->k, kv)};
    operand[operands++] = {UID_V, in(at->v, kv)};
    operand[operands++] = {UID_OUT, in(key->backward ? at->out : at->y, out)};
    operand[operands++] = {UID_STATISTICS, at->logsumexp + rows};
    operand[operands++] = {UID_SCALE, &scale};
    if (key->causal) operand[operands++] = {UID_HIDDEN, &hidden};
    if (key->backward) {
        operand[operands++] = {UID_DOUT, in(at->dout, out)};
        operand[operands++] = {UID_DQ, in(at->dq, q)};
        operand[operands++] = {UID_DK, in(at->dk, kv)};
        operand[operands++] = {UID_DV, in(at->dv, kv)};
        operand[operands++] = {UID_DELTA, delta + rows};
        operand[operands++] = {UID_ONE, &one};
    }
    return cudnn_run(&problem, operand, operands, workspace, queue, done);
}

enum hapt_status cudnn_attention_run(const struct attention *at, enum hapt_dtype dtype, bool backward, void *workspace,
                                     size_t workspace_bytes, struct hapt_queue *queue, bool *done)
{
    const size_t needed = cudnn_attention_workspace(at, dtype, backward);
    *done = false;
    if (needed == 0 || workspace_bytes < needed || at->add_q || at->add_k || at->add_v) return HAPT_OK;
    for (const void *data : {at->q, at->k, at->v, (const void *)at->y, at->out, at->dout, (const void *)at->dq,
                             (const void *)at->dk, (const void *)at->dv, (const void *)at->logsumexp})
        if (!aligned_16(data)) return HAPT_OK;
    const struct attention_share whole = share_of(at, backward);
    float *delta = (float *)workspace;
    void *rest = (char *)workspace + (backward ? delta_bytes(at) : 0);
    for (int64_t sequence = 0; sequence < at->batch; sequence += whole.batch)
        for (int64_t head = 0; head < at->kv_heads; head += whole.kv_heads) {
            struct attention_share share = whole;
            if (share.batch > at->batch - sequence) share.batch = at->batch - sequence;
            if (share.kv_heads > at->kv_heads - head) share.kv_heads = at->kv_heads - head;
            const struct attention_key key = key_of_share(at, dtype, backward, share);
            HAPT_TRY(share_run(at, &key, sequence, head, delta, rest, queue, done));
            if (!*done) return HAPT_OK;
        }
    return HAPT_OK;
}
