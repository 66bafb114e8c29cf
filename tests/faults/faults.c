/*
 * A library to preload. The n-th call of a kind on files under a folder fails or ends the process. All such calls can
 * be recorded.
 *
 *   FAULTS_UNDER   folder (absolute): only files under it are affected
 *   FAULTS_CALL    the kind of call.
 *                  On files under the folder: write (and pwrite), fsync, rename (and renameat2), ftruncate, close, open
 *                  (for writing), mkdir, unlink (and unlinkat), list (open a folder), look (open for reading), read
 *                  (and pread).
 *                  In the whole process and its children, from the first call on a file under the folder on: malloc
 *                  (and calloc, realloc, memalign), mmap, thread (pthread_create).
 *   FAULTS_AT      which call fails, from 1. Each process counts its own; the second group counts children as well.
 *   FAULTS_STICKY  1: all later calls fail as well
 *   FAULTS_PATH    only calls on files whose name matches this pattern
 *   FAULTS_ERROR   ENOSPC, EIO, EINVAL, EMFILE or ENOMEM. malloc, mmap and thread fail with their own error.
 *                  KILL: the process dies before the call.
 *   FAULTS_RANK    only this rank of an MPI job
 *   FAULTS_LOG     folder of records, one per process: the calls in order, and the bytes written
 *   FAULTS_COUNTS  file: the number of calls of each kind, "KIND N" per line, written when the process ends. `look` and
 *                  the kinds after it are counted only if FAULTS_READS is set.
 *   FAULTS_SHOW    file: where in the program a call of the second group failed
 *   FAULTS_STACKS  file: a hash of the call stack of each malloc, 64 bits each, in order of the calls
 */
#include <dlfcn.h>
#include <errno.h>
#include <execinfo.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { MOST_FILES = 1024, KINDS = 14, LOOK = 8, MALLOC = 10, MMAP = 11, THREAD = 12, MOST_STACKS = 1 << 18 };

static struct {
    pthread_mutex_t lock;
    pthread_once_t once;
    char under[4096];
    const char *call, *pattern, *log, *counts, *show;
    long at, done[KINDS];
    bool sticky, armed, deadly;
    int error;
    FILE *record, *data;
    long data_bytes;
    char *path[MOST_FILES]; /* of descriptors under the folder */
    char *read[MOST_FILES]; /* of descriptors that are only read */
    _Atomic bool began;     /* a file under the folder was opened */
    _Atomic long *made; /* [KINDS] kinds of the whole process: counted without a lock, and together with the children */
    uint64_t *stack;    /* [MOST_STACKS] of the mallocs; shared with the children and the file. Or NULL */
} faults = {.lock = PTHREAD_MUTEX_INITIALIZER, .once = PTHREAD_ONCE_INIT};

static const char *const kinds[] = {"write",  "fsync", "rename", "ftruncate", "close", "open",   "mkdir",
                                    "unlink", "look",  "read",   "malloc",    "mmap",  "thread", "list"};

static __thread bool inside; /* marks calls that this library itself makes */
/* The time at which the call began. Effects of the call in other processes are then later, even if this process is
 * delayed before it writes its record. */
static __thread struct timespec began;

#define CALLS(call)                                                                                                \
    call(open) call(open64) call(close) call(dup2) call(write) call(pwrite) call(pwrite64) call(ftruncate)         \
        call(ftruncate64) call(fsync) call(fdatasync) call(rename) call(mkdir) call(unlink) call(rmdir) call(read) \
            call(pread) call(pread64) call(pthread_create)

/* The real functions are looked up before any fork. A child of a launcher with threads must not wait for the loader's
 * lock, which another thread may have held. */
static struct {
#define MEMBER(name) __typeof__(&name) name;
    CALLS(MEMBER)
} real;

__attribute__((constructor)) static void find_calls(void)
{
#define FIND(name) real.name = (__typeof__(&name))dlsym(RTLD_NEXT, #name);
    CALLS(FIND)
}

