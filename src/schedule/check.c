/* Checks that a schedule must pass before anything runs by it: each list alone. check_play.c plays them. */
#include "check.h"

#include <stdlib.h>

/* Progress of one (chunk, microbatch). */
enum {
    RECEIVED_FORWARD = 1,
    FORWARD = 2,
    SENT_FORWARD = 4,
    RECEIVED_BACKWARD = 8,
    BACKWARD = 16,
    SENT_BACKWARD = 32,
    WEIGHT = 64
};

struct state {
    const struct hapt_schedule *schedule;
    unsigned char *done; /* [chunk][microbatch] */
    int *owner;          /* [slot] (chunk, microbatch) of the list at hand, -1: free */
    int *weight_owner;   /* [weight slot] the same */
    int *closed;         /* [chunk] its latest once-per-step instruction, -1: none yet */
    int *updated;        /* [chunk] parameter groups */
    int *at;             /* [submesh] of check_play */
};

static size_t cell_of(const struct hapt_schedule *schedule, int chunk, int microbatch)
{
    return (size_t)chunk * (size_t)schedule->microbatches + (size_t)microbatch;
}

static enum hapt_status wrong(const struct hapt_instruction *at, const char *what)
{
    return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: chunk %d, microbatch %d: %s", at->chunk, at->microbatch, what);
}

static unsigned char bit_of(enum hapt_instruction_kind kind)
{
    switch (kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: return RECEIVED_FORWARD;
    case HAPT_INSTRUCTION_FORWARD: return FORWARD;
    case HAPT_INSTRUCTION_SEND_FORWARD: return SENT_FORWARD;
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return RECEIVED_BACKWARD;
    case HAPT_INSTRUCTION_BACKWARD: return BACKWARD;
    case HAPT_INSTRUCTION_SEND_BACKWARD: return SENT_BACKWARD;
    case HAPT_INSTRUCTION_WEIGHT: return WEIGHT;
    default: return 0;
    }
}

static unsigned char done_of(const struct state *state, int chunk, int microbatch)
{
    return state->done[cell_of(state->schedule, chunk, microbatch)];
}

/* The instructions of each microbatch of a chunk. */
static unsigned char bits_of_chunk(const struct hapt_schedule *schedule, int chunk)
{
    const bool trained = !schedule->forward_only[chunk];
    return (unsigned char)(FORWARD | (trained ? BACKWARD : 0) | (trained && schedule->split ? WEIGHT : 0) |
                           (hapt_schedule_receives(schedule, chunk, 0) ? RECEIVED_FORWARD : 0) |
                           (hapt_schedule_sends(schedule, chunk, 0) ? SENT_FORWARD : 0) |
                           (hapt_schedule_receives(schedule, chunk, 1) ? RECEIVED_BACKWARD : 0) |
                           (hapt_schedule_sends(schedule, chunk, 1) ? SENT_BACKWARD : 0));
}

/* Have the chunks before it on the same submesh computed the pass whose tensors come over edges of a direction? */
static bool has_local_inputs(const struct state *state, const struct hapt_instruction *at, int direction)
{
    const struct hapt_schedule_edges *edges = &state->schedule->edges;
    const int row = direction * state->schedule->chunk_count + at->chunk;
    for (int k = edges->in_start[row]; k < edges->in_start[row + 1]; k++) {
        const int e = edges->in[k];
        if (edges->channel_of[e] < 0 &&
            !(done_of(state, edges->edge[e].from, at->microbatch) & (direction ? BACKWARD : FORWARD)))
            return false;
    }
    return true;
}

