/*
 * The fuzzer: damaged files of every kind that hapt reads, read by hapt's own readers and commands inside this process (best one built
 * with sanitizers: make fuzz). Nothing may crash or hang; a failure is one line with a hint; and of the files that hapt writes itself,
 * all under checksums, none with changed bytes may be taken for something else than it was.
 *
 *   fuzz [--inputs N] [--seed S] [--jobs J] [--kind NAME] [--only I] [--keep FOLDER] [--crashes] CORPUS
 *
 * Input i is a function of seed and i alone: --only I repeats it. As in hapt the guard reads every file first; what it refuses is
 * refused (--crashes keeps what the HDF5 library dies of there). A process for each job runs the inputs, and where it dies the supervisor names the input, keeps it and starts another.
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
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "hapt/guard.h"
#include "hapt/h5.h"

enum { MOST_SEEDS = 200, MOST_JOBS = 64, PATH_CHARS = 512, MOST_BYTES = 1 << 20, MOST_FAILURES = 40, CPU_S = 60 };

enum outcome { ACCEPTED, REFUSED, BROKEN, CRASHED_GUARD, HUNG_GUARD, SAME, OTHER, OUTCOMES };
static const char *const outcome_name[OUTCOMES] = {"accepted", "refused", "by guard", "crash HDF5", "hang HDF5", "same though changed", "read as other"};

struct seed {
    enum fuzz_kind kind;
    char name[128];
    char path[PATH_CHARS];
    bool own;        /* hapt wrote it: everything in it is under checksums */
    bool regression;
    uint64_t content;
};

static struct {
    int64_t inputs, only;
    uint64_t seed;
    int jobs;
    enum fuzz_kind kind;
    const char *corpus, *keep;
    bool crashes;
} option = {.inputs = 1000, .only = -1, .seed = 1, .jobs = 1, .kind = FUZZ_KINDS, .keep = "."};

/* What a worker tells the supervisor. */
static struct shared {
    _Atomic int64_t current[MOST_JOBS];
    _Atomic int64_t count[FUZZ_KINDS][OUTCOMES];
    _Atomic int failures;
} *shared;

static char scratch[PATH_CHARS - 128];
static struct seed seed[MOST_SEEDS];
static int seed_count;
static FILE *console; /* the commands' own output goes elsewhere */

#ifdef __SANITIZE_ADDRESS__
const char *__asan_default_options(void);
const char *__asan_default_options(void)
{
    return "detect_leaks=0:allocator_may_return_null=1:hard_rss_limit_mb=6000:max_allocation_size_mb=8192";
}
#endif

/* ---- Files ---- */

static size_t load(const char *path, unsigned char *data, size_t room)
{
    FILE *file = fopen(path, "rb");
    const size_t size = file ? fread(data, 1, room, file) : 0;
    if (file) fclose(file);
    return size;
}

static void store(const char *path, const unsigned char *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    if (!file || fwrite(data, 1, size, file) != size || fclose(file)) {
        fprintf(console, "fuzz: cannot write %s: %s\n", path, strerror(errno));
        _exit(1);
    }
}

static void copy(const char *from, const char *to)
{
    static unsigned char data[2 * MOST_BYTES];
    store(to, data, load(from, data, sizeof data));
}

static bool is_folder(const char *path)
{
    struct stat about;
    return stat(path, &about) == 0 && S_ISDIR(about.st_mode);
}

/* A file, or a folder of files. */
static void copy_all(const char *from, const char *to)
{
    if (!is_folder(from)) {
        copy(from, to);
        return;
    }
    mkdir(to, 0777);
    DIR *listing = opendir(from);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char source[2 * PATH_CHARS], target[2 * PATH_CHARS];
        if (entry->d_name[0] == '.') continue;
        snprintf(source, sizeof source, "%s/%s", from, entry->d_name);
        snprintf(target, sizeof target, "%s/%s", to, entry->d_name);
        copy(source, target);
    }
    if (listing) closedir(listing);
}

/* ---- Corpus ---- */

