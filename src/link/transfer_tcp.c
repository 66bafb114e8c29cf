/*
 * The transfer table over TCP: one connection for each peer, tag and direction, bound to the interface that the peer's path names.
 *
 * A connection carries the messages of one tag one way, in order, each behind its length. It is opened by the sender with the first message
 * and read only while a receive is posted, so that what nobody waits for yet stays in the network's own buffers and stops no other tag.
 * Who has nothing else to do sleeps on the sockets: asking them every fraction of a millisecond costs the cores that compute beside it
 * thousands of interrupts a second.
 */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
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

#include "hapt/network.h"

#define QUEUE 64          /* messages under way on a connection, at most: more than a courier has */
#define BACKLOG 1024
#define SOCKET_BYTES (4 << 20) /* asked of the system for each direction of a connection: a long fat link needs them */

/* What a sender says first: the key of this space, so that strangers are told apart, and who it is. */
struct hello {
    unsigned char key[16];
    int32_t rank, tag;
};

struct message {
    char *data;
    uint32_t bytes; /* sent ahead of them in network byte order */
};

struct connection {
    int peer, tag;
    bool sends, greeted; /* greeted: the hello is out, or in */
    int socket;          /* -1: not yet */
    int low;             /* bytes from which on the system calls it readable; 0: any */
    size_t done;         /* bytes of the oldest message, its length (or the hello) included */
    int64_t begun, finished; /* messages */
    struct message queue[QUEUE];
    struct connection *next;
};

/* Accepted, but it has not said yet who it is. */
struct stranger {
    int socket;
    size_t got;
    struct hello hello;
    struct stranger *next;
};

struct space {
    int ranks, rank, listener;
    struct hapt_path *path;  /* [ranks] */
    uint16_t *port;          /* [ranks] where they listen, network byte order */
    unsigned char key[16];
    struct connection *connections;
    struct stranger *strangers;
    struct pollfd *ready; /* [ready_capacity] */
    int ready_capacity;
};

struct request {
    struct connection *connection;
    int64_t number;
};
_Static_assert(sizeof(struct request) < sizeof(struct hapt_transfer_request), "a request holds a place on a connection, and a byte is free");

/* ---- opening ---- */

static enum hapt_status broken(const struct space *space, const struct connection *connection, const char *what)
{
    const struct hapt_path *path = &space->path[connection->peer];
    return hapt_fail(HAPT_ERR_COMM, "look for a rank that died, or a firewall between the hosts; \"transport\": \"mpi\" in the cluster file avoids own connections",
                     "%s rank %d (interface %s): %s", what, connection->peer, path->own.name, errno ? strerror(errno) : "the connection was closed");
}

static socklen_t address_of(const struct hapt_interface *interface, uint16_t port, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof *address);
    if (!interface->wide) {
        struct sockaddr_in *narrow = (void *)address;
        narrow->sin_family = AF_INET;
        narrow->sin_port = port;
        memcpy(&narrow->sin_addr, interface->address, 4);
        return sizeof *narrow;
    }
    struct sockaddr_in6 *wide = (void *)address;
    wide->sin6_family = AF_INET6;
    wide->sin6_port = port;
    memcpy(&wide->sin6_addr, interface->address, 16);
    return sizeof *wide;
}

