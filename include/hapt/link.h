/*
 * Links: transfers of stage boundary tensors (activations, gradients) while the stage computes, and the collectives of
 * a submesh.
 *
 * A communication thread per rank does the transfers. It never blocks in its message library: it polls, then sleeps 50
 * to 400 us. The compute thread hands it messages and waits on a condition variable. Messages are split into chunks of
 * at most HAPT_LINK_CHUNK_BYTES. A receiver has a few transfer slots and tells the sender when one is free again, so
 * no data accumulates in the library.
 *
 * Every wait has a deadline. When it passes, the call fails with HAPT_ERR_COMM and a message that names stage,
 * microbatch, peer and operation. Peers may then wait forever, so the caller ends the job by hapt_die.
 */
#ifndef HAPT_LINK_H
#define HAPT_LINK_H

#include "hapt/arena.h"
#include "hapt/device.h"
#include "hapt/dtype.h"
#include "hapt/env.h"
#include "hapt/strided.h"

#define HAPT_LINK_CHUNK_BYTES 65536
#define HAPT_LINK_SHORT_BYTES 2048 /* limit: MPI libraries send so few bytes eagerly */

/* A message in flight, owned by the transfer that filled it. A transfer that wraps others may use the last byte. */
struct hapt_transfer_request {
    _Alignas(16) unsigned char opaque[64];
};

/* Messages sent so far to one peer with one tag: bytes acknowledged, and time (s) during which any were in flight. */
struct hapt_transfer_rate {
    double bytes, busy_s;
};

/*
 * A message library as a table of functions. Only one thread at a time uses a context: the communication thread, once
 * it runs. `send`, `receive` and `test` never block. Messages with the same peer and tag arrive in order. Buffers are
 * borrowed until the request tests as done. To add a library, write one table and pass it to hapt_comm_thread_create.
 * (Device communication by NCCL is not a transfer: device_groups.h.)
 */
struct hapt_path;
struct hapt_transfer {
    const char *name;
    const char *description;
    /* Opens a separate message context for the ranks of `world`. path [ranks of world]: how each rank is reached;
     * copied. NULL: all by MPI. Collective. */
    enum hapt_status (*open)(MPI_Comm world, const struct hapt_path *path, void **context);
    void (*close)(void *context);
    /* Optional, both or neither: for libraries that connect ranks before the first message. `announce`: messages with
     * that peer and tag will be sent or received; rank-local, called at both ends. `connect` then makes all these
     * connections and no others, so a message that was not announced is a bug. HAPT_ERR_COMM on all ranks if a
     * connection is missing after timeout_s. Collective over `world`, once. */
    enum hapt_status (*announce)(void *context, int peer, int tag, bool sends);
    enum hapt_status (*connect)(void *context, double timeout_s);
    /* Start one message; bytes <= HAPT_LINK_CHUNK_BYTES, 0 allowed. */
    enum hapt_status (*send)(void *context, const void *data, size_t bytes, int peer, int tag,
                             struct hapt_transfer_request *request);
    enum hapt_status (*receive)(void *context, void *data, size_t bytes, int peer, int tag,
                                struct hapt_transfer_request *request);
    enum hapt_status (*test)(void *context, struct hapt_transfer_request *request, bool *done);
    /* Optional: true if messages to and from that peer may use device memory that the host cannot read. */
    bool (*takes_device)(void *context, int peer);
    /* Optional: what the network itself counts; zeros before the first message. False: no counts for that peer. */
    bool (*rate)(void *context, int peer, int tag, struct hapt_transfer_rate *rate);
    /* Optional, both or neither. `wakes`: true if `wait` notices progress of messages to and from that peer. `wait`
     * sleeps until a message in flight can progress, file descriptor `event_fd` is readable, or until_s has come
     * (hapt_time_s; NAN: no limit). */
    bool (*wakes)(void *context, int peer);
    void (*wait)(void *context, int event_fd, double until_s);
};

extern const struct hapt_transfer hapt_transfer_mpi;
extern const struct hapt_transfer hapt_transfer_tcp;    /* own connections, only to peers whose path has `tcp` */
extern const struct hapt_transfer hapt_transfer_routed; /* MPI or TCP for each peer, as its path says */

size_t hapt_strided_bytes(const struct hapt_strided_list *list);
/* Copies bytes [first, first + bytes) of the concatenated runs of a list in `base` to `dense`, and back. */
void hapt_strided_pack(const struct hapt_strided_list *list, const void *base, size_t first, size_t bytes, void *dense);
void hapt_strided_unpack(const struct hapt_strided_list *list, void *base, size_t first, size_t bytes,
                         const void *dense);

