/*
 * The beam of Pfeife 4.3 over the boundaries of a looped plan, as its code does it, and over the programs of the
 * submeshes. A move shifts one boundary by some layers: alone (SINGLE), or with the stages in front stretched and those
 * behind compressed (PROPORTIONAL). The ranks share the pricing; all of them take the same entries.
 */
#include "loops.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Work to price a stage, where a simulated microbatch of a stage is 1. */
enum { PRICING = 12 };
/* The same for a move on average, if tensors skip stages: their messages, and so the lists, depend on the boundaries.
 */
enum { SKIP_BUILDING = LOOPS_BUILDING / 2 };
/* The best entry's boundaries move by up to REACH layers, those of the others by up to NEAR. */
enum { WIDTH = 8, REACH = 10, NEAR = 3, MOST_ROUNDS = 40 };

struct beam {
    struct loops_search *search;
    int count;
    struct loops_candidate entry[WIDTH]; /* by ascending step */
    struct loops_candidate trial, found[WIDTH];
};

struct move {
    enum { SINGLE, PROPORTIONAL, PROGRAM } kind;
    int entry, at, by; /* the boundary behind stage `at`; PROGRAM: slot `at`, submesh `by` */
};

struct moves {
    int count, room;
    struct move *move;
    double *step_s;
};

static int nearest(double value)
{
    return (int)floor(value + 0.5);
}

/* Applies the move to a copy of its entry; false: a stage would be empty. */
static bool apply(struct beam *beam, const struct move *move)
{
    const struct loops_candidate *from = &beam->entry[move->entry];
    struct loops_candidate *to = &beam->trial;
    const int stages = from->slots * from->loops, L = beam->search->L;
    loops_candidate_copy(to, from);
    if (move->kind == PROGRAM) {
        to->slot[move->at].submesh = move->by;
        return true;
    }
    const int old = from->end[move->at], now = old + move->by;
    if (now < 1 || now >= L) return false;
    to->end[move->at] = now;
    for (int i = 0; move->kind == PROPORTIONAL && i + 1 < stages; i++) {
        if (i < move->at) to->end[i] = nearest((double)from->end[i] * now / old);
        if (i > move->at) to->end[i] = now + nearest((double)(from->end[i] - old) * (L - now) / (L - old));
    }
    for (int i = 0, first = 0; i < stages; first = to->end[i++])
        if (to->end[i] <= first) return false;
    return true;
}

static enum hapt_status add_move(struct moves *moves, struct move move)
{
    if (moves->count == moves->room) {
        const int room = 2 * moves->room + 256;
        struct move *wider = realloc(moves->move, (size_t)room * sizeof *wider);
        if (!wider)
            return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
        moves->move = wider;
        moves->room = room;
    }
    moves->move[moves->count++] = move;
    return HAPT_OK;
}

/* Other programs on the devices of a slot. */
static enum hapt_status add_programs(const struct beam *beam, int entry, struct moves *moves)
{
    const struct loops_candidate *from = &beam->entry[entry];
    for (int k = 0; k < from->slots; k++) {
        const struct hapt_profile_cluster *cluster = &beam->search->profile->cluster[from->slot[k].cluster];
        const struct hapt_submesh *own = &cluster->submesh[from->slot[k].submesh];
        for (int s = 0; s < cluster->submesh_count; s++)
            if (s != from->slot[k].submesh && cluster->submesh[s].n == own->n && cluster->submesh[s].m == own->m)
                HAPT_TRY(add_move(moves, (struct move){PROGRAM, entry, k, s}));
    }
    return HAPT_OK;
}