static void set_up(int socket)
{
    const int on = 1, bytes = SOCKET_BYTES;
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    fcntl(socket, F_SETFD, FD_CLOEXEC);
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

/* Listens on all interfaces: a sender comes to the address that its path names. */
static enum hapt_status listen_for_peers(struct space *space, uint16_t *port)
{
    const int off = 0;
    struct sockaddr_in6 any = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_ANY_INIT};
    struct sockaddr_in narrow = {.sin_family = AF_INET};
    struct sockaddr_storage bound;
    socklen_t length = sizeof bound;
    space->listener = socket(AF_INET6, SOCK_STREAM, 0);
    if (space->listener >= 0) setsockopt(space->listener, IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    if (space->listener < 0 || bind(space->listener, (void *)&any, sizeof any)) { /* a system without IPv6 */
        if (space->listener >= 0) close(space->listener);
        space->listener = socket(AF_INET, SOCK_STREAM, 0);
        if (space->listener >= 0 && bind(space->listener, (void *)&narrow, sizeof narrow)) {
            close(space->listener);
            space->listener = -1;
        }
    }
    if (space->listener >= 0) set_up(space->listener);
    if (space->listener < 0 || listen(space->listener, BACKLOG) || getsockname(space->listener, (void *)&bound, &length))
        return hapt_fail(HAPT_ERR_COMM, "\"transport\": \"mpi\" in the cluster file avoids own connections", "no port to listen on: %s",
                         strerror(errno));
    *port = bound.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&bound)->sin6_port : ((struct sockaddr_in *)&bound)->sin_port;
    return HAPT_OK;
}

static void release(struct space *space)
{
    for (struct connection *at = space->connections, *next; at; at = next) {
        next = at->next;
        if (at->socket >= 0) close(at->socket);
        free(at);
    }
    for (struct stranger *at = space->strangers, *next; at; at = next) {
        next = at->next;
        close(at->socket);
        free(at);
    }
    if (space->listener >= 0) close(space->listener);
    free(space->ready);
    free(space->path);
    free(space->port);
    free(space);
}

static enum hapt_status reserve(MPI_Comm world, const struct hapt_path *path, struct space **space, uint16_t *port)
{
    struct space *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for connections");
    made->listener = -1;
    MPI_Comm_rank(world, &made->rank);
    MPI_Comm_size(world, &made->ranks);
    made->path = calloc((size_t)made->ranks, sizeof *made->path);
    made->port = calloc((size_t)made->ranks, sizeof *made->port);
    *space = made;
    if (!made->path || !made->port) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for connections");
    memcpy(made->path, path, (size_t)made->ranks * sizeof *path);
    if (made->rank == 0 && getrandom(made->key, sizeof made->key, 0) != sizeof made->key)
        return hapt_fail(HAPT_ERR_COMM, NULL, "no random numbers: %s", strerror(errno));
    return listen_for_peers(made, port);
}

static enum hapt_status open_space(MPI_Comm world, const struct hapt_path *path, void **context)
{
    struct space *space = NULL;
    uint16_t port = 0;
    HAPT_ASSERT(path);
    enum hapt_status status = hapt_link_all_or_none(world, "listening for connections", reserve(world, path, &space, &port));
    if (status == HAPT_OK)
        status = hapt_env_mpi(MPI_Allgather(&port, 1, MPI_UINT16_T, space->port, 1, MPI_UINT16_T, world), "MPI_Allgather");
    if (status == HAPT_OK) status = hapt_env_mpi(MPI_Bcast(space->key, sizeof space->key, MPI_BYTE, 0, world), "MPI_Bcast");
    if (status != HAPT_OK) {
        if (space) release(space);
        return status;
    }
    *context = space;
    return HAPT_OK;
}

static void close_space(void *context)
{
    release(context);
}

/* ---- connections ---- */

static struct connection *find(const struct space *space, int peer, int tag, bool sends)
{
    struct connection *at = space->connections;
    while (at && (at->peer != peer || at->tag != tag || at->sends != sends)) at = at->next;
    return at;
}

static enum hapt_status provide(struct space *space, int peer, int tag, bool sends, struct connection **connection)
{
    *connection = find(space, peer, tag, sends);
    if (*connection) return HAPT_OK;
    struct connection *made = calloc(1, sizeof *made);
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a connection");
    made->peer = peer;
    made->tag = tag;
    made->sends = sends;
    made->socket = -1;
    made->next = space->connections;
    space->connections = made;
    *connection = made;
    return HAPT_OK;
}

