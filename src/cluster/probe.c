/*
 * Measures latency and bandwidth of links whose values are unknown.
 *
 * For each link, one pair of ranks exchanges messages while all other ranks sleep; links are measured one after
 * another. Message sizes double up to 4 MiB and medians are kept. The probe takes a few seconds, and every wait has a
 * deadline.
 */
#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "hapt/progress.h"
#include "probe.h"

#define PROBE_BYTES (4 << 20)  /* largest message */
#define PROBE_SECONDS 2.0      /* for all links together */
#define PROBE_LINK_SECONDS 0.3 /* for one link */
#define PROBE_DEADLINE 20.0    /* s: a peer that is silent for longer counts as lost */
enum { PROBE_TAG = 4711, LATENCY_ROUNDS = 41, BANDWIDTH_ROUNDS = 9 };

/* A link to measure, and where to store its values. */
struct probe {
    int rank[2];
    double bandwidth, latency; /* results; 0 on ranks that did not lead the pair */
    double *to_bandwidth, *to_latency;
};

enum { MAX_PROBES = 2 * HAPT_MAX_SUBCLUSTERS + HAPT_MAX_SUBCLUSTERS * (HAPT_MAX_SUBCLUSTERS - 1) / 2 };

/* A failure here ends the job, because peers wait for this rank. */
static void must(int mpi_error)
{
    if (mpi_error != MPI_SUCCESS) hapt_die(hapt_env_mpi(mpi_error, "link probe"));
}

static void finish(MPI_Request *request, MPI_Status *result, int peer)
{
    const double deadline = hapt_time_s() + PROBE_DEADLINE;
    for (int done = 0;;) {
        must(MPI_Test(request, &done, result));
        if (done) return;
        if (hapt_time_s() > deadline)
            hapt_die(hapt_fail(HAPT_ERR_COMM, "check the network between the hosts; hapt doctor lists them",
                               "link probe: rank %d did not answer within %.0f s", peer, PROBE_DEADLINE));
        sched_yield();
    }
}

static void send(const struct hapt_env *env, int peer, char *buffer, int bytes)
{
    MPI_Request request;
    must(MPI_Isend(buffer, bytes, MPI_BYTE, peer, PROBE_TAG, env->world, &request));
    finish(&request, MPI_STATUS_IGNORE, peer);
}

static int receive(const struct hapt_env *env, int peer, char *buffer)
{
    MPI_Request request;
    MPI_Status result;
    int bytes = 0;
    must(MPI_Irecv(buffer, PROBE_BYTES, MPI_BYTE, peer, PROBE_TAG, env->world, &request));
    finish(&request, &result, peer);
    must(MPI_Get_count(&result, MPI_BYTE, &bytes));
    return bytes;
}

static double half_round_trip(const struct hapt_env *env, int peer, char *buffer, int bytes)
{
    const double start = hapt_time_s();
    send(env, peer, buffer, bytes);
    receive(env, peer, buffer);
    return 0.5 * (hapt_time_s() - start);
}

/* Median one-way time. Fewer rounds (at least 3) if `seconds` is exceeded. */
static double median_time(const struct hapt_env *env, int peer, char *buffer, int bytes, int rounds, double seconds)
{
    double sample[LATENCY_ROUNDS];
    const double end = hapt_time_s() + seconds;
    int count = 0;
    while (count < rounds && (count < 3 || hapt_time_s() < end))
        sample[count++] = half_round_trip(env, peer, buffer, bytes);
    qsort(sample, (size_t)count, sizeof *sample, hapt_compare_doubles);
    return sample[count / 2];
}

/* The leader chooses sizes and rounds. An empty message ends the follower. */
static void lead(const struct hapt_env *env, struct probe *probe, char *buffer, double seconds)
{
    const int peer = probe->rank[1];
    half_round_trip(env, peer, buffer, 1); /* the first message sets up the connection */
    probe->latency = median_time(env, peer, buffer, 1, LATENCY_ROUNDS, seconds / 4);
    int bytes = 64 << 10;
    double time = half_round_trip(env, peer, buffer, bytes);
    while (bytes < PROBE_BYTES && time < seconds / 32) {
        bytes *= 2;
        time = half_round_trip(env, peer, buffer, bytes);
    }
    time = median_time(env, peer, buffer, bytes, BANDWIDTH_ROUNDS, seconds / 2);
    /* Subtract the latency to get the time of the bytes, but at most half of the time: latency is noisy. */
    probe->bandwidth = bytes / (time - probe->latency > time / 2 ? time - probe->latency : time / 2);
    send(env, peer, buffer, 0);
}