static enum hapt_status list_moves(const struct beam *beam, struct moves *moves)
{
    moves->count = 0;
    for (int e = 0; e < beam->count; e++) {
        const int reach = e == 0 ? REACH : NEAR;
        HAPT_TRY(add_programs(beam, e, moves));
        for (int s = 0; s + 1 < beam->entry[e].slots * beam->entry[e].loops; s++)
            for (int by = -reach; by <= reach; by++)
                for (int kind = SINGLE; kind <= PROPORTIONAL && by != 0; kind++)
                    HAPT_TRY(add_move(moves, (struct move){kind, e, s, by}));
    }
    return HAPT_OK;
}

static double worst_s(const struct beam *beam)
{
    return beam->count < WIDTH ? INFINITY : beam->entry[beam->count - 1].step_s;
}

static bool same(const struct loops_candidate *a, const struct loops_candidate *b)
{
    return memcmp(a->end, b->end, (size_t)(a->slots * a->loops) * sizeof *a->end) == 0 &&
           memcmp(a->slot, b->slot, (size_t)a->slots * sizeof *a->slot) == 0;
}

/* Inserts a candidate; false: it is in the beam, or not better than the worst entry. */
static bool insert(struct beam *beam, const struct loops_candidate *candidate)
{
    int at = beam->count;
    if (!(candidate->step_s < worst_s(beam))) return false;
    for (int e = 0; e < beam->count; e++)
        if (same(&beam->entry[e], candidate)) return false;
    while (at > 0 && candidate->step_s < beam->entry[at - 1].step_s) at--;
    const int last = beam->count < WIDTH ? beam->count++ : WIDTH - 1;
    const struct loops_candidate room = beam->entry[last];
    for (int e = last; e > at; e--) beam->entry[e] = beam->entry[e - 1];
    beam->entry[at] = room;
    loops_candidate_copy(&beam->entry[at], candidate);
    return true;
}

static enum hapt_status price_share(struct beam *beam, const struct moves *moves)
{
    struct loops_search *search = beam->search;
    for (int k = 0; k < moves->count; k++) {
        moves->step_s[k] = INFINITY;
        if (k % search->size != search->rank || !apply(beam, &moves->move[k])) continue;
        HAPT_TRY(loops_price(search, worst_s(beam), &beam->trial));
        moves->step_s[k] = beam->trial.step_s;
    }
    return HAPT_OK;
}

/* Prices all moves of the entries; every rank gets all prices. Collective. */
static enum hapt_status price_moves(struct beam *beam, struct moves *moves, struct hapt_arena *scratch)
{
    struct loops_search *search = beam->search;
    enum hapt_status status = list_moves(beam, moves);
    moves->step_s = hapt_arena_alloc(scratch, (size_t)moves->count + 1, sizeof *moves->step_s);
    if (status == HAPT_OK && !moves->step_s) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = price_share(beam, moves);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, moves->step_s, moves->count, MPI_DOUBLE, MPI_MIN, search->comm));
    const double stages = beam->entry[0].slots * beam->entry[0].loops;
    const double each = search->B * stages * (search->profile->crossings ? SKIP_BUILDING : 1);
    for (int k = 0; k < moves->count; k++) search->work += PRICING * stages + (isfinite(moves->step_s[k]) ? each : 0);
    return HAPT_OK;
}

/* Puts the best moves into the beam; true: an entry is new. All are applied before an entry changes. */
static bool take_best(struct beam *beam, struct moves *moves)
{
    bool changed = false;
    int count = 0;
    for (; count < WIDTH; count++) {
        int best = -1;
        for (int k = 0; k < moves->count; k++)
            if (moves->step_s[k] < (best < 0 ? worst_s(beam) : moves->step_s[best])) best = k;
        if (best < 0) break;
        apply(beam, &moves->move[best]);
        beam->trial.step_s = moves->step_s[best];
        moves->step_s[best] = INFINITY;
        loops_candidate_copy(&beam->found[count], &beam->trial);
    }
    for (int k = 0; k < count; k++) changed |= insert(beam, &beam->found[k]);
    return changed;
}

