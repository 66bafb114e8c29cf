/* Setting up connections between ranks that share a key: published test vectors of the authentication code, unknown
 * connections of every kind, and the bytes on the wire. Both ends run in this process in turn. Unknown connections are
 * sockets of this process or of a child. */
#include "test.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../src/link/tcp_setup.h"

enum { EACH = 3, FLOOD = 2000, HELLO = 32, ANSWER = 32, PROOF = 16 };
#define PATIENCE_S 20.0

static const unsigned char key[SIPHASH_BYTES] = {0xb5, 0x1c, 0x9e, 0x04, 0x77, 0xf2, 0x3a, 0x60,
                                                 0xd9, 0x81, 0x2b, 0x45, 0xee, 0x10, 0xc7, 0x5f};

/* vectors.h of the reference implementation: key 00 01 ... 0f, input 00 01 ... of as many bytes. OpenSSL's SIPHASH
 * gives the same. */
static void published_vectors(void)
{
    static const struct {
        int bytes;
        const char *tag;
    } vectors[] = {{0, "a3817f04ba25a8e66df67214c7550293"},  {1, "da87c1d86b99af44347659119b22fc45"},
                   {2, "8177228da4a45dc7fca38bdef60affe4"},  {7, "a1f1ebbed8dbc153c0b84aa61ff08239"},
                   {8, "3b62a9ba6258f5610f83e264f31497b4"},  {9, "264499060ad9baabc47f8b02bb6d71ed"},
                   {15, "5493e99933b0a8117e08ec0f97cfc3d9"}, {16, "6ee2a4ca67b054bbfd3315bf85230577"},
                   {31, "2939b0183223fafc1723de4f52c43d35"}, {32, "7c3956ca5eeafc3e363e9d556546eb68"},
                   {47, "e61c432b720b19d18ec8d84bdc63151b"}, {63, "5150d1772f50834a503e069a973fbd7c"}};
    unsigned char count[64], tag[SIPHASH_BYTES];
    for (int i = 0; i < 64; i++) count[i] = (unsigned char)i;
    for (size_t v = 0; v < sizeof vectors / sizeof *vectors; v++) {
        char text[33];
        siphash_tag(count, count, (size_t)vectors[v].bytes, tag);
        for (int i = 0; i < SIPHASH_BYTES; i++) snprintf(text + 2 * i, 3, "%02x", tag[i]);
        CHECK_MESSAGE(strcmp(text, vectors[v].tag) == 0, "%d bytes: %s", vectors[v].bytes, text);
    }
    unsigned char other[SIPHASH_BYTES];
    for (int i = 0; i < SIPHASH_BYTES; i++) {
        memcpy(other, tag, sizeof other);
        other[i] ^= 1;
        CHECK(!siphash_equal(tag, other));
    }
    memcpy(other, tag, sizeof other);
    CHECK(siphash_equal(tag, other));
}

static struct hapt_path loopback(void)
{
    const struct hapt_interface lo = {.name = "lo", .prefix = 8, .address = {127, 0, 0, 1}};
    return (struct hapt_path){true, lo, lo};
}

/* Two ranks. Rank 0 opens `there` connections, rank 1 opens `back` connections, with tags from 0 on. */
struct pair {
    struct tcp_setup *setup[2];
    struct tcp_wanted wanted[2][2 * EACH];
    int count;
};

static void open_pair(struct pair *pair, int there, int back, double pending_s)
{
    *pair = (struct pair){.count = there + back};
    for (int rank = 0; rank < 2; rank++) {
        for (int i = 0; i < pair->count; i++)
            pair->wanted[rank][i] = (struct tcp_wanted){
                .peer = 1 - rank, .tag = i, .sends = (i < there) == (rank == 0), .path = loopback()};
        CHECK_OK(tcp_setup_create(rank, pair->count, pair->wanted[rank], pending_s, &pair->setup[rank]));
        tcp_setup_key(pair->setup[rank], key);
    }
    for (int rank = 0; rank < 2; rank++)
        for (int i = 0; i < pair->count; i++)
            pair->wanted[rank][i].port = tcp_setup_port(pair->setup[1 - rank], &pair->wanted[rank][i].path);
}

