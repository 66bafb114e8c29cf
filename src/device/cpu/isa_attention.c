/*
 * Multi-head attention, forward and backward, in blocks over keys with a running softmax: no [t][t] matrix is ever
 * stored.
 *
 * One thread takes one (batch, head) at a time. It packs that head's keys and values as fp32 (transposed where a
 * product needs it) and walks over blocks of queries; every product of two small matrices goes through product() below.
 * bf16 is widened while packing, so the arithmetic is the same for both types.
 */
#include <math.h>

#include "isa.h"

#define QUERIES 32 /* rows of a block of queries */
#define KEYS 128   /* keys of a block: two QUERIES x KEYS tiles stay in the first cache */
#define PREFETCH_BYTES (512 << 10)
#define TILE_ROWS 4
#define TILE_VECTORS (LANES == 16 ? 4 : 2)

/* c [rows][vectors] (+)= a b in registers; element (i, k) of a stands at a[i * a_row + k * a_depth]. */
INLINE void tile(int rows, int vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_depth, const float *b,
                 int64_t b_row, float *c, int64_t c_row, bool add)
{
    vector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = add ? vector_load(c + i * c_row + j * LANES) : (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector line[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) line[j] = vector_load(b + k * b_row + j * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const float factor = a[i * a_row + k * a_depth];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += line[j] * factor;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) vector_store(c + i * c_row + j * LANES, sum[i][j]);
}

struct product {
    int64_t rows, vectors, depth; /* vectors: columns / LANES */
    const float *a;
    int64_t a_row, a_depth;
    const float *b;
    int64_t b_row;
    float *c;
    int64_t c_row;
    bool add;
};

INLINE void product_strip(const struct product *p, int64_t column, int vectors)
{
    int64_t i = 0;
    for (; i + TILE_ROWS <= p->rows; i += TILE_ROWS)
        tile(TILE_ROWS, vectors, p->depth, p->a + i * p->a_row, p->a_row, p->a_depth, p->b + column, p->b_row,
             p->c + i * p->c_row + column, p->c_row, p->add);
    for (; i < p->rows; i++)
        tile(1, vectors, p->depth, p->a + i * p->a_row, p->a_row, p->a_depth, p->b + column, p->b_row,
             p->c + i * p->c_row + column, p->c_row, p->add);
}

static void product(const struct product *p)
{
    int64_t v = 0;
    for (; v + TILE_VECTORS <= p->vectors; v += TILE_VECTORS) product_strip(p, v * LANES, TILE_VECTORS);
    switch (p->vectors - v) {
    case 3:
        product_strip(p, v * LANES, TILE_VECTORS > 3 ? 3 : 1);
        break;
    case 2:
        product_strip(p, v * LANES, 2);
        break;
    case 1:
        product_strip(p, v * LANES, 1);
        break;
    default:
        break;
    }
}

/* The call's sizes and this thread's scratch. */
struct attention {
    int64_t batch, length, heads, width, head; /* width: d; head: head size */
    int64_t padded_head, padded_length;        /* multiples of LANES and KEYS */
    bool causal;
    float scale;
    float *key, *key_t, *value_t, *dkey,
        *dvalue;                        /* key [padded_length][padded_head]; *_t [blocks][padded_head][KEYS] */
    float *value;                       /* [padded_length][padded_head] */
    float *query, *dout, *out, *dquery; /* [QUERIES][padded_head] */
    float *score, *dscore;              /* [QUERIES][KEYS] */
};

static int64_t round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

static struct attention attention_sizes(const struct hapt_call *call)
{
    const struct hapt_view *qkv = &call->input[0]; /* [batch][length][3 width] */
    struct attention at = {.batch = qkv->shape[0],
                           .length = qkv->shape[1],
                           .heads = call->integer[0],
                           .width = qkv->shape[2] / 3,
                           .causal = call->integer[1] != 0};
    at.head = at.width / at.heads;
    at.padded_head = round_up(at.head, LANES);
    at.padded_length = round_up(at.length, KEYS);
    at.scale = (float)(1.0 / sqrt((double)at.head));
    return at;
}

/* Floats of one thread's scratch; every part is a multiple of 64 bytes long. */
static int64_t scratch_floats(const struct attention *at, bool backward)
{
    const int64_t packed = at->padded_length * at->padded_head, block = QUERIES * round_up(at->head, 16);
    return (backward ? 5 : 2) * packed + 4 * block + 2 * QUERIES * KEYS;
}

static void scratch_divide(struct attention *at, bool backward, float *scratch)
{
    const int64_t packed = at->padded_length * at->padded_head, block = QUERIES * round_up(at->head, 16);
    at->key_t = scratch;
    at->value = at->value_t = at->key_t + packed;
    scratch = at->value + packed;
    if (backward) {
        at->key = scratch;
        at->dkey = at->key + packed;
        at->dvalue = at->dkey + packed;
        scratch = at->dvalue + packed;
    }
    at->query = scratch;
    at->dout = at->query + block;
    at->out = at->dout + block;
    at->dquery = at->out + block;
    at->score = at->dquery + block;
    at->dscore = at->score + QUERIES * KEYS;
}

static int attention_threads(const struct hapt_call *call, const struct attention *at)
{
    const int64_t tasks = at->batch * at->heads;
    return call->threads < 1 ? 1 : call->threads > tasks ? (int)tasks : call->threads;
}

static size_t attention_workspace_for(const struct hapt_call *call, bool backward)
{
    const struct attention at = attention_sizes(call);
    return (size_t)(attention_threads(call, &at) * scratch_floats(&at, backward)) * sizeof(float);
}

static size_t attention_workspace(const struct hapt_call *call)
{
    return attention_workspace_for(call, false);
}

static size_t attention_backward_workspace(const struct hapt_call *call)
{
    return attention_workspace_for(call, true);
}

/* Rows [first, first + rows) of one head as fp32 [rows][padded_head] times `scale`, zero padded. `row_width`: elements
 * from one row of the tensor to the next; `column`: where the head starts. */
INLINE void pack(const struct attention *at, const void *from, int64_t row_width, int64_t column, int64_t rows,
                 bool half, float scale, float *to)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < at->head; c += LANES)
            vector_store(to + r * at->padded_head + c,
                         load(from, r * row_width + column + c, at->head - c, half) * scale);
}

