/*
 * The transfer table over TCP: one connection for each peer, tag and direction, bound to the interface in the peer's
 * path.
 *
 * A connection carries the messages of one tag in one direction, in order, each after its length. All connections are
 * made before the first message (tcp_setup.h); afterwards no rank listens. A connection is read only while a receive
 * is posted, so unexpected messages stay in network buffers and block no other tag. An idle communication thread
 * sleeps on the sockets: polling them every fraction of a millisecond would cost the computing cores thousands of
 * interrupts a second.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <linux/tcp.h> /* the C library's tcp_info is older and shorter */
#include <math.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "tcp_setup.h"

#define QUEUE 64    /* limit of messages in flight per connection: more than a communication thread has */
#define ROUND_S 0.2 /* interval at which ranks that connect learn of each other's failures */

struct message {
    char *data;
    uint32_t bytes; /* sent before the data, in network byte order */
};

struct connection {
    int peer, tag;
    bool sends;
    int socket;                       /* -1: before connect */
    int low;                          /* low-water mark: bytes from which on the socket is readable; 0: not set */
    size_t done;                      /* bytes of the oldest message, including its length field */
    int64_t begun, finished;          /* messages */
    struct hapt_transfer_rate before; /* what the system had counted when the first message began */
    struct message queue[QUEUE];
    struct connection *next;
};

struct tcp_context {
    MPI_Comm world; /* the caller's */
    int ranks, rank;
    struct hapt_path *path; /* [ranks] */
    int connection_count;
    struct connection *connections;
    bool connected;
    struct pollfd *ready; /* [connection_count + 1] */
};

struct request {
    struct connection *connection;
    int64_t number;
};
_Static_assert(sizeof(struct request) < sizeof(struct hapt_transfer_request),
               "a request holds a connection, a number and one spare byte");

/* ---- opening ---- */

static enum hapt_status broken(const struct tcp_context *tcp, const struct connection *connection, const char *what)
{
    const struct hapt_path *path = &tcp->path[connection->peer];
    return hapt_fail(HAPT_ERR_COMM,
                     "look for a rank that died, or a firewall between the hosts; \"transport\": \"mpi\" in the "
                     "cluster file avoids own connections",
                     "%s rank %d (interface %s): %s", what, connection->peer, path->own.name,
                     errno ? strerror(errno) : "the connection was closed");
}

static void release(struct tcp_context *tcp)
{
    for (struct connection *at = tcp->connections, *next; at; at = next) {
        next = at->next;
        if (at->socket >= 0) close(at->socket);
        free(at);
    }
    free(tcp->ready);
    free(tcp->path);
    free(tcp);
}

static enum hapt_status reserve(MPI_Comm world, const struct hapt_path *path, struct tcp_context **tcp)
{
    struct tcp_context *made = calloc(1, sizeof *made);
    *tcp = made;
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: TCP connections");
    made->world = world;
    MPI_Comm_rank(world, &made->rank);
    MPI_Comm_size(world, &made->ranks);
    made->path = calloc((size_t)made->ranks, sizeof *made->path);
    if (!made->path) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: TCP connections");
    memcpy(made->path, path, (size_t)made->ranks * sizeof *path);
    return HAPT_OK;
}

static enum hapt_status open_context(MPI_Comm world, const struct hapt_path *path, void **context)
{
    struct tcp_context *tcp = NULL;
    HAPT_ASSERT(path);
    const enum hapt_status status =
        hapt_link_all_or_none(world, "connections between hosts", reserve(world, path, &tcp));
    if (status != HAPT_OK) {
        if (tcp) release(tcp);
        return status;
    }
    *context = tcp;
    return HAPT_OK;
}

static void close_context(void *context)
{
    release(context);
}

/* ---- connections ---- */

static struct connection *find(const struct tcp_context *tcp, int peer, int tag, bool sends)
{
    struct connection *at = tcp->connections;
    while (at && (at->peer != peer || at->tag != tag || at->sends != sends)) at = at->next;
    return at;
}

static enum hapt_status announce(void *context, int peer, int tag, bool sends)
{
    struct tcp_context *tcp = context;
    HAPT_ASSERT(!tcp->connected && peer >= 0 && peer < tcp->ranks && tcp->path[peer].tcp);
    if (find(tcp, peer, tag, sends)) return HAPT_OK;
    struct connection *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: a TCP connection");
    made->peer = peer;
    made->tag = tag;
    made->sends = sends;
    made->socket = -1;
    made->next = tcp->connections;
    tcp->connections = made;
    tcp->connection_count++;
    return HAPT_OK;
}

