/*
 * Plays the lists of a schedule against each other without time: every list advances while its messages are there. It
 * knows the transfer slots of edges, the order of messages on a channel, and slots that wait for their sends. The code
 * is independent of the simulator's (play.h), so that each tests the other.
 */
#include "check.h"

#include <stdint.h>

/* An edge between submeshes. */
struct transfers {
    int sent, arrived, consumed; /* microbatches */
};

struct channel {
    int count, next;
    int *edge; /* [] of its messages, in the order in which they were sent */
};

struct play {
    const struct hapt_schedule *schedule;
    struct transfers *transfers; /* [edge] */
    struct channel *channel;
    int *at;     /* [submesh] next instruction */
    int **owner; /* [submesh][slot] 1 + (chunk, microbatch) that used it last; 0: none */
};

/* Microbatches of an edge that need no transfer slot any more: the receiver has computed with them and has passed them
 * on. */
static int released(const struct play *play, int e)
{
    const struct hapt_schedule_edges *edges = &play->schedule->edges;
    int least = play->transfers[e].consumed;
    if (!edges->next_start) return least;
    for (int k = edges->next_start[e]; k < edges->next_start[e + 1]; k++)
        if (play->transfers[edges->next[k]].arrived < least) least = play->transfers[edges->next[k]].arrived;
    return least;
}

/* A message arrives unless one before it on the channel, or itself, has no transfer slot at the receiver. Returns true
 * if one did. */
static bool carry(struct play *play, struct channel *channel)
{
    const int first = channel->next;
    for (; channel->next < channel->count; channel->next++) {
        const int e = channel->edge[channel->next];
        if (play->transfers[e].arrived >= released(play, e) + hapt_schedule_transfer_slots(play->schedule)) break;
        play->transfers[e].arrived++;
    }
    return channel->next > first;
}

/* The k-th edge to (`in`) or from a chunk in a direction; -1: it has fewer, or the edge stays on the submesh. */
static int edge_of(const struct hapt_schedule *schedule, int chunk, int direction, bool in, int k)
{
    const struct hapt_schedule_edges *edges = &schedule->edges;
    const int row = direction * schedule->chunk_count + chunk;
    const int e = in ? edges->in[edges->in_start[row] + k] : edges->out_start[row] + k;
    return edges->channel_of[e] < 0 ? -1 : e;
}

static int edges_of(const struct hapt_schedule *schedule, int chunk, int direction, bool in)
{
    const int *const start = in ? schedule->edges.in_start : schedule->edges.out_start;
    const int row = direction * schedule->chunk_count + chunk;
    return start[row + 1] - start[row];
}

static bool has_arrived(const struct play *play, int chunk, int direction, bool in, int microbatch)
{
    for (int k = 0; k < edges_of(play->schedule, chunk, direction, in); k++) {
        const int e = edge_of(play->schedule, chunk, direction, in, k);
        if (e >= 0 && play->transfers[e].arrived <= microbatch) return false;
    }
    return true;
}

static void send(struct play *play, int chunk, int direction)
{
    for (int k = 0; k < edges_of(play->schedule, chunk, direction, false); k++) {
        const int e = edge_of(play->schedule, chunk, direction, false, k);
        if (e < 0) continue;
        struct channel *channel = &play->channel[play->schedule->edges.channel_of[e]];
        channel->edge[channel->count++] = e;
        carry(play, channel);
    }
}

static void consume(struct play *play, int chunk, int direction)
{
    for (int k = 0; k < edges_of(play->schedule, chunk, direction, true); k++) {
        const int e = edge_of(play->schedule, chunk, direction, true, k);
        if (e < 0) continue;
        play->transfers[e].consumed++;
        carry(play, &play->channel[play->schedule->edges.channel_of[e]]);
    }
}

static bool take_slot(struct play *play, int submesh, const struct hapt_instruction *at)
{
    const int B = play->schedule->microbatches;
    int *owner = &play->owner[submesh][at->slot];
    const int key = *owner - 1;
    if (key >= 0 && !has_arrived(play, key / B, 0, false, key % B)) return false;
    *owner = 1 + at->chunk * B + at->microbatch;
    return true;
}

/* Runs one instruction, as the simulator does; false: it waits. */
static bool run(struct play *play, int submesh, const struct hapt_instruction *at)
{
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: return has_arrived(play, at->chunk, 0, true, at->microbatch);
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return has_arrived(play, at->chunk, 1, true, at->microbatch);
    case HAPT_INSTRUCTION_SEND_FORWARD: send(play, at->chunk, 0); return true;
    case HAPT_INSTRUCTION_SEND_BACKWARD: send(play, at->chunk, 1); return true;
    case HAPT_INSTRUCTION_FORWARD:
        if (!take_slot(play, submesh, at)) return false;
        consume(play, at->chunk, 0);
        return true;
    case HAPT_INSTRUCTION_BACKWARD: /* its gradients need transfer slots */
        if (at->microbatch >= hapt_schedule_transfer_slots(play->schedule) &&
            !has_arrived(play, at->chunk, 1, false, at->microbatch - hapt_schedule_transfer_slots(play->schedule)))
            return false;
        consume(play, at->chunk, 1);
        return true;
    default: return true; /* agreements are behind everything that may wait */
    }
}

static bool play_all(struct play *play)
{
    const struct hapt_schedule *schedule = play->schedule;
    bool moved = true, all = false;
    while (moved && !all) {
        moved = false;
        all = true;
        /* Messages that were passed on have freed slots. */
        for (int k = 0; k < schedule->edges.channel_count; k++) moved |= carry(play, &play->channel[k]);
        for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
            const struct hapt_instruction_list *list = &schedule->list[submesh];
            while (play->at[submesh] < list->count && run(play, submesh, &list->instruction[play->at[submesh]])) {
                play->at[submesh]++;
                moved = true;
            }
            all = all && play->at[submesh] == list->count;
        }
    }
    return all;
}

static enum hapt_status play_with(const struct hapt_schedule *schedule, int *at, struct hapt_arena *scratch, bool *ends)
{
    const struct hapt_schedule_edges *edges = &schedule->edges;
    struct play play = {.schedule = schedule, .at = at};
    HAPT_NEW(play.transfers, scratch, edges->count);
    HAPT_NEW(play.channel, scratch, edges->channel_count);
    HAPT_NEW(play.owner, scratch, schedule->submesh_count);
    for (int k = 0; k < edges->channel_count; k++) {
        int its = 0;
        for (int e = 0; e < edges->count; e++) its += edges->channel_of[e] == k;
        HAPT_NEW(play.channel[k].edge, scratch, its * (int64_t)schedule->microbatches);
    }
    for (int s = 0; s < schedule->submesh_count; s++) HAPT_NEW(play.owner[s], scratch, schedule->list[s].slots);
    *ends = play_all(&play);
    return HAPT_OK;
}

enum hapt_status check_play(const struct hapt_schedule *schedule, int *at, bool *ends)
{
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    const enum hapt_status status = play_with(schedule, at, &scratch, ends);
    hapt_arena_release(&scratch);
    return status;
}

enum hapt_status check_deadlock(const struct hapt_schedule *schedule)
{
    return hapt_fail(hapt_schedule_loops(schedule->kind) ? HAPT_ERR_USAGE : HAPT_ERR_INTERNAL,
                     "choose another loop batch, or more microbatches", "schedule: the instruction lists deadlock");
}
