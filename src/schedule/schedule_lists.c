/* Instruction lists from the order of passes: messages, slots, and what stands behind all passes. */
#include "order.h"

struct maker {
    const struct hapt_schedule *schedule;
    int submesh;
    struct hapt_instruction_list *list;
    int *forwards;    /* [chunk_count] forward passes so far */
    int *freed;       /* [chunk_count] forward-only: microbatches whose slots are free */
    int *slot;        /* [chunk_count][microbatches] */
    int *ring;        /* [slots] free slots, in the order in which they became free */
    int taken, open;  /* slots taken so far; in use */
    int returned;     /* slots made free so far, without those free at first */
    int *weight_ring; /* [weight_slots] the same for weight slots */
    int weights_taken, weights_returned;
    int *weight_slot; /* [chunk_count][microbatches] */
};

static int *slot_of(const struct maker *maker, int chunk, int microbatch)
{
    return &maker->slot[(size_t)chunk * (size_t)maker->schedule->microbatches + (size_t)microbatch];
}

/* The free slots at first are 0 .. slots - 1. The one free for longest is taken, so that sends have ended. */
static void take_slot(struct maker *maker, int chunk, int microbatch)
{
    const int slots = maker->list->slots;
    *slot_of(maker, chunk, microbatch) = maker->ring ? maker->ring[maker->taken % slots] : 0;
    maker->taken++;
    maker->open++;
}

static void free_slot(struct maker *maker, int chunk, int microbatch)
{
    if (maker->ring) maker->ring[maker->returned % maker->list->slots] = *slot_of(maker, chunk, microbatch);
    maker->returned++;
    maker->open--;
}

/* Has each reader of a forward-only chunk on this submesh computed with the microbatch? */
static bool is_read(const struct maker *maker, int chunk, int microbatch)
{
    const struct hapt_schedule_edges *edges = &maker->schedule->edges;
    for (int e = edges->out_start[chunk]; e < edges->out_start[chunk + 1]; e++)
        if (edges->channel_of[e] < 0 && maker->forwards[edges->edge[e].to] <= microbatch) return false;
    return true;
}

/* A forward-only chunk has `launches` slots: the oldest is free for the next microbatch, if its readers are done. */
static void free_forward_only(struct maker *maker, int next_chunk)
{
    const struct hapt_schedule *schedule = maker->schedule;
    for (int chunk = 0; chunk < schedule->chunk_count && schedule->forward_only[chunk]; chunk++) {
        if (schedule->submesh_of[chunk] != maker->submesh) continue;
        const int kept = chunk == next_chunk ? schedule->launches[chunk] - 1 : schedule->launches[chunk];
        while (maker->freed[chunk] + kept < maker->forwards[chunk] && is_read(maker, chunk, maker->freed[chunk]))
            free_slot(maker, chunk, maker->freed[chunk]++);
    }
}

/* The slots that the passes need. */
static void count_slots(struct maker *maker, const struct pass_list *order)
{
    const struct hapt_schedule *schedule = maker->schedule;
    const enum hapt_instruction_kind closes = schedule->split ? HAPT_INSTRUCTION_WEIGHT : HAPT_INSTRUCTION_BACKWARD;
    int most = 1, waiting = 0;
    maker->list->weight_slots = 0;
    for (int i = 0; i < order->count; i++) {
        const struct pass *pass = &order->pass[i];
        waiting += pass->kind == HAPT_INSTRUCTION_BACKWARD ? 1 : pass->kind == HAPT_INSTRUCTION_WEIGHT ? -1 : 0;
        if (schedule->split && waiting > maker->list->weight_slots) maker->list->weight_slots = waiting;
        if (pass->kind == HAPT_INSTRUCTION_FORWARD) {
            free_forward_only(maker, pass->chunk);
            take_slot(maker, pass->chunk, pass->microbatch);
            maker->forwards[pass->chunk]++;
        }
        if (pass->kind == closes) free_slot(maker, pass->chunk, pass->microbatch);
        if (maker->open > most) most = maker->open;
    }
    maker->list->slots = most;
}

static void append(struct hapt_instruction_list *list, enum hapt_instruction_kind kind, int chunk, int microbatch,
                   int slot)
{
    list->instruction[list->count++] =
        (struct hapt_instruction){.kind = kind, .step = 0, .chunk = chunk, .microbatch = microbatch, .slot = slot};
}

/* Gives a split backward pass the weight slot that is free for longest, until its WEIGHT. */
static void hold_weight_slot(struct maker *maker, const struct pass *pass)
{
    const int slots = maker->list->weight_slots;
    int *slot =
        &maker->weight_slot[(size_t)pass->chunk * (size_t)maker->schedule->microbatches + (size_t)pass->microbatch];
    if (!maker->schedule->split || pass->kind == HAPT_INSTRUCTION_FORWARD) return;
    if (pass->kind == HAPT_INSTRUCTION_BACKWARD)
        *slot = maker->weight_ring[maker->weights_taken++ % slots];
    else
        maker->weight_ring[maker->weights_returned++ % slots] = *slot;
    maker->list->instruction[maker->list->count - 1].weight_slot = *slot;
}

