/* The guard's helper process, and what is known of files by now. */
#include "hapt/guard.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/env.h"

enum verdict { UNKNOWN, CHECKING, GOOD, BROKEN, CRASHES, HANGS, LACKING, STALLS };

enum {
    MOST_CPU_S = 20,     /* a rehearsal reads at most 256 MiB: a second or two */
    MOST_WALL_S = 300,   /* a file system that does not answer would stop this process as well */
    MOST_BYTES = 1 << 30,
    PROBE_BYTES = 1 << 26,
    MOST_PATH = 4096,
    KNOWN_FILES = 1024,
    VERDICT_BITS = 3, /* of enum verdict */
    BROKEN_CODE = 3, LACKING_CODE = 4, /* of the child that came to an end */
    WILD_BYTE = 0x69, /* glibc fills new memory with its complement */
};

static struct {
    pthread_mutex_t lock; /* one question at a time */
    pid_t helper;
    int socket, batch, most_cpu_s;
    uint64_t good[KNOWN_FILES];      /* keys of files that this process may open */
    _Atomic uint64_t *node;          /* [KNOWN_FILES] key and verdict, common to the ranks of the node; NULL: none */
} guard = {.lock = PTHREAD_MUTEX_INITIALIZER, .socket = -1, .most_cpu_s = MOST_CPU_S};

/* ---- The helper ---- */

/* Whatever the launcher gave to the process (its pipes above all) must not stay open here: it waits for their end. */
static void close_all_but(int kept)
{
    DIR *listing = opendir("/proc/self/fd");
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        const int descriptor = atoi(entry->d_name);
        if (descriptor > 2 && descriptor != kept && descriptor != dirfd(listing)) close(descriptor);
    }
    if (listing) closedir(listing);
    const int nowhere = open("/dev/null", O_RDWR);
    for (int standard = 0; standard <= 2; standard++) nowhere < 0 ? close(standard) : dup2(nowhere, standard);
    if (nowhere > 2) close(nowhere);
}

/* Ends with the process that started it. */
static void live_under(pid_t parent)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(0);
}

static void limit(int resource, rlim_t most)
{
    struct rlimit now;
    if (getrlimit(resource, &now)) return;
    now.rlim_cur = most < now.rlim_max ? most : now.rlim_max;
    setrlimit(resource, &now);
}

static void limit_memory(void)
{
#ifndef __SANITIZE_ADDRESS__ /* whose shadow is larger than any limit */
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*u %*u %*u %*u %*u %lu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    limit(RLIMIT_DATA, (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE) + MOST_BYTES);
#endif
}

