/*
 * Several chunks on a submesh: random lists in random orders, compared with a DAG whose edges are written out. The
 * check and the simulator must agree on deadlocks. In all else the simulator must agree with the DAG.
 */
#include "hapt/simulate.h"
#include "test.h"

enum {
    MOST_CHUNKS = 8,
    MOST_SUBMESHES = 4,
    MOST_MICROBATCHES = 20,
    MOST_INSTRUCTIONS = 8 * MOST_CHUNKS * MOST_MICROBATCHES
};

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

struct made {
    struct hapt_schedule schedule;
    int submesh_of[MOST_CHUNKS], launches[MOST_CHUNKS];
    struct hapt_instruction_list list[MOST_SUBMESHES];
    struct hapt_instruction instruction[MOST_SUBMESHES][MOST_INSTRUCTIONS], idle[1];
    bool taken[MOST_SUBMESHES][MOST_CHUNKS * MOST_MICROBATCHES]; /* slots in use */
    int slot[MOST_CHUNKS][MOST_MICROBATCHES];
    double forward_s[MOST_CHUNKS], backward_s[MOST_CHUNKS], comm_s[MOST_CHUNKS], step_s[MOST_CHUNKS];
};

static void append(struct made *made, enum hapt_instruction_kind kind, int chunk, int microbatch)
{
    struct hapt_instruction_list *list = &made->list[made->submesh_of[chunk]];
    list->instruction[list->count++] =
        (struct hapt_instruction){.kind = kind,
                                  .chunk = chunk,
                                  .microbatch = microbatch,
                                  .slot = microbatch < 0 ? -1 : made->slot[chunk][microbatch]};
}

static void forward(struct made *made, int chunk, int microbatch)
{
    const int submesh = made->submesh_of[chunk];
    int slot = 0;
    while (made->taken[submesh][slot]) slot++;
    made->taken[submesh][slot] = true;
    made->slot[chunk][microbatch] = slot;
    if (slot + 1 > made->list[submesh].slots) made->list[submesh].slots = slot + 1;
    if (hapt_schedule_crosses(&made->schedule, chunk - 1))
        append(made, HAPT_INSTRUCTION_RECEIVE_FORWARD, chunk, microbatch);
    append(made, HAPT_INSTRUCTION_FORWARD, chunk, microbatch);
    if (hapt_schedule_crosses(&made->schedule, chunk)) append(made, HAPT_INSTRUCTION_SEND_FORWARD, chunk, microbatch);
}

static void backward(struct made *made, int chunk, int microbatch)
{
    if (hapt_schedule_crosses(&made->schedule, chunk))
        append(made, HAPT_INSTRUCTION_RECEIVE_BACKWARD, chunk, microbatch);
    append(made, HAPT_INSTRUCTION_BACKWARD, chunk, microbatch);
    if (hapt_schedule_crosses(&made->schedule, chunk - 1))
        append(made, HAPT_INSTRUCTION_SEND_BACKWARD, chunk, microbatch);
    made->taken[made->submesh_of[chunk]][made->slot[chunk][microbatch]] = false;
}

/* A gradient for the chunk before, on the same submesh, waits in one of a few transfer slots. */
static bool has_transfer_slot(const struct made *made, const int *behind, int chunk)
{
    return chunk == 0 || hapt_schedule_crosses(&made->schedule, chunk - 1) ||
           behind[chunk] < behind[chunk - 1] + HAPT_TRANSFER_SLOTS;
}

/* Passes in a random order that respects their inputs and the order of microbatches. Only transfer slots can deadlock
 * such lists. `eager`: how much more likely forward passes are than backward ones. */
