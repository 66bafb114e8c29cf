/* Pooling, and the flattening of images. */
#include <math.h>

#include "isa.h"

INLINE float element(const void *base, int64_t i, bool half)
{
    return half ? hapt_bf16_to_f32(((const uint16_t *)base)[i]) : ((const float *)base)[i];
}

INLINE void put(void *base, int64_t i, bool half, float value)
{
    if (half)
        ((uint16_t *)base)[i] = hapt_bf16_from_f32(value);
    else
        ((float *)base)[i] = value;
}

/* A channel's image x [height][width] and its pooling windows. */
struct windows {
    const void *x;
    int64_t first; /* element of x where the image starts */
    int64_t height, width, kernel, stride, padding;
};

/* Index of the first maximum in the window of result (p, q); a NaN wins. */
INLINE int64_t window_maximum(const struct windows *w, int64_t p, int64_t q, bool half, float *most)
{
    const int64_t top = p * w->stride - w->padding, left = q * w->stride - w->padding;
    const int64_t y_first = top > 0 ? top : 0, y_end = smaller(w->height, top + w->kernel);
    const int64_t x_first = left > 0 ? left : 0, x_end = smaller(w->width, left + w->kernel);
    int64_t place = y_first * w->width + x_first;
    *most = element(w->x, w->first + place, half);
    for (int64_t y = y_first; y < y_end; y++)
        for (int64_t x = x_first; x < x_end; x++) {
            const float value = element(w->x, w->first + y * w->width + x, half);
            const bool above = value > *most || (value != value && *most == *most);
            place = above ? y * w->width + x : place;
            *most = above ? value : *most;
        }
    return place;
}

INLINE struct windows windows_of(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0];
    return (struct windows){.x = x->data,
                            .height = x->shape[2],
                            .width = x->shape[3],
                            .kernel = call->integer[0],
                            .stride = call->integer[1],
                            .padding = call->integer[2]};
}

INLINE void max_pool(const struct hapt_call *call, bool half)
{
    const struct hapt_view *y = &call->output[0];
    const int64_t images = y->shape[0] * y->shape[1], height = y->shape[2], width = y->shape[3];
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, hapt_view_elements(&call->input[0]) * 4))
    for (int64_t i = 0; i < images; i++) {
        struct windows w = windows_of(call);
        w.first = i * w.height * w.width;
        for (int64_t p = 0; p < height; p++)
            for (int64_t q = 0; q < width; q++) {
                const int64_t at = (i * height + p) * width + q;
                float most;
                window_maximum(&w, p, q, half, &most);
                put(y->data, at, half, accumulate ? most + element(y->data, at, half) : most);
            }
    }
}

/* fp32 sums of one image per thread. */
static size_t max_pool_dx_workspace(const struct hapt_call *call)
{
    const struct hapt_view *x = &call->input[0];
    const int64_t threads = call->threads > 0 ? call->threads : 1;
    return (size_t)threads * hapt_align((size_t)(x->shape[2] * x->shape[3]) * sizeof(float));
}

INLINE void max_pool_dx(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dy = &call->input[1];
    const int64_t images = dy->shape[0] * dy->shape[1], height = dy->shape[2], width = dy->shape[3];
    const int64_t pixels = call->input[0].shape[2] * call->input[0].shape[3], stride = (pixels + 15) / 16 * 16;
    void *dx = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, images *pixels * 4))
    for (int64_t i = 0; i < images; i++) {
        float *sum = (float *)call->workspace + omp_get_thread_num() * stride, most;
        struct windows w = windows_of(call);
        w.first = i * pixels;
        memset(sum, 0, (size_t)pixels * sizeof *sum);
        for (int64_t p = 0; p < height; p++)
            for (int64_t q = 0; q < width; q++)
                sum[window_maximum(&w, p, q, half, &most)] += element(dy->data, (i * height + p) * width + q, half);
        for (int64_t k = 0; k < pixels; k += LANES) {
            vector value = load(sum, k, pixels - k, false);
            if (accumulate) value += load(dx, i * pixels + k, pixels - k, half);
            store(dx, i * pixels + k, pixels - k, half, value);
        }
    }
}

/* The mean of each image. */
INLINE void mean_pool(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0];
    const int64_t images = x->shape[0] * x->shape[1], pixels = x->shape[2] * x->shape[3];
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, images *pixels))
    for (int64_t i = 0; i < images; i++) {
        struct sum sum = {0};
        for (int64_t k = 0; k < pixels; k += LANES) sum_add(&sum, load(x->data, i * pixels + k, pixels - k, half));
        const float mean = (float)(sum_total(&sum) / (double)pixels);
        put(y, i, half, accumulate ? mean + element(y, i, half) : mean);
    }
}

