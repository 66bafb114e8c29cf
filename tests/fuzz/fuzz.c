/*
 * The fuzzer: hapt's own readers and commands read damaged files of every kind in this process. Build it with
 * sanitizers (make fuzz). Nothing may crash or hang, and a failure must be one line with a hint. All content of hapt's
 * own files is under checksums, so a changed file must never be read as different content.
 *
 *   fuzz [--inputs N] [--seed S] [--jobs J] [--kind NAME] [--only I] [--keep FOLDER] [--crashes] CORPUS
 *
 * Input i is a function of seed and i alone: --only I repeats it. As in hapt the sandbox reads every file first; what
 * it refuses is refused (--crashes keeps what the HDF5 library dies of there). A process for each job runs the inputs,
 * and where it dies the supervisor names the input, keeps it and starts another.
 */
#include "fuzz.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <hdf5.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hapt/sandbox.h"
#include "hapt/h5.h"

enum {
    MOST_SEEDS = 200,
    MOST_JOBS = 64,
    PATH_CHARS = 512,
    MOST_FAILURES = 40,
    CPU_S = 60,
    WALL_S = 300,
    REPORT_S = 60,
    GUARD_CPU_S = 2
};
static const int64_t most_memory = (int64_t)1 << 30; /* files are mutated in memory, because they are small */

enum outcome { ACCEPTED, REFUSED, BROKEN, CRASHED_GUARD, HUNG_GUARD, SAME, OTHER, OUTCOMES };
static const char *const outcome_name[OUTCOMES] = {
    "accepted", "refused", "by guard", "crash HDF5", "hang HDF5", "same though changed", "read as other"};

struct seed {
    enum fuzz_kind kind;
    char name[128];
    char path[PATH_CHARS];
    bool own; /* written by hapt: all its content is under checksums */
    bool regression;
    uint64_t content;
    uint64_t weights[2]; /* of a checkpoint to resume from: hash of the final weights; [1]: when resumed from the
                            checkpoint before it */
};

static struct {
    int64_t inputs, only;
    uint64_t seed;
    int jobs;
    enum fuzz_kind kind;
    const char *corpus, *keep;
    bool crashes;
} option = {.inputs = 1000, .only = -1, .seed = 1, .jobs = 1, .kind = FUZZ_KINDS, .keep = "."};

/* Messages of a worker to the supervisor. */
static struct shared {
    _Atomic int64_t current[MOST_JOBS];
    _Atomic int64_t count[FUZZ_KINDS][OUTCOMES], used[FUZZ_KINDS][2]; /* [1]: the command succeeded; [0]: it refused */
    _Atomic int64_t slowest_us[FUZZ_KINDS], read_us[FUZZ_KINDS], used_us[FUZZ_KINDS], resumed, fell_back;
    _Atomic int failures;
} * shared;

/* Commands take much longer than readers. So only this share of the accepted inputs goes to commands; for slow kinds a
 * fifth of it. */
static const double use_share[FUZZ_KINDS] = {
    [FUZZ_MODEL] = 0.15,  [FUZZ_WEIGHTS] = 0.5, [FUZZ_TOKENS] = 0.5,     [FUZZ_IMAGES] = 0.5,  [FUZZ_FIELDS] = 0.3,
    [FUZZ_PROFILE] = 0.4, [FUZZ_PLAN] = 0.3,    [FUZZ_CHECKPOINT] = 0.2, [FUZZ_CLUSTER] = 0.4, [FUZZ_EFFICIENCY] = 0.3,
    [FUZZ_RUN] = 0.5,     [FUZZ_RESUME] = 0.1,  [FUZZ_RAW] = 1};

static char scratch[PATH_CHARS - 128];
static struct seed seed[MOST_SEEDS];
static int seed_count;
static FILE *console; /* the output of the commands is discarded */

#ifdef __SANITIZE_ADDRESS__
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    /* Looking up function names takes half a second for each file that crashes the HDF5 library. With --only, set
     * ASAN_OPTIONS=symbolize=1. */
    return "detect_leaks=0:allocator_may_return_null=1:hard_rss_limit_mb=6000:max_allocation_size_mb=8192:symbolize=0:"
           "malloc_context_size=2:"
           "quarantine_size_mb=32:allocator_release_to_os_interval_ms=-1";
}

