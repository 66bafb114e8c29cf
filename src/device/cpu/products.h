/* Matrix products with the bf16 paths of every level; exported by isa_linear.c. */
#ifndef HAPT_CPU_PRODUCTS_H
#define HAPT_CPU_PRODUCTS_H

#include "gemm.h"
#include "isa.h"

/* Scratch bytes of the product. */
size_t ISA_NAME(hapt_cpu_product_workspace)(const struct gemm *gemm);
/* Allows a bias only in bf16: in fp32 a separate pass over the result is faster. */
enum hapt_status ISA_NAME(hapt_product_run)(const struct hapt_call *call, const struct gemm *gemm, void *workspace);

#endif
