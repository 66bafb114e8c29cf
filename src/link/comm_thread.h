/* Private parts of the communication thread, shared by its interface (comm_thread.c) and its work loop (flow.c,
 * flow_device.c, staging.c). */
#ifndef HAPT_LINK_COMM_THREAD_H
#define HAPT_LINK_COMM_THREAD_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "hapt/link.h"

#define MAX_CHUNKS_IN_FLIGHT 16 /* limit of chunks in flight: per flow when sending, per channel when receiving */

/* Chunks in flight, oldest first. `last`: the chunk ends its message. */
struct chunk_queue {
    int first, count;
    char *buffer; /* [MAX_CHUNKS_IN_FLIGHT][HAPT_LINK_CHUNK_BYTES] for strided chunks; NULL: there are none */
    const struct hapt_piece *piece[MAX_CHUNKS_IN_FLIGHT]; /* receiving: the piece that the chunk is part of */
    size_t offset[MAX_CHUNKS_IN_FLIGHT], bytes[MAX_CHUNKS_IN_FLIGHT];
    void *unpacked[MAX_CHUNKS_IN_FLIGHT]; /* receiving: base address to unpack to, if the chunk is in `buffer` */
    struct hapt_transfer_request request[MAX_CHUNKS_IN_FLIGHT];
    bool last[MAX_CHUNKS_IN_FLIGHT];
    double start_s[MAX_CHUNKS_IN_FLIGHT]; /* sending: of the message */
    double due_s[MAX_CHUNKS_IN_FLIGHT];   /* sending, stamped flows: of the message */
};

/* Position in the pieces at which the next chunk starts. */
struct cursor {
    int piece;
    size_t offset;
};

/* The part of a flow that concerns one peer. */
struct channel {
    int peer;
    int piece_count;
    struct hapt_piece *piece;
    /* receiving */
    struct chunk_queue chunk_queue;
    struct cursor cursor;
    int64_t posted;                           /* messages whose chunks are all posted */
    atomic_llong received;                    /* complete messages */
    int64_t credited;                         /* slot releases reported to the peer */
    int chunks;                               /* per message */
    int arrived;                              /* of the current message */
    double first_s;                           /* arrival of its first chunk */
    size_t bytes;                             /* per message */
    bool counts;                              /* the network counts, at the sending end; under the mutex: */
    struct hapt_transfer_rate counted, taken; /* last read from the network; last given to the compute thread */
    atomic_llong shortest_ns; /* time from the first to the last chunk, scaled; since the last call; 0: none */
    /* between devices (flow_device.c) */
    struct hapt_pair pair;
    struct hapt_block *block; /* [piece_count] of the current message */
    bool notice_in_flight;    /* a notice (empty message) that device data follows */
    struct hapt_transfer_request notice;
    int64_t notices_received;
    /* both directions: credits */
    bool credit_in_flight;
    struct hapt_transfer_request credit;
    int64_t credits;    /* sending: releases that the peer reported */
    double credit_s;    /* stamped flows: time of the release that is being sent */
    double *released_s; /* [peer_slots] sending: times of the last releases, by their index */
};

/* One direction of a paced link, as this rank uses it (port.c). */
struct port {
    int number;          /* hapt_flow_options.port */
    double free_s;       /* when the link is free after the newest message that started */
    int64_t handed_over; /* messages handed over; compute thread only */
    int64_t turn;        /* the message that starts next, or is under way; communication thread only */
};

struct flow {
    struct hapt_flow_options options;
    struct port *port; /* sending, paced; else NULL */
    int channel_count;
    struct channel *channel;
    int *piece_channel; /* [piece_count] */
    size_t message_bytes;
    /* sending */
    atomic_llong queued, sent; /* messages handed over; messages sent */
    int *queue_slot;           /* [slot_count] ring buffer, by sequence */
    double *queue_ready_s;     /* [slot_count] */
    int64_t *queue_turn;       /* [slot_count] on the port */
    int peers_done;            /* between devices: peers that are done with the current message */
    int64_t *last_of_slot;     /* [slot_count] 1 + newest sequence handed over in the slot; compute thread only */
    int64_t started;           /* messages whose first chunk may be sent */
    bool under_way, blocked;
    struct cursor cursor;
    size_t done_bytes;  /* of the current message */
    double start_s;     /* of the current message */
    double finished_s;  /* when the last message was sent */
    double due_s;       /* stamped: of the current message */
    double *slot_due_s; /* [slot_count] stamped: of the newest message sent from the slot */
    double *freed_s;    /* [peer_slots] receiving, stamped: when slots were released, by index of the release */
    /* receiving: sending flows that pass its messages on from their transfer slots (hapt_comm_thread_pass_on) */
    int next_count, next_capacity;
    const struct flow **next;
    struct chunk_queue chunk_queue;
    atomic_llong active_ns, shortest_ns; /* shortest_ns: of one message, since the last call; 0: none */
    /* The newest range of untimed messages, and the number of untimed messages before it. When the range changes, all
     * messages before it have been received. */
    atomic_llong untimed_first, untimed_end, untimed_before;
    /* receiving */
    atomic_llong expected, freed;
    atomic_llong on_device_count; /* on a device: messages in device memory */
    struct staging *staging;      /* NULL: the host reads and writes messages in place */
};

