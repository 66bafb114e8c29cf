/*
 * The critical path of a simulated step. Every start time is a maximum over earlier ends, so one of its predecessors
 * ends exactly then. The walk goes back from the end of the step to the predecessor that ends last. A steady step
 * (hapt_costs.steady) lasts from the agreement on the step before to its own.
 */
#include <math.h>
#include <stdint.h>

#include "play.h"

struct walk {
    const struct hapt_schedule *schedule;
    const struct hapt_costs *costs;
    const struct hapt_simulation *simulation;
    int **send;  /* [edge][microbatch] index of the instruction that hands it over */
    int **use;   /* [edge][microbatch] index of the pass of the receiver that uses it */
    int *before; /* [edge][microbatch] the message before it on its channel: edge * B + microbatch, -1: none */
};

/* A node of the walk: an instruction, or a transfer. */
struct node {
    int submesh, instruction; /* -1, -1: */
    int edge, microbatch;
};

static const struct hapt_instruction *instruction_of(const struct walk *walk, const struct node *node)
{
    return &walk->schedule->list[node->submesh].instruction[node->instruction];
}

static double end_of(const struct walk *walk, const struct node *node)
{
    return node->submesh >= 0 ? walk->simulation->time[node->submesh][node->instruction].end_s
                              : walk->simulation->arrived_s[node->edge][node->microbatch];
}

/* The predecessor that ends last; of several, the first that was considered. Without one, end_s is the end of the
 * updates with which the submesh begins: those that end earlier decide nothing. */
struct latest {
    struct node node;
    double end_s;
    bool found;
};

static void consider(const struct walk *walk, struct node node, struct latest *latest)
{
    const double end_s = end_of(walk, &node);
    if (end_s <= latest->end_s && (latest->found || latest->end_s > 0)) return;
    *latest = (struct latest){node, end_s, true};
}

/* The transfers of a microbatch over the edges of a chunk in a direction, to (`in`) or from it. Without overlap a
 * transfer decides only if it began after the receiver's request. */
static void consider_edges(const struct walk *walk, int chunk, int direction, bool in, int microbatch,
                           struct latest *latest)
{
    const struct hapt_schedule_edges *edges = &walk->schedule->edges;
    const double asked_s = latest->end_s;
    for (int e = 0; microbatch >= 0 && e < edges->count; e++) {
        const struct hapt_schedule_edge *edge = &edges->edge[e];
        if (edges->channel_of[e] < 0 || edge->backward != direction || (in ? edge->to : edge->from) != chunk) continue;
        const double begun_s = walk->simulation->arrived_s[e][microbatch] - play_edge_s(walk->schedule, walk->costs, e);
        if (!walk->costs->blocking || begun_s >= asked_s) consider(walk, (struct node){-1, -1, e, microbatch}, latest);
    }
}

/* The transfers from the slot of a FORWARD of the microbatch that used it before. */
static void consider_slot(const struct walk *walk, const struct node *node, struct latest *latest)
{
    const struct hapt_instruction *list = walk->schedule->list[node->submesh].instruction;
    int i = node->instruction - 1;
    while (i >= 0 && (list[i].kind != HAPT_INSTRUCTION_FORWARD || list[i].slot != list[node->instruction].slot)) i--;
    if (i >= 0) consider_edges(walk, list[i].chunk, 0, false, list[i].microbatch, latest);
}

/* EXCHANGE, NORM: the instruction before it of each submesh that meets there. */
static void consider_meeting(const struct walk *walk, const struct node *node, struct latest *latest)
{
    const struct hapt_schedule *schedule = walk->schedule;
    const enum hapt_instruction_kind kind = instruction_of(walk, node)->kind;
    const int first = schedule->submesh_of[0], last = schedule->submesh_of[schedule->chunk_count - 1];
    if (kind == HAPT_INSTRUCTION_EXCHANGE && node->submesh != first && node->submesh != last) return;
    for (int s = 0; s < schedule->submesh_count; s++) {
        if (s == node->submesh || (kind == HAPT_INSTRUCTION_EXCHANGE && s != first && s != last)) continue;
        for (int i = 1; i < schedule->list[s].count; i++)
            if (schedule->list[s].instruction[i].kind == kind) consider(walk, (struct node){s, i - 1, -1, -1}, latest);
    }
}

