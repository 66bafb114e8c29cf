/*
 * Data exchange and waiting for collectives, in two variants. One node: slabs in shared memory, two per rank, so that
 * filling one needs no barrier. Several nodes: messages, one segment per peer and block. Waits never spin for long,
 * because other ranks may share the core.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "collective.h"

struct shared_head {
    _Alignas(64) atomic_ullong arrived; /* on rank 0 only: arrivals, summed over all barriers and ranks */
    atomic_ullong reached;              /* barriers that this rank has reached: to name late ranks */
};

/* ---- one node ---- */

static struct shared_head *head_of(const struct hapt_collective *collective, int rank)
{
    return (struct shared_head *)(collective->slab[rank] - sizeof(struct shared_head));
}

/* Allocates the slabs of all ranks as one block. collective->shared stays NULL if the host cannot provide shared
 * memory. */
static enum hapt_status open_slabs(struct hapt_collective *collective)
{
    const size_t each = sizeof(struct shared_head) + 2 * SLAB_BYTES;
    HAPT_TRY(hapt_shared_open(collective->comm, (size_t)collective->size * each, &collective->shared));
    if (!collective->shared) return HAPT_OK;
    char *base = hapt_shared_memory(collective->shared);
    for (int r = 0; r < collective->size; r++) {
        collective->slab[r] = base + (size_t)r * each + sizeof(struct shared_head);
        collective->slab[collective->size + r] = collective->slab[r] + SLAB_BYTES;
    }
    collective->head = head_of(collective, 0);
    /* First touch: each rank zeroes the pages that it will fill. */
    memset(base + (size_t)collective->rank * each, 0, each);
    if (collective->rank == 0) atomic_init(&collective->head->arrived, 0);
    atomic_init(&head_of(collective, collective->rank)->reached, 0);
    return hapt_env_mpi(MPI_Barrier(collective->comm), "MPI_Barrier");
}

static enum hapt_status barrier_late(const struct hapt_collective *collective, const char *what)
{
    for (int r = 0; r < collective->size; r++)
        collective->absent[r] = atomic_load(&head_of(collective, r)->reached) < collective->barriers;
    return link_late(collective->comm, collective->absent, collective->who, collective->timeout_s, what);
}

enum hapt_status collective_barrier(struct hapt_collective *collective, const char *what)
{
    const unsigned long long goal = ++collective->barriers * (unsigned long long)collective->size;
    atomic_store_explicit(&head_of(collective, collective->rank)->reached, collective->barriers, memory_order_relaxed);
    atomic_fetch_add_explicit(&collective->head->arrived, 1, memory_order_acq_rel);
    const double deadline_s = hapt_time_s() + collective->timeout_s;
    unsigned spins = 0;
    for (int quick = 0; quick < 200; quick++)
        if (atomic_load_explicit(&collective->head->arrived, memory_order_acquire) >= goal) return HAPT_OK;
    while (atomic_load_explicit(&collective->head->arrived, memory_order_acquire) < goal) {
        if (hapt_time_s() > deadline_s) return barrier_late(collective, what);
        hapt_link_pause(&spins);
    }
    return HAPT_OK;
}

char *const *collective_next_slabs(struct hapt_collective *collective)
{
    collective->slab_set ^= 1;
    return collective->slab + collective->slab_set * collective->size;
}

/* ---- messages ---- */

enum hapt_status collective_send(struct hapt_collective *collective, const void *data, int length, int peer, int tag,
                                 int *count)
{
    collective->peer[*count] = peer;
    return hapt_env_mpi(
        MPI_Isend(data, length, MPI_BYTE, peer, tag, collective->comm, &collective->request[(*count)++]), "MPI_Isend");
}

enum hapt_status collective_receive(struct hapt_collective *collective, void *data, int length, int peer, int tag,
                                    int *count)
{
    collective->peer[*count] = peer;
    return hapt_env_mpi(
        MPI_Irecv(data, length, MPI_BYTE, peer, tag, collective->comm, &collective->request[(*count)++]), "MPI_Irecv");
}