/* Starts to connect, from the interface of the path to the peer's. */
static enum hapt_status dial(const struct space *space, struct connection *connection)
{
    const struct hapt_path *path = &space->path[connection->peer];
    struct sockaddr_storage own, peer;
    const socklen_t own_length = address_of(&path->own, 0, &own);
    const socklen_t peer_length = address_of(&path->peer, space->port[connection->peer], &peer);
    errno = 0;
    connection->socket = socket(own.ss_family, SOCK_STREAM, 0);
    if (connection->socket < 0) return broken(space, connection, "no connection to");
    set_up(connection->socket);
    if (bind(connection->socket, (void *)&own, own_length)) return broken(space, connection, "no connection to");
    if (connect(connection->socket, (void *)&peer, peer_length) && errno != EINPROGRESS)
        return broken(space, connection, "no connection to");
    return HAPT_OK;
}

/* What a stranger says; true when it has said all. False and a closed socket: it is none of ours. */
static bool hear_stranger(struct stranger *stranger)
{
    const ssize_t got = read(stranger->socket, (char *)&stranger->hello + stranger->got, sizeof stranger->hello - stranger->got);
    if (got > 0) stranger->got += (size_t)got;
    if (got == 0 || (got < 0 && errno != EAGAIN && errno != EINTR)) {
        close(stranger->socket);
        stranger->socket = -1;
    }
    return stranger->got == sizeof stranger->hello;
}

static enum hapt_status welcome(struct space *space, struct stranger *stranger)
{
    struct connection *connection;
    const int rank = stranger->hello.rank;
    if (memcmp(stranger->hello.key, space->key, sizeof space->key) != 0 || rank < 0 || rank >= space->ranks) {
        close(stranger->socket); /* not of this job */
        return HAPT_OK;
    }
    HAPT_TRY(provide(space, rank, stranger->hello.tag, false, &connection));
    if (connection->socket >= 0) {
        close(stranger->socket);
        return HAPT_OK;
    }
    connection->socket = stranger->socket;
    connection->greeted = true;
    return HAPT_OK;
}

/* Takes in those who knock. */
static enum hapt_status accept_peers(struct space *space)
{
    for (;;) {
        const int socket = accept(space->listener, NULL, NULL);
        if (socket < 0) break;
        struct stranger *stranger = calloc(1, sizeof *stranger);
        if (!stranger) {
            close(socket);
            return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for a connection");
        }
        set_up(socket);
        stranger->socket = socket;
        stranger->next = space->strangers;
        space->strangers = stranger;
    }
    enum hapt_status status = HAPT_OK;
    for (struct stranger **at = &space->strangers; *at && status == HAPT_OK;) {
        struct stranger *stranger = *at;
        const bool said = hear_stranger(stranger);
        if (said && stranger->socket >= 0) status = welcome(space, stranger);
        if (said || stranger->socket < 0) {
            *at = stranger->next;
            free(stranger);
        } else {
            at = &stranger->next;
        }
    }
    return status;
}

/* ---- moving ---- */

