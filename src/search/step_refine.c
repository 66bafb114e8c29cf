/*
 * Refinement by a beam over stage boundaries and programs (Pfeife 4.3, as its code does it).
 *
 * A move shifts one boundary by some layers. SINGLE moves it alone; PROPORTIONAL stretches the stages in front and
 * compresses those behind. PROGRAM gives a stage another program on as many devices. LAUNCHES adds or takes a launch.
 * The ranks share the pricing; all of them take the same entries.
 */
#include "step.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Work to price a stage, where a simulated microbatch of a stage is 1. */
enum { PRICING = 12 };
/* The best entry's boundaries move by up to REACH layers, those of the others by up to NEAR. */
enum { WIDTH = 8, REACH = 10, NEAR = 3, MOST_ROUNDS = 40 };

struct beam {
    struct step_search *search;
    int count;
    struct step_candidate entry[WIDTH]; /* by ascending step */
    struct step_candidate trial;
};

/* A neighbour of an entry. */
struct move {
    enum { SINGLE, PROPORTIONAL, PROGRAM, LAUNCHES } kind;
    int entry, stage;
    int by;    /* the boundary behind the stage; PROGRAM: the submesh; LAUNCHES: more of stages [first, stage] */
    int first; /* LAUNCHES */
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

/* False: a count would leave [1, B] or rise along the pipeline. */
static bool change_launches(const struct move *move, int B, struct step_candidate *to)
{
    to->schedule = HAPT_SCHEDULE_H1F1B; /* 1F1B and eager 1F1B differ from it in their counts alone */
    for (int i = move->first; i <= move->stage; i++) {
        to->launches[i] += move->by;
        if (to->launches[i] < 1 || to->launches[i] > B) return false;
    }
    const int s = move->stage, f = move->first;
    return (s + 1 == to->count || to->launches[s] >= to->launches[s + 1]) &&
           (f == 0 || to->launches[f - 1] >= to->launches[f]);
}

/* Applies the move to a copy of its entry; false: a stage would be empty, or launch counts are impossible. */
static bool apply(struct beam *beam, const struct move *move)
{
    const struct step_candidate *from = &beam->entry[move->entry];
    struct step_candidate *to = &beam->trial;
    const int s = move->stage, L = beam->search->L;
    step_candidate_copy(to, from);
    if (move->kind == PROGRAM) to->stage[s].submesh = move->by;
    if (move->kind == PROGRAM) return true;
    if (move->kind == LAUNCHES) return change_launches(move, beam->search->B, to);
    const int old = from->stage[s].end, now = old + move->by;
    if (now < 1 || now >= L) return false;
    to->stage[s].end = now;
    for (int i = 0; move->kind == PROPORTIONAL && i + 1 < to->count; i++) {
        const int end = from->stage[i].end;
        if (i < s) to->stage[i].end = nearest((double)end * now / old);
        if (i > s) to->stage[i].end = now + nearest((double)(end - old) * (L - now) / (L - old));
    }
    for (int i = 0, first = 0; i < to->count; first = to->stage[i++].end)
        if (to->stage[i].end <= first) return false;
    return true;
}

static enum hapt_status add_move(struct moves *moves, const struct move *move)
{
    if (moves->count == moves->room) {
        const int room = 2 * moves->room + 256;
        struct move *wider = realloc(moves->move, (size_t)room * sizeof *wider);
        if (!wider)
            return hapt_fail(HAPT_ERR_MEMORY, "give the job more host memory", "host memory exhausted by the search");
        moves->move = wider;
        moves->room = room;
    }
    moves->move[moves->count++] = *move;
    return HAPT_OK;
}

/* The programs that a stage may run on as many devices. */
static enum hapt_status add_programs(const struct beam *beam, int entry, int stage, struct moves *moves)
{
    const struct step_search *search = beam->search;
    const struct step_stage *at = &beam->entry[entry].stage[stage];
    if (at->device_set >= search->C) return HAPT_OK;
    const struct hapt_profile_cluster *cluster = &search->profile->cluster[at->device_set];
    const int devices = cluster->submesh[at->submesh].n * cluster->submesh[at->submesh].m;
    for (int s = 0; s < cluster->submesh_count; s++) {
        const struct move move = {.kind = PROGRAM, .entry = entry, .stage = stage, .by = s};
        if (s != at->submesh && cluster->submesh[s].n * cluster->submesh[s].m == devices)
            HAPT_TRY(add_move(moves, &move));
    }
    return HAPT_OK;
}

/* One launch more or less: of the stage, or of all up to it. */
static enum hapt_status add_launches(int entry, int stage, struct moves *moves)
{
    for (int by = -1; by <= 1; by += 2)
        for (int first = 0; first <= stage; first += stage > 0 ? stage : 1) {
            const struct move move = {.kind = LAUNCHES, .entry = entry, .stage = stage, .by = by, .first = first};
            HAPT_TRY(add_move(moves, &move));
        }
    return HAPT_OK;
}

static enum hapt_status list_moves(const struct beam *beam, struct moves *moves)
{
    moves->count = 0;
    for (int e = 0; e < beam->count; e++)
        for (int s = 0; s < beam->entry[e].count; s++) {
            HAPT_TRY(add_programs(beam, e, s, moves));
            if (step_launches_are_free(beam->search, &beam->entry[e])) HAPT_TRY(add_launches(e, s, moves));
            const int reach = e == 0 ? REACH : NEAR;
            for (int k = -reach; k <= reach && s + 1 < beam->entry[e].count; k++)
                for (int kind = SINGLE; kind <= PROPORTIONAL && k != 0; kind++) {
                    const struct move move = {.kind = kind, .entry = e, .stage = s, .by = k};
                    HAPT_TRY(add_move(moves, &move));
                }
        }
    return HAPT_OK;
}

static double worst_s(const struct beam *beam)
{
    return beam->count < WIDTH ? INFINITY : beam->entry[beam->count - 1].step_s;
}

static bool same(const struct step_candidate *a, const struct step_candidate *b)
{
    return step_same_stages(a, b) && memcmp(a->launches, b->launches, (size_t)a->count * sizeof *a->launches) == 0;
}

/* Inserts beam->trial; false: it is in the beam, or not better than the worst entry. */
static bool insert(struct beam *beam)
{
    const struct step_candidate *trial = &beam->trial;
    int at = beam->count;
    if (!(trial->step_s < worst_s(beam))) return false;
    for (int e = 0; e < beam->count; e++)
        if (same(&beam->entry[e], trial)) return false;
    while (at > 0 && trial->step_s < beam->entry[at - 1].step_s) at--;
    const int last = beam->count < WIDTH ? beam->count++ : WIDTH - 1;
    const struct step_candidate room = beam->entry[last];
    for (int e = last; e > at; e--) beam->entry[e] = beam->entry[e - 1];
    beam->entry[at] = room;
    step_candidate_copy(&beam->entry[at], trial);
    return true;
}

/* This rank's share of the moves. */
static enum hapt_status price_share(struct beam *beam, const struct moves *moves)
{
    const struct step_search *search = beam->search;
    for (int k = 0; k < moves->count; k++) {
        moves->step_s[k] = INFINITY;
        if (k % search->size != search->rank || !apply(beam, &moves->move[k])) continue;
        /* the slowest entry of a full beam limits what is worth a simulation; else the best one does, loosely */
        const double limit_s = fmin(worst_s(beam), 1.02 * beam->entry[0].step_s);
        HAPT_TRY(step_price(beam->search, limit_s, &beam->trial));
        moves->step_s[k] = beam->trial.step_s;
    }
    return HAPT_OK;
}

/* Prices all moves of the entries; every rank gets all prices. Collective. */
static enum hapt_status price_moves(struct beam *beam, struct moves *moves, struct hapt_arena *scratch)
{
    struct step_search *search = beam->search;
    enum hapt_status status = list_moves(beam, moves);
    moves->step_s = hapt_arena_alloc(scratch, (size_t)moves->count + 1, sizeof *moves->step_s);
    if (status == HAPT_OK && !moves->step_s) status = HAPT_ERR_MEMORY;
    if (status == HAPT_OK) status = price_share(beam, moves);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    if (search->size > 1)
        HAPT_MPI(MPI_Allreduce(MPI_IN_PLACE, moves->step_s, moves->count, MPI_DOUBLE, MPI_MIN, search->comm));
    for (int k = 0; k < moves->count; k++) {
        const double stages = beam->entry[moves->move[k].entry].count;
        search->work += PRICING * stages + (isfinite(moves->step_s[k]) ? search->B * stages : 0);
    }
    return HAPT_OK;
}

/* Puts the best moves into the beam. A move refers to an entry of the round's start, so all are applied before an entry
 * changes. *changed: an entry is new. */
static enum hapt_status take_best(struct beam *beam, struct moves *moves, struct hapt_arena *scratch, bool *changed)
{
    struct step_candidate found[WIDTH];
    int count = 0;
    for (; count < WIDTH; count++) {
        int best = -1;
        for (int k = 0; k < moves->count; k++)
            if (moves->step_s[k] < (best < 0 ? worst_s(beam) : moves->step_s[best])) best = k;
        if (best < 0) break;
        HAPT_NEW(found[count].stage, scratch, beam->search->most_stages);
        HAPT_NEW(found[count].launches, scratch, beam->search->most_stages);
        apply(beam, &moves->move[best]);
        beam->trial.step_s = moves->step_s[best];
        moves->step_s[best] = INFINITY;
        step_candidate_copy(&found[count], &beam->trial);
    }
    for (int k = 0; k < count; k++) {
        step_candidate_copy(&beam->trial, &found[k]);
        *changed |= insert(beam);
    }
    return HAPT_OK;
}

/* Gives the best entry the launch counts of the rules, if they are better for its new boundaries. */
static enum hapt_status relaunch(struct beam *beam, bool *changed)
{
    step_candidate_copy(&beam->trial, &beam->entry[0]);
    HAPT_TRY(step_price_launches(beam->search, INFINITY, &beam->trial));
    if (!(beam->trial.step_s < beam->entry[0].step_s)) return HAPT_OK;
    step_candidate_copy(&beam->entry[0], &beam->trial);
    *changed = true;
    return HAPT_OK;
}

static enum hapt_status run(struct beam *beam, struct moves *moves, struct hapt_arena *scratch)
{
    const struct step_search *search = beam->search;
    bool changed = true;
    for (int round = 0; changed && round < MOST_ROUNDS && search->work < search->most_work; round++) {
        changed = false;
        hapt_arena_reset(scratch);
        HAPT_TRY(price_moves(beam, moves, scratch));
        enum hapt_status status = take_best(beam, moves, scratch, &changed);
        if (status == HAPT_OK && !changed) status = relaunch(beam, &changed);
        HAPT_TRY(hapt_env_agree(search->comm, status));
    }
    return HAPT_OK;
}

enum hapt_status step_refine(struct step_search *search, struct step_candidate *candidate)
{
    struct beam beam = {.search = search, .count = 1};
    struct moves moves = {0};
    enum hapt_status status = step_candidate_create(search, &beam.trial);
    for (int e = 0; e < WIDTH && status == HAPT_OK; e++) status = step_candidate_create(search, &beam.entry[e]);
    HAPT_TRY(hapt_env_agree(search->comm, status));
    step_candidate_copy(&beam.entry[0], candidate);
    struct hapt_arena scratch;
    hapt_arena_init(&scratch);
    status = run(&beam, &moves, &scratch);
    hapt_arena_release(&scratch);
    free(moves.move);
    if (status == HAPT_OK && beam.entry[0].step_s < candidate->step_s) step_candidate_copy(candidate, &beam.entry[0]);
    return status;
}
