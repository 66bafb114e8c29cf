/* Inside the courier: what its thread (flow.c) and its face (courier.c) share. */
#ifndef HAPT_LINK_COURIER_H
#define HAPT_LINK_COURIER_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "hapt/link.h"

#define WINDOW 16 /* chunks in flight at most: per flow when sending, per channel when receiving */

/* Chunks in flight, oldest first; `last`: the chunk ends its message. */
struct window {
    int first, count;
    char *buffer; /* [WINDOW][HAPT_LINK_CHUNK_BYTES] for chunks that are no run of bytes in memory; NULL: there are none
                   */
    const struct hapt_piece *piece[WINDOW]; /* receiving: of which the chunk is, from this byte of it on */
    size_t offset[WINDOW], bytes[WINDOW];
    void *unpacked[WINDOW]; /* ... where it belongs if it stands in the buffer */
    struct hapt_transfer_request request[WINDOW];
    bool last[WINDOW];
    double start_s[WINDOW], due_s[WINDOW]; /* sending: of the message; due: stamped ones */
};

/* Where in the pieces the next chunk starts. */
struct cursor {
    int piece;
    size_t offset;
};

/* The part of a flow that one peer has to do with. */
struct channel {
    int peer;
    int piece_count;
    struct hapt_piece *piece;
    /* receiving */
    struct window window;
    struct cursor cursor;
    int64_t posted;                           /* messages whose chunks are all posted */
    atomic_llong received;                    /* messages complete */
    int64_t credited;                         /* slots whose release the peer was told of */
    int chunks;                               /* of a message */
    int arrived;                              /* of the message under way */
    double first_s;                           /* when its first chunk was there */
    size_t bytes;                             /* of a message */
    bool counts;                              /* the network does, at the sending end; under the mutex: */
    struct hapt_transfer_rate counted, taken; /* when it was asked last; when the compute thread was told last */
    atomic_llong shortest_ns;                 /* from the first to the last chunk, since asked; 0: none */
    /* between devices (flow_device.c) */
    struct hapt_pair pair;
    struct hapt_block *block; /* [piece_count] of the message under way */
    bool word_in_flight;      /* that a message is on its way, */
    struct hapt_transfer_request word;
    int64_t heard; /* ... receiving: of so many */
    /* either side of the credits */
    bool credit_in_flight;
    struct hapt_transfer_request credit;
    int64_t credits;    /* sending: releases the peer told us of */
    double credit_s;    /* of a stamped flow: time of the release, on its way */
    double *released_s; /* [peer_slots] sending: of the last releases, by their number */
};

struct flow {
    struct hapt_flow_options options;
    int channel_count;
    struct channel *channel;
    int *piece_channel; /* [piece_count] */
    size_t message_bytes;
    /* sending */
    atomic_llong queued, sent; /* messages handed over; messages gone */
    int *queue_slot;           /* [slot_count] ring by sequence */
    double *queue_ready_s;     /* [slot_count] */
    int met;                   /* between devices: peers that have the message under way */
    int64_t *last_of_slot; /* [slot_count] 1 + sequence of the newest message handed over there; compute thread only */
    int64_t started;       /* messages whose first chunk may go */
    bool under_way, blocked;
    struct cursor cursor;
    size_t done_bytes;  /* of the message under way */
    double start_s;     /* of the message under way */
    double port_free_s; /* paced: when the link has taken the message before */
    double finished_s;  /* when the last message was gone */
    double due_s;       /* stamped: of the message under way */
    double *slot_due_s; /* [slot_count] stamped: of the newest message sent from there */
    double *freed_s;    /* [peer_slots] receiving, stamped: when slots were released, by number of the release */
    struct window window;
    atomic_llong active_ns, shortest_ns; /* of one message, since asked; 0: none */
    /* receiving */
    atomic_llong expected, freed;
    atomic_llong landed;     /* on a device: messages that stand there */
    struct staging *staging; /* NULL: the host reads and writes where messages stand */
};

struct bells; /* of the ranks of the node (bells.c) */

