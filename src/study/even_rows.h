/*
 * Inside src/study: rows of equal submeshes that use every device. Systems for equal devices plan on such rows:
 * Megatron, DeepSpeed, Colossal-AI, Pfeife.
 */
#ifndef HAPT_STUDY_EVEN_ROWS_H
#define HAPT_STUDY_EVEN_ROWS_H

#include "baselines.h"

/* Submeshes of one shape, in pipeline order. */
struct even_row {
    const struct hapt_profile *profile;
    struct hapt_submesh shape;
    int count;       /* S */
    int *subcluster; /* [count] */
    int pass;
};

/* Calls `take` for each row: every shape without programs of the profile's layouts, every order of the subclusters.
 * Shapes that leave devices over are omitted. `tensor_parallel` false: data-parallel shapes only. The rows of a shape
 * are passed `passes` times. Stops at the first failure. */
enum hapt_status even_rows_each(const struct hapt_profile *profile, bool tensor_parallel, int passes,
                                enum hapt_status (*take)(void *context, const struct even_row *row), void *context);

/* Units that a system cuts between: blocks if `block_end` is known, else layers. unit_end [L]; returns their number. */
int even_rows_units(const struct hapt_profile *profile, const bool *block_end, int *unit_end);
/* A plan of the row, without prices: submesh i has layers [end[i - 1], end[i]). */
enum hapt_status even_rows_plan(const struct even_row *row, const struct hapt_search_options *options, const int *end,
                                struct hapt_arena *arena, struct hapt_plan **plan);
/* What the row's shape takes for layers [first, end) on a device that is the mean of all: for systems that take devices
 * for equal. Times NAN: no subcluster has such a stage. */
struct even_stage {
    double stage_s, forward_s, step_s, parameter_bytes, activation_bytes;
};
struct even_stage even_rows_mean(const struct even_row *row, int first, int end);
/* The ends of submeshes that hold about equal `weight` of the mean stage: the least largest one. Only ends of units. */
enum hapt_status even_rows_balance(const struct even_row *row, const int *unit_end, int units,
                                   double (*weight)(const struct even_stage *stage), struct hapt_arena *scratch,
                                   int *end);
/* The fastest simulated plan whose submeshes hold about equal `weight` of the mean stage, over all rows. */
enum hapt_status even_rows_best(const struct hapt_profile *profile, enum hapt_strategy strategy,
                                const struct hapt_strategy_options *options, bool tensor_parallel,
                                double (*weight)(const struct even_stage *stage), struct hapt_arena *result,
                                struct hapt_plan **plan);

#endif