/* Some compilers lack sanitizer/allocator_interface.h. */
int __sanitizer_install_malloc_and_free_hooks(void (*took)(const volatile void *, size_t),
                                              void (*gave)(const volatile void *));

static _Atomic size_t largest; /* largest block of memory since it was set to 0 */
static pid_t watched;
static void note_memory(const volatile void *memory, size_t bytes)
{
    size_t before = largest;
    /* Here the sandbox cannot limit its children's memory (sandbox.c). A child that asks for too much dies. */
    if (bytes > (size_t)most_memory && getpid() != watched) _exit(1);
    while (memory && bytes > before && !atomic_compare_exchange_weak(&largest, &before, bytes)) {
    }
}
static void forget_memory(const volatile void *memory)
{
    (void)memory;
}
static void watch_memory(void)
{
    watched = getpid();
    __sanitizer_install_malloc_and_free_hooks(note_memory, forget_memory);
}
static size_t largest_memory(void)
{
    return atomic_exchange(&largest, 0);
}
#else
static void watch_memory(void) {}
static size_t largest_memory(void)
{
    return 0;
}
#endif

/* ---- Corpus ---- */

static bool is_hdf5(enum fuzz_kind kind)
{
    return kind != FUZZ_CLUSTER && kind != FUZZ_RAW;
}

static void add_seed(const char *folder, const char *name, bool own)
{
    struct seed *made = &seed[seed_count];
    if (seed_count == MOST_SEEDS || fuzz_kind_of(name) == FUZZ_KINDS) return;
    *made = (struct seed){.kind = fuzz_kind_of(name), .regression = strncmp(name, "regression-", 11) == 0};
    /* tools/hapt.py writes no checksums */
    made->own = own && !made->regression && is_hdf5(made->kind) && !strstr(name, "-python-");
    snprintf(made->name, sizeof made->name, "%s", name);
    snprintf(made->path, sizeof made->path, "%s/%s", folder, name);
    seed_count++;
}

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct seed *)a)->path, ((const struct seed *)b)->path);
}

static void list_corpus(void)
{
    DIR *listing = opendir(option.corpus);
    for (struct dirent *entry; listing && (entry = readdir(listing));) add_seed(option.corpus, entry->d_name, true);
    if (listing) closedir(listing);
    qsort(seed, (size_t)seed_count, sizeof *seed, by_name);
}

/* The same content as other programs write it, without checksums. So damage reaches the libraries. */
static void add_foreign(void)
{
    char folder[PATH_CHARS], path[2 * PATH_CHARS];
    snprintf(folder, sizeof folder, "%s/foreign", scratch);
    mkdir(folder, 0777);
    for (int i = 0, count = seed_count; i < count; i++) {
        if (!seed[i].own || fuzz_is_folder(seed[i].path)) continue;
        snprintf(path, sizeof path, "%s/%s", folder, seed[i].name);
        if (fuzz_foreign(seed[i].path, path)) add_seed(folder, seed[i].name, false);
    }
}

/* ---- One input ---- */

static int64_t current;

static void keep_input(const struct seed *from, const char *why)
{
    char path[2 * PATH_CHARS], input[PATH_CHARS];
    snprintf(input, sizeof input, "%s/input", scratch);
    snprintf(path, sizeof path, "%s/%s-%s-%lld", option.keep, why, fuzz_kind_name(from->kind), (long long)current);
    fuzz_copy(input, path);
}

__attribute__((format(printf, 2, 3))) static void fail(const struct seed *from, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(console, "fuzz: input %lld (seed %llu, from %s): ", (long long)current, (unsigned long long)option.seed,
            from->path);
    vfprintf(console, format, arguments);
    fprintf(console, "\n");
    fflush(console);
    va_end(arguments);
    shared->failures++;
    keep_input(from, "failed");
}

/* Stores the record of a failure, with the message that a user would have seen. */
static void check_failure(const struct seed *from, enum hapt_status status, bool printed)
{
    char text[4096];
    const ssize_t bytes = pread(STDERR_FILENO, text, sizeof text - 1, 0);
    const char *message = hapt_fail_message();
    text[bytes > 0 ? bytes : 0] = '\0';
    if (status == HAPT_OK) return;
    if (status != HAPT_ERR_INPUT && status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_MEMORY &&
        status != HAPT_ERR_USAGE)
        fail(from, "ends with %s: %s", hapt_status_name(status), message);
    else if (!message[0] && !printed) /* training prints some errors before it saves; they are checked below */
        fail(from, "ends with %s and no message", hapt_status_name(status));
    for (const char *c = message; *c; c++) {
        if ((unsigned char)*c >= 0x20 && *c != 0x7f) continue;
        fail(from, "a message with control characters: %s", message);
        break;
    }
    const char *line = strstr(text, "hapt: error:");
    if (printed && (!line || strstr(line + 1, "hapt: error:") || !strstr(line, "\nhint: ")))
        fail(from, "not one error line with a hint: %s", text);
}

