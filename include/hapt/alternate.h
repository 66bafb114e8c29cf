/*
 * HAP's outer loop (HAP 3.1): the program and the sharding ratios of one mesh axis are optimised in turn, each for the
 * other. It ends when nothing changes or an earlier pair returns. Output: the best pair.
 *
 * Costs may be nonlinear in a device's share (a small product runs at a lower rate). The linear programs of the ratios
 * use their tangents. Every pair is then priced without tangents, in whole units (hapt_axis_program_price).
 */
#ifndef HAPT_ALTERNATE_H
#define HAPT_ALTERNATE_H

#include "hapt/synthesis.h"

struct hapt_alternation {
    const struct hapt_sharding *sharding; /* the sharding before this axis */
    int axis_index, devices;
    const struct hapt_spmd_costs *costs;
    const double *power;                           /* [devices] the initial ratios are proportional to it */
    const double *memory_bytes;                    /* [devices] limits, or NULL: none */
    int microbatches;                              /* B; 0 counts as 1 */
    double in_flight, optimizer_bytes_per_element; /* hapt_synthesis_options */
    /* The model's layers in forward operators; layer l ends before end_op[l]. Up to `segments` runs of layers have
     * their own ratios (HAP 5.2); the boundaries are where computation over communication changes most. No layers or
     * segments <= 1: one vector for all. */
    int layer_count;
    const int *end_op; /* [layer_count] */
    int segments;
    long most_states; /* hapt_synthesis_options; 0: 2,000, since there are many turns */
};

enum { HAPT_ALTERNATION_TURNS = 8, HAPT_ALTERNATION_STARTS = 4 };
/* One turn: the program for the ratios, then the ratios for the program. */
struct hapt_alternation_turn {
    const char *start; /* "proportional", "even", "segments" (all at the best ratios so far), "fig. 2" (separate ratios
                          for each) */
    int segments;
    double program_s; /* HAP (1) at the ratios before this turn */
    double ratios_s;  /* HAP (2) at the new ratios, in whole units; INFINITY if they are impossible or do not fit */
    double synthesis_seconds, solve_seconds; /* wall time of either half */
    const char *solver;                      /* of the ratios: hapt_ratio_result.solver */
};

struct hapt_alternation_result {
    struct hapt_axis axis;
    int *ratio_of; /* [forward_count] */
    int segment_count;
    int *segment_end; /* [segment_count] forward operators */
    struct hapt_axis_program program;
    struct hapt_program_price price;
    struct hapt_synthesis_report report; /* of the synthesis that gave the program */
    const char *origin; /* what produced it: a start, or "data parallel" if no synthesised program was cheaper */
    int turn_count;
    struct hapt_alternation_turn turn[HAPT_ALTERNATION_TURNS * HAPT_ALTERNATION_STARTS];
    const char *ended; /* how the start that gave the program ended: "converged", "oscillated", "turns" */
    double seconds;
};

/* HAPT_ERR_INFEASIBLE if no program fits the memory at any of the ratios tried. Rank-local; deterministic except
 * for wall times. Everything lives in `arena`. */
enum hapt_status hapt_alternate(const struct hapt_alternation *alternation, struct hapt_arena *arena,
                                struct hapt_alternation_result *result);
/* HAP (2) alone: the best ratios for a given program (one vector). Also its cost per microbatch at the best, even
 * and proportional ratios (HAP Fig. 2); INFINITY if impossible. The memory limits apply. Everything lives in
 * `arena`. */
struct hapt_ratio_regimes {
    double best_s, even_s, proportional_s;
    const double *ratio; /* [devices] */
};
enum hapt_status hapt_alternation_ratios(const struct hapt_alternation *alternation,
                                         const struct hapt_axis_program *program, struct hapt_arena *arena,
                                         struct hapt_ratio_regimes *regimes);
/* Data parallelism at ratios proportional to `ratio` [devices] (NULL: even), priced in the same way.
 * HAPT_ERR_INFEASIBLE if the model's rows cannot be shared out so. Memory is not checked. */
enum hapt_status hapt_alternation_data_parallel(const struct hapt_alternation *alternation, const double *ratio,
                                                struct hapt_arena *arena, struct hapt_axis *axis,
                                                struct hapt_axis_program *program, struct hapt_program_price *price);

#endif
