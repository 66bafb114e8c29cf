/*
 * By which way two hosts reach each other fastest: MPI's, or a TCP connection over one of the networks that they share.
 *
 * For each link between subclusters, and between the hosts of one, two ranks measure every way in turn by the very
 * transfer that moves stage boundaries (network.h), the latter half of a burst each; the others sleep. What they find
 * holds for all their hosts that have interfaces of those names on one network; others stay with MPI.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "hapt/network.h"
#include "hapt/progress.h"
#include "near.h"
#include "probe.h"
#include "ways.h"

#define WAYS_SECONDS 3.0 /* for all of them together */
#define WAY_SECONDS 0.25 /* for one */
#define CLEARLY_FASTER                                                                                                \
    1.15 /* than our own connections on a quiet machine, for MPI to be chosen: it moves data only while it is called, \
            and beside ranks that compute it was measured to lose about half of a link that these still fill */
#define AS_FAST 0.95 /* of the fastest: measuring cannot tell them apart, and the one near the GPUs is taken */
#define MEETING_DEADLINE 60.0

/* Where every rank runs and what it can be reached by. */
struct place {
    int host;
    struct hapt_interfaces interfaces;
    char near[48]; /* the interfaces nearest the rank's GPU */
};

struct choosing {
    const struct hapt_env *env;
    struct hapt_cluster *cluster;
    struct place *place; /* [world_size] */
    int count, capacity;
    struct hapt_cluster_way *way;
};

static enum hapt_status gather(const struct hapt_env *env, const struct hapt_cluster *cluster, struct hapt_arena *arena,
                               struct place **place)
{
    struct place mine = {.host = env->node_index};
    snprintf(mine.near, sizeof mine.near, "%s", cluster->near_interfaces);
    hapt_interfaces_list(false, &mine.interfaces);
    HAPT_NEW(*place, arena, env->world_size);
    return hapt_env_mpi(
        MPI_Allgather(&mine, (int)sizeof mine, MPI_BYTE, *place, (int)sizeof mine, MPI_BYTE, env->world),
        "MPI_Allgather");
}

/* Two ranks on different hosts that stand for a link; false: it joins no two hosts. */
static bool ends_of(const struct choosing *choosing, int from, int to, int rank[2])
{
    const struct hapt_subcluster *a = &choosing->cluster->subcluster[from], *b = &choosing->cluster->subcluster[to];
    for (int i = 0; i < a->nodes * a->devices_per_node; i++)
        for (int j = 0; j < b->nodes * b->devices_per_node; j++)
            if (choosing->place[a->ranks[i]].host != choosing->place[b->ranks[j]].host) {
                rank[0] = a->ranks[i];
                rank[1] = b->ranks[j];
                return true;
            }
    return false;
}

static void add(struct choosing *choosing, int from, int to, const struct hapt_interface *own,
                const struct hapt_interface *peer)
{
    struct hapt_cluster_way *way = &choosing->way[choosing->count++];
    HAPT_ASSERT(choosing->count <= choosing->capacity);
    *way = (struct hapt_cluster_way){.from = from, .to = to};
    snprintf(way->transport, sizeof way->transport, "%s", own ? "tcp" : "mpi");
    if (!own) return;
    snprintf(way->interface[0], sizeof way->interface[0], "%s", own->name);
    snprintf(way->interface[1], sizeof way->interface[1], "%s", peer->name);
}

/* MPI, and every pair of interfaces on one network. */
static void list_ways(struct choosing *choosing, int from, int to, bool all)
{
    int rank[2];
    const struct hapt_link *link = hapt_cluster_link(choosing->cluster, from, to);
    if ((link->transport[0] && !all) || !ends_of(choosing, from, to, rank)) return;
    const struct hapt_interfaces *own = &choosing->place[rank[0]].interfaces,
                                 *peer = &choosing->place[rank[1]].interfaces;
    const int first = choosing->count;
    add(choosing, from, to, NULL, NULL);
    for (int i = 0; i < own->count; i++)
        for (int j = 0; j < peer->count; j++)
            if (hapt_interfaces_meet(&own->item[i], &peer->item[j]))
                add(choosing, from, to, &own->item[i], &peer->item[j]);
    if (choosing->count - first == 1 && !all) choosing->count = first; /* MPI alone: nothing to choose from */
}

static const struct hapt_interface *called(const struct hapt_interfaces *list, const char *name,
                                           const struct hapt_interface *meets)
{
    for (int i = 0; i < list->count; i++)
        if (strcmp(list->item[i].name, name) == 0 && (!meets || hapt_interfaces_meet(&list->item[i], meets)))
            return &list->item[i];
    return NULL;
}

