/* ranks: 1 4; HAPT_LONG: 2 3
 * The communication thread: random flows in both directions, flow control, pacing and time-outs; modelled messages and
 * their times. All of it on the host, and on a device whose memory the host cannot touch. */
#include "test.h"

#include <stdlib.h>
#include <sys/resource.h>
#include <unistd.h>

#include "hapt/network.h"
#include "late_device.h"

#define MAX_FLOWS 64
#define MAX_RANKS 64
#define STAMPED 40

/* How messages travel in the current test. */
static const struct hapt_transfer *transfer;
static struct hapt_path path[MAX_RANKS];
static bool on_device, by_groups; /* messages are in a late device's memory; devices exchange them directly */

/* Message memory as the flows see it. late_host gives an address that the test may touch. */
static void *take(size_t bytes)
{
    void *memory;
    if (!on_device) return malloc(bytes);
    late_allocate(NULL, bytes, &memory);
    return memory;
}

static void give_back(void *memory)
{
    if (!on_device) free(memory);
    late.taken = 0;
}

static struct hapt_comm_thread *open_comm_thread(double timeout_s)
{
    struct hapt_comm_thread *comm_thread = NULL;
    CHECK_OK(hapt_comm_thread_create(transfer, test_env.world, path, timeout_s, &comm_thread));
    if (on_device) hapt_comm_thread_use_device(comm_thread, &late_backend, NULL);
    return comm_thread;
}

/* A flow between two ranks. All ranks know it, because they use the same seed. */
struct plan {
    int from, to, slots, messages, pieces;
    size_t bytes[4], runs[4]; /* of a piece: runs of bytes with gaps between them; the gaps differ at the two ends */
};

struct side {
    int flow;
    bool sends;
    const struct plan *plan;
    struct hapt_strided run[4];
    struct hapt_piece piece[4];
    struct hapt_device_comm pair;
    unsigned char *memory; /* [slots][total] */
    unsigned char *made;   /* on a device: copy in progress into a message */
    size_t total;
    int64_t done;
};

static unsigned char content(int tag, int64_t message, size_t i)
{
    return (unsigned char)(tag * 37 + message * 101 + (int64_t)(i * 7 + i / 256));
}

/* Fills the runs of all pieces, or counts wrong bytes. A device may write the gaps, so they are checked on the host
 * only. */
static long visit(const struct side *side, unsigned char *place, int key, int64_t message, bool fills)
{
    long wrong = 0;
    size_t i = 0;
    for (int p = 0; p < side->plan->pieces; p++) {
        const struct hapt_strided *run = &side->run[p];
        for (size_t r = 0; r < run->count; r++)
            for (size_t b = 0; b < run->stride; b++) {
                unsigned char *byte = &place[run->offset + r * run->stride + b];
                const unsigned char sent = b < run->run ? content(key, message, i++) : 0xee;
                if (fills) *byte = sent;
                wrong += *byte != sent && (b < run->run || !on_device);
            }
    }
    return wrong;
}

/* A device's messages are written by its first queue, which is late as well. */
static void make(struct hapt_comm_thread *comm_thread, struct side *side, int slot, int key)
{
    unsigned char *place = side->memory + (size_t)slot * side->total;
    if (!on_device) {
        visit(side, place, key, side->done, true);
        hapt_comm_thread_send(comm_thread, side->flow, slot);
        return;
    }
    struct hapt_queue *queue = late_queue(NULL, HAPT_QUEUE_COMPUTE);
    unsigned char *made = side->made + (size_t)slot * side->total; /* in use until the message has been sent */
    visit(side, made, key, side->done, true);
    CHECK_OK(late_copy(queue, place, made, side->total));
    CHECK_OK(late_wait(late_record(queue)));
    hapt_comm_thread_send(comm_thread, side->flow, slot);
}

