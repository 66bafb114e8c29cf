/* Pooling, and the flattening of images. cuDNN is not used: it does not document which of equal maxima takes the
 * gradient, and has no adaptive windows. */
#include "kernels.h"
#include "rows.cuh"

enum { THREADS = 256 };

/* Images x [images][height][width] and their windows for a result [images][down][across]. */
struct windows {
    int64_t images, height, width, down, across, kernel, stride, padding;
};

static struct windows windows_of(const struct hapt_call *call, const struct hapt_view *x, const struct hapt_view *y)
{
    return {x->shape[0] * x->shape[1], x->shape[2],      x->shape[3],     y->shape[2], y->shape[3],
            call->integer[0],          call->integer[1], call->integer[2]};
}

/* Index of the first maximum in the window of result (p, q) of an image; a NaN wins. */
template <class Element>
__device__ __forceinline__ int64_t window_maximum(const struct windows &w, const Element *image, int64_t p, int64_t q,
                                                  float *most)
{
    const int64_t top = p * w.stride - w.padding, left = q * w.stride - w.padding;
    const int64_t y_first = top > 0 ? top : 0, y_end = top + w.kernel < w.height ? top + w.kernel : w.height;
    const int64_t x_first = left > 0 ? left : 0, x_end = left + w.kernel < w.width ? left + w.kernel : w.width;
    int64_t place = y_first * w.width + x_first;
    *most = to_float(image[place]);
    for (int64_t y = y_first; y < y_end; y++)
        for (int64_t x = x_first; x < x_end; x++) {
            const float value = to_float(image[y * w.width + x]);
            if (!(value > *most || (value != value && *most == *most))) continue;
            *most = value;
            place = y * w.width + x;
        }
    return place;
}

template <class Element> __global__ void max_kernel(struct windows w, const Element *x, Element *y, bool accumulate)
{
    for (GRID_STRIDE(i, w.images * w.down * w.across)) {
        float most;
        window_maximum(w, x + i / w.across / w.down * w.height * w.width, i / w.across % w.down, i % w.across, &most);
        store<1>(y + i, &most, accumulate);
    }
}

/* Every pixel checks all windows that contain it for being their maximum. */
template <class Element>
__global__ void max_dx_kernel(struct windows w, const Element *x, const Element *dy, Element *dx, bool accumulate)
{
    const int64_t pixels = w.height * w.width;
    for (GRID_STRIDE(i, w.images * pixels)) {
        const int64_t image = i / pixels, r = i % pixels / w.width + w.padding, c = i % w.width + w.padding;
        const int64_t p_first = r < w.kernel ? 0 : (r - w.kernel) / w.stride + 1,
                      q_first = c < w.kernel ? 0 : (c - w.kernel) / w.stride + 1;
        float sum = 0, most;
        for (int64_t p = p_first; p < w.down && p * w.stride <= r; p++)
            for (int64_t q = q_first; q < w.across && q * w.stride <= c; q++)
                if (window_maximum(w, x + image * pixels, p, q, &most) == i % pixels)
                    sum += to_float(dy[(image * w.down + p) * w.across + q]);
        store<1>(dx + i, &sum, accumulate);
    }
}

/* The mean of each image; one warp per image. */
template <class Element>
__global__ void mean_kernel(int64_t images, int64_t pixels, const Element *x, Element *y, bool accumulate)
{
    const int64_t warps = (int64_t)gridDim.x * (THREADS / 32);
    for (int64_t i = (int64_t)blockIdx.x * (THREADS / 32) + threadIdx.x / 32; i < images; i += warps) {
        float sum = 0;
        for (int64_t k = threadIdx.x % 32; k < pixels; k += 32) sum += to_float(x[i * pixels + k]);
        sum = warp_sum(sum) / (float)pixels;
        if (threadIdx.x % 32 == 0) store<1>(y + i, &sum, accumulate);
    }
}

template <class Element>
__global__ void mean_dx_kernel(int64_t images, int64_t pixels, const Element *dy, Element *dx, bool accumulate)
{
    for (GRID_STRIDE(i, images * pixels)) {
        const float share = to_float(dy[i / pixels]) / (float)pixels;
        store<1>(dx + i, &share, accumulate);
    }
}

/* Elements [*first, *end) of `from` that overlap element `at` of `to`, when both cover the same length. Windows of a
 * result overlap if its extent does not divide the image's, and repeat if it is larger. */
__device__ __forceinline__ void covered(int64_t at, int64_t to, int64_t from, int64_t *first, int64_t *end)
{
    *first = at * from / to;
    *end = ((at + 1) * from + to - 1) / to;
}

template <class Element>
__global__ void adaptive_kernel(struct windows w, const Element *x, Element *y, bool accumulate)
{
    for (GRID_STRIDE(i, w.images * w.down * w.across)) {
        const Element *image = x + i / w.across / w.down * w.height * w.width;
        int64_t top, bottom, left, right;
        float sum = 0;
        covered(i / w.across % w.down, w.down, w.height, &top, &bottom);
        covered(i % w.across, w.across, w.width, &left, &right);
        for (int64_t r = top; r < bottom; r++)
            for (int64_t c = left; c < right; c++) sum += to_float(image[r * w.width + c]);
        sum /= (float)((bottom - top) * (right - left));
        store<1>(y + i, &sum, accumulate);
    }
}

