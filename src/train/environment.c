/* Collects the environment of every rank, writes it and reads it back. */
#include "hapt/environment.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "hapt/host.h"
#include "hapt/version.h"

enum { MAX_CPUS = 4096, MOST_RANKS = 1 << 20 };

/* clang-format off: tables */
#define TEXT(name)                                                                                                    \
    {                                                                                                                 \
        "/environment/" #name, offsetof(struct hapt_environment, name), sizeof((struct hapt_environment *)NULL)->name \
    }
/* clang-format on */
static const struct {
    const char *path;
    size_t offset, size;
} text_column[] = {TEXT(host),     TEXT(kernel),    TEXT(cpus), TEXT(interfaces), TEXT(subcluster), TEXT(device),
                   TEXT(back_end), TEXT(libraries), TEXT(hapt), TEXT(mpi),        TEXT(hdf5),       TEXT(hwloc)};
/* clang-format off: tables */
#define NUMBER(name)                                                   \
    {                                                                  \
        "/environment/" #name, offsetof(struct hapt_environment, name) \
    }
/* clang-format on */
static const struct {
    const char *path;
    size_t offset;
} number_column[] = {NUMBER(pid), NUMBER(stage), NUMBER(threads)};
enum { TEXTS = sizeof text_column / sizeof *text_column, NUMBERS = sizeof number_column / sizeof *number_column };

/* Appends an item to a list if it fits completely. */
static void append(char *list, size_t size, const char *item)
{
    const size_t length = strlen(list), more = strlen(item) + (length > 0 ? 2 : 0);
    if (length + more + 1 <= size) snprintf(list + length, size - length, "%s%s", length > 0 ? ", " : "", item);
}

static void look_at_cpus(char *list, size_t size)
{
    cpu_set_t *set = CPU_ALLOC(MAX_CPUS);
    const size_t bytes = CPU_ALLOC_SIZE(MAX_CPUS);
    if (!set) return;
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set) == 0)
        for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
            char item[32];
            int last = cpu;
            if (!CPU_ISSET_S(cpu, bytes, set)) continue;
            while (last + 1 < MAX_CPUS && CPU_ISSET_S(last + 1, bytes, set)) last++;
            snprintf(item, sizeof item, last > cpu ? "%d-%d" : "%d", cpu, last);
            append(list, size, item);
            cpu = last;
        }
    CPU_FREE(set);
}

/* "10000 Mbit/s"; "": unknown. */
static void read_rate(const char *path, const char *unit, char *rate, size_t size)
{
    char line[64];
    rate[0] = '\0';
    if (hapt_first_line(path, line, sizeof line) && atof(line) > 0) snprintf(rate, size, " %.0f %s", atof(line), unit);
}

static void look_at_interfaces(char *list, size_t size)
{
    struct ifaddrs *first = NULL;
    if (getifaddrs(&first) != 0) first = NULL;
    for (const struct ifaddrs *at = first; at; at = at->ifa_next) {
        char address[INET6_ADDRSTRLEN], path[128], rate[32], item[128];
        if (!at->ifa_addr || at->ifa_addr->sa_family != AF_INET) continue;
        if (!(at->ifa_flags & IFF_UP) || at->ifa_flags & IFF_LOOPBACK) continue;
        const struct sockaddr_in *internet = (const struct sockaddr_in *)(const void *)at->ifa_addr;
        if (!inet_ntop(AF_INET, &internet->sin_addr, address, sizeof address)) continue;
        snprintf(path, sizeof path, "/sys/class/net/%.32s/speed", at->ifa_name);
        read_rate(path, "Mbit/s", rate, sizeof rate);
        snprintf(item, sizeof item, "%.32s %s%s", at->ifa_name, address, rate);
        append(list, size, item);
    }
    if (first) freeifaddrs(first);
    DIR *listing = opendir("/sys/class/infiniband");
    for (const struct dirent *entry; listing && (entry = readdir(listing));) {
        char path[128], rate[32], item[96];
        if (entry->d_name[0] == '.') continue;
        snprintf(path, sizeof path, "/sys/class/infiniband/%.32s/ports/1/rate", entry->d_name);
        read_rate(path, "Gbit/s", rate, sizeof rate);
        snprintf(item, sizeof item, "%.32s%s", entry->d_name, rate);
        append(list, size, item);
    }
    if (listing) closedir(listing);
}