/* Does what is possible in turn, as a stage does: sends ahead, frees in order, sometimes sleeps. */
static void play(struct hapt_comm_thread *comm_thread, struct side *side, int count, uint64_t *random)
{
    int open = count;
    while (open > 0) {
        open = 0;
        for (int s = 0; s < count; s++) {
            struct side *my = &side[s];
            const struct plan *plan = my->plan;
            if (my->done == plan->messages) continue;
            open++;
            const int slot = (int)(my->done % plan->slots);
            unsigned char *place = late_host(my->memory + (size_t)slot * my->total);
            const int key = plan->from * 17 + plan->to * 5 + (int)plan->bytes[0];
            if (my->sends) {
                CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, my->flow, slot));
                make(comm_thread, my, slot, key);
            } else {
                CHECK_OK(hapt_comm_thread_wait_received(comm_thread, my->flow, my->done));
                const long wrong = visit(my, place, key, my->done, false);
                CHECK_MESSAGE(wrong == 0, "message %ld from %d to %d: %ld bytes wrong", (long)my->done, plan->from,
                              plan->to, wrong);
                memset(place, 0xee, my->total);
                hapt_comm_thread_free(comm_thread, my->flow);
            }
            my->done++;
            if (hapt_random_unit(random) < 0.05) usleep(500);
        }
    }
}

static void random_plan(uint64_t seed)
{
    uint64_t random = seed;
    struct plan plan[MAX_FLOWS];
    struct side side[MAX_FLOWS];
    int count = 0, mine = 0;
    struct hapt_comm_thread *comm_thread = open_comm_thread(60);
    const int flows = test_env.world_size == 1 ? 0 : 1 + (int)(hapt_random_next(&random) % 12);
    const int messages = 6 + (int)(hapt_random_next(&random) % 20);
    const size_t longest = on_device && seed % 2 ? 1500000 : 200000; /* several parts per message */
    for (; count < flows; count++) {
        struct plan *p = &plan[count];
        p->from = (int)(hapt_random_next(&random) % (uint64_t)test_env.world_size);
        p->to = (p->from + 1 + (int)(hapt_random_next(&random) % (uint64_t)(test_env.world_size - 1))) %
                test_env.world_size;
        p->slots = 1 + (int)(hapt_random_next(&random) % 3);
        p->messages = messages;
        p->pieces = 1 + (int)(hapt_random_next(&random) % 4);
        for (int i = 0; i < p->pieces; i++) {
            p->runs[i] = 1 + hapt_random_next(&random) % 3 * (hapt_random_next(&random) % 200);
            p->bytes[i] = 1 + hapt_random_next(&random) % ((i == 0 ? longest : 5000) / p->runs[i]);
        }
        if (p->from != test_env.world_rank && p->to != test_env.world_rank) continue;
        uint64_t own_random = random + (uint64_t)test_env.world_rank;
        struct side *my = &side[mine++];
        *my = (struct side){.sends = p->from == test_env.world_rank, .plan = p};
        for (int i = 0; i < p->pieces; i++) {
            /* Gaps at the sender, at the receiver, at both, or at neither. */
            const size_t gap = hapt_random_next(&own_random) % 2 * (my->sends ? 3 : 11);
            my->run[i] = (struct hapt_strided){my->total, p->runs[i], p->bytes[i], p->bytes[i] + gap};
            my->piece[i] = (struct hapt_piece){.peer = my->sends ? p->to : p->from,
                                               .offset = my->total,
                                               .bytes = p->bytes[i] * p->runs[i],
                                               .runs = {gap > 0, &my->run[i]}};
            my->total += my->run[i].stride * p->runs[i];
        }
        my->memory = take(my->total * (size_t)p->slots);
        my->made = on_device && my->sends ? malloc(my->total * (size_t)p->slots) : NULL;
        memset(late_host(my->memory), 0xee, my->total * (size_t)p->slots);
        void *base[3];
        for (int s = 0; s < p->slots; s++) base[s] = my->memory + (size_t)s * my->total;
        my->pair = (struct hapt_device_comm){.peer = my->sends ? p->to : p->from, .tag = count};
        const struct hapt_pair both = {&my->pair, by_groups ? take(my->total) : NULL},
                               pairs[] = {both, both, both, both};
        const struct hapt_flow_options options = {.what = "noise",
                                                  .stage = p->from,
                                                  .peer_stage = p->to,
                                                  .sends = my->sends,
                                                  .tag = count,
                                                  .per_step = 4,
                                                  .peer_slots = p->slots,
                                                  .slot_count = p->slots,
                                                  .buffer_count = 1,
                                                  .base = base,
                                                  .on_device = on_device,
                                                  .pair = by_groups ? pairs : NULL,
                                                  .piece_count = p->pieces,
                                                  .piece = my->piece};
        CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &my->flow));
    }
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    for (int s = 0; s < mine; s++)
        if (!side[s].sends) hapt_comm_thread_expect(comm_thread, side[s].flow, messages);
    play(comm_thread, side, mine, &random);
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
    for (int s = 0; s < mine; s++) {
        give_back(side[s].memory);
        free(side[s].made);
    }
}

