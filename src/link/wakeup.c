/*
 * Wakeups: communication threads of one node wake each other. Each rank has a word of shared memory that counts its
 * wakeups. Its communication thread sleeps on that word (a futex); a sender increments it and wakes the thread. So the
 * communication thread of an emulated device sleeps until it has work. 64 threads that polled the library every 400 us
 * would fill two cores.
 */
#include <linux/futex.h>
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "comm_thread.h"

struct wakeup {
    _Alignas(64) atomic_uint count;
    atomic_uint sleeping;
};

struct wakeups {
    struct hapt_shared *shared;
    struct wakeup *wakeup; /* [ranks of the node] */
    int own;
    int world_size;
    int *node_rank; /* [world_size] rank in `node`; -1: on another node */
};

bool wakeups_reach(const struct wakeups *wakeups, int world_rank)
{
    return world_rank >= 0 && world_rank < wakeups->world_size && wakeups->node_rank[world_rank] >= 0;
}

bool hapt_comm_thread_has_wakeup(const struct hapt_comm_thread *comm_thread, int world_rank)
{
    return comm_thread->wakeups && wakeups_reach(comm_thread->wakeups, world_rank);
}

static void wake(struct wakeup *wakeup)
{
    atomic_fetch_add(&wakeup->count, 1);
    /* A thread that goes to sleep sets `sleeping` before it reads `count`, so one of the two sees the other. */
    if (atomic_load(&wakeup->sleeping)) syscall(SYS_futex, &wakeup->count, FUTEX_WAKE, 1, NULL, NULL, 0);
}

bool wakeups_signal(struct wakeups *wakeups, int world_rank)
{
    if (!wakeups_reach(wakeups, world_rank)) return false;
    wake(&wakeups->wakeup[wakeups->node_rank[world_rank]]);
    return true;
}

void wakeups_signal_own(struct wakeups *wakeups)
{
    wake(&wakeups->wakeup[wakeups->own]);
}

unsigned wakeups_count(const struct wakeups *wakeups)
{
    return atomic_load(&wakeups->wakeup[wakeups->own].count);
}

void wakeups_wait(struct wakeups *wakeups, unsigned count, double until_s)
{
    struct wakeup *wakeup = &wakeups->wakeup[wakeups->own];
    const bool ends = !isnan(until_s);
    const struct timespec due = hapt_time_spec(ends ? until_s : 0);
    atomic_store(&wakeup->sleeping, 1);
    /* The clock is CLOCK_MONOTONIC and the time absolute. A signal or an early wakeup is harmless: the caller checks
     * again. */
    if (atomic_load(&wakeup->count) == count)
        syscall(SYS_futex, &wakeup->count, FUTEX_WAIT_BITSET, count, ends ? &due : NULL, NULL, FUTEX_BITSET_MATCH_ANY);
    atomic_store(&wakeup->sleeping, 0);
}

/* Translates ranks of `world` to ranks of `node`. */
static enum hapt_status find_node_ranks(struct wakeups *wakeups, MPI_Comm world, MPI_Comm node)
{
    MPI_Group all, here;
    int *rank = NULL;
    HAPT_MPI(MPI_Comm_group(world, &all));
    HAPT_MPI(MPI_Comm_group(node, &here));
    enum hapt_status status = HAPT_OK;
    rank = malloc((size_t)wakeups->world_size * sizeof *rank);
    if (!rank) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: wakeups of a node");
    for (int r = 0; status == HAPT_OK && r < wakeups->world_size; r++) rank[r] = r;
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Group_translate_ranks(all, wakeups->world_size, rank, here, wakeups->node_rank),
                              "MPI_Group_translate_ranks");
    for (int r = 0; status == HAPT_OK && r < wakeups->world_size; r++)
        if (wakeups->node_rank[r] == MPI_UNDEFINED) wakeups->node_rank[r] = -1;
    free(rank);
    MPI_Group_free(&all);
    MPI_Group_free(&here);
    return status;
}

static enum hapt_status open_wakeups(struct wakeups *wakeups, MPI_Comm node)
{
    int size;
    HAPT_MPI(MPI_Comm_rank(node, &wakeups->own));
    HAPT_MPI(MPI_Comm_size(node, &size));
    HAPT_TRY(hapt_shared_open(node, (size_t)size * sizeof(struct wakeup), &wakeups->shared));
    if (!wakeups->shared) return HAPT_OK;
    wakeups->wakeup = hapt_shared_memory(wakeups->shared);
    atomic_init(&wakeups->wakeup[wakeups->own].count, 0);
    atomic_init(&wakeups->wakeup[wakeups->own].sleeping, 0);
    return hapt_env_mpi(MPI_Barrier(node), "MPI_Barrier");
}

enum hapt_status hapt_comm_thread_use_wakeups(struct hapt_comm_thread *comm_thread, MPI_Comm world, MPI_Comm node)
{
    struct wakeups *made = calloc(1, sizeof *made);
    enum hapt_status status = HAPT_OK;
    HAPT_ASSERT(!comm_thread->running && !comm_thread->wakeups);
    if (made) {
        HAPT_MPI(MPI_Comm_size(world, &made->world_size));
        made->node_rank = malloc((size_t)made->world_size * sizeof *made->node_rank);
    }
    if (!made || !made->node_rank)
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: wakeups of a node");
    if (status == HAPT_OK) status = find_node_ranks(made, world, node);
    status = hapt_link_all_or_none(node, "the wakeups of a node", status);
    if (status == HAPT_OK) status = open_wakeups(made, node);
    if (status != HAPT_OK || !made->shared) { /* without shared memory, communication threads poll */
        wakeups_destroy(made);
        return status;
    }
    comm_thread->wakeups = made;
    return HAPT_OK;
}

void wakeups_destroy(struct wakeups *wakeups)
{
    if (!wakeups) return;
    hapt_shared_release(wakeups->shared);
    free(wakeups->node_rank);
    free(wakeups);
}