static void before_instruction(const struct walk *walk, const struct node *node, struct latest *latest)
{
    const struct hapt_instruction *at = instruction_of(walk, node);
    const int slots = walk->costs->blocking ? 0 : walk->costs->transfer_slots;
    if (node->instruction > 0) consider(walk, (struct node){node->submesh, node->instruction - 1, -1, -1}, latest);
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: consider_edges(walk, at->chunk, 0, true, at->microbatch, latest); break;
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: consider_edges(walk, at->chunk, 1, true, at->microbatch, latest); break;
    case HAPT_INSTRUCTION_FORWARD: consider_slot(walk, node, latest); break;
    case HAPT_INSTRUCTION_BACKWARD:
        if (slots > 0) consider_edges(walk, at->chunk, 1, false, at->microbatch - slots, latest);
        break;
    case HAPT_INSTRUCTION_EXCHANGE: consider_meeting(walk, node, latest); break;
    case HAPT_INSTRUCTION_NORM:
        if (walk->costs->agrees) consider_meeting(walk, node, latest);
        break;
    default: break;
    }
}

/* A transfer begins when its message is handed over, the channel is free and a transfer slot is free. The slot is free
 * when its earlier message was computed with and passed on. Without overlap a transfer is part of the sender's
 * instruction. */
static void before_transfer(const struct walk *walk, const struct node *node, struct latest *latest)
{
    const struct hapt_schedule *schedule = walk->schedule;
    const struct hapt_schedule_edge *edge = &schedule->edges.edge[node->edge];
    const int B = schedule->microbatches, before = walk->before[node->edge * B + node->microbatch];
    const int slots = walk->costs->blocking ? 0 : walk->costs->transfer_slots, freed = node->microbatch - slots;
    const int send = walk->send[node->edge][node->microbatch] - walk->costs->blocking;
    consider(walk, (struct node){schedule->submesh_of[edge->from], send, -1, -1}, latest);
    if (before >= 0) consider(walk, (struct node){-1, -1, before / B, before % B}, latest);
    if (slots == 0 || freed < 0) return;
    consider(walk, (struct node){schedule->submesh_of[edge->to], walk->use[node->edge][freed], -1, -1}, latest);
    const struct hapt_schedule_edges *edges = &schedule->edges;
    if (!edges->next_start) return;
    for (int k = edges->next_start[node->edge]; k < edges->next_start[node->edge + 1]; k++)
        consider(walk, (struct node){-1, -1, edges->next[k], freed}, latest);
}

/* Finds who hands over and who uses each message, and the order on the channels. */
static enum hapt_status prepare(struct walk *walk, struct hapt_arena *arena)
{
    const struct hapt_schedule *schedule = walk->schedule;
    const struct hapt_schedule_edges *edges = &schedule->edges;
    const int B = schedule->microbatches, chunks = schedule->chunk_count;
    int *last;
    HAPT_NEW(walk->send, arena, edges->count);
    HAPT_NEW(walk->use, arena, edges->count);
    HAPT_NEW(walk->before, arena, (int64_t)edges->count * B);
    HAPT_NEW(last, arena, edges->channel_count);
    for (int k = 0; k < edges->channel_count; k++) last[k] = -1;
    for (int e = 0; e < edges->count; e++) {
        HAPT_NEW(walk->send[e], arena, B);
        HAPT_NEW(walk->use[e], arena, B);
    }
    for (int s = 0; s < schedule->submesh_count; s++)
        for (int i = 0; i < schedule->list[s].count; i++) {
            const struct hapt_instruction *at = &schedule->list[s].instruction[i];
            const bool sends = at->kind == HAPT_INSTRUCTION_SEND_FORWARD || at->kind == HAPT_INSTRUCTION_SEND_BACKWARD;
            const bool uses = at->kind == HAPT_INSTRUCTION_FORWARD || at->kind == HAPT_INSTRUCTION_BACKWARD;
            const int row =
                chunks * (at->kind == HAPT_INSTRUCTION_SEND_BACKWARD || at->kind == HAPT_INSTRUCTION_BACKWARD) +
                at->chunk;
            for (int e = 0; sends && e < edges->count; e++) {
                const int channel = edges->channel_of[e];
                if (channel < 0 || chunks * edges->edge[e].backward + edges->edge[e].from != row) continue;
                walk->send[e][at->microbatch] = i;
                walk->before[e * B + at->microbatch] = last[channel];
                last[channel] = e * B + at->microbatch;
            }
            for (int e = 0; uses && e < edges->count; e++)
                if (chunks * edges->edge[e].backward + edges->edge[e].to == row) walk->use[e][at->microbatch] = i;
        }
    return HAPT_OK;
}