static void random_plans(void)
{
    const int rounds = test_long() ? 200 : on_device ? 3 : 6;
    for (int round = 0; round < rounds; round++) {
        const long before = test_failures;
        random_plan((uint64_t)round * 7919 + 5);
        if (test_failures > before) fprintf(stderr, "seed of round %d\n", round);
    }
}

/* Rank 0 and rank 1 send to each other at the same time over paced links. Returns the seconds of `count` messages. */
static double paced_exchange(double rate, double latency_s, size_t bytes, int count)
{
    struct hapt_comm_thread *comm_thread = NULL;
    CHECK_OK(hapt_comm_thread_create(transfer, test_env.world, path, 60, &comm_thread));
    const int me = test_env.world_rank;
    double seconds = 0;
    unsigned char *memory = calloc(6, bytes);
    int flow[2];
    if (me < 2) {
        for (int sends = 0; sends < 2; sends++) {
            void *base[3];
            for (int s = 0; s < 3; s++) base[s] = memory + (size_t)(3 * sends + s) * bytes;
            const struct hapt_piece piece = {.peer = 1 - me, .bytes = bytes};
            const struct hapt_flow_options options = {.what = "noise",
                                                      .stage = me,
                                                      .peer_stage = 1 - me,
                                                      .sends = sends,
                                                      .tag = sends ? me : 1 - me,
                                                      .per_step = 1,
                                                      .peer_slots = 3,
                                                      .slot_count = 3,
                                                      .buffer_count = 1,
                                                      .base = base,
                                                      .piece_count = 1,
                                                      .piece = &piece,
                                                      .bandwidth = rate,
                                                      .latency_s = latency_s};
            CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow[sends]));
        }
    }
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me < 2) {
        hapt_comm_thread_expect(comm_thread, flow[0], count);
        const double start_s = hapt_time_s();
        for (int m = 0; m < count + 3; m++) {
            if (m < count) {
                CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow[1], m % 3));
                hapt_comm_thread_send(comm_thread, flow[1], m % 3);
            }
            if (m >= 3) {
                CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow[0], m - 3));
                hapt_comm_thread_free(comm_thread, flow[0]);
            }
        }
        seconds = hapt_time_s() - start_s;
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    if (me < 2) {
        const double active_s = hapt_comm_thread_active_s(comm_thread, flow[1]);
        CHECK_MESSAGE(active_s > 0.999 * count * (double)bytes / rate && active_s < seconds * 1.5,
                      "active for %g of %g s", active_s, seconds);
    }
    hapt_comm_thread_destroy(comm_thread);
    free(memory);
    return seconds;
}

/* A link is never faster than its rate. Other processes may make it slower. Due times are absolute, so one quiet moment
 * in several attempts is enough. */
static void pacing(void)
{
    const double rate = 25e6, ideal_s = 0.2;
    double best = INFINITY;
    for (int attempt = 0; attempt < 10 && best > 1.5 * ideal_s; attempt++) {
        double seconds = paced_exchange(rate, 0, 250000, 20);
        /* The later rank may find its peer's first message already in transit. The earlier rank waits for all of it. */
        MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, test_env.world);
        CHECK_MESSAGE(seconds > ideal_s * 0.999, "20 messages of 10 ms took %g s", seconds);
        best = fmin(best, seconds);
    }
    CHECK_MESSAGE(best < 1.5 * ideal_s, "20 messages of 10 ms took %g s", best);
}

