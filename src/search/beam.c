/* The beam that the searches of plans share. */
#include "beam.h"

#include <math.h>
#include <stdlib.h>

#include "hapt/arena.h"
#include "hapt/env.h"

enum { MOST_ROUNDS = 40 };

static double entry_s(const struct beam *beam, int entry)
{
    return *beam->rules->step_s(beam->entry[entry]);
}

/* The step of the slowest entry of a full beam; INFINITY: there is room. */
static double worst_s(const struct beam *beam)
{
    return beam->count < BEAM_WIDTH ? INFINITY : entry_s(beam, beam->count - 1);
}

enum hapt_status beam_add_move(struct beam *beam, struct beam_move move)
{
    if (beam->move_count == beam->move_room) {
        const int room = 2 * beam->move_room + 256;
        struct beam_move *wider = realloc(beam->move, (size_t)room * sizeof *wider);
        if (!wider)
            return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
        beam->move = wider;
        beam->move_room = room;
    }
    beam->move[beam->move_count++] = move;
    return HAPT_OK;
}

/* Inserts a candidate; false: it is in the beam, or not better than the worst entry. */
static bool insert(struct beam *beam, void *candidate)
{
    const struct beam_rules *rules = beam->rules;
    const double step_s = *rules->step_s(candidate);
    int at = beam->count;
    if (!(step_s < worst_s(beam))) return false;
    for (int e = 0; e < beam->count; e++)
        if (rules->same(beam->entry[e], candidate)) return false;
    while (at > 0 && step_s < entry_s(beam, at - 1)) at--;
    const int last = beam->count < BEAM_WIDTH ? beam->count++ : BEAM_WIDTH - 1;
    void *const room = beam->entry[last];
    for (int e = last; e > at; e--) beam->entry[e] = beam->entry[e - 1];
    beam->entry[at] = room;
    rules->copy(room, candidate);
    return true;
}

static bool apply(struct beam *beam, const struct beam_move *move)
{
    beam->rules->copy(beam->trial, beam->entry[move->entry]);
    return beam->rules->apply(beam, move);
}

/* Puts a step among the shortest ones, [BEAM_WIDTH] in ascending order. */
static void keep_shortest(double shortest_s[BEAM_WIDTH], double step_s)
{
    int at = BEAM_WIDTH - 1;
    if (!(step_s < shortest_s[at])) return;
    for (; at > 0 && step_s < shortest_s[at - 1]; at--) shortest_s[at] = shortest_s[at - 1];
    shortest_s[at] = step_s;
}

/* The step of the trial, priced or known. */
static enum hapt_status price_trial(struct beam *beam, struct beam_key key, double limit_s, double most_s,
                                    double *step_s)
{
    if (beam_memo_find(beam->memo, key, limit_s, most_s, step_s)) return HAPT_OK;
    HAPT_TRY(beam->rules->price(beam, limit_s, most_s));
    *step_s = *beam->rules->step_s(beam->trial);
    return beam_memo_add(beam->memo, key, limit_s, most_s, beam->rules->lower_s(beam->trial), *step_s);
}

/* This rank's share of the moves: by keys, so that a candidate always belongs to the rank that priced it before. Only
 * the shortest ones of a round may enter the beam. */
static enum hapt_status price_share(struct beam *beam)
{
    const double limit_s = fmin(worst_s(beam), beam->rules->worth * entry_s(beam, 0));
    double shortest_s[BEAM_WIDTH];
    for (int k = 0; k < BEAM_WIDTH; k++) shortest_s[k] = worst_s(beam);
    for (int k = 0; k < beam->move_count; k++) {
        beam->step_s[k] = INFINITY;
        if (!apply(beam, &beam->move[k])) continue;
        const struct beam_key key = beam->rules->key(beam->trial);
        if (key.high % (uint64_t)beam->size != (uint64_t)beam->rank) continue;
        HAPT_TRY(price_trial(beam, key, limit_s, shortest_s[BEAM_WIDTH - 1], &beam->step_s[k]));
        keep_shortest(shortest_s, beam->step_s[k]);
    }
    return HAPT_OK;
}

static enum hapt_status list_moves(struct beam *beam)
{
    beam->move_count = 0;
    for (int e = 0; e < beam->count; e++) HAPT_TRY(beam->rules->list(beam, e));
    return HAPT_OK;
}

/* Prices all moves of the entries; every rank gets all prices. Collective. */
static enum hapt_status price_moves(struct beam *beam, struct hapt_arena *scratch)
{
    enum hapt_status status = list_moves(beam);
    beam->step_s = hapt_arena_alloc(scratch, (size_t)beam->move_count + 1, sizeof *beam->step_s);
    if (status == HAPT_OK && !beam->step_s) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = price_share(beam);
    HAPT_TRY(hapt_env_agree(beam->comm, status));
    if (beam->size > 1)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, beam->step_s, beam->move_count, MPI_DOUBLE, MPI_MIN, beam->comm));
    for (int k = 0; k < beam->move_count; k++)
        *beam->work += beam->rules->move_work(beam, beam->entry[beam->move[k].entry], isfinite(beam->step_s[k]));
    return HAPT_OK;
}

/* Puts the best moves into the beam; true: an entry is new. A move refers to an entry of the round's start, so all are
 * applied before an entry changes. */
static bool take_best(struct beam *beam)
{
    bool changed = false;
    int count = 0;
    for (; count < BEAM_WIDTH; count++) {
        int best = -1;
        for (int k = 0; k < beam->move_count; k++)
            if (beam->step_s[k] < (best < 0 ? worst_s(beam) : beam->step_s[best])) best = k;
        if (best < 0) break;
        apply(beam, &beam->move[best]);
        *beam->rules->step_s(beam->trial) = beam->step_s[best];
        beam->step_s[best] = INFINITY;
        beam->rules->copy(beam->found[count], beam->trial);
    }
    for (int k = 0; k < count; k++) changed |= insert(beam, beam->found[k]);
    return changed;
}

static enum hapt_status run(struct beam *beam, struct hapt_arena *scratch)
{
    bool changed = true;
    for (int round = 0; changed && round < MOST_ROUNDS && *beam->work < beam->most_work; round++) {
        hapt_arena_reset(scratch);
        HAPT_TRY(price_moves(beam, scratch));
        changed = take_best(beam);
        if (changed || !beam->rules->settle) continue;
        HAPT_TRY(hapt_env_agree(beam->comm, beam->rules->settle(beam, &changed)));
    }
    return HAPT_OK;
}

static enum hapt_status create(struct beam *beam)
{
    HAPT_TRY(beam->rules->create(beam->context, &beam->trial));
    for (int e = 0; e < BEAM_WIDTH; e++) {
        HAPT_TRY(beam->rules->create(beam->context, &beam->entry[e]));
        HAPT_TRY(beam->rules->create(beam->context, &beam->found[e]));
    }
    return HAPT_OK;
}

enum hapt_status beam_run(struct beam *beam, void *candidate)
{
    struct hapt_arena scratch;
    HAPT_TRY(hapt_env_agree(beam->comm, create(beam)));
    beam->rules->copy(beam->entry[0], candidate);
    beam->count = 1;
    hapt_arena_init(&scratch);
    const enum hapt_status status = run(beam, &scratch);
    hapt_arena_release(&scratch);
    free(beam->move);
    if (status == HAPT_OK && entry_s(beam, 0) < *beam->rules->step_s(candidate))
        beam->rules->copy(candidate, beam->entry[0]);
    return status;
}