/* A pixel's windows are the results that it overlaps: the same rule with both sides exchanged. */
template <class Element>
__global__ void adaptive_dx_kernel(struct windows w, const Element *dy, Element *dx, bool accumulate)
{
    for (GRID_STRIDE(i, w.images * w.height * w.width)) {
        const int64_t image = i / w.width / w.height;
        int64_t top, bottom, left, right, first, end;
        float sum = 0;
        covered(i / w.width % w.height, w.height, w.down, &top, &bottom);
        covered(i % w.width, w.width, w.across, &left, &right);
        for (int64_t p = top; p < bottom; p++) {
            covered(p, w.down, w.height, &first, &end);
            const int64_t rows = end - first;
            for (int64_t q = left; q < right; q++) {
                covered(q, w.across, w.width, &first, &end);
                sum += to_float(dy[(image * w.down + p) * w.across + q]) / (float)(rows * (end - first));
            }
        }
        store<1>(dx + i, &sum, accumulate);
    }
}

template <class Element, int N> __global__ void flatten_kernel(int64_t count, const Element *x, Element *y)
{
    for (GRID_STRIDE(i, count / N)) {
        float value[N];
        load<N>(x + i * N, value);
        store<N>(y + i * N, value, true);
    }
}

#define RESULT(call) (Element *)(call)->output[0].data, (bool)((call)->accumulate & 1u)

static dim3 blocks_of(const struct hapt_call *call)
{
    return blocks_for(hapt_view_elements(&call->output[0]), THREADS);
}

template <class Element> static enum hapt_status max_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return launch(max_kernel<Element>, blocks_of(call), THREADS, 0, queue,
                  windows_of(call, &call->input[0], &call->output[0]), (const Element *)call->input[0].data,
                  RESULT(call));
}

template <class Element> static enum hapt_status max_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return launch(max_dx_kernel<Element>, blocks_of(call), THREADS, 0, queue,
                  windows_of(call, &call->input[0], &call->input[1]), (const Element *)call->input[0].data,
                  (const Element *)call->input[1].data, RESULT(call));
}

template <class Element> static enum hapt_status mean_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t images = hapt_view_elements(&call->output[0]),
                  pixels = call->input[0].shape[2] * call->input[0].shape[3];
    return launch(mean_kernel<Element>, blocks_for(images, THREADS / 32), THREADS, 0, queue, images, pixels,
                  (const Element *)call->input[0].data, RESULT(call));
}

template <class Element> static enum hapt_status mean_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t images = hapt_view_elements(&call->input[0]),
                  pixels = call->output[0].shape[2] * call->output[0].shape[3];
    return launch(mean_dx_kernel<Element>, blocks_of(call), THREADS, 0, queue, images, pixels,
                  (const Element *)call->input[0].data, RESULT(call));
}

template <class Element> static enum hapt_status adaptive_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return launch(adaptive_kernel<Element>, blocks_of(call), THREADS, 0, queue,
                  windows_of(call, &call->input[0], &call->output[0]), (const Element *)call->input[0].data,
                  RESULT(call));
}

template <class Element> static enum hapt_status adaptive_dx_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    return launch(adaptive_dx_kernel<Element>, blocks_of(call), THREADS, 0, queue,
                  windows_of(call, &call->output[0], &call->input[0]), (const Element *)call->input[0].data,
                  RESULT(call));
}

/* Copies the elements; only the shape changes. */
template <class Element> static enum hapt_status flatten_run(const struct hapt_call *call, struct hapt_queue *queue)
{
    const int64_t count = hapt_view_elements(&call->output[0]);
    const Element *x = (const Element *)call->input[0].data;
    Element *y = (Element *)call->output[0].data;
    if (!(call->accumulate & 1u))
        return cuda_check(cudaMemcpyAsync(y, x, (size_t)count * sizeof *y, cudaMemcpyDeviceToDevice, queue->stream),
                          "a copy");
    return launch(packs_fit<Element>(count, x, y) ? flatten_kernel<Element, pack<Element>::COUNT>
                                                  : flatten_kernel<Element, 1>,
                  blocks_of(call), THREADS, 0, queue, count, x, y);
}

extern const struct cuda_kernel hapt_cuda_pool[] = {
    CUDA_KERNELS("max_pool", NULL, max_run),
    CUDA_KERNELS("max_pool_dx", NULL, max_dx_run),
    CUDA_KERNELS("mean_pool", NULL, mean_run),
    CUDA_KERNELS("mean_pool_dx", NULL, mean_dx_run),
    CUDA_KERNELS("adaptive_pool", NULL, adaptive_run),
    CUDA_KERNELS("adaptive_pool_dx", NULL, adaptive_dx_run),
    CUDA_KERNELS("flatten", NULL, flatten_run),
    CUDA_KERNELS("flatten_dx", NULL, flatten_run),
    CUDA_KERNELS_END,
};
