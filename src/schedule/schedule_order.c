/* The looped order of passes: Pfeife 3.4 with any placement of chunks (hapt_schedule_build). */
#include "order.h"

/* Counts through a submesh's passes of one kind: groups of microbatches; in a group, visits; in a visit, microbatches,
 * and for each of them its chunks. A visit is a run of neighbouring chunks on the submesh. */
struct counter {
    const struct hapt_schedule *schedule;
    int submesh, loop_batch, step; /* step 1: chunks ascend, -1: they descend */
    bool trained;                  /* only chunks that are trained */
    int group, first;              /* first: chunk of the visit */
    int chunk, microbatch;         /* the next pass; chunk outside the range: none */
};

static bool is_own(const struct counter *counter, int chunk)
{
    const struct hapt_schedule *schedule = counter->schedule;
    return chunk >= 0 && chunk < schedule->chunk_count && schedule->submesh_of[chunk] == counter->submesh &&
           !(counter->trained && schedule->forward_only[chunk]);
}

/* Starts the first visit at or behind a chunk. */
static void visit(struct counter *counter, int chunk)
{
    while (chunk >= 0 && chunk < counter->schedule->chunk_count && !is_own(counter, chunk)) chunk += counter->step;
    counter->first = counter->chunk = chunk;
}

static bool at_end(const struct counter *counter)
{
    return counter->chunk < 0 || counter->chunk >= counter->schedule->chunk_count;
}

static void begin_group(struct counter *counter, int group)
{
    counter->group = group;
    counter->microbatch = group * counter->loop_batch;
    counter->first = counter->chunk = -1;
    if (counter->microbatch < counter->schedule->microbatches)
        visit(counter, counter->step > 0 ? 0 : counter->schedule->chunk_count - 1);
}

static struct counter start(const struct hapt_schedule *schedule, int submesh, int loop_batch, int step, bool trained)
{
    struct counter counter = {schedule, submesh, loop_batch, step, trained, 0, 0, 0, 0};
    begin_group(&counter, 0);
    return counter;
}

static void next(struct counter *counter)
{
    const int first = counter->group * counter->loop_batch, B = counter->schedule->microbatches;
    const int end = first + counter->loop_batch < B ? first + counter->loop_batch : B;
    counter->chunk += counter->step;
    if (is_own(counter, counter->chunk)) return;
    const int behind = counter->chunk;
    counter->chunk = counter->first;
    if (++counter->microbatch < end) return;
    counter->microbatch = first;
    visit(counter, behind);
    if (at_end(counter)) begin_group(counter, counter->group + 1);
}

static void append(struct pass_list *list, enum hapt_instruction_kind kind, struct counter *counter)
{
    list->pass[list->count++] = (struct pass){kind, counter->chunk, counter->microbatch};
    next(counter);
}

/* The next forward of a trained chunk, after the forward-only passes in front of it. */
static void append_forward(struct pass_list *list, struct counter *forward)
{
    bool trained = false;
    while (!at_end(forward) && !trained) {
        trained = !forward->schedule->forward_only[forward->chunk];
        append(list, HAPT_INSTRUCTION_FORWARD, forward);
    }
}

void order_passes(const struct hapt_schedule *schedule, int loop_batch, const int *ahead, struct pass_list *list)
{
    for (int submesh = 0; submesh < schedule->submesh_count; submesh++) {
        struct counter forward = start(schedule, submesh, loop_batch, 1, false);
        struct counter backward = start(schedule, submesh, loop_batch, -1, true);
        for (int k = 0; k < ahead[submesh]; k++) append_forward(&list[submesh], &forward);
        while (!at_end(&backward)) {
            append(&list[submesh], HAPT_INSTRUCTION_BACKWARD, &backward);
            append_forward(&list[submesh], &forward);
        }
        while (!at_end(&forward)) append_forward(&list[submesh], &forward);
    }
}