/* All rows of one head as fp32 [block][padded_head][KEYS], zero padded: columns of keys for vector loads. */
INLINE void pack_transposed(const struct attention *at, const void *from, int64_t row_width, int64_t column, bool half,
                            float *to)
{
    for (int64_t r = 0; r < at->padded_length; r += LANES)
        for (int64_t c = 0; c < at->head; c += LANES) {
            vector row[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                row[i] =
                    r + i < at->length ? load(from, (r + i) * row_width + column + c, at->head - c, half) : (vector){0};
            vector_transpose(row);
            float *corner = to + (r / KEYS * at->padded_head + c) * KEYS + r % KEYS;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) vector_store(corner + i * KEYS, row[i]);
        }
}

/* Keys of the block at `first_key` that row `query` may see. */
INLINE int64_t visible(const struct attention *at, int64_t query, int64_t first_key, int64_t keys)
{
    return at->causal ? smaller(keys, query - first_key + 1) : keys;
}

/* Turns a row of scores into weights exp(score - top), zero behind `seen` up to the next vector. Returns their sum. */
INLINE double softmax_row(float *score, int64_t seen, int64_t vectors, float top)
{
    struct sum sum = {0};
    for (int64_t j = 0; j < vectors; j++) {
        vector weight = {0};
        if (j * LANES < seen) {
            weight = vector_exp(vector_load(score + j * LANES) - top);
            if (seen - j * LANES < LANES) weight = vector_select(lanes_below(seen - j * LANES), weight, (vector){0});
            sum_add(&sum, weight);
        }
        vector_store(score + j * LANES, weight);
    }
    return sum_total(&sum);
}

INLINE float row_maximum(const float *score, int64_t seen, float least)
{
    vector most = vector_set(least);
    for (int64_t j = 0; j < seen; j += LANES) {
        vector value = vector_load(score + j);
        if (seen - j < LANES) value = vector_select(lanes_below(seen - j), value, most);
        most = vector_max(most, value);
    }
    return vector_maximum(most);
}

