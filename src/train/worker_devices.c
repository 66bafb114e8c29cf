/*
 * Direct exchange between the devices of several submeshes in one subcluster. All these devices form one device group.
 * The device groups of each stage, and of every two ranks that an edge connects, are split from it. If anything fails,
 * boundaries and collectives use the host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

/* The subcluster of all ranks of a chunk; -1: they are in several. */
static int home_of(const struct worker *worker, int chunk)
{
    const int *subcluster = worker->cluster->subcluster_of_rank, home = subcluster[stage_world_rank(worker, chunk, 0)];
    for (int r = 1; r < stage_size(worker, chunk); r++)
        if (subcluster[stage_world_rank(worker, chunk, r)] != home) return -1;
    return home;
}

/* The subcluster in which this rank may exchange directly, because several submeshes there can; -1: none. The same on
 * all ranks of those submeshes. */
static int exchange_subcluster(const struct worker *worker)
{
    if (worker->stage_count == 0 || !worker->runtime->computes || !worker->backend->device_comms) return -1;
    const int home = home_of(worker, worker->stage[0].chunk);
    int submeshes = 0;
    for (int c = 0; c < worker->plan->stage_count; c++)
        submeshes += worker->index[c] == 0 && home_of(worker, c) == home;
    return home >= 0 && submeshes > 1 && !hapt_cluster_link(worker->cluster, home, home)->paced ? home : -1;
}

/* Finds a round in which neither rank has a pair yet. */
static enum hapt_status find_round(const struct worker *worker, struct worker_pair *pair, struct hapt_arena *scratch)
{
    bool *taken;
    const int before = (int)(pair - worker->pair);
    HAPT_NEW(taken, scratch, before + 1);
    for (int p = 0; p < before; p++) {
        const struct worker_pair *other = &worker->pair[p];
        if (other->from == pair->from || other->from == pair->to || other->to == pair->from || other->to == pair->to)
            taken[other->round] = true;
    }
    while (taken[pair->round]) pair->round++;
    return HAPT_OK;
}

static bool is_inside(const struct worker *worker, const struct hapt_edge *edge, int home)
{
    return !worker_shares(worker, edge->from, edge->to) && home_of(worker, edge->from) == home &&
           home_of(worker, edge->to) == home;
}

/* Lists all pairs of the subcluster, in the same order on all its ranks. */
static enum hapt_status list_pairs(struct worker *worker, int home, struct hapt_arena *scratch)
{
    int most = 0;
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        if (is_inside(worker, edge, home)) most += stage_size(worker, edge->from) * stage_size(worker, edge->to);
    }
    HAPT_NEW(worker->pair, worker->arena, most);
    for (int r = 0; r < worker->edges->count; r++) {
        const struct hapt_edge *edge = &worker->edges->edge[r];
        if (!is_inside(worker, edge, home)) continue;
        for (int k = 0; k < stage_size(worker, edge->from) * stage_size(worker, edge->to); k++) {
            const int from = k / stage_size(worker, edge->to), to = k % stage_size(worker, edge->to);
            size_t bytes, dense_bytes;
            HAPT_TRY(stage_edge_bytes(worker, edge, from, to, scratch, &bytes, &dense_bytes));
            if (bytes == 0) continue;
            struct worker_pair *pair = &worker->pair[worker->pair_count++];
            *pair = (struct worker_pair){.edge = r,
                                         .from = stage_world_rank(worker, edge->from, from),
                                         .to = stage_world_rank(worker, edge->to, to),
                                         .dense_bytes = dense_bytes};
            HAPT_TRY(find_round(worker, pair, scratch));
        }
    }
    return HAPT_OK;
}

static bool is_mine(const struct worker *worker, const struct worker_pair *pair)
{
    return pair->from == worker->env->world_rank || pair->to == worker->env->world_rank;
}

