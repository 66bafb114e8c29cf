/*
 * Network interfaces of the hosts, and paths: by which of them two ranks reach each other.
 *
 * Messages go by the MPI library unless a pair of hosts has a faster way: then by a TCP connection
 * bound to a pair of their interfaces. Which it is, measurement says (cluster.h: hapt_cluster_choose_ways); within a
 * host it is always MPI, that is shared memory.
 */
#ifndef HAPT_NETWORK_H
#define HAPT_NETWORK_H

#include "hapt/link.h"

#define HAPT_INTERFACES 8 /* of a host, at most */

struct hapt_interface {
    char name[16];             /* as the system calls it: "eth0" */
    bool wide;                 /* IPv6, else IPv4 */
    int prefix;                /* bits of the address that name the network */
    unsigned char address[16]; /* network byte order; IPv4: the first four */
    double bandwidth;          /* byte/s that the system claims; 0: it does not say */
};

struct hapt_interfaces {
    int count;
    struct hapt_interface item[HAPT_INTERFACES];
};

/* How a rank reaches a peer. */
struct hapt_path {
    bool tcp; /* by own connections between these two interfaces; else by MPI */
    struct hapt_interface own, peer;
};

/* The interfaces of this host that are up and have an address others can reach; the loopback one only where `loopback`.
 * Rank-local; none where the system does not tell. */
void hapt_interfaces_list(bool loopback, struct hapt_interfaces *list);
/* Are the two on one network, so that one reaches the other without a router? */
bool hapt_interfaces_meet(const struct hapt_interface *a, const struct hapt_interface *b);

/* Latency (s, half a round trip of the smallest message) and bandwidth (byte/s, one direction) between ranks 0 and 1 of
 * `pair` by `transfer`, in about `seconds`. Both ranks get both. HAPT_ERR_COMM when the way leads nowhere. Collective
 * over `pair`, which has two ranks. */
enum hapt_status hapt_transfer_measure(const struct hapt_transfer *transfer, MPI_Comm pair,
                                       const struct hapt_path *path, double seconds, double *latency_s,
                                       double *bandwidth);

#endif
