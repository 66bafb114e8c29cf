/* ranks: 2
 * Network interfaces, and what a transfer measures between two ranks: by MPI and by own connections. */
#include "test.h"

#include "hapt/network.h"

static struct hapt_interface narrow(unsigned a, unsigned b, unsigned c, unsigned d, int prefix)
{
    return (struct hapt_interface){.prefix = prefix, .address = {(unsigned char)a, (unsigned char)b, (unsigned char)c, (unsigned char)d}};
}

static void same_network(void)
{
    const struct hapt_interface one = narrow(10, 77, 4, 1, 22), near = narrow(10, 77, 7, 9, 22), far = narrow(10, 77, 8, 1, 22);
    const struct hapt_interface narrower = narrow(10, 77, 4, 2, 24);
    struct hapt_interface wide = one;
    wide.wide = true;
    CHECK(hapt_interfaces_meet(&one, &near) && hapt_interfaces_meet(&near, &one));
    CHECK(!hapt_interfaces_meet(&one, &far));
    CHECK(!hapt_interfaces_meet(&one, &narrower)); /* they disagree on what the network is */
    CHECK(!hapt_interfaces_meet(&one, &wide));
}

static bool loopback(struct hapt_interface *interface)
{
    struct hapt_interfaces list;
    hapt_interfaces_list(true, &list);
    for (int i = 0; i < list.count; i++)
        if (strcmp(list.item[i].name, "lo") == 0 && !list.item[i].wide) {
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
    CHECK_MESSAGE(latency_s > 0 && latency_s < 0.1 && bandwidth > 1e6, "by own connections: %g s, %g byte/s", latency_s, bandwidth);
}

/* An address where nobody is: an error on both ranks, in seconds. */
static void leads_nowhere(void)
{
    struct hapt_path path[2] = {{0}};
    double latency_s, bandwidth;
    if (!loopback(&path[0].own)) return;
    const struct hapt_interface nobody = narrow(192, 0, 2, 1, 24); /* a network that documentation alone uses */
    for (int r = 0; r < 2; r++) path[r] = (struct hapt_path){true, path[0].own, nobody};
    const double start_s = hapt_time_s();
    const enum hapt_status status = hapt_transfer_measure(&hapt_transfer_tcp, test_env.world, path, 0.1, &latency_s, &bandwidth);
    CHECK_MESSAGE(status == HAPT_ERR_COMM, "status %d", (int)status);
    CHECK(hapt_fail_message()[0] != '\0');
    hapt_fail_reset();
    CHECK_MESSAGE(hapt_time_s() - start_s < 30, "found out after %g s", hapt_time_s() - start_s);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(same_network);
    RUN(lists_interfaces);
    RUN(measures);
    RUN(leads_nowhere);
    return test_finish();
}
