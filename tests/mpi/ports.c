/* ranks: 3
 * Flows that share a paced link, and flows that pass messages on: their times by a recurrence on paper, and their
 * contents. */
#include "test.h"

#include <unistd.h>

#include "hapt/link.h"

#define MESSAGES 60
#define FLOWS 4
#define SLOTS 2
#define RATE 1e9
#define LATENCY_S 0.0005

/* Flows of rank 0: three share a link, the last has one of its own. */
static const struct {
    int to, port;
    size_t modelled_bytes;
} line[FLOWS] = {{1, 7, 2000000}, {1, 7, 500000}, {2, 7, 3000000}, {2, 0, 1000000}};

/* Messages in the order in which they are handed over. */
struct turns {
    int flow[MESSAGES];
    double ready_s[MESSAGES], due_s[MESSAGES], freed_s[MESSAGES];
};

static void turns_on_paper(double base_s, uint64_t random, struct turns *turns)
{
    double port_s[2] = {base_s, base_s}, ready_s = base_s, freed_s[FLOWS];
    int count[FLOWS] = {0}, sent[FLOWS][MESSAGES];
    for (int k = 0; k < FLOWS; k++) freed_s[k] = base_s;
    for (int i = 0; i < MESSAGES; i++) {
        const int k = turns->flow[i] = (int)(hapt_random_next(&random) % FLOWS), n = count[k]++;
        double *port = &port_s[line[k].port == 0];
        turns->ready_s[i] = ready_s += hapt_random_unit(&random) * 0.002;
        double start_s = fmax(ready_s, *port);
        if (n >= SLOTS) start_s = fmax(start_s, turns->freed_s[sent[k][n - SLOTS]]);
        *port = start_s + (double)line[k].modelled_bytes / RATE;
        turns->due_s[i] = *port + LATENCY_S;
        turns->freed_s[i] = freed_s[k] = fmax(turns->due_s[i], freed_s[k]) + hapt_random_unit(&random) * 0.004;
        sent[k][n] = i;
    }
}

/* Adds a flow of one piece between two ranks; -1 on other ranks. The options that the two kinds of flow share are set
 * here. */
static int add_flow(struct hapt_comm_thread *comm_thread, int from, int to, struct hapt_piece piece, void **base,
                    struct hapt_flow_options options)
{
    const int me = test_env.world_rank;
    int flow = -1;
    piece.peer = me == from ? to : from;
    options.stage = me;
    options.peer_stage = piece.peer;
    options.sends = me == from;
    options.per_step = 1;
    options.peer_slots = options.slot_count = SLOTS;
    options.buffer_count = options.piece_count = 1;
    options.base = base;
    options.piece = &piece;
    if (me == from || me == to) CHECK_OK(hapt_comm_thread_add(comm_thread, &options, &flow));
    return flow;
}

static int add_stamped(struct hapt_comm_thread *comm_thread, int from, int to, int tag, int port, size_t modelled_bytes,
                       unsigned char memory[SLOTS][HAPT_LINK_SHORT_BYTES])
{
    void *base[SLOTS];
    for (int s = 0; s < SLOTS; s++) base[s] = memory[s];
    return add_flow(
        comm_thread, from, to, (struct hapt_piece){.bytes = HAPT_LINK_SHORT_BYTES, .modelled_bytes = modelled_bytes},
        base,
        (struct hapt_flow_options){
            .what = "stamps", .tag = tag, .bandwidth = RATE, .latency_s = LATENCY_S, .port = port, .stamped = true});
}

static struct hapt_comm_thread *open_comm_thread(bool wakeups)
{
    struct hapt_comm_thread *comm_thread = NULL;
    CHECK_OK(hapt_comm_thread_create(&hapt_transfer_mpi, test_env.world, NULL, 60, &comm_thread));
    if (wakeups) CHECK_OK(hapt_comm_thread_use_wakeups(comm_thread, test_env.world, test_env.node));
    return comm_thread;
}

static double common_start_s(void)
{
    double base_s = hapt_time_s() + 0.01;
    MPI_Bcast(&base_s, 1, MPI_DOUBLE, 0, test_env.world);
    return base_s;
}

/* Each message is due when the recurrence says, to the nanosecond: messages of one link take turns in the order of
 * handing over, also behind one that waits for a transfer slot. */
static void messages_of_a_link_take_turns(void)
{
    static unsigned char memory[FLOWS][SLOTS][HAPT_LINK_SHORT_BYTES];
    struct hapt_comm_thread *comm_thread = open_comm_thread(true);
    const int me = test_env.world_rank;
    struct turns turns;
    int flow[FLOWS], count[FLOWS] = {0};
    for (int k = 0; k < FLOWS; k++)
        flow[k] = add_stamped(comm_thread, 0, line[k].to, k, line[k].port, line[k].modelled_bytes, memory[k]);
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    turns_on_paper(common_start_s(), 11, &turns);
    for (int i = 0; i < MESSAGES; i++) {
        const int k = turns.flow[i], n = count[k]++;
        if (me == 0) {
            CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow[k], n % SLOTS));
            hapt_comm_thread_send_at(comm_thread, flow[k], n % SLOTS, turns.ready_s[i]);
        } else if (me == line[k].to) {
            double due_s;
            hapt_comm_thread_expect(comm_thread, flow[k], 1);
            CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow[k], n));
            memcpy(&due_s, memory[k][n % SLOTS], sizeof due_s);
            CHECK_NEAR(due_s, turns.due_s[i], 1e-9);
            hapt_comm_thread_free_at(comm_thread, flow[k], turns.freed_s[i]);
        }
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
}

