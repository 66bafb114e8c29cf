/*
 * Host CUDA: warp matrix operations, 16x16x16 with fp16 or bf16 inputs and an fp32 accumulator.
 *
 * A lane holds 8 of a tile's 256 elements, in an unspecified order, as on the device. Loads and stores move each lane's
 * own elements, so a warp without __syncwarp sees stale memory here too. The last lane to arrive computes the product
 * once. The alignments that the device requires are checked.
 */
#ifndef HOST_CUDA_MMA_H
#define HOST_CUDA_MMA_H

#include "cuda_bf16.h"
#include "cuda_fp16.h"
#include "cuda_runtime.h"

void host_cuda_check_tile(const void *pointer, size_t row_bytes);
/* c += a b, 16 x 16 by rows; sums in the order of k. */
void host_cuda_multiply_tile(const float *a, const float *b, float *c);

namespace nvcuda
{
namespace wmma
{

struct row_major;
struct col_major;
struct matrix_a;
struct matrix_b;
struct accumulator;
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k, typename T, typename Layout = void> class fragment
{
    static_assert(m == 16 && n == 16 && k == 16, "the host CUDA knows 16x16x16 only");

  public:
    enum { num_elements = 8, num_storage_elements = 8 };
    typedef T element_type;
    typedef T storage_element_type;
    T x[num_elements];
};

template <typename Fragment, typename T> static inline void fill_fragment(Fragment &tile, const T &value)
{
    for (auto &x : tile.x) x = value;
}

/* The address of element i of this lane. */
static inline size_t host_cuda_place(int i, unsigned int leading, bool by_rows)
{
    const unsigned int element = (unsigned int)i * 32 + host_cuda_lane(), row = element / 16, column = element % 16;
    return by_rows ? (size_t)row * leading + column : (size_t)column * leading + row;
}

template <typename Use, typename T, typename Layout>
static inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout> &tile, const T *from, unsigned int leading)
{
    host_cuda_check_tile(from, leading * sizeof(T));
    for (int i = 0; i < tile.num_elements; i++)
        tile.x[i] = from[host_cuda_place(i, leading, std::is_same<Layout, row_major>::value)];
}

template <typename T>
static inline void load_matrix_sync(fragment<accumulator, 16, 16, 16, T> &tile, const T *from, unsigned int leading,
                                    layout_t layout)
{
    host_cuda_check_tile(from, leading * sizeof(T));
    for (int i = 0; i < tile.num_elements; i++) tile.x[i] = from[host_cuda_place(i, leading, layout == mem_row_major)];
}

template <typename T>
static inline void store_matrix_sync(T *to, const fragment<accumulator, 16, 16, 16, T> &tile, unsigned int leading,
                                     layout_t layout)
{
    host_cuda_check_tile(to, leading * sizeof(T));
    for (int i = 0; i < tile.num_elements; i++) to[host_cuda_place(i, leading, layout == mem_row_major)] = tile.x[i];
}

/* The operands of a lane in a product: the addresses of its elements. */
template <typename T> struct host_cuda_product {
    float *d;
    const T *a, *b;
    const float *c;

    static void run(const uint64_t *lanes)
    {
        float a[256], b[256], c[256];
        for (int number = 0; number < 32; number++) {
            const host_cuda_product *lane = (const host_cuda_product *)lanes[number];
            for (int i = 0; i < 8; i++) a[i * 32 + number] = lane->a[i];
            for (int i = 0; i < 8; i++) b[i * 32 + number] = lane->b[i];
            for (int i = 0; i < 8; i++) c[i * 32 + number] = lane->c[i];
        }
        host_cuda_multiply_tile(a, b, c);
        for (int number = 0; number < 32; number++)
            for (int i = 0; i < 8; i++) ((const host_cuda_product *)lanes[number])->d[i] = c[i * 32 + number];
    }
};

template <typename T, typename LayoutA, typename LayoutB>
static inline void
mma_sync(fragment<accumulator, 16, 16, 16, float> &d, const fragment<matrix_a, 16, 16, 16, T, LayoutA> &a,
         const fragment<matrix_b, 16, 16, 16, T, LayoutB> &b, const fragment<accumulator, 16, 16, 16, float> &c)
{
    const host_cuda_product<T> mine = {d.x, a.x, b.x, c.x};
    host_cuda_warp_meet(0xffffffffu, HOST_CUDA_MEET_MATRIX, (uint64_t)(uintptr_t)&mine, host_cuda_product<T>::run);
}

} // namespace wmma
} // namespace nvcuda

#endif