enum hapt_status collective_wait(struct hapt_collective *collective, int count, const char *what)
{
    const double deadline_s = hapt_time_s() + collective->timeout_s;
    bool late = false;
    HAPT_TRY(link_wait(count, collective->request, deadline_s, &late));
    if (!late) return HAPT_OK;
    memset(collective->absent, 0, (size_t)collective->size * sizeof *collective->absent);
    for (int i = 0; i < count; i++) {
        int done = 0;
        HAPT_MPI(MPI_Test(&collective->request[i], &done, MPI_STATUS_IGNORE));
        if (!done) collective->absent[collective->peer[i]] = true;
    }
    return link_late(collective->comm, collective->absent, collective->who, collective->timeout_s, what);
}

#define PRESENCE_TAG 4
#define PRESENCE_S 1.0 /* ranks start to wait at nearly the same time, so they also time out together */

enum hapt_status hapt_collective_late(struct hapt_collective *collective, const char *what)
{
    static const bool absent = false;
    int count = 0;
    bool late;
    for (int r = 0; r < collective->size; r++) {
        collective->absent[r] = r != collective->rank;
        if (!collective->absent[r]) continue;
        HAPT_TRY(collective_receive(collective, &collective->absent[r], sizeof absent, r, PRESENCE_TAG, &count));
        HAPT_TRY(collective_send(collective, &absent, sizeof absent, r, PRESENCE_TAG, &count));
    }
    HAPT_TRY(link_wait(count, collective->request, hapt_time_s() + PRESENCE_S, &late));
    return link_late(collective->comm, collective->absent, collective->who, collective->timeout_s, what);
}

enum hapt_status hapt_collective_broken(const struct hapt_collective *collective, const char *what, const char *fault)
{
    hapt_link_wait_for_job_end(collective->timeout_s);
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; NCCL_DEBUG=INFO shows what the devices do",
                     "%s: %s in: %s", collective->who, fault, what);
}

double hapt_collective_timeout_s(const struct hapt_collective *collective)
{
    return collective->timeout_s;
}

#define ALL_TO_ALL_TAG 2

static enum hapt_status exchange_messages(struct hapt_collective *collective, const char *what)
{
    const int me = collective->rank;
    int count = 0;
    for (int r = 0; r < collective->size; r++) {
        if (r == me) continue;
        const size_t offset = (size_t)r * SEGMENT_BYTES;
        const int in = (int)collective->in_bytes[r], out = (int)collective->out_bytes[r];
        if (in > 0)
            HAPT_TRY(collective_receive(collective, collective->received + offset, in, r, ALL_TO_ALL_TAG, &count));
        if (out > 0) HAPT_TRY(collective_send(collective, collective->sent + offset, out, r, ALL_TO_ALL_TAG, &count));
    }
    return collective_wait(collective, count, what);
}

/* ---- either variant ---- */

/* A rank's block for itself is never sent: it is read from the send buffer. */
size_t collective_all_to_all_bytes(const struct hapt_collective *collective)
{
    return collective->head ? SLAB_BYTES / (size_t)collective->size / 64 * 64 : SEGMENT_BYTES;
}

void collective_all_to_all_begin(struct hapt_collective *collective)
{
    if (collective->head) collective_next_slabs(collective);
}

char *collective_all_to_all_out(const struct hapt_collective *collective, int rank)
{
    if (!collective->head) return collective->sent + (size_t)rank * SEGMENT_BYTES;
    return collective->slab[collective->slab_set * collective->size + collective->rank] +
           (size_t)rank * collective_all_to_all_bytes(collective);
}

const char *collective_all_to_all_in(const struct hapt_collective *collective, int rank)
{
    if (!collective->head)
        return (rank == collective->rank ? collective->sent : collective->received) + (size_t)rank * SEGMENT_BYTES;
    return collective->slab[collective->slab_set * collective->size + rank] +
           (size_t)collective->rank * collective_all_to_all_bytes(collective);
}

enum hapt_status collective_all_to_all(struct hapt_collective *collective, const char *what)
{
    return collective->head ? collective_barrier(collective, what) : exchange_messages(collective, what);
}

