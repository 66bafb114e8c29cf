/* The process among its peers: ranks, logging and agreement. */
#include "hapt/env.h"

#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "hapt/deadline.h"
#include "hapt/stop.h"
#include "hapt/text.h"
#include "launch.h"

/* Opens /dev/null for closed standard streams. Otherwise the next opened file would get such a number, and messages
 * would be written into that file. */
static void open_standard_streams(void)
{
    for (int descriptor = 0; descriptor <= 2; descriptor++)
        if (fcntl(descriptor, F_GETFD) < 0 && open("/dev/null", O_RDWR) < 0) return;
}

void hapt_env_prepare(char **argv)
{
    open_standard_streams();
    prctl(PR_SET_NAME, program_invocation_short_name); /* after the execv below it is "exe" */
    if (getenv("GOMP_SPINCOUNT") || getenv("OMP_WAIT_POLICY")) return;
    setenv("GOMP_SPINCOUNT", "4000", 1);
    execv("/proc/self/exe", argv);
    /* If execv fails, the program continues, only slower on a shared core. */
}

enum { MAX_CPUS = 4096 };

/* The first hardware thread of the core of `cpu`; `cpu` itself if the system does not tell. */
static int first_sibling(int cpu)
{
    char path[96], list[64];
    int first;
    snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
    hapt_first_line(path, list, sizeof list);
    return sscanf(list, "%d", &first) == 1 && first >= 0 && first < MAX_CPUS ? first : cpu;
}

/* Counts the physical cores that the ranks of this node may use together. */
static enum hapt_status count_cores(struct hapt_env *env)
{
    unsigned char mine[MAX_CPUS / 8] = {0}, all[MAX_CPUS / 8] = {0};
    cpu_set_t *set = CPU_ALLOC(MAX_CPUS);
    const size_t bytes = CPU_ALLOC_SIZE(MAX_CPUS);
    if (!set) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted");
    CPU_ZERO_S(bytes, set);
    if (sched_getaffinity(0, bytes, set)) CPU_SET_S(0, bytes, set);
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
        if (!CPU_ISSET_S(cpu, bytes, set)) continue;
        const int core = first_sibling(cpu);
        mine[core / 8] |= (unsigned char)(1u << core % 8);
    }
    CPU_FREE(set);
    HAPT_MPI(MPI_Allreduce(mine, all, (int)sizeof mine, MPI_BYTE, MPI_BOR, env->node));
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) env->cores += all[cpu / 8] >> cpu % 8 & 1;
    return HAPT_OK;
}

int hapt_env_threads(const struct hapt_env *env, int asked)
{
    const int share = env->cores / env->node_size;
    return asked > 0 ? asked : share > 1 ? share : 1;
}

static enum hapt_status index_nodes(struct hapt_env *env)
{
    const int leader = env->node_rank == 0;
    int before = 0;
    HAPT_MPI(MPI_Exscan(&leader, &before, 1, MPI_INT, MPI_SUM, env->world));
    if (env->world_rank == 0) before = 0;
    HAPT_MPI(MPI_Allreduce(&leader, &env->node_count, 1, MPI_INT, MPI_SUM, env->world));
    env->node_index = before;
    HAPT_MPI(MPI_Bcast(&env->node_index, 1, MPI_INT, 0, env->node));
    return HAPT_OK;
}

static char (*host)[HAPT_HOSTNAME_CHARS]; /* [host_count] by world rank */
static int host_count;

const char *hapt_env_host(int world_rank)
{
    return world_rank >= 0 && world_rank < host_count ? host[world_rank] : "?";
}

static enum hapt_status name_hosts(const struct hapt_env *env)
{
    char mine[HAPT_HOSTNAME_CHARS] = "?";
    if (!host) host = calloc((size_t)env->world_size, sizeof *host);
    if (!host) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: host names of all ranks"));
    gethostname(mine, sizeof mine - 1);
    HAPT_MPI(MPI_Allgather(mine, sizeof mine, MPI_CHAR, host, sizeof mine, MPI_CHAR, env->world));
    host_count = env->world_size;
    return HAPT_OK;
}

/* mpirun's process, if the job spans hosts: mpirun waits forever for a host that it cannot reach. */
static struct {
    long process;
    int rank; /* the rank whose parent it is */
} launcher;

