/*
 * Finds the fastest route between two hosts: MPI, or a TCP connection over one of the networks that they share.
 *
 * For each link between subclusters, and between hosts of one subcluster, two ranks measure every route in turn while
 * the others sleep. They use the transfer that sends stage boundaries (network.h), and time the second half of a burst.
 * The result applies to all hosts of the link that have interfaces of those names on one network; other hosts use MPI.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/network.h"
#include "hapt/progress.h"
#include "affinity.h"
#include "probe.h"
#include "routes.h"

#define ROUTES_SECONDS 3.0 /* for all routes together */
#define ROUTE_SECONDS 0.25 /* for one route */
#define CLEARLY_FASTER                                                                                               \
    1.15 /* MPI is chosen only if it is faster by this factor on a quiet machine. MPI transfers progress only inside \
            MPI calls: beside computing ranks MPI was measured to lose about half of a link that our TCP connections \
            still fill. */
#define EQUAL_SPEED_SHARE 0.95 /* of the fastest: measuring cannot tell them apart, the one near the GPUs is taken */
#define BARRIER_DEADLINE 60.0

/* Host and network interfaces of a rank. */
struct endpoint {
    int host;
    struct hapt_interfaces interfaces;
    char gpu_interfaces[48]; /* interfaces nearest to the rank's GPU */
};

struct route_search {
    const struct hapt_env *env;
    struct hapt_cluster *cluster;
    struct endpoint *endpoint; /* [world_size] */
    int count, capacity;
    struct hapt_cluster_route *route;
};

static enum hapt_status gather(const struct hapt_env *env, const struct hapt_cluster *cluster, struct hapt_arena *arena,
                               struct endpoint **endpoint)
{
    struct endpoint mine = {.host = env->node_index};
    snprintf(mine.gpu_interfaces, sizeof mine.gpu_interfaces, "%s", cluster->gpu_local_interfaces);
    hapt_interfaces_list(false, &mine.interfaces);
    HAPT_NEW(*endpoint, arena, env->world_size);
    return hapt_env_mpi(
        MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, *endpoint, (int)sizeof mine, MPI_BYTE, env->world),
        "MPI_Allgather");
}

/* Finds two ranks on different hosts for a link. False: the link joins no two hosts. */
static bool ends_of(const struct route_search *search, int from, int to, int rank[2])
{
    const struct hapt_subcluster *a = &search->cluster->subcluster[from], *b = &search->cluster->subcluster[to];
    for (int i = 0; i < a->nodes * a->devices_per_node; i++)
        for (int j = 0; j < b->nodes * b->devices_per_node; j++)
            if (search->endpoint[a->ranks[i]].host != search->endpoint[b->ranks[j]].host) {
                rank[0] = a->ranks[i];
                rank[1] = b->ranks[j];
                return true;
            }
    return false;
}

static void add(struct route_search *search, int from, int to, const struct hapt_interface *own,
                const struct hapt_interface *peer)
{
    struct hapt_cluster_route *route = &search->route[search->count++];
    HAPT_ASSERT(search->count <= search->capacity);
    *route = (struct hapt_cluster_route){.from = from, .to = to};
    snprintf(route->transport, sizeof route->transport, "%s", own ? "tcp" : "mpi");
    if (!own) return;
    snprintf(route->interface[0], sizeof route->interface[0], "%s", own->name);
    snprintf(route->interface[1], sizeof route->interface[1], "%s", peer->name);
}

/* Lists MPI and every pair of interfaces on one network. */
static void list_routes(struct route_search *search, int from, int to, bool all)
{
    int rank[2];
    const struct hapt_link *link = hapt_cluster_link(search->cluster, from, to);
    if ((link->transport[0] && !all) || !ends_of(search, from, to, rank)) return;
    const struct hapt_interfaces *own = &search->endpoint[rank[0]].interfaces,
                                 *peer = &search->endpoint[rank[1]].interfaces;
    const int first = search->count;
    add(search, from, to, NULL, NULL);
    for (int i = 0; i < own->count; i++)
        for (int j = 0; j < peer->count; j++)
            if (hapt_interfaces_share_network(&own->item[i], &peer->item[j]))
                add(search, from, to, &own->item[i], &peer->item[j]);
    if (search->count - first == 1 && !all) search->count = first; /* only MPI: no choice */
}

static const struct hapt_interface *called(const struct hapt_interfaces *list, const char *name,
                                           const struct hapt_interface *meets)
{
    for (int i = 0; i < list->count; i++)
        if (strcmp(list->item[i].name, name) == 0 && (!meets || hapt_interfaces_share_network(&list->item[i], meets)))
            return &list->item[i];
    return NULL;
}

