/* Declarations shared by the files of the alternation. */
#ifndef HAPT_SYNTHESIS_ALTERNATE_PRIVATE_H
#define HAPT_SYNTHESIS_ALTERNATE_PRIVATE_H

#include "hapt/alternate.h"
#include "hapt/progress.h"
#include "hapt/ratios.h"
#include "synthesis_private.h"

enum { HAPT_ALTERNATION_DEVICES = 1024, MOST_SEGMENTS = 16 };

struct alternating {
    const struct hapt_alternation *asked;
    double microbatches;
    struct hapt_synthesis_options options; /* ratio_of as for the current segments */
    int *ratio_of;                         /* [forward_count] */
    struct hapt_progress *progress;        /* in turns; NULL: not shown */
};

/* The exact price of a program at the ratios of an axis. */
enum hapt_status alternating_price(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, struct hapt_arena *arena,
                                   struct hapt_program_price *price);
/* The best ratios for a program, and the neighbouring segments that share them. Tensors between segments with
 * different ratios are resharded. ratio [axis->ratio_count][axis->size]; *solver: hapt_ratio_result.
 * HAPT_ERR_INFEASIBLE if none fit the memory. */
enum hapt_status alternating_solve(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                   struct hapt_arena *arena, double **ratio, const char **solver);
/* computes [count]: true if a program computes longer than it communicates in the segment that ends at end[k]. */
enum hapt_status alternating_computes(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, const int *end, int count,
                                      struct hapt_arena *arena, bool *computes);
/* Splits the layers into at most asked->segments runs by a program's computation over communication. *count: their
 * number. Fills ratio_of and end [*count] (forward operators). */
enum hapt_status alternating_segments(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, struct hapt_arena *arena, int *ratio_of,
                                      int *end, int *count);

#endif
