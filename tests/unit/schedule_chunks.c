/*
 * Several chunks on a submesh, skips, frozen chunks, split backward passes: random lists in random orders, compared
 * with a DAG whose edges are written out. The check and the simulator must agree on deadlocks. In all else the
 * simulator must agree with the DAG.
 */
#include "hapt/simulate.h"
#include "test.h"

enum {
    MOST_CHUNKS = 8,
    MOST_SUBMESHES = 4,
    MOST_MICROBATCHES = 20,
    MOST_EDGES = MOST_CHUNKS * MOST_CHUNKS,
    MOST_RELAYS = 3 * MOST_EDGES,
    MOST_LINKS = 8,
    MOST_INSTRUCTIONS = 10 * MOST_CHUNKS * MOST_MICROBATCHES
};

static int below(uint64_t *seed, int count)
{
    return (int)(hapt_random_next(seed) % (uint64_t)count);
}

struct made {
    struct hapt_schedule schedule;
    int submesh_of[MOST_CHUNKS], launches[MOST_CHUNKS];
    bool forward_only[MOST_CHUNKS];
    int edge_count;
    struct hapt_schedule_edge edge[MOST_EDGES]; /* any order */
    int relay_count;
    struct hapt_schedule_relay relay[MOST_RELAYS];
    struct hapt_instruction_list list[MOST_SUBMESHES];
    struct hapt_instruction instruction[MOST_SUBMESHES][MOST_INSTRUCTIONS], idle[1];
    int user[MOST_SUBMESHES][MOST_CHUNKS * MOST_MICROBATCHES]; /* [slot] 1 + chunk * most + microbatch; 0: free */
    int slot[MOST_CHUNKS][MOST_MICROBATCHES];
    int forwards[MOST_CHUNKS], backwards[MOST_CHUNKS], weights[MOST_CHUNKS];
    double forward_s[MOST_CHUNKS], backward_s[MOST_CHUNKS], weight_s[MOST_CHUNKS], comm_s[MOST_CHUNKS];
    double step_s[MOST_CHUNKS], edge_s[MOST_EDGES]; /* edge_s: as schedule.edges */
};

static bool is_local(const struct made *made, const struct hapt_schedule_edge *edge)
{
    return made->submesh_of[edge->from] == made->submesh_of[edge->to];
}

/* True if the chunk has an edge in a direction, in or out, inside its submesh or to another. */
static bool has_edge(const struct made *made, int chunk, bool backward, bool in, bool local)
{
    for (int e = 0; e < made->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &made->edge[e];
        if (edge->backward == backward && (in ? edge->to : edge->from) == chunk && is_local(made, edge) == local)
            return true;
    }
    return false;
}

static void append(struct made *made, enum hapt_instruction_kind kind, int chunk, int microbatch)
{
    struct hapt_instruction_list *list = &made->list[made->submesh_of[chunk]];
    list->instruction[list->count++] =
        (struct hapt_instruction){.kind = kind,
                                  .chunk = chunk,
                                  .microbatch = microbatch,
                                  .slot = microbatch < 0 ? -1 : made->slot[chunk][microbatch]};
}

/* A frozen chunk's slot may be taken when its readers on the submesh have computed; it was sent right behind its pass.
 */
static bool may_take(const struct made *made, int user)
{
    if (user == 0) return true;
    const int chunk = (user - 1) / MOST_MICROBATCHES, microbatch = (user - 1) % MOST_MICROBATCHES;
    if (!made->forward_only[chunk]) return false;
    for (int e = 0; e < made->edge_count; e++)
        if (made->edge[e].from == chunk && is_local(made, &made->edge[e]) &&
            made->forwards[made->edge[e].to] <= microbatch)
            return false;
    return true;
}

static void forward(struct made *made, int chunk)
{
    const int submesh = made->submesh_of[chunk], microbatch = made->forwards[chunk];
    int slot = 0;
    while (!may_take(made, made->user[submesh][slot])) slot++;
    made->user[submesh][slot] = 1 + chunk * MOST_MICROBATCHES + microbatch;
    made->slot[chunk][microbatch] = slot;
    if (slot + 1 > made->list[submesh].slots) made->list[submesh].slots = slot + 1;
    if (has_edge(made, chunk, false, true, false)) append(made, HAPT_INSTRUCTION_RECEIVE_FORWARD, chunk, microbatch);
    append(made, HAPT_INSTRUCTION_FORWARD, chunk, microbatch);
    if (has_edge(made, chunk, false, false, false)) append(made, HAPT_INSTRUCTION_SEND_FORWARD, chunk, microbatch);
    made->forwards[chunk]++;
}

