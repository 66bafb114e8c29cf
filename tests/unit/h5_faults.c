/*
 * The n-th allocation, open or read fails while a file is read, for every n. The result must be the right values or a
 * failure of the system, never "damaged". The sandbox is tested as well: all processes share the counter. Each round
 * runs in its own process.
 */
#include "hapt/h5.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/sandbox.h"
#include "test.h"

enum { VALUES = 6, NAMES = 3 };
enum kind { ALLOCATION, READ, KINDS };

static struct shared {
    atomic_bool armed, sticky;
    atomic_int kind;
    atomic_long at, done;
} * faults;

static bool fails(enum kind kind)
{
    if (!faults || !faults->armed || (enum kind)faults->kind != kind) return false;
    const long now = ++faults->done;
    return now == faults->at || (faults->sticky && faults->at > 0 && now > faults->at);
}

#ifndef __SANITIZE_ADDRESS__
void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *memory, size_t bytes);

static void *none(void)
{
    errno = ENOMEM;
    return NULL;
}

void *malloc(size_t bytes)
{
    return fails(ALLOCATION) ? none() : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return fails(ALLOCATION) ? none() : __libc_calloc(count, bytes);
}

void *realloc(void *memory, size_t bytes)
{
    return fails(ALLOCATION) ? none() : __libc_realloc(memory, bytes);
}

ssize_t __pread64(int descriptor, void *to, size_t bytes, off64_t offset);

ssize_t pread(int descriptor, void *to, size_t bytes, off_t offset)
{
    if (!fails(READ)) return __pread64(descriptor, to, bytes, offset);
    errno = EIO;
    return -1;
}
#endif

static char folder[] = "/tmp/hapt-h5-faults-XXXXXX";
static char path[128];
static const char *const name[NAMES] = {"one", "two", "three"};

static void make_file(void)
{
    struct hapt_h5 *file;
    const double table[VALUES] = {1, 2, 3, 4, 5, 6};
    const int64_t shape[] = {2, 3};
    snprintf(path, sizeof path, "%s/file.h5", folder);
    CHECK_OK(hapt_h5_create(path, "hapt-test", 1, &file));
    CHECK_OK(hapt_h5_write(file, "/a/b/table", HAPT_H5_F64, 2, shape, table, "s"));
    CHECK_OK(hapt_h5_write_strings(file, "/names", NAMES, name));
    CHECK_OK(hapt_h5_write_attribute_real(file, "/a", "speed", 2.5, "m/s"));
    CHECK_OK(hapt_h5_write_attribute_text(file, "/a", "label", "text"));
    CHECK_OK(hapt_h5_commit(file));
}

static enum hapt_status read_content(struct hapt_h5 *file, struct hapt_arena *arena, bool *right)
{
    int64_t shape[] = {-1, -1}, count;
    double *table, speed;
    const char **text, *label, **member;
    HAPT_TRY(hapt_h5_read(file, "/a/b/table", HAPT_H5_F64, 2, shape, 100, arena, (void **)&table));
    HAPT_TRY(hapt_h5_read_strings(file, "/names", 10, arena, &count, &text));
    *right =
        shape[0] == 2 && shape[1] == 3 && table[0] == 1 && table[5] == 6 && count == NAMES && !strcmp(text[2], "three");
    HAPT_TRY(hapt_h5_list(file, "/", 10, arena, &count, &member));
    *right = *right && count == 2;
    /* Optional items are asked for first. A failed query must not look like an absent item. */
    if (hapt_h5_has_attribute(file, "/a", "label")) {
        HAPT_TRY(hapt_h5_read_attribute_text(file, "/a", "label", arena, &label));
        *right = *right && !strcmp(label, "text");
    }
    HAPT_TRY(hapt_h5_read_attribute_real(file, "/a", "speed", &speed));
    *right = *right && speed == 2.5;
    return HAPT_OK;
}

enum outcome { RIGHT, SYSTEM, DAMAGED, WRONG, CRASHED, OUTCOMES };

static enum outcome read_file(void)
{
    struct hapt_arena arena;
    struct hapt_h5 *file = NULL;
    bool right = false;
    hapt_arena_init(&arena);
    enum hapt_status status = hapt_h5_open(path, "hapt-test", 1, false, &file);
    if (status == HAPT_OK) {
        status = read_content(file, &arena, &right);
        hapt_h5_close(file);
    }
    hapt_arena_release(&arena);
    if (status == HAPT_OK) return right ? RIGHT : WRONG;
    return status != HAPT_ERR_INPUT && hapt_h5_last_fault() == HAPT_H5_FAULT_SYSTEM ? SYSTEM : DAMAGED;
}

