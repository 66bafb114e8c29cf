/*
 * Kernels that move elements or sum them along dimensions: reshape, permute, expand, slice, pad, concat, sum, mean.
 * Sums are computed in fp32, in an order that the shapes alone decide.
 */
#include <string.h>
#include <type_traits>

#include "maps.cuh"

#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256 };

/* ---- moving ---- */

/* Elements of a box, with the steps of its dimensions in two tensors (elements). */
struct move {
    int dims;
    int64_t extent[HAPT_MAX_DIMS], to[HAPT_MAX_DIMS], from[HAPT_MAX_DIMS];
};

struct offsets {
    int64_t to, from;
};

/* The offsets of element k. */
static __device__ __forceinline__ struct offsets offsets_of(const struct move &move, int64_t k)
{
    struct offsets at = {0, 0};
    UNROLL
    for (int d = HAPT_MAX_DIMS - 1; d > 0; d--) {
        if (d >= move.dims) continue;
        const int64_t outer = k / move.extent[d], i = k - outer * move.extent[d];
        at.to += i * move.to[d];
        at.from += i * move.from[d];
        k = outer;
    }
    at.to += k * move.to[0];
    at.from += k * move.from[0];
    return at;
}

static int64_t extents(const struct move &move)
{
    int64_t count = 1;
    for (int d = 0; d < move.dims; d++) count *= move.extent[d];
    return count;
}

/* Steps of a dense tensor. */
static void dense_steps(const struct hapt_view *view, int64_t *step)
{
    int64_t inner = 1;
    for (int d = view->dims - 1; d >= 0; d--) {
        step[d] = inner;
        inner *= view->shape[d];
    }
}

/* Drops dimensions of one element, and joins those that are one in both tensors. At least one is left. */
static struct move move_simplify(const struct move &move)
{
    struct move made = {};
    for (int d = 0; d < move.dims; d++) {
        const int last = made.dims - 1;
        if (move.extent[d] == 1) continue;
        if (made.dims > 0 && made.to[last] == move.to[d] * move.extent[d] &&
            made.from[last] == move.from[d] * move.extent[d]) {
            made.extent[last] *= move.extent[d];
            made.to[last] = move.to[d];
            made.from[last] = move.from[d];
            continue;
        }
        made.extent[made.dims] = move.extent[d];
        made.to[made.dims] = move.to[d];
        made.from[made.dims++] = move.from[d];
    }
    if (made.dims == 0) made.extent[made.dims++] = 1;
    return made;
}

/* True if packs of n elements along the last dimension are dense and start at multiples of n. */
static bool packs_along(const struct move &move, const int64_t *step, int n)
{
    const int last = move.dims - 1;
    bool fit = step[last] == 1 && move.extent[last] % n == 0;
    for (int d = 0; d < last; d++) fit = fit && step[d] % n == 0;
    return fit;
}

/* to (+)= scale from; `count` times N elements. `same`: all N are one element of `from`. */
template <class Element, int N>
static __global__ void move_kernel(struct move move, int64_t count, Element *to, const Element *from, bool same,
                                   float scale, bool accumulate)
{
    for (GRID_STRIDE(i, count)) {
        const struct offsets at = offsets_of(move, i);
        float value[N];
        if (same) {
            load<1>(from + at.from, value);
            for (int e = 1; e < N; e++) value[e] = value[0];
        } else {
            load<N>(from + at.from, value);
        }
        for (int e = 0; e < N; e++) value[e] *= scale;
        store<N>(to + at.to, value, accumulate);
    }
}

template <class Element>
static enum hapt_status move_run(const struct move &given, Element *to, const Element *from, float scale,
                                 bool accumulate, struct hapt_queue *queue)
{
    constexpr int N = pack<Element>::COUNT;
    struct move move = move_simplify(given);
    const int last = move.dims - 1;
    const bool same = move.from[last] == 0;
    const int64_t count = extents(move);
    if (!packs_along(move, move.to, N) || !aligned_16(to) ||
        (!same && (!packs_along(move, move.from, N) || !aligned_16(from))))
        return launch(move_kernel<Element, 1>, blocks_for(count, THREADS), THREADS, 0, queue, move, count, to, from,
                      same, scale, accumulate);
    move.extent[last] /= N;
    move.to[last] *= N;
    move.from[last] *= N;
    return launch(move_kernel<Element, N>, blocks_for(count / N, THREADS), THREADS, 0, queue, move, count / N, to, from,
                  same, scale, accumulate);
}

template <class Element> static enum hapt_status zero_run(const struct hapt_view *view, struct hapt_queue *queue)
{
    const int64_t elements = hapt_view_elements(view);
    if (elements == 0) return HAPT_OK;
    return cuda_check(cudaMemsetAsync(view->data, 0, (size_t)elements * sizeof(Element), queue->stream), "zeroing");
}