/* Latency delays every message but does not occupy the link. */
static void latency(void)
{
    double best = INFINITY;
    for (int attempt = 0; attempt < 10 && best > 0.15; attempt++) {
        double seconds = paced_exchange(1e9, 0.02, 1000, 10);
        if (test_env.world_rank < 2) CHECK_MESSAGE(seconds > 0.02, "10 messages took %g s", seconds);
        MPI_Allreduce(MPI_IN_PLACE, &seconds, 1, MPI_DOUBLE, MPI_MAX, test_env.world);
        best = fmin(best, seconds);
    }
    /* Ten times the latency would be 0.2 s. */
    CHECK_MESSAGE(best < 0.15, "10 messages took %g s", best);
}

/* With s transfer slots and a receiver that frees none, exactly s messages arrive. */
static void flow_control(void)
{
    struct hapt_comm_thread *comm_thread = NULL;
    CHECK_OK(hapt_comm_thread_create(transfer, test_env.world, path, 60, &comm_thread));
    const int me = test_env.world_rank;
    int flow = -1;
    char memory[8][16] = {{0}};
    void *base[8];
    for (int s = 0; s < 8; s++) base[s] = memory[s];
    const struct hapt_piece piece = {.peer = 1 - me, .bytes = 16};
    struct hapt_flow_options options = {.what = "noise",
                                        .stage = me,
                                        .peer_stage = 1 - me,
                                        .sends = me == 0,
                                        .per_step = 1,
                                        .peer_slots = 2,
                                        .slot_count = me == 0 ? 8 : 2,
                                        .buffer_count = 1,
                                        .base = base,
                                        .piece_count = 1,
                                        .piece = &piece};
    if (me < 2) CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me == 0) {
        for (int s = 0; s < 8; s++) {
            memset(memory[s], 'a' + s, 16);
            hapt_comm_thread_send(comm_thread, flow, s);
        }
        CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow, 1));
        MPI_Barrier(test_env.world);
        CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow, 7));
    } else {
        if (me == 1) {
            hapt_comm_thread_expect(comm_thread, flow, 8);
            CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow, 1));
            usleep(30000);
            CHECK(memory[0][0] == 'a' && memory[1][0] == 'b');
        }
        MPI_Barrier(test_env.world);
        for (int m = 0; m < 8 && me == 1; m++) {
            CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow, m));
            CHECK_MESSAGE(memory[m % 2][15] == 'a' + m, "slot %d holds %c, not %c", m % 2, memory[m % 2][15], 'a' + m);
            hapt_comm_thread_free(comm_thread, flow);
        }
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
}

/* Modelled messages of one flow with two transfer slots. Gives the times at which each message is handed over, arrives
 * and is released, by the recurrence of pacing and flow control. Both ends compute it from the same seed. */
struct stamped_plan {
    double ready_s[STAMPED], due_s[STAMPED], freed_s[STAMPED];
};

static void play_on_paper(double base_s, double rate, double latency_s, struct stamped_plan *plan)
{
    uint64_t random = 4711;
    double port_s = base_s, ready_s = base_s, freed_s = base_s;
    for (int m = 0; m < STAMPED; m++) {
        plan->ready_s[m] = ready_s += hapt_random_unit(&random) * 0.004;
        double start_s = fmax(plan->ready_s[m], port_s);
        if (m >= 2) start_s = fmax(start_s, plan->freed_s[m - 2]);
        port_s = start_s + 2e6 / rate;
        plan->due_s[m] = port_s + latency_s;
        plan->freed_s[m] = freed_s = fmax(plan->due_s[m], freed_s) + hapt_random_unit(&random) * 0.006;
    }
}

/* Seconds during which at least one message was in transit. */
static double active_on_paper(const struct stamped_plan *plan, double rate, double latency_s)
{
    double active_s = 0, until_s = 0;
    for (int m = 0; m < STAMPED; m++) {
        active_s += plan->due_s[m] - fmax(until_s, plan->due_s[m] - latency_s - 2e6 / rate);
        until_s = plan->due_s[m];
    }
    return active_s;
}

