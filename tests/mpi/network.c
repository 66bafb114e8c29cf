/* ranks: 2
 * Network interfaces, and the measurements of a transfer between two ranks, over MPI and over TCP connections. */
#include "test.h"

#include <unistd.h>

#include "hapt/network.h"

static struct hapt_interface narrow(unsigned a, unsigned b, unsigned c, unsigned d, int prefix)
{
    return (struct hapt_interface){.prefix = prefix,
                                   .address = {(unsigned char)a, (unsigned char)b, (unsigned char)c, (unsigned char)d}};
}

static void same_network(void)
{
    const struct hapt_interface one = narrow(10, 77, 4, 1, 22), near = narrow(10, 77, 7, 9, 22),
                                far = narrow(10, 77, 8, 1, 22);
    const struct hapt_interface narrower = narrow(10, 77, 4, 2, 24);
    struct hapt_interface wide = one;
    wide.is_ipv6 = true;
    CHECK(hapt_interfaces_share_network(&one, &near) && hapt_interfaces_share_network(&near, &one));
    CHECK(!hapt_interfaces_share_network(&one, &far));
    CHECK(!hapt_interfaces_share_network(&one, &narrower)); /* the ranks disagree about the network */
    CHECK(!hapt_interfaces_share_network(&one, &wide));
}

static bool loopback(struct hapt_interface *interface)
{
    struct hapt_interfaces list;
    hapt_interfaces_list(true, &list);
    for (int i = 0; i < list.count; i++)
        if (strcmp(list.item[i].name, "lo") == 0 && !list.item[i].is_ipv6) {
            *interface = list.item[i];
            return true;
        }
    return false;
}

static void lists_interfaces(void)
{
    struct hapt_interface lo;
    struct hapt_interfaces others;
    if (loopback(&lo)) CHECK(lo.prefix == 8 && lo.address[0] == 127 && lo.address[3] == 1);
    hapt_interfaces_list(false, &others);
    for (int i = 0; i < others.count; i++) CHECK(strcmp(others.item[i].name, "lo") != 0);
}

static void measures(void)
{
    struct hapt_path path[2] = {{0}};
    double latency_s = -1, bandwidth = -1;
    CHECK_OK(hapt_transfer_measure(&hapt_transfer_mpi, test_env.world, NULL, 0.1, &latency_s, &bandwidth));
    CHECK_MESSAGE(latency_s > 0 && latency_s < 0.1 && bandwidth > 1e6, "by MPI: %g s, %g byte/s", latency_s, bandwidth);
    if (!loopback(&path[0].own)) return;
    for (int r = 0; r < 2; r++) path[r] = (struct hapt_path){true, path[0].own, path[0].own};
    CHECK_OK(hapt_transfer_measure(&hapt_transfer_tcp, test_env.world, path, 0.1, &latency_s, &bandwidth));
    CHECK_MESSAGE(latency_s > 0 && latency_s < 0.1 && bandwidth > 1e6, "by own connections: %g s, %g byte/s", latency_s,
                  bandwidth);
}

/* An address without a listener: both ranks fail within seconds. */
static void leads_nowhere(void)
{
    struct hapt_path path[2] = {{0}};
    double latency_s, bandwidth;
    if (!loopback(&path[0].own)) return;
    const struct hapt_interface nobody = narrow(192, 0, 2, 1, 24); /* a network reserved for documentation */
    for (int r = 0; r < 2; r++) path[r] = (struct hapt_path){true, path[0].own, nobody};
    const double start_s = hapt_time_s();
    const enum hapt_status status =
        hapt_transfer_measure(&hapt_transfer_tcp, test_env.world, path, 0.1, &latency_s, &bandwidth);
    CHECK_MESSAGE(status == HAPT_ERR_COMM, "status %d", (int)status);
    CHECK(hapt_fail_message()[0] != '\0');
    hapt_fail_reset();
    CHECK_MESSAGE(hapt_time_s() - start_s < 30, "found out after %g s", hapt_time_s() - start_s);
}

#define SENT 400 /* chunks: more than all buffers of the path can hold */

/* Rank 0 sends; rank 1 receives from `later_s` on. Returns the system's counters and the seconds from the first chunk
 * to the last. */
static struct hapt_transfer_rate count_bytes(const struct hapt_path *path, double later_s, double *seconds)
{
    static char chunk[HAPT_LINK_CHUNK_BYTES];
    struct hapt_transfer_request request[SENT];
    struct hapt_transfer_rate rate = {-1, -1};
    void *context = NULL;
    const int window = 60; /* largest number of pending requests */
    CHECK_OK(hapt_transfer_tcp.open(test_env.world, path, &context));
    const int me = test_env.world_rank;
    CHECK_OK(hapt_transfer_tcp.announce(context, 1 - me, 4, me == 0));
    CHECK_OK(hapt_transfer_tcp.connect(context, 30));
    CHECK(hapt_transfer_tcp.rate(context, 1 - me, 4, &rate) && rate.bytes == 0 && rate.busy_s == 0);
    MPI_Barrier(test_env.world);
    const double start_s = hapt_time_s();
    if (me == 1) hapt_time_sleep_until(start_s + later_s);
    for (int begun = 0, ended = 0; ended < SENT;) {
        bool done = true;
        if (begun < SENT && begun - ended < window) {
            CHECK_OK(me == 0 ? hapt_transfer_tcp.send(context, chunk, sizeof chunk, 1, 4, &request[begun])
                             : hapt_transfer_tcp.receive(context, chunk, sizeof chunk, 0, 4, &request[begun]));
            begun++;
        }
        CHECK_OK(hapt_transfer_tcp.test(context, &request[ended], &done));
        ended += done;
        if (!done) hapt_time_sleep_until(hapt_time_s() + 1e-4);
    }
    MPI_Barrier(test_env.world);
    *seconds = hapt_time_s() - start_s;
    /* The last bytes may be acknowledged a moment later. */
    for (int turn = 0; me == 0 && turn < 500 && rate.bytes < (double)SENT * sizeof chunk; turn++) {
        hapt_time_sleep_until(hapt_time_s() + 1e-2);
        CHECK(hapt_transfer_tcp.rate(context, 1, 4, &rate));
    }
    hapt_transfer_tcp.close(context);
    MPI_Bcast(&rate, 2, MPI_DOUBLE, 0, test_env.world);
    return rate;
}

