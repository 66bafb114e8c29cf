/* hapt doctor: reports the build, the ranks and their hosts; lists problems and what to do about each. */
#include <math.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "hapt/device.h"
#include "hapt/host.h"
#include "hapt/solve.h"
#include "hapt/version.h"
#include "json_print.h"
#include "phases.h"

/* Facts that only the rank itself can query. */
struct rank_facts {
    int cpus;                  /* hardware threads that it may use */
    double locked_limit;       /* byte; infinite: no limit */
    double memory_available;   /* byte, of its host */
    double shared_memory_free; /* byte, of its host's /dev/shm; negative: none */
};

struct doctor {
    struct hapt_env *env;
    struct hapt_config *config;
    const struct hapt_hosts *hosts;
    const struct rank_facts *facts;     /* [world_size] */
    const struct hapt_cluster *cluster; /* NULL without --cluster */
    int threads;                        /* compute threads per rank */
    json_t *sections;                   /* object of objects of text */
    json_t *problems;                   /* list of {"what", "do", "prevents"} */
    enum hapt_status status;            /* of the first problem that prevents work */
};

static void add_fact(struct doctor *doctor, const char *section, const char *name, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void add_fact(struct doctor *doctor, const char *section, const char *name, const char *format, ...)
{
    char text[1024];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (!json_object_get(doctor->sections, section)) json_object_set_new(doctor->sections, section, json_object());
    json_object_set_new(json_object_get(doctor->sections, section), name, json_string(text));
}

/* `prevents`: the status that a run would end with; HAPT_OK: it would run, with drawbacks. */
static void add_problem(struct doctor *doctor, enum hapt_status prevents, const char *remedy, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
static void add_problem(struct doctor *doctor, enum hapt_status prevents, const char *remedy, const char *format, ...)
{
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    json_array_append_new(doctor->problems,
                          json_pack("{s:s, s:s, s:b}", "what", text, "do", remedy, "prevents", prevents != HAPT_OK));
    if (doctor->status == HAPT_OK) doctor->status = prevents;
}

static double free_space(const char *path)
{
    struct statvfs file_system;
    if (statvfs(path, &file_system) != 0) return -1;
    return (double)file_system.f_bavail * (double)file_system.f_frsize;
}

static struct rank_facts collect_facts(void)
{
    struct rank_facts facts = {.cpus = 1};
    cpu_set_t mask;
    struct rlimit limit;
    if (sched_getaffinity(0, sizeof mask, &mask) == 0) facts.cpus = CPU_COUNT(&mask);
    if (getrlimit(RLIMIT_MEMLOCK, &limit) == 0)
        facts.locked_limit = limit.rlim_cur == RLIM_INFINITY ? (double)INFINITY : (double)limit.rlim_cur;
    facts.memory_available = hapt_memory_available();
    facts.shared_memory_free = free_space("/dev/shm");
    return facts;
}

static void examine_versions(struct doctor *doctor)
{
    char mpi[MPI_MAX_LIBRARY_VERSION_STRING] = "";
    int length, level = 0;
    MPI_Get_library_version(mpi, &length);
    mpi[strcspn(mpi, "\n")] = '\0';
    MPI_Query_thread(&level);
    add_fact(doctor, "versions", "hapt", "%s", HAPT_VERSION);
    add_fact(doctor, "versions", "compiler", "%s", __VERSION__);
    add_fact(doctor, "versions", "MPI", "%.200s", mpi);
    add_fact(doctor, "versions", "MPI threads", "%s", level >= MPI_THREAD_MULTIPLE ? "multiple" : "less than multiple");
    const char *hdf5 = strrchr(hapt_h5_library_version(), ' '); /* text: "HDF5 library version: ..." */
    add_fact(doctor, "versions", "HDF5", "%s, %s", hdf5 ? hdf5 + 1 : hapt_h5_library_version(),
             hapt_h5_library_is_parallel() ? "parallel" : "serial (enough: one rank writes a file)");
    add_fact(doctor, "versions", "hwloc", "%s", hapt_host_library_version());
    add_fact(doctor, "versions", "jansson", "%s", jansson_version_str());
    if (level < MPI_THREAD_MULTIPLE)
        add_problem(doctor, HAPT_OK, "use an MPI library built with MPI_THREAD_MULTIPLE",
                    "MPI does not support several threads, so communication cannot overlap computation");
}

static void examine_processor(struct doctor *doctor)
{
    static const char *const known[] = {"sse4_2",      "avx",      "avx2",  "fma", "avx512f",
                                        "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16"};
    const struct hapt_host *host = &doctor->hosts->host[doctor->hosts->host_of_rank[0]];
    char flags[8192], found[256] = "", rate[2][32];
    hapt_host_cpu_flags(flags, sizeof flags);
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        char word[24];
        snprintf(word, sizeof word, " %s ", known[i]);
        if (strstr(flags, word)) strncat(found, word + (found[0] ? 0 : 1), sizeof found - strlen(found) - 1);
        if (found[0] && found[strlen(found) - 1] == ' ') found[strlen(found) - 1] = '\0';
    }
    add_fact(doctor, "processor", "model", "%s", host->cpu_model[0] ? host->cpu_model : "unknown");
    add_fact(doctor, "processor", "features", "%s", found[0] ? found : "none of those that hapt uses");
    add_fact(doctor, "processor", "peak of a core", "%s fp32, %s bf16 (estimated: clock x vector units)",
             hapt_units_flops(host->core_flops[HAPT_F32], rate[0]),
             hapt_units_flops(host->core_flops[HAPT_BF16], rate[1]));
    if (strstr(flags, " sse4_2 ") && !strstr(flags, " avx2 "))
        add_problem(doctor, HAPT_OK,
                    "use a newer processor, or start the virtual machine with the host's processor (-cpu host)",
                    "the processor has no AVX2: computation takes several times as long");
}

/* With a slowdown, several ranks can share a core; examine_cluster checks whether the cores are enough. */
static bool has_slowdown(const struct doctor *doctor)
{
    for (int i = 0; doctor->cluster && i < doctor->cluster->count; i++)
        if (doctor->cluster->subcluster[i].device.slowdown > 1) return true;
    return false;
}

/* Checks the ranks and cores of a host, and the binding by the launcher. */
static void examine_binding(struct doctor *doctor, int h, const char *section)
{
    const struct hapt_host *host = &doctor->hosts->host[h];
    int narrow = -1, narrow_count = 0;
    for (int rank = 0; rank < doctor->env->world_size; rank++) {
        if (doctor->hosts->host_of_rank[rank] != h || host->faked) continue;
        /* A rank has compute threads and one communication thread, which mostly sleeps. */
        const int cpus = doctor->facts[rank].cpus;
        if (cpus >= host->threads_unbound || cpus > doctor->threads) continue;
        if (narrow_count++ == 0) narrow = rank;
    }
    add_fact(doctor, section, "cores", "%d for %d rank%s, %.3g each%s", host->cores, host->ranks,
             host->ranks > 1 ? "s" : "", hapt_host_cores_per_rank(host), narrow_count ? "; bound by the launcher" : "");
    if (host->ranks > host->cores && !has_slowdown(doctor))
        add_problem(doctor, HAPT_OK, "start at most one rank per core (more are fine for rehearsals with slowdown)",
                    "host %s: %d ranks share %d core%s", host->name, host->ranks, host->cores,
                    host->cores > 1 ? "s" : "");
    if (narrow_count && host->threads_unbound > 1)
        add_problem(doctor, HAPT_OK, "start with mpirun --bind-to none (or --map-by slot:PE=2), srun --cpu-bind=none",
                    "host %s: %d rank%s bound (rank %d to %d core%s), so compute and communication threads share cores",
                    host->name, narrow_count, narrow_count > 1 ? "s are" : " is", narrow, doctor->facts[narrow].cpus,
                    doctor->facts[narrow].cpus > 1 ? "s" : "");
}

static void examine_memory(struct doctor *doctor, int h, const char *section, const struct rank_facts *facts)
{
    const struct hapt_host *host = &doctor->hosts->host[h];
    char total[32], available[32], space[32], locked[32];
    add_fact(doctor, section, "memory", "%s, %s available", hapt_units_bytes(host->memory_bytes, total),
             hapt_units_bytes(fmin(facts->memory_available, host->memory_bytes), available));
    add_fact(doctor, section, "shared memory", "%s",
             facts->shared_memory_free < 0 ? "no /dev/shm" : hapt_units_bytes(facts->shared_memory_free, space));
    const bool unlimited = facts->locked_limit > 1e18;
    add_fact(doctor, section, "locked memory", "%s",
             unlimited ? "unlimited" : hapt_units_bytes(facts->locked_limit, locked));
    if (host->ranks > 1 && facts->shared_memory_free < 16e6 * host->ranks)
        add_problem(
            doctor, HAPT_OK, "enlarge it: mount -o remount,size=1G /dev/shm (containers: --shm-size=1g)",
            "host %s: /dev/shm has less than 16 MB for each of its %d ranks, too little for messages between them",
            host->name, host->ranks);
    bool fabric = host->gpu_count > 0;
    for (int n = 0; n < host->nic_count; n++) fabric = fabric || strncmp(host->nic[n].name, "e", 1) != 0;
    if (fabric && !unlimited && facts->locked_limit < 1e9)
        add_problem(doctor, HAPT_OK, "raise it: ulimit -l unlimited (limits.conf, or LimitMEMLOCK of slurmd)",
                    "host %s: only %s of memory may be locked, too little for InfiniBand and GPUs", host->name, locked);
}

static void examine_devices(struct doctor *doctor, int h, const char *section)
{
    const struct hapt_host *host = &doctor->hosts->host[h];
    const struct hapt_backend *cuda = hapt_backend_find("cuda");
    const bool loaded = cuda && cuda->libraries && cuda->libraries(); /* this build is for GPUs */
    char rate[32], doubt[192];
    for (int g = 0; g < host->gpu_count; g++) {
        char name[24];
        snprintf(name, sizeof name, "GPU %d", g);
        const struct hapt_host_gpu *gpu = &host->gpu[g];
        add_fact(doctor, section, name, "%s%s%s%s%s%s%s", gpu->name, gpu->spec[0] ? ", planned as " : "", gpu->spec,
                 gpu->local_cores[0] ? ", near threads " : "", gpu->local_cores, gpu->local_nics[0] ? ", NIC " : "",
                 gpu->local_nics);
        if (hapt_host_gpu_mismatch(gpu, doubt))
            add_problem(
                doctor, HAPT_OK,
                "check for MIG slices and lowered clocks (nvidia-smi), or describe the device in a cluster file "
                "(hapt help topology)",
                "host %s, GPU %d: %s", host->name, g, doubt);
    }
    for (int n = 0; n < host->nic_count; n++) {
        char name[40];
        snprintf(name, sizeof name, "NIC %s", host->nic[n].name);
        add_fact(doctor, section, name, "%s",
                 host->nic[n].bandwidth > 0 ? hapt_units_bandwidth(host->nic[n].bandwidth, rate) : "speed unknown");
    }
    if (host->gpu_count > host->gpus_usable)
        add_problem(doctor, loaded && !host->faked ? HAPT_ERR_INPUT : HAPT_OK,
                    hapt_backend_find("cuda") ? "see the back ends above for what is missing"
                                              : "this build computes on CPUs only; plan for GPUs with a cluster file",
                    "host %s: %d of its %d GPUs cannot be used", host->name, host->gpu_count - host->gpus_usable,
                    host->gpu_count);
    for (int other = 0; other < h; other++)
        if (strcmp(doctor->hosts->host[other].name, host->name) == 0)
            add_problem(doctor, HAPT_ERR_COMM, "give every machine or container its own host name",
                        "two hosts are called %s: MPI may take them for one machine and crash", host->name);
}

static void examine_hosts(struct doctor *doctor)
{
    for (int h = 0; h < doctor->hosts->count; h++) {
        int first = 0;
        char section[96];
        snprintf(section, sizeof section, "host %s", doctor->hosts->host[h].name);
        while (doctor->hosts->host_of_rank[first] != h) first++;
        if (doctor->hosts->host[h].fake_failed)
            add_problem(doctor, HAPT_OK, "correct or unset these variables",
                        "host %s: hwloc cannot use HWLOC_XMLFILE or HWLOC_SYNTHETIC; this is the real machine",
                        doctor->hosts->host[h].name);
        examine_binding(doctor, h, section);
        examine_memory(doctor, h, section, &doctor->facts[first]);
        examine_devices(doctor, h, section);
    }
}

static void examine_backends(struct doctor *doctor)
{
    const struct hapt_backend *backend;
    for (int i = 0; (backend = hapt_backend_at(i)); i++) {
        const char *reason = "";
        const int count = backend->device_count(&reason);
        const char *libraries = backend->libraries ? backend->libraries() : NULL;
        add_fact(doctor, "back ends", backend->name, "%d device%s%s%s (%s)", count, count == 1 ? "" : "s",
                 count == 0 && reason && *reason ? ": "
                 : libraries                     ? ", "
                                                 : "",
                 count == 0 && reason && *reason ? reason
                 : libraries                     ? libraries
                                                 : "",
                 backend->description);
    }
    if (!hapt_backend_find("cuda")) add_fact(doctor, "back ends", "cuda", "not in this build");
}

/* Lists the library files that back ends load. Without a driver none are loaded. */
static void examine_libraries(struct doctor *doctor)
{
    const struct hapt_backend *backend;
    const struct hapt_library *library;
    for (int i = 0; (backend = hapt_backend_at(i)); i++) {
        char section[64];
        const char *reason;
        snprintf(section, sizeof section, "libraries of %s", backend->name);
        for (int l = 0; backend->loaded_library && (library = backend->loaded_library(l)); l++) {
            add_fact(doctor, section, library->name, "%s%s",
                     library->path ? "" : "missing: ", library->path ? library->path : library->missing_reason);
            if (!library->path && (library->needed || backend->device_count(&reason) > 0))
                add_problem(doctor, library->needed ? HAPT_ERR_INPUT : HAPT_OK, library->hint, "%s",
                            library->missing_reason);
        }
    }
}

/* Solves an assignment of SIZE to SIZE at the costs (i + 1) (j + 1): large enough for PETSc/TAO. *right: the answer is
 * the sum of (i + 1) (SIZE - i), since the largest factors meet the smallest (rearrangement inequality). */
static enum hapt_status try_solver(struct hapt_arena *arena, struct hapt_lp_solution *solution, bool *right)
{
    enum { SIZE = 20 };
    struct hapt_lp *lp;
    double least = 0;
    HAPT_TRY(hapt_lp_create(arena, SIZE * SIZE, 2 * SIZE, 2 * SIZE * SIZE, &lp));
    for (int i = 0; i < SIZE; i++) {
        int row[SIZE], column[SIZE];
        double one[SIZE];
        for (int j = 0; j < SIZE; j++) {
            row[j] = i * SIZE + j;
            column[j] = j * SIZE + i;
            one[j] = 1;
            lp->cost[i * SIZE + j] = (i + 1) * (j + 1);
        }
        hapt_lp_add_row(lp, 1, 1, SIZE, row, one);
        hapt_lp_add_row(lp, 1, 1, SIZE, column, one);
        least += (i + 1) * (SIZE - i);
    }
    HAPT_TRY(hapt_lp_solve(lp, HAPT_LP_AUTO, arena, solution));
    *right = solution->result == HAPT_LP_OPTIMAL && fabs(solution->objective - least) < 1e-6 * least;
    return HAPT_OK;
}

/* The solvers of linear programs (sharding ratios): which of them answers. */
static void examine_solvers(struct doctor *doctor)
{
    const char *missing = "", *version = hapt_lp_petsc_version(&missing);
    struct hapt_lp_solution solution;
    struct hapt_arena scratch;
    bool right = false;
    hapt_arena_init(&scratch);
    const enum hapt_status status = try_solver(&scratch, &solution, &right);
    hapt_arena_release(&scratch);
    add_fact(doctor, "solvers", "tao", "%s", version ? version : missing);
    if (status == HAPT_OK && right) {
        add_fact(doctor, "solvers", "used", "%s solved an assignment of 400 unknowns", solution.solver);
        return;
    }
    hapt_fail_reset();
    add_problem(doctor, HAPT_ERR_INTERNAL, "report this",
                "no solver finds the optimum of an assignment of 400 unknowns");
}

/* Checks the folder that runs write to: outputs, or the current folder if that does not exist. */
static void examine_disk(struct doctor *doctor)
{
    const char *folder = access("outputs", F_OK) == 0 ? "outputs" : ".";
    const double space = free_space(folder);
    char text[32];
    add_fact(doctor, "disk", folder, "%s free", space < 0 ? "unknown" : hapt_units_bytes(space, text));
    if (access(folder, W_OK) != 0)
        add_problem(doctor, HAPT_ERR_IO, "run in a folder that you can write to, or give another --output",
                    "%s cannot be written: %m", folder);
    else if (space >= 0 && space < 1e9)
        add_problem(doctor, HAPT_OK, "free some space, or give an --output on another disk",
                    "only %s are free for runs and checkpoints", text);
}

/* For a rehearsal on CPUs: the computation with slowdown must fit the cores, and the memory limits the host. */
static void examine_cluster(struct doctor *doctor)
{
    const struct hapt_cluster *cluster = doctor->cluster;
    if (!cluster) return;
    add_fact(doctor, "cluster", "file", "%s", hapt_config_text(doctor->config, "cluster"));
    add_fact(doctor, "cluster", "devices", "%d in %d subclusters, %d ranks", cluster->rank_count, cluster->count,
             doctor->env->world_size);
    const bool bound = cluster->subcluster_of_rank != NULL;
    for (int h = 0; h < (bound ? doctor->hosts->count : 1); h++) {
        const struct hapt_host *host = &doctor->hosts->host[h];
        double busy = 0, memory = 0;
        bool rehearsal = false;
        for (int i = 0; i < cluster->count; i++) {
            const struct hapt_subcluster *own = &cluster->subcluster[i];
            if (strcmp(own->device.backend, "cpu") != 0) continue;
            for (int d = 0; d < own->nodes * own->devices_per_node; d++) {
                if (bound && doctor->hosts->host_of_rank[own->ranks[d]] != h) continue;
                busy += 1 / own->device.slowdown;
                if (own->device.memory_capped) memory += own->device.memory_bytes;
                rehearsal = rehearsal || own->device.slowdown > 1;
            }
        }
        if (busy > 0) add_fact(doctor, "cluster", host->name, "needs %.3g of %d cores", busy, host->cores);
        if (rehearsal && busy > 0.7 * host->cores)
            add_problem(doctor, HAPT_OK, "raise the slowdowns in the cluster file, or spread its ranks over more cores",
                        "host %s: the rehearsed devices need %.2f cores, more than 70 %% of %d", host->name, busy,
                        host->cores);
        if (memory > host->memory_bytes)
            add_problem(doctor, HAPT_OK, "lower \"memory\" in the cluster file, or use fewer ranks on a host",
                        "host %s: the memory limits of its ranks add up to more than its memory", host->name);
    }
    if (!bound)
        add_problem(doctor, HAPT_OK, "start one rank for each device, or plan on paper",
                    "the cluster file has %d devices, but there are %d ranks", cluster->rank_count,
                    doctor->env->world_size);
}

static void print_text(const struct doctor *doctor)
{
    const struct hapt_env *env = doctor->env;
    const char *section, *name;
    json_t *facts, *value;
    size_t i;
    json_object_foreach(doctor->sections, section, facts)
    {
        hapt_print(env, "%s\n", section);
        json_object_foreach(facts, name, value) hapt_print(env, "  %-18s %s\n", name, json_string_value(value));
    }
    if (json_array_size(doctor->problems) == 0) hapt_print(env, "no problems found\n");
    json_array_foreach(doctor->problems, i, value)
    {
        hapt_print(env, "problem%s: %s\n",
                   json_is_true(json_object_get(value, "prevents")) ? " that prevents work" : "",
                   json_string_value(json_object_get(value, "what")));
        hapt_print(env, "  do: %s\n", json_string_value(json_object_get(value, "do")));
    }
}

static enum hapt_status print_json(const struct doctor *doctor)
{
    json_t *root = json_pack("{s:s, s:i, s:i, s:i, s:O, s:O}", "format", "hapt-doctor", "version", 1, "ranks",
                             doctor->env->world_size, "hosts", doctor->hosts->count, "facts", doctor->sections,
                             "problems", doctor->problems);
    return hapt_json_print(root, "the report's", 2);
}

/* Rank 0 only: all facts have been gathered. */
static enum hapt_status report(struct doctor *doctor)
{
    doctor->sections = json_object();
    doctor->problems = json_array();
    if (!doctor->sections || !doctor->problems) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the report");
    examine_versions(doctor);
    examine_processor(doctor);
    add_fact(doctor, "job", "ranks", "%d on %d host%s, %d compute thread%s each", doctor->env->world_size,
             doctor->hosts->count, doctor->hosts->count > 1 ? "s" : "", doctor->threads,
             doctor->threads > 1 ? "s" : "");
    examine_hosts(doctor);
    examine_backends(doctor);
    examine_libraries(doctor);
    examine_solvers(doctor);
    examine_disk(doctor);
    examine_cluster(doctor);
    print_text(doctor);
    enum hapt_status status = doctor->env->quiet ? print_json(doctor) : HAPT_OK;
    json_decref(doctor->sections);
    json_decref(doctor->problems);
    if (status == HAPT_OK && doctor->status != HAPT_OK)
        status =
            hapt_fail(doctor->status, "see the line below each problem above", "there are problems that prevent work");
    return status;
}

enum hapt_status hapt_command_doctor(struct hapt_env *env, struct hapt_config *config, struct hapt_arena *arena)
{
    struct hapt_hosts *hosts;
    struct hapt_cluster *cluster = NULL;
    struct rank_facts mine = collect_facts(), *facts;
    HAPT_TRY(hapt_env_agree(env->world, hapt_hosts_gather(env, arena, &hosts)));
    facts = hapt_arena_alloc(arena, (size_t)env->world_size, sizeof *facts);
    HAPT_TRY(hapt_env_agree(env->world, facts ? HAPT_OK : HAPT_ERR_MEMORY));
    HAPT_TRY(hapt_env_agree(env->world, hapt_env_mpi(MPI_Gather(&mine, (int)sizeof mine, MPI_BYTE, facts,
                                                                (int)sizeof mine, MPI_BYTE, 0, env->world),
                                                     "gathering the facts of the ranks")));
    const char *path = hapt_config_text(config, "cluster");
    if (path) {
        HAPT_TRY(hapt_env_agree(env->world, hapt_cluster_load(path, arena, &cluster)));
        if (env->world_size >= cluster->rank_count) HAPT_TRY(hapt_cluster_bind(env, arena, cluster));
    }
    struct doctor doctor = {.env = env,
                            .config = config,
                            .hosts = hosts,
                            .facts = facts,
                            .cluster = cluster,
                            .threads = hapt_env_threads(env, (int)hapt_config_int(config, "threads"))};
    return hapt_env_agree(env->world, env->world_rank == 0 ? report(&doctor) : HAPT_OK);
}
