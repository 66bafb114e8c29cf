/*
 * Stages of one subcluster whose devices trade among themselves: a group of them all, of which those of the stages and of every two ranks that
 * a route joins are parts. Whatever fails, boundaries and collectives go on passing through the host.
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

/* Where this rank's stage is one of several whose devices may trade; -1: it is not. The same on all ranks of those stages. */
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
        if (other->from == pair->from || other->from == pair->to || other->to == pair->from || other->to == pair->to) taken[other->round] = true;
    }
    while (taken[pair->round]) pair->round++;
    return HAPT_OK;
}

static bool is_inside(const struct stage *stage, const struct hapt_route *route, int home)
{
    return home_of(stage, route->from) == home && home_of(stage, route->to) == home;
}

/* All pairs of the subcluster, in the same order on all its ranks. `dense`: device memory for runs of this rank. */
static enum hapt_status list_pairs(struct stage *stage, int home, struct hapt_arena *scratch, size_t *dense)
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
            size_t bytes, in_runs;
            HAPT_TRY(stage_route_bytes(stage, route, from, to, scratch, &bytes, &in_runs));
            if (bytes == 0) continue;
            struct stage_pair *pair = &stage->pair[stage->pair_count++];
            *pair = (struct stage_pair){.route = r, .from = stage_world_rank(stage, route->from, from), .to = stage_world_rank(stage, route->to, to)};
            HAPT_TRY(find_round(stage, pair, scratch));
            if (pair->from == stage->env->world_rank || pair->to == stage->env->world_rank) *dense += in_runs;
        }
    }
    return HAPT_OK;
}

/* The parts of the group of all: the stage's, and each pair's. */
static enum hapt_status make_parts(struct stage *stage, const struct hapt_device_group *all, struct hapt_group **whole,
                                   char fault[HAPT_GROUPS_TEXT_CHARS])
{
    const int me = stage->env->world_rank;
    int rounds = 0;
    for (int p = 0; p < stage->pair_count; p++)
        if (stage->pair[p].round >= rounds) rounds = stage->pair[p].round + 1;
    HAPT_TRY(hapt_device_group_split(all, stage->size > 1 ? stage->chunk : -1, stage->rank, whole, fault));
    hapt_device_group_connect(all, *whole, false, stage->rank, stage->size, fault);
    for (int round = 0; round < rounds; round++) {
        struct stage_pair *mine = NULL;
        struct hapt_group *group;
        for (int p = 0; p < stage->pair_count; p++)
            if (stage->pair[p].round == round && (stage->pair[p].from == me || stage->pair[p].to == me)) mine = &stage->pair[p];
        HAPT_TRY(hapt_device_group_split(all, mine ? (int)(mine - stage->pair) : -1, mine && mine->to == me, &group, fault));
        if (mine) mine->group = group;
        hapt_device_group_connect(all, group, true, mine && mine->to == me, 2, fault);
    }
    return HAPT_OK;
}

/* The memory is there, if nobody else takes it meanwhile. */
static bool has_room(const struct stage *stage, size_t bytes)
{
    void *memory;
    if (bytes == 0) return true;
    if (stage->backend->allocate(stage->device, bytes, &memory) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        return false;
    }
    stage->backend->free(stage->device, memory);
    return true;
}

static void give_up(struct stage *stage, const struct hapt_groups *groups, struct hapt_group **whole)
{
    for (int p = 0; p < stage->pair_count; p++)
        if (stage->pair[p].group) groups->destroy(stage->pair[p].group);
    if (*whole) groups->destroy(*whole);
    stage->pair_count = 0;
    *whole = NULL;
}

/* On all of the ranks of `over` or, with the reason, on none. */
static enum hapt_status meet(struct stage *stage, int home, struct hapt_collective *over, struct hapt_arena *scratch, struct hapt_group **whole,
                             char reason[HAPT_GROUPS_TEXT_CHARS])
{
    struct hapt_device_group all = {
        .backend = stage->backend, .device = stage->device, .queue = stage->backend->queue(stage->device, HAPT_QUEUE_SEND), .over = over};
    size_t dense = 0;
    HAPT_TRY(hapt_device_groups_find(over, stage->backend, &all.groups, reason));
    if (reason[0]) return HAPT_OK;
    const char *mine = NULL;
    if (list_pairs(stage, home, scratch, &dense) != HAPT_OK) {
        hapt_fail_reset(); /* there is another way */
        mine = "a host has no memory left";
    } else if (!all.groups->send) {
        mine = "its library trades between no two devices";
    } else if (!has_room(stage, dense)) {
        mine = "a device has no memory left for parts of tensors on their way";
    }
    if (mine) snprintf(reason, HAPT_GROUPS_TEXT_CHARS, "%s", mine);
    HAPT_TRY(hapt_device_groups_agree(over, reason));
    if (!reason[0]) {
        HAPT_TRY(hapt_device_group_create(&all, reason));
        HAPT_TRY(make_parts(stage, &all, whole, reason));
        HAPT_TRY(hapt_device_groups_agree(over, reason));
    }
    if (reason[0]) give_up(stage, all.groups, whole);
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
    enum hapt_status status = hapt_collective_create(comm, stage->cluster->subcluster[home].name, stage->timeout_s, true, &over);
    if (status == HAPT_OK) status = meet(stage, home, over, &scratch, whole, stage->apart);
    if (over) hapt_collective_destroy(over);
    MPI_Comm_free(&comm);
    hapt_arena_release(&scratch);
    return status;
}

void stage_part(struct stage *stage)
{
    const char *reason;
    for (int p = 0; p < stage->pair_count; p++)
        if (stage->pair[p].group) stage->backend->groups(&reason)->destroy(stage->pair[p].group);
    stage->pair_count = 0;
}

struct hapt_group *stage_pair_group(const struct stage *stage, int route, int from, int to)
{
    for (int p = 0; p < stage->pair_count; p++) {
        const struct stage_pair *pair = &stage->pair[p];
        if (pair->route == route && pair->from == from && pair->to == to) return pair->group;
    }
    return NULL;
}