static enum hapt_status find_launcher(const struct hapt_env *env)
{
    const struct {
        long process;
        int rank;
    } mine = {-launch_parent(), env->world_rank};
    struct {
        long process;
        int rank;
    } first;
    if (env->node_count == 1) return HAPT_OK;
    HAPT_MPI(MPI_Allreduce(&mine, &first, 1, MPI_LONG_INT, MPI_MINLOC, env->world));
    launcher.process = -first.process;
    launcher.rank = first.rank;
    return HAPT_OK;
}

/* Extra time per rank: large jobs take longer to start and to end. */
#define TIMEOUT_A_RANK_S 0.05
#define MIN_TIMEOUT_S 5.0 /* an overloaded machine takes seconds to start its ranks */

static enum hapt_status start_mpi(struct hapt_env *env, int *argc, char ***argv)
{
    launch_set_environment();
    int provided = 0;
    HAPT_MPI(MPI_Init_thread(argc, argv, MPI_THREAD_MULTIPLE, &provided));
    HAPT_MPI(MPI_Comm_dup(MPI_COMM_WORLD, &env->world));
    HAPT_MPI(MPI_Comm_set_errhandler(env->world, MPI_ERRORS_RETURN));
    HAPT_MPI(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    HAPT_MPI(MPI_Comm_rank(env->world, &env->world_rank));
    HAPT_MPI(MPI_Comm_size(env->world, &env->world_size));
    HAPT_TRY(launch_check_size(env->world_size));
    if (provided < MPI_THREAD_MULTIPLE)
        return hapt_fail(HAPT_ERR_COMM, "use an MPI library built with MPI_THREAD_MULTIPLE",
                         "MPI provides only thread level %d", provided);
    HAPT_MPI(MPI_Comm_split_type(env->world, MPI_COMM_TYPE_SHARED, env->world_rank, MPI_INFO_NULL, &env->node));
    HAPT_MPI(MPI_Comm_set_errhandler(env->node, MPI_ERRORS_RETURN));
    HAPT_MPI(MPI_Comm_rank(env->node, &env->node_rank));
    HAPT_MPI(MPI_Comm_size(env->node, &env->node_size));
    HAPT_TRY(count_cores(env));
    HAPT_TRY(name_hosts(env));
    HAPT_TRY(index_nodes(env));
    return find_launcher(env);
}

static double alone_timeout_s; /* of an agreement's wait, if MPI failed on this rank */

enum hapt_status hapt_env_init(struct hapt_env *env, int *argc, char ***argv, double timeout_s)
{
    *env = (struct hapt_env){.start_s = hapt_time_s(),
                             .world = MPI_COMM_NULL,
                             .node = MPI_COMM_NULL,
                             .timeout_s = fmax(timeout_s, MIN_TIMEOUT_S)};
    alone_timeout_s = env->timeout_s;
    if (launch_is_launched())
        hapt_deadline_set("starting MPI on all ranks", env->timeout_s + TIMEOUT_A_RANK_S * (double)launch_size());
    const enum hapt_status status = start_mpi(env, argc, argv);
    hapt_deadline_clear();
    return status;
}

enum { MAX_RELEASE_HOOKS = 8 };
static void (*release_hook[MAX_RELEASE_HOOKS])(void);
static int release_hook_count;

void hapt_env_at_release(void (*function)(void))
{
    HAPT_ASSERT(release_hook_count < MAX_RELEASE_HOOKS);
    release_hook[release_hook_count++] = function;
}

void hapt_env_barrier(const struct hapt_env *env)
{
    MPI_Request request;
    int done = 0;
    if (env->world == MPI_COMM_NULL || env->world_size <= 1) return;
    int error = MPI_Ibarrier(env->world, &request);
    for (double pause_s = 1e-4; error == MPI_SUCCESS && !done; pause_s = pause_s < 5e-3 ? 1.5 * pause_s : pause_s) {
        error = MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (error == MPI_SUCCESS && !done) hapt_time_sleep_until(hapt_time_s() + pause_s);
    }
    if (error != MPI_SUCCESS) hapt_die(hapt_env_mpi(error, "waiting for all ranks")); /* they would wait for this one */
}

void hapt_env_release(struct hapt_env *env)
{
    int initialized = 0, finalized = 0;
    MPI_Initialized(&initialized);
    MPI_Finalized(&finalized);
    if (!initialized || finalized) return;
    if (env->world_size > 1)
        hapt_deadline_set("leaving MPI on all ranks", env->timeout_s + TIMEOUT_A_RANK_S * env->world_size);
    hapt_env_barrier(env);
    while (release_hook_count > 0) release_hook[--release_hook_count]();
    hapt_shared_release_newer(NULL);
    if (env->node != MPI_COMM_NULL) MPI_Comm_free(&env->node);
    if (env->world != MPI_COMM_NULL) MPI_Comm_free(&env->world);
    MPI_Finalize();
}

/* The failure that an agreement has reported, on this rank or another: hapt_die does not repeat it. */
static struct {
    _Atomic bool somewhere;
    char message[256]; /* this rank's message; "": it had none */
} reported;

bool hapt_env_leaves_together(void)
{
    return reported.somewhere;
}

void hapt_env_end_alone(const struct hapt_env *env, enum hapt_status status)
{
    if (status == HAPT_ERR_COMM && env->world_size > 1 && !hapt_env_leaves_together()) hapt_die(status);
}

static bool was_reported(void)
{
    const char *message = hapt_fail_message();
    return reported.somewhere && (!message[0] || !strncmp(message, reported.message, sizeof reported.message - 1));
}

static void print_failure(enum hapt_status status, int rank)
{
    if (status == HAPT_STOPPED) {
        fprintf(stderr, "hapt: stopped by a signal before training began; start again\n");
        return;
    }
    const char *message = hapt_fail_message(), *hint = hapt_fail_hint();
    char where[96] = "";
    if (rank > 0) snprintf(where, sizeof where, " (rank %d on host %s)", rank, hapt_env_host(rank));
    fprintf(stderr, "hapt: error: %s%s\n", message[0] ? message : hapt_status_name(status), where);
    if (hint[0]) fprintf(stderr, "hint: %s\n", hint);
    fflush(stderr);
}

static double agree_timeout_s;
static _Atomic int64_t agreements;

int64_t hapt_env_agreements(void)
{
    return agreements;
}

void hapt_env_set_agree_timeout(double seconds)
{
    agree_timeout_s = seconds;
}

/* A collective wait that sleeps instead of spinning, because a late rank may need this core. If MPI failed on this rank
 * alone, others may wait for its part of an earlier operation, so it does not wait for them for long. */
static int wait_sleeping(MPI_Request *request, enum hapt_status status)
{
    const double start_s = hapt_time_s();
    int done = 0;
    for (int round = 0;; round++) {
        const int error = MPI_Test(request, &done, MPI_STATUS_IGNORE);
        if (error != MPI_SUCCESS || done) return error;
        const double now_s = hapt_time_s();
        if (status == HAPT_ERR_COMM && now_s - start_s > alone_timeout_s) hapt_die(status);
        if (agree_timeout_s > 0 && now_s - start_s > agree_timeout_s) {
            hapt_fail(HAPT_ERR_COMM, "look for a stopped or overloaded host; --timeout allows longer waits",
                      "a rank did not reach the end of the phase within %.0f s of this one", agree_timeout_s);
            hapt_die(HAPT_ERR_COMM);
        }
        if (round < 20)
            sched_yield();
        else
            hapt_time_sleep_until(now_s + (now_s - start_s < 0.1 ? 1e-4 : 1e-3));
    }
}

static enum hapt_status agree(MPI_Comm comm, enum hapt_status status, bool quietly)
{
    int rank = 0, size = 1, world_size = 1;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &size);
    /* A stop is granted only if all ranks take part, since some ranks must not leave alone. */
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    if (size == 1 && world_size > 1) return status; /* one rank's share of a phase, on which all ranks agree later */
    if (status == HAPT_OK && size == world_size && hapt_stop_due()) status = HAPT_STOPPED;
    /* The lowest key wins: failures, then stops (no failures), then success. */
    const int key = status == HAPT_OK ? 2 * size : status == HAPT_STOPPED ? size + rank : rank;
    const int vote[2] = {key, (int)status};
    int result[2] = {2 * size, HAPT_OK};
    MPI_Request request;
    int error = MPI_Iallreduce(vote, result, 1, MPI_2INT, MPI_MINLOC, comm, &request);
    if (error == MPI_SUCCESS) error = wait_sleeping(&request, status);
    if (error != MPI_SUCCESS) {
        const enum hapt_status broken = hapt_env_mpi(error, "agreement of all ranks");
        if (size > 1) hapt_die(status == HAPT_OK ? broken : status); /* the other ranks would wait for this one */
        print_failure(broken, rank);
        return broken;
    }
    if (size == world_size) agreements++;
    const bool answer = quietly && (status == HAPT_ERR_INFEASIBLE || status == HAPT_ERR_INPUT);
    const bool mine = status != HAPT_OK && result[0] == key && !answer;
    if (mine) print_failure(status, rank);
    /* Failures of other ranks count as reported, too: they often follow from the first. */
    if (status != HAPT_OK && !answer) snprintf(reported.message, sizeof reported.message, "%s", hapt_fail_message());
    reported.somewhere = result[1] != HAPT_OK && !quietly;
    return (enum hapt_status)result[1];
}