/* The stamps follow the recurrence even if threads wake late. No message is seen before it is due. */
static void stamps(void)
{
    struct hapt_comm_thread *comm_thread = NULL;
    const int me = test_env.world_rank;
    const double rate = 1e9, latency_s = 0.001;
    struct stamped_plan plan;
    unsigned char memory[2][HAPT_LINK_SHORT_BYTES];
    void *base[2] = {memory[0], memory[1]};
    uint64_t random = 99 + (uint64_t)me;
    int flow = -1;
    CHECK_OK(hapt_comm_thread_create(&hapt_transfer_mpi, test_env.world, NULL, 60, &comm_thread));
    CHECK_OK(hapt_comm_thread_use_wakeups(comm_thread, test_env.world, test_env.node));
    for (int r = 0; r < test_env.world_size; r++) CHECK(hapt_comm_thread_has_wakeup(comm_thread, r));
    CHECK(!hapt_comm_thread_has_wakeup(comm_thread, -1) &&
          !hapt_comm_thread_has_wakeup(comm_thread, test_env.world_size));
    const struct hapt_piece piece = {.peer = 1 - me, .bytes = sizeof memory[0], .modelled_bytes = 2000000};
    const struct hapt_flow_options options = {.what = "stamps",
                                              .stage = me,
                                              .peer_stage = 1 - me,
                                              .sends = me == 0,
                                              .per_step = 1,
                                              .peer_slots = 2,
                                              .slot_count = 2,
                                              .buffer_count = 1,
                                              .base = base,
                                              .piece_count = 1,
                                              .piece = &piece,
                                              .bandwidth = me == 0 ? rate : 0,
                                              .latency_s = me == 0 ? latency_s : 0,
                                              .stamped = true};
    if (me < 2) CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    double base_s = hapt_time_s() + 0.01;
    MPI_Bcast(&base_s, 1, MPI_DOUBLE, 0, test_env.world);
    play_on_paper(base_s, rate, latency_s, &plan);
    if (me == 1) hapt_comm_thread_expect(comm_thread, flow, STAMPED);
    for (int m = 0; m < STAMPED && me < 2; m++) {
        if (me == 0) {
            CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow, m % 2));
            if (m >= 2) CHECK_NEAR(hapt_comm_thread_due_s(comm_thread, flow, m % 2), plan.due_s[m - 2], 1e-9);
            memset(memory[m % 2], m, sizeof memory[0]);
            hapt_time_sleep_until(plan.ready_s[m] +
                                  hapt_random_unit(&random) * 0.002); /* threads that were woken late */
            hapt_comm_thread_send_at(comm_thread, flow, m % 2, plan.ready_s[m]);
        } else {
            double due_s;
            CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow, m));
            memcpy(&due_s, memory[m % 2], sizeof due_s);
            CHECK_NEAR(due_s, plan.due_s[m], 1e-9);
            CHECK_MESSAGE(hapt_time_s() > plan.due_s[m], "message %d was seen before it was due", m);
            CHECK(memory[m % 2][sizeof memory[0] - 1] == (unsigned char)m);
            hapt_time_sleep_until(plan.freed_s[m] + hapt_random_unit(&random) * 0.002);
            hapt_comm_thread_free_at(comm_thread, flow, plan.freed_s[m]);
        }
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    if (me == 0)
        CHECK_NEAR(hapt_comm_thread_active_s(comm_thread, flow), active_on_paper(&plan, rate, latency_s), 1e-6);
    hapt_comm_thread_destroy(comm_thread);
}

/* A message never arrives. The wait times out and names stage, step, microbatch, peer and the awaited message. */
static void deadline(void)
{
    struct hapt_comm_thread *comm_thread = NULL;
    CHECK_OK(hapt_comm_thread_create(transfer, test_env.world, path, 0.3, &comm_thread));
    const int me = test_env.world_rank;
    int flow = -1;
    char memory[16];
    void *base[1] = {memory};
    const struct hapt_piece piece = {.peer = 1 - me, .bytes = 16};
    const struct hapt_flow_options options = {.what = "gradients",
                                              .stage = 4 + me,
                                              .peer_stage = 5 - me,
                                              .sends = me == 0,
                                              .per_step = 3,
                                              .peer_slots = 1,
                                              .slot_count = 1,
                                              .buffer_count = 1,
                                              .base = base,
                                              .piece_count = 1,
                                              .piece = &piece};
    if (me < 2) CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me == 1) {
        hapt_comm_thread_expect(comm_thread, flow, 1);
        const enum hapt_status status = hapt_comm_thread_wait_received(comm_thread, flow, 0);
        CHECK(status == HAPT_ERR_COMM);
        const char *message = hapt_fail_message();
        CHECK_MESSAGE(strstr(message, "stage 5 waited") && strstr(message, "gradients of step 0, microbatch 0") &&
                          strstr(message, "from stage 4 (rank 0 on host "),
                      "message: %s", message);
        hapt_fail_reset();
    }
    MPI_Barrier(test_env.world);
    if (me == 0) hapt_comm_thread_send(comm_thread, flow, 0);
    if (me == 1) {
        CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow, 0));
        hapt_comm_thread_free(comm_thread, flow);
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
}

