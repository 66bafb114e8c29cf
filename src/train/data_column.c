/* Copies of elements, block by block. Blocks of a file have no alignment. */
#include "data_column.h"

#include <string.h>

#include "hapt/env.h"

/* *count becomes the number of elements from `first` on that lie in one block, at most *count. */
static const char *piece(const struct data_column *column, int64_t first, int64_t *count)
{
    const int64_t block = column->offset ? first / column->block : 0, past = first - block * column->block;
    if (column->offset && *count > column->block - past) *count = column->block - past;
    return column->base + (column->offset ? column->offset[block] : 0) +
           (size_t)past * hapt_h5_type_bytes(column->type);
}

static int64_t integer_at(const char *at, enum hapt_h5_type type)
{
    uint16_t narrow;
    int32_t value;
    int64_t wide;
    switch (type) {
    case HAPT_H5_U8: return (uint8_t)*at;
    case HAPT_H5_U16: memcpy(&narrow, at, sizeof narrow); return narrow;
    case HAPT_H5_I32: memcpy(&value, at, sizeof value); return value;
    case HAPT_H5_I64: memcpy(&wide, at, sizeof wide); return wide;
    case HAPT_H5_F32:
    case HAPT_H5_F64: break;
    }
    HAPT_ASSERT(!"a column of integers");
    return 0;
}

static void convert(const char *from, enum hapt_h5_type stored, enum hapt_h5_type type, int64_t count, char *to)
{
    for (int64_t i = 0; i < count; i++, from += hapt_h5_type_bytes(stored), to += hapt_h5_type_bytes(type)) {
        const int64_t value = integer_at(from, stored);
        const uint16_t narrow = (uint16_t)value;
        const int32_t whole = (int32_t)value;
        const float real = (float)value;
        switch (type) {
        case HAPT_H5_U16: memcpy(to, &narrow, sizeof narrow); break;
        case HAPT_H5_I32: memcpy(to, &whole, sizeof whole); break;
        case HAPT_H5_F32: memcpy(to, &real, sizeof real); break;
        case HAPT_H5_U8:
        case HAPT_H5_I64:
        case HAPT_H5_F64: HAPT_ASSERT(!"a conversion that data need");
        }
    }
}

void data_column_read(const struct data_column *column, enum hapt_h5_type type, int64_t first, int64_t count, void *to)
{
    for (int64_t done = 0, part; done < count; done += part) {
        part = count - done;
        const char *from = piece(column, first + done, &part);
        char *at = (char *)to + (size_t)done * hapt_h5_type_bytes(type);
        if (column->type == type)
            memcpy(at, from, (size_t)part * hapt_h5_type_bytes(type));
        else
            convert(from, column->type, type, part, at);
    }
}