struct hapt_courier {
    struct hapt_arena arena;
    const struct hapt_transfer *transfer;
    void *context;
    double timeout_s;
    int flow_count, flow_capacity;
    struct flow **flow;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work, news;          /* for the courier; for the compute thread */
    const struct hapt_backend *backend; /* of the flows on a device */
    struct hapt_device *device;
    int copies[2];                    /* under way: out, in */
    const struct hapt_groups *groups; /* of flows between devices */
    struct meeting {
        struct flow *flow; /* NULL: none is under way */
        struct channel *channel;
        struct hapt_event *event; /* behind it in the queue; NULL: it is not there yet */
    } meeting[2];                 /* of devices: sending, receiving */
    struct bells *bells;          /* NULL: the courier sleeps on `work` and asks the library again and again, */
    int kick;       /* or where that wakes it (hapt_transfer.wait) there, with this event beside it; -1: it does not */
    uint64_t kicks; /* under the mutex, as all below */
    bool running, stopping, finished;
    enum hapt_status status;
};

/* What one look at every flow found. */
struct pass {
    double now_s;
    double wake_s;   /* the next paced chunk is due then; NAN: none */
    bool progress;   /* something moved: look again at once */
    bool news;       /* a message is complete: the compute thread may go on */
    bool in_flight;  /* the library must be asked again soon */
    bool unfinished; /* something is still to be sent, taken or told */
    enum hapt_status status;
};

/* Rings the courier of a rank, so that it looks what came in; false: it is not on this node. */
bool bells_ring(struct bells *bells, int world_rank);
/* How often this courier was rung. */
unsigned bells_count(const struct bells *bells);
/* Sleeps until it is rung more often than `count` times or until `until_s` (NAN: for ever). */
void bells_wait(struct bells *bells, unsigned count, double until_s);
void bells_ring_own(struct bells *bells);
bool bells_reach(const struct bells *bells, int world_rank);
void bells_destroy(struct bells *bells);

/* staging.c: messages on a device whose memory the host cannot read. */
enum hapt_status staging_create(struct hapt_courier *courier, struct flow *flow);
void staging_destroy(struct hapt_courier *courier, struct flow *flow);
/* Where the message library finds the piece's buffer of message `sequence`: on the host, laid out as on the device, or
 * there. */
char *staging_base(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece);
/* Counts the copies that are done and begins those that may be. */
void staging_advance(struct hapt_courier *courier, struct flow *flow, struct pass *pass);
/* Sending: are these bytes of the piece there? */
bool staging_has(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset,
                 size_t bytes);
/* Receiving: they are now. */
void staging_note(struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset, size_t bytes);
/* Receiving: is all of the next message, number `landed`, on the device? Its slot is then ready for another one. */
bool staging_lands(struct flow *flow);

/* What flow.c has for all flows. */
void flow_hear_credits(struct hapt_courier *courier, struct flow *flow, struct pass *pass);
void flow_tell_credits(struct hapt_courier *courier, const struct flow *flow, struct channel *channel,
                       struct pass *pass);
/* Starts the next message when there is one and every receiver has a place for it; true when one is under way. */
bool flow_start_message(struct hapt_courier *courier, struct flow *flow, const struct pass *pass);
/* A message that began at `start_s` is gone. */
void flow_count_sent(struct flow *flow, double start_s, double now_s, struct pass *pass);
void flow_keep_time(const struct flow *flow, int64_t sequence, double time_s);
/* What is left to do for a sender. */
void flow_judge_sender(struct flow *flow, struct pass *pass);

/* flow_device.c: messages that devices trade. */
enum hapt_status meeting_prepare(struct hapt_courier *courier, struct flow *flow);
void meeting_advance_sender(struct hapt_courier *courier, struct flow *flow, struct pass *pass);
void meeting_advance_receiver(struct hapt_courier *courier, struct flow *flow, struct pass *pass);

void hapt_flow_advance_sender(struct hapt_courier *courier, struct flow *flow, struct pass *pass);
void hapt_flow_advance_receiver(struct hapt_courier *courier, struct flow *flow, struct pass *pass);

#endif
