/*
 * Multi-head attention, forward and backward, in blocks over keys with a running softmax: no [t][t] matrix is stored.
 *
 * A thread takes one (batch, key-value head) at a time. It packs these keys and values as fp32, transposed if a product
 * needs it. Then it loops over query blocks of every query head that shares them. Products of small matrices go through
 * product(). bf16 is widened while packing, so the arithmetic is the same for both types.
 *
 * Queries, keys and values come as one tensor ("attention") or as three ("grouped_attention"): see struct operands.
 * With documents, the positions of their tokens follow.
 */
#include <math.h>

#include "isa_product.h"

#define QUERIES 32 /* rows of a query block */
#define KEYS 128   /* keys of a block: two QUERIES x KEYS tiles fit the L1 cache */
#define PREFETCH_BYTES (512 << 10)

/* q, k, v or one of their gradients: a range of columns of a tensor [batch][length][row width]. */
struct part {
    const struct hapt_view *view;
    int64_t first_column;
    bool add; /* add to the present values */
};

struct operands {
    struct part q, k, v, dq, dk, dv;
    struct part out, dout;
    const float *lse_in; /* backward */
    float *lse_out;      /* forward: [batch][heads][length] */
};

/* The call's sizes and this thread's scratch. */
struct attention {
    int64_t batch, length, keys;      /* rows of q; rows of k and v, as many if causal */
    int64_t heads, kv_heads, head;    /* head: columns of a head */
    int64_t padded_head, padded_keys; /* multiples of LANES and KEYS */
    bool causal;
    int64_t window;          /* a query sees this many positions; 0: all up to it, or all */
    const int32_t *position; /* [batch][length] in its document: a query sees no key before that; NULL: one document */
    float scale;
    float cap;                                    /* scores become cap tanh(score / cap); 0: they stay */
    float *key, *key_t, *value_t, *dkey, *dvalue; /* key [padded_keys][padded_head]; *_t [blocks][padded_head][KEYS] */
    float *value;                                 /* [padded_keys][padded_head] */
    float *query, *dout, *out, *dquery;           /* [QUERIES][padded_head] */
    float *score, *dscore;                        /* [QUERIES][KEYS] */
};

static int64_t round_up(int64_t value, int64_t unit)
{
    return (value + unit - 1) / unit * unit;
}

/* The input of positions, which follows the parts; -1: none. */
static int position_input(const struct hapt_call *call, bool grouped, bool backward)
{
    const int parts = grouped ? 3 : 1;
    return call->input_count > parts + (backward ? 3 : 0) ? parts : -1;
}

static struct operands operands_fused(const struct hapt_call *call, bool backward)
{
    const struct hapt_view *qkv = &call->input[0], *dqkv = &call->output[0]; /* [batch][length][3 width] */
    const int64_t width = qkv->shape[2] / 3;
    const bool add = call->accumulate & 1u;
    struct operands of = {.q = {.view = qkv}, .k = {qkv, width, false}, .v = {qkv, 2 * width, false}};
    if (!backward) {
        of.out.view = &call->output[0];
        of.lse_out = call->output[1].data;
        return of;
    }
    const struct hapt_view *rest = &call->input[position_input(call, false, true) < 0 ? 1 : 2];
    of.out.view = &rest[0];
    of.lse_in = rest[1].data;
    of.dout.view = &rest[2];
    of.dq = (struct part){dqkv, 0, add};
    of.dk = (struct part){dqkv, width, add};
    of.dv = (struct part){dqkv, 2 * width, add};
    return of;
}

static struct operands operands_grouped(const struct hapt_call *call, bool backward)
{
    const struct hapt_view *in = call->input, *out = call->output;
    struct operands of = {.q = {.view = &in[0]}, .k = {.view = &in[1]}, .v = {.view = &in[2]}};
    if (!backward) {
        of.out.view = &out[0];
        of.lse_out = out[1].data;
        return of;
    }
    const struct hapt_view *rest = &in[position_input(call, true, true) < 0 ? 3 : 4];
    of.out.view = &rest[0];
    of.lse_in = rest[1].data;
    of.dout.view = &rest[2];
    of.dq = (struct part){&out[0], 0, call->accumulate & 1u};
    of.dk = (struct part){&out[1], 0, call->accumulate >> 1 & 1u};
    of.dv = (struct part){&out[2], 0, call->accumulate >> 2 & 1u};
    return of;
}

