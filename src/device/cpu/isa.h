/*
 * For isa_*.c: names with the level's suffix, vectors of the level's width, and vector functions that kernels share.
 *
 * Accuracy: vector_exp 1 ulp on its whole range (0 below -87.3); bfloat16 rounds to nearest even; NaN is kept
 * everywhere.
 */
#ifndef HAPT_CPU_ISA_H
#define HAPT_CPU_ISA_H

#include <omp.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "hapt/arena.h"
#include "kernels.h"

#ifdef HAPT_ISA
#define ISA_JOIN(name, level) name##_##level
#define ISA_EXPAND(name, level) ISA_JOIN(name, level)
#define ISA_NAME(name) ISA_EXPAND(name, HAPT_ISA)
#else
#define ISA_NAME(name) name##_plain
#endif

#if defined __AVX512F__
#define LANES 16
#elif defined __AVX2__
#define LANES 8
#else
#define LANES 4
#endif

/* Reading this header takes most of the time of compiling a small file. Narrower levels need few of its functions,
 * which compilers have built in. */
#if defined __AVX512F__
#include <immintrin.h>
#endif

/* oneDNN computes bf16 from AVX-512 on; below, operands are widened into the workspace. */
#define NATIVE_HALF (LANES == 16)
#define CHUNK 4096 /* elements per thread and turn: a multiple of every lane count */

typedef float vector __attribute__((vector_size(4 * LANES)));
typedef int32_t ivector __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvector __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvector __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline, unused))