void hapt_environment_collect(struct hapt_environment *environment)
{
    struct utsname system;
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length = 0;
    memset(environment, 0, sizeof *environment); /* it is sent as bytes */
    environment->pid = getpid();
    environment->stage = -1;
    gethostname(environment->host, sizeof environment->host - 1);
    if (uname(&system) == 0)
        snprintf(environment->kernel, sizeof environment->kernel, "%.40s %.50s", system.sysname, system.release);
    look_at_cpus(environment->cpus, sizeof environment->cpus);
    look_at_interfaces(environment->interfaces, sizeof environment->interfaces);
    MPI_Get_library_version(mpi, &length);
    snprintf(environment->mpi, sizeof environment->mpi, "%.*s", (int)strcspn(mpi, ",\n"), mpi);
    const char *hdf5 = strrchr(hapt_h5_library_version(), ' '); /* behind "HDF5 library version:" */
    snprintf(environment->hdf5, sizeof environment->hdf5, "%s", hdf5 ? hdf5 + 1 : hapt_h5_library_version());
    snprintf(environment->hwloc, sizeof environment->hwloc, "%s", hapt_host_library_version());
    snprintf(environment->hapt, sizeof environment->hapt, "%s", HAPT_VERSION);
}

enum hapt_status hapt_environment_gather(const struct hapt_env *env, const struct hapt_environment *mine,
                                         struct hapt_arena *arena, struct hapt_environment **result)
{
    struct hapt_environment *all = NULL;
    enum hapt_status status = HAPT_OK;
    if (env->world_rank == 0) {
        all = hapt_arena_alloc(arena, (size_t)env->world_size, sizeof *all);
        if (!all) status = HAPT_ERR_MEMORY;
    }
    HAPT_TRY(hapt_env_agree(env->world, status));
    const int bytes = (int)sizeof *mine;
    HAPT_MPI(MPI_Gather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, 0, env->world));
    *result = all;
    return HAPT_OK;
}

enum hapt_status hapt_environment_write(struct hapt_h5 *file, int64_t ranks, const struct hapt_environment *all)
{
    const char **text = malloc((size_t)ranks * sizeof *text);
    int64_t *number = malloc((size_t)ranks * sizeof *number);
    enum hapt_status status = HAPT_OK;
    if (!text || !number) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the environment's tables");
    for (int c = 0; c < TEXTS && status == HAPT_OK; c++) {
        for (int64_t r = 0; r < ranks; r++) text[r] = (const char *)&all[r] + text_column[c].offset;
        status = hapt_h5_write_strings(file, text_column[c].path, ranks, text);
    }
    for (int c = 0; c < NUMBERS && status == HAPT_OK; c++) {
        for (int64_t r = 0; r < ranks; r++)
            memcpy(&number[r], (const char *)&all[r] + number_column[c].offset, sizeof *number);
        status = hapt_h5_write(file, number_column[c].path, HAPT_H5_I64, 1, &ranks, number, "");
    }
    free(text);
    free(number);
    return status;
}

enum hapt_status hapt_environment_read(struct hapt_h5 *file, struct hapt_arena *arena, int64_t *ranks,
                                       struct hapt_environment **result)
{
    struct hapt_environment *all = NULL;
    int64_t count = 0;
    int dims = 0;
    *ranks = 0;
    *result = NULL;
    if (!hapt_h5_exists(file, number_column[0].path)) return HAPT_OK;
    int64_t shape[HAPT_H5_MAX_DIMS] = {0};
    HAPT_TRY(hapt_h5_shape(file, number_column[0].path, &dims, shape));
    if (dims != 1 || shape[0] < 1 || shape[0] > MOST_RANKS)
        return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: %s is not a table with one row per rank",
                         hapt_h5_path(file), number_column[0].path);
    count = shape[0];
    HAPT_NEW(all, arena, count);
    for (int c = 0; c < NUMBERS; c++) {
        void *number = NULL;
        HAPT_TRY(hapt_h5_read(file, number_column[c].path, HAPT_H5_I64, 1, &count, MOST_RANKS, arena, &number));
        for (int64_t r = 0; r < count; r++)
            memcpy((char *)&all[r] + number_column[c].offset, (const int64_t *)number + r, sizeof(int64_t));
    }
    for (int c = 0; c < TEXTS; c++) {
        int64_t rows = 0;
        const char **text = NULL;
        HAPT_TRY(hapt_h5_read_strings(file, text_column[c].path, MOST_RANKS, arena, &rows, &text));
        if (rows != count)
            return hapt_fail(HAPT_ERR_INPUT, "the file is damaged", "%s: %s has %lld entries, not %lld",
                             hapt_h5_path(file), text_column[c].path, (long long)rows, (long long)count);
        for (int64_t r = 0; r < count; r++)
            snprintf((char *)&all[r] + text_column[c].offset, text_column[c].size, "%s", text[r]);
    }
    *ranks = count;
    *result = all;
    return HAPT_OK;
}
