/*
 * Setting up TCP connections between ranks that share a key.
 *
 * In: the connections that a rank will need, each with the interfaces of its two ends. Out: their sockets, or which one
 * is missing. The rank that sends on a connection opens it. Both ends prove by challenge and response that they know
 * the key, which itself is never sent:
 *
 *     sender -> receiver   "haptTCP1", rank, tag, nonce a
 *     receiver -> sender   nonce b, MAC(key, "receiver", ranks, tag, a, b)
 *     sender -> receiver   MAC(key, "sender", ranks, tag, a, b)
 *
 * Nonces are fresh random numbers, so a recorded exchange is worth nothing later. The rest of the connection is neither
 * encrypted nor authenticated. A listener is bound to the address that a peer's path names and closed as soon as all
 * its connections are there. A pending connection, which has not authenticated yet, is dropped after some seconds, or
 * when there are too many: the oldest first, those that have sent nothing before the others. A sender whose pending
 * connection was dropped tries again.
 */
#ifndef HAPT_LINK_TCP_SETUP_H
#define HAPT_LINK_TCP_SETUP_H

#include <stdint.h>

#include "hapt/network.h"
#include "siphash.h"

#define TCP_SETUP_PENDING_S 5.0 /* usual time limit of a pending connection: far more than three messages take */

struct tcp_wanted {
    int peer, tag;
    bool sends; /* this rank opens it */
    struct hapt_path path;
    uint16_t port; /* sends: where the peer listens, network byte order */
    int socket;    /* -1: not there yet; the caller closes it */
};

struct tcp_setup;

/* Listens where `wanted` [count], borrowed, has connections that peers open; their ports come by tcp_setup_port.
 * Rank-local, as all of these. */
enum hapt_status tcp_setup_create(int rank, int count, struct tcp_wanted *wanted, double pending_s,
                                  struct tcp_setup **setup);
/* The port on which this rank listens at the path's interface, network byte order; 0: it does not. */
uint16_t tcp_setup_port(const struct tcp_setup *setup, const struct hapt_path *path);
void tcp_setup_key(struct tcp_setup *setup, const unsigned char key[SIPHASH_BYTES]);
/* Goes on until all connections are there (*complete) or until_s has come. HAPT_ERR_COMM for one that cannot be made.
 */
enum hapt_status tcp_setup_advance(struct tcp_setup *setup, double until_s, bool *complete);
/* Names a connection that is missing after `seconds`. */
enum hapt_status tcp_setup_late(const struct tcp_setup *setup, double seconds);
/* Pending connections now, and how many there may be. */
int tcp_setup_pending(const struct tcp_setup *setup, int *most);
/* NULL is allowed. Sockets in `wanted` stay open. */
void tcp_setup_destroy(struct tcp_setup *setup);

#endif
