/*
 * The cuda back end: hapt-cuda.so, loaded on demand, so that one executable runs everywhere. It lies beside the
 * executable (a build), in ../lib/hapt (an installation), or at the path in HAPT_CUDA_PLUGIN. It sets its slots of the
 * table when it is loaded. Until then only the slots that load it are set. If something is missing, that is the reason
 * reported for having no device.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "blocks.h"
#include "cuda/plugin.h"
#include "cuda_libraries.h"

extern struct hapt_backend hapt_cuda_backend;

enum { PATH_CHARS = 4096, REASON_CHARS = 512 };

static struct {
    pthread_once_t once;
    const struct cuda_plugin *plugin; /* NULL: see `reason` */
    char path[PATH_CHARS], reason[REASON_CHARS];
} cuda = {.once = PTHREAD_ONCE_INIT};

static void plugin_path(char path[PATH_CHARS])
{
    static const char name[] = "hapt-cuda.so", installed[] = "../lib/hapt/";
    const char *asked = getenv("HAPT_CUDA_PLUGIN");
    if (asked && *asked) {
        snprintf(path, PATH_CHARS, "%s", asked);
        return;
    }
    const ssize_t length = readlink("/proc/self/exe", path, PATH_CHARS - sizeof name - sizeof installed);
    path[length > 0 ? length : 0] = '\0';
    char *slash = strrchr(path, '/'), *const end = slash ? slash + 1 : path;
    strcpy(end, name);
    if (!access(path, R_OK)) return;
    sprintf(end, "%s%s", installed, name);
    if (access(path, R_OK)) strcpy(end, name);
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
    static const struct cuda_host host = {
        .fail = hapt_fail, .open_library = cuda_library_open, .call_bytes = sizeof(struct hapt_call)};
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
    cuda.plugin = symbol ? get(&host, CUDA_PLUGIN_ABI, &hapt_cuda_backend) : NULL;
    if (cuda.plugin) return;
    snprintf(cuda.reason, sizeof cuda.reason, "%.200s is of another build: rebuild it and hapt together", path);
}

static const struct cuda_plugin *plugin(void)
{
    pthread_once(&cuda.once, load);
    return cuda.plugin;
}

static const char *cuda_libraries(void)
{
    return plugin() ? hapt_cuda_backend.libraries() : NULL;
}

/* Index 0 is the plug-in itself. The libraries that it needs or can use follow. */
static const struct hapt_library *cuda_library(int index)
{
    static struct hapt_library file;
    const char *reason;
    if (!is_wanted()) return NULL;
    if (index > 0) return cuda_library_at(index - 1);
    if (plugin()) {
        hapt_cuda_backend.libraries();
        hapt_cuda_backend.device_comms(&reason);
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
    if (plugin()) return hapt_cuda_backend.device_count(reason);
    *reason = cuda.reason;
    return 0;
}

static enum hapt_status cuda_open(int index, int threads, size_t memory_bytes, struct hapt_device **device)
{
    static struct device_memory memory = {.error_format = "the CUDA device has less than %zu bytes of memory left",
                                          .hint = "use more devices, a smaller microbatch or devices with more memory"};
    (void)threads;
    if (!plugin()) return hapt_fail(HAPT_ERR_INPUT, "see hapt doctor", "no cuda device: %s", cuda.reason);
    HAPT_TRY(plugin()->open(index));
    memory.reserve = plugin()->reserve;
    memory.release = plugin()->release;
    return device_open("cuda", &memory, 0, memory_bytes, device);
}

static const struct hapt_kernel *cuda_find_kernel(const struct hapt_device *device, const char *op,
                                                  enum hapt_dtype dtype)
{
    return plugin() ? hapt_cuda_backend.find_kernel(device, op, dtype) : NULL;
}

static const struct hapt_device_comm_ops *cuda_device_comms(const char **reason)
{
    if (plugin()) return hapt_cuda_backend.device_comms(reason);
    *reason = cuda.reason;
    return NULL;
}

static void cuda_use_tf32(bool use)
{
    if (plugin()) hapt_cuda_backend.use_tf32(use);
}

struct hapt_backend hapt_cuda_backend = {
    .name = "cuda",
    .description = "NVIDIA GPUs: cuBLASLt matrix products, cuDNN convolutions and attention, own kernels",
    .libraries = cuda_libraries,
    .loaded_library = cuda_library,
    .device_count = cuda_device_count,
    .open = cuda_open,
    .close = device_close,
    .allocate = device_allocate,
    .free = device_free,
    .memory_used = device_memory_used,
    .memory_peak = device_memory_peak,
    .find_kernel = cuda_find_kernel,
    .device_comms = cuda_device_comms,
    .use_tf32 = cuda_use_tf32,
};
