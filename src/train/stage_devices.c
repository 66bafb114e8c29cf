/*
 * Stages of one subcluster whose devices trade among themselves: a group of them all, of which those of the stages and
 * of every two ranks that a route joins are parts. Whatever fails, boundaries and collectives go on passing through the
 * host.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "stage.h"

/* The subcluster that has all ranks of a chunk; -1: several do. */
static int home_of(const struct stage *stage, int chunk)
{
    const int *subcluster = stage->cluster->subcluster_of_rank, home = subcluster[stage_world_rank(stage, chunk, 0)];
    for (int r = 1; r < stage_size(stage, chunk); r++)
        if (subcluster[stage_world_rank(stage, chunk, r)] != home) return -1;
    return home;
}

/* Where this rank's stage is one of several whose devices may trade; -1: it is not. The same on all ranks of those
 * stages. */
static int meeting_place(const struct stage *stage)
{
    if (stage->chunk < 0 || stage->emulated || !stage->backend->groups) return -1;
    const int home = home_of(stage, stage->chunk);
    int stages = 0;
    for (int c = 0; c < stage->plan->stage_count; c++) stages += home_of(stage, c) == home;
    return home >= 0 && stages > 1 && !hapt_cluster_link(stage->cluster, home, home)->paced ? home : -1;
}

/* A round in which neither of the two is in a pair before it. */
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

static bool is_inside(const struct stage *stage, const struct hapt_route *route, int home)
{
    return home_of(stage, route->from) == home && home_of(stage, route->to) == home;
}

