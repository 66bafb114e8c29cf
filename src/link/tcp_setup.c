#include "tcp_setup.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#define BACKLOG 1024
#define SOCKET_BYTES \
    (4 << 20) /* socket buffer requested per direction of a connection: needed if bandwidth times latency is large */
#define MIN_PENDING 16   /* room for connections from other programs, besides the expected ones */
#define PENDING_EACH 2   /* per expected connection: a peer may retry before its first attempt is dropped */
#define RETRY_S 20e-3    /* pause before a sender retries */
#define SHORTAGE_S 1.0   /* the system may be out of descriptors for a moment */
#define MAX_POLL_S 50e-3 /* interval for checking time limits and pauses */

static const char magic[8] = {'h', 'a', 'p', 't', 'T', 'C', 'P', '1'};
enum {
    NONCE_BYTES = 16,
    HELLO_BYTES = sizeof magic + 8 + NONCE_BYTES,
    ANSWER_BYTES = NONCE_BYTES + SIPHASH_BYTES,
    MAX_MESSAGE_BYTES = 48
};

/* The next messages that one end has to send and to receive. */
struct exchange {
    int socket; /* -1: none */
    unsigned char out[MAX_MESSAGE_BYTES], in[MAX_MESSAGE_BYTES];
    int out_bytes, out_done, in_bytes, in_done;
    unsigned char sender_nonce[NONCE_BYTES], receiver_nonce[NONCE_BYTES];
    double since_s;
};

/* A connection that this rank opens. */
struct dialled {
    struct exchange exchange;
    bool connected, answered;
};

/* An accepted connection that has not authenticated yet. */
struct pending {
    struct exchange exchange;
    bool answered; /* the hello was valid; its proof is expected */
    int rank, tag; /* as claimed in the hello */
};

struct listener {
    struct hapt_interface interface;
    uint16_t port;
    int socket;
};

struct tcp_setup {
    int rank, count;
    struct tcp_wanted *wanted; /* [count] */
    struct dialled *dialled;   /* [count] for the connections that this rank opens */
    struct listener *listener; /* [listener_count] */
    int listener_count;
    struct pending *pending; /* [max_pending], in order of arrival */
    int pending_count, max_pending;
    double pending_s;
    double short_since_s; /* out of descriptors since then; 0: not */
    unsigned char key[SIPHASH_BYTES];
    struct pollfd *ready; /* [max_ready] */
    int max_ready;
};

/* ---- messages ---- */

static void put_number(int value, unsigned char *bytes)
{
    const uint32_t word = htonl((uint32_t)value);
    memcpy(bytes, &word, sizeof word);
}

static int get_number(const unsigned char *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, sizeof word);
    return (int)ntohl(word);
}

/* Computes a proof over the role, both ranks, the tag and both nonces, so that it cannot be replayed or used
 * elsewhere. */
static void prove(const struct tcp_setup *setup, const char *role, int sender, int receiver, int tag,
                  const struct exchange *exchange, unsigned char proof[SIPHASH_BYTES])
{
    unsigned char text[sizeof magic + 8 + 12 + 2 * NONCE_BYTES] = {0};
    unsigned char *at = text;
    memcpy(at, magic, sizeof magic);
    memcpy(at + 8, role, strlen(role));
    put_number(sender, at + 16);
    put_number(receiver, at + 20);
    put_number(tag, at + 24);
    memcpy(at + 28, exchange->sender_nonce, NONCE_BYTES);
    memcpy(at + 28 + NONCE_BYTES, exchange->receiver_nonce, NONCE_BYTES);
    siphash_tag(setup->key, text, sizeof text, proof);
}

static enum hapt_status draw_nonce(unsigned char nonce[NONCE_BYTES])
{
    if (getrandom(nonce, NONCE_BYTES, 0) == NONCE_BYTES) return HAPT_OK;
    return hapt_fail(HAPT_ERR_COMM, "the system's random number generator is needed", "cannot draw random numbers: %s",
                     strerror(errno));
}

enum io_result { INCOMPLETE, COMPLETE, CLOSED };