/* All of the above over TCP connections on the loopback interface: to all ranks, or to every second rank. */
static bool over_loopback(bool to_all)
{
    struct hapt_interfaces list;
    hapt_interfaces_list(true, &list);
    for (int i = 0; i < list.count; i++) {
        if (strcmp(list.item[i].name, "lo") != 0) continue;
        for (int r = 0; r < test_env.world_size; r++) /* the same at both ends */
            path[r] = (struct hapt_path){
                .tcp = to_all || (r + test_env.world_rank) % 2, .own = list.item[i], .peer = list.item[i]};
        transfer = to_all ? &hapt_transfer_tcp : &hapt_transfer_routed;
        return true;
    }
    return false;
}

static int compare_doubles(const void *a, const void *b)
{
    return (*(const double *)a > *(const double *)b) - (*(const double *)a < *(const double *)b);
}

/* Median seconds of a round trip of one-piece messages. *wakes: how often this process slept and woke in 0.3 s without
 * messages. */
static double there_and_back(long *wakes)
{
    enum { TRIPS = 31, BYTES = 3 * HAPT_LINK_CHUNK_BYTES / 2 };
    struct hapt_comm_thread *comm_thread = open_comm_thread(60);
    const int me = test_env.world_rank;
    int flow[2] = {-1, -1}; /* from rank 0; from rank 1 */
    void *base[2][1] = {{take(BYTES)}, {take(BYTES)}};
    double trip_s[TRIPS];
    struct rusage before, after;
    for (int f = 0; f < 2 && me < 2; f++) {
        const struct hapt_piece piece = {.peer = 1 - me, .bytes = BYTES};
        const struct hapt_flow_options options = {.what = "letters",
                                                  .stage = me,
                                                  .peer_stage = 1 - me,
                                                  .sends = me == f,
                                                  .tag = f,
                                                  .per_step = 1,
                                                  .peer_slots = 1,
                                                  .slot_count = 1,
                                                  .buffer_count = 1,
                                                  .base = base[f],
                                                  .piece_count = 1,
                                                  .piece = &piece};
        CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow[f]));
    }
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me < 2) hapt_comm_thread_expect(comm_thread, flow[1 - me], TRIPS);
    MPI_Barrier(test_env.world);
    getrusage(RUSAGE_SELF, &before);
    hapt_time_sleep_until(hapt_time_s() + 0.3);
    getrusage(RUSAGE_SELF, &after);
    *wakes = after.ru_nvcsw - before.ru_nvcsw;
    MPI_Barrier(test_env.world);
    for (int trip = 0; trip < TRIPS && me < 2; trip++) {
        const double start_s = hapt_time_s();
        if (me == 0) hapt_comm_thread_send(comm_thread, flow[0], 0);
        CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow[1 - me], trip));
        hapt_comm_thread_free(comm_thread, flow[1 - me]);
        if (me == 1) hapt_comm_thread_send(comm_thread, flow[1], 0);
        CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow[me], 0));
        trip_s[trip] = hapt_time_s() - start_s;
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
    for (int f = 0; f < 2; f++) give_back(base[f][0]);
    if (me > 1) return 0;
    qsort(trip_s, TRIPS, sizeof *trip_s, compare_doubles);
    return trip_s[TRIPS / 2];
}

/* With TCP connections only, a communication thread sleeps until a message comes and then wakes at once. It must not
 * wait for its sleep limit of 20 ms. */
