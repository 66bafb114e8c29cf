/* Functions of one or two tensors, element by element. */
#ifndef HAPT_CUDA_MAPS_CUH
#define HAPT_CUDA_MAPS_CUH

#include <type_traits>

#include "kernel.cuh"

enum { MAP_THREADS = 256 };

/* out[i] = f(a[i], b[i]) (+ out[i]); an absent b counts as 0. Four elements per thread and turn. */
template <class From, class To, class Function>
__global__ void map_kernel(const From *a, const From *b, To *out, int64_t count, bool accumulate, Function function)
{
    for (GRID_STRIDE(i, count)) {
        const float value = function(to_float(a[i]), b ? to_float(b[i]) : 0.0f);
        out[i] = from_float<To>(accumulate ? to_float(out[i]) + value : value);
    }
}

/* The same for elements of one type, 16 bytes at a time. */
template <class Element, class Function>
__global__ void map_packs(const pack<Element> *a, const pack<Element> *b, pack<Element> *out, int64_t packs,
                          bool accumulate, Function function)
{
    for (GRID_STRIDE(i, packs)) {
        const pack<Element> x = a[i], y = b ? b[i] : a[i];
        pack<Element> result = {};
        if (accumulate) result = out[i];
        for (int e = 0; e < pack<Element>::COUNT; e++) {
            const float value = function(to_float(x.element[e]), b ? to_float(y.element[e]) : 0.0f);
            result.element[e] = from_float<Element>(accumulate ? to_float(result.element[e]) + value : value);
        }
        out[i] = result;
    }
}

template <class From, class To, class Function>
static enum hapt_status map(const struct hapt_call *call, struct hapt_queue *queue, const void *a, const void *b,
                            Function function)
{
    const int64_t count = hapt_view_elements(&call->output[0]);
    const bool accumulate = call->accumulate & 1u;
    void *out = call->output[0].data;
    int64_t packed = 0;
    if constexpr (std::is_same_v<From, To>) {
        if (aligned_16(a) && aligned_16(b) && aligned_16(out)) packed = count / pack<From>::COUNT;
        HAPT_TRY(launch(map_packs<From, Function>, blocks_for(packed, MAP_THREADS), MAP_THREADS, 0, queue,
                        (const pack<From> *)a, (const pack<From> *)b, (pack<From> *)out, packed, accumulate, function));
        packed *= pack<From>::COUNT;
    }
    return launch(map_kernel<From, To, Function>, blocks_for(count - packed, MAP_THREADS), MAP_THREADS, 0, queue,
                  (const From *)a + packed, b ? (const From *)b + packed : NULL, (To *)out + packed, count - packed,
                  accumulate, function);
}

/* map for operators that never add to their output; only their gradients do. */
template <class Element, class Function>
static enum hapt_status map_plain(const struct hapt_call *call, struct hapt_queue *queue, const void *a, const void *b,
                                  Function function)
{
    struct hapt_call plain = *call;
    plain.accumulate = 0;
    return map<Element, Element>(&plain, queue, a, b, function);
}

/* a + b, or a alone. */
struct sum_of {
    __device__ float operator()(float a, float b) const
    {
        return a + b;
    }
};

#endif
