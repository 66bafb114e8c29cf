/*
 * Inside src/search: plans under a looped schedule (Pfeife 3.4, 4.3).
 *
 *   loops.c           the order of the work
 *   loops_choose.c    looped plans beside a free schedule
 *   loops_rows.c      rows of submeshes
 *   loops_settings.c  groups and prefetch; given stages
 *   loops_price.c     the simulated step of given boundaries; boundaries of equal time
 *   loops_beam.c      the beam over boundaries and programs, and forwards before the first backward
 */
#ifndef HAPT_SEARCH_LOOPS_PRIVATE_H
#define HAPT_SEARCH_LOOPS_PRIVATE_H

#include "beam.h"
#include "hapt/search.h"

/* A submesh of a row: indices in the profile. */
struct loops_slot {
    int cluster, submesh;
};

struct loops_candidate {
    int slots, loops, loop_batch, prefetch;
    int transfer_slots;      /* that its lists need; set with a finite step_s */
    struct loops_slot *slot; /* [slots] */
    int *end;                /* [slots * loops] the layers of stage k end there */
    int *ahead;              /* [slots] forwards before the first backward; 0: the schedule's */
    double step_s;           /* memory is short: LOOPS_MISFIT * (1 + share that lacks); INFINITY: no candidate */
    double lower_s;          /* a bound of step_s; INFINITY: no candidate; set with step_s */
};
#define LOOPS_MISFIT 1e30
static inline bool loops_is_plan(const struct loops_candidate *candidate)
{
    return candidate->step_s < LOOPS_MISFIT;
}

struct loops_setting {
    int loops, loop_batch, prefetch;
};

struct loops_row {
    int slots;
    struct loops_slot *slot;
};
enum { LOOPS_MOST_SETTINGS = 96, LOOPS_MOST_ROWS = 512 };
struct loops_rows {
    struct loops_search *search;
    int count;
    struct loops_row row[LOOPS_MOST_ROWS];
};

/* The nearest obstacle to a plan. */
enum loops_obstacle {
    LOOPS_NO_LISTS,  /* no setting gives lists that run */
    LOOPS_NO_LAYERS, /* more stages than layers */
    LOOPS_NO_RANGES, /* stages that the profile lacks */
    LOOPS_NO_MEMORY
};

/* Work to build the lists of a setting, where a simulated microbatch of a stage is 1. */
enum { LOOPS_BUILDING = 20 };

/* Lists of a setting, for some edges between the stages. */
struct loops_lists {
    struct hapt_arena arena;
    uint64_t hash; /* of setting, slots, ahead, tied, edges and relays */
    struct loops_setting setting;
    int slots, *ahead;
    struct hapt_schedule *made; /* NULL: they do not run */
    int transfer_slots;
    bool tied;
    int edge_count, relay_count; /* of the plan */
    struct hapt_schedule_edge *edge;
    struct hapt_schedule_relay *relay;
};
/* Lists kept: LOOPS_MOST_PASSES / (B L), between the bounds. Building lists takes longer than pricing a plan. */
enum { LOOPS_LEAST_LISTS = 32, LOOPS_MOST_LISTS = 512, LOOPS_MOST_PASSES = 1 << 19 };

struct loops_search {
    MPI_Comm comm;
    int rank, size;
    const struct hapt_profile *profile;
    const struct hapt_search_options *options;
    const struct hapt_plan *unlooped; /* its rows are the first ones; NULL: they are searched */
    int L, B, most_slots, most_stages;
    struct hapt_arena arena; /* lives as long as the search */
    struct hapt_arena trial; /* of one pricing */
    /* The plan of the newest pricing. */
    struct hapt_arena frame_arena;
    struct hapt_plan *frame;
    struct loops_candidate key; /* the setting of the frame; slots 0: none */
    uint64_t key_hash;
    int list_count, list_next, most_lists;       /* list_next: the one that is overwritten next */
    struct loops_lists newest[LOOPS_MOST_LISTS]; /* [list_count] */
    struct hapt_schedule *lists;                 /* of the newest pricing; NULL: none, or they do not run */
    struct hapt_simulate_work simulation;
    struct beam_memo memo;
    double work, most_work; /* microbatches times stages of all simulations, on all ranks */
    enum loops_obstacle obstacle;
    double missing_bytes; /* LOOPS_NO_MEMORY: the least that a submesh lacks */
};

/* hapt_plan_search_loops, with the rows of a given plan without loops; NULL: they are searched. */
enum hapt_status search_loops(MPI_Comm comm, const struct hapt_profile *profile,
                              const struct hapt_search_options *options, const struct hapt_plan *unlooped,
                              struct hapt_arena *result, struct hapt_plan **plan);

enum hapt_status loops_candidate_create(struct loops_search *search, struct loops_candidate *candidate);
void loops_candidate_copy(struct loops_candidate *to, const struct loops_candidate *from);
/* The plan of a candidate, without prices, in `arena`. */
enum hapt_status loops_plan(const struct loops_search *search, const struct loops_candidate *candidate,
                            struct hapt_arena *arena, struct hapt_plan *plan);
/* Sets step_s and lower_s; step_s is INFINITY if the lists do not run, the stages are no candidates, or cannot be
 * faster than `limit_s`. */
enum hapt_status loops_price(struct loops_search *search, double limit_s, struct loops_candidate *candidate);
/* Boundaries under which the slowest stage is as fast as possible. `fits`: each stage takes at most its share of the
 * memory, with the slots of the newest lists. *found false: there are none. */
enum hapt_status loops_even_boundaries(struct loops_search *search, bool fits, struct loops_candidate *candidate,
                                       bool *found);
/* Rows around those of plans without loops. Collective. */
enum hapt_status loops_find_rows(struct loops_rows *rows);
/* Adds rows with a submesh more or less, with a larger or smaller one, or in reverse order. */
enum hapt_status loops_add_neighbours(struct loops_rows *rows, const struct loops_row *row);
/* The settings of a row of so many submeshes; returns their number. */
int loops_list_settings(const struct hapt_search_options *options, int submeshes, int least_loops, int most_loops,
                        struct loops_setting setting[LOOPS_MOST_SETTINGS]);
/* HAPT_ERR_USAGE: groups of `batch` do not divide the microbatches of a step. */
enum hapt_status loops_check_batch(const struct hapt_search_options *options, int batch);
/* Improves boundaries and programs until nothing changes. Collective over search->comm. */
enum hapt_status loops_refine(struct loops_search *search, struct loops_candidate *candidate);
/* Tries a forward more or less before the first backward of each submesh. Rank-local, the same on all ranks. */
enum hapt_status loops_refine_ahead(struct loops_search *search, struct loops_candidate *candidate);

#endif