/* Sends the rest of the message; COMPLETE if nothing is left. */
static enum io_result send_rest(struct exchange *exchange)
{
    while (exchange->out_done < exchange->out_bytes) {
        const ssize_t put = send(exchange->socket, exchange->out + exchange->out_done,
                                 (size_t)(exchange->out_bytes - exchange->out_done), MSG_NOSIGNAL);
        if (put < 0) return errno == EAGAIN || errno == EINTR ? INCOMPLETE : CLOSED;
        exchange->out_done += (int)put;
    }
    return COMPLETE;
}

/* Receives the next message, and no byte after it. */
static enum io_result receive_rest(struct exchange *exchange)
{
    while (exchange->in_done < exchange->in_bytes) {
        const ssize_t got = recv(exchange->socket, exchange->in + exchange->in_done,
                                 (size_t)(exchange->in_bytes - exchange->in_done), 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return INCOMPLETE;
        if (got <= 0) return CLOSED;
        exchange->in_done += (int)got;
    }
    return COMPLETE;
}

static void prepare_receive(struct exchange *exchange, int bytes)
{
    exchange->in_bytes = bytes;
    exchange->in_done = 0;
}

static void prepare_send(struct exchange *exchange, int bytes)
{
    exchange->out_bytes = bytes;
    exchange->out_done = 0;
}

/* ---- sockets ---- */

static socklen_t address_of(const struct hapt_interface *interface, uint16_t port, struct sockaddr_storage *address)
{
    memset(address, 0, sizeof *address);
    if (!interface->is_ipv6) {
        struct sockaddr_in *ipv4 = (void *)address;
        ipv4->sin_family = AF_INET;
        ipv4->sin_port = port;
        memcpy(&ipv4->sin_addr, interface->address, 4);
        return sizeof *ipv4;
    }
    struct sockaddr_in6 *ipv6 = (void *)address;
    ipv6->sin6_family = AF_INET6;
    ipv6->sin6_port = port;
    memcpy(&ipv6->sin6_addr, interface->address, 16);
    return sizeof *ipv6;
}

static void prepare_socket(int socket)
{
    const int on = 1, bytes = SOCKET_BYTES;
    fcntl(socket, F_SETFL, fcntl(socket, F_GETFL) | O_NONBLOCK);
    fcntl(socket, F_SETFD, FD_CLOEXEC);
    setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
    setsockopt(socket, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes);
}

static bool lacks_descriptors(int error)
{
    return error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM;
}

static enum hapt_status too_many_files(const struct tcp_setup *setup, int error)
{
    return hapt_fail(HAPT_ERR_COMM,
                     "raise the limit of open files (ulimit -n), or set \"transport\": \"mpi\" in the cluster file",
                     "rank %d cannot open its %d connections: %s", setup->rank, setup->count, strerror(error));
}

static enum hapt_status unreachable(const struct tcp_setup *setup, const struct tcp_wanted *wanted, const char *why)
{
    return hapt_fail(
        HAPT_ERR_COMM,
        "look for a firewall between the hosts; \"transport\": \"mpi\" in the cluster file avoids own connections",
        "rank %d has no connection to rank %d on host %s (interface %s): %s", setup->rank, wanted->peer,
        hapt_env_host(wanted->peer), wanted->path.own.name, why);
}

/* ---- listening ---- */

static bool same_address(const struct hapt_interface *a, const struct hapt_interface *b)
{
    return a->is_ipv6 == b->is_ipv6 && memcmp(a->address, b->address, a->is_ipv6 ? 16 : 4) == 0;
}

static struct listener *find_listener(const struct tcp_setup *setup, const struct hapt_interface *interface)
{
    for (int i = 0; i < setup->listener_count; i++)
        if (same_address(&setup->listener[i].interface, interface)) return &setup->listener[i];
    return NULL;
}

/* Listens only at the address of the interface. */
static enum hapt_status listen_at(struct tcp_setup *setup, const struct hapt_interface *interface)
{
    const int on = 1;
    struct sockaddr_storage address;
    socklen_t length = address_of(interface, 0, &address);
    struct listener *made = &setup->listener[setup->listener_count];
    *made = (struct listener){*interface, 0, socket(address.ss_family, SOCK_STREAM, 0)};
    if (made->socket >= 0) {
        setup->listener_count++;
        prepare_socket(made->socket);
        if (interface->is_ipv6) setsockopt(made->socket, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    }
    if (made->socket < 0 || bind(made->socket, (void *)&address, length) || listen(made->socket, BACKLOG) ||
        getsockname(made->socket, (void *)&address, &length))
        return hapt_fail(HAPT_ERR_COMM, "\"transport\": \"mpi\" in the cluster file avoids own connections",
                         "rank %d cannot listen on interface %s: %s", setup->rank, interface->name, strerror(errno));
    made->port =
        interface->is_ipv6 ? ((struct sockaddr_in6 *)&address)->sin6_port : ((struct sockaddr_in *)&address)->sin_port;
    return HAPT_OK;
}

static enum hapt_status listen_for_peers(struct tcp_setup *setup)
{
    for (int i = 0; i < setup->count; i++) {
        const struct tcp_wanted *wanted = &setup->wanted[i];
        if (!wanted->sends && !find_listener(setup, &wanted->path.own)) HAPT_TRY(listen_at(setup, &wanted->path.own));
    }
    return HAPT_OK;
}

enum hapt_status tcp_setup_create(int rank, int count, struct tcp_wanted *wanted, double pending_s,
                                  struct tcp_setup **setup)
{
    struct tcp_setup *made = calloc(1, sizeof *made);
    int awaited = 0;
    *setup = made;
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: TCP connections");
    for (int i = 0; i < count; i++) {
        wanted[i].socket = -1;
        awaited += !wanted[i].sends;
    }
    *made = (struct tcp_setup){.rank = rank, .count = count, .wanted = wanted, .pending_s = pending_s};
    made->max_pending = MIN_PENDING + PENDING_EACH * awaited;
    made->max_ready = 2 * count + made->max_pending;
    made->dialled = calloc((size_t)count + 1, sizeof *made->dialled);
    made->listener = calloc((size_t)count + 1, sizeof *made->listener);
    made->pending = calloc((size_t)made->max_pending, sizeof *made->pending);
    made->ready = calloc((size_t)made->max_ready, sizeof *made->ready);
    if (!made->dialled || !made->listener || !made->pending || !made->ready)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted: %d TCP connections", count);
    for (int i = 0; i < count; i++) made->dialled[i].exchange.socket = -1;
    return listen_for_peers(made);
}

uint16_t tcp_setup_port(const struct tcp_setup *setup, const struct hapt_path *path)
{
    const struct listener *listener = find_listener(setup, &path->own);
    return listener ? listener->port : 0;
}

void tcp_setup_key(struct tcp_setup *setup, const unsigned char key[SIPHASH_BYTES])
{
    memcpy(setup->key, key, SIPHASH_BYTES);
}

int tcp_setup_pending(const struct tcp_setup *setup, int *most)
{
    *most = setup->max_pending;
    return setup->pending_count;
}

static void stop_listening(struct tcp_setup *setup)
{
    for (int i = 0; i < setup->listener_count; i++) close(setup->listener[i].socket);
    for (int i = 0; i < setup->pending_count; i++) close(setup->pending[i].exchange.socket);
    setup->listener_count = setup->pending_count = 0;
}

void tcp_setup_destroy(struct tcp_setup *setup)
{
    if (!setup) return;
    stop_listening(setup);
    for (int i = 0; setup->dialled && i < setup->count; i++)
        if (setup->dialled[i].exchange.socket >= 0) close(setup->dialled[i].exchange.socket);
    free(setup->dialled);
    free(setup->listener);
    free(setup->pending);
    free(setup->ready);
    explicit_bzero(setup->key, sizeof setup->key);
    free(setup);
}

/* ---- the end that sends: it opens the connection ---- */

static enum hapt_status drop_one(struct tcp_setup *setup, int error);

static void close_dialled(struct dialled *dialled)
{
    close(dialled->exchange.socket);
    dialled->exchange.socket = -1;
    dialled->connected = dialled->answered = false;
    dialled->exchange.since_s = hapt_time_s();
}

static enum hapt_status connect_peer(struct tcp_setup *setup, const struct tcp_wanted *wanted, struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    struct sockaddr_storage own, peer;
    const socklen_t own_length = address_of(&wanted->path.own, 0, &own);
    const socklen_t peer_length = address_of(&wanted->path.peer, wanted->port, &peer);
    if (exchange->since_s > 0 && hapt_time_s() < exchange->since_s + RETRY_S) return HAPT_OK;
    if (wanted->port == 0) return unreachable(setup, wanted, "it expects no connection");
    exchange->socket = socket(own.ss_family, SOCK_STREAM, 0);
    if (exchange->socket < 0) {
        if (!lacks_descriptors(errno)) return unreachable(setup, wanted, strerror(errno));
        exchange->since_s = hapt_time_s();
        return drop_one(setup, errno);
    }
    setup->short_since_s = 0;
    prepare_socket(exchange->socket);
    if (bind(exchange->socket, (void *)&own, own_length) ||
        (connect(exchange->socket, (void *)&peer, peer_length) && errno != EINPROGRESS))
        return unreachable(setup, wanted, strerror(errno));
    return HAPT_OK;
}

/* Sends the hello once it is connected. */
static enum hapt_status send_hello(const struct tcp_setup *setup, const struct tcp_wanted *wanted,
                                   struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    struct pollfd ready = {.fd = exchange->socket, .events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;
    if (poll(&ready, 1, 0) <= 0) return HAPT_OK;
    getsockopt(exchange->socket, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == ECONNRESET) close_dialled(dialled);
    if (error) return error == ECONNRESET ? HAPT_OK : unreachable(setup, wanted, strerror(error));
    HAPT_TRY(draw_nonce(exchange->sender_nonce));
    memcpy(exchange->out, magic, sizeof magic);
    put_number(setup->rank, exchange->out + 8);
    put_number(wanted->tag, exchange->out + 12);
    memcpy(exchange->out + 16, exchange->sender_nonce, NONCE_BYTES);
    prepare_send(exchange, HELLO_BYTES);
    prepare_receive(exchange, ANSWER_BYTES);
    dialled->connected = true;
    return HAPT_OK;
}

/* The answer must prove that the peer knows the key. The sender then sends its own proof. */
static enum hapt_status reply_to_answer(const struct tcp_setup *setup, const struct tcp_wanted *wanted,
                                        struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    unsigned char proof[SIPHASH_BYTES];
    memcpy(exchange->receiver_nonce, exchange->in, NONCE_BYTES);
    prove(setup, "receiver", setup->rank, wanted->peer, wanted->tag, exchange, proof);
    if (!siphash_equal(proof, exchange->in + NONCE_BYTES))
        return unreachable(setup, wanted, "the program that answers there does not belong to this job");
    prove(setup, "sender", setup->rank, wanted->peer, wanted->tag, exchange, exchange->out);
    prepare_send(exchange, SIPHASH_BYTES);
    dialled->answered = true;
    return HAPT_OK;
}

static enum hapt_status advance_dialled(struct tcp_setup *setup, struct tcp_wanted *wanted, struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    if (exchange->socket < 0) HAPT_TRY(connect_peer(setup, wanted, dialled));
    if (exchange->socket >= 0 && !dialled->connected) HAPT_TRY(send_hello(setup, wanted, dialled));
    if (!dialled->connected) return HAPT_OK;
    enum io_result result = send_rest(exchange);
    if (result == COMPLETE && !dialled->answered) {
        result = receive_rest(exchange);
        if (result == COMPLETE) {
            HAPT_TRY(reply_to_answer(setup, wanted, dialled));
            result = send_rest(exchange);
        }
    }
    if (result == CLOSED) close_dialled(dialled);
    if (result != COMPLETE) return HAPT_OK;
    wanted->socket = exchange->socket;
    exchange->socket = -1;
    return HAPT_OK;
}

/* ---- the end that receives ---- */

static void drop_pending(struct tcp_setup *setup, int index, bool shut)
{
    if (shut) close(setup->pending[index].exchange.socket);
    setup->pending_count--;
    memmove(&setup->pending[index], &setup->pending[index + 1],
            (size_t)(setup->pending_count - index) * sizeof *setup->pending);
}

/* The oldest one that has sent nothing, otherwise the oldest. */
static int worst_pending(const struct tcp_setup *setup)
{
    for (int i = 0; i < setup->pending_count; i++)
        if (setup->pending[i].exchange.in_done == 0 && !setup->pending[i].answered) return i;
    return 0;
}

/* Closes a pending connection if the system is out of descriptors: they must not take those that the job needs. */
static enum hapt_status drop_one(struct tcp_setup *setup, int error)
{
    const double now_s = hapt_time_s();
    if (setup->pending_count > 0) {
        drop_pending(setup, worst_pending(setup), true);
        return HAPT_OK;
    }
    if (setup->short_since_s == 0) setup->short_since_s = now_s;
    return now_s < setup->short_since_s + SHORTAGE_S ? HAPT_OK : too_many_files(setup, error);
}

static enum hapt_status accept_peers(struct tcp_setup *setup, const struct listener *listener)
{
    for (int attempt = 0; attempt < setup->max_pending; attempt++) {
        const int socket = accept(listener->socket, NULL, NULL);
        if (socket < 0 && lacks_descriptors(errno)) {
            const bool room = setup->pending_count > 0;
            HAPT_TRY(drop_one(setup, errno));
            if (!room) return HAPT_OK;
            continue;
        }
        if (socket < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HAPT_OK;
        if (socket < 0) continue; /* that connection is closed already */
        setup->short_since_s = 0;
        if (setup->pending_count == setup->max_pending) drop_pending(setup, worst_pending(setup), true);
        prepare_socket(socket);
        struct pending *made = &setup->pending[setup->pending_count++];
        *made = (struct pending){.exchange = {.socket = socket, .since_s = hapt_time_s()}};
        prepare_receive(&made->exchange, HELLO_BYTES);
        receive_rest(&made->exchange); /* so that it is not among those that have sent nothing when a slot is needed */
    }
    return HAPT_OK;
}

/* The expected connection of that rank and tag, if it is not made yet; else NULL. */
static struct tcp_wanted *find_awaited(const struct tcp_setup *setup, int rank, int tag)
{
    for (int i = 0; i < setup->count; i++) {
        struct tcp_wanted *wanted = &setup->wanted[i];
        if (!wanted->sends && wanted->socket < 0 && wanted->peer == rank && wanted->tag == tag) return wanted;
    }
    return NULL;
}

/* False: the connection does not belong to this job. */
static bool answer_hello(const struct tcp_setup *setup, struct pending *pending, enum hapt_status *status)
{
    struct exchange *exchange = &pending->exchange;
    if (memcmp(exchange->in, magic, sizeof magic) != 0) return false;
    pending->rank = get_number(exchange->in + 8);
    pending->tag = get_number(exchange->in + 12);
    memcpy(exchange->sender_nonce, exchange->in + 16, NONCE_BYTES);
    if (!find_awaited(setup, pending->rank, pending->tag)) return false;
    *status = draw_nonce(exchange->receiver_nonce);
    memcpy(exchange->out, exchange->receiver_nonce, NONCE_BYTES);
    prove(setup, "receiver", pending->rank, setup->rank, pending->tag, exchange, exchange->out + NONCE_BYTES);
    prepare_send(exchange, ANSWER_BYTES);
    prepare_receive(exchange, SIPHASH_BYTES);
    pending->answered = true;
    return true;
}

static bool check_proof(const struct tcp_setup *setup, const struct pending *pending)
{
    unsigned char proof[SIPHASH_BYTES];
    prove(setup, "sender", pending->rank, setup->rank, pending->tag, &pending->exchange, proof);
    return siphash_equal(proof, pending->exchange.in);
}

/* True: it is no longer pending. */
static bool advance_pending(const struct tcp_setup *setup, struct pending *pending, bool *shut,
                            enum hapt_status *status)
{
    struct exchange *exchange = &pending->exchange;
    *shut = true;
    if (hapt_time_s() > exchange->since_s + setup->pending_s) return true;
    enum io_result result = pending->answered ? COMPLETE : receive_rest(exchange);
    if (result == COMPLETE && !pending->answered && !answer_hello(setup, pending, status)) return true;
    if (result == COMPLETE) result = send_rest(exchange);
    if (result == COMPLETE) result = receive_rest(exchange);
    if (result != COMPLETE) return result == CLOSED;
    struct tcp_wanted *wanted = find_awaited(setup, pending->rank, pending->tag);
    if (!wanted || !check_proof(setup, pending)) return true;
    wanted->socket = exchange->socket;
    *shut = false;
    return true;
}

static enum hapt_status advance_all_pending(struct tcp_setup *setup)
{
    enum hapt_status status = HAPT_OK;
    for (int i = 0; i < setup->listener_count && status == HAPT_OK; i++)
        status = accept_peers(setup, &setup->listener[i]);
    for (int i = 0; i < setup->pending_count && status == HAPT_OK;) {
        bool shut;
        if (advance_pending(setup, &setup->pending[i], &shut, &status))
            drop_pending(setup, i, shut);
        else
            i++;
    }
    return status;
}

/* ---- both ---- */

static void sleep_on_sockets(const struct tcp_setup *setup, double until_s)
{
    int count = 0;
    for (int i = 0; i < setup->listener_count; i++)
        setup->ready[count++] = (struct pollfd){.fd = setup->listener[i].socket, .events = POLLIN};
    for (int i = 0; i < setup->pending_count; i++) {
        const struct exchange *exchange = &setup->pending[i].exchange;
        setup->ready[count++] = (struct pollfd){.fd = exchange->socket,
                                                .events = exchange->out_done < exchange->out_bytes ? POLLOUT : POLLIN};
    }
    for (int i = 0; i < setup->count; i++) {
        const struct exchange *exchange = &setup->dialled[i].exchange;
        if (exchange->socket < 0) continue;
        const bool receives = setup->dialled[i].connected && exchange->out_done == exchange->out_bytes;
        setup->ready[count++] = (struct pollfd){.fd = exchange->socket, .events = receives ? POLLIN : POLLOUT};
    }
    HAPT_ASSERT(count <= setup->max_ready);
    const double left_s = fmin(until_s - hapt_time_s(), MAX_POLL_S);
    const struct timespec left = {.tv_nsec = (long)(1e9 * fmax(left_s, 0))};
    ppoll(setup->ready, (nfds_t)count, &left, NULL);
}

enum hapt_status tcp_setup_advance(struct tcp_setup *setup, double until_s, bool *complete)
{
    for (;;) {
        bool all = true, awaited = false;
        HAPT_TRY(advance_all_pending(setup));
        for (int i = 0; i < setup->count; i++) {
            struct tcp_wanted *wanted = &setup->wanted[i];
            if (wanted->socket < 0 && wanted->sends) HAPT_TRY(advance_dialled(setup, wanted, &setup->dialled[i]));
            if (wanted->socket < 0) all = false;
            if (wanted->socket < 0 && !wanted->sends) awaited = true;
        }
        if (!awaited) stop_listening(setup);
        *complete = all;
        if (all || hapt_time_s() >= until_s) return HAPT_OK;
        sleep_on_sockets(setup, until_s);
    }
}

enum hapt_status tcp_setup_late(const struct tcp_setup *setup, double seconds)
{
    for (int i = 0; i < setup->count; i++) {
        const struct tcp_wanted *wanted = &setup->wanted[i];
        char why[64];
        if (wanted->socket >= 0) continue;
        snprintf(why, sizeof why, "it did not %s within %.3g s", wanted->sends ? "answer" : "connect", seconds);
        return unreachable(setup, wanted, why);
    }
    return HAPT_OK;
}
