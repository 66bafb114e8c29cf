/* Describes this process's host from hwloc and the system. */
#include "host.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "database.h"
#include "hapt/config.h"
#include "hapt/device.h"
#include "affinity_hwloc.h"

#define MISMATCH_SHARE \
    0.15 /* a larger difference between the driver's and the database's figures means that one of them is wrong */

const char *hapt_host_library_version(void)
{
    return HWLOC_VERSION;
}

/* Reads the value of the first line of /proc/cpuinfo that starts with `key`. */
static bool read_cpuinfo(const char *key, char *value, size_t size)
{
    FILE *file = fopen("/proc/cpuinfo", "r");
    char *line = NULL;
    size_t room = 0;
    bool found = false;
    while (file && !found && getline(&line, &room, file) > 0) {
        const char *colon = strchr(line, ':');
        if (!colon || strncmp(line, key, strlen(key)) != 0) continue;
        snprintf(value, size, "%s", colon + 1 + strspn(colon + 1, " \t"));
        value[strcspn(value, "\n")] = '\0';
        found = true;
    }
    free(line);
    if (file) fclose(file);
    return found;
}

void hapt_host_cpu_flags(char *flags, size_t size)
{
    char *text = malloc(size);
    flags[0] = '\0';
    if (!text) return;
    if (read_cpuinfo("flags", text, size) || read_cpuinfo("Features", text, size)) snprintf(flags, size, " %s", text);
    free(text);
    /* Add a blank after the last flag, so that a search for " name " finds complete words. */
    const size_t length = strlen(flags);
    if (length + 1 < size) strcpy(flags + length, " ");
}

/* The clock for peak rates: the nominal clock if the system reports it. */
static double clock_of_host(void)
{
    char text[64];
    if (hapt_first_line("/sys/devices/system/cpu/cpu0/cpufreq/base_frequency", text, sizeof text) && atof(text) > 0)
        return atof(text) * 1e3; /* kHz */
    if (hapt_first_line("/sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq", text, sizeof text) && atof(text) > 0)
        return atof(text) * 1e3;
    if (read_cpuinfo("cpu MHz", text, sizeof text) && atof(text) > 0) return atof(text) * 1e6;
    return 2.5e9;
}

/* Estimates FLOP/s of a core: clock x FLOPs per cycle of two fused multiply-add units with the processor's widest
 * vectors (one multiply and one add unit without fused multiply-add). fp16 stays 0: the cpu back end lacks it. */
static void estimate_core(struct hapt_host *host)
{
    char flags[8192];
    hapt_host_cpu_flags(flags, sizeof flags);
    double fp32 = 8; /* SSE2: 4 lanes, multiply and add */
    if (strstr(flags, " avx512f "))
        fp32 = 64;
    else if (strstr(flags, " avx2 ") && strstr(flags, " fma "))
        fp32 = 32;
    else if (strstr(flags, " avx ") || strstr(flags, " asimd "))
        fp32 = 16;
    double bf16 = fp32;
    if (strstr(flags, " amx_bf16 "))
        bf16 = 1024; /* a 16 x 16 x 32 tile product every 16 cycles */
    else if (strstr(flags, " avx512_bf16 ") || strstr(flags, " bf16 "))
        bf16 = 2 * fp32;
    host->core_flops[HAPT_F32] = host->clock_hz * fp32;
    host->core_flops[HAPT_BF16] = host->clock_hz * bf16;
}

static void copy_info(char *text, size_t size, const char *info, const char *otherwise)
{
    snprintf(text, size, "%s", info && *info ? info : otherwise);
    for (char *c = text; *c; c++)
        if ((unsigned char)*c < 0x20 || *c == 0x7f) *c = ' ';
}

static void add_gpu(struct hapt_host *host, hwloc_obj_t object)
{
    const struct hwloc_pcidev_attr_s *pci = &object->attr->pcidev;
    const unsigned kind = pci->class_id >> 8; /* 03: display, 12: processing accelerator */
    const bool maker = pci->vendor_id == 0x10de || pci->vendor_id == 0x1002;
    if (!maker || (kind != 0x03 && kind != 0x12) || host->gpu_count == HAPT_HOST_GPUS) return;
    struct hapt_host_gpu *gpu = &host->gpu[host->gpu_count++];
    const struct hapt_device_spec *spec = hapt_device_spec_of_pci(pci->vendor_id, pci->device_id);
    char otherwise[32];
    snprintf(otherwise, sizeof otherwise, "PCI device %04x:%04x", pci->vendor_id, pci->device_id);
    copy_info(gpu->name, sizeof gpu->name, hwloc_obj_get_info_by_name(object, "PCIDevice"), otherwise);
    snprintf(gpu->spec, sizeof gpu->spec, "%.23s", spec ? spec->name : "");
    snprintf(gpu->bus, sizeof gpu->bus, "%04x:%02x:%02x.%x", pci->domain & 0xffff, pci->bus, pci->dev, pci->func);
}

