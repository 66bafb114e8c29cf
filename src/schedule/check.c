/* Checks that a schedule must pass before anything runs by it. */
#include "hapt/schedule.h"

#include <stdlib.h>

/* Progress of one (chunk, microbatch). */
enum { RECEIVED_FORWARD = 1, FORWARD = 2, SENT_FORWARD = 4, RECEIVED_BACKWARD = 8, BACKWARD = 16, SENT_BACKWARD = 32 };

/* One direction of the boundary behind a chunk. Microbatches cross it in order. */
struct transfer_queue {
    int sent, consumed; /* microbatches handed over; computed with by the receiver */
};

struct state {
    const struct hapt_schedule *schedule;
    unsigned char *done;          /* [chunk][microbatch] */
    int *owner;                   /* [slot] (chunk, microbatch) of the list at hand, -1: free */
    int *closed;                  /* [chunk] its latest once-per-step instruction, -1: none yet */
    int *updated;                 /* [chunk] parameter groups */
    struct transfer_queue *queue; /* [chunk][2] forward, backward */
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
    default: return 0;
    }
}

/* Has everything been done that the instruction needs, in its chunk and in a neighbour on the same submesh? */
static bool is_ready(const struct state *state, const struct hapt_instruction *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    const unsigned char *done = &state->done[cell_of(schedule, at->chunk, at->microbatch)];
    const bool first = at->chunk == 0, last = at->chunk == schedule->chunk_count - 1;
    const bool from_before = hapt_schedule_crosses(schedule, at->chunk - 1),
               behind = hapt_schedule_crosses(schedule, at->chunk);
    switch (at->kind) {
    case HAPT_INSTRUCTION_FORWARD:
        return first || (from_before ? *done & RECEIVED_FORWARD : *(done - schedule->microbatches) & FORWARD);
    case HAPT_INSTRUCTION_BACKWARD:
        if (!(*done & FORWARD)) return false;
        if (behind) return (*done & SENT_FORWARD) && (*done & RECEIVED_BACKWARD);
        return last || (*(done + schedule->microbatches) & BACKWARD);
    case HAPT_INSTRUCTION_SEND_FORWARD: return *done & FORWARD;
    case HAPT_INSTRUCTION_SEND_BACKWARD: return *done & BACKWARD;
    default: return true;
    }
}

/* A gradient for the chunk before, on the same submesh, waits in a transfer slot. */
static bool has_transfer_slot(const struct state *state, const struct hapt_instruction *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    const int before = at->microbatch - HAPT_TRANSFER_SLOTS;
    return at->chunk == 0 || before < 0 || hapt_schedule_crosses(schedule, at->chunk - 1) ||
           (state->done[cell_of(schedule, at->chunk - 1, before)] & BACKWARD);
}

/* The instructions of each microbatch of a chunk. */
static unsigned char bits_of_chunk(const struct hapt_schedule *schedule, int chunk)
{
    return (unsigned char)(FORWARD | BACKWARD |
                           (hapt_schedule_crosses(schedule, chunk - 1) ? RECEIVED_FORWARD | SENT_BACKWARD : 0) |
                           (hapt_schedule_crosses(schedule, chunk) ? SENT_FORWARD | RECEIVED_BACKWARD : 0));
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
        if (schedule->submesh_of[chunk] == submesh && state->closed[chunk] < 0)
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
    if (agreed != updates) return wrong(at, "only updates stand behind the agreement");
    if ((int)at->kind < *closed || ((int)at->kind == *closed && !updates))
        return wrong(at, "reduce and update are out of order");
    if (at->group != (updates ? (*updated)++ : 0)) return wrong(at, "it names another parameter group");
    *closed = (int)at->kind;
    return HAPT_OK;
}

