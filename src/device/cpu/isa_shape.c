/* Kernels that move elements or sum them along dimensions: reshape, permute, expand, slice, pad, concat, sum, mean. */
#include "isa.h"

/* ---- moving ---- */

/* Elements of a box, their addresses in steps of dimensions (elements). */
struct move {
    int dims;
    int64_t extent[HAPT_MAX_DIMS], to[HAPT_MAX_DIMS], from[HAPT_MAX_DIMS];
};

/* Steps of a dense tensor. */
INLINE void dense_steps(const struct hapt_view *view, int64_t *step)
{
    int64_t inner = 1;
    for (int d = view->dims - 1; d >= 0; d--) {
        step[d] = inner;
        inner *= view->shape[d];
    }
}

/* Drops dimensions of one element, and joins those that are one in both tensors. At least one is left. */
INLINE struct move move_simplify(const struct move *move)
{
    struct move made = {0};
    for (int d = 0; d < move->dims; d++) {
        const int last = made.dims - 1;
        if (move->extent[d] == 1) continue;
        if (made.dims > 0 && made.to[last] == move->to[d] * move->extent[d] &&
            made.from[last] == move->from[d] * move->extent[d]) {
            made.extent[last] *= move->extent[d];
            made.to[last] = move->to[d];
            made.from[last] = move->from[d];
            continue;
        }
        made.extent[made.dims] = move->extent[d];
        made.to[made.dims] = move->to[d];
        made.from[made.dims++] = move->from[d];
    }
    if (made.dims == 0) return (struct move){1, {1}, {1}, {1}};
    return made;
}

/* Offset of outer index k (of all dimensions but the last `inner`) by these steps. */
INLINE int64_t offset_of(const struct move *move, int inner, const int64_t *step, int64_t k)
{
    int64_t offset = 0;
    for (int d = move->dims - inner - 1; d >= 0; d--) {
        offset += k % move->extent[d] * step[d];
        k /= move->extent[d];
    }
    return offset;
}

INLINE float one_load(const void *base, int64_t i, bool half)
{
    return half ? hapt_bf16_to_f32(((const uint16_t *)base)[i]) : ((const float *)base)[i];
}

INLINE void one_store(void *base, int64_t i, bool half, float value)
{
    if (half)
        ((uint16_t *)base)[i] = hapt_bf16_from_f32(value);
    else
        ((float *)base)[i] = value;
}

INLINE void move_one(void *to, int64_t t, const void *from, int64_t f, bool half, bool accumulate)
{
    if (accumulate)
        one_store(to, t, half, one_load(to, t, half) + one_load(from, f, half));
    else if (half)
        ((uint16_t *)to)[t] = ((const uint16_t *)from)[f];
    else
        ((float *)to)[t] = ((const float *)from)[f];
}

INLINE void move_line(void *to, int64_t to_step, const void *from, int64_t from_step, int64_t count, bool half,
                      bool accumulate)
{
    if (to_step != 1 || (from_step != 1 && from_step != 0)) {
        for (int64_t i = 0; i < count; i++) move_one(to, i * to_step, from, i * from_step, half, accumulate);
        return;
    }
    const vector same = vector_set(one_load(from, 0, half));
    for (int64_t i = 0; i < count; i += LANES) {
        vector value = from_step == 0 ? same : load(from, i, count - i, half);
        if (accumulate) value += load(to, i, count - i, half);
        store(to, i, count - i, half, value);
    }
}

/* to (+)= from; elements of one step in `to` come in lines. */
INLINE void move_run(const struct hapt_call *call, const struct move *given, void *to, const void *from, bool half,
                     bool accumulate)
{
    const struct move move = move_simplify(given);
    const int last = move.dims - 1;
    const int64_t size = half ? 2 : 4, count = move.extent[last], pieces = (count + CHUNK - 1) / CHUNK;
    int64_t lines = 1;
    for (int d = 0; d < last; d++) lines *= move.extent[d];
#pragma omp parallel for schedule(static) num_threads(threads_for(call, lines *count))
    for (int64_t k = 0; k < lines * pieces; k++) {
        const int64_t first = k % pieces * CHUNK, line = k / pieces;
        const int64_t t = offset_of(&move, 1, move.to, line) + first * move.to[last],
                      f = offset_of(&move, 1, move.from, line) + first * move.from[last];
        move_line((char *)to + size * t, move.to[last], (const char *)from + size * f, move.from[last],
                  smaller(CHUNK, count - first), half, accumulate);
    }
}

INLINE void zero_run(const struct hapt_call *call, const struct hapt_view *view)
{
    const int64_t bytes = hapt_view_elements(view) * (int64_t)hapt_dtype_bytes(view->dtype), block = 1 << 16;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, bytes / 8))
    for (int64_t at = 0; at < bytes; at += block)
        memset((char *)view->data + at, 0, (size_t)smaller(block, bytes - at));
}