/* Kernels NAME_f32 and NAME_bf16 from one statement, in which `half` and `dtype` are constants. */
#define KERNELS(name, ...)                    \
    KERNEL_OF(name##_f32, false, __VA_ARGS__) \
    KERNEL_OF(name##_bf16, true, __VA_ARGS__)
#define KERNEL_OF(name, is_half, ...)                                                    \
    static enum hapt_status name(const struct hapt_call *call, struct hapt_queue *queue) \
    {                                                                                    \
        enum { half = is_half };                                                         \
        const enum hapt_dtype dtype = half ? HAPT_BF16 : HAPT_F32;                       \
        (void)queue, (void)dtype;                                                        \
        __VA_ARGS__;                                                                     \
        return HAPT_OK;                                                                  \
    }
/* Their rows in the family's table. */
#define KERNEL_ROWS(op, workspace, name)     \
    {HAPT_F32, {op, workspace, name##_f32}}, \
    {                                        \
        HAPT_BF16,                           \
        {                                    \
            op, workspace, name##_bf16       \
        }                                    \
    }

INLINE vector vector_set(float value)
{
    return value - (vector){0};
}

INLINE vector vector_load(const float *from)
{
    vector value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void vector_store(float *to, vector value)
{
    memcpy(to, &value, sizeof value);
}

/* Every lane of `mask` is all ones or all zeros. */
INLINE vector vector_select(ivector mask, vector yes, vector no)
{
    return (vector)((mask & (ivector)yes) | (~mask & (ivector)no));
}

/* Mask of the first `count` lanes. */
INLINE ivector lanes_below(int64_t count)
{
    static const int32_t index[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    ivector lane;
    memcpy(&lane, index, sizeof lane);
    return lane < (int32_t)(count < LANES ? count : LANES);
}

/* Lane-wise maximum; a NaN in b wins. */
INLINE vector vector_max(vector a, vector b)
{
#if defined __AVX512F__
    return (vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined __AVX2__
    return __builtin_ia32_maxps256(a, b);
#elif defined __SSE2__
    return __builtin_ia32_maxps(a, b);
#else
    return vector_select(a > b, a, b);
#endif
}

INLINE vector vector_sqrt(vector x)
{
#if defined __AVX512F__
    return (vector)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = __builtin_sqrtf(x[i]);
    return x;
#endif
}

/* 1 / x. AVX-512 divides slowly: it uses an estimate of 14 bits and one Newton step, 1 ulp. Not for 0 or infinity. */
INLINE vector vector_reciprocal(vector x)
{
#if defined __AVX512F__
    const vector estimate = (vector)_mm512_rcp14_ps((__m512)x);
    return estimate + estimate * (1.0f - x * estimate);
#else
    return 1.0f / x;
#endif
}

/* e^r - 1 for |r| <= ln(2)/2: a minimax polynomial fitted for this file. */
INLINE vector exp_fraction(vector r)
{
    vector p = r * 1.9790323e-4f + 1.3944679e-3f;
    p = p * r + 8.3334971e-3f;
    p = p * r + 4.1666295e-2f;
    p = p * r + 1.6666666e-1f;
    p = p * r + 5.0000000e-1f;
    return p * (r * r) + r;
}

/* e^x = 2^n e^r; 0 below -87.33, 2.2e38 from 88.3 on. */
INLINE vector vector_exp(vector x)
{
    const vector low = vector_set(-87.33f), high = vector_set(88.3f);
#if defined __AVX512F__
    const vector clamped = (vector)_mm512_min_ps((__m512)high, (__m512)vector_max(low, x));
    const vector n = (vector)_mm512_roundscale_ps((__m512)(clamped * 1.44269504f), 8);
    vector r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    const __mmask16 kept = _mm512_cmp_ps_mask((__m512)x, (__m512)low, _CMP_NLT_UQ);
    return (vector)_mm512_maskz_scalef_ps(kept, (__m512)(exp_fraction(r) + 1.0f), (__m512)n);
#else
    const vector magic = vector_set(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vector clamped = vector_max(low, x);
    clamped = vector_select(clamped > high, high, clamped);
    const vector shifted = clamped * 1.44269504f + magic;
    const vector n = shifted - magic;
    vector r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    const vector scale = (vector)(((ivector)shifted - (ivector)magic + 127) << 23);
    return vector_select(x < low, (vector){0}, exp_fraction(r) * scale + scale);
#endif
}

/* (1 - e^-2|x|) / (1 + e^-2|x|), and a series of tanh(x) / x where that would cancel: 3e-7 relative. */
INLINE vector vector_tanh(vector x)
{
    const vector size = (vector)((ivector)x & 0x7fffffff), square = x * x;
    const vector falling = vector_exp(size * -2.0f), large = (1.0f - falling) * vector_reciprocal(1.0f + falling);
    const vector series =
        1.0f + square * (-0.333333333f + square * (0.133333333f + square * (-0.0539682540f + square * 0.0218694885f)));
    const vector signed_large = (vector)((ivector)large | ((ivector)x & (int32_t)0x80000000));
    return vector_select(size < 0.3f, x * series, signed_large);
}

INLINE vector vector_from_half(hvector bits)
{
    return (vector)(__builtin_convertvector(bits, uvector) << 16);
}

INLINE hvector vector_to_half(vector value)
{
#if defined __AVX512F__
    const __m512i wide = (__m512i)value, high = _mm512_srli_epi32(wide, 16), one = _mm512_set1_epi32(1);
    const __m512i up = _mm512_add_epi32(_mm512_and_si512(high, one), _mm512_set1_epi32(0x7fff));
    const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(wide, up), 16);
    const __mmask16 nan = _mm512_cmp_ps_mask((__m512)value, (__m512)value, _CMP_UNORD_Q);
    return (hvector)_mm512_cvtepi32_epi16(_mm512_mask_or_epi32(rounded, nan, high, _mm512_set1_epi32(0x40)));
#else
    const uvector wide = (uvector)value;
    const uvector rounded = (wide + 0x7fffu + ((wide >> 16) & 1u)) >> 16;
    const uvector quiet = (wide >> 16) | 0x40u;
    const uvector nan = (uvector)(value != value);
    return __builtin_convertvector((nan & quiet) | (~nan & rounded), hvector);
#endif
}

INLINE void transpose_step(vector row[LANES], int step)
{
    ivector low, high;
    for (int l = 0; l < LANES; l++) {
        low[l] = l & step ? LANES + l - step : l;
        high[l] = l & step ? LANES + l : l + step;
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & step) continue;
        const vector a = row[i], b = row[i + step];
        row[i] = __builtin_shuffle(a, b, low);
        row[i + step] = __builtin_shuffle(a, b, high);
    }
}

/* Transposes a LANES x LANES matrix in place; one vector per row. */
INLINE void vector_transpose(vector row[LANES])
{
    transpose_step(row, 1);
    transpose_step(row, 2);
    if (LANES > 4) transpose_step(row, 4);
    if (LANES > 8) transpose_step(row, 8);
}

/* Elements [i, i + count) of a float or bfloat16 array; the lanes from count on are 0. */
INLINE vector load(const void *base, int64_t i, int64_t count, bool half)
{
    if (half) {
        const uint16_t *from = (const uint16_t *)base + i;
        hvector bits = {0};
        if (count >= LANES)
            memcpy(&bits, from, sizeof bits);
        else
            for (int64_t k = 0; k < count; k++) bits[k] = from[k];
        return vector_from_half(bits);
    }
    const float *from = (const float *)base + i;
    if (count >= LANES) return vector_load(from);
    float part[LANES] = {0};
    for (int64_t k = 0; k < count; k++) part[k] = from[k];
    return vector_load(part);
}

INLINE void store(void *base, int64_t i, int64_t count, bool half, vector value)
{
    if (half) {
        uint16_t *to = (uint16_t *)base + i;
        const hvector bits = vector_to_half(value);
        if (count >= LANES)
            memcpy(to, &bits, sizeof bits);
        else
            for (int64_t k = 0; k < count; k++) to[k] = bits[k];
        return;
    }
    float *to = (float *)base + i;
    if (count >= LANES) {
        vector_store(to, value);
        return;
    }
    float part[LANES];
    vector_store(part, value);
    for (int64_t k = 0; k < count; k++) to[k] = part[k];
}

INLINE int64_t smaller(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

INLINE void convert(void *to, bool to_half, const void *from, bool from_half, int64_t elements, int threads)
{
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t first = 0; first < elements; first += CHUNK)
        for (int64_t i = first; i < smaller(elements, first + CHUNK); i += LANES)
            store(to, i, elements - i, to_half, load(from, i, elements - i, from_half));
}

/* Sum of the lanes, in double, as a tree. */
INLINE double vector_sum(vector value)
{
#if defined __AVX512F__
    const __m256 low = _mm512_castps512_ps256((__m512)value), high = _mm512_extractf32x8_ps((__m512)value, 1);
    return _mm512_reduce_add_pd(_mm512_add_pd(_mm512_cvtps_pd(low), _mm512_cvtps_pd(high)));
#else
    double lane[LANES];
    for (int i = 0; i < LANES; i++) lane[i] = value[i];
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) lane[i] += lane[i + half];
    return lane[0];
#endif
}

/* Largest lane. A NaN gives NaN or is lost; callers meet it again when they use the lanes. */
INLINE float vector_maximum(vector value)
{
#if defined __AVX512F__
    return _mm512_reduce_max_ps((__m512)value);
#else
    float most = value[0];
    for (int i = 1; i < LANES; i++) most = value[i] > most ? value[i] : most;
    return most;
#endif
}

/* A running sum in two levels, which keeps precision over long rows. */
struct sum {
    vector partial, total;
    int count;
};

INLINE void sum_add(struct sum *sum, vector value)
{
    sum->partial += value;
    if (++sum->count == 16) {
        sum->total += sum->partial;
        sum->partial = (vector){0};
        sum->count = 0;
    }
}

INLINE double sum_total(const struct sum *sum)
{
    return vector_sum(sum->total + sum->partial);
}

/* Threads worth waking for `elements` of light work. */
INLINE int threads_for(const struct hapt_call *call, int64_t elements)
{
    const int64_t most = elements / 8192 + 1;
    return call->threads > most ? (int)most : call->threads > 0 ? call->threads : 1;
}

/* Columns of a view: its last dimension. Rows: the product of all others. */
INLINE int64_t view_columns(const struct hapt_view *view)
{
    return view->dims > 0 ? view->shape[view->dims - 1] : 1;
}

INLINE int64_t view_rows(const struct hapt_view *view)
{
    const int64_t columns = view_columns(view);
    return columns > 0 ? hapt_view_elements(view) / columns : 0;
}

/* Rows are reduced in at most 64 chunks of at least 16 rows; the bounds depend on the row count alone. */
INLINE int64_t chunk_rows(int64_t rows)
{
    const int64_t even = (rows + 63) / 64;
    return even > 16 ? even : 16;
}

INLINE int64_t chunk_count(int64_t rows)
{
    return (rows + chunk_rows(rows) - 1) / chunk_rows(rows);
}

#endif