/* One block of queries of one head: at->out [rows][padded_head] unnormalised, top and total of each row's softmax. */
static void forward_block(const struct attention *at, int64_t first, int64_t rows, float *top, double *total)
{
    const int64_t end = at->causal ? first + rows : at->length, hp = at->padded_head;
    for (int64_t r = 0; r < rows; r++) {
        top[r] = -INFINITY;
        total[r] = 0;
    }
    memset(at->out, 0, (size_t)(rows * hp) * sizeof(float));
    for (int64_t key = 0; key < end; key += KEYS) {
        const int64_t keys = smaller(KEYS, end - key), vectors = (keys + LANES - 1) / LANES;
        product(&(struct product){.rows = rows,
                                  .vectors = vectors,
                                  .depth = at->head,
                                  .a = at->query,
                                  .a_row = hp,
                                  .a_depth = 1,
                                  .b = at->key_t + key * hp,
                                  .b_row = KEYS,
                                  .c = at->score,
                                  .c_row = KEYS});
        for (int64_t r = 0; r < rows; r++) {
            float *score = at->score + r * KEYS;
            const int64_t seen = visible(at, first + r, key, keys);
            const float higher = row_maximum(score, seen, top[r]);
            if (key > 0 && higher > top[r]) {
                const float shrink = expf(top[r] - higher);
                total[r] *= shrink;
                for (int64_t c = 0; c < hp; c += LANES)
                    vector_store(at->out + r * hp + c, vector_load(at->out + r * hp + c) * shrink);
            }
            top[r] = higher;
            total[r] += softmax_row(score, seen, vectors, higher);
        }
        product(&(struct product){.rows = rows,
                                  .vectors = hp / LANES,
                                  .depth = keys,
                                  .a = at->score,
                                  .a_row = KEYS,
                                  .a_depth = 1,
                                  .b = at->value + key * hp,
                                  .b_row = hp,
                                  .c = at->out,
                                  .c_row = hp,
                                  .add = true});
    }
}

INLINE void forward_head(const struct hapt_call *call, const struct attention *at, int64_t b, int64_t h, bool half)
{
    const size_t element = half ? 2 : 4;
    const int64_t width = at->width, hp = at->padded_head;
    const char *qkv = (const char *)call->input[0].data + (size_t)(b * at->length * 3 * width) * element;
    char *out = (char *)call->output[0].data + (size_t)(b * at->length * width) * element;
    float *lse = (float *)call->output[1].data + (b * at->heads + h) * at->length;
    pack_transposed(at, qkv, 3 * width, width + h * at->head, half, at->key_t);
    pack(at, qkv, 3 * width, 2 * width + h * at->head, at->length, half, 1.0f, at->value);
    for (int64_t first = 0; first < at->length; first += QUERIES) {
        const int64_t rows = smaller(QUERIES, at->length - first);
        float top[QUERIES];
        double total[QUERIES];
        pack(at, qkv + (size_t)(first * 3 * width) * element, 3 * width, h * at->head, rows, half, at->scale,
             at->query);
        forward_block(at, first, rows, top, total);
        for (int64_t r = 0; r < rows; r++) {
            const float share = (float)(1.0 / total[r]);
            lse[first + r] = (float)(top[r] + log(total[r]));
            for (int64_t c = 0; c < at->head; c += LANES)
                store(out, (first + r) * width + h * at->head + c, at->head - c, half,
                      vector_load(at->out + r * hp + c) * share);
        }
    }
}

/*
 * A head's rows are short pieces far apart, which hardware prefetchers miss: at a sequence's first head all its rows
 * are asked for in order, where they fit the second cache. (Measured: the backward gains 10 to 25 %.)
 */
static void prefetch_sequence(const struct hapt_view *view, int64_t batch, bool write)
{
    const int64_t bytes = hapt_view_elements(view) / view->shape[0] * (int64_t)hapt_dtype_bytes(view->dtype);
    const char *from = (const char *)view->data + batch * bytes;
    if (bytes > PREFETCH_BYTES) return;
    if (write)
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 1, 2);
    else
        for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(from + i, 0, 2);
}