static enum outcome outcome_of(enum hapt_status status)
{
    if (status == HAPT_OK) return ACCEPTED;
    if (strstr(hapt_fail_message(), "cannot be listed")) return BROKEN;
    if (!strstr(hapt_fail_message(), "the HDF5 library")) return REFUSED;
    return strstr(hapt_fail_message(), "crashes") ? CRASHED_GUARD : HUNG_GUARD;
}

/* Does what users do with the file. A valid older checkpoint exists beside the damaged one, so the run resumes from
 * it. */
static void use(const struct fuzz_place *place, const struct seed *from, const char *path, bool flipped)
{
    uint64_t weights = 0;
    bool fell_back = false;
    const bool resumes = from->kind == FUZZ_RESUME;
    if (ftruncate(STDERR_FILENO, 0)) {
    }
    const enum hapt_status status =
        resumes ? fuzz_resume(place, path, &weights, &fell_back) : fuzz_use(place, from->kind, path);
    check_failure(from, status, true);
    if (resumes && flipped && status != HAPT_OK)
        fail(from, "a run does not go on from the checkpoint before the damaged one: %s", hapt_fail_message());
    if (resumes && flipped && status == HAPT_OK && weights != from->weights[fell_back])
        fail(from, "a damaged checkpoint leads to other weights");
    if (resumes && status == HAPT_OK) fell_back ? shared->fell_back++ : shared->resumed++;
    hapt_fail_reset();
    shared->used[from->kind][status == HAPT_OK]++;
}

static double cpu_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void check_cost(const struct seed *from, double start_s, double read_s)
{
    const int64_t taken_us = (int64_t)(1e6 * (cpu_s() - start_s));
    const size_t bytes = largest_memory();
    int64_t before = shared->slowest_us[from->kind];
    while (taken_us > before && !atomic_compare_exchange_weak(&shared->slowest_us[from->kind], &before, taken_us)) {
    }
    shared->read_us[from->kind] += (int64_t)(1e6 * read_s);
    shared->used_us[from->kind] += taken_us - (int64_t)(1e6 * read_s);
    if ((int64_t)bytes > most_memory) fail(from, "reserves %zu bytes at once", bytes);
}

/* `flipped`: bytes of a file under checksums were changed. Returns whether the file was accepted. */
static bool judge(const struct fuzz_place *place, const struct seed *from, const char *path, bool flipped)
{
    uint64_t content = 0;
    const struct itimerval limit = {.it_value = {.tv_sec = CPU_S}};
    const double start_s = cpu_s();
    setitimer(ITIMER_PROF, &limit, NULL);
    largest_memory();
    const enum hapt_status status = fuzz_read(place, from->kind, path, &content);
    enum outcome outcome = outcome_of(status);
    check_failure(from, status, false);
    hapt_fail_reset();
    if (status == HAPT_OK && content != from->content) outcome = OTHER;
    if (status == HAPT_OK && content == from->content) outcome = SAME;
    if (flipped && outcome == OTHER) fail(from, "changed bytes of a file under checksums are read as something else");
    if (option.crashes && (outcome == CRASHED_GUARD || outcome == HUNG_GUARD))
        keep_input(from, outcome == CRASHED_GUARD ? "crash" : "hang");
    shared->count[from->kind][outcome]++;
    const double read_s = cpu_s() - start_s;
    if (fuzz_chance(place->random, (status == HAPT_OK ? 1 : 0.2) * use_share[from->kind]))
        use(place, from, path, flipped);
    check_cost(from, start_s, read_s);
    const ssize_t open_objects = H5Fget_obj_count((hid_t)H5F_OBJ_ALL, H5F_OBJ_ALL);
    if (open_objects > 0) fail(from, "%ld objects of HDF5 stay open", (long)open_objects);
    return status == HAPT_OK;
}