/* Finds the addresses for two interface names; both ends find the same. */
static bool find_path(const struct hapt_interfaces *own, const char *own_name, const struct hapt_interfaces *peer,
                      const char *peer_name, struct hapt_path *path)
{
    for (int i = 0; i < own->count; i++) {
        if (strcmp(own->item[i].name, own_name) != 0) continue;
        const struct hapt_interface *its = called(peer, peer_name, &own->item[i]);
        if (!its) continue;
        *path = (struct hapt_path){.tcp = true, .own = own->item[i], .peer = *its};
        return true;
    }
    return false;
}

static enum hapt_status measure(const struct route_search *search, struct hapt_cluster_route *route, double seconds)
{
    const struct hapt_env *env = search->env;
    int rank[2];
    double result[2] = {0, 0};
    MPI_Comm pair;
    HAPT_ASSERT(ends_of(search, route->from, route->to, rank));
    const int end = env->world_rank == rank[0] ? 0 : env->world_rank == rank[1] ? 1 : -1;
    HAPT_MPI(MPI_Comm_split(env->world, end < 0 ? MPI_UNDEFINED : 0, end, &pair));
    if (end >= 0) {
        const struct hapt_interfaces *own = &search->endpoint[rank[end]].interfaces,
                                     *peer = &search->endpoint[rank[1 - end]].interfaces;
        struct hapt_path path[2] = {{0}, {0}};
        const bool tcp = strcmp(route->transport, "tcp") == 0;
        if (tcp) find_path(own, route->interface[end], peer, route->interface[1 - end], &path[1 - end]);
        /* An unreachable route is a result, not a failure. */
        if (hapt_transfer_measure(tcp ? &hapt_transfer_tcp : &hapt_transfer_mpi, pair, path, seconds, &result[0],
                                  &result[1]) != HAPT_OK)
            hapt_fail_reset();
        MPI_Comm_free(&pair);
    }
    probe_barrier(env, BARRIER_DEADLINE);
    HAPT_MPI(MPI_Bcast(result, 2, MPI_DOUBLE, rank[0], env->world));
    route->latency = result[0];
    route->bandwidth = result[1];
    return HAPT_OK;
}

static void apply_route(struct route_search *search, const struct hapt_cluster_route *route, bool all)
{
    struct hapt_cluster *cluster = search->cluster;
    for (int turned = 0; turned < 2; turned++) {
        const int from = turned ? route->to : route->from, to = turned ? route->from : route->to;
        struct hapt_link *link = &cluster->link[from * cluster->count + to];
        snprintf(link->transport, sizeof link->transport, "%s", route->transport);
        for (int e = 0; e < 2; e++)
            snprintf(link->interface[e], sizeof link->interface[e], "%s", route->interface[turned ? 1 - e : e]);
        if (link->paced || route->bandwidth == 0) continue;
        if (link->bandwidth == 0 || all) link->bandwidth = route->bandwidth;
        if (link->latency < 0 || all) link->latency = route->latency;
        if (route->from == route->to) break;
    }
}

int routes_best(int count, const struct hapt_cluster_route *route, const int *local_ends)
{
    int best = 0;
    double fastest = 0;
    for (int r = 1; r < count; r++) fastest = fmax(fastest, route[r].bandwidth);
    if (!(fastest > route[0].bandwidth / CLEARLY_FASTER)) return 0;
    for (int r = 1; r < count; r++) {
        const bool equal = route[r].bandwidth >= fastest * EQUAL_SPEED_SHARE;
        if (!equal) continue;
        if (best == 0 || local_ends[r] > local_ends[best] ||
            (local_ends[r] == local_ends[best] && route[r].bandwidth > route[best].bandwidth))
            best = r;
    }
    return best;
}

/* Number of ends of a route that are near the GPUs of the two ranks that measured it. */
static int count_local_ends(const struct route_search *search, const struct hapt_cluster_route *route)
{
    int rank[2], local_ends = 0;
    HAPT_ASSERT(ends_of(search, route->from, route->to, rank));
    for (int e = 0; e < 2; e++)
        local_ends += affinity_has(search->endpoint[rank[e]].gpu_interfaces, route->interface[e]);
    return local_ends;
}

/* Chooses among the routes [first, end) of a link; the first is MPI. */
static void choose_route(struct route_search *search, int first, int end, bool all)
{
    int local_ends[1 + HAPT_INTERFACES * HAPT_INTERFACES];
    for (int r = first; r < end; r++) local_ends[r - first] = count_local_ends(search, &search->route[r]);
    struct hapt_cluster_route *best =
        &search->route[first + routes_best(end - first, &search->route[first], local_ends)];
    best->chosen = true;
    apply_route(search, best, all);
}