static void append_pass(struct maker *maker, const struct pass *pass)
{
    const struct hapt_schedule *schedule = maker->schedule;
    const int direction = pass->kind == HAPT_INSTRUCTION_BACKWARD, c = pass->chunk, m = pass->microbatch;
    if (pass->kind == HAPT_INSTRUCTION_FORWARD) {
        free_forward_only(maker, c);
        take_slot(maker, c, m);
        maker->forwards[c]++;
    }
    const int slot = *slot_of(maker, c, m);
    if (pass->kind == HAPT_INSTRUCTION_WEIGHT) {
        append(maker->list, pass->kind, c, m, slot);
        hold_weight_slot(maker, pass);
        free_slot(maker, c, m);
        return;
    }
    if (hapt_schedule_receives(schedule, c, direction))
        append(maker->list, direction ? HAPT_INSTRUCTION_RECEIVE_BACKWARD : HAPT_INSTRUCTION_RECEIVE_FORWARD, c, m,
               slot);
    append(maker->list, pass->kind, c, m, slot);
    hold_weight_slot(maker, pass);
    if (hapt_schedule_sends(schedule, c, direction))
        append(maker->list, direction ? HAPT_INSTRUCTION_SEND_BACKWARD : HAPT_INSTRUCTION_SEND_FORWARD, c, m, slot);
    if (direction && !schedule->split) free_slot(maker, c, m);
}

/* The instructions of a submesh behind all passes. */
static void append_end(const struct hapt_schedule *schedule, int submesh, bool tied, struct hapt_instruction_list *list)
{
    for (int c = 0; c < schedule->chunk_count; c++)
        if (schedule->submesh_of[c] == submesh && !schedule->forward_only[c])
            append(list, HAPT_INSTRUCTION_REDUCE, c, -1, -1);
    if (tied) append(list, HAPT_INSTRUCTION_EXCHANGE, -1, -1, -1);
    append(list, HAPT_INSTRUCTION_NORM, -1, -1, -1);
    for (int c = 0; c < schedule->chunk_count; c++) {
        if (schedule->submesh_of[c] != submesh || schedule->forward_only[c]) continue;
        for (int group = 0; group < schedule->update_groups; group++) {
            append(list, HAPT_INSTRUCTION_UPDATE, c, -1, -1);
            list->instruction[list->count - 1].group = group;
        }
    }
}

static enum hapt_status make_list(struct maker *maker, const struct pass_list *order, bool tied,
                                  struct hapt_arena *arena)
{
    const struct hapt_schedule *schedule = maker->schedule;
    struct hapt_instruction_list *list = maker->list;
    const int chunks = schedule->chunk_count;
    for (int c = 0; c < chunks; c++) maker->forwards[c] = maker->freed[c] = 0;
    list->count = 0;
    count_slots(maker, order);
    HAPT_NEW(maker->ring, arena, list->slots);
    for (int slot = 0; slot < list->slots; slot++) maker->ring[slot] = slot;
    HAPT_NEW(maker->weight_ring, arena, list->weight_slots);
    for (int slot = 0; slot < list->weight_slots; slot++) maker->weight_ring[slot] = slot;
    maker->weights_taken = 0;
    maker->weights_returned = list->weight_slots;
    maker->returned = list->slots; /* the slots that are free at first were "returned" in their order */
    maker->taken = maker->open = 0;
    for (int c = 0; c < chunks; c++) maker->forwards[c] = maker->freed[c] = 0;
    int ends = 2;
    for (int c = 0; c < chunks; c++)
        ends += schedule->submesh_of[c] == maker->submesh ? 1 + schedule->update_groups : 0;
    HAPT_NEW(list->instruction, arena, 3 * (size_t)order->count + (size_t)ends);
    for (int i = 0; i < order->count; i++) append_pass(maker, &order->pass[i]);
    append_end(schedule, maker->submesh, tied, list);
    return HAPT_OK;
}

enum hapt_status make_lists(struct hapt_schedule *schedule, const struct pass_list *order, bool tied,
                            struct hapt_arena *arena)
{
    struct maker maker = {.schedule = schedule};
    const size_t chunks = (size_t)schedule->chunk_count;
    HAPT_NEW(maker.forwards, arena, 2 * chunks);
    HAPT_NEW(maker.slot, arena, chunks * (size_t)schedule->microbatches);
    HAPT_NEW(maker.weight_slot, arena, schedule->split ? chunks * (size_t)schedule->microbatches : 0);
    maker.freed = maker.forwards + chunks;
    for (int s = 0; s < schedule->submesh_count; s++) {
        maker.submesh = s;
        maker.list = &schedule->list[s];
        maker.ring = NULL;
        maker.taken = maker.open = maker.returned = 0;
        HAPT_TRY(make_list(&maker, &order[s], tied, arena));
    }
    return HAPT_OK;
}
