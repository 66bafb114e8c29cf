/*
 * Several chunks on a submesh, skips, frozen chunks, split backward passes: random lists in random orders, compared
 * with a DAG whose edges are written out. The check and the simulator must agree on deadlocks. In all else the
 * simulator must agree with the DAG.
 */
#include "lists_dag.h"

/* Gradients for a chunk of the same submesh have as many transfer slots as others. */
static bool has_local_room(const struct made *made)
{
    for (int s = 0; s < made->schedule.submesh_count; s++) {
        int done[MOST_CHUNKS] = {0};
        for (int i = 0; i < made->list[s].count; i++) {
            const struct hapt_instruction *at = &made->instruction[s][i];
            if (at->kind != HAPT_INSTRUCTION_BACKWARD) continue;
            for (int e = 0; e < made->edge_count; e++)
                if (made->edge[e].from == at->chunk && made->edge[e].backward && is_local(made, &made->edge[e]) &&
                    at->microbatch >= done[made->edge[e].to] + hapt_schedule_transfer_slots(&made->schedule))
                    return false;
            done[at->chunk]++;
        }
    }
    return true;
}

/* Check, simulator and DAG agree about the lists of `dag->made`. */
static void compare(struct dag *dag, uint64_t name, enum hapt_status deadlock, struct hapt_arena *arena, bool *ends)
{
    const struct made *made = dag->made;
    const struct hapt_schedule *schedule = &made->schedule;
    const struct hapt_costs costs = costs_of(made);
    struct hapt_simulation *simulation = NULL;
    struct hapt_simulate_work work = {0};
    double worst = 0, longest_s = 0, step_s = 0;
    *ends = time_all(dag);
    const enum hapt_status checked = hapt_schedule_check(schedule);
    CHECK_MESSAGE(checked == (*ends && has_local_room(made) ? HAPT_OK : deadlock), "seed %llu: the check finds \"%s\"",
                  (unsigned long long)name, hapt_fail_message());
    hapt_fail_reset();
    const enum hapt_status played = hapt_simulate(schedule, &costs, arena, &simulation);
    CHECK_MESSAGE(played == (*ends ? HAPT_OK : HAPT_ERR_INTERNAL), "seed %llu: the simulator finds \"%s\"",
                  (unsigned long long)name, hapt_fail_message());
    hapt_fail_reset();
    for (int s = 0; played == HAPT_OK && s < schedule->submesh_count; s++)
        for (int i = 0; i < made->list[s].count; i++) {
            worst = fmax(worst, fabs(simulation->time[s][i].end_s - dag->end[s][i]));
            longest_s = fmax(longest_s, dag->end[s][i]);
        }
    CHECK_MESSAGE(worst <= 1e-12 * (1 + longest_s), "seed %llu: %g s off", (unsigned long long)name, worst);
    if (played != HAPT_OK) return;
    CHECK(hapt_simulate_step(schedule, &costs, &work, &step_s) == HAPT_OK && step_s == simulation->total_s);
    CHECK_NEAR(simulation->total_s, longest_s, 1e-12 * (1 + longest_s));
    hapt_simulate_work_release(&work);
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
        bool ends;
        make(&made, &seed, &arena);
        compare(&dag, name, HAPT_ERR_INTERNAL, &arena, &ends);
        deadlocks += !ends;
        several += made.schedule.chunk_count > made.schedule.submesh_count;
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    CHECK_MESSAGE(deadlocks > (int)count / 100 && several > (int)count / 3, "%d deadlocks, %d with several chunks",
                  deadlocks, several);
}

/* Options of a random schedule: placement, loops, skips, frozen chunks, split backward. */
static struct hapt_schedule_options random_options(struct made *made, enum hapt_schedule_kind kind, uint64_t *seed)
{
    struct hapt_schedule *schedule = &made->schedule;
    int submeshes = 0;
    const int chunks = schedule->chunk_count, B = schedule->microbatches, placement = below(seed, 3);
    const int wide = 1 + below(seed, MOST_SUBMESHES);
    for (int c = 0; c < chunks; c++) {
        const int round = c % (2 * wide);
        made->submesh_of[c] = placement == 0   ? c % wide
                              : placement == 1 ? (round < wide ? round : 2 * wide - 1 - round)
                                               : below(seed, submeshes < MOST_SUBMESHES ? submeshes + 1 : submeshes);
        submeshes += made->submesh_of[c] == submeshes;
    }
    int loop_batch = 1 + below(seed, B);
    while (B % loop_batch != 0) loop_batch--;
    make_links(made, seed);
    return (struct hapt_schedule_options){.update_groups = schedule->update_groups,
                                          .submesh_of = made->submesh_of,
                                          .edge_count = made->edge_count,
                                          .edge = below(seed, 2) ? made->edge : NULL,
                                          .relay_count = made->relay_count,
                                          .relay = made->relay,
                                          .forward_only = made->forward_only,
                                          .loop_batch = kind == HAPT_SCHEDULE_LOOPED ? loop_batch : 0,
                                          .prefetch = below(seed, MOST_SUBMESHES)};
}

