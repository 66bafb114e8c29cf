/* The sandbox's helper process, and the cache of verdicts about files. */
#include "hapt/sandbox.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "hapt/arena.h"
#include "hapt/env.h"

enum verdict { UNKNOWN, CHECKING, GOOD, BROKEN, CRASHES, HANGS, NO_MEMORY, REFUSED };

enum {
    MAX_CPU_S = 20,   /* a trial read takes at most 256 MiB: one or two seconds */
    MAX_WALL_S = 300, /* a file system that does not answer would block this process as well */
    MAX_BYTES = 1 << 30,
    MAX_EXPANSION = 2 * 1032, /* deflate expands by at most 1032, and the library may hold the chunk twice */
    LIBRARY_BYTES = 1 << 26,  /* for everything except the data */
    PROBE_BYTES = 1 << 16,    /* the library's largest request besides data; more than the heap has free */
    STACK_BYTES = 1 << 16,
    MAX_PATH = 4096,
    LOOK_MS = 200, /* interval of checks whether the helper is stopped */
    MAX_STOPPED_S = 2,
    KNOWN_FILES = 1024,
    VERDICT_BITS = 3,
    BROKEN_CODE = 3,  /* exit code of a child that finished */
    WILD_BYTE = 0x69, /* glibc fills new memory with its complement */
};

static struct {
    pthread_mutex_t lock; /* one request at a time */
    pid_t helper;
    int socket;
    uint64_t good[KNOWN_FILES]; /* keys of files that this process may open */
    _Atomic uint64_t *node;     /* [KNOWN_FILES] key and verdict, shared by the ranks of the node; NULL: not shared */
    _Atomic int *system_error;  /* errno that the system returned to the child, shared with it; NULL: unknown */
} sandbox = {.lock = PTHREAD_MUTEX_INITIALIZER, .socket = -1};

/* ---- The helper ---- */

/* Closes all inherited descriptors: the launcher waits until its pipes are closed. */
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

/* Makes this process end with the process that started it. */
static void end_with_parent(pid_t parent)
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

#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__
/* Memory in use, as counted for RLIMIT_DATA. */
static rlim_t data_bytes(void)
{
    unsigned long pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%*u %*u %*u %*u %*u %lu", &pages) != 1) pages = 0;
    if (file) fclose(file);
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static void limit_memory(rlim_t most)
{
    limit(RLIMIT_DATA, data_bytes() + most);
}
#else
static void limit_memory(rlim_t most)
{
    (void)most; /* shadow memory exceeds any limit */
}
#endif

/* If the host runs out of memory, the kernel kills this process before a rank. */
static void prefer_oom_kill(void)
{
    const int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file < 0) return;
    if (write(file, "1000", 4) < 0) {
    } /* then the kernel chooses as usual */
    close(file);
}

void hapt_sandbox_note_system_error(int error)
{
    /* A damaged file can cause other errors, for example EINVAL by an impossible offset. */
    static const int known[] = {ENOMEM, EMFILE,    ENFILE, EIO,   EAGAIN, ETIMEDOUT,
                                ESTALE, EREMOTEIO, ENODEV, ENXIO, EACCES};
    int none = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known && sandbox.system_error; i++)
        if (error == known[i]) atomic_compare_exchange_strong(sandbox.system_error, &none, error);
}

/* The library may crash after a failed malloc, which is not the fault of the file. */
static void handle_crash(int number)
{
    const bool refused = errno == ENOMEM; /* a single or a large request failed; memory may be available again */
    void *volatile block = refused ? NULL : malloc(PROBE_BYTES);
    if (!block) hapt_sandbox_note_system_error(ENOMEM);
    raise(number); /* the default action is restored: it ends the process */
}

