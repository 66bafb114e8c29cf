/*
 * Network interfaces of hosts, and paths: the interfaces by which two ranks reach each other.
 *
 * Messages go through the MPI library unless a TCP connection bound to a pair of interfaces is faster between two
 * hosts. Measurements decide (cluster.h: hapt_cluster_choose_routes). Within a host it is always MPI, which uses
 * shared memory.
 */
#ifndef HAPT_NETWORK_H
#define HAPT_NETWORK_H

#include "hapt/link.h"

#define HAPT_INTERFACES 8 /* per host, maximum */

struct hapt_interface {
    char name[16];             /* name in the system: "eth0" */
    bool is_ipv6;              /* else IPv4 */
    int prefix;                /* length of the network prefix in bits */
    unsigned char address[16]; /* network byte order; IPv4: the first four */
    double bandwidth;          /* nominal byte/s from the system; 0: unknown */
};

struct hapt_interfaces {
    int count;
    struct hapt_interface item[HAPT_INTERFACES];
};

/* How a rank reaches a peer. */
struct hapt_path {
    bool tcp; /* by own TCP connections between these two interfaces; else by MPI */
    struct hapt_interface own, peer;
};

/* The interfaces of this host that are up and have an address reachable by others; includes the loopback interface if
 * `loopback`. Rank-local. Empty if the system cannot list them. */
void hapt_interfaces_list(bool loopback, struct hapt_interfaces *list);
/* True if both are on one network, so that they reach each other without a router. */
bool hapt_interfaces_share_network(const struct hapt_interface *a, const struct hapt_interface *b);

/* Measures `transfer` between ranks 0 and 1 of `pair`, in about `seconds`: latency (s, half a round trip of the
 * smallest message) and bandwidth (byte/s, one direction). Both ranks get both values. HAPT_ERR_COMM if the route does
 * not work. Collective over `pair`, which has two ranks. */
enum hapt_status hapt_transfer_measure(const struct hapt_transfer *transfer, MPI_Comm pair,
                                       const struct hapt_path *path, double seconds, double *latency_s,
                                       double *bandwidth);

#endif