/* input: x; output: y, whose dimension d is dimension integer[d] of x */
template <class Element> static enum hapt_status permute_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    int64_t step[HAPT_MAX_DIMS];
    struct move move = {};
    move.dims = y->dims;
    dense_steps(x, step);
    dense_steps(y, move.to);
    for (int d = 0; d < y->dims; d++) {
        move.extent[d] = y->shape[d];
        move.from[d] = step[call->integer[d]];
    }
    return move_run(move, (Element *)y->data, (const Element *)x->data, 1.0f, call->accumulate & 1u, queue);
}

template <class Element> static enum hapt_status reshape_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct move move = {1, {hapt_view_elements(&call->output[0])}, {1}, {1}};
    return move_run(move, (Element *)call->output[0].data, (const Element *)call->input[0].data, 1.0f,
                    call->accumulate & 1u, queue);
}

/* Moves the narrow tensor into a region of the wide one (`into`), or out of it. The region begins at `first` of
 * dimension `dim` and has each step-th element. */
template <class Element>
static enum hapt_status region_run(const struct hapt_view *narrow, const struct hapt_view *wide, int64_t dim,
                                   int64_t first, int64_t step, bool into, bool accumulate, struct hapt_queue *queue)
{
    struct move move = {};
    int64_t *const wide_step = into ? move.to : move.from, *const narrow_step = into ? move.from : move.to;
    move.dims = narrow->dims;
    memcpy(move.extent, narrow->shape, sizeof move.extent);
    dense_steps(wide, wide_step);
    dense_steps(narrow, narrow_step);
    Element *const region = (Element *)wide->data + first * wide_step[dim], *const whole = (Element *)narrow->data;
    wide_step[dim] *= step;
    return move_run<Element>(move, into ? region : whole, into ? whole : region, 1.0f, accumulate, queue);
}

static int64_t step_of(const struct hapt_call *call)
{
    return call->integer[3] ? call->integer[3] : 1;
}

template <class Element> static enum hapt_status slice_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return region_run<Element>(&call->output[0], &call->input[0], call->integer[0], call->integer[1], step_of(call),
                               false, call->accumulate & 1u, queue);
}

template <class Element> static enum hapt_status slice_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const bool accumulate = call->accumulate & 1u;
    if (!accumulate) HAPT_TRY(zero_run<Element>(&call->output[0], queue));
    return region_run<Element>(&call->input[0], &call->output[0], call->integer[0], call->integer[1], step_of(call),
                               true, accumulate, queue);
}

template <class Element> static enum hapt_status pad_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    HAPT_TRY(zero_run<Element>(&call->output[0], queue));
    return region_run<Element>(&call->input[0], &call->output[0], call->integer[0], call->integer[1], 1, true, false,
                               queue);
}

template <class Element> static enum hapt_status concat_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *a = &call->input[0], *b = &call->input[1], *y = &call->output[0];
    const int64_t dim = call->integer[0];
    HAPT_TRY(region_run<Element>(a, y, dim, 0, 1, true, false, queue));
    return region_run<Element>(b, y, dim, a->shape[dim], 1, true, false, queue);
}

/* ---- repeating and summing ---- */

enum kind { EXPANSION, SUM, MEAN };

/* Bit d: the narrow tensor lacks dimension d of the wide one. integer[0]: dimensions that are summed; integer[1]: they
 * are kept with one element. */
template <enum kind KIND> static unsigned missing_of(const struct hapt_call *call)
{
    return KIND == EXPANSION || call->integer[1] ? 0 : (unsigned)call->integer[0];
}

/* A mean divides by the number of elements that it takes. */
template <enum kind KIND> static float scale_of(const struct hapt_view *narrow, const struct hapt_view *wide)
{
    return KIND == MEAN ? (float)((double)hapt_view_elements(narrow) / (double)hapt_view_elements(wide)) : 1.0f;
}

/* Steps of a tensor that is repeated along some dimensions of `wide`. Its dimensions are those of `wide`, except where
 * bit d of `missing` is set. */
static void repeated_steps(const struct hapt_view *narrow, const struct hapt_view *wide, unsigned missing,
                           int64_t step[HAPT_MAX_DIMS])
{
    int64_t inner = 1;
    int at = narrow->dims - 1;
    for (int d = wide->dims - 1; d >= 0; d--) {
        if (missing >> d & 1u) {
            step[d] = 0;
            continue;
        }
        const int64_t size = at >= 0 ? narrow->shape[at] : 1;
        step[d] = size == 1 ? 0 : inner;
        inner *= size;
        at--;
    }
}