static void close_pair(struct pair *pair)
{
    for (int rank = 0; rank < 2; rank++) {
        tcp_setup_destroy(pair->setup[rank]);
        for (int i = 0; i < pair->count; i++)
            if (pair->wanted[rank][i].socket >= 0) close(pair->wanted[rank][i].socket);
    }
}

/* Runs both in turn until all connections exist. Returns the failure of one, if any. */
static enum hapt_status finish_pair(struct pair *pair, double seconds)
{
    const double end_s = hapt_time_s() + seconds;
    for (bool complete[2] = {false, false};;) {
        for (int rank = 0; rank < 2; rank++) {
            const enum hapt_status status = tcp_setup_advance(pair->setup[rank], hapt_time_s() + 1e-3, &complete[rank]);
            if (status != HAPT_OK) return status;
        }
        if (complete[0] && complete[1]) return HAPT_OK;
        if (hapt_time_s() > end_s) return HAPT_ERR_INFEASIBLE;
    }
}

/* Each socket is connected to the socket of the same tag at the other end. */
static void check_pair(const struct pair *pair)
{
    for (int i = 0; i < pair->count; i++)
        for (int rank = 0; rank < 2; rank++) {
            const struct tcp_wanted *from = &pair->wanted[rank][i], *to = &pair->wanted[1 - rank][i];
            char sent[2] = {(char)rank, (char)i}, got[3] = {9, 9, 9};
            if (!from->sends) continue;
            CHECK(write(from->socket, sent, 2) == 2);
            struct pollfd ready = {.fd = to->socket, .events = POLLIN};
            CHECK(poll(&ready, 1, 5000) == 1);
            CHECK(read(to->socket, got, 3) == 2 && memcmp(sent, got, 2) == 0);
        }
}

static int call_address(unsigned last, uint16_t port)
{
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(0x7f000000u + last)};
    const int made = socket(AF_INET, SOCK_STREAM, 0);
    if (made >= 0 && connect(made, (void *)&address, sizeof address) == 0) return made;
    if (made >= 0) close(made);
    return -1;
}

/* Waits until the other side has closed it, or for some time. */
static bool is_closed(int socket, struct pair *pair)
{
    const double end_s = hapt_time_s() + 5;
    char byte;
    bool complete;
    while (hapt_time_s() < end_s) {
        struct pollfd ready = {.fd = socket, .events = POLLIN};
        if (poll(&ready, 1, 1) == 1 && read(socket, &byte, 1) <= 0) return true;
        tcp_setup_advance(pair->setup[1], hapt_time_s() + 1e-3, &complete);
    }
    return false;
}

static void connects(void)
{
    struct pair pair;
    open_pair(&pair, EACH, EACH, TCP_SETUP_PENDING_S);
    const uint16_t port[2] = {tcp_setup_port(pair.setup[0], &pair.wanted[0][0].path),
                              tcp_setup_port(pair.setup[1], &pair.wanted[1][0].path)};
    CHECK(port[0] != 0 && port[1] != 0);
    /* The listener must be bound to the interface's address only: any address in 127.0.0.0/8 would reach a socket bound
     * to all. */
    CHECK(call_address(2, port[0]) < 0);
    const int unknown = call_address(1, port[0]);
    CHECK(unknown >= 0);
    CHECK_OK(finish_pair(&pair, PATIENCE_S));
    check_pair(&pair);
    /* No rank listens any more, before anything is destroyed. */
    for (int rank = 0; rank < 2; rank++) CHECK(call_address(1, port[rank]) < 0);
    CHECK(is_closed(unknown, &pair));
    close(unknown);
    close_pair(&pair);
    /* A rank without incoming connections never listens. */
    open_pair(&pair, 1, 0, TCP_SETUP_PENDING_S);
    CHECK(tcp_setup_port(pair.setup[0], &pair.wanted[0][0].path) == 0 &&
          tcp_setup_port(pair.setup[1], &pair.wanted[1][0].path) != 0);
    close_pair(&pair);
}

