/*
 * The interface between the executable and hapt-cuda.so, which holds everything that needs a CUDA toolkit: one table in
 * each direction, and the slots of the back end. The plug-in uses no MPI, no files and nothing of the executable but
 * its table. The executable links no CUDA library, so it also runs without CUDA.
 *
 * A process has one CUDA device: the first one opened.
 */
#ifndef HAPT_CUDA_PLUGIN_H
#define HAPT_CUDA_PLUGIN_H

#include "hapt/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Increase it with any change of these tables or of the structures of device.h. */
enum { CUDA_PLUGIN_ABI = 9 };

/* Functions of the executable that the plug-in may use. */
struct cuda_host {
    enum hapt_status (*fail)(enum hapt_status status, const char *hint, const char *format, ...);
    /* Opens a shared library by its soname, wherever it is installed (cuda_libraries.h). NULL: *error says why. */
    void *(*open_library)(const char *soname, const char **error);
    size_t call_bytes; /* sizeof(struct hapt_call) at build time */
};

/* Functions that the executable wraps: it counts memory by device. */
struct cuda_plugin {
    enum hapt_status (*open)(int index);
    /* Device memory, zeroed, 256-byte aligned; NULL: none left. */
    void *(*reserve)(size_t bytes);
    void (*release)(void *memory, size_t bytes);
};

/* The only name that hapt-cuda.so exports. Sets the slots of `backend` that it implements. NULL, with `backend`
 * unchanged: built for another `abi` or other structures. */
const struct cuda_plugin *hapt_cuda_plugin(const struct cuda_host *host, int abi, struct hapt_backend *backend);
typedef const struct cuda_plugin *cuda_plugin_getter(const struct cuda_host *host, int abi,
                                                     struct hapt_backend *backend);

#ifdef __cplusplus
}
#endif

#endif