INLINE void mean_pool_dx(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dx = &call->output[0];
    const int64_t images = dx->shape[0] * dx->shape[1], pixels = dx->shape[2] * dx->shape[3];
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, images *pixels))
    for (int64_t i = 0; i < images; i++) {
        const float share = element(call->input[0].data, i, half) / (float)pixels;
        for (int64_t k = 0; k < pixels; k += LANES) {
            vector value = vector_set(share);
            if (accumulate) value += load(dx->data, i * pixels + k, pixels - k, half);
            store(dx->data, i * pixels + k, pixels - k, half, value);
        }
    }
}

/* Elements [*first, *end) of `from` that overlap element `at` of `to`, when both cover the same length. Windows of a
 * result overlap if its extent does not divide the image's, and repeat if it is larger. */
INLINE void covered(int64_t at, int64_t to, int64_t from, int64_t *first, int64_t *end)
{
    *first = at * from / to;
    *end = ((at + 1) * from + to - 1) / to;
}

INLINE void adaptive_pool(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0], *y = &call->output[0];
    const int64_t images = y->shape[0] * y->shape[1], height = x->shape[2], width = x->shape[3], p_end = y->shape[2],
                  q_end = y->shape[3];
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, images *(height * width + p_end * q_end)))
    for (int64_t i = 0; i < images; i++)
        for (int64_t at = 0; at < p_end * q_end; at++) {
            int64_t top, bottom, left, right;
            double sum = 0;
            covered(at / q_end, p_end, height, &top, &bottom);
            covered(at % q_end, q_end, width, &left, &right);
            for (int64_t r = top; r < bottom; r++)
                for (int64_t c = left; c < right; c++) sum += element(x->data, (i * height + r) * width + c, half);
            const float mean = (float)(sum / (double)((bottom - top) * (right - left)));
            put(y->data, i * p_end * q_end + at, half,
                accumulate ? mean + element(y->data, i * p_end * q_end + at, half) : mean);
        }
}

/* A pixel's windows are the results that it overlaps: the same rule with both sides exchanged. */
INLINE void adaptive_pool_dx(const struct hapt_call *call, bool half)
{
    const struct hapt_view *dy = &call->input[0], *dx = &call->output[0];
    const int64_t images = dx->shape[0] * dx->shape[1], height = dx->shape[2], width = dx->shape[3],
                  p_end = dy->shape[2], q_end = dy->shape[3];
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, images *(height * width + p_end * q_end)))
    for (int64_t i = 0; i < images; i++)
        for (int64_t at = 0; at < height * width; at++) {
            int64_t top, bottom, left, right, first, end;
            double sum = 0;
            covered(at / width, height, p_end, &top, &bottom);
            covered(at % width, width, q_end, &left, &right);
            for (int64_t p = top; p < bottom; p++) {
                covered(p, p_end, height, &first, &end);
                const int64_t rows = end - first;
                for (int64_t q = left; q < right; q++) {
                    covered(q, q_end, width, &first, &end);
                    sum += element(dy->data, (i * p_end + p) * q_end + q, half) / (double)(rows * (end - first));
                }
            }
            put(dx->data, i * height * width + at, half,
                (float)sum + (accumulate ? element(dx->data, i * height * width + at, half) : 0));
        }
}

/* Copies the elements; only the shape changes. */
INLINE void flatten(const struct hapt_call *call, bool half)
{
    const int64_t elements = hapt_view_elements(&call->output[0]);
    const void *x = call->input[0].data;
    void *y = call->output[0].data;
    const bool accumulate = call->accumulate & 1u;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, elements))
    for (int64_t first = 0; first < elements; first += 4096)
        for (int64_t i = first; i < smaller(elements, first + 4096); i += LANES) {
            vector value = load(x, i, elements - i, half);
            if (accumulate) value += load(y, i, elements - i, half);
            store(y, i, elements - i, half, value);
        }
}

KERNELS(max_pool, max_pool(call, half))
KERNELS(max_pool_dx, max_pool_dx(call, half))
KERNELS(mean_pool, mean_pool(call, half))
KERNELS(mean_pool_dx, mean_pool_dx(call, half))
KERNELS(adaptive_pool, adaptive_pool(call, half))
KERNELS(adaptive_pool_dx, adaptive_pool_dx(call, half))
KERNELS(flatten, flatten(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_pool)[] = {
    KERNEL_ROWS("max_pool", NULL, max_pool),
    KERNEL_ROWS("max_pool_dx", max_pool_dx_workspace, max_pool_dx),
    KERNEL_ROWS("mean_pool", NULL, mean_pool),
    KERNEL_ROWS("mean_pool_dx", NULL, mean_pool_dx),
    KERNEL_ROWS("adaptive_pool", NULL, adaptive_pool),
    KERNEL_ROWS("adaptive_pool_dx", NULL, adaptive_pool_dx),
    KERNEL_ROWS("flatten", NULL, flatten),
    KERNEL_ROWS("flatten_dx", NULL, flatten),
    {HAPT_F32, {NULL, NULL, NULL}},
};
