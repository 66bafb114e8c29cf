/* Convolutions and their gradients by oneDNN, and the bias gradient: sums over rows and pixels. */
#include "convolution.h"
#include "isa.h"

/* Operands of a call: views of x, w and y, and which of them is the result. */
struct parts {
    const struct hapt_view *x, *w, *y, *bias;
    enum convolution_kind kind;
    bool grouped; /* the number of groups comes before the other attributes */
};

static struct convolution describe(const struct hapt_call *call, struct parts parts, enum hapt_dtype dtype)
{
    const struct hapt_view *x = parts.x, *w = parts.w, *y = parts.y;
    const int64_t *attribute = call->integer + parts.grouped;
    return (struct convolution){.kind = parts.kind,
                                .dtype = NATIVE_HALF ? dtype : HAPT_F32,
                                .rows = x->shape[0],
                                .in = x->shape[1],
                                .height = x->shape[2],
                                .width = x->shape[3],
                                .out = y->shape[1],
                                .out_height = y->shape[2],
                                .out_width = y->shape[3],
                                .kernel_height = w->shape[2],
                                .kernel_width = w->shape[3],
                                .stride = attribute[0],
                                .padding = attribute[1],
                                .groups = parts.grouped ? call->integer[0] : 1,
                                .dilation = parts.grouped && attribute[2] > 0 ? attribute[2] : 1,
                                .threads = call->threads};
}

static size_t widened_bytes(const struct hapt_view *view)
{
    return hapt_align((size_t)hapt_view_elements(view) * sizeof(float));
}

static struct parts forward_parts(const struct hapt_call *call, bool grouped)
{
    return (struct parts){&call->input[0], &call->input[1],     &call->output[0],
                          &call->input[2], CONVOLUTION_FORWARD, grouped};
}

static struct parts dx_parts(const struct hapt_call *call, bool grouped)
{
    return (struct parts){&call->output[0], &call->input[1], &call->input[0], NULL, CONVOLUTION_DX, grouped};
}

static struct parts dw_parts(const struct hapt_call *call, bool grouped)
{
    return (struct parts){&call->input[0], &call->output[0], &call->input[1], NULL, CONVOLUTION_DW, grouped};
}

static size_t workspace_of(const struct hapt_call *call, struct parts parts, enum hapt_dtype dtype)
{
    const struct convolution convolution = describe(call, parts, dtype);
    size_t bytes = hapt_convolution_workspace(&convolution);
    if (dtype == HAPT_BF16 && !NATIVE_HALF)
        bytes += widened_bytes(parts.x) + widened_bytes(parts.w) + widened_bytes(parts.y) +
                 (size_t)(parts.y->shape[1] + 15) / 16 * 64;
    return bytes;
}

/* bf16 through fp32 copies, which come first in the workspace, before oneDNN's part. */
static enum hapt_status run_widened(const struct hapt_call *call, struct parts parts,
                                    const struct convolution *convolution, bool accumulate)
{
    const struct hapt_view *view[3] = {parts.x, parts.w, parts.y};
    const int result = parts.kind == CONVOLUTION_FORWARD ? 2 : parts.kind == CONVOLUTION_DX ? 0 : 1;
    const int64_t channels = parts.y->shape[1];
    char *at = call->workspace;
    float *wide[3], *bias = NULL;
    for (int o = 0; o < 3; o++) {
        const int64_t elements = hapt_view_elements(view[o]);
        wide[o] = (float *)at;
        at += widened_bytes(view[o]);
        if (view[o]->dtype == HAPT_F32) wide[o] = view[o]->data; /* the weight gradient is fp32 */
        if (view[o]->dtype == HAPT_BF16 && (o != result || accumulate))
            convert(wide[o], false, view[o]->data, true, elements, threads_for(call, elements));
    }
    if (parts.bias && parts.bias->data) {
        bias = (float *)at;
        convert(bias, false, parts.bias->data, true, channels, 1);
    }
    at += (channels + 15) / 16 * 64;
    HAPT_TRY(hapt_convolution_run(convolution, wide[0], wide[1], wide[2], bias, accumulate, at));
    if (view[result]->dtype != HAPT_BF16) return HAPT_OK;
    const int64_t elements = hapt_view_elements(view[result]);
    convert(view[result]->data, true, wide[result], false, elements, threads_for(call, elements));
    return HAPT_OK;
}