static void add_seed(const char *folder, const char *name, bool own)
{
    struct seed *made = &seed[seed_count];
    if (seed_count == MOST_SEEDS || fuzz_kind_of(name) == FUZZ_KINDS) return;
    *made = (struct seed){.kind = fuzz_kind_of(name), .regression = strncmp(name, "regression-", 11) == 0};
    made->own = own && !made->regression && made->kind != FUZZ_CLUSTER;
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

/* The same content as other programs write it: no checksum stops damage on its way into the libraries. */
static void add_foreign(void)
{
    char folder[PATH_CHARS], path[2 * PATH_CHARS];
    snprintf(folder, sizeof folder, "%s/foreign", scratch);
    mkdir(folder, 0777);
    for (int i = 0, count = seed_count; i < count; i++) {
        if (!seed[i].own || seed[i].kind == FUZZ_CHECKPOINT) continue;
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
    copy_all(input, path);
}

__attribute__((format(printf, 2, 3))) static void fail(const struct seed *from, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(console, "fuzz: input %lld (seed %llu, from %s): ", (long long)current, (unsigned long long)option.seed, from->path);
    vfprintf(console, format, arguments);
    fprintf(console, "\n");
    fflush(console);
    va_end(arguments);
    shared->failures++;
    keep_input(from, "failed");
}

/* The record of a failure, and what a user saw of it. */
static void check_failure(const struct seed *from, enum hapt_status status, bool printed)
{
    char text[4096];
    const ssize_t bytes = pread(STDERR_FILENO, text, sizeof text - 1, 0);
    const char *message = hapt_fail_message();
    text[bytes > 0 ? bytes : 0] = '\0';
    if (status == HAPT_OK) return;
    if (status != HAPT_ERR_INPUT && status != HAPT_ERR_INFEASIBLE && status != HAPT_ERR_MEMORY && status != HAPT_ERR_USAGE)
        fail(from, "ends with %s: %s", hapt_status_name(status), message);
    else if (!message[0])
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

/* `flipped`: bytes of a file under checksums. Returns whether the file was accepted. */
static bool judge(const struct fuzz_place *place, const struct seed *from, const char *path, bool flipped)
{
    uint64_t content = 0;
    const struct itimerval limit = {.it_value = {.tv_sec = CPU_S}};
    setitimer(ITIMER_PROF, &limit, NULL);
    const enum hapt_status status = fuzz_read(place, from->kind, path, &content);
    enum outcome outcome = outcome_of(status);
    check_failure(from, status, false);
    hapt_fail_reset();
    if (status == HAPT_OK && content != from->content) outcome = OTHER;
    if (status == HAPT_OK && content == from->content) outcome = SAME;
    if (flipped && outcome == OTHER) fail(from, "changed bytes of a file under checksums are read as something else");
    if (option.crashes && (outcome == CRASHED_GUARD || outcome == HUNG_GUARD)) keep_input(from, outcome == CRASHED_GUARD ? "crash" : "hang");
    shared->count[from->kind][outcome]++;
    if (status == HAPT_OK || fuzz_chance(place->random, 0.2)) {
        if (ftruncate(STDERR_FILENO, 0)) {}
        const enum hapt_status used = fuzz_use(place, from->kind, path);
        check_failure(from, used, true);
        hapt_fail_reset();
    }
    const ssize_t open_objects = H5Fget_obj_count((hid_t)H5F_OBJ_ALL, H5F_OBJ_ALL);
    if (open_objects > 0) fail(from, "%ld objects of HDF5 stay open", (long)open_objects);
    return status == HAPT_OK;
}

/* The file of the input that is changed. */
static void choose_target(uint64_t *random, const struct seed *from, const char *input, char target[PATH_CHARS])
{
    static const char *const part[] = {"/manifest.h5", "/shard-0000.h5", "/shard-0001.h5"};
    snprintf(target, PATH_CHARS, "%s%s", input, is_folder(from->path) ? part[fuzz_below(random, 3)] : "");
}

static bool mutate(uint64_t *random, const struct seed *from, const char *input)
{
    static unsigned char data[2 * MOST_BYTES];
    char target[PATH_CHARS];
    bool flipped = false;
    copy_all(from->path, input);
    choose_target(random, from, input, target);
    const double way = hapt_random_unit(random);
    if (from->kind != FUZZ_CLUSTER && !from->regression && way < 0.5) { /* the library would die of regressions here */
        fuzz_tables(random, target);
    } else {
        size_t size = load(target, data, MOST_BYTES);
        flipped = from->own && way < 0.8;
        if (flipped)
            fuzz_flip(random, data, size);
        else if (from->kind == FUZZ_CLUSTER && way < 0.85)
            size = fuzz_json(random, (char *)data, size, sizeof data);
        else
            size = fuzz_bytes(random, data, size, sizeof data);
        store(target, data, size);
    }
    if (from->kind == FUZZ_CHECKPOINT && !flipped && fuzz_chance(random, 0.7)) fuzz_repair(input);
    return flipped;
}

/* Each input is a file of its own to the guard, though they come within one tick of the file system's clock. */
static void stamp(const char *input, int64_t number)
{
    const struct timespec times[2] = {{.tv_sec = 1, .tv_nsec = 0}, {.tv_sec = 1000 + number / 1000000000, .tv_nsec = number % 1000000000}};
    static const char *const part[] = {"", "/manifest.h5", "/shard-0000.h5", "/shard-0001.h5"};
    for (int i = 0; i < 4; i++) {
        char path[2 * PATH_CHARS];
        snprintf(path, sizeof path, "%s%s", input, part[i]);
        utimensat(AT_FDCWD, path, times, 0);
    }
}

static const struct seed *choose_seed(uint64_t *random)
{
    for (;;) {
        const enum fuzz_kind kind = option.kind < FUZZ_KINDS ? option.kind : (enum fuzz_kind)fuzz_below(random, FUZZ_KINDS);
        const int start = fuzz_below(random, seed_count);
        for (int i = 0; i < seed_count; i++)
            if (seed[(start + i) % seed_count].kind == kind) return &seed[(start + i) % seed_count];
    }
}

static void remove_all(const char *path)
{
    DIR *listing = opendir(path);
    for (struct dirent *entry; listing && (entry = readdir(listing));) {
        char inner[PATH_CHARS + 300];
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, "..")) continue;
        snprintf(inner, sizeof inner, "%s/%s", path, entry->d_name);
        remove_all(inner);
    }
    if (listing) closedir(listing);
    remove(path);
}

static void run_input(struct fuzz_place *place, int64_t number)
{
    uint64_t random = hapt_hash(option.seed, &number, sizeof number);
    char input[PATH_CHARS];
    current = number;
    snprintf(input, sizeof input, "%s/input", scratch);
    remove_all(input);
    if (ftruncate(STDERR_FILENO, 0)) {}
    const struct seed *from = choose_seed(&random);
    const bool flipped = mutate(&random, from, input);
    stamp(input, number);
    place->random = &random;
    judge(place, from, input, flipped);
}

/* ---- Workers ---- */

/* Every seed as it is: those of the corpus must be read, regressions must not crash. */
static void check_seeds(struct fuzz_place *place, bool report)
{
    for (int i = 0; i < seed_count; i++) {
        uint64_t random = 1;
        place->random = &random;
        current = -1 - i;
        const enum hapt_status status = fuzz_read(place, seed[i].kind, seed[i].path, &seed[i].content);
        if (status != HAPT_OK && !seed[i].regression && report)
            fail(&seed[i], "a seed is refused: %s (has a format changed? tests/fuzz/make-corpus writes the seeds anew)", hapt_fail_message());
        hapt_fail_reset();
        if (!report || !seed[i].regression) continue;
        for (int k = 0; k < 8; k++) fuzz_use(place, seed[i].kind, seed[i].path), hapt_fail_reset();
    }
}

static void run_worker(int job, int64_t first)
{
    struct hapt_env env;
    char output[PATH_CHARS], errors[PATH_CHARS];
    console = fdopen(dup(STDERR_FILENO), "w");
    snprintf(scratch + strlen(scratch), sizeof scratch - strlen(scratch), "/job-%d", job);
    mkdir(scratch, 0777);
    snprintf(output, sizeof output, "%s/output.h5", scratch);
    snprintf(errors, sizeof errors, "%s/errors", scratch);
    const int sink = open(errors, O_RDWR | O_CREAT | O_TRUNC | O_APPEND, 0666), nowhere = open("/dev/null", O_RDWR);
    dup2(sink, STDERR_FILENO), dup2(nowhere, STDOUT_FILENO), dup2(nowhere, STDIN_FILENO);
    hapt_guard_start(NULL, hapt_h5_rehearse);
    if (hapt_env_init(&env, NULL, NULL) != HAPT_OK) {
        fprintf(console, "fuzz: %s\n", hapt_fail_message());
        _exit(1);
    }
    struct fuzz_place place = {.env = &env, .corpus = option.corpus, .output = output};
    add_foreign();
    check_seeds(&place, job == 0 && first == 0);
    for (int64_t i = first; i < option.inputs && shared->failures < MOST_FAILURES; i += option.jobs) {
        shared->current[job] = i;
        run_input(&place, i);
    }
    hapt_env_release(&env);
    hapt_guard_stop();
    _exit(0);
}

static pid_t start_worker(int job, int64_t first)
{
    shared->current[job] = first - option.jobs;
    const pid_t worker = fork();
    if (worker == 0) run_worker(job, first);
    return worker;
}

/* What the sanitizers, or hapt, said last. */
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
            WIFSIGNALED(status) && WTERMSIG(status) == SIGPROF ? " (it does not come to an end)" : "");
    show_errors(job);
    snprintf(input, sizeof input, "%s/job-%d/input", scratch, job);
    snprintf(path, sizeof path, "%s/failed-%lld", option.keep, number);
    copy_all(input, path);
    fprintf(stderr, "    kept as %s\n", path);
    shared->failures++;
}

