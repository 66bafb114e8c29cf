/*
 * Which units of a range recompute their activations (AutoHete 4). If all units of a model are equal, as many of the
 * first ones as asked for. Of unlike units those that free the bytes asked for in the least time: a small integer
 * program, in which units of one kind are one variable.
 */
#ifndef HAPT_UNIT_CHOICE_H
#define HAPT_UNIT_CHOICE_H

#include "hapt/graph.h"
#include "hapt/memory.h"

struct hapt_unit_choices;
/* Measures what units free, on one device, and how long they run again, in operations: a byte read or written counts as
 * 100. unit [count]: in order; the caller keeps them. */
enum hapt_status hapt_unit_choices_create(const struct hapt_graph *graph, const struct hapt_unit *unit, int count,
                                          struct hapt_arena *arena, struct hapt_unit_choices **choices);
/* True if there are several kinds of units. */
bool hapt_unit_choices_differ(const struct hapt_unit_choices *choices);
/* What the units of operators [first_op, end_op) recompute, for a number as in layers.h. choice [count]: enum
 * hapt_unit_choice, set for those that lie in the range, [*first, *end). Answers are remembered: one thread at a time.
 */
enum hapt_status hapt_unit_choose(struct hapt_unit_choices *choices, int first_op, int end_op, int recompute,
                                  unsigned char *choice, int *first, int *end);

#endif
