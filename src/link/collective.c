/*
 * Where ranks meet: agreements, and the two ways that collectives take. On one node: slabs in a shared memory window, two
 * of each, so that filling one needs no barrier. Over several nodes: messages of a segment a peer. Waiting never spins
 * for long: other ranks may share the core.
 */
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "collective.h"

struct shared_head {
    _Alignas(64) atomic_ullong arrived;
};

void hapt_link_sharpen_timers(void)
{
    prctl(PR_SET_TIMERSLACK, 1000UL, 0, 0, 0); /* ns; the default adds 50 us to every sleep */
}

void hapt_link_pause(unsigned *spins)
{
    const unsigned count = (*spins)++;
    if (count < 64) {
        sched_yield();
    } else {
        /* Longer and longer, up to 0.3 ms. */
        hapt_time_sleep_until(hapt_time_s() + (count < 104 ? 20e-6 : count < 134 ? 100e-6 : 300e-6));
    }
}

static enum hapt_status late(const char *who, double timeout_s, const char *what)
{
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died or hangs; --timeout sets the limit",
                     "%s waited %.3g s for its peers in: %s", who, timeout_s, what);
}

static enum hapt_status wait_requests(MPI_Request *request, int count, const char *who, double timeout_s,
                                      const char *what)
{
    const double deadline_s = hapt_time_s() + timeout_s;
    unsigned spins = 0;
    for (;;) {
        int done = 0;
        HAPT_MPI(MPI_Testall(count, request, &done, MPI_STATUSES_IGNORE));
        if (done) return HAPT_OK;
        if (hapt_time_s() > deadline_s) return late(who, timeout_s, what);
        hapt_link_pause(&spins);
    }
}

#define GATHER_TAG 28673 /* on the caller's communicator */

/* Posts the blocks of ranks [first, first + count), wrapping round, as one or two messages. */
static enum hapt_status post_blocks(MPI_Comm comm, bool sends, int peer, int first, int count, size_t bytes, char *all,
                                    MPI_Request *request, int *posted)
{
    int size;
    HAPT_MPI(MPI_Comm_size(comm, &size));
    const int here = first + count > size ? size - first : count;
    for (int part = 0; part < 2; part++) {
        const int blocks = part == 0 ? here : count - here;
        char *data = all + (part == 0 ? (size_t)first * bytes : 0);
        const int length = (int)((size_t)blocks * bytes);
        if (blocks == 0) continue;
        if (sends)
            HAPT_MPI(MPI_Isend(data, length, MPI_BYTE, peer, GATHER_TAG, comm, &request[(*posted)++]));
        else
            HAPT_MPI(MPI_Irecv(data, length, MPI_BYTE, peer, GATHER_TAG, comm, &request[(*posted)++]));
    }
    return HAPT_OK;
}

/* Bruck's algorithm: after round k a rank has the blocks of 2^k ranks from itself on. */
enum hapt_status hapt_link_all_gather(MPI_Comm comm, const char *what, double timeout_s, const void *mine, size_t bytes,
                                      void *all)
{
    int rank, size;
    char who[32];
    HAPT_MPI(MPI_Comm_rank(comm, &rank));
    HAPT_MPI(MPI_Comm_size(comm, &size));
    snprintf(who, sizeof who, "rank %d", rank);
    memcpy((char *)all + (size_t)rank * bytes, mine, bytes);
    for (int distance = 1; distance < size; distance *= 2) {
        const int count = distance < size - distance ? distance : size - distance;
        const int to = (rank - distance + size) % size, from = (rank + distance) % size;
        MPI_Request request[4];
        int posted = 0;
        HAPT_TRY(post_blocks(comm, false, from, from, count, bytes, all, request, &posted));
        HAPT_TRY(post_blocks(comm, true, to, rank, count, bytes, all, request, &posted));
        HAPT_TRY(wait_requests(request, posted, who, timeout_s, what));
    }
    return HAPT_OK;
}

enum hapt_status hapt_link_agree(MPI_Comm comm, const char *what, double timeout_s, enum hapt_status status)
{
    int size = 1, all_good = 1;
    MPI_Comm_size(comm, &size);
    int *votes = calloc((size_t)size, sizeof *votes);
    const int mine = (int)status;
    if (!votes) hapt_die(hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for an agreement"));
    const enum hapt_status heard = hapt_link_all_gather(comm, what, timeout_s, &mine, sizeof mine, votes);
    if (heard != HAPT_OK) hapt_die(heard);
    for (int r = 0; r < size; r++) all_good = all_good && votes[r] == HAPT_OK;
    free(votes);
    return all_good ? HAPT_OK : hapt_env_agree(comm, status); /* everyone is there: it will not wait */
}

enum hapt_status hapt_link_all_or_none(MPI_Comm comm, const char *what, enum hapt_status status)
{
    int worst = (int)status;
    HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, &worst, 1, MPI_INT, MPI_MAX, comm));
    if (status != HAPT_OK || worst == HAPT_OK) return status;
    return hapt_fail((enum hapt_status)worst, NULL, "a peer failed before it could join in: %s", what);
}

/* ---- one node ---- */