/* Each pass that waits has a weight slot of its own. */
static void set_weight_slot(struct made *made, int chunk, int microbatch)
{
    struct hapt_instruction_list *list = &made->list[made->submesh_of[chunk]];
    list->weight_slots = made->schedule.chunk_count * made->schedule.microbatches;
    list->instruction[list->count - 1].weight_slot = chunk * made->schedule.microbatches + microbatch;
}

static void backward(struct made *made, int chunk)
{
    const int microbatch = made->backwards[chunk]++;
    if (has_edge(made, chunk, true, true, false)) append(made, HAPT_INSTRUCTION_RECEIVE_BACKWARD, chunk, microbatch);
    append(made, HAPT_INSTRUCTION_BACKWARD, chunk, microbatch);
    if (made->schedule.split) set_weight_slot(made, chunk, microbatch);
    if (has_edge(made, chunk, true, false, false)) append(made, HAPT_INSTRUCTION_SEND_BACKWARD, chunk, microbatch);
    if (!made->schedule.split) made->user[made->submesh_of[chunk]][made->slot[chunk][microbatch]] = 0;
}

static void weight(struct made *made, int chunk)
{
    const int microbatch = made->weights[chunk]++;
    append(made, HAPT_INSTRUCTION_WEIGHT, chunk, microbatch);
    set_weight_slot(made, chunk, microbatch);
    made->user[made->submesh_of[chunk]][made->slot[chunk][microbatch]] = 0;
}

/* Are the tensors of the pass made, and have local gradients room in their transfer slots? */
static bool is_ready(const struct made *made, int chunk, bool backward)
{
    const int *const done = backward ? made->backwards : made->forwards;
    if (backward && made->backwards[chunk] >= made->forwards[chunk]) return false;
    for (int e = 0; e < made->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &made->edge[e];
        if (edge->backward != backward) continue;
        if (edge->to == chunk && done[edge->from] <= done[chunk]) return false;
        if (edge->from == chunk && backward && is_local(made, edge) &&
            done[chunk] >= done[edge->to] + hapt_schedule_transfer_slots(&made->schedule))
            return false;
    }
    return true;
}

/* Submeshes are at two sites; messages of a submesh to the other site share a link. */
static void make_links(struct made *made, uint64_t *seed)
{
    int site[MOST_SUBMESHES];
    const bool shared = below(seed, 2);
    for (int s = 0; s < MOST_SUBMESHES; s++) site[s] = below(seed, 2);
    for (int e = 0; e < made->edge_count; e++) {
        const int from = site[made->submesh_of[made->edge[e].from]], to = site[made->submesh_of[made->edge[e].to]];
        made->edge[e].link = shared && from != to ? 1 + 2 * from + to : 0;
    }
}

/* A chunk passes received tensors on, at random. Some relays are inside a submesh, and have no effect. */
static void make_relays(struct made *made, uint64_t *seed)
{
    const bool some = below(seed, 2);
    made->relay_count = 0;
    for (int a = 0; a < made->edge_count && some; a++)
        for (int b = 0; b < made->edge_count; b++) {
            const struct hapt_schedule_edge *in = &made->edge[a], *out = &made->edge[b];
            if (in->backward || out->backward || in->to != out->from || below(seed, 3)) continue;
            if (made->relay_count < MOST_RELAYS)
                made->relay[made->relay_count++] = (struct hapt_schedule_relay){in->from, in->to, out->to};
        }
}

/* Neighbours exchange tensors; others at random. Frozen chunks take no gradients. */
static void make_edges(struct made *made, uint64_t *seed)
{
    const int chunks = made->schedule.chunk_count, skips = below(seed, 3);
    made->edge_count = 0;
    for (int from = 0; from < chunks; from++)
        for (int to = from + 1; to < chunks; to++) {
            if (to > from + 1 && (skips == 0 || below(seed, 2 + skips) > 0)) continue;
            made->edge[made->edge_count++] = (struct hapt_schedule_edge){from, to, false, 0};
            if (!made->forward_only[from])
                made->edge[made->edge_count++] = (struct hapt_schedule_edge){to, from, true, 0};
        }
    for (int e = made->edge_count - 1; e > 0; e--) {
        const int other = below(seed, e + 1);
        const struct hapt_schedule_edge kept = made->edge[e];
        made->edge[e] = made->edge[other];
        made->edge[other] = kept;
    }
}

