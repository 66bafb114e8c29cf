/* The guard's helper process, and what is known of files by now. */
#include "hapt/guard.h"

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

#include "hapt/env.h"

enum verdict { UNKNOWN, CHECKING, GOOD, BROKEN, CRASHES, HANGS, NO_MEMORY, REFUSED };

enum {
    MOST_CPU_S = 20,   /* a rehearsal reads at most 256 MiB: a second or two */
    MOST_WALL_S = 300, /* a file system that does not answer would stop this process as well */
    MOST_BYTES = 1 << 30,
    MOST_EXPANSION = 2 * 1032, /* deflate makes 1032 bytes of one at most, and the library may hold the chunk twice */
    LIBRARY_BYTES = 1 << 26,   /* for all else than the data */
    PROBE_BYTES = 1 << 16,     /* as much as the library asks for at once, and more than lies around freed */
    STACK_BYTES = 1 << 16,
    MOST_PATH = 4096,
    LOOK_MS = 200, /* between two looks whether the helper is stopped */
    MOST_STOPPED_S = 2,
    LEAVING_TRIES = 1000, /* milliseconds that the helper has to leave */
    KNOWN_FILES = 1024,
    VERDICT_BITS = 3,
    BROKEN_CODE = 3,  /* of the child that came to an end */
    WILD_BYTE = 0x69, /* glibc fills new memory with its complement */
};

static struct {
    pthread_mutex_t lock; /* one question at a time */
    pid_t helper;
    int socket, batch, most_cpu_s;
    uint64_t good[KNOWN_FILES]; /* keys of files that this process may open */
    _Atomic uint64_t *node;     /* [KNOWN_FILES] key and verdict, common to the ranks of the node; NULL: none */
    _Atomic int *refusal;       /* errno: what the system refused to the child, shared with it; NULL: not known */
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

/* Memory in use, as RLIMIT_AS and RLIMIT_DATA count it. */
static void count_memory(rlim_t *all, rlim_t *data)
{
    unsigned long pages = 0, data_pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (file && fscanf(file, "%lu %*u %*u %*u %*u %lu", &pages, &data_pages) != 2) pages = data_pages = 0;
    if (file) fclose(file);
    *all = (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
    *data = (rlim_t)data_pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

static rlim_t room_under(int resource, rlim_t used)
{
    struct rlimit now;
    if (getrlimit(resource, &now) || now.rlim_cur == RLIM_INFINITY) return RLIM_INFINITY;
    return now.rlim_cur > used ? now.rlim_cur - used : 0;
}

/* Bytes that a child could have under the limits of this process and of the host. */
static rlim_t memory_left(void)
{
    rlim_t all, data;
    unsigned long long available_kb = 0;
    char line[128];
    count_memory(&all, &data);
    const rlim_t under_all = room_under(RLIMIT_AS, all), under_data = room_under(RLIMIT_DATA, data);
    rlim_t left = under_all < under_data ? under_all : under_data;
    FILE *file = fopen("/proc/meminfo", "r");
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "MemAvailable: %llu", &available_kb) == 1) break;
    if (file) fclose(file);
    if (available_kb > 0 && (rlim_t)available_kb * 1024 < left) left = (rlim_t)available_kb * 1024;
    return left;
}

static void limit_memory(rlim_t most)
{
#if !defined __SANITIZE_ADDRESS__ && !defined __SANITIZE_THREAD__ /* whose shadow is larger than any limit */
    rlim_t all, data;
    count_memory(&all, &data);
    limit(RLIMIT_DATA, data + most);
#else
    (void)most;
#endif
}

/* If the host runs out of memory, the system kills this process first, not a rank. */
static void offer_first(void)
{
    const int file = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    if (file < 0) return;
    if (write(file, "1000", 4) < 0) {
    } /* then the system chooses as usual */
    close(file);
}

void hapt_guard_refused(int error)
{
    /* A damaged file can cause the others, EINVAL by an impossible offset. */
    static const int known[] = {ENOMEM, EMFILE,    ENFILE, EIO,   EAGAIN, ETIMEDOUT,
                                ESTALE, EREMOTEIO, ENODEV, ENXIO, EACCES};
    int none = 0;
    for (size_t i = 0; i < sizeof known / sizeof *known && guard.refusal; i++)
        if (error == known[i]) atomic_compare_exchange_strong(guard.refusal, &none, error);
}

/* The library may crash because malloc failed. The file is not to blame for that. */
static void look_for_memory(int number)
{
    const bool refused = errno == ENOMEM; /* once, or for a large block: there may be some again */
    void *volatile block = refused ? NULL : malloc(PROBE_BYTES);
    if (!block) hapt_guard_refused(ENOMEM);
    raise(number); /* the default now: it ends the process */
}

static void catch_crashes(void)
{
    static const int deadly[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT};
    static char stack[STACK_BYTES];
    sigaltstack(&(stack_t){.ss_sp = stack, .ss_size = sizeof stack}, NULL);
    struct sigaction action = {.sa_handler = look_for_memory, .sa_flags = SA_RESETHAND | SA_NODEFER | SA_ONSTACK};
    sigemptyset(&action.sa_mask);
    for (size_t i = 0; i < sizeof deadly / sizeof *deadly; i++) sigaction(deadly[i], &action, NULL);
}

static void limit_child(pid_t parent, rlim_t most_bytes)
{
    live_under(parent);
    /* Over some damaged files the HDF5 library takes sizes and addresses out of memory that it never wrote. Here they
     * are wild ones. */
    mallopt(M_PERTURB, WILD_BYTE);
    limit(RLIMIT_CORE, 0);
    limit_memory(most_bytes);
    offer_first();
    /* Libraries may have set handlers. */
    signal(SIGXCPU, SIG_DFL);
    signal(SIGALRM, SIG_DFL);
    catch_crashes();
}

static void limit_time(void)
{
    struct rusage used = {0};
    getrusage(RUSAGE_SELF, &used);
    limit(RLIMIT_CPU, (rlim_t)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) + (rlim_t)guard.most_cpu_s);
    alarm(MOST_WALL_S);
}