/* Has everything been done that the instruction needs, in its chunk and in others of the same submesh? */
static bool is_ready(const struct state *state, const struct hapt_instruction *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    const unsigned char done = done_of(state, at->chunk, at->microbatch), needed = bits_of_chunk(schedule, at->chunk);
    const unsigned char before_backward = needed & (FORWARD | SENT_FORWARD | RECEIVED_BACKWARD);
    switch (at->kind) {
    case HAPT_INSTRUCTION_FORWARD:
        return (done & RECEIVED_FORWARD) == (needed & RECEIVED_FORWARD) && has_local_inputs(state, at, 0);
    case HAPT_INSTRUCTION_BACKWARD:
        return (done & before_backward) == before_backward && has_local_inputs(state, at, 1);
    case HAPT_INSTRUCTION_SEND_FORWARD:
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return done & FORWARD;
    case HAPT_INSTRUCTION_SEND_BACKWARD:
    case HAPT_INSTRUCTION_WEIGHT: return done & BACKWARD;
    default: return true;
    }
}

/* Gradients for a chunk on the same submesh wait in a transfer slot. */
static bool has_transfer_slot(const struct state *state, const struct hapt_instruction *at)
{
    const struct hapt_schedule_edges *edges = &state->schedule->edges;
    const int before = at->microbatch - hapt_schedule_transfer_slots(state->schedule),
              row = state->schedule->chunk_count + at->chunk;
    for (int e = edges->out_start[row]; before >= 0 && e < edges->out_start[row + 1]; e++)
        if (edges->channel_of[e] < 0 && !(done_of(state, edges->edge[e].to, before) & BACKWARD)) return false;
    return true;
}

/* May another microbatch take the slot of this one? It was sent, and its readers on the submesh have computed. */
static bool is_free(const struct state *state, int key)
{
    const struct hapt_schedule *schedule = state->schedule;
    const struct hapt_schedule_edges *edges = &schedule->edges;
    if (key < 0) return true;
    const int chunk = key / schedule->microbatches, microbatch = key % schedule->microbatches;
    if (!schedule->forward_only[chunk] || state->done[key] != bits_of_chunk(schedule, chunk)) return false;
    for (int e = edges->out_start[chunk]; e < edges->out_start[chunk + 1]; e++)
        if (edges->channel_of[e] < 0 && !(done_of(state, edges->edge[e].to, microbatch) & FORWARD)) return false;
    return true;
}

/* The exchange of tied gradients and the agreement of all ranks: once in a list, after the gradients of all its chunks.
 */
static enum hapt_status check_common(const struct state *state, int submesh, const struct hapt_instruction *at,
                                     int *common)
{
    const struct hapt_schedule *schedule = state->schedule;
    if (at->chunk != -1 || at->microbatch != -1 || at->slot != -1 || at->group != 0)
        return wrong(at, "exchange and agreement concern all chunks of a rank");
    if (*common >= (int)at->kind) return wrong(at, "exchange and agreement are out of order or appear twice");
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        if (schedule->submesh_of[chunk] == submesh && !schedule->forward_only[chunk] && state->closed[chunk] < 0)
            return wrong(at, "exchange or agreement comes before a gradient");
    *common = (int)at->kind;
    return HAPT_OK;
}

/* The instructions of a chunk behind its passes, in the order of their kinds; the groups of an update in rising order.
 */
static enum hapt_status check_end(const struct state *state, const struct hapt_instruction *at, bool agreed)
{
    const bool updates = at->kind == HAPT_INSTRUCTION_UPDATE;
    int *closed = &state->closed[at->chunk], *updated = &state->updated[at->chunk];
    if (at->microbatch != -1 || at->slot != -1) return wrong(at, "a once-per-step instruction names a microbatch");
    if (state->schedule->forward_only[at->chunk]) return wrong(at, "the chunk has no gradients");
    if (agreed != updates) return wrong(at, "only updates stand behind the agreement");
    if ((int)at->kind < *closed || ((int)at->kind == *closed && !updates))
        return wrong(at, "reduce and update are out of order");
    if (at->group != (updates ? (*updated)++ : 0)) return wrong(at, "it names another parameter group");
    *closed = (int)at->kind;
    return HAPT_OK;
}

