/* Matrix products with the bf16 paths of every level; exported by isa_linear.c. */
#ifndef HAPT_CPU_PRODUCTS_H
#define HAPT_CPU_PRODUCTS_H

#include "gemm.h"
#include "isa.h"

/* Scratch that the product needs. */
size_t ISA_NAME(hapt_product_workspace)(const struct gemm *gemm);
/* A bias only in bf16: in fp32 a pass over the result is faster. */
enum hapt_status ISA_NAME(hapt_product_run)(const struct hapt_call *call, const struct gemm *gemm, void *workspace);

#endif
