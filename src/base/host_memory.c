/* Small files of the system; memory that this process may still allocate: limits of the machine, its cgroup and its
 * address space. */
#include <malloc.h>
#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "hapt/arena.h"
#include "hapt/env.h"

/* hapt_memory_keep */
enum {
    KEPT_BLOCK_BYTES = 32 << 20, /* glibc takes no larger limit */
    MOST_KEPT_BYTES = 1 << 30,
    TOP_PAD_BYTES = 16 << 20,
    GIVEN_BACK_BYTES = 128 << 10 /* glibc's own values */
};

/* The number after `key` at the start of a line; NaN if the file or the line is missing. */
static double value_of(const char *path, const char *key)
{
    FILE *file = fopen(path, "r");
    char line[256];
    double value = NAN;
    const size_t length = strlen(key);
    while (file && isnan(value) && fgets(line, sizeof line, file))
        if (!strncmp(line, key, length) && sscanf(line + length, "%lf", &value) != 1) value = NAN;
    if (file) fclose(file);
    return value;
}

bool hapt_first_line(const char *path, char *text, int size)
{
    FILE *file = fopen(path, "r");
    const bool found = file && fgets(text, size, file);
    if (!found) text[0] = '\0';
    text[strcspn(text, "\n")] = '\0';
    if (file) fclose(file);
    return found;
}

/* The page cache counts as used but can be reclaimed, so it is added. NaN without a limit. */
static double control_group(void)
{
    const double limit = value_of("/sys/fs/cgroup/memory.max", ""),
                 used = value_of("/sys/fs/cgroup/memory.current", "");
    const double active = value_of("/sys/fs/cgroup/memory.stat", "active_file ");
    const double inactive = value_of("/sys/fs/cgroup/memory.stat", "inactive_file ");
    return limit - used + (isnan(active) ? 0 : active) + (isnan(inactive) ? 0 : inactive);
}

static double address_space(void)
{
    struct rlimit limit;
    const double pages = value_of("/proc/self/statm", "");
    if (getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return NAN;
    return (double)limit.rlim_cur - pages * (double)sysconf(_SC_PAGESIZE);
}

double hapt_memory_available(void)
{
    const double bounds[] = {1024 *
                                 (value_of("/proc/meminfo", "MemAvailable:") + value_of("/proc/meminfo", "SwapFree:")),
                             control_group(), address_space()};
    double least = INFINITY;
    for (int i = 0; i < 3; i++)
        if (bounds[i] < least) least = bounds[i]; /* NaN: no limit */
    return least > 0 ? least : 0;
}

/* Any limit of mappings ends glibc's own, which grows with the blocks that are freed, up to the same 32 MiB. So the
 * limit stays, and only the heap is trimmed again. */
void hapt_memory_keep(bool keep)
{
    mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES);
    mallopt(M_TRIM_THRESHOLD, keep ? MOST_KEPT_BYTES : GIVEN_BACK_BYTES);
    mallopt(M_TOP_PAD, keep ? TOP_PAD_BYTES : GIVEN_BACK_BYTES);
    if (!keep) malloc_trim(0);
}