/* Is the connection that was dialled there? */
static enum hapt_status connected(const struct space *space, const struct connection *connection, bool *is)
{
    struct pollfd ready = {.fd = connection->socket, .events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;
    *is = false;
    if (poll(&ready, 1, 0) <= 0) return HAPT_OK;
    getsockopt(connection->socket, SOL_SOCKET, SO_ERROR, &error, &length);
    errno = error;
    if (error) return broken(space, connection, "no connection to");
    *is = true;
    return HAPT_OK;
}

static enum hapt_status greet(const struct space *space, struct connection *connection)
{
    struct hello hello = {.rank = space->rank, .tag = connection->tag};
    bool there;
    HAPT_TRY(connected(space, connection, &there));
    if (!there) return HAPT_OK;
    memcpy(hello.key, space->key, sizeof hello.key);
    const ssize_t put = send(connection->socket, (const char *)&hello + connection->done, sizeof hello - connection->done, MSG_NOSIGNAL);
    if (put < 0 && errno != EAGAIN && errno != EINTR) return broken(space, connection, "cannot send to");
    if (put > 0) connection->done += (size_t)put;
    if (connection->done < sizeof hello) return HAPT_OK;
    connection->done = 0;
    connection->greeted = true;
    return HAPT_OK;
}

/* What is left of a message: of its length, then of itself. */
static int rest_of(struct message *message, uint32_t *length, size_t done, struct iovec part[2])
{
    int parts = 0;
    if (done < sizeof *length) part[parts++] = (struct iovec){(char *)length + done, sizeof *length - done};
    const size_t offset = done < sizeof *length ? 0 : done - sizeof *length;
    if (offset < message->bytes) part[parts++] = (struct iovec){message->data + offset, message->bytes - offset};
    return parts;
}

static enum hapt_status push(const struct space *space, struct connection *connection)
{
    while (connection->finished < connection->begun) {
        struct message *message = &connection->queue[connection->finished % QUEUE];
        uint32_t length = htonl(message->bytes);
        struct iovec part[2];
        const struct msghdr header = {.msg_iov = part, .msg_iovlen = (size_t)rest_of(message, &length, connection->done, part)};
        const ssize_t put = sendmsg(connection->socket, &header, MSG_NOSIGNAL);
        if (put < 0 && (errno == EAGAIN || errno == EINTR)) return HAPT_OK;
        if (put < 0) return broken(space, connection, "cannot send to");
        connection->done += (size_t)put;
        if (connection->done < sizeof length + message->bytes) return HAPT_OK;
        connection->done = 0;
        connection->finished++;
    }
    return HAPT_OK;
}

static enum hapt_status pull(const struct space *space, struct connection *connection)
{
    while (connection->finished < connection->begun) {
        struct message *message = &connection->queue[connection->finished % QUEUE];
        /* The length that the sender says goes where the request's own stands, and must be the same. */
        uint32_t length = htonl(message->bytes), said = length;
        struct iovec part[2];
        struct msghdr header = {.msg_iov = part, .msg_iovlen = (size_t)rest_of(message, &said, connection->done, part)};
        errno = 0;
        const ssize_t got = recvmsg(connection->socket, &header, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return HAPT_OK;
        if (got <= 0) return broken(space, connection, "cannot receive from");
        if (said != length)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "rank %d sent a message of %u bytes where %u were expected", connection->peer, ntohl(said),
                             message->bytes);
        connection->done += (size_t)got;
        if (connection->done < sizeof length + message->bytes) return HAPT_OK;
        connection->done = 0;
        connection->finished++;
    }
    return HAPT_OK;
}

static enum hapt_status progress(struct space *space, struct connection *connection)
{
    if (connection->sends && connection->socket < 0) HAPT_TRY(dial(space, connection));
    if (connection->sends && !connection->greeted) HAPT_TRY(greet(space, connection));
    if (!connection->sends && connection->socket < 0) HAPT_TRY(accept_peers(space));
    if (!connection->greeted) return HAPT_OK;
    return connection->sends ? push(space, connection) : pull(space, connection);
}

static enum hapt_status begin(struct space *space, bool sends, void *data, size_t bytes, int peer, int tag, struct hapt_transfer_request *request)
{
    struct request mine;
    HAPT_ASSERT(peer >= 0 && peer < space->ranks && space->path[peer].tcp && bytes <= HAPT_LINK_CHUNK_BYTES);
    HAPT_TRY(provide(space, peer, tag, sends, &mine.connection));
    mine.number = mine.connection->begun;
    HAPT_ASSERT(mine.number - mine.connection->finished < QUEUE);
    mine.connection->queue[mine.number % QUEUE] = (struct message){data, (uint32_t)bytes};
    mine.connection->begun++;
    memcpy(request->opaque, &mine, sizeof mine);
    return progress(space, mine.connection);
}

static enum hapt_status send_chunk(void *context, const void *data, size_t bytes, int peer, int tag, struct hapt_transfer_request *request)
{
    return begin(context, true, (void *)data, bytes, peer, tag, request);
}

static enum hapt_status receive_chunk(void *context, void *data, size_t bytes, int peer, int tag, struct hapt_transfer_request *request)
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
    const struct space *space = context;
    return space->path[peer].tcp;
}