_Noreturn static void give_up(const char *what)
{
    fprintf(console, "fuzz: %s cannot be written: %s\n", what, strerror(errno));
    _exit(1);
}

/* The changed file of the input, and its origin. */
static void choose_target(uint64_t *random, const struct seed *from, const char *input, char target[PATH_CHARS],
                          char origin[2 * PATH_CHARS])
{
    static const char *const part[] = {"/manifest.h5", "/shard-0000.h5", "/shard-0001.h5"};
    const int parts = !fuzz_is_folder(from->path) ? 0 : from->kind == FUZZ_RESUME ? 2 : 3;
    const char *chosen = parts > 0 ? part[fuzz_below(random, parts)] : "";
    snprintf(target, PATH_CHARS, "%s%s", input, chosen);
    snprintf(origin, 2 * PATH_CHARS, "%s%s", from->path, chosen);
}

static bool mutate(uint64_t *random, const struct seed *from, const char *input)
{
    static unsigned char data[2 * FUZZ_MOST_BYTES];
    char target[PATH_CHARS], origin[2 * PATH_CHARS];
    bool flipped = false;
    if (!fuzz_copy(from->path, input)) give_up("the input");
    choose_target(random, from, input, target, origin);
    const double way = hapt_random_unit(random);
    if (is_hdf5(from->kind) && !from->regression && way < 0.5) { /* regressions would crash the library here */
        fuzz_tables(random, target, origin);
    } else {
        size_t size = fuzz_load(target, data, FUZZ_MOST_BYTES);
        flipped = from->own && way < 0.8;
        if (flipped)
            fuzz_flip(random, data, size);
        else if (from->kind == FUZZ_CLUSTER && way < 0.85)
            size = fuzz_json(random, (char *)data, size, sizeof data);
        else
            size = fuzz_bytes(random, data, size, sizeof data);
        if (!fuzz_store(target, data, size)) give_up(target);
    }
    if (fuzz_is_folder(from->path) && !flipped && fuzz_chance(random, 0.7)) fuzz_repair(input);
    return flipped;
}

/* The sandbox must treat each input as a new file, although several are written within one tick of the file system's
 * clock. */
static void stamp(const char *input, int64_t number)
{
    const struct timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0},
                                      {.tv_sec = 1000 + number / 1000000000, .tv_nsec = number % 1000000000}};
    static const char *const part[] = {"", "/manifest.h5", "/shard-0000.h5", "/shard-0001.h5"};
    for (int i = 0; i < 4; i++) {
        char path[2 * PATH_CHARS];
        snprintf(path, sizeof path, "%s%s", input, part[i]);
        utimensat(AT_FDCWD, path, times, 0);
    }
}

static const struct seed *choose_seed(uint64_t *random)
{
    static const enum fuzz_kind often[] = {
        FUZZ_CLUSTER, FUZZ_CLUSTER, FUZZ_CLUSTER, FUZZ_CLUSTER, FUZZ_CLUSTER,    FUZZ_TOKENS,     FUZZ_TOKENS,
        FUZZ_TOKENS,  FUZZ_RAW,     FUZZ_RAW,     FUZZ_MODEL,   FUZZ_MODEL,      FUZZ_MODEL,      FUZZ_PLAN,
        FUZZ_PLAN,    FUZZ_PLAN,    FUZZ_PROFILE, FUZZ_PROFILE, FUZZ_CHECKPOINT, FUZZ_CHECKPOINT, FUZZ_FIELDS,
        FUZZ_FIELDS,  FUZZ_IMAGES,  FUZZ_WEIGHTS, FUZZ_RUN,     FUZZ_RESUME,     FUZZ_EFFICIENCY};
    for (;;) {
        const enum fuzz_kind kind =
            option.kind < FUZZ_KINDS ? option.kind : often[fuzz_below(random, (int)(sizeof often / sizeof *often))];
        const int start = fuzz_below(random, seed_count);
        for (int i = 0; i < seed_count; i++)
            if (seed[(start + i) % seed_count].kind == kind) return &seed[(start + i) % seed_count];
    }
}

static void run_input(struct fuzz_place *place, int64_t number)
{
    uint64_t random = hapt_hash(option.seed, &number, sizeof number);
    char input[PATH_CHARS];
    current = number;
    snprintf(input, sizeof input, "%s/input", scratch);
    fuzz_remove(input);
    if (ftruncate(STDERR_FILENO, 0)) {
    }
    const struct seed *from = choose_seed(&random);
    const bool flipped = mutate(&random, from, input);
    stamp(input, number);
    place->random = &random;
    judge(place, from, input, flipped);
}