/* The part of a message that one peer sends or receives: `bytes` at base[slot][buffer] + offset. If there are `runs`,
 * the part is these runs of base[slot][buffer], `bytes` in total. The two ends may split their runs differently. */
struct hapt_piece {
    int peer; /* world rank */
    int buffer;
    size_t offset, bytes;
    struct hapt_strided_list runs; /* borrowed until the communication thread is destroyed */
    size_t modelled_bytes;         /* emulation: paced as if so large, and sent as one chunk; 0: the real size */
};

/* Two ranks whose devices exchange a flow's messages directly. */
struct hapt_pair {
    struct hapt_device_comm
        *group;  /* of these two, the sender is its rank 0 (hapt_backend.groups); for this use only */
    void *dense; /* device memory for a message's runs of bytes, packed; NULL: it has no runs */
};

/*
 * One direction of one stage boundary, seen from this rank: a sequence of equal messages, one per microbatch, each
 * made of pieces. Sender and receiver list the pieces they share in the same order. Messages are numbered from 0 over
 * the whole run.
 */
struct hapt_flow_options {
    const char *what;      /* "activations", "gradients": for messages; borrowed */
    int stage, peer_stage; /* for messages */
    bool sends;
    int tag;            /* unique among all flows of all ranks; the same at both ends */
    int per_step;       /* messages per step, for error messages */
    int64_t first_step; /* the step of message 0, likewise */
    int peer_slots;     /* transfer slots of the receivers: message k is sent after k - peer_slots was released */
    int slot_count;     /* rows of base. Sending: slots a message may be in. Receiving: peer_slots (message k: k %
                           peer_slots) */
    int buffer_count;
    void *const *base; /* [slot_count][buffer_count]; copied */
    bool on_device;    /* base has device addresses (hapt_comm_thread_use_device) that the host cannot read */
    int piece_count;
    const struct hapt_piece *piece; /* copied */
    /* [piece_count] For direct transfers between devices; the same for all pieces of one peer. Both ends of a flow have
     * them or neither. NULL: messages pass through the host. Copied; the group and memory are borrowed. */
    const struct hapt_pair *pair;
    /* Sending: the time at which message k began to be sent. Receiving: the time at which its last chunk, from any
     * peer, arrived. Stored at time_s[k % time_count], where k does not count untimed messages
     * (hapt_comm_thread_leave_untimed); read it after hapt_comm_thread_drain; borrowed. NULL: not recorded. */
    double *time_s;
    int time_count;
    double bandwidth; /* limit (byte/s) of this rank's sending; 0: not paced */
    double latency_s; /* added if paced */
    /* Paced, sending: flows of this rank with the same port above 0 share one link. Their messages take turns, in the
     * order in which they were handed over. 0: a link of its own. */
    int port;
    /* Modelled messages between ranks with a common clock. The first 8 bytes of each message become its due time
     * (hapt_time_s), and slot releases carry the time of the release. Later times derive from these, not from when
     * threads were woken. All pieces are modelled and have one chunk. */
    bool stamped;
};

struct hapt_comm_thread;

/* Creates a communication thread without flows; `path`: hapt_transfer.open. Collective over `world`. */
enum hapt_status hapt_comm_thread_create(const struct hapt_transfer *transfer, MPI_Comm world,
                                         const struct hapt_path *path, double timeout_s,
                                         struct hapt_comm_thread **comm_thread);
/*
 * For flows whose memory is on a device and unreadable for the host. There are three cases. Flows with pairs: the
 * devices exchange their messages, and the host only announces each one to the receiver. If the message library accepts
 * device memory: it reads and writes there. Otherwise the communication thread keeps page-locked copies of the
 * messages, one per transfer slot of the receivers.
 *
 * The device copies in separate queues, concurrent with its kernels and in parts, so that one part is sent while the
 * next one is copied. At a receiver, bytes between the runs of a piece may be overwritten. Call before adding the
 * first such flow. The device must outlive the communication thread.
 */
void hapt_comm_thread_use_device(struct hapt_comm_thread *comm_thread, const struct hapt_backend *backend,
                                 struct hapt_device *device);
/* True if messages of that flow pass through page-locked copies. False for direct transfers between devices, and if the
 * message library accepts device memory; buffers with runs then still use copies. */
bool hapt_comm_thread_copies(const struct hapt_comm_thread *comm_thread, int flow);
/* Adds a flow; *flow is its index. Call before hapt_comm_thread_start. */
enum hapt_status hapt_comm_thread_add(struct hapt_comm_thread *comm_thread, const struct hapt_flow_options *options,
                                      int *flow);