static void catch_crashes(void)
{
    static const int deadly[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static char stack[STACK_BYTES];
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    struct sigaction action = {.sa_handler = handle_crash, .sa_flags = SA_RESETHAND | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof deadly / sizeof *deadly; i++) sigaction(deadly[i], &action, NULL);
}

_Noreturn static void read_alone(const char *path, pid_t parent, rlim_t max_bytes, hapt_sandbox_reader *trial_read)
{
    end_with_parent(parent);
    /* On some damaged files HDF5 uses uninitialized memory as sizes and addresses. This fills memory with
     * invalid values, so that it fails reliably. */
    mallopt(M_PERTURB, WILD_BYTE);
    limit(RLIMIT_CORE, 0);
    limit_memory(max_bytes);
    prefer_oom_kill();
    /* The program or its libraries may have set handlers. */
    signal(SIGXCPU, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    catch_crashes();
    limit(RLIMIT_CPU, MAX_CPU_S);
    alarm(MAX_WALL_S);
    _exit(trial_read(path) ? 0 : BROKEN_CODE);
}

/* The verdict on a child that ended. A system error explains any other failure. */
static enum verdict verdict_of(int status)
{
    const int system_error = sandbox.system_error ? atomic_load(sandbox.system_error) : 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return GOOD;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) return HANGS;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        return REFUSED; /* it waited for the disk: not the fault of the file */
    if (system_error == ENOMEM || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
        return NO_MEMORY; /* SIGKILL: from the OOM killer */
    if (system_error != 0) return REFUSED;
    return WIFEXITED(status) && WEXITSTATUS(status) == BROKEN_CODE ? BROKEN : CRASHES;
}

static enum verdict judge_within(const char *path, int from, rlim_t max_bytes, hapt_sandbox_reader *trial_read)
{
    if (sandbox.system_error) atomic_store(sandbox.system_error, 0);
    const pid_t self = getpid(), child = fork();
    if (child < 0) return UNKNOWN;
    if (child == 0) {
        close(from);
        read_alone(path, self, max_bytes, trial_read);
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return UNKNOWN;
    return verdict_of(status);
}

/* Maximum memory that an intact file of that size needs. */
static rlim_t max_needed(const char *path)
{
    struct stat about;
    return LIBRARY_BYTES + (stat(path, &about) ? 0 : (rlim_t)about.st_size * MAX_EXPANSION);
}

/* The first child gets as much memory as nearly every file needs. If that is not enough for a larger file, a second
 * child gets up to the memory that the host has left. */
static enum verdict judge(const char *path, int from, hapt_sandbox_reader *trial_read)
{
    const double left = hapt_memory_available();
    const rlim_t needed = max_needed(path);
    const enum verdict verdict = judge_within(path, from, MAX_BYTES, trial_read);
    /* Damage must be confirmed by a second child, because one failed system call also confuses the library. */
    if (verdict == BROKEN || verdict == CRASHES) return judge_within(path, from, MAX_BYTES, trial_read);
    if (verdict != NO_MEMORY || needed <= MAX_BYTES || left <= MAX_BYTES) return verdict;
    return judge_within(path, from, (double)needed < left ? needed : (rlim_t)left, trial_read);
}

static void set_process_name(char **argv)
{
    static const char name[] = "hapt-sandbox";
    prctl(PR_SET_NAME, name);
    if (!argv || !argv[0]) return;
    char *end = argv[0] + strlen(argv[0]) + 1; /* the arguments are contiguous in memory */
    for (int i = 1; argv[i] && argv[i] == end; i++) end += strlen(argv[i]) + 1;
    const size_t room = (size_t)(end - argv[0]);
    memset(argv[0], 0, room);
    memcpy(argv[0], name, room > sizeof name ? sizeof name - 1 : room - 1);
}

_Noreturn static void help(int socket, pid_t parent, char **argv, hapt_sandbox_reader *trial_read)
{
    static const int ignored[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGPIPE, SIGALRM, SIGXCPU};
    char path[MAX_PATH + 1];
    end_with_parent(parent);
    for (size_t i = 0; i < sizeof ignored / sizeof *ignored; i++) signal(ignored[i], SIG_IGN);
    signal(SIGCHLD, SIG_DFL);
    close_all_but(socket);
    set_process_name(argv);
    void *shared = mmap(NULL, sizeof *sandbox.system_error, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    sandbox.system_error = shared == MAP_FAILED ? NULL : shared;
    bool prepared = false;
    for (;;) {
        const ssize_t bytes = recv(socket, path, MAX_PATH, 0);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes <= 0) _exit(0);
        path[bytes] = '\0';
        if (!prepared) prepared = trial_read(NULL); /* initialization that all children share */
        const enum verdict verdict = judge(path, socket, trial_read);
        if (send(socket, &verdict, sizeof verdict, MSG_NOSIGNAL) < 0) _exit(0);
    }
}

void hapt_sandbox_start(char **argv, hapt_sandbox_reader *trial_read)
{
    int end[2];
    HAPT_ASSERT(sandbox.socket < 0);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, end)) return;
    const pid_t self = getpid();
    sandbox.helper = fork();
    if (sandbox.helper == 0) {
        close(end[0]);
        help(end[1], self, argv, trial_read);
    }
    close(end[1]);
    if (sandbox.helper > 0)
        sandbox.socket = end[0];
    else
        close(end[0]);
}

/* Call with the lock held. */
static void end_helper(void)
{
    if (sandbox.socket < 0) return;
    close(sandbox.socket);
    sandbox.socket = -1;
    if (waitpid(sandbox.helper, NULL, WNOHANG) != 0) return; /* it has ended already */
    kill(sandbox.helper, SIGKILL);                           /* it may be stopped, and it has nothing to save */
    while (waitpid(sandbox.helper, NULL, 0) < 0 && errno == EINTR) {
    }
}

void hapt_sandbox_stop(void)
{
    pthread_mutex_lock(&sandbox.lock);
    end_helper();
    pthread_mutex_unlock(&sandbox.lock);
}

/* ---- Requests ---- */

/* True if the process is stopped (SIGSTOP). */
static bool is_stopped(pid_t process)
{
    char path[64], text[256];
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)process);
    hapt_first_line(path, text, sizeof text);
    const char *state = strrchr(text, ')');
    return state && (state[2] == 'T' || state[2] == 't');
}

