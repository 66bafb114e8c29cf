/* The table of back ends. */
#include <string.h>

#include "hapt/device.h"

extern const struct hapt_backend hapt_cpu_backend, hapt_emulated_backend;
extern struct hapt_backend hapt_cuda_backend; /* its plug-in sets slots */

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

enum hapt_status hapt_backend_pin(const struct hapt_backend *backend, size_t bytes, void **memory)
{
    void *made = backend->pin(bytes);
    if (!made)
        return hapt_fail(HAPT_ERR_MEMORY,
                         "raise the limit of locked memory (ulimit -l) or use fewer ranks on this host",
                         "this host has less than %zu bytes left that can be page-locked", bytes);
    *memory = made;
    return HAPT_OK;
}