/* Other work on a machine may slow any one measurement. So before MPI is taken, all routes of the link are measured
 * again, and the better result counts. */
static enum hapt_status remeasure_before_mpi(struct route_search *search, int first, int end, double seconds)
{
    const struct hapt_cluster_route *mpi = &search->route[first];
    double most = 0;
    for (int r = first + 1; r < end; r++) most = fmax(most, search->route[r].bandwidth);
    if (most == 0 || most > mpi->bandwidth / CLEARLY_FASTER) return HAPT_OK;
    for (int r = first; r < end; r++) {
        struct hapt_cluster_route again = search->route[r];
        HAPT_TRY(measure(search, &again, seconds));
        if (again.bandwidth > search->route[r].bandwidth) search->route[r] = again;
    }
    return HAPT_OK;
}

static enum hapt_status choose_all(struct route_search *search, bool all)
{
    const struct hapt_cluster *cluster = search->cluster;
    for (int from = 0; from < cluster->count; from++)
        for (int to = from; to < cluster->count; to++) list_routes(search, from, to, all);
    hapt_progress_expect(2L * search->count);
    const double seconds =
        search->count * ROUTE_SECONDS < ROUTES_SECONDS ? ROUTE_SECONDS : ROUTES_SECONDS / search->count;
    for (int r = 0; r < search->count; r++) {
        HAPT_TRY(measure(search, &search->route[r], seconds));
        hapt_progress_advance(1);
    }
    for (int first = 0, end; first < search->count; first = end) {
        for (end = first + 1; end < search->count && strcmp(search->route[end].transport, "mpi") != 0;) end++;
        HAPT_TRY(remeasure_before_mpi(search, first, end, seconds / 2));
        choose_route(search, first, end, all);
        hapt_progress_advance(end - first);
    }
    return HAPT_OK;
}

enum hapt_status hapt_cluster_choose_routes(const struct hapt_env *env, bool all, struct hapt_arena *arena,
                                            struct hapt_cluster *cluster, int *count, struct hapt_cluster_route **route)
{
    struct route_search search = {.env = env, .cluster = cluster};
    HAPT_ASSERT(cluster->subcluster_of_rank);
    search.capacity = cluster->count * (cluster->count + 1) / 2 * (1 + HAPT_INTERFACES * HAPT_INTERFACES);
    search.route = hapt_arena_alloc(arena, (size_t)search.capacity, sizeof *search.route);
    HAPT_TRY(hapt_env_agree(env->world, search.route ? HAPT_OK : HAPT_ERR_MEMORY));
    enum hapt_status status = HAPT_OK;
    if (env->node_count > 1) {
        struct hapt_progress progress;
        hapt_progress_init(&progress, env, "probing networks", 0);
        status = gather(env, cluster, arena, &search.endpoint);
        if (status == HAPT_OK) status = choose_all(&search, all);
        hapt_progress_release(&progress);
    }
    *count = search.count;
    *route = search.route;
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_cluster_paths(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                    struct hapt_arena *arena, struct hapt_path **path)
{
    struct endpoint *endpoint;
    const struct hapt_link *lost = NULL;
    bool any = false;
    HAPT_NEW(*path, arena, env->world_size);
    for (int i = 0; i < cluster->count * cluster->count; i++)
        any = any || strcmp(cluster->link[i].transport, "tcp") == 0;
    if (!any) return HAPT_OK;
    HAPT_TRY(gather(env, cluster, arena, &endpoint));
    const int own = cluster->subcluster_of_rank[env->world_rank];
    for (int r = 0; r < env->world_size && own >= 0; r++) {
        const int its = cluster->subcluster_of_rank[r];
        if (its < 0 || endpoint[r].host == endpoint[env->world_rank].host) continue;
        const struct hapt_link *link = hapt_cluster_link(cluster, own, its);
        if (strcmp(link->transport, "tcp") != 0) continue;
        const struct hapt_interfaces *here = &endpoint[env->world_rank].interfaces;
        bool found = find_path(here, link->interface[0], &endpoint[r].interfaces, link->interface[1], &(*path)[r]);
        if (!found && own == its)
            found = find_path(here, link->interface[1], &endpoint[r].interfaces, link->interface[0], &(*path)[r]);
        if (!found && !lost) lost = link;
    }
    if (lost)
        hapt_warn(
            env,
            "interfaces %s and %s do not connect all hosts of their subclusters: messages between the others use MPI\n",
            lost->interface[0], lost->interface[1]);
    return HAPT_OK;
}
