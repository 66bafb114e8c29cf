#include "hapt/dtype.h"

static const struct {
    const char *name;
    size_t bytes;
} type[HAPT_DTYPE_COUNT] = {
    [HAPT_F32] = {"fp32", 4},
    [HAPT_BF16] = {"bf16", 2},
    [HAPT_F16] = {"fp16", 2},
    [HAPT_I32] = {"int32", 4},
};

size_t hapt_dtype_bytes(enum hapt_dtype dtype)
{
    return type[dtype].bytes;
}

const char *hapt_dtype_name(enum hapt_dtype dtype)
{
    return type[dtype].name;
}

bool hapt_dtype_parse(const char *name, enum hapt_dtype *dtype)
{
    for (int i = 0; i < HAPT_DTYPE_COUNT; i++)
        if (!strcmp(type[i].name, name)) {
            *dtype = (enum hapt_dtype)i;
            return true;
        }
    return false;
}

static const char *const precision[] = {"unknown", "fp32", "tf32", "bf16", "fp16"};
enum { PRECISIONS = sizeof precision / sizeof *precision };

const char *hapt_precision_name(enum hapt_precision of)
{
    return precision[of];
}

enum hapt_precision hapt_precision_find(const char *name)
{
    for (int i = 1; i < PRECISIONS; i++)
        if (!strcmp(precision[i], name)) return (enum hapt_precision)i;
    return HAPT_PRECISION_UNKNOWN;
}

enum hapt_dtype hapt_precision_dtype(enum hapt_precision of)
{
    return of == HAPT_PRECISION_BF16 ? HAPT_BF16 : of == HAPT_PRECISION_FP16 ? HAPT_F16 : HAPT_F32;
}

enum hapt_precision hapt_precision_of(enum hapt_dtype dtype)
{
    return dtype == HAPT_BF16 ? HAPT_PRECISION_BF16 : dtype == HAPT_F16 ? HAPT_PRECISION_FP16 : HAPT_PRECISION_FP32;
}