/* Waits until the helper has answered; false: it is gone. A stopped helper is continued, and ended if that does not
 * help. */
static bool wait_for_answer(void)
{
    struct pollfd answer = {.fd = sandbox.socket, .events = POLLIN};
    double stopped_s = 0;
    for (const double start_s = hapt_time_s(); hapt_time_s() < start_s + 3 * MAX_WALL_S;) {
        const int ready = poll(&answer, 1, LOOK_MS);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) break;
        if (!is_stopped(sandbox.helper)) {
            stopped_s = 0;
            continue;
        }
        kill(sandbox.helper, SIGCONT);
        stopped_s += 1e-3 * LOOK_MS;
        if (stopped_s > MAX_STOPPED_S) break;
    }
    end_helper();
    return false;
}

static enum verdict ask(const char *path)
{
    enum verdict verdict = UNKNOWN;
    const size_t length = strlen(path);
    ssize_t bytes;
    if (sandbox.socket < 0 || length == 0 || length > MAX_PATH) return UNKNOWN;
    while ((bytes = send(sandbox.socket, path, length, MSG_NOSIGNAL)) < 0 && errno == EINTR) {
    }
    if (bytes < 0 || !wait_for_answer()) return UNKNOWN;
    while ((bytes = recv(sandbox.socket, &verdict, sizeof verdict, 0)) < 0 && errno == EINTR) {
    }
    return bytes == (ssize_t)sizeof verdict ? verdict : UNKNOWN;
}

/* Key of a file version: different for a changed file, equal after a rename; never 0. The lowest bits are left for a
 * verdict. */
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