static void make(struct made *made, uint64_t *seed)
{
    const int chunks = 1 + below(seed, MOST_CHUNKS), submeshes = 1 + below(seed, MOST_SUBMESHES);
    const int B = 1 + below(seed, MOST_MICROBATCHES), eager = 1 + below(seed, 60);
    *made = (struct made){.schedule = {.kind = HAPT_SCHEDULE_H1F1B,
                                       .microbatches = B,
                                       .chunk_count = chunks,
                                       .submesh_count = submeshes < chunks ? submeshes : chunks,
                                       .update_groups = 1 + below(seed, 3),
                                       .submesh_of = made->submesh_of,
                                       .launches = made->launches,
                                       .idle = {.count = 1, .instruction = made->idle},
                                       .list = made->list}};
    const int S = made->schedule.submesh_count;
    for (int c = 0; c < chunks; c++) {
        made->submesh_of[c] = c < S ? c : below(seed, S);
        made->forward_s[c] = hapt_random_unit(seed);
        made->backward_s[c] = hapt_random_unit(seed);
        made->comm_s[c] = below(seed, 3) ? hapt_random_unit(seed) : 0;
        made->step_s[c] = hapt_random_unit(seed);
    }
    for (int s = 0; s < S; s++) made->list[s].instruction = made->instruction[s];
    int ahead[MOST_CHUNKS] = {0}, behind[MOST_CHUNKS] = {0};
    for (int left = 2 * chunks * B; left > 0;) {
        const int c = below(seed, chunks), choice = below(seed, eager + 1);
        const bool can_forward = ahead[c] < B && (c == 0 || ahead[c - 1] > ahead[c]);
        const bool can_backward = behind[c] < ahead[c] && (c == chunks - 1 || behind[c + 1] > behind[c]) &&
                                  has_transfer_slot(made, behind, c);
        if (choice > 0 && can_forward) {
            forward(made, c, ahead[c]++);
            left--;
        } else if (choice == 0 && can_backward) {
            backward(made, c, behind[c]++);
            left--;
        }
    }
    for (int c = 0; c < chunks; c++) append(made, HAPT_INSTRUCTION_REDUCE, c, -1);
    made->idle[0] = (struct hapt_instruction){.kind = HAPT_INSTRUCTION_NORM, .chunk = -1, .microbatch = -1, .slot = -1};
    for (int s = 0; s < S; s++) made->list[s].instruction[made->list[s].count++] = made->idle[0];
    for (int c = 0; c < chunks; c++)
        for (int g = 0; g < made->schedule.update_groups; g++) {
            struct hapt_instruction_list *list = &made->list[made->submesh_of[c]];
            append(made, HAPT_INSTRUCTION_UPDATE, c, -1);
            list->instruction[list->count - 1].group = g;
        }
}

/* The end time of a pass or a transfer, or -1 until the end times of its predecessors are known. */
struct dag {
    const struct made *made;
    double pass[2][MOST_CHUNKS][MOST_MICROBATCHES], transfer[2][MOST_CHUNKS][MOST_MICROBATCHES];
    double end[MOST_SUBMESHES][MOST_INSTRUCTIONS];
};

static bool wait_for(double *start_s, double end_s)
{
    if (end_s < 0) return false;
    *start_s = fmax(*start_s, end_s);
    return true;
}

/* The transfer behind chunk c in direction d: its tensor is made, the transfer before is over, and the receiver has a
 * free transfer slot. */
static bool time_transfer(struct dag *dag, int d, int c, int m)
{
    double start_s = 0;
    const int sender = d ? c + 1 : c, receiver = d ? c : c + 1;
    if (!wait_for(&start_s, dag->pass[d][sender][m])) return false;
    if (m > 0 && !wait_for(&start_s, dag->transfer[d][c][m - 1])) return false;
    if (m >= HAPT_TRANSFER_SLOTS && !wait_for(&start_s, dag->pass[d][receiver][m - HAPT_TRANSFER_SLOTS])) return false;
    dag->transfer[d][c][m] = start_s + dag->made->comm_s[c];
    return true;
}

static bool time_instruction(struct dag *dag, int submesh, int index)
{
    const struct made *made = dag->made;
    const struct hapt_instruction *at = &made->instruction[submesh][index];
    const int c = at->chunk, m = at->microbatch;
    double start_s = 0, lasts_s = 0;
    if (index > 0 && !wait_for(&start_s, dag->end[submesh][index - 1])) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD && !wait_for(&start_s, dag->transfer[0][c - 1][m])) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD && !wait_for(&start_s, dag->transfer[1][c][m])) return false;
    if (at->kind == HAPT_INSTRUCTION_FORWARD) lasts_s = made->forward_s[c];
    if (at->kind == HAPT_INSTRUCTION_UPDATE) lasts_s = made->step_s[c] / made->schedule.update_groups;
    if (at->kind == HAPT_INSTRUCTION_BACKWARD) {
        lasts_s = made->backward_s[c];
        if (m >= HAPT_TRANSFER_SLOTS && hapt_schedule_crosses(&made->schedule, c - 1) &&
            !wait_for(&start_s, dag->transfer[1][c - 1][m - HAPT_TRANSFER_SLOTS]))
            return false;
    }
    dag->end[submesh][index] = start_s + lasts_s;
    if (at->kind == HAPT_INSTRUCTION_FORWARD) dag->pass[0][c][m] = start_s + lasts_s;
    if (at->kind == HAPT_INSTRUCTION_BACKWARD) dag->pass[1][c][m] = start_s + lasts_s;
    return true;
}