/* Allocations that fail lead the library into crashes as well: errno tells them from what the file does. */
static void leave_crashing(int signal_number)
{
    if (errno == ENOMEM) _exit(LACKING_CODE);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void limit_child(pid_t parent)
{
    live_under(parent);
    /* Over some damaged files the HDF5 library takes sizes and addresses out of memory that it never wrote. Here they are wild ones. */
    mallopt(M_PERTURB, WILD_BYTE);
    limit(RLIMIT_CORE, 0);
    limit_memory();
    static const int deadly[] = {SIGXCPU, SIGALRM, SIGFPE, SIGILL}, crashing[] = {SIGSEGV, SIGBUS, SIGABRT};
    for (size_t i = 0; i < sizeof deadly / sizeof *deadly; i++) signal(deadly[i], SIG_DFL); /* whatever libraries do there otherwise */
    for (size_t i = 0; i < sizeof crashing / sizeof *crashing; i++) signal(crashing[i], leave_crashing);
}

static void limit_time(void)
{
    struct rusage used = {0};
    getrusage(RUSAGE_SELF, &used);
    limit(RLIMIT_CPU, (rlim_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (rlim_t)guard.most_cpu_s);
    alarm(MOST_WALL_S);
}

_Noreturn static void rehearse_alone(const char *path, pid_t parent, hapt_guard_rehearsal *rehearse)
{
    limit_child(parent);
    limit_time();
    errno = 0;
    const enum hapt_guard_finding finding = rehearse(path);
    _exit(finding == HAPT_GUARD_GOOD ? 0 : finding == HAPT_GUARD_LACKING ? LACKING_CODE : BROKEN_CODE);
}

/* Of a child that ended. */
static enum verdict verdict_of(int status)
{
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
    if (code >= 0) return code == 0 ? GOOD : code == BROKEN_CODE ? BROKEN : code == LACKING_CODE ? LACKING : CRASHES;
    switch (WTERMSIG(status)) {
    case SIGXCPU: return HANGS;
    case SIGALRM: return STALLS;
    case SIGKILL: return LACKING; /* the system's, for want of memory */
    default: return CRASHES;
    }
}

static enum verdict judge_once(const char *path, int from, hapt_guard_rehearsal *rehearse)
{
    const pid_t self = getpid(), child = fork();
    if (child < 0) return UNKNOWN;
    if (child == 0) {
        close(from);
        rehearse_alone(path, self, rehearse);
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return UNKNOWN;
    return verdict_of(status);
}

/* Memory that ran out for a moment, or is short now, leads the library astray as damage does. */
static enum verdict judge(const char *path, int from, hapt_guard_rehearsal *rehearse)
{
    const enum verdict verdict = judge_once(path, from, rehearse);
    if (verdict != BROKEN && verdict != CRASHES) return verdict;
    void *volatile probe = malloc(PROBE_BYTES);
    free(probe);
    return probe ? judge_once(path, from, rehearse) : LACKING;
}

/* A child that reads one file after another (hapt_guard_batch). */
static struct {
    pid_t pid; /* 0: none */
    int socket, files;
} reader;

_Noreturn static void rehearse_many(int socket, pid_t parent, hapt_guard_rehearsal *rehearse)
{
    char path[MOST_PATH + 1];
    limit_child(parent);
    for (ssize_t bytes; (bytes = recv(socket, path, MOST_PATH, 0)) > 0;) {
        path[bytes] = '\0';
        limit_time();
        errno = 0;
        const enum hapt_guard_finding finding = rehearse(path);
        const enum verdict verdict = finding == HAPT_GUARD_GOOD ? GOOD : finding == HAPT_GUARD_LACKING ? LACKING : BROKEN;
        if (send(socket, &verdict, sizeof verdict, MSG_NOSIGNAL) < 0) break;
    }
    _exit(0);
}

/* What it ended with. */
static int end_reader(void)
{
    int status = 0;
    close(reader.socket);
    while (waitpid(reader.pid, &status, 0) < 0 && errno == EINTR) {}
    reader.pid = 0;
    return status;
}

static void start_reader(int from, hapt_guard_rehearsal *rehearse)
{
    int end[2];
    const pid_t self = getpid();
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, end)) return;
    reader.pid = fork();
    if (reader.pid == 0) {
        close(from);
        close(end[0]);
        rehearse_many(end[1], self, rehearse);
    }
    close(end[1]);
    reader.socket = end[0];
    reader.files = 0;
    if (reader.pid > 0) return;
    close(end[0]);
    reader.pid = 0;
}

/* What the reader dies of is read again by a child of its own: files before it may have led to that. */
static enum verdict judge_in_batch(const char *path, int from, hapt_guard_rehearsal *rehearse)
{
    enum verdict verdict = UNKNOWN;
    if (reader.pid == 0) start_reader(from, rehearse);
    if (reader.pid > 0 && send(reader.socket, path, strlen(path), MSG_NOSIGNAL) > 0) recv(reader.socket, &verdict, sizeof verdict, 0);
    if (verdict == UNKNOWN) {
        if (reader.pid > 0 && verdict_of(end_reader()) == HANGS) return HANGS;
        return judge(path, from, rehearse);
    }
    if (++reader.files == guard.batch) end_reader();
    return verdict;
}

static void take_name(char **argv)
{
    static const char name[] = "hapt-guard";
    prctl(PR_SET_NAME, name);
    if (!argv || !argv[0]) return;
    char *end = argv[0] + strlen(argv[0]) + 1; /* the arguments lie one behind the other */
    for (int i = 1; argv[i] && argv[i] == end; i++) end += strlen(argv[i]) + 1;
    const size_t room = (size_t)(end - argv[0]);
    memset(argv[0], 0, room);
    memcpy(argv[0], name, room > sizeof name ? sizeof name - 1 : room - 1);
}

_Noreturn static void help(int socket, pid_t parent, char **argv, hapt_guard_rehearsal *rehearse)
{
    static const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGALRM, SIGXCPU};
    char path[MOST_PATH + 1];
    live_under(parent);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    signal(SIGCHLD, SIG_DFL);
    close_all_but(socket);
    take_name(argv);
    bool prepared = false;
    for (;;) {
        const ssize_t bytes = recv(socket, path, MOST_PATH, 0);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes <= 0) _exit(0);
        path[bytes] = '\0';
        if (!prepared) prepared = rehearse(NULL) == HAPT_GUARD_GOOD; /* what all children need is done once */
        const enum verdict verdict = guard.batch > 1 ? judge_in_batch(path, socket, rehearse) : judge(path, socket, rehearse);
        if (send(socket, &verdict, sizeof verdict, MSG_NOSIGNAL) < 0) _exit(0);
    }
}

void hapt_guard_batch(int files, int most_cpu_s)
{
    guard.batch = files;
    guard.most_cpu_s = most_cpu_s;
}

void hapt_guard_start(char **argv, hapt_guard_rehearsal *rehearse)
{
    int end[2];
    HAPT_ASSERT(guard.socket < 0);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, end)) return;
    const pid_t self = getpid();
    guard.helper = fork();
    if (guard.helper == 0) {
        close(end[0]);
        help(end[1], self, argv, rehearse);
    }
    close(end[1]);
    if (guard.helper > 0)
        guard.socket = end[0];
    else
        close(end[0]);
}