INLINE struct operands operands_of(const struct hapt_call *call, bool grouped, bool backward)
{
    return grouped ? operands_grouped(call, backward) : operands_fused(call, backward);
}

/* Integer attributes: key-value heads, causal, window. Real: scale, or 0 for 1 / sqrt(head size); cap. */
static struct attention attention_sizes(const struct hapt_call *call, bool grouped, bool backward)
{
    const int positions = position_input(call, grouped, backward);
    const struct hapt_view *q = &call->input[0];
    const int64_t q_width = grouped ? q->shape[2] : q->shape[2] / 3;
    const int64_t kv_width = grouped ? call->input[1].shape[2] : q_width;
    struct attention at = {
        .batch = q->shape[0], .length = q->shape[1], .kv_heads = call->integer[0], .causal = call->integer[1] != 0};
    at.heads = at.kv_heads * (q_width / kv_width);
    at.head = kv_width / at.kv_heads;
    at.padded_head = round_up(at.head, LANES);
    at.keys = grouped ? call->input[1].shape[1] : at.length;
    at.padded_keys = round_up(at.keys, KEYS);
    at.scale = (float)(1.0 / sqrt((double)at.head));
    if (positions >= 0) at.position = call->input[positions].data;
    if (!grouped) return at;
    at.window = call->integer[2];
    if (call->real[0] > 0) at.scale = (float)call->real[0];
    at.cap = (float)call->real[1];
    return at;
}

/* Floats of one thread's scratch; every part is a multiple of 64 bytes long. */
static int64_t scratch_floats(const struct attention *at, bool backward)
{
    const int64_t packed = at->padded_keys * at->padded_head, block = QUERIES * round_up(at->head, 16);
    return (backward ? 5 : 2) * packed + 4 * block + 2 * QUERIES * KEYS;
}

static void scratch_divide(struct attention *at, bool backward, float *scratch)
{
    const int64_t packed = at->padded_keys * at->padded_head, block = QUERIES * round_up(at->head, 16);
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
    const int64_t tasks = at->batch * at->kv_heads;
    return call->threads < 1 ? 1 : call->threads > tasks ? (int)tasks : call->threads;
}

INLINE size_t workspace_for(const struct hapt_call *call, bool grouped, bool backward)
{
    const struct attention at = attention_sizes(call, grouped, backward);
    return (size_t)(attention_threads(call, &at) * scratch_floats(&at, backward)) * sizeof(float);
}

static size_t attention_workspace(const struct hapt_call *call)
{
    return workspace_for(call, false, false);
}

static size_t attention_backward_workspace(const struct hapt_call *call)
{
    return workspace_for(call, false, true);
}

static size_t grouped_workspace(const struct hapt_call *call)
{
    return workspace_for(call, true, false);
}

static size_t grouped_backward_workspace(const struct hapt_call *call)
{
    return workspace_for(call, true, true);
}

/* One head of one sequence of a part: element (row, column) is data[row * width + column]. */
struct rows {
    void *data;
    int64_t width;
};

INLINE struct rows rows_of(const struct attention *at, const struct part *part, int64_t batch, int64_t head, bool half)
{
    const int64_t width = part->view->shape[2];
    const int64_t first = batch * part->view->shape[1] * width + part->first_column + head * at->head;
    return (struct rows){(char *)part->view->data + first * (half ? 2 : 4), width};
}

/* Rows [first, first + rows) as fp32 [rows][padded_head] times `scale`, zero padded. */
INLINE void pack(const struct attention *at, struct rows from, int64_t first, int64_t rows, bool half, float scale,
                 float *to)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < at->head; c += LANES)
            vector_store(to + r * at->padded_head + c,
                         load(from.data, (first + r) * from.width + c, at->head - c, half) * scale);
}