/* Computes all end times that can be known, in any order. false: a cycle remains. */
static bool time_all(struct dag *dag)
{
    const struct hapt_schedule *schedule = &dag->made->schedule;
    bool moved = true, all = false;
    for (int d = 0; d < 2; d++)
        for (int c = 0; c < MOST_CHUNKS; c++)
            for (int m = 0; m < MOST_MICROBATCHES; m++) dag->pass[d][c][m] = dag->transfer[d][c][m] = -1;
    for (int s = 0; s < MOST_SUBMESHES; s++)
        for (int i = 0; i < MOST_INSTRUCTIONS; i++) dag->end[s][i] = -1;
    while (moved) {
        moved = false;
        all = true;
        for (int s = schedule->submesh_count - 1; s >= 0; s--)
            for (int i = 0; i < dag->made->list[s].count; i++) {
                if (dag->end[s][i] >= 0) continue;
                if (time_instruction(dag, s, i))
                    moved = true;
                else
                    all = false;
            }
        for (int d = 0; d < 2; d++)
            for (int c = 0; c < schedule->chunk_count; c++)
                for (int m = 0; m < schedule->microbatches && hapt_schedule_crosses(schedule, c); m++)
                    if (dag->transfer[d][c][m] < 0 && time_transfer(dag, d, c, m)) moved = true;
    }
    return all;
}

