/* What the files of the alternation share. */
#ifndef HAPT_SPMD_ALTERNATE_PRIVATE_H
#define HAPT_SPMD_ALTERNATE_PRIVATE_H

#include "hapt/alternate.h"
#include "hapt/progress.h"
#include "hapt/ratios.h"
#include "synthesis_fold.h"

enum { HAPT_ALTERNATION_DEVICES = 1024, MOST_SEGMENTS = 16 };

struct alternating {
    const struct hapt_alternation *asked;
    double microbatches;
    struct hapt_synthesis_options options; /* ratio_of as the segments are now */
    int *ratio_of;                         /* [forward_count] */
    struct hapt_progress *progress;        /* by turns; NULL: not shown */
};

static inline double share_of_axis(const struct hapt_axis *axis, int ratio, int device)
{
    return axis->ratio ? axis->ratio[(size_t)ratio * axis->size + device] : 1.0 / axis->size;
}

/* The exact price of a program at the ratios of an axis. */
enum hapt_status alternating_price(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, struct hapt_arena *arena,
                                   struct hapt_program_price *price);
/* The ratios' problem of a program that was made at `axis`, by tangents there; `here` is its price. Segment k of the
 * axis belongs to run run_of[k]; runs rise from 0 and are the problem's segments. */
enum hapt_status alternating_ratio_problem(const struct alternating *alternating, const struct hapt_axis *axis,
                                           const int *run_of, const struct hapt_axis_program *program,
                                           const struct hapt_program_price *here, struct hapt_arena *arena,
                                           struct hapt_ratio_problem *problem);
/* The least ratios of a program: which neighbouring segments share theirs (what crosses between two that do not is
 * shared out anew), and the ratios of each run. ratio [axis->ratio_count][axis->size]. HAPT_ERR_INFEASIBLE where none
 * fit the memory. */
enum hapt_status alternating_solve(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                   struct hapt_arena *arena, double **ratio, const char **solver);
/* Whether a program computes for longer than it communicates in each of the segments that end at end [count]. */
enum hapt_status alternating_lean(const struct alternating *alternating, const struct hapt_axis *axis,
                                  const struct hapt_axis_program *program, const int *end, int count,
                                  struct hapt_arena *arena, bool *computes);
/* Parts the layers into at most asked->segments runs by computation over communication of a program; returns their
 * number, with ratio_of and end [segments] (forward operators) filled. */
enum hapt_status alternating_segments(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, struct hapt_arena *arena, int *ratio_of,
                                      int *end, int *count);

#endif