/* A child that opens as many idle connections as requested, as fast as they are accepted. */
static pid_t flood(uint16_t port, int count)
{
    int told[2];
    char byte;
    CHECK(pipe(told) == 0);
    const pid_t child = fork();
    if (child == 0) {
        struct rlimit limit;
        getrlimit(RLIMIT_NOFILE, &limit);
        limit.rlim_cur = limit.rlim_max;
        setrlimit(RLIMIT_NOFILE, &limit);
        struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = htonl(0x7f000001u)};
        for (int i = 0; i < count; i++) {
            const int made = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
            if (made < 0 || (connect(made, (void *)&address, sizeof address) && errno != EINPROGRESS)) _exit(1);
        }
        (void)!write(told[1], "x", 1);
        for (;;) pause();
    }
    close(told[1]);
    CHECK(read(told[0], &byte, 1) == 1);
    close(told[0]);
    return child;
}

static void end_child(pid_t child)
{
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
}

static int open_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 4096; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

/* 2,000 idle connections come before and during the job's own. Few are held at a time, and the job's own succeed. */
static void idle_connections(void)
{
    struct pair pair;
    int most, held = 0;
    bool complete;
    open_pair(&pair, EACH, 0, TCP_SETUP_PENDING_S);
    const int before = open_files();
    const pid_t child = flood(pair.wanted[0][0].port, FLOOD);
    tcp_setup_pending(pair.setup[1], &most);
    CHECK_MESSAGE(most <= 16 + 2 * EACH, "%d pending connections are allowed for %d awaited ones", most, EACH);
    for (int turn = 0; turn < 400; turn++) {
        CHECK_OK(tcp_setup_advance(pair.setup[1], hapt_time_s(), &complete));
        const int now = tcp_setup_pending(pair.setup[1], &most);
        held = now > held ? now : held;
    }
    CHECK_MESSAGE(held == most, "%d of %d", held, most);
    CHECK(open_files() <= before + most);
    const pid_t another = flood(pair.wanted[0][0].port, FLOOD);
    CHECK_OK(finish_pair(&pair, PATIENCE_S));
    check_pair(&pair);
    end_child(child);
    end_child(another);
    close_pair(&pair);
}

/* The process runs out of descriptors. Pending connections are closed, and the job's own connections succeed. */
static void few_descriptors(void)
{
    struct pair pair;
    struct rlimit limit, least;
    bool complete;
    open_pair(&pair, EACH, 0,
              0.3); /* both ends share the descriptors here: a time limit soon returns some to the sender */
    const pid_t child = flood(pair.wanted[0][0].port, 200);
    getrlimit(RLIMIT_NOFILE, &limit);
    least = limit;
    least.rlim_cur = (rlim_t)open_files() + 2 * EACH + 1; /* the job's own connections, and one more */
    setrlimit(RLIMIT_NOFILE, &least);
    for (int turn = 0; turn < 20; turn++) CHECK_OK(tcp_setup_advance(pair.setup[1], hapt_time_s(), &complete));
    CHECK_OK(finish_pair(&pair, PATIENCE_S));
    setrlimit(RLIMIT_NOFILE, &limit);
    check_pair(&pair);
    end_child(child);
    close_pair(&pair);
    /* Too few descriptors for the job itself: an error that says so. */
    open_pair(&pair, EACH, 0, TCP_SETUP_PENDING_S);
    least.rlim_cur = (rlim_t)open_files() + 1;
    setrlimit(RLIMIT_NOFILE, &least);
    const enum hapt_status status = finish_pair(&pair, PATIENCE_S);
    setrlimit(RLIMIT_NOFILE, &limit);
    CHECK_MESSAGE(status == HAPT_ERR_COMM && strstr(hapt_fail_hint(), "ulimit -n"), "status %d: %s", (int)status,
                  hapt_fail_message());
    hapt_fail_reset();
    close_pair(&pair);
}

static void write_number(unsigned char *at, int value)
{
    const uint32_t word = htonl((uint32_t)value);
    memcpy(at, &word, sizeof word);
}

/* Everything except a proof: such a connection is closed at once, or when the proof turns out wrong. The job's
 * connections succeed. */