/* The slot of an instruction: taken by the first one of a microbatch, held to the last pass. */
static enum hapt_status check_slot(const struct state *state, const struct hapt_instruction *at, int key)
{
    const struct hapt_schedule *schedule = state->schedule;
    const enum hapt_instruction_kind closes = schedule->split ? HAPT_INSTRUCTION_WEIGHT : HAPT_INSTRUCTION_BACKWARD;
    const bool receives = hapt_schedule_receives(schedule, at->chunk, 0);
    int *owner = &state->owner[at->slot];
    if (at->kind == (receives ? HAPT_INSTRUCTION_RECEIVE_FORWARD : HAPT_INSTRUCTION_FORWARD)) {
        if (!is_free(state, *owner)) return wrong(at, "its slot is in use: the launch count is exceeded");
        *owner = key;
    }
    if (*owner != key && (at->kind != HAPT_INSTRUCTION_SEND_BACKWARD || schedule->split))
        return wrong(at, "it uses the slot of another microbatch or chunk");
    if (at->kind == closes) *owner = -1;
    return HAPT_OK;
}

/* The weight slot of a split pass: taken by BACKWARD, held to WEIGHT. */
static enum hapt_status check_weight_slot(const struct state *state, const struct hapt_instruction *at, int slots,
                                          int key)
{
    const bool takes = at->kind == HAPT_INSTRUCTION_BACKWARD;
    if (!state->schedule->split || (!takes && at->kind != HAPT_INSTRUCTION_WEIGHT)) return HAPT_OK;
    if (at->weight_slot < 0 || at->weight_slot >= slots) return wrong(at, "no such weight slot");
    int *owner = &state->weight_owner[at->weight_slot];
    if (*owner != (takes ? -1 : key)) return wrong(at, "its weight slot belongs to another microbatch or chunk");
    *owner = takes ? key : -1;
    return HAPT_OK;
}

static enum hapt_status check_pass(const struct state *state, const struct hapt_instruction *at,
                                   const struct hapt_instruction_list *list)
{
    const int slots = list->slots;
    const struct hapt_schedule *schedule = state->schedule;
    const unsigned char bit = bit_of(at->kind);
    if (state->closed[at->chunk] >= 0) return wrong(at, "work after the gradients were reduced");
    if (at->microbatch < 0 || at->microbatch >= schedule->microbatches) return wrong(at, "no such microbatch");
    if (at->slot < 0 || at->slot >= slots) return wrong(at, "no such slot");
    const int key = (int)cell_of(schedule, at->chunk, at->microbatch);
    unsigned char *done = &state->done[key];
    if (*done & bit) return wrong(at, "an instruction appears twice");
    if (!(bit & bits_of_chunk(schedule, at->chunk)))
        return wrong(at, bit & (BACKWARD | WEIGHT) ? "the chunk has no such pass" : "nothing crosses there");
    if (!is_ready(state, at) && schedule->options.ahead)
        return hapt_fail(HAPT_ERR_USAGE, "start with more forwards before the first backward",
                         "schedule: chunk %d, microbatch %d: a backward pass comes before its forward pass", at->chunk,
                         at->microbatch);
    if (!is_ready(state, at)) return wrong(at, "an instruction comes too early");
    if ((bit & (FORWARD | BACKWARD | WEIGHT)) && at->microbatch > 0 && !(done[-1] & bit))
        return wrong(at, "passes are out of microbatch order");
    if (at->kind == HAPT_INSTRUCTION_BACKWARD && !has_transfer_slot(state, at))
        return hapt_fail(hapt_schedule_loops(schedule->kind) ? HAPT_ERR_USAGE : HAPT_ERR_INTERNAL,
                         "choose a smaller loop batch",
                         "schedule: chunk %d, microbatch %d: its gradient would replace one that waits inside the "
                         "submesh",
                         at->chunk, at->microbatch);
    *done |= bit;
    HAPT_TRY(check_weight_slot(state, at, list->weight_slots, key));
    return check_slot(state, at, key);
}