static enum hapt_status run(const struct hapt_call *call, struct parts parts, enum hapt_dtype dtype, bool accumulate)
{
    const struct convolution convolution = describe(call, parts, dtype);
    if (dtype == HAPT_BF16 && !NATIVE_HALF) return run_widened(call, parts, &convolution, accumulate);
    return hapt_convolution_run(&convolution, parts.x->data, parts.w->data, parts.y->data,
                                parts.bias ? parts.bias->data : NULL, accumulate, call->workspace);
}

static enum hapt_status forward(const struct hapt_call *call, enum hapt_dtype dtype, bool grouped)
{
    return run(call, forward_parts(call, grouped), dtype, false);
}

static enum hapt_status input_gradient(const struct hapt_call *call, enum hapt_dtype dtype, bool grouped)
{
    return run(call, dx_parts(call, grouped), dtype, call->accumulate & 1u);
}

/* Sums dy [rows][channels][pixels] over rows and pixels; one thread per channel. */
INLINE void bias_gradient(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dy = &call->input[1];
    const int64_t rows = dy->shape[0], channels = dy->shape[1], pixels = dy->shape[2] * dy->shape[3];
    float *db = call->output[1].data;
    const bool accumulate = call->accumulate >> 1 & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *channels *pixels))
    for (int64_t c = 0; c < channels; c++) {
        struct sum sum = {0};
        for (int64_t r = 0; r < rows; r++)
            for (int64_t i = 0; i < pixels; i += LANES)
                sum_add(&sum, load(dy->data, (r * channels + c) * pixels + i, pixels - i, half));
        db[c] = (float)(sum_total(&sum) + (accumulate ? db[c] : 0));
    }
}

static enum hapt_status weight_gradient(const struct hapt_call *call, enum hapt_dtype dtype, bool grouped)
{
    if (call->output_count > 1 && call->output[1].data) {
        if (dtype == HAPT_BF16)
            bias_gradient(call, true);
        else
            bias_gradient(call, false);
    }
    return run(call, dw_parts(call, grouped), dtype, call->accumulate & 1u);
}

#define ENTRY(name, body, parts, type, grouped)                                          \
    static enum hapt_status name(const struct hapt_call *call, struct hapt_queue *queue) \
    {                                                                                    \
        (void)queue;                                                                     \
        return body(call, type, grouped);                                                \
    }                                                                                    \
    static size_t name##_workspace(const struct hapt_call *call)                         \
    {                                                                                    \
        return workspace_of(call, parts(call, grouped), type);                           \
    }
#define ENTRIES(name, body, parts)                           \
    ENTRY(name##_f32, body, parts, HAPT_F32, false)          \
    ENTRY(name##_bf16, body, parts, HAPT_BF16, false)        \
    ENTRY(grouped_##name##_f32, body, parts, HAPT_F32, true) \
    ENTRY(grouped_##name##_bf16, body, parts, HAPT_BF16, true)

ENTRIES(forward, forward, forward_parts)
ENTRIES(dx, input_gradient, dx_parts)
ENTRIES(dw, weight_gradient, dw_parts)

#define ROWS(op, name)                                  \
    {HAPT_F32, {op, name##_f32_workspace, name##_f32}}, \
    {                                                   \
        HAPT_BF16,                                      \
        {                                               \
            op, name##_bf16_workspace, name##_bf16      \
        }                                               \
    }

const struct cpu_kernel ISA_NAME(hapt_cpu_convolution)[] = {
    ROWS("conv2d", forward),
    ROWS("conv2d_dx", dx),
    ROWS("conv2d_dw", dw),
    ROWS("grouped_conv2d", grouped_forward),
    ROWS("grouped_conv2d_dx", grouped_dx),
    ROWS("grouped_conv2d_dw", grouped_dw),
    {HAPT_F32, {NULL, NULL, NULL}},
};
