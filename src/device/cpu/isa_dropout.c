/* Dropout (philox.h): LANES blocks of random words at a time. */
#include "hapt/philox.h"
#include "isa.h"

/* The upper halves of the products. */
INLINE uvector product_high(uvector value, uint32_t factor)
{
#if defined __AVX512F__
    const __m512i v = (__m512i)value, f = _mm512_set1_epi32((int)factor);
    const __m512i even = _mm512_mul_epu32(v, f), odd = _mm512_mul_epu32(_mm512_srli_epi64(v, 32), f);
    return (uvector)_mm512_mask_blend_epi32((__mmask16)0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined __AVX2__
    typedef uint64_t wide __attribute__((vector_size(4 * LANES)));
    const ivector f = (ivector){0} + (int32_t)factor;
    const wide even = (wide)__builtin_ia32_pmuludq256((ivector)value, f);
    const wide odd = (wide)__builtin_ia32_pmuludq256((ivector)((wide)value >> 32), f);
    return (uvector)(even >> 32 | (odd & 0xffffffff00000000u));
#else
    uvector high;
    for (int l = 0; l < LANES; l++) high[l] = (uint32_t)((uint64_t)value[l] * factor >> 32);
    return high;
#endif
}

struct words {
    uvector word[4];
};

/* hapt_philox_words of LANES consecutive blocks. */
INLINE struct words random_words(int64_t block, uint32_t number, uint32_t key_0, uint32_t key_1)
{
    uvector a, b, c = (uvector){0} + number, d = {0};
    for (int l = 0; l < LANES; l++) {
        a[l] = (uint32_t)(block + l);
        b[l] = (uint32_t)((uint64_t)(block + l) >> 32);
    }
    for (int round = 0; round < HAPT_PHILOX_ROUNDS; round++) {
        const uvector even = product_high(a, HAPT_PHILOX_FACTOR_0), odd = product_high(c, HAPT_PHILOX_FACTOR_1);
        const uvector low_even = a * HAPT_PHILOX_FACTOR_0, low_odd = c * HAPT_PHILOX_FACTOR_1;
        a = odd ^ b ^ key_0;
        b = low_odd;
        c = even ^ d ^ key_1;
        d = low_even;
        key_0 += HAPT_PHILOX_STEP_0;
        key_1 += HAPT_PHILOX_STEP_1;
    }
    return (struct words){{a, b, c, d}};
}

struct dropout {
    uint32_t key[2], number, limit;
    float factor; /* of elements that are kept */
    bool accumulate;
};

/* Elements [first, end) of a row; `first` is a multiple of 64. */
INLINE void drop(const struct dropout *dropout, const void *x, void *y, int64_t row, int64_t first, int64_t end,
                 bool half)
{
    const uvector factor = (uvector)vector_set(dropout->factor);
    for (int64_t group = first; group < end; group += 4 * HAPT_DROPOUT_LANES) {
        for (int lane = 0; lane < HAPT_DROPOUT_LANES && group + lane < end; lane += LANES) {
            const struct words random =
                random_words(group / 4 + lane, dropout->number, dropout->key[0], dropout->key[1]);
            for (int w = 0; w < 4; w++) {
                const int64_t e = group + w * HAPT_DROPOUT_LANES + lane, left = end - e;
                if (left <= 0) break;
                const uvector kept = (uvector)(random.word[w] >= dropout->limit);
                vector value = load(x, row + e, left, half) * (vector)(kept & factor);
                if (dropout->accumulate) value += load(y, row + e, left, half);
                store(y, row + e, left, half, value);
            }
        }
    }
}

/* input: x [rows][t][d], keys [rows][2] */
INLINE void dropout_run(const struct hapt_call *call, bool half)
{
    const struct hapt_view *x = &call->input[0];
    const int64_t rows = x->shape[0], width = x->shape[1] * x->shape[2], chunks = (width + CHUNK - 1) / CHUNK;
    const int32_t *key = call->input[1].data;
#pragma omp parallel for schedule(static) num_threads(threads_for(call, rows *width * 8))
    for (int64_t turn = 0; turn < rows * chunks; turn++) {
        const int64_t row = turn / chunks, first = turn % chunks * CHUNK;
        const bool drops = key[2 * row] != 0 || key[2 * row + 1] != 0;
        const struct dropout dropout = {.key = {(uint32_t)key[2 * row], (uint32_t)key[2 * row + 1]},
                                        .number = (uint32_t)call->integer[0],
                                        .limit = drops ? hapt_dropout_limit(call->real[0]) : 0,
                                        .factor = drops ? (float)(1 / (1 - call->real[0])) : 1,
                                        .accumulate = call->accumulate & 1u};
        drop(&dropout, x->data, call->output[0].data, row * width, first, smaller(width, first + CHUNK), half);
    }
}

KERNELS(dropout, dropout_run(call, half))

const struct cpu_kernel ISA_NAME(hapt_cpu_dropout)[] = {
    KERNEL_ROWS("dropout", NULL, dropout),
    {HAPT_F32, {NULL, NULL, NULL}},
};