/* ---- Workers ---- */

/* Hashes of the final weights when a run resumes from the newer checkpoint, and from the older one only. They are
 * computed here, because the machine that wrote the corpus may round differently. */
static void learn_weights(struct fuzz_place *place, struct seed *made)
{
    char older[PATH_CHARS];
    bool fell_back = false;
    snprintf(older, sizeof older, "%s/older-tiny", option.corpus);
    const char *const path[] = {made->path, older};
    for (int i = 0; i < 2; i++) {
        const enum hapt_status status = fuzz_resume(place, path[i], &made->weights[i], &fell_back);
        if (status != HAPT_OK || fell_back) fail(made, "%s is not resumed from: %s", path[i], hapt_fail_message());
        hapt_fail_reset();
    }
}

/* Reads every seed unchanged. Seeds of the corpus must be accepted, and regressions must not crash. */
static void check_seeds(struct fuzz_place *place, bool report)
{
    for (int i = 0; i < seed_count; i++) {
        uint64_t random = 1;
        place->random = &random;
        current = -1 - i;
        const enum hapt_status status = fuzz_read(place, seed[i].kind, seed[i].path, &seed[i].content);
        if (status != HAPT_OK && !seed[i].regression && report)
            fail(&seed[i], "a seed is refused: %s (has a format changed? tests/fuzz/make-corpus writes the seeds anew)",
                 hapt_fail_message());
        hapt_fail_reset();
        if (seed[i].kind == FUZZ_RESUME) learn_weights(place, &seed[i]);
        if (!report || !seed[i].regression) continue;
        for (int k = 0; k < 8; k++) fuzz_use(place, seed[i].kind, seed[i].path), hapt_fail_reset();
    }
}

/* For many files, the sandbox's own limit is too long. */
static bool trial_read(const char *path)
{
    if (path) setrlimit(RLIMIT_CPU, &(struct rlimit){GUARD_CPU_S, GUARD_CPU_S + 1});
    return hapt_h5_trial_read(path);
}

static void run_worker(int job, int64_t first)
{
    struct hapt_env env;
    char output[PATH_CHARS], errors[PATH_CHARS], folder[PATH_CHARS];
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    console = fdopen(dup(STDERR_FILENO), "w");
    snprintf(scratch + strlen(scratch), sizeof scratch - strlen(scratch), "/job-%d", job);
    mkdir(scratch, 0777);
    snprintf(output, sizeof output, "%s/output.h5", scratch);
    snprintf(errors, sizeof errors, "%s/errors", scratch);
    snprintf(folder, sizeof folder, "%s/run", scratch);
    const int sink = open(errors, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0666), nowhere = open("/dev/null", O_RDWR);
    dup2(sink, STDERR_FILENO), dup2(nowhere, STDOUT_FILENO), dup2(nowhere, STDIN_FILENO);
    /* The library's block per open file is large. Keep it in the process instead of returning it to the system each
     * time. */
    H5set_free_list_limits(64 << 20, 16 << 20, 16 << 20, 4 << 20, 64 << 20, 4 << 20);
    watch_memory();
    hapt_sandbox_start(NULL, trial_read);
    if (hapt_env_init(&env, NULL, NULL, HAPT_ENV_TIMEOUT_S) != HAPT_OK) {
        fprintf(console, "fuzz: %s\n", hapt_fail_message());
        _exit(1);
    }
    struct fuzz_place place = {.env = &env, .corpus = option.corpus, .output = output, .run = folder};
    add_foreign();
    check_seeds(&place, job == 0 && first == 0);
    for (int64_t i = first; i < option.inputs && shared->failures < MOST_FAILURES; i += option.jobs) {
        shared->current[job] = i;
        run_input(&place, i);
    }
    hapt_env_release(&env);
    hapt_sandbox_stop();
    _exit(0);
}

static pid_t start_worker(int job, int64_t first)
{
    shared->current[job] = first - option.jobs;
    const pid_t worker = fork();
    if (worker == 0) run_worker(job, first);
    return worker;
}

