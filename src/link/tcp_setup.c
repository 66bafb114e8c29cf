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
#define SOCKET_BYTES (4 << 20) /* asked of the system for each direction of a connection: a long fat link needs them \
                                */
#define PENDING_LEAST 16       /* room for connections of other programs beside the awaited ones */
#define PENDING_EACH 2         /* per awaited connection: a peer may try again before its first try is given up */
#define REDIAL_S 20e-3         /* pause before a sender tries again */
#define SHORTAGE_S 1.0         /* the system may lack descriptors for a moment */
#define POLL_MOST_S 50e-3      /* time limits and pauses are looked at this often */

static const char magic[8] = {'h', 'a', 'p', 't', 'T', 'C', 'P', '1'};
enum {
    NONCE_BYTES = 16,
    HELLO_BYTES = sizeof magic + 8 + NONCE_BYTES,
    ANSWER_BYTES = NONCE_BYTES + SIPHASH_BYTES,
    LONGEST = 48
};

/* The messages that one end has to send and to receive next. */
struct exchange {
    int socket; /* -1: none */
    unsigned char out[LONGEST], in[LONGEST];
    int out_bytes, out_done, in_bytes, in_done;
    unsigned char sender_nonce[NONCE_BYTES], receiver_nonce[NONCE_BYTES];
    double since_s;
};

/* A connection that this rank opens. */
struct dialled {
    struct exchange exchange;
    bool connected, answered;
};

/* A connection that was accepted, and has not authenticated yet. */
struct pending {
    struct exchange exchange;
    bool answered; /* the hello was good: its proof is awaited */
    int rank, tag; /* ... as it says */
};

struct listener {
    struct hapt_interface interface;
    uint16_t port;
    int socket;
};

struct tcp_setup {
    int rank, count;
    struct tcp_wanted *wanted; /* [count] */
    struct dialled *dialled;   /* [count] of those that this rank opens */
    struct listener *listener; /* [listener_count] */
    int listener_count;
    struct pending *pending; /* [pending_most], in order of arrival */
    int pending_count, pending_most;
    double pending_s;
    double short_since_s; /* no descriptors since then; 0: there are some */
    unsigned char key[SIPHASH_BYTES];
    struct pollfd *ready; /* [ready_most] */
    int ready_most;
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

/* Binds the proof to the role, to both ranks, the tag and both nonces, so that none can be sent back or used elsewhere.
 */
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
    return hapt_fail(HAPT_ERR_COMM, "the system's random number generator is needed", "no random numbers: %s",
                     strerror(errno));
}

enum moved { SOME, WHOLE, CLOSED };

/* Sends what is left; WHOLE when nothing is. */
static enum moved send_rest(struct exchange *exchange)
{
    while (exchange->out_done < exchange->out_bytes) {
        const ssize_t put = send(exchange->socket, exchange->out + exchange->out_done,
                                 (size_t)(exchange->out_bytes - exchange->out_done), MSG_NOSIGNAL);
        if (put < 0) return errno == EAGAIN || errno == EINTR ? SOME : CLOSED;
        exchange->out_done += (int)put;
    }
    return WHOLE;
}

/* Hears the next message, and not a byte of what follows it. */
static enum moved hear_rest(struct exchange *exchange)
{
    while (exchange->in_done < exchange->in_bytes) {
        const ssize_t got = recv(exchange->socket, exchange->in + exchange->in_done,
                                 (size_t)(exchange->in_bytes - exchange->in_done), 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return SOME;
        if (got <= 0) return CLOSED;
        exchange->in_done += (int)got;
    }
    return WHOLE;
}

static void expect(struct exchange *exchange, int bytes)
{
    exchange->in_bytes = bytes;
    exchange->in_done = 0;
}

static void say(struct exchange *exchange, int bytes)
{
    exchange->out_bytes = bytes;
    exchange->out_done = 0;
}

/* ---- sockets ---- */

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
    return a->wide == b->wide && memcmp(a->address, b->address, a->wide ? 16 : 4) == 0;
}

static struct listener *find_listener(const struct tcp_setup *setup, const struct hapt_interface *interface)
{
    for (int i = 0; i < setup->listener_count; i++)
        if (same_address(&setup->listener[i].interface, interface)) return &setup->listener[i];
    return NULL;
}

