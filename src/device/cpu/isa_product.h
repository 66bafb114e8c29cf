/* For isa_*.c: products of small fp32 matrices that stay in the caches, for kernels that fuse more work around them. */
#ifndef HAPT_CPU_ISA_PRODUCT_H
#define HAPT_CPU_ISA_PRODUCT_H

#include "isa.h"

#define TILE_ROWS 4
#define TILE_VECTORS (LANES == 16 ? 4 : 2)

/* c [rows][vectors] (+)= a b in registers; element (i, k) of a is a[i * a_row + k * a_depth]. */
INLINE void tile(int rows, int vectors, int64_t depth, const float *a, int64_t a_row, int64_t a_depth, const float *b,
                 int64_t b_row, float *c, int64_t c_row, bool add)
{
    vector sum[TILE_ROWS][TILE_VECTORS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) sum[i][j] = add ? vector_load(c + i * c_row + j * LANES) : (vector){0};
    for (int64_t k = 0; k < depth; k++) {
        vector line[TILE_VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) line[j] = vector_load(b + k * b_row + j * LANES);
#pragma GCC unroll 4
        for (int i = 0; i < rows; i++) {
            const float factor = a[i * a_row + k * a_depth];
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sum[i][j] += line[j] * factor;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < vectors; j++) vector_store(c + i * c_row + j * LANES, sum[i][j]);
}

struct product {
    int64_t rows, vectors, depth; /* vectors: columns / LANES */
    const float *a;
    int64_t a_row, a_depth;
    const float *b;
    int64_t b_row;
    float *c;
    int64_t c_row;
    bool add;
};

INLINE void product_strip(const struct product *p, int64_t column, int vectors)
{
    int64_t i = 0;
    for (; i + TILE_ROWS <= p->rows; i += TILE_ROWS)
        tile(TILE_ROWS, vectors, p->depth, p->a + i * p->a_row, p->a_row, p->a_depth, p->b + column, p->b_row,
             p->c + i * p->c_row + column, p->c_row, p->add);
    for (; i < p->rows; i++)
        tile(1, vectors, p->depth, p->a + i * p->a_row, p->a_row, p->a_depth, p->b + column, p->b_row,
             p->c + i * p->c_row + column, p->c_row, p->add);
}

__attribute__((unused)) static void product(const struct product *p)
{
    int64_t v = 0;
    for (; v + TILE_VECTORS <= p->vectors; v += TILE_VECTORS) product_strip(p, v * LANES, TILE_VECTORS);
    switch (p->vectors - v) {
    case 3: product_strip(p, v * LANES, TILE_VECTORS > 3 ? 3 : 1); break;
    case 2: product_strip(p, v * LANES, 2); break;
    case 1: product_strip(p, v * LANES, 1); break;
    default: break;
    }
}

#endif