/* The system counts each byte once. A peer that receives nothing for a while does not make the link look slower. */
static void counts(void)
{
    struct hapt_path path[2] = {{0}};
    double seconds;
    if (!loopback(&path[0].own)) return;
    for (int r = 0; r < 2; r++) path[r] = (struct hapt_path){true, path[0].own, path[0].own};
    const double sent = (double)SENT * HAPT_LINK_CHUNK_BYTES, framing = 4 * SENT + 100, tick_s = 0.01;
    for (int late = 0; late < 2; late++) {
        const struct hapt_transfer_rate rate = count_bytes(path, late ? 2.0 : 0, &seconds);
        CHECK_MESSAGE(rate.bytes >= sent && rate.bytes <= sent + framing, "%.0f bytes of %.0f", rate.bytes, sent);
        CHECK_MESSAGE(rate.busy_s >= 0 && rate.busy_s <= seconds + tick_s, "busy for %g of %g s", rate.busy_s, seconds);
        if (late)
            CHECK_MESSAGE(seconds > 2 && rate.busy_s < seconds - 1, "busy for %g of %g s, of which the peer slept 2",
                          rate.busy_s, seconds);
    }
}

/* Sockets of this process that listen: its open descriptors that the system lists as listening. */
static int listeners(void)
{
    static const char *const files[] = {"/proc/self/net/tcp", "/proc/self/net/tcp6"};
    int count = 0;
    for (int f = 0; f < 2; f++) {
        FILE *file = fopen(files[f], "r");
        char line[512];
        while (file && fgets(line, sizeof line, file)) {
            unsigned state;
            unsigned long inode;
            if (sscanf(line, " %*d: %*s %*s %x %*s %*s %*s %*u %*u %lu", &state, &inode) != 2 || state != 10) continue;
            for (int fd = 0; fd < 1024; fd++) {
                char link[40], target[64] = "", wanted[64];
                snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
                snprintf(wanted, sizeof wanted, "socket:[%lu]", inode);
                const ssize_t length = readlink(link, target, sizeof target - 1);
                count += length > 0 && strcmp(target, wanted) == 0;
            }
        }
        if (file) fclose(file);
    }
    return count;
}

/* Ranks connect before the first message: exactly the connections that both have announced. Afterwards no rank listens.
 * A connection announced at one end only fails on both, with the receiver's message, after its time limit. */
static void connects(void)
{
    struct hapt_path path[2] = {{0}};
    const int me = test_env.world_rank, before = listeners();
    if (!loopback(&path[0].own)) return;
    for (int r = 0; r < 2; r++) path[r] = (struct hapt_path){true, path[0].own, path[0].own};
    for (int lacks = 0; lacks < 3; lacks++) { /* announced by: none, the sender, the receiver */
        void *context = NULL;
        char first[512] = "", mine[512];
        CHECK_OK(hapt_transfer_tcp.open(test_env.world, path, &context));
        CHECK(listeners() == before);
        for (int twice = 0; twice < 2; twice++) CHECK_OK(hapt_transfer_tcp.announce(context, 1 - me, 1, me == 0));
        if (lacks != 1 || me == 1)
            CHECK_OK(hapt_transfer_tcp.announce(context, 1 - me, lacks == 2 ? 1 : 2,
                                                me == 1 && lacks == 2 ? true : me == 0));
        const double start_s = hapt_time_s(), limit_s = lacks ? 1 : 30;
        const enum hapt_status status = hapt_transfer_tcp.connect(context, limit_s);
        const double seconds = hapt_time_s() - start_s;
        CHECK_MESSAGE(status == (lacks ? HAPT_ERR_COMM : HAPT_OK), "status %d", (int)status);
        CHECK_MESSAGE(seconds < limit_s + 10, "%g s", seconds);
        if (lacks == 1) CHECK_MESSAGE(seconds > 0.9, "%g s", seconds);
        snprintf(mine, sizeof mine, "%s", hapt_fail_message());
        memcpy(first, mine, sizeof first);
        MPI_Bcast(first, sizeof first, MPI_CHAR, 0, test_env.world);
        CHECK_MESSAGE(strcmp(mine, first) == 0, "%s, but rank 0: %s", mine, first);
        if (lacks == 1)
            CHECK_MESSAGE(strstr(mine, "rank 1 has no connection to rank 0") &&
                              strstr(mine, "did not connect within 1 s"),
                          "%s", mine);
        if (lacks == 2)
            CHECK_MESSAGE(strstr(mine, "rank 1 has no connection to rank 0") && strstr(mine, "expects no connection"),
                          "%s", mine);
        hapt_fail_reset();
        CHECK_MESSAGE(listeners() == before, "%d sockets listen, %d did", listeners(), before);
        hapt_transfer_tcp.close(context);
    }
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(same_network);
    RUN(lists_interfaces);
    RUN(measures);
    RUN(leads_nowhere);
    RUN(counts);
    RUN(connects);
    return test_finish();
}
