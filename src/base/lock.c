/* The lock of a folder, for one owner: include/hapt/lock.h. */
#include "hapt/lock.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "hapt/env.h"

#define LOCK_NAME ".hapt-lock"
#define READ_BACK_DELAY_S 1.0 /* between writing a lock and reading it back */
enum { MAX_PATH = 4096, MAX_TEXT = 2048, VISIBLE_TRIES = 50 };

/* Content of the lock file. */
struct owner {
    char host[65], job[65], since[33], boot[41], pid_namespace[33], token[HAPT_LOCK_TOKEN_CHARS + 1];
    long process;
    unsigned long long started; /* start time of the process, in ticks since boot */
};

static struct {
    bool held;
    char path[MAX_PATH], folder[MAX_PATH];
    char token[HAPT_LOCK_TOKEN_CHARS + 1];
    pthread_t thread;
    bool running, leaving;
    bool advisory; /* the file system supports advisory locks */
    pthread_mutex_t lock;
    pthread_cond_t changed; /* on the monotonic clock */
} own = {.lock = PTHREAD_MUTEX_INITIALIZER};

/* ---- Identity of this process ---- */

#define DEAD_START 1ULL /* no user process starts in the first tick */

/* Start time of a process, field 22 of its stat file: distinguishes it from a later process of the same number. 0:
 * unknown. */
static unsigned long long start_of(long process)
{
    char path[64], text[1024];
    unsigned long long ticks = 0;
    snprintf(path, sizeof path, "/proc/%ld/stat", process);
    hapt_first_line(path, text, sizeof text);
    const char *at = strrchr(text, ')'); /* the name may contain anything */
    if (at && (strncmp(at, ") Z", 3) == 0 || strncmp(at, ") X", 3) == 0))
        return DEAD_START; /* a zombie: its parent has not waited for it yet */
    for (int field = 2; at && field < 22; field++) at = strchr(at + 1, ' ');
    return at && sscanf(at, "%llu", &ticks) == 1 ? ticks : 0;
}

static const char *job_of_environment(void)
{
    static const char *const name[] = {"SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "FLUX_JOB_ID"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        const char *value = getenv(name[i]);
        if (value && *value) return value;
    }
    return "-";
}

/* Replaces spaces, so that the file can be parsed. */
static void plain(char *to, size_t size, const char *from)
{
    snprintf(to, size, "%s", from[0] ? from : "-");
    for (char *at = to; *at; at++)
        if (*at <= ' ' || *at == 127) *at = '_';
}

static enum hapt_status describe_self(struct owner *self)
{
    unsigned char random[HAPT_LOCK_TOKEN_CHARS / 2];
    char text[256] = "?";
    const time_t now = time(NULL);
    struct tm local;
    *self = (struct owner){.process = getpid(), .started = start_of(getpid())};
    gethostname(text, sizeof text - 1);
    plain(self->host, sizeof self->host, text);
    plain(self->job, sizeof self->job, job_of_environment());
    hapt_first_line("/proc/sys/kernel/random/boot_id", text, sizeof text);
    plain(self->boot, sizeof self->boot, text);
    const ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    text[length > 0 ? length : 0] = '\0';
    plain(self->pid_namespace, sizeof self->pid_namespace, text);
    strftime(self->since, sizeof self->since, "%Y-%m-%dT%H:%M:%S", localtime_r(&now, &local));
    if (getrandom(random, sizeof random, 0) != sizeof random)
        return hapt_fail(HAPT_ERR_IO, NULL, "cannot draw random numbers: %s", strerror(errno));
    for (size_t i = 0; i < sizeof random; i++) snprintf(self->token + 2 * i, 3, "%02x", random[i]);
    return HAPT_OK;
}

/* ---- The file ---- */

static enum hapt_status path_of(const char *folder, char path[MAX_PATH])
{
    if (snprintf(path, MAX_PATH, "%s/" LOCK_NAME, folder) < MAX_PATH) return HAPT_OK;
    return hapt_fail(HAPT_ERR_IO, "use a shorter path", "path too long: %.60s...", folder);
}

static bool parse(const char *text, struct owner *owner)
{
    int version = 0;
    *owner = (struct owner){0};
    return sscanf(text,
                  "hapt-lock %d host %64s process %ld started %llu boot %40s space %32s job %64s since %32s token %40s",
                  &version, owner->host, &owner->process, &owner->started, owner->boot, owner->pid_namespace,
                  owner->job, owner->since, owner->token) == 9 &&
           version == 1;
}