/* All pairs of the subcluster, in the same order on all its ranks. */
static enum hapt_status list_pairs(struct stage *stage, int home, struct hapt_arena *scratch)
{
    int most = 0;
    for (int r = 0; r < stage->routes->count; r++) {
        const struct hapt_route *route = &stage->routes->route[r];
        if (is_inside(stage, route, home)) most += stage_size(stage, route->from) * stage_size(stage, route->to);
    }
    HAPT_NEW(stage->pair, stage->arena, most);
    for (int r = 0; r < stage->routes->count; r++) {
        const struct hapt_route *route = &stage->routes->route[r];
        if (!is_inside(stage, route, home)) continue;
        for (int k = 0; k < stage_size(stage, route->from) * stage_size(stage, route->to); k++) {
            const int from = k / stage_size(stage, route->to), to = k % stage_size(stage, route->to);
            size_t bytes, dense_bytes;
            HAPT_TRY(stage_route_bytes(stage, route, from, to, scratch, &bytes, &dense_bytes));
            if (bytes == 0) continue;
            struct stage_pair *pair = &stage->pair[stage->pair_count++];
            *pair = (struct stage_pair){.route = r,
                                        .from = stage_world_rank(stage, route->from, from),
                                        .to = stage_world_rank(stage, route->to, to),
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

/* The parts of the group of all: the stage's, and each pair's. */
static enum hapt_status make_parts(struct stage *stage, const struct hapt_device_group *all, struct hapt_group **whole,
                                   char fault[HAPT_GROUPS_TEXT_CHARS])
{
    int rounds = 0;
    for (int p = 0; p < stage->pair_count; p++)
        if (stage->pair[p].round >= rounds) rounds = stage->pair[p].round + 1;
    HAPT_TRY(hapt_device_group_split(all, stage->size > 1 ? stage->chunk : -1, stage->rank, whole, fault));
    hapt_device_group_connect(all, *whole, false, stage->rank, stage->size, fault);
    for (int round = 0; round < rounds; round++) {
        struct stage_pair *mine = NULL;
        struct hapt_group *group;
        for (int p = 0; p < stage->pair_count; p++)
            if (stage->pair[p].round == round && is_mine(stage, &stage->pair[p])) mine = &stage->pair[p];
        const int rank = mine && mine->to == stage->env->world_rank;
        HAPT_TRY(hapt_device_group_split(all, mine ? (int)(mine - stage->pair) : -1, rank, &group, fault));
        if (mine) mine->own.group = group;
        hapt_device_group_connect(all, group, true, rank, 2, fault);
    }
    return HAPT_OK;
}

/* For runs of this rank's messages; before groups take their own. */
static bool take_memory(struct stage *stage)
{
    for (int p = 0; p < stage->pair_count; p++) {
        struct stage_pair *pair = &stage->pair[p];
        if (!is_mine(stage, pair) || pair->dense_bytes == 0) continue;
        if (stage->backend->allocate(stage->device, pair->dense_bytes, &pair->own.dense) != HAPT_OK) {
            hapt_fail_reset(); /* there is another way */
            return false;
        }
    }
    return true;
}

static void part(struct stage *stage, const struct hapt_groups *groups)
{
    for (int p = 0; p < stage->pair_count; p++) {
        const struct hapt_pair *own = &stage->pair[p].own;
        if (own->group) groups->destroy(own->group);
        if (own->dense) stage->backend->free(stage->device, own->dense);
    }
    stage->pair_count = 0;
}

/* On all of the ranks of `over` or, with the reason, on none. */
static enum hapt_status meet(struct stage *stage, int home, struct hapt_collective *over, struct hapt_arena *scratch,
                             struct hapt_group **whole, char reason[HAPT_GROUPS_TEXT_CHARS])
{
    struct hapt_device_group all = {.backend = stage->backend,
                                    .device = stage->device,
                                    .queue = stage->backend->queue(stage->device, HAPT_QUEUE_SEND),
                                    .over = over};
    HAPT_TRY(hapt_device_groups_find(over, stage->backend, &all.groups, reason));
    if (reason[0]) return HAPT_OK;
    const char *mine = NULL;
    if (list_pairs(stage, home, scratch) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        mine = "a host has no memory left";
    } else if (!all.groups->send) {
        mine = "its library trades between no two devices";
    } else if (!take_memory(stage)) {
        mine = "a device has no memory left for parts of tensors on their way";
    }
    if (mine) snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "%s", mine);
    HAPT_TRY(hapt_device_groups_agree(over, reason));
    if (!reason[0]) {
        HAPT_TRY(hapt_device_group_create(&all, reason));
        HAPT_TRY(make_parts(stage, &all, whole, reason));
        HAPT_TRY(hapt_device_groups_agree(over, reason));
    }
    if (reason[0]) {
        part(stage, all.groups);
        if (*whole) all.groups->destroy(*whole);
        *whole = NULL;
    }
    all.groups->destroy(all.group); /* its parts have all they need */
    return HAPT_OK;
}

enum hapt_status stage_meet(struct stage *stage, struct hapt_group **whole)
{
    const int home = meeting_place(stage);
    struct hapt_collective *over = NULL;
    struct hapt_arena scratch;
    MPI_Comm comm;
    *whole = NULL;
    HAPT_MPI(MPI_Comm_split(stage->env->world, home < 0 ? MPI_UNDEFINED : home, stage->env->world_rank, &comm));
    if (home < 0) return HAPT_OK;
    hapt_arena_init(&scratch);
    enum hapt_status status =
        hapt_collective_create(comm, stage->cluster->subcluster[home].name, stage->timeout_s, true, &over);
    if (status == HAPT_OK) status = meet(stage, home, over, &scratch, whole, stage->apart);
    if (over) hapt_collective_destroy(over);
    MPI_Comm_free(&comm);
    hapt_arena_release(&scratch);
    return status;
}

void stage_part(struct stage *stage)
{
    const char *reason;
    if (stage->pair_count > 0) part(stage, stage->backend->groups(&reason));
}

const struct hapt_pair *stage_find_pair(const struct stage *stage, int route, int from, int to)
{
    for (int p = 0; p < stage->pair_count; p++) {
        const struct stage_pair *pair = &stage->pair[p];
        if (pair->route == route && pair->from == from && pair->to == to) return pair->own.group ? &pair->own : NULL;
    }
    return NULL;
}
