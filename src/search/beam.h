/*
 * Inside src/search: Pfeife's beam (4.3, as its code does it), shared by ranks.
 *
 * The beam holds the candidates of the shortest steps. In each round all moves of all entries are priced; the ranks
 * share them and all take the same new entries. It ends when no entry is new, or when the work is done. The search says
 * what a candidate and a move are. Candidates are dealt to ranks by their keys. beam_memo.c keeps their prices.
 */
#ifndef HAPT_SEARCH_BEAM_H
#define HAPT_SEARCH_BEAM_H

#include <mpi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hapt/status.h"

/* The best entry's boundaries move by up to REACH layers, those of the others by up to NEAR. */
enum { BEAM_WIDTH = 8, BEAM_REACH = 10, BEAM_NEAR = 3 };

/* A neighbour of an entry. The search gives the kinds their meaning. */
struct beam_move {
    int kind, entry;
    int at, by;
    int first;
};

/* A hash of all that the price of a candidate depends on. */
struct beam_key {
    uint64_t low, high;
};
static inline void beam_key_add(struct beam_key *key, uint64_t word)
{
    key->low = (key->low ^ word) * 0xff51afd7ed558ccdu;
    key->low ^= key->low >> 32;
    key->high = (key->high ^ word) * 0xc4ceb9fe1a85ec53u;
    key->high ^= key->high >> 29;
}

/* Prices of one search by the keys of the candidates; starts as zeros. Several runs of the beam may share it. */
struct beam_memo {
    struct beam_known *known; /* [room] open addressing */
    size_t count, room;
};
/* True: *step_s is a price that beam_rules.price may give. */
bool beam_memo_find(const struct beam_memo *memo, struct beam_key key, double limit_s, double most_s, double *step_s);
/* Adds a price that beam_rules.price gave under these limits. */
enum hapt_status beam_memo_add(struct beam_memo *memo, struct beam_key key, double limit_s, double most_s,
                               double lower_s, double step_s);
void beam_memo_release(struct beam_memo *memo);

struct beam {
    const struct beam_rules *rules;
    void *context;
    MPI_Comm comm;
    int rank, size;
    double *work, most_work; /* *work: so far, on all ranks; known prices count like others */
    struct beam_memo *memo;
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
    double (*lower_s)(const void *candidate); /* set by `price` */
    bool (*same)(const void *a, const void *b);
    struct beam_key (*key)(const void *candidate);
    /* Calls beam_add_move for each move of an entry, in an order that ranks share. */
    enum hapt_status (*list)(struct beam *beam, int entry);
    /* Applies a move to beam->trial, a copy of its entry; false: it is impossible. */
    bool (*apply)(struct beam *beam, const struct beam_move *move);
    /* Sets the trial's step and a lower bound of it. The step is INFINITY if the trial is no plan, or if the bound is
     * not below `limit_s`. A step above `most_s` may be given too short, yet above most_s. Rank-local. */
    enum hapt_status (*price)(struct beam *beam, double limit_s, double most_s);
    double worth; /* limit_s is at most the best step times this factor; INFINITY: no such limit */
    /* Work of one move of this entry. */
    double (*move_work)(const struct beam *beam, const void *entry, bool simulated);
    /* Called when no entry was new. *changed: it improved entry[0]. NULL: nothing is left to try. Rank-local. */
    enum hapt_status (*settle)(struct beam *beam, bool *changed);
};

enum hapt_status beam_add_move(struct beam *beam, struct beam_move move);
/* Improves the candidate. In: rules to most_work. Collective. */
enum hapt_status beam_run(struct beam *beam, void *candidate);

#endif
