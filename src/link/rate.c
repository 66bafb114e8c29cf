/* Measures the throughput of a transfer between two ranks, with the chunk size, chunks in flight and polling of stage
 * boundary transfers. */
#include <stdlib.h>
#include <string.h>

#include "hapt/network.h"

enum {
    MAX_CHUNKS_IN_FLIGHT = 16,
    ROUND_TRIPS = 21,
    MAX_BURST = 64 /* chunks between two replies */,
    PING = 1,
    DATA = 2,
    ANSWER = 3
};
#define DEADLINE_S 2.0 /* without progress for so long, the route does not work */

struct measuring {
    const struct hapt_transfer *transfer;
    void *context;
    int peer;
    char *buffer; /* [MAX_CHUNKS_IN_FLIGHT] chunks; their content does not matter */
};

static enum hapt_status finish(const struct measuring *measuring, struct hapt_transfer_request *request)
{
    const double deadline = hapt_time_s() + DEADLINE_S;
    unsigned spins = 0;
    for (bool done = false;;) {
        HAPT_TRY(measuring->transfer->test(measuring->context, request, &done));
        if (done) return HAPT_OK;
        if (hapt_time_s() > deadline)
            return hapt_fail(HAPT_ERR_COMM, NULL, "no message to or from rank %d by %s in %.0f s", measuring->peer,
                             measuring->transfer->name, DEADLINE_S);
        hapt_link_pause(&spins);
    }
}

/* Sends or receives `count` messages, with as many in flight as a communication thread has. */
static enum hapt_status stream(const struct measuring *measuring, bool sends, int tag, int count, size_t bytes)
{
    struct hapt_transfer_request request[MAX_CHUNKS_IN_FLIGHT];
    for (int i = 0; i < count + MAX_CHUNKS_IN_FLIGHT; i++) {
        if (i >= MAX_CHUNKS_IN_FLIGHT && i - MAX_CHUNKS_IN_FLIGHT < count)
            HAPT_TRY(finish(measuring, &request[i % MAX_CHUNKS_IN_FLIGHT]));
        if (i >= count) continue;
        char *address = measuring->buffer + (size_t)(i % MAX_CHUNKS_IN_FLIGHT) * HAPT_LINK_CHUNK_BYTES;
        HAPT_TRY(sends ? measuring->transfer->send(measuring->context, address, bytes, measuring->peer, tag,
                                                   &request[i % MAX_CHUNKS_IN_FLIGHT])
                       : measuring->transfer->receive(measuring->context, address, bytes, measuring->peer, tag,
                                                      &request[i % MAX_CHUNKS_IN_FLIGHT]));
    }
    return HAPT_OK;
}

static enum hapt_status ping(const struct measuring *measuring, bool leads, double *latency_s)
{
    double sample[ROUND_TRIPS];
    for (int i = -1; i < ROUND_TRIPS; i++) { /* the first round trip opens the connection */
        const double start_s = hapt_time_s();
        HAPT_TRY(stream(measuring, leads, PING, 1, 1));
        HAPT_TRY(stream(measuring, !leads, PING, 1, 1));
        if (i >= 0) sample[i] = (hapt_time_s() - start_s) / 2;
    }
    qsort(sample, ROUND_TRIPS, sizeof *sample, hapt_compare_doubles);
    *latency_s = sample[ROUND_TRIPS / 2];
    return HAPT_OK;
}

/* Sends bursts from rank 0. After each, the receiver replies with one byte, and the sender announces the size of the
 * next. Only the second half of the time counts, because buffers in switches and shapers let the first bytes pass
 * faster. */
static enum hapt_status flood(const struct measuring *measuring, bool leads, double seconds, double *bandwidth)
{
    const double start_s = hapt_time_s();
    double half_s = 0, bytes = 0, end_s = start_s;
    for (int burst = 1; burst > 0;) {
        const double burst_s = hapt_time_s();
        HAPT_TRY(stream(measuring, leads, DATA, burst, HAPT_LINK_CHUNK_BYTES));
        HAPT_TRY(stream(measuring, !leads, ANSWER, 1, 1));
        end_s = hapt_time_s();
        if (half_s > 0) bytes += (double)burst * HAPT_LINK_CHUNK_BYTES;
        if (half_s == 0 && end_s - start_s >= seconds / 2) half_s = end_s;
        if (bytes > 0 && end_s - start_s >= seconds)
            burst = 0;
        else if (end_s - burst_s < seconds / 8 && burst < MAX_BURST)
            burst *= 2;
        measuring->buffer[0] = (char)burst;
        HAPT_TRY(stream(measuring, leads, ANSWER, 1, 1));
        if (!leads) burst = measuring->buffer[0];
    }
    *bandwidth = bytes / (end_s - half_s);
    return HAPT_OK;
}

static enum hapt_status connect_pair(const struct measuring *measuring, MPI_Comm pair, bool leads)
{
    const struct hapt_transfer *transfer = measuring->transfer;
    const struct {
        int tag;
        bool there, back;
    } used[] = {{PING, true, true}, {DATA, leads, !leads}, {ANSWER, true, true}};
    enum hapt_status status = HAPT_OK;
    if (!transfer->announce) return HAPT_OK;
    for (int u = 0; u < 3; u++) {
        if (status == HAPT_OK && used[u].there)
            status = transfer->announce(measuring->context, measuring->peer, used[u].tag, true);
        if (status == HAPT_OK && used[u].back)
            status = transfer->announce(measuring->context, measuring->peer, used[u].tag, false);
    }
    HAPT_TRY(hapt_link_all_or_none(pair, "measuring a link", status));
    return transfer->connect(measuring->context, DEADLINE_S);
}

enum hapt_status hapt_transfer_measure(const struct hapt_transfer *transfer, MPI_Comm pair,
                                       const struct hapt_path *path, double seconds, double *latency_s,
                                       double *bandwidth)
{
    struct measuring measuring = {.transfer = transfer, .buffer = calloc(MAX_CHUNKS_IN_FLIGHT, HAPT_LINK_CHUNK_BYTES)};
    double result[2] = {0, 0};
    int rank;
    MPI_Comm_rank(pair, &rank);
    measuring.peer = 1 - rank;
    enum hapt_status status = hapt_link_all_or_none(
        pair, "measuring a link",
        measuring.buffer ? HAPT_OK : hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: measuring a link"));
    if (status == HAPT_OK) status = transfer->open(pair, path, &measuring.context);
    if (status == HAPT_OK) {
        status = connect_pair(&measuring, pair, rank == 0);
        if (status == HAPT_OK) status = ping(&measuring, rank == 0, &result[0]);
        if (status == HAPT_OK) status = flood(&measuring, rank == 0, seconds, &result[1]);
        status = hapt_link_all_or_none(pair, "measuring a link", status);
        transfer->close(measuring.context);
    }
    /* After a failure the library may still write to the buffer, so it is never freed. */
    HAPT_TRY(status);
    free(measuring.buffer);
    HAPT_MPI(MPI_Bcast(result, 2, MPI_DOUBLE, 0, pair));
    *latency_s = result[0];
    *bandwidth = result[1];
    return HAPT_OK;
}
