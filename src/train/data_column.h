/* The elements of one dataset: in memory, or mapped from the file. Private to the train room. */
#ifndef HAPT_TRAIN_DATA_COLUMN_H
#define HAPT_TRAIN_DATA_COLUMN_H

#include "hapt/h5.h"

struct data_column {
    enum hapt_h5_type type;
    int64_t block;         /* elements of a block */
    const char *base;      /* NULL: there is no such dataset */
    const int64_t *offset; /* [blocks] bytes from base; NULL: one block, at base */
};

/* The elements [first, first + count) as `type`: U8, U16, I32, or F32 (of bytes or fp32). */
void data_column_read(const struct data_column *column, enum hapt_h5_type type, int64_t first, int64_t count, void *to);

#endif
