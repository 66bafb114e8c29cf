/*
 * Adds the WEIGHT passes of a split backward by simulation. A submesh that waits runs its oldest pending one if half of
 * it fits into the wait. It also runs one before a forward that would need more slots than the device holds, and before
 * a backward that would need more weight slots. The others run at the end. Every decision is made when the start of the
 * next pass is known, which no WEIGHT of its submesh decides. So the order of evaluation does not matter, and the same
 * costs give the same lists.
 */
#include "order.h"

#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "play.h"

struct placer {
    int at;             /* next pass of the order */
    int pending;        /* first backward, among the passes placed so far, whose WEIGHT is not placed */
    int waiting;        /* backwards without WEIGHT */
    int open, capacity; /* slots in use; of the device */
    int weight_slots;   /* of the device */
    double clock_s;
    struct pass_list placed;
};

struct weights {
    struct play play;
    struct placer *placer;        /* [submesh] */
    const struct pass_list *list; /* [submesh] without WEIGHT */
};

/* Runs the oldest pending WEIGHT. */
static void run_weight(const struct weights *weights, struct placer *placer)
{
    const struct hapt_costs *costs = weights->play.costs;
    struct pass_list *placed = &placer->placed;
    while (placed->pass[placer->pending].kind != HAPT_INSTRUCTION_BACKWARD) placer->pending++;
    const struct pass *backward = &placed->pass[placer->pending++];
    placed->pass[placed->count++] = (struct pass){HAPT_INSTRUCTION_WEIGHT, backward->chunk, backward->microbatch};
    placer->clock_s += costs->weight_s ? costs->weight_s[backward->chunk] : 0;
    placer->waiting--;
    placer->open--;
}

static double pending_s(const struct weights *weights, const struct placer *placer)
{
    int pending = placer->pending;
    while (placer->placed.pass[pending].kind != HAPT_INSTRUCTION_BACKWARD) pending++;
    return weights->play.costs->weight_s ? weights->play.costs->weight_s[placer->placed.pass[pending].chunk] : 0;
}

/* When can the pass start? false: not yet known. */
static bool find_start(const struct weights *weights, const struct pass *pass, double *start_s)
{
    const int direction = pass->kind == HAPT_INSTRUCTION_BACKWARD;
    return play_receive(&weights->play, pass->chunk, direction, pass->microbatch, start_s) &&
           (!direction || play_backward_start(&weights->play, pass->chunk, pass->microbatch, start_s));
}

static void run_pass(const struct weights *weights, struct placer *placer, const struct pass *pass, double start_s)
{
    const struct play *play = &weights->play;
    const bool backward = pass->kind == HAPT_INSTRUCTION_BACKWARD;
    placer->clock_s = start_s + (backward ? play->costs->backward_s[pass->chunk] : play->costs->forward_s[pass->chunk]);
    play_consume(play, pass->chunk, backward, pass->microbatch, placer->clock_s);
    play_send(play, pass->chunk, backward, pass->microbatch, &placer->clock_s);
    placer->placed.pass[placer->placed.count++] = *pass;
    placer->waiting += backward;
    placer->open += !backward && !play->schedule->forward_only[pass->chunk];
}

/* True if a pass needs a slot that a WEIGHT has to free. */
static bool lacks_slot(const struct weights *weights, const struct placer *placer, const struct pass *pass)
{
    if (pass->kind == HAPT_INSTRUCTION_BACKWARD) return placer->waiting >= placer->weight_slots;
    return !weights->play.schedule->forward_only[pass->chunk] && placer->open >= placer->capacity;
}