_Noreturn static void rehearse_alone(const char *path, pid_t parent, rlim_t most_bytes, hapt_guard_rehearsal *rehearse)
{
    limit_child(parent, most_bytes);
    limit_time();
    _exit(rehearse(path) ? 0 : BROKEN_CODE);
}

/* The verdict on a child that ended. A refusal by the system explains any other failure. */
static enum verdict verdict_of(int status)
{
    const int refusal = guard.refusal ? atomic_load(guard.refusal) : 0;
    if (WIFEXITED(status) && WEXITSTATUS(status) == 0) return GOOD;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGXCPU) return HANGS;
    if (WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM)
        return REFUSED; /* it waited for the disk: no fault of the file */
    if (refusal == ENOMEM || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL))
        return NO_MEMORY; /* as the system does when there is none */
    if (refusal != 0) return REFUSED;
    return WIFEXITED(status) && WEXITSTATUS(status) == BROKEN_CODE ? BROKEN : CRASHES;
}

static enum verdict judge_within(const char *path, int from, rlim_t most_bytes, hapt_guard_rehearsal *rehearse)
{
    if (guard.refusal) atomic_store(guard.refusal, 0);
    const pid_t self = getpid(), child = fork();
    if (child < 0) return UNKNOWN;
    if (child == 0) {
        close(from);
        rehearse_alone(path, self, most_bytes, rehearse);
    }
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR) return UNKNOWN;
    return verdict_of(status);
}

/* The most memory that a sound file of that size needs. */
static rlim_t most_needed(const char *path)
{
    struct stat about;
    return LIBRARY_BYTES + (stat(path, &about) ? 0 : (rlim_t)about.st_size * MOST_EXPANSION);
}

/* The first child gets as much memory as nearly every file needs. A larger file gets a second child, with the memory
 * that the host has left. */
static enum verdict judge(const char *path, int from, hapt_guard_rehearsal *rehearse)
{
    const rlim_t left = memory_left(), needed = most_needed(path);
    const enum verdict verdict = judge_within(path, from, MOST_BYTES, rehearse);
    /* Damage is believed when a second child finds it, too: a single call that failed leads the library astray as well.
     */
    if (verdict == BROKEN || verdict == CRASHES) return judge_within(path, from, MOST_BYTES, rehearse);
    if (verdict != NO_MEMORY || needed <= MOST_BYTES || left <= MOST_BYTES) return verdict;
    return judge_within(path, from, needed < left ? needed : left, rehearse);
}

/* A child that reads one file after another (hapt_guard_batch). */
static struct {
    pid_t pid; /* 0: none */
    int socket, files;
} reader;

_Noreturn static void rehearse_many(int socket, pid_t parent, hapt_guard_rehearsal *rehearse)
{
    char path[MOST_PATH + 1];
    limit_child(parent, MOST_BYTES);
    for (ssize_t bytes; (bytes = recv(socket, path, MOST_PATH, 0)) > 0;) {
        path[bytes] = '\0';
        limit_time();
        const enum verdict verdict = rehearse(path) ? GOOD : BROKEN;
        if (verdict != GOOD && guard.refusal && atomic_load(guard.refusal) != 0) break; /* for a child of its own */
        if (send(socket, &verdict, sizeof verdict, MSG_NOSIGNAL) < 0) break;
    }
    _exit(0);
}