static enum hapt_status run(struct beam *beam, struct moves *moves, struct hapt_arena *scratch)
{
    const struct loops_search *search = beam->search;
    bool changed = true;
    for (int round = 0; changed && round < MOST_ROUNDS && search->work < search->most_work; round++) {
        hapt_arena_reset(scratch);
        HAPT_TRY(price_moves(beam, moves, scratch));
        changed = take_best(beam, moves);
    }
    return HAPT_OK;
}

static enum hapt_status create(struct beam *beam)
{
    HAPT_TRY(loops_candidate_create(beam->search, &beam->trial));
    for (int e = 0; e < WIDTH; e++) {
        HAPT_TRY(loops_candidate_create(beam->search, &beam->entry[e]));
        HAPT_TRY(loops_candidate_create(beam->search, &beam->found[e]));
    }
    return HAPT_OK;
}

enum hapt_status loops_refine(struct loops_search *search, struct loops_candidate *candidate)
{
    struct beam beam = {.search = search, .count = 1};
    struct moves moves = {0};
    struct hapt_arena scratch;
    HAPT_TRY(hapt_env_agree(search->comm, create(&beam)));
    loops_candidate_copy(&beam.entry[0], candidate);
    hapt_arena_init(&scratch);
    const enum hapt_status status = run(&beam, &moves, &scratch);
    hapt_arena_release(&scratch);
    free(moves.move);
    if (status == HAPT_OK && beam.entry[0].step_s < candidate->step_s) loops_candidate_copy(candidate, &beam.entry[0]);
    return status;
}

/* ---- Forwards before the first backward ---- */

/* Writes out what the schedule would choose, so that it can be changed. */
static void read_ahead(const struct loops_search *search, struct loops_candidate *candidate)
{
    for (int s = 0; s < candidate->slots; s++) {
        const struct hapt_instruction_list *list = &search->lists->list[s];
        candidate->ahead[s] = 0;
        for (int i = 0; list->instruction[i].kind != HAPT_INSTRUCTION_BACKWARD; i++)
            candidate->ahead[s] += list->instruction[i].kind == HAPT_INSTRUCTION_FORWARD;
    }
}

/* One submesh's forwards, or those of all submeshes up to it, by one. *better: it is. */
static enum hapt_status try_ahead(struct loops_search *search, const struct loops_candidate *best, int first, int last,
                                  int by, struct loops_candidate *trial, bool *better)
{
    *better = false;
    loops_candidate_copy(trial, best);
    for (int s = first; s <= last; s++) {
        trial->ahead[s] += by;
        if (trial->ahead[s] < 1) return HAPT_OK;
    }
    HAPT_TRY(loops_price(search, best->step_s, trial));
    search->work += LOOPS_BUILDING * search->B * (double)(trial->slots * trial->loops);
    *better = trial->step_s < best->step_s * (1 - 1e-9);
    return HAPT_OK;
}

enum hapt_status loops_refine_ahead(struct loops_search *search, struct loops_candidate *candidate)
{
    struct loops_candidate best, trial;
    bool changed = true;
    HAPT_TRY(loops_candidate_create(search, &best));
    HAPT_TRY(loops_candidate_create(search, &trial));
    loops_candidate_copy(&best, candidate);
    HAPT_TRY(loops_price(search, INFINITY, &best));
    if (!loops_is_plan(&best)) return HAPT_OK;
    read_ahead(search, &best);
    while (changed && search->work < search->most_work) {
        changed = false;
        for (int s = 0; s < best.slots; s++)
            for (int k = 0; k < 4; k++) {
                bool better;
                HAPT_TRY(try_ahead(search, &best, k / 2 ? 0 : s, s, k % 2 ? -1 : 1, &trial, &better));
                if (better) loops_candidate_copy(&best, &trial);
                changed |= better;
            }
    }
    if (best.step_s < candidate->step_s * (1 - 1e-9)) loops_candidate_copy(candidate, &best);
    return HAPT_OK;
}
