/*
 * Links: moving stage boundaries while the stage computes, and the collectives of a submesh.
 *
 * A courier is a communication thread. It never blocks in its message library: it tests, then sleeps 50 to 400 us. The
 * compute thread hands it messages and waits on a condition variable. Messages go in chunks of at most
 * HAPT_LINK_CHUNK_BYTES; a receiver has a few transfer slots and tells the sender when one is free again, so nothing
 * piles up in the library.
 *
 * Every wait has a deadline. When it passes, the call fails with HAPT_ERR_COMM and a message that names stage,
 * microbatch, peer and operation; peers may then wait for ever, so the caller ends the job by hapt_die.
 */
#ifndef HAPT_LINK_H
#define HAPT_LINK_H

#include "hapt/arena.h"
#include "hapt/device.h"
#include "hapt/dtype.h"
#include "hapt/env.h"
#include "hapt/strided.h"

#define HAPT_LINK_CHUNK_BYTES 65536
#define HAPT_LINK_SHORT_BYTES 2048 /* MPI libraries send so few bytes eagerly */

/* A message in flight, owned by the transfer that filled it; the last byte is left to a transfer that wraps others. */
struct hapt_transfer_request {
    _Alignas(16) unsigned char opaque[64];
};

/* Of the messages sent to a peer with a tag, so far: bytes that are there, and during how long any were under way. */
struct hapt_transfer_rate {
    double bytes, busy_s;
};

/*
 * A message library as one table. Calls come from the courier's thread alone and never block. Messages of equal peer
 * and tag arrive in order. Buffers are borrowed until the request tests as done. To add one: one table, handed to
 * hapt_courier_create. (Devices that trade by NCCL are no transfer: device_groups.h.)
 */
struct hapt_path;
struct hapt_transfer {
    const char *name;
    const char *description;
    /* A private space of messages between the ranks of `world`; path [ranks of world], how each is reached, NULL: all
     * by MPI; copied. Collective. */
    enum hapt_status (*open)(MPI_Comm world, const struct hapt_path *path, void **context);
    void (*close)(void *context);
    /* Optional, both or neither: a table that connects ranks before the first message. `announce`: messages with that
     * peer and tag will go that way; rank-local, the same at both ends. `connect` then makes all these connections, and
     * none is made later: a message that was not announced is a bug. HAPT_ERR_COMM on all ranks when one is not there
     * after timeout_s. Collective over `world`, once. */
    enum hapt_status (*announce)(void *context, int peer, int tag, bool sends);
    enum hapt_status (*connect)(void *context, double timeout_s);
    /* Start one message; bytes <= HAPT_LINK_CHUNK_BYTES, 0 allowed. */
    enum hapt_status (*send)(void *context, const void *data, size_t bytes, int peer, int tag,
                             struct hapt_transfer_request *request);
    enum hapt_status (*receive)(void *context, void *data, size_t bytes, int peer, int tag,
                                struct hapt_transfer_request *request);
    enum hapt_status (*test)(void *context, struct hapt_transfer_request *request, bool *done);
    /* Optional: may buffers of messages to and from that peer be a device's memory that the host cannot read? */
    bool (*takes_device)(void *context, int peer);
    /* Optional: what the network itself counts; before the first message zeros. False: it does not tell of that peer.
     */
    bool (*rate)(void *context, int peer, int tag, struct hapt_transfer_rate *rate);
    /* Optional, both or neither: does `wait` notice what messages to and from that peer wait for? Then it sleeps until
     * one of those under way may go on, file descriptor `kick` can be read, or until_s has come (hapt_time_s; NAN: for
     * ever). */
    bool (*wakes)(void *context, int peer);
    void (*wait)(void *context, int kick, double until_s);
};

extern const struct hapt_transfer hapt_transfer_mpi;
extern const struct hapt_transfer hapt_transfer_tcp;    /* own connections, to peers whose path says so alone */
extern const struct hapt_transfer hapt_transfer_routed; /* to each peer by one of the two, as its path says */

size_t hapt_strided_bytes(const struct hapt_strided_list *list);
/* Copies bytes [first, first + bytes) of a list's runs in `base` to `dense`, and back. */
void hapt_strided_pack(const struct hapt_strided_list *list, const void *base, size_t first, size_t bytes, void *dense);
void hapt_strided_unpack(const struct hapt_strided_list *list, void *base, size_t first, size_t bytes,
                         const void *dense);