/* Messages of flow `received` are passed on by flow `sending`, from the transfer slots in which they arrived: message m
 * by message m. The slot is free for another message when hapt_comm_thread_free was called and the message has been
 * sent. Call before hapt_comm_thread_start. */
enum hapt_status hapt_comm_thread_pass_on(struct hapt_comm_thread *comm_thread, int received, int sending);
/* Enables wakeups, for messages of one chunk that the library delivers without a reply (HAPT_LINK_SHORT_BYTES). Ranks
 * of a node wake each other, so a communication thread whose peers are all on its node sleeps instead of polling. This
 * keeps communication threads cheap if there are many more ranks than cores. Call before hapt_comm_thread_start.
 * Collective over `node`, the ranks of this node; `world` as in hapt_comm_thread_create. */
enum hapt_status hapt_comm_thread_use_wakeups(struct hapt_comm_thread *comm_thread, MPI_Comm world, MPI_Comm node);
/* True if wakeups are in use and that rank is on this node. */
bool hapt_comm_thread_has_wakeup(const struct hapt_comm_thread *comm_thread, int world_rank);
/* Connects the flows' peers if the message library needs that, then starts the thread (none if there are no flows).
 * Collective over `world`, also for ranks without flows. */
enum hapt_status hapt_comm_thread_start(struct hapt_comm_thread *comm_thread);
/* Waits until the receivers have taken every message, then ends the thread. */
enum hapt_status hapt_comm_thread_drain(struct hapt_comm_thread *comm_thread);
/* Collective over `world`. NULL is allowed. */
void hapt_comm_thread_destroy(struct hapt_comm_thread *comm_thread);

/* Lets a receiving flow accept `count` more messages: at the start of a step. */
void hapt_comm_thread_expect(struct hapt_comm_thread *comm_thread, int flow, int64_t count);
/* Hands over the next message, in `slot`; kernels that write it must be complete. Its data must not change before
 * hapt_comm_thread_wait_sent returns. Never waits. */
void hapt_comm_thread_send(struct hapt_comm_thread *comm_thread, int flow, int slot);
/* The same for a message that was ready at `ready_s`, which may be in the past. */
void hapt_comm_thread_send_at(struct hapt_comm_thread *comm_thread, int flow, int slot, double ready_s);
/* Due time, at the receivers, of the newest sent message from `slot`; stamped flows. */
double hapt_comm_thread_due_s(struct hapt_comm_thread *comm_thread, int flow, int slot);
/* Waits until all messages handed over from `slot` are sent. */
enum hapt_status hapt_comm_thread_wait_sent(struct hapt_comm_thread *comm_thread, int flow, int slot);
/* Waits until message `sequence` is in its transfer slot; on a device, in device memory. */
enum hapt_status hapt_comm_thread_wait_received(struct hapt_comm_thread *comm_thread, int flow, int64_t sequence);
/* True if that would return at once. */
bool hapt_comm_thread_has_received(const struct hapt_comm_thread *comm_thread, int flow, int64_t sequence);
/* Frees the transfer slot of the oldest received message. */
void hapt_comm_thread_free(struct hapt_comm_thread *comm_thread, int flow);
void hapt_comm_thread_free_at(struct hapt_comm_thread *comm_thread, int flow, double time_s);
/* Messages [first, first + count) are not recorded in time_s. Call before they are handed over or expected, and after
 * all messages before were received at both ends. */
void hapt_comm_thread_leave_untimed(struct hapt_comm_thread *comm_thread, int flow, int64_t first, int64_t count);
/* Seconds so far during which a message of the flow was being sent (latency included). */
double hapt_comm_thread_active_s(struct hapt_comm_thread *comm_thread, int flow);
/* Transfer time (s) of one message of the flow (the slowest peer), from the messages since the last call; 0: unknown.
 *
 * `counted`: the network measures it (hapt_transfer.rate); the result is its mean, known to the sender only. Otherwise
 * it is the shortest time, that of a message without interference. Sender: from start to completion of sending.
 * Receiver: from the first to the last chunk, scaled to the full message; only if messages have several chunks. */
double hapt_comm_thread_message_s(struct hapt_comm_thread *comm_thread, int flow, bool *counted);

/* ---- Collectives of the compute thread: deterministic, polled with a deadline, yielding ---- */

struct hapt_collective;

/* A collective over all ranks of `comm` (duplicated). If all are on one node and `shared_memory` allows, it uses shared
 * memory, otherwise messages. Either way one rank sums each element, in rank order, so all ranks get equal bits. `who`:
 * "stage 1", for messages; borrowed. All memory is reserved here; the calls below allocate none. Collective. */
enum hapt_status hapt_collective_create(MPI_Comm comm, const char *who, double timeout_s, bool shared_memory,
                                        struct hapt_collective **collective);
