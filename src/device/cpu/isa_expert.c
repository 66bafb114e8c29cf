/*
 * Products of experts with their filled slots: y = x w' + bias for each expert, and the gradients. Slots are
 * [rows][experts][capacity][columns]; counts [rows][experts] gives the filled slots, from the front. An expert's filled
 * slots are packed, so there is one product per expert for any number of rows.
 */
#include "isa.h"
#include "products.h"

struct experts {
    const struct hapt_call *call;
    const float *counts;
    int64_t rows, experts, capacity;
    bool half;
};

/* `slots`: any operand with slots. */
static struct experts experts_of(const struct hapt_call *call, const struct hapt_view *slots,
                                 const struct hapt_view *counts)
{
    return (struct experts){.call = call,
                            .counts = counts->data,
                            .rows = slots->shape[0],
                            .experts = slots->shape[1],
                            .capacity = slots->shape[2],
                            .half = slots->dtype == HAPT_BF16};
}

static int64_t filled(const struct experts *of, int64_t row, int64_t expert)
{
    const float count = of->counts[row * of->experts + expert];
    if (!(count >= 1)) return 0;
    return count < (float)of->capacity ? (int64_t)count : of->capacity;
}

static int64_t filled_before(const struct experts *of, int64_t row, int64_t expert)
{
    int64_t total = 0;
    for (int64_t r = 0; r < row; r++) total += filled(of, r, expert);
    return total;
}

/* bf16 products are prepared once per shape, so packed rows are padded with zeros to a multiple of 32. */
static int64_t packed_rows(const struct experts *of, int64_t count)
{
    return of->half ? (count + 31) / 32 * 32 : count;
}

static int64_t most_rows(const struct experts *of)
{
    return packed_rows(of, of->rows * of->capacity);
}

static size_t element_bytes(const struct experts *of)
{
    return of->half ? 2 : 4;
}

/* Copies an expert's filled slots to contiguous [packed rows][columns]. */
static void pack(const struct experts *of, int64_t expert, const void *slots, int64_t columns, void *to)
{
    const size_t row_bytes = (size_t)columns * element_bytes(of);
    const int64_t total = filled_before(of, of->rows, expert);
#pragma omp parallel for schedule(static) num_threads(threads_for(of->call, total *columns))
    for (int64_t r = 0; r < of->rows; r++)
        memcpy((char *)to + (size_t)filled_before(of, r, expert) * row_bytes,
               (const char *)slots + (size_t)((r * of->experts + expert) * of->capacity) * row_bytes,
               (size_t)filled(of, r, expert) * row_bytes);
    memset((char *)to + (size_t)total * row_bytes, 0, (size_t)(packed_rows(of, total) - total) * row_bytes);
}

/* Copies back to the slots, with `bias` added to filled ones. Empty slots become 0, or stay as they are when adding. */
INLINE void unpack(const struct experts *of, int64_t expert, const void *from, const void *bias, int64_t columns,
                   bool half, bool accumulate, void *slots)
{
#pragma omp parallel for schedule(static) num_threads(threads_for(of->call, of->rows * of->capacity * columns))
    for (int64_t r = 0; r < of->rows; r++) {
        const int64_t first = (r * of->experts + expert) * of->capacity * columns, count = filled(of, r, expert);
        const int64_t packed = filled_before(of, r, expert) * columns;
        for (int64_t s = 0; s < count; s++)
            for (int64_t c = 0; c < columns; c += LANES) {
                const int64_t left = columns - c, at = first + s * columns + c;
                vector value = load(from, packed + s * columns + c, left, half);
                if (bias) value += load(bias, c, left, half);
                if (accumulate) value += load(slots, at, left, half);
                store(slots, at, left, half, value);
            }
        if (accumulate) continue;
        memset((char *)slots + (size_t)(first + count * columns) * element_bytes(of), 0,
               (size_t)((of->capacity - count) * columns) * element_bytes(of));
    }
}

/* A product with one expert's weights; `rows`: packed rows. */
static struct gemm slots_gemm(const struct experts *of, int64_t rows, int64_t in, int64_t out, bool transposed)
{
    const enum hapt_dtype dtype = of->half ? HAPT_BF16 : HAPT_F32;
    return (struct gemm){.m = rows,
                         .n = out,
                         .k = in,
                         .transpose_b = transposed,
                         .in = dtype,
                         .out = dtype,
                         .threads = of->call->threads};
}

/* dw [out][in] += dy' x */
static struct gemm weights_gemm(const struct experts *of, int64_t rows, int64_t in, int64_t out)
{
    return (struct gemm){.m = out,
                         .n = in,
                         .k = rows,
                         .transpose_a = true,
                         .in = of->half ? HAPT_BF16 : HAPT_F32,
                         .out = HAPT_F32,
                         .accumulate = of->call->accumulate & 1u,
                         .threads = of->call->threads};
}