/* A part of a message that one peer gets or gives: `bytes` at base[slot][buffer] + offset; where there are `runs`,
 * these of base[slot][buffer] instead, `bytes` together. The runs need not be cut alike at the two ends. */
struct hapt_piece {
    int peer; /* world rank */
    int buffer;
    size_t offset, bytes;
    struct hapt_strided_list runs; /* its parts are borrowed as long as the courier lives */
    size_t
        modelled_bytes; /* rehearsal: it is paced as if it had so many bytes and comes in one; 0: as many as it has */
};

/* Two ranks whose devices trade a flow's messages. */
struct hapt_pair {
    struct hapt_group *group; /* of these two, the sender its rank 0 (hapt_backend.groups); nothing else uses it */
    void *dense;              /* device memory for a message's runs of bytes, one behind the other; NULL: it has none */
};

/*
 * One direction of one boundary, seen from this rank: a sequence of like messages, one a microbatch, each made of
 * pieces. Sender and receiver list the pieces they share in the same order. Messages are numbered from 0 over the whole
 * run.
 */
struct hapt_flow_options {
    const char *what;      /* "activations", "gradients": for messages; borrowed */
    int stage, peer_stage; /* for messages */
    bool sends;
    int tag;            /* unique to the flow among all flows of all ranks; the two ends agree */
    int per_step;       /* messages in a step, for messages to the user, */
    int64_t first_step; /* the step of message 0, likewise */
    int peer_slots;     /* transfer slots of the receivers: message k waits until k - peer_slots was released */
    int slot_count;     /* rows of base: sending, where messages may stand; receiving, peer_slots (message k: k %
                           peer_slots) */
    int buffer_count;
    void *const *base; /* [slot_count][buffer_count]; copied */
    bool on_device;    /* these addresses are the device's (hapt_courier_use_device), and the host cannot read there */
    int piece_count;
    const struct hapt_piece *piece; /* copied */
    /* [piece_count] Where devices trade among themselves; pieces of one peer have the same. Both ends of a flow have
     * them or neither. NULL: messages pass through the host. Copied; what they name is borrowed. */
    const struct hapt_pair *pair;
    /* Sending: when message k had its first chunk on its way; receiving: when its last one was there, of any peer. At
     * time_s[k % time_count], to be read after hapt_courier_drain; borrowed. NULL: not kept. */
    double *time_s;
    int time_count;
    double bandwidth; /* byte/s this rank may send with; 0: not paced */
    double latency_s; /* added when paced */
    /* Modelled messages between ranks that share a clock: the first 8 bytes of each become the time (hapt_time_s) at
     * which it is due, and releases of slots carry the time of the release. These times count for what follows, not
     * when threads were woken. All pieces are modelled ones, of one chunk. */
    bool stamped;
};

struct hapt_courier;

/* Opens a courier without flows; `path`: hapt_transfer.open. Collective over `world`. */
enum hapt_status hapt_courier_create(const struct hapt_transfer *transfer, MPI_Comm world, const struct hapt_path *path,
                                     double timeout_s, struct hapt_courier **courier);
/*
 * For flows on a device whose memory the host cannot read. Where they have groups, devices trade their messages, and
 * the host tells the other end that one is on its way. Else, but where the message library takes device memory, the
 * courier keeps page-locked copies of their messages, as many as receivers have transfer slots, and has the device copy
 * between the two in queues of its own, beside what it computes: part by part, so that one is on its way while the next
 * one is copied. Bytes between the runs of a piece may be written with anything where it is received. Before the first
 * such flow; the device outlives the courier.
 */
void hapt_courier_use_device(struct hapt_courier *courier, const struct hapt_backend *backend,
                             struct hapt_device *device);
/* Do messages of that flow pass through page-locked copies? Not between devices, nor where the message library reads
 * and writes device memory; buffers with runs always do there. */
