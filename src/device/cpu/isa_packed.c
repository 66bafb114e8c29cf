/*
 * Linear layers with packed weights (packing.h): the weight is unpacked to the workspace, then the kernels of plain
 * linear layers run.
 */
#include "hapt/packing.h"
#include "isa.h"

/* w [out][blocks][words] */
static size_t unpacked_bytes(const struct hapt_view *w, enum hapt_dtype dtype)
{
    return hapt_align((size_t)(w->shape[0] * w->shape[1] * HAPT_PACKING_COLUMNS) * hapt_dtype_bytes(dtype));
}

INLINE vector int8_columns(const char *block, int64_t first)
{
    float scale;
    signed char column[LANES];
    vector value;
    memcpy(&scale, block + HAPT_PACKING_COLUMNS, sizeof scale);
    memcpy(column, block + first, sizeof column);
    for (int l = 0; l < LANES; l++) value[l] = (float)column[l];
    return scale * value;
}

INLINE vector nf4_columns(const char *block, int64_t first)
{
    vector value;
#if LANES == 16 /* as many as levels: one permutation */
    ivector code;
    vector level;
    float scale;
    for (int k = 0; k < LANES; k++) level[k] = hapt_packing_nf4_level(k);
    for (int l = 0; l < LANES; l++) code[l] = ((const uint8_t *)block)[(first + l) / 2] >> 4 * (l % 2) & 15;
    memcpy(&scale, block + HAPT_PACKING_COLUMNS / 2, sizeof scale);
    value = scale * __builtin_shuffle(level, code);
#else
    for (int l = 0; l < LANES; l++) value[l] = hapt_packing_nf4(block, (int)first + l);
#endif
    return value;
}

INLINE vector block_columns(enum hapt_packing packing, const char *block, int64_t first)
{
    switch (packing) {
    case HAPT_PACKING_INT8: return int8_columns(block, first);
    case HAPT_PACKING_BF16: return load(block, first, LANES, true);
    case HAPT_PACKING_NF4: return nf4_columns(block, first);
    case HAPT_PACKING_NONE:
    case HAPT_PACKINGS: break;
    }
    return vector_set(NAN);
}

/* Row by row into [out][32 blocks]. */
INLINE void unpack(const struct hapt_call *call, const struct hapt_view *w, bool half)
{
    const int64_t blocks = w->shape[0] * w->shape[1], words = w->shape[2];
    const enum hapt_packing packing = hapt_packing_of(words);
    const char *from = w->data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, blocks *HAPT_PACKING_COLUMNS))
    for (int64_t b = 0; b < blocks; b++) {
        const char *block = from + b * words * (int64_t)sizeof(float);
        for (int64_t c = 0; c < HAPT_PACKING_COLUMNS; c += LANES)
            store(call->workspace, b * HAPT_PACKING_COLUMNS + c, LANES, half, block_columns(packing, block, c));
    }
}

/* The call of the plain layer, with the unpacked weight, which is first in the workspace. */
static struct hapt_call plain_call(const struct hapt_call *call, enum hapt_dtype dtype)
{
    struct hapt_call plain = *call;
    const struct hapt_view *w = &call->input[1];
    const size_t bytes = unpacked_bytes(w, dtype);
    plain.input[1] = (struct hapt_view){
        .data = call->workspace, .dtype = dtype, .dims = 2, .shape = {w->shape[0], w->shape[1] * HAPT_PACKING_COLUMNS}};
    plain.workspace = call->workspace ? (char *)call->workspace + bytes : NULL;
    plain.workspace_bytes = call->workspace_bytes > bytes ? call->workspace_bytes - bytes : 0;
    return plain;
}

static const struct hapt_kernel *plain_kernel(enum hapt_dtype dtype, bool backward)
{
    return hapt_cpu_kernel_find(backward ? "linear_t_dx" : "linear_t", dtype);
}

static size_t workspace(const struct hapt_call *call, enum hapt_dtype dtype, bool backward)
{
    const struct hapt_kernel *kernel = plain_kernel(dtype, backward);
    const struct hapt_call plain = plain_call(call, dtype);
    return unpacked_bytes(&call->input[1], dtype) + (kernel->workspace_bytes ? kernel->workspace_bytes(&plain) : 0);
}

INLINE enum hapt_status run(const struct hapt_call *call, struct hapt_queue *queue, enum hapt_dtype dtype,
                            bool backward)
{
    const struct hapt_call plain = plain_call(call, dtype);
    unpack(call, &call->input[1], dtype == HAPT_BF16);
    return plain_kernel(dtype, backward)->run(&plain, queue);
}

#define PACKED(name, dtype, backward)                                                    \
    static size_t name##_workspace(const struct hapt_call *call)                         \
    {                                                                                    \
        return workspace(call, dtype, backward);                                         \
    }                                                                                    \
    static enum hapt_status name(const struct hapt_call *call, struct hapt_queue *queue) \
    {                                                                                    \
        return run(call, queue, dtype, backward);                                        \
    }

PACKED(forward_f32, HAPT_F32, false)
PACKED(forward_bf16, HAPT_BF16, false)
PACKED(dx_f32, HAPT_F32, true)
PACKED(dx_bf16, HAPT_BF16, true)

const struct cpu_kernel ISA_NAME(hapt_cpu_packed)[] = {
    {HAPT_F32, {"linear_packed", forward_f32_workspace, forward_f32}},
    {HAPT_BF16, {"linear_packed", forward_bf16_workspace, forward_bf16}},
    {HAPT_F32, {"linear_packed_dx", dx_f32_workspace, dx_f32}},
    {HAPT_BF16, {"linear_packed_dx", dx_bf16_workspace, dx_bf16}},
    {HAPT_F32, {NULL, NULL, NULL}},
};