/* Forward and the gradient of x: input slots, weights, counts (, bias); output slots. */
INLINE enum hapt_status slots_product(const struct hapt_call *call, bool half, bool transposed)
{
    const struct hapt_view *from = &call->input[0], *to = &call->output[0];
    const struct experts of = experts_of(call, from, &call->input[2]);
    const int64_t in = view_columns(from), out = view_columns(to),
                  weight_bytes = in * out * (int64_t)element_bytes(&of);
    const char *bias = call->input_count > 3 ? call->input[3].data : NULL;
    char *packed = call->workspace, *product = packed + hapt_align((size_t)(most_rows(&of) * in) * element_bytes(&of));
    char *scratch = product + hapt_align((size_t)(most_rows(&of) * out) * element_bytes(&of));
    for (int64_t e = 0; e < of.experts; e++) {
        const int64_t rows = packed_rows(&of, filled_before(&of, of.rows, e));
        const char *own_bias = bias ? bias + (size_t)(e * out) * element_bytes(&of) : NULL;
        struct gemm gemm = slots_gemm(&of, rows, in, out, transposed);
        gemm.a = packed;
        gemm.b = (const char *)call->input[1].data + e * weight_bytes;
        gemm.c = product;
        if (half) gemm.bias = own_bias; /* rounds once */
        pack(&of, e, from->data, in, packed);
        if (rows > 0) HAPT_TRY(ISA_NAME(hapt_product_run)(call, &gemm, scratch));
        unpack(&of, e, product, half ? NULL : own_bias, out, half, call->accumulate & 1u, to->data);
    }
    return HAPT_OK;
}

/* Column sums of packed dy. Threads own columns, so the bits never change. */
INLINE void bias_gradient(const struct experts *of, const void *dy, int64_t rows, int64_t columns, bool half, float *db)
{
    const bool accumulate = of->call->accumulate >> 1 & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(of->call, rows *columns))
    for (int64_t c = 0; c < columns; c += LANES) {
        const int64_t left = columns - c;
        struct sum sum = {0};
        for (int64_t r = 0; r < rows; r++) sum_add(&sum, load(dy, r * columns + c, left, half));
        vector total = sum.total + sum.partial;
        if (accumulate) total += load(db, c, left, false);
        store(db, c, left, false, total);
    }
}

/* Gradients of weights and biases: input x, counts, dy; output dw, db. */
INLINE enum hapt_status weights_product(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0], *dy = &call->input[2];
    const struct experts of = experts_of(call, x, &call->input[1]);
    const int64_t in = view_columns(x), out = view_columns(dy);
    float *dw = call->output[0].data, *db = call->output_count > 1 ? call->output[1].data : NULL;
    char *packed_x = call->workspace,
         *packed_dy = packed_x + hapt_align((size_t)(most_rows(&of) * in) * element_bytes(&of));
    char *scratch = packed_dy + hapt_align((size_t)(most_rows(&of) * out) * element_bytes(&of));
    for (int64_t e = 0; e < of.experts; e++) {
        const int64_t rows = packed_rows(&of, filled_before(&of, of.rows, e));
        struct gemm gemm = weights_gemm(&of, rows, in, out);
        gemm.a = packed_dy;
        gemm.b = packed_x;
        gemm.c = dw + e * in * out;
        pack(&of, e, x->data, in, packed_x);
        pack(&of, e, dy->data, out, packed_dy);
        if (db) bias_gradient(&of, packed_dy, rows, out, half, db + e * out);
        if (rows > 0)
            HAPT_TRY(ISA_NAME(hapt_product_run)(call, &gemm, scratch));
        else if (!gemm.accumulate)
            memset(gemm.c, 0, (size_t)(in * out) * sizeof(float));
    }
    return HAPT_OK;
}

/* Workspace of products with any number of packed rows. */
static size_t product_scratch(const struct experts *of, int64_t in, int64_t out, bool weights, bool transposed)
{
    size_t most = 0;
    for (int64_t rows = 32; of->half && rows <= most_rows(of); rows += 32) {
        const struct gemm gemm = weights ? weights_gemm(of, rows, in, out) : slots_gemm(of, rows, in, out, transposed);
        const size_t need = ISA_NAME(hapt_cpu_product_workspace)(&gemm);
        most = need > most ? need : most;
    }
    return most;
}

static size_t packed_bytes(const struct experts *of, int64_t in, int64_t out)
{
    return hapt_align((size_t)(most_rows(of) * in) * element_bytes(of)) +
           hapt_align((size_t)(most_rows(of) * out) * element_bytes(of));
}

static size_t slots_workspace(const struct hapt_call *call, bool transposed)
{
    const struct experts of = experts_of(call, &call->input[0], &call->input[2]);
    const int64_t in = view_columns(&call->input[0]), out = view_columns(&call->output[0]);
    return packed_bytes(&of, in, out) + product_scratch(&of, in, out, false, transposed);
}

static size_t forward_workspace(const struct hapt_call *call)
{
    return slots_workspace(call, true);
}

static size_t dx_workspace(const struct hapt_call *call)
{
    return slots_workspace(call, false);
}

static size_t dw_workspace(const struct hapt_call *call)
{
    const struct experts of = experts_of(call, &call->input[0], &call->input[1]);
    const int64_t in = view_columns(&call->input[0]), out = view_columns(&call->input[2]);
    return packed_bytes(&of, in, out) + product_scratch(&of, in, out, true, false);
}

KERNELS(forward, return slots_product(call, half, true))
KERNELS(dx, return slots_product(call, half, false))
KERNELS(dw, return weights_product(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_expert)[] = {
    KERNEL_ROWS("expert_linear", forward_workspace, forward),
    KERNEL_ROWS("expert_linear_dx", dx_workspace, dx),
    KERNEL_ROWS("expert_linear_dw", dw_workspace, dw),
    {HAPT_F32, {NULL, NULL, NULL}},
};
