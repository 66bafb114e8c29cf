/*
 * Direct exchange between the devices of several stages in one subcluster. All these devices form one device group. The
 * device groups of each stage, and of every two ranks that an edge connects, are split from it. If anything fails,
 * boundaries and collectives use the host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime.h"

/* The subcluster of all ranks of a chunk; -1: they are in several. */
static int home_of(const struct stage *stage, int chunk)
{
    const int *subcluster = stage->cluster->subcluster_of_rank, home = subcluster[stage_world_rank(stage, chunk, 0)];
    for (int r = 1; r < stage_size(stage, chunk); r++)
        if (subcluster[stage_world_rank(stage, chunk, r)] != home) return -1;
    return home;
}

/* The subcluster in which this rank's stage may exchange directly, because several stages there can; -1: none. The same
 * on all ranks of those stages. */
static int exchange_subcluster(const struct stage *stage)
{
    if (stage->chunk < 0 || !stage->runtime->computes || !stage->backend->device_comms) return -1;
    const int home = home_of(stage, stage->chunk);
    int stages = 0;
    for (int c = 0; c < stage->plan->stage_count; c++) stages += home_of(stage, c) == home;
    return home >= 0 && stages > 1 && !hapt_cluster_link(stage->cluster, home, home)->paced ? home : -1;
}

/* Finds a round in which neither rank has a pair yet. */
static enum hapt_status find_round(const struct stage *stage, struct stage_pair *pair, struct hapt_arena *scratch)
{
    bool *taken;
    const int before = (int)(pair - stage->pair);
    HAPT_NEW(taken, scratch, before + 1);
    for (int p = 0; p < before; p++) {
        const struct stage_pair *other = &stage->pair[p];
        if (other->from == pair->from || other->from == pair->to || other->to == pair->from || other->to == pair->to)
            taken[other->round] = true;
    }
    while (taken[pair->round]) pair->round++;
    return HAPT_OK;
}

static bool is_inside(const struct stage *stage, const struct hapt_edge *edge, int home)
{
    return home_of(stage, edge->from) == home && home_of(stage, edge->to) == home;
}

/* Lists all pairs of the subcluster, in the same order on all its ranks. */
static enum hapt_status list_pairs(struct stage *stage, int home, struct hapt_arena *scratch)
{
    int most = 0;
    for (int r = 0; r < stage->edges->count; r++) {
        const struct hapt_edge *edge = &stage->edges->edge[r];
        if (is_inside(stage, edge, home)) most += stage_size(stage, edge->from) * stage_size(stage, edge->to);
    }
    HAPT_NEW(stage->pair, stage->arena, most);
    for (int r = 0; r < stage->edges->count; r++) {
        const struct hapt_edge *edge = &stage->edges->edge[r];
        if (!is_inside(stage, edge, home)) continue;
        for (int k = 0; k < stage_size(stage, edge->from) * stage_size(stage, edge->to); k++) {
            const int from = k / stage_size(stage, edge->to), to = k % stage_size(stage, edge->to);
            size_t bytes, dense_bytes;
            HAPT_TRY(stage_edge_bytes(stage, edge, from, to, scratch, &bytes, &dense_bytes));
            if (bytes == 0) continue;
            struct stage_pair *pair = &stage->pair[stage->pair_count++];
            *pair = (struct stage_pair){.edge = r,
                                        .from = stage_world_rank(stage, edge->from, from),
                                        .to = stage_world_rank(stage, edge->to, to),
                                        .dense_bytes = dense_bytes};
            HAPT_TRY(find_round(stage, pair, scratch));
        }
    }
    return HAPT_OK;
}

static bool is_mine(const struct stage *stage, const struct stage_pair *pair)
{
    return pair->from == stage->env->world_rank || pair->to == stage->env->world_rank;
}