/* Data for connecting, including what the ranks exchange before. */
struct preparation {
    struct tcp_wanted *wanted; /* [connection_count] in list order */
    uint16_t *own_port, *port; /* [ranks] port at which this rank listens for each rank, and vice versa */
    struct tcp_setup *setup;
};

static void dismiss(struct preparation *preparation)
{
    tcp_setup_destroy(preparation->setup);
    free(preparation->wanted);
    free(preparation->own_port);
    free(preparation->port);
}

static enum hapt_status prepare(struct tcp_context *tcp, struct preparation *preparation)
{
    const size_t ranks = (size_t)tcp->ranks, count = (size_t)tcp->connection_count;
    preparation->wanted = calloc(count + 1, sizeof *preparation->wanted);
    preparation->own_port = calloc(ranks, sizeof *preparation->own_port);
    preparation->port = calloc(ranks, sizeof *preparation->port);
    tcp->ready = calloc(count + 1, sizeof *tcp->ready);
    if (!preparation->wanted || !preparation->own_port || !preparation->port || !tcp->ready)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: %zu TCP connections", count);
    struct tcp_wanted *wanted = preparation->wanted;
    for (const struct connection *at = tcp->connections; at; at = at->next)
        *wanted++ = (struct tcp_wanted){
            .peer = at->peer, .tag = at->tag, .sends = at->sends, .path = tcp->path[at->peer], .socket = -1};
    HAPT_TRY(tcp_setup_create(tcp->rank, (int)count, preparation->wanted, TCP_SETUP_PENDING_S, &preparation->setup));
    for (int r = 0; r < tcp->ranks; r++)
        if (tcp->path[r].tcp) preparation->own_port[r] = tcp_setup_port(preparation->setup, &tcp->path[r]);
    return HAPT_OK;
}

/* The key is distributed by MPI, which started the job. */
static enum hapt_status exchange(const struct tcp_context *tcp, struct preparation *preparation)
{
    unsigned char key[SIPHASH_BYTES] = {0};
    int drawn = tcp->rank != 0 || getrandom(key, sizeof key, 0) == sizeof key;
    HAPT_MPI(MPI_Bcast(&drawn, 1, MPI_INT, 0, tcp->world));
    if (!drawn)
        return hapt_fail(HAPT_ERR_COMM, "the system's random number generator is needed",
                         "rank 0 cannot draw random numbers");
    HAPT_MPI(MPI_Bcast(key, sizeof key, MPI_BYTE, 0, tcp->world));
    HAPT_MPI(MPI_Alltoall(preparation->own_port, 1, MPI_UINT16_T, preparation->port, 1, MPI_UINT16_T, tcp->world));
    tcp_setup_key(preparation->setup, key);
    explicit_bzero(key, sizeof key);
    for (int i = 0; i < tcp->connection_count; i++)
        preparation->wanted[i].port = preparation->port[preparation->wanted[i].peer];
    return HAPT_OK;
}

/* Gives all ranks the error record of the lowest rank that failed. */
static enum hapt_status share_failure(const struct tcp_context *tcp, int failed_rank, enum hapt_status failed)
{
    char text[2][400] = {"", ""};
    if (tcp->rank == failed_rank) {
        snprintf(text[0], sizeof text[0], "%s", hapt_fail_message());
        snprintf(text[1], sizeof text[1], "%s", hapt_fail_hint());
    }
    HAPT_MPI(MPI_Bcast(text, sizeof text, MPI_CHAR, failed_rank, tcp->world));
    if (tcp->rank != failed_rank) hapt_fail_reset();
    return tcp->rank == failed_rank ? failed : hapt_fail(failed, text[1], "%s", text[0]);
}

/* Works in short rounds, so that a failure of one rank ends the wait of the others. */
static enum hapt_status connect_all(const struct tcp_context *tcp, struct tcp_setup *setup, double timeout_s)
{
    const double start_s = hapt_time_s();
    for (bool complete = false;;) {
        enum hapt_status status =
            tcp_setup_advance(setup, fmin(hapt_time_s() + ROUND_S, start_s + timeout_s), &complete);
        if (status == HAPT_OK && !complete && hapt_time_s() >= start_s + timeout_s)
            status = tcp_setup_late(setup, timeout_s);
        const struct {
            int key, status;
        } mine = {status != HAPT_OK ? tcp->rank : complete ? 2 * tcp->ranks : tcp->ranks, (int)status};
        struct {
            int key, status;
        } least;
        HAPT_MPI(MPI_Allreduce(&mine, &least, 1, MPI_2INT, MPI_MINLOC, tcp->world));
        if (least.key < tcp->ranks) return share_failure(tcp, least.key, (enum hapt_status)least.status);
        if (least.key == 2 * tcp->ranks) return HAPT_OK;
    }
}