static void talking_connections(void)
{
    struct pair pair;
    unsigned char hello[HELLO] = "haptTCP1", answer[ANSWER], nothing[PROOF] = {0};
    open_pair(&pair, EACH, 0, TCP_SETUP_PENDING_S);
    const uint16_t port = pair.wanted[0][0].port;
    static const char garbage[3][HELLO + 1] = {"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n",
                                               "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 0123456789abcdefghij",
                                               "haptTCP2........................"};
    for (int g = 0; g < 3; g++) {
        const int socket = call_address(1, port);
        CHECK(write(socket, garbage[g], HELLO) == HELLO);
        CHECK_MESSAGE(is_closed(socket, &pair), "garbage %d is not refused", g);
        close(socket);
    }
    const int wrong[][2] = {{7, 0}, {-1, 0}, {0, EACH}, {0, -5}, {1, 0}}; /* no such rank, no such tag */
    for (int w = 0; w < 5; w++) {
        const int socket = call_address(1, port);
        write_number(hello + 8, wrong[w][0]);
        write_number(hello + 12, wrong[w][1]);
        CHECK(write(socket, hello, HELLO) == HELLO);
        CHECK_MESSAGE(is_closed(socket, &pair), "rank %d, tag %d are not refused", wrong[w][0], wrong[w][1]);
        close(socket);
    }
    /* A valid hello, then: no proof; the receiver's own proof sent back; half a proof and an end. */
    for (int p = 0; p < 3; p++) {
        const int socket = call_address(1, port);
        bool complete;
        write_number(hello + 8, 0);
        write_number(hello + 12, 1);
        CHECK(write(socket, hello, HELLO) == HELLO);
        CHECK_OK(tcp_setup_advance(pair.setup[1], hapt_time_s() + 0.05, &complete));
        CHECK(recv(socket, answer, ANSWER, MSG_DONTWAIT) == ANSWER);
        CHECK(write(socket, p == 1 ? answer + 16 : nothing, p == 2 ? PROOF / 2 : PROOF) > 0);
        if (p == 2) shutdown(socket, SHUT_WR);
        CHECK_MESSAGE(is_closed(socket, &pair), "proof %d is not refused", p);
        close(socket);
    }
    for (int i = 0; i < EACH; i++) CHECK(pair.wanted[1][i].socket < 0);
    CHECK_OK(finish_pair(&pair, PATIENCE_S));
    check_pair(&pair);
    close_pair(&pair);
}

/* A pending connection is closed after its time limit, whether silent or in the middle of its hello. */
static void slow_connections(void)
{
    struct pair pair;
    open_pair(&pair, EACH, 0, 0.2);
    for (int half = 0; half < 2; half++) {
        const double start_s = hapt_time_s();
        const int socket = call_address(1, pair.wanted[0][0].port);
        if (half) CHECK(write(socket, "haptTCP1", 8) == 8);
        CHECK(is_closed(socket, &pair));
        CHECK_MESSAGE(hapt_time_s() - start_s >= 0.19, "dropped after %g s", hapt_time_s() - start_s);
        close(socket);
    }
    close_pair(&pair);
}

static void other_key(void)
{
    struct pair pair;
    unsigned char other[SIPHASH_BYTES];
    bool complete = true;
    memcpy(other, key, sizeof other);
    other[15] ^= 0x80;
    open_pair(&pair, 1, 0, TCP_SETUP_PENDING_S);
    tcp_setup_key(pair.setup[1], other);
    const enum hapt_status status = finish_pair(&pair, PATIENCE_S);
    CHECK_MESSAGE(status == HAPT_ERR_COMM && strstr(hapt_fail_message(), "rank 0 has no connection to rank 1") &&
                      strstr(hapt_fail_message(), "does not belong to this job"),
                  "status %d: %s", (int)status, hapt_fail_message());
    hapt_fail_reset();
    CHECK_OK(tcp_setup_advance(pair.setup[1], hapt_time_s() + 0.05, &complete));
    CHECK(!complete && pair.wanted[1][0].socket < 0);
    CHECK(tcp_setup_late(pair.setup[1], 0.5) == HAPT_ERR_COMM &&
          strstr(hapt_fail_message(), "rank 1 has no connection to rank 0"));
    hapt_fail_reset();
    close_pair(&pair);
}

/* A relay between the sender and the receiver that records all bytes. */
struct relay {
    int listener, side[2]; /* from the sender, to the receiver */
    uint16_t port, to;
    int refuses; /* this many connections are closed at once */
    unsigned char seen[2][256];
    size_t length[2];
};

