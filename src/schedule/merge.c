/*
 * Plays the lists of the chunks against each other, with a pass per submesh and tick. A submesh with several chunks
 * takes the first pass that is ready: backward before forward, because it frees a slot; the later chunk of two forwards
 * and the earlier of two backwards, because it is nearer to the end of its microbatch. A chunk alone keeps its list.
 */
#include "merge.h"

#include <stdlib.h>

/* A chunk's progress: microbatches whose pass ended in an earlier tick. */
struct progress {
    int at; /* next instruction of its list */
    int forwards, backwards;
    int slots; /* of its submesh before its own */
};

struct merge {
    struct hapt_schedule *schedule;
    const struct hapt_instruction_list *part;
    struct progress *now, *next; /* [chunk_count] before and after this tick */
};

/* The chunk's next pass. A list is a sequence of passes with a RECEIVE before or a SEND behind them. */
static const struct hapt_instruction *next_pass(const struct merge *merge, int chunk)
{
    const struct hapt_instruction_list *list = &merge->part[chunk];
    for (int i = merge->now[chunk].at; i < list->count; i++)
        if (list->instruction[i].kind == HAPT_INSTRUCTION_FORWARD ||
            list->instruction[i].kind == HAPT_INSTRUCTION_BACKWARD)
            return &list->instruction[i];
    return NULL;
}

/* Is there a transfer slot for the gradients? They may be for any chunk before. On another submesh the receiver has as
 * many slots again. */
static bool has_transfer_slot(const struct merge *merge, const struct hapt_instruction *pass)
{
    const struct hapt_schedule *schedule = merge->schedule;
    for (int chunk = pass->chunk - 1; chunk >= 0; chunk--) {
        const bool here = schedule->submesh_of[chunk] == schedule->submesh_of[pass->chunk];
        const int room = here ? HAPT_TRANSFER_SLOTS : 2 * HAPT_TRANSFER_SLOTS;
        if (pass->microbatch >= merge->now[chunk].backwards + room) return false;
    }
    return true;
}

static bool is_ready(const struct merge *merge, const struct hapt_instruction *pass)
{
    if (pass->kind == HAPT_INSTRUCTION_FORWARD)
        return pass->chunk == 0 || pass->microbatch < merge->now[pass->chunk - 1].forwards;
    const bool last = pass->chunk == merge->schedule->chunk_count - 1;
    return pass->microbatch < merge->now[pass->chunk].forwards &&
           (last || pass->microbatch < merge->now[pass->chunk + 1].backwards) && has_transfer_slot(merge, pass);
}

/* The pass that the submesh runs in this tick; NULL: none is ready. */
static const struct hapt_instruction *choose(const struct merge *merge, int submesh)
{
    const struct hapt_instruction *best = NULL;
    for (int chunk = 0; chunk < merge->schedule->chunk_count; chunk++) {
        if (merge->schedule->submesh_of[chunk] != submesh) continue;
        const struct hapt_instruction *pass = next_pass(merge, chunk);
        if (!pass || !is_ready(merge, pass)) continue;
        if (!best || best->kind == HAPT_INSTRUCTION_FORWARD) best = pass;
    }
    return best;
}

/* Appends the chunk's list up to and including its next pass and what it sends. */
static void take(struct merge *merge, const struct hapt_instruction *pass)
{
    const struct hapt_instruction_list *part = &merge->part[pass->chunk];
    struct hapt_instruction_list *list = &merge->schedule->list[merge->schedule->submesh_of[pass->chunk]];
    struct progress *progress = &merge->next[pass->chunk];
    const int before = progress->at;
    progress->at = (int)(pass - part->instruction) + 1;
    if (progress->at < part->count && (part->instruction[progress->at].kind == HAPT_INSTRUCTION_SEND_FORWARD ||
                                       part->instruction[progress->at].kind == HAPT_INSTRUCTION_SEND_BACKWARD))
        progress->at++;
    for (int i = before; i < progress->at; i++) {
        list->instruction[list->count] = part->instruction[i];
        list->instruction[list->count++].slot += progress->slots;
    }
    progress->forwards += pass->kind == HAPT_INSTRUCTION_FORWARD;
    progress->backwards += pass->kind == HAPT_INSTRUCTION_BACKWARD;
}

static enum hapt_status play(struct merge *merge)
{
    const struct hapt_schedule *schedule = merge->schedule;
    int64_t left = 2 * (int64_t)schedule->chunk_count * schedule->microbatches;
    while (left > 0) {
        const int64_t before = left;
        for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
            const struct hapt_instruction *pass = choose(merge, submesh);
            if (!pass) continue;
            take(merge, pass);
            left--;
        }
        if (left == before) return hapt_fail(HAPT_ERR_INTERNAL, NULL, "schedule: the chunks' lists deadlock");
        for (int chunk = 0; chunk < schedule->chunk_count; chunk++) merge->now[chunk] = merge->next[chunk];
    }
    return HAPT_OK;
}

/* A submesh of one chunk needs no play. */
static bool copy_lists(struct merge *merge)
{
    struct hapt_schedule *schedule = merge->schedule;
    if (schedule->submesh_count < schedule->chunk_count) return false;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++)
        for (int i = 0; i < merge->part[chunk].count; i++)
            schedule->list[chunk].instruction[schedule->list[chunk].count++] = merge->part[chunk].instruction[i];
    return true;
}

enum hapt_status schedule_merge(struct hapt_schedule *schedule, const struct hapt_instruction_list *part)
{
    struct merge merge = {.schedule = schedule, .part = part};
    if (copy_lists(&merge)) return HAPT_OK;
    const size_t chunks = (size_t)schedule->chunk_count;
    struct progress *progress = calloc(2 * chunks, sizeof *progress);
    if (!progress) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted by a schedule");
    merge.now = progress;
    merge.next = progress + chunks;
    for (int chunk = 0; chunk < schedule->chunk_count; chunk++) {
        for (int before = 0; before < chunk; before++)
            if (schedule->submesh_of[before] == schedule->submesh_of[chunk])
                merge.now[chunk].slots += schedule->launches[before];
        merge.next[chunk] = merge.now[chunk];
    }
    const enum hapt_status status = play(&merge);
    free(progress);
    return status;
}