static void make_costs(struct made *made, uint64_t *seed)
{
    for (int c = 0; c < MOST_CHUNKS; c++) {
        made->forward_s[c] = hapt_random_unit(seed);
        made->backward_s[c] = hapt_random_unit(seed);
        made->weight_s[c] = hapt_random_unit(seed);
        made->comm_s[c] = below(seed, 3) ? hapt_random_unit(seed) : 0;
        made->step_s[c] = hapt_random_unit(seed);
    }
    for (int e = 0; e < MOST_EDGES; e++) made->edge_s[e] = below(seed, 3) ? hapt_random_unit(seed) : 0;
}

static struct hapt_costs costs_of(const struct made *made)
{
    return (struct hapt_costs){.forward_s = made->forward_s,
                               .backward_s = made->backward_s,
                               .weight_s = made->weight_s,
                               .comm_s = made->comm_s,
                               .edge_s = made->edge_s,
                               .step_s = made->step_s,
                               .transfer_slots = hapt_schedule_transfer_slots(&made->schedule)};
}

static void make_chunks(struct made *made, uint64_t *seed)
{
    const int chunks = 1 + below(seed, MOST_CHUNKS), submeshes = 1 + below(seed, MOST_SUBMESHES);
    const int frozen = below(seed, 3) ? 0 : below(seed, chunks);
    *made = (struct made){.schedule = {.kind = HAPT_SCHEDULE_H1F1B,
                                       .microbatches = 1 + below(seed, MOST_MICROBATCHES),
                                       .chunk_count = chunks,
                                       .submesh_count = submeshes < chunks ? submeshes : chunks,
                                       .update_groups = 1 + below(seed, 3),
                                       .transfer_slots = below(seed, 2) ? 0 : 1 + below(seed, 6),
                                       .split = below(seed, 2),
                                       .forward_only = made->forward_only,
                                       .submesh_of = made->submesh_of,
                                       .launches = made->launches,
                                       .idle = {.count = 1, .instruction = made->idle},
                                       .list = made->list}};
    for (int c = 0; c < chunks; c++) {
        made->submesh_of[c] = c < made->schedule.submesh_count ? c : below(seed, made->schedule.submesh_count);
        made->forward_only[c] = c < frozen;
    }
    for (int s = 0; s < MOST_SUBMESHES; s++) made->list[s].instruction = made->instruction[s];
    make_edges(made, seed);
    make_links(made, seed);
    make_relays(made, seed);
    make_costs(made, seed);
}

/* Passes in a random order that respects their inputs and the order of microbatches. Only messages and slots can
 * deadlock such lists. `eager`: how much more likely forward passes are than backward ones. */
static void make(struct made *made, uint64_t *seed, struct hapt_arena *arena)
{
    make_chunks(made, seed);
    const struct hapt_schedule *schedule = &made->schedule;
    const int chunks = schedule->chunk_count, B = schedule->microbatches, eager = 1 + below(seed, 60);
    const struct hapt_schedule_options options = {
        .edge_count = made->edge_count, .edge = made->edge, .relay_count = made->relay_count, .relay = made->relay};
    CHECK_OK(hapt_schedule_connect(&made->schedule, &options, arena));
    int left = 0;
    for (int c = 0; c < chunks; c++) left += made->forward_only[c] ? B : (schedule->split ? 3 : 2) * B;
    while (left > 0) {
        const int c = below(seed, chunks), choice = below(seed, eager + 1);
        const bool trains = !made->forward_only[c];
        if (choice > 0 && made->forwards[c] < B && is_ready(made, c, false)) {
            forward(made, c);
            left--;
        } else if (choice == 0 && trains && made->backwards[c] < B && is_ready(made, c, true)) {
            backward(made, c);
            left--;
        } else if (schedule->split && trains && made->weights[c] < made->backwards[c] && below(seed, 2)) {
            weight(made, c);
            left--;
        }
    }
    for (int c = 0; c < chunks; c++)
        if (!made->forward_only[c]) append(made, HAPT_INSTRUCTION_REDUCE, c, -1);
    made->idle[0] = (struct hapt_instruction){.kind = HAPT_INSTRUCTION_NORM, .chunk = -1, .microbatch = -1, .slot = -1};
    for (int s = 0; s < schedule->submesh_count; s++) made->list[s].instruction[made->list[s].count++] = made->idle[0];
    for (int c = 0; c < chunks; c++)
        for (int g = 0; g < schedule->update_groups && !made->forward_only[c]; g++) {
            struct hapt_instruction_list *list = &made->list[made->submesh_of[c]];
            append(made, HAPT_INSTRUCTION_UPDATE, c, -1);
            list->instruction[list->count - 1].group = g;
        }
}