/* input: x; output: y, whose dimension d is dimension integer[d] of x */
INLINE void permute_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    int64_t step[HAPT_MAX_DIMS];
    struct move move = {.dims = y->dims};
    dense_steps(x, step);
    dense_steps(y, move.to);
    for (int d = 0; d < y->dims; d++) {
        move.extent[d] = y->shape[d];
        move.from[d] = step[call->integer[d]];
    }
    move_run(call, &move, y->data, x->data, half, call->accumulate & 1u);
}

INLINE void reshape_run(const struct hapt_call *call, bool half)
{
    const struct move move = {1, {hapt_view_elements(&call->output[0])}, {1}, {1}};
    move_run(call, &move, call->output[0].data, call->input[0].data, half, call->accumulate & 1u);
}

/* Steps of a tensor that is repeated along some dimensions of `wide`. Its dimensions are those of `wide`, except where
 * bit d of `missing` is set. */
INLINE void repeated_steps(const struct hapt_view *narrow, const struct hapt_view *wide, unsigned missing,
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

/* y (+)= x, repeated */
INLINE void repeat_run(const struct hapt_call *call, unsigned missing, bool half)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    struct move move = {.dims = y->dims};
    dense_steps(y, move.to);
    repeated_steps(x, y, missing, move.from);
    for (int d = 0; d < y->dims; d++) move.extent[d] = y->shape[d];
    move_run(call, &move, y->data, x->data, half, call->accumulate & 1u);
}

/* Moves the narrow tensor into a region of the wide one (`into`), or out of it. The region begins at `first` of
 * dimension `dim` and has each step-th element. */
INLINE void region_run(const struct hapt_call *call, const struct hapt_view *narrow, const struct hapt_view *wide,
                       int64_t dim, int64_t first, int64_t step, bool into, bool half, bool accumulate)
{
    int64_t wide_step[HAPT_MAX_DIMS] = {0}, narrow_step[HAPT_MAX_DIMS] = {0};
    struct move move = {.dims = narrow->dims};
    dense_steps(wide, wide_step);
    dense_steps(narrow, narrow_step);
    char *at = (char *)wide->data + first * wide_step[dim] * (half ? 2 : 4);
    wide_step[dim] *= step;
    memcpy(move.extent, narrow->shape, sizeof move.extent);
    memcpy(move.to, into ? wide_step : narrow_step, sizeof move.to);
    memcpy(move.from, into ? narrow_step : wide_step, sizeof move.from);
    move_run(call, &move, into ? at : (char *)narrow->data, into ? (char *)narrow->data : at, half, accumulate);
}

INLINE void slice_run(const struct hapt_call *call, bool half)
{
    const int64_t step = call->integer[3] ? call->integer[3] : 1;
    region_run(call, &call->output[0], &call->input[0], call->integer[0], call->integer[1], step, false, half,
               call->accumulate & 1u);
}

INLINE void slice_dx_run(const struct hapt_call *call, bool half)
{
    const int64_t step = call->integer[3] ? call->integer[3] : 1;
    const bool accumulate = call->accumulate & 1u;
    if (!accumulate) zero_run(call, &call->output[0]);
    region_run(call, &call->input[0], &call->output[0], call->integer[0], call->integer[1], step, true, half,
               accumulate);
}

INLINE void pad_run(const struct hapt_call *call, bool half)
{
    zero_run(call, &call->output[0]);
    region_run(call, &call->input[0], &call->output[0], call->integer[0], call->integer[1], 1, true, half, false);
}

INLINE void concat_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *a = &call->input[0], *b = &call->input[1], *y = &call->output[0];
    const int64_t dim = call->integer[0];
    region_run(call, a, y, dim, 0, 1, true, half, false);
    region_run(call, b, y, dim, a->shape[dim], 1, true, half, false);
}

/* ---- summing ---- */

/* A dense tensor in alternating parts: dimensions that are kept, and those that are summed. */
struct reduction {
    struct move kept, summed; /* extents; `from`: steps in the tensor */
    bool line_is_summed;      /* the innermost dimension is */
    int64_t line;             /* its elements; it is left out of both parts */
};

/* step[d] 0: dimension d is summed. */
INLINE struct reduction reduction_of(const struct hapt_view *wide, const int64_t *step)
{
    struct reduction made = {.line = 1};
    int64_t dense[HAPT_MAX_DIMS];
    int end = wide->dims;
    dense_steps(wide, dense);
    while (end > 0 && wide->shape[end - 1] == 1) end--;
    if (end > 0) made.line_is_summed = step[end - 1] == 0;
    while (end > 0 && (wide->shape[end - 1] == 1 || (step[end - 1] == 0) == made.line_is_summed))
        made.line *= wide->shape[--end];
    for (int d = 0; d < end; d++) {
        struct move *part = step[d] == 0 && wide->shape[d] > 1 ? &made.summed : &made.kept;
        part->extent[part->dims] = wide->shape[d];
        part->from[part->dims++] = dense[d];
    }
    return made;
}

INLINE int64_t extents(const struct move *move)
{
    int64_t count = 1;
    for (int d = 0; d < move->dims; d++) count *= move->extent[d];
    return count;
}

