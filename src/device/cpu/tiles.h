/* bf16 products on AMX tiles (Sapphire Rapids and later); exported by isa_tiles.c at every level. */
#ifndef HAPT_CPU_TILES_H
#define HAPT_CPU_TILES_H

#include "gemm.h"
#include "isa.h"

/* Workspace bytes of this product; 0: tiles cannot do it (no AMX, or a size that is not a multiple of 32). */
size_t ISA_NAME(hapt_tiles_workspace)(const struct gemm *gemm);
/* Runs a product whose workspace is not 0. */
void ISA_NAME(hapt_tiles_run)(const struct gemm *gemm, void *workspace);

#endif
