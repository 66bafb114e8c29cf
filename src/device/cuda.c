/*
 * The cuda back end: hapt-cuda.so, loaded on demand, so that one executable runs everywhere. It lies beside the
 * executable, or at the path in HAPT_CUDA_PLUGIN. If something is missing, that is the reason reported for having no
 * device.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blocks.h"
#include "cuda/plugin.h"
#include "cuda_libraries.h"

enum { PATH_CHARS = 4096, REASON_CHARS = 512 };

static struct {
    pthread_once_t once;
    const struct cuda_plugin *plugin; /* NULL: see `reason` */
    char path[PATH_CHARS], reason[REASON_CHARS];
} cuda = {.once = PTHREAD_ONCE_INIT};

static void plugin_path(char path[PATH_CHARS])
{
    static const char name[] = "hapt-cuda.so";
    const char *asked = getenv("HAPT_CUDA_PLUGIN");
    if (asked && *asked) {
        snprintf(path, PATH_CHARS, "%s", asked);
        return;
    }
    const ssize_t length = readlink("/proc/self/exe", path, PATH_CHARS - sizeof name - 1);
    path[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(path, '/');
    strcpy(slash ? slash + 1 : path, name);
}

/* The driver creates these device files; dxg: WSL. */
static bool has_driver(void)
{
    return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

/* Loading CUDA's libraries takes longer than many commands, so only with a driver or if HAPT_CUDA_PLUGIN is set. */
static bool is_wanted(void)
{
    return getenv("HAPT_CUDA_PLUGIN") || has_driver();
}

static void load(void)
{
    static const struct cuda_host host = {.fail = hapt_fail, .open_library = cuda_library_open};
    char *const path = cuda.path;
    const char *error;
    plugin_path(path);
    const bool asked = getenv("HAPT_CUDA_PLUGIN") != NULL;
    if (access(path, R_OK)) {
        snprintf(cuda.reason, sizeof cuda.reason,
                 asked ? "HAPT_CUDA_PLUGIN names %.200s, which cannot be read"
                       : "this build has no CUDA back end (%.200s): build it where a CUDA toolkit is installed",
                 path);
        return;
    }
    if (!is_wanted()) {
        snprintf(cuda.reason, sizeof cuda.reason, "no NVIDIA driver on this machine");
        return;
    }
    if (!cuda_library_is_complete(path)) {
        snprintf(cuda.reason, sizeof cuda.reason, "%.200s is no whole library: build or copy it again", path);
        return;
    }
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
           0); /* with fewer connections, queues share one and wait for each other */
    void *library = cuda_libraries_open_plugin(path, &error);
    if (!library) {
        snprintf(cuda.reason, sizeof cuda.reason, "%s", error);
        return;
    }
    if (has_driver())
        cuda_library_open("libcuda.so.1",
                          &error); /* so that the plug-in's runtime, which opens it by this name, finds it */
    cuda_plugin_getter *get;
    void *symbol = dlsym(library, "hapt_cuda_plugin");
    memcpy(&get, &symbol, sizeof get);
    cuda.plugin = symbol ? get(&host, CUDA_PLUGIN_ABI) : NULL;
    if (cuda.plugin && cuda.plugin->call_bytes == sizeof(struct hapt_call)) return;
    cuda.plugin = NULL;
    snprintf(cuda.reason, sizeof cuda.reason, "%.200s is of another build: rebuild it and hapt together", path);
}

static const struct cuda_plugin *plugin(void)
{
    pthread_once(&cuda.once, load);
    return cuda.plugin;
}

static const char *cuda_libraries(void)
{
    return plugin() ? plugin()->libraries() : NULL;
}

/* Index 0 is the plug-in itself. The libraries that it needs or can use follow. */
static const struct hapt_library *cuda_library(int index)
{
    static struct hapt_library file;
    const char *reason;
    if (!is_wanted()) return NULL;
    if (index > 0) return cuda_library_at(index - 1);
    if (plugin()) {
        plugin()->libraries();
        plugin()->device_comms(&reason);
    }
    file = (struct hapt_library){.name = "hapt-cuda.so", .path = cuda.path};
    if (!plugin() && !cuda_library_at(0))
        file = (struct hapt_library){.name = "hapt-cuda.so",
                                     .missing_reason = cuda.reason,
                                     .hint = "build it where a CUDA toolkit (nvcc) is installed",
                                     .needed = getenv("HAPT_CUDA_PLUGIN") != NULL};
    return &file;
}

static int cuda_device_count(const char **reason)
{
    if (plugin()) return plugin()->device_count(reason);
    *reason = cuda.reason;
    return 0;
}

static enum hapt_status cuda_describe(int index, struct hapt_device_facts *facts)
{
    return plugin()->describe(index, facts);
}

static void *reserve(size_t bytes)
{
    return plugin()->reserve(bytes);
}

static void release(void *memory, size_t bytes)
{
    plugin()->release(memory, bytes);
}

static enum hapt_status cuda_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    static const struct device_memory memory = {
        .reserve = reserve,
        .release = release,
        .error_format = "the CUDA device has less than %zu bytes of memory left",
        .hint = "use more devices, a smaller microbatch or devices with more memory"};
    (void)threads;
    if (!plugin()) return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor", "no cuda device: %s", cuda.reason);
    HAPT_TRY(plugin()->open(index));
    return device_open("cuda", &memory, 0, memory_bytes, device);
}

