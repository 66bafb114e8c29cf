/* Linear layers: y = x w + b and its gradients, with w as [in][out] ("linear") or [out][in] ("linear_t"). Products of
 * activations, matrix by matrix ("matmul"). */
#include "kernels.h"
#include "product.h"
#include "rows.cuh"

template <class Element> struct type_of;
template <> struct type_of<float> {
    static const enum hapt_dtype DTYPE = HAPT_F32;
};
template <> struct type_of<__nv_bfloat16> {
    static const enum hapt_dtype DTYPE = HAPT_BF16;
};
template <> struct type_of<__half> {
    static const enum hapt_dtype DTYPE = HAPT_F16;
};

static size_t workspace_bytes(const struct hapt_call *call)
{
    return product_workspace(hapt_view_elements(&call->output[0]));
}

/* Input: x, w, bias; output: y. The gradient dx of dy is the same product with the other layout of w. */
template <class Element> static struct product forward_product(const struct hapt_call *call, bool transposed)
{
    struct product p = {};
    p.m = view_rows(&call->input[0]);
    p.n = view_columns(&call->output[0]);
    p.k = view_columns(&call->input[0]);
    p.transpose_b = transposed;
    p.in = p.out = type_of<Element>::DTYPE;
    p.a = call->input[0].data;
    p.b = call->input[1].data;
    p.c = call->output[0].data;
    return p;
}

template <class Element, bool TRANSPOSED>
static enum hapt_status forward_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct product p = forward_product<Element>(call, TRANSPOSED);
    p.bias = call->input_count > 2 ? call->input[2].data : NULL;
    return product_run(&p, call->workspace, call->workspace_bytes, queue);
}

/* input: dy, w; output: dx */
template <class Element, bool TRANSPOSED>
static enum hapt_status dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    struct product p = forward_product<Element>(call, !TRANSPOSED);
    p.accumulate = call->accumulate & 1u;
    return product_run(&p, call->workspace, call->workspace_bytes, queue);
}

static size_t dw_workspace(const struct hapt_call *call)
{
    const size_t product = workspace_bytes(call),
                 sums = column_sums_workspace(view_rows(&call->input[1]), view_columns(&call->input[1]), 1);
    return product > sums ? product : sums; /* one after the other */
}

/* input: x, dy; output: dw, db; both fp32 */
template <class Element, bool TRANSPOSED>
static enum hapt_status dw_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t in = view_columns(&call->input[0]), out = view_columns(&call->input[1]),
                  rows = view_rows(&call->input[1]);
    const void *x = call->input[0].data, *dy = call->input[1].data;
    float *db = call->output_count > 1 ? (float *)call->output[1].data : NULL;
    struct product p = {};
    p.m = TRANSPOSED ? out : in;
    p.n = TRANSPOSED ? in : out;
    p.k = rows;
    p.transpose_a = true;
    p.in = type_of<Element>::DTYPE;
    p.out = HAPT_F32;
    p.a = TRANSPOSED ? dy : x;
    p.b = TRANSPOSED ? x : dy;
    p.c = call->output[0].data;
    p.accumulate = call->accumulate & 1u;
    if (db) {
        const struct column_matrix<Element> matrix = {
            (const Element *)dy, out
        };
        const bool accumulate = call->accumulate >> 1 & 1u;
        if (packs_fit<Element>(out, dy))
            HAPT_TRY(
                (column_sums<1, pack<Element>::COUNT>(matrix, rows, out, &db, &accumulate, call->workspace, queue)));
        else
            HAPT_TRY((column_sums<1, 1>(matrix, rows, out, &db, &accumulate, call->workspace, queue)));
    }
    return product_run(&p, call->workspace, call->workspace_bytes, queue);
}

/* input: a, b; output: y; all leading dimensions are batches. integer[0] bit 0: a is stored transposed; bit 1: b is. */
template <class Element> static enum hapt_status matmul_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *a = &call->input[0], *y = &call->output[0];
    struct product p = {};
    if (hapt_view_elements(y) == 0) return HAPT_OK;
    p.transpose_a = call->integer[0] & 1;
    p.transpose_b = call->integer[0] >> 1 & 1;
    p.m = y->shape[y->dims - 2];
    p.n = y->shape[y->dims - 1];
    p.k = a->shape[a->dims - (p.transpose_a ? 2 : 1)];
    p.batches = hapt_view_elements(y) / (p.m * p.n);
    p.stride_a = p.m * p.k;
    p.stride_b = p.k * p.n;
    p.stride_c = p.m * p.n;
    p.in = p.out = type_of<Element>::DTYPE;
    p.a = a->data;
    p.b = call->input[1].data;
    p.c = y->data;
    p.accumulate = call->accumulate & 1u;
    return product_run(&p, call->workspace, call->workspace_bytes, queue);
}

extern const struct cuda_kernel hapt_cuda_linear[] = {
    CUDA_KERNELS_WITH("linear", workspace_bytes, forward_run, false),
    CUDA_KERNELS_WITH("linear_t", workspace_bytes, forward_run, true),
    CUDA_KERNELS_WITH("linear_dx", workspace_bytes, dx_run, false),
    CUDA_KERNELS_WITH("linear_t_dx", workspace_bytes, dx_run, true),
    CUDA_KERNELS_WITH("linear_dw", dw_workspace, dw_run, false),
    CUDA_KERNELS_WITH("linear_t_dw", dw_workspace, dw_run, true),
    CUDA_KERNELS("matmul", workspace_bytes, matmul_run),
    CUDA_KERNELS_END,
};