static void sleeping(void)
{
    const struct hapt_transfer *own = transfer;
    long asked, slept;
    transfer = &hapt_transfer_mpi;
    const double polled_s = there_and_back(&asked);
    transfer = own;
    const double woken_s = there_and_back(&slept);
    if (test_env.world_rank > 1) return;
    CHECK_MESSAGE(slept < 100 && asked > 3 * slept, "woke %ld times while nothing came, %ld times where it asks", slept,
                  asked);
    CHECK_MESSAGE(woken_s < 10 * polled_s + 2e-3, "%g s there and back, %g s where it asks", woken_s, polled_s);
}

/* A failed copy on the device, or a failed send of its communicator, never counts as sent. The wait reports the
 * reason. */
static void lost_device(void)
{
    struct hapt_comm_thread *comm_thread = open_comm_thread(60);
    const int me = test_env.world_rank;
    int flow = -1;
    void *base[1] = {take(16)};
    struct hapt_device_comm group = {.peer = 1 - me};
    const struct hapt_pair pair = {&group, NULL};
    const struct hapt_piece piece = {.peer = 1 - me, .bytes = 16};
    const struct hapt_flow_options options = {.what = "noise",
                                              .stage = me,
                                              .peer_stage = 1 - me,
                                              .sends = me == 0,
                                              .per_step = 1,
                                              .peer_slots = 1,
                                              .slot_count = 1,
                                              .buffer_count = 1,
                                              .base = base,
                                              .on_device = true,
                                              .piece_count = 1,
                                              .piece = &piece,
                                              .pair = by_groups ? &pair : NULL};
    const enum hapt_status expected = by_groups ? HAPT_ERR_COMM : HAPT_ERR_INTERNAL;
    const char *message =
        by_groups ? "stage 0: the wire is cut in: noise of step 0, microbatch 0, to stage 1 (rank 1 on host "
                  : "the device is gone";
    CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me == 0) {
        late.fails = true;
        hapt_comm_thread_send(comm_thread, flow, 0);
        CHECK(hapt_comm_thread_wait_sent(comm_thread, flow, 0) == expected);
        CHECK_MESSAGE(strncmp(hapt_fail_message(), message, strlen(message)) == 0, "message: %s", hapt_fail_message());
        CHECK(hapt_comm_thread_drain(comm_thread) == expected);
        hapt_fail_reset();
        late.fails = false;
    } else {
        CHECK_OK(hapt_comm_thread_drain(comm_thread));
    }
    hapt_comm_thread_destroy(comm_thread);
    give_back(base[0]);
}

static void device(void)
{
    on_device = true;
    transfer = &hapt_transfer_mpi;
    late_open((size_t)256 << 20);
    random_plans();
    const int pins = late.pins;
    CHECK(test_env.world_size == 1 || pins > 0);
    by_groups = true;
    random_plans();
    if (test_env.world_size == 2 && test_long()) lost_device();
    CHECK(late.pins == pins);
    by_groups = false;
    /* An MPI library that accepts device memory. Here the host can read that memory. */
    setenv("HAPT_CUDA_MPI", "yes", 1);
    HAPT_ASSERT(mprotect(late.closed, late.bytes, PROT_READ | PROT_WRITE) == 0);
    late.pins = 0;
    random_plans();
    CHECK_MESSAGE(test_env.world_size == 1 || late.pins < pins,
                  "%d blocks were page-locked where messages with runs alone need them, %d where all do", late.pins,
                  pins);
    unsetenv("HAPT_CUDA_MPI");
    HAPT_ASSERT(mprotect(late.closed, late.bytes, PROT_NONE) == 0);
    if (test_env.world_size == 2 && test_long())
        lost_device(); /* a failing rank lets the others print first, for some seconds */
    CHECK(test_env.world_size == 1 || late.moved > 0);
    late_close();
    on_device = false;
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    HAPT_ASSERT(test_env.world_size <= MAX_RANKS);
    for (int way = 0; way < 3; way++) {
        transfer = &hapt_transfer_mpi;
        if (way > 0 && !over_loopback(way == 1)) break; /* a machine without a loopback interface */
        RUN(random_plans);
        if (test_env.world_size == 1) continue;
        RUN(flow_control);
        RUN(deadline);
        if (way == 1) RUN(sleeping);
        if (way == 2) continue; /* pacing is independent of the transport */
        RUN(pacing);
        RUN(latency);
        if (way == 0) RUN(stamps);
    }
    RUN(device);
    return test_finish();
}