/* y (+)= x, repeated; or dx (+)= dy, repeated and divided by the number of elements of a mean */
template <class Element, enum kind KIND>
static enum hapt_status repeat_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    struct move move = {};
    move.dims = y->dims;
    memcpy(move.extent, y->shape, sizeof move.extent);
    dense_steps(y, move.to);
    repeated_steps(x, y, missing_of<KIND>(call), move.from);
    return move_run(move, (Element *)y->data, (const Element *)x->data, scale_of<KIND>(x, y), call->accumulate & 1u,
                    queue);
}

/*
 * A dense tensor in two parts: dimensions that are kept, and those that are summed; `from`: steps in the tensor.
 *
 * If the innermost dimension is summed, a warp or block adds up a part of a result's elements, so that few results of
 * many elements keep the device busy, too. Otherwise a thread adds up a column.
 */
struct reduction {
    struct move kept, summed;
    int64_t results, count; /* elements of each result */
    int64_t part, parts;    /* elements of a part; parts of a result */
    float scale;
    bool accumulate;
};

/* FEW_RESULTS: fewer are summed in parts. FEW_ROWS: one thread adds up a column of at most so many elements. */
enum { FEW_RESULTS = 1024, PART_LEAST = 8192, PARTS = 1024, FEW_ROWS = 32 };

static bool line_is_summed(const struct reduction &by)
{
    return by.summed.from[by.summed.dims - 1] == 1;
}

template <enum kind KIND> static struct reduction reduction_of(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    int64_t dense[HAPT_MAX_DIMS], step[HAPT_MAX_DIMS];
    struct reduction by = {};
    dense_steps(x, dense);
    repeated_steps(y, x, missing_of<KIND>(call), step);
    for (int d = 0; d < x->dims; d++) {
        struct move *side = step[d] == 0 && x->shape[d] != 1 ? &by.summed : &by.kept;
        side->extent[side->dims] = x->shape[d];
        side->to[side->dims] = side->from[side->dims] = dense[d];
        side->dims++;
    }
    by.kept = move_simplify(by.kept);
    by.summed = move_simplify(by.summed);
    by.results = hapt_view_elements(y);
    by.count = extents(by.summed);
    const int64_t most = by.results < FEW_RESULTS ? PARTS : 1, even = round_up((by.count + most - 1) / most, 16);
    by.part = even > PART_LEAST ? even : (int64_t)PART_LEAST;
    by.parts = by.count > by.part ? (by.count + by.part - 1) / by.part : 1;
    by.scale = scale_of<KIND>(y, x);
    by.accumulate = call->accumulate & 1u;
    return by;
}

/* y [results][parts] (+)= scale times the sums of parts */
template <class From, class To, int N, bool WARP>
static __global__ void line_sums_kernel(struct reduction by, const From *x, To *y)
{
    __shared__ float shared[32];
    FOR_ROWS(row, by.results * by.parts)
    {
        const From *from = x + offsets_of(by.kept, row / by.parts).from;
        const int64_t first = row % by.parts * by.part, end = first + by.part < by.count ? first + by.part : by.count;
        float value[N], sum = 0;
        for (int64_t i = first + member * N; i < end; i += team * N) {
            load<N>(from + offsets_of(by.summed, i).from, value);
            for (int e = 0; e < N; e++) sum += value[e];
        }
        sum = by.scale * row_total<WARP>(sum, shared);
        if (member == 0) store<1>(y + row, &sum, by.accumulate);
    }
}

template <class From, class To, int N>
static enum hapt_status line_launch(const struct reduction &by, const From *x, To *y, struct hapt_queue *queue)
{
    const bool warp = (by.parts > 1 ? by.part : by.count) <= NARROW_ROW;
    return launch(warp ? line_sums_kernel<From, To, N, true> : line_sums_kernel<From, To, N, false>,
                  row_blocks(by.results * by.parts, warp), ROW_THREADS, 0, queue, by, x, y);
}

/* Dense rows: sums of a result's parts. */
static struct reduction part_reduction(const struct reduction &by)
{
    struct reduction total = by;
    total.kept = {1, {by.results}, {by.parts}, {by.parts}};
    total.summed = {1, {by.parts}, {1}, {1}};
    total.count = total.part = by.parts;
    total.parts = 1;
    return total;
}

/* Other dimensions than the innermost one have steps that are multiples of its size. So packs of it fit everywhere. */
template <class Element, int N>
static enum hapt_status line_sums(struct reduction by, const Element *x, Element *y, void *workspace,
                                  struct hapt_queue *queue)
{
    if (by.parts <= 1) return line_launch<Element, Element, N>(by, x, y, queue);
    const struct reduction total = part_reduction(by);
    float *part = (float *)workspace; /* [results][parts] */
    by.scale = 1.0f;
    by.accumulate = false;
    HAPT_TRY((line_launch<Element, float, N>(by, x, part, queue)));
    return line_launch<float, Element, 1>(total, part, y, queue);
}