static enum hapt_status connect_peers(void *context, double timeout_s)
{
    struct tcp_context *tcp = context;
    struct preparation preparation = {0};
    HAPT_ASSERT(!tcp->connected);
    tcp->connected = true;
    enum hapt_status status =
        hapt_link_all_or_none(tcp->world, "listening for connections", prepare(tcp, &preparation));
    if (status == HAPT_OK) status = exchange(tcp, &preparation);
    if (status == HAPT_OK) status = connect_all(tcp, preparation.setup, timeout_s);
    const struct tcp_wanted *wanted = preparation.wanted;
    for (struct connection *at = tcp->connections; at && preparation.setup; at = at->next)
        at->socket = wanted++->socket;
    dismiss(&preparation);
    return status;
}

/* ---- transfers ---- */

/* The rest of a message: of its length field, then of its data. */
static int rest_of(struct message *message, uint32_t *length, size_t done, struct iovec part[2])
{
    int parts = 0;
    if (done < sizeof *length) part[parts++] = (struct iovec){(char *)length + done, sizeof *length - done};
    const size_t offset = done < sizeof *length ? 0 : done - sizeof *length;
    if (offset < message->bytes) part[parts++] = (struct iovec){message->data + offset, message->bytes - offset};
    return parts;
}

static enum hapt_status push(const struct tcp_context *tcp, struct connection *connection)
{
    while (connection->finished < connection->begun) {
        struct message *message = &connection->queue[connection->finished % QUEUE];
        uint32_t length = htonl(message->bytes);
        struct iovec part[2];
        const struct msghdr header = {.msg_iov = part,
                                      .msg_iovlen = (size_t)rest_of(message, &length, connection->done, part)};
        const ssize_t put = sendmsg(connection->socket, &header, MSG_NOSIGNAL);
        if (put < 0 && (errno == EAGAIN || errno == EINTR)) return HAPT_OK;
        if (put < 0) return broken(tcp, connection, "cannot send to");
        connection->done += (size_t)put;
        if (connection->done < sizeof length + message->bytes) return HAPT_OK;
        connection->done = 0;
        connection->finished++;
    }
    return HAPT_OK;
}

static enum hapt_status pull(const struct tcp_context *tcp, struct connection *connection)
{
    while (connection->finished < connection->begun) {
        struct message *message = &connection->queue[connection->finished % QUEUE];
        /* Receives the length, which must equal that of the posted receive. */
        uint32_t length = htonl(message->bytes), said = length;
        struct iovec part[2];
        struct msghdr header = {.msg_iov = part, .msg_iovlen = (size_t)rest_of(message, &said, connection->done, part)};
        errno = 0;
        const ssize_t got = recvmsg(connection->socket, &header, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return HAPT_OK;
        if (got <= 0) return broken(tcp, connection, "cannot receive from");
        if (said != length)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "rank %d sent a message of %u bytes where %u were expected",
                             connection->peer, ntohl(said), message->bytes);
        connection->done += (size_t)got;
        if (connection->done < sizeof length + message->bytes) return HAPT_OK;
        connection->done = 0;
        connection->finished++;
    }
    return HAPT_OK;
}

static enum hapt_status progress(struct tcp_context *tcp, struct connection *connection)
{
    return connection->sends ? push(tcp, connection) : pull(tcp, connection);
}

/* False: the system does not provide it. */
static bool ask_system(const struct connection *connection, struct hapt_transfer_rate *rate)
{
    struct tcp_info info;
    socklen_t length = sizeof info;
    *rate = (struct hapt_transfer_rate){0, 0};
    if (getsockopt(connection->socket, IPPROTO_TCP, TCP_INFO, &info, &length)) return false;
    if (length < offsetof(struct tcp_info, tcpi_rwnd_limited) + sizeof info.tcpi_rwnd_limited)
        return false; /* Linux before 2016 */
    rate->bytes = (double)info.tcpi_bytes_acked;
    rate->busy_s = 1e-6 * (double)(info.tcpi_busy_time - info.tcpi_rwnd_limited);
    return true;
}

