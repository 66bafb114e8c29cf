/* The sandbox: whatever kills its child becomes an error. The sandbox process ends with its parent and keeps none of
 * the parent's descriptors. */
#include "hapt/sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "test.h"

static char folder[] = "/tmp/hapt-sandbox-XXXXXX";

/* Makes a file. Each file has its own modification time, so no result is cached for it. */
static const char *make_file(const char *name, const char *content)
{
    static char path[256];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    CHECK(file && fputs(content, file) >= 0 && fclose(file) == 0);
    return path;
}

static enum hapt_status check(const char *path)
{
    struct stat about;
    CHECK(stat(path, &about) == 0);
    return hapt_sandbox_check(path, &about);
}

/* Allocates without end, as for a damaged size. */
static void devour(void)
{
    enum { BLOCK = 1 << 26, MOST = 64 };
    for (int i = 0; i < MOST; i++) {
        char *block = malloc(BLOCK);
        if (!block) return;
        for (int at = 0; at < BLOCK; at += 4096) ((volatile char *)block)[at] = 1;
    }
    _exit(1);
}

/* Reserves memory without touching it. The block is released with the child. */
static bool reserve(size_t bytes)
{
    char *volatile block = calloc(1, bytes);
    if (!block) hapt_sandbox_note_system_error(ENOMEM);
    return block != NULL;
}

/* Behaves like a library that ignores a NULL from malloc. */
static void use_all(void)
{
    for (;;) *(volatile char *)malloc(1 << 14) = 1;
}

static void count_descriptors(void)
{
    char target[64] = "";
    DIR *listing = opendir("/proc/self/fd");
    for (struct dirent *entry; listing && (entry = readdir(listing));)
        if (atoi(entry->d_name) > 2 && atoi(entry->d_name) != dirfd(listing)) _exit(1);
    const ssize_t length = readlink("/proc/self/fd/1", target, sizeof target - 1);
    if (length < 0 || strcmp(target, "/dev/null")) _exit(1);
}

/* Does what the name of the file requests. */
static bool trial_read(const char *path)
{
    if (!path) return true;
    const char *name = strrchr(path, '/') + 1;
    if (!strcmp(name, "broken")) return false;
    if (!strcmp(name, "crash")) raise(SIGSEGV);
    if (!strcmp(name, "abort")) abort();
    if (!strcmp(name, "spin")) {
        setrlimit(RLIMIT_CPU, &(struct rlimit){1, 60});
        for (;;) {
        }
    }
    if (!strcmp(name, "sleep")) {
        alarm(1);
        for (;;) pause();
    }
    if (!strcmp(name, "devour")) devour();
    if (!strcmp(name, "killed")) raise(SIGKILL);
    if (!strcmp(name, "hungry")) return reserve(3 * ((size_t)1 << 29));
    if (!strcmp(name, "crashes-without")) use_all();
    if (!strcmp(name, "busy") || !strcmp(name, "odd")) {
        hapt_sandbox_note_system_error(!strcmp(name, "busy") ? EMFILE : EINVAL);
        return false;
    }
    if (!strcmp(name, "descriptors")) count_descriptors();
    if (!strcmp(name, "wait")) sleep(60);
    if (!strcmp(name, "count")) {
        FILE *file = fopen(path, "r+");
        if (!file || fseek(file, 0, SEEK_END) || fputc('+', file) < 0 || fclose(file)) _exit(1);
    }
    return true;
}

static void a_crash_becomes_an_error(void)
{
    CHECK_OK(check(make_file("good", "x")));
    CHECK_FAILS(check(make_file("crash", "x")), HAPT_ERR_INPUT);
    CHECK_FAILS(check(make_file("abort", "x")), HAPT_ERR_INPUT);
    CHECK_FAILS(check(make_file("broken", "x")), HAPT_ERR_INPUT);
    CHECK_OK(check(make_file("good", "y")));
}

static void what_never_ends_becomes_an_error(void)
{
    check(make_file("spin", "x"));
    CHECK(strstr(hapt_fail_message(), "does not finish"));
    hapt_fail_reset();
    CHECK_FAILS(check(make_file("sleep", "x")),
                HAPT_ERR_IO); /* it waits for the disk, which is no damage of the file */
}

static void memory_is_bounded(void)
{
#ifndef __SANITIZE_ADDRESS__
    CHECK_OK(check(make_file("devour", "x")));
#endif
}

/* A file so large that a valid one of its size may need more memory than the first child gets. */
static const char *make_large(const char *name)
{
    const char *path = make_file(name, "x");
    CHECK(truncate(path, 1 << 20) == 0);
    return path;
}

/* The message differs from that of damage, and the result is not cached. */
static void check_refused(const char *path, enum hapt_status status, const char *says)
{
    for (int i = 0; i < 2; i++) {
        CHECK(check(path) == status);
        CHECK_MESSAGE(strstr(hapt_fail_message(), says) && !strstr(hapt_fail_message(), "damaged"), "%s",
                      hapt_fail_message());
        hapt_fail_reset();
    }
}

