/*
 * Finds out whether the content or the system caused a failed read. HDF5's return values do not show this. System
 * failures are noted at their source: in the file driver (h5_disk.c), which sees errno, and in an HDF5 error callback,
 * which sees failed allocations.
 *
 * A damaged size can ask for more memory than exists. In files written by hapt, checksums cover every size, so a
 * failed allocation is a system failure. In older formats it counts as one only if a small allocation fails as well.
 */
#include "h5_private.h"

#include <errno.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PROBE_BYTES = 1 << 26 };

static pthread_mutex_t library = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static int depth;              /* nesting of functions that hold the lock */
static int noted;              /* errno of the first system failure inside the outermost of them; 0: none */
static bool allocation_failed; /* in this process: HDF5's state may be inconsistent, so later calls may fail */
static _Thread_local enum hapt_h5_fault last;

enum hapt_h5_fault hapt_h5_last_fault(void)
{
    return last;
}

void hapt_h5_set_fault(enum hapt_h5_fault fault)
{
    last = fault;
}

int *hapt_h5_noted(void)
{
    return &noted;
}

/* errno is still set by malloc; HDF5's own record can be too coarse. */
static herr_t find_allocation(unsigned place, const H5E_error2_t *error, void *context)
{
    (void)place;
    bool *found = context;
    *found = *found ||
             (error->maj_num == H5E_RESOURCE && (error->min_num == H5E_NOSPACE || error->min_num == H5E_CANTALLOC));
    return 0;
}

static herr_t note_failure(hid_t stack, void *context)
{
    (void)context;
    bool memory = errno == ENOMEM;
    if (!memory) H5Ewalk2(stack, H5E_WALK_DOWNWARD, find_allocation, &memory);
    allocation_failed = allocation_failed || memory;
    if (memory && noted == 0) noted = ENOMEM;
    return 0;
}

bool hapt_h5_iterated(herr_t result)
{
    if (result < 0) note_failure(H5E_DEFAULT, NULL);
    return result >= 0;
}

/* Installs the error callback; without one, HDF5 prints its error stack. At exit there must be no callback, or it would
 * report HDF5's own leaks. */
struct hapt_h5_held hapt_h5_lock(void)
{
    pthread_mutex_lock(&library);
    if (depth++ == 0) {
        H5Eset_auto2(H5E_DEFAULT, note_failure, NULL);
        noted = errno = 0;
    }
    return (struct hapt_h5_held){0};
}

void hapt_h5_unlock(struct hapt_h5_held *held)
{
    (void)held;
    if (--depth == 0) H5Eset_auto2(H5E_DEFAULT, NULL, NULL);
    pthread_mutex_unlock(&library);
}

static bool memory_is_short(void)
{
    void *volatile probe = malloc(PROBE_BYTES);
    free(probe);
    return probe == NULL;
}

int hapt_h5_system_error(const struct hapt_h5 *file)
{
    const int found = noted ? noted : file && !file->writing ? file->error : 0;
    const int error = found ? found : allocation_failed ? ENOMEM : 0;
    if (error == ENOMEM && !memory_is_short() && !(file && file->checked_sizes)) return 0;
    return error;
}

bool hapt_h5_is_system_error(int error)
{
    return error != 0 && error != ENOENT && error != ENOTDIR && error != EISDIR && error != ELOOP &&
           error != ENAMETOOLONG && error != ENXIO;
}

enum hapt_status hapt_h5_fail_system(const char *path, int error)
{
    last = HAPT_H5_FAULT_SYSTEM;
    if (error == ENOMEM) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory ran out while %s was read", path);
    if (error == EMFILE || error == ENFILE)
        return hapt_fail(HAPT_ERR_IO, "raise the limit on open files (ulimit -n)", "cannot read %s: %s", path,
                         strerror(error));
    return hapt_fail(HAPT_ERR_IO, "the file may be fine: check the disk and the file system", "cannot read %s: %s",
                     path, strerror(error));
}

enum hapt_status hapt_h5_fail_content(const struct hapt_h5 *file, const char *hint, const char *format, ...)
{
    char message[1024];
    va_list arguments;
    const int error = hapt_h5_system_error(file);
    if (error) return hapt_h5_fail_system(file->path, error);
    va_start(arguments, format);
    vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    last = HAPT_H5_FAULT_DAMAGED;
    return hapt_fail(HAPT_ERR_INPUT, hint, "%s", message);
}
