/*
 * HAP as a whole (HAP 3.1): the program and the sharding ratios of one mesh axis by turns, each the best for the other,
 * until nothing changes or what was there comes back; the best pair is kept.
 *
 * Costs that are not linear in a device's share (a small product runs at a lower rate) are taken by their tangents in
 * the linear programs of the ratios; every pair is then priced as it is, in whole units (hapt_axis_program_price).
 */
#ifndef HAPT_ALTERNATE_H
#define HAPT_ALTERNATE_H

#include "hapt/synthesis.h"

struct hapt_alternation {
    const struct hapt_sharding *sharding; /* so far */
    int axis_index, devices;
    const struct hapt_spmd_costs *costs;
    const double *power;                           /* [devices] the first ratios are in proportion to it */
    const double *memory_bytes;                    /* [devices] limits, or NULL: none */
    int microbatches;                              /* B; 0 counts as 1 */
    double in_flight, optimizer_bytes_per_element; /* hapt_synthesis_options */
    /* The model's layers in forward operators, layer l ending before end_op[l]. Up to `segments` runs of them have
     * ratios of their own (HAP 5.2), parted where computation over communication changes most. No layers, or at most
     * one segment: one vector for all. */
    int layer_count;
    const int *end_op; /* [layer_count] */
    int segments;
    long most_states; /* hapt_synthesis_options; 0: 2,000, as a turn of many */
};

enum { HAPT_ALTERNATION_TURNS = 8, HAPT_ALTERNATION_STARTS = 4 };
/* One turn: a program for the ratios, then ratios for the program. */
struct hapt_alternation_turn {
    const char
        *start; /* "proportional", "even", "segments" (all at the best ratios so far), "fig. 2" (each by itself) */
    int segments;
    double program_s; /* HAP (1) at the ratios before */
    double ratios_s;  /* HAP (2) at the new ones, in whole units; INFINITY where they cannot be had or do not fit */
    double synthesis_seconds, solve_seconds; /* how long it took */
};

struct hapt_alternation_result {
    struct hapt_axis axis;
    int *ratio_of; /* [forward_count] */
    int segment_count;
    int *segment_end; /* [segment_count] forward operators */
    struct hapt_axis_program program;
    struct hapt_program_price price;
    struct hapt_synthesis_report report; /* of the synthesis that gave the program */
    const char *origin; /* what gave it: a start, or "data parallel" where no synthesised program was cheaper */
    int turn_count;
    struct hapt_alternation_turn turn[HAPT_ALTERNATION_TURNS * HAPT_ALTERNATION_STARTS];
    const char *ended;  /* of the start that gave the program: "converged", "oscillated", "turns" */
    const char *solver; /* of the ratios */
    double seconds;
};

/* HAPT_ERR_INFEASIBLE when no program fits the memory at any ratios tried. Rank-local, deterministic but for times;
 * everything lives in `arena`. */
enum hapt_status hapt_alternate(const struct hapt_alternation *alternation, struct hapt_arena *arena,
                                struct hapt_alternation_result *result);
/* HAP (2) alone: the best ratios for a given program (one vector), and what it costs per microbatch at these, at even
 * and at proportional ones (HAP Fig. 2); INFINITY where it cannot be had. Memory binds as asked. Everything lives in
 * `arena`. */
struct hapt_ratio_regimes {
    double best_s, even_s, proportional_s;
    const double *ratio; /* [devices] */
};
enum hapt_status hapt_alternation_ratios(const struct hapt_alternation *alternation,
                                         const struct hapt_axis_program *program, struct hapt_arena *arena,
                                         struct hapt_ratio_regimes *regimes);
/* Data parallelism at ratios in proportion to `ratio` [devices] (NULL: even), priced in the same way.
 * HAPT_ERR_INFEASIBLE where the model's rows cannot be shared out so; memory is not looked at. */
enum hapt_status hapt_alternation_data_parallel(const struct hapt_alternation *alternation, const double *ratio,
                                                struct hapt_arena *arena, struct hapt_axis *axis,
                                                struct hapt_axis_program *program, struct hapt_program_price *price);

#endif