/* The test's own copies of a built schedule. */
static void take(struct made *made, const struct hapt_schedule *built)
{
    made->schedule = *built;
    made->edge_count = built->edges.count;
    memcpy(made->edge, built->edges.edge, (size_t)built->edges.count * sizeof made->edge[0]);
    if (!built->edges.given) made->relay_count = 0;
    for (int s = 0; s < built->submesh_count; s++) {
        made->list[s] = built->list[s];
        memcpy(made->instruction[s], built->list[s].instruction,
               (size_t)built->list[s].count * sizeof made->instruction[s][0]);
    }
}

/* The instructions of a built schedule are timed by the DAG too: they end. Kinds with launch counts can always be
 * built. Looped ones are refused if the microbatches are no multiple of B_l, or if they would deadlock. */
static void built_lists(void)
{
    static struct made made;
    static struct dag dag = {.made = &made};
    struct hapt_arena arena;
    int several = 0, looped = 0, deadlocks = 0, split = 0;
    const uint64_t count = test_long() ? 100000 : 10000;
    hapt_arena_init(&arena);
    for (uint64_t name = 1; name <= count; name++) {
        uint64_t seed = name;
        struct hapt_schedule *built;
        int warmup[MOST_CHUNKS], pool[MOST_SUBMESHES], weight_slots[MOST_SUBMESHES];
        make_chunks(&made, &seed);
        const int chunks = made.schedule.chunk_count, B = made.schedule.microbatches;
        if (made.schedule.transfer_slots > 0) made.schedule.transfer_slots += HAPT_TRANSFER_SLOTS;
        const enum hapt_schedule_kind kind = (enum hapt_schedule_kind)below(&seed, HAPT_SCHEDULE_KINDS);
        const struct hapt_costs costs = costs_of(&made);
        struct hapt_schedule_options options = random_options(&made, kind, &seed);
        if (!options.edge) options.relay_count = 0;
        hapt_schedule_warmup(kind, chunks, B, made.comm_s, 1, 0.1, warmup);
        for (int c = 0; c < chunks; c++)
            if (made.forward_only[c]) warmup[c] = hapt_schedule_forward_only_launches(kind, B, made.comm_s[c], 1, 0.1);
        for (int s = 0; s < MOST_SUBMESHES; s++) pool[s] = 1 + below(&seed, 2 * B);
        for (int s = 0; s < MOST_SUBMESHES; s++) weight_slots[s] = 1 + below(&seed, B);
        options.transfer_slots = made.schedule.transfer_slots;
        options.split = made.schedule.split;
        options.costs = &costs;
        options.pool = below(&seed, 2) ? pool : NULL;
        options.weight_slots = below(&seed, 2) ? weight_slots : NULL;
        const enum hapt_status status = hapt_schedule_build(kind, chunks, B, warmup, &options, &arena, &built);
        if (status == HAPT_OK) {
            bool ends;
            for (int s = 0; s < built->submesh_count; s++) {
                CHECK(built->list[s].weight_slots <= (options.weight_slots ? weight_slots[s] : B * chunks));
                CHECK(options.split || built->list[s].weight_slots == 0);
            }
            take(&made, built);
            compare(&dag, name, hapt_schedule_loops(kind) ? HAPT_ERR_USAGE : HAPT_ERR_INTERNAL, &arena, &ends);
            CHECK_MESSAGE(ends || hapt_schedule_loops(kind), "seed %llu: %s deadlocks", (unsigned long long)name,
                          hapt_schedule_kind_name(kind));
            deadlocks += !ends;
        } else {
            CHECK_MESSAGE(hapt_schedule_loops(kind) && (status == HAPT_ERR_INPUT || status == HAPT_ERR_USAGE),
                          "seed %llu: %s", (unsigned long long)name, hapt_fail_message());
            hapt_fail_reset();
        }
        several += status == HAPT_OK && chunks > built->submesh_count;
        looped += status == HAPT_OK && hapt_schedule_loops(kind);
        split += status == HAPT_OK && options.split;
        hapt_arena_reset(&arena);
    }
    hapt_arena_release(&arena);
    CHECK_MESSAGE(several > (int)count / 3 && looped > (int)count / 5 && split > (int)count / 3 && deadlocks == 0,
                  "%d with several chunks, %d looped, %d split, %d deadlock", several, looped, split, deadlocks);
}