/* The addresses behind two names of interfaces; both ends find the same. */
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

static enum hapt_status measure(const struct choosing *choosing, struct hapt_cluster_way *way, double seconds)
{
    const struct hapt_env *env = choosing->env;
    int rank[2];
    double result[2] = {0, 0};
    MPI_Comm pair;
    HAPT_ASSERT(ends_of(choosing, way->from, way->to, rank));
    const int end = env->world_rank == rank[0] ? 0 : env->world_rank == rank[1] ? 1 : -1;
    HAPT_MPI(MPI_Comm_split(env->world, end < 0 ? MPI_UNDEFINED : 0, end, &pair));
    if (end >= 0) {
        const struct hapt_interfaces *own = &choosing->place[rank[end]].interfaces,
                                     *peer = &choosing->place[rank[1 - end]].interfaces;
        struct hapt_path path[2] = {{0}, {0}};
        const bool tcp = strcmp(way->transport, "tcp") == 0;
        if (tcp) find_path(own, way->interface[end], peer, way->interface[1 - end], &path[1 - end]);
        /* A way that leads nowhere is none: that is an answer, not a failure. */
        if (hapt_transfer_measure(tcp ? &hapt_transfer_tcp : &hapt_transfer_mpi, pair, path, seconds, &result[0],
                                  &result[1]) != HAPT_OK)
            hapt_fail_reset();
        MPI_Comm_free(&pair);
    }
    probe_meet(env, MEETING_DEADLINE);
    HAPT_MPI(MPI_Bcast(result, 2, MPI_DOUBLE, rank[0], env->world));
    way->latency = result[0];
    way->bandwidth = result[1];
    return HAPT_OK;
}

static void take(struct choosing *choosing, const struct hapt_cluster_way *way, bool all)
{
    struct hapt_cluster *cluster = choosing->cluster;
    for (int turned = 0; turned < 2; turned++) {
        const int from = turned ? way->to : way->from, to = turned ? way->from : way->to;
        struct hapt_link *link = &cluster->link[from * cluster->count + to];
        snprintf(link->transport, sizeof link->transport, "%s", way->transport);
        for (int e = 0; e < 2; e++)
            snprintf(link->interface[e], sizeof link->interface[e], "%s", way->interface[turned ? 1 - e : e]);
        if (link->paced || way->bandwidth == 0) continue;
        if (link->bandwidth == 0 || all) link->bandwidth = way->bandwidth;
        if (link->latency < 0 || all) link->latency = way->latency;
        if (way->from == way->to) break;
    }
}

int ways_best(int count, const struct hapt_cluster_way *way, const int *near)
{
    int best = 0;
    double fastest = 0;
    for (int w = 1; w < count; w++) fastest = fmax(fastest, way[w].bandwidth);
    if (!(fastest > way[0].bandwidth / CLEARLY_FASTER)) return 0;
    for (int w = 1; w < count; w++) {
        const bool equal = way[w].bandwidth >= fastest * AS_FAST;
        if (!equal) continue;
        if (best == 0 || near[w] > near[best] || (near[w] == near[best] && way[w].bandwidth > way[best].bandwidth))
            best = w;
    }
    return best;
}

/* How many ends of a way are near the GPUs of the two ranks that measured it. */
static int nearness(const struct choosing *choosing, const struct hapt_cluster_way *way)
{
    int rank[2], near = 0;
    HAPT_ASSERT(ends_of(choosing, way->from, way->to, rank));
    for (int e = 0; e < 2; e++) near += near_has(choosing->place[rank[e]].near, way->interface[e]);
    return near;
}

/* Of the ways of a link, from `first` to `end`; the first is MPI's. */
static void choose(struct choosing *choosing, int first, int end, bool all)
{
    int near[1 + HAPT_INTERFACES * HAPT_INTERFACES];
    for (int w = first; w < end; w++) near[w - first] = nearness(choosing, &choosing->way[w]);
    struct hapt_cluster_way *best = &choosing->way[first + ways_best(end - first, &choosing->way[first], near)];
    best->chosen = true;
    take(choosing, best, all);
}

/* Other work on a machine slows now this way, now that one. Before MPI is taken all ways of the link are measured once
 * more, and the better one of the two counts. */
