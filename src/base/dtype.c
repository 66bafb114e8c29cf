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