/* Messages between the ends of a long pipeline, over one link with those to the next stage: launch counts may ask for
 * more of them on their way than there are transfer slots. The lists end all the same. */
static void far_messages_end(void)
{
    enum { CHUNKS = 12 };
    struct hapt_schedule_edge edge[2 * CHUNKS];
    int edges = 0, lowered = 0;
    for (int c = 0; c + 1 < CHUNKS; c++) {
        edge[edges++] = (struct hapt_schedule_edge){c, c + 1, false, c == 0};
        edge[edges++] = (struct hapt_schedule_edge){c + 1, c, true, c == 0 ? 2 : 0};
    }
    edge[edges++] = (struct hapt_schedule_edge){0, CHUNKS - 1, false, 1};
    edge[edges++] = (struct hapt_schedule_edge){CHUNKS - 1, 0, true, 2};
    for (int kind = 0; kind <= HAPT_SCHEDULE_H1F1B; kind++)
        for (int k = 0; k < 21; k++) {
            struct hapt_arena arena;
            struct hapt_schedule *built;
            const struct hapt_schedule_options options = {.edge_count = edges, .edge = edge};
            const int B = 1 + 9 * (k / 3);
            double comm_s[CHUNKS];
            int warmup[CHUNKS];
            for (int c = 0; c < CHUNKS; c++) comm_s[c] = c + 1 < CHUNKS ? 0.4 * (k % 3) : 0;
            hapt_schedule_warmup((enum hapt_schedule_kind)kind, CHUNKS, B, comm_s, 1, 0.02, warmup);
            hapt_arena_init(&arena);
            CHECK_OK(hapt_schedule_build((enum hapt_schedule_kind)kind, CHUNKS, B, warmup, &options, &arena, &built));
            CHECK_OK(hapt_schedule_check(built));
            lowered += built->launches[0] < warmup[0];
            hapt_arena_release(&arena);
        }
    CHECK(lowered > 0);
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
    struct hapt_arena arena;
    uint64_t seed = 1;
    int tried = 0;
    hapt_arena_init(&arena);
    while (tried < 2000) {
        hapt_arena_reset(&arena);
        make(&made, &seed, &arena);
        if (hapt_schedule_check(&made.schedule) != HAPT_OK) {
            hapt_fail_reset();
            continue;
        }
        struct hapt_instruction_list *list = &made.list[below(&seed, made.schedule.submesh_count)];
        struct hapt_instruction *at = &list->instruction[below(&seed, list->count)];
        const struct hapt_instruction kept = *at;
        switch (below(&seed, 6)) {
        case 0: at->slot = kept.slot + 1 + below(&seed, 3); break;
        case 1: at->chunk = (kept.chunk + 1 + below(&seed, MOST_CHUNKS - 1)) % MOST_CHUNKS; break;
        case 2: at->microbatch = kept.microbatch + 1; break;
        case 3: *at = list->instruction[list->count - 1]; break;
        case 4: at->group = kept.kind == HAPT_INSTRUCTION_UPDATE ? kept.group + 1 : kept.group; break;
        case 5: at->weight_slot += kept.kind == HAPT_INSTRUCTION_WEIGHT; break;
        }
        if (kept.kind == HAPT_INSTRUCTION_SEND_BACKWARD && at->slot != kept.slot && !made.schedule.split)
            continue; /* its slot is free by then */
        const bool alone = kept.chunk >= 0 && made.forward_only[kept.chunk] &&
                           !has_edge(&made, kept.chunk, false, true, false) &&
                           !has_edge(&made, kept.chunk, false, false, false);
        if (alone && at->slot != kept.slot) continue; /* a pass without messages may have any free slot */
        if (memcmp(at, &kept, sizeof kept) == 0) continue;
        CHECK_MESSAGE(hapt_schedule_check(&made.schedule) == HAPT_ERR_INTERNAL, "damage %d passes", tried);
        hapt_fail_reset();
        tried++;
    }
    hapt_arena_release(&arena);
}

int main(int argc, char **argv)
{
    test_init(&argc, &argv);
    RUN(random_lists);
    RUN(built_lists);
    RUN(far_messages_end);
    RUN(folded_by_hand);
    RUN(damage_is_found);
    return test_finish();
}
