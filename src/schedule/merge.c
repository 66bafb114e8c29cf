/*
 * The order of a submesh with several chunks under GPipe, 1F1B, eager 1F1B or H-1F1B: the chunks' own lists, played
 * against each other with a pass per submesh and tick. A submesh takes the first pass that is ready. A backward goes
 * before a forward, because it frees a slot. The later chunk of two forwards and the earlier of two backwards goes
 * first, because it is nearer to the end of its microbatch. A message is sent only when its receiver has a transfer
 * slot. So the lists end for any placement of the chunks and any launch counts, which the closed form of
 * schedule_order.c does not promise.
 *
 * With messages past the next chunk, large launch counts may need more of them on their way than there are transfer
 * slots. Then the lists do not end, and schedule.c lowers the launch counts.
 */
#include "order.h"

#include <stdint.h>
#include <stdlib.h>

/* A chunk's own list: `launches` forwards, then a backward and a forward in turn. Its progress, before and after this
 * tick. */
struct progress {
    int forwards, backwards;
};

struct merge {
    const struct hapt_schedule *schedule;
    struct progress *now, *next; /* [chunk_count] */
};

/* The next pass of the chunk's own list; false: none is left. */
static bool next_pass(const struct merge *merge, int chunk, struct pass *pass)
{
    const struct hapt_schedule *schedule = merge->schedule;
    const struct progress *now = &merge->now[chunk];
    const int B = schedule->microbatches;
    const bool ahead = schedule->forward_only[chunk] || now->forwards < now->backwards + schedule->launches[chunk];
    if (now->forwards < B && ahead)
        *pass = (struct pass){HAPT_INSTRUCTION_FORWARD, chunk, now->forwards};
    else
        *pass = (struct pass){HAPT_INSTRUCTION_BACKWARD, chunk, now->backwards};
    return pass->kind == HAPT_INSTRUCTION_FORWARD || (!schedule->forward_only[chunk] && now->backwards < B);
}

static int passes_of(const struct merge *merge, int chunk, int direction)
{
    return direction ? merge->now[chunk].backwards : merge->now[chunk].forwards;
}

/* True if the receiver of an edge has a transfer slot for a microbatch. The earlier microbatch of the slot must have
 * been computed with and passed on. */
static bool edge_has_slot(const struct merge *merge, int e, int microbatch)
{
    const struct hapt_schedule_edges *edges = &merge->schedule->edges;
    const struct hapt_schedule_edge *edge = &edges->edge[e];
    const int before = microbatch - hapt_schedule_transfer_slots(merge->schedule);
    if (before < 0) return true;
    if (before >= passes_of(merge, edge->to, edge->backward)) return false;
    for (int k = edges->next_start ? edges->next_start[e] : 0; edges->next_start && k < edges->next_start[e + 1]; k++)
        if (!edge_has_slot(merge, edges->next[k], before)) return false;
    return true;
}

/* Has each receiver a transfer slot? Then no message of the pass can hold up others on its channel. Activations stay in
 * their slot on the same submesh. */
static bool has_transfer_slot(const struct merge *merge, const struct pass *pass, int direction)
{
    const struct hapt_schedule_edges *edges = &merge->schedule->edges;
    const int at = direction * merge->schedule->chunk_count + pass->chunk;
    for (int e = edges->out_start[at]; e < edges->out_start[at + 1]; e++) {
        const bool waits = direction || edges->channel_of[e] >= 0;
        if (waits && !edge_has_slot(merge, e, pass->microbatch)) return false;
    }
    return true;
}

static bool is_ready(const struct merge *merge, const struct pass *pass)
{
    const struct hapt_schedule_edges *edges = &merge->schedule->edges;
    const int direction = pass->kind == HAPT_INSTRUCTION_BACKWARD;
    const int at = direction * merge->schedule->chunk_count + pass->chunk;
    if (direction && pass->microbatch >= merge->now[pass->chunk].forwards) return false;
    for (int k = edges->in_start[at]; k < edges->in_start[at + 1]; k++)
        if (pass->microbatch >= passes_of(merge, edges->edge[edges->in[k]].from, direction)) return false;
    return has_transfer_slot(merge, pass, direction);
}

/* The pass that the submesh runs in this tick; false: none is ready. */
static bool choose(const struct merge *merge, int submesh, struct pass *best)
{
    bool found = false;
    for (int chunk = 0; chunk < merge->schedule->chunk_count; chunk++) {
        struct pass pass;
        if (merge->schedule->submesh_of[chunk] != submesh) continue;
        if (!next_pass(merge, chunk, &pass) || !is_ready(merge, &pass)) continue;
        if (!found || best->kind == HAPT_INSTRUCTION_FORWARD) *best = pass;
        found = true;
    }
    return found;
}

/* *ends becomes false if no submesh can go on. */
static void play(struct merge *merge, struct pass_list *list, bool *ends)
{
    const struct hapt_schedule *schedule = merge->schedule;
    int64_t left = 0;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        left += (schedule->forward_only[chunk] ? 1 : 2) * (int64_t)schedule->microbatches;
    while (left > 0) {
        const int64_t before = left;
        for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
            struct pass pass;
            if (!choose(merge, submesh, &pass)) continue;
            list[submesh].pass[list[submesh].count++] = pass;
            merge->next[pass.chunk].forwards += pass.kind == HAPT_INSTRUCTION_FORWARD;
            merge->next[pass.chunk].backwards += pass.kind == HAPT_INSTRUCTION_BACKWARD;
            left--;
        }
        if (left == before) {
            *ends = false;
            return;
        }
        for (int chunk = 0; chunk < schedule->chunk_count; chunk++) merge->now[chunk] = merge->next[chunk];
    }
}

enum hapt_status merge_passes(const struct hapt_schedule *schedule, struct pass_list *list, bool *ends)
{
    struct merge merge = {.schedule = schedule};
    struct progress *progress = calloc(2 * (size_t)schedule->chunk_count, sizeof *progress);
    if (!progress) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted by a schedule");
    merge.now = progress;
    merge.next = progress + schedule->chunk_count;
    *ends = true;
    play(&merge, list, ends);
    free(progress);
    return HAPT_OK;
}