static bool read_owner(int descriptor, struct owner *owner)
{
    char text[MAX_TEXT];
    const ssize_t bytes = pread(descriptor, text, sizeof text - 1, 0);
    text[bytes > 0 ? bytes : 0] = '\0';
    return parse(text, owner);
}

static bool write_owner(int descriptor, const struct owner *owner)
{
    char text[MAX_TEXT];
    const int length = snprintf(
        text, sizeof text,
        "hapt-lock 1\nhost %s\nprocess %ld\nstarted %llu\nboot %s\nspace %s\njob %s\nsince %s\ntoken %s\n", owner->host,
        owner->process, owner->started, owner->boot, owner->pid_namespace, owner->job, owner->since, owner->token);
    return ftruncate(descriptor, 0) == 0 && pwrite(descriptor, text, (size_t)length, 0) == length &&
           fsync(descriptor) == 0;
}

static void describe(const struct owner *owner, char *text, int size)
{
    if (!owner->process) {
        snprintf(text, (size_t)size, "an unknown process");
        return;
    }
    snprintf(text, (size_t)size, "process %ld on host %.64s%s%.64s since %.32s", owner->process, owner->host,
             owner->job[0] != '-' ? ", job " : "", owner->job[0] != '-' ? owner->job : "", owner->since);
}

/* Seconds since the file last changed, on the file server's clock: a new file beside it gives the current time
 * there. */
static double age_of(const char *folder, int descriptor)
{
    char path[MAX_PATH];
    struct stat then, now;
    if (fstat(descriptor, &then) ||
        snprintf(path, sizeof path, "%s/.hapt-time-%ld", folder, (long)getpid()) >= MAX_PATH)
        return 0;
    unlink(path);
    const int clock = open(path, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    const bool good = clock >= 0 && fstat(clock, &now) == 0;
    if (clock >= 0) close(clock);
    unlink(path);
    if (!good) return 0;
    return (double)(now.st_mtim.tv_sec - then.st_mtim.tv_sec) +
           1e-9 * (double)(now.st_mtim.tv_nsec - then.st_mtim.tv_nsec);
}

enum life { ALIVE, DEAD, UNCERTAIN };

static enum life judge(const struct owner *owner, const struct owner *self)
{
    if (!owner->process || strcmp(owner->host, self->host) || strcmp(owner->pid_namespace, self->pid_namespace))
        return UNCERTAIN;
    if (strcmp(owner->boot, self->boot)) return UNCERTAIN; /* rebooted since, or another host of the same name */
    if (kill((pid_t)owner->process, 0) != 0 && errno == ESRCH) return DEAD;
    const unsigned long long started = start_of(owner->process);
    return started == 0 ? UNCERTAIN : started == owner->started ? ALIVE : DEAD;
}

static enum hapt_lock_state state_of(const char *folder, int descriptor, const struct owner *owner,
                                     const struct owner *self)
{
    const enum life life = judge(owner, self);
    if (life != UNCERTAIN) return life == DEAD ? HAPT_LOCK_STALE : HAPT_LOCK_HELD;
    return age_of(folder, descriptor) > HAPT_LOCK_STALE_S ? HAPT_LOCK_STALE : HAPT_LOCK_HELD;
}

enum hapt_lock_state hapt_lock_look(const char *folder, char *text, int size)
{
    char path[MAX_PATH];
    struct owner owner, self;
    text[0] = '\0';
    if (path_of(folder, path) != HAPT_OK || describe_self(&self) != HAPT_OK) {
        hapt_fail_reset();
        return HAPT_LOCK_FREE;
    }
    const int descriptor = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0) return HAPT_LOCK_FREE;
    read_owner(descriptor, &owner);
    describe(&owner, text, size);
    const enum hapt_lock_state state = state_of(folder, descriptor, &owner, &self);
    close(descriptor);
    return state;
}

/* Waits while another process decides about the lock. If the file system has no advisory locks, the token must
 * suffice. */
static bool lock_advisory(int descriptor, double until_s)
{
    own.advisory = true;
    while (flock(descriptor, LOCK_EX | LOCK_NB) != 0) {
        own.advisory = errno == EWOULDBLOCK || errno == EINTR;
        if (!own.advisory) return true;
        if (hapt_time_s() > until_s) return false;
        hapt_time_sleep_until(hapt_time_s() + 0.05);
    }
    return true;
}

