/*
 * Bells: how couriers of one node wake each other. A word of shared memory a rank counts how often it was rung; its
 * courier sleeps on that word (a futex), whoever sends it something counts it up and wakes it. A courier of an emulated
 * device thus sleeps until there is something for it: 64 of them that asked the library every 400 us would fill two
 * cores.
 */
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "courier.h"

struct bell {
    _Alignas(64) atomic_uint rung;
    atomic_uint sleeping;
};

struct bells {
    struct hapt_shared *shared;
    struct bell *bell; /* [ranks of the node] */
    int own;
    int world_size;
    int *place; /* [world_size] among the ranks of the node; -1: on another one */
};

bool bells_reach(const struct bells *bells, int world_rank)
{
    return world_rank >= 0 && world_rank < bells->world_size && bells->place[world_rank] >= 0;
}

bool hapt_courier_rings(const struct hapt_courier *courier, int world_rank)
{
    return courier->bells && bells_reach(courier->bells, world_rank);
}

static void ring(struct bell *bell)
{
    atomic_fetch_add(&bell->rung, 1);
    /* Whoever falls asleep looks at `rung` after it said so: one of the two sees the other. */
    if (atomic_load(&bell->sleeping)) syscall(SYS_futex, &bell->rung, FUTEX_WAKE, 1, NULL, NULL, 0);
}

bool bells_ring(struct bells *bells, int world_rank)
{
    if (!bells_reach(bells, world_rank)) return false;
    ring(&bells->bell[bells->place[world_rank]]);
    return true;
}

void bells_ring_own(struct bells *bells)
{
    ring(&bells->bell[bells->own]);
}

unsigned bells_count(const struct bells *bells)
{
    return atomic_load(&bells->bell[bells->own].rung);
}

void bells_wait(struct bells *bells, unsigned count, double until_s)
{
    struct bell *bell = &bells->bell[bells->own];
    struct timespec due = {0};
    const bool ends = !isnan(until_s);
    if (ends) {
        due.tv_sec = (time_t)until_s;
        due.tv_nsec = (long)((until_s - (double)due.tv_sec) * 1e9);
    }
    atomic_store(&bell->sleeping, 1);
    /* The clock is CLOCK_MONOTONIC and the time absolute: a signal or an early wake does no harm, the caller looks
     * again. */
    if (atomic_load(&bell->rung) == count)
        syscall(SYS_futex, &bell->rung, FUTEX_WAIT_BITSET, count, ends ? &due : NULL, NULL, FUTEX_BITSET_MATCH_ANY);
    atomic_store(&bell->sleeping, 0);
}

/* The places of the node's ranks in `world`. */
static enum hapt_status find_places(struct bells *bells, MPI_Comm world, MPI_Comm node)
{
    MPI_Group all, here;
    int *rank = NULL;
    HAPT_MPI(MPI_Comm_group(world, &all));
    HAPT_MPI(MPI_Comm_group(node, &here));
    enum hapt_status status = HAPT_OK;
    rank = malloc((size_t)bells->world_size * sizeof *rank);
    if (!rank) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the bells of a node");
    for (int r = 0; status == HAPT_OK && r < bells->world_size; r++) rank[r] = r;
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Group_translate_ranks(all, bells->world_size, rank, here, bells->place),
                              "MPI_Group_translate_ranks");
    for (int r = 0; status == HAPT_OK && r < bells->world_size; r++)
        if (bells->place[r] == MPI_UNDEFINED) bells->place[r] = -1;
    free(rank);
    MPI_Group_free(&all);
    MPI_Group_free(&here);
    return status;
}

static enum hapt_status open_bells(struct bells *bells, MPI_Comm node)
{
    int size;
    HAPT_MPI(MPI_Comm_rank(node, &bells->own));
    HAPT_MPI(MPI_Comm_size(node, &size));
    HAPT_TRY(hapt_shared_open(node, (size_t)size * sizeof(struct bell), &bells->shared));
    if (!bells->shared) return HAPT_OK;
    bells->bell = hapt_shared_memory(bells->shared);
    atomic_init(&bells->bell[bells->own].rung, 0);
    atomic_init(&bells->bell[bells->own].sleeping, 0);
    return hapt_env_mpi(MPI_Barrier(node), "MPI_Barrier");
}

enum hapt_status hapt_courier_use_bells(struct hapt_courier *courier, MPI_Comm world, MPI_Comm node)
{
    struct bells *made = calloc(1, sizeof *made);
    enum hapt_status status = HAPT_OK;
    HAPT_ASSERT(!courier->running && !courier->bells);
    if (made) {
        HAPT_MPI(MPI_Comm_size(world, &made->world_size));
        made->place = malloc((size_t)made->world_size * sizeof *made->place);
    }
    if (!made || !made->place) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for the bells of a node");
    if (status == HAPT_OK) status = find_places(made, world, node);
    status = hapt_link_all_or_none(node, "the bells of a node", status);
    if (status == HAPT_OK) status = open_bells(made, node);
    if (status != HAPT_OK || !made->shared) { /* without common memory couriers ask the library */
        bells_destroy(made);
        return status;
    }
    courier->bells = made;
    return HAPT_OK;
}

void bells_destroy(struct bells *bells)
{
    if (!bells) return;
    hapt_shared_release(bells->shared);
    free(bells->place);
    free(bells);
}