static bool advance(struct weights *weights, int submesh)
{
    struct placer *placer = &weights->placer[submesh];
    const struct pass_list *list = &weights->list[submesh];
    const int from = placer->at;
    for (; placer->at < list->count; placer->at++) {
        const struct pass *pass = &list->pass[placer->at];
        double start_s = placer->clock_s;
        if (!find_start(weights, pass, &start_s)) break;
        while (placer->waiting > 0 &&
               (lacks_slot(weights, placer, pass) || start_s - placer->clock_s > 0.5 * pending_s(weights, placer))) {
            run_weight(weights, placer);
            start_s = placer->clock_s;
            find_start(weights, pass, &start_s);
        }
        run_pass(weights, placer, pass, start_s);
    }
    return placer->at > from;
}

static enum hapt_status run(struct weights *weights)
{
    const int submeshes = weights->play.schedule->submesh_count;
    for (bool moved = true; moved;) {
        moved = false;
        for (int s = 0; s < submeshes; s++) moved |= advance(weights, s);
        for (int s = submeshes - 2; s >= 0; s--) moved |= advance(weights, s);
    }
    for (int s = 0; s < submeshes; s++) {
        if (weights->placer[s].at < weights->list[s].count) return check_deadlock(weights->play.schedule);
        while (weights->placer[s].waiting > 0) run_weight(weights, &weights->placer[s]);
    }
    return HAPT_OK;
}

/* The slots that trained chunks may hold, of those of the device. */
static int trained_slots(const struct hapt_schedule *schedule, int submesh, int slots)
{
    for (int c = 0; c < schedule->chunk_count; c++)
        if (schedule->submesh_of[c] == submesh && schedule->forward_only[c]) slots -= schedule->launches[c];
    return slots;
}

/* The slots that the passes need at least: those of the schedule that is not split. */
static int least_slots(const struct hapt_schedule *schedule, const struct pass_list *list)
{
    int open = 0, most = 0;
    for (int i = 0; i < list->count; i++) {
        if (schedule->forward_only[list->pass[i].chunk]) continue;
        open += list->pass[i].kind == HAPT_INSTRUCTION_FORWARD ? 1 : -1;
        if (open > most) most = open;
    }
    return most;
}

enum hapt_status place_weights(const struct hapt_schedule *schedule, const struct hapt_costs *costs,
                               struct pass_list *list)
{
    const int *const pool = schedule->options.pool, *const weight_slots = schedule->options.weight_slots;
    struct weights weights = {.play = {.schedule = schedule,
                                       .costs = costs,
                                       .slots = costs->blocking ? 0 : costs->transfer_slots,
                                       .count = schedule->microbatches},
                              .list = list};
    const size_t submeshes = (size_t)schedule->submesh_count;
    char *block = NULL;
    size_t used = 0;
    for (int again = 0; again < 2; again++) { /* counts, then places */
        used = 0;
        weights.placer = play_carve(block, &used, submeshes * sizeof *weights.placer);
        play_place(&weights.play, block, &used);
        play_place_rest(&weights.play, block, &used);
        for (size_t s = 0; s < submeshes; s++) {
            struct pass *const room = play_carve(block, &used, (size_t)list[s].count * 2 * sizeof *room);
            if (!block) continue;
            weights.placer[s].placed.pass = room;
            const int least = least_slots(schedule, &list[s]);
            const int most = pool ? trained_slots(schedule, (int)s, pool[s]) : least;
            weights.placer[s].capacity = most > least ? most : least;
            weights.placer[s].weight_slots = weight_slots && weight_slots[s] > 0 ? weight_slots[s] : INT_MAX;
        }
        if (block) break;
        block = calloc(1, used);
        if (!block) return hapt_fail(HAPT_ERR_MEMORY, NULL, "host memory exhausted by a schedule");
    }
    for (int e = 0; e < schedule->edges.count; e++) weights.play.edge_s[e] = play_edge_s(schedule, costs, e);
    const enum hapt_status status = run(&weights);
    for (size_t s = 0; status == HAPT_OK && s < submeshes; s++) {
        list[s].count = weights.placer[s].placed.count;
        memcpy(list[s].pass, weights.placer[s].placed.pass, (size_t)list[s].count * sizeof *list[s].pass);
    }
    free(block);
    return status;
}