/* Opens the lock file. While this process holds the advisory lock, no other file has this name. */
static int open_alone(const char *path)
{
    const double until_s = hapt_time_s() + HAPT_LOCK_STALE_S + HAPT_LOCK_BEAT_S;
    do {
        struct stat mine, named;
        const int descriptor = open(path, O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
        if (descriptor < 0) return -1;
        if (fstat(descriptor, &mine) == 0 && !S_ISREG(mine.st_mode)) {
            close(descriptor);
            errno = EINVAL; /* a pipe or a device */
            return -1;
        }
        if (lock_advisory(descriptor, until_s) && fstat(descriptor, &mine) == 0 && lstat(path, &named) == 0 &&
            mine.st_ino == named.st_ino && mine.st_dev == named.st_dev)
            return descriptor;
        close(descriptor); /* its owner has removed it meanwhile */
        errno = EBUSY;
    } while (hapt_time_s() < until_s);
    return -1;
}

static enum hapt_status refuse(const char *folder, const struct owner *owner)
{
    char text[256];
    describe(owner, text, sizeof text);
    return hapt_fail(HAPT_ERR_USAGE, "give another --output, or wait until that job has ended", "%s is in use by %s",
                     folder, text);
}

/* Time of the last heartbeat; each open makes a file server refresh it. False: the lock is gone. */
static bool heartbeat_time(const char *path, struct timespec *beat)
{
    struct stat about = {0};
    const int descriptor = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0) return false;
    fstat(descriptor, &about);
    close(descriptor);
    *beat = about.st_mtim;
    return true;
}

enum owner_state { OWNER_SILENT, OWNER_ALIVE, OWNER_GONE };

/* Only for an owner that cannot be checked on this host. */
static enum owner_state wait_for_heartbeat(const char *folder, const char *path)
{
    struct timespec first, now;
    if (!heartbeat_time(path, &first)) return OWNER_GONE;
    fprintf(stderr,
            "hapt: %s may have an owner that cannot be checked from here; waiting up to %d s for its heartbeat\n",
            folder, HAPT_LOCK_STALE_S);
    for (const double start_s = hapt_time_s(); hapt_time_s() < start_s + HAPT_LOCK_STALE_S;) {
        hapt_time_sleep_until(hapt_time_s() + 0.5);
        if (!heartbeat_time(path, &now)) return OWNER_GONE;
        if (now.tv_sec != first.tv_sec || now.tv_nsec != first.tv_nsec) return OWNER_ALIVE;
    }
    return OWNER_SILENT;
}

/* *again: the file was removed meanwhile, so the lock file that replaced it decides. */
static enum hapt_status take(const char *folder, const char *path, int descriptor, const struct owner *self,
                             bool *again)
{
    struct owner owner;
    struct stat about;
    char text[256];
    const bool known = read_owner(descriptor, &owner);
    *again = false;
    if (fstat(descriptor, &about) == 0 && about.st_size > 0) {
        if (state_of(folder, descriptor, &owner, self) == HAPT_LOCK_HELD) {
            const enum owner_state state =
                judge(&owner, self) == ALIVE ? OWNER_ALIVE : wait_for_heartbeat(folder, path);
            *again = state == OWNER_GONE;
            if (state != OWNER_SILENT) return *again ? HAPT_OK : refuse(folder, &owner);
        }
        describe(&owner, text, sizeof text);
        if (known) fprintf(stderr, "hapt: the last owner of %s is gone (%s)\n", folder, text);
    }
    if (!write_owner(descriptor, self))
        return hapt_fail(HAPT_ERR_IO, "choose another --output, or check permissions and free space",
                         "cannot write %s: %s", path, strerror(errno));
    if (own.advisory) return HAPT_OK;
    /* Another job may have written at the same time: the last writer owns the lock. */
    hapt_time_sleep_until(hapt_time_s() + READ_BACK_DELAY_S);
    return read_owner(descriptor, &owner) && strcmp(owner.token, self->token) == 0 ? HAPT_OK : refuse(folder, &owner);
}

/* ---- The heartbeat ---- */

static bool still_ours(void)
{
    struct owner owner;
    const int descriptor = open(own.path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor < 0)
        return errno != ENOENT && errno != ELOOP; /* a file server that does not answer proves nothing */
    const bool read = read_owner(descriptor, &owner);
    close(descriptor);
    return !read || strcmp(owner.token, own.token) == 0;
}