/* Rank 1 passes on what it gets from rank 0. */
struct relay {
    double ready_s[MESSAGES], due_s[MESSAGES], used_s[MESSAGES], next_due_s[MESSAGES], freed_s[MESSAGES];
};

static void relay_on_paper(double base_s, uint64_t random, struct relay *relay)
{
    double port_s[2] = {base_s, base_s}, ready_s = base_s, used_s = base_s, freed_s = base_s;
    for (int m = 0; m < MESSAGES; m++) {
        relay->ready_s[m] = ready_s += hapt_random_unit(&random) * 0.002;
        double start_s = fmax(ready_s, port_s[0]);
        if (m >= SLOTS) start_s = fmax(start_s, fmax(relay->used_s[m - SLOTS], relay->next_due_s[m - SLOTS]));
        port_s[0] = start_s + 1e6 / RATE;
        relay->due_s[m] = port_s[0] + LATENCY_S;
        relay->used_s[m] = used_s = fmax(relay->due_s[m], used_s) + hapt_random_unit(&random) * 0.002;
        start_s = fmax(used_s, port_s[1]);
        if (m >= SLOTS) start_s = fmax(start_s, relay->freed_s[m - SLOTS]);
        port_s[1] = start_s + 1.5e6 / RATE;
        relay->next_due_s[m] = port_s[1] + LATENCY_S;
        relay->freed_s[m] = freed_s = fmax(relay->next_due_s[m], freed_s) + hapt_random_unit(&random) * 0.004;
    }
}

/* A transfer slot is free when the message was used and has been passed on. */
static void slots_wait_until_messages_are_passed_on(void)
{
    static unsigned char memory[SLOTS][HAPT_LINK_SHORT_BYTES];
    struct hapt_comm_thread *comm_thread = open_comm_thread(true);
    const int me = test_env.world_rank;
    struct relay relay;
    const int in = add_stamped(comm_thread, 0, 1, 0, 0, 1000000, memory),
              out = add_stamped(comm_thread, 1, 2, 1, 0, 1500000, memory);
    double due_s;
    if (me == 1) CHECK_OK(hapt_comm_thread_pass_on(comm_thread, in, out));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    relay_on_paper(common_start_s(), 12, &relay);
    if (me > 0) hapt_comm_thread_expect(comm_thread, me == 1 ? in : out, MESSAGES);
    for (int m = 0; m < MESSAGES; m++) {
        if (me == 0) {
            CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, in, m % SLOTS));
            hapt_comm_thread_send_at(comm_thread, in, m % SLOTS, relay.ready_s[m]);
            continue;
        }
        CHECK_OK(hapt_comm_thread_wait_received(comm_thread, me == 1 ? in : out, m));
        memcpy(&due_s, memory[m % SLOTS], sizeof due_s);
        CHECK_NEAR(due_s, me == 1 ? relay.due_s[m] : relay.next_due_s[m], 1e-9);
        if (me == 1) hapt_comm_thread_send_at(comm_thread, out, m % SLOTS, relay.used_s[m]);
        hapt_comm_thread_free_at(comm_thread, me == 1 ? in : out, me == 1 ? relay.used_s[m] : relay.freed_s[m]);
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
}

/* Messages of several chunks; rank 2 is slow. Without waiting, rank 0 would overwrite what rank 1 still sends. */
static void passed_on_messages_are_whole(void)
{
    enum { COUNT = 40 };
    const size_t bytes = 5 * HAPT_LINK_CHUNK_BYTES / 2;
    struct hapt_comm_thread *comm_thread = open_comm_thread(false);
    const int me = test_env.world_rank;
    unsigned char *memory = calloc(SLOTS, bytes);
    void *base[SLOTS];
    int flow[2];
    for (int s = 0; s < SLOTS; s++) base[s] = memory + (size_t)s * bytes;
    for (int k = 0; k < 2; k++)
        flow[k] = add_flow(comm_thread, k, k + 1, (struct hapt_piece){.bytes = bytes}, base,
                           (struct hapt_flow_options){.what = "noise", .tag = k});
    if (me == 1) CHECK_OK(hapt_comm_thread_pass_on(comm_thread, flow[0], flow[1]));
    CHECK_OK(hapt_comm_thread_start(comm_thread));
    if (me > 0) hapt_comm_thread_expect(comm_thread, flow[me - 1], COUNT);
    for (int m = 0; m < COUNT; m++) {
        unsigned char *place = memory + (size_t)(m % SLOTS) * bytes;
        if (me == 0) {
            CHECK_OK(hapt_comm_thread_wait_sent(comm_thread, flow[0], m % SLOTS));
            for (size_t i = 0; i < bytes; i++) place[i] = (unsigned char)(m * 101 + (int)(i % 251));
            hapt_comm_thread_send(comm_thread, flow[0], m % SLOTS);
            continue;
        }
        CHECK_OK(hapt_comm_thread_wait_received(comm_thread, flow[me - 1], m));
        if (me == 1) hapt_comm_thread_send(comm_thread, flow[1], m % SLOTS);
        if (me == 2) usleep(2000);
        long wrong = 0;
        for (size_t i = 0; i < bytes; i++) wrong += place[i] != (unsigned char)(m * 101 + (int)(i % 251));
        CHECK_MESSAGE(wrong == 0, "message %d: %ld bytes wrong", m, wrong);
        hapt_comm_thread_free(comm_thread, flow[me - 1]);
    }
    CHECK_OK(hapt_comm_thread_drain(comm_thread));
    hapt_comm_thread_destroy(comm_thread);
    free(memory);
}

int main(int argc, char **argv)
{
    test_init_mpi(&argc, &argv);
    RUN(messages_of_a_link_take_turns);
    RUN(slots_wait_until_messages_are_passed_on);
    RUN(passed_on_messages_are_whole);
    return test_finish();
}
