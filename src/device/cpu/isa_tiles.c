/*
 * bf16 products on AMX tiles. A library has to pack operands it knows nothing of into new layouts. Here the three
 * products of a linear layer pack only what the tiles need, per thread and cache-sized block, and add the bias while
 * storing.
 *
 * A tile is 16 rows of 64 bytes. c [32][32] takes four tiles of fp32, a two of [16 rows][32 k], b two of [16 pairs of
 * k][16 columns][2]. Threads split c and share nothing.
 */
#include "tiles.h"

#if LANES == 16 && defined __linux__

#include <sys/syscall.h>
#include <unistd.h>

#define AMX __attribute__((target("amx-tile,amx-bf16")))
#define TILE 512           /* elements of a bf16 tile */
#define PANEL_BYTES 524288 /* packed b that stays in the L2 cache */
#define DEPTH 512          /* rows of x and dy per block of a weight gradient */

static bool tiles_ready(void)
{
    static int ready = -1; /* racing threads compute the same answer */
    if (ready < 0) {
        unsigned a, b, c, d = 0;
        __asm__("cpuid" : "=a"(a), "=b"(b), "=c"(c), "=d"(d) : "a"(7), "c"(0));
        const bool present = (d >> 22 & 1) && (d >> 24 & 1); /* AMX-BF16, AMX-TILE */
        /* ARCH_REQ_XCOMP_PERM for the tile data: the kernel must grant it. */
        ready = present && syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    }
    return ready;
}

struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* A thread's share of c and its scratch. */
struct share {
    int64_t m_first, m_end, n_first, n_end;
    uint16_t *a, *b; /* packed tiles */
};

/* Columns of b packed at a time: a multiple of 32. */
static int64_t panel_columns(int64_t depth, int64_t columns)
{
    int64_t fitting = PANEL_BYTES / 2 / depth / 32 * 32;
    if (fitting < 32) fitting = 32;
    return fitting < columns ? fitting : columns;
}

static int64_t block_depth(const struct gemm *gemm)
{
    return gemm->out == HAPT_F32 ? smaller(DEPTH, gemm->k) : gemm->k;
}

/* Threads split the longer side of c in multiples of 32. */
static struct share share_of(const struct gemm *gemm, int part, int parts)
{
    struct share share = {0, gemm->m, 0, gemm->n, NULL, NULL};
    const bool rows = gemm->transpose_a ? gemm->m > gemm->n : true;
    const int64_t blocks = (rows ? gemm->m : gemm->n) / 32;
    const int64_t first = blocks * part / parts * 32, end = blocks * (part + 1) / parts * 32;
    if (rows)
        share.m_first = first, share.m_end = end;
    else
        share.n_first = first, share.n_end = end;
    return share;
}

static int64_t share_elements(const struct gemm *gemm, int64_t *of_a)
{
    const int64_t depth = block_depth(gemm);
    *of_a = gemm->transpose_a ? gemm->m * depth : 0;
    return *of_a + depth * panel_columns(depth, gemm->n);
}

size_t ISA_NAME(hapt_tiles_workspace)(const struct gemm *gemm)
{
    if (gemm->m % 32 || gemm->n % 32 || gemm->k % 32 || gemm->in != HAPT_BF16 || !tiles_ready()) return 0;
    if (gemm->out == HAPT_BF16 && gemm->accumulate) return 0;
    int64_t of_a;
    return (size_t)(share_elements(gemm, &of_a) * (gemm->threads > 0 ? gemm->threads : 1)) * sizeof(uint16_t);
}

/* 32-bit pairs (row 2p, row 2p + 1) of 16 columns. */
INLINE vector interleave(const uint16_t *even, const uint16_t *odd)
{
    const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)even));
    const __m512i high = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)odd));
    return (vector)_mm512_or_si512(low, _mm512_slli_epi32(high, 16));
}