static void no_memory_is_no_damage(void)
{
    check_refused(make_file("killed", "x"), HAPT_ERR_MEMORY, "memory ran out");
    check_refused(make_file("busy", "x"), HAPT_ERR_IO, "the system refuses");
    CHECK_FAILS(check(make_file("odd", "x")), HAPT_ERR_INPUT);
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
    check_refused(make_file("hungry", "x"), HAPT_ERR_MEMORY,
                  "memory ran out"); /* more memory than one byte can need: one child reads it */
    CHECK_OK(check(make_large("hungry")));
    /* The same files if this process may not have that much memory. */
    const pid_t process = fork();
    if (process == 0) {
        struct rlimit limit = {1 << 29, 1 << 29};
        hapt_sandbox_stop(); /* the parent's limit */
        setrlimit(RLIMIT_DATA, &limit);
        hapt_sandbox_start(NULL, trial_read);
        check_refused(make_large("hungry"), HAPT_ERR_MEMORY, "memory ran out");
        check_refused(make_large("crashes-without"), HAPT_ERR_MEMORY, "memory ran out");
        hapt_sandbox_stop();
        _exit(test_failures > 0);
    }
    int status;
    CHECK(waitpid(process, &status, 0) == process && WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

static void nothing_stays_open(void)
{
    int end[2];
    CHECK(pipe(end) == 0);
    CHECK_OK(check(make_file("descriptors", "x")));
    close(end[0]), close(end[1]);
}

static long size_of(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 ? (long)about.st_size : -1;
}

/* The child counts its calls itself. The modification time is restored, so that the file counts as unchanged. */
static void a_file_is_asked_for_once(void)
{
    struct stat before;
    const char *path = make_file("count", "");
    CHECK(stat(path, &before) == 0);
    for (int i = 0; i < 3; i++) CHECK_OK(hapt_sandbox_check(path, &before));
    CHECK(size_of(path) == 1);
    struct stat other = before; /* rewritten: another modification time */
    other.st_mtim.tv_nsec += 1;
    CHECK_OK(hapt_sandbox_check(path, &other));
    CHECK(size_of(path) == 2);
    path = make_file("count", "");
    hapt_sandbox_trust(path);
    CHECK_OK(check(path));
    CHECK(size_of(path) == 0);
}

/* Processes whose parent is `parent`. */
static int children_of(pid_t parent, pid_t *child)
{
    int count = 0;
    DIR *listing = opendir("/proc");
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char path[300];
        int its_parent = 0;
        char state = 0;
        snprintf(path, sizeof path, "/proc/%s/stat", entry->d_name);
        FILE *file = atoi(entry->d_name) > 0 ? fopen(path, "r") : NULL;
        if (file && fscanf(file, "%*d (%*[^)]) %c %d", &state, &its_parent) == 2 && its_parent == parent &&
            state != 'Z') {
            count++;
            *child = atoi(entry->d_name);
        }
        if (file) fclose(file);
    }
    if (listing) closedir(listing);
    return count;
}

static bool gone_soon(pid_t process)
{
    for (int i = 0; i < 300; i++) {
        char path[64], state = 'Z';
        snprintf(path, sizeof path, "/proc/%d/stat", (int)process);
        FILE *file = fopen(path, "r");
        if (!file) return true;
        const bool read = fscanf(file, "%*d (%*[^)]) %c", &state) == 1;
        fclose(file);
        if (!read || state == 'Z') return true; /* its new parent has not collected it yet */
        usleep(10000);
    }
    return false;
}

static void nobody_is_left_behind(void)
{
    const char *path = make_file("wait", "x");
    pid_t helper = 0, child = 0;
    const pid_t process = fork();
    if (process == 0) {
        hapt_sandbox_stop(); /* the parent's */
        hapt_sandbox_start(NULL, trial_read);
        check(path);
        _exit(0);
    }
    for (int i = 0; i < 500 && !(helper && child); i++) {
        usleep(10000);
        if (children_of(process, &helper) > 0) children_of(helper, &child);
    }
    CHECK(helper > 0 && child > 0);
    kill(helper, SIGTERM), kill(helper, SIGUSR1); /* as launchers send it, to the whole group */
    usleep(50000);
    CHECK(kill(helper, 0) == 0);
    kill(process, SIGKILL);
    CHECK(waitpid(process, NULL, 0) == process);
    CHECK(gone_soon(helper));
    CHECK(gone_soon(child));
}

static void a_killed_helper_is_done_without(void)
{
    pid_t helper = 0;
    CHECK(children_of(getpid(), &helper) == 1);
    kill(helper, SIGKILL);
    CHECK_OK(check(make_file("crash", "z")));
    hapt_sandbox_stop();
    CHECK(waitpid(-1, NULL, 0) < 0); /* no zombie */
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    CHECK(mkdtemp(folder) != NULL);
    hapt_sandbox_start(NULL, trial_read);
    RUN(a_crash_becomes_an_error);
    RUN(what_never_ends_becomes_an_error);
    RUN(memory_is_bounded);
    RUN(no_memory_is_no_damage);
    RUN(nothing_stays_open);
    RUN(a_file_is_asked_for_once);
    RUN(nobody_is_left_behind);
    RUN(a_killed_helper_is_done_without);
    char command[300];
    snprintf(command, sizeof command, "rm -r %s", folder);
    CHECK(system(command) == 0);
    return test_finish();
}