enum hapt_status hapt_env_agree(MPI_Comm comm, enum hapt_status status)
{
    return agree(comm, status, false);
}

enum hapt_status hapt_env_agree_quietly(MPI_Comm comm, enum hapt_status status)
{
    return agree(comm, status, true);
}

/* The text of printf, printable: in `buffer`, or, if it is longer and there is memory, on the heap. So no text is lost
 * for lack of memory, but a long one may be cut. Release it with free_text. */
static char *make_text(char *buffer, size_t size, const char *format, va_list arguments)
{
    va_list again;
    va_copy(again, arguments);
    char *text = buffer;
    if (vsnprintf(buffer, size, format, arguments) >= (int)size && vasprintf(&text, format, again) < 0) text = buffer;
    va_end(again);
    hapt_text_make_printable(text, true);
    return text;
}

static void free_text(char *text, const char *buffer)
{
    if (text != buffer) free(text);
}

static void print(const struct hapt_env *env, FILE *stream, const char *prefix, const char *format, va_list arguments)
{
    char buffer[1024];
    if (env->world_rank != 0) return;
    char *text = make_text(buffer, sizeof buffer, format, arguments);
    fprintf(stream, "%s%s", prefix, text);
    fflush(stream);
    free_text(text, buffer);
}

void hapt_print(const struct hapt_env *env, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print(env, env->quiet ? stderr : stdout, "", format, arguments);
    va_end(arguments);
}