INLINE void forward_run(const struct hapt_call *call, bool half)
{
    const struct attention sizes = attention_sizes(call);
    const int64_t floats = scratch_floats(&sizes, false);
#pragma omp parallel num_threads(attention_threads(call, &sizes))
    {
        struct attention at = sizes;
        scratch_divide(&at, false, (float *)call->workspace + omp_get_thread_num() * floats);
        int64_t fetched = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.batch * at.heads; task++) {
            const int64_t b = task / at.heads;
            if (b != fetched) prefetch_sequence(&call->input[0], b, false);
            fetched = b;
            forward_head(call, &at, b, task % at.heads, half);
        }
    }
}

/* Weights P = exp(S - lse) into at->score and dS = P (dP - delta) into at->dscore. */
static void backward_scores(const struct attention *at, int64_t first, int64_t rows, int64_t key, int64_t keys,
                            const float *lse, const float *delta)
{
    const int64_t vectors = (keys + LANES - 1) / LANES, hp = at->padded_head;
    product(&(struct product){.rows = rows,
                              .vectors = vectors,
                              .depth = at->head,
                              .a = at->query,
                              .a_row = hp,
                              .a_depth = 1,
                              .b = at->key_t + key * hp,
                              .b_row = KEYS,
                              .c = at->score,
                              .c_row = KEYS});
    product(&(struct product){.rows = rows,
                              .vectors = vectors,
                              .depth = at->head,
                              .a = at->dout,
                              .a_row = hp,
                              .a_depth = 1,
                              .b = at->value_t + key * hp,
                              .b_row = KEYS,
                              .c = at->dscore,
                              .c_row = KEYS});
    for (int64_t r = 0; r < rows; r++) {
        float *score = at->score + r * KEYS, *dscore = at->dscore + r * KEYS;
        const int64_t seen = visible(at, first + r, key, keys);
        for (int64_t j = 0; j < vectors * LANES; j += LANES) {
            vector weight = {0};
            if (j < seen) weight = vector_exp(vector_load(score + j) - lse[r]);
            if (seen - j < LANES) weight = vector_select(lanes_below(seen - j), weight, (vector){0});
            vector_store(score + j, weight);
            vector_store(dscore + j, weight * (vector_load(dscore + j) - delta[r]));
        }
    }
}

/* One block of queries: adds to dkey and dvalue of all keys it sees, and leaves dquery (not yet scaled). */
static void backward_block(const struct attention *at, int64_t first, int64_t rows, const float *lse,
                           const float *delta)
{
    const int64_t end = at->causal ? first + rows : at->length, hp = at->padded_head;
    memset(at->dquery, 0, (size_t)(rows * hp) * sizeof(float));
    for (int64_t key = 0; key < end; key += KEYS) {
        const int64_t keys = smaller(KEYS, end - key);
        backward_scores(at, first, rows, key, keys, lse, delta);
        struct product product_of = {.rows = keys,
                                     .vectors = hp / LANES,
                                     .depth = rows,
                                     .a = at->score,
                                     .a_row = 1,
                                     .a_depth = KEYS,
                                     .b = at->dout,
                                     .b_row = hp,
                                     .c = at->dvalue + key * hp,
                                     .c_row = hp,
                                     .add = true};
        product(&product_of);
        product_of.a = at->dscore;
        product_of.b = at->query;
        product_of.c = at->dkey + key * hp;
        product(&product_of);
        product(&(struct product){.rows = rows,
                                  .vectors = hp / LANES,
                                  .depth = keys,
                                  .a = at->dscore,
                                  .a_row = KEYS,
                                  .a_depth = 1,
                                  .b = at->key + key * hp,
                                  .b_row = hp,
                                  .c = at->dquery,
                                  .c_row = hp,
                                  .add = true});
    }
}

/* Writes rows of fp32 [rows][padded_head] times `scale` into one head's columns of the tensor. */
INLINE void unpack(const struct attention *at, const float *from, int64_t rows, float scale, void *to,
                   int64_t row_width, int64_t column, bool half)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < at->head; c += LANES)
            store(to, r * row_width + column + c, at->head - c, half,
                  vector_load(from + r * at->padded_head + c) * scale);
}