/* Listens at the interface's address alone. */
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
        if (interface->wide) setsockopt(made->socket, IPPROTO_IPV6, IPV6_V6ONLY, &on, sizeof on);
    }
    if (made->socket < 0 || bind(made->socket, (void *)&address, length) || listen(made->socket, BACKLOG) ||
        getsockname(made->socket, (void *)&address, &length))
        return hapt_fail(HAPT_ERR_COMM, "\"transport\": \"mpi\" in the cluster file avoids own connections",
                         "rank %d cannot listen on interface %s: %s", setup->rank, interface->name, strerror(errno));
    made->port =
        interface->wide ? ((struct sockaddr_in6 *)&address)->sin6_port : ((struct sockaddr_in *)&address)->sin_port;
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
    if (!made) return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for connections");
    for (int i = 0; i < count; i++) {
        wanted[i].socket = -1;
        awaited += !wanted[i].sends;
    }
    *made = (struct tcp_setup){.rank = rank, .count = count, .wanted = wanted, .pending_s = pending_s};
    made->pending_most = PENDING_LEAST + PENDING_EACH * awaited;
    made->ready_most = 2 * count + made->pending_most;
    made->dialled = calloc((size_t)count + 1, sizeof *made->dialled);
    made->listener = calloc((size_t)count + 1, sizeof *made->listener);
    made->pending = calloc((size_t)made->pending_most, sizeof *made->pending);
    made->ready = calloc((size_t)made->ready_most, sizeof *made->ready);
    if (!made->dialled || !made->listener || !made->pending || !made->ready)
        return hapt_fail(HAPT_ERR_MEMORY, NULL, "no memory for %d connections", count);
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
    *most = setup->pending_most;
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

static void hang_up(struct dialled *dialled)
{
    close(dialled->exchange.socket);
    dialled->exchange.socket = -1;
    dialled->connected = dialled->answered = false;
    dialled->exchange.since_s = hapt_time_s();
}

