/* The table of back ends. */
#include <string.h>

#include "hapt/device.h"

extern const struct hapt_backend hapt_cpu_backend, hapt_emulated_backend, hapt_cuda_backend;

static const struct hapt_backend *const backends[] = {
    &hapt_cpu_backend,
    &hapt_emulated_backend,
    &hapt_cuda_backend,
};

const struct hapt_backend *hapt_backend_at(int index)
{
    return index >= 0 && index < (int)(sizeof backends / sizeof *backends) ? backends[index] : NULL;
}

const struct hapt_backend *hapt_backend_find(const char *name)
{
    for (int i = 0; hapt_backend_at(i); i++)
        if (!strcmp(backends[i]->name, name)) return backends[i];
    return NULL;
}