INLINE void backward_head(const struct hapt_call *call, const struct attention *at, int64_t b, int64_t h, bool half)
{
    const size_t element = half ? 2 : 4;
    const int64_t width = at->width, hp = at->padded_head, at_qkv = b * at->length * 3 * width, own = h * at->head;
    const char *qkv = (const char *)call->input[0].data + (size_t)at_qkv * element;
    const float *lse = (const float *)call->input[2].data + (b * at->heads + h) * at->length;
    char *dqkv = (char *)call->output[0].data + (size_t)at_qkv * element;
    pack_transposed(at, qkv, 3 * width, width + own, half, at->key_t);
    pack_transposed(at, qkv, 3 * width, 2 * width + own, half, at->value_t);
    pack(at, qkv, 3 * width, width + own, at->length, half, 1.0f, at->key);
    memset(at->dkey, 0, (size_t)(at->padded_length * hp) * sizeof(float));
    memset(at->dvalue, 0, (size_t)(at->padded_length * hp) * sizeof(float));
    for (int64_t first = 0; first < at->length; first += QUERIES) {
        const int64_t rows = smaller(QUERIES, at->length - first), row = b * at->length + first;
        const size_t at_out = (size_t)(row * width) * element;
        float delta[QUERIES];
        pack(at, qkv + (size_t)(first * 3 * width) * element, 3 * width, own, rows, half, at->scale, at->query);
        pack(at, (const char *)call->input[1].data + at_out, width, own, rows, half, 1.0f, at->out);
        pack(at, (const char *)call->input[3].data + at_out, width, own, rows, half, 1.0f, at->dout);
        for (int64_t r = 0; r < rows; r++) {
            vector sum = {0};
            for (int64_t c = 0; c < at->head; c += LANES)
                sum += vector_load(at->out + r * hp + c) * vector_load(at->dout + r * hp + c);
            delta[r] = (float)vector_sum(sum);
        }
        backward_block(at, first, rows, lse + first, delta);
        unpack(at, at->dquery, rows, at->scale, dqkv + (size_t)(first * 3 * width) * element, 3 * width, own, half);
    }
    unpack(at, at->dkey, at->length, 1.0f, dqkv, 3 * width, width + own, half);
    unpack(at, at->dvalue, at->length, 1.0f, dqkv, 3 * width, 2 * width + own, half);
}

INLINE void backward_run(const struct hapt_call *call, bool half)
{
    const struct attention sizes = attention_sizes(call);
    const int64_t floats = scratch_floats(&sizes, true);
#pragma omp parallel num_threads(attention_threads(call, &sizes))
    {
        struct attention at = sizes;
        scratch_divide(&at, true, (float *)call->workspace + omp_get_thread_num() * floats);
        int64_t fetched = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.batch * at.heads; task++) {
            const int64_t b = task / at.heads;
            if (b != fetched) {
                prefetch_sequence(&call->input[0], b, false);
                prefetch_sequence(&call->input[1], b, false);
                prefetch_sequence(&call->input[3], b, false);
                prefetch_sequence(&call->output[0], b, true);
            }
            fetched = b;
            backward_head(call, &at, b, task % at.heads, half);
        }
    }
}

#define ENTRY(name, body, half)                                                                                        \
    static enum hapt_status name(const struct hapt_call *call, struct hapt_queue *queue)                               \
    {                                                                                                                  \
        (void)queue;                                                                                                   \
        body(call, half);                                                                                              \
        return HAPT_OK;                                                                                                \
    }

ENTRY(attention_f32, forward_run, false)
ENTRY(attention_bf16, forward_run, true)
ENTRY(attention_backward_f32, backward_run, false)
ENTRY(attention_backward_bf16, backward_run, true)

const struct cpu_kernel ISA_NAME(hapt_cpu_attention)[] = {
    {HAPT_F32, {"attention", attention_workspace, attention_f32}},
    {HAPT_BF16, {"attention", attention_workspace, attention_bf16}},
    {HAPT_F32, {"attention_backward", attention_backward_workspace, attention_backward_f32}},
    {HAPT_BF16, {"attention_backward", attention_backward_workspace, attention_backward_bf16}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