/* The last message of the sanitizers or of hapt. */
static void show_errors(int job)
{
    char path[PATH_CHARS], line[400];
    snprintf(path, sizeof path, "%s/job-%d/errors", scratch, job);
    FILE *file = fopen(path, "r");
    for (int i = 0; file && i < 30 && fgets(line, sizeof line, file); i++) fprintf(stderr, "    %s", line);
    if (file) fclose(file);
}

static void report_death(int job, int status)
{
    char input[PATH_CHARS], path[2 * PATH_CHARS];
    const long long number = (long long)shared->current[job];
    fprintf(stderr, "fuzz: input %lld (seed %llu) ends the process: %s %d%s\n", number, (unsigned long long)option.seed,
            WIFSIGNALED(status) ? "signal" : "code", WIFSIGNALED(status) ? WTERMSIG(status) : WEXITSTATUS(status),
            WIFSIGNALED(status) && (WTERMSIG(status) == SIGPROF || WTERMSIG(status) == SIGKILL)
                ? " (it does not come to an end)"
                : "");
    show_errors(job);
    snprintf(input, sizeof input, "%s/job-%d/input", scratch, job);
    snprintf(path, sizeof path, "%s/failed-%lld", option.keep, number);
    fuzz_copy(input, path);
    fprintf(stderr, "    kept as %s\n", path);
    shared->failures++;
}

/* Between two deaths of workers: kills a worker that makes no progress, even if it sleeps. Prints progress now and
 * then. */
static void look_after(const pid_t *worker)
{
    static int64_t seen[MOST_JOBS];
    static double seen_s[MOST_JOBS], told_s;
    const double now_s = hapt_time_s();
    int64_t done = 0;
    for (int job = 0; job < option.jobs; job++) {
        done += shared->current[job] / option.jobs;
        if (seen_s[job] == 0 || shared->current[job] != seen[job])
            seen[job] = shared->current[job], seen_s[job] = now_s;
        if (worker[job] > 0 && now_s - seen_s[job] > WALL_S) kill(worker[job], SIGKILL), seen_s[job] = now_s;
    }
    if (told_s == 0) told_s = now_s;
    if (now_s - told_s < REPORT_S) return;
    told_s = now_s;
    fprintf(stderr, "fuzz: about %lld inputs, %d failed\n", (long long)done, (int)shared->failures);
}

static sigset_t awaited_signals(void)
{
    sigset_t awaited;
    sigemptyset(&awaited);
    sigaddset(&awaited, SIGCHLD);
    sigaddset(&awaited, SIGTERM);
    sigaddset(&awaited, SIGINT);
    return awaited;
}

/* On a signal: prints the counts so far. */
static pid_t end_all(const pid_t *worker)
{
    for (int job = 0; job < option.jobs; job++)
        if (worker[job] > 0) kill(worker[job], SIGKILL);
    while (waitpid(-1, NULL, 0) > 0 || errno == EINTR) {
    }
    errno = ECHILD;
    return -1;
}

/* Waits for the next worker that ends; -1: there are none left. */
static pid_t wait_for_worker(const pid_t *worker, int *status)
{
    const struct timespec tick = {.tv_sec = 2};
    const sigset_t awaited = awaited_signals();
    for (;;) {
        const pid_t gone = waitpid(-1, status, WNOHANG);
        if (gone != 0) return gone;
        const int signal = sigtimedwait(&awaited, NULL, &tick);
        if (signal == SIGTERM || signal == SIGINT) return end_all(worker);
        look_after(worker);
    }
}

static void supervise(void)
{
    pid_t worker[MOST_JOBS];
    int running = option.jobs;
    const sigset_t awaited = awaited_signals();
    sigset_t before;
    for (int job = 0; job < option.jobs; job++) worker[job] = start_worker(job, option.only >= 0 ? option.only : job);
    sigprocmask(SIG_BLOCK, &awaited, &before);
    while (running > 0) {
        int status;
        const pid_t gone = wait_for_worker(worker, &status);
        if (gone < 0 && errno != EINTR) break;
        for (int job = 0; job < option.jobs; job++) {
            if (worker[job] != gone) continue;
            worker[job] = 0;
            if (!(WIFEXITED(status) && WEXITSTATUS(status) == 0)) report_death(job, status);
            const int64_t next = shared->current[job] + option.jobs;
            if ((WIFEXITED(status) && WEXITSTATUS(status) == 0) || next >= option.inputs ||
                shared->failures >= MOST_FAILURES) {
                running--;
                continue;
            }
            sigprocmask(SIG_SETMASK, &before, NULL);
            worker[job] = start_worker(job, next);
            sigprocmask(SIG_BLOCK, &awaited, NULL);
        }
    }
}