/* Splits the device group of all into those of the stages and one per pair. */
static enum hapt_status make_parts(struct worker *worker, const struct hapt_device_group *all,
                                   char fault[HAPT_GROUPS_TEXT_CHARS])
{
    int rounds = 0;
    for (int s = 0; s < worker->most; s++) {
        struct stage *stage = &worker->stage[s < worker->stage_count ? s : 0];
        struct hapt_device_comm *group;
        const bool own = s < worker->stage_count && stage->size > 1;
        HAPT_TRY(hapt_device_group_split(all, own ? stage->chunk : -1, stage->rank, &group, fault));
        hapt_device_group_connect(all, group, false, stage->rank, stage->size, fault);
        if (own) stage->group = group;
    }
    for (int p = 0; p < worker->pair_count; p++)
        if (worker->pair[p].round >= rounds) rounds = worker->pair[p].round + 1;
    for (int round = 0; round < rounds; round++) {
        struct worker_pair *mine = NULL;
        struct hapt_device_comm *group;
        for (int p = 0; p < worker->pair_count; p++)
            if (worker->pair[p].round == round && is_mine(worker, &worker->pair[p])) mine = &worker->pair[p];
        const int rank = mine && mine->to == worker->env->world_rank;
        HAPT_TRY(hapt_device_group_split(all, mine ? (int)(mine - worker->pair) : -1, rank, &group, fault));
        if (mine) mine->own.group = group;
        hapt_device_group_connect(all, group, true, rank, 2, fault);
    }
    return HAPT_OK;
}

/* Allocates buffers for noncontiguous runs of this rank's messages, before the device groups allocate theirs. */
static bool take_memory(struct worker *worker)
{
    for (int p = 0; p < worker->pair_count; p++) {
        struct worker_pair *pair = &worker->pair[p];
        if (!is_mine(worker, pair) || pair->dense_bytes == 0) continue;
        if (worker->backend->allocate(worker->device, pair->dense_bytes, &pair->own.dense) != HAPT_OK) {
            hapt_fail_reset(); /* falls back to the host */
            return false;
        }
    }
    return true;
}

static void destroy_pairs(struct worker *worker, const struct hapt_device_comm_ops *groups)
{
    for (int p = 0; p < worker->pair_count; p++) {
        const struct hapt_pair *own = &worker->pair[p].own;
        if (own->group) groups->destroy(own->group);
        if (own->dense) worker->backend->free(worker->device, own->dense);
    }
    worker->pair_count = 0;
}

/* Succeeds on all ranks of `over` or, with the reason, on none. */
static enum hapt_status create_device_groups(struct worker *worker, int home, struct hapt_collective *over,
                                             struct hapt_arena *scratch, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    struct hapt_device_group all = {.backend = worker->backend,
                                    .device = worker->device,
                                    .queue = worker->backend->queue(worker->device, HAPT_QUEUE_SEND),
                                    .over = over};
    HAPT_TRY(hapt_device_groups_find(over, worker->backend, &all.groups, reason));
    if (reason[0]) return HAPT_OK;
    const char *mine = NULL;
    if (list_pairs(worker, home, scratch) != HAPT_OK) {
        hapt_fail_reset(); /* falls back to the host */
        mine = "a host has no memory left";
    } else if (!all.groups->send) {
        mine = "its library cannot send between two devices";
    } else if (!take_memory(worker)) {
        mine = "a device has no memory left for parts of messages";
    }
    if (mine) snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "%s", mine);
    HAPT_TRY(hapt_device_groups_agree(over, reason));
    if (!reason[0]) {
        HAPT_TRY(hapt_device_group_create(&all, reason));
        HAPT_TRY(make_parts(worker, &all, reason));
        HAPT_TRY(hapt_device_groups_agree(over, reason));
    }
    if (reason[0]) {
        destroy_pairs(worker, all.groups);
        for (int s = 0; s < worker->stage_count; s++) {
            if (worker->stage[s].group) all.groups->destroy(worker->stage[s].group);
            worker->stage[s].group = NULL;
        }
    }
    all.groups->destroy(all.group); /* its parts do not need it */
    return HAPT_OK;
}

enum hapt_status worker_create_device_groups(struct worker *worker)
{
    const int home = exchange_subcluster(worker);
    struct hapt_collective *over = NULL;
    struct hapt_arena scratch;
    MPI_Comm comm;
    HAPT_MPI(MPI_Comm_split(worker->env->world, home < 0 ? MPI_UNDEFINED : home, worker->env->world_rank, &comm));
    if (home < 0) return HAPT_OK;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        hapt_collective_create(comm, worker->cluster->subcluster[home].name, worker->timeout_s, true, &over);
    if (status == HAPT_OK) status = create_device_groups(worker, home, over, &scratch, worker->no_direct_reason);
    if (over) hapt_collective_destroy(over);
    MPI_Comm_free(&comm);
    hapt_arena_release(&scratch);
    return status;
}

void worker_destroy_device_groups(struct worker *worker)
{
    const char *reason;
    if (worker->pair_count > 0) destroy_pairs(worker, worker->backend->device_comms(&reason));
}