static void open_relay(struct relay *relay, uint16_t to, int refuses)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(0x7f000001u)};
    socklen_t length = sizeof address;
    *relay = (struct relay){
        .listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), .side = {-1, -1}, .to = to, .refuses = refuses};
    CHECK(bind(relay->listener, (void *)&address, sizeof address) == 0 && listen(relay->listener, 5) == 0 &&
          getsockname(relay->listener, (void *)&address, &length) == 0);
    relay->port = address.sin_port;
}

static void advance_relay(struct relay *relay)
{
    const int socket = relay->side[0] < 0 ? accept(relay->listener, NULL, NULL) : -1;
    if (socket >= 0 && relay->refuses > 0) {
        relay->refuses--;
        close(socket);
    } else if (socket >= 0) {
        relay->side[0] = socket;
        relay->side[1] = call_address(1, relay->to);
    }
    for (int s = 0; s < 2 && relay->side[0] >= 0; s++) {
        unsigned char *place = relay->seen[s] + relay->length[s];
        const ssize_t got = recv(relay->side[s], place, sizeof relay->seen[s] - relay->length[s], MSG_DONTWAIT);
        if (got <= 0) continue;
        CHECK(write(relay->side[1 - s], place, (size_t)got) == got);
        relay->length[s] += (size_t)got;
    }
}

static void close_relay(struct relay *relay)
{
    close(relay->listener);
    for (int s = 0; s < 2; s++) close(relay->side[s]);
}

static bool holds(const struct relay *relay, const unsigned char *bytes, size_t count)
{
    return memmem(relay->seen[0], relay->length[0], bytes, count) ||
           memmem(relay->seen[1], relay->length[1], bytes, count);
}

/* No part of the key is on the wire. A recorded exchange sent again is refused. A refused sender tries again. */
static void on_the_wire(void)
{
    struct pair pair;
    struct relay relay, second;
    for (int refuses = 0; refuses < 4; refuses += 3) {
        open_pair(&pair, 1, 0, TCP_SETUP_PENDING_S);
        open_relay(&relay, pair.wanted[0][0].port, refuses);
        pair.wanted[0][0].port = relay.port;
        const double end_s = hapt_time_s() + PATIENCE_S;
        for (bool complete[2] = {false, false}; !(complete[0] && complete[1]) && hapt_time_s() < end_s;) {
            for (int rank = 0; rank < 2; rank++)
                CHECK_OK(tcp_setup_advance(pair.setup[rank], hapt_time_s(), &complete[rank]));
            advance_relay(&relay);
        }
        CHECK(pair.wanted[0][0].socket >= 0 && pair.wanted[1][0].socket >= 0 && relay.refuses == 0);
        CHECK(relay.length[0] == HELLO + PROOF && relay.length[1] == ANSWER);
        for (int at = 0; at + 4 <= SIPHASH_BYTES; at++) CHECK(!holds(&relay, key + at, 4));
        close_pair(&pair);
        if (refuses == 0) second = relay;
        close_relay(&relay);
    }
    CHECK(memcmp(second.seen[0] + 16, relay.seen[0] + 16, 16) != 0 &&
          memcmp(second.seen[1], relay.seen[1], 16) != 0); /* fresh nonces */
    open_pair(&pair, 1, 0, TCP_SETUP_PENDING_S);
    const int socket = call_address(1, pair.wanted[0][0].port);
    CHECK(write(socket, relay.seen[0], HELLO + PROOF) == HELLO + PROOF);
    unsigned char answer[ANSWER];
    bool complete;
    CHECK_OK(tcp_setup_advance(pair.setup[1], hapt_time_s() + 0.1, &complete));
    CHECK(recv(socket, answer, ANSWER, MSG_DONTWAIT) == ANSWER);
    CHECK(is_closed(socket, &pair) && pair.wanted[1][0].socket < 0);
    close(socket);
    close_pair(&pair);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    signal(SIGPIPE, SIG_IGN);
    RUN(published_vectors);
    RUN(connects);
    RUN(idle_connections);
    RUN(few_descriptors);
    RUN(talking_connections);
    RUN(slow_connections);
    RUN(other_key);
    RUN(on_the_wire);
    return test_finish();
}