static enum hapt_status begin(struct tcp_context *tcp, bool sends, void *data, size_t bytes, int peer, int tag,
                              struct hapt_transfer_request *request)
{
    struct request mine = {.connection = find(tcp, peer, tag, sends)};
    HAPT_ASSERT(mine.connection && mine.connection->socket >= 0 && bytes <= HAPT_LINK_CHUNK_BYTES);
    mine.number = mine.connection->begun;
    HAPT_ASSERT(mine.number - mine.connection->finished < QUEUE);
    if (mine.number == 0 && sends) ask_system(mine.connection, &mine.connection->before);
    mine.connection->queue[mine.number % QUEUE] = (struct message){data, (uint32_t)bytes};
    mine.connection->begun++;
    memcpy(request->opaque, &mine, sizeof mine);
    return progress(tcp, mine.connection);
}

static enum hapt_status send_chunk(void *context, const void *data, size_t bytes, int peer, int tag,
                                   struct hapt_transfer_request *request)
{
    return begin(context, true, (void *)data, bytes, peer, tag, request);
}

static enum hapt_status receive_chunk(void *context, void *data, size_t bytes, int peer, int tag,
                                      struct hapt_transfer_request *request)
{
    return begin(context, false, data, bytes, peer, tag, request);
}

static enum hapt_status test_chunk(void *context, struct hapt_transfer_request *request, bool *done)
{
    struct request mine;
    memcpy(&mine, request->opaque, sizeof mine);
    if (mine.connection->finished <= mine.number) HAPT_TRY(progress(context, mine.connection));
    *done = mine.connection->finished > mine.number;
    return HAPT_OK;
}

/* ---- waiting ---- */

static bool wakes(void *context, int peer)
{
    const struct tcp_context *tcp = context;
    return tcp->path[peer].tcp;
}

/* Sets the low-water mark, so that the last byte of the oldest message wakes the receiver, not every packet. */
static void set_low_water_mark(struct connection *connection)
{
    const struct message *message = &connection->queue[connection->finished % QUEUE];
    const int low = (int)(sizeof(uint32_t) + message->bytes - connection->done);
    if (low == connection->low) return;
    connection->low = low;
    setsockopt(connection->socket, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
}

/* All sockets with messages in flight, after `event_fd`. */
static int list_sockets(struct tcp_context *tcp, int event_fd)
{
    int count = 0;
    tcp->ready[count++] = (struct pollfd){.fd = event_fd, .events = POLLIN};
    for (struct connection *at = tcp->connections; at; at = at->next) {
        if (at->finished == at->begun) continue;
        if (!at->sends) set_low_water_mark(at);
        tcp->ready[count++] = (struct pollfd){.fd = at->socket, .events = at->sends ? POLLOUT : POLLIN};
    }
    return count;
}

static void wait_for_event(void *context, int event_fd, double until_s)
{
    struct tcp_context *tcp = context;
    const double left_s = isnan(until_s) ? 0 : fmax(until_s - hapt_time_s(), 0);
    const struct timespec left = hapt_time_spec(left_s);
    const int count = list_sockets(tcp, event_fd);
    ppoll(tcp->ready, (nfds_t)count, isnan(until_s) ? NULL : &left, NULL);
}

/* Linux counts the bytes that the peer's system acknowledged and the time (in its ticks) during which data waited for
 * that. So a process that is late to send or to receive does not lengthen it. Waiting for room in the peer's buffers
 * and the connection set-up are excluded. */
static bool tell_rate(void *context, int peer, int tag, struct hapt_transfer_rate *rate)
{
    const struct tcp_context *tcp = context;
    if (!tcp->path[peer].tcp) return false;
    const struct connection *connection = find(tcp, peer, tag, true);
    *rate = (struct hapt_transfer_rate){0, 0};
    if (!connection || connection->begun == 0) return true;
    if (!ask_system(connection, rate)) return false;
    rate->bytes -= connection->before.bytes;
    rate->busy_s -= connection->before.busy_s;
    return true;
}

const struct hapt_transfer hapt_transfer_tcp = {
    .name = "tcp",
    .description = "own TCP connections between chosen network interfaces",
    .open = open_context,
    .close = close_context,
    .announce = announce,
    .connect = connect_peers,
    .send = send_chunk,
    .receive = receive_chunk,
    .test = test_chunk,
    .rate = tell_rate,
    .wakes = wakes,
    .wait = wait_for_event,
};