/* b [depth][columns] at rows of `width` elements into tiles [columns / 16][depth / 32]. */
static void pack_b(const uint16_t *from, int64_t width, int64_t depth, int64_t columns, uint16_t *to)
{
    for (int64_t k = 0; k < depth; k += 32)
        for (int64_t n = 0; n < columns; n += 16) {
            float *tile = (float *)(to + (n / 16 * (depth / 32) + k / 32) * TILE);
            for (int p = 0; p < 16; p++) {
                const uint16_t *row = from + (k + 2 * p) * width + n;
                vector_store(tile + p * 16, interleave(row, row + width));
            }
        }
}

/* The same from b transposed: [columns][depth] at rows of `width` elements, where pairs of k are adjacent. */
static void pack_b_transposed(const uint16_t *from, int64_t width, int64_t depth, int64_t columns, uint16_t *to)
{
    for (int64_t n = 0; n < columns; n += 16)
        for (int64_t k = 0; k < depth; k += 32) {
            vector row[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) memcpy(&row[i], from + (n + i) * width + k, sizeof row[i]);
            vector_transpose(row);
            float *tile = (float *)(to + (n / 16 * (depth / 32) + k / 32) * TILE);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) vector_store(tile + i * 16, row[i]);
        }
}

/* a transposed, [depth][rows] at rows of `width` elements, into tiles [rows / 16][depth / 32]. */
static void pack_a_transposed(const uint16_t *from, int64_t width, int64_t depth, int64_t rows, uint16_t *to)
{
    for (int64_t k = 0; k < depth; k += 32)
        for (int64_t m = 0; m < rows; m += 16) {
            vector pair[16];
#pragma GCC unroll 16
            for (int p = 0; p < 16; p++) {
                const uint16_t *row = from + (k + 2 * p) * width + m;
                pair[p] = interleave(row, row + width);
            }
            vector_transpose(pair);
            float *tile = (float *)(to + (m / 16 * (depth / 32) + k / 32) * TILE);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) vector_store(tile + i * 16, pair[i]);
        }
}

/* c [32][32], at rows of c_width elements; a and b step by tiles along k. */
struct corner {
    const uint16_t *a0, *a1; /* 16 rows each */
    int64_t a_stride, a_step;
    const uint16_t *b0, *b1;
    int64_t steps;
};