/* All keys as fp32 [block][padded_head][KEYS], zero padded: columns of keys for vector loads. */
INLINE void pack_transposed(const struct attention *at, struct rows from, bool half, float *to)
{
    for (int64_t r = 0; r < at->padded_keys; r += LANES)
        for (int64_t c = 0; c < at->head; c += LANES) {
            vector row[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++)
                row[i] = r + i < at->keys ? load(from.data, (r + i) * from.width + c, at->head - c, half) : (vector){0};
            vector_transpose(row);
            float *corner = to + (r / KEYS * at->padded_head + c) * KEYS + r % KEYS;
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) vector_store(corner + i * KEYS, row[i]);
        }
}

/* Number of keys in the block at `first_key` that row `query` may see. */
INLINE int64_t visible(const struct attention *at, int64_t query, int64_t first_key, int64_t keys)
{
    return at->causal ? smaller(keys, query - first_key + 1) : keys;
}

/* Number of keys at the start of the block at `first_key` that row `query` does not see any more. at->position is that
 * of its sequence. */
INLINE int64_t passed(const struct attention *at, int64_t query, int64_t first_key)
{
    int64_t first = at->window > 0 ? query - at->window + 1 : 0;
    if (at->position) {
        const int64_t start = query - at->position[query];
        if (start > first) first = start < query ? start : query;
    }
    return first > first_key ? first - first_key : 0;
}

/* The first block of keys that a query from `first` on sees. */
INLINE int64_t first_block(const struct attention *at, int64_t first)
{
    return passed(at, first, 0) / KEYS * KEYS;
}

/* Caps the scores of `vectors` vectors; slope: their derivatives, or NULL. */
INLINE void cap_row(const struct attention *at, float *score, float *slope, int64_t vectors)
{
    for (int64_t j = 0; j < vectors * LANES; j += LANES) {
        const vector part = vector_tanh(vector_load(score + j) * (1.0f / at->cap));
        vector_store(score + j, part * at->cap);
        if (slope) vector_store(slope + j, 1.0f - part * part);
    }
}

/* Turns a row of scores into weights exp(score - top), with zeros from `seen` to the next vector. Returns their sum. */
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
    const int64_t end = at->causal ? first + rows : at->keys, hp = at->padded_head;
    for (int64_t r = 0; r < rows; r++) {
        top[r] = -INFINITY;
        total[r] = 0;
    }
    memset(at->out, 0, (size_t)(rows * hp) * sizeof(float));
    for (int64_t key = first_block(at, first); key < end; key += KEYS) {
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
            const int64_t seen = visible(at, first + r, key, keys), gone = passed(at, first + r, key);
            if (at->cap > 0) cap_row(at, score, NULL, vectors);
            for (int64_t j = 0; j < gone && j < keys; j++) score[j] = -INFINITY;
            if (gone >= keys) { /* the row sees no key of this block */
                memset(score, 0, (size_t)(vectors * LANES) * sizeof *score);
                continue;
            }
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

/* One query head against the packed keys and values. */
INLINE void forward_queries(const struct attention *at, const struct operands *of, int64_t b, int64_t h, bool half)
{
    const int64_t hp = at->padded_head;
    const struct rows q = rows_of(at, &of->q, b, h, half), out = rows_of(at, &of->out, b, h, half);
    float *lse = of->lse_out + (b * at->heads + h) * at->length;
    for (int64_t first = 0; first < at->length; first += QUERIES) {
        const int64_t rows = smaller(QUERIES, at->length - first);
        float top[QUERIES];
        double total[QUERIES];
        pack(at, q, first, rows, half, at->scale, at->query);
        forward_block(at, first, rows, top, total);
        for (int64_t r = 0; r < rows; r++) {
            const float share = (float)(1.0 / total[r]);
            lse[first + r] = (float)(top[r] + log(total[r]));
            for (int64_t c = 0; c < at->head; c += LANES)
                store(out.data, (first + r) * out.width + c, at->head - c, half,
                      vector_load(at->out + r * hp + c) * share);
        }
    }
}

INLINE void forward_head(const struct attention *at, const struct operands *of, int64_t b, int64_t kv, bool half)
{
    const int64_t group = at->heads / at->kv_heads;
    pack_transposed(at, rows_of(at, &of->k, b, kv, half), half, at->key_t);
    pack(at, rows_of(at, &of->v, b, kv, half), 0, at->keys, half, 1.0f, at->value);
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) forward_queries(at, of, b, h, half);
}