/* Splits the device group of all into that of the stage and one per pair. */
static enum hapt_status make_parts(struct stage *stage, const struct hapt_device_group *all,
                                   struct hapt_device_comm **stage_group, char fault[HAPT_GROUPS_TEXT_CHARS])
{
    int rounds = 0;
    for (int p = 0; p < stage->pair_count; p++)
        if (stage->pair[p].round >= rounds) rounds = stage->pair[p].round + 1;
    HAPT_TRY(hapt_device_group_split(all, stage->size > 1 ? stage->chunk : -1, stage->rank, stage_group, fault));
    hapt_device_group_connect(all, *stage_group, false, stage->rank, stage->size, fault);
    for (int round = 0; round < rounds; round++) {
        struct stage_pair *mine = NULL;
        struct hapt_device_comm *group;
        for (int p = 0; p < stage->pair_count; p++)
            if (stage->pair[p].round == round && is_mine(stage, &stage->pair[p])) mine = &stage->pair[p];
        const int rank = mine && mine->to == stage->env->world_rank;
        HAPT_TRY(hapt_device_group_split(all, mine ? (int)(mine - stage->pair) : -1, rank, &group, fault));
        if (mine) mine->own.group = group;
        hapt_device_group_connect(all, group, true, rank, 2, fault);
    }
    return HAPT_OK;
}

/* Allocates buffers for noncontiguous runs of this rank's messages, before the device groups allocate theirs. */
static bool take_memory(struct stage *stage)
{
    for (int p = 0; p < stage->pair_count; p++) {
        struct stage_pair *pair = &stage->pair[p];
        if (!is_mine(stage, pair) || pair->dense_bytes == 0) continue;
        if (stage->backend->allocate(stage->device, pair->dense_bytes, &pair->own.dense) != HAPT_OK) {
            hapt_fail_reset(); /* falls back to the host */
            return false;
        }
    }
    return true;
}

static void destroy_pairs(struct stage *stage, const struct hapt_device_comm_ops *groups)
{
    for (int p = 0; p < stage->pair_count; p++) {
        const struct hapt_pair *own = &stage->pair[p].own;
        if (own->group) groups->destroy(own->group);
        if (own->dense) stage->backend->free(stage->device, own->dense);
    }
    stage->pair_count = 0;
}

/* Succeeds on all ranks of `over` or, with the reason, on none. */
static enum hapt_status create_device_groups(struct stage *stage, int home, struct hapt_collective *over,
                                             struct hapt_arena *scratch, struct hapt_device_comm **stage_group,
                                             char reason[HAPT_GROUPS_TEXT_CHARS])
{
    struct hapt_device_group all = {.backend = stage->backend,
                                    .device = stage->device,
                                    .queue = stage->backend->queue(stage->device, HAPT_QUEUE_SEND),
                                    .over = over};
    HAPT_TRY(hapt_device_groups_find(over, stage->backend, &all.groups, reason));
    if (reason[0]) return HAPT_OK;
    const char *mine = NULL;
    if (list_pairs(stage, home, scratch) != HAPT_OK) {
        hapt_fail_reset(); /* falls back to the host */
        mine = "a host has no memory left";
    } else if (!all.groups->send) {
        mine = "its library cannot send between two devices";
    } else if (!take_memory(stage)) {
        mine = "a device has no memory left for parts of messages";
    }
    if (mine) snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "%s", mine);
    HAPT_TRY(hapt_device_groups_agree(over, reason));
    if (!reason[0]) {
        HAPT_TRY(hapt_device_group_create(&all, reason));
        HAPT_TRY(make_parts(stage, &all, stage_group, reason));
        HAPT_TRY(hapt_device_groups_agree(over, reason));
    }
    if (reason[0]) {
        destroy_pairs(stage, all.groups);
        if (*stage_group) all.groups->destroy(*stage_group);
        *stage_group = NULL;
    }
    all.groups->destroy(all.group); /* its parts do not need it */
    return HAPT_OK;
}

enum hapt_status stage_create_device_groups(struct stage *stage, struct hapt_device_comm **stage_group)
{
    const int home = exchange_subcluster(stage);
    struct hapt_collective *over = NULL;
    struct hapt_arena scratch;
    MPI_Comm comm;
    *stage_group = NULL;
    HAPT_MPI(MPI_Comm_split(stage->env->world, home < 0 ? MPI_UNDEFINED : home, stage->env->world_rank, &comm));
    if (home < 0) return HAPT_OK;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        hapt_collective_create(comm, stage->cluster->subcluster[home].name, stage->timeout_s, true, &over);
    if (status == HAPT_OK)
        status = create_device_groups(stage, home, over, &scratch, stage_group, stage->no_direct_reason);
    if (over) hapt_collective_destroy(over);
    MPI_Comm_free(&comm);
    hapt_arena_release(&scratch);
    return status;
}

void stage_destroy_device_groups(struct stage *stage)
{
    const char *reason;
    if (stage->pair_count > 0) destroy_pairs(stage, stage->backend->device_comms(&reason));
}