/* The n-th call of `kind` fails. sticky: all later calls fail as well. */
static enum outcome round_of(enum kind kind, long at, bool sticky, bool guarded)
{
    int status;
    *faults = (struct shared){.kind = kind, .at = at, .sticky = sticky};
    const pid_t child = fork();
    if (child == 0) {
        if (guarded) hapt_sandbox_start(NULL, hapt_h5_trial_read);
        if (freopen("/dev/null", "w", stderr) == NULL) _exit(OUTCOMES); /* HDF5 prints complaints when it ends */
        faults->armed = true;
        const enum outcome outcome = read_file();
        faults->armed = false;
        if (guarded) hapt_sandbox_stop();
        if (outcome == DAMAGED)
            printf("%s call %ld%s%s: %s\n", kind == READ ? "read" : "allocation", at,
                   sticky ? " and all that follow" : "", guarded ? ", guarded" : "", hapt_fail_message());
        fflush(stdout);
        _exit(outcome);
    }
    CHECK(waitpid(child, &status, 0) == child);
    /* The C library ends a process with its own exit code if it has no memory to continue. */
    return WIFEXITED(status) && WEXITSTATUS(status) < CRASHED ? (enum outcome)WEXITSTATUS(status) : CRASHED;
}

static void every_call_fails_once(enum kind kind, bool sticky, bool guarded)
{
    int count[OUTCOMES] = {0};
    CHECK(round_of(kind, 0, false, guarded) == RIGHT);
    const long calls = faults->done, stride = test_long() || calls < 300 ? 1 : calls / 60;
    CHECK(calls > 3);
    for (long at = 1; at <= calls; at += stride) count[round_of(kind, at, sticky, guarded)]++;
    CHECK(count[SYSTEM] > 0); /* at least some calls failed */
    CHECK(count[DAMAGED] == 0);
    CHECK(count[WRONG] == 0);
    CHECK(count[CRASHED] == 0 || kind == ALLOCATION); /* HDF5 ignores the results of some of its calls */
}

static void failing_allocations_are_no_damage(void)
{
    every_call_fails_once(ALLOCATION, false, false);
    every_call_fails_once(ALLOCATION, true, false);
    every_call_fails_once(ALLOCATION, false, true);
    every_call_fails_once(ALLOCATION, true, true);
}

static void failing_reads_are_no_damage(void)
{
    every_call_fails_once(READ, false, false);
    every_call_fails_once(READ, true, false);
    every_call_fails_once(READ, false, true);
}

static void too_many_open_files_are_no_damage(void)
{
    struct hapt_h5 *file;
    struct rlimit before;
    const int free_one = open("/dev/null", O_RDONLY);
    CHECK(free_one > 2 && getrlimit(RLIMIT_NOFILE, &before) == 0 && close(free_one) == 0);
    CHECK(setrlimit(RLIMIT_NOFILE, &(struct rlimit){(rlim_t)free_one, before.rlim_max}) == 0);
    CHECK_FAILS(hapt_h5_open(path, "hapt-test", 1, false, &file), HAPT_ERR_IO);
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_SYSTEM);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK_OK(hapt_h5_open(path, "hapt-test", 1, false, &file));
    hapt_h5_close(file);
}

static void faults_are_told_apart(void)
{
    struct hapt_h5 *file;
    char other[160];
    snprintf(other, sizeof other, "%s/other.h5", folder);
    CHECK_FAILS(hapt_h5_open(other, "hapt-test", 1, false, &file), HAPT_ERR_INPUT);
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_MISSING);
    CHECK_FAILS(hapt_h5_open(path, "hapt-else", 1, false, &file), HAPT_ERR_INPUT);
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_FOREIGN);
    CHECK_FAILS(hapt_h5_open(path, "hapt-test", 0, false, &file), HAPT_ERR_INPUT);
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_NEWER);
    FILE *text = fopen(other, "w");
    CHECK(text && fputs("no HDF5", text) >= 0 && fclose(text) == 0);
    CHECK_FAILS(hapt_h5_open(other, "hapt-test", 1, false, &file), HAPT_ERR_INPUT);
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_DAMAGED);
    CHECK_OK(hapt_h5_open(path, "hapt-test", 1, false, &file));
    CHECK(hapt_h5_last_fault() == HAPT_H5_FAULT_NONE);
    hapt_h5_close(file);
    unlink(other);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    void *shared = mmap(NULL, sizeof *faults, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(shared != MAP_FAILED && mkdtemp(folder) != NULL);
    make_file();
    RUN(faults_are_told_apart);
#ifndef __SANITIZE_ADDRESS__
    faults = shared;
    RUN(failing_allocations_are_no_damage);
    RUN(failing_reads_are_no_damage);
#endif
    RUN(too_many_open_files_are_no_damage);
    unlink(path);
    rmdir(folder);
    return test_finish();
}
