/*
 * Linear layers with packed weights (packing.h): the weight is unpacked to the workspace, then the kernels of plain
 * linear layers run.
 */
#include "kernels.h"
#include "rows.cuh"

#define HAPT_PACKING_FUNCTION static __host__ __device__ __forceinline__
#include "hapt/packing.h"

enum { THREADS = 256 };

/* w [blocks][words] -> [blocks][32] */
template <class Element>
__global__ void unpack_kernel(int64_t blocks, int64_t words, const float *packed, Element *unpacked)
{
    const enum hapt_packing packing = hapt_packing_of(words);
    for (GRID_STRIDE(i, blocks * HAPT_PACKING_COLUMNS)) {
        const float *block = packed + i / HAPT_PACKING_COLUMNS * words;
        const int c = (int)(i % HAPT_PACKING_COLUMNS);
        unpacked[i] = from_float<Element>(hapt_packing_value(packing, block, c));
    }
}

/* The call of the plain layer, with the unpacked weight, which is first in the workspace. */
static struct hapt_call plain_call(const struct hapt_call *call, enum hapt_dtype dtype, size_t *unpacked_bytes)
{
    struct hapt_call plain = *call;
    const struct hapt_view *w = &call->input[1];
    const int64_t columns = w->shape[1] * HAPT_PACKING_COLUMNS;
    const struct hapt_view unpacked = {call->workspace, dtype, 2, {w->shape[0], columns}};
    *unpacked_bytes = ((size_t)(w->shape[0] * columns) * (dtype == HAPT_F32 ? 4 : 2) + 255) / 256 * 256;
    plain.input[1] = unpacked;
    plain.workspace = (char *)call->workspace + *unpacked_bytes;
    plain.workspace_bytes = call->workspace_bytes > *unpacked_bytes ? call->workspace_bytes - *unpacked_bytes : 0;
    return plain;
}

template <enum hapt_dtype DTYPE, bool BACKWARD> static size_t packed_workspace(const struct hapt_call *call)
{
    const struct hapt_kernel *kernel = cuda_kernel_find(BACKWARD ? "linear_t_dx" : "linear_t", DTYPE);
    size_t unpacked_bytes;
    const struct hapt_call plain = plain_call(call, DTYPE, &unpacked_bytes);
    return unpacked_bytes + (kernel->workspace_bytes ? kernel->workspace_bytes(&plain) : 0);
}

template <class Element, enum hapt_dtype DTYPE, bool BACKWARD>
static enum hapt_status packed_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *w = &call->input[1];
    const int64_t blocks = w->shape[0] * w->shape[1];
    size_t unpacked_bytes;
    const struct hapt_call plain = plain_call(call, DTYPE, &unpacked_bytes);
    if (blocks == 0) return HAPT_OK;
    HAPT_TRY(launch(unpack_kernel<Element>, blocks_for(blocks * HAPT_PACKING_COLUMNS, THREADS), THREADS, 0, queue,
                    blocks, w->shape[2], (const float *)w->data, (Element *)call->workspace));
    return cuda_kernel_find(BACKWARD ? "linear_t_dx" : "linear_t", DTYPE)->run(&plain, queue);
}

#define PACKED_ROW(op, dtype, Element, backward)                                        \
    {                                                                                   \
        dtype,                                                                          \
        {                                                                               \
            op, packed_workspace<dtype, backward>, packed_run<Element, dtype, backward> \
        }                                                                               \
    }
#define PACKED(op, backward)                                                                       \
    PACKED_ROW(op, HAPT_F32, float, backward), PACKED_ROW(op, HAPT_BF16, __nv_bfloat16, backward), \
        PACKED_ROW(op, HAPT_F16, __half, backward)

extern const struct cuda_kernel hapt_cuda_packed[] = {
    PACKED("linear_packed", false),
    PACKED("linear_packed_dx", true),
    CUDA_KERNELS_END,
};