/*
 * A head's rows are short pieces far apart, which hardware prefetchers miss. So a sequence's first head prefetches all
 * its rows in order, if they fit the L2 cache. (Measured: the backward gains 10 to 25 %.)
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

/* A tensor with all three parts is prefetched once. */
static void prefetch_parts(const struct operands *of, int64_t batch)
{
    prefetch_sequence(of->q.view, batch, false);
    if (of->k.view == of->q.view) return;
    prefetch_sequence(of->k.view, batch, false);
    prefetch_sequence(of->v.view, batch, false);
}

INLINE void forward_run(const struct hapt_call *call, bool grouped, bool half)
{
    const struct attention sizes = attention_sizes(call, grouped, false);
    const struct operands of = operands_of(call, grouped, false);
    const int64_t floats = scratch_floats(&sizes, false);
#pragma omp parallel num_threads(attention_threads(call, &sizes))
    {
        struct attention at = sizes;
        scratch_divide(&at, false, (float *)call->workspace + omp_get_thread_num() * floats);
        int64_t fetched = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.batch * at.kv_heads; task++) {
            const int64_t b = task / at.kv_heads;
            if (b != fetched) prefetch_parts(&of, b);
            fetched = b;
            at.position = sizes.position ? sizes.position + b * at.length : NULL;
            forward_head(&at, &of, b, task % at.kv_heads, half);
        }
    }
}

/* Stores weights P = exp(S - lse) in at->score and dS = P (dP - delta) in at->dscore. */
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
        const int64_t seen = visible(at, first + r, key, keys), gone = passed(at, first + r, key);
        float slope[KEYS];
        if (at->cap > 0) cap_row(at, score, slope, vectors);
        for (int64_t j = 0; j < vectors * LANES; j += LANES) {
            vector weight = {0};
            if (j < seen) weight = vector_exp(vector_load(score + j) - lse[r]);
            if (seen - j < LANES) weight = vector_select(lanes_below(seen - j), weight, (vector){0});
            if (gone > j) weight = vector_select(lanes_below(gone - j), (vector){0}, weight);
            vector_store(score + j, weight);
            vector_store(dscore + j, weight * (vector_load(dscore + j) - delta[r]));
            if (at->cap > 0) vector_store(dscore + j, vector_load(dscore + j) * vector_load(slope + j));
        }
    }
}