/* A transfer of one microbatch over an edge between submeshes. */
struct transfer {
    int edge, microbatch; /* edge: of made->edge */
    int submesh, send;    /* the instruction that hands it over */
    int before;           /* the transfer before it on the channel, -1: none */
    double end_s;         /* -1 until the end times of its predecessors are known */
};

struct dag {
    const struct made *made;
    double end[MOST_SUBMESHES][MOST_INSTRUCTIONS];
    int at[3][MOST_CHUNKS][MOST_MICROBATCHES]; /* instruction of FORWARD, BACKWARD */
    int transfer_of[MOST_EDGES][MOST_MICROBATCHES];
    int transfers;
    struct transfer transfer[MOST_EDGES * MOST_MICROBATCHES];
};

/* The cost of an edge, which schedule.edges lists in another order. */
static double edge_cost(const struct made *made, int edge)
{
    const struct hapt_schedule_edges *edges = &made->schedule.edges;
    for (int e = 0; e < edges->count; e++)
        if (edges->edge[e].from == made->edge[edge].from && edges->edge[e].to == made->edge[edge].to)
            return made->edge_s[e];
    return NAN;
}

/* Transfers in the order of the sends: those of one instruction to nearer chunks of the graph first. */
static void list_transfers(struct dag *dag)
{
    const struct made *made = dag->made;
    dag->transfers = 0;
    for (int s = 0; s < made->schedule.submesh_count; s++) {
        int last[MOST_LINKS + MOST_SUBMESHES];
        for (int k = 0; k < MOST_LINKS + MOST_SUBMESHES; k++) last[k] = -1;
        for (int i = 0; i < made->list[s].count; i++) {
            const struct hapt_instruction *at = &made->instruction[s][i];
            if (at->kind == HAPT_INSTRUCTION_FORWARD) dag->at[0][at->chunk][at->microbatch] = i;
            if (at->kind == HAPT_INSTRUCTION_BACKWARD) dag->at[1][at->chunk][at->microbatch] = i;
            const bool backward = at->kind == HAPT_INSTRUCTION_SEND_BACKWARD;
            if (at->kind != HAPT_INSTRUCTION_SEND_FORWARD && !backward) continue;
            for (int to = 0; to < made->schedule.chunk_count; to++)
                for (int e = 0; e < made->edge_count; e++) {
                    const struct hapt_schedule_edge *edge = &made->edge[e];
                    if (edge->from != at->chunk || edge->to != to || edge->backward != backward) continue;
                    if (is_local(made, edge)) continue;
                    int *before = &last[edge->link > 0 ? edge->link : MOST_LINKS + made->submesh_of[to]];
                    dag->transfer[dag->transfers] = (struct transfer){e, at->microbatch, s, i, *before, -1};
                    dag->transfer_of[e][at->microbatch] = *before = dag->transfers++;
                }
        }
    }
}

static bool wait_for(double *start_s, double end_s)
{
    if (end_s < 0) return false;
    *start_s = fmax(*start_s, end_s);
    return true;
}

/* The message of edge `in` has been sent over all edges that a relay names. */
static bool wait_for_relays(const struct dag *dag, const struct hapt_schedule_edge *in, int microbatch, double *start_s)
{
    const struct made *made = dag->made;
    for (int k = 0; k < made->relay_count; k++) {
        const struct hapt_schedule_relay *relay = &made->relay[k];
        if (relay->from != in->from || relay->via != in->to) continue;
        for (int e = 0; e < made->edge_count; e++) {
            const struct hapt_schedule_edge *out = &made->edge[e];
            if (out->backward || out->from != relay->via || out->to != relay->to || is_local(made, out)) continue;
            if (!wait_for(start_s, dag->transfer[dag->transfer_of[e][microbatch]].end_s)) return false;
        }
    }
    return true;
}