struct wakeups; /* of the ranks of the node (wakeup.c) */

struct hapt_comm_thread {
    struct hapt_arena arena;
    const struct hapt_transfer *transfer;
    void *context;
    double timeout_s;
    int flow_count, flow_capacity;
    struct flow **flow;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t work, completion;    /* wakes the communication thread; wakes the compute thread */
    const struct hapt_backend *backend; /* of flows on a device */
    struct hapt_device *device;
    int copies[2];                             /* in flight: out, in */
    const struct hapt_device_comm_ops *groups; /* of flows between devices */
    struct device_transfer {
        struct flow *flow; /* NULL: none in progress */
        struct channel *channel;
        struct hapt_event *event; /* recorded after the operation; NULL: not queued yet */
    } device_transfer[2];         /* device transfers in progress: sending, receiving */
    struct wakeups *wakeups;      /* NULL: no wakeups; then the thread sleeps on `work` and polls the library, */
    int event_fd;                 /* or sleeps in hapt_transfer.wait together with this eventfd; -1: not used */
    uint64_t wake_count;          /* under the mutex, like all below */
    bool running, stopping, finished;
    enum hapt_status status;
};

/* Result of one pass over all flows. */
struct poll_result {
    double now_s;
    double wake_s;   /* due time of the next paced chunk; NAN: none */
    bool progress;   /* something progressed: start the next pass at once */
    bool completion; /* a message is complete: wake the compute thread */
    bool in_flight;  /* the library must be polled again soon */
    bool unfinished; /* something is still to be sent, received or reported */
    enum hapt_status status;
};

/* Wakes the communication thread of a rank; false: the rank is not on this node. */
bool wakeups_signal(struct wakeups *wakeups, int world_rank);
/* Number of wakeups that this communication thread has received. */
unsigned wakeups_count(const struct wakeups *wakeups);
/* Sleeps until the count of wakeups differs from `count`, or until `until_s` (NAN: no limit). */
void wakeups_wait(struct wakeups *wakeups, unsigned count, double until_s);
void wakeups_signal_own(struct wakeups *wakeups);
bool wakeups_reach(const struct wakeups *wakeups, int world_rank);
void wakeups_destroy(struct wakeups *wakeups);

/* staging.c: messages in device memory that the host cannot read. */
enum hapt_status staging_create(struct hapt_comm_thread *comm_thread, struct flow *flow);
void staging_destroy(struct hapt_comm_thread *comm_thread, struct flow *flow);
/* Address of the piece's buffer of message `sequence`, for the message library: a host copy with the device's layout,
 * or device memory. */
char *staging_base(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece);
/* Counts completed copies and starts those that are possible. */
void staging_advance(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);
/* Sending: true if these bytes of the piece are in the host copy. */
bool staging_is_copied(const struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset,
                       size_t bytes);
/* Receiving: records that these bytes have arrived. */
void staging_add_arrived(struct flow *flow, int64_t sequence, const struct hapt_piece *piece, size_t offset,
                         size_t bytes);
/* Receiving: true if all of the next message, number `on_device_count`, is on the device. Its slot is then free for
 * another message. */
bool staging_finish_message(struct flow *flow);

/* port.c. NULL is the port of a flow that is not paced: it is always its turn. */
/* The port with that number; 0: a new one. */
enum hapt_status port_open(struct hapt_comm_thread *comm_thread, int number, struct port **port);
/* The turn of a message that is handed over now. */
int64_t port_hand_over(struct port *port);
bool port_is_turn(const struct port *port, int64_t turn);
/* The whole message has been given to the network. */
void port_end_turn(struct port *port);

/* Functions of flow.c for all flows. */
/* Received messages whose transfer slots are free: the compute thread has freed them, and no flow still passes them on.
 */
int64_t flow_released(const struct flow *flow);
void flow_receive_credits(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);
void flow_send_credits(struct hapt_comm_thread *comm_thread, const struct flow *flow, struct channel *channel,
                       struct poll_result *result);
/* Starts the next message if there is one, it is its turn on the port, and every receiver has a free slot; true if one
 * is in progress. */
bool flow_start_message(struct hapt_comm_thread *comm_thread, struct flow *flow, const struct poll_result *result);
/* All of the current message has been given to the network. */
void flow_end_message(struct flow *flow);
/* Counts a message that began at `start_s` and is now sent. */
void flow_count_sent(struct flow *flow, double start_s, double now_s, struct poll_result *result);
void flow_keep_time(const struct flow *flow, int64_t sequence, double time_s);
/* Sets `unfinished` and `in_flight` for a sender. */
void flow_update_sender_state(struct flow *flow, struct poll_result *result);

/* flow_device.c: messages exchanged directly between devices. */
enum hapt_status device_flow_prepare(struct hapt_comm_thread *comm_thread, struct flow *flow);
void device_flow_advance_sender(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);
void device_flow_advance_receiver(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);

void hapt_flow_advance_sender(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);
void hapt_flow_advance_receiver(struct hapt_comm_thread *comm_thread, struct flow *flow, struct poll_result *result);

#endif