/* One query block: adds to dkey and dvalue of all keys it sees, and leaves dquery unscaled. */
static void backward_block(const struct attention *at, int64_t first, int64_t rows, const float *lse,
                           const float *delta)
{
    const int64_t end = at->causal ? first + rows : at->keys, hp = at->padded_head;
    memset(at->dquery, 0, (size_t)(rows * hp) * sizeof(float));
    for (int64_t key = first_block(at, first); key < end; key += KEYS) {
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

/* Writes (or adds) fp32 [rows][padded_head] times `scale` as rows [first, first + rows). */
INLINE void unpack(const struct attention *at, const float *from, int64_t first, int64_t rows, float scale,
                   struct rows to, bool add, bool half)
{
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < at->head; c += LANES) {
            const int64_t place = (first + r) * to.width + c;
            vector value = vector_load(from + r * at->padded_head + c) * scale;
            if (add) value += load(to.data, place, at->head - c, half);
            store(to.data, place, at->head - c, half, value);
        }
}

/* One query head: its dq, and its part of dkey and dvalue. */
INLINE void backward_queries(const struct attention *at, const struct operands *of, int64_t b, int64_t h, bool half)
{
    const int64_t hp = at->padded_head;
    const struct rows q = rows_of(at, &of->q, b, h, half), dq = rows_of(at, &of->dq, b, h, half);
    const struct rows out = rows_of(at, &of->out, b, h, half), dout = rows_of(at, &of->dout, b, h, half);
    const float *lse = of->lse_in + (b * at->heads + h) * at->length;
    for (int64_t first = 0; first < at->length; first += QUERIES) {
        const int64_t rows = smaller(QUERIES, at->length - first);
        float delta[QUERIES];
        pack(at, q, first, rows, half, at->scale, at->query);
        pack(at, out, first, rows, half, 1.0f, at->out);
        pack(at, dout, first, rows, half, 1.0f, at->dout);
        for (int64_t r = 0; r < rows; r++) {
            vector sum = {0};
            for (int64_t c = 0; c < at->head; c += LANES)
                sum += vector_load(at->out + r * hp + c) * vector_load(at->dout + r * hp + c);
            delta[r] = (float)vector_sum(sum);
        }
        backward_block(at, first, rows, lse + first, delta);
        unpack(at, at->dquery, first, rows, at->scale, dq, of->dq.add, half);
    }
}

INLINE void backward_head(const struct attention *at, const struct operands *of, int64_t b, int64_t kv, bool half)
{
    const int64_t group = at->heads / at->kv_heads, packed = at->padded_keys * at->padded_head;
    const struct rows k = rows_of(at, &of->k, b, kv, half), v = rows_of(at, &of->v, b, kv, half);
    pack_transposed(at, k, half, at->key_t);
    pack_transposed(at, v, half, at->value_t);
    pack(at, k, 0, at->keys, half, 1.0f, at->key);
    memset(at->dkey, 0, (size_t)packed * sizeof(float));
    memset(at->dvalue, 0, (size_t)packed * sizeof(float));
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) backward_queries(at, of, b, h, half);
    unpack(at, at->dkey, 0, at->keys, 1.0f, rows_of(at, &of->dk, b, kv, half), of->dk.add, half);
    unpack(at, at->dvalue, 0, at->keys, 1.0f, rows_of(at, &of->dv, b, kv, half), of->dv.add, half);
}

INLINE void backward_run(const struct hapt_call *call, bool grouped, bool half)
{
    const struct attention sizes = attention_sizes(call, grouped, true);
    const struct operands of = operands_of(call, grouped, true);
    const int64_t floats = scratch_floats(&sizes, true);
#pragma omp parallel num_threads(attention_threads(call, &sizes))
    {
        struct attention at = sizes;
        scratch_divide(&at, true, (float *)call->workspace + omp_get_thread_num() * floats);
        int64_t fetched = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < at.batch * at.kv_heads; task++) {
            const int64_t b = task / at.kv_heads;
            if (b != fetched) {
                prefetch_parts(&of, b);
                prefetch_sequence(of.out.view, b, false);
                prefetch_sequence(of.dout.view, b, false);
                prefetch_sequence(of.dq.view, b, true);
            }
            fetched = b;
            at.position = sizes.position ? sizes.position + b * at.length : NULL;
            backward_head(&at, &of, b, task % at.kv_heads, half);
        }
    }
}

KERNELS(attention, forward_run(call, false, half))
KERNELS(attention_backward, backward_run(call, false, half))
KERNELS(grouped, forward_run(call, true, half))
KERNELS(grouped_backward, backward_run(call, true, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_attention)[] = {
    KERNEL_ROWS("attention", attention_workspace, attention),
    KERNEL_ROWS("attention_backward", attention_backward_workspace, attention_backward),
    KERNEL_ROWS("grouped_attention", grouped_workspace, grouped),
    KERNEL_ROWS("grouped_attention_backward", grouped_backward_workspace, grouped_backward),
    KERNEL_ROWS("document_attention", attention_workspace, attention),
    KERNEL_ROWS("document_attention_backward", attention_backward_workspace, attention_backward),
    KERNEL_ROWS("grouped_document_attention", grouped_workspace, grouped),
    KERNEL_ROWS("grouped_document_attention_backward", grouped_backward_workspace, grouped_backward),
    {HAPT_F32, {NULL, NULL, NULL}},
};