AMX INLINE void multiply(const struct corner *at)
{
    const uint16_t *a0 = at->a0, *a1 = at->a1, *b0 = at->b0, *b1 = at->b1;
    const int64_t stride = at->a_stride * 2;
    for (int64_t k = 0; k < at->steps; k++) {
        _tile_loadd(4, a0, stride);
        _tile_loadd(6, b0, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b1, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a1, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
        a0 += at->a_step;
        a1 += at->a_step;
        b0 += TILE;
        b1 += TILE;
    }
}

/* Adds into fp32 c in place. */
AMX static void corner_f32(const struct corner *at, float *c, int64_t width, bool add)
{
    if (add) {
        _tile_loadd(0, c, width * 4);
        _tile_loadd(1, c + 16, width * 4);
        _tile_loadd(2, c + 16 * width, width * 4);
        _tile_loadd(3, c + 16 * width + 16, width * 4);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    multiply(at);
    _tile_stored(0, c, width * 4);
    _tile_stored(1, c + 16, width * 4);
    _tile_stored(2, c + 16 * width, width * 4);
    _tile_stored(3, c + 16 * width + 16, width * 4);
}

/* Rounds into bf16 c, the bias (32 values or NULL) added first. */
AMX static void corner_bf16(const struct corner *at, uint16_t *c, int64_t width, const uint16_t *bias)
{
    _Alignas(64) float sum[32][32];
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    multiply(at);
    _tile_stored(0, &sum[0][0], 128);
    _tile_stored(1, &sum[0][16], 128);
    _tile_stored(2, &sum[16][0], 128);
    _tile_stored(3, &sum[16][16], 128);
    const vector left = bias ? load(bias, 0, 16, true) : (vector){0},
                 right = bias ? load(bias, 16, 16, true) : (vector){0};
    for (int i = 0; i < 32; i++) {
        store(c + i * width, 0, 16, true, vector_load(&sum[i][0]) + left);
        store(c + i * width, 16, 16, true, vector_load(&sum[i][16]) + right);
    }
}

/* All rows of the share against one packed panel of b: columns [n, n + columns), depth [k, k + depth). */
AMX static void run_panel(const struct gemm *gemm, const struct share *share, int64_t n, int64_t columns, int64_t k,
                          int64_t depth)
{
    const uint16_t *a = gemm->a;
    for (int64_t m = share->m_first; m < share->m_end; m += 32)
        for (int64_t j = 0; j < columns; j += 32) {
            struct corner at = {.steps = depth / 32, .b0 = share->b + j / 16 * (depth / 32) * TILE};
            at.b1 = at.b0 + depth / 32 * TILE;
            if (gemm->transpose_a) {
                at.a0 = share->a + (m - share->m_first) / 16 * (depth / 32) * TILE;
                at.a1 = at.a0 + depth / 32 * TILE;
                at.a_stride = 32, at.a_step = TILE;
            } else {
                at.a0 = a + m * gemm->k + k;
                at.a1 = at.a0 + 16 * gemm->k;
                at.a_stride = gemm->k, at.a_step = 32;
            }
            const int64_t to = m * gemm->n + n + j;
            if (gemm->out == HAPT_F32)
                corner_f32(&at, (float *)gemm->c + to, gemm->n, gemm->accumulate || k > 0);
            else
                corner_bf16(&at, (uint16_t *)gemm->c + to, gemm->n,
                            gemm->bias ? (const uint16_t *)gemm->bias + n + j : NULL);
        }
}

AMX static void run_share(const struct gemm *gemm, const struct share *share)
{
    if (share->m_first == share->m_end || share->n_first == share->n_end) return;
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.rows[i] = 16, config.row_bytes[i] = 64;
    _tile_loadconfig(&config);
    const uint16_t *a = gemm->a, *b = gemm->b;
    const int64_t most = block_depth(gemm), wide = panel_columns(most, gemm->n);
    for (int64_t k = 0; k < gemm->k; k += most) {
        const int64_t depth = smaller(most, gemm->k - k);
        if (gemm->transpose_a)
            pack_a_transposed(a + k * gemm->m + share->m_first, gemm->m, depth, share->m_end - share->m_first,
                              share->a);
        for (int64_t n = share->n_first; n < share->n_end; n += wide) {
            const int64_t columns = smaller(wide, share->n_end - n);
            if (gemm->transpose_b)
                pack_b_transposed(b + n * gemm->k + k, gemm->k, depth, columns, share->b);
            else
                pack_b(b + k * gemm->n + n, gemm->n, depth, columns, share->b);
            run_panel(gemm, share, n, columns, k, depth);
        }
    }
    _tile_release();
}

void ISA_NAME(hapt_tiles_run)(const struct gemm *gemm, void *workspace)
{
    int64_t of_a;
    const int64_t elements = share_elements(gemm, &of_a);
    const int threads = gemm->threads > 0 ? gemm->threads : 1;
#pragma omp parallel num_threads(threads)
    {
        const int parts = omp_get_num_threads(), part = omp_get_thread_num();
        struct share share = share_of(gemm, part, parts);
        share.a = (uint16_t *)workspace + part * elements;
        share.b = share.a + of_a;
        run_share(gemm, &share);
    }
}

#else

size_t ISA_NAME(hapt_tiles_workspace)(const struct gemm *gemm)
{
    (void)gemm;
    return 0;
}

void ISA_NAME(hapt_tiles_run)(const struct gemm *gemm, void *workspace)
{
    (void)gemm, (void)workspace;
}

#endif