/* fp32 lanes of a multiprocessor (CUDA programming guide, table of compute capabilities). */
static int lanes_of(int major, int minor)
{
    return major == 7 || (major == 6 && minor == 0) || (major == 8 && minor == 0) ? 64 : 128;
}

/* Lists the driver's GPUs, in the driver's order, even if hwloc has not seen them. hwloc's database entry is kept. */
static void query_driver(struct hapt_host *host, const struct hapt_backend *cuda)
{
    struct hapt_host_gpu seen[HAPT_HOST_GPUS];
    const int seen_count = host->gpu_count;
    if (host->faked || !cuda->describe || host->gpus_usable < 1) return;
    memcpy(seen, host->gpu, sizeof seen);
    host->gpu_count = 0;
    for (int i = 0; i < host->gpus_usable && i < HAPT_HOST_GPUS; i++) {
        struct hapt_device_facts facts;
        struct hapt_host_gpu *gpu = &host->gpu[host->gpu_count++];
        *gpu = (struct hapt_host_gpu){.name = "GPU"};
        if (cuda->describe(i, &facts) != HAPT_OK) {
            hapt_fail_reset();
            continue;
        }
        const struct hapt_device_spec *spec = hapt_device_spec_of_name(facts.name, (double)facts.memory_bytes);
        for (int k = 0; k < seen_count; k++)
            if (strcmp(seen[k].bus, facts.pci_address) == 0) memcpy(gpu->spec, seen[k].spec, sizeof gpu->spec);
        if (spec) snprintf(gpu->spec, sizeof gpu->spec, "%.23s", spec->name);
        copy_info(gpu->name, sizeof gpu->name, facts.name, "GPU");
        memcpy(gpu->bus, facts.pci_address, sizeof gpu->bus);
        gpu->memory_bytes = (double)facts.memory_bytes;
        gpu->processors = facts.processors;
        gpu->lanes_per_processor = lanes_of(facts.major, facts.minor);
        gpu->no_bf16 = facts.major < 8;
        gpu->clock_hz = facts.clock_hz;
    }
}

static void query_drivers(struct hapt_host *host)
{
    const struct hapt_backend *cuda = hapt_backend_find("cuda");
    const char *reason = "";
    host->gpus_usable = cuda ? cuda->device_count(&reason) : 0;
    if (cuda) query_driver(host, cuda);
}

static void add_nic(struct hapt_host *host, hwloc_obj_t object)
{
    const bool ethernet = object->attr->osdev.type == HWLOC_OBJ_OSDEV_NETWORK;
    if ((!ethernet && object->attr->osdev.type != HWLOC_OBJ_OSDEV_OPENFABRICS) || !object->name ||
        host->nic_count == HAPT_HOST_NICS)
        return;
    struct hapt_host_nic *nic = &host->nic[host->nic_count++];
    copy_info(nic->name, sizeof nic->name, object->name, "?");
    char path[160], text[64];
    if (host->faked) return; /* this machine's interface rates do not apply to a fake */
    if (ethernet) {
        snprintf(path, sizeof path, "/sys/class/net/%s/speed", nic->name);
        if (hapt_first_line(path, text, sizeof text) && atof(text) > 0)
            nic->bandwidth = atof(text) * 125e3; /* Mbit/s */
    } else {
        snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/rate", nic->name);
        if (hapt_first_line(path, text, sizeof text)) nic->bandwidth = atof(text) * 125e6; /* "100 Gb/sec (4X EDR)" */
    }
}

static void read_topology(struct hapt_host *host, hwloc_topology_t topology)
{
    const hwloc_obj_t root = hwloc_get_root_obj(topology);
    host->cores = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_CORE);
    host->threads = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_PU);
    host->numa_nodes = hwloc_get_nbobjs_by_type(topology, HWLOC_OBJ_NUMANODE);
    if (host->cores < 1) host->cores = host->threads;
    host->threads_unbound = host->threads;
    /* The real machine's memory comes from the kernel: hwloc misses memory that was hot-plugged. */
    if (host->faked && root->total_memory > 0) host->memory_bytes = (double)root->total_memory;
    const hwloc_obj_t package = hwloc_get_obj_by_type(topology, HWLOC_OBJ_PACKAGE, 0);
    const char *model = package ? hwloc_obj_get_info_by_name(package, "CPUModel") : NULL;
    if (!model) model = hwloc_obj_get_info_by_name(root, "CPUModel");
    copy_info(host->cpu_model, sizeof host->cpu_model, model, host->cpu_model);
    if (host->faked) {
        char name[64];
        snprintf(name, sizeof name, "faked-%04x", (unsigned)(host->identity & 0xffff));
        copy_info(host->name, sizeof host->name, hwloc_obj_get_info_by_name(root, "HostName"), name);
    }
    for (hwloc_obj_t object = NULL; (object = hwloc_get_next_pcidev(topology, object));) add_gpu(host, object);
    for (hwloc_obj_t object = NULL; (object = hwloc_get_next_osdev(topology, object));) add_nic(host, object);
}