static enum hapt_status check_list(const struct state *state, int submesh)
{
    const struct hapt_schedule *schedule = state->schedule;
    const struct hapt_instruction_list *list = &schedule->list[submesh];
    const int B = schedule->microbatches, last = schedule->chunk_count - 1;
    int common = -1; /* its latest instruction for all chunks */
    for (int slot = 0; slot < list->slots; slot++) state->owner[slot] = -1;
    for (int i = 0; i < list->count; i++) {
        const struct hapt_instruction *at = &list->instruction[i];
        if (at->kind == HAPT_INSTRUCTION_NORM || at->kind == HAPT_INSTRUCTION_EXCHANGE) {
            HAPT_TRY(check_common(state, submesh, at, &common));
            continue;
        }
        if (at->chunk < 0 || at->chunk > last || schedule->submesh_of[at->chunk] != submesh)
            return wrong(at, "its chunk belongs to another submesh");
        if (bit_of(at->kind) == 0) {
            HAPT_TRY(check_end(state, at, common == HAPT_INSTRUCTION_NORM));
            continue;
        }
        if (state->closed[at->chunk] >= 0) return wrong(at, "work after the gradients were reduced");
        if (at->microbatch < 0 || at->microbatch >= B) return wrong(at, "no such microbatch");
        if (at->slot < 0 || at->slot >= list->slots) return wrong(at, "no such slot");
        const int key = (int)cell_of(schedule, at->chunk, at->microbatch);
        unsigned char *done = &state->done[key];
        if (*done & bit_of(at->kind)) return wrong(at, "an instruction appears twice");
        if (!(bit_of(at->kind) & bits_of_chunk(schedule, at->chunk))) return wrong(at, "nothing crosses there");
        if (!is_ready(state, at)) return wrong(at, "an instruction comes too early");
        const bool computes = at->kind == HAPT_INSTRUCTION_FORWARD || at->kind == HAPT_INSTRUCTION_BACKWARD;
        if (computes && at->microbatch > 0 && !(done[-1] & bit_of(at->kind)))
            return wrong(at, "passes are out of microbatch order");
        if (at->kind == HAPT_INSTRUCTION_BACKWARD && !has_transfer_slot(state, at))
            return wrong(at, "its gradient would replace one that waits inside the submesh");
        *done |= bit_of(at->kind);
        const bool opens = at->kind == HAPT_INSTRUCTION_FORWARD && !hapt_schedule_crosses(schedule, at->chunk - 1);
        if (opens || at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD) {
            if (state->owner[at->slot] != -1) return wrong(at, "its slot is in use: the launch count is exceeded");
            state->owner[at->slot] = key;
        }
        if (state->owner[at->slot] != key && at->kind != HAPT_INSTRUCTION_SEND_BACKWARD)
            return wrong(at, "it uses the slot of another microbatch or chunk");
        if (at->kind == HAPT_INSTRUCTION_BACKWARD) state->owner[at->slot] = -1;
    }
    for (int chunk = 0; chunk <= last; chunk++)
        if (schedule->submesh_of[chunk] == submesh && state->updated[chunk] != schedule->update_groups)
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

/* Has the microbatch arrived? Not before it was sent, nor while as many wait as there are transfer slots. */
static bool has_arrived(const struct transfer_queue *queue, int microbatch)
{
    return microbatch < queue->sent && microbatch < queue->consumed + HAPT_TRANSFER_SLOTS;
}

/* Runs one instruction, as the simulator does; false: it waits. */
static bool run(struct state *state, const struct hapt_instruction *at)
{
    if (at->chunk < 0) return true; /* an agreement behind everything that may wait */
    const bool from_before = hapt_schedule_crosses(state->schedule, at->chunk - 1),
               behind = hapt_schedule_crosses(state->schedule, at->chunk);
    struct transfer_queue *queue = &state->queue[2 * at->chunk];       /* behind the chunk */
    struct transfer_queue *before = at->chunk > 0 ? queue - 2 : queue; /* in front of it */
    switch (at->kind) {
    case HAPT_INSTRUCTION_RECEIVE_FORWARD: return has_arrived(&before[0], at->microbatch);
    case HAPT_INSTRUCTION_RECEIVE_BACKWARD: return has_arrived(&queue[1], at->microbatch);
    case HAPT_INSTRUCTION_FORWARD: before[0].consumed += from_before; break;
    case HAPT_INSTRUCTION_SEND_FORWARD: queue[0].sent++; break;
    case HAPT_INSTRUCTION_BACKWARD:
        /* its gradient needs a transfer slot */
        if (from_before && at->microbatch >= HAPT_TRANSFER_SLOTS &&
            !has_arrived(&before[1], at->microbatch - HAPT_TRANSFER_SLOTS))
            return false;
        queue[1].consumed += behind;
        break;
    case HAPT_INSTRUCTION_SEND_BACKWARD: before[1].sent++; break;
    default: break;
    }
    return true;
}

/* Runs the lists against each other without time: every list advances while its messages are there. */
static enum hapt_status check_progress(struct state *state, int *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    bool moved = true, all = false;
    while (moved && !all) {
        moved = false;
        all = true;
        for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
            const struct hapt_instruction_list *list = &schedule->list[submesh];
            while (at[submesh] < list->count && run(state, &list->instruction[at[submesh]])) {
                at[submesh]++;
                moved = true;
            }
            all = all && at[submesh] == list->count;
        }
    }
    return all ? HAPT_OK : hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: the instruction lists deadlock");
}

static enum hapt_status check_all(struct state *state, int *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++) state->closed[chunk] = -1;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) HAPT_TRY(check_list(state, submesh));
    HAPT_TRY(check_complete(state));
    if (schedule->idle.count != 1 || schedule->idle.instruction[0].kind != HAPT_INSTRUCTION_NORM)
        return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: a rank without a chunk has to agree, and nothing else");
    return check_progress(state, at);
}

enum hapt_status hapt_schedule_check(const struct hapt_schedule *schedule)
{
    int slots = 1;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        const int most = schedule->microbatches * schedule->chunk_count;
        if (schedule->list[submesh].slots < 1 || schedule->list[submesh].slots > most)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: submesh %d has %d slots, at most %d are of use",
                             submesh, schedule->list[submesh].slots, most);
        if (schedule->list[submesh].slots > slots) slots = schedule->list[submesh].slots;
    }
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    struct state state = {
        .schedule = schedule,
        .done = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count * (size_t)schedule->microbatches, 1),
        .owner = hapt_arena_alloc(&scratch, (size_t)slots, sizeof(int)),
        .closed = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count, sizeof(int)),
        .updated = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count, sizeof(int)),
        .queue = hapt_arena_alloc(&scratch, 2 * (size_t)schedule->chunk_count, sizeof(struct transfer_queue)),
    };
    int *at = hapt_arena_alloc(&scratch, (size_t)schedule->submesh_count, sizeof *at);
    const enum hapt_status status = state.done && state.owner && state.closed && state.updated && state.queue && at
                                        ? check_all(&state, at)
                                        : HAPT_ERR_MEMORY;
    hapt_arena_release(&scratch);
    return status;
}