/* The slabs' places are reserved by the caller: nothing fails on one rank alone between these collectives. */
static enum hapt_status open_window(struct hapt_collective *collective)
{
    const MPI_Aint bytes = (MPI_Aint)(2 * sizeof(struct shared_head) + 2 * SLAB_BYTES);
    char *mine = NULL;
    HAPT_MPI(MPI_Win_allocate_shared(bytes, 1, MPI_INFO_NULL, collective->comm, &mine, &collective->window));
    for (int r = 0; r < collective->size; r++) {
        MPI_Aint size;
        int unit;
        char *base;
        HAPT_MPI(MPI_Win_shared_query(collective->window, r, &size, &unit, &base));
        /* The library aligns a segment to 8 bytes; pages are shared, so all ranks round alike. */
        base += -(uintptr_t)base % _Alignof(struct shared_head);
        if (r == 0) collective->head = (struct shared_head *)base;
        collective->slab[r] = base + sizeof(struct shared_head);
        collective->slab[collective->size + r] = collective->slab[r] + SLAB_BYTES;
    }
    /* Pages are touched first by the rank that fills them. */
    memset(mine, 0, (size_t)bytes);
    if (collective->rank == 0) atomic_init(&collective->head->arrived, 0);
    HAPT_MPI(MPI_Barrier(collective->comm));
    return HAPT_OK;
}

enum hapt_status collective_barrier(struct hapt_collective *collective, const char *what)
{
    const unsigned long long goal = ++collective->barriers * (unsigned long long)collective->size;
    atomic_fetch_add_explicit(&collective->head->arrived, 1, memory_order_acq_rel);
    const double deadline_s = hapt_time_s() + collective->timeout_s;
    unsigned spins = 0;
    for (int quick = 0; quick < 200; quick++)
        if (atomic_load_explicit(&collective->head->arrived, memory_order_acquire) >= goal) return HAPT_OK;
    while (atomic_load_explicit(&collective->head->arrived, memory_order_acquire) < goal) {
        if (hapt_time_s() > deadline_s) return late(collective->who, collective->timeout_s, what);
        hapt_link_pause(&spins);
    }
    return HAPT_OK;
}

char *const *collective_next_slabs(struct hapt_collective *collective)
{
    collective->turn ^= 1;
    return collective->slab + collective->turn * collective->size;
}

/* ---- messages ---- */

enum hapt_status collective_wait(struct hapt_collective *collective, int count, const char *what)
{
    return wait_requests(collective->request, count, collective->who, collective->timeout_s, what);
}

#define TRADE_TAG 2

static enum hapt_status trade_messages(struct hapt_collective *collective, const char *what)
{
    const int me = collective->rank;
    int count = 0;
    for (int r = 0; r < collective->size; r++) {
        if (r == me) continue;
        if (collective->in_bytes[r] > 0)
            HAPT_MPI(MPI_Irecv(collective->received + (size_t)r * SEGMENT_BYTES, (int)collective->in_bytes[r], MPI_BYTE,
                               r, TRADE_TAG, collective->comm, &collective->request[count++]));
        if (collective->out_bytes[r] > 0)
            HAPT_MPI(MPI_Isend(collective->sent + (size_t)r * SEGMENT_BYTES, (int)collective->out_bytes[r], MPI_BYTE, r,
                               TRADE_TAG, collective->comm, &collective->request[count++]));
    }
    return collective_wait(collective, count, what);
}

/* ---- either ---- */

/* What a rank gives itself stands where it put it, so it is never sent. */
size_t collective_trade_bytes(const struct hapt_collective *collective)
{
    return collective->head ? SLAB_BYTES / (size_t)collective->size / 64 * 64 : SEGMENT_BYTES;
}

void collective_trade_begin(struct hapt_collective *collective)
{
    if (collective->head) collective_next_slabs(collective);
}

char *collective_trade_out(const struct hapt_collective *collective, int rank)
{
    if (!collective->head) return collective->sent + (size_t)rank * SEGMENT_BYTES;
    return collective->slab[collective->turn * collective->size + collective->rank] +
           (size_t)rank * collective_trade_bytes(collective);
}

const char *collective_trade_in(const struct hapt_collective *collective, int rank)
{
    if (!collective->head)
        return (rank == collective->rank ? collective->sent : collective->received) + (size_t)rank * SEGMENT_BYTES;
    return collective->slab[collective->turn * collective->size + rank] +
           (size_t)collective->rank * collective_trade_bytes(collective);
}

enum hapt_status collective_trade(struct hapt_collective *collective, const char *what)
{
    return collective->head ? collective_barrier(collective, what) : trade_messages(collective, what);
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
    if (smallest == collective->size && shared_memory && collective->size > 1) return open_window(collective);
    collective->received = calloc((size_t)collective->size, SEGMENT_BYTES);
    collective->sent = calloc((size_t)collective->size, SEGMENT_BYTES);
    enum hapt_status status = HAPT_OK;
    if (!collective->received || !collective->sent) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a collective");
    return hapt_link_all_or_none(collective->comm, "the buffers of a collective", status);
}

static struct hapt_collective *reserve(int size)
{
    struct hapt_collective *made = calloc(1, sizeof *made);
    if (!made) return NULL;
    made->comm = MPI_COMM_NULL;
    made->window = MPI_WIN_NULL;
    made->size = size;
    made->slab = calloc((size_t)(2 * size), sizeof *made->slab);
    made->request = calloc((size_t)(2 * size), sizeof *made->request);
    made->out_bytes = calloc((size_t)size, sizeof *made->out_bytes);
    made->in_bytes = calloc((size_t)size, sizeof *made->in_bytes);
    made->term = calloc((size_t)size, sizeof *made->term);
    if (made->slab && made->request && made->out_bytes && made->in_bytes && made->term) return made;
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
    if (!made) status = hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a collective");
    status = hapt_link_all_or_none(comm, "a collective's making", status);
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
    if (collective->window != MPI_WIN_NULL) MPI_Win_free(&collective->window);
    if (collective->comm != MPI_COMM_NULL) MPI_Comm_free(&collective->comm);
    free(collective->slab);
    free(collective->received);
    free(collective->sent);
    free(collective->request);
    free(collective->out_bytes);
    free(collective->in_bytes);
    free(collective->term);
    free(collective);
}
