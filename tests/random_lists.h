/* Random instruction lists: several chunks on a submesh, skips, relays, frozen chunks, split backward passes. The
 * passes have a random order, so that messages and slots may deadlock. */
#ifndef HAPT_RANDOM_LISTS_H
#define HAPT_RANDOM_LISTS_H

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

#endif
