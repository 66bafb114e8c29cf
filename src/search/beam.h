/*
 * Inside src/search: Pfeife's beam (4.3, as its code does it), shared by ranks.
 *
 * The beam holds the candidates of the shortest steps. In each round all moves of all entries are priced; the ranks
 * share them and all take the same new entries. It ends when no entry is new, or when the work is done. The search says
 * what a candidate and a move are.
 */
#ifndef HAPT_SEARCH_BEAM_H
#define HAPT_SEARCH_BEAM_H

#include <mpi.h>
#include <stdbool.h>

#include "hapt/status.h"

/* The best entry's boundaries move by up to REACH layers, those of the others by up to NEAR. */
enum { BEAM_WIDTH = 8, BEAM_REACH = 10, BEAM_NEAR = 3 };

/* A neighbour of an entry. The search gives the kinds their meaning. */
struct beam_move {
    int kind, entry;
    int at, by;
    int first;
};

struct beam {
    const struct beam_rules *rules;
    void *context;
    MPI_Comm comm;
    int rank, size;
    double *work, most_work; /* *work: so far, on all ranks */
    int count;
    void *entry[BEAM_WIDTH]; /* [count] candidates by ascending step */
    void *trial, *found[BEAM_WIDTH];
    int move_count, move_room;
    struct beam_move *move; /* [move_count] */
    double *step_s;         /* [move_count] */
};

/* Functions of one kind of search. `context` is beam->context. */
struct beam_rules {
    enum hapt_status (*create)(void *context, void **candidate);
    void (*copy)(void *to, const void *from);
    double *(*step_s)(void *candidate);
    bool (*same)(const void *a, const void *b);
    /* Calls beam_add_move for each move of an entry, in an order that ranks share. */
    enum hapt_status (*list)(struct beam *beam, int entry);
    /* Applies a move to beam->trial, a copy of its entry; false: it is impossible. */
    bool (*apply)(struct beam *beam, const struct beam_move *move);
    /* Sets the trial's step; INFINITY if it is not below `limit_s`. One above `most_s` may be given too short, yet
     * above most_s. Rank-local. */
    enum hapt_status (*price)(struct beam *beam, double limit_s, double most_s);
    /* Work of one move of this entry. */
    double (*move_work)(const struct beam *beam, const void *entry, bool simulated);
    /* Called when no entry was new. *changed: it improved entry[0]. NULL: nothing is left to try. Rank-local. */
    enum hapt_status (*settle)(struct beam *beam, bool *changed);
};

enum hapt_status beam_add_move(struct beam *beam, struct beam_move move);
/* Improves the candidate. In: rules to most_work. Collective. */
enum hapt_status beam_run(struct beam *beam, void *candidate);
/* The step of the slowest entry of a full beam; INFINITY: there is room. */
double beam_worst_s(const struct beam *beam);

#endif