static const struct hapt_kernel *cuda_find_kernel(const struct hapt_device *device, const char *op,
                                                  enum hapt_dtype dtype)
{
    (void)device;
    return plugin() ? plugin()->find_kernel(op, dtype) : NULL;
}

static struct hapt_queue *cuda_queue(struct hapt_device *device, int index)
{
    (void)device;
    return plugin()->queue(index);
}

static struct hapt_event *cuda_record(struct hapt_queue *queue)
{
    return plugin()->record(queue);
}

static bool cuda_done(struct hapt_event *event)
{
    return plugin()->done(event);
}

static enum hapt_status cuda_wait(struct hapt_event *event)
{
    return plugin()->wait(event);
}

static enum hapt_status cuda_copy(struct hapt_queue *queue, void *to, const void *from, size_t bytes)
{
    return plugin()->copy(queue, to, from, bytes);
}

static void *cuda_pin(size_t bytes)
{
    return plugin()->pin(bytes);
}

static void cuda_unpin(void *memory)
{
    plugin()->unpin(memory);
}

static const struct hapt_device_comm_ops *cuda_device_comms(const char **reason)
{
    if (plugin()) return plugin()->device_comms(reason);
    *reason = cuda.reason;
    return NULL;
}

static struct hapt_event *cuda_timestamp(struct hapt_queue *queue)
{
    return plugin()->timestamp(queue);
}

static double cuda_elapsed_s(struct hapt_event *from, struct hapt_event *to)
{
    return plugin()->elapsed_s(from, to);
}

static void cuda_delay(struct hapt_queue *queue, double time_s)
{
    plugin()->delay(queue, time_s);
}

static bool cuda_capture(struct hapt_queue *queue)
{
    return plugin()->capture(queue);
}

static struct hapt_replay *cuda_capture_end(struct hapt_queue *queue)
{
    return plugin()->capture_end(queue);
}

static bool cuda_replay(struct hapt_replay *replay, struct hapt_queue *queue)
{
    return plugin()->replay(replay, queue);
}

static void cuda_replay_destroy(struct hapt_replay *replay)
{
    plugin()->replay_destroy(replay);
}

static void cuda_use_tf32(bool use)
{
    if (plugin()) plugin()->use_tf32(use);
}

extern const struct hapt_backend hapt_cuda_backend;
const struct hapt_backend hapt_cuda_backend = {
    .name = "cuda",
    .description = "NVIDIA GPUs: cuBLASLt matrix products, cuDNN convolutions, own kernels",
    .libraries = cuda_libraries,
    .library = cuda_library,
    .device_count = cuda_device_count,
    .describe = cuda_describe,
    .open = cuda_open,
    .close = device_close,
    .allocate = device_allocate,
    .free = device_free,
    .memory_used = device_memory_used,
    .memory_peak = device_memory_peak,
    .find_kernel = cuda_find_kernel,
    .queue = cuda_queue,
    .record = cuda_record,
    .done = cuda_done,
    .wait = cuda_wait,
    .copy = cuda_copy,
    .pin = cuda_pin,
    .unpin = cuda_unpin,
    .device_comms = cuda_device_comms,
    .timestamp = cuda_timestamp,
    .elapsed_s = cuda_elapsed_s,
    .delay = cuda_delay,
    .capture = cuda_capture,
    .capture_end = cuda_capture_end,
    .replay = cuda_replay,
    .replay_destroy = cuda_replay_destroy,
    .use_tf32 = cuda_use_tf32,
};
