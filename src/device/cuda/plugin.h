/*
 * Between the executable and hapt-cuda.so, which holds all that needs a CUDA toolkit: one table each way. The plug-in
 * knows no MPI, no files and nothing of the executable but these; the executable links no CUDA library, and so runs
 * where there is none.
 *
 * A process has one CUDA device: the one opened first. The slots that back ends have (device.h) mean the same here.
 */
#ifndef HAPT_CUDA_PLUGIN_H
#define HAPT_CUDA_PLUGIN_H

#include "hapt/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Changes with these tables and with the structures of device.h. */
enum { CUDA_PLUGIN_ABI = 7 };

/* What the plug-in may call. */
struct cuda_host {
    enum hapt_status (*fail)(enum hapt_status status, const char *hint, const char *format, ...);
    /* Opens a shared library by its soname, wherever it is installed (cuda_libraries.h). NULL: *said tells why. */
    void *(*open_library)(const char *soname, const char **said);
};

struct cuda_plugin {
    int abi;
    size_t call_bytes; /* sizeof(struct hapt_call) as it was built */
    const char *(*libraries)(void);
    int (*device_count)(const char **reason);
    enum hapt_status (*describe)(int index, struct hapt_device_facts *facts);
    enum hapt_status (*open)(int index);
    /* Device memory, zeroed, 256-byte aligned; NULL: there is none. */
    void *(*reserve)(size_t bytes);
    void (*release)(void *memory, size_t bytes);
    /* Page-locked host memory, from and to which copies run beside computation; NULL: there is none. */
    void *(*pin)(size_t bytes);
    void (*unpin)(void *memory);
    const struct hapt_kernel *(*find_kernel)(const char *op, enum hapt_dtype dtype);
    struct hapt_queue *(*queue)(int index);
    struct hapt_event *(*record)(struct hapt_queue *queue);
    bool (*done)(struct hapt_event *event);
    enum hapt_status (*wait)(struct hapt_event *event);
    enum hapt_status (*copy)(struct hapt_queue *queue, void *to, const void *from, size_t bytes);
    const struct hapt_groups *(*groups)(const char **reason);
    struct hapt_event *(*mark)(struct hapt_queue *queue);
    double (*seconds)(struct hapt_event *from, struct hapt_event *to);
    void (*hold)(struct hapt_queue *queue, double time_s);
    bool (*capture)(struct hapt_queue *queue);
    struct hapt_replay *(*captured)(struct hapt_queue *queue);
    bool (*replay)(struct hapt_replay *replay, struct hapt_queue *queue);
    void (*forget)(struct hapt_replay *replay);
    void (*use_tf32)(bool use);
};

/* The only name that hapt-cuda.so exports. NULL: `abi` is another one than it was built for. */
const struct cuda_plugin *hapt_cuda_plugin(const struct cuda_host *host, int abi);
typedef const struct cuda_plugin *cuda_plugin_getter(const struct cuda_host *host, int abi);

#ifdef __cplusplus
}
#endif

#endif