int hapt_collective_ranks(const struct hapt_collective *collective)
{
    return collective->size;
}

int hapt_collective_rank(const struct hapt_collective *collective)
{
    return collective->rank;
}

size_t hapt_collective_slice(size_t elements, int ranks, int rank)
{
    const size_t each = elements / (size_t)ranks, rest = elements % (size_t)ranks, r = (size_t)rank;
    return r * each + (r < rest ? r : rest);
}

static enum hapt_status open_collective(struct hapt_collective *collective, MPI_Comm comm, bool shared_memory)
{
    HAPT_MPI(MPI_Comm_dup(comm, &collective->comm));
    HAPT_MPI(MPI_Comm_set_errhandler(collective->comm, MPI_ERRORS_RETURN));
    HAPT_MPI(MPI_Comm_rank(collective->comm, &collective->rank));
    MPI_Comm node;
    int together = 0;
    HAPT_MPI(MPI_Comm_split_type(collective->comm, MPI_COMM_TYPE_SHARED, collective->rank, MPI_INFO_NULL, &node));
    HAPT_MPI(MPI_Comm_size(node, &together));
    MPI_Comm_free(&node);
    int smallest = together;
    HAPT_MPI(MPI_Allreduce(&together, &smallest, 1, MPI_INT, MPI_MIN, collective->comm));
    if (smallest == collective->size && shared_memory && collective->size > 1) HAPT_TRY(open_slabs(collective));
    if (collective->head) return HAPT_OK;
    collective->received = calloc((size_t)collective->size, SEGMENT_BYTES);
    collective->sent = calloc((size_t)collective->size, SEGMENT_BYTES);
    enum hapt_status status = HAPT_OK;
    if (!collective->received || !collective->sent)
        status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: buffers of a collective");
    return hapt_link_all_or_none(collective->comm, "reserving the buffers of a collective", status);
}

static struct hapt_collective *reserve(int size)
{
    struct hapt_collective *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->comm = MPI_COMM_NULL;
    made->size = size;
    made->slab = calloc((size_t)(2 * size), sizeof *made->slab);
    made->request = calloc((size_t)(2 * size), sizeof *made->request);
    made->peer = calloc((size_t)(2 * size), sizeof *made->peer);
    made->absent = calloc((size_t)size, sizeof *made->absent);
    made->out_bytes = calloc((size_t)size, sizeof *made->out_bytes);
    made->in_bytes = calloc((size_t)size, sizeof *made->in_bytes);
    made->term = calloc((size_t)size, sizeof *made->term);
    if (made->slab && made->request && made->peer && made->absent && made->out_bytes && made->in_bytes && made->term)
        return made;
    hapt_collective_destroy(made);
    return NULL;
}

enum hapt_status hapt_collective_create(MPI_Comm comm, const char *who, double timeout_s, bool shared_memory,
                                        struct hapt_collective **collective)
{
    int size;
    HAPT_MPI(MPI_Comm_size(comm, &size));
    struct hapt_collective *made = reserve(size);
    enum hapt_status status = HAPT_OK;
    if (!made) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: a collective");
    status = hapt_link_all_or_none(comm, "creating a collective", status);
    if (status == HAPT_OK) {
        made->who = who;
        made->timeout_s = timeout_s;
        status = open_collective(made, comm, shared_memory);
    }
    if (status != HAPT_OK) {
        hapt_collective_destroy(made);
        return status;
    }
    *collective = made;
    return HAPT_OK;
}

void hapt_collective_destroy(struct hapt_collective *collective)
{
    if (!collective) return;
    hapt_shared_release(collective->shared);
    if (collective->comm != MPI_COMM_NULL) MPI_Comm_free(&collective->comm);
    free(collective->slab);
    free(collective->received);
    free(collective->sent);
    free(collective->request);
    free(collective->peer);
    free(collective->absent);
    free(collective->out_bytes);
    free(collective->in_bytes);
    free(collective->term);
    free(collective);
}