enum hapt_status hapt_lock_check(void)
{
    char text[256];
    if (!own.held || still_ours()) return HAPT_OK;
    hapt_lock_look(own.folder, text, sizeof text);
    return hapt_fail(HAPT_ERR_IO, "this job was suspended too long, or the folder was removed; it writes nothing more",
                     "%s does not belong to this job any more%s%s", own.folder, text[0] ? ": now " : "", text);
}

static void *keep_beating(void *argument)
{
    (void)argument;
    pthread_mutex_lock(&own.lock);
    while (!own.leaving) {
        const struct timespec until = hapt_time_spec(hapt_time_s() + HAPT_LOCK_BEAT_S);
        pthread_cond_timedwait(&own.changed, &own.lock, &until);
        if (own.leaving) break;
        pthread_mutex_unlock(&own.lock);
        const enum hapt_status status = hapt_lock_check();
        if (status != HAPT_OK) hapt_die(status);
        utimensat(AT_FDCWD, own.path, NULL, AT_SYMLINK_NOFOLLOW);
        pthread_mutex_lock(&own.lock);
    }
    pthread_mutex_unlock(&own.lock);
    return NULL;
}

static enum hapt_status start_beating(void)
{
    hapt_time_condition_init(&own.changed);
    own.leaving = false;
    const int error = hapt_thread_start(&own.thread, keep_beating, NULL);
    if (error)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "cannot start the thread for the lock of the output folder: %s",
                         strerror(error));
    pthread_setname_np(own.thread, "hapt-lock");
    own.running = true;
    return HAPT_OK;
}

/* ---- Take and release ---- */

enum hapt_status hapt_lock_take(const char *folder)
{
    struct owner self;
    HAPT_ASSERT(!own.held);
    HAPT_TRY(path_of(folder, own.path));
    HAPT_TRY(describe_self(&self));
    enum hapt_status status;
    bool again;
    do {
        char text[256];
        const int descriptor = open_alone(own.path), error = errno;
        if (descriptor < 0 && error == EACCES && hapt_lock_look(folder, text, sizeof text) == HAPT_LOCK_HELD)
            return hapt_fail(HAPT_ERR_USAGE, "give another --output, or wait until that job has ended",
                             "%s is in use by %s", folder, text);
        if (descriptor < 0)
            return hapt_fail(HAPT_ERR_IO, "choose another --output, or check its permissions",
                             "the lock %s cannot be created: %s", own.path,
                             error == ELOOP ? "it is a symbolic link" : strerror(error));
        status = take(folder, own.path, descriptor, &self, &again);
        close(descriptor); /* also releases its advisory lock */
    } while (again);
    if (status != HAPT_OK) return status;
    snprintf(own.folder, sizeof own.folder, "%s", folder);
    memcpy(own.token, self.token, sizeof own.token);
    own.held = true;
    status = start_beating();
    if (status != HAPT_OK) hapt_lock_release();
    return status;
}

const char *hapt_lock_token(void)
{
    return own.held ? own.token : "";
}

bool hapt_lock_visible(const char *folder, const char *token)
{
    char path[MAX_PATH];
    if (path_of(folder, path) != HAPT_OK) return false;
    for (int i = 0; i < VISIBLE_TRIES; i++) {
        struct owner owner;
        const int descriptor = open(path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
        const bool same = descriptor >= 0 && read_owner(descriptor, &owner) && strcmp(owner.token, token) == 0;
        if (descriptor >= 0) close(descriptor);
        if (same) return true;
        hapt_time_sleep_until(hapt_time_s() + 0.1);
    }
    return false;
}

void hapt_lock_release(void)
{
    if (own.running) {
        pthread_mutex_lock(&own.lock);
        own.leaving = true;
        pthread_cond_broadcast(&own.changed);
        pthread_mutex_unlock(&own.lock);
        pthread_join(own.thread, NULL);
        pthread_cond_destroy(&own.changed);
        own.running = false;
    }
    if (!own.held) return;
    /* Under the advisory lock no other process takes it over between the check and the removal. */
    struct owner owner;
    const int descriptor = open(own.path, O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
    if (descriptor >= 0) {
        lock_advisory(descriptor, hapt_time_s() + 1);
        if (read_owner(descriptor, &owner) && strcmp(owner.token, own.token) == 0) unlink(own.path);
        close(descriptor);
    }
    own.held = false;
}
