/* The order of rows in epochs. Private to the train room. */
#ifndef HAPT_TRAIN_DATA_ORDER_H
#define HAPT_TRAIN_DATA_ORDER_H

#include <stdint.h>

/* A permutation of [0, rows) for each seed and epoch: the row that comes at place `index`. Each rank can compute any
 * place without the others. 1 <= rows <= 2^62. */
int64_t data_order_row(uint64_t seed, int64_t epoch, int64_t rows, int64_t index);

#endif