/* True for verdicts about the moment, not about the file; these are not kept. */
static bool passes(enum verdict verdict)
{
    return verdict == UNKNOWN || verdict == NO_MEMORY || verdict == REFUSED;
}

/* One rank of the node asks, the others wait for its answer. Another file may replace the slot at any time; then this
 * file is checked again. */
static enum verdict ask_together(const char *path, uint64_t key)
{
    _Atomic uint64_t *slot = &sandbox.node[slot_of(key)];
    const double start_s = hapt_time_s();
    uint64_t found = atomic_load(slot);
    for (;;) {
        if (found >> VERDICT_BITS << VERDICT_BITS != key) {
            if (!atomic_compare_exchange_strong(slot, &found, key | CHECKING)) continue;
            const enum verdict verdict = ask(path);
            uint64_t mine = key | CHECKING;
            atomic_compare_exchange_strong(slot, &mine, passes(verdict) ? 0 : key | verdict);
            return verdict;
        }
        const enum verdict verdict = (enum verdict)(found - key);
        if (verdict != CHECKING) return verdict;
        if (hapt_time_s() - start_s > MAX_WALL_S) return ask(path);
        hapt_time_sleep_until(hapt_time_s() + 5e-4);
        found = atomic_load(slot);
    }
}

enum hapt_status hapt_sandbox_check(const char *path, const struct stat *about)
{
    const uint64_t key = key_of(about);
    enum verdict verdict = GOOD;
    pthread_mutex_lock(&sandbox.lock);
    if (sandbox.socket >= 0 && sandbox.good[slot_of(key)] != key) {
        verdict = sandbox.node ? ask_together(path, key) : ask(path);
        if (verdict == GOOD) sandbox.good[slot_of(key)] = key;
    }
    pthread_mutex_unlock(&sandbox.lock);
    if (verdict == GOOD || verdict == UNKNOWN) return HAPT_OK;
    if (verdict == NO_MEMORY)
        return hapt_fail(HAPT_ERR_MEMORY,
                         "give the job more memory (ulimit -v, the container's or the batch system's limit); if that "
                         "does not help, use another copy of the file",
                         "cannot read %s: memory ran out while reading it", path);
    if (verdict == REFUSED)
        return hapt_fail(HAPT_ERR_IO, "check the disk and the limit on open files (ulimit -n); the file may be intact",
                         "cannot read %s: the system refuses to open or to read it, or takes too long", path);
    return hapt_fail(HAPT_ERR_INPUT, "use another copy, or create the file again",
                     verdict == HANGS    ? "%s is damaged: the HDF5 library does not finish reading it"
                     : verdict == BROKEN ? "%s is damaged: its content cannot be listed"
                                         : "%s is damaged: the HDF5 library crashes while reading it",
                     path);
}

void hapt_sandbox_trust(const char *path)
{
    struct stat about;
    if (sandbox.socket < 0 || stat(path, &about)) return;
    const uint64_t key = key_of(&about);
    pthread_mutex_lock(&sandbox.lock);
    sandbox.good[slot_of(key)] = key;
    pthread_mutex_unlock(&sandbox.lock);
}

static void forget_node(void)
{
    sandbox.node = NULL;
}

void hapt_sandbox_share(const struct hapt_env *env)
{
    struct hapt_shared *shared;
    if (env->node_size == 1) return;
    enum hapt_status status = hapt_shared_create(env, KNOWN_FILES * sizeof *sandbox.node, &shared);
    if (status == HAPT_OK) {
        if (env->node_rank == 0) memset(hapt_shared_memory(shared), 0, KNOWN_FILES * sizeof *sandbox.node);
        status = hapt_shared_publish(shared);
    }
    if (status != HAPT_OK) { /* then each rank asks its own helper */
        hapt_fail_reset();
        return;
    }
    sandbox.node = hapt_shared_memory(shared);
    hapt_env_at_release(forget_node);
}