bool hapt_courier_copies(const struct hapt_courier *courier, int flow);
/* Adds a flow; *flow is its number. Before hapt_courier_start. */
enum hapt_status hapt_courier_add(struct hapt_courier *courier, const struct hapt_flow_options *options, int *flow);
/* For messages of one chunk that the library delivers without an answer (HAPT_LINK_SHORT_BYTES): ranks of a node ring
 * each other, so that a courier whose peers are all on its node sleeps instead of asking the library over and over.
 * With many more ranks than cores that is what keeps couriers cheap. Before hapt_courier_start. Collective over `node`,
 * which are the ranks of this node, `world` as in hapt_courier_create. */
enum hapt_status hapt_courier_use_bells(struct hapt_courier *courier, MPI_Comm world, MPI_Comm node);
/* Is that rank on this node? Where there are bells. */
bool hapt_courier_rings(const struct hapt_courier *courier, int world_rank);
/* Connects the flows' peers where the message library wants that, then starts the thread (none where there are no
 * flows). Collective over `world`: ranks without flows call it, too. */
enum hapt_status hapt_courier_start(struct hapt_courier *courier);
/* Waits until every message handed over has been taken by its receivers, then ends the thread. */
enum hapt_status hapt_courier_drain(struct hapt_courier *courier);
/* Collective over `world`. NULL is allowed. */
void hapt_courier_destroy(struct hapt_courier *courier);

/* Allows `count` more messages of every receiving flow to come: at the start of a step. */
void hapt_courier_expect(struct hapt_courier *courier, int flow, int64_t count);
/* Hands over the next message, standing in `slot` (on a device: what made it there is done); its data must not change
 * before hapt_courier_wait_sent. Never waits. */
void hapt_courier_send(struct hapt_courier *courier, int flow, int slot);
/* The same for a message that was ready at `ready_s`, which may be past. */
void hapt_courier_send_at(struct hapt_courier *courier, int flow, int slot, double ready_s);
/* When the newest message handed over from `slot`, and sent, was due at its receivers; stamped flows. */
double hapt_courier_due_s(struct hapt_courier *courier, int flow, int slot);
/* Waits until nothing that was handed over from `slot` is still on its way out. */
enum hapt_status hapt_courier_wait_sent(struct hapt_courier *courier, int flow, int slot);
/* Waits until message `sequence` stands in its transfer slot, on a device where that is there. */
enum hapt_status hapt_courier_wait_received(struct hapt_courier *courier, int flow, int64_t sequence);
/* The oldest message received is consumed: its transfer slot is free. */
void hapt_courier_free(struct hapt_courier *courier, int flow);
void hapt_courier_free_at(struct hapt_courier *courier, int flow, double time_s);
/* Seconds during which a message of the flow was being sent, so far (latency included). */
double hapt_courier_active_s(struct hapt_courier *courier, int flow);
/* What a message of the flow takes on its way, by those since this was asked last (the peer that took longest); 0:
 * unknown. Where the network counts (hapt_transfer.rate) `counted`, and its mean; the sender knows it. Else what the
 * quickest one took, which met no other work on its way: a sender's from being handed over until it was gone, a
 * receiver's, of several chunks, from the first on. */
double hapt_courier_message_s(struct hapt_courier *courier, int flow, bool *counted);

/* ---- Collectives of the compute thread: deterministic, polled with a deadline, yielding ---- */

struct hapt_collective;

/* Over all ranks of `comm` (duplicated). Ranks of one node use a shared memory window where `shared_memory` allows,
 * others messages; either way each element is summed in order of rank, by one rank, so all get equal bits. `who`:
 * "stage 1", for messages; borrowed. Memory is reserved here; no call below allocates. Collective. */
enum hapt_status hapt_collective_create(MPI_Comm comm, const char *who, double timeout_s, bool shared_memory,
                                        struct hapt_collective **collective);
void hapt_collective_destroy(struct hapt_collective *collective);
/* Rehearsal of a slow link: from here on a call with all ranks there ends no earlier than a ring over a link of that
 * bandwidth (byte/s) and latency (s) would (hapt_ring_s). 0: as fast as it goes. The same on all ranks. */
void hapt_collective_pace(struct hapt_collective *collective, double bandwidth, double latency_s);
bool hapt_collective_is_paced(const struct hapt_collective *collective);
int hapt_collective_ranks(const struct hapt_collective *collective);
int hapt_collective_rank(const struct hapt_collective *collective);

