/* Measured all-reduces over submeshes. */
#include "measure_sums.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/env.h"
#include "hapt/progress.h"
#include "hapt/team.h"

enum { ROUNDS = 7 };
#define SMALLEST 4096.0
#define LARGEST (8.0 * 1024 * 1024)

enum hapt_status sums_barrier(MPI_Comm comm)
{
    MPI_Request request;
    unsigned spins = 64; /* then sleep: peers need the core */
    HAPT_MPI(MPI_Ibarrier(comm, &request));
    for (int done = 0;;) {
        HAPT_MPI(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        if (done) return HAPT_OK;
        hapt_link_pause(&spins);
    }
}

/* The ranks of a submesh, with the axes over which training sums gradients. */
struct sums {
    struct hapt_sharding sharding; /* only its axes are used */
    struct hapt_team team;
    struct hapt_engine_links links;
    struct hapt_queue *queue;
    float *host;
    void *data; /* device memory that the host cannot read; NULL: `host` alone is used */
};

static enum hapt_status reserve_sums(const struct hapt_engine_options *options, size_t bytes, struct sums *sums)
{
    const struct hapt_backend *backend = options->backend;
    void *host;
    if (!backend->pin) {
        sums->host = calloc(bytes, 1);
        return sums->host ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory to measure an all-reduce");
    }
    HAPT_TRY(hapt_backend_pin(backend, bytes, &host));
    sums->host = memset(host, 0, bytes);
    sums->queue = backend->queue(options->device, 0);
    return backend->allocate(options->device, bytes, &sums->data);
}

static void release_sums(const struct hapt_engine_options *options, struct sums *sums)
{
    hapt_team_release(&sums->team);
    if (sums->data) options->backend->free(options->device, sums->data);
    if (!options->backend->pin)
        free(sums->host);
    else if (sums->host)
        options->backend->unpin(sums->host);
}

static enum hapt_status connect_sums(const struct hapt_engine_options *options, MPI_Comm comm, double timeout_s,
                                     struct sums *sums)
{
    char carrier[HAPT_TEAM_TRANSPORT_CHARS];
    int rank, ranks;
    MPI_Comm_rank(comm, &rank);
    MPI_Comm_size(comm, &ranks);
    sums->sharding.axis[0].size = ranks;
    sums->sharding.axis[1].size = 1;
    sums->team = (struct hapt_team){.sharding = &sums->sharding, .rank = rank, .size = ranks, .microbatch = -1};
    hapt_team_mesh_coordinate(&sums->sharding, rank, sums->team.mesh_coordinate);
    HAPT_TRY(hapt_team_connect(&sums->team, comm, "profile", timeout_s));
    if (sums->data) HAPT_TRY(hapt_team_use_devices(&sums->team, options->backend, options->device, NULL, carrier));
    hapt_team_links(&sums->team, &sums->links);
    return HAPT_OK;
}

static enum hapt_status copy_staged(const struct hapt_backend *backend, struct sums *sums, void *to, const void *from,
                                    size_t bytes)
{
    HAPT_TRY(backend->copy(sums->queue, to, from, bytes));
    return backend->wait(backend->record(sums->queue));
}

static enum hapt_status sum(const struct hapt_backend *backend, struct sums *sums, size_t elements)
{
    const bool through_host = sums->data && !sums->links.on_device;
    const size_t bytes = elements * sizeof *sums->host;
    if (through_host) HAPT_TRY(copy_staged(backend, sums, sums->host, sums->data, bytes));
    HAPT_TRY(
        sums->links.all_reduce(sums->links.context, 1u, sums->links.on_device ? sums->data : sums->host, elements));
    return through_host ? copy_staged(backend, sums, sums->data, sums->host, bytes) : HAPT_OK;
}

/* Median over rounds, on the ranks of one submesh. */
static enum hapt_status time_sums(const struct hapt_backend *backend, struct sums *sums, const double *bytes,
                                  double *time_s)
{
    for (int k = 0; k < SUMS_SIZES; k++) {
        double sample[ROUNDS];
        for (int r = -1; r < ROUNDS; r++) {
            const double start = hapt_time_s();
            HAPT_TRY(sum(backend, sums, (size_t)bytes[k] / sizeof(float)));
            if (r >= 0) sample[r] = hapt_time_s() - start;
        }
        time_s[k] = hapt_median(sample, ROUNDS);
    }
    return HAPT_OK;
}

static enum hapt_status time_submesh(MPI_Comm comm, const struct hapt_engine_options *options, const double *bytes,
                                     double timeout_s, double *time_s)
{
    struct sums *sums = calloc(1, sizeof *sums);
    enum hapt_status status = HAPT_ERR_MEMORY;
    if (sums)
        status = reserve_sums(options, (size_t)bytes[SUMS_SIZES - 1], sums);
    else
        hapt_fail(status, NULL, "no memory to measure an all-reduce");
    status = hapt_link_all_or_none(comm, "an all-reduce's measuring", status);
    if (status == HAPT_OK) status = connect_sums(options, comm, timeout_s, sums);
    if (status == HAPT_OK) status = time_sums(options->backend, sums, bytes, time_s);
    if (sums) release_sums(options, sums);
    free(sums);
    return status;
}

/* Uses the first n nodes and the first m devices of each: in a homogeneous subcluster any others are equivalent. */
static bool takes_part(const struct hapt_subcluster *subcluster, struct hapt_submesh submesh, int world_rank)
{
    for (int node = 0; node < submesh.n; node++)
        for (int device = 0; device < submesh.m; device++)
            if (subcluster->ranks[node * subcluster->devices_per_node + device] == world_rank) return true;
    return false;
}

static enum hapt_status reserve_table(const struct hapt_cluster *cluster, struct hapt_arena *arena,
                                      struct sums_table *table, struct hapt_submesh **submesh)
{
    HAPT_NEW(table->time_s, arena, (size_t)cluster->count * (size_t)table->submesh_count * SUMS_SIZES);
    HAPT_NEW(*submesh, arena, table->submesh_count);
    return HAPT_OK;
}

enum hapt_status sums_measure(const struct hapt_env *env, const struct hapt_cluster *cluster,
                              const struct hapt_engine_options *options, double timeout_s, struct hapt_arena *arena,
                              struct sums_table *table)
{
    *table = (struct sums_table){0};
    for (int k = 0; k < SUMS_SIZES; k++)
        table->bytes[k] = SMALLEST * pow(LARGEST / SMALLEST, (double)k / (SUMS_SIZES - 1));
    for (int c = 0; c < cluster->count; c++) {
        const int count = hapt_candidates_submeshes(&cluster->subcluster[c], NULL);
        if (count > table->submesh_count) table->submesh_count = count;
    }
    const size_t cells = (size_t)cluster->count * (size_t)table->submesh_count * SUMS_SIZES;
    struct hapt_submesh *submesh = NULL;
    HAPT_TRY(hapt_env_agree(env->world, reserve_table(cluster, arena, table, &submesh)));
    struct hapt_progress progress;
    enum hapt_status status = HAPT_OK;
    hapt_progress_init(&progress, env, "measuring sums of gradients", (long)cluster->count * table->submesh_count);
    for (int c = 0; c < cluster->count && status == HAPT_OK; c++) {
        const struct hapt_subcluster *subcluster = &cluster->subcluster[c];
        const int count = hapt_candidates_submeshes(subcluster, submesh);
        for (int s = 0; s < count && status == HAPT_OK; s++) {
            if (submesh[s].n * submesh[s].m == 1) continue;
            hapt_progress_update(&progress, (long)c * table->submesh_count + s, NULL);
            const bool mine = takes_part(subcluster, submesh[s], env->world_rank);
            MPI_Comm comm;
            HAPT_MPI(MPI_Comm_split(env->world, mine ? 0 : MPI_UNDEFINED, env->world_rank, &comm));
            double *time_s = &table->time_s[(c * table->submesh_count + s) * SUMS_SIZES];
            if (mine) {
                status = time_submesh(comm, options, table->bytes, timeout_s, time_s);
                MPI_Comm_free(&comm);
            }
            HAPT_TRY(sums_barrier(env->world));
            status = hapt_env_agree(env->world, status);
        }
    }
    hapt_progress_release(&progress);
    HAPT_TRY(status);
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, table->time_s, (int)cells, MPI_DOUBLE, MPI_MAX, env->world));
    return HAPT_OK;
}

double sums_measured_s(const struct sums_table *table, int subcluster, int submesh, double bytes)
{
    const double *time_s = &table->time_s[(subcluster * table->submesh_count + submesh) * SUMS_SIZES];
    if (bytes <= 0) return 0;
    if (bytes <= table->bytes[0]) return time_s[0];
    int k = 1;
    while (k < SUMS_SIZES - 1 && bytes > table->bytes[k]) k++;
    const double slope = (time_s[k] - time_s[k - 1]) / (table->bytes[k] - table->bytes[k - 1]);
    return fmax(time_s[k - 1] + fmax(slope, 0) * (bytes - table->bytes[k - 1]), time_s[0]);
}