static enum hapt_status doubt_mpi(struct choosing *choosing, int first, int end, double seconds)
{
    const struct hapt_cluster_way *mpi = &choosing->way[first];
    double most = 0;
    for (int w = first + 1; w < end; w++) most = fmax(most, choosing->way[w].bandwidth);
    if (most == 0 || most > mpi->bandwidth / CLEARLY_FASTER) return HAPT_OK;
    for (int w = first; w < end; w++) {
        struct hapt_cluster_way again = choosing->way[w];
        HAPT_TRY(measure(choosing, &again, seconds));
        if (again.bandwidth > choosing->way[w].bandwidth) choosing->way[w] = again;
    }
    return HAPT_OK;
}

static enum hapt_status choose_all(struct choosing *choosing, bool all)
{
    const struct hapt_cluster *cluster = choosing->cluster;
    for (int from = 0; from < cluster->count; from++)
        for (int to = from; to < cluster->count; to++) list_ways(choosing, from, to, all);
    hapt_progress_expect(2L * choosing->count);
    const double seconds = choosing->count * WAY_SECONDS < WAYS_SECONDS ? WAY_SECONDS : WAYS_SECONDS / choosing->count;
    for (int w = 0; w < choosing->count; w++) {
        HAPT_TRY(measure(choosing, &choosing->way[w], seconds));
        hapt_progress_advance(1);
    }
    for (int first = 0, end; first < choosing->count; first = end) {
        for (end = first + 1; end < choosing->count && strcmp(choosing->way[end].transport, "mpi") != 0;) end++;
        HAPT_TRY(doubt_mpi(choosing, first, end, seconds / 2));
        choose(choosing, first, end, all);
        hapt_progress_advance(end - first);
    }
    return HAPT_OK;
}

enum hapt_status hapt_cluster_choose_ways(const struct hapt_env *env, bool all, struct hapt_arena *arena,
                                          struct hapt_cluster *cluster, int *count, struct hapt_cluster_way **way)
{
    struct choosing choosing = {.env = env, .cluster = cluster};
    HAPT_ASSERT(cluster->subcluster_of_rank);
    choosing.capacity = cluster->count * (cluster->count + 1) / 2 * (1 + HAPT_INTERFACES * HAPT_INTERFACES);
    choosing.way = hapt_arena_alloc(arena, (size_t)choosing.capacity, sizeof *choosing.way);
    HAPT_TRY(hapt_env_agree(env->world, choosing.way ? HAPT_OK : HAPT_ERR_MEMORY));
    enum hapt_status status = HAPT_OK;
    if (env->node_count > 1) {
        struct hapt_progress progress;
        hapt_progress_init(&progress, env, "probing networks", 0);
        status = gather(env, cluster, arena, &choosing.place);
        if (status == HAPT_OK) status = choose_all(&choosing, all);
        hapt_progress_release(&progress);
    }
    *count = choosing.count;
    *way = choosing.way;
    return hapt_env_agree(env->world, status);
}

enum hapt_status hapt_cluster_paths(const struct hapt_env *env, const struct hapt_cluster *cluster,
                                    struct hapt_arena *arena, struct hapt_path **path)
{
    struct place *place;
    const struct hapt_link *lost = NULL;
    bool any = false;
    HAPT_NEW(*path, arena, env->world_size);
    for (int i = 0; i < cluster->count * cluster->count; i++)
        any = any || strcmp(cluster->link[i].transport, "tcp") == 0;
    if (!any) return HAPT_OK;
    HAPT_TRY(gather(env, cluster, arena, &place));
    const int own = cluster->subcluster_of_rank[env->world_rank];
    for (int r = 0; r < env->world_size && own >= 0; r++) {
        const int its = cluster->subcluster_of_rank[r];
        if (its < 0 || place[r].host == place[env->world_rank].host) continue;
        const struct hapt_link *link = hapt_cluster_link(cluster, own, its);
        if (strcmp(link->transport, "tcp") != 0) continue;
        const struct hapt_interfaces *here = &place[env->world_rank].interfaces;
        bool found = find_path(here, link->interface[0], &place[r].interfaces, link->interface[1], &(*path)[r]);
        if (!found && own == its)
            found = find_path(here, link->interface[1], &place[r].interfaces, link->interface[0], &(*path)[r]);
        if (!found && !lost) lost = link;
    }
    if (lost)
        hapt_warn(env,
                  "interfaces %s and %s do not join all hosts of their subclusters: between the others MPI carries the "
                  "messages\n",
                  lost->interface[0], lost->interface[1]);
    return HAPT_OK;
}