/* Columns that a UTF-8 text takes. */
static int columns(const char *text, const char *end)
{
    int count = 0;
    for (; text < end; text++) count += ((unsigned char)*text & 0xc0) != 0x80;
    return count;
}

/* One line, without its newline. A word that is too long stays whole. */
static void print_line(FILE *stream, const char *line, const char *end, int hang)
{
    const char *word = line;
    int used = 0;
    while (word < end) {
        const char *start = word; /* with the spaces before it */
        while (word < end && *word == ' ') word++;
        const char *text = word;
        while (word < end && *word != ' ') word++;
        if (used > hang && used + columns(start, word) > HAPT_PRINT_COLUMNS) {
            fprintf(stream, "\n%*s", hang, "");
            used = hang;
            start = text;
        }
        fwrite(start, 1, (size_t)(word - start), stream);
        used += columns(start, word);
    }
}

void hapt_print_wrapped(const struct hapt_env *env, int hang, const char *format, ...)
{
    FILE *stream = env->quiet ? stderr : stdout;
    va_list arguments;
    char buffer[1024];
    if (env->world_rank != 0) return;
    va_start(arguments, format);
    char *text = make_text(buffer, sizeof buffer, format, arguments);
    va_end(arguments);
    const char *line = text;
    for (const char *end; (end = strchr(line, '\n')); line = end + 1) {
        print_line(stream, line, end, hang);
        fputc('\n', stream);
    }
    print_line(stream, line, line + strlen(line), hang);
    fflush(stream);
    free_text(text, buffer);
}

void hapt_note(const struct hapt_env *env, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print(env, stderr, "hapt: ", format, arguments);
    va_end(arguments);
}

void hapt_warn(const struct hapt_env *env, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    print(env, stderr, "hapt: warning: ", format, arguments);
    va_end(arguments);
}

#define ABORT_S 10.0

void hapt_die(enum hapt_status status)
{
    static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
    int rank = 0;
    pthread_mutex_lock(&once); /* never unlocked: one thread ends the job */
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    /* When a launcher ends the job, the rank that failed first has reported the error already. */
    if (status != HAPT_ERR_COMM || !hapt_stop_terminated()) {
        if (!was_reported()) print_failure(status, rank);
        if (status == HAPT_ERR_COMM && launcher.process > 0)
            fprintf(stderr,
                    "hapt: if mpirun does not end now, it is waiting for an unreachable host: end it with kill -9 %ld "
                    "on host %s\n",
                    launcher.process, hapt_env_host(launcher.rank));
    }
    const int code = status == HAPT_OK ? HAPT_ERR_INTERNAL : (int)status;
    hapt_deadline_exit(code, ABORT_S); /* MPI_Abort itself may wait for unreachable hosts */
    MPI_Abort(MPI_COMM_WORLD, code);
    _exit(code);
}
