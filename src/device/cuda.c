/*
 * The cuda back end: hapt-cuda.so, loaded when somebody asks for it, so that one executable runs everywhere. It lies
 * beside the executable, or where HAPT_CUDA_PLUGIN says. What is missing is said as the reason why there is no device.
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
    const struct cuda_plugin *plugin; /* NULL: see the reason */
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

/* A driver makes these device files; dxg is WSL's. */
static bool has_driver(void)
{
    return access("/dev/nvidiactl", F_OK) == 0 || access("/dev/dxg", F_OK) == 0;
}

/* Loading CUDA's libraries takes longer than many a command: not where there is no driver, unless the plug-in is asked
 * for. */
static bool is_wanted(void)
{
    return getenv("HAPT_CUDA_PLUGIN") || has_driver();
}

static void load(void)
{
    static const struct cuda_host host = {.fail = hapt_fail, .open_library = cuda_library_open};
    char *const path = cuda.path;
    const char *said;
    plugin_path(path);
    const bool asked = getenv("HAPT_CUDA_PLUGIN") != NULL;
    if (access(path, R_OK)) {
        snprintf(cuda.reason, sizeof cuda.reason,
                 asked ? "HAPT_CUDA_PLUGIN names %.200s, which cannot be read"
                       : "this build has no CUDA back end (%.200s): make it where a CUDA toolkit is",
                 path);
        return;
    }
    if (!is_wanted()) {
        snprintf(cuda.reason, sizeof cuda.reason, "no NVIDIA driver on this machine");
        return;
    }
    if (!cuda_library_is_whole(path)) {
        snprintf(cuda.reason, sizeof cuda.reason, "%.200s is no whole library: make or copy it again", path);
        return;
    }
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32",
           0); /* or queues share the way to the device, and one waits for another */
    void *library = cuda_libraries_open_plugin(path, &said);
    if (!library) {
        snprintf(cuda.reason, sizeof cuda.reason, "%s", said);
        return;
    }
    if (has_driver())
        cuda_library_open("libcuda.so.1",
                          &said); /* the runtime in the plug-in opens it by this name, and finds it then */
    cuda_plugin_getter *get;
    void *symbol = dlsym(library, "hapt_cuda_plugin");
    memcpy(&get, &symbol, sizeof get);
    cuda.plugin = symbol ? get(&host, CUDA_PLUGIN_ABI) : NULL;
    if (cuda.plugin && cuda.plugin->call_bytes == sizeof(struct hapt_call)) return;
    cuda.plugin = NULL;
    snprintf(cuda.reason, sizeof cuda.reason, "%.200s is of another build: make both anew", path);
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
        plugin()->groups(&reason);
    }
    file = (struct hapt_library){.name = "hapt-cuda.so", .path = cuda.path};
    if (!plugin() && !cuda_library_at(0))
        file = (struct hapt_library){.name = "hapt-cuda.so",
                                     .missing = cuda.reason,
                                     .remedy = "make it where a CUDA toolkit is (nvcc)",
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
        .lack = "the CUDA device has no %zu bytes of memory left",
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

static const struct hapt_groups *cuda_groups(const char **reason)
{
    if (plugin()) return plugin()->groups(reason);
    *reason = cuda.reason;
    return NULL;
}

static struct hapt_event *cuda_mark(struct hapt_queue *queue)
{
    return plugin()->mark(queue);
}

static double cuda_seconds(struct hapt_event *from, struct hapt_event *to)
{
    return plugin()->seconds(from, to);
}

static void cuda_hold(struct hapt_queue *queue, double time_s)
{
    plugin()->hold(queue, time_s);
}

static bool cuda_capture(struct hapt_queue *queue)
{
    return plugin()->capture(queue);
}

static struct hapt_replay *cuda_captured(struct hapt_queue *queue)
{
    return plugin()->captured(queue);
}

static bool cuda_replay(struct hapt_replay *replay, struct hapt_queue *queue)
{
    return plugin()->replay(replay, queue);
}

static void cuda_forget(struct hapt_replay *replay)
{
    plugin()->forget(replay);
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
    .groups = cuda_groups,
    .mark = cuda_mark,
    .seconds = cuda_seconds,
    .hold = cuda_hold,
    .capture = cuda_capture,
    .captured = cuda_captured,
    .replay = cuda_replay,
    .forget = cuda_forget,
    .use_tf32 = cuda_use_tf32,
};