static void supervise(void)
{
    pid_t worker[MOST_JOBS];
    int running = option.jobs;
    for (int job = 0; job < option.jobs; job++) worker[job] = start_worker(job, option.only >= 0 ? option.only : job);
    while (running > 0) {
        int status;
        const pid_t gone = waitpid(-1, &status, 0);
        if (gone < 0 && errno != EINTR) break;
        for (int job = 0; job < option.jobs; job++) {
            if (worker[job] != gone) continue;
            worker[job] = 0;
            if (!(WIFEXITED(status) && WEXITSTATUS(status) == 0)) report_death(job, status);
            const int64_t next = shared->current[job] + option.jobs;
            if ((WIFEXITED(status) && WEXITSTATUS(status) == 0) || next >= option.inputs || shared->failures >= MOST_FAILURES)
                running--;
            else
                worker[job] = start_worker(job, next);
        }
    }
}

static int64_t print_counts(void)
{
    int64_t total = 0, tables = 0;
    printf("%-12s %10s", "", "inputs");
    for (int o = 0; o < OUTCOMES; o++) printf("  %s", o == ACCEPTED ? "" : outcome_name[o]);
    printf("\n");
    for (int kind = 0; kind < FUZZ_KINDS; kind++) {
        int64_t inputs = 0;
        for (int o = 0; o < OUTCOMES; o++) inputs += shared->count[kind][o];
        if (inputs == 0) continue;
        printf("%-12s %10lld", fuzz_kind_name((enum fuzz_kind)kind), (long long)inputs);
        for (int o = 1; o < OUTCOMES; o++) printf("  %*lld", (int)strlen(outcome_name[o]), (long long)shared->count[kind][o]);
        printf("\n");
        total += inputs;
        tables += shared->count[kind][OTHER];
    }
    /* Values that were changed and checksummed anew are read as what they are now: else nobody compares. */
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
        if (!strcmp(argv[i], "--inputs")) option.inputs = atoll(value), i++;
        else if (!strcmp(argv[i], "--seed")) option.seed = *value ? strtoull(value, NULL, 10) : (uint64_t)time(NULL), i++;
        else if (!strcmp(argv[i], "--jobs")) option.jobs = atoi(value), i++;
        else if (!strcmp(argv[i], "--only")) option.only = atoll(value), i++;
        else if (!strcmp(argv[i], "--keep")) option.keep = value, i++;
        else if (!strcmp(argv[i], "--crashes")) option.crashes = true;
        else if (!strcmp(argv[i], "--kind")) {
            char name[64];
            snprintf(name, sizeof name, "%s-", value);
            option.kind = fuzz_kind_of(name), i++;
        } else option.corpus = argv[i];
    }
    if (option.only >= 0) option.inputs = option.only + 1, option.jobs = 1;
    if (option.jobs < 1 || option.jobs > MOST_JOBS) option.jobs = 1;
}

int main(int argc, char **argv)
{
    struct stat about;
    parse(argc, argv);
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    snprintf(scratch, sizeof scratch, "%s/hapt-fuzz-XXXXXX", stat("/dev/shm", &about) == 0 ? "/dev/shm" : "/tmp");
    if (option.corpus) list_corpus();
    if (shared == MAP_FAILED || seed_count == 0 || !mkdtemp(scratch)) {
        fprintf(stderr, "usage: fuzz [--inputs N] [--seed S] [--jobs J] [--kind NAME] [--only I] [--keep FOLDER] [--crashes] CORPUS\n");
        return 2;
    }
    printf("seed %llu, %lld inputs from %d seeds\n", (unsigned long long)option.seed, (long long)option.inputs, seed_count);
    fflush(stdout);
    supervise();
    remove_all(scratch);
    const int64_t total = print_counts();
    printf("%lld inputs, %d failed\n", (long long)total, (int)shared->failures);
    return shared->failures > 0 || total == 0;
}
