/* The transfer table that uses MPI or TCP for each peer, as its path says. */
#include <stdlib.h>
#include <string.h>

#include "hapt/network.h"

struct routed {
    void *mpi, *tcp; /* contexts of the two; tcp NULL: no rank has a peer by TCP */
    bool *by_tcp;    /* [ranks of world] */
};

/* The last byte of a request says which table owns it; both tables leave it unused. */
enum { OWNER_BYTE = sizeof(struct hapt_transfer_request) - 1 };

static void release(struct routed *routed)
{
    if (routed->tcp) hapt_transfer_tcp.close(routed->tcp);
    if (routed->mpi) hapt_transfer_mpi.close(routed->mpi);
    free(routed->by_tcp);
    free(routed);
}

static enum hapt_status reserve(MPI_Comm world, const struct hapt_path *path, struct routed **routed, int *any)
{
    int ranks;
    MPI_Comm_size(world, &ranks);
    *routed = calloc(1, sizeof **routed);
    if (*routed) (*routed)->by_tcp = calloc((size_t)ranks, sizeof(bool));
    if (!*routed || !(*routed)->by_tcp)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: routes to %d ranks", ranks);
    for (int r = 0; path && r < ranks; r++) *any |= (*routed)->by_tcp[r] = path[r].tcp;
    return HAPT_OK;
}

static enum hapt_status open_both(MPI_Comm world, const struct hapt_path *path, void **context)
{
    struct routed *routed = NULL;
    int any = 0;
    enum hapt_status status =
        hapt_link_all_or_none(world, "the routes to other ranks", reserve(world, path, &routed, &any));
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Allreduce(MPI_IN_PLACE, &any, 1, MPI_INT, MPI_LOR, world), "MPI_Allreduce");
    if (status == HAPT_OK) status = hapt_transfer_mpi.open(world, path, &routed->mpi);
    if (status == HAPT_OK && any) status = hapt_transfer_tcp.open(world, path, &routed->tcp);
    if (status == HAPT_OK) {
        *context = routed;
    } else if (routed) {
        release(routed);
    }
    return status;
}

static void close_both(void *context)
{
    release(context);
}

static enum hapt_status announce(void *context, int peer, int tag, bool sends)
{
    const struct routed *routed = context;
    return routed->by_tcp[peer] ? hapt_transfer_tcp.announce(routed->tcp, peer, tag, sends) : HAPT_OK;
}

static enum hapt_status connect_tcp(void *context, double timeout_s)
{
    const struct routed *routed = context;
    return routed->tcp ? hapt_transfer_tcp.connect(routed->tcp, timeout_s) : HAPT_OK;
}

static const struct hapt_transfer *table(struct routed *routed, bool tcp, void **context)
{
    *context = tcp ? routed->tcp : routed->mpi;
    return tcp ? &hapt_transfer_tcp : &hapt_transfer_mpi;
}

static enum hapt_status send_chunk(void *context, const void *data, size_t bytes, int peer, int tag,
                                   struct hapt_transfer_request *request)
{
    struct routed *routed = context;
    void *its;
    const struct hapt_transfer *by = table(routed, routed->by_tcp[peer], &its);
    request->opaque[OWNER_BYTE] = routed->by_tcp[peer];
    return by->send(its, data, bytes, peer, tag, request);
}

static enum hapt_status receive_chunk(void *context, void *data, size_t bytes, int peer, int tag,
                                      struct hapt_transfer_request *request)
{
    struct routed *routed = context;
    void *its;
    const struct hapt_transfer *by = table(routed, routed->by_tcp[peer], &its);
    request->opaque[OWNER_BYTE] = routed->by_tcp[peer];
    return by->receive(its, data, bytes, peer, tag, request);
}

static enum hapt_status test_chunk(void *context, struct hapt_transfer_request *request, bool *done)
{
    void *its;
    const struct hapt_transfer *by = table(context, request->opaque[OWNER_BYTE], &its);
    return by->test(its, request, done);
}

static bool takes_device(void *context, int peer)
{
    const struct routed *routed = context;
    return !routed->by_tcp[peer] && hapt_transfer_mpi.takes_device(routed->mpi, peer);
}

static bool tell_rate(void *context, int peer, int tag, struct hapt_transfer_rate *rate)
{
    struct routed *routed = context;
    void *its;
    const struct hapt_transfer *by = table(routed, routed->by_tcp[peer], &its);
    return by->rate && by->rate(its, peer, tag, rate);
}

static bool wakes(void *context, int peer)
{
    const struct routed *routed = context;
    return routed->by_tcp[peer];
}

static void wait_for_event(void *context, int event_fd, double until_s)
{
    const struct routed *routed = context;
    hapt_transfer_tcp.wait(routed->tcp, event_fd, until_s);
}

const struct hapt_transfer hapt_transfer_routed = {
    .name = "routed",
    .description = "MPI or own TCP connections for each rank, whichever was measured faster",
    .open = open_both,
    .close = close_both,
    .announce = announce,
    .connect = connect_tcp,
    .send = send_chunk,
    .receive = receive_chunk,
    .test = test_chunk,
    .takes_device = takes_device,
    .rate = tell_rate,
    .wakes = wakes,
    .wait = wait_for_event,
};