void hapt_guard_stop(void)
{
    pthread_mutex_lock(&guard.lock);
    if (guard.socket >= 0) {
        close(guard.socket);
        guard.socket = -1;
        while (waitpid(guard.helper, NULL, 0) < 0 && errno == EINTR) {}
    }
    pthread_mutex_unlock(&guard.lock);
}

/* ---- Asking ---- */

static enum verdict ask(const char *path)
{
    enum verdict verdict = UNKNOWN;
    const size_t length = strlen(path);
    ssize_t bytes;
    if (guard.socket < 0 || length == 0 || length > MOST_PATH) return UNKNOWN;
    while ((bytes = send(guard.socket, path, length, MSG_NOSIGNAL)) < 0 && errno == EINTR) {}
    if (bytes < 0) return UNKNOWN;
    while ((bytes = recv(guard.socket, &verdict, sizeof verdict, 0)) < 0 && errno == EINTR) {}
    return bytes == (ssize_t)sizeof verdict ? verdict : UNKNOWN;
}

/* What tells files apart, a renamed one from itself not; never 0. The lowest bits make room for a verdict. */
static uint64_t key_of(const struct stat *about)
{
    const uint64_t facts[] = {(uint64_t)about->st_dev, (uint64_t)about->st_ino, (uint64_t)about->st_size,
                              (uint64_t)about->st_mtim.tv_sec, (uint64_t)about->st_mtim.tv_nsec};
    return (hapt_hash(1, facts, sizeof facts) | 1) << VERDICT_BITS;
}

static size_t slot_of(uint64_t key)
{
    return (size_t)(key >> 32) % KNOWN_FILES;
}

/* What the file itself explains. */
static bool is_lasting(enum verdict verdict)
{
    return verdict == GOOD || verdict == BROKEN || verdict == CRASHES || verdict == HANGS;
}

/* One rank of the node asks, the others wait for its answer. Another file may take the slot at any time: then this one is asked
 * for again. */
static enum verdict ask_together(const char *path, uint64_t key)
{
    _Atomic uint64_t *slot = &guard.node[slot_of(key)];
    const double start_s = hapt_time_s();
    uint64_t found = atomic_load(slot);
    for (;;) {
        if (found >> VERDICT_BITS << VERDICT_BITS != key) {
            if (!atomic_compare_exchange_strong(slot, &found, key | CHECKING)) continue;
            const enum verdict verdict = ask(path);
            uint64_t mine = key | CHECKING;
            atomic_compare_exchange_strong(slot, &mine, is_lasting(verdict) ? key | verdict : 0);
            return verdict;
        }
        const enum verdict verdict = (enum verdict)(found - key);
        if (verdict != CHECKING) return verdict;
        if (hapt_time_s() - start_s > MOST_WALL_S) return ask(path);
        hapt_time_sleep_until(hapt_time_s() + 5e-4);
        found = atomic_load(slot);
    }
}

enum hapt_status hapt_guard_check(const char *path, const struct stat *about)
{
    const uint64_t key = key_of(about);
    enum verdict verdict = GOOD;
    pthread_mutex_lock(&guard.lock);
    if (guard.socket >= 0 && guard.good[slot_of(key)] != key) {
        verdict = guard.node ? ask_together(path, key) : ask(path);
        if (verdict == GOOD) guard.good[slot_of(key)] = key;
    }
    pthread_mutex_unlock(&guard.lock);
    if (verdict == GOOD || verdict == UNKNOWN) return HAPT_OK;
    if (verdict == LACKING)
        return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory, or raise the limit on open files",
                         "memory or open files ran out while a process looked through %s", path);
    if (verdict == STALLS)
        return hapt_fail(HAPT_ERR_IO, "check the file system; the file may be fine", "reading %s took longer than %d s", path, MOST_WALL_S);
    return hapt_fail(HAPT_ERR_INPUT, "take another copy or make it again",
                     verdict == HANGS    ? "%s is damaged: the HDF5 library does not come to an end over it"
                     : verdict == BROKEN ? "%s is damaged: what it holds cannot be listed"
                                         : "%s is damaged: the HDF5 library crashes over it",
                     path);
}

void hapt_guard_trust(const char *path)
{
    struct stat about;
    if (guard.socket < 0 || stat(path, &about)) return;
    const uint64_t key = key_of(&about);
    pthread_mutex_lock(&guard.lock);
    guard.good[slot_of(key)] = key;
    pthread_mutex_unlock(&guard.lock);
}

static void forget_node(void)
{
    guard.node = NULL;
}

void hapt_guard_share(const struct hapt_env *env)
{
    struct hapt_shared *shared;
    if (env->node_size == 1) return;
    enum hapt_status status = hapt_shared_create(env, KNOWN_FILES * sizeof *guard.node, &shared);
    if (status == HAPT_OK) {
        if (env->node_rank == 0) memset(hapt_shared_memory(shared), 0, KNOWN_FILES * sizeof *guard.node);
        status = hapt_shared_publish(shared);
    }
    if (status != HAPT_OK) { /* then each rank asks for itself */
        hapt_fail_reset();
        return;
    }
    guard.node = hapt_shared_memory(shared);
    hapt_env_at_release(forget_node);
}