/* N results per thread and turn. */
template <class Element, int N>
static __global__ void few_rows_kernel(struct reduction by, const Element *x, Element *y)
{
    for (GRID_STRIDE(i, by.results / N)) {
        const Element *from = x + offsets_of(by.kept, i * N).from;
        float value[N], sum[N] = {};
        for (int64_t s = 0; s < by.count; s++) {
            load<N>(from + offsets_of(by.summed, s).from, value);
            for (int e = 0; e < N; e++) sum[e] += value[e];
        }
        for (int e = 0; e < N; e++) sum[e] *= by.scale;
        store<N>(y + i * N, sum, by.accumulate);
    }
}

template <class Element> struct reduction_term {
    struct reduction by;
    const Element *x;
    template <int N> __device__ void operator()(struct width<N>, int64_t row, int64_t column, float (*value)[N]) const
    {
        load<N>(x + offsets_of(by.kept, column).from + offsets_of(by.summed, row).from, value[0]);
        for (int e = 0; e < N; e++) value[0][e] *= by.scale;
    }
};

/* Workspace bytes of the fp32 sums of 16-bit columns. */
static size_t totals_bytes(const struct reduction &by)
{
    return ((size_t)by.results * sizeof(float) + 255) / 256 * 256;
}

template <class Element, int N>
static enum hapt_status columns_run(const struct hapt_call *call, const struct reduction &by, struct hapt_queue *queue)
{
    const Element *x = (const Element *)call->input[0].data;
    if (by.count <= FEW_ROWS)
        return launch(few_rows_kernel<Element, N>, blocks_for(by.results / N, THREADS), THREADS, 0, queue, by, x,
                      (Element *)call->output[0].data);
    const struct reduction_term<Element> term = {
        by, x
    };
    constexpr bool DIRECT = std::is_same_v<Element, float>;
    float *total = (float *)(DIRECT ? call->output[0].data : call->workspace);
    char *part = (char *)call->workspace + (DIRECT ? 0 : totals_bytes(by));
    const bool accumulate = DIRECT && by.accumulate;
    HAPT_TRY((column_sums<1, N>(term, by.count, by.results, &total, &accumulate, part, queue)));
    return DIRECT ? HAPT_OK : map<float, Element>(call, queue, total, NULL, sum_of{});
}

template <enum kind KIND> static size_t reduce_workspace(const struct hapt_call *call)
{
    const struct reduction by = reduction_of<KIND>(call);
    if (line_is_summed(by)) return by.parts > 1 ? (size_t)(by.results * by.parts) * sizeof(float) : 0;
    return by.count > FEW_ROWS ? totals_bytes(by) + column_sums_workspace(by.count, by.results, 1) : 0;
}

/* y (+)= scale times the sums of x along the dimensions that y repeats. */
template <class Element, enum kind KIND>
static enum hapt_status reduce_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    constexpr int N = pack<Element>::COUNT;
    const struct reduction by = reduction_of<KIND>(call);
    const Element *x = (const Element *)call->input[0].data;
    Element *y = (Element *)call->output[0].data;
    if (by.results == 0) return HAPT_OK;
    if (line_is_summed(by))
        return packs_along(by.summed, by.summed.from, N) && aligned_16(x)
                   ? line_sums<Element, N>(by, x, y, call->workspace, queue)
                   : line_sums<Element, 1>(by, x, y, call->workspace, queue);
    return packs_along(by.kept, by.kept.from, N) && aligned_16(x) && aligned_16(y)
               ? columns_run<Element, N>(call, by, queue)
               : columns_run<Element, 1>(call, by, queue);
}

extern const struct cuda_kernel hapt_cuda_shape[] = {
    CUDA_KERNELS("permute", NULL, permute_run),
    CUDA_KERNELS("reshape", NULL, reshape_run),
    CUDA_KERNELS_WITH("expand", NULL, repeat_run, EXPANSION),
    CUDA_KERNELS_WITH("expand_dx", reduce_workspace<EXPANSION>, reduce_run, EXPANSION),
    CUDA_KERNELS("strided_slice", NULL, slice_run),
    CUDA_KERNELS("strided_slice_dx", NULL, slice_dx_run),
    CUDA_KERNELS("pad", NULL, pad_run),
    CUDA_KERNELS("concat", NULL, concat_run),
    CUDA_KERNELS_WITH("sum", reduce_workspace<SUM>, reduce_run, SUM),
    CUDA_KERNELS_WITH("sum_dx", NULL, repeat_run, SUM),
    CUDA_KERNELS_WITH("mean", reduce_workspace<MEAN>, reduce_run, MEAN),
    CUDA_KERNELS_WITH("mean_dx", NULL, repeat_run, MEAN),
    CUDA_KERNELS_END,
};