static enum hapt_status dial(struct tcp_setup *setup, const struct tcp_wanted *wanted, struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    struct sockaddr_storage own, peer;
    const socklen_t own_length = address_of(&wanted->path.own, 0, &own);
    const socklen_t peer_length = address_of(&wanted->path.peer, wanted->port, &peer);
    if (exchange->since_s > 0 && hapt_time_s() < exchange->since_s + REDIAL_S) return HAPT_OK;
    if (wanted->port == 0) return unreachable(setup, wanted, "it awaits none");
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

/* Once it is connected: the hello. */
static enum hapt_status greet(const struct tcp_setup *setup, const struct tcp_wanted *wanted, struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    struct pollfd ready = {.fd = exchange->socket, .events = POLLOUT};
    int error = 0;
    socklen_t length = sizeof error;
    if (poll(&ready, 1, 0) <= 0) return HAPT_OK;
    getsockopt(exchange->socket, SOL_SOCKET, SO_ERROR, &error, &length);
    if (error == ECONNRESET) hang_up(dialled);
    if (error) return error == ECONNRESET ? HAPT_OK : unreachable(setup, wanted, strerror(error));
    HAPT_TRY(draw_nonce(exchange->sender_nonce));
    memcpy(exchange->out, magic, sizeof magic);
    put_number(setup->rank, exchange->out + 8);
    put_number(wanted->tag, exchange->out + 12);
    memcpy(exchange->out + 16, exchange->sender_nonce, NONCE_BYTES);
    say(exchange, HELLO_BYTES);
    expect(exchange, ANSWER_BYTES);
    dialled->connected = true;
    return HAPT_OK;
}

/* The answer proves that the peer knows the key; the sender then proves the same. */
static enum hapt_status reply_to_answer(const struct tcp_setup *setup, const struct tcp_wanted *wanted,
                                        struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    unsigned char proof[SIPHASH_BYTES];
    memcpy(exchange->receiver_nonce, exchange->in, NONCE_BYTES);
    prove(setup, "receiver", setup->rank, wanted->peer, wanted->tag, exchange, proof);
    if (!siphash_equal(proof, exchange->in + NONCE_BYTES))
        return unreachable(setup, wanted, "what answers there does not belong to this job");
    prove(setup, "sender", setup->rank, wanted->peer, wanted->tag, exchange, exchange->out);
    say(exchange, SIPHASH_BYTES);
    dialled->answered = true;
    return HAPT_OK;
}

static enum hapt_status advance_dialled(struct tcp_setup *setup, struct tcp_wanted *wanted, struct dialled *dialled)
{
    struct exchange *exchange = &dialled->exchange;
    if (exchange->socket < 0) HAPT_TRY(dial(setup, wanted, dialled));
    if (exchange->socket >= 0 && !dialled->connected) HAPT_TRY(greet(setup, wanted, dialled));
    if (!dialled->connected) return HAPT_OK;
    enum moved moved = send_rest(exchange);
    if (moved == WHOLE && !dialled->answered) {
        moved = hear_rest(exchange);
        if (moved == WHOLE) {
            HAPT_TRY(reply_to_answer(setup, wanted, dialled));
            moved = send_rest(exchange);
        }
    }
    if (moved == CLOSED) hang_up(dialled);
    if (moved != WHOLE) return HAPT_OK;
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

/* The oldest that has said nothing, or else the oldest. */
static int worst_pending(const struct tcp_setup *setup)
{
    for (int i = 0; i < setup->pending_count; i++)
        if (setup->pending[i].exchange.in_done == 0 && !setup->pending[i].answered) return i;
    return 0;
}

/* Makes room where the system has no more descriptors: pending connections must not take those that the job needs. */
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
    for (int turn = 0; turn < setup->pending_most; turn++) {
        const int socket = accept(listener->socket, NULL, NULL);
        if (socket < 0 && lacks_descriptors(errno)) {
            const bool room = setup->pending_count > 0;
            HAPT_TRY(drop_one(setup, errno));
            if (!room) return HAPT_OK;
            continue;
        }
        if (socket < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return HAPT_OK;
        if (socket < 0) continue; /* that one is gone already */
        setup->short_since_s = 0;
        if (setup->pending_count == setup->pending_most) drop_pending(setup, worst_pending(setup), true);
        prepare_socket(socket);
        struct pending *made = &setup->pending[setup->pending_count++];
        *made = (struct pending){.exchange = {.socket = socket, .since_s = hapt_time_s()}};
        expect(&made->exchange, HELLO_BYTES);
        hear_rest(&made->exchange); /* so that it has said something before the next one needs its place */
    }
    return HAPT_OK;
}

/* The connection that a peer announces and that is not there yet; NULL: none. */
static struct tcp_wanted *find_awaited(const struct tcp_setup *setup, int rank, int tag)
{
    for (int i = 0; i < setup->count; i++) {
        struct tcp_wanted *wanted = &setup->wanted[i];
        if (!wanted->sends && wanted->socket < 0 && wanted->peer == rank && wanted->tag == tag) return wanted;
    }
    return NULL;
}

/* False: it is none of ours. */
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
    say(exchange, ANSWER_BYTES);
    expect(exchange, SIPHASH_BYTES);
    pending->answered = true;
    return true;
}

static bool check_proof(const struct tcp_setup *setup, const struct pending *pending)
{
    unsigned char proof[SIPHASH_BYTES];
    prove(setup, "sender", pending->rank, setup->rank, pending->tag, &pending->exchange, proof);
    return siphash_equal(proof, pending->exchange.in);
}

/* True: it is pending no longer. */
static bool advance_pending(const struct tcp_setup *setup, struct pending *pending, bool *shut,
                            enum hapt_status *status)
{
    struct exchange *exchange = &pending->exchange;
    *shut = true;
    if (hapt_time_s() > exchange->since_s + setup->pending_s) return true;
    enum moved moved = pending->answered ? WHOLE : hear_rest(exchange);
    if (moved == WHOLE && !pending->answered && !answer_hello(setup, pending, status)) return true;
    if (moved == WHOLE) moved = send_rest(exchange);
    if (moved == WHOLE) moved = hear_rest(exchange);
    if (moved != WHOLE) return moved == CLOSED;
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
        const bool hears = setup->dialled[i].connected && exchange->out_done == exchange->out_bytes;
        setup->ready[count++] = (struct pollfd){.fd = exchange->socket, .events = hears ? POLLIN : POLLOUT};
    }
    HAPT_ASSERT(count <= setup->ready_most);
    const double left_s = fmin(until_s - hapt_time_s(), POLL_MOST_S);
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
