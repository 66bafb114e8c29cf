/* What a schedule must fulfil before anything runs by it. */
#include "hapt/schedule.h"

#include <stdlib.h>

/* Progress of one (chunk, microbatch). */
enum { RECEIVED_FORWARD = 1, FORWARD = 2, SENT_FORWARD = 4, RECEIVED_BACKWARD = 8, BACKWARD = 16, SENT_BACKWARD = 32 };

struct state {
    const struct hapt_schedule *schedule;
    unsigned char *done; /* [chunk][microbatch] */
    int *owner;          /* [slot] microbatch of the list at hand, -1: free */
};

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

/* What must be done before, inside the chunk. */
static unsigned char needs(const struct hapt_schedule *schedule, const struct hapt_instruction *at)
{
    const bool first = at->chunk == 0, last = at->chunk == schedule->chunk_count - 1;
    switch (at->kind) {
    case HAPT_INSTRUCTION_FORWARD: return first ? 0 : RECEIVED_FORWARD;
    case HAPT_INSTRUCTION_SEND_FORWARD: return FORWARD;
    case HAPT_INSTRUCTION_BACKWARD: return (unsigned char)(FORWARD | (last ? 0 : SENT_FORWARD | RECEIVED_BACKWARD));
    case HAPT_INSTRUCTION_SEND_BACKWARD: return BACKWARD;
    default: return 0;
    }
}

/* True when the peer's message is there, or no message is needed. */
static bool arrived(const struct state *state, const struct hapt_instruction *at)
{
    const int peer = at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD    ? at->chunk - 1
                     : at->kind == HAPT_INSTRUCTION_RECEIVE_BACKWARD ? at->chunk + 1
                                                                     : -1;
    if (peer < 0) return true;
    const unsigned char sent = at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD ? SENT_FORWARD : SENT_BACKWARD;
    return (state->done[(size_t)peer * (size_t)state->schedule->microbatches + (size_t)at->microbatch] & sent) != 0;
}

static enum hapt_status check_list(const struct state *state, int submesh)
{
    const struct hapt_schedule *schedule = state->schedule;
    const struct hapt_instruction_list *list = &schedule->list[submesh];
    const int B = schedule->microbatches, last = schedule->chunk_count - 1;
    int closing = -1;
    for (int slot = 0; slot < list->slots; slot++) state->owner[slot] = -1;
    for (int i = 0; i < list->count; i++) {
        const struct hapt_instruction *at = &list->instruction[i];
        if (at->chunk < 0 || at->chunk > last || schedule->submesh_of[at->chunk] != submesh)
            return wrong(at, "it belongs to another submesh");
        if (bit_of(at->kind) == 0) {
            if (at->microbatch != -1 || at->slot != -1)
                return wrong(at, "a once-per-step instruction names a microbatch");
            if ((int)at->kind <= closing) return wrong(at, "reduce, exchange and update are out of order");
            closing = (int)at->kind;
            continue;
        }
        if (closing >= 0) return wrong(at, "work after the gradients were reduced");
        if (at->microbatch < 0 || at->microbatch >= B) return wrong(at, "no such microbatch");
        if (at->slot < 0 || at->slot >= list->slots) return wrong(at, "no such slot");
        unsigned char *done = &state->done[(size_t)at->chunk * (size_t)B + (size_t)at->microbatch];
        if (*done & bit_of(at->kind)) return wrong(at, "an instruction stands twice");
        if ((*done & needs(schedule, at)) != needs(schedule, at)) return wrong(at, "an instruction comes too early");
        const bool computes = at->kind == HAPT_INSTRUCTION_FORWARD || at->kind == HAPT_INSTRUCTION_BACKWARD;
        if (computes && at->microbatch > 0 && !(done[-1] & bit_of(at->kind)))
            return wrong(at, "passes are out of microbatch order");
        *done |= bit_of(at->kind);
        const bool opens = at->kind == HAPT_INSTRUCTION_FORWARD && at->chunk == 0;
        if (opens || at->kind == HAPT_INSTRUCTION_RECEIVE_FORWARD) {
            if (state->owner[at->slot] != -1) return wrong(at, "its slot is in use: the launch count is exceeded");
            state->owner[at->slot] = at->microbatch;
        }
        if (state->owner[at->slot] != at->microbatch && at->kind != HAPT_INSTRUCTION_SEND_BACKWARD)
            return wrong(at, "it works in another microbatch's slot");
        if (at->kind == HAPT_INSTRUCTION_BACKWARD) state->owner[at->slot] = -1;
    }
    if (closing != HAPT_INSTRUCTION_UPDATE) return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: no update at the end");
    return HAPT_OK;
}