static void follow(const struct hapt_env *env, const struct probe *probe, char *buffer)
{
    for (int bytes; (bytes = receive(env, probe->rank[0], buffer)) > 0;) send(env, probe->rank[0], buffer, bytes);
}

void probe_barrier(const struct hapt_env *env, double deadline_s)
{
    MPI_Request request;
    must(MPI_Ibarrier(env->world, &request));
    const double end = hapt_time_s() + deadline_s;
    for (int done = 0;;) {
        must(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
        if (done) return;
        const double now = hapt_time_s();
        if (now > end)
            hapt_die(hapt_fail(HAPT_ERR_COMM, "check the network between the hosts; hapt doctor lists them",
                               "link probe: not all ranks answered within %.0f s", deadline_s));
        hapt_time_sleep_until(now + 200e-6);
    }
}

static void add(struct probe *list, int *count, int from, int to, double *bandwidth, double *latency)
{
    if (*bandwidth > 0 && *latency >= 0) return;
    list[(*count)++] = (struct probe){{from, to}, 0, 0, bandwidth, latency};
}

/* Two ranks for the link between two subclusters, on different hosts if possible: a host may be part of both. */
static void find_ends(const struct hapt_subcluster *a, const struct hapt_subcluster *b, int end[2])
{
    end[0] = a->ranks[0];
    end[1] = b->ranks[0];
    for (int i = 0; i < a->nodes * a->devices_per_node; i++)
        for (int j = 0; j < b->nodes * b->devices_per_node; j++) {
            if (strcmp(hapt_env_host(a->ranks[i]), hapt_env_host(b->ranks[j])) == 0) continue;
            end[0] = a->ranks[i];
            end[1] = b->ranks[j];
            return;
        }
}

static int list_probes(struct hapt_cluster *cluster, struct probe *list)
{
    int count = 0;
    for (int i = 0; i < cluster->count; i++) {
        struct hapt_subcluster *own = &cluster->subcluster[i];
        if (own->devices_per_node > 1)
            add(list, &count, own->ranks[0], own->ranks[1], &own->intra_node_bandwidth, &own->intra_node_latency);
        if (own->nodes > 1)
            add(list, &count, own->ranks[0], own->ranks[own->devices_per_node], &own->inter_node_bandwidth,
                &own->inter_node_latency);
        for (int j = 0; j < i; j++) {
            struct hapt_link *link = &cluster->link[j * cluster->count + i];
            int end[2];
            find_ends(&cluster->subcluster[j], own, end);
            add(list, &count, end[0], end[1], &link->bandwidth, &link->latency);
        }
    }
    return count;
}

enum hapt_status hapt_cluster_probe(const struct hapt_env *env, struct hapt_cluster *cluster)
{
    HAPT_ASSERT(cluster->subcluster_of_rank);
    struct probe list[MAX_PROBES];
    double result[2 * MAX_PROBES] = {0};
    const int count = list_probes(cluster, list);
    if (count > 0) {
        char *buffer = malloc(PROBE_BYTES);
        if (!buffer) hapt_die(hapt_fail(HAPT_ERR_MEMORY, "give the job more memory", "no memory to probe the links"));
        memset(buffer, 0, PROBE_BYTES);
        struct hapt_progress progress;
        hapt_progress_init(&progress, env, "probing links", count);
        const double seconds = PROBE_SECONDS / count < PROBE_LINK_SECONDS ? PROBE_SECONDS / count : PROBE_LINK_SECONDS;
        for (int p = 0; p < count; p++) {
            probe_barrier(env, 2 * PROBE_DEADLINE);
            if (env->world_rank == list[p].rank[0]) lead(env, &list[p], buffer, seconds);
            if (env->world_rank == list[p].rank[1]) follow(env, &list[p], buffer);
            result[2 * p] = list[p].bandwidth;
            result[2 * p + 1] = list[p].latency;
            hapt_progress_update(&progress, p + 1, NULL);
        }
        hapt_progress_release(&progress);
        free(buffer);
        probe_barrier(env, 2 * PROBE_DEADLINE);
        must(MPI_Allreduce(MPI_IN_PLACE, result, 2 * count, MPI_DOUBLE, MPI_MAX, env->world));
    }
    for (int p = 0; p < count; p++) {
        if (*list[p].to_bandwidth == 0) *list[p].to_bandwidth = result[2 * p];
        if (*list[p].to_latency < 0) *list[p].to_latency = result[2 * p + 1];
    }
    for (int i = 0; i < cluster->count; i++)
        for (int j = 0; j < i; j++) cluster->link[i * cluster->count + j] = cluster->link[j * cluster->count + i];
    /* Links without a pair of ranks (one device per node, one node) only need some value. */
    hapt_cluster_assume(cluster);
    return hapt_env_agree(env->world, hapt_cluster_check(cluster));
}