/* data[i] = sum over ranks of data[i]. `what` names the operation in a time-out. Collective. */
enum hapt_status hapt_collective_all_reduce(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements);
/* The same, or the largest, of fp32 or bf16; bf16 is added in fp32 and rounded once. Collective. */
enum hapt_combine { HAPT_COMBINE_SUM, HAPT_COMBINE_MAXIMUM };
enum hapt_status hapt_collective_combine(struct hapt_collective *collective, const char *what,
                                         enum hapt_combine combine, enum hapt_dtype dtype, void *data, size_t elements);
/* Rank r gives elements [first(r), first(r + 1)) of `data`, first(r) = hapt_collective_slice; all get all. Collective.
 */
enum hapt_status hapt_collective_all_gather(struct hapt_collective *collective, const char *what, float *data,
                                            size_t elements);
/* Shards of a dimension to the whole: rank r's dense shard `mine` goes to the runs part[r] of `whole`; shards may
 * differ in size. `padded`: messages are all as long as the largest shard's (one all-gather, HAP 2.5.1); else each
 * shard is broadcast by itself (grouped broadcast, HAP 4.4). In shared memory both copy the shards alone. `mine` NULL:
 * it stands in its place. Collective. */
enum hapt_status hapt_collective_gather_shards(struct hapt_collective *collective, const char *what, bool padded,
                                               const struct hapt_strided *part, const void *mine, void *whole);
/* Partial sums to shards of their sum: rank r gets, dense, the runs part[r] of the sum over ranks of `partial`. Equal
 * to the all-reduce's bits. Collective. */
enum hapt_status hapt_collective_reduce_scatter(struct hapt_collective *collective, const char *what,
                                                enum hapt_dtype dtype, const struct hapt_strided *part,
                                                const void *partial, void *mine);
/* One layout to another: the runs send[r] of `from` go to rank r, and what rank r sends here to the runs receive[r] of
 * `to`; what is sent from rank s to r has as many bytes there as here, at most `longest`, a number equal on all ranks.
 * Collective. */
enum hapt_status hapt_collective_all_to_all(struct hapt_collective *collective, const char *what, size_t longest,
                                            const struct hapt_strided_list *send, const void *from,
                                            const struct hapt_strided_list *receive, void *to);
/* Failures of ranks that meet by other means (groups of devices, struct hapt_groups). They waited for its time-out: who
 * is missing is found out by asking all, since they wait alike. And: `fault` ended their meeting. */
enum hapt_status hapt_collective_late(struct hapt_collective *collective, const char *what);
enum hapt_status hapt_collective_broken(const struct hapt_collective *collective, const char *what, const char *fault);
double hapt_collective_timeout_s(const struct hapt_collective *collective);
/* What rank `root` has. Collective. */
enum hapt_status hapt_collective_broadcast(struct hapt_collective *collective, const char *what, int root, void *data,
                                           size_t bytes);
/* First element of the slice of rank `rank` of `ranks`. */
size_t hapt_collective_slice(size_t elements, int ranks, int rank);

/* Every rank of `comm` gets `bytes` of every rank, in order of rank. Polled, yielding; collective. */
enum hapt_status hapt_link_all_gather(MPI_Comm comm, const char *what, double timeout_s, const void *mine, size_t bytes,
                                      void *all);
/* hapt_env_agree with a deadline: for agreements amid training, where a peer may have died. On time-out the job ends
 * (hapt_die). Collective. */
enum hapt_status hapt_link_agree(MPI_Comm comm, const char *what, double timeout_s, enum hapt_status status);
/* Before a collective that a rank would not reach: every rank fails when one does. Nothing is printed, that is for the
 * agreement behind. `what` names the operation. Collective. */
enum hapt_status hapt_link_all_or_none(MPI_Comm comm, const char *what, enum hapt_status status);
/* Before a rank says that a peer did not come in time, or is gone: where another one has spoken already, who may know
 * better, its launcher tears the job down and tells this one within seconds; hapt_die then says nothing more. The same
 * for a rank that stood still itself. Waits a share of the time-out, seconds at most. */
void hapt_link_await_end(double timeout_s);
/* Sleeps a little while polling: yields first, then short sleeps. `spins` counts from 0 and belongs to the wait. */
void hapt_link_pause(unsigned *spins);
/* Wakes the calling thread's timers at once instead of 50 us late. */
void hapt_link_sharpen_timers(void);

#endif
