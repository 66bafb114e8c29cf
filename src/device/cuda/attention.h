/* The operands of attention, forward and backward, of both operators. */
#ifndef HAPT_CUDA_ATTENTION_H
#define HAPT_CUDA_ATTENTION_H

#include "kernel.cuh"

/* Element (row, column) of head h of sequence b is data[(b * length + row) * width + h * head + column], with `keys` in
 * place of `length` for k, v and their gradients. */
struct attention {
    const void *q, *k, *v, *out, *dout;
    void *y, *dq, *dk, *dv;
    float *logsumexp;                     /* [batch][heads][length] */
    float *delta;                         /* likewise: sums of out * dout */
    int64_t q_width, kv_width, out_width; /* row widths of q and dq; of k, v, dk and dv; of y, out and dout */
    int64_t batch, length, keys, heads, kv_heads,
        head;                /* length: rows of q; keys: rows of k and v, as many if causal */
    float scale;             /* of dot products */
    float cap;               /* scores become cap tanh(score / cap); 0: they stay */
    float cap_share;         /* scale / cap */
    float dot_scale;         /* from dot products to scores after limit(): 1 with a cap, else scale */
    int64_t window;          /* keys that a query sees, its own and those before it; 0: no window */
    const int32_t *position; /* [batch][length] of a query in its document; NULL: one document */
    bool causal, add_q, add_k, add_v;
    bool packed; /* rows can be loaded 16 bytes at a time */
};

/* True with a window, a cap or documents: kernels with LIMITED run. */
static inline bool attention_is_limited(const struct attention &at)
{
    return at.window > 0 || at.cap > 0 || at.position;
}

static inline struct attention attention_of(const struct hapt_call *call, bool grouped, bool backward)
{
    const struct hapt_view *in = call->input, *result = call->output;
    const bool add = call->accumulate & 1u;
    const int64_t q_width = grouped ? in[0].shape[2] : in[0].shape[2] / 3,
                  kv_width = grouped ? in[1].shape[2] : q_width;
    const int64_t bytes = in[0].dtype == HAPT_F32 ? 4 : 2, pack = 16 / bytes;
    struct attention at = {};
    at.batch = in[0].shape[0];
    at.length = in[0].shape[1];
    at.keys = grouped ? in[1].shape[1] : at.length;
    at.kv_heads = call->integer[0];
    at.heads = at.kv_heads * (q_width / kv_width);
    at.head = kv_width / at.kv_heads;
    at.causal = call->integer[1] != 0;
    at.scale = (float)(1.0 / sqrt((double)at.head));
    if (grouped) {
        at.window = call->integer[2] < at.length ? call->integer[2] : 0;
        if (call->real[0] > 0) at.scale = (float)call->real[0];
        at.cap = (float)call->real[1];
    }
    at.cap_share = at.cap > 0 ? at.scale / at.cap : 0;
    at.dot_scale = at.cap > 0 ? 1 : at.scale;
    at.q_width = in[0].shape[2];
    at.kv_width = grouped ? kv_width : at.q_width;
    at.out_width = q_width;
    const int parts = grouped ? 3 : 1; /* positions follow them */
    const bool documents = call->input_count > parts + (backward ? 3 : 0);
    if (documents) at.position = (const int32_t *)in[parts].data;
    at.q = in[0].data;
    at.k = grouped ? in[1].data : (const char *)at.q + q_width * bytes;
    at.v = grouped ? in[2].data : (const char *)at.q + 2 * q_width * bytes;
    if (backward) {
        const int first = parts + documents;
        at.out = in[first].data;
        at.logsumexp = (float *)in[first + 1].data;
        at.dout = in[first + 2].data;
        at.delta = (float *)call->workspace;
        at.dq = result[0].data;
        at.dk = grouped ? result[1].data : (char *)at.dq + q_width * bytes;
        at.dv = grouped ? result[2].data : (char *)at.dq + 2 * q_width * bytes;
        at.add_q = add;
        at.add_k = grouped ? call->accumulate >> 1 & 1u : add;
        at.add_v = grouped ? call->accumulate >> 2 & 1u : add;
    } else {
        at.y = result[0].data;
        at.logsumexp = (float *)result[1].data;
    }
    at.packed = at.head % pack == 0 && aligned_16(at.q) && aligned_16(at.k) && aligned_16(at.v) && aligned_16(at.dout);
    return at;
}

#endif