/* A receiver is woken by the oldest message's last byte, not by every packet. */
static void wake_when_whole(struct connection *connection)
{
    const struct message *message = &connection->queue[connection->finished % QUEUE];
    const int low = (int)(sizeof(uint32_t) + message->bytes - connection->done);
    if (low == connection->low) return;
    connection->low = low;
    setsockopt(connection->socket, SOL_SOCKET, SO_RCVLOWAT, &low, sizeof low);
}

/* All that is waited for, behind `kick`; false: no memory. */
static bool list_sockets(struct space *space, int kick, int *count)
{
    int most = 2;
    bool knocks = false;
    for (const struct connection *at = space->connections; at; at = at->next) most++;
    for (const struct stranger *at = space->strangers; at; at = at->next) most++;
    if (most > space->ready_capacity) {
        struct pollfd *grown = realloc(space->ready, (size_t)most * sizeof *grown);
        if (!grown) return false;
        space->ready = grown;
        space->ready_capacity = most;
    }
    *count = 0;
    space->ready[(*count)++] = (struct pollfd){.fd = kick, .events = POLLIN};
    for (struct connection *at = space->connections; at; at = at->next) {
        if (at->finished == at->begun) continue;
        if (at->socket < 0) {
            knocks = true;
            continue;
        }
        if (!at->sends) wake_when_whole(at);
        space->ready[(*count)++] = (struct pollfd){.fd = at->socket, .events = at->sends ? POLLOUT : POLLIN};
    }
    if (knocks) space->ready[(*count)++] = (struct pollfd){.fd = space->listener, .events = POLLIN};
    for (const struct stranger *at = space->strangers; knocks && at; at = at->next)
        space->ready[(*count)++] = (struct pollfd){.fd = at->socket, .events = POLLIN};
    return true;
}

static void wait_for_news(void *context, int kick, double until_s)
{
    struct space *space = context;
    const double left_s = isnan(until_s) ? 0 : fmax(until_s - hapt_time_s(), 0);
    const struct timespec left = {.tv_sec = (time_t)left_s, .tv_nsec = (long)((left_s - (double)(time_t)left_s) * 1e9)};
    struct pollfd only = {.fd = kick, .events = POLLIN};
    int count = 1;
    const bool all = list_sockets(space, kick, &count);
    ppoll(all ? space->ready : &only, (nfds_t)count, isnan(until_s) ? NULL : &left, NULL);
}

/* The system counts what the peer's system acknowledged and the time during which anything waited for that, in its ticks: a process that is
 * late in handing over or in taking does not lengthen it. Waiting for room in the peer's buffers is left out. */
static bool tell_rate(void *context, int peer, int tag, struct hapt_transfer_rate *rate)
{
    const struct space *space = context;
    if (!space->path[peer].tcp) return false;
    struct tcp_info info;
    socklen_t length = sizeof info;
    const struct connection *connection = find(space, peer, tag, true);
    *rate = (struct hapt_transfer_rate){0, 0};
    if (!connection || !connection->greeted) return true;
    if (getsockopt(connection->socket, IPPROTO_TCP, TCP_INFO, &info, &length)) return false;
    if (length < offsetof(struct tcp_info, tcpi_rwnd_limited) + sizeof info.tcpi_rwnd_limited) return false; /* a system of before 2016 */
    rate->bytes = (double)info.tcpi_bytes_acked;
    rate->busy_s = 1e-6 * (double)(info.tcpi_busy_time - info.tcpi_rwnd_limited);
    return true;
}

const struct hapt_transfer hapt_transfer_tcp = {
    .name = "tcp",
    .description = "own TCP connections between chosen network interfaces",
    .open = open_space,
    .close = close_space,
    .send = send_chunk,
    .receive = receive_chunk,
    .test = test_chunk,
    .rate = tell_rate,
    .wakes = wakes,
    .wait = wait_for_news,
};
