/* What the files of the alternation share. */
#ifndef HAPT_SPMD_ALTERNATE_PRIVATE_H
#define HAPT_SPMD_ALTERNATE_PRIVATE_H

#include "hapt/alternate.h"
#include "hapt/ratios.h"
#include "synthesis_fold.h"

enum { HAPT_ALTERNATION_DEVICES = 1024 };

struct alternating {
    const struct hapt_alternation *asked;
    double microbatches;
    struct hapt_synthesis_options options; /* ratio_of as the segments are now */
    int *ratio_of;                         /* [forward_count] */
};

static inline double share_of_axis(const struct hapt_axis *axis, int ratio, int device)
{
    return axis->ratio ? axis->ratio[(size_t)ratio * axis->size + device] : 1.0 / axis->size;
}

/* The exact price of a program at the ratios of an axis. */
enum hapt_status alternating_price(const struct alternating *alternating, const struct hapt_axis *axis,
                                   const struct hapt_axis_program *program, struct hapt_arena *arena,
                                   struct hapt_program_price *price);
/* The ratios' problem of a program that was made at `axis`, by tangents there; `here` is its price. */
enum hapt_status alternating_ratio_problem(const struct alternating *alternating, const struct hapt_axis *axis, int segments,
                                           const struct hapt_axis_program *program, const struct hapt_program_price *here,
                                           struct hapt_arena *arena, struct hapt_ratio_problem *problem);
/* Parts the layers into at most asked->segments runs by computation over communication of a program; returns their number, with
 * ratio_of and end [segments] (forward operators) filled. */
enum hapt_status alternating_segments(const struct alternating *alternating, const struct hapt_axis *axis,
                                      const struct hapt_axis_program *program, struct hapt_arena *arena, int *ratio_of, int *end,
                                      int *count);

#endif