/* What it ended with. */
static int end_reader(void)
{
    int status = 0;
    close(reader.socket);
    while (waitpid(reader.pid, &status, 0) < 0 && errno == EINTR) {
    }
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
    if (guard.refusal) atomic_store(guard.refusal, 0);
    if (reader.pid == 0) start_reader(from, rehearse);
    if (reader.pid > 0 && send(reader.socket, path, strlen(path), MSG_NOSIGNAL) > 0)
        recv(reader.socket, &verdict, sizeof verdict, 0);
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
    void *shared = mmap(NULL, sizeof *guard.refusal, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    guard.refusal = shared == MAP_FAILED ? NULL : shared;
    bool prepared = false;
    for (;;) {
        const ssize_t bytes = recv(socket, path, MOST_PATH, 0);
        if (bytes < 0 && errno == EINTR) continue;
        if (bytes <= 0) _exit(0);
        path[bytes] = '\0';
        if (!prepared) prepared = rehearse(NULL); /* what all children need is done once */
        const enum verdict verdict =
            guard.batch > 1 ? judge_in_batch(path, socket, rehearse) : judge(path, socket, rehearse);
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

/* Under the lock. A helper that does not end by itself at once, stopped perhaps, is killed. */
static void end_helper(void)
{
    if (guard.socket < 0) return;
    close(guard.socket);
    guard.socket = -1;
    pid_t ended = 0;
    for (int i = 0; i < LEAVING_TRIES && ended == 0; i++) {
        if (i > 0) usleep(1000);
        ended = waitpid(guard.helper, NULL, WNOHANG);
    }
    if (ended == 0) kill(guard.helper, SIGKILL);
    while (ended == 0 && waitpid(guard.helper, NULL, 0) < 0 && errno == EINTR) {
    }
}

void hapt_guard_stop(void)
{
    pthread_mutex_lock(&guard.lock);
    end_helper();
    pthread_mutex_unlock(&guard.lock);
}

/* ---- Asking ---- */

/* Is the process stopped (SIGSTOP)? */
static bool is_stopped(pid_t process)
{
    char path[64], text[256] = "";
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)process);
    FILE *file = fopen(path, "r");
    if (file && !fgets(text, sizeof text, file)) text[0] = '\0';
    if (file) fclose(file);
    const char *state = strrchr(text, ')');
    return state && (state[2] == 'T' || state[2] == 't');
}

/* The helper has judged, or is gone. One that is stopped is continued, and given up when that does not help. */
static bool wait_for_answer(void)
{
    struct pollfd answer = {.fd = guard.socket, .events = POLLIN};
    double stopped_s = 0;
    for (const double start_s = hapt_time_s(); hapt_time_s() < start_s + 3 * MOST_WALL_S;) {
        const int ready = poll(&answer, 1, LOOK_MS);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) break;
        if (!is_stopped(guard.helper)) {
            stopped_s = 0;
            continue;
        }
        kill(guard.helper, SIGCONT);
        stopped_s += 1e-3 * LOOK_MS;
        if (stopped_s > MOST_STOPPED_S) break;
    }
    end_helper();
    return false;
}

static enum verdict ask(const char *path)
{
    enum verdict verdict = UNKNOWN;
    const size_t length = strlen(path);
    ssize_t bytes;
    if (guard.socket < 0 || length == 0 || length > MOST_PATH) return UNKNOWN;
    while ((bytes = send(guard.socket, path, length, MSG_NOSIGNAL)) < 0 && errno == EINTR) {
    }
    if (bytes < 0 || !wait_for_answer()) return UNKNOWN;
    while ((bytes = recv(guard.socket, &verdict, sizeof verdict, 0)) < 0 && errno == EINTR) {
    }
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

/* The verdict is about the moment, not about the file. */
static bool passes(enum verdict verdict)
{
    return verdict == UNKNOWN || verdict == NO_MEMORY || verdict == REFUSED;
}

/* One rank of the node asks, the others wait for its answer. Another file may take the slot at any time: then this one
 * is asked for again. */
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
            atomic_compare_exchange_strong(slot, &mine, passes(verdict) ? 0 : key | verdict);
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
    if (verdict == NO_MEMORY)
        return hapt_fail(HAPT_ERR_MEMORY,
                         "give the job more memory (ulimit -v, the container's or the batch system's limit); if that "
                         "does not help, take another copy of the file",
                         "%s cannot be read: memory ran out over it", path);
    if (verdict == REFUSED)
        return hapt_fail(HAPT_ERR_IO,
                         "look at the disk, and at the limit on open files (ulimit -n); the file may be sound",
                         "%s cannot be read: the system refuses to open or to read it, or takes too long", path);
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