static int64_t print_counts(void)
{
    int64_t total = 0, tables = 0;
    printf("%-12s %10s", "", "inputs");
    for (int o = 0; o < OUTCOMES; o++) printf("  %s", o == ACCEPTED ? "" : outcome_name[o]);
    printf("  command: ends well  refuses  slowest ms  reading ms  commands ms\n");
    for (int kind = 0; kind < FUZZ_KINDS; kind++) {
        int64_t inputs = 0;
        for (int o = 0; o < OUTCOMES; o++) inputs += shared->count[kind][o];
        if (inputs == 0) continue;
        printf("%-12s %10lld", fuzz_kind_name((enum fuzz_kind)kind), (long long)inputs);
        for (int o = 1; o < OUTCOMES; o++)
            printf("  %*lld", (int)strlen(outcome_name[o]), (long long)shared->count[kind][o]);
        const int64_t used = shared->used[kind][0] + shared->used[kind][1];
        printf("  %18lld  %7lld  %10.0f  %10.2f  %11.1f\n", (long long)shared->used[kind][1],
               (long long)shared->used[kind][0], 1e-3 * (double)shared->slowest_us[kind],
               1e-3 * (double)shared->read_us[kind] / (double)inputs,
               1e-3 * (double)shared->used_us[kind] / (double)(used > 0 ? used : 1));
        total += inputs;
        tables += shared->count[kind][OTHER];
    }
    if (shared->resumed + shared->fell_back > 0)
        printf("runs went on from the newest checkpoint %lld times, from the one before a damaged one %lld times\n",
               (long long)shared->resumed, (long long)shared->fell_back);
    /* Values that were changed with new checksums are valid. They are compared with the new values. */
    if (total >= 500 && tables == 0) {
        fprintf(stderr, "fuzz: no changed value was ever noticed\n");
        shared->failures++;
    }
    return total;
}

static void parse(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--inputs"))
            option.inputs = atoll(value), i++;
        else if (!strcmp(argv[i], "--seed"))
            option.seed = *value ? strtoull(value, NULL, 10) : (uint64_t)time(NULL), i++;
        else if (!strcmp(argv[i], "--jobs"))
            option.jobs = atoi(value), i++;
        else if (!strcmp(argv[i], "--only"))
            option.only = atoll(value), i++;
        else if (!strcmp(argv[i], "--keep"))
            option.keep = value, i++;
        else if (!strcmp(argv[i], "--crashes"))
            option.crashes = true;
        else if (!strcmp(argv[i], "--kind")) {
            char name[64];
            snprintf(name, sizeof name, "%s-", value);
            option.kind = fuzz_kind_of(name), i++;
        } else
            option.corpus = argv[i];
    }
    if (option.only >= 0) option.inputs = option.only + 1, option.jobs = 1;
    if (option.jobs < 1 || option.jobs > MOST_JOBS) option.jobs = 1;
}

/* Otherwise each child of the sandbox would look up the same functions again. */
static void bind_early(char **argv)
{
    if (getenv("LD_BIND_NOW")) return;
    setenv("LD_BIND_NOW", "1", 1);
    execv("/proc/self/exe", argv);
}

int main(int argc, char **argv)
{
    struct stat about;
    bind_early(argv);
    parse(argc, argv);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(scratch, sizeof scratch, "%s/hapt-fuzz-XXXXXX", stat("/dev/shm", &about) == 0 ? "/dev/shm" : "/tmp");
    if (option.corpus) list_corpus();
    if (shared == MAP_FAILED || seed_count == 0 || !mkdtemp(scratch)) {
        fprintf(stderr, "usage: fuzz [--inputs N] [--seed S] [--jobs J] [--kind NAME] [--only I] [--keep FOLDER] "
                        "[--crashes] CORPUS\n");
        return 2;
    }
    printf("seed %llu, %lld inputs from %d seeds\n", (unsigned long long)option.seed, (long long)option.inputs,
           seed_count);
    fflush(stdout);
    supervise();
    fuzz_remove(scratch);
    const int64_t total = print_counts();
    printf("%lld inputs, %d failed\n", (long long)total, (int)shared->failures);
    return shared->failures > 0 || total == 0;
}