void hapt_collective_destroy(struct hapt_collective *collective);
/* Emulates a slow link of that bandwidth (byte/s) and latency (s): once all ranks have arrived, a call takes at least
 * the time of a ring (hapt_ring_s). 0: no emulation. Use the same values on all ranks. */
void hapt_collective_emulate_link(struct hapt_collective *collective, double bandwidth, double latency_s);
bool hapt_collective_emulates_link(const struct hapt_collective *collective);
int hapt_collective_ranks(const struct hapt_collective *collective);
int hapt_collective_rank(const struct hapt_collective *collective);

/* data[i] = sum over ranks of data[i]. `what` names the operation in time-out messages. Collective. */
enum hapt_status hapt_collective_all_reduce(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements);
/* The same for sum or maximum of fp32, bf16 or fp16; 16-bit types are combined in fp32 and rounded once. Collective. */
enum hapt_combine { HAPT_COMBINE_SUM, HAPT_COMBINE_MAXIMUM };
enum hapt_status hapt_collective_combine(struct hapt_collective *collective, const char *what,
                                         enum hapt_combine combine, enum hapt_dtype dtype, void *data, size_t elements);
/* Sharded on a dimension -> replicated: rank r's dense shard `mine` goes to the runs part[r] of `replicated`; shards
 * may differ in size. `padded`: all messages are as long as the largest shard (one all-gather, HAP 2.5.1); otherwise
 * each shard is broadcast (grouped broadcast, HAP 4.4). In shared memory both copy only the shards. `mine` NULL: the
 * shard is already in `replicated`. Collective. */
enum hapt_status hapt_collective_gather_shards(struct hapt_collective *collective, const char *what, bool padded,
                                               const struct hapt_strided *part, const void *mine, void *replicated);
/* Partial sum -> sharded: rank r gets, dense, the runs part[r] of the sum over ranks of `partial`. Same bits as the
 * all-reduce. Collective. */
enum hapt_status hapt_collective_reduce_scatter(struct hapt_collective *collective, const char *what,
                                                enum hapt_dtype dtype, const struct hapt_strided *part,
                                                const void *partial, void *mine);
/* Changes the layout: the runs send[r] of `from` go to rank r, and data from rank r goes to the runs receive[r] of
 * `to`. Sizes from rank s to rank r agree at both ends and are at most `longest`, which is equal on all ranks.
 * Collective. */
enum hapt_status hapt_collective_all_to_all(struct hapt_collective *collective, const char *what, size_t longest,
                                            const struct hapt_strided_list *send, const void *from,
                                            const struct hapt_strided_list *receive, void *to);
/* Failures of ranks that communicate by other means (device groups, struct hapt_groups). _late: the time-out has
 * passed; asks all ranks, which time out together, to find the missing ones. _broken: `fault` ended the operation. */
enum hapt_status hapt_collective_late(struct hapt_collective *collective, const char *what);
enum hapt_status hapt_collective_broken(const struct hapt_collective *collective, const char *what, const char *fault);
double hapt_collective_timeout_s(const struct hapt_collective *collective);
/* First element of the slice of rank `rank` of `ranks`. */
size_t hapt_collective_slice(size_t elements, int ranks, int rank);

/* Every rank of `comm` gets `bytes` of every rank, in rank order. Polls and yields. Collective. */
enum hapt_status hapt_link_all_gather(MPI_Comm comm, const char *what, double timeout_s, const void *mine, size_t bytes,
                                      void *all);
/* hapt_env_agree with a deadline, for agreements during training, where a peer may have died. After a time-out the job
 * ends (hapt_die). Collective. */
enum hapt_status hapt_link_agree(MPI_Comm comm, const char *what, double timeout_s, enum hapt_status status);
/* Call before a collective that a failed rank would not reach: every rank fails if one does. Prints nothing; a later
 * agreement does. `what` names the operation. Collective. */
enum hapt_status hapt_link_all_or_none(MPI_Comm comm, const char *what, enum hapt_status status);
/* Call before a rank reports that a peer is late or gone. If another rank has reported the cause already, the launcher
 * ends the job and signals this rank within seconds, and hapt_die prints nothing more. The same holds for a rank that
 * was itself suspended. Waits a share of the time-out, at most some seconds. */
void hapt_link_wait_for_job_end(double timeout_s);
/* Pauses while polling: yields at first, then sleeps for short times. `spins` starts at 0 for each wait. */
void hapt_link_pause(unsigned *spins);
/* Lets sleeps of the calling thread end on time instead of 50 us late. */
void hapt_link_sharpen_timers(void);

#endif
