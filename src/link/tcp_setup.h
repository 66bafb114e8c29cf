/*
 * Sets up TCP connections between ranks that share a key.
 *
 * In: the connections that a rank needs, each with the interfaces of both ends. Out: their sockets, or the name of a
 * missing one. The rank that sends on a connection opens it. Both ends prove by challenge and response that they know
 * the key, which is never sent:
 *
 *     sender -> receiver   "haptTCP1", rank, tag, nonce a
 *     receiver -> sender   nonce b, MAC(key, "receiver", ranks, tag, a, b)
 *     sender -> receiver   MAC(key, "sender", ranks, tag, a, b)
 *
 * Nonces are fresh random numbers, so a recorded exchange cannot be reused. Later traffic is neither encrypted nor
 * authenticated. A listener is bound to the address in a peer's path and is closed when all its connections are made.
 * A pending connection, which has not authenticated yet, is dropped after some seconds. If there are too many, the
 * oldest is dropped first, beginning with those that have sent nothing. The sender of a dropped connection retries.
 */
#ifndef HAPT_LINK_TCP_SETUP_H
#define HAPT_LINK_TCP_SETUP_H

#include <stdint.h>

#include "hapt/network.h"
#include "siphash.h"

#define TCP_SETUP_PENDING_S 5.0 /* time limit of a pending connection: far more than three messages take */

struct tcp_wanted {
    int peer, tag;
    bool sends; /* this rank opens it */
    struct hapt_path path;
    uint16_t port; /* if `sends`: the port at which the peer listens, network byte order */
    int socket;    /* -1: not made yet; the caller closes it */
};

struct tcp_setup;

/* Listens for those connections in `wanted` [count], borrowed, that peers open; tcp_setup_port gives the ports. All
 * functions here are rank-local. */
enum hapt_status tcp_setup_create(int rank, int count, struct tcp_wanted *wanted, double pending_s,
                                  struct tcp_setup **setup);
/* The port at which this rank listens on the path's interface, network byte order; 0: none. */
uint16_t tcp_setup_port(const struct tcp_setup *setup, const struct hapt_path *path);
void tcp_setup_key(struct tcp_setup *setup, const unsigned char key[SIPHASH_BYTES]);
/* Continues until all connections are made (*complete) or until_s has come. HAPT_ERR_COMM if one cannot be made. */
enum hapt_status tcp_setup_advance(struct tcp_setup *setup, double until_s, bool *complete);
/* Reports a connection that is missing after `seconds`. */
enum hapt_status tcp_setup_late(const struct tcp_setup *setup, double seconds);
/* Number of pending connections, and its limit. */
int tcp_setup_pending(const struct tcp_setup *setup, int *most);
/* NULL is allowed. Sockets in `wanted` stay open. */
void tcp_setup_destroy(struct tcp_setup *setup);

#endif