/* Applies the memory limit of this process's cgroup, if any. */
static void apply_memory_limit(struct hapt_host *host)
{
    static const char *const files[] = {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"};
    for (size_t i = 0; i < sizeof files / sizeof *files; i++) {
        char text[64];
        if (!hapt_first_line(files[i], text, sizeof text)) continue;
        const double limit = atof(text); /* "max": 0 */
        if (limit > 0 && limit < host->memory_bytes) host->memory_bytes = limit;
    }
}

void hapt_host_fake_key(char *key, size_t size)
{
    const char *xml = getenv("HWLOC_XMLFILE"), *synthetic = getenv("HWLOC_SYNTHETIC"),
               *own = getenv("HWLOC_THISSYSTEM");
    key[0] = '\0';
    if (own && strcmp(own, "1") == 0) return; /* it is this machine, described by a file */
    snprintf(key, size, "%s%s", xml ? xml : "", synthetic ? synthetic : "");
}

void hapt_host_describe(const struct hapt_env *env, struct hapt_host *host)
{
    char fake[1024];
    *host = (struct hapt_host){.ranks = 1, .cores = 1, .threads = 1, .threads_unbound = 1, .numa_nodes = 1};
    hapt_host_fake_key(fake, sizeof fake);
    host->faked = fake[0] != '\0';
    host->identity = hapt_hash((uint64_t)env->node_index, fake, strlen(fake));
    if (gethostname(host->name, sizeof host->name) != 0 || !host->name[0]) strcpy(host->name, "localhost");
    host->name[sizeof host->name - 1] = '\0';
    host->memory_bytes = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    host->clock_hz = clock_of_host();
    host->cores = host->threads = host->threads_unbound = env->cores;
    if (!host->faked) read_cpuinfo("model name", host->cpu_model, sizeof host->cpu_model);
    estimate_core(host);

    hwloc_topology_t topology;
    const bool loaded = affinity_load(true, &topology);
    /* hwloc silently ignores a fake topology that it cannot read. */
    if (host->faked && (!loaded || hwloc_topology_is_thissystem(topology))) {
        host->faked = false;
        host->fake_failed = true;
    }
    if (loaded) read_topology(host, topology);
    query_drivers(host);
    for (int g = 0; loaded && g < host->gpu_count; g++) {
        struct hapt_host_gpu *gpu = &host->gpu[g];
        affinity_describe(topology, gpu->bus, gpu->local_cores, sizeof gpu->local_cores, gpu->local_nics,
                          sizeof gpu->local_nics);
    }
    if (loaded) hwloc_topology_destroy(topology);
    if (!host->faked) {
        /* CPU affinity may allow the ranks less than the machine has. */
        if (env->cores < host->threads) host->threads = env->cores;
        if (host->cores > host->threads) host->cores = host->threads;
        apply_memory_limit(host);
    }
}

const char *hapt_host_gpu_mismatch(const struct hapt_host_gpu *gpu, char text[192])
{
    const struct hapt_device_spec *spec = hapt_device_spec_find(gpu->spec);
    const double flops = 2.0 * gpu->lanes_per_processor * gpu->processors * gpu->clock_hz;
    char told[32], known[32];
    if (!spec) return NULL;
    if (gpu->memory_bytes > 0 && fabs(gpu->memory_bytes / spec->memory_bytes - 1) > MISMATCH_SHARE) {
        snprintf(text, 192, "its driver reports %s of memory, a %s has %s", hapt_units_bytes(gpu->memory_bytes, told),
                 spec->name, hapt_units_bytes(spec->memory_bytes, known));
        return text;
    }
    if (flops > 0 && fabs(flops / spec->peak_flops[HAPT_F32] - 1) > MISMATCH_SHARE) {
        snprintf(text, 192, "its driver reports %d multiprocessors at %.2f GHz, so %s in fp32, a %s has %s",
                 gpu->processors, 1e-9 * gpu->clock_hz, hapt_units_flops(flops, told), spec->name,
                 hapt_units_flops(spec->peak_flops[HAPT_F32], known));
        return text;
    }
    return NULL;
}