static enum hapt_status check_complete(const struct state *state)
{
    const struct hapt_schedule *schedule = state->schedule;
    const int last = schedule->chunk_count - 1;
    for (int chunk = 0; chunk <= last; chunk++) {
        const unsigned char all =
            (unsigned char)(FORWARD | BACKWARD | (chunk > 0 ? RECEIVED_FORWARD | SENT_BACKWARD : 0) |
                            (chunk < last ? SENT_FORWARD | RECEIVED_BACKWARD : 0));
        for (int microbatch = 0; microbatch < schedule->microbatches; microbatch++) {
            if (state->done[(size_t)chunk * (size_t)schedule->microbatches + (size_t)microbatch] != all)
                return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: chunk %d does not treat microbatch %d completely",
                                 chunk, microbatch);
        }
    }
    return HAPT_OK;
}

/* Plays the lists against each other without time: every list advances while its messages are there. */
static enum hapt_status check_progress(const struct state *state, int *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    bool moved = true, all = false;
    while (moved && !all) {
        moved = false;
        all = true;
        for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
            const struct hapt_instruction_list *list = &schedule->list[submesh];
            while (at[submesh] < list->count && arrived(state, &list->instruction[at[submesh]])) {
                const struct hapt_instruction *next = &list->instruction[at[submesh]++];
                if (next->microbatch >= 0)
                    state->done[(size_t)next->chunk * (size_t)schedule->microbatches + (size_t)next->microbatch] |=
                        bit_of(next->kind);
                moved = true;
            }
            all = all && at[submesh] == list->count;
        }
    }
    return all ? HAPT_OK : hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: the instruction lists wait for each other");
}

static enum hapt_status check_all(struct state *state, int *at)
{
    const struct hapt_schedule *schedule = state->schedule;
    const size_t cells = (size_t)schedule->chunk_count * (size_t)schedule->microbatches;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) HAPT_TRY(check_list(state, submesh));
    HAPT_TRY(check_complete(state));
    for (size_t cell = 0; cell < cells; cell++) state->done[cell] = 0;
    return check_progress(state, at);
}

enum hapt_status hapt_schedule_check(const struct hapt_schedule *schedule)
{
    int slots = 1;
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        if (schedule->list[submesh].slots < 1 || schedule->list[submesh].slots > schedule->microbatches)
            return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: submesh %d has %d slots for %d microbatches", submesh,
                             schedule->list[submesh].slots, schedule->microbatches);
        if (schedule->list[submesh].slots > slots) slots = schedule->list[submesh].slots;
    }
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    struct state state = {
        .schedule = schedule,
        .done = hapt_arena_alloc(&scratch, (size_t)schedule->chunk_count * (size_t)schedule->microbatches, 1),
        .owner = hapt_arena_alloc(&scratch, (size_t)slots, sizeof(int)),
    };
    int *at = hapt_arena_alloc(&scratch, (size_t)schedule->submesh_count, sizeof *at);
    const enum hapt_status status = state.done && state.owner && at ? check_all(&state, at) : HAPT_ERR_MEMORY;
    hapt_arena_release(&scratch);
    return status;
}