/* Sums of whole lines: one result for each index that is kept. */
INLINE void sum_lines(const struct hapt_call *call, const struct reduction *by, const void *x, void *y, float scale,
                      bool half, bool accumulate)
{
    const int64_t kept = extents(&by->kept), summed = extents(&by->summed);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, kept *summed * by->line))
    for (int64_t k = 0; k < kept; k++) {
        const int64_t base = offset_of(&by->kept, 0, by->kept.from, k);
        double total = 0;
        for (int64_t s = 0; s < summed; s++) {
            const int64_t at = base + offset_of(&by->summed, 0, by->summed.from, s);
            struct sum sum = {0};
            for (int64_t i = 0; i < by->line; i += LANES) sum_add(&sum, load(x, at + i, by->line - i, half));
            total += sum_total(&sum);
        }
        const float result = (float)(total * (double)scale);
        one_store(y, k, half, accumulate ? one_load(y, k, half) + result : result);
    }
}

/* Lines are added to lines. */
INLINE void add_lines(const struct hapt_call *call, const struct reduction *by, const void *x, void *y, float scale,
                      bool half, bool accumulate)
{
    const int64_t kept = extents(&by->kept), summed = extents(&by->summed), vectors = (by->line + LANES - 1) / LANES;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, kept *summed * by->line))
    for (int64_t k = 0; k < kept * vectors; k++) {
        const int64_t column = k % vectors * LANES, left = by->line - column;
        const int64_t base = offset_of(&by->kept, 0, by->kept.from, k / vectors) + column;
        struct sum sum = {0};
        for (int64_t s = 0; s < summed; s++)
            sum_add(&sum, load(x, base + offset_of(&by->summed, 0, by->summed.from, s), left, half));
        vector result = (sum.total + sum.partial) * scale;
        const int64_t at = k / vectors * by->line + column;
        if (accumulate) result += load(y, at, left, half);
        store(y, at, left, half, result);
    }
}

/* y (+)= scale times the sums of x along the dimensions that y repeats. */
INLINE void reduce_run(const struct hapt_call *call, unsigned missing, bool mean, bool half)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    const bool accumulate = call->accumulate & 1u;
    int64_t step[HAPT_MAX_DIMS];
    repeated_steps(y, x, missing, step);
    const struct reduction by = reduction_of(x, step);
    const float scale = mean ? (float)((double)hapt_view_elements(y) / (double)hapt_view_elements(x)) : 1.0f;
    if (by.line_is_summed)
        sum_lines(call, &by, x->data, y->data, scale, half, accumulate);
    else
        add_lines(call, &by, x->data, y->data, scale, half, accumulate);
}

/* integer[0]: dimensions that are summed; integer[1]: they are kept with one element */
INLINE unsigned missing_of(const struct hapt_call *call)
{
    return call->integer[1] ? 0 : (unsigned)call->integer[0];
}

/* dx (+)= dy, repeated and divided by the number of elements of a mean */
INLINE void mean_dx_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dy = &call->input[0], *dx = &call->output[0];
    const float scale = (float)((double)hapt_view_elements(dy) / (double)hapt_view_elements(dx));
    struct move move = {.dims = dx->dims};
    const bool accumulate = call->accumulate & 1u;
    dense_steps(dx, move.to);
    repeated_steps(dy, dx, missing_of(call), move.from);
    for (int d = 0; d < dx->dims; d++) move.extent[d] = dx->shape[d];
    const int64_t elements = hapt_view_elements(dx);
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements * 4))
    for (int64_t i = 0; i < elements; i++) {
        const float value = one_load(dy->data, offset_of(&move, 0, move.from, i), half) * scale;
        one_store(dx->data, i, half, accumulate ? one_load(dx->data, i, half) + value : value);
    }
}

KERNELS(permute, permute_run(call, half))
KERNELS(reshape, reshape_run(call, half))
KERNELS(expand, repeat_run(call, 0, half))
KERNELS(expand_dx, reduce_run(call, 0, false, half))
KERNELS(slice, slice_run(call, half))
KERNELS(slice_dx, slice_dx_run(call, half))
KERNELS(pad, pad_run(call, half))
KERNELS(concat, concat_run(call, half))
KERNELS(sum, reduce_run(call, missing_of(call), false, half))
KERNELS(sum_dx, repeat_run(call, missing_of(call), half))
KERNELS(mean, reduce_run(call, missing_of(call), true, half))
KERNELS(mean_dx, mean_dx_run(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_shape)[] = {
    KERNEL_ROWS("permute", NULL, permute),
    KERNEL_ROWS("reshape", NULL, reshape),
    KERNEL_ROWS("expand", NULL, expand),
    KERNEL_ROWS("expand_dx", NULL, expand_dx),
    KERNEL_ROWS("strided_slice", NULL, slice),
    KERNEL_ROWS("strided_slice_dx", NULL, slice_dx),
    KERNEL_ROWS("pad", NULL, pad),
    KERNEL_ROWS("concat", NULL, concat),
    KERNEL_ROWS("sum", NULL, sum),
    KERNEL_ROWS("sum_dx", NULL, sum_dx),
    KERNEL_ROWS("mean", NULL, mean),
    KERNEL_ROWS("mean_dx", NULL, mean_dx),
    {HAPT_F32, {NULL, NULL, NULL}},
};