static void random_lists(void)
{
    const uint64_t count = test_long() ? 100000 : 10000;
    static struct made made;
    static struct dag dag = {.made = &made};
    struct hapt_arena arena;
    int deadlocks = 0, several = 0;
    hapt_arena_init(&arena);
    for (uint64_t name = 1; name <= count; name++) {
        uint64_t seed = name;
        make(&made, &seed);
        const struct hapt_costs costs = {.forward_s = made.forward_s,
                                         .backward_s = made.backward_s,
                                         .comm_s = made.comm_s,
                                         .step_s = made.step_s,
                                         .transfer_slots = HAPT_TRANSFER_SLOTS};
        const bool ends = time_all(&dag);
        const enum hapt_status want = ends ? HAPT_OK : HAPT_ERR_INTERNAL;
        const enum hapt_status checked = hapt_schedule_check(&made.schedule);
        CHECK_MESSAGE(checked == want, "seed %llu: the check finds \"%s\"", (unsigned long long)name,
                      hapt_fail_message());
        hapt_fail_reset();
        struct hapt_simulation *simulation = NULL;
        const enum hapt_status played = hapt_simulate(&made.schedule, &costs, &arena, &simulation);
        CHECK_MESSAGE(played == want, "seed %llu: the simulator finds \"%s\"", (unsigned long long)name,
                      hapt_fail_message());
        hapt_fail_reset();
        double worst = 0;
        for (int s = 0; played == HAPT_OK && s < made.schedule.submesh_count; s++)
            for (int i = 0; i < made.list[s].count; i++)
                worst = fmax(worst, fabs(simulation->time[s][i].end_s - dag.end[s][i]));
        CHECK_MESSAGE(worst <= 1e-12 * 1000, "seed %llu: %g s off", (unsigned long long)name, worst);
        deadlocks += !ends;
        several += made.schedule.chunk_count > made.schedule.submesh_count;
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    CHECK_MESSAGE(deadlocks > (int)count / 100 && several > (int)count / 3, "%d deadlocks, %d with several chunks",
                  deadlocks, several);
}

/* The instructions of a built schedule are timed by the DAG too: they end, and as the simulator says. */
static void built_lists(void)
{
    static struct made made;
    static struct dag dag = {.made = &made};
    struct hapt_arena arena;
    int several = 0;
    hapt_arena_init(&arena);
    for (uint64_t name = 1; name <= (test_long() ? 20000 : 2000); name++) {
        uint64_t seed = name;
        struct hapt_schedule *built;
        struct hapt_simulation *simulation;
        int submeshes = 0, warmup[MOST_CHUNKS];
        make(&made, &seed); /* for its costs */
        const int chunks = made.schedule.chunk_count, B = made.schedule.microbatches;
        for (int c = 0; c < chunks; c++) {
            made.submesh_of[c] = submeshes == MOST_SUBMESHES ? below(&seed, submeshes) : below(&seed, submeshes + 1);
            submeshes += made.submesh_of[c] == submeshes;
        }
        const enum hapt_schedule_kind kind = (enum hapt_schedule_kind)below(&seed, HAPT_SCHEDULE_H1F1B + 1);
        hapt_schedule_warmup(kind, chunks, B, made.comm_s, 1, 0.1, warmup);
        struct hapt_schedule_options options = {
            .tied = true, .update_groups = made.schedule.update_groups, .submesh_of = made.submesh_of};
        CHECK_OK(hapt_schedule_build(kind, chunks, B, warmup, &options, &arena, &built));
        CHECK_OK(hapt_schedule_check(built));
        options.tied = false; /* the DAG has no exchange */
        CHECK_OK(hapt_schedule_build(kind, chunks, B, warmup, &options, &arena, &built));
        CHECK_OK(hapt_schedule_check(built));
        CHECK(built->submesh_count == submeshes);
        made.schedule = *built;
        for (int s = 0; s < submeshes; s++) {
            made.list[s] = built->list[s];
            memcpy(made.instruction[s], built->list[s].instruction,
                   (size_t)built->list[s].count * sizeof made.instruction[s][0]);
        }
        CHECK(time_all(&dag));
        const struct hapt_costs costs = {.forward_s = made.forward_s,
                                         .backward_s = made.backward_s,
                                         .comm_s = made.comm_s,
                                         .step_s = made.step_s,
                                         .transfer_slots = HAPT_TRANSFER_SLOTS};
        CHECK_OK(hapt_simulate(built, &costs, &arena, &simulation));
        double worst = 0, longest_s = 0;
        for (int s = 0; s < submeshes; s++)
            for (int i = 0; i < built->list[s].count; i++) {
                worst = fmax(worst, fabs(simulation->time[s][i].end_s - dag.end[s][i]));
                longest_s = fmax(longest_s, dag.end[s][i]);
            }
        CHECK_MESSAGE(worst <= 1e-12 * 1000, "seed %llu: %g s off", (unsigned long long)name, worst);
        CHECK_NEAR(simulation->total_s, longest_s, 1e-12);
        several += chunks > submeshes;
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    CHECK_MESSAGE(several > 300, "%d with several chunks", several);
}

/* Three chunks that fold over two submeshes, by hand: tick by tick, gradients first. */
static void folded_by_hand(void)
{
    static const int submesh_of[] = {0, 1, 0}, warmup[] = {2, 2, 1};
    static const char want[2][32] = {"a0 a1 c0 C0 c1 A0 C1 A1", "b0 b1 B0 B1"};
    struct hapt_arena arena;
    struct hapt_schedule *built;
    hapt_arena_init(&arena);
    const struct hapt_schedule_options options = {.submesh_of = submesh_of};
    CHECK_OK(hapt_schedule_build(HAPT_SCHEDULE_1F1B, 3, 2, warmup, &options, &arena, &built));
    CHECK_OK(hapt_schedule_check(built));
    CHECK(built->list[0].slots == 3 && built->list[1].slots == 2);
    for (int s = 0; s < 2; s++) {
        char got[64] = "";
        for (int i = 0; i < built->list[s].count; i++) {
            const struct hapt_instruction *at = &built->list[s].instruction[i];
            const bool goes_forward = at->kind == HAPT_INSTRUCTION_FORWARD;
            if (!goes_forward && at->kind != HAPT_INSTRUCTION_BACKWARD) continue;
            const char letter[] = {(char)((goes_forward ? 'a' : 'A') + at->chunk), (char)('0' + at->microbatch), '\0'};
            snprintf(got + strlen(got), sizeof got - strlen(got), "%s%s", got[0] ? " " : "", letter);
        }
        CHECK_MESSAGE(strcmp(got, want[s]) == 0, "submesh %d runs %s, not %s", s, got, want[s]);
    }
    hapt_arena_release(&arena);
}

/* Each chunk has its own slots, and a chunk is finished when it has been updated. */
static void damage_is_found(void)
{
    static struct made made;
    uint64_t seed = 1;
    int tried = 0;
    while (tried < 2000) {
        make(&made, &seed);
        if (hapt_schedule_check(&made.schedule) != HAPT_OK) {
            hapt_fail_reset();
            continue;
        }
        struct hapt_instruction_list *list = &made.list[below(&seed, made.schedule.submesh_count)];
        struct hapt_instruction *at = &list->instruction[below(&seed, list->count)];
        const struct hapt_instruction kept = *at;
        switch (below(&seed, 5)) {
        case 0: at->slot = kept.slot + 1 + below(&seed, 3); break;
        case 1: at->chunk = (kept.chunk + 1 + below(&seed, MOST_CHUNKS - 1)) % MOST_CHUNKS; break;
        case 2: at->microbatch = kept.microbatch + 1; break;
        case 3: *at = list->instruction[list->count - 1]; break;
        case 4: at->group = kept.kind == HAPT_INSTRUCTION_UPDATE ? kept.group + 1 : kept.group; break;
        }
        if (kept.kind == HAPT_INSTRUCTION_SEND_BACKWARD && at->slot != kept.slot)
            continue; /* its slot is free by then */
        if (memcmp(at, &kept, sizeof kept) == 0) continue;
        CHECK_MESSAGE(hapt_schedule_check(&made.schedule) == HAPT_ERR_INTERNAL, "damage %d passes", tried);
        hapt_fail_reset();
        tried++;
    }
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(random_lists);
    RUN(built_lists);
    RUN(folded_by_hand);
    RUN(damage_is_found);
    return test_finish();
}