/* It is handed over, the transfer before is over, and the receiver has a free transfer slot. */
static bool time_transfer(struct dag *dag, struct transfer *transfer)
{
    const struct made *made = dag->made;
    const struct hapt_schedule_edge *edge = &made->edge[transfer->edge];
    const int freed = transfer->microbatch - hapt_schedule_transfer_slots(&made->schedule);
    double start_s = 0;
    if (!wait_for(&start_s, dag->end[transfer->submesh][transfer->send])) return false;
    if (transfer->before >= 0 && !wait_for(&start_s, dag->transfer[transfer->before].end_s)) return false;
    if (freed >= 0 &&
        !wait_for(&start_s, dag->end[made->submesh_of[edge->to]][dag->at[edge->backward][edge->to][freed]]))
        return false;
    if (freed >= 0 && !edge->backward && !wait_for_relays(dag, edge, freed, &start_s)) return false;
    transfer->end_s = start_s + edge_cost(made, transfer->edge);
    return true;
}

/* All transfers of a microbatch over the chunk's edges in a direction, in or out, are over. */
static bool wait_for_edges(const struct dag *dag, int chunk, bool backward, bool in, int microbatch, double *start_s)
{
    const struct made *made = dag->made;
    for (int e = 0; e < made->edge_count; e++) {
        const struct hapt_schedule_edge *edge = &made->edge[e];
        if (edge->backward != backward || (in ? edge->to : edge->from) != chunk || is_local(made, edge)) continue;
        if (!wait_for(start_s, dag->transfer[dag->transfer_of[e][microbatch]].end_s)) return false;
    }
    return true;
}

/* The messages of the microbatch that used the slot before have left it. */
static bool wait_for_slot(const struct dag *dag, int submesh, int index, double *start_s)
{
    const struct hapt_instruction *list = dag->made->instruction[submesh];
    for (int i = index - 1; i >= 0; i--)
        if (list[i].kind == HAPT_INSTRUCTION_FORWARD && list[i].slot == list[index].slot)
            return wait_for_edges(dag, list[i].chunk, false, false, list[i].microbatch, start_s);
    return true;
}

static bool time_instruction(struct dag *dag, int submesh, int index)
{
    const struct made *made = dag->made;
    const struct hapt_instruction *at = &made->instruction[submesh][index];
    const int c = at->chunk, m = at->microbatch;
    double start_s = 0, lasts_s = 0;
    if (index > 0 && !wait_for(&start_s, dag->end[submesh][index - 1])) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD && !wait_for_edges(dag, c, false, true, m, &start_s)) return false;
    if (at->kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD && !wait_for_edges(dag, c, true, true, m, &start_s)) return false;
    if (at->kind == HAPT_INSTRUCTION_FORWARD) {
        lasts_s = made->forward_s[c];
        if (!wait_for_slot(dag, submesh, index, &start_s)) return false;
    }
    if (at->kind == HAPT_INSTRUCTION_BACKWARD) {
        lasts_s = made->backward_s[c];
        if (m >= hapt_schedule_transfer_slots(&made->schedule) &&
            !wait_for_edges(dag, c, true, false, m - hapt_schedule_transfer_slots(&made->schedule), &start_s))
            return false;
    }
    if (at->kind == HAPT_INSTRUCTION_WEIGHT) lasts_s = made->weight_s[c];
    if (at->kind == HAPT_INSTRUCTION_UPDATE) lasts_s = made->step_s[c] / made->schedule.update_groups;
    dag->end[submesh][index] = start_s + lasts_s;
    return true;
}

/* Computes all end times that can be known, in any order. false: a cycle remains. */
static bool time_all(struct dag *dag)
{
    const struct hapt_schedule *schedule = &dag->made->schedule;
    bool moved = true, all = false;
    list_transfers(dag);
    for (int s = 0; s < MOST_SUBMESHES; s++)
        for (int i = 0; i < dag->made->list[s].count; i++) dag->end[s][i] = -1;
    while (moved) {
        moved = false;
        all = true;
        for (int s = schedule->submesh_count - 1; s >= 0; s--)
            for (int i = 0; i < dag->made->list[s].count; i++) {
                if (dag->end[s][i] >= 0) continue;
                all = false;
                if (!time_instruction(dag, s, i)) break; /* those behind it wait too */
                moved = true;
            }
        for (int t = 0; t < dag->transfers; t++)
            if (dag->transfer[t].end_s < 0 && time_transfer(dag, &dag->transfer[t])) moved = true;
    }
    return all;
}

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