static int last_of(const struct walk *walk, int submesh, enum hapt_instruction_kind kind)
{
    const struct hapt_instruction_list *list = &walk->schedule->list[submesh];
    int i = list->count - 1;
    while (i >= 0 && list->instruction[i].kind != kind) i--;
    return i;
}

static struct node last_node(const struct walk *walk)
{
    struct node node = {0, 0, -1, -1};
    double end_s = -1;
    if (walk->costs->steady) return (struct node){0, last_of(walk, 0, HAPT_INSTRUCTION_NORM), -1, -1};
    for (int s = 0; s < walk->schedule->submesh_count; s++) {
        const int last = walk->schedule->list[s].count - 1;
        if (walk->simulation->time[s][last].end_s <= end_s) continue;
        node = (struct node){s, last, -1, -1};
        end_s = walk->simulation->time[s][last].end_s;
    }
    return node;
}

static void append(struct hapt_critical_path *path, const struct node *node, double start_s, double end_s)
{
    if (end_s > start_s)
        path->part[path->count++] =
            (struct hapt_critical_part){node->submesh, node->instruction, node->edge, node->microbatch, start_s, end_s};
}

/* The updates of the step before, which end at end_s; 0: there are none. They come first. */
static void append_updates(const struct walk *walk, int submesh, double end_s, struct hapt_critical_path *path)
{
    double at_s = end_s;
    for (int i = last_of(walk, submesh, HAPT_INSTRUCTION_UPDATE); i >= 0 && at_s > 0; i--) {
        const struct hapt_instruction *update = &walk->schedule->list[submesh].instruction[i];
        if (update->kind != HAPT_INSTRUCTION_UPDATE) continue;
        const double begin_s = fmax(0, at_s - walk->costs->step_s[update->chunk] / walk->schedule->update_groups);
        append(path, &(struct node){submesh, i, -1, -1}, begin_s < 1e-9 * end_s ? 0 : begin_s, at_s);
        at_s = begin_s < 1e-9 * end_s ? 0 : begin_s;
    }
}

static void walk_back(const struct walk *walk, struct hapt_critical_path *path)
{
    struct latest latest = {last_node(walk), 0, true};
    while (latest.found) {
        const struct node here = latest.node;
        latest = (struct latest){here, 0, false};
        if (walk->costs->steady && here.submesh >= 0 && here.instruction == 0)
            latest.end_s = walk->simulation->time[here.submesh][0].start_s;
        if (here.submesh >= 0)
            before_instruction(walk, &here, &latest);
        else
            before_transfer(walk, &here, &latest);
        double start_s = latest.end_s;
        const bool first = !latest.found && here.submesh >= 0;
        if (first) start_s = walk->simulation->time[here.submesh][here.instruction].start_s;
        append(path, &here, start_s, end_of(walk, &here));
        if (first) append_updates(walk, here.submesh, start_s, path);
    }
    for (int k = 0; k < path->count / 2; k++) {
        const struct hapt_critical_part kept = path->part[k];
        path->part[k] = path->part[path->count - 1 - k];
        path->part[path->count - 1 - k] = kept;
    }
}

enum hapt_status hapt_simulate_critical_path(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                                             const struct hapt_simulation *simulation, struct hapt_arena *arena,
                                             struct hapt_critical_path *path)
{
    struct walk walk = {.schedule = schedule, .costs = costs, .simulation = simulation};
    int64_t most = (int64_t)schedule->edges.count * schedule->microbatches;
    for (int s = 0; s < schedule->submesh_count; s++) most += schedule->list[s].count;
    *path = (struct hapt_critical_path){0};
    HAPT_NEW(path->part, arena, most);
    HAPT_TRY(prepare(&walk, arena));
    walk_back(&walk, path);
    return HAPT_OK;
}