static enum hapt_status check_list(const struct state *state, int submesh)
{
    const struct hapt_schedule *schedule = state->schedule;
    const struct hapt_instruction_list *list = &schedule->list[submesh];
    const int chunks = schedule->chunk_count;
    int common = -1; /* its latest instruction for all chunks */
    for (int slot = 0; slot < list->slots; slot++) state->owner[slot] = -1;
    for (int slot = 0; slot < list->weight_slots; slot++) state->weight_owner[slot] = -1;
    for (int i = 0; i < list->count; i++) {
        const struct hapt_instruction *at = &list->instruction[i];
        if (at->kind == HAPT_INSTRUCTION_NORM || at->kind == HAPT_INSTRUCTION_EXCHANGE) {
            HAPT_TRY(check_common(state, submesh, at, &common));
            continue;
        }
        if (at->chunk < 0 || at->chunk >= chunks || schedule->submesh_of[at->chunk] != submesh)
            return wrong(at, "its chunk belongs to another submesh");
        HAPT_TRY(bit_of(at->kind) == 0 ? check_end(state, at, common == HAPT_INSTRUCTION_NORM)
                                       : check_pass(state, at, list));
    }
    for (int chunk = 0; chunk < chunks; chunk++)
        if (schedule->submesh_of[chunk] == submesh &&
            state->updated[chunk] != (schedule->forward_only[chunk] ? 0 : schedule->update_groups))
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: no update of chunk %d at the end", chunk);
    return HAPT_OK;
}

static enum hapt_status check_complete(const struct state *state)
{
    const struct hapt_schedule *schedule = state->schedule;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++) {
        const unsigned char all = bits_of_chunk(schedule, chunk);
        for (int microbatch = 0; microbatch < schedule->microbatches; microbatch++) {
            if (state->done[cell_of(schedule, chunk, microbatch)] != all)
                return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: chunk %d does not treat microbatch %d completely",
                                 chunk, microbatch);
        }
    }
    return HAPT_OK;
}

static enum hapt_status check_all(struct state *state)
{
    const struct hapt_schedule *schedule = state->schedule;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++) state->closed[chunk] = -1;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) HAPT_TRY(check_list(state, submesh));
    HAPT_TRY(check_complete(state));
    if (schedule->idle.count != 1 || schedule->idle.instruction[0].kind != HAPT_INSTRUCTION_NORM)
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: a rank without a chunk has to agree, and nothing else");
    bool ends;
    HAPT_TRY(check_play(schedule, state->at, &ends));
    return ends ? HAPT_OK : check_deadlock(schedule);
}

enum hapt_status hapt_schedule_check(const struct hapt_schedule *schedule)
{
    int slots = 1, weight_slots = 1;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        const int most = schedule->microbatches * schedule->chunk_count;
        if (schedule->list[submesh].slots < 1 || schedule->list[submesh].slots > most)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: submesh %d has %d slots, at most %d are of use",
                             submesh, schedule->list[submesh].slots, most);
        if (schedule->list[submesh].weight_slots < 0 || schedule->list[submesh].weight_slots > most)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: submesh %d has %d weight slots, at most %d are of use",
                             submesh, schedule->list[submesh].weight_slots, most);
        if (schedule->list[submesh].slots > slots) slots = schedule->list[submesh].slots;
        if (schedule->list[submesh].weight_slots > weight_slots) weight_slots = schedule->list[submesh].weight_slots;
    }
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    struct state state = {
        .schedule = schedule,
        .done = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count * (size_t)schedule->microbatches, 1),
        .owner = hapt_arena_alloc(&scratch, (size_t)slots, sizeof(int)),
        .weight_owner = hapt_arena_alloc(&scratch, (size_t)weight_slots, sizeof(int)),
        .closed = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count, sizeof(int)),
        .updated = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count, sizeof(int)),
        .at = hapt_arena_alloc(&scratch, (size_t)schedule->submesh_count, sizeof(int)),
    };
    const enum hapt_status status =
        state.done && state.owner && state.weight_owner && state.closed && state.updated && state.at ? check_all(&state)
                                                                                                     : HAPT_ERR_MEMORY;
    hapt_arena_release(&scratch);
    return status;
}