/* Other libraries' constructors may run first. */
#define REAL(name) (real.name ? real.name : (__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* Maps the file of stacks. The first backtrace loads a library, so it is made here. */
static void record_stacks(const char *path)
{
    void *frame[1];
    const int file = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CREAT, 0666);
    const long bytes = MOST_STACKS * (long)sizeof *faults.stack;
    if (file < 0 || syscall(SYS_ftruncate, file, bytes) != 0) abort();
    faults.stack = (void *)syscall(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    backtrace(frame, 1);
}

static void set_up(void)
{
    const char *under = getenv("FAULTS_UNDER"), *at = getenv("FAULTS_AT"), *error = getenv("FAULTS_ERROR");
    const char *rank = getenv("FAULTS_RANK"), *mine = getenv("OMPI_COMM_WORLD_RANK");
    if (!under) return;
    snprintf(faults.under, sizeof faults.under, "%s/", under);
    faults.call = getenv("FAULTS_CALL");
    faults.pattern = getenv("FAULTS_PATH");
    faults.log = getenv("FAULTS_LOG");
    faults.counts = getenv("FAULTS_COUNTS");
    faults.show = getenv("FAULTS_SHOW");
    faults.at = at ? atol(at) : 0;
    faults.sticky = getenv("FAULTS_STICKY") != NULL;
    faults.made = (void *)syscall(SYS_mmap, NULL, KINDS * sizeof *faults.made, PROT_READ | PROT_WRITE,
                                  MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    faults.armed = !rank || !strcmp(rank, mine ? mine : "0");
    if (faults.armed && getenv("FAULTS_STACKS")) record_stacks(getenv("FAULTS_STACKS"));
    faults.deadly = error && !strcmp(error, "KILL");
    faults.error = !error || !strcmp(error, "ENOSPC") ? ENOSPC
                   : !strcmp(error, "EINVAL")         ? EINVAL
                   : !strcmp(error, "EMFILE")         ? EMFILE
                   : !strcmp(error, "ENOMEM")         ? ENOMEM
                                                      : EIO;
}

static bool ours(const char *path)
{
    pthread_once(&faults.once, set_up);
    return !inside && faults.under[0] && path && !strncmp(path, faults.under, strlen(faults.under));
}

static void show(void)
{
    void *frame[40];
    if (!faults.show) return;
    inside = true;
    const int file = REAL(open)(faults.show, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    if (file >= 0) {
        dprintf(file, "process %ld\n", (long)getpid());
        backtrace_symbols_fd(frame, backtrace(frame, 40), file);
        REAL(close)(file);
    }
    inside = false;
}

/* FNV-1a over the return addresses. */
static void note_stack(long at)
{
    void *frame[48];
    uint64_t hash = 14695981039346656037u;
    if (at >= MOST_STACKS) return;
    inside = true;
    const int depth = backtrace(frame, 48);
    inside = false;
    for (int f = 0; f < depth; f++) hash = (hash ^ (uint64_t)(uintptr_t)frame[f]) * 1099511628211u;
    faults.stack[at] = hash;
}

/* Counts a call of a kind that has no file. It runs before malloc, so it uses no locks and no memory. */
static bool fails_anywhere(int kind)
{
    if (inside || !atomic_load_explicit(&faults.began, memory_order_relaxed)) return false;
    const long done = atomic_fetch_add(&faults.made[kind], 1) + 1;
    if (faults.stack && kind == MALLOC) note_stack(done - 1);
    const bool now = faults.armed && faults.call && faults.at > 0 &&
                     (done == faults.at || (faults.sticky && done > faults.at)) && !strcmp(faults.call, kinds[kind]);
    if (now && faults.deadly) kill(getpid(), SIGKILL);
    if (now) show();
    if (now) errno = kind == THREAD ? EAGAIN : ENOMEM;
    return now;
}

static const char *path_of(int descriptor)
{
    pthread_once(&faults.once, set_up);
    return !inside && descriptor >= 0 && descriptor < MOST_FILES ? faults.path[descriptor] : NULL;
}

static void forget(int descriptor)
{
    if (descriptor < 0 || descriptor >= MOST_FILES) return;
    free(faults.path[descriptor]);
    free(faults.read[descriptor]);
    faults.path[descriptor] = faults.read[descriptor] = NULL;
}

static void remember(int descriptor, const char *path)
{
    forget(descriptor);
    if (descriptor >= 0 && descriptor < MOST_FILES) faults.path[descriptor] = strdup(path);
}

/* Counts a call on a file. Returns whether the call must fail. */
static bool fails(const char *call, const char *path)
{
    int kind = 0;
    clock_gettime(CLOCK_MONOTONIC, &began);
    if (faults.pattern && fnmatch(faults.pattern, path, 0) != 0) return false;
    pthread_mutex_lock(&faults.lock);
    while (strcmp(kinds[kind], call) != 0) kind++;
    const long done = ++faults.done[kind];
    pthread_mutex_unlock(&faults.lock);
    const bool now = faults.armed && faults.call && !strcmp(faults.call, call) && faults.at > 0 &&
                     (done == faults.at || (faults.sticky && done > faults.at));
    if (now && faults.deadly) kill(getpid(), SIGKILL);
    if (now) errno = faults.error;
    return now;
}

/* Writes "TIME CALL PATH [PATH2 | OFFSET BYTES PLACE]". PLACE is the offset in the file of data. */
static void note(const char *call, const char *path, const char *other, const void *data, int64_t offset, size_t bytes)
{
    char name[4200];
    const int saved = errno;
    if (!faults.log) return;
    pthread_mutex_lock(&faults.lock);
    inside = true;
    if (!faults.record) {
        snprintf(name, sizeof name, "%s/%ld.calls", faults.log, (long)getpid());
        faults.record = fopen(name, "w");
        snprintf(name, sizeof name, "%s/%ld.data", faults.log, (long)getpid());
        faults.data = fopen(name, "w");
    }
    if (faults.record && faults.data) {
        fprintf(faults.record, "%lld.%09ld\t%s\t%s", (long long)began.tv_sec, began.tv_nsec, call, path);
        if (other) fprintf(faults.record, "\t%s", other);
        if (!strcmp(call, "write")) {
            fprintf(faults.record, "\t%lld\t%zu\t%ld", (long long)offset, bytes, faults.data_bytes);
            fwrite(data, 1, bytes, faults.data);
            fflush(faults.data);
            faults.data_bytes += (long)bytes;
        }
        if (!strcmp(call, "ftruncate")) fprintf(faults.record, "\t%lld", (long long)offset);
        fputc('\n', faults.record);
        fflush(faults.record);
    }
    inside = false;
    pthread_mutex_unlock(&faults.lock);
    errno = saved;
}

__attribute__((destructor)) static void finish(void)
{
    pthread_once(&faults.once, set_up);
    if (!faults.counts || !faults.armed) return;
    inside = true;
    FILE *file = fopen(faults.counts, "a");
    for (int k = 0; file && k < (getenv("FAULTS_READS") ? KINDS : LOOK); k++)
        if (faults.done[k] + faults.made[k] > 0) fprintf(file, "%s %ld\n", kinds[k], faults.done[k] + faults.made[k]);
    if (file) fclose(file);
    inside = false;
}

/* ---- The calls ---- */

static int opened(const char *path, int flags, int descriptor)
{
    if (descriptor < 0 || !ours(path)) return descriptor;
    if (!(flags & (O_CREAT | O_WRONLY | O_RDWR | O_DIRECTORY))) {
        forget(descriptor);
        if (descriptor < MOST_FILES) faults.read[descriptor] = strdup(path);
        return descriptor;
    }
    remember(descriptor, path);
    if (flags & (O_CREAT | O_TRUNC)) note(flags & O_TRUNC ? "create" : "open", path, NULL, NULL, 0, 0);
    return descriptor;
}

/* The kind of an open: `open` for writing; `list` for a folder (to sync, list or empty it); else `look`. */
static const char *kind_of_open(int flags)
{
    return flags & O_DIRECTORY ? "list" : flags & (O_CREAT | O_WRONLY | O_RDWR) ? "open" : "look";
}

static bool may_not_open(const char *path, int flags)
{
    if (!ours(path)) return false;
    if (!faults.pattern || fnmatch(faults.pattern, path, 0) == 0)
        atomic_store_explicit(&faults.began, true, memory_order_relaxed);
    return fails(kind_of_open(flags), path);
}

#define OPEN(name)                                                                    \
    int name(const char *path, int flags, ...)                                        \
    {                                                                                 \
        va_list rest;                                                                 \
        va_start(rest, flags);                                                        \
        const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0; \
        va_end(rest);                                                                 \
        if (may_not_open(path, flags)) return -1;                                     \
        return opened(path, flags, REAL(name)(path, flags, mode));                    \
    }
int open(const char *path, int flags, ...);
int open64(const char *path, int flags, ...);
OPEN(open)
OPEN(open64)

int close(int descriptor)
{
    const char *path = path_of(descriptor);
    if (!path) {
        if (!inside) forget(descriptor);
        return REAL(close)(descriptor);
    }
    const bool failing = fails("close", path);
    forget(descriptor);
    const int result = REAL(close)(descriptor);
    if (!failing) return result;
    errno = faults.error;
    return -1;
}

int dup2(int from, int to)
{
    pthread_once(&faults.once, set_up);
    if (!inside) forget(to); /* hapt only redirects descriptors to /dev/null */
    return REAL(dup2)(from, to);
}

ssize_t write(int descriptor, const void *data, size_t bytes)
{
    const char *path = path_of(descriptor);
    if (!path) return REAL(write)(descriptor, data, bytes);
    if (fails("write", path)) return -1;
    const int64_t offset = lseek(descriptor, 0, SEEK_CUR);
    const ssize_t result = REAL(write)(descriptor, data, bytes);
    if (result > 0) note("write", path, NULL, data, offset, (size_t)result);
    return result;
}

#define PWRITE(name, type)                                                       \
    ssize_t name(int descriptor, const void *data, size_t bytes, type offset)    \
    {                                                                            \
        const char *path = path_of(descriptor);                                  \
        if (!path) return REAL(name)(descriptor, data, bytes, offset);           \
        if (fails("write", path)) return -1;                                     \
        const ssize_t result = REAL(name)(descriptor, data, bytes, offset);      \
        if (result > 0) note("write", path, NULL, data, offset, (size_t)result); \
        return result;                                                           \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

#define FTRUNCATE(name, type)                                                    \
    int name(int descriptor, type length)                                        \
    {                                                                            \
        const char *path = path_of(descriptor);                                  \
        if (path && fails("ftruncate", path)) return -1;                         \
        const int result = REAL(name)(descriptor, length);                       \
        if (path && result == 0) note("ftruncate", path, NULL, NULL, length, 0); \
        return result;                                                           \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define FSYNC(name)                                                     \
    int name(int descriptor)                                            \
    {                                                                   \
        const char *path = path_of(descriptor);                         \
        if (path && fails("fsync", path)) return -1;                    \
        const int result = REAL(name)(descriptor);                      \
        if (path && result == 0) note("fsync", path, NULL, NULL, 0, 0); \
        return result;                                                  \
    }
FSYNC(fsync)
FSYNC(fdatasync)

int rename(const char *from, const char *to)
{
    const bool mine = ours(from) || ours(to);
    if (mine && fails("rename", from)) return -1;
    const int result = REAL(rename)(from, to);
    if (mine && result == 0) note("rename", from, to, NULL, 0, 0);
    return result;
}

/* The path of a name in an open folder. */
static const char *path_in(int folder, const char *name, char path[8192])
{
    char link[64];
    if (name[0] == '/' || folder == AT_FDCWD) return name;
    snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    const ssize_t length = readlink(link, path, 4096);
    if (length <= 0) return name;
    snprintf(path + length, 8192 - (size_t)length, "/%s", name);
    return path;
}

int renameat2(int from_folder, const char *from_name, int to_folder, const char *to_name, unsigned flags)
{
    char from_path[8192], to_path[8192];
    const char *from = path_in(from_folder, from_name, from_path), *to = path_in(to_folder, to_name, to_path);
    const bool mine = ours(from) || ours(to);
    if (mine && fails("rename", from)) return -1;
    const int result = (int)syscall(SYS_renameat2, from_folder, from_name, to_folder, to_name, flags);
    if (mine && result == 0) note(flags & RENAME_EXCHANGE ? "exchange" : "rename", from, to, NULL, 0, 0);
    return result;
}

int openat(int folder, const char *name, int flags, ...)
{
    char buffer[8192];
    va_list rest;
    va_start(rest, flags);
    const mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    const char *path = path_in(folder, name, buffer);
    if (may_not_open(path, flags)) return -1;
    return opened(path, flags, (int)syscall(SYS_openat, folder, name, flags, mode));
}

int unlinkat(int folder, const char *name, int flags)
{
    char buffer[8192];
    const char *path = path_in(folder, name, buffer);
    const bool mine = ours(path);
    if (mine && !(flags & AT_REMOVEDIR) && fails("unlink", path)) return -1;
    const int result = (int)syscall(SYS_unlinkat, folder, name, flags);
    if (mine && result == 0) note(flags & AT_REMOVEDIR ? "rmdir" : "unlink", path, NULL, NULL, 0, 0);
    return result;
}

int mkdir(const char *path, mode_t mode)
{
    const bool mine = ours(path);
    if (mine && fails("mkdir", path)) return -1;
    const int result = REAL(mkdir)(path, mode);
    if (mine && result == 0) note("mkdir", path, NULL, NULL, 0, 0);
    return result;
}

int unlink(const char *path)
{
    const bool mine = ours(path);
    if (mine && fails("unlink", path)) return -1;
    const int result = REAL(unlink)(path);
    if (mine && result == 0) note("unlink", path, NULL, NULL, 0, 0);
    return result;
}

int rmdir(const char *path)
{
    clock_gettime(CLOCK_MONOTONIC, &began);
    const int result = REAL(rmdir)(path);
    if (ours(path) && result == 0) note("rmdir", path, NULL, NULL, 0, 0);
    return result;
}

/* ---- Reading ---- */

static bool may_not_read(int descriptor)
{
    pthread_once(&faults.once, set_up);
    return !inside && descriptor >= 0 && descriptor < MOST_FILES && faults.read[descriptor] &&
           fails("read", faults.read[descriptor]);
}

ssize_t read(int descriptor, void *data, size_t bytes)
{
    return may_not_read(descriptor) ? -1 : REAL(read)(descriptor, data, bytes);
}

ssize_t pread(int descriptor, void *data, size_t bytes, off_t offset)
{
    return may_not_read(descriptor) ? -1 : REAL(pread)(descriptor, data, bytes, offset);
}

ssize_t pread64(int descriptor, void *data, size_t bytes, off64_t offset)
{
    return may_not_read(descriptor) ? -1 : REAL(pread64)(descriptor, data, bytes, offset);
}

/* ---- Calls of the whole process ---- */

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* These run before malloc. */
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

void *malloc(size_t bytes)
{
    return fails_anywhere(MALLOC) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return fails_anywhere(MALLOC) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    return fails_anywhere(MALLOC) ? NULL : __libc_realloc(memory, bytes);
}

void *aligned_alloc(size_t alignment, size_t bytes)
{
    return fails_anywhere(MALLOC) ? NULL : __libc_memalign(alignment, bytes);
}

int posix_memalign(void **memory, size_t alignment, size_t bytes)
{
    if (fails_anywhere(MALLOC)) return ENOMEM;
    *memory = __libc_memalign(alignment, bytes);
    return *memory || bytes == 0 ? 0 : ENOMEM;
}

#endif

void *mmap(void *at, size_t bytes, int protection, int flags, int descriptor, off_t offset)
{
    return fails_anywhere(MMAP) ? MAP_FAILED
                                : (void *)syscall(SYS_mmap, at, bytes, protection, flags, descriptor, offset);
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*function)(void *), void *argument)
{
    return fails_anywhere(THREAD) ? EAGAIN : REAL(pthread_create)(thread, attributes, function, argument);
}
