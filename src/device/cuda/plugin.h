/*
 * The interface between the executable and hapt-cuda.so, which holds everything that needs a CUDA toolkit: one table in
 * each direction. The plug-in uses no MPI, no files and nothing of the executable but its table. The executable links
 * no CUDA library, so it also runs without CUDA.
 *
 * A process has one CUDA device: the first one opened. Slots that back ends also have (device.h) mean the same here.
 */
#ifndef HAPT_CUDA_PLUGIN_H
#define HAPT_CUDA_PLUGIN_H

#include "hapt/device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Increase it with any change of these tables or of the structures of device.h. */
enum { CUDA_PLUGIN_ABI = 7 };

/* Functions that the plug-in may call. */
struct cuda_host {
    enum hapt_status (*fail)(enum hapt_status status, const char *hint, const char *format, ...);
    /* Opens a shared library by its soname, wherever it is installed (cuda_libraries.h). NULL: *error says why. */
    void *(*open_library)(const char *soname, const char **error);
};

struct cuda_plugin {
    int abi;
    size_t call_bytes; /* sizeof(struct hapt_call) at build time */
    const char *(*libraries)(void);
    int (*device_count)(const char **reason);
    enum hapt_status (*describe)(int index, struct hapt_device_facts *facts);
    enum hapt_status (*open)(int index);
    /* Device memory, zeroed, 256-byte aligned; NULL: none left. */
    void *(*reserve)(size_t bytes);
    void (*release)(void *memory, size_t bytes);
    /* Page-locked host memory, so that copies overlap computation; NULL: none left. */
    void *(*pin)(size_t bytes);
    void (*unpin)(void *memory);
    const struct hapt_kernel *(*find_kernel)(const char *op, enum hapt_dtype dtype);
    struct hapt_queue *(*queue)(int index);
    struct hapt_event *(*record)(struct hapt_queue *queue);
    bool (*done)(struct hapt_event *event);
    enum hapt_status (*wait)(struct hapt_event *event);
    enum hapt_status (*copy)(struct hapt_queue *queue, void *to, const void *from, size_t bytes);
    const struct hapt_device_comm_ops *(*device_comms)(const char **reason);
    struct hapt_event *(*timestamp)(struct hapt_queue *queue);
    double (*elapsed_s)(struct hapt_event *from, struct hapt_event *to);
    void (*delay)(struct hapt_queue *queue, double time_s);
    bool (*capture)(struct hapt_queue *queue);
    struct hapt_replay *(*capture_end)(struct hapt_queue *queue);
    bool (*replay)(struct hapt_replay *replay, struct hapt_queue *queue);
    void (*replay_destroy)(struct hapt_replay *replay);
    void (*use_tf32)(bool use);
};

/* The only name that hapt-cuda.so exports. NULL: built for another `abi`. */
const struct cuda_plugin *hapt_cuda_plugin(const struct cuda_host *host, int abi);
typedef const struct cuda_plugin *cuda_plugin_getter(const struct cuda_host *host, int abi);

#ifdef __cplusplus
}
#endif

#endif
